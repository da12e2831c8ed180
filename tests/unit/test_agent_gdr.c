/* SPDX-License-Identifier: MIT */
/*
 * GPUDirect RDMA: whole nodes over the fake driver and the fake verbs layer, whose adapter writes into GPU memory late: what
 * it wrote is there only when somebody asked the driver. Every element compared.
 */
#include "tests/sim/gpu_nodes.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "daemon/agent/types.h"
#include "daemon/gpu/gdr.h"
#include "proto/ring.h"
#include "proto/status.h"
#include "tests/sim/fake_verbs.h"

#define IDLE (HRP_DESC_OVERLAP_IDLE) /* kernels */
#define BYTES (UINT64_C(2) << 20)    /* of a rank */
#define COUNT 200003u                /* elements of a large op: several units */

static struct gpu_nodes *const w = &gpu_nodes;
static const uint32_t map22[4] = {0, 0, 1, 1};
static const int gpu22[4] = {0, 1, 0, 2};

/* The adapter becomes known to every node, as when its links were made. */
static void linked(void)
{
    struct hrd_verbs_device nic = fake_verbs_device();
    for (uint32_t n = 0; n < w->s.nnodes; n++)
        hrd_gpus_set_nic(w->gpus[n], &nic);
}

/* Links over verbs are made already; so are these. */
static void late(void)
{
    fake_verbs_gpu(true, false, false);
    fake_gpu_on_flush(fake_verbs_visible);
    linked();
}

static void begin(uint64_t bytes, void (*ready)(void), struct sim_options *o)
{
    o->verbs = true;
    w->bytes = BYTES;
    w->cfg.gdr = HRD_GDR_ON;
    w->cfg.gdr_bytes = bytes;
    w->linked = ready;
    gpu_nodes_start(2, 4, map22, gpu22, o);
}

static void end(void)
{
    gpu_nodes_stop();
    CHECK(fake_verbs_objects() == 0);
}

static bool says(const char *text, const char *what)
{
    if (strstr(text, what))
        return true;
    (void)fprintf(stderr, "\"%s\" does not say \"%s\"\n", text, what);
    return false;
}

static void all_shapes(void)
{
    static const uint64_t counts[] = {1, 1021, 70000, COUNT};
    for (unsigned i = 0; i < 4; i++)
        for (unsigned in_place = 0; in_place < 2; in_place++) {
            gpu_nodes_op(HRP_ALL_REDUCE, counts[i], in_place, IDLE);
            gpu_nodes_op(HRP_BROADCAST, counts[i], in_place, IDLE);
            gpu_nodes_op(HRP_REDUCE_SCATTER, counts[i] / 4, in_place, IDLE);
            gpu_nodes_op(HRP_ALL_GATHER, counts[i] / 4, in_place, IDLE);
        }
}

static void each_collective(void)
{
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    gpu_nodes_op(HRP_BROADCAST, COUNT, false, IDLE);
    gpu_nodes_op(HRP_REDUCE_SCATTER, COUNT / 4, true, IDLE);
    gpu_nodes_op(HRP_ALL_GATHER, COUNT / 4, false, IDLE);
}

/* Blocks go from GPU to GPU, and nobody reads them before the driver was asked. */
static void exchange(void)
{
    struct sim_options o = {0};
    begin(16 << 20, late, &o);
    unsigned flushes = fake_gpu_calls("FlushGPUDirectRDMAWrites");
    uint64_t in = fake_verbs_gpu_bytes(true), out = fake_verbs_gpu_bytes(false);
    all_shapes();
    CHECK(fake_verbs_gpu_bytes(true) - in > 16 * COUNT && fake_verbs_gpu_bytes(false) - out > 16 * COUNT);
    CHECK(fake_gpu_calls("FlushGPUDirectRDMAWrites") > flushes);
    for (uint32_t n = 0; n < 2; n++) {
        const struct hrd_snapshot *s = sim_look(&w->s, n);
        CHECK(says(s->comm[0].gdr_used, "read and written by fake0 port 1 (GPU memory by dmabuf)"));
        CHECK(s->comm[0].gdr_why[0] == '\0' && s->comm[0].gdr_units > 0 && s->comm[0].gdr_full == 0);
        CHECK(s->link[0].gdr_send && s->link[0].gdr_receive && !s->link[0].gdr_why[0]);
    }
    /* The copy engines sum in host memory, through which all goes then. */
    uint64_t units = sim_look(&w->s, 0)->comm[0].gdr_units;
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, HRP_DESC_OVERLAP_COMPUTE);
    CHECK(sim_look(&w->s, 0)->comm[0].gdr_units == units);
    CHECK(says(sim_look(&w->s, 0)->comm[0].gdr_why, "the dma engine sums in host memory"));
    end();
}

