/* SPDX-License-Identifier: MIT */
/*
 * The loop that folds all sources of a block in registers, included once an accumulation type. Takes
 *   A          prefix of the type's functions: A_load, A_load4, A_put, A_put4, A_add, A_mul, A_div, A_min, A_max, A_set
 *   A_v        the vector they work on
 *   LANES      its elements
 * and defines A_fold. `in` and `op` are constants in every caller, so the switches vanish.
 */

#define OP(name) HRK_CAT(A, name)
#define V OP(_v)

HRK_INLINE V OP(_step)(unsigned op, V acc, V x)
{
    switch (op) {
    case HRP_PROD:
        return OP(_mul)(acc, x);
    case HRP_MIN:
        return OP(_min)(acc, x);
    case HRP_MAX:
        return OP(_max)(acc, x);
    default:
        return OP(_add)(acc, x);
    }
}

/* Four vectors at a time: enough independent chains to hide the latency of an addition. */
HRK_INLINE void OP(_tile)(unsigned in, unsigned op, const struct hrk_block *b, size_t i)
{
    const size_t at = (b->first + i) * hrk_size(in);
    const uint8_t *p = (const uint8_t *)b->src[0] + at;
    V a0, a1, a2, a3, x0, x1, x2, x3;

    OP(_load4)(in, p, &a0, &a1, &a2, &a3);
    if (op == HRP_AVG && b->weight) {
        V w = OP(_set)(b->weight[0]);

        a0 = OP(_mul)(a0, w), a1 = OP(_mul)(a1, w), a2 = OP(_mul)(a2, w), a3 = OP(_mul)(a3, w);
    }
    for (unsigned s = 1; s < b->nsrc; s++) {
        p = (const uint8_t *)b->src[s] + at;
        OP(_load4)(in, p, &x0, &x1, &x2, &x3);
        if (op == HRP_AVG && b->weight) {
            V w = OP(_set)(b->weight[s]);

            x0 = OP(_mul)(x0, w), x1 = OP(_mul)(x1, w), x2 = OP(_mul)(x2, w), x3 = OP(_mul)(x3, w);
        }
        a0 = OP(_step)(op, a0, x0), a1 = OP(_step)(op, a1, x1);
        a2 = OP(_step)(op, a2, x2), a3 = OP(_step)(op, a3, x3);
    }
    if (op == HRP_AVG && b->divisor) {
        V d = OP(_set)(b->divisor);

        a0 = OP(_div)(a0, d), a1 = OP(_div)(a1, d), a2 = OP(_div)(a2, d), a3 = OP(_div)(a3, d);
    }
    OP(_put4)(in, b, i, a0, a1, a2, a3);
}

/* The last elements, one vector or less at a time; less goes through a buffer, so that nothing beyond is touched. */
HRK_INLINE void OP(_tail)(unsigned in, unsigned op, const struct hrk_block *b, size_t i, size_t m)
{
    const size_t at = (b->first + i) * hrk_size(in);
    _Alignas(64) uint8_t buf[LANES * 8] = {0};
    V acc = {0};

    for (unsigned s = 0; s < b->nsrc; s++) {
        const uint8_t *p = (const uint8_t *)b->src[s] + at;

        if (m < LANES)
            p = memcpy(buf, p, m * hrk_size(in));
        V x = OP(_load)(in, p);

        if (op == HRP_AVG && b->weight)
            x = OP(_mul)(x, OP(_set)(b->weight[s]));
        acc = s ? OP(_step)(op, acc, x) : x;
    }
    if (op == HRP_AVG && b->divisor)
        acc = OP(_div)(acc, OP(_set)(b->divisor));
    OP(_put)(b->out_type, buf, acc);
    for (unsigned d = 0; d < b->ndst; d++)
        memcpy(hrk_dst(b, d, i), buf, m * hrk_size(b->out_type));
}

HRK_INLINE void OP(_fold)(unsigned in, unsigned op, const struct hrk_block *b)
{
    size_t i = 0;

    for (; b->n - i >= 4 * LANES; i += 4 * LANES)
        OP(_tile)(in, op, b, i);
    for (; i < b->n; i += LANES)
        OP(_tail)(in, op, b, i, b->n - i < LANES ? b->n - i : LANES);
}

#undef V
#undef OP
#undef A
#undef LANES
