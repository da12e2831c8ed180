/* SPDX-License-Identifier: MIT */
/* Queue pairs of two daemons connected by RDMA-CM, or for a reason in words by exchange; and who is let in. */
#include "tests/unit/peer_nodes.h"

#include <errno.h>

static void begin_cm(void)
{
    fake_cm_on(true);
    begin();
}

/* Which of the two it was, on both ends, and why (words; "": no reason). */
static void connected_by(const char *setup, const char *words)
{
    const char *why;
    link_is("verbs", "");
    for (int i = 0; i < 2; i++) {
        const char *is = hrd_peer_setup(&d[i], peer_of(i)->no, &any, &why);
        assert_non_null(is);
        if (strcmp(is, setup) != 0 || (words[0] ? !strstr(why, words) : why[0]))
            fail_msg("node %d: connected by %s, '%s'", i, is, why);
    }
}

/* Every queue pair by a connection of its own; they are kept as long as the link, and nothing else of the set-up is. */
static void test_connects(void **state)
{
    (void)state;
    begin_cm();
    link_up(true);
    connected_by("RDMA-CM", "");
    assert_int_equal(fake_cm_connected(), 4);
    assert_int_equal(fake_cm_objects(), 4 + 2 + 1); /* two channels, one listener */
    struct ibv_qp_attr rtr = fake_verbs_last_rtr();
    assert_int_equal(rtr.ah_attr.grh.sgid_index, 3);
    assert_true(rtr.rq_psn > 0x1000 && rtr.rq_psn < 0x2000); /* RDMA-CM's, not the offer's */
    end();
}

/* What the path's record says is used, and what the configuration names is kept. */
static void test_path_record(void **state)
{
    (void)state;
    static const struct hrd_link_want want = {.sl = 5, .tc = 32};
    begin_cm();
    fake_cm_path(2, IBV_MTU_1024, 0);
    link_up(true);
    struct ibv_qp_attr rtr = fake_verbs_last_rtr();
    assert_int_equal(rtr.path_mtu, IBV_MTU_1024);
    assert_int_equal(rtr.ah_attr.sl, 2);
    uint32_t link[2] = {0};
    for (int i = 0; i < 20000 && !(hrd_peer_link(&d[0], peer_of(0)->no, &want, &link[0]) == 1 &&
                                   hrd_peer_link(&d[1], peer_of(1)->no, &want, &link[1]) == 1);
         i++)
        turn();
    assert_int_equal(fake_verbs_qps(5, 32), 4);
    end();
    begin_cm(); /* a smaller one of a node's own */
    d[1].cfg.verbs_mtu = 512;
    link_up(true);
    assert_int_equal(fake_verbs_last_rtr().path_mtu, IBV_MTU_512);
    connected_by("RDMA-CM", "");
    end();
    begin_cm(); /* another entry of the GID table: taken, unless one was named */
    fake_cm_gid_index(1);
    link_up(true);
    connected_by("RDMA-CM", "");
    assert_int_equal(fake_verbs_last_rtr().ah_attr.grh.sgid_index, 1);
    fake_verbs_event(IBV_EVENT_GID_CHANGE, 1); /* of some other entry */
    for (int i = 0; i < 200; i++)
        turn();
    assert_int_equal(d[0].peers->interrupted + d[1].peers->interrupted, 0);
    connected_by("RDMA-CM", "");
    end();
    begin_cm();
    fake_cm_gid_index(7);
    link_up(true);
    connected_by("exchange", "RDMA-CM uses GID 7 of fake0, which cannot be read (");
    end();
    begin_cm();
    fake_cm_gid_index(1);
    d[0].cfg.verbs_gid_index = 3;
    link_up(true);
    connected_by("exchange",
                 "node n0: the answer of 10.0.0.1 by RDMA-CM is of no use: RDMA-CM uses GID 1 of fake0");
    end();
}

