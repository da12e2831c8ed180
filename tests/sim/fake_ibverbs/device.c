/* SPDX-License-Identifier: MIT */
/* Devices, their ports, and memory regions. */
#include "tests/sim/fake_ibverbs/fake.h"

/* The same functions as in verbs.h, with the names of this tree: NOLINTBEGIN(readability-inconsistent-declaration-parameter-name) */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

/* Of addresses of tests/sim/fake_cuda, which no processor can follow. */
#define GPU_TAG (UINT64_C(1) << 55)

struct fake_world fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = -1, .control = -1};

void fake_lock(void)
{
    pthread_mutex_lock(&fake.lock);
}

void fake_unlock(void)
{
    pthread_mutex_unlock(&fake.lock);
}

void *fake_need(size_t n)
{
    void *p = calloc(1, n);
    if (!p)
        abort();
    return p;
}

struct fake_dev *fake_dev_of(const struct ibv_context *ctx)
{
    return (struct fake_dev *)((char *)ctx->device - offsetof(struct fake_dev, ib));
}

bool fake_port_active(const struct fake_dev *dev)
{
    return dev->port == IBV_PORT_ACTIVE && !dev->dead;
}

bool fake_take(const struct fake_dev *dev, enum fake_kind kind)
{
    if (dev->dead) {
        errno = EIO;
        return false;
    }
    if (fake.limit[kind] >= 0 && fake.live[kind] >= (unsigned long)fake.limit[kind]) {
        errno = fake.limit_errno[kind];
        return false;
    }
    fake.live[kind]++;
    return true;
}

/* ---- devices and contexts ---------------------------------------------------------------------------------------- */

FAKE_API struct ibv_device **ibv_get_device_list(int *n)
{
    if (!fake_start()) {
        errno = EMFILE;
        return NULL;
    }
    struct ibv_device **list = fake_need((FAKE_DEVICES + 1) * sizeof(struct ibv_device *));
    fake_lock();
    unsigned found = fake.ndevices;
    for (unsigned i = 0; i < found; i++)
        list[i] = &fake.dev[i].ib;
    fake_unlock();
    if (n)
        *n = (int)found;
    return list;
}

FAKE_API void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

static int query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr, size_t len)
{
    struct ibv_port_attr a = {.max_mtu = IBV_MTU_4096,
                              .active_mtu = IBV_MTU_4096,
                              .gid_tbl_len = 1,
                              .max_msg_sz = 1u << 30,
                              .active_speed = 32};
    const struct fake_dev *dev = fake_dev_of(ctx);
    if (port != 1)
        return EINVAL;
    fake_lock();
    a.state = dev->port;
    a.active_width = dev->width;
    a.lid = fake.ib ? dev->lid : 0;
    a.link_layer = fake.ib ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
    while (a.pkey_tbl_len < FAKE_PKEYS && fake.pkey[a.pkey_tbl_len])
        a.pkey_tbl_len++;
    fake_unlock();
    memset(attr, 0, len);
    memcpy(attr, &a, len < sizeof(a) ? len : sizeof(a));
    return 0;
}

FAKE_API int ibv_query_port(struct ibv_context *ctx, uint8_t port, struct _compat_ibv_port_attr *attr)
{
    /* Callers of this one have no room for what came later. */
    return query_port(ctx, port, (struct ibv_port_attr *)attr,
                      offsetof(struct ibv_port_attr, port_cap_flags2));
}

FAKE_API struct ibv_context *ibv_open_device(struct ibv_device *dev)
{
    struct fake_ctx *c = fake_need(sizeof(*c));
    int fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    fake_lock();
    if (fd < 0 ||
        !fake_take((struct fake_dev *)((char *)dev - offsetof(struct fake_dev, ib)), FAKE_CONTEXT)) {
        int err = errno;
        fake_unlock();
        if (fd >= 0)
            close(fd);
        free(c);
        errno = err;
        return NULL;
    }
    c->v.sz = sizeof(c->v);
    c->v.query_port = query_port;
    c->v.context.device = dev;
    c->v.context.async_fd = fd;
    c->v.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    fake_queue_ops(&c->v.context.ops);
    c->next = fake.contexts;
    fake.contexts = c;
    fake_unlock();
    return &c->v.context;
}

