/* SPDX-License-Identifier: MIT */
/* Messages with descriptors: counts, truncation, foreign data, a process without free descriptors. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/fdpass.h"
#include "proto/wire.h"

static unsigned open_fds(void)
{
    unsigned n = 0;
    for (int fd = 0; fd < 256; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

struct pair {
    int a, b;
};

static struct pair make_pair(void)
{
    int sv[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv), 0);
    return (struct pair){sv[0], sv[1]};
}

static void close_pair(struct pair p)
{
    close(p.a);
    close(p.b);
}

static void test_counts(void **state)
{
    (void)state;
    struct pair p = make_pair();
    unsigned before = open_fds();
    int send[HRP_MAX_FDS] = {0, 1, 2};
    for (int sent = 0; sent <= HRP_MAX_FDS; sent++)
        for (int most = 0; most <= HRP_MAX_FDS; most++) {
            char buf[16] = "";
            int fds[HRP_MAX_FDS], nfds = 77;
            assert_int_equal(hrp_send_fds(p.a, "hello", 5, send, sent), 0);
            long n = hrp_recv_fds(p.b, buf, sizeof(buf), fds, most, &nfds);
            if (sent > most) {
                assert_int_equal(n, -EPROTO);
                assert_int_equal(nfds, 0);
            } else {
                assert_int_equal(n, 5);
                assert_memory_equal(buf, "hello", 5);
                assert_int_equal(nfds, sent);
                for (int i = 0; i < nfds; i++) {
                    assert_true(fcntl(fds[i], F_GETFD) & FD_CLOEXEC);
                    close(fds[i]);
                }
            }
            assert_int_equal(open_fds(), before);
        }
    assert_int_equal(hrp_send_fds(p.a, "x", 1, send, HRP_MAX_FDS + 1), -EINVAL);
    assert_int_equal(hrp_send_fds(p.a, "x", 1, send, -1), -EINVAL);
    assert_int_equal(hrp_send_fds(p.a, "x", 0, NULL, 0), -EINVAL);
    close_pair(p);
}

static void test_truncated(void **state)
{
    (void)state;
    struct pair p = make_pair();
    unsigned before = open_fds();
    int one = 0, fds[HRP_MAX_FDS], nfds;
    char buf[8];
    assert_int_equal(hrp_send_fds(p.a, "123456789", 9, &one, 1), 0);
    assert_int_equal(hrp_recv_fds(p.b, buf, sizeof(buf), fds, HRP_MAX_FDS, &nfds), -EPROTO);
    assert_int_equal(nfds, 0);
    assert_int_equal(open_fds(), before); /* the descriptor of the lost message too */
    assert_int_equal(hrp_send_fds(p.a, "12345678", 8, NULL, 0), 0);
    assert_int_equal(hrp_recv_fds(p.b, buf, sizeof(buf), fds, HRP_MAX_FDS, &nfds), 8);
    close_pair(p);
}

static void test_foreign(void **state)
{
    (void)state;
    struct pair p = make_pair();
    unsigned before = open_fds();
    int on = 1, one = 0, fds[HRP_MAX_FDS], nfds;
    char buf[8];
    setsockopt(p.b, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)); /* the kernel adds credentials */
    assert_int_equal(hrp_send_fds(p.a, "1", 1, &one, 1), 0);
    assert_int_equal(hrp_recv_fds(p.b, buf, sizeof(buf), fds, HRP_MAX_FDS, &nfds), -EPROTO);
    assert_int_equal(open_fds(), before);
    close_pair(p);
}

static void test_ends(void **state)
{
    (void)state;
    struct pair p = make_pair();
    int nfds = 5;
    char buf[8];
    assert_int_equal(hrp_recv_fds(p.b, buf, sizeof(buf), NULL, 0, &nfds), -EAGAIN);
    assert_int_equal(nfds, 0);
    static char big[60000];
    int rc, sent = 0;
    while ((rc = hrp_send_fds(p.a, big, sizeof(big), NULL, 0)) == 0)
        sent++;
    assert_int_equal(rc, -EAGAIN); /* full, and it did not block */
    assert_true(sent > 0);
    close_pair(p);
    p = make_pair();
    close(p.b);
    assert_int_equal(hrp_send_fds(p.a, "x", 1, NULL, 0), -EPIPE); /* and no signal */
    close(p.a);
    p = make_pair();
    close(p.a);
    assert_int_equal(hrp_recv_fds(p.b, buf, sizeof(buf), NULL, 0, &nfds), 0);
    close(p.b);
    assert_int_equal(hrp_recv_fds(-1, buf, sizeof(buf), NULL, 0, &nfds), -EBADF);
    assert_int_equal(hrp_recv_fds(-1, buf, sizeof(buf), NULL, HRP_MAX_FDS + 1, &nfds), -EINVAL);
}

static void test_no_descriptors_left(void **state)
{
    (void)state;
    struct pair p = make_pair();
    int three[3] = {0, 1, 2}, fds[HRP_MAX_FDS], nfds;
    char buf[8];
    assert_int_equal(hrp_send_fds(p.a, "1", 1, three, 3), 0);
    struct rlimit old, none;
    getrlimit(RLIMIT_NOFILE, &old);
    none = old;
    int top = dup(0); /* the lowest free one */
    none.rlim_cur = (rlim_t)top + 1;
    setrlimit(RLIMIT_NOFILE, &none);
    close(top); /* room for one of three */
    long n = hrp_recv_fds(p.b, buf, sizeof(buf), fds, HRP_MAX_FDS, &nfds);
    setrlimit(RLIMIT_NOFILE, &old);
    assert_int_equal(n, -EMFILE);
    assert_int_equal(nfds, 0);
    assert_int_equal(fcntl(top, F_GETFD), -1);
    close_pair(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_foreign),
        cmocka_unit_test(test_ends),
        cmocka_unit_test(test_no_descriptors_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
