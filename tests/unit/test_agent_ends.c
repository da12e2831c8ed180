/* SPDX-License-Identifier: MIT */
/* Ends that not all take part in: a node that refused, memory that went away or is freed, a rank that is left behind. */
#include "tests/sim/agents.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "proto/ring.h"
#include "proto/status.h"

#define COMM 9u

static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

/* A node that never had the comm, because it refused it, answers every node that gives it up: each of them keeps its
   reserve until it hears that nothing follows. */
static void test_refused_by_one(void **state)
{
    (void)state;
    static const uint32_t map[4] = {0, 1, 2, 3};
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {0};
    sim_start(s, 4, 4, map, &o);
    hrd_agent_session_end(s->node[1].agent, s->rank[1].sid, "process 1001 died");
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_RANK_LOST);
    static const uint32_t others[3] = {0, 2, 3};
    for (int i = 0; i < 3; i++)
        hrd_agent_comm_fail(s->node[others[i]].agent, COMM, HRP_RANK_LOST, "the set-up failed", true);
    for (int i = 0; i < 3; i++)
        hrd_agent_comm_leave(s->node[others[i]].agent, COMM, others[i]);
    for (int i = 0; i < 3; i++) {
        struct sim_node *n = &s->node[others[i]];
        for (int k = 0; k < 50000 && !n->comms_gone; k++) {
            sim_events(s);
            nap();
        }
        if (n->comms_gone != 1)
            fail_msg("node %u keeps the communicator", others[i]);
    }
    assert_int_equal(sim_comm(s, COMM, 1, &o), HRP_RANK_LOST); /* the refusal stays one, and only one */
    sim_stop(s);
    free(s);
}

/* Sums that may be made of memory that is gone are nobody's result, on other nodes neither. */
static void test_poison_stays_at_home(void **state)
{
    (void)state;
    static const uint32_t map[3] = {0, 0, 1};
    static const uint64_t counts[2] = {100, 500000};
    for (int k = 0; k < 2; k++) {
        struct sim *s = calloc(1, sizeof(*s));
        struct sim_options o = {0};
        char text[HRP_OP_TEXT + 1];
        sim_start(s, 2, 3, map, &o);
        assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
        struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = counts[k], .redop = HRP_SUM};
        atomic_store(&s->rank[1].poisoned, 1);
        for (uint32_t r = 0; r < 3; r++)
            sim_post(s, r, 0, &sig, 0, 4 << 20);
        for (uint32_t r = 0; r < 3; r++) {
            assert_int_equal(sim_wait(s, r, 0, 1, text), HRP_RANK_LOST);
            assert_non_null(strstr(text, "shared memory of a rank on node n0 went away"));
        }
        sim_stop(s);
        free(s);
    }
}

/* Ops fail without a rank that posts none; when it is too far behind, the comm ends, and not the session of the one
   that went on. */
static void test_left_behind(void **state)
{
    (void)state;
    static const uint32_t map[3] = {0, 0, 1};
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {.comm.op_timeout_ms = 50};
    char text[HRP_OP_TEXT + 1];
    sim_start(s, 2, 3, map, &o);
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 100, .redop = HRP_SUM};
    uint64_t op = 0;
    for (int batch = 0; batch < 4; batch++) {
        for (int i = 0; i < (int)HRP_OP_SLOTS; i++)
            op = sim_post(s, 0, 0, &sig, 0, 4096);
        for (uint64_t k = op - HRP_OP_SLOTS + 1; k <= op; k++)
            assert_int_equal(sim_wait(s, 0, 0, k, NULL), HRP_TIMEOUT);
    }
    op = sim_post(s, 0, 0, &sig, 0, 4096);
    assert_int_equal(sim_wait(s, 0, 0, op, text), HRP_TIMEOUT);
    assert_non_null(strstr(text, "node n0 has not posted op 1"));
    assert_int_equal(sim_wait(s, 1, 0, sim_post(s, 1, 0, &sig, 0, 4096), text), HRP_TIMEOUT);
    for (uint32_t r = 0; r < 3; r++)
        assert_false(s->rank[r].gone);
    assert_int_equal(sim_comm(s, COMM + 1, 1, &o), HRP_OK);
    sim_stop(s);
    free(s);
}

