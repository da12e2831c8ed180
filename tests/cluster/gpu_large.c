/* SPDX-License-Identifier: MIT */
/*
 * More than 2^31 elements and 2^32 bytes of GPU memory, on the driver without a GPU: 2^31 + 5 of i8 and 2^30 + 3 of f32, and f32
 * at byte offsets above 2^32 of one allocation, over two nodes by kernels and by copy engines; the first also on one node
 * through the staging window. Counts that cannot be are refused in words. timeout: 300
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

#define GIB (UINT64_C(1) << 30)
#define ROOM (UINT64_C(16) << 20)
/* Random numbers would take minutes to check at every element, so the input is a pattern whose length is prime. */
enum { PRIME = 65521, ROWS = 64, GUARD = 4096 };

static const struct hrg_driver *drv;

struct large {
    struct ht_env e, computes; /* with kernels; with copy engines */
    hrg_ptr block;
    unsigned char *mine, *want, *got; /* pinned, ROWS times the pattern of the largest type */
};

static int open_large(struct hpf_rank *me, struct large *l, uint64_t bytes)
{
    void *p[3];
    hclient_comm_config_t idle = HCLIENT_COMM_CONFIG_INITIALIZER, compute = HCLIENT_COMM_CONFIG_INITIALIZER;
    idle.overlap = HCLIENT_OVERLAP_IDLE;
    compute.overlap = HCLIENT_OVERLAP_COMPUTE;
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&l->e, me, 0, &idle) != 0 || ht_join(&l->computes, me, 1, &compute) != 0)
        return 1;
    HT_CUDA(me, drv->MemAlloc(&l->block, bytes));
    for (unsigned i = 0; i < 3; i++)
        HT_CUDA(me, drv->MemAllocHost(&p[i], (size_t)ROWS * PRIME * sizeof(float)));
    l->mine = p[0];
    l->want = p[1];
    l->got = p[2];
    return 0;
}

static int copy(struct hpf_rank *me, hrg_ptr device, unsigned char *host, uint64_t bytes, bool there)
{
    hrg_stream s = HRG_STREAM_PER_THREAD;
    HT_CUDA(me, there ? drv->MemcpyHtoDAsync(device, host, bytes, s)
                      : drv->MemcpyDtoHAsync(host, device, bytes, s));
    HT_CUDA(me, drv->StreamSynchronize(s));
    return 0;
}

/* Whole numbers whose sums f32 holds exactly; i8 wraps around. */
static void patterns(struct large *l, bool f32)
{
    const struct hpf_rank *me = l->e.me;
    for (unsigned i = 0; i < ROWS * PRIME; i++) {
        unsigned mine = i % PRIME * 31 + me->rank * 77, sum = 0;
        for (unsigned r = 0; r < me->nranks; r++)
            sum += i % PRIME * 31 + r * 77;
        float v[2] = {(float)mine, (float)sum};
        if (f32) {
            memcpy(l->mine + (size_t)i * sizeof(float), &v[0], sizeof(float));
            memcpy(l->want + (size_t)i * sizeof(float), &v[1], sizeof(float));
        } else {
            l->mine[i] = (unsigned char)mine;
            l->want[i] = (unsigned char)sum;
        }
    }
}

static int guard(struct large *l, hrg_ptr at, bool set)
{
    memset(l->got, set ? 0x77 : 0xee, GUARD);
    if (copy(l->e.me, at, l->got, GUARD, set) != 0)
        return 1;
    for (unsigned i = 0; i < GUARD; i++)
        HT_EXPECT(l->e.me, l->got[i] == 0x77, "byte %u of a guard was overwritten", i);
    return 0;
}

