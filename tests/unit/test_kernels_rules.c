/* SPDX-License-Identifier: MIT */
/* The rules of kernels.h one by one, by examples whose results are written out; and copies, fills and levels.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/kernels.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define MANY 32 /* elements: more than a vector of any level */

/* The fold of one value a source, the same in every element; returns the bits of the result. */
static uint64_t fold_bits(struct hrk_fold f, const uint64_t *values, unsigned nsrc)
{
    static uint8_t in[64][MANY * 8], out[MANY * 8];
    const size_t isize = hrp_dtype_size(f.in), osize = hrp_dtype_size(f.out);
    const void *src[64];
    void *dst[1] = {out};
    uint64_t bits = 0;

    assert_true(nsrc <= 64);
    for (unsigned s = 0; s < nsrc; s++) {
        src[s] = in[s];
        for (unsigned i = 0; i < MANY; i++)
            memcpy(in[s] + i * isize, &values[s], isize);
    }
    hrk_fold(&f, dst, 1, src, nsrc, MANY);
    for (unsigned i = 1; i < MANY; i++)
        assert_memory_equal(out, out + i * osize, osize);
    memcpy(&bits, out, osize);
    return bits;
}

static uint64_t fold2(unsigned dtype, unsigned op, uint64_t a, uint64_t b)
{
    const uint64_t v[2] = {a, b};

    return fold_bits(hrk_fold_single(dtype, op, 2), v, 2);
}

static uint64_t fold_same(struct hrk_fold f, uint64_t value, unsigned nsrc)
{
    uint64_t v[64];

    for (unsigned s = 0; s < nsrc; s++)
        v[s] = value;
    return fold_bits(f, v, nsrc);
}

static void for_each_level(void (*check)(void))
{
    const enum hrk_level before = hrk_get_level();

    for (int level = HRK_SCALAR; level <= HRK_AVX512; level++) {
        if (hrk_set_level((enum hrk_level)level) == 0)
            check();
    }
    assert_int_equal(hrk_set_level(before), 0);
}

static void check_sums(void)
{
    uint64_t v[33] = {0x4380}; /* bf16 256, then 31 halves: 271.5 in f32, 272 in bf16 */

    for (unsigned s = 1; s < 32; s++)
        v[s] = 0x3f00;
    assert_int_equal(fold_bits(hrk_fold_single(HRP_BF16, HRP_SUM, 32), v, 32), 0x4388);
    assert_int_equal(fold_bits(hrk_fold_partial(HRP_BF16, HRP_F32, HRP_SUM, 32), v, 32), 0x4387c000);
    assert_int_equal(fold2(HRP_I8, HRP_SUM, 120, 100), (uint8_t)-36);
    assert_int_equal(fold2(HRP_U8, HRP_SUM, 200, 100), 44);
    assert_int_equal(fold2(HRP_I32, HRP_PROD, 0x7fffffff, 2), 0xfffffffe);
    assert_int_equal(fold2(HRP_I64, HRP_PROD, UINT64_C(0x8000000000000000), UINT64_MAX),
                     UINT64_C(0x8000000000000000));
    assert_int_equal(fold2(HRP_I8, HRP_MIN, 0x80, 1), 0x80);
    assert_int_equal(fold2(HRP_U8, HRP_MIN, 0x80, 1), 1);
    assert_int_equal(fold_same(hrk_fold_single(HRP_F16, HRP_SUM, 32), 0x6bd0, 32),
                     0x7c00);                           /* 32 x 4000: Inf */
    assert_int_equal(fold2(HRP_F32, HRP_SUM, 1, 1), 2); /* subnormals are not flushed */
    assert_int_equal(fold2(HRP_BF16, HRP_SUM, 1, 1), 2);
    assert_int_equal(fold2(HRP_BF16, HRP_PROD, 0x0080, 0x3f00), 0x0040); /* smallest normal times 0.5 */
}

