/* SPDX-License-Identifier: MIT */
/*
 * What the library keeps of GPU memory that the daemon has: unused memory goes after 30 s, the memory of an op that is not over
 * never, however old it is and however many allocations come after it; where all that is kept is in use, more of it is copied
 * instead; a refusal is believed for 30 s; and what could not be given back because the daemon did not read is given back later.
 * No 30 s pass here: a rank's clock is this file's. timeout: 120
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "client/perf/json.h"
#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

enum { COUNT = 1024, NRANKS = 2, KEPT = 256, SLOTS = 32 /* ops that are under way in one communicator */ };

/* ---- time ------------------------------------------------------------------------------------------------------------- */

static _Atomic long long ahead_s;
static _Atomic unsigned watcher_looked; /* at the clock */

/* In libc's place, for this process and its libraries: seconds that a test says have passed, have.
   NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): libc's names are reserved. */
__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, struct timespec *ts)
{
    char name[16] = "";
    int r = (int)syscall(SYS_clock_gettime, clock, ts);
    ts->tv_sec += (time_t)atomic_load_explicit(&ahead_s, memory_order_relaxed);
    prctl(PR_GET_NAME, name);
    if (strcmp(name, "hclient-watch") == 0)
        atomic_fetch_add(&watcher_looked, 1);
    return r;
}

/* The library's watcher does once a second what is due, and looks at the clock three times then: it has now once more, whole, so
   that ops that are over do not hold their memory any more. */
static int due_is_done(struct hpf_rank *me)
{
    unsigned before = atomic_load(&watcher_looked);
    atomic_fetch_add(&ahead_s, 2);
    for (unsigned ms = 0; atomic_load(&watcher_looked) - before < 7; ms += 5) {
        HT_EXPECT(me, ms < ht_ms(60000), "the library's watcher does not look at the clock");
        hpf_sleep_ms(5);
        hpf_rank_progress(me);
    }
    return 0;
}

/* ---- the two sides ---------------------------------------------------------------------------------------------------- */

/* Ranks stop at each look, and the parent waits there until the daemon has so many imports. */
struct looks {
    _Atomic unsigned at[NRANKS], wanted, seen;
};

static unsigned imports(struct hpf_cluster *c)
{
    char *text = ht_status(c, 0);
    struct hpf_json doc, gpus, devices, one, n;
    uint64_t sum = 0, value = 0;
    HT_CHECK(hpf_json_parse(text, &doc) && hpf_json_member(doc, "gpus", &gpus) &&
                 hpf_json_member(gpus, "devices", &devices),
             "the status has no GPUs: %.300s", text);
    for (unsigned i = 0; hpf_json_element(devices, i, &one); i++)
        if (hpf_json_member(one, "imports", &n) && hpf_json_uint(n, &value))
            sum += value;
    free(text);
    return (unsigned)sum;
}

/* Rank: the daemon comes to have `each` imports of every rank. */
static int look(struct hpf_rank *me, unsigned each)
{
    struct looks *l = ht_shared(me);
    unsigned number = atomic_load(&l->at[me->rank]) + 1;
    atomic_store(&l->wanted, each * NRANKS); /* all ranks say the same */
    atomic_store(&l->at[me->rank], number);
    for (unsigned ms = 0; atomic_load(&l->seen) < number; ms += 5) {
        HT_EXPECT(me, ms < ht_ms(60000), "look %u: the daemon does not come to have %u imports", number,
                  each * NRANKS);
        hpf_sleep_ms(5);
        hpf_rank_progress(me);
    }
    return 0;
}

static void watch(struct hpf_cluster *c, struct hpf_job *job, unsigned nlooks)
{
    struct looks *l = ht_job_user_shared(job);
    for (unsigned number = 1; number <= nlooks; number++) {
        unsigned n = 0;
        for (unsigned ms = 0;; ms += 20) {
            bool all = true;
            for (unsigned r = 0; r < NRANKS; r++)
                all = all && atomic_load(&l->at[r]) == number;
            if (all && (n = imports(c)) == atomic_load(&l->wanted))
                break;
            if (ms >= ht_ms(30000)) {
                fprintf(stderr, "look %u: the daemon has %u imports, not %u\n", number, n,
                        atomic_load(&l->wanted));
                return; /* what the ranks say is more */
            }
            hpf_sleep_ms(20);
        }
        atomic_store(&l->seen, number);
    }
}

static void run(hpf_rank_fn fn, unsigned nlooks)
{
    static const char *const keys[] = {"dma_memory = 4M", NULL};
    struct hpf_cluster *c = ht_cluster(1, keys);
    const struct ht_job job = {.nranks = NRANKS, .fn = fn, .arg = c, .shared_bytes = sizeof(struct looks)};
    struct hpf_job *started = ht_start(c, &job);
    watch(c, started, nlooks);
    ht_finish(started, 60000);
    ht_cluster_end(c);
}

