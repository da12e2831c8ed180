/* SPDX-License-Identifier: MIT */
/*
 * One rank of tests/gpu/deaths.c. A round: join, one op whose every element is checked, then ops one behind the other until
 * the parent's SIGKILL ends them. Behind the last op the stream writes a pattern into the output: when the stream runs it,
 * the output is the rank's again, and whatever still wrote there afterwards would be seen.
 */
#include "tests/lib/deaths.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "proto/types.h"

#define AHEAD 4u /* ops in flight */
#define BARRIER_MS 60000u
/* Neither is a byte of a sum of small whole numbers in f32, so one late element shows. */
#define PATTERN 0x5d
#define GUARD_BYTE 0xa7
#define GUARD (UINT64_C(64) << 10)

struct rank {
    struct gr_rank g;
    struct deaths_page *page;
    const struct deaths_job *job;
    const struct deaths_plan *plan;
    uint64_t killed_ns; /* of this round, once the parent has said so */
};

/* ---- memory --------------------------------------------------------------------------------------------------------- */

static uint64_t fenced(struct gj_gpu *g, uint64_t bytes, gr_allocate allocate)
{
    uint64_t p = allocate(g, bytes + 2 * GUARD);
    gj_check(g->drv->MemsetD8Async(p, GUARD_BYTE, bytes + 2 * GUARD, g->stream), "filling memory");
    gj_check(g->drv->StreamSynchronize(g->stream), "filling memory");
    return p + GUARD;
}

static uint64_t fenced_legacy(struct gj_gpu *g, uint64_t bytes)
{
    return fenced(g, bytes, gj_alloc);
}

static uint64_t fenced_vmm(struct gj_gpu *g, uint64_t bytes)
{
    return fenced(g, bytes, gj_alloc_vmm);
}

/* How many bytes from p on are not `want`; *first is the offset of the first. */
static uint64_t others(struct rank *r, uint64_t p, uint64_t bytes, uint8_t want, uint64_t *first)
{
    const uint8_t *piece = r->g.piece;
    uint64_t wrong = 0;
    for (uint64_t at = 0; at < bytes; at += GR_PIECE) {
        uint64_t n = bytes - at < GR_PIECE ? bytes - at : GR_PIECE;
        gj_download(&r->g.gpu, r->g.piece, p + at, n);
        if (piece[0] == want && memcmp(piece, piece + 1, n - 1) == 0)
            continue;
        for (uint64_t i = 0; i < n; i++)
            if (piece[i] != want && wrong++ == 0)
                *first = at + i;
    }
    return wrong;
}

static int guards_hold(struct rank *r, const char *what, uint64_t buffer)
{
    char text[160];
    uint64_t first = 0, before = others(r, buffer - GUARD, GUARD, GUARD_BYTE, &first);
    uint64_t behind = others(r, buffer + r->job->bytes, GUARD, GUARD_BYTE, &first);
    if (before + behind == 0)
        return 0;
    snprintf(text, sizeof(text), "%llu bytes before it and %llu behind it were written, the first at %llu",
             (unsigned long long)before, (unsigned long long)behind, (unsigned long long)first);
    return gr_fail(&r->g, what, text);
}

/* ---- a right op ----------------------------------------------------------------------------------------------------- */

static int checked_op(struct rank *r)
{
    const uint64_t bytes = r->job->bytes;
    uint64_t wrong = 0;
    char text[96];
    double us;
    gr_clear(&r->g, bytes);
    if (gr_timed(&r->g, gr_all_reduce, HRP_F32, bytes, 1, &us) ||
        gr_sum_wrong(&r->g, gr_count_wrong(&r->g, HRP_F32, bytes, r->job->seed), &wrong))
        return 1;
    snprintf(text, sizeof(text), "%llu elements are wrong", (unsigned long long)wrong);
    return wrong ? gr_fail(&r->g, "an op before any death of this round", text) : 0;
}

