/* SPDX-License-Identifier: MIT */
/*
 * The pipeline: units of ops are admitted in order, each with all the memory it will need, and run their schedule
 * step by step. What a step does is elsewhere: engine work in work.c, frames in frames.c.
 *
 * Why it cannot deadlock: a comm admits its units in order, and its oldest unit can always take the comm's reserve.
 * Consider the globally oldest incomplete unit of a comm: on every node it is either complete or the oldest there, hence
 * admitted, credited and sent to, whatever the shared pool and the other comms do.
 */
#include "daemon/agent/types.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Payload at least this large leaves stream 0 to small frames, so that these do not queue behind it. */
#define BULK_BYTES (64u << 10)
#define CREDITS_MAX (1u << 16)

static uint64_t step_bytes(const struct aunit *u, const struct hrd_step *s)
{
    return u->elems[s->block] * hrd_plan_value_size(&u->op->sig, &u->op->plan, s->value);
}

static struct aunit *find_unit(struct aop *op, uint64_t index)
{
    struct aunit *u = op ? op->units : NULL;
    while (u && u->index != index)
        u = u->next;
    return u;
}

/* ---- schedules --------------------------------------------------------------------------------------------- */

static const struct hrd_schedule *schedule_of(struct acomm *c, const struct hrd_schedule_key *key)
{
    for (struct acached *e = c->schedules; e; e = e->next)
        if (memcmp(&e->sched->key, key, sizeof(*key)) == 0)
            return e->sched;
    struct acached *e = xalloc(1, sizeof(*e));
    int err = hrd_schedule_build(key, &e->sched);
    if (err) {
        hrd_error("no schedule for algorithm %s over %u nodes: %s; ending the daemon",
                  hrd_algo_name(key->algo), key->nnodes, strerror(-err));
        abort();
    }
    e->next = c->schedules;
    c->schedules = e;
    return e->sched;
}

/* ---- the reserve ------------------------------------------------------------------------------------------- */

struct need {
    uint64_t send;
    uint64_t *recv; /* [nnodes] */
};

/* Grows *n to what a unit of `bytes` needs under this schedule; an upper bound for every type. */
static void need_of(const struct acomm *c, const struct hrd_schedule *s, uint64_t bytes, struct need *n)
{
    bool by_rank = s->key.coll == HRP_REDUCE_SCATTER || s->key.coll == HRP_ALL_GATHER;
    uint64_t send = 0;
    for (uint32_t i = 0; i < s->nbufs; i++) {
        uint64_t share = by_rank ? bytes / c->nranks * c->ranks_on_node[s->buf_block[i]] + bytes % c->nranks
                                 : bytes / s->nblocks + bytes % s->nblocks;
        send += hrd_plan_slot_bytes(share + 16 * 8);
    }
    if (send > n->send)
        n->send = send;
    for (uint32_t p = 0; p < c->nnodes; p++) {
        uint64_t recv = 0;
        for (uint32_t i = 0; i < s->recvs[p].count; i++) {
            uint16_t block = s->steps[s->list[s->recvs[p].first + i]].block;
            uint64_t share = by_rank ? bytes / c->nranks * c->ranks_on_node[block] + bytes % c->nranks
                                     : bytes / s->nblocks + bytes % s->nblocks;
            recv += hrd_plan_slot_bytes(share + 16 * 8);
        }
        if (recv > n->recv[p])
            n->recv[p] = recv;
    }
}

/* The largest all_reduce that the plan gives to an algorithm whose every message is the whole unit. */
static uint64_t gather_bytes(const struct acomm *c, uint64_t unit_max)
{
    if (c->env.algo == HRD_ALGO_GATHER || c->env.algo == HRD_ALGO_TREE)
        return unit_max;
    uint64_t largest = c->env.eager_limit;
    for (uint64_t bytes = 4096; bytes <= unit_max; bytes *= 2) {
        struct hrp_sig sig = {.count = bytes / 4, .coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM};
        struct hrd_plan plan;
        if (hrd_plan_op(&c->env, &sig, &plan, NULL, 0) == 0 && plan.algo == HRD_ALGO_GATHER)
            largest = bytes * 2 > largest ? bytes * 2 : largest;
    }
    return largest < unit_max ? largest : unit_max;
}

