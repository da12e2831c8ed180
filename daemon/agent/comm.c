/* SPDX-License-Identifier: MIT */
/* The life of a comm on this node: made, failed, left, freed. */
#include "daemon/agent/types.h"

#include "daemon/gpu/gpu.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* A second in which this thread runs: a daemon that was stopped is not at fault. Sanitized reduce threads take ten
 * times as long, and share their cores with more of them. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define QUIESCE_TICKS 100u
#else
#define QUIESCE_TICKS 10u
#endif
/* Copies and kernels wait behind what the jobs do on that GPU, and a driver that resets it takes its time. */
#define GPU_STUCK_MS 10000u
#define TICK_MS 100u
#define PARK_NS UINT64_C(5000000000)
#define ORPHAN_NS UINT64_C(600000000000)
/* The newest of them are kept: their number is the peers' to choose. */
#define ORPHANS_MAX 4096u

/* ---- made -------------------------------------------------------------------------------------------------- */

static struct acomm *comm_new(struct hrd_agent *a, const struct hrd_comm_spec *spec)
{
    struct acomm *c = xalloc(1, sizeof(*c));
    uint32_t nn = spec->nnodes;
    c->a = a;
    c->id = spec->comm;
    c->nranks = spec->nranks;
    c->nnodes = nn;
    c->node = spec->node;
    c->nlocal = spec->nlocal;
    c->config = spec->config;
    c->left_op = UINT64_MAX;
    c->node_of_rank = xalloc(c->nranks, sizeof(uint32_t));
    memcpy(c->node_of_rank, spec->node_of_rank, c->nranks * sizeof(uint32_t));
    c->ranks_on_node = xalloc(nn, sizeof(uint32_t));
    for (uint32_t r = 0; r < c->nranks; r++)
        c->ranks_on_node[c->node_of_rank[r]]++;
    c->node_name = xalloc(nn, sizeof(char *));
    for (uint32_t n = 0; n < nn; n++)
        if (!(c->node_name[n] = strdup(spec->node_name[n])))
            abort();
    c->link = xalloc(nn, sizeof(struct alink *));
    c->local = xalloc(c->nlocal, sizeof(*c->local));
    c->reserve_recv = xalloc(nn, sizeof(uint64_t));
    c->reserve_recv_bytes = xalloc(nn, sizeof(uint64_t));
    c->eager_off = xalloc(nn, sizeof(uint64_t));
    c->eager = xalloc((size_t)nn * HRP_EAGER_SLOTS, sizeof(*c->eager));
    c->peer_wm = xalloc(nn, sizeof(uint64_t));
    c->told_wm = xalloc(nn, sizeof(uint64_t));
    c->marks = xalloc(nn, sizeof(uint16_t));
    for (uint32_t n = 0; n < nn; n++)
        c->eager_off[n] = HRD_ARENA_NONE;
    c->env = (struct hrd_plan_env){
        .nnodes = nn,
        .nranks = c->nranks,
        .node_of_rank = c->node_of_rank,
        .ranks_on_node = c->ranks_on_node,
        .algo = spec->config.algo, /* HRP_ALGO_* and HRD_ALGO_* are the same numbers, see below */
        .reproducible = spec->config.reproducible != HRP_OFF,
        .wire_f32 = spec->config.wire_f32 == HRP_ON,
        .eager_blocks = spec->eager_blocks,
        .eager_limit = spec->eager_limit,
        .unit_bytes = spec->unit_bytes,
        .unit_min_bytes = spec->unit_min_bytes,
        .latency_ns = spec->latency_ns,
        .bandwidth = spec->bandwidth,
    };
    return c;
}

_Static_assert((int)HRP_ALGO_DIRECT == (int)HRD_ALGO_DIRECT && (int)HRP_ALGO_GATHER == (int)HRD_ALGO_GATHER &&
                   (int)HRP_ALGO_PAIRWISE == (int)HRD_ALGO_PAIRWISE &&
                   (int)HRP_ALGO_RING == (int)HRD_ALGO_RING && (int)HRP_ALGO_TREE == (int)HRD_ALGO_TREE,
               "configuration and schedules count algorithms alike");

