/* SPDX-License-Identifier: MIT */
/*
 * Waits that are deferred (hclient_stream_wait()), on the driver without a GPU: with one hardware queue a stream that waits
 * stops all others, and one whose wait is deferred stops none; communicators used in another order on each rank; what takes
 * the output; what is refused. And the hint for one op. timeout: 120
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

enum { MOST = 2 << 20 };

static const char *const keys[] = {"staging_window = 3M", "unit_size = 256K", "unit_min = 64K", NULL};
static const struct hrg_driver *drv;
static int32_t *host; /* pinned */

static int open_gpu(struct hpf_rank *me)
{
    void *p;
    drv = ht_gpu_open(me);
    if (drv == NULL)
        return 1;
    HT_CUDA(me, drv->MemAllocHost(&p, MOST));
    host = p;
    return 0;
}

/* An op on GPU memory of its own: element i is i + rank + salt, to be summed in place. */
struct sum {
    hrg_ptr data;
    unsigned count, salt;
    bool keep; /* its memory, for the next round */
    hclient_op_t op;
};

static int fill(struct ht_env *e, struct sum *s, hrg_stream stream)
{
    if (s->data == 0)
        HT_CUDA(e->me, drv->MemAlloc(&s->data, s->count * sizeof(int32_t)));
    for (unsigned i = 0; i < s->count; i++)
        host[i] = (int32_t)(i + e->me->rank + s->salt);
    HT_CUDA(e->me, drv->MemcpyHtoDAsync(s->data, host, s->count * sizeof(int32_t), stream));
    HT_CUDA(e->me, drv->StreamSynchronize(stream));
    return 0;
}

static hclient_result_t post(hclient_comm_t comm, struct sum *s, hrg_stream stream, uint32_t flags)
{
    hclient_coll_args_t a = HCLIENT_COLL_ARGS_INITIALIZER;
    a.send = a.recv = (void *)(uintptr_t)s->data;
    a.count = s->count;
    a.dtype = HCLIENT_INT32;
    a.stream = stream;
    a.flags = flags;
    return hclient_collective(comm, &a, &s->op);
}

static int check(struct ht_env *e, const struct sum *s, hrg_stream stream, const char *what)
{
    unsigned n = e->me->nranks;
    memset(host, 0xee, s->count * sizeof(int32_t));
    HT_CUDA(e->me, drv->MemcpyDtoHAsync(host, s->data, s->count * sizeof(int32_t), stream));
    HT_CUDA(e->me, drv->StreamSynchronize(stream));
    for (unsigned i = 0; i < s->count; i++)
        HT_EXPECT(e->me, host[i] == (int32_t)(n * (i + s->salt) + n * (n - 1) / 2), "%s: element %u is %d",
                  what, i, host[i]);
    if (!s->keep)
        HT_CUDA(e->me, drv->MemFree(s->data));
    return 0;
}

static int new_stream(struct ht_env *e, hrg_stream *s)
{
    HT_CUDA(e->me, drv->StreamCreateWithPriority(s, HRG_STREAM_NON_BLOCKING, 0));
    return 0;
}

static int meet(struct ht_env *e)
{
    return hpf_rank_barrier(e->me, false, ht_ms(30000)) < 0;
}

/* ---- one hardware queue ---------------------------------------------------------------------------------------------- */

