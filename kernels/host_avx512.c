/* SPDX-License-Identifier: MIT */
/*
 * The arithmetic in AVX-512 F, BW, DQ and VL. Only called after host.c found them. The bf16 instructions are
 * left alone: they flush subnormals.
 */
#include "kernels/host.h"

#if HRK_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#define F32_LANES ((size_t)16)
#define F64_LANES ((size_t)8)
#define INT_BYTES 64
#define PAIRS 1

typedef __m512 f32_v;
typedef __m512d f64_v;

HRK_INLINE f32_v f32_load(unsigned in, const uint8_t *p)
{
    if (in == HRP_F32)
        return _mm512_loadu_ps((const float *)p);

    __m256i h = _mm256_loadu_si256((const __m256i *)p);

    if (in == HRP_F16)
        return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

HRK_INLINE __m512 f32_to_f32(f32_v v)
{
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32((int)HRK_NAN_F32));

    return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), nan);
}

HRK_INLINE __m256i f32_to_f16(f32_v v)
{
    return _mm512_cvtps_ph(f32_to_f32(v), _MM_FROUND_TO_NEAREST_INT);
}

/* The upper half of each element is the bf16. */
HRK_INLINE __m512i f32_round_bf16(f32_v v)
{
    const __m512i u = _mm512_castps_si512(f32_to_f32(v));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));

    return _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}

HRK_INLINE __m256i f32_to_bf16(f32_v v)
{
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(f32_round_bf16(v), 16));
}

HRK_INLINE f64_v f64_load(unsigned in, const uint8_t *p)
{
    if (in == HRP_F64)
        return _mm512_loadu_pd((const double *)p);
    if (in == HRP_F32)
        return _mm512_cvtps_pd(_mm256_loadu_ps((const float *)p));

    __m256i h = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));

    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(h, 16)));
}

HRK_INLINE __m512d f64_to_f64(f64_v v)
{
    const __m512d nan = _mm512_castsi512_pd(_mm512_set1_epi64((long long)HRK_NAN_F64));

    return _mm512_mask_mov_pd(v, _mm512_cmp_pd_mask(v, v, _CMP_UNORD_Q), nan);
}

HRK_INLINE __m256 f64_to_f32(f64_v v)
{
    return _mm512_cvtpd_ps(f64_to_f64(v));
}

HRK_INLINE __m128i f64_to_bf16(f64_v v)
{
    __m256i u = _mm256_castps_si256(f64_to_f32(v));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));

    u = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_cvtepi32_epi16(_mm256_srli_epi32(u, 16));
}

/* min and max return their second operand unless the first is strictly better, also where one is NaN. */
#define FLOAT_OPS(a, s)                                                                                   \
    HRK_INLINE a##_v a##_add(a##_v acc, a##_v x)                                                          \
    {                                                                                                     \
        return _mm512_add_##s(acc, x);                                                                    \
    }                                                                                                     \
    HRK_INLINE a##_v a##_mul(a##_v acc, a##_v x)                                                          \
    {                                                                                                     \
        return _mm512_mul_##s(acc, x);                                                                    \
    }                                                                                                     \
    HRK_INLINE a##_v a##_div(a##_v acc, a##_v x)                                                          \
    {                                                                                                     \
        return _mm512_div_##s(acc, x);                                                                    \
    }                                                                                                     \
    HRK_INLINE a##_v a##_min(a##_v acc, a##_v x)                                                          \
    {                                                                                                     \
        return _mm512_mask_mov_##s(_mm512_min_##s(x, acc), _mm512_cmp_##s##_mask(x, x, _CMP_UNORD_Q), x); \
    }                                                                                                     \
    HRK_INLINE a##_v a##_max(a##_v acc, a##_v x)                                                          \
    {                                                                                                     \
        return _mm512_mask_mov_##s(_mm512_max_##s(x, acc), _mm512_cmp_##s##_mask(x, x, _CMP_UNORD_Q), x); \
    }

FLOAT_OPS(f32, ps)
FLOAT_OPS(f64, pd)

HRK_INLINE f32_v f32_set(uint32_t n)
{
    return _mm512_set1_ps((float)n);
}

HRK_INLINE f64_v f64_set(uint32_t n)
{
    return _mm512_set1_pd((double)n);
}

HRK_INLINE void f32_split(const uint8_t *p, f32_v *even, f32_v *odd)
{
    const __m512i v = _mm512_loadu_si512(p);

    *even = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)));
}

HRK_INLINE __m512i f32_pair_to_bf16(f32_v even, f32_v odd)
{
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(f32_round_bf16(even), 16),
                                   f32_round_bf16(odd));
}

HRK_INLINE void f32_interleave(f32_v *even, f32_v *odd)
{
    const __m512i lo = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i hi = _mm512_add_epi32(lo, _mm512_set1_epi32(8));
    const __m512 e = *even, o = *odd;

    *even = _mm512_permutex2var_ps(e, lo, o);
    *odd = _mm512_permutex2var_ps(e, hi, o);
}

HRK_INLINE void f64_widen(f32_v x, f64_v *lo, f64_v *hi)
{
    *lo = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    *hi = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
}

HRK_INLINE f32_v f64_narrow(f64_v lo, f64_v hi)
{
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(lo)), _mm512_cvtpd_ps(hi), 1);
}

#include "kernels/host_level.inc.h"

static void level_stream(void *dst, const void *src, size_t bytes)
{
    size_t i = -(uintptr_t)dst & 63;
    uint8_t *d = dst;
    const uint8_t *s = src;

    if (i > bytes)
        i = bytes;
    memcpy(d, s, i);
    for (; bytes - i >= 64; i += 64)
        _mm512_stream_si512((__m512i *)(void *)(d + i), _mm512_loadu_si512(s + i));
    memcpy(d + i, s + i, bytes - i);
}

static void level_fence(void)
{
    _mm_sfence();
}

const struct hrk_host_ops hrk_host_avx512 = {level_select, level_stream, level_fence};

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
