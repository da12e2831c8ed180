/* SPDX-License-Identifier: MIT */
/*
 * The engine work of a step: which local inputs are folded into which memory, and which outputs get the result. Here, and
 * only here, the collectives differ in what "the local ranks' inputs and outputs of a piece" means.
 */
#include "daemon/agent/types.h"

#include <string.h>

static void work_done(struct hrd_work *w, const struct hrd_work_error *error);

/* An op that fails is over for good. */
static bool still_wanted(const struct hrd_work *w)
{
    const struct aunit *u = w->owner;
    return u->op->state == OP_RUNNING && !u->op->c->failed;
}

static struct hrd_work *work_new(struct aunit *u, uint32_t step, enum hrd_work_kind kind, uint32_t nsrc,
                                 uint32_t ndst)
{
    struct hrd_work *w = xalloc(1, sizeof(*w) + (nsrc + ndst) * sizeof(w->span[0]));
    w->kind = kind;
    w->nsrc = nsrc;
    w->owner = u;
    w->step = step;
    w->done = work_done;
    w->wanted = still_wanted;
    w->fold = (struct hrk_fold){.in = u->op->sig.dtype, .out = u->op->sig.dtype};
    return w;
}

static void add_sink(struct hrd_work *w, struct hrd_span s)
{
    w->span[w->nsrc + w->ndst++] = s;
}

static void submit(struct aunit *u, struct hrd_work *w, uint64_t n)
{
    struct acomm *c = u->op->c;
    w->n = n;
    u->step[w->step].works++;
    u->op->works++;
    c->works++;
    u->op->engine->table->submit(u->op->engine, w);
}

/* Of a step's memory. Based on the pool: engines look up what GPUs call a base, and there are few of these. */
static struct hrd_span memory(const struct astep *st, uint64_t off)
{
    char *base = hrd_arena_at(st->pool->arena, 0);
    return (struct hrd_span){.base = base, .off = (uint64_t)(st->mem - base) + off, .gpu = st->pool->gpu};
}

static struct arank *local_rank(struct acomm *c, uint32_t rank)
{
    for (uint32_t i = 0; i < c->nlocal; i++)
        if (c->local[i].rank == rank)
            return &c->local[i];
    return NULL;
}

/* The ranks whose inputs make a piece: all local ones where the collective reduces, the one that has it otherwise. */
static uint32_t piece_sources(const struct aop *op, const struct hrd_piece *p, uint64_t off,
                              struct hrd_span *out)
{
    struct acomm *c = op->c;
    if (op->sig.coll == HRP_BROADCAST || op->sig.coll == HRP_ALL_GATHER) {
        struct arank *r = local_rank(c, op->sig.coll == HRP_BROADCAST ? op->sig.root : p->segment);
        if (!r)
            return 0;
        out[0] = hrd_geometry_in(op, r, p->segment, off);
        return 1;
    }
    for (uint32_t i = 0; i < c->nlocal; i++)
        out[i] = hrd_geometry_in(op, &c->local[i], p->segment, off);
    return c->nlocal;
}

/* Outputs of an op that is larger than the caches are not in them when the result is written, unless they were read just
   before (one node, in place): writing past the caches saves reading every line first, a third of a fan-out's traffic. */
#define STREAM_BYTES (UINT64_C(4) << 20)

static bool past_caches(const struct aop *op)
{
    const struct acomm *c = op->c;
    if (hrp_sig_bytes(&op->sig, c->nranks) * c->nlocal < STREAM_BYTES)
        return false;
    for (uint32_t i = 0; i < c->nlocal && c->nnodes == 1; i++) {
        const struct apost *p = &op->post[i];
        if (p->in.base == p->out.base && p->in.off == p->out.off)
            return false;
    }
    return true;
}

/* The local outputs that a piece of the result goes to. */
static void piece_sinks(struct aop *op, const struct hrd_piece *p, uint64_t off, struct hrd_work *w)
{
    struct acomm *c = op->c;
    op->touched = true;
    w->fold.stream = past_caches(op);
    if (op->sig.coll == HRP_REDUCE_SCATTER) {
        struct arank *r = local_rank(c, p->segment);
        if (r)
            add_sink(w, hrd_geometry_out(op, r, p->segment, off));
        return;
    }
    for (uint32_t i = 0; i < c->nlocal; i++)
        add_sink(w, hrd_geometry_out(op, &c->local[i], p->segment, off));
}

