/* SPDX-License-Identifier: MIT */
#include "tests/sim/fake_verbs_int.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/sim/fake_cm.h"
#include "tests/sim/fake_cuda/fake.h"

struct fake_world fake_world = {.lock = PTHREAD_MUTEX_INITIALIZER};
uint32_t fake_verbs_stall_ms = 10000;
void (*fake_verbs_copy)(void *to, bool to_gpu, const void *from, bool from_gpu, size_t len);

void fake_verbs_lock(void)
{
    pthread_mutex_lock(&fake_world.lock);
}

void fake_verbs_unlock(void)
{
    pthread_mutex_unlock(&fake_world.lock);
}

static void *need(size_t n)
{
    void *p = calloc(1, n);
    if (!p)
        abort();
    return p;
}

/* errno of an ordered failure, or 0; the lock is held. */
static int refused(enum fake_call call)
{
    fake_world.calls[call]++;
    if (!fake_world.fail[call].on)
        return 0;
    if (fake_world.fail[call].after > 0) {
        fake_world.fail[call].after--;
        return 0;
    }
    if (fake_world.fail[call].times > 0 && --fake_world.fail[call].times == 0)
        fake_world.fail[call].on = false;
    return fake_world.fail[call].err;
}

/* Makes an object, or NULL with errno; the lock is held on return if it was made. */
static void *make(enum fake_call call, size_t size)
{
    fake_verbs_lock();
    int err = refused(call);
    if (err) {
        fake_verbs_unlock();
        errno = err;
        return NULL;
    }
    fake_world.objects++;
    return need(size);
}

/* ---- devices ---------------------------------------------------------------------------------------------------- */

static struct ibv_device **f_list(int *n)
{
    *n = 0;
    if (fake_world.list_err) {
        errno = fake_world.list_err;
        return NULL;
    }
    struct ibv_device **list = need((fake_world.ndev + 1) * sizeof(struct ibv_device *));
    for (unsigned i = 0; i < fake_world.ndev; i++) {
        list[i] = need(sizeof(*list[i]));
        snprintf(list[i]->name, sizeof(list[i]->name), "%s", fake_world.dev[i].name);
        snprintf(list[i]->dev_name, sizeof(list[i]->dev_name), "uverbs%u", i);
    }
    *n = (int)fake_world.ndev;
    return list;
}

static void f_free_list(struct ibv_device **list)
{
    for (int i = 0; list[i]; i++)
        free(list[i]);
    free(list);
}

static struct ibv_context *f_open(struct ibv_device *dev)
{
    const struct fake_device *fd = NULL;
    for (unsigned i = 0; i < fake_world.ndev; i++)
        if (strcmp(fake_world.dev[i].name, dev->name) == 0)
            fd = &fake_world.dev[i];
    if (!fd || fd->open_err) {
        errno = fd ? fd->open_err : ENODEV;
        return NULL;
    }
    struct fctx *c = need(sizeof(*c));
    c->dev = fd;
    c->ctx.async_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC | EFD_SEMAPHORE);
    fake_verbs_lock();
    fake_world.objects++;
    c->next = fake_world.contexts;
    fake_world.contexts = c;
    fake_verbs_unlock();
    return &c->ctx;
}

static int f_close(struct ibv_context *ctx)
{
    struct fctx *c = (struct fctx *)ctx;
    fake_verbs_lock();
    struct fctx **pc = &fake_world.contexts;
    while (*pc != c)
        pc = &(*pc)->next;
    *pc = c->next;
    fake_world.objects--;
    fake_verbs_unlock();
    close(ctx->async_fd);
    free(c);
    return 0;
}

static int f_query_device(struct ibv_context *ctx, struct ibv_device_attr *attr)
{
    memset(attr, 0, sizeof(*attr));
    attr->phys_port_cnt = (uint8_t)((struct fctx *)ctx)->dev->nports;
    return 0;
}

static int f_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr)
{
    const struct fake_device *dev = ((struct fctx *)ctx)->dev;
    if (port == 0 || port > dev->nports)
        return EINVAL;
    const struct fake_port *p = &dev->port[port - 1];
    *attr = p->attr;
    attr->gid_tbl_len = FAKE_GIDS;
    attr->pkey_tbl_len = 0;
    while (attr->pkey_tbl_len < 4 && p->pkey[attr->pkey_tbl_len])
        attr->pkey_tbl_len++;
    return 0;
}

