/* SPDX-License-Identifier: MIT */
/* One rank of tests/gpu/one.c: rank 0 measures what the machine allows, then all measure hreduce. */
#include "tests/lib/one.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "proto/types.h"

#define MAX_OPS 200
#define GROUPS 5u
#define BUSY_BYTES (UINT64_C(8) << 20)
#define BUSY_BYTES_QUICK (UINT64_C(16) << 10)
#define ALONE_NS UINT64_C(400000000)
#define SETTLE_US 100000
#define RATE_BYTES (UINT64_C(64) << 20)
#define RATE_BYTES_QUICK (UINT64_C(1) << 20)
#define TCP_TIMEOUT_S 20

struct rank {
    struct gr_rank g;
    struct one_page *page;
    const struct one_job *job;
    const struct one_plan *plan;
    uint64_t call_ns, calls;
};

static unsigned rounds(const struct rank *r, unsigned n)
{
    return r->job->quick ? 5 : n;
}

/* ---- what the machine allows ---------------------------------------------------------------------------------------- */

static double since_us(uint64_t began)
{
    return (double)(gj_now_ns() - began) * 1e-3;
}

static void await(struct gj_gpu *g)
{
    gj_check(g->drv->StreamSynchronize(g->stream), "awaiting a stream");
}

/* The sum that the op makes, of as many buffers, all on this GPU. */
static double launch_floor(struct rank *r, uint64_t bytes)
{
    struct gj_gpu *g = &r->g.gpu;
    const unsigned n = r->g.me->nranks, count = rounds(r, MAX_OPS);
    const struct hrk_fold f = hrk_fold_single(HRP_F32, HRP_SUM, n);
    uint64_t in[GR_MAX_RANKS], out[GR_MAX_RANKS], memory = gj_alloc(g, 2 * n * bytes);
    double us[MAX_OPS];
    struct hrg_launch l;
    for (unsigned i = 0; i < n; i++) {
        in[i] = memory + 2 * i * bytes;
        out[i] = in[i] + bytes;
    }
    if (hrg_fold_launch(&l, &f, out, n, in, n, bytes / 4, 2 * g->multiprocessors))
        gj_die("a fold was refused");
    for (unsigned i = 0; i < count; i++) {
        uint64_t began = gj_now_ns();
        gj_launch(g, &l);
        await(g);
        us[i] = since_us(began);
    }
    gj_check(g->drv->MemFree(memory), "freeing memory");
    return gj_median(us, count) + r->page->rtt_us;
}

static double copy_floor(struct rank *r, uint64_t bytes)
{
    struct gj_gpu *g = &r->g.gpu;
    const unsigned count = rounds(r, 50);
    double us[MAX_OPS];
    for (unsigned i = 0; i < count; i++) {
        uint64_t began = gj_now_ns();
        gj_check(g->drv->MemcpyDtoDAsync(r->g.recv, r->g.send, bytes, g->stream), "a copy");
        await(g);
        us[i] = since_us(began);
    }
    return gj_median(us, count);
}

/* GB/s each way with both directions busy. */
static double link_rate(struct rank *r, uint64_t bytes)
{
    struct gj_gpu *g = &r->g.gpu;
    const struct hrg_driver *drv = g->drv;
    const unsigned count = rounds(r, 10);
    uint64_t memory = gj_alloc(g, 2 * bytes);
    char *pinned = gj_pinned(g, 2 * bytes, NULL);
    hrg_stream other;
    double us[MAX_OPS];
    gj_check(drv->StreamCreateWithPriority(&other, HRG_STREAM_NON_BLOCKING, 0), "making a stream");
    for (unsigned i = 0; i < count; i++) {
        uint64_t began = gj_now_ns();
        gj_check(drv->MemcpyDtoHAsync(pinned, memory, bytes, g->stream), "a copy");
        gj_check(drv->MemcpyHtoDAsync(memory + bytes, pinned + bytes, bytes, other), "a copy");
        await(g);
        gj_check(drv->StreamSynchronize(other), "awaiting a stream");
        us[i] = since_us(began);
    }
    gj_check(drv->StreamDestroy(other), "ending a stream");
    gj_check(drv->MemFree(memory), "freeing memory");
    gj_check(drv->MemFreeHost(pinned), "freeing memory");
    return (double)bytes / gj_median(us, count) * 1e-3;
}

