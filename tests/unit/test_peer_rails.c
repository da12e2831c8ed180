/* SPDX-License-Identifier: MIT */
/* Two daemons agree on a link over several NICs: the same rails on both, each that is left out with the same reason. */
#include "tests/unit/peer_nodes.h"

#include <errno.h>
#include <jansson.h>

/* For a peer: no machine is so slow that one is lost whose path is away for a moment. */
#define PATIENCE_MS 60000

/* Four devices; which of them the two nodes name. */
static void begin_rails(const char *n0, const char *n1)
{
    begin();
    fake_verbs_rails(4, NULL);
    d[0].cfg.peer_timeout_ms = d[1].cfg.peer_timeout_ms = PATIENCE_MS;
    snprintf(d[0].cfg.verbs_device, sizeof(d[0].cfg.verbs_device), "%s", n0);
    snprintf(d[1].cfg.verbs_device, sizeof(d[1].cfg.verbs_device), "%s", n1);
}

static struct plink *rail_of(int i, unsigned rail)
{
    return class_of(i)->rails[rail];
}

/* Both ends have the rails of this mask, as the same numbers for their agents, and say of each other why not. */
static void rails_are(unsigned n, unsigned mask, const char *words)
{
    for (int i = 0; i < 2; i++) {
        const struct plink *l = class_of(i);
        unsigned index = 0;
        assert_true(l->up);
        assert_int_equal(l->nrails, n);
        for (unsigned r = 0; r < n; r++) {
            const struct plink *k = l->rails[r];
            assert_true(k->over && !k->made && !k->verbs);
            if (k->in != (mask >> r & 1))
                fail_msg("node %d, rail %u: %s", i, r, k->in ? "is in" : k->out_why);
            if (k->in)
                assert_int_equal(k->index, index++);
            else if (!strstr(k->out_why, words))
                fail_msg("node %d, rail %u: '%s' does not say '%s'", i, r, k->out_why, words);
        }
        for (unsigned r = 0; r < n; r++)
            if (l->rails[r]->in)
                assert_int_equal(l->rails[r]->queues, rail_of(!i, r)->queues);
    }
    link_is("verbs", "");
}

/* Whether the dialer, which nobody makes use the link any more, would close it for the sake of a rail that it lacks. */
static void would_close(bool expected)
{
    class_of(0)->idle_since = 1;
    assert_int_equal(hrd_rails_incomplete(&d[0], class_of(0)), expected);
    class_of(0)->idle_since = 0;
}

static void test_all(void **state)
{
    (void)state;
    static const char *const names[] = {"fake0,fake1", "fake0:1,fake2:1,fake3:1", "fake3,fake2,fake1,fake0"};
    for (unsigned i = 0; i < 3; i++) {
        begin_rails(names[i], names[2 - i]);
        d[1].cfg.verbs_queue_pairs = 3;
        unsigned n = hrd_verbs_rails(&d[0].cfg), other = hrd_verbs_rails(&d[1].cfg);
        unsigned least = n < other ? n : other, most = n < other ? other : n;
        link_up(true);
        rails_are(most, (1u << least) - 1, "names");
        would_close(false);
        end();
    }
}

/* What a rail cannot be for: the list is shorter, the port is down, the device cannot be opened, no RoCE address. */
static void test_left_out(void **state)
{
    (void)state;
    for (int who = 0; who < 2; who++) {
        const char *own = who ? "fake0,fake1" : "fake2,fake3", *other = who ? "fake2,fake3" : "fake0,fake1";
        char words[64];
        begin_rails(who ? own : "fake2", who ? "fake2" : own);
        link_up(true);
        snprintf(words, sizeof(words), "of node n%d names 1 device", who);
        rails_are(2, 1, words);
        would_close(false); /* the list stays as short */
        end();
        for (unsigned rail = 0; rail < 2; rail++) { /* of node `who`, whose devices are fake2 and fake3 */
            for (int how = 0; how < 2; how++) {
                begin_rails(own, other);
                if (how)
                    fake_verbs_device_gone(2 + rail, true);
                else
                    fake_verbs_device_port(2 + rail, false);
                link_up(true);
                snprintf(words, sizeof(words), "node n%d: %s", who ? 1 : 0,
                         how    ? rail ? "fake3 cannot be opened" : "fake2 cannot be opened"
                         : rail ? "port 1 of fake3 is DOWN"
                                : "port 1 of fake2 is DOWN");
                rails_are(2, rail ? 1 : 2, words);
                would_close(true);
                end();
            }
        }
    }
}

