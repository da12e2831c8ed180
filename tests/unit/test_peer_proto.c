/* SPDX-License-Identifier: MIT */
/* Peer messages: round trips, and every message truncated, oversized and with each field out of its range. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/peer.h"
#include "proto/status.h"

#define NRANKS 5u
#define NNODES 3u

static uint64_t joins[2] = {11, 12};
static struct hrp_peer_node nodes[NNODES];
static uint32_t node_of_rank[NRANKS] = {0, 1, 0, 2, 1};

static struct hrp_addr addr4(uint8_t last)
{
    return (struct hrp_addr){.family = 4, .port = 18515, .ip = {10, 0, 0, last}};
}

static struct hrp_key name_key(void)
{
    struct hrp_key k = {.kind = HRP_KEY_NAME, .uid = 1000, .nranks = NRANKS, .nth = 2, .attempt = 77};
    strcpy(k.name, "job");
    return k;
}

static void verbs_sample(struct hrp_peer_msg *m)
{
    switch (m->type) {
    case HRP_PEER_VERBS_OFFER:
        m->body.verbs = (struct hrp_peer_verbs){.nonce = 5,
                                                .flags = HRP_VERBS_MUST,
                                                .ethernet = 1,
                                                .global = 1,
                                                .mtu = 5,
                                                .lid = 7,
                                                .pkey = 0xffff,
                                                .queues = 2,
                                                .depth = 64,
                                                .msg_bytes = 4352,
                                                .gid = {0xfe, 0x80},
                                                .qpn = {17, 0xffffff},
                                                .psn = {0, 0xffffff}};
        m->text = ""; /* it may have one */
        break;
    case HRP_PEER_VERBS_ANSWER:
        m->body.verbs = (struct hrp_peer_verbs){
            .nonce = 5, .status = HRP_UNSUPPORTED, .flags = HRP_VERBS_MUST | HRP_VERBS_NONE};
        m->text = "no RDMA device";
        break;
    case HRP_PEER_VERBS_READY:
        m->body.ready = (struct hrp_peer_ready){.nonce = 5, .status = HRP_TIMEOUT};
        m->text = "nothing came";
        break;
    case HRP_PEER_VERBS_CLOSE:
        m->body.ready = (struct hrp_peer_ready){.nonce = 9, .status = HRP_RESOURCE};
        break;
    case HRP_PEER_VERBS_LISTEN:
        m->body.listen =
            (struct hrp_peer_listen){.nonce = 9, .addr = {.family = 4, .port = 40000, .ip = {10, 0, 0, 1}}};
        break;
    case HRP_PEER_VERBS_RAIL:
        m->body.rail =
            (struct hrp_peer_rail){.nonce = 9, .group = 7, .rate = UINT64_C(12500000000), .rail = 3, .of = 4};
        break;
    case HRP_PEER_VERBS_DOWN:
        m->body.ready = (struct hrp_peer_ready){.nonce = 9, .status = HRP_PEER_LOST};
        m->text = "RETRY_EXC_ERR";
        break;
    default:
        fail();
    }
}

