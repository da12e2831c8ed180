/* SPDX-License-Identifier: MIT */
/*
 * How two daemons agree on a verbs link, over their control connection:
 *
 *   dialer    OFFER    what its device is and its queue pairs, or why it has none
 *   other     ANSWER   the same; with HRP_OK its queue pairs are connected already
 *             or (peer_setup.c) wait for the dialer's requests by RDMA-CM
 *   both      probe: a message as large as any goes each way on each queue pair
 *   both      READY    the probe's result; the link is up where both say HRP_OK
 *
 * Every outcome is the same on both ends, because each end's word is final when it is sent and both are needed. Without
 * an agreement the dialer goes on with tcp; where one of the two is configured to use nothing but verbs, the communicators
 * that need the link fail on both.
 *
 * tcp instead is for as long as communicators use it: a comm's two ends must not take different links. When none does the
 * dialer tries again from time to time, and the other end goes along where none of its own does either (else HRP_REFUSED,
 * and all stays as it was).
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/gpu/gdr.h"
#include "daemon/peer_impl.h"

/* Between attempts at what was settled: twice as long after each. */
#define AGAIN_MS 2000u
#define AGAIN_MAX_MS 64000u
#define KEEP_MS 1000u /* a class that the peer still uses is not asked for again at once */

void hrd_verbs_drop(struct plink *l)
{
    struct verbs_try *t = l->verbs;
    l->verbs = NULL;
    if (t)
        hrd_cm_setup_free(t->cm);
    if (t && t->conn && !t->mend)
        hrd_verbs_conn_free(t->conn);
    free(t);
}

static bool must(const struct hrd_daemon *d)
{
    return d->cfg.transport == 2 || (d->cfg.require & HRP_REQUIRE_VERBS);
}

/* Whoever waits for a link of this class hears why there is none. */
static void tell_refused(struct hrd_daemon *d, const struct plink *l, uint32_t status, const char *why)
{
    struct hrd_link_want want = {.sl = l->sl, .tc = l->tc};
    hrd_member_link_refused(d, l->peer->no, &want, status, why);
    hrd_doctor_link_refused(d, l->peer->no, &want, status, why);
}

/* When what came to nothing is tried again. */
static uint64_t next_try(const struct hrd_daemon *d, const struct plink *l)
{
    uint64_t wait = (uint64_t)AGAIN_MS << (l->tries < 8 ? l->tries : 8);
    return uv_now(d->loop) + (wait < AGAIN_MAX_MS ? wait : AGAIN_MAX_MS);
}

static void settled(struct hrd_daemon *d, struct plink *l)
{
    l->again_at = hrd_peer_dials(d, l->peer->instance) ? next_try(d, l) : 0;
    l->settled = true;
    hrd_member_link(d, l->peer->no, NULL); /* who waits for it asks again, and gets tcp */
}

/* No verbs link of this class with this peer: tcp, or nothing. */
static void no_link(struct hrd_daemon *d, struct plink *l)
{
    l->half = l->one_could;
    l->none = l->no_device;
    hrd_rails_why(l, l->why, sizeof(l->why));
    if (l->required) {
        tell_refused(d, l, HRP_UNSUPPORTED, l->why);
        return;
    }
    settled(d, l);
    l->tries++;
}

/* The attempt at this rail has ended. When all have, so is what becomes of the link. */
static void rail_over(struct hrd_daemon *d, struct plink *rail)
{
    struct plink *l = rail->link;
    unsigned made = 0;
    if (!hrd_rails_over(rail))
        return;
    for (unsigned i = 0; i < l->nrails; i++)
        made += l->rails[i]->made != NULL;
    if (made > 0)
        hrd_rails_up(d, l);
    else
        no_link(d, l);
}

/* This rail cannot be. The text is copied first: it may lie in the attempt. */
static void settle(struct hrd_daemon *d, struct plink *l, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void settle(struct hrd_daemon *d, struct plink *l, const char *fmt, ...)
{
    char why[sizeof(l->out_why)];
    struct plink *link = l->link;
    link->required = link->required || must(d) || l->verbs->peer_must;
    link->one_could = link->one_could || l->verbs->conn || l->verbs->can || l->verbs->peer_can;
    link->no_device = link->nrails == 1 && l->verbs->none && l->verbs->peer_none;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof(why), fmt, ap);
    va_end(ap);
    memcpy(l->out_why, why, sizeof(why));
    hrd_verbs_drop(l);
    rail_over(d, l);
}

