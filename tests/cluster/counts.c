/* SPDX-License-Identifier: MIT */
/*
 * Any count at any alignment: 0, 1, odd, one element around the limit of eager messages for every element
 * size (the limit is in bytes), around a unit and a chunk, and a million and three. timeout: 180
 */
#include <stdio.h>

#include "tests/lib/harness.h"

static const char *const keys[] = {"eager_limit = 16K", "unit_size = 256K", "unit_min = 64K",
                                   "chunk_size = 64K", NULL};
#define EAGER (16u << 10)
#define UNIT (256u << 10)

static struct ht_coll make(struct ht_env *e, unsigned coll, unsigned dtype, uint64_t count, unsigned n)
{
    unsigned kind = n % HT_NMEMORY;
    return (struct ht_coll){.coll = coll,
                            .dtype = dtype,
                            .redop =
                                coll == HRP_ALL_REDUCE || coll == HRP_REDUCE_SCATTER ? n % HRP_NREDOPS : 0,
                            .root = coll == HRP_BROADCAST ? n % e->me->nranks : 0,
                            .count = count,
                            .inplace = n & 1,
                            .send_mem = kind,
                            .recv_mem = (kind + n / 3) % HT_NMEMORY,
                            .send_shift = n % 61,
                            .recv_shift = n * 7 % 61};
}

static int every_collective(struct ht_env *e, unsigned dtype, uint64_t count, unsigned *n)
{
    for (unsigned coll = 0; coll < HRP_BARRIER; coll++) {
        struct ht_coll c = make(e, coll, dtype, count, (*n)++);
        if (ht_collective(e, &c) != 0)
            return 1;
    }
    return 0;
}

/* Counts whose data, or whose block for one node, is one element below, at and above a limit. */
static int around(struct ht_env *e, unsigned dtype, uint64_t bytes, unsigned *n)
{
    uint64_t limit = bytes / hrp_dtype_size(dtype);
    for (uint64_t count = limit - 1; count <= limit + 1; count++) {
        struct ht_coll c = make(e, HRP_ALL_REDUCE, dtype, count, (*n)++);
        if (ht_collective(e, &c) != 0)
            return 1;
        c = make(e, HRP_ALL_REDUCE, dtype, count * e->layout.nnodes, (*n)++);
        if (ht_collective(e, &c) != 0)
            return 1;
        c = make(e, HRP_REDUCE_SCATTER, dtype, count / e->me->nranks, (*n)++);
        if (ht_collective(e, &c) != 0)
            return 1;
        c = make(e, HRP_ALL_GATHER, dtype, count, (*n)++);
        if (ht_collective(e, &c) != 0)
            return 1;
    }
    return 0;
}

static int rank_main(struct hpf_rank *me)
{
    static const uint64_t small[] = {0, 1, 2, 3, 5, 15, 16, 17, 63, 257, 1023};
    struct ht_env e;
    unsigned n = 0;
    if (ht_join(&e, me, 0, NULL) != 0)
        return 1;
    for (size_t i = 0; i < sizeof(small) / sizeof(small[0]); i++)
        for (unsigned dtype = 0; dtype < HRP_NDTYPES; dtype += 3)
            if (every_collective(&e, dtype, small[i], &n) != 0)
                return 1;
    for (unsigned dtype = 0; dtype < HRP_NDTYPES; dtype++)
        if (around(&e, dtype, EAGER, &n) != 0)
            return 1;
    if (around(&e, HRP_F16, UNIT, &n) != 0 || around(&e, HRP_I8, UNIT, &n) != 0)
        return 1;
    for (unsigned k = 0; k < 3; k++) {
        struct ht_coll c = make(&e, HRP_ALL_REDUCE, HRP_F32, 1000003, n++);
        c.redop = HRP_SUM;
        if (ht_collective(&e, &c) != 0)
            return 1;
    }
    return ht_leave(&e);
}

int main(void)
{
    struct hpf_cluster *c = ht_cluster(2, keys);
    struct ht_job job = {.nranks = 4, .fn = rank_main, .expected_bytes = 8 << 20};
    ht_run(c, &job);
    ht_cluster_end(c);
    return 0;
}
