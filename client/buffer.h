/* SPDX-License-Identifier: MIT */
/* Memory that the daemon can address: what ops on it need no copy for. */
#ifndef HCL_BUFFER_H
#define HCL_BUFFER_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct hcl_context;

struct hcl_region {
    uintptr_t base;
    size_t len;
    uint32_t id;      /* the daemon's name for it */
    size_t map_bytes; /* made by hclient_mem_alloc(): to unmap; 0: the caller's mapping */
};

/* Sorted by base, without overlap. */
struct hcl_regions {
    pthread_rwlock_t lock;
    struct hcl_region *v;
    size_t n;
    size_t room;
};

void hcl_regions_init(struct hcl_regions *r);
void hcl_regions_deinit(struct hcl_regions *r);
/* 0, or -ENOMEM, or -EEXIST when it overlaps another. */
int hcl_regions_add(struct hcl_regions *r, const struct hcl_region *region);
/* Takes out the region that starts at base; whether there was one. */
bool hcl_regions_take(struct hcl_regions *r, uintptr_t base, struct hcl_region *region);
/* Whether [p, p + len) lies in one region; then its id and the offset of p in it. */
bool hcl_regions_find(struct hcl_regions *r, const void *p, size_t len, uint32_t *id, uint64_t *offset);
/* How many of the `len` bytes at p lie behind the end of the region that p is in; 0 also where p is in none. */
size_t hcl_regions_overrun(struct hcl_regions *r, const void *p, size_t len);

#endif