/* In place, from offset on. */
static int sum(struct large *l, const struct ht_env *e, uint64_t offset, uint64_t count, bool f32)
{
    struct hpf_rank *me = l->e.me;
    const uint64_t size = f32 ? sizeof(float) : 1, bytes = count * size, step = ROWS * PRIME * size;
    const hrg_ptr p = l->block + offset;
    hclient_op_t op;
    patterns(l, f32);
    if (guard(l, p - GUARD, true) != 0 || guard(l, p + bytes, true) != 0)
        return 1;
    for (uint64_t at = 0; at < bytes; at += step)
        if (copy(me, p + at, l->mine, bytes - at < step ? bytes - at : step, true) != 0)
            return 1;
    void *buffer = (void *)(uintptr_t)p;
    hpf_rank_progress(me);
    HT_TRY(me, hclient_all_reduce(e->comm, buffer, buffer, count, f32 ? HCLIENT_FLOAT32 : HCLIENT_INT8,
                                  HCLIENT_SUM, HRG_STREAM_PER_THREAD, &op));
    HT_TRY(me, hclient_wait(op));
    hpf_rank_progress(me);
    for (uint64_t at = 0; at < bytes; at += step) {
        const uint64_t n = bytes - at < step ? bytes - at : step;
        if (copy(me, p + at, l->got, n, false) != 0)
            return 1;
        HT_EXPECT(me, memcmp(l->got, l->want, n) == 0,
                  "%" PRIu64 " x %s at %" PRIu64 ": the sum is wrong between bytes %" PRIu64 " and %" PRIu64,
                  count, f32 ? "f32" : "i8", offset, at, at + n);
    }
    return guard(l, p - GUARD, false) != 0 || guard(l, p + bytes, false) != 0;
}

static int refusals(struct large *l)
{
    static const size_t counts[] = {(size_t)1 << 62, SIZE_MAX, (size_t)1 << 61};
    void *p = (void *)(uintptr_t)l->block;
    for (unsigned i = 0; i < 3; i++) {
        hclient_result_t r = hclient_all_reduce(l->e.comm, p, p, counts[i], HCLIENT_INT64, HCLIENT_SUM,
                                                HRG_STREAM_PER_THREAD, NULL);
        HT_EXPECT(l->e.me, r == HCLIENT_INVALID_ARGUMENT && hclient_last_error(NULL)[0],
                  "a count of %zu gave %s instead of a refusal in words", counts[i], hclient_strerror(r));
    }
    return 0;
}

static int way_is(const struct ht_env *e, const char *words)
{
    char *path;
    HT_TRY(e->me, hclient_comm_path(e->comm, &path));
    HT_EXPECT(e->me, strstr(path, words), "ops went another way, without \"%s\": %s", words, path);
    hclient_free(path);
    return 0;
}

/* What is staged is copied all the same, wherever in its allocation it lies. */
static int staged(struct hpf_rank *me)
{
    struct large l = {0};
    if (open_large(me, &l, 2 * GIB + ROOM) != 0 || refusals(&l) != 0 ||
        sum(&l, &l.e, GUARD, 2 * GIB + 5, false) != 0 || way_is(&l.e, "\"shared_ops\": 0") != 0)
        return 1;
    return ht_leave(&l.computes) != 0 ? 1 : ht_leave(&l.e);
}

static int shared(struct hpf_rank *me)
{
    struct large l = {0};
    const uint64_t high = 4 * GIB + 4 * UINT64_C(1021);
    if (open_large(me, &l, 4 * GIB + ROOM) != 0 || refusals(&l) != 0 ||
        sum(&l, &l.e, GUARD, 2 * GIB + 5, false) != 0 || sum(&l, &l.e, high, 1000003, true) != 0 ||
        sum(&l, &l.computes, high, 1000003, true) != 0 || sum(&l, &l.computes, GUARD, GIB + 3, true) != 0)
        return 1;
    if (way_is(&l.e, "\"staged_ops\": 0") != 0 || way_is(&l.e, "sm engine") != 0 ||
        way_is(&l.computes, "\"staged_ops\": 0") != 0 || way_is(&l.computes, "dma engine") != 0)
        return 1;
    return ht_leave(&l.computes) != 0 ? 1 : ht_leave(&l.e);
}

static void with(unsigned nnodes, const char *staged_bytes, hpf_rank_fn fn)
{
    setenv("HREDUCE_GPU_STAGED_BYTES", staged_bytes, 1);
    struct hpf_cluster *c = ht_cluster(nnodes, NULL);
    const struct ht_job job = {.nranks = 2, .fn = fn};
    ht_finish(ht_start(c, &job), 200000);
    ht_cluster_end(c);
}

int main(void)
{
    if (ht_memory_available() < 12 * GIB)
        ht_skip("needs 12 GiB of free memory, and %" PRIu64 " MiB are available",
                ht_memory_available() >> 20);
    if (ht_sanitized())
        ht_skip("takes too long under a sanitizer");
    ht_gpu_fake("libcuda_fake.so.1");
    with(2, "0", shared);
    with(1, "100000000000", staged);
    return 0;
}