/* ---- classes ---------------------------------------------------------------------------------------------------- */

/* This class cannot be had now; another communicator may have more luck. All rails of the link are. */
static void refuse(struct hrd_daemon *d, struct plink *l, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void refuse(struct hrd_daemon *d, struct plink *l, const char *fmt, ...)
{
    char why[sizeof(l->why)];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof(why), fmt, ap);
    va_end(ap);
    l = l->link;
    memcpy(l->why, why, sizeof(why));
    l->none = false;
    hrd_rails_stop(l);
    tell_refused(d, l, HRP_RESOURCE, why);
}

/* Whether one class more fits. *idle: one that nobody uses here; *closing: one is on its way out. */
static bool class_fits(const struct hrd_daemon *d, const struct plink *l, struct plink **idle, bool *closing)
{
    unsigned n = 0;
    *idle = NULL;
    *closing = false;
    for (struct plink *o = l->peer->links; o; o = o->next) {
        if (o == l || o->tcp || o->link != o ||
            !(o->up || (hrd_rails_trying(o) && !(o->verbs && o->verbs->fresh))))
            continue;
        n++;
        *closing = *closing || o->closing;
        if (o->up && o->users == 0 && !o->closing && !hrd_rails_down(o) && uv_now(d->loop) >= o->keep_until)
            *idle = o;
    }
    return n < d->cfg.verbs_classes;
}

static void no_room_text(const struct hrd_daemon *d, const struct plink *l, char *why, size_t len)
{
    snprintf(why, len,
             "service level %u with traffic class %u would be one class more than verbs_classes = %u of node "
             "%s allows "
             "with one peer",
             l->sl, l->tc, d->cfg.verbs_classes, d->node_name);
}

void hrd_verbs_close(struct hrd_daemon *d, struct plink *l)
{
    l->closing = true;
    hrd_verbs_send_ready(d, l, HRP_PEER_VERBS_CLOSE, hrd_rails_first(l)->nonce, HRP_OK, "");
}

/* CLOSE. */
static bool got_close(struct hrd_daemon *d, struct hrd_peer *p, const struct hrp_peer_msg *msg)
{
    static const char why[] = "its class is not in use any more";
    const struct hrp_peer_ready *r = &msg->body.ready;
    struct plink *rail = hrd_link_by_nonce(p, r->nonce), *l = rail ? rail->link : NULL;
    if (!l || (hrd_peer_dials(d, p->instance) ? !l->closing : r->status != HRP_OK))
        return false;
    if (!hrd_peer_dials(d, p->instance)) {
        bool free_here = l->users == 0 && !hrd_rails_down(l);
        hrd_verbs_send_ready(d, l, HRP_PEER_VERBS_CLOSE, rail->nonce, free_here ? HRP_OK : HRP_RESOURCE, "");
        if (free_here)
            hrd_link_remove(d, l, why);
        return true;
    }
    l->closing = false;
    l->keep_until = uv_now(d->loop) + KEEP_MS;
    if (r->status == HRP_OK)
        hrd_link_remove(d, l, why);
    hrd_peer_soon(d);
    hrd_member_link(d, p->no, NULL);
    return true;
}

/* ---- the own end ------------------------------------------------------------------------------------------------ */

static void say_once(struct hrd_daemon *d, unsigned rail, const char *text)
{
    char *said = d->peers->verbs_said[rail];
    if (strncmp(said, text, sizeof(d->peers->verbs_said[0]) - 1) == 0)
        return;
    snprintf(said, sizeof(d->peers->verbs_said[0]), "%s", text);
    if (hrd_verbs_rails(&d->cfg) > 1)
        hrd_notice("verbs, rail %u: %s", rail, text);
    else
        hrd_notice("verbs: %s", text);
}