/* Its ports are up, but nothing gets through. */
static void test_no_way(void **state)
{
    (void)state;
    for (unsigned rail = 0; rail < 2; rail++) {
        begin_rails("fake0,fake1", "fake0,fake1");
        fake_verbs_device_silent(rail, true);
        link_up(true);
        rails_are(2, rail ? 1 : 2,
                  rail ? "RETRY_EXC_ERR (status 12, vendor 0x81) on queue pair 0 of fake1"
                       : "RETRY_EXC_ERR (status 12, vendor 0x81) on queue pair 0 of fake0");
        end();
    }
}

/* None: tcp, with the reason of each; and again when they can be had. */
static void test_none(void **state)
{
    (void)state;
    begin_rails("fake0,fake1", "fake2,fake3");
    fake_verbs_device_port(0, false);
    fake_verbs_device_port(3, false);
    link_up(true);
    link_is("tcp", "rail 0: node n0: port 1 of fake0 is DOWN");
    link_is("tcp", "rail 1: node n1: port 1 of fake3 is DOWN");
    fake_verbs_device_port(3, true);
    class_of(0)->again_at = 1;
    for (int i = 0; i < 20000 && !(class_of(0)->up && class_of(1)->up); i++)
        turn();
    rails_are(2, 2, "port 1 of fake0 is DOWN");
    end();
}

/* The other runs a release that knows of no rails. */
static void test_old_peer(void **state)
{
    (void)state;
    for (int who = 0; who < 2; who++) {
        begin_rails("fake0,fake1", "fake2,fake3");
        if (who) { /* the dialer: one OFFER without a word about rails */
            snprintf(d[0].cfg.verbs_device, sizeof(d[0].cfg.verbs_device), "fake0");
            peer_of(1)->minor = HRP_PEER_MINOR_RAILS - 1;
        } else {
            snprintf(d[1].cfg.verbs_device, sizeof(d[1].cfg.verbs_device), "fake2");
            peer_of(0)->minor = HRP_PEER_MINOR_RAILS - 1;
        }
        link_up(true);
        const struct plink *l = class_of(who);
        assert_int_equal(l->nrails, 2);
        assert_true(rail_of(who, 0)->in && !rail_of(who, 1)->in);
        assert_non_null(strstr(rail_of(who, 1)->out_why, "runs a release that uses one device"));
        assert_int_equal(class_of(!who)->nrails, 1);
        would_close(false);
        link_is("verbs", "");
        end();
    }
}

static void wait_rail_mended(unsigned rail, unsigned times)
{
    for (int i = 0; i < 20000 && !(rail_of(0, rail)->mended == times && rail_of(1, rail)->mended == times);
         i++) {
        turn();
        if (!peer_of(0) || !peer_of(1))
            fail_msg("a peer was lost");
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(rail_of(i, rail)->mended, times);
        assert_true(!rail_of(i, rail)->lent && !rail_of(i, rail)->down_since);
    }
}

/* Whether the rail's path is away on both nodes, and both were told why. */
static bool away(unsigned rail, const char *word)
{
    bool told = true;
    for (int i = 0; i < 2; i++) {
        if (!peer_of(0) || !peer_of(1))
            fail_msg("a peer was lost");
        json_t *rails = hrd_link_rails_json(&d[i], class_of(i)->id, NULL);
        const json_t *r = json_array_get(rails, rail);
        const char *state = json_string_value(json_object_get(r, "state"));
        const char *reason = json_string_value(json_object_get(r, "reason"));
        told = told && state && strcmp(state, "interrupted") == 0 && reason && strstr(reason, word);
        json_decref(rails);
    }
    return told;
}

