/* SPDX-License-Identifier: MIT */
/*
 * Schedules of every algorithm, collective and node count, run by the simulator on one symbolic element a block:
 * which nodes it sums, their exact sum, and their sum in f32 (whose bits show the order of summation).
 */
#include <errno.h>
#include <string.h>

#include "tests/sim/schedule_rules.h"
#include "tests/sim/schedule_sim.h"

#define MAX_N 64

/* The value of one block at one step. */
struct datum {
    uint64_t nodes; /* which nodes' inputs it covers */
    uint64_t sum;
    float f;
    uint16_t block;
    uint8_t value;
};

struct world {
    struct hrd_schedule_key key;
    struct hrd_schedule *sched[MAX_N];
    struct datum *out[MAX_N];    /* [step] what a step made or received */
    struct datum *flying[MAX_N]; /* [recv step] on its way */
    uint8_t *arrived[MAX_N];     /* [recv step] its slot was written */
    uint32_t *buf_owner[MAX_N];  /* [buf] the step that wrote it last */
    uint8_t *given[MAX_N];       /* [block] times delivered to local ranks */
    uint64_t in_sum[MAX_N][MAX_N];
    float in_f[MAX_N][MAX_N];
};

static uint64_t seed = 20240611;

static uint64_t all_nodes(uint32_t n)
{
    return n == 64 ? UINT64_MAX : (UINT64_C(1) << n) - 1;
}

static int reduces(const struct world *w)
{
    return w->key.coll != HRP_BROADCAST && w->key.coll != HRP_ALL_GATHER;
}

static uint64_t cover_mask(const struct hrd_step *step, uint32_t n)
{
    uint64_t mask = 0;
    for (uint32_t i = 0; i < step->cover_count; i++)
        mask |= UINT64_C(1) << ((step->cover_first + i) % n);
    return mask;
}

static const struct hrd_step *step_at(const struct world *w, uint32_t node, uint32_t i)
{
    return &w->sched[node]->steps[i];
}

/* Reads the output of a step as an executor would: from its buffer or slot, which must still hold it. */
static struct datum read_out(struct world *w, uint32_t node, uint32_t i)
{
    const struct hrd_step *step = step_at(w, node, i);
    if (step->kind != HRD_STEP_RECV) {
        assert_int_not_equal(step->buf, HRD_NONE);
        assert_int_equal(w->buf_owner[node][step->buf], i);
    } else {
        assert_int_equal(w->arrived[node][i], 1);
    }
    return w->out[node][i];
}

static struct datum input_of(struct world *w, uint32_t node, const struct hrd_step *step)
{
    if (w->key.coll == HRP_BROADCAST)
        assert_int_equal(node, w->key.root_node);
    if (w->key.coll == HRP_ALL_GATHER)
        assert_int_equal(node, step->block);
    return (struct datum){.nodes = UINT64_C(1) << node,
                          .sum = w->in_sum[node][step->block],
                          .f = w->in_f[node][step->block],
                          .block = step->block,
                          .value = reduces(w) ? HRD_VALUE_PARTIAL : HRD_VALUE_RESULT};
}

static struct datum fold_inputs(struct world *w, uint32_t node, const struct hrd_step *step)
{
    const uint32_t *in = w->sched[node]->list + step->in_first;
    struct datum d = read_out(w, node, in[0]);
    assert_int_equal(d.value, HRD_VALUE_PARTIAL);
    for (uint32_t i = 1; i < step->in_count; i++) {
        struct datum x = read_out(w, node, in[i]);
        assert_int_equal(x.value, HRD_VALUE_PARTIAL);
        assert_int_equal(x.block, d.block);
        assert_int_equal(d.nodes & x.nodes, 0);
        d.nodes |= x.nodes;
        d.sum += x.sum;
        d.f += x.f;
    }
    if (step->final)
        d.value = HRD_VALUE_RESULT;
    return d;
}

