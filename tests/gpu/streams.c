/* SPDX-License-Identifier: MIT */
/*
 * streams [--quick]: what the design rests on, asked of the machine.
 *
 * 1. Does a pending wait of one stream hold up kernels of others, by CUDA_DEVICE_MAX_CONNECTIONS and number of streams?
 * 2. What do the hops between streams and processor cost, and does it matter whether a stream waits for another's word or
 *    the processor is in between?
 * 3. Which calls enqueue an op's copies and words for the least, and how soon is such an op over?
 *
 * One process, one GPU; an answering thread plays the daemon. Also runs on the fake driver.
 */
#include <getopt.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/lib/gpu_job.h"

#define MAX_STREAMS 64u
#define MAX_ROUNDS 400u
#define BYTES (UINT64_C(64) << 10)
#define PENDING_US 30000
#define WAIT_NS UINT64_C(20000000000)

static const unsigned stream_counts[] = {2, 4, 8, 16, 32, 64};
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static bool quick;

static unsigned rounds(unsigned n)
{
    return quick ? 5 : n;
}

static double since_us(uint64_t began)
{
    return (double)(gj_now_ns() - began) * 1e-3;
}

static void spin_until(const _Atomic uint64_t *word, uint64_t value, const char *what)
{
    uint64_t end = gj_now_ns() + WAIT_NS;
    while (atomic_load_explicit(word, memory_order_acquire) < value)
        if (gj_now_ns() > end)
            gj_die("%s did not happen within 20 s", what);
}

/* ---- 1: pending waits ------------------------------------------------------------------------------------------------ */

struct lines {
    _Atomic uint64_t *word; /* pinned: the one that is waited for, then one a stream */
    uint64_t device, counters, memory;
    hrg_stream stream[MAX_STREAMS];
};

static void open_lines(struct gj_gpu *g, struct lines *l)
{
    l->word = gj_pinned(g, 4096, &l->device);
    l->counters = gj_alloc(g, (uint64_t)MAX_STREAMS * 128);
    l->memory = gj_alloc(g, 3 * BYTES);
    gj_check(g->drv->MemsetD8Async(l->counters, 0, (size_t)MAX_STREAMS * 128, g->stream),
             "clearing counters");
    gj_check(g->drv->StreamSynchronize(g->stream), "clearing counters");
    for (unsigned i = 0; i < MAX_STREAMS; i++)
        gj_check(g->drv->StreamCreateWithPriority(&l->stream[i], HRG_STREAM_NON_BLOCKING, 0),
                 "making a stream");
}

/* How many of n - 1 streams do not get their kernel done while the first one waits. */
static unsigned stalled(struct gj_gpu *g, struct lines *l, unsigned n, uint64_t round)
{
    const struct hrk_fold f = hrk_fold_single(HRP_F32, HRP_SUM, 2);
    const uint64_t src[2] = {l->memory, l->memory + BYTES}, dst = l->memory + 2 * BYTES;
    struct hrg_launch launch;
    unsigned done = 0;
    if (hrg_fold_launch(&launch, &f, &dst, 1, src, 2, BYTES / 4, g->multiprocessors))
        gj_die("a fold was refused");
    gj_check(g->drv->StreamWaitValue64(l->stream[0], l->device, round, HRG_WAIT_GEQ), "a wait");
    for (unsigned i = 1; i < n; i++) {
        void *parameter[] = {&launch.args};
        *hrg_launch_signal(&launch) = (struct hrg_signal){.word = l->device + i * sizeof(uint64_t),
                                                          .value = round,
                                                          .blocks = l->counters + (uint64_t)i * 128};
        gj_check(g->drv->LaunchKernel(g->function[launch.kernel], launch.blocks, 1, 1, launch.threads, 1, 1,
                                      0, l->stream[i], parameter, NULL),
                 "a launch");
    }
    for (uint64_t began = gj_now_ns(); done < n - 1 && since_us(began) < PENDING_US;) {
        done = 0;
        for (unsigned i = 1; i < n; i++)
            done += atomic_load(&l->word[i]) >= round;
    }
    atomic_store(&l->word[0], round);
    for (unsigned i = 0; i < n; i++)
        gj_check(g->drv->StreamSynchronize(l->stream[i]), "awaiting a stream");
    return n - 1 - done;
}