/* A GPU that keeps the order by itself is not asked: for itself, or for all that read its memory. */
static void ordered(const char *attribute, bool asked)
{
    struct sim_options o = {0};
    setenv("FAKE_CUDA_ATTR", attribute, 1);
    begin(16 << 20, linked, &o);
    unsigned flushes = fake_gpu_calls("FlushGPUDirectRDMAWrites");
    each_collective();
    CHECK((fake_gpu_calls("FlushGPUDirectRDMAWrites") > flushes) == asked);
    CHECK(sim_look(&w->s, 0)->comm[0].gdr_units > 0);
    end();
}

static void ordered_for_all(void)
{
    ordered("118=200", false);
}

static void ordered_for_one(void)
{
    ordered("118=100", true);
}

/* Neither order nor a way to ask for it: such a GPU is not written into, but it is read. */
static void unordered(void)
{
    struct sim_options o = {0};
    setenv("FAKE_CUDA_ATTR", "117=0", 1);
    begin(16 << 20, linked, &o);
    uint64_t in = fake_verbs_gpu_bytes(true), out = fake_verbs_gpu_bytes(false);
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    CHECK(fake_verbs_gpu_bytes(true) == in && fake_verbs_gpu_bytes(false) > out);
    const struct hrd_snapshot_comm *c = &sim_look(&w->s, 0)->comm[0];
    CHECK(says(c->gdr_used, "received in host memory") &&
          says(c->gdr_why, "no way to tell when kernels see"));
    end();
}

/* dmabuf works or not, the peer-memory module works or not: three paths and a reason. */
static bool no_dmabuf, no_peermem;

static void refused(void)
{
    if (no_dmabuf)
        fake_verbs_fail(FAKE_REG_DMABUF, 0, EOPNOTSUPP, 0);
    if (no_peermem)
        fake_verbs_fail(FAKE_REG_PEERMEM, 0, EFAULT, 0);
    linked();
}

static void peermem(void)
{
    struct sim_options o = {0};
    no_dmabuf = true;
    begin(16 << 20, refused, &o);
    uint64_t in = fake_verbs_gpu_bytes(true);
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    CHECK(fake_verbs_gpu_bytes(true) > in);
    CHECK(says(sim_look(&w->s, 0)->comm[0].gdr_used, "by the peer-memory module"));
    end();
}

static void neither(void)
{
    struct sim_options o = {0};
    no_dmabuf = no_peermem = true;
    begin(16 << 20, refused, &o);
    unsigned calls = fake_verbs_calls(FAKE_REG_DMABUF) + fake_verbs_calls(FAKE_REG_PEERMEM);
    for (int i = 0; i < 3; i++)
        gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    /* Asked when the GPUs came up, and not again. */
    CHECK(fake_verbs_calls(FAKE_REG_DMABUF) + fake_verbs_calls(FAKE_REG_PEERMEM) == calls);
    const struct hrd_snapshot_comm *c = &sim_look(&w->s, 1)->comm[0];
    CHECK(strcmp(c->gdr_used, "host memory") == 0 && c->gdr_units == 0);
    CHECK(says(c->gdr_why, "dmabuf cannot be registered (Operation not supported)") &&
          says(c->gdr_why, "peer-memory module cannot be registered (Bad address)"));
    CHECK(says(c->gdr_remedy, "nvidia-peermem"));
    end();
}

