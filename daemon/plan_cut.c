/* SPDX-License-Identifier: MIT */
/* How an op's data is cut into units and a unit into blocks. */
#include "daemon/plan_int.h"

/* Slices are multiples of SLICE_ALIGN elements and block boundaries of BLOCK_ALIGN, for whole SIMD vectors.
 */
#define SLICE_ALIGN 64
#define BLOCK_ALIGN 16
/* A large op is cut in about this many units when their size allows, so that its stages overlap. */
#define UNITS_WANTED 4
#define MAX_ELEM_SIZE 8

uint64_t plan_wire_size(const struct plan_op *op)
{
    return hrp_dtype_size(op->wire);
}

uint64_t plan_elem_size(const struct plan_op *op)
{
    return hrp_dtype_size(op->sig->dtype);
}

static uint64_t min64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t max64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static bool is_by_node(unsigned coll)
{
    return coll == HRP_REDUCE_SCATTER || coll == HRP_ALL_GATHER;
}

/* Bytes of the largest message of a gather plan if the op is one unit. */
static uint64_t gather_message(const struct plan_op *op)
{
    uint64_t count = op->sig->count;
    switch (op->sig->coll) {
    case HRP_BROADCAST:
        return count * plan_elem_size(op);
    case HRP_ALL_GATHER:
        return count * plan_elem_size(op) * op->max_ranks;
    case HRP_REDUCE_SCATTER:
        return count * plan_wire_size(op) * op->max_ranks;
    default:
        return count * plan_wire_size(op);
    }
}

/*
 * The largest unit whose receive slots at any node stay within twice unit_bytes. direct, ring and pairwise
 * receive (n-1)/n of a unit in each of two phases, so that they may use it all.
 */
static uint64_t most_bytes(const struct plan_op *op, unsigned algo)
{
    uint64_t unit = max64(op->env->unit_bytes, 1);
    uint64_t n = op->env->nnodes;
    if (op->sig->coll == HRP_REDUCE_SCATTER) {
        /* n-1 partials of the node with the most ranks */
        uint64_t arriving = (n - 1) * op->max_ranks, whole = op->env->nranks;
        return arriving > 2 * whole ? unit / arriving * 2 * whole + unit % arriving * 2 * whole / arriving
                                    : unit;
    }
    if (algo == HRD_ALGO_GATHER && op->sig->coll == HRP_ALL_REDUCE && n > 3)
        return unit / (n - 1) * 2;
    if (algo == HRD_ALGO_TREE) /* two children and the parent */
        return unit / 3 * 2;
    return unit;
}

static uint64_t round_up(uint64_t x, uint64_t to)
{
    return (x + to - 1) / to * to;
}

/* An all_reduce of direct that is one unit anyway. No node sends another more than HRD_EAGER_MESSAGES. */
static bool eager_blocks(const struct plan_op *op, const struct hrd_plan *plan)
{
    if (!op->env->eager_blocks || plan->algo != HRD_ALGO_DIRECT || op->sig->coll != HRP_ALL_REDUCE)
        return false;
    uint64_t groups = (op->sig->count - 1) / BLOCK_ALIGN + 1;
    uint64_t most = ((groups - 1) / plan->nblocks + 1) * BLOCK_ALIGN;
    return most * max64(plan_wire_size(op), plan_elem_size(op)) <= op->env->eager_limit;
}

void plan_cut(const struct plan_op *op, struct hrd_plan *plan)
{
    uint64_t count = op->sig->count;
    plan->slice = count;
    plan->nunits = 1;
    plan->eager = plan->algo == HRD_ALGO_GATHER && op->env->eager_limit > 0 &&
                  gather_message(op) <= op->env->eager_limit;
    if (plan->eager || count == 0)
        return;
    /* Bytes of one element in all segments, in the wider of the two forms it takes. */
    uint64_t column =
        max64(plan_elem_size(op), plan_wire_size(op)) * hrp_sig_segments(op->sig, op->env->nranks);
    uint64_t most = most_bytes(op, plan->algo);
    uint64_t most_elems = max64(most / column / SLICE_ALIGN * SLICE_ALIGN, SLICE_ALIGN);
    uint64_t want = min64(max64(column * ((count - 1) / UNITS_WANTED + 1), op->env->unit_min_bytes), most);
    uint64_t want_elems = min64(max64(want / column, 1), most_elems);
    /* Equal units rather than a small one at the end. */
    uint64_t units = (count - 1) / want_elems + 1;
    uint64_t slice = round_up((count - 1) / units + 1, SLICE_ALIGN);
    plan->slice = min64(min64(slice, most_elems), count);
    plan->nunits = (count - 1) / plan->slice + 1;
    plan->eager = plan->nunits == 1 && eager_blocks(op, plan);
}

