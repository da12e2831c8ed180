/* SPDX-License-Identifier: MIT */
#include "client/perf/table.h"

#include "client/perf/gpu.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/perf/json.h"
#include "proto/types.h"

struct hpf_result *hpf_results_add(struct hpf_results *r)
{
    if (r->n == r->room) {
        size_t room = r->room ? 2 * r->room : 32;
        struct hpf_result *list = realloc(r->list, room * sizeof(*list));
        if (!list)
            return NULL;
        r->list = list;
        r->room = room;
    }
    return &r->list[r->n++];
}

const char *hpf_number(double v, int width, char *buf, size_t len)
{
    for (int digits = 2; digits >= 0; digits--)
        if (snprintf(buf, len, "%.*f", digits, v) <= width)
            return buf;
    snprintf(buf, len, "%.*e", width > 7 ? width - 7 : 0, v);
    return buf;
}

static bool reduces(unsigned coll)
{
    return coll == HRP_ALL_REDUCE || coll == HRP_REDUCE_SCATTER;
}

/* ---- head ------------------------------------------------------------------------------------------------ */

/* "0-7" or "0 4 8 12": the ranks of a node. */
static void print_ranks(const struct hpf_world *w, unsigned node)
{
    const char *separator = "";
    for (unsigned r = 0; r < w->nranks; r++) {
        if (w->node_of_rank[r] != node)
            continue;
        unsigned last = r;
        while (last + 1 < w->nranks && w->node_of_rank[last + 1] == node)
            last++;
        if (last > r)
            printf("%s%u-%u", separator, r, last);
        else
            printf("%s%u", separator, r);
        separator = " ";
        r = last;
    }
}

void hpf_table_head(const struct hpf_world *w)
{
    const struct hpf_options *o = w->o;
    printf("# hreduce-perf: %s, %u rank%s on %u node%s, %s memory, daemon %s\n", hrp_coll_name(o->coll),
           w->nranks, w->nranks == 1 ? "" : "s", w->nnodes, w->nnodes == 1 ? "" : "s",
           o->gpu     ? hpf_gpu_name(w)
           : o->plain ? "ordinary"
                      : "hclient_mem_alloc()",
           w->info.daemon_version);
    for (unsigned n = 0; n < w->nnodes; n++) {
        printf("# node %u: rank%s ", n, w->nranks > w->nnodes ? "s" : "");
        print_ranks(w, n);
        printf("\n");
    }
    printf("# %u warm-up and %u measured operations a size; time: %s\n", o->warmup, o->iters,
           o->blocking ? "median of the slowest rank's time, one operation after a barrier"
                       : "total by number, operations in flight");
    if (o->check)
        printf("# every element checked %u time%s against %s\n", o->check, o->check == 1 ? "" : "s",
               w->exact ? "the defined result, bit for bit, and a double precision reference"
                        : "a double precision reference (floats) or exactly");
    printf("#\n"
           "#%12s%14s%10s%8s%6s  %28s %7s  %28s %7s\n"
           "#%12s%14s%10s%8s%6s  %10s%9s%9s %7s  %10s%9s%9s %7s\n"
           "#%12s%14s%10s%8s%6s  %10s%9s%9s %7s  %10s%9s%9s %7s\n",
           "", "", "", "", "", "out-of-place", "", "in-place", "", "size", "count", "type", "redop", "root",
           "time", "algbw", "busbw", "#wrong", "time", "algbw", "busbw", "#wrong", "(B)", "(elements)", "",
           "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(GB/s)", "(GB/s)", "");
    fflush(stdout);
}

/* ---- rows ------------------------------------------------------------------------------------------------ */

static void print_half(const struct hpf_world *w, const struct hpf_result *r)
{
    char time[32], alg[32], bus[32], wrong[32] = "N/A";
    if (!r) {
        printf("  %10s%9s%9s %7s", "N/A", "N/A", "N/A", "N/A");
        return;
    }
    if (w->o->check)
        snprintf(wrong, sizeof(wrong), "%" PRIu64, r->wrong);
    printf("  %10s%9s%9s %7s", hpf_number(r->time_us, 9, time, sizeof(time)),
           hpf_number(r->algbw, 8, alg, sizeof(alg)), hpf_number(r->busbw, 8, bus, sizeof(bus)), wrong);
}

void hpf_table_row(const struct hpf_world *w, const struct hpf_result *out, const struct hpf_result *in)
{
    char root[16] = "-1";
    if (out->coll == HRP_BROADCAST)
        snprintf(root, sizeof(root), "%u", out->root);
    printf(" %12" PRIu64 "%14" PRIu64 "%10s%8s%6s", out->bytes, out->count,
           out->coll == HRP_BARRIER ? "none" : hpf_type_name(out->dtype),
           reduces(out->coll) ? hrp_redop_name(out->redop) : "none", root);
    print_half(w, out);
    print_half(w, in);
    printf("\n");
    fflush(stdout);
}

