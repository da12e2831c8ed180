/* SPDX-License-Identifier: MIT */
/*
 * Other daemons, as member.c sees them. A peer has a number that is never used again: when its control
 * connection or its link breaks the number dies with both, and a later connection to the same daemon is a new
 * peer. All calls on the control thread; none blocks. The callbacks at the end come from the loop, never from
 * inside one of these calls.
 */
#ifndef HRD_PEER_H
#define HRD_PEER_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/control.h"
#include "daemon/netif.h"
#include "proto/peer.h"

#define HRD_SELF 0u /* in place of a peer's number: this daemon */
#define HRD_WANT_TCP 1u
/* After an attempt at a link or at its peer failed, whoever wants it waits so long before it asks again. */
#define HRD_LINK_RETRY_MS 500u

struct hrd_peer_info {
    uint32_t no;
    const uint8_t *instance;
    const char *name;  /* node name, for sentences */
    const char *where; /* "10.0.0.2 port 18515" */
    unsigned naddrs;
    const struct hrp_addr *addr; /* under which it can be reached, best first */
    uint64_t rtt_ns;             /* smallest measured, 0: none yet */
    unsigned rtt_samples;
    unsigned minor; /* of the protocol version it speaks */
};

/* The peer's number, 0: not connected. */
uint32_t hrd_peer_find(struct hrd_daemon *d, const uint8_t instance[16]);
/* False when it is gone. The pointers hold until the loop runs again. */
bool hrd_peer_info(struct hrd_daemon *d, uint32_t no, struct hrd_peer_info *out);
/* Queues a message. To a peer that is gone: nothing happens. One that does not read (the queue is bounded)
   becomes lost, later, from the loop. */
void hrd_peer_send(struct hrd_daemon *d, uint32_t no, const struct hrp_peer_msg *msg);

/* status HRP_OK: no is connected. Otherwise why is a sentence without a full stop; HRP_PEER_LOST is worth
   another try, any other status is not. */
typedef void hrd_peer_dialed(struct hrd_daemon *d, uint64_t token, uint32_t status, uint32_t no,
                             const char *why);
/*
 * Tries each address once, in order, until one leads to a daemon whose instance id begins with the
 * `expect_len` bytes at `expect` (0: any but this one); answered by dialed(token) from the loop, unless the daemon
 * stops before.
 */
void hrd_peer_dial(struct hrd_daemon *d, hrd_peer_dialed *dialed, uint64_t token, const struct hrp_addr *addr,
                   unsigned naddrs, const uint8_t *expect, unsigned expect_len);
/* What a communicator wants of its links. */
struct hrd_link_want {
    uint8_t transport; /* as in struct hrp_comm_config: 1 tcp and nothing else; others: verbs, or else tcp */
    uint8_t sl, tc;    /* class of a verbs link: service level, traffic class */
};
/*
 * Asks for a data link with a connected peer; those who want the same share one. 1: it is up, *link is the agent's number
 * for it. 0: it is being made (the daemon with the smaller instance id dials), or its path is made anew: hrd_member_link()
 * will say. -ENOENT: no such peer.
 */
int hrd_peer_link(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want, uint32_t *link);
/* What the link for that want is: "tcp", "verbs", "none" without one. *why: why it is not verbs although that was wanted,
   "" otherwise; holds until the loop runs again. */
const char *hrd_peer_transport(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want,
                               const char **why);
/* How the queue pairs of the verbs link for that want were connected: "RDMA-CM", or "exchange" and *why not by RDMA-CM;
   NULL: there is no such link. *why holds until the loop runs again. */
const char *hrd_peer_setup(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want,
                           const char **why);
/* There was a choice: one of the two nodes could have had verbs. */
bool hrd_peer_half_verbs(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want);
/* Why the link for that want is up but its path is not, and what is in the way of a new one: "a verbs link whose path
   ..."; false: it is not so. */
bool hrd_peer_mending(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want, char *why,
                      size_t len);
/* There was none: neither node has an RDMA device. */
bool hrd_peer_no_device(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want);
/* A communicator begins (1) or ceases (-1) to use that link. One over verbs that nobody uses may make room for another
   class. */
void hrd_link_use(struct hrd_daemon *d, uint32_t link, int by);
/* True when this daemon is the one of the two that dials. */
bool hrd_peer_dials(const struct hrd_daemon *d, const uint8_t instance[16]);

/* Whether a daemon that is told to reach this address (port 0: the own port) would mean itself. */
bool hrd_peers_is_mine(struct hrd_daemon *d, const struct hrp_addr *addr);
/* Bytes a second of the link that the own addresses lie on; 5e9 for loopback, 1.25e9 when unknown. */
uint64_t hrd_peers_link_speed(struct hrd_daemon *d);

/* ---- callbacks, implemented by member.c ------------------------------------------------------------------ */

hrd_peer_dialed hrd_member_dialed;
/* A control connection is up, whoever dialed it. */
void hrd_member_peer_up(struct hrd_daemon *d, uint32_t no);
/* A data link is up or settled (why NULL: ask again), or an attempt at one failed and may be made again. */
void hrd_member_link(struct hrd_daemon *d, uint32_t no, const char *why);
/* No verbs link of that class is possible with that peer, and one of the two is configured to take nothing else (a
   sentence): not worth another try now. */
void hrd_member_link_refused(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want,
                             uint32_t status, const char *why);
/* The peer's smallest RTT has enough samples. */
void hrd_member_rtt(struct hrd_daemon *d, uint32_t no);
/* A message other than those that peer.c handles itself (UP, PING, PONG, BYE). Decoded and checked; its
   arrays and text are the caller's. False: it makes no sense, the peer broke the protocol. */
bool hrd_member_msg(struct hrd_daemon *d, uint32_t no, const struct hrp_peer_msg *msg);

#endif
