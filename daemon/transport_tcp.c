/* SPDX-License-Identifier: MIT */
/*
 * The TCP transport: the streams of a link are ordinary sockets, driven by the agent's epoll set. Payload goes straight
 * from the arena to the socket and from the socket into the slot that the handler names; only headers and the first bytes
 * behind them pass through a small buffer of the stream.
 */
#include "daemon/transport_tcp.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "daemon/poller.h"

/* Large enough for a run of small frames, small enough that copying out of it does not show. */
#define RX_BUFFER 8192u
/* One stream may not keep the agent from its other duties: bytes it moves before it lets others go. */
#define TURN_BYTES (UINT64_C(1) << 20)
#define TX_BATCH 16

struct tcp_link;

struct tcp_stream {
    struct hrd_pollable pollable;
    struct tcp_link *link;
    unsigned index;
    int want_write;
    struct hrd_tx *tx_first, *tx_last;
    /* receive: `have` unread bytes at `at` of buf; in_frame: payload of frame is being filled */
    size_t at, have;
    int in_frame;
    struct hrp_frame frame;
    char *payload;
    uint64_t got;
    char buf[RX_BUFFER];
};

struct tcp_link {
    struct hrd_link base;
    struct hrd_poller *poller;
    int broken;
    struct hrd_tx *sent_first, *sent_last; /* finished, done() not yet called */
    struct tcp_stream stream[];
};

static void conn_discard(struct hrd_conn *base)
{
    struct hrd_tcp_conn *c = (struct hrd_tcp_conn *)base;
    for (unsigned i = 0; i < c->n; i++)
        close(c->fd[i]);
    free(c);
}

struct hrd_tcp_conn *hrd_tcp_conn_new(const int *fd, unsigned n)
{
    struct hrd_tcp_conn *c = n <= HRD_TCP_STREAMS_MAX ? calloc(1, sizeof(*c)) : NULL;
    if (!c) {
        for (unsigned i = 0; i < n; i++)
            close(fd[i]);
        return NULL;
    }
    c->base.discard = conn_discard;
    c->n = n;
    memcpy(c->fd, fd, n * sizeof(fd[0]));
    return c;
}

static void broken(struct tcp_link *l, const char *why)
{
    if (l->broken)
        return;
    l->broken = 1;
    for (unsigned i = 0; i < l->base.nstreams; i++)
        hrd_poller_del(l->poller, &l->stream[i].pollable);
    l->base.handler->lost(&l->base, why);
}

static void broken_errno(struct tcp_link *l, const char *what, int err)
{
    char text[160];
    snprintf(text, sizeof(text), "%s: %s", what, strerror(err));
    broken(l, text);
}

/* ---- send ------------------------------------------------------------------------------------------------ */

static void want_write(struct tcp_stream *s, int want)
{
    if (s->want_write == want || s->link->broken)
        return;
    s->want_write = want;
    (void)hrd_poller_mod(s->link->poller, &s->pollable, EPOLLIN | (want ? EPOLLOUT : 0u));
}

static unsigned gather_iov(struct tcp_stream *s, struct iovec *iov, unsigned max)
{
    unsigned n = 0;
    for (struct hrd_tx *tx = s->tx_first; tx && n + 2 <= max; tx = tx->next) {
        uint64_t head = sizeof(tx->frame), skip = tx->sent;
        if (skip < head)
            iov[n++] = (struct iovec){(char *)&tx->frame + skip, head - skip};
        skip = skip > head ? skip - head : 0;
        if (tx->frame.len > skip)
            iov[n++] = (struct iovec){(char *)(uintptr_t)tx->payload + skip, tx->frame.len - skip};
    }
    return n;
}

/* Moves n sent bytes along the queue; finished frames go to the link's list of done() calls to make. */
static void advance(struct tcp_stream *s, uint64_t n)
{
    struct tcp_link *l = s->link;
    while (n > 0 && s->tx_first) {
        struct hrd_tx *tx = s->tx_first;
        uint64_t left = sizeof(tx->frame) + tx->frame.len - tx->sent;
        if (n < left) {
            tx->sent += n;
            return;
        }
        n -= left;
        s->tx_first = tx->next;
        if (!s->tx_first)
            s->tx_last = NULL;
        l->base.tx_frames++;
        l->base.tx_bytes += sizeof(tx->frame) + tx->frame.len;
        tx->next = NULL;
        if (l->sent_last)
            l->sent_last->next = tx;
        else
            l->sent_first = tx;
        l->sent_last = tx;
    }
}

