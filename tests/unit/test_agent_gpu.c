/* SPDX-License-Identifier: MIT */
/*
 * Agents over GPU buffers: whole nodes in one process on the fake driver, both engines' choice, every element compared.
 * Each test is a process of its own, because the fake reads its orders when it is initialised.
 */
#include "tests/sim/agents.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/gpu/gpu.h"
#include "kernels/kernels.h"
#include "proto/ring.h"
#include "proto/status.h"
#include "tests/sim/fake_gpu.h"

#define NGPUS 4
#define GPU_BUFFER 2u /* id */
#define BYTES ((uint64_t)4 << 20)

static const struct hrg_driver *drv;
static hrg_ctx ctx[NGPUS];
static struct hrd_gpus *gpus[SIM_MAX_NODES]; /* each node is a daemon of its own */
static struct sim s;

/* A rank's GPU memory: its own mapping, and what it should hold. */
static struct gpu_rank {
    int gpu;
    hrg_ptr ptr;
    unsigned char *host, *got;
    struct hrd_gpu_import *import;
} rank[SIM_MAX_RANKS];

static void use_fake(void)
{
    drv = fake_gpu_driver();
    for (int i = 0; i < NGPUS; i++)
        OK(drv->DevicePrimaryCtxRetain(&ctx[i], i));
}

static struct hrd_gpus *gpus_of(uint32_t r)
{
    return gpus[s.node_of_rank[r]];
}

