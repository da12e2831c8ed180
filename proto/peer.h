/* SPDX-License-Identifier: MIT */
/*
 * What two daemons say to each other on a TCP connection to the one peer port, before frames (data.h) flow.
 * Little endian, like data.h. Every connection opens with three messages of fixed size:
 *
 *   dialer   -> acceptor   struct hrp_peer_hello
 *   acceptor -> dialer     struct hrp_peer_reply     status HRP_OK, or a refusal in words and the end
 *   dialer   -> acceptor   struct hrp_peer_confirm
 *
 * Nothing else is read or parsed before all three have passed, so that a keyed handshake fits into the
 * reserved bytes: challenge and auth are sent as zero and ignored until then.
 *
 * A CONTROL connection then carries messages (struct hrp_peer_hdr + body), the acceptor's UP first. A DATA
 * connection is stream i of a link and carries frames from here on; all streams of a link name the same
 * random number `link`.
 *
 * Identity is the instance id, random at each start of a daemon. In addition each side numbers its
 * relationship with another daemon (peer_no, never reused while it runs): a number that differs from what was
 * heard before says that the other side has given up the old relationship.
 *
 * Versions: magic and major stay where they are for ever. Another major is refused with HRP_VERSION; minor
 * versions may use reserved bytes, which are therefore not checked.
 */
#ifndef HRP_PEER_H
#define HRP_PEER_H

#include <stddef.h>
#include <stdint.h>

#include "proto/shm.h"
#include "proto/wire.h"

#define HRP_PEER_MAGIC 0x70657268u
#define HRP_PEER_MAJOR 1u
/* 1: VERBS_*; 2: ASK, TELL, PROBE_* frames; 3: VERBS_LISTEN; 4: HRP_VERBS_NONE, HRP_VERBS_CAN, JOINING, WAITS;
   5: HRP_PLAN_EAGER_BLOCKS; 6: VERBS_RAIL */
#define HRP_PEER_MINOR 6u
#define HRP_PEER_MINOR_ASK 2u
#define HRP_PEER_MINOR_RDMACM 3u
#define HRP_PEER_MINOR_NONE 4u
#define HRP_PEER_MINOR_JOINING 4u
#define HRP_PEER_MINOR_EAGER_BLOCKS 5u
#define HRP_PEER_MINOR_RAILS 6u
#define HRP_PEER_NAME 72u        /* node name, NUL-terminated, rest zero */
#define HRP_PEER_STREAMS_MAX 16u /* of one link */

enum hrp_peer_role { HRP_PEER_CONTROL = 1, HRP_PEER_DATA = 2 };

struct hrp_peer_hello {
    uint32_t magic;
    uint16_t major, minor;
    uint8_t role;      /* enum hrp_peer_role */
    uint8_t naddrs;    /* of addr in use, the others zero */
    uint16_t port;     /* where the sender listens, host order like every number here */
    uint16_t stream;   /* DATA: index; CONTROL: 0 */
    uint16_t nstreams; /* DATA: streams of this link; CONTROL: how many the sender wants, 1..16 */
    uint32_t peer_no;  /* DATA: the sender's number for the receiver; CONTROL: 0 */
    uint32_t reserved0;
    uint64_t link;                       /* DATA: nonzero; CONTROL: 0 */
    uint8_t instance[16];                /* the sender's */
    struct hrp_addr addr[HRP_MAX_ADDRS]; /* where the sender can be reached, best first */
    char node[HRP_PEER_NAME];
    uint8_t challenge[32];
    uint8_t auth[192];
    uint8_t reserved[72];
};
_Static_assert(sizeof(struct hrp_peer_hello) == 512, "layout");
_Static_assert(offsetof(struct hrp_peer_hello, challenge) == 216, "layout");

