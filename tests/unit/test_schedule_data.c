/* SPDX-License-Identifier: MIT */
/*
 * Plan and schedule together on real buffers: every rank of every node has its arrays, in place or not, units are
 * cut by the plan and run by the simulator as an executor would run them, and every element of every output is
 * compared. Sums are of 64-bit integers, which are exact in any order.
 */
#include <string.h>

#include "daemon/plan.h"
#include "tests/sim/schedule_sim.h"

#define MAX_N 16
#define MAX_RANKS 48

struct job {
    struct hrd_plan_env env;
    struct hrp_sig sig;
    struct hrd_plan plan;
    uint64_t unit;
    int in_place;
    uint32_t node_of_rank[MAX_RANKS], ranks_on_node[MAX_N];
    uint64_t in_elems, out_elems; /* of one rank */
    uint64_t *first[MAX_RANKS];   /* the inputs as they were; in[] may be overwritten */
    uint64_t *in[MAX_RANKS], *out[MAX_RANKS], *memory[MAX_RANKS];
    struct hrd_schedule *sched[MAX_N];
    uint64_t **buf[MAX_N];    /* [buf] */
    uint64_t **slot[MAX_N];   /* [recv step] */
    uint64_t **flying[MAX_N]; /* [recv step] */
};

static uint64_t seed = 99;

static uint64_t block_elems(const struct job *j, uint32_t block)
{
    return hrd_plan_block_elems(&j->env, &j->sig, &j->plan, j->unit, block);
}

/* Exactly as large as the data, so that a sanitizer sees any access beyond it. */
static uint64_t *array(uint64_t elems)
{
    uint64_t *a = malloc(elems * sizeof(*a) + (elems == 0));
    assert_non_null(a);
    for (uint64_t i = 0; i < elems; i++)
        a[i] = sim_random(&seed);
    return a;
}

/* Where element `off` of a segment lies in a rank's input or output; NULL when it has no such element. */
static uint64_t *input_at(const struct job *j, uint32_t rank, uint32_t segment, uint64_t off)
{
    switch (j->sig.coll) {
    case HRP_BROADCAST:
        return rank == j->sig.root ? j->in[rank] + off : NULL;
    case HRP_ALL_GATHER:
        return rank == segment ? j->in[rank] + off : NULL;
    default:
        return j->in[rank] + segment * j->sig.count + off;
    }
}

static uint64_t *output_at(const struct job *j, uint32_t rank, uint32_t segment, uint64_t off)
{
    if (j->sig.coll == HRP_REDUCE_SCATTER)
        return rank == segment ? j->out[rank] + off : NULL;
    return j->out[rank] + segment * j->sig.count + off;
}

static void engine_local(struct job *j, uint32_t node, const struct hrd_step *step, uint64_t *to)
{
    struct hrd_piece_iter it;
    struct hrd_piece p;
    hrd_plan_pieces(&j->env, &j->sig, &j->plan, j->unit, step->block, &it);
    while (hrd_piece_next(&it, &p)) {
        memset(to, 0, p.len * sizeof(*to));
        for (uint32_t r = 0; r < j->env.nranks; r++) {
            uint64_t *from = input_at(j, r, p.segment, p.off);
            for (uint64_t i = 0; j->node_of_rank[r] == node && from != NULL && i < p.len; i++)
                to[i] += from[i];
        }
        to += p.len;
    }
}

static void deliver(struct job *j, uint32_t node, uint32_t block, const uint64_t *from)
{
    struct hrd_piece_iter it;
    struct hrd_piece p;
    hrd_plan_pieces(&j->env, &j->sig, &j->plan, j->unit, block, &it);
    while (hrd_piece_next(&it, &p)) {
        for (uint32_t r = 0; r < j->env.nranks; r++) {
            uint64_t *to = output_at(j, r, p.segment, p.off);
            if (j->node_of_rank[r] == node && to != NULL)
                memcpy(to, from, p.len * sizeof(*to));
        }
        from += p.len;
    }
}

static uint64_t *output_of(struct job *j, uint32_t node, uint32_t i)
{
    const struct hrd_step *step = &j->sched[node]->steps[i];
    return step->kind == HRD_STEP_RECV ? j->slot[node][i] : j->buf[node][step->buf];
}

static void engine_fold(struct job *j, uint32_t node, const struct hrd_step *step)
{
    uint64_t elems = block_elems(j, step->block);
    uint64_t *sum = calloc(elems + 1, sizeof(*sum));
    for (uint32_t k = 0; k < step->in_count; k++) {
        const uint64_t *from = output_of(j, node, j->sched[node]->list[step->in_first + k]);
        for (uint64_t i = 0; i < elems; i++)
            sum[i] += from[i];
    }
    if (step->final)
        deliver(j, node, step->block, sum);
    if (step->buf != HRD_NONE)
        memcpy(j->buf[node][step->buf], sum, elems * sizeof(*sum));
    free(sum);
}

