/* SPDX-License-Identifier: MIT */
/*
 * The GPUs as a whole: how they are found, their threads, when they come up and go down, and the queue of answers. One
 * mutex for what all look at; it is never held over a call of the driver.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "daemon/gpu/gpu_int.h"
#include "daemon/gpu/parts.h"
#include "daemon/log.h"
#include "daemon/numa.h"
#include "daemon/thread.h"

#define KEPT_MS 100u /* after which a GPU that has to stay up for others asks again whether it may go */

/* ---- small things ----------------------------------------------------------------------------------------- */

static void *need(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (!p)
        abort(); /* crash-only */
    return p;
}

const char *hrd_gpu_name(const struct hrd_gpu_dev *d, char *buf, size_t len)
{
    snprintf(buf, len, "GPU %s (%s)", d->id, d->name);
    return buf;
}

struct hrd_gpu_dev *hrd_gpus_dev(const struct hrd_gpus *gpus, int16_t gpu)
{
    return &gpus->gpu[gpu]->dev;
}

unsigned hrd_gpus_numa_nodes(const struct hrd_gpus *gpus)
{
    return hrd_numa_nodes(gpus->cfg.sysfs);
}

static struct gpu *gpu_of(struct hrd_gpu_dev *d)
{
    return (struct gpu *)((char *)d - offsetof(struct gpu, dev));
}

static struct timespec after_ms(uint32_t ms)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += ms / 1000;
    t.tv_nsec += (long)(ms % 1000) * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

/* ---- answers ---------------------------------------------------------------------------------------------- */

static struct hrd_gpu_event *answer_to(const struct gpu_request *r)
{
    struct hrd_gpu_event *ev = need(sizeof(*ev));
    ev->type = r->answer;
    ev->sid = r->sid;
    ev->token = r->token;
    ev->gpu = -1;
    return ev;
}

