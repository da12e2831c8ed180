/* SPDX-License-Identifier: MIT */
/* Devices, contexts, and the failures that the environment asks for. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/sim/fake_cuda/fake.h"

#define MAX_FUNCTIONS 128
#define STACK 16

struct fake_state fake;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_bool initialized;
static _Atomic hrg_result stuck;

static struct {
    const char *name;
    _Atomic unsigned calls, runs;
} counted[MAX_FUNCTIONS];
static _Atomic unsigned ncounted;
static pthread_mutex_t count_lock = PTHREAD_MUTEX_INITIALIZER;

static FAKE_THREAD struct hrg_ctx_st *stack[STACK];
static FAKE_THREAD unsigned depth;

_Noreturn void fake_die(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "fake CUDA: ");
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, "\n");
    va_end(ap);
    abort();
}

void *fake_zalloc(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (p == NULL)
        fake_die("out of memory");
    return p;
}

/* ---- environment --------------------------------------------------------------------------------------------------- */

static unsigned long number(const char *variable, unsigned long otherwise)
{
    const char *v = getenv(variable);
    return v != NULL && v[0] != '\0' ? strtoul(v, NULL, 0) : otherwise;
}

bool fake_pair(const char *variable, int a, int b)
{
    const char *v = getenv(variable);
    while (v != NULL && *v != '\0') {
        char *end;
        long x = strtol(v, &end, 10);
        long y = *end == '-' ? strtol(end + 1, &end, 10) : x;
        if ((x == a && y == b) || (x == b && y == a))
            return true;
        if (*end != ',')
            break;
        v = end + 1;
    }
    return false;
}

/* The entry NAME=... of a comma-separated list: what stands behind the =. */
static const char *entry(const char *variable, const char *prefix, const char *name)
{
    const char *v = getenv(variable);
    size_t np = strlen(prefix), n = strlen(name);
    while (v != NULL && *v != '\0') {
        if (strncmp(v, prefix, np) == 0 && strncmp(v + np, name, n) == 0 && v[np + n] == '=')
            return v + np + n + 1;
        v = strchr(v, ',');
        v = v != NULL ? v + 1 : NULL;
    }
    return NULL;
}

static hrg_result failure(const char *prefix, const char *name, unsigned count)
{
    const char *v = entry("FAKE_CUDA_FAIL", prefix, name);
    if (v == NULL)
        return HRG_SUCCESS;
    char *end;
    long code = strtol(v, &end, 10);
    if (*end == '#') {
        const struct hrg_ctx_st *ctx = fake_current();
        const long gpu = strtol(end + 1, &end, 10);
        if (ctx == NULL || ctx->index != gpu)
            return HRG_SUCCESS;
    }
    if (*end == '@') {
        unsigned long at = strtoul(end + 1, &end, 10);
        if (*end == '+' ? count < at : count != at)
            return HRG_SUCCESS;
    }
    return (hrg_result)code;
}

static void delay(const char *prefix, const char *name)
{
    const char *v = entry("FAKE_CUDA_DELAY", prefix, name);
    if (v == NULL)
        return;
    long us = strtol(v, NULL, 10);
    struct timespec ts = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
    nanosleep(&ts, NULL);
}

static void gpu_uuid(int gpu, struct hrg_uuid *uuid)
{
    memcpy(uuid->bytes, "fake-cuda-dev-00", sizeof(uuid->bytes));
    uuid->bytes[14] = (uint8_t)('0' + gpu / 10);
    uuid->bytes[15] = (uint8_t)('0' + gpu % 10);
}

static bool is_mig(int index)
{
    return fake.unit[index].instance >= 0;
}

static void uuid_of(int index, struct hrg_uuid *uuid)
{
    const struct fake_unit *u = &fake.unit[index];
    gpu_uuid(u->gpu, uuid);
    if (!is_mig(index))
        return;
    memcpy(uuid->bytes, "fake-cuda-mig", 13);
    uuid->bytes[13] = (uint8_t)('0' + u->instance);
}

