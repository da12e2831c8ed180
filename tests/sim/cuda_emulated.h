/* SPDX-License-Identifier: MIT */
/* The CUDA kernels' own source run by the CPU, see cuda_emulated.cpp. One launch at a time. */
#ifndef TEST_SIM_CUDA_EMULATED_H
#define TEST_SIM_CUDA_EMULATED_H

#include <stdint.h>

/* As hrg_cpu_launch of kernels/gpu_kernels.h; traps where an access is misaligned. */
int cuda_emulated_launch(const char *name, uint32_t blocks, uint32_t threads, const void *args);

#endif
