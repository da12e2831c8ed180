/* SPDX-License-Identifier: MIT */
/*
 * The host engine: a pool of reduce threads over shared host memory. Work is cut into chunks that threads take from the
 * oldest work in turn, so that one large fold uses all threads and a small one behind it does not wait for long.
 *
 * Waking a thread is the dear part: 5 us on the same core, up to 50 across cores, in which a core folds half a megabyte.
 * So work that is too small for a switch is done in submit; an agent that has nothing else to do takes chunks like any
 * thread; and a sleeping thread is woken only when more is queued than would be done by the time it runs.
 */
#include "daemon/clock.h"
#include "daemon/engine.h"
#include "daemon/relax.h"
#include "daemon/thread.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

/* Bytes read and written up to which the agent works by itself: a switch to another thread costs 5 to 45 us, in
   which a core folds about this much. */
#define INLINE_BYTES (UINT64_C(96) << 10)
#define SPANS_ON_STACK 64u
/* A thread is woken for what a core works through in twice the time of a wake-up (smoothed, as measured), within bounds. */
#define BYTES_PER_NS 16u
#define WAKE_BYTES_MIN (UINT64_C(256) << 10)
#define WAKE_BYTES_MAX (UINT64_C(16) << 20)

/* Looks at the engine by an agent that is too busy to help, after which a thread is woken whatever it costs: one job that
   keeps the agent busy must not keep the work of another waiting. */
#define LOOKS_PER_WAKE 32u

/* So many threads and more can look for work instead of sleeping while an engine that needs them soon says so: it has waked
   all of them by the time one would be awake otherwise. For so long after it said that it does not any more: the pause
   between two ops of a job. */
#define SPINNERS 4u
#define LINGER_NS UINT64_C(500000)
/* A thread that looks for work and has less than three quarters of a core for it, over so long, takes a core from somebody,
   perhaps from whoever does the work that is waited for: all threads sleep then, and the agent helps, until it is tried again.
   Four daemons on 16 cores took five times as long for 1 MiB without this. */
#define CROWD_NS UINT64_C(2000000)
#define CROWDED_NS UINT64_C(20000000)
/* Turns of looking between two looks at the thread's own clock. */
#define TURNS_PER_CLOCK 8u
/* The least that one of them is given. */
#define PIECE_BYTES (UINT64_C(32) << 10)