/* A death under another engine, or beside a copy by the stream, would show nothing. */
static int on_its_path(struct rank *r)
{
    char *path = NULL, wanted[16], text[200];
    if (r->g.me->rank != 0)
        return 0;
    if (hclient_comm_path(r->g.comm, &path) != HCLIENT_OK)
        return gr_call_failed(&r->g, "hclient_comm_path");
    snprintf(wanted, sizeof(wanted), "\"%s\"", r->plan->engine);
    const char *engines = strstr(path, "\"engines\""), *end = engines ? strchr(engines, '}') : NULL;
    const char *found = engines ? strstr(engines, wanted) : NULL;
    bool shared = strstr(path, "\"shared_ops\": 0,") == NULL;
    int failed = 0;
    if (!found || !end || found > end || !shared) {
        snprintf(text, sizeof(text), "%.*s; buffers are %s", end ? (int)(end + 1 - engines) : 0,
                 end ? engines : "", shared ? "shared" : "copied by the stream");
        failed = gr_fail(&r->g, "the op took another path than this plan is about", text);
    }
    hclient_free(path);
    return failed;
}

/* ---- ops until a death ---------------------------------------------------------------------------------------------- */

static bool too_late(struct rank *r, unsigned round)
{
    r->killed_ns = atomic_load(&r->page->killed_ns[round]);
    return r->killed_ns && gj_now_ns() - r->killed_ns > DEATHS_BOUND_NS;
}

static int stream_ops(struct rank *r, unsigned round, hclient_result_t *ended)
{
    hclient_op_t op[AHEAD];
    *ended = HCLIENT_OK;
    for (uint64_t n = 0; *ended == HCLIENT_OK; n++) {
        if (too_late(r, round))
            return gr_fail(&r->g, "after the SIGKILL", "ops still succeed");
        if (n >= AHEAD)
            *ended = hclient_wait(op[n % AHEAD]);
        if (*ended == HCLIENT_OK)
            *ended = hclient_all_reduce(r->g.comm, (const void *)(uintptr_t)r->g.send,
                                        (void *)(uintptr_t)r->g.recv, r->job->bytes / sizeof(float),
                                        HCLIENT_FLOAT32, HCLIENT_SUM, r->g.gpu.stream, &op[n % AHEAD]);
        if (n == 2 * AHEAD)
            atomic_fetch_add(&r->page->streaming, 1);
        if (*ended != HCLIENT_OK && n < 2 * AHEAD)
            return gr_call_failed(&r->g, "an op before any death of this round");
        hpf_rank_progress(r->g.me);
    }
    for (unsigned i = 0; i < AHEAD; i++)
        if (hclient_test(op[i]) != HCLIENT_OK)
            atomic_fetch_add(&r->page->cut, 1);
    return 0;
}

static void most(_Atomic uint64_t *word, uint64_t value)
{
    uint64_t seen = atomic_load(word);
    while (seen < value && !atomic_compare_exchange_weak(word, &seen, value))
        ;
}

/* The pattern stands behind the ops in the stream, so that it is written the moment the stream is released. */
static int released(struct rank *r, unsigned round)
{
    struct gj_gpu *g = &r->g.gpu;
    char text[200];
    hrg_result q = g->drv->MemsetD8Async(r->g.recv, PATTERN, r->job->bytes, g->stream);
    q = q == HRG_SUCCESS ? g->drv->StreamQuery(g->stream) : q;
    while (q == HRG_ERROR_NOT_READY) {
        if (too_late(r, round))
            return gr_fail(&r->g, "after the SIGKILL", "the stream is not released");
        sched_yield();
        q = g->drv->StreamQuery(g->stream);
    }
    if (q != HRG_SUCCESS)
        return gr_fail(&r->g, "the stream after the SIGKILL", hrg_error_text(g->drv, q, text, sizeof(text)));
    r->killed_ns = atomic_load(&r->page->killed_ns[round]);
    if (r->killed_ns == 0)
        return gr_fail(&r->g, "an op", hclient_last_error(r->g.comm));
    most(&r->page->released_ns[round], gj_now_ns() - r->killed_ns);
    return 0;
}

