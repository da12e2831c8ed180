/* SPDX-License-Identifier: MIT */
#include "client/perf/bench.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/perf/gpu.h"
#include "client/perf/pattern.h"

#define GUARD_SEED 0x6775u
#define JUNK 0xa5 /* what an output holds before the op */

/* Buffers of one op of the case in slot s. */
struct place {
    struct hpf_region *region[2]; /* that are in use, NULL otherwise */
    size_t bytes[2];              /* of the data in each */
    unsigned char *send, *recv;
};

static double now_us(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec * 1e6 + (double)ts.tv_nsec * 1e-3;
}

static void place_buffers(struct hpf_world *w, const struct hpf_case *c, bool inplace, unsigned slot,
                          struct place *p)
{
    size_t esize = hrp_dtype_size(c->dtype);
    size_t send = hpf_send_count(c, w->nranks) * esize, recv = hpf_recv_count(c, w->nranks) * esize;
    size_t offset = hpf_inplace_offset(c, w->rank) * esize;
    struct hpf_region *s = &w->send[slot], *r = &w->recv[slot];
    memset(p, 0, sizeof(*p));
    if (!inplace) {
        p->region[0] = s;
        p->region[1] = r;
        p->bytes[0] = send;
        p->bytes[1] = recv;
        p->send = s->base + HPF_GUARD;
        p->recv = r->base + HPF_GUARD;
    } else if (c->coll == HRP_REDUCE_SCATTER) {
        p->region[0] = s;
        p->bytes[0] = send;
        p->send = s->base + HPF_GUARD;
        p->recv = p->send + offset;
    } else {
        p->region[0] = r;
        p->bytes[0] = recv;
        p->recv = r->base + HPF_GUARD;
        p->send = p->recv + offset;
    }
}

static void guards_fill(const struct place *p)
{
    for (unsigned i = 0; i < 2; i++) {
        if (!p->region[i])
            continue;
        hpf_guard_fill(p->region[i]->base, HPF_GUARD, GUARD_SEED);
        hpf_guard_fill(p->region[i]->base + HPF_GUARD + p->bytes[i], HPF_GUARD, GUARD_SEED + 1);
    }
}

static uint64_t guards_check(struct hpf_world *w, const struct place *p)
{
    uint64_t bad = 0;
    for (unsigned i = 0; i < 2; i++) {
        if (!p->region[i])
            continue;
        bad += hpf_guard_check(p->region[i]->base, HPF_GUARD, GUARD_SEED);
        bad += hpf_guard_check(p->region[i]->base + HPF_GUARD + p->bytes[i], HPF_GUARD, GUARD_SEED + 1);
    }
    if (bad)
        fprintf(stderr, "rank %u: %" PRIu64 " bytes beside its buffers were overwritten\n", w->rank, bad);
    return bad;
}

/* Where the op finds what lies at p: there, or in the region's twin on the GPU. */
static void *operand(const struct place *p, unsigned char *at)
{
    for (unsigned i = 0; i < 2; i++) {
        const struct hpf_region *r = p->region[i];
        if (r && r->device && at >= r->base && at < r->base + r->bytes + 2 * HPF_GUARD)
            return (void *)(uintptr_t)(r->device + (uint64_t)(at - r->base));
    }
    return at;
}

static int move(struct hpf_world *w, const struct place *p,
                int (*copy)(struct hpf_world *, const struct hpf_region *, size_t))
{
    for (unsigned i = 0; i < 2 && w->gpu; i++)
        if (p->region[i] && copy(w, p->region[i], p->bytes[i] + 2 * HPF_GUARD) < 0)
            return -1;
    return 0;
}

static hclient_result_t post(struct hpf_world *w, const struct hpf_case *c, const struct place *p,
                             hclient_op_t *op)
{
    void *send = operand(p, p->send), *recv = operand(p, p->recv), *stream = hpf_gpu_stream(w);
    hclient_data_type_t dtype = (hclient_data_type_t)c->dtype;
    hclient_red_op_t redop = (hclient_red_op_t)c->redop;
    switch (c->coll) {
    case HRP_ALL_REDUCE:
        return hclient_all_reduce(w->comm, send, recv, c->count, dtype, redop, stream, op);
    case HRP_BROADCAST:
        return hclient_broadcast(w->comm, send, recv, c->count, dtype, (int)c->root, stream, op);
    case HRP_REDUCE_SCATTER:
        return hclient_reduce_scatter(w->comm, send, recv, c->count, dtype, redop, stream, op);
    case HRP_ALL_GATHER:
        return hclient_all_gather(w->comm, send, recv, c->count, dtype, stream, op);
    default:
        return hclient_barrier(w->comm, stream, op);
    }
}

