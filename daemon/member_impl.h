/* SPDX-License-Identifier: MIT */
/* Inside of the membership, see member.h. Memory that runs out ends the daemon: it is crash-only. */
#ifndef HRD_MEMBER_IMPL_H
#define HRD_MEMBER_IMPL_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "daemon/log.h"
#include "daemon/member.h"
#include "daemon/peer.h"

#define MEMBER_TICK_MS 100u
#define ROOT_GRACE_MS 3000u   /* beyond a join's own limit, for the root's better sentence to arrive */
#define WAITER_GRACE_MS 1000u /* beyond a link's limit, for the one that does not dial it */
#define HOLDER_GRACE_MS 1000u /* for the news that the former holder of a rank is dead */
#define MEASURE_MS 100u       /* for round trips that are not measured yet */
#define DIAL_RETRY_MIN_MS 100u
#define DIAL_RETRY_MAX_MS 1000u
#define PROGRESS_MS 10000u
#define NO_ROOT UINT32_MAX /* a comm whose root is gone */

/* ---- member_join.c: local ranks until the roster comes ---- */

/* How one root daemon is reached; shared by all joins that name it alike. */
struct way {
    struct way *next;
    unsigned naddrs;
    struct hrp_addr addr[HRP_MAX_ADDRS];
    uint8_t expect[8];
    unsigned expect_len;
    uint64_t token; /* of the dial in progress, 0: none */
    uint64_t retry_at;
    unsigned retry_ms;
    unsigned njoins;
    uint64_t said_at; /* last progress line */
    char error[512];  /* of the last attempt */
};

struct join {
    struct join *next;
    uint64_t id;
    uint64_t sid, cookie;
    uint32_t rank;
    int32_t pid;
    uint32_t slot;
    uint64_t start, deadline;
    struct hrp_key key;
    struct hrp_comm_config config;
    unsigned nroots;
    struct hrp_addr root[HRP_MAX_ADDRS];
    struct way *way;  /* NULL: the root has it */
    uint32_t root_no; /* with way NULL */
    uint64_t asked;   /* cookie of a JOINING that waits for the root's WAITS; 0: none */
};

/* ---- member_node.c: communicators of this node ---- */

enum lcomm_state {
    LCOMM_CONNECTING, /* links to the other nodes */
    LCOMM_ADDING,     /* the agent takes the reserve */
    LCOMM_VOTED,      /* waits for COMMIT */
    LCOMM_ACTIVE,
    LCOMM_ENDING, /* not committed; the agent lets go (after ADDING: is about to answer) */
};

struct lrank {
    uint32_t rank, slot;
    int32_t pid;
    uint64_t sid, cookie; /* of JOIN, then of LEAVE */
    bool left;            /* gone, or its session is: slot and cookie mean nothing */
    bool leaving;
};

struct lnode {
    struct hrp_peer_node id;
    uint32_t no;   /* peer, 0: not connected */
    uint32_t link; /* once linked: the agent's number */
    bool linked;
    uint64_t token; /* of the dial in progress, 0: none */
    uint64_t retry_at;
    char error[512];
};

struct lcomm {
    struct lcomm *next;
    uint8_t id[16];
    uint64_t comm;
    enum lcomm_state state;
    bool adding; /* ENDING: COMM_READY is still to come */
    bool failed; /* ACTIVE: the agent said so */
    uint32_t root_no;
    uint64_t deadline, start;
    uint32_t status; /* why it ended before COMMIT */
    char text[HRP_COMM_TEXT];
    struct hrp_peer_roster roster;
    uint32_t require; /* HRP_REQUIRE_*, of the roster and of this node when it came */
    struct hrd_link_want want;
    uint32_t *node_of_rank;
    struct lnode *node;
    struct lrank *local;
};

/* ---- member_root.c: what this daemon knows as root ---- */

enum rset_state { RSET_COLLECT, RSET_MEASURE, RSET_VOTE, RSET_COMMITTED };

