/* SPDX-License-Identifier: MIT */
/*
 * Memory of other processes as the kernels of several GPUs see it: whichever GPU comes up first, when contexts refuse it,
 * until all is closed again. Exporters are processes of their own; on the fake, as on a GPU, an IPC handle opened in one
 * context is of no use to the kernels of another.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/gpu/engine_sm.h"
#include "daemon/gpu/gpu.h"
#include "kernels/kernels.h"
#include "tests/sim/fake_gpu.h"

#define NGPUS 3
#define N 50021u
#define BYTES ((uint64_t)N * 4)

static const struct hrg_driver *drv;
static struct hrd_gpus *gpus;
static struct hrd_engine *engine, *host_engine;
static uint32_t *got; /* pinned */

/* An allocation of another process, and what is in it. */
static struct exported {
    pid_t pid;
    int to;
    int gpu;
    struct hrg_ipc_handle handle;
    uint32_t holds[N];
    struct hrd_gpu_import *import;
    uint64_t device;
} memory[2 * NGPUS];

static unsigned open_handles(void)
{
    return fake_gpu_calls("IpcOpenMemHandle") - fake_gpu_calls("IpcCloseMemHandle");
}

static void exporter(const struct exported *m, int up, int down)
{
    hrg_ctx ctx;
    hrg_ptr ptr;
    void *host;
    char c;
    struct hrg_ipc_handle handle;
    alarm(5 * LIMIT_S);
    unsetenv("FAKE_CUDA_FAIL"); /* the orders are the daemon's */
    drv = fake_gpu_driver();
    OK(drv->DevicePrimaryCtxRetain(&ctx, m->gpu));
    OK(drv->CtxSetCurrent(ctx));
    OK(drv->MemAlloc(&ptr, BYTES));
    OK(drv->MemHostAlloc(&host, BYTES, 0));
    memcpy(host, m->holds, BYTES);
    OK(drv->MemcpyHtoDAsync(ptr, host, BYTES, HRG_STREAM_PER_THREAD));
    OK(drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
    OK(drv->IpcGetMemHandle(&handle, ptr));
    CHECK(write(up, &handle, sizeof(handle)) == sizeof(handle));
    while (read(down, &c, 1) == 1)
        ;
    _exit(0);
}

/* Before the fake is initialised in this process: its threads would not follow a fork. */
static void export_on(struct exported *m, int gpu)
{
    int down[2], up[2];
    CHECK(pipe(down) == 0 && pipe(up) == 0);
    m->gpu = gpu;
    for (unsigned i = 0; i < N; i++)
        m->holds[i] = (uint32_t)fake_gpu_random();
    m->pid = fork();
    CHECK(m->pid >= 0);
    if (m->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* whom a test leaves does not outlive it */
        close(down[1]);
        exporter(m, up[1], down[0]);
    }
    close(down[0]);
    close(up[1]);
    CHECK(read(up[0], &m->handle, sizeof(m->handle)) == sizeof(m->handle));
    close(up[0]);
    m->to = down[1];
}

static void open_world(uint32_t idle_ms)
{
    fake_gpu_seed();
    for (int i = 0; i < 2 * NGPUS; i++)
        export_on(&memory[i], i % NGPUS);
    drv = fake_gpu_driver();
    struct hrd_gpus_config cfg = {.idle_ms = idle_ms, .pair_ms = 20000, .node_name = "here"};
    gpus = hrd_gpus_new(&cfg);
    host_engine = hrd_engine_host_new(0, 1 << 20, -1);
    engine = hrd_engine_sm_new(gpus, host_engine);
    CHECK(gpus && host_engine && engine);
    hrg_ctx ctx;
    void *p;
    OK(drv->DevicePrimaryCtxRetain(&ctx, 0));
    OK(drv->CtxSetCurrent(ctx));
    OK(drv->MemHostAlloc(&p, BYTES, HRG_HOST_PORTABLE));
    got = p;
}

static void close_world(void)
{
    hrd_gpus_stop(gpus);
    CHECK(open_handles() == 0);
    engine->table->free(engine);
    host_engine->table->free(host_engine);
    hrd_gpus_free(gpus);
    for (int i = 0; i < 2 * NGPUS; i++) {
        close(memory[i].to);
        kill(memory[i].pid, SIGKILL); /* others hold copies of its pipe */
        waitpid(memory[i].pid, NULL, 0);
    }
}

static struct hrd_gpu_event *answer(enum hrd_gpu_event_type type)
{
    struct hrd_gpu_event *ev;
    for (int i = 0; !(ev = hrd_gpus_take_events(gpus)); i++) {
        struct pollfd p = {.fd = hrd_gpus_event_fd(gpus), .events = POLLIN};
        CHECK(i < LIMIT_S);
        poll(&p, 1, 1000);
    }
    CHECK(ev->next == NULL && ev->type == type);
    return ev;
}

static struct hrd_gpu_import *import_as(struct exported *m, uid_t uid)
{
    struct hrd_gpu_source s = {.uid = uid, .msg = {.bytes = BYTES, .kind = HRP_GPU_LEGACY}};
    struct hrg_uuid uuid;
    OK(hrg_device_uuid(drv, m->gpu, &uuid));
    memcpy(s.msg.uuid, uuid.bytes, 16);
    memcpy(s.msg.handle, m->handle.data, sizeof(s.msg.handle));
    hrd_gpus_import(gpus, 1, 1, &s);
    struct hrd_gpu_event *ev = answer(HRD_GPU_IMPORTED);
    if (!ev->import)
        fprintf(stderr, "%s\n", ev->text);
    CHECK(ev->import != NULL && ev->gpu == m->gpu);
    struct hrd_gpu_import *import = ev->import;
    m->device = ev->device;
    free(ev);
    return import;
}

static void import(struct exported *m)
{
    m->import = import_as(m, 1);
}

static void close_import(struct hrd_gpu_import *i)
{
    hrd_gpus_close(gpus, 1, 2, i);
    free(answer(HRD_GPU_CLOSED));
}

static void wait_down(int gpu)
{
    struct hrd_gpu_info info[NGPUS];
    uint64_t pinned;
    char uuid[HRG_UUID_TEXT];
    hrg_uuid_text(&hrd_gpus_dev(gpus, (int16_t)gpu)->uuid, 0, uuid);
    for (int i = 0;; i++) {
        unsigned n = hrd_gpus_info(gpus, info, NGPUS, &pinned);
        bool up = false;
        for (unsigned k = 0; k < n; k++)
            up = up || (info[k].up && strcmp(info[k].uuid, uuid) == 0);
        if (!up)
            return;
        CHECK(i < LIMIT_S * 1000);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

/* ---- work ---------------------------------------------------------------------------------------------------- */

struct outcome {
    bool done, failed;
    char text[HRD_WORK_TEXT];
};

static void done(struct hrd_work *w, const struct hrd_work_error *error)
{
    struct outcome *o = w->owner;
    o->done = true;
    o->failed = error != NULL;
    if (error)
        memcpy(o->text, error->text, sizeof(o->text));
    free(w);
}

/* The sum of all `n` into all of them, as one node does it; then every element is looked at. */
static void sum(struct exported *const *m, unsigned n)
{
    struct outcome o = {0};
    struct hrd_work *w = calloc(1, sizeof(*w) + 2 * (size_t)n * sizeof(w->span[0]));
    CHECK(w != NULL);
    w->kind = HRD_WORK_FOLD;
    w->fold = hrk_fold_single(HRP_U32, HRP_SUM, n);
    w->n = N;
    w->owner = &o;
    w->done = done;
    w->nsrc = w->ndst = n;
    for (unsigned i = 0; i < 2 * n; i++)
        w->span[i] =
            (struct hrd_span){.base = (char *)(uintptr_t)m[i % n]->device, .gpu = (int16_t)m[i % n]->gpu};
    for (unsigned i = 0; i < N; i++) {
        uint32_t total = 0;
        for (unsigned k = 0; k < n; k++)
            total += m[k]->holds[i];
        for (unsigned k = 0; k < n; k++)
            m[k]->holds[i] = total;
    }
    engine->table->submit(engine, w);
    for (int i = 0; !o.done; i++) {
        CHECK(i < LIMIT_S * 10000);
        if (engine->table->poll(engine) == 0)
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    if (o.failed)
        fprintf(stderr, "%s\n", o.text);
    CHECK(!o.failed);
    for (unsigned k = 0; k < n; k++) {
        memset(got, 0xee, BYTES);
        OK(drv->MemcpyDtoHAsync(got, m[k]->device, BYTES, HRG_STREAM_PER_THREAD));
        OK(drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
        for (unsigned i = 0; i < N; i++)
            CHECK(got[i] == m[k]->holds[i]);
    }
}

static uint64_t view(const struct exported *m, int at)
{
    return hrd_gpus_view(gpus, (int16_t)m->gpu, (int16_t)at, m->device);
}

static const char *refusal(uint64_t mask)
{
    static struct hrd_engine_ask ask;
    ask = (struct hrd_engine_ask){.gpus = mask, .nlocal = 2, .one_node = true};
    return engine->table->refuses(engine, &ask);
}

/* ---- tests --------------------------------------------------------------------------------------------------- */

/* A GPU that comes up takes what is imported; an import goes to all that are up. */
static void every_gpu_has_its_own(void)
{
    open_world(60000);
    import(&memory[0]);
    CHECK(open_handles() == 1 && view(&memory[0], 1) == 0);
    import(&memory[1]); /* GPU 1 comes up */
    CHECK(open_handles() == 4);
    import(&memory[2]);
    CHECK(open_handles() == 9);
    import(&memory[3]); /* on GPU 0 again, and all are up */
    CHECK(open_handles() == 12);
    for (int i = 0; i < 4; i++)
        for (int at = 0; at < NGPUS; at++)
            if (at != memory[i].gpu) {
                uint64_t there = view(&memory[i], at);
                CHECK(there != 0 && there != memory[i].device);
                CHECK(hrd_gpus_view(gpus, (int16_t)memory[i].gpu, (int16_t)at,
                                    memory[i].device + 4 * N - 1) == there + 4 * N - 1);
                CHECK(hrd_gpus_view(gpus, (int16_t)memory[i].gpu, (int16_t)at, memory[i].device + 4 * N) !=
                      there + 4 * N);
            }
    CHECK(refusal(7) == NULL);
    sum((struct exported *[]){&memory[0], &memory[1], &memory[2], &memory[3]}, 4);

    /* Another user's import of the same allocation: the driver counts, and either may go first. */
    struct hrd_gpu_import *other = import_as(&memory[0], 2);
    CHECK(other != memory[0].import && open_handles() == 15);
    close_import(memory[0].import);
    CHECK(open_handles() == 12);
    sum((struct exported *[]){&memory[0], &memory[1]}, 2);
    close_import(other);
    CHECK(open_handles() == 9 && view(&memory[0], 1) == 0);

    /* Its owner dies in between: what is open stays. */
    kill(memory[3].pid, SIGKILL);
    sum((struct exported *[]){&memory[3], &memory[1], &memory[2]}, 3);

    /* Closed and opened again it may lie elsewhere; nobody remembers the old place. */
    close_import(memory[1].import);
    import(&memory[4]);
    import(&memory[1]);
    sum((struct exported *[]){&memory[3], &memory[4], &memory[1]}, 3);
    for (int i = 1; i < 5; i++)
        close_import(memory[i].import);
    CHECK(open_handles() == 0);
    close_world();
}

/* A GPU that goes down lets go of the others' memory, and takes it again. */
static void down_and_up(void)
{
    open_world(50);
    import(&memory[0]);
    for (int i = 0; i < 2; i++) {
        import(&memory[1]);
        CHECK(open_handles() == 4);
        sum((struct exported *[]){&memory[0], &memory[1]}, 2);
        close_import(memory[1].import);
        wait_down(1);
        for (int k = 0; open_handles() != 1; k++) {
            CHECK(k < LIMIT_S * 1000);
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
        CHECK(view(&memory[0], 1) == 0);
    }
    close_import(memory[0].import);
    close_world();
}

/* One context refuses: the import is there, operations over that pair are refused in words until it is gone. */
static void one_refusal(const char *order, int owner, int at)
{
    struct exported *const m = &memory[owner], *const another = &memory[owner + NGPUS];
    const char *why;
    setenv("FAKE_CUDA_FAIL", order, 1);
    open_world(60000);
    import(&memory[0]);
    import(&memory[1]);
    CHECK(fake_gpu_calls("IpcOpenMemHandle") == 4);
    CHECK((why = refusal(3)) && strstr(why, hrd_gpus_dev(gpus, 0)->pci) &&
          strstr(why, hrd_gpus_dev(gpus, 1)->pci) && strstr(why, "cuIpcOpenMemHandle") && strstr(why, "205"));
    CHECK(view(m, at) == 0 && view(&memory[at], owner) != 0);
    CHECK(hrd_gpus_pair(gpus, 0, 1, &why) && refusal(1) == NULL && refusal(2) == NULL);
    import(another); /* it changes nothing for the first */
    CHECK(view(another, at) != 0 && refusal(3));
    close_import(m->import);
    CHECK(refusal(3) == NULL);
    import(m);
    CHECK(refusal(3) == NULL);
    sum((struct exported *[]){&memory[0], &memory[1], another}, 3);
    close_import(memory[0].import);
    close_import(memory[1].import);
    close_import(another->import);
    CHECK(open_handles() == 1); /* what was refused is not closed */
    hrd_gpus_stop(gpus);
    _exit(0);
}

static void refused_when_a_gpu_comes_up(void)
{
    one_refusal("IpcOpenMemHandle=205@2", 0, 1);
}

static void refused_when_memory_is_imported(void)
{
    one_refusal("IpcOpenMemHandle=205@4", 1, 0);
}

/* A mapping of cuMemMap has one address for all whom cuMemSetAccess names, or belongs to its own GPU alone. */
static void vmm(void)
{
    setenv("FAKE_CUDA_FAIL", "MemSetAccess=801@2", 1);
    open_world(60000);
    import(&memory[1]);
    for (int i = 0; i < 2; i++) {
        struct hrg_mem_prop prop = {.type = HRG_ALLOCATION_PINNED,
                                    .requested_handle_types = HRG_HANDLE_POSIX_FD,
                                    .location = {.type = HRG_LOCATION_DEVICE, .id = 0}};
        struct hrd_gpu_source s = {.uid = 1, .msg = {.bytes = 2 << 20, .kind = HRP_GPU_VMM, .nparts = 1}};
        const char *why;
        hrg_handle h;
        memcpy(s.msg.uuid, hrd_gpus_dev(gpus, 0)->uuid.bytes, 16);
        s.fd = calloc(1, sizeof(int));
        s.part_bytes = calloc(1, sizeof(uint64_t));
        s.part_bytes[0] = s.msg.bytes;
        OK(drv->MemCreate(&h, s.msg.bytes, &prop, 0));
        OK(drv->MemExportToShareableHandle(&s.fd[0], h, HRG_HANDLE_POSIX_FD, 0));
        hrd_gpus_import(gpus, 1, 1, &s);
        struct hrd_gpu_event *ev = answer(HRD_GPU_IMPORTED);
        CHECK(ev->import != NULL);
        if (i == 0) {
            CHECK(hrd_gpus_view(gpus, 0, 1, ev->device + 5) == ev->device + 5 && refusal(3) == NULL);
        } else {
            CHECK(hrd_gpus_view(gpus, 0, 1, ev->device) == 0);
            CHECK((why = refusal(3)) && strstr(why, "cuMemSetAccess") && strstr(why, "801") &&
                  strstr(why, hrd_gpus_dev(gpus, 0)->pci) && strstr(why, hrd_gpus_dev(gpus, 1)->pci));
        }
        close_import(ev->import);
        CHECK(refusal(3) == NULL);
        free(ev);
    }
    close_import(memory[1].import);
    close_world();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FAKE_GPU_TEST(every_gpu_has_its_own),
        FAKE_GPU_TEST(down_and_up),
        FAKE_GPU_TEST(refused_when_a_gpu_comes_up),
        FAKE_GPU_TEST(refused_when_memory_is_imported),
        FAKE_GPU_TEST(vmm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
