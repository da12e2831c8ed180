/* SPDX-License-Identifier: MIT */
#include "client/tape.h"

struct hcl_run hcl_run_at(const struct hrp_sig *sig, uint32_t nranks, uint64_t pos, uint64_t end)
{
    uint32_t nseg = hrp_sig_segments(sig, nranks);
    if (nseg <= 1)
        return (struct hcl_run){.seg = 0, .off = pos, .len = end - pos};
    uint64_t esize = hrp_dtype_size(sig->dtype);
    uint64_t slice = hrp_stage_slice(sig, nranks);
    uint64_t row = pos / (slice * nseg * esize);
    uint64_t elems = sig->count - row * slice < slice ? sig->count - row * slice : slice;
    uint64_t in_row = pos - row * slice * nseg * esize;
    uint64_t in_seg = in_row % (elems * esize);
    uint64_t len = elems * esize - in_seg;
    return (struct hcl_run){.seg = (uint32_t)(in_row / (elems * esize)),
                            .off = row * slice * esize + in_seg,
                            .len = len < end - pos ? len : end - pos};
}

const char *hcl_run_input(const struct hcl_comm *comm, const struct hcl_op *op, const struct hcl_run *run)
{
    uint64_t seg_bytes = op->sig.count * hrp_dtype_size(op->sig.dtype);
    switch (op->sig.coll) {
    case HRP_REDUCE_SCATTER:
        return op->send + run->seg * seg_bytes + run->off;
    case HRP_ALL_GATHER:
        return run->seg == comm->rank ? op->send + run->off : NULL;
    default:
        return op->sends ? op->send + run->off : NULL;
    }
}

char *hcl_run_output(const struct hcl_comm *comm, const struct hcl_op *op, const struct hcl_run *run)
{
    uint64_t seg_bytes = op->sig.count * hrp_dtype_size(op->sig.dtype);
    switch (op->sig.coll) {
    case HRP_REDUCE_SCATTER:
        return run->seg == comm->rank ? op->recv + run->off : NULL;
    case HRP_ALL_GATHER:
        return op->recv + run->seg * seg_bytes + run->off;
    default:
        return op->recv + run->off;
    }
}

uint64_t hcl_chunk_end(const struct hcl_op *op, uint64_t chunk)
{
    uint64_t end = (chunk + 1) * HRP_STAGE_CHUNK;
    return end < op->bytes ? end : op->bytes;
}
