/* SPDX-License-Identifier: MIT */
/*
 * Mapping what a client exported. A handle is the client's word: size and device are asked of the driver before anybody
 * copies by them.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/gpu/gpu_int.h"

static void close_descriptors(struct hrd_gpu_source *source)
{
    for (uint32_t i = 0; source->fd && i < source->msg.nparts; i++)
        if (source->fd[i] >= 0)
            close(source->fd[i]);
    free(source->fd);
    source->fd = NULL;
}

void hrd_gpu_source_drop(struct hrd_gpu_source *source)
{
    close_descriptors(source);
    free(source->part_bytes);
    source->part_bytes = NULL;
}

static int refuse(struct gpu *g, hrg_result rc, const char *call, const char *remedy, char *why, size_t len)
{
    char error[128], name[HRD_GPU_NAME];
    if (hrg_error_is_sticky(rc)) {
        hrd_gpu_failed(&g->dev, rc, call, why, len);
        return -1;
    }
    snprintf(why, len, "%s: %s says %s%s%s", hrd_gpu_name(&g->dev, name, sizeof(name)), call,
             hrg_error_text(g->dev.drv, rc, error, sizeof(error)), remedy ? "; " : "", remedy ? remedy : "");
    return -1;
}

#define CONTAINER                                                                                 \
    "a job in a container shares memory by CUDA IPC only in the daemon's IPC and PID namespaces " \
    "(--ipc=host "                                                                                \
    "--pid=host)"

static int map_legacy(struct gpu *g, const struct hrp_msg_import_gpu *msg, hrg_ptr *ptr, char *why,
                      size_t len)
{
    const struct hrg_driver *drv = g->dev.drv;
    struct hrg_ipc_handle handle;
    hrg_ptr base = 0;
    size_t size = 0;
    int ordinal = -1;
    char name[HRD_GPU_NAME];
    memcpy(&handle, msg->handle, sizeof(handle));
    hrg_result rc = drv->IpcOpenMemHandle(ptr, handle, HRG_IPC_LAZY_ENABLE_PEER_ACCESS);
    if (rc != HRG_SUCCESS)
        return refuse(g, rc, "cuIpcOpenMemHandle", CONTAINER, why, len);
    rc = drv->MemGetAddressRange(&base, &size, *ptr);
    if (rc != HRG_SUCCESS) { /* of memory of another process some drivers say it only so */
        rc = drv->PointerGetAttribute(&base, HRG_PTR_RANGE_START_ADDR, *ptr);
        if (rc == HRG_SUCCESS)
            rc = drv->PointerGetAttribute(&size, HRG_PTR_RANGE_SIZE, *ptr);
    }
    if (rc == HRG_SUCCESS)
        rc = drv->PointerGetAttribute(&ordinal, HRG_PTR_DEVICE_ORDINAL, *ptr);
    if (rc == HRG_SUCCESS && ordinal == g->dev.dev && size - (size_t)(*ptr - base) >= msg->bytes)
        return 0;
    (void)drv->IpcCloseMemHandle(*ptr);
    if (rc != HRG_SUCCESS)
        return refuse(g, rc, "asking for an imported allocation", NULL, why, len);
    snprintf(why, len,
             "%s: the allocation behind the handle has %zu bytes on device %d, not %" PRIu64
             " on device %d as the client says",
             hrd_gpu_name(&g->dev, name, sizeof(name)), size - (size_t)(*ptr - base), ordinal, msg->bytes,
             g->dev.dev);
    return -1;
}

/* One handle into its place; the mapping keeps the memory, so nothing else is kept of the handle. */
static int map_part(struct gpu *g, int fd, hrg_ptr at, uint64_t bytes, char *why, size_t len)
{
    const struct hrg_driver *drv = g->dev.drv;
    struct hrg_mem_prop prop = {0};
    hrg_handle handle;
    hrg_result rc =
        drv->MemImportFromShareableHandle(&handle, (void *)(uintptr_t)(unsigned)fd, HRG_HANDLE_POSIX_FD);
    if (rc != HRG_SUCCESS)
        return refuse(g, rc, "cuMemImportFromShareableHandle", NULL, why, len);
    rc = drv->MemGetAllocationPropertiesFromHandle(&prop, handle);
    bool here =
        rc == HRG_SUCCESS && prop.location.type == HRG_LOCATION_DEVICE && prop.location.id == g->dev.dev;
    const char *call = "cuMemMap of an imported handle";
    if (here)
        rc = drv->MemMap(at, bytes, 0, handle, 0);
    else
        call = "the properties of an imported handle";
    (void)drv->MemRelease(handle);
    if (rc != HRG_SUCCESS)
        return refuse(g, rc, call, NULL, why, len);
    if (here)
        return 0;
    char name[HRD_GPU_NAME];
    snprintf(why, len, "%s: an imported handle is memory of device %d, not of device %d as the client says",
             hrd_gpu_name(&g->dev, name, sizeof(name)), prop.location.id, g->dev.dev);
    return -1;
}

