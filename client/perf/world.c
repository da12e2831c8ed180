/* SPDX-License-Identifier: MIT */
#include "client/perf/world.h"

#include "client/perf/gpu.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "client/perf/json.h"
#include "proto/types.h"

/* The numbers of the library are those of proto/, which this program's own arithmetic uses. */
_Static_assert((int)HCLIENT_BFLOAT16 == (int)HRP_BF16 && (int)HCLIENT_UINT64 == (int)HRP_U64, "types");
_Static_assert((int)HCLIENT_SUM == (int)HRP_SUM && (int)HCLIENT_AVG == (int)HRP_AVG, "reductions");

int hpf_world_fail(struct hpf_world *w, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(w->err, sizeof(w->err), fmt, ap);
    va_end(ap);
    return -1;
}

int hpf_world_call_failed(struct hpf_world *w, hclient_result_t result, const char *what)
{
    /* Of this thread's last failing call first: it is the one that was just made. */
    const char *why = hclient_last_error(NULL);
    if (!why[0] && w->comm)
        why = hclient_last_error(w->comm);
    return hpf_world_fail(w, "%s failed (%s): %s", what, hclient_strerror(result), why);
}

/* ---- joining --------------------------------------------------------------------------------------------- */

static void fill_config(const struct hpf_options *o, hclient_comm_config_t *config)
{
    config->setup_timeout_ms = o->timeout_s * 1000;
    config->op_timeout_ms = o->timeout_s * 1000;
    config->algo = (int)o->algo;
    config->overlap = (int)o->overlap;
    config->reproducible = o->reproducible;
    config->wire_f32 = o->wire_f32;
}

static int join(struct hpf_world *w)
{
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    fill_config(w->o, &config);
    hclient_result_t r;
    if (!w->local) {
        if (!getenv("RANK") && !getenv("OMPI_COMM_WORLD_RANK") && !getenv("SLURM_PROCID"))
            return hpf_world_fail(
                w, "no launcher's variables are set: start the ranks with torchrun, mpirun or srun, "
                   "or try --local 2x2, which starts daemons and ranks on this machine");
        r = hclient_comm_init_name(&w->comm, w->o->name, &config);
        return r == HCLIENT_OK ? 0 : hpf_world_call_failed(w, r, "joining the communicator");
    }
    if (w->local->rank == 0 && (r = hclient_get_unique_id(&w->page->id)) != HCLIENT_OK)
        return hpf_world_call_failed(w, r, "asking the daemon for an id");
    if (hpf_rank_barrier(w->local, false, w->o->timeout_s * 1000) < 0)
        return hpf_world_fail(w, "the other ranks did not start");
    r = hclient_comm_init_rank_config(&w->comm, (int)w->local->nranks, w->page->id, (int)w->local->rank,
                                      &config);
    return r == HCLIENT_OK ? 0 : hpf_world_call_failed(w, r, "joining the communicator");
}

static uint64_t hash_text(const char *s)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    while (*s)
        h = (h ^ (unsigned char)*s++) * UINT64_C(0x100000001b3);
    return h;
}

/* Each rank tells its node's index; the order in which partials are added depends on it. */
static int learn_layout(struct hpf_world *w)
{
    w->mine[0] = w->node;
    if (hpf_world_share(w, 1) < 0)
        return -1;
    w->leader = true;
    for (unsigned r = 0; r < w->nranks; r++) {
        w->node_of_rank[r] = (unsigned)w->all[r];
        if (w->node_of_rank[r] >= w->nnodes)
            return hpf_world_fail(w, "rank %u says that it is on node %u of %u: all_gather does not work", r,
                                  w->node_of_rank[r], w->nnodes);
        if (r < w->rank && w->node_of_rank[r] == w->node)
            w->leader = false;
    }
    if (w->node_of_rank[w->rank] != w->node)
        return hpf_world_fail(w, "all_gather returned node %u for rank %u, which is on node %u",
                              w->node_of_rank[w->rank], w->rank, w->node);
    return 0;
}

/* Whether sums are defined comes from the daemon when the command line does not say. */
static int learn_mode(struct hpf_world *w)
{
    char *text = NULL;
    struct hpf_json path, v;
    char word[16];
    w->exact = w->o->reproducible != HCLIENT_OFF;
    w->wire_f32 = w->o->wire_f32 == HCLIENT_ON;
    if (hpf_world_path(w, &text) < 0)
        return -1;
    if (hpf_json_parse(text, &path)) {
        if (hpf_json_member(path, "reproducible", &v))
            w->exact = *v.at == 't';
        if (hpf_json_member(path, "wire", &v) && hpf_json_string(v, word, sizeof(word)))
            w->wire_f32 = strcmp(word, "f32") == 0;
    }
    hclient_free(text);
    return 0;
}

int hpf_world_init(struct hpf_world *w, const struct hpf_options *o, struct hpf_rank *local,
                   struct hpf_page *page)
{
    memset(w, 0, sizeof(*w));
    w->o = o;
    w->local = local;
    w->page = page;
    w->info = (hclient_comm_info_t)HCLIENT_COMM_INFO_INITIALIZER;
    if (join(w) < 0)
        return -1;
    hclient_result_t r = hclient_comm_get_info(w->comm, &w->info);
    if (r != HCLIENT_OK)
        return hpf_world_call_failed(w, r, "asking for the layout");
    w->rank = (unsigned)w->info.rank;
    w->nranks = (unsigned)w->info.nranks;
    w->nnodes = (unsigned)w->info.nnodes;
    w->node = (unsigned)w->info.node;
    w->seed = hash_text(w->info.id);
    if (o->root >= w->nranks)
        return hpf_world_fail(w, "root %u is no rank of %u", o->root, w->nranks);