static struct fake_ctx *context_of(struct ibv_context *ctx)
{
    return (struct fake_ctx *)((char *)ctx - offsetof(struct fake_ctx, v.context));
}

FAKE_API int ibv_close_device(struct ibv_context *ctx)
{
    struct fake_ctx *c = context_of(ctx), **at = &fake.contexts;
    fake_lock();
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    fake.live[FAKE_CONTEXT]--;
    fake_unlock();
    close(ctx->async_fd);
    free(c);
    return 0;
}

FAKE_API int ibv_query_device(struct ibv_context *ctx, struct ibv_device_attr *attr)
{
    (void)ctx;
    memset(attr, 0, sizeof(*attr));
    attr->phys_port_cnt = 1;
    attr->max_qp = 1 << 16;
    attr->max_qp_wr = 1 << 14;
    return 0;
}

FAKE_API int _ibv_query_gid_ex(struct ibv_context *ctx, uint32_t port, uint32_t index,
                               struct ibv_gid_entry *entry, uint32_t flags, size_t len)
{
    struct ibv_gid_entry e = {.gid_index = index, .port_num = port};
    if (port != 1 || index != 0 || flags)
        return EINVAL;
    fake_lock();
    e.gid = fake_dev_of(ctx)->gid;
    e.gid_type = fake.ib ? IBV_GID_TYPE_IB : IBV_GID_TYPE_ROCE_V2;
    fake_unlock();
    memcpy(entry, &e, len < sizeof(e) ? len : sizeof(e));
    return 0;
}

FAKE_API int ibv_query_pkey(struct ibv_context *ctx, uint8_t port, int index, __be16 *pkey)
{
    (void)ctx;
    if (port != 1 || index < 0 || index >= (int)FAKE_PKEYS)
        return -1;
    fake_lock();
    *pkey = (__be16)((uint16_t)(fake.pkey[index] << 8) | fake.pkey[index] >> 8);
    fake_unlock();
    return 0;
}

/* ---- events ------------------------------------------------------------------------------------------------------ */

void fake_event(struct fake_ctx *c, enum ibv_event_type type)
{
    uint64_t one = 1;
    if (c->nevents == FAKE_EVENTS)
        return;
    c->event[c->nevents++] = (struct ibv_async_event){.event_type = type, .element.port_num = 1};
    if (write(c->v.context.async_fd, &one, sizeof(one)) != (ssize_t)sizeof(one))
        abort();
}

void fake_event_of(struct ibv_context *ctx, enum ibv_event_type type)
{
    fake_event(context_of(ctx), type);
}

void fake_event_all(const struct fake_dev *dev, enum ibv_event_type type)
{
    for (struct fake_ctx *c = fake.contexts; c; c = c->next)
        if (fake_dev_of(&c->v.context) == dev)
            fake_event(c, type);
}

FAKE_API int ibv_get_async_event(struct ibv_context *ctx, struct ibv_async_event *ev)
{
    struct fake_ctx *c = context_of(ctx);
    uint64_t n;
    if (read(ctx->async_fd, &n, sizeof(n)) != (ssize_t)sizeof(n))
        return -1;
    fake_lock();
    *ev = c->event[0];
    memmove(c->event, c->event + 1, --c->nevents * sizeof(*c->event));
    fake_unlock();
    return 0;
}

FAKE_API void ibv_ack_async_event(struct ibv_async_event *ev)
{
    (void)ev;
}

/* ---- domains and regions ------------------------------------------------------------------------------------------ */

FAKE_API struct ibv_pd *ibv_alloc_pd(struct ibv_context *ctx)
{
    struct ibv_pd *pd = NULL;
    fake_lock();
    if (fake_take(fake_dev_of(ctx), FAKE_PD)) {
        pd = fake_need(sizeof(*pd));
        pd->context = ctx;
    }
    fake_unlock();
    return pd;
}

