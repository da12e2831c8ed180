/* SPDX-License-Identifier: MIT */
/*
 * A cluster of memberships on one thread: real member*.c of every node, a clock that the test moves, and fakes
 * for everything else (peers, agents, sessions). Whatever happens between nodes is a delivery; deliveries of one
 * pair stay in order, those of different pairs are shuffled by the seed.
 */
#ifndef MEMBER_WORLD_H
#define MEMBER_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/member_impl.h"

#define W_NODES 9
#define W_SESSIONS 24 /* of a node */
#define W_SLOTS 3
#define W_COMMS 32
#define W_JOINING 9u /* cookie of a JOINING */

enum w_kind { W_MSG, W_UP, W_DIALED, W_LINKED, W_LOST, W_READY, W_FAILED, W_LEFT, W_GONE, W_COMM_FAIL };

struct w_event {
    struct w_event *next;
    enum w_kind kind;
    int from, to; /* order is kept for each pair */
    uint32_t no;
    uint64_t token, comm;
    uint32_t status, rank;
    char text[HRP_COMM_TEXT];
    size_t len;
    uint64_t data[]; /* W_MSG */
};

struct w_session {
    struct hrd_session pub;
    bool alive;
    unsigned slots; /* taken, bits */
    /* what the last request was answered with */
    int answers;
    bool joined, done;
    struct hrp_msg_joined answer;
    uint32_t status;
    char text[HRP_COMM_TEXT];
    int told; /* by TEXT */
};

struct w_acomm {
    bool used, failed;
    uint64_t comm;
    unsigned nlocal, nleft;
    struct hrd_comm_rank local[32];
    bool left[32];
    unsigned nnodes;
    uint32_t peer[W_NODES];
    struct hrp_comm_config config;
    bool eager_blocks;
};

struct w_node {
    struct hrd_daemon d; /* first: the fakes find their node by it */
    bool running;
    struct w_session session[W_SESSIONS];
    struct w_acomm comm[W_COMMS];
    struct w_event *orphan;  /* failures of comms that the agent does not have yet */
    uint32_t no_of[W_NODES]; /* peer number by node, 0: not connected */
    bool link[W_NODES];
    bool dead[W_NODES];    /* the connection is broken, which the node does not know yet */
    uint32_t ready_status; /* what the agent answers to comm_add */
    bool ready_held;       /* it answers never */
    bool no_link[W_NODES]; /* data links to that node fail */
    bool verbs;            /* its links are; otherwise tcp, because of: */
    const char *no_verbs;
    const char *mending;   /* the path of its links is away */
    unsigned behind;       /* by so many minor versions */
    bool no_dial[W_NODES]; /* connections to that node are not answered */
    char name[HRP_PEER_NAME];
    unsigned adds;
};

static struct w_node *w;
static struct w_event *w_queue;
static uint64_t w_clock, w_sid;
static unsigned w_minor = HRP_PEER_MINOR; /* of all nodes, as the others know it */
static uint32_t w_no, w_seed;
static uint8_t w_generation[W_NODES];

static uint32_t w_random(uint32_t n)
{
    w_seed = w_seed * 1664525u + 1013904223u;
    return (w_seed >> 8) % n;
}

static uint64_t w_now(void)
{
    return w_clock;
}

static int w_index(struct hrd_daemon *d)
{
    return (int)((struct w_node *)(void *)d - w);
}

static struct w_event *w_event(enum w_kind kind, int from, int to, size_t len)
{
    struct w_event *e = calloc(1, sizeof(*e) + len), **at = &w_queue;
    e->kind = kind;
    e->from = from;
    e->to = to;
    e->len = len;
    while (*at)
        at = &(*at)->next;
    *at = e;
    return e;
}

static struct hrp_addr w_addr(int node)
{
    return (struct hrp_addr){.family = 4, .port = 1, .ip = {10, 0, 0, (uint8_t)(node + 1)}};
}

/* ---- peers ------------------------------------------------------------------------------------------------- */

