/* SPDX-License-Identifier: MIT */
/*
 * The GPUs of this node, as the daemon uses them. Nothing outside of daemon/gpu/ calls the CUDA driver.
 *
 * A GPU is known by its UUID and gets an index (the `gpu` of a span) when a client first imports memory of it. One control
 * thread a GPU does what may block or synchronise: making the context and what the engines need in it, opening and closing
 * imports, registering host memory, verifying the pairs. The agent's engines only launch and poll.
 *
 * A GPU is *up* from its first import until idle_ms after its last one; in between nothing of CUDA exists in the process,
 * so that the GPU can be reset or re-partitioned. What an engine may rely on: while a buffer of GPU g is registered with
 * the agent, hrd_gpus_dev(gpus, g) is up and does not change.
 *
 * An import is the mapping of one allocation, shared by all who import the same one, and closed only when the last of them
 * closed it.
 */
#ifndef HRD_GPU_H
#define HRD_GPU_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "kernels/gpu_driver.h"
#include "proto/wire.h"

#define HRD_GPUS_MAX 64 /* one bit each in hrd_engine_ask.gpus */

struct hrd_gpus;
struct hrd_gpu_import;

struct hrd_gpus_config {
    bool off;         /* imports are refused in words */
    uint32_t idle_ms; /* how long a GPU without imports stays up */
    uint32_t pair_ms; /* most that the verification of one pair may take */
    uint64_t
        pair_bytes_per_s;  /* a pair that copies more slowly goes through host memory; 0: none is too slow */
    const char *node_name; /* for sentences; copied */
    uint8_t gdr;           /* enum hrd_gdr_mode, see gdr.h */
    uint64_t gdr_bytes;    /* memory on each GPU that the RDMA adapter reaches */
    const char
        *topology;     /* NULL: this machine's; or a file as for hrd_topo_load(), which stays the caller's */
    const char *sysfs; /* NULL: "/sys". A test may put something in its place; borrowed */
};

/* ---- a GPU, as its engines see it ------------------------------------------------------------------------- */

/* What an engine keeps on each GPU. */
enum hrd_gpu_part_kind { HRD_GPU_DMA, HRD_GPU_SM, HRD_GPU_NPARTS };

/* Constant while the GPU is up. */
struct hrd_gpu_dev {
    const struct hrg_driver *drv;
    int16_t gpu; /* its index */
    hrg_device dev;
    hrg_ctx ctx; /* the primary one. A thread makes it current before it calls the driver for this GPU */
    struct hrg_uuid uuid;
    char pci[16]; /* "0000:18:00.0" */
    char id[64];  /* for sentences: the same, and "0000:18:00.0 MIG-..." where it is an instance of MIG */
    bool mig;
    char name[96];
    unsigned numa;                      /* its NUMA node, see numa.h */
    void *part[HRD_GPU_NPARTS];         /* of hrd_gpu_part.up(); NULL: not there, and */
    char part_why[HRD_GPU_NPARTS][200]; /* why not, a phrase */
};

/* How an engine gets onto a GPU. All on the GPU's control thread, with its context current; may block. */
struct hrd_gpu_part {
    enum hrd_gpu_part_kind kind;
    bool needed; /* without it the GPU does not come up */
    /* Streams, events, modules: 0 and *state, or -1 and a phrase. */
    int (*up)(struct hrd_gpu_dev *g, void **state, char *why, size_t len);
    /* Nothing is in flight. Also after the GPU was lost: then what the driver answers does not matter. */
    void (*down)(struct hrd_gpu_dev *g, void *state);
};

/* The GPU of an index that a span has. Any thread. */
struct hrd_gpu_dev *hrd_gpus_dev(const struct hrd_gpus *gpus, int16_t gpu);

/*
 * The agent heard `error` from this GPU while doing `what` ("a copy of 512 KiB to the host"). Writes the sentence to why
 * and returns whether the GPU is lost with it (hrg_error_is_sticky()): then it takes no imports any more until the daemon
 * is started again. Any thread.
 */
bool hrd_gpu_failed(struct hrd_gpu_dev *g, hrg_result error, const char *what, char *why, size_t len);

/* Work that the agent gave to these GPUs (bit g: GPU g) did not end within `ms`: they are lost, as after such an error. Writes
   the sentence about the first of them to why. Any thread. */
void hrd_gpus_stuck(struct hrd_gpus *gpus, uint64_t which, unsigned ms, char *why, size_t len);

/*
 * Whether these two different GPUs may access each other directly: both said so, and patterns of several sizes went both
 * ways unharmed and in time. False: *why is a phrase that lives as long as gpus. The context of either has access then
 * to what this process allocates on the other; for imports see hrd_gpus_view(). Any thread; never blocks.
 */
bool hrd_gpus_pair(const struct hrd_gpus *gpus, int16_t a, int16_t b, const char **why);

/*
 * Whether kernels of GPU `at` have an address for everything that is imported of `owner`, another GPU that it pairs with.
 * False: *why is a sentence that lives as long as gpus. Any thread; never blocks.
 */
bool hrd_gpus_reach(const struct hrd_gpus *gpus, int16_t owner, int16_t at, const char **why);
/*
 * What kernels of `at` call `addr`, an address in an import of `owner` (as IMPORTED gave it); 0: they cannot reach it. What
 * lies behind it in that import is as far behind the answer. Any thread; briefly locks. The answer holds while the import
 * is registered with the agent.
 */
