/* SPDX-License-Identifier: MIT */
/*
 * require = p2p, of a job or of a configuration file, on the driver without a GPU: what can be reduced directly is, also where it
 * is small; memory that would be copied through host memory, GPUs that do not reach each other and a daemon that serves no GPU
 * are refused with the reason. timeout: 60
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

static const struct hrg_driver *drv;

static int refused_sum(struct ht_env *e, hrg_ptr p, unsigned count, const char *words)
{
    hclient_op_t op = {.number = 0};
    void *at = (void *)(uintptr_t)p;
    hclient_result_t r =
        hclient_all_reduce(e->comm, at, at, count, HCLIENT_FLOAT32, HCLIENT_SUM, HRG_STREAM_PER_THREAD, &op);
    if (r == HCLIENT_OK)
        r = hclient_wait(op);
    return ht_refused(e->me, r, HCLIENT_UNSUPPORTED, words);
}

static int join(struct hpf_rank *me, struct ht_env *e)
{
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    config.require = me->arg != NULL ? HCLIENT_REQUIRE_P2P : 0;
    config.overlap =
        HCLIENT_OVERLAP_COMPUTE; /* which asks for copies through host memory: what is required goes before */
    drv = ht_gpu_open(me);
    return drv == NULL || ht_join(e, me, 0, &config) != 0;
}

static int direct(struct hpf_rank *me)
{
    struct ht_env e;
    hrg_ptr p;
    char *path;
    if (join(me, &e) != 0)
        return 1;
    static const uint64_t counts[] = {1, 1000, 300007};
    for (unsigned i = 0; i < 3; i++) {
        struct ht_coll c = {
            .coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = counts[i], .gpu = true};
        if (ht_collective(&e, &c) != 0)
            return 1;
    }
    HT_TRY(me, hclient_comm_path(e.comm, &path));
    HT_EXPECT(
        me, strstr(path, "sm engine") && strstr(path, "p2p is required") && strstr(path, "\"staged_ops\": 0"),
        "the path report: %s", path);
    hclient_free(path);
    HT_CUDA(me, drv->MemAllocAsync(&p, 400000, HRG_STREAM_PER_THREAD));
    if (refused_sum(&e, p, 10, "without a handle that can be exported") != 0 ||
        refused_sum(&e, p, 100000, "p2p is required") != 0)
        return 1;
    HT_CUDA(me, drv->MemFreeAsync(p, HRG_STREAM_PER_THREAD));
    /* Host memory is nobody's concern here, and a refusal costs nothing but its call. */
    struct ht_coll c = {.coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = 1000};
    if (ht_collective(&e, &c) != 0)
        return 1;
    c.gpu = true;
    return ht_collective(&e, &c) != 0 ? 1 : ht_leave(&e);
}

static int apart(struct hpf_rank *me)
{
    struct ht_env e;
    hrg_ptr p;
    if (join(me, &e) != 0)
        return 1;
    HT_CUDA(me, drv->MemAlloc(&p, 400000));
    if (refused_sum(&e, p, 100000, "do not reach each other") != 0 ||
        refused_sum(&e, p, 10, "p2p is required") != 0)
        return 1;
    return ht_leave(&e);
}

static int no_gpu(struct hpf_rank *me)
{
    struct ht_page *page = me->shared;
    hclient_comm_t comm;
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    config.require = HCLIENT_REQUIRE_P2P;
    if (me->rank == 0)
        HT_TRY(me, hclient_get_unique_id(&page->id[0]));
    if (hpf_rank_barrier(me, false, ht_ms(30000)) < 0)
        return 1;
    hclient_result_t r =
        hclient_comm_init_rank_config(&comm, (int)me->nranks, page->id[0], (int)me->rank, &config);
    return ht_refused(me, r, HCLIENT_UNSUPPORTED, "set gpu = on");
}

static void with(const char *key, bool job_requires, hpf_rank_fn fn)
{
    static char yes;
    const char *const keys[] = {key, NULL};
    struct hpf_cluster *c = ht_cluster(1, keys);
    const struct ht_job job = {
        .nranks = 2, .fn = fn, .arg = job_requires ? &yes : NULL, .expected_bytes = 4 << 20};
    ht_run(c, &job);
    ht_cluster_end(c);
}

int main(void)
{
    ht_gpu_fake("libcuda_fake.so.1");
    if (!ht_sanitized()) { /* copies between GPUs are too slow then to be worth having, and the pair is refused */
        with(NULL, true, direct);
        with("require = p2p", false, direct);
    }
    with("gpu = off", true, no_gpu);
    setenv("FAKE_CUDA_NO_P2P", "0-1", 1);
    with(NULL, true, apart);
    return 0;
}
