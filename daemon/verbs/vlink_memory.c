/* SPDX-License-Identifier: MIT */
/*
 * What a link sends from and is written into: the arena, registered with its connection, and memory of GPUs, which comes and
 * goes with them. An address says which it is: the driver gives GPUs addresses that no host memory of the process has.
 */
#include "daemon/verbs/vlink.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool within(const char *at, uint64_t len, const char *base, uint64_t bytes)
{
    return at >= base && (uint64_t)(at - base) <= bytes && len <= bytes - (uint64_t)(at - base);
}

static const struct vmemory *find(const struct vlink *l, const char *at, uint64_t len)
{
    const struct vmemory *m = l->memory;
    while (m && !within(at, len, m->m.base, m->m.bytes))
        m = m->next;
    return m;
}

static struct hrd_mr_source source_of(const struct hrd_tp_memory *m, char *at, uint64_t len)
{
    return (struct hrd_mr_source){.addr = at,
                                  .len = len,
                                  .gpu = true,
                                  .dmabuf_fd = m->dmabuf_fd,
                                  .dmabuf_off = (uint64_t)(at - m->base),
                                  .dmabuf_err = m->dmabuf_err};
}

struct hrd_mr_source hrd_vlink_source(const struct vlink *l, char *at, uint64_t len)
{
    const struct vmemory *m = find(l, at, len);
    return m ? source_of(&m->m, at, len) : (struct hrd_mr_source){.addr = at, .len = len};
}

const struct ibv_mr *hrd_vlink_payload(const struct vlink *l, const char *at, uint64_t len)
{
    if (within(at, len, l->c->arena, l->c->arena_len))
        return l->c->arena_mr.mr;
    const struct vmemory *m = find(l, at, len);
    return m ? m->mr.mr : NULL;
}

int hrd_vlink_add_memory(struct hrd_link *base, const struct hrd_tp_memory *m, char *why, size_t len)
{
    struct vlink *l = (struct vlink *)base;
    if (l->state == V_BROKEN) {
        snprintf(why, len, "the link is broken");
        return -ENOTCONN;
    }
    if (m->device[0] && (strcmp(m->device, l->dev.name) != 0 || m->port != l->dev.port)) {
        snprintf(why, len, "this link uses %s port %u, but the memory was tried with %s port %u", l->dev.name,
                 l->dev.port, m->device, m->port);
        return -EXDEV;
    }
    struct vmemory *v = calloc(1, sizeof(*v));
    if (!v)
        abort();
    v->m = *m;
    struct hrd_mr_source src = source_of(m, m->base, m->bytes);
    int err = hrd_mr_register(l->dev.v, l->c->pd, &l->c->memory, &src, 0, &v->mr, why, len);
    if (err) {
        free(v);
        return err;
    }
    v->next = l->memory;
    l->memory = v;
    return 0;
}

static void memory_free(const struct vlink *l, struct vmemory *v)
{
    hrd_mr_free(l->dev.v, &v->mr);
    free(v);
}

void hrd_vlink_drop_memory(struct hrd_link *base, const char *at)
{
    struct vlink *l = (struct vlink *)base;
    struct vmemory **pv = &l->memory;
    while (*pv && (*pv)->m.base != at)
        pv = &(*pv)->next;
    struct vmemory *v = *pv;
    if (!v)
        return;
    *pv = v->next;
    memory_free(l, v);
}

void hrd_vlink_free_memory(struct vlink *l)
{
    while (l->memory) {
        struct vmemory *v = l->memory;
        l->memory = v->next;
        memory_free(l, v);
    }
}
