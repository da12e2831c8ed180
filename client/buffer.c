/* SPDX-License-Identifier: MIT */
#include "client/buffer.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "client/comm.h"
#include "client/context.h"
#include "client/futex.h"
#include "client/gpu_import.h"

/* ------------------------------------------------------------------------------------------- regions */

void hcl_regions_init(struct hcl_regions *r)
{
    pthread_rwlock_init(&r->lock, NULL);
}

void hcl_regions_deinit(struct hcl_regions *r)
{
    pthread_rwlock_destroy(&r->lock);
    free(r->v);
}

/* Under lock: number of regions that start at or below p. */
static size_t upto(const struct hcl_regions *r, uintptr_t p)
{
    size_t lo = 0, hi = r->n;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (r->v[mid].base <= p)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static int insert(struct hcl_regions *r, const struct hcl_region *region)
{
    size_t at = upto(r, region->base);
    if (at > 0 && r->v[at - 1].base + r->v[at - 1].len > region->base)
        return -EEXIST;
    if (at < r->n && region->base + region->len > r->v[at].base)
        return -EEXIST;
    if (r->n == r->room) {
        size_t room = r->room > 0 ? 2 * r->room : 16;
        struct hcl_region *v = realloc(r->v, room * sizeof(*v));
        if (v == NULL)
            return -ENOMEM;
        r->v = v;
        r->room = room;
    }
    memmove(r->v + at + 1, r->v + at, (r->n - at) * sizeof(*r->v));
    r->v[at] = *region;
    r->n++;
    return 0;
}

int hcl_regions_add(struct hcl_regions *r, const struct hcl_region *region)
{
    pthread_rwlock_wrlock(&r->lock);
    int rc = insert(r, region);
    pthread_rwlock_unlock(&r->lock);
    return rc;
}

bool hcl_regions_take(struct hcl_regions *r, uintptr_t base, struct hcl_region *region)
{
    pthread_rwlock_wrlock(&r->lock);
    size_t at = upto(r, base);
    bool found = at > 0 && r->v[at - 1].base == base;
    if (found) {
        *region = r->v[at - 1];
        memmove(r->v + at - 1, r->v + at, (r->n - at) * sizeof(*r->v));
        r->n--;
    }
    pthread_rwlock_unlock(&r->lock);
    return found;
}

size_t hcl_regions_overrun(struct hcl_regions *r, const void *p, size_t len)
{
    uintptr_t a = (uintptr_t)p;
    size_t over = 0;
    pthread_rwlock_rdlock(&r->lock);
    size_t at = upto(r, a);
    const struct hcl_region *g = at > 0 ? &r->v[at - 1] : NULL;
    if (g != NULL && a - g->base < g->len && len > g->len - (a - g->base))
        over = len - (g->len - (a - g->base));
    pthread_rwlock_unlock(&r->lock);
    return over;
}

bool hcl_regions_find(struct hcl_regions *r, const void *p, size_t len, uint32_t *id, uint64_t *offset)
{
    uintptr_t a = (uintptr_t)p;
    pthread_rwlock_rdlock(&r->lock);
    size_t at = upto(r, a);
    const struct hcl_region *g = at > 0 ? &r->v[at - 1] : NULL;
    bool found = g != NULL && a - g->base < g->len && len <= g->len - (a - g->base);
    if (found) {
        *id = g->id;
        *offset = a - g->base;
    }
    pthread_rwlock_unlock(&r->lock);
    return found;
}

/* -------------------------------------------------------------------------------- hclient_mem_alloc */

static void free_in_daemon(struct hcl_context *ctx, uint32_t id)
{
    struct hrp_msg msg = {.type = HRP_MSG_FREE};
    msg.body.buffer.id = id;
    hcl_send_only(ctx, &msg, HRP_MSG_DONE);
}

static hclient_result_t map_memory(const struct hcl_reply *reply, size_t size, struct hcl_region *region)
{
    uint64_t bytes = reply->msg.body.memory.bytes;
    struct stat st;
    if (bytes < size || fstat(reply->fds[0], &st) != 0 || (uint64_t)st.st_size < bytes)
        return hcl_fail(HCLIENT_PROTOCOL, "the hreduced daemon sent memory shorter than it says");
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, reply->fds[0], 0);
    if (p == MAP_FAILED)
        return hcl_fail(HCLIENT_RESOURCE, "cannot map %zu bytes of the daemon's memory: %s", size,
                        strerror(errno));
    *region = (struct hcl_region){
        .base = (uintptr_t)p, .len = bytes, .id = reply->msg.body.memory.id, .map_bytes = bytes};
    return HCLIENT_OK;
}