uint64_t hrd_plan_unit_max(const struct hrd_plan_env *env)
{
    uint64_t floor = (uint64_t)SLICE_ALIGN * MAX_ELEM_SIZE * env->nranks;
    return max64(env->unit_bytes, floor);
}

/* A partial of every block and the result of those that are sent on: at worst, the root of a tree, both
 * whole. */
uint64_t hrd_plan_send_max(const struct hrd_plan_env *env)
{
    return 2 * hrd_plan_unit_max(env);
}

uint64_t hrd_plan_recv_max(const struct hrd_plan_env *env)
{
    uint64_t max_ranks = 1;
    for (uint32_t i = 0; i < env->nnodes; i++)
        max_ranks = max64(max_ranks, env->ranks_on_node[i]);
    uint64_t floor = (uint64_t)SLICE_ALIGN * MAX_ELEM_SIZE * max64(env->nnodes, 3) * max_ranks;
    uint64_t rounding = (uint64_t)BLOCK_ALIGN * MAX_ELEM_SIZE * env->nnodes;
    return max64(2 * hrd_plan_unit_max(env), floor) + rounding;
}

/* Elements of the unit in each segment, and where they start. */
static uint64_t unit_range(const struct hrp_sig *sig, const struct hrd_plan *plan, uint64_t unit,
                           uint64_t *off)
{
    *off = unit * plan->slice;
    return min64(plan->slice, sig->count - *off);
}

/* Element where part p of n nearly equal parts of len begins. */
static uint64_t boundary(uint64_t len, uint64_t p, uint64_t n)
{
    uint64_t groups = (len - 1) / BLOCK_ALIGN + 1;
    if (len == 0 || p == n)
        return len;
    uint64_t at = (p * (groups / n) + p * (groups % n) / n) * BLOCK_ALIGN;
    return min64(at, len);
}

void hrd_plan_pieces(const struct hrd_plan_env *env, const struct hrp_sig *sig, const struct hrd_plan *plan,
                     uint64_t unit, uint32_t block, struct hrd_piece_iter *it)
{
    uint64_t off;
    uint64_t len = unit_range(sig, plan, unit, &off);
    *it = (struct hrd_piece_iter){.env = env, .off = off, .len = len, .node = block};
    if (is_by_node(sig->coll))
        return;
    uint64_t begin = boundary(len, block, plan->nblocks), end = boundary(len, block + 1, plan->nblocks);
    it->node = HRD_NONE;
    it->off = off + begin;
    it->len = end - begin;
}

bool hrd_piece_next(struct hrd_piece_iter *it, struct hrd_piece *piece)
{
    if (it->len == 0)
        return false;
    if (it->node == HRD_NONE) {
        if (it->rank != 0)
            return false;
        it->rank = 1;
        *piece = (struct hrd_piece){0, it->off, it->len};
        return true;
    }
    while (it->rank < it->env->nranks) {
        uint32_t rank = it->rank++;
        if (it->env->node_of_rank[rank] != it->node)
            continue;
        *piece = (struct hrd_piece){rank, it->off, it->len};
        return true;
    }
    return false;
}

uint64_t hrd_plan_block_elems(const struct hrd_plan_env *env, const struct hrp_sig *sig,
                              const struct hrd_plan *plan, uint64_t unit, uint32_t block)
{
    uint64_t off;
    uint64_t len = unit_range(sig, plan, unit, &off);
    if (is_by_node(sig->coll))
        return len * env->ranks_on_node[block];
    return boundary(len, block + 1, plan->nblocks) - boundary(len, block, plan->nblocks);
}

size_t hrd_plan_value_size(const struct hrp_sig *sig, const struct hrd_plan *plan, unsigned value)
{
    return hrp_dtype_size(value == HRD_VALUE_PARTIAL ? plan->wire : sig->dtype);
}
