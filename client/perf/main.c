/* SPDX-License-Identifier: MIT */
/*
 * hreduce-perf: measures and checks the collectives as a job sees them. options.c says what can be asked for,
 * world.c joins the ranks, bench.c runs one size, table.c prints; cluster.c and ranks.c make the daemons and
 * processes of --local.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/perf/bench.h"
#include "client/perf/cluster.h"
#include "client/perf/options.h"
#include "client/perf/ranks.h"
#include "client/perf/table.h"
#include "client/perf/world.h"
#include "proto/types.h"

/* ---- one rank -------------------------------------------------------------------------------------------- */

/* A line that is overwritten by the next, on a terminal only; elsewhere the rows are the progress. */
static void progress(const struct hpf_world *w, unsigned dtype, unsigned redop, uint64_t bytes, bool inplace)
{
    char size[32];
    if (w->rank != 0 || !isatty(STDERR_FILENO))
        return;
    fprintf(stderr, "\r\033[K%s, %s %s, %s, %s ...", hrp_coll_name(w->o->coll), hpf_type_name(dtype),
            hrp_redop_name(redop), hpf_size_text(bytes, size, sizeof(size)),
            inplace ? "in place" : "out of place");
    fflush(stderr);
}

static void progress_end(const struct hpf_world *w)
{
    if (w->rank == 0 && isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
}

static int run_size(struct hpf_world *w, struct hpf_results *results, unsigned dtype, unsigned redop,
                    uint64_t bytes)
{
    bool both = w->o->coll != HRP_BARRIER;
    struct hpf_result r[2];
    for (unsigned k = 0; k < (both ? 2u : 1u); k++) {
        progress(w, dtype, redop, bytes, k == 1);
        if (hpf_bench(w, dtype, redop, bytes, k == 1, &r[k]) < 0)
            return -1;
        progress_end(w);
        struct hpf_result *kept = hpf_results_add(results);
        if (!kept)
            return hpf_world_fail(w, "out of memory");
        *kept = r[k];
    }
    if (w->rank == 0)
        hpf_table_row(w, &r[0], both ? &r[1] : NULL);
    return 0;
}

static int run_sizes(struct hpf_world *w, struct hpf_results *results, unsigned dtype, unsigned redop)
{
    const struct hpf_options *o = w->o;
    for (uint64_t bytes = o->min_bytes; bytes <= o->max_bytes;) {
        if (run_size(w, results, dtype, redop, bytes) < 0)
            return -1;
        uint64_t next = o->step_bytes ? bytes + o->step_bytes : bytes * o->factor;
        if (next <= bytes) /* a single size of 0, or a factor of 1 */
            break;
        bytes = next;
    }
    return 0;
}

static int run_all(struct hpf_world *w, struct hpf_results *results)
{
    const struct hpf_options *o = w->o;
    unsigned first_type = o->dtype == HPF_ALL ? 0 : o->dtype,
             last_type = o->dtype == HPF_ALL ? HRP_NDTYPES - 1 : o->dtype;
    unsigned first_op = o->redop == HPF_ALL ? 0 : o->redop,
             last_op = o->redop == HPF_ALL ? HRP_NREDOPS - 1 : o->redop;
    for (unsigned t = first_type; t <= last_type; t++)
        for (unsigned op = first_op; op <= last_op; op++)
            if (run_sizes(w, results, t, op) < 0)
                return -1;
    return 0;
}

/* Before the work is done, not after it. */
static int json_writable(struct hpf_world *w)
{
    FILE *f = w->o->json && w->rank == 0 ? fopen(w->o->json, "ae") : NULL;
    if (w->o->json && w->rank == 0 && !f)
        return hpf_world_fail(w, "cannot write %s: %s", w->o->json, strerror(errno));
    if (f)
        fclose(f);
    return 0;
}

static int write_json(struct hpf_world *w, const struct hpf_results *results, const char *path)
{
    FILE *f = fopen(w->o->json, "we");
    if (!f)
        return hpf_world_fail(w, "cannot write %s: %s", w->o->json, strerror(errno));
    hpf_json_write(f, w, results, path);
    if (fclose(f) != 0)
        return hpf_world_fail(w, "cannot write %s: %s", w->o->json, strerror(errno));
    return 0;
}

/* Rank 0's summary. *wrong is the number of wrong elements. */
static int report(struct hpf_world *w, const struct hpf_results *results, uint64_t *wrong)
{
    char *path = NULL;
    if (hpf_world_path(w, &path) < 0)
        return -1;
    *wrong = hpf_table_foot(w, results, path);
    int rc = w->o->json ? write_json(w, results, path) : 0;
    hclient_free(path);
    return rc;
}

static int run(struct hpf_world *w, const struct hpf_options *o, struct hpf_rank *local,
               struct hpf_page *page, uint64_t *wrong)
{
    struct hpf_results results = {0};
    int rc = hpf_world_init(w, o, local, page);
    if (rc == 0)
        rc = json_writable(w);
    if (rc == 0)
        rc = hpf_world_alloc(w);
    if (rc == 0 && w->rank == 0)
        hpf_table_head(w);
    if (rc == 0)
        rc = run_all(w, &results);
    /* Every rank knows every result, so that every process's exit status says whether all was right. */
    for (size_t i = 0; rc == 0 && i < results.n; i++)
        *wrong += results.list[i].wrong;
    if (rc == 0 && w->rank == 0)
        rc = report(w, &results, wrong);
    /* Nobody leaves while another still works on the communicator: that would be a lost rank to it. */
    if (rc == 0)
        rc = hpf_world_barrier(w);
    free(results.list);
    return rc;
}

/* ---- on this machine alone ------------------------------------------------------------------------------- */

static int local_rank(struct hpf_rank *me)
{
    struct hpf_world w;
    uint64_t wrong = 0;
    int rc = run(&w, me->arg, me, me->shared, &wrong);
    progress_end(&w);
    if (rc < 0)
        hpf_rank_fail(me, "%s", w.err);
    else if (wrong)
        hpf_rank_fail(me, "wrong results (see the column #wrong)");
    hpf_world_free(&w);
    return rc < 0 || wrong ? 1 : 0;
}

static bool fits(const struct hpf_options *o, unsigned nranks, size_t shared)
{
    uint64_t need = hpf_world_memory(o, nranks) * nranks + shared,
             have = hpf_proc_kib("/proc/meminfo", "MemAvailable") << 10;
    char a[32], b[32];
    if (have == 0 || need < have)
        return true;
    fprintf(stderr,
            "hreduce-perf: %u ranks need %s of memory for buffers of this size, and %s are available; use "
            "fewer ranks or a smaller -e\n",
            nranks, hpf_size_text(need >> 20 << 20, a, sizeof(a)),
            hpf_size_text(have >> 20 << 20, b, sizeof(b)));
    return false;
}

static int run_ranks(struct hpf_cluster *cluster, struct hpf_options *o)
{
    unsigned nranks = o->local_nodes * o->local_ranks;
    size_t shared = sizeof(struct hpf_page) + (o->coll == HRP_ALL_REDUCE && o->check ? o->max_bytes : 0);
    char err[2048];
    if (!fits(o, nranks, shared))
        return 1;
    unsigned *map = calloc(nranks, sizeof(*map));
    if (!map)
        return 1;
    for (unsigned r = 0; r < nranks; r++)
        map[r] = o->round_robin ? r % o->local_nodes : r / o->local_ranks;
    struct hpf_job_options options = {
        .nranks = nranks, .node_of_rank = map, .fn = local_rank, .arg = o, .shared_bytes = shared};
    struct hpf_job *job = NULL;
    int rc = hpf_job_start(&job, cluster, &options, err, sizeof(err));
    /* The daemon judges an op by the same time first, and says more. */
    if (rc == 0)
        rc = hpf_job_wait(job, (o->timeout_s + 20) * 1000, err, sizeof(err));
    if (rc < 0)
        fprintf(stderr, "hreduce-perf: %s\n", err);
    hpf_job_free(job);
    free(map);
    return rc < 0 ? 1 : 0;
}

static int run_local(struct hpf_options *o)
{
    char err[2048];
    struct hpf_cluster *cluster = NULL;
    struct hpf_cluster_options options = {
        .nnodes = o->local_nodes, .keys = o->keys, .nkeys = o->nkeys, .keep_logs = o->keep_logs};
    hpf_catch_signals();
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "starting %u daemons and %u ranks ...\n", o->local_nodes,
                o->local_nodes * o->local_ranks);
    if (hpf_cluster_new(&cluster, &options, err, sizeof(err)) < 0) {
        fprintf(stderr, "hreduce-perf: %s\n", err);
        return 1;
    }
    int status = run_ranks(cluster, o);
    if (hpf_cluster_free(cluster, err, sizeof(err)) < 0) {
        fprintf(stderr, "hreduce-perf: %s\n", err);
        status = 1;
    }
    return hpf_signal_seen ? 128 + hpf_signal_seen : status;
}

/* ---- under a launcher ------------------------------------------------------------------------------------ */

static int run_attached(struct hpf_options *o)
{
    struct hpf_world w;
    uint64_t wrong = 0;
    int rc = run(&w, o, NULL, NULL, &wrong);
    progress_end(&w);
    if (rc < 0)
        fprintf(stderr, "hreduce-perf: rank %u: %s\n", w.rank, w.err);
    hpf_world_free(&w);
    return rc < 0 || wrong ? 1 : 0;
}

int main(int argc, char **argv)
{
    struct hpf_options o;
    switch (hpf_options_parse(&o, argc, argv)) {
    case HPF_EXIT_OK:
        return 0;
    case HPF_USAGE:
        return 2;
    default:
        return o.local_nodes ? run_local(&o) : run_attached(&o);
    }
}
