/* SPDX-License-Identifier: MIT */
/* The verbs transport against devices that fail and a peer that breaks the protocol: the link ends with a reason, and
   nothing else notices. */
#include "tests/unit/verbs_nodes.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "proto/data.h"
#include "proto/status.h"

#define COUNT 100000u
#define EAGER_COUNT 65536u /* 256 KiB: the largest eager_limit */

/* ---- two real agents ---------------------------------------------------------------------------------------------- */

/* One all_reduce; what rank 0 was told is in text. */
static uint32_t all_reduce(struct sim *s, uint64_t count, char *text)
{
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = count, .redop = HRP_SUM};
    uint64_t op[2];
    uint32_t status[2];
    float *in[2];
    for (uint32_t r = 0; r < 2; r++) {
        in[r] = (float *)(void *)s->rank[r].pool;
        for (uint64_t i = 0; i < count; i++)
            in[r][i] = (float)(i % 1000 + r);
        op[r] = sim_post(s, r, 0, &sig, 0, 0);
    }
    for (uint32_t r = 2; r-- > 0;)
        status[r] = sim_wait(s, r, 0, op[r], text);
    for (uint32_t r = 0; r < 2 && status[0] == HRP_OK && status[1] == HRP_OK; r++)
        for (uint64_t i = 0; i < count; i++)
            if (in[r][i] != (float)(2 * (i % 1000) + 1))
                fail_msg("rank %u element %llu", r, (unsigned long long)i);
    return status[0];
}

static void fails_with(struct sim *s, uint64_t count, uint32_t status, const char *words)
{
    char text[HRP_OP_TEXT + 1];
    assert_int_equal(all_reduce(s, count, text), status);
    for (int i = 0; i < 50000; i++) {
        sim_events(s);
        for (int n = 0; n < 2; n++)
            if (strstr(s->node[n].last_text, words) || strstr(s->node[n].interrupted, words))
                return;
        nap();
    }
    fail_msg("neither '%s' nor '%s' says '%s'", s->node[0].last_text, s->node[1].last_text, words);
}

static void failed_with(struct sim *s, uint32_t status, const char *words)
{
    fails_with(s, COUNT, status, words);
}

static void test_wc_errors(void **state)
{
    (void)state;
    static const struct {
        enum ibv_wc_status status;
        const char *words;
    } row[] = {{IBV_WC_LOC_QP_OP_ERR, "LOC_QP_OP_ERR"},
               {IBV_WC_RETRY_EXC_ERR, "RETRY_EXC_ERR (status 12, vendor 0x81) on queue pair"},
               {IBV_WC_REM_ACCESS_ERR, "REM_ACCESS_ERR"},
               {IBV_WC_LOC_PROT_ERR, "memory was used that is not registered"},
               {IBV_WC_RNR_RETRY_EXC_ERR, "broke the flow control"},
               {IBV_WC_FATAL_ERR, "kernel log"}};
    for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
        struct sim_options o = {0};
        char text[HRP_OP_TEXT + 1];
        struct sim *s = two_nodes(&o);
        assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
        assert_int_equal(all_reduce(s, COUNT, text), HRP_OK);
        fake_verbs_wc_error(row[i].status, 1);
        failed_with(s, HRP_PEER_LOST, row[i].words);
        failed_with(s, HRP_PEER_LOST,
                    "verbs over fake0 port 1, RoCE v2, GID 3 (10.0.0.1), MTU 4096 to 10.0.0.1");
        stop(s);
    }
}

static void test_calls_fail(void **state)
{
    (void)state;
    static const struct {
        enum fake_call call;
        int err;
        const char *words;
    } row[] = {{FAKE_POST_SEND, ENOMEM, "posting a send failed on fake0: Cannot allocate memory"},
               {FAKE_POST_SEND, EIO, "fake0 reports a fatal error (DEVICE_FATAL)"}, /* not what came of it */
               {FAKE_POST_RECV, ENOMEM, "posting a receive failed on fake0"},
               {FAKE_NOTIFY, ENOMEM, "arming the completion queue failed"}};
    for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
        struct sim_options o = {0};
        struct sim *s = two_nodes(&o);
        assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
        fake_verbs_fail(row[i].call, 0, row[i].err, 0);
        failed_with(s, HRP_PEER_LOST, row[i].words);
        stop(s);
    }
}