/* The device has room for no more than what it knows already: asked once for each GPU, and host memory takes the rest. */
static void full(void)
{
    struct sim_options o = {0};
    begin(16 << 20, late, &o);
    gpu_nodes_op(HRP_ALL_REDUCE, 20000, true, IDLE);
    gpu_nodes_op(HRP_ALL_REDUCE, 20000, true, IDLE);
    unsigned calls = fake_verbs_calls(FAKE_REG_DMABUF);
    fake_verbs_fail(FAKE_REG_DMABUF, 0, ENOMEM, 0);
    fake_verbs_fail(FAKE_REG_PEERMEM, 0, ENOMEM, 0);
    for (int i = 0; i < 3; i++)
        gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    CHECK(fake_verbs_calls(FAKE_REG_DMABUF) - calls <= 4); /* two GPUs each */
    for (uint32_t n = 0; n < 2; n++)
        CHECK(says(sim_look(&w->s, n)->link[0].gdr_why,
                   "no more memory of the GPU: GPU memory by dmabuf cannot be registered (Cannot"));
    end();
}

/* The driver itself gives no descriptor. */
static void no_export(void)
{
    struct sim_options o = {0};
    setenv("FAKE_CUDA_FAIL", "MemGetHandleForAddressRange=801", 1);
    no_peermem = true;
    begin(16 << 20, refused, &o);
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    CHECK(fake_verbs_calls(FAKE_REG_DMABUF) == 0);
    CHECK(says(sim_look(&w->s, 1)->comm[0].gdr_why,
               "with dmabuf support; the CUDA driver exports no dmabuf: CUDA_ERROR_NOT"));
    end();
}

/* One direction damages what it carries: the other is used. */
static void damage_in(void)
{
    fake_verbs_gpu(false, true, false);
    linked();
}

static void damage_out(void)
{
    fake_verbs_gpu(false, false, true);
    linked();
}

static void one_direction(void (*ready)(void), bool in_works)
{
    struct sim_options o = {0};
    begin(16 << 20, ready, &o);
    uint64_t in = fake_verbs_gpu_bytes(true), out = fake_verbs_gpu_bytes(false);
    each_collective();
    CHECK((fake_verbs_gpu_bytes(true) > in) == in_works && (fake_verbs_gpu_bytes(false) > out) == !in_works);
    const struct hrd_snapshot *s = sim_look(&w->s, 0);
    CHECK(says(s->comm[0].gdr_used, in_works ? "sent from host memory" : "received in host memory"));
    CHECK(says(s->comm[0].gdr_why, "arrived damaged"));
    CHECK(s->link[0].gdr_send == !in_works && s->link[0].gdr_receive == in_works);
    end();
}

static void damaged_in(void)
{
    one_direction(damage_in, false);
}

static void damaged_out(void)
{
    one_direction(damage_out, true);
}

/* A path that fails in the midst of it is made anew, and what was under way goes again from the GPU's memory. */
static void mended(void)
{
    struct sim_options o = {0};
    begin(16 << 20, late, &o);
    w->s.mend = true;
    for (unsigned i = 0; i < 6; i++) {
        fake_verbs_lose(5 + 3 * i, i % 2);
        gpu_nodes_op(HRP_ALL_REDUCE, COUNT, i % 2, IDLE);
    }
    CHECK(w->s.mended > 0 && sim_look(&w->s, 0)->comm[0].gdr_units > 0);
    end();
}

