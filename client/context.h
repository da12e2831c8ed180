/* SPDX-License-Identifier: MIT */
/*
 * A context is one session with one daemon: socket, segment, and the watcher thread that alone reads the
 * socket. A process has one context a daemon socket, made on first need and closed with its last user
 * (communicators and memory hold references). When the session is lost the context stays, for those who still
 * hold it; new users get a new one.
 */
#ifndef HCL_CONTEXT_H
#define HCL_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "client/buffer.h"
#include "client/error.h"
#include "client/futex.h"
#include "client/gpu_import.h"
#include "proto/shm.h"
#include "proto/wire.h"

#define HCL_REPLY_NS (10 * HCL_SEC) /* for requests that the daemon answers at once */
/* For memory of so many bytes, which it must first fill: 32 MiB/s is what a machine without a free core does. */
static inline uint64_t hcl_alloc_ns(uint64_t bytes)
{
    return (60 + bytes / (UINT64_C(32) << 20)) * HCL_SEC;
}

/* How long the daemon has, after a comm failed or was aborted, to let go of the buffers of an op: longer than it may be
   silent (10 s), so that no buffer is handed back which a slow daemon may still write. It answers in milliseconds, or aborts itself
   when its own threads do not let go within a second. */
#define HCL_LET_GO_NS (11 * HCL_SEC)

struct hcl_comm;

/* A request on its way; owned by the thread that waits, or by the context once that has given up. */
struct hcl_request {
    struct hcl_request *next;
    uint64_t cookie;
    uint16_t type;   /* of the request */
    uint16_t expect; /* of the reply, unless that is ERROR */
    bool abandoned;  /* nobody waits: undo what the reply gives */
    bool answered;
    /* JOIN: what was asked, until it is answered or abandoned; when the log will say what it waits for (0: it has). */
    const struct hrp_msg_join *join;
    uint64_t say_at;
    struct hrp_msg reply;
    char *text; /* ERROR and TEXT: the whole text, NUL-terminated */
    size_t text_len;
    int fds[HRP_MAX_FDS];
    int nfds;
};

struct hcl_context {
    struct hcl_context *next; /* all contexts of the process; under the list's lock */
    unsigned refs;            /* likewise */
    char *socket_path;

    int sock;
    int daemon_pidfd;
    int doorbell; /* eventfd of the agent */
    int wake;     /* eventfd of the watcher */
    struct hrp_seg_header *seg;
    size_t seg_bytes;
    uint32_t ncomms;
    uint64_t window_bytes;
    char version[32];

    /* Session loss. lost: 0 or enum hrp_status, set once, after lost_text. dead: the daemon's process is gone
       for certain (its pidfd is readable), so nothing of it touches memory any more. */
    _Atomic uint32_t lost;
    atomic_bool dead;
    char lost_text[512];

    pthread_mutex_t lock; /* the three below, lost_text */
    pthread_cond_t answered;
    struct hcl_request *requests;
    struct hcl_comm *comms;
    uint64_t next_cookie;

    struct hcl_regions regions;
    struct hcl_gpu_memories gpu;

    _Atomic uint32_t deferred; /* groups of other threads that have pushed and will ring */

    pthread_t watcher;
    atomic_bool stop;
    char *receive_buf;   /* HRP_MSG_MAX bytes; handshake, then the watcher */
    atomic_bool feeding; /* the watcher polls for staged ops; no need to wake it */
    /* Watcher's own: */
    uint64_t beat;       /* heartbeat as last seen */
    unsigned beat_stale; /* ticks since it changed */
    uint64_t next_tick;
    _Atomic uint64_t lost_since; /* first time anybody wanted to release streams; 0: not yet */
};

/* path NULL: HREDUCE_SOCKET or the default. *out: with a reference for the caller. */
hclient_result_t hcl_context_get(const char *path, struct hcl_context **out);
void hcl_context_ref(struct hcl_context *ctx);
void hcl_context_put(struct hcl_context *ctx);
/* Calls fn for all contexts, under the list's lock, until it returns true; whether one did. */
bool hcl_context_each(bool (*fn)(struct hcl_context *ctx, void *arg), void *arg);

/* Declares the session lost (once; later reasons are dropped), wakes everybody. */
void hcl_context_lose(struct hcl_context *ctx, uint32_t status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static inline uint32_t hcl_context_lost(const struct hcl_context *ctx)
{
    return atomic_load_explicit(&ctx->lost, memory_order_acquire);
}
/* Result and sentence of a lost session. */
hclient_result_t hcl_fail_lost(struct hcl_context *ctx);

/* Tells the agent about pushes or ready words: at once, or at the end of the thread's group. */
void hcl_doorbell(struct hcl_context *ctx);
void hcl_doorbell_now(struct hcl_context *ctx);
/* True: the thread is in a group, which will ring. */
bool hcl_group_defer(struct hcl_context *ctx);
/* Before a thread waits inside a group. */
void hcl_group_flush(void);

void hcl_watcher_wake(struct hcl_context *ctx);
void *hcl_watcher_main(void *arg);

/* ------------------------------------------------------------------------------------------ requests */

struct hcl_reply {
    struct hrp_msg msg;
    char *text; /* malloc'ed, NUL-terminated; or NULL */
    size_t text_len;
    int fds[HRP_MAX_FDS];
    int nfds;
};
#define HCL_REPLY_NULL          \
    {                           \
        .text = NULL, .nfds = 0 \
    }
void hcl_reply_deinit(struct hcl_reply *reply); /* frees text, closes descriptors */

/*
 * Sends msg and waits for the reply of type `expect`, timeout_ns at most. An ERROR reply becomes the result,
 * its sentence the thread's. reply (may be NULL) is the caller's on success.
 */
hclient_result_t hcl_request(struct hcl_context *ctx, const struct hrp_msg *msg, const int *fds, int nfds,
                             uint16_t expect, uint64_t timeout_ns, struct hcl_reply *reply);
/* A message that follows a request under its cookie, with a descriptor, which stays the caller's. */
struct hcl_part {
    struct hrp_msg msg;
    int fd;
};
/* The same with parts behind msg. */
hclient_result_t hcl_request_parts(struct hcl_context *ctx, const struct hrp_msg *msg, struct hcl_part *part,
                                   unsigned nparts, uint16_t expect, uint64_t timeout_ns,
                                   struct hcl_reply *reply);
/* Sends without waiting for an answer (which is dropped). False: the socket is full or broken. */
bool hcl_send_only(struct hcl_context *ctx, const struct hrp_msg *msg, uint16_t expect);
/* Watcher: one datagram that arrived. */
void hcl_dispatch(struct hcl_context *ctx, const void *buf, size_t len, int *fds, int nfds);
bool hcl_requests_pending(struct hcl_context *ctx);
/* Watcher: has the log say, once for each, what joins wait for that take long. */
void hcl_ask_about_joins(struct hcl_context *ctx);

#endif