static int f_query_gid(struct ibv_context *ctx, uint8_t port, uint32_t index, struct ibv_gid_entry *e)
{
    const struct fake_gid *g = &((struct fctx *)ctx)->dev->port[port - 1].gid[index % FAKE_GIDS];
    static const union ibv_gid zero;
    if (index >= FAKE_GIDS || g->err)
        return g->err ? g->err : EINVAL;
    if (memcmp(&g->gid, &zero, sizeof(zero)) == 0)
        return ENODATA;
    *e = (struct ibv_gid_entry){.gid = g->gid, .gid_index = index, .port_num = port, .gid_type = g->type};
    return 0;
}

static int f_query_pkey(struct ibv_context *ctx, uint8_t port, int index, uint16_t *pkey)
{
    *pkey = ((struct fctx *)ctx)->dev->port[port - 1].pkey[index];
    return 0;
}

/* ---- objects ---------------------------------------------------------------------------------------------------- */

static struct ibv_pd *f_alloc_pd(struct ibv_context *ctx)
{
    struct ibv_pd *pd = make(FAKE_ALLOC_PD, sizeof(*pd));
    if (!pd)
        return NULL;
    pd->context = ctx;
    fake_verbs_unlock();
    return pd;
}

static int gone(void *p)
{
    fake_verbs_lock();
    fake_world.objects--;
    fake_verbs_unlock();
    free(p);
    return 0;
}

static int f_dealloc_pd(struct ibv_pd *pd)
{
    fake_verbs_lock();
    for (struct fmr *m = fake_world.mrs; m; m = m->next)
        assert_true(m->mr.pd != pd);
    for (struct fqp *q = fake_world.qps; q; q = q->next)
        assert_true(q->qp.pd != pd);
    fake_verbs_unlock();
    return gone(pd);
}

static struct ibv_mr *register_mr(enum fake_call call, struct ibv_pd *pd, void *addr, size_t len, int access,
                                  char *at)
{
    struct fmr *m = make(call, sizeof(*m));
    if (!m)
        return NULL;
    m->at = at;
    m->gpu = call != FAKE_REG_MR;
    m->mapped = call == FAKE_REG_DMABUF && at;
    m->mr = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = addr, .length = len};
    m->mr.lkey = m->mr.rkey = ++fake_world.last_key;
    m->access = access;
    m->next = fake_world.mrs;
    fake_world.mrs = m;
    fake_verbs_unlock();
    return &m->mr;
}

static struct ibv_mr *f_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access)
{
    uint64_t gpu = (uintptr_t)addr & FAKE_TAG;
    char *at = (char *)((uintptr_t)addr & ~FAKE_TAG);
    return register_mr(gpu ? FAKE_REG_PEERMEM : FAKE_REG_MR, pd, addr, len, access, at);
}

static struct ibv_mr *f_reg_dmabuf(struct ibv_pd *pd, uint64_t offset, size_t len, uint64_t iova, int fd,
                                   int access)
{
    void *at = MAP_FAILED;
    if (!fake_verbs_copy)
        at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
    if (at == MAP_FAILED) /* of tests that only register */
        at = NULL;
    struct ibv_mr *mr = register_mr(FAKE_REG_DMABUF, pd, (void *)(uintptr_t)iova, len, access, at);
    int err = errno;
    if (!mr && at)
        munmap(at, len);
    errno = err;
    return mr;
}

/* The lock is held. */
void fake_verbs_settle(void)
{
    while (fake_world.first_late) {
        struct late *l = fake_world.first_late;
        fake_world.first_late = l->next;
        memcpy(l->to, l->bytes, l->len);
        free(l);
    }
    fake_world.last_late = NULL;
}

static int f_dereg_mr(struct ibv_mr *mr)
{
    fake_verbs_lock();
    fake_verbs_settle();
    struct fmr **pm = &fake_world.mrs;
    while (&(*pm)->mr != mr)
        pm = &(*pm)->next;
    struct fmr *m = *pm;
    *pm = m->next;
    if (m->mapped)
        munmap(m->at, m->mr.length);
    fake_verbs_unlock();
    return gone(m);
}

