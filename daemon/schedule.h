/* SPDX-License-Identifier: MIT */
/*
 * Exchange schedules as data: for one unit of an op at one node, the list of steps that carries it between
 * the nodes. A schedule knows blocks, peers and order, but neither sizes nor addresses, so that it is built
 * once a communicator and used for every unit of every op of its key. Whoever executes it knows no algorithm.
 *
 * A step starts when its inputs (src, or in[]) and its dependencies (dep[]) are finished. Steps are sorted:
 * inputs and dependencies come before the step that names them. Each step concerns one block.
 */
#ifndef HRD_SCHEDULE_H
#define HRD_SCHEDULE_H

#include <stdint.h>

#include "proto/types.h"

enum hrd_algo {
    HRD_ALGO_AUTO = 0, /* a wish, not an algorithm: hrd_plan_op chooses */
    HRD_ALGO_DIRECT = 1,
    HRD_ALGO_GATHER = 2,
    HRD_ALGO_PAIRWISE = 3,
    HRD_ALGO_RING = 4,
    HRD_ALGO_TREE = 5,
    HRD_ALGO_LOCAL = 6, /* one node, nothing to exchange */
    HRD_NALGOS = 7,
};

/* "auto", "direct", ... */
const char *hrd_algo_name(unsigned algo);
/* The inverse for what a configuration may name ("auto" to "tree"); -1 for anything else. */
int hrd_algo_parse(const char *name);

enum hrd_step_kind {
    /*
     * Engine: make this node's value of the block in buffer `buf`. all_reduce, reduce_scatter, barrier: fold
     * the local ranks' inputs (PARTIAL). broadcast, all_gather: copy the input of the rank that has it
     * (RESULT).
     */
    HRD_STEP_LOCAL = 0,
    /* Send the output of step src (LOCAL, FOLD or RECV) to peer; finished when src's memory is no longer
       read. */
    HRD_STEP_SEND = 1,
    /* A message of peer arrives in slot `tag` of that peer's receive area. Never has inputs or dependencies.
     */
    HRD_STEP_RECV = 2,
    /*
     * Engine: left fold of in[] in the listed order. Not final: PARTIAL into `buf`. Final: the op's RESULT,
     * delivered to the local ranks' outputs and, when buf is not HRD_NONE, also into `buf` for sending.
     */
    HRD_STEP_FOLD = 3,
    /* Engine: deliver the RESULT of step src (RECV or LOCAL) to the local ranks' outputs. */
    HRD_STEP_STORE = 4,
    /* One node: local ranks' inputs -> local ranks' outputs. The only step of its schedule. */
    HRD_STEP_FUSED = 5,
};

/* What the output of a step, or a message, holds. */
enum hrd_value {
    HRD_VALUE_PARTIAL = 0, /* in the plan's wire dtype, of the nodes cover_first, ... */
    HRD_VALUE_RESULT = 1,  /* in the op's dtype */
};

#define HRD_NONE UINT32_MAX

struct hrd_step {
    uint8_t kind;  /* enum hrd_step_kind */
    uint8_t final; /* FOLD: 1 when its value is the op's result */
    uint8_t value; /* enum hrd_value */
    uint16_t block;
    uint16_t peer; /* SEND, RECV: node index; otherwise 0 */
    uint16_t
        tag; /* SEND, RECV: number of this message among those of its sender to its receiver in this unit */
    uint16_t round; /* when it happens if all nodes go in step; for counting and traces, not for ordering */
    /*
     * The output covers the inputs of nodes cover_first, +1, ... (cover_count of them, modulo nnodes). FOLD
     * of avg needs it: the weight of an input is the number of ranks on the nodes it covers.
     */
    uint16_t cover_first, cover_count;
    uint32_t src;                    /* SEND, STORE: step whose output is read; otherwise HRD_NONE */
    uint32_t in_first, in_count;     /* FOLD: steps in list[], in fold order (LOCAL, RECV or FOLD) */
    uint32_t dep_first, dep_count;   /* further steps in list[] to be finished first (SEND: transmitted) */
    uint32_t succ_first, succ_count; /* steps in list[] that wait for this one, each once */
    uint32_t nwait;                  /* how many distinct steps this one waits for */
    /*
     * LOCAL, FOLD: send buffer of the output, or HRD_NONE (a final FOLD that nobody sends). A non-final FOLD
     * may have the buffer of one of its inputs, never of an input that a SEND reads; both are PARTIAL of one
     * block, so that it is computed in place. RECV: HRD_NONE, its memory is the slot, which a SEND may read
     * too.
     */
    uint32_t buf;
};

struct hrd_schedule_key {
    uint8_t algo; /* enum hrd_algo, not AUTO */
    uint8_t coll; /* enum hrp_coll */
    uint8_t variant;
    uint8_t reserved;
    uint16_t nnodes, me;
    uint16_t root_node; /* broadcast, otherwise 0 */
};

/* One message list: steps list[first .. first+count-1], in the order of their tags 0, 1, ... */
struct hrd_messages {
    uint32_t first, count;
};

struct hrd_schedule {
    struct hrd_schedule_key key;
    uint16_t nblocks;
    uint16_t nrounds;
    uint32_t nsteps;
    struct hrd_step *steps;
    uint32_t nlist;
    uint32_t *list; /* step indices; what first/count pairs point into */
    uint32_t nbufs;
    uint16_t *buf_block;        /* [nbufs] the block it holds */
    uint8_t *buf_value;         /* [nbufs] enum hrd_value of what it holds */
    struct hrd_messages *recvs; /* [nnodes] RECV steps by peer: count is the slots its receive area needs */
    struct hrd_messages *sends; /* [nnodes] SEND steps by peer: the sender's view of its slots over there */
};

#define HRD_MAX_NODES 1024

/*
 * Builds the schedule of one unit. Returns 0 and a schedule in *out that the caller frees, -EINVAL for a key
 * that no plan has (pairwise without a power of two, tree with fewer than 4 nodes, an index out of range), or
 * -ENOMEM. Pure: no state, any thread.
 */
int hrd_schedule_build(const struct hrd_schedule_key *key, struct hrd_schedule **out);
void hrd_schedule_free(struct hrd_schedule *s);

/* Blocks of a unit for this algorithm and collective. */
uint16_t hrd_schedule_nblocks(unsigned algo, unsigned coll, uint32_t nnodes);
/* Whether the algorithm has a form of its own for this collective (hrd_plan_op takes direct or gather if
 * not). */
int hrd_schedule_serves(unsigned algo, unsigned coll);

#endif