static hclient_result_t alloc_in(struct hcl_context *ctx, size_t size, void **ptr)
{
    struct hrp_msg msg = {.type = HRP_MSG_ALLOC};
    msg.body.alloc.bytes = size;
    struct hcl_reply reply = HCL_REPLY_NULL;
    hclient_result_t r = hcl_request(ctx, &msg, NULL, 0, HRP_MSG_MEMORY, hcl_alloc_ns(size), &reply);
    if (r != HCLIENT_OK)
        return r;
    struct hcl_region region = {.base = 0};
    r = map_memory(&reply, size, &region);
    if (r == HCLIENT_OK && hcl_regions_add(&ctx->regions, &region) != 0) {
        munmap((void *)region.base, region.map_bytes);
        r = hcl_fail(HCLIENT_RESOURCE, "out of memory");
    }
    if (r == HCLIENT_OK)
        *ptr = (void *)region.base;
    else
        free_in_daemon(ctx, reply.msg.body.memory.id);
    hcl_reply_deinit(&reply);
    return r;
}

hclient_result_t hclient_mem_alloc(void **ptr, size_t size)
{
    HCL_ENTER();
    if (ptr == NULL)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "hclient_mem_alloc: ptr is NULL");
    if (size == 0 || size > SIZE_MAX / 4)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "hclient_mem_alloc: size is %zu; ask for 1 byte to 2^62",
                        size);
    struct hcl_context *ctx;
    hclient_result_t r = hcl_context_get(NULL, &ctx);
    if (r != HCLIENT_OK)
        return r;
    r = alloc_in(ctx, size, ptr);
    if (r != HCLIENT_OK)
        hcl_context_put(ctx); /* else the region holds it */
    return r;
}

struct take {
    uintptr_t base;
    struct hcl_region region;
    struct hcl_context *ctx;
};

static bool take_from(struct hcl_context *ctx, void *arg)
{
    struct take *t = arg;
    if (!hcl_regions_take(&ctx->regions, t->base, &t->region))
        return false;
    t->ctx = ctx; /* alive: the region's reference is ours now */
    return true;
}

hclient_result_t hclient_mem_free(void *ptr)
{
    HCL_ENTER();
    if (ptr == NULL)
        return HCLIENT_OK;
    struct take t = {.base = (uintptr_t)ptr};
    if (!hcl_context_each(take_from, &t))
        return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                        "hclient_mem_free: %p is not the start of memory that hclient_mem_alloc returned or "
                        "hclient_mem_import_fd was given (or it was freed before)",
                        ptr);
    hclient_result_t r = HCLIENT_OK;
    if (!hcl_context_lost(t.ctx)) {
        struct hrp_msg msg = {.type = HRP_MSG_FREE};
        msg.body.buffer.id = t.region.id;
        r = hcl_request(t.ctx, &msg, NULL, 0, HRP_MSG_DONE, HCL_REPLY_NS, NULL);
        if (hcl_context_lost(t.ctx))
            r = HCLIENT_OK; /* nobody is left who could use it */
    }
    if (t.region.map_bytes > 0)
        munmap((void *)t.region.base, t.region.map_bytes);
    hcl_context_put(t.ctx);
    return r;
}

/* ---------------------------------------------------------------------------- hclient_mem_import_fd */

/* That addr shows the descriptor's bytes is the caller's word; a wrong one would give silently wrong sums. */
static bool shows(const char *addr, int fd, uint64_t offset, size_t len)
{
    char buf[64];
    size_t n = len < sizeof(buf) ? len : sizeof(buf);
    return pread(fd, buf, n, (off_t)offset) == (ssize_t)n && memcmp(buf, addr, n) == 0;
}

static hclient_result_t check_import(const char *addr, size_t bytes, int fd, uint64_t offset)
{
    const char *call = "hclient_mem_import_fd";
    if (addr == NULL || bytes == 0)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: addr is %p and bytes %zu; give a mapping", call,
                        (const void *)addr, bytes);
    long page = sysconf(_SC_PAGESIZE);
    if (offset % (uint64_t)page != 0 || offset > INT64_MAX - bytes || (uintptr_t)addr % (uintptr_t)page != 0)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                        "%s: offset %llu and addr %p must be multiples of the page size %ld", call,
                        (unsigned long long)offset, (const void *)addr, page);
    struct stat st;
    if (fstat(fd, &st) != 0)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: fd %d: %s", call, fd, strerror(errno));
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                        "%s: fd %d is not a memfd sealed with F_SEAL_SHRINK; make it with memfd_create(..., "
                        "MFD_ALLOW_SEALING) and fcntl(F_ADD_SEALS, F_SEAL_SHRINK)",
                        call, fd);
    if ((uint64_t)st.st_size < offset + bytes)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: fd %d has %lld bytes, %llu + %zu are asked for", call,
                        fd, (long long)st.st_size, (unsigned long long)offset, bytes);
    struct statfs fs;
    if (fstatfs(fd, &fs) == 0 && fs.f_type == HUGETLBFS_MAGIC)
        return hcl_fail(HCLIENT_UNSUPPORTED, "%s: fd %d is of huge pages (hugetlb); use ordinary ones", call,
                        fd);
    size_t tail = bytes > 64 ? bytes - 64 : 0;
    if (!shows(addr, fd, offset, bytes) || !shows(addr + tail, fd, offset + tail, bytes - tail))
        return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                        "%s: the memory at %p differs from fd %d at offset %llu; map it with MAP_SHARED",
                        call, (const void *)addr, fd, (unsigned long long)offset);
    return HCLIENT_OK;
}

