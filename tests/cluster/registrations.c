/* SPDX-License-Identifier: MIT */
/*
 * Memory that is registered again and again, in many parts, and at a size that nobody could touch: nothing grows, in the
 * daemon or in the process, and no more addresses are taken than are mapped. For host memory and for GPU memory, on the driver
 * without a GPU. timeout: 300
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/perf/json.h"
#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

#define MIB (UINT64_C(1) << 20)
#define LARGE (UINT64_C(8) << 30)
#define FAR (UINT64_C(5) << 30) /* more than 32 bits hold */

/* Of the file, see above: each wait may take all of it. */
#define LIMIT_MS 280000u

enum { NRANKS = 2, PARTS = 2000, SLICES = 500, COUNT = 512 /* of i32, in an op */ };

/* Messages to a daemon under a sanitizer take long. */
static unsigned times(unsigned n)
{
    return ht_sanitized() ? n / 20 : n;
}

/* ---- what is held ----------------------------------------------------------------------------------------------------- */

struct holding {
    long fds, maps, own, rss, space; /* own: KiB of memory that is nobody else's, as registered memory is */
};

static struct holding holds(pid_t pid)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    return (struct holding){.fds = ht_fds(pid),
                            .maps = ht_maps(pid),
                            .own = (long)hpf_proc_kib(path, "RssAnon"),
                            .rss = ht_rss_kib(pid),
                            .space = ht_space_kib(pid)};
}

/* A thread's first malloc takes 64 MiB of addresses, of which it uses a page or two; threads come up when they are needed. */
#define SLACK_KIB (512 * 1024)

static bool grew(const struct holding *a, const struct holding *b)
{
    return b->fds > a->fds || b->maps > a->maps + 24 || (!ht_sanitized() && b->own > a->own + 4096) ||
           (!ht_sanitized() && b->space > a->space + SLACK_KIB);
}

static pid_t daemon_of(const struct hpf_rank *me)
{
    const struct hpf_cluster *c = me->arg;
    return c->node[me->node].pid;
}

struct both {
    struct holding daemon, self;
};

static int meet(struct hpf_rank *me)
{
    return hpf_rank_barrier(me, false, ht_ms(LIMIT_MS)) < 0;
}

/* All ranks at rest. */
static int measure(struct hpf_rank *me, struct both *b)
{
    if (meet(me) != 0)
        return 1;
    b->daemon = holds(daemon_of(me));
    b->self = holds(getpid());
    return meet(me);
}

static int compare(struct hpf_rank *me, const struct both *before, const char *what)
{
    struct both now;
    bool more = true;
    /* What was given back is gone a moment after the answer. */
    for (unsigned i = 0; i < 50 && more; i++) {
        if (i > 0)
            hpf_sleep_ms(100);
        now = (struct both){.daemon = holds(daemon_of(me)), .self = holds(getpid())};
        more = grew(&before->daemon, &now.daemon) || grew(&before->self, &now.self);
    }
    const struct holding *was[2] = {&before->daemon, &before->self}, *is[2] = {&now.daemon, &now.self};
    for (unsigned i = 0; i < 2; i++)
        printf("rank %u, %s: %s %ld -> %ld fds, %ld -> %ld maps, %ld -> %ld KiB of its own, %ld -> %ld KiB "
               "of addresses\n",
               me->rank, what, i == 0 ? "daemon" : "process", was[i]->fds, is[i]->fds, was[i]->maps,
               is[i]->maps, was[i]->own, is[i]->own, was[i]->space, is[i]->space);
    fflush(stdout);
    HT_EXPECT(me, !more, "%s: something grew, see above", what);
    return meet(me);
}

static void shuffle(unsigned *order, unsigned n, uint64_t *seed)
{
    for (unsigned i = 0; i < n; i++)
        order[i] = i;
    for (unsigned i = n; i > 1; i--) {
        unsigned k = ht_random(seed) % i, t = order[k];
        order[k] = order[i - 1];
        order[i - 1] = t;
    }
}

/* ---- host memory ------------------------------------------------------------------------------------------------------ */

static int sealed(uint64_t bytes, int *fd, char **at)
{
    *fd = memfd_create("registered", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0 || ftruncate(*fd, (off_t)bytes) != 0 || fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0)
        return 1;
    *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    return *at == MAP_FAILED;
}

