/* SPDX-License-Identifier: MIT */
#include "proto/shm.h"

#include <errno.h>

/* Several slices of all segments fit a window of a few MiB, and a slice stays long enough to copy fast. */
#define STAGE_ROUND (UINT64_C(1) << 20)
#define SLICE_ELEMS_MIN 64u

void hrp_seg_init(struct hrp_seg_header *seg, uint32_t ncomms)
{
    seg->magic = HRP_SEG_MAGIC;
    seg->size = hrp_seg_size(ncomms);
    seg->ncomms = ncomms;
    seg->comm_offset = HRP_PAGE;
    seg->comm_stride = (uint32_t)HRP_COMM_STRIDE;
    seg->op_slots = HRP_OP_SLOTS;
    atomic_store_explicit(&seg->abi, HRP_ABI, memory_order_release);
}

int hrp_seg_check(const struct hrp_seg_header *seg, size_t size)
{
    if (size < HRP_PAGE || seg->magic != HRP_SEG_MAGIC)
        return -EPROTO;
    uint32_t abi = atomic_load_explicit(&seg->abi, memory_order_acquire);
    if (abi >> 16 != HRP_ABI_MAJOR)
        return -EPROTONOSUPPORT;
    if (seg->op_slots != HRP_OP_SLOTS || seg->comm_offset != HRP_PAGE || seg->comm_stride != HRP_COMM_STRIDE)
        return -EPROTO;
    if (seg->size != size || seg->ncomms == 0 || seg->ncomms > (size - HRP_PAGE) / HRP_COMM_STRIDE)
        return -EPROTO;
    return 0;
}

uint64_t hrp_stage_slice(const struct hrp_sig *sig, uint32_t nranks)
{
    uint32_t nseg = hrp_sig_segments(sig, nranks);
    if (nseg <= 1)
        return sig->count;
    uint64_t elems = STAGE_ROUND / nseg / hrp_dtype_size(sig->dtype) / SLICE_ELEMS_MIN * SLICE_ELEMS_MIN;
    return elems > SLICE_ELEMS_MIN ? elems : SLICE_ELEMS_MIN;
}

uint64_t hrp_stage_pos(const struct hrp_sig *sig, uint32_t nranks, uint32_t seg, uint64_t off)
{
    uint64_t esize = hrp_dtype_size(sig->dtype);
    uint32_t nseg = hrp_sig_segments(sig, nranks);
    if (nseg <= 1)
        return off * esize;
    uint64_t slice = hrp_stage_slice(sig, nranks);
    uint64_t u = off / slice;
    uint64_t len = sig->count - u * slice < slice ? sig->count - u * slice : slice; /* of this row's slices */
    return (u * slice * nseg + seg * len + (off - u * slice)) * esize;
}
