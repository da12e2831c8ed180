/* SPDX-License-Identifier: MIT */
/* Streams as queues, their order among each other, capture, events. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <signal.h>
#include <time.h>

#include "tests/sim/fake_cuda/fake.h"

/* A hardware queue: items in order, one thread. */
struct fake_queue {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* something was queued, or finished */
    struct fake_item *head, **tail;
    bool ended; /* its stream is gone; the thread ends when it is empty */
    bool shared;
};

static struct hrg_stream_st *streams; /* under fake_lock */
static struct hrg_stream_st *legacy[FAKE_MAX_DEVICES];
static struct fake_queue *shared[64];
static unsigned created;
static FAKE_THREAD struct hrg_stream_st *per_thread[FAKE_MAX_DEVICES];
static FAKE_THREAD int thread_mode = HRG_CAPTURE_MODE_GLOBAL;

/* ---- queues -------------------------------------------------------------------------------------------------------- */

void fake_wait_finished(struct hrg_stream_st *s, uint64_t seq)
{
    while (atomic_load(&s->finished) < seq) {
        struct timespec ts = {.tv_nsec = 20000};
        nanosleep(&ts, NULL);
    }
}

static void *work_off(void *arg)
{
    struct fake_queue *q = arg;
    prctl(PR_SET_NAME, "fake-cuda");
    for (;;) {
        pthread_mutex_lock(&q->lock);
        while (q->head == NULL && !q->ended)
            pthread_cond_wait(&q->changed, &q->lock);
        struct fake_item *item = q->head;
        if (item != NULL) {
            q->head = item->next;
            if (q->head == NULL)
                q->tail = &q->head;
        }
        pthread_mutex_unlock(&q->lock);
        if (item == NULL)
            break;
        for (unsigned i = 0; i < item->ndeps; i++)
            fake_wait_finished(item->deps[i].stream, item->deps[i].seq);
        fake_run_item(item);
        struct hrg_stream_st *s = item->stream;
        free(item->args);
        free(item);
        atomic_fetch_add(&s->finished, 1);
    }
    pthread_mutex_destroy(&q->lock);
    pthread_cond_destroy(&q->changed);
    free(q);
    return NULL;
}

static struct fake_queue *queue_new(void)
{
    struct fake_queue *q = fake_zalloc(sizeof(*q));
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->changed, NULL);
    q->tail = &q->head;
    /* Signals are the program's. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pthread_t t;
    if (pthread_create(&t, NULL, work_off, q) != 0)
        fake_die("no thread for a stream");
    pthread_detach(t);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return q;
}

/* Under fake_lock. */
static struct fake_queue *queue_for_stream(void)
{
    if (fake.connections == 0)
        return queue_new();
    unsigned n = fake.connections < 64 ? fake.connections : 64;
    struct fake_queue **q = &shared[created++ % n];
    if (*q == NULL) {
        *q = queue_new();
        (*q)->shared = true;
    }
    return *q;
}

static struct hrg_stream_st *stream_new(struct hrg_ctx_st *ctx, bool blocking, bool is_legacy)
{
    struct hrg_stream_st *s = fake_zalloc(sizeof(*s));
    s->ctx = ctx;
    s->blocking = blocking;
    s->legacy = is_legacy;
    s->queue = queue_for_stream();
    s->next = streams;
    streams = s;
    return s;
}

struct hrg_stream_st *fake_stream(hrg_stream stream, hrg_result *r)
{
    *r = HRG_SUCCESS;
    struct hrg_ctx_st *ctx = fake_current();
    struct hrg_stream_st *s = NULL;
    pthread_mutex_lock(&fake_lock);
    if (stream == NULL || stream == HRG_STREAM_LEGACY) {
        if (ctx != NULL && legacy[ctx->index] == NULL)
            legacy[ctx->index] = stream_new(ctx, false, true);
        s = ctx != NULL ? legacy[ctx->index] : NULL;
        *r = s != NULL ? HRG_SUCCESS : HRG_ERROR_INVALID_CONTEXT;
    } else if (stream == HRG_STREAM_PER_THREAD) {
        if (ctx != NULL && per_thread[ctx->index] == NULL)
            per_thread[ctx->index] = stream_new(ctx, true, false);
        s = ctx != NULL ? per_thread[ctx->index] : NULL;
        *r = s != NULL ? HRG_SUCCESS : HRG_ERROR_INVALID_CONTEXT;
    } else {
        for (s = streams; s != NULL && s != stream; s = s->next)
            ;
        *r = s != NULL ? HRG_SUCCESS : HRG_ERROR_INVALID_HANDLE;
    }
    pthread_mutex_unlock(&fake_lock);
    return s;
}

