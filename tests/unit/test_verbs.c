/* SPDX-License-Identifier: MIT */
/* Choice of the device, memory regions, and the set-up of a connection, against every refusal a device can give. */
#include "tests/sim/fake_verbs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct fake_device device(const char *name, int link_layer)
{
    struct fake_device d = {.name = name, .nports = 1};
    d.port[0].attr = (struct ibv_port_attr){.state = IBV_PORT_ACTIVE,
                                            .active_mtu = IBV_MTU_2048,
                                            .link_layer = (uint8_t)link_layer,
                                            .lid = link_layer == IBV_LINK_LAYER_ETHERNET ? 0 : 17};
    d.port[0].pkey[0] = 0xffff;
    return d;
}

static struct fake_gid gid(uint32_t type, const char *text)
{
    struct fake_gid g = {.type = type};
    assert_int_equal(inet_pton(AF_INET6, text, &g.gid), 1);
    return g;
}

/* As show_gids prints it on a RoCE port: two link-local entries, then IPv4 in both versions. */
static struct fake_device roce(const char *name, const char *ip)
{
    struct fake_device d = device(name, IBV_LINK_LAYER_ETHERNET);
    char mapped[64];
    snprintf(mapped, sizeof(mapped), "::ffff:%s", ip);
    d.port[0].gid[0] = gid(IBV_GID_TYPE_ROCE_V1, "fe80::1");
    d.port[0].gid[1] = gid(IBV_GID_TYPE_ROCE_V2, "fe80::1");
    d.port[0].gid[2] = gid(IBV_GID_TYPE_ROCE_V1, mapped);
    d.port[0].gid[3] = gid(IBV_GID_TYPE_ROCE_V2, mapped);
    return d;
}

static struct hrd_verbs_want want_any(void)
{
    return (struct hrd_verbs_want){.device = "auto",
                                   .port = HRD_VERBS_AUTO,
                                   .gid_index = HRD_VERBS_AUTO,
                                   .pkey = HRD_VERBS_AUTO,
                                   .mtu = HRD_VERBS_AUTO,
                                   .timeout = 14,
                                   .retry = 7,
                                   .queues = 2};
}

static struct hrd_verbs_device chosen(const struct hrd_verbs_want *want)
{
    struct hrd_verbs_device dev;
    char why[512] = "";
    if (hrd_verbs_choose(fake_verbs(), want, &dev, why, sizeof(why)))
        fail_msg("%s", why);
    assert_int_equal(fake_verbs_objects(), 0);
    return dev;
}

static void refused(const struct hrd_verbs_want *want, int err, const char *words)
{
    struct hrd_verbs_device dev;
    char why[512] = "";
    assert_int_equal(hrd_verbs_choose(fake_verbs(), want, &dev, why, sizeof(why)), err);
    if (!strstr(why, words))
        fail_msg("'%s' does not say '%s'", why, words);
    assert_int_equal(fake_verbs_objects(), 0);
}

static void test_no_device(void **state)
{
    (void)state;
    struct hrd_verbs_want want = want_any();
    fake_verbs_reset();
    refused(&want, -ENODEV, "no RDMA device in this network namespace");
    fake_verbs_list_error(ENOSYS);
    refused(&want, -ENODEV, "ib_uverbs");
    fake_verbs_list_error(EPERM);
    refused(&want, -ENODEV, "Operation not permitted");
    fake_verbs_reset();
    struct fake_device d = roce("mlx5_0", "10.0.0.1");
    d.open_err = EACCES;
    fake_verbs_add(&d);
    refused(&want, -ENODEV, "/dev/infiniband/uverbs0");
    snprintf(want.device, sizeof(want.device), "mlx5_9");
    refused(&want, -EINVAL, "there is only mlx5_0");
}

