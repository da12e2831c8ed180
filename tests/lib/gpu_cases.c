/* SPDX-License-Identifier: MIT */
#include "tests/lib/gpu_cases.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define MAX_N ((uint64_t)2500)
#define GUARD ((uint64_t)64)
#define ROOM (GUARD + 64 + MAX_N * 8 + GUARD)
/* A bank holds the rooms of its share of sources, then those of its share of destinations. */
#define SOURCES_A_BANK ((HRG_MAX_SOURCES + GPU_CASES_BANKS - 1) / GPU_CASES_BANKS)
#define SINKS_A_BANK ((HRG_MAX_SINKS + GPU_CASES_BANKS - 1) / GPU_CASES_BANKS)
#define PAINT 0xa5

static const uint64_t lengths[] = {0, 1, 3, 15, 16, 17, 63, 129, 511, 1024, MAX_N};
static const unsigned source_counts[] = {1, 2, 3, 4, 5, 8, 9, HRG_MAX_SOURCES};
static const unsigned sink_counts[] = {1, 2, 4, HRG_MAX_SINKS};

/* How pointers lie: all aligned to 64, all with the same phase of one element, each with its own number of
   elements, each with its own number of bytes. */
enum skew { ALIGNED, SAME_PHASE, OWN_ELEMENTS, OWN_BYTES, NSKEWS };

struct run {
    struct gpu_cases_lab *lab;
    uint64_t random;
    unsigned thin;
    unsigned long turn;
    long cases;
    char *why;
    size_t why_len;
    uint8_t expected[MAX_N * 8];
};

uint64_t gpu_cases_bank_bytes(void)
{
    return (SOURCES_A_BANK + SINKS_A_BANK) * ROOM;
}