/* In a process of its own, which reads the variable when it starts the driver. */
static int ask_pending(const char *connections, unsigned *result)
{
    struct gj_gpu g;
    struct lines l;
    int ndevices;
    if (connections)
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections, 1);
    else
        unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    gj_open(&g, gj_driver(&ndevices), 0);
    gj_load_kernels(&g);
    open_lines(&g, &l);
    for (unsigned i = 0; i < COUNT(stream_counts); i++)
        result[i] = stalled(&g, &l, stream_counts[i], i + 1);
    return 0;
}

static int pending_waits(void)
{
    static const char *const connections[] = {NULL, "1", "2", "8", "32"};
    unsigned *result = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (result == MAP_FAILED)
        gj_die("no memory");
    printf("\nKernels of other streams that a pending wait of one stream holds up\n\n| "
           "CUDA_DEVICE_MAX_CONNECTIONS |");
    for (unsigned i = 0; i < COUNT(stream_counts); i++)
        printf(" %u streams |", stream_counts[i]);
    printf("\n| --- | --- | --- | --- | --- | --- | --- |\n");
    fflush(stdout);
    for (unsigned c = 0; c < COUNT(connections); c++) {
        int status;
        pid_t child = fork();
        if (child == 0)
            _exit(ask_pending(connections[c], result));
        if (child < 0 || waitpid(child, &status, 0) != child)
            gj_die("cannot start a process");
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
        printf("| %s |", connections[c] ? connections[c] : "not set");
        for (unsigned i = 0; i < COUNT(stream_counts); i++)
            printf(" %u of %u |", result[i], stream_counts[i] - 1);
        printf("\n");
        fflush(stdout);
    }
    munmap(result, 4096);
    return 0;
}

/* ---- 2, 3: words, copies, and who answers ----------------------------------------------------------------------------- */

enum { READY = 0, DONE = 16, PASSED = 32, OVER = 48, NWORDS = 64 }; /* a line apart */

struct desk {
    struct gj_gpu *g;
    _Atomic uint64_t *word; /* pinned */
    uint64_t device;
    char *window; /* pinned */
    uint64_t memory, bytes;
    uint64_t number; /* of the last op */
    /* The answering thread's: */
    struct gj_gpu other; /* the same GPU, another stream */
    uint64_t answered;
    _Atomic bool launches, stop;
    pthread_t thread;
};

static uint64_t at(const struct desk *d, unsigned word)
{
    return d->device + word * sizeof(uint64_t);
}

static void launch_sum(struct desk *d, struct gj_gpu *g)
{
    const struct hrk_fold f = hrk_fold_single(HRP_F32, HRP_SUM, 2);
    const uint64_t src[2] = {d->memory, d->memory + BYTES}, dst = d->memory + 2 * BYTES;
    struct hrg_launch l;
    if (hrg_fold_launch(&l, &f, &dst, 1, src, 2, d->bytes / 4, g->multiprocessors))
        gj_die("a fold was refused");
    gj_launch(g, &l);
}

/* Plays the daemon: sees ready, has a kernel run or not, raises done. */
static void *answer(void *arg)
{
    struct desk *d = arg;
    uint64_t seen = d->answered;
    gj_use(&d->other);
    while (!atomic_load_explicit(&d->stop, memory_order_relaxed)) {
        uint64_t ready = atomic_load_explicit(&d->word[READY], memory_order_acquire);
        if (ready == seen)
            continue;
        seen = ready;
        if (atomic_load_explicit(&d->launches, memory_order_relaxed)) {
            launch_sum(d, &d->other);
            gj_wait(&d->other);
        }
        atomic_store_explicit(&d->word[DONE], ready, memory_order_release);
    }
    return NULL;
}

static void start_answers(struct desk *d, bool launches)
{
    atomic_store(&d->launches, launches);
    atomic_store(&d->stop, false);
    d->answered = atomic_load(&d->word[READY]);
    if (pthread_create(&d->thread, NULL, answer, d))
        gj_die("cannot start a thread");
}

