/* SPDX-License-Identifier: MIT */
/* Work of the dma engine on the fake driver: every element of every result, and what fails. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dlfcn.h>
#include <sys/syscall.h>

#include "tests/unit/gpu_world.h"

#define BOUNCE (8 * MIB)

/* A fold of parts of all buffers into parts of others, of arena and of memory that no copy engine reaches. */
static void one_fold(struct buffer *b, unsigned nb, struct hrk_fold fold, uint64_t n, bool in_place,
                     bool host_too)
{
    size_t out = hrp_dtype_size(fold.out);
    struct outcome o = {0};
    struct hrd_work *w = work(HRD_WORK_FOLD, fold, n, &o);
    const void *src[16];
    unsigned char *result = malloc(n * out + 1), *plain = malloc(n * out + 1);
    uint64_t off[16], out_off = in_place ? 0 : BYTES / 2 + fake_gpu_random() % 64;
    void *to[1] = {result};
    for (unsigned i = 0; i < nb; i++) {
        fill(&b[i], true);
        off[i] = in_place ? 16 * i : fake_gpu_random() % 64; /* any alignment */
        src[i] = b[i].host + off[i];
        source(w, b[i].span, off[i]);
    }
    hrk_fold(&fold, to, 1, src, nb, n);
    for (unsigned i = 0; i < nb; i++)
        sink(w, b[i].span, in_place ? off[i] : out_off);
    if (host_too) {
        memset(arena, 0, n * out + 64);
        memset(plain, 0, n * out);
        sink(w, host_span(arena), 32);
        sink(w, host_span(plain), 0);
    }
    engine->table->submit(engine, w);
    finish(&o);
    if (o.failed)
        fprintf(stderr, "%s\n", o.text);
    CHECK(!o.failed);
    for (unsigned i = 0; i < nb; i++) {
        memcpy(b[i].host + (in_place ? off[i] : out_off), result, n * out);
        compare(&b[i], "fold");
    }
    if (host_too)
        CHECK(memcmp(arena + 32, result, n * out) == 0 && memcmp(plain, result, n * out) == 0 &&
              arena[31] == 0 && arena[32 + n * out] == 0);
    free(w);
    free(result);
    free(plain);
}

/* Two buffers on GPU 0, one each on 1 and 2. */
static struct buffer four[4];

static void open_four(void)
{
    for (int i = 0; i < 4; i++)
        buffer_open(&four[i], i < 2 ? 0 : i - 1);
}

static void close_four(void)
{
    for (int i = 0; i < 4; i++)
        buffer_close(&four[i]);
}

static void fill_four(void)
{
    for (int i = 0; i < 4; i++)
        fill(&four[i], false);
}

static void compare_four(const char *what)
{
    for (int i = 0; i < 4; i++)
        compare(&four[i], what);
}

/* A fold of `four` in place, n elements from `at` on. */
static struct hrd_work *fold_four(uint64_t at, uint64_t n, struct outcome *o)
{
    struct hrd_work *w = work(HRD_WORK_FOLD, hrk_fold_single(HRP_I32, HRP_SUM, 4), n, o);
    for (int i = 0; i < 4; i++)
        source(w, four[i].span, at * 4);
    for (int i = 0; i < 4; i++)
        sink(w, four[i].span, at * 4);
    return w;
}

static void expect_fold(uint64_t at, uint64_t n)
{
    struct hrk_fold fold = hrk_fold_single(HRP_I32, HRP_SUM, 4);
    const void *src[4];
    void *dst[4];
    for (int i = 0; i < 4; i++)
        src[i] = dst[i] = four[i].host + at * 4;
    hrk_fold(&fold, dst, 4, src, 4, n);
}

