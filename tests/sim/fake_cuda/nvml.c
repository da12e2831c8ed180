/* SPDX-License-Identifier: MIT */
/* The management library of this driver: HREDUCE_NVML_LIBRARY names the same file. Nothing of it touches the rest. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/nvml.h"
#include "tests/sim/fake_cuda/fake.h"

#define LOST 15 /* NVML_ERROR_GPU_IS_LOST */
#define UNSUPPORTED 3

#define FN(field, symbol, needed, args) FAKE_API int symbol args;
HRD_NVML_FUNCTIONS(FN)
#undef FN
FAKE_API const char *nvmlErrorString(int code);

/* FAKE_NVML=WORD=N,...; the words are below, and those that are not there are at their best. */
static int set_to(const char *word, int otherwise)
{
    const char *v = getenv("FAKE_NVML");
    size_t n = strlen(word);
    for (; v != NULL && *v != '\0'; v += strcspn(v, ","), v += *v == ',')
        if (strncmp(v, word, n) == 0 && v[n] == '=')
            return atoi(v + n + 1);
    return otherwise;
}

static unsigned index_of(hrd_nvml_device d)
{
    return (unsigned)(uintptr_t)d - 1;
}

const char *nvmlErrorString(int code)
{
    return code == LOST ? "GPU is lost" : code == UNSUPPORTED ? "Not Supported" : "Driver Not Loaded";
}

int nvmlInit_v2(void)
{
    return set_to("init", 0);
}

int nvmlShutdown(void)
{
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned *n)
{
    const char *devices = getenv("FAKE_CUDA_DEVICES");
    *n = devices != NULL ? (unsigned)atoi(devices) : 4;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, hrd_nvml_device *out)
{
    *out = (hrd_nvml_device)(uintptr_t)(index + 1);
    return set_to("lost", -1) == (int)index ? LOST : 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, hrd_nvml_device *out)
{
    unsigned domain = 0, bus = 0;
    if (sscanf(pci, "%x:%x:", &domain, &bus) != 2)
        return UNSUPPORTED;
    return nvmlDeviceGetHandleByIndex_v2(bus / 0x10 - 1, out);
}

/* The addresses that cuDeviceGetPCIBusId() gives. */
int nvmlDeviceGetPciInfo_v3(hrd_nvml_device d, struct hrd_nvml_pci *out)
{
    memset(out, 0, sizeof(*out));
    out->bus = (index_of(d) + 1) * 0x10;
    snprintf(out->id, sizeof(out->id), "00000000:%02X:00.0", out->bus);
    return 0;
}

int nvmlDeviceGetNvLinkState(hrd_nvml_device d, unsigned link, unsigned *enabled)
{
    (void)d;
    (void)link;
    *enabled = 0;
    return UNSUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(hrd_nvml_device d, unsigned link, struct hrd_nvml_pci *out)
{
    (void)link;
    return nvmlDeviceGetPciInfo_v3(d, out);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(hrd_nvml_device d, unsigned link, int *type)
{
    (void)d;
    (void)link;
    *type = -1;
    return UNSUPPORTED;
}

int nvmlDeviceGetComputeMode(hrd_nvml_device d, int *mode)
{
    (void)d;
    *mode = set_to("mode", 0);
    return 0;
}

int nvmlDeviceGetMigMode(hrd_nvml_device d, unsigned *now, unsigned *pending)
{
    (void)d;
    *now = (unsigned)set_to("mig", 0);
    *pending = (unsigned)set_to("mig_pending", (int)*now);
    return *now > 1 ? UNSUPPORTED : 0;
}

int nvmlDeviceGetPersistenceMode(hrd_nvml_device d, int *on)
{
    (void)d;
    *on = set_to("persistence", 1);
    return 0;
}

int nvmlDeviceGetTotalEccErrors(hrd_nvml_device d, int kind, int counter, unsigned long long *n)
{
    (void)d;
    *n = kind == 1 && counter == 0 ? (unsigned long long)set_to("ecc", 0) : 1000;
    return 0;
}

int nvmlDeviceGetRemappedRows(hrd_nvml_device d, unsigned *corrected, unsigned *uncorrected,
                              unsigned *pending, unsigned *failed)
{
    (void)d;
    *corrected = *uncorrected = 1;
    *pending = (unsigned)set_to("pending", 0);
    *failed = (unsigned)set_to("failed", 0);
    return *pending > 1 ? UNSUPPORTED : 0;
}

int nvmlDeviceGetRetiredPagesPendingStatus(hrd_nvml_device d, int *pending)
{
    (void)d;
    *pending = set_to("pages", 0);
    return 0;
}

int nvmlDeviceGetGpuFabricInfo(hrd_nvml_device d, struct hrd_nvml_fabric *out)
{
    (void)d;
    memset(out, 0, sizeof(*out));
    out->state = (unsigned char)set_to("fabric", 0);
    return 0;
}
