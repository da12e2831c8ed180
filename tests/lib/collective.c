/* SPDX-License-Identifier: MIT */
/* A rank's side of the harness: joining, and one collective that is checked at every element. */
#include "tests/lib/harness.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GUARD 4096u
#define JUNK 0x5a
/* Below this each rank computes the whole expected result: it takes less time than two meetings. */
#define ALONE_WORK 20000u

uint32_t ht_random(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    uint32_t x = (uint32_t)(*state >> 32);
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    return x ^ x >> 13;
}

int ht_call_failed(struct hpf_rank *me, hclient_result_t r, const char *call, int line)
{
    return hpf_rank_fail(me, "line %d: %s gave %s: %s", line, call, hclient_strerror(r),
                         hclient_last_error(NULL));
}

int ht_refused(struct hpf_rank *me, hclient_result_t r, hclient_result_t want, const char *words)
{
    const char *said = r == HCLIENT_OK ? "" : hclient_last_error(NULL);
    HT_EXPECT(me, r == want && strstr(said, words), "gave %s: %s (expected %s ... %s)", hclient_strerror(r),
              said, hclient_strerror(want), words);
    return 0;
}

/* ---- joining --------------------------------------------------------------------------------------------- */

static int get_id(struct ht_env *e, hclient_unique_id_t *id)
{
    _Atomic uint32_t *ready = &e->page->id_ready[e->number];
    if (e->me->rank == 0) {
        HT_TRY(e->me, hclient_get_unique_id(&e->page->id[e->number]));
        atomic_store(ready, 1);
    }
    long long deadline = hpf_now_ms() + ht_ms(30000);
    while (!atomic_load(ready)) {
        HT_EXPECT(e->me, hpf_now_ms() < deadline, "rank 0 gave no id for communicator %u", e->number);
        hpf_sleep_ms(1);
    }
    *id = e->page->id[e->number];
    return 0;
}

static int learn_layout(struct ht_env *e)
{
    unsigned *map = e->page->node_of_rank[e->number];
    struct hpf_rank *me = e->me;
    HT_EXPECT(me, e->info.nranks == (int)me->nranks && e->info.rank == (int)me->rank,
              "the communicator says rank %d of %d, this is rank %u of %u", e->info.rank, e->info.nranks,
              me->rank, me->nranks);
    map[me->rank] = (unsigned)e->info.node;
    if (hpf_rank_barrier(me, false, ht_ms(30000)) < 0)
        return 1;
    for (unsigned r = 0; r < me->nranks; r++)
        HT_EXPECT(me, (map[r] == (unsigned)e->info.node) == (me->node_of_rank[r] == me->node),
                  "ranks %u and %u: the communicator's idea of who shares a node is wrong", me->rank, r);
    e->layout =
        (struct hpf_layout){.nranks = me->nranks, .nnodes = (unsigned)e->info.nnodes, .node_of_rank = map};
    return 0;
}

int ht_adopt(struct ht_env *e, struct hpf_rank *me, unsigned number)
{
    hclient_comm_t comm = e->comm;
    *e = (struct ht_env){
        .me = me, .page = me->shared, .number = number, .comm = comm, .exact = true, .seed = 1000 + number};
    e->info = (hclient_comm_info_t)HCLIENT_COMM_INFO_INITIALIZER;
    HT_TRY(me, hclient_comm_get_info(e->comm, &e->info));
    return learn_layout(e);
}

int ht_join(struct ht_env *e, struct hpf_rank *me, unsigned number, const hclient_comm_config_t *config)
{
    hclient_unique_id_t id;
    *e = (struct ht_env){.me = me, .page = me->shared, .number = number};
    if (get_id(e, &id) != 0)
        return 1;
    HT_TRY(me, hclient_comm_init_rank_config(&e->comm, (int)me->nranks, id, (int)me->rank, config));
    if (ht_adopt(e, me, number) != 0)
        return 1;
    if (config) {
        e->exact = config->reproducible != HCLIENT_OFF;
        e->wire_f32 = config->wire_f32 == HCLIENT_ON;
    }
    return 0;
}

