/* SPDX-License-Identifier: MIT */
/* Plans: every element in exactly one block, thresholds in bytes, refusals in words, sizes within their bounds. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/plan.h"
#include "tests/sim/schedule_sim.h"

#define MAX_N 64
#define MAX_RANKS 512

/* An env with the arrays it borrows. */
struct roster {
    struct hrd_plan_env env;
    uint32_t node_of_rank[MAX_RANKS];
    uint32_t ranks_on_node[MAX_N];
};

static uint64_t seed = 7;

enum map { MAP_CONTIGUOUS, MAP_ROUND_ROBIN, MAP_UNEQUAL, MAP_HEAVY, NMAPS };

static void roster_init(struct roster *r, uint32_t nnodes, uint32_t nranks, enum map map)
{
    memset(r, 0, sizeof(*r));
    r->env = (struct hrd_plan_env){.nnodes = nnodes,
                                   .nranks = nranks,
                                   .node_of_rank = r->node_of_rank,
                                   .ranks_on_node = r->ranks_on_node,
                                   .reproducible = 1,
                                   .eager_limit = 8192,
                                   .unit_bytes = 1 << 20,
                                   .unit_min_bytes = 64 << 10,
                                   .latency_ns = 20000,
                                   .bandwidth = 5000000000,
                                   .fold_rate = 8000000000};
    for (uint32_t i = 0; i < nranks; i++) {
        uint32_t node = (uint32_t)((uint64_t)i * nnodes / nranks);
        if (map == MAP_ROUND_ROBIN)
            node = i % nnodes;
        else if (map == MAP_UNEQUAL) /* one rank everywhere, the others where chance has it */
            node = i < nnodes ? nnodes - 1 - i : (uint32_t)(sim_random(&seed) % (nnodes / 2 + 1)) % nnodes;
        else if (map == MAP_HEAVY) /* all the others on one node */
            node = i < nnodes ? i : 0;
        r->node_of_rank[i] = node;
        r->ranks_on_node[node]++;
    }
    char why[256];
    assert_int_equal(hrd_plan_check(&r->env, why, sizeof(why)), 0);
}

static struct hrp_sig sig_of(unsigned coll, unsigned dtype, uint64_t count)
{
    return (struct hrp_sig){
        .count = coll == HRP_BARRIER ? 0 : count, .coll = (uint8_t)coll, .dtype = (uint8_t)dtype};
}

static struct hrd_plan plan_of(const struct roster *r, const struct hrp_sig *sig)
{
    struct hrd_plan plan;
    char why[512];
    memset(&plan, 0xa5, sizeof(plan));
    int rc = hrd_plan_op(&r->env, sig, &plan, why, sizeof(why));
    if (rc != 0)
        print_error("%s\n", why);
    assert_int_equal(rc, 0);
    assert_true(strlen(why) > 10 && strlen(why) < 300);
    assert_non_null(strstr(why, hrd_algo_name(plan.algo)));
    return plan;
}

static int by_node(const struct hrp_sig *sig)
{
    return sig->coll == HRP_REDUCE_SCATTER || sig->coll == HRP_ALL_GATHER;
}

/* ---------------------------------------------------------------- units and blocks */

/* Walks one block; next[segment] is the element of each segment that must come next. Returns its elements. */
static uint64_t walk_block(const struct roster *r, const struct hrp_sig *sig, const struct hrd_plan *plan,
                           uint64_t unit, uint32_t block, uint64_t *next)
{
    struct hrd_piece_iter it;
    struct hrd_piece piece;
    uint64_t elems = 0, last_segment = 0;
    hrd_plan_pieces(&r->env, sig, plan, unit, block, &it);
    while (hrd_piece_next(&it, &piece)) {
        assert_true(piece.len > 0);
        assert_true(piece.segment < hrp_sig_segments(sig, r->env.nranks));
        assert_true(elems == 0 || piece.segment > last_segment);
        last_segment = piece.segment;
        if (by_node(sig))
            assert_int_equal(r->node_of_rank[piece.segment], block);
        assert_int_equal(piece.off, next[piece.segment]);
        next[piece.segment] += piece.len;
        elems += piece.len;
    }
    assert_false(hrd_piece_next(&it, &piece));
    assert_int_equal(elems, hrd_plan_block_elems(&r->env, sig, plan, unit, block));
    return elems;
}

