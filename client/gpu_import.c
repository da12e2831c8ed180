/* SPDX-License-Identifier: MIT */
#include "client/gpu_import.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "client/comm.h"
#include "client/futex.h"
#include "client/gpu.h"

/* Smaller ops go through the window: two small copies cost less than what another process does before and after. Up to here it
   was faster where measured (docs/benchmarks.md); at four times this it cost 30 us more. */
#define STAGED_BYTES (UINT64_C(64) << 10)
/* The same where the daemon's kernels do not wait for the GPU. */
#define STAGED_BYTES_IDLE (UINT64_C(1) << 10)
#define NOT_SET (UINT64_MAX - 1)
#define MEMORIES_MAX 256u
#define IDLE_NS (30 * HCL_SEC) /* also: how long a refusal is believed */
#define GIVE_BACK_NS (2 * HCL_SEC)

struct part {
    uint64_t offset, bytes;
    unsigned long long id; /* the driver's, of the allocation; never used twice */
};

struct hcl_gpu_memory {
    struct hcl_gpu_memory *next;
    hrg_ptr base;
    uint64_t bytes;
    uint32_t id;  /* the daemon's name for it */
    bool refused; /* it has none: why[] */
    bool stale;   /* another allocation lies there now, or the daemon could not be told yet that it may go */
    unsigned users; /* ops that are not over */
    uint64_t used_ns;
    char why[512];
    unsigned nparts;
    struct part part[];
};

void hcl_gpu_memories_init(struct hcl_gpu_memories *m)
{
    pthread_mutex_init(&m->lock, NULL);
}

void hcl_gpu_memories_deinit(struct hcl_gpu_memories *m)
{
    while (m->list != NULL) {
        struct hcl_gpu_memory *g = m->list;
        m->list = g->next;
        free(g);
    }
    pthread_mutex_destroy(&m->lock);
}

static bool overlaps(hrg_ptr a, uint64_t a_bytes, hrg_ptr b, uint64_t b_bytes)
{
    return a < b + b_bytes && b < a + a_bytes;
}

/* ---- giving up ----------------------------------------------------------------------------------------------------- */

/* Under the lock; nobody uses it. False: the daemon does not read now. It is not found any more, and dropped later. */
static bool drop(struct hcl_context *ctx, struct hcl_gpu_memory *g)
{
    struct hcl_gpu_memory **p = &ctx->gpu.list;
    while (*p != g)
        p = &(*p)->next;
    if (!g->refused && !hcl_context_lost(ctx)) {
        struct hrp_msg msg = {.type = HRP_MSG_FREE};
        msg.body.buffer.id = g->id;
        if (!hcl_send_only(ctx, &msg, HRP_MSG_DONE) && !hcl_context_lost(ctx)) {
            g->stale = true;
            return false;
        }
    }
    *p = g->next;
    ctx->gpu.n--;
    free(g);
    return true;
}

void hcl_gpu_unuse(struct hcl_context *ctx, struct hcl_op *op)
{
    for (unsigned i = 0; i < 2; i++) {
        struct hcl_gpu_memory *g = op->memory[i];
        if (g == NULL)
            continue;
        op->memory[i] = NULL;
        pthread_mutex_lock(&ctx->gpu.lock);
        g->users--;
        g->used_ns = hcl_now();
        if (g->users == 0 && g->stale)
            drop(ctx, g);
        pthread_mutex_unlock(&ctx->gpu.lock);
    }
}

void hcl_gpu_expire(struct hcl_context *ctx)
{
    /* A post that looks up memory holds it over calls of the driver, for which the watcher cannot wait: the next tick will do. */
    if (pthread_mutex_trylock(&ctx->gpu.lock) != 0)
        return;
    uint64_t now = hcl_now(); /* under the lock: nothing was used later than that */
    for (struct hcl_gpu_memory *g = ctx->gpu.list, *next; g != NULL; g = next) {
        next = g->next;
        if (g->users == 0 && (g->stale || now - g->used_ns > IDLE_NS))
            drop(ctx, g);
    }
    pthread_mutex_unlock(&ctx->gpu.lock);
}

/* What the daemon has of [p, p + bytes), but for what other registrations of the comm lie in: one that nobody uses is taken out
   of the list, for the caller to free here and there. NULL: none, or *used. */
