/* SPDX-License-Identifier: MIT */
/*
 * libhclient: collectives through the node's hreduced daemon.
 *
 * Names follow NCCL's. The calls that differ from what a NCCL user expects:
 *   - the communicator comes first, and a collective can give back a handle (hclient_op_t) to wait for;
 *   - every failure has a sentence: hclient_last_error();
 *   - hclient_comm_abort() does not free the communicator, hclient_comm_destroy() does.
 *
 * Rules for every call, unless its comment says otherwise:
 *   Threads    any thread may call any function at any time, also with the same communicator. Ops of one
 *              communicator are numbered in the order of the calls: ranks must make them in the same order.
 *              A call with a communicator that was destroyed is refused.
 *   Blocking   posting a collective returns without waiting for other ranks. It waits only while
 *              HCLIENT_MAX_OPS ops of this communicator are incomplete; once, on the first op of ordinary or GPU memory,
 *              for the daemon to make the staging window; for the daemon's answer on the first op on a GPU allocation
 *              (both up to 60 s and one more for each 32 MiB, commonly milliseconds); and, where a communicator has ops
 *              on host and on GPU buffers, for ops of the other kind to leave the window.
 *   Waiting    every wait ends: by completion, by the op deadline (the daemon's, default 600 s), within about
 *              1 s of an abort or of the death of a rank or daemon, about 10 s after a daemon stops answering.
 *   Failure    HCLIENT_OK, or another code; nothing was queued and no output argument was set when a call
 *              returns an error, except where the call waits for an op.
 *   Signals    calls are not async-signal-safe, but a signal never makes one fail or return early.
 *   fork       in a child of a process that has used the library every call returns HCLIENT_UNSUPPORTED; the
 *              parent is not disturbed. exec or start the child before the first call.
 *   Exit       communicators and memory need not be freed before exit; the daemon cleans up.
 *
 * Environment: HREDUCE_SOCKET, path of the daemon's socket (default /run/hreduced/hreduced.sock).
 *              HREDUCE_GPU_STAGED_BYTES, up to how many bytes in all an op on GPU buffers is copied through the staging window,
 *              in digits alone (default 65536, and 1024 on one node where the daemon's kernels do not wait for the GPU); larger ones are reduced
 *              in place, where their memory can be exported; so are all where the window cannot be pinned.
 *              HREDUCE_CUDA_LIBRARY, the CUDA driver's library, as dlopen takes it (default libcuda.so.1).
 */
#ifndef HCLIENT_H
#define HCLIENT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define HCLIENT_API __attribute__((visibility("default")))
#else
#define HCLIENT_API
#endif

#define HCLIENT_MAJOR 0
#define HCLIENT_MINOR 1
#define HCLIENT_PATCH 0
#define HCLIENT_VERSION_CODE (HCLIENT_MAJOR * 10000 + HCLIENT_MINOR * 100 + HCLIENT_PATCH)

/* ------------------------------------------------------------------------------------- results and errors */

typedef enum {
    HCLIENT_OK = 0,
    HCLIENT_IN_PROGRESS = 1,      /* hclient_test(): not complete yet. Not an error */
    HCLIENT_INVALID_ARGUMENT = 2, /* refused, nothing was queued */
    HCLIENT_UNSUPPORTED = 3,      /* valid, but this build or machine cannot do it */
    /* The op failed on every rank; the communicator goes on with the next op. */
    HCLIENT_MISMATCH = 4, /* ranks disagree on collective, count, type, reduction or root */
    HCLIENT_TIMEOUT = 5,  /* the op deadline passed; from init: not everyone joined in time */
    /* The communicator failed: pending and later ops fail; destroy it. */
    HCLIENT_RANK_LOST = 6,  /* a rank's process died or left */
    HCLIENT_PEER_LOST = 7,  /* another node's daemon died, is silent or unreachable */
    HCLIENT_ABORTED = 8,    /* hclient_comm_abort() was called on some rank */
    HCLIENT_SUPERSEDED = 9, /* a newer communicator of the same name replaced it */
    /* The session failed: every communicator and all memory of it; make new ones. */
    HCLIENT_DAEMON_LOST = 10,  /* the local daemon is gone */
    HCLIENT_UNRESPONSIVE = 11, /* the local daemon has not moved for 10 s */
    HCLIENT_RESOURCE = 12,     /* a limit, named in the sentence, is too small */
    HCLIENT_REFUSED = 13,      /* permission, duplicate rank, foreign id */
    HCLIENT_PROTOCOL = 14,     /* the daemon broke the protocol */
    HCLIENT_VERSION = 15,      /* library and daemon do not speak the same major version */
    HCLIENT_SYSTEM = 16,       /* a system call failed; the sentence has the errno */
    HCLIENT_SHUTDOWN = 17      /* the daemon is stopping */
} hclient_result_t;

