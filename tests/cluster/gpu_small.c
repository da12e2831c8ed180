/* SPDX-License-Identifier: MIT */
/*
 * Small ops on GPU buffers, on the driver without a GPU: staged at first, and where the daemon finds that kernels do not wait,
 * reduced in place. All ranks of a node decide alike, a hint decides at once, what is set by hand stays. timeout: 120
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

enum { SLOTS = HCLIENT_MAX_OPS, OPS = 3 * SLOTS };

static const struct hrg_driver *drv;

struct counts {
    unsigned long long shared, staged;
};

static int count(struct ht_env *e, struct counts *c)
{
    char *path;
    HT_TRY(e->me, hclient_comm_path(e->comm, &path));
    const char *at = strstr(path, "\"shared_ops\": ");
    HT_EXPECT(e->me,
              at && sscanf(at, "\"shared_ops\": %llu, \"staged_ops\": %llu", &c->shared, &c->staged) == 2,
              "the path report: %s", path);
    hclient_free(path);
    return 0;
}

/* n sums of `count` whole numbers in place, each checked. */
static int sums(struct ht_env *e, hrg_ptr p, unsigned elements, unsigned n)
{
    static int32_t *host;
    void *fresh;
    const unsigned ranks = e->me->nranks;
    if (!host) {
        HT_CUDA(e->me, drv->MemAllocHost(&fresh, 1 << 20));
        host = fresh;
    }
    for (unsigned k = 0; k < n; k++) {
        for (unsigned i = 0; i < elements; i++)
            host[i] = (int32_t)(i * k + e->me->rank);
        HT_CUDA(e->me, drv->MemcpyHtoDAsync(p, host, elements * sizeof(int32_t), NULL));
        HT_TRY(e->me, hclient_all_reduce(e->comm, (void *)(uintptr_t)p, (void *)(uintptr_t)p, elements,
                                         HCLIENT_INT32, HCLIENT_SUM, NULL, NULL));
        HT_CUDA(e->me, drv->MemcpyDtoHAsync(host, p, elements * sizeof(int32_t), NULL));
        HT_CUDA(e->me, drv->StreamSynchronize(NULL));
        for (unsigned i = 0; i < elements; i++)
            HT_EXPECT(e->me, host[i] == (int32_t)(ranks * i * k + ranks * (ranks - 1) / 2),
                      "op %u, element %u is %d", k, i, host[i]);
    }
    return 0;
}

static int with_overlap(struct hpf_rank *me, unsigned number, int overlap, struct counts *c)
{
    struct ht_env e;
    hrg_ptr p;
    struct counts tiny;
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    config.overlap = overlap;
    if (ht_join(&e, me, number, &config) != 0)
        return 1;
    HT_CUDA(me, drv->MemAlloc(&p, 1 << 20));
    if (sums(&e, p, 3000, OPS) != 0 || count(&e, c) != 0)
        return 1;
    HT_EXPECT(me, c->shared + c->staged == OPS, "%llu + %llu ops", c->shared, c->staged);
    /* The smallest are staged whatever was found. */
    if (sums(&e, p, 256, 5) != 0 || count(&e, &tiny) != 0)
        return 1;
    HT_EXPECT(me, tiny.shared == c->shared && tiny.staged == c->staged + 5, "1 KiB: %llu shared, %llu staged",
              tiny.shared - c->shared, tiny.staged - c->staged);
    /* And those of which the caller says so. */
    hclient_coll_args_t a = HCLIENT_COLL_ARGS_INITIALIZER;
    a.coll = HCLIENT_ALL_REDUCE;
    a.send = a.recv = (void *)(uintptr_t)p;
    a.count = 3000;
    a.dtype = HCLIENT_INT32;
    a.redop = HCLIENT_SUM;
    a.overlap = HCLIENT_OVERLAP_COMPUTE;
    for (unsigned i = 0; i < 3; i++)
        HT_TRY(me, hclient_collective(e.comm, &a, NULL));
    HT_CUDA(me, drv->StreamSynchronize(NULL));
    if (count(&e, &tiny) != 0)
        return 1;
    HT_EXPECT(me, tiny.shared == c->shared && tiny.staged == c->staged + 8,
              "compute: %llu shared, %llu staged", tiny.shared - c->shared, tiny.staged - c->staged);
    struct counts *first = ht_shared(me);
    if (me->rank == 0)
        first[number] = *c;
    if (hpf_rank_barrier(me, false, ht_ms(30000)) < 0)
        return 1;
    HT_EXPECT(me, memcmp(c, &first[number], sizeof(*c)) == 0, "%llu ops in place, and %llu on rank 0",
              c->shared, first[number].shared);
    HT_CUDA(me, drv->MemFree(p));
    return ht_leave(&e);
}

static int run(struct hpf_rank *me)
{
    struct counts c;
    drv = ht_gpu_open(me);
    if (!drv || with_overlap(me, 0, HCLIENT_OVERLAP_IDLE, &c) != 0)
        return 1;
    bool one_node = me->nnodes == 1;
    HT_EXPECT(me, c.shared == (one_node ? OPS - SLOTS : 0), "idle: %llu of %d ops in place", c.shared, OPS);
    if (with_overlap(me, 1, HCLIENT_OVERLAP_COMPUTE, &c) != 0)
        return 1;
    HT_EXPECT(me, c.shared == 0, "compute: %llu ops in place", c.shared);
    if (with_overlap(me, 2, HCLIENT_OVERLAP_AUTO, &c) != 0)
        return 1;
    /* At least the one that shows the GPU; how long its kernel waits depends on this machine. */
    HT_EXPECT(me, one_node ? c.shared >= 1 && c.staged >= SLOTS : c.shared == 0,
              "auto: %llu of %d ops in place", c.shared, OPS);
    return 0;
}

static int run_set(struct hpf_rank *me)
{
    struct counts c;
    drv = ht_gpu_open(me);
    if (!drv || with_overlap(me, 0, HCLIENT_OVERLAP_IDLE, &c) != 0)
        return 1;
    HT_EXPECT(me, c.shared == 0, "HREDUCE_GPU_STAGED_BYTES is set, and %llu smaller ops are in place",
              c.shared);
    return 0;
}

static void with(unsigned nnodes, unsigned nranks, hpf_rank_fn fn)
{
    struct hpf_cluster *c = ht_cluster(nnodes, NULL);
    const struct ht_job job = {.nranks = nranks, .fn = fn, .shared_bytes = 4 * sizeof(struct counts)};
    ht_run(c, &job);
    ht_cluster_end(c);
}

int main(void)
{
    ht_gpu_fake("libcuda_fake.so.1");
    setenv("FAKE_CUDA_DEVICES", "1", 1); /* no pair that a busy machine finds too slow */
    with(1, 2, run);
    with(2, 2, run);
    setenv("HREDUCE_GPU_STAGED_BYTES", "65536", 1);
    with(1, 2, run_set);
    return 0;
}
