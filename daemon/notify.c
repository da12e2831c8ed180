/* SPDX-License-Identifier: MIT */
/*
 * sd_notify() blocks while systemd does not read, and systemd may be busy for seconds. So each message first asks
 * a connected socket whether there is room: what comes again (watchdog, status) is left out when there is none,
 * the others wait for a bounded time.
 */
#include "daemon/notify.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>
#include <time.h>
#include <unistd.h>

#include "daemon/log.h"

enum { WAIT_READY_MS = 2000, WAIT_STATE_MS = 500 };

/* Connected to NOTIFY_SOCKET, never written to. -1: nothing to ask (not asked for, or of another kind). */
static int probe_socket(void)
{
    static int fd = -2;
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un sun = {.sun_family = AF_UNIX};
    if (fd != -2)
        return fd;
    fd = -1;
    if (!path || (path[0] != '/' && path[0] != '@') || strlen(path) >= sizeof(sun.sun_path))
        return fd;
    size_t len = strlen(path);
    memcpy(sun.sun_path, path, len);
    if (path[0] == '@')
        sun.sun_path[0] = '\0';
    int s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len + (path[0] == '/'));
    if (s >= 0 && connect(s, (struct sockaddr *)&sun, size) == 0)
        fd = s;
    else if (s >= 0)
        close(s);
    return fd;
}

static bool room_within(int ms)
{
    struct pollfd p = {.fd = probe_socket(), .events = POLLOUT};
    if (p.fd < 0)
        return true;
    int rc;
    do
        rc = poll(&p, 1, ms);
    while (rc < 0 && errno == EINTR);
    return rc != 0;
}

/* False: there was no room. */
static bool notify(int wait_ms, const char *state)
{
    if (!getenv("NOTIFY_SOCKET"))
        return true;
    if (room_within(wait_ms)) {
        sd_notify(0, state);
        return true;
    }
    if (wait_ms > 0)
        hrd_warn("systemd did not take a notification within %d ms: %.32s", wait_ms, state);
    return false;
}

static bool notify_text(int wait_ms, const char *prefix, const char *fmt, va_list ap)
    __attribute__((format(printf, 3, 0)));
static bool notify_text(int wait_ms, const char *prefix, const char *fmt, va_list ap)
{
    char text[256], state[300];
    vsnprintf(text, sizeof(text), fmt, ap);
    snprintf(state, sizeof(state), "%sSTATUS=%s", prefix, text);
    return notify(wait_ms, state);
}

void hrd_notify_ready(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    notify_text(WAIT_READY_MS, "READY=1\n", fmt, ap);
    va_end(ap);
}

bool hrd_notify_status(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    bool sent = notify_text(0, "", fmt, ap);
    va_end(ap);
    return sent;
}

void hrd_notify_reloading(void)
{
    /* The time lets systemd tell this reload from an older one (Type=notify-reload). */
    char state[128];
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    snprintf(state, sizeof(state),
             "RELOADING=1\nMONOTONIC_USEC=%" PRIu64 "\nSTATUS=reading the configuration",
             (uint64_t)ts.tv_sec * 1000000 + (uint64_t)ts.tv_nsec / 1000);
    notify(WAIT_STATE_MS, state);
}

void hrd_notify_stopping(void)
{
    notify(WAIT_STATE_MS, "STOPPING=1\nSTATUS=stopping");
}

void hrd_notify_watchdog(void)
{
    notify(0, "WATCHDOG=1");
}

uint64_t hrd_notify_watchdog_ms(void)
{
    uint64_t usec = 0;
    return sd_watchdog_enabled(0, &usec) > 0 ? usec / 1000 : 0;
}
