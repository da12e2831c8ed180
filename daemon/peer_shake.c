/* SPDX-License-Identifier: MIT */
/* The three opening messages of a peer connection, see proto/peer.h. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/peer_impl.h"

size_t hrd_shake_needs(const struct conn *c)
{
    switch (c->stage) {
    case CONN_HELLO:
        return sizeof(struct hrp_peer_hello);
    case CONN_REPLY:
        return sizeof(struct hrp_peer_reply);
    case CONN_CONFIRM:
        return sizeof(struct hrp_peer_confirm);
    default:
        return 0;
    }
}

static void copy_name(char dst[HRP_PEER_NAME], const char *name)
{
    memset(dst, 0, HRP_PEER_NAME);
    for (size_t i = 0; i < HRP_PEER_NAME - 1 && name[i]; i++)
        dst[i] = name[i] >= 0x20 && name[i] <= 0x7e ? name[i] : '?';
    if (dst[0] == 0)
        dst[0] = '?';
}

/* ---- dialer --------------------------------------------------------------------------------------------- */

bool hrd_shake_start(struct conn *c)
{
    struct hrd_daemon *d = c->d;
    const struct hrd_net *net = &d->peers->net;
    struct hrp_peer_hello h = {.magic = HRP_PEER_MAGIC,
                               .major = HRP_PEER_MAJOR,
                               .minor = HRP_PEER_MINOR,
                               .role = c->role,
                               .naddrs = (uint8_t)net->nown,
                               .port = net->port,
                               .nstreams = (uint16_t)d->cfg.tcp_streams};
    if (c->role == HRP_PEER_DATA) {
        h.stream = (uint16_t)c->stream;
        h.nstreams = (uint16_t)c->attempt->n;
        h.link = c->attempt->nonce;
        h.peer_no = c->peer->no;
    }
    memcpy(h.instance, d->instance, sizeof(h.instance));
    memcpy(h.addr, net->own, sizeof(h.addr));
    copy_name(h.node, d->node_name);
    c->stage = CONN_REPLY;
    c->deadline = uv_now(d->loop) + HELLO_TIMEOUT_MS;
    if (hrd_conn_queue(c, &h, sizeof(h)) != 0) {
        hrd_conn_broken(c, HRP_RESOURCE, "this daemon has no memory for the connection");
        return false;
    }
    hrd_conn_watch(c);
    return true;
}

static bool broken(struct conn *c, uint32_t status, const char *why)
{
    hrd_conn_broken(c, status, why);
    return false;
}

/* Whether the one that answered is the one that was meant. */
static bool right_one(struct conn *c, const struct hrp_peer_reply *r, char *why, size_t len)
{
    struct hrd_daemon *d = c->d;
    const uint8_t *expect = c->dial ? c->dial->expect : c->peer->instance;
    unsigned expect_len = c->dial ? c->dial->expect_len : sizeof(c->peer->instance);
    char at[HRD_ADDR_TEXT + 16];
    hrd_addr_port_text(&c->remote, at, sizeof(at));
    if (memcmp(r->instance, d->instance, sizeof(d->instance)) == 0) {
        snprintf(why, len,
                 "reached myself at %s: that address belongs to this machine (%s) too; let the other node "
                 "advertise "
                 "an address that is its own alone (keys 'interface', 'advertise')",
                 at, d->node_name);
        return false;
    }
    if (expect_len > 0 && memcmp(r->instance, expect, expect_len) != 0) {
        snprintf(
            why, len,
            "at %s answers another daemon than was expected (node %s): it was restarted since, or several "
            "machines have that address",
            at, r->node);
        return false;
    }
    return true;
}

static bool send_confirm(struct conn *c, uint32_t peer_no)
{
    struct hrp_peer_confirm confirm = {.magic = HRP_PEER_MAGIC, .peer_no = peer_no};
    if (hrd_conn_queue(c, &confirm, sizeof(confirm)) != 0)
        return broken(c, HRP_RESOURCE, "this daemon has no memory for the connection");
    hrd_conn_watch(c);
    return true;
}

static bool control_reply(struct conn *c, const struct hrp_peer_reply *r)
{
    struct hrd_daemon *d = c->d;
    struct dial *dl = c->dial;
    struct hrd_peer *p = hrd_peer_by_instance(d->peers, r->instance);
    if (p) {
        /* Known under another address: that connection serves, or will tell. */
        dl->conn = NULL;
        c->dial = NULL;
        hrd_conn_close(c);
        if (p->up)
            hrd_dial_answer(d, dl, HRP_OK, p->no, NULL);
        else
            dl->wait_peer = p->no;
        return false;
    }
    p = hrd_peer_new(d, r->instance, r->node, r->addr, r->naddrs, r->nstreams, &c->remote);
    if (!p)
        return broken(c, HRP_RESOURCE, "this daemon knows too many others already");
    c->peer = p;
    p->minor = r->minor;
    p->nconns++;
    c->stage = CONN_UP;
    return send_confirm(c, p->no);
}

static bool got_reply(struct conn *c)
{
    struct hrp_peer_reply r;
    char why[400];
    memcpy(&r, c->rx, sizeof(r));
    c->rx_have = 0;
    int check = hrp_peer_reply_check(&r);
    if (check == -EPROTONOSUPPORT) {
        snprintf(why, sizeof(why),
                 "speaks version %u of the peer protocol, this daemon %u: install the same release "
                 "on both nodes",
                 r.major, HRP_PEER_MAJOR);
        return broken(c, HRP_VERSION, why);
    }
    if (check != 0)
        return broken(c, HRP_PROTOCOL, "what answers there is not hreduced");
    if (!right_one(c, &r, why, sizeof(why)))
        return broken(c, HRP_REFUSED, why);
    if (r.status != HRP_OK) {
        snprintf(why, sizeof(why), "node %s refused the connection: %s", r.node, r.text);
        return broken(c, r.status, why);
    }
    if (c->role == HRP_PEER_CONTROL)
        return control_reply(c, &r);
    c->stage = CONN_FLUSH;
    return send_confirm(c, c->peer->no);
}

