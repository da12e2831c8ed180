/* SPDX-License-Identifier: MIT */
/*
 * Inside of the peer connections: peer.c records and liveness, peer_conn.c sockets and buffers, peer_shake.c
 * the three opening messages, peer_dial.c outgoing control connections, peer_link.c data links over sockets,
 * peer_verbs.c those over verbs, peer_rails.c those over several NICs, peer_setup.c how their queue pairs are connected,
 * peer_mend.c verbs links whose path failed.
 *
 * Ownership: struct hrd_peers owns all lists. A connection is freed by the loop after its uv handle closed;
 * conn_close() takes it off all lists at once, so no pointer to a closing one remains.
 */
#ifndef HRD_PEER_IMPL_H
#define HRD_PEER_IMPL_H

#include <uv.h>

#include "daemon/log.h"
#include "daemon/peer.h"
#include "daemon/transport_tcp.h"
#include "daemon/verbs/cm.h"

#define HELLO_TIMEOUT_MS 5000u   /* the three opening messages */
#define CONNECT_TIMEOUT_MS 3000u /* one address */
#define MAX_STRANGERS 512u       /* incoming connections whose opening is not finished */
#define MAX_PEERS 1024u
#define TX_MAX (UINT64_C(8) << 20) /* bytes queued to one peer: more than all rosters of its comms at once */
#define TICK_MS 250u
/* Four of them in the shortest peer_timeout that another node may have. */
#define PING_MS 250u
#define RTT_SAMPLES 4u
#define AGENT_FRESH_NS UINT64_C(3000000000)

enum conn_stage {
    CONN_CONNECTING, /* outgoing: connect() */
    CONN_HELLO,      /* incoming: the hello is awaited */
    CONN_REPLY,      /* outgoing: the reply is awaited */
    CONN_CONFIRM,    /* incoming: the confirmation is awaited */
    CONN_UP,         /* outgoing CONTROL: UP is awaited */
    CONN_FLUSH,      /* the rest of the send buffer, then: DATA out becomes a stream, a refusal ends */
    CONN_OPEN,       /* CONTROL: messages */
};

struct hrd_peer;
struct dial;
struct link_try;

struct conn {
    struct conn *next, **link; /* list of all, in the order of their making */
    struct hrd_daemon *d;
    uv_poll_t poll;
    int fd;
    int events; /* what poll watches */
    enum conn_stage stage;
    bool incoming;
    bool refused; /* FLUSH: close afterwards */
    uint8_t role;
    uint64_t deadline; /* uv_now() ms; not in OPEN */
    struct hrp_addr remote;
    struct hrp_peer_hello hello; /* incoming: what it said */
    struct hrd_peer *peer;       /* from UP/OPEN on, and DATA */
    struct dial *dial;           /* outgoing CONTROL */
    struct link_try *attempt;    /* DATA */
    unsigned stream;             /* DATA */
    char *rx;                    /* malloc'ed, so aligned */
    size_t rx_have, rx_size;
    char *tx;
    size_t tx_at, tx_have, tx_size;
};

/* An attempt at a tcp link: its streams, as they get ready. */
struct link_try {
    uint64_t nonce;
    bool incoming;
    bool fresh; /* outgoing: starts at the next turn of the loop */
    unsigned n, ready;
    unsigned addr; /* outgoing: index of the address being tried */
    uint64_t deadline;
    int fd[HRP_PEER_STREAMS_MAX]; /* -1: not there yet */
    char why[512];
};

/* An attempt at a verbs link, or at a new path for one. */
struct verbs_try {
    uint64_t nonce;
    bool mend; /* conn is lent */
    bool dialer;
    bool fresh; /* dialer: starts at the next turn of the loop */
    bool peer_must;
    bool peer_can;
    bool can;             /* conn is NULL for the peer's sake alone */
    bool none, peer_none; /* no RDMA device at all */
    bool full;            /* one class too many */
    bool busy;            /* communicators here go on over tcp, as it was settled */
    bool own_ready, peer_ready;
    struct hrd_verbs_conn *conn; /* NULL: this end cannot */
    bool probing;                /* connected, or waiting for requests; READY not sent yet */
    uint64_t deadline;       /* for everything up to the own READY; in the set-up by RDMA-CM for that alone */
    char why[HRP_PEER_TEXT]; /* why this end cannot */
    /* peer_setup.c: */
    bool rdmacm;
    bool peers_reason;   /* setup_why is the other end's */
    char setup_why[400]; /* not rdmacm: why */
    struct hrp_addr own, to;
    struct hrd_cm_setup *cm;
};