static void need_of_all(struct acomm *c, struct need *n)
{
    uint64_t unit_max = hrd_plan_unit_max(&c->env);
    for (unsigned algo = HRD_ALGO_DIRECT; algo <= HRD_ALGO_TREE; algo++) {
        bool possible = algo == HRD_ALGO_DIRECT || algo == HRD_ALGO_GATHER || c->env.algo == algo ||
                        (!c->env.reproducible && c->env.algo == HRD_ALGO_AUTO);
        for (unsigned coll = 0; possible && coll < HRP_NCOLLS; coll++) {
            if (!hrd_schedule_serves(algo, coll))
                continue;
            for (unsigned variant = 0; variant < (algo == HRD_ALGO_TREE ? 2 : 1); variant++) {
                struct hrd_schedule_key key = {.algo = (uint8_t)algo,
                                               .coll = (uint8_t)coll,
                                               .variant = (uint8_t)variant,
                                               .nnodes = (uint16_t)c->nnodes,
                                               .me = (uint16_t)c->node};
                struct hrd_schedule *s;
                if (hrd_schedule_build(&key, &s))
                    continue; /* not for this number of nodes */
                bool whole = s->nblocks == 1;
                need_of(c, s,
                        algo == HRD_ALGO_GATHER && coll != HRP_ALL_REDUCE
                            ? (uint64_t)c->env.eager_limit * c->nnodes
                            : (whole ? gather_bytes(c, unit_max) : unit_max),
                        n);
                hrd_schedule_free(s);
            }
        }
    }
}

int hrd_pipeline_reserve(struct acomm *c, char *why, size_t len)
{
    struct hrd_agent *a = c->a;
    if (c->nnodes == 1)
        return 0;
    struct need n = {.recv = xalloc(c->nnodes, sizeof(uint64_t))};
    need_of_all(c, &n);
    uint64_t eager = hrd_eager_bytes(c) * HRP_EAGER_SLOTS, total = n.send;
    bool fits = true;
    c->reserve_send = hrd_arena_alloc(a->arena, HRD_DOMAIN_SEND, n.send);
    fits = c->reserve_send != HRD_ARENA_NONE;
    c->reserve_send_bytes = fits ? n.send : 0;
    const char *refusal = ""; /* of a device */
    for (uint32_t p = 0; p < c->nnodes; p++) {
        if (!c->link[p])
            continue;
        struct hrd_link *link = c->link[p]->link;
        total += n.recv[p] + eager;
        if (link)
            link->refusal[0] = '\0';
        uint64_t r = fits ? hrd_arena_alloc(a->arena, c->link[p]->peer, n.recv[p]) : HRD_ARENA_NONE;
        uint64_t e = fits ? hrd_arena_alloc(a->arena, c->link[p]->peer, eager) : HRD_ARENA_NONE;
        c->reserve_recv[p] = r;
        c->reserve_recv_bytes[p] = r == HRD_ARENA_NONE ? 0 : n.recv[p];
        c->eager_off[p] = e;
        fits = fits && r != HRD_ARENA_NONE && e != HRD_ARENA_NONE;
        refusal = refusal[0] || !link ? refusal : link->refusal;
    }
    free(n.recv);
    if (fits)
        return 0;
    if (refusal[0])
        snprintf(why, len, "node %s: no receive memory for the communicator over verbs: %s", a->node_name,
                 refusal);
    else
        snprintf(why, len,
                 "node %s: the arena (%" PRIu64 " KiB, %" PRIu64
                 " KiB in use) has no room for the communicator's reserve of "
                 "%" PRIu64 " KiB; raise arena_size, or lower unit_size or eager_limit on the root's node",
                 a->node_name, hrd_arena_size(a->arena) >> 10, hrd_arena_used(a->arena) >> 10, total >> 10);
    hrd_pipeline_release_reserve(c);
    return -1;
}