static void emit(struct hrd_gpus *gpus, struct hrd_gpu_event *ev)
{
    uint64_t one = 1;
    pthread_mutex_lock(&gpus->lock);
    if (gpus->event_last)
        gpus->event_last->next = ev;
    else
        gpus->event_first = ev;
    gpus->event_last = ev;
    pthread_mutex_unlock(&gpus->lock);
    while (write(gpus->event_fd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
}

static void refuse(struct hrd_gpus *gpus, struct gpu_request *r, const char *why)
{
    struct hrd_gpu_event *ev = answer_to(r);
    snprintf(ev->text, sizeof(ev->text), "%s", why);
    hrd_gpu_source_drop(&r->source);
    free(r);
    emit(gpus, ev);
}

int hrd_gpus_event_fd(const struct hrd_gpus *gpus)
{
    return gpus->event_fd;
}

struct hrd_gpu_event *hrd_gpus_take_events(struct hrd_gpus *gpus)
{
    uint64_t n;
    while (read(gpus->event_fd, &n, sizeof(n)) < 0 && errno == EINTR)
        ;
    pthread_mutex_lock(&gpus->lock);
    struct hrd_gpu_event *ev = gpus->event_first;
    gpus->event_first = gpus->event_last = NULL;
    pthread_mutex_unlock(&gpus->lock);
    return ev;
}

/* ---- up and down, on the GPU's thread --------------------------------------------------------------------- */

static void drop_parts(struct gpu *g)
{
    for (unsigned k = HRD_GPU_NPARTS; k-- > 0;) {
        if (g->dev.part[k])
            hrd_gpu_parts[k]->down(&g->dev, g->dev.part[k]);
        g->dev.part[k] = NULL;
    }
}

static int make_parts(struct gpu *g, char *why, size_t len)
{
    struct hrd_gpu_dev *d = &g->dev;
    char name[HRD_GPU_NAME];
    for (unsigned k = 0; k < HRD_GPU_NPARTS; k++) {
        const struct hrd_gpu_part *part = hrd_gpu_parts[k];
        d->part_why[k][0] = '\0';
        if (part->up(d, &d->part[k], d->part_why[k], sizeof(d->part_why[k])) == 0)
            continue;
        d->part[k] = NULL;
        if (!part->needed) {
            hrd_notice("%s is used without its kernels: %s", hrd_gpu_name(d, name, sizeof(name)),
                       d->part_why[k]);
            continue;
        }
        snprintf(why, len, "%s: %s", hrd_gpu_name(d, name, sizeof(name)), d->part_why[k]);
        drop_parts(g);
        return -1;
    }
    return 0;
}

static size_t free_memory(const struct hrd_gpu_dev *d)
{
    size_t bytes = 0, total = 0;
    return d->drv->MemGetInfo(&bytes, &total) == HRG_SUCCESS ? bytes : 0;
}

static int bring_up(struct gpu *g, char *why, size_t len)
{
    struct hrd_gpu_dev *d = &g->dev;
    char error[128], name[HRD_GPU_NAME];
    hrg_result rc = d->drv->DevicePrimaryCtxRetain(&d->ctx, d->dev);
    if (rc != HRG_SUCCESS) {
        snprintf(why, len, "%s: a context cannot be made: %s", hrd_gpu_name(d, name, sizeof(name)),
                 hrg_error_text(d->drv, rc, error, sizeof(error)));
        return -1;
    }
    d->drv->CtxSetCurrent(d->ctx);
    size_t before = free_memory(d);
    int failed = make_parts(g, why, len);
    /* Last of what may fail: once others use the registrations of this context, it has to stay. */
    if (!failed && (failed = hrd_gpu_pins_take(g, why, len)) != 0)
        drop_parts(g);
    if (failed) {
        d->drv->CtxSetCurrent(NULL);
        d->drv->DevicePrimaryCtxRelease(d->dev);
        return -1;
    }
    hrd_gpu_pairs_verify(g);
    hrd_gpu_gdr_up(g);
    size_t after = free_memory(d);
    if (after == 0)
        after = before;
    pthread_mutex_lock(&g->gpus->lock);
    g->device_bytes = before > after ? before - after : 0;
    pthread_mutex_unlock(&g->gpus->lock);
    hrd_notice(
        "%s is in use: the engines took %zu KiB of its memory beside what the driver takes for a context",
        hrd_gpu_name(d, name, sizeof(name)), (before > after ? before - after : 0) >> 10);
    return 0;
}

/* No import is open. False: it has to stay up for others, see pin.c, or the agent holds memory of it, see gdr.h. */
static bool take_down(struct gpu *g, bool force)
{
    struct hrd_gpu_dev *d = &g->dev;
    char name[HRD_GPU_NAME];
    if (!hrd_gpu_gdr_idle(g, force))
        return false;
    if (!hrd_gpu_pins_drop(g, force)) {
        hrd_gpu_gdr_stay(g);
        return false;
    }
    hrd_gpu_gdr_down(g);
    hrd_gpu_pairs_forget(g);
    drop_parts(g);
    d->drv->CtxSetCurrent(NULL);
    d->drv->DevicePrimaryCtxRelease(d->dev);
    d->ctx = NULL;
    hrd_notice("%s is given back", hrd_gpu_name(d, name, sizeof(name)));
    return true;
}

/* ---- imports, on the GPU's thread ------------------------------------------------------------------------- */

/* Without descriptors an allocation has a name, the handle. */
static struct hrd_gpu_import *find_import(struct gpu *g, const struct hrd_gpu_source *s)
{
    struct hrd_gpu_import *i = s->msg.kind == HRP_GPU_LEGACY ? g->imports : NULL;
    while (i && (i->source.msg.kind != HRP_GPU_LEGACY || i->source.uid != s->uid ||
                 memcmp(i->source.msg.handle, s->msg.handle, sizeof(s->msg.handle)) != 0))
        i = i->next;
    return i;
}

static struct hrd_gpu_import *new_import(struct gpu *g, struct gpu_request *r, char *why, size_t len)
{
    struct hrd_gpu_import *i = need(sizeof(*i));
    i->g = g;
    i->source = r->source;
    r->source.fd = NULL; /* the import's now */
    r->source.part_bytes = NULL;
    if (hrd_gpu_map(g, i, why, len) != 0) {
        hrd_gpu_source_drop(&i->source);
        free(i);
        return NULL;
    }
    hrd_gpu_import_link(i);
    return i;
}

/* NULL, or the sentence. */
static const char *lost(const struct gpu *g)
{
    return hrd_gpus_lost(g->gpus, UINT64_C(1) << g->dev.gpu);
}

/* Every allocation of a job asks again; an operator hears of it when the reason is another one than before. */
static bool is_up(struct gpu *g, char *why, size_t len)
{
    if (g->up)
        return true;
    const bool up = bring_up(g, why, len) == 0;
    if (!up && strcmp(g->down_why, why) != 0)
        hrd_warn("%s. Memory of jobs on it is copied through host memory", why);
    snprintf(g->down_why, sizeof(g->down_why), "%s", up ? "" : why);
    return up;
}

static void open_import(struct gpu *g, struct gpu_request *r)
{
    char why[512] = "";
    if (lost(g)) {
        refuse(g->gpus, r, lost(g));
        return;
    }
    if (!is_up(g, why, sizeof(why))) {
        refuse(g->gpus, r, why);
        return;
    }
    hrd_gpu_gdr_stay(g);
    struct hrd_gpu_import *i = find_import(g, &r->source);
    if (i && r->source.msg.bytes > i->source.msg.bytes) {
        snprintf(why, sizeof(why), "an allocation of %" PRIu64 " bytes is said to have %" PRIu64 " bytes",
                 i->source.msg.bytes, r->source.msg.bytes);
        refuse(g->gpus, r, why);
        return;
    }
    if (!i)
        i = new_import(g, r, why, sizeof(why));
    if (!i) {
        refuse(g->gpus, r, why);
        return;
    }
    i->users++;
    struct hrd_gpu_event *ev = answer_to(r);
    ev->import = i;
    ev->gpu = g->dev.gpu;
    ev->device = i->ptr;
    ev->bytes = r->source.msg.bytes;
    hrd_gpu_source_drop(&r->source);
    free(r);
    emit(g->gpus, ev);
}

static void close_import(struct gpu *g, struct gpu_request *r)
{
    struct hrd_gpu_import *i = r->import;
    if (--i->users == 0) {
        hrd_gpu_import_unlink(i);
        hrd_gpu_unmap(g, &i->source, i->ptr);
        hrd_gpu_source_drop(&i->source);
        free(i);
    }
    struct hrd_gpu_event *ev = answer_to(r);
    free(r);
    emit(g->gpus, ev);
}

static void gdr_asked(struct gpu *g, struct gpu_request *r)
{
    if (g->up && !lost(g))
        hrd_gpu_gdr_up(g);
    free(r);
}

/* ---- a GPU's thread --------------------------------------------------------------------------------------- */

/* The next request; NULL: the time is up (only while the GPU idles), or it is time to stop. kept: its time was up already,
   but others need it. */
static struct gpu_request *next_request(struct gpu *g, bool kept)
{
    struct hrd_gpus *gpus = g->gpus;
    bool idle = g->up && !g->imports, timed_out = false;
    struct timespec until = after_ms(kept ? KEPT_MS : lost(g) ? 0 : gpus->cfg.idle_ms);
    pthread_mutex_lock(&gpus->lock);
    while (!g->first && !gpus->stop && !timed_out) {
        if (idle)
            timed_out = pthread_cond_timedwait(&g->more, &gpus->lock, &until) == ETIMEDOUT;
        else
            pthread_cond_wait(&g->more, &gpus->lock);
    }
    struct gpu_request *r = g->first;
    if (r) {
        g->first = r->next;
        if (!g->first)
            g->last = NULL;
    }
    pthread_mutex_unlock(&gpus->lock);
    return r;
}

static bool stopping(struct hrd_gpus *gpus)
{
    pthread_mutex_lock(&gpus->lock);
    bool stop = gpus->stop;
    pthread_mutex_unlock(&gpus->lock);
    return stop;
}

static void *gpu_thread(void *arg)
{
    struct gpu *g = arg;
    bool kept = false;
    for (;;) {
        struct gpu_request *r = next_request(g, kept);
        kept = false;
        if (r && r->gdr)
            gdr_asked(g, r);
        else if (r && r->answer == HRD_GPU_IMPORTED)
            open_import(g, r);
        else if (r)
            close_import(g, r);
        else if (stopping(g->gpus))
            break;
        else
            kept = !take_down(g, false);
    }
    if (g->up)
        take_down(g, true);
    return NULL;
}

/* ---- finding the devices ---------------------------------------------------------------------------------- */

static int list_device(struct hrd_gpus *gpus, const struct hrg_driver *drv, int ordinal)
{
    struct gpu *g = need(sizeof(*g));
    struct hrd_gpu_dev *d = &g->dev;
    char uuid[HRG_UUID_TEXT];
    pthread_condattr_t attr;
    d->drv = drv;
    d->gpu = (int16_t)ordinal;
    hrg_result rc = drv->DeviceGet(&d->dev, ordinal);
    if (rc == HRG_SUCCESS)
        rc = hrg_device_uuid(drv, d->dev, &d->uuid);
    if (rc == HRG_SUCCESS)
        rc = drv->DeviceGetPCIBusId(d->pci, sizeof(d->pci), d->dev);
    if (rc == HRG_SUCCESS)
        rc = drv->DeviceGetName(d->name, sizeof(d->name), d->dev);
    if (rc != HRG_SUCCESS) {
        free(g);
        return rc;
    }
    d->numa = hrd_numa_of_pci(gpus->cfg.sysfs, d->pci);
    d->mig = hrg_device_is_mig(drv, d->dev);
    hrg_uuid_text(&d->uuid, d->mig, uuid);
    snprintf(d->id, sizeof(d->id), "%s%s%s", d->pci, d->mig ? " " : "", d->mig ? uuid : "");
    g->gpus = gpus;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&g->more, &attr);
    pthread_condattr_destroy(&attr);
    gpus->gpu[ordinal] = g;
    gpus->n = (unsigned)ordinal + 1;
    return 0;
}

/* Fills gpu[] and n, or refusal. */
static void list_devices(struct hrd_gpus *gpus)
{
    char why[300] = "", error[128];
    int count = 0;
    const struct hrg_driver *drv = hrg_driver_get(why, sizeof(why));
    hrg_result rc = drv ? drv->Init(0) : HRG_SUCCESS;
    if (drv && rc == HRG_SUCCESS)
        rc = drv->DeviceGetCount(&count);
    if (count > HRD_GPUS_MAX)
        count = HRD_GPUS_MAX;
    for (int i = 0; i < count && rc == HRG_SUCCESS; i++)
        rc = list_device(gpus, drv, i);
    gpus->drv = drv;
    if (!drv)
        snprintf(gpus->refusal, sizeof(gpus->refusal), "node %s: %s", gpus->node_name, why);
    else if (rc != HRG_SUCCESS)
        snprintf(gpus->refusal, sizeof(gpus->refusal), "node %s: the GPUs cannot be listed: %s",
                 gpus->node_name, hrg_error_text(drv, rc, error, sizeof(error)));
    else if (count == 0)
        snprintf(gpus->refusal, sizeof(gpus->refusal), "node %s: the daemon sees no GPU", gpus->node_name);
}

static struct gpu *find_gpu(struct hrd_gpus *gpus, const uint8_t uuid[16])
{
    for (unsigned i = 0; i < gpus->n; i++)
        if (memcmp(gpus->gpu[i]->dev.uuid.bytes, uuid, 16) == 0)
            return gpus->gpu[i];
    return NULL;
}

/* Under the lock, with the devices listed. False: *why is the sentence. */
static bool queue_for(struct hrd_gpus *gpus, struct gpu *g, struct gpu_request *r, char *why, size_t len)
{
    if (!g->threaded) {
        char name[16];
        snprintf(name, sizeof(name), "hrd-gpu%d", g->dev.gpu);
        int rc = hrd_thread_start(&g->thread, gpu_thread, g, name);
        if (rc != 0) {
            snprintf(why, len, "node %s: a GPU's thread cannot be started: %s", gpus->node_name,
                     strerror(rc));
            return false;
        }
        g->threaded = true;
    }
    g->used = true;
    if (g->last)
        g->last->next = r;
    else
        g->first = r;
    g->last = r;
    pthread_cond_signal(&g->more);
    return true;
}

void hrd_gpu_ask_gdr(struct gpu *g)
{
    struct gpu_request *r = need(sizeof(*r));
    char why[8];
    r->gdr = true;
    if (!queue_for(g->gpus, g, r, why, sizeof(why)))
        abort(); /* its thread runs: it is up */
}

/* With the devices listed. */
static void route(struct hrd_gpus *gpus, struct gpu_request *r)
{
    char why[512], uuid[HRG_UUID_TEXT];
    struct gpu *g = gpus->refusal[0] ? NULL : find_gpu(gpus, r->source.msg.uuid);
    bool queued = false;
    if (gpus->refusal[0]) {
        snprintf(why, sizeof(why), "%s", gpus->refusal);
    } else if (!g) {
        struct hrg_uuid u;
        memcpy(u.bytes, r->source.msg.uuid, sizeof(u.bytes));
        hrg_uuid_text(&u, r->source.msg.mig != 0, uuid);
        snprintf(
            why, sizeof(why),
            "node %s: %s is not visible to the daemon, which must have the job's GPUs (CUDA_VISIBLE_DEVICES "
            "and DeviceAllow= of hreduced.service)%s",
            gpus->node_name, uuid,
            r->source.msg.mig ? "; most drivers show a process one instance of MIG alone" : "");
    } else {
        pthread_mutex_lock(&gpus->lock);
        queued = queue_for(gpus, g, r, why, sizeof(why));
        pthread_mutex_unlock(&gpus->lock);
    }
    if (!queued)
        refuse(gpus, r, why);
}

static void *lister_thread(void *arg)
{
    struct hrd_gpus *gpus = arg;
    list_devices(gpus);
    if (gpus->refusal[0])
        hrd_notice("GPU memory is staged: %s", gpus->refusal);
    pthread_mutex_lock(&gpus->lock);
    gpus->listing = GPUS_LISTED;
    struct gpu_request *r = gpus->unlisted_first;
    gpus->unlisted_first = gpus->unlisted_last = NULL;
    pthread_mutex_unlock(&gpus->lock);
    while (r) {
        struct gpu_request *next = r->next;
        r->next = NULL;
        route(gpus, r);
        r = next;
    }
    return NULL;
}

/* ---- requests --------------------------------------------------------------------------------------------- */

void hrd_gpus_import(struct hrd_gpus *gpus, uint64_t sid, uint64_t token, const struct hrd_gpu_source *source)
{
    struct gpu_request *r = need(sizeof(*r));
    char why[300] = "";
    *r = (struct gpu_request){.answer = HRD_GPU_IMPORTED, .sid = sid, .token = token, .source = *source};
    if (gpus->cfg.off) {
        snprintf(why, sizeof(why), "node %s: gpu = off in hreduced.conf", gpus->node_name);
        refuse(gpus, r, why);
        return;
    }
    pthread_mutex_lock(&gpus->lock);
    if (gpus->listing == GPUS_LISTED) {
        pthread_mutex_unlock(&gpus->lock);
        route(gpus, r);
        return;
    }
    int rc = 0;
    if (gpus->listing == GPUS_UNKNOWN)
        rc = hrd_thread_start(&gpus->lister, lister_thread, gpus, "hrd-gpus");
    if (rc == 0) {
        gpus->listing = GPUS_LISTING;
        gpus->lister_to_join = true;
        if (gpus->unlisted_last)
            gpus->unlisted_last->next = r;
        else
            gpus->unlisted_first = r;
        gpus->unlisted_last = r;
    }
    pthread_mutex_unlock(&gpus->lock);
    if (rc != 0) {
        snprintf(why, sizeof(why), "node %s: a thread for the GPUs cannot be started: %s", gpus->node_name,
                 strerror(rc));
        refuse(gpus, r, why);
    }
}

void hrd_gpus_close(struct hrd_gpus *gpus, uint64_t sid, uint64_t token, struct hrd_gpu_import *import)
{
    struct gpu_request *r = need(sizeof(*r));
    char why[8];
    *r = (struct gpu_request){.answer = HRD_GPU_CLOSED, .sid = sid, .token = token, .import = import};
    pthread_mutex_lock(&gpus->lock);
    if (!queue_for(gpus, import->g, r, why, sizeof(why)))
        abort(); /* its thread runs: it made the import */
    pthread_mutex_unlock(&gpus->lock);
}

/* ---- failures --------------------------------------------------------------------------------------------- */

/* From now on it takes nothing; the first reason stays. */
static void lose(struct gpu *g, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void lose(struct gpu *g, const char *fmt, ...)
{
    struct hrd_gpus *gpus = g->gpus;
    va_list ap;
    pthread_mutex_lock(&gpus->lock);
    bool first = g->lost_why[0] == '\0';
    if (first) {
        va_start(ap, fmt);
        vsnprintf(g->lost_why, sizeof(g->lost_why), fmt, ap);
        va_end(ap);
    }
    atomic_fetch_or_explicit(&gpus->lost, UINT64_C(1) << g->dev.gpu, memory_order_release);
    pthread_mutex_unlock(&gpus->lock);
    if (first)
        hrd_error("%s", g->lost_why);
}

/* What a person can do about it. */
static const char *remedy(hrg_result error)
{
    switch (error) {
    case HRG_ERROR_OUT_OF_MEMORY:
        return "the daemon needs some of its memory: leave more of it free";
    case HRG_ERROR_ECC_UNCORRECTABLE:
        return "its memory is damaged: see gpu-health of 'hreducectl doctor', and reset it";
    default:
        return hrg_error_is_sticky(error) ? "restart hreduced when its jobs allow it"
                                          : "see 'hreducectl doctor' and the kernel's log";
    }
}

bool hrd_gpu_failed(struct hrd_gpu_dev *d, hrg_result error, const char *what, char *why, size_t len)
{
    char text[128], name[HRD_GPU_NAME];
    hrd_gpu_name(d, name, sizeof(name));
    hrg_error_text(d->drv, error, text, sizeof(text));
    snprintf(why, len, "%s: %s failed: %s; %s", name, what, text, remedy(error));
    if (!hrg_error_is_sticky(error))
        return false;
    lose(gpu_of(d), "%s is lost to this daemon since %s failed: %s; %s", name, what, text, remedy(error));
    return true;
}

void hrd_gpus_stuck(struct hrd_gpus *gpus, uint64_t which, unsigned ms, char *why, size_t len)
{
    char name[HRD_GPU_NAME];
    for (uint64_t left = which; left; left &= left - 1) {
        struct gpu *g = gpus->gpu[__builtin_ctzll(left)];
        lose(g,
             "%s is lost to this daemon since work on it did not end within %u.%u s; look for an Xid in the "
             "kernel's "
             "log ('hreducectl doctor' as root does), reset it when its jobs have ended, restart hreduced",
             hrd_gpu_name(&g->dev, name, sizeof(name)), ms / 1000, ms % 1000 / 100);
    }
    snprintf(why, len, "%s", hrd_gpus_lost(gpus, which));
}

const char *hrd_gpus_lost(const struct hrd_gpus *gpus, uint64_t which)
{
    which &= atomic_load_explicit(&gpus->lost, memory_order_acquire);
    return which ? gpus->gpu[__builtin_ctzll(which)]->lost_why : NULL;
}

unsigned hrd_gpus_info(const struct hrd_gpus *gpus, struct hrd_gpu_info *out, unsigned max, uint64_t *pinned)
{
    struct hrd_gpus *m = (struct hrd_gpus *)(uintptr_t)gpus;
    unsigned n = 0;
    *pinned = 0;
    for (unsigned i = 0; i < gpus->nranges && atomic_load(&gpus->pinned); i++)
        *pinned += gpus->range[i].bytes;
    pthread_mutex_lock(&m->lock);
    for (unsigned i = 0; gpus->listing == GPUS_LISTED && i < gpus->n; i++) {
        const struct gpu *g = gpus->gpu[i];
        if (!g->used)
            continue;
        if (n < max) {
            struct hrd_gpu_info *o = &out[n];
            *o = (struct hrd_gpu_info){.up = g->up,
                                       .imports = g->nimports,
                                       .import_bytes = g->import_bytes,
                                       .device_bytes = g->up ? g->device_bytes : 0};
            hrg_uuid_text(&g->dev.uuid, g->dev.mig, o->uuid);
            memcpy(o->pci, g->dev.pci, sizeof(o->pci));
            memcpy(o->name, g->dev.name, sizeof(o->name));
            memcpy(o->lost, g->lost_why, sizeof(o->lost));
            o->gdr = g->gdr.is.ready;
            o->gdr_read = g->gdr.is.read;
            o->gdr_written = g->gdr.is.written;
            snprintf(o->gdr_text, sizeof(o->gdr_text), "%s", o->gdr ? g->gdr.is.used : g->gdr.is.why);
            memcpy(o->sm_why, g->up ? g->dev.part_why[HRD_GPU_SM] : "", g->up ? sizeof(o->sm_why) : 1);
        }
        n++;
    }
    pthread_mutex_unlock(&m->lock);
    return n;
}

/* ---- all of them ------------------------------------------------------------------------------------------ */

struct hrd_gpus *hrd_gpus_new(const struct hrd_gpus_config *cfg)
{
    struct hrd_gpus *gpus = calloc(1, sizeof(*gpus));
    if (!gpus)
        return NULL;
    gpus->cfg = *cfg;
    snprintf(gpus->node_name, sizeof(gpus->node_name), "%s", cfg->node_name ? cfg->node_name : "?");
    gpus->cfg.node_name = gpus->node_name;
    gpus->cfg.sysfs = cfg->sysfs ? cfg->sysfs : "/sys";
    gpus->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (gpus->event_fd < 0) {
        free(gpus);
        return NULL;
    }
    pthread_mutex_init(&gpus->lock, NULL);
    pthread_mutex_init(&gpus->pin_lock, NULL);
    pthread_mutex_init(&gpus->pair_lock, NULL);
    return gpus;
}

void hrd_gpus_stop(struct hrd_gpus *gpus)
{
    if (gpus->lister_to_join)
        pthread_join(gpus->lister, NULL);
    gpus->lister_to_join = false;
    pthread_mutex_lock(&gpus->lock);
    gpus->stop = true;
    for (unsigned i = 0; i < gpus->n; i++)
        pthread_cond_signal(&gpus->gpu[i]->more);
    pthread_mutex_unlock(&gpus->lock);
    for (unsigned i = 0; i < gpus->n; i++) {
        struct gpu *g = gpus->gpu[i];
        if (g->threaded)
            pthread_join(g->thread, NULL);
        g->threaded = false;
    }
}

void hrd_gpus_free(struct hrd_gpus *gpus)
{
    for (unsigned i = 0; i < gpus->n; i++) {
        pthread_cond_destroy(&gpus->gpu[i]->more);
        free(gpus->gpu[i]);
    }
    while (gpus->texts) {
        struct text *t = gpus->texts;
        gpus->texts = t->next;
        free(t);
    }
    for (struct hrd_gpu_event *ev = gpus->event_first, *next; ev; ev = next) {
        next = ev->next;
        free(ev);
    }
    close(gpus->event_fd);
    pthread_mutex_destroy(&gpus->lock);
    pthread_mutex_destroy(&gpus->pin_lock);
    pthread_mutex_destroy(&gpus->pair_lock);
    free(gpus);
}
