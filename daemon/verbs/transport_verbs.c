/* SPDX-License-Identifier: MIT */
/*
 * The verbs transport. A stream is a queue pair. DATA is written into the granted slot and announced by its frame in a
 * SEND behind the write on the same queue pair: when that message is here, so is the payload. An immediate value could
 * say no more than slot and generation, while the frame must be checked against the credit anyway; two work requests rung
 * by one doorbell cost what one does. Everything else travels in SENDs, copied through registered buffers (conn.h), so
 * that the caller's memory is free at once.
 *
 * Flow control: a message goes only against a buffer that the peer posted, so receiver-not-ready cannot happen.
 */
#include "daemon/verbs/vlink.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/log.h"

#define BATCH 16u
/* At most so many messages without a completion of their own: buffers come free in time, and most cost none. */
#define UNSIGNALED 8u
/* When nothing follows such messages for so long, a write of nothing asks whether they arrived. */
#define FENCE_NS UINT64_C(1000000000)
/* Completions handled before the agent turns to its other duties. */
#define POLL_ROUNDS 4u
#define POLL_BATCH 16
#define REGIONS_MAX 4096u

uint64_t hrd_vlink_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

/* The time of this turn: the clock is read once, however much is sent and completed in it. */
static uint64_t turn_now(struct vlink *l)
{
    if (!l->turn_ns)
        l->turn_ns = hrd_vlink_now();
    return l->turn_ns;
}

/* ---- regions ---------------------------------------------------------------------------------------------------- */

static void region_done(struct hrd_tx *tx, int err)
{
    (void)err;
    free(tx->owner);
}

static void verbs_send(struct hrd_link *base, struct hrd_tx *tx);

/* Goes the way of all frames on stream 0, hence before any CREDIT that names a slot in it. */
static void tell_region(const struct vlink *l, const struct hrd_vregion *r)
{
    struct note {
        struct hrd_tx tx;
        struct hrd_vregion r;
    } *n = calloc(1, sizeof(*n));
    if (!n)
        abort();
    n->r = *r;
    n->r.rail = (uint16_t)l->rail;
    n->tx =
        (struct hrd_tx){.payload = &n->r, .done = region_done, .owner = n}; /* frame type 0: not a frame */
    verbs_send(&l->rails[0]->base, &n->tx);
}

static int verbs_expose(struct hrd_link *base, uint64_t off, void *at, uint64_t len)
{
    struct vlink *l = (struct vlink *)base;
    struct region *r = calloc(1, sizeof(*r));
    char *why = l->base.refusal;
    if (!r || l->state == V_BROKEN) {
        free(r);
        return -1;
    }
    struct hrd_mr_source src = hrd_vlink_source(l, at, len);
    int err = hrd_mr_register(l->dev.v, l->c->pd, &l->c->memory, &src,
                              IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, &r->mr, why,
                              sizeof(l->base.refusal));
    if (err) {
        if (!l->warned)
            hrd_warn("no receive memory for the verbs link %s: %s", l->base.detail, why);
        l->warned = true;
        free(r);
        return err;
    }
    r->off = off;
    r->len = len;
    r->addr = (uintptr_t)at;
    r->next = l->own;
    l->own = r;
    tell_region(l,
                &(struct hrd_vregion){.off = off, .len = len, .addr = (uintptr_t)at, .rkey = r->mr.mr->rkey});
    return 0;
}

static void verbs_withdraw(struct hrd_link *base, uint64_t off, uint64_t len)
{
    struct vlink *l = (struct vlink *)base;
    struct region **pr = &l->own;
    while (*pr && ((*pr)->off != off || (*pr)->len != len))
        pr = &(*pr)->next;
    struct region *r = *pr;
    if (!r)
        return;
    *pr = r->next;
    hrd_mr_free(l->dev.v, &r->mr);
    free(r);
    tell_region(l, &(struct hrd_vregion){.off = off, .len = len, .withdrawn = 1});
}

static const struct region *find_region(const struct region *r, uint64_t off, uint64_t len)
{
    while (r && !(off >= r->off && off - r->off <= r->len && len <= r->len - (off - r->off)))
        r = r->next;
    return r;
}

