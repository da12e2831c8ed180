/* SPDX-License-Identifier: MIT */
/*
 * compare NODESxRANKS [--sizes 1K,4K,...] [--types f32,bf16] [--overlap idle|compute|auto] [--hreduce-only] [--busy]
 *         [--csv FILE] [--label TEXT] [--keep-logs DIR] [--key KEY=VALUE] ...
 *
 * NCCL (its C API, loaded as libnccl.so.2 or what HREDUCE_NCCL names) and hreduce in the same processes, one a rank, rank r
 * on GPU r modulo their number, taking turns op by op on the same buffers. NODES daemons of this machine are the nodes. A
 * row: medians over ops of the slowest rank's time, from a common start to the end of its stream; back to back: ten or more
 * ops enqueued, the time of all by their number. Every element of both results is checked: inputs are small random whole
 * numbers, so that any order of additions gives the same sum.
 *
 * --busy: the same while kernels of the job fill every GPU, and how many of those ran in a second alone, beside NCCL and
 * beside hreduce.
 */
#include "tests/lib/compare.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "proto/types.h"

#define KIB UINT64_C(1024)

static const uint64_t default_sizes[] = {KIB,           4 * KIB,       16 * KIB,     64 * KIB,
                                         256 * KIB,     KIB *KIB,      4 * KIB *KIB, 16 * KIB *KIB,
                                         64 * KIB *KIB, 256 * KIB *KIB};

static _Noreturn void usage(void)
{
    fputs("usage: compare NODESxRANKS [--sizes LIST] [--types f32,bf16] [--overlap idle|compute|auto] "
          "[--hreduce-only]\n"
          "               [--busy] [--csv FILE] [--label TEXT] [--keep-logs DIR] [--key KEY=VALUE] ...\n",
          stderr);
    exit(2);
}

static void parse_sizes(struct cmp_options *o, char *list)
{
    o->nsizes = 0;
    for (char *word = strtok(list, ","); word; word = strtok(NULL, ",")) {
        char *end;
        uint64_t v = strtoull(word, &end, 10);
        v *= *end == 'K' ? KIB : *end == 'M' ? KIB * KIB : 1;
        if (v == 0 || v % 8 != 0 || o->nsizes == CMP_MAX_SIZES)
            usage();
        o->size[o->nsizes++] = v;
    }
}

static void parse_types(struct cmp_options *o, char *list)
{
    o->ntypes = 0;
    for (char *word = strtok(list, ","); word; word = strtok(NULL, ",")) {
        unsigned t = strcmp(word, "f32") == 0 ? HRP_F32 : strcmp(word, "bf16") == 0 ? HRP_BF16 : HRP_NDTYPES;
        if (t == HRP_NDTYPES || o->ntypes == CMP_MAX_TYPES)
            usage();
        o->type[o->ntypes++] = t;
    }
}