static void stop_answers(struct desk *d)
{
    atomic_store(&d->stop, true);
    pthread_join(d->thread, NULL);
}

static void check(hrg_result r)
{
    gj_check(r, "enqueuing");
}

static void write_word(struct desk *d, unsigned word)
{
    check(d->g->drv->StreamWriteValue64(d->g->stream, at(d, word), d->number, HRG_WRITE_DEFAULT));
}

static void wait_word(struct desk *d, unsigned word)
{
    check(d->g->drv->StreamWaitValue64(d->g->stream, at(d, word), d->number, HRG_WAIT_GEQ));
}

static void batch(struct desk *d, unsigned n, const unsigned *word)
{
    union hrg_memop op[3];
    for (unsigned i = 0; i < n; i++)
        op[i] =
            (union hrg_memop){.value = {.operation = word[i] == DONE ? HRG_MEMOP_WAIT_64 : HRG_MEMOP_WRITE_64,
                                        .address = at(d, word[i]),
                                        .value = d->number,
                                        .flags = word[i] == DONE ? HRG_WAIT_GEQ : HRG_WRITE_DEFAULT}};
    check(d->g->drv->StreamBatchMemOp(d->g->stream, n, op, 0));
}

static void copy_in(struct desk *d)
{
    check(d->g->drv->MemcpyDtoHAsync(d->window, d->memory, d->bytes, d->g->stream));
}

static void copy_out(struct desk *d)
{
    check(d->g->drv->MemcpyHtoDAsync(d->memory, d->window, d->bytes, d->g->stream));
}

static void words_alone(struct desk *d)
{
    write_word(d, READY);
    wait_word(d, DONE);
    write_word(d, PASSED);
}

static void words_in_one(struct desk *d)
{
    batch(d, 3, (const unsigned[]){READY, DONE, PASSED});
}

static void ready_then_both(struct desk *d)
{
    write_word(d, READY);
    batch(d, 2, (const unsigned[]){DONE, PASSED});
}

static void copies_alone(struct desk *d)
{
    copy_in(d);
    write_word(d, READY);
    wait_word(d, DONE);
    copy_out(d);
    write_word(d, PASSED);
}

static void copies_and_pair(struct desk *d)
{
    copy_in(d);
    batch(d, 2, (const unsigned[]){READY, DONE});
    copy_out(d);
    write_word(d, PASSED);
}

static void sum_in_stream(struct desk *d)
{
    launch_sum(d, d->g);
}

static const struct variant {
    const char *name;
    void (*enqueue)(struct desk *d);
    bool copies, launches;
} variants[] = {
    {"launch of a sum (two buffers of this GPU)", sum_in_stream, true, false},
    {"ready, wait for done, passed: three calls", words_alone, false, false},
    {"the same in one call", words_in_one, false, false},
    {"ready; wait and passed in one call", ready_then_both, false, false},
    {"three calls; the answer is a kernel by the processor", words_alone, false, true},
    {"one call; the answer is a kernel by the processor", words_in_one, false, true},
    {"copy in, ready, wait, copy out, passed: five calls", copies_alone, true, false},
    {"ready and wait in one call: four calls", copies_and_pair, true, false},
};

static void measure(struct desk *d, const struct variant *v)
{
    const unsigned n = rounds(MAX_ROUNDS), groups = rounds(20), many = quick ? 5 : 30;
    double call[MAX_ROUNDS], us[MAX_ROUNDS], group[20];
    start_answers(d, v->launches);
    for (unsigned i = 0; i < n; i++) {
        uint64_t began = gj_now_ns();
        d->number++;
        v->enqueue(d);
        call[i] = since_us(began);
        check(d->g->drv->StreamSynchronize(d->g->stream));
        us[i] = since_us(began);
    }
    for (unsigned i = 0; i < groups; i++) {
        uint64_t began = gj_now_ns();
        for (unsigned k = 0; k < many; k++) {
            d->number++;
            v->enqueue(d);
        }
        check(d->g->drv->StreamSynchronize(d->g->stream));
        group[i] = since_us(began) / many;
    }
    stop_answers(d);
    printf("| %s | %llu | %.1f | %.1f | %.1f |\n", v->name, (unsigned long long)(v->copies ? d->bytes : 0),
           gj_median(call, n), gj_median(us, n), gj_median(group, groups));
    fflush(stdout);
}

