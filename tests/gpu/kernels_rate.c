/* SPDX-License-Identifier: MIT */
/*
 * kernels_rate: how long one all-reduce of the fused kernel takes inside one process, each GPU folding its shard of all
 * GPUs' buffers into all of them, by size and by the bound on the grid; then one GPU alone, four buffers of its own, against
 * its copy rate. The floor for the daemon's sm engine, and what its bounds are chosen by.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/lib/gpu_job.h"

#define MAX_GPUS 8
#define ROUNDS 25
#define LOCAL_SOURCES 4
#define MAX_BYTES (UINT64_C(64) << 20)

static const uint64_t sizes[] = {1 << 10, 16 << 10, 64 << 10, 256 << 10,
                                 1 << 20, 4 << 20,  16 << 20, 64 << 20};
static const uint32_t grids[] = {8, 32, 64, 132, 264, 528};
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

struct round {
    struct gj_gpu gpu[MAX_GPUS];
    uint64_t in[MAX_GPUS], out[MAX_GPUS];
    int n;
    uint64_t elements;
    uint32_t max_blocks;
    _Atomic unsigned start; /* the round that launchers may launch */
    _Atomic unsigned launched;
    _Atomic int stop;
};

struct launcher {
    struct round *r;
    int at;
    pthread_t thread;
};

static void launch_shard(struct round *r, int at)
{
    const struct hrk_fold f = hrk_fold_single(HRP_F32, HRP_SUM, (uint32_t)r->n);
    uint64_t each = (r->elements / (uint64_t)r->n + 511) / 512 * 512, first = each * (uint64_t)at;
    uint64_t n = first >= r->elements ? 0 : r->elements - first < each ? r->elements - first : each;
    uint64_t src[MAX_GPUS], dst[MAX_GPUS];
    struct hrg_launch l;
    for (int i = 0; i < r->n; i++) {
        src[i] = r->in[i] + first * 4;
        dst[i] = r->out[i] + first * 4;
    }
    if (hrg_fold_launch(&l, &f, dst, (unsigned)r->n, src, (unsigned)r->n, n, r->max_blocks))
        gj_die("a fold was refused");
    gj_launch(&r->gpu[at], &l);
}

static void *launcher(void *arg)
{
    struct launcher *me = arg;
    struct round *r = me->r;
    unsigned seen = 0;
    gj_use(&r->gpu[me->at]);
    while (!atomic_load(&r->stop)) {
        unsigned now = atomic_load(&r->start);
        if (now == seen) {
            sched_yield();
            continue;
        }
        seen = now;
        launch_shard(r, me->at);
        atomic_fetch_add(&r->launched, 1);
    }
    return NULL;
}

static double one_round(struct round *r)
{
    uint64_t began = gj_now_ns();
    atomic_store(&r->launched, 0);
    atomic_fetch_add(&r->start, 1);
    while (atomic_load(&r->launched) < (unsigned)r->n)
        ;
    for (int i = 0; i < r->n; i++)
        gj_wait(&r->gpu[i]);
    return (double)(gj_now_ns() - began) * 1e-3;
}

static double median_round(struct round *r, uint64_t bytes, uint32_t max_blocks)
{
    double us[ROUNDS];
    r->elements = bytes / 4;
    r->max_blocks = max_blocks;
    for (int i = 0; i < 3; i++)
        (void)one_round(r);
    for (int i = 0; i < ROUNDS; i++)
        us[i] = one_round(r);
    return gj_median(us, ROUNDS);
}

static void print_head(const char *title)
{
    printf("\n%s\n\n| bytes |", title);
    for (unsigned g = 0; g < COUNT(grids); g++)
        printf(" %u blocks |", grids[g]);
    printf("\n| --- |");
    for (unsigned g = 0; g < COUNT(grids); g++)
        printf(" --- |");
    printf("\n");
}

