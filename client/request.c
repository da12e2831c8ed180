/* SPDX-License-Identifier: MIT */
/* Requests to the daemon: any thread sends and waits, the watcher alone receives. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "client/context.h"
#include "client/futex.h"
#include "proto/fdpass.h"
#include "proto/status.h"

#define TEXT_MAX (16u << 20) /* of one reply in parts */
#define PARTING_NS (500 * HCL_MS)
#define LAST_ASK_NS (500 * HCL_MS)
#define SLOW_JOIN_NS (10 * HCL_SEC)
#define ABI_MINOR_JOINING 3u

void hcl_reply_deinit(struct hcl_reply *reply)
{
    free(reply->text);
    for (int i = 0; i < reply->nfds; i++)
        close(reply->fds[i]);
    reply->text = NULL;
    reply->nfds = 0;
}

/* Sending failed. What the daemon said before it closed may still lie in the socket: the watcher, which reads it,
   has the first word. */
static void lose_in_send(struct hcl_context *ctx, int rc)
{
    uint64_t deadline = hcl_now() + PARTING_NS;
    struct timespec ts = hcl_timespec(deadline);
    pthread_mutex_lock(&ctx->lock);
    while (!pthread_equal(pthread_self(), ctx->watcher) && !hcl_context_lost(ctx) && hcl_now() < deadline)
        pthread_cond_timedwait(&ctx->answered, &ctx->lock, &ts);
    pthread_mutex_unlock(&ctx->lock);
    hcl_context_lose(
        ctx, HRP_DAEMON_LOST,
        "lost the hreduced daemon at %s: sending to it failed (%s). Make new communicators when it is "
        "back",
        ctx->socket_path, strerror(-rc));
}

/* 0; -EAGAIN: still full at the deadline; other negative errno: the session is lost. */
static int send_message(struct hcl_context *ctx, const struct hrp_msg *msg, const int *fds, int nfds,
                        uint64_t deadline)
{
    char buf[4096];
    long len = hrp_msg_encode(msg, buf, sizeof(buf));
    if (len < 0)
        return (int)len;
    for (;;) {
        if (hcl_context_lost(ctx))
            return -ENOTCONN;
        int rc = hrp_send_fds(ctx->sock, buf, (size_t)len, fds, nfds);
        if (rc == 0 || rc == -EINVAL)
            return rc;
        /* The kernel bounds descriptors in flight (ETOOMANYREFS): as good as full. */
        if (rc != -EAGAIN && rc != -ETOOMANYREFS && rc != -ENOBUFS) {
            lose_in_send(ctx, rc);
            return rc;
        }
        uint64_t now = hcl_now();
        if (now >= deadline)
            return -EAGAIN;
        struct pollfd pfd = {.fd = ctx->sock, .events = POLLOUT};
        poll(&pfd, 1, 20);
    }
}

static void unlink_request(struct hcl_context *ctx, struct hcl_request *req)
{
    struct hcl_request **p = &ctx->requests;
    while (*p != NULL && *p != req)
        p = &(*p)->next;
    if (*p == req)
        *p = req->next;
}

static void free_request(struct hcl_request *req)
{
    for (int i = 0; i < req->nfds; i++)
        close(req->fds[i]);
    free(req->text);
    free(req);
}

static bool makes_memory(uint16_t type)
{
    return type == HRP_MSG_WINDOW || type == HRP_MSG_ALLOC || type == HRP_MSG_IMPORT_GPU;
}

/* Under ctx->lock: until the daemon would not refuse one more, for as many as it has not answered yet. What was freed counts,
   too: a job that frees and allocates fast is ahead of a driver that is slow to unmap. At the deadline it is asked all the
   same. */
