/* SPDX-License-Identifier: MIT */
/* Membership over several nodes: how ranks meet, who is refused and with which words, what happens to the rest. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "daemon/plan.h"
#include "tests/unit/member_world.h"

/* ---- together ---------------------------------------------------------------------------------------------- */

static void test_one_node(void **state)
{
    (void)state;
    w_begin(1);
    join_all("a", 0, (int[]){0, 0, 0}, 3);
    w_settle();
    all_joined(3);
    assert_int_equal(rank[0]->answer.nnodes, 1);
    assert_int_equal(rank[0]->answer.nlocal, 3);
    assert_int_equal(w[0].adds, 1);
    assert_int_equal(rank[0]->answer.op_timeout_ms, 600000);
    /* and again, one rank alone */
    leave_all(3);
    join_all("a", 0, (int[]){0}, 1);
    w_settle();
    all_joined(1);
    finish(1);
}

static void test_nodes_in_order_of_lowest_rank(void **state)
{
    (void)state;
    static const int placed[] = {4, 2, 4, 1, 2, 5};
    static const uint32_t index[] = {0, 1, 0, 2, 1, 3};
    for (uint32_t seed = 0; seed < 50; seed++) {
        w_begin(seed);
        /* In any order of arrival, with a root that has none of the ranks. */
        uint32_t order[] = {0, 1, 2, 3, 4, 5};
        for (uint32_t i = 5; i > 0; i--) {
            uint32_t k = w_random(i + 1), t = order[i];
            order[i] = order[k];
            order[k] = t;
        }
        for (uint32_t i = 0; i < 6; i++) {
            rank[order[i]] = w_process(placed[order[i]], 1000);
            w_join(rank[order[i]], "job", 0, order[i], 6);
            if (w_random(2))
                w_settle();
        }
        w_settle();
        all_joined(6);
        for (uint32_t i = 0; i < 6; i++)
            assert_int_equal(rank[i]->answer.node, index[i]);
        assert_int_equal(rank[0]->answer.nnodes, 4);
        assert_int_equal(w[0].adds, 0);
        finish(6);
    }
}

static void test_two_comms_at_once(void **state)
{
    (void)state;
    struct w_session *s[2];
    for (uint32_t seed = 0; seed < 20; seed++) {
        w_begin(seed);
        for (uint32_t i = 0; i < 2; i++) {
            s[i] = w_process((int)i, 1000);
            w_join(s[i], "x", 0, i, 2);
            w_join(s[i], "y", 1, i, 2);
        }
        w_settle();
        for (uint32_t i = 0; i < 2; i++)
            assert_true(s[i]->answers == 2 && s[i]->status == HRP_OK);
        w_end();
    }
}

static void test_same_name_of_two_users(void **state)
{
    (void)state;
    struct w_session *s[4];
    w_begin(3);
    for (uint32_t i = 0; i < 4; i++) {
        s[i] = w_process((int)i % 2, 1000 + i / 2);
        w_join(s[i], "same", 0, i % 2, 2);
    }
    w_settle();
    for (int i = 0; i < 4; i++)
        assert_true(s[i]->joined);
    assert_memory_equal(s[0]->answer.comm_id, s[1]->answer.comm_id, 16);
    assert_memory_equal(s[2]->answer.comm_id, s[3]->answer.comm_id, 16);
    assert_memory_not_equal(s[0]->answer.comm_id, s[2]->answer.comm_id, 16);
    w_end();
}

static void test_configuration_is_the_roots(void **state)
{
    (void)state;
    w_begin(4);
    w[0].d.cfg.op_timeout_ms = 0;
    w[0].d.cfg.algorithm = HRP_ALGO_DIRECT;
    w[1].d.cfg.op_timeout_ms = 5;
    join_all("c", 0, (int[]){0, 1}, 2);
    w_settle();
    all_joined(2);
    assert_int_equal(rank[1]->answer.op_timeout_ms, UINT32_MAX);
    assert_int_equal(w[1].comm[0].config.algo, HRP_ALGO_DIRECT);
    assert_int_equal(w[1].comm[0].config.reproducible, HRP_ON);
    finish(2);
}

/* ---- missing ------------------------------------------------------------------------------------------------ */

