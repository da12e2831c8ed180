/* SPDX-License-Identifier: MIT */
/*
 * A communicator of one rank on GPU buffers, on the driver without a GPU: every collective is one copy of the stream, or in
 * place nothing; in the stream's order, and the op is over when the stream has passed it. timeout: 120
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

static const struct hrg_driver *drv;

static int shapes(struct ht_env *e)
{
    static const uint64_t counts[] = {0, 1, 1023, 65537, 900001};
    unsigned copies = 0, before = ht_gpu_calls("MemcpyDtoDAsync"), k = 0;
    for (unsigned coll = 0; coll < HRP_NCOLLS; coll++)
        for (unsigned i = 0; i < sizeof(counts) / sizeof(counts[0]); i++, k++) {
            struct ht_coll c = {.coll = coll,
                                .dtype = k % HRP_NDTYPES,
                                .redop = k % HRP_NREDOPS,
                                .count = coll == HRP_BARRIER ? 0 : counts[i],
                                .inplace = k % 2,
                                .send_shift = k * 3 % 64,
                                .gpu = true};
            copies += c.count > 0 && !c.inplace;
            if (ht_collective(e, &c) != 0)
                return 1;
        }
    HT_EXPECT(e->me, ht_gpu_calls("MemcpyDtoDAsync") == before + copies, "%u ops out of place made %u copies",
              copies, ht_gpu_calls("MemcpyDtoDAsync") - before);
    HT_EXPECT(e->me,
              ht_gpu_calls("IpcGetMemHandle") == 0 && ht_gpu_calls("StreamWaitValue64") == 0 &&
                  ht_gpu_calls("StreamBatchMemOp") == 0,
              "memory was exported, or a stream waits, although nobody else takes part");
    return 0;
}

/* Behind a held stream nothing happens; ops on host memory pass by. */
static int order(struct ht_env *e)
{
    struct ht_flight f;
    hrg_stream held;
    struct ht_gate gate;
    HT_CUDA(e->me, drv->StreamCreateWithPriority(&held, HRG_STREAM_NON_BLOCKING, 0));
    if (ht_gate_new(e, &gate) != 0 || ht_gate_hold(e, &gate, held) != 0)
        return 1;
    struct ht_coll c = {.coll = HRP_ALL_REDUCE,
                        .dtype = HRP_F32,
                        .redop = HRP_AVG,
                        .count = 5000,
                        .gpu = true,
                        .stream = held};
    if (ht_post(e, &c, NULL, NULL, &f) != 0)
        return 1;
    int32_t host[100];
    hclient_op_t op;
    for (int i = 0; i < 100; i++)
        host[i] = i;
    for (unsigned i = 0; i < 5; i++) {
        HT_TRY(e->me, hclient_all_reduce(e->comm, host, host, 100, HCLIENT_INT32, HCLIENT_SUM, NULL, &op));
        HT_TRY(e->me, hclient_wait(op));
    }
    HT_EXPECT(e->me, host[99] == 99, "a sum over one rank is %d", host[99]);
    hpf_sleep_ms(50); /* for what does not wait */
    HT_EXPECT(e->me, hclient_test(f.op) == HCLIENT_IN_PROGRESS, "an op is over although its stream is held");
    atomic_store(gate.word, 1);
    return ht_verify(e, &f);
}

/* More ops than slots, without a wait. */
static int many(struct ht_env *e)
{
    enum { OPS = 200, COUNT = 64 };
    hrg_ptr in, out;
    void *p;
    hrg_stream s;
    HT_CUDA(e->me, drv->StreamCreateWithPriority(&s, HRG_STREAM_NON_BLOCKING, 0));
    HT_CUDA(e->me, drv->MemAllocHost(&p, OPS * COUNT * sizeof(int32_t)));
    HT_CUDA(e->me, drv->MemAlloc(&in, OPS * COUNT * sizeof(int32_t)));
    HT_CUDA(e->me, drv->MemAlloc(&out, OPS * COUNT * sizeof(int32_t)));
    int32_t *host = p;
    for (int i = 0; i < OPS * COUNT; i++)
        host[i] = i;
    HT_CUDA(e->me, drv->MemcpyHtoDAsync(in, host, OPS * COUNT * sizeof(int32_t), s));
    for (unsigned i = 0; i < OPS; i++) {
        size_t at = i * COUNT * sizeof(int32_t);
        HT_TRY(e->me, hclient_all_reduce(e->comm, (void *)(uintptr_t)(in + at), (void *)(uintptr_t)(out + at),
                                         COUNT, HCLIENT_INT32, HCLIENT_MAX, s, NULL));
    }
    HT_CUDA(e->me, drv->StreamSynchronize(s));
    memset(p, 0xee, OPS * COUNT * sizeof(int32_t));
    HT_CUDA(e->me, drv->MemcpyDtoHAsync(host, out, OPS * COUNT * sizeof(int32_t), s));
    HT_CUDA(e->me, drv->StreamSynchronize(s));
    for (int i = 0; i < OPS * COUNT; i++)
        HT_EXPECT(e->me, host[i] == i, "element %d is %d", i, host[i]);
    HT_TRY(e->me, hclient_comm_wait(e->comm));
    HT_CUDA(e->me, drv->MemFree(in));
    HT_CUDA(e->me, drv->MemFree(out));
    return 0;
}

static int run(struct hpf_rank *me)
{
    struct ht_env e;
    char *path;
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0 || shapes(&e) != 0 || order(&e) != 0 || many(&e) != 0)
        return 1;
    HT_TRY(me, hclient_comm_path(e.comm, &path));
    HT_EXPECT(me, strstr(path, "\"staged_ops\": 0, \"alone_ops\": 2"), "the path report: %s", path);
    hclient_free(path);
    return ht_leave(&e);
}

int main(void)
{
    ht_gpu_fake("libcuda_fake.so.1");
    struct hpf_cluster *c = ht_cluster(1, NULL);
    const struct ht_job job = {.nranks = 1, .fn = run, .expected_bytes = 12 << 20};
    ht_run(c, &job);
    ht_cluster_end(c);
    return 0;
}
