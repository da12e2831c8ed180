/* SPDX-License-Identifier: MIT */
/* Two daemons agree on a verbs link, or on none, with the same answer on both. */
#include "tests/unit/peer_nodes.h"

#include <errno.h>

static const struct hrd_link_want tcp = {.transport = HRD_WANT_TCP};

static void test_both_can(void **state)
{
    (void)state;
    begin();
    link_up(true);
    link_is("verbs", "");
    end();
}

static void test_queues(void **state)
{
    (void)state;
    begin();
    d[0].cfg.verbs_queue_pairs = 5;
    d[1].cfg.verbs_queue_pairs = 3;
    link_up(true);
    link_is("verbs", "");
    end();
    begin();
    d[0].cfg.verbs_queue_pairs = 1;
    d[1].cfg.verbs_queue_pairs = 8;
    link_up(true);
    link_is("verbs", "");
    end();
}

/* Who wants tcp gets it beside verbs, and only once. */
static void test_tcp_beside_verbs(void **state)
{
    (void)state;
    for (int first = 0; first < 2; first++) {
        const char *why;
        uint32_t link[3];
        begin();
        if (first)
            link_up(true);
        for (int i = 0; i < 20000 && !(ask(0, &tcp) == 1 && ask(1, &tcp) == 1); i++)
            turn();
        assert_true(first || fake_verbs_objects() == 0); /* not so much as tried */
        link_up(true);
        link_is("verbs", "");
        for (int i = 0; i < 2; i++) {
            assert_string_equal(hrd_peer_transport(&d[i], peer_of(i)->no, &tcp, &why), "tcp");
            assert_string_equal(why, "");
            assert_int_equal(hrd_peer_link(&d[i], peer_of(i)->no, &any, &link[0]), 1);
            assert_int_equal(hrd_peer_link(&d[i], peer_of(i)->no, &tcp, &link[1]), 1);
            assert_int_equal(hrd_peer_link(&d[i], peer_of(i)->no, &tcp, &link[2]), 1);
            assert_int_not_equal(link[0], link[1]);
            assert_int_equal(link[1], link[2]);
        }
        end();
    }
}

/* One end cannot or may not: tcp on both, for the same reason. */
static void test_one_cannot(void **state)
{
    (void)state;
    for (int who = 0; who < 2; who++) {
        begin();
        snprintf(d[who].cfg.verbs_device, sizeof(d[who].cfg.verbs_device), "mlx5_9");
        link_up(true);
        link_is("tcp", who ? "node n1: verbs_device = mlx5_9, but there is only fake0"
                           : "node n0: verbs_device = mlx5_9, but there is only fake0");
        end();
        begin();
        d[who].cfg.transport = 1;
        link_up(true);
        link_is("tcp", who ? "transport = tcp in hreduced.conf of node n1"
                           : "transport = tcp in hreduced.conf of node n0");
        end();
    }
}

static struct ibv_device **no_devices(int *n)
{
    static struct ibv_device *list[1];
    *n = 0;
    return list;
}

static void free_nothing(struct ibv_device **list)
{
    (void)list;
}

/* The device of a node is pulled out, or put in again. */
static void has_device(int i, bool yes)
{
    static struct hrd_verbs none;
    none = *fake_verbs();
    none.get_device_list = no_devices;
    none.free_device_list = free_nothing;
    d[i].verbs = yes ? fake_verbs() : &none;
}

/* What both ends hold of their link: there is no device, there was a choice. */
static void both_hold(bool none, bool half)
{
    for (int i = 0; i < 2; i++) {
        assert_int_equal(hrd_peer_no_device(&d[i], peer_of(i)->no, &any), none);
        assert_int_equal(hrd_peer_half_verbs(&d[i], peer_of(i)->no, &any), half);
        assert_false(hrd_peer_no_device(&d[i], peer_of(i)->no, &tcp));
    }
}

static void turns(unsigned ms)
{
    uint64_t end = uv_now(&loop) + ms;
    while (uv_now(&loop) < end)
        turn();
}

