/* SPDX-License-Identifier: MIT */
/*
 * The vocabulary that every layer shares: element types, reductions, collectives and the signature of an
 * operation. The numbers are part of the client and peer protocols; they are never reused.
 */
#ifndef HRP_TYPES_H
#define HRP_TYPES_H

#include <stddef.h>
#include <stdint.h>

enum hrp_dtype {
    HRP_F32 = 0,
    HRP_F64 = 1,
    HRP_F16 = 2,
    HRP_BF16 = 3,
    HRP_I8 = 4,
    HRP_U8 = 5,
    HRP_I32 = 6,
    HRP_U32 = 7,
    HRP_I64 = 8,
    HRP_U64 = 9,
    HRP_NDTYPES = 10,
};

enum hrp_redop {
    HRP_SUM = 0,
    HRP_PROD = 1,
    HRP_MIN = 2,
    HRP_MAX = 3,
    HRP_AVG = 4,
    HRP_NREDOPS = 5,
};

enum hrp_coll {
    HRP_ALL_REDUCE = 0,
    HRP_BROADCAST = 1,
    HRP_REDUCE_SCATTER = 2,
    HRP_ALL_GATHER = 3,
    HRP_BARRIER = 4,
    HRP_NCOLLS = 5,
};

/*
 * What all ranks of a communicator must agree on for op k.
 * count: elements. all_reduce and broadcast: of the buffer; reduce_scatter: of one rank's output;
 * all_gather: of one rank's input; barrier: 0.
 * redop: HRP_SUM where the collective does not reduce. root: rank, broadcast only, otherwise 0.
 */
struct hrp_sig {
    uint64_t count;
    uint32_t root;
    uint8_t coll;
    uint8_t dtype;
    uint8_t redop;
    uint8_t reserved;
};
_Static_assert(sizeof(struct hrp_sig) == 16, "hrp_sig is on the wire");

/* Bytes of one element; 0 for an unknown type. */
size_t hrp_dtype_size(unsigned dtype);
/* Names as nccl-tests print them ("float", "bfloat16", ...) are the benchmark's; these are "f32", "bf16", ...
 */
const char *hrp_dtype_name(unsigned dtype);
const char *hrp_redop_name(unsigned redop);
const char *hrp_coll_name(unsigned coll);
/* 0, or -EINVAL when a field is out of its range, or when count times the element size times nranks overflows
 * 2^62. */
int hrp_sig_check(const struct hrp_sig *sig, uint32_t nranks);
/* "all_reduce of 4096 x f32, sum" into buf; returns buf. */
const char *hrp_sig_text(const struct hrp_sig *sig, char *buf, size_t len);

/*
 * The data space of an op is nseg segments of count elements: 1 for all_reduce and broadcast, nranks for
 * reduce_scatter and all_gather, 0 elements for barrier. Bytes of the whole space:
 */
uint32_t hrp_sig_segments(const struct hrp_sig *sig, uint32_t nranks);
uint64_t hrp_sig_bytes(const struct hrp_sig *sig, uint32_t nranks);

#endif
