/* SPDX-License-Identifier: MIT */
#include "client/perf/pattern.h"

#include <string.h>

/* ---- 16-bit floats, on integers alone: an independent check of what kernels/ does ------------------------ */

static uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static float float_of(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* v / 2^shift to nearest, ties to even; shift 1..31. */
static uint32_t round_shift(uint32_t v, unsigned shift)
{
    uint32_t half = 1u << (shift - 1), rest = v & ((1u << shift) - 1), q = v >> shift;
    return q + (rest > half || (rest == half && (q & 1)));
}

uint16_t hpf_f32_to_f16(float f)
{
    uint32_t u = bits_of(f), sign = u >> 16 & 0x8000, exp = u >> 23 & 0xff, man = u & 0x7fffff;
    if (exp == 0xff)
        return (uint16_t)(man ? 0x7e00 : sign | 0x7c00);
    if (exp < 102) /* below half of the smallest subnormal 2^-24 */
        return (uint16_t)sign;
    if (exp < 113) /* subnormal: the implicit one is shifted in; a carry makes the smallest normal number */
        return (uint16_t)(sign | round_shift(man | 0x800000, 126 - exp));
    /* Rounding may carry into the exponent, up to infinity. */
    uint32_t h = round_shift((exp - 112) << 23 | man, 13);
    return (uint16_t)(sign | (exp > 143 || h > 0x7c00 ? 0x7c00 : h));
}

float hpf_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = h >> 10 & 0x1f, man = h & 0x3ff;
    if (exp == 0) {
        float v = (float)man * 0x1p-24f;
        return sign ? -v : v;
    }
    if (exp == 31)
        return float_of(sign | 0x7f800000 | man << 13);
    return float_of(sign | (exp + 112) << 23 | man << 13);
}

uint16_t hpf_f32_to_bf16(float f)
{
    uint32_t u = bits_of(f);
    if ((u & 0x7fffffff) > 0x7f800000)
        return 0x7fc0;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

float hpf_bf16_to_f32(uint16_t b)
{
    return float_of((uint32_t)b << 16);
}

/* ---- random numbers by counter --------------------------------------------------------------------------- */

static inline uint32_t mix(uint32_t h)
{
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    return h ^ h >> 16;
}

static uint32_t key_of(uint64_t seed, unsigned rank, uint64_t high)
{
    uint32_t k = mix((uint32_t)seed ^ 0x243f6a88u);
    k = mix(k ^ (uint32_t)(seed >> 32) ^ 0x85a308d3u);
    k = mix(k ^ rank ^ 0x13198a2eu);
    return mix(k ^ (uint32_t)high ^ 0x03707344u);
}

static inline uint32_t at(uint32_t key, uint32_t i)
{
    return mix(i * 0x9e3779b1u ^ key);
}

static inline float to_float(uint32_t h, unsigned redop)
{
    if (redop != HRP_PROD)
        return (float)(int32_t)((h >> 8) - 0x800000u) * 0x1p-23f;
    float v = 0.75f + (float)(h >> 9) * (0.5625f * 0x1p-23f);
    return h & 1 ? -v : v;
}

/* Odd factors keep a product of integers from becoming 0. */
static inline uint64_t to_int(uint64_t h, unsigned redop)
{
    return redop == HRP_PROD && (h & 0x60) ? h | 1 : h;
}

static inline uint64_t wide(uint32_t key, uint32_t i)
{
    return (uint64_t)at(key ^ 0x5bd1e995u, i) << 32 | at(key, i);
}

static inline double to_double(uint64_t h, unsigned redop)
{
    if (redop != HRP_PROD)
        return (double)(int64_t)((h >> 11) - (UINT64_C(1) << 52)) * 0x1p-52;
    double v = 0.75 + (double)(h >> 12) * (0.5625 * 0x1p-52);
    return h & 1 ? -v : v;
}

#define STORE(type, expr)                                   \
    for (size_t k = 0; k < n; k++) {                        \
        type v = (type)(expr);                              \
        memcpy((char *)dst + k * sizeof(v), &v, sizeof(v)); \
    }                                                       \
    break

/* Elements whose index has the same upper half. */
static void fill(unsigned dtype, unsigned redop, uint32_t key, uint32_t i, size_t n, void *dst)
{
    switch (dtype) {
    case HRP_F32:
        STORE(float, to_float(at(key, i + (uint32_t)k), redop));
    case HRP_F64:
        STORE(double, to_double(wide(key, i + (uint32_t)k), redop));
    case HRP_F16:
        STORE(uint16_t, hpf_f32_to_f16(to_float(at(key, i + (uint32_t)k), redop)));
    case HRP_BF16:
        STORE(uint16_t, hpf_f32_to_bf16(to_float(at(key, i + (uint32_t)k), redop)));
    case HRP_I8:
    case HRP_U8:
        STORE(uint8_t, to_int(at(key, i + (uint32_t)k), redop));
    case HRP_I32:
    case HRP_U32:
        STORE(uint32_t, to_int(at(key, i + (uint32_t)k), redop));
    default:
        STORE(uint64_t, to_int(wide(key, i + (uint32_t)k), redop));
    }
}

void hpf_pattern(unsigned dtype, unsigned redop, uint64_t seed, unsigned rank, uint64_t first, size_t n,
                 void *dst)
{
    char *p = dst;
    while (n > 0) {
        uint64_t left = (UINT64_C(1) << 32) - (uint32_t)first;
        size_t now = n < left ? n : (size_t)left;
        fill(dtype, redop, key_of(seed, rank, first >> 32), (uint32_t)first, now, p);
        p += now * hrp_dtype_size(dtype);
        first += now;
        n -= now;
    }
}

/* ---- guards ---------------------------------------------------------------------------------------------- */

void hpf_guard_fill(void *p, size_t bytes, uint32_t seed)
{
    for (size_t i = 0; i < bytes; i++)
        ((uint8_t *)p)[i] = (uint8_t)at(seed, (uint32_t)i);
}

size_t hpf_guard_check(const void *p, size_t bytes, uint32_t seed)
{
    size_t bad = 0;
    for (size_t i = 0; i < bytes; i++)
        bad += ((const uint8_t *)p)[i] != (uint8_t)at(seed, (uint32_t)i);
    return bad;
}