bool hrd_vlink_reaches(const struct vlink *l, uint64_t slot, const void *payload, uint64_t len)
{
    return find_region(l->remote, slot, len) && hrd_vlink_payload(l, payload, len);
}

/* What the peer said. Nothing is believed that would matter to anybody but the peer: its keys reach its own memory. */
static const char *got_region(struct vlink *l, const char *at, uint32_t len)
{
    struct hrd_vregion v;
    if (len != sizeof(v))
        return "a region message of a wrong length";
    memcpy(&v, at, sizeof(v));
    if (v.rail >= l->nrails)
        return "a region of a rail that there is not";
    l = l->rails[v.rail];
    struct region **pr = &l->remote;
    while (*pr && ((*pr)->off != v.off || (*pr)->len != v.len))
        pr = &(*pr)->next;
    if (v.withdrawn) {
        struct region *r = *pr;
        if (!r || v.withdrawn != 1)
            return "a region withdrawn that was never announced";
        *pr = r->next;
        free(r);
        l->nremote--;
        return NULL;
    }
    if (*pr || v.len == 0 || v.off + v.len < v.off || l->nremote >= REGIONS_MAX)
        return "a region that cannot be";
    struct region *r = calloc(1, sizeof(*r));
    if (!r)
        abort();
    *r = (struct region){.off = v.off, .len = v.len, .addr = v.addr, .rkey = v.rkey, .next = l->remote};
    l->remote = r;
    l->nremote++;
    return NULL;
}

/* ---- send ------------------------------------------------------------------------------------------------------- */

/* Work requests that are handed to the device together. */
struct batch {
    struct vlink *l;
    unsigned queue, n;
    struct ibv_send_wr wr[BATCH];
    struct ibv_sge sge[BATCH];
};

/* The batch is empty afterwards, also when the link is no longer up: batch_add() counts on the room. */
static void batch_post(struct batch *b)
{
    struct ibv_send_wr *bad;
    unsigned n = b->n;
    b->n = 0;
    if (n == 0 || b->l->state != V_UP)
        return;
    for (unsigned i = 0; i < n; i++)
        b->wr[i].next = i + 1 < n ? &b->wr[i + 1] : NULL;
    int err = b->l->dev.v->post_send(b->l->c->q[b->queue].qp, b->wr, &bad);
    b->l->q[b->queue].posted_at = turn_now(b->l);
    if (err)
        hrd_vlink_broken_call(b->l, "posting a send", err);
}

static struct ibv_send_wr *batch_add(struct batch *b, const void *at, uint32_t len, uint32_t lkey)
{
    if (b->n == BATCH)
        batch_post(b);
    struct ibv_sge *sge = &b->sge[b->n];
    struct ibv_send_wr *wr = &b->wr[b->n++];
    *sge = (struct ibv_sge){.addr = (uintptr_t)at, .length = len, .lkey = lkey};
    *wr = (struct ibv_send_wr){.sg_list = sge, .num_sge = 1, .opcode = IBV_WR_SEND};
    b->l->q[b->queue].wrs++;
    b->l->q[b->queue].wrs_open++;
    return wr;
}

static bool room(const struct vqueue *q, unsigned wrs)
{
    return q->wrs + wrs <= HRD_VSEND_WRS && q->slots_used < HRD_VMSG_DEPTH;
}

/* What lies in a send buffer goes to the device. */
static void message_post(struct batch *b, uint32_t slot)
{
    struct vlink *l = b->l;
    struct vqueue *q = &l->q[b->queue];
    struct hrd_verbs_queue *cq = &l->c->q[b->queue];
    const struct kept *k = &q->kept[slot];
    if (k->kind != HRD_VMSG_CREDIT)
        q->credits--;
    q->slots_used++;
    q->slots_open++;
    struct ibv_send_wr *wr =
        batch_add(b, cq->tx + (size_t)slot * HRD_VMSG_BYTES, k->bytes, l->c->buffers_mr.mr->lkey);
    wr->wr_id = hrd_wr_id(b->queue, 0);
    if (k->bytes <= cq->inline_max)
        wr->send_flags |= IBV_SEND_INLINE;
    if (!k->tx && q->slots_open < UNSIGNALED)
        return;
    wr->send_flags |= IBV_SEND_SIGNALED;
    if (!q->flights)
        q->silent_since = turn_now(l);
    q->flight[(q->flight_first + q->flights++) % HRD_VSEND_WRS] =
        (struct flight){.wrs = (uint16_t)q->wrs_open, .slots = (uint16_t)q->slots_open, .tx = k->tx};
    q->wrs_open = q->slots_open = 0;
}

