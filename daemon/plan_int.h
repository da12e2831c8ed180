/* SPDX-License-Identifier: MIT */
/* Between plan.c (the choice), plan_cut.c (units and blocks) and plan_model.c (the cost). */
#ifndef HRD_PLAN_INT_H
#define HRD_PLAN_INT_H

#include "daemon/plan.h"

/* A plan under consideration for one op. */
struct plan_op {
    const struct hrd_plan_env *env;
    const struct hrp_sig *sig;
    uint32_t max_ranks; /* of any node */
    uint8_t wire;
};

/* Bytes of one element as a partial and as a result. */
uint64_t plan_wire_size(const struct plan_op *op);
uint64_t plan_elem_size(const struct plan_op *op);
/* Sets slice, nunits and eager for the algorithm already in `plan`. */
void plan_cut(const struct plan_op *op, struct hrd_plan *plan);
/* Nanoseconds the exchange of the whole op takes at the busiest node. Integer arithmetic: equal everywhere.
 */
uint64_t plan_model(const struct plan_op *op, const struct hrd_plan *plan);
uint32_t plan_log2_up(uint32_t n);

#endif
