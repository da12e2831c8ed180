/* SPDX-License-Identifier: MIT */
/* Inside of the fake verbs layer: fake_verbs.c is the library, fake_verbs_orders.c what tests say to it. */
#ifndef TESTS_SIM_FAKE_VERBS_INT_H
#define TESTS_SIM_FAKE_VERBS_INT_H

#include <pthread.h>

#include "tests/sim/fake_verbs.h"

#define EVENTS 64
#define HELD 4096
#define RECVS 512

struct fctx {
    struct ibv_context ctx;
    const struct fake_device *dev;
    struct ibv_async_event event[EVENTS];
    unsigned nevents;
    struct fctx *next;
};

struct fmr {
    struct ibv_mr mr;
    int access;
    char *at; /* where this process has the bytes of mr.addr */
    bool gpu, mapped;
    struct fmr *next;
};

/* A write into GPU memory that nobody sees yet. */
struct late {
    char *to;
    size_t len;
    struct late *next;
    char bytes[];
};

struct fcq {
    struct ibv_cq cq;
    struct ibv_wc *wc;
    int first, n, size;
    bool armed, overrun;
};

struct held {
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    char copy[256]; /* of inline data */
};

struct fqp {
    struct ibv_qp qp;
    enum ibv_qp_state state;
    struct ibv_qp_attr rtr;
    struct ibv_recv_wr recv[RECVS];
    struct ibv_sge recv_sge[RECVS];
    unsigned recv_first, nrecv, max_recv, max_send, max_inline;
    struct held *held;
    unsigned nheld;
    struct fqp *next;
};

struct fake_world {
    pthread_mutex_t lock;
    struct fake_device dev[FAKE_DEVICES];
    unsigned ndev;
    int list_err;
    struct {
        unsigned after, times;
        int err;
        bool on;
    } fail[FAKE_NCALLS];
    unsigned calls[FAKE_NCALLS];
    enum ibv_wc_status wc_error;
    unsigned wc_errors, rnr, objects, lose_after;
    bool lose, lose_arrived;
    int cq_limit;
    bool hold, down;
    bool dev_down[FAKE_DEVICES];      /* of port 1 */
    uint64_t dev_bytes[FAKE_DEVICES]; /* payload that was sent */
    uint32_t last_key, last_qpn;
    struct ibv_qp_attr last_rtr;
    bool late, damage_in, damage_out;
    struct late *first_late, *last_late;
    uint64_t gpu_in, gpu_out;
    uint64_t rate_in, rate_out, rate_host; /* of writes of 1 MiB and more, bytes a second; 0: no limit */
    struct fctx *contexts;
    struct fmr *mrs;
    struct fqp *qps;
};
extern struct fake_world fake_world;

void fake_verbs_lock(void);
void fake_verbs_unlock(void);
/* The lock is held: */
void fake_verbs_raise(struct fctx *c, enum ibv_event_type type, unsigned port);
void fake_verbs_run(struct fqp *q, const struct ibv_send_wr *wr);
/* What was written into GPU memory lies there. */
void fake_verbs_settle(void);

#endif
