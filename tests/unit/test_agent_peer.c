/* SPDX-License-Identifier: MIT */
/* A peer that breaks the protocol on a data stream loses its link with a reason; nothing else notices. */
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

#include "daemon/plan.h"
#include "daemon/transport_tcp.h"
#include "proto/data.h"
#include "proto/status.h"

#define COMM 9u
#define COUNT 100000u

struct victim {
    struct sim sim; /* one node with one rank */
    int fd[2];      /* the test's end of its two streams */
};

static void victim_start(struct victim *v)
{
    static const uint32_t map[1] = {0};
    struct sim_options o = {0};
    sim_start(&v->sim, 1, 1, map, &o);
    int theirs[2];
    for (int i = 0; i < 2; i++) {
        int pair[2];
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
        theirs[i] = pair[0];
        v->fd[i] = pair[1];
    }
    struct hrd_agent *a = v->sim.node[0].agent;
    sim_link_tcp(a, 7, "evil", theirs, 2);
    static const uint32_t nodes[2] = {0, 1}, peers[2] = {HRD_NO_PEER, 7};
    static const char *const names[2] = {"good", "evil"};
    struct hrd_comm_rank local = {.rank = 0, .slot = 0, .sid = 1, .pid = 1};
    struct hrd_comm_spec spec = {.comm = COMM,
                                 .nranks = 2,
                                 .nnodes = 2,
                                 .nlocal = 1,
                                 .node_of_rank = nodes,
                                 .peer_of_node = peers,
                                 .node_name = names,
                                 .local = &local,
                                 .eager_limit = 4096,
                                 .unit_bytes = 256 << 10,
                                 .unit_min_bytes = 64 << 10,
                                 .latency_ns = 1000,
                                 .bandwidth = 1000000000};
    hrd_agent_comm_add(a, &spec);
    for (int i = 0; i < 20000 && !v->sim.node[0].comms_ready; i++) {
        sim_events(&v->sim);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    assert_int_equal(v->sim.node[0].comms_ready, 1);
    assert_int_equal(v->sim.node[0].last_status, HRP_OK);
}

static void victim_stop(struct victim *v)
{
    for (int i = 0; i < 2; i++)
        close(v->fd[i]);
    sim_stop(&v->sim);
}

static void send_all(int fd, const void *p, size_t n)
{
    const char *at = p;
    while (n > 0) {
        ssize_t k = send(fd, at, n, MSG_NOSIGNAL);
        if (k < 0 && errno == EAGAIN) {
            struct pollfd pf = {.fd = fd, .events = POLLOUT};
            assert_int_equal(poll(&pf, 1, 10000), 1);
            continue;
        }
        if (k < 0)
            return; /* the victim hung up, which is what it should do */
        at += k;
        n -= (size_t)k;
    }
}

static struct hrp_frame frame(uint8_t type)
{
    return (struct hrp_frame){.magic = HRP_FRAME_MAGIC,
                              .type = type,
                              .comm = COMM,
                              .op = 1,
                              .sig = {.coll = HRP_ALL_REDUCE, .count = COUNT}};
}

/* Reads frames of the victim until a CREDIT comes. */
static struct hrp_frame wait_credit(struct victim *v)
{
    for (;;) {
        struct hrp_frame f;
        struct pollfd pf = {.fd = v->fd[0], .events = POLLIN};
        assert_int_equal(poll(&pf, 1, 10000), 1);
        assert_int_equal(recv(v->fd[0], &f, sizeof(f), MSG_WAITALL), sizeof(f));
        assert_int_equal(hrp_frame_check(&f), 0);
        if (f.type == HRP_FRAME_CREDIT)
            return f;
        assert_int_equal(f.len, 0);
    }
}

/* The comm failed because of the link, the session still answers, and a comm of its own node works. */
static void expect_link_lost(struct victim *v, const char *words)
{
    struct sim_node *n = &v->sim.node[0];
    for (int i = 0; i < 50000 && !n->links_lost; i++) {
        sim_events(&v->sim);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    assert_int_equal(n->links_lost, 1);
    assert_int_equal(n->comms_failed, 1);
    assert_int_equal(n->last_status, HRP_PEER_LOST);
    if (!strstr(n->last_text, words) || !strstr(n->last_text, "evil"))
        fail_msg("'%s' does not say '%s' about evil", n->last_text, words);
    struct sim_options o = {0};
    assert_int_equal(sim_comm(&v->sim, 1234, 1, &o), HRP_OK);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 10};
    assert_int_equal(sim_wait(&v->sim, 0, 1, sim_post(&v->sim, 0, 1, &sig, 0, 0), NULL), HRP_OK);
}

enum kind {
    BAD_MAGIC,
    BAD_TYPE,
    RESERVED,
    DATA_WITHOUT_CREDIT,
    WRONG_SLOT,
    TOO_LONG,
    WRONG_TAG,
    TWICE,
    WRONG_UNIT,
    OTHER_COMM,
    EAGER_TOO_LARGE,
    EAGER_TOO_EARLY,
    EAGER_ON_TWO,
    EAGER_LATER,
    TEXT_TOO_LONG,
    TEXT_ON_STREAM_1,
    BEHIND_MARK,
    CLOSED,
    CLOSED_IN_FRAME,
    NKINDS,
};

static const char *const words[NKINDS] = {
    "malformed", "malformed", "malformed",       "not granted", "wrong slot", "wrong length", "tag",
    "twice",     "granted",   "exist",           "eager_limit", "slot",       "in use",       "later",
    "malformed", "stream 0",  "behind the mark", "closed",      "closed"};

static void misbehave(struct victim *v, enum kind kind)
{
    char *payload = calloc(1, 1 << 20);
    struct hrp_frame f = frame(HRP_FRAME_DATA);
    int stream = 1;
    if (kind >= WRONG_SLOT && kind <= WRONG_UNIT) {
        struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = COUNT};
        sim_post(&v->sim, 0, 0, &sig, 0, 0);
        struct hrp_frame credit = wait_credit(v);
        f.slot = credit.slot;
        f.unit = credit.unit;
        f.sig = credit.sig;
        f.len = COUNT * 4 / 4 / 2 / 64 *
                64; /* a quarter of the op a unit, half of it a block, if planned like that */
    }
    switch (kind) {
    case BAD_MAGIC:
        f.magic++;
        break;
    case BAD_TYPE:
        f.type = HRP_NFRAMES;
        break;
    case RESERVED:
        f.reserved[1] = 1;
        break;
    case DATA_WITHOUT_CREDIT:
        f.len = 100;
        break;
    case WRONG_SLOT:
        f.slot += 64;
        break;
    case TOO_LONG:
        f.len = 1 << 20;
        break;
    case WRONG_TAG:
        f.tag = 17;
        break;
    case WRONG_UNIT:
        f.unit = 100;
        break;
    case OTHER_COMM:
        f.comm++;
        f.len = 64;
        break;
    case EAGER_TOO_LARGE:
        f.type = HRP_FRAME_EAGER;
        f.len = 4097;
        break;
    case EAGER_TOO_EARLY:
        f.type = HRP_FRAME_EAGER;
        f.op = HRP_EAGER_SLOTS + 1;
        f.len = 64;
        break;
    case EAGER_ON_TWO: /* half of it on the other stream */
        f.type = HRP_FRAME_EAGER;
        f.len = 64;
        send_all(v->fd[0], &f, sizeof(f));
        send_all(v->fd[0], payload, 32);
        break;
    case EAGER_LATER: /* an answer to nothing */
        f.type = HRP_FRAME_EAGER;
        f.tag = 1;
        f.len = 64;
        break;
    case TEXT_TOO_LONG:
        f.type = HRP_FRAME_COMM_FAIL;
        f.len = HRP_FRAME_TEXT + 1;
        break;
    case TEXT_ON_STREAM_1:
        f.type = HRP_FRAME_COMM_FAIL;
        f.len = 64;
        break;
    case BEHIND_MARK:
        f.type = HRP_FRAME_COMM_MARK;
        send_all(v->fd[1], &f, sizeof(f));
        f.type = HRP_FRAME_EAGER;
        f.len = 64;
        break;
    case CLOSED:
        shutdown(v->fd[0], SHUT_RDWR);
        break;
    case CLOSED_IN_FRAME:
        f.type = HRP_FRAME_EAGER;
        f.len = 1000;
        send_all(v->fd[0], &f, sizeof(f));
        send_all(v->fd[0], payload, 500);
        shutdown(v->fd[0], SHUT_RDWR);
        break;
    default:
        break;
    }
    if (kind != CLOSED && kind != CLOSED_IN_FRAME)
        for (int i = 0; i < (kind == TWICE ? 2 : 1); i++) {
            send_all(v->fd[stream], &f, sizeof(f));
            send_all(v->fd[stream], payload, f.len);
        }
    free(payload);
}

