/* SPDX-License-Identifier: MIT */
#include "client/context.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "client/comm.h"
#include "client/futex.h"
#include "proto/fdpass.h"
#include "proto/status.h"

#define CONNECT_NS (10 * HCL_SEC)
/* A daemon that this process has known and that is away: it is probably being restarted. */
#define RETURN_NS (2 * HCL_SEC)

static struct {
    pthread_mutex_t lock;    /* list, references */
    pthread_mutex_t connect; /* held while one is made, so that two threads do not make two */
    struct hcl_context *list;
    atomic_bool known; /* some session was made before */
} contexts = {.lock = PTHREAD_MUTEX_INITIALIZER, .connect = PTHREAD_MUTEX_INITIALIZER};

/* ---------------------------------------------------------------------------------------- fork */

static void child_after_fork(void)
{
    atomic_store(&hcl_inert, true);
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, child_after_fork);
}

/* ---------------------------------------------------------------------------------------- connecting */

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void context_free(struct hcl_context *ctx)
{
    close_fd(&ctx->sock);
    close_fd(&ctx->daemon_pidfd);
    close_fd(&ctx->doorbell);
    close_fd(&ctx->wake);
    if (ctx->seg != NULL)
        munmap(ctx->seg, ctx->seg_bytes);
    while (ctx->requests != NULL) {
        struct hcl_request *r = ctx->requests;
        ctx->requests = r->next;
        free(r->text);
        free(r);
    }
    hcl_regions_deinit(&ctx->regions);
    hcl_gpu_memories_deinit(&ctx->gpu);
    pthread_cond_destroy(&ctx->answered);
    pthread_mutex_destroy(&ctx->lock);
    free(ctx->receive_buf);
    free(ctx->socket_path);
    free(ctx);
}

static struct hcl_context *context_new(const char *path)
{
    struct hcl_context *ctx = calloc(1, sizeof(*ctx));
    if (ctx == NULL)
        return NULL;
    ctx->sock = ctx->daemon_pidfd = ctx->doorbell = ctx->wake = -1;
    ctx->refs = 1;
    ctx->next_cookie = 1;
    pthread_mutex_init(&ctx->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&ctx->answered, &attr);
    pthread_condattr_destroy(&attr);
    hcl_regions_init(&ctx->regions);
    hcl_gpu_memories_init(&ctx->gpu);
    ctx->socket_path = strdup(path);
    ctx->receive_buf = malloc(HRP_MSG_MAX);
    if (ctx->socket_path == NULL || ctx->receive_buf == NULL) {
        context_free(ctx);
        return NULL;
    }
    return ctx;
}

static hclient_result_t dial(struct hcl_context *ctx, uint64_t deadline)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    size_t len = strlen(ctx->socket_path);
    if (len == 0 || len >= sizeof(addr.sun_path))
        return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                        "daemon socket path '%s' has %zu characters, a Unix socket's may have 1 to %zu",
                        ctx->socket_path, len, sizeof(addr.sun_path) - 1);
    memcpy(addr.sun_path, ctx->socket_path, len + 1);
    uint64_t start = hcl_now();
    for (;;) {
        ctx->sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (ctx->sock < 0)
            return hcl_fail(errno == EMFILE || errno == ENFILE ? HCLIENT_RESOURCE : HCLIENT_SYSTEM,
                            "cannot make a socket for the hreduced daemon: %s%s", strerror(errno),
                            errno == EMFILE ? "; raise the descriptor limit (ulimit -n)" : "");
        if (connect(ctx->sock, (struct sockaddr *)&addr, sizeof(addr)) == 0)
            return HCLIENT_OK;
        int err = errno;
        close_fd(&ctx->sock);
        uint64_t now = hcl_now();
        bool full = err == EAGAIN || err == EINTR; /* its queue of new connections is full */
        bool away = (err == ENOENT || err == ECONNREFUSED) && atomic_load(&contexts.known);
        if ((full && now < deadline) || (away && now < start + RETURN_NS)) {
            struct timespec ts = hcl_timespec(10 * HCL_MS);
            nanosleep(&ts, NULL);
            continue;
        }
        if (err == EACCES || err == EPERM)
            return hcl_fail(HCLIENT_REFUSED,
                            "no permission to connect to the hreduced daemon at %s (user %u): %s; add the "
                            "user to the socket's group (hreduce)",
                            ctx->socket_path, (unsigned)getuid(), strerror(err));
        return hcl_fail(HCLIENT_DAEMON_LOST,
                        "cannot connect to the hreduced daemon at %s: %s; is it running (systemctl status "
                        "hreduced)? Where its socket is another one, set HREDUCE_SOCKET",
                        ctx->socket_path, strerror(err));
    }
}

