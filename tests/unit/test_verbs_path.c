/* SPDX-License-Identifier: MIT */
/* A verbs link whose path fails and is made anew: what arrived, with or without its acknowledgement, is handled once. */
#include "tests/unit/burst.h"

#include <stdio.h>
#include <string.h>

#include "proto/status.h"

/* An acknowledgement is lost somewhere, its message with it or not: the ops go on where they were. */
static void test_mended(void **state)
{
    (void)state;
    struct sim_options o = {.pool_bytes = 8 << 20, .unit_bytes = 64 << 10, .unit_min_bytes = 16 << 10};
    struct sim *s = two_nodes(&o);
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    burst_mended(s);
    stop(s);
}

/* The port is down for longer than the device tries; then one of the two loses its address; a queue pair dies. */
static void test_mended_after_events(void **state)
{
    (void)state;
    struct sim_options o = {.pool_bytes = 8 << 20};
    struct sim *s = two_nodes(&o);
    struct burst b = {0};
    s->mend = true;
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    for (int round = 0; round < 6; round++) {
        fake_verbs_port(false);
        burst_post(s, &b);
        events(s, 100); /* attempts in between fail */
        assert_false(sim_done(s, 0, 0, b.op[0][FLIGHT - 1]));
        fake_verbs_port(true);
        burst_check(s, &b);
        assert_true(s->mended > (unsigned)round);
    }
    unsigned before = s->mended;
    burst_post(s, &b);
    fake_verbs_event(IBV_EVENT_QP_FATAL, 1);
    burst_check(s, &b);
    for (int i = 0; i < 50000 && s->mended == before; i++)
        events(s, 1);
    assert_true(s->mended > before);
    before = s->mended;
    fake_verbs_set_gid("10.0.0.77");
    fake_verbs_event(IBV_EVENT_GID_CHANGE, 1);
    burst_post(s, &b);
    burst_check(s, &b);
    for (int i = 0; i < 50000 && s->mended == before; i++)
        events(s, 1);
    assert_true(s->mended > before);
    assert_int_equal(fake_verbs_last_rtr().ah_attr.grh.dgid.raw[15], 77);
    assert_int_equal(s->node[0].comms_failed + s->node[1].comms_failed, 0);
    stop(s);
}

/* A device that says nothing at all, as one that tries for ever does: the path counts as failed after a while. */
static void test_mended_after_silence(void **state)
{
    (void)state;
    struct sim_options o = {.pool_bytes = 8 << 20};
    fake_verbs_stall_ms = 400;
    struct sim *s = two_nodes(&o);
    fake_verbs_stall_ms = 10000;
    struct burst b = {0};
    bool lent = false;
    s->mend = true;
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    fake_verbs_hold(true);
    burst_post(s, &b);
    for (int i = 0; i < 50000 && !lent; i++) {
        sim_events(s);
        lent = s->lent[0][1][0] && s->lent[1][0][0];
        nap();
    }
    assert_true(lent);
    fake_verbs_hold(false);
    burst_check(s, &b);
    assert_true(s->mended > 0);
    assert_int_equal(s->node[0].comms_failed + s->node[1].comms_failed, 0);
    stop(s);
}

/* What a daemon of the two was told last has this in it. */
static bool heard(const struct sim *s, const char *words)
{
    return strstr(s->node[0].last_text, words) || strstr(s->node[1].last_text, words);
}

/* Ops fail while the path is away; the comm and the link go on afterwards, or end with it, in bounds. */
static void test_fails_while_interrupted(void **state)
{
    (void)state;
    for (int how = 0; how < 3; how++) {
        struct sim_options o = {.pool_bytes = 8 << 20};
        struct sim *s = two_nodes(&o);
        struct burst b = {.timeout_ms = how == 0 ? 300 : 0};
        char text[HRP_OP_TEXT + 1] = "";
        s->mend = true;
        assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
        fake_verbs_port(false);
        burst_post(s, &b);
        events(s, 100);
        if (how == 0) { /* the ops' own deadline: answered once the other node can be asked */
            nanosleep(&(struct timespec){.tv_nsec = 500000000}, NULL);
            fake_verbs_port(true);
            assert_int_equal(sim_wait(s, 0, 0, b.op[0][0], text), HRP_TIMEOUT);
            for (uint32_t r = 0; r < 2; r++)
                for (unsigned k = 0; k < FLIGHT; k++)
                    (void)sim_wait(s, r, 0, b.op[r][k], NULL);
            b.timeout_ms = 0;
            burst_post(s, &b);
            burst_check(s, &b);
        } else if (how == 1) { /* the daemons give up */
            s->mend = false;
            hrd_agent_link_down(s->node[0].agent, 101, "node n1 is lost: it could not be reached");
            hrd_agent_link_down(s->node[1].agent, 100, "node n0 is lost: it could not be reached");
            for (uint32_t r = 0; r < 2; r++) {
                assert_int_equal(sim_wait(s, r, 0, b.op[r][0], text), HRP_PEER_LOST);
                assert_non_null(strstr(text, "could not be reached"));
            }
        } else { /* the device dies meanwhile: heard when the path is given back */
            fake_verbs_event(IBV_EVENT_DEVICE_FATAL, 1);
            nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
            fake_verbs_port(true);
            for (uint32_t r = 0; r < 2; r++)
                assert_int_equal(sim_wait(s, r, 0, b.op[r][0], text), HRP_PEER_LOST);
            /* Ranks may hear of it before the daemons do. */
            for (int i = 0; i < 50000 && !heard(s, "DEVICE_FATAL"); i++)
                events(s, 1);
            assert_true(heard(s, "DEVICE_FATAL"));
        }
        stop(s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mended),
        cmocka_unit_test(test_mended_after_events),
        cmocka_unit_test(test_mended_after_silence),
        cmocka_unit_test(test_fails_while_interrupted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
