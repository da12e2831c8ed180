/* SPDX-License-Identifier: MIT */
/* A control session with the daemon: no segment, questions and answers only. */
#include "daemon/ctl/ctl.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "proto/fdpass.h"
#include "proto/status.h"
#include "proto/wire.h"

static uint64_t now_ms(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

/* ---- connecting ------------------------------------------------------------------------------------------- */

static int explain_connect(const char *path, int err)
{
    switch (err) {
    case ENOENT:
        ctl_complain(
            "no daemon: there is no socket %s; start it with 'systemctl start hreduced', or name its socket "
            "with --socket or HREDUCE_SOCKET",
            path);
        break;
    case ECONNREFUSED:
        ctl_complain(
            "no daemon behind the socket %s: it has stopped or was killed; start it with 'systemctl start "
            "hreduced' and see 'journalctl -u hreduced'",
            path);
        break;
    case EACCES:
    case EPERM:
        ctl_complain("no permission for the socket %s; ask for membership in its group (see 'ls -l'), or run "
                     "hreducectl as root",
                     path);
        break;
    case EAGAIN:
        ctl_complain("the daemon behind %s takes no connections; it is overloaded or stopped", path);
        break;
    default:
        ctl_complain("connecting to %s failed: %s", path, strerror(err));
        break;
    }
    return CTL_UNREACHABLE;
}

static int open_socket(struct ctl_client *c)
{
    struct sockaddr_un sun = {.sun_family = AF_UNIX};
    if (strlen(c->path) >= sizeof(sun.sun_path)) {
        ctl_complain("the socket path is longer than %zu characters: %s", sizeof(sun.sun_path) - 1, c->path);
        return CTL_USAGE;
    }
    memcpy(sun.sun_path, c->path, strlen(c->path) + 1);
    c->sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (c->sock < 0)
        return explain_connect(c->path, errno);
    while (connect(c->sock, (struct sockaddr *)&sun, sizeof(sun)) != 0) {
        struct timespec pause = {.tv_nsec = 20000000};
        if (errno != EAGAIN || now_ms() >= c->deadline_ms)
            return explain_connect(c->path, errno);
        nanosleep(&pause, NULL);
    }
    return CTL_OK;
}

/* ---- messages --------------------------------------------------------------------------------------------- */

static void complain(struct ctl_client *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void complain(struct ctl_client *c, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->error, sizeof(c->error), fmt, ap);
    va_end(ap);
    if (!c->keep_error)
        ctl_complain("%s", c->error);
}

static int wait_readable(struct ctl_client *c)
{
    for (;;) {
        uint64_t now = now_ms();
        struct pollfd p = {.fd = c->sock, .events = POLLIN};
        int left = now < c->deadline_ms ? (int)(c->deadline_ms - now) : 0;
        int n = poll(&p, 1, left);
        if (n > 0)
            return CTL_OK;
        if (n == 0 || errno != EINTR)
            break;
    }
    complain(
        c,
        "the daemon behind %s did not answer within %u s; it may be stopped or stuck: see 'journalctl -u "
        "hreduced'",
        c->path, c->wait_ms / 1000);
    return CTL_UNREACHABLE;
}

static int send_message(struct ctl_client *c, const struct hrp_msg *msg, const int *fds, int nfds)
{
    unsigned char buf[16384];
    long len = hrp_msg_encode(msg, buf, sizeof(buf));
    int rc = len < 0 ? (int)len : hrp_send_fds(c->sock, buf, (size_t)len, fds, nfds);
    if (rc == 0)
        return CTL_OK;
    complain(c, "sending to the daemon behind %s failed: %s", c->path, strerror(-rc));
    return CTL_UNREACHABLE;
}

/* The next message, into buf; an ERROR is printed and fails. fds that come with it are closed. */
static int receive(struct ctl_client *c, struct hrp_msg *msg, unsigned char *buf, unsigned want)
{
    int fds[HRP_MAX_FDS], nfds = 0;
    int rc = wait_readable(c);
    if (rc != CTL_OK)
        return rc;
    long n = hrp_recv_fds(c->sock, buf, HRP_MSG_MAX, fds, HRP_MAX_FDS, &nfds);
    for (int i = 0; i < nfds; i++)
        close(fds[i]);
    if (n <= 0) {
        complain(c, "the daemon behind %s closed the connection%s%s", c->path, n < 0 ? ": " : "",
                 n < 0 ? strerror((int)-n) : "");
        return CTL_FAILED;
    }
    if (hrp_msg_decode(msg, buf, (size_t)n) != 0) {
        complain(c, "the daemon behind %s sent a malformed message; it may be of another version", c->path);
        return CTL_FAILED;
    }
    if (msg->type == HRP_MSG_ERROR) {
        complain(c, "the daemon refused (%s): %.*s", hrp_status_name(msg->body.error.status),
                 (int)msg->text_len, msg->text ? msg->text : "");
        return CTL_FAILED;
    }
    if (msg->type != want || msg->cookie != c->cookie) {
        complain(c, "the daemon behind %s answered with %s instead of %s", c->path, hrp_msg_name(msg->type),
                 hrp_msg_name(want));
        return CTL_FAILED;
    }
    return CTL_OK;
}

static int say_hello(struct ctl_client *c)
{
    unsigned char buf[HRP_MSG_MAX];
    struct hrp_msg msg = {.type = HRP_MSG_HELLO, .cookie = ++c->cookie};
    int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (pidfd < 0) {
        ctl_complain("pidfd_open failed: %s; Linux 5.3 or later is needed", strerror(errno));
        return CTL_FAILED;
    }
    msg.body.hello.abi = HRP_ABI;
    msg.body.hello.flags = HRP_HELLO_CTL;
    msg.body.hello.pid = (int32_t)getpid();
    int rc = send_message(c, &msg, &pidfd, 1);
    close(pidfd);
    if (rc == CTL_OK)
        rc = receive(c, &msg, buf, HRP_MSG_WELCOME);
    if (rc == CTL_OK)
        c->daemon_abi = msg.body.welcome.abi;
    if (rc == CTL_OK)
        memcpy(c->daemon_version, msg.body.welcome.version, sizeof(c->daemon_version));
    return rc;
}

int ctl_connect(struct ctl_client *c, const char *path)
{
    *c = (struct ctl_client){
        .sock = -1, .path = path, .wait_ms = CTL_TIMEOUT_MS, .deadline_ms = now_ms() + CTL_TIMEOUT_MS};
    int rc = open_socket(c);
    if (rc == CTL_OK)
        rc = say_hello(c);
    if (rc != CTL_OK)
        ctl_close(c);
    return rc;
}

void ctl_close(struct ctl_client *c)
{
    if (c->sock >= 0)
        close(c->sock);
    c->sock = -1;
}

/* Collects the parts of a TEXT; *text is the caller's to free, on failure too. */
static int receive_text(struct ctl_client *c, char **text, size_t *len)
{
    unsigned char buf[HRP_MSG_MAX];
    struct hrp_msg msg;
    do {
        int rc = receive(c, &msg, buf, HRP_MSG_TEXT);
        if (rc != CTL_OK)
            return rc;
        char *more = realloc(*text, *len + msg.text_len + 1);
        if (!more) {
            complain(c, "out of memory for the daemon's answer");
            return CTL_FAILED;
        }
        *text = more;
        if (msg.text_len > 0)
            memcpy(*text + *len, msg.text, msg.text_len);
        *len += msg.text_len;
    } while (msg.body.text.more);
    return CTL_OK;
}

int ctl_ask_msg(struct ctl_client *c, struct hrp_msg *msg, unsigned wait_ms, json_t **doc)
{
    char *text = NULL;
    size_t len = 0;
    json_error_t error;
    msg->cookie = ++c->cookie;
    c->wait_ms = wait_ms;
    c->deadline_ms = now_ms() + wait_ms;
    int rc = send_message(c, msg, NULL, 0);
    if (rc == CTL_OK)
        rc = receive_text(c, &text, &len);
    if (rc == CTL_OK) {
        *doc = json_loadb(text, len, 0, &error);
        if (!*doc) {
            complain(c, "the daemon's answer is no JSON (%s at byte %d)", error.text, error.position);
            rc = CTL_FAILED;
        }
    }
    free(text);
    return rc;
}

int ctl_ask(struct ctl_client *c, unsigned type, json_t **doc)
{
    struct hrp_msg msg = {.type = (uint16_t)type};
    return ctl_ask_msg(c, &msg, CTL_TIMEOUT_MS, doc);
}

int ctl_ask_once(const char *path, unsigned type, json_t **doc)
{
    struct ctl_client c;
    int rc = ctl_connect(&c, path);
    if (rc != CTL_OK)
        return rc;
    rc = ctl_ask(&c, type, doc);
    ctl_close(&c);
    return rc;
}