static void deliver(struct world *w, uint32_t node, struct datum d)
{
    uint32_t n = w->key.nnodes, b = d.block;
    uint64_t sum = 0;
    float f = 0;
    assert_int_equal(d.value, HRD_VALUE_RESULT);
    w->given[node][b]++;
    if (w->key.coll == HRP_BROADCAST || w->key.coll == HRP_ALL_GATHER) {
        uint32_t from = w->key.coll == HRP_BROADCAST ? w->key.root_node : b;
        assert_int_equal(d.nodes, UINT64_C(1) << from);
        assert_int_equal(d.sum, w->in_sum[from][b]);
        return;
    }
    assert_int_equal(d.nodes, all_nodes(n));
    for (uint32_t i = 0; i < n; i++) {
        sum += w->in_sum[i][b];
        f = i == 0 ? w->in_f[0][b] : f + w->in_f[i][b];
    }
    assert_int_equal(d.sum, sum);
    if (w->key.algo == HRD_ALGO_DIRECT || w->key.algo == HRD_ALGO_GATHER)
        assert_memory_equal(&d.f, &f, sizeof(f));
}

static void engine(struct sim *sim, uint32_t node, uint32_t i)
{
    struct world *w = sim->ctx;
    const struct hrd_step *step = step_at(w, node, i);
    struct datum d;
    switch (step->kind) {
    case HRD_STEP_LOCAL:
        d = input_of(w, node, step);
        break;
    case HRD_STEP_FOLD:
        d = fold_inputs(w, node, step);
        break;
    default:
        assert_int_equal(step->kind, HRD_STEP_STORE);
        d = read_out(w, node, step->src);
        deliver(w, node, d);
        return;
    }
    assert_int_equal(d.block, step->block);
    assert_int_equal(d.value, step->value);
    assert_int_equal(d.nodes, cover_mask(step, w->key.nnodes));
    if (step->final)
        deliver(w, node, d);
    if (step->buf != HRD_NONE)
        w->buf_owner[node][step->buf] = i;
    w->out[node][i] = d;
}

static void send_begin(struct sim *sim, uint32_t node, uint32_t i, uint32_t peer, uint32_t recv)
{
    struct world *w = sim->ctx;
    const struct hrd_step *step = step_at(w, node, i);
    struct datum d = read_out(w, node, step->src);
    assert_int_equal(d.block, step->block);
    assert_int_equal(d.value, step->value);
    assert_int_equal(d.nodes, cover_mask(step, w->key.nnodes));
    w->flying[peer][recv] = d;
}

static void send_end(struct sim *sim, uint32_t node, uint32_t i, uint32_t peer, uint32_t recv)
{
    struct world *w = sim->ctx;
    struct datum d = read_out(w, node, step_at(w, node, i)->src);
    assert_memory_equal(&d.sum, &w->flying[peer][recv].sum, sizeof(d.sum));
}

static void arrive(struct sim *sim, uint32_t node, uint32_t recv)
{
    struct world *w = sim->ctx;
    const struct hrd_step *step = step_at(w, node, recv);
    struct datum d = w->flying[node][recv];
    assert_int_equal(w->arrived[node][recv], 0);
    w->arrived[node][recv] = 1;
    assert_int_equal(d.block, step->block);
    assert_int_equal(d.value, step->value);
    assert_int_equal(d.nodes, cover_mask(step, w->key.nnodes));
    w->out[node][recv] = d;
}

static const struct sim_ops symbolic = {engine, send_begin, send_end, arrive};

/* ---------------------------------------------------------------- what two nodes must agree on */

