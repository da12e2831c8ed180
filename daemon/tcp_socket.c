/* SPDX-License-Identifier: MIT */
/*
 * Bytes of a stream from and to its socket. Payload goes straight from the arena to the socket and from the socket into the
 * slot that the handler named; only headers and the first bytes behind them pass through a small buffer.
 */
#include "daemon/tcp_int.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define TX_BATCH 16

void hrd_tcp_queue_add(struct tcp_queue *q, struct hrd_tx *tx)
{
    tx->next = NULL;
    if (q->last)
        q->last->next = tx;
    else
        q->first = tx;
    q->last = tx;
}

struct hrd_tx *hrd_tcp_queue_take(struct tcp_queue *q)
{
    struct hrd_tx *tx = q->first;
    if (!tx)
        return NULL;
    q->first = tx->next;
    if (!q->first)
        q->last = NULL;
    tx->next = NULL;
    return tx;
}

ssize_t hrd_tcp_receive(int fd, struct tcp_rx *rx, bool *drained)
{
    struct iovec iov[2];
    int niov = 0;
    size_t direct = 0;
    if (rx->in_frame) {
        direct = rx->frame.len - rx->got;
        iov[niov++] = (struct iovec){rx->payload + rx->got, direct};
        rx->at = rx->have = 0; /* all of it went into the payload */
    }
    size_t room = TCP_RX_BUFFER - rx->at - rx->have;
    iov[niov++] = (struct iovec){rx->buf + rx->at + rx->have, room};
    ssize_t n;
    do
        n = readv(fd, iov, niov);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EWOULDBLOCK ? -EAGAIN : -errno;
    size_t got = (size_t)n < direct ? (size_t)n : direct;
    rx->got += got;
    rx->have += (size_t)n - got;
    *drained = (size_t)n < direct + room;
    return n;
}

static unsigned gather(const struct tcp_queue *q, struct iovec *iov, unsigned max)
{
    unsigned n = 0;
    for (struct hrd_tx *tx = q->first; tx && n + 2 <= max; tx = tx->next) {
        uint64_t head = sizeof(tx->frame), skip = tx->sent;
        if (skip < head)
            iov[n++] = (struct iovec){(char *)&tx->frame + skip, head - skip};
        skip = skip > head ? skip - head : 0;
        if (tx->frame.len > skip)
            iov[n++] = (struct iovec){(char *)(uintptr_t)tx->payload + skip, tx->frame.len - skip};
    }
    return n;
}

/* n more bytes are sent. */
static void advance(struct tcp_queue *q, uint64_t n, struct tcp_queue *sent)
{
    while (n > 0 && q->first) {
        struct hrd_tx *tx = q->first;
        uint64_t left = sizeof(tx->frame) + tx->frame.len - tx->sent;
        if (n < left) {
            tx->sent += n;
            return;
        }
        n -= left;
        hrd_tcp_queue_add(sent, hrd_tcp_queue_take(q));
    }
}

ssize_t hrd_tcp_transmit(int fd, struct tcp_queue *q, struct tcp_queue *sent)
{
    struct iovec iov[2 * TX_BATCH];
    struct msghdr msg = {.msg_iov = iov};
    msg.msg_iovlen = gather(q, iov, 2 * TX_BATCH);
    ssize_t n;
    do
        n = sendmsg(fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EWOULDBLOCK ? -EAGAIN : -errno;
    advance(q, (uint64_t)n, sent);
    return n;
}
