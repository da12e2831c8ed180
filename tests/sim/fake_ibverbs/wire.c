/* SPDX-License-Identifier: MIT */
/* The device at work: one thread that moves messages between this process and others. */
#include "tests/sim/fake_ibverbs/fake.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define PIECES_A_TURN 8u
#define DIAL_NS UINT64_C(10000000)
/* How soon time is looked at while something waits for it. */
#define TICK_MS 5
#define FDS 4096u

uint64_t fake_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

void fake_wake(void)
{
    uint64_t one = 1;
    if (write(fake.wake, &one, sizeof(one)) != (ssize_t)sizeof(one) && errno != EAGAIN)
        abort();
}

/* ---- sockets ------------------------------------------------------------------------------------------------------ */

/* The name that a port is found by. */
static socklen_t name_of(struct sockaddr_un *un, bool global, const union ibv_gid *gid, uint16_t lid)
{
    char *at = un->sun_path + 1; /* abstract: gone with its process */
    size_t room = sizeof(un->sun_path) - 1;
    un->sun_family = AF_UNIX;
    int n = snprintf(at, room, "hreduce-fake-verbs-%s", global ? "gid-" : "lid-");
    for (unsigned i = 0; global && i < sizeof(gid->raw); i++)
        n += snprintf(at + n, room - (size_t)n, "%02x", gid->raw[i]);
    if (!global)
        n += snprintf(at + n, room - (size_t)n, "%u", lid);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

void fake_listen(struct fake_dev *dev)
{
    struct sockaddr_un un = {0};
    if (dev->listener >= 0)
        close(dev->listener);
    dev->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t len = name_of(&un, !fake.ib, &dev->gid, dev->lid);
    if (dev->listener < 0 || bind(dev->listener, (struct sockaddr *)&un, len) || listen(dev->listener, 128)) {
        fprintf(stderr, "the fake RDMA device cannot have the address %s: %s\n", un.sun_path + 1,
                strerror(errno));
        abort();
    }
}

/* 1: sent; 0: no room now; -1: the other end is gone. */
static int put(int fd, const struct fake_packet *p, const void *payload)
{
    struct iovec iov[2] = {{.iov_base = (void *)(uintptr_t)p, .iov_len = sizeof(*p)},
                           {.iov_base = (void *)(uintptr_t)payload, .iov_len = p->len}};
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = p->len ? 2 : 1};
    if (sendmsg(fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
        return 1;
    return errno == EAGAIN || errno == EINTR || errno == ENOBUFS ? 0 : -1;
}

static int get(int fd, struct fake_packet *p, void *payload)
{
    struct iovec iov[2] = {{.iov_base = p, .iov_len = sizeof(*p)},
                           {.iov_base = payload, .iov_len = payload ? FAKE_PIECE : 0}};
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = 2};
    ssize_t n = recvmsg(fd, &m, MSG_DONTWAIT);
    if (n < 0 &&
        errno ==
            ECONNRESET) /* the other end closed without reading everything: what it said before comes now */
        n = recvmsg(fd, &m, MSG_DONTWAIT);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -1;
    return (size_t)n < sizeof(*p) || (size_t)n != sizeof(*p) + p->len ? -1 : 1;
}

void fake_cut(struct fake_qp *q)
{
    if (q->tx_fd >= 0)
        close(q->tx_fd);
    q->tx_fd = -1;
    q->tx = TX_GONE;
    for (struct fake_in *c = fake.ins; c; c = c->next) {
        if (c->qp != q)
            continue;
        close(c->fd);
        c->fd = -1; /* freed at the end of the turn */
        c->qp = NULL;
    }
}

/* ---- the receiving side ------------------------------------------------------------------------------------------- */

/* What to do with a packet. */
enum verdict { TAKEN, WAITS, REFUSED };

static enum verdict refuse(struct fake_in *c, enum ibv_wc_status theirs)
{
    struct fake_packet nak = {.kind = PK_NAK, .msn = c->held.msn, .status = theirs};
    if (c->arrived > c->told) {
        struct fake_packet ack = {.kind = PK_ACK, .msn = c->arrived};
        (void)put(c->fd, &ack, NULL);
    }
    (void)put(c->fd, &nak, NULL);
    fake_qp_error(c->qp);
    return REFUSED;
}

/* IBV_QP_MIN_RNR_TIMER in 10 us. */
static const uint16_t rnr_timer[32] = {65535, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
                                       48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
                                       2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};

static enum verdict not_ready(struct fake_in *c)
{
    uint64_t timer = rnr_timer[c->qp->attr.min_rnr_timer % 32] * UINT64_C(10000);
    if (!c->rnr_until) {
        fake.rnr++;
        c->rnr_until =
            c->connect.rnr_retry == 7 ? UINT64_MAX : fake_now() + timer * (c->connect.rnr_retry + 1);
    }
    return fake_now() < c->rnr_until ? WAITS : refuse(c, IBV_WC_RNR_RETRY_EXC_ERR);
}

static enum verdict deliver_send(struct fake_in *c)
{
    const struct fake_packet *p = &c->held;
    struct fake_qp *q = c->qp;
    struct ibv_wc wc = {.opcode = IBV_WC_RECV,
                        .byte_len = p->total,
                        .imm_data = p->imm,
                        .wc_flags = p->with_imm ? IBV_WC_WITH_IMM : 0};
    if (q->rq_n == 0)
        return not_ready(c);
    const struct ibv_sge *sge = &q->rq[q->rq_first].sge;
    if (p->total > sge->length) {
        wc.status = IBV_WC_LOC_LEN_ERR;
        fake_received(q, &wc);
        return refuse(c, IBV_WC_REM_INV_REQ_ERR);
    }
    char *mem =
        p->len ? fake_memory(sge->lkey, q->qp.pd, sge->addr, sge->length, IBV_ACCESS_LOCAL_WRITE) : NULL;
    if (p->len && !mem) {
        wc.status = IBV_WC_LOC_PROT_ERR;
        fake_received(q, &wc);
        return refuse(c, IBV_WC_REM_OP_ERR);
    }
    if (p->len)
        memcpy(mem + p->offset, c->payload, p->len);
    if (p->last)
        fake_received(q, &wc);
    return TAKEN;
}

static enum verdict deliver_write(struct fake_in *c)
{
    const struct fake_packet *p = &c->held;
    struct fake_qp *q = c->qp;
    if (p->total > 0) { /* no key is looked at for a write of nothing */
        char *mem = fake_memory(p->rkey, q->qp.pd, p->addr, p->total, IBV_ACCESS_REMOTE_WRITE);
        if (!mem || !(q->attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE)) {
            fake_event_of(q->qp.context, IBV_EVENT_QP_ACCESS_ERR);
            return refuse(c, IBV_WC_REM_ACCESS_ERR);
        }
        memcpy(mem + p->offset, c->payload, p->len);
    }
    if (!p->last || !p->with_imm)
        return TAKEN;
    if (q->rq_n == 0)
        return not_ready(c);
    fake_received(q, &(struct ibv_wc){.opcode = IBV_WC_RECV_RDMA_WITH_IMM,
                                      .byte_len = p->total,
                                      .imm_data = p->imm,
                                      .wc_flags = IBV_WC_WITH_IMM});
    return TAKEN;
}

/* Who is wanted, once it is ready for this peer. */
static void attach(struct fake_in *c)
{
    struct fake_packet accept = {.kind = PK_ACCEPT};
    struct fake_qp *q = fake.qps;
    while (q && (fake_dev_of(q->qp.context) != c->dev || q->qp.qp_num != c->connect.qpn ||
                 q->attr.dest_qp_num != c->connect.src_qpn ||
                 (q->state != IBV_QPS_RTR && q->state != IBV_QPS_RTS)))
        q = q->next;
    if (!q || put(c->fd, &accept, NULL) != 1)
        return;
    c->qp = q;
    c->told_silent = false;
}

static bool hung_up(const struct fake_in *c)
{
    char byte;
    ssize_t n = recv(c->fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

/* One packet, if there is one. False: the connection is no more. */
static bool in_packet(struct fake_in *c, bool *more)
{
    *more = false;
    if (!c->rnr_until) {
        int r = get(c->fd, &c->held, c->payload);
        if (r <= 0)
            return r == 0;
    }
    enum verdict v = c->held.kind == PK_WRITE  ? deliver_write(c)
                     : c->held.kind == PK_SEND ? deliver_send(c)
                                               : REFUSED;
    if (v != TAKEN)
        return v == WAITS;
    c->rnr_until = 0;
    *more = true;
    if (!c->held.last)
        return true;
    c->arrived = c->held.msn + 1;
    return !fake.lose_at || --fake.lose_at > 0;
}

/* What the other end cannot see of hardware: whether it is answered at all. */
static void tell_silence(struct fake_in *c, bool silent)
{
    struct fake_packet port = {.kind = PK_PORT, .status = !silent};
    if (c->told_silent != silent && put(c->fd, &port, NULL) == 1)
        c->told_silent = silent;
}

/* False: close it. *busy: there may be more at once. */
static bool in_step(struct fake_in *c, bool *busy)
{
    bool down = !fake_port_active(c->dev), more = true;
    if (!down && !c->asked) {
        int r = get(c->fd, &c->connect, NULL);
        if (r <= 0)
            return r == 0;
        c->asked = true;
    }
    if (!down && !c->qp)
        attach(c);
    tell_silence(c, down || !c->qp);
    if (down || !c->qp)
        return !hung_up(c);
    for (unsigned i = 0; i < PIECES_A_TURN && more; i++)
        if (!in_packet(c, &more))
            return false;
    *busy = *busy || more;
    struct fake_packet ack = {.kind = PK_ACK, .msn = c->arrived};
    if (c->arrived > c->told && put(c->fd, &ack, NULL) == 1)
        c->told = c->arrived;
    return true;
}

static void accept_all(struct fake_dev *dev)
{
    for (int fd; (fd = accept4(dev->listener, NULL, NULL, SOCK_CLOEXEC)) >= 0;) {
        struct fake_in *c = fake_need(sizeof(*c));
        c->fd = fd;
        c->dev = dev;
        c->next = fake.ins;
        fake.ins = c;
    }
}

static void in_all(bool *busy)
{
    for (unsigned i = 0; i < FAKE_DEVICES; i++)
        accept_all(&fake.dev[i]);
    for (struct fake_in *c = fake.ins; c; c = c->next)
        if (c->fd >= 0 && !in_step(c, busy) && c->fd >= 0) {
            close(c->fd);
            c->fd = -1;
        }
    for (struct fake_in **at = &fake.ins; *at;) {
        struct fake_in *c = *at;
        if (c->fd >= 0) {
            at = &c->next;
            continue;
        }
        *at = c->next;
        free(c);
    }
}

/* ---- the sending side --------------------------------------------------------------------------------------------- */

static void dial(struct fake_qp *q)
{
    const struct ibv_ah_attr *ah = &q->attr.ah_attr;
    struct fake_packet hello = {.kind = PK_CONNECT,
                                .qpn = q->attr.dest_qp_num,
                                .src_qpn = q->qp.qp_num,
                                .rnr_retry = q->attr.rnr_retry};
    struct sockaddr_un un = {0};
    socklen_t len = name_of(&un, ah->is_global, &ah->grh.dgid, ah->dlid);
    q->next_dial = fake_now() + DIAL_NS;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&un, len) == 0 && put(fd, &hello, NULL) == 1) {
        q->tx_fd = fd;
        q->tx = TX_ASKED;
    } else if (fd >= 0) {
        close(fd);
    }
}

static void acked(struct fake_qp *q, uint64_t upto)
{
    while (q->acked < upto && q->acked < q->sent)
        fake_sent(q, IBV_WC_SUCCESS);
}

static void read_answers(struct fake_qp *q)
{
    struct fake_packet p;
    int r = 1;
    while (q->tx_fd >= 0 && (r = get(q->tx_fd, &p, NULL)) == 1) {
        if (p.kind == PK_ACCEPT)
            q->tx = TX_OPEN;
        if (p.kind == PK_ACCEPT || p.kind == PK_PORT)
            q->peer_silent = p.kind == PK_PORT && !p.status;
        if (p.kind == PK_ACK)
            acked(q, p.msn);
        if (p.kind == PK_NAK) {
            acked(q, p.msn);
            fake_sent(q, (enum ibv_wc_status)p.status);
            fake_qp_error(q);
        }
    }
    if (r >= 0 || q->tx_fd < 0)
        return;
    close(q->tx_fd);
    q->tx_fd = -1;
    q->tx = q->tx == TX_OPEN ? TX_GONE : TX_NONE; /* its number will not be anybody's again */
    q->peer_silent = false;
}

/* One packet; false: nothing more can be sent now. */
static bool send_piece(struct fake_qp *q)
{
    struct fake_wqe *w = &q->sq[q->sent % q->sq_size];
    if (q->sent == q->posted || w->failed)
        return false;
    bool write = w->opcode == IBV_WR_RDMA_WRITE || w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    uint32_t len = w->len - q->offset < FAKE_PIECE ? w->len - q->offset : FAKE_PIECE;
    const char *mem = w->is_inline ? w->data
                      : w->len     ? fake_memory(w->lkey, q->qp.pd, w->addr, w->len, 0)
                                   : NULL;
    if (w->len && !mem) {
        w->failed = IBV_WC_LOC_PROT_ERR;
        return false;
    }
    struct fake_packet p = {.kind = write ? PK_WRITE : PK_SEND,
                            .len = len,
                            .msn = q->sent,
                            .addr = w->remote_addr,
                            .rkey = w->rkey,
                            .offset = q->offset,
                            .total = w->len,
                            .imm = w->imm,
                            .last = q->offset + len == w->len,
                            .with_imm =
                                w->opcode == IBV_WR_SEND_WITH_IMM || w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM};
    int r = put(q->tx_fd, &p, len ? mem + q->offset : NULL);
    q->tx_full = r == 0;
    if (r <= 0)
        return false; /* an end that is gone shows when answers are read */
    q->offset = p.last ? 0 : q->offset + len;
    q->sent += p.last;
    return true;
}

static uint64_t retry_ns(const struct fake_qp *q)
{
    return q->attr.timeout ? (UINT64_C(4096) << q->attr.timeout) * (q->attr.retry_cnt + 1u) : UINT64_MAX;
}

/* No acknowledgement can come now: for how long is that so? */
static void check_silence(struct fake_qp *q)
{
    bool silent = !fake_port_active(fake_dev_of(q->qp.context)) || q->tx == TX_NONE || q->tx == TX_GONE ||
                  q->peer_silent;
    if (q->acked == q->posted || !silent) {
        q->blocked_since = 0;
        return;
    }
    q->blocked_since = q->blocked_since ? q->blocked_since : fake_now();
    if (fake_now() - q->blocked_since < retry_ns(q))
        return;
    fake_sent(q, IBV_WC_RETRY_EXC_ERR);
    fake_qp_error(q);
}

static void qp_step(struct fake_qp *q, bool *busy)
{
    bool more = true;
    if (q->state != IBV_QPS_RTS)
        return;
    if (fake_port_active(fake_dev_of(q->qp.context))) {
        if (q->tx == TX_NONE && q->acked < q->posted && fake_now() >= q->next_dial)
            dial(q);
        read_answers(q);
        for (unsigned i = 0; i < PIECES_A_TURN && more; i++)
            more = q->state == IBV_QPS_RTS && q->tx == TX_OPEN && !q->peer_silent && send_piece(q);
        *busy = *busy || more;
    }
    const struct fake_wqe *w = &q->sq[q->acked % q->sq_size];
    if (q->state == IBV_QPS_RTS && q->acked == q->sent && q->acked < q->posted && w->failed) {
        fake_sent(q, w->failed);
        fake_qp_error(q);
    }
    if (q->state == IBV_QPS_RTS)
        check_silence(q);
}

/* ---- the thread --------------------------------------------------------------------------------------------------- */

static void watch(struct pollfd *p, nfds_t *n, int fd, short events)
{
    if (*n < FDS && fd >= 0)
        p[(*n)++] = (struct pollfd){.fd = fd, .events = events};
}

/* Everything that can be done now; then what to wait for. */
static nfds_t turn(struct pollfd *p, int *timeout)
{
    bool busy = false, ticks = false;
    nfds_t n = 0;
    in_all(&busy);
    for (struct fake_qp *q = fake.qps; q; q = q->next)
        qp_step(q, &busy);
    watch(p, &n, fake.wake, POLLIN);
    watch(p, &n, fake.control, POLLIN);
    for (unsigned i = 0; i < FAKE_DEVICES; i++)
        watch(p, &n, fake.dev[i].listener, POLLIN);
    for (const struct fake_in *c = fake.ins; c; c = c->next) {
        bool reads = fake_port_active(c->dev) && (c->qp || !c->asked) && !c->rnr_until;
        ticks = ticks || !reads || c->arrived > c->told;
        if (reads)
            watch(p, &n, c->fd, POLLIN);
    }
    for (const struct fake_qp *q = fake.qps; q; q = q->next) {
        ticks = ticks || q->blocked_since;
        if (fake_port_active(fake_dev_of(q->qp.context)))
            watch(p, &n, q->tx_fd, (short)(POLLIN | (q->tx_full ? POLLOUT : 0)));
    }
    *timeout = busy ? 0 : ticks ? TICK_MS : -1;
    return n;
}

static void answer_orders(void)
{
    char text[1024], answer[4096];
    struct sockaddr_un from;
    socklen_t len = sizeof(from);
    ssize_t n;
    while ((n = recvfrom(fake.control, text, sizeof(text) - 1, MSG_DONTWAIT, (struct sockaddr *)&from,
                         &len)) >= 0) {
        text[n] = '\0';
        fake_lock();
        fake_order(text, answer, sizeof(answer));
        fake_unlock();
        (void)sendto(fake.control, answer, strlen(answer), MSG_DONTWAIT | MSG_NOSIGNAL,
                     (struct sockaddr *)&from, len);
        len = sizeof(from);
    }
}

static void *device(void *arg)
{
    static struct pollfd p[FDS];
    uint64_t n;
    (void)arg;
    for (;;) {
        int timeout;
        fake_lock();
        nfds_t fds = turn(p, &timeout);
        fake_unlock();
        (void)poll(p, fds, timeout);
        if (read(fake.wake, &n, sizeof(n)) < 0 && errno != EAGAIN)
            abort();
        answer_orders();
    }
    return NULL;
}

static int control_socket(void)
{
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int n =
        snprintf(un.sun_path + 1, sizeof(un.sun_path) - 1, "hreduce-fake-verbs-control-%d", (int)getpid());
    if (fd >= 0 && bind(fd, (struct sockaddr *)&un,
                        (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)) == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

bool fake_start(void)
{
    pthread_t thread;
    sigset_t all, old;
    fake_lock();
    if (fake.started) {
        fake_unlock();
        return true;
    }
    fake_orders_of_environment();
    fake.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    fake.control = control_socket();
    bool ok = fake.wake >= 0 && fake.control >= 0;
    if (ok) {
        for (unsigned i = 0; i < FAKE_DEVICES; i++)
            fake_listen(&fake.dev[i]);
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        ok = pthread_create(&thread, NULL, device, NULL) == 0;
        pthread_sigmask(SIG_SETMASK, &old, NULL);
    }
    if (ok)
        pthread_detach(thread);
    fake.started = ok;
    fake_unlock();
    return ok;
}