struct rrank {
    uint32_t rank;
    uint32_t no; /* peer or HRD_SELF */
    uint64_t join;
    int32_t pid;
    bool gone;
};

struct rnode {
    uint32_t no;
    bool voted, gone;
    char name[HRP_PEER_NAME]; /* kept for sentences */
};

struct rset {
    struct rset *next;
    enum rset_state state;
    struct hrp_key key;
    struct hrp_comm_config config; /* resolved */
    uint8_t id[16];
    uint64_t start, deadline, until; /* until: end of MEASURE */
    uint64_t said_at;
    uint32_t nranks, room; /* present, ascending by rank */
    struct rrank *rank;
    uint32_t nnodes;
    struct rnode *node; /* by index, from MEASURE on */
    char note[400];     /* what else is known: a rank that was refused */
};

/* A join whose rank is held by somebody who may be dead already. */
struct rwait {
    struct rwait *next;
    uint32_t no;
    uint64_t until;
    struct hrp_peer_join join;
};

struct self_msg {
    struct self_msg *next;
    size_t len;
    uint64_t data[]; /* encoded; aligned for decode */
};

struct hrd_members {
    struct way *ways;
    struct join *joins;
    struct lcomm *comms;
    struct rset *sets;
    struct rwait *waits;
    struct self_msg *self_first, **self_last;
    unsigned depth;
    bool ticking;
    uint64_t last_id;
    uint64_t (*clock)(void); /* ms; tests have their own */
    uv_timer_t timer;
    uint64_t setup_errors; /* joins of local ranks that ended in one */
};

/* member.c */
void *hrd_member_alloc(size_t n, size_t size); /* zeroed; never NULL */
uint64_t hrd_member_now(struct hrd_daemon *d);
uint64_t hrd_member_id(struct hrd_daemon *d);
/* To a peer or to this daemon itself; handled later, never from inside the call. */
void hrd_member_send(struct hrd_daemon *d, uint32_t to, const struct hrp_peer_msg *msg);
void hrd_members_tick(struct hrd_daemon *d);
/* Name of a node by peer number, for sentences; its own for HRD_SELF. */
const char *hrd_member_node_name(struct hrd_daemon *d, uint32_t no);
/* Limit of each phase after the roster. */
uint64_t hrd_member_phase_ms(const struct hrd_daemon *d, const struct hrp_comm_config *c);

/* member_join.c */
void hrd_join_start(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie,
                    const struct hrp_msg_join *msg);
void hrd_join_refused(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg);
void hrd_join_dialed(struct hrd_daemon *d, uint64_t token, uint32_t status, uint32_t no, const char *why);
void hrd_join_peer_lost(struct hrd_daemon *d, uint32_t no, const char *why);
void hrd_join_session_gone(struct hrd_daemon *d, uint64_t sid, const char *why);
void hrd_join_tick(struct hrd_daemon *d);
/* The pending join of that number at that root, or NULL. */
struct join *hrd_join_find(struct hrd_daemon *d, uint64_t id, uint32_t root_no);
/* Answers what the session's rank waits for: as far as this node knows, or when the root has said so. */
void hrd_join_joining(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie,
                      const struct hrp_msg_join *msg);
void hrd_join_waits(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg);
/* Off the list and freed; the caller has taken what it needs. */
void hrd_join_drop(struct hrd_daemon *d, struct join *j);
/* ERROR to the rank, its slot is free again, dropped. */
void hrd_join_fail(struct hrd_daemon *d, struct join *j, uint32_t status, const char *text);
void hrd_join_free_all(struct hrd_members *m);

/* member_node.c */
bool hrd_node_roster(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg);
bool hrd_node_commit(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg);
void hrd_node_failed(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg);
bool hrd_node_dialed(struct hrd_daemon *d, uint64_t token, uint32_t status, uint32_t no, const char *why);
void hrd_node_peer_lost(struct hrd_daemon *d, uint32_t no, const char *why);
void hrd_node_connect_all(struct hrd_daemon *d);
void hrd_node_link_failed(struct hrd_daemon *d, uint32_t no, const char *why);
void hrd_node_link_refused(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want,
                           uint32_t status, const char *why);