/* A communicator that failed keeps nothing of the arena, on no node, however long its ranks keep it. */
static void test_failed_gives_back(void **state)
{
    (void)state;
    static const uint32_t map[3] = {0, 1, 2};
    for (int verbs = 0; verbs < 2; verbs++) {
        struct sim *s = calloc(1, sizeof(*s));
        struct sim_options o = {.verbs = verbs};
        struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 300000, .redop = HRP_SUM};
        sim_start(s, 3, 3, map, &o);
        const uint64_t before = sim_look(s, 0)->arena_used;
        assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
        const uint64_t held = sim_look(s, 0)->arena_used;
        assert_true(held > before);
        for (uint32_t r = 0; r < 3; r++)
            sim_post(s, r, 0, &sig, 0, 2 << 20);
        sim_post(s, 0, 0, &sig, 0, 2 << 20); /* which the others never post */
        hrd_agent_comm_fail(s->node[1].agent, COMM, HRP_ABORTED, "the test ended it", true);
        for (uint32_t n = 0; n < 3; n++) {
            int k = 0;
            while (sim_look(s, n)->arena_used > before && k++ < 20000)
                nap();
            assert_int_equal(s->node[n].snapshot->arena_used, before);
            assert_int_equal(s->node[n].comms_gone, 0);
        }
        assert_int_equal(sim_wait(s, 0, 0, 2, NULL), HRP_ABORTED);
        assert_int_equal(sim_comm(s, COMM + 1, 1, &o), HRP_OK);
        for (uint32_t r = 0; r < 3; r++)
            sim_post(s, r, 1, &sig, 0, 2 << 20);
        for (uint32_t r = 0; r < 3; r++)
            assert_int_equal(sim_wait(s, r, 1, 1, NULL), HRP_OK);
        assert_int_equal(sim_look(s, 0)->arena_used, held);
        sim_stop(s);
        free(s);
    }
}

/* A buffer that is freed behind an op that names it goes when the op is complete, also when the agent hears of the
   free before it looked at the ring. */
static void test_freed_behind_its_op(void **state)
{
    (void)state;
    static const uint32_t map[2] = {0, 0};
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {0};
    sim_start(s, 1, 2, map, &o);
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 1000, .redop = HRP_SUM};
    struct hrp_bufref buffer = {.kind = HRP_BUF_SHARED, .id = 1};
    struct hrp_desc d = {.op = 1, .sig = sig, .in = buffer, .out = buffer};
    struct hrp_comm_area *area = hrp_seg_comm(s->rank[0].seg, 0);
    assert_int_equal(hrp_ring_push(area, &d), 0); /* not announced yet */
    hrd_agent_buffer_drop(s->node[0].agent, s->rank[0].sid, 1);
    for (int i = 0; i < 500; i++) {
        sim_events(s);
        nap();
    }
    assert_int_equal(s->rank[0].buffers_gone, 0);
    sim_post(s, 1, 0, &sig, 0, 0);
    atomic_fetch_add(&s->rank[0].seg->submits, 1);
    for (uint32_t r = 0; r < 2; r++)
        assert_int_equal(sim_wait(s, r, 0, 1, NULL), HRP_OK);
    for (int i = 0; i < 50000 && !s->rank[0].buffers_gone; i++) {
        sim_events(s);
        nap();
    }
    assert_int_equal(s->rank[0].buffers_gone, 1);
    sim_stop(s);
    free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused_by_one),    cmocka_unit_test(test_poison_stays_at_home),
        cmocka_unit_test(test_left_behind),       cmocka_unit_test(test_freed_behind_its_op),
        cmocka_unit_test(test_failed_gives_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