/* One message: header, frame (or NULL) and payload bytes. tx: to be done when this completes. The caller made sure of
   room, and of a credit unless it is a CREDIT. */
static void message(struct batch *b, uint8_t kind, const struct hrp_frame *f, const void *payload,
                    uint32_t len, struct hrd_tx *tx)
{
    struct vlink *l = b->l;
    struct vqueue *q = &l->q[b->queue];
    struct hrd_verbs_queue *cq = &l->c->q[b->queue];
    char *at = cq->tx + (size_t)q->slot * HRD_VMSG_BYTES;
    uint32_t head = f ? (uint32_t)sizeof(*f) : 0, bytes = (uint32_t)sizeof(struct hrd_vmsg) + head + len;
    struct hrd_vmsg m = {
        .magic = HRD_VMSG_MAGIC, .kind = kind, .credits = (uint16_t)q->give, .len = head + len};
    memcpy(at, &m, sizeof(m));
    if (f)
        memcpy(at + sizeof(m), f, sizeof(*f));
    if (len)
        memcpy(at + sizeof(m) + head, payload, len);
    q->give = 0;
    q->kept[q->slot] = (struct kept){.kind = kind, .bytes = bytes, .tx = tx};
    if (kind != HRD_VMSG_CREDIT)
        cq->sent++;
    message_post(b, q->slot);
    q->slot = (q->slot + 1) % HRD_VMSG_DEPTH;
}

void hrd_vlink_sent(struct vlink *l, struct hrd_tx *tx)
{
    tx->next = NULL;
    if (l->sent_last)
        l->sent_last->next = tx;
    else
        l->sent_first = tx;
    l->sent_last = tx;
}

/* The payload of a DATA frame into its slot. False: it cannot be, and the link is lost. */
static bool write_payload(struct batch *b, const struct hrd_tx *tx)
{
    struct vlink *l = b->l;
    const struct region *r = find_region(l->remote, tx->frame.slot, tx->frame.len);
    const struct ibv_mr *from = hrd_vlink_payload(l, tx->payload, tx->frame.len);
    if (!r) {
        hrd_vlink_broken(l, "the peer granted a slot outside of the memory that it opened");
        return false;
    }
    if (!from) {
        hrd_vlink_broken(l, "this daemon wanted to send from memory that is not its arena");
        return false;
    }
    struct ibv_send_wr *wr = batch_add(b, tx->payload, tx->frame.len, from->lkey);
    wr->opcode = IBV_WR_RDMA_WRITE;
    wr->wr_id = hrd_wr_id(b->queue, 0);
    wr->wr.rdma.remote_addr = r->addr + (tx->frame.slot - r->off);
    wr->wr.rdma.rkey = r->rkey;
    if (b->n == BATCH) { /* the two belong together: one doorbell */
        struct ibv_send_wr write = *wr;
        struct ibv_sge sge = *wr->sg_list;
        b->n--;
        batch_post(b);
        b->n = 1;
        b->sge[0] = sge;
        b->wr[0] = write;
        b->wr[0].sg_list = &b->sge[0];
    }
    return true;
}

/* DATA: the write, then the frame. False: no room yet. */
static bool send_placed(struct batch *b, struct hrd_tx *tx)
{
    if (!room(&b->l->q[b->queue], 2) || !write_payload(b, tx))
        return false;
    message(b, HRD_VMSG_PLACED, &tx->frame, NULL, 0, tx);
    return true;
}