static bool fail(struct run *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool fail(struct run *r, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(r->why, r->why_len, format, args);
    va_end(args);
    return false;
}

static uint64_t random_bits(struct run *r)
{
    uint64_t z = r->random += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* Exponents near zero mostly, so that sums are numbers; then tiny, huge, zeros, infinities, NaNs and any bits. */
static uint64_t random_float(struct run *r, unsigned dtype, uint64_t i)
{
    static const int mantissa[] = {[HRP_F32] = 23, [HRP_F64] = 52, [HRP_F16] = 10, [HRP_BF16] = 7};
    static const int exponent[] = {[HRP_F32] = 8, [HRP_F64] = 11, [HRP_F16] = 5, [HRP_BF16] = 8};
    const int m = mantissa[dtype], e = exponent[dtype];
    const uint64_t bits = random_bits(r), sign = bits >> 63 << (m + e);
    const uint64_t frac = bits & ((UINT64_C(1) << m) - 1), bias = (UINT64_C(1) << (e - 1)) - 1;
    const uint64_t top = (UINT64_C(1) << e) - 1;

    switch (i % 8) {
    case 4: /* subnormals and their neighbours */
        return sign | (bits >> 60 & 1) << m | frac;
    case 5: /* the largest */
        return sign | (top - 1 - (bits >> 60 & 1)) << m | frac;
    case 6: /* zeros, infinities, NaNs with a payload */
        return sign | (bits >> 60 & 1 ? top << m : 0) | (bits >> 61 & 1 ? 0 : bits >> 62 & 1 ? frac : 0);
    case 7:
        return bits;
    default:
        return sign | (bias - 3 + (bits >> 59 & 7)) << m | frac;
    }
}

static struct gpu_cases_bank *bank_of(struct run *r, unsigned which)
{
    return &r->lab->bank[which % GPU_CASES_BANKS];
}

static uint64_t source_room(unsigned s)
{
    return s / GPU_CASES_BANKS * ROOM;
}

static uint64_t sink_room(unsigned d)
{
    return (SOURCES_A_BANK + d / GPU_CASES_BANKS) * ROOM;
}

static uint64_t skew_bytes(enum skew skew, unsigned which, uint64_t size)
{
    switch (skew) {
    case ALIGNED:
        return 0;
    case SAME_PHASE:
        return size;
    case OWN_ELEMENTS:
        return (which * which + which + 1) * size % 64;
    default:
        return (which * 3 + 1) % 64;
    }
}

static void fill_sources(struct run *r, unsigned dtype, unsigned nsrc, enum skew skew, uint64_t n)
{
    const uint64_t size = hrp_dtype_size(dtype);

    for (unsigned s = 0; s < nsrc; s++) {
        uint8_t *p = bank_of(r, s)->host + source_room(s) + GUARD + skew_bytes(skew, s, size);

        for (uint64_t i = 0; i < n; i++) {
            uint64_t v = dtype <= HRP_BF16 ? random_float(r, dtype, i) : random_bits(r);

            memcpy(p + i * size, &v, size);
        }
    }
}

static void paint_sinks(struct run *r)
{
    for (unsigned d = 0; d < HRG_MAX_SINKS; d++)
        memset(bank_of(r, d)->host + sink_room(d), PAINT, ROOM);
}

static bool check_sink(struct run *r, const char *what, unsigned d, uint64_t at, uint64_t bytes,
                       uint64_t size)
{
    const uint8_t *room = bank_of(r, d)->host + sink_room(d);

    if (memcmp(room + at, r->expected, bytes) != 0) {
        uint64_t i = 0;

        while (room[at + i] == r->expected[i])
            i++;
        return fail(r, "%s: element %llu of %llu of destination %u differs", what,
                    (unsigned long long)(i / size), (unsigned long long)(bytes / size), d);
    }
    for (uint64_t i = 0; i < ROOM; i++)
        if ((i < at || i >= at + bytes) && room[i] != PAINT)
            return fail(r, "%s: destination %u was written %s its %llu bytes", what, d,
                        i < at ? "before" : "behind", (unsigned long long)bytes);
    return true;
}

static bool run_launch(struct run *r, struct hrg_launch *l, const char *what)
{
    int err = r->lab->run(r->lab, l);

    r->cases++;
    return err == 0 || fail(r, "%s: the launch failed with %d", what, err);
}

static bool one_fold(struct run *r, const struct hrk_fold *f, unsigned nsrc, unsigned ndst, enum skew skew,
                     uint64_t n)
{
    const uint64_t isize = hrp_dtype_size(f->in), osize = hrp_dtype_size(f->out);
    uint64_t src[HRG_MAX_SOURCES], dst[HRG_MAX_SINKS], at[HRG_MAX_SINKS];
    const void *host[HRG_MAX_SOURCES];
    void *const expected[1] = {r->expected};
    struct hrg_launch l;
    char what[160];

    (void)snprintf(what, sizeof(what),
                   "%s to %s, %s, divisor %u%s, %u sources, %u destinations, %llu elements, "
                   "alignment %d",
                   hrp_dtype_name(f->in), hrp_dtype_name(f->out), hrp_redop_name(f->op), f->divisor,
                   f->weight ? ", weights" : "", nsrc, ndst, (unsigned long long)n, (int)skew);
    fill_sources(r, f->in, nsrc, skew, n);
    paint_sinks(r);
    for (unsigned s = 0; s < nsrc; s++) {
        uint64_t off = source_room(s) + GUARD + skew_bytes(skew, s, isize);

        host[s] = bank_of(r, s)->host + off;
        src[s] = bank_of(r, s)->device + off;
    }
    for (unsigned d = 0; d < ndst; d++) {
        at[d] = GUARD + skew_bytes(skew, d + 1, osize);
        dst[d] = bank_of(r, d)->device + sink_room(d) + at[d];
    }
    (void)hrk_set_level(HRK_SCALAR);
    hrk_fold(f, expected, 1, host, nsrc, n);
    if (hrg_fold_launch(&l, f, dst, ndst, src, nsrc, n, r->lab->max_blocks) != 0)
        return fail(r, "%s: refused", what);
    if (!run_launch(r, &l, what))
        return false;
    for (unsigned d = 0; d < ndst; d++)
        if (!check_sink(r, what, d, at[d], n * osize, osize))
            return false;
    return true;
}

static bool fold_shapes(struct run *r, const struct hrk_fold *f, unsigned only_nsrc)
{
    bool any = false;

    for (unsigned s = 0; s < COUNT(source_counts); s++)
        for (unsigned d = 0; d < COUNT(sink_counts); d++)
            for (unsigned k = 0; k < NSKEWS; k++)
                for (unsigned i = 0; i < COUNT(lengths); i++) {
                    unsigned nsrc = only_nsrc ? only_nsrc : source_counts[s];

                    if (r->turn++ % r->thin != 0 && any)
                        continue;
                    any = true;
                    if (!one_fold(r, f, nsrc, sink_counts[d], (enum skew)k, lengths[i]))
                        return false;
                }
    return true;
}

static bool folds_of_type(struct run *r, unsigned dtype)
{
    static uint32_t weight[HRG_MAX_SOURCES];
    const bool half = dtype == HRP_F16 || dtype == HRP_BF16;

    for (unsigned i = 0; i < HRG_MAX_SOURCES; i++)
        weight[i] = i == 0 ? 3 : i * i % 11 + 1;
    for (unsigned op = 0; op < HRP_NREDOPS; op++) {
        for (unsigned wide = 0; wide < (half ? 2u : 1u); wide++) {
            const unsigned wire = wide ? HRP_F32 : dtype;
            const struct hrk_fold partial = hrk_fold_partial(dtype, wire, op, 3);
            const struct hrk_fold total = hrk_fold_total(wire, dtype, op, weight, 80);
            const struct hrk_fold lone = hrk_fold_total(wire, dtype, op, weight, 3);

            /* One source whose weight is the divisor is the exception of kernels.h, 4. */
            if (!fold_shapes(r, &partial, 0) || !fold_shapes(r, &total, 0) || !fold_shapes(r, &lone, 1))
                return false;
        }
        const struct hrk_fold single = hrk_fold_single(dtype, op, 7);
        if (!fold_shapes(r, &single, 0))
            return false;
    }
    return true;
}

/* Destination 0 is source 0: the accumulator must be complete before it is stored. */
static bool in_place(struct run *r)
{
    const struct hrk_fold f = hrk_fold_single(HRP_BF16, HRP_SUM, 4);
    uint64_t src[4], dst[4];
    const void *host[4];
    void *const expected[1] = {r->expected};
    struct hrg_launch l;

    fill_sources(r, HRP_BF16, 4, ALIGNED, MAX_N);
    for (unsigned s = 0; s < 4; s++) {
        host[s] = bank_of(r, s)->host + source_room(s) + GUARD;
        src[s] = dst[s] = bank_of(r, s)->device + source_room(s) + GUARD;
    }
    hrk_fold(&f, expected, 1, host, 4, MAX_N);
    if (hrg_fold_launch(&l, &f, dst, 4, src, 4, MAX_N, r->lab->max_blocks) != 0)
        return fail(r, "in place: refused");
    if (!run_launch(r, &l, "in place"))
        return false;
    for (unsigned s = 0; s < 4; s++)
        if (memcmp(host[s], r->expected, MAX_N * 2) != 0)
            return fail(r, "in place: rank %u's buffer differs", s);
    return true;
}

static bool one_copy(struct run *r, unsigned ndst, enum skew skew, uint64_t bytes)
{
    const uint64_t off = source_room(0) + GUARD + skew_bytes(skew, 0, 4);
    uint64_t dst[HRG_MAX_SINKS], at[HRG_MAX_SINKS];
    struct hrg_launch l;
    char what[96];

    (void)snprintf(what, sizeof(what), "copy of %llu bytes to %u destinations, alignment %d",
                   (unsigned long long)bytes, ndst, (int)skew);
    fill_sources(r, HRP_U8, 1, skew, 0);
    for (uint64_t i = 0; i < bytes; i++)
        r->expected[i] = bank_of(r, 0)->host[off + i] = (uint8_t)random_bits(r);
    paint_sinks(r);
    for (unsigned d = 0; d < ndst; d++) {
        at[d] = GUARD + skew_bytes(skew, d + 1, 4);
        dst[d] = bank_of(r, d)->device + sink_room(d) + at[d];
    }
    if (hrg_copy_launch(&l, dst, ndst, bank_of(r, 0)->device + off, bytes, r->lab->max_blocks) != 0)
        return fail(r, "%s: refused", what);
    if (!run_launch(r, &l, what))
        return false;
    for (unsigned d = 0; d < ndst; d++)
        if (!check_sink(r, what, d, at[d], bytes, 1))
            return false;
    return true;
}

static bool one_fill(struct run *r, unsigned dtype, unsigned ndst, enum skew skew, uint64_t n)
{
    const uint64_t size = hrp_dtype_size(dtype);
    uint64_t dst[HRG_MAX_SINKS], at[HRG_MAX_SINKS];
    struct hrg_launch l;
    char what[96];

    (void)snprintf(what, sizeof(what), "NaN fill of %llu x %s, %u destinations, alignment %d",
                   (unsigned long long)n, hrp_dtype_name(dtype), ndst, (int)skew);
    hrk_fill_nan(dtype, r->expected, n);
    paint_sinks(r);
    for (unsigned d = 0; d < ndst; d++) {
        at[d] = GUARD + skew_bytes(skew, d + 1, size);
        dst[d] = bank_of(r, d)->device + sink_room(d) + at[d];
    }
    if (hrg_nan_launch(&l, dtype, dst, ndst, n, r->lab->max_blocks) != 0)
        return fail(r, "%s: refused", what);
    if (!run_launch(r, &l, what))
        return false;
    for (unsigned d = 0; d < ndst; d++)
        if (!check_sink(r, what, d, at[d], n * size, size))
            return false;
    return true;
}

static bool moves(struct run *r)
{
    static const uint64_t odd_bytes[] = {0, 1, 7, 16, 31, 33, 1000, 4096, MAX_N * 8 - 3, MAX_N * 8};

    for (unsigned d = 0; d < COUNT(sink_counts); d++)
        for (unsigned k = 0; k < NSKEWS; k++) {
            for (unsigned i = 0; i < COUNT(odd_bytes); i++)
                if (!one_copy(r, sink_counts[d], (enum skew)k, odd_bytes[i]))
                    return false;
            for (unsigned i = 0; i < COUNT(lengths); i++)
                if (!one_fill(r, i % 4, sink_counts[d], (enum skew)k, lengths[i]))
                    return false;
        }
    return true;
}

long gpu_cases_run(struct gpu_cases_lab *lab, uint64_t seed, unsigned thin, char *why, size_t why_len)
{
    static struct run run;
    struct run *r = &run;
    const enum hrk_level level = hrk_get_level();
    bool good = true;

    *r = (struct run){.lab = lab, .random = seed, .thin = thin ? thin : 1, .why = why, .why_len = why_len};
    for (unsigned dtype = 0; dtype < HRP_NDTYPES && good; dtype++)
        good = folds_of_type(r, dtype);
    good = good && moves(r) && in_place(r);
    (void)hrk_set_level(level);
    return good ? r->cases : -1;
}
