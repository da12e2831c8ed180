/* SPDX-License-Identifier: MIT */
/* Records of other daemons, the listener, liveness. */
#include "daemon/peer.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/clock.h"
#include "daemon/peer_impl.h"

/* ---- records -------------------------------------------------------------------------------------------- */

struct hrd_peer *hrd_peer_by_no(struct hrd_peers *ps, uint32_t no)
{
    struct hrd_peer *p = ps->peers;
    while (p && p->no != no)
        p = p->next;
    return p;
}

struct hrd_peer *hrd_peer_by_instance(struct hrd_peers *ps, const uint8_t *instance)
{
    struct hrd_peer *p = ps->peers;
    while (p && memcmp(p->instance, instance, sizeof(p->instance)) != 0)
        p = p->next;
    return p;
}

struct hrd_peer *hrd_peer_new(struct hrd_daemon *d, const uint8_t *instance, const char *name,
                              const struct hrp_addr *addr, unsigned naddrs, unsigned streams,
                              const struct hrp_addr *via)
{
    struct hrd_peers *ps = d->peers;
    struct hrd_peer *p = ps->npeers < MAX_PEERS ? calloc(1, sizeof(*p)) : NULL;
    if (!p)
        return NULL;
    p->no = ++ps->last_no;
    memcpy(p->instance, instance, sizeof(p->instance));
    snprintf(p->name, sizeof(p->name), "%s", name);
    p->naddrs = naddrs;
    memcpy(p->addr, addr, naddrs * sizeof(addr[0]));
    p->via = *via;
    /* Others are told the address that is known to work first, if it is one the peer stands by. */
    for (unsigned i = 1; i < naddrs; i++)
        if (hrd_addr_same_ip(&p->addr[i], via)) {
            struct hrp_addr a = p->addr[i];
            memmove(&p->addr[1], &p->addr[0], i * sizeof(a));
            p->addr[0] = a;
        }
    hrd_addr_port_text(via, p->where, sizeof(p->where));
    p->streams = streams;
    p->since = p->last_rx = p->last_ping = uv_now(d->loop);
    p->next = ps->peers;
    ps->peers = p;
    ps->npeers++;
    return p;
}

static void peer_unlink(struct hrd_peers *ps, struct hrd_peer *p)
{
    struct hrd_peer **at = &ps->peers;
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    ps->npeers--;
}

static void close_conns(struct hrd_daemon *d, struct hrd_peer *p)
{
    for (struct conn *c = d->peers->conns, *next; c; c = next) {
        next = c->next;
        if (c->peer == p)
            hrd_conn_close(c);
    }
}

/* Its last message: the other end's users hear why. Sent at once or never. */
static void say_bye(struct hrd_peer *p, const char *why)
{
    struct hrp_peer_msg msg = {.type = HRP_PEER_BYE, .text = why, .text_len = strlen(why)};
    if (p->tx && !p->bye)
        (void)hrd_conn_queue_msg(p->tx, &msg);
}

static void lose(struct hrd_daemon *d, struct hrd_peer *p, const char *why, const char *text)
{
    if (p->up)
        say_bye(p, text);
    /* A dial of ours on one of its connections is answered below, by way of the record. */
    for (struct dial *dl = d->peers->dials; dl; dl = dl->next)
        if (dl->conn && dl->conn->peer == p) {
            dl->conn->dial = NULL;
            dl->conn = NULL;
            dl->wait_peer = p->no;
        }
    hrd_link_end_all(d, p, text);
    close_conns(d, p);
    peer_unlink(d->peers, p);
    if (p->up) {
        d->peers->lost++;
        hrd_log_event(p->bye ? HRD_LOG_NOTICE : HRD_LOG_WARNING, HRD_MSGID_PEER_LOST, 0, "%s", text);
        hrd_member_peer_lost(d, p->no, text);
    }
    hrd_dial_peer(d, p->no, why);
    free(p);
}

void hrd_peer_lose(struct hrd_daemon *d, struct hrd_peer *p, const char *why)
{
    char text[1200];
    const struct plink *l = p->links;
    while (l && !l->down_since)
        l = l->next;
    int n = snprintf(text, sizeof(text), "node %s (%s) %s", p->name, p->where, why);
    if (l && !strstr(why, l->down_why) && n > 0 && (size_t)n < sizeof(text))
        snprintf(text + n, sizeof(text) - (size_t)n, "; its data link was interrupted before: %s",
                 l->down_why);
    lose(d, p, why, text);
}

