/* SPDX-License-Identifier: MIT */
/* Membership when somebody dies or cannot be reached, at every moment: one verdict for all, and nothing is left. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/member_world.h"

/* ---- before COMMIT ------------------------------------------------------------------------------------------ */

static void test_rank_dies_while_collecting(void **state)
{
    (void)state;
    w_begin(1);
    for (uint32_t i = 0; i < 3; i++) {
        rank[i] = w_process((int)i, 1000);
        w_join(rank[i], "r", 0, i, 4);
    }
    w_settle();
    w_die(rank[1]);
    w_settle();
    char want[64];
    snprintf(want, sizeof(want), "rank 1 (process %d on node n1) was lost", rank[1]->pub.pid);
    for (uint32_t i = 0; i < 3; i += 2) {
        assert_int_equal(rank[i]->status, HRP_RANK_LOST);
        HAS(rank[i]->text, want);
        HAS(rank[i]->text, "process died");
    }
    assert_null(w_leftover());
    w_end();
}

static void test_daemon_dies_while_collecting(void **state)
{
    (void)state;
    w_begin(2);
    for (uint32_t i = 0; i < 3; i++) {
        rank[i] = w_process((int)i, 1000);
        w_join(rank[i], "r", 0, i, 4);
    }
    w_settle();
    w_kill_node(2);
    w_settle();
    all_failed(0, 2, HRP_PEER_LOST, "node n2 closed the connection while");
    assert_null(w_leftover());
    w_end();
}

static void test_a_node_votes_no(void **state)
{
    (void)state;
    for (uint32_t seed = 0; seed < 30; seed++) {
        w_begin(seed);
        w[1].ready_status = HRP_RESOURCE;
        join_all("v", 0, (int[]){0, 0, 1, 1, 2}, 5);
        w_settle();
        all_failed(0, 5, HRP_RESOURCE, "node n1: the agent says no");
        assert_null(w_leftover());
        /* and everybody can go on */
        w[1].ready_status = HRP_OK;
        join_all("v", 0, (int[]){0, 0, 1, 1, 2}, 5);
        w_settle();
        all_joined(5);
        finish(5);
    }
}

static void test_a_node_does_not_vote(void **state)
{
    (void)state;
    w_begin(3);
    w[2].ready_held = true;
    join_all("h", 0, (int[]){0, 1, 2}, 3);
    w_settle();
    w_pass(12000);
    assert_int_equal(rank[0]->answers, 0);
    w_pass(1500);
    all_failed(0, 2, HRP_TIMEOUT, "no answer from node n2 after all ranks had joined");
    assert_int_equal(rank[2]->status, HRP_TIMEOUT);
    w_end();
}

static void test_no_link_between_two(void **state)
{
    (void)state;
    w_begin(4);
    w[1].no_link[2] = w[2].no_link[1] = true;
    join_all("l", 0, (int[]){0, 1, 2}, 3);
    w_settle();
    w_pass(9000);
    assert_int_equal(rank[0]->answers, 0);
    w_pass(1500);
    all_failed(0, 3, HRP_PEER_LOST, "cannot connect to node");
    HAS(rank[0]->text, "10.0.0.9 port 1: no answer (filtered)");
    HAS(rank[0]->text, "n1");
    HAS(rank[0]->text, "n2");
    assert_null(w_leftover());
    /* The link comes back within the time. */
    join_all("l", 0, (int[]){0, 1, 2}, 3);
    w_settle();
    w_pass(5000);
    w[1].no_link[2] = w[2].no_link[1] = false;
    w_pass(1000);
    all_joined(3);
    finish(3);
}

/* Nothing is begun over a link whose path is away: what keeps it away is the reason, in the end. */
static void test_path_is_away(void **state)
{
    (void)state;
    struct w_session *first[3];
    w_begin(7);
    join_all("f", 0, (int[]){0, 1, 2}, 3);
    w_settle();
    all_joined(3);
    memcpy(first, rank, sizeof(first));
    w[1].mending = w[2].mending = "the path is away";
    join_all("l", 0, (int[]){0, 1, 2}, 3);
    w_settle();
    w_pass(9000);
    assert_int_equal(rank[0]->answers, 0);
    w_pass(1500);
    all_failed(0, 3, HRP_PEER_LOST, "could not exchange within 10 s: the path is away");
    join_all("l", 0, (int[]){0, 1, 2}, 3);
    w_settle();
    w_pass(5000);
    assert_int_equal(rank[0]->answers, 0);
    w[1].mending = w[2].mending = NULL;
    w_pass(1000);
    all_joined(3);
    for (int i = 0; i < 3; i++)
        w_die(first[i]);
    w_settle();
    finish(3);
}

