/* SPDX-License-Identifier: MIT */
/* GPU memory of jobs in the daemon, on the fake driver: imported, shared, refused, and GPUs that come up and go idle. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <signal.h>
#include <sys/wait.h>

#include "tests/unit/gpu_world.h"

static void refusals(void)
{
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    open_world(60000, 4 * MIB);
    hrg_ptr ptr;
    OK(drv->CtxSetCurrent(job_ctx(1)));
    struct hrd_gpu_source s = vmm_source(1, &ptr, 4 * MIB, 2);
    memset(s.msg.uuid, 9, 16);
    struct hrd_gpu_event *ev = import(&s);
    CHECK(!ev->import && strstr(ev->text, "GPU-09090909-"));
    free(ev);
    s = vmm_source(1, &ptr, 4 * MIB, 2);
    memcpy(s.msg.uuid, hrd_gpus_dev(gpus, 0)->uuid.bytes, 16); /* another device than it is on */
    ev = import(&s);
    CHECK(!ev->import && strstr(ev->text, "memory of device 1"));
    free(ev);
    s = vmm_source(1, &ptr, 4 * MIB, 2);
    s.part_bytes[1] = s.msg.bytes = 8 * MIB; /* more than there is */
    s.part_bytes[1] -= 2 * MIB;
    ev = import(&s);
    CHECK(!ev->import && strstr(ev->text, "cuMemMap"));
    free(ev);
    s = vmm_source(1, &ptr, 4 * MIB, 2);
    close(s.fd[1]);
    s.fd[1] = dup(0); /* no handle at all */
    ev = import(&s);
    CHECK(!ev->import && strstr(ev->text, "cuMemImportFromShareableHandle"));
    free(ev);
    struct hrd_gpu_source l = {.uid = 1, .msg = {.bytes = 4096, .kind = HRP_GPU_LEGACY, .handle = {1, 2, 3}}};
    memcpy(l.msg.uuid, hrd_gpus_dev(gpus, 0)->uuid.bytes, 16);
    ev = import(&l);
    CHECK(!ev->import && strstr(ev->text, "cuIpcOpenMemHandle") && strstr(ev->text, "--ipc=host"));
    free(ev);
    uint64_t pinned;
    struct hrd_gpu_info info[4];
    CHECK(hrd_gpus_info(gpus, info, 4, &pinned) == 2 && info[0].imports == 0 && info[1].imports == 0);
    close_world();
}

/* A process of its own that exports an allocation, then writes a pattern when it is told to. */
struct exporter {
    pid_t pid;
    int to, from;
    struct hrg_ipc_handle handle;
};

