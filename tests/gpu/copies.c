/* SPDX-License-Identifier: MIT */
/*
 * copies [--ranks 4] [--csv FILE] [--short]: what copies between GPUs and pinned host memory cost, which is what the dma engine is made
 * of. Rates by length of a copy, by what stands behind each (nothing, an event, a written word), by copies a call and streams; both
 * directions alone and together; one GPU, then all at once. The fold of as many sources as there are ranks, by threads, in
 * quiet memory and while all GPUs copy. Last the floor of an all-reduce whose ranks share one GPU: all inputs in and all
 * results out over its link, both directions at the rate measured here, and one chunk in and one out by themselves.
 * csv: bytes of the op, us of the floor. --short: only the floor.
 */
#include <getopt.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/lib/gpu_job.h"

#define MAX_GPUS 8
#define MAX_THREADS 64
#define BYTES (UINT64_C(64) << 20) /* each way in a round */
#define ROUNDS 5
#define MAX_BATCH 4
#define MAX_STREAMS 2
#define FOLD_PIECE (UINT64_C(32) << 10)
#define FOLD_BYTES (UINT64_C(16) << 20)
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

enum { IN = 1, OUT = 2 };
enum mark { NO_MARK, EVENT, WORD, NMARKS };
static const char *const mark_name[NMARKS] = {"nothing", "an event", "a word"};

struct way {
    unsigned directions;
    uint64_t chunk;
    enum mark mark;
    unsigned batch;   /* copies a call */
    unsigned streams; /* a direction, in turns */
};

struct lane {
    struct gj_gpu gpu;
    hrg_stream stream[2][MAX_STREAMS]; /* in, out */
    hrg_event event;
    uint64_t device[2];
    char *host[2];
    uint64_t word; /* device address of a pinned one */
    pthread_t thread;
    /* of the last round: */
    double us, call_us;
};

static struct lane lanes[MAX_GPUS];
static int ngpus;
static struct way now;
static _Atomic unsigned begun, here;
static _Atomic bool stop, again;

static void open_lane(struct lane *l, const struct hrg_driver *drv, int ordinal)
{
    gj_open(&l->gpu, drv, ordinal);
    for (unsigned d = 0; d < 2; d++) {
        for (unsigned i = 0; i < MAX_STREAMS; i++)
            gj_check(drv->StreamCreateWithPriority(&l->stream[d][i], HRG_STREAM_NON_BLOCKING, 0),
                     "making a stream");
        l->device[d] = gj_alloc(&l->gpu, BYTES);
        l->host[d] = gj_pinned(&l->gpu, BYTES, NULL);
    }
    gj_check(drv->EventCreate(&l->event, HRG_EVENT_DISABLE_TIMING), "making an event");
    (void)gj_pinned(&l->gpu, 64, &l->word);
}

/* One call: batch copies of a chunk each, from `at` on. */
static void copy(const struct lane *l, unsigned d, uint64_t at)
{
    const struct hrg_driver *drv = l->gpu.drv;
    hrg_stream stream = l->stream[d][at / (now.chunk * now.batch) % now.streams];
    hrg_result r = HRG_SUCCESS;
    if (now.batch == 1) {
        r = d == 0 ? drv->MemcpyDtoHAsync(l->host[d] + at, l->device[d] + at, now.chunk, stream)
                   : drv->MemcpyHtoDAsync(l->device[d] + at, l->host[d] + at, now.chunk, stream);
    } else {
        hrg_ptr src[MAX_BATCH], dst[MAX_BATCH];
        size_t size[MAX_BATCH], first = 0, failed;
        struct hrg_copy_attributes how = {.src_access_order = HRG_SRC_ACCESS_STREAM,
                                          .flags = HRG_COPY_PREFER_OVERLAP_WITH_COMPUTE};
        for (unsigned i = 0; i < now.batch; i++) {
            uint64_t off = at + i * now.chunk, host = (uint64_t)(uintptr_t)(l->host[d] + off);
            src[i] = d == 0 ? l->device[d] + off : host;
            dst[i] = d == 0 ? host : l->device[d] + off;
            size[i] = now.chunk;
        }
        r = drv->MemcpyBatchAsync(dst, src, size, now.batch, &how, &first, 1, &failed, stream);
    }
    gj_check(r, "a copy");
    if (now.mark == EVENT)
        gj_check(drv->EventRecord(l->event, stream), "an event");
    if (now.mark == WORD)
        gj_check(drv->StreamWriteValue64(stream, l->word, at, HRG_WRITE_DEFAULT), "a word");
}

