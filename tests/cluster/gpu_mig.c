/* SPDX-License-Identifier: MIT */
/*
 * GPUs by name, on the driver without a GPU: instances of MIG and GPUs in any order and by beginnings of their UUIDs. An instance
 * is a device of its own, which reaches no other; one that the daemon does not see is named, and its memory is copied, or refused
 * where p2p is required. The same for a GPU that the daemon does not see. timeout: 60
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/gpu_driver.h"
#include "tests/lib/harness.h"

enum { COUNT = 20000 };

/* Instances 0 and 1 of GPU 1. */
#define FIRST "MIG-66616b65-2d63-7564-612d-6d6967303031"
#define SECOND "MIG-66616b65-2d63-7564-612d-6d6967313031"
#define GPU(n) "GPU-66616b65-2d63-7564-612d-6465762d303" #n

static const struct hrg_driver *drv;

/* What a job is to see and find. */
struct setting {
    const char *visible[3]; /* by rank */
    bool required;          /* p2p */
    const char *refused[3]; /* words for it; NULL: it works */
    const char *staged[3];  /* words in the rank's path report; NULL: its memory is shared */
    const char *path;       /* in every rank's; NULL: nothing */
};

static int join(struct hpf_rank *me, const struct setting *s, struct ht_env *e)
{
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    config.require = s->required ? HCLIENT_REQUIRE_P2P : 0;
    setenv("CUDA_VISIBLE_DEVICES", s->visible[me->rank], 1);
    me->local = 0; /* the first that is seen */
    drv = ht_gpu_open(me);
    return drv == NULL || ht_join(e, me, 0, &config) != 0;
}

static int refuses(struct ht_env *e, const char *words)
{
    hrg_ptr p;
    hclient_op_t op = {.number = 0};
    HT_CUDA(e->me, drv->MemAlloc(&p, COUNT * sizeof(float)));
    void *at = (void *)(uintptr_t)p;
    hclient_result_t r =
        hclient_all_reduce(e->comm, at, at, COUNT, HCLIENT_FLOAT32, HCLIENT_SUM, HRG_STREAM_PER_THREAD, &op);
    if (r == HCLIENT_OK)
        r = hclient_wait(op);
    return ht_refused(e->me, r, HCLIENT_UNSUPPORTED, words);
}

static int rank_main(struct hpf_rank *me)
{
    const struct setting *s = me->arg;
    const char *staged = s->staged[me->rank];
    struct ht_env e;
    char *path;
    if (join(me, s, &e) != 0)
        return 1;
    if (s->refused[me->rank])
        return refuses(&e, s->refused[me->rank]) != 0 ? 1 : ht_leave(&e);
    for (unsigned i = 0; i < 3; i++) {
        struct ht_coll c = {
            .coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = COUNT, .gpu = true};
        if (ht_collective(&e, &c) != 0)
            return 1;
    }
    HT_TRY(me, hclient_comm_path(e.comm, &path));
    HT_EXPECT(me, strstr(path, staged ? "\"shared_ops\": 0" : "\"staged_ops\": 0"), "its memory is %s: %s",
              staged ? "shared" : "copied", path);
    HT_EXPECT(me, !staged || strstr(path, staged), "the path does not say \"%s\": %s", staged, path);
    HT_EXPECT(me, !s->path || strstr(path, s->path), "the path does not say \"%s\": %s", s->path, path);
    hclient_free(path);
    /* The test's own context is one; the library asks for none. */
    HT_EXPECT(me, ht_gpu_calls("DevicePrimaryCtxRetain") == 1, "%u contexts were asked for",
              ht_gpu_calls("DevicePrimaryCtxRetain"));
    return ht_leave(&e);
}

/* daemon_sees: its CUDA_VISIBLE_DEVICES, NULL: all; names: in its status, the last is NULL. */
static void run(unsigned nranks, struct setting *s, const char *daemon_sees, const char *const *names)
{
    if (daemon_sees)
        setenv("CUDA_VISIBLE_DEVICES", daemon_sees, 1);
    struct hpf_cluster *c = ht_cluster(1, NULL);
    unsetenv("CUDA_VISIBLE_DEVICES");
    const struct ht_job job = {.nranks = nranks, .fn = rank_main, .arg = s};
    ht_run(c, &job);
    char *status = ht_status(c, 0);
    for (; *names; names++)
        HT_CHECK(strstr(status, *names), "the daemon has not used %s: %s", *names, status);
    free(status);
    ht_cluster_end(c);
}

int main(void)
{
    static const char *const none[] = {NULL};
    static const char *const all[] = {FIRST, SECOND, GPU(2), NULL};
    static const char *const both[] = {FIRST, SECOND, NULL};
    static const char *const first[] = {FIRST, NULL};
    ht_gpu_fake("libcuda_fake.so.1");
    setenv("HREDUCE_GPU_STAGED_BYTES", "0", 1);
    setenv("FAKE_CUDA_DEVICES", "3", 1);
    setenv("FAKE_CUDA_MIG", "1=2", 1);

    /* A driver that shows all instances. */
    setenv("FAKE_CUDA_MIG_SEEN", "16", 1);
    struct setting named = {
        .visible = {"MIG-66616b65-2d63-7564-612d-6d696731," GPU(0), FIRST ",2", GPU(2) "," SECOND ",0"}};
    run(3, &named, NULL, all);
    run(3, &named, SECOND ",2," FIRST ",0", all);
    struct setting apart = {.visible = {FIRST, SECOND},
                            .path = "GPUs 0000:20:00.0 " FIRST " and 0000:20:00.0 " SECOND
                                    " do not reach each other: instances of MIG reach no other device"};
    run(2, &apart, NULL, both);
    struct setting required = {
        .visible = {FIRST, SECOND},
        .required = true,
        .refused = {"instances of MIG reach no other device", "instances of MIG reach no other device"}};
    run(2, &required, NULL, none);

    /* One that shows a process the first alone. */
    unsetenv("FAKE_CUDA_MIG_SEEN");
    struct setting unseen = {.visible = {FIRST, SECOND},
                             .staged = {NULL, SECOND " is not visible to the daemon"}};
    run(2, &unseen, NULL, first);
    unseen.staged[1] = "most drivers show a process one instance of MIG alone";
    run(2, &unseen, NULL, first);
    struct setting unseen_required = {
        .visible = {SECOND, SECOND},
        .required = true,
        .refused = {SECOND " is not visible to the daemon", SECOND " is not visible to the daemon"}};
    run(2, &unseen_required, FIRST ",0,2", none);

    /* A GPU that is hidden from the daemon. */
    unsetenv("FAKE_CUDA_MIG");
    struct setting hidden = {.visible = {"1", "0"}, .staged = {GPU(1) " is not visible to the daemon"}};
    run(2, &hidden, "2,0", none);
    return 0;
}
