/* SPDX-License-Identifier: MIT */
/*
 * Buffers in GPU memory for --gpu. The regions of the world stay in (pinned) host memory, where inputs are made and results
 * checked; each has a twin on the GPU, on which the collectives run.
 */
#ifndef HPF_GPU_H
#define HPF_GPU_H

#include "client/perf/world.h"

/* A context on the GPU of this rank and a stream; -1 with the sentence in w->err. */
int hpf_gpu_open(struct hpf_world *w);
/* Host memory and twin of a region, which is zero. */
int hpf_gpu_region_new(struct hpf_world *w, struct hpf_region *region, size_t bytes);
void hpf_gpu_region_free(struct hpf_world *w, struct hpf_region *region);
/* The first `bytes` of a region to its twin or back; returns when they are there. */
int hpf_gpu_upload(struct hpf_world *w, const struct hpf_region *region, size_t bytes);
int hpf_gpu_download(struct hpf_world *w, const struct hpf_region *region, size_t bytes);
/* NULL without --gpu. */
void *hpf_gpu_stream(const struct hpf_world *w);
/* "NVIDIA H200": of this rank. */
const char *hpf_gpu_name(const struct hpf_world *w);
void hpf_gpu_close(struct hpf_world *w);

#endif
