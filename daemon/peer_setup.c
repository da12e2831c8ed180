/* SPDX-License-Identifier: MIT */
/*
 * How the queue pairs of an attempt at a verbs link are connected (key verbs_setup):
 *
 *   exchange   with what OFFER and ANSWER say
 *   RDMA-CM    OFFER says that it is wanted; the other end says where it listens (LISTEN) and that it waits (ANSWER); the
 *              dialer then makes a request for each queue pair, which carries the attempt's nonce
 *
 * Where only one of the two can, or RDMA-CM does not get through, `auto` goes on with exchange, and keeps the reason for
 * the path report: a new link at once, with an OFFER that replaces the first; a path that is made anew after some attempts.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/peer_impl.h"

/* For the requests of all queue pairs, from the address to the answer. */
#define CM_TIMEOUT_MS 3000u
/* The same for a new path, which has to be there within peer_timeout; after so many such attempts comes one by exchange. */
#define CM_MEND_MS 1000u
#define CM_MENDS 1u
#define CANDIDATES 64u

struct peer_cm {
    struct hrd_daemon *d;
    struct hrd_cm *cm;
    uv_poll_t poll;
};

/* ---- the daemon's event channel ---------------------------------------------------------------------------------- */

static void on_cm(uv_poll_t *h, int status, int events)
{
    struct peer_cm *pc = h->data;
    (void)status;
    (void)events;
    hrd_cm_events(pc->cm);
    hrd_peer_soon(pc->d);
}

/* Made when it is needed first; NULL with a sentence. */
static struct hrd_cm *cm_of(struct hrd_daemon *d, char *why, size_t len)
{
    if (d->peers->cm)
        return d->peers->cm->cm;
    const struct hrd_rdmacm *api = NULL;
    snprintf(why, len, "%s has no RDMA-CM", d->verbs->name);
    if (d->verbs->rdmacm)
        api = d->verbs->rdmacm(why, len);
    struct hrd_cm *cm = api ? hrd_cm_new(api, why, len) : NULL;
    if (!cm)
        return NULL;
    struct peer_cm *pc = calloc(1, sizeof(*pc));
    if (!pc || uv_poll_init(d->loop, &pc->poll, hrd_cm_fd(cm)) != 0)
        abort();
    pc->d = d;
    pc->cm = cm;
    pc->poll.data = pc;
    uv_poll_start(&pc->poll, UV_READABLE, on_cm);
    d->peers->cm = pc;
    return cm;
}

static void cm_freed(uv_handle_t *h)
{
    free(h->data);
}

void hrd_setup_end(struct hrd_peers *ps)
{
    struct peer_cm *pc = ps->cm;
    ps->cm = NULL;
    if (!pc)
        return;
    uv_close((uv_handle_t *)&pc->poll, cm_freed);
    hrd_cm_free(pc->cm);
}

uint64_t hrd_setup_rejected(const struct hrd_peers *ps)
{
    return ps->cm ? hrd_cm_rejected(ps->cm->cm) : 0;
}

/* ---- which of the two -------------------------------------------------------------------------------------------- */

static bool strict(const struct hrd_daemon *d)
{
    return d->cfg.verbs_setup == HRD_SETUP_RDMACM;
}

/* On RoCE the GID is the address; on InfiniBand any of this node's may be that of the port's IPoIB interface. */
static bool own_address(struct hrd_daemon *d, struct hrd_cm *cm, const struct hrd_verbs_device *dev,
                        struct hrp_addr *out, char *why, size_t len)
{
    const struct hrd_peers *ps = d->peers;
    struct hrp_addr list[CANDIDATES];
    unsigned n = 0;
    if (dev->ethernet) {
        list[0] = hrd_verbs_gid_addr(&dev->gid);
        return hrd_cm_address(cm, dev, list, 1, out, why, len);
    }
    for (unsigned i = 0; i < ps->net.nown; i++)
        list[n++] = ps->net.own[i];
    for (unsigned i = 0; i < ps->nifs && n < CANDIDATES; i++)
        if (ps->ifs[i].up && !ps->ifs[i].loopback && !ps->ifs[i].virt)
            list[n++] = ps->ifs[i].addr;
    return hrd_cm_address(cm, dev, list, n, out, why, len);
}

/* Whether this end would: then its address is in t->own, otherwise the reason in t->setup_why. */
static bool can(struct hrd_daemon *d, struct plink *l)
{
    struct verbs_try *t = l->verbs;
    char *why = t->setup_why;
    size_t len = sizeof(t->setup_why);
    t->peers_reason = false;
    if (d->cfg.verbs_setup == HRD_SETUP_EXCHANGE) {
        snprintf(why, len, "verbs_setup = exchange in hreduced.conf");
        return false;
    }
    if (l->peer->minor < HRP_PEER_MINOR_RDMACM) {
        snprintf(why, len, "the peer runs a release without RDMA-CM");
        return false;
    }
    struct hrd_cm *cm = cm_of(d, why, len);
    return cm && own_address(d, cm, &t->conn->dev, &t->own, why, len);
}