static void round_of(struct lane *l)
{
    uint64_t began = gj_now_ns(), step = now.chunk * now.batch, calls = 0;
    for (uint64_t at = 0; at < BYTES; at += step)
        for (unsigned d = 0; d < 2; d++)
            if (now.directions >> d & 1) {
                copy(l, d, at);
                calls++;
            }
    l->call_us = (double)(gj_now_ns() - began) * 1e-3 / (double)calls;
    for (unsigned d = 0; d < 2; d++)
        for (unsigned i = 0; i < MAX_STREAMS; i++)
            gj_check(l->gpu.drv->StreamSynchronize(l->stream[d][i]), "waiting for copies");
    l->us = (double)(gj_now_ns() - began) * 1e-3;
}

static void *copier(void *arg)
{
    struct lane *l = arg;
    unsigned seen = 0;
    gj_use(&l->gpu);
    while (!atomic_load(&stop)) {
        if (atomic_load(&begun) == seen) {
            sched_yield();
            continue;
        }
        do
            round_of(l);
        while (atomic_load(&again));
        seen++;
        atomic_fetch_add(&here, 1);
    }
    return NULL;
}

static void start_round(void)
{
    atomic_store(&here, 0);
    atomic_fetch_add(&begun, 1);
}

static void end_round(int n)
{
    while (atomic_load(&here) < (unsigned)n)
        sched_yield();
}

static void start_threads(int n)
{
    atomic_store(&stop, false);
    atomic_store(&begun, 0);
    for (int i = 0; i < n; i++)
        if (pthread_create(&lanes[i].thread, NULL, copier, &lanes[i]))
            gj_die("cannot start a thread");
}

static void end_threads(int n)
{
    atomic_store(&stop, true);
    for (int i = 0; i < n; i++)
        pthread_join(lanes[i].thread, NULL);
}

/* Bytes a second of each GPU in each of its directions; *call_us: of a call. */
static double rate(const struct way *way, int n, double *call_us)
{
    double us[ROUNDS], call[ROUNDS];
    now = *way;
    for (int k = -1; k < ROUNDS; k++) {
        double slowest = 0, calls = 0;
        start_round();
        end_round(n);
        for (int i = 0; i < n; i++) {
            slowest = lanes[i].us > slowest ? lanes[i].us : slowest;
            calls = lanes[i].call_us > calls ? lanes[i].call_us : calls;
        }
        if (k >= 0) {
            us[k] = slowest;
            call[k] = calls;
        }
    }
    *call_us = gj_median(call, ROUNDS);
    return (double)BYTES / gj_median(us, ROUNDS) * 1e6;
}

static void print_rates(int n)
{
    static const struct way ways[] = {
        {IN, 4 << 20, NO_MARK, 1, 1},       {OUT, 4 << 20, NO_MARK, 1, 1},
        {IN | OUT, 4 << 20, NO_MARK, 1, 1}, {IN | OUT, 1 << 20, EVENT, 1, 1},
        {IN | OUT, 1 << 20, EVENT, 1, 2},   {IN | OUT, 512 << 10, NO_MARK, 1, 1},
        {IN | OUT, 512 << 10, EVENT, 1, 1}, {IN | OUT, 512 << 10, EVENT, 1, 2},
        {IN | OUT, 512 << 10, WORD, 1, 1},  {IN | OUT, 512 << 10, EVENT, 4, 1},
        {IN | OUT, 512 << 10, EVENT, 4, 2}, {IN | OUT, 256 << 10, EVENT, 1, 1},
        {IN | OUT, 256 << 10, EVENT, 1, 2}, {IN | OUT, 256 << 10, EVENT, 4, 1},
        {IN | OUT, 256 << 10, EVENT, 4, 2}, {IN | OUT, 128 << 10, EVENT, 4, 2},
    };
    const struct hrg_driver *drv = lanes[0].gpu.drv;
    printf("\n%d GPU%s at once\n| directions | KiB a copy | copies a call | streams | behind it | GB/s each "
           "way and "
           "GPU | us a "
           "call |\n| --- | --- | --- | --- | --- | --- | --- |\n",
           n, n == 1 ? "" : "s");
    start_threads(n);
    for (unsigned i = 0; i < COUNT(ways); i++) {
        const struct way *w = &ways[i];
        double call_us;
        if ((w->batch > 1 && !drv->MemcpyBatchAsync) || (w->mark == WORD && !drv->StreamWriteValue64))
            continue;
        double bytes = rate(w, n, &call_us);
        printf("| %s | %llu | %u | %u | %s | %.1f | %.2f |\n",
               w->directions == IN    ? "in"
               : w->directions == OUT ? "out"
                                      : "both",
               (unsigned long long)w->chunk >> 10, w->batch, w->streams, mark_name[w->mark], bytes * 1e-9,
               call_us);
    }
    end_threads(n);
}

