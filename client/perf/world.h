/* SPDX-License-Identifier: MIT */
/*
 * One rank's view of a run of hreduce-perf: its communicator, the layout of the ranks, its buffers. Functions
 * return 0, or -1 with the sentence in w->err.
 */
#ifndef HPF_WORLD_H
#define HPF_WORLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/hclient.h"
#include "client/perf/expect.h"
#include "client/perf/options.h"
#include "client/perf/ranks.h"

#define HPF_GUARD ((size_t)4096)
#define HPF_FLIGHT 4u /* operations in flight with --blocking 0 */

/* What the ranks of --local share; `expected` is sized for the largest all_reduce. */
struct hpf_page {
    hclient_unique_id_t id;
    _Alignas(64) unsigned char expected[];
};

/* Memory with room for a guard before and behind the data. */
struct hpf_region {
    unsigned char *base;
    size_t bytes;    /* of the data it can hold */
    uint64_t device; /* --gpu: its twin there */
};

struct hpf_gpu;

struct hpf_world {
    const struct hpf_options *o;
    struct hpf_rank *local; /* NULL under a launcher */
    struct hpf_page *page;  /* NULL under a launcher */
    hclient_comm_t comm;
    hclient_comm_info_t info;
    unsigned rank, nranks, nnodes, node;
    unsigned *node_of_rank;
    bool leader; /* lowest rank of its node: asks the daemon */
    bool exact, wire_f32;
    uint64_t seed;
    unsigned nslots; /* buffers per direction: operations in flight */
    struct hpf_region send[HPF_FLIGHT], recv[HPF_FLIGHT];
    struct hpf_gpu *gpu; /* NULL without --gpu */
    double *mine, *all;  /* for hpf_world_share(): up to nstats numbers of this rank, and of all */
    size_t nstats;
    char err[1600];
};

int hpf_world_fail(struct hpf_world *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The same for a call of the library: adds its sentence. */
int hpf_world_call_failed(struct hpf_world *w, hclient_result_t result, const char *what);

/* Joins the communicator and learns the layout. local and page NULL: under a launcher. */
int hpf_world_init(struct hpf_world *w, const struct hpf_options *o, struct hpf_rank *local,
                   struct hpf_page *page);
/* Buffers for the largest size. */
int hpf_world_alloc(struct hpf_world *w);
/* Destroys what init and alloc made; may be called after either failed. */
void hpf_world_free(struct hpf_world *w);

/* n numbers of every rank: from w->mine into w->all, those of rank r at w->all[r * n]. */
int hpf_world_share(struct hpf_world *w, size_t n);
/* Returns when all ranks are here, by a barrier of the library. */
int hpf_world_barrier(struct hpf_world *w);
/* What this node's daemon has counted for this communicator since it was made. */
#define HPF_NALGOS 6
struct hpf_counters {
    uint64_t tx_bytes;             /* sent to other nodes, headers included */
    uint64_t algo_ops[HPF_NALGOS]; /* by hpf_algo_name() */
};
int hpf_world_counters(struct hpf_world *w, struct hpf_counters *counters);
const char *hpf_algo_name(unsigned algo);
/* The path report, to be freed with hclient_free(). */
int hpf_world_path(struct hpf_world *w, char **json);

/* Bytes of memory that one rank needs for these options. */
uint64_t hpf_world_memory(const struct hpf_options *o, unsigned nranks);
/* Elements of the call for a size of the whole data. */
uint64_t hpf_count_of(const struct hpf_options *o, unsigned dtype, uint64_t bytes, unsigned nranks);

#endif
