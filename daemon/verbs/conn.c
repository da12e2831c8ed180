/* SPDX-License-Identifier: MIT */
#include "daemon/verbs/conn.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#define INLINE_WANTED 256u

static void discard(struct hrd_conn *base)
{
    hrd_verbs_conn_free((struct hrd_verbs_conn *)base);
}

void hrd_verbs_conn_free(struct hrd_verbs_conn *c)
{
    const struct hrd_verbs *v = c->dev.v;
    for (unsigned i = 0; i < c->n; i++)
        if (c->q[i].qp)
            v->destroy_qp(c->q[i].qp);
    hrd_mr_free(v, &c->arena_mr);
    hrd_mr_free(v, &c->buffers_mr);
    if (c->cq)
        v->destroy_cq(c->cq);
    if (c->channel)
        v->destroy_comp_channel(c->channel);
    if (c->pd)
        v->dealloc_pd(c->pd);
    if (c->ctx)
        v->close_device(c->ctx);
    if (c->buffers)
        munmap(c->buffers, c->buffers_len);
    free(c);
}

/* ---- new -------------------------------------------------------------------------------------------------------- */

static int failed(const struct hrd_verbs_conn *c, const char *what, int err, char *why, size_t len)
{
    snprintf(
        why, len, "%s cannot be made on %s (%s)%s", what, c->dev.name, strerror(err),
        err == ENOMEM
            ? "; is the control group's rdma.max or a limit of the device reached, or LimitMEMLOCK too low?"
            : "");
    return -err;
}

