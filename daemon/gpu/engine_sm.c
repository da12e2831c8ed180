/* SPDX-License-Identifier: MIT */
/*
 * The sm engine on the agent's side: work becomes shards, shards become launches on the GPUs' lanes (sm_part.c), and the
 * words that kernels raise become done(). The agent only fills rings and reads words; nothing here waits.
 */
#include "daemon/gpu/engine_sm.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/clock.h"
#include "daemon/gpu/sm_part.h"

/* A shard is at least this long: below it another launch costs more than it saves. */
#define SHARD_BYTES (UINT64_C(32) << 10)
/* Shards begin at multiples of this many elements, so that aligned buffers stay aligned for vectors. */
#define SHARD_ELEMS UINT64_C(512)
/* Shards up to this long go through the lane of small ones. */
#define SMALL_BYTES (UINT64_C(256) << 10)
/* What one launch takes: far above what it costs, and no more than a millisecond that others wait behind it. */
#define UNIT_BYTES (UINT64_C(64) << 20)
/* A lane that has been silent for so long is asked whether its GPU still lives. */
#define SILENCE_NS UINT64_C(2000000)
/* A measured wait counts half as much after each such time without another, so that a GPU gets its next try. */
#define FORGET_NS UINT64_C(250000000)

#define LONGEST_NS UINT64_C(1000000)
#define LEAST_BYTES_A_US UINT64_C(8000)

struct failure {
    struct failure *next;
    struct hrd_work *work;
    struct hrd_work_error error;
};

struct work_queue {
    struct hrd_work *first, *last;
};

struct sm_engine {
    struct hrd_engine base;
    struct hrd_gpus *gpus;
    struct hrd_engine *host;
    uint64_t busy;              /* bit g: launches are under way on GPU g */
    struct work_queue finished; /* to be reported by the next poll */
    struct work_queue waiting;  /* not one of its shards is posted: a ring was full */
    struct failure *failures;   /* of work whose shards are not all over */
    unsigned turn;              /* which GPU is first next time */
    char refusal[512];
};

static void push(struct work_queue *q, struct hrd_work *w)
{
    w->next = NULL;
    if (q->last)
        q->last->next = w;
    else
        q->first = w;
    q->last = w;
}

static struct hrd_work *pop(struct work_queue *q)
{
    struct hrd_work *w = q->first;
    if (w && !(q->first = w->next))
        q->last = NULL;
    return w;
}

static struct sm_part *part_of(const struct sm_engine *e, unsigned gpu)
{
    struct hrd_gpu_dev *g = hrd_gpus_dev(e->gpus, (int16_t)gpu);
    return g ? g->part[HRD_GPU_SM] : NULL;
}

/* ---- failures ------------------------------------------------------------------------------------------------- */

static struct failure *failure_of(struct sm_engine *e, const struct hrd_work *w)
{
    for (struct failure *f = e->failures; f; f = f->next)
        if (f->work == w)
            return f;
    return NULL;
}

/* The first failure of a piece of work is the one that is told. */
static struct hrd_work_error *fail(struct sm_engine *e, struct hrd_work *w)
{
    struct failure *f = failure_of(e, w);
    if (!f) {
        f = calloc(1, sizeof(*f));
        if (!f)
            abort();
        f->work = w;
        f->next = e->failures;
        e->failures = f;
    }
    return &f->error;
}

static const char *kind_name(const struct hrd_work *w)
{
    return w->kind == HRD_WORK_FOLD ? "fold" : w->kind == HRD_WORK_COPY ? "copy" : "NaN fill";
}

/* The GPU answered with an error: one sentence for the work, and the verdict on the GPU. */
static void fail_by_device(struct sm_engine *e, struct hrd_work *w, struct hrd_gpu_dev *g, hrg_result r)
{
    struct hrd_work_error *error = fail(e, w);
    if (error->text[0])
        return;
    char what[96];
    snprintf(what, sizeof(what), "a %s kernel over %" PRIu64 " elements", kind_name(w), w->n);
    error->device_lost = hrd_gpu_failed(g, r, what, error->text, sizeof(error->text));
}

