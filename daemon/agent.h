/* SPDX-License-Identifier: MIT */
/*
 * The agent: the one thread that moves data. It owns op matching, the pipeline, the links and every word it
 * writes into the session segments. The control thread (libuv) owns sockets, mappings and membership, and
 * speaks to the agent only through the commands below. Each command copies what it needs, never blocks and
 * never fails except for memory (then the daemon aborts: it is crash-only). The answers come back as events,
 * in order.
 *
 * Memory that a command names (segment, buffer, window) stays mapped until the event that gives it back.
 */
#ifndef HRD_AGENT_H
#define HRD_AGENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/engine.h"
#include "daemon/transport.h"
#include "proto/shm.h"
#include "proto/wire.h"

struct hrd_agent;
struct hrd_gpus;
struct hrd_transport;
struct hrd_conn;

struct hrd_agent_config {
    uint64_t arena_bytes;
    unsigned threads;    /* reduce threads of the host engine, 1..64 */
    unsigned spin_us;    /* longest spin before the agent sleeps */
    bool spin_always;    /* also while reduce threads work: there are cores for both */
    unsigned depth;      /* units of a comm in flight; 0: 4 */
    uint64_t unit_bytes; /* largest unit of an op, see schedule.h */
    uint64_t unit_min_bytes;
    uint64_t chunk_bytes; /* largest piece of work one reduce thread takes at once */
    uint32_t eager_limit; /* largest payload of an eager message */
    uint32_t stall_warning_ms;
    const char *node_name; /* for sentences: host name */
    struct hrd_gpus
        *gpus; /* NULL: none. Its hrd_gpus_stop() comes before hrd_agent_free(), its hrd_gpus_free() after */
    uint64_t dma_bytes; /* host memory for copies from and to GPUs */
    /* When work on a GPU that has to end makes no progress for so long, the GPU counts as lost; 0: 10000. As long waits an
       op that failed for any engine. */
    uint32_t gpu_stuck_ms;
};

enum hrd_event_type {
    HRD_EV_SESSION_GONE = 1, /* sid: the agent touches nothing of this session any more */
    HRD_EV_SESSION_FAULT,    /* sid, text: the client broke the protocol in shared memory; end the session */
    HRD_EV_BUFFER_GONE,      /* sid, id */
    HRD_EV_COMM_READY,  /* comm; status HRP_OK, or why the comm cannot be (text); then it does not exist */
    HRD_EV_COMM_FAILED, /* comm, status, text: failed after it was ready, from whatever side; sent once */
    HRD_EV_COMM_LEFT,   /* comm, rank: the agent let go of that rank's buffers and slot */
    HRD_EV_COMM_GONE,   /* comm: all local ranks left and nothing of it is in flight */
    HRD_EV_LINK_LOST,   /* peer, text: the link broke or broke the protocol; already closed unless `open` */
    HRD_EV_LINK_GONE,   /* peer: answer to link_down; closed */
    HRD_EV_LINK_INTERRUPTED, /* peer, rail, text, conn: the path failed; conn is lent until link_resume or link_down */
    HRD_EV_PROBE,            /* token, status; probe (HRP_OK), or text: answer to hrd_agent_probe() */
    HRD_EV_SNAPSHOT, /* snapshot: answer to hrd_agent_query(); free with hrd_snapshot_free() */
};

/* What a link can do, measured. */
struct hrd_probe_result {
    uint64_t rtt_ns, rtt_min_ns; /* of a frame without payload: median, least */
    uint64_t bytes_per_s;        /* of data, on all streams, towards the peer */
    uint32_t nstreams;
    char transport[16];
    char detail[160];
};

struct hrd_event {
    enum hrd_event_type type;
    uint64_t sid;
    uint64_t comm;
    uint32_t id; /* buffer id, peer or rank */
    uint32_t status;
    unsigned rail;
    bool open; /* LINK_LOST: a rail is lent, so the link is there until link_down */
    uint64_t token;
    struct hrd_snapshot *snapshot;
    struct hrd_conn *conn;
    struct hrd_probe_result probe;
    char text[HRP_COMM_TEXT];
    struct hrd_event *next;
};

/* Starts the agent and its reduce threads. 0 or negative errno (errtext says what failed). */
int hrd_agent_new(struct hrd_agent **out, const struct hrd_agent_config *cfg, char *errtext, size_t errlen);
/* Stops the threads; the caller has ended all sessions, comms and links (or is about to exit). */
void hrd_agent_free(struct hrd_agent *a);
/* Readable when events wait; for uv_poll. */
int hrd_agent_event_fd(const struct hrd_agent *a);
/* Takes all waiting events (a list through ->next, oldest first; each freed by the caller with free()), or
 * NULL. */
