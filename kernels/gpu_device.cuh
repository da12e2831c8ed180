/* SPDX-License-Identifier: MIT */
/*
 * What all kernels share: loads and stores of any alignment, and the end of a launch. Included by
 * gpu_kernels.cu alone.
 */
#ifndef HRK_GPU_DEVICE_CUH
#define HRK_GPU_DEVICE_CUH

#define _Static_assert static_assert
#include "kernels/gpu_kernels.h"

/* A vector is read once and by nobody else, so it should not push anything out of the caches. */
static __device__ __forceinline__ uint4 load16(uint64_t p)
{
    return __ldcs(reinterpret_cast<const uint4 *>(p));
}

static __device__ __forceinline__ void store16(uint64_t p, uint4 v)
{
    *reinterpret_cast<uint4 *>(p) = v;
}

/* One element anywhere. bytewise is the same in all threads of a launch. */
template <typename Bits> static __device__ __forceinline__ Bits load_any(uint64_t p, unsigned bytewise)
{
    if (!bytewise)
        return *reinterpret_cast<const Bits *>(p);
    uint64_t v = 0;
#pragma unroll
    for (unsigned i = 0; i < sizeof(Bits); i++)
        v |= uint64_t(reinterpret_cast<const uint8_t *>(p)[i]) << 8 * i;
    return Bits(v);
}

template <typename Bits>
static __device__ __forceinline__ void store_any(uint64_t p, Bits v, unsigned bytewise)
{
    if (!bytewise) {
        *reinterpret_cast<Bits *>(p) = v;
        return;
    }
#pragma unroll
    for (unsigned i = 0; i < sizeof(Bits); i++)
        reinterpret_cast<uint8_t *>(p)[i] = uint8_t(uint64_t(v) >> 8 * i);
}

static __device__ __forceinline__ uint64_t thread_index()
{
    return uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
}

static __device__ __forceinline__ uint64_t thread_count()
{
    return uint64_t(gridDim.x) * blockDim.x;
}

/*
 * Rounds of a loop between two looks at the abort word. A look crosses PCIe, so a short launch takes none, and
 * a long one ends within about the time of this many rounds.
 */
#define ROUNDS_PER_LOOK 64u

static __device__ __forceinline__ bool aborted(const hrg_signal &s, unsigned round)
{
    return round % ROUNDS_PER_LOOK == ROUNDS_PER_LOOK - 1 && s.abort &&
           *reinterpret_cast<const volatile uint32_t *>(s.abort) != 0;
}

/*
 * Every block makes its stores visible system-wide, then counts itself; the last one resets the counter for the
 * next launch and raises the word. The fences on both sides of the count order the other blocks' stores before
 * the word for whoever reads it.
 */
static __device__ __forceinline__ void finish(const hrg_signal &s)
{
    if (!s.word)
        return;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    __threadfence_system();
    if (gridDim.x > 1) {
        uint32_t *count = reinterpret_cast<uint32_t *>(s.blocks);
        if (atomicAdd(count, 1u) != gridDim.x - 1)
            return;
        *reinterpret_cast<volatile uint32_t *>(count) = 0;
        __threadfence_system();
    }
    *reinterpret_cast<volatile uint64_t *>(s.word) = s.value;
}

#endif