static void test_missing_ranks_are_listed(void **state)
{
    (void)state;
    static const int placed[] = {0, 0, 0, 1, 1, 1, 2, 2, 2};
    w_begin(5);
    for (uint32_t i = 0; i < 9; i++) {
        if (i == 4 || i == 7)
            continue;
        rank[i] = w_process(placed[i], 1000);
        struct hrp_msg_join j = w_join_of("train", 0, i, 9);
        j.config.setup_timeout_ms = 5000;
        w_join_msg(rank[i], &j);
    }
    w_settle();
    w_pass(4900);
    for (uint32_t i = 0; i < 9; i++)
        assert_true(i == 4 || i == 7 || rank[i]->answers == 0);
    w_pass(400);
    for (uint32_t i = 0; i < 9; i++) {
        if (i == 4 || i == 7)
            continue;
        assert_int_equal(rank[i]->status, HRP_TIMEOUT);
        assert_string_equal(rank[i]->text, rank[0]->text);
    }
    HAS(rank[0]->text, "'train' (9 ranks) was not complete after 5 s: ranks 4, 7 did not join");
    HAS(rank[0]->text, "joined: 0-2 on node n0, 3, 5 on node n1, 6, 8 on node n2");
    assert_null(w_leftover());
    w_end();
}

static void test_root_starts_late(void **state)
{
    (void)state;
    w_begin(6);
    w_kill_node(0);
    w_settle();
    join_all("late", 0, (int[]){1, 2}, 2);
    w_pass(50000);
    assert_int_equal(rank[0]->answers, 0);
    w_start_node(0);
    w_pass(2000);
    all_joined(2);
    finish(2);
}

static void test_root_never_starts(void **state)
{
    (void)state;
    w_begin(7);
    w_kill_node(0);
    w_settle();
    join_all("never", 0, (int[]){1, 2}, 2);
    w_pass(60200);
    all_failed(0, 2, HRP_TIMEOUT, "its root daemon could not be reached for 60 s: connection refused");
    assert_null(w_leftover());
    w_end();
}

static void test_root_dies_while_collecting(void **state)
{
    (void)state;
    w_begin(8);
    for (uint32_t i = 0; i < 2; i++) {
        rank[i] = w_process(1 + (int)i, 1000);
        w_join(rank[i], "again", 0, i, 3);
    }
    w_settle();
    w_kill_node(0);
    w_pass(1000);
    w_start_node(0);
    w_pass(1500);
    rank[2] = w_process(3, 1000);
    w_join(rank[2], "again", 0, 2, 3);
    w_settle();
    all_joined(3);
    finish(3);
}

/* A deadline that passed long ago at the node must not give the root's set a whole new one. */
static void test_waiting_counts_from_the_first(void **state)
{
    (void)state;
    w_begin(9);
    w_kill_node(0);
    w_settle();
    rank[0] = w_process(1, 1000);
    w_join(rank[0], "w", 0, 0, 2);
    w_pass(55000);
    w_start_node(0);
    w_pass(5400);
    assert_int_equal(rank[0]->status, HRP_TIMEOUT);
    HAS(rank[0]->text, "rank 1 did not join");
    assert_null(w_leftover());
    w_end();
}

/* ---- refused ------------------------------------------------------------------------------------------------ */

static void test_duplicate_rank(void **state)
{
    (void)state;
    w_begin(10);
    join_all("dup", 0, (int[]){0, 1, 2}, 3);
    struct w_session *twin = w_process(2, 1000);
    w_join(twin, "dup", 0, 1, 3);
    w_settle();
    all_joined(3);
    w_pass(1200);
    assert_int_equal(twin->status, HRP_REFUSED);
    char want[128];
    snprintf(want, sizeof(want),
             "rank 1 of communicator 'dup' (3 ranks) is taken: process %d on node n1 holds it",
             rank[1]->pub.pid);
    HAS(twin->text, want);
    assert_int_equal(twin->slots, 0);
    /* The same while the set is not complete. */
    leave_all(3);
    rank[0] = w_process(0, 1000);
    w_join(rank[0], "dup2", 0, 0, 2);
    w_join(twin, "dup2", 0, 0, 2);
    w_pass(1200);
    assert_int_equal(twin->status, HRP_REFUSED);
    rank[1] = w_process(1, 1000);
    w_join(rank[1], "dup2", 0, 1, 2);
    w_settle();
    all_joined(2);
    finish(2);
}

