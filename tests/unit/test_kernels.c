/* SPDX-License-Identifier: MIT */
/*
 * The host arithmetic against kernels_ref.h: every type, op and level, many sources, destinations, lengths
 * and alignments, every bit of every element, and the bytes around them.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/kernels_ref.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#ifdef __SANITIZE_THREAD__ /* one thread, and each access costs twenty times as much: shorter, not fewer */
#define MAX_N ((size_t)1027)
#else
#define MAX_N ((size_t)4099)
#endif
#define MAX_SRC 17
#define MAX_DST 8
#define GUARD ((size_t)64)
#define ROOM (GUARD + 64 + MAX_N * 8 + GUARD)

static const size_t lengths[] = {0, 1, 3, 7, 16, 31, 1000, MAX_N};
static const unsigned src_counts[] = {1, 2, 3, 5, 8, MAX_SRC};
static const unsigned dst_counts[] = {1, 2, MAX_DST};

static uint8_t source[MAX_SRC][ROOM] __attribute__((aligned(64)));
static uint8_t result[MAX_DST][ROOM] __attribute__((aligned(64)));
static uint8_t expected[MAX_N * 8];

/* Inputs */

static uint64_t random_state = 1;

static uint64_t random_bits(void)
{
    uint64_t z = random_state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static double random_normal(void)
{
    return (double)(int64_t)random_bits() * 0x1p-62;
}

/* NaNs that signal, NaNs with payloads, infinities, the smallest, the largest, both zeros, one. */
static uint64_t special(unsigned t)
{
    static const uint64_t f32[] = {0x7f800001, 0xffc12345, 0x7f800000, 0xff800000, 1,
                                   0x80000001, 0x7f7fffff, 0xff7fffff, 0,          0x80000000,
                                   0x007fffff, 0x00800000, 0x3f800000, 0x477fefff, 0x477ff000};
    static const uint64_t f64[] = {
        0x7ff0000000000001, 0xfff8123456789abc, 0x7ff0000000000000, 0xfff0000000000000, 0x0000000000000001,
        0x8000000000000001, 0x7fefffffffffffff, 0xffefffffffffffff, 0x0000000000000000, 0x8000000000000000,
        0x000fffffffffffff, 0x0010000000000000, 0x3ff0000000000000};
    static const uint64_t f16[] = {0x7c01, 0xfe12, 0x7c00, 0xfc00, 1,      0x8001,
                                   0x7bff, 0xfbff, 0,      0x8000, 0x03ff, 0x0400};
    static const uint64_t bf16[] = {0x7f81, 0xffd2, 0x7f80, 0xff80, 1,      0x8001,
                                    0x7f7f, 0xff7f, 0,      0x8000, 0x007f, 0x80};

    switch (t) {
    case HRP_F32:
        return f32[random_bits() % COUNT(f32)];
    case HRP_F64:
        return f64[random_bits() % COUNT(f64)];
    case HRP_F16:
        return f16[random_bits() % COUNT(f16)];
    default:
        return bf16[random_bits() % COUNT(bf16)];
    }
}

/* Columns of one kind, so that the sum of many sources is not NaN nearly everywhere. */
static void random_element(unsigned t, size_t i, uint8_t *p)
{
    uint64_t bits = random_bits();

    if (ref_is_float(t) && i % 8 < 4)
        ref_store_float(t, p, random_normal() * (i % 8 == 0 ? 1 : 16));
    else if (ref_is_float(t) && i % 8 == 4)
        ref_store_float(t, p, random_normal() * (t == HRP_F16 ? 65000 : t == HRP_F64 ? 1e308 : 3e38));
    else if (ref_is_float(t) && i % 8 == 5)
        ref_store_float(t, p, random_normal() * (t == HRP_F16 ? 1e-6 : t == HRP_F64 ? 1e-320 : 1e-40));
    else if (ref_is_float(t) && i % 8 == 6 && (bits = special(t), 1))
        memcpy(p, &bits, hrp_dtype_size(t));
    else
        memcpy(p, &bits, hrp_dtype_size(t));
}

/* Distinct misalignments a source or destination, by a number of bytes that is not a multiple of the element.
 */
static size_t skew(size_t align, unsigned which)
{
    return GUARD + (align == 0 ? 0 : (align * (which + 1) + which * which) % 64);
}

static void fill_sources(unsigned t, unsigned nsrc, size_t align, const void **src)
{
    const size_t size = hrp_dtype_size(t);

    for (unsigned s = 0; s < nsrc; s++) {
        src[s] = source[s] + skew(align, s);
        for (size_t i = 0; i < MAX_N; i++)
            random_element(t, i, source[s] + skew(align, s) + i * size);
    }
}

/* Comparing */

static enum hrk_level level_in_use;

static const char *what(const struct hrk_fold *f)
{
    static char text[128];

    (void)snprintf(text, sizeof(text), "%s, %s to %s, %s, divisor %u%s%s", hrk_level_name(level_in_use),
                   hrp_dtype_name(f->in), hrp_dtype_name(f->out), hrp_redop_name(f->op), f->divisor,
                   f->weight ? ", weights" : "", f->stream ? ", stream" : "");
    return text;
}

static void check_dst(const struct hrk_fold *f, const uint8_t *room, size_t at, size_t n, unsigned nsrc)
{
    const size_t size = hrp_dtype_size(f->out), bytes = n * size;

    if (memcmp(room + at, expected, bytes) != 0) {
        for (size_t i = 0; i < bytes; i++) {
            if (room[at + i] != expected[i])
                fail_msg("%s: %u sources, element %zu of %zu differs", what(f), nsrc, i / size, n);
        }
    }
    for (size_t i = 0; i < GUARD; i++) {
        if (room[at - GUARD + i] != 0xa5 || room[at + bytes + i] != 0xa5)
            fail_msg("%s: %u sources, %zu elements: written outside the destination", what(f), nsrc, n);
    }
}

static void check_fold(const struct hrk_fold *f, unsigned ndst, size_t align, const void *const *src,
                       unsigned nsrc, size_t n)
{
    const size_t bytes = n * hrp_dtype_size(f->out);
    void *dst[MAX_DST];

    for (unsigned d = 0; d < ndst; d++) {
        dst[d] = result[d] + skew(align, d + 3);
        memset((uint8_t *)dst[d] - GUARD, 0xa5, bytes + 2 * GUARD);
    }
    hrk_fold(f, dst, ndst, src, nsrc, n);
    for (unsigned d = 0; d < ndst; d++)
        check_dst(f, result[d], skew(align, d + 3), n, nsrc);
}

static void check_all_shapes(struct hrk_fold f, const void *const *src, unsigned nsrc, size_t align)
{
    ref_fold(&f, expected, src, nsrc, MAX_N);
    for (level_in_use = HRK_SCALAR; level_in_use <= HRK_AVX512; level_in_use++) {
        if (hrk_set_level(level_in_use) != 0)
            continue;
        for (size_t d = 0; d < COUNT(dst_counts); d++) {
            for (size_t n = 0; n < COUNT(lengths); n++) {
                f.stream = (n + d + nsrc) % 3 == 0;
                check_fold(&f, dst_counts[d], align, src, nsrc, lengths[n]);
                f.stream = !f.stream;
                if (d == 0 || nsrc == 3)
                    check_fold(&f, dst_counts[d], align, src, nsrc, lengths[n]);
            }
        }
    }
}

/* Every way in which a fold of this type is made. */
static void check_type(unsigned t, unsigned nsrc, size_t align)
{
    static const uint32_t weight[MAX_SRC] = {3, 1, 8, 7, 5, 1, 1, 2, 4, 6, 1000, 13, 1, 8, 8, 1, 3};
    const unsigned wide = t == HRP_F16 || t == HRP_BF16 ? HRP_F32 : t;
    const void *src[MAX_SRC];
    uint32_t nranks = 0;

    for (unsigned s = 0; s < nsrc; s++)
        nranks += weight[s];
    fill_sources(t, nsrc, align, src);
    for (unsigned op = 0; op < HRP_NREDOPS; op++) {
        check_all_shapes(hrk_fold_partial(t, t, op, nsrc), src, nsrc, align);
        if (op == HRP_AVG)
            check_all_shapes(hrk_fold_single(t, op, nsrc), src, nsrc, align);
        if (op == HRP_AVG)
            check_all_shapes(hrk_fold_total(t, t, op, weight, nranks), src, nsrc, align);
        if (wide != t)
            check_all_shapes(hrk_fold_partial(t, wide, op, nsrc), src, nsrc, align);
    }
    if (wide == t)
        return;
    fill_sources(wide, nsrc, align, src);
    for (unsigned op = 0; op < HRP_NREDOPS; op++)
        check_all_shapes(hrk_fold_total(wide, t, op, weight, nranks), src, nsrc, align);
}

static void test_every_type_op_level_and_shape(void **state)
{
    (void)state;
    for (unsigned t = 0; t < HRP_NDTYPES; t++) {
        for (size_t s = 0; s < COUNT(src_counts); s++) {
            check_type(t, src_counts[s], 0);
            check_type(t, src_counts[s], 1 + s * 5 + t);
        }
    }
}

/* In place: destinations are the sources themselves, all or one of them. */
static void check_in_place(unsigned t, unsigned op, unsigned nsrc, unsigned ndst, int stream)
{
    const size_t size = hrp_dtype_size(t), n = MAX_N - 24;
    struct hrk_fold f = hrk_fold_single(t, op, nsrc);
    const void *src[MAX_SRC];
    void *dst[MAX_SRC];

    f.stream = (uint8_t)stream;
    fill_sources(t, nsrc, 7, src);
    ref_fold(&f, expected, src, nsrc, n);
    for (unsigned d = 0; d < ndst; d++) {
        dst[d] = source[nsrc - 1 - d] + skew(7, nsrc - 1 - d);
        memset((uint8_t *)dst[d] - GUARD, 0xa5, GUARD);
        memset((uint8_t *)dst[d] + n * size, 0xa5, GUARD);
    }
    hrk_fold(&f, dst, ndst, src, nsrc, n);
    for (unsigned d = 0; d < ndst; d++)
        check_dst(&f, source[nsrc - 1 - d], skew(7, nsrc - 1 - d), n, nsrc);
}

static void test_in_place(void **state)
{
    (void)state;
    for (level_in_use = HRK_SCALAR; level_in_use <= HRK_AVX512; level_in_use++) {
        if (hrk_set_level(level_in_use) != 0)
            continue;
        for (unsigned t = 0; t < HRP_NDTYPES; t++) {
            for (size_t s = 0; s < COUNT(src_counts); s++) {
                check_in_place(t, s % 2 ? HRP_SUM : HRP_AVG, src_counts[s], src_counts[s], s % 3 == 0);
                check_in_place(t, HRP_MIN, src_counts[s], 1, 0);
            }
        }
    }
}

/* Sources and destinations that end where memory ends: nothing beyond n is read or written. */
static void test_nothing_beyond_the_end(void **state)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *end[3];

    (void)state;
    for (unsigned i = 0; i < 3; i++) {
        uint8_t *map = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        assert_ptr_not_equal(map, MAP_FAILED);
        assert_int_equal(mprotect(map + page, page, PROT_NONE), 0);
        end[i] = map + page;
    }
    for (level_in_use = HRK_SCALAR; level_in_use <= HRK_AVX512; level_in_use++) {
        if (hrk_set_level(level_in_use) != 0)
            continue;
        for (unsigned t = 0; t < HRP_NDTYPES; t++) {
            for (size_t n = 0; n <= 150; n++) {
                const void *src[2] = {end[0] - n * hrp_dtype_size(t), end[1] - n * hrp_dtype_size(t)};
                void *dst[1] = {end[2] - n * hrp_dtype_size(t)};
                struct hrk_fold f = hrk_fold_single(t, (unsigned)n % HRP_NREDOPS, 2);

                for (size_t i = 0; i < n; i++)
                    random_element(t, i, end[0] - (n - i) * hrp_dtype_size(t));
                f.stream = n % 2;
                ref_fold(&f, expected, src, 2, n);
                hrk_fold(&f, dst, 1, src, 2, n);
                if (n && memcmp(dst[0], expected, n * hrp_dtype_size(t)) != 0)
                    fail_msg("%s: %zu elements before the end of memory differ", what(&f), n);
            }
        }
    }
    for (unsigned i = 0; i < 3; i++)
        munmap(end[i] - page, 2 * page);
}

