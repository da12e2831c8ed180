/* SPDX-License-Identifier: MIT */
/*
 * NVML, the management library of NVIDIA's driver: what topology and doctor ask of it. Loaded at run time, because it
 * belongs to the driver and exists only where that is installed; no NVIDIA header is needed. HREDUCE_NVML_LIBRARY names
 * another file (tests).
 */
#ifndef HRD_NVML_H
#define HRD_NVML_H

#include <stddef.h>

#define HRD_NVML_OK 0
#define HRD_NVML_ENABLED 1u

typedef struct hrd_nvml_device_st *hrd_nvml_device;

/* nvmlPciInfo_t, as the first version with the long address laid it out. */
struct hrd_nvml_pci {
    char short_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
};

/* nvmlGpuFabricInfo_t */
struct hrd_nvml_fabric {
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state; /* HRD_FABRIC_* of doctor.h */
};

/* FN(field, symbol, needed, arguments): a library without a needed one is refused, of others the field is NULL. */
#define HRD_NVML_FUNCTIONS(FN)                                                                               \
    FN(init, nvmlInit_v2, 1, (void))                                                                         \
    FN(shutdown, nvmlShutdown, 1, (void))                                                                    \
    FN(count, nvmlDeviceGetCount_v2, 1, (unsigned *n))                                                       \
    FN(by_index, nvmlDeviceGetHandleByIndex_v2, 1, (unsigned index, hrd_nvml_device *out))                   \
    FN(by_pci, nvmlDeviceGetHandleByPciBusId_v2, 1, (const char *pci, hrd_nvml_device *out))                 \
    FN(pci, nvmlDeviceGetPciInfo_v3, 0, (hrd_nvml_device d, struct hrd_nvml_pci * out))                      \
    FN(link_state, nvmlDeviceGetNvLinkState, 0, (hrd_nvml_device d, unsigned link, unsigned *enabled))       \
    FN(link_remote, nvmlDeviceGetNvLinkRemotePciInfo_v2, 0,                                                  \
       (hrd_nvml_device d, unsigned link, struct hrd_nvml_pci *out))                                         \
    FN(link_remote_type, nvmlDeviceGetNvLinkRemoteDeviceType, 0,                                             \
       (hrd_nvml_device d, unsigned link, int *type))                                                        \
    FN(compute_mode, nvmlDeviceGetComputeMode, 0, (hrd_nvml_device d, int *mode))                            \
    FN(mig_mode, nvmlDeviceGetMigMode, 0, (hrd_nvml_device d, unsigned *now, unsigned *pending))             \
    FN(persistence, nvmlDeviceGetPersistenceMode, 0, (hrd_nvml_device d, int *on))                           \
    FN(ecc_errors, nvmlDeviceGetTotalEccErrors, 0,                                                           \
       (hrd_nvml_device d, int kind, int counter, unsigned long long *n))                                    \
    FN(remapped_rows, nvmlDeviceGetRemappedRows, 0,                                                          \
       (hrd_nvml_device d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)) \
    FN(pages_pending, nvmlDeviceGetRetiredPagesPendingStatus, 0, (hrd_nvml_device d, int *pending))          \
    FN(fabric, nvmlDeviceGetGpuFabricInfo, 0, (hrd_nvml_device d, struct hrd_nvml_fabric * out))

struct hrd_nvml {
    void *library;
    const char *(*error)(int code); /* nvmlErrorString */
#define FN(field, symbol, needed, args) int(*field) args;
    HRD_NVML_FUNCTIONS(FN)
#undef FN
};

/* Loads and starts it. 0, or with a phrase: -ENOENT (no driver is installed) or -EIO. May take seconds where a GPU has to be
   woken. */
int hrd_nvml_open(struct hrd_nvml *n, char *why, size_t len);
void hrd_nvml_close(struct hrd_nvml *n);

#endif