typedef struct hclient_comm *hclient_comm_t;

/* Version of the library that is loaded, as HCLIENT_VERSION_CODE. */
HCLIENT_API hclient_result_t hclient_get_version(int *version);

/* "timeout", "rank lost", ...; static, never NULL. */
HCLIENT_API const char *hclient_strerror(hclient_result_t result);

/*
 * The sentence. comm NULL: of the last call on this thread that failed. Otherwise: why this communicator
 * failed; while it has not, that of the thread's last failed call when it was one with this communicator, else
 * of its last op that failed. "" when there is none; never NULL. The string is the calling thread's and lives
 * until its next call of this function or of a failing one.
 */
HCLIENT_API const char *hclient_last_error(hclient_comm_t comm);

typedef enum { HCLIENT_LOG_ERROR = 0, HCLIENT_LOG_WARN = 1, HCLIENT_LOG_INFO = 2 } hclient_log_level_t;
typedef void (*hclient_log_fn)(void *user, hclient_log_level_t level, const char *text);
/*
 * Where the library reports what no call returns (the daemon died, a communicator failed while idle, whom a call that joins
 * has been waiting for since 10 s, or half of its set-up timeout), once an event. NULL: stderr, errors and warnings only; that a communicator failed while idle is information, because it is
 * also how the end of a job looks whose ranks exit one after the other. fn is called on any thread, with all signals blocked on
 * some, and must not call the library. user is passed on; it must live until the callback is replaced.
 */
HCLIENT_API hclient_result_t hclient_set_log_callback(hclient_log_fn fn, void *user);

/* --------------------------------------------------------------------------------------------- bootstrap */

#define HCLIENT_UNIQUE_ID_BYTES 128
typedef struct {
    char internal[HCLIENT_UNIQUE_ID_BYTES];
} hclient_unique_id_t;

/*
 * A new id, made by the local daemon, which becomes the meeting point of the communicator. Call it on one
 * rank, carry the 128 bytes to the others as you like; an id makes one communicator. Asks the daemon: waits
 * up to 10 s.
 */
HCLIENT_API hclient_result_t hclient_get_unique_id(hclient_unique_id_t *id);

enum { HCLIENT_DEFAULT = 0, HCLIENT_OFF = 1, HCLIENT_ON = 2 };
enum { HCLIENT_TRANSPORT_DEFAULT = 0, HCLIENT_TRANSPORT_TCP = 1, HCLIENT_TRANSPORT_VERBS = 2 };
enum {
    HCLIENT_ALGO_AUTO = 0,
    HCLIENT_ALGO_DIRECT = 1,
    HCLIENT_ALGO_GATHER = 2,
    HCLIENT_ALGO_PAIRWISE = 3, /* pairwise, ring and tree need reproducible = HCLIENT_OFF */
    HCLIENT_ALGO_RING = 4,
    HCLIENT_ALGO_TREE = 5
};
/*
 * P2P: GPU buffers, also small ones, are reduced where they are, by kernels that reach the GPUs of this node directly. A buffer that
 * cannot be given to the daemon is refused by its call, GPUs that do not reach each other fail the op, both with the reason.
 */