static void report(struct sm_engine *e, struct hrd_work *w)
{
    struct failure **at = &e->failures;
    while (*at && (*at)->work != w)
        at = &(*at)->next;
    struct failure *f = *at;
    if (f)
        *at = f->next;
    w->done(w, f ? &f->error : NULL);
    free(f);
}

/* ---- from work to launches ------------------------------------------------------------------------------------ */

static uint64_t element_bytes(const struct hrd_work *w)
{
    uint64_t in = w->nsrc ? hrp_dtype_size(w->fold.in) : 0, out = hrp_dtype_size(w->fold.out);
    return in > out ? in : out;
}

static uint64_t gpus_of(const struct hrd_work *w)
{
    uint64_t gpus = 0;
    for (uint32_t i = 0; i < w->nsrc + w->ndst; i++)
        if (w->span[i].gpu >= 0)
            gpus |= UINT64_C(1) << w->span[i].gpu;
    return gpus;
}

/* What a span is called by the kernels of GPU p: 0, or an error of the driver. */
static hrg_result address(const struct sm_engine *e, struct sm_part *p, const struct hrd_span *s,
                          uint64_t byte, uint64_t *device)
{
    hrg_result r = HRG_SUCCESS;
    if (s->gpu < 0) {
        *device = sm_part_address(p, s->base + s->off + byte, &r);
        return r;
    }
    uint64_t base = sm_part_view(p, e->gpus, s);
    *device = base + s->off + byte;
    return base ? HRG_SUCCESS : HRG_ERROR_PEER_ACCESS_UNSUPPORTED;
}

static hrg_result describe(const struct sm_engine *e, struct sm_part *p, const struct hrd_work *w,
                           uint64_t at, uint64_t n, struct hrg_launch *l)
{
    const uint64_t in = hrp_dtype_size(w->fold.in), out = hrp_dtype_size(w->fold.out);
    uint64_t src[HRG_MAX_SOURCES] = {0}, dst[HRG_MAX_SINKS] = {0};
    hrg_result r = HRG_SUCCESS;
    int err;
    for (uint32_t i = 0; i < w->nsrc && r == HRG_SUCCESS; i++)
        r = address(e, p, &w->span[i], at * (w->kind == HRD_WORK_FOLD ? in : out), &src[i]);
    for (uint32_t i = 0; i < w->ndst && r == HRG_SUCCESS; i++)
        r = address(e, p, &w->span[w->nsrc + i], at * out, &dst[i]);
    if (r != HRG_SUCCESS)
        return r;
    switch (w->kind) {
    case HRD_WORK_FOLD:
        err = hrg_fold_launch(l, &w->fold, dst, w->ndst, src, w->nsrc, n, p->max_blocks);
        break;
    case HRD_WORK_COPY:
        err = hrg_copy_launch(l, dst, w->ndst, src[0], n * out, p->max_blocks);
        break;
    default:
        err = hrg_nan_launch(l, w->fold.out, dst, w->ndst, n, p->max_blocks);
    }
    return err ? HRG_ERROR_INVALID_VALUE : HRG_SUCCESS;
}

/* The GPUs that share the work, as a list; how many. */
static unsigned shard_gpus(struct sm_engine *e, const struct hrd_work *w, uint64_t gpus, unsigned *list)
{
    unsigned count = 0, first = e->turn++;
    uint64_t wanted = w->n * element_bytes(w) / SHARD_BYTES;
    for (unsigned g = 0; g < HRD_GPUS_MAX; g++)
        if (gpus >> g & 1)
            list[count++] = g;
    if (wanted >= count)
        return count;
    /* Fewer shards than GPUs: they take turns. */
    unsigned all[HRD_GPUS_MAX], need = wanted ? (unsigned)wanted : 1;
    memcpy(all, list, count * sizeof(*all));
    for (unsigned i = 0; i < need; i++)
        list[i] = all[(first + i) % count];
    return need;
}

static unsigned lane_for(uint64_t bytes)
{
    return bytes <= SMALL_BYTES ? SM_SMALL : SM_LARGE;
}

