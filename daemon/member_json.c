/* SPDX-License-Identifier: MIT */
/* Communicators in the status document: those of this node, and those that wait here as their root. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/member_impl.h"
#include "daemon/schedule.h"

static const char *const states[] = {
    [LCOMM_CONNECTING] = "connecting", [LCOMM_ADDING] = "reserving", [LCOMM_VOTED] = "waiting for the others",
    [LCOMM_ACTIVE] = "active",         [LCOMM_ENDING] = "ending",
};

static json_t *key_json(const struct hrp_key *key)
{
    char name[sizeof(key->name) + 1];
    if (key->kind == HRP_KEY_NAME)
        return json_pack("{s:s, s:I}", "name", key->name, "number", (json_int_t)key->nth);
    for (size_t i = 0; i < 16; i++)
        snprintf(name + 2 * i, 3, "%02x", (unsigned char)key->name[i]);
    return json_pack("{s:s}", "id", name);
}

static json_t *nodes_json(struct hrd_daemon *d, const struct lcomm *c)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < c->roster.nnodes; i++) {
        uint32_t ranks = 0;
        for (uint32_t r = 0; r < c->roster.nranks; r++)
            ranks += c->node_of_rank[r] == i;
        json_t *n = json_pack("{s:s, s:I}", "name", c->node[i].id.name, "ranks", (json_int_t)ranks);
        const char *why;
        if (i != c->roster.node && c->node[i].no != 0) {
            json_object_set_new(n, "peer", json_integer(c->node[i].no));
            json_object_set_new(n, "link", json_integer(c->node[i].link));
            (void)hrd_peer_transport(d, c->node[i].no, &c->want, &why);
            if (why[0] && hrd_peer_half_verbs(d, c->node[i].no, &c->want))
                json_object_set_new(n, "fell_back", json_true());
            if (why[0] && hrd_peer_no_device(d, c->node[i].no, &c->want))
                json_object_set_new(n, "no_device", json_true());
            if (why[0])
                json_object_set_new(n, "reason", json_string(why));
            const char *setup = hrd_peer_setup(d, c->node[i].no, &c->want, &why);
            if (setup)
                json_object_set_new(n, "setup", json_string(setup));
            if (setup && why[0])
                json_object_set_new(n, "setup_reason", json_string(why));
        }
        json_array_append_new(list, n);
    }
    return list;
}

static json_t *local_json(const struct lcomm *c)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < c->roster.nlocal; i++)
        if (!c->local[i].left)
            json_array_append_new(
                list, json_pack("{s:I, s:I, s:I, s:I}", "rank", (json_int_t)c->local[i].rank, "pid",
                                (json_int_t)c->local[i].pid, "session", (json_int_t)c->local[i].sid, "slot",
                                (json_int_t)c->local[i].slot));
    return list;
}

static json_t *comm_json(struct hrd_daemon *d, const struct lcomm *c)
{
    char comm[17];
    snprintf(comm, sizeof(comm), "%016llx", (unsigned long long)c->comm);
    return json_pack("{s:s, s:o, s:I, s:s, s:I, s:I, s:I, s:I, s:b, s:s, s:s, s:I, s:I, s:s, s:o, s:o}",
                     "comm", comm, "key", key_json(&c->roster.key), "uid", (json_int_t)c->roster.key.uid,
                     "state", c->state == LCOMM_ACTIVE && c->failed ? "failed" : states[c->state], "nranks",
                     (json_int_t)c->roster.nranks, "nnodes", (json_int_t)c->roster.nnodes, "node",
                     (json_int_t)c->roster.node, "age_ms", (json_int_t)(hrd_member_now(d) - c->start),
                     "reproducible", c->roster.config.reproducible == HRP_ON, "wire",
                     c->roster.config.wire_f32 == HRP_ON ? "f32" : "type", "transport",
                     hrd_transport_name(c->roster.config.transport), "service_level", (json_int_t)c->want.sl,
                     "traffic_class", (json_int_t)c->want.tc, "algorithm",
                     hrd_algo_name(c->roster.config.algo), "nodes", nodes_json(d, c), "local", local_json(c));
}

/* A set that is not complete: who is missing is what its owner wants to know. */
static json_t *pending_json(struct hrd_daemon *d, const struct rset *s)
{
    uint32_t *missing = hrd_member_alloc(s->key.nranks, sizeof(*missing)), n = 0;
    char text[512];
    for (uint32_t r = 0, at = 0; r < s->key.nranks; r++) {
        if (at < s->nranks && s->rank[at].rank == r)
            at++;
        else
            missing[n++] = r;
    }
    json_t *o = json_pack("{s:o, s:I, s:s, s:I, s:I, s:s, s:I}", "key", key_json(&s->key), "uid",
                          (json_int_t)s->key.uid, "state", s->state == RSET_COLLECT ? "collecting" : "voting",
                          "nranks", (json_int_t)s->key.nranks, "joined", (json_int_t)s->nranks, "missing",
                          hrd_ranks_text(missing, n, text, sizeof(text)), "age_ms",
                          (json_int_t)(hrd_member_now(d) - s->start));
    free(missing);
    return o;
}

struct json_t *hrd_members_json(struct hrd_daemon *d)
{
    json_t *list = json_array();
    if (!d->members)
        return list;
    for (const struct lcomm *c = d->members->comms; c; c = c->next)
        json_array_append_new(list, comm_json(d, c));
    for (const struct rset *s = d->members->sets; s; s = s->next)
        if (s->state != RSET_COMMITTED)
            json_array_append_new(list, pending_json(d, s));
    return list;
}

uint64_t hrd_members_setup_errors(const struct hrd_daemon *d)
{
    return d->members ? d->members->setup_errors : 0;
}
