/* SPDX-License-Identifier: MIT */
#include "kernels/gpu_driver.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libcuda.so.1"

enum need { MUST, MAY };

static const struct {
    const char *symbol;
    size_t field;
    int since;
    enum need need;
} functions[] = {
#define HRG_FN(name, sym, first, must, args) \
    {.symbol = #sym, .field = offsetof(struct hrg_driver, name), .since = (first), .need = (must)},
#include "kernels/gpu_functions.def"
#undef HRG_FN
};
#define NFUNCTIONS (sizeof(functions) / sizeof(functions[0]))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hrg_driver driver;
static char refusal[512];
/* Either is set once, under the lock, after what it points to is complete. */
static _Atomic(const struct hrg_driver *) loaded;
static _Atomic(const char *) refused;

static const char *library_name(void)
{
    /* A set-uid program must not load what its caller names. */
    const char *name = secure_getenv("HREDUCE_CUDA_LIBRARY");
    return name != NULL && name[0] != '\0' ? name : LIBRARY;
}

static void version_text(int version, char *buf, size_t len)
{
    snprintf(buf, len, "%d.%d", version / 1000, version % 1000 / 10);
}

static void find_functions(void *lib, struct hrg_driver *drv)
{
    for (size_t i = 0; i < NFUNCTIONS; i++) {
        void *sym = dlsym(lib, functions[i].symbol);
        memcpy((char *)drv + functions[i].field, &sym, sizeof(sym));
    }
    if (drv->DriverGetVersion == NULL || drv->DriverGetVersion(&drv->version) != HRG_SUCCESS)
        drv->version = 0;
}

static bool lacks(const struct hrg_driver *drv, size_t i)
{
    void *sym;
    memcpy(&sym, (const char *)drv + functions[i].field, sizeof(sym));
    return sym == NULL;
}

/* Under the lock. The newest of the missing functions decides which driver is asked for. */
static bool check_functions(const struct hrg_driver *drv)
{
    const char *first = NULL;
    int since = 0;
    for (size_t i = 0; i < NFUNCTIONS; i++) {
        if (functions[i].need != MUST || !lacks(drv, i))
            continue;
        if (functions[i].since > since) {
            since = functions[i].since;
            first = functions[i].symbol;
        }
    }
    if (first == NULL)
        return true;
    char has[16], wants[16];
    version_text(drv->version, has, sizeof(has));
    version_text(since, wants, sizeof(wants));
    snprintf(refusal, sizeof(refusal),
             "the CUDA driver in %s (CUDA %s) has no %s; GPUs need a driver for CUDA %s or newer",
             drv->library, has, first, wants);
    return false;
}

/* Under the lock. flags: RTLD_NOLOAD or 0. */
static void load(int flags)
{
    if (atomic_load(&loaded) != NULL || atomic_load(&refused) != NULL)
        return;
    const char *name = library_name();
    void *lib = dlopen(name, RTLD_LAZY | flags);
    if (lib == NULL) {
        if (flags & RTLD_NOLOAD)
            return;
        const char *err = dlerror();
        snprintf(
            refusal, sizeof(refusal),
            "the CUDA driver cannot be loaded (%s); install the NVIDIA driver's libcuda, or run without GPUs",
            err != NULL ? err : name);
        atomic_store(&refused, refusal);
        return;
    }
    snprintf(driver.library, sizeof(driver.library), "%s", name);
    find_functions(lib, &driver);
    if (!check_functions(&driver)) {
        atomic_store(&refused, refusal);
        dlclose(lib);
        return;
    }
    atomic_store_explicit(&loaded, &driver, memory_order_release);
}

const struct hrg_driver *hrg_driver_get(char *why, size_t len)
{
    const struct hrg_driver *drv = atomic_load_explicit(&loaded, memory_order_acquire);
    if (drv != NULL)
        return drv;
    pthread_mutex_lock(&lock);
    load(0);
    pthread_mutex_unlock(&lock);
    drv = atomic_load(&loaded);
    if (drv == NULL && why != NULL && len > 0)
        snprintf(why, len, "%s", atomic_load(&refused));
    return drv;
}

static int first_object(struct dl_phdr_info *info, size_t size, void *arg)
{
    if (size >= offsetof(struct dl_phdr_info, dlpi_subs))
        *(unsigned long long *)arg = info->dlpi_adds;
    return 1;
}

const struct hrg_driver *hrg_driver_if_present(void)
{
    /* Libraries ever loaded at the last look, plus 1: only after something was loaded is another look worth it. */
    static _Atomic unsigned long long looked;
    const struct hrg_driver *drv = atomic_load_explicit(&loaded, memory_order_acquire);
    if (drv != NULL || atomic_load_explicit(&refused, memory_order_relaxed) != NULL)
        return drv;
    unsigned long long adds = 0;
    dl_iterate_phdr(first_object, &adds);
    if (atomic_load_explicit(&looked, memory_order_relaxed) == adds + 1)
        return NULL;
    pthread_mutex_lock(&lock);
    load(RTLD_NOLOAD);
    pthread_mutex_unlock(&lock);
    atomic_store_explicit(&looked, adds + 1, memory_order_relaxed);
    return atomic_load_explicit(&loaded, memory_order_acquire);
}

int hrg_stream_ops_check(const struct hrg_driver *drv, hrg_device dev, char *why, size_t len)
{
    char has[16];
    version_text(drv->version, has, sizeof(has));
    if (drv->StreamWaitValue64 == NULL || drv->StreamWriteValue64 == NULL || drv->StreamBatchMemOp == NULL) {
        snprintf(
            why, len,
            "the CUDA driver in %s (CUDA %s) has no stream memory operations (cuStreamWaitValue64_v2); GPU "
            "buffers need a driver for CUDA 11.7 or newer (515)",
            drv->library, has);
        return -1;
    }
    int can = 0;
    hrg_result r = drv->DeviceGetAttribute(&can, HRG_DEV_CAN_USE_64_BIT_STREAM_MEM_OPS, dev);
    if (r == HRG_SUCCESS && can)
        return 0;
    char name[96] = "?", error[128];
    drv->DeviceGetName(name, sizeof(name), dev);
    snprintf(
        why, len,
        "GPU %d (%s) has no 64-bit stream memory operations under this driver (CUDA %s)%s%s; GPU buffers "
        "need a driver for CUDA 11.7 or newer (515) and a GPU of compute capability 7.0 or newer",
        dev, name, has, r == HRG_SUCCESS ? "" : ": ",
        r == HRG_SUCCESS ? "" : hrg_error_text(drv, r, error, sizeof(error)));
    return -1;
}

const char *hrg_error_text(const struct hrg_driver *drv, hrg_result error, char *buf, size_t len)
{
    const char *name = NULL, *text = NULL;
    if (drv->GetErrorName(error, &name) != HRG_SUCCESS || name == NULL)
        name = "CUDA error";
    if (drv->GetErrorString(error, &text) != HRG_SUCCESS || text == NULL)
        text = "not known to this driver";
    snprintf(buf, len, "%s (%d: %s)", name, error, text);
    return buf;
}

int hrg_error_is_sticky(hrg_result error)
{
    switch (error) {
    case HRG_ERROR_DEINITIALIZED:
    case HRG_ERROR_ECC_UNCORRECTABLE:
    case HRG_ERROR_ILLEGAL_ADDRESS:
    case HRG_ERROR_CONTEXT_IS_DESTROYED:
    case HRG_ERROR_LAUNCH_FAILED:
    case HRG_ERROR_UNKNOWN:
        return 1;
    default:
        /* 710 assert, 714 to 718: hardware stack, instruction, alignment, address space, program counter; 805 to 810: MPS. */
        return error == 702 || error == 710 || (error >= 714 && error <= 718) ||
               (error >= 805 && error <= 810);
    }
}

void hrg_uuid_text(const struct hrg_uuid *uuid, int mig, char text[HRG_UUID_TEXT])
{
    int at = snprintf(text, HRG_UUID_TEXT, mig ? "MIG-" : "GPU-");
    for (int i = 0; i < 16; i++)
        at += snprintf(text + at, HRG_UUID_TEXT - (size_t)at, "%s%02x",
                       i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid->bytes[i]);
}

hrg_result hrg_device_uuid(const struct hrg_driver *drv, hrg_device dev, struct hrg_uuid *uuid)
{
    if (drv->DeviceGetUuid_v2 != NULL)
        return drv->DeviceGetUuid_v2(uuid, dev);
    return drv->DeviceGetUuid(uuid, dev);
}

int hrg_device_is_mig(const struct hrg_driver *drv, hrg_device dev)
{
    /* Of an instance the older call gives the UUID of the GPU that it is a part of. */
    struct hrg_uuid own, gpu;
    return drv->DeviceGetUuid_v2 != NULL && drv->DeviceGetUuid_v2(&own, dev) == HRG_SUCCESS &&
           drv->DeviceGetUuid(&gpu, dev) == HRG_SUCCESS && memcmp(&own, &gpu, sizeof(own)) != 0;
}