/* Memory of GPUs is tried with the first device that there is: it is on the first rail of most links. */
static void device_chosen(struct hrd_daemon *d, unsigned rail, const struct hrd_verbs_device *dev)
{
    struct hrd_peers *ps = d->peers;
    char text[HRD_VERBS_NOTES + 200];
    bool first = true;
    snprintf(text, sizeof(text), "%s%s%s", dev->text, dev->note[0] ? "; " : "", dev->note);
    say_once(d, rail, text);
    snprintf(ps->verbs_device[rail], sizeof(ps->verbs_device[rail]), "%s", dev->name);
    for (unsigned i = 0; i < rail; i++)
        first = first && !ps->verbs_device[i][0];
    if (d->gpus && first)
        hrd_gpus_set_nic(d->gpus, dev);
}

bool hrd_verbs_device(struct hrd_daemon *d, const struct plink *l, unsigned rail,
                      const struct hrd_verbs_device *same, struct hrd_verbs_device *dev, char *why,
                      size_t len)
{
    const struct hrd_config *c = &d->cfg;
    const struct hrd_net *net = &d->peers->net;
    if (rail >= hrd_verbs_rails(c)) {
        snprintf(why, len, "verbs_device in hreduced.conf of node %s names %u device%s", d->node_name,
                 hrd_verbs_rails(c), hrd_verbs_rails(c) == 1 ? "" : "s");
        return false;
    }
    struct hrd_verbs_want want = hrd_verbs_want_of(c, rail);
    want.sl = l->sl;
    want.tc = l->tc;
    want.addr = net->own;
    want.naddrs = net->local_only || rail > 0 ? 0 : net->nown; /* the others have addresses of their own */
    if (same) {
        snprintf(want.device, sizeof(want.device), "%s", same->name);
        want.port = same->port;
    } else {
        d->peers->verbs_device[rail][0] = '\0';
    }
    if (c->transport == 1) {
        snprintf(why, len, "transport = tcp in hreduced.conf of node %s", d->node_name);
        return false;
    }
    if (!d->verbs)
        d->verbs = hrd_verbs_load(why, len);
    if (!d->verbs || hrd_verbs_choose(d->verbs, &want, dev, why, len) != 0) {
        if (!same)
            say_once(d, rail, why);
        return false;
    }
    if (!same)
        device_chosen(d, rail, dev);
    return true;
}

/* Whether this end has a device that does; otherwise the reason is in t->why. A device that the configuration names should
   be there. */
static bool look(struct hrd_daemon *d, struct plink *l, struct hrd_verbs_device *dev)
{
    struct verbs_try *t = l->verbs;
    if (hrd_verbs_device(d, l, l->rail, NULL, dev, t->why, sizeof(t->why)))
        return true;
    t->none = d->cfg.transport == 0 && strcmp(d->cfg.verbs_device, "auto") == 0 && hrd_verbs_none(d->verbs);
    return false;
}

/* This end's queue pairs, or the reason in t->why. */
static void make_end(struct hrd_daemon *d, struct plink *l, unsigned queues)
{
    struct verbs_try *t = l->verbs;
    struct hrd_verbs_device dev;
    void *arena;
    uint64_t bytes;
    if (!look(d, l, &dev))
        return;
    snprintf(l->device, sizeof(l->device), "%.40s port %u", dev.name, dev.port);
    if (queues > HRP_PEER_STREAMS_MAX / l->link->nrails)
        queues = HRP_PEER_STREAMS_MAX / l->link->nrails;
    hrd_agent_arena(d->agent, &arena, &bytes);
    t->conn = hrd_verbs_conn_new(&dev, queues, arena, bytes, t->nonce, d->cfg.peer_timeout_ms, t->why,
                                 sizeof(t->why));
}

static void drop_end(struct verbs_try *t)
{
    hrd_verbs_conn_free(t->conn);
    t->conn = NULL;
}

struct verbs_try *hrd_verbs_try_new(struct hrd_daemon *d, struct plink *l, uint64_t nonce)
{
    struct verbs_try *t = calloc(1, sizeof(*t));
    if (!t)
        abort();
    t->nonce = nonce;
    t->deadline = uv_now(d->loop) + HRD_VERBS_TIMEOUT_MS;
    l->verbs = t;
    return t;
}

/* ---- messages --------------------------------------------------------------------------------------------------- */