/* 16 communicators that all want more than there is: no op waits for the GPU's memory. */
static void crowded(void)
{
    enum { COMMS = 16, EACH = 30000 };
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = EACH, .dtype = HRP_U32, .redop = HRP_SUM};
    struct sim_options o = {.unit_bytes = 128 << 10, .unit_min_bytes = 64 << 10};
    begin(2 << 20, late, &o);
    for (uint32_t c = 1; c < COMMS; c++)
        CHECK(sim_comm(&w->s, 77 + c, c, &o) == HRP_OK);
    for (uint32_t r = 0; r < 4; r++) {
        for (uint64_t i = 0; i < w->bytes; i += 8) {
            uint64_t v = fake_gpu_random();
            memcpy(w->rank[r].host + i, &v, 8);
        }
        gpu_nodes_upload(&w->rank[r]);
    }
    for (uint32_t r = 0; r < 4; r++)
        for (uint32_t k = 0; k < COMMS; k++) {
            uint32_t c = (k * 5 + r * 3) % COMMS;
            uint64_t op = ++w->s.rank[r].posted[c], at = (uint64_t)c * EACH * 4;
            struct hrp_desc d = gpu_nodes_desc(op, &sig, at, at, IDLE);
            sim_push(&w->s, r, c, &d, hrp_flag(op, HRP_CHUNK_ALL));
        }
    for (uint32_t c = 0; c < COMMS; c++)
        for (uint32_t r = 0; r < 4; r++)
            CHECK(sim_wait(&w->s, r, c, 1, NULL) == HRP_OK);
    uint32_t *sum = calloc(COMMS * EACH, 4);
    for (uint32_t r = 0; r < 4; r++)
        for (uint64_t i = 0; i < COMMS * EACH; i++)
            sum[i] += ((uint32_t *)(void *)w->rank[r].host)[i];
    for (uint32_t r = 0; r < 4; r++) {
        memcpy(w->rank[r].host, sum, COMMS * EACH * 4);
        gpu_nodes_compare(r, "16 communicators");
    }
    free(sum);
    const struct hrd_snapshot *s = sim_look(&w->s, 0);
    CHECK(s->total.gdr_units > 0 && s->total.gdr_full > 0);
    end();
}

/* require = gdr: used, or refused in words; with room for nothing the reserve still lets each op through. */
static void required(void)
{
    struct sim_options o = {.comm.require = HRP_REQUIRE_GDR};
    begin(2 << 20, late, &o);
    gpu_nodes_op(HRP_ALL_REDUCE, 2 * COUNT, true, 0); /* without a hint: the engine that can */
    CHECK(sim_look(&w->s, 0)->comm[0].gdr_units > 0);
    end();
}

static void required_in_vain(void)
{
    struct sim_options o = {.comm.require = HRP_REQUIRE_GDR};
    uint32_t status[4];
    char text[HRP_OP_TEXT + 1];
    no_dmabuf = no_peermem = true;
    begin(2 << 20, refused, &o);
    gpu_nodes_try(status, text, IDLE);
    for (int r = 0; r < 4; r++)
        CHECK(status[r] == HRP_UNSUPPORTED);
    CHECK(says(text, "require = gdr, but fake0 reaches no memory of GPU 0000:10:00.0"));
    gpu_nodes_op(HRP_ALL_REDUCE, 100, true, IDLE); /* small ones are copied in any case */
    end();
}

static void over_tcp(void)
{
    struct sim_options o = {0};
    fake_verbs_plain();
    w->bytes = BYTES;
    w->cfg.gdr = HRD_GDR_ON;
    w->cfg.gdr_bytes = 4 << 20;
    w->linked = linked;
    gpu_nodes_start(2, 4, map22, gpu22, &o);
    each_collective();
    const struct hrd_snapshot *s = sim_look(&w->s, 0);
    CHECK(strcmp(s->comm[0].gdr_used, "host memory") == 0);
    CHECK(says(s->comm[0].gdr_why, "node n1 is reached by tcp"));
    CHECK(says(s->link[0].gdr_why, "reached by tcp") && !s->link[0].gdr_send);
    end();
}

#define MB UINT64_C(1000000)

/* Node 0 has a GPU behind the adapter's switch and one that is farther, node 1 one on the other socket. */
static const int near_and_far[4] = {1, 0, 2, 2};

/* Of the adapter, bytes a second: so little that what else this machine does makes no difference. */
static uint64_t rate_in, rate_out, rate_host;

static void set_rates(unsigned in, unsigned out, unsigned host)
{
    rate_in = in * MB;
    rate_out = out * MB;
    rate_host = host * MB;
}

static void throttled(void)
{
    fake_verbs_rates(rate_in, rate_out, rate_host);
    linked();
}

static void begin_measured(uint8_t mode, const char *topology, struct sim_options *o)
{
    static char path[512];
    const char *root = getenv("HREDUCE_ROOT");
    (void)snprintf(path, sizeof(path), "%s/tests/lib/topo/%s", root ? root : ".", topology);
    o->verbs = true;
    w->bytes = BYTES;
    w->cfg.gdr = mode;
    w->cfg.gdr_bytes = 4 << 20;
    w->cfg.topology = path;
    w->linked = throttled;
    gpu_nodes_start(2, 4, map22, near_and_far, o);
}