static struct hrd_gpu_event *answer(uint32_t r, enum hrd_gpu_event_type type)
{
    struct hrd_gpu_event *ev;
    for (int i = 0; !(ev = hrd_gpus_take_events(gpus_of(r))); i++) {
        CHECK(i < LIMIT_S * 1000);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    CHECK(ev->type == type && !ev->next);
    return ev;
}

static void rank_open(uint32_t r, int gpu)
{
    struct gpu_rank *k = &rank[r];
    struct hrg_mem_prop prop = {.type = HRG_ALLOCATION_PINNED,
                                .requested_handle_types = HRG_HANDLE_POSIX_FD,
                                .location = {.type = HRG_LOCATION_DEVICE, .id = gpu}};
    struct hrg_mem_access access = {.location = prop.location, .flags = HRG_ACCESS_READWRITE};
    struct hrd_gpu_source source = {.uid = 1, .msg = {.bytes = BYTES, .kind = HRP_GPU_VMM, .nparts = 1}};
    struct hrg_uuid uuid;
    hrg_handle h;
    void *p;
    k->gpu = gpu;
    OK(drv->CtxSetCurrent(ctx[gpu]));
    OK(drv->MemAddressReserve(&k->ptr, BYTES, 0, 0, 0));
    OK(drv->MemCreate(&h, BYTES, &prop, 0));
    OK(drv->MemMap(k->ptr, BYTES, 0, h, 0));
    OK(drv->MemSetAccess(k->ptr, BYTES, &access, 1));
    OK(drv->MemHostAlloc(&p, 2 * BYTES, HRG_HOST_PORTABLE));
    k->host = p;
    k->got = k->host + BYTES;
    OK(hrg_device_uuid(drv, gpu, &uuid));
    memcpy(source.msg.uuid, uuid.bytes, 16);
    source.fd = calloc(1, sizeof(int));
    source.part_bytes = calloc(1, sizeof(uint64_t));
    source.part_bytes[0] = BYTES;
    OK(drv->MemExportToShareableHandle(&source.fd[0], h, HRG_HANDLE_POSIX_FD, 0));
    OK(drv->MemRelease(h));
    hrd_gpus_import(gpus_of(r), r + 1, r, &source);
    struct hrd_gpu_event *ev = answer(r, HRD_GPU_IMPORTED);
    if (!ev->import)
        fprintf(stderr, "%s\n", ev->text);
    CHECK(ev->import != NULL);
    k->import = ev->import;
    hrd_agent_gpu_buffer_add(s.node[s.node_of_rank[r]].agent, r + 1, GPU_BUFFER, ev->gpu, ev->device,
                             ev->bytes);
    free(ev);
}

static void start(uint32_t nnodes, uint32_t nranks, const uint32_t *map, const int *gpu,
                  struct sim_options *o)
{
    fake_gpu_seed();
    use_fake();
    struct hrd_gpus_config cfg = {.idle_ms = 60000, .pair_ms = 3000, .node_name = "n0"};
    for (uint32_t n = 0; n < nnodes; n++)
        o->agent_gpus[n] = gpus[n] = hrd_gpus_new(&cfg);
    o->agent.dma_bytes = 8 << 20;
    o->agent.spin_us = 100;
    sim_start(&s, nnodes, nranks, map, o);
    for (uint32_t r = 0; r < nranks; r++)
        rank_open(r, gpu[r]);
    CHECK(sim_comm(&s, 77, 0, o) == HRP_OK);
}

static void stop(void)
{
    for (uint32_t r = 0; r < s.nranks; r++)
        hrd_agent_session_end(s.node[s.node_of_rank[r]].agent, r + 1, "the test ended it");
    for (uint32_t r = 0; r < s.nranks; r++)
        while (!s.rank[r].gone) {
            sim_events(&s);
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
    for (uint32_t r = 0; r < s.nranks; r++)
        if (rank[r].import) {
            hrd_gpus_close(gpus_of(r), r + 1, r, rank[r].import);
            free(answer(r, HRD_GPU_CLOSED));
        }
    for (uint32_t n = 0; n < s.nnodes; n++)
        hrd_gpus_stop(gpus[n]);
    sim_stop(&s);
    for (uint32_t n = 0; n < s.nnodes; n++)
        hrd_gpus_free(gpus[n]);
}

static void upload(struct gpu_rank *k)
{
    OK(drv->CtxSetCurrent(ctx[k->gpu]));
    OK(drv->MemcpyHtoDAsync(k->ptr, k->host, BYTES, HRG_STREAM_PER_THREAD));
    OK(drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
}

static void compare(uint32_t r, const char *what)
{
    struct gpu_rank *k = &rank[r];
    OK(drv->CtxSetCurrent(ctx[k->gpu]));
    OK(drv->MemcpyDtoHAsync(k->got, k->ptr, BYTES, HRG_STREAM_PER_THREAD));
    OK(drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
    size_t i;
    if (!fake_gpu_same(k->got, k->host, BYTES, &i)) {
        fprintf(stderr, "%s: rank %u, byte %zu: %02x, not %02x\n", what, r, i, k->got[i], k->host[i]);
        _exit(1);
    }
}

static struct hrp_desc describe(uint64_t op, const struct hrp_sig *sig, uint64_t in, uint64_t out,
                                uint32_t flags)
{
    return (struct hrp_desc){.op = op,
                             .sig = *sig,
                             .flags = flags,
                             .in = {.kind = HRP_BUF_SHARED, .id = GPU_BUFFER, .offset = in},
                             .out = {.kind = HRP_BUF_SHARED, .id = GPU_BUFFER, .offset = out}};
}

/* One op of 32-bit integers, for which sums do not depend on their order; by a stream's ready or not. */
static void one_op(uint8_t coll, uint64_t count, bool in_place, uint32_t flags)
{
    uint32_t n = s.nranks, root = (uint32_t)fake_gpu_random() % n;
    struct hrp_sig sig = {.coll = coll,
                          .count = count,
                          .dtype = HRP_U32,
                          .redop = HRP_SUM,
                          .root = coll == HRP_BROADCAST ? root : 0};
    uint64_t one = count * 4, in_b = coll == HRP_REDUCE_SCATTER ? one * n : one;
    uint64_t out_b = coll == HRP_ALL_GATHER ? one * n : one;
    uint64_t in_at[SIM_MAX_RANKS], out_at[SIM_MAX_RANKS], op = 0;
    uint32_t *in[SIM_MAX_RANKS];
    for (uint32_t r = 0; r < n; r++) {
        struct gpu_rank *k = &rank[r];
        fake_gpu_fill(k->host, BYTES, UINT64_MAX);
        upload(k);
        in_at[r] = 4 * (fake_gpu_random() % 16);
        out_at[r] = in_place ? in_at[r] : BYTES / 2 + 4 * (fake_gpu_random() % 16);
        if (in_place && coll == HRP_REDUCE_SCATTER)
            out_at[r] = in_at[r] + r * one;
        if (in_place && coll == HRP_ALL_GATHER) {
            out_at[r] = in_at[r];
            in_at[r] += r * one;
        }
        in[r] = malloc(in_b + 4);
        memcpy(in[r], k->host + in_at[r], in_b);
    }
    for (uint32_t k = 0; k < n; k++) {
        uint32_t r = (k + 1) % n;
        op = ++s.rank[r].posted[0];
        struct hrp_desc d = describe(op, &sig, in_at[r], out_at[r], flags);
        sim_push(&s, r, 0, &d, flags & HRP_DESC_STREAM ? 0 : hrp_flag(op, HRP_CHUNK_ALL));
    }
    if (flags & HRP_DESC_STREAM)
        for (uint32_t r = 0; r < n; r++)
            atomic_store_explicit(&hrp_seg_comm(s.rank[r].seg, 0)->flags[op % HRP_OP_SLOTS].ready,
                                  hrp_flag(op, HRP_CHUNK_ALL), memory_order_release);
    for (uint32_t r = 0; r < n; r++) {
        char text[HRP_OP_TEXT + 1];
        if (sim_wait(&s, r, 0, op, text) != HRP_OK)
            fprintf(stderr, "rank %u: %s\n", r, text);
        CHECK(sim_wait(&s, r, 0, op, NULL) == HRP_OK);
        uint32_t *out = malloc(out_b + 4);
        for (uint64_t i = 0; i < out_b / 4; i++) {
            out[i] = 0;
            if (coll == HRP_BROADCAST)
                out[i] = in[root][i];
            else if (coll == HRP_ALL_GATHER)
                out[i] = in[i / count][i % count];
            else
                for (uint32_t k = 0; k < n; k++)
                    out[i] += in[k][coll == HRP_REDUCE_SCATTER ? r * count + i : i];
        }
        memcpy(rank[r].host + out_at[r], out, out_b);
        free(out);
        compare(r, "op");
    }
    for (uint32_t r = 0; r < n; r++)
        free(in[r]);
}

static void shapes(uint32_t nnodes, uint32_t nranks, const uint32_t *map, const int *gpu)
{
    struct sim_options o = {0};
    start(nnodes, nranks, map, gpu, &o);
    static const uint64_t counts[] = {0, 1, 1021, 70000, 400003};
    static const uint32_t flags[] = {HRP_DESC_OVERLAP_COMPUTE, HRP_DESC_STREAM | HRP_DESC_OVERLAP_IDLE,
                                     HRP_DESC_STREAM, HRP_DESC_STREAM | HRP_DESC_OVERLAP_COMPUTE, 0};
    for (unsigned i = 0; i < 5; i++)
        for (unsigned in_place = 0; in_place < 2; in_place++) {
            one_op(HRP_ALL_REDUCE, counts[i], in_place, flags[i]);
            one_op(HRP_BROADCAST, counts[i], in_place, flags[(i + 1) % 5]);
            one_op(HRP_REDUCE_SCATTER, counts[i] / nranks, in_place, flags[(i + 2) % 5]);
            one_op(HRP_ALL_GATHER, counts[i] / nranks, in_place, flags[(i + 3) % 5]);
        }
    stop();
}

static void one_node(void)
{
    static const uint32_t map[4] = {0, 0, 0, 0};
    static const int gpu[4] = {0, 1, 2, 3};
    shapes(1, 4, map, gpu);
}

static void one_gpu(void)
{
    static const uint32_t map[3] = {0, 0, 0};
    static const int gpu[3] = {1, 1, 1};
    shapes(1, 3, map, gpu);
}

static void two_nodes(void)
{
    static const uint32_t map[4] = {0, 0, 1, 1};
    static const int gpu[4] = {0, 1, 0, 2};
    shapes(2, 4, map, gpu);
}

/* Some ranks in host memory. */
static void mixed(void)
{
    static const uint32_t map[3] = {0, 0, 0};
    static const int gpu[3] = {0, 1, 0};
    struct sim_options o = {0};
    start(1, 3, map, gpu, &o);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 300000, .dtype = HRP_U32, .redop = HRP_SUM};
    uint32_t *host = (uint32_t *)(void *)s.rank[1].pool;
    for (uint32_t r = 0; r < 3; r += 2) {
        fake_gpu_fill(rank[r].host, BYTES, UINT64_MAX);
        upload(&rank[r]);
    }
    uint32_t *want = malloc(sig.count * 4);
    for (uint64_t i = 0; i < sig.count; i++) {
        uint32_t a, b;
        host[i] = (uint32_t)fake_gpu_random();
        memcpy(&a, rank[0].host + 4 * i, 4);
        memcpy(&b, rank[2].host + 4 * i, 4);
        want[i] = a + b + host[i];
    }
    struct hrp_desc d = describe(1, &sig, 0, 0, 0);
    sim_push(&s, 0, 0, &d, hrp_flag(1, HRP_CHUNK_ALL));
    sim_push(&s, 2, 0, &d, hrp_flag(1, HRP_CHUNK_ALL));
    sim_post(&s, 1, 0, &sig, 0, 0);
    for (uint32_t r = 0; r < 3; r++)
        CHECK(sim_wait(&s, r, 0, 1, NULL) == HRP_OK);
    CHECK(memcmp(host, want, sig.count * 4) == 0);
    for (uint32_t r = 0; r < 3; r += 2) {
        memcpy(rank[r].host, want, sig.count * 4);
        compare(r, "mixed");
    }
    free(want);
    stop();
}

static uint32_t try_op(uint32_t *status, char *text)
{
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 500000, .dtype = HRP_F32, .redop = HRP_SUM};
    uint64_t op = 0;
    for (uint32_t r = 0; r < s.nranks; r++) {
        op = ++s.rank[r].posted[0];
        struct hrp_desc d = describe(op, &sig, 0, 0, HRP_DESC_OVERLAP_COMPUTE);
        sim_push(&s, r, 0, &d, hrp_flag(op, HRP_CHUNK_ALL));
    }
    for (uint32_t r = 0; r < s.nranks; r++)
        status[r] = sim_wait(&s, r, 0, op, text);
    return (uint32_t)op;
}

/* A call that fails fails that op on all ranks of both nodes, in words; the next one works. */
static void failed_copy(void)
{
    static const uint32_t map[4] = {0, 0, 1, 1};
    static const int gpu[4] = {0, 1, 0, 2};
    setenv("FAKE_CUDA_FAIL", "MemcpyDtoHAsync=2@6", 1);
    setenv("FAKE_CUDA_NO_P2P", "0-1,0-2,1-2", 1);
    struct sim_options o = {0};
    start(2, 4, map, gpu, &o);
    uint32_t status[4];
    char text[HRP_OP_TEXT + 1];
    try_op(status, text);
    for (int r = 0; r < 4; r++)
        CHECK(status[r] == HRP_SYSTEM);
    CHECK(strstr(text, "a copy to the host failed") && strstr(text, "OUT_OF_MEMORY") &&
          strstr(text, "node n"));
    one_op(HRP_ALL_REDUCE, 400000, true, HRP_DESC_OVERLAP_COMPUTE);
    stop();
}

/* A client that dies with slow copies in flight: its session is let go of only when they have ended. */
static void death_in_flight(void)
{
    static const uint32_t map[3] = {0, 0, 0};
    static const int gpu[3] = {0, 0, 1};
    setenv("FAKE_CUDA_DELAY", "MemcpyDtoHAsync=150000,MemcpyHtoDAsync=150000", 1);
    setenv("FAKE_CUDA_NO_P2P", "0-1", 1);
    struct sim_options o = {0};
    start(1, 3, map, gpu, &o);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 1000000, .dtype = HRP_U32, .redop = HRP_SUM};
    for (uint32_t r = 0; r < 3; r++) {
        struct hrp_desc d = describe(++s.rank[r].posted[0], &sig, 0, 0, HRP_DESC_OVERLAP_COMPUTE);
        sim_push(&s, r, 0, &d, hrp_flag(1, HRP_CHUNK_ALL));
    }
    nanosleep(&(struct timespec){.tv_nsec = 200000000},
              NULL); /* copies are under way, out of what takes seconds */
    CHECK(!sim_done(&s, 1, 0, 1));
    hrd_agent_session_end(s.node[0].agent, 1, "process 1000 died");
    char text[HRP_OP_TEXT + 1];
    CHECK(sim_wait(&s, 1, 0, 1, text) == HRP_RANK_LOST && strstr(text, "process 1000 died"));
    while (!s.rank[0].gone) {
        sim_events(&s);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    /* Nothing of the daemon writes into that memory any more: what its owner writes now stays. */
    memset(rank[0].host, 0x3c, BYTES);
    upload(&rank[0]);
    nanosleep(&(struct timespec){.tv_nsec = 500000000}, NULL);
    compare(0, "after death");
    hrd_gpus_close(gpus[0], 1, 0, rank[0].import);
    free(answer(0, HRD_GPU_CLOSED));
    rank[0].import = NULL;
    stop();
}

/* Copies that never end: nothing may let go of the op's memory, but its ranks are told, and by which GPU. */
static void copies_without_end(void)
{
    static const uint32_t map[2] = {0, 0};
    static const int gpu[2] = {1, 1};
    setenv("FAKE_CUDA_DELAY", "MemcpyDtoHAsync=300000000", 1);
    struct sim_options o = {.agent = {.gpu_stuck_ms = 1000}};
    start(1, 2, map, gpu, &o);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 1000, .dtype = HRP_F32, .redop = HRP_SUM};
    for (uint32_t r = 0; r < 2; r++) {
        struct hrp_desc d = describe(++s.rank[r].posted[0], &sig, 0, 0, HRP_DESC_OVERLAP_COMPUTE);
        d.timeout_ms = 200;
        sim_push(&s, r, 0, &d, hrp_flag(1, HRP_CHUNK_ALL));
    }
    const struct hrp_comm_area *area = hrp_seg_comm(s.rank[1].seg, 0);
    for (int i = 0; atomic_load_explicit(&area->state, memory_order_acquire) != HRP_COMM_FAILED; i++) {
        CHECK(i < LIMIT_S * 1000);
        sim_events(&s);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    char text[HRP_COMM_TEXT + 1];
    snprintf(text, sizeof(text), "%.*s", (int)area->text_len, area->text);
    if (area->status != HRP_SYSTEM || !strstr(text, "did not complete within its deadline of 200 ms") ||
        !strstr(text, "GPU 0000:20:00.0") || !strstr(text, "did not end within 1.0 s"))
        fprintf(stderr, "%u: %s\n", area->status, text);
    CHECK(area->status == HRP_SYSTEM && strstr(text, "did not complete within its deadline of 200 ms") &&
          strstr(text, "GPU 0000:20:00.0") && strstr(text, "did not end within 1.0 s"));
    CHECK(!sim_done(&s, 0, 0, 1) && hrd_gpus_lost(gpus[0], UINT64_C(1) << 1));
    _exit(0); /* the daemon's process ends, too: only that stops the copies */
}

static void engine_why(char *text, size_t len)
{
    hrd_agent_query(s.node[0].agent, 5);
    for (bool got = false; !got;) {
        for (struct hrd_event *ev = hrd_agent_take_events(s.node[0].agent), *next; ev; ev = next) {
            next = ev->next;
            if (ev->snapshot) {
                snprintf(text, len, "%s", ev->snapshot->comm[0].engine_why);
                hrd_snapshot_free(ev->snapshot);
                got = true;
            }
            free(ev);
        }
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

/* The words of the path report follow the reason, also where the choice stays the same. */
static void reasons_are_fresh(void)
{
    static const uint32_t map[2] = {0, 0};
    static const int gpu[2] = {1, 1};
    char text[512];
    struct sim_options o = {0};
    start(1, 2, map, gpu, &o);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 1000, .dtype = HRP_F32, .redop = HRP_SUM};
    struct hrp_desc d = describe(1, &sig, 0, 0, HRP_DESC_OVERLAP_COMPUTE);
    s.rank[0].posted[0] = 1;
    sim_push(&s, 0, 0, &d, hrp_flag(1, HRP_CHUNK_ALL));
    CHECK(sim_post(&s, 1, 0, &sig, 0, 0) == 1); /* in host memory */
    for (uint32_t r = 0; r < 2; r++)
        CHECK(sim_wait(&s, r, 0, 1, NULL) == HRP_OK);
    engine_why(text, sizeof(text));
    CHECK(strstr(text, "the other engine is out: a local rank's buffer lies in host memory"));
    one_op(HRP_ALL_REDUCE, 1000, true, HRP_DESC_OVERLAP_COMPUTE);
    engine_why(text, sizeof(text));
    CHECK(strstr(text, "overlap = compute") && !strstr(text, "out"));
    stop();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FAKE_GPU_TEST(one_node),           FAKE_GPU_TEST(one_gpu),
        FAKE_GPU_TEST(two_nodes),          FAKE_GPU_TEST(mixed),
        FAKE_GPU_TEST(failed_copy),        FAKE_GPU_TEST(death_in_flight),
        FAKE_GPU_TEST(copies_without_end), FAKE_GPU_TEST(reasons_are_fresh),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
