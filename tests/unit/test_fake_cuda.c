/* SPDX-License-Identifier: MIT */
/* The driver without a GPU that GPU tests stand on: it must behave, and fail, as the driver does. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/gpu_driver.h"
#include "proto/fdpass.h"

static const struct hrg_driver *drv;
static hrg_ctx ctx[4];

#define OK(call) assert_int_equal(call, HRG_SUCCESS)

/* Beside this program, which lies in build/tests/unit. */
static void use_fake(const char *name)
{
    char self[4096], path[4200];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    assert_true(n > 0);
    self[n] = '\0';
    for (int i = 0; i < 2; i++)
        *strrchr(self, '/') = '\0';
    snprintf(path, sizeof(path), "%s/%s", self, name);
    setenv("HREDUCE_CUDA_LIBRARY", path, 1);
}

static int setup(void **state)
{
    (void)state;
    char why[512] = "";
    use_fake("libcuda_fake.so.1");
    setenv("FAKE_CUDA_FAIL", "MemGetInfo=801@2,run:MemsetD8Async=700@3", 1);
    setenv("FAKE_CUDA_ZERO_PAIRS", "2-3", 1);
    setenv("FAKE_CUDA_NO_P2P", "0-3", 1);
    drv = hrg_driver_get(why, sizeof(why));
    if (drv == NULL)
        fail_msg("%s", why);
    OK(drv->Init(0));
    for (int i = 0; i < 4; i++)
        OK(drv->DevicePrimaryCtxRetain(&ctx[i], i));
    OK(drv->CtxSetCurrent(ctx[0]));
    return 0;
}

static hrg_stream stream_new(void)
{
    hrg_stream s;
    OK(drv->StreamCreateWithPriority(&s, HRG_STREAM_NON_BLOCKING, 0));
    return s;
}

/* A word that streams can write and wait for. */
struct word {
    _Atomic uint64_t *host;
    hrg_ptr dev;
};

static struct word word_new(void)
{
    void *p;
    struct word w;
    OK(drv->MemAllocHost(&p, 64));
    w.host = p;
    atomic_store(w.host, 0);
    OK(drv->MemHostGetDevicePointer(&w.dev, p, 0));
    return w;
}

static void a_stream_works_in_order_and_waits_for_words(void **state)
{
    (void)state;
    hrg_stream s = stream_new();
    hrg_ptr d;
    unsigned char *h;
    void *p;
    struct word go = word_new(), done = word_new();
    OK(drv->MemAlloc(&d, 1000));
    OK(drv->MemAllocHost(&p, 1000));
    h = p;
    memset(h, 7, 1000);
    OK(drv->MemcpyHtoDAsync(d, h, 1000, s));
    OK(drv->StreamWaitValue64(s, go.dev, 5, HRG_WAIT_GEQ));
    OK(drv->MemcpyDtoHAsync(h, d + 1, 999, s));
    OK(drv->StreamWriteValue64(s, done.dev, 9, 0));
    assert_int_equal(drv->StreamQuery(s), HRG_ERROR_NOT_READY);
    usleep(20000);
    assert_int_equal(atomic_load(done.host), 0);
    atomic_store(go.host, UINT64_MAX); /* cyclic: this is -1, and less than 5 */
    usleep(20000);
    assert_int_equal(atomic_load(done.host), 0);
    atomic_store(go.host, INT64_MAX);
    OK(drv->StreamSynchronize(s));
    assert_int_equal(atomic_load(done.host), 9);
    OK(drv->MemFree(d));
    OK(drv->MemFreeHost(p));
    OK(drv->StreamDestroy(s));
}

