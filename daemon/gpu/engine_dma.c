/* SPDX-License-Identifier: MIT */
/*
 * Work whose buffers lie on GPUs, without a kernel: copy engines bring the inputs to pinned host memory, the host engine
 * folds them there in one pass, copy engines take the result back. Nothing of it needs an SM, so it is not delayed by what
 * the job computes; a copy within one GPU would be, so that goes through the host too.
 *
 * Work is cut into chunks, each in one of three stages (copies in, processor, copies out), several in flight: both
 * directions of the link and the processor work at once. A chunk starts with all the pinned memory it needs or waits, and
 * no more of them start than keep a lane (dma_part.h) busy: what was not started can be left out when nobody wants it any
 * more. The agent's thread does all of this and no driver call: those are the GPUs' submit threads'.
 */
#include "daemon/gpu/engine_dma.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/clock.h"
#include "daemon/gpu/bounce.h"
#include "daemon/gpu/dma_part.h"
#include "daemon/log.h"

/* Each chunk costs some microseconds, and the first and the last have the link for themselves: the best length of a chunk
   grows with the square root of the work's. */
#define CHUNK_MIN (UINT64_C(256) << 10)
#define CHUNK_MAX (UINT64_C(1) << 20)
#define CHUNK_MIN_WORK \
    (UINT64_C(1) << 20) /* is cut into chunks of CHUNK_MIN, 4 times as much into twice that, and so on */
/* More add nothing to the overlap and take memory from the caches. */
#define CHUNKS_MAX 16u
/* Copies on a lane of which one is under way and the others keep it busy until the agent has looked again. */
#define COPIES_AHEAD 6u
/* What one work takes before the next has its turn. */
#define TURN_BYTES (UINT64_C(4) << 20)
/* Bytes that one op of one node is given as at most: far above what starting a work costs. */
#define UNIT_BYTES (UINT64_C(64) << 20)
#define ELEMS \
    64u /* chunks are multiples of this, so that every element of every type is aligned in its slot */
#define LINE 128u

/* ---- the engine -------------------------------------------------------------------------------------------- */

/* What a chunk still has to do for a sink. */
enum sink_state { SINK_SERVED, SINK_HOST, SINK_GPU };

enum stage { STAGE_IN, STAGE_CPU, STAGE_OUT, NSTAGES };

struct chunk {
    struct dma_engine *e;
    struct hrd_work *w;
    uint64_t at, n; /* elements */
    enum stage stage;
    uint64_t stage_ns; /* when it began */
    unsigned pending;  /* batches of this stage that are not over */
    uint64_t slot_bytes;
    unsigned nslots;
    const char *from; /* where the result lies for the copies out */
    char *out_slot;   /* the result goes here; NULL: nowhere */
    struct hrd_work *inner;
    uint8_t *sink; /* enum sink_state, [w->ndst] */
    char *slot
        []; /* pinned memory: of each input on a GPU, in their order; then of a result that has none yet */
};

struct dma_engine {
    struct hrd_engine base;
    struct hrd_gpus *gpus;
    struct hrd_engine *host;
    struct dma_bounce bounce;
    struct hrd_work *first, *last;           /* with elements that no chunk took yet */
    struct hrd_work *done_first, *done_last; /* to be reported */
    unsigned chunks;                         /* that exist */
    bool expecting;                          /* as the host engine knows it */
    uint64_t busy;                           /* GPUs with a batch on some lane */
    uint64_t ring; /* GPUs whose thread was given something since it was last rung */
    /* of all chunks ever: */
    uint64_t ended, ended_bytes, in_stage_ns[NSTAGES];
};

static void *need(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (!p)
        abort(); /* crash-only */
    return p;
}

static size_t in_size(const struct hrd_work *w)
{
    return hrp_dtype_size(w->fold.in);
}

static size_t out_size(const struct hrd_work *w)
{
    return hrp_dtype_size(w->fold.out);
}

static const struct hrd_span *sink(const struct hrd_work *w, uint32_t i)
{
    return &w->span[w->nsrc + i];
}

