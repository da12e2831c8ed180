/* SPDX-License-Identifier: MIT */
#include "tests/sim/fake_cm.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/sim/fake_verbs.h"

#define ADDRESSES 4
/* What the messages of the InfiniBand CM carry, however short the sender's data was. */
#define REQUEST_DATA 56
#define REJECT_DATA 148

struct fevent {
    struct hrd_cm_event ev;
    struct fevent *next;
};

struct fchannel {
    struct rdma_event_channel ch;
    struct fevent *first, **last;
    struct fchannel *next;
};

struct fid {
    struct rdma_cm_id id;
    struct fchannel *ch;
    struct sockaddr_storage at, to;
    char device[64];
    uint8_t port;
    int gid_index;
    uint8_t tos;
    bool listening, connected, stranger;
    uint32_t qpn, other_qpn, psn, other_psn;
    struct fid *other;
    struct fid *next;
};

static struct {
    bool on;
    struct {
        unsigned after, times;
        int err;
        bool on;
    } fail[FAKE_CM_NCALLS];
    struct {
        enum rdma_cm_event_type type;
        int status;
        unsigned times;
    } answer[FAKE_CM_NCALLS];
    unsigned calls[FAKE_CM_NCALLS];
    struct {
        char ip[64], device[64];
        uint8_t port;
    } address[ADDRESSES];
    unsigned naddress;
    uint8_t sl;
    enum ibv_mtu mtu;
    uint16_t pkey_index, last_port;
    int gid_index;
    uint32_t last_psn;
    char heard[200];
    struct fchannel *channels;
    struct fid *ids;
} w = {.mtu = IBV_MTU_4096, .gid_index = -1};

static void *need(size_t n)
{
    void *p = calloc(1, n);
    if (!p)
        abort();
    return p;
}

static int refused(enum fake_cm_call call)
{
    w.calls[call]++;
    if (!w.fail[call].on)
        return 0;
    if (w.fail[call].after > 0) {
        w.fail[call].after--;
        return 0;
    }
    if (w.fail[call].times > 0 && --w.fail[call].times == 0)
        w.fail[call].on = false;
    return w.fail[call].err;
}

/* ---- events ----------------------------------------------------------------------------------------------------- */

static struct hrd_cm_event *raise_on(struct fchannel *ch, struct rdma_cm_id *id, enum rdma_cm_event_type type,
                                     int status)
{
    struct fevent *e = need(sizeof(*e));
    uint64_t one = 1;
    e->ev.type = type;
    e->ev.id = id;
    e->ev.status = status;
    *ch->last = e;
    ch->last = &e->next;
    assert_int_equal(write(ch->ch.fd, &one, sizeof(one)), sizeof(one));
    return &e->ev;
}

static void set_data(struct hrd_cm_event *ev, const void *data, unsigned len, unsigned padded)
{
    assert_true(len <= padded);
    if (len > 0)
        memcpy(ev->data, data, len);
    ev->data_len = padded;
}

static struct hrd_cm_event *tell(struct fid *f, enum rdma_cm_event_type type, int status)
{
    return raise_on(f->ch, &f->id, type, status);
}

static int f_next_event(struct rdma_event_channel *base, struct hrd_cm_event *ev)
{
    struct fchannel *ch = (struct fchannel *)base;
    struct fevent *e = ch->first;
    uint64_t n;
    if (!e)
        return EAGAIN;
    assert_int_equal(read(ch->ch.fd, &n, sizeof(n)), sizeof(n));
    ch->first = e->next;
    if (!ch->first)
        ch->last = &ch->first;
    *ev = e->ev;
    free(e);
    return 0;
}

/* True: the ordered event was raised in place of the answer. */
static bool answered(enum fake_cm_call call, struct fid *f)
{
    if (w.answer[call].times == 0)
        return false;
    w.answer[call].times--;
    if (w.answer[call].type != FAKE_CM_SILENCE)
        tell(f, w.answer[call].type, w.answer[call].status);
    return true;
}

/* ---- channels and ids ------------------------------------------------------------------------------------------- */