/* Copies as much as there are buffers for; tx->sent counts payload bytes, plus one for the frame. True: all of it. */
static bool send_copied(struct batch *b, struct hrd_tx *tx)
{
    struct vqueue *q = &b->l->q[b->queue];
    if (tx->frame.type == 0) {
        message(b, HRD_VMSG_REGION, NULL, tx->payload, sizeof(struct hrd_vregion), NULL);
        return true;
    }
    while (q->credits > 0 && room(q, 1) && b->l->state == V_UP) {
        bool first = tx->sent == 0;
        uint32_t at = first ? 0 : (uint32_t)(tx->sent - 1), max = HRD_VMSG_BODY;
        if (first)
            max -= (uint32_t)sizeof(tx->frame);
        uint32_t n = tx->frame.len - at < max ? tx->frame.len - at : max;
        message(b, first ? HRD_VMSG_FRAME : HRD_VMSG_MORE, first ? &tx->frame : NULL,
                (const char *)tx->payload + at, n, NULL);
        tx->sent = (uint64_t)at + n + 1;
        if (at + n == tx->frame.len)
            return true;
    }
    return false;
}

static void flush_queue(struct vlink *l, unsigned i)
{
    struct vqueue *q = &l->q[i];
    struct batch b = {.l = l, .queue = i};
    while (q->first && q->credits > 0 && room(q, 1) && l->state == V_UP) {
        struct hrd_tx *tx = q->first;
        bool placed = tx->frame.type == HRP_FRAME_DATA && tx->frame.len > 0;
        if (!(placed ? send_placed(&b, tx) : send_copied(&b, tx)))
            break;
        q->first = tx->next;
        if (!q->first)
            q->last = NULL;
        if (tx->frame.type) {
            l->base.tx_frames++;
            l->base.tx_bytes += sizeof(tx->frame) + tx->frame.len;
        }
        if (!placed)
            hrd_vlink_sent(l, tx);
    }
    if (q->give >= HRD_VMSG_DEPTH / 2 && room(q, 1))
        message(&b, HRD_VMSG_CREDIT, NULL, NULL, 0, NULL);
    batch_post(&b);
    if (!q->first || q->credits)
        q->starved_since = 0;
    else if (!q->starved_since)
        q->starved_since = turn_now(l);
}

void hrd_vlink_report_sent(struct vlink *l)
{
    while (l->sent_first) {
        struct hrd_tx *tx = l->sent_first;
        l->sent_first = tx->next;
        if (!l->sent_first)
            l->sent_last = NULL;
        tx->done(tx, 0);
    }
}

static void verbs_send(struct hrd_link *base, struct hrd_tx *tx)
{
    struct vlink *l = (struct vlink *)base;
    struct vqueue *q = &l->q[tx->stream];
    tx->next = NULL;
    tx->sent = 0;
    if (q->last)
        q->last->next = tx;
    else
        q->first = tx;
    q->last = tx;
}

static void flush_all(struct vlink *l)
{
    for (unsigned i = 0; i < l->base.nstreams && l->state == V_UP; i++)
        if (l->q[i].first || l->q[i].give >= HRD_VMSG_DEPTH / 2)
            flush_queue(l, i);
    if (l->state != V_BROKEN)
        hrd_vlink_report_sent(l);
}

static void verbs_flush(struct hrd_link *base)
{
    struct vlink *l = (struct vlink *)base;
    l->turn_ns = 0;
    flush_all(l);
}

/* ---- receive ---------------------------------------------------------------------------------------------------- */

static const char *frame_end(struct vlink *l, unsigned i)
{
    struct vqueue *q = &l->q[i];
    const char *why = "frame refused";
    q->in_frame = false;
    l->base.rx_frames++;
    l->base.rx_bytes += sizeof(q->frame) + q->frame.len;
    return l->base.handler->arrived(&l->base, i, &q->frame, q->payload, &why) ? why : NULL;
}

static const char *payload_part(struct vlink *l, unsigned i, const char *at, uint32_t len)
{
    struct vqueue *q = &l->q[i];
    if (len > q->frame.len - q->got)
        return "more payload than its frame says";
    if (len)
        memcpy(q->payload + q->got, at, len);
    q->got += len;
    return q->got == q->frame.len ? frame_end(l, i) : NULL;
}