static hrg_ptr device_at(const struct hrd_span *s, uint64_t byte)
{
    return (hrg_ptr)(uintptr_t)s->base + s->off + byte;
}

/* Where copy engines can go by themselves: pinned, and not a window that wraps around. */
static char *pinned_at(const struct dma_engine *e, const struct hrd_span *s, uint64_t byte, uint64_t bytes)
{
    char *p = s->base + s->off + byte;
    return s->gpu < 0 && !s->wrap && hrd_gpus_pinned(e->gpus, p, bytes) ? p : NULL;
}

/* ---- failures ----------------------------------------------------------------------------------------------- */

/* The first failure of a work is the one that is told. */
static void fail(struct chunk *c, int16_t gpu, hrg_result rc, const char *what)
{
    struct hrd_work *w = c->w;
    struct hrd_work_error error;
    error.device_lost =
        hrd_gpu_failed(hrd_gpus_dev(c->e->gpus, gpu), rc, what, error.text, sizeof(error.text));
    if (w->error)
        return;
    w->error = need(sizeof(*w->error));
    *w->error = error;
}

static void work_end(struct dma_engine *e, struct hrd_work *w)
{
    w->next = NULL;
    if (e->done_last)
        e->done_last->next = w;
    else
        e->done_first = w;
    e->done_last = w;
}

/* ---- the queue of work ---------------------------------------------------------------------------------------- */

static void enqueue(struct dma_engine *e, struct hrd_work *w)
{
    w->next = NULL;
    if (e->last)
        e->last->next = w;
    else
        e->first = w;
    e->last = w;
}

/* *at is a link of the queue. */
static struct hrd_work *dequeue(struct dma_engine *e, struct hrd_work **at)
{
    struct hrd_work *w = *at;
    *at = w->next;
    if (e->last == w)
        e->last = at == &e->first ? NULL
                                  : (struct hrd_work *)(void *)((char *)at - offsetof(struct hrd_work, next));
    return w;
}

/* Nothing happens when all its chunks were taken. */
static void unqueue(struct dma_engine *e, struct hrd_work *w)
{
    struct hrd_work **at = &e->first;
    while (*at && *at != w)
        at = &(*at)->next;
    if (*at)
        dequeue(e, at);
}

/* It takes no more chunks: it ends when the last one in flight does. */
static bool stopped(const struct hrd_work *w)
{
    return w->error || (w->wanted && !w->wanted(w));
}

/* Of what was taken nothing is in flight. */
static bool at_rest(const struct hrd_work *w)
{
    return atomic_load_explicit(&w->left, memory_order_relaxed) == w->n - w->next_chunk;
}

static void enter_stage(struct chunk *c, enum stage stage)
{
    uint64_t now = now_ns();
    c->e->in_stage_ns[c->stage] += now - c->stage_ns;
    c->stage = stage;
    c->stage_ns = now;
}

static void give_slots(struct chunk *c)
{
    while (c->nslots > 0)
        dma_bounce_give(&c->e->bounce, c->slot[--c->nslots], c->slot_bytes);
}

static void chunk_end(struct chunk *c)
{
    struct dma_engine *e = c->e;
    struct hrd_work *w = c->w;
    enter_stage(c, c->stage);
    e->ended++;
    e->ended_bytes += c->n * out_size(w);
    give_slots(c);
    e->chunks--;
    atomic_fetch_sub_explicit(&w->left, c->n, memory_order_relaxed);
    if (at_rest(w) && (w->next_chunk == w->n || stopped(w))) {
        unqueue(e, w);
        work_end(e, w);
    }
    free(c);
}

/* ---- copies -------------------------------------------------------------------------------------------------- */

static struct dma_part *part_on(const struct dma_engine *e, int16_t gpu)
{
    return hrd_gpus_dev(e->gpus, gpu)->part[HRD_GPU_DMA];
}

static const char *const copy_name[DMA_LANES] = {"a copy to the host", "a copy from the host",
                                                 "a copy to another GPU"};

/* The copies of one stage, collected by GPU and direction. */
struct launch {
    struct chunk *c;
    uint64_t touched[DMA_LANES]; /* GPUs; of the others there is nothing in: */
    struct dma_batch *batch[DMA_LANES][HRD_GPUS_MAX];
};

