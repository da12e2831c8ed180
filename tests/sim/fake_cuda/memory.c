/* SPDX-License-Identifier: MIT */
/* Allocations, their attributes, IPC, registered host memory. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/sim/fake_cuda/fake.h"

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
static struct fake_alloc *allocs;
static unsigned long long last_id;

/* ---- the table ----------------------------------------------------------------------------------------------------- */

static bool is_host(const struct fake_alloc *a)
{
    return a->kind == FAKE_HOST || a->kind == FAKE_REGISTERED;
}

uint64_t fake_base(const struct fake_alloc *a)
{
    uint64_t host = (uint64_t)(uintptr_t)a->host;
    return a->kind == FAKE_MANAGED ? host : host | FAKE_TAG;
}

struct fake_alloc *fake_find(uint64_t addr, size_t bytes)
{
    for (struct fake_alloc *a = allocs; a != NULL; a = a->next) {
        uint64_t base = (uint64_t)(uintptr_t)a->host;
        uint64_t at = is_host(a) || a->kind == FAKE_MANAGED ? addr & ~FAKE_TAG : addr;
        if (!is_host(a) && a->kind != FAKE_MANAGED)
            base |= FAKE_TAG;
        if (at >= base && at - base < a->bytes && bytes <= a->bytes - (at - base))
            return a;
    }
    return NULL;
}

struct fake_alloc *fake_alloc_new(enum fake_kind kind, char *host, size_t bytes, int fd, int index)
{
    struct fake_alloc *a = fake_zalloc(sizeof(*a));
    *a = (struct fake_alloc){.next = allocs,
                             .kind = kind,
                             .host = host,
                             .bytes = bytes,
                             .map_bytes = bytes,
                             .fd = fd,
                             .index = index,
                             .id = ++last_id,
                             .refs = 1,
                             .accessible = true};
    struct stat st;
    if (fd >= 0 && fstat(fd, &st) == 0)
        a->inode = st.st_ino;
    allocs = a;
    return a;
}

struct fake_alloc *fake_alloc_take(uint64_t base, bool (*match)(const struct fake_alloc *a))
{
    for (struct fake_alloc **p = &allocs; *p != NULL; p = &(*p)->next) {
        struct fake_alloc *a = *p;
        if (((uint64_t)(uintptr_t)a->host | FAKE_TAG) != (base | FAKE_TAG) || !match(a))
            continue;
        *p = a->next;
        return a;
    }
    return NULL;
}

char *fake_device_range(uint64_t addr, size_t bytes, int *index)
{
    char *p = NULL;
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_find(addr, bytes);
    bool vmm = a != NULL && a->kind == FAKE_VMM;
    if (a != NULL && a->accessible) {
        p = (char *)(uintptr_t)(addr & ~FAKE_TAG);
        *index = is_host(a) ? -1 : a->index;
    }
    /* A range may span neighbouring mappings of one reservation. */
    for (size_t have = 0; vmm || (a == NULL && have == 0);) {
        a = fake_find(addr + have, 1);
        if (a == NULL || a->kind != FAKE_VMM || !a->accessible) {
            p = NULL;
            break;
        }
        p = (char *)(uintptr_t)(addr & ~FAKE_TAG);
        *index = a->index;
        have += fake_base(a) + a->bytes - (addr + have);
        if (have >= bytes)
            break;
        vmm = true;
    }
    pthread_mutex_unlock(&fake_lock);
    return p;
}

bool fake_host_range(const void *p, size_t bytes)
{
    uint64_t addr = (uint64_t)(uintptr_t)p;
    if (addr & FAKE_TAG)
        return false;
    if (!fake.strict)
        return true;
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_find(addr, bytes);
    bool ok = a != NULL && (is_host(a) || a->kind == FAKE_MANAGED);
    pthread_mutex_unlock(&fake_lock);
    if (!ok)
        fprintf(stderr, "fake CUDA: a copy of %zu bytes from or to host memory at %p that is not pinned\n",
                bytes, p);
    return ok;
}

