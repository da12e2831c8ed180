/* SPDX-License-Identifier: MIT */
#include "client/perf/ranks.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RANK_TEXT 1500
/* Others learn of a failure from the daemons within a second; then they have work to undo. */
#define GRACE_MS 8000
#define POLL_MS 50

struct rank_note {
    char error[RANK_TEXT];
};

/* A barrier: arrivals of this round and the number of the round, whose change releases it. */
struct meeting {
    _Atomic uint32_t arrived;
    _Atomic uint32_t round;
};

/* Shared by all processes of the job. */
struct job_page {
    _Atomic uint32_t first_error; /* rank + 1 */
    _Atomic uint64_t progress;
    struct meeting ranks, all; /* of the ranks; of the ranks and the parent */
    struct rank_note note[];
};

struct hpf_job {
    unsigned nranks, nnodes;
    unsigned *node_of_rank;
    pid_t *pid;
    int *status; /* -1: runs */
    bool *killed;
    struct job_page *page;
    size_t page_bytes;
    void *shared;
    size_t shared_bytes;
};

volatile sig_atomic_t hpf_signal_seen;

static void on_signal(int sig)
{
    if (sig != SIGCHLD)
        hpf_signal_seen = sig;
}

void hpf_catch_signals(void)
{
    struct sigaction sa = {.sa_handler = on_signal};
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    sigaction(SIGHUP, &sa, NULL);
}

/* ---- in the rank ----------------------------------------------------------------------------------------- */

int hpf_rank_fail(struct hpf_rank *me, const char *fmt, ...)
{
    struct job_page *page = me->job->page;
    char *text = page->note[me->rank].error;
    if (!text[0]) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(text, RANK_TEXT, fmt, ap);
        va_end(ap);
    }
    uint32_t none = 0;
    atomic_compare_exchange_strong(&page->first_error, &none, me->rank + 1);
    return 1;
}

void hpf_rank_progress(struct hpf_rank *me)
{
    atomic_fetch_add_explicit(&me->job->page->progress, 1, memory_order_relaxed);
}

