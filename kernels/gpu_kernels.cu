/* SPDX-License-Identifier: MIT */
/* The kernels by name; see gpu_kernels.h for how they are launched. */
#include "kernels/gpu_copy.cuh"
#include "kernels/gpu_fold.cuh"

#define KERNEL(name, Args) \
    extern "C" __global__ void __launch_bounds__(HRG_BLOCK_THREADS) hrg_##name(const __grid_constant__ Args a)

#define FOLD(name, in, out, acc) \
    KERNEL(name, hrg_fold_args)  \
    {                            \
        fold<in, out, acc>(a);   \
    }
HRG_FOLD_KERNELS(FOLD)

KERNEL(copy, hrg_copy_args)
{
    switch (a.width) {
    case 16:
        copy_words<uint4>(a);
        break;
    case 8:
        copy_words<uint2>(a);
        break;
    case 4:
        copy_words<uint32_t>(a);
        break;
    default:
        copy_words<uint8_t>(a);
    }
    finish(a.signal);
}

KERNEL(fill_nan, hrg_nan_args)
{
    switch (a.size) {
    case 2:
        fill<uint16_t>(a);
        break;
    case 4:
        fill<uint32_t>(a);
        break;
    default:
        fill<unsigned long long>(a);
    }
    finish(a.signal);
}
