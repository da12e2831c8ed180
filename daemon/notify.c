/* SPDX-License-Identifier: MIT */
#include "daemon/notify.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <systemd/sd-daemon.h>
#include <time.h>

void hrd_notify_ready(const char *fmt, ...)
{
    char text[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    sd_notifyf(0, "READY=1\nSTATUS=%s", text);
}

void hrd_notify_status(const char *fmt, ...)
{
    char text[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    sd_notifyf(0, "STATUS=%s", text);
}

void hrd_notify_reloading(void)
{
    /* The time lets systemd tell this reload from an older one (Type=notify-reload). */
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    sd_notifyf(0, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64 "\nSTATUS=reading the configuration",
               (uint64_t)ts.tv_sec * 1000000 + (uint64_t)ts.tv_nsec / 1000);
}

void hrd_notify_stopping(void)
{
    sd_notify(0, "STOPPING=1\nSTATUS=stopping");
}

void hrd_notify_watchdog(void)
{
    sd_notify(0, "WATCHDOG=1");
}

uint64_t hrd_notify_watchdog_ms(void)
{
    uint64_t usec = 0;
    return sd_watchdog_enabled(0, &usec) > 0 ? usec / 1000 : 0;
}