static int free_memory(struct ht_env *e)
{
    for (unsigned kind = 0; kind < HT_NMEMORY; kind++) {
        for (unsigned i = 0; i < 2; i++) {
            if (!e->mem[kind][i].base)
                continue;
            if (kind != HT_PLAIN)
                HT_TRY(e->me, hclient_mem_free(e->mem[kind][i].base));
            if (kind != HT_ALLOC)
                munmap(e->mem[kind][i].base, e->mem[kind][i].bytes);
            e->mem[kind][i].base = NULL;
        }
    }
    return 0;
}

int ht_leave(struct ht_env *e)
{
    if (hpf_rank_barrier(e->me, false, ht_ms(30000)) < 0)
        return 1;
    HT_TRY(e->me, hclient_comm_destroy(e->comm));
    return free_memory(e);
}

/* ---- memory ---------------------------------------------------------------------------------------------- */

static int import_memory(struct hpf_rank *me, size_t bytes, unsigned char **base)
{
    int fd = memfd_create("hreduce-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    HT_EXPECT(me, fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0,
              "memfd of %zu bytes: %s", bytes, strerror(errno));
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    HT_EXPECT(me, p != MAP_FAILED, "mmap of %zu bytes: %s", bytes, strerror(errno));
    HT_TRY(me, hclient_mem_import_fd(p, bytes, fd, 0));
    close(fd);
    *base = p;
    return 0;
}

/* Memory i of a kind, at least `bytes` long; grows in large steps so that it is made seldom. */
static int get_memory(struct ht_env *e, unsigned kind, unsigned i, size_t bytes, unsigned char **base)
{
    struct hpf_rank *me = e->me;
    if (e->mem[kind][i].bytes < bytes && e->mem[kind][i].base) {
        if (kind != HT_PLAIN)
            HT_TRY(me, hclient_mem_free(e->mem[kind][i].base));
        if (kind != HT_ALLOC)
            munmap(e->mem[kind][i].base, e->mem[kind][i].bytes);
        e->mem[kind][i].base = NULL;
    }
    if (!e->mem[kind][i].base) {
        size_t room = (bytes + bytes / 4 + 65535) / 65536 * 65536;
        void *p = NULL;
        if (kind == HT_ALLOC) {
            HT_TRY(me, hclient_mem_alloc(&p, room));
        } else if (kind == HT_IMPORT) {
            unsigned char *q = NULL;
            if (import_memory(me, room, &q) != 0)
                return 1;
            p = q;
        } else {
            p = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            HT_EXPECT(me, p != MAP_FAILED, "no memory for %zu bytes", room);
        }
        e->mem[kind][i].base = p;
        e->mem[kind][i].bytes = room;
    }
    *base = e->mem[kind][i].base;
    return 0;
}

/* ---- one collective -------------------------------------------------------------------------------------- */

const char *ht_coll_text(const struct ht_coll *c, char *buf, size_t len)
{
    static const char *const memory[] = {"plain", "alloc", "import"};
    char sig[128];
    struct hrp_sig s = {.count = c->count,
                        .root = c->root,
                        .coll = (uint8_t)c->coll,
                        .dtype = (uint8_t)c->dtype,
                        .redop = (uint8_t)c->redop};
    snprintf(buf, len, "%s, %s, %s%s+%u to %s+%u", hrp_sig_text(&s, sig, sizeof(sig)),
             c->inplace ? "in place" : "out of place", c->gpu ? "GPU, by " : "", memory[c->send_mem],
             c->send_shift, memory[c->recv_mem], c->recv_shift);
    return buf;
}

size_t ht_area_bytes(const struct ht_env *e, const struct ht_coll *c)
{
    uint64_t n =
        c->coll == HRP_REDUCE_SCATTER || c->coll == HRP_ALL_GATHER ? c->count * e->me->nranks : c->count;
    return n * hrp_dtype_size(c->dtype) + 2 * GUARD + 64;
}

/* The data's place in an area, its guards filled. */
static unsigned char *lay_out(struct ht_flight *f, unsigned i, unsigned char *area, unsigned shift,
                              size_t bytes)
{
    f->area[i] = area + shift;
    f->bytes[i] = bytes;
    hpf_guard_fill(f->area[i], GUARD, 7 + i);
    hpf_guard_fill(f->area[i] + GUARD + bytes, GUARD, 17 + i);
    return f->area[i] + GUARD;
}

