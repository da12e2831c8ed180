/* SPDX-License-Identifier: MIT */
/* The simulated libibverbs keeps to the rules of RC, through the daemon's own door to it. Both ends are in this process. */
#include "daemon/verbs/verbs_api.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define BYTES (100u << 10) /* several packets */

static const struct hrd_verbs *v;

/* One end: everything that a queue pair needs. */
static struct end {
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    unsigned char *mem;
} a, b;

static void tell(const char *text)
{
    char answer[256] = "";
    struct sockaddr_un to = {.sun_family = AF_UNIX}, from = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int n =
        snprintf(to.sun_path + 1, sizeof(to.sun_path) - 1, "hreduce-fake-verbs-control-%d", (int)getpid());
    assert_int_equal(bind(fd, (struct sockaddr *)&from, sizeof(sa_family_t)), 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&to,
                             (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)),
                     0);
    assert_int_equal(send(fd, text, strlen(text), 0), strlen(text));
    assert_true(recv(fd, answer, sizeof(answer) - 1, 0) > 0);
    assert_string_equal(answer, "ok");
    close(fd);
}

static void open_end(struct end *e)
{
    int n;
    struct ibv_device **list = v->get_device_list(&n);
    assert_int_equal(n, 1);
    e->ctx = v->open_device(list[0]);
    v->free_device_list(list);
    assert_non_null(e->ctx);
    e->pd = v->alloc_pd(e->ctx);
    e->channel = v->create_comp_channel(e->ctx);
    e->cq = v->create_cq(e->ctx, 64, e->channel);
    e->mem = calloc(1, BYTES);
    e->mr = v->reg_mr(e->pd, e->mem, BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    struct ibv_qp_init_attr init = {
        .send_cq = e->cq,
        .recv_cq = e->cq,
        .qp_type = IBV_QPT_RC,
        .cap = {
            .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64}};
    e->qp = v->create_qp(e->pd, &init);
    assert_true(e->pd && e->cq && e->mem && e->mr && e->qp);
}

static void close_end(struct end *e)
{
    assert_int_equal(v->dealloc_pd(e->pd), EBUSY);
    if (e->qp)
        assert_int_equal(v->destroy_qp(e->qp), 0);
    if (e->mr)
        assert_int_equal(v->dereg_mr(e->mr), 0);
    assert_int_equal(v->destroy_cq(e->cq), 0);
    assert_int_equal(v->destroy_comp_channel(e->channel), 0);
    assert_int_equal(v->dealloc_pd(e->pd), 0);
    assert_int_equal(v->close_device(e->ctx), 0);
    free(e->mem);
    *e = (struct end){0};
}

static void connect_end(struct end *e, uint32_t to)
{
    struct ibv_gid_entry gid;
    assert_int_equal(v->query_gid(e->ctx, 1, 0, &gid), 0);
    struct ibv_qp_attr init = {
        .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = to,
                              .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 1,
                              .ah_attr = {.is_global = 1, .port_num = 1, .grh.dgid = gid.gid}};
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 12, .retry_cnt = 2, .rnr_retry = 1, .max_rd_atomic = 1};
    int rtr_mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    assert_int_equal(v->modify_qp(e->qp, &rtr, rtr_mask), EINVAL); /* not from RESET */
    assert_int_equal(
        v->modify_qp(e->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
    assert_int_equal(v->modify_qp(e->qp, &rtr, IBV_QP_STATE | IBV_QP_AV), EINVAL); /* half of it */
    assert_int_equal(v->modify_qp(e->qp, &rtr, rtr_mask), 0);
    assert_int_equal(v->modify_qp(e->qp, &rts,
                                  IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                      IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
                     0);
}

static int set_up(void **state)
{
    (void)state;
    open_end(&a);
    open_end(&b);
    connect_end(&a, b.qp->qp_num);
    connect_end(&b, a.qp->qp_num);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    tell("port up");
    close_end(&a);
    close_end(&b);
    return 0;
}

static int post_receive(struct end *e, uint64_t id, uint32_t len)
{
    struct ibv_sge sge = {.addr = (uintptr_t)e->mem, .length = len, .lkey = e->mr->lkey};
    struct ibv_recv_wr *bad, wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1};
    return v->post_recv(e->qp, &wr, &bad);
}

static int post(enum ibv_wr_opcode opcode, uint64_t id, uint64_t remote, uint32_t rkey, uint32_t len,
                int flags)
{
    struct ibv_sge sge = {.addr = (uintptr_t)a.mem, .length = len, .lkey = a.mr->lkey};
    struct ibv_send_wr *bad, wr = {.wr_id = id,
                                   .sg_list = &sge,
                                   .num_sge = 1,
                                   .opcode = opcode,
                                   .imm_data = 7,
                                   .send_flags = (unsigned)flags,
                                   .wr.rdma = {.remote_addr = remote, .rkey = rkey}};
    return v->post_send(a.qp, &wr, &bad);
}

static struct ibv_wc completion(const struct end *e)
{
    struct ibv_wc wc;
    for (int i = 0; i < 20000; i++) {
        if (v->poll_cq(e->cq, 1, &wc) == 1)
            return wc;
        nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
    }
    fail_msg("no completion");
    return wc;
}

static void ends_with(const struct end *e, uint64_t id, enum ibv_wc_status status)
{
    struct ibv_wc wc = completion(e);
    if (wc.wr_id != id || wc.status != status)
        fail_msg("%s of %d instead of %s of %d", hrd_verbs_wc_name(wc.status), (int)wc.wr_id,
                 hrd_verbs_wc_name(status), (int)id);
}

static void no_more(const struct end *e)
{
    struct ibv_wc wc;
    assert_int_equal(v->poll_cq(e->cq, 1, &wc), 0);
}

static void fill(void)
{
    for (unsigned i = 0; i < BYTES; i++)
        a.mem[i] = (unsigned char)(i * 7 + i / 251);
}

/* Order, lengths over several packets, immediate data; unsignaled requests complete with a later one and hold their places
   until it is polled. */
static void test_data(void **state)
{
    (void)state;
    struct ibv_wc wc;
    struct pollfd p = {.fd = b.channel->fd, .events = POLLIN};
    fill();
    assert_int_equal(v->req_notify_cq(b.cq), 0);
    assert_int_equal(post_receive(&b, 1, 64), 0);
    assert_int_equal(post_receive(&b, 2, 64), 0);
    assert_int_equal(post(IBV_WR_SEND, 11, 0, 0, 64, IBV_SEND_INLINE), 0);
    memset(a.mem, 0, 64); /* inline: copied already */
    assert_int_equal(post(IBV_WR_RDMA_WRITE, 10, (uintptr_t)b.mem + 64, b.mr->rkey, BYTES - 64, 0), 0);
    assert_int_equal(
        post(IBV_WR_RDMA_WRITE_WITH_IMM, 12, (uintptr_t)b.mem + 64, b.mr->rkey, 8, IBV_SEND_SIGNALED), 0);
    wc = completion(&b);
    assert_true(wc.wr_id == 1 && wc.opcode == IBV_WC_RECV && wc.byte_len == 64 && !wc.wc_flags);
    assert_int_equal(poll(&p, 1, 0), 1);
    assert_int_equal(v->next_cq_event(b.channel), 0);
    assert_int_equal(v->next_cq_event(b.channel), EAGAIN); /* armed once */
    wc = completion(&b);
    assert_true(wc.wr_id == 2 && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.imm_data == 7 &&
                wc.byte_len == 8);
    ends_with(&a, 12, IBV_WC_SUCCESS);
    fill();
    assert_memory_equal(b.mem, a.mem, 64);
    for (unsigned i = 64; i < BYTES; i++)
        assert_int_equal(b.mem[i], i < 128 ? 0 : a.mem[i - 64]);
    for (int i = 0; i < 8; i++)
        assert_int_equal(
            post(IBV_WR_RDMA_WRITE, 20, (uintptr_t)b.mem, b.mr->rkey, 8, i == 7 ? IBV_SEND_SIGNALED : 0), 0);
    assert_int_equal(poll(&(struct pollfd){.fd = -1}, 1, 50), 0);
    assert_int_equal(post(IBV_WR_RDMA_WRITE, 21, (uintptr_t)b.mem, b.mr->rkey, 8, 0), ENOMEM);
    ends_with(&a, 20, IBV_WC_SUCCESS);
    assert_int_equal(post(IBV_WR_RDMA_WRITE, 21, (uintptr_t)b.mem, b.mr->rkey, 8, IBV_SEND_SIGNALED), 0);
    ends_with(&a, 21, IBV_WC_SUCCESS);
    no_more(&a);
}

/* What may not be written is refused at both ends, and nothing behind it is done. */
static void test_access(void **state)
{
    (void)state;
    struct ibv_async_event ev;
    for (int how = 0; how < 4; how++) {
        fill();
        struct ibv_pd *other = v->alloc_pd(b.ctx);
        struct ibv_mr *mr =
            how == 2   ? v->reg_mr(other, b.mem, BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)
            : how == 3 ? v->reg_mr(b.pd, b.mem, BYTES, IBV_ACCESS_LOCAL_WRITE)
                       : NULL;
        assert_int_equal(post_receive(&b, 1, 64), 0);
        assert_int_equal(post(IBV_WR_RDMA_WRITE, 10, (uintptr_t)b.mem + (how == 0 ? 1 : 0),
                              mr         ? mr->rkey
                              : how == 1 ? b.mr->rkey + 1
                                         : b.mr->rkey,
                              BYTES, 0),
                         0);
        assert_int_equal(post(IBV_WR_SEND, 11, 0, 0, 8, 0), 0);
        ends_with(&a, 10, IBV_WC_REM_ACCESS_ERR);
        ends_with(&a, 11, IBV_WC_WR_FLUSH_ERR);
        ends_with(&b, 1, IBV_WC_WR_FLUSH_ERR);
        assert_int_equal(v->next_async_event(b.ctx, &ev), 0);
        assert_int_equal(ev.event_type, IBV_EVENT_QP_ACCESS_ERR);
        for (unsigned i = 0; i < BYTES; i++)
            assert_int_equal(b.mem[i], 0);
        assert_int_equal(post(IBV_WR_SEND, 12, 0, 0, 8, 0), 0); /* taken, and flushed */
        ends_with(&a, 12, IBV_WC_WR_FLUSH_ERR);
        if (mr)
            v->dereg_mr(mr);
        v->dealloc_pd(other);
        tear_down(NULL);
        set_up(NULL);
    }
}

/* Own memory that is not registered; a receive that is too small; none at all, or one in time. */
static void test_receives(void **state)
{
    (void)state;
    struct ibv_wc wc;
    assert_int_equal(post_receive(&b, 1, 8), 0);
    assert_int_equal(post(IBV_WR_SEND, 10, 0, 0, 9, 0), 0);
    ends_with(&b, 1, IBV_WC_LOC_LEN_ERR);
    ends_with(&a, 10, IBV_WC_REM_INV_REQ_ERR);
    tear_down(NULL);
    set_up(NULL);
    assert_int_equal(post(IBV_WR_SEND, 10, 0, 0, 9, 0), 0);
    ends_with(&a, 10, IBV_WC_RNR_RETRY_EXC_ERR);
    tear_down(NULL);
    set_up(NULL);
    assert_int_equal(v->dereg_mr(b.mr), 0);
    b.mr = NULL;
    assert_int_equal(post(IBV_WR_RDMA_WRITE, 10, (uintptr_t)b.mem, a.mr->rkey, 9, 0),
                     0); /* a key of another domain */
    wc = completion(&a);
    assert_int_equal(wc.status, IBV_WC_REM_ACCESS_ERR);
    tear_down(NULL);
    set_up(NULL);
    uint32_t key = a.mr->lkey;
    assert_int_equal(v->dereg_mr(a.mr), 0);
    a.mr = &(struct ibv_mr){.lkey = key};
    assert_int_equal(post(IBV_WR_SEND, 10, 0, 0, 9, 0), 0);
    ends_with(&a, 10, IBV_WC_LOC_PROT_ERR);
    a.mr = NULL;
}

/* Silence ends with RETRY_EXC_ERR after the queue pair's own time, and not before; what is sent meanwhile arrives when the
   port is up in time. */
static void test_silence(void **state)
{
    (void)state;
    struct ibv_async_event ev;
    struct ibv_port_attr port;
    assert_int_equal(post_receive(&b, 1, 64), 0);
    tell("port down");
    assert_int_equal(v->next_async_event(a.ctx, &ev), 0);
    assert_int_equal(ev.event_type, IBV_EVENT_PORT_ERR);
    assert_true(v->query_port(a.ctx, 1, &port) == 0 && port.state == IBV_PORT_DOWN);
    assert_int_equal(post(IBV_WR_SEND, 10, 0, 0, 9, 0), 0);
    ends_with(&a, 10, IBV_WC_RETRY_EXC_ERR);
    no_more(&b);
    tear_down(NULL);
    set_up(NULL);
    assert_int_equal(v->destroy_qp(b.qp), 0); /* as in a process that is gone */
    b.qp = NULL;
    assert_int_equal(post(IBV_WR_SEND, 10, 0, 0, 9, 0), 0);
    ends_with(&a, 10, IBV_WC_RETRY_EXC_ERR);
}

static int load(void **state)
{
    char path[512], why[512] = "";
    const char *build = getenv("HREDUCE_BUILD");
    (void)state;
    /* Loaded by its path first, it is found by its name afterwards. */
    snprintf(path, sizeof(path), "%s/tests/fake_ibverbs/libibverbs.so.1", build ? build : "build");
    if (!dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
        print_message("%s\n", dlerror());
        return -1;
    }
    v = hrd_verbs_load(why, sizeof(why));
    return v ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_data, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_access, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_receives, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_silence, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, load, NULL);
}