enum { HCLIENT_REQUIRE_VERBS = 1, HCLIENT_REQUIRE_GDR = 2, HCLIENT_REQUIRE_P2P = 4 };
/*
 * What becomes of a CUDA stream when an op of it fails. RELEASE: the stream goes on; hclient_wait(), hclient_comm_wait() and
 * hclient_comm_get_async_error() tell. TRAP: the stream is held behind the op, and within about a second the library writes the
 * sentence to its log and to stderr and ends the process with SIGABRT, so that nothing is computed from the op's output. Also when
 * another rank aborts; not for what this rank itself ends with hclient_comm_abort() or hclient_comm_destroy(), and not for ops on
 * host buffers, whose wait tells.
 */
enum { HCLIENT_ON_ERROR_DEFAULT = 0, HCLIENT_ON_ERROR_RELEASE = 1, HCLIENT_ON_ERROR_TRAP = 2 };
/*
 * What the job does while its GPU buffers are reduced, for the choice of the engine: AUTO goes by how long the daemon's recent
 * kernels waited for the GPU; COMPUTE: the GPU is busy, take copy engines and the CPU; IDLE: it waits for the result, take
 * kernels.
 */
enum { HCLIENT_OVERLAP_AUTO = 0, HCLIENT_OVERLAP_COMPUTE = 1, HCLIENT_OVERLAP_IDLE = 2 };
#define HCLIENT_NO_TIMEOUT UINT32_MAX

/*
 * Settings of a communicator. 0 in any field but size: the default of the daemon that is the meeting point.
 * All but socket, on_error and size must be the same on all ranks; a difference is refused in words.
 */
typedef struct {
    size_t size;               /* of this struct; the initializer sets it */
    const char *socket;        /* of the local daemon; NULL: HREDUCE_SOCKET or the default path */
    uint32_t setup_timeout_ms; /* how long init waits for the other ranks */
    uint32_t op_timeout_ms;    /* from the first rank that is ready; HCLIENT_NO_TIMEOUT: none */
    int algo;                  /* HCLIENT_ALGO_* */
    int reproducible;          /* the order of additions is defined: HCLIENT_DEFAULT (on), OFF, ON */
    int wire_f32;              /* f16 and bf16 travel between nodes as f32: HCLIENT_DEFAULT (off), OFF, ON */
    int transport;             /* HCLIENT_TRANSPORT_*; TCP and VERBS: that and nothing else */
    uint32_t require; /* HCLIENT_REQUIRE_*: init, or a call, fails in words when the path is another one */
    int service_level; /* of verbs links between nodes, both directions: HCLIENT_CLASS(0) to HCLIENT_CLASS(15) */
    int traffic_class; /* of their RoCE packets: HCLIENT_CLASS(0) to HCLIENT_CLASS(255) */
    int overlap;       /* HCLIENT_OVERLAP_*; hclient_collective() says it for an op */
    int on_error;      /* HCLIENT_ON_ERROR_*; the default is RELEASE */
} hclient_comm_config_t;
/* A class by its number, because 0 in a field is the default. */
#define HCLIENT_CLASS(number) ((number) + 1)
#define HCLIENT_COMM_CONFIG_INITIALIZER                                      \
    {                                                                        \
        sizeof(hclient_comm_config_t), NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 \
    }

/*
 * Joins rank `rank` of `nranks` (1..4096) to the communicator of `id`; config may be NULL. Waits until all
 * ranks have joined and all nodes have agreed, at most the setup timeout: HCLIENT_TIMEOUT lists who is
 * missing.
 */
HCLIENT_API hclient_result_t hclient_comm_init_rank(hclient_comm_t *comm, int nranks, hclient_unique_id_t id,
                                                    int rank);
HCLIENT_API hclient_result_t hclient_comm_init_rank_config(hclient_comm_t *comm, int nranks,
                                                           hclient_unique_id_t id, int rank,
                                                           const hclient_comm_config_t *config);

