/* SPDX-License-Identifier: MIT */
#include "daemon/gpu/dma_part.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/clock.h"
#include "daemon/gpu/parts.h"
#include "daemon/log.h"

/* Copies of one call. */
#define CALL_COPIES 32u
#define BATCH_VERSION 12080

/* ---- the submit thread's side --------------------------------------------------------------------------------- */

static hrg_result start_copy(const struct dma_part *p, enum dma_lane_kind kind, hrg_stream stream,
                             const struct dma_copy *c)
{
    const struct hrg_driver *drv = p->dev->drv;
    switch (kind) {
    case DMA_IN:
        return drv->MemcpyDtoHAsync(c->host, c->device, c->bytes, stream);
    case DMA_OUT:
        return drv->MemcpyHtoDAsync(c->device, c->host, c->bytes, stream);
    default:
        return drv->MemcpyPeerAsync(c->peer, c->peer_ctx, c->device, p->dev->ctx, c->bytes, stream);
    }
}

/* At most CALL_COPIES, from and to pinned memory. The hint is for copy engines, which is what all of this is about. */
static hrg_result start_together(const struct dma_part *p, enum dma_lane_kind kind, hrg_stream stream,
                                 const struct dma_copy *c, uint32_t n)
{
    struct hrg_copy_attributes how = {.src_access_order = HRG_SRC_ACCESS_STREAM,
                                      .flags = HRG_COPY_PREFER_OVERLAP_WITH_COMPUTE};
    hrg_ptr src[CALL_COPIES], dst[CALL_COPIES];
    size_t size[CALL_COPIES], first = 0, failed;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t host = (uint64_t)(uintptr_t)c[i].host;
        src[i] = kind == DMA_IN ? c[i].device : host;
        dst[i] = kind == DMA_IN ? host : c[i].device;
        size[i] = c[i].bytes;
    }
    return p->dev->drv->MemcpyBatchAsync(dst, src, size, n, &how, &first, 1, &failed, stream);
}

static hrg_result start_copies(const struct dma_part *p, enum dma_lane_kind kind, hrg_stream stream,
                               const struct dma_batch *b)
{
    hrg_result r = HRG_SUCCESS;
    for (uint32_t i = 0, n; i < b->n && r == HRG_SUCCESS; i += n) {
        n = kind == DMA_PEER || !p->batches ? 1 : b->n - i < CALL_COPIES ? b->n - i : CALL_COPIES;
        r = n == 1 ? start_copy(p, kind, stream, &b->copy[i])
                   : start_together(p, kind, stream, &b->copy[i], n);
    }
    return r;
}

/* Also behind a copy that failed to start: those before it are in flight. */
static void put_mark(const struct dma_part *p, hrg_stream stream, struct dma_slot *s)
{
    const struct hrg_driver *drv = p->dev->drv;
    hrg_result r = HRG_SUCCESS;
    if (!s->event)
        r = drv->EventCreate(&s->event, HRG_EVENT_DISABLE_TIMING);
    if (r != HRG_SUCCESS)
        s->event = NULL;
    s->marked = s->event && drv->EventRecord(s->event, stream) == HRG_SUCCESS;
}

static bool issue_next(struct dma_part *p, enum dma_lane_kind kind)
{
    struct dma_lane *l = &p->lane[kind];
    if (l->issued == atomic_load_explicit(&l->posted, memory_order_seq_cst))
        return false;
    struct dma_slot *s = &l->slot[l->issued % DMA_RING];
    struct dma_batch *b = s->batch;
    uint64_t began = now_ns();
    b->result = start_copies(p, kind, l->stream, b);
    put_mark(p, l->stream, s);
    atomic_fetch_add_explicit(&p->calls_ns, now_ns() - began, memory_order_relaxed);
    atomic_fetch_add_explicit(&p->copies, b->n, memory_order_relaxed);
    l->issued++;
    return true;
}

static bool end_next(struct dma_part *p, enum dma_lane_kind kind)
{
    struct dma_lane *l = &p->lane[kind];
    uint64_t at = atomic_load_explicit(&l->over, memory_order_relaxed);
    if (at == l->issued)
        return false;
    struct dma_slot *s = &l->slot[at % DMA_RING];
    hrg_result r = s->marked ? p->dev->drv->EventQuery(s->event) : p->dev->drv->StreamQuery(l->stream);
    if (r == HRG_ERROR_NOT_READY)
        return false;
    if (s->batch->result == HRG_SUCCESS)
        s->batch->result = r;
    atomic_store_explicit(&l->over, at + 1, memory_order_release);
    return true;
}

