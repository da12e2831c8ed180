/* SPDX-License-Identifier: MIT */
/*
 * The ways in which a job may post and wait: two communicators waited for in opposite orders with staged
 * buffers that are larger than the window, groups, several threads, a thousand ops back to back, polling, and
 * forgetting handles. timeout: 180
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "tests/lib/harness.h"

static const char *const keys[] = {"staging_window = 3M", "unit_size = 256K", "unit_min = 64K", NULL};

/* Ranks of one job wait for the two in different orders. A wait for one has to move the other along too. */
static int opposite_orders(struct ht_env *e, struct hpf_rank *me)
{
    struct ht_flight f[2];
    static unsigned char room[2][2][8000000];
    struct ht_coll c = {.coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = 1900007};
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned i = 0; i < 2; i++) {
            unsigned k = (me->rank + i) % 2;
            if (ht_post(&e[k], &c, room[k][0], room[k][1], &f[k]) != 0)
                return 1;
        }
        hclient_op_t first = f[(me->rank / 2 + round) % 2].op;
        HT_TRY(me, hclient_wait(first));
        for (unsigned k = 0; k < 2; k++)
            if (ht_verify(&e[k], &f[k]) != 0)
                return 1;
    }
    return 0;
}

static int groups(struct ht_env *e)
{
    enum { OPS = 24 };
    static unsigned char room[OPS][2][40000];
    struct ht_flight f[OPS];
    for (unsigned round = 0; round < 3; round++) {
        HT_TRY(e->me, hclient_group_start());
        HT_TRY(e->me, hclient_group_start());
        for (unsigned i = 0; i < OPS; i++) {
            struct ht_coll c = {
                .coll = i % 5, .dtype = i % HRP_NDTYPES, .count = i % 5 == HRP_BARRIER ? 0 : 100 + i};
            if (ht_post(e, &c, room[i][0], room[i][1], &f[i]) != 0)
                return 1;
            if (i == OPS / 2)
                HT_TRY(e->me, hclient_group_end());
        }
        HT_TRY(e->me, hclient_group_end());
        for (unsigned i = OPS; i-- > 0;)
            if (ht_verify(e, &f[i]) != 0)
                return 1;
    }
    return 0;
}

/* More ops than are allowed to be outstanding: the calls wait for room by themselves. */
static int back_to_back(struct ht_env *e)
{
    enum { OPS = 1000, COUNT = 64 };
    static int32_t in[OPS][COUNT], out[OPS][COUNT];
    unsigned n = e->me->nranks;
    for (unsigned i = 0; i < OPS; i++) {
        for (unsigned k = 0; k < COUNT; k++)
            in[i][k] = (int32_t)(i * 7 + k * 3 + e->me->rank);
        HT_TRY(e->me,
               hclient_all_reduce(e->comm, in[i], out[i], COUNT, HCLIENT_INT32, HCLIENT_SUM, NULL, NULL));
    }
    HT_TRY(e->me, hclient_comm_wait(e->comm));
    for (unsigned i = 0; i < OPS; i++)
        for (unsigned k = 0; k < COUNT; k++)
            HT_EXPECT(e->me, out[i][k] == (int32_t)(n * (i * 7 + k * 3) + n * (n - 1) / 2),
                      "op %u of %u: element %u is %d", i, (unsigned)OPS, k, out[i][k]);
    return 0;
}

static int polling(struct ht_env *e)
{
    struct ht_flight f;
    struct ht_coll c = {.coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = 300007};
    for (unsigned k = 0; k < 3; k++) {
        c.send_mem = c.recv_mem = k;
        hpf_sleep_ms(e->me->rank * 3);
        if (ht_post(e, &c, NULL, NULL, &f) != 0)
            return 1;
        hclient_result_t r;
        long long deadline = hpf_now_ms() + ht_ms(20000);
        while ((r = hclient_test(f.op)) == HCLIENT_IN_PROGRESS) {
            HT_EXPECT(e->me, hpf_now_ms() < deadline, "hclient_test() alone never completes a staged op");
            hpf_sleep_ms(1);
        }
        HT_EXPECT(e->me, r == HCLIENT_OK, "hclient_test: %s", hclient_last_error(NULL));
        if (ht_verify(e, &f) != 0)
            return 1;
    }
    return 0;
}

struct worker {
    struct ht_env *e;
    int result;
};

/* A thread with a communicator of its own, beside others. */
static void *work(void *arg)
{
    struct worker *w = arg;
    for (unsigned i = 0; i < 20 && w->result == 0; i++) {
        struct ht_coll c = {.coll = i % 4,
                            .dtype = i % HRP_NDTYPES,
                            .count = 5000 + 1000 * i,
                            .send_mem = i % 2,
                            .recv_mem = i / 2 % 2};
        w->result = ht_collective(w->e, &c);
    }
    return NULL;
}

static int threads(struct ht_env *e, unsigned n)
{
    struct worker w[4];
    pthread_t t[4];
    for (unsigned i = 0; i < n; i++) {
        w[i] = (struct worker){.e = &e[i]};
        HT_EXPECT(e->me, pthread_create(&t[i], NULL, work, &w[i]) == 0, "pthread_create");
    }
    int rc = 0;
    for (unsigned i = 0; i < n; i++) {
        pthread_join(t[i], NULL);
        rc |= w[i].result;
    }
    return rc;
}

struct waiter {
    hclient_op_t op;
    hclient_result_t result;
};

static void *wait_for(void *arg)
{
    struct waiter *w = arg;
    w->result = hclient_wait(w->op);
    return NULL;
}

/* Many threads may wait for one op; so may those that come late. */
static int many_waiters(struct ht_env *e)
{
    enum { WAITERS = 6 };
    struct waiter w[WAITERS];
    pthread_t t[WAITERS];
    struct ht_flight f;
    struct ht_coll c = {.coll = HRP_ALL_REDUCE, .dtype = HRP_I64, .redop = HRP_MAX, .count = 200003};
    if (e->me->rank == 1)
        hpf_sleep_ms(50);
    if (ht_post(e, &c, NULL, NULL, &f) != 0)
        return 1;
    for (unsigned i = 0; i < WAITERS; i++) {
        w[i] = (struct waiter){.op = f.op};
        HT_EXPECT(e->me, pthread_create(&t[i], NULL, wait_for, &w[i]) == 0, "pthread_create");
    }
    for (unsigned i = 0; i < WAITERS; i++) {
        pthread_join(t[i], NULL);
        HT_EXPECT(e->me, w[i].result == HCLIENT_OK, "waiter %u: %s", i, hclient_strerror(w[i].result));
    }
    return ht_verify(e, &f);
}

static int rank_main(struct hpf_rank *me)
{
    static struct ht_env e[4];
    for (unsigned k = 0; k < 4; k++)
        if (ht_join(&e[k], me, k, NULL) != 0)
            return 1;
    if (opposite_orders(e, me) != 0 || groups(&e[0]) != 0 || back_to_back(&e[0]) != 0 ||
        polling(&e[1]) != 0 || many_waiters(&e[2]) != 0 || threads(e, 4) != 0)
        return 1;
    for (unsigned k = 0; k < 4; k++)
        if (ht_leave(&e[k]) != 0)
            return 1;
    return 0;
}

int main(void)
{
    struct hpf_cluster *c = ht_cluster(2, keys);
    struct ht_job job = {.nranks = 4, .fn = rank_main, .expected_bytes = 1};
    ht_run(c, &job);
    ht_cluster_end(c);
    return 0;
}
