/* SPDX-License-Identifier: MIT */
/*
 * One GPU of the dma engine. Copies go through lanes, one for each direction: a lane is a ring of batches that the agent
 * fills and the GPU's submit thread empties into a stream. Behind the copies of a batch comes one event; the thread looks
 * at the oldest one and counts the batches that are over, so the agent makes no driver call.
 *
 * Between two copies the link idles for some 4 us, the time of 200 KB, on one stream or two; not between copies of one call.
 * So a batch is one call where the driver has one for many copies.
 */
#ifndef HRD_DMA_PART_H
#define HRD_DMA_PART_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/gpu/gpu.h"
#include "daemon/gpu/submit.h"

enum dma_lane_kind { DMA_IN, DMA_OUT, DMA_PEER, DMA_LANES };
/* Batches of a lane under way. */
#define DMA_RING 64u

struct dma_copy {
    hrg_ptr device; /* IN, PEER: from here; OUT: to here */
    char *host;     /* IN: to here; OUT: from here */
    hrg_ptr peer;   /* PEER: to here, */
    hrg_ctx peer_ctx;
    uint64_t bytes;
};

/* Copies of one lane that end together. Owner: the agent; from dma_part_post() to dma_part_over() the part's. */
struct dma_batch {
    void *owner;
    hrg_result result; /* the first failure of them; what was started all the same is over, too */
    uint32_t n;
    struct dma_copy copy[];
};

struct dma_slot {
    struct dma_batch *batch;
    hrg_event event; /* made when first needed; NULL: none could be had */
    bool marked;     /* the event stands behind the batch; else the stream itself is asked */
};

struct dma_lane {
    hrg_stream stream;
    _Atomic uint64_t posted; /* batches ever filled; the agent's */
    _Atomic uint64_t over;   /* batches ever ended; the submit thread's */
    uint64_t issued;         /* ever given to the driver; of who looks, see submit.h */
    uint64_t taken;          /* ever taken back; the agent's */
    struct dma_slot slot[DMA_RING];
};

struct dma_part {
    struct hrd_gpu_dev *dev;
    struct hrd_submit submit;
    struct dma_lane lane[DMA_LANES];
    bool batches;                      /* the driver takes many copies in one call */
    _Atomic uint64_t calls_ns, copies; /* in the driver for copies and events, and how many copies */
};

/* All for the agent's thread. */
/* Batches that dma_part_over() has not given back. */
unsigned dma_part_queued(const struct dma_part *p, enum dma_lane_kind kind);
/* At most DMA_RING of a lane at a time. Does not wake the thread: dma_part_ring() does, for all that was posted. */
void dma_part_post(struct dma_part *p, enum dma_lane_kind kind, struct dma_batch *b);
void dma_part_ring(struct dma_part *p);
/* The oldest batch of a lane, when it is over: the caller's again. Else NULL. */
struct dma_batch *dma_part_over(struct dma_part *p, enum dma_lane_kind kind);

#endif
