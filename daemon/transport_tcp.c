/* SPDX-License-Identifier: MIT */
/*
 * The TCP transport: the streams of a link are ordinary sockets. The agent drives them with its epoll set, or the first one
 * alone, and I/O threads the others (tcp_io.c); frames are looked at here, on the agent's thread, in either case.
 */
#include "daemon/transport_tcp.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/tcp_int.h"

/* A hand-over to an I/O thread and back costs 10 to 20 us each way. An all_reduce of 256 KiB between two nodes loses a
   fifth by it, one of 1 MiB takes half the time. */
#define HAND_OVER_BYTES (UINT64_C(512) << 10)

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

static void unwatch(struct tcp_link *l)
{
    for (unsigned i = 0; i < l->base.nstreams; i++)
        if (!l->stream[i].port.thread)
            hrd_poller_del(l->poller, &l->stream[i].pollable);
    if (l->io)
        hrd_poller_del(l->poller, &l->wake);
}

static void broken(struct tcp_link *l, const char *why)
{
    if (l->broken)
        return;
    l->broken = true;
    unwatch(l);
    l->base.handler->lost(&l->base, why);
}

static void broken_errno(struct tcp_link *l, const char *what, int err)
{
    char text[160];
    snprintf(text, sizeof(text), "%s: %s", what, strerror(err));
    broken(l, text);
}

static void stream_failed(struct tcp_stream *s, enum tcp_fault fault, int err);

/* ---- send ------------------------------------------------------------------------------------------------ */

static void want_write(struct tcp_stream *s, bool want)
{
    if (s->want_write == want || s->link->broken)
        return;
    s->want_write = want;
    (void)hrd_poller_mod(s->link->poller, &s->pollable, EPOLLIN | (want ? EPOLLOUT : 0u));
}

static void flush_stream(struct tcp_stream *s)
{
    struct tcp_link *l = s->link;
    while (s->tx.first && !l->broken) {
        ssize_t n = hrd_tcp_transmit(s->pollable.fd, &s->tx, &l->sent);
        if (n == -EAGAIN)
            break;
        if (n < 0) {
            stream_failed(s, TCP_SEND_FAILED, (int)-n);
            return;
        }
    }
    want_write(s, s->tx.first != NULL);
}

static void report_sent(struct tcp_link *l, struct tcp_queue *sent)
{
    for (struct hrd_tx *tx = hrd_tcp_queue_take(sent); tx; tx = hrd_tcp_queue_take(sent)) {
        l->base.tx_frames++;
        l->base.tx_bytes += sizeof(tx->frame) + tx->frame.len;
        tx->done(tx, 0);
    }
}

static void tcp_send(struct hrd_link *base, struct hrd_tx *tx)
{
    struct tcp_link *l = (struct tcp_link *)base;
    tx->sent = 0;
    hrd_tcp_queue_add(&l->stream[tx->stream].tx, tx);
}

static void tcp_flush(struct hrd_link *base)
{
    struct tcp_link *l = (struct tcp_link *)base;
    for (unsigned i = 0; i < l->base.nstreams && !l->broken; i++) {
        struct tcp_stream *s = &l->stream[i];
        if (s->port.thread)
            hrd_tcp_io_send(s);
        else if (s->tx.first && !s->want_write) /* else epoll says when there is room */
            flush_stream(s);
    }
    if (!l->broken)
        report_sent(l, &l->sent);
}

/* ---- receive --------------------------------------------------------------------------------------------- */

/* A header is complete in rx->frame: finds the place of its payload. */
static int begin_frame(struct tcp_stream *s)
{
    struct tcp_link *l = s->link;
    struct tcp_rx *rx = &s->rx;
    const char *why = "malformed frame header";
    rx->payload = NULL;
    rx->got = 0;
    if (hrp_frame_check(&rx->frame)) {
        broken(l, why);
        return -1;
    }
    if (rx->frame.len) {
        rx->payload = l->base.handler->place(&l->base, s->index, &rx->frame, &why);
        if (!rx->payload) {
            broken(l, why);
            return -1;
        }
    }
    rx->in_frame = true;
    return 0;
}

static int end_frame(struct tcp_stream *s)
{
    struct tcp_link *l = s->link;
    struct tcp_rx *rx = &s->rx;
    const char *why = "frame refused";
    rx->in_frame = false;
    l->base.rx_frames++;
    l->base.rx_bytes += sizeof(rx->frame) + rx->frame.len;
    if (l->base.handler->arrived(&l->base, s->index, &rx->frame, rx->payload, &why)) {
        broken(l, why);
        return -1;
    }
    return 0;
}

/* Uses up what is in the stream's buffer. -1: the link broke. */
static int eat_buffer(struct tcp_stream *s)
{
    struct tcp_rx *rx = &s->rx;
    for (;;) {
        if (rx->in_frame) {
            uint64_t need = rx->frame.len - rx->got;
            size_t n = need < rx->have ? (size_t)need : rx->have;
            if (n)
                memcpy(rx->payload + rx->got, rx->buf + rx->at, n);
            rx->at += n;
            rx->have -= n;
            rx->got += n;
            if (rx->got < rx->frame.len)
                return 0;
            if (end_frame(s))
                return -1;
            continue;
        }
        if (rx->have < sizeof(rx->frame)) {
            memmove(rx->buf, rx->buf + rx->at, rx->have);
            rx->at = 0;
            return 0;
        }
        memcpy(&rx->frame, rx->buf + rx->at, sizeof(rx->frame));
        rx->at += sizeof(rx->frame);
        rx->have -= sizeof(rx->frame);
        if (begin_frame(s))
            return -1;
    }
}

