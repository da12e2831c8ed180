/* SPDX-License-Identifier: MIT */
/*
 * Ranks that disagree on count, type, reduction, root or collective: every rank gets MISMATCH with a sentence
 * that names two ranks and both values, within a second, before any output is written; the communicator goes
 * on with the next op. Wrong calls are refused with nothing queued. timeout: 120
 */
#include <stdio.h>
#include <string.h>

#include "tests/lib/harness.h"

#define N 409600u

static float in[N], out[N];

static int untouched(struct hpf_rank *me)
{
    for (unsigned i = 0; i < N; i++)
        HT_EXPECT(me, out[i] == -7.0f, "element %u of the output was written by an op that could not run", i);
    return 0;
}

/* The result of the op that disagreed, on this rank. words: what the sentence has to contain. */
static int expect_mismatch(struct ht_env *e, hclient_op_t op, const char *a, const char *b)
{
    long long start = hpf_now_ms();
    hclient_result_t r = hclient_wait(op);
    long long took = hpf_now_ms() - start;
    const char *text = hclient_last_error(NULL);
    HT_EXPECT(e->me, r == HCLIENT_MISMATCH, "ranks that disagree got '%s': %s", hclient_strerror(r), text);
    HT_EXPECT(e->me, took < (long long)ht_ms(1500), "the mismatch took %lld ms to be told", took);
    HT_EXPECT(e->me, strstr(text, a) && strstr(text, b) && strstr(text, "rank"),
              "the sentence has not '%s' and '%s': %s", a, b, text);
    return 0;
}

static int next_works(struct ht_env *e)
{
    struct ht_coll c = {.coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = 50021};
    return ht_collective(e, &c);
}

static int run(struct ht_env *e, bool odd, size_t count, size_t other, const char *a, const char *b)
{
    hclient_op_t op;
    for (unsigned i = 0; i < N; i++)
        out[i] = -7.0f;
    if (hpf_rank_barrier(e->me, false, ht_ms(20000)) < 0)
        return 1;
    HT_TRY(e->me, hclient_all_reduce(e->comm, in, out, odd ? other : count, HCLIENT_FLOAT32, HCLIENT_SUM,
                                     NULL, &op));
    if (expect_mismatch(e, op, a, b) != 0 || untouched(e->me) != 0)
        return 1;
    return next_works(e);
}

/* Rank 0 against all, rank 5 (another node) against all, and a whole node against the other. */
static int counts(struct ht_env *e, struct hpf_rank *me)
{
    if (run(e, me->rank == 0, 409598, N, "409600", "409598") != 0 ||
        run(e, me->rank == 5, 1, N, "409600", "1") != 0)
        return 1;
    return run(e, me->node == 1, 17, 18, "17", "18") != 0 || run(e, me->rank == 7, 0, 1, "0", "1") != 0;
}

static int kinds(struct ht_env *e, struct hpf_rank *me)
{
    hclient_op_t op;
    bool odd = me->rank == 3;
    HT_TRY(me, hclient_all_reduce(e->comm, in, out, 1000, odd ? HCLIENT_INT32 : HCLIENT_FLOAT32, HCLIENT_SUM,
                                  NULL, &op));
    if (expect_mismatch(e, op, "i32", "f32") != 0)
        return 1;
    HT_TRY(me, hclient_all_reduce(e->comm, in, out, 1000, HCLIENT_FLOAT32, odd ? HCLIENT_MAX : HCLIENT_SUM,
                                  NULL, &op));
    if (expect_mismatch(e, op, "max", "sum") != 0)
        return 1;
    if (me->node == 0)
        HT_TRY(me, hclient_all_reduce(e->comm, in, out, 1000, HCLIENT_FLOAT32, HCLIENT_SUM, NULL, &op));
    else
        HT_TRY(me, hclient_reduce_scatter(e->comm, in, out, 1000, HCLIENT_FLOAT32, HCLIENT_SUM, NULL, &op));
    if (expect_mismatch(e, op, "all_reduce", "reduce_scatter") != 0)
        return 1;
    return next_works(e);
}

