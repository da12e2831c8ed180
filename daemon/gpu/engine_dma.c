/* SPDX-License-Identifier: MIT */
/*
 * Work whose buffers lie on GPUs, without a kernel: copy engines bring the inputs to pinned host memory, the host engine
 * folds them there in one pass, copy engines take the result back. Nothing of it needs an SM, so it is not delayed by what
 * the job computes; a copy within one GPU would be, so that goes through the host too.
 *
 * Work is cut into chunks, each in one of three stages (copies in, processor, copies out), several in flight: both
 * directions of the link and the processor work at once. A chunk starts with all the pinned memory it needs or waits.
 * Large chunks, because each copy has a fixed cost: below half a megabyte the link idles.
 *
 * A direction of a GPU has one stream. Behind a chunk's copies on it comes one event, so what is in flight on a stream is a
 * queue whose head is the only one to ask for.
 */
#include "daemon/gpu/engine_dma.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/arena.h"
#include "daemon/gpu/parts.h"

#define CHUNK_BYTES (UINT64_C(512) << 10)
/* More add nothing to the overlap and take memory from the caches. */
#define CHUNKS_MAX 16u
#define ELEMS \
    64u /* chunks are multiples of this, so that every element of every type is aligned in its slot */
#define LINE 128u

enum lane_kind { LANE_IN, LANE_OUT, LANE_PEER, NLANES };

/* ---- on each GPU ------------------------------------------------------------------------------------------- */

struct idle_event {
    hrg_event event;
};

struct dma_part {
    hrg_stream stream[NLANES];
    struct idle_event *idle; /* events that nobody waits for */
    unsigned nidle, room;
};

static void part_down(struct hrd_gpu_dev *g, void *state)
{
    struct dma_part *p = state;
    for (unsigned i = 0; i < p->nidle; i++)
        (void)g->drv->EventDestroy(p->idle[i].event);
    for (unsigned k = 0; k < NLANES; k++)
        if (p->stream[k])
            (void)g->drv->StreamDestroy(p->stream[k]);
    free(p->idle);
    free(p);
}

static int part_up(struct hrd_gpu_dev *g, void **state, char *why, size_t len)
{
    struct dma_part *p = calloc(1, sizeof(*p));
    hrg_result rc = p ? HRG_SUCCESS : HRG_ERROR_OUT_OF_MEMORY;
    for (unsigned k = 0; k < NLANES && rc == HRG_SUCCESS; k++)
        rc = g->drv->StreamCreateWithPriority(&p->stream[k], HRG_STREAM_NON_BLOCKING, 0);
    if (rc == HRG_SUCCESS) {
        *state = p;
        return 0;
    }
    char error[128];
    snprintf(why, len, "streams for copies cannot be made: %s",
             hrg_error_text(g->drv, rc, error, sizeof(error)));
    if (p)
        part_down(g, p);
    return -1;
}

const struct hrd_gpu_part hrd_gpu_part_dma = {
    .kind = HRD_GPU_DMA, .needed = true, .up = part_up, .down = part_down};

/* ---- the engine -------------------------------------------------------------------------------------------- */

/* What a chunk still has to do for a sink. */
enum sink_state { SINK_SERVED, SINK_HOST, SINK_GPU };

struct chunk {
    struct dma_engine *e;
    struct hrd_work *w;
    uint64_t at, n; /* elements */
    enum { STAGE_IN, STAGE_CPU, STAGE_OUT } stage;
    unsigned pending;                /* marks behind copies of this stage */
    uint64_t off, bytes, slot_bytes; /* in the bounce arena */
    unsigned nslots;
    const char *from; /* where the result lies for the copies out */
    char *out_slot;   /* the result goes here; NULL: nowhere */
    struct hrd_work *inner;
    uint8_t sink[]; /* enum sink_state, [w->ndst] */
};

/* The end of a chunk's copies on a lane. */
struct mark {
    hrg_event event; /* NULL: none could be had, ask the stream itself */
    struct chunk *c;
    struct mark *next;
};

struct lane {
    struct mark *first, *last;
};