void hrd_pipeline_release_reserve(struct acomm *c)
{
    struct hrd_arena *ar = c->a->arena;
    if (c->nnodes == 1)
        return;
    hrd_arena_release(ar, c->reserve_send, c->reserve_send_bytes);
    c->reserve_send_bytes = 0;
    for (uint32_t p = 0; p < c->nnodes; p++) {
        hrd_arena_release(ar, c->reserve_recv[p], c->reserve_recv_bytes[p]);
        c->reserve_recv_bytes[p] = 0;
        if (c->eager_off[p] != HRD_ARENA_NONE)
            hrd_arena_release(ar, c->eager_off[p], hrd_eager_bytes(c) * HRP_EAGER_SLOTS);
        c->eager_off[p] = HRD_ARENA_NONE;
    }
    c->a->work_to_admit = true;
}

/* ---- steps ------------------------------------------------------------------------------------------------- */

static void step_finish(struct aunit *u, uint32_t i);

/* A block was sent or received. */
static void step_exchanged(struct aunit *u, uint32_t i)
{
    u->op->ended_ns[HRD_STAGE_EXCHANGE] = now_ns();
    step_finish(u, i);
}

static bool running(const struct aop *op)
{
    return op->state == OP_RUNNING && !op->c->failed;
}

static void unit_free(struct aunit *u)
{
    struct acomm *c = u->op->c;
    if (u->reserve) {
        c->reserve_busy = false;
    } else {
        hrd_arena_release(u->send_pool->arena, u->send_off, u->send_bytes);
        for (uint32_t p = 0; p < c->nnodes; p++)
            hrd_arena_release(u->recv_pool->arena, u->recv_off[p], u->recv_bytes[p]);
    }
    c->active--;
    c->a->work_to_admit = true;
    free(u);
}

static void unit_complete(struct aunit *u)
{
    struct aop *op = u->op;
    struct aunit **pu = &op->units;
    while (*pu != u)
        pu = &(*pu)->next;
    *pu = u->next;
    unit_free(u);
    if (op->units || op->next_unit < op->plan.nunits) {
        hrd_complete_progress(op);
        return;
    }
    struct acomm *c = op->c;
    hrd_complete_op(op);
    op->state = OP_DONE;
    hrd_op_advance(c);
}

/* Only callers at the bottom of the stack: u may be gone afterwards. */
static void unit_settle(struct aunit *u)
{
    if (u->left == 0 && running(u->op))
        unit_complete(u);
}

static void send_done(struct hrd_tx *tx, int err)
{
    struct aunit *u = tx->owner;
    struct aop *op = u->op;
    struct acomm *c = op->c;
    op->txs--;
    c->txs--;
    if (!err && running(op)) {
        struct astep *st = (struct astep *)((char *)tx - offsetof(struct astep, tx));
        step_exchanged(u, (uint32_t)(st - u->step));
        unit_settle(u);
        return;
    }
    hrd_comm_settle(c);
}

static bool may_send(const struct aunit *u, const struct hrd_step *s)
{
    const struct aop *op = u->op;
    if (op->plan.eager)
        return op->op <= op->c->peer_wm[s->peer] + HRP_EAGER_SLOTS;
    return u->credit[s->peer] != NO_CREDIT;
}

/* Where the message lies in the receiver's area: the same sums that the receiver made. */
static uint64_t slot_of(const struct aunit *u, const struct hrd_messages *m, uint32_t tag)
{
    uint64_t off = 0;
    for (uint32_t i = 0; i < tag; i++)
        off += hrd_plan_slot_bytes(step_bytes(u, &u->sched->steps[u->sched->list[m->first + i]]));
    return off;
}

static void step_send(struct aunit *u, uint32_t i)
{
    const struct hrd_step *s = &u->sched->steps[i];
    struct astep *st = &u->step[i];
    struct aop *op = u->op;
    struct acomm *c = op->c;
    struct alink *l = c->link[s->peer];
    if (!l || !l->link)
        return; /* the link is gone, the comm is about to fail */
    if (!may_send(u, s)) {
        st->state = STEP_PARKED;
        return;
    }
    st->state = STEP_STARTED;
    struct hrd_tx *tx = &st->tx;
    *tx = (struct hrd_tx){.frame = hrd_frame(c, op->plan.eager ? HRP_FRAME_EAGER : HRP_FRAME_DATA, op->op),
                          .payload = u->step[s->src].mem,
                          .done = send_done,
                          .owner = u};
    tx->frame.tag = s->tag;
    tx->frame.unit = (uint32_t)u->index;
    tx->frame.len = (uint32_t)step_bytes(u, s);
    tx->frame.sig = op->sig;
    tx->frame.rank = op->sig_rank;
    if (!op->plan.eager)
        tx->frame.slot = u->credit[s->peer] + slot_of(u, &u->sched->sends[s->peer], s->tag);
    if (tx->frame.len >= BULK_BYTES && l->nstreams > 1 &&
        hrp_sig_bytes(&op->sig, c->nranks) >= l->link->detour_bytes)
        tx->stream = l->link->tp->stream_for ? l->link->tp->stream_for(l->link, tx)
                                             : 1 + (unsigned)(u->index + s->tag) % (l->nstreams - 1);
    op->txs++;
    c->txs++;
    c->told_wm[s->peer] = c->done_wm;
    c->stat.tx_bytes += sizeof(tx->frame) + tx->frame.len;
    hrd_frames_queue(l, tx);
}

