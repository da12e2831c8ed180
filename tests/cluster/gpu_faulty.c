/* SPDX-License-Identifier: MIT */
/*
 * One GPU of four has a fault, on the driver without a GPU: what goes between it and the others arrives as zeros, or nothing can be
 * made on it at all. Jobs on the other three never notice and no line of the log concerns them; a job that has it gets right
 * results through host memory, its path report says why, and the daemon warns with the GPU's address. timeout: 120
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

#define FAULTY "0000:40:00.0" /* the fake's GPU 3 */

/* A job with the faulty GPU has it and GPU 0. */
struct fault {
    const char *variable, *value;
    const char *warning; /* of the daemon */
    const char *report;  /* in the path report of a rank that is concerned */
    bool staged;         /* memory on the GPU cannot be given to the daemon */
};

static const struct fault faults[] = {
    {"FAKE_CUDA_ZERO_PAIRS", "0-3,1-3,2-3", FAULTY " and 0000:10:00.0 claim peer access", "arrived damaged",
     false},
    /* The daemon alone: the job still has its memory there. */
    {"FAKE_CUDA_FAIL", "StreamCreateWithPriority=2#3", "GPU " FAULTY " (Fake GPU 3)", "GPU " FAULTY, true},
};

static const struct hrg_driver *drv;

static int sound(struct hpf_rank *me)
{
    struct ht_env e;
    char *path;
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0 || ht_sums(&e, true) != 0)
        return 1;
    HT_TRY(me, hclient_comm_path(e.comm, &path));
    HT_EXPECT(me, strstr(path, "\"staged_ops\": 0") && strstr(path, FAULTY) == NULL,
              "a job without the faulty GPU: %s", path);
    hclient_free(path);
    return ht_leave(&e);
}

static int with_faulty(struct hpf_rank *me)
{
    struct ht_env e;
    char *path;
    const struct fault *f = me->arg;
    const bool on_it = me->rank == 1;
    if (on_it)
        me->local = 3;
    drv = ht_gpu_open(me);
    if (drv == NULL || ht_join(&e, me, 0, NULL) != 0 || ht_sums(&e, true) != 0)
        return 1;
    HT_TRY(me, hclient_comm_path(e.comm, &path));
    if (on_it || !f->staged)
        HT_EXPECT(me, strstr(path, f->report) != NULL, "the path report does not say what is wrong: %s",
                  path);
    HT_EXPECT(me, (strstr(path, "\"staged_ops\": 0") == NULL) == (on_it && f->staged),
              "memory of rank %u goes the wrong way: %s", me->rank, path);
    hclient_free(path);
    return ht_leave(&e);
}

static void run(struct hpf_cluster *c, unsigned nranks, hpf_rank_fn fn, const struct fault *f)
{
    const struct ht_job job = {
        .nranks = nranks, .fn = fn, .arg = (void *)(uintptr_t)f, .expected_bytes = 12 << 20};
    ht_run(c, &job);
}

static void with(const struct fault *f)
{
    /* The GPUs stay up between the jobs, so that the sound ones also run beside the faulty one. */
    static const char *const keys[] = {"gpu_idle = 60s", NULL};
    setenv(f->variable, f->value, 1);
    struct hpf_cluster *c = ht_cluster(1, keys);
    unsetenv(f->variable);
    run(c, 3, sound, f);
    HT_CHECK(!ht_log_has(c, 0, FAULTY), "%s: the log of jobs without the faulty GPU has a line about it",
             f->variable);
    for (unsigned i = 0; i < 2; i++) {
        run(c, 2, with_faulty, f);
        HT_CHECK(ht_log_has(c, 0, f->warning), "%s: no warning in the log has \"%s\"", f->variable,
                 f->warning);
        run(c, 3, sound, f);
    }
    ht_cluster_end(c);
}

int main(void)
{
    ht_gpu_fake("libcuda_fake.so.1");
    setenv("HREDUCE_GPU_STAGED_BYTES", "0", 1);
    for (unsigned i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
        with(&faults[i]);
    return 0;
}
