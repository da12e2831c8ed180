/* SPDX-License-Identifier: MIT */
/* What goes to and comes from the agents of other nodes, whatever the transport. */
#include "daemon/agent/types.h"

#include <stdio.h>
#include <string.h>

/* ---- send -------------------------------------------------------------------------------------------------- */

struct hrp_frame hrd_frame(const struct acomm *c, uint8_t type, uint64_t op)
{
    return (struct hrp_frame){
        .magic = HRP_FRAME_MAGIC, .type = type, .comm = c->id, .op = op, .watermark = c->done_wm};
}

void hrd_frames_queue(struct alink *l, struct hrd_tx *tx)
{
    l->link->tp->send(l->link, tx);
    l->dirty = true;
}

/* A frame that nobody waits for; it owns its text. */
struct note {
    struct hrd_tx tx;
    char text[];
};

static void note_done(struct hrd_tx *tx, int err)
{
    (void)err; /* a lost link is reported by itself */
    free(tx->owner);
}

static void send_note(struct alink *l, unsigned stream, const struct hrp_frame *f, const char *text)
{
    if (!l || !l->link)
        return;
    size_t len = text ? strnlen(text, HRP_FRAME_TEXT) : 0;
    struct note *n = xalloc(1, sizeof(*n) + len);
    n->tx = (struct hrd_tx){.frame = *f, .payload = n->text, .stream = stream, .done = note_done, .owner = n};
    n->tx.frame.len = (uint32_t)len;
    if (len)
        memcpy(n->text, text, len);
    hrd_frames_queue(l, &n->tx);
}

void hrd_probe_say(struct alink *l, unsigned stream, uint8_t type, uint64_t op, uint64_t slot, uint8_t status)
{
    struct hrp_frame f = {.magic = HRP_FRAME_MAGIC, .type = type, .op = op, .slot = slot, .status = status};
    send_note(l, stream, &f, NULL);
}

void hrd_frames_send(struct acomm *c, uint32_t node, unsigned stream, const struct hrp_frame *f,
                     const char *text)
{
    c->told_wm[node] = f->watermark;
    if (f->type == HRP_FRAME_CREDIT || f->type == HRP_FRAME_WATERMARK)
        c->stat.tx_bytes += sizeof(*f);
    send_note(c->link[node], stream, f, text);
}

void hrd_frames_send_all(struct acomm *c, const struct hrp_frame *f, const char *text)
{
    for (uint32_t n = 0; n < c->nnodes; n++)
        hrd_frames_send(c, n, 0, f, text);
}

static void send_marks(struct alink *l, const struct hrp_frame *f)
{
    for (unsigned s = 0; l && l->link && s < l->nstreams; s++)
        send_note(l, s, f, NULL);
}

void hrd_frames_send_marks(struct acomm *c, uint8_t type, uint64_t op)
{
    struct hrp_frame f = hrd_frame(c, type, op);
    for (uint32_t n = 0; n < c->nnodes; n++)
        send_marks(c->link[n], &f);
}

void hrd_frames_answer_orphan(struct alink *l, uint64_t comm)
{
    struct hrp_frame f = {.magic = HRP_FRAME_MAGIC, .type = HRP_FRAME_COMM_MARK, .comm = comm};
    send_marks(l, &f);
}

/* ---- receive ----------------------------------------------------------------------------------------------- */

uint32_t hrd_frames_node(const struct acomm *c, const struct alink *l)
{
    for (uint32_t n = 0; n < c->nnodes; n++)
        if (c->link[n] == l)
            return n;
    return HRD_NONE;
}

static void *place_eager(struct acomm *c, uint32_t node, const struct hrp_frame *f, const char **why)
{
    struct aeager *e = &c->eager[node * HRP_EAGER_SLOTS + f->op % HRP_EAGER_SLOTS];
    if (f->len > c->env.eager_limit) {
        *why = "an eager message larger than eager_limit";
        return NULL;
    }
    if (f->op <= c->done_wm || f->op > c->done_wm + HRP_EAGER_SLOTS || e->op == f->op) {
        *why = "an eager message into a slot that is in use";
        return NULL;
    }
    e->op = f->op;
    e->arrived = false;
    e->frame = *f;
    return hrd_arena_at(c->a->arena, c->eager_off[node] + f->op % HRP_EAGER_SLOTS * hrd_eager_bytes(c));
}

/* The first message of an op may come before the ranks here posted it; a later one is the sender's answer to what it got. */
static bool may_be_early(const struct hrp_frame *f)
{
    return f->type == HRP_FRAME_EAGER && f->tag == 0;
}

/* Bytes behind a mark would land in memory that is another's by then. */
static bool behind_mark(struct acomm *c, uint32_t node, unsigned stream, const struct hrp_frame *f)
{
    const struct aop *op = hrd_op_find(c, f->op);
    unsigned marks = c->marks[node] | (op && op->marks ? op->marks[node] : 0u);
    return marks >> stream & 1;
}

