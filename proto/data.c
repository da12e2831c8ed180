/* SPDX-License-Identifier: MIT */
#include "proto/data.h"

#include <errno.h>

#include "proto/status.h"

static const char *const names[HRP_NFRAMES] = {
    [HRP_FRAME_DATA] = "DATA",
    [HRP_FRAME_EAGER] = "EAGER",
    [HRP_FRAME_CREDIT] = "CREDIT",
    [HRP_FRAME_WATERMARK] = "WATERMARK",
    [HRP_FRAME_OP_REPORT] = "OP_REPORT",
    [HRP_FRAME_OP_ABORT] = "OP_ABORT",
    [HRP_FRAME_OP_ACK] = "OP_ACK",
    [HRP_FRAME_OP_FAILED] = "OP_FAILED",
    [HRP_FRAME_OP_MARK] = "OP_MARK",
    [HRP_FRAME_COMM_FAIL] = "COMM_FAIL",
    [HRP_FRAME_COMM_MARK] = "COMM_MARK",
    [HRP_FRAME_RANK_LEFT] = "RANK_LEFT",
    [HRP_FRAME_PROBE_OPEN] = "PROBE_OPEN",
    [HRP_FRAME_PROBE_SLOT] = "PROBE_SLOT",
    [HRP_FRAME_PROBE_PING] = "PROBE_PING",
    [HRP_FRAME_PROBE_PONG] = "PROBE_PONG",
    [HRP_FRAME_PROBE_CLOSE] = "PROBE_CLOSE",
};

const char *hrp_frame_name(unsigned type)
{
    return type < HRP_NFRAMES && names[type] ? names[type] : "unknown frame";
}

int hrp_frame_check(const struct hrp_frame *f)
{
    if (f->magic != HRP_FRAME_MAGIC || f->type == 0 || f->type >= HRP_NFRAMES || f->status >= HRP_NSTATUS)
        return -EPROTO;
    if (f->reserved[0] || f->reserved[1] || f->reserved[2])
        return -EPROTO;
    switch (f->type) {
    case HRP_FRAME_DATA:
    case HRP_FRAME_EAGER:
        return f->op == 0 ? -EPROTO : 0;
    case HRP_FRAME_CREDIT:
        return f->op == 0 || f->len != 0 ? -EPROTO : 0;
    case HRP_FRAME_WATERMARK:
    case HRP_FRAME_OP_MARK:
    case HRP_FRAME_COMM_MARK:
    case HRP_FRAME_RANK_LEFT:
        return f->len != 0 ? -EPROTO : 0;
    case HRP_FRAME_PROBE_OPEN:
    case HRP_FRAME_PROBE_SLOT:
    case HRP_FRAME_PROBE_PING:
    case HRP_FRAME_PROBE_PONG:
    case HRP_FRAME_PROBE_CLOSE:
        return f->len != 0 || f->comm != 0 ? -EPROTO : 0;
    default:
        return f->len > HRP_FRAME_TEXT ? -EPROTO : 0;
    }
}
