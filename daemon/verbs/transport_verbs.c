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
#include "daemon/verbs/conn.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/log.h"
#include "daemon/poller.h"

#define POSTED (HRD_VMSG_DEPTH + HRD_VMSG_SPARE)
#define BATCH 16u
/* At most so many messages without a completion of their own: buffers come free in time, and most cost none. */
#define UNSIGNALED 8u
/* Completions handled before the agent turns to its other duties. */
#define POLL_ROUNDS 4u
#define POLL_BATCH 16
#define REGIONS_MAX 4096u

/* A work request with a completion: it stands for all before it. */
struct flight {
    uint16_t wrs, slots;
    struct hrd_tx *tx; /* its payload is free when this completes */
};

struct vqueue {
    struct hrd_tx *first, *last;
    unsigned credits;       /* buffers at the peer that this end may use */
    unsigned give;          /* posted again, to be given back */
    uint64_t starved_since; /* ns; 0: not waiting for credits */
    /* send side: buffers are used round robin, flights complete in order */
    uint32_t slot, slots_used;
    unsigned wrs, wrs_open, slots_open; /* outstanding; of them behind the last flight */
    struct flight flight[HRD_VSEND_WRS];
    uint32_t flight_first, flights;
    /* receive side */
    bool in_frame;
    struct hrp_frame frame;
    char *payload;
    uint32_t got;
    uint32_t repost[POSTED];
    unsigned reposts, repost_counted;
};

struct region {
    uint64_t off, len, addr;
    uint32_t rkey;
    struct hrd_mr mr; /* of own regions */
    struct region *next;
};

struct vlink {
    struct hrd_link base;
    struct hrd_poller *poller;
    struct hrd_verbs_conn *c;
    struct hrd_pollable completions, events;
    bool broken, warned;
    uint64_t port_down; /* ns; 0: up */
    struct region *own, *remote;
    unsigned nremote;
    struct hrd_tx *sent_first, *sent_last; /* done() to be called */
    struct vqueue q[HRD_VERBS_QUEUES_MAX];
};

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

/* ---- the end of a link ------------------------------------------------------------------------------------------ */

static void broken(struct vlink *l, const char *why)
{
    char text[512];
    if (l->broken)
        return;
    l->broken = true;
    hrd_poller_del(l->poller, &l->completions);
    hrd_poller_del(l->poller, &l->events);
    if (l->port_down)
        snprintf(text, sizeof(text), "%s; port %u of %s went down %" PRIu64 " ms ago", why, l->c->dev.port,
                 l->c->dev.name, (now_ns() - l->port_down) / 1000000);
    l->base.handler->lost(&l->base, l->port_down ? text : why);
}

static void read_events(struct vlink *l, char *fatal, size_t len);

/* A queue pair failed. The first completion that is not merely flushed says why; `hint` stands in for it. */
static void broken_by_device(struct vlink *l, const struct ibv_wc *first, const char *hint)
{
    struct ibv_wc wc;
    char text[400], event[200] = "";
    bool found = first && first->status != IBV_WC_WR_FLUSH_ERR;
    if (found)
        wc = *first;
    for (unsigned i = 0; !found && i < 4 * HRD_VSEND_WRS; i++) {
        if (l->c->dev.v->poll_cq(l->c->cq, 1, &wc) <= 0)
            break;
        found = wc.status != IBV_WC_SUCCESS && wc.status != IBV_WC_WR_FLUSH_ERR;
    }
    read_events(l, event, sizeof(event));
    if (found)
        hrd_verbs_wc_text(l->c, &wc, text, sizeof(text));
    else if (hint || event[0])
        snprintf(text, sizeof(text), "%s", hint ? hint : event);
    else
        snprintf(text, sizeof(text), "a queue pair of %s failed without saying why", l->c->dev.name);
    broken(l, text);
}

static void broken_call(struct vlink *l, const char *what, int err)
{
    char text[160];
    snprintf(text, sizeof(text), "%s failed on %s: %s", what, l->c->dev.name, strerror(err));
    broken(l, text);
}

