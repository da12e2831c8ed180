/* SPDX-License-Identifier: MIT */
/* The collectives: check, number, describe, push, ring. */
#include <inttypes.h>
#include <string.h>

#include "client/comm.h"
#include "client/futex.h"
#include "proto/ring.h"
#include "proto/status.h"

#define BYTES_MAX (UINT64_C(1) << 62)
#define RING_NS (10 * HCL_SEC)

/* One call, as the caller made it. */
struct call {
    const char *name;
    struct hrp_sig sig;
    const char *send;
    char *recv;
    bool sends;          /* this rank's send is looked at */
    uint64_t send_count; /* elements of the buffers on this rank, filled in by check_sizes() */
    uint64_t recv_count;
    uint64_t send_bytes;
    uint64_t recv_bytes;
    const void *in_place; /* the one send that recv allows to share its memory */
};

/* ----------------------------------------------------------------------------------------------- checks */

static hclient_result_t check_kinds(const struct hcl_comm *comm, const struct call *c, int dtype, int redop,
                                    int root, const void *stream)
{
    if (stream != NULL)
        return hcl_fail(HCLIENT_UNSUPPORTED,
                        "%s: stream is %p, it must be NULL: GPU buffers and streams are not built yet",
                        c->name, stream);
    if (dtype < 0 || dtype >= HRP_NDTYPES)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: dtype %d is unknown; use HCLIENT_FLOAT32, ...",
                        c->name, dtype);
    if (redop < 0 || redop >= HRP_NREDOPS)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: reduction %d is unknown; use HCLIENT_SUM, ...",
                        c->name, redop);
    if (root < 0 || (uint32_t)root >= comm->nranks)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: root %d is not among the ranks 0 to %u", c->name, root,
                        comm->nranks - 1);
    return HCLIENT_OK;
}

static hclient_result_t check_sizes(const struct hcl_comm *comm, struct call *c)
{
    if (hrp_sig_check(&c->sig, comm->nranks) != 0)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                        "%s: %" PRIu64
                        " elements of %s%s are more than 2^62 bytes in all; is the count right?",
                        c->name, c->sig.count, hrp_dtype_name(c->sig.dtype),
                        hrp_sig_segments(&c->sig, comm->nranks) > 1 ? " on every rank" : "");
    uint64_t esize = hrp_dtype_size(c->sig.dtype), one = c->sig.count * esize;
    uint64_t all = hrp_sig_bytes(&c->sig, comm->nranks);
    c->send_bytes = !c->sends ? 0 : c->sig.coll == HRP_REDUCE_SCATTER ? all : one;
    c->recv_bytes = c->sig.coll == HRP_ALL_GATHER ? all : one;
    return HCLIENT_OK;
}

static hclient_result_t check_buffer(const struct call *c, const char *what, const char *p, uint64_t bytes)
{
    if (bytes == 0)
        return HCLIENT_OK;
    if (p == NULL)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: %s is NULL but count is %" PRIu64, c->name, what,
                        c->sig.count);
    if ((uintptr_t)p > UINTPTR_MAX - bytes)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                        "%s: %s %p and %" PRIu64 " bytes reach over the end of the address space", c->name,
                        what, (const void *)p, bytes);
    return HCLIENT_OK;
}

static hclient_result_t check_overlap(const struct hcl_comm *comm, struct call *c)
{
    uint64_t own = comm->rank * c->sig.count * hrp_dtype_size(c->sig.dtype);
    c->in_place = c->recv;
    if (c->sig.coll == HRP_REDUCE_SCATTER)
        c->in_place = c->recv - own;
    if (c->sig.coll == HRP_ALL_GATHER)
        c->in_place = c->recv + own;
    if (c->send_bytes == 0 || c->recv_bytes == 0 || c->send == c->in_place)
        return HCLIENT_OK;
    if ((uintptr_t)c->send >= (uintptr_t)c->recv + c->recv_bytes ||
        (uintptr_t)c->recv >= (uintptr_t)c->send + c->send_bytes)
        return HCLIENT_OK;
    return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                    "%s: send (%p, %" PRIu64 " bytes) and recv (%p, %" PRIu64
                    " bytes) overlap; they may be apart, or in place with send at %p",
                    c->name, (const void *)c->send, c->send_bytes, (void *)c->recv, c->recv_bytes,
                    c->in_place);
}

static hclient_result_t check_memory(const struct call *c, const char *what, const char *p, uint64_t bytes)
{
    if (bytes == 0 || !hcl_is_cuda_pointer(p))
        return HCLIENT_OK;
    return hcl_fail(HCLIENT_UNSUPPORTED,
                    "%s: %s %p is GPU memory; GPU buffers are not built yet, copy to host memory", c->name,
                    what, (const void *)p);
}