void hrd_verbs_send_end(struct hrd_daemon *d, struct plink *l, uint16_t type)
{
    struct verbs_try *t = l->verbs;
    struct hrp_peer_msg msg = {.type = type};
    struct hrp_peer_verbs *v = &msg.body.verbs;
    hrd_rail_tell(d, l);
    v->nonce = t->nonce;
    v->flags = must(d) ? HRP_VERBS_MUST : 0;
    v->service_level = l->sl;
    v->traffic_class = l->tc;
    v->link = t->mend ? l->nonce : 0;
    if (t->conn) {
        msg.text = type == HRP_PEER_VERBS_OFFER && t->mend ? l->down_why
                   : t->rdmacm || t->peers_reason          ? ""
                                                           : t->setup_why;
        msg.text_len = strlen(msg.text);
        v->rdmacm = t->rdmacm;
        const struct hrd_verbs_end *e = &t->conn->local;
        v->ethernet = e->ethernet;
        v->global = e->global;
        v->mtu = e->mtu;
        v->lid = e->lid;
        v->pkey = e->pkey;
        v->queues = e->queues;
        v->depth = e->depth;
        v->msg_bytes = e->msg_bytes;
        memcpy(v->gid, e->gid.raw, sizeof(v->gid));
        for (unsigned i = 0; i < e->queues; i++) {
            v->qpn[i] = e->qpn[i];
            v->psn[i] = e->psn[i];
            v->got[i] = t->mend ? e->got[i] : 0;
        }
    } else {
        v->status = t->busy                               ? HRP_REFUSED
                    : t->full                             ? HRP_RESOURCE
                    : l->rail >= hrd_verbs_rails(&d->cfg) ? HRP_MISMATCH
                                                          : HRP_UNSUPPORTED;
        if (l->peer->minor >= HRP_PEER_MINOR_NONE)
            v->flags |= t->none ? HRP_VERBS_NONE : t->can ? HRP_VERBS_CAN : 0;
        msg.text = t->why;
        msg.text_len = strlen(t->why);
    }
    hrd_peer_send(d, l->peer->no, &msg);
}

_Static_assert(HRP_PEER_QUEUES_MAX == HRD_VERBS_QUEUES_MAX, "the message has room for all queue pairs");

struct hrd_verbs_end hrd_verbs_end_of(const struct hrp_peer_verbs *v)
{
    struct hrd_verbs_end e = {.ethernet = v->ethernet,
                              .global = v->global,
                              .mtu = v->mtu,
                              .queues = v->queues,
                              .lid = v->lid,
                              .pkey = v->pkey,
                              .depth = v->depth,
                              .msg_bytes = v->msg_bytes};
    memcpy(e.gid.raw, v->gid, sizeof(v->gid));
    memcpy(e.qpn, v->qpn, sizeof(e.qpn));
    memcpy(e.psn, v->psn, sizeof(e.psn));
    memcpy(e.got, v->got, sizeof(e.got));
    return e;
}

void hrd_verbs_send_ready(struct hrd_daemon *d, struct plink *l, uint16_t type, uint64_t nonce,
                          uint32_t status, const char *text)
{
    struct hrp_peer_msg msg = {.type = type, .text = text, .text_len = strlen(text)};
    msg.body.ready.nonce = nonce;
    msg.body.ready.status = status;
    hrd_peer_send(d, l->peer->no, &msg);
}

static void send_ready(struct hrd_daemon *d, struct plink *l, uint32_t status, const char *text)
{
    hrd_verbs_send_ready(d, l, HRP_PEER_VERBS_READY, l->verbs->nonce, status, text);
}

void hrd_verbs_give_up(struct hrd_daemon *d, struct plink *l, const char *why)
{
    send_ready(d, l, HRP_UNSUPPORTED, why);
    if (l->verbs->mend)
        hrd_mend_failed(d, l, 0, why);
    else
        settle(d, l, "node %s: %s", d->node_name, why);
}

static void complete(struct hrd_daemon *d, struct plink *l)
{
    if (l->verbs->mend) {
        hrd_mend_done(d, l);
        return;
    }
    l->nonce = l->verbs->nonce;
    l->made = l->verbs->conn;
    l->verbs->conn = NULL;
    hrd_setup_done(d, l);
    hrd_verbs_drop(l);
    rail_over(d, l);
}