static struct hcl_gpu_memory *take_out(struct hcl_comm *comm, hrg_ptr p, uint64_t bytes, bool *used)
{
    struct hcl_gpu_memories *m = &comm->ctx->gpu;
    struct hcl_gpu_memory *found = NULL;
    *used = false;
    pthread_mutex_lock(&m->lock);
    for (struct hcl_gpu_memory **at = &m->list; *at != NULL && found == NULL;) {
        struct hcl_gpu_memory *g = *at;
        bool here = !g->refused && overlaps(p, bytes, g->base, g->bytes) &&
                    !hcl_is_registered(comm, (uintptr_t)g->base, g->bytes);
        if (here && g->users == 0) {
            found = g;
            *at = g->next;
            m->n--;
            continue;
        }
        *used = *used || here;
        at = &g->next;
    }
    pthread_mutex_unlock(&m->lock);
    return found;
}

hclient_result_t hcl_gpu_give_back(struct hcl_comm *comm, uintptr_t base, size_t bytes)
{
    struct hcl_context *ctx = comm->ctx;
    const uint64_t deadline = hcl_now() + GIVE_BACK_NS;
    for (;;) {
        bool used;
        struct hcl_gpu_memory *g = take_out(comm, base, bytes, &used);
        if (g != NULL) {
            struct hrp_msg msg = {.type = HRP_MSG_FREE};
            msg.body.buffer.id = g->id;
            free(g);
            hclient_result_t r = hcl_request(ctx, &msg, NULL, 0, HRP_MSG_DONE, hcl_alloc_ns(0), NULL);
            if (r != HCLIENT_OK && !hcl_context_lost(ctx))
                return r;
            continue;
        }
        if (!used || hcl_context_lost(ctx))
            return HCLIENT_OK;
        if (hcl_now() > deadline)
            return hcl_fail(
                HCLIENT_INVALID_ARGUMENT,
                "hclient_comm_deregister: operations that are not over use the GPU memory at 0x%llx, or its "
                "allocation; wait for them and call again",
                (unsigned long long)base);
        hcl_gpu_harvest(comm); /* ops that are over let go of it */
        struct timespec ts = hcl_timespec(HCL_MS);
        nanosleep(&ts, NULL);
    }
}

/* Under the lock: room for one more; false: all are in use. */
static bool make_room(struct hcl_context *ctx)
{
    if (ctx->gpu.n < MEMORIES_MAX)
        return true;
    struct hcl_gpu_memory *oldest = NULL;
    for (struct hcl_gpu_memory *g = ctx->gpu.list; g != NULL; g = g->next)
        if (g->users == 0 && (oldest == NULL || g->used_ns < oldest->used_ns))
            oldest = g;
    return oldest != NULL && drop(ctx, oldest);
}

/* ---- looking up ---------------------------------------------------------------------------------------------------- */

static bool still_there(const struct hrg_driver *drv, const struct hcl_gpu_memory *g, hrg_ptr p,
                        uint64_t bytes)
{
    for (unsigned i = 0; i < g->nparts; i++) {
        const struct part *part = &g->part[i];
        hrg_ptr at = g->base + part->offset;
        unsigned long long id = 0;
        if (!overlaps(at, part->bytes, p, bytes))
            continue;
        if (drv->PointerGetAttribute(&id, HRG_PTR_BUFFER_ID, at) != HRG_SUCCESS || id != part->id)
            return false;
    }
    return true;
}

/* Under the lock. Memory that is no longer what it was is forgotten. */
static struct hcl_gpu_memory *lookup(struct hcl_context *ctx, const struct hrg_driver *drv, hrg_ptr p,
                                     uint64_t bytes)
{
    uint64_t now = hcl_now();
    for (struct hcl_gpu_memory *g = ctx->gpu.list, *next; g != NULL; g = next) {
        next = g->next;
        if (g->stale || !overlaps(p, bytes, g->base, g->bytes))
            continue;
        bool old_refusal = g->refused && now - g->used_ns > IDLE_NS;
        if (!old_refusal && still_there(drv, g, p, bytes) && p >= g->base && p + bytes <= g->base + g->bytes)
            return g;
        if (!old_refusal && still_there(drv, g, g->base, g->bytes))
            continue; /* the buffer reaches over its end: a segment that grew */
        g->stale = true;
        if (g->users == 0)
            drop(ctx, g);
    }
    return NULL;
}