static struct ibv_comp_channel *f_create_channel(struct ibv_context *ctx)
{
    struct ibv_comp_channel *ch = make(FAKE_CREATE_CHANNEL, sizeof(*ch));
    if (!ch)
        return NULL;
    ch->context = ctx;
    ch->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC | EFD_SEMAPHORE);
    fake_verbs_unlock();
    return ch;
}

static int f_destroy_channel(struct ibv_comp_channel *ch)
{
    close(ch->fd);
    return gone(ch);
}

static struct ibv_cq *f_create_cq(struct ibv_context *ctx, int cqe, struct ibv_comp_channel *ch)
{
    struct fcq *cq = make(FAKE_CREATE_CQ, sizeof(*cq));
    if (!cq)
        return NULL;
    cq->cq = (struct ibv_cq){.context = ctx, .channel = ch, .cqe = cqe};
    cq->size = fake_world.cq_limit ? fake_world.cq_limit : cqe;
    cq->wc = need((size_t)cq->size * sizeof(*cq->wc));
    fake_verbs_unlock();
    return &cq->cq;
}

static int f_destroy_cq(struct ibv_cq *cq)
{
    free(((struct fcq *)cq)->wc);
    return gone(cq);
}

static int f_poll_cq(struct ibv_cq *base, int n, struct ibv_wc *wc)
{
    struct fcq *cq = (struct fcq *)base;
    int k = 0;
    fake_verbs_lock();
    for (; k < n && cq->n > 0; k++, cq->n--) {
        wc[k] = cq->wc[cq->first];
        cq->first = (cq->first + 1) % cq->size;
    }
    fake_verbs_unlock();
    return k;
}

static int f_notify(struct ibv_cq *cq)
{
    fake_verbs_lock();
    int err = refused(FAKE_NOTIFY);
    if (!err)
        ((struct fcq *)cq)->armed = true;
    fake_verbs_unlock();
    return err;
}

static int take(int fd)
{
    uint64_t n;
    return read(fd, &n, sizeof(n)) == sizeof(n) ? 0 : EAGAIN;
}

static void raise_fd(int fd)
{
    uint64_t one = 1;
    assert_int_equal(write(fd, &one, sizeof(one)), sizeof(one));
}

static int f_next_cq_event(struct ibv_comp_channel *ch)
{
    return take(ch->fd);
}

void fake_verbs_raise(struct fctx *c, enum ibv_event_type type, unsigned port)
{
    if (c->nevents == EVENTS)
        return;
    c->event[c->nevents++] = (struct ibv_async_event){.event_type = type, .element.port_num = (int)port};
    raise_fd(c->ctx.async_fd);
}

static int f_next_async(struct ibv_context *ctx, struct ibv_async_event *ev)
{
    struct fctx *c = (struct fctx *)ctx;
    int err = EAGAIN;
    fake_verbs_lock();
    if (c->nevents > 0 && take(ctx->async_fd) == 0) {
        *ev = c->event[0];
        memmove(c->event, c->event + 1, --c->nevents * sizeof(*c->event));
        err = 0;
    }
    fake_verbs_unlock();
    return err;
}

/* ---- queue pairs ------------------------------------------------------------------------------------------------ */

static struct ibv_qp *f_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
    struct fqp *q = make(FAKE_CREATE_QP, sizeof(*q));
    if (!q)
        return NULL;
    assert_true(a->cap.max_recv_wr <= RECVS);
    q->qp = (struct ibv_qp){.context = pd->context,
                            .pd = pd,
                            .send_cq = a->send_cq,
                            .recv_cq = a->recv_cq,
                            .qp_num = ++fake_world.last_qpn + 0x100};
    q->max_recv = a->cap.max_recv_wr;
    q->max_send = a->cap.max_send_wr;
    a->cap.max_inline_data = q->max_inline = 128;
    q->held = need(HELD * sizeof(*q->held));
    q->next = fake_world.qps;
    fake_world.qps = q;
    fake_verbs_unlock();
    return &q->qp;
}

static int f_destroy_qp(struct ibv_qp *qp)
{
    fake_verbs_lock();
    struct fqp **pq = &fake_world.qps;
    while (&(*pq)->qp != qp)
        pq = &(*pq)->next;
    struct fqp *q = *pq;
    *pq = q->next;
    fake_verbs_unlock();
    free(q->held);
    return gone(q);
}

