/* SPDX-License-Identifier: MIT */
/* Addresses and interfaces of IP. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/doctor/doctor.h"
#include "daemon/text.h"

void hrd_check_address(const struct hrd_machine *m, struct hrd_finding *f)
{
    struct hrd_net net;
    char err[256], own[HRP_MAX_ADDRS * HRD_ADDR_TEXT] = "", one[HRD_ADDR_TEXT];
    if (hrd_netif_choose(m->cfg, m->ifs, m->nifs, &net, err, sizeof(err)) != 0) {
        hrd_find(f, HRD_FAIL, "the daemon has no address to give to other nodes",
                 "Correct 'listen' and 'interface' in hreduced.conf.", "%s", err);
        return;
    }
    for (unsigned i = 0; i < net.nown; i++) {
        hrd_text_list(own, sizeof(own), hrd_addr_text(&net.own[i], one, sizeof(one)));
    }
    if (net.local_only)
        hrd_find(f, HRD_WARN, "other machines cannot reach this one; jobs of one node work",
                 "Set 'listen' in hreduced.conf to this node's address in the cluster network.",
                 "others are told %s port %u", own, net.port);
    else
        hrd_find(f, HRD_PASS, NULL, NULL, "others are told %s port %u", own, net.port);
}

void hrd_check_link_speed(const struct hrd_machine *m, struct hrd_finding *f)
{
    struct hrd_net net;
    char netif[IFNAMSIZ];
    if (!hrd_machine_own(m, &net, netif, sizeof(netif)) || hrd_addr_is_loopback(&net.own[0])) {
        hrd_find(f, HRD_SKIP, NULL, NULL, "the own address lies on no network interface");
        return;
    }
    unsigned mbit = m->netif_mbit(netif, false), most = m->netif_mbit(netif, true);
    if (mbit == 0)
        hrd_find(f, HRD_SKIP, NULL, NULL, "%s does not say how fast it is", netif);
    else if (most > mbit)
        hrd_find(f, HRD_WARN,
                 "the link runs below what the NIC can do: the cable, the transceiver or the other end "
                 "allows no more, or a speed was set by hand",
                 "Look at the port with ethtool, and at the switch; try another cable.",
                 "%s runs at %u Mbit/s and can do %u", netif, mbit, most);
    else
        hrd_find(f, HRD_PASS, NULL, NULL, "%s runs at %u Mbit/s", netif, mbit);
}

/* Of IPv4: the settings below are its. */
static bool same_subnet(const struct hrd_netif *a, const struct hrd_netif *b)
{
    return a->addr.family == 4 && a->bits == b->bits && hrd_netif_in_subnet(&a->addr, &b->addr, b->bits);
}

/* Two interfaces in one subnet, the first such pair after *at; false: no more. */
static bool next_pair(const struct hrd_machine *m, unsigned *at, const struct hrd_netif **a,
                      const struct hrd_netif **b)
{
    for (; *at < m->nifs * m->nifs; ++*at) {
        *a = &m->ifs[*at / m->nifs];
        *b = &m->ifs[*at % m->nifs];
        if (*at / m->nifs >= *at % m->nifs || !(*a)->up || !(*b)->up || (*a)->loopback || (*a)->virt ||
            (*b)->virt || strcmp((*a)->name, (*b)->name) == 0 || !same_subnet(*a, *b))
            continue;
        ++*at;
        return true;
    }
    return false;
}

/* The kernel uses the larger of all and the interface's own. */
static long conf(const struct hrd_machine *m, const char *netif, const char *key)
{
    long all = hrd_machine_number(m, 0, "/proc/sys/net/ipv4/conf/all/%s", key);
    long own = hrd_machine_number(m, 0, "/proc/sys/net/ipv4/conf/%s/%s", netif, key);
    return all > own ? all : own;
}

