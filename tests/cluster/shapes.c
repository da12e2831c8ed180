/* SPDX-License-Identifier: MIT */
/*
 * Every shape of a job gives the right result: one rank in all, one node, one rank a node, uneven numbers of
 * ranks on the nodes, ranks dealt round-robin; and some of them with threads of their own for the sockets.
 * timeout: 180
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/lib/harness.h"

struct shape {
    const char *name;
    unsigned nnodes, nranks;
    unsigned map[16];
};

static const struct shape shapes[] = {
    {"1x1", 1, 1, {0}},
    {"1x8", 1, 8, {0}},
    {"2x1", 2, 2, {0, 1}},
    {"2x2", 2, 4, {0, 0, 1, 1}},
    {"3x2", 3, 6, {0, 0, 1, 1, 2, 2}},
    {"4x2", 4, 8, {0, 0, 1, 1, 2, 2, 3, 3}},
    {"8x1", 8, 8, {0, 1, 2, 3, 4, 5, 6, 7}},
    {"5x1", 5, 5, {0, 1, 2, 3, 4}},
    {"3+1+2", 3, 6, {0, 0, 0, 1, 2, 2}},
    {"1+4", 2, 5, {0, 1, 1, 1, 1}},
    {"3x2 round-robin", 3, 6, {0, 1, 2, 0, 1, 2}},
    {"4x2 round-robin", 4, 8, {0, 1, 2, 3, 0, 1, 2, 3}},
    {"last node first", 3, 5, {2, 2, 0, 1, 0}},
    {"shuffled", 3, 8, {1, 0, 2, 1, 1, 0, 2, 1}},
};
#define NSHAPES (sizeof(shapes) / sizeof(shapes[0]))

/* All collectives, a small and a larger size, both ways of passing memory. */
static int rank_main(struct hpf_rank *me)
{
    static const uint64_t counts[] = {17, 40009};
    struct ht_env e;
    if (ht_join(&e, me, 0, NULL) != 0)
        return 1;
    for (unsigned coll = 0; coll < HRP_NCOLLS; coll++) {
        for (unsigned k = 0; k < 2; k++) {
            struct ht_coll c = {.coll = coll,
                                .dtype = k ? HRP_BF16 : HRP_F32,
                                .redop = coll == HRP_ALL_REDUCE || coll == HRP_REDUCE_SCATTER ? HRP_SUM : 0,
                                .root = coll == HRP_BROADCAST ? me->nranks - 1 - k % me->nranks : 0,
                                .count = counts[k],
                                .inplace = k == 1,
                                .send_mem = k ? HT_PLAIN : HT_ALLOC,
                                .recv_mem = k ? HT_PLAIN : HT_ALLOC};
            if (ht_collective(&e, &c) != 0)
                return 1;
            c.inplace = !c.inplace;
            c.redop =
                c.redop == HRP_SUM && coll != HRP_BROADCAST && coll != HRP_ALL_GATHER && coll != HRP_BARRIER
                    ? HRP_AVG
                    : 0;
            if (ht_collective(&e, &c) != 0)
                return 1;
        }
    }
    return ht_leave(&e);
}

/* The layout stands in the log, once a communicator: "2 nodes x 2 ranks" or "6 ranks on 3 nodes: 3 + 1 + 2". */
static void check_layout_line(const struct hpf_cluster *c, const struct shape *s)
{
    char want[64];
    unsigned first = 0, even = 1;
    for (unsigned n = 0; n < s->nnodes; n++) {
        unsigned ranks = 0;
        for (unsigned r = 0; r < s->nranks; r++)
            ranks += s->map[r] == n;
        even = even && (n == 0 || ranks == first);
        first = n == 0 ? ranks : first;
    }
    if (even)
        snprintf(want, sizeof(want), "path: %u node%s x %u rank%s;", s->nnodes, s->nnodes == 1 ? "" : "s",
                 first, first == 1 ? "" : "s");
    else
        snprintf(want, sizeof(want), "path: %u ranks on %u nodes: ", s->nranks, s->nnodes);
    for (unsigned n = 0; n < s->nnodes; n++)
        HT_CHECK(ht_log_has(c, n, want), "the log of node %u has no line with '%s'", n, want);
}

/* Who shares a node is a matter of the daemon, not of names: two daemons that are called alike are two nodes. */
static void same_name(void)
{
    static const char *const keys[] = {"node_name = twin", NULL};
    struct hpf_cluster *c = ht_cluster(2, keys);
    struct ht_job job = {.nranks = 4, .fn = rank_main};
    ht_run(c, &job);
    ht_cluster_end(c);
}

/* Blocks large enough to be left to I/O threads, small ones in between, and nothing whole. */
static int io_rank_main(struct hpf_rank *me)
{
    static const uint64_t counts[] = {700001, 17, 1300007, 300};
    struct ht_env e;
    if (ht_join(&e, me, 0, NULL) != 0)
        return 1;
    for (unsigned i = 0; i < 3 * 4; i++) {
        struct ht_coll c = {.coll = i % 3 == 0   ? HRP_ALL_REDUCE
                                    : i % 3 == 1 ? HRP_REDUCE_SCATTER
                                                 : HRP_ALL_GATHER,
                            .dtype = HRP_F32,
                            .count = i % 3 == 0 ? counts[i % 4] : counts[i % 4] / me->nranks,
                            .send_mem = HT_ALLOC,
                            .recv_mem = HT_ALLOC};
        if (ht_collective(&e, &c) != 0)
            return 1;
    }
    return ht_leave(&e);
}

static void io_threads(void)
{
    static const char *const keys[][3] = {{"io_threads = 2", "tcp_streams = 5", NULL},
                                          {"io_threads = 1", "spin_us = 0", NULL}};
    static const struct shape some[] = {{"4x1", 4, 4, {0, 1, 2, 3}}, {"2x2", 2, 4, {0, 0, 1, 1}}};
    for (unsigned i = 0; i < 2; i++) {
        printf("%s with %s\n", some[i].name, keys[i][0]);
        fflush(stdout);
        struct hpf_cluster *c = ht_cluster(some[i].nnodes, keys[i]);
        struct ht_job job = {.nranks = some[i].nranks, .map = some[i].map, .fn = io_rank_main};
        ht_run(c, &job);
        /* They move the bytes of sockets, so a daemon that never exchanges over tcp has none. */
        unsigned want = ht_over_verbs() ? 0 : 2 - i;
        char said[32];
        snprintf(said, sizeof(said), "\"io_threads\": %u,", want);
        char *status = ht_status(c, 0);
        HT_CHECK(strstr(status, said), "the status does not say %s: %s", said, status);
        free(status);
        ht_cluster_end(c);
    }
}

int main(void)
{
    for (size_t i = 0; i < NSHAPES; i++) {
        printf("%s\n", shapes[i].name);
        fflush(stdout);
        struct hpf_cluster *c = ht_cluster(shapes[i].nnodes, NULL);
        struct ht_job job = {.nranks = shapes[i].nranks, .map = shapes[i].map, .fn = rank_main};
        ht_run(c, &job);
        check_layout_line(c, &shapes[i]);
        ht_cluster_end(c);
    }
    same_name();
    io_threads();
    return 0;
}