/* The path of one is made anew; the others keep theirs. */
static void test_mended(void **state)
{
    (void)state;
    begin_rails("fake0,fake1,fake2", "fake0,fake1,fake2");
    link_up(true);
    for (unsigned round = 0; round < 6; round++) {
        unsigned rail = round % 3;
        hrd_agent_link_interrupt(d[round / 3].agent, class_of((int)(round / 3))->id, rail, "the path failed");
        wait_rail_mended(rail, 1 + round / 3);
        for (unsigned other = 0; other < 3; other++)
            assert_int_equal(rail_of(0, other)->mended, round / 3 + (other <= rail));
    }
    /* The port of one is away for several attempts; its reports are its own. */
    fake_verbs_device_port(1, false);
    hrd_agent_link_interrupt(d[1].agent, class_of(1)->id, 1, "RETRY_EXC_ERR");
    unsigned attempts = 0;
    uint64_t next = rail_of(0, 1)->retry_at; /* the dialer's */
    for (int i = 0; i < 20000 && !(attempts >= 3 && away(1, "fake1")); i++) {
        turn();
        attempts += rail_of(0, 1)->retry_at != next;
        next = rail_of(0, 1)->retry_at;
    }
    assert_true(attempts >= 3 && away(1, "fake1"));
    for (int i = 0; i < 2; i++)
        for (unsigned r = 0; r < 3; r++)
            assert_int_equal(!rail_of(i, r)->down_since, r != 1);
    fake_verbs_device_port(1, true);
    wait_rail_mended(1, 3);
    end();
}

/* One rail stays away for longer than peer_timeout: the peer is lost with it, in words; a later link has the others. */
static void test_lost(void **state)
{
    (void)state;
    struct hrp_addr to;
    begin_rails("fake0,fake1", "fake0,fake1");
    link_up(true);
    d[0].cfg.peer_timeout_ms = d[1].cfg.peer_timeout_ms = 1500;
    fake_verbs_device_port(1, false);
    hrd_agent_link_interrupt(d[0].agent, class_of(0)->id, 1, "RETRY_EXC_ERR");
    wait_lost();
    d[0].cfg.peer_timeout_ms = d[1].cfg.peer_timeout_ms = PATIENCE_MS;
    assert_int_equal(hrd_addr_parse("127.0.0.1", d[1].cfg.port, &to), 0);
    hrd_peer_dial(&d[0], hrd_member_dialed, 2, &to, 1, NULL, 0);
    for (int i = 0;
         i < 20000 && !(hrd_peer_find(&d[0], d[1].instance) && hrd_peer_find(&d[1], d[0].instance)); i++)
        turn();
    link_up(true);
    rails_are(2, 1, "port 1 of fake1 is DOWN");
    end();
}

/* The link is lost while the path of its other rail is made anew: that one's connection stays until the control thread has
   let go of it. */
static void test_lost_while_mended(void **state)
{
    (void)state;
    for (int who = 0; who < 2; who++) {
        begin_rails("fake0,fake1", "fake0,fake1");
        link_up(true);
        fake_verbs_device_port(1, false);
        hrd_agent_link_interrupt(d[who].agent, class_of(who)->id, 1, "RETRY_EXC_ERR");
        for (int i = 0; i < 20000 && !(rail_of(0, 1)->lent && rail_of(1, 1)->lent); i++)
            turn();
        assert_non_null(rail_of(who, 1)->lent);
        assert_int_equal(fake_verbs_qps(0, 0), 8);
        fake_verbs_wc_error(IBV_WC_REM_ACCESS_ERR, 1);
        hrd_agent_probe(d[who].agent, class_of(who)->id, 77);
        for (int i = 0; i < 1500; i++) { /* the news is on its way, and the attempts go on */
            uv_run(&loop, UV_RUN_NOWAIT);
            nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
        }
        assert_int_equal(fake_verbs_qps(0, 0), 8);
        wait_lost();
        for (int i = 0; i < 20000 && fake_verbs_qps(0, 0) > 0; i++)
            turn();
        assert_int_equal(fake_verbs_qps(0, 0), 0);
        end();
    }
}

