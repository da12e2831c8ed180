/* SPDX-License-Identifier: MIT */
/*
 * A CUDA driver without a GPU, as a shared object (libcuda_fake.so.1) that a process loads in the driver's place:
 * HREDUCE_CUDA_LIBRARY names it. It works across processes, so real daemons and ranks run on it.
 *
 * - Device memory is a memfd. A device address is the address of its mapping with FAKE_TAG set, which no CPU can follow:
 *   code that reads device memory by itself ends with a signal, as on a real machine it would. Host memory that was
 *   registered has such a device address too, beside its own.
 * - An IPC handle names the exporter's descriptor (/proc/PID/fd/N); a mapping outlives the exporter. It belongs to the context
 *   that opened it: another has an address of its own, and kernels elsewhere fault, whatever peers may do. VMM handles are
 *   memfds.
 * - A stream is a queue that a thread works off in order. With CUDA_DEVICE_MAX_CONNECTIONS=N all streams of a process share N
 *   threads, as they share hardware queues; without it each has its own.
 * - Waits and writes of words, events, the legacy default stream's two-sided order, per-thread streams and capture (with
 *   what is forbidden during one) follow the driver's documentation.
 *
 * Environment (read at cuInit):
 *   FAKE_CUDA_DEVICES=4            CUDA_VISIBLE_DEVICES=1,0 or GPU-uuid,MIG-uuid,... selects and orders; a beginning of a UUID will
 *                                  do
 *   FAKE_CUDA_MIG=1=2,...          GPU 1 is divided into 2 instances. They are devices of their own, which reach no other; the
 *                                  first has the GPU's number, the others come behind all GPUs
 *   FAKE_CUDA_MIG_SEEN=1           how many instances a process sees, as most drivers show one
 *   FAKE_CUDA_VERSION=12040        what cuDriverGetVersion says
 *   FAKE_CUDA_ATTR=122=0,...       answers of cuDeviceGetAttribute
 *   FAKE_CUDA_MEMORY=BYTES         of a device, for this process; more is out of memory
 *   FAKE_CUDA_FAIL=NAME=CODE@N,... the N-th call of cuNAME fails with CODE; N+: from the N-th on; no @N: all.
 *                                  run:NAME: the work fails when a stream comes to it, and CODE sticks to the process.
 *                                  CODE#G: only calls with the context of device G (of all) current, as of a GPU with a fault
 *   FAKE_CUDA_DELAY=NAME=US,...    cuNAME's work takes this much longer when a stream comes to it; call:NAME: the call
 *   FAKE_CUDA_NO_P2P=0-1,...       pairs of devices (of all, not of the visible) that may not reach each other
 *   FAKE_CUDA_ZERO_PAIRS=2-3       copies between them deliver zeros
 *   FAKE_CUDA_HANG_PAIRS=2-3       copies between them never end
 *   FAKE_CUDA_STRICT=0             accepts copies from and to host memory that is not pinned (refused otherwise)
 *   FAKE_NVML=WORD=N,...           what NVML says (nvml.c), for HREDUCE_NVML_LIBRARY=this file
 *   FAKE_CUDA_WAIT_S=120           a wait longer than this ends the process with a message
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "kernels/gpu_driver.h"

#define FAKE_MAX_DEVICES 16
#define FAKE_TAG (UINT64_C(1) << 55)

/* A thread's own. In the thread's static block: what the loader allocates for a library that is loaded late it frees by
   another thread, in which ThreadSanitizer sees a race. */
#define FAKE_THREAD __thread __attribute__((tls_model("initial-exec")))
#define FAKE_API __attribute__((visibility("default")))
#define HRG_FN(field, symbol, since, need, args) FAKE_API hrg_result symbol args;
#include "kernels/gpu_functions.def"
#undef HRG_FN

/* For tests: how often cuNAME was called in this process. */
FAKE_API unsigned fake_cuda_calls(const char *name);
/* For tests: called by cuFlushGPUDirectRDMAWrites. */
FAKE_API void fake_cuda_on_flush(void (*fn)(void));

/* ---- devices, contexts, failures (init.c) -------------------------------------------------------------------------- */

struct hrg_ctx_st {
    int index;   /* of the device, among all */
    int ordinal; /* among the visible */
    unsigned retained;
    size_t used;
    _Atomic uint64_t peers; /* bit: index of a device whose memory kernels may touch */
};

/* A GPU, or an instance of one. */
struct fake_unit {
    int gpu;
    int instance; /* -1: all of it */
};

struct fake_state {
    int ngpus, ndevices, nvisible;
    struct fake_unit unit[FAKE_MAX_DEVICES]; /* by index */
    int visible[FAKE_MAX_DEVICES];           /* ordinal to index */
    struct hrg_ctx_st ctx[FAKE_MAX_DEVICES]; /* by index */
    bool strict;
    unsigned wait_s;
    size_t memory;
    unsigned connections; /* 0: one queue a stream */
    pid_t pid;
};
extern struct fake_state fake;

enum {
    FAKE_ANY_TIME = 1, /* works before cuInit and after a sticky error */
    FAKE_UNSAFE = 2,   /* not while a capture is under way (unless the thread's mode is relaxed) */
};
/* Counts the call; 0, or what it must answer instead of working. */
hrg_result fake_enter(const char *name, unsigned flags);
#define FAKE_ENTER(name, flags)                      \
    do {                                             \
        hrg_result enter_ = fake_enter(name, flags); \
        if (enter_ != HRG_SUCCESS)                   \
            return enter_;                           \
    } while (0)