static bool reduces(const struct aop *op)
{
    return op->sig.coll == HRP_ALL_REDUCE || op->sig.coll == HRP_REDUCE_SCATTER;
}

/* How many nodes' partials an input of a fold holds, as a number of ranks. */
static uint32_t covered_ranks(const struct acomm *c, const struct hrd_step *s)
{
    uint32_t n = 0;
    for (uint16_t i = 0; i < s->cover_count; i++)
        n += c->ranks_on_node[(s->cover_first + i) % c->nnodes];
    return n;
}

static struct hrk_fold fold_of(struct aunit *u, const struct hrd_step *s, uint32_t *weight)
{
    const struct aop *op = u->op;
    const struct acomm *c = op->c;
    unsigned wire = op->plan.wire, dtype = op->sig.dtype, redop = op->sig.redop;
    switch (s->kind) {
    case HRD_STEP_LOCAL:
        return hrk_fold_partial(dtype, wire, redop, c->nlocal);
    case HRD_STEP_FUSED:
        return hrk_fold_single(dtype, redop, c->nranks);
    default: {
        uint32_t total = 0;
        for (uint32_t i = 0; i < s->in_count; i++)
            total += weight[i] = covered_ranks(c, &u->sched->steps[u->sched->list[s->in_first + i]]);
        if (s->final)
            return hrk_fold_total(wire, dtype, redop, weight, c->nranks);
        /* A partial of several nodes: of an integer avg it stays the sum, of a float avg it is their mean. */
        bool integer = redop == HRP_AVG && dtype > HRP_BF16;
        return hrk_fold_total(wire, wire, integer ? HRP_SUM : redop, weight, total);
    }
    }
}

/* LOCAL, FUSED: from the ranks' inputs, piece by piece. */
static void from_ranks(struct aunit *u, uint32_t step)
{
    const struct hrd_step *s = &u->sched->steps[step];
    struct aop *op = u->op;
    struct acomm *c = op->c;
    uint64_t esize = hrd_plan_value_size(&op->sig, &op->plan, s->value), filled = 0;
    struct hrd_piece_iter it;
    struct hrd_piece p;
    hrd_plan_pieces(&c->env, &op->sig, &op->plan, u->index, s->block, &it);
    while (hrd_piece_next(&it, &p)) {
        for (uint64_t at = p.off, end = p.off + p.len, run; at < end; at += run) {
            run = hrd_geometry_run(op, at, end - at);
            struct hrd_work *w =
                work_new(u, step, reduces(op) ? HRD_WORK_FOLD : HRD_WORK_COPY, c->nlocal, c->nlocal + 1);
            w->nsrc = piece_sources(op, &p, at, w->span);
            if (reduces(op))
                w->fold = fold_of(u, s, NULL);
            if (u->step[step].mem)
                add_sink(w, memory(&u->step[step], filled * esize));
            if (s->kind == HRD_STEP_FUSED)
                piece_sinks(op, &p, at, w);
            filled += run;
            if (w->ndst && w->nsrc)
                submit(u, w, run);
            else
                free(w);
        }
    }
}

/* FOLD: from partials in the arena. */
static void from_partials(struct aunit *u, uint32_t step)
{
    const struct hrd_step *s = &u->sched->steps[step];
    struct aop *op = u->op;
    struct acomm *c = op->c;
    uint64_t in_size = hrp_dtype_size(op->plan.wire);
    uint64_t out_size = hrd_plan_value_size(&op->sig, &op->plan, s->value), filled = 0;
    struct hrd_piece_iter it;
    struct hrd_piece p;
    hrd_plan_pieces(&c->env, &op->sig, &op->plan, u->index, s->block, &it);
    while (hrd_piece_next(&it, &p)) {
        for (uint64_t at = p.off, end = p.off + p.len, run; at < end; at += run) {
            run = hrd_geometry_run(op, at, end - at);
            /* The weights lie behind the spans, so that they live as long as the work. */
            uint32_t nspan = s->in_count + c->nlocal + 1, nweight = (s->in_count + 3) / 4 * 4;
            struct hrd_work *w = work_new(u, step, HRD_WORK_FOLD, s->in_count, nspan + nweight);
            uint32_t *weight = (uint32_t *)(w->span + nspan);
            w->fold = fold_of(u, s, weight);
            for (uint32_t i = 0; i < s->in_count; i++)
                w->span[i] = memory(&u->step[u->sched->list[s->in_first + i]], filled * in_size);
            if (u->step[step].mem)
                add_sink(w, memory(&u->step[step], filled * out_size));
            if (s->final)
                piece_sinks(op, &p, at, w);
            filled += run;
            if (w->ndst)
                submit(u, w, run);
            else
                free(w);
        }
    }
}

