/* SPDX-License-Identifier: MIT */
/*
 * Where the memory of units lies. An op of the sm engine whose peers are all reached by an adapter that reads and writes GPU
 * memory (daemon/gpu/gdr.h) has its partials and receive slots on one of its GPUs: kernels fold into it, the adapter sends
 * from it and is written into by the peers, and nothing passes through host memory. Each direction stands for itself.
 *
 * No node need agree: slots are numbers that their owner chose, and a peer learns with each range of them where it is.
 *
 * It is a choice for each unit and costs no promise: a unit that finds no room on the GPU takes the host arena, where the
 * comm's reserve stands behind it as behind any other. The memory is the GPU's to take back: while an op is under way its
 * buffers keep the GPU up, and what a failed op left is waited for (hrd_pools_tick()).
 */
#include "daemon/agent/types.h"

#include <stdio.h>
#include <string.h>

/* Slots of GPU g begin here times g + 1: no arena is that large. */
#define SLOT_SPACE (UINT64_C(1) << 48)

/* A link that knows a pool's memory, with the peer's domain in it. */
struct apool_link {
    struct apool *p;
    struct alink *l;
    struct apool_link *next;
};

static uint64_t bit_of(const struct apool *p)
{
    return UINT64_C(1) << p->gpu;
}

/* What the GPU's thread knows of it now. */
static const struct hrd_gdr *look(struct hrd_agent *a, int16_t gpu)
{
    if (!a->gdr)
        a->gdr = xalloc(HRD_GPUS_MAX, sizeof(*a->gdr));
    struct agdr *known = &a->gdr[gpu];
    uint64_t epoch = hrd_gpus_gdr_epoch(a->cfg.gpus);
    if (known->epoch != epoch)
        hrd_gpus_gdr(a->cfg.gpus, gpu, &known->is);
    known->epoch = epoch;
    return &known->is;
}

/* ---- pools and links ----------------------------------------------------------------------------------------------- */

static int pool_grow(void *ctx, uint64_t off, uint64_t len)
{
    struct apool_link *k = ctx;
    struct alink *l = k->l;
    if (!l->link || l->gdr_refused & bit_of(k->p)) /* being taken apart; not again for every unit */
        return -1;
    l->link->refusal[0] = '\0';
    int err = l->link->tp->expose(l->link, k->p->first_slot + off, hrd_arena_at(k->p->arena, off), len);
    if (err) {
        const char *why = l->link->refusal[0] ? l->link->refusal : "the link is broken";
        l->gdr_refused |= bit_of(k->p);
        snprintf(l->gdr_why, sizeof(l->gdr_why),
                 "on the link to node %s the adapter takes no more memory of the GPU: %.350s", l->name, why);
    }
    return err;
}

static void pool_shrink(void *ctx, uint64_t off, uint64_t len)
{
    struct apool_link *k = ctx;
    if (!k->l->link)
        return;
    k->l->link->tp->withdraw(k->l->link, k->p->first_slot + off, len);
    k->l->dirty = true;
}

/* False: this link cannot have that memory, and l->gdr_why says why. */
static bool link_has(struct apool *p, const struct hrd_gdr *g, struct alink *l)
{
    if (l->gdr_refused & bit_of(p))
        return false;
    if (l->gdr & bit_of(p))
        return true;
    const struct hrd_transport *tp = l->link->tp;
    char why[SENTENCE - 200] = "";
    if (!tp->add_memory)
        snprintf(l->gdr_why, sizeof(l->gdr_why), "node %s is reached by %s, which moves host memory alone",
                 l->name, tp->name);
    else if (tp->add_memory(l->link, &g->memory, why, sizeof(why)))
        snprintf(l->gdr_why, sizeof(l->gdr_why), "on the link to node %s: %s", l->name, why);
    else {
        struct apool_link *k = xalloc(1, sizeof(*k));
        *k = (struct apool_link){.p = p, .l = l, .next = p->links};
        p->links = k;
        struct hrd_arena_watch watch = {.grow = pool_grow, .shrink = pool_shrink, .ctx = k};
        if (hrd_arena_domain_open(p->arena, l->peer, &watch))
            abort(); /* peer numbers are never used again */
        l->gdr |= bit_of(p);
        return true;
    }
    l->gdr_refused |= bit_of(p);
    return false;
}