/* What another op of the comm could still do on that device decides how far the failure reaches. */
static void engine_failed(struct aop *op, const struct hrd_work_error *error)
{
    struct acomm *c = op->c;
    if (error->device_lost)
        hrd_comm_fail(c, HRP_SYSTEM, true, "node %s, op %" PRIu64 ": %s", c->a->node_name, op->op,
                      error->text);
    else
        hrd_abort_report(op, HRP_SYSTEM, "node %s, op %" PRIu64 ": %s", c->a->node_name, op->op, error->text);
}

static bool reads_received(const struct aunit *u, const struct hrd_step *s)
{
    if (s->kind == HRD_STEP_SEND || s->kind == HRD_STEP_STORE)
        return u->sched->steps[s->src].kind == HRD_STEP_RECV;
    return s->kind == HRD_STEP_FOLD;
}

/* An adapter's completion says nothing about when a GPU sees what was written into its memory. */
static bool inputs_visible(struct aunit *u, uint32_t i)
{
    struct hrd_work_error error = {.text = ""};
    if (!reads_received(u, &u->sched->steps[i]) || hrd_pool_settle(u->op->c->a, u->recv_pool, &error) == 0)
        return true;
    u->step[i].failed = true;
    engine_failed(u->op, &error);
    return false;
}

static void step_start(struct aunit *u, uint32_t i)
{
    if (!running(u->op) || !inputs_visible(u, i))
        return;
    switch (u->sched->steps[i].kind) {
    case HRD_STEP_RECV:
        break; /* what finishes it is the arrival */
    case HRD_STEP_SEND:
        step_send(u, i);
        break;
    default:
        u->step[i].state = STEP_STARTED;
        if (hrd_work_step(u, i) == 0)
            step_finish(u, i);
        break;
    }
}

static void step_finish(struct aunit *u, uint32_t i)
{
    const struct hrd_schedule *s = u->sched;
    u->step[i].state = STEP_DONE;
    u->left--;
    for (uint32_t k = 0; k < s->steps[i].succ_count; k++) {
        uint32_t next = s->list[s->steps[i].succ_first + k];
        if (--u->step[next].waits == 0)
            step_start(u, next);
    }
}

void hrd_pipeline_work_done(struct aunit *u, uint32_t step, const struct hrd_work_error *error)
{
    struct aop *op = u->op;
    struct acomm *c = op->c;
    u->step[step].works--;
    op->works--;
    c->works--;
    if (error) {
        u->step[step].failed = true;
        engine_failed(op, error);
    }
    /* Before anything made of it reaches another node, where it would pass for the sum. */
    if (hrd_complete_poisoned(c))
        hrd_comm_fail(c, HRP_RANK_LOST, true,
                      "the shared memory of a rank on node %s went away during op %" PRIu64
                      "; the rank's session is ended",
                      c->a->node_name, op->op);
    if (running(op)) {
        /* A step that failed holds its unit until node 0 has failed the op: nothing of it may go on. */
        if (u->step[step].works == 0 && !u->step[step].failed) {
            step_finish(u, step);
            unit_settle(u);
        }
        return;
    }
    hrd_comm_settle(c);
}

/* ---- admission --------------------------------------------------------------------------------------------- */

