/* SPDX-License-Identifier: MIT */
/*
 * The ranks of a job as forked processes of this one, dealt over the nodes of a local cluster. Like the
 * daemons they die with the process that started them. One thread starts, waits for and frees a job; the
 * functions that take a struct hpf_rank are for the rank processes.
 *
 * The starting process must not have used libhclient before: the library is inert in a forked child.
 */
#ifndef HPF_RANKS_H
#define HPF_RANKS_H

#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/perf/cluster.h"

struct hpf_job;

/* What a rank process knows of itself. */
struct hpf_rank {
    unsigned rank, nranks;
    unsigned node, nnodes; /* as started; the library's node index may be another */
    unsigned local;        /* how many lower ranks live on the same node */
    const unsigned *node_of_rank;
    void *shared; /* zeroed memory that all ranks and the parent share, as many bytes as were asked for */
    void *arg;
    struct hpf_job *job;
};

/* Runs in the rank's process; the result is its exit status. */
typedef int (*hpf_rank_fn)(struct hpf_rank *me);

struct hpf_job_options {
    unsigned nranks;
    const unsigned *node_of_rank; /* [nranks]; NULL: blocks, rank r on node r / (nranks / nnodes) */
    hpf_rank_fn fn;
    void *arg; /* handed to every rank (a copy of the address space, not shared) */
    size_t shared_bytes;
};

/* Forks the ranks; HREDUCE_SOCKET names the socket of each one's node. 0, or -1 with a sentence. */
int hpf_job_start(struct hpf_job **out, struct hpf_cluster *c, const struct hpf_job_options *options,
                  char *err, size_t errlen);
/*
 * Waits for all ranks. After the first failure the others have a few seconds to end by themselves; when no
 * rank made progress (hpf_rank_progress, or an exit) for timeout_ms, all are killed. 0 when every rank ended
 * with status 0, or -1 and the sentence of the rank that failed first.
 */
int hpf_job_wait(struct hpf_job *job, unsigned timeout_ms, char *err, size_t errlen);
/* A signal for one rank, as part of a test: the rank's death is then no failure. SIGKILL is waited for. */
void hpf_job_kill(struct hpf_job *job, unsigned rank, int sig);
pid_t hpf_job_pid(const struct hpf_job *job, unsigned rank);
/* waitpid() status of a rank that ended; -1 while it runs. */
int hpf_job_status(struct hpf_job *job, unsigned rank);
/* The sentence that a rank left by hpf_rank_fail(), "" if none. */
const char *hpf_job_error(const struct hpf_job *job, unsigned rank);
void *hpf_job_shared(struct hpf_job *job);
/* Kills what still runs. NULL is allowed. */
void hpf_job_free(struct hpf_job *job);

/* Records why this rank fails; the first sentence of the job is the one its user sees. Returns 1. */
int hpf_rank_fail(struct hpf_rank *me, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Tells the waiting parent that this rank is not stuck. */
void hpf_rank_progress(struct hpf_rank *me);
/*
 * Waits, without libhclient, until all ranks (and with_parent: the parent, by hpf_job_barrier) are here. 0,
 * or -1 with hpf_rank_fail() done when someone does not come or another rank has failed.
 */
int hpf_rank_barrier(struct hpf_rank *me, bool with_parent, unsigned timeout_ms);
/* The parent's side of it: false when a rank did not come or ended. */
bool hpf_job_barrier(struct hpf_job *job, unsigned timeout_ms);

/* SIGINT, SIGTERM and SIGHUP end every wait above early; hpf_signal_seen is then the signal. */
extern volatile sig_atomic_t hpf_signal_seen;
void hpf_catch_signals(void);

#endif