static double floor_us(struct rank *r, uint64_t bytes)
{
    const double all = (double)bytes * r->plan->ranks_a_node;
    switch (r->plan->floor) {
    case ONE_COPY:
        return copy_floor(r, bytes);
    case ONE_LAUNCH:
        return launch_floor(r, bytes);
    case ONE_LINK:
        return (all + 2.0 * (double)ONE_CHUNK) / r->page->link_gb_s * 1e-3;
    default:
        return 2.0 * all / r->page->copy_gb_s * 1e-3;
    }
}

/* ---- a round trip over TCP ------------------------------------------------------------------------------------------ */

static int listener(struct rank *r)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(a);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const struct timeval limit = {.tv_sec = TCP_TIMEOUT_S};
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof(a)) || listen(fd, 1) ||
        getsockname(fd, (struct sockaddr *)&a, &len) ||
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)))
        return -1;
    atomic_store(&r->page->port, ntohs(a.sin_port));
    return fd;
}

static int connected(struct rank *r)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)atomic_load(&r->page->port)),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0 ? fd : -1;
}

/* Both ends spin, as two daemons do. 0, or -1. */
static int bounce(int fd, bool first, unsigned count, double *us)
{
    char word[64] = {0};
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    uint64_t end = gj_now_ns() + TCP_TIMEOUT_S * UINT64_C(1000000000);
    for (unsigned i = 0; i < count; i++) {
        uint64_t began = gj_now_ns();
        ssize_t n;
        if (first && send(fd, word, sizeof(word), MSG_NOSIGNAL) != sizeof(word))
            return -1;
        while ((n = recv(fd, word, sizeof(word), MSG_DONTWAIT)) < 0 && gj_now_ns() < end)
            ;
        if (n != sizeof(word) || (!first && send(fd, word, sizeof(word), MSG_NOSIGNAL) != sizeof(word)))
            return -1;
        us[i] = since_us(began);
    }
    return 0;
}

static int round_trips(struct rank *r)
{
    const struct gr_rank *g = &r->g;
    const unsigned count = rounds(r, MAX_OPS);
    double us[MAX_OPS];
    int at = g->me->rank == 0 ? listener(r) : -1, fd = -1, failed = 0;
    if (!gr_meet(&r->g))
        return 1;
    if (g->me->rank == 0)
        fd = at < 0 ? -1 : accept4(at, NULL, NULL, SOCK_CLOEXEC);
    else if (g->me->rank == r->plan->ranks_a_node)
        fd = connected(r);
    if (g->me->rank == 0 || g->me->rank == r->plan->ranks_a_node)
        failed = fd < 0 || bounce(fd, g->me->rank == 0, count, us) != 0;
    if (fd >= 0)
        close(fd);
    if (at >= 0)
        close(at);
    if (failed)
        return gr_fail(&r->g, "a round trip over TCP", "the loopback interface does not work");
    if (g->me->rank == 0)
        r->page->rtt_us = gj_median(us, count);
    return gr_meet(&r->g) ? 0 : 1;
}

/* ---- what an op costs ------------------------------------------------------------------------------------------------ */

static int timed_call(struct gr_rank *g, unsigned type, uint64_t bytes)
{
    struct rank *r = (struct rank *)((char *)g - offsetof(struct rank, g));
    uint64_t began = gj_now_ns();
    int failed = gr_all_reduce(g, type, bytes);
    r->call_ns += gj_now_ns() - began;
    r->calls++;
    return failed;
}

