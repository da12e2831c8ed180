/* SPDX-License-Identifier: MIT */
/*
 * Host memory that all GPUs reach: registered once, portable, in the context of the GPU that came up first. A registration
 * ends with its context, so that GPU stays up for as long as another one is.
 */
#include <inttypes.h>
#include <stdio.h>

#include "daemon/gpu/gpu_int.h"

void hrd_gpus_pin(struct hrd_gpus *gpus, void *base, uint64_t bytes)
{
    if (gpus->nranges < HRD_GPU_PINS && bytes > 0)
        gpus->range[gpus->nranges++] = (struct pinned_range){.base = base, .bytes = bytes};
}

bool hrd_gpus_pinned(const struct hrd_gpus *gpus, const void *p, uint64_t bytes)
{
    const char *at = p;
    if (!atomic_load_explicit(&gpus->pinned, memory_order_acquire))
        return false;
    for (unsigned i = 0; i < gpus->nranges; i++) {
        const struct pinned_range *r = &gpus->range[i];
        if (at >= r->base && (uint64_t)(at - r->base) <= r->bytes &&
            bytes <= r->bytes - (uint64_t)(at - r->base))
            return true;
    }
    return false;
}

static void unregister(struct gpu *g)
{
    struct hrd_gpus *gpus = g->gpus;
    atomic_store_explicit(&gpus->pinned, false, memory_order_release);
    for (unsigned i = 0; i < gpus->nranges; i++) {
        if (gpus->range[i].registered)
            (void)g->dev.drv->MemHostUnregister(gpus->range[i].base); /* a dead context lets go by itself */
        gpus->range[i].registered = false;
    }
}

static int register_all(struct gpu *g, char *why, size_t len)
{
    struct hrd_gpus *gpus = g->gpus;
    for (unsigned i = 0; i < gpus->nranges; i++) {
        struct pinned_range *r = &gpus->range[i];
        hrg_result rc = g->dev.drv->MemHostRegister(r->base, r->bytes, HRG_HOST_PORTABLE);
        if (rc == HRG_SUCCESS) {
            r->registered = true;
            continue;
        }
        char error[128], name[HRD_GPU_NAME];
        snprintf(why, len,
                 "%s: %" PRIu64 " MiB of the daemon's memory cannot be registered with CUDA: %s; raise "
                 "LimitMEMLOCK= of hreduced.service or lower arena_size and dma_memory in hreduced.conf",
                 hrd_gpu_name(&g->dev, name, sizeof(name)), r->bytes >> 20,
                 hrg_error_text(g->dev.drv, rc, error, sizeof(error)));
        unregister(g);
        return -1;
    }
    atomic_store_explicit(&gpus->pinned, true, memory_order_release);
    return 0;
}

int hrd_gpu_pins_take(struct gpu *g, char *why, size_t len)
{
    struct hrd_gpus *gpus = g->gpus;
    int rc = 0;
    pthread_mutex_lock(&gpus->pin_lock);
    if (gpus->pin_users == 0) {
        rc = register_all(g, why, len);
        gpus->pin_owner = rc == 0 ? g : NULL;
    }
    if (rc == 0)
        gpus->pin_users++;
    pthread_mutex_unlock(&gpus->pin_lock);
    return rc;
}

bool hrd_gpu_pins_drop(struct gpu *g, bool force)
{
    struct hrd_gpus *gpus = g->gpus;
    bool may = true;
    pthread_mutex_lock(&gpus->pin_lock);
    if (gpus->pin_owner == g && gpus->pin_users > 1 && !force) {
        may = false;
    } else {
        gpus->pin_users--;
        if (gpus->pin_owner == g) {
            unregister(g);
            gpus->pin_owner = NULL;
        }
    }
    pthread_mutex_unlock(&gpus->pin_lock);
    return may;
}
