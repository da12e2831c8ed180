/* SPDX-License-Identifier: MIT */
/* Links over several NICs: blocks on all of them in proportion to their rates, exact results, and paths that fail. */
#include "tests/unit/burst.h"

#include <errno.h>

static struct sim *rails(struct sim_options *o, unsigned n, const unsigned *lanes)
{
    o->rails = n;
    o->lanes = lanes;
    o->pool_bytes = 8 << 20;
    o->unit_bytes = 256 << 10; /* blocks of 128 KiB, which are spread */
    o->unit_min_bytes = 128 << 10;
    return two_nodes(o);
}

/* The share of each device in what was sent, in percent, is as expected, to 5. */
static void shares(unsigned n, const unsigned *expected)
{
    uint64_t all = 0;
    for (unsigned i = 0; i < n; i++)
        all += fake_verbs_device_bytes(i);
    for (unsigned i = 0; i < n; i++) {
        unsigned percent = (unsigned)(fake_verbs_device_bytes(i) * 100 / all);
        if (percent + 5 < expected[i] || percent > expected[i] + 5)
            fail_msg("device %u sent %u%% of %llu bytes instead of %u%%", i, percent, (unsigned long long)all,
                     expected[i]);
    }
}

/* An op of many blocks, in place. */
#define LARGE UINT64_C(1800001)

struct large {
    uint64_t salt, op[2];
};

static void large_post(struct sim *s, struct large *l)
{
    static uint64_t salt;
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = LARGE, .redop = HRP_SUM};
    l->salt = ++salt;
    for (uint32_t r = 0; r < 2; r++) {
        float *in = (float *)(void *)s->rank[r].pool;
        memset(s->rank[r].pool + LARGE * 4, 0x5a, GUARD);
        for (uint64_t i = 0; i < LARGE; i++)
            in[i] = number(r, i, salt);
        l->op[r] = sim_post(s, r, 0, &sig, 0, 0);
    }
}

static void large_check(struct sim *s, const struct large *l)
{
    for (uint32_t r = 0; r < 2; r++) {
        const float *out = (const float *)(const void *)s->rank[r].pool;
        char text[HRP_OP_TEXT + 1] = "";
        if (sim_wait(s, r, 0, l->op[r], text) != HRP_OK)
            fail_msg("rank %u: %s", r, text);
        for (uint64_t i = 0; i < LARGE; i++)
            if (out[i] != number(0, i, l->salt) + number(1, i, l->salt))
                fail_msg("rank %u element %llu", r, (unsigned long long)i);
        for (unsigned g = 0; g < GUARD; g++)
            assert_int_equal(s->rank[r].pool[LARGE * 4 + g], 0x5a);
    }
}

static void large(struct sim *s)
{
    struct large l;
    large_post(s, &l);
    large_check(s, &l);
}

static void test_shares(void **state)
{
    (void)state;
    static const struct {
        unsigned n, lanes[4], expected[4];
    } row[] = {{2, {4, 4}, {50, 50}},
               {2, {4, 2}, {67, 33}},
               {2, {2, 4}, {33, 67}},
               {3, {4, 4, 2}, {40, 40, 20}},
               {4, {4, 4, 4, 4}, {25, 25, 25, 25}}};
    for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
        struct sim_options o = {0};
        struct sim *s = rails(&o, row[i].n, row[i].lanes);
        assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
        for (unsigned round = 0; round < 5; round++)
            large(s);
        shares(row[i].n, row[i].expected);
        assert_int_equal(fake_verbs_rnr(), 0);
        stop(s);
    }
}

/* What the status shows of each. */
static void test_snapshot(void **state)
{
    (void)state;
    struct sim_options o = {0};
    struct sim *s = rails(&o, 2, NULL);
    struct burst b = {0};
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    burst_post(s, &b);
    burst_check(s, &b);
    const struct hrd_snapshot_link *l = &sim_look(s, 0)->link[0];
    assert_string_equal(l->transport, "verbs");
    assert_string_equal(l->detail, "2 rails: fake0 port 1, fake1 port 1");
    assert_int_equal(l->nrails, 2);
    assert_non_null(strstr(l->rail[0].detail, "fake0 port 1, RoCE v2, GID 3 (10.0.0.1)"));
    assert_non_null(strstr(l->rail[1].detail, "fake1 port 1, RoCE v2, GID 3 (10.0.1.1)"));
    assert_true(l->rail[0].tx_bytes > 0 && l->rail[1].tx_bytes > 0);
    assert_true(l->rail[0].rx_bytes > 0 && l->rail[1].rx_bytes > 0);
    assert_int_equal(l->tx_bytes, l->rail[0].tx_bytes + l->rail[1].tx_bytes);
    assert_int_equal(l->nstreams, 2 * SIM_STREAMS);
    stop(s);
}

/* An acknowledgement is lost somewhere on one of them, its message with it or not. */
static void test_mended(void **state)
{
    (void)state;
    struct sim_options o = {0};
    struct sim *s = rails(&o, 2, NULL);
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    burst_mended(s);
    stop(s);
}

static void wait_lent(struct sim *s, unsigned rail)
{
    for (int i = 0; i < 50000 && !(s->lent[0][1][rail] && s->lent[1][0][rail]); i++)
        events(s, 1);
    assert_true(s->lent[0][1][rail] && s->lent[1][0][rail] && !s->lent[0][1][!rail]);
}

static void wait_mended(struct sim *s, unsigned before)
{
    for (int i = 0; i < 50000 && s->mended == before; i++)
        events(s, 1);
    assert_int_equal(s->mended, before + 1);
}