static void test_no_connection_between_two(void **state)
{
    (void)state;
    w_begin(5);
    w[1].no_dial[2] = w[2].no_dial[1] = true;
    join_all("l", 0, (int[]){0, 1, 2}, 3);
    w_settle();
    w_pass(10500);
    all_failed(0, 3, HRP_PEER_LOST, "node n1");
    HAS(rank[0]->text, "node n2");
    assert_null(w_leftover());
    w_end();
}

static void test_short_setup_timeout_bounds_every_phase(void **state)
{
    (void)state;
    w_begin(6);
    w[1].no_link[2] = w[2].no_link[1] = true;
    for (uint32_t i = 0; i < 3; i++) {
        struct hrp_msg_join j = w_join_of("l", 0, i, 3);
        j.config.setup_timeout_ms = 2000;
        rank[i] = w_process((int)i, 1000);
        w_join_msg(rank[i], &j);
    }
    w_settle();
    w_pass(2300);
    all_failed(0, 3, HRP_PEER_LOST, "cannot connect");
    assert_null(w_leftover());
    w_end();
}

/* A node that voted and loses its root must not wait for a verdict. */
static void test_root_dies_before_the_verdict(void **state)
{
    (void)state;
    w_begin(12);
    w[3].ready_held = true;
    join_all("v", 0, (int[]){1, 2, 3}, 3);
    w_settle();
    assert_int_equal(w[1].adds, 1);
    w_kill_node(0);
    w_settle();
    all_failed(0, 2, HRP_PEER_LOST, "node n0 closed the connection while");
    assert_int_equal(rank[2]->status, HRP_PEER_LOST);
    assert_true(w[1].comm[0].failed || !w[1].comm[0].used);
    w_end();
}

static void test_link_breaks_before_the_verdict(void **state)
{
    (void)state;
    w_begin(13);
    w[3].ready_held = true;
    join_all("v", 0, (int[]){1, 2, 3}, 3);
    w_settle();
    w_disconnect(1, 2, "closed the connection");
    w_settle();
    all_failed(0, 2, HRP_PEER_LOST, "closed the connection");
    assert_int_equal(rank[2]->status, HRP_PEER_LOST);
    w_end();
}

/* Kill node `victim` (or, negative, rank -victim-1) after `steps` deliveries of a set-up. */
static void kill_in_setup(uint32_t seed, int victim, unsigned steps)
{
    static const int placed[] = {0, 1, 1, 2, 3};
    w_begin(seed);
    join_all("k", 0, placed, 5);
    while (steps > 0 && w_step())
        steps--;
    if (victim >= 0)
        w_kill_node(victim);
    else
        w_die(rank[-victim - 1]);
    w_settle();
    /* A rank that died before its root heard of it is missing like any other. */
    w_pass(62000);
    /* Everybody alive knows: JOINED (and then the agent said that the comm failed), or a sentence. */
    for (uint32_t i = 0; i < 5; i++) {
        if (!rank[i]->alive)
            continue;
        if (rank[i]->answers != 1)
            print_message("seed %u victim %d: rank %u has %d answers\n", seed, victim, i, rank[i]->answers);
        assert_int_equal(rank[i]->answers, 1);
        if (!rank[i]->joined)
            assert_true(rank[i]->status != 0 && rank[i]->text[0] != 0);
    }
    for (int n = 0; n < W_NODES; n++)
        for (int k = 0; k < W_COMMS; k++)
            if (w[n].running && w[n].comm[k].used)
                assert_true(w[n].comm[k].failed); /* nobody goes on alone */
    leave_all(5);
    w_settle();
    const char *left = w_leftover();
    if (left)
        print_message("seed %u victim %d: %s is left\n", seed, victim, left);
    assert_null(left);
    w_end();
}

static void test_death_at_every_moment(void **state)
{
    (void)state;
    uint32_t seed = 0;
    for (unsigned steps = 0; steps < 90; steps++)
        for (int victim = -5; victim < 4; victim++)
            kill_in_setup(seed++, victim, steps);
}

/* ---- after COMMIT ------------------------------------------------------------------------------------------- */

static bool comm_failed(struct w_session *s)
{
    uint64_t comm;
    memcpy(&comm, s->answer.comm_id, sizeof(comm));
    struct w_acomm *c = w_acomm(&w[w_node_of(s)], comm);
    return c && c->failed;
}

