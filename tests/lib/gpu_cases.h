/* SPDX-License-Identifier: MIT */
/*
 * The cases that every implementation of the GPU kernels has to pass: on a GPU, by the CPU twin, emulated. Each
 * is compared with the scalar level of kernels.h, every bit, with guard bytes around every destination.
 */
#ifndef TEST_LIB_GPU_CASES_H
#define TEST_LIB_GPU_CASES_H

#include <stdint.h>

#include "kernels/gpu_kernels.h"

/*
 * Where the kernels run. Memory is NBANKS banks of bank_bytes: `host` is this process's copy of one, `device`
 * its address for kernels. Sources and destinations are dealt over the banks.
 */
#define GPU_CASES_BANKS 4u

struct gpu_cases_bank {
    uint8_t *host;
    uint64_t device;
};

struct gpu_cases_lab {
    struct gpu_cases_bank bank[GPU_CASES_BANKS];
    uint64_t bank_bytes; /* at least gpu_cases_bank_bytes() */
    uint32_t max_blocks;
    /* Copies all banks to the device, launches, waits for the signal and copies them back. 0, or an error that
       ends the run. The lab sets the launch's signal. */
    int (*run)(struct gpu_cases_lab *lab, struct hrg_launch *l);
    void *own;
};

uint64_t gpu_cases_bank_bytes(void);

/*
 * All folds, copies and fills. seed makes the inputs; every `thin`-th combination of counts, lengths and
 * alignments runs (1: all), never fewer than one for each type and op. Returns the number of cases, or -1 with
 * the first difference in words in why.
 */
long gpu_cases_run(struct gpu_cases_lab *lab, uint64_t seed, unsigned thin, char *why, size_t why_len);

#endif