/* One node: block 0 is all of the unit. */
static void engine_fused(struct job *j, const struct hrd_step *step)
{
    uint64_t *tmp = array(block_elems(j, 0));
    engine_local(j, 0, step, tmp);
    deliver(j, 0, 0, tmp);
    free(tmp);
}

static void engine(struct sim *sim, uint32_t node, uint32_t i)
{
    struct job *j = sim->ctx;
    const struct hrd_step *step = &j->sched[node]->steps[i];
    if (step->kind == HRD_STEP_LOCAL)
        engine_local(j, node, step, j->buf[node][step->buf]);
    else if (step->kind == HRD_STEP_FOLD)
        engine_fold(j, node, step);
    else if (step->kind == HRD_STEP_STORE)
        deliver(j, node, step->block, output_of(j, node, step->src));
    else
        engine_fused(j, step);
}

static void send_begin(struct sim *sim, uint32_t node, uint32_t i, uint32_t peer, uint32_t recv)
{
    struct job *j = sim->ctx;
    const struct hrd_step *step = &j->sched[node]->steps[i];
    uint64_t elems = block_elems(j, step->block);
    assert_null(j->flying[peer][recv]);
    j->flying[peer][recv] = array(elems);
    memcpy(j->flying[peer][recv], output_of(j, node, step->src), elems * sizeof(uint64_t));
}

static void send_end(struct sim *sim, uint32_t node, uint32_t i, uint32_t peer, uint32_t recv)
{
    struct job *j = sim->ctx;
    const struct hrd_step *step = &j->sched[node]->steps[i];
    if (block_elems(j, step->block) > 0)
        assert_memory_equal(j->flying[peer][recv], output_of(j, node, step->src),
                            block_elems(j, step->block) * sizeof(uint64_t));
}

static void arrive(struct sim *sim, uint32_t node, uint32_t recv)
{
    struct job *j = sim->ctx;
    assert_null(j->slot[node][recv]);
    j->slot[node][recv] = j->flying[node][recv];
}

static const struct sim_ops real = {engine, send_begin, send_end, arrive};

static void run_unit(struct job *j, uint64_t unit)
{
    uint32_t n = j->env.nnodes;
    j->unit = unit;
    for (uint32_t i = 0; i < n; i++) {
        struct hrd_schedule_key key = hrd_plan_key(&j->env, &j->sig, &j->plan, unit, i);
        assert_int_equal(hrd_schedule_build(&key, &j->sched[i]), 0);
        const struct hrd_schedule *s = j->sched[i];
        j->buf[i] = calloc(s->nbufs + 1, sizeof(*j->buf[i]));
        j->slot[i] = calloc(s->nsteps, sizeof(*j->slot[i]));
        j->flying[i] = calloc(s->nsteps, sizeof(*j->flying[i]));
        for (uint32_t b = 0; b < s->nbufs; b++)
            j->buf[i][b] = array(block_elems(j, s->buf_block[b]));
    }
    struct sim sim = {.n = n, .sched = j->sched, .ops = &real, .ctx = j, .rng = sim_random(&seed)};
    assert_int_equal(sim_run(&sim), 0);
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t b = 0; b < j->sched[i]->nbufs; b++)
            free(j->buf[i][b]);
        for (uint32_t k = 0; k < j->sched[i]->nsteps; k++)
            free(j->slot[i][k]);
        free(j->buf[i]);
        free(j->slot[i]);
        free(j->flying[i]);
        hrd_schedule_free(j->sched[i]);
    }
}

/* In place by NCCL's rules: the smaller array is the rank's own segment of the larger. */
static void make_buffers(struct job *j)
{
    uint64_t count = j->sig.count, all = count * j->env.nranks;
    j->in_elems = j->sig.coll == HRP_REDUCE_SCATTER ? all : count;
    j->out_elems = j->sig.coll == HRP_ALL_GATHER ? all : count;
    for (uint32_t r = 0; r < j->env.nranks; r++) {
        uint64_t larger = j->in_elems > j->out_elems ? j->in_elems : j->out_elems;
        j->memory[r] = array(j->in_place ? larger : j->in_elems + j->out_elems);
        j->in[r] = j->memory[r];
        j->out[r] = j->in_place ? j->memory[r] : j->memory[r] + j->in_elems;
        if (j->in_place && j->sig.coll == HRP_REDUCE_SCATTER)
            j->out[r] += r * count;
        if (j->in_place && j->sig.coll == HRP_ALL_GATHER)
            j->in[r] += r * count;
        j->first[r] = array(j->in_elems);
        memcpy(j->first[r], j->in[r], j->in_elems * sizeof(uint64_t));
    }
}

