/* SPDX-License-Identifier: MIT */
/*
 * Whole nodes in one process for tests: real agents, real segments, links over socket pairs or
 * over a fake verbs layer, no daemons and no client
 * library. The test plays both the control thread and the ranks.
 */
#ifndef TESTS_SIM_AGENTS_H
#define TESTS_SIM_AGENTS_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/agent.h"

struct hrd_tcp_io;

#define SIM_MAX_NODES 16
#define SIM_MAX_RANKS 64
#define SIM_STREAMS 3

struct sim_rank {
    uint32_t node;
    uint64_t sid;
    struct hrp_seg_header *seg;
    int doorbell;
    _Atomic uint32_t poisoned;
    char *pool; /* registered as buffer 1 */
    uint64_t pool_bytes;
    uint64_t posted[16]; /* by comm slot */
    char *window[16];
    bool gone, left;
    uint32_t buffers_gone;
};

struct sim_node {
    struct hrd_agent *agent;
    uint32_t comms_ready, comms_failed, comms_gone, links_lost;
    uint32_t probes;
    struct hrd_probe_result probe;
    uint32_t last_status;
    char last_text[HRP_COMM_TEXT];
    char interrupted[HRP_COMM_TEXT]; /* why, the last time */
    struct hrd_snapshot *snapshot;   /* the last answer to hrd_agent_query() */
};

struct sim {
    uint32_t nnodes, nranks;
    bool verbs;
    bool mend;       /* interrupted links are made anew, see sim_events() */
    unsigned mended; /* how often */
    unsigned rails, place;
    struct hrd_conn *lent[SIM_MAX_NODES][SIM_MAX_NODES][HRD_RAILS_MAX]; /* of an interrupted rail: from, to */
    struct sim_node node[SIM_MAX_NODES];
    struct sim_rank rank[SIM_MAX_RANKS];
    uint32_t node_of_rank[SIM_MAX_RANKS];
    int link_fd[SIM_MAX_NODES][SIM_MAX_NODES]; /* stream 0, -1: handed over */
};

struct sim_options {
    struct hrd_agent_config agent;              /* zeros: small defaults */
    struct hrd_gpus *agent_gpus[SIM_MAX_NODES]; /* NULL: none */
    uint64_t pool_bytes;                        /* of each rank */
    struct hrp_comm_config comm;
    uint64_t unit_bytes, unit_min_bytes;
    uint32_t eager_limit;
    bool verbs;     /* links over the fake verbs layer (of fake_verbs_plain()) instead of socket pairs */
    unsigned rails; /* or, more than 1, of fake_verbs_rails() */
    unsigned place; /* of the first of them in the configuration's list */
    const unsigned *lanes;
};

/* The same for every sim_start(): a test program runs its tests over all of them. */
extern bool sim_over_verbs;
extern struct hrd_tcp_io *sim_tcp_io; /* drives links over sockets; NULL: the agents do */

void sim_start(struct sim *s, uint32_t nnodes, uint32_t nranks, const uint32_t *node_of_rank,
               const struct sim_options *o);
/* Makes comm `id` (slot `slot` on every rank) over all ranks and waits until it is ready everywhere. 0, or the status. */
uint32_t sim_comm(struct sim *s, uint64_t id, uint32_t slot, const struct sim_options *o);
/* A link over these sockets, which are the link's from here. */
void sim_link_tcp(struct hrd_agent *a, uint32_t peer, const char *name, const int *fd, unsigned n);
/* Ends all sessions and stops the agents; fails the test when something does not go away. */
void sim_stop(struct sim *s);
/* Handles waiting events of all nodes. An interrupted link is lost, or, with `mend`, made anew as two daemons do it: not
   before the path works, and again if that fails. */
void sim_events(struct sim *s);
/* A node as it is now; valid until the next look at it. */
const struct hrd_snapshot *sim_look(struct sim *s, uint32_t node);

/* Posts the next op of this rank; in, out: offsets in its pool (UINT64_MAX: none). Returns the op's number. */
uint64_t sim_post(struct sim *s, uint32_t rank, uint32_t slot, const struct hrp_sig *sig, uint64_t in,
                  uint64_t out);
/* The same with a descriptor of the test's own. */
void sim_push(struct sim *s, uint32_t rank, uint32_t slot, const struct hrp_desc *d, uint64_t ready);
bool sim_done(struct sim *s, uint32_t rank, uint32_t slot, uint64_t op);
/* Waits at most 20 s; returns the status; text: of HRP_OP_TEXT + 1 bytes or NULL. */
uint32_t sim_wait(struct sim *s, uint32_t rank, uint32_t slot, uint64_t op, char *text);

#endif