static void complete(struct ibv_cq *base, const struct ibv_wc *wc)
{
    struct fcq *cq = (struct fcq *)base;
    if (cq->n == cq->size) {
        if (!cq->overrun)
            fake_verbs_raise((struct fctx *)base->context, IBV_EVENT_CQ_ERR, 0);
        cq->overrun = true;
        return;
    }
    cq->wc[(cq->first + cq->n++) % cq->size] = *wc;
    if (cq->armed)
        raise_fd(base->channel->fd);
    cq->armed = false;
}

static void to_error(struct fqp *q)
{
    if (q->state == IBV_QPS_ERR)
        return;
    q->state = IBV_QPS_ERR;
    for (; q->nrecv > 0; q->nrecv--) {
        complete(q->qp.recv_cq, &(struct ibv_wc){.wr_id = q->recv[q->recv_first].wr_id,
                                                 .status = IBV_WC_WR_FLUSH_ERR,
                                                 .qp_num = q->qp.qp_num});
        q->recv_first = (q->recv_first + 1) % RECVS;
    }
}

static int f_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
    struct fqp *q = (struct fqp *)qp;
    fake_verbs_lock();
    int err = refused(FAKE_MODIFY_QP);
    if (!err && mask & IBV_QP_STATE) {
        bool ok = (q->state == IBV_QPS_RESET && a->qp_state == IBV_QPS_INIT) ||
                  (q->state == IBV_QPS_INIT && a->qp_state == IBV_QPS_RTR) ||
                  (q->state == IBV_QPS_RTR && a->qp_state == IBV_QPS_RTS) || a->qp_state == IBV_QPS_ERR;
        err = ok ? 0 : EINVAL;
        if (a->qp_state == IBV_QPS_RTR)
            q->rtr = fake_world.last_rtr = *a;
        if (ok && a->qp_state == IBV_QPS_ERR)
            to_error(q);
        else if (ok)
            q->state = a->qp_state;
    }
    fake_verbs_unlock();
    return err;
}

static struct fmr *find_mr(uint32_t key, const struct ibv_pd *pd, uint64_t addr, uint64_t len)
{
    for (struct fmr *m = fake_world.mrs; m; m = m->next) {
        uint64_t base = (uintptr_t)m->mr.addr;
        if (m->mr.lkey == key)
            return m->mr.pd == pd && addr >= base && addr + len <= base + m->mr.length ? m : NULL;
    }
    return NULL;
}

static struct fqp *find_qp(uint32_t qpn)
{
    struct fqp *q = fake_world.qps;
    while (q && q->qp.qp_num != qpn)
        q = q->next;
    return q;
}

static char *bytes_of(const struct fmr *m, uint64_t addr)
{
    return m->at + (addr - (uintptr_t)m->mr.addr);
}

static void place(const struct fmr *m, char *to, const char *from, size_t len, bool damage)
{
    struct late *l = need(sizeof(*l) + len);
    *l = (struct late){.to = to, .len = len};
    memcpy(l->bytes, from, len);
    l->bytes[len - 1] = (char)(l->bytes[len - 1] ^ damage);
    if (fake_world.last_late)
        fake_world.last_late->next = l;
    else
        fake_world.first_late = l;
    fake_world.last_late = l;
    if (!m->gpu || !fake_world.late)
        fake_verbs_settle();
}

static void take_time(uint64_t rate, size_t len)
{
    if (rate == 0 || len < (size_t)1 << 20)
        return;
    uint64_t ns = len * UINT64_C(1000000000) / rate;
    nanosleep(&(struct timespec){.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)},
              NULL);
}

