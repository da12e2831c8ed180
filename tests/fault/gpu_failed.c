/* SPDX-License-Identifier: MIT */
/*
 * Ops on GPU buffers that fail while the daemon lives, on the driver without a GPU: no stream copies numbers out of the staging
 * window afterwards, however late it comes; with on_error = trap nothing behind the op runs, and the process ends with the
 * sentence; unless the rank itself ended the communicator. timeout: 120
 */
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

enum { PAGE = 4096, GUARD = 64 };

static const char *const keys[] = {"staging_window = 3M", "unit_size = 256K", "unit_min = 64K", NULL};
static const struct hrg_driver *drv;

/* ---- what is left --------------------------------------------------------------------------------------------------- */

struct kind {
    hclient_data_type_t dtype;
    unsigned bytes;
};

static bool is_nan(const struct kind *k, const unsigned char *p)
{
    uint16_t h;
    float f;
    double d;
    switch (k->dtype) {
    case HCLIENT_FLOAT32:
        memcpy(&f, p, sizeof(f));
        return isnan(f);
    case HCLIENT_FLOAT64:
        memcpy(&d, p, sizeof(d));
        return isnan(d);
    case HCLIENT_FLOAT16:
        memcpy(&h, p, sizeof(h));
        return (h & 0x7c00) == 0x7c00 && (h & 0x3ff) != 0;
    default:
        memcpy(&h, p, sizeof(h));
        return (h & 0x7f80) == 0x7f80 && (h & 0x7f) != 0;
    }
}

/*
 * Rank 0 posts one element less than the others. late: the last rank's stream comes to the op when it has failed for
 * everybody. Integers may keep anything; what matters there is that the stream goes on and the guards are whole.
 */
static int mismatch(struct ht_env *e, const struct kind *k, unsigned count, bool inplace, bool late)
{
    struct hpf_rank *me = e->me;
    hrg_stream stream;
    hrg_ptr in, out;
    struct ht_gate gate;
    void *p;
    size_t bytes = (size_t)count * k->bytes;
    HT_CUDA(me, drv->StreamCreateWithPriority(&stream, HRG_STREAM_NON_BLOCKING, 0));
    HT_CUDA(me, drv->MemAlloc(&in, bytes));
    HT_CUDA(me, drv->MemAlloc(&out, bytes + 2 * GUARD));
    HT_CUDA(me, drv->MemAllocHost(&p, bytes + 2 * GUARD));
    if (ht_gate_new(e, &gate) != 0)
        return 1;
    unsigned char *host = p;
    HT_CUDA(me, drv->MemsetD8Async(in, 0x11, bytes, stream));
    HT_CUDA(me, drv->MemsetD8Async(out, 0x22, bytes + 2 * GUARD, stream));
    bool held = late && me->rank + 1 == me->nranks;
    if (held && ht_gate_hold(e, &gate, stream) != 0)
        return 1;
    unsigned mine = count - (me->rank == 0);
    void *to = (void *)(uintptr_t)(out + GUARD), *from = inplace ? to : (void *)(uintptr_t)in;
    hclient_op_t op;
    HT_TRY(me, hclient_all_reduce(e->comm, from, to, mine, k->dtype, HCLIENT_SUM, stream, &op));
    if (!held) {
        hclient_result_t r = hclient_wait(op);
        HT_EXPECT(me, r == HCLIENT_MISMATCH, "the wait gave %s: %s", hclient_strerror(r),
                  hclient_last_error(NULL));
    }
    if (hpf_rank_barrier(me, false, ht_ms(30000)) < 0)
        return 1;
    atomic_store(gate.word, 1);
    HT_CUDA(me, drv->MemcpyDtoHAsync(host, out, bytes + 2 * GUARD, stream));
    HT_CUDA(me, drv->StreamSynchronize(stream));
    HT_EXPECT(me, hclient_wait(op) == HCLIENT_MISMATCH, "the late rank's op did not fail");
    for (unsigned i = 0; k->dtype <= HCLIENT_BFLOAT16 && i < mine; i++)
        HT_EXPECT(me, is_nan(k, host + GUARD + (size_t)i * k->bytes),
                  "type %d, %u elements, %s%s: element %u is a number", (int)k->dtype, count,
                  inplace ? "in place" : "apart", held ? ", late" : "", i);
    for (size_t i = 0; i < GUARD; i++)
        HT_EXPECT(me, host[i] == 0x22 && host[GUARD + (size_t)mine * k->bytes + i] == 0x22,
                  "a guard is written to");
    HT_CUDA(me, drv->MemFreeHost(host));
    HT_CUDA(me, drv->MemFree(in));
    HT_CUDA(me, drv->MemFree(out));
    return 0;
}

