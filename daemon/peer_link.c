/* SPDX-License-Identifier: MIT */
/*
 * Data links. The daemon with the smaller instance id makes them. A tcp link: it dials all streams; when every stream has
 * passed its opening the sockets go to the agent and nothing of them is left here. For verbs see peer_verbs.c.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/peer_impl.h"

#define MINOR_WITH_VERBS 1u
#define TRY_TIMEOUT_MS (CONNECT_TIMEOUT_MS + 2 * HELLO_TIMEOUT_MS)

bool hrd_peer_dials(const struct hrd_daemon *d, const uint8_t instance[16])
{
    return memcmp(d->instance, instance, sizeof(d->instance)) < 0;
}

/* ---- records -------------------------------------------------------------------------------------------- */

static struct plink *link_new(struct hrd_daemon *d, struct hrd_peer *p)
{
    struct plink *l = calloc(1, sizeof(*l));
    if (!l)
        abort();
    l->peer = p;
    l->id = ++d->peers->last_no;
    l->link = l->rails[0] = l;
    l->nrails = 1;
    l->next = p->links;
    p->links = l;
    return l;
}

struct plink *hrd_link_rail(struct hrd_daemon *d, struct plink *link, unsigned rail)
{
    struct plink *l = link->rails[rail];
    if (l)
        return l;
    l = link_new(d, link->peer);
    l->link = link;
    l->rail = rail;
    l->sl = link->sl;
    l->tc = link->tc;
    link->rails[rail] = l;
    return l;
}

struct plink *hrd_link_tcp(struct hrd_daemon *d, struct hrd_peer *p)
{
    for (struct plink *l = p->links; l; l = l->next)
        if (l->tcp)
            return l;
    struct plink *l = link_new(d, p);
    l->tcp = true;
    return l;
}

struct plink *hrd_link_class(struct hrd_daemon *d, struct hrd_peer *p, uint8_t sl, uint8_t tc)
{
    for (struct plink *l = p->links; l; l = l->next)
        if (!l->tcp && l->link == l && l->sl == sl && l->tc == tc)
            return l;
    struct plink *l = link_new(d, p);
    l->sl = sl;
    l->tc = tc;
    l->settled = p->minor < MINOR_WITH_VERBS;
    if (l->settled)
        snprintf(l->why, sizeof(l->why),
                 "node %s runs a release without verbs; install the same on all nodes", p->name);
    return l;
}

struct plink *hrd_link_by_id(struct hrd_peers *ps, uint32_t id)
{
    for (struct hrd_peer *p = ps->peers; p; p = p->next)
        for (struct plink *l = p->links; l; l = l->next)
            if (l->id == id)
                return l;
    return NULL;
}

uint64_t hrd_link_nonce(void)
{
    uint64_t nonce;
    if (getrandom(&nonce, sizeof(nonce), 0) != (ssize_t)sizeof(nonce))
        abort();
    return nonce | 1;
}

struct plink *hrd_link_by_nonce(const struct hrd_peer *p, uint64_t nonce)
{
    struct plink *l = p->links;
    while (l && (!l->in || l->nonce != nonce))
        l = l->next;
    return l;
}

bool hrd_link_tcp_used(const struct hrd_peer *p)
{
    const struct plink *l = p->links;
    while (l && !l->tcp)
        l = l->next;
    return l && l->users > 0;
}

bool hrd_link_any_up(const struct hrd_peer *p)
{
    const struct plink *l = p->links;
    while (l && !l->up)
        l = l->next;
    return l != NULL;
}