static enum ibv_wc_status do_write(const struct fqp *q, struct fqp *to, const struct ibv_send_wr *wr)
{
    const struct ibv_sge *sge = wr->sg_list;
    if (sge->length == 0) /* no key is looked at */
        return IBV_WC_SUCCESS;
    struct fmr *m = find_mr(wr->wr.rdma.rkey, to->qp.pd, wr->wr.rdma.remote_addr, wr->sg_list->length);
    if (!m || !(m->access & IBV_ACCESS_REMOTE_WRITE)) {
        fake_verbs_raise((struct fctx *)to->qp.context, IBV_EVENT_QP_ACCESS_ERR, 0);
        to_error(to);
        return IBV_WC_REM_ACCESS_ERR;
    }
    const struct fmr *s =
        wr->send_flags & IBV_SEND_INLINE ? NULL : find_mr(sge->lkey, q->qp.pd, sge->addr, sge->length);
    fake_world.gpu_in += m->gpu ? sge->length : 0;
    fake_world.gpu_out += s && s->gpu ? sge->length : 0;
    take_time(m->gpu        ? fake_world.rate_in
              : s && s->gpu ? fake_world.rate_out
                            : fake_world.rate_host,
              sge->length);
    if (!m->at || (s && !s->at)) {
        assert_non_null(fake_verbs_copy);
        fake_verbs_copy((void *)(uintptr_t)wr->wr.rdma.remote_addr, m->gpu,
                        (const void *)(uintptr_t)sge->addr, s && s->gpu, sge->length);
        return IBV_WC_SUCCESS;
    }
    const char *from = s ? bytes_of(s, sge->addr) : (const char *)(uintptr_t)sge->addr;
    place(m, bytes_of(m, wr->wr.rdma.remote_addr), from, sge->length,
          (m->gpu && fake_world.damage_in) || (s && s->gpu && fake_world.damage_out));
    return IBV_WC_SUCCESS;
}

/* The receive side of a SEND, or of a write with immediate (bytes 0). */
static enum ibv_wc_status do_recv(struct fqp *to, const struct ibv_send_wr *wr, bool imm)
{
    if (to->nrecv == 0) {
        fake_world.rnr++;
        return IBV_WC_RNR_RETRY_EXC_ERR;
    }
    struct ibv_sge sge = to->recv_sge[to->recv_first];
    struct ibv_wc wc = {.wr_id = to->recv[to->recv_first].wr_id,
                        .opcode = imm ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV,
                        .wc_flags = imm || wr->opcode == IBV_WR_SEND_WITH_IMM ? IBV_WC_WITH_IMM : 0,
                        .byte_len = wr->sg_list->length,
                        .qp_num = to->qp.qp_num};
    to->recv_first = (to->recv_first + 1) % RECVS;
    to->nrecv--;
    if (!imm && wr->sg_list->length > sge.length) {
        wc.status = IBV_WC_LOC_LEN_ERR;
        complete(to->qp.recv_cq, &wc);
        to_error(to);
        return IBV_WC_REM_INV_REQ_ERR;
    }
    if (!imm)
        memcpy((void *)(uintptr_t)sge.addr, (void *)(uintptr_t)wr->sg_list->addr, wr->sg_list->length);
    complete(to->qp.recv_cq, &wc);
    return IBV_WC_SUCCESS;
}

static enum ibv_wc_status deliver(const struct fqp *q, struct fqp *to, const struct ibv_send_wr *wr)
{
    switch (wr->opcode) {
    case IBV_WR_RDMA_WRITE:
        return do_write(q, to, wr);
    case IBV_WR_RDMA_WRITE_WITH_IMM: {
        enum ibv_wc_status s = do_write(q, to, wr);
        return s ? s : do_recv(to, wr, true);
    }
    default:
        return do_recv(to, wr, false);
    }
}

static enum ibv_wc_status execute(struct fqp *q, const struct ibv_send_wr *wr)
{
    struct fqp *to = find_qp(q->rtr.dest_qp_num);
    if (q->state == IBV_QPS_ERR)
        return IBV_WC_WR_FLUSH_ERR;
    if (fake_world.wc_errors > 0) {
        fake_world.wc_errors--;
        return fake_world.wc_error;
    }
    if (!(wr->send_flags & IBV_SEND_INLINE) &&
        !find_mr(wr->sg_list->lkey, q->qp.pd, wr->sg_list->addr, wr->sg_list->length))
        return IBV_WC_LOC_PROT_ERR;
    unsigned dev = (unsigned)(((const struct fctx *)q->qp.context)->dev - fake_world.dev);
    if (fake_world.down || fake_world.dev_down[dev] || !to ||
        (to->state != IBV_QPS_RTR && to->state != IBV_QPS_RTS) || to->rtr.dest_qp_num != q->qp.qp_num)
        return IBV_WC_RETRY_EXC_ERR;
    fake_world.dev_bytes[dev] += wr->sg_list->length;
    if (fake_world.lose && fake_world.lose_after-- == 0) {
        fake_world.lose = false;
        if (!fake_world.lose_arrived)
            return IBV_WC_RETRY_EXC_ERR;
        enum ibv_wc_status s = deliver(q, to, wr);
        return s ? s : IBV_WC_RETRY_EXC_ERR;
    }
    return deliver(q, to, wr);
}