static struct rdma_event_channel *f_create_channel(void)
{
    int err = refused(FAKE_CM_CHANNEL);
    if (err) {
        errno = err;
        return NULL;
    }
    struct fchannel *ch = need(sizeof(*ch));
    ch->ch.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC | EFD_SEMAPHORE);
    ch->last = &ch->first;
    ch->next = w.channels;
    w.channels = ch;
    return &ch->ch;
}

static void f_destroy_channel(struct rdma_event_channel *base)
{
    struct fchannel **at = &w.channels, *ch = (struct fchannel *)base;
    for (const struct fid *f = w.ids; f; f = f->next)
        assert_true(f->ch != ch);
    while (*at != ch)
        at = &(*at)->next;
    *at = ch->next;
    while (ch->first) {
        struct fevent *e = ch->first;
        ch->first = e->next;
        free(e);
    }
    close(ch->ch.fd);
    free(ch);
}

static struct fid *new_id(struct fchannel *ch)
{
    struct fid *f = need(sizeof(*f));
    f->ch = ch;
    f->id.channel = &ch->ch;
    f->psn = 0x1000 + ++w.last_psn;
    f->next = w.ids;
    w.ids = f;
    return f;
}

static struct rdma_cm_id *f_create_id(struct rdma_event_channel *ch)
{
    int err = refused(FAKE_CM_CREATE);
    errno = err;
    return err ? NULL : &new_id((struct fchannel *)ch)->id;
}

/* Takes the first event of this id off its channel; of a listener also the requests at it that nobody has seen. */
static bool forget_event(struct fid *f, struct hrd_cm_event *ev)
{
    struct fevent **at = &f->ch->first;
    uint64_t n;
    while (*at && (*at)->ev.id != &f->id && (*at)->ev.listener != &f->id)
        at = &(*at)->next;
    struct fevent *e = *at;
    if (!e)
        return false;
    *at = e->next;
    if (!e->next)
        f->ch->last = at;
    *ev = e->ev;
    free(e);
    assert_int_equal(read(f->ch->ch.fd, &n, sizeof(n)), sizeof(n));
    return true;
}

static void f_destroy_id(struct rdma_cm_id *id)
{
    struct fid **at = &w.ids, *f = (struct fid *)id;
    struct hrd_cm_event ev;
    while (*at != f)
        at = &(*at)->next;
    *at = f->next;
    while (forget_event(f, &ev))
        if (ev.id != id)
            f_destroy_id(ev.id);
    if (f->other) {
        if (!f->other->stranger)
            tell(f->other, f->connected ? RDMA_CM_EVENT_DISCONNECTED : RDMA_CM_EVENT_REJECTED,
                 f->connected ? 0 : 4);
        f->other->other = NULL;
        f->other->connected = false;
    }
    free(f);
}

static const char *f_device(const struct rdma_cm_id *id, uint8_t *port)
{
    const struct fid *f = (const struct fid *)id;
    *port = f->port;
    return f->device;
}

/* ---- addresses -------------------------------------------------------------------------------------------------- */

static void gid_of(const struct sockaddr_storage *a, union ibv_gid *gid)
{
    memset(gid, 0, sizeof(*gid));
    if (a->ss_family == AF_INET6) {
        memcpy(gid->raw, &((const struct sockaddr_in6 *)a)->sin6_addr, 16);
        return;
    }
    gid->raw[10] = gid->raw[11] = 0xff;
    memcpy(gid->raw + 12, &((const struct sockaddr_in *)a)->sin_addr, 4);
}

static bool same_ip(const struct sockaddr_storage *a, const struct sockaddr_storage *b)
{
    union ibv_gid ga, gb;
    gid_of(a, &ga);
    gid_of(b, &gb);
    return memcmp(&ga, &gb, sizeof(ga)) == 0;
}

static in_port_t *port_at(struct sockaddr_storage *a)
{
    return a->ss_family == AF_INET6 ? &((struct sockaddr_in6 *)a)->sin6_port
                                    : &((struct sockaddr_in *)a)->sin_port;
}