/* An element of CUDA_VISIBLE_DEVICES, which ends at a comma: the index, -1 for none such. */
static int parse_visible(const char *v)
{
    if (strncmp(v, "GPU-", 4) != 0 && strncmp(v, "MIG-", 4) != 0) {
        char *end;
        long i = strtol(v, &end, 10);
        return end != v && (*end == ',' || *end == '\0') && i >= 0 && i < fake.ngpus ? (int)i : -1;
    }
    size_t len = strcspn(v, ",");
    for (int i = 0; i < fake.ndevices; i++) {
        struct hrg_uuid uuid;
        char text[HRG_UUID_TEXT];
        uuid_of(i, &uuid);
        hrg_uuid_text(&uuid, is_mig(i), text);
        if (len < sizeof(text) && strncmp(text, v, len) == 0)
            return i;
    }
    return -1;
}

static void divide(void)
{
    fake.ngpus = fake.ndevices = (int)number("FAKE_CUDA_DEVICES", 4);
    if (fake.ndevices > FAKE_MAX_DEVICES)
        fake_die("FAKE_CUDA_DEVICES is %d, at most %d", fake.ndevices, FAKE_MAX_DEVICES);
    for (int i = 0; i < fake.ngpus; i++) {
        char gpu[16];
        snprintf(gpu, sizeof(gpu), "%d", i);
        const char *v = entry("FAKE_CUDA_MIG", "", gpu);
        long instances = v != NULL ? strtol(v, NULL, 10) : 0;
        fake.unit[i] = (struct fake_unit){.gpu = i, .instance = instances > 0 ? 0 : -1};
        for (int k = 1; k < instances && fake.ndevices < FAKE_MAX_DEVICES; k++)
            fake.unit[fake.ndevices++] = (struct fake_unit){.gpu = i, .instance = k};
    }
}

static void see(int index)
{
    static unsigned long instances;
    if (fake.nvisible == FAKE_MAX_DEVICES || (is_mig(index) && instances >= number("FAKE_CUDA_MIG_SEEN", 1)))
        return;
    instances += is_mig(index);
    fake.visible[fake.nvisible++] = index;
}

static void init(void)
{
    fake.pid = getpid();
    divide();
    fake.strict = number("FAKE_CUDA_STRICT", 1) != 0;
    fake.wait_s = (unsigned)number("FAKE_CUDA_WAIT_S", 120);
    fake.memory = number("FAKE_CUDA_MEMORY", 8UL << 30);
    fake.connections = (unsigned)number("CUDA_DEVICE_MAX_CONNECTIONS", 0);
    const char *v = getenv("CUDA_VISIBLE_DEVICES");
    if (v == NULL) {
        for (int i = 0; i < fake.ndevices; i++)
            see(i);
    } else {
        while (*v != '\0') {
            int i = parse_visible(v);
            if (i < 0)
                break; /* as the driver: what comes behind an unknown one is not there */
            see(i);
            v += strcspn(v, ",");
            v += *v == ',';
        }
    }
    for (int o = 0; o < fake.nvisible; o++)
        fake.ctx[fake.visible[o]].ordinal = o;
    for (int i = 0; i < fake.ndevices; i++)
        fake.ctx[i].index = i;
}

/* ---- every call ---------------------------------------------------------------------------------------------------- */

static unsigned place_of(const char *name)
{
    unsigned n = atomic_load(&ncounted);
    for (unsigned i = 0; i < n; i++)
        if (strcmp(counted[i].name, name) == 0)
            return i;
    pthread_mutex_lock(&count_lock);
    n = atomic_load(&ncounted);
    unsigned i = 0;
    while (i < n && strcmp(counted[i].name, name) != 0)
        i++;
    if (i == n) {
        if (n == MAX_FUNCTIONS)
            fake_die("more than %d functions", MAX_FUNCTIONS);
        counted[n].name = name;
        atomic_store(&ncounted, n + 1);
    }
    pthread_mutex_unlock(&count_lock);
    return i;
}

FAKE_API unsigned fake_cuda_calls(const char *name)
{
    unsigned n = atomic_load(&ncounted);
    for (unsigned i = 0; i < n; i++)
        if (strcmp(counted[i].name, name) == 0)
            return atomic_load(&counted[i].calls);
    return 0;
}

