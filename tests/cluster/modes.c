/* SPDX-License-Identifier: MIT */
/*
 * What a job may choose: each algorithm by name, with the order of additions left open where the algorithm needs
 * that (then within the error bound, otherwise bit for bit), and f32 between the nodes for 16-bit floats.
 * timeout: 180
 */
#include <stdio.h>

#include "tests/lib/harness.h"

struct mode {
    const char *name;
    int algo, reproducible, wire_f32;
};
static const struct mode modes[] = {
    {"direct", HCLIENT_ALGO_DIRECT, HCLIENT_ON, HCLIENT_DEFAULT},
    {"gather", HCLIENT_ALGO_GATHER, HCLIENT_ON, HCLIENT_DEFAULT},
    {"direct, f32 on the wire", HCLIENT_ALGO_DIRECT, HCLIENT_DEFAULT, HCLIENT_ON},
    {"gather, f32 on the wire", HCLIENT_ALGO_GATHER, HCLIENT_DEFAULT, HCLIENT_ON},
    {"any order", HCLIENT_ALGO_AUTO, HCLIENT_OFF, HCLIENT_DEFAULT},
    {"ring", HCLIENT_ALGO_RING, HCLIENT_OFF, HCLIENT_DEFAULT},
    {"tree", HCLIENT_ALGO_TREE, HCLIENT_OFF, HCLIENT_DEFAULT},
    {"pairwise", HCLIENT_ALGO_PAIRWISE, HCLIENT_OFF, HCLIENT_DEFAULT},
    {"ring, f32 on the wire", HCLIENT_ALGO_RING, HCLIENT_OFF, HCLIENT_ON},
};
#define NMODES (sizeof(modes) / sizeof(modes[0]))

static int collectives(struct ht_env *e)
{
    static const uint64_t counts[] = {777, 30011};
    unsigned n = 0;
    for (unsigned dtype = 0; dtype < HRP_NDTYPES; dtype++) {
        for (unsigned redop = 0; redop < HRP_NREDOPS; redop++) {
            for (unsigned k = 0; k < 2; k++, n++) {
                struct ht_coll c = {.coll = n % 7 == 6 ? HRP_REDUCE_SCATTER : HRP_ALL_REDUCE,
                                    .dtype = dtype,
                                    .redop = redop,
                                    .count = counts[k],
                                    .inplace = n % 2,
                                    .send_mem = HT_ALLOC,
                                    .recv_mem = HT_ALLOC};
                if (ht_collective(e, &c) != 0)
                    return 1;
            }
        }
        struct ht_coll c = {
            .coll = HRP_BROADCAST, .dtype = dtype, .root = dtype % e->me->nranks, .count = 20011};
        if (ht_collective(e, &c) != 0)
            return 1;
        c = (struct ht_coll){.coll = HRP_ALL_GATHER, .dtype = dtype, .count = 5003};
        if (ht_collective(e, &c) != 0)
            return 1;
    }
    return 0;
}

static int rank_main(struct hpf_rank *me)
{
    for (unsigned i = 0; i < NMODES; i++) {
        hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
        config.algo = modes[i].algo;
        config.reproducible = modes[i].reproducible;
        config.wire_f32 = modes[i].wire_f32;
        bool power_of_two = (me->nnodes & (me->nnodes - 1)) == 0;
        if ((config.algo == HCLIENT_ALGO_PAIRWISE && !power_of_two) ||
            (config.algo == HCLIENT_ALGO_TREE && me->nnodes < 4))
            continue;
        if (me->rank == 0) {
            printf("%u nodes, %s\n", me->nnodes, modes[i].name);
            fflush(stdout);
        }
        struct ht_env e;
        if (ht_join(&e, me, i, &config) != 0 || collectives(&e) != 0 || ht_leave(&e) != 0)
            return 1;
    }
    return 0;
}

int main(void)
{
    static const unsigned nodes[] = {2, 4, 5};
    for (unsigned i = 0; i < 3; i++) {
        struct hpf_cluster *c = ht_cluster(nodes[i], NULL);
        struct ht_job job = {.nranks = nodes[i] + 2, .fn = rank_main, .expected_bytes = 1 << 18};
        unsigned map[8];
        for (unsigned r = 0; r < job.nranks; r++)
            map[r] = r % nodes[i]; /* the first two nodes have two ranks */
        job.map = map;
        ht_run(c, &job);
        ht_cluster_end(c);
    }
    return 0;
}
