/* SPDX-License-Identifier: MIT */
#include "tests/lib/gpu_job.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define WAIT_NS UINT64_C(30000000000)

void gj_die(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}

void gj_check(hrg_result r, const char *what)
{
    const struct hrg_driver *drv = hrg_driver_if_present();
    char text[160];
    if (r != HRG_SUCCESS)
        gj_die("%s failed: %s", what, drv ? hrg_error_text(drv, r, text, sizeof(text)) : "no driver");
}

bool gj_option(struct gj_options *o, int c, const char *value)
{
    if (c == GJ_CSV)
        o->csv = value;
    else if (c == GJ_KEEP_LOGS)
        o->keep_logs = value;
    else if (c == GJ_KEY && o->nkeys < GJ_MAX_KEYS)
        o->key[o->nkeys++] = value;
    else
        return false;
    return true;
}

const struct hrg_driver *gj_driver(int *ndevices)
{
    char why[512];
    const struct hrg_driver *drv = hrg_driver_get(why, sizeof(why));
    *ndevices = 0;
    if (drv &&
        (drv->Init(0) != HRG_SUCCESS || drv->DeviceGetCount(ndevices) != HRG_SUCCESS || *ndevices == 0)) {
        snprintf(why, sizeof(why), "%s sees no GPU", drv->library);
        drv = NULL;
    }
    if (!drv) {
        fprintf(stderr, "skipped: %s\n", why);
        exit(GJ_SKIP);
    }
    return drv;
}

uint64_t gj_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

void gj_use(const struct gj_gpu *g)
{
    gj_check(g->drv->CtxSetCurrent(g->ctx), "making a context current");
}

void gj_open(struct gj_gpu *g, const struct hrg_driver *drv, int ordinal)
{
    int sms = 0;
    *g = (struct gj_gpu){.drv = drv, .ordinal = ordinal};
    gj_check(drv->DeviceGet(&g->dev, ordinal), "finding the GPU");
    gj_check(drv->DevicePrimaryCtxRetain(&g->ctx, g->dev), "making a context");
    gj_use(g);
    gj_check(drv->StreamCreateWithPriority(&g->stream, HRG_STREAM_NON_BLOCKING, 0), "making a stream");
    gj_check(drv->DeviceGetAttribute(&sms, HRG_DEV_MULTIPROCESSOR_COUNT, g->dev),
             "asking for multiprocessors");
    g->multiprocessors = (uint32_t)sms;
    g->word = gj_pinned(g, 64, &g->word_device);
    g->counter_device = gj_alloc(g, 64);
    gj_check(drv->MemsetD8Async(g->counter_device, 0, 64, g->stream), "clearing the counter");
    gj_check(drv->StreamSynchronize(g->stream), "clearing the counter");
}

int gj_peers(struct gj_gpu *a, struct gj_gpu *b)
{
    int there = 0, back = 0;
    if (a->ordinal == b->ordinal)
        return 1;
    gj_check(a->drv->DeviceCanAccessPeer(&there, a->dev, b->dev), "asking for peer access");
    gj_check(a->drv->DeviceCanAccessPeer(&back, b->dev, a->dev), "asking for peer access");
    if (!there || !back)
        return 0;
    gj_use(a);
    hrg_result r = a->drv->CtxEnablePeerAccess(b->ctx, 0);
    gj_check(r == HRG_ERROR_PEER_ACCESS_ALREADY_ENABLED ? HRG_SUCCESS : r, "enabling peer access");
    gj_use(b);
    r = a->drv->CtxEnablePeerAccess(a->ctx, 0);
    gj_check(r == HRG_ERROR_PEER_ACCESS_ALREADY_ENABLED ? HRG_SUCCESS : r, "enabling peer access");
    return 1;
}

void gj_load_kernels(struct gj_gpu *g)
{
    const char *why;
    const void *image = hrg_kernels_image(&why);
    if (!image)
        gj_die("%s", why);
    gj_use(g);
    gj_check(g->drv->ModuleLoadData(&g->module, image), "loading the kernels");
    for (int k = 0; k < HRG_NKERNELS; k++)
        gj_check(g->drv->ModuleGetFunction(&g->function[k], g->module, hrg_kernel_name[k]),
                 hrg_kernel_name[k]);
}