/* "... read at 297 MB/s directly, 853 MB/s through host memory": the two, of the text behind `verb`. */
static void figures(const char *text, const char *verb, unsigned *direct, unsigned *staged)
{
    char look_for[32];
    (void)snprintf(look_for, sizeof(look_for), " %s at ", verb);
    const char *at = strstr(text, look_for);
    *direct = *staged = 0;
    if (!at ||
        sscanf(at + strlen(look_for), "%u MB/s directly, %u MB/s through host memory", direct, staged) != 2)
        (void)fprintf(stderr, "no figures of \"%s\" in \"%s\"\n", verb, text);
    CHECK(*direct > 0 && *staged > 0);
}

/* Where the direct way is faster, gdr = auto takes it, however far it is; of several GPUs the nearest. */
static void faster(void)
{
    struct sim_options o = {0};
    unsigned direct, staged;
    set_rates(30, 30, 10);
    begin_measured(HRD_GDR_AUTO, "gdr.xml", &o);
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    CHECK(
        says(sim_look(&w->s, 0)->comm[0].gdr_used, "memory of GPU 0000:10:00.0, read and written by fake0"));
    const struct hrd_snapshot_comm *c = &sim_look(&w->s, 1)->comm[0];
    CHECK(says(c->gdr_used, "memory of GPU 0000:30:00.0, read and written by fake0") && c->gdr_units > 0);
    CHECK(!c->gdr_why[0]);
    figures(c->gdr_used, "read", &direct, &staged);
    CHECK(direct <= 30 && staged <= 10);
    figures(c->gdr_used, "written", &direct, &staged);
    CHECK(direct <= 30 && staged <= 10);
    end();
}

/* A little faster is no reason: host memory has other things to do. */
static void threshold(void **state)
{
    (void)state;
    static const struct {
        double direct, staged; /* MB/s */
        bool too_slow;
    } at[] = {
        {40, 40, false},  {40, 30, false}, {40, 10, false}, {36, 40, false}, {100, 119, false},
        {100, 121, true}, {30, 40, true},  {30, 90, true},  {1, 90, true},   {0, 0, false} /* not measured */,
    };
    for (unsigned i = 0; i < sizeof(at) / sizeof(at[0]); i++) {
        const struct hrd_gdr_rate r = {.direct = at[i].direct * 1e6, .staged = at[i].staged * 1e6};
        if (hrd_gdr_too_slow(HRD_GDR_AUTO, &r) != at[i].too_slow)
            fail_msg("%.0f MB/s directly, %.0f through host memory", at[i].direct, at[i].staged);
        assert_false(hrd_gdr_too_slow(HRD_GDR_ON, &r));
    }
}

/* Throttled to a third: gdr = auto goes through host memory and says so with both figures, in status too. */
static void slower(const char *topology, const char *place)
{
    struct sim_options o = {0};
    struct hrd_gpu_info info[GPU_NODES_GPUS];
    uint64_t pinned;
    unsigned direct, staged;
    set_rates(10, 10, 30);
    begin_measured(HRD_GDR_AUTO, topology, &o);
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    const struct hrd_snapshot_comm *c = &sim_look(&w->s, 1)->comm[0];
    CHECK(strcmp(c->gdr_used, "host memory") == 0 && c->gdr_units == 0);
    CHECK(says(c->gdr_why, "gdr = auto takes the way through host memory where that is 1.2 times as fast"));
    CHECK(says(c->gdr_why, place) && says(c->gdr_remedy, "gdr = on in hreduced.conf takes the direct way"));
    figures(c->gdr_why, "read", &direct, &staged);
    CHECK(direct <= 10 && staged <= 30 && staged * 10 > direct * 12);
    figures(c->gdr_why, "written", &direct, &staged);
    CHECK(direct <= 10 && staged <= 30 && staged * 10 > direct * 12);
    CHECK(hrd_gpus_info(w->gpus[1], info, GPU_NODES_GPUS, &pinned) == 1 && !info[0].gdr);
    CHECK(says(info[0].gdr_text, "through host memory") && info[0].gdr_read.direct > 0 &&
          info[0].gdr_read.staged > 1.2 * info[0].gdr_read.direct &&
          info[0].gdr_written.staged > 1.2 * info[0].gdr_written.direct);
    CHECK(fake_verbs_gpu_regions() == 0);
    end();
}