static struct aunit *unit_new(struct aop *op, uint64_t index)
{
    struct acomm *c = op->c;
    struct hrd_schedule_key key = hrd_plan_key(&c->env, &op->sig, &op->plan, index, c->node);
    const struct hrd_schedule *s = schedule_of(c, &key);
    size_t words = 3 * (size_t)c->nnodes + s->nblocks;
    struct aunit *u = xalloc(1, sizeof(*u) + s->nsteps * sizeof(u->step[0]) + words * sizeof(uint64_t));
    u->op = op;
    u->index = index;
    u->sched = s;
    u->left = s->nsteps;
    u->send_pool = u->recv_pool = &c->a->host;
    u->recv_off = (uint64_t *)(void *)(u->step + s->nsteps);
    u->recv_bytes = u->recv_off + c->nnodes;
    u->credit = u->recv_bytes + c->nnodes;
    u->elems = u->credit + c->nnodes;
    for (uint32_t b = 0; b < s->nblocks; b++)
        u->elems[b] = hrd_plan_block_elems(&c->env, &op->sig, &op->plan, index, b);
    for (uint32_t i = 0; i < s->nsteps; i++) {
        u->step[i].waits = s->steps[i].nwait;
        u->step[i].bytes = step_bytes(u, &s->steps[i]);
    }
    for (uint32_t b = 0; b < s->nbufs; b++)
        u->send_bytes += hrd_plan_slot_bytes(u->elems[s->buf_block[b]] *
                                             hrd_plan_value_size(&op->sig, &op->plan, s->buf_value[b]));
    for (uint32_t p = 0; p < c->nnodes; p++) {
        u->credit[p] = NO_CREDIT;
        if (!op->plan.eager)
            u->recv_bytes[p] = slot_of(u, &s->recvs[p], s->recvs[p].count);
    }
    return u;
}

static bool take_from(struct aunit *u, struct apool *send, struct apool *recv)
{
    struct acomm *c = u->op->c;
    struct hrd_arena *ar = recv->arena;
    u->send_pool = send;
    u->recv_pool = recv;
    u->send_off = hrd_arena_alloc(send->arena, HRD_DOMAIN_SEND, u->send_bytes);
    if (u->send_off == HRD_ARENA_NONE)
        return false;
    for (uint32_t p = 0; p < c->nnodes; p++) {
        if (!u->recv_bytes[p])
            continue;
        u->recv_off[p] =
            c->link[p] ? hrd_arena_alloc(ar, c->link[p]->peer, u->recv_bytes[p]) : HRD_ARENA_NONE;
        if (u->recv_off[p] != HRD_ARENA_NONE)
            continue;
        while (p-- > 0) {
            hrd_arena_release(ar, u->recv_off[p], u->recv_bytes[p]);
            u->recv_off[p] = 0;
        }
        hrd_arena_release(send->arena, u->send_off, u->send_bytes);
        return false;
    }
    return true;
}

/* Where the op wants it; what finds no room on a GPU goes through host memory, unless that is no way: then the unit waits, and
   only the comm's reserve lets its oldest go on. */
static bool take_from_pool(struct aunit *u)
{
    struct aop *op = u->op;
    struct acomm *c = op->c;
    struct apool *host = &c->a->host;
    bool gpu = op->send_pool->gpu >= 0 || op->recv_pool->gpu >= 0;
    if (gpu && take_from(u, op->send_pool, op->recv_pool)) {
        c->stat.gdr_units++;
        return true;
    }
    if (gpu && c->config.require & HRP_REQUIRE_GDR)
        return false;
    if (!take_from(u, host, host))
        return false;
    c->stat.gdr_full += gpu;
    return true;
}

static bool take_reserve(struct aunit *u)
{
    struct acomm *c = u->op->c;
    if (c->active || c->reserve_busy || c->nnodes == 1)
        return false;
    if (u->send_bytes > c->reserve_send_bytes)
        return false;
    for (uint32_t p = 0; p < c->nnodes; p++)
        if (u->recv_bytes[p] > c->reserve_recv_bytes[p])
            return false;
    c->reserve_busy = true;
    u->reserve = true;
    u->send_pool = u->recv_pool = &c->a->host; /* take_from_pool() may have tried others */
    c->stat.gdr_full += u->op->send_pool->gpu >= 0 || u->op->recv_pool->gpu >= 0;
    u->send_off = c->reserve_send;
    memcpy(u->recv_off, c->reserve_recv, c->nnodes * sizeof(*u->recv_off));
    return true;
}

