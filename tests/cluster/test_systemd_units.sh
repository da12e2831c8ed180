#!/bin/bash
# SPDX-License-Identifier: MIT
#
# The units as they are installed: valid, hardened, naming a program that is there.
. "$HREDUCE_ROOT/tests/lib/common.sh"

need systemd-analyze
[ -x "$HREDUCE_BUILD/hreduced" ] || skip "hreduced is not built"

units=$TMPDIR/units
mkdir -p "$units" "$TMPDIR/sbin" "$TMPDIR/etc"
cp "$HREDUCE_BUILD/hreduced" "$TMPDIR/sbin/hreduced"
for file in "$HREDUCE_ROOT"/systemd/*.service.in "$HREDUCE_ROOT"/systemd/*.socket; do
    name=$(basename "$file")
    sed -e "s|@sbindir@|$TMPDIR/sbin|g" -e "s|@sysconfdir@|$TMPDIR/etc|g" "$file" >"$units/${name%.in}"
done
if grep -l '@[a-zA-Z]*@' "$units"/*; then
    fail "an unreplaced @word@"
fi

# --man=no: the manual pages are not installed here.
said=$(SYSTEMD_UNIT_PATH=$units: systemd-analyze verify --man=no "$units/hreduced.service" "$units/hreduced.socket" 2>&1) ||
    fail "systemd-analyze verify: $said"
# Other units of the machine may be complained about; ours must not.
if grep hreduce <<<"$said"; then
    fail "systemd-analyze verify has something to say"
fi
# It must be able to find a mistake at all.
sed 's/^WatchdogSec=.*/WatchdogSec=often/' "$units/hreduced.service" >"$units/hreduced-bad.service"
said=$(systemd-analyze verify --man=no "$units/hreduced-bad.service" 2>&1 || true)
expect_match "$said" "Failed to parse"

if systemd-analyze security --help 2>/dev/null | grep -q -- --offline; then
    score=$(systemd-analyze security --offline=true --no-pager "$units/hreduced.service" 2>/dev/null |
        sed -n 's/.*exposure level for .*: \([0-9.]*\) .*/\1/p')
    [ -n "$score" ] || fail "systemd-analyze security gives no score"
    echo "exposure $score"
    awk "BEGIN { exit !($score <= 3.0) }" || fail "the exposure level is $score, more than 3.0"
fi

# The configured socket and the socket unit's are the same.
expect_equal "$(sed -n 's/^ListenSequentialPacket=//p' "$units/hreduced.socket")" \
    "$("$HREDUCE_BUILD/hreduced" --print-config | sed -n 's/^#socket = //p')" "socket unit and key"
if command -v systemd-sysusers >/dev/null && systemd-sysusers --help | grep -q -- --dry-run; then
    systemd-sysusers --dry-run "$HREDUCE_ROOT"/systemd/sysusers.d/hreduced.conf >/dev/null || fail "sysusers.d"
fi