/* Blocks of one unit are nearly equal and, but for the end of the range, cut at multiples of 16. */
static void check_balance(const struct hrd_plan *plan, const uint64_t *elems, uint64_t total)
{
    uint64_t low = UINT64_MAX, high = 0, at = 0;
    for (uint32_t b = 0; b < plan->nblocks; b++) {
        low = elems[b] < low ? elems[b] : low;
        high = elems[b] > high ? elems[b] : high;
        assert_true(at % 16 == 0 || at == total);
        at += elems[b];
    }
    assert_true(high - low < 32);
    if (total % 16 == 0)
        assert_true(high - low <= 16);
}

static void check_cover(const struct roster *r, const struct hrp_sig *sig, const struct hrd_plan *plan)
{
    static uint64_t next[MAX_RANKS], elems[MAX_N];
    uint64_t wide = hrd_plan_value_size(sig, plan, HRD_VALUE_PARTIAL);
    if (hrd_plan_value_size(sig, plan, HRD_VALUE_RESULT) > wide)
        wide = hrd_plan_value_size(sig, plan, HRD_VALUE_RESULT);
    memset(next, 0, sizeof(next));
    assert_true(plan->nunits >= 1);
    for (uint64_t u = 0; u < plan->nunits; u++) {
        uint64_t total = 0;
        for (uint32_t b = 0; b < plan->nblocks; b++)
            total += elems[b] = walk_block(r, sig, plan, u, b, next);
        assert_true(total > 0 || sig->count == 0);
        if (!plan->eager)
            assert_true(total * wide <= hrd_plan_unit_max(&r->env));
        if (!by_node(sig))
            check_balance(plan, elems, total);
    }
    for (uint32_t s = 0; s < hrp_sig_segments(sig, r->env.nranks); s++)
        assert_int_equal(next[s], sig->count);
    if (plan->nunits > 1)
        assert_int_equal(plan->slice % 64, 0);
}

static void random_config(struct roster *r)
{
    static const uint64_t units[] = {0, 1, 1000, 65536, 1 << 20, 4 << 20};
    r->env.unit_bytes = units[sim_random(&seed) % 6];
    r->env.unit_min_bytes = units[sim_random(&seed) % 6];
    r->env.eager_limit = (uint32_t)units[sim_random(&seed) % 4];
    r->env.eager_blocks = sim_random(&seed) % 2;
    r->env.wire_f32 = sim_random(&seed) % 2;
    r->env.reproducible = sim_random(&seed) % 2;
    r->env.latency_ns = UINT64_C(1) << sim_random(&seed) % 24;
    r->env.bandwidth = (UINT64_C(1) << sim_random(&seed) % 40) - 1;
    r->env.fold_rate = (UINT64_C(1) << sim_random(&seed) % 40) - 1;
    do {
        r->env.algo = (uint8_t)(sim_random(&seed) % HRD_ALGO_LOCAL);
    } while (hrd_plan_check(&r->env, NULL, 0) != 0);
}

static void test_cover(void **state)
{
    (void)state;
    static const uint64_t counts[] = {0, 1, 15, 16, 17, 63, 64, 65, 1023, 4097, 100003, 1000003};
    struct roster r;
    for (int i = 0; i < 3000; i++) {
        uint32_t n = 1 + (uint32_t)(sim_random(&seed) % (i % 4 ? 9 : MAX_N));
        roster_init(&r, n, n + (uint32_t)(sim_random(&seed) % (2 * n)),
                    (enum map)(sim_random(&seed) % NMAPS));
        random_config(&r);
        struct hrp_sig sig =
            sig_of((unsigned)(sim_random(&seed) % HRP_NCOLLS), (unsigned)(sim_random(&seed) % HRP_NDTYPES),
                   counts[sim_random(&seed) % 12]);
        /* Tiny units of many elements only take time. */
        if (sig.count > 5000 && r.env.unit_bytes < 65536)
            r.env.unit_bytes = 65536;
        sig.root = sig.coll == HRP_BROADCAST ? (uint32_t)(sim_random(&seed) % r.env.nranks) : 0;
        struct hrd_plan plan = plan_of(&r, &sig);
        check_cover(&r, &sig, &plan);
        assert_int_equal(plan.root_node, sig.coll == HRP_BROADCAST ? r.node_of_rank[sig.root] : 0);
        assert_int_equal(plan.algo == HRD_ALGO_LOCAL, n == 1);
    }
}