/* The device refuses work in the middle of a frame that takes 61 messages: what is left of it finds no room to run over. */
static void test_post_fails_in_a_frame(void **state)
{
    (void)state;
    struct sim_options o = {.eager_limit = 256 << 10, .comm = {.algo = HRP_ALGO_GATHER}};
    for (unsigned after = 0; after < 4; after++) {
        struct sim *s = two_nodes(&o);
        char text[HRP_OP_TEXT + 1];
        assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
        assert_int_equal(all_reduce(s, EAGER_COUNT, text), HRP_OK);
        fake_verbs_fail(FAKE_POST_SEND, after, ENOMEM, 1);
        fails_with(s, EAGER_COUNT, HRP_PEER_LOST, "posting a send failed on fake0");
        stop(s);
    }
}

static void test_events(void **state)
{
    (void)state;
    static const struct {
        enum ibv_event_type type;
        const char *words;
    } row[] = {{IBV_EVENT_DEVICE_FATAL, "DEVICE_FATAL"},
               {IBV_EVENT_QP_FATAL, "QP_FATAL"},
               {IBV_EVENT_CQ_ERR, "CQ_ERR"},
               {IBV_EVENT_QP_ACCESS_ERR, "the peer wrote where it may not"}};
    for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
        struct sim_options o = {0};
        struct sim *s = two_nodes(&o);
        assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
        fake_verbs_event(row[i].type, 1);
        failed_with(s, HRP_PEER_LOST, row[i].words);
        stop(s);
    }
    /* These harm nobody: another port, an address that is not ours, a new subnet manager. */
    struct sim_options o = {0};
    char text[HRP_OP_TEXT + 1];
    struct sim *s = two_nodes(&o);
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    fake_verbs_event(IBV_EVENT_PORT_ERR, 2);
    fake_verbs_event(IBV_EVENT_GID_CHANGE, 1);
    fake_verbs_event(IBV_EVENT_LID_CHANGE, 1);
    fake_verbs_event(IBV_EVENT_SM_CHANGE, 1);
    fake_verbs_event(IBV_EVENT_COMM_EST, 1);
    assert_int_equal(all_reduce(s, COUNT, text), HRP_OK);
    stop(s);
}

/* A flap between two ops costs nothing; one that outlives the retries is named. */
static void test_port(void **state)
{
    (void)state;
    struct sim_options o = {0};
    char text[HRP_OP_TEXT + 1];
    struct sim *s = two_nodes(&o);
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    fake_verbs_port(false);
    fake_verbs_port(true);
    assert_int_equal(all_reduce(s, COUNT, text), HRP_OK);
    fake_verbs_port(false);
    failed_with(s, HRP_PEER_LOST, "port 1 of fake0 went down");
    stop(s);
}