/* A data link with a peer: one over tcp, which all share who do not get or do not want verbs, and one over verbs for each
   class. They live as long as the peer's record. */
struct plink {
    struct plink *next;
    struct hrd_peer *peer;
    uint32_t id; /* the agent's number for it: never used again, and never a peer's */
    bool tcp;
    bool up;
    struct link_try *attempt; /* tcp */
    /* verbs: */
    uint8_t sl, tc; /* the class */
    struct verbs_try *verbs;
    bool settled;            /* tried: those who want it get tcp */
    bool half;               /* one of the two could */
    bool none;               /* neither has an RDMA device: tcp is what there is to want */
    uint64_t again_at;       /* settled, dialer: uv_now() ms when it is tried again, 0: never */
    unsigned tries;          /* that came to nothing */
    char why[HRP_PEER_TEXT]; /* why it is not there; with down_since: why its path is not */
    /* verbs, up: */
    uint64_t nonce;                /* of the attempt that made it */
    uint64_t down_since, retry_at; /* uv_now() ms; 0: its path is there */
    char down_why[512];
    struct hrd_verbs_conn *lent; /* the agent let go of it, until the path is new or the link ends */
    bool asked;                  /* the agent was asked to let go */
    bool offered;                /* what the peer has, which came before that */
    struct hrp_peer_verbs offer;
    unsigned mended;
    bool rdmacm;                             /* its queue pairs were connected by RDMA-CM */
    char setup_why[400 + HRP_PEER_NAME + 8]; /* or why not */
    struct hrd_cm_setup *cm;
    unsigned cm_failed; /* attempts by RDMA-CM at a new path since the last one that worked */
    char cm_why[400];
    /*
     * verbs: a link has a rail for each device that the dialer's configuration names, and each rail an attempt, a set-up and a
     * path of its own: all above from `verbs` on is the rail's. Rail 0 is in the link's own record, the others follow it in
     * records of theirs; the agent knows the link alone.
     */
    struct plink *link;          /* the rail is of; itself */
    unsigned rail;               /* place in the list of devices */
    struct hrd_verbs_conn *made; /* its attempt succeeded; the others' have not ended yet */
    bool over;                   /* its attempt ended */
    bool never;                  /* one of the two cannot have it before its daemon is started anew */
    bool in; /* the link that is up has it: as its rail `index`, of `queues` queue pairs */
    unsigned index, queues;
    char device[64];             /* of this end: "mlx5_0 port 1"; "": it has none */
    char out_why[HRP_PEER_TEXT]; /* over, but not in it: why */
    uint64_t peer_rate;
    /* verbs, rail 0: of all */
    unsigned nrails;  /* that either end names */
    unsigned noffers; /* that the dialer names */
    struct plink *rails[HRD_RAILS_MAX];
    uint64_t group;      /* the attempt at all of them */
    bool required;       /* one of the two ends takes nothing but verbs */
    bool one_could;      /* on one of the two a rail could be used */
    bool no_device;      /* neither has any */
    bool busy, full;     /* the answer to all offers of the attempt */
    uint64_t idle_since; /* uv_now() ms: nobody uses it; 0: somebody does */
    unsigned users;      /* communicators */
    bool closing;        /* the peer was asked whether it may go */
    uint64_t keep_until; /* uv_now() ms: it said no */
};

struct hrd_peer {
    struct hrd_peer *next;
    uint32_t no;
    uint32_t remote_no; /* its number for us; 0: not heard yet */
    bool up;
    uint8_t instance[16];
    char name[HRP_PEER_NAME];
    char where[HRD_ADDR_TEXT + 16];
    unsigned naddrs;
    struct hrp_addr addr[HRP_MAX_ADDRS];
    struct hrp_addr via; /* the address a control connection really has, with the peer's port */
    unsigned streams;    /* how many it wants in a link */
    unsigned nconns;
    struct conn *tx; /* the first that was up: all messages leave on one, so they stay in order */
    struct plink *links;
    unsigned minor;            /* of its protocol version */
    struct hrp_peer_rail told; /* which rail the OFFER or ANSWER with its nonce is about */
    char doomed[1024]; /* "": alive; otherwise it is lost at the next turn of the loop, for this reason */
    bool bye;
    char bye_text[1000];
    uint64_t last_rx, last_ping, since; /* uv_now() ms */
    uint64_t rtt_ns;
    unsigned rtt_samples;
    uint64_t tx_msgs, rx_msgs;
};

