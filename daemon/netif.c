/* SPDX-License-Identifier: MIT */
#include "daemon/netif.h"

#include <errno.h>
#include <ifaddrs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool hrd_netif_virtual_name(const char *name)
{
    static const char *const prefix[] = {"docker", "virbr",  "br-",     "veth",   "cni",  "flannel",
                                         "cali",   "podman", "lxc",     "lxd",    "tun",  "tap",
                                         "vnet",   "kube-",  "nerdctl", "cilium", "weave"};
    for (size_t i = 0; i < sizeof(prefix) / sizeof(prefix[0]); i++)
        if (strncmp(name, prefix[i], strlen(prefix[i])) == 0)
            return true;
    return false;
}

static bool is_bridge(const char *name)
{
    char path[64 + IFNAMSIZ];
    snprintf(path, sizeof(path), "/sys/class/net/%s/bridge", name);
    return access(path, F_OK) == 0;
}

static unsigned mask_bits(const struct sockaddr *mask)
{
    struct hrp_addr m;
    unsigned bits = 0;
    if (!mask || hrd_addr_from_sockaddr(mask, &m) != 0)
        return 0;
    unsigned bytes = m.family == 4 ? 4 : 16;
    for (unsigned i = 0; i < bytes; i++)
        bits += (unsigned)__builtin_popcount(m.ip[i]);
    return bits;
}

int hrd_netif_list(struct hrd_netif **out)
{
    struct ifaddrs *all;
    if (getifaddrs(&all) != 0)
        return -errno;
    int n = 0;
    for (struct ifaddrs *i = all; i; i = i->ifa_next)
        n++;
    struct hrd_netif *ifs = calloc(n > 0 ? (size_t)n : 1, sizeof(*ifs));
    n = 0;
    for (struct ifaddrs *i = all; ifs && i; i = i->ifa_next) {
        struct hrd_netif *f = &ifs[n];
        if (!i->ifa_addr || hrd_addr_from_sockaddr(i->ifa_addr, &f->addr) != 0)
            continue;
        snprintf(f->name, sizeof(f->name), "%s", i->ifa_name);
        f->index = if_nametoindex(f->name);
        f->up = (i->ifa_flags & IFF_UP) != 0;
        f->loopback = (i->ifa_flags & IFF_LOOPBACK) != 0;
        f->virt = hrd_netif_virtual_name(f->name) || is_bridge(f->name);
        f->addr.port = 0;
        f->bits = mask_bits(i->ifa_netmask);
        n++;
    }
    freeifaddrs(all);
    if (!ifs)
        return -ENOMEM;
    *out = ifs;
    return n;
}

bool hrd_netif_in_subnet(const struct hrp_addr *a, const struct hrp_addr *net, unsigned bits)
{
    if (a->family != net->family || bits > (a->family == 4 ? 32u : 128u))
        return false;
    if (memcmp(a->ip, net->ip, bits / 8) != 0)
        return false;
    unsigned rest = bits % 8;
    return rest == 0 || ((a->ip[bits / 8] ^ net->ip[bits / 8]) >> (8 - rest)) == 0;
}

/* `interface = NAME`, `interface = ADDRESS/BITS`, or auto. */
struct wanted {
    bool any;
    const char *name; /* NULL: subnet */
    struct hrp_addr net;
    unsigned bits;
};

static int wanted_parse(const char *text, struct wanted *w)
{
    *w = (struct wanted){0};
    if (text[0] == 0 || strcmp(text, "auto") == 0) {
        w->any = true;
        return 0;
    }
    const char *slash = strchr(text, '/');
    if (!slash) {
        w->name = text;
        return 0;
    }
    char addr[64], *end;
    size_t len = (size_t)(slash - text);
    if (len >= sizeof(addr))
        return -EINVAL;
    memcpy(addr, text, len);
    addr[len] = 0;
    unsigned long bits = strtoul(slash + 1, &end, 10);
    if (hrd_addr_parse(addr, 0, &w->net) != 0 || end == slash + 1 || *end != 0 ||
        bits > (w->net.family == 4 ? 32u : 128u))
        return -EINVAL;
    w->bits = (unsigned)bits;
    return 0;
}

static bool wants(const struct wanted *w, const struct hrd_netif *f)
{
    if (w->any)
        return !f->loopback && !f->virt;
    return w->name ? strcmp(f->name, w->name) == 0 : hrd_netif_in_subnet(&f->addr, &w->net, w->bits);
}

static const struct hrd_netif *find_addr(const struct hrd_netif *ifs, unsigned n, const struct hrp_addr *a)
{
    for (unsigned i = 0; i < n; i++)
        if (hrd_addr_same_ip(&ifs[i].addr, a))
            return &ifs[i];
    return NULL;
}

