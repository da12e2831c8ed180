/* SPDX-License-Identifier: MIT */
/* What the programs of tests/gpu share: the driver, memory of one GPU, time. Errors end the process with a sentence. */
#ifndef TEST_LIB_GPU_JOB_H
#define TEST_LIB_GPU_JOB_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/gpu_driver.h"
#include "kernels/gpu_kernels.h"

#define GJ_SKIP 77 /* status of a process that finds no GPU */

_Noreturn void gj_die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Ends the process unless r is HRG_SUCCESS. */
void gj_check(hrg_result r, const char *what);

/* Options of the programs that start daemons: --csv FILE, --keep-logs DIR, and --key KEY=VALUE for each line of theirs. */
#define GJ_MAX_KEYS 16u
struct gj_options {
    const char *csv, *keep_logs;
    const char *key[GJ_MAX_KEYS];
    unsigned nkeys;
};
enum { GJ_CSV = 256, GJ_KEEP_LOGS, GJ_KEY };
/* For the list that getopt_long() takes. */
#define GJ_OPTIONS                                                  \
    {"csv", 1, NULL, GJ_CSV}, {"keep-logs", 1, NULL, GJ_KEEP_LOGS}, \
    {                                                               \
        "key", 1, NULL, GJ_KEY                                      \
    }
/* Takes what getopt_long() found; false: it is none of these, or one key too many. */
bool gj_option(struct gj_options *o, int c, const char *value);

/* The driver, initialised; ends with status GJ_SKIP where there is none or no GPU. */
const struct hrg_driver *gj_driver(int *ndevices);

uint64_t gj_now_ns(void);

/* One GPU, its primary context current in the calling thread. */
struct gj_gpu {
    const struct hrg_driver *drv;
    int ordinal;
    hrg_device dev;
    hrg_ctx ctx;
    hrg_stream stream;
    uint32_t multiprocessors;
    hrg_module module;
    hrg_function function[HRG_NKERNELS]; /* after gj_load_kernels() */
    _Atomic uint64_t *word;              /* pinned, raised by gj_launch() */
    uint64_t word_device, counter_device;
    uint64_t launches;
};

void gj_open(struct gj_gpu *g, const struct hrg_driver *drv, int ordinal);
void gj_use(const struct gj_gpu *g);
/* Both ways where the devices allow it; returns whether. */
int gj_peers(struct gj_gpu *a, struct gj_gpu *b);
void gj_load_kernels(struct gj_gpu *g);
/* Launches with the next value of the word; gj_wait() waits until it is there, at most 30 s. */
void gj_launch(struct gj_gpu *g, struct hrg_launch *l);
void gj_wait(struct gj_gpu *g);
uint64_t gj_alloc(struct gj_gpu *g, uint64_t bytes);
/* Of cuMemCreate, mapped, which other processes get as a descriptor. For the life of the process. */
uint64_t gj_alloc_vmm(struct gj_gpu *g, uint64_t bytes);
void *gj_pinned(struct gj_gpu *g, uint64_t bytes, uint64_t *device);
void gj_upload(struct gj_gpu *g, uint64_t device, const void *pinned, uint64_t bytes);
void gj_download(struct gj_gpu *g, void *pinned, uint64_t device, uint64_t bytes);

/* The median of n values; sorts them. 0 for none. */
double gj_median(double *v, unsigned n);

#endif
