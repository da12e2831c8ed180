/* SPDX-License-Identifier: MIT */
/*
 * A verbs link whose path failed gets a new one, over the control connection, for as long as the peer counts as alive:
 *
 *   other     DOWN     when its end noticed first
 *   dialer    OFFER    why; new queue pairs, and how many messages had arrived on the old ones; or why it has none yet
 *   other     ANSWER   the same; its queue pairs are connected already
 *   both      probe, READY as for a new link
 *
 * and again while that fails. Neither end speaks before its agent has let go of the link, and with it everything that had
 * arrived. When peer_timeout has passed the link is lost, with the first reason and the last.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/peer_impl.h"

#define RETRY_MS 250u

static void give_up(struct hrd_daemon *d, struct plink *l)
{
    char text[sizeof(l->peer->doomed)];
    snprintf(text, sizeof(text), "lost its data link: %.500s; no new path within %" PRIu64 " ms: %.300s",
             l->down_why, uv_now(d->loop) - l->down_since,
             l->why[0] ? l->why : "the other end did not answer");
    hrd_peer_doom(d, l->peer, text);
}

/* The path is away from now on. */
static void note_down(struct hrd_daemon *d, struct plink *l, const char *why)
{
    char what[32];
    if (l->down_since)
        return;
    l->down_since = uv_now(d->loop) ? uv_now(d->loop) : 1;
    snprintf(l->down_why, sizeof(l->down_why), "%s", why);
    l->why[0] = '\0';
    d->peers->interrupted++;
    hrd_warn("%s with node %s is interrupted and made anew: %s", hrd_rail_text(l, what, sizeof(what)),
             l->peer->name, why);
}

/* ---- attempts --------------------------------------------------------------------------------------------------- */

/* New queue pairs; false: the reason is in t->why. */
static bool renew(struct hrd_daemon *d, struct plink *l, struct verbs_try *t)
{
    struct hrd_verbs_device dev, old = l->lent->dev;
    if (!hrd_verbs_device(d, l, l->rail, &old, &dev, t->why, sizeof(t->why)))
        return false;
    dev.queues = old.queues;
    if (hrd_verbs_conn_renew(l->lent, &dev, t->nonce, t->why, sizeof(t->why)))
        return false;
    t->conn = l->lent;
    return true;
}

static struct verbs_try *attempt(struct hrd_daemon *d, struct plink *l, uint64_t nonce)
{
    struct verbs_try *t = hrd_verbs_try_new(d, l, nonce);
    t->mend = true;
    t->deadline = uv_now(d->loop) + HRD_MEND_ATTEMPT_MS;
    return t;
}

static void dial(struct hrd_daemon *d, struct plink *l)
{
    struct verbs_try *t = attempt(d, l, hrd_link_nonce());
    t->dialer = true;
    bool can = renew(d, l, t) && hrd_setup_offer(d, l) == 0;
    if (!can)
        t->conn = NULL; /* still the link's, and lent */
    hrd_verbs_send_end(d, l, HRP_PEER_VERBS_OFFER);
    if (!can)
        hrd_mend_failed(d, l, 0, t->why);
}

static void answer(struct hrd_daemon *d, struct plink *l)
{
    struct verbs_try *t = attempt(d, l, l->offer.nonce);
    int err = 0;
    l->offered = false;
    if (renew(d, l, t))
        err = hrd_setup_answer(d, l, &l->offer, NULL, 0);
    if (err)
        t->conn = NULL;
    hrd_verbs_send_end(d, l, HRP_PEER_VERBS_ANSWER);
    t->probing = t->conn != NULL;
    if (!t->conn)
        hrd_mend_failed(d, l, err, t->why);
    hrd_peer_soon(d);
}

void hrd_mend_failed(struct hrd_daemon *d, struct plink *l, int err, const char *why)
{
    char text[sizeof(l->why)];
    snprintf(text, sizeof(text), "%s", why);
    memcpy(l->why, text, sizeof(text));
    hrd_verbs_drop(l);
    l->retry_at = uv_now(d->loop) + RETRY_MS;
    hrd_debug("no new path to node %s yet: %s", l->peer->name, l->why);
    if (err == -EBADMSG)
        give_up(d, l);
}

void hrd_mend_done(struct hrd_daemon *d, struct plink *l)
{
    char what[32];
    hrd_setup_done(d, l);
    hrd_verbs_drop(l);
    hrd_notice("%s with node %s has a new path after %" PRIu64 " ms", hrd_rail_text(l, what, sizeof(what)),
               l->peer->name, uv_now(d->loop) - l->down_since);
    l->lent = NULL;
    l->asked = false;
    l->down_since = l->retry_at = 0;
    l->why[0] = '\0';
    l->mended++;
    d->peers->mended++;
    hrd_agent_link_resume(d->agent, l->link->id, l->index);
    hrd_member_link(d, l->peer->no, NULL); /* communicators that wait for the path */
}