static void peer_says(struct verbs_try *t, const char *text, size_t len)
{
    t->rdmacm = false;
    t->peers_reason = true;
    snprintf(t->setup_why, sizeof(t->setup_why), "%.*s", (int)len, text ? text : "");
    if (!t->setup_why[0])
        snprintf(t->setup_why, sizeof(t->setup_why), "it asked for exchange this time");
}

/* "node n1: verbs_setup = exchange in hreduced.conf" */
static void reason(const struct hrd_daemon *d, const struct plink *l, char *buf, size_t len)
{
    const struct verbs_try *t = l->verbs;
    snprintf(buf, len, "node %s: %s", t->peers_reason ? l->peer->name : d->node_name, t->setup_why);
}

/* This end takes nothing but RDMA-CM, and there is none. */
static int insist(const struct hrd_daemon *d, const struct plink *l, char *why, size_t len)
{
    char text[sizeof(l->verbs->setup_why) + HRP_PEER_NAME + 8];
    reason(d, l, text, sizeof(text));
    snprintf(why, len, "verbs_setup = rdmacm, but %s", text);
    return -EOPNOTSUPP;
}

int hrd_setup_offer(struct hrd_daemon *d, struct plink *l)
{
    struct verbs_try *t = l->verbs;
    if (t->mend && l->cm_failed >= CM_MENDS && !strict(d))
        snprintf(t->setup_why, sizeof(t->setup_why), "%s", l->cm_why);
    else
        t->rdmacm = can(d, l);
    return t->rdmacm || !strict(d) ? 0 : insist(d, l, t->why, sizeof(t->why));
}

/* ---- connecting -------------------------------------------------------------------------------------------------- */

static unsigned cm_ms(const struct verbs_try *t)
{
    return t->mend ? CM_MEND_MS : CM_TIMEOUT_MS;
}

static unsigned probe_ms(const struct verbs_try *t)
{
    return t->mend ? HRD_MEND_ATTEMPT_MS : HRD_VERBS_TIMEOUT_MS;
}

unsigned hrd_setup_wait_ms(const struct verbs_try *t)
{
    return cm_ms(t) + probe_ms(t);
}

static void send_listen(struct hrd_daemon *d, const struct plink *l)
{
    struct hrp_peer_msg msg = {.type = HRP_PEER_VERBS_LISTEN,
                               .body.listen = {.nonce = l->verbs->nonce, .addr = l->verbs->own}};
    hrd_peer_send(d, l->peer->no, &msg);
}

int hrd_setup_answer(struct hrd_daemon *d, struct plink *l, const struct hrp_peer_verbs *v, const char *text,
                     size_t len)
{
    struct verbs_try *t = l->verbs;
    struct hrd_verbs_end end = hrd_verbs_end_of(v);
    if (!t->mend)
        end.queues = (uint8_t)t->conn->n; /* the dialer uses as many of its own as this end has */
    if (!v->rdmacm)
        peer_says(t, text, len);
    else
        t->rdmacm =
            can(d, l) && hrd_cm_listen(d->peers->cm->cm, &t->own, t->setup_why, sizeof(t->setup_why)) == 0;
    if (!t->rdmacm && strict(d))
        return insist(d, l, t->why, sizeof(t->why));
    if (!t->rdmacm)
        return hrd_verbs_conn_connect(t->conn, &end, false, t->why, sizeof(t->why));
    int err = hrd_verbs_conn_meet(t->conn, &end, t->why, sizeof(t->why));
    if (err)
        return err;
    (void)hrd_verbs_conn_begin(t->conn, false, t->why, sizeof(t->why));
    t->cm = hrd_cm_await(d->peers->cm->cm, t->conn, t->nonce);
    t->deadline = uv_now(d->loop) + hrd_setup_wait_ms(t);
    send_listen(d, l);
    return 0;
}

bool hrd_setup_listen(struct plink *l, const struct hrp_peer_listen *m)
{
    struct verbs_try *t = l->verbs;
    if (!t->dialer || !t->rdmacm || t->cm || t->probing)
        return false;
    t->to = m->addr;
    return true;
}

bool hrd_setup_answered(const struct verbs_try *t, const struct hrp_peer_verbs *v)
{
    return v->status != HRP_OK || !v->rdmacm || (t->rdmacm && t->to.family != 0);
}

