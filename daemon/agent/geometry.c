/* SPDX-License-Identifier: MIT */
/*
 * Where an op's elements lie in a rank's buffers. The data space is segments of `count` elements (proto/types.h); shared
 * buffers hold them as the collective defines, staging windows as the stream of proto/shm.h.
 */
#include "daemon/agent/types.h"

static uint64_t esize(const struct aop *op)
{
    return hrp_dtype_size(op->sig.dtype);
}

static struct hrd_span staged(const struct aop *op, const struct hrd_span *s, uint32_t segment, uint64_t off)
{
    struct hrd_span at = *s;
    at.off += hrp_stage_pos(&op->sig, op->c->nranks, segment, off);
    return at;
}

struct hrd_span hrd_geometry_in(const struct aop *op, const struct arank *r, uint32_t segment, uint64_t off)
{
    const struct apost *p = &op->post[r->index];
    if (p->staged)
        return staged(op, &p->in, segment, off);
    struct hrd_span at = p->in;
    uint64_t first = op->sig.coll == HRP_REDUCE_SCATTER ? segment * op->sig.count : 0;
    at.off += (first + off) * esize(op);
    return at;
}

struct hrd_span hrd_geometry_out(const struct aop *op, const struct arank *r, uint32_t segment, uint64_t off)
{
    const struct apost *p = &op->post[r->index];
    if (p->staged)
        return staged(op, &p->out, segment, off);
    struct hrd_span at = p->out;
    uint64_t first = op->sig.coll == HRP_ALL_GATHER ? segment * op->sig.count : 0;
    at.off += (first + off) * esize(op);
    return at;
}

static uint64_t stage_slice(const struct aop *op)
{
    return hrp_stage_slice(&op->sig, op->c->nranks);
}

uint64_t hrd_geometry_run(const struct aop *op, uint64_t off, uint64_t len)
{
    if (hrp_sig_segments(&op->sig, op->c->nranks) <= 1)
        return len;
    for (uint32_t i = 0; i < op->c->nlocal; i++)
        if (op->post[i].staged) {
            uint64_t slice = stage_slice(op), run = slice - off % slice;
            return run < len ? run : len;
        }
    return len;
}

/* Bytes of the stream in front of the first row that holds an element >= off (up: behind the last row with one < off). */
static uint64_t rows(const struct aop *op, uint64_t off, bool up)
{
    uint32_t nseg = hrp_sig_segments(&op->sig, op->c->nranks);
    if (nseg > 1 && off < op->sig.count) {
        uint64_t slice = stage_slice(op);
        off = (off + (up ? slice - 1 : 0)) / slice * slice;
    }
    if (off > op->sig.count)
        off = op->sig.count;
    return off * nseg * esize(op);
}

uint64_t hrd_geometry_need(const struct aop *op, uint64_t unit)
{
    uint64_t end =
        op->sig.count - unit * op->plan.slice < op->plan.slice ? op->sig.count : (unit + 1) * op->plan.slice;
    return rows(op, end, true);
}

uint64_t hrd_geometry_prefix(const struct aop *op, uint64_t unit)
{
    return unit >= op->plan.nunits ? rows(op, op->sig.count, false) : rows(op, unit * op->plan.slice, false);
}