static struct apool *pool_of(struct hrd_agent *a, int16_t gpu)
{
    if (a->pool[gpu] || !hrd_gpus_gdr_hold(a->cfg.gpus, gpu))
        return a->pool[gpu];
    struct apool *p = xalloc(1, sizeof(*p));
    const struct hrd_gdr *g = look(a, gpu); /* again: it is not another one from here on */
    p->arena = hrd_arena_over(g->memory.base, g->memory.bytes);
    if (!p->arena)
        abort();
    p->gpu = gpu;
    p->first_slot = ((uint64_t)gpu + 1) * SLOT_SPACE;
    a->pool[gpu] = p;
    return p;
}

/* Nothing of it is in use. */
static void pool_close(struct hrd_agent *a, struct apool *p)
{
    for (struct acomm *c = a->comms; c; c = c->next)
        for (struct aop *op = c->ops; op; op = op->next) {
            op->send_pool = op->send_pool == p ? &a->host : op->send_pool;
            op->recv_pool = op->recv_pool == p ? &a->host : op->recv_pool;
        }
    hrd_arena_reclaim(p->arena);
    while (p->links) {
        struct apool_link *k = p->links;
        p->links = k->next;
        hrd_arena_domain_close(p->arena, k->l->peer);
        if (k->l->link)
            k->l->link->tp->drop_memory(k->l->link, hrd_arena_at(p->arena, 0));
        k->l->gdr &= ~bit_of(p);
        free(k);
    }
    for (struct alink *l = a->links; l; l = l->next)
        l->gdr_refused &= ~bit_of(p);
    hrd_arena_free(p->arena);
    hrd_gpus_gdr_let_go(a->cfg.gpus, p->gpu);
    a->pool[p->gpu] = NULL;
    free(p);
}

void hrd_pools_describe(const struct alink *l, struct hrd_snapshot_link *out)
{
    struct hrd_agent *a = l->a;
    for (unsigned g = 0; l->gdr && g < HRD_GPUS_MAX; g++)
        if (a->pool[g] && l->gdr >> g & 1) {
            out->gdr_send = out->gdr_send || a->gdr[g].is.send;
            out->gdr_receive = out->gdr_receive || a->gdr[g].is.receive;
        }
    if (l->gdr_refused)
        snprintf(out->gdr_why, sizeof(out->gdr_why), "%.199s", l->gdr_why);
}

void hrd_pools_link_closed(struct alink *l)
{
    for (unsigned g = 0; l->gdr && g < HRD_GPUS_MAX; g++) {
        struct apool *p = l->a->pool[g];
        struct apool_link **pk = p ? &p->links : NULL;
        while (pk && *pk && (*pk)->l != l)
            pk = &(*pk)->next;
        if (!pk || !*pk)
            continue;
        struct apool_link *k = *pk;
        *pk = k->next;
        hrd_arena_domain_close(p->arena, l->peer);
        free(k);
    }
    l->gdr = 0;
}

void hrd_pools_free(struct hrd_agent *a)
{
    for (unsigned g = 0; g < HRD_GPUS_MAX; g++)
        if (a->pool[g])
            pool_close(a, a->pool[g]);
    free(a->gdr);
}

void hrd_pools_tick(struct hrd_agent *a)
{
    for (const struct acomm *c = a->comms; c; c = c->next)
        for (const struct aop *op = c->ops; op; op = op->next)
            a->work_to_admit = a->work_to_admit || op->undecided;
    for (unsigned g = 0; a->gdr && g < HRD_GPUS_MAX; g++)
        if (a->pool[g] && look(a, (int16_t)g)->wanted && hrd_arena_used(a->pool[g]->arena) == 0)
            pool_close(a, a->pool[g]);
}

int hrd_pool_settle(struct hrd_agent *a, struct apool *p, struct hrd_work_error *error)
{
    if (!p->arrived)
        return 0;
    int err = hrd_gpus_gdr_flush(a->cfg.gpus, p->gpu, p->wide, &error->device_lost, error->text,
                                 sizeof(error->text));
    p->arrived = err != 0; /* other ops have data in it, too */
    return err;
}

/* ---- the choice ---------------------------------------------------------------------------------------------------- */

/* Why not, for the path report. */
struct reason {
    char why[SENTENCE], remedy[240];
};

static void because(struct reason *r, const char *why, const char *remedy)
{
    snprintf(r->why, sizeof(r->why), "%s", why);
    snprintf(r->remedy, sizeof(r->remedy), "%s", remedy);
}

static bool serves(const struct aop *op, const struct hrd_gdr *g, bool receive)
{
    if (!g->ready || g->wanted)
        return false;
    bool alone = (op->gpus & (op->gpus - 1)) == 0;
    return receive ? g->receive && (g->receive_all || alone) : g->send;
}