static int pattern_stays(struct rank *r)
{
    const uint64_t end = gj_now_ns() + r->job->stays_ns;
    char text[200];
    for (unsigned looks = 0; looks < 2 || gj_now_ns() < end; looks++) {
        uint64_t first = 0, wrong = others(r, r->g.recv, r->job->bytes, PATTERN, &first);
        if (wrong) {
            snprintf(text, sizeof(text),
                     "%llu bytes were written after it was given back, the first at %llu (look %u)",
                     (unsigned long long)wrong, (unsigned long long)first, looks);
            return gr_fail(&r->g, "the output", text);
        }
        hpf_rank_progress(r->g.me);
    }
    return guards_hold(r, "the output", r->g.recv) || guards_hold(r, "the input", r->g.send);
}

static bool expected(const struct rank *r, unsigned round, hclient_result_t error)
{
    if (r->plan->victim == DEATHS_RANK)
        return error == HCLIENT_RANK_LOST;
    if (atomic_load(&r->page->node_killed[round]) == r->g.me->node)
        return error == HCLIENT_DAEMON_LOST;
    return error == HCLIENT_PEER_LOST || error == HCLIENT_RANK_LOST;
}

static int in_words(struct rank *r, unsigned round)
{
    hclient_result_t error = HCLIENT_OK;
    char text[400];
    do {
        if (hclient_comm_get_async_error(r->g.comm, &error) != HCLIENT_OK)
            return gr_call_failed(&r->g, "hclient_comm_get_async_error");
        if (too_late(r, round))
            return gr_fail(&r->g, "after the SIGKILL", "the communicator knows of no error");
    } while (error == HCLIENT_OK);
    const char *sentence = hclient_last_error(r->g.comm);
    if (!expected(r, round, error) || strlen(sentence) < 12) {
        snprintf(text, sizeof(text), "the error is \"%s\": %s", hclient_strerror(error), sentence);
        return gr_fail(&r->g, "after the SIGKILL", text);
    }
    if (!r->page->said[0] && (r->plan->victim == DEATHS_RANK || r->g.me->rank == 0))
        snprintf(r->page->said, sizeof(r->page->said), "%s", sentence);
    return 0;
}

/* ---- all of it ------------------------------------------------------------------------------------------------------ */

static int leave(struct rank *r)
{
    return hclient_comm_destroy(r->g.comm) == HCLIENT_OK ? 0 : gr_call_failed(&r->g, "hclient_comm_destroy");
}

static int until_death(struct rank *r, unsigned round)
{
    hclient_result_t ended;
    if (!gr_meet(&r->g) || stream_ops(r, round, &ended) || released(r, round) || pattern_stays(r) ||
        in_words(r, round))
        return 1;
    return leave(r);
}

int deaths_rank(struct hpf_rank *me)
{
    static struct rank rank;
    struct rank *r = &rank;
    int ndevices;
    r->page = me->shared;
    r->job = me->arg;
    r->plan = r->job->plan;
    r->g.me = me;
    r->g.page = &r->page->ranks;
    const struct hrg_driver *drv = gj_driver(&ndevices);
    gr_open_in(&r->g, drv, 0, r->job->bytes, r->plan->vmm ? fenced_vmm : fenced_legacy);
    gr_fill(&r->g, HRP_F32, r->job->bytes, r->job->seed);
    for (unsigned round = 0;; round++) {
        if (gr_join(&r->g, strcmp(r->plan->engine, "sm") == 0 ? "idle" : "compute") || checked_op(r))
            return 1;
        if (round == r->job->rounds || atomic_load(&r->page->stop))
            return gr_meet(&r->g) ? leave(r) : 1;
        if ((round == 0 && on_its_path(r)) || until_death(r, round))
            return 1;
        if (r->plan->victim == DEATHS_RANK)
            return 0;
        /* The daemon is started again meanwhile. */
        if (hpf_rank_barrier(me, true, BARRIER_MS) < 0)
            return 1;
    }
}
