/* SPDX-License-Identifier: MIT */
#include "proto/peer.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "proto/status.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "peer messages are little endian");

static const struct {
    const char *name;
    uint32_t size; /* of the fixed part */
    bool text;
} types[HRP_PEER_NTYPES] = {
    [HRP_PEER_UP] = {"UP", sizeof(struct hrp_peer_up), false},
    [HRP_PEER_PING] = {"PING", sizeof(struct hrp_peer_ping), false},
    [HRP_PEER_PONG] = {"PONG", sizeof(struct hrp_peer_ping), false},
    [HRP_PEER_BYE] = {"BYE", sizeof(struct hrp_peer_bye), true},
    [HRP_PEER_JOIN] = {"JOIN", sizeof(struct hrp_peer_join), false},
    [HRP_PEER_REFUSE] = {"REFUSE", sizeof(struct hrp_peer_refuse), true},
    [HRP_PEER_WITHDRAW] = {"WITHDRAW", sizeof(struct hrp_peer_refuse), true},
    [HRP_PEER_ROSTER] = {"ROSTER", sizeof(struct hrp_peer_roster), false},
    [HRP_PEER_VOTE] = {"VOTE", sizeof(struct hrp_peer_vote), true},
    [HRP_PEER_COMMIT] = {"COMMIT", sizeof(struct hrp_peer_comm), false},
    [HRP_PEER_FAIL] = {"FAIL", sizeof(struct hrp_peer_vote), true},
    [HRP_PEER_LEFT] = {"LEFT", sizeof(struct hrp_peer_comm), false},
    [HRP_PEER_GONE] = {"GONE", sizeof(struct hrp_peer_comm), false},
    [HRP_PEER_VERBS_OFFER] = {"VERBS_OFFER", sizeof(struct hrp_peer_verbs), true},
    [HRP_PEER_VERBS_ANSWER] = {"VERBS_ANSWER", sizeof(struct hrp_peer_verbs), true},
    [HRP_PEER_VERBS_READY] = {"VERBS_READY", sizeof(struct hrp_peer_ready), true},
    [HRP_PEER_VERBS_CLOSE] = {"VERBS_CLOSE", sizeof(struct hrp_peer_ready), false},
    [HRP_PEER_VERBS_DOWN] = {"VERBS_DOWN", sizeof(struct hrp_peer_ready), true},
    [HRP_PEER_VERBS_LISTEN] = {"VERBS_LISTEN", sizeof(struct hrp_peer_listen), false},
    [HRP_PEER_VERBS_RAIL] = {"VERBS_RAIL", sizeof(struct hrp_peer_rail), false},
    [HRP_PEER_ASK] = {"ASK", sizeof(struct hrp_peer_ask), false},
    [HRP_PEER_JOINING] = {"JOINING", sizeof(struct hrp_peer_refuse), false},
    [HRP_PEER_WAITS] = {"WAITS", sizeof(struct hrp_peer_refuse), true},
    [HRP_PEER_TELL] = {"TELL", sizeof(struct hrp_peer_tell), true},
};

static bool known(unsigned type)
{
    return type > 0 && type < HRP_PEER_NTYPES;
}

const char *hrp_peer_name(unsigned type)
{
    return known(type) ? types[type].name : "unknown message";
}

static bool all_zero(const void *p, size_t len)
{
    const unsigned char *b = p;
    for (size_t i = 0; i < len; i++)
        if (b[i] != 0)
            return false;
    return true;
}

/* Printable ASCII, NUL-terminated, zero behind: names stand in logs and in other people's errors. */
static bool name_ok(const char *name, size_t size)
{
    size_t len = strnlen(name, size);
    if (len == 0 || len == size || !all_zero(name + len, size - len))
        return false;
    for (size_t i = 0; i < len; i++)
        if (name[i] < 0x20 || name[i] > 0x7e)
            return false;
    return true;
}

