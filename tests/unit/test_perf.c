/* SPDX-License-Identifier: MIT */
/* hreduce-perf without daemons: its inputs, its reference, its command line and its reading of JSON. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/hclient.h"
#include "client/perf/bench.h"
#include "client/perf/expect.h"
#include "client/perf/json.h"
#include "client/perf/options.h"
#include "client/perf/pattern.h"
#include "client/perf/table.h"

/* ---- 16-bit floats --------------------------------------------------------------------------------------- */

static void test_half_round_trip(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        bool nan16 = (h & 0x7c00) == 0x7c00 && (h & 0x3ff), nanb = (h & 0x7f80) == 0x7f80 && (h & 0x7f);
        assert_int_equal(hpf_f32_to_f16(hpf_f16_to_f32((uint16_t)h)), nan16 ? 0x7e00 : h);
        assert_int_equal(hpf_f32_to_bf16(hpf_bf16_to_f32((uint16_t)h)), nanb ? 0x7fc0 : h);
    }
    assert_true(hpf_f16_to_f32(0x3c00) == 1.0f && hpf_f16_to_f32(0x7bff) == 65504.0f);
    assert_true(hpf_f16_to_f32(0x0001) == 0x1p-24f && hpf_f16_to_f32(0xc000) == -2.0f);
    assert_true(hpf_bf16_to_f32(0x3f80) == 1.0f);
}

/* Halfway between two neighbours goes to the even one, a hair beside it to the nearer. */
static void test_half_ties(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7bff; h++) {
        double low = hpf_f16_to_f32((uint16_t)h), high = hpf_f16_to_f32((uint16_t)(h + 1));
        float middle = (float)((low + high) / 2);
        assert_int_equal(hpf_f32_to_f16(middle), h % 2 ? h + 1 : h);
        assert_int_equal(hpf_f32_to_f16(-middle), (h % 2 ? h + 1 : h) | 0x8000);
        assert_int_equal(hpf_f32_to_f16(nextafterf(middle, INFINITY)), h + 1);
        assert_int_equal(hpf_f32_to_f16(nextafterf(middle, -INFINITY)), h);
    }
    assert_int_equal(hpf_f32_to_f16(65519.0f), 0x7bff);
    assert_int_equal(hpf_f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(hpf_f32_to_f16(1e30f), 0x7c00);
    assert_int_equal(hpf_f32_to_bf16(259.5f), 0x4382);
    assert_int_equal(hpf_f32_to_bf16(0x1.fffffep127f), 0x7f80);
}

/* ---- inputs ---------------------------------------------------------------------------------------------- */

static void test_pattern_is_a_function_of_the_index(void **state)
{
    (void)state;
    enum { N = 1000 };
    static unsigned char whole[N * 8], part[N * 8];
    for (unsigned dtype = 0; dtype < HRP_NDTYPES; dtype++) {
        size_t esize = hrp_dtype_size(dtype);
        /* Also where the lower half of the index wraps. */
        uint64_t first = (UINT64_C(1) << 32) - 500;
        hpf_pattern(dtype, HRP_SUM, 5, 3, first, N, whole);
        hpf_pattern(dtype, HRP_SUM, 5, 3, first + 497, 10, part + 1);
        assert_memory_equal(part + 1, whole + 497 * esize, 10 * esize);
        hpf_pattern(dtype, HRP_SUM, 5, 4, first, N, part);
        assert_memory_not_equal(part, whole, N * esize);
        hpf_pattern(dtype, HRP_SUM, 6, 3, first, N, part);
        assert_memory_not_equal(part, whole, N * esize);
    }
}

static void test_guard(void **state)
{
    (void)state;
    unsigned char g[100];
    hpf_guard_fill(g, sizeof(g), 9);
    assert_int_equal(hpf_guard_check(g, sizeof(g), 9), 0);
    g[57] ^= 1;
    assert_int_equal(hpf_guard_check(g, sizeof(g), 9), 1);
}

/* ---- the reference --------------------------------------------------------------------------------------- */

static const unsigned map[6] = {0, 1, 0, 2, 1, 0};
static const struct hpf_layout layout = {.nranks = 6, .nnodes = 3, .node_of_rank = map};

/* The definition once more, for bf16 sums, as a straight line. */
static void test_defined_sum(void **state)
{
    (void)state;
    enum { N = 5000 };
    static uint16_t in[6][N], got[N];
    struct hpf_case c = {
        .coll = HRP_ALL_REDUCE, .dtype = HRP_BF16, .redop = HRP_SUM, .count = N, .seed = 3, .exact = true};
    for (unsigned r = 0; r < 6; r++)
        hpf_input(&c, r, 0, N, in[r]);
    assert_int_equal(hpf_expected(&c, &layout, 0, 0, N, got), 0);
    for (unsigned i = 0; i < N; i++) {
        float a = hpf_bf16_to_f32(in[0][i]) + hpf_bf16_to_f32(in[2][i]);
        a += hpf_bf16_to_f32(in[5][i]);
        float b = hpf_bf16_to_f32(in[1][i]) + hpf_bf16_to_f32(in[4][i]);
        float total = hpf_bf16_to_f32(hpf_f32_to_bf16(a)) + hpf_bf16_to_f32(hpf_f32_to_bf16(b));
        total += hpf_bf16_to_f32(in[3][i]);
        assert_int_equal(got[i], hpf_f32_to_bf16(total));
    }
}