/* One batch of each lane in turn: both directions of the link start at once. */
static enum hrd_submit_found look(void *arg)
{
    struct dma_part *p = arg;
    bool did = false, waits = false;
    for (unsigned k = 0; k < DMA_LANES; k++) {
        did = issue_next(p, (enum dma_lane_kind)k) || did;
        while (end_next(p, (enum dma_lane_kind)k))
            did = true;
        waits = waits || atomic_load_explicit(&p->lane[k].over, memory_order_relaxed) != p->lane[k].issued;
    }
    return did ? HRD_SUBMIT_DID : waits ? HRD_SUBMIT_WAITS : HRD_SUBMIT_NOTHING;
}

/* ---- the agent's side ------------------------------------------------------------------------------------------- */

unsigned dma_part_queued(const struct dma_part *p, enum dma_lane_kind kind)
{
    const struct dma_lane *l = &p->lane[kind];
    return (unsigned)(atomic_load_explicit(&l->posted, memory_order_relaxed) - l->taken);
}

void dma_part_post(struct dma_part *p, enum dma_lane_kind kind, struct dma_batch *b)
{
    struct dma_lane *l = &p->lane[kind];
    uint64_t at = atomic_load_explicit(&l->posted, memory_order_relaxed);
    l->slot[at % DMA_RING].batch = b;
    atomic_store_explicit(&l->posted, at + 1, memory_order_seq_cst);
}

void dma_part_ring(struct dma_part *p)
{
    hrd_submit_ring(&p->submit);
}

struct dma_batch *dma_part_over(struct dma_part *p, enum dma_lane_kind kind)
{
    struct dma_lane *l = &p->lane[kind];
    if (l->taken == atomic_load_explicit(&l->over, memory_order_acquire))
        return NULL;
    return l->slot[l->taken++ % DMA_RING].batch;
}

/* ---- up and down ------------------------------------------------------------------------------------------------ */

static void part_down(struct hrd_gpu_dev *g, void *state)
{
    struct dma_part *p = state;
    uint64_t copies = atomic_load_explicit(&p->copies, memory_order_relaxed);
    hrd_submit_stop(&p->submit);
    if (copies)
        hrd_info("GPU %s: %" PRIu64 " copies of the dma engine, %" PRIu64 " ns in the driver for each", g->id,
                 copies, atomic_load_explicit(&p->calls_ns, memory_order_relaxed) / copies);
    for (unsigned k = 0; k < DMA_LANES; k++) {
        struct dma_lane *l = &p->lane[k];
        for (unsigned i = 0; i < DMA_RING; i++)
            if (l->slot[i].event)
                (void)g->drv->EventDestroy(l->slot[i].event);
        if (l->stream)
            (void)g->drv->StreamDestroy(l->stream);
    }
    free(p);
}

static int part_up(struct hrd_gpu_dev *g, void **state, char *why, size_t len)
{
    struct dma_part *p = calloc(1, sizeof(*p));
    hrg_result r = p ? HRG_SUCCESS : HRG_ERROR_OUT_OF_MEMORY;
    int err = 0;
    for (unsigned k = 0; k < DMA_LANES && r == HRG_SUCCESS; k++)
        r = g->drv->StreamCreateWithPriority(&p->lane[k].stream, HRG_STREAM_NON_BLOCKING, 0);
    if (r == HRG_SUCCESS) {
        char name[16];
        p->dev = g;
        p->batches = g->drv->version >= BATCH_VERSION && g->drv->MemcpyBatchAsync != NULL;
        snprintf(name, sizeof(name), "hrd-dma-%d", g->gpu);
        err = hrd_submit_start(&p->submit, g, name, look, p);
    }
    if (r == HRG_SUCCESS && err == 0) {
        *state = p;
        return 0;
    }
    char error[128];
    if (err)
        snprintf(why, len, "a thread for copies cannot be started: %s; raise the process limit",
                 strerror(err));
    else
        snprintf(why, len, "streams for copies cannot be made: %s",
                 hrg_error_text(g->drv, r, error, sizeof(error)));
    if (p)
        part_down(g, p);
    return -1;
}

const struct hrd_gpu_part hrd_gpu_part_dma = {
    .kind = HRD_GPU_DMA, .needed = true, .up = part_up, .down = part_down};