uint32_t hrd_peer_find(struct hrd_daemon *d, const uint8_t instance[16])
{
    struct w_node *n = &w[w_index(d)];
    for (int i = 0; i < W_NODES; i++)
        if (n->no_of[i] && memcmp(w[i].d.instance, instance, 16) == 0)
            return n->no_of[i];
    return 0;
}

static int w_by_no(const struct w_node *n, uint32_t no)
{
    for (int i = 0; i < W_NODES; i++)
        if (n->no_of[i] == no)
            return i;
    return -1;
}

bool hrd_peer_info(struct hrd_daemon *d, uint32_t no, struct hrd_peer_info *out)
{
    static struct hrp_addr addr[W_NODES];
    int i = w_by_no(&w[w_index(d)], no);
    if (no == 0 || i < 0)
        return false;
    addr[i] = w_addr(i);
    *out = (struct hrd_peer_info){.no = no,
                                  .minor = w_minor - w[i].behind,
                                  .instance = w[i].d.instance,
                                  .name = w[i].name,
                                  .where = "somewhere",
                                  .naddrs = 1,
                                  .addr = &addr[i],
                                  .rtt_ns = 20000,
                                  .rtt_samples = 4};
    return true;
}

void hrd_peer_send(struct hrd_daemon *d, uint32_t no, const struct hrp_peer_msg *msg)
{
    int me = w_index(d), to = w_by_no(&w[me], no);
    if (no == 0 || to < 0 || w[me].dead[to])
        return;
    size_t size = hrp_peer_size(msg);
    struct w_event *e = w_event(W_MSG, me, to, size);
    if (hrp_peer_encode(msg, e->data, size) != (long)size)
        abort();
    e->no = w[to].no_of[me];
}

/* False: one of the two still holds a connection that is broken. */
static bool w_connect(int a, int b)
{
    if (w[a].dead[b] || w[b].dead[a])
        return false;
    if (w[a].no_of[b])
        return true;
    w[a].no_of[b] = ++w_no;
    w[b].no_of[a] = ++w_no;
    w_event(W_UP, a, b, 0)->no = w[b].no_of[a];
    w_event(W_UP, b, a, 0)->no = w[a].no_of[b];
    return true;
}

void hrd_peer_dial(struct hrd_daemon *d, hrd_peer_dialed *dialed, uint64_t token, const struct hrp_addr *addr,
                   unsigned naddrs, const uint8_t *expect, unsigned expect_len)
{
    assert_ptr_equal(dialed, hrd_member_dialed);
    int me = w_index(d);
    uint32_t status = HRP_PEER_LOST, no = 0;
    const char *why = "connection refused";
    for (unsigned i = 0; i < naddrs && no == 0; i++) {
        int to = addr[i].ip[3] - 1;
        if (to < 0 || to >= W_NODES || !w[to].running || w[me].no_dial[to])
            continue;
        if (to == me || (expect_len && memcmp(w[to].d.instance, expect, expect_len) != 0)) {
            status = HRP_REFUSED;
            why = to == me ? "reached myself" : "another daemon";
            continue;
        }
        if (w_connect(me, to)) {
            no = w[me].no_of[to];
            status = HRP_OK;
        }
    }
    struct w_event *e = w_event(W_DIALED, me, me, 0);
    e->token = token;
    e->status = status;
    e->no = no;
    snprintf(e->text, sizeof(e->text), "%s", why);
}

bool hrd_peer_dials(const struct hrd_daemon *d, const uint8_t instance[16])
{
    return memcmp(d->instance, instance, 16) < 0;
}

int hrd_peer_link(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want, uint32_t *link)
{
    int me = w_index(d), to = w_by_no(&w[me], no);
    (void)want;
    if (no == 0 || to < 0)
        return -2;
    *link = no; /* one link a peer is enough here */
    if (w[me].link[to] && !w[me].mending)
        return 1;
    if (w[me].link[to] || !hrd_peer_dials(d, w[to].d.instance))
        return 0;
    if (w[me].dead[to])
        return 0;
    w_event(W_LINKED, me, to, 0)->no = w[to].no_of[me];
    w_event(W_LINKED, to, me, 0)->no = no;
    return 0;
}

