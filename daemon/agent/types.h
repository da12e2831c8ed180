/* SPDX-License-Identifier: MIT */
/*
 * The agent's objects. All belong to the agent's thread; nobody else reads or writes them, except the command and event
 * queues, which have locks. How an op flows:
 *
 *   ingest.c    ring -> checked descriptor -> struct aop; when all local ranks have posted: plan
 *   choose.c    which engine works for it
 *   pool.c      in which memory: the arena, or a GPU's that the adapter reaches
 *   pipeline.c  admission of units, their steps: engine work, frames to send, slots to receive into
 *   frames.c    what arrives from peers
 *   complete.c  results to the ranks
 *   spoil.c     failed ops that a CUDA stream still copies out of a window
 *   abort.c     how an op or a comm fails everywhere
 */
#ifndef HRD_AGENT_TYPES_H
#define HRD_AGENT_TYPES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "daemon/agent.h"
#include "daemon/arena.h"
#include "daemon/clock.h"
#include "daemon/engine.h"
#include "daemon/gpu/gdr.h"
#include "daemon/log.h"
#include "daemon/plan.h"
#include "daemon/poller.h"
#include "daemon/schedule.h"
#include "daemon/transport.h"
#include "proto/data.h"
#include "proto/shm.h"
#include "proto/status.h"

#define COMM_BUCKETS 64u
#define BUFFER_BUCKETS 64u
#define SENTENCE 512u
#define NO_CREDIT UINT64_MAX
/* How far ahead of the oldest incomplete op anybody can be: R ops on a rank whose own oldest is R ahead of ours, and as
   many again for a node that only sends (a broadcast's root). Beyond it a peer broke the protocol, or a rank is left
   behind by ops that failed without it. */
#define HRD_OPS_AHEAD (4u * HRP_OP_SLOTS)

/* ---- what the control thread told us ---------------------------------------------------------------------- */

struct abuffer {
    uint32_t id;
    uint32_t users; /* posted ops that name it */
    bool dropping;  /* the client freed it: BUFFER_GONE when users is 0 */
    char *base;
    uint64_t bytes;
    int16_t gpu; /* HRD_HOST_MEMORY, or whose address base is */
    struct abuffer *next;
};

struct asession {
    struct hrd_pollable doorbell; /* edge-triggered, never read: its counter belongs to the client */
    struct hrd_agent *a;
    uint64_t sid;
    struct hrp_seg_header *seg;
    const _Atomic uint32_t *poisoned;
    uint32_t seen_submits;
    bool ending;
    bool faulted; /* SESSION_FAULT sent: nothing of its shared memory is read any more */
    char why[SENTENCE];
    struct abuffer *buffer[BUFFER_BUCKETS];
    struct arank *ranks; /* through next_in_session */
    struct asession *next;
};

struct alink {
    uint32_t peer;
    char name[80];
    struct hrd_agent *a;
    struct hrd_link *link; /* NULL once closed */
    unsigned nstreams;
    bool dirty;           /* queued frames to flush at the end of this turn */
    bool lost;            /* broken: to be closed outside of its own callbacks */
    bool dropped;         /* link_down: answer LINK_GONE */
    bool told;            /* LINK_LOST was said, but a rail is lent: link_down closes it */
    unsigned interrupted; /* bit: that rail */
    char why[SENTENCE];
    char text[HRP_FRAME_TEXT + 1]; /* payload of the failure frame that is arriving */
    uint64_t gdr, gdr_refused;     /* bit g: it was given the memory of GPU g; its transport refused that */
    char gdr_why[SENTENCE];        /* the last refusal */
    struct aprobe *probe;          /* under way, see probe.c */
    uint64_t probe_slot;           /* given to the peer for one of its own, or HRD_ARENA_NONE */
    struct alink *next;
};

/* ---- memory ------------------------------------------------------------------------------------------------- */

/* What units take their memory from: the arena, or one in the memory of a GPU, which is there while ops use it. */
struct apool {
    struct hrd_arena *arena;
    uint64_t first_slot; /* what peers call its offset 0 */
    int16_t gpu;         /* HRD_HOST_MEMORY: the arena of the daemon */
    /* of a GPU: */
    bool arrived; /* something was written by the adapter that kernels may not see yet */
    bool wide;    /* kernels of other GPUs read it, too */
    struct apool_link *links;
};