static hclient_result_t check(const struct hcl_comm *comm, struct call *c)
{
    hclient_result_t r = check_sizes(comm, c);
    if (r == HCLIENT_OK)
        r = check_buffer(c, "send", c->send, c->send_bytes);
    if (r == HCLIENT_OK)
        r = check_buffer(c, "recv", c->recv, c->recv_bytes);
    return r == HCLIENT_OK ? check_overlap(comm, c) : r;
}

/* ---------------------------------------------------------------------------------------------- posting */

static bool find_shared(struct hcl_context *ctx, const void *p, uint64_t bytes, struct hrp_bufref *ref)
{
    *ref = (struct hrp_bufref){.kind = HRP_BUF_NONE};
    if (bytes == 0)
        return true;
    if (!hcl_regions_find(&ctx->regions, p, bytes, &ref->id, &ref->offset))
        return false;
    ref->kind = HRP_BUF_SHARED;
    return true;
}

/* Both sides in shared memory, or both through the window: the daemon never mixes them. */
static hclient_result_t place(struct hcl_comm *comm, const struct call *c, struct hrp_desc *desc,
                              bool *staged)
{
    *staged = !find_shared(comm->ctx, c->send, c->send_bytes, &desc->in) ||
              !find_shared(comm->ctx, c->recv, c->recv_bytes, &desc->out);
    if (!*staged)
        return HCLIENT_OK;
    hclient_result_t r = check_memory(c, "send", c->send, c->send_bytes);
    if (r == HCLIENT_OK)
        r = check_memory(c, "recv", c->recv, c->recv_bytes);
    uint64_t bytes = hrp_sig_bytes(&c->sig, comm->nranks);
    if (r == HCLIENT_OK && bytes / HRP_STAGE_CHUNK >= HRP_CHUNK_ALL - 1)
        r = hcl_fail(HCLIENT_UNSUPPORTED,
                     "%s: %" PRIu64 " bytes are too many for ordinary memory (less than %" PRIu64
                     "); use memory of hclient_mem_alloc",
                     c->name, bytes, HRP_STAGE_CHUNK * (HRP_CHUNK_ALL - 1));
    return r == HCLIENT_OK ? hcl_stage_window(comm) : r;
}

/* Under post_lock: the slot of op `number` becomes that op's. */
static void fill_slot(struct hcl_comm *comm, const struct call *c, uint64_t number, bool staged,
                      struct hrp_desc *desc)
{
    struct hcl_op *op = &comm->ops[number % HRP_OP_SLOTS];
    pthread_mutex_lock(&comm->lock);
    op->number = number;
    op->complete = false;
    op->staged = staged;
    op->result = HCLIENT_OK;
    op->sig = c->sig;
    pthread_mutex_unlock(&comm->lock);
    if (!staged)
        return;
    struct hcl_stage *stage = &comm->stage;
    op->sends = c->sends;
    op->send = c->send;
    op->recv = c->recv;
    op->bytes = hrp_sig_bytes(&c->sig, comm->nranks);
    op->nchunks = (op->bytes + HRP_STAGE_CHUNK - 1) / HRP_STAGE_CHUNK;
    op->base = stage->next;
    op->out = 0;
    atomic_store_explicit(&op->in, 0, memory_order_relaxed);
    stage->next += (op->bytes + HRP_LINE - 1) / HRP_LINE * HRP_LINE;
    struct hrp_bufref window = {.kind = HRP_BUF_WINDOW, .offset = op->base};
    desc->in = c->send_bytes > 0 ? window : (struct hrp_bufref){.kind = HRP_BUF_NONE};
    desc->out = window;
}

static hclient_result_t push(struct hcl_comm *comm, const struct hrp_desc *desc)
{
    uint64_t deadline = hcl_now() + RING_NS;
    while (hrp_ring_push(comm->area, desc) != 0) {
        /* The slot is free, so its op is complete, so the daemon has taken that descriptor: a full ring means
           that it does not follow its own protocol. */
        if (hcl_context_lost(comm->ctx) || hcl_now() > deadline)
            return hcl_fail(HCLIENT_PROTOCOL,
                            "the hreduced daemon has not taken descriptors that it completed");
        struct timespec ts = hcl_timespec(HCL_MS);
        nanosleep(&ts, NULL);
    }
    return HCLIENT_OK;
}

