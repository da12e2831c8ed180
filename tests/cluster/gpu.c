/* SPDX-License-Identifier: MIT */
/*
 * GPU buffers through real daemons, on the driver without a GPU: every collective, type, count and alignment; streams of every
 * kind; several streams on one communicator; ranks with GPU and ranks with host memory in one op; what is refused, and that it
 * leaves a capture intact. timeout: 240
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

/* A small window, so that ops of some megabytes go through it several times. */
static const char *const keys[] = {"staging_window = 3M", "unit_size = 256K", "unit_min = 64K", NULL};

static const struct hrg_driver *drv;

static int shapes(struct ht_env *e)
{
    static const uint64_t counts[] = {0, 1, 3, 17, 1000, 1023, 65536, 65537, 300007};
    hrg_stream own;
    HT_CUDA(e->me, drv->StreamCreateWithPriority(&own, HRG_STREAM_NON_BLOCKING, 0));
    hrg_stream streams[] = {own, NULL, HRG_STREAM_LEGACY, HRG_STREAM_PER_THREAD};
    unsigned k = 0;
    for (unsigned coll = 0; coll < HRP_NCOLLS; coll++)
        for (unsigned i = 0; i < sizeof(counts) / sizeof(counts[0]); i++, k++) {
            struct ht_coll c = {.coll = coll,
                                .dtype = k % HRP_NDTYPES,
                                .redop = k % HRP_NREDOPS,
                                .root = k % e->me->nranks,
                                .count = coll == HRP_BARRIER ? 0 : counts[i],
                                .inplace = k % 2,
                                .send_shift = k * 3 % 64,
                                .gpu = true,
                                .stream = streams[k % 4]};
            if (ht_collective(e, &c) != 0)
                return 1;
        }
    return 0;
}

/* Around the size up to which ops are staged, which counts bytes: on one side they go another way than on the other. */
static int threshold(struct ht_env *e)
{
    for (unsigned dtype = 0; dtype < HRP_NDTYPES; dtype++)
        for (unsigned i = 0; i < 3; i++) {
            struct ht_coll c = {.coll = HRP_ALL_REDUCE,
                                .dtype = dtype,
                                .redop = HRP_SUM,
                                .count = (64 << 10) / hrp_dtype_size(dtype) + i - 1,
                                .gpu = true};
            if (ht_collective(e, &c) != 0)
                return 1;
        }
    return 0;
}

/* Larger than the window, which each must cross several times. */
static int large(struct ht_env *e)
{
    struct ht_coll c = {
        .coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = 2500003, .gpu = true};
    for (unsigned coll = 0; coll < HRP_BARRIER; coll++) {
        c.coll = coll;
        c.count = coll == HRP_REDUCE_SCATTER || coll == HRP_ALL_GATHER ? 700001 : 2500003;
        c.dtype = coll % 2 ? HRP_BF16 : HRP_F32;
        c.inplace = coll % 2;
        if (ht_collective(e, &c) != 0)
            return 1;
    }
    return 0;
}

/* Many ops on many streams, in flight together, waited for in another order than posted. */
static int streams_at_once(struct ht_env *e)
{
    enum { OPS = 48, STREAMS = 5 };
    struct ht_flight f[OPS];
    hrg_stream stream[STREAMS];
    static unsigned char room[OPS][2][300000];
    for (unsigned i = 0; i < STREAMS; i++)
        HT_CUDA(e->me, drv->StreamCreateWithPriority(&stream[i], i % 2 ? HRG_STREAM_NON_BLOCKING : 0, 0));
    for (unsigned i = 0; i < OPS; i++) {
        struct ht_coll c = {.coll = i % 4,
                            .dtype = i % 2 ? HRP_I32 : HRP_F16,
                            .redop = HRP_SUM,
                            .count = 1000 + 1500 * (i % 7),
                            .gpu = true,
                            .stream = stream[(i + e->me->rank) % STREAMS]};
        if (ht_post(e, &c, room[i][0], room[i][1], &f[i]) != 0)
            return 1;
    }
    for (unsigned i = 0; i < OPS; i++)
        if (ht_verify(e, &f[(i * 29 + 7) % OPS]) != 0)
            return 1;
    return 0;
}