static void launch_init(struct launch *l, struct chunk *c)
{
    l->c = c;
    memset(l->touched, 0, sizeof(l->touched));
}

static struct dma_copy *add_copy(struct launch *l, int16_t gpu, enum dma_lane_kind kind)
{
    const struct hrd_work *w = l->c->w;
    uint64_t bit = UINT64_C(1) << gpu;
    if (!(l->touched[kind] & bit)) {
        uint32_t most = w->nsrc > w->ndst ? w->nsrc : w->ndst;
        struct dma_batch *b = need(sizeof(*b) + most * sizeof(b->copy[0]));
        b->owner = l->c;
        l->batch[kind][gpu] = b;
        l->touched[kind] |= bit;
    }
    struct dma_batch *b = l->batch[kind][gpu];
    return &b->copy[b->n++];
}

static void copy_in(struct launch *l, const struct hrd_span *s, char *to)
{
    const struct chunk *c = l->c;
    size_t size = in_size(c->w);
    *add_copy(l, s->gpu, DMA_IN) =
        (struct dma_copy){.device = device_at(s, c->at * size), .host = to, .bytes = c->n * size};
}

static void copy_out(struct launch *l, const struct hrd_span *s)
{
    const struct chunk *c = l->c;
    size_t size = out_size(c->w);
    *add_copy(l, s->gpu, DMA_OUT) = (struct dma_copy){
        .device = device_at(s, c->at * size), .host = (char *)(uintptr_t)c->from, .bytes = c->n * size};
}

static void copy_peer(struct launch *l, const struct hrd_span *from, const struct hrd_span *to)
{
    const struct chunk *c = l->c;
    size_t size = out_size(c->w);
    *add_copy(l, from->gpu, DMA_PEER) = (struct dma_copy){.device = device_at(from, c->at * size),
                                                          .peer = device_at(to, c->at * size),
                                                          .peer_ctx = hrd_gpus_dev(c->e->gpus, to->gpu)->ctx,
                                                          .bytes = c->n * size};
}

static void launched(struct launch *l)
{
    struct dma_engine *e = l->c->e;
    for (unsigned k = 0; k < DMA_LANES; k++)
        for (uint64_t left = l->touched[k]; left; left &= left - 1) {
            int16_t gpu = (int16_t)__builtin_ctzll(left);
            dma_part_post(part_on(e, gpu), (enum dma_lane_kind)k, l->batch[k][gpu]);
            l->c->pending++;
            e->busy |= UINT64_C(1) << gpu;
            e->ring |= UINT64_C(1) << gpu;
        }
}

static void ring_threads(struct dma_engine *e)
{
    for (; e->ring; e->ring &= e->ring - 1)
        dma_part_ring(part_on(e, (int16_t)__builtin_ctzll(e->ring)));
}

/* ---- a chunk's stages ---------------------------------------------------------------------------------------- */

static void stage_out(struct chunk *c)
{
    struct launch l;
    launch_init(&l, c);
    enter_stage(c, STAGE_OUT);
    for (uint32_t i = 0; i < c->w->ndst; i++)
        if (c->sink[i] == SINK_GPU)
            copy_out(&l, sink(c->w, i));
    launched(&l);
    if (c->pending == 0)
        chunk_end(c);
}

static void inner_done(struct hrd_work *inner, const struct hrd_work_error *error)
{
    struct chunk *c = inner->owner;
    (void)error; /* the host engine has none */
    free(inner);
    c->inner = NULL;
    if (stopped(c->w))
        chunk_end(c);
    else
        stage_out(c);
}

static struct hrd_span here(char *p)
{
    return (struct hrd_span){.base = p, .gpu = HRD_HOST_MEMORY};
}

static struct hrd_span later(const struct hrd_span *s, uint64_t bytes)
{
    struct hrd_span at = *s;
    at.off += bytes;
    return at;
}

