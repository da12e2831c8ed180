/* SPDX-License-Identifier: MIT */
/* The arithmetic in AVX2 and F16C. Only called after host.c found both. */
#include "kernels/host.h"

#if HRK_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#define F32_LANES ((size_t)8)
#define F64_LANES ((size_t)4)
#define INT_BYTES 32
#define PAIRS 1

typedef __m256 f32_v;
typedef __m256d f64_v;

HRK_INLINE f32_v f32_load(unsigned in, const uint8_t *p)
{
    if (in == HRP_F32)
        return _mm256_loadu_ps((const float *)p);

    __m128i h = _mm_loadu_si128((const __m128i *)p);

    if (in == HRP_F16)
        return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

HRK_INLINE __m256 f32_to_f32(f32_v v)
{
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32((int)HRK_NAN_F32));

    return _mm256_blendv_ps(v, nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

HRK_INLINE __m128i f32_to_f16(f32_v v)
{
    return _mm256_cvtps_ph(f32_to_f32(v), _MM_FROUND_TO_NEAREST_INT);
}

/* The upper half of each element is the bf16. */
HRK_INLINE __m256i f32_round_bf16(f32_v v)
{
    const __m256i u = _mm256_castps_si256(f32_to_f32(v));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));

    return _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

HRK_INLINE __m128i f32_to_bf16(f32_v v)
{
    const __m256i u = _mm256_srli_epi32(f32_round_bf16(v), 16);

    return _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
}

HRK_INLINE f64_v f64_load(unsigned in, const uint8_t *p)
{
    if (in == HRP_F64)
        return _mm256_loadu_pd((const double *)p);
    if (in == HRP_F32)
        return _mm256_cvtps_pd(_mm_loadu_ps((const float *)p));

    __m128i h = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)p));

    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(h, 16)));
}

HRK_INLINE __m256d f64_to_f64(f64_v v)
{
    const __m256d nan = _mm256_castsi256_pd(_mm256_set1_epi64x((long long)HRK_NAN_F64));

    return _mm256_blendv_pd(v, nan, _mm256_cmp_pd(v, v, _CMP_UNORD_Q));
}

HRK_INLINE __m128 f64_to_f32(f64_v v)
{
    return _mm256_cvtpd_ps(f64_to_f64(v));
}

HRK_INLINE uint64_t f64_to_bf16(f64_v v)
{
    __m128i u = _mm_castps_si128(f64_to_f32(v));
    __m128i odd = _mm_and_si128(_mm_srli_epi32(u, 16), _mm_set1_epi32(1));

    u = _mm_srli_epi32(_mm_add_epi32(u, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff))), 16);
    return (uint64_t)_mm_cvtsi128_si64(_mm_packus_epi32(u, u));
}

/* min and max return their second operand unless the first is strictly better, also where one is NaN. */
#define FLOAT_OPS(a, s)                                                                          \
    HRK_INLINE a##_v a##_add(a##_v acc, a##_v x)                                                 \
    {                                                                                            \
        return _mm256_add_##s(acc, x);                                                           \
    }                                                                                            \
    HRK_INLINE a##_v a##_mul(a##_v acc, a##_v x)                                                 \
    {                                                                                            \
        return _mm256_mul_##s(acc, x);                                                           \
    }                                                                                            \
    HRK_INLINE a##_v a##_div(a##_v acc, a##_v x)                                                 \
    {                                                                                            \
        return _mm256_div_##s(acc, x);                                                           \
    }                                                                                            \
    HRK_INLINE a##_v a##_min(a##_v acc, a##_v x)                                                 \
    {                                                                                            \
        return _mm256_blendv_##s(_mm256_min_##s(x, acc), x, _mm256_cmp_##s(x, x, _CMP_UNORD_Q)); \
    }                                                                                            \
    HRK_INLINE a##_v a##_max(a##_v acc, a##_v x)                                                 \
    {                                                                                            \
        return _mm256_blendv_##s(_mm256_max_##s(x, acc), x, _mm256_cmp_##s(x, x, _CMP_UNORD_Q)); \
    }

FLOAT_OPS(f32, ps)
FLOAT_OPS(f64, pd)

HRK_INLINE f32_v f32_set(uint32_t n)
{
    return _mm256_set1_ps((float)n);
}

HRK_INLINE f64_v f64_set(uint32_t n)
{
    return _mm256_set1_pd((double)n);
}

HRK_INLINE void f32_split(const uint8_t *p, f32_v *even, f32_v *odd)
{
    const __m256i v = _mm256_loadu_si256((const __m256i *)p);

    *even = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000)));
}

HRK_INLINE __m256i f32_pair_to_bf16(f32_v even, f32_v odd)
{
    return _mm256_blend_epi16(_mm256_srli_epi32(f32_round_bf16(even), 16), f32_round_bf16(odd), 0xaa);
}

HRK_INLINE void f32_interleave(f32_v *even, f32_v *odd)
{
    const __m256 lo = _mm256_unpacklo_ps(*even, *odd), hi = _mm256_unpackhi_ps(*even, *odd);

    *even = _mm256_permute2f128_ps(lo, hi, 0x20);
    *odd = _mm256_permute2f128_ps(lo, hi, 0x31);
}

HRK_INLINE void f64_widen(f32_v x, f64_v *lo, f64_v *hi)
{
    *lo = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    *hi = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
}

HRK_INLINE f32_v f64_narrow(f64_v lo, f64_v hi)
{
    return _mm256_set_m128(_mm256_cvtpd_ps(hi), _mm256_cvtpd_ps(lo));
}

#include "kernels/host_level.inc.h"

static void level_stream(void *dst, const void *src, size_t bytes)
{
    size_t i = -(uintptr_t)dst & 31;
    uint8_t *d = dst;
    const uint8_t *s = src;

    if (i > bytes)
        i = bytes;
    memcpy(d, s, i);
    for (; bytes - i >= 32; i += 32)
        _mm256_stream_si256((__m256i *)(void *)(d + i),
                            _mm256_loadu_si256((const __m256i *)(const void *)(s + i)));
    memcpy(d + i, s + i, bytes - i);
}

static void level_fence(void)
{
    _mm_sfence();
}

const struct hrk_host_ops hrk_host_avx2 = {level_select, level_stream, level_fence};

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
