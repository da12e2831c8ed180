/* SPDX-License-Identifier: MIT */
/*
 * What a collective has to give, computed from the inputs' pattern in plain C, without a line of kernels/.
 *
 * Reductions are checked twice, at every element:
 *   the value   against the sum, product, minimum or maximum in double precision (integers: exact, modulo
 *               2^bits). |result - reference| may be at most a bound that follows from the number of
 *               roundings, see expect.c: exact for integers, min and max, otherwise
 *                   sum   (ranks + nodes) * u * (|x1| + |x2| + ...)     u: 2^-24 for f32, 2^-53 for f64;
 *                         f16 and bf16 add 2^-11 or 2^-8 of that for each rounding of a partial or the result
 *                   prod  the same relative to the product
 *   the bits    against the defined result (kernels/kernels.h): each node's partial is the left fold over its
 *               ranks in rank order, the total the left fold over the partials in node order. Only where the
 *               communicator is reproducible.
 */
#ifndef HPF_EXPECT_H
#define HPF_EXPECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/types.h"

/* Who lives where: node indices as the library reports them (hclient_comm_get_info). */
struct hpf_layout {
    unsigned nranks, nnodes;
    const unsigned *node_of_rank;
};

/* One collective on inputs of one seed. */
struct hpf_case {
    unsigned coll, dtype, redop, root; /* enum hrp_coll, hrp_dtype, hrp_redop */
    uint64_t count;                    /* as in the call */
    uint64_t seed;
    bool exact;    /* the communicator is reproducible: compare bits */
    bool wire_f32; /* partials of f16 and bf16 are not rounded */
};

/* Elements of a rank's send and receive buffer. */
uint64_t hpf_send_count(const struct hpf_case *c, unsigned nranks);
uint64_t hpf_recv_count(const struct hpf_case *c, unsigned nranks);
/* Where in the receive buffer an in-place call has its input (elements), or the receive buffer in the send
   buffer for reduce_scatter. */
uint64_t hpf_inplace_offset(const struct hpf_case *c, unsigned rank);

/* Fills elements first.. of rank's send buffer. */
void hpf_input(const struct hpf_case *c, unsigned rank, uint64_t first, size_t n, void *dst);

/*
 * Elements first .. first + n - 1 of rank's receive buffer against what they must be; got points to the first
 * of them and needs no alignment. Returns how many are wrong; *where (if not NULL) becomes the first wrong
 * index when there is one. Work: n times nranks.
 */
uint64_t hpf_check(const struct hpf_case *c, const struct hpf_layout *l, unsigned rank, uint64_t first,
                   size_t n, const void *got, uint64_t *where);

/*
 * Every rank of an all_reduce has the same result, so ranks that share memory can share the work: a slice of
 * the defined result goes into dst and its value is checked against the reference. Returns how many elements
 * of it fail that check, which is a defect of this program. For c->exact only.
 */
uint64_t hpf_expected(const struct hpf_case *c, const struct hpf_layout *l, unsigned rank, uint64_t first,
                      size_t n, void *dst);
/* Elements of which got and want differ in any bit. */
uint64_t hpf_compare(unsigned dtype, const void *got, const void *want, size_t n, uint64_t *where);

/* One element for a message; buf is returned. */
const char *hpf_value_text(unsigned dtype, const void *element, char *buf, size_t len);

#endif
