/* SPDX-License-Identifier: MIT */
/* Which algorithm an op gets, and the sentence that says why. */
#include "daemon/plan.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "daemon/plan_int.h"

/* Far above any arena, low enough that sums of unit sizes cannot overflow. */
#define UNIT_BYTES_MAX (UINT64_C(1) << 48)

static void say(char *why, size_t len, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Appends to the text in why. */
static void say(char *why, size_t len, const char *fmt, ...)
{
    if (why == NULL || len == 0)
        return;
    size_t used = strnlen(why, len);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why + used, len - used, fmt, ap);
    va_end(ap);
}

static bool fixed_order(unsigned algo)
{
    return algo == HRD_ALGO_DIRECT || algo == HRD_ALGO_GATHER;
}

static bool power_of_two(uint32_t n)
{
    return (n & (n - 1)) == 0;
}

/* Whether an algorithm can run on this roster at all; the sentence if not. */
static int check_override(const struct hrd_plan_env *env, char *why, size_t len)
{
    const char *name = hrd_algo_name(env->algo);
    if (env->algo > HRD_ALGO_TREE) {
        say(why, len, "algorithm %u is unknown: choose auto, direct, gather, pairwise, ring or tree",
            env->algo);
        return -EINVAL;
    }
    if (env->algo == HRD_ALGO_AUTO || env->nnodes == 1)
        return 0;
    if (env->reproducible && !fixed_order(env->algo)) {
        say(why, len,
            "algorithm %s was asked for, but its order of summation depends on the data's position and "
            "reproducible is on: choose direct, gather or auto, or set reproducible = off",
            name);
        return -EINVAL;
    }
    if (env->algo == HRD_ALGO_PAIRWISE && !power_of_two(env->nnodes)) {
        say(why, len,
            "algorithm pairwise was asked for, but it needs a power of two of nodes and this communicator "
            "has "
            "%" PRIu32 ": choose direct or auto, which serve any number",
            env->nnodes);
        return -EINVAL;
    }
    if (env->algo == HRD_ALGO_TREE && env->nnodes < 4) {
        say(why, len,
            "algorithm tree was asked for, but it is never used with %" PRIu32
            " nodes, where it is slower than every other: choose direct or auto, or use 4 nodes or more",
            env->nnodes);
        return -EINVAL;
    }
    return 0;
}

static int check_cheap(const struct hrd_plan_env *env, char *why, size_t len)
{
    if (env->nnodes == 0 || env->nnodes > HRD_MAX_NODES || env->nranks < env->nnodes) {
        say(why, len,
            "%" PRIu32 " ranks on %" PRIu32 " nodes is not a communicator: 1 to %d nodes, a rank on each",
            env->nranks, env->nnodes, HRD_MAX_NODES);
        return -EINVAL;
    }
    if (env->unit_bytes > UNIT_BYTES_MAX || env->unit_min_bytes > UNIT_BYTES_MAX) {
        say(why, len, "a unit of %" PRIu64 " bytes is too large: the limit is %" PRIu64,
            env->unit_bytes > UNIT_BYTES_MAX ? env->unit_bytes : env->unit_min_bytes, UNIT_BYTES_MAX);
        return -EINVAL;
    }
    return check_override(env, why, len);
}

int hrd_plan_check(const struct hrd_plan_env *env, char *why, size_t whylen)
{
    if (why != NULL && whylen > 0)
        why[0] = '\0';
    int rc = check_cheap(env, why, whylen);
    if (rc != 0)
        return rc;
    for (uint32_t r = 0; r < env->nranks; r++) {
        if (env->node_of_rank[r] >= env->nnodes) {
            say(why, whylen, "rank %" PRIu32 " is on node %" PRIu32 " of a roster of %" PRIu32 " nodes", r,
                env->node_of_rank[r], env->nnodes);
            return -EINVAL;
        }
    }
    for (uint32_t i = 0; i < env->nnodes; i++) {
        uint32_t found = 0;
        for (uint32_t r = 0; r < env->nranks; r++)
            found += env->node_of_rank[r] == i;
        if (found == 0 || found != env->ranks_on_node[i]) {
            say(why, whylen,
                "the roster gives node %" PRIu32 " %" PRIu32 " ranks, but %" PRIu32
                " are listed for it; a node has one or more",
                i, env->ranks_on_node[i], found);
            return -EINVAL;
        }
    }
    return 0;
}

/* min and max round nothing, so wider partials would only cost bytes. */
static uint8_t wire_dtype(const struct hrd_plan_env *env, const struct hrp_sig *sig)
{
    bool half = sig->dtype == HRP_F16 || sig->dtype == HRP_BF16;
    bool sums = sig->coll == HRP_ALL_REDUCE || sig->coll == HRP_REDUCE_SCATTER;
    bool rounds = sig->redop != HRP_MIN && sig->redop != HRP_MAX;
    return half && sums && rounds && env->wire_f32 ? HRP_F32 : sig->dtype;
}

static void make(const struct plan_op *op, unsigned algo, struct hrd_plan *plan)
{
    const struct hrd_plan_env *env = op->env;
    const struct hrp_sig *sig = op->sig;
    *plan = (struct hrd_plan){.algo = (uint8_t)algo,
                              .wire = op->wire,
                              .nvariants = algo == HRD_ALGO_TREE ? 2 : 1,
                              .nblocks = hrd_schedule_nblocks(algo, sig->coll, env->nnodes),
                              .root_node = sig->coll == HRP_BROADCAST ? env->node_of_rank[sig->root] : 0};
    plan_cut(op, plan);
    if (algo != HRD_ALGO_LOCAL)
        plan->model_ns = plan_model(op, plan);
}