static void check_avg(void)
{
    assert_int_equal(fold_same(hrk_fold_single(HRP_F16, HRP_AVG, 32), 0x6bd0, 32), 0x6bd0);  /* 4000 */
    assert_int_equal(fold_same(hrk_fold_single(HRP_F16, HRP_AVG, 64), 0x7bff, 64), 0x7bff);  /* 65504 */
    assert_int_equal(fold_same(hrk_fold_single(HRP_F16, HRP_AVG, 32), 1, 32), 1);            /* 6e-8 */
    assert_int_equal(fold_same(hrk_fold_single(HRP_BF16, HRP_AVG, 32), 1, 32), 1);           /* 9e-41 */
    assert_int_equal(fold_same(hrk_fold_single(HRP_BF16, HRP_AVG, 64), 0x7f7f, 64), 0x7f7f); /* 3.4e38 */
    assert_int_equal(fold_same(hrk_fold_single(HRP_F32, HRP_AVG, 64), 0x7f7fffff, 64),
                     0x7f7fffff);                                                    /* 3.4e38 */
    assert_int_equal(fold_same(hrk_fold_single(HRP_F32, HRP_AVG, 3), 1, 3), 1);      /* 1e-45 */
    assert_int_equal(fold2(HRP_I8, HRP_AVG, (uint8_t)-4, (uint8_t)-3), (uint8_t)-3); /* -3.5, toward zero */
    assert_int_equal(fold2(HRP_I8, HRP_AVG, 120, 100), (uint8_t)-18);                /* after the wrap */
    assert_int_equal(fold2(HRP_U8, HRP_AVG, 200, 101), 22);
    assert_int_equal(fold2(HRP_I64, HRP_AVG, UINT64_MAX, UINT64_MAX - 1), UINT64_MAX); /* (-1 - 2) / 2 */
    assert_int_equal(fold2(HRP_U64, HRP_AVG, UINT64_MAX - 1, 1), UINT64_MAX / 2);
}

static void check_weights(void)
{
    static const uint32_t weight[2] = {1, 3}, lone[1] = {3000000001u};
    static const uint64_t means[2] = {0x40000000, 0x40c00000}; /* 2 of one rank, 6 of three: 5 */
    static const uint64_t largest[2] = {0x7f7f, 0x7f7f};

    assert_int_equal(fold_bits(hrk_fold_total(HRP_F32, HRP_F32, HRP_AVG, weight, 4), means, 2), 0x40a00000);
    assert_int_equal(fold_bits(hrk_fold_total(HRP_F32, HRP_F16, HRP_AVG, weight, 4), means, 2), 0x4500);
    assert_int_equal(fold_bits(hrk_fold_total(HRP_F32, HRP_BF16, HRP_AVG, weight, 4), means, 2), 0x40a0);
    assert_int_equal(fold_bits(hrk_fold_total(HRP_BF16, HRP_BF16, HRP_AVG, weight, 4), largest, 2), 0x7f7f);
    /* Weights play no part in a sum. */
    assert_int_equal(fold_bits(hrk_fold_total(HRP_F32, HRP_F32, HRP_SUM, weight, 4), means, 2), 0x41000000);
    /* One node: its mean as it is, although 3000000001 x DBL_MAX, or the product in f32, is not exact. */
    assert_int_equal(
        fold_same(hrk_fold_total(HRP_F64, HRP_F64, HRP_AVG, lone, lone[0]), UINT64_C(0x7fefffffffffffff), 1),
        UINT64_C(0x7fefffffffffffff));
    assert_int_equal(fold_same(hrk_fold_total(HRP_F32, HRP_F16, HRP_AVG, lone, lone[0]), 0x3f801001, 1),
                     0x3c01);
    assert_int_equal(fold_same(hrk_fold_total(HRP_F32, HRP_F32, HRP_AVG, lone, lone[0]), 0x3eaaaaab, 1),
                     0x3eaaaaab);
    /* 1 x -1 + 3 x (1/3 rounded down): a fused multiply-add would keep what the product drops, -2^-54. */
    static const uint64_t fused[2] = {UINT64_C(0xbff0000000000000), UINT64_C(0x3fd5555555555555)};
    assert_int_equal(fold_bits(hrk_fold_total(HRP_F64, HRP_F64, HRP_AVG, weight, 4), fused, 2), 0);
}