bool hrd_peer_mending(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want, char *why,
                      size_t len)
{
    struct hrd_peer *p = d->peers ? hrd_peer_by_no(d->peers, no) : NULL;
    const struct plink *l =
        p && want->transport != HRD_WANT_TCP ? hrd_link_class(d, p, want->sl, want->tc) : NULL;
    if (!l || !l->up || !(l = hrd_rails_down(l)))
        return false;
    snprintf(
        why, len, "the path of their verbs link is away for %" PRIu64 " ms (%.500s); no new one yet: %.300s",
        uv_now(d->loop) - l->down_since, l->down_why, l->why[0] ? l->why : "the other end did not answer");
    return true;
}

/* ---- news ------------------------------------------------------------------------------------------------------- */

void hrd_mend_begin(struct hrd_daemon *d, struct plink *l, struct hrd_conn *conn, const char *why)
{
    if (!l->in || l->lent)
        return;
    note_down(d, l, why);
    l->lent = (struct hrd_verbs_conn *)conn;
    l->retry_at = uv_now(d->loop);
    if (hrd_peer_dials(d, l->peer->instance))
        hrd_peer_soon(d);
    else if (l->offered)
        answer(d, l);
    else
        hrd_verbs_send_ready(d, l, HRP_PEER_VERBS_DOWN, l->nonce, HRP_PEER_LOST, why);
}

void hrd_mend_ask(struct hrd_daemon *d, struct plink *l, const char *why)
{
    note_down(d, l, why);
    if (!l->asked && !l->lent)
        hrd_agent_link_interrupt(d->agent, l->link->id, l->index, why);
    l->asked = true;
}

bool hrd_mend_down(struct hrd_daemon *d, struct hrd_peer *p, const struct hrp_peer_msg *msg)
{
    struct plink *l = hrd_link_by_nonce(p, msg->body.ready.nonce);
    char why[sizeof(l->down_why)];
    if (!hrd_peer_dials(d, p->instance) || !l)
        return false;
    snprintf(why, sizeof(why), "node %s: %.*s", p->name, (int)msg->text_len, msg->text ? msg->text : "");
    hrd_mend_ask(d, l, why);
    return true;
}

bool hrd_mend_offer(struct hrd_daemon *d, struct hrd_peer *p, const struct hrp_peer_msg *msg)
{
    const struct hrp_peer_verbs *v = &msg->body.verbs;
    struct plink *l = hrd_link_by_nonce(p, v->link);
    char why[sizeof(l->down_why)];
    if (!l)
        return false;
    hrd_verbs_drop(l);
    snprintf(why, sizeof(why), "node %s: %.*s", p->name, (int)msg->text_len, msg->text ? msg->text : "");
    if (v->status != HRP_OK) { /* not yet; it will offer again */
        hrd_mend_ask(d, l, why);
        snprintf(l->why, sizeof(l->why), "%s", why);
        return true;
    }
    l->offer = *v;
    l->offered = true;
    if (l->lent)
        answer(d, l);
    else
        hrd_mend_ask(d, l, why);
    return true;
}

bool hrd_mend_answer(struct hrd_daemon *d, struct plink *l, const struct hrp_peer_msg *msg)
{
    const struct hrp_peer_verbs *v = &msg->body.verbs;
    struct verbs_try *t = l->verbs;
    char why[sizeof(t->why)];
    if (v->status != HRP_OK) {
        snprintf(why, sizeof(why), "node %s: %.*s", l->peer->name, (int)msg->text_len,
                 msg->text ? msg->text : "");
        hrd_mend_failed(d, l, 0, why);
        return true;
    }
    int err = hrd_setup_connect(d, l, msg, why, sizeof(why));
    if (err) {
        hrd_verbs_send_ready(d, l, HRP_PEER_VERBS_READY, t->nonce, HRP_UNSUPPORTED, why);
        hrd_mend_failed(d, l, err, why);
    }
    return true;
}

/* ---- time ------------------------------------------------------------------------------------------------------- */

void hrd_mend_step(struct hrd_daemon *d, struct plink *l)
{
    if (l->lent && !l->verbs && !l->peer->doomed[0] && uv_now(d->loop) >= l->retry_at &&
        hrd_peer_dials(d, l->peer->instance))
        dial(d, l);
}

void hrd_mend_tick(struct hrd_daemon *d, struct plink *l)
{
    if (!l->down_since)
        return;
    if (uv_now(d->loop) - l->down_since >= d->cfg.peer_timeout_ms)
        give_up(d, l);
    else
        hrd_peer_soon(d);
}
