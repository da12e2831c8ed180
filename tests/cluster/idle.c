/* SPDX-License-Identifier: MIT */
/*
 * Nobody burns a core by waiting: daemons with idle clients use less than 1% of a core, clients nothing, and
 * neither more than 5% while seven ranks wait for the eighth. timeout: 60
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/lib/harness.h"

#define NRANKS 8u
#define WATCH_MS 4000u

/* Processor time of a process so far, in ms. */
static long used_ms(pid_t pid)
{
    char path[64], line[1024] = "";
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "re");
    if (f) {
        line[fread(line, 1, sizeof(line) - 1, f)] = 0;
        fclose(f);
    }
    /* User and system time are fields 14 and 15; the name before may have blanks. */
    char *p = strrchr(line, ')');
    for (int i = 0; p && i < 12; i++)
        p = strchr(p + 1, ' ');
    HT_CHECK(p != NULL, "cannot make sense of %s", path);
    long ticks = p ? strtol(p, &p, 10) : 0;
    ticks += p ? strtol(p, NULL, 10) : 0;
    return ticks * 1000 / sysconf(_SC_CLK_TCK);
}

static int rank_main(struct hpf_rank *me)
{
    struct ht_env e;
    struct ht_coll c = {.coll = HRP_ALL_REDUCE, .dtype = HRP_F32, .redop = HRP_SUM, .count = 10007};
    if (ht_join(&e, me, 0, NULL) != 0 || ht_collective(&e, &c) != 0)
        return 1;
    /* The parent watches us being idle, then waiting for rank 7. */
    if (hpf_rank_barrier(me, true, ht_ms(30000)) < 0)
        return 1;
    hpf_sleep_ms(ht_ms(WATCH_MS + 500));
    if (hpf_rank_barrier(me, true, ht_ms(30000)) < 0)
        return 1;
    if (me->rank == NRANKS - 1)
        hpf_sleep_ms(ht_ms(WATCH_MS + 1500));
    return ht_collective(&e, &c) != 0 || ht_leave(&e) != 0;
}

static void watch(struct hpf_cluster *c, struct hpf_job *job, const char *when, double daemon_limit,
                  double rank_limit)
{
    long daemons[2], ranks[NRANKS];
    double window = ht_ms(WATCH_MS);
    HT_CHECK(hpf_job_barrier(job, ht_ms(30000)), "the ranks did not come");
    hpf_sleep_ms(ht_ms(300));
    for (unsigned n = 0; n < 2; n++)
        daemons[n] = used_ms(c->node[n].pid);
    for (unsigned r = 0; r < NRANKS; r++)
        ranks[r] = used_ms(hpf_job_pid(job, r));
    hpf_sleep_ms((unsigned)window);
    for (unsigned n = 0; n < 2; n++) {
        double share = (double)(used_ms(c->node[n].pid) - daemons[n]) / window;
        printf("%s: daemon %u %.2f%%\n", when, n, 100 * share);
        HT_CHECK(share <= daemon_limit, "%s: the daemon of node %u uses %.1f%% of a core", when, n,
                 100 * share);
    }
    for (unsigned r = 0; r < NRANKS; r++) {
        double share = (double)(used_ms(hpf_job_pid(job, r)) - ranks[r]) / window;
        HT_CHECK(share <= rank_limit, "%s: rank %u uses %.1f%% of a core", when, r, 100 * share);
    }
}

int main(void)
{
    struct hpf_cluster *c = ht_cluster(2, NULL);
    struct ht_job job = {.nranks = NRANKS, .fn = rank_main};
    struct hpf_job *started = ht_start(c, &job);
    /* Ticks are 10 ms: one more or less is 0.25%. */
    watch(c, started, "idle", 0.01, 0.006);
    watch(c, started, "waiting for one rank", 0.05, 0.05);
    ht_finish(started, 30000);
    ht_cluster_end(c);
    return 0;
}
