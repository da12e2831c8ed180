/* SPDX-License-Identifier: MIT */
/*
 * GPU buffers when a process dies in the middle, on the driver without a GPU: the daemon (the streams of its ranks are released
 * and carry no numbers, the error is known, a new communicator works; likewise when it only stops), and a rank (the others
 * learn of it, the daemon serves the next job). timeout: 260
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

enum { COUNT = 1 << 18, OPS = 6 };

static const struct hrg_driver *drv;

struct state {
    _Atomic uint32_t posted; /* ranks whose ops are in their streams */
    _Atomic uint32_t dead;   /* the parent has killed whom it wanted to */
    bool staged;             /* the ops go through the window */
};

static int wait_until(struct hpf_rank *me, const _Atomic uint32_t *word, uint32_t value)
{
    long long deadline = hpf_now_ms() + ht_ms(60000);
    while (atomic_load(word) < value) {
        HT_EXPECT(me, hpf_now_ms() < deadline, "the others do not come");
        hpf_sleep_ms(1);
    }
    return 0;
}

struct buffers {
    hrg_stream stream;
    hrg_ptr data;
    float *host;
};

static int prepare(struct ht_env *e, struct buffers *b)
{
    void *p;
    HT_CUDA(e->me, drv->StreamCreateWithPriority(&b->stream, HRG_STREAM_NON_BLOCKING, 0));
    HT_CUDA(e->me, drv->MemAlloc(&b->data, OPS * COUNT * sizeof(float)));
    HT_CUDA(e->me, drv->MemAllocHost(&p, OPS * COUNT * sizeof(float)));
    b->host = p;
    for (unsigned i = 0; i < OPS * COUNT; i++)
        b->host[i] = 1;
    HT_CUDA(e->me, drv->MemcpyHtoDAsync(b->data, b->host, OPS * COUNT * sizeof(float), b->stream));
    return 0;
}

static int post(struct ht_env *e, const struct buffers *b)
{
    for (unsigned i = 0; i < OPS; i++) {
        void *at = (void *)(uintptr_t)(b->data + i * COUNT * sizeof(float));
        HT_TRY(e->me,
               hclient_all_reduce(e->comm, at, at, COUNT, HCLIENT_FLOAT32, HCLIENT_SUM, b->stream, NULL));
    }
    return 0;
}

static int works(struct ht_env *e)
{
    struct ht_coll c = {
        .coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = 100003, .gpu = true};
    return ht_collective(e, &c);
}

/*
 * What a rank that posted finds in its buffers. SPOILED: NaN alone, also where its stream came to the window only when the ops
 * before had been let go.
 */
enum left { MIXED, SPOILED };

/* The stream must come to its end, and what it left is the input, the sum, or NaN, but nothing between. */
static int left_behind(struct ht_env *e, const struct buffers *b, float sum, enum left left)
{
    HT_CUDA(e->me, drv->MemcpyDtoHAsync(b->host, b->data, OPS * COUNT * sizeof(float), b->stream));
    HT_CUDA(e->me, drv->StreamSynchronize(b->stream));
    for (unsigned i = 0; i < OPS * COUNT; i++) {
        bool number = left == MIXED;
        HT_EXPECT(e->me, isnan(b->host[i]) || (number && (b->host[i] == 1 || b->host[i] == sum)),
                  "element %u is %g", i, (double)b->host[i]);
    }
    return 0;
}

static int released(struct ht_env *e, const struct buffers *b, float sum, enum left left)
{
    if (left_behind(e, b, sum, left) != 0)
        return 1;
    hclient_result_t error = HCLIENT_OK;
    long long deadline = hpf_now_ms() + ht_ms(20000);
    do {
        HT_TRY(e->me, hclient_comm_get_async_error(e->comm, &error));
        HT_EXPECT(e->me, hpf_now_ms() < deadline, "no error is known");
    } while (error == HCLIENT_OK);
    HT_EXPECT(e->me, strlen(hclient_last_error(e->comm)) > 10, "no sentence");
    return 0;
}

static int daemon_dies(struct hpf_rank *me)
{
    struct ht_env e;
    struct buffers b;
    struct state *s = ht_shared(me);
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0 || works(&e) != 0 || prepare(&e, &b) != 0)
        return 1;
    /* The last rank never posts: the others are in the middle for certain. */
    if (me->rank + 1 < me->nranks && post(&e, &b) != 0)
        return 1;
    atomic_fetch_add(&s->posted, 1);
    /* On one node nothing was summed without the last rank, so what the streams copy is what the library left in the window. */
    bool posted = me->rank + 1 < me->nranks;
    enum left left = s->staged && e.layout.nnodes == 1 && posted ? SPOILED : MIXED;
    if (wait_until(me, &s->dead, 1) != 0 || released(&e, &b, (float)me->nranks, left) != 0)
        return 1;
    HT_TRY(me, hclient_comm_destroy(e.comm));
    /* A daemon is there again: the same process goes on with it. */
    if (hpf_rank_barrier(me, false, ht_ms(60000)) < 0 || ht_join(&e, me, 1, NULL) != 0 || works(&e) != 0)
        return 1;
    return ht_leave(&e);
}