static void check_nan_and_zero(void)
{
    static const uint64_t nan[4] = {0x7fc00000, UINT64_C(0x7ff8000000000000), 0x7e00, 0x7fc0};
    static const uint64_t payload[4] = {0xff812345, UINT64_C(0xfff0000000001234), 0xfd01, 0xff81};
    static const uint64_t inf[4] = {0x7f800000, UINT64_C(0x7ff0000000000000), 0x7c00, 0x7f80};

    for (unsigned t = HRP_F32; t <= HRP_BF16; t++) {
        const uint64_t minus = UINT64_C(1) << (8 * hrp_dtype_size(t) - 1);

        for (unsigned op = 0; op < HRP_NREDOPS; op++) {
            assert_int_equal(fold_bits(hrk_fold_single(t, op, 1), &payload[t], 1), nan[t]);
            assert_int_equal(fold2(t, op, payload[t], 0), nan[t]);
            assert_int_equal(fold2(t, op, 0, payload[t]), nan[t]);
            assert_int_equal(fold2(t, op, inf[t], payload[t]), nan[t]);
            assert_int_equal(fold_bits(hrk_fold_single(t, op, 1), &minus, 1), minus);
        }
        assert_int_equal(fold2(t, HRP_SUM, inf[t], inf[t] | minus), nan[t]);
        assert_int_equal(fold2(t, HRP_PROD, 0, inf[t] | minus), nan[t]);
        assert_int_equal(fold2(t, HRP_SUM, minus, minus), minus);
        assert_int_equal(fold2(t, HRP_SUM, minus, 0), 0);
        assert_int_equal(fold2(t, HRP_MIN, 0, minus), 0); /* the first of two equal ones */
        assert_int_equal(fold2(t, HRP_MIN, minus, 0), minus);
        assert_int_equal(fold2(t, HRP_MAX, minus, 0), minus);
        assert_int_equal(fold2(t, HRP_MAX, 0, minus), 0);
    }
}

static void test_sums(void **state)
{
    (void)state;
    for_each_level(check_sums);
}

static void test_avg(void **state)
{
    (void)state;
    for_each_level(check_avg);
}

static void test_weights(void **state)
{
    (void)state;
    for_each_level(check_weights);
}

static void test_nan_and_zero(void **state)
{
    (void)state;
    for_each_level(check_nan_and_zero);
}

/* What the three descriptions say: which of them divide, and by what. */
static void test_descriptions(void **state)
{
    static const uint32_t weight[2] = {1, 2};

    (void)state;
    for (unsigned t = 0; t < HRP_NDTYPES; t++) {
        const int is_float = t <= HRP_BF16;

        for (unsigned op = 0; op < HRP_NREDOPS; op++) {
            const struct hrk_fold p = hrk_fold_partial(t, t, op, 3), s = hrk_fold_single(t, op, 3);
            const struct hrk_fold w = hrk_fold_total(t, t, op, weight, 3);

            assert_int_equal(p.divisor, op == HRP_AVG && is_float ? 3 : 0);
            assert_int_equal(w.divisor, op == HRP_AVG ? 3 : 0);
            assert_int_equal(s.divisor, op == HRP_AVG ? 3 : 0);
            assert_ptr_equal(w.weight, op == HRP_AVG && is_float ? weight : NULL);
            assert_true(!p.weight && !s.weight && !p.stream && !w.stream && !s.stream);
        }
    }
}

/* One node in one step equals its partial followed by the total over that one partial, for either wire type.
 */
static void test_single_is_total_over_one_partial(void **state)
{
    static uint64_t in[5][400], partial[400], total[400], single[400];
    const void *src[5] = {in[0], in[1], in[2], in[3], in[4]}, *psrc[1] = {partial};
    void *pdst[1] = {partial}, *tdst[1] = {total}, *sdst[1] = {single};
    static const uint32_t weight[1] = {5};

    (void)state;
    srand(1);
    for (unsigned s = 0; s < 5; s++) {
        for (size_t i = 0; i < sizeof(in[s]); i++)
            ((uint8_t *)in[s])[i] = (uint8_t)rand();
    }
    for (unsigned t = 0; t < HRP_NDTYPES; t++) {
        for (unsigned op = 0; op < HRP_NREDOPS; op++) {
            for (int wide = 0; wide < 2; wide++) {
                const unsigned wire = wide && (t == HRP_F16 || t == HRP_BF16) ? HRP_F32 : t;
                const struct hrk_fold p = hrk_fold_partial(t, wire, op, 5);
                const struct hrk_fold w = hrk_fold_total(wire, t, op, weight, 5);
                const struct hrk_fold f = hrk_fold_single(t, op, 5);

                hrk_fold(&p, pdst, 1, src, 5, 400);
                hrk_fold(&w, tdst, 1, psrc, 1, 400);
                hrk_fold(&f, sdst, 1, src, 5, 400);
                assert_memory_equal(total, single, 400 * hrp_dtype_size(t));
            }
        }
    }
}

