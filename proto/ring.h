/* SPDX-License-Identifier: MIT */
/*
 * The submission ring of a comm slot (struct hrp_comm_area): push by the client, pop by the agent. Lock-free,
 * never blocks. A client that dies between the descriptor and the tail leaves a descriptor that nobody sees.
 */
#ifndef HRP_RING_H
#define HRP_RING_H

#include <errno.h>

#include "proto/shm.h"

/* Client; callers serialise themselves. 0, or -EAGAIN when HRP_OP_SLOTS descriptors are not yet taken. */
static inline int hrp_ring_push(struct hrp_comm_area *area, const struct hrp_desc *desc)
{
    uint64_t tail = atomic_load_explicit(&area->tail, memory_order_relaxed);
    uint64_t head = atomic_load_explicit(&area->head, memory_order_acquire);
    if (tail - head >= HRP_OP_SLOTS)
        return -EAGAIN;
    area->desc[tail % HRP_OP_SLOTS] = *desc;
    atomic_store_explicit(&area->tail, tail + 1, memory_order_release);
    return 0;
}

/*
 * Agent. `head` is the agent's private counter (the shared word is only published, never read back). Copies the oldest
 * descriptor out and leaves it in the ring: 1 copied, 0 empty, -EPROTO when the client's tail is impossible.
 */
static inline int hrp_ring_peek(struct hrp_comm_area *area, uint64_t head, struct hrp_desc *desc)
{
    uint64_t tail = atomic_load_explicit(&area->tail, memory_order_acquire);
    if (tail == head)
        return 0;
    if (tail - head > HRP_OP_SLOTS)
        return -EPROTO;
    *desc = *(const volatile struct hrp_desc *)&area->desc[head % HRP_OP_SLOTS];
    return 1;
}

/* Agent. Takes what hrp_ring_peek() showed; its place may be overwritten from now on. */
static inline void hrp_ring_take(struct hrp_comm_area *area, uint64_t *head)
{
    ++*head;
    atomic_store_explicit(&area->head, *head, memory_order_release);
}

/* Agent. Both at once. */
static inline int hrp_ring_pop(struct hrp_comm_area *area, uint64_t *head, struct hrp_desc *desc)
{
    int n = hrp_ring_peek(area, *head, desc);
    if (n == 1)
        hrp_ring_take(area, head);
    return n;
}

#endif