/* The stream of the older op is held back on every rank; the younger one is over before. */
static int younger_first(struct ht_env *e)
{
    struct ht_flight f[2];
    struct ht_gate gate;
    hrg_stream held, other;
    HT_CUDA(e->me, drv->StreamCreateWithPriority(&held, HRG_STREAM_NON_BLOCKING, 0));
    HT_CUDA(e->me, drv->StreamCreateWithPriority(&other, HRG_STREAM_NON_BLOCKING, 0));
    for (unsigned round = 0; round < 4; round++) {
        if (ht_gate_new(e, &gate) != 0)
            return 1;
        struct ht_coll c = {
            .coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = 5000, .gpu = true};
        c.stream = held;
        if (ht_gate_hold(e, &gate, held) != 0 || ht_post(e, &c, NULL, NULL, &f[0]) != 0)
            return 1;
        static unsigned char room[2][40000];
        c.stream = other;
        c.dtype = HRP_I32;
        if (ht_post(e, &c, room[0], room[1], &f[1]) != 0 || ht_verify(e, &f[1]) != 0)
            return 1;
        HT_EXPECT(e->me, hclient_test(f[0].op) == HCLIENT_IN_PROGRESS,
                  "an op is over although its stream is held");
        if (hpf_rank_barrier(e->me, false, ht_ms(30000)) < 0)
            return 1;
        atomic_store(gate.word, 1);
        if (ht_verify(e, &f[0]) != 0)
            return 1;
    }
    return 0;
}

/*
 * A small op's copy writes a whole page of the window. Its own bytes lie before those of an older op, its page reaches into
 * them: they stay what they are until that op, which waits for rank 0's stream, is over.
 */
static int page_of_a_small_op(struct ht_env *e)
{
    enum { WINDOW = 3 << 20, PAGE = 4096, FILLERS = 24, FILLER = (WINDOW - 3 * PAGE) / FILLERS };
    struct ht_flight f;
    struct ht_gate gate;
    hrg_stream held, other;
    hrg_ptr d;
    hclient_op_t op;
    HT_CUDA(e->me, drv->StreamCreateWithPriority(&held, HRG_STREAM_NON_BLOCKING, 0));
    HT_CUDA(e->me, drv->StreamCreateWithPriority(&other, HRG_STREAM_NON_BLOCKING, 0));
    HT_CUDA(e->me, drv->MemAlloc(&d, 1 << 20));
    HT_CUDA(e->me, drv->MemsetD8Async(d, 0, 1 << 20, other));
    if (ht_gate_new(e, &gate) != 0)
        return 1;
    /* A page, then one and a half: the next op begins in the middle of one. */
    static const unsigned before[] = {1, PAGE / 4 * 3 / 2};
    void *at = (void *)(uintptr_t)d;
    for (unsigned i = 0; i < 2; i++) {
        HT_TRY(e->me, hclient_all_reduce(e->comm, at, at, before[i], HCLIENT_INT32, HCLIENT_SUM, other, &op));
        HT_TRY(e->me, hclient_wait(op));
    }
    struct ht_coll c = {.coll = HRP_ALL_REDUCE,
                        .dtype = HRP_I32,
                        .redop = HRP_SUM,
                        .count = 2 * PAGE / 4,
                        .gpu = true,
                        .stream = held};
    if (e->me->rank == 0 && ht_gate_hold(e, &gate, held) != 0)
        return 1;
    if (ht_post(e, &c, NULL, NULL, &f) != 0)
        return 1;
    for (unsigned i = 0; i < FILLERS; i++)
        HT_TRY(e->me,
               hclient_all_reduce(e->comm, at, at, FILLER / 4, HCLIENT_INT32, HCLIENT_SUM, other, &op));
    HT_TRY(e->me, hclient_wait(op));
    HT_EXPECT(e->me, hclient_test(f.op) == HCLIENT_IN_PROGRESS, "an op is over although a stream is held");
    HT_TRY(e->me, hclient_all_reduce(e->comm, at, at, 1, HCLIENT_INT32, HCLIENT_SUM, other, &op));
    hpf_sleep_ms(200); /* for the copy, if it does not wait */
    if (hpf_rank_barrier(e->me, false, ht_ms(30000)) < 0)
        return 1;
    atomic_store(gate.word, 1);
    if (ht_verify(e, &f) != 0)
        return 1;
    HT_TRY(e->me, hclient_wait(op));
    HT_CUDA(e->me, drv->MemFree(d));
    return 0;
}