static struct link_try *try_new(struct hrd_daemon *d, struct plink *l, unsigned n)
{
    struct link_try *t = calloc(1, sizeof(*t));
    if (!t)
        return NULL;
    t->n = n;
    for (unsigned i = 0; i < HRP_PEER_STREAMS_MAX; i++)
        t->fd[i] = -1;
    t->deadline = uv_now(d->loop) + TRY_TIMEOUT_MS;
    l->attempt = t;
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

void hrd_link_use(struct hrd_daemon *d, uint32_t link, int by)
{
    struct plink *l = d->peers ? hrd_link_by_id(d->peers, link) : NULL;
    if (l)
        l->users += (unsigned)by;
}

static void drop_try(struct hrd_daemon *d, struct plink *l)
{
    struct link_try *t = l->attempt;
    if (!t)
        return;
    close_streams(d, t);
    l->attempt = NULL;
    free(t);
}

static void end_link(struct hrd_daemon *d, struct plink *l, const char *why)
{
    drop_try(d, l);
    hrd_verbs_drop(l);
    hrd_cm_setup_free(l->cm);
    if (l->made)
        hrd_verbs_conn_free(l->made);
    if (l->up)
        hrd_agent_link_down(d->agent, l->id, why);
    free(l);
}

void hrd_link_remove(struct hrd_daemon *d, struct plink *link, const char *why)
{
    for (unsigned i = HRD_RAILS_MAX; i-- > 0;) {
        struct plink *l = link->rails[i], **at = &link->peer->links;
        if (!l)
            continue;
        while (*at != l)
            at = &(*at)->next;
        *at = l->next;
        end_link(d, l, why);
    }
}

void hrd_link_end_all(struct hrd_daemon *d, struct hrd_peer *p, const char *why)
{
    while (p->links) {
        struct plink *l = p->links;
        p->links = l->next;
        end_link(d, l, why);
    }
}

/* ---- dialing side --------------------------------------------------------------------------------------- */

/* The one that serves this want, as far as it is known by now; NULL: that is not settled. */
static struct plink *link_for(struct hrd_daemon *d, struct hrd_peer *p, const struct hrd_link_want *want)
{
    if (want->transport == HRD_WANT_TCP)
        return hrd_link_tcp(d, p);
    struct plink *l = hrd_link_class(d, p, want->sl, want->tc);
    return l->settled ? hrd_link_tcp(d, p) : l->up && !l->closing ? l : NULL;
}

int hrd_peer_link(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want, uint32_t *link)
{
    struct hrd_peer *p = hrd_peer_by_no(d->peers, no);
    if (!p || !p->up || p->doomed[0])
        return -ENOENT;
    struct plink *l = link_for(d, p, want);
    if (l && l->up && !hrd_rails_down(l)) {
        *link = l->id;
        return 1;
    }
    if ((l && l->up) || !hrd_peer_dials(d, p->instance))
        return 0;
    if (!l) {
        hrd_verbs_begin(d, hrd_link_class(d, p, want->sl, want->tc));
        return 0;
    }
    if (l->attempt)
        return 0;
    unsigned n = d->cfg.tcp_streams < p->streams ? d->cfg.tcp_streams : p->streams;
    struct link_try *t = try_new(d, l, n < HRP_PEER_STREAMS_MAX ? n : HRP_PEER_STREAMS_MAX);
    if (!t)
        abort();
    t->fresh = true;
    hrd_peer_soon(d);
    return 0;
}

const char *hrd_peer_transport(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want,
                               const char **why)
{
    struct hrd_peer *p = d->peers ? hrd_peer_by_no(d->peers, no) : NULL;
    *why = "";
    if (!p)
        return "none";
    if (want->transport != HRD_WANT_TCP)
        *why = hrd_link_class(d, p, want->sl, want->tc)->why;
    const struct plink *l = link_for(d, p, want);
    return !l || !l->up ? "none" : l->tcp ? "tcp" : "verbs";
}

bool hrd_peer_half_verbs(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want)
{
    struct hrd_peer *p = d->peers ? hrd_peer_by_no(d->peers, no) : NULL;
    return p && want->transport != HRD_WANT_TCP && hrd_link_class(d, p, want->sl, want->tc)->half;
}

bool hrd_peer_no_device(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want)
{
    struct hrd_peer *p = d->peers ? hrd_peer_by_no(d->peers, no) : NULL;
    return p && want->transport != HRD_WANT_TCP && hrd_link_class(d, p, want->sl, want->tc)->none;
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

/* Whoever waits for the link hears why there is none yet. */
static void tell_failed(struct hrd_daemon *d, const struct hrd_peer *p, const char *why)
{
    hrd_member_link(d, p->no, why);
    hrd_doctor_link_failed(d, p->no, why);
}

static void try_failed(struct hrd_daemon *d, struct plink *l, const char *why);

static void dial_streams(struct hrd_daemon *d, struct plink *l)
{
    struct hrd_peer *p = l->peer;
    struct link_try *t = l->attempt;
    struct hrp_addr to;
    char why[256];
    if (!link_addr(p, t->addr, &to)) {
        char all[sizeof(t->why)];
        memcpy(all, t->why, sizeof(all));
        drop_try(d, l);
        tell_failed(d, p, all);
        return;
    }
    /* A new number for every pass: late streams of an earlier one are told apart. */
    t->nonce = hrd_link_nonce();
    for (unsigned i = 0; i < t->n; i++) {
        struct conn *c = hrd_conn_dial(d, &to, HRP_PEER_DATA, why, sizeof(why));
        if (!c) {
            try_failed(d, l, why);
            return;
        }
        c->peer = p;
        c->attempt = t;
        c->stream = i;
    }
}

static void try_failed(struct hrd_daemon *d, struct plink *l, const char *why)
{
    struct link_try *t = l->attempt;
    struct hrp_addr to;
    char at[HRD_ADDR_TEXT + 16] = "?";
    size_t len = strlen(t->why);
    if (link_addr(l->peer, t->addr, &to))
        hrd_addr_port_text(&to, at, sizeof(at));
    snprintf(t->why + len, sizeof(t->why) - len, "%s%s: %s", len > 0 ? "; " : "", at, why);
    close_streams(d, t);
    t->addr++;
    dial_streams(d, l);
}

void hrd_link_start_fresh(struct hrd_daemon *d)
{
    for (struct hrd_peer *p = d->peers->peers; p;) {
        struct plink *l = p->links;
        while (l && !(l->attempt && l->attempt->fresh))
            l = l->next;
        if (!l) {
            p = p->next;
            continue;
        }
        l->attempt->fresh = false;
        dial_streams(d, l);
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
    struct plink *l = hrd_link_tcp(d, p);
    if (hrd_peer_dials(d, p->instance) || l->up) {
        snprintf(why, whylen, "%s", l->up ? "there is a link already" : "the other side makes the link");
        return HRP_PROTOCOL;
    }
    struct link_try *t = l->attempt;
    if (t && t->nonce != h->link) {
        drop_try(d, l);
        t = NULL;
    }
    if (!t) {
        t = try_new(d, l, h->nstreams);
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

/* What is in use from now on, once; where it is tcp for want of verbs, why. */
static void say_path(const struct plink *l, unsigned n)
{
    const struct plink *v = l->peer->links;
    char rails[400];
    hrd_rails_text(l, rails, sizeof(rails));
    while (v && !(v->settled && v->why[0]))
        v = v->next;
    const struct plink *first = hrd_rails_first(l);
    if (!l->tcp)
        hrd_notice("path to node %s: verbs from and to host memory, %s%u queue pair%s, service level %u, "
                   "traffic class %u, connected by %s%s%s",
                   l->peer->name, rails, n, n == 1 ? "" : "s", l->sl, l->tc,
                   first->rdmacm ? "RDMA-CM" : "exchange", first->rdmacm ? "" : " instead of RDMA-CM on ",
                   first->rdmacm ? "" : first->setup_why + 5);
    else if (v && v->none)
        hrd_notice("path to node %s: tcp, %u stream%s: %s", l->peer->name, n, n == 1 ? "" : "s", v->why);
    else if (v)
        hrd_notice("path to node %s: tcp, %u stream%s, instead of verbs%s%s", l->peer->name, n,
                   n == 1 ? "" : "s", strncmp(v->why, "node ", 5) == 0 ? " on " : ": ", v->why);
    else
        hrd_notice("path to node %s: tcp, %u stream%s", l->peer->name, n, n == 1 ? "" : "s");
}

void hrd_link_is_up(struct hrd_daemon *d, struct plink *l, const struct hrd_transport *tp,
                    struct hrd_conn *conn, unsigned n)
{
    struct hrd_peer *p = l->peer;
    char name[HRP_PEER_NAME + sizeof(p->where) + 4];
    snprintf(name, sizeof(name), "%s (%s)", p->name, p->where);
    l->up = true;
    l->tries = 0;
    l->why[0] = '\0';
    hrd_agent_link_up(d->agent, l->id, name, tp, conn);
    say_path(l, n);
    hrd_member_link(d, p->no, NULL);
}

static void link_complete(struct hrd_daemon *d, struct plink *l)
{
    struct link_try *t = l->attempt;
    unsigned n = t->n;
    struct hrd_tcp_conn *conn = hrd_tcp_conn_new(t->fd, n);
    l->attempt = NULL;
    free(t);
    if (!conn) {
        tell_failed(d, l->peer, "no memory for the link");
        return;
    }
    conn->io = d->tcp_io;
    hrd_link_is_up(d, l, &hrd_transport_tcp, &conn->base, n);
}

void hrd_link_stream_ready(struct conn *c)
{
    struct hrd_daemon *d = c->d;
    struct plink *l = hrd_link_tcp(d, c->peer);
    struct link_try *t = c->attempt;
    unsigned stream = c->stream;
    t->fd[stream] = hrd_conn_detach(c);
    if (++t->ready == t->n)
        link_complete(d, l);
}

void hrd_link_stream_failed(struct conn *c, const char *why)
{
    struct hrd_daemon *d = c->d;
    struct plink *l = hrd_link_tcp(d, c->peer);
    if (!l->attempt || l->attempt->incoming)
        drop_try(d, l);
    else
        try_failed(d, l, why);
}

void hrd_link_tick(struct hrd_daemon *d, struct hrd_peer *p)
{
    for (struct plink *l = p->links; l; l = l->next) {
        if (l->attempt && l->attempt->incoming && uv_now(d->loop) > l->attempt->deadline)
            drop_try(d, l);
        hrd_mend_tick(d, l);
        if (hrd_rails_incomplete(d, l))
            hrd_verbs_close(d, l);
        if (l->again_at && uv_now(d->loop) >= l->again_at)
            hrd_verbs_again(d, l);
    }
}
