/* SPDX-License-Identifier: MIT */
#include "daemon/verbs/cm.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log.h"
#include "daemon/netif.h"
#include "proto/peer.h"

#define BACKLOG 64
/* Events handled at one turn of the loop. */
#define EVENTS_MAX 256

enum cm_step {
    CM_NONE, /* awaiting: no request yet */
    CM_ADDR,
    CM_ROUTE,
    CM_ANSWER,
    CM_DONE,
};

struct hrd_cm_setup {
    struct hrd_cm_setup *next;
    struct hrd_cm *cm;
    struct hrd_verbs_conn *conn; /* NULL: settled */
    uint64_t nonce;
    bool dials;
    struct hrp_addr from, to; /* dials */
    int ms;
    int err; /* dials: failed, for this reason */
    char why[400];
    char news[200];
    unsigned n;
    struct {
        struct rdma_cm_id *id;
        enum cm_step step;
    } q[HRD_VERBS_QUEUES_MAX];
};

struct hrd_cm {
    const struct hrd_rdmacm *api;
    struct rdma_event_channel *channel;
    struct cm_listener {       /* one for each address */
        struct rdma_cm_id *id; /* NULL: none */
        struct hrp_addr at;
    } listener[HRD_RAILS_MAX];
    unsigned last_listener;
    struct hrd_cm_setup *setups;
    uint64_t rejected;
    struct hrd_log_limit log;
};

/* ---- the daemon's own end --------------------------------------------------------------------------------------- */

struct hrd_cm *hrd_cm_new(const struct hrd_rdmacm *api, char *why, size_t len)
{
    errno = 0;
    struct rdma_event_channel *ch = api->create_channel();
    if (!ch) {
        snprintf(why, len,
                 "RDMA-CM cannot be used (%s): load the module rdma_ucm, and let the daemon open "
                 "/dev/infiniband/rdma_cm",
                 strerror(errno ? errno : EIO));
        return NULL;
    }
    struct hrd_cm *cm = calloc(1, sizeof(*cm));
    if (!cm)
        abort();
    cm->api = api;
    cm->channel = ch;
    return cm;
}

static void drop_id(struct hrd_cm *cm, struct rdma_cm_id **id)
{
    if (*id)
        cm->api->destroy_id(*id);
    *id = NULL;
}

void hrd_cm_free(struct hrd_cm *cm)
{
    for (unsigned i = 0; i < HRD_RAILS_MAX; i++)
        drop_id(cm, &cm->listener[i].id);
    cm->api->destroy_channel(cm->channel);
    free(cm);
}

int hrd_cm_fd(const struct hrd_cm *cm)
{
    return cm->channel->fd;
}

uint64_t hrd_cm_rejected(const struct hrd_cm *cm)
{
    return cm->rejected;
}

/* Whether the id was bound to the device that the queue pairs are on. */
static int on_device(const struct hrd_cm *cm, const struct rdma_cm_id *id, const struct hrd_verbs_device *dev,
                     char *why, size_t len)
{
    uint8_t port = 0;
    const char *name = cm->api->device(id, &port);
    if (strcmp(name, dev->name) == 0 && port == dev->port)
        return 0;
    if (name[0])
        snprintf(why, len, "it belongs to port %u of %s, not to port %u of %s", port, name, dev->port,
                 dev->name);
    else
        snprintf(why, len, "it belongs to no RDMA device");
    return -ENODEV;
}

/* A new id, bound to that address; NULL with the end of a sentence. */
static struct rdma_cm_id *bound_id(struct hrd_cm *cm, const struct hrp_addr *addr, char *why, size_t len)
{
    struct sockaddr_storage ss;
    struct rdma_cm_id *id = cm->api->create_id(cm->channel);
    (void)hrd_addr_to_sockaddr(addr, &ss);
    int err = id ? cm->api->bind_addr(id, (struct sockaddr *)&ss) : errno ? errno : EIO;
    if (!err)
        return id;
    drop_id(cm, &id);
    snprintf(why, len, "it cannot be bound (%s)", strerror(err));
    return NULL;
}

