/* SPDX-License-Identifier: MIT */
/* Pinned host memory of the dma engine, on each NUMA node some: a copy goes to and from the one near its GPU. */
#ifndef HRD_BOUNCE_H
#define HRD_BOUNCE_H

#include <stdint.h>

#include "daemon/arena.h"
#include "daemon/gpu/gpu.h"
#include "daemon/numa.h"

struct dma_bounce {
    const struct hrd_gpus *gpus;
    unsigned nodes;
    struct hrd_arena *arena[HRD_NUMA_MAX];
};

/* Maps `bytes` in all and gives them to gpus to pin. 0, or -1 with errno. */
int dma_bounce_open(struct dma_bounce *b, struct hrd_gpus *gpus, uint64_t bytes);
void dma_bounce_close(struct dma_bounce *b);
/* What one take() can get at most. */
uint64_t dma_bounce_most(const struct dma_bounce *b);
/* Near this GPU; NULL: there is not so much now. */
char *dma_bounce_take(struct dma_bounce *b, int16_t gpu, uint64_t bytes);
void dma_bounce_give(struct dma_bounce *b, char *p, uint64_t bytes);

#endif