/*
 * The same without an id: rank, size and meeting point come from the launcher's environment, and ranks that
 * use the same name (1..71 printable ASCII characters) belong together. The n-th communicator of a name in a
 * process belongs to the n-th of the others. Read, first match wins:
 *   torchrun  RANK, WORLD_SIZE, MASTER_ADDR (and MASTER_PORT, TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT
 *             to tell attempts apart, LOCAL_RANK)
 *   Open MPI  OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE; meeting point MASTER_ADDR, else the host of mpirun
 *   Slurm     SLURM_PROCID, SLURM_NTASKS; meeting point SLURM_LAUNCH_NODE_IPADDR, else the first host of
 *             SLURM_STEP_NODELIST or SLURM_JOB_NODELIST
 * HREDUCE_ROOT_ADDR=host[:port] names the meeting point in all three: a node with a hreduced daemon. Without
 * a port it is the one that the local daemon is configured for.
 */
HCLIENT_API hclient_result_t hclient_comm_init_name(hclient_comm_t *comm, const char *name,
                                                    const hclient_comm_config_t *config);

/* Not built yet: HCLIENT_UNSUPPORTED. Make the parts with hclient_comm_init_rank() and an id each. */
HCLIENT_API hclient_result_t hclient_comm_split(hclient_comm_t comm, int color, int key,
                                                hclient_comm_t *newcomm, const hclient_comm_config_t *config);

/* ------------------------------------------------------------------------------------------ communicator */

/*
 * Leaves and frees the communicator. Ops that are not complete are abandoned (wait for them first; others
 * get HCLIENT_RANK_LOST). Returns when the daemon has let go of this rank's buffers, after 10 s at most
 * (HCLIENT_UNRESPONSIVE; it is freed all the same). While CUDA streams have not passed its ops that takes up to 25 s: they are
 * released by an abort, or, when the daemon does not move, once it is certain to write no more. A stream that does not come to
 * its op in that time keeps the memory for the rest of the process. Works on a failed communicator and without a daemon.
 * Threads that wait on it are woken first.
 */
HCLIENT_API hclient_result_t hclient_comm_destroy(hclient_comm_t comm);

/*
 * Ends the communicator on all ranks: pending and later ops return HCLIENT_ABORTED. Returns within 1 s in any
 * state, also when called again. A buffer of a pending op may be reused when a wait for that op or
 * hclient_comm_destroy() has returned.
 */
HCLIENT_API hclient_result_t hclient_comm_abort(hclient_comm_t comm);

/* *error: HCLIENT_OK while the communicator works, else why it failed (hclient_last_error(comm)). Never
 * waits. Errors of single ops (HCLIENT_MISMATCH, HCLIENT_TIMEOUT) are not reported here. */
HCLIENT_API hclient_result_t hclient_comm_get_async_error(hclient_comm_t comm, hclient_result_t *error);

HCLIENT_API hclient_result_t hclient_comm_count(hclient_comm_t comm, int *nranks);
HCLIENT_API hclient_result_t hclient_comm_user_rank(hclient_comm_t comm, int *rank);

typedef struct {
    size_t size; /* set by the caller; at most as many bytes are filled in */
    int nranks;
    int rank;
    int nnodes;
    int node;       /* index of this node in the communicator */
    int local_size; /* ranks of this communicator on this node */
    int local_rank; /* from the launcher's environment, -1 when it does not say */
    uint32_t op_timeout_ms;
    char id[40];             /* the communicator's random id in hex, as in the daemon's logs */
    char daemon_version[32]; /* "0.1.0" */
} hclient_comm_info_t;
#define HCLIENT_COMM_INFO_INITIALIZER                            \
    {                                                            \
        sizeof(hclient_comm_info_t), 0, 0, 0, 0, 0, 0, 0, "", "" \
    }
HCLIENT_API hclient_result_t hclient_comm_get_info(hclient_comm_t comm, hclient_comm_info_t *info);

