#!/bin/bash
# SPDX-License-Identifier: MIT
#
# The test runner itself: a suite that hides a failure is worse than none. A small tree of tests that pass,
# fail, hang, skip, die and leave processes behind must be told apart.
# shellcheck disable=SC2016 # what the small tests expand is theirs
. "$HREDUCE_ROOT/tests/lib/common.sh"

tree=$TMPDIR/tree
mkdir -p "$tree/tests/some" "$tree/tests/bench" "$tree/build/obj"
cp "$HREDUCE_ROOT/tests/run" "$tree/tests/"
add()
{
    cat >"$tree/tests/$1"
}
add some/pass.sh <<<'test -d "$TMPDIR" && test -z "$(ls -A "$TMPDIR")" && touch "$TMPDIR/mess"'
add some/fail.sh <<<'echo some words; exit 3'
add some/said.sh <<<'echo "FAILED: the sum is wrong"; echo "a log follows"; exit 1'
add some/skip.sh <<<'echo "SKIP: no such device"; exit 77'
add some/dies.sh <<<'kill -SEGV $$'
# In two pieces, so that the runner does not take it for this test's own limit.
# The times have our number in them: others on this machine may sleep, too.
add some/hang.sh <<<'# time''out: 1
sleep '"1000.$$"
add some/left.sh <<<"setsid sleep 1001.$$ >/dev/null 2>&1 & exit 0"
add some/nameless.sh <<<"env -i setsid sleep 1002.$$ >/dev/null 2>&1 & exit 0"
add some/quiet_report.sh <<<'echo "heap-use-after-free" >"$(sed "s/.*log_path=\([^:]*\).*/\1/" <<<"$ASAN_OPTIONS").1"'
add some/helper_tool.sh <<<'exit 1'
add bench/slow.sh <<<'exit 1'
add some/python.py <<<'import os; assert "RANK" not in os.environ'

status=0
RANK=1 HREDUCE_TIME_SCALE=1 "$tree/tests/run" --build "$tree/build" >"$TMPDIR/out" 2>&1 || status=$?
out=$(cat "$TMPDIR/out")
expect_equal "$status" 1 "exit status of a suite with failures"
expect_equal "$(tail -n 1 "$TMPDIR/out")" "2 passed, 7 failed, 1 skipped"
for line in 'FAIL.*some/fail.sh.*exit status 3: some words' 'FAIL.*some/said.sh.*exit status 1: the sum is wrong' 'skip.*some/skip.sh.*no such device' \
    'FAIL.*some/dies.sh.*SIGSEGV' 'FAIL.*some/hang.sh.*longer than 1 s' 'FAIL.*some/left.sh.*left processes.*sleep 1001' \
    'FAIL.*some/nameless.sh.*left processes' 'FAIL.*quiet_report.*a sanitizer reported: heap-use-after-free'; do
    expect_match "$out" "$line"
done
if pgrep -f "sleep 100[012]\\.$$" >"$TMPDIR/alive"; then
    fail "the runner left processes alive: $(cat "$TMPDIR/alive")"
fi

said=$("$tree/tests/run" --build "$tree/build" -k pass -k 'some/sk*' | tail -n 1)
expect_equal "$said" "1 passed, 0 failed, 1 skipped"
status=0
"$tree/tests/run" --build "$tree/build" -k no_such_test >/dev/null 2>&1 || status=$?
expect_equal "$status" 2 "exit status when no test matches"