static bool addrs_ok(const struct hrp_addr *addr, unsigned n)
{
    if (n == 0 || n > HRP_MAX_ADDRS)
        return false;
    for (unsigned i = 0; i < n; i++)
        if (hrp_addr_check(&addr[i]) != 0 || addr[i].port == 0)
            return false;
    return all_zero(addr + n, (HRP_MAX_ADDRS - n) * sizeof(addr[0]));
}

int hrp_peer_hello_check(const struct hrp_peer_hello *h)
{
    if (h->magic != HRP_PEER_MAGIC)
        return -EPROTO;
    if (h->major != HRP_PEER_MAJOR)
        return -EPROTONOSUPPORT;
    if (h->port == 0 || all_zero(h->instance, sizeof(h->instance)) || !addrs_ok(h->addr, h->naddrs) ||
        !name_ok(h->node, sizeof(h->node)) || h->nstreams == 0 || h->nstreams > HRP_PEER_STREAMS_MAX)
        return -EPROTO;
    switch (h->role) {
    case HRP_PEER_CONTROL:
        return h->stream == 0 && h->link == 0 && h->peer_no == 0 ? 0 : -EPROTO;
    case HRP_PEER_DATA:
        return h->stream < h->nstreams && h->link != 0 && h->peer_no != 0 ? 0 : -EPROTO;
    default:
        return -EPROTO;
    }
}

int hrp_peer_reply_check(const struct hrp_peer_reply *r)
{
    if (r->magic != HRP_PEER_MAGIC)
        return -EPROTO;
    if (r->major != HRP_PEER_MAJOR)
        return -EPROTONOSUPPORT;
    if (r->status == HRP_IN_PROGRESS || r->status >= HRP_NSTATUS || r->port == 0 ||
        all_zero(r->instance, sizeof(r->instance)) || !addrs_ok(r->addr, r->naddrs) ||
        !name_ok(r->node, sizeof(r->node)) || r->nstreams == 0 || r->nstreams > HRP_PEER_STREAMS_MAX)
        return -EPROTO;
    bool text_ok = r->status == HRP_OK ? all_zero(r->text, sizeof(r->text))
                                       : memchr(r->text, 0, sizeof(r->text)) != NULL && r->text[0] != 0;
    return text_ok ? 0 : -EPROTO;
}

int hrp_peer_confirm_check(const struct hrp_peer_confirm *c)
{
    return c->magic == HRP_PEER_MAGIC && c->peer_no != 0 ? 0 : -EPROTO;
}

/* ---- messages ------------------------------------------------------------------------------------------ */

static bool key_ok(const struct hrp_key *k)
{
    if (k->nranks == 0 || k->nranks > HRP_MAX_RANKS)
        return false;
    if (k->kind == HRP_KEY_ID)
        return k->nth == 0 && k->attempt == 0 && all_zero(k->name + 16, sizeof(k->name) - 16);
    return k->kind == HRP_KEY_NAME && name_ok(k->name, sizeof(k->name));
}

static bool config_ok(const struct hrp_comm_config *c)
{
    return c->algo < HRP_NALGOS && c->reproducible <= HRP_ON && c->wire_f32 <= HRP_ON && c->transport <= 2 &&
           (c->require & ~HRP_REQUIRE_ALL) == 0 && c->service_level <= 15 &&
           c->class_set <= (HRP_CLASS_SL | HRP_CLASS_TC) && all_zero(c->reserved, sizeof(c->reserved));
}

static bool comm_id_ok(const uint8_t *id)
{
    return !all_zero(id, 8);
}

static bool roster_ok(const struct hrp_peer_roster *r)
{
    const struct hrp_comm_config *c = &r->config;
    return comm_id_ok(r->comm_id) && key_ok(&r->key) && config_ok(c) && c->setup_timeout_ms != 0 &&
           c->op_timeout_ms != 0 && c->reproducible != HRP_DEFAULT && c->wire_f32 != HRP_DEFAULT &&
           r->nranks == r->key.nranks && r->nnodes >= 1 && r->nnodes <= HRP_MAX_NODES &&
           r->nnodes <= r->nranks && r->node < r->nnodes && r->nlocal >= 1 && r->nlocal <= r->nranks &&
           (r->plan & ~HRP_PLAN_BITS) == 0 && r->unit_bytes > 0 && r->unit_min_bytes > 0 && r->bandwidth > 0;
}