struct agdr {
    uint64_t epoch;
    struct hrd_gdr is;
};

/* ---- comm, op, unit ---------------------------------------------------------------------------------------- */

struct arank {
    struct acomm *c;
    struct asession *s; /* NULL once let go */
    uint32_t index;     /* among the comm's local ranks */
    uint32_t rank, slot;
    int32_t pid;
    struct hrp_comm_area *area;
    uint64_t head;      /* ring */
    uint64_t posted;    /* last op taken from the ring */
    uint64_t parked_ns; /* the next descriptor names memory that is not registered yet, since then; 0: not */
    char *window;
    uint64_t window_bytes;
    bool leaving, left;
    struct arank *next_in_session;
};

/* One local rank's side of an op. */
struct apost {
    bool posted, answered;
    bool staged;
    bool stream;     /* ready is written by a GPU stream */
    bool waiting;    /* stream, and ready is not HRP_CHUNK_ALL yet: counted in the comm's `streams` */
    uint8_t overlap; /* enum hrp_overlap */
    uint8_t dtype;   /* of this rank's descriptor, like: */
    uint64_t stream_bytes;
    uint32_t timeout_ms;
    struct hrd_span in, out; /* base NULL: none */
    struct abuffer *in_buffer, *out_buffer;
    uint64_t ready_bytes; /* staged or stream: of the op's stream, as last seen; UINT64_MAX: all */
    uint64_t raised;      /* staged: chunks last stored to done */
};

enum aop_state {
    OP_WAITING, /* some local rank has not posted it (or none has: created by a peer's failure frame) */
    OP_RUNNING, /* planned; units are admitted */
    OP_FAILING, /* to be stopped: abort.c */
    OP_FAILED,  /* answered on all ranks that posted; late ones get the same answer */
    OP_DONE,    /* waits only for older ops, so that the watermark can pass it */
};

/* For the bound on quiescing: pieces of engine work in flight, and ticks since they were as many. */
struct aquiet {
    unsigned works, ticks;
};

struct aop {
    struct acomm *c;
    uint64_t op;
    enum aop_state state;
    bool have_sig;
    struct hrp_sig sig;
    uint32_t sig_rank; /* the local rank it is from */
    uint32_t nposted;
    uint64_t start_ns; /* first local rank's ready */
    uint64_t deadline_ns;
    uint64_t posted_ns;             /* first local rank's descriptor */
    uint64_t ended_ns[HRD_NSTAGES]; /* when its stages ended; 0: not, or nothing is known */
    bool warned;
    struct hrd_plan plan;
    struct hrd_engine *engine; /* of all its work; set when it is planned, as is: */
    uint64_t gpus;             /* bit g: one of its local buffers lies on GPU g */
    bool sm_asked,
        sm_refused;     /* by choose.c: the sm engine about these GPUs and no other memory; its answer */
    uint64_t sm_waited; /* and, where it did not refuse, how long its kernels waited */
    struct apool *send_pool, *recv_pool; /* of its units, as long as there is room */
    bool undecided;      /* GPU memory is required, and it is just being tried: no unit starts */
    uint64_t next_unit;  /* first one not admitted */
    struct aunit *units; /* admitted and not complete, ascending */
    unsigned works, txs; /* in flight */
    bool touched;        /* some output may have been written */
    /* failure, see abort.c */
    bool reported; /* to node 0 */
    bool marked;   /* OP_MARK sent to everyone */
    bool acked;    /* OP_ACK sent to node 0 */
    bool final;    /* OP_FAILED heard; only the NaN fill is still to end */
    struct aquiet quiet;
    uint32_t status;
    char text[HRP_OP_TEXT];
    uint16_t *marks;  /* [nnodes] bits of the streams whose OP_MARK came; made on first need */
    struct aop *next; /* ascending op */
    struct apost post[];
};

enum astep_state { STEP_WAITING, STEP_STARTED, STEP_PARKED /* SEND without credit */, STEP_DONE };