void hrd_peer_doom(struct hrd_daemon *d, struct hrd_peer *p, const char *why)
{
    if (p->doomed[0])
        return;
    snprintf(p->doomed, sizeof(p->doomed), "%s", why);
    hrd_peer_soon(d);
}

/* ---- the loop's next turn ------------------------------------------------------------------------------- */

static void on_soon(uv_timer_t *timer)
{
    struct hrd_daemon *d = timer->data;
    struct hrd_peers *ps = d->peers;
    for (struct hrd_peer *p = ps->peers; p;) {
        if (!p->doomed[0]) {
            p = p->next;
            continue;
        }
        char why[sizeof(p->doomed)];
        memcpy(why, p->doomed, sizeof(why));
        hrd_peer_lose(d, p, why);
        p = ps->peers;
    }
    hrd_dial_start_fresh(d);
    hrd_link_start_fresh(d);
    if (hrd_verbs_step(d))
        uv_timer_start(timer, on_soon, 2, 0);
}

static void on_tick(uv_timer_t *timer);

void hrd_peer_soon(struct hrd_daemon *d)
{
    uv_timer_start(&d->peers->soon, on_soon, 0, 0);
    if (!uv_is_active((uv_handle_t *)&d->peers->timer)) {
        d->peers->last_tick = uv_now(d->loop);
        uv_timer_start(&d->peers->timer, on_tick, TICK_MS, TICK_MS);
    }
}

/* ---- what member.c uses --------------------------------------------------------------------------------- */

uint32_t hrd_peer_find(struct hrd_daemon *d, const uint8_t instance[16])
{
    struct hrd_peer *p = d->peers ? hrd_peer_by_instance(d->peers, instance) : NULL;
    return p && p->up && !p->doomed[0] ? p->no : 0;
}

bool hrd_peer_info(struct hrd_daemon *d, uint32_t no, struct hrd_peer_info *out)
{
    struct hrd_peer *p = d->peers ? hrd_peer_by_no(d->peers, no) : NULL;
    if (!p || !p->up)
        return false;
    *out = (struct hrd_peer_info){.no = p->no,
                                  .instance = p->instance,
                                  .name = p->name,
                                  .where = p->where,
                                  .naddrs = p->naddrs,
                                  .addr = p->addr,
                                  .rtt_ns = p->rtt_ns,
                                  .rtt_samples = p->rtt_samples,
                                  .minor = p->minor};
    return true;
}

void hrd_peer_send(struct hrd_daemon *d, uint32_t no, const struct hrp_peer_msg *msg)
{
    struct hrd_peer *p = d->peers ? hrd_peer_by_no(d->peers, no) : NULL;
    if (!p || !p->tx || p->doomed[0])
        return;
    int r = hrd_conn_queue_msg(p->tx, msg);
    if (r == 0) {
        p->tx_msgs++;
        return;
    }
    char why[128];
    if (r == -ENOBUFS)
        snprintf(why, sizeof(why), "does not read what it is sent");
    else
        snprintf(why, sizeof(why), "was given up: a %s message cannot be sent (%s)", hrp_peer_name(msg->type),
                 strerror(-r));
    hrd_peer_doom(d, p, why);
}

/* Addresses come and go (DHCP, cables): looked at again where a decision depends on them. */
static void refresh(struct hrd_daemon *d)
{
    struct hrd_peers *ps = d->peers;
    struct hrd_netif *ifs;
    struct hrd_net net;
    char err[256];
    int n = hrd_netif_list(&ifs);
    if (n < 0)
        return;
    free(ps->ifs);
    ps->ifs = ifs;
    ps->nifs = (unsigned)n;
    if (hrd_netif_choose(&d->cfg, ifs, ps->nifs, &net, err, sizeof(err)) == 0)
        ps->net = net;
}

bool hrd_peers_is_mine(struct hrd_daemon *d, const struct hrp_addr *addr)
{
    refresh(d);
    return hrd_netif_is_mine(&d->peers->net, d->peers->ifs, d->peers->nifs, addr);
}

