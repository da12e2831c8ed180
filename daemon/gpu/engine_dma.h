/* SPDX-License-Identifier: MIT */
/* The dma engine: GPU buffers by copy engines and CPU arithmetic, no kernel ever. */
#ifndef HRD_ENGINE_DMA_H
#define HRD_ENGINE_DMA_H

#include "daemon/engine.h"
#include "daemon/gpu/gpu.h"

/* host does the arithmetic and outlives it. bounce_bytes of host memory are mapped, given to gpus to pin, and stay until
   free(), which comes after hrd_gpus_stop(). NULL with errno. */
struct hrd_engine *hrd_engine_dma_new(struct hrd_gpus *gpus, struct hrd_engine *host, uint64_t bounce_bytes);

#endif
