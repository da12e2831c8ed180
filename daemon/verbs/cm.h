/* SPDX-License-Identifier: MIT */
/*
 * Queue pairs connected by RDMA-CM, as the other way to what hrd_verbs_conn_connect() does with the numbers that two
 * daemons told each other. What RDMA-CM knows better is the path: on InfiniBand the subnet manager's record of it (MTU,
 * service level, partition), on RoCE the kernel's route, neighbour and priorities.
 *
 * The queue pairs stay those of the connection (conn.h): RDMA-CM gets their numbers, and answers with the attributes to
 * connect them with. Each has an id of its own, all in one event channel of the daemon. Nothing here waits: requests are
 * made, hrd_cm_events() takes the answers, and the caller, who has the clock, asks how far a set-up got.
 *
 * Who may connect is decided by the two daemons' control connection: a request names the attempt's nonce, which was
 * exchanged there, and comes from the queue pair that was named there. Any other is rejected, in words, and counted.
 *
 * A set-up outlives the connecting: its ids are kept as long as the link uses those queue pairs, to hear that the device
 * or the address goes away, and because a driver cannot remove a device before they are gone.
 *
 * Control thread only.
 */
#ifndef HRD_VERBS_CM_H
#define HRD_VERBS_CM_H

#include "daemon/verbs/conn.h"
#include "daemon/verbs/rdmacm_api.h"

struct hrd_cm;
struct hrd_cm_setup;

/* NULL with a sentence. */
struct hrd_cm *hrd_cm_new(const struct hrd_rdmacm *api, char *why, size_t len);
/* Its set-ups have to be gone. */
void hrd_cm_free(struct hrd_cm *cm);
/* Becomes readable when there is something for hrd_cm_events(). */
int hrd_cm_fd(const struct hrd_cm *cm);
void hrd_cm_events(struct hrd_cm *cm);
/* Requests that were rejected since the start. */
uint64_t hrd_cm_rejected(const struct hrd_cm *cm);

/* The first of n addresses that RDMA-CM takes for one of the device's port; false with a sentence. */
bool hrd_cm_address(struct hrd_cm *cm, const struct hrd_verbs_device *dev, const struct hrp_addr *addr,
                    unsigned n, struct hrp_addr *out, char *why, size_t len);
/* Listens there; sets the port. One listener serves all set-ups of that address. 0, or negative errno with a sentence. */
int hrd_cm_listen(struct hrd_cm *cm, struct hrp_addr *addr, char *why, size_t len);

/* Both after hrd_verbs_conn_meet(). The connection lasts until hrd_cm_settled() or the set-up's end. */
struct hrd_cm_setup *hrd_cm_dial(struct hrd_cm *cm, struct hrd_verbs_conn *conn, uint64_t nonce,
                                 const struct hrp_addr *from, const struct hrp_addr *to, unsigned ms);
struct hrd_cm_setup *hrd_cm_await(struct hrd_cm *cm, struct hrd_verbs_conn *conn, uint64_t nonce);
/* 1: all queue pairs are connected; 0: not yet; negative errno with a sentence (only of one that dials: the other end
   rejects what it cannot do, and goes on waiting). */
int hrd_cm_poll(const struct hrd_cm_setup *s, char *why, size_t len);
/* What a set-up that is late waits for; the end of a sentence. */
const char *hrd_cm_waits_for(const struct hrd_cm_setup *s);
/* The link is up: the connection is no longer touched. */
void hrd_cm_settled(struct hrd_cm_setup *s);
/* Settled: whether its queue pairs should be made anew, and why; told once. */
bool hrd_cm_news(struct hrd_cm_setup *s, char *why, size_t len);
/* Ends what is under way and forgets it; NULL is nothing. */
void hrd_cm_setup_free(struct hrd_cm_setup *s);

#endif
