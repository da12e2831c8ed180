/* SPDX-License-Identifier: MIT */
/* Sockets of peer connections: connect, buffers, what to do when one breaks. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/peer_impl.h"

#define RX_START 4096u
#define READ_TURN (256u * 1024u) /* bytes one connection reads before others get their turn */

static bool is_stranger(const struct conn *c)
{
    return c->incoming && (c->stage == CONN_HELLO || c->stage == CONN_CONFIRM || c->refused);
}

static void conn_freed(uv_handle_t *h)
{
    struct conn *c = h->data;
    free(c->rx);
    free(c->tx);
    free(c);
}

/* Off all lists; the handle is closing, memory goes with it. */
static void conn_unlink(struct conn *c)
{
    struct hrd_peers *ps = c->d->peers;
    *c->link = c->next;
    if (c->next)
        c->next->link = c->link;
    else
        ps->conns_tail = c->link;
    if (is_stranger(c))
        ps->nstrangers--;
    if (c->dial && c->dial->conn == c)
        c->dial->conn = NULL;
    c->dial = NULL;
    struct hrd_peer *p = c->peer;
    c->peer = NULL;
    c->attempt = NULL;
    if (p && c->role == HRP_PEER_CONTROL) {
        p->nconns--;
        if (p->tx == c)
            p->tx = NULL;
        /* A record that never came up and has nobody left who could bring it up. */
        if (!p->up && p->nconns == 0)
            hrd_peer_doom(c->d, p, "could not be reached");
    }
    uv_close((uv_handle_t *)&c->poll, conn_freed);
}

int hrd_conn_detach(struct conn *c)
{
    int fd = c->fd;
    c->fd = -1;
    conn_unlink(c);
    return fd;
}

void hrd_conn_close(struct conn *c)
{
    int fd = hrd_conn_detach(c);
    if (fd >= 0)
        close(fd);
}

void hrd_conn_broken(struct conn *c, uint32_t status, const char *why)
{
    struct hrd_daemon *d = c->d;
    struct dial *dial = c->dial;
    if (c->stage == CONN_OPEN) {
        hrd_peer_lose(d, c->peer, why);
    } else if (c->attempt) {
        hrd_link_stream_failed(c, why);
    } else {
        if (is_stranger(c) && !c->refused) {
            char at[HRD_ADDR_TEXT];
            hrd_debug("connection from %s ended before it said who it is: %s",
                      hrd_addr_text(&c->remote, at, sizeof(at)), why);
        }
        hrd_conn_close(c);
        if (dial)
            hrd_dial_failed(d, dial, status, why);
    }
}

/* ---- sending -------------------------------------------------------------------------------------------- */

static void all_sent(struct conn *c)
{
    /* What a burst of rosters needed is not kept for ever. */
    if (c->tx_size > 65536) {
        free(c->tx);
        c->tx = NULL;
        c->tx_size = 0;
    }
    c->tx_at = c->tx_have = 0;
}

/* Spares a turn of the loop. An error is left for the loop to find: nothing may be closed under the caller. */
static void send_now(struct conn *c)
{
    ssize_t n = send(c->fd, c->tx + c->tx_at, c->tx_have - c->tx_at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0)
        c->tx_at += (size_t)n;
    if (c->tx_at == c->tx_have)
        all_sent(c);
}

int hrd_conn_queue(struct conn *c, const void *data, size_t len)
{
    if (c->tx_at > 0 && c->tx_at == c->tx_have)
        c->tx_at = c->tx_have = 0;
    if (c->tx_have - c->tx_at + len > TX_MAX)
        return -ENOBUFS;
    if (c->tx_at > 0 && c->tx_have + len > c->tx_size) {
        memmove(c->tx, c->tx + c->tx_at, c->tx_have - c->tx_at);
        c->tx_have -= c->tx_at;
        c->tx_at = 0;
    }
    if (c->tx_have + len > c->tx_size) {
        size_t size = c->tx_size * 2 > c->tx_have + len ? c->tx_size * 2 : c->tx_have + len;
        char *tx = realloc(c->tx, size);
        if (!tx)
            return -ENOMEM;
        c->tx = tx;
        c->tx_size = size;
    }
    bool idle = c->tx_at == c->tx_have;
    memcpy(c->tx + c->tx_have, data, len);
    c->tx_have += len;
    if (idle)
        send_now(c);
    hrd_conn_watch(c);
    return 0;
}