struct astep {
    uint32_t waits; /* unfinished predecessors */
    uint16_t works; /* engine works still running */
    uint8_t state;
    bool failed;    /* one of its works did not do what it should have */
    bool filling;   /* RECV: a stream brings it, or has */
    char *mem;      /* LOCAL, FOLD: output (or NULL); RECV: slot */
    uint64_t bytes; /* of mem */
    const struct apool *pool;
    struct hrd_tx tx;
};

struct aunit {
    struct aop *op;
    uint64_t index;
    const struct hrd_schedule *sched;
    bool reserve;  /* runs in the comm's reserve */
    uint32_t left; /* steps not finished */
    struct apool *send_pool, *recv_pool;
    uint64_t send_off, send_bytes;
    uint64_t *recv_off, *recv_bytes; /* [nnodes] */
    uint64_t *credit;                /* [nnodes] base slot at that peer, or NO_CREDIT */
    uint64_t *elems;                 /* [nblocks] */
    struct aunit *next;
    struct astep step[];
};

/* A peer's grant that came before our own ranks posted the op, or before the unit was admitted. */
struct acredit {
    uint64_t op, slot;
    uint32_t unit, node, rank;
    struct hrp_sig sig;
    struct acredit *next;
};

/* Node 0's record of an op that is being failed on all nodes. */
struct afail {
    uint64_t op;
    uint32_t status;
    uint32_t nacks; /* nodes that are quiet, this one included */
    char text[HRP_OP_TEXT];
    char **missing; /* [nnodes] what each said about its ranks that had not posted; NULL: nothing yet */
    struct afail *next;
};

/* Failure frames about a comm that this node does not have (yet): a later hrd_agent_comm_add() is refused with them. One
   for each peer that sent some, because each waits for an answer and gets one. */
struct aorphan {
    uint64_t comm;
    uint32_t peer;
    uint64_t since_ns;
    uint32_t status;
    char text[SENTENCE];
    struct aorphan *next;
};

struct aeager {
    uint64_t op; /* 0: empty */
    bool arrived;
    struct hrp_frame frame;
};

struct acached {
    struct hrd_schedule *sched;
    struct acached *next;
};

/* What the words in stat.engine_why are about. */
struct achoice {
    const struct hrd_engine *engine;
    uint8_t overlap;
    bool direct; /* p2p is required, and there are several GPUs */
    uint64_t gpus;
    uint64_t waited_us; /* of recent kernels, where that decided */
    char other[256];    /* why the other engine is out; "": it is not */
};

/* The same for stat.gdr_used. */
struct agdr_choice {
    const struct apool *send, *recv;
    const struct hrd_engine *engine;
    uint64_t gpus, epoch;
};

struct acomm {
    struct hrd_agent *a;
    uint64_t id;
    uint32_t nranks, nnodes, node, nlocal;
    uint32_t *node_of_rank, *ranks_on_node;
    char **node_name;
    struct alink **link; /* [nnodes], NULL for this node and for lost ones */
    struct hrp_comm_config config;
    struct hrd_plan_env env;
    struct arank *local; /* [nlocal] */
    struct acached *schedules;

    struct aop *ops;  /* all above done_wm that anybody has named, ascending */
    uint64_t done_wm; /* ops 1..done_wm are complete here */
    unsigned active;  /* admitted units */
    unsigned streams; /* posts whose ready a GPU stream will still write, and: */
    struct aspoil *spoils;
    unsigned works, txs; /* in flight, of all ops */
    struct acredit *credits;
    unsigned ncredits;

    /* The reserve: lets the oldest unit finish by itself. Eager slots: one for each peer and op % HRP_EAGER_SLOTS. */
    uint64_t reserve_send, reserve_send_bytes;
    uint64_t *reserve_recv, *reserve_recv_bytes; /* [nnodes] */
    bool reserve_busy;
    uint64_t *eager_off;  /* [nnodes] */
    struct aeager *eager; /* [nnodes * HRP_EAGER_SLOTS] */
    uint64_t *peer_wm;    /* [nnodes] watermark heard from that node */
    uint64_t *told_wm;    /* [nnodes] watermark told to that node */

