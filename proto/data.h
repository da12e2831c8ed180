/* SPDX-License-Identifier: MIT */
/*
 * Frames between the agents of two daemons on a link's data streams. A frame is a struct hrp_frame and `len`
 * bytes of payload. Little endian (static-asserted below; both ends of a cluster are of one kind). The link
 * belongs to two authenticated daemons, yet everything here is checked: wrong values end that link, nothing
 * else.
 *
 * Frames of one stream arrive in order; streams of a link are independent. Payload goes only into a slot that
 * the receiver granted for exactly this (comm, op, unit, tag), or into the comm's reserved eager slot of
 * (peer, op).
 */
#ifndef HRP_DATA_H
#define HRP_DATA_H

#include <stdint.h>

#include "proto/types.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "peer frames are little endian");

#define HRP_FRAME_MAGIC 0x31667268u
#define HRP_FRAME_TEXT 2048u /* longest payload of a frame that is not DATA or EAGER */

enum hrp_frame_type {
    HRP_FRAME_DATA = 1,  /* block payload against a credit; unit, tag, slot, len */
    HRP_FRAME_EAGER = 2, /* small payload into the eager slot op % HRP_EAGER_SLOTS, behind those of smaller
                            tags; unit 0, tag, len. Tags above 0: where the roster has HRP_PLAN_EAGER_BLOCKS */
    HRP_FRAME_CREDIT =
        3, /* the receiver granted slots for (op, unit): slot = base of its area for this sender */
    HRP_FRAME_WATERMARK = 4, /* only the watermark; len 0 */
    HRP_FRAME_OP_REPORT = 5, /* to node 0 of the comm: op must fail; status, text */
    HRP_FRAME_OP_ABORT =
        6, /* node 0 to all: stop op, answer with OP_MARK to all and OP_ACK to node 0; status, text */
    HRP_FRAME_OP_ACK = 7,     /* to node 0: quiet; text: the local ranks that had not posted (may be empty) */
    HRP_FRAME_OP_FAILED = 8,  /* node 0 to all: final sentence; complete op with it */
    HRP_FRAME_OP_MARK = 9,    /* on every stream, behind the op's last payload: nothing of op follows. */
    HRP_FRAME_COMM_FAIL = 10, /* any node to all: the comm failed; status, text */
    HRP_FRAME_COMM_MARK =
        11, /* on every stream, behind the comm's last payload: the receiver may reuse its slots */
    HRP_FRAME_RANK_LEFT = 12, /* rank left the comm after its op `op`: no later op can complete */
    /* How fast a link is (hreducectl doctor), to a peer of minor version 2 or later. comm is 0, and so it is in the DATA
       that goes into the slot. */
    HRP_FRAME_PROBE_OPEN = 13,  /* give me a slot of HRP_PROBE_BYTES */
    HRP_FRAME_PROBE_SLOT = 14,  /* slot; or status: there is none */
    HRP_FRAME_PROBE_PING = 15,  /* op: number */
    HRP_FRAME_PROBE_PONG = 16,  /* answers PING, and DATA of comm 0, with its number */
    HRP_FRAME_PROBE_CLOSE = 17, /* all DATA was answered: the slot is free */
    HRP_NFRAMES = 18,
};

#define HRP_PROBE_BYTES (UINT64_C(1) << 20)

#define HRP_EAGER_SLOTS 8u

struct hrp_frame {
    uint32_t magic;
    uint8_t type;
    uint8_t status; /* enum hrp_status, failure frames */
    uint16_t tag;   /* DATA, EAGER: number of the message in the schedule */
    uint64_t comm;  /* first 8 bytes of the comm id */
    uint64_t op;
    /* Ops 1..watermark of this comm are complete on the sender's node: the receiver may reuse their eager
     * slots there. */
    uint64_t watermark;
    uint64_t slot; /* CREDIT: base offset; DATA: where the payload belongs, base + offset of the tag */
    uint32_t unit;
    uint32_t len;       /* payload bytes that follow */
    struct hrp_sig sig; /* DATA, EAGER, CREDIT: what the sender's ranks posted */
    uint32_t rank;      /* DATA, EAGER, CREDIT: one rank of the sender's node that posted it */
    uint32_t reserved[3];
};
_Static_assert(sizeof(struct hrp_frame) == 80, "layout");

/* 0, or -EPROTO: magic, type, reserved fields, or len out of range for the type (payload of DATA is bounded
 * by the credit). */
int hrp_frame_check(const struct hrp_frame *f);
const char *hrp_frame_name(unsigned type);

#endif
