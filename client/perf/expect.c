/* SPDX-License-Identifier: MIT */
#include "client/perf/expect.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "client/perf/pattern.h"

/* Elements that are computed together: small enough for the first cache, long enough to hide the calls. */
#define BLOCK 256

/* One block of a reduction. Floats of every type are exact in double. */
struct block {
    unsigned char raw[BLOCK * 8];  /* one rank's input */
    unsigned char want[BLOCK * 8]; /* the defined result */
    double part[BLOCK], total[BLOCK];
    double ref[BLOCK], size[BLOCK]; /* reference, and what its error is relative to */
    uint64_t iacc[BLOCK];
};

static bool is_float(unsigned dtype)
{
    return dtype <= HRP_BF16;
}

static bool reduces(unsigned coll)
{
    return coll == HRP_ALL_REDUCE || coll == HRP_REDUCE_SCATTER;
}

/* ---- single values --------------------------------------------------------------------------------------- */

static double load_float(unsigned dtype, const unsigned char *p)
{
    float f;
    double d;
    uint16_t h;
    switch (dtype) {
    case HRP_F32:
        memcpy(&f, p, 4);
        return f;
    case HRP_F64:
        memcpy(&d, p, 8);
        return d;
    case HRP_F16:
        memcpy(&h, p, 2);
        return hpf_f16_to_f32(h);
    default:
        memcpy(&h, p, 2);
        return hpf_bf16_to_f32(h);
    }
}

static void store_float(unsigned dtype, double v, unsigned char *p)
{
    float f = (float)v;
    uint16_t h;
    switch (dtype) {
    case HRP_F32:
        memcpy(p, &f, 4);
        break;
    case HRP_F64:
        memcpy(p, &v, 8);
        break;
    case HRP_F16:
        h = hpf_f32_to_f16(f);
        memcpy(p, &h, 2);
        break;
    default:
        h = hpf_f32_to_bf16(f);
        memcpy(p, &h, 2);
        break;
    }
}

static double round_to(unsigned dtype, double v)
{
    switch (dtype) {
    case HRP_F32:
        return (float)v;
    case HRP_F16:
        return hpf_f16_to_f32(hpf_f32_to_f16((float)v));
    case HRP_BF16:
        return hpf_bf16_to_f32(hpf_f32_to_bf16((float)v));
    default:
        return v;
    }
}

/* Sign- or zero-extended: arithmetic modulo 2^64 is then right modulo 2^bits, and comparisons are too. */
static uint64_t load_int(unsigned dtype, const unsigned char *p)
{
    int8_t i8;
    int32_t i32;
    uint32_t u32;
    uint64_t u64;
    switch (dtype) {
    case HRP_I8:
        memcpy(&i8, p, 1);
        return (uint64_t)(int64_t)i8;
    case HRP_U8:
        return *p;
    case HRP_I32:
        memcpy(&i32, p, 4);
        return (uint64_t)(int64_t)i32;
    case HRP_U32:
        memcpy(&u32, p, 4);
        return u32;
    default:
        memcpy(&u64, p, 8);
        return u64;
    }
}

static bool is_signed(unsigned dtype)
{
    return dtype == HRP_I8 || dtype == HRP_I32 || dtype == HRP_I64;
}

static void store_int(unsigned dtype, uint64_t v, unsigned char *p)
{
    memcpy(p, &v, hrp_dtype_size(dtype)); /* little endian, as all machines this runs on */
}

const char *hpf_value_text(unsigned dtype, const void *element, char *buf, size_t len)
{
    if (is_float(dtype))
        snprintf(buf, len, "%.17g", load_float(dtype, element));
    else if (is_signed(dtype))
        snprintf(buf, len, "%" PRId64, (int64_t)load_int(dtype, element));
    else
        snprintf(buf, len, "%" PRIu64, load_int(dtype, element));
    return buf;
}

/* ---- the defined fold of floats -------------------------------------------------------------------------- */

