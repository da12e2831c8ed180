/* SPDX-License-Identifier: MIT */
/*
 * direct: every node owns one block. In round r node i sends to i+r and receives from i-r, and a send starts
 * only when the one before it has left, so that a node talks to two peers at a time and no node is sent to by
 * many. Bytes are minimal for any number of nodes, and the owner folds in node order: the sum is
 * reproducible.
 *
 * gather: every node sends all it has to everyone at once and folds for itself: one hop, for small messages.
 */
#include <stdlib.h>

#include <errno.h>

#include "daemon/schedule_build.h"

static struct sb_cover one_node(uint32_t node)
{
    return (struct sb_cover){node, 1};
}

static struct sb_cover all_nodes(const struct sched_build *b)
{
    return (struct sb_cover){0, b->n};
}

static uint32_t after(const struct sched_build *b, uint32_t r)
{
    return (b->me + r) % b->n;
}

static uint32_t before(const struct sched_build *b, uint32_t r)
{
    return (b->me + b->n - r) % b->n;
}

static uint32_t send(struct sched_build *b, uint32_t src, uint32_t peer, uint32_t round)
{
    if (b->s->key.algo == HRD_ALGO_GATHER)
        return sb_send(b, src, peer, 0);
    return sb_send_ordered(b, src, peer, round);
}

/* The partials of my own block, mine and those of all others, folded in node order; in[] has room for n. */
static uint32_t fold_own(struct sched_build *b, uint32_t *in, uint32_t block, int sent)
{
    for (uint32_t r = 1; r < b->n; r++) {
        uint32_t from = before(b, r);
        uint32_t round = b->s->key.algo == HRD_ALGO_GATHER ? 0 : r - 1;
        in[from] = sb_recv(b, block, HRD_VALUE_PARTIAL, from, round, one_node(from));
    }
    return sb_fold_final(b, in, b->n, sent);
}

/*
 * Everyone's partial of each block to the block's owner, who folds it. local[b] becomes the LOCAL step of
 * block b. A block's LOCAL stands right before its send: an executor that takes steps in order fills the wire
 * early.
 */
static uint32_t reduce_to_owners(struct sched_build *b, uint32_t *local, int sent)
{
    for (uint32_t r = 1; r < b->n; r++) {
        uint32_t to = after(b, r);
        local[to] = sb_local(b, to, HRD_VALUE_PARTIAL);
        send(b, local[to], to, r - 1);
    }
    local[b->me] = sb_local(b, b->me, HRD_VALUE_PARTIAL);
    uint32_t *in = malloc(b->n * sizeof(*in));
    if (in == NULL) {
        b->err = -ENOMEM;
        return HRD_NONE;
    }
    in[b->me] = local[b->me];
    uint32_t fold = fold_own(b, in, b->me, sent);
    free(in);
    return fold;
}

/* My block's result `own` to everyone, and theirs to me. local: as above, or NULL where inputs cannot
 * overlap. */
static void results_to_all(struct sched_build *b, uint32_t own, const uint32_t *local, uint32_t first_round)
{
    for (uint32_t r = 1; r < b->n; r++) {
        uint32_t from = before(b, r);
        uint32_t round = b->s->key.algo == HRD_ALGO_GATHER ? 0 : first_round + r - 1;
        send(b, own, after(b, r), round);
        uint32_t got = sb_recv(b, from, HRD_VALUE_RESULT, from, round, local ? all_nodes(b) : one_node(from));
        sb_store(b, got, local ? local[from] : HRD_NONE);
    }
}

static void direct_all_reduce(struct sched_build *b)
{
    uint32_t *local = malloc(b->n * sizeof(*local));
    if (local == NULL) {
        b->err = -ENOMEM;
        return;
    }
    uint32_t own = reduce_to_owners(b, local, 1);
    results_to_all(b, own, local, b->n - 1);
    free(local);
}

static void owners_reduce_scatter(struct sched_build *b)
{
    uint32_t *local = malloc(b->n * sizeof(*local));
    if (local == NULL) {
        b->err = -ENOMEM;
        return;
    }
    reduce_to_owners(b, local, 0);
    free(local);
}

