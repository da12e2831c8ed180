/* SPDX-License-Identifier: MIT */
/* Time and futexes. Times are CLOCK_MONOTONIC nanoseconds. */
#ifndef HCL_FUTEX_H
#define HCL_FUTEX_H

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define HCL_MS UINT64_C(1000000)
#define HCL_SEC UINT64_C(1000000000)

static inline uint64_t hcl_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * HCL_SEC + (uint64_t)ts.tv_nsec;
}

static inline struct timespec hcl_timespec(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / HCL_SEC), .tv_nsec = (long)(ns % HCL_SEC)};
}

/* Shared futexes (no FUTEX_PRIVATE_FLAG): the words lie in memory of two processes. Any return means: look
   again. */
static inline void hcl_futex_wait(const void *word, uint32_t expected, uint64_t timeout_ns)
{
    struct timespec ts = hcl_timespec(timeout_ns);
    syscall(SYS_futex, word, FUTEX_WAIT, expected, &ts, NULL, 0);
}

static inline void hcl_futex_wake(const void *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* The futex word of a done flag: its low 32 bits. */
static inline const void *hcl_low_word(const _Atomic uint64_t *flag)
{
    return flag; /* little endian (proto/data.h asserts it) */
}

#endif