struct fake_item *fake_item_new(const char *name, struct hrg_stream_st *s, enum fake_work work)
{
    struct fake_item *item = fake_zalloc(sizeof(*item));
    item->name = name;
    item->stream = s;
    item->work = work;
    return item;
}

/* Under fake_lock. */
static void depend(struct fake_item *item, struct hrg_stream_st *on)
{
    uint64_t seq = atomic_load(&on->posted);
    if (on == item->stream || atomic_load(&on->finished) >= seq)
        return;
    if (item->ndeps == sizeof(item->deps) / sizeof(item->deps[0]))
        fake_die("the legacy stream waits for more than 64 streams");
    item->deps[item->ndeps++] = (struct fake_dep){.stream = on, .seq = seq};
}

/* Under fake_lock: a blocking stream of the context captures, which the legacy stream would have to wait for. */
static bool legacy_blocked(const struct hrg_stream_st *s)
{
    if (!s->legacy)
        return false;
    for (const struct hrg_stream_st *o = streams; o != NULL; o = o->next)
        if (o->ctx == s->ctx && o->blocking && o->capture != HRG_CAPTURE_NONE)
            return true;
    return false;
}

hrg_result fake_post(struct fake_item *item)
{
    struct hrg_stream_st *s = item->stream;
    hrg_result r = HRG_SUCCESS;
    pthread_mutex_lock(&fake_lock);
    if (s->capture != HRG_CAPTURE_NONE) {
        r = s->capture == HRG_CAPTURE_ACTIVE ? HRG_SUCCESS : HRG_ERROR_STREAM_CAPTURE_INVALIDATED;
        s->captured += r == HRG_SUCCESS;
    } else if (legacy_blocked(s)) {
        r = HRG_ERROR_STREAM_CAPTURE_IMPLICIT;
        for (struct hrg_stream_st *o = streams; o != NULL; o = o->next)
            if (o->ctx == s->ctx && o->blocking && o->capture != HRG_CAPTURE_NONE)
                o->capture = HRG_CAPTURE_INVALIDATED;
    } else {
        if (s->legacy)
            for (struct hrg_stream_st *o = streams; o != NULL; o = o->next)
                if (o->ctx == s->ctx && o->blocking)
                    depend(item, o);
        if (s->blocking && legacy[s->ctx->index] != NULL)
            depend(item, legacy[s->ctx->index]);
        uint64_t seq = atomic_fetch_add(&s->posted, 1) + 1;
        if (item->work == FAKE_MARK) {
            item->event->stream = s;
            item->event->seq = seq;
        }
        struct fake_queue *q = s->queue;
        pthread_mutex_lock(&q->lock);
        *q->tail = item;
        q->tail = &item->next;
        pthread_cond_signal(&q->changed);
        pthread_mutex_unlock(&q->lock);
        item = NULL;
    }
    pthread_mutex_unlock(&fake_lock);
    if (item != NULL) {
        free(item->args);
        free(item);
    }
    return r;
}

/* ---- capture ------------------------------------------------------------------------------------------------------- */

bool fake_capture_forbids(void)
{
    if (thread_mode == HRG_CAPTURE_MODE_RELAXED)
        return false;
    bool hit = false;
    pthread_mutex_lock(&fake_lock);
    for (struct hrg_stream_st *s = streams; s != NULL; s = s->next) {
        bool mine = pthread_equal(s->capture_thread, pthread_self());
        bool counts = s->capture_mode == HRG_CAPTURE_MODE_GLOBAL
                          ? mine || thread_mode == HRG_CAPTURE_MODE_GLOBAL
                          : s->capture_mode == HRG_CAPTURE_MODE_THREAD_LOCAL && mine;
        if (s->capture != HRG_CAPTURE_NONE && counts) {
            s->capture = HRG_CAPTURE_INVALIDATED;
            hit = true;
        }
    }
    pthread_mutex_unlock(&fake_lock);
    return hit;
}