unsigned hrd_peers_own_addrs(struct hrd_daemon *d, struct hrp_addr *out, unsigned max)
{
    refresh(d);
    unsigned n = d->peers->net.nown < max ? d->peers->net.nown : max;
    memcpy(out, d->peers->net.own, n * sizeof(out[0]));
    return n;
}

uint64_t hrd_peers_link_speed(struct hrd_daemon *d)
{
    const struct hrd_peers *ps = d->peers;
    const struct hrp_addr *own = ps->net.nsource > 0 ? &ps->net.source[0] : &ps->net.own[0];
    if (hrd_addr_is_loopback(own))
        return UINT64_C(5000000000);
    uint64_t speed = hrd_netif_speed(hrd_netif_name_of(ps->ifs, ps->nifs, own));
    return speed > 0 ? speed : UINT64_C(1250000000);
}

/* ---- messages and liveness ------------------------------------------------------------------------------ */

static bool agent_fresh(struct hrd_daemon *d)
{
    uint64_t beat = hrd_agent_heartbeat(d->agent), now = now_ns();
    return beat >= now || now - beat < AGENT_FRESH_NS;
}

/* A daemon whose agent is stuck falls silent: others must not wait for data that will never come. */
static void ping(struct hrd_daemon *d, struct hrd_peer *p)
{
    if (!agent_fresh(d))
        return;
    struct hrp_peer_msg msg = {.type = HRP_PEER_PING, .body.ping.stamp = now_ns()};
    p->last_ping = uv_now(d->loop);
    hrd_peer_send(d, p->no, &msg);
}

static void pong(struct hrd_daemon *d, struct hrd_peer *p, uint64_t stamp)
{
    uint64_t now = now_ns();
    if (stamp > now || now - stamp > UINT64_C(3600000000000))
        return;
    if (p->rtt_samples == 0 || now - stamp < p->rtt_ns)
        p->rtt_ns = now - stamp;
    if (p->rtt_samples >= RTT_SAMPLES)
        return;
    if (++p->rtt_samples < RTT_SAMPLES)
        ping(d, p);
    else
        hrd_member_rtt(d, p->no);
}

void hrd_peer_is_up(struct hrd_daemon *d, struct hrd_peer *p, struct conn *c)
{
    p->last_rx = uv_now(d->loop);
    if (!p->tx)
        p->tx = c;
    if (p->up)
        return;
    p->up = true;
    p->since = uv_now(d->loop);
    hrd_info("connected with node %s (%s)", p->name, p->where);
    ping(d, p);
    hrd_member_peer_up(d, p->no);
    hrd_dial_peer(d, p->no, NULL);
}

/* The acceptor's first words: the connection counts from here. */
static bool got_up(struct hrd_daemon *d, struct conn *c, const struct hrp_peer_msg *msg)
{
    struct hrd_peer *p = c->peer;
    struct dial *dl = c->dial;
    if (msg->type != HRP_PEER_UP || (p->remote_no != 0 && p->remote_no != msg->body.up.peer_no)) {
        hrd_conn_broken(c, HRP_PEER_LOST, "the connection crossed with one that broke");
        return false;
    }
    p->remote_no = msg->body.up.peer_no;
    c->stage = CONN_OPEN;
    c->dial = NULL;
    if (dl) {
        dl->conn = NULL;
        dl->wait_peer = p->no;
    }
    bool was_up = p->up;
    hrd_peer_is_up(d, p, c);
    if (was_up)
        hrd_dial_peer(d, p->no, NULL);
    return true;
}

