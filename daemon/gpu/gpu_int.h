/* SPDX-License-Identifier: MIT */
/* Inside daemon/gpu: shared by gdr.c, gpu.c, import.c, pair.c, pin.c and view.c only. */
#ifndef HRD_GPU_INT_H
#define HRD_GPU_INT_H

#include <pthread.h>

#include "daemon/gpu/gdr.h"
#include "daemon/gpu/gpu.h"
#include "daemon/verbs/device.h"

#define HRD_GPU_PINS 12

/* An import as the kernels of another GPU see it. Neither: that GPU is not up, or does not pair with the owner. */
struct gpu_view {
    hrg_ptr ptr;     /* 0: not there */
    const char *why; /* it was refused; lives as long as gpus */
};

/* One mapping, and everybody who shares it. Of its GPU's thread; `users` also under the lock. */
struct hrd_gpu_import {
    struct gpu *g;
    struct hrd_gpu_source source; /* its descriptors are closed; LEGACY: the key by which it is found again */
    hrg_ptr ptr;
    const char *
        alone; /* VMM: why only its own GPU has access, a phrase that lives as long as gpus. NULL: all have */
    uint32_t users;
    struct hrd_gpu_import *next;        /* changed under the pair lock and the lock, read under either */
    struct gpu_view view[HRD_GPUS_MAX]; /* the same */
};

struct gpu_request {
    enum hrd_gpu_event_type answer; /* IMPORTED: open `source`; CLOSED: close `import` */
    uint64_t sid, token;
    struct hrd_gpu_source source;
    struct hrd_gpu_import *import;
    bool gdr; /* instead of all that: the adapter is known now */
    struct gpu_request *next;
};

/* What is known of two GPUs. Written under the pair lock; why is a text that lives as long as gpus. */
struct gpu_pair {
    _Atomic bool direct;
    _Atomic(const char *) why;
    _Atomic(const char *)
        unreached; /* by kernels of the second: some import of the first. NULL: none. Under the lock */
    /* Of the pair (lower, higher) alone, under the lock: what the last verification found, also while they are down. */
    bool verified;
    enum hrd_pair_state found;
    double rate;
    const char *found_why;
};

struct gpu_gdr {
    struct hrd_gdr is;
    bool held; /* by the agent */
    /* Of the GPU's thread; constant while it is ready. */
    int ordering; /* HRG_ORDERING_* */
    bool can_flush;
};

struct gpu {
    struct hrd_gpu_dev dev;
    struct hrd_gpus *gpus;
    pthread_t thread;
    pthread_cond_t more;
    /* under the lock of gpus: */
    bool threaded, used; /* its thread runs; it was imported from once */
    bool up;
    char down_why[512]; /* of its thread: why it did not come up the last time, which is said once */
    char lost_why[512]; /* read without the lock once its bit in `lost` is set: never changes again */
    struct gpu_request *first, *last;
    struct hrd_gpu_import *imports;
    uint32_t nimports;
    uint64_t import_bytes, device_bytes;
    struct gpu_gdr gdr;
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
    _Atomic uint64_t lost; /* bit g: an error after which the context of GPU g can do nothing */
    struct text *texts;    /* of pairs */
    bool have_nic;
    struct hrd_verbs_device nic;
    _Atomic uint64_t gdr_epoch;

    pthread_mutex_t pin_lock; /* taken before the other, and held over calls that block */
    struct pinned_range range[HRD_GPU_PINS];
    unsigned nranges;
    unsigned pin_users; /* GPUs that are up */
    struct gpu *pin_owner;
    _Atomic bool pinned;

    pthread_mutex_t pair_lock; /* one verification at a time; views; taken before the lock */
    _Atomic uint64_t views_epoch;
};

/* gpu.c */
/* "GPU 0000:18:00.0 (NVIDIA H200)", in at most HRD_GPU_NAME bytes; returns buf. */
#define HRD_GPU_NAME 200u
const char *hrd_gpu_name(const struct hrd_gpu_dev *d, char *buf, size_t len);

/* Under the lock; g is up. Its thread will call hrd_gpu_gdr_up(). */
void hrd_gpu_ask_gdr(struct gpu *g);

/* gdr.c: all on the thread of g, whose context is current. */
/* g is up: gives it memory for the adapter, unless it has some, there is no adapter, or it does not reach it. */
void hrd_gpu_gdr_up(struct gpu *g);
/* g is to go down: asks the agent for that memory. False: the agent holds it still; with `force` it is waited for. */
bool hrd_gpu_gdr_idle(struct gpu *g, bool force);
/* It stays up after all. */
void hrd_gpu_gdr_stay(struct gpu *g);
/* It goes down: the memory is freed. */
void hrd_gpu_gdr_down(struct gpu *g);

/* pin.c: all on the thread of g, whose context is current. */
/* g comes up, and nothing of that can fail any more: registers the ranges when it is the first. 0, or -1 with a sentence. */
int hrd_gpu_pins_take(struct gpu *g, char *why, size_t len);
/* g goes down. False: its context holds the registrations that other GPUs use, so it stays up; not with `force`. */
bool hrd_gpu_pins_drop(struct gpu *g, bool force);

/* import.c: on the thread of g, whose context is current. */
/* 0 with i->ptr and i->alone, or -1 with a sentence. The descriptors of the source are closed in both cases. */
int hrd_gpu_map(struct gpu *g, struct hrd_gpu_import *i, char *why, size_t len);
/* A LEGACY import once more, with the context of `at`, another GPU, current: 0 and *ptr, or -1 with a phrase. */
int hrd_gpu_map_again(struct gpu *at, const struct hrd_gpu_import *i, hrg_ptr *ptr, char *why, size_t len);
void hrd_gpu_unmap(struct gpu *g, const struct hrd_gpu_source *source, hrg_ptr ptr);
/* Closes what descriptors are open and frees the arrays. */
void hrd_gpu_source_drop(struct hrd_gpu_source *source);

/* view.c */
/* On the thread of its GPU. Puts the mapped import among its GPU's, with its views; takes it and them away again. */
void hrd_gpu_import_link(struct hrd_gpu_import *i);
void hrd_gpu_import_unlink(struct hrd_gpu_import *i);
/* On the thread of g, under the pair lock: g comes up and pairs with the owner; g goes down. */
void hrd_gpu_views_take(struct gpu *g, struct gpu *owner);
void hrd_gpu_views_drop(struct gpu *g, struct gpu *owner);

/* pair.c: on the thread of g, which has just come up. */
void hrd_gpu_pairs_verify(struct gpu *g);
/* g goes down: nothing is known of its pairs any more. */
void hrd_gpu_pairs_forget(struct gpu *g);
/* A copy of the line that lives as long as gpus; equal lines are one. */
const char *hrd_gpus_keep(struct hrd_gpus *gpus, const char *line);

#endif
