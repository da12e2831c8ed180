/* SPDX-License-Identifier: MIT */
/*
 * Staging: ops on memory that the daemon cannot address go through the comm's window. Each op has a stream
 * (proto/shm.h) at positions [base, base + bytes) of an endless tape; the window holds the last
 * `window size` bytes of it. Chunks are copied in as the window has room and copied out as the daemon's done
 * word advances. Whoever is inside the library does it; when nobody is, the watcher thread (otherwise two
 * ranks that wait for two comms in different orders would wait for ever).
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "client/call.h"
#include "client/comm.h"
#include "client/futex.h"
#include "client/tape.h"
#include "kernels/kernels.h"
#include "proto/status.h"

void hcl_stage_init(struct hcl_stage *stage)
{
    pthread_mutex_init(&stage->lock, NULL);
}

void hcl_stage_deinit(struct hcl_stage *stage)
{
    if (stage->window != NULL)
        munmap(stage->window, stage->bytes);
    pthread_mutex_destroy(&stage->lock);
}

hclient_result_t hcl_stage_window(struct hcl_comm *comm)
{
    struct hcl_stage *stage = &comm->stage;
    if (stage->window != NULL)
        return HCLIENT_OK;
    struct hrp_msg msg = {.type = HRP_MSG_WINDOW};
    msg.body.slot.slot = comm->slot;
    struct hcl_reply reply = HCL_REPLY_NULL;
    hclient_result_t r =
        hcl_request(comm->ctx, &msg, NULL, 0, HRP_MSG_MEMORY, hcl_alloc_ns(comm->ctx->window_bytes), &reply);
    if (r != HCLIENT_OK)
        return r;
    uint64_t bytes = reply.msg.body.memory.bytes;
    struct stat st;
    void *p = MAP_FAILED;
    /* Less than two chunks could not hold one that leaves beside one that comes. */
    if (bytes < 2 * HRP_STAGE_CHUNK || bytes % HRP_PAGE != 0 || fstat(reply.fds[0], &st) != 0 ||
        (uint64_t)st.st_size < bytes)
        r = hcl_fail(HCLIENT_PROTOCOL,
                     "the hreduced daemon sent a staging window of %llu bytes, which is unusable",
                     (unsigned long long)bytes);
    else if ((p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, reply.fds[0], 0)) == MAP_FAILED)
        r = hcl_fail(HCLIENT_RESOURCE, "cannot map a staging window of %llu bytes: %s",
                     (unsigned long long)bytes, strerror(errno));
    if (r == HCLIENT_OK) {
        madvise(p, bytes, MADV_DONTFORK);
        pthread_mutex_lock(&stage->lock);
        stage->window = p;
        stage->bytes = bytes;
        pthread_mutex_unlock(&stage->lock);
    }
    hcl_reply_deinit(&reply);
    return r;
}

/* -------------------------------------------------------------------------------------------- copying */

/*
 * Copies of large ops go past the caches: what the ranks of a node stage together does not fit in them, so that an ordinary
 * store would read each line from memory first and push another out. (memcpy itself decides so only for copies of a
 * good part of a last-level cache, which a chunk never is.)
 */
#define STREAM_BYTES (UINT64_C(4) << 20)

static void copy(const struct hcl_comm *comm, const struct hcl_op *op, char *dst, const char *src,
                 uint64_t len)
{
    if (len == 0)
        return;
    if (op->bytes * comm->nlocal < STREAM_BYTES)
        memcpy(dst, src, len);
    else
        hrk_copy((void *const *)&dst, 1, src, len, 1);
}

static void window_write(const struct hcl_comm *comm, const struct hcl_op *op, uint64_t pos, const char *src,
                         uint64_t len)
{
    const struct hcl_stage *stage = &comm->stage;
    uint64_t at = pos % stage->bytes;
    uint64_t first = len < stage->bytes - at ? len : stage->bytes - at;
    copy(comm, op, stage->window + at, src, first);
    copy(comm, op, stage->window, src + first, len - first);
}

static void window_read(const struct hcl_comm *comm, const struct hcl_op *op, uint64_t pos, char *dst,
                        uint64_t len)
{
    const struct hcl_stage *stage = &comm->stage;
    uint64_t at = pos % stage->bytes;
    uint64_t first = len < stage->bytes - at ? len : stage->bytes - at;
    copy(comm, op, dst, stage->window + at, first);
    copy(comm, op, dst + first, stage->window, len - first);
}