static void test_wrong_world_size(void **state)
{
    (void)state;
    w_begin(11);
    rank[0] = w_process(0, 1000);
    struct w_session *odd = w_process(1, 1000);
    struct hrp_msg_join j = w_join_of("size", 0, 0, 4);
    j.config.setup_timeout_ms = 3000;
    w_join_msg(rank[0], &j);
    w_settle();
    w_join(odd, "size", 0, 1, 3);
    w_settle();
    assert_int_equal(odd->status, HRP_REFUSED);
    HAS(odd->text, "has world size 3, but rank 0");
    HAS(odd->text, "(4 ranks)");
    w_pass(3200);
    assert_int_equal(rank[0]->status, HRP_TIMEOUT);
    HAS(rank[0]->text, "ranks 1-3 did not join");
    HAS(rank[0]->text, "came with world size 3 and was refused");
    assert_null(w_leftover());
    w_end();
}

static void test_wrong_configuration(void **state)
{
    (void)state;
    for (int field = 0; field < 7; field++) {
        w_begin(12);
        rank[0] = w_process(0, 1000);
        rank[1] = w_process(1, 1000);
        w_join(rank[0], "cfg", 0, 0, 3);
        w_settle();
        struct hrp_msg_join j = w_join_of("cfg", 0, 1, 3);
        const char *name = "";
        switch (field) {
        case 0:
            j.config.op_timeout_ms = 5000;
            name = "'op timeout'";
            break;
        case 1:
            j.config.setup_timeout_ms = 5000;
            name = "'set-up timeout'";
            break;
        case 2:
            j.config.algo = HRP_ALGO_GATHER;
            name = "'algorithm'";
            break;
        case 3:
            j.config.reproducible = HRP_OFF;
            name = "'reproducible'";
            break;
        case 4:
            j.config.wire_f32 = HRP_ON;
            name = "'wire = f32'";
            break;
        case 5:
            j.config.transport = 2;
            name = "'transport'";
            break;
        case 6:
            j.config.require = HRP_REQUIRE_GDR;
            name = "'require'";
            break;
        }
        w_join_msg(rank[1], &j);
        w_settle();
        all_failed(0, 2, HRP_MISMATCH, name);
        if (field == 0) {
            HAS(rank[0]->text, "asks for 600 s");
            HAS(rank[0]->text, "for 5 s");
        }
        assert_null(w_leftover());
        w_end();
    }
    /* Saying the default in words is no difference. */
    w_begin(13);
    rank[0] = w_process(0, 1000);
    rank[1] = w_process(1, 1000);
    w_join(rank[0], "cfg", 0, 0, 2);
    struct hrp_msg_join j = w_join_of("cfg", 0, 1, 2);
    j.config.op_timeout_ms = 600000;
    j.config.reproducible = HRP_ON;
    w_join_msg(rank[1], &j);
    w_settle();
    all_joined(2);
    finish(2);
}

static void test_what_this_version_cannot(void **state)
{
    (void)state;
    w_begin(14);
    for (uint32_t i = 0; i < 2; i++) {
        struct hrp_msg_join j = w_join_of("req", 0, i, 2);
        j.config.require = HRP_REQUIRE_VERBS;
        rank[i] = w_process((int)i, 1000);
        w_join_msg(rank[i], &j);
    }
    w_settle();
    all_failed(0, 2, HRP_UNSUPPORTED, "require = verbs was asked for, but nodes n0 and n1 exchange over tcp");
    /* A node may require more than the root; its name is in the sentence. */
    w[1].d.cfg.require = HRP_REQUIRE_GDR;
    join_all("req", 0, (int[]){0, 1}, 2);
    w_settle();
    all_failed(0, 2, HRP_UNSUPPORTED,
               "cannot be made on node n1: require = gdr was asked for, but gpu = off");
    w[1].d.cfg.gpu = true;
    join_all("req", 0, (int[]){0, 1}, 2);
    w_settle();
    all_failed(0, 2, HRP_UNSUPPORTED, "require = gdr was asked for, but nodes n0 and n1 exchange over tcp");
    /* What contradicts itself, or the configuration of a node. */
    for (int how = 0; how < 3; how++) {
        w[1].d.cfg.require = how == 1 ? HRP_REQUIRE_VERBS : 0;
        w[1].d.cfg.transport = how == 2 ? 2 : 0;
        for (uint32_t i = 0; i < 2; i++) {
            struct hrp_msg_join j = w_join_of("contradiction", 0, i, 2);
            j.config.transport = HRD_WANT_TCP;
            j.config.require = how == 0 ? HRP_REQUIRE_VERBS : 0;
            w_join_msg(rank[i], &j);
        }
        w_settle();
        all_failed(0, 2, HRP_UNSUPPORTED,
                   how == 0 ? "transport = tcp was asked for, but so was require = verbs"
                   : how == 1
                       ? "on node n1: transport = tcp was asked for, but require = verbs stands in its"
                       : "on node n1: transport = tcp was asked for, but transport = verbs stands in its");
    }
    assert_null(w_leftover());
    w_end();
}