/* ---- memory and ops --------------------------------------------------------------------------------------------------- */

static const struct hrg_driver *drv;
static int32_t *host; /* pinned */

/* An allocation: element i is i + salt + rank, then the sum over the ranks. */
struct mem {
    hrg_ptr at;
    unsigned salt;
};

static int start(struct ht_env *e, struct hpf_rank *me)
{
    void *p;
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(e, me, 0, NULL) != 0)
        return 1;
    HT_CUDA(me, drv->MemAllocHost(&p, COUNT * sizeof(int32_t)));
    host = p;
    return 0;
}

static int fill(struct hpf_rank *me, struct mem *m, unsigned salt)
{
    m->salt = salt;
    if (m->at == 0)
        HT_CUDA(me, drv->MemAlloc(&m->at, COUNT * sizeof(int32_t)));
    for (unsigned i = 0; i < COUNT; i++)
        host[i] = (int32_t)(i + salt + me->rank);
    HT_CUDA(me, drv->MemcpyHtoDAsync(m->at, host, COUNT * sizeof(int32_t), HRG_STREAM_PER_THREAD));
    HT_CUDA(me, drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
    return 0;
}

static hclient_result_t post(hclient_comm_t comm, const struct mem *send, const struct mem *recv,
                             hrg_stream stream, hclient_op_t *op)
{
    return hclient_all_reduce(comm, (void *)(uintptr_t)send->at, (void *)(uintptr_t)recv->at, COUNT,
                              HCLIENT_INT32, HCLIENT_SUM, stream, op);
}

/* result has the sum of what `of` was filled with. */
static int check(struct hpf_rank *me, const struct mem *result, const struct mem *of)
{
    memset(host, 0xee, COUNT * sizeof(int32_t));
    HT_CUDA(me, drv->MemcpyDtoHAsync(host, result->at, COUNT * sizeof(int32_t), HRG_STREAM_PER_THREAD));
    HT_CUDA(me, drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
    for (unsigned i = 0; i < COUNT; i++)
        HT_EXPECT(me, host[i] == (int32_t)(NRANKS * (i + of->salt) + NRANKS * (NRANKS - 1) / 2),
                  "salt %u: element %u is %d", of->salt, i, host[i]);
    return 0;
}

/* One op in place, on its own. */
static int use(struct ht_env *e, struct mem *m, unsigned salt)
{
    hclient_op_t op;
    if (fill(e->me, m, salt) != 0)
        return 1;
    HT_TRY(e->me, post(e->comm, m, m, HRG_STREAM_PER_THREAD, &op));
    HT_TRY(e->me, hclient_wait(op));
    return check(e->me, m, m);
}

static int exports(struct hpf_rank *me, unsigned expected, const char *when)
{
    unsigned n = ht_gpu_calls("IpcGetMemHandle");
    HT_EXPECT(me, n == expected, "%s: %u exports, not %u", when, n, expected);
    return 0;
}

/* ---- 30 s ------------------------------------------------------------------------------------------------------------- */

static int unused(struct hpf_rank *me)
{
    struct ht_env e;
    struct ht_gate gate;
    hrg_stream held;
    hclient_op_t op;
    struct mem live = {0}, idle = {0}, marker = {0};
    if (start(&e, me) != 0 || ht_gate_new(&e, &gate) != 0 || fill(me, &live, 1000) != 0)
        return 1;
    HT_CUDA(me, drv->StreamCreateWithPriority(&held, HRG_STREAM_NON_BLOCKING, 0));
    /* One op whose stream does not come to it, and beside it memory that nobody uses any more. */
    if (use(&e, &idle, 1) != 0 || ht_gate_hold(&e, &gate, held) != 0)
        return 1;
    HT_TRY(me, post(e.comm, &live, &live, held, &op));
    if (due_is_done(me) != 0 || look(me, 2) != 0)
        return 1;
    atomic_fetch_add(&ahead_s, 31);
    if (look(me, 1) != 0) /* of the two it is the live one that stays: below it needs no export */
        return 1;
    if (use(&e, &marker, 2) != 0 || exports(me, 3, "after 31 s") != 0 || due_is_done(me) != 0)
        return 1;
    /* The end of the op is its memory's last use. */
    atomic_fetch_add(&ahead_s, 20);
    atomic_store(gate.word, 1);
    HT_CUDA(me, drv->StreamSynchronize(held));
    HT_TRY(me, hclient_wait(op));
    if (check(me, &live, &live) != 0 || due_is_done(me) != 0 || look(me, 2) != 0)
        return 1;
    atomic_fetch_add(&ahead_s, 15);
    if (look(me, 1) != 0) /* the marker has gone */
        return 1;
    if (use(&e, &live, 3) != 0 || exports(me, 3, "15 s after the op") != 0 || due_is_done(me) != 0)
        return 1;
    atomic_fetch_add(&ahead_s, 31);
    if (look(me, 0) != 0 || use(&e, &live, 4) != 0 || exports(me, 4, "31 s later") != 0)
        return 1;
    return ht_leave(&e);
}

/* ---- registrations ---------------------------------------------------------------------------------------------------- */

/* A registration that ends takes the allocation from the daemon before it returns, but never under an op or under another
   registration. */
static int deregistered(struct hpf_rank *me)
{
    struct ht_env e;
    struct ht_gate gate;
    hrg_stream held;
    hclient_op_t op;
    void *all, *part;
    struct mem m = {0};
    if (start(&e, me) != 0 || ht_gate_new(&e, &gate) != 0 || use(&e, &m, 1) != 0 || fill(me, &m, 2) != 0)
        return 1;
    void *at = (void *)(uintptr_t)m.at;
    HT_CUDA(me, drv->StreamCreateWithPriority(&held, HRG_STREAM_NON_BLOCKING, 0));
    HT_TRY(me, hclient_comm_register(e.comm, at, COUNT * sizeof(int32_t), &all));
    HT_TRY(me, hclient_comm_register(e.comm, at, sizeof(int32_t), &part));
    HT_TRY(me, hclient_comm_deregister(e.comm, part));
    if (look(me, 1) != 0 || ht_gate_hold(&e, &gate, held) != 0)
        return 1;
    HT_TRY(me, post(e.comm, &m, &m, held, &op));
    hclient_result_t r = hclient_comm_deregister(e.comm, all);
    HT_EXPECT(
        me, r == HCLIENT_INVALID_ARGUMENT && strstr(hclient_last_error(NULL), "not over use the GPU memory"),
        "an op under way: %d, %s", (int)r, hclient_last_error(NULL));
    if (look(me, 1) != 0)
        return 1;
    atomic_store(gate.word, 1);
    HT_TRY(me, hclient_wait(op));
    HT_TRY(me, hclient_comm_deregister(e.comm, all));
    if (look(me, 0) != 0 || check(me, &m, &m) != 0 || use(&e, &m, 3) != 0 ||
        exports(me, 2, "used once more") != 0)
        return 1;
    return ht_leave(&e);
}

/* The fake refuses the first export. */
static int refused(struct hpf_rank *me)
{
    struct ht_env e;
    struct mem m = {0};
    setenv("FAKE_CUDA_FAIL", "IpcGetMemHandle=801@1", 1);
    if (start(&e, me) != 0)
        return 1;
    for (unsigned i = 0; i < 3; i++)
        if (use(&e, &m, i) != 0)
            return 1;
    if (exports(me, 1, "a refusal is believed") != 0)
        return 1;
    atomic_fetch_add(&ahead_s, 31);
    if (use(&e, &m, 9) != 0 || exports(me, 2, "31 s after a refusal") != 0 || look(me, 1) != 0)
        return 1;
    return ht_leave(&e);
}

/* ---- the limit -------------------------------------------------------------------------------------------------------- */

/* The oldest memory of all is that of an op under way: others make room. */
static int oldest(struct hpf_rank *me)
{
    struct ht_env e, other; /* where its op does not keep the slots of the rest */
    struct ht_gate gate;
    hrg_stream held;
    hclient_op_t op;
    struct mem live = {0};
    static struct mem more[KEPT + 20];
    if (start(&e, me) != 0 || ht_join(&other, me, 1, NULL) != 0 || ht_gate_new(&e, &gate) != 0 ||
        fill(me, &live, 1000) != 0)
        return 1;
    HT_CUDA(me, drv->StreamCreateWithPriority(&held, HRG_STREAM_NON_BLOCKING, 0));
    if (ht_gate_hold(&e, &gate, held) != 0)
        return 1;
    HT_TRY(me, post(other.comm, &live, &live, held, &op));
    for (unsigned i = 0; i < KEPT + 20; i++)
        if (use(&e, &more[i], i) != 0)
            return 1;
    if (look(me, KEPT) != 0)
        return 1;
    atomic_store(gate.word, 1);
    HT_CUDA(me, drv->StreamSynchronize(held));
    HT_TRY(me, hclient_wait(op));
    if (check(me, &live, &live) != 0 || use(&e, &live, 5) != 0 ||
        exports(me, KEPT + 21, "the memory of an op under way was pushed out") != 0)
        return 1;
    return ht_leave(&other) != 0 ? 1 : ht_leave(&e);
}

/* Nothing can make room: 4 communicators, 32 ops each, two allocations an op. */
static int all_in_use(struct hpf_rank *me)
{
    enum { NCOMMS = KEPT / 2 / SLOTS };
    struct ht_env e[NCOMMS + 1];
    struct ht_gate gate;
    hrg_stream held;
    static struct mem send[KEPT / 2], recv[KEPT / 2];
    hclient_op_t op[KEPT / 2];
    struct mem more = {0};
    char *path;
    if (start(&e[0], me) != 0 || ht_gate_new(&e[0], &gate) != 0)
        return 1;
    HT_CUDA(me, drv->StreamCreateWithPriority(&held, HRG_STREAM_NON_BLOCKING, 0));
    for (unsigned k = 1; k <= NCOMMS; k++)
        if (ht_join(&e[k], me, k, NULL) != 0)
            return 1;
    for (unsigned i = 0; i < KEPT / 2; i++)
        if (fill(me, &send[i], i) != 0 || fill(me, &recv[i], 7777) != 0)
            return 1;
    if (ht_gate_hold(&e[0], &gate, held) != 0)
        return 1;
    for (unsigned i = 0; i < KEPT / 2; i++)
        HT_TRY(me, post(e[i / SLOTS].comm, &send[i], &recv[i], held, &op[i]));
    if (look(me, KEPT) != 0 || use(&e[NCOMMS], &more, 3) != 0 || look(me, KEPT) != 0)
        return 1;
    HT_TRY(me, hclient_comm_path(e[NCOMMS].comm, &path));
    HT_EXPECT(me,
              strstr(path, "\"staged_ops\": 1") && strstr(path, "\"shared_ops\": 0") &&
                  strstr(path, "the 256 allocations"),
              "the path report does not say why memory was copied: %s", path);
    hclient_free(path);
    atomic_store(gate.word, 1);
    HT_CUDA(me, drv->StreamSynchronize(held));
    for (unsigned i = 0; i < KEPT / 2; i++) {
        HT_TRY(me, hclient_wait(op[i]));
        if (check(me, &recv[i], &send[i]) != 0)
            return 1;
    }
    if (due_is_done(me) != 0 || use(&e[NCOMMS], &more, 4) != 0 ||
        exports(me, KEPT + 1, "there is room again") != 0)
        return 1;
    for (unsigned k = 1; k <= NCOMMS; k++)
        if (ht_leave(&e[k]) != 0)
            return 1;
    return ht_leave(&e[0]);
}

/* ---- a daemon that does not read -------------------------------------------------------------------------------------- */

/* As little as a socket may hold: a few messages. */
static void shrink_socket(void)
{
    int type, least = 1;
    for (int fd = 3; fd < 256; fd++) {
        socklen_t len = sizeof(type);
        if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) == 0 && type == SOCK_SEQPACKET)
            setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &least, sizeof(least));
    }
}

