/* SPDX-License-Identifier: MIT */
/*
 * An allocator whose segments grow, on the driver without a GPU: a buffer of a training that reaches over the end of its segment
 * from the sixth step on, while the op of the fifth is not over; and a segment whose end is given back and becomes other
 * memory. The daemon has all of it, each time anew. Where it was made without a handle that can be exported, all of it is copied, with
 * one warning. timeout: 60
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

enum {
    STEPS = 20,
    GROWS_AT = 6,
    MAPPING = 1 << 20,
    MAPPINGS = 3,
    SMALL = 200000,
    LARGE = 600000,
    GUARD = 64
};

static const struct hrg_driver *drv;
static unsigned warnings;

static void listen_for(void *user, hclient_log_level_t level, const char *text)
{
    (void)user;
    warnings += level == HCLIENT_LOG_WARN && strstr(text, "expandable segments") != NULL;
}

struct segment {
    struct ht_env e;
    int types;    /* handles that its mappings can be exported as */
    hrg_ptr base; /* of MAPPINGS mappings at most */
    hrg_stream stream, other;
    int32_t *host; /* pinned, for a whole segment */
};

static int grow(struct segment *s, unsigned mapping)
{
    return ht_gpu_map(s->e.me, s->base + (hrg_ptr)mapping * MAPPING, MAPPING, s->types);
}

static int32_t value(unsigned step, unsigned rank, unsigned i)
{
    return (int32_t)(i * 2654435761u + step * 40503u + rank * 977u);
}

/* In place; what is posted is verified later. The guards lie in front and behind. */
static int post(struct segment *s, hrg_ptr at, unsigned count, unsigned step, hrg_stream stream,
                hclient_op_t *op)
{
    struct hpf_rank *me = s->e.me;
    const size_t bytes = (size_t)count * sizeof(int32_t);
    memset(s->host, 0x77, bytes + 2 * (size_t)GUARD);
    for (unsigned i = 0; i < count; i++)
        s->host[GUARD / 4 + i] = value(step, me->rank, i);
    HT_CUDA(me, drv->MemcpyHtoDAsync(at - GUARD, s->host, bytes + 2 * (size_t)GUARD, s->other));
    HT_CUDA(me, drv->StreamSynchronize(s->other));
    void *p = (void *)(uintptr_t)at;
    HT_TRY(me, hclient_all_reduce(s->e.comm, p, p, count, HCLIENT_INT32, HCLIENT_SUM, stream, op));
    return 0;
}

static int verify(struct segment *s, hrg_ptr at, unsigned count, unsigned step, hclient_op_t op)
{
    struct hpf_rank *me = s->e.me;
    const size_t bytes = (size_t)count * sizeof(int32_t);
    HT_TRY(me, hclient_wait(op));
    memset(s->host, 0xee, bytes + 2 * (size_t)GUARD);
    HT_CUDA(me, drv->MemcpyDtoHAsync(s->host, at - GUARD, bytes + 2 * (size_t)GUARD, s->other));
    HT_CUDA(me, drv->StreamSynchronize(s->other));
    for (unsigned i = 0; i < count; i++) {
        uint32_t sum = 0;
        for (unsigned r = 0; r < me->nranks; r++)
            sum += (uint32_t)value(step, r, i);
        HT_EXPECT(me, (uint32_t)s->host[GUARD / 4 + i] == sum, "step %u: element %u of %u is %d, not %d",
                  step, i, count, s->host[GUARD / 4 + i], (int32_t)sum);
    }
    const unsigned char *all = (const unsigned char *)s->host;
    for (size_t i = 0; i < GUARD; i++)
        HT_EXPECT(me, all[i] == 0x77 && all[GUARD + bytes + i] == 0x77, "step %u: a guard was written", step);
    return 0;
}

static int whole_step(struct segment *s, hrg_ptr at, unsigned count, unsigned step)
{
    hclient_op_t op;
    return post(s, at, count, step, s->stream, &op) != 0 || verify(s, at, count, step, op) != 0;
}

/* exports: mappings that were exported since. */
static int exported(struct segment *s, unsigned *before, unsigned expected, const char *when)
{
    const unsigned now = ht_gpu_calls("MemExportToShareableHandle");
    HT_EXPECT(s->e.me, now - *before == (s->types ? expected : 0), "%s: %u exports, not %u", when,
              now - *before, s->types ? expected : 0);
    *before = now;
    return 0;
}