/* A frame: `placed` says that its payload was written, not sent. */
static const char *frame_begin(struct vlink *l, unsigned i, const char *at, uint32_t len, bool placed)
{
    struct vqueue *q = &l->q[i];
    const char *why = "malformed frame header";
    if (q->in_frame || len < sizeof(q->frame))
        return "a frame where none can begin";
    memcpy(&q->frame, at, sizeof(q->frame));
    if (hrp_frame_check(&q->frame))
        return why;
    if (placed != (q->frame.type == HRP_FRAME_DATA && q->frame.len > 0) ||
        (placed && len != sizeof(q->frame)))
        return "payload that came the wrong way";
    q->payload = NULL;
    q->got = 0;
    if (q->frame.len && !(q->payload = l->base.handler->place(&l->base, i, &q->frame, &why)))
        return why;
    if (!placed) {
        q->in_frame = true;
        return payload_part(l, i, at + sizeof(q->frame), len - (uint32_t)sizeof(q->frame));
    }
    /* The bytes are there already: where the frame says, and inside of what this peer can reach. */
    const struct region *r = find_region(l->own, q->frame.slot, q->frame.len);
    if (!r || (uintptr_t)q->payload != r->addr + (q->frame.slot - r->off))
        return "data for a slot that this peer was not given";
    return frame_end(l, i);
}

static const char *handle_message(struct vlink *l, unsigned i, const char *at, uint32_t bytes)
{
    struct vqueue *q = &l->q[i];
    struct hrd_vmsg m;
    if (bytes < sizeof(m))
        return "a message without a header";
    memcpy(&m, at, sizeof(m));
    if (m.magic != HRD_VMSG_MAGIC || m.len != bytes - sizeof(m) || m.reserved || m.reserved1)
        return "a malformed message header";
    if (q->credits + m.credits > HRD_VMSG_DEPTH)
        return "more buffers given back than were used";
    q->credits += m.credits;
    q->repost_counted += m.kind != HRD_VMSG_CREDIT;
    l->c->q[i].got += m.kind != HRD_VMSG_CREDIT;
    at += sizeof(m);
    switch (m.kind) {
    case HRD_VMSG_FRAME:
    case HRD_VMSG_PLACED:
        return frame_begin(l, i, at, m.len, m.kind == HRD_VMSG_PLACED);
    case HRD_VMSG_MORE:
        return q->in_frame && m.len ? payload_part(l, i, at, m.len) : "payload that belongs to no frame";
    case HRD_VMSG_REGION:
        return l->rail == 0 && i == 0 && !q->in_frame ? got_region(l, at, m.len)
                                                      : "a region message out of place";
    case HRD_VMSG_CREDIT:
        return m.len == 0 && m.credits ? NULL : "a credit message that gives nothing";
    default:
        return "a message of an unknown kind";
    }
}

static void handle_recv(struct vlink *l, const struct ibv_wc *wc)
{
    unsigned i = hrd_wr_queue(wc->wr_id);
    struct vqueue *q = &l->q[i];
    uint32_t slot = hrd_wr_slot(wc->wr_id);
    if (wc->opcode != IBV_WC_RECV || wc->wc_flags & IBV_WC_WITH_IMM) {
        hrd_vlink_broken(l,
                         "the peer broke the protocol: an immediate value, of which this protocol has none");
        return;
    }
    q->repost[q->reposts++] = slot;
    const char *why = handle_message(l, i, l->c->q[i].rx + (size_t)slot * HRD_VMSG_BYTES, wc->byte_len);
    if (why)
        hrd_vlink_broken(l, why);
}

static void handle_sent(struct vlink *l, unsigned i)
{
    struct vqueue *q = &l->q[i];
    if (!q->flights) {
        hrd_vlink_broken(l, "the device completed a work request that was never made");
        return;
    }
    struct flight *f = &q->flight[q->flight_first];
    q->flight_first = (q->flight_first + 1) % HRD_VSEND_WRS;
    q->flights--;
    q->silent_since = turn_now(l);
    q->wrs -= f->wrs;
    for (unsigned k = 0; k < f->slots; k++) {
        uint32_t slot = (q->slot + 2 * HRD_VMSG_DEPTH - q->slots_used--) % HRD_VMSG_DEPTH;
        l->c->q[i].acked += q->kept[slot].kind != HRD_VMSG_CREDIT;
    }
    if (f->tx)
        hrd_vlink_sent(l, f->tx);
}