/* InfiniBand: by the address of an IPoIB interface; without one, by exchange. */
static void test_infiniband(void **state)
{
    (void)state;
    struct fake_device dev = {.name = "ib0", .nports = 2};
    for (unsigned p = 0; p < 2; p++) {
        dev.port[p].attr = (struct ibv_port_attr){.state = p ? IBV_PORT_ACTIVE : IBV_PORT_DOWN,
                                                  .max_mtu = IBV_MTU_4096,
                                                  .active_mtu = IBV_MTU_4096,
                                                  .lid = 7,
                                                  .link_layer = IBV_LINK_LAYER_INFINIBAND};
        dev.port[p].pkey[0] = 0xffff;
        dev.port[p].pkey[1] = 0x8001;
    }
    for (int how = 0; how < 5; how++) {
        begin_cm();
        fake_verbs_add(&dev);
        for (int i = 0; i < 2; i++)
            snprintf(d[i].cfg.verbs_device, sizeof(d[i].cfg.verbs_device), "ib0");
        if (how > 0)
            fake_cm_address("127.0.0.1", "ib0", how == 1 ? 1 : 2);
        if (how >= 3) /* the interface is of another partition than the default one */
            fake_cm_path(0, IBV_MTU_2048, 1);
        d[1].cfg.verbs_pkey = how == 4 ? 0xffff : d[1].cfg.verbs_pkey;
        link_up(true);
        if (how < 2) {
            connected_by(
                "exchange",
                "RDMA-CM needs an IP address of port 2 of ib0, and this node has none: give its IPoIB");
        } else if (how < 4) {
            connected_by("RDMA-CM", "");
            assert_int_equal(fake_verbs_last_rtr().pkey_index, how == 3);
            assert_int_equal(fake_verbs_last_rtr().ah_attr.dlid, 7);
        } else {
            connected_by("exchange", "RDMA-CM uses partition 0x8001 of ib0, and verbs_pkey names another");
        }
        end();
    }
}

/* One of the two cannot or will not: exchange on both, for the same reason. */
static void test_one_cannot(void **state)
{
    (void)state;
    for (int who = 0; who < 2; who++) {
        begin_cm();
        d[who].cfg.verbs_setup = HRD_SETUP_EXCHANGE;
        link_up(true);
        connected_by("exchange", who ? "node n1: verbs_setup = exchange in hreduced.conf"
                                     : "node n0: verbs_setup = exchange in hreduced.conf");
        assert_int_equal(fake_cm_connected(), 0);
        end();
        begin_cm();
        peer_of(who)->minor = HRP_PEER_MINOR_RDMACM - 1;
        link_up(true);
        connected_by("exchange", "the peer runs a release without RDMA-CM");
        end();
        begin_cm();
        fake_cm_fail(FAKE_CM_CHANNEL, (unsigned)who, ENODEV, 1);
        link_up(true);
        connected_by("exchange",
                     who ? "node n1: RDMA-CM cannot be used (No such device): load the module rdma_ucm"
                         : "node n0: RDMA-CM cannot be used (No such device): load the module rdma_ucm");
        end();
    }
    fake_cm_on(false);
    begin();
    link_up(true);
    connected_by("exchange", "node n0: librdmacm.so.1 cannot be loaded");
    end();
}