/*
 * What this communicator really uses at every stage, what was wanted, and the reason for each difference: a
 * JSON text, to be freed with hclient_free(). Asks the daemon: waits up to 10 s.
 */
HCLIENT_API hclient_result_t hclient_comm_path(hclient_comm_t comm, char **json);
HCLIENT_API void hclient_free(void *p);

/* ------------------------------------------------------------------------------------------------ memory */

/*
 * Memory shared with the daemon: collectives on it copy nothing on the way to the daemon. Made by the daemon
 * of HREDUCE_SOCKET, zeroed, page-aligned; counts against its quota. Waits for the daemon, up to 60 s and
 * one more for each 32 MiB.
 * Usable with every communicator of that daemon; after HCLIENT_DAEMON_LOST it stays readable and writable,
 * and new communicators treat it as ordinary memory. size > 0.
 */
HCLIENT_API hclient_result_t hclient_mem_alloc(void **ptr, size_t size);
/*
 * Frees memory of hclient_mem_alloc(), or ends the registration of hclient_mem_import_fd() (mapping and
 * descriptor stay the caller's). ptr: as returned or given there; NULL is nothing. Waits until no op uses it,
 * at most 10 s; ops on it should be complete.
 */
HCLIENT_API hclient_result_t hclient_mem_free(void *ptr);
/*
 * Makes memory of the caller's own usable without copies: fd is a memfd sealed with F_SEAL_SHRINK, not of
 * huge pages, mapped shared and read-write by the caller at addr from byte offset (a multiple of the page
 * size) on, bytes long. fd may be closed afterwards; addr must stay mapped until hclient_mem_free(addr).
 */
HCLIENT_API hclient_result_t hclient_mem_import_fd(void *addr, size_t bytes, int fd, uint64_t offset);

/*
 * Announces a buffer that will be used often. Inside hclient_mem_alloc() or imported memory nothing is needed
 * and this call costs nothing; ordinary memory is accepted and goes through a staging window either way.
 * *handle: for hclient_comm_deregister(), which must come before the memory is freed: when it returns, the daemon has
 * none of a GPU allocation any more, unless other registrations of the communicator lie in it. It waits up to 2 s for
 * operations that use the allocation; then it is refused (HCLIENT_INVALID_ARGUMENT) and the registration stays.
 */
HCLIENT_API hclient_result_t hclient_comm_register(hclient_comm_t comm, void *buff, size_t size,
                                                   void **handle);
HCLIENT_API hclient_result_t hclient_comm_deregister(hclient_comm_t comm, void *handle);

/* ------------------------------------------------------------------------------------------- collectives */

typedef enum {
    HCLIENT_FLOAT32 = 0,
    HCLIENT_FLOAT64 = 1,
    HCLIENT_FLOAT16 = 2,
    HCLIENT_BFLOAT16 = 3,
    HCLIENT_INT8 = 4,
    HCLIENT_UINT8 = 5,
    HCLIENT_INT32 = 6,
    HCLIENT_UINT32 = 7,
    HCLIENT_INT64 = 8,
    HCLIENT_UINT64 = 9
} hclient_data_type_t;

/* Integer sum and prod wrap; integer avg is the wrapped sum divided, towards zero; min and max propagate NaN.
 */
typedef enum {
    HCLIENT_SUM = 0,
    HCLIENT_PROD = 1,
    HCLIENT_MIN = 2,
    HCLIENT_MAX = 3,
    HCLIENT_AVG = 4
} hclient_red_op_t;

/* Not built yet: HCLIENT_UNSUPPORTED. Scale the input, or use HCLIENT_AVG. */
HCLIENT_API hclient_result_t hclient_red_op_create_pre_mul_sum(hclient_red_op_t *op, const void *scalar,
                                                               hclient_data_type_t dtype,
                                                               hclient_comm_t comm);
HCLIENT_API hclient_result_t hclient_red_op_destroy(hclient_red_op_t op, hclient_comm_t comm);

#define HCLIENT_MAX_OPS 32