static void test_cq_overflow(void **state)
{
    (void)state;
    struct sim_options o = {0};
    struct sim *s;
    static const uint32_t map[2] = {0, 1};
    s = calloc(1, sizeof(*s));
    o.verbs = false; /* links by hand: with queues too small for them */
    sim_start(s, 2, 2, map, &(struct sim_options){.verbs = false});
    hrd_agent_link_down(s->node[0].agent, 101, "no sockets");
    hrd_agent_link_down(s->node[1].agent, 100, "no sockets");
    fake_verbs_plain();
    fake_verbs_cq_limit(6);
    struct hrd_verbs_conn *a, *b;
    void *arena[2];
    uint64_t len[2];
    for (int i = 0; i < 2; i++)
        hrd_agent_arena(s->node[i].agent, &arena[i], &len[i]);
    fake_verbs_pair(&a, arena[0], len[0], &b, arena[1], len[1], 1);
    for (int i = 0; i < 50000 && s->node[0].links_lost + s->node[1].links_lost < 2; i++)
        events(s, 1);
    s->node[0].links_lost = s->node[1].links_lost = 0;
    hrd_agent_link_up(s->node[0].agent, 101, "n1", &hrd_transport_verbs, &a->base);
    hrd_agent_link_up(s->node[1].agent, 100, "n0", &hrd_transport_verbs, &b->base);
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    fake_verbs_hold(true);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 100, .redop = HRP_SUM};
    for (int k = 0; k < 12; k++)
        for (uint32_t r = 0; r < 2; r++)
            sim_post(s, r, 0, &sig, 0, 4096);
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    fake_verbs_hold(false); /* all at once */
    bool said = false;
    for (int i = 0; i < 50000 && !said; i++) {
        sim_events(s);
        nap();
        said = strstr(s->node[0].last_text, "overran") || strstr(s->node[1].last_text, "overran");
    }
    if (!said)
        fail_msg("'%s', '%s'", s->node[0].last_text, s->node[1].last_text);
    stop(s);
}

/* A device that keeps every send: closing the link ends them all, and only then are payloads let go. */
static void test_close_in_flight(void **state)
{
    (void)state;
    struct sim_options o = {0};
    struct sim *s = two_nodes(&o);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = COUNT, .redop = HRP_SUM};
    char text[HRP_OP_TEXT + 1];
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_OK);
    fake_verbs_hold(true);
    for (uint32_t r = 0; r < 2; r++)
        sim_post(s, r, 0, &sig, 0, 0);
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    hrd_agent_link_down(s->node[0].agent, 101, "node n1 was silent for 10 s");
    hrd_agent_link_down(s->node[1].agent, 100, "node n0 was silent for 10 s");
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(sim_wait(s, r, 0, 1, text), HRP_PEER_LOST);
        assert_non_null(strstr(text, "was silent"));
    }
    stop(s);
}

/* No memory region for a peer: the comm is refused in words, the link stays. */
static void test_no_regions(void **state)
{
    (void)state;
    struct sim_options o = {0};
    char text[HRP_OP_TEXT + 1];
    struct sim *s = two_nodes(&o);
    fake_verbs_fail(FAKE_REG_MR, 0, ENOMEM, 0);
    assert_int_equal(sim_comm(s, COMM, 0, &o), HRP_RESOURCE);
    fake_verbs_fail(FAKE_REG_MR, 0, 0, 0);
    assert_int_equal(sim_comm(s, COMM + 1, 0, &o), HRP_OK);
    assert_int_equal(all_reduce(s, COUNT, text), HRP_OK);
    stop(s);
}

/* ---- one agent and a peer that does not keep to the rules -------------------------------------------------------- */

/* Node 0 has a link with the evil one, and one with node 1, over which another communicator has an op in flight. */
struct victim {
    struct sim sim;
    uint64_t other_op[2];
    struct hrd_verbs_conn *evil;
    char *arena;
    struct hrd_vregion region[64]; /* that the victim announced */
    unsigned nregions;
    uint32_t send_key; /* of the victim's arena, for its own sends only */
};

#define OTHER 1234u
#define OTHER_IN (UINT64_C(4) << 20)
#define OTHER_OUT (UINT64_C(6) << 20)

static void other_post(struct victim *v, uint32_t r)
{
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = COUNT, .redop = HRP_SUM};
    float *in = (float *)(void *)(v->sim.rank[r].pool + OTHER_IN);
    for (uint64_t i = 0; i < COUNT; i++)
        in[i] = number(r, i, v->sim.rank[r].posted[1]);
    memset(v->sim.rank[r].pool + OTHER_OUT - GUARD, 0x5a, COUNT * 4 + 2 * GUARD);
    v->other_op[r] = sim_post(&v->sim, r, 1, &sig, OTHER_IN, OTHER_OUT);
}

