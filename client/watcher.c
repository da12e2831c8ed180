/* SPDX-License-Identifier: MIT */
/*
 * The one thread of a context. It receives the daemon's replies, notices the daemon's death (socket, pidfd)
 * and standstill (heartbeat), and moves the staged ops of communicators that nobody waits on. All signals are
 * blocked on it.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include "client/comm.h"
#include "client/context.h"
#include "client/futex.h"
#include "client/gpu.h"
#include "proto/fdpass.h"
#include "proto/status.h"

#define TICK_NS HCL_SEC
#define STALE_TICKS 10u
#define POISON_NS (100 * HCL_MS)
#define SPOIL_NS HCL_SEC /* what a thread that posts may keep the window from being looked at */
/* Between looks at staged ops: soon after one moved, else later. */
#define FEED_FAST_NS (HCL_MS / 5)
#define FEED_SLOW_NS (HCL_MS)

static void lose_socket(struct hcl_context *ctx, const char *why)
{
    hcl_context_lose(ctx, HRP_DAEMON_LOST,
                     "lost the hreduced daemon at %s: %s. Make new communicators when it is back",
                     ctx->socket_path, why);
}

static void receive(struct hcl_context *ctx)
{
    for (;;) {
        int fds[HRP_MAX_FDS], nfds = 0;
        long len = hrp_recv_fds(ctx->sock, ctx->receive_buf, HRP_MSG_MAX, fds, HRP_MAX_FDS, &nfds);
        if (len > 0) {
            hcl_dispatch(ctx, ctx->receive_buf, (size_t)len, fds, nfds);
        } else if (len == -EAGAIN) {
            return;
        } else if (len == 0) {
            lose_socket(ctx, "it ended, or closed this session");
        } else if (len == -EMFILE) {
            hcl_context_lose(ctx, HRP_RESOURCE,
                             "no file descriptor is free to take memory from the hreduced daemon; raise the "
                             "descriptor limit (ulimit -n). The session is closed");
        } else {
            lose_socket(ctx, strerror((int)-len));
        }
        if (hcl_context_lost(ctx))
            return;
    }
}

struct ref {
    hclient_comm_t handle;
};

/* The communicators of the context as counted references, so that work on them needs no lock. */
static size_t take_comms(struct hcl_context *ctx, struct ref **out)
{
    size_t n = 0, have = 0;
    pthread_mutex_lock(&ctx->lock);
    for (struct hcl_comm *c = ctx->comms; c != NULL; c = c->next)
        n++;
    struct ref *v = n > 0 ? malloc(n * sizeof(*v)) : NULL;
    if (v != NULL)
        for (struct hcl_comm *c = ctx->comms; c != NULL; c = c->next)
            if (hcl_handle_get(c->handle) != NULL)
                v[have++].handle = c->handle;
    pthread_mutex_unlock(&ctx->lock);
    *out = v;
    return have;
}

/* One look at every communicator that nobody waits on. Returns the time until the next, 0: not needed. */
static uint64_t feed(struct hcl_context *ctx, const struct ref *v, size_t n)
{
    uint64_t next = 0;
    for (size_t i = 0; i < n && !hcl_context_lost(ctx); i++) {
        struct hcl_comm *c = hcl_handle_get(v[i].handle);
        if (c == NULL)
            continue;
        if (atomic_load(&c->stage.unfed) > 0 && atomic_load(&c->stage.feeders) == 0) {
            uint64_t wait = hcl_stage_progress(c) >= HCL_STAGE_MOVED ? FEED_FAST_NS : FEED_SLOW_NS;
            if (next == 0 || wait < next)
                next = wait;
        }
        hcl_handle_put(v[i].handle);
    }
    return next;
}

static void poison_slots(struct hcl_comm *comm, uint32_t slots)
{
    for (unsigned k = 0; k < HRP_OP_SLOTS; k++) {
        if (!(slots >> k & 1))
            continue;
        atomic_store_explicit(&comm->area->flags[k].done, HRP_FLAG_POISON, memory_order_release);
        hcl_futex_wake(hcl_low_word(&comm->area->flags[k].done));
    }
}

void hcl_comm_poison_all(struct hcl_comm *comm)
{
    poison_slots(comm, UINT32_MAX);
}

bool hcl_comm_poison(struct hcl_comm *comm)
{
    struct hcl_context *ctx = comm->ctx;
    hcl_gpu_trap_lost(comm);
    /* A daemon that lives and has ended the session lets go within HCL_LET_GO_NS, or aborts itself. */
    uint64_t now = hcl_now(), since = 0;
    if (!atomic_load(&ctx->dead) &&
        (atomic_compare_exchange_strong(&ctx->lost_since, &since, now) || now - since < HCL_LET_GO_NS))
        return false;
    /* What streams copy when they are released must not look like numbers. */
    uint64_t first = 0;
    uint32_t feeding; /* bit k: slot k */
    if (!hcl_gpu_spoil(comm, &feeding) &&
        (atomic_compare_exchange_strong(&comm->spoil_since, &first, now) || now - first < SPOIL_NS))
        return false;
    poison_slots(comm, ~feeding);
    return feeding == 0;
}