static int stopped(struct hpf_rank *me)
{
    enum { MANY = 100 };
    struct ht_env e;
    static struct mem m[MANY];
    struct hpf_cluster *c = me->arg;
    if (start(&e, me) != 0)
        return 1;
    for (unsigned i = 0; i < MANY; i++)
        if (use(&e, &m[i], i) != 0)
            return 1;
    if (due_is_done(me) != 0 || look(me, MANY) != 0)
        return 1;
    shrink_socket();
    if (hpf_rank_barrier(me, false, ht_ms(30000)) < 0)
        return 1;
    if (me->rank == 0)
        kill(c->node[0].pid, SIGSTOP);
    if (hpf_rank_barrier(me, false, ht_ms(30000)) < 0)
        return 1;
    atomic_fetch_add(&ahead_s, 31);
    if (due_is_done(me) != 0 || hpf_rank_barrier(me, false, ht_ms(30000)) < 0)
        return 1;
    if (me->rank == 0)
        kill(c->node[0].pid, SIGCONT);
    if (look(me, 0) != 0 || use(&e, &m[0], 3) != 0 || exports(me, MANY + 1, "after it was given back") != 0)
        return 1;
    return ht_leave(&e);
}

int main(void)
{
    ht_gpu_fake("libcuda_fake.so.1");
    setenv("HREDUCE_GPU_STAGED_BYTES", "0", 1);
    run(unused, 5);
    run(deregistered, 3);
    run(refused, 1);
    run(oldest, 1);
    run(all_in_use, 2);
    run(stopped, 2);
    return 0;
}