struct host_engine {
    struct hrd_engine base;
    uint64_t chunk_bytes;
    int wake;
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct hrd_work *first, *last; /* under lock: work with chunks that nobody took yet */
    int stop;                      /* under lock */
    _Atomic unsigned idle;         /* threads that wait for work; written under lock */
    uint64_t signal_ns; /* under lock: when a thread was signalled that does not run yet; 0: none */
    uint64_t wake_ns;   /* under lock: how long a wake-up takes */
    _Atomic uint64_t
        queued; /* bytes read and written by the chunks that nobody took yet; written under lock */
    _Atomic(struct hrd_work *) finished; /* stack, newest first */
    _Atomic int armed;
    _Atomic uint64_t hot_until;     /* idle threads look for work until then; the agent's */
    _Atomic uint64_t crowded_until; /* ... but not before then; of whichever thread found it so */
    unsigned looks;                 /* the agent's: polls with work queued since it last helped */
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
    void *stack[SPANS_ON_STACK] = {NULL};
    void **ptr = total <= SPANS_ON_STACK ? stack : calloc(total, sizeof(*ptr));
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

static bool is_hot(const struct host_engine *e)
{
    uint64_t until = atomic_load_explicit(&e->hot_until, memory_order_relaxed);
    if (!until)
        return false;
    uint64_t now = now_ns();
    return now < until && now >= atomic_load_explicit(&e->crowded_until, memory_order_relaxed);
}

/* A thread's time with nothing to do, and how much of it it ran. */
struct looking {
    uint64_t all_ns, ran_ns;
};

static bool has_no_core(struct looking *l, uint64_t all, uint64_t ran)
{
    l->all_ns += all;
    l->ran_ns += ran;
    if (l->all_ns < CROWD_NS)
        return false;
    bool few = l->ran_ns < l->all_ns / 4 * 3;
    *l = (struct looking){0};
    return few;
}

static void look_for_work(struct host_engine *e, struct looking *l)
{
    uint64_t since = 0, ran_since = 0; /* known from the first look at the clocks on, which few come to */
    for (unsigned turn = 1; is_hot(e); turn++) {
        for (unsigned i = 0; i < 256; i++) {
            if (atomic_load_explicit(&e->queued, memory_order_relaxed) > 0)
                return;
            hrd_relax();
        }
        sched_yield(); /* whoever needs this core may have it */
        if (turn % TURNS_PER_CLOCK != 0)
            continue;
        uint64_t now = now_ns(), ran = clock_ns(CLOCK_THREAD_CPUTIME_ID);
        if (since && has_no_core(l, now - since, ran - ran_since))
            atomic_store_explicit(&e->crowded_until, now + CROWDED_NS, memory_order_relaxed);
        since = now;
        ran_since = ran;
    }
}

static uint64_t traffic(const struct hrd_work *w, uint64_t n)
{
    return n * (work_in_size(w) * w->nsrc + work_out_size(w) * w->ndst);
}

/* Under lock: whether waking an idle thread pays. */
static bool worth_waking(struct host_engine *e)
{
    if (!e->idle || e->signal_ns)
        return false;
    uint64_t least = 2 * e->wake_ns * BYTES_PER_NS;
    if (least < WAKE_BYTES_MIN)
        least = WAKE_BYTES_MIN;
    if (least > WAKE_BYTES_MAX)
        least = WAKE_BYTES_MAX;
    if (atomic_load_explicit(&e->queued, memory_order_relaxed) < least)
        return false;
    e->signal_ns = now_ns();
    return true;
}

/* Ends the lock, and wakes whom the queued work is worth. Threads that were to look for it, but sleep because it was crowded:
   all of them. */
static void unlock_and_wake(struct host_engine *e, bool hot)
{
    bool all = hot && e->idle > 0;
    bool one = worth_waking(e);
    pthread_mutex_unlock(&e->lock);
    if (all)
        pthread_cond_broadcast(&e->more);
    else if (one)
        pthread_cond_signal(&e->more);
}

/* Under lock: takes the next chunk of the oldest work. */
static struct hrd_work *take(struct host_engine *e, uint64_t *at, uint64_t *n)
{
    struct hrd_work *w = e->first;
    if (!w)
        return NULL;
    *at = w->next_chunk;
    *n = w->n - *at < w->chunk ? w->n - *at : w->chunk;
    w->next_chunk += *n;
    atomic_fetch_sub_explicit(&e->queued, traffic(w, *n), memory_order_relaxed);
    if (w->next_chunk == w->n) {
        e->first = w->next;
        if (!e->first)
            e->last = NULL;
    }
    return w;
}

static void run_chunk(struct host_engine *e, struct hrd_work *w, uint64_t at, uint64_t n)
{
    run_range(w, at, n);
    /* acq_rel: whoever finishes last has seen all other threads' stores and publishes them with its own. */
    if (atomic_fetch_sub_explicit(&w->left, n, memory_order_acq_rel) == n)
        finish(e, w);
}

static void *reduce_thread(void *arg)
{
    struct host_engine *e = arg;
    struct looking looking = {0};
    pthread_mutex_lock(&e->lock);
    for (;;) {
        uint64_t at, n;
        struct hrd_work *w = take(e, &at, &n);
        if (!w) {
            if (e->stop)
                break;
            if (is_hot(e)) {
                pthread_mutex_unlock(&e->lock);
                look_for_work(e, &looking);
                pthread_mutex_lock(&e->lock);
                continue;
            }
            e->idle++;
            pthread_cond_wait(&e->more, &e->lock);
            e->idle--;
            if (e->signal_ns) {
                e->wake_ns = (3 * e->wake_ns + (now_ns() - e->signal_ns)) / 4;
                e->signal_ns = 0;
            }
            continue;
        }
        unlock_and_wake(e, false);
        run_chunk(e, w, at, n);
        pthread_mutex_lock(&e->lock);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

static unsigned host_help(struct hrd_engine *base)
{
    struct host_engine *e = (struct host_engine *)base;
    if (atomic_load_explicit(&e->queued, memory_order_relaxed) == 0)
        return 0;
    bool hot = is_hot(e);
    if (hot && atomic_load_explicit(&e->idle, memory_order_relaxed) == 0)
        return 0;
    uint64_t at, n;
    e->looks = 0;
    pthread_mutex_lock(&e->lock);
    struct hrd_work *w = take(e, &at, &n);
    e->wake_ns -= e->wake_ns / 256; /* one slow wake-up must not keep the threads asleep for good */
    unlock_and_wake(e, hot);
    if (!w)
        return 0;
    run_chunk(e, w, at, n);
    return 1;
}

static void host_submit(struct hrd_engine *base, struct hrd_work *w)
{
    struct host_engine *e = (struct host_engine *)base;
    uint64_t in = work_in_size(w), out = work_out_size(w);
    w->next = NULL;
    if (traffic(w, w->n) <= INLINE_BYTES) {
        run_range(w, 0, w->n);
        if (e->inline_last)
            e->inline_last->next = w;
        else
            e->inline_first = w;
        e->inline_last = w;
        return;
    }
    uint64_t size = in > out ? in : out, bytes = e->chunk_bytes;
    bool hot = is_hot(e);
    if (hot) { /* all threads at once, and as many pieces as there are threads */
        uint64_t share = w->n * size / e->nthreads;
        share = share > PIECE_BYTES ? share : PIECE_BYTES;
        bytes = share < bytes ? share : bytes;
    }
    uint64_t chunk = bytes / size / 64 * 64;
    w->chunk = chunk ? chunk : 64;
    w->next_chunk = 0;
    atomic_store_explicit(&w->left, w->n, memory_order_relaxed);
    pthread_mutex_lock(&e->lock);
    atomic_fetch_add_explicit(&e->queued, traffic(w, w->n), memory_order_relaxed);
    if (e->last)
        e->last->next = w;
    else
        e->first = w;
    e->last = w;
    unlock_and_wake(e, hot);
}

static void wake_in_time(struct host_engine *e)
{
    if (atomic_load_explicit(&e->queued, memory_order_relaxed) == 0) {
        e->looks = 0;
        return;
    }
    if (++e->looks < LOOKS_PER_WAKE)
        return;
    e->looks = 0;
    pthread_cond_signal(&e->more);
}

static unsigned host_poll(struct hrd_engine *base)
{
    struct host_engine *e = (struct host_engine *)base;
    unsigned count = 0;
    wake_in_time(e);
    struct hrd_work *w = e->inline_first;
    e->inline_first = e->inline_last = NULL;
    while (w) {
        struct hrd_work *next = w->next;
        w->done(w, NULL);
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
        ordered->done(ordered, NULL);
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
    atomic_store_explicit(&e->hot_until, 0, memory_order_relaxed);
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

static const char *host_refuses(struct hrd_engine *base, const struct hrd_engine_ask *ask)
{
    (void)base;
    return ask->gpus ? "a processor cannot read GPU memory" : NULL;
}

static uint64_t host_waited(struct hrd_engine *base, uint64_t gpus)
{
    (void)base;
    (void)gpus;
    return 0;
}

void hrd_engine_host_expect(struct hrd_engine *host, bool more)
{
    struct host_engine *e = (struct host_engine *)host;
    if (e->nthreads < SPINNERS)
        return;
    uint64_t until = more ? UINT64_MAX : now_ns() + LINGER_NS;
    atomic_store_explicit(&e->hot_until, until, memory_order_relaxed);
    if (!more || !is_hot(e))
        return;
    pthread_mutex_lock(&e->lock);
    bool asleep = e->idle > 0;
    pthread_mutex_unlock(&e->lock);
    if (asleep)
        pthread_cond_broadcast(&e->more);
}

static const struct hrd_engine_table host_table = {
    .name = "host",
    .refuses = host_refuses,
    .waited = host_waited,
    .submit = host_submit,
    .poll = host_poll,
    .arm = host_arm,
    .help = host_help,
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
    /* Threads that look for work meet at the lock, and hold it shorter than a sleep takes. */
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ADAPTIVE_NP);
    pthread_mutex_init(&e->lock, &attr);
    pthread_mutexattr_destroy(&attr);
    pthread_cond_init(&e->more, NULL);
    int err = 0;
    while (e->nthreads < threads &&
           (err = hrd_thread_start(&e->thread[e->nthreads], reduce_thread, e, "hrd-reduce")) == 0)
        e->nthreads++;
    if (err) {
        host_free(&e->base);
        errno = err;
        return NULL;
    }
    return &e->base;
}