/* Plans of all nodes are alike, so what one of them does not know is used by none. */
static void test_older_node(void **state)
{
    (void)state;
    static const char *const name[2] = {"alike", "older"};
    for (int older = 0; older < 2; older++) {
        w_begin(16);
        w[2].behind = older ? HRP_PEER_MINOR - HRP_PEER_MINOR_EAGER_BLOCKS + 1 : 0;
        for (int i = 0; i < 3; i++) {
            rank[i] = w_process(i, 1000);
            struct hrp_msg_join j = w_join_of(name[older], 0, (uint32_t)i, 3);
            w_join_msg(rank[i], &j);
        }
        w_settle();
        all_joined(3);
        for (int i = 0; i < 3; i++)
            assert_int_equal(w[i].comm[0].eager_blocks, !older);
        w_end();
    }
}

/* Slots for two messages would take much of the arena of many nodes. */
static void test_many_nodes(void **state)
{
    (void)state;
    for (uint32_t n = HRD_EAGER_BLOCK_NODES; n <= HRD_EAGER_BLOCK_NODES + 1; n++) {
        w_begin(16);
        for (uint32_t i = 0; i < n; i++) {
            rank[i] = w_process((int)i, 1000);
            struct hrp_msg_join j = w_join_of("many", 0, i, n);
            w_join_msg(rank[i], &j);
        }
        w_settle();
        all_joined(n);
        for (uint32_t i = 0; i < n; i++)
            assert_int_equal(w[i].comm[0].eager_blocks, n <= HRD_EAGER_BLOCK_NODES);
        w_end();
    }
}

/* What the links are decides, for all ranks alike and at once. */
static void test_transport(void **state)
{
    (void)state;
    w_begin(16);
    for (int i = 0; i < 2; i++) {
        w[i].no_verbs = "port 1 of mlx5_0 is INIT";
        rank[i] = w_process(i, 1000);
        struct hrp_msg_join j = w_join_of("verbs", 0, (uint32_t)i, 2);
        j.config.transport = 2;
        w_join_msg(rank[i], &j);
    }
    w_settle();
    all_failed(0, 2, HRP_UNSUPPORTED, "transport = verbs was asked for");
    all_failed(0, 2, HRP_UNSUPPORTED, "port 1 of mlx5_0 is INIT");
    w[0].verbs = w[1].verbs = true;
    for (int i = 0; i < 2; i++) {
        struct hrp_msg_join j = w_join_of("tcp", 0, (uint32_t)i, 2);
        j.config.transport = 1;
        w_join_msg(rank[i], &j);
    }
    w_settle();
    all_joined(2); /* a link over tcp beside that over verbs */
    for (int i = 0; i < 2; i++) {
        w_die(rank[i]);
        rank[i] = w_process(i, 1000);
    }
    for (int i = 0; i < 2; i++) {
        struct hrp_msg_join j = w_join_of("both", 0, (uint32_t)i, 2);
        j.config.require = HRP_REQUIRE_VERBS;
        w_join_msg(rank[i], &j);
    }
    w_settle();
    all_joined(2);
    finish(2);
}