static bool verbs_ok(const struct hrp_peer_verbs *v)
{
    const unsigned without = HRP_VERBS_NONE | HRP_VERBS_CAN;
    if (v->nonce == 0 || (v->flags & ~(HRP_VERBS_MUST | without)) != 0 || v->status == HRP_IN_PROGRESS ||
        v->status >= HRP_NSTATUS)
        return false;
    if ((v->flags & without) == without || ((v->flags & without) != 0 && v->status == HRP_OK))
        return false;
    size_t rest = offsetof(struct hrp_peer_verbs, ethernet);
    if (v->service_level > 15 || v->rdmacm > 1 || (v->status != HRP_OK && v->rdmacm != 0))
        return false;
    if (v->status != HRP_OK)
        return all_zero((const char *)v + rest, sizeof(*v) - rest);
    if (v->ethernet > 1 || v->global > 1 || v->mtu < 1 || v->mtu > 5 || v->queues < 1 ||
        v->queues > HRP_PEER_QUEUES_MAX || v->depth == 0 || v->msg_bytes == 0)
        return false;
    for (unsigned i = 0; i < HRP_PEER_QUEUES_MAX; i++) {
        bool used = i < v->queues;
        if (used != (v->qpn[i] != 0) || v->qpn[i] > 0xffffff || v->psn[i] > (used ? 0xffffffu : 0u) ||
            (v->got[i] != 0 && !(used && v->link != 0)))
            return false;
    }
    return true;
}

static bool body_ok(const struct hrp_peer_msg *m)
{
    switch (m->type) {
    case HRP_PEER_UP:
        return m->body.up.peer_no != 0 && m->body.up.reserved == 0;
    case HRP_PEER_PING:
    case HRP_PEER_PONG:
        return true;
    case HRP_PEER_BYE:
        return m->body.bye.reserved == 0;
    case HRP_PEER_JOIN:
        return key_ok(&m->body.join.key) && config_ok(&m->body.join.config) && m->body.join.join != 0 &&
               m->body.join.rank < m->body.join.key.nranks && m->body.join.reserved == 0;
    case HRP_PEER_REFUSE:
        return m->body.refuse.join != 0 && m->body.refuse.status > HRP_IN_PROGRESS &&
               m->body.refuse.status < HRP_NSTATUS && m->body.refuse.reserved == 0;
    case HRP_PEER_WITHDRAW:
    case HRP_PEER_JOINING:
    case HRP_PEER_WAITS:
        return m->body.refuse.join != 0 && m->body.refuse.status == 0 && m->body.refuse.reserved == 0;
    case HRP_PEER_ROSTER:
        return roster_ok(&m->body.roster);
    case HRP_PEER_VOTE:
        return comm_id_ok(m->body.vote.comm_id) && m->body.vote.status != HRP_IN_PROGRESS &&
               m->body.vote.status < HRP_NSTATUS && m->body.vote.reserved == 0;
    case HRP_PEER_FAIL:
        return comm_id_ok(m->body.vote.comm_id) && m->body.vote.status > HRP_IN_PROGRESS &&
               m->body.vote.status < HRP_NSTATUS && m->body.vote.reserved == 0;
    case HRP_PEER_LEFT:
        return comm_id_ok(m->body.comm.comm_id) && m->body.comm.rank < HRP_MAX_RANKS &&
               m->body.comm.reserved == 0;
    case HRP_PEER_VERBS_OFFER:
    case HRP_PEER_VERBS_ANSWER:
        return verbs_ok(&m->body.verbs);
    case HRP_PEER_VERBS_DOWN:
        return m->body.ready.nonce != 0 && m->body.ready.status == HRP_PEER_LOST &&
               m->body.ready.reserved == 0;
    case HRP_PEER_VERBS_CLOSE:
        return m->body.ready.nonce != 0 && m->body.ready.reserved == 0 &&
               (m->body.ready.status == HRP_OK || m->body.ready.status == HRP_RESOURCE);
    case HRP_PEER_VERBS_LISTEN:
        return m->body.listen.nonce != 0 && hrp_addr_check(&m->body.listen.addr) == 0 &&
               m->body.listen.addr.port != 0;
    case HRP_PEER_VERBS_RAIL:
        return m->body.rail.nonce != 0 && m->body.rail.group != 0 && m->body.rail.of >= 2 &&
               m->body.rail.of <= HRP_PEER_RAILS_MAX && m->body.rail.rail < m->body.rail.of &&
               m->body.rail.reserved == 0 && m->body.rail.reserved1 == 0;
    case HRP_PEER_VERBS_READY:
        return m->body.ready.nonce != 0 && m->body.ready.status != HRP_IN_PROGRESS &&
               m->body.ready.status < HRP_NSTATUS && m->body.ready.reserved == 0;
    case HRP_PEER_ASK:
        return m->body.ask.token != 0 && m->body.ask.reserved == 0 &&
               (m->body.ask.what == HRP_DOCTOR_HERE || m->body.ask.what == HRP_DOCTOR_REACH ||
                m->body.ask.what == HRP_DOCTOR_PROBE || m->body.ask.what == HRP_DOCTOR_LINK);
    case HRP_PEER_TELL:
        return m->body.tell.token != 0 && m->body.tell.more <= 1 && m->body.tell.status != HRP_IN_PROGRESS &&
               m->body.tell.status < HRP_NSTATUS && (m->body.tell.status == HRP_OK || m->body.tell.more == 0);
    case HRP_PEER_COMMIT:
    case HRP_PEER_GONE:
        return comm_id_ok(m->body.comm.comm_id) && m->body.comm.rank == 0 && m->body.comm.reserved == 0;
    default:
        return false;
    }
}