static void owners_all_gather(struct sched_build *b)
{
    uint32_t own = sb_local(b, b->me, HRD_VALUE_RESULT);
    results_to_all(b, own, NULL, 0);
    sb_store(b, own, HRD_NONE);
}

/*
 * Broadcast. The root's node sends block p to node p in rounds 0 .. n-2, then its own block to everyone. Node
 * root+h, which has its block after round h-1, passes it on at once, going down: to itself-1, itself-2, ... Going
 * up, as the root does, all nodes would come to the same node in the same round.
 */
static uint32_t hop_from_root(const struct sched_build *b, uint32_t node)
{
    return (node + b->n - b->s->key.root_node) % b->n;
}

/* The round in which `node` sends its block to the node r below it. */
static uint32_t forward_round(const struct sched_build *b, uint32_t node, uint32_t r)
{
    uint32_t hop = hop_from_root(b, node);
    return r + (hop == 0 ? b->n - 2 : hop - 1);
}

static void direct_broadcast_root(struct sched_build *b)
{
    for (uint32_t r = 1; r < b->n; r++) {
        uint32_t own = sb_local(b, after(b, r), HRD_VALUE_RESULT);
        send(b, own, after(b, r), r - 1);
        sb_store(b, own, HRD_NONE);
    }
    uint32_t own = sb_local(b, b->me, HRD_VALUE_RESULT);
    for (uint32_t r = 1; r < b->n; r++)
        send(b, own, before(b, r), forward_round(b, b->me, r));
    sb_store(b, own, HRD_NONE);
}

static void direct_broadcast(struct sched_build *b)
{
    uint32_t root = b->s->key.root_node;
    if (b->me == root) {
        direct_broadcast_root(b);
        return;
    }
    uint32_t own = sb_recv(b, b->me, HRD_VALUE_RESULT, root, hop_from_root(b, b->me) - 1, one_node(root));
    sb_store(b, own, HRD_NONE);
    for (uint32_t r = 1; r < b->n; r++) {
        uint32_t from = after(b, r);
        if (before(b, r) != root)
            send(b, own, before(b, r), forward_round(b, b->me, r));
        uint32_t got = sb_recv(b, from, HRD_VALUE_RESULT, from, forward_round(b, from, r), one_node(root));
        sb_store(b, got, HRD_NONE);
    }
}

void sched_direct(struct sched_build *b)
{
    switch (b->s->key.coll) {
    case HRP_ALL_REDUCE:
        direct_all_reduce(b);
        break;
    case HRP_REDUCE_SCATTER:
        owners_reduce_scatter(b);
        break;
    case HRP_ALL_GATHER:
        owners_all_gather(b);
        break;
    default:
        direct_broadcast(b);
        break;
    }
}

/* all_reduce; barrier is the same with a block of no elements. */
static void gather_all_reduce(struct sched_build *b)
{
    uint32_t *in = malloc(b->n * sizeof(*in));
    if (in == NULL) {
        b->err = -ENOMEM;
        return;
    }
    in[b->me] = sb_local(b, 0, HRD_VALUE_PARTIAL);
    for (uint32_t r = 1; r < b->n; r++)
        send(b, in[b->me], after(b, r), 0);
    fold_own(b, in, 0, 0);
    free(in);
}

static void gather_broadcast(struct sched_build *b)
{
    uint32_t root = b->s->key.root_node;
    if (b->me != root) {
        sb_store(b, sb_recv(b, 0, HRD_VALUE_RESULT, root, 0, one_node(root)), HRD_NONE);
        return;
    }
    uint32_t own = sb_local(b, 0, HRD_VALUE_RESULT);
    for (uint32_t r = 1; r < b->n; r++)
        send(b, own, after(b, r), 0);
    sb_store(b, own, HRD_NONE);
}

void sched_gather(struct sched_build *b)
{
    switch (b->s->key.coll) {
    case HRP_ALL_REDUCE:
    case HRP_BARRIER:
        gather_all_reduce(b);
        break;
    case HRP_REDUCE_SCATTER:
        owners_reduce_scatter(b);
        break;
    case HRP_ALL_GATHER:
        owners_all_gather(b);
        break;
    default:
        gather_broadcast(b);
        break;
    }
}
