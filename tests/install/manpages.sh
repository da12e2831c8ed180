#!/bin/bash
# SPDX-License-Identifier: MIT
#
# Every function that the library exports has a manual page that names it and shows its arguments; hreducectl(1) has
# every command and every check of its doctor; and the pages are without errors.
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

cd "$HREDUCE_ROOT/daemon"
commands=$("$HREDUCE_BUILD/hreducectl" --help | sed -n '/^commands:/,/^options:/s/^  \([a-z]*\) .*/\1/p')
[ -n "$commands" ] || fail "hreducectl --help lists no command"
for command in $commands; do
    grep -qE "^\.BR? $command( |$)" man/hreducectl.1 || fail "hreducectl.1 is without the command $command"
done
checks=$(sed -n 's/^    {"\([a-z-]*\)", "[a-z]*", hrd_check_.*/\1/p' doctor/doctor.c
    grep -ohE '"cluster-[a-z]+"' doctor/cluster.c | tr -d '"' | sort -u)
[ "$(wc -w <<<"$checks")" -gt 30 ] || fail "the checks of the doctor were not found"
for check in $checks; do
    # A hyphen is \- in a manual page.
    grep -qE "(^| )${check//-/\\\\-}( |$)" man/hreducectl.1 || fail "hreducectl.1 is without the check $check"
done

cd "$HREDUCE_ROOT/client/man"
need groff
for file in hclient.3 hclient_*.3 hreduce-perf.1 "$HREDUCE_ROOT"/daemon/man/*; do
    grep -q '^\.so' "$file" && continue
    warnings=$(groff -man -Tutf8 -wall -z "$file" 2>&1)
    expect_equal "$warnings" "" "what groff says about $file"
done
