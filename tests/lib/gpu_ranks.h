/* SPDX-License-Identifier: MIT */
/*
 * Ranks of a job that measure all-reduces on GPU buffers together: they meet between any two steps, the slowest one's time
 * counts, and every element of a result is checked. tests/gpu/compare.c and tests/gpu/one.c are made of this.
 */
#ifndef TEST_LIB_GPU_RANKS_H
#define TEST_LIB_GPU_RANKS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "client/hclient.h"
#include "client/perf/ranks.h"
#include "tests/lib/gpu_job.h"

#define GR_MAX_RANKS 32u
#define GR_PIECE (UINT64_C(4) << 20)

/* Shared by all ranks and the parent; zero at first. */
struct gr_page {
    hclient_unique_id_t id;
    _Atomic uint32_t here, round; /* of the meeting */
    _Atomic uint32_t failed;
    double us[GR_MAX_RANKS]; /* each rank's last time */
    _Atomic uint64_t wrong;
    _Atomic uint64_t busy_launches; /* of the job's own kernels, ended */
};

struct gr_rank {
    struct hpf_rank *me;
    struct gr_page *page;
    struct gj_gpu gpu;
    hclient_comm_t comm;
    uint64_t send, recv; /* device */
    uint8_t *piece;      /* pinned, of GR_PIECE bytes */
    uint32_t round;
    /* The job's own kernels: */
    struct gj_gpu busy_gpu;
    uint64_t busy_bytes;
    pthread_t busy_thread;
    _Atomic bool busy_stop;
};

/* Buffers of max_bytes on that GPU, which is current from here on. The rest of r is zero, but for me and page. */
void gr_open(struct gr_rank *r, const struct hrg_driver *drv, int ordinal, uint64_t max_bytes);
/* The same with buffers of another making than gj_alloc()'s. */
typedef uint64_t (*gr_allocate)(struct gj_gpu *g, uint64_t bytes);
void gr_open_in(struct gr_rank *r, const struct hrg_driver *drv, int ordinal, uint64_t max_bytes,
                gr_allocate allocate);

/* Returns 1; the others' next meeting fails too. */
int gr_fail(struct gr_rank *r, const char *what, const char *why);
int gr_call_failed(struct gr_rank *r, const char *call);

/* Spins: a sleeper would start late. False when another rank failed or does not come. */
bool gr_meet(struct gr_rank *r);
/* Of what each rank wrote to page->us; between two meetings. */
double gr_slowest(const struct gr_rank *r);
/* A communicator of all ranks; overlap: "idle", "compute" or "auto". */
int gr_join(struct gr_rank *r, const char *overlap);

/* send := small random whole numbers, whose sum over 32 ranks is exact in each type that is used (f32, bf16) in any order. */
void gr_fill(struct gr_rank *r, unsigned type, uint64_t bytes, uint64_t seed);
/* recv := garbage. */
void gr_clear(struct gr_rank *r, uint64_t bytes);
/* Elements of recv that are not the sum. */
uint64_t gr_count_wrong(struct gr_rank *r, unsigned type, uint64_t bytes, uint64_t seed);
/* Of all ranks, after each counted its own. 0, or 1 when another failed. */
int gr_sum_wrong(struct gr_rank *r, uint64_t mine, uint64_t *all);

/* An all-reduce of send into recv on the rank's stream: hreduce's, or somebody else's. 0, or 1 after gr_fail(). */
typedef int (*gr_call)(struct gr_rank *r, unsigned type, uint64_t bytes);
int gr_all_reduce(struct gr_rank *r, unsigned type, uint64_t bytes);
/* n of them enqueued at a common start; *us: of one, on the slowest rank. */
int gr_timed(struct gr_rank *r, gr_call call, unsigned type, uint64_t bytes, unsigned n, double *us);

/* Kernels over this many bytes keep every multiprocessor of the rank's GPU at work, counted in page->busy_launches. */
int gr_busy_start(struct gr_rank *r, uint64_t bytes);
void gr_busy_stop(struct gr_rank *r);

#endif
