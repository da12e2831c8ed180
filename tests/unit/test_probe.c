/* SPDX-License-Identifier: MIT */
/* Measuring a link: between two agents over sockets and over verbs, and against a peer that breaks the rules. */
#include "tests/sim/agents.h"

#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/transport_tcp.h"
#include "proto/data.h"
#include "proto/status.h"

#define PEER(n) ((n) + 100u) /* the number of node n at the others */

static void pause_ms(unsigned ms)
{
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000L}, NULL);
}

/* Waits for the next answer of node n. */
static void wait_probe(struct sim *s, uint32_t n)
{
    uint32_t before = s->node[n].probes;
    for (int i = 0; i < 30000 && s->node[n].probes == before; i++) {
        sim_events(s);
        pause_ms(1);
    }
    assert_int_equal(s->node[n].probes, before + 1);
}

static uint64_t arena_used(struct hrd_agent *a)
{
    hrd_agent_query(a, 1);
    for (int i = 0; i < 20000; i++) {
        for (struct hrd_event *ev = hrd_agent_take_events(a), *next; ev; ev = next) {
            next = ev->next;
            uint64_t used = ev->snapshot ? ev->snapshot->arena_used : 0;
            bool found = ev->type == HRD_EV_SNAPSHOT;
            hrd_snapshot_free(ev->snapshot);
            free(ev);
            if (found)
                return used;
        }
        pause_ms(1);
    }
    fail_msg("no snapshot");
    return 0;
}

static void measure(bool verbs)
{
    static const uint32_t map[2] = {0, 1};
    struct sim_options o = {.verbs = verbs, .agent.arena_bytes = 32 << 20};
    struct sim *s = calloc(1, sizeof(*s));
    sim_start(s, 2, 2, map, &o);
    uint64_t used = arena_used(s->node[1].agent);
    for (unsigned round = 0; round < 2; round++) {
        hrd_agent_probe(s->node[0].agent, PEER(1), 5 + round);
        wait_probe(s, 0);
        const struct hrd_probe_result *r = &s->node[0].probe;
        if (s->node[0].last_status != HRP_OK)
            fail_msg("%s", s->node[0].last_text);
        assert_string_equal(r->transport, verbs ? "verbs" : "tcp");
        assert_true(r->rtt_min_ns > 0 && r->rtt_min_ns <= r->rtt_ns);
        assert_true(r->bytes_per_s > 1000000);
        assert_true(r->nstreams > 0);
    }
    /* Both ends at the same time. */
    hrd_agent_probe(s->node[0].agent, PEER(1), 7);
    hrd_agent_probe(s->node[1].agent, PEER(0), 8);
    wait_probe(s, 0);
    if (s->node[1].probes == 0)
        wait_probe(s, 1);
    assert_int_equal(s->node[0].last_status, HRP_OK);
    assert_int_equal(s->node[1].last_status, HRP_OK);
    /* A communicator works on the same links afterwards, and what the probes took is free again. */
    assert_int_equal(arena_used(s->node[1].agent), used);
    assert_int_equal(sim_comm(s, 77, 0, &o), HRP_OK);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 100000};
    uint64_t op[2];
    for (uint32_t r = 0; r < 2; r++)
        op[r] = sim_post(s, r, 0, &sig, 0, 0);
    for (uint32_t r = 0; r < 2; r++)
        assert_int_equal(sim_wait(s, r, 0, op[r], NULL), HRP_OK);
    sim_stop(s);
    free(s);
}

static void test_sockets(void **state)
{
    (void)state;
    measure(false);
}

static void test_verbs(void **state)
{
    (void)state;
    measure(true);
}

/* ---- a peer of the test's own ------------------------------------------------------------------------------- */

struct alone {
    struct sim sim;
    int fd[2];
};

static struct alone *alone_start(void)
{
    static const uint32_t map[1] = {0};
    struct alone *v = calloc(1, sizeof(*v));
    struct sim_options o = {0};
    sim_start(&v->sim, 1, 1, map, &o);
    int theirs[2];
    for (int i = 0; i < 2; i++) {
        int pair[2];
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
        theirs[i] = pair[0];
        v->fd[i] = pair[1];
    }
    sim_link_tcp(v->sim.node[0].agent, 7, "evil", theirs, 2);
    return v;
}