static struct hrp_peer_msg sample(unsigned type)
{
    struct hrp_peer_msg m = {.type = (uint16_t)type};
    switch (type) {
    case HRP_PEER_UP:
        m.body.up.peer_no = 3;
        break;
    case HRP_PEER_PING:
    case HRP_PEER_PONG:
        m.body.ping.stamp = UINT64_C(0x123456789abcdef0);
        break;
    case HRP_PEER_BYE:
        m.text = "stopping";
        break;
    case HRP_PEER_JOIN:
        m.body.join =
            (struct hrp_peer_join){.key = name_key(), .join = 9, .rank = 4, .pid = 1234, .waited_ms = 5};
        m.body.join.config = (struct hrp_comm_config){.setup_timeout_ms = 1, .op_timeout_ms = 2, .algo = 1};
        break;
    case HRP_PEER_REFUSE:
        m.body.refuse = (struct hrp_peer_refuse){.join = 9, .status = HRP_TIMEOUT};
        m.text = "nobody came";
        break;
    case HRP_PEER_WITHDRAW:
    case HRP_PEER_WAITS:
        m.body.refuse.join = 9;
        m.text = "it died";
        break;
    case HRP_PEER_JOINING:
        m.body.refuse.join = 9;
        break;
    case HRP_PEER_ROSTER:
        m.body.roster = (struct hrp_peer_roster){.key = name_key(),
                                                 .nranks = NRANKS,
                                                 .nnodes = NNODES,
                                                 .node = 1,
                                                 .nlocal = 2,
                                                 .eager_limit = 16384,
                                                 .unit_bytes = 1 << 20,
                                                 .unit_min_bytes = 1 << 18,
                                                 .latency_ns = 1000,
                                                 .bandwidth = 1000000000};
        m.body.roster.comm_id[0] = 1;
        m.body.roster.config = (struct hrp_comm_config){.setup_timeout_ms = 1000,
                                                        .op_timeout_ms = UINT32_MAX,
                                                        .reproducible = HRP_ON,
                                                        .wire_f32 = HRP_OFF,
                                                        .transport = 1};
        m.joins = joins;
        m.nodes = nodes;
        m.node_of_rank = node_of_rank;
        break;
    case HRP_PEER_VOTE:
    case HRP_PEER_FAIL:
        m.body.vote.comm_id[7] = 1;
        m.body.vote.status = HRP_RESOURCE;
        m.text = "no room";
        break;
    case HRP_PEER_VERBS_OFFER:
    case HRP_PEER_VERBS_ANSWER:
    case HRP_PEER_VERBS_READY:
    case HRP_PEER_VERBS_CLOSE:
    case HRP_PEER_VERBS_LISTEN:
    case HRP_PEER_VERBS_RAIL:
    case HRP_PEER_VERBS_DOWN:
        verbs_sample(&m);
        break;
    case HRP_PEER_ASK:
        m.body.ask = (struct hrp_peer_ask){.token = 3, .what = HRP_DOCTOR_PROBE};
        break;
    case HRP_PEER_TELL:
        m.body.tell = (struct hrp_peer_tell){.token = 3, .more = 1, .took_ns = 5, .clock_ns = 6};
        m.text = "{}";
        break;
    default:
        m.body.comm.comm_id[0] = 1;
        m.body.comm.rank = type == HRP_PEER_LEFT ? 4 : 0;
    }
    m.text_len = m.text ? strlen(m.text) : 0;
    return m;
}

static int setup(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < NNODES; i++) {
        nodes[i].instance[0] = (uint8_t)(i + 1);
        nodes[i].naddrs = 2;
        nodes[i].addr[0] = addr4((uint8_t)i);
        nodes[i].addr[1] = (struct hrp_addr){.family = 6, .port = 1, .ip = {0xfe, 0x80, [15] = 1}};
        strcpy(nodes[i].name, "node");
    }
    return 0;
}

/* An aligned copy of exactly len bytes, so that the sanitizer sees any look behind it. */
static int decode(struct hrp_peer_msg *out, const void *buf, size_t len, void **keep)
{
    void *copy = malloc(len ? len : 1);
    memcpy(copy, buf, len);
    int r = hrp_peer_decode(out, copy, len);
    *keep = copy;
    return r;
}

static int decode_only(const void *buf, size_t len)
{
    struct hrp_peer_msg out;
    void *keep;
    int r = decode(&out, buf, len, &keep);
    free(keep);
    return r;
}

static void test_round_trip(void **state)
{
    (void)state;
    char buf[8192];
    for (unsigned t = 1; t < HRP_PEER_NTYPES; t++) {
        struct hrp_peer_msg m = sample(t), got;
        void *keep;
        long len = hrp_peer_encode(&m, buf, sizeof(buf));
        assert_true(len > 0);
        assert_int_equal((size_t)len, hrp_peer_size(&m));
        assert_int_equal(hrp_peer_frame((struct hrp_peer_hdr *)(void *)buf), len);
        assert_int_equal(decode(&got, buf, (size_t)len, &keep), 0);
        assert_int_equal(got.type, t);
        assert_int_equal(got.text_len, m.text_len);
        if (m.text)
            assert_memory_equal(got.text, m.text, m.text_len);
        char again[8192];
        assert_int_equal(hrp_peer_encode(&got, again, sizeof(again)), len);
        assert_memory_equal(again, buf, (size_t)len);
        if (t == HRP_PEER_ROSTER) {
            assert_memory_equal(got.joins, joins, sizeof(joins));
            assert_memory_equal(got.nodes, nodes, sizeof(nodes));
            assert_memory_equal(got.node_of_rank, node_of_rank, sizeof(node_of_rank));
        }
        free(keep);
    }
}

