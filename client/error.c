/* SPDX-License-Identifier: MIT */
#include "client/error.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/comm.h"
#include "proto/status.h"

#define SAME(name) _Static_assert((int)HCLIENT_##name == (int)HRP_##name, "hclient_result_t is hrp_status")
SAME(OK);
SAME(IN_PROGRESS);
SAME(INVALID_ARGUMENT);
SAME(UNSUPPORTED);
SAME(MISMATCH);
SAME(TIMEOUT);
SAME(RANK_LOST);
SAME(PEER_LOST);
SAME(ABORTED);
SAME(SUPERSEDED);
SAME(DAEMON_LOST);
SAME(UNRESPONSIVE);
SAME(RESOURCE);
SAME(REFUSED);
SAME(PROTOCOL);
SAME(VERSION);
SAME(SYSTEM);
SAME(SHUTDOWN);
_Static_assert((int)HCLIENT_SHUTDOWN == HRP_NSTATUS - 1, "no code is missing");

static _Thread_local char last_text[HCL_TEXT];
static _Thread_local hclient_comm_t last_comm; /* what last_text is about */
static _Thread_local hclient_comm_t current_comm;
/* What hclient_last_error(comm) returned last: another buffer, so that asking does not lose the thread's own
   sentence. */
static _Thread_local char comm_text[HCL_TEXT];

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static hclient_log_fn log_fn;
static void *log_user;

atomic_bool hcl_inert;

hclient_result_t hclient_get_version(int *version)
{
    if (version == NULL)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "hclient_get_version: version is NULL");
    *version = HCLIENT_VERSION_CODE;
    return HCLIENT_OK;
}

const char *hclient_strerror(hclient_result_t result)
{
    return hrp_status_name((uint32_t)result);
}

void hcl_about(hclient_comm_t comm)
{
    current_comm = comm;
}

void hcl_say(const char *fmt, ...)
{
    last_comm = current_comm;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(last_text, sizeof(last_text), fmt, ap);
    va_end(ap);
}

hclient_result_t hcl_fail_text(hclient_result_t result, const char *text, size_t len)
{
    if (len == 0 || text == NULL)
        return hcl_fail(result, "%s (the daemon gave no reason)", hclient_strerror(result));
    last_comm = current_comm;
    size_t n = len < sizeof(last_text) ? len : sizeof(last_text) - 1;
    memmove(last_text, text, n);
    last_text[n] = 0;
    return result;
}

void hcl_fail_more(const char *fmt, ...)
{
    size_t len = strlen(last_text);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(last_text + len, sizeof(last_text) - len, fmt, ap);
    va_end(ap);
}

hclient_result_t hcl_fail_inert(void)
{
    return hcl_fail(HCLIENT_UNSUPPORTED,
                    "this process was forked from one that uses hclient; its library is inert. Start workers "
                    "before the first hclient call, or with exec (Python: the spawn start method)");
}

const char *hclient_last_error(hclient_comm_t comm)
{
    if (comm == NULL)
        return last_text;
    comm_text[0] = 0;
    if (!atomic_load_explicit(&hcl_inert, memory_order_relaxed) &&
        !hcl_comm_last_error(comm, comm_text, sizeof(comm_text)) && comm == last_comm)
        return last_text; /* the comm is well, but this thread's last call with it was refused or failed */
    return comm_text;
}

hclient_result_t hclient_set_log_callback(hclient_log_fn fn, void *user)
{
    HCL_ENTER();
    pthread_mutex_lock(&log_lock);
    log_fn = fn;
    log_user = user;
    pthread_mutex_unlock(&log_lock);
    return HCLIENT_OK;
}

static void log_text(hclient_log_level_t level, const char *text, bool or_stderr)
{
    /* The lock is held over the call: once hclient_set_log_callback() returns, the old one is not running. */
    pthread_mutex_lock(&log_lock);
    if (log_fn != NULL)
        log_fn(log_user, level, text);
    else if (or_stderr && level <= HCLIENT_LOG_WARN)
        fprintf(stderr, "hclient: %s\n", text);
    pthread_mutex_unlock(&log_lock);
}

void hcl_log(hclient_log_level_t level, const char *fmt, ...)
{
    char text[HCL_TEXT];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    log_text(level, text, true);
}

#define LAST_WORD_S 2u

static void *end_process(void *arg)
{
    sleep(LAST_WORD_S);
    abort();
    return arg;
}

void hcl_die(const char *fmt, ...)
{
    char text[HCL_TEXT];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    fprintf(stderr, "hclient: %s\n", text);
    /* A callback may need what this process no longer gives, another thread's lock, or the GPU. */
    pthread_t thread;
    if (pthread_create(&thread, NULL, end_process, NULL) == 0)
        log_text(HCLIENT_LOG_ERROR, text, false);
    abort();
}