struct dial {
    struct dial *next;
    hrd_peer_dialed *dialed;
    uint64_t token;
    bool fresh; /* starts at the next turn of the loop */
    unsigned naddrs, at;
    struct hrp_addr addr[HRP_MAX_ADDRS];
    uint8_t expect[16];
    unsigned expect_len;
    struct conn *conn;  /* NULL: done with it */
    uint32_t wait_peer; /* number of the record whose other connection will answer */
    uint32_t status;    /* why is set: of the last failure */
    char why[512];
};

struct listener {
    uv_poll_t poll;
    struct hrd_daemon *d;
    int fd;
};

struct peer_cm; /* peer_setup.c */

struct hrd_peers {
    struct hrd_net net;
    struct hrd_netif *ifs;
    unsigned nifs;
    unsigned nlisteners;
    struct listener *listener[2 * HRD_MAX_LISTEN]; /* with a named interface: it, and lo */
    struct conn *conns, **conns_tail;
    struct hrd_peer *peers;
    struct dial *dials;
    uint32_t last_no;
    unsigned npeers, nstrangers;
    int spare_fd; /* given up for a moment to refuse a connection when descriptors have run out */
    uv_timer_t timer, soon;
    int timers_closed;
    uint64_t last_tick;
    bool device_denied;
    uint64_t garbage, refused, evicted, lost, accepted; /* counters for status */
    uint64_t interrupted, mended;                       /* links; likewise */
    struct peer_cm *cm;                                 /* RDMA-CM; NULL: not used yet */
    /* Of each rail: last logged about the own device; the one that was chosen last, "": none. */
    char verbs_said[HRD_RAILS_MAX][HRP_PEER_TEXT];
    char verbs_device[HRD_RAILS_MAX][64];
    struct hrd_log_limit garbage_log, accept_log;
};

/* peer.c */
struct hrd_peer *hrd_peer_by_no(struct hrd_peers *ps, uint32_t no);
struct hrd_peer *hrd_peer_by_instance(struct hrd_peers *ps, const uint8_t *instance);
/* NULL: too many. The record is not up yet. */
struct hrd_peer *hrd_peer_new(struct hrd_daemon *d, const uint8_t *instance, const char *name,
                              const struct hrp_addr *addr, unsigned naddrs, unsigned streams,
                              const struct hrp_addr *via);
void hrd_peer_is_up(struct hrd_daemon *d, struct hrd_peer *p, struct conn *c);
/* Ends the record now; why completes "node NAME (WHERE) ...". Only from the loop's own callbacks. */
void hrd_peer_lose(struct hrd_daemon *d, struct hrd_peer *p, const char *why);
/* The same at the next turn of the loop. */
void hrd_peer_doom(struct hrd_daemon *d, struct hrd_peer *p, const char *why);
/* A message on an open control connection. False: the connection is gone. */
bool hrd_peer_received(struct hrd_daemon *d, struct conn *c, const struct hrp_peer_msg *msg);
void hrd_peer_soon(struct hrd_daemon *d);

/* peer_conn.c. A function that may close the connection says so by its answer. */
struct conn *hrd_conn_accepted(struct hrd_daemon *d, int fd, const struct hrp_addr *remote);
/* Starts connect(); NULL with the reason. */
struct conn *hrd_conn_dial(struct hrd_daemon *d, const struct hrp_addr *to, uint8_t role, char *why,
                           size_t whylen);
/* Says once that connections cannot be bound to the interface. */
void hrd_conn_device_denied(struct hrd_daemon *d, int err);
void hrd_conn_close(struct conn *c);
/* Gives up the handle but not the descriptor, which is returned. */
int hrd_conn_detach(struct conn *c);
/* Queues; 0, -ENOMEM or -ENOBUFS. Sent by the loop. */
int hrd_conn_queue(struct conn *c, const void *data, size_t len);
int hrd_conn_queue_msg(struct conn *c, const struct hrp_peer_msg *msg);
/* Ends what the connection was for, with a reason ("refused", ...) that completes a sentence, and closes it. */
void hrd_conn_broken(struct conn *c, uint32_t status, const char *why);
void hrd_conn_watch(struct conn *c);

/* peer_shake.c */
size_t hrd_shake_needs(const struct conn *c);
/* A complete opening message lies in rx. False: the connection is gone. */
bool hrd_shake_step(struct conn *c);
/* connect() succeeded: sends the hello. */
bool hrd_shake_start(struct conn *c);

/* peer_dial.c */
void hrd_dial_next(struct hrd_daemon *d, struct dial *dl);
void hrd_dial_failed(struct hrd_daemon *d, struct dial *dl, uint32_t status, const char *why);
void hrd_dial_answer(struct hrd_daemon *d, struct dial *dl, uint32_t status, uint32_t no, const char *why);
/* A record came up or was lost (why): answers who waits for it. */
void hrd_dial_peer(struct hrd_daemon *d, uint32_t no, const char *why);
void hrd_dial_start_fresh(struct hrd_daemon *d);
void hrd_dial_free_all(struct hrd_peers *ps);

