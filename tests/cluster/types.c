/* SPDX-License-Identifier: MIT */
/*
 * Every element type with every reduction in every collective, in and out of place, staged, zero-copy and
 * mixed, on 3 nodes with 2 ranks each. timeout: 180
 */
#include <stdio.h>

#include "tests/lib/harness.h"

/* Small enough to go eagerly and larger than an eager message, odd both times. */
static const uint64_t counts[] = {333, 12347};

static int one(struct ht_env *e, unsigned coll, unsigned dtype, unsigned redop, unsigned n)
{
    struct ht_coll c = {.coll = coll,
                        .dtype = dtype,
                        .redop = redop,
                        .root = coll == HRP_BROADCAST ? n % e->me->nranks : 0,
                        .count = counts[n % 2],
                        .inplace = n / 2 % 2,
                        .send_mem = n / 4 % HT_NMEMORY,
                        .recv_mem = (n / 4 + n / 12) % HT_NMEMORY};
    return ht_collective(e, &c);
}

static int rank_main(struct hpf_rank *me)
{
    struct ht_env e;
    unsigned n = 0;
    if (ht_join(&e, me, 0, NULL) != 0)
        return 1;
    for (unsigned dtype = 0; dtype < HRP_NDTYPES; dtype++) {
        for (unsigned redop = 0; redop < HRP_NREDOPS; redop++)
            for (unsigned k = 0; k < 4; k++, n++)
                if (one(&e, HRP_ALL_REDUCE, dtype, redop, n) != 0 ||
                    one(&e, HRP_REDUCE_SCATTER, dtype, redop, n) != 0)
                    return 1;
        for (unsigned k = 0; k < 4; k++, n++)
            if (one(&e, HRP_BROADCAST, dtype, 0, n) != 0 || one(&e, HRP_ALL_GATHER, dtype, 0, n) != 0)
                return 1;
        n += 5; /* other combinations for the next type */
    }
    return ht_leave(&e);
}

int main(void)
{
    struct hpf_cluster *c = ht_cluster(3, NULL);
    struct ht_job job = {.nranks = 6, .fn = rank_main, .expected_bytes = 1 << 17};
    ht_run(c, &job);
    ht_cluster_end(c);
    return 0;
}
