#!/bin/bash
# SPDX-License-Identifier: MIT
#
# Every function that the library exports has a manual page that names it and shows its arguments, and the pages
# are without errors.
. "$HREDUCE_ROOT/tests/lib/common.sh"

cd "$HREDUCE_ROOT/client/man"
functions=$(grep -oE '^ +hclient_[a-z0-9_]+;' ../hclient.map | tr -d ' ;')
[ -n "$functions" ] || fail "client/hclient.map names no function"

for function in $functions; do
    [ -e "$function.3" ] || fail "client/man/$function.3 is missing"
    page=$(sed -n 's|^\.so man3/||p' "$function.3")
    page=${page:-$function.3}
    [ -e "$page" ] || fail "$function.3 leads to $page, which is missing"
    sed -n '/^\.SH NAME/,/^\.SH SYNOPSIS/p' "$page" | grep -qw "$function" || fail "$page does not name $function"
    sed -n '/^\.SH SYNOPSIS/,/^\.SH DESCRIPTION/p' "$page" | grep -q "$function(" ||
        fail "the synopsis of $page is without $function"
done

for file in hclient_*.3; do
    grep -qxF "${file%.3}" <<<"$functions" || fail "$file is of no function that is exported"
done

need groff
for file in hclient.3 hclient_*.3; do
    grep -q '^\.so' "$file" && continue
    warnings=$(groff -man -Tutf8 -wall -z "$file" 2>&1)
    expect_equal "$warnings" "" "what groff says about $file"
done