static void test_protocol_errors(void **state)
{
    (void)state;
    for (enum kind k = 0; k < NKINDS; k++) {
        struct victim *v = calloc(1, sizeof(*v));
        victim_start(v);
        misbehave(v, k);
        if (k == TWICE) { /* lengths are the plan's affair: the first may be refused as too short already */
            struct sim_node *n = &v->sim.node[0];
            for (int i = 0; i < 50000 && !n->links_lost; i++) {
                sim_events(&v->sim);
                nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
            }
            assert_int_equal(n->links_lost, 1);
        } else {
            expect_link_lost(v, words[k]);
        }
        victim_stop(v);
        free(v);
    }
}

static void test_random_bytes(void **state)
{
    (void)state;
    for (int round = 0; round < 40; round++) {
        struct victim *v = calloc(1, sizeof(*v));
        victim_start(v);
        char noise[4096];
        for (size_t i = 0; i < sizeof(noise); i++)
            noise[i] = (char)rand();
        if (round % 2) { /* a right header in front, so that the noise is taken for more than a wrong magic */
            struct hrp_frame f = frame((uint8_t)(1 + rand() % (HRP_NFRAMES - 1)));
            f.len = (uint32_t)rand() % 4096;
            f.tag = (uint16_t)(rand() % 4);
            f.op = (uint64_t)(rand() % 20);
            send_all(v->fd[0], &f, sizeof(f));
        }
        send_all(v->fd[0], noise, sizeof(noise));
        shutdown(v->fd[0], SHUT_WR);
        struct sim_node *n = &v->sim.node[0];
        for (int i = 0; i < 50000 && !n->links_lost; i++) {
            sim_events(&v->sim);
            nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
        }
        assert_int_equal(n->links_lost, 1);
        victim_stop(v);
        free(v);
    }
}