/* peer_link.c */
/* The peer's link of that kind, made when it is asked for first. */
struct plink *hrd_link_tcp(struct hrd_daemon *d, struct hrd_peer *p);
struct plink *hrd_link_class(struct hrd_daemon *d, struct hrd_peer *p, uint8_t sl, uint8_t tc);
/* Its record of that rail, likewise. */
struct plink *hrd_link_rail(struct hrd_daemon *d, struct plink *link, unsigned rail);
/* A number for an attempt at a link, by which both ends tell it from others; never 0. */
uint64_t hrd_link_nonce(void);
/* The rail of a verbs link that is up which was made with that nonce, or NULL. */
struct plink *hrd_link_by_nonce(const struct hrd_peer *p, uint64_t nonce);
/* Ends one link that nobody uses. */
void hrd_link_remove(struct hrd_daemon *d, struct plink *l, const char *why);
/* Whether communicators of this node exchange over tcp with it. */
bool hrd_link_tcp_used(const struct hrd_peer *p);
/* By the agent's number; NULL: gone. */
struct plink *hrd_link_by_id(struct hrd_peers *ps, uint32_t id);
bool hrd_link_any_up(const struct hrd_peer *p);
/* Refusal for an incoming stream's hello, or HRP_OK and conn's peer and attempt are set. */
uint32_t hrd_link_incoming(struct conn *c, char *why, size_t whylen);
/* A stream passed its opening. Takes the connection. */
void hrd_link_stream_ready(struct conn *c);
void hrd_link_stream_failed(struct conn *c, const char *why);
/* Ends what is under way, closes what is up; frees the records. */
void hrd_link_end_all(struct hrd_daemon *d, struct hrd_peer *p, const char *why);
void hrd_link_start_fresh(struct hrd_daemon *d);
/* Gives the link to the agent and tells who waits for it. */
void hrd_link_is_up(struct hrd_daemon *d, struct plink *l, const struct hrd_transport *tp,
                    struct hrd_conn *conn, unsigned n);
void hrd_link_tick(struct hrd_daemon *d, struct hrd_peer *p);

/* peer_rails.c */
/* A new attempt at the link, with offers for so many rails; what an earlier one left is dropped. */
void hrd_rails_begin(struct hrd_daemon *d, struct plink *l, unsigned n, uint64_t group);
/* Dialer: the other end names so many devices. */
void hrd_rails_peer_has(struct hrd_daemon *d, struct plink *l, unsigned n);
/* Gives up all attempts. */
void hrd_rails_stop(struct plink *l);
/* Attempts are under way, or one has succeeded and waits for the others. */
bool hrd_rails_trying(const struct plink *l);
/* One whose path is away, or NULL. */
const struct plink *hrd_rails_down(const struct plink *l);
/* The first that is in it, or NULL. */
struct plink *hrd_rails_first(const struct plink *l);
/* The one that the agent knows by this number, or NULL. */
struct plink *hrd_rails_by_index(const struct plink *l, unsigned index);
/* "the link", "rail 1 of the link": whose path it is. */
const char *hrd_rail_text(const struct plink *rail, char *buf, size_t len);
/* The attempt at one rail ended; true: those at all have. */
bool hrd_rails_over(struct plink *rail);
/* All have ended, and one succeeded: the link is up. */
void hrd_rails_up(struct hrd_daemon *d, struct plink *l);
/* "2 rails (mlx5_0 port 1, mlx5_1 port 1), ", or "" where there is but one to speak of. */
void hrd_rails_text(const struct plink *l, char *buf, size_t len);
/* None did: the sentence. */
void hrd_rails_why(const struct plink *l, char *buf, size_t len);
/* Says which rail the OFFER or ANSWER that follows is about, where that is not clear. */
void hrd_rail_tell(struct hrd_daemon *d, const struct plink *rail);
/* A link that lacks a rail goes when nobody uses it, so that the next one may have all. */
bool hrd_rails_incomplete(struct hrd_daemon *d, struct plink *l);

