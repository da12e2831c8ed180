#!/bin/bash
# SPDX-License-Identifier: MIT
#
# libhclient goes into other people's programs: it needs nothing beyond libc, exports what its header declares
# and nothing else, and is known by the name that programs were linked with.
. "$HREDUCE_ROOT/tests/lib/common.sh"

library=$HREDUCE_BUILD/libhclient.so.0
[ -e "$library" ] || skip "libhclient is not built"
need readelf nm

dynamic=$(readelf -d "$library")
expect_match "$dynamic" 'SONAME.*\[libhclient\.so\.0\]'
expect_equal "$(readlink "$HREDUCE_BUILD/libhclient.so")" libhclient.so.0 "the link for developers"

if ! sanitized; then
    needed=$(sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' <<<"$dynamic" | grep -Ev '^(libc|libpthread|ld-linux-.*)\.so\.' || true)
    expect_equal "$needed" "" "libraries needed beyond libc"
    # An executable stack or a relocation in the text would be inherited by every job.
    [[ $dynamic != *TEXTREL* ]] || fail "the library has text relocations"
    expect_match "$(readelf -lW "$library" | grep GNU_STACK)" 'RW  '
fi

exported=$(nm -D --defined-only "$library" | awk '$2 ~ /[TDBRVW]/ { sub(/@.*/, "", $3); print $3 }' | sort)
[ -n "$exported" ] || fail "the library exports nothing"
foreign=$(grep -v '^hclient_' <<<"$exported" || true)
expect_equal "$foreign" "" "exported names that are not hclient_*"

# Declared names, as the preprocessor leaves them: a word hclient_x followed by an opening bracket.
declared=$(gcc -E -P "$HREDUCE_ROOT/client/hclient.h" | grep -oE '\bhclient_[a-z0-9_]+ ?\(' | tr -d ' (' | sort -u)
difference=$(diff <(echo "$declared") <(echo "$exported") || true)
[ -z "$difference" ] || fail "declared in hclient.h (<) and exported (>) differ:
$difference"
