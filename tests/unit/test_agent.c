/* SPDX-License-Identifier: MIT */
/* The agent's data plane: whole nodes in one process, every element compared, guard bytes around every buffer. */
#include "tests/sim/agents.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "daemon/transport_tcp.h"
#include "proto/status.h"
#include "tests/sim/fake_verbs.h"

#define GUARD 256u

static uint64_t rng_state;

static uint32_t rnd(void)
{
    rng_state = rng_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(rng_state >> 33);
}

/* Fills [at, at + bytes) with small integers in f32, so that sums are exact, and returns them. */
static float *fill(char *at, uint64_t count)
{
    float *v = (float *)(void *)at;
    for (uint64_t i = 0; i < count; i++)
        v[i] = (float)((int)(rnd() % 2001) - 1000);
    return v;
}

static void guard_set(char *at, uint64_t bytes)
{
    memset(at - GUARD, 0xa5, GUARD);
    memset(at + bytes, 0xa5, GUARD);
}

static void guard_check(const char *at, uint64_t bytes)
{
    for (uint32_t i = 0; i < GUARD; i++) {
        assert_int_equal((unsigned char)at[-1 - (int)i], 0xa5);
        assert_int_equal((unsigned char)at[bytes + i], 0xa5);
    }
}

/* One collective with f32 sums on every rank; in place or not. Compares everything. */
static void one_op(struct sim *s, uint32_t slot, uint8_t coll, uint64_t count, uint32_t root, bool in_place)
{
    uint32_t n = s->nranks;
    struct hrp_sig sig = {.coll = coll, .count = count, .dtype = HRP_F32, .redop = HRP_SUM, .root = root};
    uint64_t one = count * 4, in_b = coll == HRP_REDUCE_SCATTER ? one * n : one;
    uint64_t out_b = coll == HRP_ALL_GATHER ? one * n : one;
    uint64_t in_off = 4096, out_off = in_off + in_b + 2 * GUARD + 4;
    float *copy[SIM_MAX_RANKS];
    uint64_t op[SIM_MAX_RANKS];
    for (uint32_t r = 0; r < n; r++) {
        char *in = s->rank[r].pool + in_off, *out = s->rank[r].pool + out_off;
        assert_true(out_off + out_b + GUARD <= s->rank[r].pool_bytes);
        memset(out, 0x5a, out_b);
        copy[r] = malloc(in_b + 4);
        memcpy(copy[r], fill(in, in_b / 4), in_b);
        guard_set(in, in_b);
        guard_set(out, out_b);
    }
    for (uint32_t k = 0; k < n; k++) {
        uint32_t r = (k + 3) % n;
        uint64_t o = out_off;
        if (in_place) {
            o = coll == HRP_REDUCE_SCATTER ? in_off + r * one : in_off;
            if (coll == HRP_ALL_GATHER) { /* the input lies in its own segment of the output */
                memcpy(s->rank[r].pool + out_off + r * one, copy[r], one);
                op[r] = sim_post(s, r, slot, &sig, out_off + r * one, out_off);
                continue;
            }
        }
        op[r] = sim_post(s, r, slot, &sig, in_off, o);
    }
    for (uint32_t r = 0; r < n; r++) {
        char text[HRP_OP_TEXT + 1];
        if (sim_wait(s, r, slot, op[r], text) != HRP_OK)
            fail_msg("rank %u: %s", r, text);
        uint64_t o = out_off;
        if (in_place && coll != HRP_ALL_GATHER)
            o = coll == HRP_REDUCE_SCATTER ? in_off + r * one : in_off;
        const float *got = (const float *)(const void *)(s->rank[r].pool + o);
        for (uint64_t i = 0; i < out_b / 4; i++) {
            float want = 0;
            if (coll == HRP_ALL_REDUCE)
                for (uint32_t k = 0; k < n; k++)
                    want += copy[k][i];
            else if (coll == HRP_REDUCE_SCATTER)
                for (uint32_t k = 0; k < n; k++)
                    want += copy[k][r * count + i];
            else if (coll == HRP_BROADCAST)
                want = copy[root][i];
            else
                want = copy[i / count][i % count];
            if (got[i] != want)
                fail_msg("coll %u count %llu rank %u element %llu: %f instead of %f", coll,
                         (unsigned long long)count, r, (unsigned long long)i, (double)got[i], (double)want);
        }
        if (!in_place) {
            assert_memory_equal(s->rank[r].pool + in_off, copy[r], in_b);
            guard_check(s->rank[r].pool + out_off, out_b);
        }
        guard_check(s->rank[r].pool + in_off, in_b);
    }
    for (uint32_t r = 0; r < n; r++)
        free(copy[r]);
}