/* Rank 0 has an op in a stream that the others have not posted, and computes in another one. */
static int compute_beside(struct ht_env *e, unsigned count)
{
    hrg_stream comm, compute;
    hrg_ptr d;
    bool first = e->me->rank == 0;
    if (new_stream(e, &comm) != 0 || new_stream(e, &compute) != 0)
        return 1;
    HT_CUDA(e->me, drv->MemAlloc(&d, 4096));
    for (unsigned deferred = 0; deferred < 2; deferred++) {
        struct sum s = {.count = count, .salt = 7 + deferred};
        if (fill(e, &s, comm) != 0)
            return 1;
        if (first) {
            HT_TRY(e->me, post(e->comm, &s, comm, deferred ? HCLIENT_DEFER_WAIT : 0));
            HT_CUDA(e->me, drv->MemsetD8Async(d, 1, 4096, compute));
        }
        if (first && deferred) {
            HT_CUDA(e->me, drv->StreamSynchronize(compute));
            HT_EXPECT(e->me, hclient_test(s.op) == HCLIENT_IN_PROGRESS, "the op is over without the others");
        } else if (first) { /* or this driver would show nothing */
            hpf_sleep_ms(100);
            HT_EXPECT(e->me, drv->StreamQuery(compute) == HRG_ERROR_NOT_READY,
                      "a stream that waits stops no other one, with one queue for all");
        }
        if (meet(e) != 0)
            return 1;
        if (!first)
            HT_TRY(e->me, post(e->comm, &s, comm, deferred ? HCLIENT_DEFER_WAIT : 0));
        if (deferred)
            HT_TRY(e->me, hclient_stream_wait(s.op, compute));
        if (check(e, &s, deferred ? compute : comm, "an op beside work") != 0)
            return 1;
        HT_TRY(e->me, hclient_wait(s.op));
    }
    HT_CUDA(e->me, drv->MemFree(d));
    return 0;
}

/* Two communicators, in another order on each rank: with one queue and waits in the stream nobody would get further. */
static int crosswise(struct ht_env *e, struct ht_env *other, unsigned count)
{
    struct ht_env *env[2] = {e, other};
    hrg_stream stream;
    if (new_stream(e, &stream) != 0)
        return 1;
    for (unsigned round = 0; round < 10; round++) {
        struct sum s[2] = {{.count = count, .salt = round}, {.count = count + 3, .salt = 100 + round}};
        if (fill(e, &s[0], stream) != 0 || fill(e, &s[1], stream) != 0)
            return 1;
        for (unsigned i = 0; i < 2; i++) {
            unsigned k = (i + e->me->rank) % 2;
            HT_TRY(e->me, post(env[k]->comm, &s[k], stream, HCLIENT_DEFER_WAIT));
        }
        for (unsigned i = 0; i < 2; i++)
            HT_TRY(e->me, hclient_stream_wait(s[(i + e->me->rank + round) % 2].op, stream));
        if (check(e, &s[0], stream, "crosswise, first") != 0 ||
            check(e, &s[1], stream, "crosswise, second") != 0)
            return 1;
    }
    return 0;
}

/* Many communicators, each with its stream, and every rank goes round them in an order of its own: nothing of the library
   occupies a GPU while it waits for another rank. */
static int any_order(struct hpf_rank *me)
{
    enum { COMMS = 6, ROUNDS = 30 };
    struct ht_env e[COMMS];
    hrg_stream stream[COMMS];
    struct sum s[COMMS];
    uint64_t seed = 77 + me->rank;
    if (open_gpu(me) != 0)
        return 1;
    for (unsigned i = 0; i < COMMS; i++) {
        s[i] = (struct sum){.count = 700 * (i + 1), .salt = i, .keep = true};
        if (ht_join(&e[i], me, i, NULL) != 0 || new_stream(&e[i], &stream[i]) != 0)
            return 1;
    }
    for (unsigned round = 0; round < ROUNDS; round++) {
        unsigned order[COMMS] = {0};
        for (unsigned i = 0; i < COMMS; i++) {
            unsigned k = ht_random(&seed) % (i + 1);
            order[i] = order[k];
            order[k] = i;
            if (fill(&e[i], &s[i], stream[i]) != 0)
                return 1;
        }
        for (unsigned i = 0; i < COMMS; i++)
            HT_TRY(me, post(e[order[i]].comm, &s[order[i]], stream[order[i]], 0));
        for (unsigned i = 0; i < COMMS; i++)
            if (check(&e[i], &s[i], stream[i], "any order") != 0)
                return 1;
    }
    for (unsigned i = 0; i < COMMS; i++)
        if (ht_leave(&e[i]) != 0)
            return 1;
    return 0;
}

/* ---- what takes the output -------------------------------------------------------------------------------------------- */