static void test_restart_of_a_killed_job(void **state)
{
    (void)state;
    for (uint32_t seed = 0; seed < 50; seed++) {
        w_begin(seed);
        join_all("job", 0, (int[]){0, 1, 1, 2}, 4);
        w_settle();
        all_joined(4);
        for (int round = 0; round < 3; round++) {
            struct w_session *old[4];
            memcpy(old, rank, sizeof(old));
            /* Killed and started again before half of the news is around, on other nodes even. */
            for (int i = 0; i < 4; i++) {
                w_die(old[i]);
                if (w_random(2))
                    w_step();
            }
            join_all("job", 0, (int[]){2, 1, 0, 1}, 4);
            w_settle();
            w_pass(200);
            all_joined(4);
        }
        finish(4);
    }
}

static void test_superseded(void **state)
{
    (void)state;
    w_begin(7);
    join_all("job", 0, (int[]){0, 1, 2}, 3);
    w_settle();
    all_joined(3);
    struct w_session *old0 = rank[0], *old2 = rank[2];
    w_die(rank[1]);
    w_settle();
    assert_true(comm_failed(old0)); /* the agent's doing */
    rank[1] = w_process(1, 1000);
    w_join(rank[1], "job", 0, 1, 3);
    w_settle();
    /* The others are still alive, and hold their ranks of the older one: no longer. */
    rank[0] = w_process(0, 1000);
    rank[2] = w_process(2, 1000);
    w_join(rank[0], "job", 0, 0, 3);
    w_join(rank[2], "job", 0, 2, 3);
    w_settle();
    all_joined(3);
    assert_memory_not_equal(old0->answer.comm_id, rank[0]->answer.comm_id, 16);
    struct w_session *mine[3] = {rank[0], rank[1], rank[2]};
    rank[0] = old0;
    rank[1] = old2;
    leave_all(2);
    memcpy(rank, mine, sizeof(mine));
    finish(3);
}

/* One of two ranks of a node dies and comes back: its neighbour still holds the older communicator. */
static void test_one_of_two_ranks_restarts(void **state)
{
    (void)state;
    w_begin(14);
    join_all("job", 0, (int[]){0, 1, 1}, 3);
    w_settle();
    all_joined(3);
    w_die(rank[1]);
    w_settle();
    struct w_session *old[2] = {rank[0], rank[2]};
    rank[1] = w_process(1, 1000);
    w_join(rank[1], "job", 0, 1, 3);
    w_settle();
    w_pass(300);
    assert_int_equal(rank[1]->answers, 0); /* it is neither refused nor left to wait for its own shadow */
    rank[0] = w_process(0, 1000);
    rank[2] = w_process(1, 1000);
    w_join(rank[0], "job", 0, 0, 3);
    w_join(rank[2], "job", 0, 2, 3);
    w_settle();
    all_joined(3);
    w_die(old[0]);
    w_die(old[1]);
    finish(3);
}

/* A rank that left by itself holds nothing; the others of the older comm are told that it is over. */
static void test_superseded_sentence(void **state)
{
    (void)state;
    w_begin(8);
    join_all("job", 0, (int[]){0, 1}, 2);
    w_settle();
    hrd_member_leave(&w[1].d, &rank[1]->pub, 2, rank[1]->answer.slot);
    w_settle();
    assert_false(comm_failed(rank[0]));
    struct w_session *next = w_process(1, 1000);
    w_join(next, "job", 0, 1, 2);
    w_settle();
    assert_true(comm_failed(rank[0]));
    w_die(next);
    w_die(rank[0]);
    w_settle();
    assert_null(w_leftover());
    w_end();
}

static void test_abort(void **state)
{
    (void)state;
    w_begin(9);
    join_all("a", 0, (int[]){0, 1, 1}, 3);
    w_settle();
    rank[2]->answers = 0;
    hrd_member_abort(&w[1].d, &rank[2]->pub, 3, rank[2]->answer.slot, "loss is NaN", 11);
    assert_true(rank[2]->done);
    assert_int_equal(rank[2]->answers, 1);
    w_settle();
    for (int i = 0; i < 3; i++)
        assert_true(comm_failed(rank[i]));
    /* again, and a slot that has none */
    hrd_member_abort(&w[1].d, &rank[2]->pub, 4, rank[2]->answer.slot, "", 0);
    assert_int_equal(rank[2]->answers, 2);
    hrd_member_abort(&w[1].d, &rank[2]->pub, 4, 2, "", 0);
    assert_int_equal(rank[2]->status, HRP_INVALID_ARGUMENT);
    finish(3);
}