/* ---- exporting ----------------------------------------------------------------------------------------------------- */

static struct hcl_gpu_memory *memory_new(unsigned nparts)
{
    struct hcl_gpu_memory *g = calloc(1, sizeof(*g) + nparts * sizeof(g->part[0]));
    if (g != NULL)
        g->nparts = nparts;
    return g;
}

/* The allocations, or mappings, that [p, p + bytes) lies in. NULL: not one behind the other, or too many. */
static struct hcl_gpu_memory *survey(const struct hrg_driver *drv, hrg_ptr p, uint64_t bytes)
{
    hrg_ptr base = 0, at;
    size_t size = 0;
    unsigned n = 0;
    for (at = p; at < p + bytes && n <= HRP_GPU_PARTS_MAX; n++) {
        if (drv->MemGetAddressRange(&base, &size, at) != HRG_SUCCESS || size == 0 || base > at)
            return NULL;
        at = base + size;
    }
    struct hcl_gpu_memory *g = n <= HRP_GPU_PARTS_MAX ? memory_new(n) : NULL;
    if (g == NULL)
        return NULL;
    at = p;
    for (unsigned i = 0; i < n; i++) {
        drv->MemGetAddressRange(&base, &size, at);
        if (i == 0)
            g->base = base;
        g->part[i] = (struct part){.offset = base - g->base, .bytes = size};
        if (drv->PointerGetAttribute(&g->part[i].id, HRG_PTR_BUFFER_ID, base) != HRG_SUCCESS) {
            free(g);
            return NULL;
        }
        at = base + size;
    }
    g->bytes = at - g->base;
    return g;
}

static void refuse(struct hcl_gpu_memory *g, const char *why)
{
    g->refused = true;
    snprintf(g->why, sizeof(g->why), "%s", why);
}

static void close_parts(struct hcl_part *part, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        close(part[i].fd);
    free(part);
}

/* Descriptors of all mappings; NULL with g refused. */
static struct hcl_part *export_parts(const struct hrg_driver *drv, struct hcl_gpu_memory *g)
{
    struct hcl_part *part = calloc(g->nparts + 1, sizeof(*part));
    for (unsigned i = 0; part != NULL && i < g->nparts; i++) {
        hrg_handle handle;
        int fd = -1;
        hrg_result r =
            drv->MemRetainAllocationHandle(&handle, (void *)(uintptr_t)(g->base + g->part[i].offset));
        if (r == HRG_SUCCESS) {
            r = drv->MemExportToShareableHandle(&fd, handle, HRG_HANDLE_POSIX_FD, 0);
            drv->MemRelease(handle);
        }
        if (r != HRG_SUCCESS) {
            char text[160];
            snprintf(g->why, sizeof(g->why), "a mapping cannot be exported: %s",
                     hrg_error_text(drv, r, text, sizeof(text)));
            g->refused = true;
            close_parts(part, i);
            return NULL;
        }
        part[i] = (struct hcl_part){.msg = {.type = HRP_MSG_GPU_PART}, .fd = fd};
        part[i].msg.body.gpu_part.offset = g->part[i].offset;
        part[i].msg.body.gpu_part.bytes = g->part[i].bytes;
    }
    return part;
}

