/* SPDX-License-Identifier: MIT */
/*
 * An engine does the node-local arithmetic and copies of the pipeline: it takes work (folds, copies) over spans of memory
 * and finishes it asynchronously. It knows nothing of ops, ranks or peers. One table an implementation.
 */
#ifndef HRD_ENGINE_H
#define HRD_ENGINE_H

#include <stdint.h>

#include "kernels/kernels.h"

/* A run of bytes of one source or sink. Byte x lies at base + off + x, or, in a staging window (wrap != 0), at
   base + (off + x) % wrap. */
struct hrd_span {
    char *base;
    uint64_t off;
    uint64_t wrap;
};

enum hrd_work_kind {
    HRD_WORK_FOLD, /* span[0..nsrc) -> span[nsrc..nsrc+ndst) by fold */
    HRD_WORK_COPY, /* span[0] -> span[1..1+ndst) */
    HRD_WORK_NAN,  /* the NaN of fold.out into span[0..ndst); nsrc is 0 */
};

/* Owner: the submitter, until done() is called. */
struct hrd_work {
    enum hrd_work_kind kind;
    struct hrk_fold fold;
    uint32_t nsrc, ndst;
    uint64_t n; /* elements of fold.in/out; n may be 0 */
    /* Called once, on the agent's thread, from poll(): nobody touches the spans any more. */
    void (*done)(struct hrd_work *w);
    void *owner;
    uint32_t step;
    /* the engine's: */
    uint64_t chunk;
    uint64_t next_chunk;
    _Atomic uint64_t left;
    struct hrd_work *next;
    struct hrd_span span[];
};

struct hrd_engine {
    const struct hrd_engine_table *table;
};

struct hrd_engine_table {
    const char *name;
    /* Never blocks, never fails. */
    void (*submit)(struct hrd_engine *e, struct hrd_work *w);
    /* Calls done() of finished work; returns how many. Agent thread. */
    unsigned (*poll)(struct hrd_engine *e);
    /* 1: the agent is about to sleep and wants its eventfd written when work finishes. Returns nonzero when finished work
       waits already. */
    int (*arm)(struct hrd_engine *e, int armed);
    /* The agent has nothing else to do: runs one piece of queued work on its thread. Returns how many, 0 or 1. */
    unsigned (*help)(struct hrd_engine *e);
    void (*free)(struct hrd_engine *e);
};

/* Reduce threads over host memory; `wake` is an eventfd of the agent. NULL with errno. */
struct hrd_engine *hrd_engine_host_new(unsigned threads, uint64_t chunk_bytes, int wake);

#endif