static void add_own(struct hrd_net *net, const struct hrp_addr *a)
{
    for (unsigned i = 0; i < net->nown; i++)
        if (hrd_addr_same_ip(&net->own[i], a))
            return;
    if (net->nown == HRP_MAX_ADDRS)
        return;
    net->own[net->nown] = *a;
    net->own[net->nown++].port = net->port;
}

/* Addresses of the wildcard listeners: global IPv4 first, then global IPv6, link-local ones last. */
static void own_of_any(struct hrd_net *net, const struct wanted *w, const struct hrd_netif *ifs, unsigned n,
                       bool loopback, bool virt)
{
    for (int pass = 0; pass < 3; pass++)
        for (unsigned i = 0; i < n; i++) {
            const struct hrd_netif *f = &ifs[i];
            bool local = hrd_addr_is_link_local(&f->addr);
            int rank = local ? 2 : f->addr.family == 4 ? 0 : 1;
            bool listens = f->addr.family == 4 ? net->any4 : net->any6;
            if (!f->up || !listens || rank != pass || f->loopback != loopback)
                continue;
            if (loopback || (virt && w->any) || wants(w, f))
                add_own(net, &f->addr);
        }
}

static int parse_listen(const struct hrd_config *cfg, struct hrd_net *net, char *err, size_t errlen)
{
    bool v4 = false;
    net->local_only = true;
    for (unsigned i = 0; i < cfg->listen.n && i < HRD_MAX_LISTEN; i++) {
        struct hrp_addr *a = &net->listen[net->nlisten];
        if (hrd_addr_parse(cfg->listen.v[i], cfg->port, a) != 0) {
            snprintf(err, errlen, "listen: '%s' is not an IPv4 or IPv6 address of an interface that exists",
                     cfg->listen.v[i]);
            return -EINVAL;
        }
        if (hrd_addr_is_any(a))
            *(a->family == 4 ? &net->any4 : &net->any6) = true;
        net->local_only = net->local_only && hrd_addr_is_loopback(a);
        v4 = v4 || a->family == 4;
        net->nlisten++;
    }
    net->dual = net->any6 && !v4;
    net->any4 = net->any4 || net->dual;
    return 0;
}

static void own_of_listen(struct hrd_net *net, const struct wanted *w, const struct hrd_netif *ifs,
                          unsigned n)
{
    for (unsigned i = 0; i < net->nlisten; i++) {
        const struct hrp_addr *a = &net->listen[i];
        if (hrd_addr_is_any(a))
            continue;
        const struct hrd_netif *f = find_addr(ifs, n, a);
        /* 127.0.0.0/8 is local as a whole although only 127.0.0.1 stands in the list. */
        if (w->any || (f && wants(w, f)))
            add_own(net, a);
    }
}

static int no_address(const struct hrd_config *cfg, const struct hrd_net *net, char *err, size_t errlen)
{
    if (net->any4 || net->any6)
        snprintf(
            err, errlen,
            "interface = %s: no interface that is up has a matching address of a family that listen names; "
            "correct 'interface', or list the addresses in 'advertise'",
            cfg->interface);
    else
        snprintf(
            err, errlen,
            "interface = %s, but none of the addresses in 'listen' (%s%s) belongs to it: set listen to an "
            "address of that interface or to 0.0.0.0",
            cfg->interface, cfg->listen.v[0], cfg->listen.n > 1 ? ", ..." : "");
    return -EADDRNOTAVAIL;
}

static int use_advertise(const struct hrd_config *cfg, struct hrd_net *net, char *err, size_t errlen)
{
    net->nown = 0;
    for (unsigned i = 0; i < cfg->advertise.n; i++) {
        struct hrp_addr a;
        if (hrd_addr_parse(cfg->advertise.v[i], cfg->port, &a) != 0 || hrd_addr_is_any(&a)) {
            snprintf(err, errlen, "advertise: '%s' is not an address that others can connect to",
                     cfg->advertise.v[i]);
            return -EINVAL;
        }
        if (net->nown == HRP_MAX_ADDRS) {
            snprintf(err, errlen, "advertise: more than %d addresses", HRP_MAX_ADDRS);
            return -EINVAL;
        }
        add_own(net, &a);
    }
    return 0;
}

