/* SPDX-License-Identifier: MIT */
/* From a fold, copy or fill to the kernel, its arguments and its grid. */
#include <errno.h>
#include <string.h>

#include "kernels/gpu_kernels.h"

/* Threads of a block while the grid is not full: small blocks spread a small op over more multiprocessors. */
#define SMALL_BLOCK 256u
#define WARP 32u
#define MAX_BYTES (UINT64_C(1) << 60)

#define NAME(name, in, out, acc) [HRG_##name] = "hrg_" #name,
const char *const hrg_kernel_name[HRG_NKERNELS] = {
    HRG_FOLD_KERNELS(NAME)[HRG_copy] = "hrg_copy",
    [HRG_fill_nan] = "hrg_fill_nan",
};
#undef NAME

static int is_float(unsigned dtype)
{
    return dtype <= HRP_BF16;
}

static void set_grid(struct hrg_launch *l, uint64_t items, uint32_t max_blocks)
{
    if (max_blocks == 0)
        max_blocks = 1;
    if (items <= (uint64_t)SMALL_BLOCK * max_blocks) {
        uint64_t threads = (items + WARP - 1) / WARP * WARP;
        l->threads = threads < WARP ? WARP : threads < SMALL_BLOCK ? (uint32_t)threads : SMALL_BLOCK;
    } else {
        l->threads = HRG_BLOCK_THREADS;
    }
    uint64_t blocks = (items + l->threads - 1) / l->threads;
    l->blocks = blocks > max_blocks ? max_blocks : blocks ? (uint32_t)blocks : 1;
}

static int check_counts(unsigned nsrc, unsigned ndst, uint64_t n, uint64_t size)
{
    if (nsrc == 0 || nsrc > HRG_MAX_SOURCES || ndst == 0 || ndst > HRG_MAX_SINKS || n > MAX_BYTES / size)
        return -EINVAL;
    return 0;
}

/* Where the kernel of a fold accumulates; see the table of kernels.h. */
static unsigned accumulator(const struct hrk_fold *f)
{
    unsigned narrow = hrp_dtype_size(f->in) <= hrp_dtype_size(f->out) ? f->in : f->out;

    if (!is_float(narrow) || narrow == HRP_F64)
        return narrow;
    return f->op == HRP_AVG && narrow != HRP_F16 ? HRP_F64 : HRP_F32;
}

static int find_kernel(const struct hrk_fold *f)
{
    static const struct {
        uint8_t in, out, acc;
    } kernel[HRG_copy] = {
#define TYPES(name, i, o, a) [HRG_##name] = {HRP_##i, HRP_##o, HRP_##a},
        HRG_FOLD_KERNELS(TYPES)
#undef TYPES
    };
    unsigned acc = accumulator(f);

    for (int k = 0; k < HRG_copy; k++)
        if (kernel[k].in == f->in && kernel[k].out == f->out && kernel[k].acc == acc)
            return k;
    return -EINVAL;
}

static int aligned_at(const uint64_t *p, unsigned count, uint64_t offset, uint64_t align)
{
    for (unsigned i = 0; i < count; i++)
        if ((p[i] + offset) % align != 0)
            return 0;
    return 1;
}

static void cut_fold(struct hrg_fold_args *a, uint64_t in_size, uint64_t out_size)
{
    const uint64_t per_vector = 16 / (in_size < out_size ? in_size : out_size);

    a->bytewise = !aligned_at(a->src, a->nsrc, 0, in_size) || !aligned_at(a->dst, a->ndst, 0, out_size);
    for (uint64_t head = 0; head < 16 && head <= a->n; head++) {
        if (aligned_at(a->src, a->nsrc, head * in_size, 16) &&
            aligned_at(a->dst, a->ndst, head * out_size, 16)) {
            a->vectors = (a->n - head) / per_vector;
            a->head = a->vectors ? head : 0;
            return;
        }
    }
}

int hrg_fold_launch(struct hrg_launch *l, const struct hrk_fold *f, const uint64_t *dst, unsigned ndst,
                    const uint64_t *src, unsigned nsrc, uint64_t n, uint32_t max_blocks)
{
    struct hrg_fold_args *a = &l->args.fold;
    int kernel;

    if (f->in >= HRP_NDTYPES || f->out >= HRP_NDTYPES || f->op >= HRP_NREDOPS ||
        check_counts(nsrc, ndst, n, 8))
        return -EINVAL;
    kernel = find_kernel(f);
    if (kernel < 0)
        return kernel;
    memset(l, 0, sizeof(*l));
    l->kernel = (enum hrg_kernel)kernel;
    memcpy(a->src, src, nsrc * sizeof(*src));
    memcpy(a->dst, dst, ndst * sizeof(*dst));
    a->nsrc = nsrc;
    a->ndst = ndst;
    a->n = n;
    a->op = f->op;
    /* The mean of the only node is the total: neither weight nor divisor, see kernels.h, 4. */
    if (!(is_float(f->in) && f->weight && nsrc == 1 && f->weight[0] == f->divisor)) {
        a->divisor = f->op == HRP_AVG ? f->divisor : 0;
        a->weighted = is_float(f->in) && f->op == HRP_AVG && f->weight;
        if (a->weighted)
            memcpy(a->weight, f->weight, nsrc * sizeof(a->weight[0]));
    }
    cut_fold(a, hrp_dtype_size(f->in), hrp_dtype_size(f->out));
    set_grid(l, a->vectors ? a->vectors : n, max_blocks);
    return 0;
}

int hrg_copy_launch(struct hrg_launch *l, const uint64_t *dst, unsigned ndst, uint64_t src, uint64_t bytes,
                    uint32_t max_blocks)
{
    struct hrg_copy_args *a = &l->args.copy;

    if (check_counts(1, ndst, bytes, 1))
        return -EINVAL;
    memset(l, 0, sizeof(*l));
    l->kernel = HRG_copy;
    a->src = src;
    for (unsigned d = 0; d < ndst; d++)
        if (dst[d] != src)
            a->dst[a->ndst++] = dst[d];
    a->bytes = a->ndst ? bytes : 0;
    a->width = 1;
    a->words = a->bytes;
    for (unsigned w = 16; w >= 4; w /= 2) {
        uint64_t head = (w - src % w) % w;
        if (head + w <= a->bytes && aligned_at(a->dst, a->ndst, head, w)) {
            a->width = w;
            a->head = head;
            a->words = (a->bytes - head) / w;
            break;
        }
    }
    set_grid(l, a->words ? a->words : a->bytes, max_blocks);
    return 0;
}

int hrg_nan_launch(struct hrg_launch *l, unsigned dtype, const uint64_t *dst, unsigned ndst, uint64_t n,
                   uint32_t max_blocks)
{
    struct hrg_nan_args *a = &l->args.nan;

    if (!is_float(dtype) || check_counts(1, ndst, n, 8))
        return -EINVAL;
    memset(l, 0, sizeof(*l));
    l->kernel = HRG_fill_nan;
    a->size = (uint32_t)hrp_dtype_size(dtype);
    hrk_fill_nan(dtype, &a->pattern, 1);
    memcpy(a->dst, dst, ndst * sizeof(*dst));
    a->ndst = ndst;
    a->n = n;
    a->bytewise = !aligned_at(dst, ndst, 0, a->size);
    set_grid(l, n, max_blocks);
    return 0;
}

struct hrg_signal *hrg_launch_signal(struct hrg_launch *l)
{
    switch (l->kernel) {
    case HRG_copy:
        return &l->args.copy.signal;
    case HRG_fill_nan:
        return &l->args.nan.signal;
    default:
        return &l->args.fold.signal;
    }
}
