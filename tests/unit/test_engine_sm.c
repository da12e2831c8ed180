/* SPDX-License-Identifier: MIT */
/*
 * The sm engine over four devices of the fake driver: every shape of work that the agent gives it, rings that are full,
 * launches that fail, a device that dies. The kernels are the CPU twin's.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/clock.h"
#include "daemon/gpu/engine_sm.h"
#include "daemon/gpu/sm_part.h"
#include "kernels/gpu_kernels.h"
#include "tests/sim/fake_gpu.h"

#define NGPUS 4
#define BYTES ((uint64_t)4 << 20) /* of each buffer */
#define WORK_SECONDS 120

/* ---- what daemon/gpu/gpu.c is to the engine ------------------------------------------------------------------- */

struct hrd_gpus {
    struct hrd_gpu_dev dev[NGPUS];
    char *pinned;
    uint64_t pinned_bytes;
    int bad_a, bad_b; /* a pair that does not reach each other */
    int blind;        /* a GPU that has no address for the others' memory; -1: none, NGPUS: all */
    uint64_t lost, epoch;
};

static struct hrd_gpus world = {.bad_a = -1, .blind = -1, .epoch = 1};
static const struct hrg_driver *drv;
static struct hrd_engine *engine, *host_engine;
static struct {
    uint64_t device;
    uint64_t seen[NGPUS]; /* the same memory: each address is good for kernels of one GPU alone */
    uint8_t *host;        /* what it should hold, or did when it was fetched */
} buffer[NGPUS][2];

struct hrd_gpu_dev *hrd_gpus_dev(const struct hrd_gpus *gpus, int16_t gpu)
{
    return gpu >= 0 && gpu < NGPUS ? (struct hrd_gpu_dev *)(uintptr_t)&gpus->dev[gpu] : NULL;
}

bool hrd_gpus_pair(const struct hrd_gpus *gpus, int16_t a, int16_t b, const char **why)
{
    if (why)
        *why = "the test says so";
    return !(a == gpus->bad_a && b == gpus->bad_b);
}

static bool is_blind(const struct hrd_gpus *gpus, int16_t at)
{
    return gpus->blind == at || gpus->blind == NGPUS;
}

bool hrd_gpus_reach(const struct hrd_gpus *gpus, int16_t owner, int16_t at, const char **why)
{
    (void)owner;
    *why = "the test says that it is blind";
    return !is_blind(gpus, at);
}

uint64_t hrd_gpus_view(const struct hrd_gpus *gpus, int16_t owner, int16_t at, uint64_t addr)
{
    for (int k = 0; k < 2 && !is_blind(gpus, at); k++)
        if (addr >= buffer[owner][k].device && addr < buffer[owner][k].device + BYTES)
            return buffer[owner][k].seen[at] + (addr - buffer[owner][k].device);
    return 0;
}

const char *hrd_gpus_lost(const struct hrd_gpus *gpus, uint64_t which)
{
    return gpus->lost & which ? "the test has lost it" : NULL;
}

uint64_t hrd_gpus_views_epoch(const struct hrd_gpus *gpus)
{
    return gpus->epoch;
}

bool hrd_gpus_pinned(const struct hrd_gpus *gpus, const void *p, uint64_t bytes)
{
    return (const char *)p >= gpus->pinned && (const char *)p + bytes <= gpus->pinned + gpus->pinned_bytes;
}

bool hrd_gpu_failed(struct hrd_gpu_dev *g, hrg_result error, const char *what, char *why, size_t len)
{
    snprintf(why, len, "GPU %d: %s failed with %d", g->gpu, what, error);
    return hrg_error_is_sticky(error) != 0;
}

/* ---- a world of four GPUs --------------------------------------------------------------------------------------- */

