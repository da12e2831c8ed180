/* SPDX-License-Identifier: MIT */
/*
 * Ops on GPU buffers, in the order of CUDA streams. The library only enqueues: a stream writes the op's ready word when it
 * comes to it, waits for its done word, and then writes the op's `passed` word, which tells the CPU that the stream is behind
 * the op. No thread of the library takes part.
 *
 *   gpu_device.c  which memory and which context: everything that is asked of CUDA before an op is posted
 *   gpu_comm.c    what streams of a communicator write and wait for, pinned; its end; the release of streams
 *   gpu_wait.c    waits that come later than the call; streams that are held when an op failed
 *   gpu_staged.c  the way of copies through the comm's window, by the job's own stream
 *   gpu_import.c  the way of memory that the daemon has, exported to it once an allocation
 *   gpu_alone.c   the way of a communicator of one rank: a copy in the stream
 *
 * An op's slot is free again when the daemon is done with the op and its stream has passed it: a stream that comes late would
 * write the ready word of an op that is over.
 */
#ifndef HCL_GPU_H
#define HCL_GPU_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "client/call.h"
#include "client/comm.h"
#include "kernels/gpu_driver.h"

struct hcl_gpu {
    const struct hrg_driver *drv;
    hrg_ctx ctx;              /* in which the memory below was pinned */
    uint64_t devices_checked; /* bit a device: it has stream memory operations; under post_lock */
    hrg_ptr area;             /* device address of the comm's area */
    bool pinned_area;         /* by this library, to be undone */
    _Atomic uint64_t *passed; /* by slot, written by streams: number of the op that a stream passed last */
    hrg_ptr passed_dev;
    bool pinned_window;   /* under post_lock */
    char window_why[512]; /* likewise: the sentence when it cannot be pinned, which is not tried again */
    /* Under post_lock: memory of the call that is being posted; and what ops on this comm did, for the path report. */
    struct hcl_gpu_memory *found[2];
    uint64_t imported_ops, staged_ops, alone_ops, deferred_ops;
    char staged_because[512];
};

/* ---- gpu_device.c -------------------------------------------------------------------------------------------------- */

/* Whether the call is one of a stream: its buffers are GPU memory, or it has a stream. *result: or why it is refused. */
bool hcl_gpu_wants(const struct hrg_driver *drv, const struct hcl_call *c, hclient_result_t *result);

/* A context that the stream's calls need, made current, with a capture mode in which lazy calls harm no capture. */
struct hcl_gpu_scope {
    const struct hrg_driver *drv;
    bool pushed;
    bool relaxed;
    int mode;            /* the thread's before */
    hrg_device retained; /* -1: none */
};
/* Refuses a capturing stream before it does anything else. near: a buffer, 0: none. */
hclient_result_t hcl_gpu_enter(const struct hrg_driver *drv, const char *call, hrg_stream stream,
                               hrg_ptr near, struct hcl_gpu_scope *scope);
void hcl_gpu_leave(struct hcl_gpu_scope *scope);
/* The result of a driver call that failed, as a sentence: "<call>: <what> failed: CUDA_ERROR_...". */
hclient_result_t hcl_gpu_fail(const struct hrg_driver *drv, const char *call, const char *what,
                              hrg_result error);

/* ---- gpu_comm.c ---------------------------------------------------------------------------------------------------- */

