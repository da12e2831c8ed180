/* SPDX-License-Identifier: MIT */
/* Inside of the host arithmetic: what host.c asks of each instruction set. Others include kernels.h. */
#ifndef HRK_HOST_H
#define HRK_HOST_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"

#ifdef __FAST_MATH__
#error "the result of a reduction is defined bit for bit: build without -ffast-math"
#endif

#if defined(__x86_64__)
#define HRK_X86 1
#else
#define HRK_X86 0
#endif

/*
 * Elements first .. first + n - 1 of every source, folded and written to every destination from its element
 * dst_first on. All sources of a few vectors are read before their destinations are written.
 */
struct hrk_block {
    const void *const *src;
    void *const *dst;
    const uint32_t *weight; /* as in struct hrk_fold, after its one-source exception */
    size_t first, dst_first, n;
    unsigned nsrc, ndst;
    uint32_t divisor; /* of float types only; integers are divided by host.c */
    uint8_t out_type;
};

typedef void (*hrk_block_fn)(const struct hrk_block *b);

struct hrk_host_ops {
    /* The loop for this combination of types and op; the same one serves all blocks of a fold. */
    hrk_block_fn (*select)(unsigned in, unsigned out, unsigned op);
    /* Copy without reading the destination into the caches; not ordered before fence(). */
    void (*stream)(void *dst, const void *src, size_t bytes);
    void (*fence)(void);
};

extern const struct hrk_host_ops hrk_host_scalar;
#if HRK_X86
extern const struct hrk_host_ops hrk_host_avx2;
extern const struct hrk_host_ops hrk_host_avx512;
#endif

#define HRK_NAN_F32 UINT32_C(0x7fc00000)
#define HRK_NAN_F64 UINT64_C(0x7ff8000000000000)
#define HRK_NAN_F16 UINT16_C(0x7e00)
#define HRK_NAN_BF16 UINT16_C(0x7fc0)

#define HRK_CAT2(a, b) a##b
#define HRK_CAT(a, b) HRK_CAT2(a, b)
#define HRK_INLINE static inline __attribute__((always_inline, unused))

/* Inline, so that it folds to a constant in the loops. */
HRK_INLINE size_t hrk_size(unsigned dtype)
{
    switch (dtype) {
    case HRP_I8:
    case HRP_U8:
        return 1;
    case HRP_F16:
    case HRP_BF16:
        return 2;
    case HRP_F32:
    case HRP_I32:
    case HRP_U32:
        return 4;
    default:
        return 8;
    }
}

/* Where element i of a block goes in destination d. */
HRK_INLINE uint8_t *hrk_dst(const struct hrk_block *b, unsigned d, size_t i)
{
    return (uint8_t *)b->dst[d] + (b->dst_first + i) * hrk_size(b->out_type);
}

#endif
