/* SPDX-License-Identifier: MIT */
/*
 * Data links: the daemon with the smaller instance id dials all streams of a link; when every stream has
 * passed its opening the sockets go to the agent and nothing of them is left here.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/peer_impl.h"

#define TRY_TIMEOUT_MS (CONNECT_TIMEOUT_MS + 2 * HELLO_TIMEOUT_MS)

bool hrd_peer_dials(const struct hrd_daemon *d, const uint8_t instance[16])
{
    return memcmp(d->instance, instance, sizeof(d->instance)) < 0;
}

static struct link_try *try_new(struct hrd_daemon *d, struct hrd_peer *p, unsigned n)
{
    struct link_try *t = calloc(1, sizeof(*t));
    if (!t)
        return NULL;
    t->n = n;
    for (unsigned i = 0; i < HRP_PEER_STREAMS_MAX; i++)
        t->fd[i] = -1;
    t->deadline = uv_now(d->loop) + TRY_TIMEOUT_MS;
    p->attempt = t;
    return t;
}

static void close_streams(struct hrd_daemon *d, struct link_try *t)
{
    for (struct conn *c = d->peers->conns, *next; c; c = next) {
        next = c->next;
        if (c->attempt == t)
            hrd_conn_close(c);
    }
    for (unsigned i = 0; i < t->n; i++) {
        if (t->fd[i] >= 0)
            close(t->fd[i]);
        t->fd[i] = -1;
    }
    t->ready = 0;
}

void hrd_link_drop_try(struct hrd_daemon *d, struct hrd_peer *p)
{
    struct link_try *t = p->attempt;
    hrd_verbs_drop(p);
    if (!t)
        return;
    close_streams(d, t);
    p->attempt = NULL;
    free(t);
}

/* ---- dialing side --------------------------------------------------------------------------------------- */

int hrd_peer_link(struct hrd_daemon *d, uint32_t no)
{
    struct hrd_peer *p = hrd_peer_by_no(d->peers, no);
    if (!p || !p->up || p->doomed[0])
        return -ENOENT;
    if (p->link_up)
        return 1;
    if (!hrd_peer_dials(d, p->instance) || p->attempt || p->verbs)
        return 0;
    if (!p->verbs_settled) {
        hrd_verbs_begin(d, p);
        return 0;
    }
    unsigned n = d->cfg.tcp_streams < p->streams ? d->cfg.tcp_streams : p->streams;
    struct link_try *t = try_new(d, p, n < HRP_PEER_STREAMS_MAX ? n : HRP_PEER_STREAMS_MAX);
    if (!t)
        abort();
    t->fresh = true;
    hrd_peer_soon(d);
    return 0;
}

/* The address that the control connection has is the best bet, then those the peer named. */
static bool link_addr(const struct hrd_peer *p, unsigned i, struct hrp_addr *out)
{
    if (i == 0) {
        *out = p->via;
        return true;
    }
    for (unsigned j = 0, k = 0; j < p->naddrs; j++) {
        if (hrd_addr_same_ip(&p->addr[j], &p->via))
            continue;
        if (++k == i) {
            *out = p->addr[j];
            return true;
        }
    }
    return false;
}

static void try_failed(struct hrd_daemon *d, struct hrd_peer *p, const char *why);

static void dial_streams(struct hrd_daemon *d, struct hrd_peer *p)
{
    struct link_try *t = p->attempt;
    struct hrp_addr to;
    char why[256];
    if (!link_addr(p, t->addr, &to)) {
        char all[sizeof(t->why)];
        memcpy(all, t->why, sizeof(all));
        hrd_link_drop_try(d, p);
        hrd_member_link(d, p->no, all);
        return;
    }
    /* A new number for every pass: late streams of an earlier one are told apart. */
    if (getrandom(&t->nonce, sizeof(t->nonce), 0) != (ssize_t)sizeof(t->nonce))
        abort();
    t->nonce |= 1;
    for (unsigned i = 0; i < t->n; i++) {
        struct conn *c = hrd_conn_dial(d, &to, HRP_PEER_DATA, why, sizeof(why));
        if (!c) {
            try_failed(d, p, why);
            return;
        }
        c->peer = p;
        c->attempt = t;
        c->stream = i;
    }
}

static void try_failed(struct hrd_daemon *d, struct hrd_peer *p, const char *why)
{
    struct link_try *t = p->attempt;
    struct hrp_addr to;
    char at[HRD_ADDR_TEXT + 16] = "?";
    size_t len = strlen(t->why);
    if (link_addr(p, t->addr, &to))
        hrd_addr_port_text(&to, at, sizeof(at));
    snprintf(t->why + len, sizeof(t->why) - len, "%s%s: %s", len > 0 ? "; " : "", at, why);
    close_streams(d, t);
    t->addr++;
    dial_streams(d, p);
}

