/* SPDX-License-Identifier: MIT */
/*
 * Waits of streams that come later than the call (hclient_stream_wait()), and streams that are held because an op failed
 * (on_error = trap).
 *
 * A deferred op's stream copies the input in and writes ready, nothing more, so that no wait is pending in a hardware queue.
 * The op keeps its slot and its place in the window until some stream takes the output. Whatever would have to wait for
 * that inside a call is refused instead: it may be the caller alone who can bring it about.
 */
#include <inttypes.h>
#include <stddef.h>

#include "client/gpu.h"
#include "proto/status.h"

/* ---- taking the output ---------------------------------------------------------------------------------------------- */

/* Under post_lock. */
static hclient_result_t take(struct hcl_comm *comm, struct hcl_op *op, const char *call, hrg_stream stream)
{
    const struct hrg_driver *drv = comm->gpu->drv;
    struct hcl_gpu_scope scope;
    hclient_result_t r = hcl_gpu_enter(drv, call, stream, (hrg_ptr)(uintptr_t)op->buffer, &scope);
    if (r == HCLIENT_OK && (r = hcl_gpu_need(comm, drv, call)) != HCLIENT_OK)
        hcl_gpu_leave(&scope);
    if (r != HCLIENT_OK)
        return r;
    op->stream = stream;
    pthread_mutex_lock(&comm->lock);
    op->deferred = false;
    pthread_mutex_unlock(&comm->lock);
    hrg_result e = hcl_gpu_finish(comm, op);
    hcl_gpu_leave(&scope);
    if (e == HRG_SUCCESS)
        return HCLIENT_OK;
    r = hcl_gpu_fail(drv, call, "enqueuing the op's wait and copies", e);
    hcl_comm_give_up(comm, r, hclient_last_error(NULL));
    return r;
}

/* Under post_lock: the stream goes on when another, which takes or took the output, has it. */
static hclient_result_t follow(struct hcl_comm *comm, const struct hcl_op *op, const char *call,
                               hrg_stream stream)
{
    const struct hrg_driver *drv = comm->gpu->drv;
    struct hcl_gpu_scope scope;
    hclient_result_t r = hcl_gpu_enter(drv, call, stream, (hrg_ptr)(uintptr_t)op->buffer, &scope);
    if (r != HCLIENT_OK)
        return r;
    r = hcl_gpu_need(comm, drv, call);
    hrg_result e = HRG_SUCCESS;
    if (r == HCLIENT_OK && !hcl_gpu_passed(comm, op->number))
        e = hcl_gpu_wait_passed(comm, stream, op->number);
    hcl_gpu_leave(&scope);
    return e == HRG_SUCCESS ? r : hcl_gpu_fail(drv, call, "enqueuing the wait", e);
}

static hclient_result_t wait_in_stream(struct hcl_comm *comm, uint64_t number, hrg_stream stream)
{
    static const char call[] = "hclient_stream_wait";
    struct hcl_op *op = &comm->ops[number % HRP_OP_SLOTS];
    if (op->number != number)
        return HCLIENT_OK; /* the slot is another's: all streams are behind this one */
    if (!op->gpu)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                        "%s: op %" PRIu64
                        " is one of host buffers, for which no stream can wait; call hclient_wait()",
                        call, number);
    return op->deferred ? take(comm, op, call, stream) : follow(comm, op, call, stream);
}

hclient_result_t hclient_stream_wait(hclient_op_t op, void *stream)
{
    HCL_ENTER();
    struct hcl_comm *comm;
    if (op.number == 0)
        return HCLIENT_OK;
    hclient_result_t r = hcl_op_enter(op, "hclient_stream_wait", &comm);
    if (r != HCLIENT_OK)
        return r;
    pthread_mutex_lock(&comm->post_lock);
    r = wait_in_stream(comm, op.number, stream);
    pthread_mutex_unlock(&comm->post_lock);
    hcl_handle_put(op.comm);
    return r;
}

