/* SPDX-License-Identifier: MIT */
/*
 * ring and pairwise, for comparison on the same transport: the bytes of direct, but partial sums travel and
 * grow on the way, so that the order of summation depends on the block. Only with reproducible = off.
 */
#include <errno.h>
#include <stdlib.h>

#include "daemon/schedule_build.h"

/* One step index for each block: its LOCAL step, and the newest value of it at this node. */
struct blocks {
    uint32_t *local;
    uint32_t *now;
};

static int blocks_init(struct sched_build *b, struct blocks *k)
{
    k->local = malloc(2 * (size_t)b->n * sizeof(*k->local));
    if (k->local == NULL) {
        b->err = -ENOMEM;
        return -1;
    }
    k->now = k->local + b->n;
    for (uint32_t i = 0; i < b->n; i++)
        k->local[i] = k->now[i] = HRD_NONE;
    return 0;
}

static int reduces(const struct sched_build *b)
{
    return b->s->key.coll != HRP_ALL_GATHER;
}

static int gathers(const struct sched_build *b)
{
    return b->s->key.coll != HRP_REDUCE_SCATTER;
}

static struct sb_cover result_cover(const struct sched_build *b, uint32_t block)
{
    return reduces(b) ? (struct sb_cover){0, b->n} : (struct sb_cover){block, 1};
}

static void take_local(struct sched_build *b, struct blocks *k, uint32_t block, unsigned value)
{
    k->local[block] = k->now[block] = sb_local(b, block, value);
}

/* `got` arrived for a block that is at hand: fold both, in the order of what they cover. */
static void fold_in(struct sched_build *b, struct blocks *k, uint32_t block, uint32_t got, int got_first,
                    int last)
{
    uint32_t mine = k->now[block];
    uint32_t in[2] = {got_first ? got : mine, got_first ? mine : got};
    k->now[block] = last ? sb_fold_final(b, in, 2, gathers(b)) : sb_fold_over(b, mine, in, 2);
}

static void take_result(struct sched_build *b, struct blocks *k, uint32_t block, uint32_t peer,
                        uint32_t round)
{
    k->now[block] = sb_recv(b, block, HRD_VALUE_RESULT, peer, round, result_cover(b, block));
    sb_store(b, k->now[block], k->local[block]);
}

/*
 * Block b starts at node b+1 and comes round to node b, which owns it: in round r node i passes block i-1-r
 * on to i+1. Then the results go round the same way, block i-r in round r.
 */
static void ring_reduce(struct sched_build *b, struct blocks *k)
{
    uint32_t next = (b->me + 1) % b->n, prev = (b->me + b->n - 1) % b->n;
    take_local(b, k, prev, HRD_VALUE_PARTIAL);
    for (uint32_t r = 0; r + 1 < b->n; r++) {
        uint32_t out = (b->me + 2 * b->n - 1 - r) % b->n;
        uint32_t in = (b->me + 2 * b->n - 2 - r) % b->n;
        sb_send(b, k->now[out], next, r);
        take_local(b, k, in, HRD_VALUE_PARTIAL);
        struct sb_cover so_far = {in + 1, r + 1};
        uint32_t got = sb_recv(b, in, HRD_VALUE_PARTIAL, prev, r, so_far);
        fold_in(b, k, in, got, 1, r + 2 == b->n);
    }
}

static void ring_gather(struct sched_build *b, struct blocks *k, uint32_t first_round)
{
    uint32_t next = (b->me + 1) % b->n, prev = (b->me + b->n - 1) % b->n;
    for (uint32_t r = 0; r + 1 < b->n; r++) {
        sb_send(b, k->now[(b->me + b->n - r) % b->n], next, first_round + r);
        take_result(b, k, (b->me + 2 * b->n - 1 - r) % b->n, prev, first_round + r);
    }
}

void sched_ring(struct sched_build *b)
{
    struct blocks k;
    if (blocks_init(b, &k) != 0)
        return;
    if (reduces(b))
        ring_reduce(b, &k);
    else
        take_local(b, &k, b->me, HRD_VALUE_RESULT);
    if (gathers(b))
        ring_gather(b, &k, reduces(b) ? b->n - 1 : 0);
    if (!reduces(b))
        sb_store(b, k.local[b->me], HRD_NONE);
    free(k.local);
}

/*
 * Recursive halving: with distance d = 1, 2, 4, ... a node gives its partner me^d those of its blocks that
 * differ from itself in bit d and keeps the others. Shortest distance first, so that a value always covers a
 * whole aligned group of nodes, that is one range.
 */
static void pairwise_reduce(struct sched_build *b, struct blocks *k)
{
    uint32_t round = 0;
    for (uint32_t r = 1; r <= b->n; r++)
        take_local(b, k, (b->me + r) % b->n, HRD_VALUE_PARTIAL);
    for (uint32_t d = 1; d < b->n; d *= 2, round++) {
        uint32_t partner = b->me ^ d;
        struct sb_cover theirs = {partner & ~(d - 1), d};
        for (uint32_t blk = partner & (2 * d - 1); blk < b->n; blk += 2 * d)
            sb_send(b, k->now[blk], partner, round);
        for (uint32_t blk = b->me & (2 * d - 1); blk < b->n; blk += 2 * d) {
            uint32_t got = sb_recv(b, blk, HRD_VALUE_PARTIAL, partner, round, theirs);
            fold_in(b, k, blk, got, partner < b->me, 2 * d == b->n);
        }
    }
}

/* Recursive doubling, the same way back: the blocks that agree with a node in the bits below 2d are at hand.
 */
static void pairwise_gather(struct sched_build *b, struct blocks *k, uint32_t round)
{
    uint32_t last = HRD_NONE;
    for (uint32_t d = b->n / 2; d > 0; d /= 2, round++) {
        uint32_t partner = b->me ^ d, send = HRD_NONE;
        for (uint32_t blk = b->me & (2 * d - 1); blk < b->n; blk += 2 * d)
            send = sb_send_after(b, k->now[blk], partner, round, last);
        last = send;
        for (uint32_t blk = partner & (2 * d - 1); blk < b->n; blk += 2 * d)
            take_result(b, k, blk, partner, round);
    }
}

void sched_pairwise(struct sched_build *b)
{
    struct blocks k;
    uint32_t rounds = 0;
    if (blocks_init(b, &k) != 0)
        return;
    if (reduces(b)) {
        pairwise_reduce(b, &k);
        for (uint32_t d = 1; d < b->n; d *= 2)
            rounds++;
    } else {
        take_local(b, &k, b->me, HRD_VALUE_RESULT);
    }
    if (gathers(b))
        pairwise_gather(b, &k, rounds);
    if (!reduces(b))
        sb_store(b, k.local[b->me], HRD_NONE);
    free(k.local);
}