static hclient_result_t send_hello(struct hcl_context *ctx)
{
    int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (self < 0)
        return hcl_fail(errno == EMFILE || errno == ENFILE ? HCLIENT_RESOURCE : HCLIENT_SYSTEM,
                        "cannot open a pidfd of this process: %s; %s", strerror(errno),
                        errno == EMFILE ? "raise the descriptor limit (ulimit -n)"
                                        : "hreduce needs Linux 5.3 or newer and a free file descriptor");
    struct hrp_msg msg = {.type = HRP_MSG_HELLO, .cookie = ctx->next_cookie++};
    msg.body.hello.abi = HRP_ABI;
    msg.body.hello.pid = getpid();
    char buf[256];
    long len = hrp_msg_encode(&msg, buf, sizeof(buf));
    int rc = len < 0 ? (int)len : hrp_send_fds(ctx->sock, buf, (size_t)len, &self, 1);
    close(self);
    return rc == 0 ? HCLIENT_OK
                   : hcl_fail(HCLIENT_DAEMON_LOST, "the hreduced daemon at %s closed a new connection: %s",
                              ctx->socket_path, strerror(-rc));
}

/* Waits for the reply; on success the descriptors are in fds. */
static hclient_result_t receive_welcome(struct hcl_context *ctx, uint64_t deadline, struct hrp_msg *msg,
                                        int *fds, int *nfds)
{
    for (;;) {
        uint64_t now = hcl_now();
        if (now >= deadline)
            return hcl_fail(HCLIENT_UNRESPONSIVE,
                            "the hreduced daemon at %s has not answered a new connection for %d s",
                            ctx->socket_path, (int)(CONNECT_NS / HCL_SEC));
        struct pollfd pfd = {.fd = ctx->sock, .events = POLLIN};
        struct timespec ts = hcl_timespec(deadline - now);
        if (ppoll(&pfd, 1, &ts, NULL) <= 0)
            continue;
        long len = hrp_recv_fds(ctx->sock, ctx->receive_buf, HRP_MSG_MAX, fds, HRP_MAX_FDS, nfds);
        if (len == -EAGAIN)
            continue;
        if (len == -EMFILE)
            return hcl_fail(HCLIENT_RESOURCE,
                            "no file descriptor is free to take the daemon's segment; raise the descriptor "
                            "limit (ulimit -n)");
        if (len <= 0)
            return hcl_fail(HCLIENT_DAEMON_LOST, "the hreduced daemon at %s closed a new connection%s%s",
                            ctx->socket_path, len < 0 ? ": " : "", len < 0 ? strerror((int)-len) : "");
        if (hrp_msg_decode(msg, ctx->receive_buf, (size_t)len) == 0 && *nfds == hrp_msg_nfds(msg->type))
            return HCLIENT_OK;
        for (int i = 0; i < *nfds; i++)
            close(fds[i]);
        return hcl_fail(HCLIENT_PROTOCOL, "what answers at %s does not speak hreduced's protocol",
                        ctx->socket_path);
    }
}

static hclient_result_t map_segment(struct hcl_context *ctx, int fd, uint64_t bytes)
{
    struct stat st;
    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size < bytes)
        return hcl_fail(HCLIENT_PROTOCOL, "the hreduced daemon sent a segment shorter than it says");
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return hcl_fail(HCLIENT_RESOURCE, "cannot map the daemon's segment of %llu bytes: %s",
                        (unsigned long long)bytes, strerror(errno));
    ctx->seg = p;
    ctx->seg_bytes = bytes;
    madvise(p, bytes, MADV_DONTFORK);
    int rc = hrp_seg_check(ctx->seg, bytes);
    if (rc == -EPROTONOSUPPORT)
        return hcl_fail(HCLIENT_VERSION,
                        "the hreduced daemon's segment has version %u, this library knows %u",
                        (unsigned)(ctx->seg->abi >> 16), HRP_ABI_MAJOR);
    return rc == 0 ? HCLIENT_OK : hcl_fail(HCLIENT_PROTOCOL, "the hreduced daemon sent a malformed segment");
}

