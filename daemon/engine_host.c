/* SPDX-License-Identifier: MIT */
/*
 * The host engine: a pool of reduce threads over shared host memory. Work is cut into chunks that threads take from the
 * oldest work in turn, so that one large fold uses all threads and a small one behind it does not wait for long. Work
 * too small to be worth a thread switch is done by the submitting agent itself.
 */
#include "daemon/engine.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

/* Bytes read and written up to which the agent works by itself: a switch to another thread costs 5 to 45 us, in
   which a core folds about this much. */
#define INLINE_BYTES (UINT64_C(96) << 10)
#define SPANS_ON_STACK 64u

struct host_engine {
    struct hrd_engine base;
    uint64_t chunk_bytes;
    int wake;
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct hrd_work *first, *last;       /* under lock: work with chunks that nobody took yet */
    int stop;                            /* under lock */
    unsigned idle;                       /* under lock: threads that wait for work */
    _Atomic(struct hrd_work *) finished; /* stack, newest first */
    _Atomic int armed;
    struct hrd_work *inline_first, *inline_last; /* done by the agent in submit, not yet reported */
    unsigned nthreads;
    pthread_t thread[];
};

static size_t work_in_size(const struct hrd_work *w)
{
    return hrp_dtype_size(w->fold.in);
}

static size_t work_out_size(const struct hrd_work *w)
{
    return hrp_dtype_size(w->fold.out);
}

/* Elements from `at` on until the first staging window wraps around. */
static uint64_t run_length(const struct hrd_work *w, uint64_t at, uint64_t n)
{
    for (uint32_t i = 0; i < w->nsrc + w->ndst; i++) {
        const struct hrd_span *s = &w->span[i];
        if (!s->wrap)
            continue;
        uint64_t esize = i < w->nsrc ? work_in_size(w) : work_out_size(w);
        uint64_t run = (s->wrap - (s->off + at * esize) % s->wrap) / esize;
        if (run < n)
            n = run;
    }
    return n;
}

static char *span_at(const struct hrd_span *s, uint64_t byte)
{
    uint64_t x = s->off + byte;
    return s->base + (s->wrap ? x % s->wrap : x);
}

static void run_range(const struct hrd_work *w, uint64_t at, uint64_t n)
{
    uint32_t total = w->nsrc + w->ndst;
    void *stack[SPANS_ON_STACK];
    void **ptr = total <= SPANS_ON_STACK ? stack : malloc(total * sizeof(*ptr));
    if (!ptr)
        abort();
    while (n > 0) {
        uint64_t run = run_length(w, at, n);
        for (uint32_t i = 0; i < total; i++)
            ptr[i] = span_at(&w->span[i], at * (i < w->nsrc ? work_in_size(w) : work_out_size(w)));
        switch (w->kind) {
        case HRD_WORK_FOLD:
            hrk_fold(&w->fold, ptr + w->nsrc, w->ndst, (const void *const *)ptr, w->nsrc, run);
            break;
        case HRD_WORK_COPY:
            hrk_copy(ptr + 1, w->ndst, ptr[0], run * work_out_size(w), w->fold.stream);
            break;
        case HRD_WORK_NAN:
            for (uint32_t i = 0; i < w->ndst; i++)
                hrk_fill_nan(w->fold.out, ptr[i], run);
            break;
        }
        at += run;
        n -= run;
    }
    if (ptr != stack)
        free(ptr);
}

static void finish(struct host_engine *e, struct hrd_work *w)
{
    struct hrd_work *top = atomic_load_explicit(&e->finished, memory_order_relaxed);
    do
        w->next = top;
    while (!atomic_compare_exchange_weak_explicit(&e->finished, &top, w, memory_order_seq_cst,
                                                  memory_order_relaxed));
    /* Pairs with host_arm(): either we see `armed`, or the agent sees the finished work before it sleeps. */
    if (atomic_exchange_explicit(&e->armed, 0, memory_order_seq_cst)) {
        uint64_t one = 1;
        while (write(e->wake, &one, sizeof(one)) < 0 && errno == EINTR)
            ;
    }
}

