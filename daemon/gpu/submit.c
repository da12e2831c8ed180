/* SPDX-License-Identifier: MIT */
#include "daemon/gpu/submit.h"

#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "daemon/clock.h"
#include "daemon/relax.h"
#include "daemon/thread.h"

/* The pause between two buckets of a training step. With few cores somebody else has more use for this one. */
#define SPIN_NS UINT64_C(500000)
#define SPIN_NS_FEW UINT64_C(20000)
#define MANY_CORES 16
/* Between two looks at what is under way: a driver call a microsecond is enough, and leaves the context's lock to others. */
#define RELAXES 16u
#define NAP_NS 20000

static void pause_between_looks(const struct hrd_submit *s)
{
    if (s->few_cores)
        nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    for (unsigned i = 0; i < RELAXES && !s->few_cores; i++)
        hrd_relax();
}

static void sleep_until_rung(struct hrd_submit *s)
{
    pthread_mutex_lock(&s->lock);
    atomic_store_explicit(&s->asleep, true, memory_order_seq_cst);
    /* Pairs with hrd_submit_ring(): either we find what was published, or the agent finds us asleep. */
    if (s->look(s->arg) == HRD_SUBMIT_NOTHING && !atomic_load_explicit(&s->stop, memory_order_relaxed))
        pthread_cond_wait(&s->more, &s->lock);
    atomic_store_explicit(&s->asleep, false, memory_order_seq_cst);
    pthread_mutex_unlock(&s->lock);
}

static void *submit_thread(void *arg)
{
    struct hrd_submit *s = arg;
    uint64_t last = now_ns();
    prctl(PR_SET_TIMERSLACK, (unsigned long)NAP_NS / 10, 0, 0, 0);
    (void)s->dev->drv->CtxSetCurrent(s->dev->ctx);
    while (!atomic_load_explicit(&s->stop, memory_order_relaxed)) {
        enum hrd_submit_found found = s->look(s->arg);
        if (found == HRD_SUBMIT_DID) {
            last = now_ns();
            continue;
        }
        if (found == HRD_SUBMIT_WAITS) {
            pause_between_looks(s);
            last = now_ns();
            continue;
        }
        if (now_ns() - last < s->spin_ns) {
            hrd_relax();
            continue;
        }
        sleep_until_rung(s);
        last = now_ns();
    }
    return NULL;
}

int hrd_submit_start(struct hrd_submit *s, struct hrd_gpu_dev *dev, const char *name,
                     enum hrd_submit_found (*look)(void *arg), void *arg)
{
    s->dev = dev;
    s->look = look;
    s->arg = arg;
    s->few_cores = sysconf(_SC_NPROCESSORS_ONLN) < MANY_CORES;
    s->spin_ns = s->few_cores ? SPIN_NS_FEW : SPIN_NS;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->more, NULL);
    int err = hrd_thread_start(&s->thread, submit_thread, s, name);
    s->runs = err == 0;
    if (s->runs)
        return 0;
    pthread_cond_destroy(&s->more);
    pthread_mutex_destroy(&s->lock);
    return err;
}

void hrd_submit_stop(struct hrd_submit *s)
{
    if (!s->runs)
        return;
    pthread_mutex_lock(&s->lock);
    atomic_store(&s->stop, true);
    pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->more);
    pthread_mutex_destroy(&s->lock);
    s->runs = false;
}

void hrd_submit_ring(struct hrd_submit *s)
{
    if (!atomic_load_explicit(&s->asleep, memory_order_seq_cst))
        return;
    pthread_mutex_lock(&s->lock);
    if (atomic_load_explicit(&s->asleep, memory_order_relaxed)) {
        (void)s->dev->drv->CtxSetCurrent(s->dev->ctx);
        (void)s->look(s->arg);
        pthread_cond_signal(&s->more);
    }
    pthread_mutex_unlock(&s->lock);
}