/* A port is down in the midst of an op: what is on that rail waits, and goes on when the port is up again. */
static void test_port_down(void **state)
{
    (void)state;
    for (unsigned which = 0; which < 2; which++) {
        struct sim_options o = {0};
        struct sim *s = rails(&o, 2, NULL);
        struct large l;
        s->mend = true;
        assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
        large(s);
        fake_verbs_device_port(which, false);
        large_post(s, &l);
        wait_lent(s, which);
        assert_non_null(strstr(s->node[0].interrupted, which ? "fake1 port 1" : "fake0 port 1"));
        assert_false(sim_done(s, 0, 0, l.op[0]));
        fake_verbs_device_port(which, true);
        large_check(s, &l);
        assert_int_equal(s->mended, 1);
        assert_int_equal(s->node[0].comms_failed + s->node[1].comms_failed, 0);
        stop(s);
    }
}

/* While the path of a rail is away ops go over the other, and over both again when it is back. */
static void test_ops_meanwhile(void **state)
{
    (void)state;
    struct sim_options o = {0};
    struct sim *s = rails(&o, 2, NULL);
    s->mend = true;
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    for (unsigned round = 0; round < 4; round++) {
        fake_verbs_device_port(1, false);
        hrd_agent_link_interrupt(s->node[round % 2].agent, round % 2 ? 100 : 101, 1, "nothing comes through");
        wait_lent(s, 1);
        uint64_t before = fake_verbs_device_bytes(1);
        large(s);
        large(s);
        assert_int_equal(fake_verbs_device_bytes(1), before);
        fake_verbs_device_port(1, true);
        wait_mended(s, round);
        before = fake_verbs_device_bytes(1);
        large(s);
        assert_true(fake_verbs_device_bytes(1) - before > LARGE);
    }
    assert_int_equal(s->node[0].comms_failed + s->node[1].comms_failed, 0);
    stop(s);
}

/* The other rail breaks meanwhile: ops fail at once, not when the attempts at the path have been given up. */
static void test_lost_meanwhile(void **state)
{
    (void)state;
    struct sim_options o = {0};
    struct sim *s = rails(&o, 2, NULL);
    struct burst b = {0};
    s->mend = true;
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    large(s);
    fake_verbs_device_port(1, false);
    hrd_agent_link_interrupt(s->node[0].agent, 101, 1, "nothing comes through");
    wait_lent(s, 1);
    fake_verbs_wc_error(IBV_WC_REM_ACCESS_ERR, 1);
    burst_post(s, &b);
    for (uint32_t r = 0; r < 2; r++)
        for (unsigned k = 0; k < FLIGHT; k++)
            (void)sim_wait(s, r, 0, b.op[r][k], NULL);
    for (int i = 0; i < 50000 && !(s->node[0].links_lost && s->node[1].links_lost); i++)
        events(s, 1);
    for (unsigned n = 0; n < 2; n++) {
        assert_int_equal(s->node[n].comms_failed, 1);
        assert_int_equal(s->node[n].links_lost, 1);
    }
    if (!strstr(s->node[0].last_text, "rail 0, fake0 port 1") &&
        !strstr(s->node[1].last_text, "rail 0, fake0 port 1"))
        fail_msg("neither '%s' nor '%s' says which rail", s->node[0].last_text, s->node[1].last_text);
    stop(s);
}

/* A device goes for good: the link ends in words, and with it what used it. */
static void test_gone(void **state)
{
    (void)state;
    for (unsigned which = 0; which < 2; which++) {
        struct sim_options o = {.place = which};
        struct sim *s = rails(&o, 2, NULL);
        struct burst b = {0};
        char words[80];
        s->mend = true;
        assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
        burst_post(s, &b);
        burst_check(s, &b);
        burst_post(s, &b);
        fake_verbs_device_gone(which, true);
        for (uint32_t r = 0; r < 2; r++)
            for (unsigned k = 0; k < FLIGHT; k++)
                (void)sim_wait(s, r, 0, b.op[r][k], NULL);
        for (int i = 0; i < 50000 && !(s->node[0].comms_failed && s->node[1].comms_failed); i++)
            events(s, 1);
        assert_true(s->node[0].comms_failed == 1 && s->node[1].comms_failed == 1);
        snprintf(words, sizeof(words), "rail %u, fake%u port 1", which + o.place, which);
        if (!strstr(s->node[0].last_text, words) && !strstr(s->node[1].last_text, words))
            fail_msg("neither '%s' nor '%s' says '%s'", s->node[0].last_text, s->node[1].last_text, words);
        assert_true(strstr(s->node[0].last_text, "DEVICE_FATAL") ||
                    strstr(s->node[1].last_text, "DEVICE_FATAL"));
        stop(s);
    }
}

/* No rail can have the memory: none does. */
static void test_no_memory(void **state)
{
    (void)state;
    for (unsigned after = 0; after < 4; after++) {
        struct sim_options o = {0};
        struct sim *s = rails(&o, 2, NULL);
        fake_verbs_fail(FAKE_REG_MR, after, ENOMEM, 0);
        uint32_t status = sim_comm(s, COMM, 0, &o);
        if (status == HRP_OK)
            fail_msg("a communicator without receive memory (%u)", after);
        fake_verbs_fail(FAKE_REG_MR, 1000000, ENOMEM, 1);
        assert_int_equal(sim_comm(s, COMM + 1, 1, &o), HRP_OK);
        stop(s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shares),        cmocka_unit_test(test_snapshot),
        cmocka_unit_test(test_mended),        cmocka_unit_test(test_port_down),
        cmocka_unit_test(test_ops_meanwhile), cmocka_unit_test(test_lost_meanwhile),
        cmocka_unit_test(test_gone),          cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