/* The buffer of the training lies at the end of the first mapping, and is larger from GROWS_AT on. */
static int training(struct segment *s)
{
    struct ht_gate gate;
    hclient_op_t op, held;
    unsigned before = 0;
    const hrg_ptr small = s->base + GUARD, at = s->base + MAPPING - (hrg_ptr)SMALL * 4 / 2;
    if (grow(s, 0) != 0 || ht_gate_new(&s->e, &gate) != 0)
        return 1;
    for (unsigned step = 1; step < GROWS_AT - 1; step++)
        if (whole_step(s, small, SMALL / 2, step) != 0)
            return 1;
    if (exported(s, &before, 1, "steps in the first mapping") != 0 ||
        ht_gate_hold(&s->e, &gate, s->stream) != 0 ||
        post(s, small, SMALL / 2, GROWS_AT - 1, s->stream, &held) != 0)
        return 1;
    if (grow(s, 1) != 0 || post(s, at, SMALL, GROWS_AT, s->other, &op) != 0 ||
        verify(s, at, SMALL, GROWS_AT, op) != 0)
        return 1;
    HT_EXPECT(s->e.me, hclient_test(held) == HCLIENT_IN_PROGRESS,
              "an op is over although its stream is held");
    if (hpf_rank_barrier(s->e.me, false, ht_ms(30000)) < 0)
        return 1;
    atomic_store(gate.word, 1);
    if (verify(s, small, SMALL / 2, GROWS_AT - 1, held) != 0 ||
        exported(s, &before, 2, "the first op over the edge") != 0)
        return 1;
    for (unsigned step = GROWS_AT + 1; step <= STEPS; step++)
        if (whole_step(s, step % 2 ? at : small, step % 2 ? SMALL : SMALL / 2, step) != 0)
            return 1;
    return exported(s, &before, 0, "what is known is not exported again");
}

/* All of a segment of three mappings; then the last one is another. */
static int other_end(struct segment *s)
{
    unsigned before = ht_gpu_calls("MemExportToShareableHandle");
    if (grow(s, 2) != 0 || whole_step(s, s->base + GUARD, LARGE, 30) != 0 ||
        whole_step(s, s->base + (hrg_ptr)2 * MAPPING - 4000, 100000, 31) != 0 ||
        exported(s, &before, MAPPINGS, "the whole segment") != 0)
        return 1;
    for (unsigned i = 0; i < 3; i++) {
        HT_CUDA(s->e.me, drv->MemUnmap(s->base + (hrg_ptr)2 * MAPPING, MAPPING));
        if (whole_step(s, s->base + GUARD, LARGE / 2, 40 + i) != 0 || grow(s, 2) != 0 ||
            whole_step(s, s->base + GUARD, LARGE + 100000, 50 + i) != 0)
            return 1;
    }
    return 0;
}

static int run(struct hpf_rank *me)
{
    struct segment s = {.types = me->arg != NULL ? HRG_HANDLE_POSIX_FD : 0};
    void *p;
    char *path;
    HT_TRY(me, hclient_set_log_callback(listen_for, NULL));
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&s.e, me, 0, NULL) != 0)
        return 1;
    HT_CUDA(me, drv->StreamCreateWithPriority(&s.stream, HRG_STREAM_NON_BLOCKING, 0));
    HT_CUDA(me, drv->StreamCreateWithPriority(&s.other, HRG_STREAM_NON_BLOCKING, 0));
    HT_CUDA(me, drv->MemAllocHost(&p, (size_t)MAPPINGS * MAPPING));
    s.host = p;
    HT_CUDA(me, drv->MemAddressReserve(&s.base, (size_t)MAPPINGS * MAPPING, 0, 0, 0));
    if (training(&s) != 0 || other_end(&s) != 0)
        return 1;
    HT_TRY(me, hclient_comm_path(s.e.comm, &path));
    HT_EXPECT(me, strstr(path, s.types ? "\"staged_ops\": 0" : "\"shared_ops\": 0"),
              "ops went the other way: %s", path);
    HT_EXPECT(me, s.types || strstr(path, "expandable_segments:False"), "no reason for the copies: %s", path);
    HT_EXPECT(me, warnings == (s.types == 0), "%u warnings about memory that is copied", warnings);
    hclient_free(path);
    return ht_leave(&s.e);
}

int main(void)
{
    static char yes;
    ht_gpu_fake("libcuda_fake.so.1");
    setenv("HREDUCE_GPU_STAGED_BYTES", "0", 1);
    for (unsigned nnodes = 1; nnodes <= 2; nnodes++)
        for (unsigned exportable = 0; exportable < 2; exportable++) {
            struct hpf_cluster *c = ht_cluster(nnodes, NULL);
            const struct ht_job job = {.nranks = 2 * nnodes, .fn = run, .arg = exportable ? &yes : NULL};
            ht_run(c, &job);
            ht_cluster_end(c);
        }
    return 0;
}