static void folds(void)
{
    open_world(60000, BOUNCE);
    open_four();
    static const uint64_t counts[] = {1, 7, 1000, 40001};
    for (unsigned type = 0; type < HRP_NDTYPES; type++)
        for (unsigned op = 0; op < HRP_NREDOPS; op++) {
            uint64_t n = counts[(type + op) % 4];
            one_fold(four, 4, hrk_fold_single(type, op, 4), n, (type + op) % 2, op == 1);
        }
    one_fold(four, 4, hrk_fold_single(HRP_F32, HRP_SUM, 4), 5 * MIB / 4 + 3, true, false);
    one_fold(four, 3, hrk_fold_single(HRP_BF16, HRP_AVG, 3), 5 * MIB / 4 + 3, false, true);
    one_fold(four, 1, hrk_fold_single(HRP_I8, HRP_SUM, 1), 5 * MIB / 2 + 1, false, false);
    /* A partial that is wider than its inputs, into the arena; and back. */
    struct outcome o = {0};
    uint64_t n = MIB + 77;
    struct hrk_fold up = hrk_fold_partial(HRP_F16, HRP_F32, HRP_SUM, 4),
                    down = hrk_fold_total(HRP_F32, HRP_F16, HRP_SUM, NULL, 4);
    float *want = malloc(n * 4);
    const void *src[4];
    void *dst[1] = {want};
    struct hrd_work *w = work(HRD_WORK_FOLD, up, n, &o);
    for (int i = 0; i < 4; i++) {
        fill(&four[i], true);
        src[i] = four[i].host + 2;
        source(w, four[i].span, 2);
    }
    sink(w, host_span(arena), 128);
    hrk_fold(&up, dst, 1, src, 4, n);
    engine->table->submit(engine, w);
    finish(&o);
    CHECK(!o.failed && memcmp(arena + 128, want, n * 4) == 0);
    free(w);
    o = (struct outcome){0};
    w = work(HRD_WORK_FOLD, down, n, &o);
    source(w, host_span(arena), 128);
    for (int i = 0; i < 4; i++)
        sink(w, four[i].span, 1);
    engine->table->submit(engine, w);
    finish(&o);
    CHECK(!o.failed);
    src[0] = want;
    for (int i = 0; i < 4; i++) {
        dst[0] = four[i].host + 1;
        hrk_fold(&down, dst, 1, src, 1, n);
        compare(&four[i], "total");
    }
    free(w);
    free(want);
    CHECK(fake_gpu_calls("LaunchKernel") == 0 && fake_gpu_calls("MemcpyDtoDAsync") == 0);
    close_four();
    close_world();
}

/* A driver that takes many copies in one call: what fails there fails its work alone. */
static void together(void)
{
    setenv("FAKE_CUDA_VERSION", "12080", 1);
    setenv("FAKE_CUDA_FAIL", "MemcpyBatchAsync=1@5", 1);
    setenv("FAKE_CUDA_NO_P2P", "0-1,0-2,1-2", 1);
    open_world(60000, BOUNCE);
    open_four();
    unsigned failed = 0;
    fill_four();
    for (int k = 0; k < 3; k++) {
        struct outcome o = {0};
        struct hrd_work *w = fold_four(0, 900000, &o);
        engine->table->submit(engine, w);
        finish(&o);
        failed += o.failed;
        if (o.failed)
            CHECK(!o.lost && strstr(o.text, "INVALID_VALUE") && strstr(o.text, "the host"));
        free(w);
    }
    CHECK(failed == 1);
    unsigned singly = fake_gpu_calls("MemcpyDtoHAsync"), calls = fake_gpu_calls("MemcpyBatchAsync");
    one_fold(four, 2, hrk_fold_single(HRP_F32, HRP_SUM, 2), 5 * MIB / 4 + 3, true, true); /* both on GPU 0 */
    CHECK(fake_gpu_calls("MemcpyBatchAsync") > calls + 4);
    CHECK(fake_gpu_calls("MemcpyDtoHAsync") == singly + 2); /* by compare() */
    one_fold(four, 4, hrk_fold_single(HRP_BF16, HRP_SUM, 4), 700001, false, false);
    close_four();
    close_world();
}

static void one_copy(struct hrd_span from, const unsigned char *from_host, struct buffer *b, unsigned nb,
                     uint64_t n)
{
    struct outcome o = {0};
    struct hrd_work *w = work(HRD_WORK_COPY, (struct hrk_fold){.in = HRP_U8, .out = HRP_U8}, n, &o);
    unsigned char *content = malloc(n), *plain = calloc(1, n);
    memcpy(content, from_host, n);
    source(w, from, 0);
    for (unsigned i = 0; i < nb; i++)
        sink(w, b[i].span, 100 + i);
    sink(w, host_span(arena + BYTES), 5);
    sink(w, host_span(plain), 0);
    memset(arena + BYTES, 0, BYTES);
    engine->table->submit(engine, w);
    finish(&o);
    CHECK(!o.failed);
    for (unsigned i = 0; i < nb; i++) {
        memcpy(b[i].host + 100 + i, content, n);
        compare(&b[i], "copy");
    }
    CHECK(memcmp(arena + BYTES + 5, content, n) == 0 && memcmp(plain, content, n) == 0);
    free(w);
    free(content);
    free(plain);
}

