/* SPDX-License-Identifier: MIT */
/*
 * One thread of one node of the floor: folds, exchanges and fans out its part of the data as fast as it can, with no
 * protocol. Both ends of a socket know which bytes come next, so nothing but payload is sent.
 *
 * The part is cut into units, a unit into one block a node. Node p owns block p: it gets the partial sums of that block
 * from all others, adds them and sends the total to all. Unit u uses stream u % streams of every peer; on a stream the
 * messages follow in the order P0 P1 R0 P2 R1 ... (P: the partial, R: the result of the k-th unit of that stream), so
 * that a partial is under way while the result before it is being made.
 */
#ifndef TESTS_BENCH_FLOOR_NODE_H
#define TESTS_BENCH_FLOOR_NODE_H

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "kernels/kernels.h"

#define FLOOR_MAX_NODES 16u
#define FLOOR_MAX_RANKS 64u
#define FLOOR_MAX_STREAMS 16u
#define FLOOR_STALL_MS 20000

/* What a run does; all three together are an all-reduce. */
enum { FLOOR_FOLD = 1, FLOOR_NET = 2, FLOOR_FAN = 4, FLOOR_ALL = 7 };

struct floor_stream {
    int fd;
    int full;          /* the socket took less than it was given */
    uint64_t tx, rx;   /* number of the message under way */
    uint64_t txd, rxd; /* bytes of it that are through */
};

struct floor_unit {
    uint32_t partials, results, sends; /* still to come, still to send */
    int folded, totaled, done;
};

struct floor_worker {
    unsigned nodes, me, ranks, streams;
    char *buf[FLOOR_MAX_RANKS]; /* this thread's part of each rank's buffer */
    uint64_t bytes, unit, nunits;
    int what, nt;
    char *arena; /* partials, results and received partials of `window` units */
    uint64_t window;
    uint64_t opened, folded, finished; /* units, in this order */
    struct floor_unit *slot;
    struct floor_stream stream[FLOOR_MAX_NODES][FLOOR_MAX_STREAMS];
};

/* Units that can be open at once: by the order of messages a unit waits for at most one later unit of each stream, so
   less than two units a stream could block for ever. */
static inline uint64_t floor_window(unsigned streams)
{
    return 2 * (uint64_t)streams + 2;
}

static inline uint64_t floor_arena_bytes(unsigned nodes, unsigned streams, uint64_t unit)
{
    return floor_window(streams) * (unit + 64) * (2 + nodes);
}