static void await_room(struct hcl_context *ctx, uint64_t deadline)
{
    struct timespec ts = hcl_timespec(deadline);
    unsigned n = HRP_MEMORY_JOBS;
    while (n >= HRP_MEMORY_JOBS && !hcl_context_lost(ctx) && hcl_now() < deadline) {
        n = 0;
        for (const struct hcl_request *req = ctx->requests; req != NULL; req = req->next)
            n += !req->answered && (makes_memory(req->type) || req->type == HRP_MSG_FREE);
        if (n >= HRP_MEMORY_JOBS)
            pthread_cond_timedwait(&ctx->answered, &ctx->lock, &ts);
    }
}

/* deadline: of the wait for room. */
static struct hcl_request *new_request(struct hcl_context *ctx, uint16_t type, uint16_t expect,
                                       uint64_t deadline)
{
    struct hcl_request *req = calloc(1, sizeof(*req));
    if (req == NULL)
        return NULL;
    req->type = type;
    req->expect = expect;
    pthread_mutex_lock(&ctx->lock);
    if (makes_memory(type))
        await_room(ctx, deadline);
    req->cookie = ctx->next_cookie++;
    req->next = ctx->requests;
    ctx->requests = req;
    pthread_mutex_unlock(&ctx->lock);
    return req;
}

/* Under ctx->lock: waits for an answer, loss or the deadline. */
static void await(struct hcl_context *ctx, struct hcl_request *req, uint64_t deadline)
{
    struct timespec ts = hcl_timespec(deadline);
    while (!req->answered && !hcl_context_lost(ctx) && hcl_now() < deadline)
        pthread_cond_timedwait(&ctx->answered, &ctx->lock, &ts);
}

static hclient_result_t take_answer(struct hcl_request *req, struct hcl_reply *reply)
{
    if (req->reply.type == HRP_MSG_ERROR)
        return hcl_fail_text((hclient_result_t)req->reply.body.error.status, req->text, req->text_len);
    if (reply != NULL) {
        reply->msg = req->reply;
        reply->msg.text = NULL;
        reply->text = req->text;
        reply->text_len = req->text_len;
        reply->nfds = req->nfds;
        memcpy(reply->fds, req->fds, sizeof(reply->fds));
        req->text = NULL;
        req->nfds = 0;
    }
    return HCLIENT_OK;
}

/* One thread at a time: between an import of GPU memory and its parts the daemon takes no other import, nor its parts. */
static int send_parts(struct hcl_context *ctx, const struct hrp_msg *msg, struct hcl_part *part,
                      unsigned nparts, uint64_t deadline)
{
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&one);
    int rc = send_message(ctx, msg, NULL, 0, deadline);
    for (unsigned i = 0; i < nparts && rc == 0; i++) {
        part[i].msg.cookie = msg->cookie;
        rc = send_message(ctx, &part[i].msg, &part[i].fd, 1, deadline);
    }
    pthread_mutex_unlock(&one);
    return rc;
}

/* Who sets a short limit is told sooner. */
static void watch_join(struct hcl_context *ctx, struct hcl_request *req, const struct hrp_msg *msg)
{
    uint64_t half = msg->body.join.config.setup_timeout_ms * HCL_MS / 2;
    pthread_mutex_lock(&ctx->lock);
    req->join = &msg->body.join;
    req->say_at = hcl_now() + (half > 0 && half < SLOW_JOIN_NS ? half : SLOW_JOIN_NS);
    pthread_mutex_unlock(&ctx->lock);
}

/* One limit for the wait for room and for the answer; but who waited for room nearly as long gets his answer, too. */
static uint64_t time_for_answer(uint64_t deadline, uint64_t timeout_ns)
{
    uint64_t least = hcl_now() + (timeout_ns < LAST_ASK_NS ? timeout_ns : LAST_ASK_NS);
    return deadline > least ? deadline : least;
}