/* STORE: a result from the arena to the ranks. */
static void to_ranks(struct aunit *u, uint32_t step)
{
    const struct hrd_step *s = &u->sched->steps[step];
    struct aop *op = u->op;
    struct acomm *c = op->c;
    uint64_t esize = hrp_dtype_size(op->sig.dtype), filled = 0;
    struct hrd_piece_iter it;
    struct hrd_piece p;
    hrd_plan_pieces(&c->env, &op->sig, &op->plan, u->index, s->block, &it);
    while (hrd_piece_next(&it, &p)) {
        for (uint64_t at = p.off, end = p.off + p.len, run; at < end; at += run) {
            run = hrd_geometry_run(op, at, end - at);
            struct hrd_work *w = work_new(u, step, HRD_WORK_COPY, 1, c->nlocal);
            w->span[0] = memory(&u->step[s->src], filled * esize);
            piece_sinks(op, &p, at, w);
            filled += run;
            if (w->ndst)
                submit(u, w, run);
            else
                free(w);
        }
    }
}

unsigned hrd_work_step(struct aunit *u, uint32_t step)
{
    switch (u->sched->steps[step].kind) {
    case HRD_STEP_LOCAL:
    case HRD_STEP_FUSED:
        from_ranks(u, step);
        break;
    case HRD_STEP_FOLD:
        from_partials(u, step);
        break;
    default:
        to_ranks(u, step);
        break;
    }
    return u->step[step].works;
}

static void work_done(struct hrd_work *w, const struct hrd_work_error *error)
{
    struct aunit *u = w->owner;
    uint32_t step = w->step;
    uint64_t *ended_ns = u->op->ended_ns;
    if (!ended_ns[HRD_STAGE_BEGIN])
        ended_ns[HRD_STAGE_BEGIN] = w->began_ns;
    ended_ns[u->sched->steps[step].kind == HRD_STEP_LOCAL ? HRD_STAGE_REDUCE : HRD_STAGE_WORK] = now_ns();
    free(w);
    hrd_pipeline_work_done(u, step, error);
}

/* ---- the outputs of a failed op ---------------------------------------------------------------------------- */

/* An output that cannot be filled any more belongs to memory that is lost: its owner has worse news than a garbage sum. */
static void nan_done(struct hrd_work *w, const struct hrd_work_error *error)
{
    (void)error;
    struct aop *op = w->owner;
    struct acomm *c = op->c;
    free(w);
    op->works--;
    c->works--;
    hrd_comm_settle(c);
}

/* In pieces, whose ends show that it goes on: see check_quiesce() in comm.c. */
#define NAN_ELEMS (UINT64_C(4) << 20)

static void fill_nan(struct aop *op, const struct hrd_span *out, uint64_t at, uint64_t n)
{
    struct acomm *c = op->c;
    struct hrd_work *w = xalloc(1, sizeof(*w) + sizeof(w->span[0]));
    w->kind = HRD_WORK_NAN;
    w->fold = (struct hrk_fold){.in = op->sig.dtype, .out = op->sig.dtype};
    w->ndst = 1;
    w->span[0] = *out;
    w->span[0].off += at * hrp_dtype_size(op->sig.dtype);
    w->n = n;
    w->owner = op;
    w->done = nan_done;
    op->works++;
    c->works++;
    op->engine->table->submit(op->engine, w);
}

unsigned hrd_work_nan(struct aop *op)
{
    struct acomm *c = op->c;
    if (!op->touched || op->sig.dtype > HRP_BF16)
        return 0;
    unsigned count = 0;
    uint64_t n = op->sig.count * (op->sig.coll == HRP_ALL_GATHER ? c->nranks : 1);
    for (uint32_t i = 0; i < c->nlocal; i++) {
        const struct apost *p = &op->post[i];
        const struct arank *r = &c->local[i];
        /* A window's stream was partly consumed; the library fills the rest of a staged output itself. */
        if (!p->posted || p->answered || p->staged || !p->out.base || !r->s || r->s->ending)
            continue;
        for (uint64_t at = 0; at < n; at += NAN_ELEMS, count++)
            fill_nan(op, &p->out, at, n - at < NAN_ELEMS ? n - at : NAN_ELEMS);
    }
    return count;
}
