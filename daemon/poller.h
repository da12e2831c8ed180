/* SPDX-License-Identifier: MIT */
/* The agent's epoll set: what is in it carries the function to call. Agent thread only. */
#ifndef HRD_POLLER_H
#define HRD_POLLER_H

#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>

struct hrd_pollable {
    void (*ready)(struct hrd_pollable *p, uint32_t events);
    int fd;
};

struct hrd_poller {
    int epfd;
};

static inline int hrd_poller_add(struct hrd_poller *po, struct hrd_pollable *p, uint32_t events)
{
    struct epoll_event ev = {.events = events, .data.ptr = p};
    return epoll_ctl(po->epfd, EPOLL_CTL_ADD, p->fd, &ev);
}

static inline int hrd_poller_mod(struct hrd_poller *po, struct hrd_pollable *p, uint32_t events)
{
    struct epoll_event ev = {.events = events, .data.ptr = p};
    return epoll_ctl(po->epfd, EPOLL_CTL_MOD, p->fd, &ev);
}

static inline void hrd_poller_del(struct hrd_poller *po, struct hrd_pollable *p)
{
    (void)epoll_ctl(po->epfd, EPOLL_CTL_DEL, p->fd, NULL);
}

#endif
