/* SPDX-License-Identifier: MIT */
/*
 * All loops of one instruction set and the table of them. Included by host_scalar.c, host_avx2.c and
 * host_avx512.c after they defined F32_LANES, F64_LANES, INT_BYTES (size of an integer vector, 0: plain
 * integers) and the functions f32_* and f64_* that host_loop.inc.h names.
 */

/* Integers by vector extensions: sums and products in the unsigned type, where they wrap. */
#if INT_BYTES
#define INT_VECTOR(t) __attribute__((vector_size(INT_BYTES))) t
#define INT_LANES(t) (INT_BYTES / sizeof(t))
#define INT_PICK(v, cond, x, y) ((((v)(cond)) & (x)) | (~((v)(cond)) & (y)))
#else
#define INT_VECTOR(t) t
#define INT_LANES(t) ((size_t)1)
#define INT_PICK(v, cond, x, y) ((cond) ? (x) : (y))
#endif

#define INT_TYPE(a, ctype)                                               \
    typedef INT_VECTOR(ctype) a##_v;                                     \
    HRK_INLINE a##_v a##_load(unsigned in, const uint8_t *p)             \
    {                                                                    \
        a##_v v;                                                         \
        (void)in;                                                        \
        memcpy(&v, p, sizeof(v));                                        \
        return v;                                                        \
    }                                                                    \
    HRK_INLINE void a##_store(unsigned out, uint8_t *p, a##_v v)         \
    {                                                                    \
        (void)out;                                                       \
        memcpy(p, &v, sizeof(v));                                        \
    }                                                                    \
    HRK_INLINE a##_v a##_add(a##_v a, a##_v x)                           \
    {                                                                    \
        return (a##_v)(a + x);                                           \
    }                                                                    \
    HRK_INLINE a##_v a##_mul(a##_v a, a##_v x)                           \
    {                                                                    \
        return (a##_v)(a * x);                                           \
    }                                                                    \
    HRK_INLINE a##_v a##_min(a##_v a, a##_v x)                           \
    {                                                                    \
        return INT_PICK(a##_v, x < a, x, a);                             \
    }                                                                    \
    HRK_INLINE a##_v a##_max(a##_v a, a##_v x)                           \
    {                                                                    \
        return INT_PICK(a##_v, x > a, x, a);                             \
    }                                                                    \
    /* Weights and divisors are of float types; op is never avg here. */ \
    HRK_INLINE a##_v a##_div(a##_v a, a##_v x)                           \
    {                                                                    \
        (void)x;                                                         \
        return a;                                                        \
    }                                                                    \
    HRK_INLINE a##_v a##_set(uint32_t n)                                 \
    {                                                                    \
        a##_v v = {0};                                                   \
        (void)n;                                                         \
        return v;                                                        \
    }

INT_TYPE(u8, uint8_t)
INT_TYPE(u32, uint32_t)
INT_TYPE(u64, uint64_t)
INT_TYPE(i8, int8_t)
INT_TYPE(i32, int32_t)
INT_TYPE(i64, int64_t)

#define A f32
#define LANES F32_LANES
#include "kernels/host_loop.inc.h"
#define A f64
#define LANES F64_LANES
#include "kernels/host_loop.inc.h"
#define A u8
#define LANES INT_LANES(uint8_t)
#include "kernels/host_loop.inc.h"
#define A u32
#define LANES INT_LANES(uint32_t)
#include "kernels/host_loop.inc.h"
#define A u64
#define LANES INT_LANES(uint64_t)
#include "kernels/host_loop.inc.h"
#define A i8
#define LANES INT_LANES(int8_t)
#include "kernels/host_loop.inc.h"
#define A i32
#define LANES INT_LANES(int32_t)
#include "kernels/host_loop.inc.h"
#define A i64
#define LANES INT_LANES(int64_t)
#include "kernels/host_loop.inc.h"

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
