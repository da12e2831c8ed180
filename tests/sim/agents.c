/* SPDX-License-Identifier: MIT */
#include "tests/sim/agents.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <fcntl.h>

#include <cmocka.h>

#include "daemon/transport_tcp.h"
#include "proto/ring.h"
#include "proto/status.h"
#include "tests/sim/fake_verbs.h"

#define LIMIT_S 20

bool sim_over_verbs;
struct hrd_tcp_io *sim_tcp_io;

static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

static double now_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static void *map(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    return p;
}

static void connect_verbs(struct sim *s, uint32_t i, uint32_t j)
{
    struct hrd_verbs_conn *a[HRD_RAILS_MAX], *b[HRD_RAILS_MAX];
    const struct hrd_transport *tp = s->rails > 1 ? &hrd_transport_rails : &hrd_transport_verbs;
    void *arena_a, *arena_b;
    uint64_t len_a, len_b;
    char name[16];
    hrd_agent_arena(s->node[i].agent, &arena_a, &len_a);
    hrd_agent_arena(s->node[j].agent, &arena_b, &len_b);
    for (unsigned r = 0; r < s->rails; r++) {
        snprintf(name, sizeof(name), "fake%u", r);
        struct hrd_verbs_device dev = fake_verbs_device_of(name);
        fake_verbs_pair_on(&dev, &a[r], arena_a, len_a, &b[r], arena_b, len_b, SIM_STREAMS);
        a[r]->place = b[r]->place = s->place + r;
    }
    snprintf(name, sizeof(name), "n%u", j);
    hrd_agent_link_up(s->node[i].agent, j + 100, name, tp,
                      s->rails > 1 ? hrd_rails_conn_new(a, s->rails) : &a[0]->base);
    snprintf(name, sizeof(name), "n%u", i);
    hrd_agent_link_up(s->node[j].agent, i + 100, name, tp,
                      s->rails > 1 ? hrd_rails_conn_new(b, s->rails) : &b[0]->base);
}

void sim_link_tcp(struct hrd_agent *a, uint32_t peer, const char *name, const int *fd, unsigned n)
{
    struct hrd_tcp_conn *conn = hrd_tcp_conn_new(fd, n);
    assert_non_null(conn);
    conn->io = sim_tcp_io;
    hrd_agent_link_up(a, peer, name, &hrd_transport_tcp, &conn->base);
}

static void connect_nodes(struct sim *s, uint32_t i, uint32_t j, bool verbs)
{
    if (verbs) {
        connect_verbs(s, i, j);
        return;
    }
    int a[SIM_STREAMS], b[SIM_STREAMS];
    for (int k = 0; k < SIM_STREAMS; k++) {
        int pair[2];
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
        a[k] = pair[0];
        b[k] = pair[1];
    }
    char name[16];
    snprintf(name, sizeof(name), "n%u", j);
    sim_link_tcp(s->node[i].agent, j + 100, name, a, SIM_STREAMS);
    snprintf(name, sizeof(name), "n%u", i);
    sim_link_tcp(s->node[j].agent, i + 100, name, b, SIM_STREAMS);
}

static void start_agents(struct sim *s, const struct sim_options *o)
{
    struct hrd_agent_config cfg = o->agent;
    if (!cfg.arena_bytes)
        cfg.arena_bytes = UINT64_C(64) << 20;
    if (!cfg.threads)
        cfg.threads = 2;
    if (!cfg.chunk_bytes)
        cfg.chunk_bytes = 64 << 10;
    if (!cfg.stall_warning_ms)
        cfg.stall_warning_ms = 60000;
    cfg.depth = sim_tcp_io ? 8 : 0;
    for (uint32_t n = 0; n < s->nnodes; n++) {
        char name[16], err[256] = "";
        snprintf(name, sizeof(name), "n%u", n);
        cfg.node_name = name;
        cfg.gpus = o->agent_gpus[n];
        if (hrd_agent_new(&s->node[n].agent, &cfg, err, sizeof(err)))
            fail_msg("%s", err);
    }
}