int hrd_conn_queue_msg(struct conn *c, const struct hrp_peer_msg *msg)
{
    size_t size = hrp_peer_size(msg);
    char small[256];
    char *buf = size <= sizeof(small) ? small : malloc(size);
    if (!buf)
        return -ENOMEM;
    long len = hrp_peer_encode(msg, buf, size);
    int r = len < 0 ? (int)len : hrd_conn_queue(c, buf, (size_t)len);
    if (buf != small)
        free(buf);
    return r;
}

/* 0: all sent or the socket is full. Negative errno: broken. */
static int flush(struct conn *c)
{
    while (c->tx_at < c->tx_have) {
        ssize_t n = send(c->fd, c->tx + c->tx_at, c->tx_have - c->tx_at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN ? 0 : -errno;
        c->tx_at += (size_t)n;
    }
    all_sent(c);
    return 0;
}

/* ---- receiving ------------------------------------------------------------------------------------------ */

static const char *errno_words(int err, char *buf, size_t len)
{
    switch (err) {
    case ECONNREFUSED:
        return "connection refused (no hreduced listens there)";
    case ETIMEDOUT:
        return "no answer (filtered by a firewall, or the machine is down)";
    case EHOSTUNREACH:
    case ENETUNREACH:
        return "no route to it";
    case ECONNRESET:
    case EPIPE:
        return "the connection was reset (the daemon died, or its machine restarted)";
    default:
        snprintf(buf, len, "%s", strerror(err));
        return buf;
    }
}

static void broken_eof(struct conn *c)
{
    struct hrd_peer *p = c->peer;
    char buf[sizeof(p->bye_text) + 64];
    if (c->stage == CONN_OPEN && p && p->bye)
        snprintf(buf, sizeof(buf), "ended the connection: %s", p->bye_text);
    else if (c->stage == CONN_OPEN)
        snprintf(buf, sizeof(buf), "closed the connection (its daemon stopped or died)");
    else
        snprintf(buf, sizeof(buf),
                 "the connection was closed during the opening (something else than hreduced?)");
    hrd_conn_broken(c, HRP_PEER_LOST, buf);
}

static void broken_errno(struct conn *c, int err)
{
    char words[128], why[160];
    const char *what = errno_words(err, words, sizeof(words));
    if (c->peer && c->peer->bye) {
        broken_eof(c);
        return;
    }
    /* Completes "node NAME ..." or "ADDRESS: ...". */
    snprintf(why, sizeof(why), "%s%s", c->stage == CONN_OPEN ? "is gone: " : "", what);
    hrd_conn_broken(c, HRP_PEER_LOST, why);
}

static int rx_room(struct conn *c, size_t need)
{
    if (need <= c->rx_size)
        return 0;
    char *rx = realloc(c->rx, need);
    if (!rx)
        return -ENOMEM;
    c->rx = rx;
    c->rx_size = need;
    return 0;
}

static bool garbage(struct conn *c)
{
    hrd_conn_broken(c, HRP_PROTOCOL, "broke the protocol: it sent a message that cannot be");
    return false;
}

/* Handles the complete messages in rx. False: the connection is gone. */
static bool messages(struct conn *c)
{
    size_t at = 0;
    bool all = false;
    while (!all) {
        struct hrp_peer_hdr hdr;
        if (c->rx_have - at < sizeof(hdr))
            break;
        memcpy(&hdr, c->rx + at, sizeof(hdr));
        long len = hrp_peer_frame(&hdr);
        if (len < 0)
            return garbage(c);
        if (c->rx_have - at < (size_t)len) {
            if (rx_room(c, (size_t)len) != 0) {
                hrd_conn_broken(c, HRP_RESOURCE, "sent a message for which this daemon has no memory");
                return false;
            }
            break;
        }
        /* decode() wants it aligned; behind a message of odd length it is not. */
        if (at % 8 != 0) {
            memmove(c->rx, c->rx + at, c->rx_have - at);
            c->rx_have -= at;
            at = 0;
        }
        struct hrp_peer_msg msg;
        if (hrp_peer_decode(&msg, c->rx + at, (size_t)len) != 0)
            return garbage(c);
        at += (size_t)len;
        if (!hrd_peer_received(c->d, c, &msg))
            return false;
    }
    memmove(c->rx, c->rx + at, c->rx_have - at);
    c->rx_have -= at;
    return true;
}

/* How many bytes to ask for now: never beyond the opening, since what follows may be the agent's. */
static size_t wants(struct conn *c)
{
    size_t fixed = hrd_shake_needs(c);
    size_t size = fixed > 0 ? fixed : c->rx_size < RX_START ? RX_START : c->rx_size;
    if (rx_room(c, size) != 0)
        return 0;
    return fixed > 0 ? fixed - c->rx_have : c->rx_size - c->rx_have;
}

static void readable(struct conn *c)
{
    struct hrd_daemon *d = c->d;
    for (size_t total = 0; total < READ_TURN;) {
        size_t size = wants(c);
        if (size == 0) {
            hrd_conn_broken(c, HRP_RESOURCE, "this daemon has no memory for the connection");
            return;
        }
        ssize_t n = recv(c->fd, c->rx + c->rx_have, size, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n < 0) {
            broken_errno(c, errno);
            return;
        }
        if (n == 0) {
            broken_eof(c);
            return;
        }
        total += (size_t)n;
        c->rx_have += (size_t)n;
        if (c->peer && c->stage == CONN_OPEN)
            c->peer->last_rx = uv_now(d->loop);
        size_t fixed = hrd_shake_needs(c);
        if (fixed > 0 && c->rx_have < fixed)
            continue;
        if (fixed > 0 ? !hrd_shake_step(c) : !messages(c))
            return;
        if (c->stage == CONN_FLUSH)
            return;
    }
}

/* The other end may have said why before it closed, and what it left unread makes an error of that: read first. */
static void failed(struct conn *c, int err)
{
    if (c->stage == CONN_OPEN)
        readable(c);
    if (!uv_is_closing((uv_handle_t *)&c->poll))
        broken_errno(c, err);
}

static void writable(struct conn *c)
{
    if (c->stage == CONN_CONNECTING) {
        int err = 0;
        socklen_t len = sizeof(err);
        if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &err, &len) != 0)
            err = errno;
        if (err != 0)
            broken_errno(c, err);
        else
            hrd_shake_start(c);
        return;
    }
    int r = flush(c);
    if (r != 0) {
        failed(c, -r);
        return;
    }
    if (c->tx_have == 0 && c->stage == CONN_FLUSH) {
        if (c->refused)
            hrd_conn_close(c);
        else
            hrd_link_stream_ready(c);
        return;
    }
    hrd_conn_watch(c);
}

