/* SPDX-License-Identifier: MIT */
/* One rank of tests/gpu/compare.c: joins both communicators, measures, checks. */
#include "tests/lib/compare.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/types.h"
#include "tests/lib/gpu_job.h"

#define PIECE (UINT64_C(4) << 20)
#define BARRIER_NS UINT64_C(60000000000)
#define MAX_OPS 64
#define BUSY_BYTES (UINT64_C(8) << 20)
#define BUSY_AHEAD 4
#define BUSY_NS UINT64_C(400000000)

/* ---- NCCL ------------------------------------------------------------------------------------------------------- */

/* What is used of nccl.h; the values are part of its ABI. */
struct nccl_id {
    char internal[128];
};
enum { NCCL_FLOAT32 = 7, NCCL_BFLOAT16 = 9, NCCL_SUM = 0 };

struct nccl {
    int (*get_unique_id)(struct nccl_id *id);
    int (*comm_init_rank)(void **comm, int nranks, struct nccl_id id, int rank);
    int (*all_reduce)(const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream);
    int (*comm_destroy)(void *comm);
    const char *(*error)(int result);
    void *comm;
};

struct rank {
    struct hpf_rank *me;
    struct cmp_page *page;
    const struct cmp_options *o;
    struct gj_gpu gpu;
    struct nccl nccl;
    bool nccl_on; /* on all ranks alike */
    hclient_comm_t comm;
    uint64_t send, recv; /* device */
    uint8_t *piece;      /* pinned, PIECE bytes */
    uint32_t round;
    /* --busy: */
    struct gj_gpu busy_gpu;
    pthread_t busy_thread;
    _Atomic bool busy_stop;
};

static int fail(struct rank *r, const char *what, const char *why)
{
    atomic_store(&r->page->failed, 1);
    return hpf_rank_fail(r->me, "%s: %s", what, why);
}

/* Without NCCL there is still something to measure: all ranks go on without it. */
static int lack_nccl(struct rank *r, const char *what, const char *why)
{
    if (atomic_fetch_add(&r->page->without_nccl, 1) == 0)
        snprintf(r->page->nccl_why, sizeof(r->page->nccl_why), "rank %u: %s: %s", r->me->rank, what, why);
    return 1;
}