static int op_failed(struct hpf_world *w, const struct hpf_case *c, hclient_result_t r)
{
    struct hrp_sig sig = {.count = c->count,
                          .root = c->root,
                          .coll = (uint8_t)c->coll,
                          .dtype = (uint8_t)c->dtype,
                          .redop = (uint8_t)c->redop};
    char text[128];
    return hpf_world_call_failed(w, r, hrp_sig_text(&sig, text, sizeof(text)));
}

static int finish(struct hpf_world *w, const struct hpf_case *c, hclient_op_t op)
{
    hclient_result_t r = hclient_wait(op);
    if (w->local)
        hpf_rank_progress(w->local);
    return r == HCLIENT_OK ? 0 : op_failed(w, c, r);
}

static int run_one(struct hpf_world *w, const struct hpf_case *c, const struct place *p)
{
    hclient_op_t op;
    hclient_result_t r = post(w, c, p, &op);
    return r == HCLIENT_OK ? finish(w, c, op) : op_failed(w, c, r);
}

/* ---- checks ---------------------------------------------------------------------------------------------- */

static struct hpf_layout layout_of(const struct hpf_world *w)
{
    return (struct hpf_layout){.nranks = w->nranks, .nnodes = w->nnodes, .node_of_rank = w->node_of_rank};
}

static void report_wrong(struct hpf_world *w, const struct hpf_case *c, const unsigned char *recv,
                         uint64_t wrong, uint64_t where)
{
    char text[64];
    fprintf(stderr,
            "rank %u: %" PRIu64 " of %" PRIu64
            " elements of the result are wrong; the first is element %" PRIu64 ", %s\n",
            w->rank, wrong, hpf_recv_count(c, w->nranks), where,
            hpf_value_text(c->dtype, recv + where * hrp_dtype_size(c->dtype), text, sizeof(text)));
}

/* Ranks of one machine compute a slice of the expected result each and compare with all of it. */
static int check_together(struct hpf_world *w, const struct hpf_case *c, const unsigned char *recv,
                          uint64_t *wrong)
{
    struct hpf_layout l = layout_of(w);
    size_t esize = hrp_dtype_size(c->dtype);
    uint64_t per = c->count / w->nranks, first = w->rank * per;
    uint64_t n = w->rank + 1 == w->nranks ? c->count - first : per, where = 0;
    unsigned timeout = w->o->timeout_s * 1000;
    uint64_t own = hpf_expected(c, &l, w->rank, first, n, w->page->expected + first * esize);
    if (own)
        fprintf(stderr,
                "rank %u: %" PRIu64 " expected values are farther from the reference than they may be; this "
                "is a defect of hreduce-perf\n",
                w->rank, own);
    if (hpf_rank_barrier(w->local, false, timeout) < 0)
        return hpf_world_fail(w, "the other ranks did not compute their part of the expected result");
    *wrong = hpf_compare(c->dtype, recv, w->page->expected, c->count, &where);
    if (*wrong)
        report_wrong(w, c, recv, *wrong, where);
    *wrong += own;
    if (hpf_rank_barrier(w->local, false, timeout) < 0)
        return hpf_world_fail(w, "the other ranks did not finish their check");
    return 0;
}

static int check_alone(struct hpf_world *w, const struct hpf_case *c, const unsigned char *recv,
                       uint64_t *wrong)
{
    struct hpf_layout l = layout_of(w);
    uint64_t where = 0;
    *wrong = hpf_check(c, &l, w->rank, 0, hpf_recv_count(c, w->nranks), recv, &where);
    if (*wrong)
        report_wrong(w, c, recv, *wrong, where);
    if (w->local)
        hpf_rank_progress(w->local);
    return 0;
}

/* An input that is not also the output must be as it was. */
static uint64_t check_input(const struct hpf_world *w, const struct hpf_case *c, const unsigned char *send)
{
    enum { STEP = 4096 };
    unsigned char want[STEP * 8];
    size_t esize = hrp_dtype_size(c->dtype);
    uint64_t n = hpf_send_count(c, w->nranks), wrong = 0;
    for (uint64_t i = 0; i < n; i += STEP) {
        size_t now = n - i < STEP ? (size_t)(n - i) : STEP;
        hpf_input(c, w->rank, i, now, want);
        wrong += hpf_compare(c->dtype, send + i * esize, want, now, NULL);
    }
    if (wrong)
        fprintf(stderr, "rank %u: %" PRIu64 " elements of its input were overwritten\n", w->rank, wrong);
    return wrong;
}

