/* SPDX-License-Identifier: MIT */
/*
 * All loops of one instruction set and the table of them. Included by host_scalar.c, host_avx2.c and host_avx512.c
 * after they defined F32_LANES, F64_LANES, INT_BYTES (see host_int.inc.h), the functions f32_* and f64_* that
 * host_loop.inc.h names, and the conversions A_to_T from an accumulator to what is stored. With PAIRS, bf16 is taken apart
 * into its even and its odd elements, which are f32 after a shift or a mask; that is what f32_split, f32_pair_to_bf16,
 * f32_interleave, f64_widen and f64_narrow are for.
 */

/* Converted once, stored to every destination at once: a line that was a source too is still at hand. */
#define PUT4(convert)                                                     \
    do {                                                                  \
        const __typeof__(convert(a0)) p0 = convert(a0), p1 = convert(a1); \
        const __typeof__(convert(a0)) p2 = convert(a2), p3 = convert(a3); \
                                                                          \
        for (unsigned d = 0; d < b->ndst; d++) {                          \
            uint8_t *o = hrk_dst(b, d, i);                                \
                                                                          \
            memcpy(o, &p0, sizeof(p0));                                   \
            memcpy(o + sizeof(p0), &p1, sizeof(p0));                      \
            memcpy(o + 2 * sizeof(p0), &p2, sizeof(p0));                  \
            memcpy(o + 3 * sizeof(p0), &p3, sizeof(p0));                  \
        }                                                                 \
    } while (0)

#define PUT1(a)                                        \
    do {                                               \
        const __typeof__(a) p0 = a;                    \
                                                       \
        for (unsigned d = 0; d < b->ndst; d++)         \
            memcpy(hrk_dst(b, d, i), &p0, sizeof(p0)); \
    } while (0)

#define PUT2(a, c)                                   \
    do {                                             \
        const __typeof__(a) p0 = a, p1 = c;          \
                                                     \
        for (unsigned d = 0; d < b->ndst; d++) {     \
            uint8_t *o = hrk_dst(b, d, i);           \
                                                     \
            memcpy(o, &p0, sizeof(p0));              \
            memcpy(o + sizeof(p0), &p1, sizeof(p0)); \
        }                                            \
    } while (0)

#define PUT(convert)                                 \
    do {                                             \
        const __typeof__(convert(v)) q = convert(v); \
                                                     \
        memcpy(p, &q, sizeof(q));                    \
    } while (0)

#define LOAD4(load, step)               \
    do {                                \
        *x0 = load(in, p);              \
        *x1 = load(in, p + (step));     \
        *x2 = load(in, p + 2 * (step)); \
        *x3 = load(in, p + 3 * (step)); \
    } while (0)

HRK_INLINE void f32_load4(unsigned in, const uint8_t *p, f32_v *x0, f32_v *x1, f32_v *x2, f32_v *x3)
{
#if PAIRS
    if (in == HRP_BF16) {
        f32_split(p, x0, x1);
        f32_split(p + sizeof(f32_v), x2, x3);
        return;
    }
#endif
    LOAD4(f32_load, F32_LANES * hrk_size(in));
}

HRK_INLINE void f32_put4(unsigned in, const struct hrk_block *b, size_t i, f32_v a0, f32_v a1, f32_v a2,
                         f32_v a3)
{
    (void)in;
#if PAIRS
    if (in == HRP_BF16 && b->out_type == HRP_BF16) {
        PUT2(f32_pair_to_bf16(a0, a1), f32_pair_to_bf16(a2, a3));
        return;
    }
    if (in == HRP_BF16) {
        f32_interleave(&a0, &a1);
        f32_interleave(&a2, &a3);
    }
#endif
    if (b->out_type == HRP_F32)
        PUT4(f32_to_f32);
    else if (b->out_type == HRP_F16)
        PUT4(f32_to_f16);
    else
        PUT4(f32_to_bf16);
}

HRK_INLINE void f32_put(unsigned out, uint8_t *p, f32_v v)
{
    if (out == HRP_F32)
        PUT(f32_to_f32);
    else if (out == HRP_F16)
        PUT(f32_to_f16);
    else
        PUT(f32_to_bf16);
}

HRK_INLINE void f64_load4(unsigned in, const uint8_t *p, f64_v *x0, f64_v *x1, f64_v *x2, f64_v *x3)
{
#if PAIRS
    if (in == HRP_BF16) {
        f32_v even, odd;

        f32_split(p, &even, &odd);
        f64_widen(even, x0, x1);
        f64_widen(odd, x2, x3);
        return;
    }
#endif
    LOAD4(f64_load, F64_LANES * hrk_size(in));
}