FAKE_API hrg_result cuThreadExchangeStreamCaptureMode(int *mode)
{
    FAKE_ENTER("ThreadExchangeStreamCaptureMode", 0);
    int old = thread_mode;
    thread_mode = *mode;
    *mode = old;
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuStreamIsCapturing(hrg_stream stream, int *status)
{
    FAKE_ENTER("StreamIsCapturing", 0);
    hrg_result r;
    struct hrg_stream_st *s = fake_stream(stream, &r);
    if (s == NULL)
        return r;
    pthread_mutex_lock(&fake_lock);
    *status = s->capture;
    if (legacy_blocked(s))
        r = HRG_ERROR_STREAM_CAPTURE_IMPLICIT;
    pthread_mutex_unlock(&fake_lock);
    return r;
}

FAKE_API hrg_result cuStreamBeginCapture_v2(hrg_stream stream, int mode)
{
    FAKE_ENTER("StreamBeginCapture", 0);
    hrg_result r;
    struct hrg_stream_st *s = fake_stream(stream, &r);
    if (s == NULL || s->legacy)
        return s == NULL ? r : HRG_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&fake_lock);
    s->capture = HRG_CAPTURE_ACTIVE;
    s->capture_mode = mode;
    s->capture_thread = pthread_self();
    s->captured = 0;
    pthread_mutex_unlock(&fake_lock);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuStreamEndCapture(hrg_stream stream, hrg_graph *graph)
{
    FAKE_ENTER("StreamEndCapture", 0);
    hrg_result r;
    struct hrg_stream_st *s = fake_stream(stream, &r);
    if (s == NULL)
        return r;
    pthread_mutex_lock(&fake_lock);
    int capture = s->capture;
    unsigned nodes = s->captured;
    s->capture = HRG_CAPTURE_NONE;
    pthread_mutex_unlock(&fake_lock);
    *graph = NULL;
    if (capture == HRG_CAPTURE_NONE)
        return HRG_ERROR_INVALID_VALUE;
    if (capture == HRG_CAPTURE_INVALIDATED)
        return HRG_ERROR_STREAM_CAPTURE_INVALIDATED;
    *graph = fake_zalloc(sizeof(**graph));
    (*graph)->nodes = nodes;
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuGraphDestroy(hrg_graph graph)
{
    FAKE_ENTER("GraphDestroy", 0);
    free(graph);
    return HRG_SUCCESS;
}

/* ---- streams ------------------------------------------------------------------------------------------------------- */

FAKE_API hrg_result cuStreamCreateWithPriority(hrg_stream *stream, unsigned flags, int priority)
{
    FAKE_ENTER("StreamCreateWithPriority", FAKE_UNSAFE);
    (void)priority;
    struct hrg_ctx_st *ctx = fake_current();
    if (ctx == NULL)
        return HRG_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&fake_lock);
    *stream = stream_new(ctx, !(flags & HRG_STREAM_NON_BLOCKING), false);
    pthread_mutex_unlock(&fake_lock);
    return HRG_SUCCESS;
}

/* Its work goes on; the object lives as long as that (here: for ever, which tests can afford). */
FAKE_API hrg_result cuStreamDestroy_v2(hrg_stream stream)
{
    FAKE_ENTER("StreamDestroy", 0);
    pthread_mutex_lock(&fake_lock);
    struct hrg_stream_st **p = &streams;
    while (*p != NULL && *p != stream)
        p = &(*p)->next;
    struct hrg_stream_st *s = *p;
    if (s != NULL) {
        *p = s->next;
        pthread_mutex_lock(&s->queue->lock);
        if (!s->queue->shared)
            s->queue->ended = true;
        pthread_cond_signal(&s->queue->changed);
        pthread_mutex_unlock(&s->queue->lock);
        static struct hrg_stream_st *gone;
        s->next = gone;
        gone = s;
    }
    pthread_mutex_unlock(&fake_lock);
    return s != NULL ? HRG_SUCCESS : HRG_ERROR_INVALID_HANDLE;
}

FAKE_API hrg_result cuStreamGetCtx(hrg_stream stream, hrg_ctx *ctx)
{
    FAKE_ENTER("StreamGetCtx", 0);
    hrg_result r;
    struct hrg_stream_st *s = fake_stream(stream, &r);
    if (s != NULL)
        *ctx = s->ctx;
    return r;
}

FAKE_API hrg_result cuStreamSynchronize(hrg_stream stream)
{
    FAKE_ENTER("StreamSynchronize", FAKE_UNSAFE);
    hrg_result r;
    struct hrg_stream_st *s = fake_stream(stream, &r);
    if (s == NULL)
        return r;
    uint64_t seq = atomic_load(&s->posted);
    if (s->legacy) { /* behind everything that blocking streams were given */
        struct fake_item *item = fake_item_new("StreamSynchronize", s, FAKE_NOTHING);
        r = fake_post(item);
        if (r != HRG_SUCCESS)
            return r;
        seq = atomic_load(&s->posted);
    }
    fake_wait_finished(s, seq);
    return fake_enter("StreamSynchronized", 0);
}

FAKE_API hrg_result cuStreamQuery(hrg_stream stream)
{
    FAKE_ENTER("StreamQuery", FAKE_UNSAFE);
    hrg_result r;
    struct hrg_stream_st *s = fake_stream(stream, &r);
    if (s == NULL)
        return r;
    return atomic_load(&s->finished) >= atomic_load(&s->posted) ? HRG_SUCCESS : HRG_ERROR_NOT_READY;
}

FAKE_API hrg_result cuCtxSynchronize(void)
{
    FAKE_ENTER("CtxSynchronize", FAKE_UNSAFE);
    struct hrg_ctx_st *ctx = fake_current();
    if (ctx == NULL)
        return HRG_ERROR_INVALID_CONTEXT;
    struct fake_dep wait[256];
    unsigned n = 0;
    pthread_mutex_lock(&fake_lock);
    for (struct hrg_stream_st *s = streams; s != NULL && n < 256; s = s->next)
        if (s->ctx == ctx)
            wait[n++] = (struct fake_dep){.stream = s, .seq = atomic_load(&s->posted)};
    pthread_mutex_unlock(&fake_lock);
    while (n > 0) {
        n--;
        fake_wait_finished(wait[n].stream, wait[n].seq);
    }
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuStreamWaitEvent(hrg_stream stream, hrg_event event, unsigned flags)
{
    FAKE_ENTER("StreamWaitEvent", 0);
    hrg_result r;
    struct hrg_stream_st *s = fake_stream(stream, &r);
    if (s == NULL || event == NULL || flags != 0)
        return s == NULL ? r : HRG_ERROR_INVALID_VALUE;
    if (event->stream == NULL)
        return HRG_SUCCESS;
    struct fake_item *item = fake_item_new("StreamWaitEvent", s, FAKE_NOTHING);
    item->deps[0] = (struct fake_dep){.stream = event->stream, .seq = event->seq};
    item->ndeps = event->stream != s;
    return fake_post(item);
}

/* ---- events -------------------------------------------------------------------------------------------------------- */

FAKE_API hrg_result cuEventCreate(hrg_event *event, unsigned flags)
{
    FAKE_ENTER("EventCreate", FAKE_UNSAFE);
    if (fake_current() == NULL)
        return HRG_ERROR_INVALID_CONTEXT;
    *event = fake_zalloc(sizeof(**event));
    (*event)->timing = !(flags & HRG_EVENT_DISABLE_TIMING);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuEventDestroy_v2(hrg_event event)
{
    FAKE_ENTER("EventDestroy", 0);
    static struct hrg_event_st *gone;
    if (event == NULL)
        return HRG_ERROR_INVALID_HANDLE;
    if (event->stream == NULL || atomic_load(&event->stream->finished) >= event->seq) {
        free(event);
        return HRG_SUCCESS;
    }
    /* Work will still mark it. */
    pthread_mutex_lock(&fake_lock);
    event->next = gone;
    gone = event;
    pthread_mutex_unlock(&fake_lock);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuEventRecord(hrg_event event, hrg_stream stream)
{
    FAKE_ENTER("EventRecord", 0);
    hrg_result r;
    struct hrg_stream_st *s = fake_stream(stream, &r);
    if (s == NULL || event == NULL)
        return s == NULL ? r : HRG_ERROR_INVALID_HANDLE;
    struct fake_item *item = fake_item_new("EventRecord", s, FAKE_MARK);
    item->event = event;
    return fake_post(item);
}

FAKE_API hrg_result cuEventQuery(hrg_event event)
{
    FAKE_ENTER("EventQuery", FAKE_UNSAFE);
    if (event == NULL)
        return HRG_ERROR_INVALID_HANDLE;
    bool done = event->stream == NULL || atomic_load(&event->stream->finished) >= event->seq;
    return done ? HRG_SUCCESS : HRG_ERROR_NOT_READY;
}

FAKE_API hrg_result cuEventSynchronize(hrg_event event)
{
    FAKE_ENTER("EventSynchronize", FAKE_UNSAFE);
    if (event == NULL)
        return HRG_ERROR_INVALID_HANDLE;
    if (event->stream != NULL)
        fake_wait_finished(event->stream, event->seq);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuEventElapsedTime(float *ms, hrg_event start, hrg_event end)
{
    FAKE_ENTER("EventElapsedTime", 0);
    if (start == NULL || end == NULL || !start->timing || !end->timing)
        return HRG_ERROR_INVALID_HANDLE;
    if (cuEventQuery(start) != HRG_SUCCESS || cuEventQuery(end) != HRG_SUCCESS)
        return HRG_ERROR_NOT_READY;
    *ms = (float)((double)(atomic_load(&end->ns) - atomic_load(&start->ns)) / 1e6);
    return HRG_SUCCESS;
}