static void repost(struct vlink *l, unsigned i)
{
    struct vqueue *q = &l->q[i];
    if (!q->reposts)
        return;
    int err = hrd_verbs_post_recv(l->c, i, q->repost, q->reposts);
    if (err) {
        hrd_vlink_broken_call(l, "posting a receive", err);
        return;
    }
    q->posted += q->reposts;
    q->give += q->repost_counted;
    q->reposts = q->repost_counted = 0;
}

void hrd_vlink_completion(struct vlink *l, const struct ibv_wc *wc)
{
    unsigned i = hrd_wr_queue(wc->wr_id);
    bool recv = wc->wr_id & HRD_WR_RECV;
    if (recv && l->q[i].posted > 0)
        l->q[i].posted--;
    if (wc->status != IBV_WC_SUCCESS)
        hrd_vlink_failed(l, wc);
    else if (recv)
        handle_recv(l, wc);
    else
        handle_sent(l, i);
}

static unsigned poll_completions(struct vlink *l)
{
    struct ibv_wc wc[POLL_BATCH];
    unsigned total = 0;
    for (unsigned round = 0; round < POLL_ROUNDS && l->state == V_UP; round++) {
        int n = l->dev.v->poll_cq(l->c->cq, POLL_BATCH, wc);
        if (n < 0)
            hrd_vlink_broken_call(l, "reading the completion queue", EIO);
        /* A failure in their midst leaves the rest to be drained: they are off the queue already. */
        for (int k = 0; k < n && l->state != V_BROKEN; k++)
            hrd_vlink_completion(l, &wc[k]);
        for (unsigned i = 0; i < l->base.nstreams && l->state == V_UP; i++)
            repost(l, i);
        total += n > 0 ? (unsigned)n : 0;
        if (n < POLL_BATCH)
            break;
    }
    return total;
}

static void check_starved(struct vlink *l)
{
    for (unsigned i = 0; i < l->base.nstreams && l->state == V_UP; i++) {
        uint64_t since = l->q[i].starved_since;
        if (since && turn_now(l) - since > l->c->stall_ns) {
            char text[128];
            snprintf(text, sizeof(text),
                     "the peer has given back no message buffer for %" PRIu64 " ms: it is stuck",
                     l->c->stall_ns / 1000000);
            hrd_vlink_broken(l, text);
        }
    }
}

/* A write of nothing behind messages that ask for no completion: its own one says that they arrived. */
static void post_fence(struct vlink *l, unsigned i)
{
    struct vqueue *q = &l->q[i];
    struct batch b = {.l = l, .queue = i};
    struct ibv_send_wr *wr = batch_add(&b, l->c->q[i].tx, 0, l->c->buffers_mr.mr->lkey);
    wr->opcode = IBV_WR_RDMA_WRITE;
    wr->wr_id = hrd_wr_id(i, 0);
    wr->send_flags = IBV_SEND_SIGNALED;
    q->silent_since = turn_now(l);
    q->flight[(q->flight_first + q->flights++) % HRD_VSEND_WRS] =
        (struct flight){.wrs = (uint16_t)q->wrs_open, .slots = (uint16_t)q->slots_open};
    q->wrs_open = q->slots_open = 0;
    batch_post(&b);
}

/* A device that tries for ever (retry_cnt 7 means that on soft-RoCE), or whose queue pair is stuck, reports nothing at
   all, so the time is taken here too: half of what the peer has before it counts as lost, to leave time for a new path. */
static void check_silent(struct vlink *l)
{
    for (unsigned i = 0; i < l->base.nstreams && l->state == V_UP; i++) {
        const struct vqueue *q = &l->q[i];
        if (!q->wrs)
            continue;
        uint64_t now = turn_now(l);
        if (!q->flights && now - q->posted_at > FENCE_NS)
            post_fence(l, i);
        else if (q->flights && now > q->silent_since && now - q->silent_since > l->c->stall_ns / 2) {
            char text[160];
            snprintf(text, sizeof(text),
                     "nothing sent on queue pair %u of %s port %u was acknowledged for %" PRIu64 " ms", i,
                     l->dev.name, l->dev.port, (now - q->silent_since) / 1000000);
            hrd_vlink_interrupt(&l->base, 0, text);
        }
    }
}