static void chunk_in(struct hcl_comm *comm, const struct hcl_op *op, uint64_t chunk)
{
    uint64_t end = hcl_chunk_end(op, chunk);
    for (uint64_t pos = chunk * HRP_STAGE_CHUNK; pos < end;) {
        struct hcl_run run = hcl_run_at(&op->sig, comm->nranks, pos, end);
        const char *src = hcl_run_input(comm, op, &run);
        if (src != NULL)
            window_write(comm, op, op->base + pos, src, run.len);
        pos += run.len;
    }
}

static void chunk_out(struct hcl_comm *comm, const struct hcl_op *op, uint64_t chunk)
{
    uint64_t end = hcl_chunk_end(op, chunk);
    for (uint64_t pos = chunk * HRP_STAGE_CHUNK; pos < end;) {
        struct hcl_run run = hcl_run_at(&op->sig, comm->nranks, pos, end);
        char *dst = hcl_run_output(comm, op, &run);
        /* What a broadcast's root or a rank of an all_gather has in place is there already. */
        bool moves = op->sig.coll == HRP_BROADCAST || op->sig.coll == HRP_ALL_GATHER;
        if (dst != NULL && !(moves && hcl_run_input(comm, op, &run) == dst))
            window_read(comm, op, op->base + pos, dst, run.len);
        pos += run.len;
    }
}

/* A failed op must not leave a result that is half new, half old and looks like numbers. */
static void spoil(struct hcl_comm *comm, const struct hcl_op *op)
{
    for (uint64_t chunk = 0; chunk < op->out; chunk++) {
        uint64_t end = hcl_chunk_end(op, chunk);
        for (uint64_t pos = chunk * HRP_STAGE_CHUNK; pos < end;) {
            struct hcl_run run = hcl_run_at(&op->sig, comm->nranks, pos, end);
            char *dst = hcl_run_output(comm, op, &run);
            if (dst != NULL)
                hrk_fill_nan(op->sig.dtype, dst, run.len / hrp_dtype_size(op->sig.dtype));
            pos += run.len;
        }
    }
}

/* ------------------------------------------------------------------------------------------ the copier */

static bool ended(const struct hcl_comm *comm)
{
    return atomic_load_explicit(&comm->verdict, memory_order_acquire) != 0 ||
           atomic_load_explicit(&comm->destroying, memory_order_relaxed);
}

static bool is_fed(const struct hcl_op *op)
{
    return atomic_load_explicit(&op->in, memory_order_relaxed) == op->nchunks;
}

/* Copier: the op leaves the queue. entry: its place there. */
static void finish(struct hcl_comm *comm, struct hcl_op *op, uint64_t entry, hclient_result_t result,
                   const char *text)
{
    struct hcl_stage *stage = &comm->stage;
    if (result != HCLIENT_OK)
        spoil(comm, op);
    if (!is_fed(op))
        atomic_fetch_sub(&stage->unfed, 1);
    stage->queue[entry % HCL_STAGE_QUEUE] = 0;
    atomic_fetch_sub(&stage->live, 1);
    hcl_op_complete(comm, op->number, result, text);
}

/* Copies out what is done. True: something was copied, or the op is complete. */
static bool drain(struct hcl_comm *comm, struct hcl_op *op, uint64_t entry, bool *complete)
{
    struct hcl_outcome outcome;
    uint64_t chunks;
    *complete = hcl_op_over(comm, op->number, &chunks, &outcome);
    if (*complete && (outcome.result != HCLIENT_OK || !is_fed(op))) {
        if (outcome.result == HCLIENT_OK) {
            outcome.result = HCLIENT_PROTOCOL;
            snprintf(outcome.text, sizeof(outcome.text),
                     "the hreduced daemon reported an op complete before it had its input");
        }
        finish(comm, op, entry, outcome.result, outcome.text);
        return true;
    }
    uint64_t in = atomic_load_explicit(&op->in, memory_order_relaxed);
    uint64_t upto = *complete ? op->nchunks : chunks < in ? chunks : in;
    bool moved = false;
    for (; op->out < upto && !ended(comm); op->out++, moved = true)
        chunk_out(comm, op, op->out);
    if (*complete && op->out == op->nchunks)
        finish(comm, op, entry, HCLIENT_OK, NULL);
    else
        *complete = false;
    return moved || *complete;
}