static void copies(void)
{
    setenv("FAKE_CUDA_ZERO_PAIRS", "0-2", 1);
    setenv("FAKE_CUDA_NO_P2P", "1-2", 1);
    open_world(60000, BOUNCE);
    open_four();
    const char *why = NULL;
    CHECK(hrd_gpus_pair(gpus, 0, 1, &why) && !why);
    CHECK(!hrd_gpus_pair(gpus, 0, 2, &why) && strstr(why, "damaged"));
    CHECK(!hrd_gpus_pair(gpus, 1, 2, &why) && strstr(why, "cannot access"));
    struct hrd_gpu_pair_info found[8];
    CHECK(hrd_gpus_pairs(gpus, found, 8) == 3 && hrd_gpus_pairs(gpus, NULL, 0) == 3);
    CHECK(found[0].state == HRD_PAIR_DIRECT && found[0].bytes_per_s > 0 && !found[0].why[0]);
    CHECK(found[1].state == HRD_PAIR_BAD && strstr(found[1].why, "damaged"));
    CHECK(strcmp(found[1].id[0], "0000:10:00.0") == 0 && strcmp(found[1].id[1], "0000:30:00.0") == 0);
    CHECK(found[2].state == HRD_PAIR_REFUSED && strstr(found[2].why, "cannot access"));
    unsigned char *plain = malloc(3 * MIB);
    unsigned peers = fake_gpu_calls("MemcpyPeerAsync");
    static const uint64_t sizes[] = {1, 4097, 3 * MIB - 500};
    for (int k = 0; k < 3; k++) {
        uint64_t n = sizes[k];
        fill_four();
        for (uint64_t i = 0; i < n; i++)
            arena[i] = (char)(plain[i] = (unsigned char)fake_gpu_random());
        one_copy(host_span(plain), plain, four, 4, n);
        one_copy(host_span(arena), plain, four, 4, n);
        one_copy(four[1].span, four[1].host, &four[2], 2,
                 n); /* from GPU 0 to 1 directly, to 2 through the host */
        one_copy(four[3].span, four[3].host, four, 3, n);
        one_copy(four[0].span, four[0].host, &four[1], 1, n); /* within one GPU */
    }
    CHECK(fake_gpu_calls("MemcpyPeerAsync") > peers);
    CHECK(fake_gpu_calls("MemcpyDtoDAsync") == 0 && fake_gpu_calls("LaunchKernel") == 0);
    free(plain);
    close_four();
    close_world();
}

static void hanging_pair(void)
{
    setenv("FAKE_CUDA_HANG_PAIRS", "0-1", 1);
    pair_ms = 1000;
    open_world(60000, BOUNCE);
    struct buffer b[2];
    const char *why = NULL;
    buffer_open(&b[0], 0);
    buffer_open(&b[1], 1); /* the trial has a time limit */
    CHECK(!hrd_gpus_pair(gpus, 0, 1, &why) && strstr(why, "did not end in time"));
    fill(&b[0], false);
    fill(&b[1], false);
    one_copy(b[0].span, b[0].host, &b[1], 1, MIB);
    /* What hangs cannot be taken down; a sanitizer's _exit() would complain of its threads. */
    syscall(SYS_exit_group, 0);
}

static void nan_fill(void)
{
    open_world(60000, BOUNCE);
    open_four();
    struct outcome o = {0};
    uint64_t n = MIB / 4 + 5;
    struct hrd_work *w = work(HRD_WORK_NAN, (struct hrk_fold){.in = HRP_F32, .out = HRP_F32}, n, &o);
    for (int i = 0; i < 4; i++) {
        fill(&four[i], false);
        sink(w, four[i].span, 4);
    }
    engine->table->submit(engine, w);
    finish(&o);
    for (int i = 0; i < 4; i++) {
        hrk_fill_nan(HRP_F32, four[i].host + 4, n);
        compare(&four[i], "NaN");
    }
    free(w);
    close_four();
    close_world();
}

