/* SPDX-License-Identifier: MIT */
/*
 * A thread that makes driver calls for an engine on one GPU, so that neither the agent nor another GPU waits for them. What
 * there is to do lies in rings of the engine; this is only who looks at them. The thread looks without a pause while there
 * is something, for a while longer, and then sleeps; the agent, which finds it asleep, looks by itself before it wakes it,
 * because a call costs less than waking somebody.
 */
#ifndef HRD_SUBMIT_H
#define HRD_SUBMIT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/gpu/gpu.h"

enum hrd_submit_found {
    HRD_SUBMIT_NOTHING, /* to do, and nothing that would have to be looked at again */
    HRD_SUBMIT_WAITS,   /* something is under way on the GPU, whose end tells nobody */
    HRD_SUBMIT_DID      /* something */
};

struct hrd_submit {
    struct hrd_gpu_dev *dev;
    /* Does what there is to do, with the GPU's context current. Never in two threads at once; each call sees what the one
       before wrote. */
    enum hrd_submit_found (*look)(void *arg);
    void *arg;
    uint64_t spin_ns; /* how long it looks for more before it sleeps */
    bool few_cores;   /* somebody else has more use for this one */
    pthread_t thread;
    bool runs;
    pthread_mutex_t lock; /* held by who looks while the thread sleeps */
    pthread_cond_t more;
    _Atomic bool asleep, stop;
};

/* 0, or the error of pthread_create(); name: at most 15 characters. */
int hrd_submit_start(struct hrd_submit *s, struct hrd_gpu_dev *dev, const char *name,
                     enum hrd_submit_found (*look)(void *arg), void *arg);
/* Ends the thread; nothing happens when it was never started (s zeroed). */
void hrd_submit_stop(struct hrd_submit *s);
/* Agent thread, after it published (sequentially consistent) something that look() will find. */
void hrd_submit_ring(struct hrd_submit *s);

#endif
