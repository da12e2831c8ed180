/* SPDX-License-Identifier: MIT */
/*
 * A verbs link over several NICs of each node. Each rail is agreed on as a link by itself would be (peer_verbs.c): the
 * dialer makes an OFFER for each device that its configuration names, behind a RAIL that says which, and the other answers it
 * with the device at the same place of its own list, or with the reason why it has none. The outcome of each rail is the
 * same on both ends, so it is of all: when the attempts have ended the link is up with the rails whose attempt succeeded.
 * Without any it is as with one device that cannot be used.
 *
 * A rail that is not in the link stays out of it; but a link that lacks one that both name is closed when no communicator
 * uses it, and the next has all that can be had then.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/peer_impl.h"
#include "daemon/text.h"

#define IDLE_MS 2000u

_Static_assert(HRP_PEER_RAILS_MAX == HRD_RAILS_MAX && HRD_MAX_DEVICES == HRD_RAILS_MAX, "one limit");

/* ---- attempts --------------------------------------------------------------------------------------------------- */

static void drop_made(struct plink *rail)
{
    if (rail->made)
        hrd_verbs_conn_free(rail->made);
    rail->made = NULL;
}

void hrd_rails_stop(struct plink *l)
{
    for (unsigned i = 0; i < HRD_RAILS_MAX; i++)
        if (l->rails[i]) {
            hrd_verbs_drop(l->rails[i]);
            drop_made(l->rails[i]);
        }
}

/* The dialer makes no offer for it, because it names n devices. */
static void not_offered(struct hrd_daemon *d, struct plink *l, unsigned rail, unsigned n)
{
    struct plink *r = hrd_link_rail(d, l, rail);
    bool own = hrd_peer_dials(d, l->peer->instance);
    r->over = r->never = true;
    if (l->peer->minor < HRP_PEER_MINOR_RAILS)
        snprintf(r->out_why, sizeof(r->out_why),
                 "node %s runs a release that uses one device; install the same on all nodes", l->peer->name);
    else
        snprintf(r->out_why, sizeof(r->out_why), "verbs_device in hreduced.conf of node %s names %u device%s",
                 own ? d->node_name : l->peer->name, n, n == 1 ? "" : "s");
}

void hrd_rails_begin(struct hrd_daemon *d, struct plink *l, unsigned n, uint64_t group)
{
    hrd_rails_stop(l);
    l->nrails = n > hrd_verbs_rails(&d->cfg) ? n : hrd_verbs_rails(&d->cfg);
    l->noffers = n;
    l->group = group;
    l->one_could = l->no_device = l->required = l->busy = l->full = false;
    for (unsigned i = 0; i < l->nrails; i++) {
        struct plink *r = hrd_link_rail(d, l, i);
        r->over = r->in = false;
        r->never = i >= hrd_verbs_rails(&d->cfg);
        r->peer_rate = 0;
        r->out_why[0] = r->device[0] = '\0';
        if (i >= n)
            not_offered(d, l, i, n);
    }
}

void hrd_rails_peer_has(struct hrd_daemon *d, struct plink *l, unsigned n)
{
    for (unsigned own = l->nrails; l->nrails < n && l->nrails < HRD_RAILS_MAX; l->nrails++)
        not_offered(d, l, l->nrails, own);
}

bool hrd_rails_trying(const struct plink *l)
{
    for (unsigned i = 0; i < l->nrails; i++)
        if (l->rails[i]->verbs || l->rails[i]->made)
            return true;
    return false;
}

bool hrd_rails_over(struct plink *rail)
{
    const struct plink *l = rail->link;
    rail->over = true;
    for (unsigned i = 0; i < l->nrails; i++)
        if (!l->rails[i]->over)
            return false;
    return true;
}

void hrd_rail_tell(struct hrd_daemon *d, const struct plink *rail)
{
    const struct verbs_try *t = rail->verbs;
    /* How many offers there are, whatever the other end has said since: it waits for as many. */
    unsigned of = t->dialer ? rail->link->noffers : rail->link->nrails;
    struct hrp_peer_msg msg = {.type = HRP_PEER_VERBS_RAIL,
                               .body.rail = {.nonce = t->nonce,
                                             .group = rail->link->group,
                                             .rate = t->conn ? t->conn->dev.rate : 0,
                                             .rail = (uint8_t)rail->rail,
                                             .of = (uint8_t)of}};
    if (of > 1 && !t->mend && rail->peer->minor >= HRP_PEER_MINOR_RAILS)
        hrd_peer_send(d, rail->peer->no, &msg);
}

