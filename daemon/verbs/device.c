/* SPDX-License-Identifier: MIT */
#include "daemon/verbs/device.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How good a GID is; the best of all ports is taken, the first of equals. */
enum {
    GID_USELESS = 0, /* RoCE v1 or link-local: does not cross a router, often not even a switch */
    GID_GLOBAL6 = 1, /* RoCE v2, IPv6 */
    GID_IPV4 = 2,    /* RoCE v2, IPv4 */
    GID_IB = 3,      /* InfiniBand: the LID does it */
    GID_MATCH = 4,   /* RoCE v2, and one of the addresses this node gives to its peers */
    GID_ASKED = 5,   /* the configuration names it */
};

struct found {
    int score;
    struct hrd_verbs_device dev;
};

struct search {
    const struct hrd_verbs *v;
    const struct hrd_verbs_want *want;
    struct found best;
    bool seen_device; /* one that the configuration allows */
    int err;
    char why[512]; /* of every port that is no good */
};

static void refuse(struct search *s, int err, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void refuse(struct search *s, int err, const char *fmt, ...)
{
    size_t at = strlen(s->why);
    va_list ap;
    if (at > 0 && at + 2 < sizeof(s->why)) {
        memcpy(s->why + at, "; ", 3);
        at += 2;
    }
    va_start(ap, fmt);
    vsnprintf(s->why + at, sizeof(s->why) - at, fmt, ap);
    va_end(ap);
    s->err = err;
}

static void note(struct hrd_verbs_device *d, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void note(struct hrd_verbs_device *d, const char *fmt, ...)
{
    size_t at = strlen(d->note);
    va_list ap;
    if (at > 0 && at + 2 < sizeof(d->note)) {
        memcpy(d->note + at, "; ", 3);
        at += 2;
    }
    va_start(ap, fmt);
    vsnprintf(d->note + at, sizeof(d->note) - at, fmt, ap);
    va_end(ap);
}

unsigned hrd_verbs_rails(const struct hrd_config *c)
{
    unsigned n = 1;
    for (const char *at = c->verbs_device; (at = strchr(at, ',')); at++)
        n++;
    return n;
}

struct hrd_verbs_want hrd_verbs_want_of(const struct hrd_config *c, unsigned rail)
{
    const char *at = c->verbs_device;
    for (; rail > 0; rail--)
        at = strchr(at, ',') + 1;
    int name = (int)strcspn(at, ":,");
    struct hrd_verbs_want want = {.port = c->verbs_port,
                                  .gid_index = c->verbs_gid_index,
                                  .pkey = c->verbs_pkey,
                                  .sl = c->verbs_service_level,
                                  .tc = c->verbs_traffic_class,
                                  .mtu = c->verbs_mtu,
                                  .timeout = c->verbs_timeout,
                                  .retry = c->verbs_retry,
                                  .queues = c->verbs_queue_pairs};
    snprintf(want.device, sizeof(want.device), "%.*s", name, at);
    if (at[name] == ':')
        want.port = (uint32_t)strtoul(at + name + 1, NULL, 10);
    return want;
}

bool hrd_verbs_named(const struct hrd_config *c, const char *name)
{
    for (unsigned i = 0; i < hrd_verbs_rails(c); i++) {
        struct hrd_verbs_want want = hrd_verbs_want_of(c, i);
        if (strcmp(want.device, "auto") == 0 || strcmp(want.device, name) == 0)
            return true;
    }
    return false;
}

/* ---- GIDs --------------------------------------------------------------------------------------------------- */

static bool is_mapped(const union ibv_gid *g)
{
    static const uint8_t prefix[12] = {[10] = 0xff, [11] = 0xff};
    return memcmp(g->raw, prefix, sizeof(prefix)) == 0;
}

static bool is_link_local(const union ibv_gid *g)
{
    if (is_mapped(g))
        return g->raw[12] == 169 && g->raw[13] == 254;
    return g->raw[0] == 0xfe && (g->raw[1] & 0xc0) == 0x80;
}

static bool is_zero(const union ibv_gid *g)
{
    static const union ibv_gid zero;
    return memcmp(g->raw, zero.raw, sizeof(zero.raw)) == 0;
}

struct hrp_addr hrd_verbs_gid_addr(const union ibv_gid *gid)
{
    bool four = is_mapped(gid);
    struct hrp_addr a = {.family = four ? 4 : 6};
    memcpy(a.ip, gid->raw + (four ? 12 : 0), four ? 4 : 16);
    return a;
}

bool hrd_verbs_gid_is(const union ibv_gid *gid, const struct hrp_addr *a)
{
    if (a->family == 4)
        return is_mapped(gid) && memcmp(gid->raw + 12, a->ip, 4) == 0;
    return memcmp(gid->raw, a->ip, 16) == 0;
}

const char *hrd_verbs_gid_text(const union ibv_gid *gid, char *buf, size_t len)
{
    const char *ok = is_mapped(gid) ? inet_ntop(AF_INET, gid->raw + 12, buf, (socklen_t)len)
                                    : inet_ntop(AF_INET6, gid->raw, buf, (socklen_t)len);
    if (!ok)
        snprintf(buf, len, "?");
    return buf;
}

static int gid_score(const struct hrd_verbs_want *want, const struct ibv_gid_entry *e)
{
    if (e->gid_type != IBV_GID_TYPE_ROCE_V2 || is_zero(&e->gid) || is_link_local(&e->gid))
        return GID_USELESS;
    for (unsigned i = 0; i < want->naddrs; i++)
        if (hrd_verbs_gid_is(&e->gid, &want->addr[i]))
            return GID_MATCH;
    return is_mapped(&e->gid) ? GID_IPV4 : GID_GLOBAL6;
}

static const char *type_name(uint32_t type)
{
    return type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2" : type == IBV_GID_TYPE_ROCE_V1 ? "RoCE v1" : "InfiniBand";
}

/* Looks at one port's table; unreadable and empty slots are passed over. *score GID_USELESS: nothing fits. */
static void best_gid(struct search *s, struct ibv_context *ctx, uint8_t port, int table,
                     struct ibv_gid_entry *out, int *score)
{
    *score = GID_USELESS;
    for (int i = 0; i < table && i < 256; i++) {
        struct ibv_gid_entry e;
        if (s->v->query_gid(ctx, port, (uint32_t)i, &e))
            continue;
        int n = gid_score(s->want, &e);
        if (n <= *score)
            continue;
        *score = n;
        *out = e;
        out->gid_index = (uint32_t)i;
    }
}

static int asked_gid(struct search *s, struct ibv_context *ctx, uint8_t port, const char *name, int table,
                     struct ibv_gid_entry *out)
{
    uint32_t index = s->want->gid_index;
    int err = index >= 256 || (int)index >= table ? ENOENT : s->v->query_gid(ctx, port, index, out);
    if (!err && is_zero(&out->gid))
        err = ENODATA;
    if (err)
        refuse(s, -EINVAL,
               "verbs_gid_index = %u: port %u of %s has nothing there (%s); its table has %d entries", index,
               port, name, strerror(err), table);
    out->gid_index = index;
    return err;
}

/* ---- one port ----------------------------------------------------------------------------------------------- */

static const char *state_hint(const struct ibv_port_attr *p)
{
    if (p->state == IBV_PORT_INIT && p->link_layer != IBV_LINK_LAYER_ETHERNET)
        return ": is a subnet manager running?";
    if (p->state == IBV_PORT_ARMED)
        return ": the subnet manager has not finished";
    if (p->link_layer == IBV_LINK_LAYER_ETHERNET)
        return ": is the network interface up and the cable in?";
    return ": is the cable in?";
}

static int find_pkey(struct search *s, struct ibv_context *ctx, uint8_t port, const struct ibv_port_attr *p,
                     struct hrd_verbs_device *d)
{
    bool any = s->want->pkey == HRD_VERBS_AUTO;
    uint16_t want = any ? 0x7fff : (uint16_t)(s->want->pkey & 0x7fff);
    int found = -1;
    for (int i = 0; i < p->pkey_tbl_len; i++) {
        uint16_t value = 0;
        if (s->v->query_pkey(ctx, port, i, &value) || (value & 0x7fff) != want)
            continue;
        if (found >= 0 && !(value & 0x8000))
            continue; /* full membership is better: limited members do not hear each other */
        found = i;
        d->pkey = value;
    }
    if (found < 0 && any && p->pkey_tbl_len > 0 && s->v->query_pkey(ctx, port, 0, &d->pkey) == 0 && d->pkey)
        found = 0; /* a fabric without the default partition: what the subnet manager put first */
    if (found < 0) {
        refuse(s, -EINVAL,
               "partition key 0x%04x is not in the table of port %u of %s: add this node to the partition at "
               "the subnet manager, or change verbs_pkey",
               want, port, d->name);
        return -1;
    }
    d->pkey_index = (uint16_t)found;
    return 0;
}

static uint64_t rate_of(const struct ibv_port_attr *p)
{
    /* Mbit/s of a lane by speed bit, after coding. */
    static const unsigned lane[] = {2000, 4000, 8000, 10000, 14000, 25000, 50000, 100000, 200000};
    unsigned lanes = p->active_width == 1    ? 1
                     : p->active_width == 2  ? 4
                     : p->active_width == 4  ? 8
                     : p->active_width == 8  ? 12
                     : p->active_width == 16 ? 2
                                             : 0;
    unsigned bit = 0;
    while (bit < 8 && !(p->active_speed >> bit & 1))
        bit++;
    return (uint64_t)lane[bit] * lanes * 125000;
}

static int set_mtu(struct search *s, const struct ibv_port_attr *p, struct hrd_verbs_device *d)
{
    d->mtu = p->active_mtu;
    if (s->want->mtu == HRD_VERBS_AUTO)
        return 0;
    enum ibv_mtu mtu = hrd_verbs_mtu_of(s->want->mtu);
    if (!mtu || mtu > p->active_mtu) {
        refuse(s, -EINVAL, "verbs_mtu = %u, but port %u of %s carries %u at most%s", s->want->mtu, d->port,
               d->name, hrd_verbs_mtu_bytes(p->active_mtu),
               mtu ? "" : " (and it must be 256, 512, 1024, 2048 or 4096)");
        return -1;
    }
    d->mtu = mtu;
    return 0;
}

void hrd_verbs_describe(struct hrd_verbs_device *d)
{
    char at[64] = "";
    if (d->ethernet)
        snprintf(d->text, sizeof(d->text), "%s port %u, %s, GID %u (%s), MTU %u", d->name, d->port,
                 type_name(d->gid_type), d->gid_index, hrd_verbs_gid_text(&d->gid, at, sizeof(at)),
                 hrd_verbs_mtu_bytes(d->mtu));
    else
        snprintf(d->text, sizeof(d->text), "%s port %u, InfiniBand, LID %u, pkey 0x%04x, MTU %u", d->name,
                 d->port, d->lid, d->pkey, hrd_verbs_mtu_bytes(d->mtu));
}

static int look_at_gid(struct search *s, struct ibv_context *ctx, const struct ibv_port_attr *p,
                       struct hrd_verbs_device *d, int *score)
{
    struct ibv_gid_entry e = {0};
    bool asked = s->want->gid_index != HRD_VERBS_AUTO;
    if (asked && asked_gid(s, ctx, d->port, d->name, p->gid_tbl_len, &e))
        return -1;
    if (d->ethernet) {
        *score = GID_ASKED;
        if (!asked)
            best_gid(s, ctx, d->port, p->gid_tbl_len, &e, score);
        if (*score == GID_USELESS) {
            refuse(s, -ENODEV,
                   "port %u of %s has no routable RoCE v2 address: give its network interface an IP address",
                   d->port, d->name);
            return -1;
        }
        if (asked && (e.gid_type != IBV_GID_TYPE_ROCE_V2 || is_link_local(&e.gid)))
            note(d, "GID %u of port %u of %s is a %s%s address, which routers do not forward", e.gid_index,
                 d->port, d->name, is_link_local(&e.gid) ? "link-local " : "", type_name(e.gid_type));
        d->global = true;
    } else {
        *score = GID_IB;
        if (p->lid == 0) {
            refuse(s, -ENODEV, "port %u of %s has no LID: is a subnet manager running?", d->port, d->name);
            return -1;
        }
        if (!asked && s->v->query_gid(ctx, d->port, 0, &e))
            memset(&e, 0, sizeof(e));
        d->global = asked;
    }
    d->gid = e.gid;
    d->gid_index = (uint8_t)e.gid_index;
    d->gid_type = e.gid_type;
    hrd_verbs_describe(d);
    return 0;
}

static void look_at_port(struct search *s, struct ibv_context *ctx, const char *name, uint8_t port)
{
    const struct hrd_verbs_want *w = s->want;
    struct ibv_port_attr p;
    int score, err = s->v->query_port(ctx, port, &p);
    if (err) {
        refuse(s, -ENODEV, "port %u of %s cannot be asked for its state (%s)", port, name, strerror(err));
        return;
    }
    if (p.state != IBV_PORT_ACTIVE) {
        refuse(s, -ENODEV, "port %u of %s is %s%s", port, name, hrd_verbs_port_state(p.state),
               state_hint(&p));
        return;
    }
    struct hrd_verbs_device d = {.v = s->v,
                                 .gid_asked = w->gid_index != HRD_VERBS_AUTO,
                                 .pkey_asked = w->pkey != HRD_VERBS_AUTO,
                                 .port = port,
                                 .ethernet = p.link_layer == IBV_LINK_LAYER_ETHERNET,
                                 .lid = p.lid,
                                 .sl = (uint8_t)w->sl,
                                 .tc = (uint8_t)w->tc,
                                 .timeout = (uint8_t)w->timeout,
                                 .retry = (uint8_t)w->retry,
                                 .queues = (uint8_t)w->queues,
                                 .rate = rate_of(&p)};
    snprintf(d.name, sizeof(d.name), "%s", name);
    if (set_mtu(s, &p, &d) || find_pkey(s, ctx, port, &p, &d) || look_at_gid(s, ctx, &p, &d, &score))
        return;
    if (w->tc && !d.global) {
        note(&d,
             "verbs_traffic_class = %u is ignored: port %u of %s is InfiniBand, where the service level "
             "decides",
             w->tc, port, name);
        d.tc = 0;
    }
    if (score > s->best.score) {
        s->best.score = score;
        s->best.dev = d;
    }
}

/* ---- all devices -------------------------------------------------------------------------------------------- */

static void look_at_device(struct search *s, struct ibv_device *dev)
{
    const char *name = dev->name;
    struct ibv_device_attr attr;
    if (strcmp(s->want->device, "auto") != 0 && strcmp(s->want->device, name) != 0)
        return;
    s->seen_device = true;
    struct ibv_context *ctx = s->v->open_device(dev);
    if (!ctx) {
        refuse(s, -ENODEV, "%s cannot be opened (%s): may the daemon's user open /dev/infiniband/%s?", name,
               strerror(errno), dev->dev_name);
        return;
    }
    int err = s->v->query_device(ctx, &attr);
    if (err)
        refuse(s, -ENODEV, "%s does not say what it can (%s)", name, strerror(err));
    else if (s->want->port != HRD_VERBS_AUTO && s->want->port > attr.phys_port_cnt)
        refuse(s, -EINVAL, "verbs_port = %u, but %s has %u", s->want->port, name, attr.phys_port_cnt);
    for (unsigned port = 1; !err && port <= attr.phys_port_cnt; port++)
        if (s->want->port == HRD_VERBS_AUTO || s->want->port == port)
            look_at_port(s, ctx, name, (uint8_t)port);
    s->v->close_device(ctx);
}

/* What get_device_list() says of a kernel that has no driver of a device loaded. */
static bool no_support(int err)
{
    return err == ENOSYS || err == ENOENT;
}

static int nothing_there(const struct hrd_verbs_want *want, int err, char *why, size_t len)
{
    if (no_support(err))
        snprintf(why, len, "the kernel has no RDMA support loaded (module ib_uverbs)");
    else if (err)
        snprintf(why, len, "the RDMA devices cannot be listed (%s)", strerror(err));
    else
        snprintf(why, len,
                 "no RDMA device in this network namespace (no driver loaded, or 'rdma system' mode "
                 "exclusive?)%s%s",
                 strcmp(want->device, "auto") ? "; verbs_device = " : "",
                 strcmp(want->device, "auto") ? want->device : "");
    return -ENODEV;
}

int hrd_verbs_choose(const struct hrd_verbs *v, const struct hrd_verbs_want *want,
                     struct hrd_verbs_device *out, char *why, size_t len)
{
    struct search s = {.v = v, .want = want, .err = -ENODEV};
    int n = 0;
    errno = 0;
    struct ibv_device **list = v->get_device_list(&n);
    if (!list || n == 0) {
        int err = list ? 0 : errno ? errno : EIO;
        if (list)
            v->free_device_list(list);
        return nothing_there(want, err, why, len);
    }
    char names[128] = "";
    for (int i = 0; i < n; i++) {
        size_t at = strlen(names);
        snprintf(names + at, sizeof(names) - at, "%s%s", i ? ", " : "", list[i]->name);
        look_at_device(&s, list[i]);
    }
    v->free_device_list(list);
    if (!s.seen_device) {
        snprintf(why, len, "verbs_device = %s, but there is only %s", want->device, names);
        return -EINVAL;
    }
    if (!s.best.score) {
        snprintf(why, len, "%s", s.why[0] ? s.why : "the device has no port");
        return s.err;
    }
    *out = s.best.dev;
    if (out->ethernet && s.best.score < GID_MATCH && want->naddrs > 0)
        note(out, "no RoCE address is one of those this node gives to its peers; see verbs_device and "
                  "verbs_gid_index");
    return 0;
}

/* Without the library it is the kernel that says. */
static bool none_in_sysfs(void)
{
    DIR *dir = opendir("/sys/class/infiniband");
    const struct dirent *e = NULL;
    while (dir && (e = readdir(dir)) && e->d_name[0] == '.')
        continue;
    if (dir)
        closedir(dir);
    return e == NULL;
}

bool hrd_verbs_none(const struct hrd_verbs *v)
{
    int n = 0;
    if (!v)
        return none_in_sysfs();
    errno = 0;
    struct ibv_device **list = v->get_device_list(&n);
    bool none = list ? n == 0 : no_support(errno);
    if (list)
        v->free_device_list(list);
    return none;
}

struct ibv_context *hrd_verbs_open(const struct hrd_verbs *v, const char *name, char *why, size_t len)
{
    int n = 0;
    struct ibv_context *ctx = NULL;
    struct ibv_device **list = v->get_device_list(&n);
    snprintf(why, len, "%s is gone", name);
    for (int i = 0; list && i < n && !ctx; i++) {
        if (strcmp(list[i]->name, name) != 0)
            continue;
        ctx = v->open_device(list[i]);
        if (!ctx)
            snprintf(why, len, "%s cannot be opened (%s)", name, strerror(errno));
    }
    if (list)
        v->free_device_list(list);
    return ctx;
}