/* How it can be exported: into msg, and the parts of a VMM range. False: not, g says why. */
static bool export(const struct hrg_driver *drv, struct hcl_gpu_memory *g, struct hrp_msg *msg,
                   struct hcl_part **part)
{
    unsigned legacy = 0, managed = 0;
    uint64_t types = 0;
    hrg_device dev = -1;
    struct hrg_uuid uuid;
    struct hrp_msg_import_gpu *m = &msg->body.import_gpu;
    drv->PointerGetAttribute(&managed, HRG_PTR_IS_MANAGED, g->base);
    drv->PointerGetAttribute(&legacy, HRG_PTR_IS_LEGACY_CUDA_IPC_CAPABLE, g->base);
    drv->PointerGetAttribute(&types, HRG_PTR_ALLOWED_HANDLE_TYPES, g->base);
    if (drv->PointerGetAttribute(&dev, HRG_PTR_DEVICE_ORDINAL, g->base) != HRG_SUCCESS ||
        hrg_device_uuid(drv, dev, &uuid) != HRG_SUCCESS) {
        refuse(g, "the driver does not say which GPU it is on");
        return false;
    }
    memcpy(m->uuid, uuid.bytes, sizeof(m->uuid));
    m->mig = (uint32_t)hrg_device_is_mig(drv, dev);
    m->bytes = g->bytes;
    *part = NULL;
    if (managed) {
        refuse(g, "managed memory (cudaMallocManaged) cannot be shared; use cudaMalloc");
    } else if (legacy && g->nparts == 1) {
        struct hrg_ipc_handle handle;
        m->kind = HRP_GPU_LEGACY;
        hrg_result r = drv->IpcGetMemHandle(&handle, g->base);
        if (r == HRG_SUCCESS) {
            memcpy(m->handle, handle.data, sizeof(m->handle));
        } else {
            char text[160];
            snprintf(g->why, sizeof(g->why), "cuIpcGetMemHandle failed: %s",
                     hrg_error_text(drv, r, text, sizeof(text)));
            g->refused = true;
        }
    } else if (types & HRG_HANDLE_POSIX_FD) {
        m->kind = HRP_GPU_VMM;
        m->nparts = g->nparts;
        *part = export_parts(drv, g);
        if (*part == NULL && !g->refused)
            refuse(g, "out of memory");
    } else {
        refuse(g, "it was allocated without a handle that can be exported (a memory pool, or PyTorch's "
                  "expandable segments); "
                  "use cudaMalloc, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False");
    }
    return !g->refused;
}

/* Not under the lock: a new one, in the daemon or refused. NULL: *result. */
static struct hcl_gpu_memory *import(struct hcl_context *ctx, const struct hrg_driver *drv, hrg_ptr p,
                                     uint64_t bytes, hclient_result_t *result)
{
    struct hrp_msg msg = {.type = HRP_MSG_IMPORT_GPU};
    struct hcl_part *part = NULL;
    struct hcl_reply reply = HCL_REPLY_NULL;
    struct hcl_gpu_memory *g = survey(drv, p, bytes);
    if (g == NULL)
        return NULL; /* memory of which the driver does not say where it begins: staged */
    if (!export(drv, g, &msg, &part)) {
        free(part);
        return g;
    }
    *result = hcl_request_parts(ctx, &msg, part, msg.body.import_gpu.nparts, HRP_MSG_REGISTERED,
                                hcl_alloc_ns(0), &reply);
    if (part != NULL)
        close_parts(part, g->nparts);
    if (*result == HCLIENT_OK) {
        g->id = reply.msg.body.buffer.id;
    } else if (!hcl_context_lost(ctx)) {
        *result = HCLIENT_OK; /* the daemon cannot, and says why */
        refuse(g, hclient_last_error(NULL));
    } else {
        free(g);
        g = NULL;
    }
    hcl_reply_deinit(&reply);
    return g;
}

/* It is not even known what to ask the daemon for, or there is no room to remember its answer. */
static void say_why_staged(struct hcl_comm *comm, bool room)
{
    if (room)
        snprintf(comm->gpu->staged_because, sizeof(comm->gpu->staged_because),
                 "the driver does not say where its allocation begins, or it lies in more than %u mappings",
                 HRP_GPU_PARTS_MAX);
    else
        snprintf(comm->gpu->staged_because, sizeof(comm->gpu->staged_because),
                 "all of the %u allocations that are kept for the daemon are in use by operations under way; "
                 "use fewer at a time",
                 MEMORIES_MAX);
}

/* Under the lock. A warning for each reason, not for each of an allocator's many segments. */
static void say_refused(struct hcl_context *ctx, const struct hcl_gpu_memory *g, hrg_ptr p)
{
    const bool known = strcmp(ctx->gpu.warned_why, g->why) == 0;
    hcl_log(known ? HCLIENT_LOG_INFO : HCLIENT_LOG_WARN,
            "GPU memory at 0x%llx is copied through the staging window: %s", (unsigned long long)p, g->why);
    snprintf(ctx->gpu.warned_why, sizeof(ctx->gpu.warned_why), "%s", g->why);
}

/*
 * Under post_lock, which makes this the only one of its comm. The memory of [p, p + bytes) with a use of it for the caller, or
 * NULL with *result: it is to be staged (HCLIENT_OK), or the session is lost.
 */
