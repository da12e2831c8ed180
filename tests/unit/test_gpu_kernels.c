/* SPDX-License-Identifier: MIT */
/*
 * The GPU kernels without a GPU: their own source emulated, and the CPU twin that stands in for them behind a
 * fake driver, in all cases of tests/lib/gpu_cases.h; how launches are described; the signal.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/lib/gpu_cases.h"
#include "tests/sim/cuda_emulated.h"

#ifdef __SANITIZE_THREAD__ /* each access costs twenty times as much */
#define THIN 211u
#else
#define THIN 37u
#endif
#define MISALIGNED 716

typedef int (*launch_fn)(const char *name, uint32_t blocks, uint32_t threads, const void *args);

struct own {
    launch_fn launch;
    uint64_t word;
    uint32_t blocks;
};

static int run(struct gpu_cases_lab *lab, struct hrg_launch *l)
{
    struct own *own = lab->own;
    const uint64_t before = own->word;
    int err;

    *hrg_launch_signal(l) = (struct hrg_signal){
        .word = (uintptr_t)&own->word, .value = before + 1, .blocks = (uintptr_t)&own->blocks};
    err = own->launch(hrg_kernel_name[l->kernel], l->blocks, l->threads, &l->args);
    return err ? err : own->word != before + 1 ? -ETIME : own->blocks ? -EPROTO : 0;
}

static void run_cases(launch_fn launch, uint32_t max_blocks)
{
    struct own own = {.launch = launch};
    struct gpu_cases_lab lab = {
        .bank_bytes = gpu_cases_bank_bytes(), .max_blocks = max_blocks, .run = run, .own = &own};
    char why[256] = "";
    long cases;

    for (unsigned b = 0; b < GPU_CASES_BANKS; b++) {
        lab.bank[b].host = aligned_alloc(64, (lab.bank_bytes + 63) / 64 * 64);
        assert_non_null(lab.bank[b].host);
        lab.bank[b].device = (uintptr_t)lab.bank[b].host;
    }
    cases = gpu_cases_run(&lab, 20261129 + max_blocks, THIN, why, sizeof(why));
    if (cases < 0)
        fail_msg("%s", why);
    assert_true(cases > 1000 / (int)THIN);
    for (unsigned b = 0; b < GPU_CASES_BANKS; b++)
        free(lab.bank[b].host);
}

static void emulated_one_block(void **state)
{
    (void)state;
    run_cases(cuda_emulated_launch, 1);
}

static void emulated_many_blocks(void **state)
{
    (void)state;
    run_cases(cuda_emulated_launch, 5);
}

static void twin(void **state)
{
    (void)state;
    run_cases(hrg_cpu_launch, 264);
}

static void grids(void **state)
{
    const struct hrk_fold f = hrk_fold_single(HRP_F32, HRP_SUM, 2);
    const uint64_t src[2] = {4096, 8192}, dst[1] = {4096};
    struct hrg_launch l;

    (void)state;
    assert_int_equal(hrg_fold_launch(&l, &f, dst, 1, src, 2, 256, 264), 0);
    assert_int_equal(l.args.fold.vectors, 64);
    assert_int_equal(l.blocks, 1);
    assert_int_equal(l.threads, 64);
    assert_int_equal(hrg_fold_launch(&l, &f, dst, 1, src, 2, 4096, 264), 0);
    assert_int_equal(l.blocks * l.threads, 1024);
    assert_int_equal(hrg_fold_launch(&l, &f, dst, 1, src, 2, 1 << 24, 264), 0);
    assert_int_equal(l.blocks, 264);
    assert_int_equal(l.threads, HRG_BLOCK_THREADS);
    /* Nothing to do still signals. */
    assert_int_equal(hrg_fold_launch(&l, &f, dst, 1, src, 2, 0, 264), 0);
    assert_int_equal(l.blocks, 1);
    assert_int_equal(l.args.fold.vectors, 0);
}

/* Elements before the first vector, when all pointers share a phase; none when they do not. */
static void phases(void **state)
{
    const struct hrk_fold f = hrk_fold_single(HRP_F16, HRP_SUM, 2);
    const struct hrk_fold wide = hrk_fold_partial(HRP_F16, HRP_F32, HRP_SUM, 2);
    uint64_t src[2] = {4096 + 6, 8192 + 22}, dst[1] = {16384 + 6};
    struct hrg_launch l;

    (void)state;
    assert_int_equal(hrg_fold_launch(&l, &f, dst, 1, src, 2, 100, 4), 0);
    assert_int_equal(l.args.fold.head, 5);
    assert_int_equal(l.args.fold.vectors, 11);
    assert_int_equal(l.args.fold.bytewise, 0);
    dst[0] = 16384 + 12;
    assert_int_equal(hrg_fold_launch(&l, &wide, dst, 1, src, 2, 100, 4), 0);
    assert_int_equal(l.args.fold.head, 5);
    dst[0] = 16384 + 8;
    assert_int_equal(hrg_fold_launch(&l, &f, dst, 1, src, 2, 100, 4), 0);
    assert_int_equal(l.args.fold.vectors, 0);
    assert_int_equal(l.args.fold.bytewise, 0);
    dst[0] = 16384 + 7;
    assert_int_equal(hrg_fold_launch(&l, &f, dst, 1, src, 2, 100, 4), 0);
    assert_int_equal(l.args.fold.vectors, 0);
    assert_int_equal(l.args.fold.bytewise, 1);
}