/* Posts all shards. False: a ring is full, and nothing was posted. */
static bool post(struct sm_engine *e, struct hrd_work *w)
{
    unsigned list[HRD_GPUS_MAX] = {0};
    unsigned count = shard_gpus(e, w, gpus_of(w), list);
    uint64_t each = ((w->n + count - 1) / count + SHARD_ELEMS - 1) / SHARD_ELEMS * SHARD_ELEMS;
    unsigned lane = lane_for(each * element_bytes(w));
    uint64_t now = now_ns(), shards = (w->n + each - 1) / each;
    for (unsigned i = 0; i < shards; i++)
        if (!sm_part_entry(part_of(e, list[i]), lane))
            return false;
    atomic_store_explicit(&w->left, shards, memory_order_relaxed);
    for (unsigned i = 0; i < shards; i++) {
        struct sm_part *p = part_of(e, list[i]);
        struct sm_entry *entry = sm_part_entry(p, lane);
        uint64_t at = i * each, n = w->n - at < each ? w->n - at : each;
        hrg_result r = describe(e, p, w, at, n, &entry->launch);
        if (r != HRG_SUCCESS) {
            fail_by_device(e, w, p->dev, r);
            if (atomic_fetch_sub_explicit(&w->left, 1, memory_order_relaxed) == 1)
                push(&e->finished, w);
            continue;
        }
        entry->work = w;
        entry->bytes = n * element_bytes(w);
        entry->queued_ns = now;
        sm_part_post(p, lane);
        e->busy |= UINT64_C(1) << list[i];
    }
    return true;
}

/* post() may end a piece of work itself and link it elsewhere: whoever is next is asked before. */
static void post_waiting(struct sm_engine *e)
{
    for (struct hrd_work *w; (w = e->waiting.first) != NULL;) {
        struct hrd_work *next = w->next;
        if (!post(e, w))
            return;
        e->waiting.first = next;
        if (!next)
            e->waiting.last = NULL;
    }
}

/* NULL, or why this engine cannot do the work: a mistake of whoever gave it here. */
static const char *check(struct sm_engine *e, const struct hrd_work *w)
{
    uint64_t gpus = gpus_of(w);
    if (w->nsrc > HRG_MAX_SOURCES || w->ndst > HRG_MAX_SINKS || w->ndst == 0 ||
        (w->kind != HRD_WORK_NAN && w->nsrc == 0))
        return "more sources or sinks than a kernel takes";
    for (uint32_t i = 0; i < w->nsrc + w->ndst; i++) {
        const struct hrd_span *s = &w->span[i];
        uint64_t size = i < w->nsrc && w->kind == HRD_WORK_FOLD ? hrp_dtype_size(w->fold.in)
                                                                : hrp_dtype_size(w->fold.out);
        if (s->wrap)
            return "a staging window, which kernels do not read";
        if (s->gpu < 0 && !hrd_gpus_pinned(e->gpus, s->base + s->off, w->n * size))
            return "host memory that is not registered with the driver";
    }
    for (unsigned g = 0; g < HRD_GPUS_MAX; g++)
        if (gpus >> g & 1 && !part_of(e, g))
            return "a GPU that has no kernels";
    for (unsigned g = 0; g < HRD_GPUS_MAX; g++)
        for (uint32_t i = 0; gpus >> g & 1 && i < w->nsrc + w->ndst; i++)
            if (w->span[i].gpu >= 0 && !sm_part_view(part_of(e, g), e->gpus, &w->span[i]))
                return "memory that another GPU of the work has no address for";
    return NULL;
}

static void sm_submit(struct hrd_engine *base, struct hrd_work *w)
{
    struct sm_engine *e = (struct sm_engine *)base;
    if (w->n > 0 && gpus_of(w) == 0) {
        e->host->table->submit(e->host, w);
        return;
    }
    const char *wrong = w->n > 0 ? check(e, w) : NULL;
    if (wrong)
        snprintf(fail(e, w)->text, HRD_WORK_TEXT,
                 "the sm engine was given %s in a %s of %" PRIu64 " elements", wrong, kind_name(w), w->n);
    if (wrong || w->n == 0)
        push(&e->finished, w);
    else if (e->waiting.first || !post(e, w))
        push(&e->waiting, w);
}

/* ---- from words to done() ------------------------------------------------------------------------------------- */

static unsigned log2_of(uint64_t v)
{
    return v ? 63u - (unsigned)__builtin_clzll(v) : 0;
}

