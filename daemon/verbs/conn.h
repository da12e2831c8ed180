/* SPDX-License-Identifier: MIT */
/*
 * The objects of one verbs link and their set-up. Made on the control thread, in steps that never wait for the peer:
 *
 *   new       device opened, memory registered, queue pairs made and receive buffers posted; local parameters known
 *   connect   with the peer's parameters, or by RDMA-CM: queue pairs to RTS, one message as large as any on each
 *   probe     until the peer's has come and ours is acknowledged on every queue pair: the path works both ways
 *
 * then handed to the agent, whose link (transport_verbs.c) takes all of it over. Each link has its own device context,
 * protection domain, completion queue and asynchronous events: nothing is shared between peers, and one thread at a time
 * owns it all.
 */
#ifndef HRD_VERBS_CONN_H
#define HRD_VERBS_CONN_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/transport.h"
#include "daemon/verbs/device.h"
#include "daemon/verbs/mr.h"

/* ---- what travels in SENDs ---------------------------------------------------------------------------------------
 *
 * Every message starts with struct hrd_vmsg. All but CREDIT take one of the receiver's buffers that it granted; the
 * `credits` of any message give buffers back. A CREDIT message is sent only when half of the grant waits to be given
 * back, so that at most two can be under way that the peer has not read: buffers beyond the grant are posted for them.
 */
enum hrd_vmsg_kind {
    HRD_VMSG_FRAME = 1, /* struct hrp_frame and the first bytes of its payload */
    HRD_VMSG_MORE,      /* the next bytes of that payload */
    HRD_VMSG_PLACED, /* struct hrp_frame (DATA); its payload was written into the slot before, on the same queue pair,
                           so it is visible when this message is */
    HRD_VMSG_REGION, /* struct hrd_vregion: where the receiver of this message may write, or no longer */
    HRD_VMSG_CREDIT, /* nothing but credits */
    HRD_VMSG_HELLO,  /* probe: nonce in each 8 bytes of a full buffer */
};

#define HRD_VMSG_MAGIC 0x67736d76u
#define HRD_VMSG_BYTES 4352u /* of a buffer: an eager payload of 4 KiB goes in one */
#define HRD_VMSG_DEPTH 64u   /* buffers granted to the peer on each queue pair */
#define HRD_VMSG_SPARE 4u    /* posted beyond the grant */
#define HRD_VMSG_POSTED (HRD_VMSG_DEPTH + HRD_VMSG_SPARE)
#define HRD_VSEND_WRS 256u /* work requests of a queue pair: messages and writes */

struct hrd_vmsg {
    uint32_t magic;
    uint8_t kind;
    uint8_t reserved;
    uint16_t credits;
    uint32_t len; /* bytes behind this header */
    uint32_t reserved1;
};
_Static_assert(sizeof(struct hrd_vmsg) == 16, "layout");
#define HRD_VMSG_BODY (HRD_VMSG_BYTES - (uint32_t)sizeof(struct hrd_vmsg))

struct hrd_vregion {
    uint64_t off, len; /* slots [off, off + len) */
    uint64_t addr;     /* remote address of off */
    uint32_t rkey;
    uint16_t withdrawn; /* 1: off and len name a region that is no more; addr and rkey 0 */
    uint16_t rail;      /* that reaches it, 0: the first or only one */
};
_Static_assert(sizeof(struct hrd_vregion) == 32, "layout");

/* ---- set-up ----------------------------------------------------------------------------------------------------- */

/* One end's parameters, exchanged over the control connection (struct hrp_peer_verbs). */
struct hrd_verbs_end {
    bool ethernet;
    bool global;
    uint8_t mtu; /* enum ibv_mtu */
    uint8_t queues;
    uint16_t lid;
    uint16_t pkey;
    union ibv_gid gid;
    uint32_t depth, msg_bytes;
    uint32_t qpn[HRD_VERBS_QUEUES_MAX], psn[HRD_VERBS_QUEUES_MAX];
    uint64_t got[HRD_VERBS_QUEUES_MAX]; /* messages (not CREDIT) that had arrived since the link was made */
};

/* How one queue pair reaches its counterpart: by what the two ends told each other, or by RDMA-CM (cm.h). */
struct hrd_verbs_route {
    struct ibv_ah_attr ah;
    enum ibv_mtu mtu;
    uint32_t dest_qpn, rq_psn, sq_psn;
    uint16_t pkey_index;
};

struct hrd_verbs_queue {
    struct ibv_qp *qp;
    char *rx, *tx; /* buffers: POSTED, and DEPTH and one for HELLO */
    uint32_t inline_max;
    /* Messages other than CREDIT since the link was made: handed to the device, known to have arrived, received. */
    uint64_t sent, acked, got;
    bool hello_sent, hello_got; /* probe */
};

