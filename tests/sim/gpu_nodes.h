/* SPDX-License-Identifier: MIT */
/*
 * Whole nodes over GPU buffers in one process, on the fake driver (tests/sim/fake_gpu.h): each node a daemon of its own, each
 * rank with memory on a GPU, every element of an op compared.
 */
#ifndef TEST_SIM_GPU_NODES_H
#define TEST_SIM_GPU_NODES_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/gpu/gpu.h"
#include "tests/sim/agents.h"
#include "tests/sim/fake_gpu.h"

#define GPU_NODES_GPUS 4

/* A rank's GPU memory: its own mapping, and what it should hold. */
struct gpu_rank {
    int gpu;
    hrg_ptr ptr;
    unsigned char *host, *got;
    struct hrd_gpu_import *import;
};

struct gpu_nodes {
    struct sim s;
    const struct hrg_driver *drv;
    hrg_ctx ctx[GPU_NODES_GPUS];
    uint64_t bytes;             /* of each rank; 0: 4 MiB */
    struct hrd_gpus_config cfg; /* of the nodes' GPUs; zeros: defaults of the tests */
    struct hrd_gpus *gpus[SIM_MAX_NODES];
    struct gpu_rank rank[SIM_MAX_RANKS];
    void (*linked)(void); /* NULL, or called when the nodes are linked and no GPU is up */
};
extern struct gpu_nodes gpu_nodes;

/* One comm (77, slot 0) over all ranks; gpu: of each rank. */
void gpu_nodes_start(uint32_t nnodes, uint32_t nranks, const uint32_t *map, const int *gpu,
                     struct sim_options *o);
/* Everything goes; fails when something does not. */
void gpu_nodes_stop(void);
/* The node's answer about a rank's memory; the caller's to free. */
struct hrd_gpu_event *gpu_nodes_answer(uint32_t r, enum hrd_gpu_event_type type);
/* Memory of the rank on this GPU, imported by its node and registered with the agent. */
void gpu_nodes_open(uint32_t r, int gpu);
/* Closes the rank's import. */
void gpu_nodes_close(uint32_t r);
/* From `host` to the GPU; the GPU's memory against `host`, every byte. */
void gpu_nodes_upload(struct gpu_rank *k);
void gpu_nodes_compare(uint32_t r, const char *what);
/* A descriptor over the rank's GPU memory. */
struct hrp_desc gpu_nodes_desc(uint64_t op, const struct hrp_sig *sig, uint64_t in, uint64_t out,
                               uint32_t flags);
/* One op of 32-bit integers, for which sums do not depend on their order; by a stream's ready or not. */
void gpu_nodes_op(uint8_t coll, uint64_t count, bool in_place, uint32_t flags);
/* One that need not work: sums of floats in place, its status on every rank. Returns its number. */
uint64_t gpu_nodes_try(uint32_t *status, char *text, uint32_t flags);

#endif
