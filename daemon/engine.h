/* SPDX-License-Identifier: MIT */
/*
 * An engine does the node-local arithmetic and copies of the pipeline: it takes work (folds, copies) over spans of memory
 * and finishes it asynchronously. It knows nothing of ops, ranks or peers. One table an implementation.
 */
#ifndef HRD_ENGINE_H
#define HRD_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "proto/types.h"

/* A run of bytes of one source or sink. Byte x lies at base + off + x, or, in a staging window (wrap != 0), at
   base + (off + x) % wrap. Of memory of a GPU base is the device address in the daemon's process, to be given to the driver
   alone. */
struct hrd_span {
    char *base;
    uint64_t off;
    uint64_t wrap;
    int16_t gpu; /* index as in daemon/gpu/gpu.h; HRD_HOST_MEMORY: the CPU's */
};
#define HRD_HOST_MEMORY ((int16_t)-1)

enum hrd_work_kind {
    HRD_WORK_FOLD, /* span[0..nsrc) -> span[nsrc..nsrc+ndst) by fold */
    HRD_WORK_COPY, /* span[0] -> span[1..1+ndst) */
    HRD_WORK_NAN,  /* the NaN of fold.out into span[0..ndst); nsrc is 0 */
};

#define HRD_WORK_TEXT 400u

/* Why work did not do what it should have. */
struct hrd_work_error {
    bool device_lost; /* every later work on that device fails too */
    char text[HRD_WORK_TEXT];
};

/* Owner: the submitter, until done() is called. */
struct hrd_work {
    enum hrd_work_kind kind;
    struct hrk_fold fold;
    uint32_t nsrc, ndst;
    uint64_t n; /* elements of fold.in/out; n may be 0 */
    /* Called once, on the agent's thread, from poll(): nobody touches the spans any more. error: NULL, or what kept the
       engine from it (valid during the call); what the sinks hold is then undefined. */
    void (*done)(struct hrd_work *w, const struct hrd_work_error *error);
    /* Asked on the agent's thread before more of it is begun. False, and then for ever: nobody wants the rest, so that the
       engine may call done() as soon as what is under way is over. NULL: all of it is wanted. */
    bool (*wanted)(const struct hrd_work *w);
    void *owner;
    uint32_t step;
    uint64_t began_ns; /* by an engine whose work waits for a device: when the device had all of it; else 0 */
    /* the engine's: */
    uint64_t chunk;
    uint64_t next_chunk;
    _Atomic uint64_t left;
    struct hrd_work_error *error;
    struct hrd_work *next;
    struct hrd_span span[];
};

enum hrd_engine_kind { HRD_ENGINE_HOST, HRD_ENGINE_DMA, HRD_ENGINE_SM, HRD_NENGINES };

/* What an op will want of an engine; asked once an op, before its first work. */
struct hrd_engine_ask {
    uint64_t gpus; /* bit g: one of its local buffers lies on GPU g */
    bool host;     /* one of them lies in host memory */
    struct hrp_sig sig;
    uint32_t nlocal;
    bool one_node; /* inputs are folded straight into the outputs */
};

struct hrd_engine {
    const struct hrd_engine_table *table;
};

struct hrd_engine_table {
    const char *name;
    /* Bytes of an op of one node that it wants in one piece of work, when that is more than the plan's unit: each piece costs
       it much. 0: as planned. */
    uint64_t one_node_unit;
    /* NULL: the engine can do such an op. Else a phrase why not ("no GPU kernels in this build"), which lives until the next
       call. */
    const char *(*refuses)(struct hrd_engine *e, const struct hrd_engine_ask *ask);
    /* How long, in ns, its recent work on these GPUs waited to be run by them; 0: not at all, or nothing is known. */
    uint64_t (*waited)(struct hrd_engine *e, uint64_t gpus);
    /* Never blocks; failures come with done(). */
    void (*submit)(struct hrd_engine *e, struct hrd_work *w);
    /* Calls done() of finished work; returns how many. Agent thread. */
    unsigned (*poll)(struct hrd_engine *e);
    /* 1: the agent is about to sleep and wants its eventfd written when work finishes. Nonzero: it must not sleep, finished
       work waits already. */
    int (*arm)(struct hrd_engine *e, int armed);
    /* Work is in flight whose end rings no eventfd: the agent looks again within some 50 us. NULL: never. */
    bool (*silent)(struct hrd_engine *e);
    /* The agent has nothing else to do: runs one piece of queued work on its thread. Returns how many, 0 or 1. */
    unsigned (*help)(struct hrd_engine *e);
    void (*free)(struct hrd_engine *e);
};

/* Reduce threads over host memory; `wake` is an eventfd of the agent. NULL with errno. */
struct hrd_engine *hrd_engine_host_new(unsigned threads, uint64_t chunk_bytes, int wake);
/*
 * Of an engine that gives its arithmetic to the host engine in small pieces, each of which others wait for: more comes any
 * moment (true), or not for now (false). Meanwhile, and for a while after, idle threads look for work instead of sleeping,
 * and the agent is left alone, where there are threads enough for that. Agent thread.
 */
void hrd_engine_host_expect(struct hrd_engine *host, bool more);

#endif