static struct exporter exporter_start(void)
{
    int down[2], up[2];
    struct exporter e;
    CHECK(pipe(down) == 0 && pipe(up) == 0);
    e.pid = fork();
    if (e.pid == 0) {
        alarm(LIMIT_S);
        char why[200];
        hrg_ptr ptr;
        void *host;
        fake_gpu_use();
        drv = hrg_driver_get(why, sizeof(why));
        OK(drv->Init(0));
        OK(drv->CtxSetCurrent(job_ctx(0)));
        OK(drv->MemAlloc(&ptr, BYTES));
        OK(drv->MemHostAlloc(&host, BYTES, 0));
        for (uint64_t i = 0; i < BYTES; i++)
            ((unsigned char *)host)[i] = (unsigned char)(i * 31 + 7);
        OK(drv->MemcpyHtoDAsync(ptr, host, BYTES, HRG_STREAM_PER_THREAD));
        OK(drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
        OK(drv->IpcGetMemHandle(&e.handle, ptr));
        CHECK(write(up[1], &e.handle, sizeof(e.handle)) == sizeof(e.handle));
        char c;
        while (read(down[0], &c, 1) == 1)
            ;
        _exit(0);
    }
    close(down[0]);
    close(up[1]);
    e.to = down[1];
    e.from = up[0];
    CHECK(read(e.from, &e.handle, sizeof(e.handle)) == sizeof(e.handle));
    return e;
}

/* One mapping for all who import it; users apart; closed by the last; a dead exporter's memory stays readable. */
static void shared_import(void)
{
    setenv("FAKE_CUDA_DELAY", "MemcpyDtoHAsync=20000", 1);
    struct exporter x = exporter_start();
    open_world(60000, 4 * MIB);
    struct hrd_gpu_source s = {.uid = 1, .msg = {.bytes = BYTES, .kind = HRP_GPU_LEGACY}};
    struct hrg_uuid uuid;
    OK(hrg_device_uuid(drv, 0, &uuid));
    memcpy(s.msg.uuid, uuid.bytes, 16);
    memcpy(s.msg.handle, x.handle.data, sizeof(s.msg.handle));
    s.msg.bytes = BYTES + 1;
    struct hrd_gpu_event *bad = import(&s);
    CHECK(!bad->import && strstr(bad->text, "as the client says"));
    free(bad);
    s.msg.bytes = BYTES;
    unsigned opened = fake_gpu_calls("IpcOpenMemHandle"), closed = fake_gpu_calls("IpcCloseMemHandle");
    struct hrd_gpu_event *a = import(&s), *b = import(&s);
    CHECK(a->import && a->import == b->import && a->device == b->device);
    CHECK(fake_gpu_calls("IpcOpenMemHandle") == opened + 1);
    s.uid = 2;
    struct hrd_gpu_event *other = import(&s);
    CHECK(other->import && other->import != a->import);
    hrd_gpus_close(gpus, 7, 9, other->import);
    free(answer(HRD_GPU_CLOSED));
    CHECK(fake_gpu_calls("IpcCloseMemHandle") == closed + 1);
    hrd_gpus_close(gpus, 7, 9, a->import);
    free(answer(HRD_GPU_CLOSED));
    CHECK(fake_gpu_calls("IpcCloseMemHandle") == closed + 1); /* b still has it */

    struct outcome o = {0};
    struct hrd_work *w = work(HRD_WORK_COPY, (struct hrk_fold){.in = HRP_U8, .out = HRP_U8}, BYTES, &o);
    source(w, (struct hrd_span){.base = (char *)(uintptr_t)b->device, .gpu = 0}, 0);
    sink(w, host_span(arena), 0);
    engine->table->submit(engine, w);
    for (int i = 0; i < 3 && !o.done; i++)
        turn();
    CHECK(!o.done); /* copies are slow */
    kill(x.pid, SIGKILL);
    waitpid(x.pid, NULL, 0);
    finish(&o);
    CHECK(!o.failed);
    for (uint64_t i = 0; i < BYTES; i++)
        CHECK((unsigned char)arena[i] == (unsigned char)(i * 31 + 7));
    free(w);
    hrd_gpus_close(gpus, 7, 9, b->import);
    free(answer(HRD_GPU_CLOSED));
    CHECK(fake_gpu_calls("IpcCloseMemHandle") == closed + 2);
    free(a);
    free(b);
    free(other);
    close_world();
}

/* No context before the first import, none some time after the last; then all over again. */
static void idle(void)
{
    open_world(50, 4 * MIB);
    CHECK(fake_gpu_calls("DevicePrimaryCtxRetain") == 0 && fake_gpu_calls("MemHostRegister") == 0);
    for (int round = 1; round <= 2; round++) {
        struct buffer b;
        buffer_open(&b, 1);
        fill(&b, false);
        uint64_t pinned = 0;
        struct hrd_gpu_info info;
        CHECK(hrd_gpus_info(gpus, &info, 1, &pinned) == 1 && info.up && info.imports == 1 &&
              info.import_bytes == BYTES && pinned == 2 * BYTES + 4 * MIB);
        buffer_close(&b);
        double end = now_s() + LIMIT_S;
        do {
            nap();
            CHECK(hrd_gpus_info(gpus, &info, 1, &pinned) == 1 && now_s() < end);
        } while (info.up || fake_gpu_calls("DevicePrimaryCtxRelease") < (unsigned)round);
        CHECK(pinned == 0 && info.imports == 0);
    }
    close_world();
}

static void out_of_memory(void)
{
    setenv("FAKE_CUDA_FAIL", "DevicePrimaryCtxRetain=2@2,MemHostRegister=2@1,StreamCreateWithPriority=2@2",
           1);
    open_world(60000, 4 * MIB);
    registrations_refused = 1;
    static const char *const words[] = {"context cannot be made", "streams for copies", "LimitMEMLOCK="};
    for (int i = 0; i < 3; i++) {
        hrg_ptr ptr;
        OK(drv->CtxSetCurrent(job_ctx(0)));
        struct hrd_gpu_source s = vmm_source(0, &ptr, 4 * MIB, 2);
        struct hrd_gpu_event *ev = import(&s);
        if (ev->import || !strstr(ev->text, words[i]))
            fprintf(stderr, "%d: %s\n", i, ev->text);
        CHECK(!ev->import && strstr(ev->text, words[i]));
        free(ev);
    }
    struct buffer b;
    buffer_open(&b, 0); /* and then it works */
    buffer_close(&b);
    close_world();
}

/* The first GPU fails to come up while a second does: that one keeps the host memory that it relies on. */
static void first_of_two_fails(void)
{
    setenv("FAKE_CUDA_FAIL", "StreamCreateWithPriority=2@1", 1);
    setenv("FAKE_CUDA_DELAY", "call:StreamCreateWithPriority=300000", 1);
    open_world(60000, 4 * MIB);
    hrg_ptr ptr;
    OK(drv->CtxSetCurrent(job_ctx(0)));
    struct hrd_gpu_source s = vmm_source(0, &ptr, 4 * MIB, 2);
    hrd_gpus_import(gpus, 7, 9, &s);
    double end = now_s() + LIMIT_S;
    while (fake_gpu_calls("StreamCreateWithPriority") == 0) {
        nap();
        CHECK(now_s() < end);
    }
    OK(drv->CtxSetCurrent(job_ctx(1)));
    s = vmm_source(1, &ptr, 4 * MIB, 2);
    hrd_gpus_import(gpus, 7, 9, &s);
    struct hrd_gpu_event *first, *second;
    while (!(first = hrd_gpus_take_events(gpus))) {
        nap();
        CHECK(now_s() < end);
    }
    for (second = first->next; !second; second = hrd_gpus_take_events(gpus)) {
        nap();
        CHECK(now_s() < end);
    }
    CHECK(!first->import && strstr(first->text, "streams for copies"));
    CHECK(second->import && second->gpu == 1);
    struct hrd_gpu_info info[2];
    uint64_t pinned = 0;
    CHECK(hrd_gpus_info(gpus, info, 2, &pinned) == 2 && pinned == 2 * BYTES + 4 * MIB);
    CHECK(hrd_gpus_pinned(gpus, arena, 2 * BYTES));
    hrd_gpus_close(gpus, 7, 9, second->import);
    free(answer(HRD_GPU_CLOSED));
    free(first);
    free(second);
    close_world();
}

static void switched_off(void)
{
    struct hrd_gpus_config cfg = {.off = true, .node_name = "here"};
    gpus = hrd_gpus_new(&cfg);
    struct hrd_gpu_source s = {.uid = 1, .msg = {.bytes = 4096, .kind = HRP_GPU_LEGACY}};
    struct hrd_gpu_event *ev = import(&s);
    CHECK(!ev->import && strstr(ev->text, "gpu = off"));
    free(ev);
    hrd_gpus_stop(gpus);
    hrd_gpus_free(gpus);
    cfg.off = false;
    setenv("HREDUCE_CUDA_LIBRARY", "/nowhere/libcuda.so.1", 1);
    gpus = hrd_gpus_new(&cfg);
    ev = import(&s);
    CHECK(!ev->import && strstr(ev->text, "cannot be loaded"));
    free(ev);
    hrd_gpus_stop(gpus);
    hrd_gpus_free(gpus);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FAKE_GPU_TEST(refusals),      FAKE_GPU_TEST(shared_import), FAKE_GPU_TEST(idle),
        FAKE_GPU_TEST(out_of_memory), FAKE_GPU_TEST(switched_off),  FAKE_GPU_TEST(first_of_two_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