/* Half of the ranks has its buffers on the GPU; and one rank changes its mind from op to op. */
static int mixed(struct ht_env *e)
{
    static const uint64_t counts[] = {5, 5000, 900001};
    for (unsigned i = 0; i < 12; i++) {
        struct ht_coll c = {.coll = i % 4,
                            .dtype = i % 3 ? HRP_F32 : HRP_BF16,
                            .redop = HRP_AVG,
                            .count = counts[i % 3],
                            .gpu = (e->me->rank + (i & e->me->rank)) % 2 == 0,
                            .send_mem = i % 2,
                            .recv_mem = i % 2};
        if (ht_collective(e, &c) != 0)
            return 1;
    }
    /* More than a window holds: what passes through it is cut finely, whatever the engine would like. */
    for (unsigned i = 0; i < 2; i++) {
        unsigned memory = i ? HT_PLAIN : HT_ALLOC;
        struct ht_coll c = {.coll = HRP_ALL_REDUCE,
                            .dtype = HRP_F32,
                            .redop = HRP_SUM,
                            .count = 2500003,
                            .gpu = e->me->rank % 2 == 0,
                            .send_mem = memory,
                            .recv_mem = memory};
        if (ht_collective(e, &c) != 0)
            return 1;
    }
    return 0;
}

/* More ops than slots, without a wait, and the sums afterwards; one allocation freed and made anew in between. */
static int back_to_back(struct ht_env *e)
{
    enum { OPS = 200, COUNT = 256 };
    hrg_ptr in, out;
    void *p;
    hrg_stream s;
    HT_CUDA(e->me, drv->StreamCreateWithPriority(&s, HRG_STREAM_NON_BLOCKING, 0));
    HT_CUDA(e->me, drv->MemAllocHost(&p, OPS * COUNT * sizeof(int32_t)));
    int32_t *host = p;
    unsigned n = e->me->nranks, batches = ht_gpu_calls("StreamBatchMemOp"),
             writes = ht_gpu_calls("StreamWriteValue64");
    for (unsigned round = 0; round < 2; round++) {
        HT_CUDA(e->me, drv->MemAlloc(&in, OPS * COUNT * sizeof(int32_t)));
        HT_CUDA(e->me, drv->MemAlloc(&out, OPS * COUNT * sizeof(int32_t)));
        for (unsigned i = 0; i < OPS * COUNT; i++)
            host[i] = (int32_t)(i * (round + 3) + e->me->rank);
        HT_CUDA(e->me, drv->MemcpyHtoDAsync(in, host, OPS * COUNT * sizeof(int32_t), s));
        for (unsigned i = 0; i < OPS; i++) {
            size_t at = i * COUNT * sizeof(int32_t);
            HT_TRY(e->me,
                   hclient_all_reduce(e->comm, (void *)(uintptr_t)(in + at), (void *)(uintptr_t)(out + at),
                                      COUNT, HCLIENT_INT32, HCLIENT_SUM, s, NULL));
        }
        HT_CUDA(e->me, drv->MemcpyDtoHAsync(host, out, OPS * COUNT * sizeof(int32_t), s));
        HT_CUDA(e->me, drv->StreamSynchronize(s)); /* and no other wait */
        for (unsigned i = 0; i < OPS * COUNT; i++)
            HT_EXPECT(e->me, host[i] == (int32_t)(n * (i * (round + 3)) + n * (n - 1) / 2),
                      "element %u is %d", i, host[i]);
        HT_CUDA(e->me, drv->MemFree(in));
        HT_CUDA(e->me, drv->MemFree(out));
    }
    HT_TRY(e->me, hclient_comm_wait(e->comm));
    /* Each call of the driver costs some microseconds: between its two copies an op makes one, and one behind them. */
    batches = ht_gpu_calls("StreamBatchMemOp") - batches;
    writes = ht_gpu_calls("StreamWriteValue64") - writes;
    HT_EXPECT(e->me, batches + writes == 2 * 2 * OPS, "%u small ops enqueued words in %u + %u calls", 2 * OPS,
              batches, writes);
    return 0;
}