hclient_result_t hclient_mem_import_fd(void *addr, size_t bytes, int fd, uint64_t offset)
{
    HCL_ENTER();
    hclient_result_t r = check_import(addr, bytes, fd, offset);
    struct hcl_context *ctx;
    if (r == HCLIENT_OK)
        r = hcl_context_get(NULL, &ctx);
    if (r != HCLIENT_OK)
        return r;
    struct hrp_msg msg = {.type = HRP_MSG_IMPORT};
    msg.body.import.offset = offset;
    msg.body.import.bytes = bytes;
    struct hcl_reply reply = HCL_REPLY_NULL;
    r = hcl_request(ctx, &msg, &fd, 1, HRP_MSG_REGISTERED, hcl_alloc_ns(bytes), &reply);
    if (r == HCLIENT_OK) {
        uint32_t id = reply.msg.body.buffer.id;
        struct hcl_region region = {.base = (uintptr_t)addr, .len = bytes, .id = id};
        int rc = hcl_regions_add(&ctx->regions, &region);
        if (rc != 0) {
            free_in_daemon(ctx, id);
            r = hcl_fail(rc == -EEXIST ? HCLIENT_INVALID_ARGUMENT : HCLIENT_RESOURCE,
                         "hclient_mem_import_fd: %s",
                         rc == -EEXIST ? "part of this memory is registered already" : "out of memory");
        }
    }
    hcl_reply_deinit(&reply);
    if (r != HCLIENT_OK)
        hcl_context_put(ctx);
    return r;
}

/* ---------------------------------------------------------------------------- hclient_comm_register */

struct hcl_registration {
    struct hcl_registration *next;
    uintptr_t base;
    size_t bytes;
};

static void link_registration(struct hcl_comm *c, struct hcl_registration *reg)
{
    pthread_mutex_lock(&c->lock);
    reg->next = c->registrations;
    c->registrations = reg;
    pthread_mutex_unlock(&c->lock);
}

bool hcl_is_registered(struct hcl_comm *comm, uintptr_t base, size_t bytes)
{
    pthread_mutex_lock(&comm->lock);
    const struct hcl_registration *r = comm->registrations;
    while (r != NULL && (r->base >= base + bytes || r->base + r->bytes <= base))
        r = r->next;
    pthread_mutex_unlock(&comm->lock);
    return r != NULL;
}

hclient_result_t hclient_comm_register(hclient_comm_t comm, void *buff, size_t size, void **handle)
{
    HCL_ENTER();
    struct hcl_comm *c;
    hclient_result_t r = hcl_comm_enter(comm, "hclient_comm_register", &c);
    if (r != HCLIENT_OK)
        return r;
    struct hcl_registration *reg = NULL;
    if (handle == NULL || buff == NULL || size == 0 || (uintptr_t)buff > UINTPTR_MAX - size)
        r = hcl_fail(HCLIENT_INVALID_ARGUMENT,
                     "hclient_comm_register: buff %p, size %zu, handle %p: give a buffer and a place for the "
                     "handle",
                     buff, size, (void *)handle);
    else if ((reg = calloc(1, sizeof(*reg))) == NULL)
        r = hcl_fail(HCLIENT_RESOURCE, "out of memory");
    if (r == HCLIENT_OK) {
        reg->base = (uintptr_t)buff;
        reg->bytes = size;
        link_registration(c, reg);
        *handle = reg;
    }
    hcl_handle_put(comm);
    return r;
}

hclient_result_t hclient_comm_deregister(hclient_comm_t comm, void *handle)
{
    HCL_ENTER();
    struct hcl_comm *c;
    hclient_result_t r = hcl_comm_enter(comm, "hclient_comm_deregister", &c);
    if (r != HCLIENT_OK)
        return r;
    pthread_mutex_lock(&c->lock);
    struct hcl_registration **p = &c->registrations;
    while (*p != NULL && *p != handle)
        p = &(*p)->next;
    struct hcl_registration *found = *p;
    if (found != NULL)
        *p = found->next;
    bool gpu = c->gpu != NULL;
    pthread_mutex_unlock(&c->lock);
    if (found != NULL && gpu)
        r = hcl_gpu_give_back(c, found->base, found->bytes);
    if (found != NULL && r != HCLIENT_OK)
        link_registration(c, found);
    else
        free(found);
    if (found == NULL)
        r = hcl_fail(HCLIENT_INVALID_ARGUMENT,
                     "hclient_comm_deregister: %p is not a registration of this communicator (or was ended "
                     "before)",
                     handle);
    hcl_handle_put(comm);
    return r;
}

void hcl_registrations_free(struct hcl_comm *comm)
{
    while (comm->registrations != NULL) {
        struct hcl_registration *reg = comm->registrations;
        comm->registrations = reg->next;
        free(reg);
    }
}
