/* SPDX-License-Identifier: MIT */
/*
 * Results to the ranks: completion slot first, then the done word, then a wake-up where somebody sleeps. Published only
 * when nothing of the daemon touches the rank's buffers any more.
 */
#include "daemon/agent/types.h"

#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void raise_done(struct hrp_op_flags *f, uint64_t value)
{
    /* seq_cst: pairs with the client that stores `waiting` and then looks at done once more. */
    atomic_store_explicit(&f->done, value, memory_order_seq_cst);
    if (atomic_load_explicit(&f->waiting, memory_order_seq_cst))
        syscall(SYS_futex, (uint32_t *)(void *)&f->done, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

bool hrd_complete_reachable(const struct arank *r)
{
    return r->s && !r->left && !r->s->faulted;
}

void hrd_complete_rank(struct acomm *c, struct arank *r, uint64_t op, uint32_t status, enum hrp_scope scope,
                       const char *text)
{
    if (!hrd_complete_reachable(r))
        return;
    if (status != HRP_OK)
        c->stat.ops_failed++;
    struct hrp_completion *slot = &r->area->completion[op % HRP_OP_SLOTS];
    slot->op = op;
    slot->status = status;
    slot->scope = scope;
    slot->advice = status == HRP_OK ? c->advice : 0;
    size_t n = text ? strlen(text) : 0;
    slot->text_len = (uint32_t)(n < sizeof(slot->text) ? n : sizeof(slot->text));
    memcpy(slot->text, text ? text : "", slot->text_len);
    raise_done(&r->area->flags[op % HRP_OP_SLOTS], hrp_flag(op, HRP_CHUNK_ALL));
}

void hrd_complete_raise(struct arank *r, uint64_t op, uint64_t chunks)
{
    raise_done(&r->area->flags[op % HRP_OP_SLOTS], hrp_flag(op, chunks));
}

void hrd_complete_failed(struct arank *r, uint64_t op, const struct apost *p, uint32_t status,
                         enum hrp_scope scope, const char *text)
{
    if (!hrd_complete_reachable(r) || !hrd_spoil_takes(r, op, p, status, scope, text))
        hrd_complete_rank(r->c, r, op, status, scope, text);
}

void hrd_complete_unwatch(struct acomm *c, struct apost *p)
{
    if (!p->waiting)
        return;
    p->waiting = false;
    c->streams--;
    c->a->streams--;
}

static void let_go(struct aop *op, uint32_t i)
{
    struct acomm *c = op->c;
    struct apost *p = &op->post[i];
    p->answered = true;
    hrd_complete_unwatch(c, p);
    struct abuffer *b[2] = {p->in_buffer, p->out_buffer};
    p->in_buffer = p->out_buffer = NULL;
    for (int k = 0; k < 2; k++)
        if (b[k] && c->local[i].s) {
            b[k]->users--;
            if (k == 0 && b[1] == b[0])
                continue; /* settled with its second use, it may be gone after that */
            hrd_buffer_settle(c->local[i].s, b[k]);
        }
}

void hrd_complete_progress(struct aop *op)
{
    struct acomm *c = op->c;
    uint64_t first = op->units ? op->units->index : op->next_unit, chunks = UINT64_MAX;
    for (uint32_t i = 0; i < c->nlocal; i++) {
        struct apost *p = &op->post[i];
        if (!p->staged || !hrd_complete_reachable(&c->local[i]))
            continue;
        if (chunks == UINT64_MAX)
            chunks = hrd_geometry_prefix(op, first) / HRP_STAGE_CHUNK;
        if (chunks <= p->raised)
            continue;
        p->raised = chunks;
        hrd_complete_raise(&c->local[i], op->op, chunks);
    }
}

/* A SIGBUS in a client's memory may have fed zeros into the sums: no success may be published. */
bool hrd_complete_poisoned(const struct acomm *c)
{
    for (uint32_t i = 0; i < c->nlocal; i++)
        if (c->local[i].s && c->local[i].s->poisoned &&
            atomic_load_explicit(c->local[i].s->poisoned, memory_order_acquire))
            return true;
    return false;
}

static void count_time(struct acomm *c, const struct aop *op)
{
    static const uint64_t bounds[HRD_NTIMES - 1] = HRD_TIME_BOUNDS;
    uint64_t us = op->start_ns && c->a->now > op->start_ns ? (c->a->now - op->start_ns) / 1000 : 0;
    unsigned i = 0;
    while (i < HRD_NTIMES - 1 && us > bounds[i])
        i++;
    c->stat.time_us += us;
    c->stat.time_ops[i]++;
}

static void count_stages(struct acomm *c, struct aop *op)
{
    uint64_t at = op->posted_ns, *stage_ns = c->stat.stage_ns[op->sig.coll];
    c->stat.coll_ops[op->sig.coll]++;
    op->ended_ns[HRD_STAGE_DONE] = now_ns();
    for (unsigned i = 0; i < HRD_NSTAGES; i++) {
        if (op->ended_ns[i] <= at)
            continue;
        stage_ns[i] += op->ended_ns[i] - at;
        at = op->ended_ns[i];
    }
}

void hrd_complete_op(struct aop *op)
{
    struct acomm *c = op->c;
    bool bad = hrd_complete_poisoned(c);
    c->last_done_ns = c->a->now;
    c->stat.ops_done += !bad;
    c->stat.bytes += hrp_sig_bytes(&op->sig, c->nranks);
    count_time(c, op);
    if (op->plan.algo < HRP_NALGOS)
        c->stat.algo_ops[op->plan.algo]++;
    for (unsigned k = 0; k < HRD_NENGINES; k++)
        c->stat.engine_ops[k] += op->engine == c->a->engine[k];
    for (uint32_t i = 0; i < c->nlocal; i++) {
        if (op->post[i].staged)
            c->stat.staged_bytes += hrp_sig_bytes(&op->sig, c->nranks);
        if (op->post[i].staged && op->post[i].stream)
            c->stat.staged_gpu_bytes += hrp_sig_bytes(&op->sig, c->nranks);
        let_go(op, i);
        if (bad)
            hrd_complete_failed(
                &c->local[i], op->op, &op->post[i], HRP_RANK_LOST, HRP_SCOPE_COMM,
                "a local rank's shared memory went away during the operation; its session is ended");
        else
            hrd_complete_rank(c, &c->local[i], op->op, HRP_OK, HRP_SCOPE_NONE, NULL);
    }
    count_stages(c, op);
}

void hrd_complete_error(struct aop *op, uint32_t status, enum hrp_scope scope, const char *text)
{
    struct acomm *c = op->c;
    for (uint32_t i = 0; i < c->nlocal; i++) {
        struct apost *p = &op->post[i];
        if (!p->posted || p->answered)
            continue;
        let_go(op, i);
        hrd_complete_failed(&c->local[i], op->op, p, status, scope, text);
    }
}
