/* SPDX-License-Identifier: MIT */
/* What hreduce-perf prints: the table of nccl-tests, the bytes between the nodes, the path; and the JSON file. */
#ifndef HPF_TABLE_H
#define HPF_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "client/perf/bench.h"

/* Results in the order they were measured; an out-of-place result is followed by its in-place one, if any. */
struct hpf_results {
    struct hpf_result *list;
    size_t n, room;
};

/* Makes room for one more; NULL: out of memory. */
struct hpf_result *hpf_results_add(struct hpf_results *r);

void hpf_table_head(const struct hpf_world *w);
/* One line; in: NULL where the collective has no in-place form. */
void hpf_table_row(const struct hpf_world *w, const struct hpf_result *out, const struct hpf_result *in);
/* The summary. path: the daemon's JSON. Returns the number of wrong elements in all. */
uint64_t hpf_table_foot(const struct hpf_world *w, const struct hpf_results *results, const char *path);
void hpf_json_write(FILE *f, const struct hpf_world *w, const struct hpf_results *results, const char *path);

/* "12345" to "1.235e+06": a number in at most `width` characters. */
const char *hpf_number(double v, int width, char *buf, size_t len);

#endif
