/* SPDX-License-Identifier: MIT */
/*
 * deaths [--quick] [--only TEXT] [--rounds N] [--seconds N] [--jobs N] [--seed N] [--csv FILE] [--keep-logs DIR]
 *        [--key KEY=VALUE] ...
 *
 * SIGKILL in the middle of a running stream of all-reduces of 16 MiB, at random moments, on ranks that share one GPU. Of a
 * daemon, with copies (dma engine) or kernels (sm) in flight into ranks' buffers: each rank's stream is released with an error,
 * and a pattern that it writes into the released output stays for a second, every byte; the daemon that is started again
 * serves the same processes. Of a rank, while the daemon writes into its memory (legacy IPC, or cuMemCreate by descriptor):
 * the others get an error in words, the daemon lives on and serves the next job with right results. Everything within bounds.
 *
 * --jobs: so many plans at once. --seconds: for all of them; rounds that do not fit are not run and the table says so.
 * Ends with a line "N rounds passed, M failed" and status 0, or 1 when one failed. --quick rehearses on the fake driver.
 */
#include "tests/lib/deaths.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/perf/cluster.h"
#include "tests/lib/harness.h"

#define MIB (UINT64_C(1) << 20)
#define ROUNDS 20u
#define ROUNDS_QUICK 2u
#define SECONDS 240u
#define MAX_JOBS 8u
#define STREAM_MS 60000u /* until all ranks have ops in flight */
#define STUCK_MS 45000u  /* no rank moves */
#define DELAY_US 30000u  /* several ops long */
#define GIVE_UP 3u       /* failures of a plan */

static const struct deaths_plan plans[] = {
    {DEATHS_DAEMON, "dma", false, 1, 2}, {DEATHS_DAEMON, "sm", false, 1, 2},
    {DEATHS_RANK, "dma", false, 1, 2},   {DEATHS_RANK, "dma", true, 1, 2},
    {DEATHS_RANK, "sm", false, 1, 2},    {DEATHS_RANK, "sm", true, 1, 2},
    {DEATHS_DAEMON, "dma", false, 2, 1}, {DEATHS_DAEMON, "sm", false, 2, 1},
    {DEATHS_RANK, "dma", false, 2, 1},   {DEATHS_RANK, "dma", true, 2, 1},
    {DEATHS_RANK, "sm", false, 2, 1},    {DEATHS_RANK, "sm", true, 2, 1},
    {DEATHS_DAEMON, "dma", true, 1, 2},  {DEATHS_DAEMON, "sm", true, 2, 1},
};
#define NPLANS (sizeof(plans) / sizeof(plans[0]))

/* Written by the plan's process, read by the parent when it has ended. */
struct outcome {
    bool begun, skipped;
    unsigned passed, failed, cut;
    double released_ms[DEATHS_MAX_ROUNDS]; /* of rounds that passed */
    char said[300], why[GIVE_UP][1200];
};

struct options {
    bool quick;
    unsigned rounds, seconds, jobs;
    uint64_t seed;
    const char *only;
    struct gj_options of_all;
};

static _Noreturn void usage(void)
{
    fputs("usage: deaths [--quick] [--only TEXT] [--rounds N] [--seconds N] [--jobs N] [--seed N]\n"
          "              [--csv FILE] [--keep-logs DIR] [--key KEY=VALUE] ...\n",
          stderr);
    exit(2);
}

static unsigned number(const char *text, unsigned most)
{
    char *end;
    unsigned long v = strtoul(text, &end, 10);
    if (*end || v == 0 || v > most)
        usage();
    return (unsigned)v;
}

