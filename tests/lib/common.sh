# shellcheck shell=bash
# SPDX-License-Identifier: MIT
#
# What every test script begins with:
#     . "$HREDUCE_ROOT/tests/lib/common.sh"
# It stops the script at the first failing command, and names the line.

set -euo pipefail
trap 'echo "failed: $BASH_SOURCE line $LINENO: $BASH_COMMAND" >&2' ERR
set -E

: "${HREDUCE_ROOT:?tests are started by tests/run}" "${HREDUCE_BUILD:?}" "${TMPDIR:?}"

fail()
{
    echo "FAIL: $*" >&2
    exit 1
}

# The test cannot run here; the reason is printed and counted.
skip()
{
    echo "SKIP: $*"
    exit 77
}

# need COMMAND...: skips without them.
need()
{
    local command
    for command in "$@"; do
        command -v "$command" >/dev/null || skip "there is no command $command here"
    done
}

need_root()
{
    [ "$(id -u)" = 0 ] || skip "this test needs root"
}

sanitized()
{
    [ -n "$HREDUCE_SANITIZE" ]
}

# wait_for SECONDS COMMAND...: until it succeeds; longer under sanitizers.
wait_for()
{
    local end=$((SECONDS + $1 * HREDUCE_TIME_SCALE))
    shift
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -le "$end" ] || fail "waited in vain for: $*"
        sleep 0.05
    done
}

expect_equal()
{
    [ "$1" = "$2" ] || fail "${3:-values differ}: got '$1', expected '$2'"
}

# expect_match TEXT REGEX
expect_match()
{
    [[ $1 =~ $2 ]] || fail "no '$2' in: $1"
}

# A Python that may load libhclient by ctypes: a sanitized library needs its runtime loaded first, and the
# interpreter itself leaks at exit by design.
run_python()
{
    if [ -n "$HREDUCE_PRELOAD" ]; then
        LD_PRELOAD=$HREDUCE_PRELOAD ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 "$HREDUCE_PYTHON" "$@"
    else
        "$HREDUCE_PYTHON" "$@"
    fi
}

# ---------------------------------------------------------------- jobs of a launcher

# two_nodes PORT: two daemons on this machine stand for two nodes; they end with the script.
two_nodes()
{
    local node
    daemons=()
    for node in 0 1; do
        cat >"$TMPDIR/$node.conf" <<END
socket = $TMPDIR/$node.sock
listen = 127.0.0.$((node + 1))
port = $1
node_name = node$node
END
        "$HREDUCE_BUILD/hreduced" --config "$TMPDIR/$node.conf" >"$TMPDIR/$node.log" 2>&1 &
        daemons+=($!)
    done
    trap stop_nodes EXIT
    wait_for 10 test -S "$TMPDIR/0.sock"
    wait_for 10 test -S "$TMPDIR/1.sock"
}

stop_nodes()
{
    kill "${daemons[@]}" 2>/dev/null || true
    wait "${daemons[@]}" || true
}

# perf_rank VARIABLE: makes $TMPDIR/rank.sh, one of 4 ranks of hreduce-perf, two a node. On a cluster every rank uses the
# socket of its own node; here it picks one by the rank that the launcher gives it in VARIABLE.
perf_rank()
{
    cat >"$TMPDIR/rank.sh" <<END
#!/bin/sh
export HREDUCE_SOCKET="$TMPDIR/\$((\$$1 / 2)).sock"
exec "$HREDUCE_BUILD/hreduce-perf" -b 1M -n 4 --json "$TMPDIR/out.json"
END
    chmod +x "$TMPDIR/rank.sh"
}

# perf_was_right OUTPUT: what the ranks of perf_rank printed and wrote.
perf_was_right()
{
    expect_match "$1" '4 ranks on 2 nodes'
    expect_match "$1" 'Wrong elements       : 0 OK'
    "$HREDUCE_PYTHON" - "$TMPDIR/out.json" <<'END'
import json, sys
results = json.load(open(sys.argv[1]))["results"]
assert len(results) == 2 and all(r["wrong"] == 0 for r in results), results
END
}
