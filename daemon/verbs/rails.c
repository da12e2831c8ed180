/* SPDX-License-Identifier: MIT */
/*
 * A link over several NICs: one verbs link for each (a rail), with the device, protection domain, regions and path that are
 * its own. Both ends number the rails alike, and the streams behind each other: those of rail 0, then those of rail 1, ...
 *
 *   stream 0      rail 0: small frames, and what every rail may be written into (vlink.h)
 *   blocks        on all rails, by their rates; while the path of one is made anew, on the others
 *   GPU memory    on rail 0 alone, whose adapter it was tried with
 *
 * What a stream carries stays on it, so all that holds for streams holds here. A rail that is lost takes the link with it:
 * nobody can say what of its last frames had arrived.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/text.h"
#include "daemon/verbs/vlink.h"

/* A rail that carried less than its share, because its path was away or it cannot reach the memory, makes up for so much of
   it. */
#define LAG_NS UINT64_C(2000000)

struct rails_conn {
    struct hrd_conn base;
    unsigned n;
    struct hrd_verbs_conn *c[HRD_RAILS_MAX];
};

struct bond;
struct rail {
    struct bond *bond;
    unsigned index; /* in the link */
    unsigned place; /* in the list of devices, where the link may lack others: what people know it by */
    unsigned first; /* the link's stream that is its stream 0 */
    unsigned turn;  /* of its streams that carry blocks */
    uint64_t ns;    /* for how long the blocks so far keep it busy */
};

struct bond {
    struct hrd_link base;
    bool rates_known; /* of all rails; otherwise they count as alike */
    struct rail rail[HRD_RAILS_MAX];
};

/* ---- connections ------------------------------------------------------------------------------------------------ */

static void discard(struct hrd_conn *base)
{
    struct rails_conn *rc = (struct rails_conn *)base;
    for (unsigned i = 0; i < rc->n; i++)
        if (rc->c[i])
            rc->c[i]->base.discard(&rc->c[i]->base);
    free(rc);
}

struct hrd_conn *hrd_rails_conn_new(struct hrd_verbs_conn *const *c, unsigned n)
{
    struct rails_conn *rc = calloc(1, sizeof(*rc));
    if (!rc)
        return NULL;
    rc->base.discard = discard;
    rc->n = n;
    for (unsigned i = 0; i < n; i++)
        rc->c[i] = c[i];
    return &rc->base;
}

/* ---- what rails say --------------------------------------------------------------------------------------------- */

static void *rail_place(struct hrd_link *link, unsigned stream, const struct hrp_frame *frame,
                        const char **why)
{
    const struct rail *r = link->owner;
    return r->bond->base.handler->place(&r->bond->base, r->first + stream, frame, why);
}

static int rail_arrived(struct hrd_link *link, unsigned stream, const struct hrp_frame *frame, void *payload,
                        const char **why)
{
    const struct rail *r = link->owner;
    return r->bond->base.handler->arrived(&r->bond->base, r->first + stream, frame, payload, why);
}

static void rail_lost(struct hrd_link *link, const char *why)
{
    const struct rail *r = link->owner;
    const struct hrd_verbs_device *d = &((struct vlink *)link)->dev;
    char text[600];
    snprintf(text, sizeof(text), "rail %u, %.30s port %u: %s", r->place, d->name, d->port, why);
    r->bond->base.handler->lost(&r->bond->base, text);
}

static void rail_interrupted(struct hrd_link *link, unsigned rail, struct hrd_conn *conn, const char *why)
{
    const struct rail *r = link->owner;
    (void)rail;
    r->bond->base.handler->interrupted(&r->bond->base, r->index, conn, why);
}

static const struct hrd_link_handler rail_handler = {
    .place = rail_place, .arrived = rail_arrived, .lost = rail_lost, .interrupted = rail_interrupted};

/* ---- all rails as one ------------------------------------------------------------------------------------------- */