bool hrd_cm_address(struct hrd_cm *cm, const struct hrd_verbs_device *dev, const struct hrp_addr *addr,
                    unsigned n, struct hrp_addr *out, char *why, size_t len)
{
    char text[HRD_ADDR_TEXT], one[160] = "";
    for (unsigned i = 0; i < n; i++) {
        struct hrp_addr a = addr[i];
        a.port = 0;
        struct rdma_cm_id *id = bound_id(cm, &a, one, sizeof(one));
        bool ok = id && on_device(cm, id, dev, one, sizeof(one)) == 0;
        drop_id(cm, &id);
        *out = a;
        if (ok)
            return true;
    }
    if (dev->ethernet && n == 1)
        snprintf(why, len, "RDMA-CM does not take the address %s: %s",
                 hrd_addr_text(&addr[0], text, sizeof(text)), one);
    else
        snprintf(why, len,
                 "RDMA-CM needs an IP address of port %u of %s, and this node has none: give its IPoIB "
                 "interface one",
                 dev->port, dev->name);
    return false;
}

int hrd_cm_listen(struct hrd_cm *cm, struct hrp_addr *addr, char *why, size_t len)
{
    char text[HRD_ADDR_TEXT], one[160] = "";
    struct cm_listener *l = NULL;
    for (unsigned i = 0; i < HRD_RAILS_MAX; i++) {
        if (cm->listener[i].id && hrd_addr_same_ip(&cm->listener[i].at, addr)) {
            *addr = cm->listener[i].at;
            return 0;
        }
        if (!cm->listener[i].id)
            l = &cm->listener[i];
    }
    if (!l) /* of an address that is no rail's any more, more likely than not */
        l = &cm->listener[cm->last_listener++ % HRD_RAILS_MAX];
    drop_id(cm, &l->id);
    addr->port = 0;
    struct rdma_cm_id *id = bound_id(cm, addr, one, sizeof(one));
    int err = id ? cm->api->listen(id, BACKLOG) : EADDRNOTAVAIL;
    if (err) {
        if (id)
            snprintf(one, sizeof(one), "%s", strerror(err));
        drop_id(cm, &id);
        snprintf(why, len,
                 "RDMA-CM cannot listen at %s: %s; set verbs_setup = exchange, or see rdma-cm in 'hreducectl "
                 "doctor'",
                 hrd_addr_text(addr, text, sizeof(text)), one);
        return -err;
    }
    addr->port = cm->api->port(id);
    *l = (struct cm_listener){.id = id, .at = *addr};
    return 0;
}

/* ---- set-ups ---------------------------------------------------------------------------------------------------- */

static struct hrd_cm_setup *setup_new(struct hrd_cm *cm, struct hrd_verbs_conn *conn, uint64_t nonce)
{
    struct hrd_cm_setup *s = calloc(1, sizeof(*s));
    if (!s)
        abort();
    s->cm = cm;
    s->conn = conn;
    s->nonce = nonce;
    s->n = conn->n;
    s->next = cm->setups;
    cm->setups = s;
    return s;
}

static void drop_ids(struct hrd_cm_setup *s)
{
    for (unsigned i = 0; i < s->n; i++)
        drop_id(s->cm, &s->q[i].id);
}