static void print_queries(void)
{
    struct lane *l = &lanes[0];
    const struct hrg_driver *drv = l->gpu.drv;
    enum { N = 2000 };
    gj_use(&l->gpu);
    gj_check(drv->EventRecord(l->event, l->stream[0][0]), "an event");
    gj_check(drv->StreamSynchronize(l->stream[0][0]), "an event");
    uint64_t began = gj_now_ns();
    for (unsigned i = 0; i < N; i++)
        gj_check(drv->EventQuery(l->event), "asking an event");
    double over = (double)(gj_now_ns() - began) / N;
    for (unsigned i = 0; i < 4; i++)
        gj_check(drv->MemcpyDtoHAsync(l->host[0], l->device[0], BYTES, l->stream[0][0]), "a copy");
    gj_check(drv->EventRecord(l->event, l->stream[0][0]), "an event");
    unsigned asked = 0;
    began = gj_now_ns();
    while (asked < N && drv->EventQuery(l->event) == HRG_ERROR_NOT_READY)
        asked++;
    double waits = asked ? (double)(gj_now_ns() - began) / asked : 0;
    gj_check(drv->StreamSynchronize(l->stream[0][0]), "copies");
    began = gj_now_ns();
    for (unsigned i = 0; i < N; i++)
        gj_check(drv->CtxSetCurrent(l->gpu.ctx), "the context");
    printf(
        "\nasking an event that is over: %.0f ns; that is not: %.0f ns; making a context current: %.0f ns\n",
        over, waits, (double)(gj_now_ns() - began) / N);
}

/* ---- the processor's part --------------------------------------------------------------------------------------- */

struct folder {
    pthread_t thread;
    char **src;
    char *dst;
    unsigned nsrc;
};
static _Atomic uint64_t next_piece;
static _Atomic unsigned folders_here;

static void *folder(void *arg)
{
    const struct folder *f = arg;
    const struct hrk_fold how = hrk_fold_single(0 /* f32 */, 0 /* sum */, f->nsrc);
    atomic_fetch_add(&folders_here, 1);
    while (atomic_load(&next_piece) == UINT64_MAX)
        ;
    for (uint64_t at; (at = atomic_fetch_add(&next_piece, FOLD_PIECE)) < ROUNDS * FOLD_BYTES;) {
        const void *src[MAX_GPUS];
        void *dst[1] = {f->dst + at % FOLD_BYTES};
        for (unsigned i = 0; i < f->nsrc; i++)
            src[i] = f->src[i] + at % FOLD_BYTES;
        hrk_fold(&how, dst, 1, src, f->nsrc, FOLD_PIECE / 4);
    }
    return NULL;
}