void sim_start(struct sim *s, uint32_t nnodes, uint32_t nranks, const uint32_t *node_of_rank,
               const struct sim_options *o)
{
    memset(s, 0, sizeof(*s));
    s->nnodes = nnodes;
    s->nranks = nranks;
    memcpy(s->node_of_rank, node_of_rank, nranks * sizeof(uint32_t));
    s->verbs = o->verbs || sim_over_verbs;
    s->rails = o->rails > 1 ? o->rails : 1;
    s->place = o->place;
    if (s->verbs)
        fake_verbs_rails(s->rails, o->lanes);
    start_agents(s, o);
    for (uint32_t i = 0; i < nnodes; i++)
        for (uint32_t j = i + 1; j < nnodes; j++)
            connect_nodes(s, i, j, s->verbs);
    for (uint32_t r = 0; r < nranks; r++) {
        struct sim_rank *k = &s->rank[r];
        k->node = node_of_rank[r];
        k->sid = r + 1;
        k->seg = map(hrp_seg_size(16));
        hrp_seg_init(k->seg, 16);
        k->doorbell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        k->pool_bytes = o->pool_bytes ? o->pool_bytes : 8 << 20;
        k->pool = map(k->pool_bytes);
        struct hrd_agent *a = s->node[k->node].agent;
        hrd_agent_session_add(a, k->sid, k->seg, k->doorbell, &k->poisoned);
        hrd_agent_buffer_add(a, k->sid, 1, k->pool, k->pool_bytes);
    }
}

static struct sim_rank *by_sid(struct sim *s, uint64_t sid)
{
    return &s->rank[sid - 1];
}

static void interrupted(struct sim *s, uint32_t i, uint32_t j, const struct hrd_event *ev)
{
    snprintf(s->node[i].interrupted, sizeof(s->node[i].interrupted), "%s", ev->text);
    if (!s->mend) {
        hrd_agent_link_down(s->node[i].agent, j + 100, ev->text);
        hrd_agent_link_down(s->node[j].agent, i + 100, "the other end closed the link");
        return;
    }
    s->lent[i][j][ev->rail] = ev->conn;
    if (!s->lent[j][i][ev->rail])
        hrd_agent_link_interrupt(s->node[j].agent, i + 100, ev->rail, "the other end says so");
}

/* Neither end's paths are made anew any more. */
static void forget_lent(struct sim *s, uint32_t i, uint32_t j)
{
    memset(s->lent[i][j], 0, sizeof(s->lent[i][j]));
    memset(s->lent[j][i], 0, sizeof(s->lent[j][i]));
}

/* 1: done; 0: not yet; negative: with a sentence. */
static int mend_pair(struct hrd_verbs_conn *a, struct hrd_verbs_conn *b, char *why, size_t len)
{
    static uint64_t nonce = 1000;
    struct hrd_verbs_device dev;
    if (!fake_verbs_find(a->dev.name, &dev))
        return 0;
    dev.queues = (uint8_t)a->n;
    nonce++;
    if (hrd_verbs_conn_renew(a, &dev, nonce, why, len) || hrd_verbs_conn_renew(b, &dev, nonce, why, len))
        return 0;
    int err = hrd_verbs_conn_connect(b, &a->local, false, why, len);
    if (!err)
        err = hrd_verbs_conn_connect(a, &b->local, true, why, len);
    if (err)
        return err == -EBADMSG ? err : 0;
    int ra = 0, rb = 0;
    for (int i = 0; i < 10 && (ra != 1 || rb != 1) && ra >= 0 && rb >= 0; i++) {
        rb = rb ? rb : hrd_verbs_conn_probe(b, why, len);
        ra = ra ? ra : hrd_verbs_conn_probe(a, why, len);
    }
    return ra == 1 && rb == 1;
}

static void mend_rail(struct sim *s, uint32_t i, uint32_t j, unsigned rail)
{
    struct hrd_conn **a = &s->lent[i][j][rail], **b = &s->lent[j][i][rail];
    char why[512] = "?";
    if (!*a || !*b)
        return;
    int r = mend_pair((struct hrd_verbs_conn *)*a, (struct hrd_verbs_conn *)*b, why, sizeof(why));
    if (r == 0)
        return;
    *a = *b = NULL;
    s->mended += r == 1;
    if (r == 1) {
        hrd_agent_link_resume(s->node[i].agent, j + 100, rail);
        hrd_agent_link_resume(s->node[j].agent, i + 100, rail);
    } else {
        hrd_agent_link_down(s->node[i].agent, j + 100, why);
        hrd_agent_link_down(s->node[j].agent, i + 100, why);
    }
}

static void mend(struct sim *s)
{
    for (uint32_t i = 0; i < s->nnodes; i++)
        for (uint32_t j = i + 1; j < s->nnodes; j++)
            for (unsigned rail = 0; rail < s->rails; rail++)
                mend_rail(s, i, j, rail);
}