static unsigned verbs_poll(struct hrd_link *base)
{
    struct vlink *l = (struct vlink *)base;
    unsigned n = 0;
    l->turn_ns = 0;
    if (l->state == V_UP)
        n = poll_completions(l);
    if (l->state == V_DRAINING)
        n += hrd_vlink_drain(l);
    if (l->state != V_UP)
        return n;
    if (n)
        flush_all(l);
    check_starved(l);
    check_silent(l);
    return n;
}

static int verbs_arm(struct hrd_link *base)
{
    struct vlink *l = (struct vlink *)base;
    if (l->state != V_UP && l->state != V_DRAINING)
        return 0;
    int err = l->dev.v->req_notify_cq(l->c->cq);
    if (err) {
        hrd_vlink_broken_call(l, "arming the completion queue", err);
        return 1;
    }
    /* What came between the last look and the arming raises no event. */
    return verbs_poll(base) > 0;
}

static void completions_ready(struct hrd_pollable *p, uint32_t events)
{
    struct vlink *l = (struct vlink *)((char *)p - offsetof(struct vlink, completions));
    (void)events;
    if (l->state == V_BROKEN)
        return;
    while (l->dev.v->next_cq_event(l->c->channel) == 0)
        ;
    verbs_poll(&l->base);
}

/* ---- a new path ------------------------------------------------------------------------------------------------- */

/* Of the messages that were not acknowledged the peer got the first few; the rest goes again, in the same order, each from
   the buffer where it still lies. */
static void send_queue_again(struct vlink *l, unsigned i)
{
    struct vqueue *q = &l->q[i];
    struct hrd_verbs_queue *cq = &l->c->q[i];
    struct batch b = {.l = l, .queue = i};
    uint32_t n = q->slots_used, first = (q->slot + HRD_VMSG_DEPTH - n) % HRD_VMSG_DEPTH;
    uint64_t seq = cq->acked;
    q->credits = HRD_VMSG_DEPTH;
    q->give = 0;
    q->posted = HRD_VMSG_POSTED;
    q->reposts = q->repost_counted = 0;
    q->wrs = q->wrs_open = q->slots_open = q->slots_used = 0;
    q->flights = q->flight_first = 0;
    for (uint32_t k = 0; k < n; k++) {
        uint32_t slot = (first + k) % HRD_VMSG_DEPTH;
        struct kept *m = &q->kept[slot];
        bool credit = m->kind == HRD_VMSG_CREDIT; /* means nothing any more: all buffers are posted anew */
        if (!credit && ++seq <= l->c->remote.got[i]) {
            if (m->tx)
                hrd_vlink_sent(l, m->tx);
        } else if (!credit && l->state == V_UP && (!m->tx || write_payload(&b, m->tx))) {
            memset(cq->tx + (size_t)slot * HRD_VMSG_BYTES + offsetof(struct hrd_vmsg, credits), 0, 2);
            message_post(&b, slot);
        } else if (!credit || q->slots_used > 0) { /* its buffer lies between others that are in use */
            q->slots_used++;
            q->slots_open++;
        }
    }
    cq->acked = l->c->remote.got[i];
    batch_post(&b);
}

void hrd_vlink_send_again(struct vlink *l)
{
    l->turn_ns = 0;
    for (unsigned i = 0; i < l->base.nstreams; i++) {
        l->q[i].starved_since = 0;
        if (l->state == V_UP)
            send_queue_again(l, i);
    }
    flush_all(l);
}

/* ---- open, close ------------------------------------------------------------------------------------------------ */

void hrd_vlink_describe(struct vlink *l)
{
    const struct hrd_verbs_conn *c = l->c;
    char at[64];
    l->dev = c->dev;
    l->base.rate = c->peer_rate && c->peer_rate < c->dev.rate ? c->peer_rate : c->dev.rate;
    if (c->dev.global)
        snprintf(l->base.detail, sizeof(l->base.detail), "%.100s to %s", c->dev.text,
                 hrd_verbs_gid_text(&c->remote.gid, at, sizeof(at)));
    else
        snprintf(l->base.detail, sizeof(l->base.detail), "%.100s to LID %u", c->dev.text, c->remote.lid);
}