/* The links and sessions that the spec names; a status with a sentence when one is gone by now. */
static uint32_t connect_parts(struct acomm *c, const struct hrd_comm_spec *spec, char *why, size_t len)
{
    struct hrd_agent *a = c->a;
    for (uint32_t n = 0; n < c->nnodes; n++) {
        const char *lost = NULL;
        if (n == c->node)
            continue;
        for (struct alink *l = a->links; l; l = l->next)
            if (l->peer == spec->peer_of_node[n] && l->link && !l->lost && !l->dropped)
                c->link[n] = l;
            else if (l->peer == spec->peer_of_node[n])
                lost = l->why;
        if (!c->link[n]) {
            snprintf(why, len, "node %s: the link to node %s broke during set-up%s%.350s", a->node_name,
                     c->node_name[n], lost ? ": " : "", lost ? lost : "");
            return HRP_PEER_LOST;
        }
    }
    for (uint32_t i = 0; i < c->nlocal; i++) {
        const struct hrd_comm_rank *from = &spec->local[i];
        struct asession *s = hrd_agent_session(a, from->sid);
        if (!s || s->ending || s->faulted || from->slot >= s->seg->ncomms) {
            snprintf(why, len, "rank %u (process %d on node %s) went away during set-up", from->rank,
                     from->pid, a->node_name);
            return HRP_RANK_LOST;
        }
        struct arank *r = &c->local[i];
        *r = (struct arank){.c = c,
                            .s = s,
                            .index = i,
                            .rank = from->rank,
                            .slot = from->slot,
                            .pid = from->pid,
                            .area = hrp_seg_comm(s->seg, from->slot)};
        r->next_in_session = s->ranks;
        s->ranks = r;
    }
    return HRP_OK;
}

static void unlink_rank(struct arank *r)
{
    if (!r->s)
        return;
    struct arank **pr = &r->s->ranks;
    while (*pr && *pr != r)
        pr = &(*pr)->next_in_session;
    if (*pr)
        *pr = r->next_in_session;
    r->s = NULL;
}

void hrd_comm_count(struct hrd_snapshot_comm *sum, const struct hrd_snapshot_comm *c)
{
    sum->failures += c->failures;
    sum->ops_done += c->ops_done;
    sum->ops_failed += c->ops_failed;
    sum->bytes += c->bytes;
    sum->staged_bytes += c->staged_bytes;
    sum->staged_gpu_bytes += c->staged_gpu_bytes;
    sum->tx_bytes += c->tx_bytes;
    sum->rx_bytes += c->rx_bytes;
    sum->time_us += c->time_us;
    sum->gdr_units += c->gdr_units;
    sum->gdr_full += c->gdr_full;
    for (unsigned i = 0; i < HRP_NALGOS; i++)
        sum->algo_ops[i] += c->algo_ops[i];
    for (unsigned i = 0; i < HRD_NENGINES; i++)
        sum->engine_ops[i] += c->engine_ops[i];
    for (unsigned i = 0; i < HRD_NTIMES; i++)
        sum->time_ops[i] += c->time_ops[i];
    for (unsigned k = 0; k < HRP_NCOLLS; k++) {
        sum->coll_ops[k] += c->coll_ops[k];
        for (unsigned i = 0; i < HRD_NSTAGES; i++)
            sum->stage_ns[k][i] += c->stage_ns[k][i];
    }
}

void hrd_comm_free(struct acomm *c)
{
    struct hrd_agent *a = c->a;
    hrd_comm_count(&a->gone, &c->stat);
    a->streams -= c->streams;
    while (c->ops)
        hrd_op_free(c->ops);
    for (struct acredit *cr = c->credits, *next; cr; cr = next) {
        next = cr->next;
        free(cr);
    }
    hrd_abort_free(c);
    hrd_spoil_free(c);
    hrd_pipeline_release_reserve(c);
    for (struct acached *e = c->schedules, *next; e; e = next) {
        next = e->next;
        hrd_schedule_free(e->sched);
        free(e);
    }
    for (uint32_t i = 0; i < c->nlocal; i++)
        unlink_rank(&c->local[i]);
    for (struct acomm **pc = &a->comms; *pc; pc = &(*pc)->next)
        if (*pc == c) {
            *pc = c->next;
            break;
        }
    for (struct acomm **pc = &a->bucket[c->id % COMM_BUCKETS]; *pc; pc = &(*pc)->next_in_bucket)
        if (*pc == c) {
            *pc = c->next_in_bucket;
            break;
        }
    for (uint32_t n = 0; n < c->nnodes; n++)
        free(c->node_name[n]);
    free(c->node_name);
    free(c->node_of_rank);
    free(c->ranks_on_node);
    free(c->link);
    free(c->local);
    free(c->reserve_recv);
    free(c->reserve_recv_bytes);
    free(c->eager_off);
    free(c->eager);
    free(c->peer_wm);
    free(c->told_wm);
    free(c->marks);
    free(c);
}