struct dma_engine {
    struct hrd_engine base;
    struct hrd_gpus *gpus;
    struct hrd_engine *host;
    struct hrd_arena *bounce;
    struct hrd_work *first, *last;           /* with elements that no chunk took yet */
    struct hrd_work *done_first, *done_last; /* to be reported */
    unsigned chunks;                         /* that exist */
    unsigned marks;                          /* copies in flight */
    struct lane lane[HRD_GPUS_MAX][NLANES];
    uint64_t busy; /* GPUs with a mark on some lane */
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

static char *slot(const struct chunk *c, unsigned i)
{
    return (char *)hrd_arena_at(c->e->bounce, c->off) + i * c->slot_bytes;
}

/* ---- failures ----------------------------------------------------------------------------------------------- */

/* The first failure of a work is the one that is told. */
static void fail(struct chunk *c, int16_t gpu, hrg_result rc, const char *what)
{
    struct hrd_work *w = c->w;
    struct hrd_work_error error;
    error.device_lost =
        hrd_gpu_failed(c->e->gpus, hrd_gpus_dev(c->e->gpus, gpu), rc, what, error.text, sizeof(error.text));
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

/* Nothing happens when all its chunks were taken. */
static void unqueue(struct dma_engine *e, struct hrd_work *w)
{
    struct hrd_work **at = &e->first, *before = NULL;
    while (*at && *at != w) {
        before = *at;
        at = &before->next;
    }
    if (!*at)
        return;
    *at = w->next;
    if (e->last == w)
        e->last = before;
}

static void chunk_end(struct chunk *c)
{
    struct dma_engine *e = c->e;
    struct hrd_work *w = c->w;
    if (c->bytes)
        hrd_arena_release(e->bounce, c->off, c->bytes);
    e->chunks--;
    uint64_t left = atomic_load_explicit(&w->left, memory_order_relaxed) - c->n;
    atomic_store_explicit(&w->left, left, memory_order_relaxed);
    /* What failed takes no more chunks: it ends when the last one in flight does. */
    if (left == 0 || (w->error && left == w->n - w->next_chunk)) {
        unqueue(e, w);
        work_end(e, w);
    }
    free(c);
}

/* ---- copies -------------------------------------------------------------------------------------------------- */

static struct dma_part *part_of(struct hrd_gpu_dev *g)
{
    return g->part[HRD_GPU_DMA];
}

/* Behind the copies that the chunk put on a lane: they are in flight, whether an event can be had or not. */
static void put_mark(struct chunk *c, int16_t gpu, enum lane_kind kind)
{
    struct dma_engine *e = c->e;
    struct hrd_gpu_dev *g = hrd_gpus_dev(e->gpus, gpu);
    struct dma_part *p = part_of(g);
    struct mark *m = need(sizeof(*m));
    m->c = c;
    hrg_result rc = HRG_SUCCESS;
    if (p->nidle)
        m->event = p->idle[--p->nidle].event;
    else
        rc = g->drv->EventCreate(&m->event, HRG_EVENT_DISABLE_TIMING);
    if (rc != HRG_SUCCESS) {
        m->event = NULL;
    } else if (g->drv->EventRecord(m->event, p->stream[kind]) != HRG_SUCCESS) {
        (void)g->drv->EventDestroy(m->event);
        m->event = NULL;
    }
    struct lane *l = &e->lane[gpu][kind];
    if (l->last)
        l->last->next = m;
    else
        l->first = m;
    l->last = m;
    c->pending++;
    e->marks++;
    e->busy |= UINT64_C(1) << gpu;
}

static void give_event(struct dma_part *p, hrg_event event)
{
    if (p->nidle == p->room) {
        unsigned room = p->room ? 2 * p->room : 16;
        struct idle_event *more = realloc(p->idle, room * sizeof(*more));
        if (!more)
            abort(); /* crash-only */
        p->idle = more;
        p->room = room;
    }
    p->idle[p->nidle++].event = event;
}

/* Copies of one stage: launched by the callers below, their lanes marked at the end. */
struct launch {
    struct chunk *c;
    uint64_t touched[NLANES]; /* GPUs */
    bool failed;
};

static hrg_stream stream_on(struct launch *l, int16_t gpu, enum lane_kind kind)
{
    struct hrd_gpu_dev *g = hrd_gpus_dev(l->c->e->gpus, gpu);
    l->touched[kind] |= UINT64_C(1) << gpu;
    g->drv->CtxSetCurrent(g->ctx);
    return part_of(g)->stream[kind];
}

static void check(struct launch *l, int16_t gpu, hrg_result rc, const char *what)
{
    if (rc == HRG_SUCCESS)
        return;
    fail(l->c, gpu, rc, what);
    l->failed = true;
}

static const char COPY_IN[] = "a copy to the host";
static const char COPY_OUT[] = "a copy from the host";
static const char COPY_PEER[] = "a copy to another GPU";
static const char *const copy_name[NLANES] = {COPY_IN, COPY_OUT, COPY_PEER};

static void copy_in(struct launch *l, const struct hrd_span *s, char *to)
{
    struct chunk *c = l->c;
    size_t size = in_size(c->w);
    struct hrd_gpu_dev *g = hrd_gpus_dev(c->e->gpus, s->gpu);
    if (l->failed)
        return;
    check(l, s->gpu,
          g->drv->MemcpyDtoHAsync(to, device_at(s, c->at * size), c->n * size, stream_on(l, s->gpu, LANE_IN)),
          COPY_IN);
}

static void copy_out(struct launch *l, const struct hrd_span *s)
{
    struct chunk *c = l->c;
    size_t size = out_size(c->w);
    struct hrd_gpu_dev *g = hrd_gpus_dev(c->e->gpus, s->gpu);
    if (l->failed)
        return;
    check(l, s->gpu,
          g->drv->MemcpyHtoDAsync(device_at(s, c->at * size), c->from, c->n * size,
                                  stream_on(l, s->gpu, LANE_OUT)),
          COPY_OUT);
}

static void copy_peer(struct launch *l, const struct hrd_span *from, const struct hrd_span *to)
{
    struct chunk *c = l->c;
    size_t size = out_size(c->w);
    struct hrd_gpu_dev *f = hrd_gpus_dev(c->e->gpus, from->gpu), *t = hrd_gpus_dev(c->e->gpus, to->gpu);
    if (l->failed)
        return;
    check(l, from->gpu,
          f->drv->MemcpyPeerAsync(device_at(to, c->at * size), t->ctx, device_at(from, c->at * size), f->ctx,
                                  c->n * size, stream_on(l, from->gpu, LANE_PEER)),
          COPY_PEER);
}

/* Also behind a copy that failed to start: those before it are in flight. */
static void launched(struct launch *l)
{
    for (unsigned k = 0; k < NLANES; k++)
        for (uint64_t left = l->touched[k]; left; left &= left - 1) {
            int16_t gpu = (int16_t)__builtin_ctzll(left);
            struct hrd_gpu_dev *g = hrd_gpus_dev(l->c->e->gpus, gpu);
            g->drv->CtxSetCurrent(g->ctx);
            put_mark(l->c, gpu, (enum lane_kind)k);
        }
}

/* ---- a chunk's stages ---------------------------------------------------------------------------------------- */

static void stage_out(struct chunk *c)
{
    struct launch l = {.c = c};
    c->stage = STAGE_OUT;
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
    c->stage = STAGE_CPU;
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
                w->kind == HRD_WORK_COPY ? here((char *)(uintptr_t)c->from) : here(slot(c, next++));
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
    if (c->w->error || c->stage == STAGE_OUT)
        chunk_end(c);
    else
        stage_cpu(c);
}

static void stage_in(struct chunk *c)
{
    struct hrd_work *w = c->w;
    struct launch l = {.c = c};
    unsigned next = 0;
    c->stage = STAGE_IN;
    if (w->kind == HRD_WORK_FOLD) {
        for (uint32_t i = 0; i < w->nsrc; i++)
            if (w->span[i].gpu >= 0)
                copy_in(&l, &w->span[i], slot(c, next++));
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
        if (any ||
            c->from !=
                slot(c, 0)) /* an arena sink is the source of others and has to be filled in any case */
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

/* Elements of a chunk: equal pieces of CHUNK_BYTES up to twice that, and two chunks fit the pinned memory. */
static uint64_t chunk_elems(const struct dma_engine *e, const struct hrd_work *w)
{
    uint64_t size = in_size(w) > out_size(w) ? in_size(w) : out_size(w);
    uint64_t pieces = w->n * size / CHUNK_BYTES;
    uint64_t n = pieces > 1 ? (w->n + pieces - 1) / pieces : w->n;
    uint64_t most = hrd_arena_size(e->bounce) / 2 / slots_of(w) / size / ELEMS * ELEMS;
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

/* 0: took a chunk of w; -1: no pinned memory now. */
static int take_chunk(struct dma_engine *e, struct hrd_work *w)
{
    struct chunk *c = need(sizeof(*c) + w->ndst);
    uint64_t size = in_size(w) > out_size(w) ? in_size(w) : out_size(w);
    c->e = e;
    c->w = w;
    c->at = w->next_chunk;
    c->n = w->n - c->at < w->chunk ? w->n - c->at : w->chunk;
    place(c);
    c->slot_bytes = (c->n * size + LINE - 1) / LINE * LINE;
    c->bytes = c->nslots * c->slot_bytes;
    if (c->bytes) {
        c->off = hrd_arena_alloc(e->bounce, HRD_DOMAIN_SEND, c->bytes);
        if (c->off == HRD_ARENA_NONE) {
            free(c);
            return -1;
        }
    }
    if (!c->from && c->nslots) {
        bool copied = w->kind == HRD_WORK_COPY && w->span[0].gpu >= 0;
        char *result = in_size(w) == out_size(w) || w->nsrc == 0 ? slot(c, 0) : slot(c, c->nslots - 1);
        bool wanted = false;
        for (uint32_t i = 0; i < w->ndst; i++)
            wanted = wanted || c->sink[i] == SINK_GPU;
        c->from = result;
        c->out_slot = copied || !wanted ? NULL : result;
    }
    w->next_chunk += c->n;
    e->chunks++;
    if (w->next_chunk == w->n) {
        e->first = w->next;
        if (!e->first)
            e->last = NULL;
    }
    stage_in(c);
    return 0;
}

static void start_chunks(struct dma_engine *e)
{
    while (e->first && e->chunks < CHUNKS_MAX) {
        if (!e->first->error) {
            if (take_chunk(e, e->first) != 0)
                return;
            continue;
        }
        e->first = e->first->next; /* it ends with its last chunk in flight */
        if (!e->first)
            e->last = NULL;
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
    if (e->last)
        e->last->next = w;
    else
        e->first = w;
    e->last = w;
}

/* Takes off the marks that the GPU has passed. */
static unsigned look_at_lane(struct dma_engine *e, int16_t gpu, enum lane_kind kind)
{
    struct hrd_gpu_dev *g = hrd_gpus_dev(e->gpus, gpu);
    struct dma_part *p = part_of(g);
    struct lane *l = &e->lane[gpu][kind];
    unsigned n = 0;
    while (l->first) {
        struct mark *m = l->first;
        struct chunk *c = m->c;
        hrg_result rc = m->event ? g->drv->EventQuery(m->event) : g->drv->StreamQuery(p->stream[kind]);
        if (rc == HRG_ERROR_NOT_READY)
            break;
        l->first = m->next;
        if (!l->first)
            l->last = NULL;
        if (m->event)
            give_event(p, m->event);
        free(m);
        e->marks--;
        n++;
        if (rc != HRG_SUCCESS)
            fail(c, gpu, rc, copy_name[kind]);
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
        struct hrd_gpu_dev *d = hrd_gpus_dev(e->gpus, g);
        d->drv->CtxSetCurrent(d->ctx);
        for (unsigned k = 0; k < NLANES; k++)
            n += look_at_lane(e, g, (enum lane_kind)k);
        /* Asked at the end: what ended on one lane may have put the next copies on another. */
        bool any = false;
        for (unsigned k = 0; k < NLANES; k++)
            any = any || e->lane[g][k].first;
        if (!any)
            e->busy &= ~(UINT64_C(1) << g);
    }
    return n;
}

static unsigned dma_poll(struct hrd_engine *base)
{
    struct dma_engine *e = (struct dma_engine *)base;
    unsigned count = e->marks ? look_at_gpus(e) : 0;
    start_chunks(e);
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

static bool dma_silent(struct hrd_engine *base)
{
    return ((struct dma_engine *)base)->marks > 0;
}

static unsigned dma_help(struct hrd_engine *base)
{
    (void)base;
    return 0;
}

static void dma_free(struct hrd_engine *base)
{
    struct dma_engine *e = (struct dma_engine *)base;
    hrd_arena_free(e->bounce);
    free(e);
}

static const struct hrd_engine_table dma_table = {
    .name = "dma",
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
    e->bounce = hrd_arena_new(bounce_bytes);
    if (!e->bounce) {
        int err = errno;
        free(e);
        errno = err;
        return NULL;
    }
    hrd_gpus_pin(gpus, hrd_arena_at(e->bounce, 0), hrd_arena_size(e->bounce));
    return &e->base;
}
