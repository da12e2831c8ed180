/* SPDX-License-Identifier: MIT */
/*
 * The session segment: one memfd a session, made, filled and sealed (SHRINK, GROW, SEAL) by the daemon and
 * mapped read-write by both sides. Neither side trusts a word that the other writes: it is copied once, then
 * checked.
 *
 *   offset 0                         struct hrp_seg_header, one page
 *   comm_offset + i * comm_stride    struct hrp_comm_area of comm slot i, 0 <= i < ncomms (page-aligned)
 *
 * Every word has one writer, named at its declaration. "release/acquire" means the writer stores with
 * memory_order_release and the reader loads with memory_order_acquire.
 */
#ifndef HRP_SHM_H
#define HRP_SHM_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/types.h"

#define HRP_SEG_MAGIC \
    UINT64_C(0x7365636475657268) /* "hreduces", little endian on every machine we run on \
                                  */
#define HRP_ABI_MAJOR 1u
#define HRP_ABI_MINOR 3u /* 1: GPU buffers; 2: DOCTOR; 3: JOINED has what is required, JOINING */
#define HRP_ABI ((HRP_ABI_MAJOR << 16) | HRP_ABI_MINOR)

#define HRP_LINE 128u    /* producer's and consumer's words never share this many bytes */
#define HRP_OP_SLOTS 32u /* R: ops outstanding on a comm; slot of op k is k % R */
#define HRP_PAGE 4096u
#define HRP_COMM_TEXT 2048u
#define HRP_OP_TEXT 1000u

/*
 * Flag values: op << 20 | chunks. ready counts the chunks of HRP_STAGE_CHUNK bytes (of the op's stream, see
 * struct hrp_bufref) whose inputs are in place and whose output space is free; done counts those whose
 * outputs are written. HRP_CHUNK_ALL stands for the whole op: ready is set to it at once for buffers that are
 * not staged, done is set to it last, after the completion slot. Waits are always ">=" on the op's own slot.
 */
#define HRP_CHUNK_BITS 20u
#define HRP_CHUNK_ALL ((UINT64_C(1) << HRP_CHUNK_BITS) - 1)
#define HRP_STAGE_CHUNK (UINT64_C(256) << 10)
/* Stored by the library alone, once the daemon process is gone. Streams compare as signed numbers do. */
#define HRP_FLAG_POISON ((uint64_t)INT64_MAX)

static inline uint64_t hrp_flag(uint64_t op, uint64_t chunks)
{
    return (op << HRP_CHUNK_BITS) | chunks;
}

/* One rank's buffer of one op. */
enum hrp_bufkind {
    HRP_BUF_NONE = 0,   /* count 0, barrier, or a side that the collective does not use on this rank */
    HRP_BUF_SHARED = 1, /* registered memory, host or GPU: buffer `id`, byte `offset` in it */
    HRP_BUF_WINDOW = 2, /* staged: the comm's window, stream position `offset` (a byte count that never wraps;
                           the byte lies at offset % window size). Always in place, see hrp_stage_pos() */
    HRP_NBUFKINDS = 3,
};

struct hrp_bufref {
    uint32_t kind; /* enum hrp_bufkind */
    uint32_t id;   /* HRP_BUF_SHARED: as answered to ALLOC, IMPORT or IMPORT_GPU */
    uint64_t offset;
};
_Static_assert(sizeof(struct hrp_bufref) == 16, "layout");

/*
 * Flags of a descriptor.
 * STREAM: ready is written by a GPU stream, which rings no doorbell: the agent looks at it by itself until it is
 *   HRP_CHUNK_ALL, and touches no buffer of the op before ready says so, whether the buffers are staged or not.
 * OVERLAP_*: what the job does meanwhile, for the choice of the engine; at most one of them, none: the comm's setting.
 */
#define HRP_DESC_STREAM 1u
#define HRP_DESC_OVERLAP_COMPUTE 2u /* computes on its GPU: take no SM */
#define HRP_DESC_OVERLAP_IDLE 4u    /* waits for the result: the lowest latency */
#define HRP_DESC_FLAGS (HRP_DESC_STREAM | HRP_DESC_OVERLAP_COMPUTE | HRP_DESC_OVERLAP_IDLE)

/* Submission descriptor. Writer: client. */
struct hrp_desc {
    uint64_t op; /* 1, 2, 3, ... on this comm */
    struct hrp_sig sig;
    struct hrp_bufref in;
    struct hrp_bufref out;
    uint32_t timeout_ms; /* 0: the comm's op timeout */
    uint32_t flags;      /* HRP_DESC_*; others are refused */
    uint8_t reserved[64];
};
_Static_assert(sizeof(struct hrp_desc) == 128, "layout");

/* Kernels of the daemon reach the ranks' GPUs and find them waiting: also a small op on GPU memory is fastest in place. */
#define HRP_ADVICE_IN_PLACE 1u

/* Completion of op k in slot k % R. Writer: daemon, before it raises done to HRP_CHUNK_ALL. */
struct hrp_completion {
    uint64_t op;
    uint32_t status; /* enum hrp_status */
    uint32_t scope;  /* enum hrp_scope */
    uint32_t advice; /* HRP_ADVICE_*, for op k + R; the same on all ranks of a node; 0 by older daemons */
    uint32_t text_len;
    char text[HRP_OP_TEXT]; /* the sentence, no NUL needed; empty on success */
};
_Static_assert(sizeof(struct hrp_completion) == 1024, "layout");