static void barrier(struct sim *s, uint32_t slot)
{
    struct hrp_sig sig = {.coll = HRP_BARRIER, .dtype = HRP_U8};
    uint64_t op[SIM_MAX_RANKS];
    for (uint32_t r = 0; r < s->nranks; r++)
        op[r] = sim_post(s, r, slot, &sig, UINT64_MAX, UINT64_MAX);
    for (uint32_t r = 0; r < s->nranks; r++)
        assert_int_equal(sim_wait(s, r, slot, op[r], NULL), HRP_OK);
}

static void all_shapes(uint32_t nnodes, uint32_t nranks, const uint32_t *map, uint8_t algo)
{
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {.pool_bytes = 16 << 20};
    o.comm.algo = algo;
    o.comm.reproducible = algo > HRP_ALGO_GATHER ? HRP_OFF : HRP_ON;
    static const uint64_t counts[] = {0, 1, 17, 1000, 1025, 3000, 20000, 100003, 300001};
    sim_start(s, nnodes, nranks, map, &o);
    assert_int_equal(sim_comm(s, 77, 0, &o), HRP_OK);
    barrier(s, 0);
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
        for (int in_place = 0; in_place < 2; in_place++) {
            one_op(s, 0, HRP_ALL_REDUCE, counts[i], 0, in_place);
            one_op(s, 0, HRP_BROADCAST, counts[i], nranks - 1, in_place);
            one_op(s, 0, HRP_REDUCE_SCATTER, counts[i] / nranks, 0, in_place);
            one_op(s, 0, HRP_ALL_GATHER, counts[i] / nranks, 0, in_place);
        }
    barrier(s, 0);
    sim_stop(s);
    free(s);
}

static void test_one_node(void **state)
{
    (void)state;
    static const uint32_t map[4] = {0};
    all_shapes(1, 1, map, 0);
    all_shapes(1, 4, map, 0);
}

static void test_two_nodes(void **state)
{
    (void)state;
    static const uint32_t map[4] = {0, 0, 1, 1}, uneven[4] = {0, 0, 0, 1}, mixed[4] = {0, 1, 0, 1};
    all_shapes(2, 4, map, 0);
    all_shapes(2, 4, uneven, 0);
    all_shapes(2, 4, mixed, HRP_ALGO_GATHER);
}

static void test_more_nodes(void **state)
{
    (void)state;
    static const uint32_t three[5] = {0, 1, 2, 1, 0}, five[5] = {0, 1, 2, 3, 4};
    all_shapes(3, 5, three, 0);
    all_shapes(5, 5, five, 0);
}

static void test_other_algorithms(void **state)
{
    (void)state;
    static const uint32_t four[8] = {0, 0, 1, 1, 2, 2, 3, 3};
    all_shapes(4, 8, four, HRP_ALGO_PAIRWISE);
    all_shapes(4, 8, four, HRP_ALGO_RING);
    all_shapes(4, 8, four, HRP_ALGO_TREE);
}