static bool gid_on(struct ibv_device *dev, const union ibv_gid *gid, struct fid *f)
{
    const struct hrd_verbs *v = fake_verbs();
    struct ibv_context *ctx = v->open_device(dev);
    struct ibv_device_attr attr;
    struct ibv_gid_entry e;
    bool found = false;
    if (!ctx)
        return false;
    v->query_device(ctx, &attr);
    for (uint8_t port = 1; port <= attr.phys_port_cnt; port++)
        for (uint32_t i = 0; i < FAKE_GIDS && !found; i++) {
            found = v->query_gid(ctx, port, i, &e) == 0 && e.gid_type == IBV_GID_TYPE_ROCE_V2 &&
                    memcmp(&e.gid, gid, sizeof(*gid)) == 0;
            f->port = port;
            f->gid_index = (int)i;
        }
    v->close_device(ctx);
    return found;
}

static int to_device(struct fid *f, const struct sockaddr_storage *a)
{
    union ibv_gid gid;
    char ip[64] = "";
    gid_of(a, &gid);
    hrd_verbs_gid_text(&gid, ip, sizeof(ip));
    for (unsigned i = 0; i < w.naddress; i++)
        if (strcmp(w.address[i].ip, ip) == 0) {
            snprintf(f->device, sizeof(f->device), "%s", w.address[i].device);
            f->port = w.address[i].port;
            f->gid_index = -1;
            return 0;
        }
    int n = 0;
    struct ibv_device **list = fake_verbs()->get_device_list(&n);
    for (int i = 0; i < n && !f->device[0]; i++)
        if (gid_on(list[i], &gid, f))
            snprintf(f->device, sizeof(f->device), "%s", list[i]->name);
    fake_verbs()->free_device_list(list);
    return f->device[0] ? 0 : ENODEV;
}

static void copy_addr(struct sockaddr_storage *to, const struct sockaddr *from)
{
    memcpy(to, from, from->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in));
}

static int f_bind_addr(struct rdma_cm_id *id, struct sockaddr *addr)
{
    struct fid *f = (struct fid *)id;
    int err = refused(FAKE_CM_BIND);
    copy_addr(&f->at, addr);
    if (!err)
        err = to_device(f, &f->at);
    if (!err && *port_at(&f->at) == 0)
        *port_at(&f->at) = htons((uint16_t)(40000 + w.last_port++ % 1000));
    return err;
}

static int f_listen(struct rdma_cm_id *id, int backlog)
{
    int err = refused(FAKE_CM_LISTEN);
    assert_true(backlog > 0);
    ((struct fid *)id)->listening = !err;
    return err;
}

static uint16_t f_port(struct rdma_cm_id *id)
{
    return ntohs(*port_at(&((struct fid *)id)->at));
}

static int f_set_tos(struct rdma_cm_id *id, uint8_t tos)
{
    ((struct fid *)id)->tos = tos;
    return refused(FAKE_CM_TOS);
}

