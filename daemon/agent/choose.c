/* SPDX-License-Identifier: MIT */
/*
 * Which engine works for an op. Where its local buffers lie decides first; among the engines that can reach GPU memory the
 * job decides by its hint, and without one the measurement: kernels win on a GPU that waits for them and lose by
 * milliseconds on one that computes, because it switches between processes. In between, where such a switch is all that they
 * wait for, a large op is still sooner done by them than by copies.
 *
 * Nodes need not agree: every engine computes the same bits.
 */
#include "daemon/agent/types.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Longer than any launch on an idle GPU takes, far below a time slice. */
#define WAITED_US 100u
#define WAITED_NS (UINT64_C(1000) * WAITED_US)
/* What copy engines move each way for an op, at least, in bytes a ns: measured 25 to 45 on a PCIe 5 slot. */
#define COPY_RATE 25u

static void look_at_buffer(struct hrd_engine_ask *ask, const struct hrd_span *s)
{
    if (!s->base)
        return;
    if (s->gpu >= 0)
        ask->gpus |= UINT64_C(1) << s->gpu;
    else
        ask->host = true;
}

static void look_at_buffers(const struct aop *op, struct hrd_engine_ask *ask)
{
    const struct acomm *c = op->c;
    *ask = (struct hrd_engine_ask){.sig = op->sig, .nlocal = c->nlocal, .one_node = c->nnodes == 1};
    for (uint32_t i = 0; i < c->nlocal; i++) {
        look_at_buffer(ask, &op->post[i].in);
        look_at_buffer(ask, &op->post[i].out);
    }
}

/* How long kernels may wait for the GPU and still be the better way: no longer than copies would take. */
static uint64_t patience(const struct aop *op, const struct hrd_engine_ask *ask)
{
    unsigned gpus = (unsigned)__builtin_popcountll(ask->gpus);
    uint64_t a_gpu = (ask->nlocal + gpus - 1) / gpus; /* ranks that share its link */
    return WAITED_NS + hrp_sig_bytes(&op->sig, op->c->nranks) / COPY_RATE * a_gpu;
}

/* One rank that computes is slowed down by kernels, whatever the others do. */
static uint8_t overlap_of(const struct aop *op)
{
    bool idle = false;
    for (uint32_t i = 0; i < op->c->nlocal; i++) {
        if (op->post[i].overlap == HRP_OVERLAP_COMPUTE)
            return HRP_OVERLAP_COMPUTE;
        idle = idle || op->post[i].overlap == HRP_OVERLAP_IDLE;
    }
    return idle ? HRP_OVERLAP_IDLE : HRP_OVERLAP_AUTO;
}

static const char *refusal(struct hrd_agent *a, enum hrd_engine_kind kind, const struct hrd_engine_ask *ask)
{
    struct hrd_engine *e = a->engine[kind];
    if (!e)
        return kind == HRD_ENGINE_SM ? "this daemon has no sm engine" : "this daemon serves no GPU";
    return e->table->refuses(e, ask);
}

static const char *hint_words(const struct achoice *now)
{
    return now->direct                           ? "p2p is required"
           : now->overlap == HRP_OVERLAP_COMPUTE ? "the job computes meanwhile (overlap = compute)"
           : now->overlap == HRP_OVERLAP_IDLE    ? "the job waits for the result (overlap = idle)"
                                                 : "overlap = auto";
}

/* The words for the path report, only when something changed: they cost time. */
static void explain(struct aop *op, const struct achoice *now)
{
    struct acomm *c = op->c;
    const struct achoice *old = &c->choice;
    if (old->engine == now->engine && old->overlap == now->overlap && old->gpus == now->gpus &&
        old->direct == now->direct && old->waited_us == now->waited_us && strcmp(old->other, now->other) == 0)
        return;
    c->choice = *now;
    const char *name = now->engine->table->name;
    snprintf(c->stat.engine, sizeof(c->stat.engine), "%s", name);
    bool wanted = now->overlap != HRP_OVERLAP_COMPUTE && now->engine != c->a->engine[HRD_ENGINE_SM];
    snprintf(c->stat.engine_out, sizeof(c->stat.engine_out), "%s", wanted ? now->other : "");
    if (now->other[0])
        snprintf(c->stat.engine_why, sizeof(c->stat.engine_why), "%s; the other engine is out: %s",
                 hint_words(now), now->other);
    else if (now->overlap == HRP_OVERLAP_AUTO && !now->direct)
        snprintf(c->stat.engine_why, sizeof(c->stat.engine_why),
                 "overlap = auto, and recent kernels waited %s %" PRIu64 " us for the GPU",
                 now->waited_us ? "some" : "less than",
                 now->waited_us ? now->waited_us : (uint64_t)WAITED_US);
    else
        snprintf(c->stat.engine_why, sizeof(c->stat.engine_why), "%s", hint_words(now));
}

