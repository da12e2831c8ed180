/* SPDX-License-Identifier: MIT */
/*
 * Memory regions: the one place that registers memory with a device. A region is host memory, GPU memory that its driver
 * exports as a dmabuf descriptor, or a plain GPU address that a peer-memory module of the kernel understands. Which of
 * them works is found by trying, in that order, never by the presence of a module or file; each way that a device refused
 * is remembered with its errno and not tried again, so that a refusal is logged once and costs nothing later.
 */
#ifndef HRD_VERBS_MR_H
#define HRD_VERBS_MR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/verbs/verbs_api.h"

enum hrd_mr_way { HRD_MR_HOST = 0, HRD_MR_DMABUF, HRD_MR_PEERMEM, HRD_MR_NWAYS };

struct hrd_mr_source {
    void *addr; /* host, or GPU virtual address */
    size_t len;
    bool gpu;
    int dmabuf_fd; /* gpu: -1: the GPU's driver gave none */
    uint64_t dmabuf_off;
    int dmabuf_err; /* dmabuf_fd -1: why, for the sentence; 0: it was not asked */
};

/* What a device refused: errno of the trial by way, 0: not tried or it worked. One a device, owned by its opener;
   NULL initialiser {0}. */
struct hrd_mr_memory {
    int refused[HRD_MR_NWAYS];
};

struct hrd_mr {
    struct ibv_mr *mr;
    enum hrd_mr_way way;
};

/* "host memory", "GPU memory by dmabuf", "GPU memory by the peer-memory module" */
const char *hrd_mr_way_name(enum hrd_mr_way way);
/* access: IBV_ACCESS_*. 0, or a negative errno with a sentence that lists every way that was tried, and what helps. Blocks
   while pages are pinned. */
int hrd_mr_register(const struct hrd_verbs *v, struct ibv_pd *pd, struct hrd_mr_memory *memory,
                    const struct hrd_mr_source *src, int access, struct hrd_mr *out, char *why, size_t len);
/* Does nothing with a region that is not registered. */
void hrd_mr_free(const struct hrd_verbs *v, struct hrd_mr *mr);

#endif