static void read_stream(struct tcp_stream *s)
{
    struct tcp_link *l = s->link;
    bool drained = false; /* then epoll says when there is more */
    for (uint64_t moved = 0; moved < TCP_TURN_BYTES && !drained && !l->broken;) {
        ssize_t n = hrd_tcp_receive(s->pollable.fd, &s->rx, &drained);
        if (n == -EAGAIN)
            return;
        if (n <= 0) {
            stream_failed(s, n ? TCP_RECEIVE_FAILED : TCP_CLOSED, (int)-n);
            return;
        }
        moved += (uint64_t)n;
        if (eat_buffer(s))
            return;
    }
}

/* What the peer said on stream 0 before it hung up comes first: it may be the reason. */
static void stream_failed(struct tcp_stream *s, enum tcp_fault fault, int err)
{
    struct tcp_link *l = s->link;
    if (s->index != 0 || fault == TCP_SEND_FAILED)
        read_stream(&l->stream[0]);
    if (fault == TCP_CLOSED)
        broken(l, "the peer closed the connection");
    else
        broken_errno(l, fault == TCP_SEND_FAILED ? "send failed" : "receive failed", err);
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
        report_sent(l, &l->sent);
}

/* ---- streams that I/O threads drive -------------------------------------------------------------------------- */

static unsigned tcp_poll(struct hrd_link *base)
{
    struct tcp_link *l = (struct tcp_link *)base;
    unsigned n = 0;
    if (!l->io || l->broken)
        return 0;
    for (struct tcp_stream *s = hrd_tcp_io_news(l), *next; s; s = next) {
        struct tcp_queue sent = {NULL, NULL};
        next = s->port.next_out; /* a report of the thread may overwrite it from now on */
        bool mine = hrd_tcp_io_take(s, &sent);
        report_sent(l, &sent);
        if (mine && !l->broken && !eat_buffer(s))
            hrd_tcp_io_receive(s);
        int fault = atomic_load(&s->port.fault);
        if (fault != TCP_FINE && !l->broken)
            stream_failed(s, (enum tcp_fault)fault, s->port.fault_errno);
        n++;
    }
    return n;
}

static int tcp_arm(struct hrd_link *base)
{
    struct tcp_link *l = (struct tcp_link *)base;
    if (!l->io || l->broken)
        return 0;
    atomic_store(&l->armed, true);
    return atomic_load(&l->out) != NULL;
}

/* The turn that follows looks at the link's news. */
static void wake_ready(struct hrd_pollable *p, uint32_t events)
{
    (void)events;
    uint64_t n;
    while (read(p->fd, &n, sizeof(n)) < 0 && errno == EINTR)
        ;
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

/* A thread drives every stream but the first, where there are threads and further streams. */
static int open_stream(struct tcp_link *l, unsigned i, int fd)
{
    struct tcp_stream *s = &l->stream[i];
    s->link = l;
    s->index = i;
    s->pollable = (struct hrd_pollable){.ready = stream_ready, .fd = fd};
    if (!l->io || i == 0)
        return hrd_poller_add(l->poller, &s->pollable, EPOLLIN) ? -errno : 0;
    int err = hrd_tcp_io_drive(l->io, s);
    if (!err)
        hrd_tcp_io_receive(s);
    return err;
}

static int open_streams(struct tcp_link *l, const struct hrd_tcp_conn *c)
{
    if (l->io) {
        l->wake = (struct hrd_pollable){.ready = wake_ready, .fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
        if (l->wake.fd < 0 || hrd_poller_add(l->poller, &l->wake, EPOLLIN))
            return -errno;
    }
    int err = 0;
    for (unsigned i = 0; i < c->n && !err; i++)
        err = open_stream(l, i, c->fd[i]);
    return err;
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
    l->io = c->n > 1 ? c->io : NULL;
    l->base.detour_bytes = l->io ? HAND_OVER_BYTES : 0;
    char local[70], remote[70];
    addr_text(c->fd[0], 0, local, sizeof(local));
    addr_text(c->fd[0], 1, remote, sizeof(remote));
    snprintf(l->base.detail, sizeof(l->base.detail), "%s to %s", local, remote);
    int err = open_streams(l, c);
    if (err) {
        if (l->io)
            hrd_tcp_io_release(l);
        if (l->io && l->wake.fd >= 0)
            close(l->wake.fd);
        conn_discard(conn); /* closing a descriptor takes it out of the epoll set */
        free(l);
        errno = -err;
        return NULL;
    }
    free(c);
    return &l->base;
}

static void cancel(struct tcp_queue *q)
{
    for (struct hrd_tx *tx = hrd_tcp_queue_take(q); tx; tx = hrd_tcp_queue_take(q))
        tx->done(tx, -ECANCELED);
}

static void tcp_close(struct hrd_link *base)
{
    struct tcp_link *l = (struct tcp_link *)base;
    if (!l->broken)
        unwatch(l);
    l->broken = true;
    if (l->io) {
        hrd_tcp_io_release(l);
        close(l->wake.fd);
    }
    for (unsigned i = 0; i < l->base.nstreams; i++)
        close(l->stream[i].pollable.fd);
    report_sent(l, &l->sent);
    for (unsigned i = 0; i < l->base.nstreams; i++) {
        struct tcp_stream *s = &l->stream[i];
        struct tcp_queue sent = {NULL, NULL};
        (void)hrd_tcp_io_take(s, &sent);
        report_sent(l, &sent);
        cancel(&s->port.tx);
        cancel(&s->tx);
    }
    free(l);
}

const struct hrd_transport hrd_transport_tcp = {
    .name = "tcp",
    .open = tcp_open,
    .send = tcp_send,
    .flush = tcp_flush,
    .close = tcp_close,
    .poll = tcp_poll,
    .arm = tcp_arm,
};
