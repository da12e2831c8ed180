/* SPDX-License-Identifier: MIT */
#include "proto/fdpass.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "proto/wire.h"

#define FD_ROOM CMSG_SPACE(sizeof(int) * HRP_MAX_FDS)

union control {
    struct cmsghdr align;
    char buf[FD_ROOM];
};

int hrp_send_fds(int sock, const void *buf, size_t len, const int *fds, int nfds)
{
    if (nfds < 0 || nfds > HRP_MAX_FDS || len == 0)
        return -EINVAL;
    struct iovec iov = {.iov_base = (void *)buf, .iov_len = len};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    union control control;
    if (nfds > 0) {
        memset(&control, 0, sizeof(control));
        msg.msg_control = control.buf;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)nfds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)nfds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)nfds);
    }
    ssize_t n;
    do
        n = sendmsg(sock, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EWOULDBLOCK ? -EAGAIN : -errno;
    return (size_t)n == len ? 0 : -EPROTO;
}

/* Takes the descriptors out of every control message; false when one is not SCM_RIGHTS. */
static int take_fds(struct msghdr *msg, int *fds, int maxfds, int *nfds)
{
    int known = 1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c != NULL; c = CMSG_NXTHDR(msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) {
            known = 0;
            continue;
        }
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
            if (*nfds < maxfds)
                fds[(*nfds)++] = fd;
            else
                close(fd);
        }
    }
    return known;
}

long hrp_recv_fds(int sock, void *buf, size_t size, int *fds, int maxfds, int *nfds)
{
    *nfds = 0;
    if (maxfds < 0 || maxfds > HRP_MAX_FDS)
        return -EINVAL;
    struct iovec iov = {.iov_base = buf, .iov_len = size};
    union control control;
    /* Exactly the room for maxfds descriptors: the kernel never installs one that nobody expects. */
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.buf,
                         .msg_controllen = CMSG_LEN(sizeof(int) * (size_t)maxfds)};
    ssize_t n;
    do
        n = recvmsg(sock, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EWOULDBLOCK ? -EAGAIN : -errno;
    int known = take_fds(&msg, fds, maxfds, nfds);
    if (known && !(msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
        return n;
    /* Fewer than there was room for, and yet cut short: this process has no free descriptor. */
    long rc = (msg.msg_flags & MSG_CTRUNC) && known && *nfds < maxfds ? -EMFILE : -EPROTO;
    for (int i = 0; i < *nfds; i++)
        close(fds[i]);
    *nfds = 0;
    return rc;
}