/* Many works at once over little pinned memory and slow copies: each waits its turn, each ends once. */
static void crowded(void)
{
    setenv("FAKE_CUDA_DELAY", "MemcpyDtoHAsync=3000,MemcpyHtoDAsync=2000", 1);
    open_world(60000, 4 * MIB);
    open_four();
    enum { N = 24 };
    static struct outcome o[N];
    struct hrd_work *w[N];
    uint64_t n = 50000;
    fill_four();
    for (uint64_t k = 0; k < N; k++) {
        w[k] = fold_four(k * n, k == 11 ? 0 : n, &o[k]);
        engine->table->submit(engine, w[k]);
    }
    bool silent = false;
    for (int k = 0; k < N; k++, free(w[k - 1])) {
        double end = now_s() + LIMIT_S;
        while (!o[k].done) {
            turn();
            silent = silent || engine->table->silent(engine);
            CHECK(now_s() < end);
        }
        CHECK(!o[k].failed);
    }
    CHECK(silent && !engine->table->silent(engine) && !engine->table->arm(engine, 0));
    for (uint64_t k = 0; k < N; k++)
        expect_fold(k * n, k == 11 ? 0 : n);
    compare_four("crowded");
    close_four();
    close_world();
}

static bool want_them;

static bool still_wanted(const struct hrd_work *w)
{
    (void)w;
    return want_them;
}

/* Nobody wants them any more: a work that has begun ends with what is under way, one that has not at once. */
static void given_up(void)
{
    setenv("FAKE_CUDA_DELAY", "MemcpyDtoHAsync=20000", 1);
    setenv("FAKE_CUDA_NO_P2P", "0-1,0-2,1-2", 1);
    open_world(60000, BOUNCE);
    open_four();
    fill_four();
    struct outcome o[2] = {{0}};
    struct hrd_work *w[2] = {fold_four(0, BYTES / 4, &o[0]), fold_four(0, BYTES / 4, &o[1])};
    want_them = true;
    w[0]->wanted = w[1]->wanted = still_wanted;
    unsigned before = fake_gpu_calls("MemcpyDtoHAsync");
    engine->table->submit(engine, w[0]);
    engine->table->submit(engine, w[1]);
    double end = now_s() + LIMIT_S;
    while (fake_gpu_calls("MemcpyDtoHAsync") < before + 4) {
        turn();
        CHECK(now_s() < end);
    }
    CHECK(!o[0].done);
    want_them = false;
    unsigned begun = fake_gpu_calls("MemcpyDtoHAsync");
    finish(&o[0]);
    finish(&o[1]);
    CHECK(!o[0].failed && !o[1].failed);
    CHECK(fake_gpu_calls("MemcpyDtoHAsync") <= begun + 12); /* of three chunks, of dozens */
    CHECK(!engine->table->silent(engine) && !engine->table->arm(engine, 0));
    /* The memory is its owner's again. */
    fill_four();
    for (int i = 0; i < 200; i++)
        turn();
    compare_four("given up");
    struct outcome next = {0};
    struct hrd_work *n = fold_four(0, 100000, &next);
    engine->table->submit(engine, n);
    finish(&next);
    expect_fold(0, 100000);
    compare_four("the next one");
    free(w[0]);
    free(w[1]);
    free(n);
    close_four();
    close_world();
}

/* A small work does not wait for all of a large one that came before it. */
static void turns(void)
{
    setenv("FAKE_CUDA_DELAY", "MemcpyDtoHAsync=2000", 1);
    setenv("FAKE_CUDA_NO_P2P", "0-1,0-2,1-2", 1);
    open_world(60000, BOUNCE);
    open_four();
    fill_four();
    const uint64_t small = 1000, large = BYTES / 4 - small;
    struct outcome o[2] = {{0}};
    struct hrd_work *w[2] = {fold_four(0, large, &o[0]), fold_four(large, small, &o[1])};
    engine->table->submit(engine, w[0]);
    engine->table->submit(engine, w[1]);
    finish(&o[0]);
    finish(&o[1]);
    CHECK(!o[0].failed && !o[1].failed && o[1].done < o[0].done);
    expect_fold(0, large + small);
    compare_four("turns");
    free(w[0]);
    free(w[1]);
    close_four();
    close_world();
}