/* A stream that waits for the other's word itself, in place of the answering thread. */
static void stream_to_stream(struct desk *d)
{
    const unsigned n = rounds(MAX_ROUNDS);
    double us[MAX_ROUNDS];
    const struct hrg_driver *drv = d->g->drv;
    for (unsigned i = 0; i < n; i++) {
        d->number++;
        check(drv->StreamWaitValue64(d->other.stream, at(d, READY), d->number, HRG_WAIT_GEQ));
        launch_sum(d, &d->other);
        check(drv->StreamWriteValue64(d->other.stream, at(d, DONE), d->number, HRG_WRITE_DEFAULT));
        uint64_t began = gj_now_ns();
        words_in_one(d);
        check(drv->StreamSynchronize(d->g->stream));
        us[i] = since_us(began);
    }
    gj_wait(&d->other);
    printf("| one call; the answer is a kernel of a stream that waits for ready | 0 | | %.1f | |\n",
           gj_median(us, n));
}

static void hops(struct desk *d)
{
    const unsigned n = rounds(MAX_ROUNDS);
    double there[MAX_ROUNDS], back[MAX_ROUNDS], kernel[MAX_ROUNDS];
    for (unsigned i = 0; i < n; i++) {
        d->number++;
        uint64_t began = gj_now_ns();
        write_word(d, OVER);
        spin_until(&d->word[OVER], d->number, "a stream's write");
        there[i] = since_us(began);
        wait_word(d, DONE);
        write_word(d, PASSED);
        usleep(50); /* the stream has come to the wait */
        began = gj_now_ns();
        atomic_store_explicit(&d->word[DONE], d->number, memory_order_release);
        spin_until(&d->word[PASSED], d->number, "a stream's wait");
        back[i] = since_us(began);
        check(d->g->drv->StreamSynchronize(d->g->stream));
        began = gj_now_ns();
        launch_sum(d, d->g);
        gj_wait(d->g);
        kernel[i] = since_us(began);
    }
    printf("\nHops, us: from the call to a stream's word seen by the processor %.1f; from the processor's "
           "word to the\n"
           "stream's next one %.1f; from the launch of a sum of %llu bytes to its word %.1f\n",
           gj_median(there, n), gj_median(back, n), (unsigned long long)d->bytes, gj_median(kernel, n));
}

static void open_desk(struct desk *d, struct gj_gpu *g)
{
    *d = (struct desk){.g = g, .bytes = 4096};
    d->word = gj_pinned(g, NWORDS * sizeof(uint64_t), &d->device);
    d->window = gj_pinned(g, BYTES, NULL);
    d->memory = gj_alloc(g, 3 * BYTES);
    gj_open(&d->other, g->drv, 0);
    gj_load_kernels(&d->other);
    gj_use(g);
}

int main(int argc, char **argv)
{
    static const struct option names[] = {{"quick", 0, NULL, 'q'}, {NULL, 0, NULL, 0}};
    static struct desk desk;
    static struct gj_gpu gpu;
    int ndevices, c;
    while ((c = getopt_long(argc, argv, "", names, NULL)) != -1) {
        if (c != 'q') {
            fputs("usage: streams [--quick]\n", stderr);
            return 2;
        }
        quick = true;
    }
    int status = pending_waits();
    if (status)
        return status;
    gj_open(&gpu, gj_driver(&ndevices), 0);
    gj_load_kernels(&gpu);
    open_desk(&desk, &gpu);
    hops(&desk);
    printf("\n| enqueued | bytes copied | us in calls | us until over | back to back us |\n| --- | --- | --- "
           "| --- | --- |\n");
    for (unsigned i = 0; i < COUNT(variants); i++)
        measure(&desk, &variants[i]);
    stream_to_stream(&desk);
    desk.bytes = BYTES;
    for (unsigned i = 0; i < COUNT(variants); i++)
        if (variants[i].copies)
            measure(&desk, &variants[i]);
    return 0;
}