/* What the processor does: the same work over the chunk's host memory. */
static void stage_cpu(struct chunk *c)
{
    struct hrd_work *w = c->w;
    uint32_t nsink = c->out_slot != NULL;
    enter_stage(c, STAGE_CPU);
    for (uint32_t i = 0; i < w->ndst; i++)
        nsink += c->sink[i] == SINK_HOST;
    if (nsink == 0) {
        stage_out(c);
        return;
    }
    struct hrd_work *inner = need(sizeof(*inner) + (w->nsrc + nsink) * sizeof(inner->span[0]));
    inner->kind = w->kind;
    inner->fold = w->fold;
    inner->n = c->n;
    inner->owner = c;
    inner->done = inner_done;
    unsigned next = 0;
    for (uint32_t i = 0; i < w->nsrc; i++) {
        const struct hrd_span *s = &w->span[i];
        if (s->gpu < 0)
            inner->span[i] = later(s, c->at * in_size(w));
        else
            inner->span[i] =
                w->kind == HRD_WORK_COPY ? here((char *)(uintptr_t)c->from) : here(c->slot[next++]);
    }
    inner->nsrc = w->nsrc;
    for (uint32_t i = 0; i < w->ndst; i++)
        if (c->sink[i] == SINK_HOST)
            inner->span[inner->nsrc + inner->ndst++] = later(sink(w, i), c->at * out_size(w));
    if (c->out_slot) {
        inner->span[inner->nsrc + inner->ndst++] = here(c->out_slot);
        inner->fold.stream = 0; /* the copy engine reads it at once */
    }
    c->inner = inner;
    c->e->host->table->submit(c->e->host, inner);
}

/* The copies of this stage have ended. */
static void stage_ended(struct chunk *c)
{
    if (c->stage == STAGE_OUT || stopped(c->w))
        chunk_end(c);
    else
        stage_cpu(c);
}

static void stage_in(struct chunk *c)
{
    struct hrd_work *w = c->w;
    struct launch l;
    unsigned next = 0;
    launch_init(&l, c);
    c->stage_ns = now_ns(); /* of STAGE_IN */
    if (w->kind == HRD_WORK_FOLD) {
        for (uint32_t i = 0; i < w->nsrc; i++)
            if (w->span[i].gpu >= 0)
                copy_in(&l, &w->span[i], c->slot[next++]);
    } else if (w->kind == HRD_WORK_COPY && w->span[0].gpu >= 0) {
        bool any = false;
        for (uint32_t i = 0; i < w->ndst; i++) {
            const struct hrd_span *to = sink(w, i);
            if (c->sink[i] == SINK_GPU && to->gpu != w->span[0].gpu &&
                hrd_gpus_pair(c->e->gpus, w->span[0].gpu, to->gpu, NULL)) {
                copy_peer(&l, &w->span[0], to);
                c->sink[i] = SINK_SERVED;
            }
            any = any || c->sink[i] != SINK_SERVED;
        }
        /* A sink of the arena is the source of others and has to be filled in any case. */
        if (any || c->nslots == 0)
            copy_in(&l, &w->span[0], (char *)(uintptr_t)c->from);
    }
    launched(&l);
    if (c->pending == 0)
        stage_ended(c);
}

/* ---- cutting work into chunks -------------------------------------------------------------------------------- */

static bool same_place(const struct hrd_span *a, const struct hrd_span *b)
{
    return a->gpu == b->gpu && a->base + a->off == b->base + b->off && !a->wrap && !b->wrap;
}

static unsigned gpu_sources(const struct hrd_work *w)
{
    unsigned n = 0;
    for (uint32_t i = 0; i < w->nsrc; i++)
        n += w->span[i].gpu >= 0;
    return n;
}

/* Slots of pinned memory that a chunk needs at most: one for each input of a GPU, one for a result. */
static unsigned slots_of(const struct hrd_work *w)
{
    return gpu_sources(w) + 1;
}

static uint64_t chunk_bytes(uint64_t work)
{
    uint64_t bytes = CHUNK_MIN;
    for (uint64_t least = 4 * CHUNK_MIN_WORK; bytes < CHUNK_MAX && work >= least; least *= 8)
        bytes *= 2;
    return bytes;
}