static double fold_rate(unsigned nthreads, unsigned nsrc)
{
    static struct folder f[MAX_THREADS];
    char *src[MAX_GPUS];
    for (unsigned i = 0; i < nsrc; i++)
        src[i] = lanes[0].host[i / 4 % 2] + i % 4 * FOLD_BYTES;
    atomic_store(&next_piece, UINT64_MAX);
    atomic_store(&folders_here, 0);
    for (unsigned i = 0; i < nthreads; i++) {
        f[i] = (struct folder){.src = src, .dst = src[0], .nsrc = nsrc};
        if (pthread_create(&f[i].thread, NULL, folder, &f[i]))
            gj_die("cannot start a thread");
    }
    while (atomic_load(&folders_here) < nthreads)
        sched_yield();
    uint64_t began = gj_now_ns();
    atomic_store(&next_piece, 0);
    for (unsigned i = 0; i < nthreads; i++)
        pthread_join(f[i].thread, NULL);
    return (double)(ROUNDS * FOLD_BYTES) / (double)(gj_now_ns() - began) * 1e9;
}

static void print_folds(unsigned ranks, int n)
{
    static const unsigned counts[] = {1, 2, 4, 8, 16, 32};
    printf("\nfold of %u sources of f32, GB/s of the result\n| threads | quiet | %d GPUs copy both ways |\n"
           "| --- | --- | --- |\n",
           ranks, n);
    now = (struct way){IN | OUT, 1 << 20, EVENT, 1, 1};
    start_threads(n);
    for (unsigned i = 0; i < COUNT(counts); i++) {
        double quiet = fold_rate(counts[i], ranks);
        atomic_store(&again, true);
        start_round();
        double busy = fold_rate(counts[i], ranks);
        atomic_store(&again, false);
        end_round(n);
        printf("| %u | %.1f | %.1f |\n", counts[i], quiet * 1e-9, busy * 1e-9);
    }
    end_threads(n);
}

/* ---- the floor ----------------------------------------------------------------------------------------------------- */

static void print_floor(unsigned ranks, FILE *csv)
{
    static const uint64_t sizes[] = {1 << 20, 4 << 20, 16 << 20, 64 << 20};
    static const struct way in = {IN, 4 << 20, NO_MARK, 1, 1}, out = {OUT, 4 << 20, NO_MARK, 1, 1},
                            both = {IN | OUT, 4 << 20, NO_MARK, 1, 1};
    const uint64_t chunk = 512 << 10;
    double ignored;
    start_threads(1);
    double in_rate = rate(&in, 1, &ignored), out_rate = rate(&out, 1, &ignored),
           both_rate = rate(&both, 1, &ignored);
    end_threads(1);
    printf("\nfloor, %u ranks on one GPU, chunks of %llu KiB\n| bytes | us |\n| --- | --- |\n", ranks,
           (unsigned long long)chunk >> 10);
    for (unsigned i = 0; i < COUNT(sizes); i++) {
        double us = ((double)ranks * (double)sizes[i] / both_rate + (double)chunk / in_rate +
                     (double)chunk / out_rate) *
                    1e6;
        printf("| %llu | %.1f |\n", (unsigned long long)sizes[i], us);
        if (csv)
            fprintf(csv, "%llu,%.1f\n", (unsigned long long)sizes[i], us);
    }
}

int main(int argc, char **argv)
{
    static const struct option names[] = {
        {"ranks", 1, NULL, 'r'}, {"csv", 1, NULL, 'c'}, {"short", 0, NULL, 's'}, {NULL, 0, NULL, 0}};
    unsigned ranks = 4;
    FILE *csv = NULL;
    bool brief = false;
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        if (c == 'r' && atoi(optarg) > 0 && atoi(optarg) <= MAX_GPUS)
            ranks = (unsigned)atoi(optarg);
        else if (c == 'c' && (csv = fopen(optarg, "we")) != NULL)
            ;
        else if (c == 's')
            brief = true;
        else
            gj_die("usage: copies [--ranks 1..%d] [--csv FILE] [--short]", MAX_GPUS);
    }
    const struct hrg_driver *drv = gj_driver(&ngpus);
    ngpus = ngpus < MAX_GPUS ? ngpus : MAX_GPUS;
    ngpus = brief ? 1 : ngpus;
    for (int i = 0; i < ngpus; i++)
        open_lane(&lanes[i], drv, i);
    if (!brief) {
        print_rates(1);
        print_queries();
        if (ngpus > 1)
            print_rates(ngpus);
        print_folds(ranks, ngpus);
    }
    print_floor(ranks, csv);
    if (csv)
        fclose(csv);
    return 0;
}
