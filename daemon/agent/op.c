/* SPDX-License-Identifier: MIT */
/* Ops of a comm: matching across local ranks and with the other nodes, and the order in which they end. */
#include "daemon/agent/types.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct aop *hrd_op_find(struct acomm *c, uint64_t op)
{
    struct aop *o = c->ops;
    while (o && o->op < op)
        o = o->next;
    return o && o->op == op ? o : NULL;
}

struct aop *hrd_op_get(struct acomm *c, uint64_t op)
{
    if (op <= c->done_wm || op > c->done_wm + HRD_OPS_AHEAD)
        return NULL;
    struct aop **po = &c->ops;
    while (*po && (*po)->op < op)
        po = &(*po)->next;
    if (*po && (*po)->op == op)
        return (*po)->state == OP_DONE ? NULL : *po;
    struct aop *o = xalloc(1, sizeof(*o) + c->nlocal * sizeof(o->post[0]));
    o->c = c;
    o->op = op;
    o->next = *po;
    *po = o;
    return o;
}

void hrd_op_free(struct aop *op)
{
    struct acomm *c = op->c;
    hrd_pipeline_drop_units(op);
    struct aop **po = &c->ops;
    while (*po != op)
        po = &(*po)->next;
    *po = op->next;
    free(op->marks);
    free(op);
}

void hrd_op_advance(struct acomm *c)
{
    bool moved = false;
    while (c->ops && c->ops->op == c->done_wm + 1) {
        struct aop *op = c->ops;
        if (op->state != OP_DONE && !(op->state == OP_FAILED && op->nposted == c->nlocal))
            break;
        c->done_wm++;
        hrd_pipeline_forget_credits(c, op->op);
        hrd_op_free(op);
        moved = true;
    }
    if (!moved)
        return;
    c->a->work_to_admit = true;
    /* Senders of eager messages wait for the watermark. It rides on every frame; where none goes their way, tell them
       before they run out of slots. */
    for (uint32_t n = 0; n < c->nnodes; n++) {
        if (!c->link[n] || c->done_wm - c->told_wm[n] < HRP_EAGER_SLOTS / 2)
            continue;
        struct hrp_frame f = hrd_frame(c, HRP_FRAME_WATERMARK, 0);
        hrd_frames_send(c, n, 0, &f, NULL);
    }
}

bool hrd_op_agrees(struct aop *op, const struct hrp_sig *sig, uint32_t rank, uint32_t node)
{
    if (!op->have_sig || memcmp(sig, &op->sig, sizeof(*sig)) == 0)
        return true;
    struct acomm *c = op->c;
    char mine[96], theirs[96];
    hrp_sig_text(&op->sig, mine, sizeof(mine));
    hrp_sig_text(sig, theirs, sizeof(theirs));
    hrd_abort_report(
        op, HRP_MISMATCH,
        "op %" PRIu64
        ": rank %u (node %s) posted %s, but rank %u (node %s) posted %s; all ranks must post the "
        "same operations in the same order",
        op->op, op->sig_rank, c->node_name[c->node], mine, rank, c->node_name[node], theirs);
    return false;
}

/* Credits and eager messages that came before our own ranks posted were not compared yet. */
static bool early_frames_agree(struct aop *op)
{
    struct acomm *c = op->c;
    for (const struct acredit *cr = c->credits; cr; cr = cr->next)
        if (cr->op == op->op && !hrd_op_agrees(op, &cr->sig, cr->rank, cr->node))
            return false;
    for (uint32_t n = 0; n < c->nnodes; n++) {
        const struct aeager *e = &c->eager[n * HRP_EAGER_SLOTS + op->op % HRP_EAGER_SLOTS];
        if (e->op == op->op && !hrd_op_agrees(op, &e->frame.sig, e->frame.rank, n))
            return false;
    }
    return true;
}

/* What passes through a window comes and goes unit by unit, and a window holds little more than one as planned. */
static bool any_staged(const struct aop *op)
{
    for (uint32_t i = 0; i < op->c->nlocal; i++)
        if (op->post[i].staged)
            return true;
    return false;
}

/* Where no peer has to cut alike, the engine has a say in it. */
static struct hrd_plan_env planning_env(const struct aop *op)
{
    struct hrd_plan_env env = op->c->env;
    const uint64_t wanted = op->engine->table->one_node_unit;
    if (env.nnodes == 1 && wanted > env.unit_bytes && !any_staged(op))
        env.unit_bytes = env.unit_min_bytes = wanted;
    return env;
}

void hrd_op_posted(struct aop *op)
{
    struct acomm *c = op->c;
    if (!early_frames_agree(op))
        return;
    const char *refusal = hrd_choose_engine(op);
    if (refusal) {
        hrd_abort_report(op, HRP_UNSUPPORTED, "op %" PRIu64 ": node %s: %s", op->op, c->a->node_name,
                         refusal);
        return;
    }
    c->advice = hrd_choose_advice(op);
    char text[SENTENCE], *why = text;
    size_t len = 0;
    if (op->op <= 4 || op->op % 64 == 0) { /* words cost time; a sample is enough */
        why = c->stat.last_plan;
        len = sizeof(c->stat.last_plan);
    }
    const struct hrd_plan_env env = planning_env(op);
    if (hrd_plan_op(&env, &op->sig, &op->plan, why, len)) {
        hrd_plan_op(&env, &op->sig, &op->plan, text, sizeof(text));
        hrd_abort_report(op, HRP_INVALID_ARGUMENT, "op %" PRIu64 ": %s", op->op, text);
        return;
    }
    refusal = hrd_pools_choose(op);
    if (refusal) {
        hrd_abort_report(op, HRP_UNSUPPORTED, "op %" PRIu64 ": node %s: %s", op->op, c->a->node_name,
                         refusal);
        return;
    }
    op->state = OP_RUNNING;
    c->a->work_to_admit = true;
}