static struct hcl_gpu_memory *find(struct hcl_comm *comm, hrg_ptr p, uint64_t bytes, hclient_result_t *result)
{
    struct hcl_context *ctx = comm->ctx;
    const struct hrg_driver *drv = comm->gpu->drv;
    *result = HCLIENT_OK;
    pthread_mutex_lock(&ctx->gpu.lock);
    struct hcl_gpu_memory *g = lookup(ctx, drv, p, bytes);
    if (g == NULL) {
        bool room = make_room(ctx);
        pthread_mutex_unlock(&ctx->gpu.lock);
        g = room ? import(ctx, drv, p, bytes, result) : NULL;
        if (g == NULL) {
            say_why_staged(comm, room);
            return NULL;
        }
        pthread_mutex_lock(&ctx->gpu.lock);
        g->used_ns = hcl_now();
        g->next = ctx->gpu.list;
        ctx->gpu.list = g;
        ctx->gpu.n++;
        if (g->refused)
            say_refused(ctx, g, p);
    }
    if (g->refused) {
        snprintf(comm->gpu->staged_because, sizeof(comm->gpu->staged_because), "%s", g->why);
        g = NULL;
    } else {
        g->users++;
        g->used_ns = hcl_now();
    }
    pthread_mutex_unlock(&ctx->gpu.lock);
    return g;
}

/* ---- the way ------------------------------------------------------------------------------------------------------- */

static uint64_t read_staged_bytes(void)
{
    const char *text = getenv("HREDUCE_GPU_STAGED_BYTES");
    if (text == NULL || text[0] == '\0')
        return NOT_SET;
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0 && v < NOT_SET)
        return v;
    hcl_log(HCLIENT_LOG_WARN,
            "HREDUCE_GPU_STAGED_BYTES is \"%s\", which is not a number of bytes, in digits alone; the "
            "default is used (%llu, or %llu where kernels do not wait for the GPU)",
            text, (unsigned long long)STAGED_BYTES, (unsigned long long)STAGED_BYTES_IDLE);
    return NOT_SET;
}

/* What the daemon said of the op that had the next op's slot: all ranks of the node read the same. */
static bool advised_in_place(const struct hcl_comm *comm)
{
    uint64_t k = atomic_load_explicit(&comm->posted, memory_order_relaxed) + 1;
    const volatile struct hrp_completion *older = &comm->area->completion[k % HRP_OP_SLOTS];
    return k > HRP_OP_SLOTS && older->op == k - HRP_OP_SLOTS && older->advice & HRP_ADVICE_IN_PLACE;
}

/* Up to how many bytes in all the call, which is the comm's next op, is staged. */
static uint64_t staged_bytes(const struct hcl_comm *comm, const struct hcl_call *c)
{
    static _Atomic uint64_t set = UINT64_MAX;
    uint64_t v = atomic_load_explicit(&set, memory_order_relaxed);
    if (v == UINT64_MAX) {
        v = read_staged_bytes();
        atomic_store_explicit(&set, v, memory_order_relaxed);
    }
    if (v != NOT_SET)
        return v;
    bool in_place = !(c->hint & HRP_DESC_OVERLAP_COMPUTE) && advised_in_place(comm);
    return in_place ? STAGED_BYTES_IDLE : STAGED_BYTES;
}

/* Memory that the daemon cannot have would go through host memory. */
static hclient_result_t refuse_p2p(const struct hcl_comm *comm, const struct hcl_call *c)
{
    return hcl_fail(
        HCLIENT_UNSUPPORTED,
        "%s: p2p is required (by the job, or by require in a hreduced.conf), but this GPU memory would be "
        "copied through host memory: %s",
        c->name, comm->gpu->staged_because);
}

