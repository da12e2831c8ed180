/* SPDX-License-Identifier: MIT */
/*
 * Agents over GPU buffers: whole nodes in one process on the fake driver, both engines' choice, every element compared.
 * Each test is a process of its own, because the fake reads its orders when it is initialised.
 */
#include "tests/sim/gpu_nodes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/ring.h"
#include "proto/status.h"

static struct gpu_nodes *const w = &gpu_nodes;

static void shapes(uint32_t nnodes, uint32_t nranks, const uint32_t *map, const int *gpu)
{
    struct sim_options o = {0};
    gpu_nodes_start(nnodes, nranks, map, gpu, &o);
    static const uint64_t counts[] = {0, 1, 1021, 70000, 400003};
    static const uint32_t flags[] = {HRP_DESC_OVERLAP_COMPUTE, HRP_DESC_STREAM | HRP_DESC_OVERLAP_IDLE,
                                     HRP_DESC_STREAM, HRP_DESC_STREAM | HRP_DESC_OVERLAP_COMPUTE, 0};
    for (unsigned i = 0; i < 5; i++)
        for (unsigned in_place = 0; in_place < 2; in_place++) {
            gpu_nodes_op(HRP_ALL_REDUCE, counts[i], in_place, flags[i]);
            gpu_nodes_op(HRP_BROADCAST, counts[i], in_place, flags[(i + 1) % 5]);
            gpu_nodes_op(HRP_REDUCE_SCATTER, counts[i] / nranks, in_place, flags[(i + 2) % 5]);
            gpu_nodes_op(HRP_ALL_GATHER, counts[i] / nranks, in_place, flags[(i + 3) % 5]);
        }
    gpu_nodes_stop();
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
    gpu_nodes_start(1, 3, map, gpu, &o);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 300000, .dtype = HRP_U32, .redop = HRP_SUM};
    uint32_t *host = (uint32_t *)(void *)w->s.rank[1].pool;
    for (uint32_t r = 0; r < 3; r += 2) {
        fake_gpu_fill(w->rank[r].host, w->bytes, UINT64_MAX);
        gpu_nodes_upload(&w->rank[r]);
    }
    uint32_t *want = malloc(sig.count * 4);
    for (uint64_t i = 0; i < sig.count; i++) {
        uint32_t a, b;
        host[i] = (uint32_t)fake_gpu_random();
        memcpy(&a, w->rank[0].host + 4 * i, 4);
        memcpy(&b, w->rank[2].host + 4 * i, 4);
        want[i] = a + b + host[i];
    }
    struct hrp_desc d = gpu_nodes_desc(1, &sig, 0, 0, 0);
    sim_push(&w->s, 0, 0, &d, hrp_flag(1, HRP_CHUNK_ALL));
    sim_push(&w->s, 2, 0, &d, hrp_flag(1, HRP_CHUNK_ALL));
    sim_post(&w->s, 1, 0, &sig, 0, 0);
    for (uint32_t r = 0; r < 3; r++)
        CHECK(sim_wait(&w->s, r, 0, 1, NULL) == HRP_OK);
    CHECK(memcmp(host, want, sig.count * 4) == 0);
    for (uint32_t r = 0; r < 3; r += 2) {
        memcpy(w->rank[r].host, want, sig.count * 4);
        gpu_nodes_compare(r, "mixed");
    }
    free(want);
    gpu_nodes_stop();
}

/* A call that fails fails that op on all ranks of both nodes, in words; the next one works. */
static void failed_copy(void)
{
    static const uint32_t map[4] = {0, 0, 1, 1};
    static const int gpu[4] = {0, 1, 0, 2};
    setenv("FAKE_CUDA_FAIL", "MemcpyDtoHAsync=2@6", 1);
    setenv("FAKE_CUDA_NO_P2P", "0-1,0-2,1-2", 1);
    struct sim_options o = {0};
    gpu_nodes_start(2, 4, map, gpu, &o);
    uint32_t status[4];
    char text[HRP_OP_TEXT + 1];
    gpu_nodes_try(status, text, HRP_DESC_OVERLAP_COMPUTE);
    for (int r = 0; r < 4; r++)
        CHECK(status[r] == HRP_SYSTEM);
    CHECK(strstr(text, "a copy to the host failed") && strstr(text, "OUT_OF_MEMORY") &&
          strstr(text, "node n"));
    gpu_nodes_op(HRP_ALL_REDUCE, 400000, true, HRP_DESC_OVERLAP_COMPUTE);
    gpu_nodes_stop();
}