static int f_resolve_addr(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int ms)
{
    struct fid *f = (struct fid *)id;
    int err = refused(FAKE_CM_ADDR);
    assert_true(ms > 0 && ms < 60000);
    copy_addr(&f->at, from);
    copy_addr(&f->to, to);
    if (!err)
        err = to_device(f, &f->at);
    if (!err && !answered(FAKE_CM_ADDR, f))
        tell(f, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
    return err;
}

static int f_resolve_route(struct rdma_cm_id *id, int ms)
{
    struct fid *f = (struct fid *)id;
    int err = refused(FAKE_CM_ROUTE);
    assert_true(ms > 0 && ms < 60000);
    if (!err && !answered(FAKE_CM_ROUTE, f))
        tell(f, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
    return err;
}

/* ---- connections ------------------------------------------------------------------------------------------------ */

static struct fid *listener_at(struct sockaddr_storage *a)
{
    struct fid *l = w.ids;
    while (l && !(l->listening && same_ip(&l->at, a) && *port_at(&l->at) == *port_at(a)))
        l = l->next;
    return l;
}

static void request(struct fid *from, struct fid *listener, const void *data, unsigned len)
{
    struct fid *n = new_id(listener->ch);
    n->at = listener->at;
    n->to = from->at;
    memcpy(n->device, listener->device, sizeof(n->device));
    n->port = listener->port;
    n->gid_index = listener->gid_index;
    n->tos = from->tos;
    n->other = from;
    n->other_qpn = from->qpn;
    n->other_psn = from->psn;
    from->other = n;
    from->other_psn = n->psn;
    struct hrd_cm_event *ev = tell(n, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    ev->listener = &listener->id;
    ev->qp_num = from->qpn;
    ev->from = from->at;
    set_data(ev, data, len, REQUEST_DATA);
}

static int f_connect(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
    struct fid *f = (struct fid *)id;
    int err = refused(FAKE_CM_CONNECT);
    assert_int_not_equal(p->qp_num, 0);
    f->qpn = p->qp_num;
    if (err || answered(FAKE_CM_CONNECT, f))
        return err;
    struct fid *listener = listener_at(&f->to);
    if (listener)
        request(f, listener, p->private_data, p->private_data_len);
    else
        tell(f, RDMA_CM_EVENT_REJECTED, 8);
    return 0;
}

static int f_accept(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
    struct fid *f = (struct fid *)id;
    int err = refused(FAKE_CM_ACCEPT);
    if (err)
        return err;
    f->qpn = p->qp_num;
    f->connected = true;
    if (!f->other)
        return 0; /* it went meanwhile, and the event that says so is on its way */
    f->other->connected = true;
    f->other->other_qpn = f->qpn;
    if (!f->other->stranger)
        tell(f->other, RDMA_CM_EVENT_CONNECT_RESPONSE, 0)->qp_num = f->qpn;
    return 0;
}

static int f_reject(struct rdma_cm_id *id, const void *data, uint8_t len)
{
    struct fid *f = (struct fid *)id;
    assert_false(f->connected);
    if (!f->other)
        return 0;
    if (f->other->stranger)
        snprintf(w.heard, sizeof(w.heard), "%.*s", (int)len, (const char *)data);
    else
        set_data(tell(f->other, RDMA_CM_EVENT_REJECTED, 28), data, len, REJECT_DATA);
    f->other->other = NULL;
    f->other = NULL;
    return 0;
}

static int f_establish(struct rdma_cm_id *id)
{
    struct fid *f = (struct fid *)id;
    int err = refused(FAKE_CM_ESTABLISH);
    if (!err && f->other)
        tell(f->other, RDMA_CM_EVENT_ESTABLISHED, 0);
    return err;
}

static int f_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *a, int *mask)
{
    const struct fid *f = (struct fid *)id;
    int err = refused(FAKE_CM_ATTR);
    if (err)
        return err;
    *mask = IBV_QP_STATE;
    a->pkey_index = w.pkey_index;
    a->port_num = f->port;
    a->dest_qp_num = f->other_qpn;
    a->rq_psn = f->psn;
    a->sq_psn = f->other_psn;
    a->path_mtu = w.mtu;
    a->ah_attr = (struct ibv_ah_attr){.sl = w.sl, .port_num = f->port, .is_global = f->gid_index >= 0};
    if (f->gid_index < 0) {
        a->ah_attr.dlid = 7;
        return 0;
    }
    gid_of(&f->to, &a->ah_attr.grh.dgid);
    a->ah_attr.grh.sgid_index = (uint8_t)(w.gid_index >= 0 ? w.gid_index : f->gid_index);
    a->ah_attr.grh.hop_limit = 64;
    a->ah_attr.grh.traffic_class = f->tos;
    return 0;
}

static const struct hrd_rdmacm table = {
    .name = "fake",
    .create_channel = f_create_channel,
    .destroy_channel = f_destroy_channel,
    .next_event = f_next_event,
    .create_id = f_create_id,
    .destroy_id = f_destroy_id,
    .device = f_device,
    .bind_addr = f_bind_addr,
    .listen = f_listen,
    .port = f_port,
    .set_tos = f_set_tos,
    .resolve_addr = f_resolve_addr,
    .resolve_route = f_resolve_route,
    .connect = f_connect,
    .accept = f_accept,
    .reject = f_reject,
    .establish = f_establish,
    .init_qp_attr = f_init_qp_attr,
};

const struct hrd_rdmacm *fake_cm_load(char *why, size_t len)
{
    if (!w.on)
        snprintf(why, len, "librdmacm.so.1 cannot be loaded (fake): install librdmacm1");
    return w.on ? &table : NULL;
}

/* ---- orders ----------------------------------------------------------------------------------------------------- */

void fake_cm_on(bool on)
{
    w.on = on;
}

void fake_cm_reset(void)
{
    for (struct fid **at = &w.ids; *at;) {
        struct fid *f = *at;
        if (!f->stranger) {
            at = &f->next;
            continue;
        }
        *at = f->next;
        free(f);
    }
    assert_int_equal(fake_cm_objects(), 0);
    memset(w.fail, 0, sizeof(w.fail));
    memset(w.answer, 0, sizeof(w.answer));
    memset(w.calls, 0, sizeof(w.calls));
    w.naddress = 0;
    w.gid_index = -1;
    w.heard[0] = '\0';
    fake_cm_path(0, IBV_MTU_4096, 0);
}

void fake_cm_fail(enum fake_cm_call call, unsigned after, int err, unsigned times)
{
    w.fail[call].on = true;
    w.fail[call].after = after;
    w.fail[call].err = err;
    w.fail[call].times = times;
}

void fake_cm_answer(enum fake_cm_call call, enum rdma_cm_event_type type, int status, unsigned times)
{
    w.answer[call].type = type;
    w.answer[call].status = status;
    w.answer[call].times = times;
}

unsigned fake_cm_calls(enum fake_cm_call call)
{
    return w.calls[call];
}

unsigned fake_cm_objects(void)
{
    unsigned n = 0;
    for (const struct fid *f = w.ids; f; f = f->next)
        n++;
    for (const struct fchannel *ch = w.channels; ch; ch = ch->next)
        n++;
    return n;
}

unsigned fake_cm_connected(void)
{
    unsigned n = 0;
    for (const struct fid *f = w.ids; f; f = f->next)
        n += f->connected && f->other;
    return n;
}

void fake_cm_address(const char *ip, const char *device, uint8_t port)
{
    assert_true(w.naddress < ADDRESSES);
    snprintf(w.address[w.naddress].ip, sizeof(w.address[0].ip), "%s", ip);
    snprintf(w.address[w.naddress].device, sizeof(w.address[0].device), "%s", device);
    w.address[w.naddress++].port = port;
}

void fake_cm_path(uint8_t sl, enum ibv_mtu mtu, uint16_t pkey_index)
{
    w.sl = sl;
    w.mtu = mtu;
    w.pkey_index = pkey_index;
}

void fake_cm_gid_index(int index)
{
    w.gid_index = index;
}

void fake_cm_raise(enum rdma_cm_event_type type, int status)
{
    for (struct fid *f = w.ids; f; f = f->next)
        if (f->connected)
            tell(f, type, status);
}

void fake_cm_raise_listeners(enum rdma_cm_event_type type)
{
    for (struct fid *f = w.ids; f; f = f->next)
        if (f->listening)
            tell(f, type, 0);
}

void fake_cm_raise_dead(enum rdma_cm_event_type type)
{
    static struct fid dead;
    for (struct fchannel *ch = w.channels; ch; ch = ch->next)
        raise_on(ch, &dead.id, type, 0);
}

void fake_cm_stranger(const void *data, unsigned len, uint32_t qp_num)
{
    static struct fchannel nowhere;
    w.heard[0] = '\0';
    for (struct fid *l = w.ids, *next; l; l = next) {
        next = l->next;
        if (!l->listening)
            continue;
        struct fid *s = new_id(&nowhere);
        s->stranger = true;
        s->qpn = qp_num;
        inet_pton(AF_INET, "10.66.66.66", &((struct sockaddr_in *)&s->at)->sin_addr);
        s->at.ss_family = AF_INET;
        request(s, l, data, len);
    }
}

const char *fake_cm_stranger_heard(void)
{
    return w.heard;
}
