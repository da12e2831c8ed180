/* SPDX-License-Identifier: MIT */
/*
 * Sessions from accept to the last descriptor. The end has an order: memberships are withdrawn, the agent lets
 * go of the memory, and only then is it unmapped and the socket closed. So a client whose socket is closed
 * while the daemon lives knows that nothing of the daemon touches its memory any more.
 */
#include "daemon/session_priv.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/guard.h"
#include "proto/fdpass.h"

/* Connections beyond max_sessions: hreducectl, and those that wait for their refusal. */
#define EXTRA_CONNECTIONS 64

/* ---- looking up ------------------------------------------------------------------------------------------- */

struct hrd_session_priv *hrd_session_lookup(struct hrd_daemon *d, uint64_t sid)
{
    struct hrd_session_priv *p = d->sessions->bucket[sid % HRD_SESSION_BUCKETS];
    while (p && p->pub.sid != sid)
        p = p->hash_next;
    return p;
}

struct hrd_session *hrd_session_find(struct hrd_daemon *d, uint64_t sid)
{
    struct hrd_session_priv *p = hrd_session_lookup(d, sid);
    return p && p->state == HRD_S_OPEN ? &p->pub : NULL;
}

unsigned hrd_sessions_live(const struct hrd_daemon *d)
{
    return d->sessions->live + d->sessions->releasing;
}

unsigned hrd_sessions_count(const struct hrd_daemon *d)
{
    return d->sessions->counted;
}

void hrd_sessions_totals(const struct hrd_daemon *d, struct hrd_session_totals *out)
{
    const struct hrd_sessions *ss = d->sessions;
    *out = (struct hrd_session_totals){.memory_bytes = ss->memory_bytes,
                                       .accepted = ss->accepted,
                                       .refused = ss->refused,
                                       .faults = ss->faults};
}

void hrd_sessions_each_comm(struct hrd_daemon *d, void (*fn)(struct hrd_daemon *d, uint64_t comm))
{
    uint64_t *seen = NULL;
    size_t n = 0, room = 0;
    for (struct hrd_session_priv *p = d->sessions->all; p; p = p->next) {
        for (uint32_t slot = 0; slot < p->nslots; slot++) {
            uint64_t comm = p->slots[slot].taken ? hrd_member_comm_of_slot(d, &p->pub, slot) : 0;
            size_t i = 0;
            while (i < n && seen[i] != comm)
                i++;
            if (comm == 0 || i < n)
                continue;
            if (n == room) {
                uint64_t *more = realloc(seen, (room * 2 + 64) * sizeof(*seen));
                if (!more)
                    abort(); /* crash-only */
                seen = more;
                room = room * 2 + 64;
            }
            seen[n++] = comm;
        }
    }
    for (size_t i = 0; i < n; i++)
        fn(d, seen[i]);
    free(seen);
}

/* ---- beginning -------------------------------------------------------------------------------------------- */

static void link_session(struct hrd_sessions *ss, struct hrd_session_priv *p)
{
    struct hrd_session_priv **bucket = &ss->bucket[p->pub.sid % HRD_SESSION_BUCKETS];
    p->next = ss->all;
    p->pprev = &ss->all;
    if (p->next)
        p->next->pprev = &p->next;
    ss->all = p;
    p->hash_next = *bucket;
    *bucket = p;
    ss->live++;
}

static void unlink_session(struct hrd_sessions *ss, struct hrd_session_priv *p)
{
    struct hrd_session_priv **at = &ss->bucket[p->pub.sid % HRD_SESSION_BUCKETS];
    *p->pprev = p->next;
    if (p->next)
        p->next->pprev = p->pprev;
    while (*at != p)
        at = &(*at)->hash_next;
    *at = p->hash_next;
    ss->live--;
}

void hrd_session_accept(struct hrd_daemon *d, int sock, const char *refusal)
{
    struct hrd_sessions *ss = d->sessions;
    struct ucred cred;
    socklen_t len = sizeof(cred);
    uint32_t missed;
    ss->accepted++;
    if (ss->live >= d->cfg.max_sessions + EXTRA_CONNECTIONS) {
        ss->refused++;
        if (hrd_log_allowed(&ss->refused_log, 5, 60000, &missed))
            hrd_warn("a connection was dropped: %u are open already, beyond max_sessions %u", ss->live,
                     d->cfg.max_sessions);
        close(sock);
        return;
    }
    struct hrd_session_priv *p = calloc(1, sizeof(*p));
    if (!p || getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &cred, &len) != 0) {
        hrd_warn("a connection was dropped: %s", p ? "it has no credentials" : "out of memory");
        free(p);
        close(sock);
        return;
    }
    p->d = d;
    p->sock = sock;
    p->pidfd = p->doorbell = -1;
    p->pub = (struct hrd_session){
        .sid = ++ss->next_sid, .uid = cred.uid, .gid = cred.gid, .pid = cred.pid, .priv = p};
    p->since_ms = uv_now(d->loop);
    if (refusal)
        snprintf(p->refusal, sizeof(p->refusal), "%s", refusal);
    int rc = hrd_session_io_start(p);
    if (rc != 0) {
        hrd_warn("a connection was dropped: it cannot be polled: %s", uv_strerror(rc));
        close(sock);
        free(p);
        return;
    }
    link_session(ss, p);
}

