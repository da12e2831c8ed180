/* SPDX-License-Identifier: MIT */
/*
 * Joining: by name with the variables of torchrun, Open MPI and Slurm, several communicators of one name, a
 * restarted attempt; and what is refused, in words: a rank that never comes, a rank twice, another world size,
 * a name that cannot be, no launcher at all. timeout: 120
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/lib/harness.h"

static const char *const launcher_variables[] = {"RANK",
                                                 "WORLD_SIZE",
                                                 "LOCAL_RANK",
                                                 "MASTER_ADDR",
                                                 "MASTER_PORT",
                                                 "TORCHELASTIC_RUN_ID",
                                                 "TORCHELASTIC_RESTART_COUNT",
                                                 "OMPI_COMM_WORLD_RANK",
                                                 "OMPI_COMM_WORLD_SIZE",
                                                 "OMPI_COMM_WORLD_LOCAL_RANK",
                                                 "SLURM_PROCID",
                                                 "SLURM_NTASKS",
                                                 "SLURM_LOCALID",
                                                 "SLURM_JOB_ID",
                                                 "SLURM_STEP_ID",
                                                 "SLURM_LAUNCH_NODE_IPADDR",
                                                 "HREDUCE_ROOT_ADDR"};

static void no_launcher(void)
{
    for (size_t i = 0; i < sizeof(launcher_variables) / sizeof(launcher_variables[0]); i++)
        unsetenv(launcher_variables[i]);
}

static void set(const char *name, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void set(const char *name, const char *fmt, ...)
{
    char value[128];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(value, sizeof(value), fmt, ap);
    va_end(ap);
    setenv(name, value, 1);
}

static void torchrun(const struct hpf_rank *me, unsigned attempt)
{
    no_launcher();
    set("RANK", "%u", me->rank);
    set("WORLD_SIZE", "%u", me->nranks);
    set("LOCAL_RANK", "%u", me->local);
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", "29500"); /* torch's own, not ours */
    set("TORCHELASTIC_RUN_ID", "job7");
    set("TORCHELASTIC_RESTART_COUNT", "%u", attempt);
}

static void open_mpi(const struct hpf_rank *me)
{
    no_launcher();
    set("OMPI_COMM_WORLD_RANK", "%u", me->rank);
    set("OMPI_COMM_WORLD_SIZE", "%u", me->nranks);
    set("OMPI_COMM_WORLD_LOCAL_RANK", "%u", me->local);
    set("MASTER_ADDR", "127.0.0.2");
}

static void slurm(const struct hpf_rank *me)
{
    no_launcher();
    set("SLURM_PROCID", "%u", me->rank);
    set("SLURM_NTASKS", "%u", me->nranks);
    set("SLURM_LOCALID", "%u", me->local);
    set("SLURM_JOB_ID", "4711");
    set("SLURM_STEP_ID", "0");
    set("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1");
}

static int use(struct hpf_rank *me, hclient_comm_t comm, unsigned number)
{
    struct ht_env e = {.comm = comm};
    struct ht_coll c = {.coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = 1001};
    if (ht_adopt(&e, me, number) != 0 || ht_collective(&e, &c) != 0)
        return 1;
    return ht_leave(&e);
}

static int join_and_use(struct hpf_rank *me, const char *name, unsigned number)
{
    hclient_comm_t comm = NULL;
    HT_TRY(me, hclient_comm_init_name(&comm, name, NULL));
    return use(me, comm, number);
}

/* Several of one name and two names at once. */
static int several(struct hpf_rank *me)
{
    hclient_comm_t a[2], b;
    torchrun(me, 0);
    HT_TRY(me, hclient_comm_init_name(&a[0], "twice", NULL));
    HT_TRY(me, hclient_comm_init_name(&b, "once", NULL));
    HT_TRY(me, hclient_comm_init_name(&a[1], "twice", NULL));
    return use(me, a[1], 10) != 0 || use(me, a[0], 11) != 0 || use(me, b, 12) != 0;
}

/* r must be an error whose sentence has both words. */
static int refused(struct hpf_rank *me, hclient_result_t r, hclient_result_t want, const char *a,
                   const char *b)
{
    const char *text = hclient_last_error(NULL);
    HT_EXPECT(me, r == want, "expected '%s', got '%s': %s", hclient_strerror(want), hclient_strerror(r),
              text);
    HT_EXPECT(me, strstr(text, a) && strstr(text, b), "the sentence names neither '%s' nor '%s': %s", a, b,
              text);
    return 0;
}

/* Ranks 1 and 3 of 4 never come; everybody else is told both. */
static int missing(struct hpf_rank *me)
{
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    config.setup_timeout_ms = ht_ms(1000);
    torchrun(me, 0);
    if (me->rank % 2 == 0) {
        hclient_comm_t comm = NULL;
        hclient_result_t r = hclient_comm_init_name(&comm, "missing", &config);
        if (refused(me, r, HCLIENT_TIMEOUT, "1", "3") != 0)
            return 1;
    }
    return hpf_rank_barrier(me, false, ht_ms(20000)) < 0;
}

