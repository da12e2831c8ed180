/* SPDX-License-Identifier: MIT */
#include "daemon/listener.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>
#include <time.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/session.h"

#define BACKLOG 512
/* Connections taken before others have their turn. */
#define ACCEPT_BURST 16
#define LOCK_WAIT_MS 1000
/* How long to leave the backlog alone when there is no descriptor at all. */
#define PAUSE_MS 200

struct hrd_listener {
    struct hrd_daemon *d;
    int fd;
    int lock_fd;
    int spare_fd; /* given up to answer one connection when descriptors are out */
    bool activated;
    bool made; /* the socket file is ours to remove */
    bool started;
    char path[108];
    uv_poll_t poll;
    uv_timer_t pause;
    unsigned closing;
    struct hrd_log_limit log;
};

static int fail(char *err, size_t errlen, int rc, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
static int fail(char *err, size_t errlen, int rc, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err, errlen, fmt, ap);
    va_end(ap);
    return rc;
}

/* ---- the lock --------------------------------------------------------------------------------------------- */

/* The directory is systemd's to make (RuntimeDirectory=); by hand it may be missing below /run. */
static void make_directory(const char *path)
{
    char copy[160];
    snprintf(copy, sizeof(copy), "%s", path);
    const char *dir = dirname(copy);
    if (mkdir(dir, 0755) == 0)
        hrd_notice("made the directory %s for the socket", dir);
}

static void sleep_ms(long ms)
{
    struct timespec ts = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&ts, NULL);
}

/* Whoever holds the lock wrote its pid there. */
static long holder(int fd)
{
    char text[32] = "";
    ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
    return n > 0 ? strtol(text, NULL, 10) : 0;
}

static int take_lock(struct hrd_listener *l, char *err, size_t errlen)
{
    char path[128], text[32];
    snprintf(path, sizeof(path), "%s.lock", l->path);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0 && errno == ENOENT) {
        make_directory(l->path);
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    }
    if (fd < 0)
        return fail(
            err, errlen, -errno,
            "the lock file %s cannot be opened: %s; make its directory writable for this user, or set socket "
            "in hreduced.conf",
            path, strerror(errno));
    /* A killed daemon holds its lock until the kernel has torn it down. */
    for (int waited = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; waited += 10) {
        if (errno != EWOULDBLOCK || waited >= LOCK_WAIT_MS) {
            int rc = -errno;
            fail(err, errlen, rc,
                 "another hreduced (process %ld) serves %s; stop it first, or give this one another "
                 "socket in its configuration",
                 holder(fd), l->path);
            close(fd);
            return rc;
        }
        sleep_ms(10);
    }
    int n = snprintf(text, sizeof(text), "%d\n", (int)getpid());
    if (ftruncate(fd, 0) != 0 || pwrite(fd, text, (size_t)n, 0) != n)
        hrd_warn("the lock file %s could not be written: %s", path, strerror(errno));
    l->lock_fd = fd;
    return 0;
}

/* ---- the socket ------------------------------------------------------------------------------------------- */

static int address(const char *path, struct sockaddr_un *sun)
{
    *sun = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof(sun->sun_path))
        return -ENAMETOOLONG;
    memcpy(sun->sun_path, path, strlen(path) + 1);
    return 0;
}

/* Whether somebody listens there: systemd does, without holding our lock, when the socket unit is active. */
static bool is_alive(const struct sockaddr_un *sun)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return false;
    int rc = connect(fd, (const struct sockaddr *)sun, sizeof(*sun));
    bool alive = rc == 0 || errno == EAGAIN;
    close(fd);
    return alive;
}

static int remove_stale(const struct hrd_listener *l, const struct sockaddr_un *sun, char *err, size_t errlen)
{
    struct stat st;
    if (lstat(l->path, &st) != 0)
        return errno == ENOENT ? 0 : fail(err, errlen, -errno, "%s: %s", l->path, strerror(errno));
    if (!S_ISSOCK(st.st_mode))
        return fail(err, errlen, -EEXIST,
                    "%s exists and is not a socket; remove it, or set socket in hreduced.conf", l->path);
    if (is_alive(sun))
        return fail(
            err, errlen, -EADDRINUSE,
            "somebody else listens on %s, perhaps systemd for hreduced.socket; start the service with "
            "'systemctl start hreduced', or stop the socket unit",
            l->path);
    if (unlink(l->path) != 0)
        return fail(err, errlen, -errno, "the old socket %s cannot be removed: %s", l->path, strerror(errno));
    hrd_info("removed the socket that a former daemon left at %s", l->path);
    return 0;
}