/* ---- regions ---------------------------------------------------------------------------------------------------- */

static void region_done(struct hrd_tx *tx, int err)
{
    (void)err;
    free(tx->owner);
}

static void verbs_send(struct hrd_link *base, struct hrd_tx *tx);

/* Goes the way of all frames on stream 0, hence before any CREDIT that names a slot in it. */
static void tell_region(struct vlink *l, const struct hrd_vregion *r)
{
    struct note {
        struct hrd_tx tx;
        struct hrd_vregion r;
    } *n = calloc(1, sizeof(*n));
    if (!n)
        abort();
    n->r = *r;
    n->tx =
        (struct hrd_tx){.payload = &n->r, .done = region_done, .owner = n}; /* frame type 0: not a frame */
    verbs_send(&l->base, &n->tx);
}

static int verbs_expose(struct hrd_link *base, uint64_t off, void *at, uint64_t len)
{
    struct vlink *l = (struct vlink *)base;
    struct region *r = calloc(1, sizeof(*r));
    char why[400];
    if (!r || l->broken) {
        free(r);
        return -1;
    }
    struct hrd_mr_source src = {.addr = at, .len = len};
    int err = hrd_mr_register(l->c->dev.v, l->c->pd, &l->c->memory, &src,
                              IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, &r->mr, why, sizeof(why));
    if (err) {
        if (!l->warned)
            hrd_warn("no receive memory for the verbs link %s: %s", l->base.detail, why);
        l->warned = true;
        free(r);
        return err;
    }
    r->off = off;
    r->len = len;
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
    hrd_mr_free(l->c->dev.v, &r->mr);
    free(r);
    tell_region(l, &(struct hrd_vregion){.off = off, .len = len, .withdrawn = 1});
}

static const struct region *find_region(const struct region *r, uint64_t off, uint64_t len)
{
    while (r && !(off >= r->off && off - r->off <= r->len && len <= r->len - (off - r->off)))
        r = r->next;
    return r;
}