static int make_memory(struct hrd_verbs_conn *c, char *why, size_t len)
{
    const struct hrd_verbs *v = c->dev.v;
    size_t queue = (size_t)(HRD_VMSG_POSTED + HRD_VMSG_DEPTH + 1) * HRD_VMSG_BYTES;
    c->buffers_len = c->n * queue;
    c->buffers = mmap(NULL, c->buffers_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (c->buffers == MAP_FAILED) {
        c->buffers = NULL;
        snprintf(why, len, "no memory for message buffers of %zu bytes", c->buffers_len);
        return -ENOMEM;
    }
    for (unsigned i = 0; i < c->n; i++) {
        c->q[i].rx = c->buffers + i * queue;
        c->q[i].tx = c->q[i].rx + (size_t)HRD_VMSG_POSTED * HRD_VMSG_BYTES;
    }
    struct hrd_mr_source buffers = {.addr = c->buffers, .len = c->buffers_len};
    struct hrd_mr_source arena = {.addr = c->arena, .len = c->arena_len};
    int err =
        hrd_mr_register(v, c->pd, &c->memory, &buffers, IBV_ACCESS_LOCAL_WRITE, &c->buffers_mr, why, len);
    return err ? err : hrd_mr_register(v, c->pd, &c->memory, &arena, 0, &c->arena_mr, why, len);
}

static int make_queue(struct hrd_verbs_conn *c, struct hrd_verbs_queue *q, char *why, size_t len)
{
    const struct hrd_verbs *v = c->dev.v;
    struct ibv_qp_init_attr init = {.send_cq = c->cq,
                                    .recv_cq = c->cq,
                                    .qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = HRD_VSEND_WRS,
                                            .max_recv_wr = HRD_VMSG_POSTED,
                                            .max_send_sge = 1,
                                            .max_recv_sge = 1,
                                            .max_inline_data = INLINE_WANTED}};
    q->qp = v->create_qp(c->pd, &init);
    if (!q->qp && errno == EINVAL) { /* the only wish in there that a device may refuse */
        init.cap.max_inline_data = 0;
        q->qp = v->create_qp(c->pd, &init);
    }
    if (!q->qp)
        return failed(c, "a queue pair", errno ? errno : EIO, why, len);
    q->inline_max = init.cap.max_inline_data;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT,
                               .pkey_index = c->dev.pkey_index,
                               .port_num = c->dev.port,
                               .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
    int err =
        v->modify_qp(q->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    return err ? failed(c, "an initialised queue pair", err, why, len) : 0;
}

int hrd_verbs_post_recv(struct hrd_verbs_conn *c, unsigned queue, const uint32_t *slot, unsigned n)
{
    struct ibv_recv_wr wr[16], *bad;
    struct ibv_sge sge[16];
    while (n > 0) {
        unsigned k = n < 16 ? n : 16;
        for (unsigned i = 0; i < k; i++) {
            sge[i] = (struct ibv_sge){.addr = (uintptr_t)(c->q[queue].rx + (size_t)slot[i] * HRD_VMSG_BYTES),
                                      .length = HRD_VMSG_BYTES,
                                      .lkey = c->buffers_mr.mr->lkey};
            wr[i] = (struct ibv_recv_wr){.wr_id = HRD_WR_RECV | hrd_wr_id(queue, slot[i]),
                                         .next = i + 1 < k ? &wr[i + 1] : NULL,
                                         .sg_list = &sge[i],
                                         .num_sge = 1};
        }
        int err = c->dev.v->post_recv(c->q[queue].qp, wr, &bad);
        if (err)
            return err;
        slot += k;
        n -= k;
    }
    return 0;
}

static int make_queues(struct hrd_verbs_conn *c, char *why, size_t len)
{
    uint32_t slots[HRD_VMSG_POSTED];
    int err = 0;
    for (uint32_t i = 0; i < HRD_VMSG_POSTED; i++)
        slots[i] = i;
    for (unsigned i = 0; i < c->n && !err; i++) {
        err = make_queue(c, &c->q[i], why, len);
        int r = err ? 0 : hrd_verbs_post_recv(c, i, slots, HRD_VMSG_POSTED);
        if (r)
            err = failed(c, "a receive buffer", r, why, len);
    }
    return err;
}

static int make_objects(struct hrd_verbs_conn *c, char *why, size_t len)
{
    const struct hrd_verbs *v = c->dev.v;
    c->ctx = hrd_verbs_open(v, c->dev.name, why, len);
    if (!c->ctx)
        return -ENODEV;
    if (!(c->pd = v->alloc_pd(c->ctx)))
        return failed(c, "a protection domain", errno ? errno : EIO, why, len);
    if (!(c->channel = v->create_comp_channel(c->ctx)))
        return failed(c, "a completion channel", errno ? errno : EIO, why, len);
    /* Room for every work request: when a queue pair fails all of them complete at once. */
    c->cq = v->create_cq(c->ctx, (int)(c->n * (HRD_VMSG_POSTED + HRD_VSEND_WRS)), c->channel);
    if (!c->cq)
        return failed(c, "a completion queue", errno ? errno : EIO, why, len);
    int err = make_memory(c, why, len);
    return err ? err : make_queues(c, why, len);
}

/* What the peer has to know of this end. */
static void describe(struct hrd_verbs_conn *c)
{
    const struct hrd_verbs_device *dev = &c->dev;
    c->local = (struct hrd_verbs_end){.ethernet = dev->ethernet,
                                      .global = dev->global,
                                      .mtu = (uint8_t)dev->mtu,
                                      .queues = (uint8_t)c->n,
                                      .lid = dev->lid,
                                      .pkey = dev->pkey,
                                      .gid = dev->gid,
                                      .depth = HRD_VMSG_DEPTH,
                                      .msg_bytes = HRD_VMSG_BYTES};
    if (getrandom(c->local.psn, sizeof(c->local.psn), 0) != (ssize_t)sizeof(c->local.psn))
        abort();
    for (unsigned i = 0; i < c->n; i++) {
        c->local.qpn[i] = c->q[i].qp->qp_num;
        c->local.psn[i] &= 0xffffff;
        c->local.got[i] = c->q[i].got;
    }
}

struct hrd_verbs_conn *hrd_verbs_conn_new(const struct hrd_verbs_device *dev, unsigned queues, void *arena,
                                          uint64_t arena_len, uint64_t nonce, uint32_t stall_ms, char *why,
                                          size_t len)
{
    struct hrd_verbs_conn *c = calloc(1, sizeof(*c));
    if (!c) {
        snprintf(why, len, "no memory for the connection");
        return NULL;
    }
    c->base.discard = discard;
    c->dev = *dev;
    c->arena = arena;
    c->arena_len = arena_len;
    c->nonce = nonce;
    c->stall_ns = stall_ms * UINT64_C(1000000);
    c->n = queues < dev->queues ? queues : dev->queues;
    if (make_objects(c, why, len)) {
        hrd_verbs_conn_free(c);
        return NULL;
    }
    describe(c);
    return c;
}

static void drop_queues(struct hrd_verbs_conn *c)
{
    struct ibv_wc wc;
    for (unsigned i = 0; i < c->n; i++) {
        if (c->q[i].qp)
            c->dev.v->destroy_qp(c->q[i].qp);
        c->q[i].qp = NULL;
        c->q[i].hello_sent = c->q[i].hello_got = false;
    }
    /* What they left behind must not be taken for completions of the new ones. */
    while (c->dev.v->poll_cq(c->cq, 1, &wc) > 0)
        ;
}

int hrd_verbs_conn_renew(struct hrd_verbs_conn *c, const struct hrd_verbs_device *dev, uint64_t nonce,
                         char *why, size_t len)
{
    drop_queues(c);
    c->dev = *dev;
    c->nonce = nonce;
    int err = make_queues(c, why, len);
    if (err)
        drop_queues(c);
    else
        describe(c);
    return err;
}

void hrd_verbs_conn_trim(struct hrd_verbs_conn *c, unsigned queues)
{
    while (c->n > queues) {
        struct hrd_verbs_queue *q = &c->q[--c->n];
        c->dev.v->destroy_qp(q->qp);
        *q = (struct hrd_verbs_queue){0};
        c->local.queues = (uint8_t)c->n;
    }
}

/* ---- connect ---------------------------------------------------------------------------------------------------- */

static int compatible(const struct hrd_verbs_conn *c, const struct hrd_verbs_end *r, char *why, size_t len)
{
    if (c->dev.ethernet != r->ethernet)
        snprintf(why, len, "%s is %s here and %s at the peer", c->dev.name,
                 c->dev.ethernet ? "Ethernet" : "InfiniBand", r->ethernet ? "Ethernet" : "InfiniBand");
    else if ((c->dev.pkey & 0x7fff) != (r->pkey & 0x7fff) && !c->dev.ethernet)
        snprintf(why, len, "partition key 0x%04x here and 0x%04x at the peer: set verbs_pkey alike",
                 c->dev.pkey & 0x7fff, r->pkey & 0x7fff);
    else if (r->msg_bytes != HRD_VMSG_BYTES || r->depth != HRD_VMSG_DEPTH)
        snprintf(why, len,
                 "the peer has %u message buffers of %u bytes, this node %u of %u: install the same release "
                 "on both",
                 r->depth, r->msg_bytes, HRD_VMSG_DEPTH, HRD_VMSG_BYTES);
    else if (r->queues != c->n)
        snprintf(why, len, "the peer made %u queue pairs, this node %u", r->queues, c->n);
    else if (!c->dev.ethernet && !c->dev.global && r->lid == 0)
        snprintf(why, len, "the peer's port has no LID: is a subnet manager running?");
    else
        return 0;
    return -EPROTO;
}

/* What one end knows to have arrived must have, and nothing can have that was not sent. (Only a device that lost what it
   had acknowledged, or a peer that lies, gets here.) */
static int nothing_lost(const struct hrd_verbs_conn *c, char *why, size_t len)
{
    for (unsigned i = 0; i < c->n; i++) {
        uint64_t got = c->remote.got[i];
        if (got >= c->q[i].acked && got <= c->q[i].sent)
            continue;
        snprintf(why, len,
                 "the peer has %" PRIu64 " messages of queue pair %u, of which %" PRIu64
                 " were sent and %" PRIu64 " acknowledged: the devices lost some",
                 got, i, c->q[i].sent, c->q[i].acked);
        return -EBADMSG;
    }
    return 0;
}

/* By what the two ends told each other. */
static struct hrd_verbs_route told_route(const struct hrd_verbs_conn *c, unsigned i)
{
    const struct hrd_verbs_device *d = &c->dev;
    const struct hrd_verbs_end *r = &c->remote;
    bool global = d->global || r->global;
    struct hrd_verbs_route route = {
        .ah = {.dlid = r->lid, .sl = d->sl, .port_num = d->port, .is_global = global},
        .mtu = d->mtu,
        .dest_qpn = r->qpn[i],
        .rq_psn = r->psn[i],
        .sq_psn = c->local.psn[i],
        .pkey_index = d->pkey_index};
    if (global)
        route.ah.grh = (struct ibv_global_route){
            .dgid = r->gid, .sgid_index = d->gid_index, .hop_limit = 64, .traffic_class = d->tc};
    return route;
}

int hrd_verbs_conn_queue(struct hrd_verbs_conn *c, unsigned i, const struct hrd_verbs_route *route, char *why,
                         size_t len)
{
    const struct hrd_verbs_device *d = &c->dev;
    const struct hrd_verbs_end *r = &c->remote;
    enum ibv_mtu mtu = route->mtu < d->mtu ? route->mtu : d->mtu;
    char at[64];
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR,
                              .path_mtu = r->mtu < (uint8_t)mtu ? (enum ibv_mtu)r->mtu : mtu,
                              .dest_qp_num = route->dest_qpn,
                              .rq_psn = route->rq_psn,
                              .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 12,
                              .pkey_index = route->pkey_index,
                              .ah_attr = route->ah};
    int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    if (route->pkey_index != d->pkey_index)
        mask |= IBV_QP_PKEY_INDEX;
    int err = d->v->modify_qp(c->q[i].qp, &rtr, mask);
    if (err) {
        snprintf(why, len, "no path from %s to %s (LID %u): %s", d->text,
                 hrd_verbs_gid_text(&r->gid, at, sizeof(at)), r->lid, strerror(err));
        return -err;
    }
    /* The flow control leaves no reason for RNR; a few tries hide nothing but a slow start. */
    struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS,
                              .timeout = d->timeout,
                              .retry_cnt = d->retry,
                              .rnr_retry = 3,
                              .sq_psn = route->sq_psn,
                              .max_rd_atomic = 1};
    err = d->v->modify_qp(c->q[i].qp, &rts,
                          IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                              IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    return err ? failed(c, "a connected queue pair", err, why, len) : 0;
}