/* Nanoseconds of processor time of all daemons. */
static uint64_t daemon_ns(const struct rank *r)
{
    uint64_t sum = 0;
    for (unsigned i = 0; i < r->plan->nodes; i++) {
        clockid_t clock;
        struct timespec t;
        if (clock_getcpuclockid(r->job->daemon[i], &clock) == 0 && clock_gettime(clock, &t) == 0)
            sum += (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
    }
    return sum;
}

struct figures {
    uint64_t ops, stage_ns[ONE_STAGES], cpu_ns, at_ns;
};

static uint64_t number(const char *json, const char *key)
{
    const char *p = json ? strstr(json, key) : NULL;
    p = p ? strchr(p + strlen(key), ':') : NULL;
    return p ? strtoull(p + 1, NULL, 10) : 0;
}

/* The daemon's figures about this communicator; rank 0's. */
static void look(struct rank *r, struct figures *f)
{
    static const char *const stage[ONE_STAGES] = {"\"post\"", "\"ready\"", "\"begin\"", "\"work\"",
                                                  "\"done\""};
    char *path = NULL;
    *f = (struct figures){0};
    if (r->g.me->rank != 0 || hclient_comm_path(r->g.comm, &path) != HCLIENT_OK)
        return;
    const char *stages = strstr(path, "\"stage_ns\"");
    f->ops = number(path, "\"ops_done\"");
    for (unsigned i = 0; i < ONE_STAGES; i++)
        f->stage_ns[i] = number(stages, stage[i]);
    f->cpu_ns = daemon_ns(r);
    f->at_ns = gj_now_ns();
    hclient_free(path);
}

static void stages_between(const struct figures *a, const struct figures *b, double *us)
{
    for (unsigned i = 0; i < ONE_STAGES && b->ops > a->ops; i++)
        us[i] = (double)(b->stage_ns[i] - a->stage_ns[i]) / (double)(b->ops - a->ops) * 1e-3;
}

static int check(struct rank *r, struct one_row *row)
{
    const uint64_t seed = row->bytes * 31;
    double us;
    gr_clear(&r->g, row->bytes);
    if (gr_timed(&r->g, gr_all_reduce, HRP_F32, row->bytes, 1, &us))
        return 1;
    return gr_sum_wrong(&r->g, gr_count_wrong(&r->g, HRP_F32, row->bytes, seed), &row->wrong);
}

static int one_by_one(struct rank *r, struct one_row *row, unsigned ops, double *median, double *mean)
{
    double us[MAX_OPS];
    *mean = 0;
    for (unsigned i = 0; i < ops; i++) {
        if (gr_timed(&r->g, timed_call, HRP_F32, row->bytes, 1, &us[i]))
            return 1;
        *mean += us[i] / ops;
    }
    *median = gj_median(us, ops);
    return 0;
}

static unsigned ops_for(const struct rank *r, uint64_t bytes)
{
    return rounds(r, bytes <= UINT64_C(1) << 20 ? MAX_OPS : bytes <= UINT64_C(16) << 20 ? 40 : 12);
}

static int measure(struct rank *r, struct one_row *row)
{
    const unsigned ops = ops_for(r, row->bytes);
    const unsigned many = row->bytes <= UINT64_C(1) << 20 ? r->job->many : 10;
    struct figures before, between, after;
    double group[GROUPS], ignored;
    gr_fill(&r->g, HRP_F32, row->bytes, row->bytes * 31);
    if (check(r, row) || gr_timed(&r->g, gr_all_reduce, HRP_F32, row->bytes, many, &ignored) ||
        !gr_meet(&r->g))
        return 1;
    r->call_ns = r->calls = 0;
    look(r, &before);
    if (one_by_one(r, row, ops, &row->us, &row->mean_us))
        return 1;
    row->call_us = (double)r->call_ns / (double)r->calls * 1e-3;
    r->call_ns = r->calls = 0;
    look(r, &between);
    for (unsigned i = 0; i < GROUPS; i++)
        if (gr_timed(&r->g, timed_call, HRP_F32, row->bytes, many, &group[i]))
            return 1;
    look(r, &after);
    row->back_to_back_us = gj_median(group, GROUPS);
    row->back_to_back_call_us = (double)r->call_ns / (double)r->calls * 1e-3;
    stages_between(&before, &between, row->stage_us);
    stages_between(&between, &after, row->back_to_back_stage_us);
    if (between.at_ns > before.at_ns)
        row->cores = (double)(between.cpu_ns - before.cpu_ns) / (double)(between.at_ns - before.at_ns);
    return check(r, row); /* after all that, still right */
}

/* The job's kernels a second since `began`. */
static double job_rate(struct rank *r, uint64_t launches, uint64_t began)
{
    return (double)(atomic_load(&r->page->ranks.busy_launches) - launches) /
           ((double)(gj_now_ns() - began) * 1e-9);
}

static int measure_busy(struct rank *r, struct one_row *row)
{
    double mean;
    gr_fill(&r->g, HRP_F32, row->bytes, row->bytes * 31);
    if (gr_busy_start(&r->g, r->job->quick ? BUSY_BYTES_QUICK : BUSY_BYTES) || !gr_meet(&r->g))
        return 1;
    usleep(SETTLE_US);
    uint64_t began = gj_now_ns(), launches = atomic_load(&r->page->ranks.busy_launches);
    while (gj_now_ns() - began < (r->job->quick ? ALONE_NS / 4 : ALONE_NS))
        usleep(1000);
    row->job_alone = job_rate(r, launches, began);
    if (!gr_meet(&r->g))
        return 1;
    began = gj_now_ns();
    launches = atomic_load(&r->page->ranks.busy_launches);
    if (one_by_one(r, row, rounds(r, row->bytes <= UINT64_C(1) << 20 ? 100 : 24), &row->busy_us, &mean))
        return 1;
    row->job_beside = job_rate(r, launches, began);
    int failed = check(r, row);
    gr_busy_stop(&r->g);
    return failed || !gr_meet(&r->g);
}

/* ---- all of it ------------------------------------------------------------------------------------------------------- */

static int floors(struct rank *r)
{
    struct one_page *p = r->page;
    const uint64_t bytes = r->job->quick ? RATE_BYTES_QUICK : RATE_BYTES;
    if (r->plan->nodes > 1 && round_trips(r))
        return 1;
    if (r->g.me->rank == 0) {
        gj_load_kernels(&r->g.gpu);
        if (r->plan->floor == ONE_LINK)
            p->link_gb_s = link_rate(r, bytes);
        if (r->plan->floor == ONE_MEMORY) /* send and recv hold the largest size */
            p->copy_gb_s = 2.0 * (double)r->plan->size[r->plan->nsizes - 1] /
                           copy_floor(r, r->plan->size[r->plan->nsizes - 1]) * 1e-3;
        for (unsigned i = 0; i < r->plan->nsizes; i++)
            p->row[i] =
                (struct one_row){.bytes = r->plan->size[i], .floor_us = floor_us(r, r->plan->size[i])};
        gj_use(&r->g.gpu);
    }
    return gr_meet(&r->g) ? 0 : 1;
}

static double free_mib(const struct rank *r)
{
    size_t bytes = 0, total;
    gj_check(r->g.gpu.drv->MemGetInfo(&bytes, &total), "asking for free memory");
    return (double)bytes / (1 << 20);
}

static int measure_all(struct rank *r)
{
    const bool first = r->g.me->rank == 0;
    double before = free_mib(r);
    for (unsigned i = 0; i < r->plan->nsizes; i++) {
        struct one_row row = r->page->row[i];
        if (measure(r, &row))
            return 1;
        if (first) {
            r->page->row[i] = row;
            r->page->nrows = i + 1;
            r->page->memory_mib = before - free_mib(r);
        }
        hpf_rank_progress(r->g.me);
    }
    for (unsigned i = 0; i < r->plan->busy; i++) {
        struct one_row row = r->page->row[i];
        if (!gr_meet(&r->g) || measure_busy(r, &row))
            return 1;
        if (first)
            r->page->row[i] = row;
        hpf_rank_progress(r->g.me);
    }
    return 0;
}

int one_rank(struct hpf_rank *me)
{
    static struct rank rank;
    struct rank *r = &rank;
    uint64_t most = 0;
    int ndevices;
    char *path = NULL;
    r->page = me->shared;
    r->job = me->arg;
    r->plan = r->job->plan;
    r->g.me = me;
    r->g.page = &r->page->ranks;
    const struct hrg_driver *drv = gj_driver(&ndevices);
    for (unsigned i = 0; i < r->plan->nsizes; i++)
        most = r->plan->size[i] > most ? r->plan->size[i] : most;
    gr_open(&r->g, drv, r->job->spread ? (int)me->rank % ndevices : 0, most);
    if (floors(r) || gr_join(&r->g, r->plan->overlap) || measure_all(r))
        return 1;
    if (me->rank == 0 && hclient_comm_path(r->g.comm, &path) == HCLIENT_OK)
        snprintf(r->page->path, sizeof(r->page->path), "%s", path);
    hclient_free(path);
    if (!gr_meet(&r->g))
        return 1;
    return hclient_comm_destroy(r->g.comm) == HCLIENT_OK ? 0 : gr_call_failed(&r->g, "hclient_comm_destroy");
}