static void *reduce_thread(void *arg)
{
    struct host_engine *e = arg;
    pthread_mutex_lock(&e->lock);
    for (;;) {
        struct hrd_work *w = e->first;
        if (!w) {
            if (e->stop)
                break;
            e->idle++;
            pthread_cond_wait(&e->more, &e->lock);
            e->idle--;
            continue;
        }
        uint64_t at = atomic_load_explicit(&w->next_chunk, memory_order_relaxed);
        uint64_t n = w->n - at < w->chunk ? w->n - at : w->chunk;
        atomic_store_explicit(&w->next_chunk, at + n, memory_order_relaxed);
        if (at + n == w->n) {
            e->first = w->next;
            if (!e->first)
                e->last = NULL;
        }
        pthread_mutex_unlock(&e->lock);
        run_range(w, at, n);
        /* acq_rel: whoever finishes last has seen all other threads' stores and publishes them with its own. */
        if (atomic_fetch_sub_explicit(&w->left, n, memory_order_acq_rel) == n)
            finish(e, w);
        pthread_mutex_lock(&e->lock);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

static void host_submit(struct hrd_engine *base, struct hrd_work *w)
{
    struct host_engine *e = (struct host_engine *)base;
    uint64_t in = work_in_size(w), out = work_out_size(w);
    w->next = NULL;
    if (w->n * (in * w->nsrc + out * w->ndst) <= INLINE_BYTES) {
        run_range(w, 0, w->n);
        if (e->inline_last)
            e->inline_last->next = w;
        else
            e->inline_first = w;
        e->inline_last = w;
        return;
    }
    uint64_t chunk = e->chunk_bytes / (in > out ? in : out) / 64 * 64;
    w->chunk = chunk ? chunk : 64;
    atomic_store_explicit(&w->next_chunk, 0, memory_order_relaxed);
    atomic_store_explicit(&w->left, w->n, memory_order_relaxed);
    uint64_t nchunks = (w->n + w->chunk - 1) / w->chunk;
    pthread_mutex_lock(&e->lock);
    if (e->last)
        e->last->next = w;
    else
        e->first = w;
    e->last = w;
    unsigned idle = e->idle;
    pthread_mutex_unlock(&e->lock);
    if (idle && nchunks > 1)
        pthread_cond_broadcast(&e->more);
    else if (idle)
        pthread_cond_signal(&e->more);
}

static unsigned host_poll(struct hrd_engine *base)
{
    struct host_engine *e = (struct host_engine *)base;
    unsigned count = 0;
    struct hrd_work *w = e->inline_first;
    e->inline_first = e->inline_last = NULL;
    while (w) {
        struct hrd_work *next = w->next;
        w->done(w);
        count++;
        w = next;
    }
    if (!atomic_load_explicit(&e->finished, memory_order_relaxed))
        return count;
    w = atomic_exchange_explicit(&e->finished, NULL, memory_order_acquire);
    struct hrd_work *ordered = NULL; /* oldest first */
    while (w) {
        struct hrd_work *next = w->next;
        w->next = ordered;
        ordered = w;
        w = next;
    }
    while (ordered) {
        struct hrd_work *next = ordered->next;
        ordered->done(ordered);
        count++;
        ordered = next;
    }
    return count;
}

static int host_arm(struct hrd_engine *base, int armed)
{
    struct host_engine *e = (struct host_engine *)base;
    atomic_store_explicit(&e->armed, armed, memory_order_seq_cst);
    return e->inline_first || atomic_load_explicit(&e->finished, memory_order_seq_cst) != NULL;
}

static void host_free(struct hrd_engine *base)
{
    struct host_engine *e = (struct host_engine *)base;
    pthread_mutex_lock(&e->lock);
    e->stop = 1;
    pthread_cond_broadcast(&e->more);
    pthread_mutex_unlock(&e->lock);
    for (unsigned i = 0; i < e->nthreads; i++)
        pthread_join(e->thread[i], NULL);
    pthread_cond_destroy(&e->more);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

static const struct hrd_engine_table host_table = {
    .name = "host",
    .submit = host_submit,
    .poll = host_poll,
    .arm = host_arm,
    .free = host_free,
};

struct hrd_engine *hrd_engine_host_new(unsigned threads, uint64_t chunk_bytes, int wake)
{
    struct host_engine *e = calloc(1, sizeof(*e) + threads * sizeof(e->thread[0]));
    if (!e)
        return NULL;
    e->base.table = &host_table;
    e->chunk_bytes = chunk_bytes;
    e->wake = wake;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->more, NULL);
    /* Signals belong to the control thread's loop; SIGBUS is raised at the faulting thread all the same. */
    sigset_t all, old;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int err = 0;
    for (; e->nthreads < threads; e->nthreads++) {
        err = pthread_create(&e->thread[e->nthreads], NULL, reduce_thread, e);
        if (err)
            break;
        pthread_setname_np(e->thread[e->nthreads], "hrd-reduce");
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (err) {
        host_free(&e->base);
        errno = err;
        return NULL;
    }
    return &e->base;
}