/* Each call fails at each end, and each answer is the wrong one: auto goes on with exchange and keeps the reason. */
static void test_falls_back(void **state)
{
    (void)state;
    static const struct {
        enum fake_cm_call call;
        unsigned after;
        const char *words;
    } calls[] = {
        {FAKE_CM_CREATE, 0, "RDMA-CM does not take the address 10.0.0.1: it cannot be bound"},
        {FAKE_CM_CREATE, 3, "RDMA-CM gives no id"},
        {FAKE_CM_BIND, 0, "RDMA-CM does not take the address 10.0.0.1: it cannot be bound"},
        {FAKE_CM_BIND, 2, "node n1: RDMA-CM cannot listen at 10.0.0.1"},
        {FAKE_CM_LISTEN, 0, "node n1: RDMA-CM cannot listen at 10.0.0.1: Cannot allocate"},
        {FAKE_CM_TOS, 1, "RDMA-CM cannot look for 10.0.0.1"},
        {FAKE_CM_ADDR, 1, "RDMA-CM cannot look for 10.0.0.1"},
        {FAKE_CM_ROUTE, 1, "RDMA-CM cannot look for a route to 10.0.0.1"},
        {FAKE_CM_CONNECT, 1, "RDMA-CM cannot ask 10.0.0.1"},
        {FAKE_CM_ACCEPT, 1, "rejected the request by RDMA-CM (reason 28): the request cannot be accepted"},
        {FAKE_CM_ATTR, 1, "rejected the request by RDMA-CM (reason 28): RDMA-CM does not say how"},
        {FAKE_CM_ATTR, 7, "RDMA-CM does not say how to connect a queue pair"},
        {FAKE_CM_ESTABLISH, 1, "the connection cannot be confirmed"},
    };
    static const struct {
        enum fake_cm_call call;
        enum rdma_cm_event_type type;
        int status;
        const char *words;
    } answers[] = {
        {FAKE_CM_ADDR, RDMA_CM_EVENT_ADDR_ERROR, -ENODEV,
         "RDMA-CM cannot resolve 10.0.0.1 from 10.0.0.1 (No such"},
        {FAKE_CM_ADDR, RDMA_CM_EVENT_ADDR_ERROR, -ETIMEDOUT, "does ARP get through?"},
        {FAKE_CM_ADDR, RDMA_CM_EVENT_DEVICE_REMOVAL, 0, "DEVICE_REMOVAL for 10.0.0.1 of port 1 of fake0"},
        {FAKE_CM_ROUTE, RDMA_CM_EVENT_ROUTE_ERROR, -EINVAL, "RDMA-CM has no route to 10.0.0.1 (Invalid"},
        {FAKE_CM_CONNECT, RDMA_CM_EVENT_REJECTED, 8, "(reason 8): nobody listens there"},
        {FAKE_CM_CONNECT, RDMA_CM_EVENT_REJECTED, 10, "(reason 10): the other end still counts an older"},
        {FAKE_CM_CONNECT, RDMA_CM_EVENT_REJECTED, 28, "(reason 28): the other end's program said no"},
        {FAKE_CM_CONNECT, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT,
         "did not answer the request by RDMA-CM (UNREACHABLE"},
        {FAKE_CM_CONNECT, RDMA_CM_EVENT_CONNECT_ERROR, -EINVAL, "(CONNECT_ERROR, Invalid argument)"},
        {FAKE_CM_CONNECT, RDMA_CM_EVENT_DISCONNECTED, 0, "took back the connection"},
        {FAKE_CM_CONNECT, RDMA_CM_EVENT_ADDR_CHANGE, 0, "ADDR_CHANGE"},
    };
    for (unsigned i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        begin_cm();
        fake_cm_fail(calls[i].call, calls[i].after, ENOMEM, 1);
        link_up(true);
        connected_by("exchange", calls[i].words);
        end();
    }
    for (unsigned i = 0; i < sizeof(answers) / sizeof(answers[0]); i++) {
        begin_cm();
        fake_cm_answer(answers[i].call, answers[i].type, answers[i].status, 1);
        link_up(true);
        connected_by("exchange", answers[i].words);
        assert_int_equal(fake_cm_connected(), 0);
        end();
    }
}

