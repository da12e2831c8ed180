/* SPDX-License-Identifier: MIT */
/*
 * Host memory that the driver does not pin, on the driver without a GPU: at once, or after some of it. The daemon's: jobs copy
 * their GPU memory themselves, a warning says why, and nothing stays pinned that would be in the way of the next attempt. A
 * rank's staging window: small operations too go by the GPU memory that the daemon has. Neither: a refusal in words. timeout: 120
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

/* The daemon pins its arena, then its memory for copies. A rank pins the words of its streams and the communicator's area, then its
   window. */
#define AT_ONCE "MemHostRegister=2"
#define SECOND "MemHostRegister=2@2+"
#define SECOND_ONCE "MemHostRegister=2@2"
#define WINDOW "MemHostRegister=2@3+"

struct pins {
    const char *daemon, *rank; /* FAKE_CUDA_FAIL; NULL: all can be pinned */
    bool rank_0_alone;         /* the others pin theirs */
    const char *report;        /* in the path report of ranks that are concerned */
    bool staged;               /* ops went through the window, all of them */
};

static const struct hrg_driver *drv;
static unsigned warnings;

static void listen_for(void *user, hclient_log_level_t level, const char *text)
{
    (void)user;
    warnings += level == HCLIENT_LOG_WARN && strstr(text, "cannot pin") && strstr(text, "staging window");
}

static int begin(struct hpf_rank *me, struct ht_env *e)
{
    const struct pins *p = me->arg;
    if (p->rank != NULL && (me->rank == 0 || !p->rank_0_alone))
        setenv("FAKE_CUDA_FAIL", p->rank, 1);
    HT_TRY(me, hclient_set_log_callback(listen_for, NULL));
    drv = ht_gpu_open(me);
    return drv == NULL || ht_join(e, me, 0, NULL) != 0;
}

static int right(struct hpf_rank *me)
{
    struct ht_env e;
    char *path;
    const struct pins *p = me->arg;
    const bool window = p->rank != NULL && (me->rank == 0 || !p->rank_0_alone);
    if (begin(me, &e) != 0 || ht_sums(&e, true) != 0 || ht_sums(&e, false) != 0)
        return 1;
    HT_TRY(me, hclient_comm_path(e.comm, &path));
    if (p->rank == NULL || window)
        HT_EXPECT(me, strstr(path, p->report) != NULL, "the path report does not say \"%s\": %s", p->report,
                  path);
    if (p->staged || window)
        HT_EXPECT(me, strstr(path, p->staged ? "\"shared_ops\": 0" : "\"staged_ops\": 0") != NULL,
                  "an op went the other way: %s", path);
    HT_EXPECT(me, warnings == window, "%u warnings about the window, not %u: %s", warnings, window, path);
    hclient_free(path);
    return ht_leave(&e);
}

static int refused(struct hpf_rank *me)
{
    struct ht_env e;
    hrg_ptr d;
    if (begin(me, &e) != 0)
        return 1;
    HT_CUDA(me, drv->MemAlloc(&d, 400000));
    void *at = (void *)(uintptr_t)d;
    static const unsigned counts[] = {10, 100000, 10};
    for (unsigned i = 0; i < 3; i++) {
        hclient_result_t r =
            hclient_all_reduce(e.comm, at, at, counts[i], HCLIENT_FLOAT32, HCLIENT_SUM, NULL, NULL);
        if (ht_refused(me, r, HCLIENT_RESOURCE, "(ulimit -l)") != 0 ||
            ht_refused(me, r, HCLIENT_RESOURCE, "the daemon cannot have this GPU memory") != 0 ||
            ht_refused(me, r, HCLIENT_RESOURCE, "cannot be registered with CUDA") != 0)
            return 1;
    }
    return ht_sums(&e, false) != 0 ? 1 : ht_leave(&e);
}

static void with(const struct pins *p, hpf_rank_fn fn)
{
    if (p->daemon != NULL)
        setenv("FAKE_CUDA_FAIL", p->daemon, 1);
    struct hpf_cluster *c = ht_cluster(1, NULL);
    unsetenv("FAKE_CUDA_FAIL");
    const struct ht_job job = {
        .nranks = 2, .fn = fn, .arg = (void *)(uintptr_t)p, .expected_bytes = 12 << 20};
    ht_run(c, &job);
    if (p->daemon != NULL) {
        HT_CHECK(ht_log_has(c, 0, "warning: GPU 0000:"), "%s: the daemon does not warn", p->daemon);
        HT_CHECK(ht_log_has(c, 0, "cannot be registered with CUDA"), "%s: no reason in the log", p->daemon);
    }
    if (p->daemon != NULL && p->staged) {
        char *status = ht_status(c, 0);
        HT_CHECK(strstr(status, "\"pinned_bytes\": 0,"), "%s: memory is pinned: %s", p->daemon, status);
        free(status);
    }
    ht_cluster_end(c);
}

int main(void)
{
    static const struct pins daemons[] = {
        {.daemon = AT_ONCE, .report = "cannot be registered with CUDA", .staged = true},
        {.daemon = SECOND, .report = "cannot be registered with CUDA", .staged = true},
        /* Refused once: the next allocation is the daemon's. */
        {.daemon = SECOND_ONCE, .report = "mapped GPU memory without copies"},
    };
    static const struct pins windows[] = {
        {.rank = WINDOW, .report = "\"unpinned_because\": \"hclient_all_reduce: cannot pin"},
        {.rank = WINDOW,
         .rank_0_alone = true,
         .report = "\"unpinned_because\": \"hclient_all_reduce: cannot pin"},
    };
    static const struct pins neither = {.daemon = AT_ONCE, .rank = WINDOW, .staged = true};
    ht_gpu_fake("libcuda_fake.so.1");
    for (unsigned i = 0; i < sizeof(windows) / sizeof(windows[0]); i++)
        with(&windows[i], right);
    with(&neither, refused);
    setenv("HREDUCE_GPU_STAGED_BYTES", "0", 1);
    for (unsigned i = 0; i < sizeof(daemons) / sizeof(daemons[0]); i++)
        with(&daemons[i], right);
    return 0;
}
