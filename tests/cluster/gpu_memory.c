/* SPDX-License-Identifier: MIT */
/*
 * How ranks give GPU memory to the daemon, on the driver without a GPU: GPUs are matched by UUID, whatever order a process sees
 * them in; no context is made for a rank; allocations beyond the cache's limit push out the oldest that is not in use; an import
 * that the daemon is refused is copied instead, with the reason; memory that cannot be pinned is refused in words; what is freed
 * and allocated faster than the driver unmaps waits. timeout: 60
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

enum { COUNT = 20000 };

static const struct hrg_driver *drv;

static int sum(struct ht_env *e)
{
    struct ht_coll c = {
        .coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = COUNT, .gpu = true};
    return ht_collective(e, &c);
}

/* ---- which GPU -------------------------------------------------------------------------------------------------------- */

static int visible(struct hpf_rank *me)
{
    /* The fake's GPUs 3, 1 and 2, each the first that its process sees; and all of them in another order. */
    static const char *const order[] = {"3,1", "GPU-66616b65-2d63-7564-612d-6465762d3031,0", "2,3,0,1"};
    struct ht_env e;
    setenv("CUDA_VISIBLE_DEVICES", order[me->rank], 1);
    me->local = 0; /* the first that is seen */
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0)
        return 1;
    for (unsigned i = 0; i < 3; i++)
        if (sum(&e) != 0)
            return 1;
    HT_EXPECT(me, ht_gpu_calls("IpcGetMemHandle") > 0, "nothing was imported");
    /* The test's own is one; the library asks for none. */
    HT_EXPECT(me, ht_gpu_calls("DevicePrimaryCtxRetain") == 1, "%u contexts were asked for",
              ht_gpu_calls("DevicePrimaryCtxRetain"));
    return ht_leave(&e);
}

/* ---- the cache -------------------------------------------------------------------------------------------------------- */

static int in_place(struct ht_env *e, hrg_ptr p, size_t count)
{
    hclient_op_t op;
    void *at = (void *)(uintptr_t)p;
    HT_TRY(e->me, hclient_all_reduce(e->comm, at, at, count, HCLIENT_INT32, HCLIENT_MAX,
                                     HRG_STREAM_PER_THREAD, &op));
    HT_TRY(e->me, hclient_wait(op));
    return 0;
}

static int crowd(struct hpf_rank *me)
{
    enum { LIMIT = 256, MORE = 8 };
    struct ht_env e;
    hrg_ptr p[LIMIT + MORE];
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0)
        return 1;
    for (unsigned i = 0; i < LIMIT + MORE; i++) {
        HT_CUDA(me, drv->MemAlloc(&p[i], 4096));
        if (in_place(&e, p[i], 100) != 0)
            return 1;
    }
    HT_EXPECT(me, ht_gpu_calls("IpcGetMemHandle") == LIMIT + MORE, "%u allocations were %u imports",
              LIMIT + MORE, ht_gpu_calls("IpcGetMemHandle"));
    /* The newest are known, the first ones made room. */
    for (unsigned i = MORE; i < LIMIT + MORE; i++)
        if (in_place(&e, p[i], 100) != 0)
            return 1;
    HT_EXPECT(me, ht_gpu_calls("IpcGetMemHandle") == LIMIT + MORE, "what was used last was pushed out");
    for (unsigned i = 0; i < MORE; i++)
        if (in_place(&e, p[i], 100) != 0)
            return 1;
    HT_EXPECT(me, ht_gpu_calls("IpcGetMemHandle") == LIMIT + 2 * MORE, "the cache has no limit");
    return ht_leave(&e);
}

/* ---- what does not go ------------------------------------------------------------------------------------------------- */

/* As between PID namespaces, where the driver does not open a handle. */
static int not_opened(struct hpf_rank *me)
{
    struct ht_env e;
    char *path;
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0)
        return 1;
    for (unsigned i = 0; i < 3; i++)
        if (sum(&e) != 0)
            return 1;
    HT_TRY(me, hclient_comm_path(e.comm, &path));
    HT_EXPECT(me, strstr(path, "\"shared_ops\": 0") && strstr(path, "cuIpcOpenMemHandle"),
              "the path report does not say why memory is copied: %s", path);
    hclient_free(path);
    return ht_leave(&e);
}