void hrd_link_start_fresh(struct hrd_daemon *d)
{
    for (struct hrd_peer *p = d->peers->peers; p;) {
        if (!p->attempt || !p->attempt->fresh) {
            p = p->next;
            continue;
        }
        p->attempt->fresh = false;
        dial_streams(d, p);
        p = d->peers->peers; /* the list may have changed in any way */
    }
}

/* ---- accepting side ------------------------------------------------------------------------------------- */

static bool stream_taken(struct hrd_daemon *d, const struct link_try *t, unsigned stream)
{
    if (t->fd[stream] >= 0)
        return true;
    for (struct conn *c = d->peers->conns; c; c = c->next)
        if (c->attempt == t && c->stream == stream)
            return true;
    return false;
}

uint32_t hrd_link_incoming(struct conn *c, char *why, size_t whylen)
{
    struct hrd_daemon *d = c->d;
    const struct hrp_peer_hello *h = &c->hello;
    struct hrd_peer *p = hrd_peer_by_instance(d->peers, h->instance);
    if (!p || !p->up || p->doomed[0] || p->remote_no != h->peer_no) {
        snprintf(why, whylen, "no control connection belongs to this stream any more");
        return HRP_PEER_LOST;
    }
    if (hrd_peer_dials(d, p->instance) || p->link_up) {
        snprintf(why, whylen, "%s", p->link_up ? "there is a link already" : "the other side makes the link");
        return HRP_PROTOCOL;
    }
    hrd_verbs_drop(p); /* the other side has given verbs up; why is on its way */
    struct link_try *t = p->attempt;
    if (t && t->nonce != h->link) {
        hrd_link_drop_try(d, p);
        t = NULL;
    }
    if (!t) {
        t = try_new(d, p, h->nstreams);
        if (!t) {
            snprintf(why, whylen, "no memory for the link");
            return HRP_RESOURCE;
        }
        t->incoming = true;
        t->nonce = h->link;
    }
    if (t->n != h->nstreams || stream_taken(d, t, h->stream)) {
        snprintf(why, whylen, "stream %u of %u does not fit the others", h->stream, h->nstreams);
        return HRP_PROTOCOL;
    }
    c->peer = p;
    c->attempt = t;
    c->stream = h->stream;
    return HRP_OK;
}

/* ---- both ----------------------------------------------------------------------------------------------- */

void hrd_link_is_up(struct hrd_daemon *d, struct hrd_peer *p, const struct hrd_transport *tp,
                    struct hrd_conn *conn, unsigned n)
{
    char name[HRP_PEER_NAME + sizeof(p->where) + 4];
    snprintf(name, sizeof(name), "%s (%s)", p->name, p->where);
    p->link_up = true;
    p->link_verbs = tp->caps & HRD_TP_RDMA;
    hrd_agent_link_up(d->agent, p->no, name, tp, conn);
    hrd_info("link with node %s: %u %s stream%s", name, n, tp->name, n == 1 ? "" : "s");
    hrd_member_link(d, p->no, NULL);
}

static void link_complete(struct hrd_daemon *d, struct hrd_peer *p)
{
    struct link_try *t = p->attempt;
    unsigned n = t->n;
    struct hrd_tcp_conn *conn = hrd_tcp_conn_new(t->fd, n);
    p->attempt = NULL;
    free(t);
    if (!conn) {
        hrd_member_link(d, p->no, "no memory for the link");
        return;
    }
    hrd_link_is_up(d, p, &hrd_transport_tcp, &conn->base, n);
}

void hrd_link_stream_ready(struct conn *c)
{
    struct hrd_daemon *d = c->d;
    struct hrd_peer *p = c->peer;
    struct link_try *t = c->attempt;
    unsigned stream = c->stream;
    t->fd[stream] = hrd_conn_detach(c);
    if (++t->ready == t->n)
        link_complete(d, p);
}

void hrd_link_stream_failed(struct conn *c, const char *why)
{
    struct hrd_daemon *d = c->d;
    struct hrd_peer *p = c->peer;
    if (c->attempt->incoming)
        hrd_link_drop_try(d, p);
    else
        try_failed(d, p, why);
}

void hrd_link_tick(struct hrd_daemon *d, struct hrd_peer *p)
{
    if (p->attempt && p->attempt->incoming && uv_now(d->loop) > p->attempt->deadline)
        hrd_link_drop_try(d, p);
}
