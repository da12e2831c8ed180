/* SPDX-License-Identifier: MIT */
/*
 * Logging to standard error: one line a message, lower case, values after a space. Under systemd each line
 * carries its priority as <N>, or goes to the journal with fields. Any thread; never blocks: a line that the
 * reader of the log has no room for is dropped and counted, and the next one that gets through says so.
 * Control characters in a message are replaced, so text from a client cannot forge lines.
 */
#ifndef HRD_LOG_H
#define HRD_LOG_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>

/* syslog's numbers */
enum hrd_log_level {
    HRD_LOG_ERROR = 3,
    HRD_LOG_WARNING = 4,
    HRD_LOG_NOTICE = 5,
    HRD_LOG_INFO = 6,
    HRD_LOG_DEBUG = 7,
};

/* Looks where standard error goes (journal, systemd, terminal). Call once, before other threads. */
void hrd_log_init(void);
void hrd_log_set_level(int level);
bool hrd_log_enabled(int level);

void hrd_log(int level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void hrd_vlog(int level, const char *fmt, va_list ap) __attribute__((format(printf, 2, 0)));

#define hrd_error(...) hrd_log(HRD_LOG_ERROR, __VA_ARGS__)
#define hrd_warn(...) hrd_log(HRD_LOG_WARNING, __VA_ARGS__)
#define hrd_notice(...) hrd_log(HRD_LOG_NOTICE, __VA_ARGS__)
#define hrd_info(...) hrd_log(HRD_LOG_INFO, __VA_ARGS__)
#define hrd_debug(...) hrd_log(HRD_LOG_DEBUG, __VA_ARGS__)

/* Events that people search the journal for; MESSAGE_ID= in the journal. hreduced(8) lists them. */
#define HRD_MSGID_STARTED "6bb2c0f8c0a44bd58e8ef1d9c1f6a3d1"
#define HRD_MSGID_STOPPING "f2f5b1f4d7a24b1c9f0f0a5c9e8d7b62"
#define HRD_MSGID_COMM_PATH "0d7a4ce25f5b4d3e8a9bb1c64e7f2093"
#define HRD_MSGID_COMM_FAILED "a94c1be9f3d14f7a8c5e20d6b7f8e1c4"
#define HRD_MSGID_CLIENT_FAULT "3e9d7f615c8b4a02b1d4c7e86fa05932"
#define HRD_MSGID_PEER_LOST "c8e04a7d92f54b6ea3d1750b9fc6e248"

/* Like hrd_log(), with HREDUCE_COMM=comm (printed as 16 hex digits; 0: none) and MESSAGE_ID= (NULL: none) as
 * journal fields. */
void hrd_log_event(int level, const char *message_id, uint64_t comm, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/*
 * A limit for messages that somebody else can cause at will: `burst` in each period, the rest counted. Zero
 * means never used; owned by one thread. hrd_log_allowed() answers whether to log; when it opens again,
 * *missed (may be NULL) says how many were swallowed since.
 */
struct hrd_log_limit {
    uint64_t period_start_ms;
    uint32_t in_period;
    uint32_t swallowed;
};
bool hrd_log_allowed(struct hrd_log_limit *limit, uint32_t burst, uint32_t period_ms, uint32_t *missed);

#endif