static void test_lengths(void **state)
{
    (void)state;
    char buf[8192];
    for (unsigned t = 1; t < HRP_PEER_NTYPES; t++) {
        struct hrp_peer_msg m = sample(t);
        long len = hrp_peer_encode(&m, buf, sizeof(buf));
        size_t fixed = (size_t)len - m.text_len;
        for (size_t cut = 0; cut < (size_t)len; cut++)
            assert_int_equal(hrp_peer_encode(&m, buf, cut), -90 /* EMSGSIZE */);
        hrp_peer_encode(&m, buf, sizeof(buf));
        struct hrp_peer_hdr *hdr = (struct hrp_peer_hdr *)(void *)buf;
        /* Cut with the old length, and with the length made to fit. */
        for (size_t cut = 0; cut < (size_t)len; cut++) {
            assert_int_not_equal(decode_only(buf, cut), 0);
            if (cut < sizeof(*hdr) || cut >= fixed)
                continue;
            hdr->len = (uint32_t)(cut - sizeof(*hdr));
            assert_int_not_equal(decode_only(buf, cut), 0);
            hdr->len = (uint32_t)((size_t)len - sizeof(*hdr));
        }
        /* Longer than it may be. */
        memset(buf + len, 'x', sizeof(buf) - (size_t)len);
        size_t more = m.text ? fixed + HRP_PEER_TEXT + 1 : (size_t)len + 1;
        hdr->len = (uint32_t)(more - sizeof(*hdr));
        assert_int_not_equal(decode_only(buf, more), 0);
        hdr->len = UINT32_MAX;
        assert_true(hrp_peer_frame(hdr) < 0);
    }
}

static void test_header(void **state)
{
    (void)state;
    char buf[8192];
    struct hrp_peer_hdr *hdr = (struct hrp_peer_hdr *)(void *)buf;
    struct hrp_peer_msg m = sample(HRP_PEER_PING);
    size_t len = (size_t)hrp_peer_encode(&m, buf, sizeof(buf));
    static const uint16_t bad_types[] = {0, HRP_PEER_NTYPES, 0xffff};
    for (size_t i = 0; i < 3; i++) {
        hdr->type = bad_types[i];
        assert_int_not_equal(decode_only(buf, len), 0);
    }
    hdr->type = HRP_PEER_PING;
    hdr->magic ^= 1;
    assert_int_not_equal(decode_only(buf, len), 0);
    hdr->magic ^= 1;
    hdr->reserved = 1;
    assert_int_not_equal(decode_only(buf, len), 0);
    hdr->reserved = 0;
    hdr->reserved1 = 1;
    assert_int_not_equal(decode_only(buf, len), 0);
    hdr->reserved1 = 0;
    assert_int_equal(decode_only(buf, len), 0);
}

/* Each change makes the message wrong: encode refuses it, and decode does when it is on the wire. */
#define WRONG(type_, change)                                                         \
    do {                                                                             \
        struct hrp_peer_msg m = sample(type_);                                       \
        char buf_[8192], bad_[8192];                                                 \
        long len_ = hrp_peer_encode(&m, buf_, sizeof(buf_));                         \
        assert_true(len_ > 0);                                                       \
        change;                                                                      \
        assert_int_equal(hrp_peer_encode(&m, bad_, sizeof(bad_)), -22 /* EINVAL */); \
        size_t fixed_ = body_size(type_);                                            \
        memcpy(buf_ + sizeof(struct hrp_peer_hdr), &m.body, fixed_);                 \
        assert_int_not_equal(decode_only(buf_, (size_t)len_), 0);                    \
    } while (0)

static size_t body_size(unsigned type)
{
    struct hrp_peer_msg m = {.type = (uint16_t)type};
    return hrp_peer_size(&m) - sizeof(struct hrp_peer_hdr);
}