static int refusals(struct ht_env *e)
{
    static float host[100];
    hrg_ptr d;
    hrg_stream s;
    hrg_graph graph;
    HT_CUDA(e->me, drv->MemAlloc(&d, 4096));
    void *dev = (void *)(uintptr_t)d;
    HT_CUDA(e->me, drv->StreamCreateWithPriority(&s, 0, 0));
    int bad =
        ht_refused(e->me, hclient_all_reduce(e->comm, dev, host, 100, HCLIENT_FLOAT32, HCLIENT_SUM, s, NULL),
                   HCLIENT_UNSUPPORTED, "one kind of memory on a rank");
    bad |=
        ht_refused(e->me, hclient_all_reduce(e->comm, host, host, 100, HCLIENT_FLOAT32, HCLIENT_SUM, s, NULL),
                   HCLIENT_INVALID_ARGUMENT, "must be NULL for host buffers");
    bad |= ht_refused(e->me,
                      hclient_all_reduce(e->comm, dev, dev, 100, HCLIENT_FLOAT32, HCLIENT_SUM, host, NULL),
                      HCLIENT_SYSTEM, "CUDA_ERROR_INVALID_HANDLE");
    /* A capture: refused, it goes on and ends well, with what was captured before and after. */
    HT_CUDA(e->me, drv->StreamBeginCapture(s, HRG_CAPTURE_MODE_GLOBAL));
    HT_CUDA(e->me, drv->MemsetD8Async(d, 1, 100, s));
    bad |=
        ht_refused(e->me, hclient_all_reduce(e->comm, dev, dev, 100, HCLIENT_FLOAT32, HCLIENT_SUM, s, NULL),
                   HCLIENT_UNSUPPORTED, "cannot be captured");
    bad |= ht_refused(e->me,
                      hclient_all_reduce(e->comm, dev, dev, 100, HCLIENT_FLOAT32, HCLIENT_SUM, NULL, NULL),
                      HCLIENT_UNSUPPORTED, "while another stream captures");
    HT_CUDA(e->me, drv->MemsetD8Async(d, 2, 100, s));
    HT_CUDA(e->me, drv->StreamEndCapture(s, &graph));
    HT_CUDA(e->me, drv->GraphDestroy(graph));
    HT_CUDA(e->me, drv->MemFree(d));
    return bad;
}