static int send_hello(struct hrd_verbs_conn *c, unsigned i, char *why, size_t len)
{
    struct hrd_vmsg m = {.magic = HRD_VMSG_MAGIC, .kind = HRD_VMSG_HELLO, .len = HRD_VMSG_BODY};
    char *at = c->q[i].tx + (size_t)HRD_VMSG_DEPTH * HRD_VMSG_BYTES; /* others may hold what is sent again */
    memcpy(at, &m, sizeof(m));
    for (size_t k = sizeof(m); k + 8 <= HRD_VMSG_BYTES; k += 8)
        memcpy(at + k, &c->nonce, 8);
    struct ibv_sge sge = {.addr = (uintptr_t)at, .length = HRD_VMSG_BYTES, .lkey = c->buffers_mr.mr->lkey};
    struct ibv_send_wr *bad, wr = {.wr_id = hrd_wr_id(i, 0),
                                   .sg_list = &sge,
                                   .num_sge = 1,
                                   .opcode = IBV_WR_SEND,
                                   .send_flags = IBV_SEND_SIGNALED};
    int err = c->dev.v->post_send(c->q[i].qp, &wr, &bad);
    return err ? failed(c, "a send request", err, why, len) : 0;
}

int hrd_verbs_conn_meet(struct hrd_verbs_conn *c, const struct hrd_verbs_end *remote, char *why, size_t len)
{
    c->remote = *remote;
    int err = compatible(c, remote, why, len);
    return err ? err : nothing_lost(c, why, len);
}