/* The one that an attempt with this number is made at. */
static struct plink *by_nonce(const struct hrd_peer *p, uint64_t nonce)
{
    struct plink *l = p->links;
    while (l && !(l->verbs && l->verbs->nonce == nonce))
        l = l->next;
    return l;
}

/* Of both ends, the dialer first: name, and how it knows. */
#define NO_DEVICES "neither node has an RDMA device (%s: %.*s; %s: %.*s)"

static void heard(struct verbs_try *t, const struct hrp_peer_verbs *v)
{
    t->peer_must = v->flags & HRP_VERBS_MUST;
    t->peer_can = v->status == HRP_OK || v->flags & HRP_VERBS_CAN;
    t->peer_none = v->flags & HRP_VERBS_NONE;
}

/* One end has no queue pairs (own: this one), or both: the same words on both. The message is the other's. */
static void settle_without(struct hrd_daemon *d, struct plink *l, bool own, const struct hrp_peer_msg *msg)
{
    const struct verbs_try *t = l->verbs;
    const char *theirs = msg->text ? msg->text : "";
    const int len = (int)msg->text_len;
    if (t->none && t->peer_none && t->dialer)
        settle(d, l, NO_DEVICES, d->node_name, (int)sizeof(t->why), t->why, l->peer->name, len, theirs);
    else if (t->none && t->peer_none)
        settle(d, l, NO_DEVICES, l->peer->name, len, theirs, d->node_name, (int)sizeof(t->why), t->why);
    else if (own)
        settle(d, l, "node %s: %s", d->node_name, t->why);
    else
        settle(d, l, "node %s: %.*s", l->peer->name, len, theirs);
}

/* The rail of a new link that an OFFER is about; the first of an attempt makes a new one of it. NULL: it makes no sense. */
static struct plink *offered_rail(struct hrd_daemon *d, struct hrd_peer *p, const struct hrp_peer_verbs *v)
{
    struct plink *l = hrd_link_class(d, p, v->service_level, v->traffic_class), *idle;
    const struct hrp_peer_rail *told = p->told.nonce == v->nonce ? &p->told : NULL;
    unsigned rail = told ? told->rail : 0, of = told ? told->of : 1;
    uint64_t group = told ? told->group : v->nonce;
    bool closing;
    if (group != l->group) {
        if (l->up)
            return NULL;
        hrd_rails_begin(d, l, of, group);
        l->busy = l->settled && hrd_link_tcp_used(p);
        l->settled = l->busy;
        l->full = !class_fits(d, l, &idle, &closing);
    }
    return rail < of && of <= l->nrails ? l->rails[rail] : NULL;
}

static bool got_offer(struct hrd_daemon *d, struct hrd_peer *p, const struct hrp_peer_msg *msg)
{
    const struct hrp_peer_verbs *v = &msg->body.verbs;
    if (hrd_peer_dials(d, p->instance))
        return false;
    if (v->link)
        return hrd_mend_offer(d, p, msg);
    struct plink *l = offered_rail(d, p, v);
    if (!l)
        return false;
    hrd_verbs_drop(l);
    struct verbs_try *t = hrd_verbs_try_new(d, l, v->nonce);
    l->peer_rate = p->told.nonce == v->nonce ? p->told.rate : 0;
    t->busy = l->link->busy;
    t->full = l->link->full;
    if (t->busy || l->over) {
        snprintf(t->why, sizeof(t->why), "the attempt at this rail has ended here");
        hrd_verbs_send_end(d, l, HRP_PEER_VERBS_ANSWER);
        hrd_verbs_drop(l);
        return true;
    }
    heard(t, v);
    if (t->full) {
        no_room_text(d, l, t->why, sizeof(t->why));
    } else if (v->status == HRP_OK) {
        make_end(d, l, v->queues);
        if (t->conn && hrd_setup_answer(d, l, v, msg->text, msg->text_len))
            drop_end(t);
    } else {
        struct hrd_verbs_device dev;
        t->can = look(d, l, &dev);
    }
    hrd_verbs_send_end(d, l, HRP_PEER_VERBS_ANSWER);
    t->probing = t->conn != NULL;
    if (t->full)
        refuse(d, l, "%s", t->why);
    else if (!t->conn)
        settle_without(d, l, v->status == HRP_OK, msg);
    hrd_peer_soon(d);
    return true;
}