static inline void floor_die(const char *what)
{
    fprintf(stderr, "floor: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* ---- geometry -------------------------------------------------------------------------------------------- */

static inline uint64_t unit_bytes(const struct floor_worker *w, uint64_t u)
{
    uint64_t left = w->bytes - u * w->unit;
    return left < w->unit ? left : w->unit;
}

static inline uint64_t block_at(const struct floor_worker *w, uint64_t u, unsigned b)
{
    uint64_t n = unit_bytes(w, u), each = (n / w->nodes + 63) / 64 * 64;
    return b * each < n ? b * each : n;
}

static inline uint64_t block_len(const struct floor_worker *w, uint64_t u, unsigned b)
{
    return (b + 1 == w->nodes ? unit_bytes(w, u) : block_at(w, u, b + 1)) - block_at(w, u, b);
}

/* Area 0: this node's partial of the unit; 1: its result; 2 + p: the partial of our block that peer p sent. */
static inline char *area(const struct floor_worker *w, uint64_t u, unsigned which)
{
    uint64_t each = (w->unit + 63) / 64 * 64;
    return w->arena + (u % w->window * (2 + w->nodes) + which) * each;
}

static inline struct floor_unit *unit_of(const struct floor_worker *w, uint64_t u)
{
    return &w->slot[u % w->window];
}

/* ---- arithmetic ------------------------------------------------------------------------------------------ */

static inline void fold_ranks(struct floor_worker *w, uint64_t u)
{
    struct hrk_fold f = hrk_fold_partial(HRP_F32, HRP_F32, HRP_SUM, w->ranks);
    const void *src[FLOOR_MAX_RANKS];
    void *dst = area(w, u, 0);
    for (unsigned r = 0; r < w->ranks; r++)
        src[r] = w->buf[r] + u * w->unit;
    if (w->what & FLOOR_FOLD)
        hrk_fold(&f, &dst, 1, src, w->ranks, unit_bytes(w, u) / 4);
}

static inline void fold_nodes(struct floor_worker *w, uint64_t u)
{
    struct hrk_fold f = hrk_fold_total(HRP_F32, HRP_F32, HRP_SUM, NULL, w->ranks * w->nodes);
    const void *src[FLOOR_MAX_NODES];
    uint64_t at = block_at(w, u, w->me);
    void *dst = area(w, u, 1) + at;
    for (unsigned p = 0; p < w->nodes; p++)
        src[p] = p == w->me ? area(w, u, 0) + at : area(w, u, 2 + p);
    if (w->what & FLOOR_FOLD)
        hrk_fold(&f, &dst, 1, src, w->nodes, block_len(w, u, w->me) / 4);
}

static inline void fan_out(struct floor_worker *w, uint64_t u)
{
    void *dst[FLOOR_MAX_RANKS];
    for (unsigned r = 0; r < w->ranks; r++)
        dst[r] = w->buf[r] + u * w->unit;
    if (w->what & FLOOR_FAN)
        hrk_copy(dst, w->ranks, area(w, u, 1), unit_bytes(w, u), w->nt);
}

/* One node: nothing is exchanged, and a chunk is written where it was read while it is in the cache. */
static inline void floor_run_alone(struct floor_worker *w)
{
    struct hrk_fold f = hrk_fold_single(HRP_F32, HRP_SUM, w->ranks);
    f.stream = (uint8_t)w->nt;
    for (uint64_t at = 0; at < w->bytes; at += w->unit) {
        void *ptr[FLOOR_MAX_RANKS];
        for (unsigned r = 0; r < w->ranks; r++)
            ptr[r] = w->buf[r] + at;
        uint64_t n = w->bytes - at < w->unit ? w->bytes - at : w->unit;
        hrk_fold(&f, ptr, w->ranks, (const void *const *)ptr, w->ranks, n / 4);
    }
}

/* ---- sockets --------------------------------------------------------------------------------------------- */

/* Message m of stream k: which unit, and whether it is that unit's result. */
static inline uint64_t message(const struct floor_worker *w, unsigned k, uint64_t m, int *result)
{
    uint64_t n = (w->nunits - k + w->streams - 1) / w->streams, v;
    *result = m > 0 && (m % 2 == 0 || m + 1 == 2 * n);
    if (m + 1 == 2 * n && m > 0)
        v = n - 1;
    else
        v = *result ? m / 2 - 1 : (m + 1) / 2;
    return v * w->streams + k;
}

static inline uint64_t messages(const struct floor_worker *w, unsigned k)
{
    return k < w->nunits ? 2 * ((w->nunits - k + w->streams - 1) / w->streams) : 0;
}

static inline int send_some(struct floor_worker *w, unsigned p, unsigned k)
{
    struct floor_stream *s = &w->stream[p][k];
    int moved = 0;
    while (!s->full && s->tx < messages(w, k)) {
        int result;
        uint64_t u = message(w, k, s->tx, &result);
        if (u >= w->opened || !(result ? unit_of(w, u)->totaled : unit_of(w, u)->folded))
            break;
        unsigned b = result ? w->me : p;
        uint64_t len = block_len(w, u, b);
        const char *from = area(w, u, result ? 1 : 0) + block_at(w, u, b);
        while (s->txd < len) {
            ssize_t n = send(s->fd, from + s->txd, len - s->txd, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n < 0 && errno == EAGAIN) {
                s->full = 1;
                return moved;
            }
            if (n < 0)
                floor_die("send");
            s->txd += (uint64_t)n;
            moved = 1;
        }
        s->txd = 0;
        s->tx++;
        unit_of(w, u)->sends--;
        moved = 1;
    }
    return moved;
}

static inline int receivable(const struct floor_worker *w, unsigned k, const struct floor_stream *s)
{
    int result;
    return s->rx < messages(w, k) && message(w, k, s->rx, &result) < w->opened;
}

static inline int receive_some(struct floor_worker *w, unsigned p, unsigned k)
{
    struct floor_stream *s = &w->stream[p][k];
    int moved = 0;
    while (receivable(w, k, s)) {
        int result;
        uint64_t u = message(w, k, s->rx, &result);
        unsigned b = result ? p : w->me;
        uint64_t len = block_len(w, u, b);
        char *to = result ? area(w, u, 1) + block_at(w, u, b) : area(w, u, 2 + p);
        while (s->rxd < len) {
            ssize_t n = recv(s->fd, to + s->rxd, len - s->rxd, MSG_DONTWAIT);
            if (n < 0 && errno == EAGAIN)
                return moved;
            if (n <= 0)
                floor_die("receive");
            s->rxd += (uint64_t)n;
            moved = 1;
        }
        s->rxd = 0;
        s->rx++;
        if (result)
            unit_of(w, u)->results--;
        else
            unit_of(w, u)->partials--;
        moved = 1;
    }
    return moved;
}

static inline int send_all(struct floor_worker *w)
{
    int moved = 0;
    for (unsigned d = 1; d < w->nodes; d++)
        for (unsigned k = 0; k < w->streams; k++)
            moved |= send_some(w, (w->me + d) % w->nodes, k);
    return moved;
}

/* Moves what the sockets have and take; wait: sleeps until there is something. */
static inline int poll_all(struct floor_worker *w, int wait)
{
    struct pollfd fd[FLOOR_MAX_NODES * FLOOR_MAX_STREAMS];
    unsigned peer[FLOOR_MAX_NODES * FLOOR_MAX_STREAMS], n = 0;
    int moved = 0;
    for (unsigned d = 1; d < w->nodes; d++) {
        for (unsigned k = 0; k < w->streams; k++) {
            unsigned p = (w->me + d) % w->nodes;
            struct floor_stream *s = &w->stream[p][k];
            short want = (short)((receivable(w, k, s) ? POLLIN : 0) | (s->full ? POLLOUT : 0));
            if (!want)
                continue;
            fd[n] = (struct pollfd){.fd = s->fd, .events = want};
            peer[n++] = p * FLOOR_MAX_STREAMS + k;
        }
    }
    int ready = poll(fd, n, wait ? FLOOR_STALL_MS : 0);
    if (ready < 0 && errno != EINTR)
        floor_die("poll");
    if (ready == 0 && wait) {
        errno = ETIMEDOUT;
        floor_die("no node moved");
    }
    for (unsigned i = 0; i < n && ready > 0; i++) {
        unsigned p = peer[i] / FLOOR_MAX_STREAMS, k = peer[i] % FLOOR_MAX_STREAMS;
        if (fd[i].revents & POLLOUT) {
            w->stream[p][k].full = 0;
            moved |= send_some(w, p, k);
        }
        if (fd[i].revents & (POLLIN | POLLHUP | POLLERR))
            moved |= receive_some(w, p, k);
    }
    return moved;
}

/* ---- the run --------------------------------------------------------------------------------------------- */

static inline void open_units(struct floor_worker *w)
{
    uint32_t others = w->what & FLOOR_NET ? w->nodes - 1 : 0;
    for (; w->opened < w->nunits && w->opened < w->finished + w->window; w->opened++)
        *unit_of(w, w->opened) = (struct floor_unit){others, others, 2 * others, 0, 0, 0};
}

/* One piece of arithmetic: what others wait for first. */
static inline int compute_some(struct floor_worker *w)
{
    for (uint64_t u = w->finished; u < w->folded; u++) {
        struct floor_unit *s = unit_of(w, u);
        if (!s->totaled && s->partials == 0) {
            fold_nodes(w, u);
            s->totaled = 1;
            return 1;
        }
    }
    if (w->folded < w->opened) {
        fold_ranks(w, w->folded);
        unit_of(w, w->folded++)->folded = 1;
        return 1;
    }
    for (uint64_t u = w->finished; u < w->folded; u++) {
        struct floor_unit *s = unit_of(w, u);
        if (s->totaled && !s->done && s->results == 0) {
            fan_out(w, u);
            s->done = 1;
            return 1;
        }
    }
    return 0;
}

/* One op of this thread, in the namespace and with the sockets it was given; returns when its part is complete. */
static inline void floor_run(struct floor_worker *w)
{
    w->nunits = (w->bytes + w->unit - 1) / w->unit;
    if (w->nodes == 1) {
        floor_run_alone(w);
        return;
    }
    w->opened = w->folded = w->finished = 0;
    for (unsigned p = 0; p < w->nodes; p++)
        for (unsigned k = 0; k < w->streams; k++)
            w->stream[p][k] = (struct floor_stream){.fd = w->stream[p][k].fd};
    for (;;) {
        while (w->finished < w->folded && unit_of(w, w->finished)->done && !unit_of(w, w->finished)->sends)
            w->finished++;
        if (w->finished == w->nunits)
            return;
        open_units(w);
        int moved = compute_some(w);
        if (w->what & FLOOR_NET) {
            moved |= send_all(w);
            poll_all(w, !moved);
        }
    }
}

#endif
