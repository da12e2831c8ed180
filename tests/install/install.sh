#!/bin/bash
# SPDX-License-Identifier: MIT
#
# A packager's steps: make install into a directory, a foreign program built against that through pkg-config,
# an existing configuration kept, make uninstall leaving nothing else.
. "$HREDUCE_ROOT/tests/lib/common.sh"

[ -e "$HREDUCE_BUILD/libhclient.so.0" ] || skip "libhclient is not built"
sanitized && skip "a sanitized build is not for installing"
need make gcc pkg-config

root=$TMPDIR/root
do_make()
{
    make -C "$HREDUCE_ROOT" --no-print-directory BUILD="$HREDUCE_BUILD" SKIP_BUILD=1 DESTDIR="$root" PREFIX=/usr "$@"
}
do_make install >"$TMPDIR/log" 2>&1 || fail "make install: $(tail -n 20 "$TMPDIR/log")"

for file in include/hclient.h lib/libhclient.so.0 lib/libhclient.so lib/pkgconfig/hclient.pc; do
    [ -e "$root/usr/$file" ] || fail "$file was not installed"
done
unreplaced=$(grep -rlE '@[A-Za-z]+@' "$root" --include='*.pc' --include='*.service' --include='*.socket' \
    --include='*.conf' || true)
expect_equal "$unreplaced" "" "files with an unreplaced @word@"

unit=$root/usr/lib/systemd/system/hreduced.service
if [ -e "$unit" ]; then
    program=$(sed -n 's/^ExecStart=[-@:+!]*\([^ ]*\).*/\1/p' "$unit")
    [ -x "$root$program" ] || fail "the unit starts $program, which was not installed"
fi

cat >"$TMPDIR/job.c" <<'END'
#include <hclient.h>
#include <stdio.h>
int main(void)
{
    printf("%s\n", hclient_strerror((hclient_result_t)0));
    return 0;
}
END
export PKG_CONFIG_PATH=$root/usr/lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=$root
# shellcheck disable=SC2046 # a list of options
gcc -std=c11 -pedantic -Wall -Wextra -Werror "$TMPDIR/job.c" $(pkg-config --cflags --libs hclient) -o "$TMPDIR/job"
said=$(LD_LIBRARY_PATH=$root/usr/lib "$TMPDIR/job")
[ -n "$said" ] || fail "the program said nothing"
if command -v g++ >/dev/null; then
    # shellcheck disable=SC2046
    g++ -std=c++11 -x c++ -Wall -Wextra -Werror "$TMPDIR/job.c" $(pkg-config --cflags --libs hclient) \
        -o "$TMPDIR/job++"
fi
if [ -x "$root/usr/bin/hreduce-perf" ]; then
    LD_LIBRARY_PATH='' ldd "$root/usr/bin/hreduce-perf" | grep -q "libhclient.so.0 => $root" ||
        fail "an installed hreduce-perf does not find its library"
fi

conf=$root/etc/hreduced/hreduced.conf
if [ -e "$conf" ]; then
    echo "# edited by the administrator" >>"$conf"
    do_make install >"$TMPDIR/log" 2>&1
    expect_match "$(tail -n 1 "$conf")" administrator
fi

do_make uninstall >"$TMPDIR/log" 2>&1 || fail "make uninstall: $(tail -n 20 "$TMPDIR/log")"
left=$(find "$root" -type f -o -type l | grep -v '/etc/hreduced/' || true)
expect_equal "$left" "" "files left by make uninstall"
