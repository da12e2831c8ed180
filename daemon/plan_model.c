/* SPDX-License-Identifier: MIT */
/*
 * The cost model: one latency a hop, one overhead a message, the bytes of the busiest node over its
 * bandwidth, and the bytes it folds. It ranks algorithms; it does not promise times. What all algorithms
 * share (local reduce, local broadcast) is left out.
 */
#include "daemon/plan_int.h"

/* Handling of one message on both ends together, beside the wire. */
#define MESSAGE_NS 2000
#define DEFAULT_BANDWIDTH UINT64_C(1000000000)
#define DEFAULT_FOLD_RATE UINT64_C(8000000000)
/* Longer than any op may take; keeps the sum of the terms far from overflow. */
#define FOREVER_NS (UINT64_C(1) << 60)

/* What one op costs the busiest node. */
struct cost {
    uint64_t hops;     /* in a row, for one unit */
    uint64_t messages; /* sent, for one unit */
    unsigned __int128 sent;
    unsigned __int128 folded; /* read by folds */
    uint64_t refill;          /* units' worth of bytes until the pipeline is full */
};

static uint64_t time_of(unsigned __int128 bytes, uint64_t rate)
{
    unsigned __int128 ns = bytes * 1000000000 / rate;
    return ns < FOREVER_NS ? (uint64_t)ns : FOREVER_NS;
}

uint32_t plan_log2_up(uint32_t n)
{
    uint32_t k = 0;
    while ((UINT64_C(1) << k) < n)
        k++;
    return k;
}

/* partial, result: bytes of the whole op in either form. */
static struct cost all_reduce_cost(unsigned algo, uint64_t n, unsigned __int128 partial,
                                   unsigned __int128 result)
{
    struct cost c = {.sent = (partial + result) * (n - 1) / n, .messages = 2 * (n - 1)};
    uint64_t log = plan_log2_up((uint32_t)n);
    switch (algo) {
    case HRD_ALGO_GATHER:
        c.hops = 1;
        c.messages = n - 1;
        c.sent = partial * (n - 1);
        c.folded = partial * n;
        break;
    case HRD_ALGO_PAIRWISE:
        c.hops = 2 * log;
        c.folded = 2 * partial * (n - 1) / n;
        break;
    case HRD_ALGO_RING:
        c.hops = 2 * (n - 1);
        c.folded = 2 * partial * (n - 1) / n;
        break;
    case HRD_ALGO_TREE:
        c.hops = 2 * log;
        c.messages = 2;
        c.sent = partial + result;
        c.folded = 2 * partial;
        c.refill = c.hops - 1;
        break;
    default:
        c.hops = 2;
        c.folded = partial;
        break;
    }
    return c;
}

/* RS and AG: each node sends or receives all but its own; direct and gather differ in order only. */
static struct cost by_node_cost(const struct plan_op *op, unsigned algo, unsigned __int128 partial,
                                unsigned __int128 result)
{
    uint64_t n = op->env->nnodes;
    bool reduces = op->sig->coll == HRP_REDUCE_SCATTER;
    struct cost c = {.hops = 1, .messages = n - 1, .sent = (reduces ? partial : result) * (n - 1) / n};
    if (reduces)
        c.folded = algo == HRD_ALGO_RING || algo == HRD_ALGO_PAIRWISE ? 2 * partial * (n - 1) / n : partial;
    if (algo == HRD_ALGO_RING)
        c.hops = n - 1;
    else if (algo == HRD_ALGO_PAIRWISE)
        c.hops = plan_log2_up((uint32_t)n);
    return c;
}

static struct cost broadcast_cost(unsigned algo, uint64_t n, unsigned __int128 result)
{
    if (algo == HRD_ALGO_GATHER)
        return (struct cost){.hops = 1, .messages = n - 1, .sent = result * (n - 1)};
    return (struct cost){.hops = 2, .messages = 2 * (n - 1), .sent = 2 * result * (n - 1) / n};
}

uint64_t plan_model(const struct plan_op *op, const struct hrd_plan *plan)
{
    const struct hrd_plan_env *env = op->env;
    uint64_t elems = op->sig->count * hrp_sig_segments(op->sig, env->nranks);
    unsigned __int128 partial = (unsigned __int128)elems * plan_wire_size(op);
    unsigned __int128 result = (unsigned __int128)elems * plan_elem_size(op);
    struct cost c;
    switch (op->sig->coll) {
    case HRP_BROADCAST:
        c = broadcast_cost(plan->algo, env->nnodes, result);
        break;
    case HRP_REDUCE_SCATTER:
    case HRP_ALL_GATHER:
        c = by_node_cost(op, plan->algo, partial, result);
        break;
    default:
        c = all_reduce_cost(plan->algo, env->nnodes, partial, result);
        break;
    }
    uint64_t rate = env->bandwidth ? env->bandwidth : DEFAULT_BANDWIDTH;
    uint64_t fold_rate = env->fold_rate ? env->fold_rate : DEFAULT_FOLD_RATE;
    uint64_t hops = c.hops + (plan->eager ? 0 : 1); /* the credit travels first */
    unsigned __int128 ns = (unsigned __int128)hops * env->latency_ns;
    ns += (unsigned __int128)c.messages * plan->nunits * MESSAGE_NS;
    ns += (unsigned __int128)time_of(c.sent, rate) + time_of(c.folded, fold_rate);
    ns += (unsigned __int128)c.refill * time_of(partial / plan->nunits, rate);
    return ns < FOREVER_NS ? (uint64_t)ns : FOREVER_NS;
}