/* More elements than 32 bits count, and more bytes than any machine has. */
static void test_cover_large(void **state)
{
    (void)state;
    static const uint64_t counts[] = {UINT64_C(4294967296) + 17, (UINT64_C(1) << 31) + 5, UINT64_C(1) << 40};
    struct roster r;
    for (unsigned i = 0; i < 3; i++) {
        for (unsigned coll = 0; coll < HRP_BARRIER; coll++) {
            roster_init(&r, 3, 7, MAP_UNEQUAL);
            r.env.unit_bytes = i == 2 ? UINT64_C(1) << 37 : UINT64_C(256) << 20;
            struct hrp_sig sig = sig_of(coll, i == 1 ? HRP_I8 : HRP_F32, counts[i]);
            struct hrd_plan plan = plan_of(&r, &sig);
            assert_true(plan.nunits > 4);
            check_cover(&r, &sig, &plan);
        }
    }
    /* The largest op that hrp_sig_check lets through does not overflow anything on the way. */
    roster_init(&r, 64, 512, MAP_ROUND_ROBIN);
    for (unsigned coll = 0; coll < HRP_BARRIER; coll++) {
        struct hrp_sig sig = sig_of(coll, HRP_F64, 0);
        sig.count = (UINT64_C(1) << 62) / (8u * hrp_sig_segments(&sig, 512));
        assert_int_equal(hrp_sig_check(&sig, 512), 0);
        struct hrd_plan plan = plan_of(&r, &sig);
        static uint64_t next[MAX_RANKS];
        for (uint32_t s = 0; s < MAX_RANKS; s++)
            next[s] = (plan.nunits - 1) * plan.slice;
        for (uint32_t b = 0; b < plan.nblocks; b++)
            walk_block(&r, &sig, &plan, plan.nunits - 1, b, next);
        assert_int_equal(next[0], sig.count);
    }
}

static void test_unit_size(void **state)
{
    (void)state;
    struct roster r;
    roster_init(&r, 4, 32, MAP_CONTIGUOUS);
    struct hrp_sig sig = sig_of(HRP_ALL_REDUCE, HRP_F32, 1 << 18); /* 1 MiB: four units of 256 KiB */
    struct hrd_plan plan = plan_of(&r, &sig);
    assert_int_equal(plan.nunits, 4);
    sig.count = 16 << 18; /* 16 MiB: units of unit_bytes */
    plan = plan_of(&r, &sig);
    assert_int_equal(plan.slice * 4, r.env.unit_bytes);
    sig.count = 1 << 14; /* 64 KiB: unit_min_bytes, one unit */
    plan = plan_of(&r, &sig);
    assert_int_equal(plan.nunits, 1);
    /* An odd count: near equal units, none of a few elements at the end. */
    sig.count = 1000003;
    plan = plan_of(&r, &sig);
    assert_int_equal(plan.nunits, 4);
    /* Segments count: 32 of them share the unit. */
    sig = sig_of(HRP_REDUCE_SCATTER, HRP_F32, 1 << 18);
    plan = plan_of(&r, &sig);
    assert_int_equal(plan.slice * 4 * 32, r.env.unit_bytes);
    /* Partials that are wider than the result count with their width. */
    r.env.wire_f32 = 1;
    sig = sig_of(HRP_ALL_REDUCE, HRP_BF16, 16 << 18);
    plan = plan_of(&r, &sig);
    assert_int_equal(plan.slice * 4, r.env.unit_bytes);
}

/* ---------------------------------------------------------------- sizes of one unit at one node */

struct sizes {
    uint64_t send_bufs, slots, tx, rx, message;
};

/* What is eager and not a sender's first must be an answer to what the receiver sent. */
static void check_answers(const struct hrd_schedule *s)
{
    for (uint32_t p = 0; p < s->key.nnodes; p++) {
        assert_true(s->recvs[p].count <= HRD_EAGER_MESSAGES);
        for (uint32_t t = 1; t < s->recvs[p].count; t++) {
            assert_int_equal(s->steps[s->list[s->recvs[p].first + t]].value, HRD_VALUE_RESULT);
            assert_true(s->sends[p].count > 0 &&
                        s->steps[s->list[s->sends[p].first]].value == HRD_VALUE_PARTIAL);
        }
    }
}