/* The arrays of a roster whose fixed part has passed. */
static bool arrays_ok(const struct hrp_peer_msg *m)
{
    const struct hrp_peer_roster *r = &m->body.roster;
    for (uint32_t i = 0; i < r->nlocal; i++)
        if (m->joins[i] == 0)
            return false;
    for (uint32_t i = 0; i < r->nnodes; i++) {
        const struct hrp_peer_node *n = &m->nodes[i];
        if (all_zero(n->instance, sizeof(n->instance)) || !addrs_ok(n->addr, n->naddrs) ||
            !all_zero(n->reserved, sizeof(n->reserved)) || !name_ok(n->name, sizeof(n->name)))
            return false;
        for (uint32_t j = 0; j < i; j++)
            if (memcmp(n->instance, m->nodes[j].instance, sizeof(n->instance)) == 0)
                return false;
    }
    uint32_t next = 0, mine = 0;
    for (uint32_t i = 0; i < r->nranks; i++) {
        if (m->node_of_rank[i] > next || m->node_of_rank[i] >= r->nnodes)
            return false;
        next += m->node_of_rank[i] == next;
        mine += m->node_of_rank[i] == r->node;
    }
    return next == r->nnodes && mine == r->nlocal;
}

static size_t arrays_size(const struct hrp_peer_roster *r)
{
    return (size_t)r->nlocal * sizeof(uint64_t) + (size_t)r->nnodes * sizeof(struct hrp_peer_node) +
           (size_t)r->nranks * sizeof(uint32_t);
}

static size_t text_of(const struct hrp_peer_msg *m)
{
    size_t len = m->text != NULL ? m->text_len : 0;
    return len < HRP_PEER_TEXT ? len : HRP_PEER_TEXT;
}