/* One op of a communicator; a value that may be copied, waited for any number of times, or forgotten. */
typedef struct {
    hclient_comm_t comm;
    uint64_t number; /* 1, 2, 3, ... on that communicator; 0: no op, complete */
} hclient_op_t;

/*
 * Collectives. Counts are elements; any alignment; a pointer may be NULL only when count is 0. Buffers belong
 * to the library until the op is waited for: the input must not change, the output is undefined (also after
 * an op that failed). Input and output may be the same memory only as NCCL allows it (each call says how); any
 * other overlap is refused. op: NULL, or receives the handle. Counts whose bytes in all exceed 2^62 are refused.
 *
 * GPU buffers (CUDA device or managed memory; all buffers of a call on this rank, other ranks may use host memory): stream is
 * the CUstream or cudaStream_t in whose order the op runs, NULL the legacy default stream. The call only enqueues: work put
 * into the stream before it is done before the input is read, work put there after it sees the output. A capturing stream is
 * refused (HCLIENT_UNSUPPORTED), and its capture goes on. Needs a driver for CUDA 11.7 or newer. A failed op lets the stream
 * go on, or holds it: see HCLIENT_ON_ERROR_RELEASE and TRAP. A float output that the stream copies from the staging window after
 * the failure is NaN, and so is, while the daemon lives, one in place that was written to; integers have no such value and are undefined. A call
 * waits for a free slot until a stream has passed the op HCLIENT_MAX_OPS before it. Synchronize streams before
 * hclient_comm_destroy(). In a communicator of one rank the stream copies the input to the output, bit for bit. Host buffers:
 * stream must be NULL.
 */

/* recv[i] = redop over all ranks' send[i], i < count. In place: recv == send. */
HCLIENT_API hclient_result_t hclient_all_reduce(hclient_comm_t comm, const void *send, void *recv,
                                                size_t count, hclient_data_type_t dtype,
                                                hclient_red_op_t redop, void *stream, hclient_op_t *op);
/* recv = root's send, count elements. send is looked at on the root alone. In place: recv == send. */
HCLIENT_API hclient_result_t hclient_broadcast(hclient_comm_t comm, const void *send, void *recv,
                                               size_t count, hclient_data_type_t dtype, int root,
                                               void *stream, hclient_op_t *op);
/* send has nranks * recv_count elements; rank r gets elements r * recv_count... of the reduction. In place:
 * recv == send + rank * recv_count elements. */
HCLIENT_API hclient_result_t hclient_reduce_scatter(hclient_comm_t comm, const void *send, void *recv,
                                                    size_t recv_count, hclient_data_type_t dtype,
                                                    hclient_red_op_t redop, void *stream, hclient_op_t *op);
/* recv has nranks * send_count elements: rank 0's send, rank 1's, ... In place: send == recv + rank *
 * send_count elements. */
HCLIENT_API hclient_result_t hclient_all_gather(hclient_comm_t comm, const void *send, void *recv,
                                                size_t send_count, hclient_data_type_t dtype, void *stream,
                                                hclient_op_t *op);
/* Complete when every rank has called it. */
HCLIENT_API hclient_result_t hclient_barrier(hclient_comm_t comm, void *stream, hclient_op_t *op);

typedef enum {
    HCLIENT_ALL_REDUCE = 0,
    HCLIENT_BROADCAST = 1,
    HCLIENT_REDUCE_SCATTER = 2,
    HCLIENT_ALL_GATHER = 3,
    HCLIENT_BARRIER = 4
} hclient_coll_t;

/*
 * The stream waits for the op only where hclient_stream_wait() says so. Until then nothing is pending in a stream but the op's
 * input, so that no other stream of the process stands still, as it would with CUDA_DEVICE_MAX_CONNECTIONS = 1 or 2, and
 * communicators may be used in another order on each rank. The buffers belong to the library until then, and the stream of the
 * call must exist. At most HCLIENT_MAX_OPS such ops of a communicator, and as many of those that are copied through the staging
 * window as that holds, can be open at a time; a call that needs more is refused (HCLIENT_RESOURCE), and one larger than the window
 * with HCLIENT_UNSUPPORTED. Without meaning for host buffers.
 */