static hclient_result_t request(struct hcl_context *ctx, const struct hrp_msg *msg, const int *fds, int nfds,
                                struct hcl_part *part, unsigned nparts, uint16_t expect, uint64_t timeout_ns,
                                struct hcl_reply *reply)
{
    uint64_t deadline = hcl_now() + timeout_ns;
    struct hcl_request *req = new_request(ctx, msg->type, expect, deadline);
    if (req == NULL)
        return hcl_fail(HCLIENT_RESOURCE, "out of memory");
    deadline = time_for_answer(deadline, timeout_ns);
    struct hrp_msg m = *msg;
    m.cookie = req->cookie;
    if (msg->type == HRP_MSG_JOIN)
        watch_join(ctx, req, &m);
    int rc = msg->type == HRP_MSG_IMPORT_GPU ? send_parts(ctx, &m, part, nparts, deadline)
                                             : send_message(ctx, &m, fds, nfds, deadline);
    pthread_mutex_lock(&ctx->lock);
    if (rc == 0)
        await(ctx, req, deadline);
    hclient_result_t r;
    bool ours = true;
    if (req->answered)
        r = take_answer(req, reply);
    else if (hcl_context_lost(ctx))
        r = hcl_fail_lost(ctx);
    else if (rc == -EINVAL || rc == -EMSGSIZE)
        r = hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: a value is out of its range", hrp_msg_name(msg->type));
    else {
        r = hcl_fail(HCLIENT_UNRESPONSIVE,
                     "the hreduced daemon at %s has not answered %s for %llu s; see its log (journalctl -u "
                     "hreduced)",
                     ctx->socket_path, hrp_msg_name(msg->type), (unsigned long long)(timeout_ns / HCL_SEC));
        ours = rc != 0; /* sent: the answer may still come */
        req->abandoned = !ours;
    }
    req->join = NULL;
    if (ours)
        unlink_request(ctx, req);
    pthread_mutex_unlock(&ctx->lock);
    if (ours)
        free_request(req);
    return r;
}

hclient_result_t hcl_request(struct hcl_context *ctx, const struct hrp_msg *msg, const int *fds, int nfds,
                             uint16_t expect, uint64_t timeout_ns, struct hcl_reply *reply)
{
    return request(ctx, msg, fds, nfds, NULL, 0, expect, timeout_ns, reply);
}

hclient_result_t hcl_request_parts(struct hcl_context *ctx, const struct hrp_msg *msg, struct hcl_part *part,
                                   unsigned nparts, uint16_t expect, uint64_t timeout_ns,
                                   struct hcl_reply *reply)
{
    return request(ctx, msg, NULL, 0, part, nparts, expect, timeout_ns, reply);
}

bool hcl_send_only(struct hcl_context *ctx, const struct hrp_msg *msg, uint16_t expect)
{
    struct hcl_request *req = new_request(ctx, msg->type, expect, 0);
    if (req == NULL)
        return false;
    struct hrp_msg m = *msg;
    m.cookie = req->cookie;
    pthread_mutex_lock(&ctx->lock);
    req->abandoned = true;
    pthread_mutex_unlock(&ctx->lock);
    if (send_message(ctx, &m, NULL, 0, 0) == 0)
        return true;
    pthread_mutex_lock(&ctx->lock);
    unlink_request(ctx, req);
    pthread_mutex_unlock(&ctx->lock);
    free_request(req);
    return false;
}

bool hcl_requests_pending(struct hcl_context *ctx)
{
    pthread_mutex_lock(&ctx->lock);
    bool any = ctx->requests != NULL;
    pthread_mutex_unlock(&ctx->lock);
    return any;
}

/* -------------------------------------------------------------------------------------------- receiving */

static void append_text(struct hcl_request *req, const struct hrp_msg *msg)
{
    size_t add = req->text_len + msg->text_len <= TEXT_MAX ? msg->text_len : 0;
    char *text = realloc(req->text, req->text_len + add + 1);
    if (text == NULL)
        return;
    if (add > 0)
        memcpy(text + req->text_len, msg->text, add);
    req->text = text;
    req->text_len += add;
    text[req->text_len] = 0;
}

