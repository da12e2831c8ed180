/* SPDX-License-Identifier: MIT */
#include "daemon/gpu/sm_part.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/clock.h"
#include "daemon/gpu/engine_sm.h"

#define WORD_STRIDE 64u /* bytes from word to word */
#define COUNTER_STRIDE 128u
#define BLOCKS_PER_SM 2u
#define PAGE 4096u
#define HIGHEST_PRIORITY (-100) /* the driver takes the highest that it has */

/* ---- launching ------------------------------------------------------------------------------------------------ */

static bool launch_lane(struct sm_part *p, struct sm_lane *l)
{
    uint64_t at = atomic_load_explicit(&l->launched, memory_order_relaxed);
    if (at == atomic_load_explicit(&l->posted, memory_order_seq_cst))
        return false;
    struct sm_entry *e = &l->ring[at % SM_RING];
    void *parameter[] = {&e->launch.args};
    e->result = p->dev->drv->LaunchKernel(p->function[e->launch.kernel], e->launch.blocks, 1, 1,
                                          e->launch.threads, 1, 1, 0, l->stream, parameter, NULL);
    e->launched_ns = now_ns();
    atomic_store_explicit(&l->launched, at + 1, memory_order_release);
    return true;
}

static enum hrd_submit_found launch_all(void *arg)
{
    struct sm_part *p = arg;
    bool any = false;
    for (unsigned i = 0; i < SM_LANES; i++)
        while (launch_lane(p, p->lane[i]))
            any = true;
    return any ? HRD_SUBMIT_DID : HRD_SUBMIT_NOTHING;
}

struct sm_entry *sm_part_entry(struct sm_part *p, unsigned lane)
{
    struct sm_lane *l = p->lane[lane];
    uint64_t at = atomic_load_explicit(&l->posted, memory_order_relaxed);
    return at - l->over < SM_RING ? &l->ring[at % SM_RING] : NULL;
}

void sm_part_post(struct sm_part *p, unsigned lane)
{
    struct sm_lane *l = p->lane[lane];
    uint64_t at = atomic_load_explicit(&l->posted, memory_order_relaxed);
    struct sm_entry *e = &l->ring[at % SM_RING];
    *hrg_launch_signal(&e->launch) = (struct hrg_signal){
        .word = l->word_device,
        .value = at + 1,
        .blocks = l->count_device,
        .abort = p->pinned_device + (uint64_t)SM_LANES * WORD_STRIDE,
    };
    if (at == l->over) /* nothing was under way: the clock starts now */
        l->over_ns = e->queued_ns;
    atomic_store_explicit(&l->posted, at + 1, memory_order_seq_cst);
    hrd_submit_ring(&p->submit);
}

struct sm_entry *sm_part_over(struct sm_lane *l)
{
    if (l->over == atomic_load_explicit(&l->launched, memory_order_acquire))
        return NULL;
    struct sm_entry *e = &l->ring[l->over % SM_RING];
    if (e->result == HRG_SUCCESS && atomic_load_explicit(l->word, memory_order_acquire) <= l->over)
        return NULL;
    return e;
}

hrg_result sm_part_ask(struct sm_part *p, struct sm_lane *l)
{
    hrg_result r = p->dev->drv->CtxSetCurrent(p->dev->ctx);
    return r != HRG_SUCCESS ? r : p->dev->drv->StreamQuery(l->stream);
}

uint64_t sm_part_address(struct sm_part *p, const void *host, hrg_result *error)
{
    uintptr_t page = (uintptr_t)host / PAGE;
    unsigned slot = (unsigned)(page % SM_CACHED_PAGES);
    *error = HRG_SUCCESS;
    if (p->cached[slot].page != page) {
        hrg_ptr device = 0;
        *error = p->dev->drv->CtxSetCurrent(p->dev->ctx);
        if (*error == HRG_SUCCESS)
            *error = p->dev->drv->MemHostGetDevicePointer(&device, (void *)(uintptr_t)host, 0);
        if (*error != HRG_SUCCESS)
            return 0;
        p->cached[slot].page = page;
        p->cached[slot].delta = device - (uint64_t)(uintptr_t)host;
    }
    return (uint64_t)(uintptr_t)host + p->cached[slot].delta;
}

uint64_t sm_part_view(struct sm_part *p, const struct hrd_gpus *gpus, const struct hrd_span *s)
{
    uint64_t base = (uint64_t)(uintptr_t)s->base;
    if (s->gpu == p->dev->gpu)
        return base;
    uint64_t epoch = hrd_gpus_views_epoch(gpus);
    if (epoch != p->views_epoch) {
        memset(p->view, 0, sizeof(p->view));
        p->views_epoch = epoch;
    }
    /* Allocations begin at multiples of some power of two, and the high bits tell them apart. */
    unsigned slot = (unsigned)(base * UINT64_C(0x9e3779b97f4a7c15) >> 32) % SM_CACHED_VIEWS;
    if (p->view[slot].base != base) {
        uint64_t view = hrd_gpus_view(gpus, s->gpu, p->dev->gpu, base);
        if (!view)
            return 0;
        p->view[slot].base = base;
        p->view[slot].view = view;
    }
    return p->view[slot].view;
}

