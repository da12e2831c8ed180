/* SPDX-License-Identifier: MIT */
/*
 * The control thread: libuv loop, Unix-socket sessions, peer daemons, membership. Everything here runs on
 * that one thread; only hrd_agent_*() calls cross to the agent.
 */
#ifndef HRD_CONTROL_H
#define HRD_CONTROL_H

#include <stdarg.h>
#include <stdint.h>
#include <sys/types.h>
#include <uv.h>

#include "daemon/agent.h"
#include "daemon/config.h"
#include "proto/status.h"
#include "proto/wire.h"

struct hrd_sessions; /* session.c */
struct hrd_peers;    /* peer.c */
struct hrd_members;  /* member.c */

struct hrd_gpus;   /* gpu/gpu.h */
struct hrd_tcp_io; /* transport_tcp.h */
struct hrd_verbs;  /* verbs/verbs_api.h */

struct hrd_daemon {
    struct hrd_config cfg;
    uv_loop_t *loop;
    struct hrd_agent *agent;
    struct hrd_gpus *gpus;     /* NULL: tests without GPUs */
    struct hrd_tcp_io *tcp_io; /* NULL: io_threads is 0 */
    uint8_t instance[16];      /* random, made at start: locality is "same instance", never host names */
    char node_name[65];        /* host name, for sentences only */
    struct hrd_sessions *sessions;
    struct hrd_peers *peers;
    struct hrd_members *members;
    const struct hrd_verbs *verbs; /* NULL: the real one, loaded when first needed; tests have their own */
    bool stopping;
};

/* ---- session.c: one connected client ---------------------------------------------------------------------
 */

struct hrd_session {
    uint64_t sid; /* never reused */
    uid_t uid;
    gid_t gid;
    pid_t pid;
    struct hrd_session_priv *priv;
};

/* Sends a message; the socket being full or broken ends the session (later, from the loop), never blocks.
   Descriptors stay the caller's. */
void hrd_session_send(struct hrd_session *s, const struct hrp_msg *msg, const int *fds, int nfds);
/* HRP_MSG_ERROR with a formatted sentence. */
void hrd_session_error(struct hrd_session *s, uint64_t cookie, enum hrp_status status, enum hrp_scope scope,
                       const char *fmt, ...) __attribute__((format(printf, 5, 6)));
/* HRP_MSG_DONE. */
void hrd_session_done(struct hrd_session *s, uint64_t cookie);
/* HRP_MSG_TEXT in as many parts as needed. */
void hrd_session_text(struct hrd_session *s, uint64_t cookie, const char *text);
/* NULL when it is gone. */
struct hrd_session *hrd_session_find(struct hrd_daemon *d, uint64_t sid);
/* A free comm slot of the segment, zeroed, or -1. Freed with its staging window after COMM_LEFT. */
int hrd_session_slot_take(struct hrd_session *s);
void hrd_session_slot_free(struct hrd_session *s, uint32_t slot);
struct hrp_seg_header *hrd_session_segment(struct hrd_session *s);
/* Ends a session from the daemon's side; why is logged and names the client's fault or death. */
void hrd_session_kill(struct hrd_session *s, const char *why);

/* ---- member.c: rendezvous, roster, votes ------------------------------------------------------------------
 */

int hrd_members_new(struct hrd_daemon *d);
void hrd_members_free(struct hrd_daemon *d);
/* JOIN: answered with JOINED or ERROR, at the latest after the setup timeout. */
void hrd_member_join(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie,
                     const struct hrp_msg_join *join);
/* JOINING: TEXT, what that join waits for, maybe after its root was asked; ERROR, once it does not wait any more. */
void hrd_member_joining(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie,
                        const struct hrp_msg_join *join);
/* LEAVE: DONE once the agent let go; also for failed comms. */
void hrd_member_leave(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, uint32_t slot);
/* ABORT: every rank of the comm gets HRP_ABORTED with a sentence that names the rank and its text. */
void hrd_member_abort(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, uint32_t slot,
                      const char *text, size_t len);
/* The session is ending (its process died or broke the protocol): pending joins are withdrawn. Committed
   comms are failed by the agent through hrd_agent_session_end(). */
