/* SPDX-License-Identifier: MIT */
/* What tests/gpu/one.c (plans, tables) and one_rank.c (a rank's measurements) share. */
#ifndef TEST_LIB_ONE_H
#define TEST_LIB_ONE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/perf/ranks.h"
#include "tests/lib/gpu_ranks.h"

#define ONE_MAX_SIZES 6u
#define ONE_MAX_NODES 4u
#define ONE_STAGES 5u /* of stage_ns in the path report */
#define ONE_CHUNK (UINT64_C(512) << 10)

/* What the machine allows, measured in the same run by rank 0 alone. */
enum one_floor {
    ONE_COPY, /* a copy in a stream, and the stream awaited */
    ONE_LAUNCH, /* a launch of the same sum, and the stream awaited; of several nodes also a round trip over TCP */
    ONE_LINK, /* all bytes over the GPU's link with both directions busy, and a chunk each before and behind */
    ONE_MEMORY, /* all bytes read and written at the rate of a copy inside the GPU */
    ONE_NFLOORS
};

struct one_plan {
    const char *name;
    unsigned nodes, ranks_a_node;
    const char *overlap;
    enum one_floor floor;
    double goal; /* at most so many times the floor */
    bool import; /* also what would be staged */
    uint64_t size[ONE_MAX_SIZES];
    unsigned nsizes;
    unsigned busy; /* this many of the sizes also while the job's kernels fill the GPU */
};

/* A rank's argument. */
struct one_job {
    const struct one_plan *plan;
    bool quick, spread;
    unsigned many; /* ops back to back */
    pid_t daemon[ONE_MAX_NODES];
};

struct one_row {
    uint64_t bytes;
    double floor_us;
    double us, mean_us, back_to_back_us;
    double busy_us;                       /* 0: not measured */
    double call_us, back_to_back_call_us; /* that rank 0 spends in the library's call */
    double stage_us[ONE_STAGES], back_to_back_stage_us[ONE_STAGES];
    double cores;                 /* of all daemons, while ops went one by one */
    double job_alone, job_beside; /* the job's kernels a second */
    uint64_t wrong;               /* elements, of all ranks */
};

/* Shared by all ranks and the parent; zero at first. */
struct one_page {
    struct gr_page ranks;
    _Atomic uint32_t port; /* where rank 0 listens for the round trips */
    /* rank 0's: */
    double rtt_us, link_gb_s, copy_gb_s;
    double memory_mib; /* of the GPU's, that the daemons took */
    struct one_row row[ONE_MAX_SIZES];
    unsigned nrows;
    char path[4096];
};

/* A rank's process. */
int one_rank(struct hpf_rank *me);

#endif
