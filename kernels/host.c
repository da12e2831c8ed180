/* SPDX-License-Identifier: MIT */
/* Host arithmetic: how a fold is described, cut into blocks, fanned out, and which instruction set does it.
 */
#include <assert.h>
#include <errno.h>
#include <stdatomic.h>

#include "kernels/host.h"

#if HRK_X86
#include <cpuid.h>
#endif

/*
 * Bytes of a block in its wider type. A block is folded once and copied to the other destinations from the
 * first-level cache; it leaves room there for the lines that the sources bring in.
 */
#define BLOCK_BYTES ((size_t)4096)

static int is_float(unsigned dtype)
{
    return dtype <= HRP_BF16;
}

/* Levels */

#if HRK_X86
static uint64_t enabled_state(void)
{
    uint32_t lo, hi;

    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

static enum hrk_level best_level(void)
{
    const uint64_t ymm = 0x06, zmm = 0xe6; /* state the kernel saves at a switch of threads */
    const unsigned avx = bit_OSXSAVE | bit_AVX | bit_F16C;
    const unsigned avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    unsigned a, b, c, d;
    uint64_t state;

    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & avx) != avx)
        return HRK_SCALAR;
    state = enabled_state();
    if ((state & ymm) != ymm || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2))
        return HRK_SCALAR;
    return (state & zmm) == zmm && (b & avx512) == avx512 ? HRK_AVX512 : HRK_AVX2;
}
#else
static enum hrk_level best_level(void)
{
    return HRK_SCALAR;
}
#endif

/* -1 until the first use. Threads that race to find it all find the same. */
static atomic_int current_level = -1;

enum hrk_level hrk_get_level(void)
{
    int level = atomic_load_explicit(&current_level, memory_order_relaxed);

    if (level < 0) {
        int unset = -1;

        level = (int)best_level();
        if (!atomic_compare_exchange_strong(&current_level, &unset, level))
            level = unset;
    }
    return (enum hrk_level)level;
}

const char *hrk_level_name(enum hrk_level level)
{
    switch (level) {
    case HRK_SCALAR:
        return "scalar";
    case HRK_AVX2:
        return "avx2";
    case HRK_AVX512:
        return "avx512";
    }
    return "unknown";
}

int hrk_set_level(enum hrk_level level)
{
    if ((int)level < HRK_SCALAR || (int)level > HRK_AVX512)
        return -EINVAL;
    if (level > best_level())
        return -ENOTSUP;
    atomic_store(&current_level, (int)level);
    return 0;
}

static const struct hrk_host_ops *current_ops(void)
{
    switch (hrk_get_level()) {
#if HRK_X86
    case HRK_AVX512:
        return &hrk_host_avx512;
    case HRK_AVX2:
        return &hrk_host_avx2;
#endif
    default:
        return &hrk_host_scalar;
    }
}

/* Descriptions of a fold */

struct hrk_fold hrk_fold_partial(unsigned dtype, unsigned wire, unsigned op, uint32_t n_local)
{
    struct hrk_fold f = {.in = (uint8_t)dtype, .out = (uint8_t)wire, .op = (uint8_t)op};

    if (op == HRP_AVG && is_float(dtype))
        f.divisor = n_local;
    else if (op == HRP_AVG)
        f.op = HRP_SUM;
    return f;
}

struct hrk_fold hrk_fold_total(unsigned wire, unsigned dtype, unsigned op, const uint32_t *weight,
                               uint32_t nranks)
{
    struct hrk_fold f = {.in = (uint8_t)wire, .out = (uint8_t)dtype, .op = (uint8_t)op};

    if (op == HRP_AVG) {
        f.divisor = nranks;
        f.weight = is_float(dtype) ? weight : NULL;
    }
    return f;
}

struct hrk_fold hrk_fold_single(unsigned dtype, unsigned op, uint32_t nranks)
{
    struct hrk_fold f = {.in = (uint8_t)dtype, .out = (uint8_t)dtype, .op = (uint8_t)op};

    if (op == HRP_AVG)
        f.divisor = nranks;
    return f;
}

/* Integer avg: the wrapped sums in place become quotients, truncated toward zero. */

#define DIVIDE(ctype, wide)                       \
    for (size_t i = 0; i < n; i++) {              \
        ctype v;                                  \
        memcpy(&v, p + i * sizeof(v), sizeof(v)); \
        v = (ctype)((wide)v / (wide)divisor);     \
        memcpy(p + i * sizeof(v), &v, sizeof(v)); \
    }                                             \
    break

static void divide_integers(unsigned dtype, uint8_t *p, size_t n, uint32_t divisor)
{
    switch (dtype) {
    case HRP_I8:
        DIVIDE(int8_t, int64_t);
    case HRP_U8:
        DIVIDE(uint8_t, uint64_t);
    case HRP_I32:
        DIVIDE(int32_t, int64_t);
    case HRP_U32:
        DIVIDE(uint32_t, uint64_t);
    case HRP_I64:
        DIVIDE(int64_t, int64_t);
    case HRP_U64:
        DIVIDE(uint64_t, uint64_t);
    }
}

/* Folding */