    /* failure and end */
    struct afail *fails;
    bool failed;
    bool filled;   /* the NaN fill of touched outputs was started */
    bool answered; /* pending ops have their error */
    bool mark_sent;
    bool gave_back; /* failed: nothing of it is in the arena any more, ranks that have not left or not */
    struct aquiet quiet;
    uint32_t status;
    char text[HRP_COMM_TEXT];
    uint16_t *marks;  /* [nnodes] bits of the streams whose COMM_MARK came */
    uint64_t left_op; /* smallest last op of a rank that left; UINT64_MAX: nobody left */
    uint32_t left_rank;
    uint32_t nleft; /* local ranks let go */
    bool starved;   /* a unit waits for arena */

    struct hrd_snapshot_comm stat;
    struct achoice choice;
    struct agdr_choice gdr_choice;
    uint32_t advice; /* HRP_ADVICE_*, to go with completions */
    uint64_t last_done_ns;
    struct acomm *next, *next_in_bucket;
};

struct command;

struct hrd_agent {
    struct hrd_agent_config cfg;
    char node_name[65];
    pthread_t thread;
    _Atomic bool stop;
    _Atomic uint64_t heartbeat;
    struct hrd_arena *arena;
    struct apool host;                       /* over it */
    struct apool *pool[HRD_GPUS_MAX];        /* by GPU; NULL: not held */
    struct agdr *gdr;                        /* [HRD_GPUS_MAX] as last heard; NULL: never asked */
    struct hrd_engine *engine[HRD_NENGINES]; /* NULL: this daemon has none */
    struct hrd_poller poller;
    struct hrd_pollable wake; /* eventfd: commands, finished engine work */
    uint64_t now;             /* CLOCK_MONOTONIC ns of this turn */
    uint64_t next_tick;

    pthread_mutex_t command_lock;
    struct command *command_first, *command_last;
    _Atomic bool command_any;
    pthread_mutex_t event_lock;
    struct hrd_event *event_first, *event_last;
    int event_fd;

    struct asession *sessions;
    struct alink *links;
    struct acomm *comms;
    unsigned streams;              /* of all comms */
    struct hrd_snapshot_comm gone; /* counters of comms that are no more */
    struct aorphan *orphans;
    struct acomm *bucket[COMM_BUCKETS];
    bool links_to_close, work_to_admit, sessions_to_end;
    unsigned busy; /* something moved in this turn */
};

/* ---- shared by the agent's files ---------------------------------------------------------------------------- */

/* malloc that does not come back without memory: the daemon is crash-only. */
static inline void *xalloc(size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size ? size : 1);
    if (!p) {
        hrd_error("out of memory for %zu bytes; ending the daemon", n * size);
        abort();
    }
    return p;
}

/* Of an eager slot. */
static inline uint64_t hrd_eager_bytes(const struct acomm *c)
{
    return (c->env.eager_blocks ? HRD_EAGER_MESSAGES : 1) * hrd_plan_slot_bytes(c->env.eager_limit);
}

/* agent.c */
void hrd_agent_emit(struct hrd_agent *a, enum hrd_event_type type, uint64_t sid, uint64_t comm, uint32_t id,
                    uint32_t status, const char *text);
void hrd_agent_emit_event(struct hrd_agent *a, struct hrd_event *ev); /* takes it */
struct acomm *hrd_agent_comm(struct hrd_agent *a, uint64_t id);
struct asession *hrd_agent_session(struct hrd_agent *a, uint64_t sid);

/* commands.c */
/* Frees sessions that are ending and have no rank left: SESSION_GONE. */
void hrd_agent_end_sessions(struct hrd_agent *a);
void hrd_agent_run_commands(struct hrd_agent *a);