int hrd_verbs_conn_begin(struct hrd_verbs_conn *c, bool first, char *why, size_t len)
{
    int err = 0;
    for (unsigned i = 0; i < c->n && !err && first; i++)
        err = send_hello(c, i, why, len);
    c->first = first;
    return err;
}

int hrd_verbs_conn_connect(struct hrd_verbs_conn *c, const struct hrd_verbs_end *remote, bool first,
                           char *why, size_t len)
{
    int err = hrd_verbs_conn_meet(c, remote, why, len);
    for (unsigned i = 0; i < c->n && !err; i++) {
        struct hrd_verbs_route route = told_route(c, i);
        err = hrd_verbs_conn_queue(c, i, &route, why, len);
    }
    return err ? err : hrd_verbs_conn_begin(c, first, why, len);
}

/* ---- probe ------------------------------------------------------------------------------------------------------ */

void hrd_verbs_wc_text(const struct hrd_verbs_conn *c, const struct ibv_wc *wc, char *buf, size_t len)
{
    snprintf(buf, len, "%s (status %d, vendor 0x%x) on queue pair %u of %s port %u: %s",
             hrd_verbs_wc_name(wc->status), (int)wc->status, wc->vendor_err, hrd_wr_queue(wc->wr_id),
             c->dev.name, c->dev.port, hrd_verbs_wc_meaning(wc->status));
}