void sim_events(struct sim *s)
{
    if (s->mend)
        mend(s);
    for (uint32_t n = 0; n < s->nnodes; n++) {
        struct sim_node *k = &s->node[n];
        struct hrd_event *ev = k->agent ? hrd_agent_take_events(k->agent) : NULL;
        while (ev) {
            struct hrd_event *next = ev->next;
            switch (ev->type) {
            case HRD_EV_SESSION_GONE:
                by_sid(s, ev->sid)->gone = true;
                break;
            case HRD_EV_SESSION_FAULT:
                hrd_agent_session_end(k->agent, ev->sid, ev->text);
                break;
            case HRD_EV_BUFFER_GONE:
                by_sid(s, ev->sid)->buffers_gone++;
                break;
            case HRD_EV_COMM_READY:
                k->comms_ready++;
                k->last_status = ev->status;
                snprintf(k->last_text, sizeof(k->last_text), "%s", ev->text);
                break;
            case HRD_EV_COMM_FAILED:
                k->comms_failed++;
                k->last_status = ev->status;
                snprintf(k->last_text, sizeof(k->last_text), "%s", ev->text);
                break;
            case HRD_EV_COMM_LEFT:
                if (ev->sid)
                    by_sid(s, ev->sid)->left = true;
                break;
            case HRD_EV_COMM_GONE:
                k->comms_gone++;
                break;
            case HRD_EV_LINK_LOST:
                if (ev->open) { /* counted when it is gone */
                    forget_lent(s, n, ev->id - 100);
                    hrd_agent_link_down(k->agent, ev->id, ev->text);
                    k->links_lost--;
                }
                /* Sockets tell the other end by themselves; over verbs the daemons' control connection does. */
                if (s->verbs && ev->id >= 100)
                    hrd_agent_link_down(s->node[ev->id - 100].agent, n + 100,
                                        "the other end closed the link");
                k->links_lost++;
                break;
            case HRD_EV_LINK_GONE:
                k->links_lost++;
                break;
            case HRD_EV_LINK_INTERRUPTED:
                interrupted(s, n, ev->id - 100, ev);
                break;
            case HRD_EV_PROBE:
                k->probes++;
                k->probe = ev->probe;
                k->last_status = ev->status;
                snprintf(k->last_text, sizeof(k->last_text), "%s", ev->text);
                break;
            case HRD_EV_SNAPSHOT:
                hrd_snapshot_free(k->snapshot);
                k->snapshot = ev->snapshot;
                break;
            }
            free(ev);
            ev = next;
        }
    }
}

uint32_t sim_comm(struct sim *s, uint64_t id, uint32_t slot, const struct sim_options *o)
{
    static const char *const names[SIM_MAX_NODES] = {"n0", "n1", "n2",  "n3",  "n4",  "n5",  "n6",  "n7",
                                                     "n8", "n9", "n10", "n11", "n12", "n13", "n14", "n15"};
    uint32_t want[SIM_MAX_NODES];
    for (uint32_t n = 0; n < s->nnodes; n++) {
        struct hrd_comm_rank local[SIM_MAX_RANKS];
        uint32_t peer[SIM_MAX_NODES], nlocal = 0;
        for (uint32_t p = 0; p < s->nnodes; p++)
            peer[p] = p == n ? HRD_NO_PEER : p + 100;
        for (uint32_t r = 0; r < s->nranks; r++)
            if (s->node_of_rank[r] == n)
                local[nlocal++] =
                    (struct hrd_comm_rank){.rank = r, .slot = slot, .sid = r + 1, .pid = (int)r + 1000};
        struct hrd_comm_spec spec = {.comm = id,
                                     .nranks = s->nranks,
                                     .nnodes = s->nnodes,
                                     .node = n,
                                     .nlocal = nlocal,
                                     .node_of_rank = s->node_of_rank,
                                     .peer_of_node = peer,
                                     .node_name = names,
                                     .local = local,
                                     .config = o->comm,
                                     .eager_limit = o->eager_limit ? o->eager_limit : 4096,
                                     .unit_bytes = o->unit_bytes ? o->unit_bytes : 256 << 10,
                                     .unit_min_bytes = o->unit_min_bytes ? o->unit_min_bytes : 64 << 10,
                                     .latency_ns = 20000,
                                     .bandwidth = UINT64_C(2000000000),
                                     .eager_blocks = true};
        want[n] = s->node[n].comms_ready + 1;
        hrd_agent_comm_add(s->node[n].agent, &spec);
    }
    double end = now_s() + LIMIT_S;
    uint32_t status = HRP_OK;
    for (uint32_t n = 0; n < s->nnodes; n++) {
        while (s->node[n].comms_ready < want[n]) {
            sim_events(s);
            nap();
            assert_true(now_s() < end);
        }
        if (s->node[n].last_status)
            status = s->node[n].last_status;
    }
    return status;
}

