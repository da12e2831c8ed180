/* SPDX-License-Identifier: MIT */
/*
 * The arena: the daemon's own memory for partials, received blocks and results. One mapping of a fixed size, made at
 * start and touched only by the daemon, the transports, its NICs and GPUs; a GPU whose memory a NIC reaches has one more, in
 * that memory. Owned by the agent thread.
 *
 * A domain says who may reach an allocation from outside: nobody, or one peer. Domains that were opened lie in ranges of
 * their own, taken from the arena in granules, so that a transport with remote access can register each apart and a
 * peer's key reaches only what that peer may write. All other domains share the rest, first fit: to sockets the domain
 * means nothing.
 */
#ifndef HRD_ARENA_H
#define HRD_ARENA_H

#include <stddef.h>
#include <stdint.h>

struct hrd_arena;

#define HRD_DOMAIN_SEND UINT32_MAX

#define HRD_ARENA_PAGE 4096u
#define HRD_ARENA_NONE UINT64_MAX

/* What the owner of an opened domain is told of its ranges. */
struct hrd_arena_watch {
    /* The domain gets [off, off + len). Not 0: it cannot be used (the allocation that needed it fails). */
    int (*grow)(void *ctx, uint64_t off, uint64_t len);
    /* It loses exactly a range that grow() announced; nothing in it is allocated. After the return nobody outside may
       reach it. */
    void (*shrink)(void *ctx, uint64_t off, uint64_t len);
    void *ctx;
};

/* bytes is rounded up to pages. NULL with errno. */
struct hrd_arena *hrd_arena_new(uint64_t bytes);
/* Over memory of the caller's, which is never touched here (a GPU's, say): whole pages. NULL with errno. */
struct hrd_arena *hrd_arena_over(void *base, uint64_t bytes);
void hrd_arena_free(struct hrd_arena *a);
/*
 * From here on allocations of this domain lie in ranges of its own. Ranges without an allocation stay with the domain
 * until somebody else needs the memory. -EEXIST: it is open already; -EINVAL: HRD_DOMAIN_SEND.
 */
int hrd_arena_domain_open(struct hrd_arena *a, uint32_t domain, const struct hrd_arena_watch *watch);
/* The domain's ranges become ordinary memory, without a shrink(): the caller has seen to it that nobody reaches them any
   more. What is still allocated stays allocated. Nothing happens when it is not open. */
void hrd_arena_domain_close(struct hrd_arena *a, uint32_t domain);
/* Offset of at least `bytes` bytes, page-aligned, or HRD_ARENA_NONE when no free extent is large enough (nothing waits).
   bytes 0 gives offset 0, which needs no release. */
uint64_t hrd_arena_alloc(struct hrd_arena *a, uint32_t domain, uint64_t bytes);
void hrd_arena_release(struct hrd_arena *a, uint64_t off, uint64_t bytes);
void *hrd_arena_at(const struct hrd_arena *a, uint64_t off);
uint64_t hrd_arena_size(const struct hrd_arena *a);
/* Allocated bytes; what domains merely keep is not counted. */
uint64_t hrd_arena_used(const struct hrd_arena *a);
/* Ranges in which nothing is allocated leave their domains. */
void hrd_arena_reclaim(struct hrd_arena *a);
/* What an opened domain takes at least, where there is room for it. */
uint64_t hrd_arena_granule(const struct hrd_arena *a);

#endif