/* ingest.c */
/* Takes what the session's ranks pushed. */
void hrd_ingest_session(struct asession *s);
/* Looks at the ready words of posts that become ready bit by bit or by a stream; true when an op may go on. */
bool hrd_ingest_ready(struct acomm *c);
void hrd_session_fault(struct asession *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
struct abuffer *hrd_session_buffer(struct asession *s, uint32_t id);
/* After users or dropping changed. */
void hrd_buffer_settle(struct asession *s, struct abuffer *b);

/* op.c */
struct aop *hrd_op_find(struct acomm *c, uint64_t op);
/* Found or made; NULL when op is complete or too far ahead. */
struct aop *hrd_op_get(struct acomm *c, uint64_t op);
void hrd_op_posted(struct aop *op); /* all local ranks have: plan it */
/* Compares what a peer's ranks posted with ours; false (and the failure is under way) when they differ. */
bool hrd_op_agrees(struct aop *op, const struct hrp_sig *sig, uint32_t rank, uint32_t node);
/* Passes finished ops at the head of the list. */
void hrd_op_advance(struct acomm *c);
void hrd_op_free(struct aop *op);

/* choose.c */
/* Sets op->engine and, for the path report, its name and why. Returns NULL, or why no engine can serve the op. */
const char *hrd_choose_engine(struct aop *op);
/* HRP_ADVICE_* for the ranks' next small ops, as things stand with this one. */
uint32_t hrd_choose_advice(const struct aop *op);

/* pool.c */
/* Decides where the units of a planned op lie; NULL, or why they cannot lie where `require` wants them. */
const char *hrd_pools_choose(struct aop *op);
/* What arrived in this pool is seen by work and sends from here on. 0, or -1 with the error. */
int hrd_pool_settle(struct hrd_agent *a, struct apool *p, struct hrd_work_error *error);
/* Gives up what GPUs want back. Ten times a second while the agent is awake, four when it has nothing to do. */
void hrd_pools_tick(struct hrd_agent *a);
/* What of GPU memory this link reaches, for the path report. */
void hrd_pools_describe(const struct alink *l, struct hrd_snapshot_link *out);
/* The transport has let go of everything. */
void hrd_pools_link_closed(struct alink *l);
/* No unit is left. */
void hrd_pools_free(struct hrd_agent *a);

/* pipeline.c */
int hrd_pipeline_reserve(struct acomm *c, char *why, size_t len);
void hrd_pipeline_release_reserve(struct acomm *c);
/* Admits what can be admitted, one unit a comm in turn. */
void hrd_pipeline_admit(struct hrd_agent *a);
void hrd_pipeline_credit(struct acomm *c, uint32_t node, const struct hrp_frame *f);
void hrd_pipeline_watermark(struct acomm *c, uint32_t node, uint64_t wm);
void hrd_pipeline_eager_arrived(struct acomm *c, uint32_t node, struct aeager *e);
/* DATA, and EAGER but for a sender's first of an op: the step it belongs to, or NULL with *why. */
struct astep *hrd_pipeline_place(struct acomm *c, uint32_t node, const struct hrp_frame *f, const char **why);
int hrd_pipeline_data_arrived(struct acomm *c, uint32_t node, const struct hrp_frame *f, const char **why);
/* One engine work of a step is finished. */
void hrd_pipeline_work_done(struct aunit *u, uint32_t step, const struct hrd_work_error *error);
/* Frees an op's units and their memory; nothing of them is in flight. */
void hrd_pipeline_drop_units(struct aop *op);
void hrd_pipeline_forget_credits(struct acomm *c, uint64_t op);

/* geometry.c */
/* Where element (segment, off) of this rank's input or output begins. *run: elements that follow it without a jump. */
struct hrd_span hrd_geometry_in(const struct aop *op, const struct arank *r, uint32_t segment, uint64_t off);
struct hrd_span hrd_geometry_out(const struct aop *op, const struct arank *r, uint32_t segment, uint64_t off);
uint64_t hrd_geometry_run(const struct aop *op, uint64_t off, uint64_t len);
/* Bytes of the stream that must be ready before the unit may start; bytes that are written when units below `unit` are. */
uint64_t hrd_geometry_need(const struct aop *op, uint64_t unit);
uint64_t hrd_geometry_prefix(const struct aop *op, uint64_t unit);

/* work.c: engine work of a step; returns how many were submitted. */
unsigned hrd_work_step(struct aunit *u, uint32_t step);
unsigned hrd_work_nan(struct aop *op);

/* frames.c */
extern const struct hrd_link_handler hrd_frames_handler;
/* Tells the sender that nothing of this comm, which is unknown here, will follow. */
void hrd_frames_answer_orphan(struct alink *l, uint64_t comm);
uint32_t hrd_frames_node(const struct acomm *c, const struct alink *l);
void hrd_frames_send(struct acomm *c, uint32_t node, unsigned stream, const struct hrp_frame *f,
                     const char *text);
void hrd_frames_send_all(struct acomm *c, const struct hrp_frame *f, const char *text);
void hrd_frames_send_marks(struct acomm *c, uint8_t type, uint64_t op);
struct hrp_frame hrd_frame(const struct acomm *c, uint8_t type, uint64_t op);
void hrd_frames_queue(struct alink *l, struct hrd_tx *tx);

/* One frame of a probe, or an answer. */
void hrd_probe_say(struct alink *l, unsigned stream, uint8_t type, uint64_t op, uint64_t slot,
                   uint8_t status);

/* probe.c */
void hrd_probe_start(struct hrd_agent *a, uint32_t link, uint64_t token);
/* Frames of comm 0. */
void *hrd_probe_place(struct alink *l, const struct hrp_frame *f, const char **why);
int hrd_probe_arrived(struct alink *l, unsigned stream, const struct hrp_frame *f, const char **why);
/* After the transport let go of everything. */
void hrd_probe_link_closed(struct alink *l);

/* complete.c */
/* A post's ready word is complete, or the post was answered. */
void hrd_complete_unwatch(struct acomm *c, struct apost *p);
void hrd_complete_progress(struct aop *op); /* raises done of staged outputs */
void hrd_complete_op(struct aop *op);       /* success, on all local ranks */
void hrd_complete_error(struct aop *op, uint32_t status, enum hrp_scope scope, const char *text);
/* A local rank's shared memory went away: what was read from it may be zeros. */
bool hrd_complete_poisoned(const struct acomm *c);
/* One rank's answer. */
void hrd_complete_rank(struct acomm *c, struct arank *r, uint64_t op, uint32_t status, enum hrp_scope scope,
                       const char *text);
/* The same of an op that failed, or had before the rank posted it: p, with which the daemon does nothing any more. */
void hrd_complete_failed(struct arank *r, uint64_t op, const struct apost *p, uint32_t status,
                         enum hrp_scope scope, const char *text);
/* Its client may still look at words of it. */
bool hrd_complete_reachable(const struct arank *r);
void hrd_complete_raise(struct arank *r, uint64_t op, uint64_t chunks);

/* spoil.c */
/* False: the post is to be answered now. */
bool hrd_spoil_takes(struct arank *r, uint64_t op, const struct apost *p, uint32_t status,
                     enum hrp_scope scope, const char *text);
/* Goes on where streams went on; whether something moved. */
bool hrd_spoil_look(struct acomm *c);
void hrd_spoil_free(struct acomm *c);

/* abort.c */
/* This node wants op to fail everywhere; status and sentence are node 0's to confirm. */
void hrd_abort_report(struct aop *op, uint32_t status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void hrd_abort_frame(struct acomm *c, uint32_t node, unsigned stream, const struct hrp_frame *f,
                     const char *text);
/* Every stream of every node that is still there has brought its mark. marks NULL: none has. */
bool hrd_abort_all_marked(const struct acomm *c, const uint16_t *marks);
/* Moves the comm's failing ops on after works, txs or marks changed. */
void hrd_abort_settle(struct acomm *c);
void hrd_abort_free(struct acomm *c);
/* Op deadlines and stall warnings. */
void hrd_abort_deadlines(struct acomm *c);

/* comm.c */
void hrd_comm_fail(struct acomm *c, uint32_t status, bool tell, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* Answers, marks, lets go and frees as far as it can; c may be gone afterwards. */
void hrd_comm_settle(struct acomm *c);
void hrd_comm_leave(struct acomm *c, struct arank *r);
void hrd_comm_rank_left(struct acomm *c, uint32_t rank, uint64_t last_op);
/* Ten times a second. */
void hrd_comm_tick(struct acomm *c);
void hrd_comm_orphan(struct hrd_agent *a, struct alink *l, const struct hrp_frame *f, const char *text);
void hrd_comm_add(struct hrd_agent *a, const struct hrd_comm_spec *spec);
void hrd_comm_free(struct acomm *c);
/* Adds the counters of c to sum. */
void hrd_comm_count(struct hrd_snapshot_comm *sum, const struct hrd_snapshot_comm *c);

#endif
