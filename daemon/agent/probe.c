/* SPDX-License-Identifier: MIT */
/*
 * How fast a link really is, for hreducectl doctor: round trips of an empty frame, then data into a slot of the peer's
 * arena, on all streams at once, the way an op's blocks go. The receiver answers each piece when it is there, so what is
 * counted has arrived. Nothing here waits; a link's probe ends with its last answer or with the link.
 *
 *   PROBE_OPEN, SLOT   the peer's slot, HRP_PROBE_BYTES of what its arena has to spare
 *   PING, PONG         ROUNDS times, one at a time
 *   DATA, PONG         a growing number at a time, for RATE_NS
 *   PROBE_CLOSE        no DATA is on its way any more: the slot goes back
 */
#include "daemon/agent/types.h"

#include <stdio.h>
#include <string.h>

#define ROUNDS 64u
#define PIECE (UINT64_C(256) << 10)
#define PIECES (HRP_PROBE_BYTES / PIECE) /* of the slot */
#define WINDOW 32u
#define RATE_NS UINT64_C(250000000)

struct piece {
    struct hrd_tx tx;
    struct aprobe *probe;
    bool queued; /* the transport has it */
    bool sent;   /* not answered yet */
};

struct aprobe {
    struct alink *l;
    uint64_t token;
    uint64_t send_off; /* PIECE bytes of the arena */
    bool sending;      /* data, not pings any more */
    uint64_t slot;     /* the peer's */
    uint64_t seq;      /* of the last frame that is answered by PONG */
    uint64_t rtt[ROUNDS];
    unsigned rounds;
    uint64_t asked_ns;
    unsigned limit, flying; /* pieces at a time */
    unsigned next_stream;
    uint64_t from_ns, last_ns, bytes; /* since the first answer */
    struct piece piece[WINDOW];
};

static void answer(struct hrd_agent *a, uint64_t token, uint32_t status, const struct hrd_probe_result *r,
                   const char *text)
{
    struct hrd_event *ev = xalloc(1, sizeof(*ev));
    ev->type = HRD_EV_PROBE;
    ev->token = token;
    ev->status = status;
    if (r)
        ev->probe = *r;
    snprintf(ev->text, sizeof(ev->text), "%s", text);
    hrd_agent_emit_event(a, ev);
}

static void probe_free(struct aprobe *p)
{
    p->l->probe = NULL;
    hrd_arena_release(p->l->a->arena, p->send_off, PIECE);
    free(p);
}

/* ---- sending ------------------------------------------------------------------------------------------------ */

static int by_value(const void *x, const void *y)
{
    uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;
    return a < b ? -1 : a > b;
}

static void finish(struct aprobe *p)
{
    struct alink *l = p->l;
    struct hrd_probe_result r = {.nstreams = l->nstreams};
    qsort(p->rtt, ROUNDS, sizeof(p->rtt[0]), by_value);
    r.rtt_ns = p->rtt[ROUNDS / 2];
    r.rtt_min_ns = p->rtt[0];
    if (p->last_ns > p->from_ns)
        r.bytes_per_s = (uint64_t)((double)p->bytes * 1e9 / (double)(p->last_ns - p->from_ns));
    snprintf(r.transport, sizeof(r.transport), "%s", l->link->tp->name);
    snprintf(r.detail, sizeof(r.detail), "%s", l->link->detail);
    hrd_probe_say(l, 0, HRP_FRAME_PROBE_CLOSE, 0, 0, HRP_OK);
    answer(l->a, p->token, HRP_OK, &r, "");
    for (unsigned i = 0; i < WINDOW; i++)
        if (p->piece[i].queued) { /* answered, but the transport has not said so yet: piece_done() frees */
            p->token = 0;
            return;
        }
    probe_free(p);
}

static void send_pieces(struct aprobe *p);