void hcl_gpu_take(struct hcl_comm *comm, uint64_t number)
{
    pthread_mutex_lock(&comm->post_lock);
    struct hcl_op *op = &comm->ops[number % HRP_OP_SLOTS];
    if (op->number == number && op->deferred) {
        hclient_result_t r = take(comm, op, "hclient_wait", op->stream);
        if (r != HCLIENT_OK) /* its context is gone, or its stream captures: nothing else ends the wait */
            hcl_comm_give_up(comm, r, hclient_last_error(NULL));
    }
    pthread_mutex_unlock(&comm->post_lock);
}

hclient_result_t hcl_gpu_slot_free(struct hcl_comm *comm, const struct hcl_call *c, uint64_t number)
{
    const struct hcl_op *op = &comm->ops[number % HRP_OP_SLOTS];
    if (!op->deferred)
        return HCLIENT_OK;
    pthread_mutex_lock(&comm->lock);
    bool held = op->number == number && !op->complete;
    pthread_mutex_unlock(&comm->lock);
    if (!held)
        return HCLIENT_OK;
    return hcl_fail(HCLIENT_RESOURCE,
                    "%s: at most %u ops of a communicator may be incomplete, and op %" PRIu64
                    ", whose wait is deferred, is one of them; call hclient_stream_wait() for it first",
                    c->name, HRP_OP_SLOTS, number);
}

bool hcl_gpu_comes(const struct hcl_comm *comm, const struct hcl_op *op)
{
    if (!op->gpu)
        return false;
    if (!op->deferred)
        return !hcl_gpu_passed(comm, op->number);
    /* Only its input is in a stream, which writes ready behind it. */
    uint64_t ready =
        atomic_load_explicit(&comm->area->flags[op->number % HRP_OP_SLOTS].ready, memory_order_acquire);
    return ready < hrp_flag(op->number, HRP_CHUNK_ALL);
}

/* ---- trap ----------------------------------------------------------------------------------------------------------- */

#define STATUS_AT offsetof(struct hrp_completion, status)
_Static_assert(STATUS_AT % 8 == 0 && offsetof(struct hrp_completion, scope) == STATUS_AT + 4 && HRP_OK == 0 &&
                   HRP_SCOPE_NONE == 0,
               "a stream waits for status and scope, as one word, to be that of success");

hrg_ptr hcl_gpu_status_word(const struct hcl_comm *comm, uint64_t number)
{
    return comm->gpu->area + offsetof(struct hrp_comm_area, completion) +
           number % HRP_OP_SLOTS * sizeof(struct hrp_completion) + STATUS_AT;
}

/* The comm is over, so the daemon writes nothing there any more. */
static void let_go(struct hcl_comm *comm, uint64_t number)
{
    struct hrp_completion *c = &comm->area->completion[number % HRP_OP_SLOTS];
    atomic_store_explicit((_Atomic uint64_t *)(void *)&c->status, 0, memory_order_release);
}

static bool ended_here(struct hcl_comm *comm)
{
    return atomic_load(&comm->aborted) || atomic_load(&comm->destroying);
}

#define TRAP_TEXT                                                                                            \
    "on_error = trap: op %" PRIu64 " on GPU buffers failed, and what follows it in its stream must not use " \
    "its result, so this process ends: %s"

void hcl_gpu_trap(struct hcl_comm *comm)
{
    for (unsigned i = 0; comm->trap && i < HRP_OP_SLOTS; i++) {
        struct hcl_outcome outcome;
        uint64_t chunks, number = hcl_gpu_unpassed(comm, i);
        if (number == 0 || !hcl_op_over(comm, number, &chunks, &outcome) || outcome.result == HCLIENT_OK)
            continue;
        if (!ended_here(comm))
            hcl_die(TRAP_TEXT, number, outcome.text);
        hcl_op_complete(comm, number, outcome.result, outcome.text);
        let_go(comm, number);
    }
}

void hcl_gpu_trap_lost(struct hcl_comm *comm)
{
    for (unsigned i = 0; comm->trap && i < HRP_OP_SLOTS; i++) {
        uint64_t number = hcl_gpu_unpassed(comm, i);
        if (number != 0 && !ended_here(comm))
            hcl_die(TRAP_TEXT, number, comm->ctx->lost_text);
        if (number != 0)
            let_go(comm, number);
    }
}