const char *hrd_peer_transport(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want,
                               const char **why)
{
    struct w_node *n = &w[w_index(d)];
    bool verbs = n->verbs && want->transport != HRD_WANT_TCP;
    (void)no;
    *why = verbs || want->transport == HRD_WANT_TCP ? "" : n->no_verbs ? n->no_verbs : "it was not tried";
    return verbs ? "verbs" : "tcp";
}

bool hrd_peer_mending(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want, char *why,
                      size_t len)
{
    const struct w_node *n = &w[w_index(d)];
    (void)no;
    (void)want;
    if (n->mending)
        snprintf(why, len, "%s", n->mending);
    return n->mending != NULL;
}

void hrd_link_use(struct hrd_daemon *d, uint32_t link, int by)
{
    (void)d;
    (void)link;
    (void)by;
}

bool hrd_peer_half_verbs(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want)
{
    (void)d;
    (void)no;
    (void)want;
    return false;
}

bool hrd_peer_no_device(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want)
{
    (void)d;
    (void)no;
    (void)want;
    return false;
}

bool hrd_peers_is_mine(struct hrd_daemon *d, const struct hrp_addr *addr)
{
    return addr->ip[3] == w_index(d) + 1;
}

uint64_t hrd_peers_link_speed(struct hrd_daemon *d)
{
    (void)d;
    return UINT64_C(1250000000);
}

unsigned hrd_peers_own_addrs(struct hrd_daemon *d, struct hrp_addr *out, unsigned max)
{
    out[0] = w_addr(w_index(d));
    return max > 0;
}

/* ---- agents: they speak to each other through the same queue ----------------------------------------------- */

static struct w_acomm *w_acomm(struct w_node *n, uint64_t comm)
{
    for (int i = 0; i < W_COMMS; i++)
        if (n->comm[i].used && n->comm[i].comm == comm)
            return &n->comm[i];
    return NULL;
}

static struct w_event *w_agent_event(int node, enum w_kind kind, uint64_t comm)
{
    struct w_event *e = w_event(kind, W_NODES + node, node, 0); /* the agent is a party of its own */
    e->comm = comm;
    return e;
}

void hrd_agent_comm_add(struct hrd_agent *a, const struct hrd_comm_spec *spec)
{
    struct w_node *n = (struct w_node *)(void *)a;
    int me = (int)(n - w), i = 0;
    n->adds++;
    if (n->ready_held)
        return;
    uint32_t status = n->ready_status;
    struct w_event *e = w_agent_event(me, W_READY, spec->comm), *o = n->orphan;
    snprintf(e->text, sizeof(e->text), "node %s: the agent says no", n->name);
    while (o && o->comm != spec->comm)
        o = o->next;
    if (o) {
        status = o->status;
        memcpy(e->text, o->text, sizeof(e->text));
    }
    e->status = status;
    if (status != HRP_OK)
        return;
    while (n->comm[i].used)
        if (++i == W_COMMS)
            abort();
    struct w_acomm *c = &n->comm[i];
    *c = (struct w_acomm){.used = true,
                          .comm = spec->comm,
                          .nlocal = spec->nlocal,
                          .nnodes = spec->nnodes,
                          .config = spec->config,
                          .eager_blocks = spec->eager_blocks};
    memcpy(c->local, spec->local, spec->nlocal * sizeof(c->local[0]));
    memcpy(c->peer, spec->peer_of_node, spec->nnodes * sizeof(c->peer[0]));
    for (unsigned p = 0; p < spec->nnodes; p++)
        if (p != spec->node &&
            (w_by_no(n, spec->peer_of_node[p]) < 0 || !n->link[w_by_no(n, spec->peer_of_node[p])] ||
             n->dead[w_by_no(n, spec->peer_of_node[p])]))
            c->failed = true; /* its link broke meanwhile; reported below */
    if (c->failed) {
        c->used = false;
        e->status = HRP_PEER_LOST;
    }
}

