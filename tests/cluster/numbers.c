/* SPDX-License-Identifier: MIT */
/*
 * The arithmetic as documented, on values that show a wrong order, a wrong type in between or a missing rule:
 * bf16 and f16 are added in f32 and rounded twice, means do not overflow or vanish, NaN and infinities stay
 * where they belong, integers wrap. timeout: 120
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/lib/harness.h"

#define N 4099u

static float load(unsigned dtype, const void *p)
{
    uint16_t h;
    float f;
    if (dtype == HRP_F32) {
        memcpy(&f, p, 4);
        return f;
    }
    memcpy(&h, p, 2);
    return dtype == HRP_F16 ? hpf_f16_to_f32(h) : hpf_bf16_to_f32(h);
}

static void store(unsigned dtype, float f, void *p)
{
    uint16_t h = dtype == HRP_F16 ? hpf_f32_to_f16(f) : hpf_f32_to_bf16(f);
    if (dtype == HRP_F32)
        memcpy(p, &f, 4);
    else
        memcpy(p, &h, 2);
}

/* This rank contributes `mine` everywhere; every element of the result must be `want`. */
static int same(struct ht_env *e, unsigned dtype, unsigned redop, float mine, float want)
{
    static unsigned char buf[N * 4];
    size_t esize = hrp_dtype_size(dtype);
    hclient_op_t op;
    for (unsigned i = 0; i < N; i++)
        store(dtype, mine, buf + i * esize);
    HT_TRY(e->me, hclient_all_reduce(e->comm, buf, buf, N, (hclient_data_type_t)dtype,
                                     (hclient_red_op_t)redop, NULL, &op));
    HT_TRY(e->me, hclient_wait(op));
    for (unsigned i = 0; i < N; i++) {
        float got = load(dtype, buf + i * esize);
        HT_EXPECT(e->me, got == want, "%s, %s: element %u is %.9g and should be %.9g", hrp_dtype_name(dtype),
                  hrp_redop_name(redop), i, (double)got, (double)want);
    }
    return 0;
}

/* 8 ranks: adding bf16 in bf16 from 256 on would stay at 256. */
static int sums(struct ht_env *e)
{
    unsigned r = e->me->rank, n = e->me->nranks;
    if (same(e, HRP_BF16, HRP_SUM, r == 0 ? 256.0f : 0.5f,
             hpf_bf16_to_f32(hpf_f32_to_bf16(256.0f + 0.5f * (float)(n - 1)))) != 0)
        return 1;
    if (same(e, HRP_F16, HRP_SUM, 4000.0f, 4000.0f * (float)n) != 0 ||
        same(e, HRP_F16, HRP_AVG, 4000.0f, 4000.0f) != 0)
        return 1;
    /* 60000 times the ranks overflows f16 on the way, the mean does not. */
    if (same(e, HRP_F16, HRP_AVG, 60000.0f, hpf_f16_to_f32(hpf_f32_to_f16(60000.0f))) != 0)
        return 1;
    if (same(e, HRP_F16, HRP_SUM, 60000.0f, INFINITY) != 0 ||
        same(e, HRP_F16, HRP_AVG, 0x1p-24f, 0x1p-24f) != 0)
        return 1;
    /* The largest f32 of every rank: the sum is infinite, the mean exact. The smallest: neither is flushed. */
    if (same(e, HRP_F32, HRP_AVG, 0x1.fffffep127f, 0x1.fffffep127f) != 0 ||
        same(e, HRP_F32, HRP_SUM, 0x1.fffffep127f, INFINITY) != 0)
        return 1;
    return same(e, HRP_F32, HRP_AVG, 0x1p-149f, 0x1p-149f) != 0 ||
           same(e, HRP_F32, HRP_SUM, 0x1p-149f, (float)n * 0x1p-149f) != 0;
}

/* A NaN of rank 3 at one index, opposite infinities at another, an infinity at a third. */
static int not_numbers(struct ht_env *e, unsigned dtype, unsigned redop)
{
    enum { NAN_AT = 1234, BOTH_AT = 77, INF_AT = 4000 };
    static unsigned char buf[N * 4];
    size_t esize = hrp_dtype_size(dtype);
    unsigned rank = e->me->rank, last = e->me->nranks - 1;
    hclient_op_t op;
    for (unsigned i = 0; i < N; i++)
        store(dtype, 1.0f, buf + i * esize);
    if (rank == 3)
        store(dtype, NAN, buf + NAN_AT * esize);
    if (rank == 0 || rank == last)
        store(dtype, rank ? INFINITY : -INFINITY, buf + BOTH_AT * esize);
    if (rank == 1)
        store(dtype, INFINITY, buf + INF_AT * esize);
    HT_TRY(e->me, hclient_all_reduce(e->comm, buf, buf, N, (hclient_data_type_t)dtype,
                                     (hclient_red_op_t)redop, NULL, &op));
    HT_TRY(e->me, hclient_wait(op));
    bool adds = redop == HRP_SUM || redop == HRP_AVG;
    for (unsigned i = 0; i < N; i++) {
        float got = load(dtype, buf + i * esize);
        bool ok = i == NAN_AT || (i == BOTH_AT && adds) ? isnan(got) : !isnan(got);
        if (i == BOTH_AT && !adds)
            ok = isinf(got) && (got > 0) == (redop == HRP_MAX);
        if (i == INF_AT)
            ok = redop == HRP_MIN ? got == 1.0f : isinf(got) && got > 0;
        HT_EXPECT(e->me, ok, "%s, %s with a NaN at %d and infinities at %d and %d: element %u is %g",
                  hrp_dtype_name(dtype), hrp_redop_name(redop), NAN_AT, BOTH_AT, INF_AT, i, (double)got);
    }
    return 0;
}

static int integers(struct ht_env *e)
{
    static int8_t buf[N];
    unsigned n = e->me->nranks;
    hclient_op_t op;
    memset(buf, e->me->rank % 2 ? 100 : 120, N);
    HT_TRY(e->me, hclient_all_reduce(e->comm, buf, buf, N, HCLIENT_INT8, HCLIENT_SUM, NULL, &op));
    HT_TRY(e->me, hclient_wait(op));
    int8_t want = (int8_t)(uint8_t)((n + 1) / 2 * 120 + n / 2 * 100);
    for (unsigned i = 0; i < N; i++)
        HT_EXPECT(e->me, buf[i] == want, "120 + 100 + ... in i8 gave %d at element %u, and it wraps to %d",
                  buf[i], i, want);
    return 0;
}

static int rank_main(struct hpf_rank *me)
{
    struct ht_env e;
    if (ht_join(&e, me, 0, NULL) != 0 || sums(&e) != 0 || integers(&e) != 0)
        return 1;
    static const unsigned types[] = {HRP_F32, HRP_F16, HRP_BF16};
    static const unsigned redops[] = {HRP_SUM, HRP_AVG, HRP_MIN, HRP_MAX};
    for (unsigned t = 0; t < 3; t++)
        for (unsigned o = 0; o < 4; o++)
            if (not_numbers(&e, types[t], redops[o]) != 0)
                return 1;
    return ht_leave(&e);
}

int main(void)
{
    static const unsigned nodes[] = {1, 2, 4};
    for (unsigned i = 0; i < 3; i++) {
        printf("%u nodes\n", nodes[i]);
        fflush(stdout);
        struct hpf_cluster *c = ht_cluster(nodes[i], NULL);
        struct ht_job job = {.nranks = 8, .fn = rank_main};
        ht_run(c, &job);
        ht_cluster_end(c);
    }
    return 0;
}