static void put_line(const char *root, const char *path, const char *line)
{
    char full[512], command[600];
    snprintf(full, sizeof(full), "%s/%s", root, path);
    snprintf(command, sizeof(command), "mkdir -p $(dirname %s)", full);
    CHECK(system(command) == 0);
    FILE *f = fopen(full, "we");
    CHECK(f != NULL);
    fputs(line, f);
    fclose(f);
}

static bool all_zero(const struct pinned_range *r)
{
    for (uint64_t i = 0; i < r->bytes; i++)
        if (r->base[i])
            return false;
    return true;
}

/* What comes from a GPU passes through memory of the GPU's node. */
static void numa(void)
{
    char root[] = "/tmp/test-numa-XXXXXX", command[64];
    CHECK(mkdtemp(root) != NULL);
    put_line(root, "devices/system/node/online", "0-1\n");
    put_line(root, "bus/pci/devices/0000:10:00.0/numa_node", "1\n");
    put_line(root, "bus/pci/devices/0000:20:00.0/numa_node", "0\n");
    put_line(root, "bus/pci/devices/0000:30:00.0/numa_node", "-1\n");
    setenv("FAKE_CUDA_DEVICES", "3", 1);
    setenv("FAKE_CUDA_NO_P2P", "0-1,0-2,1-2", 1);
    sysfs = root;
    open_world(60000, 2 * BOUNCE);
    CHECK(gpus->nranges == 3 && gpus->range[1].bytes == BOUNCE && gpus->range[2].bytes == BOUNCE);
    open_four();
    static const unsigned node[3] = {1, 0, 0};
    for (int16_t g = 0; g < 3; g++)
        CHECK(hrd_gpus_dev(gpus, g)->numa == node[g]);
    CHECK(all_zero(&gpus->range[1]) && all_zero(&gpus->range[2]));
    one_fold(four, 2, hrk_fold_single(HRP_I32, HRP_SUM, 2), 400000, true, false); /* both on GPU 0 */
    CHECK(all_zero(&gpus->range[1]) && !all_zero(&gpus->range[2]));
    one_fold(four, 4, hrk_fold_single(HRP_I32, HRP_SUM, 4), 700001, true, false);
    CHECK(!all_zero(&gpus->range[1]));
    close_four();
    close_world();
    snprintf(command, sizeof(command), "rm -r %s", root);
    CHECK(system(command) == 0);
}

static struct outcome try_fold(uint64_t n)
{
    struct outcome o = {0};
    struct hrd_work *w = fold_four(0, n, &o);
    engine->table->submit(engine, w);
    finish(&o);
    free(w);
    return o;
}

/* A call that fails fails its work, in words, and nothing else. */
static void failing_calls(void)
{
    setenv("FAKE_CUDA_FAIL", "MemcpyDtoHAsync=2@7,MemcpyHtoDAsync=1@13,EventRecord=2@9,EventCreate=2@3", 1);
    setenv("FAKE_CUDA_NO_P2P", "0-1,0-2,1-2", 1); /* no trials that make such calls */
    open_world(60000, 4 * MIB);
    open_four();
    fill_four(); /* 4 copies to the device */
    unsigned failed = 0;
    for (int k = 0; k < 8; k++) {
        struct outcome o = try_fold(900000);
        failed += o.failed;
        if (o.failed)
            CHECK(!o.lost && strstr(o.text, "GPU 0") && strstr(o.text, "failed"));
    }
    CHECK(failed == 2);
    events_refused = 1; /* its copies are found to have ended by asking the stream */
    CHECK(!hrd_gpus_lost(gpus, UINT64_MAX));
    one_fold(four, 4, hrk_fold_single(HRP_I32, HRP_SUM, 4), 700001, true, false);
    close_four();
    close_world();
}

/* The same in the trial of a pair: what is in flight ends before its memory goes. */
static void failing_trials(void)
{
    setenv("FAKE_CUDA_FAIL", "MemcpyDtoHAsync=2@3,MemcpyPeerAsync=1@12,EventRecord=2@40", 1);
    setenv("FAKE_CUDA_DELAY", "MemcpyPeerAsync=5000", 1);
    open_world(60000, 4 * MIB);
    open_four();
    fill_four();
    one_fold(four, 4, hrk_fold_single(HRP_I32, HRP_SUM, 4), 700001, true, false);
    close_four();
    close_world();
}