struct hrp_peer_reply {
    uint32_t magic;
    uint16_t major, minor;
    uint32_t status;   /* enum hrp_status */
    uint16_t port;     /* where the sender listens */
    uint16_t nstreams; /* how many streams the sender wants in a link, 1..16 */
    uint8_t instance[16];
    uint8_t naddrs;
    uint8_t reserved0[7];
    struct hrp_addr addr[HRP_MAX_ADDRS];
    char node[HRP_PEER_NAME];
    char text[176]; /* status not HRP_OK: the sentence; NUL-terminated, rest zero */
    uint8_t challenge[32];
    uint8_t auth[96];
};
_Static_assert(sizeof(struct hrp_peer_reply) == 512, "layout");
_Static_assert(offsetof(struct hrp_peer_reply, challenge) == 384, "layout");

struct hrp_peer_confirm {
    uint32_t magic;
    uint32_t peer_no; /* the sender's number for the receiver, not 0 */
    uint8_t auth[192];
    uint8_t reserved[56];
};
_Static_assert(sizeof(struct hrp_peer_confirm) == 256, "layout");

/* 0; -EPROTONOSUPPORT: another major version; -EPROTO: not ours, or a field out of its range. */
int hrp_peer_hello_check(const struct hrp_peer_hello *h);
int hrp_peer_reply_check(const struct hrp_peer_reply *r);
int hrp_peer_confirm_check(const struct hrp_peer_confirm *c);

/* ---- messages of a CONTROL connection --------------------------------------------------------------------
 *
 * "Root" is the daemon at which the ranks of a new communicator meet, "node" a daemon with ranks of it. The
 * root may be a node of it or not.
 */
enum hrp_peer_type {
    HRP_PEER_UP = 1,       /* acceptor, first message: its number for the dialer */
    HRP_PEER_PING = 2,     /* once a second while the sender's agent turns; answered by PONG */
    HRP_PEER_PONG = 3,     /* stamp of the PING */
    HRP_PEER_BYE = 4,      /* the last message: the sender stops, or counts the other as lost; text: why */
    HRP_PEER_JOIN = 5,     /* node -> root: a local rank wants to join */
    HRP_PEER_REFUSE = 6,   /* root -> node: that join failed; status, text */
    HRP_PEER_WITHDRAW = 7, /* node -> root: the rank of that join is gone; text: why */
    HRP_PEER_ROSTER = 8,   /* root -> node: everyone is there; connect, reserve, vote */
    HRP_PEER_VOTE = 9,     /* node -> root: status HRP_OK, or why not */
    HRP_PEER_COMMIT = 10,  /* root -> node: every node voted HRP_OK */
    HRP_PEER_FAIL = 11,    /* root -> node: not committed, or superseded later; status, text */
    HRP_PEER_LEFT = 12,    /* node -> root, after COMMIT: that rank died or left */
    HRP_PEER_GONE = 13,    /* node -> root, after COMMIT: nothing of the comm is left on this node */
    /* How a link is made without sockets; only to a peer of minor version 1 or later. Sent by the one that makes the link,
       before it dials any stream; whatever is missing on either end, both end up with the same answer. An OFFER replaces
       an attempt of the same link that is under way. */
    HRP_PEER_VERBS_OFFER = 14,  /* dialer: what it has, or why not (status, text) */
    HRP_PEER_VERBS_ANSWER = 15, /* the other: what it has, its queue pairs connected, or why not */
    HRP_PEER_VERBS_READY =
        16, /* each: messages went both ways, or what happened; both HRP_OK: the link is up */
    HRP_PEER_VERBS_DOWN =
        17, /* the other to the dialer: its end of the link with that nonce broke (text); make it anew */
    /* Dialer: the link with that nonce (status HRP_OK) serves nobody here, may it go? The other: it is gone (HRP_OK), or
       it serves somebody (HRP_RESOURCE). */
    HRP_PEER_VERBS_CLOSE = 18,
    /* To a peer of minor version 2 or later. */
    HRP_PEER_ASK = 19,  /* hreducectl doctor at the sender wants to know this of the receiver */
    HRP_PEER_TELL = 20, /* the answer, in parts: JSON as text; or status and the sentence */
    /* To a peer of minor version 3 or later: before an ANSWER by RDMA-CM, where its requests go. */
    HRP_PEER_VERBS_LISTEN = 21,
    /* To a peer of minor version 4 or later. */
    HRP_PEER_JOINING = 22, /* node -> root: what that join, which is not answered yet, waits for */
    HRP_PEER_WAITS = 23,   /* root -> node: it waits for this (text) */
    /* To a peer of minor version 6 or later: before an OFFER and its ANSWER, when the dialer wants a link of several rails,
       which one they are about. The link is up with those whose READYs say HRP_OK when all have ended. */
    HRP_PEER_VERBS_RAIL = 24,
    HRP_PEER_NTYPES = 25,
};

