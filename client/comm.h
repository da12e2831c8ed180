/* SPDX-License-Identifier: MIT */
/*
 * A communicator. Locks, in the order in which they may be taken:
 *   post_lock   numbers ops and pushes descriptors; held while a post waits for a free op slot
 *   stage.lock  the right to copy between user buffers and the window ("the copier"); tried, never waited for
 *               by those who only want progress
 *   lock        ops[].number, complete, staged, result; the failures; the verdict's text; short
 */
#ifndef HCL_COMM_H
#define HCL_COMM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "client/context.h"
#include "client/hclient.h"
#include "client/spin.h"
#include "proto/shm.h"

#define HCL_FAILURES 256

/* Slot k % R: op k until op k + R takes it over, which it may once op k is complete. */
struct hcl_op {
    uint64_t number; /* under lock; 0: never used */
    bool complete;   /* under lock: the result is known and the library is done with the buffers */
    bool staged;     /* under lock */
    bool gpu;        /* under lock: of a stream, see gpu.h */
    bool deferred;   /* under lock and post_lock: and none waits for it so far */
    hclient_result_t result;
    struct hrp_sig sig;

    /* Staged ops: written by the poster before it queues the op, then by the copier alone; ops of a stream: under
       post_lock, in and out count what is enqueued. */
    bool sends; /* this rank has input: on a broadcast only the root */
    const char *send;
    char *recv;
    uint64_t base;  /* position of its stream */
    uint64_t bytes; /* of the stream */
    uint64_t nchunks;
    _Atomic uint64_t in;              /* chunks whose input is in the window */
    uint64_t out;                     /* chunks that were copied out: their window bytes are free */
    void *stream;                     /* ops of a stream: it; deferred: that of the input */
    const void *buffer;               /* ... and one of its buffers, NULL: it has none */
    struct hcl_gpu_memory *memory[2]; /* that it uses; under post_lock, and when the comm ends */
};

struct hcl_failure {
    uint64_t number;
    hclient_result_t result;
    char text[HRP_OP_TEXT + 1];
};

#define HCL_STAGE_QUEUE ((uint64_t)2 * HRP_OP_SLOTS)

struct hcl_stage {
    pthread_mutex_t lock;
    char *window;   /* NULL until the first staged op; written under post_lock and lock */
    uint64_t bytes; /* of the window */
    uint64_t next;  /* position of the next op's stream; under post_lock */

    /* Staged ops in order of posting. The poster writes an entry, then tail; the copier takes out (0) what is
       complete. An op in it is incomplete, so that its slot is nobody else's. */
    uint64_t queue[HCL_STAGE_QUEUE];
    _Atomic uint64_t tail;
    uint64_t head; /* copier */

    _Atomic uint32_t work;     /* posts so far: a copier looks again when it changed under it */
    _Atomic uint32_t turns;    /* futex: times a copier left */
    _Atomic uint32_t sleepers; /* on turns */
    _Atomic uint32_t feeders;  /* threads that wait on this comm, and so feed it */
    _Atomic uint64_t live;     /* staged ops that are not complete */
    _Atomic uint64_t unfed;    /* of them, those whose input is not all in the window */
    _Atomic uint64_t front;    /* oldest staged op that is not complete, as of the last turn; 0: none */
};

struct hcl_comm {
    struct hcl_comm *next; /* of the context; under its lock */
    struct hcl_context *ctx;
    struct hrp_comm_area *area;
    hclient_comm_t handle;
    uint32_t slot;
    uint32_t nranks, rank, nnodes, node, nlocal;
    int local_rank;
    uint32_t op_timeout_ms;
    bool trap;        /* on_error = trap */
    uint32_t require; /* HRP_REQUIRE_*, of this job and of the daemons */
    uint8_t id[16];

    pthread_mutex_t post_lock;
    _Atomic uint64_t posted; /* number of the last op */
    struct hcl_stage stage;
    struct hcl_gpu *gpu; /* NULL until the first op of a stream; set under post_lock and lock */

    pthread_mutex_t lock;
    struct hcl_op ops[HRP_OP_SLOTS];
    struct hcl_failure *failures; /* ring, made with the first failure */
    uint64_t nfailures;
    uint64_t forgotten;     /* newest op whose failure fell out of the ring */
    uint64_t first_failure; /* since the last hclient_comm_wait(); 0: none */
    struct hcl_registration *registrations;
    struct hcl_spin spin;

    /* Verdict on the whole comm. status: 0 or enum hrp_status, set once, after the text. */
    _Atomic uint32_t verdict;
    char verdict_text[HRP_COMM_TEXT + 1];
    _Atomic uint64_t ending_since; /* first time anybody saw that it failed or was aborted; 0: not yet */
    _Atomic uint64_t
        spoil_since; /* session lost: first time that the window could not be looked at; 0: not yet */
    atomic_bool aborted;
    atomic_bool destroying;
    atomic_bool reported;
};

