#!/bin/bash
# SPDX-License-Identifier: MIT
# The README's example is the program that the build compiled, and it works: two ranks on one daemon.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${HREDUCE_BUILD:-build}

if ! diff <(awk '/^```c$/ { on = 1; next } /^```$/ { on = 0 } on' README.md) <(tail -n +3 client/examples/allreduce.c); then
    echo "README.md shows another program than client/examples/allreduce.c"
    exit 1
fi

dir=$(mktemp -d)
daemon=
trap '[ -z "$daemon" ] || kill "$daemon"; wait; rm -rf "$dir"' EXIT
export HREDUCE_SOCKET=$dir/s
port=$((20000 + RANDOM % 10000))
printf 'socket = %s\nport = %s\n' "$HREDUCE_SOCKET" "$port" >"$dir/conf"
"$build/hreduced" --config "$dir/conf" >"$dir/log" 2>&1 &
daemon=$!
for _ in $(seq 200); do
    [ -S "$HREDUCE_SOCKET" ] && break
    sleep 0.05
done
export MASTER_ADDR=127.0.0.1 WORLD_SIZE=2
RANK=1 LOCAL_RANK=1 timeout 30 "$build/examples/allreduce" &
other=$!
said=$(RANK=0 LOCAL_RANK=0 timeout 30 "$build/examples/allreduce") || { cat "$dir/log"; exit 1; }
wait "$other"
[ "$said" = "sum over 2 ranks: 1" ] || { echo "the example said '$said'"; exit 1; }