static int nan_run(struct hpf_rank *me)
{
    static const struct kind kinds[] = {{HCLIENT_FLOAT32, 4},
                                        {HCLIENT_FLOAT64, 8},
                                        {HCLIENT_FLOAT16, 2},
                                        {HCLIENT_BFLOAT16, 2},
                                        {HCLIENT_INT32, 4}};
    struct ht_env e;
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0)
        return 1;
    for (unsigned i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        /* A page; some chunks; more than the window, so that it is copied in while it is copied out. */
        unsigned counts[] = {100, 150001, (7 << 20) / kinds[i].bytes};
        for (unsigned n = 0; n < 3; n++)
            if (mismatch(&e, &kinds[i], counts[n], (i + n) % 2, n != i % 3) != 0)
                return 1;
        struct ht_coll good = {
            .coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = 100003, .gpu = true};
        if (ht_collective(&e, &good) != 0)
            return 1;
    }
    return ht_leave(&e);
}

/* ---- trap ----------------------------------------------------------------------------------------------------------- */

struct words {
    _Alignas(PAGE) _Atomic uint64_t behind[8]; /* by rank: written by its stream behind the op that fails */
    _Alignas(PAGE) _Atomic uint32_t posted;
};

static struct words *words_of(void *shared)
{
    return (struct words *)(((uintptr_t)shared + PAGE - 1) / PAGE * PAGE);
}

struct trapped {
    struct ht_env e;
    hrg_stream stream;
    hrg_ptr data, behind;
};

enum { COUNT = 1000 };

/* In a communicator that traps, after an op that went well. */
static int enter_trap(struct hpf_rank *me, struct trapped *t)
{
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    struct words *w = words_of(ht_shared(me));
    config.on_error = HCLIENT_ON_ERROR_TRAP;
    const struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&t->e, me, 0, &config) != 0)
        return 1;
    HT_CUDA(me, drv->StreamCreateWithPriority(&t->stream, HRG_STREAM_NON_BLOCKING, 0));
    HT_CUDA(me, drv->MemAlloc(&t->data, COUNT * sizeof(float)));
    HT_CUDA(me, drv->MemHostRegister((void *)(uintptr_t)w->behind, PAGE, HRG_HOST_DEVICEMAP));
    HT_CUDA(me, drv->MemHostGetDevicePointer(&t->behind, (void *)(uintptr_t)w->behind, 0));
    struct ht_coll good = {
        .coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = COUNT, .gpu = true};
    for (unsigned i = 0; i < 40; i++) /* all slots were used */
        if (ht_collective(&t->e, &good) != 0)
            return 1;
    return 0;
}

static int post_trap(struct trapped *t, unsigned count)
{
    struct hpf_rank *me = t->e.me;
    void *p = (void *)(uintptr_t)t->data;
    HT_TRY(me, hclient_all_reduce(t->e.comm, p, p, count, HCLIENT_FLOAT32, HCLIENT_SUM, t->stream, NULL));
    HT_CUDA(me, drv->StreamWriteValue64(t->stream, t->behind + me->rank * sizeof(uint64_t), 1, 0));
    atomic_fetch_add(&words_of(ht_shared(me))->posted, 1);
    return 0;
}

static int trap_run(struct hpf_rank *me)
{
    struct trapped t;
    const char *log = me->arg;
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s.%u", log, me->rank);
    int fd = open(path, O_CREAT | O_WRONLY | O_TRUNC, 0600);
    HT_EXPECT(me, fd >= 0 && dup2(fd, 2) == 2, "no file for the words");
    if (enter_trap(me, &t) != 0 || post_trap(&t, COUNT - (me->rank == 0)) != 0)
        return 1;
    hpf_sleep_ms(ht_ms(30000)); /* and never looks */
    return 1;
}

static int next_job(struct hpf_rank *me)
{
    struct trapped t;
    return enter_trap(me, &t) != 0 ? 1 : ht_leave(&t.e);
}

/* The last rank posts nothing; when the daemon is gone the others have an op in the middle. */
static int trap_lost_run(struct hpf_rank *me)
{
    struct trapped t;
    if (enter_trap(me, &t) != 0 || (me->rank + 1 < me->nranks && post_trap(&t, COUNT) != 0))
        return 1;
    hpf_sleep_ms(ht_ms(30000));
    return 1;
}