static uint64_t expected(const struct job *j, uint32_t rank, uint64_t i)
{
    uint64_t sum = 0;
    switch (j->sig.coll) {
    case HRP_BROADCAST:
        return j->first[j->sig.root][i];
    case HRP_ALL_GATHER:
        return j->first[i / j->sig.count][i % j->sig.count];
    default:
        if (j->sig.coll == HRP_REDUCE_SCATTER)
            i += rank * j->sig.count;
        for (uint32_t r = 0; r < j->env.nranks; r++)
            sum += j->first[r][i];
        return sum;
    }
}

static void run_job(struct job *j)
{
    char why[512];
    if (hrd_plan_op(&j->env, &j->sig, &j->plan, why, sizeof(why)) != 0)
        fail_msg("%s", why);
    make_buffers(j);
    for (uint64_t u = 0; u < j->plan.nunits; u++)
        run_unit(j, u);
    for (uint32_t r = 0; r < j->env.nranks; r++) {
        for (uint64_t i = 0; i < j->out_elems; i++)
            if (j->out[r][i] != expected(j, r, i))
                fail_msg("rank %u element %lu of %s is wrong: %s", r, (unsigned long)i,
                         hrp_coll_name(j->sig.coll), why);
        if (!j->in_place && j->in_elems > 0)
            assert_memory_equal(j->in[r], j->first[r], j->in_elems * sizeof(uint64_t));
    }
    for (uint32_t r = 0; r < j->env.nranks; r++) {
        free(j->memory[r]);
        free(j->first[r]);
    }
}

static void random_roster(struct job *j, uint32_t n)
{
    uint32_t extra = (uint32_t)(sim_random(&seed) % (2 * n + 1)), how = (uint32_t)(sim_random(&seed) % 3);
    j->env.nnodes = n;
    j->env.nranks = n + extra;
    j->env.node_of_rank = j->node_of_rank;
    j->env.ranks_on_node = j->ranks_on_node;
    for (uint32_t r = 0; r < j->env.nranks; r++) {
        uint32_t node = how == 0 ? r * n / j->env.nranks : r % n;
        if (how == 2 && r >= n)
            node = (uint32_t)(sim_random(&seed) % n);
        j->node_of_rank[r] = node;
        j->ranks_on_node[node]++;
    }
}

static void run_algo(unsigned algo)
{
    static const uint64_t counts[] = {0, 1, 17, 64, 130, 1000, 1537};
    static struct job j;
    for (int i = 0; i < 400; i++) {
        memset(&j, 0, sizeof(j));
        uint32_t n = 1 + (uint32_t)(sim_random(&seed) % (i % 8 ? 8 : MAX_N));
        if (algo == HRD_ALGO_PAIRWISE)
            n = 1u << sim_random(&seed) % 5;
        if (algo == HRD_ALGO_TREE && n < 4)
            n += 3;
        random_roster(&j, n);
        j.env.algo = (uint8_t)algo;
        j.env.reproducible = algo == HRD_ALGO_DIRECT || algo == HRD_ALGO_GATHER;
        j.env.eager_limit = sim_random(&seed) % 2 ? 2048 : 0;
        j.env.unit_bytes = sim_random(&seed) % 2 ? 4096 : 65536;
        j.env.latency_ns = 10000;
        j.sig.coll = (uint8_t)(sim_random(&seed) % HRP_NCOLLS);
        j.sig.dtype = HRP_U64;
        j.sig.count = j.sig.coll == HRP_BARRIER ? 0 : counts[sim_random(&seed) % 7];
        j.sig.root = j.sig.coll == HRP_BROADCAST ? (uint32_t)(sim_random(&seed) % j.env.nranks) : 0;
        j.in_place = sim_random(&seed) % 2;
        run_job(&j);
    }
}

static void test_auto(void **state)
{
    (void)state;
    run_algo(HRD_ALGO_AUTO);
}

static void test_direct(void **state)
{
    (void)state;
    run_algo(HRD_ALGO_DIRECT);
}

static void test_gather(void **state)
{
    (void)state;
    run_algo(HRD_ALGO_GATHER);
}

static void test_pairwise(void **state)
{
    (void)state;
    run_algo(HRD_ALGO_PAIRWISE);
}

static void test_ring(void **state)
{
    (void)state;
    run_algo(HRD_ALGO_RING);
}

static void test_tree(void **state)
{
    (void)state;
    run_algo(HRD_ALGO_TREE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_auto),     cmocka_unit_test(test_direct), cmocka_unit_test(test_gather),
        cmocka_unit_test(test_pairwise), cmocka_unit_test(test_ring),   cmocka_unit_test(test_tree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
