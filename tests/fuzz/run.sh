#!/bin/sh
# SPDX-License-Identifier: MIT
#
# run.sh BUILD SECONDS: runs every libFuzzer target of BUILD, one a core at a time, the seconds split evenly so
# that the whole takes about SECONDS. Seeds are tests/fuzz/corpus/TARGET (in the tree: a former crash is added
# there); what a run finds is kept in BUILD/corpus/TARGET for the next one, and an input that crashes in
# BUILD/crashes.
set -eu

one_target()
{
    build=$1
    share=$2
    target=$3
    found=$build/corpus/$target
    seeds=tests/fuzz/corpus/$target
    log=$build/crashes/$target.log
    mkdir -p "$found"
    [ -d "$seeds" ] || seeds=
    # shellcheck disable=SC2086 # no seeds, no argument
    if "$build/tests/fuzz/$target" -seed="${FUZZ_SEED:-0}" -max_total_time="$share" -timeout=10 -rss_limit_mb=2048 \
        -artifact_prefix="$build/crashes/$target-" -print_final_stats=1 "$found" $seeds >"$log" 2>&1; then
        echo "ok    $target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs in $share s"
    else
        echo "FAIL  $target:"
        tail -n 60 "$log" | sed 's/^/    /'
        echo "    the input is in $build/crashes; to replay it: $build/tests/fuzz/$target FILE"
        return 1
    fi
}

cd "$(dirname "$0")/../.."
if [ "$1" = --one ]; then
    shift
    one_target "$@"
    exit
fi

build=$1
seconds=$2
targets=$(for source in tests/fuzz/fuzz_*.c; do [ ! -e "$source" ] || basename "$source" .c; done)
count=$(echo "$targets" | wc -w)
if [ "$count" = 0 ]; then
    echo "fuzz: there is no tests/fuzz/fuzz_*.c"
    exit 0
fi

at_once=$(nproc)
[ "$at_once" -le "$count" ] || at_once=$count
share=$((seconds * at_once / count))
[ "$share" -ge 1 ] || share=1
mkdir -p "$build/crashes"
if echo "$targets" | xargs -n 1 -P "$at_once" tests/fuzz/run.sh --one "$build" "$share"; then
    echo "fuzz: $count targets found nothing"
else
    echo "fuzz: some of $count targets failed"
    exit 1
fi