static void poison(const struct ref *v, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct hcl_comm *c = hcl_handle_get(v[i].handle);
        if (c == NULL)
            continue;
        hcl_comm_poison(c);
        hcl_handle_put(v[i].handle);
    }
}

/*
 * Counts ticks in which the heartbeat stood still, instead of comparing it with the clock: after this process
 * was stopped for an hour the word may be old although the daemon is well.
 */
static void check_heartbeat(struct hcl_context *ctx, bool pending)
{
    uint64_t beat = atomic_load_explicit(&ctx->seg->heartbeat_ns, memory_order_relaxed);
    if (beat != ctx->beat || !pending) {
        ctx->beat = beat;
        ctx->beat_stale = 0;
        return;
    }
    if (++ctx->beat_stale < STALE_TICKS)
        return;
    hcl_context_lose(
        ctx, HRP_UNRESPONSIVE,
        "the hreduced daemon at %s has not moved for %u s while it had work to do (stopped, or out "
        "of CPU time?). Make new communicators when it is back",
        ctx->socket_path, STALE_TICKS);
}

static void tick(struct hcl_context *ctx, const struct ref *v, size_t n)
{
    bool pending = hcl_requests_pending(ctx);
    for (size_t i = 0; i < n; i++) {
        struct hcl_comm *c = hcl_handle_get(v[i].handle);
        if (c == NULL)
            continue;
        pending = hcl_comm_pending(c) || pending;
        hcl_comm_report(c);
        hcl_gpu_trap(c);
        hcl_gpu_harvest(c);
        hcl_handle_put(v[i].handle);
    }
    hcl_gpu_expire(ctx);
    hcl_ask_about_joins(ctx);
    check_heartbeat(ctx, pending);
}

static void put_comms(struct ref *v, size_t n)
{
    for (size_t i = 0; i < n; i++)
        hcl_handle_put(v[i].handle);
    free(v);
}

/* What is due besides events. Returns the time until it must be called again, UINT64_MAX: not by itself. */
static uint64_t duties(struct hcl_context *ctx)
{
    struct ref *v;
    size_t n = take_comms(ctx, &v);
    uint64_t now = hcl_now();
    uint64_t wait = UINT64_MAX;
    if (!hcl_context_lost(ctx)) {
        if (now >= ctx->next_tick) {
            tick(ctx, v, n);
            ctx->next_tick = now + TICK_NS;
        }
        wait = ctx->next_tick - now;
        /* Raised first: a post that sees it lowered wakes this thread, one that sees it raised is seen here. */
        atomic_store(&ctx->feeding, true);
        uint64_t f = feed(ctx, v, n);
        if (f != 0 && f < wait)
            wait = f;
        atomic_store(&ctx->feeding, f != 0);
        if (f == 0 && feed(ctx, v, n) != 0)
            wait = FEED_FAST_NS;
    } else if (n > 0) {
        poison(v, n);
        wait = POISON_NS;
    }
    put_comms(v, n);
    return wait;
}

static void drain_wake(struct hcl_context *ctx)
{
    uint64_t count;
    ssize_t n = read(ctx->wake, &count, sizeof(count));
    (void)n;
}

void *hcl_watcher_main(void *arg)
{
    struct hcl_context *ctx = arg;
    prctl(PR_SET_NAME, "hclient-watch");
    bool hung_up = false;
    while (!atomic_load(&ctx->stop)) {
        uint64_t wait = duties(ctx);
        bool lost = hcl_context_lost(ctx) != 0;
        if (lost && !hung_up) {
            /* A daemon that lives on (it was only slow, or this side gave up) sees the session end. */
            shutdown(ctx->sock, SHUT_RDWR);
            hung_up = true;
            continue;
        }
        struct pollfd pfd[] = {
            {.fd = ctx->wake, .events = POLLIN},
            {.fd = lost ? -1 : ctx->sock, .events = POLLIN},
            {.fd = atomic_load(&ctx->dead) ? -1 : ctx->daemon_pidfd, .events = POLLIN},
        };
        struct timespec ts = hcl_timespec(wait == UINT64_MAX ? 0 : wait);
        if (ppoll(pfd, 3, wait == UINT64_MAX ? NULL : &ts, NULL) <= 0)
            continue;
        if (pfd[0].revents)
            drain_wake(ctx);
        if (pfd[2].revents) {
            atomic_store(&ctx->dead, true);
            lose_socket(ctx, "its process is gone");
        }
        if (pfd[1].revents && !hcl_context_lost(ctx))
            receive(ctx);
    }
    return NULL;
}