struct hrd_verbs_conn {
    struct hrd_conn base;
    struct hrd_verbs_device dev;
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct hrd_mr_memory memory;
    struct hrd_mr buffers_mr; /* of rx and tx */
    struct hrd_mr arena_mr;   /* all of the arena, for sending only: without remote access */
    char *buffers;
    size_t buffers_len;
    char *arena;
    uint64_t arena_len;
    uint64_t nonce;
    uint64_t stall_ns;  /* the peer gives no credits for so long: it is lost */
    uint64_t peer_rate; /* bytes a second that the peer's device can send; 0: unknown */
    unsigned place;     /* of its device in the configuration's list */
    bool first;         /* this end spoke first */
    unsigned n;
    struct hrd_verbs_queue q[HRD_VERBS_QUEUES_MAX];
    struct hrd_verbs_end local, remote;
};

/* All or nothing. NULL with a sentence. queues: at most dev->queues. Blocks while the arena is pinned. */
struct hrd_verbs_conn *hrd_verbs_conn_new(const struct hrd_verbs_device *dev, unsigned queues, void *arena,
                                          uint64_t arena_len, uint64_t nonce, uint32_t stall_ms, char *why,
                                          size_t len);
/* For a link that was lent: gives up its queue pairs and makes new ones on what dev says now (the same device and port, as
   chosen anew). All or nothing but the old ones. 0, or negative errno with a sentence. */
int hrd_verbs_conn_renew(struct hrd_verbs_conn *c, const struct hrd_verbs_device *dev, uint64_t nonce,
                         char *why, size_t len);
/* Gives up queue pairs that the peer has no counterpart for; before connect. */
void hrd_verbs_conn_trim(struct hrd_verbs_conn *c, unsigned queues);
/*
 * connect is these three, with the routes that the ends told each other:
 *
 *   meet     the peer's parameters: whether the two go together. -EBADMSG: the link cannot go on, whatever the path.
 *   queue    one queue pair to RTS
 *   begin    all are; first: this end speaks first. The other waits for it, because before it is known to be connected
 *            nothing may be sent to it.
 *
 * Each 0, or negative errno with a sentence.
 */
int hrd_verbs_conn_meet(struct hrd_verbs_conn *c, const struct hrd_verbs_end *remote, char *why, size_t len);
int hrd_verbs_conn_queue(struct hrd_verbs_conn *c, unsigned i, const struct hrd_verbs_route *route, char *why,
                         size_t len);
int hrd_verbs_conn_begin(struct hrd_verbs_conn *c, bool first, char *why, size_t len);
int hrd_verbs_conn_connect(struct hrd_verbs_conn *c, const struct hrd_verbs_end *remote, bool first,
                           char *why, size_t len);
/* 1: the path works; 0: not yet, ask again; negative with a sentence. After 1 it must not be called again. */
int hrd_verbs_conn_probe(struct hrd_verbs_conn *c, char *why, size_t len);
/* Frees everything; afterwards no device touches this process's memory for it. */
void hrd_verbs_conn_free(struct hrd_verbs_conn *c);

/* Posts receive buffers [i of list] of a queue pair; 0 or errno. */
int hrd_verbs_post_recv(struct hrd_verbs_conn *c, unsigned queue, const uint32_t *slot, unsigned n);
/* "RETRY_EXC_ERR (12, vendor 0x81) on queue pair 1 of mlx5_0 port 1: retry exceeded, ..." */
void hrd_verbs_wc_text(const struct hrd_verbs_conn *c, const struct ibv_wc *wc, char *buf, size_t len);

/* wr_id: the queue, whether it is a receive, and the buffer. */
#define HRD_WR_RECV (UINT64_C(1) << 63)
static inline uint64_t hrd_wr_id(unsigned queue, uint64_t what)
{
    return (uint64_t)queue << 32 | what;
}
static inline unsigned hrd_wr_queue(uint64_t id)
{
    return (unsigned)(id >> 32 & 0xff);
}
static inline uint32_t hrd_wr_slot(uint64_t id)
{
    return (uint32_t)id;
}

extern const struct hrd_transport hrd_transport_verbs;
/* A link over several NICs (rails.c), made of the connections of 2 or more, which it takes. NULL with errno; then they are
   still the caller's. */
extern const struct hrd_transport hrd_transport_rails;
struct hrd_conn *hrd_rails_conn_new(struct hrd_verbs_conn *const *c, unsigned n);

#endif
