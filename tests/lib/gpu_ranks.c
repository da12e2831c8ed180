/* SPDX-License-Identifier: MIT */
#include "tests/lib/gpu_ranks.h"

#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "proto/types.h"

#define MEET_NS UINT64_C(60000000000)
#define BUSY_AHEAD 4

void gr_open_in(struct gr_rank *r, const struct hrg_driver *drv, int ordinal, uint64_t max_bytes,
                gr_allocate allocate)
{
    gj_open(&r->gpu, drv, ordinal);
    r->send = allocate(&r->gpu, max_bytes);
    r->recv = allocate(&r->gpu, max_bytes);
    r->piece = gj_pinned(&r->gpu, GR_PIECE, NULL);
    gj_use(&r->gpu);
}

void gr_open(struct gr_rank *r, const struct hrg_driver *drv, int ordinal, uint64_t max_bytes)
{
    gr_open_in(r, drv, ordinal, max_bytes, gj_alloc);
}

/* ---- together ------------------------------------------------------------------------------------------------------ */

int gr_fail(struct gr_rank *r, const char *what, const char *why)
{
    atomic_store(&r->page->failed, 1);
    return hpf_rank_fail(r->me, "%s: %s", what, why);
}

int gr_call_failed(struct gr_rank *r, const char *call)
{
    return gr_fail(r, call, hclient_last_error(r->comm));
}

bool gr_meet(struct gr_rank *r)
{
    struct gr_page *p = r->page;
    uint64_t end = gj_now_ns() + MEET_NS;
    r->round++;
    if (atomic_fetch_add(&p->here, 1) + 1 == r->me->nranks) {
        atomic_store(&p->here, 0);
        atomic_store(&p->round, r->round);
        return true;
    }
    for (unsigned looks = 1; atomic_load(&p->round) != r->round; looks++) {
        if (atomic_load(&p->failed) || gj_now_ns() > end)
            return gr_fail(r, "meeting", "another rank failed or did not come"), false;
        if (looks % 64 == 0)
            sched_yield();
    }
    return true;
}

double gr_slowest(const struct gr_rank *r)
{
    double us = 0;
    for (unsigned i = 0; i < r->me->nranks; i++)
        us = r->page->us[i] > us ? r->page->us[i] : us;
    return us;
}

int gr_join(struct gr_rank *r, const char *overlap)
{
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    if (r->me->rank == 0 && hclient_get_unique_id(&r->page->id) != HCLIENT_OK)
        return gr_call_failed(r, "hclient_get_unique_id");
    if (!gr_meet(r))
        return 1;
    config.overlap = strcmp(overlap, "idle") == 0      ? HCLIENT_OVERLAP_IDLE
                     : strcmp(overlap, "compute") == 0 ? HCLIENT_OVERLAP_COMPUTE
                                                       : HCLIENT_OVERLAP_AUTO;
    return hclient_comm_init_rank_config(&r->comm, (int)r->me->nranks, r->page->id, (int)r->me->rank,
                                         &config) == HCLIENT_OK
               ? 0
               : gr_call_failed(r, "hclient_comm_init_rank");
}

/* ---- values -------------------------------------------------------------------------------------------------------- */

/* A whole number from -4 to 3: 32 of them sum up to what bf16 holds exactly. */
static int value(uint64_t seed, unsigned rank, uint64_t i)
{
    uint64_t z = seed + i * UINT64_C(0x9e3779b97f4a7c15) + rank * UINT64_C(0xd1342543de82ef95);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    return (int)(z >> 57 & 7) - 4;
}

static void store(unsigned type, uint8_t *p, uint64_t i, int v)
{
    float f = (float)v;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (type == HRP_F32)
        memcpy(p + i * 4, &bits, 4);
    else
        memcpy(p + i * 2, (uint8_t *)&bits + 2, 2);
}

void gr_fill(struct gr_rank *r, unsigned type, uint64_t bytes, uint64_t seed)
{
    const uint64_t size = hrp_dtype_size(type);
    for (uint64_t at = 0; at < bytes; at += GR_PIECE) {
        uint64_t n = bytes - at < GR_PIECE ? bytes - at : GR_PIECE;
        for (uint64_t i = 0; i < n / size; i++)
            store(type, r->piece, i, value(seed, r->me->rank, at / size + i));
        gj_upload(&r->gpu, r->send + at, r->piece, n);
    }
}

void gr_clear(struct gr_rank *r, uint64_t bytes)
{
    gj_check(r->gpu.drv->MemsetD8Async(r->recv, 0xa5, bytes, r->gpu.stream), "clearing a buffer");
    gj_check(r->gpu.drv->StreamSynchronize(r->gpu.stream), "clearing a buffer");
}