/* Under post_lock, in a scope: what the comm needs for ops in stream order; made on the first. */
hclient_result_t hcl_gpu_need(struct hcl_comm *comm, const struct hrg_driver *drv, const char *call);
/* Likewise: its window, which exists, is pinned. False: window_why says why not, and hcl_way_gpu_unpinned is left. */
bool hcl_gpu_pin_window(struct hcl_comm *comm, const char *call);
bool hcl_gpu_passed(const struct hcl_comm *comm, uint64_t number);
/* The op in a slot when it is one of a stream that has not passed it; 0: none. */
uint64_t hcl_gpu_unpassed(struct hcl_comm *comm, unsigned slot);
/* A stream is about to wait: says once a process what that does to its other streams. */
void hcl_gpu_warn_waits(void);
/* Watcher: ops that nobody waits for become results. */
void hcl_gpu_harvest(struct hcl_comm *comm);
/* Watcher, the daemon is gone: what streams fed of the window for ops that they have not passed becomes NaN, before they copy it
   out. *feeding, bit k: the stream of the op in slot k is still to feed some, so that no poison may let it go on yet; ask
   again. False: not now, another thread is posting. */
bool hcl_gpu_spoil(struct hcl_comm *comm, uint32_t *feeding);
/* Whether streams still come to words or memory of the comm. */
bool hcl_gpu_pending(struct hcl_comm *comm);
/* What ops of streams on this comm did and why, added to the daemon's path report, which is one JSON object; json is freed and
   the new text returned, or json itself. */
char *hcl_gpu_report(struct hcl_comm *comm, char *json);
/* Frees comm->gpu. False: streams may still come, nothing they touch may be unmapped. */
bool hcl_gpu_deinit(struct hcl_comm *comm, uint64_t wait_ns);

/* ---- gpu_wait.c ---------------------------------------------------------------------------------------------------- */

/* Under post_lock: refuses the call when the op that has its slot is deferred and no stream waits for it. */
hclient_result_t hcl_gpu_slot_free(struct hcl_comm *comm, const struct hcl_call *c, uint64_t number);
/* Without post_lock; the daemon is done with the op, which is deferred: its own stream takes the output, unless another did. */
void hcl_gpu_take(struct hcl_comm *comm, uint64_t number);
/* Whether a stream still comes to words or memory of the op in this slot. Under lock. */
bool hcl_gpu_comes(const struct hcl_comm *comm, const struct hcl_op *op);

/* 0 when the op went well. The daemon writes it before done, and the slot is not used again before the stream passed. */
hrg_ptr hcl_gpu_status_word(const struct hcl_comm *comm, uint64_t number);
/* Ends the process for an op of a stream that failed, unless this rank itself ended the comm: then streams that are held go on. */
void hcl_gpu_trap(struct hcl_comm *comm);
/* The same when the session is lost. */
void hcl_gpu_trap_lost(struct hcl_comm *comm);

/* ---- gpu_staged.c -------------------------------------------------------------------------------------------------- */

/* Common to all GPU ways, under post_lock: hcl_gpu_wants(), the scope, hcl_gpu_need(). On HCLIENT_OK with true the scope is
   the caller's to leave. */
bool hcl_gpu_prepare(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_gpu_scope *scope,
                     hclient_result_t *result);
/* Appends to the stream: wait for an older op's passing; write the op's own. */
hrg_result hcl_gpu_wait_passed(struct hcl_comm *comm, hrg_stream stream, uint64_t number);
hrg_result hcl_gpu_write_passed(struct hcl_comm *comm, hrg_stream stream, uint64_t number);
/* Under post_lock, in a scope: all that op->stream does for the op, in as few calls as can be; deferred: up to ready. */
hrg_result hcl_gpu_enqueue(struct hcl_comm *comm, struct hcl_op *op);

/* Likewise what it does from a deferred op's end on: wait for it, take the output, pass. */
hrg_result hcl_gpu_finish(struct hcl_comm *comm, struct hcl_op *op);

extern const struct hcl_way hcl_way_gpu_alone;  /* gpu_alone.c: a comm of one rank */
extern const struct hcl_way hcl_way_gpu_staged; /* gpu_staged.c */
extern const struct hcl_way hcl_way_gpu_shared; /* gpu_import.c: memory that the daemon has */
extern const struct hcl_way
    hcl_way_gpu_unpinned; /* the same for what would be staged, where the window cannot be pinned */

#endif