uint64_t hrd_gpus_view(const struct hrd_gpus *gpus, int16_t owner, int16_t at, uint64_t addr);
/* Another number each time that an answer of hrd_gpus_view() may have changed: read before asking. Any thread. */
uint64_t hrd_gpus_views_epoch(const struct hrd_gpus *gpus);

/* ---- host memory that all GPUs reach ---------------------------------------------------------------------- */

/* To be registered (pinned) with the first GPU that comes up, for all. Before any import; at most 12 ranges. The memory
   stays until hrd_gpus_stop(). */
void hrd_gpus_pin(struct hrd_gpus *gpus, void *base, uint64_t bytes);
/* All of it lies in a range that is registered now. Any thread, while a GPU is up. */
bool hrd_gpus_pinned(const struct hrd_gpus *gpus, const void *p, uint64_t bytes);

/* How many NUMA nodes this machine has: a GPU's is below. Any thread. */
unsigned hrd_gpus_numa_nodes(const struct hrd_gpus *gpus);

/* ---- control thread --------------------------------------------------------------------------------------- */

/* Loads nothing and starts no thread yet. NULL with errno. */
struct hrd_gpus *hrd_gpus_new(const struct hrd_gpus_config *cfg);
/* All imports are closed: takes every GPU down and ends the threads. Blocks for as long as the driver takes. */
void hrd_gpus_stop(struct hrd_gpus *gpus);
/* After hrd_gpus_stop(), and after everybody who has a pointer from here is gone. */
void hrd_gpus_free(struct hrd_gpus *gpus);

/* Where memory comes from: as in struct hrp_msg_import_gpu. */
struct hrd_gpu_source {
    uid_t uid; /* users never share an import */
    struct hrp_msg_import_gpu msg;
    /* VMM: msg.nparts of each, malloc'ed; become gpus' with the call, the descriptors too. LEGACY: NULL. */
    int *fd;
    uint64_t *part_bytes;
};

/* Answered by IMPORTED with the same sid and token. Never blocks. */
void hrd_gpus_import(struct hrd_gpus *gpus, uint64_t sid, uint64_t token,
                     const struct hrd_gpu_source *source);
/* The importer and the agent have let go of it. Answered by CLOSED when it is really closed, which is at once where others
   still use the allocation. */
void hrd_gpus_close(struct hrd_gpus *gpus, uint64_t sid, uint64_t token, struct hrd_gpu_import *import);

enum hrd_gpu_event_type { HRD_GPU_IMPORTED = 1, HRD_GPU_CLOSED };

struct hrd_gpu_event {
    enum hrd_gpu_event_type type;
    uint64_t sid, token;
    struct hrd_gpu_import *import; /* IMPORTED: for hrd_gpus_close(); NULL: refused, and text says why */
    int16_t gpu;
    uint64_t device; /* its address in the daemon's process */
    uint64_t bytes;
    char text[512];
    struct hrd_gpu_event *next;
};

/* Readable when events wait. */
int hrd_gpus_event_fd(const struct hrd_gpus *gpus);
/* All waiting events, oldest first, each freed by the caller with free(); NULL: none. */
struct hrd_gpu_event *hrd_gpus_take_events(struct hrd_gpus *gpus);

/* How fast large blocks go between a GPU and an adapter, in bytes a second: the best of several pieces. 0: not measured. */
struct hrd_gdr_rate {
    double direct; /* the adapter reads or writes the GPU's memory */
    double
        staged; /* it reads or writes the host's, while the driver copies as much between that and the GPU */
};

/* For status: a GPU that was imported from at least once. */
struct hrd_gpu_info {
    char uuid[HRG_UUID_TEXT], pci[16], name[96];
    bool up;
    char lost[512]; /* not empty: the sentence */
    uint32_t imports;
    uint64_t import_bytes;
    uint64_t device_bytes; /* GPU memory that the daemon's context and engines took when the GPU came up */
    char sm_why[200];      /* why it has no sm engine; empty: it has */
    bool gdr;              /* the RDMA adapter reaches memory of it; how, or why not: */
    char gdr_text[512];
    struct hrd_gdr_rate gdr_read, gdr_written; /* by the adapter */
};

/* Fills at most max; returns how many there are. *pinned: bytes of host memory registered now. */
unsigned hrd_gpus_info(const struct hrd_gpus *gpus, struct hrd_gpu_info *out, unsigned max, uint64_t *pinned);

enum hrd_pair_state {
    HRD_PAIR_DIRECT,  /* verified: they access each other */
    HRD_PAIR_REFUSED, /* the driver says that they cannot */
    HRD_PAIR_BAD,     /* it says that they can, but copies arrive damaged, late or never */
};

/* What was found when both were last in use together. */
struct hrd_gpu_pair_info {
    char pci[2][16], id[2][64]; /* as in hrd_gpu_dev */
    enum hrd_pair_state state;
    double bytes_per_s; /* DIRECT: of copies, the slower way */
    char why[300];      /* otherwise a phrase */
};

/* Fills at most max; returns how many pairs were ever in use together. Any thread; briefly locks. */
unsigned hrd_gpus_pairs(const struct hrd_gpus *gpus, struct hrd_gpu_pair_info *out, unsigned max);

/* Why one of these GPUs (bit g: GPU g) is lost, see hrd_gpu_failed(): a sentence that lives as long as gpus. NULL: none of
   them is. Any thread; never blocks. */
const char *hrd_gpus_lost(const struct hrd_gpus *gpus, uint64_t which);

#endif