/* ---- acceptor ------------------------------------------------------------------------------------------- */

static bool send_reply(struct conn *c, uint32_t status, const char *text)
{
    struct hrd_daemon *d = c->d;
    const struct hrd_net *net = &d->peers->net;
    struct hrp_peer_reply r = {.magic = HRP_PEER_MAGIC,
                               .major = HRP_PEER_MAJOR,
                               .minor = HRP_PEER_MINOR,
                               .status = status,
                               .port = net->port,
                               .nstreams = (uint16_t)d->cfg.tcp_streams,
                               .naddrs = (uint8_t)net->nown};
    memcpy(r.instance, d->instance, sizeof(r.instance));
    memcpy(r.addr, net->own, sizeof(r.addr));
    copy_name(r.node, d->node_name);
    if (status != HRP_OK) {
        snprintf(r.text, sizeof(r.text), "%s", text);
        c->stage = CONN_FLUSH;
        c->refused = true;
        d->peers->refused++;
    }
    if (hrd_conn_queue(c, &r, sizeof(r)) != 0)
        return broken(c, HRP_RESOURCE, "this daemon has no memory for the connection");
    hrd_conn_watch(c);
    return true;
}

static bool not_ours(struct conn *c)
{
    struct hrd_peers *ps = c->d->peers;
    char at[HRD_ADDR_TEXT];
    uint32_t missed = 0;
    ps->garbage++;
    if (hrd_log_allowed(&ps->garbage_log, 5, 60000, &missed))
        hrd_warn("connection from %s to the peer port dropped: it does not speak this protocol (%llu so far, "
                 "%u not "
                 "logged)",
                 hrd_addr_text(&c->remote, at, sizeof(at)), (unsigned long long)ps->garbage, missed);
    hrd_conn_close(c);
    return false;
}

static bool got_hello(struct conn *c)
{
    struct hrd_daemon *d = c->d;
    char why[176];
    memcpy(&c->hello, c->rx, sizeof(c->hello));
    c->rx_have = 0;
    int check = hrp_peer_hello_check(&c->hello);
    if (check == -EPROTONOSUPPORT) {
        snprintf(why, sizeof(why),
                 "node %s speaks version %u of the peer protocol, yours is %u: install the same "
                 "release on both",
                 d->node_name, HRP_PEER_MAJOR, c->hello.major);
        return send_reply(c, HRP_VERSION, why);
    }
    if (check != 0)
        return not_ours(c);
    c->role = c->hello.role;
    if (d->stopping)
        return send_reply(c, HRP_SHUTDOWN, "the daemon is stopping");
    uint32_t status = HRP_OK;
    if (c->role == HRP_PEER_DATA)
        status = hrd_link_incoming(c, why, sizeof(why));
    if (status == HRP_OK)
        c->stage = CONN_CONFIRM;
    /* To ourselves we answer like to anybody: the dialer sees the instance and knows what to say. */
    return send_reply(c, status, why);
}

static bool control_confirmed(struct conn *c, uint32_t remote_no)
{
    struct hrd_daemon *d = c->d;
    struct hrd_peer *p = hrd_peer_by_instance(d->peers, c->hello.instance);
    if (memcmp(c->hello.instance, d->instance, sizeof(d->instance)) == 0)
        return not_ours(c);
    if (p && p->remote_no != 0 && p->remote_no != remote_no) {
        hrd_peer_lose(d, p, "has given up the connection and made a new one");
        p = NULL;
    }
    /* Our own attempt has just failed; this one comes in time. */
    if (p && !p->up)
        p->doomed[0] = 0;
    if (p && p->nconns >= 2)
        return not_ours(c);
    if (!p) {
        struct hrp_addr via = c->remote;
        via.port = c->hello.port;
        p = hrd_peer_new(d, c->hello.instance, c->hello.node, c->hello.addr, c->hello.naddrs,
                         c->hello.nstreams, &via);
    }
    if (!p)
        return not_ours(c);
    p->remote_no = remote_no;
    p->minor = c->hello.minor;
    p->nconns++;
    c->peer = p;
    d->peers->nstrangers--;
    c->stage = CONN_OPEN;
    struct hrp_peer_msg up = {.type = HRP_PEER_UP, .body.up.peer_no = p->no};
    if (hrd_conn_queue_msg(c, &up) != 0)
        return broken(c, HRP_RESOURCE, "was given up: this daemon has no memory");
    hrd_peer_is_up(d, p, c);
    return true;
}

static bool got_confirm(struct conn *c)
{
    struct hrp_peer_confirm confirm;
    memcpy(&confirm, c->rx, sizeof(confirm));
    c->rx_have = 0;
    if (hrp_peer_confirm_check(&confirm) != 0)
        return not_ours(c);
    if (c->role == HRP_PEER_CONTROL)
        return control_confirmed(c, confirm.peer_no);
    hrd_link_stream_ready(c);
    return false;
}

bool hrd_shake_step(struct conn *c)
{
    switch (c->stage) {
    case CONN_HELLO:
        return got_hello(c);
    case CONN_REPLY:
        return got_reply(c);
    default:
        return got_confirm(c);
    }
}