static void piece_done(struct hrd_tx *tx, int err)
{
    struct piece *e = tx->owner;
    struct aprobe *p = e->probe;
    e->queued = false;
    if (p->token != 0) {
        /* An answer may be here before the transport says that the piece is gone. A lost link ends the probe by itself. */
        if (!err && p->flying == 0)
            send_pieces(p);
        return;
    }
    for (unsigned i = 0; i < WINDOW; i++)
        if (p->piece[i].queued)
            return;
    probe_free(p);
}

/* A stream has a part of the slot for itself as far as they go round: the peer may receive streams on different threads. Where
   two share one, what it holds in the end is anybody's, and nobody reads it. */
static void send_pieces(struct aprobe *p)
{
    struct alink *l = p->l;
    for (unsigned i = 0; i < WINDOW && p->flying < p->limit; i++) {
        struct piece *e = &p->piece[i];
        if (e->queued || e->sent)
            continue;
        uint64_t seq = ++p->seq;
        e->tx = (struct hrd_tx){.frame = {.magic = HRP_FRAME_MAGIC,
                                          .type = HRP_FRAME_DATA,
                                          .op = seq,
                                          .slot = p->slot + p->next_stream % PIECES * PIECE,
                                          .len = (uint32_t)PIECE},
                                .payload = hrd_arena_at(l->a->arena, p->send_off),
                                .stream = p->next_stream,
                                .done = piece_done,
                                .owner = e};
        e->probe = p;
        e->queued = e->sent = true;
        p->flying++;
        p->next_stream = (p->next_stream + 1) % l->nstreams;
        hrd_frames_queue(l, &e->tx);
    }
}

static void ping(struct aprobe *p)
{
    p->asked_ns = now_ns();
    hrd_probe_say(p->l, 0, HRP_FRAME_PROBE_PING, ++p->seq, 0, HRP_OK);
}

/* ---- what the peer answers ---------------------------------------------------------------------------------- */

static int got_slot(struct aprobe *p, const struct hrp_frame *f, const char **why)
{
    if (p->seq != 0) {
        *why = "PROBE_SLOT that was not asked for";
        return -1;
    }
    if (f->status != HRP_OK) {
        answer(p->l->a, p->token, HRP_RESOURCE, NULL,
               "the arena of that node has nothing to spare for a probe now");
        probe_free(p);
        return 0;
    }
    p->slot = f->slot;
    ping(p);
    return 0;
}

static int got_piece(struct aprobe *p, uint64_t seq, const char **why)
{
    uint64_t now = now_ns();
    for (unsigned i = 0; i < WINDOW; i++) {
        struct piece *e = &p->piece[i];
        if (!e->sent || e->tx.frame.op != seq)
            continue;
        e->sent = false;
        p->flying--;
        if (p->from_ns == 0)
            p->from_ns = now; /* counting starts here: the first piece filled the path */
        else
            p->bytes += PIECE;
        p->last_ns = now;
        if (p->limit < WINDOW)
            p->limit++;
        if (now - p->from_ns < RATE_NS)
            send_pieces(p);
        else if (p->flying == 0)
            finish(p);
        return 0;
    }
    *why = "PROBE_PONG that answers nothing";
    return -1;
}

static int got_pong(struct aprobe *p, const struct hrp_frame *f, const char **why)
{
    if (p->sending)
        return got_piece(p, f->op, why);
    if (p->seq == 0 || f->op != p->seq) {
        *why = "PROBE_PONG that answers nothing";
        return -1;
    }
    p->rtt[p->rounds++] = now_ns() - p->asked_ns;
    if (p->rounds < ROUNDS) {
        ping(p);
        return 0;
    }
    p->sending = true;
    p->limit = p->l->nstreams < WINDOW ? p->l->nstreams : WINDOW;
    send_pieces(p);
    return 0;
}

/* ---- the peer's probe of this node -------------------------------------------------------------------------- */

