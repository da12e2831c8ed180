/* SPDX-License-Identifier: MIT */
/*
 * Inside of the TCP transport. A stream is driven by the agent (transport_tcp.c) or by one I/O thread (tcp_io.c); which, is
 * settled when its link opens. Both move bytes with tcp_socket.c.
 *
 * Frames are the agent's matter in either case. The receiving half of a driven stream goes to and fro:
 *
 *   agent    hrd_tcp_io_receive()   wait for a header, or fill this payload (and what comes behind it)
 *   thread   hrd_tcp_io_take()      a header or the payload is complete
 *   agent    arrived(), place(), and again
 *
 * and only who has it touches it. The sending half stays with the thread: frames go to it one by one and come back when
 * their last byte is with the kernel. Both ways are lists that are pushed to and taken whole by atomic operations; the side
 * that sleeps says so first, looks again, and is woken by an eventfd.
 */
#ifndef HRD_TCP_INT_H
#define HRD_TCP_INT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "daemon/poller.h"
#include "daemon/transport_tcp.h"

/* Large enough for a run of small frames, small enough that copying out of it does not show. */
#define TCP_RX_BUFFER 8192u
/* One stream may not keep its thread from the others: bytes it moves before it lets them go. */
#define TCP_TURN_BYTES (UINT64_C(1) << 20)

struct tcp_link;
struct io_thread;

struct tcp_rx {
    size_t at, have; /* `have` unread bytes at `at` of buf */
    bool in_frame;   /* `got` bytes of frame's payload are there */
    struct hrp_frame frame;
    char *payload;
    uint64_t got;
    char buf[TCP_RX_BUFFER];
};

/* First in, first out, through hrd_tx.next. */
struct tcp_queue {
    struct hrd_tx *first, *last;
};

/* Why a driven stream can go on no more. */
enum tcp_fault { TCP_FINE, TCP_CLOSED, TCP_RECEIVE_FAILED, TCP_SEND_FAILED };

/* A stream's part of the hand-over; unused where the agent drives it. */
struct tcp_port {
    struct io_thread *thread; /* NULL: the agent drives the stream */
    /* agent to thread */
    _Atomic(struct hrd_tx *) tx_in; /* newest first */
    _Atomic bool rx_in;             /* the receiving half is given */
    _Atomic bool leave;             /* let go of the stream */
    _Atomic bool posted;            /* it is in the thread's inbox, once */
    struct tcp_stream *next_in;
    /* the thread's alone */
    struct tcp_queue tx;
    bool has_rx, readable, writable, dead, active;
    struct tcp_stream *next_active;
    /* thread to agent */
    _Atomic(struct hrd_tx *) tx_out; /* newest first */
    _Atomic bool rx_out;             /* the receiving half is given back */
    int fault_errno;                 /* written before fault */
    _Atomic int fault;               /* enum tcp_fault; set once */
    _Atomic bool reported;           /* it is in the link's list, once */
    struct tcp_stream *next_out;
};

struct tcp_stream {
    struct hrd_pollable
        pollable; /* in the agent's set where the agent drives the stream; has the socket in any case */
    struct tcp_link *link;
    unsigned index;
    bool want_write; /* the agent waits for room */
    struct tcp_queue
        tx; /* the agent's: all frames of a stream it drives; otherwise those since the last flush */
    struct tcp_rx rx;
    struct tcp_port port;
};

struct tcp_link {
    struct hrd_link base;
    struct hrd_poller *poller;
    bool broken;
    struct tcp_queue sent;            /* finished by the agent, done() not yet called */
    struct hrd_tcp_io *io;            /* drives all streams but the first; NULL: none */
    struct hrd_pollable wake;         /* eventfd, of a link with I/O threads */
    _Atomic(struct tcp_stream *) out; /* streams with news for the agent, newest first */
    _Atomic bool armed;               /* the agent sleeps: news are to wake it */
    unsigned driven;                  /* under the lock of io: streams that its threads have not let go of */
    struct tcp_stream stream[];
};

/* ---- tcp_socket.c: one system call each, which does not block ------------------------------------------------ */

void hrd_tcp_queue_add(struct tcp_queue *q, struct hrd_tx *tx);
struct hrd_tx *hrd_tcp_queue_take(struct tcp_queue *q);
/* Reads what the payload in progress still lacks, and what comes behind it into the buffer. Bytes, 0 at the end of the
   stream, or negative errno. *drained: less came than there was room for. */
ssize_t hrd_tcp_receive(int fd, struct tcp_rx *rx, bool *drained);
/* Sends the first frames of q; those that are gone with it move to `sent`. Bytes, or negative errno. */
ssize_t hrd_tcp_transmit(int fd, struct tcp_queue *q, struct tcp_queue *sent);

/* ---- tcp_io.c: the agent's side ------------------------------------------------------------------------------ */

/* From now on a thread drives the stream. 0, or negative errno. */
int hrd_tcp_io_drive(struct hrd_tcp_io *io, struct tcp_stream *s);
/* Gives the receiving half. */
void hrd_tcp_io_receive(struct tcp_stream *s);
/* Gives what is queued in s->tx. */
void hrd_tcp_io_send(struct tcp_stream *s);
/* All streams of the link with news, oldest first through port.next_out. */
struct tcp_stream *hrd_tcp_io_news(struct tcp_link *l);
/* One of these: frames that are gone, and whether the receiving half is back. */
bool hrd_tcp_io_take(struct tcp_stream *s, struct tcp_queue *sent);
/* Waits until the threads let go of all streams of the link, that is for one system call of theirs. The queues of the
   streams are the agent's then; what was sent of them is in port.tx_out. */
void hrd_tcp_io_release(struct tcp_link *l);

#endif
