/* SPDX-License-Identifier: MIT */
/*
 * GPU buffers through the comm's window. The job's own stream copies its input there, chunk after chunk, and writes ready
 * behind each; waits for done, and copies the output back. The whole op is enqueued at once: as much of it as the window
 * holds goes in, then each piece that leaves makes room for one that comes. So no thread takes part, and the daemon needs
 * no GPU for it.
 */
#include <inttypes.h>
#include <stddef.h>

#include "client/futex.h"
#include "client/gpu.h"
#include "client/tape.h"

/* A copy costs some microseconds whatever its size; the daemon works on one piece while the next comes. */
#define PIECE_BYTES (UINT64_C(512) << 10)
/* Copies of less are slow when several processes share the GPU: they do not take a copy engine. */
#define SMALL_BYTES UINT64_C(4096)

/* ---- words --------------------------------------------------------------------------------------------------------- */

static hrg_ptr flag(const struct hcl_comm *comm, uint64_t number, size_t word)
{
    return comm->gpu->area + offsetof(struct hrp_comm_area, flags) +
           (number % HRP_OP_SLOTS) * sizeof(struct hrp_op_flags) + word;
}

static hrg_ptr passed_word(const struct hcl_comm *comm, uint64_t number)
{
    return comm->gpu->passed_dev + (number % HRP_OP_SLOTS) * sizeof(uint64_t);
}

hrg_result hcl_gpu_wait_passed(struct hcl_comm *comm, hrg_stream stream, uint64_t number)
{
    return comm->gpu->drv->StreamWaitValue64(stream, passed_word(comm, number), number, HRG_WAIT_GEQ);
}

hrg_result hcl_gpu_write_passed(struct hcl_comm *comm, hrg_stream stream, uint64_t number)
{
    return comm->gpu->drv->StreamWriteValue64(stream, passed_word(comm, number), number, HRG_WRITE_DEFAULT);
}

/* Words that come one behind the other in the stream are enqueued in one call. */
#define WORDS 4u

struct words {
    struct hcl_comm *comm;
    hrg_stream stream;
    uint64_t number; /* of the op */
    unsigned n;
    union hrg_memop op[WORDS];
};

static hrg_result flush(struct words *w)
{
    unsigned n = w->n;
    w->n = 0;
    return n > 0 ? w->comm->gpu->drv->StreamBatchMemOp(w->stream, n, w->op, 0) : HRG_SUCCESS;
}

static hrg_result add_word(struct words *w, int operation, hrg_ptr address, uint64_t value, unsigned flags)
{
    hrg_result r = w->n == WORDS ? flush(w) : HRG_SUCCESS;
    w->op[w->n++] = (union hrg_memop){
        .value = {.operation = operation, .address = address, .value = value, .flags = flags}};
    return r;
}

static hrg_result add_ready(struct words *w, uint64_t chunks)
{
    return add_word(w, HRG_MEMOP_WRITE_64, flag(w->comm, w->number, offsetof(struct hrp_op_flags, ready)),
                    hrp_flag(w->number, chunks), HRG_WRITE_DEFAULT);
}

static hrg_result add_wait_done(struct words *w, uint64_t chunks)
{
    return add_word(w, HRG_MEMOP_WAIT_64, flag(w->comm, w->number, offsetof(struct hrp_op_flags, done)),
                    hrp_flag(w->number, chunks), HRG_WAIT_GEQ);
}

/* Holds the stream for good when the op failed. */
static hrg_result add_wait_good(struct words *w)
{
    return add_word(w, HRG_MEMOP_WAIT_64, hcl_gpu_status_word(w->comm, w->number), 0, HRG_WAIT_EQ);
}

static hrg_result add_passed(struct words *w)
{
    return add_word(w, HRG_MEMOP_WRITE_64, passed_word(w->comm, w->number), w->number, HRG_WRITE_DEFAULT);
}

/* ---- copies -------------------------------------------------------------------------------------------------------- */