/* Many comms on an arena with nothing but their reserves; every rank posts in another order. */
static void test_no_deadlock_at_minimum(void **state)
{
    (void)state;
    enum { COMMS = 16, COUNT = 200000 };
    static const uint32_t map[4] = {0, 0, 1, 1};
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {.pool_bytes = (uint64_t)COMMS * COUNT * 4 + 4096};
    o.agent.arena_bytes = 12 << 20;
    o.unit_bytes = 128 << 10;
    sim_start(s, 2, 4, map, &o);
    for (uint32_t c = 0; c < COMMS; c++)
        assert_int_equal(sim_comm(s, 100 + c, c, &o), HRP_OK);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = COUNT, .dtype = HRP_F32, .redop = HRP_SUM};
    for (int round = 0; round < 4; round++) {
        uint32_t order[4][COMMS];
        uint64_t op[4][COMMS];
        for (uint32_t r = 0; r < 4; r++) {
            fill(s->rank[r].pool, (uint64_t)COMMS * COUNT);
            for (uint32_t c = 0; c < COMMS; c++) {
                uint32_t k = rnd() % (c + 1);
                order[r][c] = order[r][k];
                order[r][k] = c;
            }
        }
        float want = 0;
        for (uint32_t r = 0; r < 4; r++)
            want += ((float *)(void *)s->rank[r].pool)[5 * COUNT + 7];
        for (uint32_t c = 0; c < COMMS; c++)
            for (uint32_t r = 0; r < 4; r++) {
                uint64_t at = (uint64_t)order[r][c] * COUNT * 4;
                op[r][order[r][c]] = sim_post(s, r, order[r][c], &sig, at, at);
            }
        for (uint32_t r = 0; r < 4; r++)
            for (uint32_t c = 0; c < COMMS; c++)
                assert_int_equal(sim_wait(s, r, c, op[r][c], NULL), HRP_OK);
        for (uint32_t r = 0; r < 4; r++)
            assert_true(((float *)(void *)s->rank[r].pool)[5 * COUNT + 7] == want);
    }
    sim_stop(s);
    free(s);
}

static void test_mismatch(void **state)
{
    (void)state;
    static const uint32_t map[4] = {0, 0, 1, 1};
    for (int where = 0; where < 3; where++) { /* same node as rank 0; other node, small; other node, large */
        struct sim *s = calloc(1, sizeof(*s));
        struct sim_options o = {0};
        sim_start(s, 2, 4, map, &o);
        assert_int_equal(sim_comm(s, 9, 0, &o), HRP_OK);
        struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = where == 2 ? 400000 : 100, .redop = HRP_SUM};
        struct hrp_sig other = sig;
        other.count = where == 1 ? 400000 : sig.count - 2;
        char first[HRP_OP_TEXT + 1], text[HRP_OP_TEXT + 1];
        uint64_t op[4];
        for (uint32_t r = 0; r < 4; r++) {
            memset(s->rank[r].pool, 0x11, 64);
            bool odd = where == 0 ? r == 1 : r >= 2;
            op[r] = sim_post(s, r, 0, odd ? &other : &sig, 0, 0);
        }
        for (uint32_t r = 0; r < 4; r++) {
            assert_int_equal(sim_wait(s, r, 0, op[r], r ? text : first), HRP_MISMATCH);
            if (r)
                assert_string_equal(text, first);
            for (int i = 0; i < 64; i++)
                if (where <
                    2) /* no unit of a mismatched op may write before all agree; large: NaN or untouched */
                    assert_int_equal(s->rank[r].pool[i], 0x11);
        }
        char a[32], b[32];
        snprintf(a, sizeof(a), "%llu x", (unsigned long long)sig.count);
        snprintf(b, sizeof(b), "%llu x", (unsigned long long)other.count);
        assert_non_null(strstr(first, a));
        assert_non_null(strstr(first, b));
        one_op(s, 0, HRP_ALL_REDUCE, 1000, 0, true); /* the comm goes on */
        one_op(s, 0, HRP_ALL_REDUCE, 200000, 0, false);
        sim_stop(s);
        free(s);
    }
}

/* The last local rank posts after the disagreement was reported: its node has all it needs to run the op. */
static void test_mismatch_before_last_post(void **state)
{
    (void)state;
    static const uint32_t map[4] = {0, 1, 1, 1};
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {0};
    sim_start(s, 2, 4, map, &o);
    assert_int_equal(sim_comm(s, 9, 0, &o), HRP_OK);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 100, .redop = HRP_SUM}, other = sig;
    other.count = 99;
    for (int round = 0; round < 20; round++) {
        uint64_t op[4];
        for (uint32_t r = 0; r < 4; r++)
            op[r] = sim_post(s, r, 0, r == 2 ? &other : &sig, 0, 0);
        for (uint32_t r = 0; r < 4; r++)
            assert_int_equal(sim_wait(s, r, 0, op[r], NULL), HRP_MISMATCH);
    }
    one_op(s, 0, HRP_ALL_REDUCE, 1000, 0, true);
    sim_stop(s);
    free(s);
}