/* The GPU nearest to the adapter; of several the ops take turns. Negative: none serves. */
static int16_t nearest(struct aop *op, bool receive)
{
    struct hrd_agent *a = op->c->a;
    unsigned best = UINT32_MAX, n = 0;
    int16_t found[HRD_GPUS_MAX];
    for (uint64_t left = op->gpus; left; left &= left - 1) {
        int16_t gpu = (int16_t)__builtin_ctzll(left);
        const struct hrd_gdr *g = look(a, gpu);
        if (!serves(op, g, receive) || g->distance > best)
            continue;
        n = g->distance < best ? 0 : n;
        best = g->distance;
        found[n++] = gpu;
    }
    return n ? found[op->op % n] : -1;
}

/* Where one direction of the op's units lies. */
static struct apool *pick(struct aop *op, bool receive, struct reason *r)
{
    struct acomm *c = op->c;
    struct hrd_agent *a = c->a;
    int16_t gpu = nearest(op, receive);
    if (gpu < 0) {
        const struct hrd_gdr *g = look(a, (int16_t)__builtin_ctzll(op->gpus));
        for (uint64_t left = op->gpus; left; left &= left - 1)
            op->undecided = op->undecided || look(a, (int16_t)__builtin_ctzll(left))->trying;
        because(r, g->why[0] ? g->why : "writes into its memory have no order that other GPUs can rely on",
                g->why[0] ? g->remedy : "a newer driver, or ranks of one GPU in each operation");
        return &a->host;
    }
    struct apool *p = pool_of(a, gpu);
    if (!p)
        because(r, "the GPU is just being given back", "nothing: it passes");
    for (uint32_t n = 0; p && n < c->nnodes; n++) {
        struct alink *l = c->link[n];
        if (!l || !l->link || link_has(p, look(a, gpu), l))
            continue;
        because(r, l->gdr_why, "'hreducectl doctor' on both nodes says what keeps them from it");
        p = NULL;
    }
    return p ? p : &a->host;
}

/* The words for the path report, only when something changed. */
static void report(struct aop *op, const struct reason *r)
{
    struct acomm *c = op->c;
    struct hrd_agent *a = c->a;
    struct agdr_choice now = {
        .send = op->send_pool, .recv = op->recv_pool, .engine = op->engine, .gpus = op->gpus};
    now.epoch = hrd_gpus_gdr_epoch(a->cfg.gpus);
    if (memcmp(&now, &c->gdr_choice, sizeof(now)) == 0 && c->stat.gdr_used[0])
        return;
    c->gdr_choice = now;
    const struct apool *on = now.recv->gpu >= 0 ? now.recv : now.send;
    bool both = now.recv->gpu >= 0 && now.send->gpu >= 0;
    if (on->gpu < 0)
        snprintf(c->stat.gdr_used, sizeof(c->stat.gdr_used), "host memory");
    else
        snprintf(c->stat.gdr_used, sizeof(c->stat.gdr_used), "%s%s", look(a, on->gpu)->used,
                 both                 ? ""
                 : now.recv->gpu >= 0 ? ", sent from host memory"
                                      : ", received in host memory");
    snprintf(c->stat.gdr_why, sizeof(c->stat.gdr_why), "%s", both ? "" : r->why);
    snprintf(c->stat.gdr_remedy, sizeof(c->stat.gdr_remedy), "%s", both ? "" : r->remedy);
}

const char *hrd_pools_choose(struct aop *op)
{
    struct acomm *c = op->c;
    struct hrd_agent *a = c->a;
    struct reason r = {.why = ""};
    op->send_pool = op->recv_pool = &a->host;
    op->undecided = false;
    /* Small messages are copied anyway. */
    if (!op->gpus || c->nnodes == 1 || op->plan.eager)
        return NULL;
    if (op->engine == a->engine[HRD_ENGINE_SM]) {
        op->send_pool = pick(op, false, &r);
        op->recv_pool = pick(op, true, &r);
    } else {
        because(&r, "the dma engine sums in host memory",
                "overlap = idle, where the job waits for the result");
    }
    struct apool *on = op->recv_pool;
    if (on->gpu >= 0 && !on->wide && op->gpus & ~bit_of(on))
        on->wide = on->arrived = true;
    report(op, &r);
    bool both = op->send_pool->gpu >= 0 && op->recv_pool->gpu >= 0;
    if (both || !(c->config.require & HRP_REQUIRE_GDR))
        op->undecided = false;
    else if (!op->undecided) {
        snprintf(op->text, sizeof(op->text), "require = gdr, but %s; %s", r.why, r.remedy);
        return op->text;
    }
    return NULL;
}