/* Any bytes, any alignment, a destination that is the source, with and without streaming. */
static void check_copy(void)
{
    static uint8_t in[10000], out[3][10000];
    static const size_t lengths[] = {0, 1, 31, 63, 64, 65, 200, 4096, 8191, 9000};

    for (size_t i = 0; i < sizeof(in); i++)
        in[i] = (uint8_t)(i * 7 + i / 256);
    for (size_t n = 0; n < COUNT(lengths); n++) {
        for (size_t align = 0; align < 70; align += 23) {
            void *dst[4] = {out[0] + 64 + align, in + align, out[1] + 64, out[2] + 65 + align};

            memset(out, 0xa5, sizeof(out));
            hrk_copy(dst, 4, in + align, lengths[n], (align / 23 + n) % 2);
            for (unsigned d = 0; d < 4; d++) {
                assert_memory_equal(dst[d], in + align, lengths[n]);
                if (d == 1)
                    continue;
                for (int i = 0; i < 64; i++) {
                    assert_int_equal(((uint8_t *)dst[d])[i - 64], 0xa5);
                    assert_int_equal(((uint8_t *)dst[d])[lengths[n] + (size_t)i], 0xa5);
                }
            }
        }
    }
    for (size_t i = 0; i < sizeof(in); i++)
        assert_int_equal(in[i], (uint8_t)(i * 7 + i / 256));
}

static void test_copy(void **state)
{
    (void)state;
    for_each_level(check_copy);
}

/* "Skipped" is more than unchanged: another process may be writing there, or nobody may be allowed to. */
static void test_copy_does_not_touch_the_source(void **state)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *src = mmap(NULL, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint8_t *other = malloc(page);
    void *dst[3] = {src, other, src};

    (void)state;
    assert_ptr_not_equal(src, MAP_FAILED);
    assert_non_null(other);
    for (int stream = 0; stream < 2; stream++) {
        memset(other, 1, page);
        hrk_copy(dst, 3, src, page, stream);
        assert_memory_equal(other, src, page);
    }
    free(other);
    munmap(src, page);
}

static void test_fill_nan(void **state)
{
    static const uint8_t nan[4][8] = {
        {0, 0, 0xc0, 0x7f}, {0, 0, 0, 0, 0, 0, 0xf8, 0x7f}, {0, 0x7e}, {0xc0, 0x7f}};
    uint8_t buf[100];

    (void)state;
    for (unsigned t = 0; t < HRP_NDTYPES; t++) {
        const size_t size = hrp_dtype_size(t);

        memset(buf, 0x11, sizeof(buf));
        hrk_fill_nan(t, buf + 1, 5);
        for (size_t i = 0; i < sizeof(buf); i++) {
            const int inside = t <= HRP_BF16 && i >= 1 && i < 1 + 5 * size;

            assert_int_equal(buf[i], inside ? nan[t][(i - 1) % size] : 0x11);
        }
    }
}

static void *find_level(void *arg)
{
    *(enum hrk_level *)arg = hrk_get_level();
    return NULL;
}

/* Runs first in this program: the level is found by racing threads. */
static void test_levels(void **state)
{
    enum hrk_level seen[8];
    pthread_t thread[8];

    (void)state;
    for (unsigned i = 0; i < COUNT(thread); i++)
        assert_int_equal(pthread_create(&thread[i], NULL, find_level, &seen[i]), 0);
    for (unsigned i = 0; i < COUNT(thread); i++)
        assert_int_equal(pthread_join(thread[i], NULL), 0);
    for (unsigned i = 0; i < COUNT(thread); i++)
        assert_int_equal(seen[i], hrk_get_level());
    for (int level = HRK_SCALAR; level <= HRK_AVX512; level++)
        assert_int_equal(hrk_set_level((enum hrk_level)level), level <= (int)seen[0] ? 0 : -ENOTSUP);
    assert_int_equal(hrk_set_level(HRK_SCALAR), 0);
    assert_int_equal(hrk_get_level(), HRK_SCALAR);
    assert_int_equal(hrk_set_level((enum hrk_level)3), -EINVAL);
    assert_int_equal(hrk_set_level((enum hrk_level) - 1), -EINVAL);
    assert_int_equal(hrk_get_level(), HRK_SCALAR);
    assert_string_equal(hrk_level_name(HRK_SCALAR), "scalar");
    assert_string_equal(hrk_level_name(HRK_AVX2), "avx2");
    assert_string_equal(hrk_level_name(HRK_AVX512), "avx512");
    assert_string_equal(hrk_level_name((enum hrk_level)3), "unknown");
    assert_int_equal(hrk_set_level(seen[0]), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_levels),
        cmocka_unit_test(test_descriptions),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_avg),
        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_nan_and_zero),
        cmocka_unit_test(test_single_is_total_over_one_partial),
        cmocka_unit_test(test_copy),
        cmocka_unit_test(test_copy_does_not_touch_the_source),
        cmocka_unit_test(test_fill_nan),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