static int taken_by(struct ht_env *e, unsigned how, unsigned count)
{
    hrg_stream own, second, third;
    if (new_stream(e, &own) != 0 || new_stream(e, &second) != 0 || new_stream(e, &third) != 0)
        return 1;
    struct sum s = {.count = count, .salt = how};
    hrg_stream sees = own;
    if (fill(e, &s, own) != 0)
        return 1;
    HT_TRY(e->me, post(e->comm, &s, own, HCLIENT_DEFER_WAIT));
    switch (how) {
    case 0:
        HT_TRY(e->me, hclient_wait(s.op));
        break;
    case 1: {
        hclient_result_t r;
        long long deadline = hpf_now_ms() + ht_ms(30000);
        while ((r = hclient_test(s.op)) == HCLIENT_IN_PROGRESS)
            HT_EXPECT(e->me, hpf_now_ms() < deadline, "hclient_test() never ends");
        HT_TRY(e->me, r);
        break;
    }
    case 2:
        HT_TRY(e->me, hclient_comm_wait(e->comm));
        break;
    default: /* one takes it, the next follows, whichever way round the streams come to it */
        HT_TRY(e->me, hclient_stream_wait(s.op, second));
        HT_TRY(e->me, hclient_stream_wait(s.op, third));
        sees = third;
        break;
    }
    return check(e, &s, sees, "an output that was taken");
}

/* An op that was not deferred: another stream waits for it as well. */
static int ordinary(struct ht_env *e, unsigned count)
{
    hrg_stream own, second;
    if (new_stream(e, &own) != 0 || new_stream(e, &second) != 0)
        return 1;
    struct sum s = {.count = count, .salt = 5};
    if (fill(e, &s, own) != 0)
        return 1;
    HT_TRY(e->me, post(e->comm, &s, own, 0));
    HT_TRY(e->me, hclient_stream_wait(s.op, second));
    return check(e, &s, second, "an op that two streams wait for");
}

/* ---- what is refused -------------------------------------------------------------------------------------------------- */

static int slots(struct ht_env *e, hrg_stream stream)
{
    struct sum s[HCLIENT_MAX_OPS + 1];
    for (unsigned i = 0; i <= HCLIENT_MAX_OPS; i++) {
        s[i] = (struct sum){.count = 100, .salt = i};
        if (fill(e, &s[i], stream) != 0)
            return 1;
    }
    for (unsigned i = 0; i < HCLIENT_MAX_OPS; i++)
        HT_TRY(e->me, post(e->comm, &s[i], stream, HCLIENT_DEFER_WAIT));
    struct sum *last = &s[HCLIENT_MAX_OPS];
    if (ht_refused(e->me, post(e->comm, last, stream, 0), HCLIENT_RESOURCE,
                   "call hclient_stream_wait() for it first"))
        return 1;
    HT_TRY(e->me, hclient_stream_wait(s[0].op, stream));
    HT_TRY(e->me, post(e->comm, last, stream, 0));
    for (unsigned i = 1; i < HCLIENT_MAX_OPS; i++)
        HT_TRY(e->me, hclient_stream_wait(s[i].op, stream));
    for (unsigned i = 0; i <= HCLIENT_MAX_OPS; i++)
        if (check(e, &s[i], stream, "all slots deferred") != 0)
            return 1;
    return 0;
}

static int window(struct ht_env *e, hrg_stream stream)
{
    struct sum s[3];
    for (unsigned i = 0; i < 3; i++) {
        s[i] = (struct sum){.count = 300000, .salt = i};
        if (fill(e, &s[i], stream) != 0)
            return 1;
    }
    struct sum huge = {.data = s[0].data, .count = 1000000};
    if (ht_refused(e->me, post(e->comm, &huge, stream, HCLIENT_DEFER_WAIT), HCLIENT_UNSUPPORTED,
                   "do not defer it"))
        return 1;
    HT_TRY(e->me, post(e->comm, &s[0], stream, HCLIENT_DEFER_WAIT));
    HT_TRY(e->me, post(e->comm, &s[1], stream, HCLIENT_DEFER_WAIT));
    if (ht_refused(e->me, post(e->comm, &s[2], stream, 0), HCLIENT_RESOURCE,
                   "full of ops whose waits are deferred"))
        return 1;
    HT_TRY(e->me, hclient_stream_wait(s[0].op, stream));
    HT_TRY(e->me, post(e->comm, &s[2], stream, 0));
    HT_TRY(e->me, hclient_stream_wait(s[1].op, stream));
    for (unsigned i = 0; i < 3; i++)
        if (check(e, &s[i], stream, "a full window") != 0)
            return 1;
    return 0;
}

