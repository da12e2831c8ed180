/* SPDX-License-Identifier: MIT */
/*
 * The plan of an op: which algorithm carries it between the nodes and how its data is cut. A plan is a pure
 * function of (roster, configuration, signature): every node of a communicator computes it for itself and all
 * come to the same answer, so nothing here may depend on who asks, on time or on load.
 *
 * The data space of an op is nseg segments of count elements (hrp_sig_segments). It is cut into *units*: unit
 * u covers elements [u*slice, min((u+1)*slice, count)) of EVERY segment. A unit is what is admitted, credited
 * and scheduled as one; several are in flight. A unit is cut into *blocks*, each a list of pieces:
 *
 *   all_reduce, broadcast      nblocks == nnodes (direct, ring, pairwise): block p is the p-th nearly equal
 * part of the unit's range, cut at multiples of 16 elements; nblocks == 1 otherwise reduce_scatter,
 * all_gather nblocks == nnodes: block p holds, for every rank r living on node p in rank order, the unit's
 * range of segment r barrier                    one unit, one block without elements
 *
 * A block may be empty (tiny units); its message is sent all the same, because it carries the op's hash and
 * the order.
 */
#ifndef HRD_PLAN_H
#define HRD_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/schedule.h"
#include "proto/types.h"

/*
 * What a plan depends on beside the signature. Equal on all nodes of a communicator: the roster and the
 * measurements come from the root, the configuration is the root's too. Arrays are borrowed.
 */
struct hrd_plan_env {
    uint32_t nnodes;
    uint32_t nranks;
    const uint32_t *node_of_rank;  /* [nranks], each below nnodes */
    const uint32_t *ranks_on_node; /* [nnodes], how many ranks live there, 1 or more each */
    uint8_t algo;                  /* enum hrd_algo: HRD_ALGO_AUTO, or the override */
    uint8_t reproducible;          /* 1: only algorithms whose order of summation is fixed (direct, gather) */
    uint8_t wire_f32;              /* 1: partials of f16 and bf16 that round travel as f32 */
    uint8_t eager_blocks;          /* 1: also blocks of direct may be eager */
    uint32_t eager_limit;          /* bytes: largest payload of an eager message; 0: no eager messages */
    uint64_t unit_bytes;           /* bytes: a unit is not larger (see hrd_plan_unit_max); 0 counts as 1 */
    uint64_t unit_min_bytes;       /* bytes: a unit is not smaller unless the op is */
    uint64_t latency_ns;           /* one way, small message */
    uint64_t bandwidth; /* bytes per second of one node in one direction; 0: unknown, 1e9 is assumed */
    uint64_t fold_rate; /* bytes per second one node folds; 0: unknown, 8e9 is assumed */
};

struct hrd_plan {
    uint8_t algo;       /* enum hrd_algo, never AUTO; LOCAL when there is one node */
    uint8_t eager;      /* 1: one unit whose messages all fit eager_limit and need no credit */
    uint8_t wire;       /* enum hrp_dtype of PARTIAL values; RESULT values have the op's dtype */
    uint8_t nvariants;  /* unit u runs schedule variant u % nvariants (2 for tree, else 1) */
    uint16_t nblocks;   /* blocks of a unit */
    uint32_t root_node; /* broadcast: the node the root rank lives on; otherwise 0 */
    uint64_t slice;    /* elements of each segment in a unit; the last unit may have fewer; 0 if count is 0 */
    uint64_t nunits;   /* 1 or more, also for count 0 and barrier */
    uint64_t model_ns; /* what the cost model expects, for the log and for comparison only */
};

/*
 * Chooses the plan of an op. `sig` must have passed hrp_sig_check. Returns 0 and says in `why` what was
 * chosen and why, or -EINVAL with the sentence to show (an override that cannot serve, an unusable env).
 * `why` may be NULL when whylen is 0 (the hot path: no text is made). Does not allocate or block; any thread.
 */
int hrd_plan_op(const struct hrd_plan_env *env, const struct hrp_sig *sig, struct hrd_plan *out, char *why,
                size_t whylen);

/*
 * Checks the env and the override alone, to be called once at communicator init: when this returns 0,
 * hrd_plan_op succeeds for every valid signature.
 */
int hrd_plan_check(const struct hrd_plan_env *env, char *why, size_t whylen);

/*
 * Bounds for sizing a reserve that lets one unit finish by itself, whatever the signature, in bytes and
 * without what alignment of slots adds: the sum of all blocks of a unit, of its send buffers, and of its
 * receive slots from all peers at one node. They hold for units that need credit; an eager message is bounded
 * by eager_limit.
 */
uint64_t hrd_plan_unit_max(const struct hrd_plan_env *env);
uint64_t hrd_plan_send_max(const struct hrd_plan_env *env);
uint64_t hrd_plan_recv_max(const struct hrd_plan_env *env);

/* The schedule that unit `unit` of this plan runs at node `me`. */
struct hrd_schedule_key hrd_plan_key(const struct hrd_plan_env *env, const struct hrp_sig *sig,
                                     const struct hrd_plan *plan, uint64_t unit, uint32_t me);

/* Elements off .. off+len-1 of one segment. */
struct hrd_piece {
    uint32_t segment; /* 0 for all_reduce and broadcast, otherwise the rank the segment belongs to */
    uint64_t off;
    uint64_t len;
};

/* Walks the pieces of one block in the order in which they lie in a message. Pieces are never empty. */
struct hrd_piece_iter {
    const struct hrd_plan_env *env;
    uint64_t off, len;
    uint32_t node; /* HRD_NONE: the single piece of segment 0 */
    uint32_t rank; /* the next one to look at */
};
void hrd_plan_pieces(const struct hrd_plan_env *env, const struct hrp_sig *sig, const struct hrd_plan *plan,
                     uint64_t unit, uint32_t block, struct hrd_piece_iter *it);
bool hrd_piece_next(struct hrd_piece_iter *it, struct hrd_piece *piece);

/* Elements of a block; times the size of the wire dtype (PARTIAL) or of the op's dtype (RESULT) its bytes. */
uint64_t hrd_plan_block_elems(const struct hrd_plan_env *env, const struct hrp_sig *sig,
                              const struct hrd_plan *plan, uint64_t unit, uint32_t block);

/* Bytes of one element of a value (enum hrd_value). */
size_t hrd_plan_value_size(const struct hrp_sig *sig, const struct hrd_plan *plan, unsigned value);

/* Of an eager op of direct, from one node to another: a partial and a result. The second answers the first that went the other
   way. */
#define HRD_EAGER_MESSAGES 2u
/* More nodes have no eager blocks: a communicator keeps a slot for each other node, and with room for two messages those of
   16 nodes would take 6 MiB of the arena. */
#define HRD_EAGER_BLOCK_NODES 8u

/* What a message of so many bytes takes of its sender's area at the receiver, and a value of a send buffer. */
static inline uint64_t hrd_plan_slot_bytes(uint64_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

#endif