int fake_memfd(const char *name, size_t bytes)
{
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        fake_die("memfd of %zu bytes: %s", bytes, strerror(errno));
    return fd;
}

static char *map(int fd, size_t bytes)
{
    char *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        fake_die("mmap of %zu bytes: %s", bytes, strerror(errno));
    return p;
}

static void alloc_free(struct fake_alloc *a)
{
    if (a->kind != FAKE_REGISTERED)
        munmap(a->host, a->map_bytes);
    if (a->fd >= 0)
        close(a->fd);
    free(a);
}

/* ---- device memory ------------------------------------------------------------------------------------------------- */

static hrg_result allocate(hrg_ptr *ptr, size_t bytes, enum fake_kind kind)
{
    struct hrg_ctx_st *ctx = fake_current();
    if (ctx == NULL)
        return HRG_ERROR_INVALID_CONTEXT;
    if (ptr == NULL || bytes == 0)
        return HRG_ERROR_INVALID_VALUE;
    size_t map_bytes = (bytes + 4095) / 4096 * 4096;
    pthread_mutex_lock(&fake_lock);
    bool fits = ctx->used + map_bytes <= fake.memory;
    if (fits)
        ctx->used += map_bytes;
    pthread_mutex_unlock(&fake_lock);
    if (!fits)
        return HRG_ERROR_OUT_OF_MEMORY;
    int fd = fake_memfd("fake-cuda-mem", map_bytes);
    char *p = map(fd, map_bytes);
    /* What was never written is no zero. */
    memset(p, 0x5a, bytes);
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_alloc_new(kind, p, bytes, fd, ctx->index);
    a->map_bytes = map_bytes;
    *ptr = fake_base(a);
    pthread_mutex_unlock(&fake_lock);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuMemAlloc_v2(hrg_ptr *ptr, size_t bytes)
{
    FAKE_ENTER("MemAlloc", FAKE_UNSAFE);
    return allocate(ptr, bytes, FAKE_LEGACY);
}

FAKE_API hrg_result cuMemAllocManaged(hrg_ptr *ptr, size_t bytes, unsigned flags)
{
    FAKE_ENTER("MemAllocManaged", FAKE_UNSAFE);
    return flags == HRG_ATTACH_GLOBAL ? allocate(ptr, bytes, FAKE_MANAGED) : HRG_ERROR_INVALID_VALUE;
}

FAKE_API hrg_result cuMemAllocAsync(hrg_ptr *ptr, size_t bytes, hrg_stream stream)
{
    FAKE_ENTER("MemAllocAsync", 0);
    hrg_result r;
    if (fake_stream(stream, &r) == NULL)
        return r;
    return allocate(ptr, bytes, FAKE_POOL);
}

static bool is_own(const struct fake_alloc *a)
{
    return a->kind == FAKE_LEGACY || a->kind == FAKE_MANAGED || a->kind == FAKE_POOL;
}

/* The driver waits for the device's work before it frees; so does this. */
static hrg_result release(hrg_ptr ptr)
{
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_alloc_take(ptr, is_own);
    if (a != NULL)
        fake.ctx[a->index].used -= a->map_bytes;
    pthread_mutex_unlock(&fake_lock);
    if (a == NULL)
        return HRG_ERROR_INVALID_VALUE;
    alloc_free(a);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuMemFree_v2(hrg_ptr ptr)
{
    FAKE_ENTER("MemFree", FAKE_UNSAFE);
    if (ptr == 0)
        return HRG_SUCCESS;
    if (fake_current() != NULL)
        cuCtxSynchronize();
    return release(ptr);
}

FAKE_API hrg_result cuMemFreeAsync(hrg_ptr ptr, hrg_stream stream)
{
    FAKE_ENTER("MemFreeAsync", 0);
    hrg_result r;
    struct hrg_stream_st *s = fake_stream(stream, &r);
    if (s == NULL)
        return r;
    fake_wait_finished(s, atomic_load(&s->posted));
    return release(ptr);
}

FAKE_API hrg_result cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    FAKE_ENTER("MemGetInfo", 0);
    struct hrg_ctx_st *ctx = fake_current();
    if (ctx == NULL)
        return HRG_ERROR_INVALID_CONTEXT;
    *total = fake.memory;
    pthread_mutex_lock(&fake_lock);
    *free_bytes = fake.memory - ctx->used;
    pthread_mutex_unlock(&fake_lock);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuMemGetAddressRange_v2(hrg_ptr *base, size_t *bytes, hrg_ptr ptr)
{
    FAKE_ENTER("MemGetAddressRange", 0);
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_find(ptr, 1);
    if (a != NULL && base != NULL)
        *base = fake_base(a);
    if (a != NULL && bytes != NULL)
        *bytes = a->bytes;
    pthread_mutex_unlock(&fake_lock);
    return a != NULL ? HRG_SUCCESS : HRG_ERROR_NOT_FOUND;
}

/* ---- host memory --------------------------------------------------------------------------------------------------- */

FAKE_API hrg_result cuMemHostAlloc(void **p, size_t bytes, unsigned flags)
{
    FAKE_ENTER("MemHostAlloc", FAKE_UNSAFE);
    (void)flags;
    if (fake_current() == NULL)
        return HRG_ERROR_INVALID_CONTEXT;
    if (bytes == 0)
        return HRG_ERROR_INVALID_VALUE;
    *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*p == MAP_FAILED)
        return HRG_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&fake_lock);
    fake_alloc_new(FAKE_HOST, *p, bytes, -1, fake_current()->index);
    pthread_mutex_unlock(&fake_lock);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuMemAllocHost_v2(void **p, size_t bytes)
{
    return cuMemHostAlloc(p, bytes, 0);
}

static bool is_pinned(const struct fake_alloc *a)
{
    return a->kind == FAKE_HOST;
}

FAKE_API hrg_result cuMemFreeHost(void *p)
{
    FAKE_ENTER("MemFreeHost", FAKE_UNSAFE);
    if (fake_current() != NULL)
        cuCtxSynchronize();
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_alloc_take((uint64_t)(uintptr_t)p, is_pinned);
    pthread_mutex_unlock(&fake_lock);
    if (a == NULL)
        return HRG_ERROR_INVALID_VALUE;
    alloc_free(a);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags)
{
    FAKE_ENTER("MemHostRegister", FAKE_UNSAFE);
    struct hrg_ctx_st *ctx = fake_current();
    if (ctx == NULL)
        return HRG_ERROR_INVALID_CONTEXT;
    if (p == NULL || bytes == 0 || (flags & ~15u))
        return HRG_ERROR_INVALID_VALUE;
    uint64_t from = (uint64_t)(uintptr_t)p;
    bool taken = false;
    pthread_mutex_lock(&fake_lock);
    for (struct fake_alloc *a = allocs; a != NULL && !taken; a = a->next) {
        uint64_t base = (uint64_t)(uintptr_t)a->host;
        taken = is_host(a) && from < base + a->bytes && base < from + bytes;
    }
    if (!taken)
        fake_alloc_new(FAKE_REGISTERED, p, bytes, -1, ctx->index);
    pthread_mutex_unlock(&fake_lock);
    return taken ? HRG_ERROR_HOST_MEMORY_ALREADY_REGISTERED : HRG_SUCCESS;
}

static bool is_registered(const struct fake_alloc *a)
{
    return a->kind == FAKE_REGISTERED;
}

FAKE_API hrg_result cuMemHostUnregister(void *p)
{
    FAKE_ENTER("MemHostUnregister", FAKE_UNSAFE);
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_alloc_take((uint64_t)(uintptr_t)p, is_registered);
    pthread_mutex_unlock(&fake_lock);
    if (a == NULL)
        return HRG_ERROR_HOST_MEMORY_NOT_REGISTERED;
    free(a);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuMemHostGetDevicePointer_v2(hrg_ptr *ptr, void *p, unsigned flags)
{
    FAKE_ENTER("MemHostGetDevicePointer", 0);
    (void)flags;
    uint64_t addr = (uint64_t)(uintptr_t)p;
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_find(addr, 1);
    bool ok = a != NULL && is_host(a);
    pthread_mutex_unlock(&fake_lock);
    *ptr = addr | FAKE_TAG;
    return ok ? HRG_SUCCESS : HRG_ERROR_INVALID_VALUE;
}

/* ---- attributes ---------------------------------------------------------------------------------------------------- */

static hrg_result answer(void *data, int attribute, const struct fake_alloc *a, hrg_ptr ptr)
{
    bool host = is_host(a);
    switch (attribute) {
    case HRG_PTR_CONTEXT:
        *(hrg_ctx *)data = &fake.ctx[a->index];
        return HRG_SUCCESS;
    case HRG_PTR_MEMORY_TYPE:
        *(unsigned *)data = host ? HRG_MEMORY_HOST : HRG_MEMORY_DEVICE;
        return HRG_SUCCESS;
    case HRG_PTR_DEVICE_POINTER:
        *(hrg_ptr *)data = host ? ptr | FAKE_TAG : ptr;
        return HRG_SUCCESS;
    case HRG_PTR_HOST_POINTER:
        *(void **)data = (void *)(uintptr_t)(ptr & ~FAKE_TAG);
        return host || a->kind == FAKE_MANAGED ? HRG_SUCCESS : HRG_ERROR_INVALID_VALUE;
    case HRG_PTR_BUFFER_ID:
        *(unsigned long long *)data = a->id;
        return HRG_SUCCESS;
    case HRG_PTR_IS_MANAGED:
        *(unsigned *)data = a->kind == FAKE_MANAGED;
        return HRG_SUCCESS;
    case HRG_PTR_DEVICE_ORDINAL:
        *(int *)data = fake.ctx[a->index].ordinal;
        return HRG_SUCCESS;
    case HRG_PTR_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned *)data = a->kind == FAKE_LEGACY;
        return HRG_SUCCESS;
    case HRG_PTR_RANGE_START_ADDR:
        *(hrg_ptr *)data = fake_base(a);
        return HRG_SUCCESS;
    case HRG_PTR_RANGE_SIZE:
        *(size_t *)data = a->bytes;
        return HRG_SUCCESS;
    case HRG_PTR_MAPPED:
        *(unsigned *)data = 1;
        return HRG_SUCCESS;
    case HRG_PTR_ALLOWED_HANDLE_TYPES:
        *(uint64_t *)data = a->vmm != NULL ? (uint64_t)a->vmm->types : 0;
        return HRG_SUCCESS;
    case HRG_PTR_IS_GPU_DIRECT_RDMA_CAPABLE:
        *(unsigned *)data = !host && a->kind != FAKE_MANAGED;
        return HRG_SUCCESS;
    case HRG_PTR_MEMPOOL_HANDLE:
        *(void **)data = a->kind == FAKE_POOL ? (void *)1 : NULL;
        return HRG_SUCCESS;
    case HRG_PTR_SYNC_MEMOPS:
        *(unsigned *)data = 0;
        return HRG_SUCCESS;
    default:
        return HRG_ERROR_INVALID_VALUE;
    }
}

FAKE_API hrg_result cuPointerGetAttribute(void *data, int attribute, hrg_ptr ptr)
{
    FAKE_ENTER("PointerGetAttribute", 0);
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_find(ptr, 1);
    hrg_result r = a != NULL ? answer(data, attribute, a, ptr) : HRG_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&fake_lock);
    return r;
}