static void on_poll(uv_poll_t *h, int status, int events)
{
    struct conn *c = h->data;
    if (status < 0 && c->stage == CONN_OPEN) {
        failed(c, -status == EBADF ? ECONNRESET : -status);
        return;
    }
    if (status < 0) {
        /* libuv says EBADF for POLLERR; the socket knows better. */
        int err = 0;
        socklen_t len = sizeof(err);
        if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &err, &len) != 0 || err == 0)
            err = -status == EBADF ? ECONNRESET : -status;
        broken_errno(c, err);
        return;
    }
    if (events & UV_WRITABLE) {
        writable(c);
        if (uv_is_closing((uv_handle_t *)h) || c->stage == CONN_CONNECTING)
            return;
    }
    if (events & UV_READABLE)
        readable(c);
}

void hrd_conn_watch(struct conn *c)
{
    int events = UV_READABLE;
    if (c->stage == CONN_CONNECTING)
        events = UV_WRITABLE;
    else if (c->stage == CONN_FLUSH)
        events = UV_WRITABLE;
    else if (c->tx_at < c->tx_have)
        events |= UV_WRITABLE;
    if (events == c->events)
        return;
    c->events = events;
    uv_poll_start(&c->poll, events, on_poll);
}

/* ---- making --------------------------------------------------------------------------------------------- */

static void set_options(struct hrd_daemon *d, int fd)
{
    int one = 1, idle = 5, interval = 2, count = 3;
    unsigned timeout = d->cfg.peer_timeout_ms;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof(count));
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof(timeout));
}