/* When a stream comes to work of cuNAME: its delay, and 0 or the code of its failure. */
hrg_result fake_run(const char *name);
/* The process can do nothing with CUDA any more; the first code stays. */
void fake_stick(hrg_result code);
struct hrg_ctx_st *fake_current(void); /* NULL: none */
/* Whether the two devices (indices) may reach each other. */
bool fake_peers(int a, int b);
/* "2-3,0-1" of a variable has this pair, in either order. */
bool fake_pair(const char *variable, int a, int b);
void *fake_zalloc(size_t bytes); /* never NULL */
_Noreturn void fake_die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* ---- memory (memory.c, vmm.c) -------------------------------------------------------------------------------------- */

enum fake_kind {
    FAKE_LEGACY,   /* cuMemAlloc */
    FAKE_POOL,     /* cuMemAllocAsync: cannot be exported */
    FAKE_MANAGED,  /* cuMemAllocManaged */
    FAKE_IMPORTED, /* cuIpcOpenMemHandle */
    FAKE_VMM,      /* cuMemMap */
    FAKE_HOST,     /* cuMemHostAlloc, cuMemAllocHost */
    FAKE_REGISTERED,
};

struct fake_vmm {
    struct fake_vmm *next;
    hrg_handle handle;
    int fd;
    size_t bytes;
    int index;     /* of the device */
    int types;     /* HRG_HANDLE_* that it may be exported as */
    unsigned refs; /* handles and mappings */
};

struct fake_alloc {
    struct fake_alloc *next;
    enum fake_kind kind;
    char *host; /* the mapping */
    size_t bytes;
    size_t map_bytes;
    int fd;    /* -1: none */
    int index; /* of the device; -1: host memory */
    unsigned long long id;
    unsigned refs; /* imports: opens, all in the context of one device: */
    int opened;    /* its index */
    ino_t inode;   /* imports and exports */
    struct fake_vmm *vmm;
    bool accessible; /* VMM: cuMemSetAccess was called */
    uint64_t
        reach; /* VMM: bit a device (index) that it named: kernels elsewhere fault, whatever peers may do */
};

extern pthread_mutex_t
    fake_lock; /* allocations, handles, streams' lists, capture; never held while working off a queue */

/* Under fake_lock. NULL: the range is not inside one allocation. */
struct fake_alloc *fake_find(uint64_t addr, size_t bytes);
/* Under fake_lock: the device address of an allocation. */
uint64_t fake_base(const struct fake_alloc *a);
struct fake_alloc *fake_alloc_new(enum fake_kind kind, char *host, size_t bytes, int fd, int index);
struct fake_alloc *fake_alloc_take(uint64_t base, bool (*match)(const struct fake_alloc *a));
/* Where a device (or pinned host) range lies in this process; NULL: nowhere. *index: its device or -1. */
char *fake_device_range(uint64_t addr, size_t bytes, int *index);
/* A copy may read or write this host memory. */
bool fake_host_range(const void *p, size_t bytes);
int fake_memfd(const char *name, size_t bytes);

/* ---- streams (stream.c, run.c) ------------------------------------------------------------------------------------- */

struct fake_queue;

struct hrg_stream_st {
    struct hrg_stream_st *next;
    struct hrg_ctx_st *ctx;
    struct fake_queue *queue;
    bool blocking; /* orders itself with the legacy stream */
    bool legacy;
    _Atomic uint64_t posted, finished; /* items ever */
    int capture;                       /* HRG_CAPTURE_* */
    int capture_mode;
    pthread_t capture_thread;
    unsigned captured; /* nodes */
};

struct hrg_event_st {
    struct hrg_event_st *next;    /* destroyed before their time */
    struct hrg_stream_st *stream; /* NULL: never recorded */
    uint64_t seq;
    _Atomic int64_t ns; /* when it was reached */
    bool timing;
};

struct hrg_graph_st {
    unsigned nodes;
};

struct fake_dep {
    struct hrg_stream_st *stream;
    uint64_t seq;
};

enum fake_work { FAKE_COPY, FAKE_SET, FAKE_WRITE, FAKE_WAIT, FAKE_MARK, FAKE_LAUNCH, FAKE_NOTHING };

struct fake_item {
    struct fake_item *next;
    const char *name; /* of the call, for failures and delays */
    struct hrg_stream_st *stream;
    enum fake_work work;
    char *dst;
    const char *src;
    size_t bytes;
    int dst_index, src_index;
    unsigned char value;
    uint64_t *word;
    uint64_t operand;
    unsigned flags;
    bool half; /* 32-bit word */
    struct hrg_event_st *event;
    void (*launch)(void *args);
    void *args;
    unsigned ndeps;
    struct fake_dep deps[64];
};

/* The stream a handle means for this thread; NULL with *r. */
struct hrg_stream_st *fake_stream(hrg_stream stream, hrg_result *r);
/* A new item of the stream, zeroed but for its fields. */
struct fake_item *fake_item_new(const char *name, struct hrg_stream_st *s, enum fake_work work);
/* Queues it, with its order against default streams, or records it into the stream's capture. The item is the queue's. */
hrg_result fake_post(struct fake_item *item);
/* Whether a capture forbids an unsafe call of this thread; then it is invalid from here on. */
bool fake_capture_forbids(void);
/* run.c: does the item's work. */
void fake_run_item(struct fake_item *item);
/* Waits until the stream has finished `seq` items. */
void fake_wait_finished(struct hrg_stream_st *s, uint64_t seq);

#endif
