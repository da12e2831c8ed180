/* SPDX-License-Identifier: MIT */
/*
 * Result codes, grouped by what they cost the caller (the scope). Numbers are part of the protocols and of
 * hclient.h (hclient_result_t has the same values); they are never reused.
 */
#ifndef HRP_STATUS_H
#define HRP_STATUS_H

#include <stdint.h>

enum hrp_status {
    HRP_OK = 0,
    HRP_IN_PROGRESS = 1,      /* hclient_test: not complete yet */
    HRP_INVALID_ARGUMENT = 2, /* refused before anything was queued */
    HRP_UNSUPPORTED = 3,      /* valid, but this build or machine cannot do it */
    HRP_MISMATCH = 4,         /* op: ranks disagree on collective, count, type, reduction or root */
    HRP_TIMEOUT = 5,          /* op: the op deadline passed; setup: not everyone joined in time */
    HRP_RANK_LOST = 6,        /* comm: a rank's process died or left */
    HRP_PEER_LOST = 7,        /* comm: another node's daemon died, is silent or unreachable */
    HRP_ABORTED = 8,          /* comm: hclient_comm_abort was called on some rank */
    HRP_SUPERSEDED = 9,       /* comm: a newer comm with the same name replaced it */
    HRP_DAEMON_LOST = 10,     /* session: the local daemon is gone */
    HRP_UNRESPONSIVE = 11,    /* session: the local daemon's heartbeat is 10 s old */
    HRP_RESOURCE = 12,        /* a named limit (arena, memlock, descriptors, quota) is too small */
    HRP_REFUSED = 13,         /* permission, duplicate rank, foreign id */
    HRP_PROTOCOL = 14,        /* the other side broke the protocol */
    HRP_VERSION = 15,         /* client and daemon, or two daemons, do not speak the same major version */
    HRP_SYSTEM = 16,          /* a system call failed; the sentence has the errno */
    HRP_SHUTDOWN = 17,        /* the daemon is stopping */
    HRP_NSTATUS = 18,
};

enum hrp_scope {
    HRP_SCOPE_NONE = 0,
    HRP_SCOPE_OP = 1,      /* this op failed on every rank; the comm goes on with the next */
    HRP_SCOPE_COMM = 2,    /* all pending and later ops of the comm fail; destroy it */
    HRP_SCOPE_SESSION = 3, /* reconnect, register and join anew */
};

/* "timeout", "rank lost", ...; never NULL. */
const char *hrp_status_name(uint32_t status);

#endif