void sim_stop(struct sim *s)
{
    for (uint32_t r = 0; r < s->nranks; r++)
        if (!s->rank[r].gone)
            hrd_agent_session_end(s->node[s->rank[r].node].agent, s->rank[r].sid, "the test ended it");
    double end = now_s() + LIMIT_S;
    for (uint32_t r = 0; r < s->nranks; r++)
        while (!s->rank[r].gone) {
            sim_events(s);
            nap();
            if (now_s() > end)
                fail_msg("the session of rank %u does not end", r);
        }
    for (uint32_t n = 0; n < s->nnodes; n++) {
        hrd_agent_free(s->node[n].agent);
        hrd_snapshot_free(s->node[n].snapshot);
    }
    for (uint32_t r = 0; r < s->nranks; r++) {
        munmap(s->rank[r].seg, hrp_seg_size(16));
        munmap(s->rank[r].pool, s->rank[r].pool_bytes);
        close(s->rank[r].doorbell);
    }
}

void sim_push(struct sim *s, uint32_t rank, uint32_t slot, const struct hrp_desc *d, uint64_t ready)
{
    struct sim_rank *k = &s->rank[rank];
    struct hrp_comm_area *area = hrp_seg_comm(k->seg, slot);
    assert_int_equal(hrp_ring_push(area, d), 0);
    atomic_store_explicit(&area->flags[d->op % HRP_OP_SLOTS].ready, ready, memory_order_release);
    atomic_fetch_add(&k->seg->submits, 1);
    if (atomic_load(&k->seg->agent_asleep)) {
        uint64_t one = 1;
        assert_int_equal(write(k->doorbell, &one, sizeof(one)), sizeof(one));
    }
}

uint64_t sim_post(struct sim *s, uint32_t rank, uint32_t slot, const struct hrp_sig *sig, uint64_t in,
                  uint64_t out)
{
    struct hrp_desc d = {.op = ++s->rank[rank].posted[slot], .sig = *sig};
    if (in != UINT64_MAX)
        d.in = (struct hrp_bufref){.kind = HRP_BUF_SHARED, .id = 1, .offset = in};
    if (out != UINT64_MAX)
        d.out = (struct hrp_bufref){.kind = HRP_BUF_SHARED, .id = 1, .offset = out};
    sim_push(s, rank, slot, &d, hrp_flag(d.op, HRP_CHUNK_ALL));
    return d.op;
}

bool sim_done(struct sim *s, uint32_t rank, uint32_t slot, uint64_t op)
{
    struct hrp_comm_area *area = hrp_seg_comm(s->rank[rank].seg, slot);
    return atomic_load_explicit(&area->flags[op % HRP_OP_SLOTS].done, memory_order_acquire) >=
           hrp_flag(op, HRP_CHUNK_ALL);
}

const struct hrd_snapshot *sim_look(struct sim *s, uint32_t node)
{
    struct sim_node *k = &s->node[node];
    double end = now_s() + LIMIT_S;
    hrd_snapshot_free(k->snapshot);
    k->snapshot = NULL;
    hrd_agent_query(k->agent, 1);
    while (!k->snapshot) {
        sim_events(s);
        nap();
        if (now_s() > end)
            fail_msg("the agent of node %u does not answer", node);
    }
    return k->snapshot;
}

uint32_t sim_wait(struct sim *s, uint32_t rank, uint32_t slot, uint64_t op, char *text)
{
    double end = now_s() + LIMIT_S;
    while (!sim_done(s, rank, slot, op)) {
        sim_events(s);
        nap();
        if (now_s() > end)
            fail_msg("op %llu of rank %u does not end", (unsigned long long)op, rank);
    }
    struct hrp_completion *c = &hrp_seg_comm(s->rank[rank].seg, slot)->completion[op % HRP_OP_SLOTS];
    assert_int_equal(c->op, op);
    if (text)
        snprintf(text, HRP_OP_TEXT + 1, "%.*s", (int)c->text_len, c->text);
    return c->status;
}
