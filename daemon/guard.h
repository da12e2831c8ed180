/* SPDX-License-Identifier: MIT */
/*
 * SIGBUS guard. Memory shared with a client can vanish under the daemon: seals forbid shrinking a memfd, not
 * punching holes into it, and the page that then has to be made anew may not be had. Every mapping of such
 * memory is registered here. When any thread faults in one, the handler puts anonymous memory there, so that
 * the thread goes on with zeros, raises the owner's `poisoned` word and wakes the control loop, which ends that
 * session. A SIGBUS anywhere else has its default action.
 */
#ifndef HRD_GUARD_H
#define HRD_GUARD_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Installs the handler. Returns an eventfd that becomes readable after each fault (the caller polls, reads and
 * never closes it), or a negative errno. Later calls return the same, and put the handler back if somebody has
 * replaced it.
 */
int hrd_guard_init(void);

/*
 * Registers a mapping (page-aligned). *poisoned becomes 1 when the range faults; it is valid until the range
 * is removed. 0 or -ENOMEM. Add and remove are the control thread's; the handler runs in any thread.
 */
int hrd_guard_add(void *base, size_t len, _Atomic uint32_t *poisoned);
/* Before the mapping goes; no thread touches it any more. */
void hrd_guard_remove(void *base);

#endif