static int misuse(struct ht_env *e, hrg_stream stream)
{
    static float v[10];
    hclient_coll_args_t a = HCLIENT_COLL_ARGS_INITIALIZER;
    hclient_op_t op;
    hrg_graph graph;
    hrg_stream capturing;
    a.send = a.recv = v;
    a.count = 10;
    a.flags = HCLIENT_DEFER_WAIT;
    int bad =
        ht_refused(e->me, hclient_collective(e->comm, &a, NULL), HCLIENT_INVALID_ARGUMENT, "op is NULL");
    HT_TRY(e->me, hclient_collective(e->comm, &a, &op));
    bad |=
        ht_refused(e->me, hclient_stream_wait(op, stream), HCLIENT_INVALID_ARGUMENT, "one of host buffers");
    HT_TRY(e->me, hclient_wait(op));
    HT_TRY(e->me, hclient_stream_wait((hclient_op_t){.number = 0}, stream));
    struct sum s = {.count = 1000, .salt = 1};
    if (fill(e, &s, stream) != 0)
        return 1;
    HT_TRY(e->me, post(e->comm, &s, stream, HCLIENT_DEFER_WAIT));
    HT_CUDA(e->me, drv->StreamCreateWithPriority(&capturing, 0, 0));
    HT_CUDA(e->me, drv->StreamBeginCapture(capturing, HRG_CAPTURE_MODE_GLOBAL));
    bad |= ht_refused(e->me, hclient_stream_wait(s.op, capturing), HCLIENT_UNSUPPORTED, "cannot be captured");
    HT_CUDA(e->me, drv->StreamEndCapture(capturing, &graph));
    HT_CUDA(e->me, drv->GraphDestroy(graph));
    HT_TRY(e->me, hclient_stream_wait(s.op, stream));
    return bad | check(e, &s, stream, "after a refusal");
}

/* ---- the ranks -------------------------------------------------------------------------------------------------------- */

static int run(struct hpf_rank *me)
{
    struct ht_env e, other;
    hrg_stream stream;
    if (open_gpu(me) != 0 || ht_join(&e, me, 0, NULL) != 0 || ht_join(&other, me, 1, NULL) != 0 ||
        new_stream(&e, &stream) != 0)
        return 1;
    const char *limit = getenv("HREDUCE_GPU_STAGED_BYTES");
    bool all_staged = strcmp(limit, "0") != 0;
    for (unsigned count = 500; count <= 200000; count *= 20)
        if (crosswise(&e, &other, count) != 0 || ordinary(&e, count) != 0 || taken_by(&e, 0, count) != 0 ||
            taken_by(&e, 1, count) != 0 || taken_by(&e, 2, count) != 0 || taken_by(&e, 3, count) != 0)
            return 1;
    if (slots(&e, stream) != 0 || (all_staged && window(&e, stream) != 0) || misuse(&e, stream) != 0)
        return 1;
    /* Left behind without a wait: destroying does not wait for what no stream comes to. */
    struct sum s = {.count = 5000};
    if (fill(&e, &s, stream) != 0)
        return 1;
    HT_TRY(me, post(e.comm, &s, stream, HCLIENT_DEFER_WAIT));
    HT_CUDA(me, drv->StreamSynchronize(stream));
    return ht_leave(&other) | ht_leave(&e);
}

static int run_one_queue(struct hpf_rank *me)
{
    struct ht_env e, other;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
    if (open_gpu(me) != 0 || ht_join(&e, me, 0, NULL) != 0 || ht_join(&other, me, 1, NULL) != 0)
        return 1;
    if (compute_beside(&e, 3000) != 0 || crosswise(&e, &other, 3000) != 0)
        return 1;
    char *path;
    HT_TRY(me, hclient_comm_path(e.comm, &path));
    HT_EXPECT(me,
              strstr(path, "\"gpu_waits\"") &&
                  strstr(path, "all the other streams of this process stand still"),
              "the path report does not say what waits do: %s", path);
    hclient_free(path);
    return ht_leave(&other) | ht_leave(&e);
}