HRK_INLINE void f64_put4(unsigned in, const struct hrk_block *b, size_t i, f64_v a0, f64_v a1, f64_v a2,
                         f64_v a3)
{
    (void)in;
#if PAIRS
    if (in == HRP_BF16) {
        f32_v even = f64_narrow(a0, a1), odd = f64_narrow(a2, a3);

        if (b->out_type == HRP_BF16) {
            PUT1(f32_pair_to_bf16(even, odd));
            return;
        }
        f32_interleave(&even, &odd);
        PUT2(f32_to_f32(even), f32_to_f32(odd));
        return;
    }
#endif
    if (b->out_type == HRP_F64)
        PUT4(f64_to_f64);
    else if (b->out_type == HRP_F32)
        PUT4(f64_to_f32);
    else
        PUT4(f64_to_bf16);
}

HRK_INLINE void f64_put(unsigned out, uint8_t *p, f64_v v)
{
    if (out == HRP_F64)
        PUT(f64_to_f64);
    else if (out == HRP_F32)
        PUT(f64_to_f32);
    else
        PUT(f64_to_bf16);
}

#define A f32
#define LANES F32_LANES
#include "kernels/host_loop.inc.h"
#define A f64
#define LANES F64_LANES
#include "kernels/host_loop.inc.h"
#define A u8
#define INT_TYPE uint8_t
#include "kernels/host_int.inc.h"
#define A u32
#define INT_TYPE uint32_t
#include "kernels/host_int.inc.h"
#define A u64
#define INT_TYPE uint64_t
#include "kernels/host_int.inc.h"
#define A i8
#define INT_TYPE int8_t
#include "kernels/host_int.inc.h"
#define A i32
#define INT_TYPE int32_t
#include "kernels/host_int.inc.h"
#define A i64
#define INT_TYPE int64_t
#include "kernels/host_int.inc.h"

#define LOOP(acc, in, op)                                    \
    static void acc##_##in##_##op(const struct hrk_block *b) \
    {                                                        \
        acc##_fold(HRP_##in, HRP_##op, b);                   \
    }
#define LOOPS(acc, in) LOOP(acc, in, SUM) LOOP(acc, in, PROD) LOOP(acc, in, MIN) LOOP(acc, in, MAX)

LOOPS(f32, F32)
LOOPS(f32, F16)
LOOPS(f32, BF16)
LOOPS(f64, F64)
LOOP(f32, F16, AVG)
LOOP(f32, F32, AVG)
LOOP(f64, F32, AVG)
LOOP(f64, BF16, AVG)
LOOP(f64, F64, AVG)
LOOPS(u8, U8)
LOOPS(u32, U32)
LOOPS(u64, U64)
LOOP(i8, I8, MIN)
LOOP(i8, I8, MAX)
LOOP(i32, I32, MIN)
LOOP(i32, I32, MAX)
LOOP(i64, I64, MIN)
LOOP(i64, I64, MAX)

#define FLOAT_ROW(t) f32_##t##_SUM, f32_##t##_PROD, f32_##t##_MIN, f32_##t##_MAX
#define INT_ROW(s, S, u, U) u##_##U##_SUM, u##_##U##_PROD, s##_##S##_MIN, s##_##S##_MAX, u##_##U##_SUM

static hrk_block_fn level_select(unsigned in, unsigned out, unsigned op)
{
    static const hrk_block_fn table[HRP_NDTYPES][HRP_NREDOPS] = {
        [HRP_F32] = {FLOAT_ROW(F32), f64_F32_AVG},
        [HRP_F64] = {f64_F64_SUM, f64_F64_PROD, f64_F64_MIN, f64_F64_MAX, f64_F64_AVG},
        [HRP_F16] = {FLOAT_ROW(F16), f32_F16_AVG},
        [HRP_BF16] = {FLOAT_ROW(BF16), f64_BF16_AVG},
        [HRP_I8] = {INT_ROW(i8, I8, u8, U8)},
        [HRP_U8] = {INT_ROW(u8, U8, u8, U8)},
        [HRP_I32] = {INT_ROW(i32, I32, u32, U32)},
        [HRP_U32] = {INT_ROW(u32, U32, u32, U32)},
        [HRP_I64] = {INT_ROW(i64, I64, u64, U64)},
        [HRP_U64] = {INT_ROW(u64, U64, u64, U64)},
    };

    /* f32 means of f16 elements: the element type decides where to accumulate, not the wire type. */
    if (op == HRP_AVG && in == HRP_F32 && out == HRP_F16)
        return f32_F32_AVG;
    return table[in][op];
}