/* Gives every step its memory: buffers in the send area, slots in the receive areas. */
static void place_steps(struct aunit *u)
{
    const struct hrd_schedule *s = u->sched;
    struct aop *op = u->op;
    struct acomm *c = op->c;
    uint64_t off = u->send_off;
    char *stack[64];
    char **buf = s->nbufs <= 64 ? stack : xalloc(s->nbufs, sizeof(*buf));
    for (uint32_t b = 0; b < s->nbufs; b++) {
        buf[b] = hrd_arena_at(u->send_pool->arena, off);
        off += hrd_plan_slot_bytes(u->elems[s->buf_block[b]] *
                                   hrd_plan_value_size(&op->sig, &op->plan, s->buf_value[b]));
    }
    for (uint32_t i = 0; i < s->nsteps; i++)
        if (s->steps[i].buf != HRD_NONE) {
            u->step[i].mem = buf[s->steps[i].buf];
            u->step[i].pool = u->send_pool;
        }
    if (buf != stack)
        free(buf);
    for (uint32_t p = 0; p < c->nnodes; p++) {
        uint64_t at =
            op->plan.eager ? c->eager_off[p] + op->op % HRP_EAGER_SLOTS * hrd_eager_bytes(c) : u->recv_off[p];
        for (uint32_t t = 0; t < s->recvs[p].count; t++) {
            struct astep *st = &u->step[s->list[s->recvs[p].first + t]];
            st->mem = hrd_arena_at(u->recv_pool->arena, at);
            st->pool = u->recv_pool;
            at += hrd_plan_slot_bytes(st->bytes);
        }
    }
}

static void take_stored_credits(struct aunit *u)
{
    struct acomm *c = u->op->c;
    for (struct acredit **pc = &c->credits; *pc;) {
        struct acredit *cr = *pc;
        if (cr->op != u->op->op || cr->unit != u->index) {
            pc = &cr->next;
            continue;
        }
        u->credit[cr->node] = cr->slot;
        *pc = cr->next;
        c->ncredits--;
        free(cr);
    }
}

static void grant_credits(struct aunit *u)
{
    struct acomm *c = u->op->c;
    if (u->op->plan.eager)
        return;
    for (uint32_t p = 0; p < c->nnodes; p++) {
        if (!u->sched->recvs[p].count || !c->link[p])
            continue;
        struct hrp_frame f = hrd_frame(c, HRP_FRAME_CREDIT, u->op->op);
        f.unit = (uint32_t)u->index;
        f.slot = u->recv_pool->first_slot + u->recv_off[p];
        f.sig = u->op->sig;
        f.rank = u->op->sig_rank;
        hrd_frames_send(c, p, 0, &f, NULL);
    }
}

static void apply_eager(struct acomm *c, uint32_t node, struct aeager *e);

static void unit_start(struct aunit *u)
{
    struct aop *op = u->op;
    struct acomm *c = op->c;
    place_steps(u);
    take_stored_credits(u);
    grant_credits(u);
    u->left++; /* keeps the unit until all its first steps are started */
    for (uint32_t i = 0; i < u->sched->nsteps; i++)
        if (u->sched->steps[i].nwait == 0)
            step_start(u, i);
    for (uint32_t p = 0; op->plan.eager && p < c->nnodes; p++) {
        struct aeager *e = &c->eager[p * HRP_EAGER_SLOTS + op->op % HRP_EAGER_SLOTS];
        if (e->arrived && e->op == op->op)
            apply_eager(c, p, e);
    }
    u->left--;
    unit_settle(u);
}

static bool inputs_ready(const struct aop *op)
{
    const struct acomm *c = op->c;
    uint64_t need = 0;
    for (uint32_t i = 0; i < c->nlocal; i++) {
        if (op->post[i].stream && !op->post[i].staged && op->post[i].ready_bytes != UINT64_MAX)
            return false;
        if (!op->post[i].staged)
            continue;
        if (!need)
            need = hrd_geometry_need(op, op->next_unit);
        uint64_t all = hrp_sig_bytes(&op->sig, c->nranks);
        if (op->post[i].ready_bytes < (need < all ? need : all))
            return false;
    }
    return true;
}