/* Elements of a chunk: equal pieces, and two chunks fit the pinned memory. */
static uint64_t chunk_elems(const struct dma_engine *e, const struct hrd_work *w)
{
    uint64_t size = in_size(w) > out_size(w) ? in_size(w) : out_size(w), bytes = w->n * size;
    uint64_t pieces = bytes < CHUNK_MIN_WORK ? 1 : bytes / chunk_bytes(bytes);
    uint64_t n = pieces > 1 ? (w->n + pieces - 1) / pieces : w->n;
    uint64_t most = dma_bounce_most(&e->bounce) / 2 / slots_of(w);
    most = most > HRD_ARENA_PAGE ? (most - HRD_ARENA_PAGE) / size / ELEMS * ELEMS : 0;
    n = (n + ELEMS - 1) / ELEMS * ELEMS;
    return n < most ? n : most;
}

/* Which sinks the copies and the processor serve, and where the result lies meanwhile. */
static void place(struct chunk *c)
{
    struct dma_engine *e = c->e;
    struct hrd_work *w = c->w;
    uint64_t at = c->at * out_size(w), bytes = c->n * out_size(w);
    bool to_gpu = false;
    char *direct = NULL;
    const struct hrd_span *from = w->kind == HRD_WORK_COPY ? &w->span[0] : NULL;
    for (uint32_t i = 0; i < w->ndst; i++) {
        const struct hrd_span *s = sink(w, i);
        c->sink[i] = s->gpu >= 0 ? SINK_GPU : SINK_HOST;
        if (from && same_place(from, s))
            c->sink[i] = SINK_SERVED;
        to_gpu = to_gpu || c->sink[i] == SINK_GPU;
        if (c->sink[i] != SINK_HOST || direct)
            continue;
        direct = pinned_at(e, s, at, bytes);
        if (direct && from && from->gpu >= 0)
            c->sink[i] = SINK_SERVED; /* the copy engine writes it */
    }
    unsigned sources = gpu_sources(w);
    if (from && from->gpu >= 0) {
        c->nslots = direct ? 0 : 1;
        c->from = direct;
        return;
    }
    if (from && !direct)
        direct = pinned_at(e, from, at, bytes);
    c->nslots = sources;
    c->from = direct;
    if (!to_gpu || direct)
        return;
    /* The fold may write over its first input where the elements have one size. */
    if (sources == 0 || in_size(w) != out_size(w))
        c->nslots++;
}

/* The GPU near which the i-th slot should lie. */
static int16_t slot_gpu(const struct hrd_work *w, unsigned i)
{
    unsigned inputs = gpu_sources(w);
    const struct hrd_span *s = i < inputs ? w->span : w->span + w->nsrc;
    for (unsigned skip = i < inputs ? i : 0;; s++)
        if (s->gpu >= 0 && skip-- == 0)
            return s->gpu;
}

static bool take_slots(struct chunk *c)
{
    const unsigned wanted = c->nslots;
    for (c->nslots = 0; c->nslots < wanted; c->nslots++) {
        c->slot[c->nslots] = dma_bounce_take(&c->e->bounce, slot_gpu(c->w, c->nslots), c->slot_bytes);
        if (!c->slot[c->nslots])
            break;
    }
    if (c->nslots == wanted)
        return true;
    give_slots(c);
    return false;
}

static struct chunk *new_chunk(struct dma_engine *e, struct hrd_work *w)
{
    struct chunk *c = need(sizeof(*c) + slots_of(w) * sizeof(c->slot[0]) + w->ndst);
    uint64_t size = in_size(w) > out_size(w) ? in_size(w) : out_size(w);
    c->e = e;
    c->w = w;
    c->at = w->next_chunk;
    c->n = w->n - c->at < w->chunk ? w->n - c->at : w->chunk;
    c->slot_bytes = (c->n * size + LINE - 1) / LINE * LINE;
    c->sink = (uint8_t *)(c->slot + slots_of(w));
    return c;
}