/* Copies in what fits below position `limit`. */
static bool fill(struct hcl_comm *comm, struct hcl_op *op, uint64_t limit)
{
    uint64_t in = atomic_load_explicit(&op->in, memory_order_relaxed);
    bool moved = false;
    struct hrp_op_flags *flags = &comm->area->flags[op->number % HRP_OP_SLOTS];
    while (in < op->nchunks && op->base + hcl_chunk_end(op, in) <= limit && !ended(comm)) {
        chunk_in(comm, op, in);
        in++;
        moved = true;
        atomic_store_explicit(&op->in, in, memory_order_relaxed);
        uint64_t chunks = in == op->nchunks ? HRP_CHUNK_ALL : in;
        atomic_store_explicit(&flags->ready, hrp_flag(op->number, chunks), memory_order_release);
        if (in < op->nchunks)
            hcl_doorbell(comm->ctx);
    }
    if (moved) {
        hcl_doorbell(comm->ctx);
        if (in == op->nchunks)
            atomic_fetch_sub(&comm->stage.unfed, 1);
    }
    return moved;
}

static enum hcl_stage_turn turn(struct hcl_comm *comm)
{
    struct hcl_stage *stage = &comm->stage;
    uint64_t tail = atomic_load_explicit(&stage->tail, memory_order_acquire);
    enum hcl_stage_turn result = HCL_STAGE_IDLE;
    uint64_t front = 0, limit = 0;
    bool room = true;
    for (uint64_t e = stage->head; e < tail && !ended(comm); e++) {
        uint64_t number = stage->queue[e % HCL_STAGE_QUEUE];
        if (number == 0)
            continue;
        struct hcl_op *op = &comm->ops[number % HRP_OP_SLOTS];
        bool complete;
        if (drain(comm, op, e, &complete) && result == HCL_STAGE_IDLE)
            result = HCL_STAGE_MOVED;
        if (complete)
            continue;
        if (front == 0) {
            front = number;
            limit = op->base + (op->out > 0 ? hcl_chunk_end(op, op->out - 1) : 0) + stage->bytes;
        }
        if (room && !is_fed(op) && fill(comm, op, limit))
            result = HCL_STAGE_FED;
        room = room && is_fed(op);
    }
    while (stage->head < tail && stage->queue[stage->head % HCL_STAGE_QUEUE] == 0)
        stage->head++;
    atomic_store(&stage->front, front);
    return result;
}

static void leave(struct hcl_stage *stage)
{
    pthread_mutex_unlock(&stage->lock);
    atomic_fetch_add(&stage->turns, 1);
    if (atomic_load(&stage->sleepers) > 0)
        hcl_futex_wake(&stage->turns);
}

enum hcl_stage_turn hcl_stage_progress(struct hcl_comm *comm)
{
    struct hcl_stage *stage = &comm->stage;
    enum hcl_stage_turn result = HCL_STAGE_BUSY;
    uint32_t work;
    do {
        work = atomic_load(&stage->work);
        if (pthread_mutex_trylock(&stage->lock) != 0)
            return result;
        enum hcl_stage_turn t = turn(comm);
        result = t > result ? t : result;
        leave(stage);
    } while (atomic_load(&stage->work) != work);
    return result;
}

void hcl_stage_queue(struct hcl_comm *comm, const struct hcl_op *op)
{
    struct hcl_stage *stage = &comm->stage;
    uint64_t tail = atomic_load_explicit(&stage->tail, memory_order_relaxed);
    stage->queue[tail % HCL_STAGE_QUEUE] = op->number;
    atomic_fetch_add(&stage->live, 1);
    atomic_fetch_add(&stage->unfed, 1);
    atomic_store_explicit(&stage->tail, tail + 1, memory_order_release);
    atomic_fetch_add(&stage->work, 1);
}

void hcl_stage_end(struct hcl_comm *comm)
{
    struct hcl_stage *stage = &comm->stage;
    pthread_mutex_lock(&stage->lock);
    uint64_t tail = atomic_load_explicit(&stage->tail, memory_order_acquire);
    for (; stage->head < tail; stage->head++) {
        uint64_t number = stage->queue[stage->head % HCL_STAGE_QUEUE];
        if (number != 0)
            finish(comm, &comm->ops[number % HRP_OP_SLOTS], stage->head,
                   (hclient_result_t)atomic_load_explicit(&comm->verdict, memory_order_acquire),
                   comm->verdict_text);
    }
    atomic_store(&stage->front, 0);
    leave(stage);
}

/* --------------------------------------------------------------------------------------------- the way */