static void test_fields(void **state)
{
    (void)state;
    WRONG(HRP_PEER_UP, m.body.up.peer_no = 0);
    WRONG(HRP_PEER_UP, m.body.up.reserved = 1);
    WRONG(HRP_PEER_BYE, m.body.bye.reserved = 1);
    WRONG(HRP_PEER_JOIN, m.body.join.join = 0);
    WRONG(HRP_PEER_JOIN, m.body.join.rank = NRANKS);
    WRONG(HRP_PEER_JOIN, m.body.join.reserved = 1);
    WRONG(HRP_PEER_JOIN, m.body.join.key.kind = 0);
    WRONG(HRP_PEER_JOIN, m.body.join.key.kind = 3);
    WRONG(HRP_PEER_JOIN, m.body.join.key.nranks = 0);
    WRONG(HRP_PEER_JOIN, m.body.join.key.nranks = HRP_MAX_RANKS + 1);
    WRONG(HRP_PEER_JOIN, m.body.join.key.name[0] = 0);
    WRONG(HRP_PEER_JOIN, m.body.join.key.name[1] = '\n');
    WRONG(HRP_PEER_JOIN, m.body.join.key.name[10] = 'x');
    WRONG(HRP_PEER_JOIN, memset(m.body.join.key.name, 'x', sizeof(m.body.join.key.name)));
    WRONG(HRP_PEER_JOIN, m.body.join.key.kind = HRP_KEY_ID);
    WRONG(HRP_PEER_JOIN, m.body.join.config.algo = HRP_NALGOS);
    WRONG(HRP_PEER_JOIN, m.body.join.config.reproducible = 3);
    WRONG(HRP_PEER_JOIN, m.body.join.config.wire_f32 = 3);
    WRONG(HRP_PEER_JOIN, m.body.join.config.transport = 3);
    WRONG(HRP_PEER_JOIN, m.body.join.config.require = 8);
    WRONG(HRP_PEER_JOIN, m.body.join.config.reserved[3] = 1);
    WRONG(HRP_PEER_REFUSE, m.body.refuse.join = 0);
    WRONG(HRP_PEER_REFUSE, m.body.refuse.status = HRP_OK);
    WRONG(HRP_PEER_REFUSE, m.body.refuse.status = HRP_IN_PROGRESS);
    WRONG(HRP_PEER_REFUSE, m.body.refuse.status = HRP_NSTATUS);
    WRONG(HRP_PEER_REFUSE, m.body.refuse.reserved = 1);
    WRONG(HRP_PEER_WITHDRAW, m.body.refuse.status = HRP_TIMEOUT);
    WRONG(HRP_PEER_WITHDRAW, m.body.refuse.join = 0);
    WRONG(HRP_PEER_JOINING, m.body.refuse.join = 0);
    WRONG(HRP_PEER_WAITS, m.body.refuse.status = HRP_TIMEOUT);
    WRONG(HRP_PEER_VOTE, memset(m.body.vote.comm_id, 0, 8));
    WRONG(HRP_PEER_VOTE, m.body.vote.status = HRP_NSTATUS);
    WRONG(HRP_PEER_VOTE, m.body.vote.status = HRP_IN_PROGRESS);
    WRONG(HRP_PEER_VOTE, m.body.vote.reserved = 1);
    WRONG(HRP_PEER_FAIL, m.body.vote.status = HRP_OK);
    WRONG(HRP_PEER_FAIL, memset(m.body.vote.comm_id, 0, 8));
    WRONG(HRP_PEER_COMMIT, memset(m.body.comm.comm_id, 0, 8));
    WRONG(HRP_PEER_COMMIT, m.body.comm.rank = 1);
    WRONG(HRP_PEER_COMMIT, m.body.comm.reserved = 1);
    WRONG(HRP_PEER_LEFT, m.body.comm.rank = HRP_MAX_RANKS);
    WRONG(HRP_PEER_GONE, m.body.comm.rank = 1);
}

