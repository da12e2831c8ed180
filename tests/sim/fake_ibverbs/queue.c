/* SPDX-License-Identifier: MIT */
/* Completion queues and queue pairs, as far as no packet is concerned. */
#include "tests/sim/fake_ibverbs/fake.h"

/* The same functions as in verbs.h, with the names of this tree: NOLINTBEGIN(readability-inconsistent-declaration-parameter-name) */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ---- completions ------------------------------------------------------------------------------------------------- */

FAKE_API struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *ctx)
{
    struct fake_channel *ch = NULL;
    int fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    if (fd < 0)
        return NULL;
    fake_lock();
    if (fake_take(fake_dev_of(ctx), FAKE_CHANNEL)) {
        ch = fake_need(sizeof(*ch));
        ch->ch.context = ctx;
        ch->ch.fd = fd;
    }
    fake_unlock();
    if (!ch) {
        int err = errno;
        close(fd);
        errno = err;
    }
    return ch ? &ch->ch : NULL;
}

FAKE_API int ibv_destroy_comp_channel(struct ibv_comp_channel *ch)
{
    fake_lock();
    fake.live[FAKE_CHANNEL]--;
    fake_unlock();
    close(ch->fd);
    free(ch);
    return 0;
}

FAKE_API struct ibv_cq *ibv_create_cq(struct ibv_context *ctx, int cqe, void *user,
                                      struct ibv_comp_channel *ch, int vector)
{
    struct fake_cq *cq = NULL;
    (void)vector;
    fake_lock();
    if (fake_take(fake_dev_of(ctx), FAKE_CQ)) {
        cq = fake_need(sizeof(*cq));
        cq->cq = (struct ibv_cq){.context = ctx, .channel = ch, .cq_context = user, .cqe = cqe};
        cq->size = (unsigned)cqe;
        cq->e = fake_need(cq->size * sizeof(*cq->e));
        cq->next = fake.cqs;
        fake.cqs = cq;
    }
    fake_unlock();
    return cq ? &cq->cq : NULL;
}

FAKE_API int ibv_destroy_cq(struct ibv_cq *base)
{
    struct fake_cq *cq = (struct fake_cq *)base, **at = &fake.cqs;
    fake_lock();
    while (*at != cq)
        at = &(*at)->next;
    *at = cq->next;
    fake.live[FAKE_CQ]--;
    fake_unlock();
    free(cq->e);
    free(cq);
    return 0;
}

FAKE_API int ibv_get_cq_event(struct ibv_comp_channel *base, struct ibv_cq **cq, void **user)
{
    struct fake_channel *ch = (struct fake_channel *)base;
    uint64_t n;
    if (read(base->fd, &n, sizeof(n)) != (ssize_t)sizeof(n))
        return -1;
    fake_lock();
    *cq = ch->event[0];
    *user = (*cq)->cq_context;
    memmove(ch->event, ch->event + 1, --ch->nevents * sizeof(struct ibv_cq *));
    fake_unlock();
    return 0;
}

FAKE_API void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n)
{
    (void)cq;
    (void)n;
}

static void notify_channel(struct fake_cq *cq)
{
    struct fake_channel *ch = (struct fake_channel *)cq->cq.channel;
    uint64_t one = 1;
    cq->armed = false;
    if (!ch || ch->nevents == FAKE_EVENTS)
        return;
    ch->event[ch->nevents++] = &cq->cq;
    if (write(ch->ch.fd, &one, sizeof(one)) != (ssize_t)sizeof(one))
        abort();
}

void fake_complete(struct ibv_cq *base, const struct ibv_wc *wc, struct fake_qp *sender, uint64_t upto)
{
    struct fake_cq *cq = (struct fake_cq *)base;
    if (cq->n == cq->size) {
        if (!cq->overrun)
            fake_event_of(base->context, IBV_EVENT_CQ_ERR);
        cq->overrun = true;
        return;
    }
    cq->e[(cq->first + cq->n++) % cq->size] = (struct fake_cqe){.wc = *wc, .qp = sender, .upto = upto};
    if (cq->armed)
        notify_channel(cq);
}

static int poll_cq(struct ibv_cq *base, int n, struct ibv_wc *wc)
{
    struct fake_cq *cq = (struct fake_cq *)base;
    int k = 0;
    fake_lock();
    for (; k < n && cq->n > 0; k++, cq->n--) {
        const struct fake_cqe *e = &cq->e[cq->first];
        wc[k] = e->wc;
        if (e->qp)
            e->qp->freed = e->upto;
        cq->first = (cq->first + 1) % cq->size;
    }
    fake_unlock();
    return k;
}