static int managed(struct ht_env *e)
{
    hrg_ptr p;
    HT_CUDA(e->me, drv->MemAllocManaged(&p, 4000, HRG_ATTACH_GLOBAL));
    int32_t *v = (int32_t *)(uintptr_t)p;
    for (int i = 0; i < 1000; i++)
        v[i] = i;
    HT_TRY(e->me,
           hclient_all_reduce(e->comm, v, v, 1000, HCLIENT_INT32, HCLIENT_SUM, HRG_STREAM_PER_THREAD, NULL));
    HT_CUDA(e->me, drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
    for (int i = 0; i < 1000; i++)
        HT_EXPECT(e->me, v[i] == i * (int)e->me->nranks, "managed memory: element %d is %d", i, v[i]);
    HT_CUDA(e->me, drv->MemFree(p));
    return 0;
}

/* ---- memory that the daemon has ---------------------------------------------------------------------------- */

/* Sums v[i] = i + rank over the ranks, in place at p, which is GPU memory of whatever kind. */
static int sum_at(struct ht_env *e, hrg_ptr p, unsigned count, const char *what)
{
    static int32_t *host;
    void *fresh;
    if (host == NULL) {
        HT_CUDA(e->me, drv->MemAllocHost(&fresh, 4 << 20));
        host = fresh;
    }
    unsigned n = e->me->nranks;
    for (unsigned i = 0; i < count; i++)
        host[i] = (int32_t)(i + e->me->rank);
    HT_CUDA(e->me, drv->MemcpyHtoDAsync(p, host, count * sizeof(int32_t), HRG_STREAM_PER_THREAD));
    HT_TRY(e->me, hclient_all_reduce(e->comm, (void *)(uintptr_t)p, (void *)(uintptr_t)p, count,
                                     HCLIENT_INT32, HCLIENT_SUM, HRG_STREAM_PER_THREAD, NULL));
    HT_CUDA(e->me, drv->MemcpyDtoHAsync(host, p, count * sizeof(int32_t), HRG_STREAM_PER_THREAD));
    HT_CUDA(e->me, drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
    for (unsigned i = 0; i < count; i++)
        HT_EXPECT(e->me, host[i] == (int32_t)(n * i + n * (n - 1) / 2), "%s: element %u is %d", what, i,
                  host[i]);
    return 0;
}

/* An address that is used again is another allocation: what the daemon has of the old one is never mistaken for it. */
static int address_used_again(struct ht_env *e)
{
    hrg_ptr first = 0, p;
    unsigned again = 0;
    for (unsigned i = 0; i < 40; i++) {
        HT_CUDA(e->me, drv->MemAlloc(&p, 400000));
        again += p == first;
        first = p;
        if (sum_at(e, p + 4 * (i % 3), 99000, "fresh memory") != 0)
            return 1;
        HT_CUDA(e->me, drv->MemFree(p));
    }
    HT_EXPECT(e->me, again > 0, "no address was used again, so nothing was tested");
    return 0;
}

/* Parts of one allocation are one import. */
static int slices(struct ht_env *e)
{
    hrg_ptr p;
    unsigned before = ht_gpu_calls("IpcGetMemHandle"), batches = ht_gpu_calls("StreamBatchMemOp");
    HT_CUDA(e->me, drv->MemAlloc(&p, 4 << 20));
    for (unsigned i = 0; i < 60; i++)
        if (sum_at(e, p + i * 40004, 10000 + i, "a slice") != 0)
            return 1;
    HT_EXPECT(e->me, ht_gpu_calls("IpcGetMemHandle") == before + 1,
              "60 slices of one allocation were %u imports", ht_gpu_calls("IpcGetMemHandle") - before);
    HT_EXPECT(e->me, ht_gpu_calls("StreamBatchMemOp") == batches + 60,
              "60 ops enqueued their words in %u calls", ht_gpu_calls("StreamBatchMemOp") - batches);
    HT_CUDA(e->me, drv->MemFree(p));
    return 0;
}

enum { MAPPING = 1 << 20, MAPPINGS = 4 };

/* A segment of virtual memory that grows, as PyTorch's expandable ones do, with handles that can be exported or cannot. */
static int growing(struct ht_env *e, int types, const char *what)
{
    hrg_ptr range;
    HT_CUDA(e->me, drv->MemAddressReserve(&range, (size_t)MAPPINGS * MAPPING, 0, 0, 0));
    for (unsigned i = 0; i < MAPPINGS; i++) {
        hrg_ptr at = range + (hrg_ptr)i * MAPPING;
        /* Inside the newest mapping, and from its predecessor over the edge. */
        if (ht_gpu_map(e->me, at, MAPPING, types) != 0 || sum_at(e, at + 400, 100000, what) != 0 ||
            (i > 0 && sum_at(e, at - 120000, 100000, what) != 0))
            return 1;
    }
    if (sum_at(e, range + 12, (unsigned)(MAPPINGS * MAPPING / 4 - 3), what) != 0)
        return 1;
    unsigned exported = ht_gpu_calls("MemExportToShareableHandle");
    HT_EXPECT(e->me, (exported > 0) == (types != 0), "%s: %u exports", what, exported);
    HT_CUDA(e->me, drv->MemUnmap(range, (size_t)MAPPINGS * MAPPING));
    HT_CUDA(e->me, drv->MemAddressFree(range, (size_t)MAPPINGS * MAPPING));
    return 0;
}

static int pool(struct ht_env *e)
{
    hrg_ptr p;
    HT_CUDA(e->me, drv->MemAllocAsync(&p, 400000, HRG_STREAM_PER_THREAD));
    if (sum_at(e, p, 100000, "memory of a pool") != 0)
        return 1;
    HT_CUDA(e->me, drv->MemFreeAsync(p, HRG_STREAM_PER_THREAD));
    return 0;
}

/* With HREDUCE_GPU_STAGED_BYTES of 0: whatever can be exported is. */
static int run_shared(struct hpf_rank *me)
{
    struct ht_env e;
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0)
        return 1;
    static int (*const parts[])(struct ht_env *) = {address_used_again, slices,          shapes,
                                                    younger_first,      streams_at_once, pool};
    for (unsigned i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        if (parts[i](&e) != 0)
            return 1;
    if (growing(&e, 0, "virtual memory without a handle") != 0 ||
        growing(&e, HRG_HANDLE_POSIX_FD, "exportable virtual memory") != 0)
        return 1;
    char *path;
    HT_TRY(me, hclient_comm_path(e.comm, &path));
    HT_EXPECT(me,
              strstr(path, "\"gpu_buffers\"") && strstr(path, "cannot be exported") == NULL &&
                  strstr(path, "handle that can be exported"),
              "the path report does not say why memory was staged: %s", path);
    hclient_free(path);
    return ht_leave(&e);
}

static int run(struct hpf_rank *me)
{
    struct ht_env e;
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0)
        return 1;
    static int (*const parts[])(struct ht_env *) = {
        shapes, threshold,    large,    streams_at_once, younger_first, page_of_a_small_op,
        mixed,  back_to_back, refusals, managed};
    for (unsigned i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        if (parts[i](&e) != 0)
            return 1;
    return ht_leave(&e);
}

/* A driver that lacks what GPU buffers need refuses them in words; host buffers go on. */
static int run_old(struct hpf_rank *me)
{
    struct ht_env e;
    hrg_ptr d;
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0)
        return 1;
    HT_CUDA(me, drv->MemAlloc(&d, 4096));
    void *dev = (void *)(uintptr_t)d;
    if (ht_refused(me, hclient_all_reduce(e.comm, dev, dev, 100, HCLIENT_FLOAT32, HCLIENT_SUM, NULL, NULL),
                   HCLIENT_UNSUPPORTED, "need a driver for CUDA 11.7 or newer") != 0)
        return 1;
    struct ht_coll c = {.coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = 1000};
    return ht_collective(&e, &c) != 0 ? 1 : ht_leave(&e);
}

static void with(const char *driver, unsigned nnodes, unsigned nranks, hpf_rank_fn fn)
{
    ht_gpu_fake(driver);
    struct hpf_cluster *c = ht_cluster(nnodes, keys);
    const struct ht_job job = {.nranks = nranks, .fn = fn, .expected_bytes = 12 << 20};
    ht_run(c, &job);
    ht_cluster_end(c);
}

int main(void)
{
    with("libcuda_fake.so.1", 1, 3, run);
    with("libcuda_fake.so.1", 2, 4, run);
    setenv("HREDUCE_GPU_STAGED_BYTES", "0", 1);
    with("libcuda_fake.so.1", 1, 2, run_shared);
    with("libcuda_fake.so.1", 2, 4, run_shared);
    unsetenv("HREDUCE_GPU_STAGED_BYTES");
    with("libcuda_fake_old.so.1", 1, 2, run_old);
    setenv("FAKE_CUDA_ATTR", "122=0", 1);
    with("libcuda_fake.so.1", 1, 2, run_old);
    return 0;
}
