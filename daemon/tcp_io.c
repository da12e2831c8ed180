/* SPDX-License-Identifier: MIT */
/*
 * The I/O threads of the TCP transport. Each drives the streams that were given to it, with an epoll set of its own and
 * calls that do not block, so that a peer that stands still holds up nobody else. How a stream goes to and fro between its
 * thread and the agent: tcp_int.h.
 */
#include "daemon/clock.h"
#include "daemon/tcp_int.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/thread.h"

#define MAX_EVENTS 64
/* How long the agent waits for a thread to let go of a stream: tenths of a second in which this process runs. A thread is
   never further away than one system call, so this is for what cannot be. */
#define RELEASE_TICKS 300u
#define TICK_NS 100000000

struct io_thread {
    struct hrd_tcp_io *io;
    pthread_t thread;
    int epfd;                           /* sockets, edge-triggered, and wake */
    int wake;                           /* eventfd */
    unsigned nstreams;                  /* under io->lock */
    _Atomic(struct tcp_stream *) inbox; /* streams that the agent did something with, newest first */
    _Atomic bool asleep;
    struct tcp_stream *active, *active_last; /* the thread's: streams whose bytes can move, in turn */
};

struct hrd_tcp_io {
    uint64_t spin_ns;
    _Atomic bool stop;
    pthread_mutex_t lock;
    pthread_cond_t left; /* a thread let go of a stream */
    unsigned nthreads;
    struct io_thread thread[];
};

