/* SPDX-License-Identifier: MIT */
/*
 * Whether a waiter looks again and again before it sleeps. A hand-over between processes that do so takes about 1 us, a futex
 * wake-up across cores 10 to 50, so it pays where ops of that size end while somebody looks. Where they last longer and
 * processes share cores, it only keeps the core from those who have the work: a fifth of the time of 64 KiB between four nodes
 * of eight ranks on two cores. So looks in vain on a shared core count against looking, those on a core that nobody
 * else wanted do not.
 *
 * Any thread, without locks: a count that is lost makes one look more or less.
 */
#ifndef HCL_SPIN_H
#define HCL_SPIN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Never for larger ops: at the rate of memory they take longer than anybody looks. */
#define HCL_SPIN_BYTES (UINT64_C(2) << 20)
#define HCL_SPIN_CLASSES 22u
#define HCL_SPIN_DEBT 8 /* from here on it does not pay */
#define HCL_SPIN_MISS 2 /* of a look in vain; one that saw the end gives back 1: two of three must see it */
#define HCL_SPIN_RETRY 32u /* waits from one trial to the next */

enum hcl_spin_end {
    HCL_SPIN_SAW,  /* the op ended while it was looked at */
    HCL_SPIN_VAIN, /* it did not, and others wanted the core */
    HCL_SPIN_FREE, /* it did not, but the core was this thread's */
};

/* Of ops of one size, in powers of two. */
struct hcl_spin_class {
    _Atomic int32_t debt;
    _Atomic uint32_t skipped; /* waits since the last look */
};

struct hcl_spin {
    struct hcl_spin_class class[HCL_SPIN_CLASSES];
};

static inline struct hcl_spin_class *hcl_spin_class_of(struct hcl_spin *s, uint64_t bytes)
{
    return &s->class[bytes > 1 ? 64u - (unsigned)__builtin_clzll(bytes - 1) : 0];
}

/* Asked once a wait: it counts those that it refuses. After a look hcl_spin_ended() says how it went. */
static inline bool hcl_spin_pays(struct hcl_spin *s, uint64_t bytes)
{
    if (bytes > HCL_SPIN_BYTES)
        return false;
    struct hcl_spin_class *c = hcl_spin_class_of(s, bytes);
    return atomic_load_explicit(&c->debt, memory_order_relaxed) < HCL_SPIN_DEBT ||
           atomic_fetch_add_explicit(&c->skipped, 1, memory_order_relaxed) >= HCL_SPIN_RETRY;
}

static inline void hcl_spin_ended(struct hcl_spin *s, uint64_t bytes, enum hcl_spin_end how)
{
    if (how == HCL_SPIN_FREE)
        return;
    struct hcl_spin_class *c = hcl_spin_class_of(s, bytes);
    int32_t debt = atomic_load_explicit(&c->debt, memory_order_relaxed);
    if (how == HCL_SPIN_SAW)
        debt -= debt > 0;
    else
        debt += debt < HCL_SPIN_DEBT ? HCL_SPIN_MISS : 0;
    atomic_store_explicit(&c->debt, debt, memory_order_relaxed);
    atomic_store_explicit(&c->skipped, 0, memory_order_relaxed);
}

#endif