/* What happened, or what is waited for, is told where the time of an attempt is over. */
static void test_too_late(void **state)
{
    (void)state;
    begin_cm(); /* the connection goes while the test messages are under way */
    fake_verbs_hold(true);
    ask(0, &any);
    for (int i = 0; i < 20000 && !(class_of(0)->verbs && class_of(0)->verbs->probing); i++)
        turn();
    fake_cm_raise(RDMA_CM_EVENT_DISCONNECTED, 0);
    for (int k = 0; k < 20; k++)
        turn();
    class_of(0)->verbs->deadline = 0;
    link_up(true);
    link_is("tcp", "took back the connection that RDMA-CM had made");
    fake_verbs_hold(false);
    end();
    begin_cm(); /* the dialer is at its first step */
    fake_cm_answer(FAKE_CM_ADDR, FAKE_CM_SILENCE, 0, 2);
    ask(0, &any);
    for (int i = 0; i < 20000 && !(class_of(1)->verbs && class_of(1)->verbs->cm); i++)
        turn();
    class_of(1)->verbs->deadline = 0;
    link_up(true);
    link_is("tcp", "no request by RDMA-CM came within 8 s");
    end();
}

/* verbs_setup = rdmacm takes nothing else: no verbs link, in words, on both. */
static void test_insists(void **state)
{
    (void)state;
    for (int who = 0; who < 2; who++) {
        begin_cm();
        d[who].cfg.verbs_setup = HRD_SETUP_RDMACM;
        link_up(true);
        connected_by("RDMA-CM", "");
        end();
        begin_cm();
        d[who].cfg.verbs_setup = HRD_SETUP_RDMACM;
        d[!who].cfg.verbs_setup = HRD_SETUP_EXCHANGE;
        link_up(true);
        link_is("tcp",
                who ? "node n1: verbs_setup = rdmacm, but node n0: verbs_setup = exchange in hreduced.conf"
                    : "node n0: verbs_setup = rdmacm, but node n1: verbs_setup = exchange in hreduced.conf");
        end();
        begin_cm();
        d[who].cfg.verbs_setup = HRD_SETUP_RDMACM;
        fake_cm_fail(FAKE_CM_CHANNEL, (unsigned)who, ENODEV, 0);
        link_up(true);
        link_is("tcp", who ? "node n1: verbs_setup = rdmacm, but node n1: RDMA-CM cannot be used"
                           : "node n0: verbs_setup = rdmacm, but node n0: RDMA-CM cannot be used");
        end();
        begin_cm();
        d[who].cfg.verbs_setup = HRD_SETUP_RDMACM;
        fake_cm_answer(FAKE_CM_ROUTE, RDMA_CM_EVENT_ROUTE_ERROR, -EINVAL, 1);
        link_up(true);
        link_is("tcp", "RDMA-CM has no route to 10.0.0.1");
        end();
    }
}

/* Requests that no control connection knows of are rejected in words and counted, and harm nobody. */
static void test_stranger(void **state)
{
    (void)state;
    struct hrp_cm_request r = {.magic = HRP_CM_MAGIC, .version = HRP_CM_VERSION, .nonce = 77};
    begin_cm();
    link_up(true);
    static const char not_ours[] = "the request is not one of its own", nobody[] = "nobody asked for this";
    const struct {
        const void *data;
        unsigned len;
        const char *words;
    } tries[] = {{"", 0, not_ours}, {"GET / HTTP/1.0", 14, not_ours}, {&r, sizeof(r), nobody}};
    for (unsigned i = 0; i < 3; i++) {
        fake_cm_stranger(tries[i].data, tries[i].len, 0x4711);
        for (int k = 0; k < 20; k++)
            turn();
        if (!strstr(fake_cm_stranger_heard(), tries[i].words))
            fail_msg("'%s' does not say '%s'", fake_cm_stranger_heard(), tries[i].words);
        assert_int_equal(hrd_setup_rejected(d[1].peers), i + 1);
    }
    r.nonce = verbs_of(0)->nonce; /* of a link that is up already */
    fake_cm_stranger(&r, sizeof(r), 0x4711);
    for (int k = 0; k < 20; k++)
        turn();
    assert_non_null(strstr(fake_cm_stranger_heard(), nobody));
    connected_by("RDMA-CM", "");
    assert_int_equal(fake_cm_connected(), 4);
    end();
}

