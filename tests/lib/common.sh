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