static int areas(struct ht_env *e, const struct ht_coll *c, unsigned char **send, unsigned char **recv)
{
    size_t bytes = ht_area_bytes(e, c);
    bool one = c->inplace;
    if (!*send && !(one && c->coll != HRP_REDUCE_SCATTER) && get_memory(e, c->send_mem, 0, bytes, send) != 0)
        return 1;
    if (!*recv && !(one && c->coll == HRP_REDUCE_SCATTER) && get_memory(e, c->recv_mem, 1, bytes, recv) != 0)
        return 1;
    return 0;
}

static hclient_result_t call(struct ht_env *e, struct ht_flight *f)
{
    const struct ht_coll *c = &f->coll;
    hclient_data_type_t t = (hclient_data_type_t)c->dtype;
    hclient_red_op_t op = (hclient_red_op_t)c->redop;
    /* NULL is as good where a buffer is not looked at. */
    const void *send = c->count ? f->send : NULL;
    void *recv = c->count ? f->recv : NULL;
    if (c->gpu && c->count) {
        send = ht_gpu_address(f, send);
        recv = ht_gpu_address(f, recv);
    }
    switch (c->coll) {
    case HRP_ALL_REDUCE:
        return hclient_all_reduce(e->comm, send, recv, c->count, t, op, c->stream, &f->op);
    case HRP_BROADCAST:
        return hclient_broadcast(e->comm, e->me->rank == c->root || e->me->rank % 2 ? send : NULL, recv,
                                 c->count, t, (int)c->root, c->stream, &f->op);
    case HRP_REDUCE_SCATTER:
        return hclient_reduce_scatter(e->comm, send, recv, c->count, t, op, c->stream, &f->op);
    case HRP_ALL_GATHER:
        return hclient_all_gather(e->comm, send, recv, c->count, t, c->stream, &f->op);
    default:
        return hclient_barrier(e->comm, c->stream, &f->op);
    }
}

int ht_post(struct ht_env *e, const struct ht_coll *c, unsigned char *send_area, unsigned char *recv_area,
            struct ht_flight *f)
{
    unsigned nranks = e->me->nranks, rank = e->me->rank;
    *f = (struct ht_flight){.coll = *c};
    f->expect = (struct hpf_case){.coll = c->coll,
                                  .dtype = c->dtype,
                                  .redop = c->redop,
                                  .root = c->root,
                                  .count = c->count,
                                  .seed = e->seed++,
                                  .exact = e->exact,
                                  .wire_f32 = e->wire_f32};
    if (c->coll == HRP_BARRIER) {
        HT_TRY(e->me, call(e, f));
        return 0;
    }
    if (areas(e, c, &send_area, &recv_area) != 0)
        return 1;
    size_t esize = hrp_dtype_size(c->dtype);
    size_t send = hpf_send_count(&f->expect, nranks) * esize,
           recv = hpf_recv_count(&f->expect, nranks) * esize;
    size_t offset = hpf_inplace_offset(&f->expect, rank) * esize;
    if (!c->inplace) {
        f->send = lay_out(f, 0, send_area, c->send_shift, send);
        f->recv = lay_out(f, 1, recv_area, c->recv_shift, recv);
    } else if (c->coll == HRP_REDUCE_SCATTER) {
        f->send = lay_out(f, 0, send_area, c->send_shift, send);
        f->recv = f->send + offset;
    } else {
        f->recv = lay_out(f, 1, recv_area, c->recv_shift, recv);
        f->send = f->recv + offset;
    }
    memset(f->recv, JUNK, recv);
    /* In place a broadcast has an input on the root alone. */
    if (!c->inplace || c->coll != HRP_BROADCAST || rank == c->root)
        hpf_input(&f->expect, rank, 0, hpf_send_count(&f->expect, nranks), f->send);
    if (c->gpu && ht_gpu_upload(e, f) != 0)
        return 1;
    HT_TRY(e->me, call(e, f));
    return 0;
}

static int wrong(struct ht_env *e, const struct ht_flight *f, const char *what, uint64_t n, uint64_t where,
                 const void *at)
{
    char text[256], value[64];
    return hpf_rank_fail(
        e->me, "%s: %" PRIu64 " elements of the %s are wrong, first number %" PRIu64 ", which is %s",
        ht_coll_text(&f->coll, text, sizeof(text)), n, what, where,
        hpf_value_text(f->coll.dtype, at, value, sizeof(value)));
}

