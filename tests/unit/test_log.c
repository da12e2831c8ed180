/* SPDX-License-Identifier: MIT */
/* What arrives at standard error. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/log.h"

static char text[1 << 17];
static int saved_stderr;

/* Standard error goes to fd from here on, as if the daemon had been started so. */
static void redirect(int fd)
{
    saved_stderr = dup(STDERR_FILENO);
    dup2(fd, STDERR_FILENO);
    close(fd);
    hrd_log_init();
}

static void restore(void)
{
    dup2(saved_stderr, STDERR_FILENO);
    close(saved_stderr);
    hrd_log_init();
}

static const char *read_all(int fd)
{
    size_t at = 0;
    ssize_t n;
    fcntl(fd, F_SETFL, O_NONBLOCK);
    while (at < sizeof(text) - 1 && (n = read(fd, text + at, sizeof(text) - 1 - at)) > 0)
        at += (size_t)n;
    text[at] = '\0';
    return text;
}

static void test_lines(void **state)
{
    int p[2];
    char longer[9000];
    (void)state;
    assert_int_equal(pipe(p), 0);
    redirect(p[1]);
    hrd_log_set_level(HRD_LOG_NOTICE);
    hrd_notice("value %d", 7);
    hrd_info("not said");
    hrd_warn("forged\n<0>line \x1b[2J \x7f \xc3\xa4");
    hrd_log_event(HRD_LOG_ERROR, HRD_MSGID_STARTED, 5, "event");
    memset(longer, 'x', sizeof(longer));
    longer[sizeof(longer) - 1] = '\0';
    hrd_notice("%s", longer);
    restore();
    read_all(p[0]);
    close(p[0]);
    assert_non_null(strstr(text, "hreduced: value 7\n"));
    assert_null(strstr(text, "not said"));
    assert_non_null(strstr(text, "hreduced: warning: forged <0>line  [2J   \xc3\xa4\n"));
    assert_non_null(strstr(text, "hreduced: error: event\n"));
    unsigned lines = 0;
    for (const char *c = text; *c; c++)
        lines += *c == '\n';
    assert_int_equal(lines, 4);
    assert_true(strlen(text) < 4096);
}

static void test_priorities(void **state)
{
    int p[2];
    (void)state;
    assert_int_equal(pipe(p), 0);
    setenv("NOTIFY_SOCKET", "/nonexistent", 1);
    redirect(p[1]);
    hrd_log_set_level(HRD_LOG_DEBUG);
    hrd_debug("a");
    hrd_error("b");
    unsetenv("NOTIFY_SOCKET");
    restore();
    assert_string_equal(read_all(p[0]), "<7>a\n<3>b\n");
    close(p[0]);
}

/* Nobody reads: no line blocks, and the first that gets through counts the lost ones. */
static void stuck(int reader, int writer)
{
    redirect(writer);
    hrd_log_set_level(HRD_LOG_NOTICE);
    for (int i = 0; i < 20000; i++)
        hrd_notice("line %d of many", i);
    read_all(reader);
    assert_non_null(strstr(text, "line 0 of many"));
    assert_null(strstr(text, "line 19999 of many"));
    hrd_notice("heard again");
    restore();
    read_all(reader);
    assert_non_null(strstr(text, "log lines lost"));
    assert_non_null(strstr(text, "heard again"));
    close(reader);
}

static void test_stuck_pipe(void **state)
{
    int p[2];
    (void)state;
    assert_int_equal(pipe(p), 0);
    stuck(p[0], p[1]);
}

static void test_stuck_socket(void **state)
{
    int p[2];
    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, p), 0);
    stuck(p[0], p[1]);
}

static void test_limit(void **state)
{
    struct hrd_log_limit limit = {0};
    uint32_t missed = 99;
    unsigned allowed = 0;
    (void)state;
    for (int i = 0; i < 10; i++)
        allowed += hrd_log_allowed(&limit, 3, 50, &missed);
    assert_int_equal(allowed, 3);
    assert_int_equal(missed, 0);
    usleep(60000);
    assert_true(hrd_log_allowed(&limit, 3, 50, &missed));
    assert_int_equal(missed, 7);
    assert_true(hrd_log_allowed(&limit, 3, 50, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lines),      cmocka_unit_test(test_priorities),
        cmocka_unit_test(test_stuck_pipe), cmocka_unit_test(test_stuck_socket),
        cmocka_unit_test(test_limit),
    };
    unsetenv("JOURNAL_STREAM");
    unsetenv("NOTIFY_SOCKET");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