static void test_deadline(void **state)
{
    (void)state;
    static const uint32_t map[4] = {0, 0, 1, 1};
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {.comm.op_timeout_ms = 300};
    sim_start(s, 2, 4, map, &o);
    assert_int_equal(sim_comm(s, 9, 0, &o), HRP_OK);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 5000, .redop = HRP_SUM};
    char text[HRP_OP_TEXT + 1], late[HRP_OP_TEXT + 1];
    uint64_t op = 0;
    for (uint32_t r = 0; r < 3; r++)
        op = sim_post(s, r, 0, &sig, 0, 0);
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(sim_wait(s, r, 0, op, text), HRP_TIMEOUT);
        assert_non_null(strstr(text, "rank 3 (node n1, process 1003)"));
        assert_null(strstr(text, "rank 2 ("));
    }
    assert_int_equal(sim_post(s, 3, 0, &sig, 0, 0), op);
    assert_int_equal(sim_wait(s, 3, 0, op, late), HRP_TIMEOUT);
    assert_string_equal(late, text);
    one_op(s, 0, HRP_ALL_REDUCE, 100000, 0, true);
    sim_stop(s);
    free(s);
}

static void test_rank_dies(void **state)
{
    (void)state;
    static const uint32_t map[6] = {0, 0, 1, 1, 2, 2};
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 1000000, .redop = HRP_SUM};
    for (int posted = 0; posted < 2; posted++) {
        struct sim *s = calloc(1, sizeof(*s));
        struct sim_options o = {0};
        sim_start(s, 3, 6, map, &o);
        assert_int_equal(sim_comm(s, 9, 0, &o), HRP_OK);
        uint64_t op[6];
        for (uint32_t r = 0; r < 6; r++)
            if (r != 3 || posted)
                op[r] = sim_post(s, r, 0, &sig, 0, 0);
        hrd_agent_session_end(s->node[1].agent, 4, "process 1003 died");
        char text[HRP_OP_TEXT + 1];
        for (uint32_t r = 0; r < 6; r++) {
            if (r == 3)
                continue;
            uint32_t status = sim_wait(s, r, 0, op[r], text);
            assert_true(status == HRP_RANK_LOST || (posted && status == HRP_OK));
            if (status != HRP_OK)
                assert_string_equal(text, "rank 3 on node n1: process 1003 died");
            uint64_t later = sim_post(s, r, 0, &sig, 0, 0);
            assert_int_equal(sim_wait(s, r, 0, later, text), HRP_RANK_LOST);
        }
        sim_stop(s);
        free(s);
    }
}

static void test_link_lost(void **state)
{
    (void)state;
    static const uint32_t map[3] = {0, 1, 2};
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {0};
    sim_start(s, 3, 3, map, &o);
    assert_int_equal(sim_comm(s, 9, 0, &o), HRP_OK);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 1000, .redop = HRP_SUM};
    sim_post(s, 0, 0, &sig, 0, 0);
    sim_post(s, 1, 0, &sig, 0, 0);
    hrd_agent_link_down(s->node[0].agent, 102, "node n2 was silent for 10 s");
    char text[HRP_OP_TEXT + 1];
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(sim_wait(s, r, 0, 1, text), HRP_PEER_LOST);
        assert_non_null(strstr(text, "n"));
    }
    sim_stop(s);
    free(s);
}