/* The oldest of a comm, which says why; all of them are taken off. */
static struct aorphan *take_orphan(struct hrd_agent *a, uint64_t id)
{
    struct aorphan *first = NULL;
    for (struct aorphan **po = &a->orphans; *po;) {
        struct aorphan *o = *po;
        if (o->comm != id) {
            po = &o->next;
            continue;
        }
        *po = o->next;
        free(first);
        first = o;
    }
    return first;
}

/* Links, sessions, memory; or a status with a sentence. */
static uint32_t equip(struct acomm *c, const struct hrd_comm_spec *spec, char *why, size_t len)
{
    uint32_t status = connect_parts(c, spec, why, len);
    if (status != HRP_OK)
        return status;
    if (hrd_plan_check(&c->env, why, len))
        return HRP_INVALID_ARGUMENT;
    return hrd_pipeline_reserve(c, why, len) ? HRP_RESOURCE : HRP_OK;
}

void hrd_comm_add(struct hrd_agent *a, const struct hrd_comm_spec *spec)
{
    char why[SENTENCE];
    uint32_t status = HRP_OK;
    struct acomm *c = comm_new(a, spec);
    struct aorphan *o = take_orphan(a, spec->comm);
    if (o) {
        status = o->status;
        snprintf(why, sizeof(why), "%s", o->text);
        free(o);
    } else if (hrd_agent_comm(a, spec->comm)) {
        status = HRP_PROTOCOL;
        snprintf(why, sizeof(why), "node %s: the communicator id %016" PRIx64 " is in use", a->node_name,
                 spec->comm);
    } else {
        status = equip(c, spec, why, sizeof(why));
    }
    if (status != HRP_OK) {
        hrd_agent_emit(a, HRD_EV_COMM_READY, 0, spec->comm, 0, status, why);
        hrd_comm_free(c);
        return;
    }
    c->next = a->comms;
    a->comms = c;
    c->next_in_bucket = a->bucket[c->id % COMM_BUCKETS];
    a->bucket[c->id % COMM_BUCKETS] = c;
    for (uint32_t i = 0; i < c->nlocal; i++)
        atomic_store_explicit(&c->local[i].area->state, HRP_COMM_ACTIVE, memory_order_release);
    hrd_agent_emit(a, HRD_EV_COMM_READY, 0, c->id, 0, HRP_OK, NULL);
}

/* ---- failed ------------------------------------------------------------------------------------------------ */

void hrd_comm_fail(struct acomm *c, uint32_t status, bool tell, const char *fmt, ...)
{
    if (c->failed)
        return;
    c->failed = true;
    c->status = status;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->text, sizeof(c->text), fmt, ap);
    va_end(ap);
    if (tell) {
        struct hrp_frame f = hrd_frame(c, HRP_FRAME_COMM_FAIL, 0);
        f.status = (uint8_t)status;
        hrd_frames_send_all(c, &f, c->text);
    }
    for (uint32_t i = 0; i < c->nlocal; i++) {
        struct arank *r = &c->local[i];
        if (!r->s || r->left || r->s->faulted)
            continue;
        struct hrp_comm_area *area = r->area;
        size_t n = strnlen(c->text, HRP_COMM_TEXT);
        area->status = status;
        area->scope = HRP_SCOPE_COMM;
        area->text_len = (uint32_t)n;
        memcpy(area->text, c->text, n);
        atomic_store_explicit(&area->state, HRP_COMM_FAILED, memory_order_release);
    }
    c->stat.failures = 1;
    c->quiet = (struct aquiet){.works = c->works};
    if (c->nleft < c->nlocal)
        hrd_log_event(HRD_LOG_WARNING, HRD_MSGID_COMM_FAILED, c->id, "comm %016" PRIx64 " failed: %s", c->id,
                      c->text);
    hrd_agent_emit(c->a, HRD_EV_COMM_FAILED, 0, c->id, 0, status, c->text);
}