static void ring(int fd)
{
    uint64_t one = 1;
    while (write(fd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
}

/* ---- lists that one side pushes to and the other takes whole --------------------------------------------------- */

static void push_tx(_Atomic(struct hrd_tx *) *list, struct hrd_tx *tx)
{
    struct hrd_tx *top = atomic_load_explicit(list, memory_order_relaxed);
    do
        tx->next = top;
    while (
        !atomic_compare_exchange_weak_explicit(list, &top, tx, memory_order_release, memory_order_relaxed));
}

/* Appends what is in the list to q, oldest first. */
static void take_txs(_Atomic(struct hrd_tx *) *list, struct tcp_queue *q)
{
    struct hrd_tx *ordered = NULL;
    struct hrd_tx *tx = atomic_exchange_explicit(list, NULL, memory_order_acquire);
    while (tx) {
        struct hrd_tx *next = tx->next;
        tx->next = ordered;
        ordered = tx;
        tx = next;
    }
    while (ordered) {
        struct hrd_tx *next = ordered->next;
        hrd_tcp_queue_add(q, ordered);
        ordered = next;
    }
}

/* Tells the thread that something of the stream is new. Seq_cst with the thread's announcement of its sleep: either it sees
   the stream, or this sees that it sleeps. */
static void post(struct tcp_stream *s)
{
    struct tcp_port *p = &s->port;
    struct io_thread *t = p->thread;
    if (!atomic_exchange(&p->posted, true)) {
        struct tcp_stream *top = atomic_load(&t->inbox);
        do
            p->next_in = top;
        while (!atomic_compare_exchange_weak(&t->inbox, &top, s));
    }
    if (atomic_load(&t->asleep) && atomic_exchange(&t->asleep, false))
        ring(t->wake);
}

/* Tells the agent; likewise. */
static void report(struct tcp_stream *s)
{
    struct tcp_port *p = &s->port;
    struct tcp_link *l = s->link;
    if (!atomic_exchange(&p->reported, true)) {
        struct tcp_stream *top = atomic_load(&l->out);
        do
            p->next_out = top;
        while (!atomic_compare_exchange_weak(&l->out, &top, s));
    }
    if (atomic_load(&l->armed) && atomic_exchange(&l->armed, false))
        ring(l->wake.fd);
}

/* ---- the threads ---------------------------------------------------------------------------------------------- */

static bool runnable(const struct tcp_port *p)
{
    return !p->dead && ((p->writable && p->tx.first) || (p->readable && p->has_rx));
}

static void activate(struct io_thread *t, struct tcp_stream *s)
{
    if (s->port.active || !runnable(&s->port))
        return;
    s->port.active = true;
    s->port.next_active = NULL;
    if (t->active_last)
        t->active_last->port.next_active = s;
    else
        t->active = s;
    t->active_last = s;
}

static void deactivate(struct io_thread *t, struct tcp_stream *s)
{
    struct tcp_stream *before = NULL;
    for (struct tcp_stream *x = t->active; x; before = x, x = x->port.next_active) {
        if (x != s)
            continue;
        if (before)
            before->port.next_active = s->port.next_active;
        else
            t->active = s->port.next_active;
        if (t->active_last == s)
            t->active_last = before;
        s->port.active = false;
        return;
    }
}

static void fail(struct tcp_stream *s, enum tcp_fault fault, int err)
{
    s->port.dead = true;
    s->port.fault_errno = err;
    atomic_store(&s->port.fault, (int)fault);
    report(s);
}

static void move_out(struct tcp_stream *s)
{
    struct tcp_port *p = &s->port;
    struct tcp_queue sent = {NULL, NULL};
    uint64_t moved = 0;
    while (p->tx.first && moved < TCP_TURN_BYTES) {
        ssize_t n = hrd_tcp_transmit(s->pollable.fd, &p->tx, &sent);
        if (n == -EAGAIN) {
            p->writable = false;
            break;
        }
        if (n < 0) {
            fail(s, TCP_SEND_FAILED, (int)-n);
            break;
        }
        moved += (uint64_t)n;
    }
    if (!sent.first)
        return;
    for (struct hrd_tx *tx = hrd_tcp_queue_take(&sent); tx; tx = hrd_tcp_queue_take(&sent))
        push_tx(&p->tx_out, tx);
    report(s);
}

/* What comes next is the agent's to decide. */
static bool for_agent(const struct tcp_rx *rx)
{
    return rx->in_frame ? rx->got == rx->frame.len : rx->have >= sizeof(rx->frame);
}

static void move_in(struct tcp_stream *s)
{
    struct tcp_port *p = &s->port;
    uint64_t moved = 0;
    while (moved < TCP_TURN_BYTES) {
        bool drained;
        ssize_t n = hrd_tcp_receive(s->pollable.fd, &s->rx, &drained);
        if (n == -EAGAIN) {
            p->readable = false;
            return;
        }
        if (n <= 0) {
            fail(s, n ? TCP_RECEIVE_FAILED : TCP_CLOSED, (int)-n);
            return;
        }
        moved += (uint64_t)n;
        if (for_agent(&s->rx)) {
            p->has_rx = false;
            atomic_store(&p->rx_out, true);
            report(s);
            return;
        }
    }
}

static void leave(struct io_thread *t, struct tcp_stream *s)
{
    struct hrd_tcp_io *io = t->io;
    deactivate(t, s);
    (void)epoll_ctl(t->epfd, EPOLL_CTL_DEL, s->pollable.fd, NULL);
    pthread_mutex_lock(&io->lock);
    t->nstreams--;
    s->link->driven--; /* when it is 0 the agent frees the link */
    pthread_cond_broadcast(&io->left);
    pthread_mutex_unlock(&io->lock);
}

/* What the agent posted. */
static bool take_inbox(struct io_thread *t)
{
    if (!atomic_load_explicit(&t->inbox, memory_order_relaxed))
        return false;
    struct tcp_stream *s = atomic_exchange(&t->inbox, NULL);
    while (s) {
        struct tcp_port *p = &s->port;
        struct tcp_stream *next = p->next_in;
        atomic_exchange(&p->posted,
                        false); /* before a look at what was posted: what comes later posts again */
        take_txs(&p->tx_in, &p->tx);
        if (atomic_exchange(&p->rx_in, false))
            p->has_rx = true;
        /* Only with `posted` in hand, and for ever: the agent's post() then pushes nothing that it may free. Where it was
           faster the stream is in the inbox once more, and leaves then. */
        if (!atomic_load(&p->leave))
            activate(t, s);
        else if (!atomic_exchange(&p->posted, true))
            leave(t, s);
        s = next;
    }
    return true;
}

/* Each active stream once. */
static void move_all(struct io_thread *t)
{
    struct tcp_stream *s = t->active;
    t->active = t->active_last = NULL;
    while (s) {
        struct tcp_stream *next = s->port.next_active;
        s->port.active = false;
        if (s->port.writable && s->port.tx.first)
            move_out(s);
        if (!s->port.dead && s->port.readable && s->port.has_rx)
            move_in(s);
        activate(t, s);
        s = next;
    }
}

static bool look(struct io_thread *t, int timeout_ms)
{
    struct epoll_event ev[MAX_EVENTS];
    int n = epoll_wait(t->epfd, ev, MAX_EVENTS, timeout_ms);
    for (int i = 0; i < n; i++) {
        struct tcp_stream *s = ev[i].data.ptr;
        if (!s) {
            uint64_t count;
            while (read(t->wake, &count, sizeof(count)) < 0 && errno == EINTR)
                ;
            continue;
        }
        if (ev[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))
            s->port.readable = true;
        if (ev[i].events & (EPOLLOUT | EPOLLHUP | EPOLLERR))
            s->port.writable = true;
        activate(t, s);
    }
    return n > 0;
}

static void sleep_until_posted(struct io_thread *t)
{
    atomic_store(&t->asleep, true);
    if (!atomic_load(&t->inbox) && !atomic_load(&t->io->stop))
        look(t, -1);
    atomic_store(&t->asleep, false);
}

static void *io_main(void *arg)
{
    struct io_thread *t = arg;
    uint64_t last = now_ns();
    while (!atomic_load_explicit(&t->io->stop, memory_order_relaxed)) {
        bool any = take_inbox(t);
        any = t->active != NULL || any;
        move_all(t);
        any = look(t, 0) || any;
        uint64_t now = now_ns();
        if (any) {
            last = now;
            continue;
        }
        if (now - last < t->io->spin_ns) {
            sched_yield(); /* whoever has what is waited for may need this core */
            continue;
        }
        sleep_until_posted(t);
        last = now_ns();
    }
    return NULL;
}

/* ---- the agent's side ------------------------------------------------------------------------------------------ */

int hrd_tcp_io_drive(struct hrd_tcp_io *io, struct tcp_stream *s)
{
    struct tcp_link *l = s->link;
    pthread_mutex_lock(&io->lock);
    struct io_thread *t = &io->thread[0];
    for (unsigned i = 1; i < io->nthreads; i++)
        if (io->thread[i].nstreams < t->nstreams)
            t = &io->thread[i];
    t->nstreams++;
    l->driven++;
    pthread_mutex_unlock(&io->lock);
    s->port.thread = t;
    struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = s};
    if (epoll_ctl(t->epfd, EPOLL_CTL_ADD, s->pollable.fd, &ev)) {
        int err = errno;
        s->port.thread = NULL;
        pthread_mutex_lock(&io->lock);
        t->nstreams--;
        l->driven--;
        pthread_mutex_unlock(&io->lock);
        return -err;
    }
    return 0;
}

void hrd_tcp_io_receive(struct tcp_stream *s)
{
    atomic_store(&s->port.rx_in, true);
    post(s);
}

void hrd_tcp_io_send(struct tcp_stream *s)
{
    if (!s->tx.first)
        return;
    for (struct hrd_tx *tx = hrd_tcp_queue_take(&s->tx); tx; tx = hrd_tcp_queue_take(&s->tx))
        push_tx(&s->port.tx_in, tx);
    post(s);
}

struct tcp_stream *hrd_tcp_io_news(struct tcp_link *l)
{
    if (!atomic_load_explicit(&l->out, memory_order_relaxed))
        return NULL;
    struct tcp_stream *s = atomic_exchange(&l->out, NULL), *ordered = NULL;
    while (s) {
        struct tcp_stream *next = s->port.next_out;
        s->port.next_out = ordered;
        ordered = s;
        s = next;
    }
    return ordered;
}

bool hrd_tcp_io_take(struct tcp_stream *s, struct tcp_queue *sent)
{
    atomic_exchange(&s->port.reported, false); /* before a look, as in take_inbox() */
    take_txs(&s->port.tx_out, sent);
    return atomic_exchange(&s->port.rx_out, false);
}

void hrd_tcp_io_release(struct tcp_link *l)
{
    struct hrd_tcp_io *io = l->io;
    for (unsigned i = 0; i < l->base.nstreams; i++) {
        struct tcp_port *p = &l->stream[i].port;
        if (!p->thread)
            continue;
        atomic_store(&p->leave, true);
        post(&l->stream[i]);
    }
    pthread_mutex_lock(&io->lock);
    for (unsigned ticks = 0; l->driven > 0 && ticks < RELEASE_TICKS;) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += TICK_NS;
        if (until.tv_nsec >= 1000000000) {
            until.tv_nsec -= 1000000000;
            until.tv_sec++;
        }
        if (pthread_cond_timedwait(&io->left, &io->lock, &until) == ETIMEDOUT)
            ticks++;
    }
    unsigned driven = l->driven;
    pthread_mutex_unlock(&io->lock);
    if (driven > 0) {
        hrd_error("I/O threads hold %u streams of %s for %u s; aborting the daemon, because they could still "
                  "write into memory that is another's by then",
                  driven, l->base.detail, RELEASE_TICKS / 10);
        abort();
    }
    for (unsigned i = 0; i < l->base.nstreams; i++) {
        struct tcp_port *p = &l->stream[i].port;
        take_txs(&p->tx_in, &p->tx);
        p->thread = NULL;
    }
}

