/* SPDX-License-Identifier: MIT */
/*
 * Whether two GPUs may access each other directly. That the driver says so is not enough: behind some PCIe switches and
 * IOMMUs such copies arrive damaged, late or never. So each pair carries patterns both ways before anything of a job does.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/gpu/gpu_int.h"
#include "daemon/log.h"

#define PATTERN_BYTES ((size_t)2 << 20)
/* A pair that is slower than this is of no use: through host memory it goes many times faster. */
#define RATE_COPIES 8

static const char NOT_YET[] = "not both of them are in use";

struct trial {
    struct gpu *a, *b;
    const struct hrg_driver *drv;
    hrg_stream stream;
    hrg_event event;
    hrg_ptr at[2];       /* on a, on b */
    unsigned char *host; /* pinned: what is sent, and behind it what came back */
    bool stuck;          /* a copy is still in flight: nothing of this may be freed */
    double rate;         /* bytes/s, the slower way */
};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int failed(const struct trial *t, hrg_result rc, const char *what, char *why, size_t len)
{
    char error[128];
    if (hrg_error_is_sticky(rc))
        hrd_gpu_failed(&t->a->dev, rc, what, why, len);
    snprintf(why, len, "%s: %s", what, hrg_error_text(t->drv, rc, error, sizeof(error)));
    return -1;
}

/* Everything on the stream so far; not longer than the limit. */
static int finish(struct trial *t, double deadline, char *why, size_t len)
{
    hrg_result rc = t->drv->EventRecord(t->event, t->stream);
    while (rc == HRG_SUCCESS && (rc = t->drv->EventQuery(t->event)) == HRG_ERROR_NOT_READY) {
        if (now_s() > deadline) {
            t->stuck = true;
            snprintf(why, len, "a copy between them did not end in time");
            return -1;
        }
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
        rc = HRG_SUCCESS;
    }
    return rc == HRG_SUCCESS ? 0 : failed(t, rc, "a copy between them", why, len);
}