void hrd_node_session_gone(struct hrd_daemon *d, uint64_t sid, const char *why);
void hrd_node_event(struct hrd_daemon *d, const struct hrd_event *ev);
void hrd_node_leave(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, uint32_t slot);
void hrd_node_abort(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, uint32_t slot,
                    const char *text, size_t len);
void hrd_node_tick(struct hrd_daemon *d);
bool hrd_node_busy(const struct hrd_members *m);
void hrd_node_free_all(struct hrd_members *m);

/* member_root.c */
void hrd_root_join(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_join *join);
void hrd_root_withdraw(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg);
void hrd_root_joining(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg);
/* That join waits because its rank is held, by whom; false: it does not. */
bool hrd_root_held_text(struct hrd_daemon *d, uint32_t from, uint64_t join, char *buf, size_t len);
void hrd_root_vote(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg);
void hrd_root_left(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg);
void hrd_root_gone(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg);
void hrd_root_peer_lost(struct hrd_daemon *d, uint32_t no, const char *why);
void hrd_root_rtt(struct hrd_daemon *d);
void hrd_root_tick(struct hrd_daemon *d);
bool hrd_root_busy(const struct hrd_members *m);
void hrd_root_free_all(struct hrd_members *m);

/* member_set.c */
struct rset *hrd_rset_by_key(struct hrd_members *m, const struct hrp_key *key);
/* Voting or committed. */
struct rset *hrd_rset_by_id(struct hrd_members *m, const uint8_t *id);
struct rset *hrd_rset_of_other_size(struct hrd_members *m, const struct hrp_key *key);
struct rset *hrd_rset_new(struct hrd_daemon *d, const struct hrp_peer_join *join,
                          const struct hrp_comm_config *config);
void hrd_rset_free(struct hrd_members *m, struct rset *s);
struct rrank *hrd_rset_rank(struct rset *s, uint32_t rank); /* NULL: not there */
void hrd_rset_insert(struct rset *s, uint32_t no, const struct hrp_peer_join *join);

/* member_roster.c: what the root makes of a complete set */
/* 0, or a status with the sentence: nodes are numbered, set->node is filled. */
uint32_t hrd_rset_number_nodes(struct hrd_daemon *d, struct rset *s, char *why, size_t len);
bool hrd_rset_measured(struct hrd_daemon *d, const struct rset *s);
void hrd_rset_send_roster(struct hrd_daemon *d, struct rset *s);
void hrd_config_resolve(const struct hrd_config *cfg, struct hrp_comm_config *c);
/* 0, or a status with the sentence: what this build cannot do although it is required, or what contradicts itself or
   the node's own configuration (NULL: not asked). */
uint32_t hrd_config_possible(const struct hrp_comm_config *c, const struct hrd_config *own, char *why,
                             size_t len);
/* True when they differ; names the first field and both values: "op timeout 5 s", "none". */
bool hrd_config_differs(const struct hrp_comm_config *a, const struct hrp_comm_config *b, const char **field,
                        char va[32], char vb[32]);

/* member_text.c */
/* "0-3, 7, 9-12"; what does not fit ends in "... (N in all)". */
const char *hrd_ranks_text(const uint32_t *rank, uint32_t n, char *buf, size_t len);
/* "communicator 'train' (8 ranks)" */
const char *hrd_key_text(const struct hrp_key *key, char *buf, size_t len);
const char *hrd_ms_text(uint64_t ms, char *buf, size_t len); /* "60 s", "1500 ms" */
/* "communicator 'train' (8 ranks): waiting for ranks 3, 5 for 10 s" */
void hrd_rset_waits_text(struct hrd_daemon *d, struct rset *s, char *buf, size_t len);
/* The sentence of a set-up that ran out of time: all missing ranks and all that is known. */
void hrd_rset_missing_text(struct hrd_daemon *d, const struct rset *s, char *buf, size_t len);

#endif
