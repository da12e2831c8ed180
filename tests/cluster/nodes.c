/* SPDX-License-Identifier: MIT */
/*
 * Every number of nodes works, odd ones and those that are no power of two too: 1 to 16 nodes with 2 ranks
 * each, a small arena, a million and three elements. timeout: 240
 */
#include <stdio.h>

#include "tests/lib/harness.h"

static const char *const keys[] = {"arena_size = 16M", "threads = 1", "tcp_streams = 1", NULL};

static int rank_main(struct hpf_rank *me)
{
    struct ht_env e;
    if (ht_join(&e, me, 0, NULL) != 0)
        return 1;
    struct ht_coll c = {.coll = HRP_ALL_REDUCE,
                        .dtype = HRP_F32,
                        .redop = HRP_SUM,
                        .count = 1000003,
                        .send_mem = HT_ALLOC,
                        .recv_mem = HT_ALLOC};
    if (ht_collective(&e, &c) != 0)
        return 1;
    c.count = 1009;
    if (ht_collective(&e, &c) != 0)
        return 1;
    c.coll = HRP_REDUCE_SCATTER;
    if (ht_collective(&e, &c) != 0)
        return 1;
    c.coll = HRP_ALL_GATHER;
    if (ht_collective(&e, &c) != 0)
        return 1;
    c.coll = HRP_BROADCAST;
    c.root = me->nranks - 1;
    c.count = 300007;
    if (ht_collective(&e, &c) != 0)
        return 1;
    return ht_leave(&e);
}

int main(void)
{
    static const unsigned numbers[] = {1, 2, 3, 5, 6, 7, 9, 12, 15, 16};
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        /* Slowed down, the large ones alone would take the time of all. */
        if (ht_sanitized() && numbers[i] > 9)
            continue;
        printf("%u nodes\n", numbers[i]);
        fflush(stdout);
        struct hpf_cluster *c = ht_cluster(numbers[i], keys);
        struct ht_job job = {.nranks = 2 * numbers[i], .fn = rank_main, .expected_bytes = 4100000};
        ht_run(c, &job);
        ht_cluster_end(c);
    }
    return 0;
}