static int not_pinned(struct hpf_rank *me)
{
    struct ht_env e;
    hrg_ptr p;
    setenv("FAKE_CUDA_FAIL", "MemHostRegister=2", 1);
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0)
        return 1;
    HT_CUDA(me, drv->MemAlloc(&p, 4096));
    void *at = (void *)(uintptr_t)p;
    hclient_result_t r = hclient_all_reduce(e.comm, at, at, 10, HCLIENT_FLOAT32, HCLIENT_SUM, NULL, NULL);
    if (ht_refused(me, r, HCLIENT_RESOURCE, "(ulimit -l)") != 0)
        return 1;
    struct ht_coll c = {.coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = COUNT};
    return ht_collective(&e, &c) != 0 ? 1 : ht_leave(&e);
}

/* ---- faster than the driver -------------------------------------------------------------------------------------------- */

enum { PIECE = 64 << 10, PIECES = 200, FIRST = 190 };

/* What lies where much memory was has the library free all of that, and asks for more while the daemon is at it. */
static int fast(struct hpf_rank *me)
{
    struct ht_env e;
    hrg_ptr at;
    char *path;
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0)
        return 1;
    HT_CUDA(me, drv->MemAddressReserve(&at, (size_t)PIECES * PIECE, 0, 0, 0));
    for (unsigned i = 0; i < PIECES; i++)
        if (ht_gpu_map(me, at + (hrg_ptr)i * PIECE, PIECE, HRG_HANDLE_POSIX_FD) != 0 ||
            in_place(&e, at + (hrg_ptr)i * PIECE, 100) != 0)
            return 1;
    HT_CUDA(me, drv->MemUnmap(at, (size_t)PIECES * PIECE));
    const hrg_ptr last = at + (hrg_ptr)FIRST * PIECE;
    if (ht_gpu_map(me, at, (size_t)FIRST * PIECE, HRG_HANDLE_POSIX_FD) != 0 ||
        ht_gpu_map(me, last, (size_t)(PIECES - FIRST) * PIECE, HRG_HANDLE_POSIX_FD) != 0 ||
        in_place(&e, at, FIRST * PIECE / sizeof(int)) != 0 ||
        in_place(&e, last, (PIECES - FIRST) * PIECE / sizeof(int)) != 0)
        return 1;
    HT_TRY(me, hclient_comm_path(e.comm, &path));
    HT_EXPECT(me, strstr(path, "\"staged_ops\": 0") != NULL, "the daemon was refused memory: %s", path);
    hclient_free(path);
    return ht_leave(&e);
}

static struct hpf_cluster *with(unsigned nranks, hpf_rank_fn fn)
{
    struct hpf_cluster *c = ht_cluster(1, NULL);
    const struct ht_job job = {.nranks = nranks, .fn = fn};
    ht_run(c, &job);
    return c;
}

int main(void)
{
    ht_gpu_fake("libcuda_fake.so.1");
    setenv("HREDUCE_GPU_STAGED_BYTES", "0", 1);
    struct hpf_cluster *c = with(3, visible);
    char *status = ht_status(c, 0);
    static const char *const used[] = {"3031", "3032", "3033"};
    for (unsigned i = 0; i < 3; i++) {
        char uuid[64];
        snprintf(uuid, sizeof(uuid), "GPU-66616b65-2d63-7564-612d-6465762d%s", used[i]);
        HT_CHECK(strstr(status, uuid) != NULL, "the daemon has not used %s: %s", uuid, status);
    }
    HT_CHECK(strstr(status, "GPU-66616b65-2d63-7564-612d-6465762d3030") == NULL,
             "the daemon uses a GPU that no rank uses: %s", status);
    free(status);
    ht_cluster_end(c);
    ht_cluster_end(with(2, crowd));
    ht_cluster_end(with(2, not_pinned));
    setenv("FAKE_CUDA_DELAY", "call:MemUnmap=5000", 1);
    ht_cluster_end(with(2, fast));
    unsetenv("FAKE_CUDA_DELAY");
    setenv("FAKE_CUDA_FAIL", "IpcOpenMemHandle=201", 1);
    ht_cluster_end(with(2, not_opened));
    return 0;
}