/*
 * What auto may use. A gather that is not eager must not cost bytes: with two nodes it sends what direct
 * sends, in one hop instead of two; with more it is for eager messages only.
 */
static bool auto_may(const struct plan_op *op, const struct hrd_plan *plan)
{
    const struct hrd_plan_env *env = op->env;
    if (env->reproducible && !fixed_order(plan->algo))
        return false;
    switch (plan->algo) {
    case HRD_ALGO_GATHER:
        return plan->eager || op->sig->coll == HRP_BARRIER ||
               (op->sig->coll == HRP_ALL_REDUCE && env->nnodes == 2 && op->wire == op->sig->dtype);
    case HRD_ALGO_PAIRWISE:
        return power_of_two(env->nnodes);
    case HRD_ALGO_TREE:
        return env->nnodes >= 4;
    default:
        return true;
    }
}

/* The cheapest by the model, the earlier of equals; *other: the runner-up, algo AUTO if there is none. */
static void choose(const struct plan_op *op, struct hrd_plan *best, struct hrd_plan *other)
{
    static const uint8_t order[] = {HRD_ALGO_GATHER, HRD_ALGO_DIRECT, HRD_ALGO_PAIRWISE, HRD_ALGO_RING,
                                    HRD_ALGO_TREE};
    best->algo = other->algo = HRD_ALGO_AUTO;
    for (size_t i = 0; i < sizeof(order); i++) {
        struct hrd_plan plan;
        if (!hrd_schedule_serves(order[i], op->sig->coll))
            continue;
        make(op, order[i], &plan);
        if (!auto_may(op, &plan))
            continue;
        if (best->algo == HRD_ALGO_AUTO || plan.model_ns < best->model_ns) {
            *other = *best;
            *best = plan;
        } else if (other->algo == HRD_ALGO_AUTO || plan.model_ns < other->model_ns) {
            *other = plan;
        }
    }
}

static void say_time(char *why, size_t len, uint64_t ns)
{
    if (ns < 1000000)
        say(why, len, "%" PRIu64 ".%" PRIu64 " us", ns / 1000, ns % 1000 / 100);
    else if (ns < UINT64_C(10000000000))
        say(why, len, "%" PRIu64 ".%" PRIu64 " ms", ns / 1000000, ns % 1000000 / 100000);
    else
        say(why, len, "%" PRIu64 " s", ns / 1000000000);
}

static void say_choice(const struct plan_op *op, const struct hrd_plan *plan, const struct hrd_plan *other,
                       char *why, size_t len)
{
    const struct hrd_plan_env *env = op->env;
    say(why, len, "%s%s: %" PRIu64 " bytes over %" PRIu32 " nodes, ", hrd_algo_name(plan->algo),
        plan->eager ? " (eager)" : "", hrp_sig_bytes(op->sig, env->nranks), env->nnodes);
    say_time(why, len, plan->model_ns);
    say(why, len, " by the model");
    if (other->algo != HRD_ALGO_AUTO) {
        say(why, len, " against %s ", hrd_algo_name(other->algo));
        say_time(why, len, other->model_ns);
    }
    if (env->algo == plan->algo)
        say(why, len, "; set by configuration");
    else if (env->algo != HRD_ALGO_AUTO)
        say(why, len, "; configuration asks for %s, which has no form for %s", hrd_algo_name(env->algo),
            hrp_coll_name(op->sig->coll));
}

int hrd_plan_op(const struct hrd_plan_env *env, const struct hrp_sig *sig, struct hrd_plan *out, char *why,
                size_t whylen)
{
    if (why != NULL && whylen > 0)
        why[0] = '\0';
    int rc = check_cheap(env, why, whylen);
    if (rc != 0)
        return rc;
    struct plan_op op = {.env = env, .sig = sig, .max_ranks = 1, .wire = wire_dtype(env, sig)};
    for (uint32_t i = 0; i < env->nnodes; i++)
        if (env->ranks_on_node[i] > op.max_ranks)
            op.max_ranks = env->ranks_on_node[i];
    struct hrd_plan plan, other = {.algo = HRD_ALGO_AUTO};
    if (env->nnodes == 1) {
        make(&op, HRD_ALGO_LOCAL, &plan);
        say(why, whylen, "local: %" PRIu64 " bytes on one node, nothing to exchange",
            hrp_sig_bytes(sig, env->nranks));
        *out = plan;
        return 0;
    }
    if (env->algo != HRD_ALGO_AUTO && hrd_schedule_serves(env->algo, sig->coll))
        make(&op, env->algo, &plan);
    else
        choose(&op, &plan, &other);
    if (whylen > 0)
        say_choice(&op, &plan, &other, why, whylen);
    *out = plan;
    return 0;
}

struct hrd_schedule_key hrd_plan_key(const struct hrd_plan_env *env, const struct hrp_sig *sig,
                                     const struct hrd_plan *plan, uint64_t unit, uint32_t me)
{
    return (struct hrd_schedule_key){.algo = plan->algo,
                                     .coll = sig->coll,
                                     .variant = (uint8_t)(unit % plan->nvariants),
                                     .nnodes = (uint16_t)env->nnodes,
                                     .me = (uint16_t)me,
                                     .root_node = (uint16_t)plan->root_node};
}