static void other_check(struct victim *v)
{
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(sim_wait(&v->sim, r, 1, v->other_op[r], NULL), HRP_OK);
        const char *raw = v->sim.rank[r].pool + OTHER_OUT;
        const float *out = (const float *)(const void *)raw;
        uint64_t salt = v->other_op[r] - 1;
        for (uint64_t i = 0; i < COUNT; i++)
            if (out[i] != number(0, i, salt) + number(1, i, salt))
                fail_msg("the other communicator: rank %u element %llu", r, (unsigned long long)i);
        for (unsigned g = 1; g <= GUARD; g++)
            assert_true(raw[-(int)g] == 0x5a && raw[COUNT * 4 + g - 1] == 0x5a);
    }
}

static void victim_start(struct victim *v)
{
    static const uint32_t map[2] = {0, 1}, nodes[2] = {0, 1}, peers[2] = {HRD_NO_PEER, 7};
    static const char *const names[2] = {"good", "evil"};
    struct sim_options o = {.verbs = true};
    struct hrd_verbs_conn *good;
    void *arena;
    uint64_t len;
    sim_start(&v->sim, 2, 2, map, &o);
    v->arena = calloc(1, 1 << 20);
    hrd_agent_arena(v->sim.node[0].agent, &arena, &len);
    fake_verbs_pair(&good, arena, len, &v->evil, v->arena, 1 << 20, 2);
    v->send_key = good->arena_mr.mr->rkey;
    hrd_agent_link_up(v->sim.node[0].agent, 7, "evil", &hrd_transport_verbs, &good->base);
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
    hrd_agent_comm_add(v->sim.node[0].agent, &spec);
    for (int i = 0; i < 50000 && !v->sim.node[0].comms_ready; i++)
        events(&v->sim, 1);
    assert_int_equal(v->sim.node[0].last_status, HRP_OK);
    assert_int_equal(sim_comm(&v->sim, OTHER, 1, &o), HRP_OK);
    other_post(v, 0);
}

static void victim_stop(struct victim *v)
{
    hrd_verbs_conn_free(v->evil);
    sim_stop(&v->sim);
    free(v->arena);
    free(v);
    assert_int_equal(fake_verbs_objects(), 0);
}

/* Sends raw bytes, as large as they are, with an opcode of the test's choice. */
static void raw(struct victim *v, unsigned queue, enum ibv_wr_opcode op, const void *at, uint32_t len,
                uint64_t remote, uint32_t rkey)
{
    struct ibv_sge sge = {.addr = (uintptr_t)at, .length = len, .lkey = v->evil->arena_mr.mr->lkey};
    struct ibv_send_wr *bad,
        wr = {.sg_list = &sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED};
    wr.wr_id = hrd_wr_id(queue, 0);
    wr.wr.rdma.remote_addr = remote;
    wr.wr.rdma.rkey = rkey;
    assert_int_equal(fake_verbs()->post_send(v->evil->q[queue].qp, &wr, &bad), 0);
}

static void say(struct victim *v, unsigned queue, uint8_t kind, uint16_t credits, const void *body,
                uint32_t len)
{
    struct hrd_vmsg m = {.magic = HRD_VMSG_MAGIC, .kind = kind, .credits = credits, .len = len};
    memcpy(v->arena, &m, sizeof(m));
    if (len)
        memcpy(v->arena + sizeof(m), body, len);
    raw(v, queue, IBV_WR_SEND, v->arena, (uint32_t)sizeof(m) + len, 0, 0);
}

static struct hrp_frame frame(uint8_t type)
{
    return (struct hrp_frame){.magic = HRP_FRAME_MAGIC,
                              .type = type,
                              .comm = COMM,
                              .op = 1,
                              .sig = {.coll = HRP_ALL_REDUCE, .count = COUNT}};
}