static struct hrd_link *verbs_open(struct hrd_conn *conn, struct hrd_poller *poller,
                                   const struct hrd_link_handler *handler, void *owner)
{
    struct hrd_verbs_conn *c = (struct hrd_verbs_conn *)conn;
    struct vlink *l = calloc(1, sizeof(*l));
    if (!l) {
        hrd_verbs_conn_free(c);
        errno = ENOMEM;
        return NULL;
    }
    l->base =
        (struct hrd_link){.tp = &hrd_transport_verbs, .handler = handler, .owner = owner, .nstreams = c->n};
    l->poller = poller;
    l->rails[0] = l;
    l->nrails = 1;
    l->c = c;
    hrd_vlink_describe(l);
    for (unsigned i = 0; i < c->n; i++) {
        l->q[i].credits = HRD_VMSG_DEPTH;
        l->q[i].posted = HRD_VMSG_POSTED;
    }
    l->completions = (struct hrd_pollable){.ready = completions_ready, .fd = c->channel->fd};
    l->events = (struct hrd_pollable){.ready = hrd_vlink_events, .fd = c->ctx->async_fd};
    if (hrd_poller_add(poller, &l->completions, EPOLLIN) || hrd_poller_add(poller, &l->events, EPOLLIN)) {
        int err = errno;
        hrd_verbs_conn_free(c); /* closing a descriptor takes it out of the epoll set */
        free(l);
        errno = err;
        return NULL;
    }
    return &l->base;
}

static void free_regions(const struct hrd_verbs *v, struct region *r)
{
    while (r) {
        struct region *next = r->next;
        hrd_mr_free(v, &r->mr);
        free(r);
        r = next;
    }
}

static void cancel(struct hrd_tx *tx)
{
    while (tx) {
        struct hrd_tx *next = tx->next;
        tx->done(tx, -ECANCELED);
        tx = next;
    }
}

static void verbs_close(struct hrd_link *base)
{
    struct vlink *l = (struct vlink *)base;
    const struct hrd_verbs *v = l->dev.v;
    if (l->state == V_UP || l->state == V_DRAINING)
        hrd_poller_del(l->poller, &l->completions);
    if (l->state != V_BROKEN)
        hrd_poller_del(l->poller, &l->events);
    l->state = V_BROKEN;
    /* Only without its queue pairs does the device surely let go of payloads that it is sending and of slots that the peer
       is writing. */
    for (unsigned i = 0; i < l->c->n; i++)
        if (l->c->q[i].qp)
            v->destroy_qp(l->c->q[i].qp);
    for (unsigned i = 0; i < l->c->n; i++)
        l->c->q[i].qp = NULL;
    free_regions(v, l->own);
    free_regions(v, l->remote);
    l->own = l->remote = NULL;
    hrd_vlink_free_memory(l);
    hrd_vlink_report_sent(l);
    for (unsigned i = 0; i < l->base.nstreams; i++) {
        struct vqueue *q = &l->q[i];
        for (uint32_t k = 0; k < q->slots_used; k++) {
            struct kept *m = &q->kept[(q->slot + 2 * HRD_VMSG_DEPTH - q->slots_used + k) % HRD_VMSG_DEPTH];
            if (m->tx)
                m->tx->done(m->tx, -ECANCELED);
        }
        cancel(q->first);
    }
    hrd_verbs_conn_free(l->c);
    free(l);
}

const struct hrd_transport hrd_transport_verbs = {
    .name = "verbs",
    .caps = HRD_TP_RDMA,
    .open = verbs_open,
    .send = verbs_send,
    .flush = verbs_flush,
    .close = verbs_close,
    .poll = verbs_poll,
    .arm = verbs_arm,
    .interrupt = hrd_vlink_interrupt,
    .resume = hrd_vlink_resume,
    .expose = verbs_expose,
    .withdraw = verbs_withdraw,
    .add_memory = hrd_vlink_add_memory,
    .drop_memory = hrd_vlink_drop_memory,
};
