/* SPDX-License-Identifier: MIT */
#ifndef HRD_CLOCK_H
#define HRD_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Of CLOCK_MONOTONIC. */
static inline uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

#endif