/* Nothing better than tcp was to be had where neither node has a device; where one has, both know it. */
static void test_no_device(void **state)
{
    (void)state;
    static const char neither[] = "neither node has an RDMA device (n0: no RDMA device in this network "
                                  "namespace (no driver loaded, or 'rdma system' mode exclusive?); n1: no ";
    for (int who = 0; who < 2; who++) {
        begin();
        has_device(who, false);
        link_up(true);
        link_is("tcp", who ? "node n1: no RDMA device in" : "node n0: no RDMA device in");
        both_hold(false, true);
        end();
        begin(); /* a device that was named should be there */
        has_device(0, false);
        has_device(1, false);
        snprintf(d[who].cfg.verbs_device, sizeof(d[who].cfg.verbs_device), "mlx5_0");
        link_up(true);
        link_is("tcp", "node n0: no RDMA device in");
        both_hold(false, false);
        end();
        begin(); /* the other says nothing of it */
        has_device(0, false);
        has_device(1, false);
        peer_of(who)->minor = HRP_PEER_MINOR_NONE - 1;
        link_up(true);
        link_is("tcp", "no RDMA device in");
        assert_false(hrd_peer_no_device(&d[!who], peer_of(!who)->no, &any));
        end();
        begin();
        has_device(0, false);
        has_device(1, false);
        link_up(true);
        link_is("tcp", neither);
        both_hold(true, false);
        has_device(who, true);
        class_of(0)->again_at = 1;
        link_is("tcp", who ? "node n0: no RDMA device in" : "node n1: no RDMA device in");
        both_hold(false, true);
        has_device(!who, true);
        class_of(0)->again_at = 1;
        for (int i = 0; i < 20000 && !(class_of(0)->up && class_of(1)->up); i++)
            turn();
        link_is("verbs", "");
        end();
    }
}

/* What settled on tcp is tried again, but never under a communicator that uses tcp on either end; the reason stays what it
   was. */
static void test_again(void **state)
{
    (void)state;
    for (int who = 0; who < 2; who++) {
        const char *words = who ? "node n1: verbs_device = mlx5_9" : "node n0: verbs_device = mlx5_9";
        uint32_t link[2];
        begin();
        snprintf(d[who].cfg.verbs_device, sizeof(d[who].cfg.verbs_device), "mlx5_9");
        link_up(true);
        for (int i = 0; i < 2; i++)
            assert_int_equal(hrd_peer_link(&d[i], peer_of(i)->no, &any, &link[i]), 1);
        assert_true(class_of(0)->again_at > 0 && class_of(1)->again_at == 0);
        class_of(0)->again_at = 1; /* the reason is still there */
        turns(600);
        link_is("tcp", words);
        snprintf(d[who].cfg.verbs_device, sizeof(d[who].cfg.verbs_device), "auto");
        for (int used = 0; used < 2; used++) {
            hrd_link_use(&d[used], link[used], 1);
            class_of(0)->again_at = 1;
            turns(600);
            link_is("tcp", words);
            assert_true(ask(0, &any) == 1 && ask(1, &any) == 1);
            hrd_link_use(&d[used], link[used], -1);
        }
        class_of(0)->again_at = 1;
        for (int i = 0; i < 20000 && !(class_of(0)->up && class_of(1)->up); i++)
            turn();
        link_is("verbs", "");
        assert_int_equal(class_of(0)->again_at, 0);
        end();
    }
}

/* Other devices on the two nodes: one decision on both, whatever each could do by itself. */
static void test_other_devices(void **state)
{
    (void)state;
    for (int who = 0; who < 2; who++) {
        struct fake_device second = {.name = "fake1", .open_err = EACCES, .nports = 1};
        begin();
        fake_verbs_add(&second);
        link_up(true); /* each takes the one that it can open */
        link_is("verbs", "");
        end();
        begin();
        fake_verbs_add(&second);
        snprintf(d[who].cfg.verbs_device, sizeof(d[who].cfg.verbs_device), "fake1");
        link_up(true);
        link_is("tcp", who ? "node n1: fake1 cannot be opened (Permission denied)"
                           : "node n0: fake1 cannot be opened (Permission denied)");
        end();
    }
}

/* Objects run out at any step of either end. */
static void test_resources(void **state)
{
    (void)state;
    for (unsigned after = 0; after < 4; after++) {
        begin();
        fake_verbs_fail(FAKE_CREATE_QP, after, ENOMEM, 0);
        link_up(true);
        link_is("tcp", "a queue pair cannot be made on fake0 (Cannot allocate memory)");
        end();
    }
    /* INIT twice on each end, then RTR and RTS. */
    for (unsigned after = 0; after < 12; after++) {
        begin();
        fake_verbs_fail(FAKE_MODIFY_QP, after, EINVAL, 1);
        link_up(true);
        link_is("tcp", "Invalid argument");
        end();
    }
}