/* 0: took a chunk of w; -1: no pinned memory now. */
static int take_chunk(struct dma_engine *e, struct hrd_work *w)
{
    struct chunk *c = new_chunk(e, w);
    place(c);
    if (!take_slots(c)) {
        free(c);
        return -1;
    }
    if (!c->from && c->nslots) {
        bool copied = w->kind == HRD_WORK_COPY && w->span[0].gpu >= 0;
        bool wanted = false;
        for (uint32_t i = 0; i < w->ndst; i++)
            wanted = wanted || c->sink[i] == SINK_GPU;
        char *result = c->slot[in_size(w) == out_size(w) || w->nsrc == 0 ? 0 : c->nslots - 1];
        c->from = result;
        c->out_slot = copied || !wanted ? NULL : result;
    }
    w->next_chunk += c->n;
    if (w->next_chunk == w->n)
        unqueue(e, w);
    e->chunks++;
    stage_in(c);
    return 0;
}

/* Whether the lane of each GPU that has one of the spans can take a copy of each without having more than `ahead` of them,
   or half as many batches. */
static bool lane_has_room(const struct dma_engine *e, const struct hrd_span *span, uint32_t n,
                          enum dma_lane_kind kind, unsigned ahead)
{
    unsigned copies[HRD_GPUS_MAX];
    uint64_t gpus = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (span[i].gpu < 0)
            continue;
        uint64_t bit = UINT64_C(1) << span[i].gpu;
        copies[span[i].gpu] = gpus & bit ? copies[span[i].gpu] + 1 : 1;
        gpus |= bit;
    }
    for (; gpus; gpus &= gpus - 1) {
        int16_t gpu = (int16_t)__builtin_ctzll(gpus);
        unsigned queued = dma_part_queued(part_on(e, gpu), kind);
        if (queued >= ahead / 2 && (queued + 1) * copies[gpu] > ahead)
            return false;
    }
    return true;
}

/* More would only wait there, and could not be left out any more. */
static bool has_room(const struct dma_engine *e, const struct hrd_work *w)
{
    return e->chunks < CHUNKS_MAX && lane_has_room(e, w->span, w->nsrc, DMA_IN, COPIES_AHEAD) &&
           lane_has_room(e, w->span + w->nsrc, w->ndst, DMA_OUT, 2 * COPIES_AHEAD);
}

static bool turn_is_over(const struct hrd_work *w, uint64_t before)
{
    uint64_t turn = TURN_BYTES / out_size(w);
    return before / turn != w->next_chunk / turn;
}

static void start_chunks(struct dma_engine *e)
{
    struct hrd_work **at = &e->first;
    while (*at) {
        struct hrd_work *w = *at;
        if (stopped(w)) {
            dequeue(e, at);
            if (at_rest(w))
                work_end(e, w);
            continue;
        }
        if (!has_room(e, w)) {
            at = &w->next;
            continue;
        }
        uint64_t before = w->next_chunk;
        if (take_chunk(e, w) != 0)
            return; /* what comes first gets the memory that comes back first */
        if (*at == w && w->next && turn_is_over(w, before))
            enqueue(e, dequeue(e, at));
    }
}

/* ---- the table ----------------------------------------------------------------------------------------------- */

static const char *dma_refuses(struct hrd_engine *base, const struct hrd_engine_ask *ask)
{
    return hrd_gpus_lost(((struct dma_engine *)base)->gpus, ask->gpus);
}

static uint64_t dma_waited(struct hrd_engine *base, uint64_t gpus)
{
    (void)base;
    (void)gpus;
    return 0;
}

static void dma_submit(struct hrd_engine *base, struct hrd_work *w)
{
    struct dma_engine *e = (struct dma_engine *)base;
    w->next = NULL;
    w->error = NULL;
    w->next_chunk = 0;
    atomic_store_explicit(&w->left, w->n, memory_order_relaxed);
    if (w->n == 0) {
        work_end(e, w);
        return;
    }
    w->chunk = chunk_elems(e, w);
    if (w->chunk == 0) {
        w->error = need(sizeof(*w->error));
        snprintf(w->error->text, sizeof(w->error->text),
                 "dma_memory in hreduced.conf is too small for the buffers of %u local ranks", w->nsrc);
        work_end(e, w);
        return;
    }
    enqueue(e, w);
}