/* peer_verbs.c */
/* Dialer: asks the other end whether the link, which nobody uses here, may go. */
void hrd_verbs_close(struct hrd_daemon *d, struct plink *l);
/* Dialer: the attempt begins at the loop's next turn. */
void hrd_verbs_begin(struct hrd_daemon *d, struct plink *l);
/* Verbs came to nothing some time ago, which may have passed: tries again, where nobody uses tcp instead. */
void hrd_verbs_again(struct hrd_daemon *d, struct plink *l);
/* The loop's turn; true: again soon, an attempt is under way. */
bool hrd_verbs_step(struct hrd_daemon *d);
/* For peer_mend.c. */
struct verbs_try *hrd_verbs_try_new(struct hrd_daemon *d, struct plink *l, uint64_t nonce);
struct hrd_verbs_end hrd_verbs_end_of(const struct hrp_peer_verbs *v);
/* Of that rail, in the link's class. same: the device and port that it has, NULL: whichever is best. False with the reason. */
bool hrd_verbs_device(struct hrd_daemon *d, const struct plink *l, unsigned rail,
                      const struct hrd_verbs_device *same, struct hrd_verbs_device *dev, char *why,
                      size_t len);
void hrd_verbs_send_end(struct hrd_daemon *d, struct plink *l, uint16_t type);
void hrd_verbs_send_ready(struct hrd_daemon *d, struct plink *l, uint16_t type, uint64_t nonce,
                          uint32_t status, const char *text);
/* VERBS_*. False: it makes no sense. */
bool hrd_verbs_msg(struct hrd_daemon *d, struct hrd_peer *p, const struct hrp_peer_msg *msg);
void hrd_verbs_drop(struct plink *l);
/* This end gives the attempt up, and says so. */
void hrd_verbs_give_up(struct hrd_daemon *d, struct plink *l, const char *why);

/* peer_setup.c */
#define HRD_VERBS_TIMEOUT_MS 5000u
/* Dialer, with queue pairs, before its OFFER: decides between RDMA-CM and exchange. 0, or negative errno and t->why. */
int hrd_setup_offer(struct hrd_daemon *d, struct plink *l);
/* The other end, with queue pairs, before its ANSWER; text: the OFFER's. 0, or negative errno and t->why. */
int hrd_setup_answer(struct hrd_daemon *d, struct plink *l, const struct hrp_peer_verbs *v, const char *text,
                     size_t len);
/* LISTEN; false: it makes no sense. */
bool hrd_setup_listen(struct plink *l, const struct hrp_peer_listen *m);
/* Whether an ANSWER fits what was offered and heard. */
bool hrd_setup_answered(const struct verbs_try *t, const struct hrp_peer_verbs *v);
/* Dialer, with an ANSWER that is good: begins to connect. 0, or negative errno with a sentence. */
int hrd_setup_connect(struct hrd_daemon *d, struct plink *l, const struct hrp_peer_msg *msg, char *why,
                      size_t len);
/* The loop's turn; the attempt may end in it. */
void hrd_setup_step(struct hrd_daemon *d, struct plink *l);
/* Dialer: RDMA-CM is connecting. */
bool hrd_setup_under_way(const struct verbs_try *t);
/* How long the other end waits for the dialer's requests. */
unsigned hrd_setup_wait_ms(const struct verbs_try *t);
/* Both ends are ready: the link keeps what belongs to its queue pairs. */
void hrd_setup_done(struct hrd_daemon *d, struct plink *l);
/* What RDMA-CM says of a link that is up. */
void hrd_setup_news(struct hrd_daemon *d, struct plink *l);
/* Rejected requests by RDMA-CM since the start. */
uint64_t hrd_setup_rejected(const struct hrd_peers *ps);
/* All links are gone. */
void hrd_setup_end(struct hrd_peers *ps);

/* peer_mend.c */
#define HRD_MEND_ATTEMPT_MS 1000u
/* The agent let go of a link whose path failed. */
void hrd_mend_begin(struct hrd_daemon *d, struct plink *l, struct hrd_conn *conn, const char *why);
/* The peer's word about the path of an existing link; false: it makes no sense. */
bool hrd_mend_down(struct hrd_daemon *d, struct hrd_peer *p, const struct hrp_peer_msg *msg);
bool hrd_mend_offer(struct hrd_daemon *d, struct hrd_peer *p, const struct hrp_peer_msg *msg);
bool hrd_mend_answer(struct hrd_daemon *d, struct plink *l, const struct hrp_peer_msg *msg);
/* An attempt ended: both ends are ready, or not (why, a sentence; err -EBADMSG: it never will). */
void hrd_mend_done(struct hrd_daemon *d, struct plink *l);
void hrd_mend_failed(struct hrd_daemon *d, struct plink *l, int err, const char *why);
/* The path of a link that is up is of no use any more: the agent is asked to let go of it. */
void hrd_mend_ask(struct hrd_daemon *d, struct plink *l, const char *why);
void hrd_mend_step(struct hrd_daemon *d, struct plink *l);
void hrd_mend_tick(struct hrd_daemon *d, struct plink *l);

#endif
