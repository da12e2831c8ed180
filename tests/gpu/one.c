/* SPDX-License-Identifier: MIT */
/*
 * one [--quick] [--only TEXT] [--spread] [--csv FILE] [--keep-logs DIR] [--key KEY=VALUE] ...
 *
 * What all-reduces cost where the ranks of one or two nodes share a single GPU, beside what that machine allows, measured in
 * the same run: f32 sums, medians of the slowest rank's time, every element checked. Where the time of an op goes (as the
 * daemon's path report says, see hclient_comm_path(3)), the processor time and GPU memory that the daemons take, and what
 * the job's own kernels lose. --spread deals ranks over all GPUs instead. --quick rehearses on the fake driver.
 */
#include "tests/lib/one.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "client/perf/cluster.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)
#define MANY 100u
#define MANY_QUICK 12u
#define QUICK_BYTES MIB

#define SMALL .size = {4 * KIB, 16 * KIB, 64 * KIB}, .nsizes = 3, .busy = 3
#define LARGE(n) .size = {4 * MIB, MIB, 16 * MIB, 64 * MIB}, .nsizes = 4, .busy = n

static const struct one_plan plans[] = {
    {"one rank", 1, 1, "auto", ONE_COPY, 1.5, .size = {4 * KIB, 64 * KIB, 4 * MIB}, .nsizes = 3},
    {"1x2", 1, 2, "auto", ONE_LAUNCH, 3, SMALL},
    {"1x2, kernels", 1, 2, "idle", ONE_LAUNCH, 3, .import = true, SMALL},
    {"2x1", 2, 1, "auto", ONE_LAUNCH, 3, SMALL},
    {"1x4, copy engines", 1, 4, "compute", ONE_LINK, 1.25, .import = true, LARGE(1)},
    {"1x4, kernels", 1, 4, "idle", ONE_MEMORY, 1.0 / 0.85, .import = true, LARGE(0)},
};

static const char *const floor_text[ONE_NFLOORS] = {
    [ONE_COPY] = "a copy in a stream and its end awaited",
    [ONE_LAUNCH] = "a launch of the same sum and its end awaited",
    [ONE_LINK] = "all bytes both ways over the link at once, 512 KiB each before and behind",
    [ONE_MEMORY] = "all bytes read and written at the rate of a copy inside the GPU",
};

static const char *const stage_name[ONE_STAGES] = {"post", "ready", "begin", "work", "done"};

struct options {
    bool quick, spread;
    const char *only;
    struct gj_options of_all;
};

static _Noreturn void usage(void)
{
    fputs("usage: one [--quick] [--only TEXT] [--spread] [--csv FILE] [--keep-logs DIR] [--key KEY=VALUE] "
          "...\n",
          stderr);
    exit(2);
}