/* What i sends to p is what p expects from i: as many, with the same tags, blocks and values, used once each. */
static void check_messages(const struct world *w)
{
    for (uint32_t i = 0; i < w->key.nnodes; i++) {
        const struct hrd_schedule *a = w->sched[i];
        uint64_t listed = 0, sends = 0;
        for (uint32_t k = 0; k < a->nsteps; k++)
            sends += a->steps[k].kind == HRD_STEP_SEND;
        for (uint32_t p = 0; p < w->key.nnodes; p++) {
            const struct hrd_schedule *b = w->sched[p];
            listed += a->sends[p].count;
            assert_int_equal(a->sends[p].count, b->recvs[i].count);
            for (uint32_t t = 0; t < a->sends[p].count; t++) {
                const struct hrd_step *out = &a->steps[a->list[a->sends[p].first + t]];
                const struct hrd_step *in = &b->steps[b->list[b->recvs[i].first + t]];
                assert_true(p != i && out->kind == HRD_STEP_SEND && in->kind == HRD_STEP_RECV);
                assert_true(out->peer == p && in->peer == i && out->tag == t && in->tag == t);
                assert_true(out->block == in->block && out->value == in->value && out->round == in->round);
                assert_true(out->cover_first == in->cover_first && out->cover_count == in->cover_count);
            }
        }
        assert_int_equal(listed, sends);
    }
}

/* ---------------------------------------------------------------- building and running one key */

static void world_open(struct world *w, struct hrd_schedule_key key)
{
    memset(w, 0, sizeof(*w));
    w->key = key;
    for (uint32_t i = 0; i < key.nnodes; i++) {
        key.me = (uint16_t)i;
        assert_int_equal(hrd_schedule_build(&key, &w->sched[i]), 0);
        const struct hrd_schedule *s = w->sched[i];
        assert_int_equal(s->nblocks, hrd_schedule_nblocks(key.algo, key.coll, key.nnodes));
        w->out[i] = calloc(s->nsteps, sizeof(*w->out[i]));
        w->flying[i] = calloc(s->nsteps, sizeof(*w->flying[i]));
        w->arrived[i] = calloc(s->nsteps, 1);
        w->buf_owner[i] = calloc(s->nbufs + 1, sizeof(*w->buf_owner[i]));
        w->given[i] = calloc(s->nblocks, 1);
        for (uint32_t b = 0; b < s->nblocks; b++) {
            w->in_sum[i][b] = sim_random(&seed);
            /* Exponents differ, so that almost every other order of summation has other bits. */
            w->in_f[i][b] = (float)(sim_random(&seed) >> 40) / (float)(1 << (sim_random(&seed) % 24));
        }
    }
}

static void world_close(struct world *w)
{
    for (uint32_t i = 0; i < w->key.nnodes; i++) {
        hrd_schedule_free(w->sched[i]);
        free(w->out[i]);
        free(w->flying[i]);
        free(w->arrived[i]);
        free(w->buf_owner[i]);
        free(w->given[i]);
    }
}

static void run_once(struct world *w)
{
    uint32_t n = w->key.nnodes;
    struct sim sim = {.n = n, .sched = w->sched, .ops = &symbolic, .ctx = w, .rng = sim_random(&seed)};
    for (uint32_t i = 0; i < n; i++) {
        memset(w->arrived[i], 0, w->sched[i]->nsteps);
        memset(w->given[i], 0, w->sched[i]->nblocks);
    }
    assert_int_equal(sim_run(&sim), 0);
    for (uint32_t i = 0; i < n; i++) {
        const struct hrd_schedule *s = w->sched[i];
        for (uint32_t k = 0; k < s->nsteps; k++)
            assert_int_equal(w->arrived[i][k], s->steps[k].kind == HRD_STEP_RECV);
        for (uint32_t b = 0; b < s->nblocks; b++)
            assert_int_equal(w->given[i][b], w->key.coll != HRP_REDUCE_SCATTER || b == i);
    }
}

/* Messages a node may send and must send (or receive), all of one block. */
struct traffic {
    uint32_t send_min, send_max, recv_min, recv_max;
};