static void parse(struct cmp_options *o, int argc, char **argv)
{
    static const struct option names[] = {
        {"sizes", 1, NULL, 's'},
        {"types", 1, NULL, 't'},
        {"overlap", 1, NULL, 'o'},
        {"hreduce-only", 0, NULL, 'h'},
        {"busy", 0, NULL, 'b'},
        {"label", 1, NULL, 'l'},
        GJ_OPTIONS,
        {NULL, 0, NULL, 0},
    };
    int c;
    *o = (struct cmp_options){.label = "", .overlap = "auto", .ntypes = 1, .type = {HRP_F32}};
    o->nsizes = sizeof(default_sizes) / sizeof(default_sizes[0]);
    memcpy(o->size, default_sizes, sizeof(default_sizes));
    while ((c = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (c) {
        case 's':
            parse_sizes(o, optarg);
            break;
        case 't':
            parse_types(o, optarg);
            break;
        case 'o':
            o->overlap = optarg;
            break;
        case 'h':
            o->no_nccl = true;
            break;
        case 'b':
            o->busy = true;
            break;
        case 'l':
            o->label = optarg;
            break;
        default:
            if (!gj_option(&o->of_all, c, optarg))
                usage();
        }
    }
    if (optind + 1 != argc || sscanf(argv[optind], "%ux%u", &o->nodes, &o->ranks_a_node) != 2 ||
        o->nodes == 0 || o->ranks_a_node == 0 || o->nodes * o->ranks_a_node > GR_MAX_RANKS)
        usage();
    for (unsigned i = 0; i < o->nsizes; i++)
        o->max_bytes = o->size[i] > o->max_bytes ? o->size[i] : o->max_bytes;
}

static void print_csv(const struct cmp_options *o, const struct cmp_page *page)
{
    FILE *f = o->of_all.csv ? fopen(o->of_all.csv, "ae") : NULL;
    if (!f)
        return;
    for (unsigned i = 0; i < page->nrows; i++) {
        const struct cmp_row *r = &page->row[i];
        for (unsigned c = 0; c < CMP_CONTENDERS; c++)
            if (r->p50[c] > 0)
                fprintf(f, "\"%s\",%ux%u,%s,%s,%s,%llu,%.1f,%.1f,%llu\n", o->label, o->nodes, o->ranks_a_node,
                        o->overlap, hrp_dtype_name(r->type), c == CMP_NCCL ? "nccl" : "hreduce",
                        (unsigned long long)r->bytes, r->p50[c], r->back_to_back[c],
                        (unsigned long long)r->wrong[c]);
    }
    fclose(f);
}

static int print_busy(const struct cmp_page *page)
{
    static const char *const beside[] = {"alone", "beside NCCL", "beside hreduce"};
    printf("\n| the job's kernels | a second, all GPUs | of alone |\n| --- | --- | --- |\n");
    for (unsigned i = 0; i < 3; i++)
        if (page->busy_rate[i] > 0 && page->busy_rate[0] > 0)
            printf("| %s | %.0f | %.3f |\n", beside[i], page->busy_rate[i],
                   page->busy_rate[i] / page->busy_rate[0]);
    return 0;
}

/* 1 when an element was wrong. */
static int print(const struct cmp_options *o, const struct cmp_page *page)
{
    int wrong = 0;
    printf("\n%s: %u nodes x %u ranks, overlap = %s%s\n", o->label, o->nodes, o->ranks_a_node, o->overlap,
           o->busy ? ", GPUs filled by the job's kernels" : "");
    if (page->nccl_why[0])
        printf("without NCCL: %s\n", page->nccl_why);
    printf("path: %s\n\n", page->path);
    printf("| type | bytes | NCCL us | hreduce us | NCCL/hreduce | NCCL back to back | hreduce | ratio | "
           "wrong: NCCL | hreduce |\n"
           "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for (unsigned i = 0; i < page->nrows; i++) {
        const struct cmp_row *r = &page->row[i];
        printf("| %s | %llu | %.1f | %.1f | %.2f | %.1f | %.1f | %.2f | %llu | %llu |\n",
               hrp_dtype_name(r->type), (unsigned long long)r->bytes, r->p50[CMP_NCCL], r->p50[CMP_HREDUCE],
               r->p50[CMP_NCCL] / r->p50[CMP_HREDUCE], r->back_to_back[CMP_NCCL],
               r->back_to_back[CMP_HREDUCE], r->back_to_back[CMP_NCCL] / r->back_to_back[CMP_HREDUCE],
               (unsigned long long)r->wrong[CMP_NCCL], (unsigned long long)r->wrong[CMP_HREDUCE]);
        wrong |= r->wrong[CMP_NCCL] + r->wrong[CMP_HREDUCE] != 0;
    }
    if (o->busy)
        print_busy(page);
    fflush(stdout);
    return wrong;
}

int main(int argc, char **argv)
{
    static struct cmp_options o;
    struct hpf_cluster *cluster = NULL;
    struct hpf_job *job = NULL;
    char err[2048];
    parse(&o, argc, argv);
    hpf_catch_signals();
    const struct hpf_cluster_options daemons = {
        .nnodes = o.nodes, .keys = o.of_all.key, .nkeys = o.of_all.nkeys, .keep_logs = o.of_all.keep_logs};
    if (hpf_cluster_new(&cluster, &daemons, err, sizeof(err)) < 0) {
        fprintf(stderr, "compare: %s\n", err);
        return 1;
    }
    const struct hpf_job_options ranks = {.nranks = o.nodes * o.ranks_a_node,
                                          .fn = cmp_rank,
                                          .arg = &o,
                                          .shared_bytes = sizeof(struct cmp_page)};
    int status = hpf_job_start(&job, cluster, &ranks, err, sizeof(err));
    if (status == 0)
        status = hpf_job_wait(job, 60000, err, sizeof(err));
    if (status < 0)
        fprintf(stderr, "compare: %s\n", err);
    /* What was measured before a failure is worth printing too. */
    if (job && WIFEXITED(hpf_job_status(job, 0)) && WEXITSTATUS(hpf_job_status(job, 0)) == GJ_SKIP) {
        hpf_job_free(job);
        (void)hpf_cluster_free(cluster, err, sizeof(err));
        return GJ_SKIP;
    }
    if (job) {
        print_csv(&o, hpf_job_shared(job));
        status = print(&o, hpf_job_shared(job)) || status < 0;
    }
    hpf_job_free(job);
    if (hpf_cluster_free(cluster, err, sizeof(err)) < 0) {
        fprintf(stderr, "compare: %s\n", err);
        status = 1;
    }
    return status ? 1 : 0;
}