    w->nstats = o->iters + 4;
    w->node_of_rank = calloc(w->nranks, sizeof(*w->node_of_rank));
    w->mine = calloc(w->nstats, sizeof(double));
    w->all = calloc(w->nstats * w->nranks, sizeof(double));
    if (!w->node_of_rank || !w->mine || !w->all)
        return hpf_world_fail(w, "out of memory");
    if (learn_layout(w) < 0)
        return -1;
    return learn_mode(w);
}

/* ---- memory ---------------------------------------------------------------------------------------------- */

uint64_t hpf_count_of(const struct hpf_options *o, unsigned dtype, uint64_t bytes, unsigned nranks)
{
    uint64_t n = bytes / hrp_dtype_size(dtype);
    return o->coll == HRP_REDUCE_SCATTER || o->coll == HRP_ALL_GATHER ? n / nranks : n;
}

/* Bytes of the send and receive buffers at the largest size, whatever the type. */
static void sizes(const struct hpf_options *o, unsigned nranks, size_t *send, size_t *recv)
{
    *send = o->coll == HRP_ALL_GATHER ? o->max_bytes / nranks : o->max_bytes;
    *recv = o->coll == HRP_REDUCE_SCATTER ? o->max_bytes / nranks : o->max_bytes;
}

uint64_t hpf_world_memory(const struct hpf_options *o, unsigned nranks)
{
    size_t send, recv;
    sizes(o, nranks, &send, &recv);
    return (send + recv + 4 * HPF_GUARD) * (o->blocking ? 1 : HPF_FLIGHT);
}

static int region_new(struct hpf_world *w, struct hpf_region *region, size_t bytes)
{
    size_t total = bytes + 2 * HPF_GUARD;
    void *p = NULL;
    if (w->gpu)
        return hpf_gpu_region_new(w, region, bytes);
    if (w->o->plain) {
        p = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED)
            return hpf_world_fail(w, "no memory for a buffer of %zu bytes", total);
    } else {
        hclient_result_t r = hclient_mem_alloc(&p, total);
        if (r != HCLIENT_OK)
            return hpf_world_call_failed(w, r, "hclient_mem_alloc()");
    }
    region->base = p;
    region->bytes = bytes;
    return 0;
}

static void region_free(struct hpf_world *w, struct hpf_region *region)
{
    if (!region->base)
        return;
    if (w->gpu)
        hpf_gpu_region_free(w, region);
    else if (w->o->plain)
        munmap(region->base, region->bytes + 2 * HPF_GUARD);
    else
        hclient_mem_free(region->base);
    region->base = NULL;
}

int hpf_world_alloc(struct hpf_world *w)
{
    size_t send, recv;
    sizes(w->o, w->nranks, &send, &recv);
    w->nslots = w->o->blocking ? 1 : HPF_FLIGHT;
    if (w->o->gpu && hpf_gpu_open(w) < 0)
        return -1;
    for (unsigned i = 0; i < w->nslots; i++)
        if (region_new(w, &w->send[i], send) < 0 || region_new(w, &w->recv[i], recv) < 0)
            return -1;
    return 0;
}

void hpf_world_free(struct hpf_world *w)
{
    if (w->comm)
        hclient_comm_destroy(w->comm);
    w->comm = NULL;
    for (unsigned i = 0; i < HPF_FLIGHT; i++) {
        region_free(w, &w->send[i]);
        region_free(w, &w->recv[i]);
    }
    hpf_gpu_close(w);
    free(w->node_of_rank);
    free(w->mine);
    free(w->all);
    w->node_of_rank = NULL;
    w->mine = w->all = NULL;
}

/* ---- talking --------------------------------------------------------------------------------------------- */

int hpf_world_share(struct hpf_world *w, size_t n)
{
    hclient_op_t op;
    hclient_result_t r = hclient_all_gather(w->comm, w->mine, w->all, n, HCLIENT_FLOAT64, NULL, &op);
    if (r == HCLIENT_OK)
        r = hclient_wait(op);
    return r == HCLIENT_OK ? 0 : hpf_world_call_failed(w, r, "exchanging the measurements by all_gather");
}

int hpf_world_barrier(struct hpf_world *w)
{
    hclient_op_t op;
    hclient_result_t r = hclient_barrier(w->comm, NULL, &op);
    if (r == HCLIENT_OK)
        r = hclient_wait(op);
    return r == HCLIENT_OK ? 0 : hpf_world_call_failed(w, r, "barrier");
}

int hpf_world_path(struct hpf_world *w, char **json)
{
    hclient_result_t r = hclient_comm_path(w->comm, json);
    return r == HCLIENT_OK ? 0 : hpf_world_call_failed(w, r, "asking for the path");
}

const char *hpf_algo_name(unsigned algo)
{
    static const char *const names[HPF_NALGOS] = {"local", "direct", "gather", "pairwise", "ring", "tree"};
    return algo < HPF_NALGOS ? names[algo] : "unknown";
}

int hpf_world_counters(struct hpf_world *w, struct hpf_counters *c)
{
    char *text = NULL;
    struct hpf_json path, v, ops;
    memset(c, 0, sizeof(*c));
    if (hpf_world_path(w, &text) < 0)
        return -1;
    bool ok = hpf_json_parse(text, &path) && hpf_json_member(path, "tx_bytes", &v) &&
              hpf_json_uint(v, &c->tx_bytes) && hpf_json_member(path, "algorithms", &ops);
    for (unsigned i = 0; ok && i < HPF_NALGOS; i++)
        if (hpf_json_member(ops, hpf_algo_name(i), &v))
            ok = hpf_json_uint(v, &c->algo_ops[i]);
    hclient_free(text);
    return ok ? 0 : hpf_world_fail(w, "the daemon's path report has no counts of sent bytes and algorithms");
}
