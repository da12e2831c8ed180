/* SPDX-License-Identifier: MIT */
/*
 * No deadlock however ranks order their work: 2 nodes, 16 communicators, the smallest arena with nearly all of it
 * in their reserves, every rank posts to the communicators and waits for them in an order of its own. An arena
 * that is too small is refused in words when a communicator is made. timeout: 120
 */
#include <stdio.h>
#include <string.h>

#include "tests/lib/harness.h"

#define NCOMMS 16u
#define NRANKS 4u
#define ROUNDS 6u

enum outcome { RAN = 1, REFUSED = 2 };
struct shared {
    _Atomic uint32_t outcome[NRANKS];
};

static void shuffle(unsigned *order, uint64_t *state)
{
    for (unsigned i = 0; i < NCOMMS; i++)
        order[i] = i;
    for (unsigned i = NCOMMS - 1; i > 0; i--) {
        unsigned j = ht_random(state) % (i + 1), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
}

static struct ht_coll make(unsigned comm, unsigned round)
{
    static const unsigned colls[] = {HRP_ALL_REDUCE, HRP_ALL_REDUCE, HRP_REDUCE_SCATTER, HRP_ALL_GATHER,
                                     HRP_BROADCAST};
    unsigned coll = colls[(comm + round) % 5];
    bool wide = coll == HRP_REDUCE_SCATTER || coll == HRP_ALL_GATHER;
    return (struct ht_coll){.coll = coll,
                            .dtype = comm % 2 ? HRP_F32 : HRP_I32,
                            .root = coll == HRP_BROADCAST ? comm % NRANKS : 0,
                            .count = (comm % 4 == 3 ? 1000 : 150001) / (wide ? NRANKS : 1),
                            .inplace = comm % 3 == 0,
                            .send_mem = comm % 8 < 4 ? HT_ALLOC : HT_PLAIN,
                            .recv_mem = comm % 8 < 4 ? HT_ALLOC : HT_PLAIN};
}

static unsigned char *area(struct ht_env *e, unsigned comm, unsigned side)
{
    /* The environment's own memory is one buffer a kind; here every communicator needs its own. */
    static unsigned char *made[NCOMMS][2];
    static unsigned char room[NCOMMS][2][700000];
    struct ht_coll c = make(comm, 0);
    if (c.send_mem == HT_PLAIN)
        return room[comm][side];
    if (!made[comm][side]) {
        void *p = NULL;
        if (hclient_mem_alloc(&p, sizeof(room[0][0])) != HCLIENT_OK)
            ht_call_failed(e->me, HCLIENT_SYSTEM, "hclient_mem_alloc", __LINE__);
        made[comm][side] = p;
    }
    return made[comm][side];
}

static int rounds(struct ht_env *e, struct hpf_rank *me)
{
    static struct ht_flight flight[NCOMMS];
    uint64_t state = 77 + me->rank;
    unsigned order[NCOMMS];
    for (unsigned round = 0; round < ROUNDS; round++) {
        shuffle(order, &state);
        for (unsigned i = 0; i < NCOMMS; i++) {
            unsigned k = order[i];
            struct ht_coll c = make(k, round);
            if (ht_post(&e[k], &c, area(&e[k], k, 0), area(&e[k], k, 1), &flight[k]) != 0)
                return 1;
            if (ht_random(&state) % 4 == 0)
                hpf_sleep_ms(ht_random(&state) % 3);
        }
        shuffle(order, &state);
        for (unsigned i = 0; i < NCOMMS; i++)
            if (ht_verify(&e[order[i]], &flight[order[i]]) != 0)
                return 1;
    }
    return 0;
}

static int rank_main(struct hpf_rank *me)
{
    static struct ht_env e[NCOMMS];
    struct shared *shared = ht_shared(me);
    hclient_unique_id_t id;
    for (unsigned k = 0; k < NCOMMS; k++) {
        /* The first steps of ht_join(), because a refusal is an answer here. */
        struct ht_page *page = me->shared;
        if (me->rank == 0)
            HT_TRY(me, hclient_get_unique_id(&page->id[k]));
        if (hpf_rank_barrier(me, false, ht_ms(30000)) < 0)
            return 1;
        id = page->id[k];
        hclient_result_t r = hclient_comm_init_rank(&e[k].comm, (int)me->nranks, id, (int)me->rank);
        if (r == HCLIENT_RESOURCE) {
            HT_EXPECT(me, strstr(hclient_last_error(NULL), "arena"),
                      "the refusal does not name the arena: %s", hclient_last_error(NULL));
            atomic_store(&shared->outcome[me->rank], REFUSED);
            return 0;
        }
        HT_EXPECT(me, r == HCLIENT_OK, "communicator %u: %s", k, hclient_last_error(NULL));
        if (ht_adopt(&e[k], me, k) != 0)
            return 1;
    }
    if (rounds(e, me) != 0)
        return 1;
    for (unsigned k = 0; k < NCOMMS; k++)
        if (ht_leave(&e[k]) != 0)
            return 1;
    atomic_store(&shared->outcome[me->rank], RAN);
    return 0;
}

/* True when the arena was large enough for units of this size. */
static bool try_unit(unsigned kib)
{
    char unit[64], least[64], err[2048];
    snprintf(unit, sizeof(unit), "unit_size = %uK", kib);
    snprintf(least, sizeof(least), "unit_min = %uK", kib);
    const char *keys[] = {"arena_size = 4M", unit, least, "eager_limit = 4K", "staging_window = 4M",
                          "max_comms = 16",  NULL};
    struct hpf_cluster *c = ht_cluster(2, keys);
    struct ht_job job = {.nranks = NRANKS, .fn = rank_main, .shared_bytes = sizeof(struct shared)};
    struct hpf_job *started = ht_start(c, &job);
    HT_CHECK(hpf_job_wait(started, ht_ms(40000), err, sizeof(err)) == 0, "units of %u KiB: %s", kib, err);
    struct shared *shared = ht_job_user_shared(started);
    uint32_t outcome = shared->outcome[0];
    for (unsigned r = 1; r < NRANKS; r++)
        HT_CHECK(shared->outcome[r] == outcome, "units of %u KiB: rank %u was answered otherwise than rank 0",
                 kib, r);
    hpf_job_free(started);
    ht_cluster_end(c);
    printf("units of %u KiB: %s\n", kib, outcome == RAN ? "ran" : "refused");
    fflush(stdout);
    return outcome == RAN;
}

/* The arena stays at its smallest; units shrink until 16 reserves fit, so that next to nothing is left over. */
int main(void)
{
    unsigned kib = 512;
    HT_CHECK(!try_unit(kib),
             "16 communicators with units of %u KiB fit an arena of 4 MiB: nothing was refused", kib);
    for (kib = 96; !try_unit(kib); kib -= 2)
        HT_CHECK(kib > 64, "16 communicators do not fit an arena of 4 MiB with units of 64 KiB");
    return 0;
}
