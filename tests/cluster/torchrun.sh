#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# A job under torchrun: its ranks find each other and their daemon by the launcher's variables alone.
# timeout: 120
. "$HREDUCE_ROOT/tests/lib/common.sh"

need torchrun
# Debian's torch 1.13 has a launcher that does not work with its Python 3.11.
launch=(torchrun --standalone --nnodes 1 --nproc_per_node 4 --no_python)
"${launch[@]}" true > /dev/null 2>&1 || skip "torchrun cannot start anything here"
two_nodes 18517
perf_rank RANK

# Its own meeting point is a matter of torch; ours has an address of its own.
export HREDUCE_ROOT_ADDR=127.0.0.1
output=$("${launch[@]}" "$TMPDIR/rank.sh" 2>&1) || fail "torchrun: $output"
perf_was_right "$output"