#define HCLIENT_DEFER_WAIT 1u

/* A collective with all that can be said about it; 0 in a field: as in the call of its name. What it does not use is not
   looked at. */
typedef struct {
    size_t size; /* of this struct; the initializer sets it */
    hclient_coll_t coll;
    const void *send;
    void *recv;
    size_t count; /* of reduce_scatter: recv_count; of all_gather: send_count */
    hclient_data_type_t dtype;
    hclient_red_op_t redop;
    int root;
    void *stream;
    int overlap;    /* HCLIENT_OVERLAP_* for this op; AUTO (0): as the communicator. Ranks may differ */
    uint32_t flags; /* HCLIENT_DEFER_WAIT */
} hclient_coll_args_t;
#define HCLIENT_COLL_ARGS_INITIALIZER                                                                    \
    {                                                                                                    \
        sizeof(hclient_coll_args_t), HCLIENT_ALL_REDUCE, NULL, NULL, 0, HCLIENT_FLOAT32, HCLIENT_SUM, 0, \
            NULL, 0, 0                                                                                   \
    }

/* Posts the collective args->coll as the call of its name does. op: NULL, or receives the handle; with HCLIENT_DEFER_WAIT not
   NULL. args is not kept. */
HCLIENT_API hclient_result_t hclient_collective(hclient_comm_t comm, const hclient_coll_args_t *args,
                                                hclient_op_t *op);

/*
 * Between start and end (which nest, per thread) the daemon is not told about each op but once, at the
 * outermost end. Ops keep their order and numbers. Errors are returned by each call as always.
 */
HCLIENT_API hclient_result_t hclient_group_start(void);
HCLIENT_API hclient_result_t hclient_group_end(void);

/* --------------------------------------------------------------------------------------------- completion */

/*
 * Blocks until the op is complete on this rank and its output is in place; returns its result. Sleeps,
 * after at most 200 us of looking (and yielding) for ops up to 2 MiB. The results of the last 256 failed ops of a
 * communicator are kept; older failures are reported as HCLIENT_INVALID_ARGUMENT ("too old to tell").
 * After any result but two the buffers are the caller's again. The two: HCLIENT_UNRESPONSIVE, and HCLIENT_DAEMON_LOST
 * while the daemon's process still lives (it may be stopped, or about to end). It may then still write the outputs of
 * pending ops that lie in memory of hclient_mem_alloc() or hclient_mem_import_fd(), so leave these alone; ordinary
 * memory is written by the library only, and by then no more.
 */
HCLIENT_API hclient_result_t hclient_wait(hclient_op_t op);
/* The same without waiting: HCLIENT_IN_PROGRESS while it is not complete. */
HCLIENT_API hclient_result_t hclient_test(hclient_op_t op);
/*
 * Work put into the CUDA stream after this call sees the output of op, which is one of GPU buffers; any stream whose GPU can
 * reach its memory. Only enqueues: its result tells nothing about the op's. Of an op that was posted with HCLIENT_DEFER_WAIT
 * the first of these calls takes the output; more of them, and those for other ops, order one more stream behind it. Without one
 * hclient_wait(), hclient_test() and hclient_comm_wait() take it, in the stream of the op, when the daemon is done. A capturing
 * stream is refused (HCLIENT_UNSUPPORTED), and so is an op of host buffers (HCLIENT_INVALID_ARGUMENT).
 */
HCLIENT_API hclient_result_t hclient_stream_wait(hclient_op_t op, void *stream);
/*
 * Blocks until every op posted before on comm is complete. Returns the first failure among the ops since the
 * last hclient_comm_wait().
 */
HCLIENT_API hclient_result_t hclient_comm_wait(hclient_comm_t comm);

#ifdef __cplusplus
}
#endif

#endif
