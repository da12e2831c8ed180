/* SPDX-License-Identifier: MIT */
/*
 * From the submission rings to checked posts. Everything read here was written by a client that may be hostile: a
 * descriptor is copied once, then checked; what is wrong with it ends the client's session and nothing else. (The
 * library refuses bad arguments in words long before; what arrives here broken was forged.)
 */
#include "daemon/agent/types.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/ring.h"

#define STREAM_ALIGN 128u

void hrd_session_fault(struct asession *s, const char *fmt, ...)
{
    if (s->faulted)
        return;
    s->faulted = true;
    char text[SENTENCE];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    hrd_agent_emit(s->a, HRD_EV_SESSION_FAULT, s->sid, 0, 0, HRP_PROTOCOL, text);
}

struct abuffer *hrd_session_buffer(struct asession *s, uint32_t id)
{
    struct abuffer *b = s->buffer[id % BUFFER_BUCKETS];
    while (b && b->id != id)
        b = b->next;
    return b;
}

void hrd_buffer_settle(struct asession *s, struct abuffer *b)
{
    if (!b->dropping || b->users)
        return;
    struct abuffer **pb = &s->buffer[b->id % BUFFER_BUCKETS];
    while (*pb != b)
        pb = &(*pb)->next;
    *pb = b->next;
    hrd_agent_emit(s->a, HRD_EV_BUFFER_GONE, s->sid, 0, b->id, 0, NULL);
    free(b);
}

static uint64_t bytes_in(const struct acomm *c, const struct hrp_sig *sig, uint32_t rank)
{
    uint64_t one = sig->count * hrp_dtype_size(sig->dtype);
    switch (sig->coll) {
    case HRP_REDUCE_SCATTER:
        return one * c->nranks;
    case HRP_BROADCAST:
        return rank == sig->root ? one : 0;
    default:
        return one;
    }
}

static uint64_t bytes_out(const struct acomm *c, const struct hrp_sig *sig)
{
    uint64_t one = sig->count * hrp_dtype_size(sig->dtype);
    return sig->coll == HRP_ALL_GATHER ? one * c->nranks : one;
}

enum resolved { RESOLVED, NOT_YET, BAD };

static enum resolved resolve(struct arank *r, const struct hrp_bufref *ref, uint64_t bytes,
                             struct hrd_span *span, struct abuffer **buffer)
{
    *span = (struct hrd_span){.gpu = HRD_HOST_MEMORY};
    *buffer = NULL;
    if (bytes == 0)
        return RESOLVED;
    if (ref->kind == HRP_BUF_SHARED) {
        struct abuffer *b = hrd_session_buffer(r->s, ref->id);
        if (!b)
            return NOT_YET;
        if (b->dropping || ref->offset > b->bytes || bytes > b->bytes - ref->offset)
            return BAD;
        *buffer = b;
        *span = (struct hrd_span){.base = b->base, .off = ref->offset, .gpu = b->gpu};
        return RESOLVED;
    }
    if (ref->kind == HRP_BUF_WINDOW) {
        if (!r->window)
            return NOT_YET;
        if (ref->offset % STREAM_ALIGN || ref->offset > (UINT64_C(1) << 62))
            return BAD;
        *span = (struct hrd_span){
            .base = r->window, .off = ref->offset, .wrap = r->window_bytes, .gpu = HRD_HOST_MEMORY};
        return RESOLVED;
    }
    return BAD;
}

