/* SPDX-License-Identifier: MIT */
#ifndef HRD_GPU_GDR_TRIAL_H
#define HRD_GPU_GDR_TRIAL_H

#include "daemon/gpu/gpu.h"
#include "daemon/transport.h"
#include "daemon/verbs/device.h"

struct hrd_gdr_trial {
    struct hrd_gpu_dev *dev;            /* its context is current */
    const struct hrd_verbs_device *nic; /* both ends of the trial's connection */
    const struct hrd_tp_memory *memory; /* on the GPU; the trial writes into it */
    bool flush;                         /* the driver has to be asked before the GPU sees what was written */
    uint32_t limit_ms;                  /* for each thing that is waited for */
    /* what came out: */
    bool send, receive; /* patterns arrived unharmed from, in GPU memory */
    bool stuck;         /* a copy of the driver did not end: the memory must not be freed */
    char way[64];       /* how the adapter reaches it */
    struct hrd_gdr_rate send_rate, receive_rate; /* of a direction that works */
    char why_send[400], why_receive[400];
};

/* Blocks, at most for some times the limit. */
void hrd_gdr_trial(struct hrd_gdr_trial *t);

#endif