/* An op's own hint goes before the communicator's. */
static int run_hints(struct hpf_rank *me)
{
    static const struct {
        int overlap;
        const char *words;
    } turn[] = {{HCLIENT_OVERLAP_IDLE, "(overlap = idle)"},
                {HCLIENT_OVERLAP_AUTO, "(overlap = compute)"},
                {HCLIENT_OVERLAP_COMPUTE, "(overlap = compute)"}};
    struct ht_env e;
    hrg_stream stream;
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    config.overlap = HCLIENT_OVERLAP_COMPUTE;
    if (open_gpu(me) != 0 || ht_join(&e, me, 0, &config) != 0 || new_stream(&e, &stream) != 0)
        return 1;
    for (unsigned i = 0; i < sizeof(turn) / sizeof(turn[0]); i++) {
        struct sum s = {.count = 100000, .salt = i};
        hclient_coll_args_t a = HCLIENT_COLL_ARGS_INITIALIZER;
        if (fill(&e, &s, stream) != 0)
            return 1;
        a.send = a.recv = (void *)(uintptr_t)s.data;
        a.count = s.count;
        a.dtype = HCLIENT_INT32;
        a.stream = stream;
        a.overlap = turn[i].overlap;
        HT_TRY(me, hclient_collective(e.comm, &a, &s.op));
        HT_TRY(me, hclient_wait(s.op));
        char *path;
        HT_TRY(me, hclient_comm_path(e.comm, &path));
        HT_EXPECT(me, strstr(path, turn[i].words), "turn %u: the path report is without \"%s\": %s", i,
                  turn[i].words, path);
        hclient_free(path);
        if (check(&e, &s, stream, "an op with a hint") != 0)
            return 1;
    }
    return ht_leave(&e);
}

/* Deferred ops have all slots when the communicator fails: the next post and the end wait for none of them. */
static int run_full(struct hpf_rank *me)
{
    struct ht_env e;
    hrg_stream stream;
    struct sum s = {.count = 1000, .keep = true};
    hclient_result_t r = HCLIENT_OK;
    if (open_gpu(me) != 0 || ht_join(&e, me, 0, NULL) != 0 || new_stream(&e, &stream) != 0 ||
        fill(&e, &s, stream) != 0)
        return 1;
    if (me->rank == 1) {
        nanosleep(&(struct timespec){.tv_nsec = 500000000}, NULL);
        HT_TRY(me, hclient_comm_abort(e.comm));
    }
    for (unsigned i = 0; me->rank == 0 && i < HCLIENT_MAX_OPS && r == HCLIENT_OK; i++)
        r = post(e.comm, &s, stream, HCLIENT_DEFER_WAIT);
    for (unsigned i = 0; me->rank == 0 && r == HCLIENT_OK; i++) {
        HT_EXPECT(me, i < 20000, "the other rank's abort is not heard of");
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        HT_TRY(me, hclient_comm_get_async_error(e.comm, &r));
    }
    r = post(e.comm, &s, stream, HCLIENT_DEFER_WAIT);
    HT_EXPECT(me, r == HCLIENT_ABORTED, "a post on a communicator that failed: %s", hclient_strerror(r));
    HT_TRY(me, hclient_comm_destroy(e.comm));
    return 0;
}

static void with(unsigned nnodes, unsigned nranks, const char *staged_bytes, hpf_rank_fn fn)
{
    setenv("HREDUCE_GPU_STAGED_BYTES", staged_bytes, 1);
    struct hpf_cluster *c = ht_cluster(nnodes, keys);
    const struct ht_job job = {.nranks = nranks, .fn = fn};
    ht_run(c, &job);
    ht_cluster_end(c);
}

int main(void)
{
    ht_gpu_fake("libcuda_fake.so.1");
    with(1, 2, "100000000", run);
    with(2, 2, "0", run);
    with(1, 2, "100000000", run_one_queue);
    with(1, 2, "0", run_one_queue);
    with(1, 2, "0", run_hints);
    with(1, 3, "0", any_order);
    with(1, 2, "100000000", run_full);
    return 0;
}