/* A failed comm: fill what was touched, answer, and take its memory back once nothing can arrive any more. */
static void settle_failed(struct acomm *c)
{
    if (c->works == 0 && !c->filled) {
        c->filled = true;
        for (struct aop *op = c->ops; op; op = op->next)
            if (op->state == OP_RUNNING || op->state == OP_FAILING)
                hrd_work_nan(op);
    }
    if (c->works == 0 && c->filled && !c->answered) {
        c->answered = true;
        for (struct aop *op = c->ops; op; op = op->next)
            if (op->state != OP_DONE)
                hrd_complete_error(op, c->status, HRP_SCOPE_COMM, c->text);
    }
    if (c->answered && c->txs == 0 && !c->mark_sent) {
        c->mark_sent = true;
        hrd_frames_send_marks(c, HRP_FRAME_COMM_MARK, 0);
    }
    if (!c->mark_sent || c->gave_back || !hrd_abort_all_marked(c, c->marks))
        return;
    for (struct aop *op = c->ops; op; op = op->next)
        hrd_pipeline_drop_units(op);
    /* Its ranks may take their time to destroy it, and others wait for the memory. */
    hrd_pipeline_release_reserve(c);
    c->gave_back = true;
}

/* ---- left -------------------------------------------------------------------------------------------------- */

static bool has_pending(const struct acomm *c, const struct arank *r)
{
    for (const struct aop *op = c->ops; op; op = op->next)
        if (op->state != OP_DONE && op->post[r->index].posted && !op->post[r->index].answered)
            return true;
    return false;
}

void hrd_comm_rank_left(struct acomm *c, uint32_t rank, uint64_t last_op)
{
    if (last_op < c->left_op) {
        c->left_op = last_op;
        c->left_rank = rank;
    }
    for (struct aop *op = c->ops; op && !c->failed; op = op->next)
        if (op->op > c->left_op && op->nposted && op->state != OP_DONE && op->state != OP_FAILED)
            hrd_comm_fail(c, HRP_RANK_LOST, true,
                          "rank %u left the communicator after op %" PRIu64 ", so op %" PRIu64
                          " cannot complete; all ranks must post the same ops before any destroys it",
                          c->left_rank, c->left_op, op->op);
}

void hrd_comm_leave(struct acomm *c, struct arank *r)
{
    if (r->leaving)
        return;
    r->leaving = true;
    if (!c->failed && has_pending(c, r)) {
        hrd_comm_fail(c, HRP_RANK_LOST, true,
                      "rank %u on node %s left the communicator with an operation in flight", r->rank,
                      c->a->node_name);
    } else if (!c->failed) {
        struct hrp_frame f = hrd_frame(c, HRP_FRAME_RANK_LEFT, r->posted);
        f.rank = r->rank;
        hrd_frames_send_all(c, &f, NULL);
        hrd_comm_rank_left(c, r->rank, r->posted);
    }
    hrd_comm_settle(c);
}

static void let_ranks_go(struct acomm *c)
{
    for (uint32_t i = 0; i < c->nlocal; i++) {
        struct arank *r = &c->local[i];
        if (!r->leaving || r->left || c->works || (c->failed && !c->answered))
            continue;
        if (!c->failed && has_pending(c, r))
            continue;
        struct asession *s = r->s;
        r->left = true;
        c->nleft++;
        unlink_rank(r);
        hrd_agent_emit(c->a, HRD_EV_COMM_LEFT, s ? s->sid : 0, c->id, r->rank, 0, NULL);
        c->a->sessions_to_end = true;
    }
}

void hrd_comm_settle(struct acomm *c)
{
    if (c->failed)
        settle_failed(c);
    else
        hrd_abort_settle(c);
    if (c->failed) /* settling an op may have failed the comm */
        settle_failed(c);
    let_ranks_go(c);
    if (c->nleft < c->nlocal)
        return;
    if (!c->mark_sent && c->txs == 0 && c->works == 0) {
        c->mark_sent = true;
        hrd_frames_send_marks(c, HRP_FRAME_COMM_MARK, 0);
    }
    if (c->mark_sent && c->txs == 0 && c->works == 0 && hrd_abort_all_marked(c, c->marks)) {
        hrd_agent_emit(c->a, HRD_EV_COMM_GONE, 0, c->id, 0, 0, NULL);
        hrd_comm_free(c);
    }
}

/* ---- time, and what is not here ------------------------------------------------------------------------------ */