/* ---- up and down ---------------------------------------------------------------------------------------------- */

static void take_down(struct hrd_gpu_dev *g, void *state)
{
    struct sm_part *p = state;
    const struct hrg_driver *drv = g->drv;
    hrd_submit_stop(&p->submit);
    for (unsigned i = 0; i < SM_LANES; i++) {
        if (p->lane[i] && p->lane[i]->stream)
            (void)drv->StreamDestroy(p->lane[i]->stream);
        free(p->lane[i]);
    }
    if (p->module)
        (void)drv->ModuleUnload(p->module);
    if (p->counters)
        (void)drv->MemFree(p->counters);
    if (p->pinned)
        (void)drv->MemFreeHost((void *)p->pinned);
    free(p);
}

static hrg_result load_kernels(struct sm_part *p, const void *image)
{
    const struct hrg_driver *drv = p->dev->drv;
    hrg_result r = drv->ModuleLoadData(&p->module, image);
    for (int k = 0; k < HRG_NKERNELS && r == HRG_SUCCESS; k++) {
        int registers;
        r = drv->ModuleGetFunction(&p->function[k], p->module, hrg_kernel_name[k]);
        /* The driver loads a kernel when it is first needed: that is now, not in the middle of an op. */
        if (r == HRG_SUCCESS)
            r = drv->FuncGetAttribute(&registers, HRG_FUNC_NUM_REGS, p->function[k]);
    }
    return r;
}

static hrg_result make_memory(struct sm_part *p)
{
    const struct hrg_driver *drv = p->dev->drv;
    void *pinned = NULL;
    hrg_result r = drv->MemAllocHost(&pinned, PAGE);
    if (r != HRG_SUCCESS)
        return r;
    memset(pinned, 0, PAGE);
    p->pinned = pinned;
    r = drv->MemHostGetDevicePointer(&p->pinned_device, pinned, 0);
    if (r == HRG_SUCCESS)
        r = drv->MemAlloc(&p->counters, SM_LANES * COUNTER_STRIDE);
    return r;
}

static hrg_result make_lane(struct sm_part *p, unsigned i, int priority)
{
    const struct hrg_driver *drv = p->dev->drv;
    struct sm_lane *l = p->lane[i] = calloc(1, sizeof(*l));
    if (!l)
        return HRG_ERROR_OUT_OF_MEMORY;
    l->word = (_Atomic uint64_t *)((char *)p->pinned + (size_t)i * WORD_STRIDE);
    l->word_device = p->pinned_device + (uint64_t)i * WORD_STRIDE;
    l->count_device = p->counters + (uint64_t)i * COUNTER_STRIDE;
    hrg_result r = drv->StreamCreateWithPriority(&l->stream, HRG_STREAM_NON_BLOCKING, priority);
    if (r == HRG_SUCCESS)
        r = drv->MemsetD8Async(l->count_device, 0, COUNTER_STRIDE, l->stream);
    return r != HRG_SUCCESS ? r : drv->StreamSynchronize(l->stream);
}

static int bring_up(struct hrd_gpu_dev *g, void **state, char *why, size_t len)
{
    const char *none;
    char name[16];
    const void *image = hrg_kernels_image(&none);
    char text[160];
    int sms = 0, err = 0;
    if (!image) {
        snprintf(why, len, "%s", none);
        return -1;
    }
    struct sm_part *p = calloc(1, sizeof(*p));
    if (!p) {
        snprintf(why, len, "out of memory");
        return -1;
    }
    p->dev = g;
    const char *doing = "loading the kernels";
    hrg_result r = load_kernels(p, image);
    if (r == HRG_SUCCESS) {
        doing = "asking for its multiprocessors";
        r = g->drv->DeviceGetAttribute(&sms, HRG_DEV_MULTIPROCESSOR_COUNT, g->dev);
    }
    p->max_blocks = BLOCKS_PER_SM * (sms > 0 ? (uint32_t)sms : 1);
    if (r == HRG_SUCCESS) {
        doing = "allocating its words";
        r = make_memory(p);
    }
    for (unsigned i = 0; i < SM_LANES && r == HRG_SUCCESS; i++) {
        doing = "making a stream";
        r = make_lane(p, i, i == SM_SMALL ? HIGHEST_PRIORITY : 0);
    }
    snprintf(name, sizeof(name), "hrd-sm-%d", g->gpu);
    if (r != HRG_SUCCESS)
        snprintf(why, len, "%s failed: %s", doing, hrg_error_text(g->drv, r, text, sizeof(text)));
    else if ((err = hrd_submit_start(&p->submit, g, name, launch_all, p)) != 0)
        snprintf(why, len, "its submit thread could not be started: %s; raise the process limit",
                 strerror(err));
    else {
        *state = p;
        return 0;
    }
    take_down(g, p);
    return -1;
}

const struct hrd_gpu_part hrd_engine_sm_part = {
    .kind = HRD_GPU_SM,
    .needed = false,
    .up = bring_up,
    .down = take_down,
};