static hclient_result_t take_welcome(struct hcl_context *ctx, const struct hrp_msg *msg, int *fds)
{
    if (msg->type == HRP_MSG_ERROR)
        return hcl_fail_text((hclient_result_t)msg->body.error.status, msg->text, msg->text_len);
    if (msg->type != HRP_MSG_WELCOME)
        return hcl_fail(HCLIENT_PROTOCOL, "the hreduced daemon answered HELLO with %s",
                        hrp_msg_name(msg->type));
    const struct hrp_msg_welcome *w = &msg->body.welcome;
    if (w->abi >> 16 != HRP_ABI_MAJOR)
        return hcl_fail(
            HCLIENT_VERSION,
            "the hreduced daemon speaks protocol version %u, this library %u; update the older one",
            w->abi >> 16, HRP_ABI_MAJOR);
    if (w->ncomms == 0)
        return hcl_fail(HCLIENT_PROTOCOL, "the hreduced daemon gave this session no segment");
    hclient_result_t r = map_segment(ctx, fds[0], w->segment_bytes);
    if (r != HCLIENT_OK)
        return r;
    ctx->ncomms = ctx->seg->ncomms < w->ncomms ? ctx->seg->ncomms : w->ncomms;
    ctx->window_bytes = w->window_bytes;
    memcpy(ctx->version, w->version, sizeof(ctx->version));
    ctx->daemon_pidfd = fds[1];
    ctx->doorbell = fds[2];
    fds[1] = fds[2] = -1;
    return HCLIENT_OK;
}

static hclient_result_t handshake(struct hcl_context *ctx, uint64_t deadline)
{
    hclient_result_t r = send_hello(ctx);
    if (r != HCLIENT_OK)
        return r;
    int fds[HRP_MAX_FDS], nfds = 0;
    struct hrp_msg msg;
    r = receive_welcome(ctx, deadline, &msg, fds, &nfds);
    if (r == HCLIENT_OK) {
        r = take_welcome(ctx, &msg, fds);
        for (int i = 0; i < nfds; i++)
            close_fd(&fds[i]);
    }
    return r;
}