struct hrp_peer_hdr {
    uint32_t magic; /* HRP_PEER_MAGIC */
    uint16_t type;
    uint16_t reserved;
    uint32_t len; /* of the body: fixed part, arrays, text */
    uint32_t reserved1;
};
_Static_assert(sizeof(struct hrp_peer_hdr) == 16, "layout");

#define HRP_PEER_TEXT HRP_COMM_TEXT /* longest text tail */

struct hrp_peer_up {
    uint32_t peer_no; /* not 0 */
    uint32_t reserved;
};

struct hrp_peer_ping { /* PING, PONG */
    uint64_t stamp;    /* the sender's clock, meaningless to others */
};

struct hrp_peer_bye {
    uint64_t reserved;
};

struct hrp_peer_join {
    struct hrp_key key;
    struct hrp_comm_config config;
    uint64_t join; /* the node's number for this attempt, not 0, never reused */
    uint32_t rank;
    int32_t pid;        /* for sentences */
    uint32_t waited_ms; /* since the rank asked its daemon */
    uint32_t reserved;
};
_Static_assert(sizeof(struct hrp_peer_join) == 152, "layout");

struct hrp_peer_refuse { /* REFUSE, WITHDRAW, JOINING, WAITS */
    uint64_t join;
    uint32_t status; /* REFUSE */
    uint32_t reserved;
};

/* A node of a roster; its index is its place in the array. */
struct hrp_peer_node {
    uint8_t instance[16];
    uint8_t naddrs; /* 1.. */
    uint8_t reserved[7];
    struct hrp_addr addr[HRP_MAX_ADDRS]; /* ports not 0 */
    char name[HRP_PEER_NAME];
};
_Static_assert(sizeof(struct hrp_peer_node) == 192, "layout");

/* Bits of a roster's plan. The root sets what every node of it knows. */
#define HRP_PLAN_EAGER_BLOCKS 1u /* blocks of direct may be eager; minor version 5 */
#define HRP_PLAN_BITS HRP_PLAN_EAGER_BLOCKS

/*
 * Followed by uint64_t joins[nlocal] (the receiver's ranks, ascending), struct hrp_peer_node nodes[nnodes]
 * and uint32_t node_of_rank[nranks]. Nodes are numbered in the order of their lowest rank: the numbering, and
 * with it the order of summation, depends on nothing but which rank lives where.
 */
struct hrp_peer_roster {
    uint8_t comm_id[16]; /* random; the first 8 bytes are not all zero */
    struct hrp_key key;
    struct hrp_comm_config config; /* resolved: nothing is default any more */
    uint32_t nranks;
    uint32_t nnodes;
    uint32_t node;   /* index of the receiver */
    uint32_t nlocal; /* ranks of the receiver, 1.. */
    uint32_t eager_limit;
    uint32_t plan; /* HRP_PLAN_* */
    uint64_t unit_bytes, unit_min_bytes;
    uint64_t latency_ns, bandwidth;
};
_Static_assert(sizeof(struct hrp_peer_roster) == 200, "layout");

