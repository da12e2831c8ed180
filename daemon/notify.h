/* SPDX-License-Identifier: MIT */
/* What the service tells systemd (sd_notify(3)); nothing happens when systemd did not ask. */
#ifndef HRD_NOTIFY_H
#define HRD_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>

/* READY=1 with STATUS=; also ends a reload. */
void hrd_notify_ready(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* False: systemd is busy; say it again later. */
bool hrd_notify_status(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void hrd_notify_reloading(void);
void hrd_notify_stopping(void);
void hrd_notify_watchdog(void);
/* Milliseconds within which hrd_notify_watchdog() is expected; 0: there is no watchdog. */
uint64_t hrd_notify_watchdog_ms(void);

#endif