/* A client that dies with slow copies in flight: its session is let go of only when they have ended. */
static void death_in_flight(void)
{
    static const uint32_t map[3] = {0, 0, 0};
    static const int gpu[3] = {0, 0, 1};
    setenv("FAKE_CUDA_DELAY", "MemcpyDtoHAsync=150000,MemcpyHtoDAsync=150000", 1);
    setenv("FAKE_CUDA_NO_P2P", "0-1", 1);
    struct sim_options o = {0};
    gpu_nodes_start(1, 3, map, gpu, &o);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 1000000, .dtype = HRP_U32, .redop = HRP_SUM};
    for (uint32_t r = 0; r < 3; r++) {
        struct hrp_desc d = gpu_nodes_desc(++w->s.rank[r].posted[0], &sig, 0, 0, HRP_DESC_OVERLAP_COMPUTE);
        sim_push(&w->s, r, 0, &d, hrp_flag(1, HRP_CHUNK_ALL));
    }
    nanosleep(&(struct timespec){.tv_nsec = 200000000},
              NULL); /* copies are under way, out of what takes seconds */
    CHECK(!sim_done(&w->s, 1, 0, 1));
    hrd_agent_session_end(w->s.node[0].agent, 1, "process 1000 died");
    char text[HRP_OP_TEXT + 1];
    CHECK(sim_wait(&w->s, 1, 0, 1, text) == HRP_RANK_LOST && strstr(text, "process 1000 died"));
    while (!w->s.rank[0].gone) {
        sim_events(&w->s);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    /* Nothing of the daemon writes into that memory any more: what its owner writes now stays. */
    memset(w->rank[0].host, 0x3c, w->bytes);
    gpu_nodes_upload(&w->rank[0]);
    nanosleep(&(struct timespec){.tv_nsec = 500000000}, NULL);
    gpu_nodes_compare(0, "after death");
    gpu_nodes_close(0);
    gpu_nodes_stop();
}

/* Copies that never end: nothing may let go of the op's memory, but its ranks are told, and by which GPU. */
static void copies_without_end(void)
{
    static const uint32_t map[2] = {0, 0};
    static const int gpu[2] = {1, 1};
    setenv("FAKE_CUDA_DELAY", "MemcpyDtoHAsync=300000000", 1);
    struct sim_options o = {.agent = {.gpu_stuck_ms = 3000}};
    gpu_nodes_start(1, 2, map, gpu, &o);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 1000, .dtype = HRP_F32, .redop = HRP_SUM};
    for (uint32_t r = 0; r < 2; r++) {
        struct hrp_desc d = gpu_nodes_desc(++w->s.rank[r].posted[0], &sig, 0, 0, HRP_DESC_OVERLAP_COMPUTE);
        d.timeout_ms = 200;
        sim_push(&w->s, r, 0, &d, hrp_flag(1, HRP_CHUNK_ALL));
    }
    const struct hrp_comm_area *area = hrp_seg_comm(w->s.rank[1].seg, 0);
    for (int i = 0; atomic_load_explicit(&area->state, memory_order_acquire) != HRP_COMM_FAILED; i++) {
        CHECK(i < LIMIT_S * 1000);
        sim_events(&w->s);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    char text[HRP_COMM_TEXT + 1];
    snprintf(text, sizeof(text), "%.*s", (int)area->text_len, area->text);
    if (area->status != HRP_SYSTEM || !strstr(text, "did not complete within its deadline of 200 ms") ||
        !strstr(text, "GPU 0000:20:00.0") || !strstr(text, "did not end within 3.0 s"))
        fprintf(stderr, "%u: %s\n", area->status, text);
    CHECK(area->status == HRP_SYSTEM && strstr(text, "did not complete within its deadline of 200 ms") &&
          strstr(text, "GPU 0000:20:00.0") && strstr(text, "did not end within 3.0 s"));
    CHECK(!sim_done(&w->s, 0, 0, 1) && hrd_gpus_lost(w->gpus[0], UINT64_C(1) << 1));
    /* The daemon's process ends, too: only that stops the copies. By the system call, since the sanitizers miss threads that
       nobody can join at _exit(). */
    syscall(SYS_exit_group, 0);
}

static void engine_why(char *text, size_t len)
{
    hrd_agent_query(w->s.node[0].agent, 5);
    for (bool got = false; !got;) {
        for (struct hrd_event *ev = hrd_agent_take_events(w->s.node[0].agent), *next; ev; ev = next) {
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
    gpu_nodes_start(1, 2, map, gpu, &o);
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = 1000, .dtype = HRP_F32, .redop = HRP_SUM};
    struct hrp_desc d = gpu_nodes_desc(1, &sig, 0, 0, HRP_DESC_OVERLAP_COMPUTE);
    w->s.rank[0].posted[0] = 1;
    sim_push(&w->s, 0, 0, &d, hrp_flag(1, HRP_CHUNK_ALL));
    CHECK(sim_post(&w->s, 1, 0, &sig, 0, 0) == 1); /* in host memory */
    for (uint32_t r = 0; r < 2; r++)
        CHECK(sim_wait(&w->s, r, 0, 1, NULL) == HRP_OK);
    engine_why(text, sizeof(text));
    CHECK(strstr(text, "the other engine is out: a local rank's buffer lies in host memory"));
    gpu_nodes_op(HRP_ALL_REDUCE, 1000, true, HRP_DESC_OVERLAP_COMPUTE);
    engine_why(text, sizeof(text));
    CHECK(strstr(text, "overlap = compute") && !strstr(text, "out"));
    gpu_nodes_stop();
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