/* More than any launch takes that does not wait, over the slowest link. */
static uint64_t longest_ns(uint64_t bytes)
{
    return LONGEST_NS + bytes / LEAST_BYTES_A_US * 1000;
}

/* What a launch took beyond the shortest of its size, it waited for the multiprocessors, even if all of that size so far did. A
   job that computes makes every launch wait; one alone that did has met something else. */
static void measure(struct sm_part *p, const struct sm_lane *l, const struct sm_entry *entry, uint64_t now)
{
    uint64_t began = entry->queued_ns > l->over_ns ? entry->queued_ns : l->over_ns;
    uint64_t took = now > began ? now - began : 0, *best = &p->best_ns[log2_of(entry->bytes)];
    if (*best == 0 || took < *best)
        *best = took;
    uint64_t usual = *best < longest_ns(entry->bytes) ? *best : longest_ns(entry->bytes);
    uint64_t wait = took - usual, least = wait < p->last_wait_ns ? wait : p->last_wait_ns;
    p->last_wait_ns = wait;
    p->waited_ns = (3 * p->waited_ns + least) / 4;
    p->measured_ns = now;
}

static void entry_over(struct sm_engine *e, struct sm_lane *l, struct sm_entry *entry, uint64_t now)
{
    struct hrd_work *w = entry->work;
    l->over++;
    l->over_ns = now;
    if (entry->launched_ns > w->began_ns)
        w->began_ns = entry->launched_ns;
    if (atomic_fetch_sub_explicit(&w->left, 1, memory_order_relaxed) == 1)
        push(&e->finished, w);
}

/* Nothing was heard of a lane for a while. After an error that ends the context nothing runs on it any more, and what was
   launched is over. */
static void listen(struct sm_engine *e, struct sm_part *p, struct sm_lane *l, uint64_t now)
{
    uint64_t launched = atomic_load_explicit(&l->launched, memory_order_acquire);
    if (l->over == launched)
        return;
    hrg_result r = sm_part_ask(p, l);
    l->over_ns = now;
    if (r == HRG_ERROR_NOT_READY)
        return;
    if (r == HRG_SUCCESS) {
        if (sm_part_over(l)) /* it ended just now */
            return;
        r = HRG_ERROR_LAUNCH_FAILED;
    }
    atomic_store_explicit((_Atomic uint32_t *)(p->pinned + SM_LANES * 8), 1, memory_order_relaxed);
    while (l->over < launched) {
        struct sm_entry *entry = &l->ring[l->over % SM_RING];
        fail_by_device(e, entry->work, p->dev, r);
        entry_over(e, l, entry, now);
    }
}

/* True: something is still under way. */
static bool poll_part(struct sm_engine *e, struct sm_part *p, uint64_t *now)
{
    bool busy = false;
    for (unsigned i = 0; i < SM_LANES; i++) {
        struct sm_lane *l = p->lane[i];
        struct sm_entry *entry;
        if (l->over == atomic_load_explicit(&l->posted, memory_order_relaxed))
            continue;
        if (!*now)
            *now = now_ns();
        while ((entry = sm_part_over(l)) != NULL) {
            if (entry->result == HRG_SUCCESS)
                measure(p, l, entry, *now);
            else
                fail_by_device(e, entry->work, p->dev, entry->result);
            entry_over(e, l, entry, *now);
        }
        if (l->over == atomic_load_explicit(&l->posted, memory_order_relaxed))
            continue;
        if (*now > l->over_ns + SILENCE_NS)
            listen(e, p, l, *now);
        busy = busy || l->over != atomic_load_explicit(&l->posted, memory_order_relaxed);
    }
    return busy;
}

static unsigned sm_poll(struct hrd_engine *base)
{
    struct sm_engine *e = (struct sm_engine *)base;
    uint64_t now = 0;
    for (uint64_t left = e->busy; left; left &= left - 1) {
        unsigned g = (unsigned)__builtin_ctzll(left);
        if (!poll_part(e, part_of(e, g), &now))
            e->busy &= ~(UINT64_C(1) << g);
    }
    post_waiting(e);
    /* done() may submit more, which is for the next poll. */
    struct work_queue over = e->finished;
    unsigned count = 0;
    e->finished = (struct work_queue){0};
    for (struct hrd_work *w; (w = pop(&over)) != NULL; count++)
        report(e, w);
    return count;
}

