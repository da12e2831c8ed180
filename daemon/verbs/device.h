/* SPDX-License-Identifier: MIT */
/*
 * Which device, port, GID and partition this daemon uses: decided once at start (and again by doctor), from what the
 * devices say and what the configuration wants. Every "no" is a sentence. Control thread only.
 */
#ifndef HRD_VERBS_DEVICE_H
#define HRD_VERBS_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/config.h"
#include "daemon/verbs/verbs_api.h"
#include "proto/wire.h"

#define HRD_VERBS_AUTO UINT32_MAX

/* What is wanted; AUTO and "auto" leave it to the daemon. */
struct hrd_verbs_want {
    char device[64];    /* "mlx5_0" */
    uint32_t port;      /* from 1 */
    uint32_t gid_index; /* RoCE, and IB with routers */
    uint32_t pkey;      /* by value, membership bit ignored; AUTO: the default partition */
    uint32_t sl;        /* service level, 0..15 */
    uint32_t tc;        /* traffic class of RoCE, 0..255 (DSCP << 2) */
    uint32_t mtu;       /* bytes; AUTO: the port's active one */
    uint32_t timeout;   /* of an acknowledgement: 4.096 us << timeout, 1..31 */
    uint32_t retry;     /* 0..7 */
    uint32_t queues;    /* queue pairs a link, 1..HRD_VERBS_QUEUES_MAX */
    const struct hrp_addr
        *addr; /* this node's addresses towards its peers: a GID that is one of them is preferred */
    unsigned naddrs;
};

#define HRD_VERBS_QUEUES_MAX 8u
#define HRD_VERBS_NOTES 512u

/* What was chosen; everything a queue pair needs to be set up, and the words for reports. */
struct hrd_verbs_device {
    const struct hrd_verbs *v;
    char name[64];
    uint8_t port;
    bool ethernet; /* link layer: RoCE */
    union ibv_gid gid;
    uint8_t gid_index;
    uint32_t gid_type;          /* enum ibv_gid_type */
    bool global;                /* the path uses the GID (always on RoCE) */
    bool gid_asked, pkey_asked; /* the configuration names them */
    uint16_t lid;
    uint16_t pkey_index, pkey;
    enum ibv_mtu mtu;
    uint8_t sl, tc, timeout, retry;
    uint8_t queues;
    uint64_t rate;              /* bytes a second of the link; 0: unknown */
    char text[160];             /* "mlx5_0 port 1, RoCE v2, GID 3 (10.0.0.1), MTU 4096" */
    char note[HRD_VERBS_NOTES]; /* what was ignored or merely second best; "" */
};

/*
 * Opens and looks at devices; nothing stays open. 0, or negative errno with a sentence that names the device and port
 * (-ENODEV: there is nothing usable; -EINVAL: what the configuration asks for cannot be). Blocks for milliseconds.
 */
int hrd_verbs_choose(const struct hrd_verbs *v, const struct hrd_verbs_want *want,
                     struct hrd_verbs_device *out, char *why, size_t len);
/* Whether this node has no RDMA device at all, as far as it can be seen; v NULL: libibverbs cannot be loaded. */
bool hrd_verbs_none(const struct hrd_verbs *v);
/* The open device by its name, for one link. NULL with a sentence. */
struct ibv_context *hrd_verbs_open(const struct hrd_verbs *v, const char *name, char *why, size_t len);
/* Fills text by the other members. */
void hrd_verbs_describe(struct hrd_verbs_device *d);
/* How many devices the configuration names, 1 with auto: the rails of a link. */
unsigned hrd_verbs_rails(const struct hrd_config *c);
/* What the configuration says of that rail, which is one of them; addr is the caller's to fill in. */
struct hrd_verbs_want hrd_verbs_want_of(const struct hrd_config *c, unsigned rail);
/* Whether it may use the device of this name. */
bool hrd_verbs_named(const struct hrd_config *c, const char *name);
/* The address that a GID of RoCE is (port 0), and whether it is that one. */
struct hrp_addr hrd_verbs_gid_addr(const union ibv_gid *gid);
bool hrd_verbs_gid_is(const union ibv_gid *gid, const struct hrp_addr *a);
/* A GID as an address: "10.0.0.1", "fd00::1". Returns buf. */
const char *hrd_verbs_gid_text(const union ibv_gid *gid, char *buf, size_t len);

#endif