static void flush_stream(struct tcp_stream *s)
{
    struct tcp_link *l = s->link;
    while (s->tx_first && !l->broken) {
        struct iovec iov[2 * TX_BATCH];
        struct msghdr msg = {.msg_iov = iov};
        msg.msg_iovlen = gather_iov(s, iov, 2 * TX_BATCH);
        ssize_t n = sendmsg(s->pollable.fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        if (n < 0) {
            broken_errno(l, "send failed", errno);
            return;
        }
        advance(s, (uint64_t)n);
    }
    want_write(s, s->tx_first != NULL);
}

static void report_sent(struct tcp_link *l)
{
    while (l->sent_first) {
        struct hrd_tx *tx = l->sent_first;
        l->sent_first = tx->next;
        if (!l->sent_first)
            l->sent_last = NULL;
        tx->done(tx, 0);
    }
}

static void tcp_send(struct hrd_link *base, struct hrd_tx *tx)
{
    struct tcp_link *l = (struct tcp_link *)base;
    struct tcp_stream *s = &l->stream[tx->stream];
    tx->next = NULL;
    tx->sent = 0;
    if (s->tx_last)
        s->tx_last->next = tx;
    else
        s->tx_first = tx;
    s->tx_last = tx;
}

static void tcp_flush(struct hrd_link *base)
{
    struct tcp_link *l = (struct tcp_link *)base;
    for (unsigned i = 0; i < l->base.nstreams && !l->broken; i++)
        if (l->stream[i].tx_first && !l->stream[i].want_write) /* else epoll says when there is room */
            flush_stream(&l->stream[i]);
    if (!l->broken)
        report_sent(l);
}

/* ---- receive --------------------------------------------------------------------------------------------- */

/* A header is complete in s->frame: finds the place of its payload. */
static int begin_frame(struct tcp_stream *s)
{
    struct tcp_link *l = s->link;
    const char *why = "malformed frame header";
    s->payload = NULL;
    s->got = 0;
    if (hrp_frame_check(&s->frame)) {
        broken(l, why);
        return -1;
    }
    if (s->frame.len) {
        s->payload = l->base.handler->place(&l->base, s->index, &s->frame, &why);
        if (!s->payload) {
            broken(l, why);
            return -1;
        }
    }
    s->in_frame = 1;
    return 0;
}

static int end_frame(struct tcp_stream *s)
{
    struct tcp_link *l = s->link;
    const char *why = "frame refused";
    s->in_frame = 0;
    l->base.rx_frames++;
    l->base.rx_bytes += sizeof(s->frame) + s->frame.len;
    if (l->base.handler->arrived(&l->base, s->index, &s->frame, s->payload, &why)) {
        broken(l, why);
        return -1;
    }
    return 0;
}

/* Uses up what is in the stream's buffer. -1: the link broke. */
static int eat_buffer(struct tcp_stream *s)
{
    for (;;) {
        if (s->in_frame) {
            uint64_t need = s->frame.len - s->got;
            size_t n = need < s->have ? (size_t)need : s->have;
            if (n)
                memcpy(s->payload + s->got, s->buf + s->at, n);
            s->at += n;
            s->have -= n;
            s->got += n;
            if (s->got < s->frame.len)
                return 0;
            if (end_frame(s))
                return -1;
            continue;
        }
        if (s->have < sizeof(s->frame)) {
            memmove(s->buf, s->buf + s->at, s->have);
            s->at = 0;
            return 0;
        }
        memcpy(&s->frame, s->buf + s->at, sizeof(s->frame));
        s->at += sizeof(s->frame);
        s->have -= sizeof(s->frame);
        if (begin_frame(s))
            return -1;
    }
}

static void read_stream(struct tcp_stream *s)
{
    struct tcp_link *l = s->link;
    uint64_t moved = 0;
    while (moved < TURN_BYTES && !l->broken) {
        struct iovec iov[2];
        int niov = 0;
        size_t direct = 0;
        if (s->in_frame) {
            direct = s->frame.len - s->got;
            iov[niov++] = (struct iovec){s->payload + s->got, direct};
            s->at = s->have = 0; /* eat_buffer() left nothing */
        }
        size_t room = RX_BUFFER - s->at - s->have;
        iov[niov++] = (struct iovec){s->buf + s->at + s->have, room};
        ssize_t n = readv(s->pollable.fd, iov, niov);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n < 0) {
            broken_errno(l, "receive failed", errno);
            return;
        }
        if (n == 0) {
            broken(l, "the peer closed the connection");
            return;
        }
        moved += (uint64_t)n;
        size_t got = (size_t)n < direct ? (size_t)n : direct;
        s->got += got;
        s->have += (size_t)n - got;
        if (eat_buffer(s))
            return;
        if ((size_t)n < direct + room)
            return; /* the socket is empty; epoll says when it is not */
    }
}

