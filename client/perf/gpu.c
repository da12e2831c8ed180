/* SPDX-License-Identifier: MIT */
#include "client/perf/gpu.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/gpu_driver.h"

struct hpf_gpu {
    const struct hrg_driver *drv;
    hrg_device dev;
    hrg_ctx ctx;
    hrg_stream stream;
    char name[96];
};

static int failed(struct hpf_world *w, const char *what, hrg_result r)
{
    char text[160];
    return hpf_world_fail(w, "%s: %s", what, hrg_error_text(w->gpu->drv, r, text, sizeof(text)));
}

int hpf_gpu_open(struct hpf_world *w)
{
    char why[512] = "";
    int n = 0;
    struct hpf_gpu *g = calloc(1, sizeof(*g));
    if (!g)
        return hpf_world_fail(w, "out of memory");
    w->gpu = g;
    g->drv = hrg_driver_get(why, sizeof(why));
    if (!g->drv)
        return hpf_world_fail(w, "--gpu: %s", why);
    hrg_result r = g->drv->Init(0);
    if (r == HRG_SUCCESS)
        r = g->drv->DeviceGetCount(&n);
    if (r == HRG_SUCCESS && n == 0)
        r = HRG_ERROR_NO_DEVICE;
    /* Emulated nodes of this machine share out its GPUs by rank; real ones have a rank a GPU. */
    int ordinal = w->local ? (int)w->rank : w->info.local_rank >= 0 ? w->info.local_rank : (int)w->rank;
    if (r == HRG_SUCCESS)
        r = g->drv->DeviceGet(&g->dev, ordinal % n);
    if (r == HRG_SUCCESS)
        r = g->drv->DeviceGetName(g->name, sizeof(g->name), g->dev);
    if (r == HRG_SUCCESS)
        r = g->drv->DevicePrimaryCtxRetain(&g->ctx, g->dev);
    if (r == HRG_SUCCESS)
        r = g->drv->CtxSetCurrent(g->ctx);
    if (r == HRG_SUCCESS)
        r = g->drv->StreamCreateWithPriority(&g->stream, HRG_STREAM_NON_BLOCKING, 0);
    return r == HRG_SUCCESS ? 0 : failed(w, "--gpu: no GPU can be used", r);
}

int hpf_gpu_region_new(struct hpf_world *w, struct hpf_region *region, size_t bytes)
{
    const struct hrg_driver *drv = w->gpu->drv;
    size_t total = bytes + 2 * HPF_GUARD;
    void *p = NULL;
    hrg_ptr d = 0;
    hrg_result r = drv->MemAllocHost(&p, total);
    if (r == HRG_SUCCESS)
        r = drv->MemAlloc(&d, total);
    if (r != HRG_SUCCESS && p)
        drv->MemFreeHost(p);
    if (r != HRG_SUCCESS)
        return failed(w, "no memory for buffers on the GPU", r);
    memset(p, 0, total);
    *region = (struct hpf_region){.base = p, .bytes = bytes, .device = d};
    return hpf_gpu_upload(w, region, total);
}

void hpf_gpu_region_free(struct hpf_world *w, struct hpf_region *region)
{
    w->gpu->drv->MemFreeHost(region->base);
    w->gpu->drv->MemFree(region->device);
}

int hpf_gpu_upload(struct hpf_world *w, const struct hpf_region *region, size_t bytes)
{
    const struct hpf_gpu *g = w->gpu;
    hrg_result r = g->drv->MemcpyHtoDAsync(region->device, region->base, bytes, g->stream);
    if (r == HRG_SUCCESS)
        r = g->drv->StreamSynchronize(g->stream);
    return r == HRG_SUCCESS ? 0 : failed(w, "copying to the GPU", r);
}

int hpf_gpu_download(struct hpf_world *w, const struct hpf_region *region, size_t bytes)
{
    const struct hpf_gpu *g = w->gpu;
    hrg_result r = g->drv->MemcpyDtoHAsync(region->base, region->device, bytes, g->stream);
    if (r == HRG_SUCCESS)
        r = g->drv->StreamSynchronize(g->stream);
    return r == HRG_SUCCESS ? 0 : failed(w, "copying from the GPU", r);
}

void *hpf_gpu_stream(const struct hpf_world *w)
{
    return w->gpu ? w->gpu->stream : NULL;
}

const char *hpf_gpu_name(const struct hpf_world *w)
{
    return w->gpu ? w->gpu->name : "";
}

void hpf_gpu_close(struct hpf_world *w)
{
    struct hpf_gpu *g = w->gpu;
    if (!g)
        return;
    if (g->stream)
        g->drv->StreamDestroy(g->stream);
    if (g->ctx)
        g->drv->DevicePrimaryCtxRelease(g->dev);
    free(g);
    w->gpu = NULL;
}