int hrd_netif_choose(const struct hrd_config *cfg, const struct hrd_netif *ifs, unsigned n,
                     struct hrd_net *out, char *err, size_t errlen)
{
    struct hrd_net net = {.port = cfg->port};
    struct wanted w;
    int r = parse_listen(cfg, &net, err, errlen);
    if (r != 0)
        return r;
    if (wanted_parse(cfg->interface, &w) != 0) {
        snprintf(err, errlen,
                 "interface = %s is neither the name of an interface nor a subnet like 10.1.0.0/16",
                 cfg->interface);
        return -EINVAL;
    }
    own_of_listen(&net, &w, ifs, n);
    if (net.any4 || net.any6)
        own_of_any(&net, &w, ifs, n, false, false);
    /* A machine that has nothing else (a container with one veth) is still reachable under what it has. */
    if (net.nown == 0 && w.any)
        own_of_any(&net, &w, ifs, n, false, true);
    if (net.nown == 0 && w.any)
        own_of_any(&net, &w, ifs, n, true, false);
    if (net.nown == 0 && cfg->advertise.n == 0)
        return no_address(cfg, &net, err, errlen);
    /* Where listen or interface names addresses, they are the source of connections too: otherwise data may
       leave by another link than the one that was chosen. */
    bool named = !w.any || (!net.any4 && !net.any6);
    if (named) {
        memcpy(net.source, net.own, sizeof(net.own));
        net.nsource = net.nown;
        for (unsigned i = 0; i < net.nsource; i++)
            net.source[i].port = 0;
    }
    const struct hrd_netif *f = !w.any && net.nown > 0 ? find_addr(ifs, n, &net.own[0]) : NULL;
    if (f)
        memcpy(net.device, f->name, sizeof(net.device));
    if (cfg->advertise.n > 0 && (r = use_advertise(cfg, &net, err, errlen)) != 0)
        return r;
    *out = net;
    return 0;
}

bool hrd_netif_is_local(const struct hrd_netif *ifs, unsigned n, const struct hrp_addr *addr)
{
    return hrd_addr_is_loopback(addr) || find_addr(ifs, n, addr) != NULL;
}

/*
 * Jobs name their root by MASTER_ADDR, which may be any address of the machine, whatever the daemon there
 * listens on. Several daemons of one machine, each with a loopback address of its own, still tell themselves
 * apart: a loopback address means this daemon only if it listens on none, or on exactly that one.
 */
bool hrd_netif_is_mine(const struct hrd_net *net, const struct hrd_netif *ifs, unsigned n,
                       const struct hrp_addr *addr)
{
    static const uint8_t debian[4] = {127, 0, 1, 1}; /* what a host's own name resolves to */
    static const uint8_t first[4] = {127, 0, 0, 1};
    if (addr->port != 0 && addr->port != net->port)
        return false;
    bool loopback = false, first_loopback = false;
    for (unsigned i = 0; i < net->nlisten; i++) {
        const struct hrp_addr *a = &net->listen[i];
        if (hrd_addr_same_ip(a, addr))
            return true;
        loopback = loopback || hrd_addr_is_loopback(a);
        first_loopback = first_loopback || (a->family == 4 && memcmp(a->ip, first, 4) == 0) ||
                         (a->family == 6 && hrd_addr_is_loopback(a));
    }
    for (unsigned i = 0; i < net->nown; i++)
        if (hrd_addr_same_ip(&net->own[i], addr))
            return true;
    if (net->any4 || net->any6)
        return hrd_netif_is_local(ifs, n, addr);
    if (hrd_addr_is_loopback(addr))
        return !loopback || (first_loopback && addr->family == 4 && memcmp(addr->ip, debian, 4) == 0);
    return net->local_only && find_addr(ifs, n, addr) != NULL;
}

bool hrd_netif_source(const struct hrd_net *net, const struct hrd_netif *ifs, unsigned n,
                      const struct hrp_addr *to, struct hrp_addr *from)
{
    const struct hrp_addr *best = NULL;
    unsigned best_bits = 0;
    for (unsigned i = 0; i < net->nsource; i++) {
        const struct hrp_addr *a = &net->source[i];
        if (a->family != to->family || hrd_addr_is_loopback(a) != hrd_addr_is_loopback(to) ||
            hrd_addr_is_link_local(a) != hrd_addr_is_link_local(to))
            continue;
        const struct hrd_netif *f = find_addr(ifs, n, a);
        unsigned bits = f && hrd_netif_in_subnet(to, &f->addr, f->bits) ? f->bits + 1 : 0;
        if (!best || bits > best_bits) {
            best = a;
            best_bits = bits;
        }
    }
    if (!best)
        return false;
    *from = *best;
    return true;
}

const char *hrd_netif_name_of(const struct hrd_netif *ifs, unsigned n, const struct hrp_addr *addr)
{
    const struct hrd_netif *f = find_addr(ifs, n, addr);
    return f ? f->name : "";
}

uint64_t hrd_netif_speed(const char *name)
{
    char path[64 + IFNAMSIZ], text[32] = "";
    if (name[0] == 0 || strchr(name, '/'))
        return 0;
    snprintf(path, sizeof(path), "/sys/class/net/%s/speed", name);
    FILE *f = fopen(path, "re");
    if (!f)
        return 0;
    /* A link that is down or has no rate answers an error or -1. */
    char *got = fgets(text, sizeof(text), f);
    fclose(f);
    long mbit = got ? strtol(text, NULL, 10) : 0;
    return mbit > 0 ? (uint64_t)mbit * 125000u : 0;
}