/* What the client library never writes: each costs the writer its session and the comm, nothing else. */
static void test_hostile_descriptors(void **state)
{
    (void)state;
    static const uint32_t map[3] = {0, 0, 1};
    for (int kind = 0; kind < 11; kind++) {
        struct sim *s = calloc(1, sizeof(*s));
        struct sim_options o = {0};
        sim_start(s, 2, 3, map, &o);
        assert_int_equal(sim_comm(s, 9, 0, &o), HRP_OK);
        assert_int_equal(sim_comm(s, 10, 1, &o), HRP_OK);
        struct hrp_desc d = {.op = 1,
                             .sig = {.coll = HRP_ALL_REDUCE, .count = 1000},
                             .in = {.kind = HRP_BUF_SHARED, .id = 1},
                             .out = {.kind = HRP_BUF_SHARED, .id = 1}};
        switch (kind) {
        case 0:
            d.op = 2;
            break;
        case 1:
            d.sig.dtype = HRP_NDTYPES;
            break;
        case 2:
            d.sig.coll = HRP_NCOLLS;
            break;
        case 3:
            d.in.offset = s->rank[0].pool_bytes - 3999;
            break;
        case 4:
            d.out.offset = UINT64_MAX - 100;
            break;
        case 5:
            d.in.kind = HRP_BUF_NONE;
            break;
        case 6:
            d.flags = HRP_DESC_FLAGS + 1;
            break;
        case 7:
            d.in.kind = 99;
            break;
        case 8:
            d.sig.count = UINT64_C(1) << 61;
            break;
        case 9: /* it cannot do both */
            d.flags = HRP_DESC_OVERLAP_COMPUTE | HRP_DESC_OVERLAP_IDLE;
            break;
        }
        if (kind < 10) {
            sim_push(s, 0, 0, &d, hrp_flag(1, HRP_CHUNK_ALL));
        } else { /* alone: beside a good op that one could complete before the session ends */
            atomic_store(&hrp_seg_comm(s->rank[0].seg, 0)->tail, UINT64_C(1) << 40);
            atomic_fetch_add(&s->rank[0].seg->submits, 1);
        }
        struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 1000};
        sim_post(s, 1, 0, &sig, 0, 0);
        sim_post(s, 2, 0, &sig, 0, 0);
        char text[HRP_OP_TEXT + 1];
        assert_int_equal(sim_wait(s, 1, 0, 1, text), HRP_RANK_LOST);
        assert_non_null(strstr(text, "rank 0 on node n0"));
        assert_int_equal(sim_wait(s, 2, 0, 1, NULL), HRP_RANK_LOST);
        sim_stop(s);
        free(s);
    }
}

/* A rank whose ready comes from a GPU stream: no doorbell, no submit counter, whenever the stream gets there. */
static void test_stream_ready(void **state)
{
    (void)state;
    static const uint32_t map[3] = {0, 0, 1};
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {.agent = {.spin_us = 100}};
    sim_start(s, 2, 3, map, &o);
    assert_int_equal(sim_comm(s, 9, 0, &o), HRP_OK);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 1000, .dtype = HRP_F32, .redop = HRP_SUM};
    for (uint64_t n = 1; n <= 3; n++) {
        static const uint32_t hints[] = {0, HRP_DESC_OVERLAP_COMPUTE, HRP_DESC_OVERLAP_IDLE};
        struct hrp_desc d = {.op = n,
                             .sig = sig,
                             .flags = HRP_DESC_STREAM | hints[n - 1],
                             .in = {.kind = HRP_BUF_SHARED, .id = 1},
                             .out = {.kind = HRP_BUF_SHARED, .id = 1, .offset = 8192}};
        for (uint32_t r = 0; r < 3; r++)
            memset(s->rank[r].pool, 0x7f, 12288); /* NaN, until the stream has written the input */
        sim_push(s, 0, 0, &d, 0);
        s->rank[0].posted[0]++;
        for (uint32_t r = 1; r < 3; r++) {
            float *in = (float *)(void *)s->rank[r].pool;
            for (uint64_t i = 0; i < 1000; i++)
                in[i] = (float)(r * i);
            sim_post(s, r, 0, &sig, 0, 8192);
        }
        nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL); /* the agent is past its spin by now */
        assert_false(sim_done(s, 1, 0, n));
        float *in = (float *)(void *)s->rank[0].pool;
        for (uint64_t i = 0; i < 1000; i++)
            in[i] = 100;
        atomic_store_explicit(&hrp_seg_comm(s->rank[0].seg, 0)->flags[n % HRP_OP_SLOTS].ready,
                              hrp_flag(n, HRP_CHUNK_ALL), memory_order_release);
        for (uint32_t r = 0; r < 3; r++) {
            assert_int_equal(sim_wait(s, r, 0, n, NULL), HRP_OK);
            const float *out = (const float *)(const void *)(s->rank[r].pool + 8192);
            for (uint64_t i = 0; i < 1000; i++)
                assert_true(out[i] == (float)(100 + 3 * i));
        }
    }
    sim_stop(s);
    free(s);
}