/* A stream of the job has not come to the op yet, which may take as long as the job likes. */
static bool held_by_stream(const struct aop *op)
{
    for (uint32_t i = 0; i < op->c->nlocal; i++)
        if (op->post[i].stream && op->post[i].ready_bytes != UINT64_MAX)
            return true;
    return false;
}

/*
 * The op whose next unit comes next: the oldest that has one, unless a stream holds it. *oldest: it is that one. Younger ones
 * take no reserve and leave it a place, so that it can always go on when its inputs come.
 */
static struct aop *next_to_admit(struct acomm *c, bool *oldest)
{
    *oldest = true;
    for (struct aop *op = c->failed ? NULL : c->ops; op; op = op->next) {
        if (op->state == OP_DONE || op->state == OP_FAILED || op->state == OP_FAILING ||
            (op->state == OP_RUNNING && op->next_unit == op->plan.nunits))
            continue;
        if (op->state != OP_RUNNING)
            return NULL;
        if (inputs_ready(op))
            return op;
        if (!held_by_stream(op))
            return NULL;
        *oldest = false;
    }
    return NULL;
}

/* Asked again at every tick. */
static bool decided(struct aop *op)
{
    const char *refusal = hrd_pools_choose(op);
    if (refusal)
        hrd_abort_report(op, HRP_UNSUPPORTED, "op %" PRIu64 ": node %s: %s", op->op, op->c->a->node_name,
                         refusal);
    return !refusal && !op->undecided;
}

static bool admit_one(struct acomm *c)
{
    bool oldest;
    struct aop *op = next_to_admit(c, &oldest);
    if (!op || c->active + !oldest >= (op->plan.eager ? HRP_OP_SLOTS : c->a->cfg.depth))
        return false;
    /* A node that reported it waits for node 0 to stop it. */
    if (op->reported || (op->undecided && !decided(op)))
        return false;
    struct aunit *u = unit_new(op, op->next_unit);
    if (c->nnodes > 1 && !take_from_pool(u) && !(oldest && take_reserve(u))) {
        free(u);
        return false; /* again when something is released */
    }
    if (op->next_unit == 0)
        op->ended_ns[HRD_STAGE_READY] = now_ns();
    struct aunit **pu = &op->units;
    while (*pu)
        pu = &(*pu)->next;
    *pu = u;
    op->next_unit++;
    c->active++;
    unit_start(u);
    return true;
}

void hrd_pipeline_admit(struct hrd_agent *a)
{
    bool any = true;
    a->work_to_admit = false;
    while (any) {
        any = false;
        for (struct acomm *c = a->comms, *next; c; c = next) {
            next = c->next;
            any = admit_one(c) || any;
        }
        a->busy += any;
    }
}

void hrd_pipeline_drop_units(struct aop *op)
{
    while (op->units) {
        struct aunit *u = op->units;
        op->units = u->next;
        unit_free(u);
    }
}

/* ---- what peers send ---------------------------------------------------------------------------------------- */

/* Sends to `node` that waited for its permission. */
static void resume_sends(struct aunit *u, uint32_t node)
{
    const struct hrd_messages *m = &u->sched->sends[node];
    for (uint32_t t = 0; t < m->count; t++) {
        uint32_t i = u->sched->list[m->first + t];
        if (u->step[i].state == STEP_PARKED)
            step_send(u, i);
    }
}

void hrd_pipeline_credit(struct acomm *c, uint32_t node, const struct hrp_frame *f)
{
    struct aop *op = c->failed ? NULL : hrd_op_find(c, f->op);
    if (c->failed || f->op <= c->done_wm || (op && op->state != OP_WAITING && op->state != OP_RUNNING))
        return;
    if (op && !hrd_op_agrees(op, &f->sig, f->rank, node))
        return;
    struct aunit *u = find_unit(op, f->unit);
    if (u) {
        u->credit[node] = f->slot;
        resume_sends(u, node);
        return;
    }
    if (c->ncredits >= CREDITS_MAX) {
        hrd_comm_fail(c, HRP_PROTOCOL, true, "node %s granted more than %u slots that nobody used",
                      c->node_name[node], CREDITS_MAX);
        return;
    }
    struct acredit *cr = xalloc(1, sizeof(*cr));
    *cr = (struct acredit){
        .op = f->op, .slot = f->slot, .unit = f->unit, .node = node, .rank = f->rank, .sig = f->sig};
    cr->next = c->credits;
    c->credits = cr;
    c->ncredits++;
}