static int notify(struct ibv_cq *cq, int solicited)
{
    (void)solicited;
    fake_lock();
    ((struct fake_cq *)cq)->armed = true;
    fake_unlock();
    return 0;
}

/* ---- queue pairs ------------------------------------------------------------------------------------------------- */

FAKE_API struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
    struct fake_qp *q = NULL;
    if (a->qp_type != IBV_QPT_RC || a->srq || a->cap.max_inline_data > FAKE_INLINE ||
        a->cap.max_send_sge > 1 || a->cap.max_recv_sge > 1) {
        errno = EINVAL;
        return NULL;
    }
    fake_lock();
    if (fake_take(fake_dev_of(pd->context), FAKE_QP)) {
        q = fake_need(sizeof(*q));
        q->qp = (struct ibv_qp){.context = pd->context,
                                .qp_context = a->qp_context,
                                .pd = pd,
                                .send_cq = a->send_cq,
                                .recv_cq = a->recv_cq,
                                .qp_type = IBV_QPT_RC,
                                .qp_num = ++fake.last_qpn};
        q->tx_fd = -1;
        q->sq_size = a->cap.max_send_wr;
        q->rq_size = a->cap.max_recv_wr;
        q->sq = fake_need(q->sq_size * sizeof(*q->sq));
        q->rq = fake_need(q->rq_size * sizeof(*q->rq));
        q->next = fake.qps;
        fake.qps = q;
    }
    fake_unlock();
    return q ? &q->qp : NULL;
}

FAKE_API int ibv_destroy_qp(struct ibv_qp *qp)
{
    struct fake_qp *q = (struct fake_qp *)qp, **at = &fake.qps;
    fake_lock();
    while (*at != q)
        at = &(*at)->next;
    *at = q->next;
    fake_cut(q);
    for (struct fake_cq *cq = fake.cqs; cq; cq = cq->next)
        for (unsigned i = 0; i < cq->size; i++)
            if (cq->e[i].qp == q)
                cq->e[i].qp = NULL;
    fake.live[FAKE_QP]--;
    fake_unlock();
    free(q->sq);
    free(q->rq);
    free(q);
    return 0;
}

void fake_sent(struct fake_qp *q, enum ibv_wc_status status)
{
    const struct fake_wqe *w = &q->sq[q->acked++ % q->sq_size];
    bool write = w->opcode == IBV_WR_RDMA_WRITE || w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    struct ibv_wc wc = {.wr_id = w->wr_id,
                        .status = status,
                        .opcode = write ? IBV_WC_RDMA_WRITE : IBV_WC_SEND,
                        .vendor_err = status ? 0x81 : 0,
                        .byte_len = w->len,
                        .qp_num = q->qp.qp_num};
    if (status == IBV_WC_SUCCESS) {
        fake.sends += !write;
        fake.writes += write;
        fake.bytes += w->len;
        fake_dev_of(q->qp.context)->bytes += w->len;
    }
    if (w->signaled || status != IBV_WC_SUCCESS)
        fake_complete(q->qp.send_cq, &wc, q, q->acked);
}

void fake_received(struct fake_qp *q, const struct ibv_wc *wc)
{
    struct ibv_wc one = *wc;
    one.wr_id = q->rq[q->rq_first].wr_id;
    one.qp_num = q->qp.qp_num;
    q->rq_first = (q->rq_first + 1) % q->rq_size;
    q->rq_n--;
    fake_complete(q->qp.recv_cq, &one, NULL, 0);
}

void fake_qp_error(struct fake_qp *q)
{
    if (q->state == IBV_QPS_ERR)
        return;
    q->state = IBV_QPS_ERR;
    fake_cut(q);
    while (q->acked < q->posted)
        fake_sent(q, IBV_WC_WR_FLUSH_ERR);
    while (q->rq_n > 0)
        fake_received(q, &(struct ibv_wc){.status = IBV_WC_WR_FLUSH_ERR});
}

/* What each transition of an RC queue pair needs. */
static const struct {
    enum ibv_qp_state from, to;
    int mask;
} transitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
         IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC},
};

static bool allowed(const struct fake_qp *q, enum ibv_qp_state to, int mask)
{
    for (unsigned i = 0; i < sizeof(transitions) / sizeof(transitions[0]); i++)
        if (transitions[i].from == q->state && transitions[i].to == to)
            return mask == (transitions[i].mask | IBV_QP_STATE);
    return to == IBV_QPS_ERR && mask == IBV_QP_STATE;
}