static unsigned look_at_lane(struct dma_engine *e, int16_t gpu, enum dma_lane_kind kind)
{
    struct dma_batch *b;
    unsigned n = 0;
    while ((b = dma_part_over(part_on(e, gpu), kind)) != NULL) {
        struct chunk *c = b->owner;
        if (b->result != HRG_SUCCESS)
            fail(c, gpu, b->result, copy_name[kind]);
        free(b);
        n++;
        if (--c->pending == 0)
            stage_ended(c);
    }
    return n;
}

static unsigned look_at_gpus(struct dma_engine *e)
{
    unsigned n = 0;
    for (uint64_t left = e->busy; left; left &= left - 1) {
        int16_t g = (int16_t)__builtin_ctzll(left);
        for (unsigned k = 0; k < DMA_LANES; k++)
            n += look_at_lane(e, g, (enum dma_lane_kind)k);
        /* Asked at the end: what ended on one lane may have put the next copies on another. */
        bool any = false;
        for (unsigned k = 0; k < DMA_LANES; k++)
            any = any || dma_part_queued(part_on(e, g), (enum dma_lane_kind)k);
        if (!any)
            e->busy &= ~(UINT64_C(1) << g);
    }
    return n;
}

static void tell_host(struct dma_engine *e)
{
    if ((e->chunks > 0) == e->expecting)
        return;
    e->expecting = !e->expecting;
    hrd_engine_host_expect(e->host, e->expecting);
}

static unsigned dma_poll(struct hrd_engine *base)
{
    struct dma_engine *e = (struct dma_engine *)base;
    unsigned count = look_at_gpus(e);
    start_chunks(e);
    ring_threads(e);
    tell_host(e); /* behind the first copies: what it wakes has until they end */
    while (e->done_first) {
        struct hrd_work *w = e->done_first;
        e->done_first = w->next;
        if (!e->done_first)
            e->done_last = NULL;
        struct hrd_work_error *error = w->error;
        w->done(w, error);
        free(error);
        count++;
    }
    return count;
}

static int dma_arm(struct hrd_engine *base, int armed)
{
    struct dma_engine *e = (struct dma_engine *)base;
    (void)armed; /* the processor's part arms itself, copies are looked at */
    return e->done_first || (e->first && e->chunks == 0);
}

/* Also while the processor works: a nap more for each chunk would be a good part of what it takes. */
static bool dma_silent(struct hrd_engine *base)
{
    return ((struct dma_engine *)base)->chunks > 0;
}

static unsigned dma_help(struct hrd_engine *base)
{
    (void)base;
    return 0;
}

static void dma_free(struct hrd_engine *base)
{
    struct dma_engine *e = (struct dma_engine *)base;
    if (e->ended)
        hrd_info("dma engine: %" PRIu64 " chunks of %" PRIu64 " KiB took %" PRIu64 " us in, %" PRIu64
                 " us on the processor and %" PRIu64 " us out",
                 e->ended, e->ended_bytes / e->ended >> 10, e->in_stage_ns[STAGE_IN] / e->ended / 1000,
                 e->in_stage_ns[STAGE_CPU] / e->ended / 1000, e->in_stage_ns[STAGE_OUT] / e->ended / 1000);
    dma_bounce_close(&e->bounce);
    free(e);
}

static const struct hrd_engine_table dma_table = {
    .name = "dma",
    .one_node_unit = UNIT_BYTES,
    .refuses = dma_refuses,
    .waited = dma_waited,
    .submit = dma_submit,
    .poll = dma_poll,
    .arm = dma_arm,
    .silent = dma_silent,
    .help = dma_help,
    .free = dma_free,
};

struct hrd_engine *hrd_engine_dma_new(struct hrd_gpus *gpus, struct hrd_engine *host, uint64_t bounce_bytes)
{
    struct dma_engine *e = calloc(1, sizeof(*e));
    if (!e)
        return NULL;
    e->base.table = &dma_table;
    e->gpus = gpus;
    e->host = host;
    if (dma_bounce_open(&e->bounce, gpus, bounce_bytes) != 0) {
        int err = errno;
        free(e);
        errno = err;
        return NULL;
    }
    return &e->base;
}