static enum resolved resolve_post(struct arank *r, const struct hrp_desc *d, struct apost *post)
{
    const struct acomm *c = r->c;
    *post = (struct apost){.posted = true,
                           .stream = d->flags & HRP_DESC_STREAM,
                           .dtype = d->sig.dtype,
                           .stream_bytes = hrp_sig_bytes(&d->sig, c->nranks),
                           .timeout_ms = d->timeout_ms,
                           .overlap = d->flags & HRP_DESC_OVERLAP_COMPUTE ? HRP_OVERLAP_COMPUTE
                                      : d->flags & HRP_DESC_OVERLAP_IDLE  ? HRP_OVERLAP_IDLE
                                                                          : c->config.overlap};
    enum resolved in = resolve(r, &d->in, bytes_in(c, &d->sig, r->rank), &post->in, &post->in_buffer);
    enum resolved out = resolve(r, &d->out, bytes_out(c, &d->sig), &post->out, &post->out_buffer);
    if (in == BAD || out == BAD)
        return BAD;
    if (in == NOT_YET || out == NOT_YET)
        return NOT_YET;
    post->staged = post->in.wrap || post->out.wrap;
    if (!post->staged)
        return RESOLVED;
    /* Staged ops are in place in their stream, so a side that is staged alone would lie at an unknown place. */
    if (post->in.wrap && post->out.wrap && post->in.off != post->out.off)
        return BAD;
    if ((post->in.base && !post->in.wrap) || (post->out.base && !post->out.wrap))
        return BAD;
    if (hrp_sig_bytes(&d->sig, c->nranks) / HRP_STAGE_CHUNK >= HRP_CHUNK_ALL)
        return BAD;
    return RESOLVED;
}

static void use_buffers(struct apost *post)
{
    if (post->in_buffer)
        post->in_buffer->users++;
    if (post->out_buffer)
        post->out_buffer->users++;
}

/* The op's deadline runs from here, unless an earlier rank's does. */
static void start_clock(struct aop *op, const struct apost *post)
{
    struct acomm *c = op->c;
    if (op->start_ns)
        return;
    op->start_ns = c->a->now;
    uint32_t ms = post->timeout_ms ? post->timeout_ms : c->config.op_timeout_ms;
    op->deadline_ns = ms == 0 || ms == UINT32_MAX ? 0 : op->start_ns + ms * UINT64_C(1000000);
}

/* The post is checked; gives it to its op. */
static void deliver(struct arank *r, const struct hrp_desc *d, const struct apost *post)
{
    struct acomm *c = r->c;
    if (c->failed) {
        hrd_complete_failed(r, d->op, post, c->status, HRP_SCOPE_COMM, c->text);
        return;
    }
    if (d->op > c->done_wm + HRD_OPS_AHEAD) { /* ops that fail do not wait for a rank that posts none */
        hrd_comm_fail(c, HRP_TIMEOUT, true,
                      "rank %u posted op %" PRIu64 ", but a rank on node %s has not posted op %" PRIu64
                      ", which failed with those behind it; no more than %u ops are kept for it",
                      r->rank, d->op, c->a->node_name, c->done_wm + 1, HRD_OPS_AHEAD);
        hrd_complete_failed(r, d->op, post, c->status, HRP_SCOPE_COMM, c->text);
        return;
    }
    struct aop *op = hrd_op_get(c, d->op);
    if (!op) {
        hrd_session_fault(r->s, "rank %u posted op %" PRIu64 " again", r->rank, d->op);
        return;
    }
    if (op->state == OP_FAILED) { /* the same answer as everybody else's, see DESIGN: op scope */
        op->nposted++;
        op->post[r->index] = (struct apost){.posted = true, .answered = true};
        hrd_complete_failed(r, d->op, post, op->status, HRP_SCOPE_OP, op->text);
        hrd_op_advance(c);
        return;
    }
    op->post[r->index] = *post;
    use_buffers(&op->post[r->index]);
    if (++op->nposted == 1)
        op->posted_ns = now_ns();
    if (op->nposted == c->nlocal)
        op->ended_ns[HRD_STAGE_POST] = now_ns();
    /* A stream may be behind hours of the job's work: its rank is ready when the stream says so. */
    if (post->stream) {
        op->post[r->index].waiting = true;
        c->streams++;
        c->a->streams++;
    } else {
        start_clock(op, post);
    }
    if (op->state == OP_FAILING)
        return;
    if (c->left_op < d->op) {
        hrd_comm_fail(c, HRP_RANK_LOST, true,
                      "rank %u left the communicator after op %" PRIu64 ", so op %" PRIu64
                      " of rank %u cannot complete; all ranks must post the same ops before any destroys it",
                      c->left_rank, c->left_op, d->op, r->rank);
        return;
    }
    if (!op->have_sig) {
        op->have_sig = true;
        op->sig = d->sig;
        op->sig_rank = r->rank;
    } else if (!hrd_op_agrees(op, &d->sig, r->rank, c->node)) {
        return;
    }
    /* An op that was reported must not run: it could succeed here before node 0 says that it fails. */
    if (op->nposted == c->nlocal && !op->reported)
        hrd_op_posted(op);
}

