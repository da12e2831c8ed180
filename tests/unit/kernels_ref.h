/* SPDX-License-Identifier: MIT */
/*
 * What kernels.h promises, written a second time as plainly as possible: one element at a time, halves by way
 * of exact double arithmetic instead of bit tricks, integers in 64 bits and cut at the end.
 */
#ifndef TEST_KERNELS_REF_H
#define TEST_KERNELS_REF_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"

static inline int ref_is_float(unsigned t)
{
    return t == HRP_F32 || t == HRP_F64 || t == HRP_F16 || t == HRP_BF16;
}

/* A 16-bit float of `mant` explicit mantissa bits and the exponent bias of its width, as a double; exact. */
static inline double ref_from_half(uint16_t bits, int mant)
{
    int width = 15 - mant, bias = (1 << (width - 1)) - 1;
    int e = bits >> mant & ((1 << width) - 1), m = bits & ((1 << mant) - 1);
    double v;

    if (e == (1 << width) - 1)
        v = m ? (double)NAN : (double)INFINITY;
    else if (e == 0)
        v = ldexp(m, 1 - bias - mant);
    else
        v = ldexp(m + (1 << mant), e - bias - mant);
    return bits & 0x8000 ? -v : v;
}

/* To nearest, ties to even: the value in units of the spacing around it, rounded by nearbyint. */
static inline uint16_t ref_to_half(double v, int mant)
{
    int width = 15 - mant, bias = (1 << (width - 1)) - 1, e;
    uint16_t inf = (uint16_t)(((1 << width) - 1) << mant), sign = signbit(v) ? 0x8000 : 0;
    double q;

    if (isnan(v))
        return (uint16_t)(inf | 1 << (mant - 1));
    if (isinf(v))
        return (uint16_t)(sign | inf);
    (void)frexp(v, &e); /* |v| in [2^(e-1), 2^e) */
    e = v == 0 || e - 1 < 1 - bias ? 1 - bias : e - 1;
    q = nearbyint(ldexp(fabs(v), mant - e));
    /* q counts units of 2^(e - mant); a carry into the next exponent and the hidden bit both add up by
     * themselves. */
    e = q < (1 << mant) ? 0 : e + bias - 1;
    q += (double)e * (1 << mant);
    return (uint16_t)(sign | (q >= inf ? inf : (uint16_t)q));
}

static inline double ref_load_float(unsigned t, const uint8_t *p)
{
    uint16_t h;
    float f;
    double d;

    switch (t) {
    case HRP_F32:
        memcpy(&f, p, 4);
        return (double)f;
    case HRP_F64:
        memcpy(&d, p, 8);
        return d;
    default:
        memcpy(&h, p, 2);
        return ref_from_half(h, t == HRP_F16 ? 10 : 7);
    }
}

static inline void ref_store_float(unsigned t, uint8_t *p, double d)
{
    uint64_t nan64 = UINT64_C(0x7ff8000000000000);
    uint32_t nan32 = 0x7fc00000;
    float f = (float)d;
    uint16_t h;

    switch (t) {
    case HRP_F32:
        memcpy(p, isnan(d) ? (void *)&nan32 : (void *)&f, 4);
        return;
    case HRP_F64:
        memcpy(p, isnan(d) ? (void *)&nan64 : (void *)&d, 8);
        return;
    default:
        h = ref_to_half((double)f, t == HRP_F16 ? 10 : 7);
        memcpy(p, &h, 2);
    }
}

/* A double holds every float, so an f32 operation is the one double operation rounded to f32 (double rounding
 * of a single + - * / from 53 to 24 bits is innocuous). `narrow` says that A is f32. */
static inline double ref_round(int narrow, double v)
{
    volatile float f;

    if (!narrow)
        return v;
    f = (float)v;
    return (double)f;
}

static inline double ref_step(int narrow, unsigned op, double acc, double x)
{
    switch (op) {
    case HRP_PROD:
        return ref_round(narrow, acc * x);
    case HRP_MIN:
        return isnan(acc) || isnan(x) ? (double)NAN : x < acc ? x : acc;
    case HRP_MAX:
        return isnan(acc) || isnan(x) ? (double)NAN : x > acc ? x : acc;
    default:
        return ref_round(narrow, acc + x);
    }
}

static inline void ref_fold_float(const struct hrk_fold *f, uint8_t *out, const void *const *src,
                                  unsigned nsrc, size_t i)
{
    unsigned t = hrp_dtype_size(f->in) < hrp_dtype_size(f->out) ? f->in : f->out;
    int narrow = f->op == HRP_AVG ? t == HRP_F16 : t != HRP_F64;
    int lone = f->weight && nsrc == 1 && f->weight[0] == f->divisor;
    double acc = 0;

    for (unsigned s = 0; s < nsrc; s++) {
        double x = ref_load_float(f->in, (const uint8_t *)src[s] + i * hrp_dtype_size(f->in));

        if (f->weight && !lone)
            x = ref_round(narrow, x * ref_round(narrow, f->weight[s]));
        acc = s ? ref_step(narrow, f->op, acc, x) : x;
    }
    if (f->divisor && !lone)
        acc = ref_round(narrow, acc / ref_round(narrow, f->divisor));
    ref_store_float(f->out, out, acc);
}

static inline uint64_t ref_load_int(unsigned t, const uint8_t *p)
{
    size_t size = hrp_dtype_size(t);
    uint64_t v = 0;

    for (size_t i = 0; i < size; i++)
        v |= (uint64_t)p[i] << 8 * i;
    if ((t == HRP_I8 || t == HRP_I32 || t == HRP_I64) && size < 8 && v >> (8 * size - 1))
        v |= ~UINT64_C(0) << 8 * size;
    return v;
}

static inline void ref_fold_int(const struct hrk_fold *f, uint8_t *out, const void *const *src, unsigned nsrc,
                                size_t i)
{
    int is_signed = f->in == HRP_I8 || f->in == HRP_I32 || f->in == HRP_I64;
    size_t size = hrp_dtype_size(f->in);
    uint8_t cut[8] = {0};
    uint64_t acc = 0;

    for (unsigned s = 0; s < nsrc; s++) {
        uint64_t x = ref_load_int(f->in, (const uint8_t *)src[s] + i * size);
        int less = is_signed ? (int64_t)x < (int64_t)acc : x < acc;

        if (s == 0)
            acc = x;
        else if (f->op == HRP_SUM || f->op == HRP_AVG)
            acc += x;
        else if (f->op == HRP_PROD)
            acc *= x;
        else if ((f->op == HRP_MIN) == less)
            acc = x;
    }
    if (f->op == HRP_AVG && f->divisor) {
        for (size_t b = 0; b < 8; b++)
            cut[b] = (uint8_t)(acc >> 8 * b);
        acc = ref_load_int(f->in, cut);
        acc = is_signed ? (uint64_t)((int64_t)acc / (int64_t)f->divisor) : acc / f->divisor;
    }
    for (size_t b = 0; b < size; b++)
        out[b] = (uint8_t)(acc >> 8 * b);
}

static inline void ref_fold(const struct hrk_fold *f, void *out, const void *const *src, unsigned nsrc,
                            size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint8_t *o = (uint8_t *)out + i * hrp_dtype_size(f->out);

        if (ref_is_float(f->in))
            ref_fold_float(f, o, src, nsrc, i);
        else
            ref_fold_int(f, o, src, nsrc, i);
    }
}

#endif
