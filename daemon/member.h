/* SPDX-License-Identifier: MIT */
/*
 * Membership: how ranks that ask for a communicator become one. The entry points for the rest of the daemon
 * stand in control.h and peer.h.
 *
 *   rank -> its daemon   JOIN (socket)              member_join.c: reach the root daemon, hand the join over
 *   node -> root         JOIN                       member_root.c: collect by key, refuse what does not fit
 *   root -> nodes        ROSTER                     member_node.c: connect to all nodes, comm_add, vote
 *   node -> root         VOTE
 *   root -> nodes        COMMIT (or FAIL)           member_node.c: JOINED to the ranks
 *
 * The root is a role, not a machine: any daemon is root of the communicators whose ranks name it, and usually
 * a node of them as well; messages to itself take the same way through a queue. After COMMIT the root only
 * remembers who holds which rank.
 *
 * Until COMMIT any failure anywhere fails the whole set-up, for everyone, with one sentence.
 */
#ifndef HRD_MEMBER_H
#define HRD_MEMBER_H

#include "daemon/control.h"

/*
 * Says in a fresh unique id which daemon is its root: the second half of the (random) nonce becomes the first
 * half of this daemon's instance id. Whoever connects to one of the id's addresses then knows whether the daemon
 * there is the one that was meant; addresses alone do not tell (every host may have the same bridge address).
 */
void hrd_member_stamp_id(const struct hrd_daemon *d, struct hrp_unique_id *id);

#endif
