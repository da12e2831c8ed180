/* SPDX-License-Identifier: MIT */
/*
 * The daemon's GPUs and the dma engine on the fake driver, a job beside them in the same process, and its buffers. The
 * job's memory is VMM memory, which may be imported where it was made. A test is a process of its own (FAKE_GPU_TEST),
 * because the fake reads what it has to do wrong when it is initialised.
 */
#ifndef TESTS_UNIT_GPU_WORLD_H
#define TESTS_UNIT_GPU_WORLD_H

#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "daemon/gpu/engine_dma.h"
#include "daemon/gpu/gpu_int.h"
#include "tests/sim/fake_gpu.h"

#define MIB ((uint64_t)1 << 20)
#define BYTES (6 * MIB) /* of a job's buffer */

static const struct hrg_driver *drv;
static struct hrd_gpus *gpus;
static const char *sysfs;        /* NULL: this machine's */
static uint32_t pair_ms = 20000; /* far above what a pair needs on a machine that does other things, too */
static struct hrd_engine *host_engine, *engine;
static char *arena; /* pinned, as the agent's */
static int wake;
static unsigned registrations_refused, events_refused;

#define nap() nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL)

static inline double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- daemon -------------------------------------------------------------------------------------------------- */

static inline void open_world(uint32_t idle_ms, uint64_t bounce)
{
    fake_gpu_seed();
    fake_gpu_use();
    wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    arena = aligned_alloc(4096, 2 * BYTES);
    struct hrd_gpus_config cfg = {
        .idle_ms = idle_ms, .pair_ms = pair_ms, .node_name = "here", .sysfs = sysfs};
    gpus = hrd_gpus_new(&cfg);
    CHECK(gpus != NULL);
    hrd_gpus_pin(gpus, arena, 2 * BYTES);
    host_engine = hrd_engine_host_new(2, 64 << 10, wake);
    engine = hrd_engine_dma_new(gpus, host_engine, bounce);
    CHECK(host_engine != NULL && engine != NULL);
    drv = fake_gpu_driver();
}

static inline void close_world(void)
{
    hrd_gpus_stop(gpus);
    CHECK(fake_gpu_calls("DevicePrimaryCtxRetain") >= fake_gpu_calls("DevicePrimaryCtxRelease"));
    CHECK(fake_gpu_calls("MemHostRegister") - registrations_refused == fake_gpu_calls("MemHostUnregister"));
    CHECK(fake_gpu_calls("EventCreate") - events_refused == fake_gpu_calls("EventDestroy"));
    engine->table->free(engine);
    host_engine->table->free(host_engine);
    hrd_gpus_free(gpus);
    free(arena);
    close(wake);
}

static inline struct hrd_gpu_event *answer(enum hrd_gpu_event_type type)
{
    double end = now_s() + LIMIT_S;
    for (;;) {
        struct hrd_gpu_event *ev = hrd_gpus_take_events(gpus);
        if (ev) {
            CHECK(ev->next == NULL && ev->type == type);
            return ev;
        }
        CHECK(now_s() < end);
        struct pollfd p = {.fd = hrd_gpus_event_fd(gpus), .events = POLLIN};
        poll(&p, 1, 1000);
    }
}

static inline struct hrd_gpu_event *import(const struct hrd_gpu_source *source)
{
    hrd_gpus_import(gpus, 7, 8, source);
    struct hrd_gpu_event *ev = answer(HRD_GPU_IMPORTED);
    CHECK(ev->sid == 7 && ev->token == 8);
    return ev;
}

/* ---- job ----------------------------------------------------------------------------------------------------- */

struct buffer {
    hrg_ptr job;         /* the job's mapping */
    unsigned char *host; /* pinned by the job: what it wrote, and what it should be then */
    unsigned char *got;
    struct hrd_gpu_import *import;
    struct hrd_span span;
    hrg_ctx ctx;
};

static inline hrg_ctx job_ctx(int gpu)
{
    static hrg_ctx ctx[16];
    if (!ctx[gpu])
        OK(drv->DevicePrimaryCtxRetain(&ctx[gpu], gpu));
    return ctx[gpu];
}

static inline struct hrd_gpu_source vmm_source(int gpu, hrg_ptr *ptr, uint64_t bytes, uint32_t nparts)
{
    struct hrg_mem_prop prop = {.type = HRG_ALLOCATION_PINNED,
                                .requested_handle_types = HRG_HANDLE_POSIX_FD,
                                .location = {.type = HRG_LOCATION_DEVICE, .id = gpu}};
    struct hrg_mem_access access = {.location = prop.location, .flags = HRG_ACCESS_READWRITE};
    struct hrd_gpu_source s = {.uid = 1, .msg = {.bytes = bytes, .kind = HRP_GPU_VMM, .nparts = nparts}};
    struct hrg_uuid uuid;
    OK(hrg_device_uuid(drv, gpu, &uuid));
    memcpy(s.msg.uuid, uuid.bytes, 16);
    s.fd = calloc(nparts, sizeof(*s.fd));
    s.part_bytes = calloc(nparts, sizeof(*s.part_bytes));
    OK(drv->MemAddressReserve(ptr, bytes, 0, 0, 0));
    uint64_t part = bytes / nparts;
    CHECK(part % (2 * MIB) == 0);
    for (uint32_t i = 0; i < nparts; i++) {
        hrg_handle h;
        OK(drv->MemCreate(&h, part, &prop, 0));
        OK(drv->MemMap(*ptr + i * part, part, 0, h, 0));
        OK(drv->MemExportToShareableHandle(&s.fd[i], h, HRG_HANDLE_POSIX_FD, 0));
        OK(drv->MemRelease(h));
        s.part_bytes[i] = part;
    }
    OK(drv->MemSetAccess(*ptr, bytes, &access, 1));
    return s;
}

