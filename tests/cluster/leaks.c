/* SPDX-License-Identifier: MIT */
/*
 * Job after job, the daemons hold what they held before: descriptors, mappings, threads, memory, arena, and
 * nothing in /dev/shm. A session costs less than 1 MiB before its first staged op. timeout: 120
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "client/perf/json.h"
#include "tests/lib/harness.h"

#define NNODES 2u
#define JOBS 15u

struct holding {
    long fds, maps, threads, rss, shm;
    uint64_t arena_used, sessions, session_bytes, comms;
};

static uint64_t number(struct hpf_json doc, const char *group, const char *name)
{
    struct hpf_json v, w;
    uint64_t n = 0;
    if (!hpf_json_member(doc, group, &v) || !hpf_json_member(v, name, &w) || !hpf_json_uint(w, &n))
        ht_die("the status has no %s.%s", group, name);
    return n;
}

static struct holding look(struct hpf_cluster *c, unsigned node)
{
    pid_t pid = c->node[node].pid;
    char *text = ht_status(c, node);
    struct hpf_json doc, comms, one;
    HT_CHECK(hpf_json_parse(text, &doc), "the status is no JSON: %.300s", text);
    struct holding h = {.fds = ht_fds(pid),
                        .maps = ht_maps(pid),
                        .threads = ht_threads(pid),
                        .rss = ht_rss_kib(pid),
                        .shm = ht_shm_entries(),
                        .arena_used = number(doc, "memory", "arena_used"),
                        .session_bytes = number(doc, "memory", "session_bytes"),
                        .sessions = number(doc, "clients", "sessions")};
    while (hpf_json_member(doc, "comms", &comms) && hpf_json_element(comms, h.comms, &one))
        h.comms++;
    free(text);
    return h;
}

/* What a rank may do and how it may leave. */
static int rank_main(struct hpf_rank *me)
{
    struct ht_env e[3];
    for (unsigned k = 0; k < 3; k++) {
        if (ht_join(&e[k], me, k, NULL) != 0)
            return 1;
        for (unsigned kind = 0; kind < HT_NMEMORY; kind++) {
            struct ht_coll c = {.coll = HRP_ALL_REDUCE,
                                .dtype = HRP_F32,
                                .redop = HRP_SUM,
                                .count = 100003,
                                .send_mem = kind,
                                .recv_mem = (kind + k) % HT_NMEMORY};
            if (ht_collective(&e[k], &c) != 0)
                return 1;
        }
    }
    /* One is destroyed, with its memory; the others are left to the daemon, after a meeting: a rank that goes
       earlier is a lost rank to the others. */
    if (ht_leave(&e[0]) != 0 || hpf_rank_barrier(me, false, ht_ms(30000)) < 0)
        return 1;
    if (me->rank % 2)
        _exit(0);
    return 0;
}

/* Ranks that only join: what a session costs. */
static int idle_main(struct hpf_rank *me)
{
    struct ht_env e;
    if (ht_join(&e, me, 0, NULL) != 0 || hpf_rank_barrier(me, true, ht_ms(30000)) < 0)
        return 1;
    if (hpf_rank_barrier(me, true, ht_ms(30000)) < 0)
        return 1;
    return ht_leave(&e);
}

static void run_job(struct hpf_cluster *c)
{
    struct ht_job job = {.nranks = 4, .fn = rank_main, .expected_bytes = 1 << 19};
    ht_run(c, &job);
}

/* Looks that must agree before the daemon counts as at rest: it lets go of memory and descriptors a little after the last
   session, on threads of its own. */
#define LOOKS_AT_REST 10u

static bool same(const struct holding *a, const struct holding *b)
{
    return a->threads == b->threads && a->arena_used == b->arena_used && a->session_bytes == b->session_bytes;
}