/* Unlike the call for one attribute this succeeds for memory CUDA does not know, with zeros. */
FAKE_API hrg_result cuPointerGetAttributes(unsigned n, int *attributes, void **data, hrg_ptr ptr)
{
    FAKE_ENTER("PointerGetAttributes", 0);
    static const size_t size[] = {
        [HRG_PTR_CONTEXT] = 8,
        [HRG_PTR_MEMORY_TYPE] = 4,
        [HRG_PTR_DEVICE_POINTER] = 8,
        [HRG_PTR_HOST_POINTER] = 8,
        [HRG_PTR_SYNC_MEMOPS] = 4,
        [HRG_PTR_BUFFER_ID] = 8,
        [HRG_PTR_IS_MANAGED] = 4,
        [HRG_PTR_DEVICE_ORDINAL] = 4,
        [HRG_PTR_IS_LEGACY_CUDA_IPC_CAPABLE] = 4,
        [HRG_PTR_RANGE_START_ADDR] = 8,
        [HRG_PTR_RANGE_SIZE] = 8,
        [HRG_PTR_MAPPED] = 4,
        [HRG_PTR_ALLOWED_HANDLE_TYPES] = 8,
        [HRG_PTR_IS_GPU_DIRECT_RDMA_CAPABLE] = 4,
        [HRG_PTR_MEMPOOL_HANDLE] = 8,
    };
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_find(ptr, 1);
    hrg_result r = HRG_SUCCESS;
    for (unsigned i = 0; i < n && r == HRG_SUCCESS; i++) {
        if (attributes[i] < 0 || attributes[i] > HRG_PTR_MEMPOOL_HANDLE || size[attributes[i]] == 0)
            r = HRG_ERROR_INVALID_VALUE;
        else if (a == NULL || answer(data[i], attributes[i], a, ptr) != HRG_SUCCESS)
            memset(data[i], 0, size[attributes[i]]);
        if (r == HRG_SUCCESS && a == NULL && attributes[i] == HRG_PTR_DEVICE_ORDINAL)
            *(int *)data[i] = -2;
    }
    pthread_mutex_unlock(&fake_lock);
    return r;
}