static struct sizes sizes_of(const struct roster *r, const struct hrp_sig *sig, const struct hrd_plan *plan,
                             uint64_t unit, uint32_t me)
{
    struct hrd_schedule_key key = hrd_plan_key(&r->env, sig, plan, unit, me);
    struct hrd_schedule *s;
    struct sizes z = {0};
    assert_int_equal(hrd_schedule_build(&key, &s), 0);
    assert_int_equal(s->nblocks, plan->nblocks);
    for (uint32_t i = 0; i < s->nbufs; i++)
        z.send_bufs += hrd_plan_block_elems(&r->env, sig, plan, unit, s->buf_block[i]) *
                       hrd_plan_value_size(sig, plan, s->buf_value[i]);
    for (uint32_t i = 0; i < s->nsteps; i++) {
        const struct hrd_step *step = &s->steps[i];
        uint64_t bytes = hrd_plan_block_elems(&r->env, sig, plan, unit, step->block) *
                         hrd_plan_value_size(sig, plan, step->value);
        if (step->kind == HRD_STEP_RECV)
            z.slots += bytes;
        if (step->kind == HRD_STEP_SEND)
            z.tx += bytes;
        if (step->kind == HRD_STEP_SEND && bytes > z.message)
            z.message = bytes;
    }
    z.rx = z.slots;
    if (plan->eager)
        check_answers(s);
    hrd_schedule_free(s);
    return z;
}

static void test_bounds(void **state)
{
    (void)state;
    struct roster r;
    unsigned seen[HRD_NALGOS] = {0};
    for (int i = 0; i < 1500; i++) {
        uint32_t n = 2 + (uint32_t)(sim_random(&seed) % (i % 8 ? 8 : 63));
        roster_init(&r, n, n + (uint32_t)(sim_random(&seed) % 60), (enum map)(sim_random(&seed) % NMAPS));
        random_config(&r);
        struct hrp_sig sig = sig_of((unsigned)(sim_random(&seed) % HRP_NCOLLS),
                                    (unsigned)(sim_random(&seed) % HRP_NDTYPES), sim_random(&seed) % 3000000);
        if (i % 3 == 0)
            sig.count %= 300;
        if (i % 3 == 1) { /* where messages are eager and the op is not */
            sig.count %= 20000;
            r.env.unit_bytes = r.env.unit_min_bytes = 1 << 20;
            r.env.eager_limit = 20000;
        }
        struct hrd_plan plan = plan_of(&r, &sig);
        uint32_t me = (uint32_t)(i % 2 ? 0 : sim_random(&seed) % n);
        struct sizes z = sizes_of(&r, &sig, &plan, 0, me);
        if (plan.eager) {
            assert_int_equal(plan.nunits, 1);
            assert_true(r.env.eager_limit > 0 && z.message <= r.env.eager_limit);
            seen[plan.algo]++;
            if (plan.algo == HRD_ALGO_GATHER)
                continue;
            assert_true(r.env.eager_blocks && plan.algo == HRD_ALGO_DIRECT);
            assert_true(z.send_bufs <= hrd_plan_send_max(&r.env));
            continue;
        }
        assert_true(z.send_bufs <= hrd_plan_send_max(&r.env));
        assert_true(z.slots <= hrd_plan_recv_max(&r.env));
    }
    assert_true(seen[HRD_ALGO_DIRECT] > 10 && seen[HRD_ALGO_GATHER] > 100);
}

/* What all units together put on the wire at each node. */
static void test_wire_bytes(void **state)
{
    (void)state;
    static const uint8_t algos[] = {HRD_ALGO_DIRECT, HRD_ALGO_RING, HRD_ALGO_PAIRWISE, HRD_ALGO_GATHER};
    struct roster r;
    for (uint32_t n = 2; n <= 33; n++) {
        for (unsigned a = 0; a < sizeof(algos); a++) {
            if (algos[a] == HRD_ALGO_PAIRWISE && (n & (n - 1)) != 0)
                continue;
            roster_init(&r, n, 3 * n, MAP_UNEQUAL);
            r.env.reproducible = algos[a] == HRD_ALGO_DIRECT || algos[a] == HRD_ALGO_GATHER;
            r.env.algo = algos[a];
            struct hrp_sig sig = sig_of(HRP_ALL_REDUCE, HRP_F32, 1 << 20);
            struct hrd_plan plan = plan_of(&r, &sig);
            double ideal = algos[a] == HRD_ALGO_GATHER ? (n - 1.0) * 4194304 : 2 * (n - 1.0) / n * 4194304;
            for (uint32_t me = 0; me < n; me++) {
                uint64_t tx = 0, rx = 0;
                for (uint64_t u = 0; u < plan.nunits; u++) {
                    struct sizes z = sizes_of(&r, &sig, &plan, u, me);
                    tx += z.tx;
                    rx += z.rx;
                }
                assert_true((double)tx > 0.99 * ideal && (double)tx < 1.01 * ideal);
                assert_true((double)rx > 0.99 * ideal && (double)rx < 1.01 * ideal);
                if ((n & (n - 1)) == 0 || algos[a] == HRD_ALGO_GATHER)
                    assert_true(tx == (uint64_t)ideal && rx == (uint64_t)ideal);
            }
        }
    }
}