static struct vlink *vlink_of(const struct bond *b, unsigned i)
{
    return (struct vlink *)b->base.rail[i];
}

static void rails_send(struct hrd_link *base, struct hrd_tx *tx)
{
    struct bond *b = (struct bond *)base;
    unsigned i = base->nrails - 1;
    while (tx->stream < b->rail[i].first)
        i--;
    tx->stream -= b->rail[i].first;
    base->rail[i]->tp->send(base->rail[i], tx);
}

static void rails_flush(struct hrd_link *base)
{
    for (unsigned i = 0; i < base->nrails; i++)
        base->rail[i]->tp->flush(base->rail[i]);
}

static unsigned rails_poll(struct hrd_link *base)
{
    unsigned n = 0;
    for (unsigned i = 0; i < base->nrails; i++)
        n += base->rail[i]->tp->poll(base->rail[i]);
    return n;
}

static int rails_arm(struct hrd_link *base)
{
    int any = 0;
    for (unsigned i = 0; i < base->nrails; i++)
        any |= base->rail[i]->tp->arm(base->rail[i]);
    return any;
}

static void rails_close(struct hrd_link *base)
{
    for (unsigned i = 0; i < base->nrails; i++)
        base->rail[i]->tp->close(base->rail[i]);
    free(base);
}

static void rails_interrupt(struct hrd_link *base, unsigned rail, const char *why)
{
    if (rail < base->nrails)
        base->rail[rail]->tp->interrupt(base->rail[rail], 0, why);
}