static void set_group(const struct hrd_listener *l)
{
    const char *name = l->d->cfg.socket_group;
    const struct group *g = getgrnam(name);
    if (!g)
        hrd_notice("there is no group %s (socket_group), so only the daemon's own group may connect to %s",
                   name, l->path);
    else if (g->gr_gid != getegid() && chown(l->path, (uid_t)-1, g->gr_gid) != 0)
        hrd_notice("%s could not be given to group %s (%s), so only the daemon's own group may connect",
                   l->path, name, strerror(errno));
}

static int make_socket(struct hrd_listener *l, char *err, size_t errlen)
{
    struct sockaddr_un sun;
    if (address(l->path, &sun) != 0)
        return fail(err, errlen, -ENAMETOOLONG, "the socket path %s is longer than %zu characters", l->path,
                    sizeof(sun.sun_path) - 1);
    int rc = remove_stale(l, &sun, err, errlen);
    if (rc != 0)
        return rc;
    l->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l->fd < 0)
        return fail(err, errlen, -errno, "a socket cannot be made: %s", strerror(errno));
    /* Nobody gets in between bind and chmod. */
    mode_t old = umask(0177);
    rc = bind(l->fd, (struct sockaddr *)&sun, sizeof(sun));
    int bind_errno = errno;
    umask(old);
    if (rc != 0)
        return fail(err, errlen, -bind_errno, "the socket %s cannot be made: %s", l->path,
                    strerror(bind_errno));
    l->made = true;
    set_group(l);
    if (chmod(l->path, 0660) != 0 || listen(l->fd, BACKLOG) != 0)
        return fail(err, errlen, -errno, "the socket %s cannot be opened to clients: %s", l->path,
                    strerror(errno));
    return 0;
}

/* 1: systemd gave the socket; 0: it did not. */
static int take_activated(struct hrd_listener *l, char *err, size_t errlen)
{
    int n = sd_listen_fds(1);
    if (n == 0)
        return 0;
    if (n < 0)
        return fail(err, errlen, n, "the sockets that systemd passed cannot be taken: %s", strerror(-n));
    int fd = SD_LISTEN_FDS_START;
    if (n != 1 || sd_is_socket_unix(fd, SOCK_SEQPACKET, 1, NULL, 0) <= 0)
        return fail(
            err, errlen, -EINVAL,
            "systemd passed %d sockets; hreduced takes one, a listening Unix socket of sequential packets "
            "(ListenSequentialPacket= in hreduced.socket)",
            n);
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0)
        return fail(err, errlen, -errno, "the socket that systemd passed cannot be used: %s",
                    strerror(errno));
    struct sockaddr_un sun = {0};
    socklen_t len = sizeof(sun);
    if (getsockname(fd, (struct sockaddr *)&sun, &len) == 0 && sun.sun_path[0] == '/')
        snprintf(l->path, sizeof(l->path), "%.107s", sun.sun_path);
    l->fd = fd;
    l->activated = true;
    return 1;
}

int hrd_listener_new(struct hrd_listener **out, struct hrd_daemon *d, char *err, size_t errlen)
{
    struct hrd_listener *l = calloc(1, sizeof(*l));
    if (!l)
        return fail(err, errlen, -ENOMEM, "out of memory");
    l->d = d;
    l->fd = l->lock_fd = -1;
    l->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    memcpy(l->path, d->cfg.socket, sizeof(l->path));
    int rc = take_activated(l, err, errlen);
    if (rc == 0) {
        rc = take_lock(l, err, errlen);
        if (rc == 0)
            rc = make_socket(l, err, errlen);
    }
    if (rc < 0) {
        hrd_listener_free(l);
        return rc;
    }
    *out = l;
    return 0;
}

