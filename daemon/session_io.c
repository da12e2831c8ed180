/* SPDX-License-Identifier: MIT */
/* A session's socket and its process: messages in and out, end of file, death. */
#include "daemon/session_priv.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/fdpass.h"

/* Replies that a client may leave unread before its session ends; one document is let through whole. */
#define OUT_LIMIT ((size_t)1 << 20)
/* Messages of one session before the others have their turn. */
#define READ_BURST 8
#define HELLO_TIMEOUT_MS 5000
/* A dying process closes its socket a moment before its pidfd becomes readable. */
#define DEATH_GRACE_MS 50

static void on_sock(uv_poll_t *handle, int status, int events);

static void set_events(struct hrd_session_priv *p, int events)
{
    if (p->sock_events == events)
        return;
    p->sock_events = events;
    if (events == 0)
        uv_poll_stop(&p->sock_poll);
    else
        uv_poll_start(&p->sock_poll, events, on_sock);
}

/* ---- out -------------------------------------------------------------------------------------------------- */

static void free_out(struct hrd_out *o)
{
    for (int i = 0; i < o->nfds; i++)
        close(o->fds[i]);
    free(o);
}

void hrd_session_drop_queue(struct hrd_session_priv *p)
{
    while (p->out_first) {
        struct hrd_out *o = p->out_first;
        p->out_first = o->next;
        free_out(o);
    }
    p->out_last = &p->out_first;
    p->out_bytes = 0;
}

void hrd_session_flush(struct hrd_session_priv *p)
{
    while (p->out_first) {
        struct hrd_out *o = p->out_first;
        int rc = hrp_send_fds(p->sock, o->data, o->len, o->fds, o->nfds);
        if (rc == -EAGAIN)
            return;
        p->out_first = o->next;
        if (!p->out_first)
            p->out_last = &p->out_first;
        p->out_bytes -= o->len;
        free_out(o);
        if (rc != 0) {
            /* The process is gone or shut its socket: reading will find the end of file and the cause. */
            hrd_session_drop_queue(p);
            return;
        }
    }
}

static bool enqueue(struct hrd_session_priv *p, const void *data, size_t len, const int *fds, int nfds)
{
    struct hrd_out *o = malloc(sizeof(*o) + len);
    if (!o)
        return false;
    o->next = NULL;
    o->len = len;
    o->nfds = 0;
    memcpy(o->data, data, len);
    for (int i = 0; i < nfds; i++) {
        o->fds[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);
        if (o->fds[i] < 0) {
            free_out(o);
            return false;
        }
        o->nfds++;
    }
    *p->out_last = o;
    p->out_last = &o->next;
    p->out_bytes += len;
    return true;
}

static void send_encoded(struct hrd_session_priv *p, const struct hrp_msg *msg, const int *fds, int nfds)
{
    unsigned char buf[HRP_MSG_MAX];
    long len = hrp_msg_encode(msg, buf, sizeof(buf));
    if (len < 0) {
        /* A reply that the daemon itself could not form: its own mistake, but only this client waits for it. */
        hrd_client_fault(p, "the daemon could not encode %s", hrp_msg_name(msg->type));
        return;
    }
    if (!p->out_first) {
        int rc = hrp_send_fds(p->sock, buf, (size_t)len, fds, nfds);
        if (rc != -EAGAIN)
            return; /* sent, or broken: reading will find the end of file */
    }
    if (!enqueue(p, buf, (size_t)len, fds, nfds)) {
        hrd_session_kill(&p->pub, "the daemon had no memory or descriptor for a reply");
        return;
    }
    set_events(p, p->sock_events | UV_WRITABLE);
}

static bool may_send(struct hrd_session_priv *p)
{
    if (p->state >= HRD_S_ENDING)
        return false;
    if (p->out_bytes <= OUT_LIMIT)
        return true;
    hrd_client_fault(p, "process %d does not read its socket: %zu bytes of replies wait", (int)p->pub.pid,
                     p->out_bytes);
    return false;
}

void hrd_session_send(struct hrd_session *s, const struct hrp_msg *msg, const int *fds, int nfds)
{
    if (may_send(s->priv))
        send_encoded(s->priv, msg, fds, nfds);
}