/* The first op of the other kind, or one that is deferred, from slot *i on, whose bytes are in the way; 0: none. */
static uint64_t in_the_way(struct hcl_comm *comm, uint64_t bytes, bool gpu, unsigned *i, bool *deferred)
{
    const struct hcl_stage *stage = &comm->stage;
    uint64_t number = 0;
    pthread_mutex_lock(&comm->lock);
    for (; *i < HRP_OP_SLOTS && number == 0; ++*i) {
        const struct hcl_op *op = &comm->ops[*i];
        bool later = op->deferred && op->bytes > 0;
        bool other =
            op->number != 0 && !op->complete && (later || (gpu ? op->staged : op->gpu && op->bytes > 0));
        /* A page or two more than it takes: places are aligned. */
        if (other && stage->next + bytes + 2 * (uint64_t)HRP_PAGE > op->base + stage->bytes)
            number = op->number;
        *deferred = later;
    }
    pthread_mutex_unlock(&comm->lock);
    return number;
}

hclient_result_t hcl_stage_make_room(struct hcl_comm *comm, const struct hcl_call *c, uint64_t bytes,
                                     bool gpu)
{
    const uint64_t window = comm->stage.bytes;
    unsigned i = 0;
    bool deferred;
    if (bytes == 0)
        return HCLIENT_OK;
    if (c->defer && gpu && bytes > window)
        return hcl_fail(HCLIENT_UNSUPPORTED,
                        "%s: %" PRIu64 " bytes go through the staging window, which has %" PRIu64
                        " and must hold all of an op whose wait is deferred; do not defer it, or raise "
                        "staging_window in hreduced.conf",
                        c->name, bytes, window);
    for (uint64_t number; (number = in_the_way(comm, bytes, gpu, &i, &deferred)) != 0;) {
        if (deferred)
            return hcl_fail(HCLIENT_RESOURCE,
                            "%s: the staging window (%" PRIu64
                            " bytes) is full of ops whose waits are deferred; "
                            "call hclient_stream_wait() for op %" PRIu64
                            " first, or raise staging_window in hreduced.conf",
                            c->name, window, number);
        hcl_wait_complete(comm, number);
    }
    return HCLIENT_OK;
}

static bool takes_staged(struct hcl_comm *comm, const struct hcl_call *c, struct hrp_desc *desc,
                         hclient_result_t *result)
{
    (void)desc;
    hclient_result_t r = HCLIENT_OK;
    uint64_t bytes = hrp_sig_bytes(&c->sig, comm->nranks);
    if (bytes / HRP_STAGE_CHUNK >= HRP_CHUNK_ALL - 1)
        r = hcl_fail(HCLIENT_UNSUPPORTED,
                     "%s: %" PRIu64 " bytes are too many for ordinary memory (less than %" PRIu64
                     "); use memory of hclient_mem_alloc",
                     c->name, bytes, HRP_STAGE_CHUNK * (HRP_CHUNK_ALL - 1));
    *result = r == HCLIENT_OK ? hcl_stage_window(comm) : r;
    if (*result == HCLIENT_OK)
        *result = hcl_stage_make_room(comm, c, bytes, false);
    return true;
}

void hcl_stage_place(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_op *op,
                     struct hrp_desc *desc)
{
    struct hcl_stage *stage = &comm->stage;
    op->sends = c->sends;
    op->send = c->send;
    op->recv = c->recv;
    op->bytes = hrp_sig_bytes(&c->sig, comm->nranks);
    op->nchunks = (op->bytes + HRP_STAGE_CHUNK - 1) / HRP_STAGE_CHUNK;
    /* A small op of a stream has a page of the window for itself, see gpu_staged.c. */
    uint64_t align = op->gpu && op->bytes < HRP_PAGE ? HRP_PAGE : HRP_LINE;
    op->base = (stage->next + align - 1) / align * align;
    op->out = 0;
    atomic_store_explicit(&op->in, 0, memory_order_relaxed);
    stage->next = op->base + (op->bytes + align - 1) / align * align;
    struct hrp_bufref window = {.kind = HRP_BUF_WINDOW, .offset = op->base};
    desc->in = c->send_bytes > 0 ? window : (struct hrp_bufref){.kind = HRP_BUF_NONE};
    desc->out = window;
}

static hclient_result_t start_staged(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_op *op,
                                     bool *rings)
{
    (void)c;
    hcl_stage_queue(comm, op);
    *rings = hcl_stage_progress(comm) == HCL_STAGE_FED;
    return HCLIENT_OK;
}

const struct hcl_way hcl_way_staged = {
    .takes = takes_staged, .describe = hcl_stage_place, .start = start_staged, .in_stage = true};