static bool sm_silent(struct hrd_engine *base)
{
    const struct sm_engine *e = (const struct sm_engine *)base;
    return e->busy != 0;
}

static int sm_arm(struct hrd_engine *base, int armed)
{
    const struct sm_engine *e = (const struct sm_engine *)base;
    (void)armed;
    return e->finished.first != NULL;
}

static unsigned sm_help(struct hrd_engine *base)
{
    (void)base;
    return 0;
}

static uint64_t sm_waited(struct hrd_engine *base, uint64_t gpus)
{
    const struct sm_engine *e = (const struct sm_engine *)base;
    uint64_t worst = 0;
    for (; gpus; gpus &= gpus - 1) {
        const struct sm_part *p = part_of(e, (unsigned)__builtin_ctzll(gpus));
        if (!p || p->waited_ns <= worst)
            continue;
        uint64_t halvings = (now_ns() - p->measured_ns) / FORGET_NS;
        uint64_t waited = halvings < 64 ? p->waited_ns >> halvings : 0;
        if (waited > worst)
            worst = waited;
    }
    return worst;
}

static const char *sm_refuses(struct hrd_engine *base, const struct hrd_engine_ask *ask)
{
    struct sm_engine *e = (struct sm_engine *)base;
    const char *lost = hrd_gpus_lost(e->gpus, ask->gpus);
    if (lost)
        return lost;
    if (ask->host)
        return "a local rank's buffer lies in host memory";
    if (ask->nlocal >= HRG_MAX_SINKS) {
        snprintf(e->refusal, sizeof(e->refusal), "%" PRIu32 " local ranks, and a kernel writes to at most %u",
                 ask->nlocal, HRG_MAX_SINKS - 1);
        return e->refusal;
    }
    for (uint64_t left = ask->gpus; left; left &= left - 1) {
        int16_t a = (int16_t)__builtin_ctzll(left);
        const struct hrd_gpu_dev *g = hrd_gpus_dev(e->gpus, a);
        if (!g || !g->part[HRD_GPU_SM]) {
            snprintf(e->refusal, sizeof(e->refusal), "GPU %s: %s", g ? g->id : "gone",
                     g ? g->part_why[HRD_GPU_SM] : "it is not up");
            return e->refusal;
        }
        for (uint64_t others = left & (left - 1); others; others &= others - 1) {
            int16_t b = (int16_t)__builtin_ctzll(others);
            const char *why = "";
            if (hrd_gpus_pair(e->gpus, a, b, &why)) {
                if (hrd_gpus_reach(e->gpus, a, b, &why) && hrd_gpus_reach(e->gpus, b, a, &why))
                    continue;
                snprintf(e->refusal, sizeof(e->refusal), "%s", why);
                return e->refusal;
            }
            snprintf(e->refusal, sizeof(e->refusal), "GPUs %s and %s do not reach each other: %s", g->id,
                     hrd_gpus_dev(e->gpus, b)->id, why);
            return e->refusal;
        }
    }
    return NULL;
}

/* Nothing is under way: the agent has drained its ops. */
static void sm_free(struct hrd_engine *base)
{
    struct sm_engine *e = (struct sm_engine *)base;
    while (e->failures) {
        struct failure *f = e->failures;
        e->failures = f->next;
        free(f);
    }
    free(e);
}

static const struct hrd_engine_table sm_table = {
    .name = "sm",
    .one_node_unit = UNIT_BYTES,
    .refuses = sm_refuses,
    .waited = sm_waited,
    .submit = sm_submit,
    .poll = sm_poll,
    .arm = sm_arm,
    .silent = sm_silent,
    .help = sm_help,
    .free = sm_free,
};

struct hrd_engine *hrd_engine_sm_new(struct hrd_gpus *gpus, struct hrd_engine *host)
{
    struct sm_engine *e = calloc(1, sizeof(*e));
    if (!e)
        return NULL;
    e->base.table = &sm_table;
    e->gpus = gpus;
    e->host = host;
    return &e->base;
}
