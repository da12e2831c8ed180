/* SPDX-License-Identifier: MIT */
/* Other daemons in the status document. */
#include <jansson.h>
#include <stdio.h>

#include "daemon/peer_impl.h"

static json_t *link_json(const struct plink *l, uint64_t now)
{
    json_t *o = json_pack("{s:I, s:s, s:I}", "link", (json_int_t)l->id, "state",
                          l->down_since ? "interrupted" : "up", "new_paths", (json_int_t)l->mended);
    if (!l->tcp) {
        json_object_set_new(o, "service_level", json_integer(l->sl));
        json_object_set_new(o, "traffic_class", json_integer(l->tc));
        json_object_set_new(o, "setup", json_string(l->rdmacm ? "RDMA-CM" : "exchange"));
        if (!l->rdmacm)
            json_object_set_new(o, "setup_reason", json_string(l->setup_why));
    }
    if (l->down_since) {
        json_object_set_new(o, "interrupted_ms", json_integer((json_int_t)(now - l->down_since)));
        json_object_set_new(o, "reason", json_string(l->down_why));
        if (l->why[0])
            json_object_set_new(o, "last_attempt", json_string(l->why));
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
    return ps->verbs_device[0] ? ps->verbs_device : hrd_netif_name_of(ps->ifs, ps->nifs, own);
}

struct json_t *hrd_peer_port_json(struct hrd_daemon *d)
{
    const struct hrd_peers *ps = d->peers;
    if (!ps)
        return json_object();
    return json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "nic", nic(ps), "accepted",
                     (json_int_t)ps->accepted, "garbage", (json_int_t)ps->garbage, "refused",
                     (json_int_t)ps->refused, "silent", (json_int_t)ps->evicted, "lost", (json_int_t)ps->lost,
                     "links_interrupted", (json_int_t)ps->interrupted, "links_mended", (json_int_t)ps->mended,
                     "rdmacm_rejected", (json_int_t)hrd_setup_rejected(ps));
}