hrg_result fake_enter(const char *name, unsigned flags)
{
    unsigned count = atomic_fetch_add(&counted[place_of(name)].calls, 1) + 1;
    delay("call:", name);
    hrg_result r = failure("", name, count);
    if (r != HRG_SUCCESS) {
        if (hrg_error_is_sticky(r))
            fake_stick(r);
        return r;
    }
    if (flags & FAKE_ANY_TIME)
        return HRG_SUCCESS;
    if (!atomic_load(&initialized) || getpid() != fake.pid)
        return HRG_ERROR_NOT_INITIALIZED;
    r = atomic_load(&stuck);
    if (r != HRG_SUCCESS)
        return r;
    if ((flags & FAKE_UNSAFE) && fake_capture_forbids())
        return HRG_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return HRG_SUCCESS;
}

hrg_result fake_run(const char *name)
{
    unsigned count = atomic_fetch_add(&counted[place_of(name)].runs, 1) + 1;
    delay("", name);
    hrg_result r = atomic_load(&stuck);
    if (r == HRG_SUCCESS)
        r = failure("run:", name, count);
    if (r != HRG_SUCCESS)
        fake_stick(r);
    return r;
}

void fake_stick(hrg_result code)
{
    hrg_result none = HRG_SUCCESS;
    atomic_compare_exchange_strong(&stuck, &none, code);
}