static void w_fail(int node, struct w_acomm *c, uint32_t status, const char *text, bool tell)
{
    struct w_node *n = &w[node];
    if (c->failed)
        return;
    c->failed = true;
    struct w_event *e = w_agent_event(node, W_FAILED, c->comm);
    e->status = status;
    snprintf(e->text, sizeof(e->text), "%s", text);
    for (unsigned p = 0; tell && p < c->nnodes; p++) {
        int to = c->peer[p] == HRD_NO_PEER ? -1 : w_by_no(n, c->peer[p]);
        if (to < 0)
            continue;
        struct w_event *f = w_event(W_COMM_FAIL, W_NODES + node, W_NODES + to, 0);
        f->comm = c->comm;
        f->status = status;
        snprintf(f->text, sizeof(f->text), "%s", text);
    }
}

void hrd_agent_comm_fail(struct hrd_agent *a, uint64_t comm, uint32_t status, const char *text, bool tell)
{
    struct w_node *n = (struct w_node *)(void *)a;
    struct w_acomm *c = w_acomm(n, comm);
    if (c)
        w_fail((int)(n - w), c, status, text, tell);
}

static void w_leave(int node, struct w_acomm *c, unsigned i)
{
    if (c->left[i])
        return;
    c->left[i] = true;
    w_agent_event(node, W_LEFT, c->comm)->rank = c->local[i].rank;
    if (++c->nleft == c->nlocal) {
        w_agent_event(node, W_GONE, c->comm);
        c->used = false;
    }
}

void hrd_agent_comm_leave(struct hrd_agent *a, uint64_t comm, uint32_t rank)
{
    struct w_node *n = (struct w_node *)(void *)a;
    struct w_acomm *c = w_acomm(n, comm);
    for (unsigned i = 0; c && i < c->nlocal; i++)
        if (c->local[i].rank == rank) {
            w_leave((int)(n - w), c, i);
            return;
        }
}

static void w_session_end_in_agent(int node, uint64_t sid)
{
    for (int k = 0; k < W_COMMS; k++) {
        struct w_acomm *c = &w[node].comm[k];
        for (unsigned i = 0; c->used && i < c->nlocal; i++)
            if (c->local[i].sid == sid) {
                w_fail(node, c, HRP_RANK_LOST, "a rank died", true);
                w_leave(node, c, i);
            }
    }
}

static void w_link_lost_in_agent(int node, uint32_t no, const char *why)
{
    for (int k = 0; k < W_COMMS; k++) {
        struct w_acomm *c = &w[node].comm[k];
        for (unsigned p = 0; c->used && p < c->nnodes; p++)
            if (c->peer[p] == no)
                w_fail(node, c, HRP_PEER_LOST, why, true);
    }
}

/* ---- sessions ---------------------------------------------------------------------------------------------- */

struct hrd_session *hrd_session_find(struct hrd_daemon *d, uint64_t sid)
{
    struct w_node *n = &w[w_index(d)];
    for (int i = 0; i < W_SESSIONS; i++)
        if (n->session[i].alive && n->session[i].pub.sid == sid)
            return &n->session[i].pub;
    return NULL;
}

static struct w_session *w_s(struct hrd_session *s)
{
    return (struct w_session *)(void *)s;
}

int hrd_session_slot_take(struct hrd_session *s)
{
    for (int i = 0; i < W_SLOTS; i++)
        if (!(w_s(s)->slots & 1u << i)) {
            w_s(s)->slots |= 1u << i;
            return i;
        }
    return -1;
}

void hrd_session_slot_free(struct hrd_session *s, uint32_t slot)
{
    if (!(w_s(s)->slots & 1u << slot))
        abort(); /* freed twice */
    w_s(s)->slots &= ~(1u << slot);
}

void hrd_session_send(struct hrd_session *s, const struct hrp_msg *msg, const int *fds, int nfds)
{
    (void)fds;
    (void)nfds;
    char buf[4096];
    if (hrp_msg_encode(msg, buf, sizeof(buf)) <= 0)
        abort();
    w_s(s)->answers++;
    w_s(s)->joined = msg->type == HRP_MSG_JOINED;
    if (w_s(s)->joined)
        w_s(s)->answer = msg->body.joined;
}