/* Copies before the one that failed may be in flight. */
static void drain(struct trial *t)
{
    double deadline = now_s() + t->a->gpus->cfg.pair_ms * 1e-3;
    while (!t->stuck && t->drv->StreamQuery(t->stream) == HRG_ERROR_NOT_READY) {
        t->stuck = now_s() > deadline;
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
}

/* One pattern from side `from` to the other; both are cleared first, so that nothing old can pass for it. */
static int one_way(struct trial *t, unsigned from, size_t off, size_t bytes, double deadline, char *why,
                   size_t len)
{
    struct gpu *g[2] = {t->a, t->b};
    unsigned to = !from;
    unsigned char *back = t->host + PATTERN_BYTES;
    for (size_t i = 0; i < bytes; i++)
        t->host[i] = (unsigned char)(i * 167 + (i >> 8) * 13 + bytes + from + 1);
    memset(back, 0, bytes);
    const struct hrg_driver *drv = t->drv;
    hrg_result rc = drv->MemcpyHtoDAsync(t->at[to] + off, back, bytes, t->stream);
    if (rc == HRG_SUCCESS)
        rc = drv->MemcpyHtoDAsync(t->at[from] + off, t->host, bytes, t->stream);
    if (rc == HRG_SUCCESS)
        rc = drv->MemcpyPeerAsync(t->at[to] + off, g[to]->dev.ctx, t->at[from] + off, g[from]->dev.ctx, bytes,
                                  t->stream);
    if (rc == HRG_SUCCESS)
        rc = drv->MemcpyDtoHAsync(back, t->at[to] + off, bytes, t->stream);
    if (rc != HRG_SUCCESS)
        return failed(t, rc, "a copy between them", why, len);
    if (finish(t, deadline, why, len) != 0)
        return -1;
    if (memcmp(t->host, back, bytes) == 0)
        return 0;
    snprintf(why, len, "%zu bytes copied from %s to %s arrived damaged", bytes, g[from]->dev.id,
             g[to]->dev.id);
    return -1;
}

static int measure(struct trial *t, unsigned from, double deadline, char *why, size_t len)
{
    struct gpu *g[2] = {t->a, t->b};
    double start = now_s();
    for (int i = 0; i < RATE_COPIES; i++) {
        hrg_result rc = t->drv->MemcpyPeerAsync(t->at[!from], g[!from]->dev.ctx, t->at[from],
                                                g[from]->dev.ctx, PATTERN_BYTES, t->stream);
        if (rc != HRG_SUCCESS)
            return failed(t, rc, "a copy between them", why, len);
    }
    if (finish(t, deadline, why, len) != 0)
        return -1;
    double rate = (double)(RATE_COPIES * PATTERN_BYTES) / (now_s() - start + 1e-9);
    if (from == 0 || rate < t->rate)
        t->rate = rate;
    if (rate >= (double)t->a->gpus->cfg.pair_bytes_per_s)
        return 0;
    snprintf(why, len, "copies from %s to %s run at %.0f MB/s", g[from]->dev.id, g[!from]->dev.id,
             rate / 1e6);
    return -1;
}

static int patterns(struct trial *t, char *why, size_t len)
{
    static const struct {
        size_t off, bytes;
    } shape[] = {{0, 4}, {12, 4096}, {4096, 65540}, {0, PATTERN_BYTES}};
    double deadline = now_s() + t->a->gpus->cfg.pair_ms * 1e-3;
    for (unsigned from = 0; from < 2; from++) {
        for (size_t i = 0; i < sizeof(shape) / sizeof(shape[0]); i++)
            if (one_way(t, from, shape[i].off, shape[i].bytes, deadline, why, len) != 0)
                return -1;
        if (measure(t, from, deadline, why, len) != 0)
            return -1;
    }
    return 0;
}

/* Memory on both, which is given back whatever happens, unless a copy is stuck in it. */
static int with_memory(struct trial *t, char *why, size_t len)
{
    const struct hrg_driver *drv = t->drv;
    struct gpu *g[2] = {t->a, t->b};
    hrg_result rc = drv->StreamCreateWithPriority(&t->stream, HRG_STREAM_NON_BLOCKING, 0);
    if (rc == HRG_SUCCESS)
        rc = drv->EventCreate(&t->event, HRG_EVENT_DISABLE_TIMING);
    if (rc == HRG_SUCCESS)
        rc = drv->MemHostAlloc((void **)&t->host, 2 * PATTERN_BYTES, HRG_HOST_PORTABLE);
    for (unsigned i = 0; i < 2 && rc == HRG_SUCCESS; i++) {
        drv->CtxSetCurrent(g[i]->dev.ctx);
        rc = drv->MemAlloc(&t->at[i], PATTERN_BYTES);
    }
    drv->CtxSetCurrent(t->a->dev.ctx);
    int result = rc == HRG_SUCCESS ? patterns(t, why, len) : failed(t, rc, "memory for the trial", why, len);
    if (result != 0 && t->stream)
        drain(t);
    if (t->stuck)
        return -1;
    if (t->event)
        drv->EventDestroy(t->event);
    if (t->stream)
        drv->StreamDestroy(t->stream);
    for (unsigned i = 0; i < 2; i++) {
        drv->CtxSetCurrent(g[i]->dev.ctx);
        if (t->at[i])
            drv->MemFree(t->at[i]);
    }
    drv->CtxSetCurrent(t->a->dev.ctx);
    if (t->host)
        drv->MemFreeHost(t->host);
    return result;
}

static int enable(struct trial *t, struct gpu *from, struct gpu *to, char *why, size_t len)
{
    int can = 0;
    hrg_result rc = t->drv->DeviceCanAccessPeer(&can, from->dev.dev, to->dev.dev);
    if (rc == HRG_SUCCESS && can) {
        t->drv->CtxSetCurrent(from->dev.ctx);
        rc = t->drv->CtxEnablePeerAccess(to->dev.ctx, 0);
        t->drv->CtxSetCurrent(t->a->dev.ctx);
        if (rc == HRG_SUCCESS || rc == HRG_ERROR_PEER_ACCESS_ALREADY_ENABLED)
            return 0;
    }
    if (rc != HRG_SUCCESS)
        return failed(t, rc, "peer access", why, len);
    if (from->dev.mig || to->dev.mig)
        snprintf(why, len, "instances of MIG reach no other device");
    else
        snprintf(why, len, "the driver says that %s cannot access %s", from->dev.id, to->dev.id);
    return -1;
}

const char *hrd_gpus_keep(struct hrd_gpus *gpus, const char *line)
{
    size_t n = strlen(line) + 1;
    pthread_mutex_lock(&gpus->lock);
    struct text *t = gpus->texts;
    while (t && strcmp(t->line, line) != 0)
        t = t->next;
    if (!t && (t = malloc(sizeof(*t) + n)) != NULL) {
        memcpy(t->line, line, n);
        t->next = gpus->texts;
        gpus->texts = t;
    }
    pthread_mutex_unlock(&gpus->lock);
    return t ? t->line : "out of memory";
}

static void set_pair(struct gpu *a, struct gpu *b, bool direct, const char *why)
{
    struct gpu_pair *p[2] = {&a->pair[b->dev.gpu], &b->pair[a->dev.gpu]};
    for (unsigned i = 0; i < 2; i++) {
        atomic_store_explicit(&p[i]->why, why, memory_order_release);
        atomic_store_explicit(&p[i]->direct, direct, memory_order_release);
    }
}

static void remember(struct gpu *a, struct gpu *b, enum hrd_pair_state found, double rate, const char *why)
{
    struct gpu_pair *p = a->dev.gpu < b->dev.gpu ? &a->pair[b->dev.gpu] : &b->pair[a->dev.gpu];
    pthread_mutex_lock(&a->gpus->lock);
    p->verified = true;
    p->found = found;
    p->rate = rate;
    p->found_why = why;
    pthread_mutex_unlock(&a->gpus->lock);
}

static void verify(struct gpu *a, struct gpu *b)
{
    char why[300] = "";
    struct trial t = {.a = a, .b = b, .drv = a->dev.drv};
    bool possible = enable(&t, a, b, why, sizeof(why)) == 0 && enable(&t, b, a, why, sizeof(why)) == 0;
    bool good = possible && with_memory(&t, why, sizeof(why)) == 0;
    if (good)
        hrd_gpu_views_take(a, b); /* a has no imports yet */
    const char *kept = good ? NULL : hrd_gpus_keep(a->gpus, why);
    set_pair(a, b, good, kept);
    remember(a, b, good ? HRD_PAIR_DIRECT : possible ? HRD_PAIR_BAD : HRD_PAIR_REFUSED, t.rate, kept);
    if (good)
        hrd_info("GPUs %s and %s access each other directly: verified, %.1f GB/s", a->dev.id, b->dev.id,
                 t.rate / 1e9);
    else if (!possible)
        hrd_info("GPUs %s and %s reach each other through host memory: %s", a->dev.id, b->dev.id, why);
    else
        hrd_warn(
            "GPUs %s and %s claim peer access, but: %s. Data between them goes through host memory. Likely "
            "causes: ACS on a PCIe switch or the IOMMU redirects such traffic (disable ACS on the switch, "
            "boot with iommu=pt)",
            a->dev.id, b->dev.id, why);
}

void hrd_gpu_pairs_verify(struct gpu *g)
{
    struct hrd_gpus *gpus = g->gpus;
    pthread_mutex_lock(&gpus->pair_lock);
    for (unsigned i = 0; i < gpus->n; i++) {
        struct gpu *other = gpus->gpu[i];
        pthread_mutex_lock(&gpus->lock);
        bool up = other != g && other->up;
        pthread_mutex_unlock(&gpus->lock);
        if (up) /* and stays so: going down takes the pair lock first */
            verify(g, other);
    }
    /* Within the lock, so that of two that come up at once the later one sees the earlier. */
    pthread_mutex_lock(&gpus->lock);
    g->up = true;
    pthread_mutex_unlock(&gpus->lock);
    pthread_mutex_unlock(&gpus->pair_lock);
}

void hrd_gpu_pairs_forget(struct gpu *g)
{
    struct hrd_gpus *gpus = g->gpus;
    pthread_mutex_lock(&gpus->pair_lock);
    pthread_mutex_lock(&gpus->lock);
    g->up = false;
    pthread_mutex_unlock(&gpus->lock);
    for (unsigned i = 0; i < gpus->n; i++) {
        if (gpus->gpu[i] == g)
            continue;
        set_pair(g, gpus->gpu[i], false, NOT_YET);
        hrd_gpu_views_drop(g, gpus->gpu[i]);
    }
    pthread_mutex_unlock(&gpus->pair_lock);
}

unsigned hrd_gpus_pairs(const struct hrd_gpus *gpus, struct hrd_gpu_pair_info *out, unsigned max)
{
    struct hrd_gpus *m = (struct hrd_gpus *)(uintptr_t)gpus;
    unsigned n = 0;
    pthread_mutex_lock(&m->lock);
    for (unsigned i = 0; gpus->listing == GPUS_LISTED && i < gpus->n; i++)
        for (unsigned k = i + 1; k < gpus->n; k++) {
            const struct gpu_pair *p = &gpus->gpu[i]->pair[k];
            if (!p->verified || n++ >= max)
                continue;
            struct hrd_gpu_pair_info *o = &out[n - 1];
            *o = (struct hrd_gpu_pair_info){.state = p->found, .bytes_per_s = p->rate};
            const struct hrd_gpu_dev *dev[2] = {&gpus->gpu[i]->dev, &gpus->gpu[k]->dev};
            for (unsigned at = 0; at < 2; at++) {
                memcpy(o->pci[at], dev[at]->pci, sizeof(o->pci[at]));
                memcpy(o->id[at], dev[at]->id, sizeof(o->id[at]));
            }
            snprintf(o->why, sizeof(o->why), "%s", p->found_why ? p->found_why : "");
        }
    pthread_mutex_unlock(&m->lock);
    return n;
}

bool hrd_gpus_pair(const struct hrd_gpus *gpus, int16_t a, int16_t b, const char **why)
{
    const struct gpu_pair *p = &gpus->gpu[a]->pair[b];
    bool direct = atomic_load_explicit(&p->direct, memory_order_acquire);
    const char *text = direct ? NULL : atomic_load_explicit(&p->why, memory_order_acquire);
    if (why)
        *why = direct || text ? text : NOT_YET;
    return direct;
}