static void fill_buffers(struct hpf_world *w, const struct hpf_case *c, bool inplace, const struct place *p)
{
    size_t recv = hpf_recv_count(c, w->nranks) * hrp_dtype_size(c->dtype);
    if (!inplace || c->coll == HRP_ALL_GATHER)
        memset(p->recv, JUNK, recv);
    hpf_input(c, w->rank, 0, hpf_send_count(c, w->nranks), p->send);
    guards_fill(p);
}

static int check_rounds(struct hpf_world *w, struct hpf_case *c, bool inplace, uint64_t *wrong)
{
    struct place p;
    place_buffers(w, c, inplace, 0, &p);
    for (unsigned i = 0; i < w->o->check; i++) {
        uint64_t bad = 0;
        c->seed++;
        fill_buffers(w, c, inplace, &p);
        if (move(w, &p, hpf_gpu_upload) < 0 || run_one(w, c, &p) < 0 || move(w, &p, hpf_gpu_download) < 0)
            return -1;
        bool together = w->page && c->exact && c->coll == HRP_ALL_REDUCE;
        if ((together ? check_together : check_alone)(w, c, p.recv, &bad) < 0)
            return -1;
        *wrong += bad + guards_check(w, &p);
        if (!inplace)
            *wrong += check_input(w, c, p.send);
    }
    return 0;
}

/* ---- time ------------------------------------------------------------------------------------------------ */

static int time_blocking(struct hpf_world *w, const struct hpf_case *c, const struct place *p, double *us)
{
    for (unsigned i = 0; i < w->o->iters; i++) {
        if (hpf_world_barrier(w) < 0)
            return -1;
        double start = now_us();
        if (run_one(w, c, p) < 0)
            return -1;
        us[i] = now_us() - start;
    }
    return 0;
}

/* us[i]: from the completion of op i - 1 (or the start) to that of op i. */
static int time_flight(struct hpf_world *w, const struct hpf_case *c, const struct place *p, double *us)
{
    hclient_op_t op[HPF_FLIGHT];
    if (hpf_world_barrier(w) < 0)
        return -1;
    double last = now_us();
    for (unsigned i = 0; i < w->o->iters + w->nslots; i++) {
        unsigned slot = i % w->nslots;
        if (i >= w->nslots) {
            if (finish(w, c, op[slot]) < 0)
                return -1;
            double now = now_us();
            us[i - w->nslots] = now - last;
            last = now;
        }
        if (i < w->o->iters) {
            hclient_result_t r = post(w, c, &p[slot], &op[slot]);
            if (r != HCLIENT_OK)
                return op_failed(w, c, r);
        }
    }
    return 0;
}

/* What moved the ops of the warm-up between the nodes. */
static void describe_plan(struct hpf_result *r, const struct hpf_counters *before,
                          const struct hpf_counters *after)
{
    size_t n = 0;
    for (unsigned i = 0; i < HPF_NALGOS && n < sizeof(r->plan); i++)
        if (after->algo_ops[i] > before->algo_ops[i])
            n += (size_t)snprintf(r->plan + n, sizeof(r->plan) - n, "%s%s", n ? ", " : "", hpf_algo_name(i));
}