/* Under post_lock. */
static hclient_result_t post_locked(struct hcl_comm *comm, const struct call *c, uint64_t *number)
{
    char text[HRP_COMM_TEXT + 1];
    uint64_t k = atomic_load_explicit(&comm->posted, memory_order_relaxed) + 1;
    if (k > HRP_OP_SLOTS)
        hcl_wait_complete(comm, k - HRP_OP_SLOTS);
    uint32_t state = hcl_comm_state(comm, text, sizeof(text));
    if (state != 0 || atomic_load(&comm->destroying)) {
        atomic_store(&comm->reported, true);
        return hcl_fail(state != 0 ? (hclient_result_t)state : HCLIENT_ABORTED, "%s: %s", c->name,
                        state != 0 ? text : "the communicator is being destroyed");
    }
    struct hrp_desc desc = {.op = k, .sig = c->sig};
    bool staged;
    hclient_result_t r = place(comm, c, &desc, &staged);
    if (r != HCLIENT_OK)
        return r;
    fill_slot(comm, c, k, staged, &desc);
    struct hrp_op_flags *flags = &comm->area->flags[k % HRP_OP_SLOTS];
    atomic_store_explicit(&flags->waiting, 0, memory_order_relaxed);
    atomic_store_explicit(&flags->ready, hrp_flag(k, staged ? 0 : HRP_CHUNK_ALL), memory_order_release);
    atomic_store_explicit(&comm->posted, k, memory_order_release);
    r = push(comm, &desc);
    if (r != HCLIENT_OK) {
        hcl_comm_end(comm, HRP_PROTOCOL, hclient_last_error(NULL));
        return r;
    }
    if (staged)
        hcl_stage_queue(comm, &comm->ops[k % HRP_OP_SLOTS]);
    if (!staged || hcl_stage_progress(comm) != HCL_STAGE_FED)
        hcl_doorbell(comm->ctx);
    *number = k;
    return HCLIENT_OK;
}

static hclient_result_t post(hclient_comm_t handle, struct hcl_comm *comm, const struct call *c,
                             hclient_op_t *op)
{
    uint64_t number = 0;
    pthread_mutex_lock(&comm->post_lock);
    hclient_result_t r = post_locked(comm, c, &number);
    pthread_mutex_unlock(&comm->post_lock);
    if (r != HCLIENT_OK)
        return r;
    if (atomic_load(&comm->stage.unfed) > 0 && !atomic_load(&comm->ctx->feeding) &&
        atomic_load(&comm->stage.feeders) == 0)
        hcl_watcher_wake(comm->ctx);
    if (op != NULL)
        *op = (hclient_op_t){.comm = handle, .number = number};
    return HCLIENT_OK;
}

static hclient_result_t collective(hclient_comm_t handle, const char *name, enum hrp_coll coll,
                                   const void *send, void *recv, uint64_t count, int dtype, int redop,
                                   int root, const void *stream, hclient_op_t *op)
{
    struct hcl_comm *comm;
    hclient_result_t r = hcl_comm_enter(handle, name, &comm);
    if (r != HCLIENT_OK)
        return r;
    struct call c = {.name = name, .send = send, .recv = recv};
    r = check_kinds(comm, &c, dtype, redop, root, stream);
    if (r == HCLIENT_OK) {
        c.sig = (struct hrp_sig){.count = count,
                                 .root = (uint32_t)root,
                                 .coll = (uint8_t)coll,
                                 .dtype = (uint8_t)dtype,
                                 .redop = (uint8_t)redop};
        c.sends = coll != HRP_BROADCAST || comm->rank == c.sig.root;
        r = check(comm, &c);
    }
    if (r == HCLIENT_OK)
        r = post(handle, comm, &c, op);
    hcl_handle_put(handle);
    return r;
}

/* --------------------------------------------------------------------------------------------- the calls */

hclient_result_t hclient_all_reduce(hclient_comm_t comm, const void *send, void *recv, size_t count,
                                    hclient_data_type_t dtype, hclient_red_op_t redop, void *stream,
                                    hclient_op_t *op)
{
    HCL_ENTER();
    return collective(comm, "hclient_all_reduce", HRP_ALL_REDUCE, send, recv, count, (int)dtype, (int)redop,
                      0, stream, op);
}

hclient_result_t hclient_broadcast(hclient_comm_t comm, const void *send, void *recv, size_t count,
                                   hclient_data_type_t dtype, int root, void *stream, hclient_op_t *op)
{
    HCL_ENTER();
    return collective(comm, "hclient_broadcast", HRP_BROADCAST, send, recv, count, (int)dtype, HRP_SUM, root,
                      stream, op);
}

hclient_result_t hclient_reduce_scatter(hclient_comm_t comm, const void *send, void *recv, size_t recv_count,
                                        hclient_data_type_t dtype, hclient_red_op_t redop, void *stream,
                                        hclient_op_t *op)
{
    HCL_ENTER();
    return collective(comm, "hclient_reduce_scatter", HRP_REDUCE_SCATTER, send, recv, recv_count, (int)dtype,
                      (int)redop, 0, stream, op);
}

hclient_result_t hclient_all_gather(hclient_comm_t comm, const void *send, void *recv, size_t send_count,
                                    hclient_data_type_t dtype, void *stream, hclient_op_t *op)
{
    HCL_ENTER();
    return collective(comm, "hclient_all_gather", HRP_ALL_GATHER, send, recv, send_count, (int)dtype, HRP_SUM,
                      0, stream, op);
}

hclient_result_t hclient_barrier(hclient_comm_t comm, void *stream, hclient_op_t *op)
{
    HCL_ENTER();
    return collective(comm, "hclient_barrier", HRP_BARRIER, NULL, NULL, 0, HRP_F32, HRP_SUM, 0, stream, op);
}