static struct hpf_case any_case(unsigned coll, unsigned dtype, unsigned redop, bool exact)
{
    return (struct hpf_case){
        .coll = coll, .dtype = dtype, .redop = redop, .root = 4, .count = 700, .seed = 11, .exact = exact};
}

/* The check passes what is right and finds each single wrong element. */
static void test_check_finds_every_error(void **state)
{
    (void)state;
    static unsigned char buf[700 * 6 * 8];
    for (unsigned coll = 0; coll < HRP_BARRIER; coll++) {
        for (unsigned dtype = 0; dtype < HRP_NDTYPES; dtype++) {
            for (unsigned redop = 0; redop < HRP_NREDOPS; redop++) {
                struct hpf_case c = any_case(coll, dtype, redop, true);
                size_t esize = hrp_dtype_size(dtype), n = hpf_recv_count(&c, 6);
                assert_int_equal(hpf_expected(&c, &layout, 2, 0, n, buf), 0);
                assert_int_equal(hpf_check(&c, &layout, 2, 0, n, buf, NULL), 0);
                uint64_t where = 0;
                buf[(n - 3) * esize] ^= 1;
                assert_int_equal(hpf_check(&c, &layout, 2, 0, n, buf, &where), 1);
                assert_int_equal(where, n - 3);
            }
        }
    }
}

/* Without the defined order a sum may differ in its last bits, and not by more. */
static void test_tolerance(void **state)
{
    (void)state;
    static float buf[700];
    struct hpf_case c = any_case(HRP_ALL_REDUCE, HRP_F32, HRP_SUM, true);
    hpf_expected(&c, &layout, 0, 0, 700, buf);
    c.exact = false;
    buf[10] = nextafterf(buf[10], 2);
    assert_int_equal(hpf_check(&c, &layout, 0, 0, 700, buf, NULL), 0);
    buf[10] += 1e-5f;
    assert_int_equal(hpf_check(&c, &layout, 0, 0, 700, buf, NULL), 1);
    buf[20] = NAN;
    assert_int_equal(hpf_check(&c, &layout, 0, 0, 700, buf, NULL), 2);
}

static void test_reduce_scatter_and_all_gather_places(void **state)
{
    (void)state;
    static int32_t all[4200], one[700];
    struct hpf_case c = any_case(HRP_ALL_REDUCE, HRP_I32, HRP_SUM, true);
    c.count = 4200;
    hpf_expected(&c, &layout, 0, 0, 4200, all);
    c = any_case(HRP_REDUCE_SCATTER, HRP_I32, HRP_SUM, true);
    hpf_expected(&c, &layout, 3, 0, 700, one);
    assert_memory_equal(one, all + 3 * 700, sizeof(one));
    c = any_case(HRP_ALL_GATHER, HRP_I32, HRP_SUM, true);
    hpf_expected(&c, &layout, 0, 0, 4200, all);
    hpf_input(&c, 5, 0, 700, one);
    assert_memory_equal(one, all + 5 * 700, sizeof(one));
}

/* ---- numbers of the table -------------------------------------------------------------------------------- */

static void test_ideal_and_factors(void **state)
{
    (void)state;
    static const unsigned even[8] = {0, 0, 1, 1, 2, 2, 3, 3};
    struct hpf_layout l = {.nranks = 8, .nnodes = 4, .node_of_rank = even};
    assert_int_equal(hpf_ideal_bytes(HRP_ALL_REDUCE, 4 << 20, &l), 6 << 20);
    assert_int_equal(hpf_ideal_bytes(HRP_REDUCE_SCATTER, 4 << 20, &l), 3 << 20);
    assert_int_equal(hpf_ideal_bytes(HRP_ALL_GATHER, 4 << 20, &l), 3 << 20);
    /* Three ranks' parts of six to two others; and what two of three nodes' ranks need from the third. */
    assert_int_equal(hpf_ideal_bytes(HRP_ALL_GATHER, 600, &layout), 600);
    assert_int_equal(hpf_ideal_bytes(HRP_REDUCE_SCATTER, 600, &layout), 500);
    l.nnodes = 1;
    assert_int_equal(hpf_ideal_bytes(HRP_ALL_REDUCE, 4 << 20, &l), 0);
    assert_true(fabs(hpf_busbw_factor(HRP_ALL_REDUCE, 8) - 1.75) < 1e-12);
    assert_true(fabs(hpf_busbw_factor(HRP_ALL_GATHER, 8) - 0.875) < 1e-12);
    assert_true(hpf_busbw_factor(HRP_ALL_REDUCE, 1) == 0);
}

