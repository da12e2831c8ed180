/* SPDX-License-Identifier: MIT */
/* The arithmetic in plain C: any machine, and the text to read the others against. */
#include <float.h>

#include "kernels/host.h"

_Static_assert(FLT_EVAL_METHOD == 0, "float and double expressions must round to their own type");

#define F32_LANES ((size_t)1)
#define F64_LANES ((size_t)1)
#define INT_BYTES 0
#define PAIRS 0

typedef float f32_v;
typedef double f64_v;

static inline float f32_of_bits(uint32_t u)
{
    float f;

    memcpy(&f, &u, sizeof(f));
    return f;
}

static inline uint32_t bits_of_f32(float f)
{
    uint32_t u;

    memcpy(&u, &f, sizeof(u));
    return u;
}

static inline float f32_of_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fff;

    if (mag >= 0x7c00)
        return f32_of_bits(sign | 0x7f800000 | mag << 13);
    if (mag >= 0x0400)
        return f32_of_bits(sign | ((mag << 13) + (112u << 23)));
    return f32_of_bits(sign | bits_of_f32((float)mag * 0x1p-24f));
}

HRK_INLINE f32_v f32_load(unsigned in, const uint8_t *p)
{
    uint32_t u;
    uint16_t h;

    if (in == HRP_F32) {
        memcpy(&u, p, sizeof(u));
        return f32_of_bits(u);
    }
    memcpy(&h, p, sizeof(h));
    return in == HRP_F16 ? f32_of_f16(h) : f32_of_bits((uint32_t)h << 16);
}

HRK_INLINE float f32_to_f32(f32_v v)
{
    return v != v ? f32_of_bits(HRK_NAN_F32) : v;
}

HRK_INLINE uint16_t f32_to_f16(f32_v v)
{
    uint32_t u = bits_of_f32(v), sign = u >> 16 & 0x8000, mag = u & 0x7fffffff;

    if (mag > 0x7f800000)
        return HRK_NAN_F16;
    if (mag >= 0x47800000)
        return (uint16_t)(sign | 0x7c00);
    /* Below 2^-14 the result is a multiple of 2^-24, the spacing of floats at 0.5: the addition rounds. */
    if (mag < 0x38800000)
        return (uint16_t)(sign | (bits_of_f32(f32_of_bits(mag) + 0.5f) - 0x3f000000));
    mag += 0x0fff + (mag >> 13 & 1);
    return (uint16_t)(sign | (mag - (112u << 23)) >> 13);
}

HRK_INLINE uint16_t f32_to_bf16(f32_v v)
{
    uint32_t u = bits_of_f32(v);

    return v != v ? HRK_NAN_BF16 : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

HRK_INLINE f64_v f64_load(unsigned in, const uint8_t *p)
{
    double d;

    if (in != HRP_F64)
        return f32_load(in, p);
    memcpy(&d, p, sizeof(d));
    return d;
}

HRK_INLINE double f64_to_f64(f64_v v)
{
    const uint64_t nan = HRK_NAN_F64;

    if (v != v)
        memcpy(&v, &nan, sizeof(v));
    return v;
}

HRK_INLINE float f64_to_f32(f64_v v)
{
    return f32_to_f32((float)v);
}

HRK_INLINE uint16_t f64_to_bf16(f64_v v)
{
    return f32_to_bf16((float)v);
}

#define FLOAT_OPS(a)                             \
    HRK_INLINE a##_v a##_add(a##_v acc, a##_v x) \
    {                                            \
        return acc + x;                          \
    }                                            \
    HRK_INLINE a##_v a##_mul(a##_v acc, a##_v x) \
    {                                            \
        return acc * x;                          \
    }                                            \
    HRK_INLINE a##_v a##_div(a##_v acc, a##_v x) \
    {                                            \
        return acc / x;                          \
    }                                            \
    HRK_INLINE a##_v a##_min(a##_v acc, a##_v x) \
    {                                            \
        return x < acc || x != x ? x : acc;      \
    }                                            \
    HRK_INLINE a##_v a##_max(a##_v acc, a##_v x) \
    {                                            \
        return x > acc || x != x ? x : acc;      \
    }                                            \
    HRK_INLINE a##_v a##_set(uint32_t n)         \
    {                                            \
        return (a##_v)n;                         \
    }

FLOAT_OPS(f32)
FLOAT_OPS(f64)

#include "kernels/host_level.inc.h"

static void level_stream(void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}

static void level_fence(void) {}

const struct hrk_host_ops hrk_host_scalar = {level_select, level_stream, level_fence};