/* Bytes that may be read from p on, up to a small page, so that the copy takes a copy engine. */
static uint64_t padded(const struct hcl_comm *comm, const struct hcl_op *op, hrg_ptr p, uint64_t len)
{
    hrg_ptr base;
    size_t bytes;
    if (op->bytes >= SMALL_BYTES || len != op->bytes)
        return len; /* the stream of such an op has a page of the window for itself */
    if (comm->gpu->drv->MemGetAddressRange(&base, &bytes, p) != HRG_SUCCESS || p < base || bytes < p - base)
        return len;
    uint64_t have = bytes - (p - base);
    return have < len ? len : have < SMALL_BYTES ? have : SMALL_BYTES;
}

/* One run of the stream, which may cross the window's end. */
static hrg_result copy_in(struct hcl_comm *comm, const struct hcl_op *op, uint64_t pos, const char *src,
                          uint64_t len)
{
    const struct hrg_driver *drv = comm->gpu->drv;
    const struct hcl_stage *stage = &comm->stage;
    uint64_t at = (op->base + pos) % stage->bytes;
    uint64_t first = len < stage->bytes - at ? len : stage->bytes - at;
    hrg_ptr p = (hrg_ptr)(uintptr_t)src;
    hrg_result r = drv->MemcpyDtoHAsync(stage->window + at, p, padded(comm, op, p, first), op->stream);
    if (r == HRG_SUCCESS && first < len)
        r = drv->MemcpyDtoHAsync(stage->window, p + first, len - first, op->stream);
    return r;
}

static hrg_result copy_out(struct hcl_comm *comm, const struct hcl_op *op, uint64_t pos, char *dst,
                           uint64_t len)
{
    const struct hrg_driver *drv = comm->gpu->drv;
    const struct hcl_stage *stage = &comm->stage;
    uint64_t at = (op->base + pos) % stage->bytes;
    uint64_t first = len < stage->bytes - at ? len : stage->bytes - at;
    hrg_ptr p = (hrg_ptr)(uintptr_t)dst;
    hrg_result r = drv->MemcpyHtoDAsync(p, stage->window + at, first, op->stream);
    if (r == HRG_SUCCESS && first < len)
        r = drv->MemcpyHtoDAsync(p + first, stage->window, len - first, op->stream);
    return r;
}

static hrg_result piece_in(struct hcl_comm *comm, const struct hcl_op *op, uint64_t from, uint64_t upto)
{
    uint64_t end = hcl_chunk_end(op, upto - 1);
    hrg_result r = HRG_SUCCESS;
    for (uint64_t pos = from * HRP_STAGE_CHUNK; pos < end && r == HRG_SUCCESS;) {
        struct hcl_run run = hcl_run_at(&op->sig, comm->nranks, pos, end);
        const char *src = hcl_run_input(comm, op, &run);
        if (src != NULL)
            r = copy_in(comm, op, pos, src, run.len);
        pos += run.len;
    }
    return r;
}

static hrg_result piece_out(struct hcl_comm *comm, const struct hcl_op *op, uint64_t from, uint64_t upto)
{
    uint64_t end = hcl_chunk_end(op, upto - 1);
    hrg_result r = HRG_SUCCESS;
    for (uint64_t pos = from * HRP_STAGE_CHUNK; pos < end && r == HRG_SUCCESS;) {
        struct hcl_run run = hcl_run_at(&op->sig, comm->nranks, pos, end);
        char *dst = hcl_run_output(comm, op, &run);
        bool moves = op->sig.coll == HRP_BROADCAST || op->sig.coll == HRP_ALL_GATHER;
        if (dst != NULL && !(moves && hcl_run_input(comm, op, &run) == dst))
            r = copy_out(comm, op, pos, dst, run.len);
        pos += run.len;
    }
    return r;
}

static uint64_t piece_end(const struct hcl_comm *comm, const struct hcl_op *op, uint64_t from)
{
    /* Large ops in larger pieces: a quarter of the window still lets copies and the daemon's work overlap. */
    uint64_t bytes = op->bytes / 32 > PIECE_BYTES ? op->bytes / 32 : PIECE_BYTES;
    if (bytes > comm->stage.bytes / 4)
        bytes = comm->stage.bytes / 4;
    uint64_t chunks = bytes / HRP_STAGE_CHUNK > 0 ? bytes / HRP_STAGE_CHUNK : 1;
    return from + chunks < op->nchunks ? from + chunks : op->nchunks;
}

