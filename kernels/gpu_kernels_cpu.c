/* SPDX-License-Identifier: MIT */
/*
 * The kernels by the CPU, for a driver that is not one. The arguments are taken as a GPU would take them: a
 * vector that is not aligned is the error it would be there.
 */
#include <stdatomic.h>
#include <string.h>

#include "kernels/gpu_kernels.h"

#define CUDA_ERROR_INVALID_VALUE 1
#define CUDA_ERROR_NOT_FOUND 500
#define CUDA_ERROR_MISALIGNED_ADDRESS 716

static void *pointer(uint64_t address)
{
    return (void *)(uintptr_t)address; // NOLINT(performance-no-int-to-ptr): device addresses are integers
}

static int misaligned(const uint64_t *p, unsigned count, uint64_t offset, uint64_t align)
{
    for (unsigned i = 0; i < count; i++)
        if ((p[i] + offset) % align != 0)
            return 1;
    return 0;
}

static void raise_signal(const struct hrg_signal *s)
{
    if (s->word)
        atomic_store_explicit((_Atomic uint64_t *)pointer(s->word), s->value, memory_order_release);
}

static int run_fold(unsigned in, unsigned out, const struct hrg_fold_args *a)
{
    const struct hrk_fold f = {.in = (uint8_t)in,
                               .out = (uint8_t)out,
                               .op = a->op,
                               .weight = a->weighted ? a->weight : NULL,
                               .divisor = a->divisor};
    const uint64_t isize = hrp_dtype_size(in), osize = hrp_dtype_size(out);
    const uint64_t covered = a->head + a->vectors * (16 / (isize < osize ? isize : osize));
    const void *src[HRG_MAX_SOURCES];
    void *dst[HRG_MAX_SINKS];

    if (a->nsrc == 0 || a->nsrc > HRG_MAX_SOURCES || a->ndst == 0 || a->ndst > HRG_MAX_SINKS ||
        covered > a->n)
        return CUDA_ERROR_INVALID_VALUE;
    if (a->vectors && (misaligned(a->src, a->nsrc, a->head * isize, 16) ||
                       misaligned(a->dst, a->ndst, a->head * osize, 16)))
        return CUDA_ERROR_MISALIGNED_ADDRESS;
    if (!a->bytewise && (misaligned(a->src, a->nsrc, 0, isize) || misaligned(a->dst, a->ndst, 0, osize)))
        return CUDA_ERROR_MISALIGNED_ADDRESS;
    for (unsigned s = 0; s < a->nsrc; s++)
        src[s] = pointer(a->src[s]);
    for (unsigned d = 0; d < a->ndst; d++)
        dst[d] = pointer(a->dst[d]);
    hrk_fold(&f, dst, a->ndst, src, a->nsrc, a->n);
    raise_signal(&a->signal);
    return 0;
}

static int run_copy(const struct hrg_copy_args *a)
{
    void *dst[HRG_MAX_SINKS];

    if (a->ndst > HRG_MAX_SINKS || a->width == 0 || a->head + a->words * a->width > a->bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (a->words &&
        (misaligned(&a->src, 1, a->head, a->width) || misaligned(a->dst, a->ndst, a->head, a->width)))
        return CUDA_ERROR_MISALIGNED_ADDRESS;
    for (unsigned d = 0; d < a->ndst; d++)
        dst[d] = pointer(a->dst[d]);
    if (a->bytes)
        hrk_copy(dst, a->ndst, pointer(a->src), a->bytes, 0);
    raise_signal(&a->signal);
    return 0;
}

static int run_nan(const struct hrg_nan_args *a)
{
    if (a->ndst > HRG_MAX_SINKS || (a->size != 2 && a->size != 4 && a->size != 8))
        return CUDA_ERROR_INVALID_VALUE;
    if (!a->bytewise && misaligned(a->dst, a->ndst, 0, a->size))
        return CUDA_ERROR_MISALIGNED_ADDRESS;
    for (unsigned d = 0; d < a->ndst; d++)
        for (uint64_t i = 0; i < a->n; i++)
            memcpy((uint8_t *)pointer(a->dst[d]) + i * a->size, &a->pattern, a->size);
    raise_signal(&a->signal);
    return 0;
}

int hrg_cpu_launch(const char *name, uint32_t blocks, uint32_t threads, const void *args)
{
    if (blocks == 0 || threads == 0 || threads > HRG_BLOCK_THREADS || threads % 32 != 0)
        return CUDA_ERROR_INVALID_VALUE;
#define RUN(kernel, in, out, acc)          \
    if (strcmp(name, "hrg_" #kernel) == 0) \
        return run_fold(HRP_##in, HRP_##out, args);
    HRG_FOLD_KERNELS(RUN)
#undef RUN
    if (strcmp(name, "hrg_copy") == 0)
        return run_copy(args);
    if (strcmp(name, "hrg_fill_nan") == 0)
        return run_nan(args);
    return CUDA_ERROR_NOT_FOUND;
}