FAKE_API int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
    struct fake_qp *q = (struct fake_qp *)qp;
    fake_lock();
    if (!(mask & IBV_QP_STATE) || !allowed(q, a->qp_state, mask)) {
        fake_unlock();
        return EINVAL;
    }
    switch (a->qp_state) {
    case IBV_QPS_INIT:
        q->attr = *a;
        break;
    case IBV_QPS_RTR:
        q->attr.ah_attr = a->ah_attr;
        q->attr.dest_qp_num = a->dest_qp_num;
        q->attr.min_rnr_timer = a->min_rnr_timer;
        break;
    case IBV_QPS_RTS:
        q->attr.timeout = a->timeout;
        q->attr.retry_cnt = a->retry_cnt;
        q->attr.rnr_retry = a->rnr_retry;
        break;
    default:
        fake_qp_error(q);
    }
    q->state = a->qp_state;
    fake_unlock();
    fake_wake();
    return 0;
}

/* ---- posting ----------------------------------------------------------------------------------------------------- */

static int post_one(struct fake_qp *q, const struct ibv_send_wr *wr)
{
    uint32_t len = wr->num_sge ? wr->sg_list->length : 0;
    bool is_inline = wr->send_flags & IBV_SEND_INLINE;
    if (q->posted - q->freed >= q->sq_size)
        return ENOMEM;
    if (wr->num_sge > 1 || (is_inline && len > FAKE_INLINE) ||
        (wr->opcode != IBV_WR_SEND && wr->opcode != IBV_WR_SEND_WITH_IMM && wr->opcode != IBV_WR_RDMA_WRITE &&
         wr->opcode != IBV_WR_RDMA_WRITE_WITH_IMM))
        return EINVAL;
    struct fake_wqe *w = &q->sq[q->posted++ % q->sq_size];
    *w = (struct fake_wqe){.wr_id = wr->wr_id,
                           .addr = len ? wr->sg_list->addr : 0,
                           .len = len,
                           .lkey = len ? wr->sg_list->lkey : 0,
                           .opcode = wr->opcode,
                           .imm = wr->imm_data,
                           .remote_addr = wr->wr.rdma.remote_addr,
                           .rkey = wr->wr.rdma.rkey,
                           .is_inline = is_inline,
                           .signaled = wr->send_flags & IBV_SEND_SIGNALED};
    if (is_inline && len)
        memcpy(w->data, (const void *)(uintptr_t)wr->sg_list->addr, len);
    if (q->state == IBV_QPS_ERR)
        fake_sent(q, IBV_WC_WR_FLUSH_ERR);
    return 0;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct fake_qp *q = (struct fake_qp *)qp;
    fake_lock();
    int err = fake_dev_of(qp->context)->dead                       ? EIO
              : q->state == IBV_QPS_RTS || q->state == IBV_QPS_ERR ? 0
                                                                   : EINVAL;
    while (wr && !err) {
        err = post_one(q, wr);
        wr = err ? wr : wr->next;
    }
    fake_unlock();
    if (err)
        *bad = wr;
    fake_wake();
    return err;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct fake_qp *q = (struct fake_qp *)qp;
    fake_lock();
    int err = fake_dev_of(qp->context)->dead ? EIO : q->state == IBV_QPS_RESET ? EINVAL : 0;
    for (; wr && !err; wr = err ? wr : wr->next) {
        if (q->rq_n == q->rq_size)
            err = ENOMEM;
        else if (wr->num_sge != 1)
            err = EINVAL;
        if (err)
            break;
        q->rq[(q->rq_first + q->rq_n++) % q->rq_size] =
            (struct fake_recv){.wr_id = wr->wr_id, .sge = *wr->sg_list};
        if (q->state == IBV_QPS_ERR)
            fake_received(q, &(struct ibv_wc){.status = IBV_WC_WR_FLUSH_ERR});
    }
    fake_unlock();
    if (err)
        *bad = wr;
    fake_wake();
    return err;
}

void fake_queue_ops(struct ibv_context_ops *ops)
{
    ops->poll_cq = poll_cq;
    ops->req_notify_cq = notify;
    ops->post_send = post_send;
    ops->post_recv = post_recv;
}

/* NOLINTEND(readability-inconsistent-declaration-parameter-name) */