static void test_verbs_fields(void **state)
{
    (void)state;
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.nonce = 0);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.flags = 8);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.flags = HRP_VERBS_NONE); /* with queue pairs */
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.flags = HRP_VERBS_CAN);
    WRONG(HRP_PEER_VERBS_ANSWER, m.body.verbs.flags = HRP_VERBS_NONE | HRP_VERBS_CAN);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.status = HRP_IN_PROGRESS);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.status = HRP_NSTATUS);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.status = HRP_UNSUPPORTED); /* with parameters */
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.ethernet = 2);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.global = 2);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.mtu = 0);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.mtu = 6);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.queues = 0);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.queues = 1);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.queues = 3);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.queues = HRP_PEER_QUEUES_MAX + 1);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.rdmacm = 2);
    WRONG(HRP_PEER_VERBS_ANSWER, m.body.verbs.rdmacm = 1); /* without queue pairs */
    WRONG(HRP_PEER_VERBS_LISTEN, m.body.listen.nonce = 0);
    WRONG(HRP_PEER_VERBS_LISTEN, m.body.listen.addr.port = 0);
    WRONG(HRP_PEER_VERBS_LISTEN, m.body.listen.addr.family = 5);
    WRONG(HRP_PEER_VERBS_RAIL, m.body.rail.nonce = 0);
    WRONG(HRP_PEER_VERBS_RAIL, m.body.rail.group = 0);
    WRONG(HRP_PEER_VERBS_RAIL, m.body.rail.rail = 4);
    WRONG(HRP_PEER_VERBS_RAIL, m.body.rail.of = 1);
    WRONG(HRP_PEER_VERBS_RAIL, m.body.rail.of = HRP_PEER_RAILS_MAX + 1);
    WRONG(HRP_PEER_VERBS_RAIL, m.body.rail.reserved = 1);
    WRONG(HRP_PEER_VERBS_RAIL, m.body.rail.reserved1 = 1);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.service_level = 16);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.got[0] = 1); /* of a new link */
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.link = 1; m.body.verbs.got[2] = 1);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.depth = 0);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.msg_bytes = 0);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.qpn[1] = 0);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.qpn[1] = 0x1000000);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.psn[1] = 0x1000000);
    WRONG(HRP_PEER_VERBS_OFFER, m.body.verbs.psn[2] = 1);
    WRONG(HRP_PEER_VERBS_ANSWER, m.body.verbs.status = HRP_OK);
    WRONG(HRP_PEER_VERBS_ANSWER, m.body.verbs.qpn[0] = 1);
    WRONG(HRP_PEER_VERBS_CLOSE, m.body.ready.status = HRP_PEER_LOST);
    WRONG(HRP_PEER_VERBS_CLOSE, m.body.ready.nonce = 0);
    WRONG(HRP_PEER_JOIN, m.body.join.config.service_level = 16);
    WRONG(HRP_PEER_JOIN, m.body.join.config.class_set = 4);
    WRONG(HRP_PEER_VERBS_DOWN, m.body.ready.status = HRP_OK);
    WRONG(HRP_PEER_VERBS_DOWN, m.body.ready.nonce = 0);
    WRONG(HRP_PEER_VERBS_READY, m.body.ready.nonce = 0);
    WRONG(HRP_PEER_VERBS_READY, m.body.ready.status = HRP_IN_PROGRESS);
    WRONG(HRP_PEER_VERBS_READY, m.body.ready.reserved = 1);
    WRONG(HRP_PEER_ASK, m.body.ask.token = 0);
    WRONG(HRP_PEER_ASK, m.body.ask.reserved = 1);
    WRONG(HRP_PEER_ASK, m.body.ask.what = 0);
    WRONG(HRP_PEER_ASK, m.body.ask.what = HRP_DOCTOR_DIAL);
    WRONG(HRP_PEER_ASK, m.body.ask.what = HRP_NDOCTOR);
    WRONG(HRP_PEER_TELL, m.body.tell.token = 0);
    WRONG(HRP_PEER_TELL, m.body.tell.more = 2);
    WRONG(HRP_PEER_TELL, m.body.tell.status = HRP_IN_PROGRESS);
    WRONG(HRP_PEER_TELL, m.body.tell.status = HRP_NSTATUS);
    WRONG(HRP_PEER_TELL, m.body.tell.status = HRP_RESOURCE); /* and more to come */
}