/* An op in place, on COUNT elements of host memory. */
static int host_op(struct ht_env *e, void *at, unsigned salt)
{
    int32_t *v = at;
    hclient_op_t op;
    for (unsigned i = 0; i < COUNT; i++)
        v[i] = (int32_t)(i + salt + e->me->rank);
    HT_TRY(e->me, hclient_all_reduce(e->comm, v, v, COUNT, HCLIENT_INT32, HCLIENT_SUM, NULL, &op));
    HT_TRY(e->me, hclient_wait(op));
    for (unsigned i = 0; i < COUNT; i++)
        HT_EXPECT(e->me, v[i] == (int32_t)(NRANKS * (i + salt) + NRANKS * (NRANKS - 1) / 2),
                  "salt %u: element %u is %d", salt, i, v[i]);
    return 0;
}

static int host_again(struct ht_env *e, char *at, int fd, char *plain)
{
    struct both before;
    void *handle;
    if (measure(e->me, &before) != 0)
        return 1;
    for (unsigned i = 0; i < times(100000); i++) {
        const bool import = i % 10 == 0; /* the daemon's work; the other is done in the process */
        if (import)
            HT_TRY(e->me, hclient_mem_import_fd(at, MIB, fd, 0));
        HT_TRY(e->me, hclient_comm_register(e->comm, plain, MIB, &handle));
        if (i % 1000 == 0 && (host_op(e, at + 4096, i) != 0 || host_op(e, plain, i) != 0))
            return 1;
        HT_TRY(e->me, hclient_comm_deregister(e->comm, handle));
        if (import)
            HT_TRY(e->me, hclient_mem_free(at));
        if (i % 100 == 0)
            hpf_rank_progress(e->me);
    }
    return compare(e->me, &before, "host memory registered 100000 times, imported 10000 times");
}

static int host_parts(struct ht_env *e, uint64_t *seed)
{
    const uint64_t part = 16384;
    struct both before;
    static unsigned order[PARTS];
    int fd;
    char *at;
    HT_EXPECT(e->me, sealed(PARTS * part, &fd, &at) == 0, "no memfd");
    memset(at, 0, PARTS * part);
    if (measure(e->me, &before) != 0)
        return 1;
    for (unsigned i = 0; i < PARTS; i++)
        HT_TRY(e->me, hclient_mem_import_fd(at + i * part, part, fd, i * part));
    struct holding live = holds(daemon_of(e->me));
    /* The one by which a part comes is closed a moment after the answer; other ranks' parts may still be coming. */
    for (unsigned i = 0; i < 50 && live.fds > before.daemon.fds; i++) {
        hpf_sleep_ms(100);
        live = holds(daemon_of(e->me));
    }
    if (meet(e->me) != 0)
        return 1;
    HT_EXPECT(e->me, live.fds <= before.daemon.fds, "registrations cost descriptors: %ld, %ld before",
              live.fds, before.daemon.fds);
    HT_EXPECT(e->me,
              ht_sanitized() ||
                  live.space <= before.daemon.space + (long)(NRANKS * PARTS * part >> 10) + SLACK_KIB,
              "the daemon took %ld KiB of addresses for %u parts of 16 KiB", live.space - before.daemon.space,
              NRANKS * PARTS);
    shuffle(order, PARTS, seed); /* the same order on all ranks */
    for (unsigned i = 0; i < PARTS; i++) {
        if (i % 100 == 0)
            hpf_rank_progress(e->me);
        if (i % 50 == 0 && host_op(e, at + order[i] * part + 64, i) != 0)
            return 1;
        HT_TRY(e->me, hclient_mem_free(at + order[i] * part));
    }
    if (compare(e->me, &before, "2000 parts of host memory") != 0)
        return 1;
    munmap(at, PARTS * part);
    close(fd);
    return 0;
}

static int host_large(struct ht_env *e)
{
    struct both before;
    int fd;
    char *at;
    HT_EXPECT(e->me, sealed(LARGE, &fd, &at) == 0, "no memfd of 8 GiB");
    if (measure(e->me, &before) != 0)
        return 1;
    for (unsigned round = 0; round < 3; round++) {
        HT_TRY(e->me, hclient_mem_import_fd(at, LARGE, fd, 0));
        if (meet(e->me) != 0)
            return 1;
        struct holding live = holds(daemon_of(e->me));
        long took = live.space - before.daemon.space;
        HT_EXPECT(e->me,
                  took >= (long)(NRANKS * LARGE >> 10) && took <= (long)((NRANKS * LARGE >> 10) + SLACK_KIB),
                  "the daemon took %ld KiB of addresses for %u x 8 GiB", took, NRANKS);
        HT_EXPECT(e->me, ht_sanitized() || live.rss <= before.daemon.rss + 16 * 1024,
                  "the daemon has %ld KiB, %ld before: it touched memory that nobody uses", live.rss,
                  before.daemon.rss);
        if (meet(e->me) != 0 || host_op(e, at + FAR + 12, round) != 0)
            return 1;
        HT_TRY(e->me, hclient_mem_free(at));
    }
    if (compare(e->me, &before, "8 GiB of host memory") != 0)
        return 1;
    munmap(at, LARGE);
    close(fd);
    return 0;
}