FAKE_API int ibv_dealloc_pd(struct ibv_pd *pd)
{
    bool used = false;
    fake_lock();
    for (const struct fake_mr *m = fake.mrs; m; m = m->next)
        used = used || m->mr.pd == pd;
    for (const struct fake_qp *q = fake.qps; q; q = q->next)
        used = used || q->qp.pd == pd;
    if (!used)
        fake.live[FAKE_PD]--;
    fake_unlock();
    if (used)
        return EBUSY;
    free(pd);
    return 0;
}

/* Whether the processor can reach all of it, as a device that pins it has to find out. */
static bool mapped(const char *mem, size_t len)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)mem & ~(page - 1);
    unsigned char in_core[256];
    for (uintptr_t at = from; at < (uintptr_t)mem + len; at += sizeof(in_core) * page) {
        size_t left = (uintptr_t)mem + len - at;
        if (mincore((void *)at, left < sizeof(in_core) * page ? left : sizeof(in_core) * page, in_core))
            return false;
    }
    return true;
}

static struct ibv_mr *make_mr(enum fake_kind kind, struct ibv_pd *pd, uint64_t iova, char *mem, size_t len,
                              int access)
{
    struct fake_mr *m = NULL;
    fake_lock();
    if (fake_take(fake_dev_of(pd->context), kind)) {
        m = fake_need(sizeof(*m));
        m->mr =
            (struct ibv_mr){.context = pd->context, .pd = pd, .addr = (void *)(uintptr_t)iova, .length = len};
        m->mr.lkey = m->mr.rkey = fake.last_key += 0x101;
        m->iova = iova;
        m->mem = mem;
        m->access = access;
        m->kind = kind;
        m->next = fake.mrs;
        fake.mrs = m;
    }
    fake_unlock();
    return m ? &m->mr : NULL;
}

FAKE_API struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access)
{
    uint64_t at = (uintptr_t)addr;
    bool gpu = at & GPU_TAG;
    char *mem = (char *)(uintptr_t)(at & ~GPU_TAG);
    fake_lock();
    bool refused = gpu && !fake.peermem;
    fake_unlock();
    if (refused || len == 0 || !mapped(mem, len)) {
        errno = len == 0 ? EINVAL : EFAULT;
        return NULL;
    }
    return make_mr(FAKE_MR, pd, at, mem, len, access);
}

FAKE_API struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t len, uint64_t iova,
                                          int fd, int access)
{
    fake_lock();
    bool refused = !fake.dmabuf;
    fake_unlock();
    if (refused) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    /* The descriptor of the fake GPU's memory is a memfd. */
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), shift = offset % page;
    char *mem = mmap(NULL, len + shift, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(offset - shift));
    if (mem == MAP_FAILED)
        return NULL;
    struct ibv_mr *mr = make_mr(FAKE_DMABUF, pd, iova, mem + shift, len, access);
    if (!mr) {
        int err = errno;
        munmap(mem, len + shift);
        errno = err;
    }
    return mr;
}

FAKE_API int ibv_dereg_mr(struct ibv_mr *mr)
{
    struct fake_mr *m = (struct fake_mr *)mr, **at = &fake.mrs;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), shift = (uintptr_t)m->mem % page;
    fake_lock();
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    fake.live[m->kind]--;
    fake_unlock();
    if (m->kind == FAKE_DMABUF)
        munmap(m->mem - shift, m->mr.length + shift);
    free(m);
    return 0;
}

char *fake_memory(uint32_t key, const struct ibv_pd *pd, uint64_t addr, uint64_t len, int access)
{
    const struct fake_mr *m = fake.mrs;
    while (m && m->mr.lkey != key)
        m = m->next;
    if (!m || m->mr.pd != pd || (m->access & access) != access || addr < m->iova ||
        addr - m->iova > m->mr.length || len > m->mr.length - (addr - m->iova))
        return NULL;
    return m->mem + (addr - m->iova);
}

/* NOLINTEND(readability-inconsistent-declaration-parameter-name) */