static void give_slot(struct alink *l)
{
    bool held = l->probe_slot != HRD_ARENA_NONE;
    if (!held)
        l->probe_slot = hrd_arena_alloc(l->a->arena, l->peer, HRP_PROBE_BYTES);
    bool ok = l->probe_slot != HRD_ARENA_NONE;
    hrd_probe_say(l, 0, HRP_FRAME_PROBE_SLOT, 0, ok ? l->probe_slot : 0, ok ? HRP_OK : HRP_RESOURCE);
}

static void take_slot(struct alink *l)
{
    if (l->probe_slot != HRD_ARENA_NONE)
        hrd_arena_release(l->a->arena, l->probe_slot, HRP_PROBE_BYTES);
    l->probe_slot = HRD_ARENA_NONE;
}

void *hrd_probe_place(struct alink *l, const struct hrp_frame *f, const char **why)
{
    uint64_t slot = l->probe_slot;
    if (f->type != HRP_FRAME_DATA || slot == HRD_ARENA_NONE || f->len > HRP_PROBE_BYTES || f->slot < slot ||
        f->slot - slot > HRP_PROBE_BYTES - f->len) {
        *why = "data of a probe outside of its slot";
        return NULL;
    }
    return hrd_arena_at(l->a->arena, f->slot);
}

int hrd_probe_arrived(struct alink *l, unsigned stream, const struct hrp_frame *f, const char **why)
{
    switch (f->type) {
    case HRP_FRAME_PROBE_OPEN:
        give_slot(l);
        return 0;
    case HRP_FRAME_PROBE_CLOSE:
        take_slot(l);
        return 0;
    case HRP_FRAME_DATA:
        if (f->len == 0 && !hrd_probe_place(l, f, why))
            return -1;
        hrd_probe_say(l, stream, HRP_FRAME_PROBE_PONG, f->op, 0, HRP_OK);
        return 0;
    case HRP_FRAME_PROBE_PING:
        hrd_probe_say(l, stream, HRP_FRAME_PROBE_PONG, f->op, 0, HRP_OK);
        return 0;
    case HRP_FRAME_PROBE_SLOT:
    case HRP_FRAME_PROBE_PONG:
        if (l->probe && l->probe->token != 0)
            return f->type == HRP_FRAME_PROBE_SLOT ? got_slot(l->probe, f, why) : got_pong(l->probe, f, why);
        *why = "an answer to a probe that nobody made";
        return -1;
    default:
        *why = "a frame of no communicator";
        return -1;
    }
}

/* ---- begin and end ------------------------------------------------------------------------------------------ */

void hrd_probe_start(struct hrd_agent *a, uint32_t link, uint64_t token)
{
    struct alink *l = a->links;
    while (l && l->peer != link)
        l = l->next;
    if (!l || !l->link || l->lost) {
        answer(a, token, HRP_PEER_LOST, NULL, "the link is gone");
        return;
    }
    if (l->probe) {
        answer(a, token, HRP_RESOURCE, NULL, "a probe of this link is under way already");
        return;
    }
    uint64_t off = hrd_arena_alloc(a->arena, HRD_DOMAIN_SEND, PIECE);
    if (off == HRD_ARENA_NONE) {
        answer(a, token, HRP_RESOURCE, NULL, "the arena of this node has nothing to spare for a probe now");
        return;
    }
    struct aprobe *p = xalloc(1, sizeof(*p));
    p->l = l;
    p->token = token;
    p->send_off = off;
    l->probe = p;
    hrd_probe_say(l, 0, HRP_FRAME_PROBE_OPEN, 0, 0, HRP_OK);
}

void hrd_probe_link_closed(struct alink *l)
{
    struct aprobe *p = l->probe;
    take_slot(l);
    if (!p)
        return;
    if (p->token != 0)
        answer(l->a, p->token, HRP_PEER_LOST, NULL, l->why[0] ? l->why : "the link was closed");
    probe_free(p);
}
