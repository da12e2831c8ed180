/* SPDX-License-Identifier: MIT */
/* GPU memory in tests: the same areas as in host memory, copied there and back by the stream that an op is on. */
#include <dlfcn.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

#define GUARD 4096u

static const struct hrg_driver *drv;

void ht_gpu_fake(const char *name)
{
    char path[PATH_MAX];
    /* The fake stands in build/tests, this program in a directory of that. */
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 64);
    HT_CHECK(n > 0, "where is this program?");
    path[n] = '\0';
    for (int i = 0; i < 2; i++)
        *strrchr(path, '/') = '\0';
    size_t at = strlen(path);
    snprintf(path + at, sizeof(path) - at, "/%s", name);
    HT_CHECK(access(path, R_OK) == 0, "%s is not built", path);
    setenv("HREDUCE_CUDA_LIBRARY", path, 1);
    setenv("HREDUCE_GPU_KERNELS", path, 1); /* any file is an image to it */
}

const struct hrg_driver *ht_gpu_open(struct hpf_rank *me)
{
    char why[512] = "";
    int n = 0;
    hrg_device dev;
    hrg_ctx ctx;
    drv = hrg_driver_get(why, sizeof(why));
    if (drv == NULL) {
        hpf_rank_fail(me, "%s", why);
        return NULL;
    }
    int r = drv->Init(0);
    r = r ? r : drv->DeviceGetCount(&n);
    r = r ? r : drv->DeviceGet(&dev, n > 0 ? (int)me->local % n : 0);
    r = r ? r : drv->DevicePrimaryCtxRetain(&ctx, dev);
    r = r ? r : drv->CtxSetCurrent(ctx);
    if (r == 0)
        return drv;
    hpf_rank_fail(me, "no CUDA context: error %d", r);
    return NULL;
}

int ht_gpu_map(struct hpf_rank *me, uint64_t at, size_t bytes, int types)
{
    hrg_handle handle;
    hrg_device dev;
    HT_CUDA(me, drv->CtxGetDevice(&dev));
    const struct hrg_mem_prop prop = {.type = HRG_ALLOCATION_PINNED,
                                      .requested_handle_types = types,
                                      .location = {.type = HRG_LOCATION_DEVICE, .id = dev}};
    const struct hrg_mem_access access = {.location = prop.location, .flags = HRG_ACCESS_READWRITE};
    HT_CUDA(me, drv->MemCreate(&handle, bytes, &prop, 0));
    HT_CUDA(me, drv->MemMap(at, bytes, 0, handle, 0));
    HT_CUDA(me, drv->MemRelease(handle));
    HT_CUDA(me, drv->MemSetAccess(at, bytes, &access, 1));
    return 0;
}

unsigned ht_gpu_calls(const char *name)
{
    void *lib = dlopen(getenv("HREDUCE_CUDA_LIBRARY"), RTLD_LAZY | RTLD_NOLOAD);
    void *sym = lib ? dlsym(lib, "fake_cuda_calls") : NULL;
    unsigned (*count)(const char *);
    memcpy(&count, &sym, sizeof(count));
    unsigned n = sym ? count(name) : UINT_MAX;
    if (lib)
        dlclose(lib);
    return n;
}

int ht_gate_new(struct ht_env *e, struct ht_gate *g)
{
    void *p;
    HT_CUDA(e->me, drv->MemAllocHost(&p, 64));
    g->word = p;
    atomic_store(g->word, 0);
    HT_CUDA(e->me, drv->MemHostGetDevicePointer(&g->device, p, 0));
    return 0;
}

int ht_gate_hold(struct ht_env *e, const struct ht_gate *g, void *stream)
{
    HT_CUDA(e->me, drv->StreamWaitValue64(stream, g->device, 1, HRG_WAIT_GEQ));
    return 0;
}

static size_t area_bytes(const struct ht_flight *f, unsigned i)
{
    return f->area[i] ? f->bytes[i] + 2 * (size_t)GUARD : 0;
}

void *ht_gpu_address(const struct ht_flight *f, const void *p)
{
    const unsigned char *at = p;
    for (unsigned i = 0; i < 2; i++)
        if (f->area[i] && at >= f->area[i] && at <= f->area[i] + area_bytes(f, i))
            return (void *)(uintptr_t)(f->device[i] + f->coll.send_shift % 64 + (size_t)(at - f->area[i]));
    return NULL;
}

/* CUDA waits for all streams when it frees, also for one that a test holds back: so that comes later. */
#define KEPT 128u
static struct {
    uint64_t device;
    void *bounce;
} kept[KEPT];
static unsigned nkept;

static int free_kept(struct ht_env *e)
{
    for (; nkept > 0; nkept--) {
        HT_CUDA(e->me, drv->MemFreeHost(kept[nkept - 1].bounce));
        HT_CUDA(e->me, drv->MemFree(kept[nkept - 1].device));
    }
    return 0;
}

int ht_gpu_upload(struct ht_env *e, struct ht_flight *f)
{
    for (unsigned i = 0; i < 2; i++) {
        size_t bytes = area_bytes(f, i);
        if (bytes == 0)
            continue;
        HT_CUDA(e->me, drv->MemAlloc(&f->device[i], bytes + 64));
        HT_CUDA(e->me, drv->MemAllocHost(&f->bounce[i], bytes));
        memcpy(f->bounce[i], f->area[i], bytes);
        HT_CUDA(e->me, drv->MemcpyHtoDAsync((hrg_ptr)(uintptr_t)ht_gpu_address(f, f->area[i]), f->bounce[i],
                                            bytes, f->coll.stream));
        /* What is verified must come from there. */
        memset(f->area[i], 0xee, bytes);
    }
    return 0;
}

int ht_gpu_download(struct ht_env *e, struct ht_flight *f)
{
    for (unsigned i = 0; i < 2; i++) {
        size_t bytes = area_bytes(f, i);
        if (bytes == 0)
            continue;
        HT_CUDA(e->me, drv->MemcpyDtoHAsync(f->bounce[i], (hrg_ptr)(uintptr_t)ht_gpu_address(f, f->area[i]),
                                            bytes, f->coll.stream));
        HT_CUDA(e->me, drv->StreamSynchronize(f->coll.stream));
        memcpy(f->area[i], f->bounce[i], bytes);
        if (nkept == KEPT && free_kept(e) != 0)
            return 1;
        kept[nkept].device = f->device[i];
        kept[nkept++].bounce = f->bounce[i];
    }
    return 0;
}