/* The deadline runs from the first rank's ready, not from its descriptor; and an op that fails is not looked at any more. */
static void test_stream_deadline(void **state)
{
    (void)state;
    static const uint32_t map[2] = {0, 0};
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {0};
    sim_start(s, 1, 2, map, &o);
    assert_int_equal(sim_comm(s, 9, 0, &o), HRP_OK);
    struct hrp_desc d = {.op = 1,
                         .sig = {.coll = HRP_ALL_REDUCE, .count = 10},
                         .timeout_ms = 300,
                         .flags = HRP_DESC_STREAM,
                         .in = {.kind = HRP_BUF_SHARED, .id = 1},
                         .out = {.kind = HRP_BUF_SHARED, .id = 1}};
    sim_push(s, 0, 0, &d, 0);
    sim_push(s, 1, 0, &d, 0);
    nanosleep(&(struct timespec){.tv_nsec = 800000000}, NULL);
    assert_false(sim_done(s, 0, 0, 1));
    atomic_store_explicit(&hrp_seg_comm(s->rank[0].seg, 0)->flags[1].ready, hrp_flag(1, HRP_CHUNK_ALL),
                          memory_order_release);
    char text[HRP_OP_TEXT + 1];
    assert_int_equal(sim_wait(s, 0, 0, 1, text), HRP_TIMEOUT);
    assert_int_equal(sim_wait(s, 1, 0, 1, text), HRP_TIMEOUT);
    s->rank[0].posted[0] = s->rank[1].posted[0] = 1;
    one_op(s, 0, HRP_ALL_REDUCE, 1000, 0, true);
    sim_stop(s);
    free(s);
}

static void test_leave(void **state)
{
    (void)state;
    static const uint32_t map[4] = {0, 0, 1, 1};
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {0};
    sim_start(s, 2, 4, map, &o);
    assert_int_equal(sim_comm(s, 9, 0, &o), HRP_OK);
    one_op(s, 0, HRP_ALL_REDUCE, 1000, 0, true);
    hrd_agent_comm_leave(s->node[0].agent, 9, 0);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 1000};
    uint64_t op = sim_post(s, 2, 0, &sig, 0, 0); /* can never complete: rank 0 is gone */
    char text[HRP_OP_TEXT + 1];
    assert_int_equal(sim_wait(s, 2, 0, op, text), HRP_RANK_LOST);
    assert_non_null(strstr(text, "rank 0 left"));
    for (uint32_t r = 1; r < 4; r++)
        hrd_agent_comm_leave(s->node[map[r]].agent, 9, r);
    for (int i = 0; i < 20000 && s->node[0].comms_gone + s->node[1].comms_gone < 2; i++) {
        sim_events(s);
        struct timespec ts = {.tv_nsec = 1000000};
        nanosleep(&ts, NULL);
    }
    assert_int_equal(s->node[0].comms_gone, 1);
    assert_int_equal(s->node[1].comms_gone, 1);
    assert_int_equal(sim_comm(s, 10, 1, &o), HRP_OK);
    one_op(s, 1, HRP_ALL_REDUCE, 100000, 0, true);
    sim_stop(s);
    free(s);
}

static void test_arena_too_small(void **state)
{
    (void)state;
    static const uint32_t map[2] = {0, 1};
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {.unit_bytes = 8 << 20};
    o.agent.arena_bytes = 4 << 20;
    sim_start(s, 2, 2, map, &o);
    assert_int_equal(sim_comm(s, 9, 0, &o), HRP_RESOURCE);
    assert_non_null(strstr(s->node[0].last_text, "arena_size"));
    o.unit_bytes = 64 << 10;
    assert_int_equal(sim_comm(s, 10, 1, &o), HRP_OK);
    one_op(s, 1, HRP_ALL_REDUCE, 100000, 0, true);
    sim_stop(s);
    free(s);
}

static void test_back_to_back(void **state)
{
    (void)state;
    static const uint32_t map[4] = {0, 0, 1, 1};
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {0};
    sim_start(s, 2, 4, map, &o);
    assert_int_equal(sim_comm(s, 9, 0, &o), HRP_OK);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 64, .redop = HRP_MAX};
    uint64_t op[4] = {0};
    for (int i = 0; i < 2000; i++)
        for (uint32_t r = 0; r < 4; r++) {
            if (op[r] >= HRP_OP_SLOTS)
                assert_int_equal(sim_wait(s, r, 0, op[r] - HRP_OP_SLOTS + 1, NULL), HRP_OK);
            op[r] = sim_post(s, r, 0, &sig, 0, 4096);
        }
    for (uint32_t r = 0; r < 4; r++)
        assert_int_equal(sim_wait(s, r, 0, op[r], NULL), HRP_OK);
    sim_stop(s);
    free(s);
}