static void test_gid(void **state)
{
    (void)state;
    struct hrd_verbs_want want = want_any();
    struct fake_device d = roce("mlx5_0", "10.0.0.1");
    fake_verbs_reset();
    fake_verbs_add(&d);
    struct hrd_verbs_device dev = chosen(&want);
    assert_int_equal(dev.gid_index, 3);
    assert_true(dev.global && dev.ethernet);
    assert_string_equal(dev.text, "mlx5_0 port 1, RoCE v2, GID 3 (10.0.0.1), MTU 2048");
    assert_string_equal(dev.note, "");
    /* The configuration decides, and is told what it chose. */
    want.gid_index = 1;
    dev = chosen(&want);
    assert_int_equal(dev.gid_index, 1);
    assert_non_null(strstr(dev.note, "link-local"));
    want.gid_index = 5;
    refused(&want, -EINVAL, "verbs_gid_index = 5");
    want.gid_index = 200;
    refused(&want, -EINVAL, "verbs_gid_index = 200");
    /* Slots that cannot be read are passed over. */
    d.port[0].gid[0].err = d.port[0].gid[1].err = EINVAL;
    fake_verbs_reset();
    fake_verbs_add(&d);
    want.gid_index = HRD_VERBS_AUTO;
    assert_int_equal(chosen(&want).gid_index, 3);
    want.gid_index = 0;
    refused(&want, -EINVAL, "Invalid argument");
    /* Nothing but link-local. */
    want.gid_index = HRD_VERBS_AUTO;
    d.port[0].gid[2] = d.port[0].gid[3] = (struct fake_gid){0};
    d.port[0].gid[1] = gid(IBV_GID_TYPE_ROCE_V2, "::ffff:169.254.3.4");
    fake_verbs_reset();
    fake_verbs_add(&d);
    refused(&want, -ENODEV, "no routable RoCE v2 address");
}

/* Among several, the one with an address that the peers know; IPv4 before IPv6 otherwise. */
static void test_address_match(void **state)
{
    (void)state;
    struct hrp_addr own = {.family = 4, .ip = {10, 0, 0, 2}}, own6 = {.family = 6, .ip = {0xfd, [15] = 9}};
    struct hrd_verbs_want want = want_any();
    struct fake_device a = roce("mlx5_0", "10.0.0.1"), b = roce("mlx5_1", "192.168.0.7");
    b.port[0].gid[4] = gid(IBV_GID_TYPE_ROCE_V2, "fd00::9");
    b.port[0].gid[6] = gid(IBV_GID_TYPE_ROCE_V2, "::ffff:10.0.0.2");
    fake_verbs_reset();
    fake_verbs_add(&a);
    fake_verbs_add(&b);
    assert_string_equal(chosen(&want).name, "mlx5_0");
    want.addr = &own;
    want.naddrs = 1;
    struct hrd_verbs_device dev = chosen(&want);
    assert_string_equal(dev.name, "mlx5_1");
    assert_int_equal(dev.gid_index, 6);
    want.addr = &own6;
    dev = chosen(&want);
    assert_int_equal(dev.gid_index, 4);
    own.ip[3] = 99;
    want.addr = &own;
    dev = chosen(&want);
    assert_string_equal(dev.name, "mlx5_0");
    assert_non_null(strstr(dev.note, "verbs_gid_index"));
    snprintf(want.device, sizeof(want.device), "mlx5_1");
    dev = chosen(&want);
    assert_int_equal(dev.gid_index, 3);
}

static void test_port_state(void **state)
{
    (void)state;
    struct hrd_verbs_want want = want_any();
    struct fake_device d = device("mlx5_0", IBV_LINK_LAYER_INFINIBAND);
    d.port[0].attr.state = IBV_PORT_INIT;
    fake_verbs_reset();
    fake_verbs_add(&d);
    refused(&want, -ENODEV, "port 1 of mlx5_0 is INIT: is a subnet manager running?");
    d.port[0].attr.state = IBV_PORT_DOWN;
    fake_verbs_reset();
    fake_verbs_add(&d);
    refused(&want, -ENODEV, "port 1 of mlx5_0 is DOWN: is the cable in?");
    /* The second port serves; all reasons are said when none does. */
    d.nports = 2;
    d.port[1] = device("", IBV_LINK_LAYER_INFINIBAND).port[0];
    fake_verbs_reset();
    fake_verbs_add(&d);
    struct hrd_verbs_device dev = chosen(&want);
    assert_int_equal(dev.port, 2);
    assert_false(dev.global);
    assert_string_equal(dev.text, "mlx5_0 port 2, InfiniBand, LID 17, pkey 0xffff, MTU 2048");
    want.port = 1;
    refused(&want, -ENODEV, "port 1 of mlx5_0 is DOWN");
    want.port = 3;
    refused(&want, -EINVAL, "verbs_port = 3, but mlx5_0 has 2");
    want.port = 2;
    d.port[1].attr.lid = 0;
    fake_verbs_reset();
    fake_verbs_add(&d);
    refused(&want, -ENODEV, "no LID");
}