void hrd_member_session_gone(struct hrd_daemon *d, struct hrd_session *s, const char *why);
/* The comm behind a slot, 0: none. */
uint64_t hrd_member_comm_of_slot(struct hrd_daemon *d, const struct hrd_session *s, uint32_t slot);
/* COMM_* events of the agent. */
void hrd_member_event(struct hrd_daemon *d, const struct hrd_event *ev);
/* A peer's control connection is gone: pending set-ups that need it fail (or retry) with this reason. */
void hrd_member_peer_lost(struct hrd_daemon *d, uint32_t peer, const char *why);

/* ---- peer.c: other daemons --------------------------------------------------------------------------------
 */

int hrd_peers_new(struct hrd_daemon *d, char *errtext, size_t errlen);
void hrd_peers_free(struct hrd_daemon *d);
/* LINK_* events of the agent. */
void hrd_peer_event(struct hrd_daemon *d, const struct hrd_event *ev);
/* Addresses under which other daemons reach this one (never bridges' or containers' by default): for unique
   ids. Returns how many of at most max. */
unsigned hrd_peers_own_addrs(struct hrd_daemon *d, struct hrp_addr *out, unsigned max);

/* ---- doctor/service.c: what hreducectl doctor asks, and what other daemons do for theirs
 * ----------------------- */

struct hrp_peer_msg;

/* DOCTOR: answered with TEXT (JSON) or ERROR within HRD_DOCTOR_MS. */
void hrd_doctor_request(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie,
                        const struct hrp_msg_doctor *m, const char *text, size_t len);
/* ASK and TELL of a peer. */
void hrd_doctor_msg(struct hrd_daemon *d, uint32_t peer, const struct hrp_peer_msg *msg);
void hrd_doctor_event(struct hrd_daemon *d, const struct hrd_event *ev); /* PROBE */
/* As hrd_member_link() with a reason, and hrd_member_link_refused(). */
struct hrd_link_want;
void hrd_doctor_link_failed(struct hrd_daemon *d, uint32_t peer, const char *why);
void hrd_doctor_link_refused(struct hrd_daemon *d, uint32_t peer, const struct hrd_link_want *want,
                             uint32_t status, const char *why);
/* Forgets all questions; before the loop ends. */
void hrd_doctor_stop(struct hrd_daemon *d);
#define HRD_DOCTOR_MS 12000u

/* ---- status.c: JSON documents for hreducectl, built from an agent snapshot (jansson)
 * ----------------------- */

void hrd_status_reply(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie);
void hrd_path_reply(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, uint32_t slot);
void hrd_status_event(struct hrd_daemon *d, struct hrd_event *ev); /* SNAPSHOT */
/*
 * Additions of the other parts to the status document; each returns a new reference to a JSON array of objects.
 * status.c joins them with the agent's figures by "comm" (16 hex digits, members) and "peer" (the number, peers),
 * and shows objects with a "uid" only to that user and to root. A comm has "nodes": an array by node index of
 * {"name", "peer" (its number; absent for this node), "ranks" (how many)}, from which the path report is made.
 */
struct json_t *hrd_sessions_json(struct hrd_daemon *d);
struct json_t *hrd_members_json(struct hrd_daemon *d);
/* Set-ups of communicators that failed since the start: one a rank of this node. */
uint64_t hrd_members_setup_errors(const struct hrd_daemon *d);
struct json_t *hrd_peers_json(struct hrd_daemon *d);
/* The rails of a link that is up, by the agent's number for it, with the figures of s (or NULL): an array of {"rail",
   "device", "state" (up, interrupted, not used), "reason", "address", "tx_bytes", "rx_bytes", ...}. NULL: it has but one. */
struct json_t *hrd_link_rails_json(struct hrd_daemon *d, uint32_t link, const struct hrd_snapshot_link *s);
/* "nic": what data to other nodes takes, "" when unknown; "rails": all RDMA devices that are used. Connections to the peer port since the start: {"accepted",
   "garbage", "refused", "silent", "lost" (peers), "links_interrupted", "links_mended", "rdmacm_rejected"
   (connect requests)}. */
struct json_t *hrd_peer_port_json(struct hrd_daemon *d);

#endif
