/* SPDX-License-Identifier: MIT */
#include "tests/sim/gpu_nodes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "proto/ring.h"
#include "proto/status.h"

#define GPU_BUFFER 2u /* id */

struct gpu_nodes gpu_nodes;
static struct gpu_nodes *const w = &gpu_nodes;

static void use_fake(void)
{
    int n = 0;
    w->drv = fake_gpu_driver();
    OK(w->drv->DeviceGetCount(&n));
    for (int i = 0; i < GPU_NODES_GPUS && i < n; i++)
        OK(w->drv->DevicePrimaryCtxRetain(&w->ctx[i], i));
}

static struct hrd_gpus *gpus_of(uint32_t r)
{
    return w->gpus[w->s.node_of_rank[r]];
}

struct hrd_gpu_event *gpu_nodes_answer(uint32_t r, enum hrd_gpu_event_type type)
{
    struct hrd_gpu_event *ev;
    for (int i = 0; !(ev = hrd_gpus_take_events(gpus_of(r))); i++) {
        CHECK(i < LIMIT_S * 1000);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    CHECK(ev->type == type && !ev->next);
    return ev;
}

void gpu_nodes_open(uint32_t r, int gpu)
{
    struct gpu_rank *k = &w->rank[r];
    struct hrg_mem_prop prop = {.type = HRG_ALLOCATION_PINNED,
                                .requested_handle_types = HRG_HANDLE_POSIX_FD,
                                .location = {.type = HRG_LOCATION_DEVICE, .id = gpu}};
    struct hrg_mem_access access = {.location = prop.location, .flags = HRG_ACCESS_READWRITE};
    struct hrd_gpu_source source = {.uid = 1, .msg = {.bytes = w->bytes, .kind = HRP_GPU_VMM, .nparts = 1}};
    struct hrg_uuid uuid;
    hrg_handle h;
    void *p;
    k->gpu = gpu;
    OK(w->drv->CtxSetCurrent(w->ctx[gpu]));
    OK(w->drv->MemAddressReserve(&k->ptr, w->bytes, 0, 0, 0));
    OK(w->drv->MemCreate(&h, w->bytes, &prop, 0));
    OK(w->drv->MemMap(k->ptr, w->bytes, 0, h, 0));
    OK(w->drv->MemSetAccess(k->ptr, w->bytes, &access, 1));
    OK(w->drv->MemHostAlloc(&p, 2 * w->bytes, HRG_HOST_PORTABLE));
    k->host = p;
    k->got = k->host + w->bytes;
    OK(hrg_device_uuid(w->drv, gpu, &uuid));
    memcpy(source.msg.uuid, uuid.bytes, 16);
    source.fd = calloc(1, sizeof(int));
    source.part_bytes = calloc(1, sizeof(uint64_t));
    source.part_bytes[0] = w->bytes;
    OK(w->drv->MemExportToShareableHandle(&source.fd[0], h, HRG_HANDLE_POSIX_FD, 0));
    OK(w->drv->MemRelease(h));
    hrd_gpus_import(gpus_of(r), r + 1, r, &source);
    struct hrd_gpu_event *ev = gpu_nodes_answer(r, HRD_GPU_IMPORTED);
    if (!ev->import)
        fprintf(stderr, "%s\n", ev->text);
    CHECK(ev->import != NULL);
    k->import = ev->import;
    hrd_agent_gpu_buffer_add(w->s.node[w->s.node_of_rank[r]].agent, r + 1, GPU_BUFFER, ev->gpu, ev->device,
                             ev->bytes);
    free(ev);
}

void gpu_nodes_start(uint32_t nnodes, uint32_t nranks, const uint32_t *map, const int *gpu,
                     struct sim_options *o)
{
    w->bytes = w->bytes ? w->bytes : UINT64_C(4) << 20;
    fake_gpu_seed();
    use_fake();
    struct hrd_gpus_config cfg = w->cfg;
    cfg.idle_ms = cfg.idle_ms ? cfg.idle_ms : 60000;
    cfg.pair_ms = 30000; /* a simulated copy may take seconds where other tests run, too */
    cfg.node_name = "n0";
    for (uint32_t n = 0; n < nnodes; n++)
        o->agent_gpus[n] = w->gpus[n] = hrd_gpus_new(&cfg);
    o->agent.dma_bytes = 8 << 20;
    o->agent.spin_us = 100;
    sim_start(&w->s, nnodes, nranks, map, o);
    if (w->linked)
        w->linked();
    for (uint32_t r = 0; r < nranks; r++)
        gpu_nodes_open(r, gpu[r]);
    CHECK(sim_comm(&w->s, 77, 0, o) == HRP_OK);
}

void gpu_nodes_close(uint32_t r)
{
    if (!w->rank[r].import)
        return;
    hrd_gpus_close(gpus_of(r), r + 1, r, w->rank[r].import);
    free(gpu_nodes_answer(r, HRD_GPU_CLOSED));
    w->rank[r].import = NULL;
}

void gpu_nodes_stop(void)
{
    for (uint32_t r = 0; r < w->s.nranks; r++)
        hrd_agent_session_end(w->s.node[w->s.node_of_rank[r]].agent, r + 1, "the test ended it");
    for (uint32_t r = 0; r < w->s.nranks; r++)
        while (!w->s.rank[r].gone) {
            sim_events(&w->s);
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
    for (uint32_t r = 0; r < w->s.nranks; r++)
        gpu_nodes_close(r);
    for (uint32_t n = 0; n < w->s.nnodes; n++)
        hrd_gpus_stop(w->gpus[n]);
    sim_stop(&w->s);
    for (uint32_t n = 0; n < w->s.nnodes; n++)
        hrd_gpus_free(w->gpus[n]);
}

void gpu_nodes_upload(struct gpu_rank *k)
{
    OK(w->drv->CtxSetCurrent(w->ctx[k->gpu]));
    OK(w->drv->MemcpyHtoDAsync(k->ptr, k->host, w->bytes, HRG_STREAM_PER_THREAD));
    OK(w->drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
}

void gpu_nodes_compare(uint32_t r, const char *what)
{
    struct gpu_rank *k = &w->rank[r];
    OK(w->drv->CtxSetCurrent(w->ctx[k->gpu]));
    OK(w->drv->MemcpyDtoHAsync(k->got, k->ptr, w->bytes, HRG_STREAM_PER_THREAD));
    OK(w->drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
    size_t i;
    if (!fake_gpu_same(k->got, k->host, w->bytes, &i)) {
        fprintf(stderr, "%s: rank %u, byte %zu: %02x, not %02x\n", what, r, i, k->got[i], k->host[i]);
        _exit(1);
    }
}

struct hrp_desc gpu_nodes_desc(uint64_t op, const struct hrp_sig *sig, uint64_t in, uint64_t out,
                               uint32_t flags)
{
    return (struct hrp_desc){.op = op,
                             .sig = *sig,
                             .flags = flags,
                             .in = {.kind = HRP_BUF_SHARED, .id = GPU_BUFFER, .offset = in},
                             .out = {.kind = HRP_BUF_SHARED, .id = GPU_BUFFER, .offset = out}};
}

void gpu_nodes_op(uint8_t coll, uint64_t count, bool in_place, uint32_t flags)
{
    uint32_t n = w->s.nranks, root = (uint32_t)fake_gpu_random() % n;
    struct hrp_sig sig = {.coll = coll,
                          .count = count,
                          .dtype = HRP_U32,
                          .redop = HRP_SUM,
                          .root = coll == HRP_BROADCAST ? root : 0};
    uint64_t one = count * 4, in_b = coll == HRP_REDUCE_SCATTER ? one * n : one;
    uint64_t out_b = coll == HRP_ALL_GATHER ? one * n : one;
    uint64_t in_at[SIM_MAX_RANKS], out_at[SIM_MAX_RANKS], op = 0;
    uint32_t *in[SIM_MAX_RANKS];
    for (uint32_t r = 0; r < n; r++) {
        struct gpu_rank *k = &w->rank[r];
        fake_gpu_fill(k->host, w->bytes, UINT64_MAX);
        gpu_nodes_upload(k);
        in_at[r] = 4 * (fake_gpu_random() % 16);
        out_at[r] = in_place ? in_at[r] : w->bytes / 2 + 4 * (fake_gpu_random() % 16);
        if (in_place && coll == HRP_REDUCE_SCATTER)
            out_at[r] = in_at[r] + r * one;
        if (in_place && coll == HRP_ALL_GATHER) {
            out_at[r] = in_at[r];
            in_at[r] += r * one;
        }
        in[r] = malloc(in_b + 4);
        memcpy(in[r], k->host + in_at[r], in_b);
    }
    for (uint32_t k = 0; k < n; k++) {
        uint32_t r = (k + 1) % n;
        op = ++w->s.rank[r].posted[0];
        struct hrp_desc d = gpu_nodes_desc(op, &sig, in_at[r], out_at[r], flags);
        sim_push(&w->s, r, 0, &d, flags & HRP_DESC_STREAM ? 0 : hrp_flag(op, HRP_CHUNK_ALL));
    }
    if (flags & HRP_DESC_STREAM)
        for (uint32_t r = 0; r < n; r++)
            atomic_store_explicit(&hrp_seg_comm(w->s.rank[r].seg, 0)->flags[op % HRP_OP_SLOTS].ready,
                                  hrp_flag(op, HRP_CHUNK_ALL), memory_order_release);
    for (uint32_t r = 0; r < n; r++) {
        char text[HRP_OP_TEXT + 1];
        if (sim_wait(&w->s, r, 0, op, text) != HRP_OK)
            fprintf(stderr, "rank %u: %s\n", r, text);
        CHECK(sim_wait(&w->s, r, 0, op, NULL) == HRP_OK);
        uint32_t *out = malloc(out_b + 4);
        for (uint64_t i = 0; i < out_b / 4; i++) {
            out[i] = 0;
            if (coll == HRP_BROADCAST)
                out[i] = in[root][i];
            else if (coll == HRP_ALL_GATHER)
                out[i] = in[i / count][i % count];
            else
                for (uint32_t k = 0; k < n; k++)
                    out[i] += in[k][coll == HRP_REDUCE_SCATTER ? r * count + i : i];
        }
        memcpy(w->rank[r].host + out_at[r], out, out_b);
        free(out);
        gpu_nodes_compare(r, "op");
    }
    for (uint32_t r = 0; r < n; r++)
        free(in[r]);
}

uint64_t gpu_nodes_try(uint32_t *status, char *text, uint32_t flags)
{
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = w->bytes / 8, .dtype = HRP_F32, .redop = HRP_SUM};
    uint64_t op = 0;
    for (uint32_t r = 0; r < w->s.nranks; r++) {
        op = ++w->s.rank[r].posted[0];
        struct hrp_desc d = gpu_nodes_desc(op, &sig, 0, 0, flags);
        sim_push(&w->s, r, 0, &d, hrp_flag(op, HRP_CHUNK_ALL));
    }
    for (uint32_t r = 0; r < w->s.nranks; r++)
        status[r] = sim_wait(&w->s, r, 0, op, text);
    return op;
}
