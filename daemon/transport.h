/* SPDX-License-Identifier: MIT */
/*
 * A transport carries frames (proto/data.h) between the agents of two daemons. It knows nothing of ops and
 * schedules. One table an implementation; all functions are called on the agent's thread and never block.
 */
#ifndef HRD_TRANSPORT_H
#define HRD_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#include "proto/data.h"

struct hrd_poller;

/* Made by a transport's connection set-up on the control thread, handed to the agent with
 * hrd_agent_link_up(). */
struct hrd_conn {
    /* Frees a conn that no link was made of. */
    void (*discard)(struct hrd_conn *conn);
};

/* One frame to send. Owner: the caller, until done() is called exactly once. */
struct hrd_tx {
    struct hrp_frame frame; /* frame.len bytes of payload */
    const void *payload;    /* unchanged until done() */
    unsigned stream;        /* < nstreams of the link */
    /* err 0: the bytes are with the kernel or NIC and the payload may be reused; otherwise the link is lost.
       Called from flush, poll, close or the poller, never from send. */
    void (*done)(struct hrd_tx *tx, int err);
    void *owner;
    struct hrd_tx *next; /* the transport's */
    uint64_t sent;       /* the transport's */
};

struct hrd_link;

/* What the agent does with what a link receives. */
struct hrd_link_handler {
    /* A frame with payload begins: where its frame->len bytes go, or NULL when the frame breaks the protocol
       (*why says how). A transport that places data itself (RDMA) calls it after the fact and compares. */
    void *(*place)(struct hrd_link *link, unsigned stream, const struct hrp_frame *frame, const char **why);
    /* A frame is complete. payload: what place() answered, or NULL for len 0. 0, or negative with *why: the
     * link is ended. */
    int (*arrived)(struct hrd_link *link, unsigned stream, const struct hrp_frame *frame, void *payload,
                   const char **why);
    /* The link is broken; called once, from flush, poll or the poller. The handler closes it later. */
    void (*lost)(struct hrd_link *link, const char *why);
    /* The path of one of the link's rails failed (0: it has one), but nothing is lost: conn, which stays the link's, is lent
       to its set-up, which makes the path anew and says so with hrd_agent_link_resume(). Until then frames queue up, and
       nothing arrives there. From the poller or interrupt. */
    void (*interrupted)(struct hrd_link *link, unsigned rail, struct hrd_conn *conn, const char *why);
};

#define HRD_RAILS_MAX 4u

/* The part of a link that is the same for every transport; a transport's link begins with it. */
struct hrd_link {
    const struct hrd_transport *tp;
    const struct hrd_link_handler *handler;
    void *owner; /* the agent's record of the peer */
    unsigned nstreams;
    uint64_t detour_bytes; /* ops of fewer bytes are faster on stream 0 alone; 0: streams are alike */
    uint64_t tx_bytes, rx_bytes, tx_frames, rx_frames;
    uint32_t interruptions, port_downs, device_events;
    uint64_t rate; /* bytes a second that its device can send, 0: unknown */
    /* The links that this one is made of, each over a NIC of its own, best known by their `detail`, and all that is counted
       above is counted there; 0: it is one itself. */
    unsigned nrails;
    struct hrd_link *rail[HRD_RAILS_MAX];
    char refusal
        [400]; /* why expose() said no the last time; "": it did not. For whoever clears it before asking */
    char detail[160];
};

/* Memory beside the arena that a link may be given: of a GPU. */
struct hrd_tp_memory {
    char *base; /* a device address: no CPU can follow it */
    uint64_t bytes;
    int dmabuf_fd; /* its owner's, open as long as a link has the memory; -1: none, for this errno: */
    int dmabuf_err;
    char device[64]; /* the adapter that was seen to reach it; "": not asked */
    uint8_t port;
};

struct hrd_transport {
    const char *name;
    unsigned caps; /* HRD_TP_* */
    /* Takes over conn. NULL with errno. */
    struct hrd_link *(*open)(struct hrd_conn *conn, struct hrd_poller *poller,
                             const struct hrd_link_handler *handler, void *owner);
    /* Queues tx behind earlier ones of its stream. Never fails: a broken link answers through done(). */
    void (*send)(struct hrd_link *link, struct hrd_tx *tx);
    /* Sends what is queued as far as there is room; calls done(). The agent calls it at the end of a turn in which it
       queued something, so that frames of one turn share system calls. */
    void (*flush)(struct hrd_link *link);
    /* Calls done() with -ECANCELED for everything queued and frees the link. Afterwards nothing of the peer
     * arrives. */
    void (*close)(struct hrd_link *link);

    /* The rest is NULL in a transport that needs nothing of it. */

    /* Looks for completions and handles a bounded number; how many. Called every turn, so that a busy agent needs no
       interrupts. Also where limits in time are looked at. */
    unsigned (*poll)(struct hrd_link *link);
    /* The agent is about to sleep: from now on what arrives wakes its poller. 1: something has arrived already. */
    int (*arm)(struct hrd_link *link);
    /* The peer says that its end of that rail's path failed: interrupts this one, unless it is already. */
    void (*interrupt)(struct hrd_link *link, unsigned rail, const char *why);
    /* The path is new. */
    void (*resume)(struct hrd_link *link, unsigned rail);
    /* Where streams are not alike: the one that a large block is to take. */
    unsigned (*stream_for)(struct hrd_link *link, const struct hrd_tx *tx);
    /* HRD_TP_RDMA: the peer may from now on write into [base, base + len), the slots from `off` on, which no other peer
       reaches. Not 0: it cannot be. The other takes such a range away. */
    int (*expose)(struct hrd_link *link, uint64_t off, void *base, uint64_t len);
    void (*withdraw)(struct hrd_link *link, uint64_t off, uint64_t len);
    /* HRD_TP_RDMA: from now on payloads may lie in this memory too, and expose() may be given ranges of it. 0, or negative
       errno with a sentence. Blocks while it is pinned. The other ends that: nothing of it is exposed or waits to be sent. */
    int (*add_memory)(struct hrd_link *link, const struct hrd_tp_memory *m, char *why, size_t len);
    void (*drop_memory)(struct hrd_link *link, const char *base);
};
#define HRD_TP_RDMA 1u /* the peer writes into receive slots by itself */

extern const struct hrd_transport hrd_transport_tcp;

#endif