/* What a rank ends by itself does not end its process, and its stream goes on. */
static int own_end_run(struct hpf_rank *me)
{
    struct trapped t;
    struct words *w = words_of(ht_shared(me));
    const bool aborts = me->arg != NULL;
    if (enter_trap(me, &t) != 0 || (me->rank == 0 && post_trap(&t, COUNT) != 0) ||
        hpf_rank_barrier(me, false, ht_ms(30000)) < 0)
        return 1;
    if (me->rank == 0) {
        if (aborts)
            HT_TRY(me, hclient_comm_abort(t.e.comm));
        else
            HT_TRY(me, hclient_comm_destroy(t.e.comm));
        HT_CUDA(me, drv->StreamSynchronize(t.stream));
        HT_EXPECT(me, atomic_load(&w->behind[0]) == 1, "the stream did not go on");
    }
    if (hpf_rank_barrier(me, false, ht_ms(30000)) < 0)
        return 1;
    if (me->rank != 0 || aborts)
        HT_TRY(me, hclient_comm_destroy(t.e.comm));
    HT_CUDA(me, drv->MemHostUnregister((void *)(uintptr_t)w->behind));
    return 0;
}

static void expect_abort(struct hpf_job *j, unsigned rank)
{
    long long deadline = hpf_now_ms() + ht_ms(25000);
    int status;
    while ((status = hpf_job_status(j, rank)) == -1) {
        HT_CHECK(hpf_now_ms() < deadline, "rank %u still runs", rank);
        hpf_sleep_ms(5);
    }
    HT_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "rank %u ended with status 0x%x: %s", rank,
             (unsigned)status, hpf_job_error(j, rank));
}

static void expect_words(const char *log, unsigned rank)
{
    char path[PATH_MAX], text[4096];
    snprintf(path, sizeof(path), "%s.%u", log, rank);
    FILE *f = fopen(path, "re");
    size_t n = f != NULL ? fread(text, 1, sizeof(text) - 1, f) : 0;
    text[n] = '\0';
    if (f != NULL)
        fclose(f);
    unlink(path);
    HT_CHECK(strstr(text, "on_error = trap: op 41") && strstr(text, "all ranks must post the same"),
             "rank %u wrote: %s", rank, text);
}

static void trap(bool daemon_dies)
{
    const char *room = getenv("TMPDIR");
    char log[PATH_MAX - 16];
    snprintf(log, sizeof(log), "%s/hreduce-trap.%d", room ? room : "/tmp", (int)getpid());
    struct hpf_cluster *c = ht_cluster(1, keys);
    const struct ht_job job = {.nranks = 3,
                               .fn = daemon_dies ? trap_lost_run : trap_run,
                               .arg = log,
                               .shared_bytes = sizeof(struct words) + PAGE};
    struct hpf_job *j = ht_start(c, &job);
    struct words *w = words_of(ht_job_user_shared(j));
    if (daemon_dies) {
        long long deadline = hpf_now_ms() + ht_ms(30000);
        while (atomic_load(&w->posted) < 2) {
            HT_CHECK(hpf_now_ms() < deadline, "the ranks have not posted");
            hpf_sleep_ms(1);
        }
        hpf_node_kill(c, 0, SIGKILL);
    }
    for (unsigned r = 0; r < (daemon_dies ? 2u : 3u); r++) {
        expect_abort(j, r);
        if (!daemon_dies)
            expect_words(log, r);
        HT_CHECK(atomic_load(&w->behind[r]) == 0, "rank %u: the stream ran on behind an op that failed", r);
    }
    hpf_job_free(j);
    if (daemon_dies) {
        char err[512];
        HT_CHECK(hpf_node_start(c, 0, err, sizeof(err)) == 0, "%s", err);
    }
    const struct ht_job next = {.nranks = 3, .fn = next_job, .shared_bytes = sizeof(struct words) + PAGE};
    ht_run(c, &next);
    ht_cluster_end(c);
}

static void own_end(bool aborts)
{
    static char yes;
    struct hpf_cluster *c = ht_cluster(1, keys);
    const struct ht_job job = {.nranks = 2,
                               .fn = own_end_run,
                               .arg = aborts ? &yes : NULL,
                               .shared_bytes = sizeof(struct words) + PAGE};
    ht_run(c, &job);
    ht_cluster_end(c);
}

int main(void)
{
    ht_gpu_fake("libcuda_fake.so.1");
    setenv("HREDUCE_GPU_STAGED_BYTES", "100000000", 1);
    for (unsigned nnodes = 1; nnodes < 3; nnodes++) {
        struct hpf_cluster *c = ht_cluster(nnodes, keys);
        const struct ht_job job = {.nranks = 2 * nnodes, .fn = nan_run, .expected_bytes = 1 << 20};
        ht_run(c, &job);
        ht_cluster_end(c);
    }
    for (unsigned way = 0; way < 2; way++) {
        setenv("HREDUCE_GPU_STAGED_BYTES", way ? "0" : "100000000", 1);
        trap(false);
        trap(true);
        own_end(false);
        own_end(true);
    }
    return 0;
}
