/* SPDX-License-Identifier: MIT */
/* What engines keep on each GPU, in the order in which it is made. */
#ifndef HRD_GPU_PARTS_H
#define HRD_GPU_PARTS_H

#include "daemon/gpu/gpu.h"

extern const struct hrd_gpu_part *const hrd_gpu_parts[HRD_GPU_NPARTS];
extern const struct hrd_gpu_part hrd_gpu_part_dma; /* dma_part.c */

#endif