/* ---------------------------------------------------------------- the choice */

static void expect(const struct roster *r, struct hrp_sig sig, unsigned algo, int eager)
{
    struct hrd_plan plan = plan_of(r, &sig);
    assert_int_equal(plan.algo, algo);
    assert_int_equal(plan.eager, eager);
}

/* The eager limit is bytes of a message, whatever the type: one element more than fits and it is direct. */
static void test_threshold(void **state)
{
    (void)state;
    struct roster r;
    for (unsigned dtype = 0; dtype < HRP_NDTYPES; dtype++) {
        roster_init(&r, 4, 12, MAP_UNEQUAL);
        uint64_t fits = r.env.eager_limit / hrp_dtype_size(dtype), most = 0;
        for (uint32_t i = 0; i < 4; i++)
            most = r.ranks_on_node[i] > most ? r.ranks_on_node[i] : most;
        for (int d = -1; d <= 1; d++) {
            unsigned algo = d > 0 ? HRD_ALGO_DIRECT : HRD_ALGO_GATHER;
            expect(&r, sig_of(HRP_ALL_REDUCE, dtype, fits + (uint64_t)d), algo, d <= 0);
            expect(&r, sig_of(HRP_BROADCAST, dtype, fits + (uint64_t)d), algo, d <= 0);
            expect(&r, sig_of(HRP_ALL_GATHER, dtype, fits / most + (uint64_t)d), algo, d <= 0);
            expect(&r, sig_of(HRP_REDUCE_SCATTER, dtype, fits / most + (uint64_t)d), algo, d <= 0);
        }
        /* Partials of half types that travel as f32 are twice as many bytes. */
        r.env.wire_f32 = 1;
        uint64_t half = dtype == HRP_F16 || dtype == HRP_BF16 ? 2 : 1;
        expect(&r, sig_of(HRP_ALL_REDUCE, dtype, fits / half), HRD_ALGO_GATHER, 1);
        expect(&r, sig_of(HRP_ALL_REDUCE, dtype, fits / half + 1), HRD_ALGO_DIRECT, 0);
        expect(&r, sig_of(HRP_BROADCAST, dtype, fits), HRD_ALGO_GATHER, 1);
        r.env.eager_limit = 0;
        expect(&r, sig_of(HRP_ALL_REDUCE, dtype, 1), HRD_ALGO_DIRECT, 0);
    }
}

/* Blocks of direct are eager where every node knows that and the op is one unit. */
static void test_eager_blocks(void **state)
{
    (void)state;
    struct roster r;
    for (unsigned dtype = 0; dtype < HRP_NDTYPES; dtype++) {
        roster_init(&r, 4, 12, MAP_UNEQUAL);
        uint64_t fits = r.env.eager_limit / hrp_dtype_size(dtype) * 4;
        expect(&r, sig_of(HRP_ALL_REDUCE, dtype, fits), HRD_ALGO_DIRECT, 0); /* not all nodes know them */
        r.env.eager_blocks = 1;
        expect(&r, sig_of(HRP_ALL_REDUCE, dtype, fits), HRD_ALGO_DIRECT, 1);
        expect(&r, sig_of(HRP_ALL_REDUCE, dtype, fits + 1), HRD_ALGO_DIRECT, 0);
        expect(&r, sig_of(HRP_BROADCAST, dtype, fits), HRD_ALGO_DIRECT, 0);
        expect(&r, sig_of(HRP_REDUCE_SCATTER, dtype, fits / 4), HRD_ALGO_DIRECT, 0);
        uint64_t direct = plan_of(&r, &(struct hrp_sig){.count = fits, .dtype = (uint8_t)dtype}).model_ns;
        r.env.eager_blocks = 0;
        uint64_t asked = plan_of(&r, &(struct hrp_sig){.count = fits, .dtype = (uint8_t)dtype}).model_ns;
        assert_int_equal(asked - direct, r.env.latency_ns); /* nobody waits for room */
        /* What would be several units stays so. */
        r.env.eager_blocks = 1;
        r.env.eager_limit = 1 << 20;
        r.env.algo = HRD_ALGO_DIRECT;
        expect(&r, sig_of(HRP_ALL_REDUCE, dtype, (64 << 10) / hrp_dtype_size(dtype)), HRD_ALGO_DIRECT, 1);
        expect(&r, sig_of(HRP_ALL_REDUCE, dtype, (64 << 10) / hrp_dtype_size(dtype) + 64), HRD_ALGO_DIRECT,
               0);
    }
}

