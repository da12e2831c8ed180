/* SPDX-License-Identifier: MIT */
/*
 * One message with descriptors over a SOCK_SEQPACKET socket. Never blocks (MSG_DONTWAIT, MSG_NOSIGNAL);
 * received descriptors are close-on-exec.
 */
#ifndef HRP_FDPASS_H
#define HRP_FDPASS_H

#include <stddef.h>

/* 0; -EAGAIN: the socket buffer is full, nothing was sent; other negative errno: the connection is broken. */
int hrp_send_fds(int sock, const void *buf, size_t len, const int *fds, int nfds);
/*
 * Receives one datagram and up to maxfds descriptors. Returns its length (0: the peer closed), -EAGAIN,
 * -EPROTO for a truncated message or control message, more than maxfds descriptors or foreign ancillary data,
 * -EMFILE when this process has no free descriptor to receive into (in both cases all that were received are
 * closed, and the message is lost), or another negative errno. On success *nfds descriptors belong to the
 * caller. maxfds: 0..HRP_MAX_FDS.
 */
long hrp_recv_fds(int sock, void *buf, size_t size, int *fds, int maxfds, int *nfds);

#endif
