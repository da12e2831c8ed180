/* SPDX-License-Identifier: MIT */
/* Inside daemon/gpu: shared by gpu.c, import.c, pair.c and pin.c only. */
#ifndef HRD_GPU_INT_H
#define HRD_GPU_INT_H

#include <pthread.h>

#include "daemon/gpu/gpu.h"

#define HRD_GPU_PINS 4

/* One mapping, and everybody who shares it. Of its GPU's thread; `users` also under the lock. */
struct hrd_gpu_import {
    struct gpu *g;
    struct hrd_gpu_source source; /* its descriptors are closed; LEGACY: the key by which it is found again */
    hrg_ptr ptr;
    uint32_t users;
    struct hrd_gpu_import *next;
};

struct gpu_request {
    enum hrd_gpu_event_type answer; /* IMPORTED: open `source`; CLOSED: close `import` */
    uint64_t sid, token;
    struct hrd_gpu_source source;
    struct hrd_gpu_import *import;
    struct gpu_request *next;
};

/* What is known of two GPUs. Written under the pair lock; why is a text that lives as long as gpus. */
struct gpu_pair {
    _Atomic bool direct;
    _Atomic(const char *) why;
};

struct gpu {
    struct hrd_gpu_dev dev;
    struct hrd_gpus *gpus;
    pthread_t thread;
    pthread_cond_t more;
    /* under the lock of gpus: */
    bool threaded, used; /* its thread runs; it was imported from once */
    bool up;
    bool retiring; /* lost, and to be taken down when its imports are closed */
    char lost_why[512];
    struct gpu_request *first, *last;
    struct hrd_gpu_import *imports;
    uint32_t nimports;
    uint64_t import_bytes, device_bytes;
    struct gpu_pair pair[HRD_GPUS_MAX];
};

struct pinned_range {
    char *base;
    uint64_t bytes;
    bool registered;
};

struct text {
    struct text *next;
    char line[];
};

struct hrd_gpus {
    struct hrd_gpus_config cfg;
    char node_name[65];
    int event_fd;
    pthread_mutex_t lock;
    struct hrd_gpu_event *event_first, *event_last;
    bool stop;
    /* The devices are listed once, by a thread of its own that ends then; requests wait for it. */
    enum { GPUS_UNKNOWN, GPUS_LISTING, GPUS_LISTED } listing;
    bool lister_to_join;
    pthread_t lister;
    struct gpu_request *unlisted_first, *unlisted_last;
    char refusal[400]; /* LISTED, and there is nothing to be had */
    const struct hrg_driver *drv;
    unsigned n;
    struct gpu *gpu[HRD_GPUS_MAX];
    struct text *texts; /* of pairs */

    pthread_mutex_t pin_lock; /* taken before the other, and held over calls that block */
    struct pinned_range range[HRD_GPU_PINS];
    unsigned nranges;
    unsigned pin_users; /* GPUs that are up */
    struct gpu *pin_owner;
    _Atomic bool pinned;

    pthread_mutex_t pair_lock; /* one verification at a time */
};

/* gpu.c */
/* "GPU 0000:18:00.0 (NVIDIA H200)"; returns buf. */
const char *hrd_gpu_name(const struct hrd_gpu_dev *d, char *buf, size_t len);

/* pin.c: all on the thread of g, whose context is current. */
/* g comes up: registers the ranges when it is the first. 0, or -1 with a sentence. */
int hrd_gpu_pins_take(struct gpu *g, char *why, size_t len);
/* g goes down. False: its context holds the registrations that other GPUs use, so it stays up; not with `force`. */
bool hrd_gpu_pins_drop(struct gpu *g, bool force);

/* import.c: on the thread of g, whose context is current. */
/* 0 and *ptr, or -1 with a sentence. The descriptors of the source are closed in both cases. */
int hrd_gpu_map(struct gpu *g, struct hrd_gpu_source *source, hrg_ptr *ptr, char *why, size_t len);
void hrd_gpu_unmap(struct gpu *g, const struct hrd_gpu_source *source, hrg_ptr ptr);
/* Closes what descriptors are open and frees the arrays. */
void hrd_gpu_source_drop(struct hrd_gpu_source *source);

/* pair.c: on the thread of g, which has just come up. */
void hrd_gpu_pairs_verify(struct gpu *g);
/* g goes down: nothing is known of its pairs any more. */
void hrd_gpu_pairs_forget(struct gpu *g);

#endif