/* ---- the link --------------------------------------------------------------------------------------------------- */

struct plink *hrd_rails_first(const struct plink *l)
{
    return hrd_rails_by_index(l, 0);
}

struct plink *hrd_rails_by_index(const struct plink *l, unsigned index)
{
    for (unsigned i = 0; i < l->nrails; i++)
        if (l->rails[i]->in && l->rails[i]->index == index)
            return l->rails[i];
    return NULL;
}

const struct plink *hrd_rails_down(const struct plink *l)
{
    for (unsigned i = 0; i < l->nrails; i++)
        if (l->rails[i]->down_since)
            return l->rails[i];
    return NULL;
}

const char *hrd_rail_text(const struct plink *rail, char *buf, size_t len)
{
    if (rail->link->nrails > 1)
        snprintf(buf, len, "rail %u of the link", rail->rail);
    else
        snprintf(buf, len, "the link");
    return buf;
}

void hrd_rails_text(const struct plink *l, char *buf, size_t len)
{
    char devices[HRD_RAILS_MAX * (sizeof(l->device) + 2)] = "";
    unsigned n = 0;
    buf[0] = '\0';
    if (l->nrails < 2)
        return;
    for (unsigned i = 0; i < l->nrails; i++)
        if (l->rails[i]->in) {
            n++;
            hrd_text_list(devices, sizeof(devices), l->rails[i]->device);
        }
    snprintf(buf, len, "%u rail%s of %u (%s), ", n, n == 1 ? "" : "s", l->nrails, devices);
}

static void say_missing(const struct plink *l)
{
    static const char may_come[] =
        "; when that is put right a link that no communicator uses is made anew with it ('hreducectl doctor' "
        "on that node helps, or name fewer devices in verbs_device)";
    for (unsigned i = 0; i < l->nrails; i++)
        if (!l->rails[i]->in)
            hrd_warn("rail %u of the link with node %s is not used: %s. The others carry all%s", i,
                     l->peer->name, l->rails[i]->out_why, l->rails[i]->never ? "" : may_come);
}

void hrd_rails_up(struct hrd_daemon *d, struct plink *l)
{
    struct hrd_verbs_conn *c[HRD_RAILS_MAX];
    unsigned n = 0, queues = 0;
    for (unsigned i = 0; i < l->nrails; i++) {
        struct plink *r = l->rails[i];
        if (!r->made)
            continue;
        r->in = true;
        r->index = n;
        r->queues = r->made->n;
        r->down_since = 0;
        r->made->peer_rate = r->peer_rate;
        r->made->place = r->rail;
        queues += r->queues;
        c[n++] = r->made;
        r->made = NULL;
    }
    l->idle_since = 0;
    struct hrd_conn *conn = n == 1 ? &c[0]->base : hrd_rails_conn_new(c, n);
    if (!conn)
        abort();
    if (n < l->nrails)
        say_missing(l);
    hrd_link_is_up(d, l, n == 1 ? &hrd_transport_verbs : &hrd_transport_rails, conn, queues);
}

void hrd_rails_why(const struct plink *l, char *buf, size_t len)
{
    /* Each has its share of the room, so that none is cut off whole. */
    const int share = (int)(len / l->nrails > 20 ? len / l->nrails - 20 : 0);
    snprintf(buf, len, "%s", l->nrails == 1 ? l->out_why : "");
    for (unsigned i = 0; i < l->nrails && l->nrails > 1; i++)
        hrd_text_add(buf, len, "%srail %u: %.*s", i ? "; " : "", i, share, l->rails[i]->out_why);
}

bool hrd_rails_incomplete(struct hrd_daemon *d, struct plink *l)
{
    bool all = true;
    for (unsigned i = 0; i < l->nrails; i++)
        all = all && (l->rails[i]->in || l->rails[i]->never);
    if (all || !l->up || l->tcp || l->link != l || l->closing || hrd_rails_down(l) ||
        !hrd_peer_dials(d, l->peer->instance))
        return false;
    if (l->users > 0)
        l->idle_since = 0;
    else if (!l->idle_since)
        l->idle_since = uv_now(d->loop);
    return l->idle_since && uv_now(d->loop) - l->idle_since > IDLE_MS && uv_now(d->loop) >= l->keep_until;
}