/* Receivers write as data arrives, so here a disagreement ends the communicator, on all ranks. */
static int ends_communicator(struct hpf_rank *me, unsigned number, bool gather)
{
    struct ht_env e;
    hclient_op_t op;
    if (ht_join(&e, me, number, NULL) != 0)
        return 1;
    size_t count = me->rank == 6 ? 100000 : 50000;
    if (gather)
        HT_TRY(me, hclient_all_gather(e.comm, in, out, count / 8, HCLIENT_FLOAT32, NULL, &op));
    else
        HT_TRY(me, hclient_broadcast(e.comm, in, out, count, HCLIENT_FLOAT32, 0, NULL, &op));
    if (expect_mismatch(&e, op, gather ? "6250" : "50000", gather ? "12500" : "100000") != 0)
        return 1;
    return ht_leave(&e);
}

static int call_refused(struct hpf_rank *me, hclient_result_t r)
{
    HT_EXPECT(me, r == HCLIENT_INVALID_ARGUMENT, "a wrong call gave '%s'", hclient_strerror(r));
    HT_EXPECT(me, hclient_last_error(NULL)[0], "a refusal without a sentence");
    return 0;
}

static int wrong_calls(struct ht_env *e, struct hpf_rank *me)
{
    hclient_comm_t c = e->comm;
    hclient_data_type_t f32 = HCLIENT_FLOAT32;
    hclient_op_t before, after;
    HT_TRY(me, hclient_barrier(c, NULL, &before));
    if (call_refused(me, hclient_all_reduce(c, NULL, out, 10, f32, HCLIENT_SUM, NULL, NULL)) != 0 ||
        call_refused(me, hclient_all_reduce(c, in, NULL, 10, f32, HCLIENT_SUM, NULL, NULL)) != 0 ||
        call_refused(
            me, hclient_all_reduce(c, in, out, 10, (hclient_data_type_t)77, HCLIENT_SUM, NULL, NULL)) != 0 ||
        call_refused(me, hclient_all_reduce(c, in, out, 10, f32, (hclient_red_op_t)77, NULL, NULL)) != 0 ||
        call_refused(me, hclient_all_reduce(c, in, in + 5, 10, f32, HCLIENT_SUM, NULL, NULL)) != 0 ||
        call_refused(me, hclient_broadcast(c, in, out, 10, f32, 8, NULL, NULL)) != 0 ||
        call_refused(me, hclient_broadcast(c, in, out, 10, f32, -1, NULL, NULL)) != 0 ||
        call_refused(me, hclient_all_gather(c, in, in + 3, 10, f32, NULL, NULL)) != 0 ||
        call_refused(
            me, hclient_reduce_scatter(c, in, in + 1 + 10 * me->rank, 10, f32, HCLIENT_SUM, NULL, NULL)) != 0)
        return 1;
    HT_TRY(me, hclient_barrier(c, NULL, &after));
    HT_EXPECT(me, after.number == before.number + 1, "refused calls took the numbers %lu to %lu",
              before.number + 1, after.number);
    HT_TRY(me, hclient_wait(after));
    return next_works(e);
}

static int rank_main(struct hpf_rank *me)
{
    struct ht_env e;
    if (ht_join(&e, me, 0, NULL) != 0 || counts(&e, me) != 0 || kinds(&e, me) != 0 ||
        wrong_calls(&e, me) != 0 || ends_communicator(me, 1, false) != 0 ||
        ends_communicator(me, 2, true) != 0)
        return 1;
    return ht_leave(&e);
}

int main(void)
{
    struct hpf_cluster *c = ht_cluster(2, NULL);
    struct ht_job job = {.nranks = 8, .fn = rank_main};
    ht_run(c, &job);
    ht_cluster_end(c);
    return 0;
}
