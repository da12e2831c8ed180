#!/bin/sh
# SPDX-License-Identifier: MIT
#
# run.sh BUILD SECONDS: runs every libFuzzer target of BUILD, the time split evenly over them. Seeds are
# tests/fuzz/corpus/TARGET (in the tree, a former crash is added there); what a run finds is kept in
# BUILD/corpus/TARGET for the next one, and an input that crashes in BUILD/crashes.
set -eu

build=$1
seconds=$2
cd "$(dirname "$0")/../.."

targets=
count=0
for source in tests/fuzz/fuzz_*.c; do
    [ -e "$source" ] || continue
    targets="$targets $(basename "$source" .c)"
    count=$((count + 1))
done
if [ "$count" = 0 ]; then
    echo "fuzz: there is no tests/fuzz/fuzz_*.c"
    exit 0
fi

share=$((seconds / count))
[ "$share" -ge 1 ] || share=1
mkdir -p "$build/crashes"
bad=0
for target in $targets; do
    found=$build/corpus/$target
    seeds=tests/fuzz/corpus/$target
    mkdir -p "$found"
    [ -d "$seeds" ] || seeds=
    log=$build/crashes/$target.log
    # shellcheck disable=SC2086 # no seeds, no argument
    if "$build/tests/fuzz/$target" -max_total_time="$share" -timeout=10 -rss_limit_mb=2048 \
        -artifact_prefix="$build/crashes/$target-" -print_final_stats=1 "$found" $seeds >"$log" 2>&1; then
        executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
        echo "ok    $target: $executions inputs in $share s"
    else
        bad=$((bad + 1))
        echo "FAIL  $target:"
        tail -n 60 "$log" | sed 's/^/    /'
        echo "    the input is in $build/crashes; replay: $build/tests/fuzz/$target FILE"
    fi
done
[ "$bad" = 0 ] || {
    echo "fuzz: $bad of $count targets failed"
    exit 1
}
echo "fuzz: $count targets found nothing"
