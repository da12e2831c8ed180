/* SPDX-License-Identifier: MIT */
/*
 * Which addresses this daemon listens on, tells others, and uses as source address: a pure function of the
 * configuration and the list of interfaces, so that it can be tested without either.
 */
#ifndef HRD_NETIF_H
#define HRD_NETIF_H

#include <net/if.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "daemon/config.h"
#include "proto/wire.h"

/* One address of an interface. */
struct hrd_netif {
    char name[IFNAMSIZ];
    unsigned index;
    bool up;
    bool loopback;
    bool virt; /* a bridge or an interface of containers or virtual machines: never chosen by itself */
    struct hrp_addr addr; /* port 0; scope_id for link-local IPv6 */
    unsigned bits;        /* prefix length */
};

/* What was chosen. */
struct hrd_net {
    unsigned nlisten;
    struct hrp_addr listen[HRD_MAX_LISTEN]; /* with the port */
    unsigned nown;
    struct hrp_addr own[HRP_MAX_ADDRS]; /* what others are told, best first, with the port */
    unsigned nsource;
    struct hrp_addr source[HRP_MAX_ADDRS]; /* bound on connect; none: the kernel chooses */
    bool any4, any6;                       /* listens on all addresses of the family */
    bool dual;                             /* "::" alone was asked for: its socket takes IPv4 too */
    bool local_only;                       /* only loopback addresses */
    char device[IFNAMSIZ];                 /* interface that was asked for, by name or subnet; "": none was */
    uint16_t port;
};

/* The addresses of this machine; *out is freed by the caller. Their number or negative errno. Does not block. */
int hrd_netif_list(struct hrd_netif **out);
/* Names that belong to bridges, containers and virtual machines (docker0, veth12ab, ...). */
bool hrd_netif_virtual_name(const char *name);
/* 0, or -EINVAL/-EADDRNOTAVAIL with a sentence that says which key to change. */
int hrd_netif_choose(const struct hrd_config *cfg, const struct hrd_netif *ifs, unsigned n,
                     struct hrd_net *out, char *err, size_t errlen);
/* Whether a daemon that is told to reach `addr` (port 0: the own port) would mean itself by it. */
bool hrd_netif_is_mine(const struct hrd_net *net, const struct hrd_netif *ifs, unsigned n,
                       const struct hrp_addr *addr);
/* Whether the address lies in that network, by the first bits of both. */
bool hrd_netif_in_subnet(const struct hrp_addr *a, const struct hrp_addr *net, unsigned bits);
/* Whether the address belongs to this machine. */
bool hrd_netif_is_local(const struct hrd_netif *ifs, unsigned n, const struct hrp_addr *addr);
/* The source address for a connection to `to`, port 0; false: leave it to the kernel. */
bool hrd_netif_source(const struct hrd_net *net, const struct hrd_netif *ifs, unsigned n,
                      const struct hrp_addr *to, struct hrp_addr *from);
/* Bytes per second of the link an address lies on, from /sys/class/net; 0: unknown (virtual or down). */
uint64_t hrd_netif_speed(const char *name);
/* The interface that has this address; "" when none has. */
const char *hrd_netif_name_of(const struct hrd_netif *ifs, unsigned n, const struct hrp_addr *addr);

/* ---- addresses ----------------------------------------------------------------------------------------- */

#define HRD_ADDR_TEXT 72

/* "10.0.0.1", "fe80::1%ib0"; 0 or -EINVAL. Does not look names up. */
int hrd_addr_parse(const char *text, uint16_t port, struct hrp_addr *out);
/* "10.0.0.1" or "::1", without the port. Returns buf. */
const char *hrd_addr_text(const struct hrp_addr *a, char *buf, size_t len);
/* "10.0.0.1 port 18515". Returns buf. */
const char *hrd_addr_port_text(const struct hrp_addr *a, char *buf, size_t len);
/* Same family and address; port and scope do not count. */
bool hrd_addr_same_ip(const struct hrp_addr *a, const struct hrp_addr *b);
bool hrd_addr_is_loopback(const struct hrp_addr *a);
bool hrd_addr_is_any(const struct hrp_addr *a);
bool hrd_addr_is_link_local(const struct hrp_addr *a);
socklen_t hrd_addr_to_sockaddr(const struct hrp_addr *a, struct sockaddr_storage *ss);
/* IPv4 in IPv6 becomes IPv4. -EAFNOSUPPORT. */
int hrd_addr_from_sockaddr(const struct sockaddr *sa, struct hrp_addr *out);

#endif
