/* SPDX-License-Identifier: MIT */
/*
 * The Unix socket: taken from systemd, or made here under a lock that the kernel holds for the life of the
 * daemon. A second daemon is refused in words and leaves the first one's socket alone; the socket of a killed
 * daemon is replaced.
 */
#ifndef HRD_LISTENER_H
#define HRD_LISTENER_H

#include "daemon/control.h"

struct hrd_listener;

/* Gets the listening socket, but takes no connection yet. Waits up to a second for a daemon that is just being
 * torn down. 0 or negative errno with a sentence. */
int hrd_listener_new(struct hrd_listener **out, struct hrd_daemon *d, char *err, size_t errlen);
/* Begins to accept; d->sessions exists. */
int hrd_listener_start(struct hrd_listener *l);
/* Stops accepting; connections that wait are for the next daemon (socket activation) or refused by the kernel.
 */
void hrd_listener_stop(struct hrd_listener *l);
/* Removes the socket if it is ours. The loop must run once more. */
void hrd_listener_free(struct hrd_listener *l);
/* Where the socket is, for messages. */
const char *hrd_listener_path(const struct hrd_listener *l);
bool hrd_listener_activated(const struct hrd_listener *l);

#endif