int hrd_setup_connect(struct hrd_daemon *d, struct plink *l, const struct hrp_peer_msg *msg, char *why,
                      size_t len)
{
    struct verbs_try *t = l->verbs;
    const struct hrp_peer_verbs *v = &msg->body.verbs;
    struct hrd_verbs_end end = hrd_verbs_end_of(v);
    if (t->rdmacm && !v->rdmacm) {
        peer_says(t, msg->text, msg->text_len);
        if (strict(d))
            return insist(d, l, why, len);
    }
    int err = t->rdmacm ? hrd_verbs_conn_meet(t->conn, &end, why, len)
                        : hrd_verbs_conn_connect(t->conn, &end, true, why, len);
    if (err)
        return err;
    t->probing = !t->rdmacm;
    if (t->rdmacm) {
        t->cm = hrd_cm_dial(d->peers->cm->cm, t->conn, t->nonce, &t->own, &t->to, cm_ms(t) / 2);
        t->deadline = uv_now(d->loop) + cm_ms(t);
    }
    hrd_peer_soon(d);
    return 0;
}

/* A new link goes on without RDMA-CM: other queue pairs, another OFFER. */
static void offer_exchange(struct hrd_daemon *d, struct plink *l, const char *why)
{
    struct verbs_try *t = l->verbs;
    struct hrd_verbs_device dev = t->conn->dev;
    hrd_cm_setup_free(t->cm);
    t->cm = NULL;
    t->rdmacm = false;
    snprintf(t->setup_why, sizeof(t->setup_why), "%s", why);
    hrd_info("verbs link with node %s: no connection by RDMA-CM, going on with exchange: %s", l->peer->name,
             why);
    t->nonce = hrd_link_nonce();
    t->deadline = uv_now(d->loop) + HRD_VERBS_TIMEOUT_MS;
    if (hrd_verbs_conn_renew(t->conn, &dev, t->nonce, t->why, sizeof(t->why))) {
        hrd_verbs_conn_free(t->conn);
        t->conn = NULL;
    }
    hrd_verbs_send_end(d, l, HRP_PEER_VERBS_OFFER);
}

static void failed(struct hrd_daemon *d, struct plink *l, const char *why)
{
    struct verbs_try *t = l->verbs;
    if (t->mend) {
        l->cm_failed++;
        snprintf(l->cm_why, sizeof(l->cm_why), "%s", why);
    }
    if (t->mend || strict(d))
        hrd_verbs_give_up(d, l, why);
    else
        offer_exchange(d, l, why);
}

void hrd_setup_step(struct hrd_daemon *d, struct plink *l)
{
    struct verbs_try *t = l->verbs;
    char why[400];
    if (!hrd_setup_under_way(t))
        return;
    int r = hrd_cm_poll(t->cm, why, sizeof(why));
    if (r == 1)
        r = hrd_verbs_conn_begin(t->conn, true, why, sizeof(why)) ? -EIO : 1;
    if (r == 0 && uv_now(d->loop) < t->deadline)
        return;
    if (r == 0)
        snprintf(why, sizeof(why), "%s within %u s", hrd_cm_waits_for(t->cm), cm_ms(t) / 1000);
    if (r <= 0) {
        failed(d, l, why);
        return;
    }
    t->probing = true;
    t->deadline = uv_now(d->loop) + probe_ms(t);
}

bool hrd_setup_under_way(const struct verbs_try *t)
{
    return t && t->cm && t->dialer && !t->probing && !t->own_ready;
}

void hrd_setup_done(struct hrd_daemon *d, struct plink *l)
{
    struct verbs_try *t = l->verbs;
    /* Not before: giving up the old ones sends messages, which a path that is down does not carry; soft-RoCE's management
       queue pair does not survive that. */
    hrd_cm_setup_free(l->cm);
    l->cm = t->cm;
    t->cm = NULL;
    l->rdmacm = t->rdmacm;
    l->setup_why[0] = '\0';
    l->cm_failed = 0;
    if (l->cm)
        hrd_cm_settled(l->cm);
    else
        reason(d, l, l->setup_why, sizeof(l->setup_why));
}

void hrd_setup_news(struct hrd_daemon *d, struct plink *l)
{
    char why[200];
    if (l->cm && l->in && !l->down_since && hrd_cm_news(l->cm, why, sizeof(why)))
        hrd_mend_ask(d, l, why);
}

const char *hrd_peer_setup(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want,
                           const char **why)
{
    struct hrd_peer *p = d->peers ? hrd_peer_by_no(d->peers, no) : NULL;
    const struct plink *l =
        p && want->transport != HRD_WANT_TCP ? hrd_link_class(d, p, want->sl, want->tc) : NULL;
    *why = "";
    if (!l || !l->up)
        return NULL;
    l = hrd_rails_first(l);
    *why = l->setup_why;
    return l->rdmacm ? "RDMA-CM" : "exchange";
}