static void test_pkey(void **state)
{
    (void)state;
    struct hrd_verbs_want want = want_any();
    struct fake_device d = device("mlx5_0", IBV_LINK_LAYER_INFINIBAND);
    memcpy(d.port[0].pkey, (uint16_t[]){0x0005, 0x8001, 0xffff, 0x8005}, 8);
    fake_verbs_reset();
    fake_verbs_add(&d);
    assert_int_equal(chosen(&want).pkey_index, 2); /* by value, wherever it stands */
    want.pkey = 1;
    assert_int_equal(chosen(&want).pkey_index, 1);
    want.pkey = 5; /* full membership is better than limited */
    assert_int_equal(chosen(&want).pkey_index, 3);
    want.pkey = 0x8007;
    refused(&want, -EINVAL, "partition key 0x0007 is not in the table of port 1 of mlx5_0");
    memcpy(d.port[0].pkey, (uint16_t[]){0x8001, 0}, 4);
    fake_verbs_reset();
    fake_verbs_add(&d);
    want.pkey = HRD_VERBS_AUTO; /* a fabric without the default partition */
    assert_int_equal(chosen(&want).pkey, 0x8001);
}

static void test_knobs(void **state)
{
    (void)state;
    struct hrd_verbs_want want = want_any();
    struct fake_device d = device("mlx5_0", IBV_LINK_LAYER_INFINIBAND), r = roce("rxe0", "10.0.0.1");
    want.tc = 106;
    fake_verbs_reset();
    fake_verbs_add(&d);
    struct hrd_verbs_device dev = chosen(&want);
    assert_int_equal(dev.tc, 0);
    assert_non_null(strstr(dev.note, "verbs_traffic_class = 106 is ignored"));
    fake_verbs_reset();
    fake_verbs_add(&r);
    dev = chosen(&want);
    assert_int_equal(dev.tc, 106);
    assert_string_equal(dev.note, "");
    want.mtu = 1024;
    assert_int_equal(chosen(&want).mtu, IBV_MTU_1024);
    want.mtu = 4096;
    refused(&want, -EINVAL, "verbs_mtu = 4096, but port 1 of rxe0 carries 2048");
    want.mtu = 1500;
    refused(&want, -EINVAL, "must be 256");
}

/* dmabuf works or not, the peer-memory module works or not: four ways, each refusal tried once. */
static void test_gpu_memory(void **state)
{
    (void)state;
    const struct hrd_verbs *v = fake_verbs();
    for (int dmabuf = 0; dmabuf < 2; dmabuf++)
        for (int peermem = 0; peermem < 2; peermem++) {
            char why[400] = "";
            fake_verbs_plain();
            struct ibv_context *ctx = hrd_verbs_open(v, "fake0", why, sizeof(why));
            struct ibv_pd *pd = v->alloc_pd(ctx);
            struct hrd_mr_memory memory = {0};
            struct hrd_mr_source src = {.addr = (void *)0x10000, .len = 4096, .gpu = true, .dmabuf_fd = 7};
            if (!dmabuf)
                fake_verbs_fail(FAKE_REG_DMABUF, 0, EOPNOTSUPP, 0);
            if (!peermem)
                fake_verbs_fail(FAKE_REG_MR, 0, EFAULT, 0);
            for (int i = 0; i < 10; i++) {
                struct hrd_mr mr = {0};
                int r = hrd_mr_register(v, pd, &memory, &src, IBV_ACCESS_LOCAL_WRITE, &mr, why, sizeof(why));
                if (dmabuf || peermem) {
                    assert_int_equal(r, 0);
                    assert_int_equal(mr.way, dmabuf ? HRD_MR_DMABUF : HRD_MR_PEERMEM);
                } else {
                    assert_int_equal(r, -EFAULT);
                    assert_non_null(strstr(why, "dmabuf cannot be registered (Operation not supported)"));
                    assert_non_null(strstr(why, "peer-memory module cannot be registered (Bad address)"));
                }
                hrd_mr_free(v, &mr);
            }
            assert_int_equal(fake_verbs_calls(FAKE_REG_DMABUF), dmabuf ? 10 : 1);
            assert_int_equal(fake_verbs_calls(FAKE_REG_MR), dmabuf ? 0 : peermem ? 10 : 1);
            assert_int_equal(memory.refused[HRD_MR_DMABUF], dmabuf ? 0 : EOPNOTSUPP);
            v->dealloc_pd(pd);
            v->close_device(ctx);
        }
}

