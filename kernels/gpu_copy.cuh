/* SPDX-License-Identifier: MIT */
/* Fan-out copies and the NaN fill of failed ops. */
#ifndef HRK_GPU_COPY_CUH
#define HRK_GPU_COPY_CUH

#include "kernels/gpu_device.cuh"

/* Words a thread loads before it stores the first: enough bytes under way to fill a link. */
#define COPY_BATCH 4

template <typename Word> static __device__ __forceinline__ void copy_words(const hrg_copy_args &a)
{
    const Word *src = reinterpret_cast<const Word *>(a.src + a.head);
    const uint64_t step = thread_count();
    unsigned round = 0;

    for (uint64_t i = thread_index(); i < a.words; i += COPY_BATCH * step) {
        Word w[COPY_BATCH];
#pragma unroll
        for (int k = 0; k < COPY_BATCH; k++)
            if (i + k * step < a.words)
                w[k] = __ldcs(src + i + k * step);
        for (unsigned d = 0; d < a.ndst; d++) {
            Word *dst = reinterpret_cast<Word *>(a.dst[d] + a.head);
#pragma unroll
            for (int k = 0; k < COPY_BATCH; k++)
                if (i + k * step < a.words)
                    dst[i + k * step] = w[k];
        }
        if (aborted(a.signal, round++))
            return;
    }
    /* The bytes before the first word and behind the last: fewer than two words. */
    const uint64_t body = a.words * sizeof(Word), rest = a.bytes - body;
    for (uint64_t r = thread_index(); r < rest; r += step) {
        const uint64_t at = r < a.head ? r : r + body;
        const uint8_t b = *reinterpret_cast<const uint8_t *>(a.src + at);
        for (unsigned d = 0; d < a.ndst; d++)
            *reinterpret_cast<uint8_t *>(a.dst[d] + at) = b;
    }
}

template <typename Bits> static __device__ __forceinline__ void fill(const hrg_nan_args &a)
{
    unsigned round = 0;

    for (uint64_t i = thread_index(); i < a.n; i += thread_count()) {
        for (unsigned d = 0; d < a.ndst; d++)
            store_any<Bits>(a.dst[d] + i * sizeof(Bits), Bits(a.pattern), a.bytewise);
        if (aborted(a.signal, round++))
            return;
    }
}

#endif
