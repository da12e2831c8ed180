/* SPDX-License-Identifier: MIT */
#include "daemon/arena.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>

/*
 * Free extents in address order, first fit. There are few of them: the arena is cut into unit areas of a handful of
 * sizes, so a list that stays hot in cache beats anything with a better bound.
 */
struct extent {
    uint64_t off, len;
    struct extent *next;
};

/* A range that belongs to an opened domain. Extents of two ranges are never joined, even where the ranges touch: each is
   registered apart and may go apart. */
struct range {
    uint64_t off, len, used;
    struct extent *free;
    struct range *next;
};

struct domain {
    uint32_t id;
    struct hrd_arena_watch watch;
    struct range *ranges;
    struct domain *next;
};

struct hrd_arena {
    char *base;
    uint64_t size, used, granule;
    bool mapped;          /* here */
    struct extent *free;  /* of all who have no range of their own */
    struct extent *spare; /* recycled nodes */
    struct domain *domains;
};

/* Ranges cost a registration each: few and large, but an arena serves many peers. */
#define GRANULE_MIN (UINT64_C(64) << 10)
#define GRANULE_MAX (UINT64_C(2) << 20)
#define GRANULES 64u

static uint64_t round_page(uint64_t bytes)
{
    return (bytes + HRD_ARENA_PAGE - 1) / HRD_ARENA_PAGE * HRD_ARENA_PAGE;
}

static void *need(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (!p)
        abort(); /* crash-only: a daemon without a few bytes of heap cannot keep its promises */
    return p;
}

static struct extent *node_new(struct hrd_arena *a)
{
    struct extent *e = a->spare;
    if (e)
        a->spare = e->next;
    else
        e = need(sizeof(*e));
    return e;
}

static void node_put(struct hrd_arena *a, struct extent *e)
{
    e->next = a->spare;
    a->spare = e;
}

/* ---- lists of extents ------------------------------------------------------------------------------------- */

static uint64_t list_take(struct hrd_arena *a, struct extent **list, uint64_t len)
{
    for (struct extent **pe = list; *pe; pe = &(*pe)->next) {
        struct extent *e = *pe;
        if (e->len < len)
            continue;
        uint64_t off = e->off;
        e->off += len;
        e->len -= len;
        if (e->len == 0) {
            *pe = e->next;
            node_put(a, e);
        }
        return off;
    }
    return HRD_ARENA_NONE;
}

/* The same from the end of the last extent that has room. */
static uint64_t list_take_last(struct hrd_arena *a, struct extent **list, uint64_t len)
{
    struct extent **last = NULL;
    for (struct extent **pe = list; *pe; pe = &(*pe)->next)
        if ((*pe)->len >= len)
            last = pe;
    if (!last)
        return HRD_ARENA_NONE;
    struct extent *e = *last;
    e->len -= len;
    uint64_t off = e->off + e->len;
    if (e->len == 0) {
        *last = e->next;
        node_put(a, e);
    }
    return off;
}

static void list_put(struct hrd_arena *a, struct extent **list, uint64_t off, uint64_t len)
{
    struct extent *prev = NULL, *next = *list;
    while (next && next->off < off) {
        prev = next;
        next = next->next;
    }
    if (prev && prev->off + prev->len == off) {
        prev->len += len;
    } else {
        struct extent *e = node_new(a);
        *e = (struct extent){.off = off, .len = len, .next = next};
        if (prev)
            prev->next = e;
        else
            *list = e;
        prev = e;
    }
    if (next && prev->off + prev->len == next->off) {
        prev->len += next->len;
        prev->next = next->next;
        node_put(a, next);
    }
}

static void list_free(struct extent *e)
{
    while (e) {
        struct extent *next = e->next;
        free(e);
        e = next;
    }
}

/* ---- domains ---------------------------------------------------------------------------------------------- */

static struct domain *find_domain(const struct hrd_arena *a, uint32_t id)
{
    struct domain *d = a->domains;
    while (d && d->id != id)
        d = d->next;
    return d;
}

static struct range *find_range(const struct hrd_arena *a, uint64_t off)
{
    for (struct domain *d = a->domains; d; d = d->next)
        for (struct range *r = d->ranges; r; r = r->next)
            if (off >= r->off && off - r->off < r->len)
                return r;
    return NULL;
}

/* Takes back what domains keep without using it. True: something came back. */
static bool reclaim(struct hrd_arena *a)
{
    bool any = false;
    for (struct domain *d = a->domains; d; d = d->next)
        for (struct range **pr = &d->ranges; *pr;) {
            struct range *r = *pr;
            if (r->used) {
                pr = &r->next;
                continue;
            }
            *pr = r->next;
            d->watch.shrink(d->watch.ctx, r->off, r->len);
            list_put(a, &a->free, r->off, r->len);
            list_free(r->free);
            free(r);
            any = true;
        }
    return any;
}

/* A range that holds len: whole granules where they are to be had. From the top, so that short-lived ordinary memory at
   the bottom does not cut up what the next range needs. */