static void alone_stop(struct alone *v)
{
    close(v->fd[0]);
    close(v->fd[1]);
    sim_stop(&v->sim);
    free(v);
}

static void say(struct alone *v, int stream, uint8_t type, uint64_t op, uint64_t slot, uint32_t len,
                uint8_t status)
{
    struct hrp_frame f = {
        .magic = HRP_FRAME_MAGIC, .type = type, .op = op, .slot = slot, .len = len, .status = status};
    /* In one piece: behind a frame that breaks the rules nobody reads on. */
    char out[sizeof(f) + 4096] = {0};
    assert_true(len <= 4096);
    memcpy(out, &f, sizeof(f));
    assert_int_equal(send(v->fd[stream], out, sizeof(f) + len, MSG_NOSIGNAL), sizeof(f) + len);
}

static struct hrp_frame hear(struct alone *v, int stream)
{
    struct hrp_frame f;
    struct pollfd pf = {.fd = v->fd[stream], .events = POLLIN};
    assert_int_equal(poll(&pf, 1, 20000), 1);
    assert_int_equal(recv(v->fd[stream], &f, sizeof(f), MSG_WAITALL), sizeof(f));
    assert_int_equal(hrp_frame_check(&f), 0);
    return f;
}

static void expect_lost(struct alone *v)
{
    for (int i = 0; i < 20000 && !v->sim.node[0].links_lost; i++) {
        sim_events(&v->sim);
        pause_ms(1);
    }
    assert_int_equal(v->sim.node[0].links_lost, 1);
}

/* The peer's own probe: what it may write to is what it was given, and nothing else. */
static void test_slot(void **state)
{
    (void)state;
    struct alone *v = alone_start();
    say(v, 0, HRP_FRAME_PROBE_OPEN, 0, 0, 0, HRP_OK);
    struct hrp_frame slot = hear(v, 0);
    assert_int_equal(slot.type, HRP_FRAME_PROBE_SLOT);
    assert_int_equal(slot.status, HRP_OK);
    say(v, 1, HRP_FRAME_DATA, 9, slot.slot + HRP_PROBE_BYTES - 100, 100, HRP_OK);
    struct hrp_frame pong = hear(v, 1);
    assert_int_equal(pong.type, HRP_FRAME_PROBE_PONG);
    assert_int_equal(pong.op, 9);
    /* Asked again it is the same one. */
    say(v, 0, HRP_FRAME_PROBE_OPEN, 0, 0, 0, HRP_OK);
    assert_int_equal(hear(v, 0).slot, slot.slot);
    say(v, 1, HRP_FRAME_DATA, 10, slot.slot + HRP_PROBE_BYTES - 99, 100, HRP_OK);
    expect_lost(v);
    alone_stop(v);

    v = alone_start();
    say(v, 0, HRP_FRAME_PROBE_OPEN, 0, 0, 0, HRP_OK);
    slot = hear(v, 0);
    say(v, 0, HRP_FRAME_PROBE_CLOSE, 0, 0, 0, HRP_OK);
    say(v, 0, HRP_FRAME_DATA, 1, slot.slot, 100, HRP_OK);
    expect_lost(v);
    alone_stop(v);

    v = alone_start(); /* never asked for one */
    say(v, 0, HRP_FRAME_DATA, 1, 0, 100, HRP_OK);
    expect_lost(v);
    alone_stop(v);
}