static void test_path_does_not_work(void **state)
{
    (void)state;
    begin();
    fake_verbs_wc_error(IBV_WC_RETRY_EXC_ERR, 1);
    link_up(true);
    link_is("tcp", "retry exceeded");
    end();
    begin();
    fake_verbs_hold(true); /* nothing arrives, nothing fails */
    link_up(true);
    link_is("tcp", "did not get through within 5 s");
    end();
}

/* Required on one end: no link on either, in words, and another try works once the reason is gone. */
static void test_required(void **state)
{
    (void)state;
    for (int who = 0; who < 4; who++) {
        begin();
        if (who < 2)
            d[who].cfg.transport = 2;
        else
            d[who - 2].cfg.require = HRP_REQUIRE_VERBS;
        snprintf(d[who & 1 ? 0 : 1].cfg.verbs_device, 64, "mlx5_9");
        link_up(false);
        link_is("none", "there is only fake0");
        snprintf(d[who & 1 ? 0 : 1].cfg.verbs_device, 64, "auto");
        link_up(true);
        link_is("verbs", "");
        end();
    }
}

static void test_old_release(void **state)
{
    (void)state;
    begin();
    peer_of(0)->minor = peer_of(1)->minor = 0;
    link_up(true);
    link_is("tcp", "release without verbs");
    end();
}

/* The daemon ends in the middle of it: nothing is left. */
static void test_end_in_between(void **state)
{
    (void)state;
    for (int turns = 0; turns < 30; turns++) {
        begin();
        fake_verbs_hold(turns % 2);
        ask(0, &any);
        for (int i = 0; i < turns; i++)
            turn();
        end();
    }
}

/* Messages out of place cost the sender the connection. */
static void test_out_of_place(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        begin();
        struct hrp_peer_msg msg = {.type = HRP_PEER_VERBS_OFFER};
        msg.body.verbs = (struct hrp_peer_verbs){.nonce = 3, .status = HRP_UNSUPPORTED};
        if (kind == 1) { /* of no attempt: passed over */
            msg.type = HRP_PEER_VERBS_ANSWER;
            hrd_peer_send(&d[1], peer_of(1)->no, &msg);
            msg = (struct hrp_peer_msg){.type = HRP_PEER_VERBS_READY, .body.ready = {.nonce = 3}};
            hrd_peer_send(&d[1], peer_of(1)->no, &msg);
            link_up(true);
            link_is("verbs", "");
        } else { /* the wrong end offers */
            hrd_peer_send(&d[1], peer_of(1)->no, &msg);
            for (int i = 0; i < 20000 && (d[0].peers->peers || d[1].peers->peers); i++)
                turn();
            assert_null(d[0].peers->peers);
            assert_null(d[1].peers->peers);
        }
        end();
    }
}

/* The doctor asks for a link once: that there is none is its answer, not a reason to try for ten seconds. */
static void test_doctor_refused(void **state)
{
    (void)state;
    begin();
    d[0].cfg.transport = 2;
    fake_verbs_fail(FAKE_CREATE_QP, 0, ENOMEM, 0);
    unsigned before = fake_verbs_calls(FAKE_ALLOC_PD);
    struct hrp_peer_msg msg = {.type = HRP_PEER_ASK, .body.ask = {.token = 7, .what = HRP_DOCTOR_LINK}};
    hrd_peer_send(&d[1], peer_of(1)->no, &msg);
    for (int i = 0; i < 20000 && !class_of(0)->why[0]; i++)
        turn();
    assert_non_null(strstr(class_of(0)->why, "a queue pair cannot be made"));
    uint64_t end_ms = uv_now(&loop) + 300;
    while (uv_now(&loop) < end_ms)
        turn();
    assert_int_equal(fake_verbs_calls(FAKE_ALLOC_PD) - before, 1);
    hrd_doctor_stop(&d[0]);
    end();
}

/* ---- a path that fails ------------------------------------------------------------------------------------------- */