void fake_verbs_run(struct fqp *q, const struct ibv_send_wr *wr)
{
    enum ibv_wc_status s = execute(q, wr);
    if (s == IBV_WC_SUCCESS && !(wr->send_flags & IBV_SEND_SIGNALED))
        return;
    complete(q->qp.send_cq, &(struct ibv_wc){.wr_id = wr->wr_id,
                                             .status = s,
                                             .opcode = IBV_WC_SEND,
                                             .vendor_err = s ? 0x81 : 0,
                                             .qp_num = q->qp.qp_num});
    if (s)
        to_error(q);
}

static void hold_one(struct fqp *q, const struct ibv_send_wr *wr)
{
    assert_true(q->nheld < HELD);
    struct held *h = &q->held[q->nheld++];
    h->wr = *wr;
    h->sge = *wr->sg_list;
    if (wr->send_flags & IBV_SEND_INLINE) {
        assert_true(h->sge.length <= sizeof(h->copy));
        memcpy(h->copy, (void *)(uintptr_t)h->sge.addr, h->sge.length);
        h->sge.addr = (uintptr_t)h->copy;
    }
    h->wr.sg_list = &h->sge;
}

static int f_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct fqp *q = (struct fqp *)qp;
    fake_verbs_lock();
    int err = refused(FAKE_POST_SEND);
    if (err == EIO)
        fake_verbs_raise((struct fctx *)qp->context, IBV_EVENT_DEVICE_FATAL, 1);
    if (!err && q->state != IBV_QPS_RTS && q->state != IBV_QPS_ERR)
        err = EINVAL;
    for (; wr && !err; wr = wr->next) {
        assert_int_equal(wr->num_sge, 1);
        if (wr->send_flags & IBV_SEND_INLINE)
            assert_true(wr->sg_list->length <= q->max_inline);
        if (fake_world.hold)
            hold_one(q, wr);
        else
            fake_verbs_run(q, wr);
    }
    if (err)
        *bad = wr;
    fake_verbs_unlock();
    return err;
}

static int f_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct fqp *q = (struct fqp *)qp;
    fake_verbs_lock();
    int err = refused(FAKE_POST_RECV);
    for (; wr && !err; wr = wr->next) {
        if (q->state == IBV_QPS_ERR) {
            complete(
                qp->recv_cq,
                &(struct ibv_wc){.wr_id = wr->wr_id, .status = IBV_WC_WR_FLUSH_ERR, .qp_num = qp->qp_num});
            continue;
        }
        assert_true(q->nrecv < q->max_recv);
        unsigned at = (q->recv_first + q->nrecv++) % RECVS;
        q->recv[at] = *wr;
        q->recv_sge[at] = *wr->sg_list;
        assert_non_null(find_mr(wr->sg_list->lkey, qp->pd, wr->sg_list->addr, wr->sg_list->length));
    }
    if (err)
        *bad = wr;
    fake_verbs_unlock();
    return err;
}

static const struct hrd_verbs table = {
    .name = "fake",
    .get_device_list = f_list,
    .free_device_list = f_free_list,
    .open_device = f_open,
    .close_device = f_close,
    .query_device = f_query_device,
    .query_port = f_query_port,
    .query_gid = f_query_gid,
    .query_pkey = f_query_pkey,
    .alloc_pd = f_alloc_pd,
    .dealloc_pd = f_dealloc_pd,
    .reg_mr = f_reg_mr,
    .reg_dmabuf_mr = f_reg_dmabuf,
    .dereg_mr = f_dereg_mr,
    .create_comp_channel = f_create_channel,
    .destroy_comp_channel = f_destroy_channel,
    .create_cq = f_create_cq,
    .destroy_cq = f_destroy_cq,
    .poll_cq = f_poll_cq,
    .req_notify_cq = f_notify,
    .next_cq_event = f_next_cq_event,
    .create_qp = f_create_qp,
    .modify_qp = f_modify_qp,
    .destroy_qp = f_destroy_qp,
    .post_send = f_post_send,
    .post_recv = f_post_recv,
    .next_async_event = f_next_async,
    .rdmacm = fake_cm_load,
};

const struct hrd_verbs *fake_verbs(void)
{
    return &table;
}
