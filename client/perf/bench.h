/* SPDX-License-Identifier: MIT */
/* One measurement: a collective at one size, checked and timed on all ranks together. */
#ifndef HPF_BENCH_H
#define HPF_BENCH_H

#include <stdbool.h>
#include <stdint.h>

#include "client/perf/world.h"

struct hpf_result {
    unsigned coll, dtype, redop, root;
    uint64_t bytes, count; /* of the whole data; of the call */
    bool inplace;
    double time_us;           /* median of the slowest rank's time an op; not blocking: the mean */
    double p99_us;            /* 99th percentile of the same, over the ops */
    double algbw, busbw;      /* 1e9 bytes per second */
    uint64_t wrong;           /* elements, of all ranks and check rounds */
    double tx[HPF_MAX_NODES]; /* bytes sent by each node for one op */
    uint64_t ideal;           /* the least that the busiest node has to send */
    char plan[64];            /* algorithms between the nodes, on the node of rank 0 */
};

/* All ranks call it with the same arguments and get the same result. Returns 0, or -1 with w->err. */
int hpf_bench(struct hpf_world *w, unsigned dtype, unsigned redop, uint64_t bytes, bool inplace,
              struct hpf_result *result);

/* Bytes that the busiest node sends at least, for data of `bytes` in all. */
uint64_t hpf_ideal_bytes(unsigned coll, uint64_t bytes, const struct hpf_layout *l);
/* What algbw is multiplied with to get busbw, as nccl-tests document it. */
double hpf_busbw_factor(unsigned coll, unsigned nranks);

#endif