/* A daemon that stands still: the communicator is destroyed as soon as that is known, when streams may not be let go yet. */
static int daemon_stops(struct hpf_rank *me)
{
    struct ht_env e;
    struct buffers b;
    struct state *s = ht_shared(me);
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0 || works(&e) != 0 || prepare(&e, &b) != 0)
        return 1;
    bool posts = me->rank + 1 < me->nranks;
    if (posts && post(&e, &b) != 0)
        return 1;
    atomic_fetch_add(&s->posted, 1);
    if (!posts || wait_until(me, &s->dead, 1) != 0)
        return posts ? 1 : wait_until(me, &s->dead, 3);
    hclient_result_t error = HCLIENT_OK;
    for (long long deadline = hpf_now_ms() + ht_ms(30000); error == HCLIENT_OK; hpf_sleep_ms(1)) {
        HT_TRY(me, hclient_comm_get_async_error(e.comm, &error));
        HT_EXPECT(me, hpf_now_ms() < deadline, "nobody noticed that the daemon stands still");
    }
    HT_EXPECT(me, error == HCLIENT_UNRESPONSIVE, "the error is %s", hclient_strerror(error));
    HT_TRY(me, hclient_comm_destroy(e.comm));
    if (left_behind(&e, &b, 1, SPOILED) != 0)
        return 1;
    atomic_fetch_add(&s->dead, 1); /* the last rank stays until both are through */
    return 0;
}

static int rank_dies(struct hpf_rank *me)
{
    struct ht_env e;
    struct buffers b;
    struct state *s = ht_shared(me);
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0 || works(&e) != 0 || prepare(&e, &b) != 0)
        return 1;
    bool victim = me->rank + 1 == me->nranks;
    if (!victim && post(&e, &b) != 0)
        return 1;
    atomic_fetch_add(&s->posted, 1);
    if (victim) {
        hpf_sleep_ms(ht_ms(60000));
        return 1;
    }
    if (wait_until(me, &s->dead, 1) != 0 || released(&e, &b, 1, s->staged ? SPOILED : MIXED) != 0)
        return 1;
    HT_TRY(me, hclient_comm_destroy(e.comm));
    return 0;
}

static int next_job(struct hpf_rank *me)
{
    struct ht_env e;
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0 || works(&e) != 0)
        return 1;
    return ht_leave(&e);
}

static void everybody_posted(const struct state *s, unsigned nranks)
{
    long long deadline = hpf_now_ms() + ht_ms(60000);
    while (atomic_load(&s->posted) < nranks) {
        HT_CHECK(hpf_now_ms() < deadline, "the ranks have not posted");
        hpf_sleep_ms(1);
    }
    hpf_sleep_ms(300); /* for streams and daemon to come as far as they can */
}

static void kill_daemon(unsigned nnodes, bool staged)
{
    char err[512];
    struct hpf_cluster *c = ht_cluster(nnodes, NULL);
    const struct ht_job job = {.nranks = 3 * nnodes, .fn = daemon_dies, .shared_bytes = sizeof(struct state)};
    struct hpf_job *j = ht_start(c, &job);
    struct state *s = ht_job_user_shared(j);
    s->staged = staged;
    everybody_posted(s, 3 * nnodes);
    hpf_node_kill(c, nnodes - 1, SIGKILL);
    HT_CHECK(hpf_node_start(c, nnodes - 1, err, sizeof(err)) == 0, "%s", err);
    atomic_store(&s->dead, 1);
    ht_finish(j, ht_ms(90000));
    ht_cluster_end(c);
}

static void stop_daemon(void)
{
    struct hpf_cluster *c = ht_cluster(1, NULL);
    const struct ht_job job = {.nranks = 3, .fn = daemon_stops, .shared_bytes = sizeof(struct state)};
    struct hpf_job *j = ht_start(c, &job);
    struct state *s = ht_job_user_shared(j);
    everybody_posted(s, 3);
    hpf_node_kill(c, 0, SIGSTOP);
    atomic_store(&s->dead, 1);
    ht_finish(j, ht_ms(90000));
    hpf_node_kill(c, 0, SIGCONT);
    ht_cluster_end(c);
}

static void kill_rank(bool staged)
{
    struct hpf_cluster *c = ht_cluster(1, NULL);
    const struct ht_job job = {.nranks = 3, .fn = rank_dies, .shared_bytes = sizeof(struct state)};
    const struct ht_job next = {.nranks = 3, .fn = next_job};
    for (unsigned round = 0; round < 3; round++) {
        struct hpf_job *j = ht_start(c, &job);
        struct state *s = ht_job_user_shared(j);
        s->staged = staged;
        everybody_posted(s, 3);
        hpf_job_kill(j, 2, SIGKILL);
        atomic_store(&s->dead, 1);
        ht_finish(j, ht_ms(60000));
        ht_run(c, &next);
    }
    ht_cluster_end(c);
}

int main(void)
{
    ht_gpu_fake("libcuda_fake.so.1");
    /* Both ways to the daemon. */
    for (unsigned way = 0; way < 2; way++) {
        setenv("HREDUCE_GPU_STAGED_BYTES", way ? "0" : "100000000", 1);
        kill_rank(way == 0);
        kill_daemon(1, way == 0);
        kill_daemon(2, way == 0);
    }
    setenv("HREDUCE_GPU_STAGED_BYTES", "100000000", 1);
    stop_daemon();
    return 0;
}