/* A lack of memory passes: it is no property of the device. Without a descriptor dmabuf is not even called. */
static void test_gpu_memory_again(void **state)
{
    (void)state;
    const struct hrd_verbs *v = fake_verbs();
    char why[400];
    fake_verbs_plain();
    struct ibv_context *ctx = hrd_verbs_open(v, "fake0", why, sizeof(why));
    struct ibv_pd *pd = v->alloc_pd(ctx);
    struct hrd_mr_memory memory = {0};
    struct hrd_mr mr = {0};
    struct hrd_mr_source src = {.addr = (void *)0x10000, .len = 4096, .gpu = true, .dmabuf_fd = 7};
    fake_verbs_fail(FAKE_REG_DMABUF, 0, ENOMEM, 1);
    fake_verbs_fail(FAKE_REG_MR, 0, EFAULT, 0);
    assert_int_equal(hrd_mr_register(v, pd, &memory, &src, 0, &mr, why, sizeof(why)), -EFAULT);
    assert_int_equal(hrd_mr_register(v, pd, &memory, &src, 0, &mr, why, sizeof(why)), 0);
    assert_int_equal(mr.way, HRD_MR_DMABUF);
    hrd_mr_free(v, &mr);
    src.dmabuf_fd = -1;
    unsigned calls = fake_verbs_calls(FAKE_REG_DMABUF);
    assert_int_equal(hrd_mr_register(v, pd, &memory, &src, 0, &mr, why, sizeof(why)), -EFAULT);
    assert_int_equal(fake_verbs_calls(FAKE_REG_DMABUF), calls);
    v->dealloc_pd(pd);
    v->close_device(ctx);
}

/* Whatever call fails, nothing is left of the connection and the sentence says what it was. */
static void test_all_or_nothing(void **state)
{
    (void)state;
    static const struct {
        enum fake_call call;
        const char *words;
    } row[] = {{FAKE_ALLOC_PD, "protection domain"}, {FAKE_CREATE_CHANNEL, "completion channel"},
               {FAKE_CREATE_CQ, "completion queue"}, {FAKE_REG_MR, "host memory cannot be registered"},
               {FAKE_CREATE_QP, "queue pair"},       {FAKE_MODIFY_QP, "queue pair"},
               {FAKE_POST_RECV, "receive buffer"}};
    static char arena[1 << 16];
    for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++)
        for (unsigned after = 0; after < 3; after++) {
            char why[400] = "";
            fake_verbs_plain();
            struct hrd_verbs_device dev = fake_verbs_device();
            fake_verbs_fail(row[i].call, after, ENOMEM, 0);
            struct hrd_verbs_conn *c =
                hrd_verbs_conn_new(&dev, 3, arena, sizeof(arena), 1, 1000, why, sizeof(why));
            bool once = row[i].call <= FAKE_CREATE_CQ && row[i].call != FAKE_REG_MR;
            bool made = (once && after > 0) || (row[i].call == FAKE_REG_MR && after > 1);
            assert_int_equal(c != NULL, made);
            if (c)
                hrd_verbs_conn_free(c);
            else if (!strstr(why, row[i].words) || !strstr(why, "Cannot allocate memory"))
                fail_msg("'%s' does not say '%s'", why, row[i].words);
            assert_int_equal(fake_verbs_objects(), 0);
        }
    /* A device that has no inline data is used without. */
    char why[400] = "";
    fake_verbs_plain();
    struct hrd_verbs_device dev = fake_verbs_device();
    fake_verbs_fail(FAKE_CREATE_QP, 0, EINVAL, 1);
    struct hrd_verbs_conn *c = hrd_verbs_conn_new(&dev, 3, arena, sizeof(arena), 1, 1000, why, sizeof(why));
    assert_non_null(c);
    hrd_verbs_conn_free(c);
}