void hrd_check_arp(const struct hrd_machine *m, struct hrd_finding *f)
{
    const struct hrd_netif *a, *b;
    unsigned pairs = 0;
    for (unsigned at = 0; next_pair(m, &at, &a, &b); pairs++) {
        bool ok = conf(m, a->name, "arp_ignore") >= 1 && conf(m, b->name, "arp_ignore") >= 1 &&
                  conf(m, a->name, "arp_announce") >= 2 && conf(m, b->name, "arp_announce") >= 2;
        if (ok)
            hrd_find(f, HRD_PASS, NULL, NULL, "%s and %s lie in one subnet, each answers for itself", a->name,
                     b->name);
        else
            hrd_find(f, HRD_WARN,
                     "each interface answers ARP for the other's address, so other nodes may send to the "
                     "wrong one, "
                     "whatever 'interface' says, and RoCE fails when it is not the one of the GID",
                     "Set net.ipv4.conf.all.arp_ignore = 1 and net.ipv4.conf.all.arp_announce = 2 (sysctl), "
                     "or put the "
                     "interfaces into different subnets.",
                     "%s and %s lie in one subnet (arp_ignore %ld and %ld, arp_announce %ld and %ld)",
                     a->name, b->name, conf(m, a->name, "arp_ignore"), conf(m, b->name, "arp_ignore"),
                     conf(m, a->name, "arp_announce"), conf(m, b->name, "arp_announce"));
    }
    if (pairs == 0)
        hrd_find(f, HRD_PASS, NULL, NULL, "no two interfaces lie in one subnet");
}

void hrd_check_rp_filter(const struct hrd_machine *m, struct hrd_finding *f)
{
    const struct hrd_netif *a, *b;
    unsigned pairs = 0;
    for (unsigned at = 0; next_pair(m, &at, &a, &b); pairs++) {
        bool strict = conf(m, a->name, "rp_filter") == 1 || conf(m, b->name, "rp_filter") == 1;
        if (strict)
            hrd_find(
                f, HRD_WARN,
                "the kernel drops packets that come in by another interface than the one its answer would "
                "leave "
                "by, so one of the two interfaces seems dead",
                "Set net.ipv4.conf.all.rp_filter = 2 (sysctl), or put the interfaces into different subnets.",
                "%s and %s lie in one subnet and rp_filter is 1 (strict)", a->name, b->name);
        else
            hrd_find(f, HRD_PASS, NULL, NULL, "%s and %s lie in one subnet, rp_filter is not strict", a->name,
                     b->name);
    }
    if (pairs == 0)
        hrd_find(f, HRD_PASS, NULL, NULL, "no two interfaces lie in one subnet");
}

/* The third number of "4096 131072 6291456". */
static long third(const struct hrd_machine *m, const char *key)
{
    char text[128], *at = text;
    long n = -1;
    if (!hrd_machine_text(m, text, sizeof(text), "/proc/sys/net/ipv4/%s", key))
        return -1;
    for (int i = 0; i < 3; i++)
        n = strtol(at, &at, 10);
    return n;
}

void hrd_check_tcp_buffers(const struct hrd_machine *m, struct hrd_finding *f)
{
    long rx = third(m, "tcp_rmem"), tx = third(m, "tcp_wmem"), need = 4L << 20;
    if (rx < 0 || tx < 0)
        hrd_find(f, HRD_SKIP, NULL, NULL, "tcp_rmem or tcp_wmem cannot be read");
    else if (rx < need || tx < need)
        hrd_find(f, HRD_WARN, "a stream cannot have enough bytes on their way to fill a fast link",
                 "Set net.ipv4.tcp_rmem = 4096 131072 6291456 and net.ipv4.tcp_wmem = 4096 65536 4194304 "
                 "(sysctl).",
                 "a TCP stream may receive into %ld KiB and send from %ld KiB at most", rx >> 10, tx >> 10);
    else
        hrd_find(f, HRD_PASS, NULL, NULL, "a TCP stream may receive into %ld KiB and send from %ld KiB",
                 rx >> 10, tx >> 10);
}