/* The warm-up: nothing but the op is on the wire, so that its bytes can be counted. */
static int warm_up(struct hpf_world *w, const struct hpf_case *c, const struct place *p, struct hpf_result *r,
                   double *tx)
{
    struct hpf_counters before = {0}, after = {0};
    unsigned n = w->o->warmup ? w->o->warmup : 1;
    if (hpf_world_barrier(w) < 0 || (w->leader && hpf_world_counters(w, &before) < 0))
        return -1;
    for (unsigned i = 0; i < n; i++)
        if (run_one(w, c, p) < 0)
            return -1;
    if (!w->leader)
        return 0;
    if (hpf_world_counters(w, &after) < 0)
        return -1;
    *tx = (double)(after.tx_bytes - before.tx_bytes) / n;
    describe_plan(r, &before, &after);
    return 0;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *sorted, size_t n)
{
    return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

/* From every rank's times, bytes and errors to the one result. Layout of a rank's numbers: times, then the
   bytes sent (leaders), then the wrong elements. */
static void summarize(struct hpf_world *w, struct hpf_result *r)
{
    unsigned n = w->o->iters;
    size_t stride = n + 2;
    double *slowest = w->mine, mean = 0;
    for (unsigned i = 0; i < n; i++) {
        slowest[i] = 0;
        for (unsigned k = 0; k < w->nranks; k++)
            if (w->all[k * stride + i] > slowest[i])
                slowest[i] = w->all[k * stride + i];
    }
    for (unsigned k = 0; k < w->nranks; k++) {
        const double *row = w->all + k * stride;
        double sum = 0;
        for (unsigned i = 0; i < n; i++)
            sum += row[i];
        mean = sum / n > mean ? sum / n : mean;
        if (row[n] >= 0)
            r->tx[w->node_of_rank[k]] = row[n];
        r->wrong += (uint64_t)row[n + 1];
    }
    qsort(slowest, n, sizeof(double), by_value);
    r->time_us = w->o->blocking ? median(slowest, n) : mean;
    r->p99_us = slowest[(size_t)n - 1 - n / 100];
}

/* ---- public ---------------------------------------------------------------------------------------------- */

uint64_t hpf_ideal_bytes(unsigned coll, uint64_t bytes, const struct hpf_layout *l)
{
    if (l->nnodes < 2)
        return 0;
    switch (coll) {
    case HRP_ALL_REDUCE:
        return bytes * 2 * (l->nnodes - 1) / l->nnodes;
    case HRP_BROADCAST:
        return bytes;
    case HRP_REDUCE_SCATTER:
    case HRP_ALL_GATHER:
        break;
    default:
        return 0;
    }
    /* A node sends the partials of the segments that live elsewhere, or its own segments to everyone. */
    uint64_t busiest = 0, segment = bytes / l->nranks;
    for (unsigned node = 0; node < l->nnodes; node++) {
        uint64_t own = 0;
        for (unsigned r = 0; r < l->nranks; r++)
            own += l->node_of_rank[r] == node;
        uint64_t sent =
            coll == HRP_ALL_GATHER ? own * segment * (l->nnodes - 1) : (l->nranks - own) * segment;
        busiest = sent > busiest ? sent : busiest;
    }
    return busiest;
}

double hpf_busbw_factor(unsigned coll, unsigned nranks)
{
    double n = nranks;
    switch (coll) {
    case HRP_ALL_REDUCE:
        return 2 * (n - 1) / n;
    case HRP_REDUCE_SCATTER:
    case HRP_ALL_GATHER:
        return (n - 1) / n;
    case HRP_BROADCAST:
        return 1;
    default:
        return 0;
    }
}

int hpf_bench(struct hpf_world *w, unsigned dtype, unsigned redop, uint64_t bytes, bool inplace,
              struct hpf_result *r)
{
    const struct hpf_options *o = w->o;
    struct hpf_layout l = layout_of(w);
    struct hpf_case c = {
        .coll = o->coll,
        .dtype = dtype,
        .redop = redop,
        .root = o->coll == HRP_BROADCAST ? o->root : 0,
        .count = hpf_count_of(o, dtype, bytes, w->nranks),
        .seed = w->seed,
        .exact = w->exact,
        .wire_f32 = w->wire_f32,
    };
    w->seed += 1000003;
    memset(r, 0, sizeof(*r));
    r->coll = c.coll;
    r->dtype = dtype;
    r->redop = redop;
    r->root = c.root;
    r->count = c.count;
    r->bytes = c.count * hrp_dtype_size(dtype) *
               (c.coll == HRP_REDUCE_SCATTER || c.coll == HRP_ALL_GATHER ? w->nranks : 1);
    r->inplace = inplace;
    r->ideal = hpf_ideal_bytes(c.coll, r->bytes, &l);

    uint64_t wrong = 0;
    double tx = -1;
    struct place p[HPF_FLIGHT] = {0};
    if (check_rounds(w, &c, inplace, &wrong) < 0)
        return -1;
    for (unsigned i = 0; i < w->nslots; i++) {
        place_buffers(w, &c, inplace, i, &p[i]);
        fill_buffers(w, &c, inplace, &p[i]);
    }
    if (warm_up(w, &c, &p[0], r, &tx) < 0)
        return -1;
    if ((o->blocking ? time_blocking(w, &c, &p[0], w->mine) : time_flight(w, &c, p, w->mine)) < 0)
        return -1;
    for (unsigned i = 0; i < w->nslots; i++)
        wrong += guards_check(w, &p[i]);
    w->mine[o->iters] = w->leader ? tx : -1;
    w->mine[o->iters + 1] = (double)wrong;
    if (hpf_world_share(w, o->iters + 2) < 0)
        return -1;
    summarize(w, r);
    r->algbw = r->time_us > 0 ? (double)r->bytes / r->time_us * 1e-3 : 0;
    r->busbw = r->algbw * hpf_busbw_factor(c.coll, w->nranks);
    return 0;
}