static int host_main(struct hpf_rank *me)
{
    struct ht_env e;
    int fd;
    char *at, *plain = malloc(MIB);
    uint64_t seed = 11;
    HT_EXPECT(me, plain && sealed(MIB, &fd, &at) == 0, "no memory");
    if (ht_join(&e, me, 0, NULL) != 0 || host_op(&e, plain, 1) != 0 || host_again(&e, at, fd, plain) != 0 ||
        host_parts(&e, &seed) != 0 || host_large(&e) != 0)
        return 1;
    munmap(at, MIB);
    close(fd);
    free(plain);
    return ht_leave(&e);
}

/* ---- GPU memory ------------------------------------------------------------------------------------------------------- */

static const struct hrg_driver *drv;
static int32_t *pinned;

static int gpu_op(struct ht_env *e, hrg_ptr at, unsigned salt)
{
    hrg_stream s = HRG_STREAM_PER_THREAD;
    hclient_op_t op;
    for (unsigned i = 0; i < COUNT; i++)
        pinned[i] = (int32_t)(i + salt + e->me->rank);
    HT_CUDA(e->me, drv->MemcpyHtoDAsync(at, pinned, COUNT * sizeof(int32_t), s));
    void *v = (void *)(uintptr_t)at;
    HT_TRY(e->me, hclient_all_reduce(e->comm, v, v, COUNT, HCLIENT_INT32, HCLIENT_SUM, s, &op));
    HT_TRY(e->me, hclient_wait(op));
    memset(pinned, 0xee, COUNT * sizeof(int32_t));
    HT_CUDA(e->me, drv->MemcpyDtoHAsync(pinned, at, COUNT * sizeof(int32_t), s));
    HT_CUDA(e->me, drv->StreamSynchronize(s));
    for (unsigned i = 0; i < COUNT; i++)
        HT_EXPECT(e->me, pinned[i] == (int32_t)(NRANKS * (i + salt) + NRANKS * (NRANKS - 1) / 2),
                  "salt %u: element %u is %d", salt, i, pinned[i]);
    return 0;
}

static int exports(struct hpf_rank *me, unsigned expected, const char *what)
{
    unsigned n = ht_gpu_calls("IpcGetMemHandle");
    HT_EXPECT(me, n == expected, "%s: %u exports, not %u", what, n, expected);
    return 0;
}

static int gpu_again(struct ht_env *e, hrg_ptr at)
{
    struct both before;
    void *handle;
    for (unsigned i = 0; i < 100; i++)
        if (gpu_op(e, at, i) != 0)
            return 1;
    if (measure(e->me, &before) != 0)
        return 1;
    for (unsigned i = 0; i < 100000; i++) {
        HT_TRY(e->me, hclient_comm_register(e->comm, (void *)(uintptr_t)at, MIB, &handle));
        if (i % 500 == 0 && gpu_op(e, at, i) != 0)
            return 1;
        HT_TRY(e->me, hclient_comm_deregister(e->comm, handle));
    }
    /* Nobody else has registered it, so its end takes it from the daemon, where an op had brought it. */
    if (exports(e->me, 200, "GPU memory registered 100000 times") != 0)
        return 1;
    return compare(e->me, &before, "GPU memory registered 100000 times");
}

static int gpu_parts(struct ht_env *e, uint64_t *seed)
{
    const uint64_t part = 4096;
    struct both before;
    static unsigned order[PARTS];
    static void *handle[PARTS];
    hrg_ptr at;
    HT_CUDA(e->me, drv->MemAlloc(&at, PARTS * part));
    if (gpu_op(e, at, 1) != 0 || measure(e->me, &before) != 0)
        return 1;
    for (unsigned i = 0; i < PARTS; i++)
        HT_TRY(e->me, hclient_comm_register(e->comm, (void *)(uintptr_t)(at + i * part), part, &handle[i]));
    shuffle(order, PARTS, seed);
    for (unsigned i = 0; i < PARTS; i++) {
        if (gpu_op(e, at + order[i] * part + 64, i) != 0)
            return 1;
        HT_TRY(e->me, hclient_comm_deregister(e->comm, handle[order[i]]));
    }
    if (exports(e->me, 201, "2000 parts of GPU memory") != 0)
        return 1;
    return compare(e->me, &before, "2000 parts of GPU memory");
}