/* GPUs that an op gave work to. */
static uint64_t gpus_at_work(const struct aop *op)
{
    return op->works ? op->gpus : 0;
}

static unsigned stuck_ticks(const struct hrd_agent *a)
{
    return (a->cfg.gpu_stuck_ms ? a->cfg.gpu_stuck_ms : GPU_STUCK_MS) / TICK_MS;
}

static bool stands_still(struct aquiet *q, unsigned works, unsigned ticks)
{
    if (works == 0 || works != q->works) {
        *q = (struct aquiet){.works = works};
        return false;
    }
    return ++q->ticks > ticks;
}

/* "3 pieces of engine work did not end within 1 s", or what that says of a GPU, which then is lost. */
static void stuck_text(struct hrd_agent *a, uint64_t gpus, unsigned works, unsigned ticks, char *text,
                       size_t len)
{
    if (gpus)
        hrd_gpus_stuck(a->cfg.gpus, gpus, ticks * TICK_MS, text, len);
    else
        snprintf(text, len, "%u pieces of engine work did not end within %u s", works,
                 ticks * TICK_MS / 1000);
}

/* An op fails when its work has ended. Where it never does, the ranks hear of it by the comm; check_quiesce() does the rest. */
static void check_failing(struct acomm *c)
{
    const unsigned ticks = stuck_ticks(c->a);
    for (struct aop *op = c->ops; op && !c->failed; op = op->next) {
        char text[SENTENCE];
        if (op->state != OP_FAILING || !stands_still(&op->quiet, op->works, ticks))
            continue;
        stuck_text(c->a, gpus_at_work(op), op->works, ticks, text, sizeof(text));
        hrd_comm_fail(c, HRP_SYSTEM, true, "node %s, op %" PRIu64 ", which failed (%.400s): %s",
                      c->a->node_name, op->op, op->text, text);
    }
}

/* Completion waits for the engine alone. If that does not end, memory would be handed back while threads or GPUs still
   write it: better no daemon than a corrupting one. */
static void check_quiesce(struct acomm *c)
{
    char text[SENTENCE];
    uint64_t gpus = 0;
    for (const struct aop *op = c->failed ? c->ops : NULL; op; op = op->next)
        gpus |= gpus_at_work(op);
    const unsigned ticks = gpus ? stuck_ticks(c->a) : QUIESCE_TICKS;
    if (!stands_still(&c->quiet, c->failed ? c->works : 0, ticks))
        return;
    stuck_text(c->a, gpus, c->works, ticks, text, sizeof(text));
    hrd_error("communicator %016" PRIx64 ": %s; aborting the daemon", c->id, text);
    abort();
}

void hrd_comm_tick(struct acomm *c)
{
    hrd_abort_deadlines(c);
    check_failing(c);
    check_quiesce(c);
    for (uint32_t i = 0; i < c->nlocal; i++) {
        struct arank *r = &c->local[i];
        if (r->s && r->parked_ns && c->a->now - r->parked_ns > PARK_NS)
            hrd_session_fault(r->s, "rank %u: op %" PRIu64 " names memory that was not registered within 5 s",
                              r->rank, r->posted + 1);
    }
    hrd_comm_settle(c);
}

void hrd_comm_orphan(struct hrd_agent *a, struct alink *l, const struct hrp_frame *f, const char *text)
{
    if (f->type != HRP_FRAME_COMM_FAIL && f->type != HRP_FRAME_COMM_MARK)
        return;
    unsigned n = 0;
    for (struct aorphan **po = &a->orphans; *po;) {
        struct aorphan *o = *po;
        if (o->comm == f->comm && o->peer == l->peer)
            return;
        if (a->now - o->since_ns < ORPHAN_NS && ++n < ORPHANS_MAX) {
            po = &o->next;
            continue;
        }
        *po = o->next;
        free(o);
    }
    struct aorphan *o = xalloc(1, sizeof(*o));
    o->comm = f->comm;
    o->peer = l->peer;
    o->since_ns = a->now;
    o->status = f->status > HRP_IN_PROGRESS ? f->status : HRP_PEER_LOST;
    snprintf(o->text, sizeof(o->text), "%.400s",
             *text ? text : "another node gave the communicator up during set-up");
    o->next = a->orphans;
    a->orphans = o;
    hrd_frames_answer_orphan(l, f->comm); /* its sender waits to hear that nothing of ours follows */
}