static void parse(struct options *o, int argc, char **argv)
{
    static const struct option names[] = {
        {"quick", 0, NULL, 'q'},
        {"only", 1, NULL, 'o'},
        {"rounds", 1, NULL, 'r'},
        {"seconds", 1, NULL, 't'},
        {"jobs", 1, NULL, 'j'},
        {"seed", 1, NULL, 's'},
        GJ_OPTIONS,
        {NULL, 0, NULL, 0},
    };
    int c;
    *o = (struct options){.seconds = SECONDS, .jobs = 1, .seed = gj_now_ns()};
    while ((c = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (c) {
        case 'q':
            o->quick = true;
            break;
        case 'o':
            o->only = optarg;
            break;
        case 'r':
            o->rounds = number(optarg, DEATHS_MAX_ROUNDS);
            break;
        case 't':
            o->seconds = number(optarg, 86400);
            break;
        case 'j':
            o->jobs = number(optarg, MAX_JOBS);
            break;
        case 's':
            o->seed = strtoull(optarg, NULL, 0);
            break;
        default:
            if (!gj_option(&o->of_all, c, optarg))
                usage();
        }
    }
    if (optind != argc)
        usage();
    if (o->rounds == 0)
        o->rounds = o->quick ? ROUNDS_QUICK : ROUNDS;
}

static const char *plan_text(const struct deaths_plan *p, char *buf, size_t len)
{
    snprintf(buf, len, "%s, %s, %s, %ux%u", p->victim == DEATHS_DAEMON ? "daemon" : "rank", p->engine,
             p->vmm ? "vmm" : "ipc", p->nodes, p->ranks_a_node);
    return buf;
}

static bool wanted(const struct options *o, unsigned i)
{
    char name[64];
    return !o->only || strstr(plan_text(&plans[i], name, sizeof(name)), o->only);
}

/* ---- one plan: its process ------------------------------------------------------------------------------------------ */

struct run {
    const struct options *o;
    const struct deaths_plan *plan;
    struct outcome *out;
    struct hpf_cluster *cluster;
    struct deaths_job arg;
    uint64_t end_ns, random;
    bool blind; /* a daemon could not be started again: nothing more can be seen */
};

static unsigned below(struct run *r, unsigned n)
{
    return ht_random(&r->random) % n;
}

static bool time_is_up(const struct run *r)
{
    return hpf_signal_seen != 0 || gj_now_ns() > r->end_ns;
}

static int failed(struct outcome *out, const char *why)
{
    if (out->failed < GIVE_UP)
        snprintf(out->why[out->failed], sizeof(out->why[0]), "%s", why);
    out->failed++;
    return -1;
}

static bool all_streaming(struct hpf_job *job, unsigned nranks, unsigned round)
{
    struct deaths_page *page = hpf_job_shared(job);
    long long deadline = hpf_now_ms() + STREAM_MS;
    while (atomic_load(&page->streaming) < nranks * (round + 1)) {
        for (unsigned i = 0; i < nranks; i++)
            if (hpf_job_status(job, i) != -1)
                return false;
        if (hpf_now_ms() > deadline || hpf_signal_seen)
            return false;
        hpf_sleep_ms(1);
    }
    return true;
}

/* Kills. 0, or -1 with the sentence in err. */
static int strike(struct run *r, struct hpf_job *job, unsigned round, char *err, size_t errlen)
{
    struct deaths_page *page = hpf_job_shared(job);
    const bool daemon = r->plan->victim == DEATHS_DAEMON;
    const unsigned who = below(r, daemon ? r->plan->nodes : r->plan->nodes * r->plan->ranks_a_node);
    usleep(below(r, DELAY_US));
    atomic_store(&page->node_killed[round], daemon ? who : UINT32_MAX);
    atomic_store(&page->killed_ns[round], gj_now_ns());
    if (!daemon) {
        hpf_job_kill(job, who, SIGKILL);
        return 0;
    }
    hpf_node_kill(r->cluster, who, SIGKILL);
    return hpf_node_start(r->cluster, who, err, errlen);
}

static int daemons_live(struct run *r, char *err, size_t errlen)
{
    char text[64], tail[600];
    for (unsigned i = 0; i < r->plan->nodes; i++) {
        if (hpf_node_alive(r->cluster, i))
            continue;
        hpf_node_log_tail(r->cluster, i, tail, sizeof(tail));
        snprintf(err, errlen, "the daemon of node %u ended with %s; it wrote: %s", i,
                 hpf_status_text(r->cluster->node[i].status, text, sizeof(text)), tail);
        r->blind = hpf_node_start(r->cluster, i, text, sizeof(text)) < 0;
        return -1;
    }
    return 0;
}

static void keep(struct run *r, const struct deaths_page *page, unsigned round)
{
    struct outcome *out = r->out;
    out->released_ms[out->passed++] = (double)atomic_load(&page->released_ns[round]) * 1e-6;
    if (!out->said[0])
        snprintf(out->said, sizeof(out->said), "%s", page->said);
}

/* The ranks survive the deaths of daemons and meet the parent behind each. What goes wrong with them ends the job. */
static void strike_all(struct run *r, struct hpf_job *job, char *err, size_t errlen)
{
    struct deaths_page *page = hpf_job_shared(job);
    for (unsigned round = 0; round < r->arg.rounds; round++) {
        if (!all_streaming(job, r->plan->nodes * r->plan->ranks_a_node, round) ||
            strike(r, job, round, err, errlen) < 0 || r->plan->victim == DEATHS_RANK)
            return;
        if (round + 1 == r->arg.rounds || time_is_up(r))
            atomic_store(&page->stop, 1);
        if (!hpf_job_barrier(job, STUCK_MS))
            return;
        keep(r, page, round);
        if (atomic_load(&page->stop))
            return;
    }
}

/* A job, with deaths in it or none. 0; -1 after failed(). */
static int run_job(struct run *r, unsigned rounds)
{
    struct hpf_job *job = NULL;
    char err[1200] = "";
    const struct hpf_job_options ranks = {.nranks = r->plan->nodes * r->plan->ranks_a_node,
                                          .fn = deaths_rank,
                                          .arg = &r->arg,
                                          .shared_bytes = sizeof(struct deaths_page)};
    r->arg.rounds = rounds;
    r->arg.seed = r->random;
    if (hpf_job_start(&job, r->cluster, &ranks, err, sizeof(err)) < 0)
        return failed(r->out, err);
    if (rounds > 0)
        strike_all(r, job, err, sizeof(err));
    int status = err[0] ? -1 : hpf_job_wait(job, STUCK_MS, err, sizeof(err));
    struct deaths_page *page = hpf_job_shared(job);
    for (unsigned i = 0; i < ranks.nranks; i++) {
        int s = hpf_job_status(job, i);
        r->out->skipped |= s != -1 && WIFEXITED(s) && WEXITSTATUS(s) == GJ_SKIP;
    }
    r->out->cut += atomic_load(&page->cut);
    char also[1000];
    if (daemons_live(r, also, sizeof(also)) < 0) {
        const size_t at = strlen(err);
        snprintf(err + at, sizeof(err) - at, "%s%s", at ? "; and " : "", also);
        status = -1;
    }
    if (status == 0 && r->plan->victim == DEATHS_RANK && rounds > 0)
        keep(r, page, 0);
    hpf_job_free(job);
    return status == 0 || r->out->skipped || hpf_signal_seen ? status : failed(r->out, err);
}

static void run_rounds(struct run *r)
{
    const unsigned rounds = r->o->rounds;
    struct outcome *out = r->out;
    unsigned jobs = 0;
    while (out->passed + out->failed < rounds && out->failed < GIVE_UP && !r->blind && !time_is_up(r) &&
           !out->skipped) {
        run_job(r, r->plan->victim == DEATHS_RANK ? 1 : rounds - out->passed - out->failed);
        jobs++;
    }
    /* What the last death left behind. */
    if (r->plan->victim == DEATHS_RANK && jobs > 0 && out->failed < GIVE_UP && !r->blind && !out->skipped &&
        !hpf_signal_seen)
        run_job(r, 0);
}

static int run_plan(const struct options *o, unsigned number_of_plan, struct outcome *out, uint64_t end_ns)
{
    char err[1200], logs[512] = "";
    struct run r = {.o = o,
                    .plan = &plans[number_of_plan],
                    .out = out,
                    .end_ns = end_ns,
                    .random = o->seed * 31 + number_of_plan};
    r.arg = (struct deaths_job){.plan = r.plan,
                                .bytes = o->quick ? MIB : 16 * MIB,
                                .stays_ns = r.plan->victim == DEATHS_DAEMON ? UINT64_C(1000000000)
                                                                            : UINT64_C(200000000)};
    if (o->of_all.keep_logs) {
        snprintf(logs, sizeof(logs), "%s/deaths-%u", o->of_all.keep_logs, number_of_plan);
        mkdir(logs, 0755);
    }
    const struct hpf_cluster_options daemons = {.nnodes = r.plan->nodes,
                                                .keys = o->of_all.key,
                                                .nkeys = o->of_all.nkeys,
                                                .keep_logs = logs[0] ? logs : NULL};
    setenv("HREDUCE_GPU_STAGED_BYTES", "0", 1);
    out->begun = true;
    if (hpf_cluster_new(&r.cluster, &daemons, err, sizeof(err)) < 0)
        return failed(r.out, err);
    run_rounds(&r);
    if (hpf_cluster_free(r.cluster, err, sizeof(err)) < 0)
        return failed(r.out, err);
    return 0;
}

/* ---- tables --------------------------------------------------------------------------------------------------------- */

static void print_plan(const struct options *o, unsigned i, struct outcome *out)
{
    char name[64];
    double worst = 0;
    plan_text(&plans[i], name, sizeof(name));
    for (unsigned k = 0; k < out->passed; k++)
        worst = out->released_ms[k] > worst ? out->released_ms[k] : worst;
    double median = gj_median(out->released_ms, out->passed);
    printf("| %s | %u | %u | %u | %u | %.1f | %.1f | %.160s |\n", name, o->rounds, out->passed, out->failed,
           out->cut, median, worst, out->said);
    FILE *f = o->of_all.csv ? fopen(o->of_all.csv, "ae") : NULL;
    if (f) {
        fprintf(f, "\"%s\",%u,%u,%u,%u,%.1f,%.1f\n", name, o->rounds, out->passed, out->failed, out->cut,
                median, worst);
        fclose(f);
    }
}

static int report(const struct options *o, struct outcome *out)
{
    unsigned passed = 0, nfailed = 0, begun = 0, not_begun = 0, not_run = 0, skipped = 0;
    char name[64];
    printf(
        "\ndeaths in a running stream of all-reduces of %s on one GPU (seed %llu, %u plans at once)\n\n"
        "| who, engine, memory, nodes x ranks | rounds | passed | failed | ops cut off | released after ms | "
        "worst ms | what was said |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n",
        o->quick ? "1 MiB" : "16 MiB", (unsigned long long)o->seed, o->jobs);
    for (unsigned i = 0; i < NPLANS; i++) {
        not_begun += !out[i].begun && wanted(o, i);
        if (!out[i].begun)
            continue;
        begun++;
        passed += out[i].passed;
        nfailed += out[i].failed;
        skipped += out[i].skipped;
        not_run += out[i].passed + out[i].failed < o->rounds ? o->rounds - out[i].passed - out[i].failed : 0;
        print_plan(o, i, &out[i]);
    }
    putchar('\n');
    for (unsigned i = 0; i < NPLANS; i++)
        for (unsigned k = 0; k < GIVE_UP && k < out[i].failed; k++)
            printf("failed: %s: %s\n", plan_text(&plans[i], name, sizeof(name)), out[i].why[k]);
    printf("deaths: %u rounds passed, %u failed, %u not run for want of time or after %u failures; "
           "%u plans, %u more not begun\n",
           passed, nfailed, not_run, GIVE_UP, begun, not_begun);
    fflush(stdout);
    return nfailed || (begun && passed == 0 && !skipped) ? 1 : skipped ? GJ_SKIP : 0;
}

/* ---- all plans ------------------------------------------------------------------------------------------------------ */

struct crew {
    const struct options *o;
    struct outcome *out; /* of each plan, shared */
    pid_t pid[NPLANS];   /* 0: not running */
    unsigned running, left;
    uint64_t end_ns;
};

/* What remains is shared alike by the plans that remain. */
static void start_plan(struct crew *c, unsigned i)
{
    const uint64_t now = gj_now_ns(), left = c->end_ns > now ? c->end_ns - now : 0;
    const uint64_t at_once = c->o->jobs < c->left ? c->o->jobs : c->left;
    const pid_t parent = getpid();
    fflush(NULL);
    c->left--;
    c->pid[i] = fork();
    if (c->pid[i] == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (getppid() != parent)
            _exit(1);
        _exit(run_plan(c->o, i, &c->out[i], now + left * at_once / (c->left + 1)) < 0);
    }
    c->running += c->pid[i] > 0;
    if (c->pid[i] < 0)
        fprintf(stderr, "deaths: cannot start a process: %s\n", strerror(errno));
}

static void await_one(struct crew *c)
{
    int status;
    pid_t ended = waitpid(-1, &status, 0);
    for (unsigned i = 0; ended > 0 && i < NPLANS; i++) {
        if (c->pid[i] != ended)
            continue;
        c->pid[i] = 0;
        c->running--;
        if (WIFSIGNALED(status)) {
            char why[64];
            snprintf(why, sizeof(why), "its process was ended by signal %d", WTERMSIG(status));
            failed(&c->out[i], why);
        }
    }
    /* The plans end their daemons and ranks, and what they have seen is printed. */
    for (unsigned i = 0; hpf_signal_seen && i < NPLANS; i++)
        if (c->pid[i] > 0)
            kill(c->pid[i], SIGTERM);
}

int main(int argc, char **argv)
{
    static struct options o;
    struct crew c = {.o = &o};
    parse(&o, argc, argv);
    hpf_catch_signals();
    c.end_ns = gj_now_ns() + o.seconds * UINT64_C(1000000000);
    c.out = mmap(NULL, NPLANS * sizeof(*c.out), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (c.out == MAP_FAILED)
        gj_die("deaths: no memory: %s", strerror(errno));
    for (unsigned i = 0; i < NPLANS; i++)
        c.left += wanted(&o, i);
    for (unsigned i = 0; i < NPLANS && !hpf_signal_seen; i++) {
        if (!wanted(&o, i))
            continue;
        while (c.running >= o.jobs)
            await_one(&c);
        if (!hpf_signal_seen && gj_now_ns() < c.end_ns)
            start_plan(&c, i);
    }
    while (c.running > 0)
        await_one(&c);
    return report(&o, c.out);
}