/* After a sticky error the GPU takes nothing any more, and says why and what to do. */
static void lost_device(void)
{
    setenv("FAKE_CUDA_FAIL", "run:MemcpyPeerAsync=700@1", 1);
    setenv("FAKE_CUDA_NO_P2P", "0-2,1-2", 1);
    setenv("FAKE_CUDA_DEVICES", "3", 1);
    open_world(60000, 4 * MIB);
    buffer_open(&four[0], 0);
    buffer_open(&four[1], 0);
    buffer_open(&four[2], 2);
    buffer_open(&four[3], 2);
    /* The job's own mistake kills every context of this process: as a kernel that runs wild does under MPS. */
    OK(drv->CtxSetCurrent(job_ctx(0)));
    OK(drv->MemcpyPeerAsync(four[0].job, job_ctx(0), four[1].job, job_ctx(0), 64, HRG_STREAM_PER_THREAD));
    (void)drv->StreamSynchronize(HRG_STREAM_PER_THREAD);
    struct outcome o = try_fold(900000);
    CHECK(o.failed && o.lost && strstr(o.text, "700"));
    const char *why = hrd_gpus_lost(gpus, UINT64_MAX);
    CHECK(why && strstr(why, "restart hreduced"));
    struct hrd_engine_ask ask = {.gpus = 1};
    CHECK(engine->table->refuses(engine, &ask) == hrd_gpus_lost(gpus, 1));
    o = try_fold(900000);
    CHECK(o.failed && o.lost);
    struct hrd_gpu_source s = {.uid = 1, .msg = {.bytes = 4096, .kind = HRP_GPU_LEGACY}};
    memcpy(s.msg.uuid, hrd_gpus_dev(gpus, 0)->uuid.bytes, 16);
    struct hrd_gpu_event *ev = import(&s);
    CHECK(!ev->import && strstr(ev->text, "lost"));
    free(ev);
    for (int i = 0; i < 4; i++) {
        hrd_gpus_close(gpus, 7, 9, four[i].import);
        free(answer(HRD_GPU_CLOSED));
    }
    hrd_gpus_stop(gpus);
    _exit(0);
}

/* Each GPU is lost for itself, and the sentence is about it. */
static void lost_apart(void)
{
    setenv("FAKE_CUDA_DEVICES", "3", 1);
    open_world(60000, 4 * MIB);
    struct hrd_engine_ask first = {.gpus = 1}, third = {.gpus = 4}, both = {.gpus = 5};
    char why[400];
    buffer_open(&four[0], 0);
    buffer_open(&four[1], 2);
    CHECK(hrd_gpu_failed(hrd_gpus_dev(gpus, 2), HRG_ERROR_LAUNCH_FAILED, "a test", why, sizeof(why)));
    CHECK(!engine->table->refuses(engine, &first));
    const char *said = engine->table->refuses(engine, &third);
    CHECK(said && strstr(said, hrd_gpus_dev(gpus, 2)->pci));
    CHECK(engine->table->refuses(engine, &both) == said);
    CHECK(hrd_gpu_failed(hrd_gpus_dev(gpus, 0), HRG_ERROR_LAUNCH_FAILED, "a test", why, sizeof(why)));
    CHECK(engine->table->refuses(engine, &third) == said);
    said = engine->table->refuses(engine, &first);
    CHECK(said && strstr(said, hrd_gpus_dev(gpus, 0)->pci));
    buffer_close(&four[0]);
    buffer_close(&four[1]);
    close_world();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FAKE_GPU_TEST(folds),          FAKE_GPU_TEST(copies),      FAKE_GPU_TEST(hanging_pair),
        FAKE_GPU_TEST(nan_fill),       FAKE_GPU_TEST(crowded),     FAKE_GPU_TEST(failing_calls),
        FAKE_GPU_TEST(failing_trials), FAKE_GPU_TEST(lost_device), FAKE_GPU_TEST(lost_apart),
        FAKE_GPU_TEST(given_up),       FAKE_GPU_TEST(turns),       FAKE_GPU_TEST(numa),
        FAKE_GPU_TEST(together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