const char *hrd_listener_path(const struct hrd_listener *l)
{
    return l->path;
}

bool hrd_listener_activated(const struct hrd_listener *l)
{
    return l->activated;
}

/* ---- accepting -------------------------------------------------------------------------------------------- */

static void on_listen(uv_poll_t *handle, int status, int events);

static void on_pause_over(uv_timer_t *timer)
{
    struct hrd_listener *l = timer->data;
    if (l->spare_fd < 0)
        l->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    uv_poll_start(&l->poll, UV_READABLE, on_listen);
}

/* With no descriptor left the backlog stays readable: look again later instead of at once. */
static void pause_accepting(struct hrd_listener *l)
{
    uv_poll_stop(&l->poll);
    uv_timer_start(&l->pause, on_pause_over, PAUSE_MS, 0);
}

/* The last descriptors belong to links, memory and replies. A new one has the lowest free number. */
static const char *short_of_descriptors(int fd, char *text, size_t len)
{
    struct rlimit lim;
    if (getrlimit(RLIMIT_NOFILE, &lim) != 0)
        return NULL;
    rlim_t reserve = lim.rlim_cur / 4 < 64 ? lim.rlim_cur / 4 : 64;
    if ((rlim_t)fd < lim.rlim_cur - reserve)
        return NULL;
    snprintf(
        text, len,
        "the daemon may have %llu descriptors open and needs the last %llu for itself; raise LimitNOFILE= of "
        "hreduced.service",
        (unsigned long long)lim.rlim_cur, (unsigned long long)reserve);
    return text;
}

static int accept_one(struct hrd_listener *l)
{
    int fd = accept4(l->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE) && l->spare_fd >= 0) {
        close(l->spare_fd);
        l->spare_fd = -1;
        fd = accept4(l->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    }
    return fd >= 0 ? fd : -errno;
}

static void on_listen(uv_poll_t *handle, int status, int events)
{
    struct hrd_listener *l = handle->data;
    char text[200];
    (void)status;
    (void)events;
    for (int i = 0; i < ACCEPT_BURST; i++) {
        int fd = accept_one(l);
        if (fd >= 0) {
            hrd_session_accept(l->d, fd, short_of_descriptors(fd, text, sizeof(text)));
            continue;
        }
        if (fd == -EAGAIN)
            return;
        if (fd == -ECONNABORTED || fd == -EINTR)
            continue;
        if (hrd_log_allowed(&l->log, 1, 60000, NULL))
            hrd_warn("no connection can be accepted: %s; trying again every %d ms", strerror(-fd), PAUSE_MS);
        pause_accepting(l);
        return;
    }
    if (l->spare_fd < 0)
        l->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

int hrd_listener_start(struct hrd_listener *l)
{
    int rc = uv_poll_init(l->d->loop, &l->poll, l->fd);
    if (rc != 0)
        return rc;
    uv_timer_init(l->d->loop, &l->pause);
    l->poll.data = l->pause.data = l;
    l->started = true;
    l->closing = 2;
    return uv_poll_start(&l->poll, UV_READABLE, on_listen);
}

void hrd_listener_stop(struct hrd_listener *l)
{
    if (!l->started)
        return;
    uv_poll_stop(&l->poll);
    uv_timer_stop(&l->pause);
}

static void release(struct hrd_listener *l)
{
    /* The lock file stays: removing it would let two daemons lock two files of one name. */
    if (l->made)
        unlink(l->path);
    if (l->fd >= 0)
        close(l->fd);
    if (l->spare_fd >= 0)
        close(l->spare_fd);
    if (l->lock_fd >= 0)
        close(l->lock_fd);
    free(l);
}

static void on_closed(uv_handle_t *handle)
{
    struct hrd_listener *l = handle->data;
    if (--l->closing == 0)
        release(l);
}

void hrd_listener_free(struct hrd_listener *l)
{
    if (!l)
        return;
    if (!l->started) {
        release(l);
        return;
    }
    hrd_listener_stop(l);
    uv_close((uv_handle_t *)&l->poll, on_closed);
    uv_close((uv_handle_t *)&l->pause, on_closed);
}