/* The daemon learns of a process's end a moment after us. as_before: what to wait for, or NULL. */
static struct holding settled(struct hpf_cluster *c, unsigned node, const struct holding *as_before)
{
    long long deadline = hpf_now_ms() + ht_ms(10000);
    struct holding h = look(c, node), last;
    unsigned looks = 0;
    long least = h.fds; /* the session of the one that asks may still be open, or just gone */
    while (looks < LOOKS_AT_REST && hpf_now_ms() < deadline) {
        hpf_sleep_ms(50);
        last = h;
        h = look(c, node);
        least = h.fds < least ? h.fds : least;
        /* The one that asks is a client too. */
        bool rest =
            h.sessions <= 1 && h.comms == 0 && same(&h, &last) && (!as_before || least <= as_before->fds);
        looks = rest ? looks + 1 : 0;
    }
    HT_CHECK(h.sessions <= 1 && h.comms == 0,
             "node %u keeps %" PRIu64 " sessions and %" PRIu64 " communicators", node, h.sessions, h.comms);
    h.fds = least;
    return h;
}

/* For a message: what descriptors a daemon has. */
static void list_fds(pid_t pid)
{
    char path[64], target[256];
    for (int fd = 0; fd < 256; fd++) {
        snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)pid, fd);
        ssize_t n = readlink(path, target, sizeof(target) - 1);
        if (n < 0)
            continue;
        target[n] = 0;
        printf("%d: %s\n", fd, target);
    }
    fflush(stdout);
}

static void compare(unsigned node, const struct holding *a, const struct holding *b)
{
    HT_CHECK(b->fds <= a->fds, "node %u: %ld descriptors after %u jobs, %ld before", node, b->fds, JOBS,
             a->fds);
    HT_CHECK(b->threads <= a->threads, "node %u: %ld threads, %ld before", node, b->threads, a->threads);
    HT_CHECK(b->shm <= a->shm, "/dev/shm has %ld entries, %ld before", b->shm, a->shm);
    HT_CHECK(b->arena_used == a->arena_used,
             "node %u: %" PRIu64 " bytes of the arena in use, %" PRIu64 " before", node, b->arena_used,
             a->arena_used);
    HT_CHECK(b->session_bytes == a->session_bytes,
             "node %u: %" PRIu64 " bytes of sessions, %" PRIu64 " before", node, b->session_bytes,
             a->session_bytes);
    /* The allocator may keep a few pages and maps; jobs must not add up. */
    HT_CHECK(b->maps <= a->maps + 8, "node %u: %ld mappings, %ld before", node, b->maps, a->maps);
    HT_CHECK(ht_sanitized() || b->rss <= a->rss + 2048, "node %u: %ld KiB resident, %ld before", node, b->rss,
             a->rss);
}

static void session_cost(struct hpf_cluster *c)
{
    struct ht_job job = {.nranks = 8, .fn = idle_main};
    struct holding before = settled(c, 0, NULL);
    struct hpf_job *started = ht_start(c, &job);
    HT_CHECK(hpf_job_barrier(started, ht_ms(30000)), "the ranks did not join");
    struct holding with = look(c, 0);
    uint64_t each = (with.session_bytes - before.session_bytes) / 4;
    printf("a session costs %" PRIu64 " KiB\n", each >> 10);
    HT_CHECK(each > 0 && each < 1 << 20, "a session costs %" PRIu64 " bytes before its first staged op",
             each);
    HT_CHECK(hpf_job_barrier(started, ht_ms(30000)), "the ranks did not come");
    ht_finish(started, 30000);
}

int main(void)
{
    struct holding first[NNODES];
    struct hpf_cluster *c = ht_cluster(NNODES, NULL);
    for (unsigned i = 0; i < 3; i++)
        run_job(c);
    for (unsigned n = 0; n < NNODES; n++)
        first[n] = settled(c, n, NULL);
    for (unsigned i = 0; i < JOBS; i++)
        run_job(c);
    for (unsigned n = 0; n < NNODES; n++) {
        struct holding last = settled(c, n, &first[n]);
        if (last.fds != first[n].fds)
            list_fds(c->node[n].pid);
        compare(n, &first[n], &last);
    }
    session_cost(c);
    ht_cluster_end(c);
    return 0;
}