static void test_roster_fields(void **state)
{
    (void)state;
    WRONG(HRP_PEER_ROSTER, memset(m.body.roster.comm_id, 0, 8));
    WRONG(HRP_PEER_ROSTER, m.body.roster.nranks = NRANKS + 1);
    WRONG(HRP_PEER_ROSTER, m.body.roster.key.nranks = NRANKS + 1);
    WRONG(HRP_PEER_ROSTER, m.body.roster.nnodes = 0);
    WRONG(HRP_PEER_ROSTER, m.body.roster.nnodes = NNODES - 1);
    WRONG(HRP_PEER_ROSTER, m.body.roster.nnodes = HRP_MAX_NODES + 1);
    WRONG(HRP_PEER_ROSTER, m.body.roster.node = NNODES);
    WRONG(HRP_PEER_ROSTER, m.body.roster.nlocal = 0);
    WRONG(HRP_PEER_ROSTER, m.body.roster.nlocal = 1);
    WRONG(HRP_PEER_ROSTER, m.body.roster.plan = HRP_PLAN_BITS + 1);
    WRONG(HRP_PEER_ROSTER, m.body.roster.unit_bytes = 0);
    WRONG(HRP_PEER_ROSTER, m.body.roster.unit_min_bytes = 0);
    WRONG(HRP_PEER_ROSTER, m.body.roster.bandwidth = 0);
    WRONG(HRP_PEER_ROSTER, m.body.roster.config.setup_timeout_ms = 0);
    WRONG(HRP_PEER_ROSTER, m.body.roster.config.op_timeout_ms = 0);
    WRONG(HRP_PEER_ROSTER, m.body.roster.config.reproducible = HRP_DEFAULT);
    WRONG(HRP_PEER_ROSTER, m.body.roster.config.wire_f32 = HRP_DEFAULT);
    WRONG(HRP_PEER_ROSTER, m.body.roster.config.transport = 3);
}

static void roster_array_wrong(const struct hrp_peer_msg *m)
{
    char buf[8192];
    assert_int_equal(hrp_peer_encode(m, buf, sizeof(buf)), -22);
    /* On the wire: encode the sound one and put the arrays over it. */
    struct hrp_peer_msg good = sample(HRP_PEER_ROSTER);
    long len = hrp_peer_encode(&good, buf, sizeof(buf));
    char *at = buf + sizeof(struct hrp_peer_hdr) + sizeof(struct hrp_peer_roster);
    memcpy(at, m->joins, sizeof(joins));
    memcpy(at + sizeof(joins), m->nodes, sizeof(nodes));
    memcpy(at + sizeof(joins) + sizeof(nodes), m->node_of_rank, sizeof(node_of_rank));
    assert_int_not_equal(decode_only(buf, (size_t)len), 0);
}

static void test_roster_arrays(void **state)
{
    (void)state;
    for (int i = 0; i < 12; i++) {
        uint64_t j[2] = {11, 12};
        struct hrp_peer_node n[NNODES];
        uint32_t of[NRANKS];
        memcpy(n, nodes, sizeof(n));
        memcpy(of, node_of_rank, sizeof(of));
        struct hrp_peer_msg m = sample(HRP_PEER_ROSTER);
        m.joins = j;
        m.nodes = n;
        m.node_of_rank = of;
        char buf[8192];
        assert_true(hrp_peer_encode(&m, buf, sizeof(buf)) > 0);
        switch (i) {
        case 0:
            j[1] = 0;
            break;
        case 1:
            memset(n[2].instance, 0, 16);
            break;
        case 2:
            memcpy(n[2].instance, n[0].instance, 16);
            break; /* two nodes of one daemon */
        case 3:
            n[1].naddrs = 0;
            break;
        case 4:
            n[1].naddrs = HRP_MAX_ADDRS + 1;
            break;
        case 5:
            n[1].addr[0].port = 0;
            break;
        case 6:
            n[1].addr[1].family = 5;
            break;
        case 7:
            n[1].addr[3].family = 4;
            break; /* not counted, not zero */
        case 8:
            memset(n[0].name, 'x', sizeof(n[0].name));
            break;
        case 9:
            of[3] = NNODES;
            break;
        case 10:
            of[0] = 1;
            of[1] = 0;
            break; /* nodes not in the order of their lowest rank */
        case 11:
            of[3] = 0;
            break; /* node 2 has no rank */
        }
        roster_array_wrong(&m);
    }
}

