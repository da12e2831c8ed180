/* SPDX-License-Identifier: MIT */
/*
 * The arithmetic of hreduce behind one header: folding many sources into many destinations, fan-out copies
 * and the NaN fill of failed ops. This text is the specification of the result; the host code (scalar, AVX2,
 * AVX-512) follows it bit for bit, and every device kernel has to as well.
 *
 * 1. Accumulation type A. A fold has an element type T: the type of the user's buffer. Where the wire type is
 *    wider than T (f32 between f16 or bf16), T is the narrower of `in` and `out`.
 *
 *        T          sum prod min max    avg
 *        f32        f32                 f64
 *        f64        f64                 f64   (an f64 avg overflows where the sum of the elements does)
 *        f16        f32                 f32   (65504 times 2^32 ranks is finite in f32)
 *        bf16       f32                 f64
 *        integer    T, wrapping         T, wrapping
 *
 *    So the mean of f32, f16 and bf16 is finite whenever the true mean is. A conversion to A is exact.
 *
 * 2. Fold. The accumulator starts as the first source itself (never 0 + x, so a lone -0 stays -0; with
 * weights it starts as w[0] * x) and takes the other sources from left to right, each step rounded to A (to
 * nearest, ties to even): sum, avg   acc + x; with weights acc + (w * x), product and sum rounded separately:
 * no FMA prod       acc * x; integers wrap, signed ones too min        x if x < acc or x is NaN, else acc (so
 * of -0 and +0 the first stays) max        x if x > acc or x is NaN, else acc Weights and divisor are
 * converted to A first. Subnormals are kept everywhere: no flush to zero.
 *
 * 3. Finish. A non-zero divisor divides the accumulator by a real division in A, never by a reciprocal;
 * integers truncate toward zero, after the wrap. Then the value is converted to `out`, to nearest, ties to
 * even: f64 to 16 bits always goes through f32; f32 to f16 overflows to infinity and keeps subnormals; f32 to
 * bf16 rounds on the upper 16 bits. (The bf16 instructions of some CPUs flush subnormals and must not be
 * used.) Every NaN is stored as the canonical quiet NaN of `out`: 0x7fc00000, 0x7ff8000000000000, 0x7e00,
 * 0x7fc0, positive and without the payload, also when there is one source only. hrk_copy alone carries NaN
 * payloads through.
 *
 * 4. One exception: a fold with weights over exactly one source whose weight equals the divisor applies
 * neither, so that a mean passes the total of one node unchanged, whatever A can hold.
 *
 * All of it assumes the default floating point environment (round to nearest, no FTZ or DAZ) in the calling
 * thread.
 *
 * Threads: every function may be called from any thread at once; none allocates, locks or blocks.
 */
#ifndef HRK_KERNELS_H
#define HRK_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "proto/types.h"

/* How values are folded. Made by the three functions below; a plain value, copied freely. */
struct hrk_fold {
    uint8_t in;     /* enum hrp_dtype of the sources */
    uint8_t out;    /* enum hrp_dtype of the destinations: `in`, or f32 against f16 or bf16 */
    uint8_t op;     /* enum hrp_redop */
    uint8_t stream; /* nonzero: destinations will not be read soon; they are written past the caches */
    const uint32_t
        *weight;      /* float avg of means: ranks behind each source, at least nsrc of them; else NULL */
    uint32_t divisor; /* avg: what the accumulated value is divided by at the end; 0: nothing */
};

/*
 * The partial of a node: n_local sources of dtype into the wire type. wire is dtype, or HRP_F32 for a 16-bit
 * dtype. For the avg of a float type the partial is the node's mean; for the avg of an integer type it is the
 * wrapped sum.
 */
struct hrk_fold hrk_fold_partial(unsigned dtype, unsigned wire, unsigned op, uint32_t n_local);

/*
 * The total: partials of the wire type, one a node in node-index order, into dtype. weight[i] is the number
 * of ranks behind partial i; it is used by the avg of float types only, is not copied and must outlive the
 * fold. nranks is the number of ranks of all nodes together.
 */
struct hrk_fold hrk_fold_total(unsigned wire, unsigned dtype, unsigned op, const uint32_t *weight,
                               uint32_t nranks);

/*
 * Both in one step for a communicator of one node: nranks sources of dtype into dtype. Gives the same bits as
 * hrk_fold_total over the one hrk_fold_partial, whatever the wire type.
 */
struct hrk_fold hrk_fold_single(unsigned dtype, unsigned op, uint32_t nranks);

/*
 * dst[d][i] = finish(fold of src[0][i] ... src[nsrc - 1][i]) for i in 0 .. n - 1 and every d.
 *
 * n counts elements and may be 0; nsrc and ndst are at least 1 and not limited. No pointer needs any
 * alignment, not even its element's. A destination may be exactly equal to a source when `in` and `out` have
 * the same size: all sources of an element are read before a destination of it is written. Any other overlap
 * between a destination and a source, or between two destinations, is the caller's error; sources may overlap
 * each other. With `stream` the stores are fenced before the call returns, so that a plain release store
 * publishes them.
 */
void hrk_fold(const struct hrk_fold *f, void *const *dst, unsigned ndst, const void *const *src,
              unsigned nsrc, size_t n);

/*
 * Fan-out: bytes of src into every dst, unchanged. A dst that equals src is skipped; other overlap is the
 * caller's error. stream as in struct hrk_fold.
 */
void hrk_copy(void *const *dst, unsigned ndst, const void *src, size_t bytes, int stream);

/* n elements of a float type become the canonical quiet NaN; integer types are left untouched. */
void hrk_fill_nan(unsigned dtype, void *dst, size_t n);
/* The same for the bytes [from, to) of a stream that passes through a ring: whole elements, as is the ring. */
void hrk_fill_nan_ring(unsigned dtype, char *ring, uint64_t ring_bytes, uint64_t from, uint64_t to);

/*
 * The instruction set in use. It is found at first use from what both the CPU and the kernel support; the
 * bits of the result do not depend on it.
 */
enum hrk_level {
    HRK_SCALAR = 0, /* any machine */
    HRK_AVX2 = 1,   /* AVX2 and F16C */
    HRK_AVX512 = 2, /* AVX-512 F, BW, DQ and VL */
};

enum hrk_level hrk_get_level(void);
/* "scalar", "avx2" or "avx512"; "unknown" for anything else. */
const char *hrk_level_name(enum hrk_level level);
/*
 * For tests: calls that start afterwards use this level. 0, -EINVAL for a value outside the enum, or -ENOTSUP
 * when this machine lacks it; the level is then unchanged.
 */
int hrk_set_level(enum hrk_level level);

#endif
