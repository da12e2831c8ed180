/* SPDX-License-Identifier: MIT */
/* What tests/gpu/deaths.c (who is killed when, tables) and deaths_rank.c (a rank's rounds) share. */
#ifndef TEST_LIB_DEATHS_H
#define TEST_LIB_DEATHS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "client/perf/ranks.h"
#include "tests/lib/gpu_ranks.h"

#define DEATHS_MAX_ROUNDS 256u
#define DEATHS_MAX_RANKS 8u
/* From SIGKILL to a released stream and an error in words. The library and the daemons promise a few seconds at most. */
#define DEATHS_BOUND_NS UINT64_C(20000000000)

enum deaths_victim { DEATHS_DAEMON, DEATHS_RANK };

struct deaths_plan {
    enum deaths_victim victim;
    const char *engine; /* as the path report names it */
    bool vmm;           /* buffers of cuMemCreate; else of cuMemAlloc */
    unsigned nodes, ranks_a_node;
};

/* A rank's argument. */
struct deaths_job {
    const struct deaths_plan *plan;
    uint64_t bytes, seed;
    uint64_t stays_ns; /* how long the released buffer is looked at */
    unsigned rounds;   /* 0: join, one checked op, leave */
};

/* Shared by all ranks and the parent; zero at first. */
struct deaths_page {
    struct gr_page ranks;
    _Atomic uint32_t streaming;                      /* ranks whose ops run, counted on from round to round */
    _Atomic uint64_t killed_ns[DEATHS_MAX_ROUNDS];   /* when the parent killed */
    _Atomic uint32_t node_killed[DEATHS_MAX_ROUNDS]; /* a daemon's; written before killed_ns */
    _Atomic uint32_t stop;                           /* the parent: this round's death was the last */
    _Atomic uint32_t cut;                            /* ops that a death ended */
    _Atomic uint64_t released_ns[DEATHS_MAX_ROUNDS]; /* from SIGKILL to the slowest released stream */
    char said[300]; /* the sentence that rank 0, or the survivor, got in the first round */
};

/* A rank's process. */
int deaths_rank(struct hpf_rank *me);

#endif