static void test_noise(void **state)
{
    (void)state;
    char buf[8192];
    uint32_t seed = 1;
    for (unsigned t = 1; t < HRP_PEER_NTYPES; t++) {
        struct hrp_peer_msg m = sample(t);
        long len = hrp_peer_encode(&m, buf, sizeof(buf));
        for (int i = 0; i < 2000; i++) {
            char bad[8192];
            memcpy(bad, buf, (size_t)len);
            for (int k = 0; k < 3; k++) {
                seed = seed * 1664525u + 1013904223u;
                bad[16 + (seed >> 8) % (unsigned)(len - 16)] = (char)(seed >> 24);
            }
            (void)decode_only(bad, (size_t)len); /* may pass or not; must not look beyond */
        }
    }
}

/* ---- the opening messages ---------------------------------------------------------------------------------- */

static struct hrp_peer_hello hello(void)
{
    struct hrp_peer_hello h = {.magic = HRP_PEER_MAGIC,
                               .major = HRP_PEER_MAJOR,
                               .role = HRP_PEER_DATA,
                               .naddrs = 1,
                               .port = 18515,
                               .stream = 3,
                               .nstreams = 4,
                               .peer_no = 1,
                               .link = 5,
                               .instance = {1}};
    h.addr[0] = addr4(1);
    strcpy(h.node, "a");
    return h;
}

#define BAD_HELLO(change)                                             \
    do {                                                              \
        struct hrp_peer_hello h = hello();                            \
        change;                                                       \
        assert_int_equal(hrp_peer_hello_check(&h), -71 /* EPROTO */); \
    } while (0)

static void test_hello(void **state)
{
    (void)state;
    struct hrp_peer_hello ok = hello();
    assert_int_equal(hrp_peer_hello_check(&ok), 0);
    ok.role = HRP_PEER_CONTROL;
    ok.stream = 0;
    ok.link = 0;
    ok.peer_no = 0;
    assert_int_equal(hrp_peer_hello_check(&ok), 0);
    ok.minor = 99; /* a later minor version may say more */
    memset(ok.reserved, 7, sizeof(ok.reserved));
    memset(ok.auth, 7, sizeof(ok.auth));
    assert_int_equal(hrp_peer_hello_check(&ok), 0);
    ok.major = 2;
    ok.naddrs = 77; /* nothing behind major is looked at */
    assert_int_equal(hrp_peer_hello_check(&ok), -93 /* EPROTONOSUPPORT */);
    BAD_HELLO(h.magic++);
    BAD_HELLO(h.role = 0);
    BAD_HELLO(h.role = 3);
    BAD_HELLO(h.naddrs = 0);
    BAD_HELLO(h.naddrs = HRP_MAX_ADDRS + 1);
    BAD_HELLO(h.addr[0].port = 0);
    BAD_HELLO(h.addr[0].family = 0);
    BAD_HELLO(h.port = 0);
    BAD_HELLO(h.stream = 4);
    BAD_HELLO(h.nstreams = 0);
    BAD_HELLO(h.nstreams = HRP_PEER_STREAMS_MAX + 1);
    BAD_HELLO(h.link = 0);
    BAD_HELLO(h.peer_no = 0);
    BAD_HELLO(h.instance[0] = 0);
    BAD_HELLO(h.node[0] = 0);
    BAD_HELLO(h.node[1] = 0x1b);
    BAD_HELLO(memset(h.node, 'x', sizeof(h.node)));
    BAD_HELLO(h.role = HRP_PEER_CONTROL);
}

#define BAD_REPLY(change)                                \
    do {                                                 \
        struct hrp_peer_reply r = good;                  \
        change;                                          \
        assert_int_equal(hrp_peer_reply_check(&r), -71); \
    } while (0)

