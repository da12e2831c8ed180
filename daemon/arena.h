/* SPDX-License-Identifier: MIT */
/*
 * The arena: the daemon's own memory for partials, received blocks and results. One mapping of a fixed size, made at
 * start and touched only by the daemon, the transports and (later) its NICs and GPUs. Owned by the agent thread.
 */
#ifndef HRD_ARENA_H
#define HRD_ARENA_H

#include <stddef.h>
#include <stdint.h>

struct hrd_arena;

/* Who may reach an allocation from outside: nobody, or one peer. A transport with remote access registers each domain's
   memory apart, so that a peer's key reaches only what that peer may write. */
#define HRD_DOMAIN_SEND UINT32_MAX

#define HRD_ARENA_PAGE 4096u
#define HRD_ARENA_NONE UINT64_MAX

/* bytes is rounded up to pages. NULL with errno. */
struct hrd_arena *hrd_arena_new(uint64_t bytes);
void hrd_arena_free(struct hrd_arena *a);
/* Offset of at least `bytes` bytes, page-aligned, or HRD_ARENA_NONE when no free extent is large enough (nothing waits).
   bytes 0 gives offset 0, which needs no release. */
uint64_t hrd_arena_alloc(struct hrd_arena *a, uint32_t domain, uint64_t bytes);
void hrd_arena_release(struct hrd_arena *a, uint64_t off, uint64_t bytes);
void *hrd_arena_at(const struct hrd_arena *a, uint64_t off);
uint64_t hrd_arena_size(const struct hrd_arena *a);
uint64_t hrd_arena_used(const struct hrd_arena *a);

#endif
