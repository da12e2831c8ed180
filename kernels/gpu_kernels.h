/* SPDX-License-Identifier: MIT */
/*
 * How a GPU kernel of hreduce is launched. kernels.h is the specification of what they compute: fold, copy and
 * NaN fill give the same bits as hrk_fold, hrk_copy and hrk_fill_nan. A kernel takes one argument struct by
 * value; the functions below fill it and say which kernel and which grid to launch it with, through the driver
 * API (cuLaunchKernel with one parameter, no dynamic shared memory).
 *
 * Addresses are device addresses as the launching context sees them: its own memory, a peer's, or pinned host
 * memory. They need no alignment; runs whose pointers share a phase within 16 bytes are moved in vectors.
 *
 * A kernel never waits for anything but its own loads and stores.
 */
#ifndef HRK_GPU_KERNELS_H
#define HRK_GPU_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

#define HRG_MAX_SOURCES 64u /* ranks of a node, or nodes */
#define HRG_MAX_SINKS 32u   /* ranks of a node, and the exchange's memory */
#define HRG_BLOCK_THREADS 512u

/*
 * Every kernel: X(name, source type, destination type, accumulation type). Those of one source and destination
 * type differ in the accumulation type of avg, see kernels.h.
 */
#define HRG_FOLD_KERNELS(X)                \
    X(fold_f32_f32, F32, F32, F32)         \
    X(fold_f32_f32_avg, F32, F32, F64)     \
    X(fold_f32_f16, F32, F16, F32)         \
    X(fold_f32_bf16, F32, BF16, F32)       \
    X(fold_f32_bf16_avg, F32, BF16, F64)   \
    X(fold_f64_f64, F64, F64, F64)         \
    X(fold_f16_f16, F16, F16, F32)         \
    X(fold_f16_f32, F16, F32, F32)         \
    X(fold_bf16_bf16, BF16, BF16, F32)     \
    X(fold_bf16_bf16_avg, BF16, BF16, F64) \
    X(fold_bf16_f32, BF16, F32, F32)       \
    X(fold_bf16_f32_avg, BF16, F32, F64)   \
    X(fold_i8, I8, I8, I8)                 \
    X(fold_u8, U8, U8, U8)                 \
    X(fold_i32, I32, I32, I32)             \
    X(fold_u32, U32, U32, U32)             \
    X(fold_i64, I64, I64, I64)             \
    X(fold_u64, U64, U64, U64)

enum hrg_kernel {
#define HRG_ENUM(name, in, out, acc) HRG_##name,
    HRG_FOLD_KERNELS(HRG_ENUM)
#undef HRG_ENUM
        HRG_copy,
    HRG_fill_nan,
    HRG_NKERNELS,
};

/* "hrg_fold_f32_f32", ...: the names in the image, indexed by enum hrg_kernel. */
extern const char *const hrg_kernel_name[HRG_NKERNELS];

/*
 * How the CPU learns that a launch is over: when all its stores are visible to the whole system, value is
 * stored to word, also when the launch was aborted. After that the launch touches no memory.
 */
struct hrg_signal {
    uint64_t word;   /* of a 64-bit word in pinned host memory, aligned to 8; 0: no signal */
    uint64_t value;  /* what is stored there */
    uint64_t blocks; /* of a uint32_t in the launching device's memory; 0 before, 0 after; a launch's own */
    uint64_t abort;  /* of a uint32_t in pinned host memory that ends long launches when nonzero; 0: none */
};

struct hrg_fold_args {
    uint64_t src[HRG_MAX_SOURCES];
    uint64_t dst[HRG_MAX_SINKS];
    struct hrg_signal signal;
    uint64_t n;       /* elements */
    uint64_t head;    /* elements before the first vector */
    uint64_t vectors; /* runs of 16 bytes of the narrower type; pointers at `head` are then aligned to 16 */
    uint32_t weight[HRG_MAX_SOURCES];
    uint32_t nsrc, ndst;
    uint32_t divisor; /* 0: none */
    uint8_t op;       /* enum hrp_redop */
    uint8_t weighted; /* nonzero: weight[] holds */
    uint8_t bytewise; /* nonzero: some pointer is not aligned to its element */
    uint8_t reserved;
};
_Static_assert(sizeof(struct hrg_fold_args) == 1096, "compiled into the kernels");

struct hrg_copy_args {
    uint64_t src;
    uint64_t dst[HRG_MAX_SINKS];
    struct hrg_signal signal;
    uint64_t bytes;
    uint64_t head;  /* bytes before the first word */
    uint64_t words; /* of `width` bytes */
    uint32_t ndst;
    uint32_t width; /* 16, 8, 4 or 1: pointers at `head` are aligned to it */
};
_Static_assert(sizeof(struct hrg_copy_args) == 328, "compiled into the kernels");

struct hrg_nan_args {
    uint64_t dst[HRG_MAX_SINKS];
    struct hrg_signal signal;
    uint64_t n;       /* elements */
    uint64_t pattern; /* one element */
    uint32_t ndst;
    uint32_t size; /* bytes of an element: 2, 4 or 8 */
    uint32_t bytewise;
    uint32_t reserved;
};
_Static_assert(sizeof(struct hrg_nan_args) == 320, "compiled into the kernels");

struct hrg_launch {
    enum hrg_kernel kernel;
    uint32_t blocks, threads; /* one-dimensional; threads are a multiple of 32 */
    union {
        struct hrg_fold_args fold;
        struct hrg_copy_args copy;
        struct hrg_nan_args nan;
    } args; /* its address is the one kernel parameter */
};

/*
 * The launch that does what hrk_fold, hrk_copy, hrk_fill_nan do, without a signal: the caller sets
 * args.*.signal (hrg_launch_signal). max_blocks bounds the grid, for instance twice the device's
 * multiprocessors. n or bytes of 0 give a launch of one block that only signals.
 * 0, or -EINVAL: more sources or sinks than HRG_MAX_*, none of them, a type or op out of range, the NaN of an
 * integer type, or more than 2^60 bytes.
 */
int hrg_fold_launch(struct hrg_launch *l, const struct hrk_fold *f, const uint64_t *dst, unsigned ndst,
                    const uint64_t *src, unsigned nsrc, uint64_t n, uint32_t max_blocks);
int hrg_copy_launch(struct hrg_launch *l, const uint64_t *dst, unsigned ndst, uint64_t src, uint64_t bytes,
                    uint32_t max_blocks);
int hrg_nan_launch(struct hrg_launch *l, unsigned dtype, const uint64_t *dst, unsigned ndst, uint64_t n,
                   uint32_t max_blocks);
/* The signal of whatever kind of launch it is. */
struct hrg_signal *hrg_launch_signal(struct hrg_launch *l);

/*
 * What cuModuleLoadData takes: machine code for the architectures of the Makefile's CUDA_ARCHS and PTX for
 * later ones. NULL when this build has none (CUDA=0), with *why a sentence. The file that the environment
 * variable HREDUCE_GPU_KERNELS names is taken instead of the built-in image, for a daemon without one, or to
 * try kernels; it is read once and kept. Any thread.
 */
const void *hrg_kernels_image(const char **why);

/*
 * The same kernels on the CPU, for tests that run without a GPU: addresses are then this process's. args is
 * the kernel's parameter. 0, or what the driver would report of such a launch: CUDA_ERROR_NOT_FOUND (500),
 * CUDA_ERROR_MISALIGNED_ADDRESS (716), CUDA_ERROR_INVALID_VALUE (1).
 */
int hrg_cpu_launch(const char *name, uint32_t blocks, uint32_t threads, const void *args);

#endif