void hrd_session_error(struct hrd_session *s, uint64_t cookie, enum hrp_status status, enum hrp_scope scope,
                       const char *fmt, ...)
{
    va_list ap;
    (void)scope;
    if (cookie == W_JOINING) {
        w_s(s)->told++;
        return;
    }
    w_s(s)->answers++;
    w_s(s)->status = status;
    va_start(ap, fmt);
    vsnprintf(w_s(s)->text, sizeof(w_s(s)->text), fmt, ap);
    va_end(ap);
}

void hrd_session_text(struct hrd_session *s, uint64_t cookie, const char *text)
{
    (void)cookie;
    w_s(s)->told++;
    snprintf(w_s(s)->text, sizeof(w_s(s)->text), "%s", text);
}

void hrd_session_done(struct hrd_session *s, uint64_t cookie)
{
    (void)cookie;
    w_s(s)->answers++;
    w_s(s)->done = true;
}

/* ---- the world ----------------------------------------------------------------------------------------------- */

static void w_start_node(int i)
{
    struct w_node *n = &w[i];
    memset(n, 0, sizeof(*n));
    snprintf(n->name, sizeof(n->name), "n%d", i);
    memcpy(n->d.node_name, n->name, 4);
    /* Order of instances is not the order of nodes, and a restarted daemon has another. */
    n->d.instance[0] = (uint8_t)(i * 37 + 11);
    n->d.instance[1] = ++w_generation[i];
    n->d.agent = (struct hrd_agent *)(void *)n;
    n->d.cfg.setup_timeout_ms = 60000;
    n->d.cfg.op_timeout_ms = 600000;
    n->d.cfg.peer_timeout_ms = 10000;
    n->d.cfg.max_comms = W_SLOTS;
    n->d.cfg.eager_limit = 16384;
    n->d.cfg.unit_bytes = 1 << 20;
    n->d.cfg.unit_min_bytes = 1 << 18;
    n->d.cfg.reproducible = true;
    n->d.cfg.port = 1;
    if (hrd_members_new(&n->d) != 0)
        abort();
    n->d.members->clock = w_now;
    n->running = true;
}

static void w_begin(uint32_t seed)
{
    w = calloc(W_NODES, sizeof(*w));
    w_seed = seed;
    w_clock = 1000;
    hrd_log_set_level(HRD_LOG_ERROR);
    for (int i = 0; i < W_NODES; i++)
        w_start_node(i);
}

static void w_disconnect(int a, int b, const char *why)
{
    if (!w[a].no_of[b] || w[a].dead[b])
        return;
    for (int side = 0; side < 2; side++) {
        int me = side ? b : a, other = side ? a : b;
        struct w_event *e = w_event(W_LOST, other, me, 0);
        e->no = w[me].no_of[other];
        snprintf(e->text, sizeof(e->text), "node %s %s", w[other].name, why);
        w_link_lost_in_agent(me, w[me].no_of[other], e->text);
        w[me].dead[other] = true;
    }
}

static void w_drop_orphans(struct w_node *n)
{
    while (n->orphan) {
        struct w_event *o = n->orphan;
        n->orphan = o->next;
        free(o);
    }
}

/* SIGKILL of a daemon: nobody on it hears anything any more. */
static __attribute__((unused)) void w_kill_node(int i)
{
    for (int k = 0; k < W_NODES; k++)
        if (k != i)
            w_disconnect(i, k, "closed the connection");
    hrd_members_free(&w[i].d);
    w_drop_orphans(&w[i]);
    w[i].running = false;
    for (int s = 0; s < W_SESSIONS; s++)
        w[i].session[s].alive = false;
}