/* What the peer said. Nothing is believed that would matter to anybody but the peer: its keys reach its own memory. */
static const char *got_region(struct vlink *l, const char *at, uint32_t len)
{
    struct hrd_vregion v;
    if (len != sizeof(v))
        return "a region message of a wrong length";
    memcpy(&v, at, sizeof(v));
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

static void batch_post(struct batch *b)
{
    struct ibv_send_wr *bad;
    if (b->n == 0 || b->l->broken)
        return;
    for (unsigned i = 0; i < b->n; i++)
        b->wr[i].next = i + 1 < b->n ? &b->wr[i + 1] : NULL;
    int err = b->l->c->dev.v->post_send(b->l->c->q[b->queue].qp, b->wr, &bad);
    b->n = 0;
    if (err)
        broken_call(b->l, "posting a send", err);
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
    if (kind != HRD_VMSG_CREDIT)
        q->credits--;
    q->slot = (q->slot + 1) % HRD_VMSG_DEPTH;
    q->slots_used++;
    q->slots_open++;
    struct ibv_send_wr *wr = batch_add(b, at, bytes, l->c->buffers_mr.mr->lkey);
    wr->wr_id = hrd_wr_id(b->queue, 0);
    if (bytes <= cq->inline_max)
        wr->send_flags |= IBV_SEND_INLINE;
    if (!tx && q->slots_open < UNSIGNALED)
        return;
    wr->send_flags |= IBV_SEND_SIGNALED;
    q->flight[(q->flight_first + q->flights++) % HRD_VSEND_WRS] =
        (struct flight){.wrs = (uint16_t)q->wrs_open, .slots = (uint16_t)q->slots_open, .tx = tx};
    q->wrs_open = q->slots_open = 0;
}

static void sent(struct vlink *l, struct hrd_tx *tx)
{
    tx->next = NULL;
    if (l->sent_last)
        l->sent_last->next = tx;
    else
        l->sent_first = tx;
    l->sent_last = tx;
}

/* DATA: the write, then the frame. False: no room yet. */
static bool send_placed(struct batch *b, struct hrd_tx *tx)
{
    struct vlink *l = b->l;
    const struct hrd_verbs_conn *c = l->c;
    const struct region *r = find_region(l->remote, tx->frame.slot, tx->frame.len);
    const char *at = tx->payload;
    if (!room(&l->q[b->queue], 2))
        return false;
    if (!r) {
        broken(l, "the peer granted a slot outside of the memory that it opened");
        return false;
    }
    if (at < c->arena || (uint64_t)(at - c->arena) + tx->frame.len > c->arena_len) {
        broken(l, "this daemon wanted to send from memory that is not its arena");
        return false;
    }
    struct ibv_send_wr *wr = batch_add(b, at, tx->frame.len, c->arena_mr.mr->lkey);
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
    while (q->credits > 0 && room(q, 1)) {
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
    while (q->first && q->credits > 0 && room(q, 1) && !l->broken) {
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
            sent(l, tx);
    }
    if (q->give >= HRD_VMSG_DEPTH / 2 && room(q, 1))
        message(&b, HRD_VMSG_CREDIT, NULL, NULL, 0, NULL);
    batch_post(&b);
    if (!q->first || q->credits)
        q->starved_since = 0;
    else if (!q->starved_since)
        q->starved_since = now_ns();
}

static void report_sent(struct vlink *l)
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
    for (unsigned i = 0; i < l->base.nstreams && !l->broken; i++)
        if (l->q[i].first || l->q[i].give >= HRD_VMSG_DEPTH / 2)
            flush_queue(l, i);
    if (!l->broken)
        report_sent(l);
}

static void verbs_flush(struct hrd_link *base)
{
    flush_all((struct vlink *)base);
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
    if (q->payload != l->c->arena + q->frame.slot || !find_region(l->own, q->frame.slot, q->frame.len))
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
    at += sizeof(m);
    switch (m.kind) {
    case HRD_VMSG_FRAME:
    case HRD_VMSG_PLACED:
        return frame_begin(l, i, at, m.len, m.kind == HRD_VMSG_PLACED);
    case HRD_VMSG_MORE:
        return q->in_frame && m.len ? payload_part(l, i, at, m.len) : "payload that belongs to no frame";
    case HRD_VMSG_REGION:
        return i == 0 && !q->in_frame ? got_region(l, at, m.len) : "a region message out of place";
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
        broken(l, "the peer broke the protocol: an immediate value, of which this protocol has none");
        return;
    }
    q->repost[q->reposts++] = slot;
    const char *why = handle_message(l, i, l->c->q[i].rx + (size_t)slot * HRD_VMSG_BYTES, wc->byte_len);
    if (why)
        broken(l, why);
}

static void handle_sent(struct vlink *l, unsigned i)
{
    struct vqueue *q = &l->q[i];
    if (!q->flights) {
        broken(l, "the device completed a work request that was never made");
        return;
    }
    struct flight *f = &q->flight[q->flight_first];
    q->flight_first = (q->flight_first + 1) % HRD_VSEND_WRS;
    q->flights--;
    q->wrs -= f->wrs;
    q->slots_used -= f->slots;
    if (f->tx)
        sent(l, f->tx);
}

static void repost(struct vlink *l, unsigned i)
{
    struct vqueue *q = &l->q[i];
    if (!q->reposts)
        return;
    int err = hrd_verbs_post_recv(l->c, i, q->repost, q->reposts);
    if (err) {
        broken_call(l, "posting a receive", err);
        return;
    }
    q->give += q->repost_counted;
    q->reposts = q->repost_counted = 0;
}

static unsigned poll_completions(struct vlink *l)
{
    struct ibv_wc wc[POLL_BATCH];
    unsigned total = 0;
    for (unsigned round = 0; round < POLL_ROUNDS && !l->broken; round++) {
        int n = l->c->dev.v->poll_cq(l->c->cq, POLL_BATCH, wc);
        if (n < 0)
            broken_call(l, "reading the completion queue", EIO);
        for (int k = 0; k < n && !l->broken; k++) {
            if (wc[k].status != IBV_WC_SUCCESS)
                broken_by_device(l, &wc[k], NULL);
            else if (wc[k].wr_id & HRD_WR_RECV)
                handle_recv(l, &wc[k]);
            else
                handle_sent(l, hrd_wr_queue(wc[k].wr_id));
        }
        for (unsigned i = 0; i < l->base.nstreams && !l->broken; i++)
            repost(l, i);
        total += n > 0 ? (unsigned)n : 0;
        if (n < POLL_BATCH)
            break;
    }
    return total;
}

static void check_starved(struct vlink *l)
{
    for (unsigned i = 0; i < l->base.nstreams && !l->broken; i++) {
        uint64_t since = l->q[i].starved_since;
        if (since && now_ns() - since > l->c->stall_ns) {
            char text[128];
            snprintf(text, sizeof(text),
                     "the peer has given back no message buffer for %" PRIu64 " ms: it is stuck",
                     l->c->stall_ns / 1000000);
            broken(l, text);
        }
    }
}

static unsigned verbs_poll(struct hrd_link *base)
{
    struct vlink *l = (struct vlink *)base;
    if (l->broken)
        return 0;
    unsigned n = poll_completions(l);
    if (n && !l->broken)
        flush_all(l);
    if (!l->broken)
        check_starved(l);
    return n;
}

static int verbs_arm(struct hrd_link *base)
{
    struct vlink *l = (struct vlink *)base;
    if (l->broken)
        return 0;
    int err = l->c->dev.v->req_notify_cq(l->c->cq);
    if (err) {
        broken_call(l, "arming the completion queue", err);
        return 1;
    }
    /* What came between the last look and the arming raises no event. */
    return verbs_poll(base) > 0;
}

static void completions_ready(struct hrd_pollable *p, uint32_t events)
{
    struct vlink *l = (struct vlink *)((char *)p - offsetof(struct vlink, completions));
    (void)events;
    if (l->broken)
        return;
    while (l->c->dev.v->next_cq_event(l->c->channel) == 0)
        ;
    verbs_poll(&l->base);
}

/* ---- asynchronous events ---------------------------------------------------------------------------------------- */

static bool gid_changed(struct vlink *l)
{
    const struct hrd_verbs_device *d = &l->c->dev;
    struct ibv_gid_entry e;
    if (!d->global)
        return false;
    return d->v->query_gid(l->c->ctx, d->port, d->gid_index, &e) != 0 ||
           memcmp(&e.gid, &d->gid, sizeof(e.gid)) != 0;
}

/* One event. Something in fatal: the link cannot go on. */
static void on_event(struct vlink *l, const struct ibv_async_event *ev, char *fatal, size_t len)
{
    const struct hrd_verbs_device *d = &l->c->dev;
    char at[64];
    bool port = ev->element.port_num == d->port;
    switch (ev->event_type) {
    case IBV_EVENT_PORT_ERR: /* a short flap is ridden out by the device's retries */
        if (port && !l->port_down) {
            l->port_down = now_ns();
            hrd_warn("port %u of %s went down; the verbs link %s waits for it", d->port, d->name,
                     l->base.detail);
        }
        return;
    case IBV_EVENT_PORT_ACTIVE:
        if (port && l->port_down)
            hrd_notice("port %u of %s is up again after %" PRIu64 " ms", d->port, d->name,
                       (now_ns() - l->port_down) / 1000000);
        if (port)
            l->port_down = 0;
        return;
    case IBV_EVENT_GID_CHANGE:
        if (port && gid_changed(l))
            snprintf(fatal, len, "GID %u of %s is no longer %s: the address of its interface changed",
                     d->gid_index, d->name, hrd_verbs_gid_text(&d->gid, at, sizeof(at)));
        return;
    case IBV_EVENT_LID_CHANGE:
        if (port && !d->ethernet)
            snprintf(fatal, len, "the subnet manager gave port %u of %s another LID", d->port, d->name);
        return;
    case IBV_EVENT_DEVICE_FATAL:
        snprintf(fatal, len, "%s reports a fatal error (DEVICE_FATAL): see the kernel log", d->name);
        return;
    case IBV_EVENT_CQ_ERR:
        snprintf(fatal, len, "the completion queue of %s overran (CQ_ERR)", d->name);
        return;
    case IBV_EVENT_QP_ACCESS_ERR:
        snprintf(fatal, len, "the peer wrote where it may not (QP_ACCESS_ERR on %s)", d->name);
        return;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
        snprintf(fatal, len, "a queue pair of %s failed (%s)", d->name, hrd_verbs_event_name(ev->event_type));
        return;
    default:
        hrd_debug("%s: %s", d->name, hrd_verbs_event_name(ev->event_type));
        return;
    }
}

static void read_events(struct vlink *l, char *fatal, size_t len)
{
    struct ibv_async_event ev;
    for (unsigned i = 0; i < 64 && l->c->dev.v->next_async_event(l->c->ctx, &ev) == 0; i++)
        on_event(l, &ev, fatal, len);
}

static void events_ready(struct hrd_pollable *p, uint32_t events)
{
    struct vlink *l = (struct vlink *)((char *)p - offsetof(struct vlink, events));
    char fatal[200] = "";
    (void)events;
    if (l->broken)
        return;
    read_events(l, fatal, sizeof(fatal));
    if (fatal[0])
        broken_by_device(l, NULL, fatal);
}

/* ---- open, close ------------------------------------------------------------------------------------------------ */

static struct hrd_link *verbs_open(struct hrd_conn *conn, struct hrd_poller *poller,
                                   const struct hrd_link_handler *handler, void *owner)
{
    struct hrd_verbs_conn *c = (struct hrd_verbs_conn *)conn;
    struct vlink *l = calloc(1, sizeof(*l));
    char at[64];
    if (!l) {
        hrd_verbs_conn_free(c);
        errno = ENOMEM;
        return NULL;
    }
    l->base =
        (struct hrd_link){.tp = &hrd_transport_verbs, .handler = handler, .owner = owner, .nstreams = c->n};
    l->poller = poller;
    l->c = c;
    if (c->dev.global)
        snprintf(l->base.detail, sizeof(l->base.detail), "%.100s to %s", c->dev.text,
                 hrd_verbs_gid_text(&c->remote.gid, at, sizeof(at)));
    else
        snprintf(l->base.detail, sizeof(l->base.detail), "%.100s to LID %u", c->dev.text, c->remote.lid);
    for (unsigned i = 0; i < c->n; i++)
        l->q[i].credits = HRD_VMSG_DEPTH;
    l->completions = (struct hrd_pollable){.ready = completions_ready, .fd = c->channel->fd};
    l->events = (struct hrd_pollable){.ready = events_ready, .fd = c->ctx->async_fd};
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
    const struct hrd_verbs *v = l->c->dev.v;
    if (!l->broken) {
        hrd_poller_del(l->poller, &l->completions);
        hrd_poller_del(l->poller, &l->events);
    }
    l->broken = true;
    /* Only without its queue pairs does the device surely let go of payloads that it is sending and of slots that the peer
       is writing. */
    for (unsigned i = 0; i < l->c->n; i++)
        v->destroy_qp(l->c->q[i].qp);
    for (unsigned i = 0; i < l->c->n; i++)
        l->c->q[i].qp = NULL;
    free_regions(v, l->own);
    free_regions(v, l->remote);
    l->own = l->remote = NULL;
    report_sent(l);
    for (unsigned i = 0; i < l->base.nstreams; i++) {
        struct vqueue *q = &l->q[i];
        for (uint32_t k = 0; k < q->flights; k++) {
            struct hrd_tx *tx = q->flight[(q->flight_first + k) % HRD_VSEND_WRS].tx;
            if (tx)
                tx->done(tx, -ECANCELED);
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
    .expose = verbs_expose,
    .withdraw = verbs_withdraw,
};