/* Memory of one GPU, mapped once for the kernels of each. */
static void make_buffer(int gpu, int k)
{
    struct hrg_mem_prop prop = {.type = HRG_ALLOCATION_PINNED,
                                .requested_handle_types = HRG_HANDLE_POSIX_FD,
                                .location = {.type = HRG_LOCATION_DEVICE, .id = gpu}};
    hrg_handle h;
    OK(drv->MemCreate(&h, BYTES, &prop, 0));
    for (int at = 0; at < NGPUS; at++) {
        struct hrg_mem_access access = {.location = {.type = HRG_LOCATION_DEVICE, .id = at},
                                        .flags = HRG_ACCESS_READWRITE};
        OK(drv->MemAddressReserve(&buffer[gpu][k].seen[at], BYTES, 0, 0, 0));
        OK(drv->MemMap(buffer[gpu][k].seen[at], BYTES, 0, h, 0));
        OK(drv->MemSetAccess(buffer[gpu][k].seen[at], BYTES, &access, 1));
    }
    OK(drv->MemRelease(h));
    buffer[gpu][k].device = buffer[gpu][k].seen[gpu];
}

static void open_world(void)
{
    char why[512] = "";
    void *p;
    fake_gpu_seed();
    drv = fake_gpu_driver();
    for (int16_t i = 0; i < NGPUS; i++) {
        struct hrd_gpu_dev *g = &world.dev[i];
        *g = (struct hrd_gpu_dev){.drv = drv, .gpu = i, .dev = i};
        snprintf(g->pci, sizeof(g->pci), "0000:%02x:00.0", i);
        snprintf(g->id, sizeof(g->id), "%s", g->pci);
        OK(drv->DevicePrimaryCtxRetain(&g->ctx, i));
    }
    for (int i = 0; i < NGPUS; i++) {
        OK(drv->CtxSetCurrent(world.dev[i].ctx));
        for (int j = 0; j < NGPUS; j++)
            if (j != i)
                OK(drv->CtxEnablePeerAccess(world.dev[j].ctx, 0));
        if (hrd_engine_sm_part.up(&world.dev[i], &world.dev[i].part[HRD_GPU_SM], why, sizeof(why)) != 0) {
            (void)fprintf(stderr, "%s\n", why);
            _exit(1);
        }
        for (int k = 0; k < 2; k++) {
            make_buffer(i, k);
            OK(drv->MemAllocHost(&p, BYTES));
            buffer[i][k].host = p;
        }
    }
    OK(drv->MemAllocHost(&p, BYTES));
    world.pinned = p;
    world.pinned_bytes = BYTES;
    host_engine = hrd_engine_host_new(0, 1 << 20, -1);
    engine = hrd_engine_sm_new(&world, host_engine);
    assert_non_null(engine);
    assert_non_null(host_engine);
}

static void close_world(void)
{
    engine->table->free(engine);
    host_engine->table->free(host_engine);
    for (int i = 0; i < NGPUS; i++) {
        OK(drv->CtxSetCurrent(world.dev[i].ctx));
        hrd_engine_sm_part.down(&world.dev[i], world.dev[i].part[HRD_GPU_SM]);
    }
}