static bool got_answer(struct hrd_daemon *d, struct hrd_peer *p, const struct hrp_peer_msg *msg)
{
    const struct hrp_peer_verbs *v = &msg->body.verbs;
    struct plink *l = by_nonce(p, v->nonce);
    struct verbs_try *t = l ? l->verbs : NULL;
    if (!t || !t->dialer)
        return true; /* of an attempt that this end has given up */
    if (t->fresh || t->cm || t->probing || t->own_ready || (t->mend ? l->nonce : 0) != v->link ||
        !hrd_setup_answered(t, v))
        return false;
    if (t->mend)
        return hrd_mend_answer(d, l, msg);
    if (v->status == HRP_REFUSED) {
        hrd_rails_stop(l->link);
        settled(d, l->link);
        return true;
    }
    heard(t, v);
    l->never = l->never || v->status == HRP_MISMATCH;
    if (p->told.nonce == v->nonce) {
        l->peer_rate = p->told.rate;
        hrd_rails_peer_has(d, l->link, p->told.of);
    }
    if (v->status == HRP_RESOURCE) {
        refuse(d, l, "%.*s", (int)msg->text_len, msg->text ? msg->text : "");
        return true;
    }
    if (!t->conn || v->status != HRP_OK) {
        settle_without(d, l, !t->conn, msg);
        return true;
    }
    if (v->queues > t->conn->n)
        return false;
    char why[sizeof(t->why)];
    hrd_verbs_conn_trim(t->conn, v->queues);
    if (hrd_setup_connect(d, l, msg, why, sizeof(why)))
        hrd_verbs_give_up(d, l, why);
    return true;
}

static bool got_ready(struct hrd_daemon *d, struct hrd_peer *p, const struct hrp_peer_msg *msg)
{
    const struct hrp_peer_ready *r = &msg->body.ready;
    struct plink *l = by_nonce(p, r->nonce);
    struct verbs_try *t = l ? l->verbs : NULL;
    if (!t)
        return true;
    if (r->status != HRP_OK && t->mend) {
        char why[sizeof(t->why)];
        snprintf(why, sizeof(why), "node %s: %.*s", p->name, (int)msg->text_len, msg->text ? msg->text : "");
        hrd_mend_failed(d, l, 0, why);
        return true;
    }
    if (r->status != HRP_OK) {
        settle(d, l, "node %s: %.*s", p->name, (int)msg->text_len, msg->text ? msg->text : "");
        return true;
    }
    if (!t->conn || t->peer_ready)
        return false;
    t->peer_ready = true;
    if (t->own_ready)
        complete(d, l);
    return true;
}

static bool got_listen(struct hrd_peer *p, const struct hrp_peer_msg *msg)
{
    struct plink *l = by_nonce(p, msg->body.listen.nonce);
    return !l || hrd_setup_listen(l, &msg->body.listen);
}

bool hrd_verbs_msg(struct hrd_daemon *d, struct hrd_peer *p, const struct hrp_peer_msg *msg)
{
    switch (msg->type) {
    case HRP_PEER_VERBS_OFFER:
        return got_offer(d, p, msg);
    case HRP_PEER_VERBS_ANSWER:
        return got_answer(d, p, msg);
    case HRP_PEER_VERBS_RAIL:
        p->told = msg->body.rail;
        return true;
    case HRP_PEER_VERBS_LISTEN:
        return got_listen(p, msg);
    case HRP_PEER_VERBS_CLOSE:
        return got_close(d, p, msg);
    case HRP_PEER_VERBS_DOWN:
        return hrd_mend_down(d, p, msg);
    default:
        return got_ready(d, p, msg);
    }
}

/* ---- steps ------------------------------------------------------------------------------------------------------ */

void hrd_verbs_begin(struct hrd_daemon *d, struct plink *l)
{
    if (hrd_rails_trying(l) ||
        l->up) /* under way; or up but about to be closed, which the peer has to answer first */
        return;
    struct verbs_try *t = hrd_verbs_try_new(d, l, hrd_link_nonce());
    t->dialer = t->fresh = true;
    hrd_peer_soon(d);
}