static struct traffic expected_traffic(const struct hrd_schedule_key *key, uint32_t node)
{
    uint32_t n = key->nnodes, m = n - 1;
    if (key->coll == HRP_BROADCAST) {
        int root = node == key->root_node;
        if (key->algo == HRD_ALGO_GATHER)
            return root ? (struct traffic){m, m, 0, 0} : (struct traffic){0, 0, 1, 1};
        return root ? (struct traffic){2 * m, 2 * m, 0, 0} : (struct traffic){n - 2, n - 2, n, n};
    }
    if (key->algo == HRD_ALGO_TREE)
        return (struct traffic){1, 3, 1, 3};
    uint32_t phases = key->coll == HRP_ALL_REDUCE && key->algo != HRD_ALGO_GATHER ? 2 : 1;
    return (struct traffic){phases * m, phases * m, phases * m, phases * m};
}

static void check_traffic(const struct world *w)
{
    for (uint32_t i = 0; i < w->key.nnodes; i++) {
        struct traffic want = expected_traffic(&w->key, i);
        uint32_t sends = 0, recvs = 0;
        for (uint32_t p = 0; p < w->key.nnodes; p++) {
            sends += w->sched[i]->sends[p].count;
            recvs += w->sched[i]->recvs[p].count;
        }
        /* The owner of the root's block in a broadcast is the root itself, which gets nothing. */
        assert_in_range(sends, want.send_min, want.send_max);
        assert_in_range(recvs, want.recv_min, want.recv_max);
    }
}

static uint32_t log2_up(uint32_t n)
{
    uint32_t k = 0;
    while ((1u << k) < n)
        k++;
    return k;
}

static void check_lockstep(struct world *w)
{
    uint32_t n = w->key.nnodes;
    struct sim sim = {.n = n, .sched = w->sched};
    struct sim_ticks t = sim_lockstep(&sim);
    uint32_t phases = w->key.coll == HRP_ALL_REDUCE || w->key.coll == HRP_BROADCAST ? 2 : 1;
    uint32_t rounds = 0;
    for (uint32_t i = 0; i < n; i++)
        rounds = w->sched[i]->nrounds > rounds ? w->sched[i]->nrounds : rounds;
    assert_int_equal(t.ticks, rounds);
    switch (w->key.algo) {
    case HRD_ALGO_DIRECT:
        assert_int_equal(rounds, phases * (n - 1));
        /* In a broadcast nodes forward as soon as the root has served them, not all in step. */
        assert_in_range(t.max_senders, 1, w->key.coll == HRP_BROADCAST ? 2 : 1);
        assert_int_equal(t.max_receivers, 1);
        assert_in_range(t.max_peers, 1, w->key.coll == HRP_BROADCAST ? 3 : 2);
        break;
    case HRD_ALGO_RING:
        assert_int_equal(rounds, phases * (n - 1));
        assert_int_equal(t.max_senders, 1);
        break;
    case HRD_ALGO_PAIRWISE:
        assert_int_equal(rounds, phases * log2_up(n));
        assert_int_equal(t.max_peers, 1);
        break;
    case HRD_ALGO_TREE:
        assert_in_range(rounds, 2, 2 * log2_up(n + 1));
        assert_in_range(t.max_senders, 1, 2);
        break;
    default:
        assert_int_equal(rounds, 1);
        break;
    }
}

static void try_key(unsigned algo, unsigned coll, uint32_t n, uint32_t root, uint32_t variant)
{
    static struct world w;
    struct hrd_schedule_key key = {.algo = (uint8_t)algo,
                                   .coll = (uint8_t)coll,
                                   .variant = (uint8_t)variant,
                                   .nnodes = (uint16_t)n,
                                   .root_node = (uint16_t)root};
    world_open(&w, key);
    for (uint32_t i = 0; i < n; i++) {
        rules_order(w.sched[i]);
        rules_buffers(w.sched[i]);
        rules_in_place(w.sched[i]);
    }
    check_messages(&w);
    check_traffic(&w);
    check_lockstep(&w);
    for (int run = 0; run < (n <= 9 ? 5 : 1); run++)
        run_once(&w);
    world_close(&w);
}