/* Enqueues what the window has room for. in and out count chunks that were enqueued. */
static hrg_result feed(struct hcl_comm *comm, struct hcl_op *op, struct words *w)
{
    uint64_t in = atomic_load_explicit(&op->in, memory_order_relaxed);
    hrg_result r = HRG_SUCCESS;
    while (r == HRG_SUCCESS && in < op->nchunks) {
        uint64_t upto = piece_end(comm, op, in);
        uint64_t freed = op->out > 0 ? hcl_chunk_end(op, op->out - 1) : 0;
        if (hcl_chunk_end(op, upto - 1) > freed + comm->stage.bytes)
            break;
        r = flush(w);
        if (r == HRG_SUCCESS)
            r = piece_in(comm, op, in, upto);
        in = upto;
        if (r == HRG_SUCCESS)
            r = add_ready(w, in == op->nchunks ? HRP_CHUNK_ALL : in);
    }
    atomic_store_explicit(&op->in, in, memory_order_relaxed);
    return r;
}

static hrg_result drain(struct hcl_comm *comm, struct hcl_op *op, struct words *w)
{
    hrg_result r = op->nchunks == 0 ? add_wait_done(w, HRP_CHUNK_ALL) : HRG_SUCCESS;
    while (r == HRG_SUCCESS && op->out < op->nchunks) {
        uint64_t upto = piece_end(comm, op, op->out);
        r = add_wait_done(w, upto == op->nchunks ? HRP_CHUNK_ALL : upto);
        if (r == HRG_SUCCESS)
            r = flush(w);
        if (r == HRG_SUCCESS)
            r = piece_out(comm, op, op->out, upto);
        op->out = upto;
        if (r == HRG_SUCCESS)
            r = feed(comm, op, w);
    }
    if (r == HRG_SUCCESS && comm->trap)
        r = add_wait_good(w);
    if (r == HRG_SUCCESS)
        r = add_passed(w);
    return r == HRG_SUCCESS ? flush(w) : r;
}

hrg_result hcl_gpu_enqueue(struct hcl_comm *comm, struct hcl_op *op)
{
    struct words w = {.comm = comm, .stream = op->stream, .number = op->number};
    hrg_result r = op->nchunks > 0 ? feed(comm, op, &w) : add_ready(&w, HRP_CHUNK_ALL);
    if (r != HRG_SUCCESS)
        return r;
    if (op->deferred)
        return flush(&w);
    hcl_gpu_warn_waits();
    return drain(comm, op, &w);
}

hrg_result hcl_gpu_finish(struct hcl_comm *comm, struct hcl_op *op)
{
    struct words w = {.comm = comm, .stream = op->stream, .number = op->number};
    return drain(comm, op, &w);
}

/* ---- the way ------------------------------------------------------------------------------------------------------- */

bool hcl_gpu_prepare(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_gpu_scope *scope,
                     hclient_result_t *result)
{
    const struct hrg_driver *drv = hrg_driver_if_present();
    *result = HCLIENT_OK;
    if (drv == NULL && c->stream != NULL) {
        *result = hcl_fail(
            HCLIENT_INVALID_ARGUMENT,
            "%s: stream is %p, but this process has not loaded CUDA; it must be NULL for host buffers",
            c->name, c->stream);
        return true;
    }
    if (drv == NULL || !hcl_gpu_wants(drv, c, result))
        return false;
    hrg_ptr near = (hrg_ptr)(uintptr_t)(c->send_bytes > 0 ? c->send : c->recv_bytes > 0 ? c->recv : NULL);
    if (*result == HCLIENT_OK)
        *result = hcl_gpu_enter(drv, c->name, c->stream, near, scope);
    if (*result != HCLIENT_OK)
        return true;
    *result = hcl_gpu_need(comm, drv, c->name);
    if (*result != HCLIENT_OK)
        hcl_gpu_leave(scope);
    return true;
}

