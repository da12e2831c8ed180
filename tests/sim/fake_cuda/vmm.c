/* SPDX-License-Identifier: MIT */
/* Virtual memory management: physical handles, reserved addresses, mappings. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/sim/fake_cuda/fake.h"

#define GRANULARITY ((size_t)64 << 10)
#define NAME "fake-cuda-vmm-%d-%d"

static struct fake_vmm *handles;
static hrg_handle last_handle = 0x1000;

static struct fake_vmm *find(hrg_handle handle)
{
    struct fake_vmm *v = handles;
    while (v != NULL && v->handle != handle)
        v = v->next;
    return v;
}

static struct fake_vmm *add(int fd, size_t bytes, int index, int types)
{
    struct fake_vmm *v = fake_zalloc(sizeof(*v));
    *v = (struct fake_vmm){.next = handles,
                           .handle = ++last_handle,
                           .fd = fd,
                           .bytes = bytes,
                           .index = index,
                           .types = types,
                           .refs = 1};
    handles = v;
    return v;
}

static void put(struct fake_vmm *v)
{
    if (--v->refs > 0)
        return;
    struct fake_vmm **p = &handles;
    while (*p != v)
        p = &(*p)->next;
    *p = v->next;
    close(v->fd);
    free(v);
}

FAKE_API hrg_result cuMemGetAllocationGranularity(size_t *bytes, const struct hrg_mem_prop *prop, int option)
{
    FAKE_ENTER("MemGetAllocationGranularity", 0);
    (void)prop, (void)option;
    *bytes = GRANULARITY;
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuMemCreate(hrg_handle *handle, size_t bytes, const struct hrg_mem_prop *prop,
                                unsigned long long flags)
{
    FAKE_ENTER("MemCreate", FAKE_UNSAFE);
    if (prop->type != HRG_ALLOCATION_PINNED || prop->location.type != HRG_LOCATION_DEVICE || flags != 0 ||
        bytes == 0 || bytes % GRANULARITY != 0 || prop->location.id < 0 || prop->location.id >= fake.nvisible)
        return HRG_ERROR_INVALID_VALUE;
    if (prop->requested_handle_types & ~HRG_HANDLE_POSIX_FD)
        return HRG_ERROR_NOT_SUPPORTED;
    int index = fake.visible[prop->location.id];
    char name[64];
    /* What a process that imports the descriptor must know of it. */
    snprintf(name, sizeof(name), NAME, index, prop->requested_handle_types);
    int fd = fake_memfd(name, bytes);
    pthread_mutex_lock(&fake_lock);
    *handle = add(fd, bytes, index, prop->requested_handle_types)->handle;
    pthread_mutex_unlock(&fake_lock);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuMemRelease(hrg_handle handle)
{
    FAKE_ENTER("MemRelease", FAKE_UNSAFE);
    pthread_mutex_lock(&fake_lock);
    struct fake_vmm *v = find(handle);
    if (v != NULL)
        put(v);
    pthread_mutex_unlock(&fake_lock);
    return v != NULL ? HRG_SUCCESS : HRG_ERROR_INVALID_VALUE;
}

FAKE_API hrg_result cuMemRetainAllocationHandle(hrg_handle *handle, void *addr)
{
    FAKE_ENTER("MemRetainAllocationHandle", 0);
    pthread_mutex_lock(&fake_lock);
    struct fake_alloc *a = fake_find((uint64_t)(uintptr_t)addr, 1);
    bool ok = a != NULL && a->vmm != NULL;
    if (ok) {
        a->vmm->refs++;
        *handle = a->vmm->handle;
    }
    pthread_mutex_unlock(&fake_lock);
    return ok ? HRG_SUCCESS : HRG_ERROR_INVALID_VALUE;
}

FAKE_API hrg_result cuMemGetAllocationPropertiesFromHandle(struct hrg_mem_prop *prop, hrg_handle handle)
{
    FAKE_ENTER("MemGetAllocationPropertiesFromHandle", 0);
    pthread_mutex_lock(&fake_lock);
    struct fake_vmm *v = find(handle);
    if (v != NULL)
        *prop = (struct hrg_mem_prop){
            .type = HRG_ALLOCATION_PINNED,
            .requested_handle_types = v->types,
            .location = {.type = HRG_LOCATION_DEVICE, .id = fake.ctx[v->index].ordinal}};
    pthread_mutex_unlock(&fake_lock);
    return v != NULL ? HRG_SUCCESS : HRG_ERROR_INVALID_VALUE;
}

FAKE_API hrg_result cuMemExportToShareableHandle(void *shareable, hrg_handle handle, int type,
                                                 unsigned long long flags)
{
    FAKE_ENTER("MemExportToShareableHandle", 0);
    pthread_mutex_lock(&fake_lock);
    struct fake_vmm *v = find(handle);
    hrg_result r = v == NULL || flags != 0 || !(v->types & type) ? HRG_ERROR_INVALID_VALUE : HRG_SUCCESS;
    if (r == HRG_SUCCESS) {
        int fd = fcntl(v->fd, F_DUPFD_CLOEXEC, 0);
        *(int *)shareable = fd;
        r = fd >= 0 ? HRG_SUCCESS : HRG_ERROR_UNKNOWN;
    }
    pthread_mutex_unlock(&fake_lock);
    return r;
}