/* A link that lacks a rail goes when nobody uses it, never before; the next has all. */
static void test_made_whole(void **state)
{
    (void)state;
    for (int user = 0; user < 2; user++) {
        begin_rails("fake0,fake1", "fake0,fake1");
        fake_verbs_device_silent(1, true);
        link_up(true);
        rails_are(2, 1, "RETRY_EXC_ERR");
        uint32_t id = class_of(user)->id;
        fake_verbs_device_silent(1, false);
        hrd_link_use(&d[user], id, 1);
        for (uint64_t end = uv_now(&loop) + 3500; uv_now(&loop) < end;)
            turn();
        assert_int_equal(class_of(user)->id, id);
        assert_true(class_of(0)->up && class_of(1)->up);
        hrd_link_use(&d[user], id, -1);
        for (int i = 0; i < 20000 && (class_of(0)->up || class_of(1)->up); i++)
            turn();
        assert_true(!class_of(0)->up && !class_of(1)->up);
        link_up(true);
        rails_are(2, 3, "");
        end();
    }
}

/* RDMA-CM connects each rail's queue pairs from the address of its own device; where it fails for one, exchange. */
static void test_rdmacm(void **state)
{
    (void)state;
    fake_cm_on(true);
    begin_rails("fake0,fake1", "fake0,fake1");
    link_up(true);
    rails_are(2, 3, "");
    for (int i = 0; i < 2; i++)
        for (unsigned r = 0; r < 2; r++)
            if (!rail_of(i, r)->rdmacm) /* the one that found no listener would say so here */
                fail_msg("node %d, rail %u: %s", i, r, rail_of(i, r)->setup_why);
    assert_int_equal(fake_cm_connected(), 8);
    end();
    begin_rails("fake0,fake1", "fake0,fake1");
    fake_cm_answer(FAKE_CM_ADDR, RDMA_CM_EVENT_ADDR_ERROR, -ENODEV, 1);
    link_up(true);
    rails_are(2, 3, "");
    assert_int_equal(rail_of(0, 0)->rdmacm + rail_of(0, 1)->rdmacm, 1);
    assert_int_equal(rail_of(1, 0)->rdmacm + rail_of(1, 1)->rdmacm, 1);
    end();
    /* The dialer has heard by then that the other names more; it still offers as many as before. */
    begin_rails("fake0", "fake0,fake1");
    fake_cm_answer(FAKE_CM_ADDR, RDMA_CM_EVENT_ADDR_ERROR, -ENODEV, 1);
    link_up(true);
    rails_are(2, 1, "names");
    assert_false(rail_of(0, 0)->rdmacm || rail_of(1, 0)->rdmacm);
    end();
    fake_cm_on(false);
}

/* The daemons stop wherever an attempt is: nothing is left. */
static void test_end(void **state)
{
    (void)state;
    for (int turns = 0; turns < 20; turns++) {
        begin_rails("fake0,fake1,fake2", "fake0,fake1,fake2");
        fake_verbs_device_silent(1, turns % 2);
        (void)ask(0, &any);
        (void)ask(1, &any);
        for (int i = 0; i < turns; i++)
            turn();
        end();
    }
}

/* Of one service level after another there is room for one: links of several rails make room as a whole. */
static void test_classes(void **state)
{
    (void)state;
    begin_rails("fake0,fake1", "fake0,fake1");
    d[0].cfg.verbs_classes = d[1].cfg.verbs_classes = 1;
    link_up(true);
    rails_are(2, 3, "");
    for (uint8_t sl = 1; sl < 4; sl++) {
        struct hrd_link_want want = {.sl = sl};
        uint32_t link;
        for (int i = 0; i < 20000 && !(hrd_peer_link(&d[0], peer_of(0)->no, &want, &link) == 1 &&
                                       hrd_peer_link(&d[1], peer_of(1)->no, &want, &link) == 1);
             i++)
            turn();
        assert_int_equal(fake_verbs_qps(sl, 0), 8);
        for (int i = 0; i < 20000 && fake_verbs_qps((uint8_t)(sl - 1), 0) > 0; i++)
            turn();
        assert_int_equal(fake_verbs_qps((uint8_t)(sl - 1), 0), 0);
    }
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all),        cmocka_unit_test(test_left_out),
        cmocka_unit_test(test_no_way),     cmocka_unit_test(test_none),
        cmocka_unit_test(test_old_peer),   cmocka_unit_test(test_mended),
        cmocka_unit_test(test_lost),       cmocka_unit_test(test_lost_while_mended),
        cmocka_unit_test(test_made_whole), cmocka_unit_test(test_rdmacm),
        cmocka_unit_test(test_end),        cmocka_unit_test(test_classes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
