/* SPDX-License-Identifier: MIT */
/*
 * Public handles of communicators: index and generation instead of an address, and a count of the calls that
 * are inside. So a handle that was destroyed is refused and not followed (destructors, garbage collectors and
 * atexit functions call in any order), and destroy waits until nobody is inside.
 */
#include <stdlib.h>

#include "client/comm.h"

#define BLOCK 64u
#define NBLOCKS 1024u
#define LIVE (UINT64_C(1) << 31)
#define COUNT (LIVE - 1)

_Static_assert(sizeof(void *) == 8, "a handle has 32 bits of generation and 32 of index");

struct slot {
    _Atomic uint64_t word; /* generation << 32 | LIVE | references */
    struct hcl_comm *comm;
    struct slot *next_free;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* the two below */
static uint32_t nblocks;
static struct slot *free_list;
static struct slot *_Atomic blocks[NBLOCKS];

static uint64_t generation(uint64_t word)
{
    return word >> 32;
}

static struct slot *find(hclient_comm_t handle, uint64_t *gen)
{
    uint64_t h = (uint64_t)(uintptr_t)handle;
    uint32_t index = (uint32_t)h - 1;
    if (h == 0 || index / BLOCK >= NBLOCKS)
        return NULL;
    struct slot *block = atomic_load_explicit(&blocks[index / BLOCK], memory_order_acquire);
    *gen = h >> 32;
    return block != NULL ? &block[index % BLOCK] : NULL;
}

/* Under lock: one more block of free slots. */
static void grow(void)
{
    if (nblocks == NBLOCKS)
        return;
    struct slot *block = calloc(BLOCK, sizeof(*block));
    if (block == NULL)
        return;
    for (uint32_t i = BLOCK; i-- > 0;) {
        block[i].next_free = free_list;
        free_list = &block[i];
    }
    atomic_store_explicit(&blocks[nblocks++], block, memory_order_release);
}

static uint32_t index_of(const struct slot *slot)
{
    for (uint32_t b = 0; b < nblocks; b++) {
        struct slot *block = atomic_load_explicit(&blocks[b], memory_order_relaxed);
        if (slot >= block && slot < block + BLOCK)
            return b * BLOCK + (uint32_t)(slot - block);
    }
    abort(); /* every slot lies in a block */
}

hclient_comm_t hcl_handle_new(struct hcl_comm *comm)
{
    pthread_mutex_lock(&lock);
    if (free_list == NULL)
        grow();
    struct slot *slot = free_list;
    uint64_t handle = 0;
    if (slot != NULL) {
        free_list = slot->next_free;
        slot->comm = comm;
        uint64_t gen = (generation(atomic_load(&slot->word)) + 1) & UINT32_MAX;
        atomic_store_explicit(&slot->word, gen << 32 | LIVE, memory_order_release);
        handle = gen << 32 | (index_of(slot) + 1);
    }
    pthread_mutex_unlock(&lock);
    return (hclient_comm_t)(uintptr_t)handle;
}

struct hcl_comm *hcl_handle_get(hclient_comm_t handle)
{
    uint64_t gen;
    struct slot *slot = find(handle, &gen);
    if (slot == NULL)
        return NULL;
    uint64_t word = atomic_load_explicit(&slot->word, memory_order_acquire);
    do {
        if (generation(word) != gen || !(word & LIVE))
            return NULL;
    } while (!atomic_compare_exchange_weak_explicit(&slot->word, &word, word + 1, memory_order_acquire,
                                                    memory_order_acquire));
    return slot->comm;
}

void hcl_handle_put(hclient_comm_t handle)
{
    uint64_t gen;
    struct slot *slot = find(handle, &gen);
    atomic_fetch_sub_explicit(&slot->word, 1, memory_order_release);
}

bool hcl_handle_close(hclient_comm_t handle, struct hcl_comm **comm)
{
    uint64_t gen;
    struct slot *slot = find(handle, &gen);
    if (slot == NULL)
        return false;
    uint64_t word = atomic_load_explicit(&slot->word, memory_order_acquire);
    do {
        if (generation(word) != gen || !(word & LIVE))
            return false;
    } while (!atomic_compare_exchange_weak_explicit(&slot->word, &word, word & ~LIVE, memory_order_acq_rel,
                                                    memory_order_acquire));
    *comm = slot->comm;
    return true;
}

bool hcl_handle_idle(hclient_comm_t handle)
{
    uint64_t gen;
    struct slot *slot = find(handle, &gen);
    return (atomic_load_explicit(&slot->word, memory_order_acquire) & COUNT) == 0;
}

void hcl_handle_free(hclient_comm_t handle)
{
    uint64_t gen;
    struct slot *slot = find(handle, &gen);
    pthread_mutex_lock(&lock);
    slot->comm = NULL;
    slot->next_free = free_list;
    free_list = slot;
    pthread_mutex_unlock(&lock);
}