static void stream_ready(struct hrd_pollable *p, uint32_t events)
{
    struct tcp_stream *s = (struct tcp_stream *)p;
    struct tcp_link *l = s->link;
    if (l->broken) /* another stream broke the link in this turn */
        return;
    if (events & EPOLLOUT)
        flush_stream(s);
    if (!l->broken && (events & (EPOLLIN | EPOLLERR | EPOLLHUP)))
        read_stream(s);
    if (!l->broken)
        report_sent(l);
}

/* ---- open, close ----------------------------------------------------------------------------------------- */

static void addr_text(int fd, int peer, char *buf, size_t len)
{
    struct sockaddr_storage ss = {0};
    socklen_t sl = sizeof(ss);
    char ip[INET6_ADDRSTRLEN] = "?";
    unsigned port = 0;
    if ((peer ? getpeername(fd, (struct sockaddr *)&ss, &sl)
              : getsockname(fd, (struct sockaddr *)&ss, &sl)) == 0) {
        if (ss.ss_family == AF_INET) {
            struct sockaddr_in *in = (struct sockaddr_in *)&ss;
            inet_ntop(AF_INET, &in->sin_addr, ip, sizeof(ip));
            port = ntohs(in->sin_port);
        } else if (ss.ss_family == AF_INET6) {
            struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&ss;
            inet_ntop(AF_INET6, &in6->sin6_addr, ip, sizeof(ip));
            port = ntohs(in6->sin6_port);
        }
    }
    snprintf(buf, len, strchr(ip, ':') ? "[%s]:%u" : "%s:%u", ip, port);
}

static struct hrd_link *tcp_open(struct hrd_conn *conn, struct hrd_poller *poller,
                                 const struct hrd_link_handler *handler, void *owner)
{
    struct hrd_tcp_conn *c = (struct hrd_tcp_conn *)conn;
    struct tcp_link *l = calloc(1, sizeof(*l) + c->n * sizeof(l->stream[0]));
    if (!l) {
        conn_discard(conn);
        errno = ENOMEM;
        return NULL;
    }
    l->base =
        (struct hrd_link){.tp = &hrd_transport_tcp, .handler = handler, .owner = owner, .nstreams = c->n};
    l->poller = poller;
    char local[70], remote[70];
    addr_text(c->fd[0], 0, local, sizeof(local));
    addr_text(c->fd[0], 1, remote, sizeof(remote));
    snprintf(l->base.detail, sizeof(l->base.detail), "%s to %s", local, remote);
    for (unsigned i = 0; i < c->n; i++) {
        struct tcp_stream *s = &l->stream[i];
        s->link = l;
        s->index = i;
        s->pollable = (struct hrd_pollable){.ready = stream_ready, .fd = c->fd[i]};
        if (hrd_poller_add(poller, &s->pollable, EPOLLIN)) {
            int err = errno;
            conn_discard(conn); /* closing a descriptor takes it out of the epoll set */
            free(l);
            errno = err;
            return NULL;
        }
    }
    free(c);
    return &l->base;
}

static void tcp_close(struct hrd_link *base)
{
    struct tcp_link *l = (struct tcp_link *)base;
    report_sent(l);
    for (unsigned i = 0; i < l->base.nstreams; i++) {
        struct tcp_stream *s = &l->stream[i];
        if (!l->broken)
            hrd_poller_del(l->poller, &s->pollable);
        close(s->pollable.fd);
    }
    l->broken = 1;
    for (unsigned i = 0; i < l->base.nstreams; i++) {
        struct hrd_tx *tx = l->stream[i].tx_first;
        while (tx) {
            struct hrd_tx *next = tx->next;
            tx->done(tx, -ECANCELED);
            tx = next;
        }
    }
    free(l);
}

const struct hrd_transport hrd_transport_tcp = {
    .name = "tcp",
    .open = tcp_open,
    .send = tcp_send,
    .flush = tcp_flush,
    .close = tcp_close,
};
