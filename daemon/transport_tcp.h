/* SPDX-License-Identifier: MIT */
#ifndef HRD_TRANSPORT_TCP_H
#define HRD_TRANSPORT_TCP_H

#include "daemon/transport.h"

#define HRD_TCP_STREAMS_MAX 16
#define HRD_TCP_IO_THREADS_MAX 16

/*
 * I/O threads: they copy between sockets and memory for the links that were given them, so that a daemon's rate is not that
 * of one core. Stream 0, on which small frames run, stays the agent's: a hand-over would cost more than the copy.
 */
struct hrd_tcp_io;

/* 1 to HRD_TCP_IO_THREADS_MAX threads; spin_us: longest spin before one sleeps. NULL with errno. Any thread. */
struct hrd_tcp_io *hrd_tcp_io_new(unsigned threads, unsigned spin_us);
/* After the last link that uses them was closed. NULL is allowed. */
void hrd_tcp_io_free(struct hrd_tcp_io *io);

/* Connected, non-blocking sockets on which both sides have finished their hello; fd[i] is stream i on both
   ends. The conn owns them. */
struct hrd_tcp_conn {
    struct hrd_conn base;
    struct hrd_tcp_io
        *io; /* outlives the link; NULL: the agent drives all streams. Set before the link is made */
    unsigned n;
    int fd[HRD_TCP_STREAMS_MAX];
};

/* Takes the descriptors (also on failure, which closes them). NULL: no memory. */
struct hrd_tcp_conn *hrd_tcp_conn_new(const int *fd, unsigned n);

#endif