static void test_number_fits_its_column(void **state)
{
    (void)state;
    char buf[32];
    assert_string_equal(hpf_number(12.3456, 9, buf, sizeof(buf)), "12.35");
    assert_string_equal(hpf_number(12345678.9, 9, buf, sizeof(buf)), "12345679");
    assert_true(strlen(hpf_number(1.5e12, 9, buf, sizeof(buf))) <= 9);
}

/* ---- the command line ------------------------------------------------------------------------------------ */

static enum hpf_parse parse(struct hpf_options *o, const char *line)
{
    static char text[256];
    char *argv[32] = {(char *)"hreduce-perf"};
    int argc = 1;
    snprintf(text, sizeof(text), "%s", line);
    for (char *word = strtok(text, " "); word && argc < 31; word = strtok(NULL, " "))
        argv[argc++] = word;
    return hpf_options_parse(o, argc, argv);
}

static void test_options(void **state)
{
    (void)state;
    struct hpf_options o;
    assert_int_equal(parse(&o, ""), HPF_RUN);
    assert_int_equal(o.min_bytes, 4 << 20);
    assert_int_equal(o.max_bytes, 4 << 20);
    assert_int_equal(parse(&o, "-b 8 -e 1G -f 2 -n 7 -w 0 -c 0 -d half -o max -z 0"), HPF_RUN);
    assert_int_equal(o.max_bytes, 1 << 30);
    assert_int_equal(o.dtype, HRP_F16);
    assert_int_equal(o.redop, HRP_MAX);
    assert_false(o.blocking);
    assert_int_equal(o.iters, 7);
    assert_int_equal(
        parse(&o, "--op reduce_scatter --local 4x8 --map roundrobin --algo ring --reproducible 0"), HPF_RUN);
    assert_int_equal(o.coll, HRP_REDUCE_SCATTER);
    assert_int_equal(o.local_nodes, 4);
    assert_int_equal(o.local_ranks, 8);
    assert_true(o.round_robin);
    /* nccl-tests calls the reduction --op. */
    assert_int_equal(parse(&o, "--op min --daemon-config threads=1 --local 1x1"), HPF_RUN);
    assert_int_equal(o.redop, HRP_MIN);
    assert_int_equal(o.nkeys, 1);

    static const char *const wrong[] = {"-b",
                                        "-b x",
                                        "-b 4Q",
                                        "-b -4",
                                        "-n 0",
                                        "-d float8",
                                        "-o plus",
                                        "--local 3",
                                        "--local 65x1",
                                        "-f 1 -b 4 -e 8",
                                        "-b 8 -e 4",
                                        "-b 0 -e 8",
                                        "--algo tree",
                                        "word",
                                        "--nothing",
                                        "-T 0",
                                        "--map block --keep-logs /tmp",
                                        "-r 2 --local 1x2"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        assert_int_equal(parse(&o, wrong[i]), HPF_USAGE);
}

/* ---- JSON ------------------------------------------------------------------------------------------------ */

static void test_json(void **state)
{
    (void)state;
    struct hpf_json doc, v = {0}, w = {0};
    char text[64];
    uint64_t n = 0;
    assert_true(hpf_json_parse(
        " {\"a\": [1, {\"b\": \"x\\\"\\u00e9\\n\"}, []], \"tx\" : 18446744073709551615 , \"c\":null} ",
        &doc));
    assert_true(hpf_json_member(doc, "tx", &v) && hpf_json_uint(v, &n));
    assert_true(n == UINT64_MAX);
    assert_true(hpf_json_member(doc, "a", &v) && hpf_json_element(v, 1, &w) && hpf_json_member(w, "b", &w));
    assert_true(hpf_json_string(w, text, sizeof(text)));
    assert_string_equal(text, "x\"?\n");
    assert_true(hpf_json_element(v, 2, &w));
    assert_false(hpf_json_element(w, 0, &w));
    assert_false(hpf_json_element(v, 3, &w));
    assert_false(hpf_json_member(doc, "b", &w));
    assert_true(hpf_json_member(doc, "c", &v));
    assert_false(hpf_json_uint(v, &n));
    static const char *const wrong[] = {"",      "{",     "{\"a\"}", "{\"a\":}", "[1,", "[1 2]",
                                        "\"abc", "{a:1}", "[1]]",    "tru",      "\"\\"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        assert_false(hpf_json_parse(wrong[i], &doc));
    char deep[300];
    memset(deep, '[', sizeof(deep) - 1);
    deep[sizeof(deep) - 1] = 0;
    assert_false(hpf_json_parse(deep, &doc));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_half_round_trip),
        cmocka_unit_test(test_half_ties),
        cmocka_unit_test(test_pattern_is_a_function_of_the_index),
        cmocka_unit_test(test_guard),
        cmocka_unit_test(test_defined_sum),
        cmocka_unit_test(test_check_finds_every_error),
        cmocka_unit_test(test_tolerance),
        cmocka_unit_test(test_reduce_scatter_and_all_gather_places),
        cmocka_unit_test(test_ideal_and_factors),
        cmocka_unit_test(test_number_fits_its_column),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_json),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