/* With require = p2p: NULL, or why this op's GPU buffers cannot be reduced without a way through host memory. */
static const char *p2p_refusal(struct aop *op, const struct hrd_engine_ask *ask, const char *no_sm)
{
    for (uint32_t i = 0; i < op->c->nlocal; i++) {
        const struct apost *p = &op->post[i];
        if (p->staged && p->stream && p->stream_bytes > 0) {
            snprintf(
                op->text, sizeof(op->text),
                "p2p is required, but rank %" PRIu32
                " copies its GPU memory through the staging window; its library is older than require = p2p, "
                "or its memory cannot be given to the daemon (its log says why)",
                op->c->local[i].rank);
            return op->text;
        }
    }
    if (!no_sm || !(ask->gpus & (ask->gpus - 1)))
        return NULL; /* one GPU has nobody to be direct with */
    snprintf(
        op->text, sizeof(op->text),
        "p2p is required, but the GPUs of its ranks cannot be reduced directly: %s. 'hreducectl doctor' says "
        "what stands between GPUs; without p2p in require it goes through host memory",
        no_sm);
    return op->text;
}

const char *hrd_choose_engine(struct aop *op)
{
    struct hrd_agent *a = op->c->a;
    struct hrd_engine_ask ask;
    look_at_buffers(op, &ask);
    op->gpus = ask.gpus;
    const bool p2p = op->c->config.require & HRP_REQUIRE_P2P;
    const char *no_sm = ask.gpus ? refusal(a, HRD_ENGINE_SM, &ask) : NULL;
    const char *no_p2p = p2p ? p2p_refusal(op, &ask, no_sm) : NULL;
    if (no_p2p)
        return no_p2p;
    if (!ask.gpus) {
        op->engine = a->engine[HRD_ENGINE_HOST];
        return NULL;
    }
    struct achoice now = {
        .overlap = overlap_of(op), .gpus = ask.gpus, .direct = p2p && (ask.gpus & (ask.gpus - 1))};
    const char *no_dma = refusal(a, HRD_ENGINE_DMA, &ask);
    if (no_dma && no_sm)
        return no_dma;
    struct hrd_engine *sm = a->engine[HRD_ENGINE_SM];
    uint64_t waited = no_sm ? 0 : sm->table->waited(sm, ask.gpus);
    op->sm_asked = sm && !ask.host;
    op->sm_refused = no_sm != NULL;
    op->sm_waited = waited;
    bool gdr = op->c->config.require & HRP_REQUIRE_GDR; /* which kernels alone can use */
    bool kernels = !no_sm && (no_dma || gdr || now.direct || now.overlap == HRP_OVERLAP_IDLE ||
                              (now.overlap == HRP_OVERLAP_AUTO && waited < patience(op, &ask)));
    op->engine = kernels ? sm : a->engine[HRD_ENGINE_DMA];
    now.engine = op->engine;
    const char *other = kernels ? no_dma : no_sm;
    if (other)
        snprintf(now.other, sizeof(now.other), "%s", other);
    else if (now.overlap == HRP_OVERLAP_AUTO)
        now.waited_us =
            waited / WAITED_NS * WAITED_US; /* exactly, it would be new words for nearly every op */
    explain(op, &now);
    return NULL;
}

/* All local ranks' buffers are GPU memory, wherever it comes from. */
static bool all_by_stream(const struct aop *op)
{
    for (uint32_t i = 0; i < op->c->nlocal; i++)
        if (!op->post[i].stream)
            return false;
    return true;
}

/* How often a small op is asked for in place although nothing speaks for it: while the comm's GPUs are not known, and while
   kernels cannot run on them, which changes when a GPU comes up again. */
#define ASK_UNKNOWN HRP_OP_SLOTS
#define ASK_REFUSED 1024u

/* Ranks otherwise copy small ops through their windows, as if copy engines were taken. As long as nobody gave this daemon GPU
   memory it does not know the GPUs: a single op shows them, and how long its kernel waits. */
uint32_t hrd_choose_advice(const struct aop *op)
{
    const struct acomm *c = op->c;
    struct hrd_engine *sm = c->a->engine[HRD_ENGINE_SM];
    const uint8_t overlap = overlap_of(op);
    const struct hrd_engine_ask ask = {
        .gpus = c->choice.gpus, .sig = op->sig, .nlocal = c->nlocal, .one_node = true};
    if (!sm || c->nnodes > 1 || overlap == HRP_OVERLAP_COMPUTE || !all_by_stream(op))
        return 0;
    bool known = op->sm_asked && op->gpus == ask.gpus, in_place;
    if (!ask.gpus)
        in_place = overlap == HRP_OVERLAP_IDLE || op->op % ASK_UNKNOWN == 1;
    else if (known ? op->sm_refused : sm->table->refuses(sm, &ask) != NULL)
        in_place = op->op % ASK_REFUSED == 1;
    else
        in_place = overlap == HRP_OVERLAP_IDLE ||
                   (known ? op->sm_waited : sm->table->waited(sm, ask.gpus)) < WAITED_NS;
    return in_place ? HRP_ADVICE_IN_PLACE : 0;
}