static void test_leave(void **state)
{
    (void)state;
    w_begin(10);
    join_all("a", 0, (int[]){0, 1}, 2);
    w_settle();
    uint32_t slot = rank[0]->answer.slot;
    assert_int_not_equal(hrd_member_comm_of_slot(&w[0].d, &rank[0]->pub, slot), 0);
    assert_int_equal(hrd_member_comm_of_slot(&w[0].d, &rank[0]->pub, slot + 1), 0);
    assert_int_equal(hrd_member_comm_of_slot(&w[1].d, &rank[0]->pub, slot), 0);
    rank[0]->answers = 0;
    hrd_member_leave(&w[0].d, &rank[0]->pub, 5, slot + 1);
    assert_int_equal(rank[0]->status, HRP_INVALID_ARGUMENT);
    hrd_member_leave(&w[0].d, &rank[0]->pub, 5, slot);
    hrd_member_leave(&w[0].d, &rank[0]->pub, 6, slot);
    assert_int_equal(rank[0]->answers, 2);
    w_settle();
    assert_int_equal(rank[0]->answers, 3);
    assert_true(rank[0]->done);
    assert_int_equal(hrd_member_comm_of_slot(&w[0].d, &rank[0]->pub, slot), 0);
    finish(2);
}

/* The root's daemon does not matter after COMMIT, if it has no rank. */
static void test_root_dies_after_commit(void **state)
{
    (void)state;
    w_begin(11);
    join_all("a", 0, (int[]){1, 2}, 2);
    w_settle();
    all_joined(2);
    w_kill_node(0);
    w_settle();
    assert_false(comm_failed(rank[0]));
    assert_false(comm_failed(rank[1]));
    finish(2);
}

/* ---- anything ----------------------------------------------------------------------------------------------- */

/* Random processes join, leave, abort and die on random nodes under few names, and daemons die and come back. In
   the end everybody alive has an answer, and when they are gone nothing is left. */
static void random_life(uint32_t seed)
{
    struct w_session *s[60] = {0};
    unsigned n = 0;
    w_begin(seed);
    for (int round = 0; round < 150; round++) {
        unsigned what = w_random(100);
        int node = (int)w_random(4);
        struct w_session *x = n ? s[w_random(n)] : NULL;
        if (what < 45 && n < 60 && w[node].running) {
            char name[3] = {'j', (char)('0' + w_random(2)), 0};
            unsigned used = 0;
            for (int k = 0; k < W_SESSIONS; k++)
                used += w[node].session[k].pub.sid != 0;
            if (used < W_SESSIONS) {
                s[n] = w_process(node, 1000);
                w_join(s[n++], name, (int)w_random(2), w_random(3), 3);
            }
        } else if (what < 55 && x && x->alive) {
            w_die(x);
        } else if (what < 62 && x && x->alive && x->joined && !x->done) {
            hrd_member_leave(&w[w_node_of(x)].d, &x->pub, 9, x->answer.slot);
        } else if (what < 66 && x && x->alive && x->joined && !x->done) {
            hrd_member_abort(&w[w_node_of(x)].d, &x->pub, 9, x->answer.slot, "why", 3);
        } else if (what < 68 && w[node].running) {
            w_kill_node(node);
            for (unsigned i = 0; i < n; i++)
                if (s[i] && w_node_of(s[i]) == node)
                    s[i] = s[--n], i--;
        } else if (what < 74 && !w[node].running) {
            w_start_node(node);
        } else if (what < 80) {
            w_pass(w_random(30) * MEMBER_TICK_MS);
        } else {
            for (unsigned k = w_random(40); k > 0 && w_step(); k--)
                ;
        }
    }
    w_settle();
    w_pass(80000);
    for (unsigned i = 0; i < n; i++)
        if (s[i]->alive)
            assert_true(s[i]->answers > 0);
    for (unsigned i = 0; i < n; i++)
        w_die(s[i]);
    w_settle();
    const char *left = w_leftover();
    if (left)
        print_message("seed %u: %s is left\n", seed, left);
    assert_null(left);
    w_end();
}

static void test_random_lives(void **state)
{
    (void)state;
    for (uint32_t seed = 1; seed <= 300; seed++)
        random_life(seed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rank_dies_while_collecting),
        cmocka_unit_test(test_daemon_dies_while_collecting),
        cmocka_unit_test(test_a_node_votes_no),
        cmocka_unit_test(test_a_node_does_not_vote),
        cmocka_unit_test(test_no_link_between_two),
        cmocka_unit_test(test_no_connection_between_two),
        cmocka_unit_test(test_path_is_away),
        cmocka_unit_test(test_short_setup_timeout_bounds_every_phase),
        cmocka_unit_test(test_root_dies_before_the_verdict),
        cmocka_unit_test(test_link_breaks_before_the_verdict),
        cmocka_unit_test(test_death_at_every_moment),
        cmocka_unit_test(test_restart_of_a_killed_job),
        cmocka_unit_test(test_superseded),
        cmocka_unit_test(test_one_of_two_ranks_restarts),
        cmocka_unit_test(test_superseded_sentence),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_leave),
        cmocka_unit_test(test_root_dies_after_commit),
        cmocka_unit_test(test_random_lives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