static hclient_result_t start_watcher(struct hcl_context *ctx)
{
    ctx->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (ctx->wake < 0)
        return hcl_fail(HCLIENT_RESOURCE, "cannot make an eventfd: %s", strerror(errno));
    /* The application's handlers must not run on a thread that it does not know. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&ctx->watcher, NULL, hcl_watcher_main, ctx);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc == 0
               ? HCLIENT_OK
               : hcl_fail(HCLIENT_RESOURCE, "cannot start the library's watcher thread: %s", strerror(rc));
}

static hclient_result_t context_connect(const char *path, struct hcl_context **out)
{
    struct hcl_context *ctx = context_new(path);
    if (ctx == NULL)
        return hcl_fail(HCLIENT_RESOURCE, "out of memory");
    uint64_t deadline = hcl_now() + CONNECT_NS;
    hclient_result_t r = dial(ctx, deadline);
    if (r == HCLIENT_OK)
        r = handshake(ctx, deadline);
    if (r == HCLIENT_OK)
        r = start_watcher(ctx);
    if (r != HCLIENT_OK) {
        context_free(ctx);
        return r;
    }
    atomic_store(&contexts.known, true);
    *out = ctx;
    return HCLIENT_OK;
}

/* ---------------------------------------------------------------------------------------- references */

static struct hcl_context *find_live(const char *path)
{
    pthread_mutex_lock(&contexts.lock);
    struct hcl_context *ctx = contexts.list;
    while (ctx != NULL && (hcl_context_lost(ctx) || strcmp(ctx->socket_path, path) != 0))
        ctx = ctx->next;
    if (ctx != NULL)
        ctx->refs++;
    pthread_mutex_unlock(&contexts.lock);
    return ctx;
}

hclient_result_t hcl_context_get(const char *path, struct hcl_context **out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    if (path == NULL)
        path = getenv("HREDUCE_SOCKET");
    if (path == NULL || path[0] == 0)
        path = HRP_DEFAULT_SOCKET;
    pthread_mutex_lock(&contexts.connect);
    struct hcl_context *ctx = find_live(path);
    hclient_result_t r = HCLIENT_OK;
    if (ctx == NULL) {
        r = context_connect(path, &ctx);
        if (r == HCLIENT_OK) {
            pthread_mutex_lock(&contexts.lock);
            ctx->next = contexts.list;
            contexts.list = ctx;
            pthread_mutex_unlock(&contexts.lock);
        }
    }
    pthread_mutex_unlock(&contexts.connect);
    if (r == HCLIENT_OK)
        *out = ctx;
    return r;
}

void hcl_context_ref(struct hcl_context *ctx)
{
    pthread_mutex_lock(&contexts.lock);
    ctx->refs++;
    pthread_mutex_unlock(&contexts.lock);
}

void hcl_context_put(struct hcl_context *ctx)
{
    pthread_mutex_lock(&contexts.lock);
    bool last = --ctx->refs == 0;
    if (last) {
        struct hcl_context **p = &contexts.list;
        while (*p != ctx)
            p = &(*p)->next;
        *p = ctx->next;
    }
    pthread_mutex_unlock(&contexts.lock);
    if (!last)
        return;
    atomic_store(&ctx->stop, true);
    hcl_watcher_wake(ctx);
    pthread_join(ctx->watcher, NULL);
    context_free(ctx);
}

bool hcl_context_each(bool (*fn)(struct hcl_context *ctx, void *arg), void *arg)
{
    pthread_mutex_lock(&contexts.lock);
    bool hit = false;
    for (struct hcl_context *ctx = contexts.list; ctx != NULL && !hit; ctx = ctx->next)
        hit = fn(ctx, arg);
    pthread_mutex_unlock(&contexts.lock);
    return hit;
}

/* ---------------------------------------------------------------------------------------------- loss */

void hcl_context_lose(struct hcl_context *ctx, uint32_t status, const char *fmt, ...)
{
    pthread_mutex_lock(&ctx->lock);
    bool first = !hcl_context_lost(ctx);
    if (first) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(ctx->lost_text, sizeof(ctx->lost_text), fmt, ap);
        va_end(ap);
        atomic_store_explicit(&ctx->lost, status, memory_order_release);
    }
    pthread_cond_broadcast(&ctx->answered);
    for (struct hcl_comm *c = ctx->comms; c != NULL; c = c->next)
        hcl_comm_wake(c);
    pthread_mutex_unlock(&ctx->lock);
    if (first && !atomic_load(&ctx->stop))
        hcl_log(HCLIENT_LOG_ERROR, "%s", ctx->lost_text);
}

hclient_result_t hcl_fail_lost(struct hcl_context *ctx)
{
    return hcl_fail((hclient_result_t)hcl_context_lost(ctx), "%s", ctx->lost_text);
}

/* ------------------------------------------------------------------------------------------ doorbells */

void hcl_doorbell_now(struct hcl_context *ctx)
{
    atomic_fetch_add_explicit(&ctx->seg->submits, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&ctx->seg->agent_asleep, memory_order_seq_cst) == 0)
        return;
    uint64_t one = 1;
    /* Full, or the daemon is gone: the agent has been rung, or the watcher will say so. */
    ssize_t n = write(ctx->doorbell, &one, sizeof(one));
    (void)n;
}

void hcl_doorbell(struct hcl_context *ctx)
{
    if (!hcl_group_defer(ctx))
        hcl_doorbell_now(ctx);
}

void hcl_watcher_wake(struct hcl_context *ctx)
{
    uint64_t one = 1;
    ssize_t n = write(ctx->wake, &one, sizeof(one));
    (void)n;
}
