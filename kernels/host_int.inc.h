/* SPDX-License-Identifier: MIT */
/*
 * What host_loop.inc.h needs of one integer type, by vector extensions. Takes A, the prefix, and INT_TYPE; uses
 * INT_BYTES, the size of a vector (0: one integer at a time). Sums and products are made of unsigned types only, where
 * they wrap.
 */

#define OP(name) HRK_CAT(A, name)
#define V OP(_v)

#if INT_BYTES
typedef __attribute__((vector_size(INT_BYTES))) INT_TYPE V;
/* A comparison gives all ones where it holds. */
#define PICK(cond, x, y) (((V)(cond) & (x)) | (~(V)(cond) & (y)))
#else
typedef INT_TYPE V;
#define PICK(cond, x, y) ((cond) ? (x) : (y))
#endif

HRK_INLINE V OP(_load)(unsigned in, const uint8_t *p)
{
    V v;

    (void)in;
    memcpy(&v, p, sizeof(v));
    return v;
}

HRK_INLINE void OP(_load4)(unsigned in, const uint8_t *p, V *x0, V *x1, V *x2, V *x3)
{
    LOAD4(OP(_load), sizeof(V));
}

HRK_INLINE void OP(_put4)(unsigned in, const struct hrk_block *b, size_t i, V a0, V a1, V a2, V a3)
{
    (void)in;
    PUT4();
}

HRK_INLINE void OP(_put)(unsigned out, uint8_t *p, V v)
{
    (void)out;
    memcpy(p, &v, sizeof(v));
}

HRK_INLINE V OP(_add)(V acc, V x)
{
    return (V)(acc + x);
}

HRK_INLINE V OP(_mul)(V acc, V x)
{
    return (V)(acc * x);
}

HRK_INLINE V OP(_min)(V acc, V x)
{
    return PICK(x < acc, x, acc);
}

HRK_INLINE V OP(_max)(V acc, V x)
{
    return PICK(x > acc, x, acc);
}

/* Weights and divisors belong to float types: these two only make the loop compile. */
HRK_INLINE V OP(_div)(V acc, V x)
{
    (void)x;
    return acc;
}

HRK_INLINE V OP(_set)(uint32_t n)
{
    return (V){(INT_TYPE)n};
}

#undef PICK
#undef V
#undef OP

#if INT_BYTES
#define LANES (INT_BYTES / sizeof(INT_TYPE))
#else
#define LANES ((size_t)1)
#endif
#include "kernels/host_loop.inc.h"
#undef INT_TYPE