void hrd_pipeline_forget_credits(struct acomm *c, uint64_t op)
{
    for (struct acredit **pc = &c->credits; *pc;) {
        struct acredit *cr = *pc;
        if (cr->op != op) {
            pc = &cr->next;
            continue;
        }
        *pc = cr->next;
        c->ncredits--;
        free(cr);
    }
}

void hrd_pipeline_watermark(struct acomm *c, uint32_t node, uint64_t wm)
{
    if (wm <= c->peer_wm[node])
        return;
    c->peer_wm[node] = wm;
    for (struct aop *op = c->ops; op && op->op <= wm + HRP_EAGER_SLOTS; op = op->next)
        if (running(op) && op->plan.eager && op->units)
            resume_sends(op->units, node);
}

/* Finishes the RECV step that an eager message belongs to, where its unit runs; otherwise the unit finds it later. */
static void apply_eager(struct acomm *c, uint32_t node, struct aeager *e)
{
    struct aop *op = c->failed ? NULL : hrd_op_find(c, e->op);
    if (!op || (op->state != OP_WAITING && op->state != OP_RUNNING) ||
        !hrd_op_agrees(op, &e->frame.sig, e->frame.rank, node))
        return;
    struct aunit *u = running(op) ? op->units : NULL;
    if (!u)
        return;
    const struct hrd_messages *m = &u->sched->recvs[node];
    uint32_t i =
        op->plan.eager && e->frame.tag < m->count ? u->sched->list[m->first + e->frame.tag] : HRD_NONE;
    if (i == HRD_NONE || e->frame.len != u->step[i].bytes) {
        hrd_comm_fail(c, HRP_PROTOCOL, true,
                      "op %" PRIu64
                      ": node %s sent an eager message (%u bytes, tag %u) that this op does not have; the "
                      "nodes planned it differently",
                      op->op, c->node_name[node], e->frame.len, e->frame.tag);
        return;
    }
    if (u->step[i].state != STEP_DONE)
        step_exchanged(u, i);
}

void hrd_pipeline_eager_arrived(struct acomm *c, uint32_t node, struct aeager *e)
{
    apply_eager(c, node, e);
    struct aop *op = hrd_op_find(c, e->op);
    if (op && op->units && op->plan.eager)
        unit_settle(op->units);
}

struct astep *hrd_pipeline_place(struct acomm *c, uint32_t node, const struct hrp_frame *f, const char **why)
{
    struct aunit *u = find_unit(hrd_op_find(c, f->op), f->unit);
    bool eager = f->type == HRP_FRAME_EAGER;
    if (!u || u->op->plan.eager != eager) {
        *why = eager ? "a later eager message of an op that has none here"
                     : "data for a block that was not granted";
        return NULL;
    }
    const struct hrd_messages *m = &u->sched->recvs[node];
    if (f->tag >= m->count) {
        *why = "data with a tag that the schedule does not have";
        return NULL;
    }
    struct astep *st = &u->step[u->sched->list[m->first + f->tag]];
    if (st->state == STEP_DONE || f->len != st->bytes ||
        (!eager && f->slot != u->recv_pool->first_slot + u->recv_off[node] + slot_of(u, m, f->tag))) {
        *why = st->state == STEP_DONE ? "the same block twice" : "data of a wrong length or for a wrong slot";
        return NULL;
    }
    return st;
}

int hrd_pipeline_data_arrived(struct acomm *c, uint32_t node, const struct hrp_frame *f, const char **why)
{
    struct astep *st = hrd_pipeline_place(c, node, f, why);
    if (!st)
        return -1;
    struct aop *op = hrd_op_find(c, f->op);
    struct aunit *u = find_unit(op, f->unit);
    u->recv_pool->arrived = u->recv_pool->gpu >= 0;
    if (!running(op) || !hrd_op_agrees(op, &f->sig, f->rank, node)) {
        st->state = STEP_DONE;
        return 0;
    }
    step_exchanged(u, (uint32_t)(st - u->step));
    unit_settle(u);
    return 0;
}