/* All values of the two halves through f32 and back, and f32 values on and beside every rounding boundary. */
static void check_half(unsigned half)
{
    static uint16_t in[65536], out[65536];
    static uint32_t wide[65536], want32[65536];
    static uint16_t want16[65536];
    const void *src[1] = {in}, *src32[1] = {wide};
    void *dst[1] = {out}, *dst32[1] = {wide};
    const struct hrk_fold up = {.in = (uint8_t)half, .out = HRP_F32},
                          down = {.in = HRP_F32, .out = (uint8_t)half};

    for (unsigned i = 0; i < 65536; i++)
        in[i] = (uint16_t)i;
    ref_fold(&up, want32, src, 1, 65536);
    hrk_fold(&up, dst32, 1, src, 1, 65536);
    assert_memory_equal(wide, want32, sizeof(wide));
    hrk_fold(&down, dst, 1, src32, 1, 65536);
    for (unsigned i = 0; i < 65536; i++) {
        int nan = isnan(ref_from_half(in[i], half == HRP_F16 ? 10 : 7));

        assert_int_equal(out[i], nan ? (half == HRP_F16 ? 0x7e00 : 0x7fc0) : in[i]);
    }
    for (unsigned lower = 0; lower < 9; lower++) {
        static const uint32_t bits[9] = {0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff};

        for (uint32_t i = 0; i < 65536; i++)
            wide[i] = i << 16 | bits[lower];
        ref_fold(&down, want16, src32, 1, 65536);
        hrk_fold(&down, dst, 1, src32, 1, 65536);
        assert_memory_equal(out, want16, sizeof(out));
        for (uint32_t i = 0; i < 65536; i++) /* every f16 spacing */
            wide[i] = i << 15 | (bits[lower] & 0x7fff);
        ref_fold(&down, want16, src32, 1, 65536);
        hrk_fold(&down, dst, 1, src32, 1, 65536);
        assert_memory_equal(out, want16, sizeof(out));
    }
}

static void test_halves(void **state)
{
    (void)state;
    for (int level = HRK_SCALAR; level <= HRK_AVX512; level++) {
        if (hrk_set_level((enum hrk_level)level) != 0)
            continue;
        check_half(HRP_F16);
        check_half(HRP_BF16);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_type_op_level_and_shape),
        cmocka_unit_test(test_in_place),
        cmocka_unit_test(test_nothing_beyond_the_end),
        cmocka_unit_test(test_halves),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
