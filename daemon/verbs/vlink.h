/* SPDX-License-Identifier: MIT */
/*
 * Inside of the verbs transport: transport_verbs.c sends and receives, vlink_path.c has what becomes of a link whose path
 * fails. Agent's thread only.
 */
#ifndef HRD_VERBS_VLINK_H
#define HRD_VERBS_VLINK_H

#include "daemon/poller.h"
#include "daemon/verbs/conn.h"

/* A work request with a completion: it stands for all before it. */
struct flight {
    uint16_t wrs, slots;
    struct hrd_tx *tx; /* its payload is free when this completes */
};

/* What a send buffer holds until the device says that it arrived: enough to send it again. */
struct kept {
    uint8_t kind; /* enum hrd_vmsg_kind */
    uint32_t bytes;
    struct hrd_tx *tx; /* PLACED: the payload is still there */
};

struct vqueue {
    struct hrd_tx *first, *last;
    unsigned credits;       /* buffers at the peer that this end may use */
    unsigned give;          /* posted again, to be given back */
    uint64_t starved_since; /* ns; 0: not waiting for credits */
    /* send side: buffers are used round robin, flights complete in order */
    uint32_t slot, slots_used;
    unsigned wrs, wrs_open, slots_open; /* outstanding; of them behind the last flight */
    struct flight flight[HRD_VSEND_WRS];
    uint32_t flight_first, flights;
    /* ns: of the last work requests; and, while there are flights, of the first, or of the last completion. */
    uint64_t posted_at, silent_since;
    struct kept kept[HRD_VMSG_DEPTH];
    /* receive side */
    bool in_frame;
    struct hrp_frame frame;
    char *payload;
    uint32_t got;
    unsigned posted; /* receives whose completion is still to come */
    uint32_t repost[HRD_VMSG_POSTED];
    unsigned reposts, repost_counted;
};

struct region {
    uint64_t off, len, addr; /* addr: the owner's */
    uint32_t rkey;
    struct hrd_mr mr; /* of own regions */
    struct region *next;
};

/* Memory beside the arena. */
struct vmemory {
    struct hrd_tp_memory m;
    struct hrd_mr mr; /* for sending: without remote access */
    struct vmemory *next;
};

enum vstate {
    V_UP,
    V_DRAINING, /* the path failed: what arrived before that is still read */
    V_LENT,     /* the control thread makes the path anew; what is to be sent queues up */
    V_BROKEN,
};

struct vlink {
    struct hrd_link base;
    struct hrd_poller *poller;
    struct hrd_verbs_conn *c;
    struct hrd_verbs_device dev; /* c's, which is the control thread's to change while c is lent */
    struct hrd_pollable completions, events;
    enum vstate state;
    bool warned;
    uint64_t port_down;   /* ns; 0: up */
    uint64_t drain_until; /* ns */
    uint64_t turn_ns;     /* the time of this turn of the agent; 0: not asked for yet */
    char why[400]; /* DRAINING: what failed; "": not known yet. LENT: it cannot be made anew any more */
    struct region *own, *remote;
    unsigned nremote;
    /* The rails of the link that this one is a part of, itself among them. What one may be written into is told on the first
       one's first queue pair, hence before any CREDIT that names a slot in it. */
    struct vlink *rails[HRD_RAILS_MAX];
    unsigned nrails, rail;
    struct vmemory *memory;
    struct hrd_tx *sent_first, *sent_last; /* done() to be called */
    struct vqueue q[HRD_VERBS_QUEUES_MAX];
};

/* transport_verbs.c */
uint64_t hrd_vlink_now(void);
/* tx is not needed any more; its done() is called soon. */
void hrd_vlink_sent(struct vlink *l, struct hrd_tx *tx);
/* Calls done() of those. */
void hrd_vlink_report_sent(struct vlink *l);
/* One good completion. */
void hrd_vlink_completion(struct vlink *l, const struct ibv_wc *wc);
/* Takes the device as c has it now, and describes the link anew. */
void hrd_vlink_describe(struct vlink *l);
/* The path is new: everything that the peer did not get is sent again. */
void hrd_vlink_send_again(struct vlink *l);

/* vlink_memory.c */
/* How a range of the arena or of added memory is registered. */
struct hrd_mr_source hrd_vlink_source(const struct vlink *l, char *at, uint64_t len);
/* The region that payload is sent from; NULL: there is none. */
const struct ibv_mr *hrd_vlink_payload(const struct vlink *l, const char *at, uint64_t len);
/* hrd_transport.add_memory, .drop_memory */
int hrd_vlink_add_memory(struct hrd_link *base, const struct hrd_tp_memory *m, char *why, size_t len);
void hrd_vlink_drop_memory(struct hrd_link *base, const char *at);
/* All of it; the queue pairs are gone. */
void hrd_vlink_free_memory(struct vlink *l);

/* Whether this rail can write len bytes of payload into the peer's slots from `slot` on. */
bool hrd_vlink_reaches(const struct vlink *l, uint64_t slot, const void *payload, uint64_t len);

/* vlink_path.c */
/* The link is lost, for this reason. */
void hrd_vlink_broken(struct vlink *l, const char *why);
void hrd_vlink_broken_call(struct vlink *l, const char *what, int err);
/* A completion that is not good. */
void hrd_vlink_failed(struct vlink *l, const struct ibv_wc *wc);
/* DRAINING: goes on with it; how many completions it handled. */
unsigned hrd_vlink_drain(struct vlink *l);
/* hrd_transport.interrupt, .resume */
void hrd_vlink_interrupt(struct hrd_link *base, unsigned rail, const char *why);
void hrd_vlink_resume(struct hrd_link *base, unsigned rail);
/* Asynchronous events of the device wait. */
void hrd_vlink_events(struct hrd_pollable *p, uint32_t events);

#endif
