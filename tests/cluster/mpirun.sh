#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# A job under Open MPI's mpirun: its ranks find each other and their daemon by the launcher's variables alone.
# timeout: 120
. "$HREDUCE_ROOT/tests/lib/common.sh"

need mpirun
PATH=$HREDUCE_BUILD:$PATH

# Two daemons on this machine stand for two nodes: each rank picks one by its number. On a cluster every rank
# uses the socket of its own node.
for node in 0 1; do
    cat > "$TMPDIR/$node.conf" <<END
socket = $TMPDIR/$node.sock
listen = 127.0.0.$((node + 1))
port = 18516
node_name = node$node
END
    hreduced --config "$TMPDIR/$node.conf" > "$TMPDIR/$node.log" 2>&1 &
    daemons+=($!)
done
stop()
{
    kill "${daemons[@]}" 2> /dev/null || true
    wait "${daemons[@]}" || true
}
trap stop EXIT
wait_for 10 test -S "$TMPDIR/0.sock"
wait_for 10 test -S "$TMPDIR/1.sock"

cat > "$TMPDIR/rank.sh" <<'END'
#!/bin/sh
export HREDUCE_SOCKET="$TMPDIR/$((OMPI_COMM_WORLD_RANK / 2)).sock"
exec hreduce-perf -b 1M -n 4 --json "$TMPDIR/out.json"
END
chmod +x "$TMPDIR/rank.sh"

options=(--oversubscribe --bind-to none --mca plm isolated -x MASTER_ADDR=127.0.0.1)
[ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)
output=$(mpirun "${options[@]}" -np 4 "$TMPDIR/rank.sh" 2>&1) || fail "mpirun: $output"
expect_match "$output" '4 ranks on 2 nodes'
expect_match "$output" 'Wrong elements       : 0 OK'
"$HREDUCE_PYTHON" - "$TMPDIR/out.json" <<'END'
import json, sys
results = json.load(open(sys.argv[1]))["results"]
assert len(results) == 2 and all(r["wrong"] == 0 for r in results), results
END