static void try_all(unsigned algo, unsigned coll)
{
    for (uint32_t n = 2; n <= MAX_N; n++) {
        if ((algo == HRD_ALGO_PAIRWISE && (n & (n - 1)) != 0) || (algo == HRD_ALGO_TREE && n < 4))
            continue;
        uint32_t roots = coll == HRP_BROADCAST ? n : 1;
        /* Every root for few nodes, a sample of them for many. */
        uint32_t step = roots <= 12 ? 1 : roots / 3;
        for (uint32_t root = 0; root < roots; root += step)
            for (uint32_t variant = 0; variant < (algo == HRD_ALGO_TREE ? 2 : 1); variant++)
                try_key(algo, coll, n, root, variant);
    }
}

static void test_direct(void **state)
{
    (void)state;
    try_all(HRD_ALGO_DIRECT, HRP_ALL_REDUCE);
    try_all(HRD_ALGO_DIRECT, HRP_BROADCAST);
    try_all(HRD_ALGO_DIRECT, HRP_REDUCE_SCATTER);
    try_all(HRD_ALGO_DIRECT, HRP_ALL_GATHER);
}

static void test_gather(void **state)
{
    (void)state;
    for (unsigned coll = 0; coll < HRP_NCOLLS; coll++)
        try_all(HRD_ALGO_GATHER, coll);
}

static void test_ring(void **state)
{
    (void)state;
    try_all(HRD_ALGO_RING, HRP_ALL_REDUCE);
    try_all(HRD_ALGO_RING, HRP_REDUCE_SCATTER);
    try_all(HRD_ALGO_RING, HRP_ALL_GATHER);
}

static void test_pairwise(void **state)
{
    (void)state;
    try_all(HRD_ALGO_PAIRWISE, HRP_ALL_REDUCE);
    try_all(HRD_ALGO_PAIRWISE, HRP_REDUCE_SCATTER);
    try_all(HRD_ALGO_PAIRWISE, HRP_ALL_GATHER);
}

static void test_tree(void **state)
{
    (void)state;
    try_all(HRD_ALGO_TREE, HRP_ALL_REDUCE);
}

/* Both trees together give every node about the same: inside one it is a leaf of the other. */
static void test_tree_balance(void **state)
{
    (void)state;
    for (uint32_t n = 4; n <= MAX_N; n++) {
        uint32_t leaf_twice = 0;
        for (uint32_t me = 0; me < n; me++) {
            uint32_t children[2] = {0, 0};
            for (uint8_t v = 0; v < 2; v++) {
                struct hrd_schedule_key key = {.algo = HRD_ALGO_TREE,
                                               .coll = HRP_ALL_REDUCE,
                                               .variant = v,
                                               .nnodes = (uint16_t)n,
                                               .me = (uint16_t)me};
                struct hrd_schedule *s;
                assert_int_equal(hrd_schedule_build(&key, &s), 0);
                for (uint32_t i = 0; i < s->nsteps; i++)
                    children[v] +=
                        s->steps[i].kind == HRD_STEP_RECV && s->steps[i].value == HRD_VALUE_PARTIAL;
                hrd_schedule_free(s);
            }
            assert_true(children[0] == 0 || children[1] == 0);
            leaf_twice += children[0] + children[1] == 0;
        }
        assert_int_equal(leaf_twice, n % 2);
    }
}

static void test_one_node(void **state)
{
    (void)state;
    for (unsigned coll = 0; coll < HRP_NCOLLS; coll++) {
        struct hrd_schedule_key key = {.algo = HRD_ALGO_LOCAL, .coll = (uint8_t)coll, .nnodes = 1};
        struct hrd_schedule *s;
        assert_int_equal(hrd_schedule_build(&key, &s), 0);
        assert_int_equal(s->nsteps, 1);
        assert_int_equal(s->nblocks, 1);
        assert_int_equal(s->nbufs, 0);
        assert_int_equal(s->nrounds, 0);
        assert_int_equal(s->steps[0].kind, HRD_STEP_FUSED);
        assert_int_equal(s->steps[0].nwait, 0);
        hrd_schedule_free(s);
    }
}

