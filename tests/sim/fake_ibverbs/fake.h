/* SPDX-License-Identifier: MIT */
/*
 * A libibverbs without an RDMA device, as a shared object that real daemons load in its place: a directory with it as
 * libibverbs.so.1 in LD_LIBRARY_PATH is all it takes. It works across processes: each has one device (or several: `devices`)
 * with one port and a GID of its own, and queue pairs of different processes reach each other by GID (or LID) and queue pair number.
 * (tests/sim/fake_verbs.h is the fake for unit tests, which lives inside one process and is ordered about by calls.)
 *
 * One thread a process is its device (wire.c). It moves data over Unix sockets, one connection for each direction of a
 * queue pair, whose packets carry a piece of a message:
 *
 *   - The sender's memory is read when the device sends it, not when it is posted: a buffer that is used again before its
 *     completion gives wrong results, and a race that ThreadSanitizer sees.
 *   - The receiver's device looks at key, bounds, domain and access for each piece, under the lock that deregistration
 *     takes: after ibv_dereg_mr() or ibv_destroy_qp() nothing of the peer's arrives any more.
 *   - What a queue pair sends arrives in order, is acknowledged message by message, and waits for a receive for as long as
 *     the sender's rnr_retry says.
 *   - A peer that is gone, a queue pair that failed, a port that is down: silence. The sender's request then ends with
 *     RETRY_EXC_ERR after its timeout and retries. A peer that merely stands still (SIGSTOP) or is slow is not silent, as
 *     on hardware.
 *
 * A slot of the send queue is free again when its completion, or that of a later request, was polled.
 *
 * Orders, one a line or between semicolons, in FAKE_VERBS at start and to a running process as datagrams to the abstract
 * socket "hreduce-fake-verbs-control-PID", each answered with "ok" or what is wrong; "on N ORDER" is about the device fakeibN,
 * where one is meant, otherwise it is fakeib0:
 *
 *   port down|up|init    state, and the event; while it is not up nothing is sent or taken
 *   fatal                the device is dead: DEVICE_FATAL, and nothing works any more until `revive`
 *   gid ADDRESS          another address of the port, and the event
 *   devices N            how many there are, 0 to 4
 *   lanes 2|4            of its port: half the rate, or all of it
 *   link ethernet|ib     link layer; ib has a LID
 *   pkey VALUE[,VALUE]   the partition table (0xffff)
 *   limit CALL N [ERRNO] of alloc_pd, reg_mr, reg_dmabuf, create_channel, create_cq, create_qp: no more than N at a time
 *                        (ENOMEM); -1: no limit
 *   gpu none|dmabuf|peermem|both   ways that GPU memory (of tests/sim/fake_cuda) can be registered; none
 *   lose N               the acknowledgement of the N-th message from now on is lost, and the path with it
 *   stats                answers with objects and counters: "qps=2 mrs=3 ... sends=10 writes=3 bytes=4096 rnr=0", and
 *                        "bytesN=" of each device
 *   qps                  answers with "NUMBER:STATE:SL:TC" of each queue pair
 */
#ifndef FAKE_IBVERBS_H
#define FAKE_IBVERBS_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

/* verbs.h hides these behind macros of the same name. */
#undef ibv_reg_mr
#undef ibv_query_port
#undef ibv_get_device_list

#define FAKE_API __attribute__((visibility("default")))
#define FAKE_INLINE 256u
#define FAKE_EVENTS 64u
#define FAKE_PIECE 32768u /* payload of a packet */
#define FAKE_PKEYS 4u
#define FAKE_DEVICES 4u

/* Objects whose number can be limited. */
enum fake_kind { FAKE_PD, FAKE_MR, FAKE_DMABUF, FAKE_CHANNEL, FAKE_CQ, FAKE_QP, FAKE_CONTEXT, FAKE_KINDS };

struct fake_ctx {
    struct verbs_context v; /* extended, as real drivers' are */
    struct ibv_async_event event[FAKE_EVENTS];
    unsigned nevents;
    struct fake_ctx *next;
};

struct fake_mr {
    struct ibv_mr mr;
    uint64_t iova;
    char *mem; /* where the processor finds it */
    int access;
    enum fake_kind kind;
    struct fake_mr *next;
};

struct fake_channel {
    struct ibv_comp_channel ch;
    struct ibv_cq *event[FAKE_EVENTS];
    unsigned nevents;
};

struct fake_qp;
struct fake_cqe {
    struct ibv_wc wc;
    struct fake_qp *qp; /* of a send: polling it frees the queue up to `upto`; NULL: the queue pair is gone */
    uint64_t upto;
};

struct fake_cq {
    struct ibv_cq cq;
    struct fake_cqe *e;
    unsigned first, n, size;
    bool armed, overrun;
    struct fake_cq *next;
};

struct fake_wqe {
    uint64_t wr_id, addr, remote_addr;
    uint32_t len, lkey, rkey, imm;
    enum ibv_wr_opcode opcode;
    bool is_inline, signaled;
    enum ibv_wc_status failed; /* found before it was sent */
    char data[FAKE_INLINE];
};

struct fake_recv {
    uint64_t wr_id;
    struct ibv_sge sge;
};

/* What a queue pair sends goes over a connection that it makes to the process of the other end. */
enum fake_tx { TX_NONE, TX_ASKED, TX_OPEN, TX_GONE };