static int load_nccl(struct rank *r)
{
    const char *name = getenv("HREDUCE_NCCL");
    void *lib = dlopen(name ? name : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        return lack_nccl(r, "loading it", dlerror());
    static const char *const symbol[] = {"ncclGetUniqueId", "ncclCommInitRank", "ncclAllReduce",
                                         "ncclCommDestroy", "ncclGetErrorString"};
    void **slot[] = {(void **)&r->nccl.get_unique_id, (void **)&r->nccl.comm_init_rank,
                     (void **)&r->nccl.all_reduce, (void **)&r->nccl.comm_destroy, (void **)&r->nccl.error};
    for (unsigned i = 0; i < sizeof(symbol) / sizeof(symbol[0]); i++)
        if (!(*slot[i] = dlsym(lib, symbol[i])))
            return lack_nccl(r, "it has no", symbol[i]);
    return 0;
}

/* ---- ranks together ------------------------------------------------------------------------------------------------ */

/* Spins: a sleeper would start late. False when another rank failed or does not come. */
static bool barrier(struct rank *r)
{
    struct cmp_page *p = r->page;
    uint64_t end = gj_now_ns() + BARRIER_NS;
    r->round++;
    if (atomic_fetch_add(&p->here, 1) + 1 == r->me->nranks) {
        atomic_store(&p->here, 0);
        atomic_store(&p->round, r->round);
        return true;
    }
    for (unsigned looks = 1; atomic_load(&p->round) != r->round; looks++) {
        if (atomic_load(&p->failed) || gj_now_ns() > end)
            return fail(r, "barrier", "another rank failed or did not come"), false;
        if (looks % 64 == 0)
            sched_yield();
    }
    return true;
}

static double slowest(const struct rank *r)
{
    double us = 0;
    for (unsigned i = 0; i < r->me->nranks; i++)
        us = r->page->us[i] > us ? r->page->us[i] : us;
    return us;
}

static int hreduce_fail(struct rank *r, const char *what)
{
    return fail(r, what, hclient_last_error(r->comm));
}

static void set_overlap(hclient_comm_config_t *config, const char *overlap)
{
    config->overlap = strcmp(overlap, "idle") == 0      ? HCLIENT_OVERLAP_IDLE
                      : strcmp(overlap, "compute") == 0 ? HCLIENT_OVERLAP_COMPUTE
                                                        : HCLIENT_OVERLAP_AUTO;
}

/* Every rank takes part in every step, or none does: NCCL waits for all of them. */
static int join_nccl(struct rank *r)
{
    struct cmp_page *p = r->page;
    struct nccl_id id = {{0}};
    if (!r->o->no_nccl && load_nccl(r) == 0 && r->me->rank == 0 && r->nccl.get_unique_id(&id) != 0)
        lack_nccl(r, "ncclGetUniqueId", "failed");
    if (r->me->rank == 0)
        memcpy(p->nccl_id, &id, sizeof(id));
    if (!barrier(r))
        return 1;
    r->nccl_on = !r->o->no_nccl && !atomic_load(&p->without_nccl);
    if (r->nccl_on) {
        memcpy(&id, p->nccl_id, sizeof(id));
        int err = r->nccl.comm_init_rank(&r->nccl.comm, (int)r->me->nranks, id, (int)r->me->rank);
        if (err)
            lack_nccl(r, "ncclCommInitRank", r->nccl.error(err));
    }
    if (!barrier(r))
        return 1;
    r->nccl_on = r->nccl_on && !atomic_load(&p->without_nccl);
    return 0;
}

static int join(struct rank *r)
{
    struct cmp_page *p = r->page;
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    if (join_nccl(r))
        return 1;
    if (r->me->rank == 0 && hclient_get_unique_id(&p->id) != HCLIENT_OK)
        return hreduce_fail(r, "hclient_get_unique_id");
    if (!barrier(r))
        return 1;
    set_overlap(&config, r->o->overlap);
    if (hclient_comm_init_rank_config(&r->comm, (int)r->me->nranks, p->id, (int)r->me->rank, &config) !=
        HCLIENT_OK)
        return hreduce_fail(r, "hclient_comm_init_rank");
    return 0;
}

/* ---- values -------------------------------------------------------------------------------------------------------- */

/* A whole number from -4 to 3: 32 of them sum up to what bf16 holds exactly. */
static int value(uint64_t seed, unsigned rank, uint64_t i)
{
    uint64_t z = seed + i * UINT64_C(0x9e3779b97f4a7c15) + rank * UINT64_C(0xd1342543de82ef95);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    return (int)(z >> 57 & 7) - 4;
}

static void store(unsigned type, uint8_t *p, uint64_t i, int v)
{
    float f = (float)v;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (type == HRP_F32)
        memcpy(p + i * 4, &bits, 4);
    else
        memcpy(p + i * 2, (uint8_t *)&bits + 2, 2);
}

static void fill(struct rank *r, unsigned type, uint64_t bytes, uint64_t seed)
{
    const uint64_t size = hrp_dtype_size(type);
    for (uint64_t at = 0; at < bytes; at += PIECE) {
        uint64_t n = bytes - at < PIECE ? bytes - at : PIECE;
        for (uint64_t i = 0; i < n / size; i++)
            store(type, r->piece, i, value(seed, r->me->rank, at / size + i));
        gj_upload(&r->gpu, r->send + at, r->piece, n);
    }
}

static void clear(struct rank *r, uint64_t bytes)
{
    gj_check(r->gpu.drv->MemsetD8Async(r->recv, 0xa5, bytes, r->gpu.stream), "clearing a buffer");
    gj_check(r->gpu.drv->StreamSynchronize(r->gpu.stream), "clearing a buffer");
}

static uint64_t count_wrong(struct rank *r, unsigned type, uint64_t bytes, uint64_t seed)
{
    const uint64_t size = hrp_dtype_size(type);
    uint64_t wrong = 0;
    for (uint64_t at = 0; at < bytes; at += PIECE) {
        uint64_t n = bytes - at < PIECE ? bytes - at : PIECE;
        gj_download(&r->gpu, r->piece, r->recv + at, n);
        for (uint64_t i = 0; i < n / size; i++) {
            uint8_t want[4] = {0};
            int sum = 0;
            for (unsigned k = 0; k < r->me->nranks; k++)
                sum += value(seed, k, at / size + i);
            store(type, want, 0, sum);
            /* A sum of zero may have either sign. */
            wrong += memcmp(want, r->piece + i * size, size) != 0 &&
                     !(sum == 0 && (r->piece[i * size + size - 1] & 0x7f) == 0);
        }
        hpf_rank_progress(r->me);
    }
    return wrong;
}

/* ---- ops ----------------------------------------------------------------------------------------------------------- */

static int enqueue(struct rank *r, unsigned c, unsigned type, uint64_t bytes)
{
    const void *send = (const void *)(uintptr_t)r->send;
    void *recv = (void *)(uintptr_t)r->recv;
    uint64_t count = bytes / hrp_dtype_size(type);
    if (c == CMP_NCCL) {
        int err = r->nccl.all_reduce(send, recv, count, type == HRP_F32 ? NCCL_FLOAT32 : NCCL_BFLOAT16,
                                     NCCL_SUM, r->nccl.comm, r->gpu.stream);
        return err ? fail(r, "ncclAllReduce", r->nccl.error(err)) : 0;
    }
    if (hclient_all_reduce(r->comm, send, recv, count, type == HRP_F32 ? HCLIENT_FLOAT32 : HCLIENT_BFLOAT16,
                           HCLIENT_SUM, r->gpu.stream, NULL) != HCLIENT_OK)
        return hreduce_fail(r, "hclient_all_reduce");
    return 0;
}

/* n ops enqueued at a common start; *us: of one, on the slowest rank. */
static int timed(struct rank *r, unsigned c, unsigned type, uint64_t bytes, unsigned n, double *us)
{
    if (!barrier(r))
        return 1;
    uint64_t began = gj_now_ns();
    for (unsigned i = 0; i < n; i++)
        if (enqueue(r, c, type, bytes))
            return 1;
    gj_check(r->gpu.drv->StreamSynchronize(r->gpu.stream), "an all-reduce");
    r->page->us[r->me->rank] = (double)(gj_now_ns() - began) * 1e-3 / n;
    hclient_result_t async = HCLIENT_OK;
    if (c == CMP_HREDUCE &&
        (hclient_comm_get_async_error(r->comm, &async) != HCLIENT_OK || async != HCLIENT_OK))
        return hreduce_fail(r, "all_reduce");
    if (!barrier(r))
        return 1;
    *us = slowest(r);
    return 0;
}

static int check(struct rank *r, struct cmp_row *row, unsigned c, uint64_t seed)
{
    double us;
    clear(r, row->bytes);
    if (timed(r, c, row->type, row->bytes, 1, &us))
        return 1;
    atomic_fetch_add(&r->page->wrong, count_wrong(r, row->type, row->bytes, seed));
    if (!barrier(r))
        return 1;
    row->wrong[c] += atomic_load(&r->page->wrong);
    if (!barrier(r))
        return 1;
    atomic_store(&r->page->wrong, 0);
    return barrier(r) ? 0 : 1;
}

static int measure(struct rank *r, struct cmp_row *row)
{
    double us[CMP_CONTENDERS][MAX_OPS], group[CMP_CONTENDERS][3];
    const unsigned ops = row->bytes <= 1 << 20 ? MAX_OPS : row->bytes <= 16 << 20 ? 25 : 9;
    const unsigned first = r->nccl_on ? CMP_NCCL : CMP_HREDUCE, many = row->bytes <= 4 << 20 ? 50 : 10;
    const uint64_t seed = row->bytes * 31 + row->type;
    double ignored;
    fill(r, row->type, row->bytes, seed);
    for (unsigned c = first; c < CMP_CONTENDERS; c++) {
        if (check(r, row, c, seed))
            return 1;
        for (unsigned i = 0; i < 3; i++)
            if (timed(r, c, row->type, row->bytes, 1, &ignored))
                return 1;
    }
    for (unsigned i = 0; i < ops; i++)
        for (unsigned c = first; c < CMP_CONTENDERS; c++)
            if (timed(r, c, row->type, row->bytes, 1, &us[c][i]))
                return 1;
    for (unsigned i = 0; i < 3; i++)
        for (unsigned c = first; c < CMP_CONTENDERS; c++)
            if (timed(r, c, row->type, row->bytes, many, &group[c][i]))
                return 1;
    for (unsigned c = first; c < CMP_CONTENDERS; c++) {
        row->p50[c] = gj_median(us[c], ops);
        row->back_to_back[c] = gj_median(group[c], 3);
        if (check(r, row, c, seed)) /* after all that, still right */
            return 1;
    }
    return 0;
}

/* ---- the job's own kernels ------------------------------------------------------------------------------------------ */

/* A fold of 64 sources out of the second-level cache keeps every multiprocessor at work. */
static void *busy_thread(void *arg)
{
    struct rank *r = arg;
    struct gj_gpu *g = &r->busy_gpu;
    const struct hrk_fold f = hrk_fold_single(HRP_F32, HRP_SUM, HRG_MAX_SOURCES);
    uint64_t src[HRG_MAX_SOURCES], memory = gj_alloc(g, BUSY_BYTES), dst = gj_alloc(g, BUSY_BYTES), ended = 0;
    struct hrg_launch l;
    gj_use(g);
    for (unsigned i = 0; i < HRG_MAX_SOURCES; i++)
        src[i] = memory;
    while (!atomic_load(&r->busy_stop)) {
        if (hrg_fold_launch(&l, &f, &dst, 1, src, HRG_MAX_SOURCES, BUSY_BYTES / 4, 2 * g->multiprocessors))
            gj_die("a fold was refused");
        gj_launch(g, &l);
        uint64_t over;
        while ((over = atomic_load(g->word)) + BUSY_AHEAD < g->launches)
            usleep(20);
        atomic_fetch_add(&r->page->busy_launches, over - ended);
        ended = over;
    }
    gj_wait(g);
    return NULL;
}

static int busy_window(struct rank *r, int contender, double *rate)
{
    if (!barrier(r))
        return 1;
    uint64_t began = gj_now_ns(), launches = atomic_load(&r->page->busy_launches);
    uint64_t bytes = r->o->max_bytes < UINT64_C(4) << 20 ? r->o->max_bytes : UINT64_C(4) << 20;
    double us;
    while (contender < 0 && gj_now_ns() - began < BUSY_NS)
        usleep(1000);
    /* A fixed number of ops, because all ranks must agree on it. */
    for (unsigned i = 0; contender >= 0 && i < 24; i++)
        if (timed(r, (unsigned)contender, HRP_F32, bytes, 1, &us))
            return 1;
    *rate =
        (double)(atomic_load(&r->page->busy_launches) - launches) / ((double)(gj_now_ns() - began) * 1e-9);
    return barrier(r) ? 0 : 1;
}

static int start_busy(struct rank *r)
{
    double rate[3] = {0};
    gj_open(&r->busy_gpu, r->gpu.drv, r->gpu.ordinal);
    gj_load_kernels(&r->busy_gpu);
    if (pthread_create(&r->busy_thread, NULL, busy_thread, r))
        return fail(r, "busy", "cannot start a thread");
    usleep(100000);
    if (busy_window(r, -1, &rate[0]) || (r->nccl_on && busy_window(r, CMP_NCCL, &rate[1])) ||
        busy_window(r, CMP_HREDUCE, &rate[2]))
        return 1;
    if (r->me->rank == 0)
        memcpy(r->page->busy_rate, rate, sizeof(rate));
    return 0;
}

static int measure_all(struct rank *r)
{
    for (unsigned t = 0; t < r->o->ntypes; t++)
        for (unsigned s = 0; s < r->o->nsizes; s++) {
            struct cmp_row row = {.type = r->o->type[t], .bytes = r->o->size[s]};
            if (measure(r, &row))
                return 1;
            if (r->me->rank == 0)
                r->page->row[r->page->nrows++] = row;
            hpf_rank_progress(r->me);
        }
    return 0;
}

static void keep_path(struct rank *r)
{
    char *path = NULL;
    if (r->me->rank == 0 && hclient_comm_path(r->comm, &path) == HCLIENT_OK)
        snprintf(r->page->path, sizeof(r->page->path), "%s", path);
    hclient_free(path);
}

/* To NCCL each emulated node is a host of its own; so is each rank where ranks share a GPU, which NCCL refuses within one
   host. */
static void name_nccl_host(const struct hpf_rank *me, unsigned ndevices)
{
    char host[32];
    snprintf(host, sizeof(host), "node%u-%u", me->node, me->nranks > ndevices ? me->rank : 0);
    if (me->nnodes > 1 || me->nranks > ndevices)
        setenv("NCCL_HOSTID", host, 1);
}

int cmp_rank(struct hpf_rank *me)
{
    static struct rank rank;
    struct rank *r = &rank;
    int ndevices;
    *r = (struct rank){.me = me, .page = me->shared, .o = me->arg};
    const struct hrg_driver *drv = gj_driver(&ndevices);
    name_nccl_host(me, (unsigned)ndevices);
    gj_open(&r->gpu, drv, (int)me->rank % ndevices);
    r->send = gj_alloc(&r->gpu, r->o->max_bytes);
    r->recv = gj_alloc(&r->gpu, r->o->max_bytes);
    r->piece = gj_pinned(&r->gpu, PIECE, NULL);
    gj_use(&r->gpu);
    if (join(r) || (r->o->busy && start_busy(r)) || measure_all(r))
        return 1;
    if (r->o->busy) {
        atomic_store(&r->busy_stop, true);
        pthread_join(r->busy_thread, NULL);
    }
    keep_path(r);
    if (!barrier(r))
        return 1;
    if (r->nccl.comm)
        (void)r->nccl.comm_destroy(r->nccl.comm);
    return hclient_comm_destroy(r->comm) == HCLIENT_OK ? 0 : hreduce_fail(r, "hclient_comm_destroy");
}