/* ---- IPC ----------------------------------------------------------------------------------------------------------- */

struct ipc {
    char magic[8];
    uint64_t bytes, map_bytes, inode;
    int32_t pid, fd, index;
};
_Static_assert(sizeof(struct ipc) <= sizeof(struct hrg_ipc_handle), "fits");

FAKE_API hrg_result cuIpcGetMemHandle(struct hrg_ipc_handle *handle, hrg_ptr ptr)
{
    FAKE_ENTER("IpcGetMemHandle", 0);
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_find(ptr, 1);
    struct ipc ipc = {.magic = "fakeipc"};
    bool ok = a != NULL && a->kind == FAKE_LEGACY;
    if (ok) {
        ipc.bytes = a->bytes;
        ipc.map_bytes = a->map_bytes;
        ipc.inode = a->inode;
        ipc.pid = (int32_t)getpid();
        ipc.fd = a->fd;
        ipc.index = a->index;
    }
    pthread_mutex_unlock(&fake_lock);
    memset(handle, 0, sizeof(*handle));
    memcpy(handle, &ipc, sizeof(ipc));
    return ok ? HRG_SUCCESS : HRG_ERROR_INVALID_VALUE;
}

static struct fake_alloc *imported(ino_t inode, int opened)
{
    for (struct fake_alloc *a = allocs; a != NULL; a = a->next)
        if (a->kind == FAKE_IMPORTED && a->inode == inode && a->opened == opened)
            return a;
    return NULL;
}