static void rails_resume(struct hrd_link *base, unsigned rail)
{
    base->rail[rail]->tp->resume(base->rail[rail], 0);
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static void rails_withdraw(struct hrd_link *base, uint64_t off, uint64_t len)
{
    for (unsigned i = 0; i < base->nrails; i++)
        base->rail[i]->tp->withdraw(base->rail[i], off, len);
}

/* By the rails that may send from there: all of them, or for memory of a GPU the first. */
static int rails_expose(struct hrd_link *base, uint64_t off, void *at, uint64_t len)
{
    struct bond *b = (struct bond *)base;
    for (unsigned i = 0; i < base->nrails; i++) {
        struct hrd_link *l = base->rail[i];
        if (i > 0 && !hrd_vlink_payload(vlink_of(b, i), at, len))
            continue;
        int err = l->tp->expose(l, off, at, len);
        if (err) {
            memcpy(base->refusal, l->refusal, sizeof(base->refusal));
            l->refusal[0] = '\0';
            rails_withdraw(base, off, len);
            return err;
        }
    }
    return 0;
}

static int rails_add_memory(struct hrd_link *base, const struct hrd_tp_memory *m, char *why, size_t len)
{
    return base->rail[0]->tp->add_memory(base->rail[0], m, why, len);
}

static void rails_drop_memory(struct hrd_link *base, const char *at)
{
    base->rail[0]->tp->drop_memory(base->rail[0], at);
}

/* ---- blocks over rails ------------------------------------------------------------------------------------------ */

/* Streams of a rail that carry blocks: not the link's stream 0, unless the rail has no other. */
static unsigned block_stream(struct bond *b, unsigned i)
{
    struct rail *r = &b->rail[i];
    unsigned n = b->base.rail[i]->nstreams, skip = i == 0 && n > 1;
    return r->first + skip + r->turn++ % (n - skip);
}

static uint64_t cost_ns(const struct bond *b, unsigned i, uint64_t bytes)
{
    uint64_t rate = b->base.rail[i]->rate;
    if (!b->rates_known || rate == 0)
        rate = UINT64_C(1000000000);
    return bytes * UINT64_C(1000000000) / rate;
}

/* The rail that is through with the block first, going by what each carried so far and by its rate. */
static unsigned rails_stream_for(struct hrd_link *base, const struct hrd_tx *tx)
{
    struct bond *b = (struct bond *)base;
    uint64_t bytes = sizeof(tx->frame) + tx->frame.len, best = 0;
    unsigned found = HRD_RAILS_MAX;
    bool found_up = false;
    for (unsigned i = 0; i < base->nrails; i++) {
        const struct vlink *l = vlink_of(b, i);
        uint64_t end = b->rail[i].ns + cost_ns(b, i, bytes);
        bool up = l->state == V_UP;
        if (tx->frame.type == HRP_FRAME_DATA &&
            !hrd_vlink_reaches(l, tx->frame.slot, tx->payload, tx->frame.len))
            continue;
        if (found < HRD_RAILS_MAX && (found_up > up || (found_up == up && best <= end)))
            continue;
        found = i;
        found_up = up;
        best = end;
    }
    if (found == HRD_RAILS_MAX)
        return 0; /* where sending it ends the link, with the reason */
    b->rail[found].ns = best;
    for (unsigned i = 0; i < base->nrails; i++)
        if (b->rail[i].ns + LAG_NS < best)
            b->rail[i].ns = best - LAG_NS;
    return block_stream(b, found);
}

/* ---- open ------------------------------------------------------------------------------------------------------- */

/* "2 rails: mlx5_0 port 1, mlx5_1 port 1" */
static void describe(struct bond *b)
{
    char *text = b->base.detail;
    const size_t len = sizeof(b->base.detail);
    snprintf(text, len, "%u rails: ", b->base.nrails);
    for (unsigned i = 0; i < b->base.nrails; i++) {
        const struct hrd_verbs_device *d = &vlink_of(b, i)->dev;
        hrd_text_add(text, len, "%s%.30s port %u", i ? ", " : "", d->name, d->port);
    }
}

static void introduce(struct bond *b)
{
    b->rates_known = true;
    for (unsigned i = 0; i < b->base.nrails; i++) {
        struct vlink *l = vlink_of(b, i);
        l->rail = i;
        l->nrails = b->base.nrails;
        for (unsigned k = 0; k < l->nrails; k++)
            l->rails[k] = vlink_of(b, k);
        b->rates_known = b->rates_known && l->base.rate > 0;
    }
}

static struct hrd_link *rails_open(struct hrd_conn *conn, struct hrd_poller *poller,
                                   const struct hrd_link_handler *handler, void *owner)
{
    struct rails_conn *rc = (struct rails_conn *)conn;
    struct bond *b = calloc(1, sizeof(*b));
    int err = b ? 0 : ENOMEM;
    for (unsigned i = 0; i < rc->n && !err; i++) {
        struct rail *r = &b->rail[i];
        *r = (struct rail){.bond = b, .index = i, .place = rc->c[i]->place, .first = b->base.nstreams};
        struct hrd_link *l = hrd_transport_verbs.open(&rc->c[i]->base, poller, &rail_handler, r);
        rc->c[i] = NULL; /* its link's, or freed */
        if (!l) {
            err = errno;
            break;
        }
        b->base.rail[b->base.nrails++] = l;
        b->base.nstreams += l->nstreams;
    }
    discard(conn); /* what no link was made of */
    if (err) {
        if (b)
            rails_close(&b->base);
        errno = err;
        return NULL;
    }
    b->base.tp = &hrd_transport_rails;
    b->base.handler = handler;
    b->base.owner = owner;
    introduce(b);
    describe(b);
    return &b->base;
}

const struct hrd_transport hrd_transport_rails = {
    .name = "verbs",
    .caps = HRD_TP_RDMA,
    .open = rails_open,
    .send = rails_send,
    .flush = rails_flush,
    .close = rails_close,
    .poll = rails_poll,
    .arm = rails_arm,
    .interrupt = rails_interrupt,
    .resume = rails_resume,
    .stream_for = rails_stream_for,
    .expose = rails_expose,
    .withdraw = rails_withdraw,
    .add_memory = rails_add_memory,
    .drop_memory = rails_drop_memory,
};