/* Slices end in random order while ops run on the rest; then the block is freed and another lies there. */
static int gpu_slices(struct ht_env *e, uint64_t *seed)
{
    enum { ROUNDS = 20 };
    const uint64_t part = 4096;
    struct both before;
    static unsigned order[SLICES];
    static void *handle[SLICES];
    unsigned already = ht_gpu_calls("IpcGetMemHandle");
    for (unsigned round = 0; round < ROUNDS; round++) {
        hrg_ptr at;
        HT_CUDA(e->me, drv->MemAlloc(&at, SLICES * part));
        for (unsigned i = 0; i < SLICES; i++)
            HT_TRY(e->me,
                   hclient_comm_register(e->comm, (void *)(uintptr_t)(at + i * part), part, &handle[i]));
        shuffle(order, SLICES, seed);
        for (unsigned i = 0; i < SLICES; i++) {
            HT_TRY(e->me, hclient_comm_deregister(e->comm, handle[order[i]]));
            if (i % 20 == 0 && gpu_op(e, at + order[SLICES - 1 - i / 20] * part, i + round) != 0)
                return 1;
        }
        HT_CUDA(e->me, drv->MemFree(at));
        if (exports(e->me, already + round + 1, "a block that was made anew") != 0)
            return 1;
        if (round == 0 && measure(e->me, &before) != 0)
            return 1;
    }
    return compare(e->me, &before, "a block of GPU memory made 20 times");
}

static int gpu_large(struct ht_env *e)
{
    struct both before;
    hrg_ptr at;
    if (measure(e->me, &before) != 0)
        return 1;
    HT_CUDA(e->me, drv->MemAddressReserve(&at, LARGE, 0, 0, 0));
    if (ht_gpu_map(e->me, at, LARGE, HRG_HANDLE_POSIX_FD) != 0 || gpu_op(e, at + FAR + 12, 5) != 0 ||
        gpu_op(e, at, 6) != 0 || meet(e->me) != 0)
        return 1;
    HT_EXPECT(e->me, ht_gpu_calls("MemExportToShareableHandle") == 1, "it was exported more than once");
    struct holding live = holds(daemon_of(e->me));
    long took = live.space - before.daemon.space;
    HT_EXPECT(e->me,
              took >= (long)(NRANKS * LARGE >> 10) && took <= (long)((NRANKS * LARGE >> 10) + SLACK_KIB),
              "the daemon took %ld KiB of addresses for %u x 8 GiB of GPU memory", took, NRANKS);
    HT_EXPECT(e->me, ht_sanitized() || live.rss <= before.daemon.rss + 16 * 1024,
              "the daemon has %ld KiB, %ld before", live.rss, before.daemon.rss);
    if (meet(e->me) != 0)
        return 1;
    HT_CUDA(e->me, drv->MemUnmap(at, LARGE));
    HT_CUDA(e->me, drv->MemAddressFree(at, LARGE));
    printf("rank %u: 8 GiB of GPU memory took %ld KiB of the daemon's addresses\n", e->me->rank, took);
    return 0;
}

static int gpu_main(struct hpf_rank *me)
{
    struct ht_env e;
    hrg_ptr at;
    void *p;
    uint64_t seed = 12;
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0)
        return 1;
    HT_CUDA(me, drv->MemAllocHost(&p, COUNT * sizeof(int32_t)));
    pinned = p;
    HT_CUDA(me, drv->MemAlloc(&at, MIB));
    if (gpu_again(&e, at) != 0 || gpu_parts(&e, &seed) != 0 || gpu_slices(&e, &seed) != 0 ||
        gpu_large(&e) != 0)
        return 1;
    return ht_leave(&e);
}

static void run(hpf_rank_fn fn)
{
    static const char *const keys[] = {"dma_memory = 4M", "max_memory_per_user = 17G", NULL};
    struct hpf_cluster *c = ht_cluster(1, keys);
    const struct ht_job job = {.nranks = NRANKS, .fn = fn, .arg = c};
    struct hpf_job *started = ht_start(c, &job);
    ht_finish(started, LIMIT_MS); /* a sanitizer's share is added there */
    ht_cluster_end(c);
}

int main(void)
{
    ht_gpu_fake("libcuda_fake.so.1");
    setenv("HREDUCE_GPU_STAGED_BYTES", "0", 1);
    run(host_main);
    run(gpu_main);
    return 0;
}