FAKE_API hrg_result cuInit(unsigned flags)
{
    FAKE_ENTER("Init", FAKE_ANY_TIME);
    if (flags != 0)
        return HRG_ERROR_INVALID_VALUE;
    pthread_once(&once, init);
    if (getpid() != fake.pid)
        return HRG_ERROR_NOT_INITIALIZED; /* as in a child of a process that used CUDA */
    if (fake.nvisible == 0)
        return HRG_ERROR_NO_DEVICE;
    atomic_store(&initialized, true);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuDriverGetVersion(int *version)
{
    FAKE_ENTER("DriverGetVersion", FAKE_ANY_TIME);
    *version = (int)number("FAKE_CUDA_VERSION", 12040);
    return HRG_SUCCESS;
}

static const struct {
    hrg_result code;
    const char *name, *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the memory is registered already"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer is not of registered memory"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "a previous error invalidated the capture"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capture"},
};

FAKE_API hrg_result cuGetErrorName(hrg_result error, const char **name)
{
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
        if (errors[i].code == error) {
            *name = errors[i].name;
            return HRG_SUCCESS;
        }
    *name = NULL;
    return HRG_ERROR_INVALID_VALUE;
}

FAKE_API hrg_result cuGetErrorString(hrg_result error, const char **text)
{
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
        if (errors[i].code == error) {
            *text = errors[i].text;
            return HRG_SUCCESS;
        }
    *text = NULL;
    return HRG_ERROR_INVALID_VALUE;
}

/* ---- devices ------------------------------------------------------------------------------------------------------- */

static bool is_device(hrg_device dev)
{
    return dev >= 0 && dev < fake.nvisible;
}

FAKE_API hrg_result cuDeviceGetCount(int *count)
{
    FAKE_ENTER("DeviceGetCount", 0);
    *count = fake.nvisible;
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuDeviceGet(hrg_device *dev, int ordinal)
{
    FAKE_ENTER("DeviceGet", 0);
    *dev = ordinal;
    return is_device(ordinal) ? HRG_SUCCESS : HRG_ERROR_INVALID_DEVICE;
}

FAKE_API hrg_result cuDeviceGetName(char *name, int len, hrg_device dev)
{
    FAKE_ENTER("DeviceGetName", 0);
    if (!is_device(dev))
        return HRG_ERROR_INVALID_DEVICE;
    const int index = fake.visible[dev];
    snprintf(name, (size_t)len, "Fake GPU %d%s", fake.unit[index].gpu, is_mig(index) ? " MIG 1g.10gb" : "");
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuDeviceGetUuid_v2(struct hrg_uuid *uuid, hrg_device dev)
{
    FAKE_ENTER("DeviceGetUuid_v2", 0);
    if (!is_device(dev))
        return HRG_ERROR_INVALID_DEVICE;
    uuid_of(fake.visible[dev], uuid);
    return HRG_SUCCESS;
}

/* Knows no instances: whose part the device is. */
FAKE_API hrg_result cuDeviceGetUuid(struct hrg_uuid *uuid, hrg_device dev)
{
    FAKE_ENTER("DeviceGetUuid", 0);
    if (!is_device(dev))
        return HRG_ERROR_INVALID_DEVICE;
    gpu_uuid(fake.unit[fake.visible[dev]].gpu, uuid);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuDeviceGetPCIBusId(char *id, int len, hrg_device dev)
{
    FAKE_ENTER("DeviceGetPCIBusId", 0);
    if (!is_device(dev))
        return HRG_ERROR_INVALID_DEVICE;
    snprintf(id, (size_t)len, "0000:%02X:00.0", (unsigned)(fake.unit[fake.visible[dev]].gpu + 1) * 0x10);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuDeviceGetAttribute(int *value, int attribute, hrg_device dev)
{
    FAKE_ENTER("DeviceGetAttribute", 0);
    if (!is_device(dev))
        return HRG_ERROR_INVALID_DEVICE;
    char key[16];
    snprintf(key, sizeof(key), "%d", attribute);
    const char *v = entry("FAKE_CUDA_ATTR", "", key);
    if (v != NULL) {
        *value = (int)strtol(v, NULL, 10);
        return HRG_SUCCESS;
    }
    switch (attribute) {
    case HRG_DEV_MULTIPROCESSOR_COUNT:
        *value = 4;
        break;
    case HRG_DEV_PCI_BUS_ID:
        *value = (fake.unit[fake.visible[dev]].gpu + 1) * 0x10;
        break;
    case HRG_DEV_MAX_THREADS_PER_MULTIPROCESSOR:
        *value = 2048;
        break;
    case HRG_DEV_ASYNC_ENGINE_COUNT:
        *value = 2;
        break;
    case HRG_DEV_COMPUTE_CAPABILITY_MAJOR:
        *value = 9;
        break;
    case HRG_DEV_UNIFIED_ADDRESSING:
    case HRG_DEV_HOST_REGISTER_SUPPORTED:
    case HRG_DEV_VIRTUAL_MEMORY_MANAGEMENT:
    case HRG_DEV_HANDLE_TYPE_POSIX_FD:
    case HRG_DEV_CAN_USE_64_BIT_STREAM_MEM_OPS:
    case HRG_DEV_DMA_BUF:
    case HRG_DEV_GPU_DIRECT_RDMA:
    case HRG_DEV_GPU_DIRECT_RDMA_WITH_VMM:
    case HRG_DEV_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS:
        *value = 1;
        break;
    default: /* also: registered host memory has a device address of its own */
        *value = 0;
    }
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuDeviceTotalMem_v2(size_t *bytes, hrg_device dev)
{
    FAKE_ENTER("DeviceTotalMem", 0);
    *bytes = fake.memory;
    return is_device(dev) ? HRG_SUCCESS : HRG_ERROR_INVALID_DEVICE;
}

bool fake_peers(int a, int b)
{
    return !is_mig(a) && !is_mig(b) && !fake_pair("FAKE_CUDA_NO_P2P", a, b);
}

FAKE_API hrg_result cuDeviceCanAccessPeer(int *can, hrg_device dev, hrg_device peer)
{
    FAKE_ENTER("DeviceCanAccessPeer", 0);
    if (!is_device(dev) || !is_device(peer))
        return HRG_ERROR_INVALID_DEVICE;
    *can = dev != peer && fake_peers(fake.visible[dev], fake.visible[peer]);
    return HRG_SUCCESS;
}

/* ---- contexts ------------------------------------------------------------------------------------------------------ */

FAKE_API hrg_result cuDevicePrimaryCtxRetain(hrg_ctx *ctx, hrg_device dev)
{
    FAKE_ENTER("DevicePrimaryCtxRetain", FAKE_UNSAFE);
    if (!is_device(dev))
        return HRG_ERROR_INVALID_DEVICE;
    *ctx = &fake.ctx[fake.visible[dev]];
    pthread_mutex_lock(&fake_lock);
    (*ctx)->retained++;
    pthread_mutex_unlock(&fake_lock);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuDevicePrimaryCtxRelease_v2(hrg_device dev)
{
    FAKE_ENTER("DevicePrimaryCtxRelease", FAKE_UNSAFE);
    if (!is_device(dev))
        return HRG_ERROR_INVALID_DEVICE;
    struct hrg_ctx_st *ctx = &fake.ctx[fake.visible[dev]];
    pthread_mutex_lock(&fake_lock);
    bool held = ctx->retained > 0;
    ctx->retained -= held;
    pthread_mutex_unlock(&fake_lock);
    return held ? HRG_SUCCESS : HRG_ERROR_INVALID_CONTEXT;
}

FAKE_API hrg_result cuDevicePrimaryCtxGetState(hrg_device dev, unsigned *flags, int *active)
{
    FAKE_ENTER("DevicePrimaryCtxGetState", 0);
    if (!is_device(dev))
        return HRG_ERROR_INVALID_DEVICE;
    *flags = 0;
    pthread_mutex_lock(&fake_lock);
    *active = fake.ctx[fake.visible[dev]].retained > 0;
    pthread_mutex_unlock(&fake_lock);
    return HRG_SUCCESS;
}

struct hrg_ctx_st *fake_current(void)
{
    return depth > 0 ? stack[depth - 1] : NULL;
}

FAKE_API hrg_result cuCtxSetCurrent(hrg_ctx ctx)
{
    FAKE_ENTER("CtxSetCurrent", 0);
    if (depth == 0)
        depth = 1;
    stack[depth - 1] = ctx;
    if (ctx == NULL)
        depth--;
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuCtxGetCurrent(hrg_ctx *ctx)
{
    FAKE_ENTER("CtxGetCurrent", 0);
    *ctx = fake_current();
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuCtxPushCurrent_v2(hrg_ctx ctx)
{
    FAKE_ENTER("CtxPushCurrent", 0);
    if (ctx == NULL || depth == STACK)
        return HRG_ERROR_INVALID_CONTEXT;
    stack[depth++] = ctx;
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuCtxPopCurrent_v2(hrg_ctx *ctx)
{
    FAKE_ENTER("CtxPopCurrent", FAKE_ANY_TIME);
    if (depth == 0)
        return HRG_ERROR_INVALID_CONTEXT;
    depth--;
    if (ctx != NULL)
        *ctx = stack[depth];
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuCtxGetDevice(hrg_device *dev)
{
    FAKE_ENTER("CtxGetDevice", 0);
    struct hrg_ctx_st *ctx = fake_current();
    if (ctx == NULL)
        return HRG_ERROR_INVALID_CONTEXT;
    *dev = ctx->ordinal;
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuCtxEnablePeerAccess(hrg_ctx peer, unsigned flags)
{
    FAKE_ENTER("CtxEnablePeerAccess", 0);
    struct hrg_ctx_st *ctx = fake_current();
    if (ctx == NULL || peer == NULL)
        return HRG_ERROR_INVALID_CONTEXT;
    if (flags != 0 || ctx == peer)
        return HRG_ERROR_INVALID_VALUE;
    if (!fake_peers(ctx->index, peer->index))
        return HRG_ERROR_PEER_ACCESS_UNSUPPORTED;
    uint64_t bit = UINT64_C(1) << peer->index;
    return atomic_fetch_or(&ctx->peers, bit) & bit ? HRG_ERROR_PEER_ACCESS_ALREADY_ENABLED : HRG_SUCCESS;
}

static void (*_Atomic on_flush)(void);

FAKE_API void fake_cuda_on_flush(void (*fn)(void))
{
    atomic_store(&on_flush, fn);
}

FAKE_API hrg_result cuFlushGPUDirectRDMAWrites(int target, int scope)
{
    FAKE_ENTER("FlushGPUDirectRDMAWrites", 0);
    void (*fn)(void) = atomic_load(&on_flush);
    if (fn != NULL)
        fn();
    if (target != HRG_FLUSH_TARGET_CURRENT_CTX ||
        (scope != HRG_FLUSH_TO_OWNER && scope != HRG_FLUSH_TO_ALL_DEVICES))
        return HRG_ERROR_INVALID_VALUE;
    return fake_current() != NULL ? HRG_SUCCESS : HRG_ERROR_INVALID_CONTEXT;
}