/* expected: arrivals that complete the round. False on timeout or when stop() says that it is pointless. */
static bool meet(struct hpf_job *job, struct meeting *m, uint32_t expected, unsigned timeout_ms,
                 bool (*stop)(struct hpf_job *))
{
    uint32_t round = atomic_load(&m->round);
    if (atomic_fetch_add(&m->arrived, 1) + 1 == expected) {
        atomic_store(&m->arrived, 0);
        atomic_fetch_add(&m->round, 1);
        syscall(SYS_futex, &m->round, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
        return true;
    }
    long long deadline = hpf_now_ms() + timeout_ms;
    while (atomic_load(&m->round) == round) {
        if (hpf_now_ms() > deadline || stop(job))
            return false;
        struct timespec ts = {.tv_nsec = POLL_MS * 1000000L};
        syscall(SYS_futex, &m->round, FUTEX_WAIT, round, &ts, NULL, 0);
    }
    return true;
}

static bool someone_failed(struct hpf_job *job)
{
    return atomic_load(&job->page->first_error) != 0;
}

int hpf_rank_barrier(struct hpf_rank *me, bool with_parent, unsigned timeout_ms)
{
    struct job_page *page = me->job->page;
    if (meet(me->job, with_parent ? &page->all : &page->ranks, me->nranks + with_parent, timeout_ms,
             someone_failed))
        return 0;
    hpf_rank_fail(me, "the other ranks did not come to a meeting point in %u ms", timeout_ms);
    return -1;
}

_Noreturn static void run_rank(struct hpf_job *job, unsigned rank, const struct hpf_cluster *c,
                               const struct hpf_job_options *o, pid_t parent)
{
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    signal(SIGHUP, SIG_DFL);
    signal(SIGCHLD, SIG_DFL);
    /* Rank 0 prints from a group that is not the terminal's foreground one. */
    signal(SIGTTOU, SIG_IGN);
    struct hpf_rank me = {
        .rank = rank,
        .nranks = job->nranks,
        .node = job->node_of_rank[rank],
        .nnodes = job->nnodes,
        .node_of_rank = job->node_of_rank,
        .shared = job->shared,
        .arg = o->arg,
        .job = job,
    };
    for (unsigned r = 0; r < rank; r++)
        me.local += job->node_of_rank[r] == me.node;
    setenv("HREDUCE_SOCKET", c->node[me.node].socket, 1);
    exit(o->fn(&me));
}

/* ---- in the parent --------------------------------------------------------------------------------------- */

static void *share(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static struct hpf_job *job_new(const struct hpf_cluster *c, const struct hpf_job_options *o)
{
    struct hpf_job *job = calloc(1, sizeof(*job));
    if (!job)
        return NULL;
    job->nranks = o->nranks;
    job->nnodes = c->nnodes;
    job->node_of_rank = calloc(o->nranks, sizeof(*job->node_of_rank));
    job->pid = calloc(o->nranks, sizeof(*job->pid));
    job->status = calloc(o->nranks, sizeof(*job->status));
    job->killed = calloc(o->nranks, sizeof(*job->killed));
    job->page_bytes = sizeof(struct job_page) + o->nranks * sizeof(struct rank_note);
    job->page = share(job->page_bytes);
    job->shared_bytes = o->shared_bytes ? o->shared_bytes : 1;
    job->shared = share(job->shared_bytes);
    if (!job->node_of_rank || !job->pid || !job->status || !job->killed || !job->page || !job->shared) {
        hpf_job_free(job);
        return NULL;
    }
    for (unsigned r = 0; r < o->nranks; r++) {
        unsigned per_node = (o->nranks + c->nnodes - 1) / c->nnodes;
        job->node_of_rank[r] = o->node_of_rank ? o->node_of_rank[r] : r / per_node;
    }
    return job;
}

int hpf_job_start(struct hpf_job **out, struct hpf_cluster *c, const struct hpf_job_options *o, char *err,
                  size_t errlen)
{
    for (unsigned r = 0; o->node_of_rank && r < o->nranks; r++) {
        if (o->node_of_rank[r] >= c->nnodes) {
            snprintf(err, errlen, "rank %u is to run on node %u, but there are %u nodes", r,
                     o->node_of_rank[r], c->nnodes);
            return -1;
        }
    }
    struct hpf_job *job = o->nranks > 0 ? job_new(c, o) : NULL;
    if (!job) {
        snprintf(err, errlen, "no memory for a job of %u ranks", o->nranks);
        return -1;
    }
    /* So that a rank's end interrupts the sleep of the wait loop. */
    struct sigaction sa = {.sa_handler = on_signal, .sa_flags = SA_NOCLDSTOP};
    sigaction(SIGCHLD, &sa, NULL);
    fflush(NULL);
    pid_t parent = getpid();
    for (unsigned r = 0; r < o->nranks; r++) {
        pid_t pid = fork();
        if (pid == 0)
            run_rank(job, r, c, o, parent);
        if (pid < 0) {
            snprintf(err, errlen, "cannot start the process of rank %u of %u: %s", r, o->nranks,
                     strerror(errno));
            hpf_job_free(job);
            return -1;
        }
        job->pid[r] = pid;
        job->status[r] = -1;
    }
    *out = job;
    return 0;
}

pid_t hpf_job_pid(const struct hpf_job *job, unsigned rank)
{
    return job->pid[rank];
}

void *hpf_job_shared(struct hpf_job *job)
{
    return job->shared;
}

const char *hpf_job_error(const struct hpf_job *job, unsigned rank)
{
    return job->page->note[rank].error;
}

int hpf_job_status(struct hpf_job *job, unsigned rank)
{
    int status;
    if (job->pid[rank] > 0 && job->status[rank] == -1 && waitpid(job->pid[rank], &status, WNOHANG) > 0)
        job->status[rank] = status;
    return job->status[rank];
}

static bool await_exit(struct hpf_job *job, unsigned rank, unsigned timeout_ms)
{
    long long deadline = hpf_now_ms() + timeout_ms;
    while (hpf_job_status(job, rank) == -1) {
        if (hpf_now_ms() > deadline)
            return false;
        hpf_sleep_ms(2);
    }
    return true;
}

void hpf_job_kill(struct hpf_job *job, unsigned rank, int sig)
{
    if (hpf_job_status(job, rank) != -1)
        return;
    if (sig != SIGSTOP && sig != SIGCONT)
        job->killed[rank] = true;
    kill(job->pid[rank], sig);
    if (sig == SIGKILL)
        await_exit(job, rank, GRACE_MS);
}

static bool someone_ended(struct hpf_job *job)
{
    for (unsigned r = 0; r < job->nranks; r++)
        if (!job->killed[r] && hpf_job_status(job, r) != -1)
            return true;
    return hpf_signal_seen != 0;
}

bool hpf_job_barrier(struct hpf_job *job, unsigned timeout_ms)
{
    return meet(job, &job->page->all, job->nranks + 1, timeout_ms, someone_ended);
}

static bool failed(const struct hpf_job *job, unsigned r)
{
    return job->status[r] > 0 && !job->killed[r];
}

/* A process that a signal ended is the cause of what the others say, so it is named first. */
static void explain(struct hpf_job *job, char *err, size_t errlen)
{
    char text[64];
    for (unsigned r = 0; r < job->nranks; r++) {
        if (failed(job, r) && WIFSIGNALED(job->status[r])) {
            snprintf(err, errlen, "rank %u (node %u) was ended by %s", r, job->node_of_rank[r],
                     hpf_status_text(job->status[r], text, sizeof(text)));
            return;
        }
    }
    uint32_t first = atomic_load(&job->page->first_error);
    if (first) {
        snprintf(err, errlen, "rank %u (node %u): %s", first - 1, job->node_of_rank[first - 1],
                 job->page->note[first - 1].error);
        return;
    }
    for (unsigned r = 0; r < job->nranks; r++) {
        if (failed(job, r)) {
            snprintf(err, errlen, "rank %u (node %u) ended with %s and gave no reason", r,
                     job->node_of_rank[r], hpf_status_text(job->status[r], text, sizeof(text)));
            return;
        }
    }
}

static void kill_rest(struct hpf_job *job)
{
    for (unsigned r = 0; r < job->nranks; r++)
        if (job->pid[r] > 0 && hpf_job_status(job, r) == -1)
            kill(job->pid[r], SIGKILL);
    for (unsigned r = 0; r < job->nranks; r++)
        if (job->pid[r] > 0)
            await_exit(job, r, GRACE_MS);
}

static unsigned count_running(struct hpf_job *job, bool *any_failed)
{
    unsigned running = 0;
    for (unsigned r = 0; r < job->nranks; r++) {
        running += hpf_job_status(job, r) == -1;
        *any_failed |= failed(job, r);
    }
    return running;
}

static int stuck(struct hpf_job *job, unsigned timeout_ms, char *err, size_t errlen)
{
    char list[400] = "";
    size_t n = 0;
    for (unsigned r = 0; r < job->nranks && n + 16 < sizeof(list); r++)
        if (job->status[r] == -1)
            n += (size_t)snprintf(list + n, sizeof(list) - n, "%s%u", n ? ", " : "", r);
    kill_rest(job);
    snprintf(err, errlen, "no rank made progress in %.1f s; ranks %s were still running and have been killed",
             timeout_ms / 1000.0, list);
    return -1;
}

int hpf_job_wait(struct hpf_job *job, unsigned timeout_ms, char *err, size_t errlen)
{
    uint64_t progress = atomic_load(&job->page->progress);
    unsigned running = job->nranks;
    long long last = hpf_now_ms(), failed_at = 0;
    for (;;) {
        bool any_failed = false;
        unsigned now_running = count_running(job, &any_failed);
        long long now = hpf_now_ms();
        uint64_t p = atomic_load(&job->page->progress);
        if (now_running == 0) {
            if (!any_failed)
                return 0;
            explain(job, err, errlen);
            return -1;
        }
        if (hpf_signal_seen) {
            kill_rest(job);
            snprintf(err, errlen, "stopped by signal %d (%s)", (int)hpf_signal_seen,
                     strsignal(hpf_signal_seen));
            return -1;
        }
        if (any_failed && failed_at == 0)
            failed_at = now;
        if (failed_at && now - failed_at > GRACE_MS) {
            explain(job, err, errlen);
            kill_rest(job);
            return -1;
        }
        if (p != progress || now_running != running) {
            progress = p;
            running = now_running;
            last = now;
        }
        if (now - last > (long long)timeout_ms)
            return stuck(job, timeout_ms, err, errlen);
        hpf_sleep_ms(POLL_MS);
    }
}

void hpf_job_free(struct hpf_job *job)
{
    if (!job)
        return;
    if (job->pid && job->status)
        kill_rest(job);
    if (job->page)
        munmap(job->page, job->page_bytes);
    if (job->shared)
        munmap(job->shared, job->shared_bytes);
    free(job->node_of_rank);
    free(job->pid);
    free(job->status);
    free(job->killed);
    free(job);
}
