/* SPDX-License-Identifier: MIT */
/* The command line of hreduce-perf. */
#ifndef HPF_OPTIONS_H
#define HPF_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HPF_ALL UINT32_MAX /* every type, or every reduction */
#define HPF_MAX_KEYS 64

struct hpf_options {
    unsigned coll;         /* enum hrp_coll */
    unsigned dtype, redop; /* or HPF_ALL */
    unsigned root;
    uint64_t min_bytes, max_bytes, step_bytes; /* of the whole data; step 0: factor */
    unsigned factor;
    unsigned iters, warmup, check;
    bool blocking;    /* one op at a time, else several in flight */
    bool gpu;         /* buffers in GPU memory */
    unsigned overlap; /* HCLIENT_OVERLAP_* */
    bool plain;       /* ordinary memory instead of hclient_mem_alloc() */
    unsigned algo;    /* HCLIENT_ALGO_* */
    int reproducible; /* HCLIENT_DEFAULT, OFF, ON */
    int wire_f32;
    unsigned timeout_s;
    const char *json;
    const char *name; /* rendezvous name under a launcher */
    /* --local */
    unsigned local_nodes, local_ranks; /* 0: attach to the running daemon */
    bool round_robin;
    const char *keep_logs;
    const char *keys[HPF_MAX_KEYS];
    unsigned nkeys;
};

enum hpf_parse { HPF_RUN, HPF_EXIT_OK, HPF_USAGE };
/* Prints help (HPF_EXIT_OK) or what is wrong (HPF_USAGE) itself. Strings point into argv. */
enum hpf_parse hpf_options_parse(struct hpf_options *o, int argc, char **argv);

/* "4M", "64k", "1000" to bytes. False when it is no size. */
bool hpf_parse_size(const char *text, uint64_t *bytes);
/* "4 MiB", "1000 B"; buf is returned. */
const char *hpf_size_text(uint64_t bytes, char *buf, size_t len);
/* As nccl-tests call them: "float", "half", ... */
const char *hpf_type_name(unsigned dtype);

#endif
