/* SPDX-License-Identifier: MIT */
#ifndef HRD_TRANSPORT_TCP_H
#define HRD_TRANSPORT_TCP_H

#include "daemon/transport.h"

#define HRD_TCP_STREAMS_MAX 16

/* Connected, non-blocking sockets on which both sides have finished their hello; fd[i] is stream i on both
   ends. The conn owns them. */
struct hrd_tcp_conn {
    struct hrd_conn base;
    unsigned n;
    int fd[HRD_TCP_STREAMS_MAX];
};

/* Takes the descriptors (also on failure, which closes them). NULL: no memory. */
struct hrd_tcp_conn *hrd_tcp_conn_new(const int *fd, unsigned n);

#endif