static void refusals(void **state)
{
    const struct hrk_fold f = hrk_fold_single(HRP_F32, HRP_SUM, 2);
    struct hrk_fold odd = {.in = HRP_F64, .out = HRP_F32, .op = HRP_SUM};
    uint64_t p[HRG_MAX_SINKS + 1] = {0};
    struct hrg_launch l;

    (void)state;
    assert_int_equal(hrg_fold_launch(&l, &f, p, 1, p, 0, 1, 1), -EINVAL);
    assert_int_equal(hrg_fold_launch(&l, &f, p, 0, p, 1, 1, 1), -EINVAL);
    assert_int_equal(hrg_fold_launch(&l, &f, p, 1, p, HRG_MAX_SOURCES + 1, 1, 1), -EINVAL);
    assert_int_equal(hrg_fold_launch(&l, &f, p, HRG_MAX_SINKS + 1, p, 1, 1, 1), -EINVAL);
    assert_int_equal(hrg_fold_launch(&l, &f, p, 1, p, 1, UINT64_MAX / 2, 1), -EINVAL);
    assert_int_equal(hrg_fold_launch(&l, &odd, p, 1, p, 1, 1, 1), -EINVAL);
    odd.in = HRP_NDTYPES;
    assert_int_equal(hrg_fold_launch(&l, &odd, p, 1, p, 1, 1, 1), -EINVAL);
    assert_int_equal(hrg_nan_launch(&l, HRP_I32, p, 1, 1, 1), -EINVAL);
    assert_int_equal(hrg_copy_launch(&l, p, HRG_MAX_SINKS + 1, 0, 1, 1), -EINVAL);
}

/* What a GPU would refuse, the twin refuses: else a test without a GPU would pass what fails on one. */
static void twin_refuses(void **state)
{
    const struct hrk_fold f = hrk_fold_single(HRP_F32, HRP_SUM, 1);
    _Alignas(16) uint8_t memory[128] = {0};
    uint64_t src = (uintptr_t)memory, dst = (uintptr_t)(memory + 64);
    struct hrg_launch l;

    (void)state;
    assert_int_equal(hrg_fold_launch(&l, &f, &dst, 1, &src, 1, 8, 1), 0);
    assert_int_equal(hrg_cpu_launch("hrg_fold_f32_f32", 1, 32, &l.args), 0);
    assert_int_equal(hrg_cpu_launch("hrg_fold_none", 1, 32, &l.args), 500);
    assert_int_equal(hrg_cpu_launch("hrg_fold_f32_f32", 1, HRG_BLOCK_THREADS + 32, &l.args), 1);
    l.args.fold.src[0] += 4;
    assert_int_equal(hrg_cpu_launch("hrg_fold_f32_f32", 1, 32, &l.args), MISALIGNED);
    l.args.fold.vectors = 0;
    assert_int_equal(hrg_cpu_launch("hrg_fold_f32_f32", 1, 32, &l.args), 0);
    l.args.fold.src[0] += 1;
    assert_int_equal(hrg_cpu_launch("hrg_fold_f32_f32", 1, 32, &l.args), MISALIGNED);
    l.args.fold.bytewise = 1;
    assert_int_equal(hrg_cpu_launch("hrg_fold_f32_f32", 1, 32, &l.args), 0);
}

/* A launch told to stop stops, and signals all the same. */
static void aborts(void **state)
{
    const uint64_t n = UINT64_C(1) << 20;
    uint8_t *src = calloc(n, 1), *dst = calloc(n, 1);
    uint64_t word = 0, to, from;
    uint32_t blocks = 0, stop = 1;
    struct hrg_launch l;

    (void)state;
    assert_non_null(src);
    assert_non_null(dst);
    memset(src, 1, n);
    from = (uintptr_t)src;
    to = (uintptr_t)dst;
    assert_int_equal(hrg_copy_launch(&l, &to, 1, from, n, 1), 0);
    *hrg_launch_signal(&l) = (struct hrg_signal){
        .word = (uintptr_t)&word, .value = 9, .blocks = (uintptr_t)&blocks, .abort = (uintptr_t)&stop};
    assert_int_equal(cuda_emulated_launch("hrg_copy", 1, 32, &l.args), 0);
    assert_int_equal(word, 9);
    assert_int_equal(dst[0], 1);
    assert_int_equal(dst[n - 1], 0);
    stop = 0;
    assert_int_equal(cuda_emulated_launch("hrg_copy", 1, 32, &l.args), 0);
    assert_memory_equal(src, dst, n);
    free(src);
    free(dst);
}

static void image(void **state)
{
    const char *why = NULL;

    (void)state;
    assert_int_equal(hrg_kernels_image(&why) != NULL, HREDUCE_CUDA);
    assert_non_null(why);
#if HREDUCE_CUDA
    assert_memory_equal(hrg_kernels_image(NULL), "\x50\xed\x55\xba", 4);
#else
    assert_non_null(strstr(why, "HREDUCE_GPU_KERNELS"));
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(emulated_one_block),
        cmocka_unit_test(emulated_many_blocks),
        cmocka_unit_test(twin),
        cmocka_unit_test(grids),
        cmocka_unit_test(phases),
        cmocka_unit_test(refusals),
        cmocka_unit_test(twin_refuses),
        cmocka_unit_test(aborts),
        cmocka_unit_test(image),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