/* Either end notices first, or both at once, or what is needed is short for a while. */
static void test_mended(void **state)
{
    (void)state;
    begin();
    link_up(true);
    uint32_t id[2] = {verbs_of(0)->id, verbs_of(1)->id};
    unsigned objects = fake_verbs_objects();
    for (unsigned round = 0; round < 8; round++) {
        if (round % 4 != 2)
            hrd_agent_link_interrupt(d[round % 2].agent, id[round % 2], 0, "the path failed");
        /* An agent that has not taken the new path yet passes it over, as one of the old queue pairs. */
        for (int i = 0;
             i < 2000 && round % 4 == 2 && d[0].peers->interrupted + d[1].peers->interrupted == 2 * round;
             i++) {
            fake_verbs_event(IBV_EVENT_QP_FATAL, 1);
            turns(5);
        }
        if (round == 4)
            fake_verbs_fail(FAKE_CREATE_QP, 1, ENOMEM, 4);
        if (round == 5)
            fake_verbs_fail(FAKE_MODIFY_QP, 9, EINVAL, 2);
        wait_mended(round + 1);
        assert_int_equal(verbs_of(0)->id, id[0]);
        assert_int_equal(verbs_of(1)->id, id[1]);
        assert_int_equal(fake_verbs_objects(), objects);
    }
    end();
}

/* The port is down for a time that several attempts fall into. */
static void test_mended_later(void **state)
{
    (void)state;
    begin();
    link_up(true);
    fake_verbs_port(false);
    hrd_agent_link_interrupt(d[1].agent, verbs_of(1)->id, 0, "RETRY_EXC_ERR");
    for (int i = 0; i < 1200; i++)
        turn();
    assert_int_not_equal(verbs_of(0)->down_since, 0);
    assert_int_not_equal(verbs_of(1)->down_since, 0);
    assert_non_null(strstr(verbs_of(0)->down_why, "port 1 of fake0 went down; RETRY_EXC_ERR"));
    fake_verbs_port(true);
    wait_mended(1);
    end();
}

/* Whoever begins meanwhile waits for the new path; who has the link keeps it. */
static void test_begins_when_mended(void **state)
{
    (void)state;
    char why[1200];
    const char *text;
    begin();
    link_up(true);
    fake_verbs_port(false);
    hrd_agent_link_interrupt(d[0].agent, verbs_of(0)->id, 0, "RETRY_EXC_ERR");
    for (int i = 0; i < 20000 && !(verbs_of(0)->down_since && verbs_of(1)->down_since); i++)
        turn();
    for (int round = 0; round < 2; round++, turns(600)) /* before and after attempts that fail */
        for (int i = 0; i < 2; i++) {
            assert_int_equal(ask(i, &any), 0);
            assert_true(hrd_peer_mending(&d[i], peer_of(i)->no, &any, why, sizeof(why)));
            assert_non_null(strstr(why, "RETRY_EXC_ERR"));
            assert_false(hrd_peer_mending(&d[i], peer_of(i)->no, &tcp, why, sizeof(why)));
            assert_string_equal(hrd_peer_transport(&d[i], peer_of(i)->no, &any, &text), "verbs");
        }
    for (int i = 0; i < 20000 && !verbs_of(0)->why[0]; i++)
        turn();
    assert_true(hrd_peer_mending(&d[0], peer_of(0)->no, &any, why, sizeof(why)));
    text = strstr(why, "no new one yet: ");
    assert_non_null(text);
    assert_memory_equal(text + 16, verbs_of(0)->why, 40); /* what became of the last attempt */
    fake_verbs_port(true);
    wait_mended(1);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ask(i, &any), 1);
        assert_false(hrd_peer_mending(&d[i], peer_of(i)->no, &any, why, sizeof(why)));
    }
    end();
}

/* Down for longer than peer_timeout: lost on both, and nothing is left. Likewise at once when messages are missing. */
static void test_not_mended(void **state)
{
    (void)state;
    for (int how = 0; how < 2; how++) {
        begin();
        link_up(true);
        d[0].cfg.peer_timeout_ms = d[1].cfg.peer_timeout_ms = how ? 60000 : 1500;
        fake_verbs_port(how);
        hrd_agent_link_interrupt(d[0].agent, verbs_of(0)->id, 0, "RETRY_EXC_ERR");
        for (int i = 0; how && i < 20000 && !verbs_of(0)->lent; i++)
            turn();
        if (how)
            verbs_of(0)->lent->q[0].acked += 3;
        wait_lost();
        end();
    }
}

