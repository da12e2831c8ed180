/* SPDX-License-Identifier: MIT */
/*
 * The result is defined: the same inputs on the same ranks give the same bits for every unit and chunk size,
 * number of threads, instruction set, algorithm that may be chosen, arrival order, restart of the daemons, and for a buffer
 * reduced whole or in parts. timeout: 240
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kernels/kernels.h"
#include "tests/lib/harness.h"

#define COUNT 100003u
#define NRANKS 7u
static const unsigned map[NRANKS] = {0, 1, 1, 2, 0, 2, 2};

struct setting {
    const char *name;
    const char *keys[5];
    enum hrk_level needs;
};
static const struct setting settings[] = {
    {"defaults", {NULL}, HRK_SCALAR},
    {"small units and chunks, one thread",
     {"unit_size = 64K", "unit_min = 4K", "chunk_size = 4K", "threads = 1", NULL},
     HRK_SCALAR},
    {"large units, odd chunks, many threads",
     {"unit_size = 4M", "unit_min = 1M", "chunk_size = 12292", "threads = 6", NULL},
     HRK_SCALAR},
    {"gather", {"algorithm = gather", NULL}, HRK_SCALAR},
    {"direct, nothing eager, one stream",
     {"algorithm = direct", "eager_limit = 0", "tcp_streams = 1", NULL},
     HRK_SCALAR},
    {"the narrowest instructions", {"simd = scalar", NULL}, HRK_SCALAR},
    {"wider ones", {"simd = avx2", NULL}, HRK_AVX2},
    {"the widest", {"simd = avx512", NULL}, HRK_AVX512},
    {"defaults again", {NULL}, HRK_SCALAR},
};
#define NSETTINGS (sizeof(settings) / sizeof(settings[0]))

static const unsigned types[] = {HRP_F32, HRP_F64, HRP_F16, HRP_BF16};
static const unsigned redops[] = {HRP_SUM, HRP_PROD, HRP_AVG};

struct shared {
    uint64_t hash[NRANKS];
};

struct arg {
    uint64_t seed; /* of arrival times */
};

static uint64_t hash_bytes(uint64_t h, const unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        h = (h ^ p[i]) * UINT64_C(0x100000001b3);
    return h;
}

static int reduce(struct ht_env *e, unsigned dtype, unsigned redop, const unsigned char *in,
                  unsigned char *out, size_t count)
{
    hclient_op_t op;
    HT_TRY(e->me, hclient_all_reduce(e->comm, in, out, count, (hclient_data_type_t)dtype,
                                     (hclient_red_op_t)redop, NULL, &op));
    HT_TRY(e->me, hclient_wait(op));
    return 0;
}

/* Whole, in 4 equal parts and in 3 odd ones; the bits must be those of the definition each time. */
static int one(struct ht_env *e, unsigned dtype, unsigned redop, uint64_t *delays, uint64_t *hash)
{
    static unsigned char in[COUNT * 8], out[COUNT * 8], parts[COUNT * 8];
    static const size_t cuts[][5] = {{0, 25000, 50000, 75000, COUNT}, {0, 1, 66667, COUNT, COUNT}};
    size_t esize = hrp_dtype_size(dtype);
    struct hpf_case c = {
        .coll = HRP_ALL_REDUCE, .dtype = dtype, .redop = redop, .count = COUNT, .seed = 99, .exact = true};
    uint64_t where = 0;
    hpf_input(&c, e->me->rank, 0, COUNT, in);
    hpf_sleep_ms(ht_random(delays) % 4);
    if (reduce(e, dtype, redop, in, out, COUNT) != 0)
        return 1;
    uint64_t bad = hpf_check(&c, &e->layout, e->me->rank, 0, COUNT, out, &where);
    HT_EXPECT(e->me, bad == 0, "%s, %s: %" PRIu64 " elements are not the defined result, first %" PRIu64,
              hrp_dtype_name(dtype), hrp_redop_name(redop), bad, where);
    for (unsigned k = 0; k < 2; k++) {
        memset(parts, 0, sizeof(parts));
        for (unsigned i = 0; i < 4; i++)
            if (reduce(e, dtype, redop, in + cuts[k][i] * esize, parts + cuts[k][i] * esize,
                       cuts[k][i + 1] - cuts[k][i]) != 0)
                return 1;
        HT_EXPECT(e->me, memcmp(out, parts, COUNT * esize) == 0, "%s, %s: other bits when reduced in parts",
                  hrp_dtype_name(dtype), hrp_redop_name(redop));
    }
    *hash = hash_bytes(*hash, out, COUNT * esize);
    return 0;
}

static int rank_main(struct hpf_rank *me)
{
    const struct arg *arg = me->arg;
    struct shared *shared = ht_shared(me);
    struct ht_env e;
    uint64_t delays = arg->seed * 100 + me->rank, hash = 1;
    hpf_sleep_ms(ht_random(&delays) % 50);
    if (ht_join(&e, me, 0, NULL) != 0)
        return 1;
    for (unsigned t = 0; t < 4; t++)
        for (unsigned o = 0; o < 3; o++)
            if (one(&e, types[t], redops[o], &delays, &hash) != 0)
                return 1;
    shared->hash[me->rank] = hash;
    return ht_leave(&e);
}

int main(void)
{
    uint64_t first = 0;
    for (size_t i = 0; i < NSETTINGS; i++) {
        struct arg arg = {.seed = i + 1};
        bool possible = settings[i].needs <= hrk_get_level();
        printf("%s%s\n", settings[i].name, possible ? "" : ": this processor cannot");
        fflush(stdout);
        if (!possible)
            continue;
        struct hpf_cluster *c = ht_cluster(3, settings[i].keys);
        struct ht_job job = {.nranks = NRANKS,
                             .map = map,
                             .fn = rank_main,
                             .arg = &arg,
                             .shared_bytes = sizeof(struct shared)};
        struct hpf_job *started = ht_start(c, &job);
        char err[2048];
        HT_CHECK(hpf_job_wait(started, ht_ms(60000), err, sizeof(err)) == 0, "%s", err);
        const struct shared *shared = ht_job_user_shared(started);
        first = i == 0 ? shared->hash[0] : first;
        for (unsigned r = 0; r < NRANKS; r++)
            HT_CHECK(shared->hash[r] == first, "%s: rank %u has other bits than rank 0 had with %s",
                     settings[i].name, r, settings[0].name);
        hpf_job_free(started);
        ht_cluster_end(c);
    }
    return 0;
}
