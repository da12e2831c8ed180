/* SPDX-License-Identifier: MIT */
/* The collectives: check, number, describe, push, ring. */
#include <inttypes.h>
#include <string.h>

#include "client/call.h"
#include "client/comm.h"
#include "client/futex.h"
#include "client/gpu.h"
#include "proto/ring.h"
#include "proto/status.h"

#define RING_NS (10 * HCL_SEC)

_Static_assert((int)HCLIENT_ALL_REDUCE == (int)HRP_ALL_REDUCE &&
                   (int)HCLIENT_BROADCAST == (int)HRP_BROADCAST &&
                   (int)HCLIENT_REDUCE_SCATTER == (int)HRP_REDUCE_SCATTER &&
                   (int)HCLIENT_ALL_GATHER == (int)HRP_ALL_GATHER && (int)HCLIENT_BARRIER == (int)HRP_BARRIER,
               "hclient_coll_t is hrp_coll");

/* ----------------------------------------------------------------------------------------------- checks */

static hclient_result_t check_kinds(const struct hcl_comm *comm, const struct hcl_call *c, int dtype,
                                    int redop, int root)
{
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

static hclient_result_t check_sizes(const struct hcl_comm *comm, struct hcl_call *c)
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

static hclient_result_t check_buffer(const struct hcl_comm *comm, const struct hcl_call *c, const char *what,
                                     const char *p, uint64_t bytes)
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
    size_t over = hcl_regions_overrun(&comm->ctx->regions, p, bytes);
    if (over > 0)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                        "%s: %s %p and %" PRIu64
                        " bytes reach %zu bytes over the end of the shared memory that it lies in; is "
                        "the count right?",
                        c->name, what, (const void *)p, bytes, over);
    return HCLIENT_OK;
}

static hclient_result_t check_overlap(const struct hcl_comm *comm, struct hcl_call *c)
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

static hclient_result_t check(const struct hcl_comm *comm, struct hcl_call *c)
{
    hclient_result_t r = check_sizes(comm, c);
    if (r == HCLIENT_OK)
        r = check_buffer(comm, c, "send", c->send, c->send_bytes);
    if (r == HCLIENT_OK)
        r = check_buffer(comm, c, "recv", c->recv, c->recv_bytes);
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

/* Both sides in shared memory, or both through the window: the daemon never mixes them. Looked at first, because it asks no
   driver; a call with a stream is for those that do, to be refused there. */
static bool takes_shared(struct hcl_comm *comm, const struct hcl_call *c, struct hrp_desc *desc,
                         hclient_result_t *result)
{
    *result = HCLIENT_OK;
    return c->stream == NULL && find_shared(comm->ctx, c->send, c->send_bytes, &desc->in) &&
           find_shared(comm->ctx, c->recv, c->recv_bytes, &desc->out);
}

const struct hcl_way hcl_way_shared = {.takes = takes_shared, .ready = HRP_CHUNK_ALL};

static const struct hcl_way *const ways[] = {&hcl_way_shared,     &hcl_way_gpu_alone,    &hcl_way_gpu_shared,
                                             &hcl_way_gpu_staged, &hcl_way_gpu_unpinned, &hcl_way_staged};

/* Under post_lock: the way the call goes. */
static hclient_result_t choose(struct hcl_comm *comm, const struct hcl_call *c, struct hrp_desc *desc,
                               const struct hcl_way **way)
{
    hclient_result_t r = HCLIENT_OK;
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        *way = ways[i];
        if (ways[i]->takes(comm, c, desc, &r))
            return r;
    }
    return hcl_fail(HCLIENT_UNSUPPORTED, "%s: no way to the daemon for these buffers", c->name);
}

