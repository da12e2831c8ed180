/* SPDX-License-Identifier: MIT */
/*
 * GPU buffers of a communicator with one rank: its result is its input, so the stream copies it, or in place does nothing at
 * all. The daemon numbers the op like any other but sees no buffer of it: to it this is a barrier that nobody else is at.
 */
#include "client/gpu.h"

static bool takes(struct hcl_comm *comm, const struct hcl_call *c, struct hrp_desc *desc,
                  hclient_result_t *result)
{
    struct hcl_gpu_scope scope;
    if (comm->nranks != 1 || !hcl_gpu_prepare(comm, c, &scope, result))
        return false;
    if (*result != HCLIENT_OK)
        return true;
    hcl_gpu_leave(&scope);
    desc->sig = (struct hrp_sig){.coll = HRP_BARRIER, .dtype = HRP_F32, .redop = HRP_SUM};
    desc->in = desc->out = (struct hrp_bufref){.kind = HRP_BUF_NONE};
    comm->gpu->alone_ops++;
    return true;
}

static void describe(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_op *op,
                     struct hrp_desc *desc)
{
    (void)comm, (void)desc;
    op->stream = c->stream;
    op->bytes = op->nchunks = op->out = 0;
    atomic_store_explicit(&op->in, 0, memory_order_relaxed);
}

static hclient_result_t start(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_op *op, bool *rings)
{
    struct hcl_gpu_scope scope;
    const struct hrg_driver *drv = comm->gpu->drv;
    (void)rings;
    hrg_ptr send = (hrg_ptr)(uintptr_t)c->send, recv = (hrg_ptr)(uintptr_t)c->recv;
    hclient_result_t result = hcl_gpu_enter(drv, c->name, c->stream, c->recv_bytes > 0 ? recv : 0, &scope);
    if (result != HCLIENT_OK)
        return result;
    hrg_result r = HRG_SUCCESS;
    if (c->recv_bytes > 0 && send != recv)
        r = drv->MemcpyDtoDAsync(recv, send, c->recv_bytes, op->stream);
    if (r == HRG_SUCCESS)
        r = hcl_gpu_write_passed(comm, op->stream, op->number);
    hcl_gpu_leave(&scope);
    return r == HRG_SUCCESS ? HCLIENT_OK : hcl_gpu_fail(drv, c->name, "enqueuing the op's copy", r);
}

const struct hcl_way hcl_way_gpu_alone = {
    .takes = takes, .describe = describe, .start = start, .ready = HRP_CHUNK_ALL, .in_stream = true};