FAKE_API hrg_result cuIpcOpenMemHandle_v2(hrg_ptr *ptr, struct hrg_ipc_handle handle, unsigned flags)
{
    FAKE_ENTER("IpcOpenMemHandle", FAKE_UNSAFE);
    struct hrg_ctx_st *ctx = fake_current();
    struct ipc ipc;
    memcpy(&ipc, &handle, sizeof(ipc));
    if (ctx == NULL)
        return HRG_ERROR_INVALID_CONTEXT;
    if (flags != HRG_IPC_LAZY_ENABLE_PEER_ACCESS || memcmp(ipc.magic, "fakeipc", 8) != 0)
        return HRG_ERROR_INVALID_VALUE;
    if (ipc.pid == getpid())
        return HRG_ERROR_INVALID_CONTEXT;
    if (ipc.index != ctx->index && !fake_peers(ipc.index, ctx->index))
        return HRG_ERROR_PEER_ACCESS_UNSUPPORTED;
    bool visible = false;
    for (int o = 0; o < fake.nvisible; o++)
        visible = visible || fake.visible[o] == ipc.index;
    if (!visible)
        return HRG_ERROR_INVALID_DEVICE;
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", ipc.pid, ipc.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0 || (uint64_t)st.st_ino != ipc.inode ||
        (uint64_t)st.st_size < ipc.map_bytes) {
        if (fd >= 0)
            close(fd);
        return HRG_ERROR_INVALID_VALUE; /* freed, or its owner is gone */
    }
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = imported(st.st_ino, ctx->index);
    if (a != NULL) {
        a->refs++;
        close(fd);
    } else {
        a = fake_alloc_new(FAKE_IMPORTED, map(fd, ipc.map_bytes), ipc.bytes, fd, ipc.index);
        a->map_bytes = ipc.map_bytes;
        a->opened = ctx->index;
    }
    *ptr = fake_base(a);
    pthread_mutex_unlock(&fake_lock);
    return HRG_SUCCESS;
}