void hcl_ask_about_joins(struct hcl_context *ctx)
{
    uint32_t abi = atomic_load_explicit(&ctx->seg->abi, memory_order_acquire);
    uint64_t now = hcl_now();
    struct hrp_msg msg;
    do {
        msg = (struct hrp_msg){.type = 0};
        pthread_mutex_lock(&ctx->lock);
        for (struct hcl_request *req = ctx->requests; req != NULL && msg.type == 0; req = req->next) {
            if (req->join == NULL || req->answered || req->say_at == 0 || now < req->say_at)
                continue;
            req->say_at = 0;
            msg.type = HRP_MSG_JOINING;
            msg.body.join = *req->join;
        }
        pthread_mutex_unlock(&ctx->lock);
        if (msg.type != 0 && (abi & 0xffff) >= ABI_MINOR_JOINING)
            hcl_send_only(ctx, &msg, HRP_MSG_TEXT);
    } while (msg.type != 0);
}

/* A late answer that nobody waits for must not leave anything behind in the daemon. */
static void undo(struct hcl_context *ctx, const struct hcl_request *req)
{
    struct hrp_msg msg = {.type = 0};
    if (req->reply.type == HRP_MSG_JOINED) {
        msg.type = HRP_MSG_LEAVE;
        msg.body.slot.slot = req->reply.body.joined.slot;
    } else if (req->type == HRP_MSG_ALLOC && req->reply.type == HRP_MSG_MEMORY) {
        msg.type = HRP_MSG_FREE;
        msg.body.buffer.id = req->reply.body.memory.id;
    } else if (req->reply.type == HRP_MSG_REGISTERED) {
        msg.type = HRP_MSG_FREE;
        msg.body.buffer.id = req->reply.body.buffer.id;
    }
    if (msg.type != 0)
        hcl_send_only(ctx, &msg, HRP_MSG_DONE);
}

void hcl_dispatch(struct hcl_context *ctx, const void *buf, size_t len, int *fds, int nfds)
{
    struct hrp_msg msg;
    bool good = hrp_msg_decode(&msg, buf, len) == 0 && nfds == hrp_msg_nfds(msg.type);
    struct hcl_request *req = NULL, *late = NULL;
    if (good && msg.type == HRP_MSG_ERROR && msg.cookie == 0) {
        hcl_context_lose(ctx, msg.body.error.status, "the hreduced daemon at %s: %.*s", ctx->socket_path,
                         (int)msg.text_len, msg.text != NULL ? msg.text : "");
        return;
    }
    pthread_mutex_lock(&ctx->lock);
    if (good) {
        req = ctx->requests;
        while (req != NULL && (req->cookie != msg.cookie || req->answered))
            req = req->next;
        good = req != NULL && (msg.type == req->expect || msg.type == HRP_MSG_ERROR);
    }
    if (good) {
        req->reply = msg;
        req->reply.text = NULL;
        if (msg.type == HRP_MSG_TEXT || msg.type == HRP_MSG_ERROR)
            append_text(req, &msg);
        req->nfds = nfds;
        memcpy(req->fds, fds, sizeof(int) * (size_t)nfds);
        nfds = 0;
        req->answered = msg.type != HRP_MSG_TEXT || msg.body.text.more == 0;
        if (req->answered && req->abandoned) {
            unlink_request(ctx, req);
            late = req;
        }
        pthread_cond_broadcast(&ctx->answered);
    }
    pthread_mutex_unlock(&ctx->lock);
    for (int i = 0; i < nfds; i++)
        close(fds[i]);
    if (late != NULL) {
        if (late->type == HRP_MSG_JOINING && late->reply.type == HRP_MSG_TEXT)
            hcl_log(HCLIENT_LOG_WARN, "%s", late->text != NULL ? late->text : "");
        undo(ctx, late);
        free_request(late);
    }
    if (!good)
        hcl_context_lose(
            ctx, HRP_PROTOCOL,
            "the hreduced daemon at %s sent a message that makes no sense (%zu bytes); the session "
            "is closed. Library and daemon may be of different versions",
            ctx->socket_path, len);
}
