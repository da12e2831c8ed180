/* SPDX-License-Identifier: MIT */
/*
 * One GPU of the sm engine. Launches go through lanes: a lane is a stream and a ring of launches that the agent fills, a
 * launcher (submit.h) empties into the driver, and the kernels count off by a word in pinned memory.
 */
#ifndef HRD_SM_PART_H
#define HRD_SM_PART_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/engine.h"
#include "daemon/gpu/gpu.h"
#include "daemon/gpu/submit.h"
#include "kernels/gpu_kernels.h"

/* Small launches have a lane of their own, so that they need not wait for large ones. */
enum { SM_SMALL, SM_LARGE, SM_LANES };
#define SM_RING 64u /* launches of a lane under way */
#define SM_CACHED_PAGES 256u
#define SM_CACHED_VIEWS 256u

struct sm_entry {
    struct hrg_launch launch;
    struct hrd_work *work;
    uint64_t bytes;     /* of the shard, in its wider type */
    uint64_t queued_ns; /* when the agent posted it */
    hrg_result result;  /* of the launch; with the time when the driver had it: written before `launched` */
    uint64_t launched_ns;
};

struct sm_lane {
    hrg_stream stream;
    _Atomic uint64_t *word; /* pinned; launches that are over; written by kernels */
    uint64_t word_device, count_device;
    _Atomic uint64_t posted;   /* entries ever filled; the agent's */
    _Atomic uint64_t launched; /* entries ever given to the driver; the launcher's */
    uint64_t over;             /* entries ever taken off; the agent's */
    uint64_t over_ns;          /* when, or when the driver was last asked how the stream does */
    struct sm_entry ring[SM_RING];
};

struct sm_part {
    struct hrd_gpu_dev *dev;
    hrg_module module;
    hrg_function function[HRG_NKERNELS];
    uint32_t max_blocks;
    _Atomic uint64_t *pinned; /* words of the lanes, then the abort word */
    uint64_t pinned_device;
    hrg_ptr counters;
    struct sm_lane *lane[SM_LANES];
    struct hrd_submit submit;
    /* the agent's: */
    uint64_t best_ns[64];             /* shortest time seen, by the logarithm of bytes */
    uint64_t last_wait_ns, waited_ns; /* of the last launch; smoothed */
    uint64_t measured_ns;             /* when that was */
    struct {
        uintptr_t page;
        uint64_t delta; /* device address minus ours */
    } cached[SM_CACHED_PAGES];
    uint64_t views_epoch; /* of what is in: */
    struct {
        uint64_t base, view;
    } view[SM_CACHED_VIEWS];
};

/* The device address of pinned host memory, for kernels of this GPU; 0 and *error when the driver does not know it. Agent
   thread; makes the GPU's context current on a miss. */
uint64_t sm_part_address(struct sm_part *p, const void *host, hrg_result *error);
/* What kernels of this GPU call the base of a span in GPU memory; 0: they cannot reach it. Agent thread. */
uint64_t sm_part_view(struct sm_part *p, const struct hrd_gpus *gpus, const struct hrd_span *s);
/* The entry that the next sm_part_post() publishes; NULL: the lane is full. */
struct sm_entry *sm_part_entry(struct sm_part *p, unsigned lane);
void sm_part_post(struct sm_part *p, unsigned lane);
/* The oldest entry of a lane when it is over (result set, or its word was raised), else NULL. The caller then counts `over`. */
struct sm_entry *sm_part_over(struct sm_lane *l);
/* How the lane's stream does after a long silence: HRG_ERROR_NOT_READY while it works. */
hrg_result sm_part_ask(struct sm_part *p, struct sm_lane *l);

#endif
