/* SPDX-License-Identifier: MIT */
/* Other daemons in the status document. */
#include <jansson.h>
#include <stdio.h>

#include "daemon/peer_impl.h"

/* What is said of a rail: of the only one of a link as of the link itself. */
static void add_rail(json_t *o, const struct plink *r, uint64_t now)
{
    json_object_set_new(o, "state", json_string(r->down_since ? "interrupted" : "up"));
    json_object_set_new(o, "new_paths", json_integer((json_int_t)r->mended));
    if (r->tcp)
        return;
    json_object_set_new(o, "setup", json_string(r->rdmacm ? "RDMA-CM" : "exchange"));
    if (!r->rdmacm)
        json_object_set_new(o, "setup_reason", json_string(r->setup_why));
    if (r->down_since) {
        json_object_set_new(o, "interrupted_ms", json_integer((json_int_t)(now - r->down_since)));
        json_object_set_new(o, "reason", json_string(r->down_why));
        if (r->why[0])
            json_object_set_new(o, "last_attempt", json_string(r->why));
    }
}

/* Of the devices that the configuration of one of the two nodes names, each with what the agent knows of it. */
static json_t *rails_json(const struct plink *l, const struct hrd_snapshot_link *s, uint64_t now)
{
    json_t *list = json_array();
    for (unsigned i = 0; i < l->nrails; i++) {
        const struct plink *r = l->rails[i];
        json_t *o = json_pack("{s:i, s:s}", "rail", (int)i, "device", r->device);
        if (r->in) {
            add_rail(o, r, now);
            json_object_set_new(o, "queue_pairs", json_integer((json_int_t)r->queues));
        } else {
            json_object_set_new(o, "state", json_string("not used"));
            json_object_set_new(o, "reason", json_string(r->out_why));
        }
        if (r->in && s && r->index < s->nrails) {
            json_object_set_new(o, "address", json_string(s->rail[r->index].detail));
            json_object_set_new(o, "tx_bytes", json_integer((json_int_t)s->rail[r->index].tx_bytes));
            json_object_set_new(o, "rx_bytes", json_integer((json_int_t)s->rail[r->index].rx_bytes));
        }
        json_array_append_new(list, o);
    }
    return list;
}

struct json_t *hrd_link_rails_json(struct hrd_daemon *d, uint32_t link, const struct hrd_snapshot_link *s)
{
    const struct plink *l = d->peers ? hrd_link_by_id(d->peers, link) : NULL;
    return l && l->up && l->nrails > 1 ? rails_json(l, s, uv_now(d->loop)) : NULL;
}

static json_t *link_json(const struct plink *l, uint64_t now)
{
    json_t *o = json_pack("{s:I}", "link", (json_int_t)l->id);
    const struct plink *rail = hrd_rails_down(l);
    add_rail(o, rail ? rail : l->tcp ? l : hrd_rails_first(l), now);
    if (!l->tcp) {
        json_object_set_new(o, "service_level", json_integer(l->sl));
        json_object_set_new(o, "traffic_class", json_integer(l->tc));
    }
    return o;
}

/* A peer that is there, but cannot be reached over one of its links. */
static const char *state_of(const struct hrd_peer *p)
{
    for (const struct plink *l = p->links; l; l = l->next)
        if (l->down_since)
            return "link interrupted";
    return p->up ? "up" : "connecting";
}

static json_t *links_json(const struct hrd_peer *p, uint64_t now)
{
    json_t *list = json_array();
    for (const struct plink *l = p->links; l; l = l->next)
        if (l->up)
            json_array_append_new(list, link_json(l, now));
    return list;
}

struct json_t *hrd_peers_json(struct hrd_daemon *d)
{
    json_t *list = json_array();
    char instance[2 * sizeof(d->instance) + 1];
    if (!d->peers)
        return list;
    for (const struct hrd_peer *p = d->peers->peers; p; p = p->next) {
        uint64_t now = uv_now(d->loop);
        for (size_t i = 0; i < sizeof(p->instance); i++)
            snprintf(instance + 2 * i, 3, "%02x", p->instance[i]);
        json_t *peer = json_pack(
            "{s:I, s:s, s:s, s:s, s:s, s:b, s:o, s:I, s:I, s:I, s:I, s:I}", "peer", (json_int_t)p->no, "name",
            p->name, "address", p->where, "instance", instance, "state", state_of(p), "link",
            hrd_link_any_up(p), "links", links_json(p, now), "rtt_us", (json_int_t)(p->rtt_ns / 1000),
            "silent_ms", (json_int_t)(now - p->last_rx), "since_ms", (json_int_t)(now - p->since),
            "messages_sent", (json_int_t)p->tx_msgs, "messages_received", (json_int_t)p->rx_msgs);
        for (const struct plink *l = p->links; l; l = l->next)
            if (l->settled && l->half)
                json_object_set_new(peer, "no_verbs", json_string(l->why));
        json_array_append_new(list, peer);
    }
    return list;
}

/* The NIC that data to other nodes takes: the RDMA device, or the interface of the own address. */
static const char *nic(const struct hrd_peers *ps)
{
    const struct hrp_addr *own = ps->net.nsource > 0 ? &ps->net.source[0] : &ps->net.own[0];
    for (unsigned i = 0; i < HRD_RAILS_MAX; i++)
        if (ps->verbs_device[i][0])
            return ps->verbs_device[i];
    return hrd_netif_name_of(ps->ifs, ps->nifs, own);
}

struct json_t *hrd_peer_port_json(struct hrd_daemon *d)
{
    const struct hrd_peers *ps = d->peers;
    if (!ps)
        return json_object();
    json_t *devices = json_array();
    for (unsigned i = 0; i < HRD_RAILS_MAX; i++)
        if (ps->verbs_device[i][0])
            json_array_append_new(devices, json_string(ps->verbs_device[i]));
    return json_pack("{s:s, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "nic", nic(ps), "rails", devices,
                     "accepted", (json_int_t)ps->accepted, "garbage", (json_int_t)ps->garbage, "refused",
                     (json_int_t)ps->refused, "silent", (json_int_t)ps->evicted, "lost", (json_int_t)ps->lost,
                     "links_interrupted", (json_int_t)ps->interrupted, "links_mended", (json_int_t)ps->mended,
                     "rdmacm_rejected", (json_int_t)hrd_setup_rejected(ps));
}