/* Where the model decides, equal bytes get equal plans whatever the type. */
static void test_bytes_decide(void **state)
{
    (void)state;
    struct roster r;
    unsigned seen[HRD_NALGOS] = {0};
    for (int i = 0; i < 3000; i++) {
        uint32_t n = 2 + (uint32_t)(sim_random(&seed) % 31);
        roster_init(&r, n, n, MAP_ROUND_ROBIN);
        r.env.reproducible = sim_random(&seed) % 2;
        r.env.eager_limit = sim_random(&seed) % 4 ? 1 << 20 : 0;
        r.env.latency_ns = UINT64_C(1) << (4 + sim_random(&seed) % 20);
        uint64_t bytes =
            ((UINT64_C(1) << sim_random(&seed) % 26) + sim_random(&seed) % 4096) & ~UINT64_C(511);
        struct hrp_sig first = sig_of(HRP_ALL_REDUCE, HRP_F64, bytes / 8);
        struct hrd_plan want = plan_of(&r, &first);
        seen[want.algo]++;
        for (unsigned dtype = 0; dtype < HRP_NDTYPES; dtype++)
            expect(&r, sig_of(HRP_ALL_REDUCE, dtype, bytes / hrp_dtype_size(dtype)), want.algo, want.eager);
        if (r.env.reproducible)
            assert_true(want.algo == HRD_ALGO_DIRECT || want.algo == HRD_ALGO_GATHER);
        if (n < 4)
            assert_int_not_equal(want.algo, HRD_ALGO_TREE);
    }
    /* The rules above mean something only if the others are met at all. */
    assert_true(seen[HRD_ALGO_DIRECT] > 100 && seen[HRD_ALGO_GATHER] > 100 && seen[HRD_ALGO_TREE] > 10);
}

/* Eager and direct cross where latency saved and bytes paid are equal, however large the limit is. */
static void test_model_decides(void **state)
{
    (void)state;
    struct roster r;
    roster_init(&r, 16, 16, MAP_CONTIGUOUS);
    r.env.eager_limit = 4 << 20;
    r.env.fold_rate = 1000000000000;
    expect(&r, sig_of(HRP_ALL_REDUCE, HRP_F32, 1 << 8), HRD_ALGO_GATHER, 1);
    /* 256 KiB at 5 GB/s: 15 times 52 us to all others against 2 x 15/16 times 52 us and two hops of 20 us more */
    expect(&r, sig_of(HRP_ALL_REDUCE, HRP_F32, 1 << 16), HRD_ALGO_DIRECT, 0);
    expect(&r, sig_of(HRP_BROADCAST, HRP_F32, 1 << 8), HRD_ALGO_GATHER, 1);
    expect(&r, sig_of(HRP_BROADCAST, HRP_F32, 1 << 16), HRD_ALGO_DIRECT, 0);
    struct hrp_sig sig = sig_of(HRP_ALL_REDUCE, HRP_F32, 16 << 18);
    uint64_t slow, fast = plan_of(&r, &sig).model_ns;
    r.env.bandwidth /= 2;
    slow = plan_of(&r, &sig).model_ns;
    assert_true(slow > fast * 3 / 2 && slow < fast * 2);
}

/* Units take turns between the two trees, so that together they load all nodes about alike. */
static void test_tree_units(void **state)
{
    (void)state;
    struct roster r;
    for (uint32_t n = 4; n <= 32; n++) {
        roster_init(&r, n, n, MAP_CONTIGUOUS);
        r.env.reproducible = 0;
        r.env.algo = HRD_ALGO_TREE;
        struct hrp_sig sig = sig_of(HRP_ALL_REDUCE, HRP_F32, 4 << 18);
        struct hrd_plan plan = plan_of(&r, &sig);
        for (uint32_t me = 0; me < n; me++) {
            uint64_t tx = 0, rx = 0;
            for (uint64_t u = 0; u < plan.nunits; u++) {
                struct hrd_schedule_key key = hrd_plan_key(&r.env, &sig, &plan, u, me);
                assert_int_equal(key.variant, u % 2);
                struct sizes z = sizes_of(&r, &sig, &plan, u, me);
                tx += z.tx;
                rx += z.rx;
            }
            assert_true(tx <= 2 * 4194304 + 2 * plan.slice * 4);
            assert_true(rx <= 2 * 4194304 + 2 * plan.slice * 4);
        }
    }
}