struct hrd_event *hrd_agent_take_events(struct hrd_agent *a);
/* CLOCK_MONOTONIC ns of the agent's last turn; older than a few seconds means it is stuck. Any thread. */
uint64_t hrd_agent_heartbeat(const struct hrd_agent *a);

/* The arena, for a transport whose set-up registers it; the same for as long as the agent lives. Any thread. */
void hrd_agent_arena(const struct hrd_agent *a, void **base, uint64_t *bytes);

/* ---- sessions --------------------------------------------------------------------------------------------
 */

/* doorbell: eventfd, stays the caller's, valid until SESSION_GONE. poisoned: see guard.h; set by the SIGBUS
   handler when memory of this session faulted: its ops must not complete with success. */
void hrd_agent_session_add(struct hrd_agent *a, uint64_t sid, struct hrp_seg_header *seg, int doorbell,
                           const _Atomic uint32_t *poisoned);
/* Fails every comm with a rank of this session (HRP_RANK_LOST, text names it), lets go of its memory, then
   SESSION_GONE. why: "process 1234 died" or "process 1234 closed its connection", completed to a
   sentence. */
void hrd_agent_session_end(struct hrd_agent *a, uint64_t sid, const char *why);
void hrd_agent_buffer_add(struct hrd_agent *a, uint64_t sid, uint32_t id, void *base, uint64_t bytes);
/* Memory of a GPU: device is its address in the daemon's process. The device stays up until BUFFER_GONE, or
   SESSION_GONE. */
void hrd_agent_gpu_buffer_add(struct hrd_agent *a, uint64_t sid, uint32_t id, int16_t gpu, uint64_t device,
                              uint64_t bytes);
/* BUFFER_GONE when no op uses it any more. */
void hrd_agent_buffer_drop(struct hrd_agent *a, uint64_t sid, uint32_t id);
/* The staging window of a comm slot; lives until the slot's COMM_LEFT. */
void hrd_agent_window_add(struct hrd_agent *a, uint64_t sid, uint32_t slot, void *base, uint64_t bytes);

/* ---- links -----------------------------------------------------------------------------------------------
 */

/* A connected peer. peer: the control thread's number for it, never used again for another. conn: what the
   transport's set-up produced (for tcp: struct hrd_tcp_conn of transport_tcp.h); the agent owns it from here.
 */
void hrd_agent_link_up(struct hrd_agent *a, uint32_t peer, const char *name, const struct hrd_transport *tp,
                       struct hrd_conn *conn);
/* Closes the link, fails its comms with HRP_PEER_LOST and `why` (a sentence that names the peer); then
 * LINK_GONE. */
void hrd_agent_link_down(struct hrd_agent *a, uint32_t peer, const char *why);

/* The path of this rail of the link (0: it has one) failed, the peer says: answered by LINK_INTERRUPTED, unless that is on its way or the transport
   knows no such thing. */
void hrd_agent_link_interrupt(struct hrd_agent *a, uint32_t peer, unsigned rail, const char *why);
/* The conn of LINK_INTERRUPTED has a new path; it is the agent's again. */
void hrd_agent_link_resume(struct hrd_agent *a, uint32_t peer, unsigned rail);

/* ---- comms -----------------------------------------------------------------------------------------------
 */

struct hrd_comm_rank {
    uint32_t rank;
    uint32_t slot; /* comm slot in the session's segment */
    uint64_t sid;
    int32_t pid;
};

#define HRD_NO_PEER UINT32_MAX

struct hrd_comm_spec {
    uint64_t comm; /* first 8 bytes of the comm id: the same on all nodes, nonzero */
    uint32_t nranks, nnodes, node, nlocal;
    const uint32_t *node_of_rank;      /* [nranks] */
    const uint32_t *peer_of_node;      /* [nnodes]; HRD_NO_PEER for this node */
    const char *const *node_name;      /* [nnodes] */
    const struct hrd_comm_rank *local; /* [nlocal], ascending rank */
    struct hrp_comm_config config;     /* resolved by the root: nothing is "default" any more */
    uint32_t eager_limit;              /* the root's, for all nodes; likewise: */
    uint64_t unit_bytes, unit_min_bytes;
    uint64_t latency_ns, bandwidth; /* measured by the root: one way, small; bytes/s a node and direction */
    bool eager_blocks;              /* every node knows eager messages of direct */
};

/* Takes the comm's reserve from the arena and makes it ready to receive; answers COMM_READY. All links must
   be up. The control thread calls it before it votes; data of other nodes may arrive as soon as every node
   has voted. */
void hrd_agent_comm_add(struct hrd_agent *a, const struct hrd_comm_spec *spec);
/* Ends a comm on this node and, with tell_peers, on all others. */
void hrd_agent_comm_fail(struct hrd_agent *a, uint64_t comm, uint32_t status, const char *text,
                         bool tell_peers);