/* The part of hpf_check that ranks can share: everybody's result is the same. */
static int verify_together(struct ht_env *e, const struct ht_flight *f)
{
    const struct hpf_case *x = &f->expect;
    size_t esize = hrp_dtype_size(x->dtype);
    uint64_t per = x->count / e->me->nranks, first = per * e->me->rank, where = 0;
    uint64_t n = e->me->rank + 1 == e->me->nranks ? x->count - first : per;
    uint64_t bad = hpf_expected(x, &e->layout, e->me->rank, first, n, e->page->expected + first * esize);
    HT_EXPECT(e->me, bad == 0, "%" PRIu64 " expected values contradict the reference", bad);
    if (hpf_rank_barrier(e->me, false, ht_ms(60000)) < 0)
        return 1;
    bad = hpf_compare(x->dtype, f->recv, e->page->expected, x->count, &where);
    if (bad)
        return wrong(e, f, "result", bad, where, f->recv + where * esize);
    return hpf_rank_barrier(e->me, false, ht_ms(60000)) < 0;
}

static int verify_result(struct ht_env *e, const struct ht_flight *f)
{
    const struct hpf_case *x = &f->expect;
    size_t esize = hrp_dtype_size(x->dtype);
    uint64_t where = 0;
    if (x->exact && x->coll == HRP_ALL_REDUCE && x->count * e->me->nranks > ALONE_WORK &&
        x->count * esize <= ht_expected_bytes())
        return verify_together(e, f);
    uint64_t bad =
        hpf_check(x, &e->layout, e->me->rank, 0, hpf_recv_count(x, e->me->nranks), f->recv, &where);
    return bad ? wrong(e, f, "result", bad, where, f->recv + where * esize) : 0;
}

static int verify_input(struct ht_env *e, const struct ht_flight *f)
{
    enum { STEP = 2048 };
    unsigned char want[STEP * 8];
    size_t esize = hrp_dtype_size(f->coll.dtype);
    uint64_t n = hpf_send_count(&f->expect, e->me->nranks), where = 0;
    for (uint64_t i = 0; i < n; i += STEP) {
        size_t now = n - i < STEP ? (size_t)(n - i) : STEP;
        hpf_input(&f->expect, e->me->rank, i, now, want);
        uint64_t bad = hpf_compare(f->coll.dtype, f->send + i * esize, want, now, &where);
        if (bad)
            return wrong(e, f, "input", bad, i + where, f->send + (i + where) * esize);
    }
    return 0;
}

int ht_verify(struct ht_env *e, struct ht_flight *f)
{
    char text[256];
    hclient_result_t r = hclient_wait(f->op);
    HT_EXPECT(e->me, r == HCLIENT_OK, "%s gave %s: %s", ht_coll_text(&f->coll, text, sizeof(text)),
              hclient_strerror(r), hclient_last_error(NULL));
    hpf_rank_progress(e->me);
    if (f->coll.coll == HRP_BARRIER)
        return 0;
    if (f->coll.gpu && ht_gpu_download(e, f) != 0)
        return 1;
    for (unsigned i = 0; i < 2; i++) {
        if (!f->area[i])
            continue;
        size_t before = hpf_guard_check(f->area[i], GUARD, 7 + i);
        size_t behind = hpf_guard_check(f->area[i] + GUARD + f->bytes[i], GUARD, 17 + i);
        HT_EXPECT(e->me, before + behind == 0, "%s: %zu bytes before and %zu behind the %s were overwritten",
                  ht_coll_text(&f->coll, text, sizeof(text)), before, behind, i ? "output" : "input");
    }
    if (verify_result(e, f) != 0)
        return 1;
    return f->coll.inplace ? 0 : verify_input(e, f);
}

int ht_collective(struct ht_env *e, const struct ht_coll *c)
{
    struct ht_flight f;
    if (ht_post(e, c, NULL, NULL, &f) != 0)
        return 1;
    return ht_verify(e, &f);
}

int ht_sums(struct ht_env *e, bool gpu)
{
    static const uint64_t counts[] = {1, 1000, 300007, 2500003};
    for (unsigned i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        struct ht_coll c = {.coll = HRP_ALL_REDUCE,
                            .dtype = i % 2 ? HRP_F32 : HRP_BF16,
                            .redop = HRP_SUM,
                            .count = counts[i],
                            .inplace = i % 2,
                            .gpu = gpu};
        if (ht_collective(e, &c) != 0)
            return 1;
    }
    return 0;
}
