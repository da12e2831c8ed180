/* SPDX-License-Identifier: MIT */
#include "daemon/gpu/bounce.h"

#include <errno.h>
#include <stddef.h>

int dma_bounce_open(struct dma_bounce *b, struct hrd_gpus *gpus, uint64_t bytes)
{
    *b = (struct dma_bounce){.gpus = gpus};
    const unsigned nodes = hrd_gpus_numa_nodes(gpus);
    const uint64_t each = bytes / (nodes ? nodes : 1);
    for (; b->nodes < nodes; b->nodes++) {
        struct hrd_arena *a = hrd_arena_new(each);
        if (!a) {
            int err = errno;
            dma_bounce_close(b);
            errno = err;
            return -1;
        }
        b->arena[b->nodes] = a;
        if (nodes > 1)
            hrd_numa_prefer(hrd_arena_at(a, 0), hrd_arena_size(a), b->nodes);
    }
    /* When nothing can fail any more: what is given to be pinned cannot be taken back. */
    for (unsigned i = 0; i < nodes; i++)
        hrd_gpus_pin(gpus, hrd_arena_at(b->arena[i], 0), hrd_arena_size(b->arena[i]));
    return 0;
}

void dma_bounce_close(struct dma_bounce *b)
{
    for (unsigned i = 0; i < b->nodes; i++)
        hrd_arena_free(b->arena[i]);
    b->nodes = 0;
}

uint64_t dma_bounce_most(const struct dma_bounce *b)
{
    return hrd_arena_size(b->arena[0]); /* they are alike */
}

char *dma_bounce_take(struct dma_bounce *b, int16_t gpu, uint64_t bytes)
{
    struct hrd_arena *a = b->arena[hrd_gpus_dev(b->gpus, gpu)->numa];
    uint64_t off = hrd_arena_alloc(a, HRD_DOMAIN_SEND, bytes);
    return off == HRD_ARENA_NONE ? NULL : hrd_arena_at(a, off);
}

void dma_bounce_give(struct dma_bounce *b, char *p, uint64_t bytes)
{
    for (unsigned i = 0; i < b->nodes; i++) {
        const char *base = hrd_arena_at(b->arena[i], 0);
        if (p >= base && (uint64_t)(p - base) < hrd_arena_size(b->arena[i])) {
            hrd_arena_release(b->arena[i], (uint64_t)(p - base), bytes);
            return;
        }
    }
}
