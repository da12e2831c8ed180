/* SPDX-License-Identifier: MIT */
/*
 * GPUDirect RDMA: memory on each GPU that the node's RDMA adapter reads and writes by itself, for the exchange of the sm
 * engine. A GPU gets it when it comes up, or when the adapter becomes known. It is used only in the directions in which
 * patterns went through the adapter unharmed: that a module is loaded or a driver says yes proves nothing.
 *
 * The memory is the agent's to use while it holds it. A GPU that goes down asks for it back (`wanted`), and does so only
 * when the agent has let go: no adapter is pointed at memory that is gone.
 */
#ifndef HRD_GPU_GDR_H
#define HRD_GPU_GDR_H

#include "daemon/gpu/gpu.h"
#include "daemon/transport.h"

struct hrd_verbs_device;

enum hrd_gdr_mode {
    HRD_GDR_AUTO, /* where it is not slower than the way through host memory */
    HRD_GDR_ON,   /* wherever it works */
    HRD_GDR_OFF,
};

/* What is known of one GPU. */
struct hrd_gdr {
    bool ready;         /* at least one direction works. Only then: */
    bool send, receive; /* the adapter reads its memory; writes it, in an order that can be relied on */
    bool receive_all;   /* and in one that other GPUs can rely on as well */
    bool wanted;        /* the GPU wants its memory back: nothing new may begin there */
    bool trying;        /* not ready, but it may be in a moment */
    unsigned distance;  /* GPUs with a lower one are nearer to the adapter */
    struct hrd_gdr_rate read, written; /* by the adapter, as the trial measured */
    struct hrd_tp_memory memory;
    /* "memory of GPU 0000:18:00.0, read and written by mlx5_0 port 1 (GPU memory by dmabuf)" */
    char used[400];
    char why[512];    /* what does not work, and why; "": all does */
    char remedy[240]; /* for that */
};

/* The adapter that links use. Called for each that is chosen; only the first counts, unless nothing works with it. Any
   thread; never blocks. */
void hrd_gpus_set_nic(struct hrd_gpus *gpus, const struct hrd_verbs_device *nic);
/* What is known of this GPU, copied. Any thread; briefly locks. */
void hrd_gpus_gdr(const struct hrd_gpus *gpus, int16_t gpu, struct hrd_gdr *out);
/* Another number each time that an answer of hrd_gpus_gdr() may have changed: read before asking. Any thread. */
uint64_t hrd_gpus_gdr_epoch(const struct hrd_gpus *gpus);

/* Agent thread: from a true answer until the other call the memory stays. False: it is not ready, or wanted back. */
bool hrd_gpus_gdr_hold(struct hrd_gpus *gpus, int16_t gpu);
void hrd_gpus_gdr_let_go(struct hrd_gpus *gpus, int16_t gpu);

/*
 * What the adapter wrote into this GPU's memory, as far as its completions say, becomes visible to kernels that are
 * launched afterwards: on that GPU, or (all) on any. Where the GPU keeps that order by itself nothing is called. 0, or
 * -1 with a sentence, and *lost: the GPU is. Agent thread, of which it takes a few microseconds.
 */
int hrd_gpus_gdr_flush(struct hrd_gpus *gpus, int16_t gpu, bool all, bool *lost, char *why, size_t len);

/* Whether a direction that works is left alone all the same, at these rates. */
bool hrd_gdr_too_slow(enum hrd_gdr_mode mode, const struct hrd_gdr_rate *r);

#endif