/* The accumulation type, kernels.h section 1. */
static bool in_f32(const struct hpf_case *c)
{
    return c->redop == HRP_AVG ? c->dtype == HRP_F16 : c->dtype != HRP_F64;
}

static double add(bool f32, double a, double b)
{
    return f32 ? (double)((float)a + (float)b) : a + b;
}

static double mul(bool f32, double a, double b)
{
    return f32 ? (double)((float)a * (float)b) : a * b;
}

static double divide(bool f32, double a, double b)
{
    return f32 ? (double)((float)a / (float)b) : a / b;
}

static double fold_float(unsigned redop, bool f32, double acc, double x)
{
    switch (redop) {
    case HRP_PROD:
        return mul(f32, acc, x);
    case HRP_MIN:
        return x < acc || isnan(x) ? x : acc;
    case HRP_MAX:
        return x > acc || isnan(x) ? x : acc;
    default:
        return add(f32, acc, x);
    }
}

static void reference(unsigned redop, struct block *b, size_t k, bool start, double x)
{
    if (start) {
        b->ref[k] = x;
        b->size[k] = fabs(x);
        return;
    }
    b->ref[k] = fold_float(redop, false, b->ref[k], x);
    b->size[k] = redop == HRP_SUM || redop == HRP_AVG ? b->size[k] + fabs(x) : fabs(b->ref[k]);
}

/* Folds one node's partial into the total. weight: ranks behind it. */
static void fold_node(const struct hpf_case *c, const struct hpf_layout *l, struct block *b, size_t n,
                      bool start, unsigned weight)
{
    bool f32 = in_f32(c), avg = c->redop == HRP_AVG;
    bool wide = c->wire_f32 && (c->dtype == HRP_F16 || c->dtype == HRP_BF16);
    unsigned wire = wide ? (unsigned)HRP_F32 : c->dtype;
    bool scale = avg && l->nnodes > 1;
    for (size_t k = 0; k < n; k++) {
        double v = round_to(wire, avg ? divide(f32, b->part[k], weight) : b->part[k]);
        if (scale)
            v = mul(f32, weight, v);
        b->total[k] = start ? v : fold_float(c->redop, f32, b->total[k], v);
        if (scale && isnan(v))
            b->total[k] = v;
    }
}

static void reduce_floats(const struct hpf_case *c, const struct hpf_layout *l, uint64_t first, size_t n,
                          struct block *b)
{
    size_t size = hrp_dtype_size(c->dtype);
    bool f32 = in_f32(c), any = false, first_node = true;
    for (unsigned node = 0; node < l->nnodes; node++) {
        unsigned weight = 0;
        for (unsigned r = 0; r < l->nranks; r++) {
            if (l->node_of_rank[r] != node)
                continue;
            hpf_pattern(c->dtype, c->redop, c->seed, r, first, n, b->raw);
            for (size_t k = 0; k < n; k++) {
                double x = load_float(c->dtype, b->raw + k * size);
                b->part[k] = weight == 0 ? x : fold_float(c->redop, f32, b->part[k], x);
                reference(c->redop, b, k, !any, x);
            }
            weight++;
            any = true;
        }
        if (weight > 0) {
            fold_node(c, l, b, n, first_node, weight);
            first_node = false;
        }
    }
    for (size_t k = 0; k < n; k++) {
        if (c->redop == HRP_AVG) {
            if (l->nnodes > 1)
                b->total[k] = divide(f32, b->total[k], l->nranks);
            b->ref[k] /= l->nranks;
            b->size[k] /= l->nranks;
        }
        store_float(c->dtype, b->total[k], b->want + k * size);
    }
}

/* ---- integers -------------------------------------------------------------------------------------------- */