static void test_end_while_mending(void **state)
{
    (void)state;
    for (int turns = 0; turns < 24; turns++) {
        begin();
        link_up(true);
        fake_verbs_hold(turns % 2);
        hrd_agent_link_interrupt(d[turns / 2 % 2].agent, verbs_of(turns / 2 % 2)->id, 0, "the path failed");
        for (int i = 0; i < turns / 2; i++)
            turn();
        end();
    }
}

/* Words about paths that make no sense end the peer that says them. */
static void test_mend_out_of_place(void **state)
{
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        begin();
        link_up(true);
        struct hrp_peer_msg msg = {.type = HRP_PEER_VERBS_DOWN, .text = "x", .text_len = 1};
        int from = kind == 0 || kind == 2 ? 0 : 1;
        if (kind < 2) { /* by the dialer; of a link that is none */
            msg.body.ready =
                (struct hrp_peer_ready){.nonce = kind ? 77 : verbs_of(0)->nonce, .status = HRP_PEER_LOST};
        } else { /* for a link that is none; by the wrong end */
            msg.type = HRP_PEER_VERBS_OFFER;
            msg.body.verbs = (struct hrp_peer_verbs){.nonce = 3,
                                                     .link = kind == 2 ? 77 : verbs_of(0)->nonce,
                                                     .mtu = 5,
                                                     .queues = 1,
                                                     .depth = 1,
                                                     .msg_bytes = 1,
                                                     .qpn = {1}};
        }
        hrd_peer_send(&d[from], peer_of(from)->no, &msg);
        wait_lost();
        end();
    }
}

/* ---- classes ---------------------------------------------------------------------------------------------------- */

/* Until both ends have the link, or the dialer is refused; 0, or its number on that end. */
static bool get(const struct hrd_link_want *want, uint32_t link[2])
{
    struct plink *l = hrd_link_class(&d[0], peer_of(0), want->sl, want->tc);
    l->why[0] = '\0';
    for (int i = 0; i < 20000; i++) {
        if (hrd_peer_link(&d[0], peer_of(0)->no, want, &link[0]) == 1 &&
            hrd_peer_link(&d[1], peer_of(1)->no, want, &link[1]) == 1)
            return true;
        if (l->why[0])
            return false;
        turn();
    }
    fail_msg("no answer about the link of a class");
    return false;
}

static void use(const uint32_t link[2], int by)
{
    for (int i = 0; i < 2; i++)
        hrd_link_use(&d[i], link[i], by);
}

static void refused(const struct hrd_link_want *want, const char *words)
{
    uint32_t link[2];
    assert_false(get(want, link));
    const char *why = hrd_link_class(&d[0], peer_of(0), want->sl, want->tc)->why;
    if (!strstr(why, words))
        fail_msg("'%s' does not say '%s'", why, words);
}

/* Each class has queue pairs of its own, with its attributes on both ends, as many as verbs_classes says. */
static void test_classes(void **state)
{
    (void)state;
    static const struct hrd_link_want want[4] = {
        {.sl = 0}, {.sl = 3, .tc = 106}, {.sl = 3, .tc = 8}, {.sl = 15, .tc = 255}};
    uint32_t link[4][2], again[2];
    begin();
    for (int i = 0; i < 2; i++)
        d[i].cfg.verbs_classes = 3;
    for (int k = 0; k < 3; k++) {
        assert_true(get(&want[k], link[k]));
        assert_int_equal(fake_verbs_qps(want[k].sl, want[k].tc), 4); /* two on each end */
        assert_true(get(&want[k], again));
        assert_int_equal(again[0], link[k][0]);
        use(link[k], 1);
    }
    unsigned objects = fake_verbs_objects();
    assert_int_not_equal(link[0][0], link[1][0]);
    assert_int_not_equal(link[1][0], link[2][0]);
    refused(&want[3],
            "service level 15 with traffic class 255 would be one class more than verbs_classes = 3 of "
            "node n0 allows");
    hrd_link_use(&d[0], link[1][0], -1); /* but not on the other end */
    refused(&want[3], "verbs_classes = 3 of node n0");
    hrd_link_use(&d[1], link[1][1], -1);
    for (int i = 0; i < 4000; i++) { /* wanted again while it is on its way out */
        (void)hrd_peer_link(&d[0], peer_of(0)->no, &want[3], &again[0]);
        (void)hrd_peer_link(&d[0], peer_of(0)->no, &want[1], &again[0]);
        turn();
        assert_non_null(peer_of(0));
        assert_non_null(peer_of(1));
    }
    bool got = false;
    for (int i = 0; i < 40 && !got; i++) { /* it was just told that the other end uses it */
        got = get(&want[3], link[3]);
        for (int k = 0; k < 100; k++)
            turn();
    }
    assert_true(got);
    for (int i = 0; i < 20000 && fake_verbs_qps(3, 106) > 0;
         i++) /* the other end lets go of it in its own time */
        turn();
    assert_int_equal(fake_verbs_qps(3, 106), 0);
    assert_int_equal(fake_verbs_qps(15, 255), 4);
    assert_int_equal(fake_verbs_objects(), objects);
    assert_int_equal(d[0].peers->lost + d[1].peers->lost, 0);
    end();
    begin();
    d[1].cfg.verbs_classes = 1;
    assert_true(get(&want[0], link[0]));
    refused(&want[1], "verbs_classes = 1 of node n1");
    end();
}