static struct hrk_block block_of(const struct hrk_fold *f, void *const *dst, unsigned ndst,
                                 const void *const *src, unsigned nsrc)
{
    struct hrk_block b = {.src = src, .dst = dst, .nsrc = nsrc, .ndst = ndst, .out_type = f->out};

    /* The mean of the only node is the total: the product with its weight might not fit. */
    if (is_float(f->in) && !(f->weight && nsrc == 1 && f->weight[0] == f->divisor)) {
        b.weight = f->weight;
        b.divisor = f->divisor;
    }
    return b;
}

static void spread(const struct hrk_host_ops *ops, int stream, void *const *dst, unsigned ndst, size_t at,
                   const void *src, size_t bytes)
{
    for (unsigned d = 0; d < ndst; d++) {
        if (stream)
            ops->stream((uint8_t *)dst[d] + at, src, bytes);
        else
            memcpy((uint8_t *)dst[d] + at, src, bytes);
    }
}

void hrk_fold(const struct hrk_fold *f, void *const *dst, unsigned ndst, const void *const *src,
              unsigned nsrc, size_t n)
{
    const struct hrk_host_ops *ops = current_ops();
    const size_t osize = hrk_size(f->out);
    const uint32_t divisor = !is_float(f->in) && f->op == HRP_AVG ? f->divisor : 0;
    _Alignas(64) uint8_t block[BLOCK_BYTES];
    void *const near[1] = {block};
    hrk_block_fn fold;
    struct hrk_block b;

    assert(f->in < HRP_NDTYPES && f->out < HRP_NDTYPES && f->op < HRP_NREDOPS && nsrc > 0 && ndst > 0);
    fold = ops->select(f->in, f->out, f->op);
    b = block_of(f, dst, ndst, src, nsrc);
    if (!f->stream && !divisor) {
        b.n = n;
        fold(&b);
        return;
    }
    b.dst = near;
    b.ndst = 1;
    for (; b.first < n; b.first += b.n) {
        b.n = n - b.first < BLOCK_BYTES / osize ? n - b.first : BLOCK_BYTES / osize;
        fold(&b);
        if (divisor)
            divide_integers(f->out, block, b.n, divisor);
        spread(ops, f->stream, dst, ndst, b.first * osize, block, b.n * osize);
    }
    if (f->stream)
        ops->fence();
}

/* The plain copy is the sum of one source in 64-bit integers: one pass over the source for all destinations. */
static void copy_cached(const struct hrk_host_ops *ops, void *const *dst, unsigned ndst, const void *src,
                        size_t bytes)
{
    const void *const from[1] = {src};
    const size_t whole = bytes & ~(size_t)7;
    struct hrk_block b = {
        .src = from, .dst = dst, .nsrc = 1, .ndst = ndst, .n = whole / 8, .out_type = HRP_U64};

    if (ndst == 1) {
        memcpy(dst[0], src, bytes);
        return;
    }
    ops->select(HRP_U64, HRP_U64, HRP_SUM)(&b);
    spread(ops, 0, dst, ndst, whole, (const uint8_t *)src + whole, bytes - whole);
}

static void copy_streamed(const struct hrk_host_ops *ops, void *const *dst, unsigned ndst, const void *src,
                          size_t bytes)
{
    for (size_t at = 0; at < bytes; at += BLOCK_BYTES) {
        const size_t m = bytes - at < BLOCK_BYTES ? bytes - at : BLOCK_BYTES;

        spread(ops, 1, dst, ndst, at, (const uint8_t *)src + at, m);
    }
    ops->fence();
}

void hrk_copy(void *const *dst, unsigned ndst, const void *src, size_t bytes, int stream)
{
    const struct hrk_host_ops *ops = current_ops();

    for (unsigned d = 0; d < ndst;) {
        unsigned run = d;

        while (run < ndst && dst[run] != src)
            run++;
        if (run > d && stream)
            copy_streamed(ops, dst + d, run - d, src, bytes);
        else if (run > d)
            copy_cached(ops, dst + d, run - d, src, bytes);
        d = run + 1;
    }
}

#define FILL(ctype, nan)                                       \
    for (size_t i = 0; i < n; i++) {                           \
        const ctype v = nan;                                   \
        memcpy((uint8_t *)dst + i * sizeof(v), &v, sizeof(v)); \
    }                                                          \
    break

void hrk_fill_nan(unsigned dtype, void *dst, size_t n)
{
    switch (dtype) {
    case HRP_F32:
        FILL(uint32_t, HRK_NAN_F32);
    case HRP_F64:
        FILL(uint64_t, HRK_NAN_F64);
    case HRP_F16:
        FILL(uint16_t, HRK_NAN_F16);
    case HRP_BF16:
        FILL(uint16_t, HRK_NAN_BF16);
    }
}

void hrk_fill_nan_ring(unsigned dtype, char *ring, uint64_t ring_bytes, uint64_t from, uint64_t to)
{
    const uint64_t esize = hrp_dtype_size(dtype);
    while (from < to) {
        uint64_t at = from % ring_bytes;
        uint64_t n = to - from < ring_bytes - at ? to - from : ring_bytes - at;
        hrk_fill_nan(dtype, ring + at, n / esize);
        from += n;
    }
}