/* Reads what the victim says until its first CREDIT. */
static struct hrp_frame wait_credit(struct victim *v)
{
    for (int i = 0; i < 50000; i++) {
        struct ibv_wc wc;
        if (fake_verbs()->poll_cq(v->evil->cq, 1, &wc) != 1) {
            nap();
            continue;
        }
        assert_int_equal(wc.status, IBV_WC_SUCCESS);
        if (!(wc.wr_id & HRD_WR_RECV))
            continue;
        const char *at =
            v->evil->q[hrd_wr_queue(wc.wr_id)].rx + (size_t)hrd_wr_slot(wc.wr_id) * HRD_VMSG_BYTES;
        struct hrd_vmsg m;
        struct hrp_frame f;
        memcpy(&m, at, sizeof(m));
        if (m.kind == HRD_VMSG_REGION)
            memcpy(&v->region[v->nregions++ % 64], at + sizeof(m), sizeof(v->region[0]));
        memcpy(&f, at + sizeof(m), sizeof(f));
        if (m.kind == HRD_VMSG_FRAME && f.type == HRP_FRAME_CREDIT)
            return f;
    }
    fail_msg("no credit comes");
    return frame(0);
}

static void expect_lost(struct victim *v, const char *words)
{
    struct sim_node *n = &v->sim.node[0];
    for (int i = 0; i < 50000 && !n->links_lost; i++)
        events(&v->sim, 1);
    if (n->links_lost != 1)
        fail_msg("the link is not lost for '%s'", words);
    assert_int_equal(n->comms_failed, 1);
    assert_int_equal(n->last_status, HRP_PEER_LOST);
    if (!strstr(n->last_text, words) || !strstr(n->last_text, "evil"))
        fail_msg("'%s' does not say '%s' about evil", n->last_text, words);
    other_post(v, 1);
    other_check(v);
    for (uint32_t r = 0; r < 2; r++)
        other_post(v, r);
    other_check(v);
    assert_int_equal(n->comms_failed, 1);
    assert_int_equal(n->links_lost, 1);
}

enum kind {
    IMMEDIATE,
    WRITE_IMMEDIATE,
    SEND_TOO_LONG,
    NO_HEADER,
    BAD_MAGIC,
    BAD_LENGTH,
    UNKNOWN_KIND,
    TOO_MANY_CREDITS,
    EMPTY_CREDIT,
    MORE_WITHOUT_FRAME,
    MORE_THAN_FRAME,
    FRAME_IN_FRAME,
    SHORT_FRAME,
    BAD_FRAME,
    DATA_SENT,
    EAGER_PLACED,
    PLACED_WITHOUT_CREDIT,
    PLACED_WRONG_SLOT,
    WRITE_OUTSIDE,
    WRITE_TOO_LONG,
    WRITE_SEND_MEMORY,
    REGION_ON_BULK,
    REGION_SHORT,
    REGION_TWICE,
    REGION_UNKNOWN,
    REGION_OF_NO_RAIL,
    CREDIT_OUTSIDE,
    NKINDS,
};

static const char *const words[NKINDS] = {"immediate value",
                                          "immediate value",
                                          "longer than the receive buffer",
                                          "without a header",
                                          "malformed message header",
                                          "malformed message header",
                                          "unknown kind",
                                          "more buffers given back",
                                          "gives nothing",
                                          "belongs to no frame",
                                          "more payload than its frame",
                                          "where none can begin",
                                          "where none can begin",
                                          "malformed frame header",
                                          "came the wrong way",
                                          "came the wrong way",
                                          "not granted",
                                          "wrong slot",

                                          "may not",
                                          "may not",
                                          "may not",
                                          "out of place",
                                          "wrong length",
                                          "cannot be",
                                          "never announced",
                                          "a rail that there is not",
                                          "outside of the memory"};

/* A posted op of the victim's and its grant, as the frame that would answer it. */
static struct hrp_frame granted(struct victim *v)
{
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = COUNT};
    struct hrp_frame f = frame(HRP_FRAME_DATA);
    sim_post(&v->sim, 0, 0, &sig, 0, 0);
    struct hrp_frame credit = wait_credit(v);
    f.slot = credit.slot;
    f.unit = credit.unit;
    f.sig = credit.sig;
    return f;
}