/* A class keeps its attributes over a new path. */
static void test_mended_class(void **state)
{
    (void)state;
    static const struct hrd_link_want want = {.sl = 5, .tc = 32};
    uint32_t link[2];
    begin();
    assert_true(get(&want, link));
    hrd_agent_link_interrupt(d[0].agent, link[0], 0, "the path failed");
    for (int i = 0; i < 20000 && !(hrd_link_by_id(d[0].peers, link[0])->mended &&
                                   hrd_link_by_id(d[1].peers, link[1])->mended);
         i++)
        turn();
    for (int i = 0; i < 2; i++)
        assert_int_equal(hrd_link_by_id(d[i].peers, link[i])->mended, 1);
    assert_int_equal(fake_verbs_qps(5, 32), 4);
    end();
}

/* CLOSE of a link that is none, and an answer that nobody asked for. */
static void test_close_out_of_place(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        begin();
        link_up(true);
        struct hrp_peer_msg msg = {.type = HRP_PEER_VERBS_CLOSE};
        msg.body.ready.nonce = kind ? verbs_of(0)->nonce : 77;
        hrd_peer_send(&d[kind], peer_of(kind)->no, &msg);
        wait_lost();
        end();
    }
}

static int with_cm(void **state)
{
    (void)state;
    fake_cm_on(true);
    return 0;
}

int main(void)
{
    hrd_log_set_level(HRD_LOG_WARNING);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_can),
        cmocka_unit_test(test_queues),
        cmocka_unit_test(test_tcp_beside_verbs),
        cmocka_unit_test(test_one_cannot),
        cmocka_unit_test(test_resources),
        cmocka_unit_test(test_path_does_not_work),
        cmocka_unit_test(test_required),
        cmocka_unit_test(test_old_release),
        cmocka_unit_test(test_end_in_between),
        cmocka_unit_test(test_out_of_place),
        cmocka_unit_test(test_doctor_refused),
        cmocka_unit_test(test_mended),
        cmocka_unit_test(test_mended_later),
        cmocka_unit_test(test_begins_when_mended),
        cmocka_unit_test(test_classes),
        cmocka_unit_test(test_mended_class),
        cmocka_unit_test(test_close_out_of_place),
        cmocka_unit_test(test_other_devices),
        cmocka_unit_test(test_not_mended),
        cmocka_unit_test(test_end_while_mending),
        cmocka_unit_test(test_mend_out_of_place),
        cmocka_unit_test(test_again),
        cmocka_unit_test(test_no_device),
    };
    /* What holds whichever way the queue pairs are connected. */
    const struct CMUnitTest by_cm[] = {
        cmocka_unit_test(test_both_can),       cmocka_unit_test(test_queues),
        cmocka_unit_test(test_one_cannot),     cmocka_unit_test(test_other_devices),
        cmocka_unit_test(test_end_in_between), cmocka_unit_test(test_mended),
        cmocka_unit_test(test_mended_class),   cmocka_unit_test(test_end_while_mending),
    };
    int failed = cmocka_run_group_tests_name("exchange", tests, NULL, NULL);
    return failed + cmocka_run_group_tests_name("RDMA-CM", by_cm, with_cm, NULL);
}