/* Each apart: a call must not end within a mapping, and of several at once the driver says nothing. */
static void unmap_parts(struct gpu *g, const struct hrd_gpu_source *source, hrg_ptr ptr, uint32_t nparts)
{
    for (uint32_t i = 0; i < nparts; i++) {
        (void)g->dev.drv->MemUnmap(ptr, source->part_bytes[i]);
        ptr += source->part_bytes[i];
    }
}

/*
 * Peer access between contexts covers what cuMemAlloc gives; a mapping of cuMemMap is reached by the devices that are named
 * here. Kernels of every GPU that could be of use are to reach it, the ones that come up later too, so all that can are
 * named. Where the driver takes only the owner, that is enough for the copy engines: *alone says why then.
 */
static hrg_result allow_access(struct gpu *g, hrg_ptr ptr, uint64_t bytes, const char **alone)
{
    const struct hrg_driver *drv = g->dev.drv;
    struct hrg_mem_access access[HRD_GPUS_MAX] = {
        {.location = {.type = HRG_LOCATION_DEVICE, .id = g->dev.dev}, .flags = HRG_ACCESS_READWRITE}};
    size_t count = 1;
    int ndevices = 0;
    (void)drv->DeviceGetCount(&ndevices);
    for (int i = 0; i < ndevices && count < HRD_GPUS_MAX; i++) {
        hrg_device dev;
        int there = 0, back = 0;
        if (drv->DeviceGet(&dev, i) != HRG_SUCCESS || dev == g->dev.dev ||
            drv->DeviceCanAccessPeer(&there, dev, g->dev.dev) != HRG_SUCCESS ||
            drv->DeviceCanAccessPeer(&back, g->dev.dev, dev) != HRG_SUCCESS || !there || !back)
            continue;
        access[count] = access[0];
        access[count++].location.id = dev;
    }
    hrg_result rc = drv->MemSetAccess(ptr, bytes, access, count);
    if (rc == HRG_SUCCESS || count == 1)
        return rc;
    char error[128], why[200];
    snprintf(why, sizeof(why), "cuMemSetAccess says %s", hrg_error_text(drv, rc, error, sizeof(error)));
    *alone = hrd_gpus_keep(g->gpus, why);
    return drv->MemSetAccess(ptr, bytes, access, 1);
}

static int map_vmm(struct gpu *g, struct hrd_gpu_import *import, char *why, size_t len)
{
    struct hrd_gpu_source *source = &import->source;
    hrg_ptr *ptr = &import->ptr;
    const struct hrg_driver *drv = g->dev.drv;
    const struct hrp_msg_import_gpu *msg = &source->msg;
    uint64_t at = 0;
    hrg_result rc = drv->MemAddressReserve(ptr, msg->bytes, 0, 0, 0);
    if (rc != HRG_SUCCESS)
        return refuse(g, rc, "cuMemAddressReserve", NULL, why, len);
    uint32_t i = 0;
    for (; i < msg->nparts; i++) {
        if (map_part(g, source->fd[i], *ptr + at, source->part_bytes[i], why, len) != 0)
            break;
        at += source->part_bytes[i];
    }
    if (i == msg->nparts) {
        rc = allow_access(g, *ptr, msg->bytes, &import->alone);
        if (rc == HRG_SUCCESS)
            return 0;
        refuse(g, rc, "cuMemSetAccess", NULL, why, len);
    }
    unmap_parts(g, source, *ptr, i);
    (void)drv->MemAddressFree(*ptr, msg->bytes);
    return -1;
}

int hrd_gpu_map(struct gpu *g, struct hrd_gpu_import *i, char *why, size_t len)
{
    int rc = i->source.msg.kind == HRP_GPU_LEGACY ? map_legacy(g, &i->source.msg, &i->ptr, why, len)
                                                  : map_vmm(g, i, why, len);
    close_descriptors(&i->source);
    return rc;
}

/* What the owner's context said of the allocation holds here: the first opening keeps it from being another. */
int hrd_gpu_map_again(struct gpu *at, const struct hrd_gpu_import *i, hrg_ptr *ptr, char *why, size_t len)
{
    const struct hrg_driver *drv = at->dev.drv;
    struct hrg_ipc_handle handle;
    char error[128], sentence[512];
    memcpy(&handle, i->source.msg.handle, sizeof(handle));
    hrg_result rc = drv->IpcOpenMemHandle(ptr, handle, HRG_IPC_LAZY_ENABLE_PEER_ACCESS);
    if (rc == HRG_SUCCESS)
        return 0;
    if (hrg_error_is_sticky(rc))
        hrd_gpu_failed(&at->dev, rc, "cuIpcOpenMemHandle", sentence, sizeof(sentence));
    snprintf(why, len, "cuIpcOpenMemHandle says %s", hrg_error_text(drv, rc, error, sizeof(error)));
    return -1;
}

void hrd_gpu_unmap(struct gpu *g, const struct hrd_gpu_source *source, hrg_ptr ptr)
{
    const struct hrg_driver *drv = g->dev.drv;
    /* A refusal here means that the context is gone, and the mapping with it. */
    if (source->msg.kind == HRP_GPU_LEGACY) {
        (void)drv->IpcCloseMemHandle(ptr);
        return;
    }
    unmap_parts(g, source, ptr, source->msg.nparts);
    (void)drv->MemAddressFree(ptr, source->msg.bytes);
}