struct fake_qp {
    struct ibv_qp qp;
    enum ibv_qp_state state;
    struct ibv_qp_attr attr; /* of the transitions so far */
    /* Send queue: [freed, posted) are in use, [acked, posted) not complete, [acked, sent) sent. */
    struct fake_wqe *sq;
    unsigned sq_size;
    uint64_t freed, acked, sent, posted;
    uint32_t offset; /* bytes sent of request `sent` */
    enum fake_tx tx;
    int tx_fd;
    bool tx_full, peer_silent;
    uint64_t blocked_since, next_dial; /* ns; 0: not */
    /* Receive queue. */
    struct fake_recv *rq;
    unsigned rq_size, rq_first, rq_n;
    struct fake_qp *next;
};

/* ---- packets ------------------------------------------------------------------------------------------------------- */

enum fake_packet_kind {
    PK_CONNECT = 1, /* requester: who it is, and whom it wants */
    PK_ACCEPT,      /* responder: that one is ready */
    PK_WRITE,       /* a piece of a message, at `offset` of `total` bytes */
    PK_SEND,
    PK_ACK, /* all messages up to msn have arrived */
    PK_NAK, /* message msn failed with this status */
    PK_PORT, /* the responder is there (status 1), or not: its port is down, or nobody is ready (0): stands for silence */
};

struct fake_packet {
    uint32_t kind, len; /* len: payload behind this header */
    uint64_t msn, addr;
    uint32_t rkey, offset, total, imm;
    uint32_t last, with_imm;
    uint32_t status;
    uint32_t qpn, src_qpn; /* CONNECT */
    uint32_t rnr_retry;
};

/* A connection that another process made to one of this one's queue pairs. */
struct fake_in {
    int fd;
    struct fake_dev *dev; /* that it asked at */
    struct fake_qp *qp;   /* NULL: not asked yet, or the one asked for is not ready */
    bool asked, told_silent;
    struct fake_packet connect;
    uint64_t arrived, told; /* messages; acknowledged */
    uint64_t rnr_until;     /* ns; the packet in `held` waits for a receive */
    struct fake_packet held;
    char payload[FAKE_PIECE];
    struct fake_in *next;
};

struct fake_dev {
    struct ibv_device ib;
    enum ibv_port_state port;
    bool dead;
    union ibv_gid gid;
    uint16_t lid;
    uint8_t width; /* as in struct ibv_port_attr */
    int listener;
    uint64_t bytes;
};

/* ---- the process --------------------------------------------------------------------------------------------------- */

struct fake_world {
    pthread_mutex_t lock; /* for everything */
    bool started;
    int wake, control;
    unsigned ndevices;
    struct fake_dev dev[FAKE_DEVICES];
    bool ib;
    uint16_t pkey[FAKE_PKEYS];
    long limit[FAKE_KINDS];
    int limit_errno[FAKE_KINDS];
    unsigned live[FAKE_KINDS];
    bool dmabuf, peermem;
    uint64_t lose_at; /* messages from now on; 0: none */
    uint64_t sends, writes, bytes, rnr;
    uint32_t last_key, last_qpn;
    struct fake_ctx *contexts;
    struct fake_mr *mrs;
    struct fake_cq *cqs;
    struct fake_qp *qps;
    struct fake_in *ins;
};
extern struct fake_world fake;

void fake_lock(void);
void fake_unlock(void);
uint64_t fake_now(void);
void *fake_need(size_t n);
/* The rest: the lock is held. */

/* device.c */
struct fake_dev *fake_dev_of(const struct ibv_context *ctx);
bool fake_port_active(const struct fake_dev *dev);
void fake_event(struct fake_ctx *c, enum ibv_event_type type);
void fake_event_of(struct ibv_context *ctx, enum ibv_event_type type);
void fake_event_all(const struct fake_dev *dev, enum ibv_event_type type);
/* Takes one of the kind, or 0 with errno where there are enough, or the device is dead. */
bool fake_take(const struct fake_dev *dev, enum fake_kind kind);
/* Where `len` bytes at addr of a region are, or NULL: no such key, other domain, out of bounds, not allowed. */
char *fake_memory(uint32_t key, const struct ibv_pd *pd, uint64_t addr, uint64_t len, int access);

/* queue.c */
void fake_queue_ops(struct ibv_context_ops *ops);
void fake_complete(struct ibv_cq *base, const struct ibv_wc *wc, struct fake_qp *sender, uint64_t upto);
/* The first request that is not complete ends like this; unsignaled successes leave no completion. */
void fake_sent(struct fake_qp *q, enum ibv_wc_status status);
/* The oldest receive is used up. */
void fake_received(struct fake_qp *q, const struct ibv_wc *wc);
/* Everything that is posted is flushed, both directions are cut. */
void fake_qp_error(struct fake_qp *q);

/* wire.c */
bool fake_start(void);
void fake_wake(void);
/* Cuts what leads to and from this queue pair. */
void fake_cut(struct fake_qp *q);
/* Listens at the port's present address. */
void fake_listen(struct fake_dev *dev);

/* control.c */
/* Obeys one order; `answer` has what is to be said. */
void fake_order(char *text, char *answer, size_t len);
void fake_orders_of_environment(void);

#endif