static void test_reply_and_confirm(void **state)
{
    (void)state;
    struct hrp_peer_reply good = {.magic = HRP_PEER_MAGIC,
                                  .major = HRP_PEER_MAJOR,
                                  .port = 1,
                                  .nstreams = 4,
                                  .instance = {1},
                                  .naddrs = 1};
    good.addr[0] = addr4(1);
    strcpy(good.node, "b");
    assert_int_equal(hrp_peer_reply_check(&good), 0);
    BAD_REPLY(r.magic++);
    BAD_REPLY(r.status = HRP_IN_PROGRESS);
    BAD_REPLY(r.status = HRP_NSTATUS);
    BAD_REPLY(r.status = HRP_REFUSED); /* without a sentence */
    BAD_REPLY(r.text[0] = 'x');        /* a sentence without a refusal */
    BAD_REPLY(r.status = HRP_REFUSED; memset(r.text, 'x', sizeof(r.text)));
    BAD_REPLY(r.port = 0);
    BAD_REPLY(r.nstreams = 0);
    BAD_REPLY(r.nstreams = 17);
    BAD_REPLY(r.instance[0] = 0);
    BAD_REPLY(r.naddrs = 0);
    BAD_REPLY(r.naddrs = 5);
    BAD_REPLY(r.addr[0].port = 0);
    BAD_REPLY(r.node[0] = 0);
    struct hrp_peer_reply other = good;
    other.major = 2;
    assert_int_equal(hrp_peer_reply_check(&other), -93);

    struct hrp_peer_confirm c = {.magic = HRP_PEER_MAGIC, .peer_no = 1};
    assert_int_equal(hrp_peer_confirm_check(&c), 0);
    c.peer_no = 0;
    assert_int_equal(hrp_peer_confirm_check(&c), -71);
    c.peer_no = 1;
    c.magic = 0;
    assert_int_equal(hrp_peer_confirm_check(&c), -71);
}

static void test_names(void **state)
{
    (void)state;
    for (unsigned t = 1; t < HRP_PEER_NTYPES; t++)
        assert_string_not_equal(hrp_peer_name(t), "unknown message");
    assert_string_equal(hrp_peer_name(0), "unknown message");
    assert_string_equal(hrp_peer_name(HRP_PEER_NTYPES), "unknown message");
    struct hrp_peer_msg m = {.type = 0};
    assert_int_equal(hrp_peer_size(&m), 0);
}

/* The largest roster there can be is a message; a text that is too long is cut. */
static void test_extremes(void **state)
{
    (void)state;
    static uint64_t j[HRP_MAX_RANKS - HRP_MAX_NODES + 1];
    static struct hrp_peer_node n[HRP_MAX_NODES];
    static uint32_t of[HRP_MAX_RANKS];
    static char buf[HRP_PEER_MSG_MAX] __attribute__((aligned(8)));
    for (uint32_t i = 0; i < HRP_MAX_NODES; i++) {
        n[i] = nodes[0];
        n[i].instance[1] = (uint8_t)(i + 1);
        of[i] = i;
    }
    for (uint32_t i = HRP_MAX_NODES; i < HRP_MAX_RANKS; i++)
        of[i] = 3;
    for (size_t i = 0; i < sizeof(j) / sizeof(j[0]); i++)
        j[i] = i + 1;
    struct hrp_peer_msg m = sample(HRP_PEER_ROSTER), got;
    m.body.roster.nranks = m.body.roster.key.nranks = HRP_MAX_RANKS;
    m.body.roster.nnodes = HRP_MAX_NODES;
    m.body.roster.node = 3;
    m.body.roster.nlocal = sizeof(j) / sizeof(j[0]);
    m.joins = j;
    m.nodes = n;
    m.node_of_rank = of;
    long len = hrp_peer_encode(&m, buf, sizeof(buf));
    assert_true(len > 0);
    assert_int_equal(hrp_peer_decode(&got, buf, (size_t)len), 0);
    assert_memory_equal(got.node_of_rank, of, sizeof(of));

    static char text[2 * HRP_PEER_TEXT];
    memset(text, 't', sizeof(text));
    m = sample(HRP_PEER_FAIL);
    m.text = text;
    m.text_len = sizeof(text);
    len = hrp_peer_encode(&m, buf, sizeof(buf));
    assert_int_equal(hrp_peer_decode(&got, buf, (size_t)len), 0);
    assert_int_equal(got.text_len, HRP_PEER_TEXT);
    m = sample(HRP_PEER_COMMIT);
    m.text = text;
    m.text_len = 1;
    assert_int_equal(hrp_peer_encode(&m, buf, sizeof(buf)), -22);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),    cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_header),        cmocka_unit_test(test_fields),
        cmocka_unit_test(test_verbs_fields),  cmocka_unit_test(test_roster_fields),
        cmocka_unit_test(test_roster_arrays), cmocka_unit_test(test_noise),
        cmocka_unit_test(test_hello),         cmocka_unit_test(test_reply_and_confirm),
        cmocka_unit_test(test_names),         cmocka_unit_test(test_extremes),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
