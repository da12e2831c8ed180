/* SPDX-License-Identifier: MIT */
#include "client/gpu.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "client/futex.h"
#include "kernels/kernels.h"

#define PASSED_BYTES HRP_PAGE
#define ABI_MINOR_GPU 1u

_Static_assert(HRP_OP_SLOTS * sizeof(uint64_t) <= PASSED_BYTES, "a word a slot");

/* ---- pinned memory ------------------------------------------------------------------------------------------------- */

/* *own: to be undone; memory that the program pinned before is as good. */
static hclient_result_t pin(const struct hrg_driver *drv, const char *call, const char *what, void *p,
                            size_t bytes, bool *own)
{
    hrg_result r = drv->MemHostRegister(p, bytes, HRG_HOST_PORTABLE | HRG_HOST_DEVICEMAP);
    *own = r == HRG_SUCCESS;
    if (r == HRG_SUCCESS || r == HRG_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        return HCLIENT_OK;
    char text[160];
    return hcl_fail(HCLIENT_RESOURCE,
                    "%s: cannot pin the %zu bytes of the %s for the GPU: %s; is the locked-memory limit "
                    "(ulimit -l) large "
                    "enough?",
                    call, bytes, what, hrg_error_text(drv, r, text, sizeof(text)));
}

static void unpin(struct hcl_comm *comm, struct hcl_gpu *g)
{
    hrg_ctx popped;
    /* Where CUDA is gone already (a process that exits) all of this fails, which is as good. */
    bool pushed = g->drv->CtxPushCurrent(g->ctx) == HRG_SUCCESS;
    if (g->pinned_window)
        g->drv->MemHostUnregister(comm->stage.window);
    if (g->pinned_area)
        g->drv->MemHostUnregister(comm->area);
    if (g->passed != NULL)
        g->drv->MemHostUnregister((void *)(uintptr_t)g->passed);
    if (pushed)
        g->drv->CtxPopCurrent(&popped);
}

static hclient_result_t pin_words(struct hcl_comm *comm, struct hcl_gpu *g, const char *call)
{
    const struct hrg_driver *drv = g->drv;
    bool own;
    void *page = mmap(NULL, PASSED_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return hcl_fail(HCLIENT_RESOURCE, "%s: no memory for the words of streams: %s", call,
                        strerror(errno));
    madvise(page, PASSED_BYTES, MADV_DONTFORK);
    hclient_result_t r = pin(drv, call, "words of streams", page, PASSED_BYTES, &own);
    if (r != HCLIENT_OK) {
        munmap(page, PASSED_BYTES);
        return r;
    }
    g->passed = page;
    r = pin(drv, call, "communicator's area", comm->area, HRP_COMM_STRIDE, &g->pinned_area);
    hrg_result e = HRG_SUCCESS;
    if (r == HCLIENT_OK)
        e = drv->MemHostGetDevicePointer(&g->passed_dev, page, 0);
    if (r == HCLIENT_OK && e == HRG_SUCCESS)
        e = drv->MemHostGetDevicePointer(&g->area, comm->area, 0);
    return e != HRG_SUCCESS ? hcl_gpu_fail(drv, call, "mapping the communicator's area for the GPU", e) : r;
}

static void free_words(struct hcl_gpu *g)
{
    if (g->passed != NULL)
        munmap((void *)(uintptr_t)g->passed, PASSED_BYTES);
    free(g);
}

static hclient_result_t check_device(struct hcl_gpu *g, const char *call)
{
    hrg_device dev;
    hrg_result r = g->drv->CtxGetDevice(&dev);
    if (r != HRG_SUCCESS)
        return hcl_gpu_fail(g->drv, call, "asking the context for its device", r);
    uint64_t bit = UINT64_C(1) << (dev & 63);
    if (g->devices_checked & bit)
        return HCLIENT_OK;
    char why[512];
    if (hrg_stream_ops_check(g->drv, dev, why, sizeof(why)) != 0)
        return hcl_fail(HCLIENT_UNSUPPORTED, "%s: %s", call, why);
    g->devices_checked |= bit;
    return HCLIENT_OK;
}

/* Jobs that set it to 1 or 2 for the order of their own kernels do not expect that it also concerns waits. NULL: nothing
   stands still. */
static const char *few_connections(void)
{
    const char *v = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (v != NULL && strcmp(v, "1") == 0)
        return "CUDA_DEVICE_MAX_CONNECTIONS is 1: while one stream waits for a collective, all the other "
               "streams "
               "of this process stand still";
    if (v != NULL && strcmp(v, "2") == 0)
        return "CUDA_DEVICE_MAX_CONNECTIONS is 2: while one stream waits for a collective, half of the other "
               "streams of this process stand still";
    return NULL;
}

#define CONNECTIONS_REMEDY \
    "defer the waits (HCLIENT_DEFER_WAIT, hclient_stream_wait()), or set it to 8 or more"

void hcl_gpu_warn_waits(void)
{
    static atomic_flag looked = ATOMIC_FLAG_INIT;
    const char *reason = atomic_flag_test_and_set(&looked) ? NULL : few_connections();
    if (reason != NULL)
        hcl_log(HCLIENT_LOG_WARN, "%s. Remedy: " CONNECTIONS_REMEDY, reason);
}

hclient_result_t hcl_gpu_need(struct hcl_comm *comm, const struct hrg_driver *drv, const char *call)
{
    if (comm->gpu != NULL)
        return check_device(comm->gpu, call);
    uint32_t abi = atomic_load_explicit(&comm->ctx->seg->abi, memory_order_acquire);
    if ((abi & 0xffff) < ABI_MINOR_GPU)
        return hcl_fail(HCLIENT_UNSUPPORTED,
                        "%s: the hreduced daemon (%s) is older than GPU buffers; update it", call,
                        comm->ctx->version);
    struct hcl_gpu *g = calloc(1, sizeof(*g));
    if (g == NULL)
        return hcl_fail(HCLIENT_RESOURCE, "%s: out of memory", call);
    g->drv = drv;
    hrg_result e = drv->CtxGetCurrent(&g->ctx);
    hclient_result_t r =
        e != HRG_SUCCESS ? hcl_gpu_fail(drv, call, "asking for the context", e) : check_device(g, call);
    if (r == HCLIENT_OK)
        r = pin_words(comm, g, call);
    if (r != HCLIENT_OK) {
        unpin(comm, g);
        free_words(g);
        return r;
    }
    pthread_mutex_lock(&comm->lock);
    comm->gpu = g;
    pthread_mutex_unlock(&comm->lock);
    return HCLIENT_OK;
}

bool hcl_gpu_pin_window(struct hcl_comm *comm, const char *call)
{
    struct hcl_gpu *g = comm->gpu;
    bool own;
    if (g->pinned_window || g->window_why[0] != '\0')
        return g->pinned_window;
    g->pinned_window = pin(g->drv, call, "staging window (staging_window of the daemon)", comm->stage.window,
                           comm->stage.bytes, &own) == HCLIENT_OK;
    if (!g->pinned_window) {
        snprintf(g->window_why, sizeof(g->window_why), "%s", hclient_last_error(NULL));
        hcl_log(HCLIENT_LOG_WARN,
                "%s Operations that would be copied through it go by the GPU memory itself, which the daemon "
                "has; small ones take longer so",
                g->window_why);
    }
    return g->pinned_window;
}

/* ---- where the streams are ----------------------------------------------------------------------------------------- */

bool hcl_gpu_passed(const struct hcl_comm *comm, uint64_t number)
{
    const struct hcl_gpu *g = comm->gpu;
    return atomic_load_explicit(&g->passed[number % HRP_OP_SLOTS], memory_order_acquire) >= number;
}

/* For threads without post_lock, with a reference to comm: while those last it is not freed. */
static struct hcl_gpu *gpu_of(struct hcl_comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    struct hcl_gpu *g = comm->gpu;
    pthread_mutex_unlock(&comm->lock);
    return g;
}

uint64_t hcl_gpu_unpassed(struct hcl_comm *comm, unsigned slot)
{
    pthread_mutex_lock(&comm->lock);
    const struct hcl_op *op = &comm->ops[slot];
    uint64_t number = comm->gpu != NULL && op->gpu && !hcl_gpu_passed(comm, op->number) ? op->number : 0;
    pthread_mutex_unlock(&comm->lock);
    return number;
}

bool hcl_gpu_pending(struct hcl_comm *comm)
{
    bool pending = false;
    pthread_mutex_lock(&comm->lock);
    for (unsigned i = 0; comm->gpu != NULL && i < HRP_OP_SLOTS && !pending; i++)
        pending = hcl_gpu_comes(comm, &comm->ops[i]);
    pthread_mutex_unlock(&comm->lock);
    return pending;
}

void hcl_gpu_harvest(struct hcl_comm *comm)
{
    for (unsigned i = 0; i < HRP_OP_SLOTS; i++) {
        struct hcl_outcome outcome;
        uint64_t chunks;
        pthread_mutex_lock(&comm->lock);
        const struct hcl_op *op = &comm->ops[i];
        uint64_t number = op->gpu && !op->complete && hcl_gpu_passed(comm, op->number) ? op->number : 0;
        pthread_mutex_unlock(&comm->lock);
        if (number == 0 || !hcl_op_over(comm, number, &chunks, &outcome))
            continue;
        hcl_op_complete(comm, number, outcome.result, outcome.text);
        if (outcome.result != HCLIENT_OK)
            hcl_log(HCLIENT_LOG_ERROR, "an op on GPU buffers failed: %s", outcome.text);
    }
    if (gpu_of(comm) == NULL || pthread_mutex_trylock(&comm->post_lock) != 0)
        return; /* somebody is posting, and so frees what is not needed */
    for (unsigned i = 0; i < HRP_OP_SLOTS; i++) {
        struct hcl_op *op = &comm->ops[i];
        pthread_mutex_lock(&comm->lock);
        bool over = op->complete;
        pthread_mutex_unlock(&comm->lock);
        if (over)
            hcl_gpu_unuse(comm->ctx, op);
    }
    pthread_mutex_unlock(&comm->post_lock);
}

/* ---- the report ---------------------------------------------------------------------------------------------------- */

static void escape(const char *text, char *out, size_t size)
{
    size_t n = 0;
    for (; *text != '\0' && n + 3 < size; text++) {
        if (*text == '"' || *text == '\\')
            out[n++] = '\\';
        out[n++] = (unsigned char)*text < 0x20 ? ' ' : *text;
    }
    out[n] = '\0';
}

/* How the streams wait, of `all` ops. */
static void waits_report(char *buf, size_t len, uint64_t deferred, uint64_t all)
{
    const char *reason = deferred < all ? few_connections() : NULL;
    int n = snprintf(buf, len, "{\"used\": \"%llu enqueued with the call, %llu later\"",
                     (unsigned long long)(all - deferred), (unsigned long long)deferred);
    if (reason == NULL)
        snprintf(buf + n, len - (size_t)n, "}");
    else
        snprintf(buf + n, len - (size_t)n,
                 ", \"wanted\": \"all later\", \"reason\": \"%s\", \"remedy\": \"" CONNECTIONS_REMEDY "\"}",
                 reason);
}

char *hcl_gpu_report(struct hcl_comm *comm, char *json)
{
    char *end = json != NULL ? strrchr(json, '}') : NULL;
    if (end == NULL)
        return json;
    char because[sizeof(((struct hcl_gpu *)0)->staged_because) * 2] = "";
    char unpinned[sizeof(((struct hcl_gpu *)0)->window_why) * 2] = "";
    uint64_t shared = 0, staged = 0, alone = 0, deferred = 0;
    if (pthread_mutex_trylock(&comm->post_lock) != 0)
        return json; /* a post that waits for a slot may take long */
    bool any = comm->gpu != NULL;
    if (any) {
        shared = comm->gpu->imported_ops;
        staged = comm->gpu->staged_ops;
        alone = comm->gpu->alone_ops;
        deferred = comm->gpu->deferred_ops;
        escape(comm->gpu->staged_because, because, sizeof(because));
        escape(comm->gpu->window_why, unpinned, sizeof(unpinned));
    }
    pthread_mutex_unlock(&comm->post_lock);
    char *text, waits[512];
    waits_report(waits, sizeof(waits), deferred, shared + staged);
    if (!any ||
        asprintf(&text,
                 "%.*s, \"gpu_buffers\": {\"shared_ops\": %llu, \"staged_ops\": %llu, \"alone_ops\": %llu, "
                 "\"staged_because\": \"%s\", \"unpinned_because\": \"%s\"}, \"gpu_waits\": %s}",
                 (int)(end - json), json, (unsigned long long)shared, (unsigned long long)staged,
                 (unsigned long long)alone,
                 because[0] != '\0' ? because
                 : staged > 0       ? "small operations are copied"
                                    : "",
                 unpinned, waits) < 0)
        return json;
    free(json);
    return text;
}

/* ---- the end ------------------------------------------------------------------------------------------------------- */

/* What the op's stream fed of the window and the daemon did not answer becomes NaN, then done. The stream copies its input there
   whenever it comes to the op, so what it has not fed yet must wait: whether it still is to. */
static bool feeds(struct hcl_comm *comm, unsigned slot)
{
    const uint64_t number = hcl_gpu_unpassed(comm, slot);
    const struct hcl_op *op = &comm->ops[slot];
    if (number == 0 || op->bytes == 0 || op->sig.dtype > HRP_BF16 || comm->stage.window == NULL)
        return false;
    struct hrp_op_flags *f = &comm->area->flags[slot];
    uint64_t done = atomic_load_explicit(&f->done, memory_order_acquire);
    uint64_t ready = atomic_load_explicit(&f->ready, memory_order_acquire);
    if (done == HRP_FLAG_POISON)
        return false;
    if (ready >> HRP_CHUNK_BITS != number)
        return true;
    uint64_t fed = (ready & HRP_CHUNK_ALL) * HRP_STAGE_CHUNK;
    uint64_t answered = done >> HRP_CHUNK_BITS == number ? (done & HRP_CHUNK_ALL) * HRP_STAGE_CHUNK : 0;
    if (fed > answered)
        hrk_fill_nan_ring(op->sig.dtype, comm->stage.window, comm->stage.bytes, op->base + answered,
                          op->base + (fed < op->bytes ? fed : op->bytes));
    if ((ready & HRP_CHUNK_ALL) == HRP_CHUNK_ALL)
        return false; /* the poison answers the rest: a done of all chunks stands for a completion, and there is none */
    if (fed > answered)
        atomic_store_explicit(&f->done, ready, memory_order_release);
    return true;
}

bool hcl_gpu_spoil(struct hcl_comm *comm, uint32_t *feeding)
{
    *feeding = 0;
    if (gpu_of(comm) == NULL)
        return true;
    if (pthread_mutex_trylock(&comm->post_lock) != 0)
        return false;
    for (unsigned i = 0; i < HRP_OP_SLOTS; i++)
        *feeding |= (uint32_t)feeds(comm, i) << i;
    pthread_mutex_unlock(&comm->post_lock);
    return true;
}

bool hcl_gpu_deinit(struct hcl_comm *comm, uint64_t wait_ns)
{
    if (comm->gpu == NULL)
        return true;
    uint64_t deadline = hcl_now() + wait_ns;
    while (hcl_gpu_pending(comm)) {
        if (hcl_now() > deadline) {
            if (hcl_context_lost(
                    comm->ctx)) /* nobody looks at the comm any more: a stream that comes even later must pass */
                hcl_comm_poison_all(comm);
            return false;
        }
        if (hcl_context_lost(comm->ctx)) /* the watcher no longer finds a comm that is being destroyed */
            hcl_comm_poison(comm);
        hcl_gpu_trap(comm); /* streams that are held */
        struct timespec ts = hcl_timespec(HCL_MS / 5);
        nanosleep(&ts, NULL);
    }
    for (unsigned i = 0; i < HRP_OP_SLOTS; i++)
        hcl_gpu_unuse(comm->ctx, &comm->ops[i]);
    unpin(comm, comm->gpu);
    free_words(comm->gpu);
    comm->gpu = NULL;
    return true;
}