/* ------------------------------------------------------------------------------------------- handles */

/* A public handle for comm, with one reference, the owner's. NULL: no memory. */
hclient_comm_t hcl_handle_new(struct hcl_comm *comm);
/* A counted reference, or NULL for what is not (or no longer) a communicator. */
struct hcl_comm *hcl_handle_get(hclient_comm_t handle);
void hcl_handle_put(hclient_comm_t handle);
/* Ends the handle: no new references. False: it was not alive. The caller then waits for
   hcl_handle_drain(). */
bool hcl_handle_close(hclient_comm_t handle, struct hcl_comm **comm);
bool hcl_handle_idle(hclient_comm_t handle);
void hcl_handle_free(hclient_comm_t handle);

/* hcl_handle_get() with a sentence; the thread's call is about this comm from here on. */
hclient_result_t hcl_comm_enter(hclient_comm_t handle, const char *call, struct hcl_comm **comm);

void hcl_registrations_free(struct hcl_comm *comm);
/* Whether a registration lies in this memory, or part of one. Takes the comm's lock. */
bool hcl_is_registered(struct hcl_comm *comm, uintptr_t base, size_t bytes);

/* -------------------------------------------------------------------------------------- states, waits */

/* 0 while the comm works; else enum hrp_status, and the sentence in text. */
uint32_t hcl_comm_state(struct hcl_comm *comm, char *text, size_t size);
/* Fills in why the comm failed, or, while it works, of its last op that failed; whether it failed. */
bool hcl_comm_last_error(hclient_comm_t handle, char *buf, size_t size);
/* Records the verdict (the first one stays), completes all pending ops with it: no buffer is touched
   afterwards. */
void hcl_comm_end(struct hcl_comm *comm, uint32_t status, const char *text);
void hcl_comm_wake(struct hcl_comm *comm);
/* The same after this rank broke off an op that the daemon knows of: all ranks are told. */
void hcl_comm_give_up(struct hcl_comm *comm, hclient_result_t result, const char *why);
/* The session is lost: once the daemon lets go for certain, releases whoever waits for its words. Whether it did. */
bool hcl_comm_poison(struct hcl_comm *comm);
/* Likewise, at once, whatever streams then copy out. */
void hcl_comm_poison_all(struct hcl_comm *comm);
/* Whether the daemon has ops of it to do. */
bool hcl_comm_pending(struct hcl_comm *comm);
/* Watcher: says once that the comm failed. */
void hcl_comm_report(struct hcl_comm *comm);

/* A reference to the comm of an op that was posted. */
hclient_result_t hcl_op_enter(hclient_op_t op, const char *call, struct hcl_comm **comm);

/* What the daemon says about an op; text only of a failure. */
struct hcl_outcome {
    hclient_result_t result;
    char text[HRP_OP_TEXT + 1];
};
/* True when the op is over; then *outcome, copied out and checked. *chunks: done so far. */
bool hcl_op_over(struct hcl_comm *comm, uint64_t number, uint64_t *chunks, struct hcl_outcome *outcome);
/* The op is complete, unless it was before; text (may be NULL) of a failure. Wakes nobody. Takes lock. */
void hcl_op_complete(struct hcl_comm *comm, uint64_t number, hclient_result_t result, const char *text);

/* Waits until the op is complete, by whatever cause. */
void hcl_wait_complete(struct hcl_comm *comm, uint64_t number);

/* --------------------------------------------------------------------------------------------- staging */

void hcl_stage_init(struct hcl_stage *stage);
void hcl_stage_deinit(struct hcl_stage *stage);
/* Under post_lock: makes the window if there is none. */
hclient_result_t hcl_stage_window(struct hcl_comm *comm);
/* Under lock of the comm's post_lock: queues op, whose fields are set. */
void hcl_stage_queue(struct hcl_comm *comm, const struct hcl_op *op);
enum hcl_stage_turn {
    HCL_STAGE_BUSY,  /* another thread is the copier, and will look again */
    HCL_STAGE_IDLE,  /* nothing to copy now */
    HCL_STAGE_MOVED, /* copied something out */
    HCL_STAGE_FED,   /* copied something in, and rang the doorbell after it */
};
/* Copies what can be copied now. */
enum hcl_stage_turn hcl_stage_progress(struct hcl_comm *comm);
/* Completes all staged ops with the comm's verdict; nothing is copied afterwards. */
void hcl_stage_end(struct hcl_comm *comm);

#endif
