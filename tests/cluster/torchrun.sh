#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# A job under torchrun: its ranks find each other and their daemon by the launcher's variables alone.
# timeout: 120
. "$HREDUCE_ROOT/tests/lib/common.sh"

need torchrun
# Debian's torch 1.13 has a launcher that does not work with its Python 3.11.
launch=(torchrun --standalone --nnodes 1 --nproc_per_node 4 --no_python)
"${launch[@]}" true > /dev/null 2>&1 || skip "torchrun cannot start anything here"
PATH=$HREDUCE_BUILD:$PATH

# Two daemons on this machine stand for two nodes: each rank picks one by its number. On a cluster every rank
# uses the socket of its own node.
for node in 0 1; do
    cat > "$TMPDIR/$node.conf" <<END
socket = $TMPDIR/$node.sock
listen = 127.0.0.$((node + 1))
port = 18517
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
export HREDUCE_SOCKET="$TMPDIR/$((RANK / 2)).sock"
exec hreduce-perf -b 1M -n 4 --json "$TMPDIR/out.json"
END
chmod +x "$TMPDIR/rank.sh"

# Its own meeting point is a matter of torch; ours has an address of its own.
export HREDUCE_ROOT_ADDR=127.0.0.1
output=$("${launch[@]}" "$TMPDIR/rank.sh" 2>&1) || fail "torchrun: $output"
expect_match "$output" '4 ranks on 2 nodes'
expect_match "$output" 'Wrong elements       : 0 OK'
"$HREDUCE_PYTHON" - "$TMPDIR/out.json" <<'END'
import json, sys
results = json.load(open(sys.argv[1]))["results"]
assert len(results) == 2 and all(r["wrong"] == 0 for r in results), results
END