static struct range *domain_grow(struct hrd_arena *a, struct domain *d, uint64_t len)
{
    uint64_t want = (len + a->granule - 1) / a->granule * a->granule;
    uint64_t off = list_take_last(a, &a->free, want);
    if (off == HRD_ARENA_NONE && reclaim(a))
        off = list_take_last(a, &a->free, want);
    if (off == HRD_ARENA_NONE) {
        want = len;
        off = list_take_last(a, &a->free, want);
    }
    if (off == HRD_ARENA_NONE)
        return NULL;
    if (d->watch.grow(d->watch.ctx, off, want)) {
        list_put(a, &a->free, off, want);
        return NULL;
    }
    struct range *r = need(sizeof(*r));
    r->off = off;
    r->len = want;
    r->free = node_new(a);
    *r->free = (struct extent){.off = off, .len = want};
    r->next = d->ranges;
    d->ranges = r;
    return r;
}

static uint64_t domain_alloc(struct hrd_arena *a, struct domain *d, uint64_t len)
{
    for (struct range *r = d->ranges; r; r = r->next) {
        uint64_t off = list_take(a, &r->free, len);
        if (off == HRD_ARENA_NONE)
            continue;
        r->used += len;
        return off;
    }
    struct range *r = domain_grow(a, d, len);
    if (!r)
        return HRD_ARENA_NONE;
    r->used += len;
    return list_take(a, &r->free, len);
}

int hrd_arena_domain_open(struct hrd_arena *a, uint32_t domain, const struct hrd_arena_watch *watch)
{
    if (domain == HRD_DOMAIN_SEND)
        return -EINVAL;
    if (find_domain(a, domain))
        return -EEXIST;
    struct domain *d = need(sizeof(*d));
    d->id = domain;
    d->watch = *watch;
    d->next = a->domains;
    a->domains = d;
    return 0;
}

void hrd_arena_domain_close(struct hrd_arena *a, uint32_t domain)
{
    struct domain **pd = &a->domains;
    while (*pd && (*pd)->id != domain)
        pd = &(*pd)->next;
    struct domain *d = *pd;
    if (!d)
        return;
    *pd = d->next;
    while (d->ranges) {
        struct range *r = d->ranges;
        d->ranges = r->next;
        for (struct extent *e = r->free; e; e = e->next)
            list_put(a, &a->free, e->off, e->len);
        list_free(r->free);
        free(r);
    }
    free(d);
}

/* ---- the arena -------------------------------------------------------------------------------------------- */

struct hrd_arena *hrd_arena_over(void *base, uint64_t bytes)
{
    struct hrd_arena *a = calloc(1, sizeof(*a));
    if (!a)
        return NULL;
    a->base = base;
    a->size = bytes / HRD_ARENA_PAGE * HRD_ARENA_PAGE;
    a->granule = round_page(a->size / GRANULES);
    if (a->granule < GRANULE_MIN)
        a->granule = GRANULE_MIN;
    if (a->granule > GRANULE_MAX)
        a->granule = GRANULE_MAX;
    a->free = node_new(a);
    *a->free = (struct extent){.len = a->size};
    return a;
}

struct hrd_arena *hrd_arena_new(uint64_t bytes)
{
    uint64_t size = round_page(bytes);
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    (void)madvise(base, size, MADV_HUGEPAGE); /* a hint: fewer TLB misses where the kernel likes it */
    struct hrd_arena *a = hrd_arena_over(base, size);
    if (a)
        a->mapped = true;
    else
        munmap(base, size);
    return a;
}

void hrd_arena_free(struct hrd_arena *a)
{
    if (!a)
        return;
    while (a->domains)
        hrd_arena_domain_close(a, a->domains->id);
    if (a->mapped)
        munmap(a->base, a->size);
    list_free(a->free);
    list_free(a->spare);
    free(a);
}

uint64_t hrd_arena_alloc(struct hrd_arena *a, uint32_t domain, uint64_t bytes)
{
    uint64_t len = round_page(bytes), off;
    if (len == 0)
        return 0;
    struct domain *d = find_domain(a, domain);
    if (d) {
        off = domain_alloc(a, d, len);
    } else {
        off = list_take(a, &a->free, len);
        if (off == HRD_ARENA_NONE && reclaim(a))
            off = list_take(a, &a->free, len);
    }
    if (off != HRD_ARENA_NONE)
        a->used += len;
    return off;
}

void hrd_arena_release(struct hrd_arena *a, uint64_t off, uint64_t bytes)
{
    uint64_t len = round_page(bytes);
    if (len == 0)
        return;
    a->used -= len;
    struct range *r = find_range(a, off);
    if (r)
        r->used -= len;
    list_put(a, r ? &r->free : &a->free, off, len);
}

void *hrd_arena_at(const struct hrd_arena *a, uint64_t off)
{
    return a->base + off;
}

uint64_t hrd_arena_size(const struct hrd_arena *a)
{
    return a->size;
}

uint64_t hrd_arena_used(const struct hrd_arena *a)
{
    return a->used;
}

void hrd_arena_reclaim(struct hrd_arena *a)
{
    (void)reclaim(a);
}

uint64_t hrd_arena_granule(const struct hrd_arena *a)
{
    return a->granule;
}