static void slower_and_far(void)
{
    slower("gdr.xml",
           "memory of GPU 0000:30:00.0, connected to fake0 as SYS (the link between NUMA nodes), is read at");
}

static void slower_and_unknown(void)
{
    slower("nowhere.xml", "how it is connected to fake0 is not known (");
}

/* The same, and a person who knows better. */
static void slower_but_wanted(void)
{
    struct sim_options o = {0};
    unsigned direct, staged;
    set_rates(10, 10, 30);
    begin_measured(HRD_GDR_ON, "gdr.xml", &o);
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    const struct hrd_snapshot_comm *c = &sim_look(&w->s, 1)->comm[0];
    CHECK(says(c->gdr_used, "read and written by fake0") && says(c->gdr_used, "; gdr = on"));
    CHECK(c->gdr_units > 0 && !c->gdr_why[0]);
    figures(c->gdr_used, "read", &direct, &staged);
    CHECK(direct <= 10 && staged * 10 > direct * 12);
    end();
}

/* One direction of the two. */
static void slower_out(void)
{
    struct sim_options o = {0};
    set_rates(45, 5, 15);
    begin_measured(HRD_GDR_AUTO, "gdr.xml", &o);
    uint64_t in = fake_verbs_gpu_bytes(true), out = fake_verbs_gpu_bytes(false);
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    const struct hrd_snapshot_comm *c = &sim_look(&w->s, 1)->comm[0];
    CHECK(says(c->gdr_used, "written by fake0 port 1") && says(c->gdr_used, ", sent from host memory"));
    CHECK(says(c->gdr_why, "takes the way through host memory"));
    CHECK(fake_verbs_gpu_bytes(true) > in && fake_verbs_gpu_bytes(false) == out);
    end();
}

static bool any_up(void)
{
    struct hrd_gpu_info info[GPU_NODES_GPUS];
    uint64_t pinned;
    bool up = false;
    for (uint32_t n = 0; n < w->s.nnodes; n++)
        for (unsigned k = hrd_gpus_info(w->gpus[n], info, GPU_NODES_GPUS, &pinned); k-- > 0;)
            up = up || info[k].up;
    return up;
}

/* A GPU that nobody uses any more goes down while its communicator and its links live: the adapter has let go of its memory
   before. And it comes back. */
static void idle(void)
{
    struct sim_options o = {0};
    w->cfg.idle_ms = 1;
    begin(4 << 20, late, &o);
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    CHECK(fake_verbs_gpu_regions() > 0);
    for (uint32_t r = 0; r < 4; r++) {
        hrd_agent_buffer_drop(w->s.node[map22[r]].agent, r + 1, 2);
        while (w->s.rank[r].buffers_gone == 0) {
            sim_events(&w->s);
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
        gpu_nodes_close(r);
    }
    for (int i = 0; any_up(); i++) {
        CHECK(i < LIMIT_S * 100);
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    CHECK(fake_verbs_gpu_regions() == 0);
    for (uint32_t r = 0; r < 4; r++)
        gpu_nodes_open(r, gpu22[r]);
    uint64_t in = fake_verbs_gpu_bytes(true);
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, false, IDLE);
    CHECK(fake_verbs_gpu_bytes(true) > in + COUNT);
    end();
}

/* A rank dies while the adapters are writing: its peers hear of it, and no write is left behind. */
static void death(void)
{
    struct sim_options o = {0};
    struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = BYTES / 8, .dtype = HRP_U32, .redop = HRP_SUM};
    char text[HRP_OP_TEXT + 1];
    begin(8 << 20, late, &o);
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    fake_verbs_hold(true);
    for (uint32_t r = 0; r < 4; r++) {
        uint64_t op = ++w->s.rank[r].posted[0];
        struct hrp_desc d = gpu_nodes_desc(op, &sig, 0, 0, IDLE);
        sim_push(&w->s, r, 0, &d, hrp_flag(op, HRP_CHUNK_ALL));
    }
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    hrd_agent_session_end(w->s.node[0].agent, 1, "process 1000 died");
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    fake_verbs_hold(false);
    for (uint32_t r = 1; r < 4; r++)
        CHECK(sim_wait(&w->s, r, 0, 2, text) == HRP_RANK_LOST && says(text, "process 1000 died"));
    end();
}

