/* SPDX-License-Identifier: MIT */
/* One rank of tests/gpu/compare.c: joins both communicators, measures, checks. */
#include "tests/lib/compare.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/types.h"

#define MAX_OPS 64
#define BUSY_BYTES (UINT64_C(8) << 20)
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
    struct gr_rank g;
    struct cmp_page *page;
    const struct cmp_options *o;
    struct nccl nccl;
    bool nccl_on; /* on all ranks alike */
};

/* Without NCCL there is still something to measure: all ranks go on without it. */
static int lack_nccl(struct rank *r, const char *what, const char *why)
{
    if (atomic_fetch_add(&r->page->without_nccl, 1) == 0)
        snprintf(r->page->nccl_why, sizeof(r->page->nccl_why), "rank %u: %s: %s", r->g.me->rank, what, why);
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

/* ---- joining ------------------------------------------------------------------------------------------------------- */

/* Every rank takes part in every step, or none does: NCCL waits for all of them. */
static int join_nccl(struct rank *r)
{
    struct cmp_page *p = r->page;
    struct nccl_id id = {{0}};
    if (!r->o->no_nccl && load_nccl(r) == 0 && r->g.me->rank == 0 && r->nccl.get_unique_id(&id) != 0)
        lack_nccl(r, "ncclGetUniqueId", "failed");
    if (r->g.me->rank == 0)
        memcpy(p->nccl_id, &id, sizeof(id));
    if (!gr_meet(&r->g))
        return 1;
    r->nccl_on = !r->o->no_nccl && !atomic_load(&p->without_nccl);
    if (r->nccl_on) {
        memcpy(&id, p->nccl_id, sizeof(id));
        int err = r->nccl.comm_init_rank(&r->nccl.comm, (int)r->g.me->nranks, id, (int)r->g.me->rank);
        if (err)
            lack_nccl(r, "ncclCommInitRank", r->nccl.error(err));
    }
    if (!gr_meet(&r->g))
        return 1;
    r->nccl_on = r->nccl_on && !atomic_load(&p->without_nccl);
    return 0;
}

/* ---- ops ----------------------------------------------------------------------------------------------------------- */

static int nccl_all_reduce(struct gr_rank *g, unsigned type, uint64_t bytes)
{
    struct rank *r = (struct rank *)((char *)g - offsetof(struct rank, g));
    int err = r->nccl.all_reduce((const void *)(uintptr_t)g->send, (void *)(uintptr_t)g->recv,
                                 bytes / hrp_dtype_size(type), type == HRP_F32 ? NCCL_FLOAT32 : NCCL_BFLOAT16,
                                 NCCL_SUM, r->nccl.comm, g->gpu.stream);
    return err ? gr_fail(g, "ncclAllReduce", r->nccl.error(err)) : 0;
}

static int timed(struct rank *r, unsigned c, unsigned type, uint64_t bytes, unsigned n, double *us)
{
    return gr_timed(&r->g, c == CMP_NCCL ? nccl_all_reduce : gr_all_reduce, type, bytes, n, us);
}

static int check(struct rank *r, struct cmp_row *row, unsigned c, uint64_t seed)
{
    double us;
    gr_clear(&r->g, row->bytes);
    if (timed(r, c, row->type, row->bytes, 1, &us))
        return 1;
    return gr_sum_wrong(&r->g, gr_count_wrong(&r->g, row->type, row->bytes, seed), &row->wrong[c]);
}

static int measure(struct rank *r, struct cmp_row *row)
{
    double us[CMP_CONTENDERS][MAX_OPS], group[CMP_CONTENDERS][3];
    const unsigned ops = row->bytes <= 1 << 20 ? MAX_OPS : row->bytes <= 16 << 20 ? 25 : 9;
    const unsigned first = r->nccl_on ? CMP_NCCL : CMP_HREDUCE, many = row->bytes <= 4 << 20 ? 50 : 10;
    const uint64_t seed = row->bytes * 31 + row->type;
    double ignored;
    gr_fill(&r->g, row->type, row->bytes, seed);
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

static int busy_window(struct rank *r, int contender, double *rate)
{
    if (!gr_meet(&r->g))
        return 1;
    uint64_t began = gj_now_ns(), launches = atomic_load(&r->page->ranks.busy_launches);
    uint64_t bytes = r->o->max_bytes < UINT64_C(4) << 20 ? r->o->max_bytes : UINT64_C(4) << 20;
    double us;
    while (contender < 0 && gj_now_ns() - began < BUSY_NS)
        usleep(1000);
    /* A fixed number of ops, because all ranks must agree on it. */
    for (unsigned i = 0; contender >= 0 && i < 24; i++)
        if (timed(r, (unsigned)contender, HRP_F32, bytes, 1, &us))
            return 1;
    *rate = (double)(atomic_load(&r->page->ranks.busy_launches) - launches) /
            ((double)(gj_now_ns() - began) * 1e-9);
    return gr_meet(&r->g) ? 0 : 1;
}

static int start_busy(struct rank *r)
{
    double rate[3] = {0};
    if (gr_busy_start(&r->g, BUSY_BYTES))
        return 1;
    usleep(100000);
    if (busy_window(r, -1, &rate[0]) || (r->nccl_on && busy_window(r, CMP_NCCL, &rate[1])) ||
        busy_window(r, CMP_HREDUCE, &rate[2]))
        return 1;
    if (r->g.me->rank == 0)
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
            if (r->g.me->rank == 0)
                r->page->row[r->page->nrows++] = row;
            hpf_rank_progress(r->g.me);
        }
    return 0;
}

static void keep_path(struct rank *r)
{
    char *path = NULL;
    if (r->g.me->rank == 0 && hclient_comm_path(r->g.comm, &path) == HCLIENT_OK)
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
    r->page = me->shared;
    r->o = me->arg;
    r->g.me = me;
    r->g.page = &r->page->ranks;
    const struct hrg_driver *drv = gj_driver(&ndevices);
    name_nccl_host(me, (unsigned)ndevices);
    gr_open(&r->g, drv, (int)me->rank % ndevices, r->o->max_bytes);
    if (join_nccl(r) || gr_join(&r->g, r->o->overlap) || (r->o->busy && start_busy(r)) || measure_all(r))
        return 1;
    if (r->o->busy)
        gr_busy_stop(&r->g);
    keep_path(r);
    if (!gr_meet(&r->g))
        return 1;
    if (r->nccl.comm)
        (void)r->nccl.comm_destroy(r->nccl.comm);
    return hclient_comm_destroy(r->g.comm) == HCLIENT_OK ? 0 : gr_call_failed(&r->g, "hclient_comm_destroy");
}