bool hrd_peer_received(struct hrd_daemon *d, struct conn *c, const struct hrp_peer_msg *msg)
{
    struct hrd_peer *p = c->peer;
    if (c->stage == CONN_UP)
        return got_up(d, c, msg);
    p->rx_msgs++;
    switch (msg->type) {
    case HRP_PEER_PING:
        if (agent_fresh(d)) {
            struct hrp_peer_msg answer = {.type = HRP_PEER_PONG, .body.ping = msg->body.ping};
            hrd_peer_send(d, p->no, &answer);
        }
        return true;
    case HRP_PEER_PONG:
        pong(d, p, msg->body.ping.stamp);
        return true;
    case HRP_PEER_BYE:
        p->bye = true;
        snprintf(p->bye_text, sizeof(p->bye_text), "%.*s", (int)msg->text_len, msg->text ? msg->text : "");
        return true;
    case HRP_PEER_VERBS_OFFER:
    case HRP_PEER_VERBS_ANSWER:
    case HRP_PEER_VERBS_READY:
    case HRP_PEER_VERBS_DOWN:
    case HRP_PEER_VERBS_CLOSE:
    case HRP_PEER_VERBS_LISTEN:
    case HRP_PEER_VERBS_RAIL:
        if (p->doomed[0] || hrd_verbs_msg(d, p, msg))
            return true;
        break;
    case HRP_PEER_ASK:
    case HRP_PEER_TELL:
        if (!p->doomed[0])
            hrd_doctor_msg(d, p->no, msg);
        return true;
    case HRP_PEER_UP:
        break;
    default:
        if (p->doomed[0] || hrd_member_msg(d, p->no, msg))
            return true;
        break;
    }
    char why[96];
    snprintf(why, sizeof(why), "broke the protocol: %s makes no sense here", hrp_peer_name(msg->type));
    hrd_peer_lose(d, p, why);
    return false;
}

static void check_peer(struct hrd_daemon *d, struct hrd_peer *p)
{
    uint64_t now = uv_now(d->loop);
    char why[64];
    hrd_link_tick(d, p);
    if (!p->up)
        return;
    if (now - p->last_rx >= d->cfg.peer_timeout_ms) {
        unsigned ms = d->cfg.peer_timeout_ms;
        if (ms % 1000 == 0)
            snprintf(why, sizeof(why), "was silent for %u s", ms / 1000);
        else
            snprintf(why, sizeof(why), "was silent for %u.%03u s", ms / 1000, ms % 1000);
        hrd_peer_doom(d, p, why);
    } else if (now - p->last_ping >= PING_MS) {
        ping(d, p);
    }
}

static const char *late_words(const struct conn *c)
{
    switch (c->stage) {
    case CONN_CONNECTING:
        return "no answer (filtered by a firewall, or the machine is down)";
    case CONN_HELLO:
    case CONN_CONFIRM:
        return "it did not say who it is in time";
    default:
        return "connected, but hreduced does not answer there (hung, or something else listens)";
    }
}

static void check_conns(struct hrd_daemon *d)
{
    struct hrd_peers *ps = d->peers;
    uint64_t now = uv_now(d->loop);
    for (struct conn *c = ps->conns; c;) {
        if (c->stage == CONN_OPEN || now <= c->deadline) {
            c = c->next;
            continue;
        }
        ps->evicted += c->incoming;
        hrd_conn_broken(c, HRP_PEER_LOST, late_words(c));
        c = ps->conns; /* the list may have changed in any way */
    }
}

static void on_tick(uv_timer_t *timer)
{
    struct hrd_daemon *d = timer->data;
    struct hrd_peers *ps = d->peers;
    uint64_t now = uv_now(d->loop);
    /* It was this daemon that stood still (SIGSTOP, a frozen machine): what others sent meanwhile has not
       been read yet, so nobody can be called silent. */
    if (now - ps->last_tick > 8 * TICK_MS)
        for (struct hrd_peer *p = ps->peers; p; p = p->next)
            p->last_rx = now;
    ps->last_tick = now;
    for (struct hrd_peer *p = ps->peers; p; p = p->next)
        check_peer(d, p);
    check_conns(d);
    if (!ps->conns && !ps->peers && !ps->dials)
        uv_timer_stop(&ps->timer);
}

void hrd_peer_event(struct hrd_daemon *d, const struct hrd_event *ev)
{
    struct plink *l = d->peers ? hrd_link_by_id(d->peers, ev->id) : NULL;
    struct plink *rail = l ? hrd_rails_by_index(l, ev->rail) : NULL;
    if (ev->type == HRD_EV_LINK_INTERRUPTED && rail)
        hrd_mend_begin(d, rail, ev->conn, ev->text);
    if (ev->type != HRD_EV_LINK_LOST || !l)
        return;
    l->up = ev->open; /* the agent keeps what a path in the making is made on until link_down */
    lose(d, l->peer, "lost its data link", ev->text);
}

