/* SPDX-License-Identifier: MIT */
/* What NVML says of each GPU. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "daemon/doctor/doctor.h"
#include "daemon/nvml.h"

#define UNCORRECTED 1  /* nvmlMemoryErrorType_t */
#define SINCE_LOADED 0 /* nvmlEccCounterType_t: volatile */
/* A driver that nobody keeps loaded wakes each GPU anew, which takes seconds. */
#define ENOUGH_S 5.0

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void ask_memory(const struct hrd_nvml *n, hrd_nvml_device d, struct hrd_gpu_state *s)
{
    unsigned long long errors = 0;
    unsigned corrected, uncorrected, pending = 0, failed = 0;
    int pages = 0;
    if (n->ecc_errors && n->ecc_errors(d, UNCORRECTED, SINCE_LOADED, &errors) == HRD_NVML_OK)
        s->uncorrected = (long)errors;
    if (n->remapped_rows && n->remapped_rows(d, &corrected, &uncorrected, &pending, &failed) == HRD_NVML_OK) {
        s->repair_pending = pending != 0;
        s->repair_failed = failed != 0;
    } else if (n->pages_pending && n->pages_pending(d, &pages) == HRD_NVML_OK) { /* before Ampere */
        s->repair_pending = pages != 0;
    }
}

static void ask(const struct hrd_nvml *n, unsigned index, struct hrd_gpu_state *s)
{
    hrd_nvml_device d;
    struct hrd_nvml_pci pci = {{0}, 0, 0, 0, 0, 0, {0}};
    struct hrd_nvml_fabric fabric = {{0}, 0, 0, 0};
    unsigned mig = 0, pending = 0;
    *s = (struct hrd_gpu_state){.compute_mode = -1,
                                .mig = -1,
                                .mig_pending = -1,
                                .persistence = -1,
                                .uncorrected = -1,
                                .repair_pending = -1,
                                .repair_failed = -1,
                                .fabric = -1};
    snprintf(s->pci, sizeof(s->pci), "number %u", index);
    int code = n->by_index(index, &d);
    if (code == HRD_NVML_OK && n->pci && (code = n->pci(d, &pci)) == HRD_NVML_OK)
        snprintf(s->pci, sizeof(s->pci), "%04x:%02x:%02x.0", pci.domain & 0xffffffu, pci.bus & 0xff,
                 pci.device & 0xff);
    if (code != HRD_NVML_OK) {
        snprintf(s->error, sizeof(s->error), "%s", n->error(code));
        return;
    }
    if (n->compute_mode && n->compute_mode(d, &s->compute_mode) != HRD_NVML_OK)
        s->compute_mode = -1;
    if (n->persistence && n->persistence(d, &s->persistence) != HRD_NVML_OK)
        s->persistence = -1;
    if (n->mig_mode && n->mig_mode(d, &mig, &pending) == HRD_NVML_OK) {
        s->mig = mig == HRD_NVML_ENABLED;
        s->mig_pending = pending == HRD_NVML_ENABLED;
    }
    if (n->fabric && n->fabric(d, &fabric) == HRD_NVML_OK)
        s->fabric = fabric.state;
    ask_memory(n, d, s);
}

void hrd_gpu_states_ask(struct hrd_gpu_states *out)
{
    struct hrd_nvml n;
    double began = now_s();
    memset(out, 0, sizeof(*out));
    if (hrd_nvml_open(&n, out->why, sizeof(out->why)) != 0)
        return;
    int code = n.count(&out->total);
    if (code != HRD_NVML_OK)
        snprintf(out->why, sizeof(out->why), "NVML cannot count the GPUs: %s", n.error(code));
    for (unsigned i = 0; code == HRD_NVML_OK && i < out->total && out->n < HRD_DOCTOR_GPUS; i++) {
        if (now_s() - began > ENOUGH_S)
            break;
        ask(&n, i, &out->gpu[out->n++]);
    }
    if (code == HRD_NVML_OK && out->total == 0)
        snprintf(out->why, sizeof(out->why), "NVML sees no GPU");
    hrd_nvml_close(&n);
}