/* What was configured reaches the queue pairs. */
static void test_attributes(void **state)
{
    (void)state;
    static char arena[2][1 << 16];
    char why[400] = "";
    fake_verbs_plain();
    struct hrd_verbs_device dev = fake_verbs_device();
    dev.sl = 3;
    dev.tc = 106;
    dev.mtu = IBV_MTU_4096;
    struct hrd_verbs_conn *a =
        hrd_verbs_conn_new(&dev, 2, arena[0], sizeof(arena[0]), 5, 1000, why, sizeof(why));
    dev.mtu = IBV_MTU_1024;
    struct hrd_verbs_conn *b =
        hrd_verbs_conn_new(&dev, 2, arena[1], sizeof(arena[1]), 5, 1000, why, sizeof(why));
    assert_true(a && b);
    assert_int_equal(hrd_verbs_conn_connect(a, &b->local, true, why, sizeof(why)), 0);
    struct ibv_qp_attr rtr = fake_verbs_last_rtr();
    assert_int_equal(rtr.ah_attr.sl, 3);
    assert_int_equal(rtr.ah_attr.grh.traffic_class, 106);
    assert_int_equal(rtr.ah_attr.grh.sgid_index, 3);
    assert_int_equal(rtr.path_mtu, IBV_MTU_1024); /* the smaller of the two */
    hrd_verbs_conn_free(a);
    hrd_verbs_conn_free(b);
}

/* The path is tried before it counts. */
static void test_probe(void **state)
{
    (void)state;
    static char arena[2][1 << 16];
    for (int kind = 0; kind < 3; kind++) {
        char why[400] = "";
        int r = 0;
        fake_verbs_plain();
        struct hrd_verbs_device dev = fake_verbs_device();
        struct hrd_verbs_conn *a =
            hrd_verbs_conn_new(&dev, 2, arena[0], sizeof(arena[0]), 5, 1000, why, sizeof(why));
        struct hrd_verbs_conn *b = hrd_verbs_conn_new(&dev, 2, arena[1], sizeof(arena[1]), kind == 1 ? 6 : 5,
                                                      1000, why, sizeof(why));
        assert_true(a && b);
        struct hrd_verbs_end wrong = a->local;
        wrong.ethernet = false;
        assert_int_equal(hrd_verbs_conn_connect(b, &wrong, false, why, sizeof(why)), -EPROTO);
        assert_non_null(strstr(why, "Ethernet here and InfiniBand at the peer"));
        assert_int_equal(hrd_verbs_conn_connect(b, &a->local, false, why, sizeof(why)), 0);
        if (kind == 0)
            fake_verbs_wc_error(IBV_WC_RETRY_EXC_ERR, 1);
        if (kind == 2)
            fake_verbs_hold(true);
        assert_int_equal(hrd_verbs_conn_connect(a, &b->local, true, why, sizeof(why)), 0);
        if (kind == 0)
            r = hrd_verbs_conn_probe(a, why, sizeof(why));
        else if (kind == 1)
            r = hrd_verbs_conn_probe(b, why, sizeof(why));
        static const char *const words[] = {"retry exceeded", "is not what the peer sent", ""};
        assert_true(kind == 2 ? r == 0 : r < 0);
        assert_true(kind == 2 || strstr(why, words[kind]));
        hrd_verbs_conn_free(a);
        hrd_verbs_conn_free(b);
        fake_verbs_hold(false);
    }
}

static int teardown(void **state)
{
    (void)state;
    fake_verbs_reset();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_device),      cmocka_unit_test(test_gid),
        cmocka_unit_test(test_address_match),  cmocka_unit_test(test_port_state),
        cmocka_unit_test(test_pkey),           cmocka_unit_test(test_knobs),
        cmocka_unit_test(test_gpu_memory),     cmocka_unit_test(test_gpu_memory_again),
        cmocka_unit_test(test_all_or_nothing), cmocka_unit_test(test_attributes),
        cmocka_unit_test(test_probe),
    };
    return cmocka_run_group_tests(tests, NULL, teardown);
}