/* ---- start and stop ------------------------------------------------------------------------------------------- */

static void thread_close(struct io_thread *t)
{
    if (t->epfd >= 0)
        close(t->epfd);
    if (t->wake >= 0)
        close(t->wake);
}

static int thread_open(struct hrd_tcp_io *io, struct io_thread *t)
{
    struct epoll_event ev = {.events = EPOLLIN};
    t->io = io;
    t->wake = -1;
    t->epfd = epoll_create1(EPOLL_CLOEXEC);
    if (t->epfd >= 0)
        t->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int err = 0;
    if (t->wake < 0 || epoll_ctl(t->epfd, EPOLL_CTL_ADD, t->wake, &ev))
        err = errno;
    else
        err = hrd_thread_start(&t->thread, io_main, t, "hrd-io");
    if (err)
        thread_close(t);
    return err;
}

struct hrd_tcp_io *hrd_tcp_io_new(unsigned threads, unsigned spin_us)
{
    struct hrd_tcp_io *io = calloc(1, sizeof(*io) + threads * sizeof(io->thread[0]));
    if (!io)
        return NULL;
    io->spin_ns = spin_us * UINT64_C(1000);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&io->left, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&io->lock, NULL);
    int err = 0;
    for (; io->nthreads < threads && !err; io->nthreads += !err)
        err = thread_open(io, &io->thread[io->nthreads]);
    if (!err)
        return io;
    hrd_tcp_io_free(io);
    errno = err;
    return NULL;
}

void hrd_tcp_io_free(struct hrd_tcp_io *io)
{
    if (!io)
        return;
    atomic_store(&io->stop, true);
    for (unsigned i = 0; i < io->nthreads; i++) {
        ring(io->thread[i].wake);
        pthread_join(io->thread[i].thread, NULL);
        thread_close(&io->thread[i]);
    }
    pthread_cond_destroy(&io->left);
    pthread_mutex_destroy(&io->lock);
    free(io);
}