/* rank (local) leaves: its pending ops, if any, fail the comm with HRP_RANK_LOST; then COMM_LEFT. COMM_GONE
   after the last local rank. */
void hrd_agent_comm_leave(struct hrd_agent *a, uint64_t comm, uint32_t rank);

/* ---- looking in ------------------------------------------------------------------------------------------
 */

/* Upper bounds of the classes that the times of ops are counted in, microseconds; one class more is above the last. */
#define HRD_TIME_BOUNDS                                                                               \
    {                                                                                                 \
        20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000 \
    }
#define HRD_NTIMES 16u

/* What an op's time on this node is made of, one after the other. */
enum hrd_stage {
    HRD_STAGE_POST, /* from the first local rank's descriptor to the last one's */
    HRD_STAGE_READY, /* until its inputs are there: the job's streams have come to it, copies into windows are over */
    HRD_STAGE_BEGIN,  /* until a GPU has its work; of other work nothing */
    HRD_STAGE_REDUCE, /* several nodes: until the local ranks' inputs are reduced */
    HRD_STAGE_EXCHANGE, /* ... until the last block is sent and received: what of it was not hidden behind the stage before */
    HRD_STAGE_WORK, /* until the last work on the result is known to be over; of one node that is all work */
    HRD_STAGE_DONE, /* until all local ranks have the result */
    HRD_NSTAGES
};

struct hrd_snapshot_comm {
    uint64_t comm;
    uint32_t nranks, nnodes, node, nlocal;
    uint32_t status;
    uint64_t failures;                    /* 1: the comm failed, in a sum: how many did */
    uint64_t ops_done, ops_failed, bytes; /* bytes: of data spaces of completed ops */
    uint64_t tx_bytes, rx_bytes;          /* payload and headers of data frames */
    uint64_t staged_bytes;
    uint64_t staged_gpu_bytes; /* of these by a GPU's stream */
    uint64_t op_oldest;        /* op in progress, 0: none */
    uint64_t op_age_ms;        /* since its first rank's ready */
    uint64_t last_op_age_ms;   /* since the last completion; UINT64_MAX: none yet */
    uint64_t algo_ops[HRP_NALGOS];
    uint64_t time_us;              /* of completed ops, from the first rank's ready on, in all */
    uint64_t time_ops[HRD_NTIMES]; /* ops by time */
    /* Of completed ops, by collective. */
    uint64_t coll_ops[HRP_NCOLLS];
    uint64_t stage_ns[HRP_NCOLLS][HRD_NSTAGES];
    uint64_t engine_ops[HRD_NENGINES];
    char engine[16];      /* of the last op whose buffers were in GPU memory; empty: there was none */
    char engine_why[400]; /* why it was that one, and what kept the others from it */
    char engine_out[300]; /* the sm engine was wanted: what was in its way; empty: nothing */
    char last_plan[256];  /* the plan of the last op in words */
    /* GPUDirect RDMA, of the last large op whose buffers were in GPU memory: where its blocks lie between reading and
       writing them (empty: there was none), and why they are not, all of them, where the adapter reaches the GPU. */
    char gdr_used[512], gdr_why[512], gdr_remedy[240];
    uint64_t gdr_units, gdr_full; /* units on a GPU; in host memory because there was no room */
};

struct hrd_snapshot_link {
    uint32_t peer;
    uint32_t nstreams;
    char transport[16];
    char name[80];
    char detail[160]; /* local and remote address, in words of the transport */
    uint64_t tx_bytes, rx_bytes, tx_frames, rx_frames;
    uint32_t interruptions, port_downs, device_events;
    bool interrupted; /* now */
    /* Over several NICs: each; 0: it is not. */
    unsigned nrails;
    struct hrd_snapshot_rail {
        char detail[160];
        uint64_t tx_bytes, rx_bytes;
    } rail[HRD_RAILS_MAX];
    bool gdr_send, gdr_receive; /* straight from and into GPU memory, where the communicator wants that */
    char gdr_why[200];          /* why not; empty: never asked, or it is */
};

struct hrd_snapshot {
    uint64_t arena_bytes, arena_used, arena_reserved;
    unsigned threads;
    char simd[16];
    uint32_t ncomms, nlinks, nsessions;
    struct hrd_snapshot_comm
        total; /* the counters of all comms since the start, also of those that are gone */
    struct hrd_snapshot_comm *comm;
    struct hrd_snapshot_link *link;
};

/* Measures a link for about a third of a second; PROBE event with this token. Only towards a peer that knows how
   (HRP_PEER_MINOR_ASK). A peer that does not answer leaves it unanswered until the link ends. */
void hrd_agent_probe(struct hrd_agent *a, uint32_t link, uint64_t token);
/* SNAPSHOT event with this token. */
void hrd_agent_query(struct hrd_agent *a, uint64_t token);
void hrd_snapshot_free(struct hrd_snapshot *s);

#endif