/* Service level and traffic class: the job's, or else the root node's, for all nodes alike. */
static void test_class(void **state)
{
    (void)state;
    w_begin(17);
    w[0].d.cfg.verbs_service_level = 2;
    w[1].d.cfg.verbs_service_level = 9;
    for (int i = 0; i < 2; i++) {
        rank[i] = w_process(i, 1000);
        struct hrp_msg_join j = w_join_of("class", 0, (uint32_t)i, 2);
        j.config.class_set = HRP_CLASS_TC;
        j.config.traffic_class = 106;
        w_join_msg(rank[i], &j);
    }
    w_settle();
    all_joined(2);
    for (int i = 0; i < 2; i++) {
        assert_true(w[i].comm[0].used);
        assert_int_equal(w[i].comm[0].config.service_level, 2);
        assert_int_equal(w[i].comm[0].config.traffic_class, 106);
    }
    for (int i = 0; i < 2; i++) {
        struct hrp_msg_join j = w_join_of("classes", 0, (uint32_t)i, 2);
        j.config.class_set = HRP_CLASS_SL;
        j.config.service_level = (uint8_t)(4 + i);
        w_join_msg(rank[i], &j);
    }
    w_settle();
    HAS(rank[1]->text, "'service level'");
    w_die(rank[0]);
    w_die(rank[1]);
    w_settle();
    assert_null(w_leftover());
    w_end();
}

static void test_no_slot(void **state)
{
    (void)state;
    w_begin(15);
    rank[0] = w_process(0, 1000);
    for (int i = 0; i < W_SLOTS; i++) {
        char name[8];
        snprintf(name, sizeof(name), "c%d", i);
        w_join(rank[0], name, 0, 0, 1);
        w_settle();
        assert_true(rank[0]->joined);
    }
    w_join(rank[0], "more", 0, 0, 1);
    assert_int_equal(rank[0]->status, HRP_RESOURCE);
    HAS(rank[0]->text, "max_comms");
    w_die(rank[0]);
    w_settle();
    assert_null(w_leftover());
    w_end();
}

/* ---- ids --------------------------------------------------------------------------------------------------- */

static struct hrp_msg_join id_join(int root_addr, const struct hrp_unique_id *id, uint32_t r, uint32_t n)
{
    struct hrp_msg_join j = {.rank = r, .nroots = 1};
    j.key.kind = HRP_KEY_ID;
    j.key.nranks = n;
    memcpy(j.key.name, id->nonce, 16);
    j.root[0] = w_addr(root_addr);
    return j;
}

static void test_unique_id(void **state)
{
    (void)state;
    w_begin(16);
    struct hrp_unique_id id = {.nonce = {1, 2, 3}};
    hrd_member_stamp_id(&w[2].d, &id);
    for (uint32_t i = 0; i < 3; i++) {
        struct hrp_msg_join j = id_join(2, &id, i, 3);
        rank[i] = w_process((int)i, 1000);
        w_join_msg(rank[i], &j);
    }
    w_settle();
    all_joined(3);
    finish(3);
}

/* The address in the id is one that this machine has too (docker0): nobody may wait at the wrong root. */
static void test_id_that_leads_to_myself(void **state)
{
    (void)state;
    w_begin(17);
    struct hrp_unique_id id = {.nonce = {1, 2, 3}};
    hrd_member_stamp_id(&w[2].d, &id);
    struct hrp_msg_join j = id_join(1, &id, 0, 2);
    rank[0] = w_process(1, 1000);
    w_join_msg(rank[0], &j);
    w_settle();
    all_failed(0, 1, HRP_REFUSED, "reached myself");
    assert_null(w_leftover());
    w_end();
}

static void test_id_of_a_daemon_that_restarted(void **state)
{
    (void)state;
    w_begin(18);
    struct hrp_unique_id id = {.nonce = {1, 2, 3}};
    hrd_member_stamp_id(&w[2].d, &id);
    w_kill_node(2);
    w_settle();
    w_start_node(2);
    struct hrp_msg_join j = id_join(2, &id, 0, 2);
    rank[0] = w_process(1, 1000);
    w_join_msg(rank[0], &j);
    w_settle();
    all_failed(0, 1, HRP_REFUSED, "another daemon");
    assert_null(w_leftover());
    w_end();
}

static void ask(int i)
{
    struct hrp_msg_join j = w_join_of("j", 0, (uint32_t)i, 3);
    hrd_member_joining(&w[i].d, &rank[i]->pub, W_JOINING, &j);
}