/* Answers that answer nothing. */
static void test_wrong_answers(void **state)
{
    (void)state;
    static const uint8_t types[] = {HRP_FRAME_PROBE_PONG, HRP_FRAME_PROBE_SLOT, HRP_FRAME_EAGER,
                                    HRP_FRAME_CREDIT};
    for (size_t i = 0; i < sizeof(types); i++) {
        struct alone *v = alone_start();
        say(v, 0, types[i], 1, 0, 0, HRP_OK);
        expect_lost(v);
        alone_stop(v);
    }
    /* In the middle of a probe: a second slot, and a PONG with a number that nobody sent. */
    for (int i = 0; i < 2; i++) {
        struct alone *v = alone_start();
        hrd_agent_probe(v->sim.node[0].agent, 7, 1);
        assert_int_equal(hear(v, 0).type, HRP_FRAME_PROBE_OPEN);
        say(v, 0, HRP_FRAME_PROBE_SLOT, 0, 4096, 0, HRP_OK);
        assert_int_equal(hear(v, 0).type, HRP_FRAME_PROBE_PING);
        if (i == 0)
            say(v, 0, HRP_FRAME_PROBE_SLOT, 0, 4096, 0, HRP_OK);
        else
            say(v, 0, HRP_FRAME_PROBE_PONG, 2, 0, 0, HRP_OK);
        wait_probe(&v->sim, 0);
        assert_int_equal(v->sim.node[0].last_status, HRP_PEER_LOST);
        expect_lost(v);
        alone_stop(v);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    struct alone *v = alone_start();
    struct sim_node *n = &v->sim.node[0];
    hrd_agent_probe(n->agent, 99, 1);
    wait_probe(&v->sim, 0);
    assert_int_equal(n->last_status, HRP_PEER_LOST);
    /* The peer has no memory for it. */
    hrd_agent_probe(n->agent, 7, 2);
    assert_int_equal(hear(v, 0).type, HRP_FRAME_PROBE_OPEN);
    say(v, 0, HRP_FRAME_PROBE_SLOT, 0, 0, 0, HRP_RESOURCE);
    wait_probe(&v->sim, 0);
    assert_int_equal(n->last_status, HRP_RESOURCE);
    assert_non_null(strstr(n->last_text, "that node"));
    /* One at a time; and the one under way ends with the link. */
    hrd_agent_probe(n->agent, 7, 3);
    assert_int_equal(hear(v, 0).type, HRP_FRAME_PROBE_OPEN);
    hrd_agent_probe(n->agent, 7, 4);
    wait_probe(&v->sim, 0);
    assert_int_equal(n->last_status, HRP_RESOURCE);
    assert_non_null(strstr(n->last_text, "under way"));
    shutdown(v->fd[0], SHUT_RDWR);
    wait_probe(&v->sim, 0);
    assert_int_equal(n->last_status, HRP_PEER_LOST);
    alone_stop(v);
}

/* The link ends while data is queued on it. */
static void test_end_in_the_middle(void **state)
{
    (void)state;
    struct alone *v = alone_start();
    hrd_agent_probe(v->sim.node[0].agent, 7, 1);
    assert_int_equal(hear(v, 0).type, HRP_FRAME_PROBE_OPEN);
    say(v, 0, HRP_FRAME_PROBE_SLOT, 0, 4096, 0, HRP_OK);
    for (struct hrp_frame f = hear(v, 0); f.type == HRP_FRAME_PROBE_PING; f = hear(v, 0)) {
        say(v, 0, HRP_FRAME_PROBE_PONG, f.op, 0, 0, HRP_OK);
        if (f.op == 64)
            break;
    }
    struct hrp_frame data = hear(v, 0);
    assert_int_equal(data.type, HRP_FRAME_DATA);
    assert_true(data.slot >= 4096 && data.slot + data.len <= 4096 + HRP_PROBE_BYTES);
    shutdown(v->fd[1], SHUT_RDWR);
    wait_probe(&v->sim, 0);
    assert_int_equal(v->sim.node[0].last_status, HRP_PEER_LOST);
    alone_stop(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sockets),  cmocka_unit_test(test_verbs),
        cmocka_unit_test(test_slot),     cmocka_unit_test(test_wrong_answers),
        cmocka_unit_test(test_refusals), cmocka_unit_test(test_end_in_the_middle),
    };
    int failed = cmocka_run_group_tests_name("the agent's thread", tests, NULL, NULL);
    sim_tcp_io = hrd_tcp_io_new(2, 0);
    failed += cmocka_run_group_tests_name("I/O threads", tests, NULL, NULL);
    hrd_tcp_io_free(sim_tcp_io);
    return failed;
}