void hrd_verbs_again(struct hrd_daemon *d, struct plink *l)
{
    struct hrd_verbs_device dev;
    char why[sizeof(l->why)];
    if (!l->peer->up || l->peer->doomed[0] || hrd_link_tcp_used(l->peer))
        return; /* at the next tick */
    /* Where neither had a device the other end may have got one, which both should know. */
    bool any = l->none;
    for (unsigned i = 0; i < hrd_verbs_rails(&d->cfg); i++)
        any = any || hrd_verbs_device(d, l, i, NULL, &dev, why, sizeof(why));
    if (!any) {
        l->again_at = next_try(d, l);
        l->tries++;
        return;
    }
    l->again_at = 0;
    l->settled = false;
    hrd_verbs_begin(d, l);
}

static void offer(struct hrd_daemon *d, struct plink *l)
{
    struct verbs_try *t = hrd_verbs_try_new(d, l, hrd_link_nonce());
    t->dialer = true;
    make_end(d, l, HRD_VERBS_QUEUES_MAX);
    if (t->conn && hrd_setup_offer(d, l))
        drop_end(t);
    hrd_verbs_send_end(d, l, HRP_PEER_VERBS_OFFER);
}

static void start(struct hrd_daemon *d, struct plink *l)
{
    struct plink *idle;
    bool closing;
    char why[256];
    if (!class_fits(d, l, &idle, &closing)) {
        if (idle && !closing) {
            hrd_verbs_close(d, idle);
        } else if (!closing) {
            no_room_text(d, l, why, sizeof(why));
            refuse(d, l, "%s", why);
        }
        return; /* fresh: again at the next turn */
    }
    unsigned n = l->peer->minor < HRP_PEER_MINOR_RAILS ? 1 : hrd_verbs_rails(&d->cfg);
    hrd_rails_begin(d, l, n, hrd_link_nonce());
    for (unsigned i = 0; i < n; i++)
        offer(d, l->rails[i]);
}

static void probe(struct hrd_daemon *d, struct plink *l)
{
    struct verbs_try *t = l->verbs;
    char why[400];
    int r = hrd_verbs_conn_probe(t->conn, why, sizeof(why));
    if (r == 0)
        return;
    t->probing = false;
    if (r < 0) {
        hrd_verbs_give_up(d, l, why);
        return;
    }
    t->own_ready = true;
    send_ready(d, l, HRP_OK, "");
    if (t->peer_ready)
        complete(d, l);
}

/* An end that has said READY waits for the other, which has a limit of its own and a control connection that ends with
   it. */
static void check_deadline(struct hrd_daemon *d, struct plink *l)
{
    const struct verbs_try *t = l->verbs;
    char why[400];
    int r = 1;
    if (!t || t->own_ready || uv_now(d->loop) < t->deadline || hrd_setup_under_way(t))
        return;
    if (t->cm)
        r = hrd_cm_poll(t->cm, why, sizeof(why));
    if (r == 0)
        snprintf(why, sizeof(why), "%s within %u s", hrd_cm_waits_for(t->cm), hrd_setup_wait_ms(t) / 1000);
    else if (r == 1)
        snprintf(why, sizeof(why),
                 t->probing ? "the test messages did not get through within %u s: is UDP port 4791 "
                              "filtered, is the MTU larger than a switch passes, are the two ports on "
                              "one network?"
                            : "no answer to the offer of verbs within %u s",
                 (t->mend ? HRD_MEND_ATTEMPT_MS : HRD_VERBS_TIMEOUT_MS) / 1000);
    hrd_verbs_give_up(d, l, why);
}

bool hrd_verbs_step(struct hrd_daemon *d)
{
    bool again = false;
    /* What is called here may end a comm or begin another link, but it never ends a peer, and links last as long. */
    for (struct hrd_peer *p = d->peers->peers; p; p = p->next)
        for (struct plink *l = p->links; l; l = l->next) {
            hrd_setup_news(d, l);
            hrd_mend_step(d, l);
            if (l->verbs && l->verbs->fresh)
                start(d, l);
            hrd_setup_step(d, l);
            if (l->verbs && l->verbs->probing)
                probe(d, l);
            check_deadline(d, l);
            again = again || (l->verbs && !l->verbs->own_ready);
        }
    return again;
}
