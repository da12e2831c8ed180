/* SPDX-License-Identifier: MIT */
/* Which bytes of the user's buffers lie where in the stream of a staged op (proto/shm.h). */
#ifndef HCL_TAPE_H
#define HCL_TAPE_H

#include <stdint.h>

#include "client/comm.h"

/* A piece of the stream that lies in one segment without a gap. */
struct hcl_run {
    uint32_t seg;
    uint64_t off; /* bytes from the start of the segment */
    uint64_t len;
};

/* The longest one from pos on that ends at `end` or before. */
struct hcl_run hcl_run_at(const struct hrp_sig *sig, uint32_t nranks, uint64_t pos, uint64_t end);
/* Where the user's input for a run lies; NULL: this rank has none. op: sig, sends, send are set. */
const char *hcl_run_input(const struct hcl_comm *comm, const struct hcl_op *op, const struct hcl_run *run);
/* The same for its output; op: sig, recv are set. */
char *hcl_run_output(const struct hcl_comm *comm, const struct hcl_op *op, const struct hcl_run *run);
/* The position in op's stream at which a chunk ends. */
uint64_t hcl_chunk_end(const struct hcl_op *op, uint64_t chunk);

#endif