static void bad_message(struct victim *v, enum kind kind)
{
    static const char zeros[HRD_VMSG_BYTES];
    struct hrp_frame f = frame(HRP_FRAME_DATA);
    char *text = v->arena + 65536;
    switch (kind) {
    case IMMEDIATE:
        raw(v, 0, IBV_WR_SEND_WITH_IMM, v->arena, 16, 0, 0);
        break;
    case WRITE_IMMEDIATE:
        granted(v);
        raw(v, 1, IBV_WR_RDMA_WRITE_WITH_IMM, v->arena, 64, v->region[0].addr, v->region[0].rkey);
        break;
    case SEND_TOO_LONG:
        raw(v, 0, IBV_WR_SEND, v->arena, HRD_VMSG_BYTES + 1, 0, 0);
        break;
    case NO_HEADER:
        raw(v, 0, IBV_WR_SEND, v->arena, 8, 0, 0);
        break;
    case BAD_MAGIC:
        raw(v, 0, IBV_WR_SEND, text, 100, 0, 0);
        break;
    case BAD_LENGTH: {
        struct hrd_vmsg m = {.magic = HRD_VMSG_MAGIC, .kind = HRD_VMSG_FRAME, .len = 100};
        memcpy(text, &m, sizeof(m));
        raw(v, 0, IBV_WR_SEND, text, sizeof(m) + 80, 0, 0);
        break;
    }
    case UNKNOWN_KIND:
        say(v, 1, HRD_VMSG_HELLO, 0, zeros, 16);
        break;
    case TOO_MANY_CREDITS:
        say(v, 1, HRD_VMSG_CREDIT, 1, NULL, 0);
        break;
    case EMPTY_CREDIT:
        say(v, 1, HRD_VMSG_CREDIT, 0, NULL, 0);
        break;
    case MORE_WITHOUT_FRAME:
        say(v, 1, HRD_VMSG_MORE, 0, zeros, 16);
        break;
    case MORE_THAN_FRAME:
    case FRAME_IN_FRAME:
        f.type = HRP_FRAME_EAGER;
        f.len = 100;
        say(v, 0, HRD_VMSG_FRAME, 0, &f, sizeof(f));
        say(v, 0, kind == FRAME_IN_FRAME ? HRD_VMSG_FRAME : HRD_VMSG_MORE, 0, zeros, 101);
        break;
    default:
        break;
    }
}

static void bad_frame(struct victim *v, enum kind kind)
{
    struct hrp_frame f = kind == PLACED_WRONG_SLOT ? granted(v) : frame(HRP_FRAME_DATA);
    switch (kind) {
    case SHORT_FRAME:
        say(v, 0, HRD_VMSG_FRAME, 0, &f, sizeof(f) - 1);
        break;
    case BAD_FRAME:
        f.reserved[1] = 1;
        say(v, 0, HRD_VMSG_FRAME, 0, &f, sizeof(f));
        break;
    case DATA_SENT:
        f.len = 64;
        say(v, 0, HRD_VMSG_FRAME, 0, &f, sizeof(f));
        break;
    case EAGER_PLACED:
        f.type = HRP_FRAME_EAGER;
        f.len = 64;
        say(v, 0, HRD_VMSG_PLACED, 0, &f, sizeof(f));
        break;
    case PLACED_WITHOUT_CREDIT:
        f.len = 100;
        say(v, 1, HRD_VMSG_PLACED, 0, &f, sizeof(f));
        break;
    case PLACED_WRONG_SLOT:
        f.slot += 64;
        f.len = 64;
        say(v, 1, HRD_VMSG_PLACED, 0, &f, sizeof(f));
        break;
    default:
        break;
    }
}