/* ---- foot ------------------------------------------------------------------------------------------------ */

static void extremes(const struct hpf_world *w, const struct hpf_result *r, double *low, double *high)
{
    *low = *high = r->tx[0];
    for (unsigned n = 1; n < w->nnodes; n++) {
        *low = r->tx[n] < *low ? r->tx[n] : *low;
        *high = r->tx[n] > *high ? r->tx[n] : *high;
    }
}

static void print_wire(const struct hpf_world *w, const struct hpf_results *results)
{
    printf("#\n# Bytes sent by a node for one operation, headers included:\n"
           "#%12s%10s%8s%16s%16s%16s%9s  %s\n",
           "size", "type", "redop", "least", "most", "ideal", "most/id.", "algorithm");
    for (size_t i = 0; i < results->n; i++) {
        const struct hpf_result *r = &results->list[i];
        double low, high;
        char ratio[32] = "-";
        if (r->inplace)
            continue;
        extremes(w, r, &low, &high);
        if (r->ideal)
            snprintf(ratio, sizeof(ratio), "%.3f", high / (double)r->ideal);
        printf("#%12" PRIu64 "%10s%8s%16.0f%16.0f%16" PRIu64 "%9s  %s\n", r->bytes, hpf_type_name(r->dtype),
               reduces(r->coll) ? hrp_redop_name(r->redop) : "none", low, high, r->ideal, ratio, r->plan);
    }
}

static void print_member(struct hpf_json object, const char *name, const char *label)
{
    struct hpf_json v;
    char text[512];
    if (hpf_json_member(object, name, &v) && hpf_json_string(v, text, sizeof(text)))
        printf("# %-18s%s\n", label, text);
}

/* The stages of rank 0's communicator as its node reports them. */
static void print_path(const char *path)
{
    struct hpf_json doc, stages, stage, v;
    char label[64];
    if (!path || !hpf_json_parse(path, &doc))
        return;
    printf("#\n# Path, from the node of rank 0:\n");
    print_member(doc, "layout", "layout");
    if (!hpf_json_member(doc, "stages", &stages))
        return;
    for (size_t i = 0; hpf_json_element(stages, i, &stage); i++) {
        if (!hpf_json_member(stage, "stage", &v) || !hpf_json_string(v, label, sizeof(label)))
            continue;
        print_member(stage, "used", label);
        print_member(stage, "wanted", "    wanted");
        print_member(stage, "reason", "    because");
        print_member(stage, "remedy", "    remedy");
    }
}

uint64_t hpf_table_foot(const struct hpf_world *w, const struct hpf_results *results, const char *path)
{
    uint64_t wrong = 0;
    double sum = 0;
    for (size_t i = 0; i < results->n; i++) {
        wrong += results->list[i].wrong;
        sum += results->list[i].busbw;
    }
    if (w->nnodes > 1)
        print_wire(w, results);
    print_path(path);
    printf("#\n");
    if (w->o->check)
        printf("# Wrong elements       : %" PRIu64 " %s\n", wrong, wrong ? "FAILED" : "OK");
    else
        printf("# Wrong elements       : not checked\n");
    printf("# Avg bus bandwidth    : %.6g GB/s\n#\n", results->n ? sum / (double)results->n : 0);
    fflush(stdout);
    return wrong;
}

/* ---- JSON ------------------------------------------------------------------------------------------------ */

void hpf_json_write(FILE *f, const struct hpf_world *w, const struct hpf_results *results, const char *path)
{
    fprintf(f, "{\"results\": [");
    for (size_t i = 0; i < results->n; i++) {
        const struct hpf_result *r = &results->list[i];
        fprintf(
            f,
            "%s\n  {\"op\": \"%s\", \"bytes\": %" PRIu64 ", \"count\": %" PRIu64
            ", \"type\": \"%s\", \"redop\": \"%s\", \"inplace\": %s, \"time_us\": %.3f, \"p99_us\": %.3f, "
            "\"algbw_GBps\": %.6g, \"busbw_GBps\": %.6g, \"wrong\": %" PRIu64 ", \"wire_tx_bytes\": [",
            i ? "," : "", hrp_coll_name(r->coll), r->bytes, r->count, hpf_type_name(r->dtype),
            reduces(r->coll) ? hrp_redop_name(r->redop) : "none", r->inplace ? "true" : "false", r->time_us,
            r->p99_us, r->algbw, r->busbw, r->wrong);
        for (unsigned n = 0; n < w->nnodes; n++)
            fprintf(f, "%s%.0f", n ? ", " : "", r->tx[n]);
        fprintf(f, "], \"wire_ideal_bytes\": %" PRIu64 "}", r->ideal);
    }
    struct hpf_json doc;
    fprintf(f, "\n ],\n \"path\": ");
    if (path && hpf_json_parse(path, &doc))
        fwrite(doc.at, 1, (size_t)(doc.end - doc.at), f);
    else
        hpf_json_print_string(f, path ? path : "");
    fprintf(f, "}\n");
}