static void wait_count(struct victim *v, const uint32_t *count)
{
    for (int i = 0; i < 50000 && !*count; i++) {
        sim_events(&v->sim);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    assert_int_equal(*count, 1);
}

/* Bytes of the block that the other node sends first, planned as the agent does it. */
static uint32_t block_bytes(const struct hrp_sig *sig, uint32_t unit)
{
    static uint32_t nodes[2] = {0, 1}, ranks[2] = {1, 1};
    struct hrd_plan_env env = {.nnodes = 2,
                               .nranks = 2,
                               .node_of_rank = nodes,
                               .ranks_on_node = ranks,
                               .reproducible = true,
                               .eager_limit = 4096,
                               .unit_bytes = 256 << 10,
                               .unit_min_bytes = 64 << 10,
                               .latency_ns = 1000,
                               .bandwidth = 1000000000};
    struct hrd_plan plan;
    assert_int_equal(hrd_plan_op(&env, sig, &plan, NULL, 0), 0);
    return (uint32_t)hrd_plan_block_elems(&env, sig, &plan, unit, 0) * 4;
}

/* A block that a stream is bringing does not come on another as well: its slot would be another's while the last bytes come. */
static void test_block_on_two_streams(void **state)
{
    (void)state;
    struct victim *v = calloc(1, sizeof(*v));
    victim_start(v);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = COUNT};
    sim_post(&v->sim, 0, 0, &sig, 0, 0);
    struct hrp_frame credit = wait_credit(v), f = frame(HRP_FRAME_DATA);
    char *payload = calloc(1, 1 << 20);
    f.slot = credit.slot;
    f.unit = credit.unit;
    f.sig = credit.sig;
    f.len = block_bytes(&sig, credit.unit);
    for (int stream = 0; stream < 2; stream++) {
        send_all(v->fd[stream], &f, sizeof(f));
        send_all(v->fd[stream], payload, f.len / 2);
    }
    expect_link_lost(v, "the same block twice");
    free(payload);
    victim_stop(v);
    free(v);
}