/* One that heard the nonce of a set-up under way: its queue pair is not the one that was named. The peer's own request gets
   no answer meanwhile, until its time is over. */
static void test_stranger_with_nonce(void **state)
{
    (void)state;
    begin_cm();
    fake_cm_answer(FAKE_CM_CONNECT, FAKE_CM_SILENCE, 0, 2);
    ask(0, &any);
    for (int i = 0; i < 20000 && !(class_of(1)->verbs && class_of(1)->verbs->cm); i++)
        turn();
    struct hrp_cm_request r = {
        .magic = HRP_CM_MAGIC, .version = HRP_CM_VERSION, .nonce = class_of(1)->verbs->nonce};
    for (unsigned queue = 0; queue < 3; queue++) {
        r.queue = (uint8_t)queue;
        fake_cm_stranger(&r, sizeof(r), 0x4711);
        for (int k = 0; k < 20; k++)
            turn();
        assert_non_null(strstr(fake_cm_stranger_heard(),
                               queue < 2 ? "is not the one that the peer named" : "nobody asked for this"));
    }
    r.nonce ^= 2; /* the right queue pair of some other attempt */
    r.queue = 0;
    fake_cm_stranger(&r, sizeof(r), class_of(0)->verbs->conn->local.qpn[0]);
    for (int k = 0; k < 20; k++)
        turn();
    assert_non_null(strstr(fake_cm_stranger_heard(), "nobody asked for this"));
    link_up(true);
    connected_by("exchange", "the peer did not answer the request by RDMA-CM");
    end();
}

/* Events of ids that are gone, and of the other end's leaving, are no reason to do anything. */
static void test_idle_events(void **state)
{
    (void)state;
    begin_cm();
    link_up(true);
    for (enum rdma_cm_event_type t = RDMA_CM_EVENT_ADDR_RESOLVED; t <= RDMA_CM_EVENT_TIMEWAIT_EXIT; t++)
        if (t != RDMA_CM_EVENT_CONNECT_REQUEST)
            fake_cm_raise_dead(t);
    fake_cm_raise(RDMA_CM_EVENT_ESTABLISHED, 0);
    fake_cm_raise(RDMA_CM_EVENT_DISCONNECTED, 0);
    for (int i = 0; i < 200; i++)
        turn();
    connected_by("RDMA-CM", "");
    assert_int_equal(d[0].peers->interrupted + d[1].peers->interrupted, 0);
    assert_int_equal(fake_cm_connected(), 0);
    end();
}

/* The device goes away or the address moves: ids are let go of, and the path is made anew. */
static void test_news(void **state)
{
    (void)state;
    static const struct {
        enum rdma_cm_event_type type;
        const char *words;
    } news[] = {{RDMA_CM_EVENT_DEVICE_REMOVAL, "is being removed"},
                {RDMA_CM_EVENT_ADDR_CHANGE, "moved to other hardware"}};
    for (unsigned i = 0; i < 2; i++) {
        begin_cm();
        link_up(true);
        fake_cm_raise(news[i].type, 0);
        if (i == 0)
            fake_cm_raise_listeners(news[i].type);
        for (int k = 0; k < 20000 && !(verbs_of(0)->down_since && verbs_of(1)->down_since); k++)
            turn();
        assert_non_null(strstr(verbs_of(0)->down_why, news[i].words));
        wait_mended(1);
        connected_by("RDMA-CM", "");
        assert_int_equal(fake_cm_connected(), 4);
        end();
    }
}

