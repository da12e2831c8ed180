/* SPDX-License-Identifier: MIT */
/*
 * Memory that a client and the daemon share: memfds of the daemon's making, and memfds of a client's. Every
 * refusal is a sentence that names the limit and what to do about it.
 */
#ifndef HRD_MEMORY_H
#define HRD_MEMORY_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/quota.h"

/* One mapping, with what it costs its user. */
struct hrd_memory {
    void *base; /* NULL: none */
    size_t len;
    struct hrd_charge charge;
};

/*
 * Makes and maps a memfd of `bytes` (rounded up to pages): reserved by fallocate, so that nobody who touches it
 * gets SIGBUS, and sealed against shrinking, growing and further seals. Blocks for as long as the kernel takes
 * to clear the pages; any thread. Returns the descriptor (the caller's) or a negative errno with a sentence.
 */
int hrd_memfd_make(const char *name, uint64_t bytes, void **base, size_t *len, char *err, size_t errlen);

/*
 * Maps bytes at offset of a client's memfd. Refused unless it is a memfd (tmpfs, not hugetlb), sealed against
 * shrinking and large enough. Touches no page. 0 or a negative errno with a sentence.
 */
int hrd_memfd_import(int fd, uint64_t offset, uint64_t bytes, void **base, char *err, size_t errlen);

/* What the machine and the daemon's control group still give, in bytes; where says in words what the limit is.
 * UINT64_MAX when nothing is known. */
uint64_t hrd_memory_headroom(char *where, size_t len);

#endif
