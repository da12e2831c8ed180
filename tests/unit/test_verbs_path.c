/* SPDX-License-Identifier: MIT */
/* A verbs link whose path fails and is made anew: what arrived, with or without its acknowledgement, is handled once. */
#include "tests/unit/verbs_nodes.h"

#include <stdio.h>
#include <string.h>

#include "proto/status.h"

#define FLIGHT 5u

static uint32_t rnd(uint32_t below)
{
    static uint64_t x = 88172645463325252u;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return (uint32_t)(x >> 33) % below;
}

/* Some all_reduces in flight together, out of place, of fresh numbers, with guards around the results. */
struct burst {
    uint64_t count[FLIGHT], off[FLIGHT], op[2][FLIGHT], pad;
    uint32_t timeout_ms; /* of its ops; 0: none */
};

static void burst_post(struct sim *s, struct burst *b)
{
    uint64_t at = 0, half = s->rank[0].pool_bytes / 2;
    b->pad = rnd(1u << 30);
    for (unsigned k = 0; k < FLIGHT; k++) {
        b->count[k] = rnd(3) ? 1 + rnd(2000) : 1 + rnd(80000);
        b->off[k] = at + GUARD;
        at += (b->count[k] * 4 + 2 * GUARD + 63) / 64 * 64;
    }
    for (uint32_t r = 0; r < 2; r++) {
        memset(s->rank[r].pool + half, 0x5a, half);
        for (unsigned k = 0; k < FLIGHT; k++) {
            struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = b->count[k], .redop = HRP_SUM};
            float *in = (float *)(void *)(s->rank[r].pool + b->off[k]);
            for (uint64_t i = 0; i < b->count[k]; i++)
                in[i] = number(r, i, b->pad + k);
            struct hrp_desc desc = {.op = ++s->rank[r].posted[0],
                                    .sig = sig,
                                    .timeout_ms = b->timeout_ms,
                                    .in = {.kind = HRP_BUF_SHARED, .id = 1, .offset = b->off[k]},
                                    .out = {.kind = HRP_BUF_SHARED, .id = 1, .offset = half + b->off[k]}};
            sim_push(s, r, 0, &desc, hrp_flag(desc.op, HRP_CHUNK_ALL));
            b->op[r][k] = desc.op;
        }
    }
}

static void burst_check(struct sim *s, const struct burst *b)
{
    uint64_t half = s->rank[0].pool_bytes / 2;
    for (uint32_t r = 0; r < 2; r++)
        for (unsigned k = 0; k < FLIGHT; k++) {
            char text[HRP_OP_TEXT + 1] = "";
            if (sim_wait(s, r, 0, b->op[r][k], text) != HRP_OK)
                fail_msg("rank %u op %u: %s", r, k, text);
            const char *raw = s->rank[r].pool + half + b->off[k];
            const float *out = (const float *)(const void *)raw;
            for (uint64_t i = 0; i < b->count[k]; i++)
                if (out[i] != number(0, i, b->pad + k) + number(1, i, b->pad + k))
                    fail_msg("rank %u op %u element %llu", r, k, (unsigned long long)i);
            for (unsigned g = 1; g <= GUARD; g++)
                if (raw[-(int)g] != 0x5a || raw[b->count[k] * 4 + g - 1] != 0x5a)
                    fail_msg("rank %u op %u: a guard was written", r, k);
        }
}

/* An acknowledgement is lost somewhere, its message with it or not: the ops go on where they were. */
static void test_mended(void **state)
{
    (void)state;
    struct sim_options o = {.pool_bytes = 8 << 20, .unit_bytes = 64 << 10, .unit_min_bytes = 16 << 10};
    struct sim *s = two_nodes(&o);
    unsigned lost = 0;
    s->mend = true;
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    for (int round = 0; round < 40; round++) {
        struct burst b = {0};
        fake_verbs_lose(rnd(round % 2 ? 12 : 150), rnd(2));
        burst_post(s, &b);
        burst_check(s, &b);
        lost += !fake_verbs_to_lose();
    }
    if (lost < 20 || s->mended < 20) /* else it shows nothing */
        fail_msg("%u acknowledgements were lost and the path was made anew %u times", lost, s->mended);
    assert_int_equal(s->node[0].comms_failed + s->node[1].comms_failed, 0);
    assert_int_equal(fake_verbs_rnr(), 0);
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
        for (int i = 0; i < 100; i++) { /* attempts in between fail */
            sim_events(s);
            nap();
        }
        assert_false(sim_done(s, 0, 0, b.op[0][FLIGHT - 1]));
        fake_verbs_port(true);
        burst_check(s, &b);
        assert_true(s->mended > (unsigned)round);
    }
    unsigned before = s->mended;
    burst_post(s, &b);
    fake_verbs_event(IBV_EVENT_QP_FATAL, 1);
    burst_check(s, &b);
    for (int i = 0; i < 50000 && s->mended == before; i++) {
        sim_events(s);
        nap();
    }
    assert_true(s->mended > before);
    before = s->mended;
    fake_verbs_set_gid("10.0.0.77");
    fake_verbs_event(IBV_EVENT_GID_CHANGE, 1);
    burst_post(s, &b);
    burst_check(s, &b);
    for (int i = 0; i < 50000 && s->mended == before; i++) {
        sim_events(s);
        nap();
    }
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
        lent = s->lent[0][1] && s->lent[1][0];
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
        for (int i = 0; i < 100; i++) {
            sim_events(s);
            nap();
        }
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
            for (int i = 0; i < 50000 && !heard(s, "DEVICE_FATAL");
                 i++) { /* ranks may hear of it before the daemons do */
                sim_events(s);
                nap();
            }
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