static void fail_a_flush(const char *failure)
{
    static const uint32_t map[2] = {0, 1};
    static const int gpu[2] = {0, 0};
    static struct sim_options o = {.verbs = true};
    setenv("FAKE_CUDA_FAIL", failure, 1);
    w->bytes = BYTES;
    w->cfg.gdr = HRD_GDR_ON;
    w->cfg.gdr_bytes = 4 << 20;
    w->linked = linked;
    gpu_nodes_start(2, 2, map, gpu, &o);
    CHECK(fake_gpu_calls("FlushGPUDirectRDMAWrites") == 8); /* a trial asks four times */
}

/* A flush that fails fails the op that would have read, on all ranks and in words; the next one works. */
static void failed_flush(void)
{
    uint32_t status[2];
    char text[HRP_OP_TEXT + 1];
    fail_a_flush("FlushGPUDirectRDMAWrites=1@11");
    gpu_nodes_try(status, text, IDLE);
    CHECK(status[0] == HRP_SYSTEM && status[1] == HRP_SYSTEM);
    CHECK(says(text, "flushing what the adapter wrote failed") && says(text, "GPU 0000:10:00.0"));
    gpu_nodes_op(HRP_ALL_REDUCE, COUNT, true, IDLE);
    end();
}

/* What it was to make visible is not visible to other ops either: the next that reads asks again. */
static void failed_flush_again(void)
{
    struct hrd_agent agent = {0};
    struct apool pool = {.gpu = 0, .arrived = true};
    struct hrd_work_error error = {.text = ""};
    fail_a_flush("FlushGPUDirectRDMAWrites=1@9");
    agent.cfg.gpus = w->gpus[0];
    CHECK(hrd_pool_settle(&agent, &pool, &error) != 0 && !error.device_lost);
    CHECK(hrd_pool_settle(&agent, &pool, &error) == 0 && hrd_pool_settle(&agent, &pool, &error) == 0);
    CHECK(fake_gpu_calls("FlushGPUDirectRDMAWrites") == 10);
    end();
}

/* The GPU is lost by it: the communicator ends, and all that it had goes. */
static void lost(void)
{
    uint32_t status[2];
    char text[HRP_OP_TEXT + 1];
    fail_a_flush("FlushGPUDirectRDMAWrites=700@11");
    gpu_nodes_try(status, text, IDLE);
    CHECK(status[0] == HRP_SYSTEM && status[1] == HRP_SYSTEM);
    CHECK(says(text, "CUDA_ERROR_ILLEGAL_ADDRESS"));
    end();
}

/* So it is by an error in a trial: nothing more is given to it. */
static void lost_in_trial(void)
{
    struct sim_options o = {0};
    struct hrd_gpu_info info[GPU_NODES_GPUS];
    uint64_t pinned;
    setenv("FAKE_CUDA_FAIL", "FlushGPUDirectRDMAWrites=700@1", 1);
    begin(4 << 20, NULL, &o);
    linked();
    bool is_lost = false;
    for (int i = 0; !is_lost; i++) {
        CHECK(i < LIMIT_S * 1000);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        for (uint32_t n = 0; n < w->s.nnodes; n++)
            for (unsigned k = hrd_gpus_info(w->gpus[n], info, GPU_NODES_GPUS, &pinned); k-- > 0;)
                is_lost = is_lost || strstr(info[k].lost, "since flushing what the adapter wrote failed");
    }
    end();
}

/* On a real GPU, whose driver copies in the place of the adapter: its memory is exported and its writes are flushed for
   real, and real kernels read and write it. */