struct hrp_peer_vote { /* VOTE, FAIL */
    uint8_t comm_id[16];
    uint32_t status;
    uint32_t reserved;
};

struct hrp_peer_comm { /* COMMIT, LEFT, GONE */
    uint8_t comm_id[16];
    uint32_t rank; /* LEFT */
    uint32_t reserved;
};

#define HRP_PEER_QUEUES_MAX 8u

/* hrp_peer_verbs.flags. All but the first stand beside a status other than HRP_OK, in messages to a peer of minor version 4
   or later. */
#define HRP_VERBS_MUST 1u /* the sender is configured to use nothing but verbs */
#define HRP_VERBS_NONE 2u /* the sender has no RDMA device at all; text says how it knows */
#define HRP_VERBS_CAN 4u  /* ANSWER to an OFFER without queue pairs: the sender could have had some */

struct hrp_peer_verbs { /* OFFER, ANSWER */
    uint64_t nonce;     /* of this attempt, the dialer's choice, not 0 */
    /* HRP_OK; otherwise text says why, and all below `link` is 0. ANSWER, HRP_REFUSED: tcp was agreed on earlier, and is in
       use; HRP_MISMATCH: the sender's configuration names no device for this rail. */
    uint32_t status;
    uint8_t flags;                        /* HRP_VERBS_* */
    uint8_t service_level, traffic_class; /* of this link: there is one for each such class */
    /* 0: queue pairs are connected with what stands here. OFFER: 1: by RDMA-CM, if the other can; ANSWER: 1: it can, and
       its queue pairs wait for requests at the address that LISTEN said. OFFER of a new link, ANSWER, both with HRP_OK:
       the text says why not RDMA-CM. */
    uint8_t rdmacm;
    uint64_t
        link; /* 0: a new link; otherwise the nonce that the link was made with, whose path is made anew */
    uint8_t ethernet; /* 1: RoCE, 0: InfiniBand */
    uint8_t global;   /* 1: the path uses the GID */
    uint8_t mtu;      /* 1..5: 128 << mtu bytes */
    uint8_t queues;   /* 1..HRP_PEER_QUEUES_MAX; OFFER: at most, ANSWER: exactly */
    uint16_t lid, pkey;
    uint32_t depth, msg_bytes; /* message buffers that each queue pair grants, and their size */
    uint8_t gid[16];
    uint32_t qpn[HRP_PEER_QUEUES_MAX]; /* 24 bits; 0 beyond `queues` */
    uint32_t psn[HRP_PEER_QUEUES_MAX]; /* 24 bits; 0 beyond `queues` */
    uint64_t got
        [HRP_PEER_QUEUES_MAX]; /* link not 0: messages that had arrived on each; otherwise, and beyond, 0 */
};
_Static_assert(sizeof(struct hrp_peer_verbs) == 184, "layout");

struct hrp_peer_ready { /* READY, DOWN, CLOSE */
    uint64_t nonce;     /* READY: of the attempt; DOWN, CLOSE: of the link */
    uint32_t status;    /* DOWN: HRP_PEER_LOST */
    uint32_t reserved;
};

struct hrp_peer_listen {
    uint64_t nonce;       /* of the attempt */
    struct hrp_addr addr; /* port: of RDMA_PS_TCP, chosen by the kernel */
};
_Static_assert(sizeof(struct hrp_peer_listen) == 32, "layout");

#define HRP_PEER_RAILS_MAX 4u

struct hrp_peer_rail {
    uint64_t nonce; /* of the OFFER that follows, or that the ANSWER is to */
    uint64_t group; /* the same for all rails of this attempt at a link, not 0 */
    uint64_t rate;  /* bytes a second that the sender's port can send; 0: unknown, or it cannot be used */
    uint8_t rail;   /* from 0: place in the sender's list of devices */
    uint8_t of;     /* rails, 2..HRP_PEER_RAILS_MAX; OFFER: of the dialer, ANSWER: of either end */
    uint16_t reserved;
    uint32_t reserved1;
};
_Static_assert(sizeof(struct hrp_peer_rail) == 32, "layout");