static bool is_last_import(const struct fake_alloc *a)
{
    return a->kind == FAKE_IMPORTED && a->refs == 1;
}

FAKE_API hrg_result cuIpcCloseMemHandle(hrg_ptr ptr)
{
    FAKE_ENTER("IpcCloseMemHandle", FAKE_UNSAFE);
    const struct hrg_ctx_st *ctx = fake_current();
    if (ctx == NULL)
        return HRG_ERROR_INVALID_CONTEXT;
    cuCtxSynchronize();
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_find(ptr, 1);
    bool ok = a != NULL && a->kind == FAKE_IMPORTED && a->opened == ctx->index && fake_base(a) == ptr;
    if (ok && a->refs > 1) {
        a->refs--;
        a = NULL;
    } else if (ok) {
        a = fake_alloc_take(ptr, is_last_import);
    }
    pthread_mutex_unlock(&fake_lock);
    if (ok && a != NULL)
        alloc_free(a);
    return ok ? HRG_SUCCESS : HRG_ERROR_INVALID_VALUE;
}

FAKE_API hrg_result cuMemGetHandleForAddressRange(void *handle, hrg_ptr ptr, size_t bytes, int type,
                                                  unsigned long long flags)
{
    FAKE_ENTER("MemGetHandleForAddressRange", 0);
    (void)flags;
    if (type != HRG_RANGE_HANDLE_DMA_BUF || ptr % 4096 != 0 || bytes % 4096 != 0)
        return HRG_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_find(ptr, 1);
    hrg_result r = a == NULL || is_host(a) ? HRG_ERROR_INVALID_VALUE : HRG_SUCCESS;
    if (r == HRG_SUCCESS && (a->kind == FAKE_IMPORTED || a->kind == FAKE_MANAGED))
        r = HRG_ERROR_NOT_SUPPORTED;
    if (r == HRG_SUCCESS) {
        int fd = fcntl(a->vmm != NULL ? a->vmm->fd : a->fd, F_DUPFD_CLOEXEC, 0);
        *(int *)handle = fd;
        r = fd >= 0 ? HRG_SUCCESS : HRG_ERROR_UNKNOWN;
    }
    pthread_mutex_unlock(&fake_lock);
    return r;
}