/* In a scope, which it leaves. False: the daemon cannot have the memory (*result is HCLIENT_OK), or the session is lost. */
static bool give(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_gpu_scope *scope,
                 struct hrp_desc *desc, hclient_result_t *result)
{
    hrg_ptr p[2] = {(hrg_ptr)(uintptr_t)c->send, (hrg_ptr)(uintptr_t)c->recv};
    uint64_t bytes[2] = {c->send_bytes, c->recv_bytes};
    struct hcl_gpu_memory **memory = comm->gpu->found;
    memory[0] = memory[1] = NULL;
    bool both = true;
    for (unsigned i = 0; i < 2 && both && *result == HCLIENT_OK; i++) {
        if (bytes[i] == 0)
            continue;
        memory[i] = find(comm, p[i], bytes[i], result);
        both = memory[i] != NULL;
    }
    hcl_gpu_leave(scope);
    if (*result != HCLIENT_OK || !both) {
        struct hcl_op none = {.memory = {memory[0], memory[1]}};
        hcl_gpu_unuse(comm->ctx, &none);
        return false;
    }
    struct hrp_bufref *ref[2] = {&desc->in, &desc->out};
    for (unsigned i = 0; i < 2; i++) {
        *ref[i] = (struct hrp_bufref){.kind = HRP_BUF_NONE};
        if (memory[i] == NULL)
            continue;
        ref[i]->kind = HRP_BUF_SHARED;
        ref[i]->id = memory[i]->id;
        ref[i]->offset = p[i] - memory[i]->base;
    }
    desc->flags |= HRP_DESC_STREAM | c->hint;
    return true;
}

static bool takes(struct hcl_comm *comm, const struct hcl_call *c, struct hrp_desc *desc,
                  hclient_result_t *result)
{
    struct hcl_gpu_scope scope;
    uint64_t all = hrp_sig_bytes(&c->sig, comm->nranks);
    const bool p2p = comm->require & HRP_REQUIRE_P2P;
    if (all == 0 || (!p2p && all <= staged_bytes(comm, c)) || !hcl_gpu_prepare(comm, c, &scope, result))
        return false;
    if (*result != HCLIENT_OK)
        return true;
    if (p2p)
        comm->gpu->staged_because[0] = '\0'; /* what is said there is about this call */
    if (give(comm, c, &scope, desc, result))
        return true;
    if (*result == HCLIENT_OK && p2p)
        *result = refuse_p2p(comm, c);
    return *result != HCLIENT_OK;
}

/* Whatever the size; nobody else takes GPU memory after this. */
static bool takes_unpinned(struct hcl_comm *comm, const struct hcl_call *c, struct hrp_desc *desc,
                           hclient_result_t *result)
{
    struct hcl_gpu_scope scope;
    if (comm->gpu == NULL || comm->gpu->window_why[0] == '\0' || !hcl_gpu_prepare(comm, c, &scope, result))
        return false;
    if (*result == HCLIENT_OK && !give(comm, c, &scope, desc, result) && *result == HCLIENT_OK)
        *result = hcl_fail(HCLIENT_RESOURCE, "%s And the daemon cannot have this GPU memory: %s",
                           comm->gpu->window_why, comm->gpu->staged_because);
    return true;
}

static void describe(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_op *op,
                     struct hrp_desc *desc)
{
    (void)desc;
    op->stream = c->stream;
    op->bytes = op->nchunks = op->out = 0;
    atomic_store_explicit(&op->in, 0, memory_order_relaxed);
    memcpy(op->memory, comm->gpu->found, sizeof(op->memory));
    comm->gpu->imported_ops++;
}

static hclient_result_t start(struct hcl_comm *comm, const struct hcl_call *c, struct hcl_op *op, bool *rings)
{
    struct hcl_gpu_scope scope;
    const struct hrg_driver *drv = comm->gpu->drv;
    /* Now: while this enqueues, the daemon takes the descriptor and begins to look at the ready word. */
    hcl_doorbell(comm->ctx);
    *rings = true;
    hrg_ptr near = (hrg_ptr)(uintptr_t)(c->send_bytes > 0 ? c->send : c->recv);
    hclient_result_t result = hcl_gpu_enter(drv, c->name, c->stream, near, &scope);
    if (result != HCLIENT_OK)
        return result;
    hrg_result r = hcl_gpu_enqueue(comm, op);
    hcl_gpu_leave(&scope);
    return r == HRG_SUCCESS ? HCLIENT_OK : hcl_gpu_fail(drv, c->name, "enqueuing the op's words", r);
}

const struct hcl_way hcl_way_gpu_shared = {
    .takes = takes, .describe = describe, .start = start, .in_stream = true, .defers = true};

const struct hcl_way hcl_way_gpu_unpinned = {
    .takes = takes_unpinned, .describe = describe, .start = start, .in_stream = true, .defers = true};