FAKE_API hrg_result cuMemImportFromShareableHandle(hrg_handle *handle, void *shareable, int type)
{
    FAKE_ENTER("MemImportFromShareableHandle", FAKE_UNSAFE);
    if (type != HRG_HANDLE_POSIX_FD)
        return HRG_ERROR_NOT_SUPPORTED;
    char link[64], name[128];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", (int)(intptr_t)shareable);
    ssize_t len = readlink(link, name, sizeof(name) - 1);
    int index = -1, types = 0;
    struct stat st;
    if (len < 0)
        return HRG_ERROR_INVALID_VALUE;
    name[len] = '\0';
    if (sscanf(name, "/memfd:" NAME, &index, &types) != 2 || fstat((int)(intptr_t)shareable, &st) != 0)
        return HRG_ERROR_INVALID_VALUE; /* no memory of a device */
    int fd = fcntl((int)(intptr_t)shareable, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return HRG_ERROR_UNKNOWN;
    pthread_mutex_lock(&fake_lock);
    *handle = add(fd, (size_t)st.st_size, index, types)->handle;
    pthread_mutex_unlock(&fake_lock);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuMemAddressReserve(hrg_ptr *ptr, size_t bytes, size_t alignment, hrg_ptr addr,
                                        unsigned long long flags)
{
    FAKE_ENTER("MemAddressReserve", FAKE_UNSAFE);
    (void)addr;
    if (bytes == 0 || bytes % GRANULARITY != 0 || alignment > GRANULARITY || flags != 0)
        return HRG_ERROR_INVALID_VALUE;
    /* Aligned as a real one would be. */
    char *p = mmap(NULL, bytes + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return HRG_ERROR_OUT_OF_MEMORY;
    size_t skip = (GRANULARITY - (uintptr_t)p % GRANULARITY) % GRANULARITY;
    if (skip > 0)
        munmap(p, skip);
    munmap(p + skip + bytes, GRANULARITY - skip);
    *ptr = (uint64_t)(uintptr_t)(p + skip) | FAKE_TAG;
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuMemAddressFree(hrg_ptr ptr, size_t bytes)
{
    FAKE_ENTER("MemAddressFree", FAKE_UNSAFE);
    return munmap((void *)(uintptr_t)(ptr & ~FAKE_TAG), bytes) == 0 ? HRG_SUCCESS : HRG_ERROR_INVALID_VALUE;
}

FAKE_API hrg_result cuMemMap(hrg_ptr ptr, size_t bytes, size_t offset, hrg_handle handle,
                             unsigned long long flags)
{
    FAKE_ENTER("MemMap", FAKE_UNSAFE);
    pthread_mutex_lock(&fake_lock);
    struct fake_vmm *v = find(handle);
    hrg_result r = HRG_ERROR_INVALID_VALUE;
    if (v != NULL && offset == 0 && flags == 0 && bytes == v->bytes && ptr % GRANULARITY == 0 &&
        fake_find(ptr, 1) == NULL) {
        char *host =
            mmap((void *)(uintptr_t)(ptr & ~FAKE_TAG), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, v->fd, 0);
        if (host == MAP_FAILED)
            fake_die("mmap: %s", strerror(errno));
        struct fake_alloc *a = fake_alloc_new(FAKE_VMM, host, bytes, -1, v->index);
        a->vmm = v;
        a->accessible = false;
        v->refs++;
        r = HRG_SUCCESS;
    }
    pthread_mutex_unlock(&fake_lock);
    return r;
}

static bool is_vmm(const struct fake_alloc *a)
{
    return a->kind == FAKE_VMM;
}

/* Whole mappings from ptr on, one after the other. */
/* reach: devices that get access; 0: unmap. */
static hrg_result each(hrg_ptr ptr, size_t bytes, uint64_t reach)
{
    hrg_result r = HRG_SUCCESS;
    for (size_t at = 0; at < bytes && r == HRG_SUCCESS;) {
        pthread_mutex_lock(&fake_lock);
        struct fake_alloc *a = fake_find(ptr + at, 1);
        if (a == NULL || a->kind != FAKE_VMM || fake_base(a) != ptr + at || a->bytes > bytes - at) {
            r = HRG_ERROR_INVALID_VALUE;
        } else {
            at += a->bytes;
            if (reach == 0) {
                fake_alloc_take(fake_base(a), is_vmm);
                (void)mmap(a->host, a->bytes, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
                put(a->vmm);
                free(a);
            } else {
                mprotect(a->host, a->bytes, PROT_READ | PROT_WRITE);
                a->accessible = true;
                a->reach = reach;
            }
        }
        pthread_mutex_unlock(&fake_lock);
    }
    return r;
}

FAKE_API hrg_result cuMemUnmap(hrg_ptr ptr, size_t bytes)
{
    FAKE_ENTER("MemUnmap", FAKE_UNSAFE);
    if (fake_current() != NULL)
        cuCtxSynchronize();
    return each(ptr, bytes, 0);
}

FAKE_API hrg_result cuMemSetAccess(hrg_ptr ptr, size_t bytes, const struct hrg_mem_access *access, size_t n)
{
    FAKE_ENTER("MemSetAccess", FAKE_UNSAFE);
    uint64_t reach = 0;
    for (size_t i = 0; i < n; i++) {
        if (access[i].location.type != HRG_LOCATION_DEVICE || access[i].location.id < 0 ||
            access[i].location.id >= fake.nvisible || access[i].flags != HRG_ACCESS_READWRITE)
            return HRG_ERROR_INVALID_VALUE;
        reach |= UINT64_C(1) << fake.visible[access[i].location.id];
    }
    return n > 0 ? each(ptr, bytes, reach) : HRG_ERROR_INVALID_VALUE;
}