static void across_gpus(struct round *r)
{
    struct launcher thread[MAX_GPUS];
    char title[96];
    for (int i = 0; i < r->n; i++) {
        thread[i] = (struct launcher){.r = r, .at = i};
        if (pthread_create(&thread[i].thread, NULL, launcher, &thread[i]))
            gj_die("cannot start a thread");
    }
    snprintf(title, sizeof(title), "fused fold over %d GPUs, f32 sum, us from launch to the last word", r->n);
    print_head(title);
    for (unsigned s = 0; s < COUNT(sizes); s++) {
        printf("| %llu |", (unsigned long long)sizes[s]);
        for (unsigned g = 0; g < COUNT(grids); g++)
            printf(" %.1f |", median_round(r, sizes[s], grids[g]));
        printf("\n");
        fflush(stdout);
    }
    atomic_store(&r->stop, 1);
    for (int i = 0; i < r->n; i++)
        pthread_join(thread[i].thread, NULL);
}

/* Four ranks on one GPU: bytes read and written, a second, against a copy's. */
static void one_gpu(struct gj_gpu *g)
{
    const struct hrk_fold f = hrk_fold_single(HRP_F32, HRP_SUM, LOCAL_SOURCES);
    uint64_t in[LOCAL_SOURCES], out[LOCAL_SOURCES];
    double us[ROUNDS];
    struct hrg_launch l;
    gj_use(g);
    for (int i = 0; i < LOCAL_SOURCES; i++) {
        in[i] = gj_alloc(g, MAX_BYTES);
        out[i] = gj_alloc(g, MAX_BYTES);
    }
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t began = gj_now_ns();
        gj_check(g->drv->MemcpyDtoDAsync(out[0], in[0], MAX_BYTES, g->stream), "a copy");
        gj_check(g->drv->StreamSynchronize(g->stream), "a copy");
        us[i] = (double)(gj_now_ns() - began) * 1e-3;
    }
    double copy = 2.0 * (double)MAX_BYTES / gj_median(us, ROUNDS) * 1e-3;
    print_head("four buffers of one GPU into four, f32 sum, GB/s read and written");
    for (uint64_t bytes = MAX_BYTES / 16; bytes <= MAX_BYTES; bytes *= 4) {
        printf("| %llu |", (unsigned long long)bytes);
        for (unsigned k = 0; k < COUNT(grids); k++) {
            for (int i = 0; i < ROUNDS; i++) {
                uint64_t began = gj_now_ns();
                if (hrg_fold_launch(&l, &f, out, LOCAL_SOURCES, in, LOCAL_SOURCES, bytes / 4, grids[k]))
                    gj_die("a fold was refused");
                gj_launch(g, &l);
                gj_wait(g);
                us[i] = (double)(gj_now_ns() - began) * 1e-3;
            }
            printf(" %.0f |", 2.0 * LOCAL_SOURCES * (double)bytes / gj_median(us, ROUNDS) * 1e-3);
        }
        printf("\n");
    }
    printf("\na device-to-device copy of %llu bytes: %.0f GB/s read and written\n",
           (unsigned long long)MAX_BYTES, copy);
}

int main(void)
{
    static struct round r;
    const struct hrg_driver *drv = gj_driver(&r.n);
    if (r.n > MAX_GPUS)
        r.n = MAX_GPUS;
    for (int i = 0; i < r.n; i++) {
        gj_open(&r.gpu[i], drv, i);
        gj_load_kernels(&r.gpu[i]);
        r.in[i] = gj_alloc(&r.gpu[i], MAX_BYTES);
        r.out[i] = gj_alloc(&r.gpu[i], MAX_BYTES);
    }
    for (int i = 0; i < r.n; i++)
        for (int j = 0; j < i; j++)
            if (!gj_peers(&r.gpu[i], &r.gpu[j]))
                gj_die("GPUs %d and %d do not reach each other", i, j);
    across_gpus(&r);
    one_gpu(&r.gpu[0]);
    return 0;
}