static uint64_t fold_int(const struct hpf_case *c, uint64_t acc, uint64_t x)
{
    bool less = is_signed(c->dtype) ? (int64_t)x < (int64_t)acc : x < acc;
    switch (c->redop) {
    case HRP_PROD:
        return acc * x;
    case HRP_MIN:
        return less ? x : acc;
    case HRP_MAX:
        return less ? acc : x;
    default:
        return acc + x;
    }
}

static void reduce_ints(const struct hpf_case *c, const struct hpf_layout *l, uint64_t first, size_t n,
                        struct block *b)
{
    size_t size = hrp_dtype_size(c->dtype);
    assert(l->nranks > 0);
    for (unsigned r = 0; r < l->nranks; r++) {
        hpf_pattern(c->dtype, c->redop, c->seed, r, first, n, b->raw);
        for (size_t k = 0; k < n; k++) {
            uint64_t x = load_int(c->dtype, b->raw + k * size);
            b->iacc[k] = r == 0 ? x : fold_int(c, b->iacc[k], x);
        }
    }
    for (size_t k = 0; k < n; k++) {
        unsigned char *p = b->want + k * size;
        store_int(c->dtype, b->iacc[k], p);
        if (c->redop == HRP_AVG) {
            uint64_t sum = load_int(c->dtype, p); /* the wrapped one */
            store_int(c->dtype,
                      is_signed(c->dtype) ? (uint64_t)((int64_t)sum / (int64_t)l->nranks) : sum / l->nranks,
                      p);
        }
    }
}

/* ---- how far a float may be from the reference ----------------------------------------------------------- */

struct bound {
    double relative; /* to block.size */
    double absolute; /* roundings among subnormal numbers */
};

static struct bound bound_of(const struct hpf_case *c, const struct hpf_layout *l)
{
    static const double half_ulp[] = {
        [HRP_F32] = 0x1p-24, [HRP_F64] = 0x1p-53, [HRP_F16] = 0x1p-11, [HRP_BF16] = 0x1p-8};
    static const double smallest[] = {
        [HRP_F32] = 0x1p-149, [HRP_F64] = 0x1p-1074, [HRP_F16] = 0x1p-24, [HRP_BF16] = 0x1p-133};
    if (c->redop == HRP_MIN || c->redop == HRP_MAX)
        return (struct bound){0, 0};
    /* Additions or multiplications, and for avg a product a node and a division. The reference of f64 is no
       better than the result, hence twice. */
    double steps = l->nranks + l->nnodes + (c->redop == HRP_AVG ? 4 : 0);
    double relative = steps * (c->dtype == HRP_F64 ? 0x1p-52 : 0x1p-24);
    if (c->dtype == HRP_F16 || c->dtype == HRP_BF16) {
        /* A sum's partials add up to the whole, so one rounding of each of them counts as one in all; factors
           do not. With ring, tree and pairwise every hop rounds anew. The last rounding is the result's. */
        double partials = c->redop == HRP_PROD ? l->nnodes : 1, hops = c->exact ? 0 : l->nnodes - 1;
        double roundings = (c->wire_f32 ? 0 : partials + hops) + 1;
        double h = roundings * half_ulp[c->dtype];
        relative += h * (1 + h);
    }
    return (struct bound){relative, smallest[c->dtype] * (l->nnodes + 1)};
}

static bool near(const struct bound *limit, const struct block *b, size_t k, double got)
{
    if (got == b->ref[k])
        return true;
    /* Also false for a NaN. */
    return fabs(got - b->ref[k]) <= limit->relative * b->size[k] + limit->absolute;
}

/* ---- public ---------------------------------------------------------------------------------------------- */

uint64_t hpf_send_count(const struct hpf_case *c, unsigned nranks)
{
    return c->coll == HRP_REDUCE_SCATTER ? c->count * nranks : c->count;
}

uint64_t hpf_recv_count(const struct hpf_case *c, unsigned nranks)
{
    return c->coll == HRP_ALL_GATHER ? c->count * nranks : c->count;
}