static inline void buffer_open(struct buffer *b, int gpu)
{
    void *p;
    b->ctx = job_ctx(gpu);
    OK(drv->CtxSetCurrent(b->ctx));
    struct hrd_gpu_source s = vmm_source(gpu, &b->job, BYTES, 3);
    OK(drv->MemHostAlloc(&p, BYTES, HRG_HOST_PORTABLE));
    b->host = p;
    OK(drv->MemHostAlloc(&p, BYTES, HRG_HOST_PORTABLE));
    b->got = p;
    struct hrd_gpu_event *ev = import(&s);
    if (!ev->import)
        fprintf(stderr, "%s\n", ev->text);
    CHECK(ev->import != NULL && ev->gpu == gpu && ev->bytes == BYTES);
    b->import = ev->import;
    b->span = (struct hrd_span){.base = (char *)(uintptr_t)ev->device, .gpu = ev->gpu};
    free(ev);
}

static inline void buffer_close(struct buffer *b)
{
    hrd_gpus_close(gpus, 7, 9, b->import);
    struct hrd_gpu_event *ev = answer(HRD_GPU_CLOSED);
    CHECK(ev->token == 9);
    free(ev);
    OK(drv->CtxSetCurrent(b->ctx));
    OK(drv->MemFreeHost(b->host));
    OK(drv->MemFreeHost(b->got));
}

/* Random bytes; no type has a NaN or an infinity among them when `tame`. */
static inline void fill(struct buffer *b, bool tame)
{
    fake_gpu_fill(b->host, BYTES, tame ? UINT64_C(0xbfffbfffbfffbfff) : UINT64_MAX);
    OK(drv->CtxSetCurrent(b->ctx));
    OK(drv->MemcpyHtoDAsync(b->job, b->host, BYTES, HRG_STREAM_PER_THREAD));
    OK(drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
}

/* The whole buffer is what host says: what was not to be written is still there. */
static inline void compare(const struct buffer *b, const char *what)
{
    OK(drv->CtxSetCurrent(b->ctx));
    memset(b->got, 0xee, BYTES);
    OK(drv->MemcpyDtoHAsync(b->got, b->job, BYTES, HRG_STREAM_PER_THREAD));
    OK(drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
    size_t i;
    if (!fake_gpu_same(b->got, b->host, BYTES, &i)) {
        fprintf(stderr, "%s: byte %zu of a buffer on GPU %d is %02x, not %02x\n", what, i, b->span.gpu,
                b->got[i], b->host[i]);
        _exit(1);
    }
}

/* ---- work ---------------------------------------------------------------------------------------------------- */

struct outcome {
    unsigned done; /* the how manyeth it was */
    bool failed, lost;
    char text[HRD_WORK_TEXT];
};

static inline void done(struct hrd_work *w, const struct hrd_work_error *error)
{
    struct outcome *o = w->owner;
    static unsigned ends;
    CHECK(!o->done);
    o->done = ++ends;
    o->failed = error != NULL;
    if (error) {
        o->lost = error->device_lost;
        snprintf(o->text, sizeof(o->text), "%s", error->text);
    }
}

static inline struct hrd_work *work(enum hrd_work_kind kind, struct hrk_fold fold, uint64_t n,
                                    struct outcome *o)
{
    struct hrd_work *w = calloc(1, sizeof(*w) + 16 * sizeof(w->span[0]));
    w->kind = kind;
    w->fold = fold;
    w->n = n;
    w->owner = o;
    w->done = done;
    return w;
}

static inline void source(struct hrd_work *w, struct hrd_span s, uint64_t off)
{
    s.off += off;
    w->span[w->nsrc++] = s;
}

static inline void sink(struct hrd_work *w, struct hrd_span s, uint64_t off)
{
    s.off += off;
    w->span[w->nsrc + w->ndst++] = s;
}

static inline void turn(void)
{
    unsigned n = host_engine->table->poll(host_engine) + engine->table->poll(engine);
    if (!n && !host_engine->table->help(host_engine))
        nap();
}

static inline void finish(const struct outcome *o)
{
    double end = now_s() + LIMIT_S;
    while (!o->done) {
        turn();
        CHECK(now_s() < end);
    }
}

static inline struct hrd_span host_span(void *p)
{
    return (struct hrd_span){.base = p, .gpu = HRD_HOST_MEMORY};
}

#endif