static bool takes(struct hcl_comm *comm, const struct hcl_call *c, struct hrp_desc *desc,
                  hclient_result_t *result)
{
    struct hcl_gpu_scope scope;
    if (!hcl_gpu_prepare(comm, c, &scope, result))
        return false;
    if (*result != HCLIENT_OK)
        return true;
    uint64_t bytes = hrp_sig_bytes(&c->sig, comm->nranks);
    if (bytes / HRP_STAGE_CHUNK >= HRP_CHUNK_ALL - 1)
        *result =
            hcl_fail(HCLIENT_UNSUPPORTED,
                     "%s: %" PRIu64
                     " bytes are too many for copies through the staging window (less than %" PRIu64 ")",
                     c->name, bytes, HRP_STAGE_CHUNK * (HRP_CHUNK_ALL - 1));
    if (*result == HCLIENT_OK && bytes > 0)
        *result = hcl_stage_window(comm);
    bool unpinned = *result == HCLIENT_OK && bytes > 0 && !hcl_gpu_pin_window(comm, c->name);
    hcl_gpu_leave(&scope);
    if (unpinned)
        return false; /* the next way takes it, or refuses it */
    if (*result == HCLIENT_OK && bytes > 0)
        *result = hcl_stage_make_room(comm, c, bytes, true);
    desc->flags |= HRP_DESC_STREAM | c->hint;
    comm->gpu->staged_ops += *result == HCLIENT_OK;
    return true;
}

static void describe(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_op *op,
                     struct hrp_desc *desc)
{
    op->stream = c->stream;
    if (hrp_sig_bytes(&c->sig, comm->nranks) > 0) {
        hcl_stage_place(comm, c, op, desc);
        return;
    }
    desc->in = desc->out = (struct hrp_bufref){.kind = HRP_BUF_NONE};
    op->bytes = op->nchunks = op->out = 0;
    atomic_store_explicit(&op->in, 0, memory_order_relaxed);
}

/* The window's bytes of older ops, of whatever streams, are theirs until those have passed. A small op's copy may write all of
   its page, so what counts is where the next op begins. */
static hrg_result wait_for_room(struct hcl_comm *comm, const struct hcl_op *op)
{
    hrg_result r = HRG_SUCCESS;
    for (uint64_t k = op->number > HRP_OP_SLOTS ? op->number - HRP_OP_SLOTS + 1 : 1; k < op->number; k++) {
        const struct hcl_op *older = &comm->ops[k % HRP_OP_SLOTS];
        if (older->number == k && older->gpu && older->bytes > 0 && op->bytes > 0 &&
            comm->stage.next > older->base + comm->stage.bytes && !hcl_gpu_passed(comm, k) &&
            r == HRG_SUCCESS)
            r = hcl_gpu_wait_passed(comm, op->stream, k);
    }
    return r;
}

static hclient_result_t start(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_op *op, bool *rings)
{
    struct hcl_gpu_scope scope;
    const struct hrg_driver *drv = comm->gpu->drv;
    /* Now: while this enqueues, the daemon takes the descriptor and begins to look at the ready word. */
    hcl_doorbell(comm->ctx);
    *rings = true;
    hrg_ptr near = (hrg_ptr)(uintptr_t)(c->send_bytes > 0 ? c->send : c->recv_bytes > 0 ? c->recv : NULL);
    hclient_result_t result = hcl_gpu_enter(drv, c->name, c->stream, near, &scope);
    if (result != HCLIENT_OK)
        return result;
    hrg_result r = wait_for_room(comm, op);
    if (r == HRG_SUCCESS)
        r = hcl_gpu_enqueue(comm, op);
    hcl_gpu_leave(&scope);
    return r == HRG_SUCCESS ? HCLIENT_OK
                            : hcl_gpu_fail(drv, c->name, "enqueuing the op's copies and waits", r);
}

const struct hcl_way hcl_way_gpu_staged = {
    .takes = takes, .describe = describe, .start = start, .in_stream = true, .defers = true};