static bool flags_ok(uint32_t flags)
{
    const uint32_t both = HRP_DESC_OVERLAP_COMPUTE | HRP_DESC_OVERLAP_IDLE;
    return (flags & ~HRP_DESC_FLAGS) == 0 && (flags & both) != both;
}

/* 1: took one; 0: nothing (or parked); -1: fault */
static int take_one(struct arank *r)
{
    struct hrp_desc d;
    struct apost post;
    int n = hrp_ring_peek(r->area, r->head, &d);
    if (n == 0)
        return 0;
    if (n < 0) {
        hrd_session_fault(r->s, "rank %u: the submission ring's tail is impossible", r->rank);
        return -1;
    }
    struct acomm *c = r->c;
    if (d.op != r->posted + 1 || !flags_ok(d.flags) || hrp_sig_check(&d.sig, c->nranks)) {
        hrd_session_fault(r->s, "rank %u: malformed descriptor for op %" PRIu64 " (expected op %" PRIu64 ")",
                          r->rank, d.op, r->posted + 1);
        return -1;
    }
    struct aop *older = d.op > HRP_OP_SLOTS ? hrd_op_find(c, d.op - HRP_OP_SLOTS) : NULL;
    if (older && older->state != OP_DONE && !older->post[r->index].answered) {
        hrd_session_fault(r->s, "rank %u posted op %" PRIu64 " into a slot whose op is not complete", r->rank,
                          d.op);
        return -1;
    }
    switch (resolve_post(r, &d, &post)) {
    case BAD:
        hrd_session_fault(r->s, "rank %u: op %" PRIu64 " names memory outside of what it registered", r->rank,
                          d.op);
        return -1;
    case NOT_YET:
        if (!r->parked_ns)
            r->parked_ns = c->a->now;
        return 0;
    case RESOLVED:
        break;
    }
    r->parked_ns = 0;
    r->posted++;
    hrp_ring_take(r->area, &r->head);
    deliver(r, &d, &post);
    return 1;
}

void hrd_ingest_session(struct asession *s)
{
    struct arank *next;
    for (struct arank *r = s->ranks; r && !s->faulted; r = next) {
        next = r->next_in_session; /* a failing comm may let r go */
        struct acomm *c = r->c;
        /* Not until it is empty: a client may push as fast as its posts are answered, and others wait. */
        unsigned n = 0;
        while (n < HRP_OP_SLOTS && !r->left && !r->leaving && take_one(r) > 0)
            n++;
        if (n == HRP_OP_SLOTS)
            s->seen_submits--; /* the next turn looks again */
        if ((c->ops || c->spoils) && hrd_ingest_ready(c))
            s->a->work_to_admit = true;
        hrd_comm_settle(c);
    }
}

bool hrd_ingest_ready(struct acomm *c)
{
    bool moved = c->spoils && hrd_spoil_look(c);
    for (struct aop *op = c->ops; op; op = op->next) {
        if (op->state != OP_WAITING && op->state != OP_RUNNING)
            continue;
        for (uint32_t i = 0; i < c->nlocal; i++) {
            struct apost *p = &op->post[i];
            struct arank *r = &c->local[i];
            if (!p->posted || (!p->staged && !p->waiting) || r->left)
                continue;
            uint64_t ready =
                atomic_load_explicit(&r->area->flags[op->op % HRP_OP_SLOTS].ready, memory_order_acquire);
            if (ready >> HRP_CHUNK_BITS != op->op)
                continue;
            uint64_t chunks = ready & HRP_CHUNK_ALL;
            uint64_t bytes = chunks == HRP_CHUNK_ALL ? UINT64_MAX : chunks * HRP_STAGE_CHUNK;
            if (bytes <= p->ready_bytes)
                continue;
            p->ready_bytes = bytes;
            start_clock(op, p);
            if (bytes == UINT64_MAX)
                hrd_complete_unwatch(c, p);
            moved = true;
        }
    }
    return moved;
}