static void parse(struct options *o, int argc, char **argv)
{
    static const struct option names[] = {
        {"quick", 0, NULL, 'q'}, {"only", 1, NULL, 'o'}, {"spread", 0, NULL, 's'}, GJ_OPTIONS,
        {NULL, 0, NULL, 0},
    };
    int c;
    while ((c = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (c) {
        case 'q':
            o->quick = true;
            break;
        case 'o':
            o->only = optarg;
            break;
        case 's':
            o->spread = true;
            break;
        default:
            if (!gj_option(&o->of_all, c, optarg))
                usage();
        }
    }
    if (optind != argc)
        usage();
}

/* ---- tables --------------------------------------------------------------------------------------------------------- */

/* Back to back an op is posted long before its turn: what it waits for until then is the ops before it. */
#define FIRST_OF_MANY 2u

static void print_stages(const char *how, uint64_t bytes, const double *stage_us, unsigned first,
                         double call_us, double us)
{
    double sum = 0;
    printf("| %llu | %s | %.1f |", (unsigned long long)bytes, how, call_us);
    for (unsigned i = 0; i < ONE_STAGES; i++) {
        if (i < first)
            printf(" |");
        else
            printf(" %.1f |", stage_us[i]);
        sum += i < first ? 0 : stage_us[i];
    }
    printf(" %.1f | %.1f |\n", us - sum, us);
}

/* 1 when an element was wrong. */
static int print(const struct one_plan *plan, const struct one_page *page)
{
    int wrong = 0;
    printf("\n%s: %u nodes x %u ranks, overlap = %s%s\nfloor: %s", plan->name, plan->nodes,
           plan->ranks_a_node, plan->overlap, plan->import ? ", all memory imported" : "",
           floor_text[plan->floor]);
    if (plan->nodes > 1)
        printf(", and a round trip over TCP (%.1f us)", page->rtt_us);
    if (page->link_gb_s > 0)
        printf(" (%.1f GB/s each way)", page->link_gb_s);
    if (page->copy_gb_s > 0)
        printf(" (%.0f GB/s)", page->copy_gb_s);
    printf("\npath: %s\nthe daemons took %.0f MiB of the GPU's memory\n\n", page->path, page->memory_mib);
    printf("| bytes | floor us | idle us | of floor | goal | busy us | of idle | back to back us | daemons' "
           "cores "
           "| job's kernels of alone | wrong |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- "
           "| --- |\n");
    for (unsigned i = 0; i < page->nrows; i++) {
        const struct one_row *r = &page->row[i];
        printf("| %llu | %.1f | %.1f | %.2f | %.2f | %.1f | %.2f | %.1f | %.2f | %.3f | %llu |\n",
               (unsigned long long)r->bytes, r->floor_us, r->us, r->us / r->floor_us, plan->goal, r->busy_us,
               r->busy_us / r->us, r->back_to_back_us, r->cores,
               r->job_alone > 0 ? r->job_beside / r->job_alone : 0, (unsigned long long)r->wrong);
        wrong |= r->wrong != 0;
    }
    printf("\n| bytes | mean us of | call |");
    for (unsigned i = 0; i < ONE_STAGES; i++)
        printf(" %s |", stage_name[i]);
    printf(" between processes | all |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for (unsigned i = 0; i < page->nrows; i++) {
        const struct one_row *r = &page->row[i];
        print_stages("one by one", r->bytes, r->stage_us, 0, r->call_us, r->mean_us);
        print_stages("back to back", r->bytes, r->back_to_back_stage_us, FIRST_OF_MANY,
                     r->back_to_back_call_us, r->back_to_back_us);
    }
    fflush(stdout);
    return wrong;
}

static void print_csv(const struct options *o, const struct one_plan *plan, const struct one_page *page)
{
    FILE *f = o->of_all.csv ? fopen(o->of_all.csv, "ae") : NULL;
    if (!f)
        return;
    for (unsigned i = 0; i < page->nrows; i++) {
        const struct one_row *r = &page->row[i];
        const struct {
            const char *who;
            double us, back_to_back;
        } line[] = {{"floor", r->floor_us, 0},
                    {"hreduce", r->us, r->back_to_back_us},
                    {"hreduce, busy", r->busy_us, 0}};
        for (unsigned k = 0; k < sizeof(line) / sizeof(line[0]); k++)
            if (line[k].us > 0)
                fprintf(f, "\"one: %s\",%ux%u,%s,f32,\"%s\",%llu,%.1f,%.1f,%llu\n", plan->name, plan->nodes,
                        plan->ranks_a_node, plan->overlap, line[k].who, (unsigned long long)r->bytes,
                        line[k].us, line[k].back_to_back, (unsigned long long)r->wrong);
    }
    fclose(f);
}

/* ---- runs ----------------------------------------------------------------------------------------------------------- */

/* 0, 1 or GJ_SKIP. */
static int run_job(const struct options *o, struct hpf_cluster *cluster, struct one_job *arg)
{
    struct hpf_job *job = NULL;
    char err[2048];
    const struct hpf_job_options ranks = {.nranks = arg->plan->nodes * arg->plan->ranks_a_node,
                                          .fn = one_rank,
                                          .arg = arg,
                                          .shared_bytes = sizeof(struct one_page)};
    int status = hpf_job_start(&job, cluster, &ranks, err, sizeof(err));
    if (status == 0)
        status = hpf_job_wait(job, 60000, err, sizeof(err));
    if (job && WIFEXITED(hpf_job_status(job, 0)) && WEXITSTATUS(hpf_job_status(job, 0)) == GJ_SKIP) {
        hpf_job_free(job);
        return GJ_SKIP;
    }
    if (status < 0)
        fprintf(stderr, "one, %s: %s\n", arg->plan->name, err);
    /* What was measured before a failure is worth printing too. */
    if (job) {
        print_csv(o, arg->plan, hpf_job_shared(job));
        status = print(arg->plan, hpf_job_shared(job)) || status < 0;
    }
    hpf_job_free(job);
    return status ? 1 : 0;
}

static int run(const struct options *o, const struct one_plan *plan)
{
    struct hpf_cluster *cluster = NULL;
    struct one_plan shown = *plan;
    struct one_job job = {
        .plan = &shown, .quick = o->quick, .spread = o->spread, .many = o->quick ? MANY_QUICK : MANY};
    char err[2048];
    const struct hpf_cluster_options daemons = {.nnodes = plan->nodes,
                                                .keys = o->of_all.key,
                                                .nkeys = o->of_all.nkeys,
                                                .keep_logs = o->of_all.keep_logs};
    for (unsigned i = 0; o->quick && i < shown.nsizes; i++) /* the largest of a rehearsal */
        if (shown.size[i] >= QUICK_BYTES)
            shown.size[i] = QUICK_BYTES >> i;
    if (plan->import)
        setenv("HREDUCE_GPU_STAGED_BYTES", "0", 1);
    else
        unsetenv("HREDUCE_GPU_STAGED_BYTES");
    if (hpf_cluster_new(&cluster, &daemons, err, sizeof(err)) < 0) {
        fprintf(stderr, "one: %s\n", err);
        return 1;
    }
    for (unsigned i = 0; i < plan->nodes; i++)
        job.daemon[i] = cluster->node[i].pid;
    int status = run_job(o, cluster, &job);
    if (hpf_cluster_free(cluster, err, sizeof(err)) < 0) {
        fprintf(stderr, "one: %s\n", err);
        status = status ? status : 1;
    }
    return status;
}

int main(int argc, char **argv)
{
    struct options o = {0};
    int worst = 0;
    parse(&o, argc, argv);
    hpf_catch_signals();
    for (unsigned i = 0; i < sizeof(plans) / sizeof(plans[0]) && worst != GJ_SKIP && !hpf_signal_seen; i++) {
        if (o.only && !strstr(plans[i].name, o.only))
            continue;
        int status = run(&o, &plans[i]);
        worst = status ? status : worst;
    }
    return worst;
}