uint64_t gr_count_wrong(struct gr_rank *r, unsigned type, uint64_t bytes, uint64_t seed)
{
    const uint64_t size = hrp_dtype_size(type);
    uint64_t wrong = 0;
    for (uint64_t at = 0; at < bytes; at += GR_PIECE) {
        uint64_t n = bytes - at < GR_PIECE ? bytes - at : GR_PIECE;
        gj_download(&r->gpu, r->piece, r->recv + at, n);
        for (uint64_t i = 0; i < n / size; i++) {
            uint8_t want[4] = {0};
            int sum = 0;
            for (unsigned k = 0; k < r->me->nranks; k++)
                sum += value(seed, k, at / size + i);
            store(type, want, 0, sum);
            /* A sum of zero may have either sign. */
            wrong += memcmp(want, r->piece + i * size, size) != 0 &&
                     !(sum == 0 && (r->piece[i * size + size - 1] & 0x7f) == 0);
        }
        hpf_rank_progress(r->me);
    }
    return wrong;
}

int gr_sum_wrong(struct gr_rank *r, uint64_t mine, uint64_t *all)
{
    atomic_fetch_add(&r->page->wrong, mine);
    if (!gr_meet(r))
        return 1;
    *all += atomic_load(&r->page->wrong);
    if (!gr_meet(r))
        return 1;
    atomic_store(&r->page->wrong, 0);
    return gr_meet(r) ? 0 : 1;
}

/* ---- ops ----------------------------------------------------------------------------------------------------------- */

int gr_all_reduce(struct gr_rank *r, unsigned type, uint64_t bytes)
{
    return hclient_all_reduce(r->comm, (const void *)(uintptr_t)r->send, (void *)(uintptr_t)r->recv,
                              bytes / hrp_dtype_size(type),
                              type == HRP_F32 ? HCLIENT_FLOAT32 : HCLIENT_BFLOAT16, HCLIENT_SUM,
                              r->gpu.stream, NULL) == HCLIENT_OK
               ? 0
               : gr_call_failed(r, "hclient_all_reduce");
}

int gr_timed(struct gr_rank *r, gr_call call, unsigned type, uint64_t bytes, unsigned n, double *us)
{
    hclient_result_t async = HCLIENT_OK;
    if (!gr_meet(r))
        return 1;
    uint64_t began = gj_now_ns();
    for (unsigned i = 0; i < n; i++)
        if (call(r, type, bytes))
            return 1;
    gj_check(r->gpu.drv->StreamSynchronize(r->gpu.stream), "an all-reduce");
    r->page->us[r->me->rank] = (double)(gj_now_ns() - began) * 1e-3 / n;
    if (hclient_comm_get_async_error(r->comm, &async) != HCLIENT_OK || async != HCLIENT_OK)
        return gr_call_failed(r, "hclient_all_reduce");
    if (!gr_meet(r))
        return 1;
    *us = gr_slowest(r);
    return 0;
}

/* ---- the job's own kernels ------------------------------------------------------------------------------------------ */

/* A fold of 64 sources out of the second-level cache keeps every multiprocessor at work. */
static void *busy_thread(void *arg)
{
    struct gr_rank *r = arg;
    struct gj_gpu *g = &r->busy_gpu;
    const struct hrk_fold f = hrk_fold_single(HRP_F32, HRP_SUM, HRG_MAX_SOURCES);
    uint64_t src[HRG_MAX_SOURCES], memory = gj_alloc(g, r->busy_bytes), dst = gj_alloc(g, r->busy_bytes);
    uint64_t ended = atomic_load(g->word);
    struct hrg_launch l;
    gj_use(g);
    for (unsigned i = 0; i < HRG_MAX_SOURCES; i++)
        src[i] = memory;
    while (!atomic_load(&r->busy_stop)) {
        if (hrg_fold_launch(&l, &f, &dst, 1, src, HRG_MAX_SOURCES, r->busy_bytes / 4, 2 * g->multiprocessors))
            gj_die("a fold was refused");
        gj_launch(g, &l);
        uint64_t over;
        while ((over = atomic_load(g->word)) + BUSY_AHEAD < g->launches)
            usleep(20);
        atomic_fetch_add(&r->page->busy_launches, over - ended);
        ended = over;
    }
    gj_wait(g);
    gj_check(g->drv->MemFree(memory), "freeing memory");
    gj_check(g->drv->MemFree(dst), "freeing memory");
    return NULL;
}

int gr_busy_start(struct gr_rank *r, uint64_t bytes)
{
    if (!r->busy_gpu.drv) {
        gj_open(&r->busy_gpu, r->gpu.drv, r->gpu.ordinal);
        gj_load_kernels(&r->busy_gpu);
    }
    r->busy_bytes = bytes;
    atomic_store(&r->busy_stop, false);
    return pthread_create(&r->busy_thread, NULL, busy_thread, r) == 0
               ? 0
               : gr_fail(r, "the job's kernels", "cannot start a thread");
}

void gr_busy_stop(struct gr_rank *r)
{
    atomic_store(&r->busy_stop, true);
    pthread_join(r->busy_thread, NULL);
}