/*
 * Private data of a connect request by RDMA-CM, one for each queue pair. The nonce ties it to an attempt that the two
 * daemons agreed on over their control connection, and the queue pairs' numbers must be those told there; any other
 * request is rejected, with a sentence (printable ASCII, no NUL) as private data.
 */
struct hrp_cm_request {
    uint32_t magic;
    uint16_t version;
    uint8_t queue; /* index of the queue pair */
    uint8_t reserved;
    uint64_t nonce;
};
_Static_assert(sizeof(struct hrp_cm_request) == 16, "layout");
#define HRP_CM_MAGIC 0x6d637268u
#define HRP_CM_VERSION 1u
#define HRP_CM_REJECT_TEXT 144u /* bytes at most: what an InfiniBand reject message has room for is 148 */

struct hrp_peer_ask {
    uint64_t token; /* not 0 */
    uint32_t what;  /* HRP_DOCTOR_HERE, REACH, PROBE or LINK; all but HERE towards the sender */
    uint32_t reserved;
};

struct hrp_peer_tell {
    uint64_t token;
    uint32_t status;   /* HRP_OK: text is a part of the answer */
    uint32_t more;     /* 1: further parts follow */
    uint64_t took_ns;  /* from ASK to the first part */
    uint64_t clock_ns; /* the sender's CLOCK_REALTIME then */
};

struct hrp_peer_msg {
    uint16_t type;
    union {
        struct hrp_peer_up up;
        struct hrp_peer_ping ping;
        struct hrp_peer_bye bye;
        struct hrp_peer_join join;
        struct hrp_peer_refuse refuse;
        struct hrp_peer_roster roster;
        struct hrp_peer_vote vote;
        struct hrp_peer_comm comm;
        struct hrp_peer_verbs verbs;
        struct hrp_peer_ready ready;
        struct hrp_peer_listen listen;
        struct hrp_peer_rail rail;
        struct hrp_peer_ask ask;
        struct hrp_peer_tell tell;
    } body;
    /* ROSTER. encode: the caller's arrays; decode: into the caller's buffer. */
    const uint64_t *joins;
    const struct hrp_peer_node *nodes;
    const uint32_t *node_of_rank;
    /* Types with a text tail: not NUL-terminated. */
    const char *text;
    size_t text_len;
};

#define HRP_PEER_BODY_MAX                                                                     \
    (sizeof(struct hrp_peer_roster) + HRP_MAX_RANKS * (sizeof(uint64_t) + sizeof(uint32_t)) + \
     HRP_MAX_NODES * sizeof(struct hrp_peer_node) + HRP_PEER_TEXT)
#define HRP_PEER_MSG_MAX (sizeof(struct hrp_peer_hdr) + HRP_PEER_BODY_MAX)
_Static_assert(HRP_PEER_MSG_MAX <= 256 * 1024, "a control message is bounded");

/* "JOIN", ...; never NULL. */
const char *hrp_peer_name(unsigned type);
/* Bytes that the message takes, header included; 0 for an unknown type. */
size_t hrp_peer_size(const struct hrp_peer_msg *msg);
/* Encodes into buf; its length, -EINVAL for a field out of range, -EMSGSIZE. Text is cut at HRP_PEER_TEXT. */
long hrp_peer_encode(const struct hrp_peer_msg *msg, void *buf, size_t size);
/* Looks at a header: the length of the whole message, or -EPROTO when it cannot be one. */
long hrp_peer_frame(const struct hrp_peer_hdr *hdr);
/* Decodes one whole message at buf, which is aligned to 8 bytes; checks every field. 0 or -EPROTO. */
int hrp_peer_decode(struct hrp_peer_msg *msg, const void *buf, size_t len);

#endif