/* Beyond eager messages auto never pays bytes for latency: gather only where it sends what direct sends. */
static void test_gather_is_small(void **state)
{
    (void)state;
    struct roster r;
    for (uint32_t n = 2; n <= 16; n++) {
        roster_init(&r, n, n, MAP_CONTIGUOUS);
        r.env.latency_ns = 1000000000;
        struct hrp_sig sig = sig_of(HRP_ALL_REDUCE, HRP_BF16, 65536);
        expect(&r, sig, n == 2 ? HRD_ALGO_GATHER : HRD_ALGO_DIRECT, 0);
        r.env.wire_f32 = 1;
        expect(&r, sig, HRD_ALGO_DIRECT, 0);
    }
}

static void test_plan_is_pure(void **state)
{
    (void)state;
    struct roster r, other;
    for (int i = 0; i < 300; i++) {
        uint32_t n = 2 + (uint32_t)(sim_random(&seed) % 15);
        roster_init(&r, n, 2 * n, MAP_UNEQUAL);
        random_config(&r);
        struct hrp_sig sig =
            sig_of((unsigned)(sim_random(&seed) % HRP_NCOLLS), HRP_F16, sim_random(&seed) % 100000);
        struct hrd_plan a = plan_of(&r, &sig), b;
        other = r;
        other.env.node_of_rank = other.node_of_rank;
        other.env.ranks_on_node = other.ranks_on_node;
        memset(&b, 0x5a, sizeof(b));
        assert_int_equal(hrd_plan_op(&other.env, &sig, &b, NULL, 0),
                         0); /* as the hot path does, without words */
        assert_true(a.algo == b.algo && a.eager == b.eager && a.wire == b.wire && a.nvariants == b.nvariants);
        assert_true(a.nblocks == b.nblocks && a.root_node == b.root_node && a.slice == b.slice);
        assert_true(a.nunits == b.nunits && a.model_ns == b.model_ns);
    }
}

static void test_wire_dtype(void **state)
{
    (void)state;
    struct roster r;
    for (unsigned dtype = 0; dtype < HRP_NDTYPES; dtype++) {
        int half = dtype == HRP_F16 || dtype == HRP_BF16;
        for (unsigned redop = 0; redop < HRP_NREDOPS; redop++) {
            struct hrp_sig sig = sig_of(HRP_ALL_REDUCE, dtype, 100000);
            sig.redop = (uint8_t)redop;
            roster_init(&r, 4, 8, MAP_CONTIGUOUS);
            assert_int_equal(plan_of(&r, &sig).wire, dtype);
            r.env.wire_f32 = 1;
            struct hrd_plan plan = plan_of(&r, &sig);
            int widened = half && redop != HRP_MIN && redop != HRP_MAX;
            assert_int_equal(plan.wire, widened ? HRP_F32 : dtype);
            assert_int_equal(hrd_plan_value_size(&sig, &plan, HRD_VALUE_PARTIAL), hrp_dtype_size(plan.wire));
            assert_int_equal(hrd_plan_value_size(&sig, &plan, HRD_VALUE_RESULT), hrp_dtype_size(dtype));
        }
    }
}

/* ---------------------------------------------------------------- refusals */

static void refused(const struct roster *r, const char *word1, const char *word2)
{
    char why[512] = "", again[512] = "";
    struct hrd_plan plan;
    struct hrp_sig sig = sig_of(HRP_ALL_REDUCE, HRP_F32, 1000);
    assert_int_equal(hrd_plan_check(&r->env, why, sizeof(why)), -EINVAL);
    assert_int_equal(hrd_plan_op(&r->env, &sig, &plan, again, sizeof(again)), -EINVAL);
    assert_string_equal(why, again);
    assert_non_null(strstr(why, word1));
    assert_non_null(strstr(why, word2));
    /* A short buffer is cut, not overrun. */
    char tiny[8] = "1234567";
    assert_int_equal(hrd_plan_check(&r->env, tiny, 5), -EINVAL);
    assert_int_equal(strlen(tiny), 4);
    assert_int_equal(tiny[5], '6');
}

