/* SPDX-License-Identifier: MIT */
/*
 * One collective call on its way to the daemon, and the ways it can take: where its buffers lie decides how its input
 * reaches the daemon and its output comes back. A way is one table; collective.c asks each in turn and knows none of them.
 */
#ifndef HCL_CALL_H
#define HCL_CALL_H

#include <stdbool.h>
#include <stdint.h>

#include "client/comm.h"
#include "proto/shm.h"

/* One call, as the caller made it. */
struct hcl_call {
    const char *name;
    struct hrp_sig sig;
    const char *send;
    char *recv;
    void *stream;        /* as the caller gave it; NULL is no stream, or CUDA's legacy default stream */
    uint32_t hint;       /* HRP_DESC_OVERLAP_*, or 0; for ops of a stream */
    bool defer;          /* the stream's wait comes with hclient_stream_wait() */
    bool sends;          /* this rank's send is looked at */
    uint64_t send_bytes; /* of the buffers on this rank */
    uint64_t recv_bytes;
    const void *in_place; /* the one send that recv allows to share its memory */
};

struct hcl_way {
    /*
     * Under post_lock, before anything is queued. Whether the call goes this way; if so *result is HCLIENT_OK and desc
     * has its buffers and flags as far as they do not depend on the op's number, or *result is the refusal. May wait for
     * older ops of the comm.
     */
    bool (*takes)(struct hcl_comm *comm, const struct hcl_call *c, struct hrp_desc *desc,
                  hclient_result_t *result);
    /* Under post_lock: op is the call's; what is missing in desc. NULL: nothing. */
    void (*describe)(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_op *op,
                     struct hrp_desc *desc);
    /*
     * Under post_lock, after the descriptor was pushed. *rings: it rang the doorbell behind it. A failure ends the comm
     * with that sentence. NULL: nothing.
     */
    hclient_result_t (*start)(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_op *op,
                              bool *rings);
    uint64_t ready; /* chunks that are ready from the start: HRP_CHUNK_ALL or 0 */
    bool in_stage;  /* the op is one of the stage's queue */
    bool in_stream; /* ... of a CUDA stream: see gpu.h */
    bool defers;    /* ... which can wait for it later */
};

/* Under post_lock: waits until no op of the other kind (of streams, of the stage) uses the next `bytes` of the window;
   among themselves they see to it. Refused when a deferred op does, because that may wait for the caller. */
hclient_result_t hcl_stage_make_room(struct hcl_comm *comm, const struct hcl_call *c, uint64_t bytes,
                                     bool gpu);
/* Under post_lock: gives op its place in the stream of the comm's window, which exists, and desc that place. */
void hcl_stage_place(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_op *op,
                     struct hrp_desc *desc);

extern const struct hcl_way hcl_way_shared; /* both sides in memory that the daemon has */
extern const struct hcl_way hcl_way_staged; /* host memory, copied through the comm's window */

#endif
