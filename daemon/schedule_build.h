/* SPDX-License-Identifier: MIT */
/*
 * The builder that the algorithm files (schedule_direct.c, ...) write steps with. Each sb_ call appends one
 * step and returns its index. A failed allocation is remembered and later calls do nothing, so that an
 * algorithm reads as the list of its steps.
 */
#ifndef HRD_SCHEDULE_BUILD_H
#define HRD_SCHEDULE_BUILD_H

#include "daemon/schedule.h"

struct sched_build {
    struct hrd_schedule *s;
    uint32_t n, me;     /* the key's, for short */
    uint32_t cap_steps; /* room in s->steps, s->list, s->buf_block */
    uint32_t cap_list;
    uint32_t cap_bufs;
    uint32_t last_send; /* the newest SEND made by sb_send_ordered, or HRD_NONE */
    int err;
};

/* What a partial or a result covers: nodes first, first+1, ... */
struct sb_cover {
    uint32_t first, count;
};

uint32_t sb_local(struct sched_build *b, uint32_t block, unsigned value);
uint32_t sb_send(struct sched_build *b, uint32_t src, uint32_t peer, uint32_t round);
/* As sb_send, but starts only when step `dep` is finished; HRD_NONE: no such step. */
uint32_t sb_send_after(struct sched_build *b, uint32_t src, uint32_t peer, uint32_t round, uint32_t dep);
/* As sb_send, but starts only when the last ordered send has left: one peer is sent to at a time. */
uint32_t sb_send_ordered(struct sched_build *b, uint32_t src, uint32_t peer, uint32_t round);
uint32_t sb_recv(struct sched_build *b, uint32_t block, unsigned value, uint32_t peer, uint32_t round,
                 struct sb_cover cover);
/* Folds in[] into the buffer of step `over` (one of in[]), which nobody may send from. */
uint32_t sb_fold_over(struct sched_build *b, uint32_t over, const uint32_t *in, uint32_t count);
/* Folds in[] to the op's result; sent != 0: into a buffer of its own as well, for sending. */
uint32_t sb_fold_final(struct sched_build *b, const uint32_t *in, uint32_t count, int sent);
/*
 * Delivers src to the local ranks. `local`: the LOCAL step of the same block at this node, or HRD_NONE. It
 * has read the ranks' inputs, which may lie where the outputs go, so it comes first.
 */
uint32_t sb_store(struct sched_build *b, uint32_t src, uint32_t local);
void sb_fused(struct sched_build *b);

/* The algorithms. They are called with n >= 2 and a collective that hrd_schedule_serves. */
void sched_direct(struct sched_build *b);
void sched_gather(struct sched_build *b);
void sched_pairwise(struct sched_build *b);
void sched_ring(struct sched_build *b);
void sched_tree(struct sched_build *b);

#endif