static void *frame_place(struct hrd_link *link, unsigned stream, const struct hrp_frame *f, const char **why)
{
    struct alink *l = link->owner;
    if (f->type != HRP_FRAME_DATA && f->type != HRP_FRAME_EAGER) {
        *why = "a failure frame outside of stream 0";
        return stream == 0 ? l->text : NULL;
    }
    if (f->comm == 0)
        return hrd_probe_place(l, f, why);
    struct acomm *c = hrd_agent_comm(l->a, f->comm);
    uint32_t node = c ? hrd_frames_node(c, l) : HRD_NONE;
    if (node == HRD_NONE) {
        *why = "data for a communicator that does not exist here";
        return NULL;
    }
    if (behind_mark(c, node, stream, f)) {
        *why = "data behind the mark that says nothing follows";
        return NULL;
    }
    if (may_be_early(f))
        return place_eager(c, node, f, why);
    struct astep *st = hrd_pipeline_place(c, node, f, why);
    if (st &&
        st->filling) { /* on another stream: what comes last would be written into a slot that is another's by then */
        *why = "the same block twice";
        return NULL;
    }
    if (st)
        st->filling = true;
    return st ? st->mem : NULL;
}

static int eager_arrived(struct acomm *c, uint32_t node, const struct hrp_frame *f, const char **why)
{
    if (f->len == 0 && !place_eager(c, node, f, why))
        return -1;
    struct aeager *e = &c->eager[node * HRP_EAGER_SLOTS + f->op % HRP_EAGER_SLOTS];
    e->arrived = true;
    hrd_pipeline_eager_arrived(c, node, e);
    return 0;
}

/* Frames with text run on stream 0 alone, so the link's one buffer holds exactly this one's. The others must leave it
   alone: a text may just be arriving there. */
static const char *text_of(struct alink *l, const struct hrp_frame *f, const void *payload)
{
    if (!payload)
        return "";
    l->text[f->len] = '\0';
    return l->text;
}

static int handle(struct alink *l, struct acomm *c, uint32_t node, unsigned stream, const struct hrp_frame *f,
                  void *payload, const char **why)
{
    hrd_pipeline_watermark(c, node, f->watermark);
    switch (f->type) {
    case HRP_FRAME_DATA:
        c->stat.rx_bytes += sizeof(*f) + f->len;
        return hrd_pipeline_data_arrived(c, node, f, why);
    case HRP_FRAME_EAGER:
        c->stat.rx_bytes += sizeof(*f) + f->len;
        return may_be_early(f) ? eager_arrived(c, node, f, why) : hrd_pipeline_data_arrived(c, node, f, why);
    case HRP_FRAME_CREDIT:
        c->stat.rx_bytes += sizeof(*f);
        hrd_pipeline_credit(c, node, f);
        return 0;
    case HRP_FRAME_WATERMARK:
        c->stat.rx_bytes += sizeof(*f);
        return 0;
    case HRP_FRAME_RANK_LEFT:
        hrd_comm_rank_left(c, f->rank, f->op);
        return 0;
    default:
        hrd_abort_frame(c, node, stream, f, text_of(l, f, payload));
        return 0;
    }
}

static int frame_arrived(struct hrd_link *link, unsigned stream, const struct hrp_frame *f, void *payload,
                         const char **why)
{
    struct alink *l = link->owner;
    if (f->comm == 0)
        return hrd_probe_arrived(l, stream, f, why);
    struct acomm *c = hrd_agent_comm(l->a, f->comm);
    uint32_t node = c ? hrd_frames_node(c, l) : HRD_NONE;
    if (node == HRD_NONE) {
        if (f->type == HRP_FRAME_DATA || f->type == HRP_FRAME_EAGER) {
            *why = "data for a communicator that does not exist here";
            return -1;
        }
        hrd_comm_orphan(l->a, l, f, text_of(l, f, payload));
        return 0;
    }
    int err = handle(l, c, node, stream, f, payload, why);
    hrd_comm_settle(c);
    return err;
}

static void link_lost(struct hrd_link *link, const char *why)
{
    struct alink *l = link->owner;
    if (l->lost)
        return;
    l->lost = true;
    if (link->nrails > 0) /* the reason names the rail */
        snprintf(l->why, sizeof(l->why), "node %s is lost: %s over %u rails broke (%s)", l->name,
                 link->tp->name, link->nrails, why);
    else
        snprintf(l->why, sizeof(l->why), "node %s is lost: %s over %s broke (%s)", l->name, link->tp->name,
                 link->detail, why);
    l->a->links_to_close = true;
}

static void link_interrupted(struct hrd_link *link, unsigned rail, struct hrd_conn *conn, const char *why)
{
    struct alink *l = link->owner;
    const struct hrd_link *at = link->nrails > 0 ? link->rail[rail] : link;
    struct hrd_event *ev = xalloc(1, sizeof(*ev));
    l->interrupted |= 1u << rail;
    ev->type = HRD_EV_LINK_INTERRUPTED;
    ev->id = l->peer;
    ev->status = HRP_PEER_LOST;
    ev->rail = rail;
    ev->conn = conn;
    snprintf(ev->text, sizeof(ev->text), "%s over %s: %s", at->tp->name, at->detail, why);
    hrd_agent_emit_event(l->a, ev);
}

const struct hrd_link_handler hrd_frames_handler = {
    .place = frame_place,
    .arrived = frame_arrived,
    .lost = link_lost,
    .interrupted = link_interrupted,
};