/* ---- listener ------------------------------------------------------------------------------------------- */

static void refuse_one(struct hrd_daemon *d, int listen_fd)
{
    struct hrd_peers *ps = d->peers;
    if (hrd_log_allowed(&ps->accept_log, 1, 60000, NULL))
        hrd_warn("a connection to the peer port was refused: no file descriptor is left (RLIMIT_NOFILE)");
    if (ps->spare_fd < 0)
        return;
    /* Otherwise it would stay in the queue and keep the loop awake. */
    close(ps->spare_fd);
    int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0)
        close(fd);
    ps->refused++;
    ps->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/* Room for a newcomer: the one that has kept silent for longest goes. */
static void evict_stranger(struct hrd_daemon *d)
{
    struct hrd_peers *ps = d->peers;
    struct conn *c = ps->conns;
    while (c && !(c->incoming && c->stage == CONN_HELLO))
        c = c->next;
    if (c) {
        ps->evicted++;
        hrd_conn_close(c);
    }
}

static void on_listener(uv_poll_t *h, int status, int events)
{
    struct listener *l = h->data;
    struct hrd_daemon *d = l->d;
    (void)events;
    for (int i = 0; status == 0 && i < 64; i++) {
        struct sockaddr_storage ss;
        socklen_t len = sizeof(ss);
        struct hrp_addr remote;
        int fd = accept4(l->fd, (struct sockaddr *)&ss, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
            refuse_one(d, l->fd);
            return;
        }
        if (fd < 0)
            return;
        d->peers->accepted++;
        if (d->peers->nstrangers >= MAX_STRANGERS)
            evict_stranger(d);
        if (hrd_addr_from_sockaddr((struct sockaddr *)&ss, &remote) != 0 ||
            !hrd_conn_accepted(d, fd, &remote)) {
            close(fd);
            continue;
        }
        hrd_peer_soon(d);
    }
}

static int listen_fail(const struct hrp_addr *a, char *err, size_t errlen, int e)
{
    char at[HRD_ADDR_TEXT + 16];
    hrd_addr_port_text(a, at, sizeof(at));
    if (e == EADDRINUSE)
        snprintf(err, errlen,
                 "cannot listen for other nodes at %s: the port is in use; is another hreduced running? "
                 "See the keys 'port' and 'listen'",
                 at);
    else if (e == EADDRNOTAVAIL)
        snprintf(err, errlen,
                 "cannot listen for other nodes at %s: this machine does not have that address (yet); "
                 "see the key 'listen'",
                 at);
    else
        snprintf(err, errlen, "cannot listen for other nodes at %s: %s", at, strerror(e));
    return -e;
}

/*
 * device: "" or the interface whose packets alone are taken, and through which alone they are answered: the
 * listener's device, not the route, decides where the answer to a connection leaves.
 */
static int listen_socket(struct hrd_daemon *d, const struct hrp_addr *a, const char *device)
{
    const struct hrd_net *net = &d->peers->net;
    struct sockaddr_storage ss;
    int one = 1, v6only = !(hrd_addr_is_any(a) && net->any4 && net->dual);
    int fd = socket(a->family == 6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (a->family == 6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &v6only, sizeof(v6only));
    socklen_t len = hrd_addr_to_sockaddr(a, &ss);
    bool ok = device[0] == 0 ||
              setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, device, (socklen_t)strlen(device) + 1) == 0;
    if (ok && bind(fd, (struct sockaddr *)&ss, len) == 0 && listen(fd, 1024) == 0)
        return fd;
    int err = errno;
    close(fd);
    return -err;
}

static int listener_new(struct hrd_daemon *d, const struct hrp_addr *a, const char *device)
{
    struct hrd_peers *ps = d->peers;
    int fd = listen_socket(d, a, device);
    if (fd < 0)
        return fd;
    struct listener *l = calloc(1, sizeof(*l));
    if (!l || uv_poll_init(d->loop, &l->poll, fd) != 0) {
        free(l);
        close(fd);
        return -ENOMEM;
    }
    l->d = d;
    l->fd = fd;
    l->poll.data = l;
    uv_poll_start(&l->poll, UV_READABLE, on_listener);
    ps->listener[ps->nlisteners++] = l;
    return 0;
}