/* ---- ending ----------------------------------------------------------------------------------------------- */

static void on_reaper(uv_idle_t *handle);

/* Straight to the socket: the library shows its user the sentence, and when there is no room it has unread ones.
 */
static void say_farewell(struct hrd_session_priv *p)
{
    unsigned char buf[1024];
    char text[600];
    struct hrp_msg msg = {.type = HRP_MSG_ERROR, .text = text};
    msg.body.error.status = p->fault ? HRP_PROTOCOL : p->d->stopping ? HRP_SHUTDOWN : HRP_DAEMON_LOST;
    msg.body.error.scope = HRP_SCOPE_SESSION;
    msg.text_len = (size_t)snprintf(text, sizeof(text), "the daemon ended the session: %s", p->why);
    long len = hrp_msg_encode(&msg, buf, sizeof(buf));
    if (len > 0)
        (void)hrp_send_fds(p->sock, buf, (size_t)len, NULL, 0);
}

void hrd_session_kill(struct hrd_session *s, const char *why)
{
    struct hrd_session_priv *p = s->priv;
    struct hrd_sessions *ss = p->d->sessions;
    if (p->state >= HRD_S_ENDING)
        return;
    snprintf(p->why, sizeof(p->why), "%s", why);
    if (p->state == HRD_S_OPEN && !p->out_first)
        say_farewell(p);
    p->state = HRD_S_ENDING;
    p->ending_next = ss->ending;
    ss->ending = p;
    uv_idle_start(&ss->reaper, on_reaper);
}

void hrd_client_fault(struct hrd_session_priv *p, const char *fmt, ...)
{
    struct hrd_sessions *ss = p->d->sessions;
    char why[512];
    uint32_t missed;
    va_list ap;
    if (p->state >= HRD_S_ENDING)
        return;
    va_start(ap, fmt);
    vsnprintf(why, sizeof(why), fmt, ap);
    va_end(ap);
    ss->faults++;
    p->fault = true;
    if (hrd_log_allowed(&ss->fault_log, 10, 60000, &missed)) {
        if (missed > 0)
            hrd_warn("%u more sessions were ended for such reasons meanwhile", missed);
        hrd_log_event(HRD_LOG_WARNING, HRD_MSGID_CLIENT_FAULT, 0, "session %llu of uid %u is ended: %s",
                      (unsigned long long)p->pub.sid, (unsigned)p->pub.uid, why);
    }
    hrd_session_kill(&p->pub, why);
}

void hrd_client_refuse(struct hrd_session_priv *p, uint64_t cookie, enum hrp_status status, const char *fmt,
                       ...)
{
    struct hrd_sessions *ss = p->d->sessions;
    char text[600];
    uint32_t missed;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    ss->refused++;
    if (hrd_log_allowed(&ss->refused_log, 5, 60000, &missed)) {
        if (missed > 0)
            hrd_warn("%u more processes were refused meanwhile", missed);
        hrd_warn("process %d of uid %u is refused: %s", (int)p->pub.pid, (unsigned)p->pub.uid, text);
    }
    hrd_session_error(&p->pub, cookie, status, HRP_SCOPE_SESSION, "%s", text);
    hrd_session_kill(&p->pub, "it was refused");
}

void hrd_session_try_free(struct hrd_session_priv *p)
{
    if (p->state != HRD_S_RELEASED || p->in_agent)
        return;
    if (p->jobs == 0)
        hrd_session_gpu_release_all(p); /* jobs again, if there is anything */
    if (p->jobs > 0)
        return;
    /* The socket goes last of what the client can see, and only once. */
    if (p->sock >= 0) {
        hrd_session_unmap_all(p);
        hrd_session_drop_queue(p);
        close(p->sock);
        p->sock = -1;
        if (p->pidfd >= 0)
            close(p->pidfd);
        if (p->doorbell >= 0)
            close(p->doorbell);
    }
    if (p->handles > 0)
        return;
    if (p->counted)
        p->d->sessions->counted--;
    unlink_session(p->d->sessions, p);
    free(p);
}