static void test_refusals(void **state)
{
    (void)state;
    struct roster r;
    for (uint32_t n = 2; n <= MAX_N; n++) {
        roster_init(&r, n, n, MAP_CONTIGUOUS);
        r.env.algo = HRD_ALGO_TREE;
        refused(&r, "tree", "reproducible");
        r.env.algo = HRD_ALGO_RING;
        refused(&r, "ring", "reproducible");
        r.env.algo = HRD_ALGO_PAIRWISE;
        refused(&r, "pairwise", "reproducible");
        r.env.reproducible = 0;
        if ((n & (n - 1)) != 0)
            refused(&r, "pairwise", "power of two");
        r.env.algo = HRD_ALGO_TREE;
        if (n < 4)
            refused(&r, "tree", n == 2 ? "2 nodes" : "3 nodes");
        else
            assert_int_equal(hrd_plan_check(&r.env, NULL, 0), 0);
    }
    r.env.algo = HRD_ALGO_LOCAL;
    refused(&r, "6", "unknown");
    r.env.algo = HRD_ALGO_AUTO;
    r.env.nranks = MAX_N - 1;
    refused(&r, "63 ranks", "64 nodes");
    r.env.nnodes = 0;
    refused(&r, "0 nodes", "not a communicator");
    roster_init(&r, 2, 2, MAP_CONTIGUOUS);
    r.env.unit_bytes = UINT64_MAX;
    refused(&r, "18446744073709551615", "too large");
}

static void test_roster_check(void **state)
{
    (void)state;
    struct roster r;
    char why[256];
    roster_init(&r, 3, 6, MAP_ROUND_ROBIN);
    r.node_of_rank[4] = 3;
    assert_int_equal(hrd_plan_check(&r.env, why, sizeof(why)), -EINVAL);
    assert_non_null(strstr(why, "rank 4 is on node 3"));
    roster_init(&r, 3, 6, MAP_ROUND_ROBIN);
    r.ranks_on_node[1] = 0;
    assert_int_equal(hrd_plan_check(&r.env, why, sizeof(why)), -EINVAL);
    assert_non_null(strstr(why, "node 1"));
    /* Two wrong counts whose sum is right. */
    roster_init(&r, 3, 6, MAP_ROUND_ROBIN);
    r.ranks_on_node[1] = 3;
    r.ranks_on_node[2] = 1;
    assert_int_equal(hrd_plan_check(&r.env, why, sizeof(why)), -EINVAL);
    assert_non_null(strstr(why, "node 1"));
}

/* An algorithm without a form for the collective is replaced, and the sentence says so. */
static void test_replaced(void **state)
{
    (void)state;
    struct roster r;
    char why[512];
    struct hrd_plan plan;
    roster_init(&r, 8, 8, MAP_CONTIGUOUS);
    r.env.reproducible = 0;
    r.env.algo = HRD_ALGO_TREE;
    struct hrp_sig sig = sig_of(HRP_BROADCAST, HRP_F32, 1 << 20);
    assert_int_equal(hrd_plan_op(&r.env, &sig, &plan, why, sizeof(why)), 0);
    assert_int_equal(plan.algo, HRD_ALGO_DIRECT);
    assert_non_null(strstr(why, "tree, which has no form for broadcast"));
    sig = sig_of(HRP_ALL_REDUCE, HRP_F32, 1 << 20);
    assert_int_equal(hrd_plan_op(&r.env, &sig, &plan, why, sizeof(why)), 0);
    assert_int_equal(plan.algo, HRD_ALGO_TREE);
    assert_int_equal(plan.nvariants, 2);
    assert_non_null(strstr(why, "set by configuration"));
    r.env.algo = HRD_ALGO_AUTO;
    assert_int_equal(hrd_plan_op(&r.env, &sig, &plan, why, sizeof(why)), 0);
    assert_non_null(strstr(why, "4194304 bytes over 8 nodes"));
    assert_non_null(strstr(why, "by the model against"));
    for (unsigned algo = HRD_ALGO_AUTO; algo <= HRD_ALGO_TREE; algo++) {
        r.env.algo = (uint8_t)algo;
        sig = sig_of(HRP_BARRIER, HRP_F32, 0);
        plan = plan_of(&r, &sig);
        assert_true(plan.algo == HRD_ALGO_GATHER && plan.eager && plan.nunits == 1 && plan.nblocks == 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cover),           cmocka_unit_test(test_cover_large),
        cmocka_unit_test(test_unit_size),       cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_wire_bytes),      cmocka_unit_test(test_threshold),
        cmocka_unit_test(test_eager_blocks),    cmocka_unit_test(test_bytes_decide),
        cmocka_unit_test(test_gather_is_small), cmocka_unit_test(test_plan_is_pure),
        cmocka_unit_test(test_wire_dtype),      cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_roster_check),    cmocka_unit_test(test_replaced),
        cmocka_unit_test(test_model_decides),   cmocka_unit_test(test_tree_units),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