/* A mark says something about its own stream: two on one do not stand for the other. */
static void test_marks_are_of_their_stream(void **state)
{
    (void)state;
    struct victim *v = calloc(1, sizeof(*v));
    victim_start(v);
    struct hrd_agent *a = v->sim.node[0].agent;
    hrd_agent_comm_fail(a, COMM, HRP_ABORTED, "the test aborts it", true);
    hrd_agent_comm_leave(a, COMM, 0);
    struct hrp_frame f = frame(HRP_FRAME_COMM_MARK);
    for (int i = 0; i < 4; i++)
        send_all(v->fd[0], &f, sizeof(f));
    for (int i = 0; i < 1000; i++) {
        sim_events(&v->sim);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    assert_int_equal(v->sim.node[0].comms_gone, 0);
    send_all(v->fd[1], &f, sizeof(f));
    wait_count(v, &v->sim.node[0].comms_gone);
    victim_stop(v);
    free(v);
}

/* A sentence that arrives in two parts, with a mark on the other stream in between, is not cut; a failure that says
   "ok" is one all the same. */
static void test_sentence_in_two_parts(void **state)
{
    (void)state;
    struct victim *v = calloc(1, sizeof(*v));
    victim_start(v);
    static const char text[] = "rank 1 called hclient_comm_abort";
    struct hrp_frame f = frame(HRP_FRAME_COMM_FAIL), mark = frame(HRP_FRAME_OP_MARK);
    f.status = HRP_OK;
    f.len = sizeof(text) - 1;
    send_all(v->fd[0], &f, sizeof(f));
    send_all(v->fd[0], text, 10);
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    send_all(v->fd[1], &mark, sizeof(mark));
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    send_all(v->fd[0], text + 10, sizeof(text) - 1 - 10);
    wait_count(v, &v->sim.node[0].comms_failed);
    assert_string_equal(v->sim.node[0].last_text, text);
    assert_int_equal(v->sim.node[0].last_status, HRP_PROTOCOL);
    victim_stop(v);
    free(v);
}

/* Asks the agent until the comm has sent that much. */
static void wait_sent(struct victim *v, uint64_t bytes)
{
    struct hrd_agent *a = v->sim.node[0].agent;
    for (int i = 0; i < 50000; i++) {
        uint64_t sent = 0;
        hrd_agent_query(a, 1);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
        for (struct hrd_event *ev = hrd_agent_take_events(a), *next; ev; ev = next) {
            next = ev->next;
            if (ev->type == HRD_EV_SNAPSHOT && ev->snapshot->ncomms)
                sent = ev->snapshot->comm[0].tx_bytes;
            hrd_snapshot_free(ev->snapshot);
            free(ev);
        }
        if (sent >= bytes)
            return;
    }
    fail_msg("the data was not sent");
}

/* A peer that reads nothing is given up while frames for it wait in all streams and the comm waits for its sends: what
   their end sets going must not touch the link that is being closed (seen by the address sanitizer). */
static void test_closed_with_frames_waiting(void **state)
{
    (void)state;
    struct victim *v = calloc(1, sizeof(*v));
    victim_start(v);
    struct hrp_frame f = {.magic = HRP_FRAME_MAGIC, .type = HRP_FRAME_COMM_FAIL, .status = HRP_ABORTED};
    for (uint32_t i = 0; i < 3000; i++) { /* each is answered on every stream */
        f.comm = 1000 + i;
        send_all(v->fd[0], &f, sizeof(f));
    }
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = COUNT};
    sim_post(&v->sim, 0, 0, &sig, 0, 0);
    f = frame(HRP_FRAME_CREDIT);
    send_all(v->fd[0], &f, sizeof(f));
    wait_sent(v, COUNT / 2);
    struct hrd_agent *a = v->sim.node[0].agent;
    hrd_agent_comm_fail(a, COMM, HRP_ABORTED, "the test aborts it", true);
    hrd_agent_link_down(a, 7, "node evil was silent for 10 s");
    for (int i = 0; i < 50000 && !v->sim.node[0].links_lost; i++) {
        sim_events(&v->sim);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    assert_int_equal(v->sim.node[0].links_lost, 1);
    victim_stop(v);
    free(v);
}

/* The same with the whole agent. */
static void test_stopped_with_frames_waiting(void **state)
{
    (void)state;
    struct victim *v = calloc(1, sizeof(*v));
    victim_start(v);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 1500000};
    sim_post(&v->sim, 0, 0, &sig, 0, 0);
    struct hrp_frame f = frame(HRP_FRAME_CREDIT);
    f.sig.count = sig.count;
    for (f.unit = 0; f.unit < 4; f.unit++)
        send_all(v->fd[0], &f, sizeof(f));
    wait_sent(v, 4 * 100000);
    victim_stop(v);
    free(v);
}

int main(void)
{
    srand((unsigned)time(NULL));
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_protocol_errors),
        cmocka_unit_test(test_random_bytes),
        cmocka_unit_test(test_block_on_two_streams),
        cmocka_unit_test(test_marks_are_of_their_stream),
        cmocka_unit_test(test_sentence_in_two_parts),
        cmocka_unit_test(test_closed_with_frames_waiting),
        cmocka_unit_test(test_stopped_with_frames_waiting),
    };
    int failed = cmocka_run_group_tests_name("the agent's thread", tests, NULL, NULL);
    sim_tcp_io = hrd_tcp_io_new(2, 0);
    failed += cmocka_run_group_tests_name("I/O threads", tests, NULL, NULL);
    hrd_tcp_io_free(sim_tcp_io);
    return failed;
}