static void by_driver(void *to, bool to_gpu, const void *from, bool from_gpu, size_t len)
{
    const struct hrg_driver *drv = w->drv;
    hrg_ctx was;
    OK(drv->CtxGetCurrent(&was));
    OK(drv->CtxSetCurrent(w->ctx[0]));
    if (to_gpu && from_gpu)
        OK(drv->MemcpyDtoDAsync((hrg_ptr)(uintptr_t)to, (hrg_ptr)(uintptr_t)from, len,
                                HRG_STREAM_PER_THREAD));
    else if (to_gpu)
        OK(drv->MemcpyHtoDAsync((hrg_ptr)(uintptr_t)to, from, len, HRG_STREAM_PER_THREAD));
    else
        OK(drv->MemcpyDtoHAsync(to, (hrg_ptr)(uintptr_t)from, len, HRG_STREAM_PER_THREAD));
    OK(drv->StreamSynchronize(HRG_STREAM_PER_THREAD));
    OK(drv->CtxSetCurrent(was));
}

static void real_gpu(void)
{
    static const int attribute[] = {HRG_DEV_DMA_BUF, HRG_DEV_GPU_DIRECT_RDMA,
                                    HRG_DEV_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
                                    HRG_DEV_GPU_DIRECT_RDMA_WRITES_ORDERING};
    static const char *const name[] = {"dmabuf", "GPUDirect RDMA", "flush options", "writes ordering"};
    static int gpu[4];
    struct sim_options o = {.verbs = true};
    int value, ngpus = 0;
    const struct hrg_driver *drv = fake_gpu_driver();
    for (int i = 0; i < 4; i++) {
        OK(drv->DeviceGetAttribute(&value, attribute[i], 0));
        printf("attribute %s: %d\n", name[i], value);
    }
    OK(drv->DeviceGetCount(&ngpus));
    gpu[1] = gpu[3] = ngpus > 1;
    fake_verbs_copy = by_driver;
    w->cfg.gdr = HRD_GDR_ON;
    w->cfg.gdr_bytes = 32 << 20;
    w->linked = linked;
    gpu_nodes_start(2, 4, map22, gpu, &o);
    uint64_t in = fake_verbs_gpu_bytes(true), out = fake_verbs_gpu_bytes(false);
    all_shapes();
    const struct hrd_snapshot *s = sim_look(&w->s, 0);
    printf("%d GPUs, used: %s; why not: %s\n", ngpus, s->comm[0].gdr_used, s->comm[0].gdr_why);
    printf("blocks on the GPU %llu, elsewhere %llu; bytes in %llu, out %llu; every element right\n",
           (unsigned long long)s->comm[0].gdr_units, (unsigned long long)s->comm[0].gdr_full,
           (unsigned long long)(fake_verbs_gpu_bytes(true) - in),
           (unsigned long long)(fake_verbs_gpu_bytes(false) - out));
    CHECK(s->comm[0].gdr_units > 0);
    end();
    (void)fflush(stdout);
}

static int on_a_real_gpu(void)
{
    const struct CMUnitTest tests[] = {FAKE_GPU_TEST(real_gpu)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    if (getenv("HREDUCE_TEST_GPU"))
        return on_a_real_gpu();
    const struct CMUnitTest tests[] = {
        FAKE_GPU_TEST(exchange),
        FAKE_GPU_TEST(ordered_for_all),
        FAKE_GPU_TEST(ordered_for_one),
        FAKE_GPU_TEST(unordered),
        FAKE_GPU_TEST(peermem),
        FAKE_GPU_TEST(neither),
        FAKE_GPU_TEST(full),
        FAKE_GPU_TEST(no_export),
        FAKE_GPU_TEST(damaged_in),
        FAKE_GPU_TEST(damaged_out),
        FAKE_GPU_TEST(mended),
        FAKE_GPU_TEST(crowded),
        FAKE_GPU_TEST(required),
        FAKE_GPU_TEST(required_in_vain),
        FAKE_GPU_TEST(over_tcp),
        FAKE_GPU_TEST(faster),
        cmocka_unit_test(threshold),
        FAKE_GPU_TEST(slower_and_far),
        FAKE_GPU_TEST(slower_and_unknown),
        FAKE_GPU_TEST(slower_but_wanted),
        FAKE_GPU_TEST(slower_out),
        FAKE_GPU_TEST(idle),
        FAKE_GPU_TEST(death),
        FAKE_GPU_TEST(failed_flush),
        FAKE_GPU_TEST(failed_flush_again),
        FAKE_GPU_TEST(lost),
        FAKE_GPU_TEST(lost_in_trial),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