void hrd_session_error(struct hrd_session *s, uint64_t cookie, enum hrp_status status, enum hrp_scope scope,
                       const char *fmt, ...)
{
    char text[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    struct hrp_msg msg = {.type = HRP_MSG_ERROR, .cookie = cookie, .text = text, .text_len = strlen(text)};
    msg.body.error.status = (uint32_t)status;
    msg.body.error.scope = (uint32_t)scope;
    hrd_session_send(s, &msg, NULL, 0);
}

void hrd_session_done(struct hrd_session *s, uint64_t cookie)
{
    struct hrp_msg msg = {.type = HRP_MSG_DONE, .cookie = cookie};
    hrd_session_send(s, &msg, NULL, 0);
}

void hrd_session_text(struct hrd_session *s, uint64_t cookie, const char *text)
{
    const size_t part_max = HRP_MSG_MAX - sizeof(struct hrp_msg_hdr) - sizeof(struct hrp_msg_text);
    size_t left = strlen(text);
    if (!may_send(s->priv))
        return;
    do {
        size_t n = left < part_max ? left : part_max;
        struct hrp_msg msg = {.type = HRP_MSG_TEXT, .cookie = cookie, .text = text, .text_len = n};
        msg.body.text.more = left > n;
        send_encoded(s->priv, &msg, NULL, 0);
        text += n;
        left -= n;
    } while (left > 0 && s->priv->state < HRD_S_ENDING);
}

/* ---- in --------------------------------------------------------------------------------------------------- */

static void on_grace_over(uv_timer_t *timer)
{
    struct hrd_session_priv *p = timer->data;
    char why[96];
    snprintf(why, sizeof(why), "process %d closed its connection", (int)p->pub.pid);
    hrd_session_kill(&p->pub, why);
}

static void end_of_file(struct hrd_session_priv *p)
{
    set_events(p, 0);
    if (!p->pid_polled) {
        hrd_session_kill(&p->pub, "it closed its connection before it said hello");
        return;
    }
    uv_timer_start(&p->timer, on_grace_over, DEATH_GRACE_MS, 0);
}

/* The cookie of the next message, which its reply needs even when its descriptor cannot be received. */
static uint64_t peek_cookie(int sock)
{
    struct hrp_msg_hdr hdr = {0};
    ssize_t n = recv(sock, &hdr, sizeof(hdr), MSG_PEEK | MSG_DONTWAIT);
    return n == (ssize_t)sizeof(hdr) ? hdr.cookie : 0;
}

static void no_descriptor(struct hrd_session_priv *p, uint64_t cookie)
{
    struct rlimit lim = {0};
    getrlimit(RLIMIT_NOFILE, &lim);
    const char *fmt =
        "the daemon has no free descriptor to receive yours (limit %llu); raise LimitNOFILE= of "
        "hreduced.service or connect fewer processes";
    if (p->state == HRD_S_HELLO)
        hrd_client_refuse(p, cookie, HRP_RESOURCE, fmt, (unsigned long long)lim.rlim_cur);
    else
        hrd_session_error(&p->pub, cookie, HRP_RESOURCE, HRP_SCOPE_NONE, fmt,
                          (unsigned long long)lim.rlim_cur);
}

/* A connection that will be refused gets no descriptor of its own received: the daemon has none to spare. */
static long read_refused(struct hrd_session_priv *p, void *buf, size_t size)
{
    ssize_t n = recv(p->sock, buf, size, MSG_DONTWAIT);
    if (n < 0)
        return errno == EWOULDBLOCK ? -EAGAIN : -errno;
    if (n > 0) {
        struct hrp_msg_hdr hdr = {0};
        memcpy(&hdr, buf, (size_t)n < sizeof(hdr) ? (size_t)n : sizeof(hdr));
        hrd_client_refuse(p, hdr.cookie, HRP_RESOURCE, "%s", p->refusal);
    }
    return n;
}

/* One message. False: nothing more to read now. */
static bool read_one(struct hrd_session_priv *p)
{
    unsigned char buf[HRP_MSG_MAX];
    struct hrp_msg msg;
    int fd = -1, nfds = 0;
    if (p->refusal[0]) {
        if (read_refused(p, buf, sizeof(buf)) == 0)
            end_of_file(p);
        return false;
    }
    uint64_t cookie = peek_cookie(p->sock);
    long n = hrp_recv_fds(p->sock, buf, sizeof(buf), &fd, 1, &nfds);
    if (n == -EAGAIN)
        return false;
    if (n == 0 || n == -ECONNRESET) {
        end_of_file(p);
        return false;
    }
    if (n == -EMFILE) {
        no_descriptor(p, cookie);
        return true;
    }
    if (n < 0 || hrp_msg_decode(&msg, buf, (size_t)n) != 0) {
        if (nfds > 0)
            close(fd);
        hrd_client_fault(p, "process %d sent a malformed message", (int)p->pub.pid);
        return false;
    }
    if (nfds != hrp_msg_nfds(msg.type)) {
        if (nfds > 0)
            close(fd);
        hrd_client_fault(p, "process %d sent %s with %d descriptors instead of %d", (int)p->pub.pid,
                         hrp_msg_name(msg.type), nfds, hrp_msg_nfds(msg.type));
        return false;
    }
    hrd_session_request(p, &msg, fd);
    return true;
}

static void on_sock(uv_poll_t *handle, int status, int events)
{
    struct hrd_session_priv *p = handle->data;
    if (status < 0) {
        hrd_session_kill(&p->pub, "its socket could not be polled");
        return;
    }
    if (events & UV_WRITABLE) {
        hrd_session_flush(p);
        if (!p->out_first)
            set_events(p, p->sock_events & ~UV_WRITABLE);
    }
    if (events & UV_READABLE) {
        for (int i = 0; i < READ_BURST && p->state < HRD_S_ENDING; i++) {
            if (!read_one(p))
                break;
        }
    }
}

/* ---- the process ------------------------------------------------------------------------------------------ */

static void on_death(uv_poll_t *handle, int status, int events)
{
    struct hrd_session_priv *p = handle->data;
    char why[64];
    (void)status;
    (void)events;
    snprintf(why, sizeof(why), "process %d ended (killed, or it exited without leaving)", (int)p->pub.pid);
    hrd_session_kill(&p->pub, why);
}

int hrd_session_watch_pid(struct hrd_session_priv *p, int pidfd)
{
    int rc = uv_poll_init(p->d->loop, &p->pid_poll, pidfd);
    if (rc != 0)
        return rc;
    p->pid_poll.data = p;
    p->pidfd = pidfd;
    p->pid_polled = true;
    p->handles++;
    uv_timer_stop(&p->timer);
    return uv_poll_start(&p->pid_poll, UV_READABLE, on_death);
}

static void on_hello_timeout(uv_timer_t *timer)
{
    struct hrd_session_priv *p = timer->data;
    hrd_client_fault(p, "process %d connected and said nothing for %d s", (int)p->pub.pid,
                     HELLO_TIMEOUT_MS / 1000);
}

int hrd_session_io_start(struct hrd_session_priv *p)
{
    int rc = uv_poll_init(p->d->loop, &p->sock_poll, p->sock);
    if (rc != 0)
        return rc;
    p->sock_poll.data = p;
    p->handles++;
    uv_timer_init(p->d->loop, &p->timer);
    p->timer.data = p;
    p->handles++;
    p->out_last = &p->out_first;
    uv_timer_start(&p->timer, on_hello_timeout, HELLO_TIMEOUT_MS, 0);
    set_events(p, UV_READABLE);
    return 0;
}

static void on_closed(uv_handle_t *handle)
{
    struct hrd_session_priv *p = handle->data;
    p->handles--;
    hrd_session_try_free(p);
}

void hrd_session_io_stop(struct hrd_session_priv *p)
{
    uv_poll_stop(&p->sock_poll);
    uv_close((uv_handle_t *)&p->sock_poll, on_closed);
    uv_close((uv_handle_t *)&p->timer, on_closed);
    if (p->pid_polled) {
        uv_poll_stop(&p->pid_poll);
        uv_close((uv_handle_t *)&p->pid_poll, on_closed);
    }
}