static void memory_that_is_not_pinned_is_refused(void **state)
{
    (void)state;
    hrg_stream s = stream_new();
    hrg_ptr d, dev;
    static char plain[8192];
    OK(drv->MemAlloc(&d, 4096));
    assert_int_equal(drv->MemcpyHtoDAsync(d, plain, 4096, s), HRG_ERROR_INVALID_VALUE);
    OK(drv->MemHostRegister(plain, sizeof(plain), HRG_HOST_PORTABLE));
    assert_int_equal(drv->MemHostRegister(plain, 100, 0), HRG_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    OK(drv->MemcpyHtoDAsync(d, plain, 4096, s));
    assert_int_equal(drv->MemcpyHtoDAsync(d + 1, plain, 4096, s),
                     HRG_ERROR_INVALID_VALUE); /* beyond its end */
    OK(drv->MemHostGetDevicePointer(&dev, plain + 8, 0));
    assert_true(dev != (hrg_ptr)(uintptr_t)(plain + 8));
    assert_int_equal(drv->StreamWriteValue64(s, (hrg_ptr)(uintptr_t)plain, 1, 0), HRG_ERROR_INVALID_VALUE);
    OK(drv->StreamSynchronize(s));
    OK(drv->MemHostUnregister(plain));
    assert_int_equal(drv->MemHostUnregister(plain), HRG_ERROR_HOST_MEMORY_NOT_REGISTERED);
    OK(drv->MemFree(d));
    assert_int_equal(drv->MemFree(d), HRG_ERROR_INVALID_VALUE);
}

static void an_address_used_again_has_another_id(void **state)
{
    (void)state;
    hrg_ptr first = 0, d;
    unsigned long long id = 0, other = 0;
    for (int i = 0; i < 50; i++) {
        OK(drv->MemAlloc(&d, 1 << 20));
        OK(drv->PointerGetAttribute(&other, HRG_PTR_BUFFER_ID, d + 5));
        assert_true(other != id);
        if (d == first)
            break;
        first = d;
        id = other;
        OK(drv->MemFree(d));
    }
    assert_true(d == first);
    OK(drv->MemFree(d));
}

static void legacy_and_blocking_streams_wait_for_each_other(void **state)
{
    (void)state;
    hrg_stream blocking, other = stream_new();
    struct word go = word_new(), legacy = word_new(), free_one = word_new(), after = word_new();
    OK(drv->StreamCreateWithPriority(&blocking, 0, 0));
    OK(drv->StreamWaitValue64(blocking, go.dev, 1, HRG_WAIT_GEQ));
    OK(drv->StreamWriteValue64(NULL, legacy.dev, 1, 0));
    OK(drv->StreamWriteValue64(other, free_one.dev, 1, 0));
    OK(drv->StreamWriteValue64(HRG_STREAM_PER_THREAD, after.dev, 1, 0));
    OK(drv->StreamSynchronize(other));
    usleep(20000);
    assert_int_equal(atomic_load(free_one.host), 1);
    assert_int_equal(atomic_load(legacy.host), 0);
    assert_int_equal(atomic_load(after.host), 0); /* it waits for the legacy stream */
    atomic_store(go.host, 1);
    OK(drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
    assert_int_equal(atomic_load(legacy.host), 1);
    assert_int_equal(atomic_load(after.host), 1);
}

static void a_capture_forbids_what_the_driver_forbids(void **state)
{
    (void)state;
    hrg_stream s;
    hrg_graph graph;
    hrg_ptr d;
    int status, mode;
    struct word w = word_new();
    OK(drv->StreamCreateWithPriority(&s, 0, 0));
    OK(drv->StreamBeginCapture(s, HRG_CAPTURE_MODE_GLOBAL));
    OK(drv->StreamIsCapturing(s, &status));
    assert_int_equal(status, HRG_CAPTURE_ACTIVE);
    assert_int_equal(drv->StreamIsCapturing(NULL, &status), HRG_ERROR_STREAM_CAPTURE_IMPLICIT);
    OK(drv->StreamWriteValue64(s, w.dev, 1, 0));
    mode = HRG_CAPTURE_MODE_RELAXED;
    OK(drv->ThreadExchangeStreamCaptureMode(&mode));
    OK(drv->MemAlloc(&d, 64));
    OK(drv->MemFree(d));
    OK(drv->ThreadExchangeStreamCaptureMode(&mode));
    OK(drv->StreamEndCapture(s, &graph));
    OK(drv->GraphDestroy(graph));
    assert_int_equal(atomic_load(w.host), 0);

    OK(drv->StreamBeginCapture(s, HRG_CAPTURE_MODE_GLOBAL));
    assert_int_equal(drv->MemAlloc(&d, 64), HRG_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    assert_int_equal(drv->StreamEndCapture(s, &graph), HRG_ERROR_STREAM_CAPTURE_INVALIDATED);
    OK(drv->StreamBeginCapture(s, HRG_CAPTURE_MODE_GLOBAL));
    assert_int_equal(drv->StreamWriteValue64(NULL, w.dev, 1, 0), HRG_ERROR_STREAM_CAPTURE_IMPLICIT);
    assert_int_equal(drv->StreamEndCapture(s, &graph), HRG_ERROR_STREAM_CAPTURE_INVALIDATED);
}

static void pairs_and_failures_are_as_asked_for(void **state)
{
    (void)state;
    int can;
    size_t free_bytes, total;
    OK(drv->DeviceCanAccessPeer(&can, 0, 1));
    assert_true(can);
    OK(drv->DeviceCanAccessPeer(&can, 3, 0));
    assert_false(can);
    OK(drv->MemGetInfo(&free_bytes, &total));
    assert_int_equal(drv->MemGetInfo(&free_bytes, &total), 801);
    OK(drv->MemGetInfo(&free_bytes, &total));

    hrg_ptr a, b;
    void *p;
    OK(drv->MemAllocHost(&p, 64));
    OK(drv->CtxSetCurrent(ctx[2]));
    OK(drv->MemAlloc(&a, 64));
    OK(drv->MemsetD8Async(a, 9, 64, NULL));
    OK(drv->StreamSynchronize(NULL));
    OK(drv->CtxSetCurrent(ctx[3]));
    OK(drv->MemAlloc(&b, 64));
    OK(drv->MemcpyPeerAsync(b, ctx[3], a, ctx[2], 64, NULL));
    OK(drv->MemcpyDtoHAsync(p, b, 64, NULL));
    OK(drv->StreamSynchronize(NULL));
    for (int i = 0; i < 64; i++)
        assert_int_equal(((unsigned char *)p)[i], 0);
    OK(drv->CtxSetCurrent(ctx[0]));
}

/* The other process: opens what it is sent, adds 1 to every byte, twice. */
static void importer(int sock)
{
    struct hrg_ipc_handle handle;
    int fds[1], nfds = 0;
    hrg_ptr legacy, again, range;
    hrg_handle vmm;
    void *p;
    const struct hrg_mem_access access = {.location = {.type = HRG_LOCATION_DEVICE, .id = 1},
                                          .flags = HRG_ACCESS_READWRITE};
    use_fake("libcuda_fake.so.1");
    const struct hrg_driver *d = hrg_driver_get(NULL, 0);
    hrg_ctx c;
    struct pollfd pfd = {.fd = sock, .events = POLLIN};
    int bad = d == NULL || d->Init(0) || poll(&pfd, 1, -1) != 1 || d->DevicePrimaryCtxRetain(&c, 1) ||
              d->CtxSetCurrent(c) ||
              hrp_recv_fds(sock, &handle, sizeof(handle), fds, 1, &nfds) != sizeof(handle) || nfds != 1;
    bad = bad || d->IpcOpenMemHandle(&legacy, handle, HRG_IPC_LAZY_ENABLE_PEER_ACCESS) ||
          d->IpcOpenMemHandle(&again, handle, HRG_IPC_LAZY_ENABLE_PEER_ACCESS) || again != legacy ||
          d->IpcCloseMemHandle(again) || d->MemAllocHost(&p, 5000);
    bad = bad || d->MemImportFromShareableHandle(&vmm, (void *)(intptr_t)fds[0], HRG_HANDLE_POSIX_FD) ||
          d->MemAddressReserve(&range, 65536, 0, 0, 0) || d->MemMap(range, 65536, 0, vmm, 0) ||
          d->MemSetAccess(range, 65536, &access, 1);
    /* The owner is gone before it is looked at. */
    char byte = 'x';
    bad = bad || write(sock, &byte, 1) != 1 || read(sock, &byte, 1) != 0;
    bad = bad || d->MemcpyDtoHAsync(p, legacy, 5000, NULL) || d->StreamSynchronize(NULL);
    for (int i = 0; !bad && i < 5000; i++)
        bad = ((unsigned char *)p)[i] != 3;
    bad = bad || d->MemcpyDtoHAsync(p, range + 65536 - 5000, 5000, NULL) || d->StreamSynchronize(NULL);
    for (int i = 0; !bad && i < 5000; i++)
        bad = ((unsigned char *)p)[i] != 4;
    bad = bad || d->IpcCloseMemHandle(legacy) || d->IpcOpenMemHandle(&legacy, handle, 1) == HRG_SUCCESS;
    _exit(bad);
}

static void exporter(int sock)
{
    use_fake("libcuda_fake.so.1");
    const struct hrg_driver *d = hrg_driver_get(NULL, 0);
    hrg_ctx c;
    hrg_ptr legacy, range;
    hrg_handle vmm;
    struct hrg_ipc_handle handle;
    int fd;
    char byte;
    const struct hrg_mem_prop prop = {.type = HRG_ALLOCATION_PINNED,
                                      .requested_handle_types = HRG_HANDLE_POSIX_FD,
                                      .location = {.type = HRG_LOCATION_DEVICE, .id = 0}};
    const struct hrg_mem_access access = {.location = prop.location, .flags = HRG_ACCESS_READWRITE};
    int bad = d == NULL || d->Init(0) || d->DevicePrimaryCtxRetain(&c, 0) || d->CtxSetCurrent(c) ||
              d->MemAlloc(&legacy, 5000) || d->IpcGetMemHandle(&handle, legacy + 77) ||
              d->MemsetD8Async(legacy, 3, 5000, NULL);
    bad = bad || d->MemCreate(&vmm, 65536, &prop, 0) || d->MemAddressReserve(&range, 65536, 0, 0, 0) ||
          d->MemMap(range, 65536, 0, vmm, 0) || d->MemSetAccess(range, 65536, &access, 1) ||
          d->MemExportToShareableHandle(&fd, vmm, HRG_HANDLE_POSIX_FD, 0) ||
          d->MemsetD8Async(range, 4, 65536, NULL) || d->StreamSynchronize(NULL);
    bad = bad || hrp_send_fds(sock, &handle, sizeof(handle), &fd, 1) < 0 || read(sock, &byte, 1) != 1;
    _exit(bad);
}

static void memory_is_shared_between_processes_and_outlives_its_owner(void **state)
{
    (void)state;
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
    pid_t child[2];
    for (int i = 0; i < 2; i++) {
        child[i] = fork();
        assert_true(child[i] >= 0);
        if (child[i] == 0) {
            close(pair[!i]);
            alarm(60);
            if (i == 0)
                exporter(pair[0]);
            importer(pair[1]);
        }
    }
    close(pair[0]);
    close(pair[1]);
    for (int i = 0; i < 2; i++) {
        int status;
        assert_int_equal(waitpid(child[i], &status, 0), child[i]);
        assert_int_equal(status, 0);
    }
}

static void a_sticky_error_ends_everything(void **state)
{
    (void)state;
    hrg_stream s = stream_new();
    hrg_ptr d;
    OK(drv->MemAlloc(&d, 64));
    OK(drv->MemsetD8Async(d, 1, 64, s));
    OK(drv->MemsetD8Async(d, 1, 64, s)); /* the third in this process */
    int r = drv->StreamSynchronize(s);
    assert_int_equal(r, HRG_ERROR_ILLEGAL_ADDRESS);
    assert_int_equal(drv->MemAlloc(&d, 64), HRG_ERROR_ILLEGAL_ADDRESS);
    assert_int_equal(drv->CtxSynchronize(), HRG_ERROR_ILLEGAL_ADDRESS);
}

int main(void)
{
    /* Before this process has the driver: its children could not use it. */
    const struct CMUnitTest shared[] = {
        cmocka_unit_test(memory_is_shared_between_processes_and_outlives_its_owner),
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream_works_in_order_and_waits_for_words),
        cmocka_unit_test(memory_that_is_not_pinned_is_refused),
        cmocka_unit_test(an_address_used_again_has_another_id),
        cmocka_unit_test(legacy_and_blocking_streams_wait_for_each_other),
        cmocka_unit_test(a_capture_forbids_what_the_driver_forbids),
        cmocka_unit_test(pairs_and_failures_are_as_asked_for),
        cmocka_unit_test(a_sticky_error_ends_everything),
    };
    int failed = cmocka_run_group_tests(shared, NULL, NULL);
    return failed + cmocka_run_group_tests(tests, setup, NULL);
}