static void w_deliver(const struct w_event *e)
{
    if (e->kind == W_COMM_FAIL) {
        int to = e->to - W_NODES;
        struct w_acomm *c = w_acomm(&w[to], e->comm);
        if (c)
            w_fail(to, c, e->status, e->text, false);
        if (!c && w[to].running) {
            struct w_event *o = calloc(1, sizeof(*o));
            *o = *e;
            o->next = w[to].orphan;
            w[to].orphan = o;
        }
        return;
    }
    struct w_node *n = &w[e->to];
    struct hrp_peer_msg msg;
    if (!n->running)
        return;
    struct hrd_event ev = {.comm = e->comm, .id = e->rank, .status = e->status};
    snprintf(ev.text, sizeof(ev.text), "%s", e->text);
    switch (e->kind) {
    case W_MSG:
        if (w_by_no(n, e->no) != e->from)
            return; /* lost with its connection */
        if (hrp_peer_decode(&msg, e->data, e->len) != 0 || !hrd_member_msg(&n->d, e->no, &msg)) {
            fprintf(stderr, "a %s message from node %d to %d was wrong\n", hrp_peer_name(msg.type), e->from,
                    e->to);
            abort();
        }
        return;
    case W_UP:
        if (w_by_no(n, e->no) == e->from)
            hrd_member_peer_up(&n->d, e->no);
        return;
    case W_DIALED:
        if (e->status == HRP_OK &&
            w_by_no(n, e->no) < 0) /* peer.c does not answer with a peer that is gone */
            hrd_member_dialed(&n->d, e->token, HRP_PEER_LOST, 0, "it went away");
        else
            hrd_member_dialed(&n->d, e->token, e->status, e->no, e->status == HRP_OK ? NULL : e->text);
        return;
    case W_LINKED:
        if (w_by_no(n, e->no) != e->from)
            return;
        if (n->no_link[e->from]) {
            hrd_member_link(&n->d, e->no, "10.0.0.9 port 1: no answer (filtered)");
            return;
        }
        n->link[e->from] = true;
        hrd_member_link(&n->d, e->no, NULL);
        return;
    case W_LOST:
        if (w_by_no(n, e->no) != e->from)
            return;
        n->no_of[e->from] = 0;
        n->link[e->from] = n->dead[e->from] = false;
        hrd_member_peer_lost(&n->d, e->no, e->text);
        return;
    case W_READY:
        ev.type = HRD_EV_COMM_READY;
        break;
    case W_FAILED:
        ev.type = HRD_EV_COMM_FAILED;
        break;
    case W_LEFT:
        ev.type = HRD_EV_COMM_LEFT;
        break;
    default:
        ev.type = HRD_EV_COMM_GONE;
        break;
    }
    hrd_member_event(&n->d, &ev);
}

/* Delivers one event that is the first of its pair; false: nothing is left. */
static bool w_step(void)
{
    struct w_event **first[256];
    unsigned n = 0;
    for (struct w_event **at = &w_queue; *at && n < 256; at = &(*at)->next) {
        bool blocked = false;
        for (struct w_event *e = w_queue; e != *at && !blocked; e = e->next)
            blocked = e->from == (*at)->from && e->to == (*at)->to;
        if (!blocked)
            first[n++] = at;
    }
    if (n == 0)
        return false;
    struct w_event **at = first[w_random(n)], *e = *at;
    *at = e->next;
    w_deliver(e);
    free(e);
    return true;
}

static void w_settle(void)
{
    while (w_step())
        ;
}

static __attribute__((unused)) void w_pass(uint64_t ms)
{
    for (uint64_t end = w_clock + ms; w_clock < end;) {
        w_clock += MEMBER_TICK_MS;
        for (int i = 0; i < W_NODES; i++)
            if (w[i].running)
                hrd_members_tick(&w[i].d);
        w_settle();
    }
}

/* A process on a node; kept until the end of the world. */
static struct w_session *w_process(int node, uid_t uid)
{
    struct w_node *n = &w[node];
    int i = 0;
    while (n->session[i].pub.sid)
        if (++i == W_SESSIONS)
            abort();
    struct w_session *s = &n->session[i];
    s->pub.sid = ++w_sid;
    s->pub.uid = uid;
    s->pub.pid = (pid_t)(1000 + w_sid);
    s->alive = true;
    return s;
}

static int w_node_of(const struct w_session *s)
{
    return (int)(((const char *)s - (const char *)w) / (ptrdiff_t)sizeof(struct w_node));
}

