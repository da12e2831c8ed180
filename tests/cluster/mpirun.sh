#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# A job under Open MPI's mpirun: its ranks find each other and their daemon by the launcher's variables alone.
# timeout: 120
. "$HREDUCE_ROOT/tests/lib/common.sh"

need mpirun
two_nodes 18516
perf_rank OMPI_COMM_WORLD_RANK

options=(--oversubscribe --bind-to none --mca plm isolated -x MASTER_ADDR=127.0.0.1)
[ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)
output=$(mpirun "${options[@]}" -np 4 "$TMPDIR/rank.sh" 2>&1) || fail "mpirun: $output"
perf_was_right "$output"
