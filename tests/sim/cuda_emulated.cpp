/* SPDX-License-Identifier: MIT */
/*
 * The CUDA kernels' own source, compiled for the CPU: every thread of every block, one after another, so that
 * the arithmetic and the indexing of kernels/ .cu files are tested where no GPU is. The last thread of a block
 * runs first: thread 0, which signals, then finds the others' work done, as behind a barrier. Built with the
 * compiler's alignment checks, because a GPU takes no misaligned access.
 */
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};

template <typename To, typename From> static To cast(From v)
{
    static_assert(sizeof(To) == sizeof(From), "same bits");
    To to;
    memcpy(&to, &v, sizeof(to));
    return to;
}

template <typename T> static T __ldcs(const T *p)
{
    return *p;
}

static float __uint_as_float(uint32_t v)
{
    return cast<float>(v);
}
static uint32_t __float_as_uint(float v)
{
    return cast<uint32_t>(v);
}
static double __longlong_as_double(long long v)
{
    return cast<double>(v);
}
static long long __double_as_longlong(double v)
{
    return cast<long long>(v);
}
static float __double2float_rn(double v)
{
    return (float)v;
}
static float __uint2float_rn(uint32_t v)
{
    return (float)v;
}
static double __uint2double_rn(uint32_t v)
{
    return (double)v;
}
static float __fadd_rn(float a, float b)
{
    return a + b;
}
static float __fmul_rn(float a, float b)
{
    return a * b;
}
static float __fdiv_rn(float a, float b)
{
    return a / b;
}
static double __dadd_rn(double a, double b)
{
    return a + b;
}
static double __dmul_rn(double a, double b)
{
    return a * b;
}
static double __ddiv_rn(double a, double b)
{
    return a / b;
}
static void __syncthreads() {}
static void __threadfence_system() {}

static uint32_t atomicAdd(uint32_t *p, uint32_t v)
{
    uint32_t old = *p;
    *p += v;
    return old;
}

static float half_to_float(uint16_t b)
{
    const uint32_t sign = (uint32_t)(b & 0x8000) << 16, mag = b & 0x7fff;

    if (mag >= 0x7c00)
        return cast<float>(sign | 0x7f800000 | mag << 13);
    float v = (float)mag * 0x1p-24f; /* a subnormal half; else exponent and mantissa are rebiased */
    return mag < 0x400 ? cast<float>(sign | cast<uint32_t>(v))
                       : cast<float>(sign | ((mag << 13) + (112u << 23)));
}

/* In units of the spacing around v, rounded by nearbyint. */
static uint16_t float_to_half(float v)
{
    const uint32_t u = cast<uint32_t>(v), sign = u >> 16 & 0x8000;
    const double x = cast<float>(u & 0x7fffffff);
    int e;

    if (x != x)
        return 0x7fff; /* as the instruction does; the kernel puts its own NaN there */
    if (x >= 65520.0)
        return (uint16_t)(sign | 0x7c00);
    (void)frexp(x, &e); /* x in [2^(e-1), 2^e) */
    e = x == 0 || e - 1 < -14 ? -14 : e - 1;
    /* The hidden bit and a carry into the next exponent add up by themselves. */
    return (uint16_t)(sign | (((uint32_t)(e + 14) << 10) + (uint32_t)nearbyint(ldexp(x, 10 - e))));
}

#define HRG_HALF_CONVERSIONS_GIVEN
#include "kernels/gpu_kernels.cu"

template <typename Args> static void run(void (*kernel)(const Args), const void *args)
{
    const Args &a = *static_cast<const Args *>(args);

    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
        for (unsigned t = blockDim.x; t > 0; t--) {
            threadIdx.x = t - 1;
            kernel(a);
        }
    }
}

/* As hrg_cpu_launch of kernels/gpu_kernels.h. */
extern "C" int cuda_emulated_launch(const char *name, uint32_t blocks, uint32_t threads, const void *args)
{
    gridDim.x = blocks;
    blockDim.x = threads;
#define RUN(kernel, in, out, acc)               \
    if (strcmp(name, "hrg_" #kernel) == 0) {    \
        run<hrg_fold_args>(hrg_##kernel, args); \
        return 0;                               \
    }
    HRG_FOLD_KERNELS(RUN)
    if (strcmp(name, "hrg_copy") == 0) {
        run<hrg_copy_args>(hrg_copy, args);
        return 0;
    }
    if (strcmp(name, "hrg_fill_nan") == 0) {
        run<hrg_nan_args>(hrg_fill_nan, args);
        return 0;
    }
    return 500;
}
