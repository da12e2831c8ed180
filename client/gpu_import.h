/* SPDX-License-Identifier: MIT */
/*
 * GPU memory that the daemon has: allocations are exported once and found again by the driver's id of them, never by their
 * address alone, which is used again after a free. What cannot be exported is remembered with the reason, and staged.
 */
#ifndef HCL_GPU_IMPORT_H
#define HCL_GPU_IMPORT_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/hclient.h"

struct hcl_context;
struct hcl_comm;
struct hcl_op;
struct hcl_gpu_memory;

/* Of a context. */
struct hcl_gpu_memories {
    pthread_mutex_t lock;
    struct hcl_gpu_memory *list;
    unsigned n;
    char warned_why[512]; /* of the last allocation that is copied instead */
};

void hcl_gpu_memories_init(struct hcl_gpu_memories *m);
void hcl_gpu_memories_deinit(struct hcl_gpu_memories *m);
/* The op in a slot is over, or its comm ends: what it used may go. */
void hcl_gpu_unuse(struct hcl_context *ctx, struct hcl_op *op);
/* What the daemon has of this memory, but for allocations that other registrations of the comm lie in, is gone from there on
   return. Waits 2 s at most for ops that use it, and then fails in words. Any thread, without locks. */
hclient_result_t hcl_gpu_give_back(struct hcl_comm *comm, uintptr_t base, size_t bytes);
/* Watcher: gives up what was not used for a while or was freed. */
void hcl_gpu_expire(struct hcl_context *ctx);

#endif
