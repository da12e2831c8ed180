/* SPDX-License-Identifier: MIT */
/*
 * The sessions as a whole, for the service that runs them; control.h has what one session offers to others.
 * Control thread only; nothing blocks.
 */
#ifndef HRD_SESSION_H
#define HRD_SESSION_H

#include "daemon/control.h"
#include "daemon/gpu/gpu.h"

/* Makes d->sessions; d->loop and d->agent exist. 0 or negative errno with a sentence. */
int hrd_sessions_new(struct hrd_daemon *d, char *err, size_t errlen);
/* Every session is gone (hrd_sessions_live() is 0). */
void hrd_sessions_free(struct hrd_daemon *d);

/*
 * Takes an accepted, non-blocking connection. refusal: NULL, or the sentence with which its HELLO is to be
 * refused. At most max_sessions plus a few for hreducectl are kept; the others are closed.
 */
void hrd_session_accept(struct hrd_daemon *d, int sock, const char *refusal);

/* SESSION_GONE, SESSION_FAULT and BUFFER_GONE of the agent. */
void hrd_session_event(struct hrd_daemon *d, const struct hrd_event *ev);

/* Answers of the GPUs. */
void hrd_session_gpu_event(struct hrd_daemon *d, const struct hrd_gpu_event *ev);

/* Ends all sessions; they are gone when the agent let go of their memory. */
void hrd_sessions_end_all(struct hrd_daemon *d, const char *why);
/* Connections that exist, ending ones included. */
unsigned hrd_sessions_live(const struct hrd_daemon *d);
/* Processes with a segment: what max_sessions counts. */
unsigned hrd_sessions_count(const struct hrd_daemon *d);
/* Calls fn once for every communicator with a rank here. */
void hrd_sessions_each_comm(struct hrd_daemon *d, void (*fn)(struct hrd_daemon *d, uint64_t comm));

struct hrd_session_totals {
    uint64_t memory_bytes; /* segments, windows, allocations and imports of all sessions */
    uint64_t accepted, refused, faults;
};
void hrd_sessions_totals(const struct hrd_daemon *d, struct hrd_session_totals *out);

#endif