void gj_launch(struct gj_gpu *g, struct hrg_launch *l)
{
    void *parameter[] = {&l->args};
    *hrg_launch_signal(l) =
        (struct hrg_signal){.word = g->word_device, .value = ++g->launches, .blocks = g->counter_device};
    gj_check(g->drv->LaunchKernel(g->function[l->kernel], l->blocks, 1, 1, l->threads, 1, 1, 0, g->stream,
                                  parameter, NULL),
             "launching a kernel");
}

void gj_wait(struct gj_gpu *g)
{
    uint64_t end = gj_now_ns() + WAIT_NS;
    while (atomic_load_explicit(g->word, memory_order_acquire) < g->launches) {
        if (gj_now_ns() < end)
            continue;
        gj_check(g->drv->StreamQuery(g->stream), "a kernel");
        gj_die("a kernel did not end within 30 s");
    }
}

uint64_t gj_alloc(struct gj_gpu *g, uint64_t bytes)
{
    hrg_ptr p = 0;
    gj_use(g);
    gj_check(g->drv->MemAlloc(&p, bytes), "allocating GPU memory");
    return p;
}

uint64_t gj_alloc_vmm(struct gj_gpu *g, uint64_t bytes)
{
    const struct hrg_mem_prop prop = {.type = HRG_ALLOCATION_PINNED,
                                      .requested_handle_types = HRG_HANDLE_POSIX_FD,
                                      .location = {.type = HRG_LOCATION_DEVICE, .id = g->dev}};
    const struct hrg_mem_access access = {.location = prop.location, .flags = HRG_ACCESS_READWRITE};
    size_t grain = 0;
    hrg_handle handle;
    hrg_ptr p = 0;
    gj_use(g);
    gj_check(g->drv->MemGetAllocationGranularity(&grain, &prop, HRG_GRANULARITY_MINIMUM),
             "asking for the granularity of memory");
    bytes = (bytes + grain - 1) / grain * grain;
    gj_check(g->drv->MemAddressReserve(&p, bytes, 0, 0, 0), "reserving addresses");
    gj_check(g->drv->MemCreate(&handle, bytes, &prop, 0), "making GPU memory that can be exported");
    gj_check(g->drv->MemMap(p, bytes, 0, handle, 0), "mapping GPU memory");
    gj_check(g->drv->MemRelease(handle), "letting go of a handle");
    gj_check(g->drv->MemSetAccess(p, bytes, &access, 1), "giving access to GPU memory");
    return p;
}

void *gj_pinned(struct gj_gpu *g, uint64_t bytes, uint64_t *device)
{
    void *p = NULL;
    gj_use(g);
    gj_check(g->drv->MemHostAlloc(&p, bytes, HRG_HOST_PORTABLE | HRG_HOST_DEVICEMAP),
             "allocating pinned memory");
    memset(p, 0, bytes);
    if (device)
        gj_check(g->drv->MemHostGetDevicePointer(device, p, 0), "mapping pinned memory");
    return p;
}

void gj_upload(struct gj_gpu *g, uint64_t device, const void *pinned, uint64_t bytes)
{
    gj_check(g->drv->MemcpyHtoDAsync(device, pinned, bytes, g->stream), "copying to the GPU");
    gj_check(g->drv->StreamSynchronize(g->stream), "copying to the GPU");
}

void gj_download(struct gj_gpu *g, void *pinned, uint64_t device, uint64_t bytes)
{
    gj_check(g->drv->MemcpyDtoHAsync(pinned, device, bytes, g->stream), "copying from the GPU");
    gj_check(g->drv->StreamSynchronize(g->stream), "copying from the GPU");
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double gj_median(double *v, unsigned n)
{
    if (n == 0)
        return 0;
    qsort(v, n, sizeof(*v), by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}