void hrd_conn_device_denied(struct hrd_daemon *d, int err)
{
    if (d->peers->device_denied)
        return;
    d->peers->device_denied = true;
    hrd_warn(
        "cannot bind connections to interface %s (%s): only the source address is bound, the routing table "
        "chooses the link",
        d->peers->net.device, strerror(-err));
}

/*
 * The source address alone does not choose the link when two links lie in one subnet: the route does. So the
 * device is bound too where the configuration names one, except towards this machine itself, whose packets
 * come over lo. Accepted connections have the device of their listener.
 */
static void bind_device(struct hrd_daemon *d, int fd, const struct hrp_addr *remote)
{
    struct hrd_peers *ps = d->peers;
    const char *device = ps->net.device;
    if (device[0] == 0 || hrd_netif_is_local(ps->ifs, ps->nifs, remote))
        return;
    if (setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, device, (socklen_t)strlen(device) + 1) != 0)
        hrd_conn_device_denied(d, -errno);
}

static struct conn *conn_new(struct hrd_daemon *d, int fd, const struct hrp_addr *remote)
{
    struct hrd_peers *ps = d->peers;
    struct conn *c = calloc(1, sizeof(*c));
    if (!c)
        return NULL;
    c->d = d;
    c->fd = fd;
    c->remote = *remote;
    c->poll.data = c;
    if (uv_poll_init(d->loop, &c->poll, fd) != 0) {
        free(c);
        return NULL;
    }
    set_options(d, fd);
    c->link = ps->conns_tail;
    *ps->conns_tail = c;
    ps->conns_tail = &c->next;
    return c;
}

struct conn *hrd_conn_accepted(struct hrd_daemon *d, int fd, const struct hrp_addr *remote)
{
    struct conn *c = conn_new(d, fd, remote);
    if (!c)
        return NULL;
    c->incoming = true;
    c->stage = CONN_HELLO;
    c->deadline = uv_now(d->loop) + HELLO_TIMEOUT_MS;
    d->peers->nstrangers++;
    hrd_conn_watch(c);
    return c;
}

static int bind_source(struct hrd_daemon *d, int fd, const struct hrp_addr *to)
{
    struct hrd_peers *ps = d->peers;
    struct hrp_addr from;
    struct sockaddr_storage ss;
    int one = 1;
    if (!hrd_netif_source(&ps->net, ps->ifs, ps->nifs, to, &from))
        return 0;
    /* The port is chosen at connect, where it only has to be unique for the pair of addresses. */
    setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof(one));
    socklen_t len = hrd_addr_to_sockaddr(&from, &ss);
    return bind(fd, (struct sockaddr *)&ss, len) == 0 ? 0 : -errno;
}

struct conn *hrd_conn_dial(struct hrd_daemon *d, const struct hrp_addr *to, uint8_t role, char *why,
                           size_t whylen)
{
    struct hrp_addr addr = *to;
    struct sockaddr_storage ss;
    char words[128];
    if (addr.port == 0)
        addr.port = d->peers->net.port;
    /* A scope is a number of the machine that said it; here it is the interface that was chosen. */
    if (addr.family == 6 && hrd_addr_is_link_local(&addr) && d->peers->net.device[0])
        addr.scope_id = if_nametoindex(d->peers->net.device);
    int fd = socket(addr.family == 6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        snprintf(why, whylen, "no socket for it (%s)", strerror(errno));
        return NULL;
    }
    bind_device(d, fd, &addr);
    int r = bind_source(d, fd, &addr);
    if (r != 0) {
        snprintf(why, whylen, "the own address cannot be bound (%s): see 'listen' and 'interface'",
                 strerror(-r));
        close(fd);
        return NULL;
    }
    struct conn *c = conn_new(d, fd, &addr);
    if (!c) {
        snprintf(why, whylen, "no memory for the connection");
        close(fd);
        return NULL;
    }
    c->role = role;
    c->stage = CONN_CONNECTING;
    c->deadline = uv_now(d->loop) + CONNECT_TIMEOUT_MS;
    socklen_t len = hrd_addr_to_sockaddr(&addr, &ss);
    if (connect(fd, (struct sockaddr *)&ss, len) != 0 && errno != EINPROGRESS) {
        snprintf(why, whylen, "%s", errno_words(errno, words, sizeof(words)));
        hrd_conn_close(c);
        return NULL;
    }
    hrd_conn_watch(c);
    return c;
}