/* Whoever asks is told by number which ranks are missing, on other nodes than the root's too, and is answered once whatever
   becomes of the join. */
static void test_joins_that_take_long(void **state)
{
    (void)state;
    for (int end = 0; end < 2; end++) {
        w_begin(19);
        for (int i = 0; i < 2; i++) {
            rank[i] = w_process(i, 1000);
            w_join(rank[i], "j", 0, (uint32_t)i, 3);
        }
        w_settle();
        w_pass(10000);
        for (int i = 0; i < 2; i++) {
            ask(i);
            w_settle();
            assert_int_equal(rank[i]->told, 1);
            HAS(rank[i]->text, "waiting for rank 2 for 10 s");
        }
        HAS(rank[1]->text, "(said by the daemon of node n0, its root)");
        w_minor = HRP_PEER_MINOR_JOINING - 1;
        ask(1);
        assert_int_equal(rank[1]->told, 2);
        HAS(rank[1]->text, "rank 1 waits for other ranks; the daemon of node n0 knows which");
        w_minor = HRP_PEER_MINOR;
        ask(1);
        if (end == 0) {
            rank[2] = w_process(2, 1000);
            w_join(rank[2], "j", 0, 2, 3);
            w_settle();
            assert_int_equal(rank[1]->told, 3);
            all_joined(3);
            finish(3);
            continue;
        }
        w_kill_node(0);
        w_settle();
        assert_int_equal(rank[1]->told, 3);
        HAS(rank[1]->text, "rank 1 waits for its root daemon: node n0 closed the connection");
        w_die(rank[1]);
        w_settle();
        assert_null(w_leftover());
        w_end();
    }
}

/* Of a rank that is held, by whom: on the root's node and on another. */
static void test_rank_is_held(void **state)
{
    (void)state;
    for (int at = 0; at < 3; at++) {
        w_begin(20);
        for (int i = 0; i < 2; i++) {
            rank[i] = w_process(i, 1000);
            w_join(rank[i], "j", 0, (uint32_t)i, 3);
        }
        w_settle();
        struct w_session *twin = w_process(at, 1000);
        w_join(twin, "j", 0, 1, 3);
        w_settle();
        struct hrp_msg_join j = w_join_of("j", 0, 1, 3);
        hrd_member_joining(&w[at].d, &twin->pub, W_JOINING, &j);
        w_settle();
        assert_int_equal(twin->told, 1);
        char want[128];
        snprintf(want, sizeof(want), "(3 ranks): rank 1 is held by process %d on node n1", rank[1]->pub.pid);
        HAS(twin->text, want);
        w_pass(1200);
        assert_int_equal(twin->status, HRP_REFUSED);
        assert_int_equal(twin->told, 1);
        rank[2] = w_process(2, 1000);
        w_join(rank[2], "j", 0, 2, 3);
        w_settle();
        all_joined(3);
        finish(3);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_node),
        cmocka_unit_test(test_nodes_in_order_of_lowest_rank),
        cmocka_unit_test(test_two_comms_at_once),
        cmocka_unit_test(test_same_name_of_two_users),
        cmocka_unit_test(test_configuration_is_the_roots),
        cmocka_unit_test(test_missing_ranks_are_listed),
        cmocka_unit_test(test_root_starts_late),
        cmocka_unit_test(test_root_never_starts),
        cmocka_unit_test(test_root_dies_while_collecting),
        cmocka_unit_test(test_waiting_counts_from_the_first),
        cmocka_unit_test(test_duplicate_rank),
        cmocka_unit_test(test_wrong_world_size),
        cmocka_unit_test(test_wrong_configuration),
        cmocka_unit_test(test_what_this_version_cannot),
        cmocka_unit_test(test_older_node),
        cmocka_unit_test(test_many_nodes),
        cmocka_unit_test(test_transport),
        cmocka_unit_test(test_class),
        cmocka_unit_test(test_no_slot),
        cmocka_unit_test(test_unique_id),
        cmocka_unit_test(test_id_that_leads_to_myself),
        cmocka_unit_test(test_id_of_a_daemon_that_restarted),
        cmocka_unit_test(test_joins_that_take_long),
        cmocka_unit_test(test_rank_is_held),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