static __attribute__((unused)) void w_die(struct w_session *s)
{
    int node = w_node_of(s);
    if (!s->alive)
        return;
    s->alive = false;
    if (!w[node].running)
        return;
    hrd_member_session_gone(&w[node].d, &s->pub, "process died");
    w_session_end_in_agent(node, s->pub.sid);
}

static void w_join_msg(struct w_session *s, const struct hrp_msg_join *join)
{
    s->joined = s->done = false;
    s->status = 0;
    s->text[0] = 0;
    s->answers = 0;
    hrd_member_join(&w[w_node_of(s)].d, &s->pub, 1, join);
}

static __attribute__((unused)) struct hrp_msg_join w_join_of(const char *name, int root, uint32_t rank,
                                                             uint32_t nranks)
{
    struct hrp_msg_join j = {.rank = rank, .nroots = 1};
    j.key.kind = HRP_KEY_NAME;
    j.key.nranks = nranks;
    snprintf(j.key.name, sizeof(j.key.name), "%s", name);
    j.root[0] = w_addr(root);
    return j;
}

static void w_join(struct w_session *s, const char *name, int root, uint32_t rank, uint32_t nranks)
{
    struct hrp_msg_join j = w_join_of(name, root, rank, nranks);
    w_join_msg(s, &j);
}

/* Nothing may be left when everybody is gone. Returns what is, in words. */
static const char *w_leftover(void)
{
    for (int i = 0; i < W_NODES; i++) {
        const struct hrd_members *m = w[i].running ? w[i].d.members : NULL;
        if (!m)
            continue;
        if (m->joins)
            return "a join";
        if (m->ways)
            return "a way to a root";
        if (m->comms)
            return "a communicator";
        if (m->sets)
            return "a set at its root";
        if (m->waits)
            return "a waiting join";
        if (m->self_first)
            return "a message";
    }
    return NULL;
}

static void w_end(void)
{
    w_settle();
    for (int i = 0; i < W_NODES; i++) {
        if (w[i].running)
            hrd_members_free(&w[i].d);
        w_drop_orphans(&w[i]);
    }
    free(w);
    w = NULL;
}

#define HAS(text, part) assert_non_null(strstr(text, part))

static struct w_session *rank[16];

/* Ranks placed[i] on that node join by name; not settled. */
/* ---- ranks of one comm ---- */

static __attribute__((unused)) void join_all(const char *name, int root, const int *placed, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        rank[i] = w_process(placed[i], 1000);
        w_join(rank[i], name, root, i, n);
    }
}

static __attribute__((unused)) void all_joined(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (!rank[i]->joined)
            print_message("rank %u: status %u %s\n", i, rank[i]->status, rank[i]->text);
        assert_true(rank[i]->joined);
        assert_int_equal(rank[i]->answers, 1);
        assert_memory_equal(rank[i]->answer.comm_id, rank[0]->answer.comm_id, 16);
        assert_int_equal(rank[i]->answer.nranks, n);
    }
}

static __attribute__((unused)) void all_failed(uint32_t first, uint32_t n, uint32_t status, const char *part)
{
    for (uint32_t i = first; i < n; i++) {
        if (rank[i]->status != status || !strstr(rank[i]->text, part))
            print_message("rank %u: status %u %s\n", i, rank[i]->status, rank[i]->text);
        assert_int_equal(rank[i]->answers, 1);
        assert_int_equal(rank[i]->status, status);
        HAS(rank[i]->text, part);
        assert_int_equal(rank[i]->slots, 0);
    }
}

static __attribute__((unused)) void leave_all(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (!rank[i]->alive || !rank[i]->slots)
            continue;
        rank[i]->answers = 0;
        hrd_member_leave(&w[w_node_of(rank[i])].d, &rank[i]->pub, 2, rank[i]->answer.slot);
        w_settle();
        assert_true(rank[i]->done);
        assert_int_equal(rank[i]->answers, 1);
        assert_int_equal(rank[i]->slots, 0);
    }
}

static __attribute__((unused)) void finish(uint32_t n)
{
    leave_all(n);
    assert_null(w_leftover());
    w_end();
}

#endif