/* With a named interface: its own packets, and those of other daemons on this machine, which come over lo. */
static int listen_at(struct hrd_daemon *d, const struct hrp_addr *a, char *err, size_t errlen)
{
    const char *device = d->peers->net.device;
    int r = -EPERM;
    if (device[0] && !hrd_addr_is_loopback(a)) {
        r = listener_new(d, a, device);
        if (r == 0)
            r = listener_new(d, a, "lo");
        else if (r == -EPERM)
            hrd_conn_device_denied(d, r);
    }
    if (r == -EPERM)
        r = listener_new(d, a, "");
    return r == 0 ? 0 : listen_fail(a, err, errlen, -r);
}

static void listener_freed(uv_handle_t *h)
{
    free(h->data);
}

/* ---- start and end -------------------------------------------------------------------------------------- */

static void say_where(struct hrd_daemon *d)
{
    const struct hrd_net *net = &d->peers->net;
    char own[4 * HRD_ADDR_TEXT] = "", one[HRD_ADDR_TEXT];
    for (unsigned i = 0; i < net->nown; i++) {
        size_t len = strlen(own);
        snprintf(own + len, sizeof(own) - len, "%s%s", len > 0 ? ", " : "",
                 hrd_addr_text(&net->own[i], one, sizeof(one)));
    }
    if (net->local_only)
        hrd_notice("other daemons of this machine reach this one at %s port %u; other machines do not (key "
                   "'listen')",
                   own, net->port);
    else
        hrd_notice(
            "other nodes reach this one at %s port %u; peers are not authenticated, so keep the port to a "
            "network that only the cluster uses",
            own, net->port);
}

int hrd_peers_new(struct hrd_daemon *d, char *errtext, size_t errlen)
{
    struct hrd_peers *ps = calloc(1, sizeof(*ps));
    if (!ps)
        return -ENOMEM;
    ps->spare_fd = -1;
    ps->conns_tail = &ps->conns;
    int n = hrd_netif_list(&ps->ifs);
    if (n < 0) {
        snprintf(errtext, errlen, "cannot list the network interfaces: %s", strerror(-n));
        free(ps);
        return n;
    }
    ps->nifs = (unsigned)n;
    int r = hrd_netif_choose(&d->cfg, ps->ifs, ps->nifs, &ps->net, errtext, errlen);
    if (r != 0) {
        free(ps->ifs);
        free(ps);
        return r;
    }
    d->peers = ps;
    uv_timer_init(d->loop, &ps->timer);
    uv_timer_init(d->loop, &ps->soon);
    ps->timer.data = ps->soon.data = d;
    ps->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    for (unsigned i = 0; i < ps->net.nlisten && r == 0; i++)
        r = listen_at(d, &ps->net.listen[i], errtext, errlen);
    if (r != 0) {
        hrd_peers_free(d);
        return r;
    }
    say_where(d);
    return 0;
}

/* The two timers lie inside the struct, which goes with the second of them. */
static void timer_freed(uv_handle_t *h)
{
    struct hrd_peers *ps = h->data;
    if (++ps->timers_closed == 2)
        free(ps);
}

void hrd_peers_free(struct hrd_daemon *d)
{
    struct hrd_peers *ps = d->peers;
    if (!ps)
        return;
    while (ps->peers) {
        struct hrd_peer *p = ps->peers;
        say_bye(p, "the daemon is stopping");
        hrd_link_end_all(d, p, "this daemon is stopping");
        close_conns(d, p);
        peer_unlink(ps, p);
        free(p);
    }
    while (ps->conns)
        hrd_conn_close(ps->conns);
    hrd_dial_free_all(ps);
    hrd_setup_end(ps);
    for (unsigned i = 0; i < ps->nlisteners; i++) {
        uv_close((uv_handle_t *)&ps->listener[i]->poll, listener_freed);
        close(ps->listener[i]->fd);
    }
    if (ps->spare_fd >= 0)
        close(ps->spare_fd);
    free(ps->ifs);
    ps->timer.data = ps->soon.data = ps;
    uv_close((uv_handle_t *)&ps->timer, timer_freed);
    uv_close((uv_handle_t *)&ps->soon, timer_freed);
    d->peers = NULL;
}