/* Dialer: the first reason is the one that counts. */
static void fail(struct hrd_cm_setup *s, int err, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void fail(struct hrd_cm_setup *s, int err, const char *fmt, ...)
{
    va_list ap;
    if (s->err)
        return;
    s->err = err < 0 ? err : -EIO;
    va_start(ap, fmt);
    vsnprintf(s->why, sizeof(s->why), fmt, ap);
    va_end(ap);
    drop_ids(s);
}

static const char *to_text(const struct hrd_cm_setup *s, char *buf, size_t len)
{
    return hrd_addr_text(&s->to, buf, len);
}

static void dial_one(struct hrd_cm_setup *s, unsigned i)
{
    const struct hrd_rdmacm *api = s->cm->api;
    const struct hrd_verbs_device *dev = &s->conn->dev;
    struct sockaddr_storage from, to;
    char text[HRD_ADDR_TEXT];
    s->q[i].id = api->create_id(s->cm->channel);
    if (!s->q[i].id) {
        fail(s, -errno, "RDMA-CM gives no id for a connection (%s)", strerror(errno));
        return;
    }
    (void)hrd_addr_to_sockaddr(&s->from, &from);
    (void)hrd_addr_to_sockaddr(&s->to, &to);
    int err = dev->ethernet ? api->set_tos(s->q[i].id, dev->tc) : 0;
    if (!err)
        err = api->resolve_addr(s->q[i].id, (struct sockaddr *)&from, (struct sockaddr *)&to, s->ms);
    if (err)
        fail(s, -err, "RDMA-CM cannot look for %s (%s)", to_text(s, text, sizeof(text)), strerror(err));
    s->q[i].step = CM_ADDR;
}

struct hrd_cm_setup *hrd_cm_dial(struct hrd_cm *cm, struct hrd_verbs_conn *conn, uint64_t nonce,
                                 const struct hrp_addr *from, const struct hrp_addr *to, unsigned ms)
{
    struct hrd_cm_setup *s = setup_new(cm, conn, nonce);
    s->dials = true;
    s->from = *from;
    s->to = *to;
    s->ms = (int)ms;
    for (unsigned i = 0; i < s->n && !s->err; i++)
        dial_one(s, i);
    return s;
}

struct hrd_cm_setup *hrd_cm_await(struct hrd_cm *cm, struct hrd_verbs_conn *conn, uint64_t nonce)
{
    return setup_new(cm, conn, nonce);
}

int hrd_cm_poll(const struct hrd_cm_setup *s, char *why, size_t len)
{
    if (s->err) {
        snprintf(why, len, "%s", s->why);
        return s->err;
    }
    for (unsigned i = 0; i < s->n; i++)
        if (s->q[i].step != CM_DONE)
            return 0;
    return 1;
}

const char *hrd_cm_waits_for(const struct hrd_cm_setup *s)
{
    enum cm_step least = CM_DONE;
    for (unsigned i = 0; i < s->n; i++)
        least = s->q[i].step < least ? s->q[i].step : least;
    switch (least) {
    case CM_NONE:
        return "no request by RDMA-CM came";
    case CM_ADDR:
        return "RDMA-CM did not find the peer's address";
    case CM_ROUTE:
        return "RDMA-CM did not find a route to the peer: does the subnet manager answer?";
    case CM_ANSWER:
        return "the peer did not answer the request by RDMA-CM: is UDP port 4791 filtered, are the two ports "
               "on "
               "one network?";
    default:
        return "RDMA-CM had connected everything";
    }
}

void hrd_cm_settled(struct hrd_cm_setup *s)
{
    s->conn = NULL;
}

bool hrd_cm_news(struct hrd_cm_setup *s, char *why, size_t len)
{
    bool any = s->news[0];
    snprintf(why, len, "%s", s->news);
    s->news[0] = '\0';
    return any;
}

void hrd_cm_setup_free(struct hrd_cm_setup *s)
{
    if (!s)
        return;
    struct hrd_cm_setup **at = &s->cm->setups;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    drop_ids(s);
    free(s);
}

/* ---- connecting ------------------------------------------------------------------------------------------------- */

static int attr_of(struct hrd_cm *cm, struct rdma_cm_id *id, enum ibv_qp_state state,
                   struct ibv_qp_attr *attr, char *why, size_t len)
{
    int mask, err;
    memset(attr, 0, sizeof(*attr));
    attr->qp_state = state;
    err = cm->api->init_qp_attr(id, attr, &mask);
    if (err)
        snprintf(why, len, "RDMA-CM does not say how to connect a queue pair (%s)", strerror(err));
    return -err;
}

/* What the configuration asks for by name is kept, all else is as RDMA-CM found it. */
static int check_route(struct hrd_verbs_conn *c, struct hrd_verbs_route *r, char *why, size_t len)
{
    const struct hrd_verbs_device *d = &c->dev;
    uint16_t pkey = 0;
    if (r->ah.is_global && d->gid_asked && r->ah.grh.sgid_index != d->gid_index) {
        snprintf(why, len, "RDMA-CM uses GID %u of %s, and verbs_gid_index names another",
                 r->ah.grh.sgid_index, d->name);
        return -EINVAL;
    }
    if (r->pkey_index != d->pkey_index && (d->v->query_pkey(c->ctx, d->port, r->pkey_index, &pkey) != 0 ||
                                           (d->pkey_asked && (pkey & 0x7fff) != (d->pkey & 0x7fff)))) {
        snprintf(why, len, "RDMA-CM uses partition 0x%04x of %s, and verbs_pkey names another", pkey,
                 d->name);
        return -EINVAL;
    }
    if (d->sl)
        r->ah.sl = d->sl;
    if (r->ah.is_global && r->ah.grh.sgid_index != d->gid_index) {
        struct ibv_gid_entry e;
        int err = d->v->query_gid(c->ctx, d->port, r->ah.grh.sgid_index, &e);
        if (err) {
            snprintf(why, len, "RDMA-CM uses GID %u of %s, which cannot be read (%s)", r->ah.grh.sgid_index,
                     d->name, strerror(err));
            return -err;
        }
        c->dev.gid = e.gid;
        c->dev.gid_index = r->ah.grh.sgid_index;
        c->dev.gid_type = e.gid_type;
        hrd_verbs_describe(&c->dev);
    }
    return 0;
}

/* The queue pair to RTS, by what RDMA-CM knows; only to the one that the peer told this end of. */
static int connect_queue(struct hrd_cm_setup *s, unsigned i, struct rdma_cm_id *id, uint32_t qpn, char *why,
                         size_t len)
{
    struct ibv_qp_attr init, rtr, rts;
    struct hrd_verbs_conn *c = s->conn;
    if (qpn != c->remote.qpn[i]) {
        snprintf(why, len, "its queue pair %u is not the one that the peer named", qpn);
        return -EPERM;
    }
    if (attr_of(s->cm, id, IBV_QPS_INIT, &init, why, len) ||
        attr_of(s->cm, id, IBV_QPS_RTR, &rtr, why, len) || attr_of(s->cm, id, IBV_QPS_RTS, &rts, why, len))
        return -EIO;
    struct hrd_verbs_route route = {.ah = rtr.ah_attr,
                                    .mtu = rtr.path_mtu,
                                    .dest_qpn = qpn,
                                    .rq_psn = rtr.rq_psn,
                                    .sq_psn = rts.sq_psn,
                                    .pkey_index = init.pkey_index};
    int err = check_route(c, &route, why, len);
    return err ? err : hrd_verbs_conn_queue(c, i, &route, why, len);
}

static struct rdma_conn_param param_of(const struct hrd_cm_setup *s, unsigned i)
{
    return (struct rdma_conn_param){.responder_resources = 1,
                                    .initiator_depth = 1,
                                    .retry_count = s->conn->dev.retry,
                                    .rnr_retry_count = 3,
                                    .qp_num = s->conn->local.qpn[i]};
}

static void got_address(struct hrd_cm_setup *s, unsigned i)
{
    char text[HRD_ADDR_TEXT], why[200];
    int err = on_device(s->cm, s->q[i].id, &s->conn->dev, why, sizeof(why));
    if (err) {
        fail(s, err, "the way to %s leads elsewhere: %s", to_text(s, text, sizeof(text)), why);
        return;
    }
    err = s->cm->api->resolve_route(s->q[i].id, s->ms);
    if (err)
        fail(s, -err, "RDMA-CM cannot look for a route to %s (%s)", to_text(s, text, sizeof(text)),
             strerror(err));
    s->q[i].step = CM_ROUTE;
}

static void got_route(struct hrd_cm_setup *s, unsigned i)
{
    char text[HRD_ADDR_TEXT];
    struct hrp_cm_request request = {
        .magic = HRP_CM_MAGIC, .version = HRP_CM_VERSION, .queue = (uint8_t)i, .nonce = s->nonce};
    struct rdma_conn_param param = param_of(s, i);
    param.private_data = &request;
    param.private_data_len = sizeof(request);
    int err = s->cm->api->connect(s->q[i].id, &param);
    if (err)
        fail(s, -err, "RDMA-CM cannot ask %s for a connection (%s)", to_text(s, text, sizeof(text)),
             strerror(err));
    s->q[i].step = CM_ANSWER;
}

static void got_response(struct hrd_cm_setup *s, unsigned i, const struct hrd_cm_event *ev)
{
    char text[HRD_ADDR_TEXT], why[300];
    int err = connect_queue(s, i, s->q[i].id, ev->qp_num, why, sizeof(why));
    if (!err) {
        err = -s->cm->api->establish(s->q[i].id);
        if (err)
            snprintf(why, sizeof(why), "the connection cannot be confirmed (%s)", strerror(-err));
    }
    if (err)
        fail(s, err, "the answer of %s by RDMA-CM is of no use: %s", to_text(s, text, sizeof(text)), why);
    else
        s->q[i].step = CM_DONE;
}

/* ---- requests --------------------------------------------------------------------------------------------------- */

static struct hrd_cm_setup *awaited(struct hrd_cm *cm, const struct hrp_cm_request *r)
{
    struct hrd_cm_setup *s = cm->setups;
    while (s && (s->dials || !s->conn || s->nonce != r->nonce))
        s = s->next;
    return s;
}

/* False: rejected, for this reason. */
static bool take_request(struct hrd_cm *cm, const struct hrd_cm_event *ev, char *why, size_t len)
{
    struct hrp_cm_request r;
    if (ev->data_len < sizeof(r)) {
        snprintf(why, len, "this is hreduced, and the request is not one of its own");
        return false;
    }
    memcpy(&r, ev->data, sizeof(r));
    if (r.magic != HRP_CM_MAGIC || r.version != HRP_CM_VERSION) {
        snprintf(why, len, "this is hreduced, and the request is not one of its own");
        return false;
    }
    struct hrd_cm_setup *s = awaited(cm, &r);
    if (!s || r.queue >= s->n || s->q[r.queue].id) {
        snprintf(why, len, "nobody asked for this over the control connection, or no longer");
        return false;
    }
    if (on_device(cm, ev->id, &s->conn->dev, why, len) ||
        connect_queue(s, r.queue, ev->id, ev->qp_num, why, len))
        return false;
    struct rdma_conn_param param = param_of(s, r.queue);
    int err = cm->api->accept(ev->id, &param);
    if (err) {
        snprintf(why, len, "the request cannot be accepted (%s)", strerror(err));
        return false;
    }
    s->q[r.queue].id = ev->id;
    s->q[r.queue].step = CM_DONE;
    return true;
}

static void on_request(struct hrd_cm *cm, const struct hrd_cm_event *ev)
{
    char why[HRP_CM_REJECT_TEXT + 1] = "", from[HRD_ADDR_TEXT] = "?";
    struct hrp_addr addr;
    struct rdma_cm_id *id = ev->id;
    uint32_t missed = 0;
    if (take_request(cm, ev, why, sizeof(why)))
        return;
    cm->rejected++;
    (void)cm->api->reject(id, why, (uint8_t)strlen(why));
    drop_id(cm, &id);
    if (hrd_addr_from_sockaddr((const struct sockaddr *)&ev->from, &addr) == 0)
        hrd_addr_text(&addr, from, sizeof(from));
    if (hrd_log_allowed(&cm->log, 3, 60000, &missed))
        hrd_warn("a request by RDMA-CM from %s was rejected: %s%s", from, why,
                 missed ? " (and others before it)" : "");
}

/* ---- events ----------------------------------------------------------------------------------------------------- */

static struct hrd_cm_setup *owner_of(struct hrd_cm *cm, const struct rdma_cm_id *id, unsigned *i)
{
    for (struct hrd_cm_setup *s = cm->setups; s; s = s->next)
        for (*i = 0; *i < s->n; (*i)++)
            if (s->q[*i].id == id)
                return s;
    return NULL;
}

static void on_rejected(struct hrd_cm_setup *s, const struct hrd_cm_event *ev)
{
    char text[HRD_ADDR_TEXT], words[HRP_CM_REJECT_TEXT + 1];
    size_t n = 0;
    while (ev->status == 28 && n < HRP_CM_REJECT_TEXT && n < ev->data_len && ev->data[n] >= 0x20 &&
           ev->data[n] < 0x7f) {
        words[n] = (char)ev->data[n];
        n++;
    }
    words[n] = '\0';
    fail(s, -ECONNREFUSED, "%s rejected the request by RDMA-CM (reason %d): %s",
         to_text(s, text, sizeof(text)), ev->status, n ? words : hrd_rdmacm_reject_meaning(ev->status));
}

/* What ends a set-up that dials; false: not that. */
static bool on_failure(struct hrd_cm_setup *s, const struct hrd_cm_event *ev)
{
    char to[HRD_ADDR_TEXT], from[HRD_ADDR_TEXT];
    const char *error = strerror(ev->status < 0 ? -ev->status : ev->status);
    to_text(s, to, sizeof(to));
    switch (ev->type) {
    case RDMA_CM_EVENT_ADDR_ERROR:
        fail(s, ev->status,
             "RDMA-CM cannot resolve %s from %s (%s): are the two on one network, does ARP get through?", to,
             hrd_addr_text(&s->from, from, sizeof(from)), error);
        return true;
    case RDMA_CM_EVENT_ROUTE_ERROR:
        fail(s, ev->status, "RDMA-CM has no route to %s (%s): does the subnet manager answer?", to, error);
        return true;
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_CONNECT_ERROR:
        fail(s, ev->status, "%s did not answer the request by RDMA-CM (%s, %s)", to,
             hrd_rdmacm_event_name(ev->type), error);
        return true;
    case RDMA_CM_EVENT_REJECTED:
        on_rejected(s, ev);
        return true;
    case RDMA_CM_EVENT_DISCONNECTED:
        fail(s, -ECONNRESET, "%s took back the connection that RDMA-CM had made", to);
        return true;
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
    case RDMA_CM_EVENT_ADDR_CHANGE:
        fail(s, -ENODEV, "RDMA-CM says %s for %s of port %u of %s", hrd_rdmacm_event_name(ev->type),
             hrd_addr_text(&s->from, from, sizeof(from)), s->conn->dev.port, s->conn->dev.name);
        return true;
    default:
        return false;
    }
}

/* A queue pair in use, or one of the end that waits: its own state says how it is. */
static void on_news(struct hrd_cm_setup *s, unsigned i, const struct hrd_cm_event *ev)
{
    switch (ev->type) {
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
        snprintf(s->news, sizeof(s->news), "its RDMA device is being removed (DEVICE_REMOVAL)");
        drop_ids(s);
        return;
    case RDMA_CM_EVENT_ADDR_CHANGE:
        snprintf(s->news, sizeof(s->news),
                 "the address of its network interface moved to other hardware (ADDR_CHANGE)");
        return;
    case RDMA_CM_EVENT_DISCONNECTED: /* the other end gave its queue pairs up, and says more elsewhere */
    case RDMA_CM_EVENT_TIMEWAIT_EXIT:
    case RDMA_CM_EVENT_CONNECT_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_REJECTED:
        drop_id(s->cm, &s->q[i].id);
        return;
    default:
        return;
    }
}

static void on_event(struct hrd_cm *cm, const struct hrd_cm_event *ev)
{
    unsigned i = 0;
    if (ev->type == RDMA_CM_EVENT_CONNECT_REQUEST) {
        on_request(cm, ev);
        return;
    }
    for (unsigned k = 0; k < HRD_RAILS_MAX; k++) {
        if (ev->id != cm->listener[k].id)
            continue;
        if (ev->type == RDMA_CM_EVENT_DEVICE_REMOVAL) /* made anew when it is needed next */
            drop_id(cm, &cm->listener[k].id);
        return;
    }
    struct hrd_cm_setup *s = owner_of(cm, ev->id, &i);
    hrd_debug("RDMA-CM: %s, status %d%s", hrd_rdmacm_event_name(ev->type), ev->status,
              s ? "" : ", of a connection that is gone");
    if (!s)
        return;
    if (!s->dials || !s->conn) {
        on_news(s, i, ev);
        return;
    }
    if (on_failure(s, ev))
        return;
    if (ev->type == RDMA_CM_EVENT_ADDR_RESOLVED && s->q[i].step == CM_ADDR)
        got_address(s, i);
    else if (ev->type == RDMA_CM_EVENT_ROUTE_RESOLVED && s->q[i].step == CM_ROUTE)
        got_route(s, i);
    else if (ev->type == RDMA_CM_EVENT_CONNECT_RESPONSE && s->q[i].step == CM_ANSWER)
        got_response(s, i, ev);
}

void hrd_cm_events(struct hrd_cm *cm)
{
    struct hrd_cm_event ev;
    for (unsigned i = 0; i < EVENTS_MAX && cm->api->next_event(cm->channel, &ev) == 0; i++)
        on_event(cm, &ev);
}