static void bad_memory(struct victim *v, enum kind kind)
{
    struct hrd_vregion r = {.off = 0, .len = 4096, .addr = 1, .rkey = 1};
    bool posted = (kind >= WRITE_OUTSIDE && kind <= WRITE_SEND_MEMORY) || kind == CREDIT_OUTSIDE;
    struct hrp_frame f = posted ? granted(v) : frame(HRP_FRAME_DATA);
    switch (kind) {
    case WRITE_OUTSIDE:
        raw(v, 1, IBV_WR_RDMA_WRITE, v->arena, 64, v->region[0].addr - 64, v->region[0].rkey);
        break;
    case WRITE_TOO_LONG:
        raw(v, 1, IBV_WR_RDMA_WRITE, v->arena, 128, v->region[0].addr + v->region[0].len - 64,
            v->region[0].rkey);
        break;
    case WRITE_SEND_MEMORY:
        raw(v, 1, IBV_WR_RDMA_WRITE, v->arena, 64, v->region[0].addr, v->send_key);
        break;
    case REGION_ON_BULK:
        say(v, 1, HRD_VMSG_REGION, 0, &r, sizeof(r));
        break;
    case REGION_SHORT:
        say(v, 0, HRD_VMSG_REGION, 0, &r, sizeof(r) - 1);
        break;
    case REGION_TWICE:
        say(v, 0, HRD_VMSG_REGION, 0, &r, sizeof(r));
        say(v, 0, HRD_VMSG_REGION, 0, &r, sizeof(r));
        break;
    case REGION_OF_NO_RAIL:
        r.rail = 1;
        say(v, 0, HRD_VMSG_REGION, 0, &r, sizeof(r));
        break;
    case REGION_UNKNOWN:
        r.withdrawn = 1;
        say(v, 0, HRD_VMSG_REGION, 0, &r, sizeof(r));
        break;
    case CREDIT_OUTSIDE: /* a grant for memory that was never opened */
        f.type = HRP_FRAME_CREDIT;
        f.slot = UINT64_C(1) << 40;
        say(v, 0, HRD_VMSG_FRAME, 0, &f, sizeof(f));
        break;
    default:
        break;
    }
}

static void misbehave(struct victim *v, enum kind kind)
{
    bad_message(v, kind);
    if (kind >= SHORT_FRAME && kind <= PLACED_WRONG_SLOT)
        bad_frame(v, kind);
    if (kind >= WRITE_OUTSIDE)
        bad_memory(v, kind);
}

static void test_protocol_errors(void **state)
{
    (void)state;
    for (enum kind k = 0; k < NKINDS; k++) {
        struct victim *v = calloc(1, sizeof(*v));
        victim_start(v);
        misbehave(v, k);
        expect_lost(v, words[k]);
        victim_stop(v);
    }
}

/* A peer that never gives buffers back is not waited for; its limit is the connection's. */
static void test_starved(void **state)
{
    (void)state;
    struct victim *v = calloc(1, sizeof(*v));
    fake_verbs_stall_ms = 500;
    victim_start(v);
    fake_verbs_stall_ms = 10000;
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 10};
    struct hrp_frame f = frame(HRP_FRAME_WATERMARK);
    /* Eager ops up to the window, then the victim answers each of our frames' watermarks with nothing new: its messages
       run against a receiver that posts again but never says so. */
    for (int i = 0; i < 3; i++)
        say(v, 0, HRD_VMSG_FRAME, 0, &f, sizeof(f));
    for (uint64_t op = 1; op <= 8; op++)
        sim_post(&v->sim, 0, 0, &sig, 0, 0);
    for (int i = 0; i < 100; i++) {
        struct hrp_frame unknown =
            frame(HRP_FRAME_COMM_FAIL); /* of comms it does not have: it answers with marks */
        unknown.comm = 100 + (uint64_t)i;
        unknown.op = 0;
        unknown.status = HRP_TIMEOUT;
        say(v, 0, HRD_VMSG_FRAME, 0, &unknown, sizeof(unknown));
        nap();
        nap();
    }
    expect_lost(v, "is stuck");
    victim_stop(v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wc_errors),   cmocka_unit_test(test_calls_fail),
        cmocka_unit_test(test_events),      cmocka_unit_test(test_port),
        cmocka_unit_test(test_cq_overflow), cmocka_unit_test(test_close_in_flight),
        cmocka_unit_test(test_no_regions),  cmocka_unit_test(test_protocol_errors),
        cmocka_unit_test(test_starved),     cmocka_unit_test(test_post_fails_in_a_frame),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