struct hrp_op_flags {
    /* Writer: client. ready: release/acquire. waiting: 1 while some thread sleeps in FUTEX_WAIT on done; the
       client stores it seq_cst before it re-reads done, the daemon loads it seq_cst after it stored done. */
    _Alignas(HRP_LINE) _Atomic uint64_t ready;
    _Atomic uint32_t waiting;
    /* Writer: daemon; the client once the session is lost and the daemon lets go for certain: HRP_FLAG_POISON, before it, of ops
       that a stream copies out of the window, the chunks that it made NaN. release/acquire. Futex word: its low 32 bits. */
    _Alignas(HRP_LINE) _Atomic uint64_t done;
};
_Static_assert(sizeof(struct hrp_op_flags) == 2 * (size_t)HRP_LINE, "ready and done on lines of their own");
_Static_assert(offsetof(struct hrp_op_flags, done) == HRP_LINE, "layout");

enum hrp_comm_state {
    HRP_COMM_FREE = 0,
    HRP_COMM_ACTIVE = 1,
    HRP_COMM_FAILED = 2, /* status, scope and text below are valid */
};

struct hrp_comm_area {
    /* The flag page comes first: page-aligned, so that CUDA can register it. */
    struct hrp_op_flags flags[HRP_OP_SLOTS];

    /* Writer: daemon. state last, release/acquire. */
    _Alignas(HRP_LINE) _Atomic uint32_t state;
    uint32_t status;
    uint32_t scope;
    uint32_t text_len;
    char text[HRP_COMM_TEXT];

    /* Submission ring, single producer (client, under its own lock), single consumer (agent). Counters of
       descriptors ever pushed and taken; slot = counter % HRP_OP_SLOTS. release/acquire. */
    _Alignas(HRP_LINE) _Atomic uint64_t tail;              /* writer: client */
    _Alignas(HRP_LINE) _Atomic uint64_t head;              /* writer: daemon */
    _Alignas(HRP_LINE) struct hrp_desc desc[HRP_OP_SLOTS]; /* writer: client */

    _Alignas(HRP_LINE) struct hrp_completion completion[HRP_OP_SLOTS];
};
_Static_assert(offsetof(struct hrp_comm_area, state) == 8192, "layout");
_Static_assert(offsetof(struct hrp_comm_area, tail) == 10368, "layout");
_Static_assert(offsetof(struct hrp_comm_area, desc) == 10624, "layout");
_Static_assert(offsetof(struct hrp_comm_area, completion) == 14720, "layout");
_Static_assert(sizeof(struct hrp_comm_area) == 47488, "layout");

#define HRP_COMM_STRIDE ((sizeof(struct hrp_comm_area) + HRP_PAGE - 1) / HRP_PAGE * HRP_PAGE)

struct hrp_seg_header {
    /* Writer: daemon, before the segment is sent; constant afterwards. abi is stored last. */
    uint64_t magic;
    uint64_t size;
    uint32_t ncomms;
    uint32_t comm_offset;
    uint32_t comm_stride;
    uint32_t op_slots;
    _Atomic uint32_t abi;

    /* Writer: agent. CLOCK_MONOTONIC ns, at least once a second. relaxed. */
    _Alignas(HRP_LINE) _Atomic uint64_t heartbeat_ns;
    /* Writer: agent. 1: it sleeps, or is about to look once more before it sleeps; ring the doorbell (write 1
       to the eventfd) after a push. seq_cst on both sides: the agent stores it and then reads submits, the
       client stores submits and then reads it. */
    _Alignas(HRP_LINE) _Atomic uint32_t agent_asleep;
    /* Writer: client. Incremented after any push or any store to a ready word. seq_cst. */
    _Alignas(HRP_LINE) _Atomic uint32_t submits;
};
_Static_assert(sizeof(struct hrp_seg_header) <= HRP_PAGE, "one page");
_Static_assert(offsetof(struct hrp_seg_header, heartbeat_ns) == 128, "layout");
_Static_assert(offsetof(struct hrp_seg_header, agent_asleep) == 256, "layout");
_Static_assert(offsetof(struct hrp_seg_header, submits) == 384, "layout");

static inline size_t hrp_seg_size(uint32_t ncomms)
{
    return HRP_PAGE + (size_t)ncomms * HRP_COMM_STRIDE;
}

static inline struct hrp_comm_area *hrp_seg_comm(struct hrp_seg_header *seg, uint32_t slot)
{
    return (struct hrp_comm_area *)((char *)seg + HRP_PAGE + (size_t)slot * HRP_COMM_STRIDE);
}

/* Daemon: fills the header of a zeroed segment of hrp_seg_size(ncomms) bytes. */
void hrp_seg_init(struct hrp_seg_header *seg, uint32_t ncomms);
/* Client: 0, -EPROTO for a malformed segment or -EPROTONOSUPPORT for another major version. size: of the
 * mapping. */
int hrp_seg_check(const struct hrp_seg_header *seg, size_t size);

/*
 * The stream of a staged op. Its data space (hrp_sig_segments() segments of count elements) is cut into
 * slices of hrp_stage_slice() elements; the stream holds slice 0 of segment 0, of segment 1, ..., then slice
 * 1 of segment 0, and so on, without gaps. With one segment the stream is the buffer. In the stream every
 * collective is in place by NCCL's rules: a reduce_scatter's output lies where its own segment's input was,
 * an all_gather's input lies in its own segment. The daemon cuts its units (daemon/schedule.h) at multiples
 * of this slice when nseg > 1.
 */
uint64_t hrp_stage_slice(const struct hrp_sig *sig, uint32_t nranks);
/* Byte position in the stream of element `off` of segment `seg`. */
uint64_t hrp_stage_pos(const struct hrp_sig *sig, uint32_t nranks, uint32_t seg, uint64_t off);

#endif