size_t hrp_peer_size(const struct hrp_peer_msg *msg)
{
    if (!known(msg->type))
        return 0;
    return sizeof(struct hrp_peer_hdr) + types[msg->type].size +
           (msg->type == HRP_PEER_ROSTER ? arrays_size(&msg->body.roster) : 0) + text_of(msg);
}

static void encode_arrays(const struct hrp_peer_msg *m, char *out)
{
    const struct hrp_peer_roster *r = &m->body.roster;
    memcpy(out, m->joins, r->nlocal * sizeof(uint64_t));
    out += r->nlocal * sizeof(uint64_t);
    memcpy(out, m->nodes, r->nnodes * sizeof(struct hrp_peer_node));
    out += r->nnodes * sizeof(struct hrp_peer_node);
    memcpy(out, m->node_of_rank, r->nranks * sizeof(uint32_t));
}

long hrp_peer_encode(const struct hrp_peer_msg *msg, void *buf, size_t size)
{
    if (!known(msg->type) || !body_ok(msg))
        return -EINVAL;
    size_t text = text_of(msg);
    if (text > 0 && !types[msg->type].text)
        return -EINVAL;
    if (msg->type == HRP_PEER_ROSTER && !arrays_ok(msg))
        return -EINVAL;
    size_t len = hrp_peer_size(msg);
    if (len > size)
        return -EMSGSIZE;
    struct hrp_peer_hdr hdr = {
        .magic = HRP_PEER_MAGIC, .type = msg->type, .len = (uint32_t)(len - sizeof(hdr))};
    char *out = buf;
    memcpy(out, &hdr, sizeof(hdr));
    out += sizeof(hdr);
    memcpy(out, &msg->body, types[msg->type].size);
    out += types[msg->type].size;
    if (msg->type == HRP_PEER_ROSTER)
        encode_arrays(msg, out);
    if (text > 0)
        memcpy(out, msg->text, text);
    return (long)len;
}

long hrp_peer_frame(const struct hrp_peer_hdr *hdr)
{
    if (hdr->magic != HRP_PEER_MAGIC || !known(hdr->type) || hdr->reserved != 0 || hdr->reserved1 != 0)
        return -EPROTO;
    size_t size = types[hdr->type].size;
    size_t max = size + (types[hdr->type].text ? HRP_PEER_TEXT : 0);
    if (hdr->type == HRP_PEER_ROSTER)
        max = HRP_PEER_BODY_MAX;
    if (hdr->len < size || hdr->len > max)
        return -EPROTO;
    return (long)(sizeof(*hdr) + hdr->len);
}

int hrp_peer_decode(struct hrp_peer_msg *msg, const void *buf, size_t len)
{
    struct hrp_peer_hdr hdr;
    if (len < sizeof(hdr) || (uintptr_t)buf % 8 != 0)
        return -EPROTO;
    memcpy(&hdr, buf, sizeof(hdr));
    if (hrp_peer_frame(&hdr) != (long)len)
        return -EPROTO;
    const char *at = (const char *)buf + sizeof(hdr);
    size_t rest = hdr.len - types[hdr.type].size;
    memset(msg, 0, sizeof(*msg));
    msg->type = hdr.type;
    memcpy(&msg->body, at, types[hdr.type].size);
    at += types[hdr.type].size;
    if (!body_ok(msg))
        return -EPROTO;
    if (hdr.type == HRP_PEER_ROSTER) {
        const struct hrp_peer_roster *r = &msg->body.roster;
        if (rest != arrays_size(r))
            return -EPROTO;
        msg->joins = (const uint64_t *)(const void *)at;
        at += r->nlocal * sizeof(uint64_t);
        msg->nodes = (const struct hrp_peer_node *)(const void *)at;
        at += r->nnodes * sizeof(struct hrp_peer_node);
        msg->node_of_rank = (const uint32_t *)(const void *)at;
        return arrays_ok(msg) ? 0 : -EPROTO;
    }
    if (rest > 0) {
        msg->text = at;
        msg->text_len = rest;
    }
    return 0;
}