/* Under post_lock: the slot of op `number` becomes that op's. */
static struct hcl_op *fill_slot(struct hcl_comm *comm, const struct hcl_call *c, uint64_t number,
                                const struct hcl_way *way)
{
    struct hcl_op *op = &comm->ops[number % HRP_OP_SLOTS];
    hcl_gpu_unuse(comm->ctx, op); /* the older one's */
    pthread_mutex_lock(&comm->lock);
    op->number = number;
    op->complete = false;
    op->staged = way->in_stage;
    op->gpu = way->in_stream;
    op->deferred = way->defers && c->defer;
    if (op->deferred)
        comm->gpu->deferred_ops++;
    op->buffer = c->send_bytes > 0 ? c->send : c->recv_bytes > 0 ? c->recv : NULL;
    op->result = HCLIENT_OK;
    op->sig = c->sig;
    pthread_mutex_unlock(&comm->lock);
    return op;
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
static hclient_result_t post_locked(struct hcl_comm *comm, const struct hcl_call *c, uint64_t *number)
{
    char text[HRP_COMM_TEXT + 1];
    uint64_t k = atomic_load_explicit(&comm->posted, memory_order_relaxed) + 1;
    uint32_t state = hcl_comm_state(comm, text, sizeof(text));
    hclient_result_t r = HCLIENT_OK;
    if (state == 0 && k > HRP_OP_SLOTS) {
        /* Deferred ops are refused first: to wait for one takes its output, which needs the lock that is held here. */
        r = hcl_gpu_slot_free(comm, c, k - HRP_OP_SLOTS);
        if (r != HCLIENT_OK)
            return r;
        hcl_wait_complete(comm, k - HRP_OP_SLOTS);
        state = hcl_comm_state(comm, text, sizeof(text));
    }
    if (state != 0 || atomic_load(&comm->destroying)) {
        atomic_store(&comm->reported, true);
        return hcl_fail(state != 0 ? (hclient_result_t)state : HCLIENT_ABORTED, "%s: %s", c->name,
                        state != 0 ? text : "the communicator is being destroyed");
    }
    struct hrp_desc desc = {.op = k, .sig = c->sig};
    const struct hcl_way *way;
    r = choose(comm, c, &desc, &way);
    if (r != HCLIENT_OK)
        return r;
    struct hcl_op *op = fill_slot(comm, c, k, way);
    if (way->describe != NULL)
        way->describe(comm, c, op, &desc);
    struct hrp_op_flags *flags = &comm->area->flags[k % HRP_OP_SLOTS];
    atomic_store_explicit(&flags->waiting, 0, memory_order_relaxed);
    atomic_store_explicit(&flags->ready, hrp_flag(k, way->ready), memory_order_release);
    atomic_store_explicit(&comm->posted, k, memory_order_release);
    bool rang = false;
    r = push(comm, &desc);
    if (r == HCLIENT_OK && way->start != NULL)
        r = way->start(comm, c, op, &rang);
    if (r != HCLIENT_OK) {
        hcl_comm_give_up(comm, r, hclient_last_error(NULL));
        return r;
    }
    if (!rang)
        hcl_doorbell(comm->ctx);
    *number = k;
    return HCLIENT_OK;
}

static hclient_result_t post(hclient_comm_t handle, struct hcl_comm *comm, const struct hcl_call *c,
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

/* What the collective uses of the arguments; the rest is not looked at. */
static hclient_result_t collective(hclient_comm_t handle, const char *name, const hclient_coll_args_t *a,
                                   hclient_op_t *op)
{
    struct hcl_comm *comm;
    hclient_result_t r = hcl_comm_enter(handle, name, &comm);
    if (r != HCLIENT_OK)
        return r;
    bool barrier = a->coll == HCLIENT_BARRIER;
    bool reduces = a->coll == HCLIENT_ALL_REDUCE || a->coll == HCLIENT_REDUCE_SCATTER;
    int dtype = barrier ? HRP_F32 : (int)a->dtype, redop = reduces ? (int)a->redop : HRP_SUM;
    int root = a->coll == HCLIENT_BROADCAST ? a->root : 0;
    struct hcl_call c = {.name = name,
                         .send = barrier ? NULL : a->send,
                         .recv = barrier ? NULL : a->recv,
                         .stream = a->stream,
                         .hint = a->overlap == HCLIENT_OVERLAP_COMPUTE ? HRP_DESC_OVERLAP_COMPUTE
                                 : a->overlap == HCLIENT_OVERLAP_IDLE  ? HRP_DESC_OVERLAP_IDLE
                                                                       : 0,
                         .defer = (a->flags & HCLIENT_DEFER_WAIT) != 0};
    r = check_kinds(comm, &c, dtype, redop, root);
    if (r == HCLIENT_OK) {
        c.sig = (struct hrp_sig){.count = barrier ? 0 : a->count,
                                 .root = (uint32_t)root,
                                 .coll = (uint8_t)a->coll,
                                 .dtype = (uint8_t)dtype,
                                 .redop = (uint8_t)redop};
        c.sends = a->coll != HCLIENT_BROADCAST || comm->rank == c.sig.root;
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
    const hclient_coll_args_t a = {.coll = HCLIENT_ALL_REDUCE,
                                   .send = send,
                                   .recv = recv,
                                   .count = count,
                                   .dtype = dtype,
                                   .redop = redop,
                                   .stream = stream};
    return collective(comm, "hclient_all_reduce", &a, op);
}

hclient_result_t hclient_broadcast(hclient_comm_t comm, const void *send, void *recv, size_t count,
                                   hclient_data_type_t dtype, int root, void *stream, hclient_op_t *op)
{
    HCL_ENTER();
    const hclient_coll_args_t a = {.coll = HCLIENT_BROADCAST,
                                   .send = send,
                                   .recv = recv,
                                   .count = count,
                                   .dtype = dtype,
                                   .root = root,
                                   .stream = stream};
    return collective(comm, "hclient_broadcast", &a, op);
}

hclient_result_t hclient_reduce_scatter(hclient_comm_t comm, const void *send, void *recv, size_t recv_count,
                                        hclient_data_type_t dtype, hclient_red_op_t redop, void *stream,
                                        hclient_op_t *op)
{
    HCL_ENTER();
    const hclient_coll_args_t a = {.coll = HCLIENT_REDUCE_SCATTER,
                                   .send = send,
                                   .recv = recv,
                                   .count = recv_count,
                                   .dtype = dtype,
                                   .redop = redop,
                                   .stream = stream};
    return collective(comm, "hclient_reduce_scatter", &a, op);
}

hclient_result_t hclient_all_gather(hclient_comm_t comm, const void *send, void *recv, size_t send_count,
                                    hclient_data_type_t dtype, void *stream, hclient_op_t *op)
{
    HCL_ENTER();
    const hclient_coll_args_t a = {.coll = HCLIENT_ALL_GATHER,
                                   .send = send,
                                   .recv = recv,
                                   .count = send_count,
                                   .dtype = dtype,
                                   .stream = stream};
    return collective(comm, "hclient_all_gather", &a, op);
}

hclient_result_t hclient_barrier(hclient_comm_t comm, void *stream, hclient_op_t *op)
{
    HCL_ENTER();
    const hclient_coll_args_t a = {.coll = HCLIENT_BARRIER, .stream = stream};
    return collective(comm, "hclient_barrier", &a, op);
}

/* A program may be older than this library, or newer as long as it uses nothing newer. */
static hclient_result_t take_args(const hclient_coll_args_t *args, hclient_coll_args_t *out)
{
    static const char call[] = "hclient_collective";
    if (args == NULL || args->size < offsetof(hclient_coll_args_t, overlap))
        return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                        "%s: args is %p, its size %zu; start with HCLIENT_COLL_ARGS_INITIALIZER", call,
                        (const void *)args, args != NULL ? args->size : 0);
    const char *bytes = (const char *)args;
    for (size_t i = sizeof(*out); i < args->size; i++)
        if (bytes[i] != 0)
            return hcl_fail(
                HCLIENT_UNSUPPORTED,
                "%s: the program sets a field of hclient_coll_args_t that this library (%d) does not "
                "know; load a newer libhclient",
                call, HCLIENT_VERSION_CODE);
    memset(out, 0, sizeof(*out));
    memcpy(out, args, args->size < sizeof(*out) ? args->size : sizeof(*out));
    if ((int)out->coll < 0 || (int)out->coll >= HRP_NCOLLS)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: args.coll is %d; use HCLIENT_ALL_REDUCE, ...", call,
                        (int)out->coll);
    if (out->overlap < 0 || out->overlap >= HRP_NOVERLAPS)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: args.overlap is %d; it is one of HCLIENT_OVERLAP_*",
                        call, out->overlap);
    if (out->flags & ~HCLIENT_DEFER_WAIT)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: args.flags is 0x%x; it is made of HCLIENT_DEFER_WAIT",
                        call, out->flags);
    return HCLIENT_OK;
}

hclient_result_t hclient_collective(hclient_comm_t comm, const hclient_coll_args_t *args, hclient_op_t *op)
{
    static const char *const name[HRP_NCOLLS] = {
        "hclient_collective (all_reduce)", "hclient_collective (broadcast)",
        "hclient_collective (reduce_scatter)", "hclient_collective (all_gather)",
        "hclient_collective (barrier)"};
    HCL_ENTER();
    hclient_coll_args_t a;
    hclient_result_t r = take_args(args, &a);
    if (r == HCLIENT_OK && (a.flags & HCLIENT_DEFER_WAIT) && op == NULL)
        r = hcl_fail(HCLIENT_INVALID_ARGUMENT,
                     "hclient_collective: op is NULL, but a wait that is deferred needs it for "
                     "hclient_stream_wait()");
    return r == HCLIENT_OK ? collective(comm, name[a.coll], &a, op) : r;
}