static void refused(struct hrd_schedule_key key)
{
    struct hrd_schedule *s = NULL;
    assert_int_equal(hrd_schedule_build(&key, &s), -EINVAL);
    assert_null(s);
}

static void test_refused(void **state)
{
    (void)state;
    struct hrd_schedule_key ok = {.algo = HRD_ALGO_DIRECT, .coll = HRP_ALL_REDUCE, .nnodes = 4, .me = 3}, key;
    struct hrd_schedule *s;
    assert_int_equal(hrd_schedule_build(&ok, &s), 0);
    hrd_schedule_free(s);
    key = ok, key.algo = HRD_ALGO_AUTO, refused(key);
    key = ok, key.algo = HRD_NALGOS, refused(key);
    key = ok, key.algo = HRD_ALGO_LOCAL, refused(key);
    key = ok, key.coll = HRP_NCOLLS, refused(key);
    key = ok, key.coll = HRP_BARRIER, refused(key);
    key = ok, key.variant = 1, refused(key);
    key = ok, key.me = 4, refused(key);
    key = ok, key.root_node = 1, refused(key);
    key = ok, key.coll = HRP_BROADCAST, key.root_node = 4, refused(key);
    key = ok, key.nnodes = 0, key.me = 0, refused(key);
    key = ok, key.nnodes = 1, key.me = 0, refused(key);
    key = ok, key.nnodes = HRD_MAX_NODES + 1, refused(key);
    key = ok, key.algo = HRD_ALGO_TREE, key.coll = HRP_BROADCAST, refused(key);
    key = ok, key.algo = HRD_ALGO_TREE, key.variant = 2, refused(key);
    for (uint16_t n = 2; n < 4; n++)
        key = ok, key.algo = HRD_ALGO_TREE, key.nnodes = n, key.me = 0, refused(key);
    for (uint16_t n = 3; n < 64; n++)
        if ((n & (n - 1)) != 0)
            key = ok, key.algo = HRD_ALGO_PAIRWISE, key.nnodes = n, key.me = 0, refused(key);
}

static void test_largest(void **state)
{
    (void)state;
    static const uint8_t algos[] = {HRD_ALGO_DIRECT, HRD_ALGO_GATHER, HRD_ALGO_PAIRWISE, HRD_ALGO_RING,
                                    HRD_ALGO_TREE};
    for (size_t i = 0; i < sizeof(algos); i++) {
        struct hrd_schedule_key key = {
            .algo = algos[i], .coll = HRP_ALL_REDUCE, .nnodes = HRD_MAX_NODES, .me = 513};
        struct hrd_schedule *s;
        assert_int_equal(hrd_schedule_build(&key, &s), 0);
        rules_buffers(s);
        hrd_schedule_free(s);
    }
}

static void test_names(void **state)
{
    (void)state;
    for (unsigned i = HRD_ALGO_AUTO; i <= HRD_ALGO_TREE; i++)
        assert_int_equal(hrd_algo_parse(hrd_algo_name(i)), i);
    assert_int_equal(hrd_algo_parse("local"), -1);
    assert_int_equal(hrd_algo_parse(""), -1);
    assert_string_equal(hrd_algo_name(HRD_NALGOS), "unknown algorithm");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_direct),   cmocka_unit_test(test_gather),  cmocka_unit_test(test_ring),
        cmocka_unit_test(test_pairwise), cmocka_unit_test(test_tree),    cmocka_unit_test(test_tree_balance),
        cmocka_unit_test(test_one_node), cmocka_unit_test(test_refused), cmocka_unit_test(test_largest),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
