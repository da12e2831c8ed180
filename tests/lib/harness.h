/* SPDX-License-Identifier: MIT */
/*
 * What cluster and fault tests share: daemons and ranks of one test, and one checked collective. The daemons
 * and processes are those of client/perf/cluster.h and ranks.h, whose functions may be used beside these.
 *
 * The parent's functions end the test with a sentence when something fails (exit status 1); the kernel and
 * tests/run then clean up. A rank's functions return 0, or 1 after hpf_rank_fail(), so that a rank function
 * can return what they return.
 */
#ifndef TESTS_LIB_HARNESS_H
#define TESTS_LIB_HARNESS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/hclient.h"
#include "client/perf/cluster.h"
#include "client/perf/expect.h"
#include "client/perf/pattern.h"
#include "client/perf/ranks.h"

/* ---- the parent ------------------------------------------------------------------------------------------ */

/* Ends the test: 1 with the sentence, 77 with the reason. */
_Noreturn void ht_die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
_Noreturn void ht_skip(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
#define HT_CHECK(condition, ...) \
    do {                         \
        if (!(condition))        \
            ht_die(__VA_ARGS__); \
    } while (0)

/* A time limit, longer under sanitizers (HREDUCE_TIME_SCALE). */
unsigned ht_ms(unsigned ms);
/* Whether the build under test has sanitizers, so that a test may do less. */
bool ht_sanitized(void);
/* MemAvailable. */
uint64_t ht_memory_available(void);

/* Daemons with these configuration lines ("key = value"), a NULL-terminated list; NULL: none. */
struct hpf_cluster *ht_cluster(unsigned nnodes, const char *const *keys);
/* Ends the daemons; each must end with status 0. */
void ht_cluster_end(struct hpf_cluster *c);

/* Memory that all ranks of a job share, before what the test itself asks for (ht_shared()). */
#define HT_MAX_RANKS 256u
#define HT_MAX_COMMS 64u
struct ht_page {
    _Atomic uint32_t id_ready[HT_MAX_COMMS];
    hclient_unique_id_t id[HT_MAX_COMMS];
    unsigned node_of_rank[HT_MAX_COMMS][HT_MAX_RANKS]; /* as the library numbers nodes */
    size_t user_offset;                                /* of ht_job_user_shared() */
    _Alignas(64) unsigned char expected[];
};

struct ht_job {
    unsigned nranks;
    const unsigned *map; /* NULL: blocks */
    hpf_rank_fn fn;
    void *arg;
    size_t expected_bytes; /* room for the largest result that ranks shall check together; 0: each alone */
    size_t shared_bytes;   /* the test's own */
};
struct hpf_job *ht_start(struct hpf_cluster *c, const struct ht_job *job);
/* All ranks must end with status 0. Frees the job. */
void ht_finish(struct hpf_job *job, unsigned timeout_ms);
/* Both, with 60 s without progress. */
void ht_run(struct hpf_cluster *c, const struct ht_job *job);
void *ht_job_user_shared(struct hpf_job *job);

/* Every daemon of this test exchanges over verbs or not at all: see tests/lib/fake_verbs.py. */
bool ht_over_verbs(void);

/* `hreducectl --socket S status --json` of a node, to be freed. */
char *ht_status(struct hpf_cluster *c, unsigned node);
/* What a process holds; -1 when it is gone. */
long ht_fds(pid_t pid);
long ht_threads(pid_t pid);
long ht_rss_kib(pid_t pid);
long ht_space_kib(pid_t pid); /* of addresses, used or not */
long ht_maps(pid_t pid);
/* Entries of /dev/shm. */
long ht_shm_entries(void);
/* True when text occurs in the daemon's log. */
bool ht_log_has(const struct hpf_cluster *c, unsigned node, const char *text);

/* ---- a rank ---------------------------------------------------------------------------------------------- */

/* Returns from the calling rank function with 1 when a call of the library fails. */
#define HT_TRY(me, call)                                       \
    do {                                                       \
        hclient_result_t ht_r_ = (call);                       \
        if (ht_r_ != HCLIENT_OK)                               \
            return ht_call_failed(me, ht_r_, #call, __LINE__); \
    } while (0)
int ht_call_failed(struct hpf_rank *me, hclient_result_t r, const char *call, int line);
/* The same for a condition. */
#define HT_EXPECT(me, condition, ...)              \
    do {                                           \
        if (!(condition))                          \
            return hpf_rank_fail(me, __VA_ARGS__); \
    } while (0)

/* r must be want, with a sentence that has these words. */
int ht_refused(struct hpf_rank *me, hclient_result_t r, hclient_result_t want, const char *words);

/* The test's own shared memory. */
void *ht_shared(struct hpf_rank *me);
/* Room in ht_page.expected, as the job asked for it. */
size_t ht_expected_bytes(void);

enum ht_memory { HT_PLAIN, HT_ALLOC, HT_IMPORT, HT_NMEMORY };

/* A rank in a communicator, with memory to run collectives on. */
struct ht_env {
    struct hpf_rank *me;
    struct ht_page *page;
    unsigned number; /* of the communicator in this job */
    hclient_comm_t comm;
    hclient_comm_info_t info;
    struct hpf_layout layout;
    bool exact, wire_f32; /* what the results are compared with; exact by default */
    uint64_t seed;        /* the same on all ranks; changes with each collective */
    struct {
        unsigned char *base;
        size_t bytes;
    } mem[HT_NMEMORY][2];
};

/* Joins communicator `number` of the job (0 .. HT_MAX_COMMS - 1; made on first use) with all its ranks. */
int ht_join(struct ht_env *e, struct hpf_rank *me, unsigned number, const hclient_comm_config_t *config);
/* The same for one that the rank has joined by itself: e->comm is set, nothing else. */
int ht_adopt(struct ht_env *e, struct hpf_rank *me, unsigned number);
/* Destroys the communicator, after a meeting of all ranks, and frees the memory. */
int ht_leave(struct ht_env *e);

#define HT_NULL_SHIFT UINT32_MAX
struct ht_coll {
    unsigned coll, dtype, redop, root;
    uint64_t count;
    bool inplace;
    unsigned send_mem, recv_mem;     /* enum ht_memory; in place: recv_mem (reduce_scatter: send_mem) */
    unsigned send_shift, recv_shift; /* bytes from a page-aligned address */
    bool gpu;                        /* copied into GPU memory, and back, in the order of: */
    void *stream;
};
/*
 * Runs one collective on fresh random inputs and checks every element of the output, that the input is as it
 * was, and guards around both.
 */
int ht_collective(struct ht_env *e, const struct ht_coll *c);
/* all_reduces of 1 to 2500003 elements, in place and not, of two types. */
int ht_sums(struct ht_env *e, bool gpu);
/* The parts of it, for tests that have several in flight: post, then check after the wait. */
struct ht_flight {
    struct ht_coll coll;
    struct hpf_case expect;
    unsigned char *send, *recv;
    unsigned char *area[2]; /* with guards */
    size_t bytes[2];        /* of the data in it */
    uint64_t device[2];     /* GPU: where the areas are there, */
    void *bounce[2];        /* and pinned memory between the two */
    hclient_op_t op;
};
/* Buffers at send_area and recv_area (NULL: the environment's own). Size: ht_area_bytes(). */
int ht_post(struct ht_env *e, const struct ht_coll *c, unsigned char *send_area, unsigned char *recv_area,
            struct ht_flight *f);
int ht_verify(struct ht_env *e, struct ht_flight *f);
size_t ht_area_bytes(const struct ht_env *e, const struct ht_coll *c);

/* ---- GPU memory (tests/lib/gpu.c) ------------------------------------------------------------------------- */

struct hrg_driver;
/*
 * Before daemons and ranks are started: they, and whatever else this process starts, find the driver without a GPU in CUDA's
 * place. name: libcuda_fake.so.1, or one of its kind.
 */
void ht_gpu_fake(const char *name);
/* A rank's: its driver, with the context of device (its number on its node) % devices current. NULL after hpf_rank_fail(). */
const struct hrg_driver *ht_gpu_open(struct hpf_rank *me);
/* Returns from a rank function with 1 when a call of the driver fails. */
#define HT_CUDA(me, call)                                                                       \
    do {                                                                                        \
        int ht_c_ = (call);                                                                     \
        if (ht_c_ != 0)                                                                         \
            return hpf_rank_fail(me, "line %d: %s gave CUDA error %d", __LINE__, #call, ht_c_); \
    } while (0)
/*
 * New memory of the rank's GPU (cuMemCreate) at reserved addresses, whose handle goes with the mapping. types: what it can be
 * exported as, HRG_HANDLE_POSIX_FD or 0.
 */
int ht_gpu_map(struct hpf_rank *me, uint64_t at, size_t bytes, int types);
/* How often the fake's cuNAME was called by this process; UINT_MAX where the driver does not say. */
unsigned ht_gpu_calls(const char *name);
/* A word in pinned memory, 0 at first; a stream that it holds goes on when 1 is stored there. */
struct ht_gate {
    _Atomic uint64_t *word;
    uint64_t device;
};
int ht_gate_new(struct ht_env *e, struct ht_gate *g);
int ht_gate_hold(struct ht_env *e, const struct ht_gate *g, void *stream);
/* Of a flight, by ht_post() and ht_verify(). */
int ht_gpu_upload(struct ht_env *e, struct ht_flight *f);
int ht_gpu_download(struct ht_env *e, struct ht_flight *f);
/* Where p, in one of its areas, lies in GPU memory. */
void *ht_gpu_address(const struct ht_flight *f, const void *p);

/* "all_reduce of 17 x bf16, max, in place, plain to alloc" */
const char *ht_coll_text(const struct ht_coll *c, char *buf, size_t len);
/* A simple generator for tests; each caller has its own state. */
uint32_t ht_random(uint64_t *state);

#endif
