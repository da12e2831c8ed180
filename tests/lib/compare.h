/* SPDX-License-Identifier: MIT */
/* What tests/gpu/compare.c (options, tables) and compare_rank.c (a rank's measurements) share. */
#ifndef TEST_LIB_COMPARE_H
#define TEST_LIB_COMPARE_H

#include <stdbool.h>
#include <stdint.h>

#include "client/perf/cluster.h"
#include "client/perf/ranks.h"
#include "tests/lib/gpu_ranks.h"

#define CMP_MAX_SIZES 16u
#define CMP_MAX_TYPES 2u
#define CMP_MAX_ROWS (CMP_MAX_SIZES * CMP_MAX_TYPES)

enum cmp_contender { CMP_NCCL, CMP_HREDUCE, CMP_CONTENDERS };

struct cmp_options {
    unsigned nodes, ranks_a_node;
    uint64_t size[CMP_MAX_SIZES], max_bytes;
    unsigned nsizes;
    unsigned type[CMP_MAX_TYPES], ntypes;
    const char *overlap, *label;
    struct gj_options of_all;
    bool no_nccl, busy;
};

struct cmp_row {
    unsigned type;
    uint64_t bytes;
    double p50[CMP_CONTENDERS], back_to_back[CMP_CONTENDERS]; /* us; 0: not measured */
    uint64_t wrong[CMP_CONTENDERS];                           /* elements, of all ranks */
};

/* Shared by all ranks and the parent; zero at first. */
struct cmp_page {
    struct gr_page ranks;
    char nccl_id[128];
    _Atomic uint32_t without_nccl; /* some rank could not join it */
    char nccl_why[256];
    /* rank 0's: */
    double busy_rate[3]; /* a second: alone, beside NCCL, beside hreduce */
    unsigned nrows;
    struct cmp_row row[CMP_MAX_ROWS];
    char path[4096];
};

/* A rank's process. */
int cmp_rank(struct hpf_rank *me);

#endif
