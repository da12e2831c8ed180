/* SPDX-License-Identifier: MIT */
#include "daemon/log.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* Below PIPE_BUF, so that a line is written whole or not at all. */
enum { LINE_MAX_BYTES = 3500 };

static _Atomic int max_level = HRD_LOG_NOTICE;
static _Atomic uint32_t dropped;
static bool with_priority; /* <N> prefixes: standard error is read by systemd */
static bool stderr_is_socket;
static int journal = -1; /* datagram socket connected to the journal */

/* JOURNAL_STREAM is "device:inode" of the stream that systemd made; standard error may have been redirected
 * since. */
static bool stderr_is_journal(const struct stat *st)
{
    const char *env = getenv("JOURNAL_STREAM");
    char *end;
    if (!env)
        return false;
    unsigned long long dev = strtoull(env, &end, 10);
    if (end == env || *end != ':')
        return false;
    unsigned long long ino = strtoull(end + 1, NULL, 10);
    return st->st_dev == (dev_t)dev && st->st_ino == (ino_t)ino;
}

static int connect_journal(void)
{
    struct sockaddr_un sun = {.sun_family = AF_UNIX, .sun_path = "/run/systemd/journal/socket"};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&sun, sizeof(sun)) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

void hrd_log_init(void)
{
    struct stat st = {0};
    if (fstat(STDERR_FILENO, &st) == 0) {
        stderr_is_socket = S_ISSOCK(st.st_mode);
        with_priority = stderr_is_journal(&st);
    }
    if (with_priority && journal < 0)
        journal = connect_journal();
    if (!with_priority && getenv("NOTIFY_SOCKET"))
        with_priority = true;
}

void hrd_log_set_level(int level)
{
    atomic_store_explicit(&max_level, level, memory_order_relaxed);
}

bool hrd_log_enabled(int level)
{
    return level <= atomic_load_explicit(&max_level, memory_order_relaxed);
}

/* ---- writing ----------------------------------------------------------------------------------------------
 */

/* Standard error may be a pipe or socket whose reader is stuck, and its file description is shared with
   others, so O_NONBLOCK cannot be set on it: ask first. */
static bool write_line(const char *line, size_t len)
{
    ssize_t n;
    if (stderr_is_socket) {
        n = send(STDERR_FILENO, line, len, MSG_DONTWAIT | MSG_NOSIGNAL);
    } else {
        struct pollfd p = {.fd = STDERR_FILENO, .events = POLLOUT};
        if (poll(&p, 1, 0) != 1)
            return false;
        n = write(STDERR_FILENO, line, len);
    }
    /* Anything but "no room" will not get better by counting. */
    return n >= 0 || errno != EAGAIN;
}

static const char *level_word(int level)
{
    switch (level) {
    case HRD_LOG_ERROR:
        return "error: ";
    case HRD_LOG_WARNING:
        return "warning: ";
    default:
        return "";
    }
}

/* Bytes of a UTF-8 text pass; what a terminal or the journal would act on does not. */
static void clean(char *text)
{
    for (unsigned char *p = (unsigned char *)text; *p; p++) {
        if (*p < 0x20 || *p == 0x7f)
            *p = ' ';
    }
}

static void put(int level, const char *text)
{
    char line[LINE_MAX_BYTES + 128];
    int n;
    if (with_priority) {
        n = snprintf(line, sizeof(line), "<%d>%s\n", level, text);
    } else {
        struct timespec ts;
        struct tm tm;
        clock_gettime(CLOCK_REALTIME, &ts);
        localtime_r(&ts.tv_sec, &tm);
        n = snprintf(line, sizeof(line), "%02d:%02d:%02d.%03ld hreduced: %s%s\n", tm.tm_hour, tm.tm_min,
                     tm.tm_sec, ts.tv_nsec / 1000000, level_word(level), text);
    }
    if (n > 0 && !write_line(line, (size_t)n))
        atomic_fetch_add_explicit(&dropped, 1, memory_order_relaxed);
}

static void put_counted(int level, const char *text)
{
    uint32_t lost = atomic_exchange_explicit(&dropped, 0, memory_order_relaxed);
    if (lost > 0) {
        char note[80];
        snprintf(note, sizeof(note), "%u log lines lost, because their reader is slow", lost);
        put(HRD_LOG_WARNING, note);
    }
    put(level, text);
}

void hrd_vlog(int level, const char *fmt, va_list ap)
{
    char text[LINE_MAX_BYTES];
    if (!hrd_log_enabled(level))
        return;
    vsnprintf(text, sizeof(text), fmt, ap);
    clean(text);
    put_counted(level, text);
}

void hrd_log(int level, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    hrd_vlog(level, fmt, ap);
    va_end(ap);
}

/* One entry in the journal's native protocol: a datagram of FIELD=value lines. */
static bool send_journal(int level, const char *message_id, uint64_t comm, const char *text)
{
    char entry[LINE_MAX_BYTES + 256];
    size_t room = sizeof(entry);
    int n = snprintf(entry, room, "PRIORITY=%d\nSYSLOG_IDENTIFIER=hreduced\nMESSAGE=%s\n", level, text);
    if (message_id)
        n += snprintf(entry + n, room - (size_t)n, "MESSAGE_ID=%s\n", message_id);
    if (comm)
        n += snprintf(entry + n, room - (size_t)n, "HREDUCE_COMM=%016" PRIx64 "\n", comm);
    return send(journal, entry, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL) == n;
}

void hrd_log_event(int level, const char *message_id, uint64_t comm, const char *fmt, ...)
{
    char text[LINE_MAX_BYTES];
    va_list ap;
    if (!hrd_log_enabled(level))
        return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    clean(text);
    if (journal < 0 || !send_journal(level, message_id, comm, text))
        put_counted(level, text);
}

/* ---- limits -----------------------------------------------------------------------------------------------
 */

bool hrd_log_allowed(struct hrd_log_limit *limit, uint32_t burst, uint32_t period_ms, uint32_t *missed)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    uint64_t now = (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
    if (missed)
        *missed = 0;
    if (limit->period_start_ms == 0 || now - limit->period_start_ms >= period_ms) {
        limit->period_start_ms = now ? now : 1;
        limit->in_period = 0;
        if (missed)
            *missed = limit->swallowed;
        limit->swallowed = 0;
    }
    if (limit->in_period >= burst) {
        limit->swallowed++;
        return false;
    }
    limit->in_period++;
    return true;
}