/* A path that RDMA-CM cannot make anew is made by exchange after some attempts, and the next one by RDMA-CM again. */
static void test_mended_by_exchange(void **state)
{
    (void)state;
    begin_cm();
    link_up(true);
    fake_cm_answer(FAKE_CM_ADDR, RDMA_CM_EVENT_ADDR_ERROR, -EINVAL, 100);
    hrd_agent_link_interrupt(d[1].agent, verbs_of(1)->id, 0, "the path failed");
    wait_mended(1);
    const char *why;
    assert_string_equal(hrd_peer_setup(&d[0], peer_of(0)->no, &any, &why), "exchange");
    assert_non_null(strstr(why, "node n0: RDMA-CM cannot resolve 10.0.0.1"));
    assert_string_equal(hrd_peer_setup(&d[1], peer_of(1)->no, &any, &why), "exchange");
    assert_non_null(strstr(why, "node n0: it asked for exchange this time"));
    fake_cm_answer(FAKE_CM_ADDR, RDMA_CM_EVENT_ADDR_ERROR, 0, 0);
    hrd_agent_link_interrupt(d[0].agent, verbs_of(0)->id, 0, "the path failed");
    wait_mended(2);
    connected_by("RDMA-CM", "");
    end();
}

/* While there is no path nothing is sent over it: the old connections end when the new ones are there. */
static void test_quiet_while_down(void **state)
{
    (void)state;
    begin_cm();
    d[0].cfg.verbs_setup = HRD_SETUP_RDMACM;
    link_up(true);
    fake_cm_answer(FAKE_CM_ADDR, RDMA_CM_EVENT_ADDR_ERROR, -EINVAL, 1000);
    hrd_agent_link_interrupt(d[1].agent, verbs_of(1)->id, 0, "the path failed");
    for (int i = 0; i < 20000 && fake_cm_calls(FAKE_CM_ADDR) < 6; i++) {
        turn();
        assert_int_equal(fake_cm_connected(), 4);
    }
    assert_true(fake_cm_calls(FAKE_CM_ADDR) >= 6);
    fake_cm_answer(FAKE_CM_ADDR, RDMA_CM_EVENT_ADDR_ERROR, 0, 0);
    wait_mended(1);
    connected_by("RDMA-CM", "");
    for (int i = 0; i < 20; i++)
        turn();
    assert_int_equal(fake_cm_connected(), 4);
    end();
}

/* LISTEN out of place costs its sender the connection; of an attempt that is over it means nothing. */
static void test_listen_out_of_place(void **state)
{
    (void)state;
    struct hrp_peer_msg msg = {
        .type = HRP_PEER_VERBS_LISTEN,
        .body.listen = {.nonce = 77, .addr = {.family = 4, .port = 1, .ip = {10, 0, 0, 9}}}};
    begin_cm();
    hrd_peer_send(&d[1], peer_of(1)->no, &msg);
    link_up(true);
    connected_by("RDMA-CM", "");
    end();
    begin_cm();
    fake_cm_answer(FAKE_CM_CONNECT, FAKE_CM_SILENCE, 0, 2);
    ask(0, &any);
    for (int i = 0; i < 20000 && !(class_of(0)->verbs && class_of(0)->verbs->cm); i++)
        turn();
    msg.body.listen.nonce = class_of(0)->verbs->nonce;
    hrd_peer_send(&d[1], peer_of(1)->no, &msg);
    wait_lost();
    end();
}

int main(void)
{
    hrd_log_set_level(HRD_LOG_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_connects),
        cmocka_unit_test(test_path_record),
        cmocka_unit_test(test_infiniband),
        cmocka_unit_test(test_one_cannot),
        cmocka_unit_test(test_falls_back),
        cmocka_unit_test(test_too_late),
        cmocka_unit_test(test_insists),
        cmocka_unit_test(test_stranger),
        cmocka_unit_test(test_stranger_with_nonce),
        cmocka_unit_test(test_idle_events),
        cmocka_unit_test(test_news),
        cmocka_unit_test(test_mended_by_exchange),
        cmocka_unit_test(test_quiet_while_down),
        cmocka_unit_test(test_listen_out_of_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
