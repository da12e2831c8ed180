/* SPDX-License-Identifier: MIT */
#include "daemon/arena.h"

#include <errno.h>
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

struct hrd_arena {
    char *base;
    uint64_t size, used;
    struct extent *free;
    struct extent *spare; /* recycled nodes */
};

static uint64_t round_page(uint64_t bytes)
{
    return (bytes + HRD_ARENA_PAGE - 1) / HRD_ARENA_PAGE * HRD_ARENA_PAGE;
}

static struct extent *node_new(struct hrd_arena *a)
{
    struct extent *e = a->spare;
    if (e)
        a->spare = e->next;
    else if (!(e = malloc(sizeof(*e))))
        abort(); /* crash-only: a daemon without a few bytes of heap cannot keep its promises */
    return e;
}

static void node_put(struct hrd_arena *a, struct extent *e)
{
    e->next = a->spare;
    a->spare = e;
}

struct hrd_arena *hrd_arena_new(uint64_t bytes)
{
    struct hrd_arena *a = calloc(1, sizeof(*a));
    if (!a)
        return NULL;
    a->size = round_page(bytes);
    a->base = mmap(NULL, a->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (a->base == MAP_FAILED) {
        free(a);
        return NULL;
    }
    (void)madvise(a->base, a->size, MADV_HUGEPAGE); /* a hint: fewer TLB misses where the kernel likes it */
    a->free = node_new(a);
    *a->free = (struct extent){.len = a->size};
    return a;
}

static void list_free(struct extent *e)
{
    while (e) {
        struct extent *next = e->next;
        free(e);
        e = next;
    }
}

void hrd_arena_free(struct hrd_arena *a)
{
    if (!a)
        return;
    munmap(a->base, a->size);
    list_free(a->free);
    list_free(a->spare);
    free(a);
}

uint64_t hrd_arena_alloc(struct hrd_arena *a, uint32_t domain, uint64_t bytes)
{
    (void)
        domain; /* sockets place nothing by themselves; a transport with remote access keys its regions by it */
    uint64_t len = round_page(bytes);
    if (len == 0)
        return 0;
    for (struct extent **pe = &a->free; *pe; pe = &(*pe)->next) {
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
        a->used += len;
        return off;
    }
    return HRD_ARENA_NONE;
}

void hrd_arena_release(struct hrd_arena *a, uint64_t off, uint64_t bytes)
{
    uint64_t len = round_page(bytes);
    if (len == 0)
        return;
    a->used -= len;
    struct extent *prev = NULL, *next = a->free;
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
            a->free = e;
        prev = e;
    }
    if (next && prev->off + prev->len == next->off) {
        prev->len += next->len;
        prev->next = next->next;
        node_put(a, next);
    }
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
