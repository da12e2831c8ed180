/* SPDX-License-Identifier: MIT */
/*
 * The sm engine: kernels that read every rank's buffer, wherever it lies, and write every rank's result. Work is cut into
 * shards, one a local GPU, so that no GPU sums for the others; small work is one launch on one of them, in turn.
 */
#ifndef HRD_ENGINE_SM_H
#define HRD_ENGINE_SM_H

#include "daemon/engine.h"
#include "daemon/gpu/gpu.h"

/* What the engine keeps on a GPU: kernels, two streams, words that kernels raise, one submit thread. */
extern const struct hrd_gpu_part hrd_engine_sm_part;

/*
 * `host` does the work that touches no GPU memory; it is borrowed and must outlive this engine, and the agent polls it by
 * itself. gpus is borrowed. NULL with errno.
 */
struct hrd_engine *hrd_engine_sm_new(struct hrd_gpus *gpus, struct hrd_engine *host);

#endif