/* Each test has a driver of its own. */
static void in_child(void (*body)(void), const char *failures, const char *delays)
{
    int status;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(WORK_SECONDS);
        if (failures)
            setenv("FAKE_CUDA_FAIL", failures, 1);
        if (delays)
            setenv("FAKE_CUDA_DELAY", delays, 1);
        body();
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

static void move(int gpu, int k, bool to_device, uint64_t bytes)
{
    CHECK(drv->CtxSetCurrent(world.dev[gpu].ctx) == 0);
    CHECK((to_device ? drv->MemcpyHtoDAsync(buffer[gpu][k].device, buffer[gpu][k].host, bytes, NULL)
                     : drv->MemcpyDtoHAsync(buffer[gpu][k].host, buffer[gpu][k].device, bytes, NULL)) == 0);
    CHECK(drv->StreamSynchronize(NULL) == 0);
}

/* Inputs random (no NaN: bytes of a small exponent), outputs painted. */
static void fill(uint64_t bytes)
{
    for (int i = 0; i < NGPUS; i++) {
        for (uint64_t b = 0; b < bytes; b += 8) {
            uint64_t v = fake_gpu_random() & UINT64_C(0x3fff3fff3fff3fff);
            memcpy(buffer[i][0].host + b, &v, 8);
        }
        memset(buffer[i][1].host, 0xa5, BYTES);
        move(i, 0, true, bytes);
        move(i, 1, true, BYTES);
    }
    memset(world.pinned, 0xa5, BYTES);
}

/* ---- work --------------------------------------------------------------------------------------------------------- */

struct outcome {
    unsigned done, failed;
    uint64_t began_ns; /* of the last */
    bool lost;
    char text[HRD_WORK_TEXT];
};

static void done(struct hrd_work *w, const struct hrd_work_error *error)
{
    struct outcome *o = w->owner;
    o->done++;
    o->began_ns = w->began_ns;
    if (error) {
        o->failed++;
        o->lost = o->lost || error->device_lost;
        memcpy(o->text, error->text, sizeof(o->text));
    }
    free(w);
}

static struct hrd_work *work(enum hrd_work_kind kind, struct hrk_fold fold, uint64_t n, struct outcome *o)
{
    struct hrd_work *w = calloc(1, sizeof(*w) + (size_t)16 * sizeof(w->span[0]));
    CHECK(w != NULL);
    w->kind = kind;
    w->fold = fold;
    w->n = n;
    w->owner = o;
    w->done = done;
    return w;
}

static struct hrd_span on_gpu(int gpu, int k, uint64_t off)
{
    return (struct hrd_span){
        .base = (char *)(uintptr_t)buffer[gpu][k].device, .off = off, .gpu = (int16_t)gpu};
}

static struct hrd_span in_arena(uint64_t off)
{
    return (struct hrd_span){.base = world.pinned, .off = off, .gpu = HRD_HOST_MEMORY};
}

static void source(struct hrd_work *w, struct hrd_span s)
{
    w->span[w->nsrc++] = s;
}

static void sink(struct hrd_work *w, struct hrd_span s)
{
    w->span[w->nsrc + w->ndst++] = s;
}

static void wait_for(const struct outcome *o, unsigned count)
{
    while (o->done < count) {
        if (engine->table->poll(engine) + host_engine->table->poll(host_engine) == 0)
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
    CHECK(o->done == count);
    CHECK(!engine->table->silent(engine));
    CHECK(engine->table->arm(engine, 1) == 0);
}

/* The output of a GPU is `expected`, and nothing else of it was touched. */
static void check_output(int gpu, const void *expected, uint64_t off, uint64_t bytes)
{
    const uint8_t *got = buffer[gpu][1].host;
    move(gpu, 1, false, BYTES);
    CHECK(memcmp(got + off, expected, bytes) == 0);
    for (uint64_t i = 0; i < BYTES; i++)
        CHECK((i >= off && i < off + bytes) || got[i] == 0xa5);
}

/* One node: all GPUs' inputs into all GPUs' outputs. off: bytes by which the buffers are shifted. */
static void fused(unsigned dtype, unsigned op, uint64_t n, uint64_t off)
{
    const struct hrk_fold f = hrk_fold_single(dtype, op, NGPUS);
    const uint64_t bytes = n * hrp_dtype_size(dtype);
    struct outcome o = {0};
    struct hrd_work *w = work(HRD_WORK_FOLD, f, n, &o);
    const void *src[NGPUS];
    void *expected = malloc(bytes + 1);
    CHECK(expected != NULL);
    fill(off + bytes + 8 < BYTES ? off + bytes + 8 : BYTES);
    for (int i = 0; i < NGPUS; i++) {
        source(w, on_gpu(i, 0, off));
        src[i] = buffer[i][0].host + off;
    }
    for (int i = 0; i < NGPUS; i++)
        sink(w, on_gpu(i, 1, off));
    hrk_fold(&f, &expected, 1, src, NGPUS, n);
    uint64_t before = now_ns();
    engine->table->submit(engine, w);
    wait_for(&o, 1);
    CHECK(o.failed == 0);
    CHECK(n == 0 || (o.began_ns >= before && o.began_ns <= now_ns()));
    for (int i = 0; i < NGPUS; i++)
        check_output(i, expected, off, bytes);
    free(expected);
}

static void fused_body(void)
{
    open_world();
    for (unsigned dtype = 0; dtype < HRP_NDTYPES; dtype++)
        for (unsigned op = 0; op < HRP_NREDOPS; op++)
            fused(dtype, op, 1 + fake_gpu_random() % 3000, op == 0 ? 1 : 16);
    static const uint64_t sizes[] = {0, 1, 511, 513, 16384, 32769, 65536, 300001, BYTES / 4};
    for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        fused(HRP_F32, HRP_SUM, sizes[i], 0);
    close_world();
}

static void folds_over_all_gpus(void **state)
{
    (void)state;
    in_child(fused_body, NULL, NULL);
}

/* Several nodes: inputs to the arena, partials of three nodes to arena and outputs, the result to the outputs. */
static void nodes_body(void)
{
    const uint32_t weight[3] = {4, 2, 3};
    const uint64_t n = 70001, half = n * 2;
    const struct hrk_fold partial = hrk_fold_partial(HRP_BF16, HRP_BF16, HRP_AVG, NGPUS);
    const struct hrk_fold total = hrk_fold_total(HRP_BF16, HRP_BF16, HRP_AVG, weight, 9);
    struct outcome o = {0};
    const void *src[NGPUS];
    static uint8_t sum[1 << 18], whole[1 << 18];
    void *at[1] = {sum};
    open_world();
    fill(half + 8);
    struct hrd_work *w = work(HRD_WORK_FOLD, partial, n, &o);
    for (int i = 0; i < NGPUS; i++) {
        source(w, on_gpu(i, 0, 0));
        src[i] = buffer[i][0].host;
    }
    sink(w, in_arena(0));
    hrk_fold(&partial, at, 1, src, NGPUS, n);
    engine->table->submit(engine, w);
    wait_for(&o, 1);
    CHECK(memcmp(world.pinned, sum, half) == 0 && (uint8_t)world.pinned[half] == 0xa5);

    for (uint64_t i = 0; i < 2 * half; i++) /* what two other nodes sent */
        world.pinned[half + i] = (char)(fake_gpu_random() & 0x3f);
    w = work(HRD_WORK_FOLD, total, n, &o);
    for (uint64_t i = 0; i < 3; i++) {
        source(w, in_arena(i * half));
        src[i] = world.pinned + i * half;
    }
    sink(w, in_arena(4 * half));
    for (int i = 0; i < NGPUS; i++)
        sink(w, on_gpu(i, 1, 6));
    at[0] = whole;
    hrk_fold(&total, at, 1, src, 3, n);
    engine->table->submit(engine, w);
    wait_for(&o, 2);
    CHECK(memcmp(world.pinned + 4 * half, whole, half) == 0);
    for (int i = 0; i < NGPUS; i++)
        check_output(i, whole, 6, half);

    w = work(HRD_WORK_COPY, (struct hrk_fold){.in = HRP_BF16, .out = HRP_BF16}, n, &o);
    source(w, in_arena(0));
    for (int i = 0; i < NGPUS; i++)
        sink(w, on_gpu(i, 1, 6));
    engine->table->submit(engine, w);
    wait_for(&o, 3);
    for (int i = 0; i < NGPUS; i++)
        check_output(i, sum, 6, half);

    /* Work that touches no GPU is the host engine's. */
    w = work(HRD_WORK_COPY, (struct hrk_fold){.in = HRP_U8, .out = HRP_U8}, 1000, &o);
    source(w, in_arena(0));
    sink(w, in_arena(5 * half));
    engine->table->submit(engine, w);
    wait_for(&o, 4);
    CHECK(memcmp(world.pinned, world.pinned + 5 * half, 1000) == 0);

    w = work(HRD_WORK_NAN, (struct hrk_fold){.in = HRP_BF16, .out = HRP_BF16}, n, &o);
    sink(w, on_gpu(2, 1, 6));
    hrk_fill_nan(HRP_BF16, whole, n);
    engine->table->submit(engine, w);
    wait_for(&o, 5);
    check_output(2, whole, 6, half);
    CHECK(o.failed == 0);
    close_world();
}

static void serves_several_nodes(void **state)
{
    (void)state;
    in_child(nodes_body, NULL, NULL);
}

/* More work than the rings hold, small and large, all of it done once and right. */
static void crowd_body(void)
{
    enum { MANY = 700 };
    const struct hrk_fold f = hrk_fold_single(HRP_I32, HRP_SUM, NGPUS);
    struct outcome o = {0};
    const void *src[NGPUS];
    static uint8_t expected[MANY * 4096];
    void *at[1] = {expected};
    open_world();
    fill(sizeof(expected));
    for (unsigned i = 0; i < MANY; i++) {
        struct hrd_work *w = work(HRD_WORK_FOLD, f, 1024, &o);
        for (int g = 0; g < NGPUS; g++)
            source(w, on_gpu(g, 0, (uint64_t)i * 4096));
        for (int g = 0; g < NGPUS; g++)
            sink(w, on_gpu(g, 1, (uint64_t)i * 4096));
        engine->table->submit(engine, w);
    }
    wait_for(&o, MANY);
    CHECK(o.failed == 0);
    for (int g = 0; g < NGPUS; g++)
        src[g] = buffer[g][0].host;
    hrk_fold(&f, at, 1, src, NGPUS, sizeof(expected) / 4);
    for (int g = 0; g < NGPUS; g++)
        check_output(g, expected, 0, sizeof(expected));
    close_world();
}

static void takes_more_than_its_rings_hold(void **state)
{
    (void)state;
    in_child(crowd_body, NULL, NULL);
}

static struct hrd_work *plain(uint64_t n, struct outcome *o)
{
    struct hrd_work *w = work(HRD_WORK_FOLD, hrk_fold_single(HRP_F32, HRP_SUM, NGPUS), n, o);
    for (int g = 0; g < NGPUS; g++)
        source(w, on_gpu(g, 0, 0));
    for (int g = 0; g < NGPUS; g++)
        sink(w, on_gpu(g, 1, 0));
    return w;
}

/* What waits for room in the rings loses its addresses meanwhile: every piece of it ends, once and in words. */
static void stranded_body(void)
{
    enum { POSTED = NGPUS * (int)SM_RING, MANY = POSTED + 5 };
    struct outcome o = {0};
    open_world();
    fill(4096);
    for (unsigned i = 0; i < MANY; i++)
        engine->table->submit(engine, plain(100, &o));
    world.blind = NGPUS;
    world.epoch++;
    wait_for(&o, MANY);
    CHECK(o.failed == MANY - POSTED && strstr(o.text, "fold kernel over 100 elements"));
    world.blind = -1;
    world.epoch++;
    engine->table->submit(engine, plain(100, &o));
    wait_for(&o, MANY + 1);
    CHECK(o.failed == MANY - POSTED);
    close_world();
}

static void ends_what_waits_and_cannot_be_launched(void **state)
{
    (void)state;
    in_child(stranded_body, NULL, NULL);
}

/* One launch is refused by the driver: that work fails in words, the others do not. */
static void refusal_body(void)
{
    struct outcome bad = {0}, good = {0};
    open_world();
    fill(BYTES);
    engine->table->submit(engine, plain(500, &good));
    wait_for(&good, 1);
    engine->table->submit(engine, plain(BYTES / 4, &bad)); /* four launches, the second ever fails */
    wait_for(&bad, 1);
    engine->table->submit(engine, plain(BYTES / 4, &good));
    wait_for(&good, 2);
    CHECK(good.failed == 0);
    CHECK(bad.failed == 1 && !bad.lost);
    CHECK(strstr(bad.text, "fold kernel over 1048576 elements") && strstr(bad.text, "701"));
    close_world();
}

static void a_refused_launch_fails_its_work_alone(void **state)
{
    (void)state;
    in_child(refusal_body, "LaunchKernel=701@2", NULL);
}

/* A kernel faults: whatever is under way ends with an error, also what comes later, and nothing waits for ever. */
static void death_body(void)
{
    struct outcome o = {0};
    open_world();
    fill(BYTES);
    for (int i = 0; i < 3; i++)
        engine->table->submit(engine, plain(BYTES / 4, &o));
    wait_for(&o, 3);
    CHECK(o.failed >= 1 && o.lost);
    CHECK(strstr(o.text, "700"));
    engine->table->submit(engine, plain(100, &o));
    wait_for(&o, 4);
    CHECK(o.failed >= 2);
    _exit(0);
}

static void a_dead_device_ends_all_work(void **state)
{
    (void)state;
    in_child(death_body, "run:LaunchKernel=700@2", NULL);
}

static void words_body(void)
{
    struct outcome o = {0};
    struct hrd_engine_ask ask = {.gpus = 0xf, .nlocal = 4, .one_node = true};
    const char *why;
    char elsewhere[16];
    open_world();
    CHECK(engine->table->refuses(engine, &ask) == NULL);
    world.lost = 1u << 2;
    CHECK((why = engine->table->refuses(engine, &ask)) && strcmp(why, "the test has lost it") == 0);
    world.lost = 1u << 4;
    CHECK(engine->table->refuses(engine, &ask) == NULL);
    ask.host = true;
    CHECK((why = engine->table->refuses(engine, &ask)) && strstr(why, "host memory"));
    ask.host = false;
    ask.nlocal = HRG_MAX_SINKS;
    CHECK((why = engine->table->refuses(engine, &ask)) && strstr(why, "32 local ranks"));
    ask.nlocal = 4;
    world.bad_a = 1;
    world.bad_b = 3;
    CHECK((why = engine->table->refuses(engine, &ask)) && strstr(why, "0000:01:00.0 and 0000:03:00.0") &&
          strstr(why, "the test says so"));
    world.bad_a = -1;
    world.blind = 2;
    CHECK((why = engine->table->refuses(engine, &ask)) && strcmp(why, "the test says that it is blind") == 0);
    engine->table->submit(engine, plain(100, &o));
    wait_for(&o, 1);
    CHECK(o.failed == 1 && strstr(o.text, "no address for"));
    o = (struct outcome){0};
    world.blind = -1;
    engine->table->submit(engine, plain(100, &o));
    wait_for(&o, 1);
    CHECK(o.failed == 0);
    world.blind = 2; /* what was found before counts no more */
    world.epoch++;
    engine->table->submit(engine, plain(100, &o));
    wait_for(&o, 2);
    CHECK(o.failed == 1);
    o = (struct outcome){0};
    world.blind = -1;
    world.epoch++;
    ask.gpus = 0x7;
    world.bad_a = 1;
    CHECK(engine->table->refuses(engine, &ask) == NULL);
    void *part = world.dev[2].part[HRD_GPU_SM];
    world.dev[2].part[HRD_GPU_SM] = NULL;
    snprintf(world.dev[2].part_why[HRD_GPU_SM], sizeof(world.dev[2].part_why[HRD_GPU_SM]), "no kernels here");
    CHECK((why = engine->table->refuses(engine, &ask)) && strstr(why, "no kernels here"));
    world.dev[2].part[HRD_GPU_SM] = part;

    struct hrd_work *w = plain(100, &o);
    sink(w, (struct hrd_span){.base = elsewhere, .gpu = HRD_HOST_MEMORY});
    engine->table->submit(engine, w);
    wait_for(&o, 1);
    CHECK(o.failed == 1 && strstr(o.text, "not registered"));
    w = plain(100, &o);
    w->span[0].wrap = 4096;
    engine->table->submit(engine, w);
    wait_for(&o, 2);
    CHECK(o.failed == 2 && strstr(o.text, "staging window"));
    close_world();
}

static void says_why_not(void **state)
{
    (void)state;
    in_child(words_body, NULL, NULL);
}

/* Kernels that come to run late: the engine says so, and forgets it again. */
static void wait_body(void)
{
    struct outcome o = {0};
    open_world();
    for (unsigned i = 0; i < 20; i++) {
        engine->table->submit(engine, plain(100, &o));
        wait_for(&o, i + 1);
    }
    /* The fake's first launches are as late as the others, so the shortest is made to look as it would on a GPU. */
    const uint64_t usual = engine->table->waited(engine, 0xf);
    for (unsigned i = 0; i < 3 * NGPUS; i++) { /* they take turns */
        engine->table->submit(engine, plain(100, &o));
        nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL); /* the word is seen this much later */
        wait_for(&o, 21 + i);
    }
    CHECK(engine->table->waited(engine, 0xf) > usual);
    CHECK(engine->table->waited(engine, 0xf) > 1000000);
    for (unsigned i = 0; i < 300 && engine->table->waited(engine, 0xf) > 100000; i++)
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    CHECK(engine->table->waited(engine, 0xf) <= 100000);
    close_world();
}

static void measures_how_long_kernels_wait(void **state)
{
    (void)state;
    in_child(wait_body, NULL, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(folds_over_all_gpus),
        cmocka_unit_test(serves_several_nodes),
        cmocka_unit_test(takes_more_than_its_rings_hold),
        cmocka_unit_test(ends_what_waits_and_cannot_be_launched),
        cmocka_unit_test(a_refused_launch_fails_its_work_alone),
        cmocka_unit_test(a_dead_device_ends_all_work),
        cmocka_unit_test(says_why_not),
        cmocka_unit_test(measures_how_long_kernels_wait),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