static bool hello_ok(const struct hrd_verbs_conn *c, const char *at, uint32_t bytes)
{
    struct hrd_vmsg m;
    memcpy(&m, at, sizeof(m));
    if (bytes != HRD_VMSG_BYTES || m.magic != HRD_VMSG_MAGIC || m.kind != HRD_VMSG_HELLO ||
        m.len != HRD_VMSG_BODY)
        return false;
    for (size_t k = sizeof(m); k + 8 <= HRD_VMSG_BYTES; k += 8)
        if (memcmp(at + k, &c->nonce, 8) != 0)
            return false;
    return true;
}

static int probe_one(struct hrd_verbs_conn *c, const struct ibv_wc *wc, char *why, size_t len)
{
    unsigned i = hrd_wr_queue(wc->wr_id);
    if (wc->status != IBV_WC_SUCCESS) {
        hrd_verbs_wc_text(c, wc, why, len);
        return -EIO;
    }
    if (!(wc->wr_id & HRD_WR_RECV)) {
        c->q[i].hello_sent = true;
        return 0;
    }
    uint32_t slot = hrd_wr_slot(wc->wr_id);
    if (c->q[i].hello_got || !hello_ok(c, c->q[i].rx + (size_t)slot * HRD_VMSG_BYTES, wc->byte_len)) {
        snprintf(why, len,
                 "what arrived on queue pair %u of %s is not what the peer sent: the path corrupts data, or "
                 "something else answers",
                 i, c->dev.name);
        return -EPROTO;
    }
    c->q[i].hello_got = true;
    int err = hrd_verbs_post_recv(c, i, &slot, 1);
    if (err)
        return failed(c, "a receive buffer", err, why, len);
    return c->first ? 0 : send_hello(c, i, why, len);
}

int hrd_verbs_conn_probe(struct hrd_verbs_conn *c, char *why, size_t len)
{
    for (;;) {
        bool all = true;
        struct ibv_wc wc;
        for (unsigned i = 0; i < c->n; i++)
            all = all && c->q[i].hello_sent && c->q[i].hello_got;
        if (all)
            return 1;
        int n = c->dev.v->poll_cq(c->cq, 1, &wc);
        if (n < 0) {
            snprintf(why, len, "the completion queue of %s failed", c->dev.name);
            return -EIO;
        }
        if (n == 0)
            return 0;
        int err = probe_one(c, &wc, why, len);
        if (err)
            return err;
    }
}