static void end_session(struct hrd_session_priv *p)
{
    struct hrd_daemon *d = p->d;
    hrd_session_flush(p);
    hrd_session_io_stop(p);
    if (!p->fault) /* that was logged, with a limit */
        hrd_log(p->ctl ? HRD_LOG_DEBUG : HRD_LOG_INFO, "session %llu ends: %s",
                (unsigned long long)p->pub.sid, p->why);
    if (p->opened)
        hrd_member_session_gone(d, &p->pub, p->why);
    p->state = HRD_S_RELEASED;
    if (p->in_agent)
        hrd_agent_session_end(d->agent, p->pub.sid, p->why);
    hrd_session_try_free(p);
}

static void on_reaper(uv_idle_t *handle)
{
    struct hrd_sessions *ss = handle->data;
    while (ss->ending) {
        struct hrd_session_priv *p = ss->ending;
        ss->ending = p->ending_next;
        end_session(p);
    }
    uv_idle_stop(handle);
}

void hrd_sessions_end_all(struct hrd_daemon *d, const char *why)
{
    for (struct hrd_session_priv *p = d->sessions->all; p; p = p->next)
        hrd_session_kill(&p->pub, why);
}

/* ---- events ----------------------------------------------------------------------------------------------- */

void hrd_session_event(struct hrd_daemon *d, const struct hrd_event *ev)
{
    struct hrd_session_priv *p = hrd_session_lookup(d, ev->sid);
    if (!p)
        return;
    switch (ev->type) {
    case HRD_EV_SESSION_FAULT:
        hrd_client_fault(p, "%s", ev->text);
        break;
    case HRD_EV_BUFFER_GONE:
        hrd_session_buffer_gone(p, ev->id);
        break;
    case HRD_EV_SESSION_GONE:
        p->in_agent = false;
        hrd_session_try_free(p);
        break;
    default:
        break;
    }
}

/* A SIGBUS in memory of some session was covered up. */
static void on_guard(uv_poll_t *handle, int status, int events)
{
    struct hrd_sessions *ss = handle->data;
    uint64_t count;
    (void)status;
    (void)events;
    if (read(ss->guard_fd, &count, sizeof(count)) != (ssize_t)sizeof(count))
        return;
    for (struct hrd_session_priv *p = ss->all; p; p = p->next) {
        if (atomic_load_explicit(&p->poisoned, memory_order_seq_cst))
            hrd_client_fault(p,
                             "memory that process %d shares vanished (a hole was punched, or a memory limit "
                             "reached)",
                             (int)p->pub.pid);
    }
}

/* ---- all of them ------------------------------------------------------------------------------------------ */

int hrd_sessions_new(struct hrd_daemon *d, char *err, size_t errlen)
{
    struct hrd_sessions *ss = calloc(1, sizeof(*ss));
    int guard = hrd_guard_init();
    int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (!ss || guard < 0 || pidfd < 0) {
        int rc = !ss ? -ENOMEM : guard < 0 ? guard : -errno;
        snprintf(err, errlen, "sessions cannot be served: %s failed: %s",
                 !ss         ? "memory allocation"
                 : guard < 0 ? "the SIGBUS guard"
                             : "pidfd_open (Linux 5.3 or later is needed)",
                 strerror(-rc));
        free(ss);
        return rc;
    }
    ss->d = d;
    ss->own_pidfd = pidfd;
    ss->guard_fd = guard;
    uv_idle_init(d->loop, &ss->reaper);
    ss->reaper.data = ss;
    uv_poll_init(d->loop, &ss->guard_poll, guard);
    ss->guard_poll.data = ss;
    uv_poll_start(&ss->guard_poll, UV_READABLE, on_guard);
    d->sessions = ss;
    return 0;
}

static void on_guard_closed(uv_handle_t *handle)
{
    struct hrd_sessions *ss = handle->data;
    close(ss->own_pidfd);
    free(ss);
}

void hrd_sessions_free(struct hrd_daemon *d)
{
    struct hrd_sessions *ss = d->sessions;
    if (!ss)
        return;
    uv_idle_stop(&ss->reaper);
    uv_close((uv_handle_t *)&ss->reaper, NULL);
    uv_poll_stop(&ss->guard_poll);
    uv_close((uv_handle_t *)&ss->guard_poll, on_guard_closed);
    d->sessions = NULL;
}