uint64_t hpf_inplace_offset(const struct hpf_case *c, unsigned rank)
{
    return c->coll == HRP_ALL_GATHER || c->coll == HRP_REDUCE_SCATTER ? c->count * rank : 0;
}

void hpf_input(const struct hpf_case *c, unsigned rank, uint64_t first, size_t n, void *dst)
{
    hpf_pattern(c->dtype, reduces(c->coll) ? c->redop : (unsigned)HRP_SUM, c->seed, rank, first, n, dst);
}

uint64_t hpf_compare(unsigned dtype, const void *got, const void *want, size_t n, uint64_t *where)
{
    size_t size = hrp_dtype_size(dtype);
    uint64_t wrong = 0;
    if (memcmp(got, want, n * size) == 0)
        return 0;
    for (size_t k = 0; k < n; k++) {
        if (memcmp((const char *)got + k * size, (const char *)want + k * size, size) == 0)
            continue;
        if (wrong++ == 0 && where)
            *where = k;
    }
    return wrong;
}

static void compute(const struct hpf_case *c, const struct hpf_layout *l, unsigned rank, uint64_t index,
                    size_t n, struct block *b)
{
    size_t size = hrp_dtype_size(c->dtype);
    uint64_t first = c->coll == HRP_REDUCE_SCATTER ? rank * c->count + index : index;
    if (reduces(c->coll) && is_float(c->dtype)) {
        reduce_floats(c, l, first, n, b);
    } else if (reduces(c->coll)) {
        reduce_ints(c, l, first, n, b);
    } else if (c->coll == HRP_BROADCAST) {
        hpf_input(c, c->root, index, n, b->want);
    } else {
        for (size_t k = 0; k < n;) {
            uint64_t r = (index + k) / c->count, off = (index + k) % c->count;
            size_t now = c->count - off < n - k ? (size_t)(c->count - off) : n - k;
            hpf_input(c, (unsigned)r, off, now, b->want + k * size);
            k += now;
        }
    }
}

uint64_t hpf_check(const struct hpf_case *c, const struct hpf_layout *l, unsigned rank, uint64_t first,
                   size_t n, const void *got, uint64_t *where)
{
    struct block b;
    size_t size = hrp_dtype_size(c->dtype);
    bool by_value = reduces(c->coll) && is_float(c->dtype);
    bool by_bits = c->exact || !by_value;
    struct bound limit = by_value ? bound_of(c, l) : (struct bound){0, 0};
    uint64_t wrong = 0;
    for (size_t done = 0; done < n;) {
        size_t now = n - done < BLOCK ? n - done : BLOCK;
        const unsigned char *p = (const unsigned char *)got + done * size;
        compute(c, l, rank, first + done, now, &b);
        for (size_t k = 0; k < now; k++) {
            bool ok = !by_bits || memcmp(p + k * size, b.want + k * size, size) == 0;
            ok = ok && (!by_value || near(&limit, &b, k, load_float(c->dtype, p + k * size)));
            if (!ok && wrong++ == 0 && where)
                *where = first + done + k;
        }
        done += now;
    }
    return wrong;
}

uint64_t hpf_expected(const struct hpf_case *c, const struct hpf_layout *l, unsigned rank, uint64_t first,
                      size_t n, void *dst)
{
    struct block b;
    size_t size = hrp_dtype_size(c->dtype);
    bool by_value = reduces(c->coll) && is_float(c->dtype);
    struct bound limit = by_value ? bound_of(c, l) : (struct bound){0, 0};
    uint64_t wrong = 0;
    for (size_t done = 0; done < n;) {
        size_t now = n - done < BLOCK ? n - done : BLOCK;
        compute(c, l, rank, first + done, now, &b);
        memcpy((char *)dst + done * size, b.want, now * size);
        for (size_t k = 0; by_value && k < now; k++)
            wrong += !near(&limit, &b, k, load_float(c->dtype, b.want + k * size));
        done += now;
    }
    return wrong;
}