/* Ranks 0 and 1 both say that they are rank 0, and live: one of them is refused, by name, at once. */
static int rank_twice(struct hpf_rank *me)
{
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    config.setup_timeout_ms = ht_ms(2000);
    struct ht_page *page = me->shared;
    _Atomic uint32_t *refusals = &page->id_ready[60];
    if (me->rank < 2) {
        hclient_comm_t comm = NULL;
        torchrun(me, 0);
        set("RANK", "0");
        hclient_result_t r = hclient_comm_init_name(&comm, "double", &config);
        HT_EXPECT(me, r == HCLIENT_REFUSED || r == HCLIENT_TIMEOUT, "rank 0 twice: %s: %s",
                  hclient_strerror(r), hclient_last_error(NULL));
        if (r == HCLIENT_REFUSED) {
            atomic_fetch_add(refusals, 1);
            HT_EXPECT(me, strstr(hclient_last_error(NULL), "rank 0"), "the refusal names no rank: %s",
                      hclient_last_error(NULL));
        }
    }
    if (hpf_rank_barrier(me, false, ht_ms(20000)) < 0)
        return 1;
    HT_EXPECT(me, atomic_load(refusals) == 1, "%u of the two ranks 0 were refused", atomic_load(refusals));
    return 0;
}

/* The id says nothing of the size; ranks that disagree about it must not form a communicator. */
static int other_size(struct hpf_rank *me)
{
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    config.setup_timeout_ms = ht_ms(1500);
    struct ht_page *page = me->shared;
    hclient_comm_t comm = NULL;
    if (me->rank == 0)
        HT_TRY(me, hclient_get_unique_id(&page->id[50]));
    if (hpf_rank_barrier(me, false, ht_ms(20000)) < 0)
        return 1;
    int size = me->rank == 2 ? 5 : 4;
    hclient_result_t r = hclient_comm_init_rank_config(&comm, size, page->id[50], (int)me->rank, &config);
    HT_EXPECT(me, r == HCLIENT_REFUSED || r == HCLIENT_TIMEOUT || r == HCLIENT_MISMATCH,
              "sizes 4 and 5 formed a communicator: %s", hclient_strerror(r));
    HT_EXPECT(me, hclient_last_error(NULL)[0], "no sentence");
    return hpf_rank_barrier(me, false, ht_ms(20000)) < 0;
}

static int bad_calls(struct hpf_rank *me)
{
    hclient_comm_t comm = NULL;
    hclient_unique_id_t zero = {{0}};
    char longer[100];
    memset(longer, 'x', sizeof(longer) - 1);
    longer[sizeof(longer) - 1] = 0;
    torchrun(me, 0);
    if (refused(me, hclient_comm_init_name(&comm, "", NULL), HCLIENT_INVALID_ARGUMENT, "name", "") != 0 ||
        refused(me, hclient_comm_init_name(&comm, longer, NULL), HCLIENT_INVALID_ARGUMENT, "name", "") != 0 ||
        refused(me, hclient_comm_init_rank(&comm, 4, zero, 0), HCLIENT_INVALID_ARGUMENT, "id", "") != 0 ||
        refused(me, hclient_comm_init_rank(&comm, 4, zero, 4), HCLIENT_INVALID_ARGUMENT, "", "") != 0 ||
        refused(me, hclient_comm_init_rank(&comm, 0, zero, 0), HCLIENT_INVALID_ARGUMENT, "", "") != 0)
        return 1;
    set("RANK", "many");
    if (refused(me, hclient_comm_init_name(&comm, "x", NULL), HCLIENT_INVALID_ARGUMENT, "RANK", "many") != 0)
        return 1;
    no_launcher();
    return refused(me, hclient_comm_init_name(&comm, "x", NULL), HCLIENT_INVALID_ARGUMENT, "WORLD_SIZE", "");
}

static int rank_main(struct hpf_rank *me)
{
    torchrun(me, 0);
    if (join_and_use(me, "model", 0) != 0)
        return 1;
    torchrun(me, 1);
    if (join_and_use(me, "model", 1) != 0)
        return 1;
    open_mpi(me);
    if (join_and_use(me, "model", 2) != 0)
        return 1;
    slurm(me);
    if (join_and_use(me, "model", 3) != 0)
        return 1;
    set("HREDUCE_ROOT_ADDR", "127.0.0.2");
    if (join_and_use(me, "with root", 4) != 0)
        return 1;
    if (several(me) != 0 || missing(me) != 0 || rank_twice(me) != 0 || other_size(me) != 0 ||
        bad_calls(me) != 0)
        return 1;
    /* After all of that the daemons serve the next job. */
    torchrun(me, 0);
    return join_and_use(me, "after", 5);
}

int main(void)
{
    struct hpf_cluster *c = ht_cluster(2, NULL);
    struct ht_job job = {.nranks = 4, .fn = rank_main};
    ht_run(c, &job);
    ht_cluster_end(c);
    return 0;
}