/* Eager blocks of as many ops as there are slots, a partial and a result of each peer in each: none lies over another. */
static void test_eager_blocks(void **state)
{
    (void)state;
    enum { OPS = HRP_EAGER_SLOTS + 2, COUNT = 3000, EACH = COUNT * 4 };
    static const uint32_t map[3] = {0, 1, 2};
    struct sim *s = calloc(1, sizeof(*s));
    struct sim_options o = {.pool_bytes = 2 * OPS * EACH};
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = COUNT, .dtype = HRP_F32, .redop = HRP_SUM};
    uint64_t op[OPS][3];
    sim_start(s, 3, 3, map, &o);
    assert_int_equal(sim_comm(s, 9, 0, &o), HRP_OK);
    for (unsigned round = 0; round < 200; round++) {
        for (uint32_t r = 0; r < 3; r++)
            for (unsigned k = 0; k < OPS; k++) {
                float *in = (float *)(void *)(s->rank[r].pool + 2 * k * EACH);
                for (unsigned i = 0; i < COUNT; i++)
                    in[i] = (float)(round + 1000 * k + i + r);
                op[k][r] = sim_post(s, r, 0, &sig, 2 * k * EACH, (2 * k + 1) * EACH);
            }
        for (unsigned k = 0; k < OPS; k++)
            for (uint32_t r = 0; r < 3; r++) {
                assert_int_equal(sim_wait(s, r, 0, op[k][r], NULL), HRP_OK);
                const float *out = (const float *)(const void *)(s->rank[r].pool + (2 * k + 1) * EACH);
                for (unsigned i = 0; i < COUNT; i++)
                    if (out[i] != (float)(3 * (round + 1000 * k + i) + 3))
                        fail_msg("op %u rank %u element %u is %f", k, r, i, (double)out[i]);
            }
    }
    sim_stop(s);
    free(s);
}

/* Nothing of any link is left; and the flow control did its work. */
static int all_freed(void **state)
{
    (void)state;
    assert_int_equal(fake_verbs_rnr(), 0);
    assert_true(fake_verbs_calls(FAKE_POST_SEND) > 100);
    fake_verbs_reset();
    return 0;
}

int main(void)
{
    rng_state = (uint64_t)time(NULL);
    print_message("seed %llu\n", (unsigned long long)rng_state);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_node),
        cmocka_unit_test(test_two_nodes),
        cmocka_unit_test(test_more_nodes),
        cmocka_unit_test(test_other_algorithms),
        cmocka_unit_test(test_no_deadlock_at_minimum),
        cmocka_unit_test(test_mismatch),
        cmocka_unit_test(test_mismatch_before_last_post),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_rank_dies),
        cmocka_unit_test(test_link_lost),
        cmocka_unit_test(test_hostile_descriptors),
        cmocka_unit_test(test_stream_ready),
        cmocka_unit_test(test_stream_deadline),
        cmocka_unit_test(test_leave),
        cmocka_unit_test(test_arena_too_small),
        cmocka_unit_test(test_back_to_back),
        cmocka_unit_test(test_eager_blocks),
    };
    /* Where it matters who moves the bytes. */
    const struct CMUnitTest with_io[] = {
        cmocka_unit_test(test_two_nodes),    cmocka_unit_test(test_no_deadlock_at_minimum),
        cmocka_unit_test(test_rank_dies),    cmocka_unit_test(test_link_lost),
        cmocka_unit_test(test_back_to_back), cmocka_unit_test(test_eager_blocks),
    };
    int failed = cmocka_run_group_tests_name("tcp", tests, NULL, NULL);
    sim_tcp_io = hrd_tcp_io_new(2, 20);
    failed += cmocka_run_group_tests_name("tcp, I/O threads", with_io, NULL, NULL);
    hrd_tcp_io_free(sim_tcp_io);
    sim_over_verbs = true;
    failed += cmocka_run_group_tests_name("verbs", tests, NULL, all_freed);
    return failed;
}
