/* SPDX-License-Identifier: MIT */
#include "daemon/gpu/parts.h"

#include "daemon/gpu/engine_sm.h"

const struct hrd_gpu_part *const hrd_gpu_parts[HRD_GPU_NPARTS] = {
    [HRD_GPU_DMA] = &hrd_gpu_part_dma,
    [HRD_GPU_SM] = &hrd_engine_sm_part,
};
