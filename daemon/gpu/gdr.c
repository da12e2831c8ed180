/* SPDX-License-Identifier: MIT */
#include "daemon/gpu/gdr.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/gpu/gdr_trial.h"
#include "daemon/gpu/gpu_int.h"
#include "daemon/log.h"
#include "daemon/text.h"
#include "daemon/topo.h"

/* What the driver maps at once; memory of whole such pieces begins at one. */
#define PIECE (UINT64_C(2) << 20)
#define TRIAL_MS 2000u
/* The agent looks at least four times a second, see SLEEP_MS there. */
#define LET_GO_MS 2000u
/* With gdr = auto the way through host memory has to be faster by this before it is taken: it costs host memory's rate and a
   copy engine, which an idle machine does not show. */
#define STAGED_FASTER 1.2

static void publish(struct gpu *g, const struct hrd_gdr *is)
{
    pthread_mutex_lock(&g->gpus->lock);
    g->gdr.is = *is;
    atomic_fetch_add_explicit(&g->gpus->gdr_epoch, 1, memory_order_release);
    /* Its address is one more that kernels of other GPUs ask for. */
    atomic_fetch_add_explicit(&g->gpus->views_epoch, 1, memory_order_release);
    pthread_mutex_unlock(&g->gpus->lock);
}

/* ---- how near ----------------------------------------------------------------------------------------------------- */

/* Sets distance, and writes how the two are connected, for sentences. */
static void ask_distance(struct gpu *g, const struct hrd_verbs_device *nic, struct hrd_gdr *is, char *text,
                         size_t len)
{
    struct hrd_topo *t = NULL;
    struct hrd_topo_relation r = {.cls = HRD_TOPO_SYS};
    char why[256] = "", name[16];
    bool known = hrd_topo_load(&t, g->gpus->cfg.topology, why, sizeof(why)) == 0;
    if (known) {
        unsigned gpu = hrd_topo_find(t, g->dev.pci), port = hrd_topo_find(t, nic->name);
        known = gpu != HRD_TOPO_NONE && port != HRD_TOPO_NONE;
        if (known)
            r = hrd_topo_between(t, gpu, port);
        hrd_topo_free(t);
    }
    is->distance = known ? (unsigned)r.cls : (unsigned)HRD_TOPO_SYS + 1;
    if (known)
        snprintf(text, len, "connected to %s as %s (%s)", nic->name, hrd_topo_name(r, name, sizeof(name)),
                 hrd_topo_words(r.cls));
    else
        snprintf(text, len, "how it is connected to %s is not known%s%.100s%s", nic->name, why[0] ? " (" : "",
                 why, why[0] ? ")" : "");
}

/* ---- its memory --------------------------------------------------------------------------------------------------- */

static void give_memory_back(struct gpu *g, struct hrd_tp_memory *m)
{
    if (m->dmabuf_fd >= 0)
        close(m->dmabuf_fd);
    if (m->base)
        (void)g->dev.drv->MemFree((hrg_ptr)(uintptr_t)m->base);
    *m = (struct hrd_tp_memory){.dmabuf_fd = -1};
}

/* A descriptor of it for the adapter's driver; without one the adapter may still know the address (peer memory). */
static void export(struct gpu *g, struct hrd_tp_memory *m, char *why, size_t len)
{
    const struct hrg_driver *drv = g->dev.drv;
    char error[128];
    int can = 0;
    m->dmabuf_fd = -1;
    m->dmabuf_err = EOPNOTSUPP;
    if (!drv->MemGetHandleForAddressRange) {
        snprintf(why, len, "the CUDA driver exports no dmabuf: it needs to be of CUDA 11.7 or later");
        return;
    }
    hrg_result rc = drv->DeviceGetAttribute(&can, HRG_DEV_DMA_BUF, g->dev.dev);
    if (rc == HRG_SUCCESS && can)
        rc = drv->MemGetHandleForAddressRange(&m->dmabuf_fd, (hrg_ptr)(uintptr_t)m->base, m->bytes,
                                              HRG_RANGE_HANDLE_DMA_BUF, 0);
    if (rc == HRG_SUCCESS && can)
        return;
    m->dmabuf_fd = -1;
    snprintf(why, len, "the CUDA driver exports no dmabuf%s%s", rc == HRG_SUCCESS ? "" : ": ",
             rc == HRG_SUCCESS ? " (it needs NVIDIA's open kernel modules)"
                               : hrg_error_text(drv, rc, error, sizeof(error)));
}

static bool make_memory(struct gpu *g, struct hrd_gdr *is)
{
    struct hrd_tp_memory *m = &is->memory;
    char error[128];
    hrg_ptr ptr = 0;
    m->bytes = (g->gpus->cfg.gdr_bytes + PIECE - 1) / PIECE * PIECE;
    hrg_result rc = g->dev.drv->MemAlloc(&ptr, m->bytes);
    if (rc == HRG_SUCCESS) {
        m->base = (char *)(uintptr_t)ptr;
        return true;
    }
    snprintf(is->why, sizeof(is->why), "GPU %s: %" PRIu64 " MiB for GPUDirect RDMA cannot be allocated: %s",
             g->dev.id, m->bytes >> 20, hrg_error_text(g->dev.drv, rc, error, sizeof(error)));
    snprintf(is->remedy, sizeof(is->remedy),
             "lower gdr_memory in hreduced.conf, or leave the GPU more memory");
    return false;
}

/* ---- the trial ---------------------------------------------------------------------------------------------------- */

/* What the GPU does about the order of what others write into it. */
static void ask_order(struct gpu *g)
{
    const struct hrg_driver *drv = g->dev.drv;
    int options = 0;
    g->gdr.ordering = HRG_ORDERING_NONE;
    (void)drv->DeviceGetAttribute(&g->gdr.ordering, HRG_DEV_GPU_DIRECT_RDMA_WRITES_ORDERING, g->dev.dev);
    (void)drv->DeviceGetAttribute(&options, HRG_DEV_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, g->dev.dev);
    g->gdr.can_flush = drv->FlushGPUDirectRDMAWrites && options & HRG_FLUSH_OPTION_HOST;
}

bool hrd_gdr_too_slow(enum hrd_gdr_mode mode, const struct hrd_gdr_rate *r)
{
    return mode == HRD_GDR_AUTO && r->staged > STAGED_FASTER * r->direct;
}

static void add_rate(char *buf, size_t size, const char *verb, const struct hrd_gdr_rate *r)
{
    if (r->direct > 0)
        hrd_text_add(buf, size, "%s %s at %.0f MB/s directly, %.0f MB/s through host memory",
                     buf[0] ? "," : "", verb, r->direct / 1e6, r->staged / 1e6);
}

/* works: the directions in which patterns arrived. */
static void explain(struct gpu *g, const struct hrd_gdr_trial *t, const struct hrd_gdr *works,
                    const char *no_dmabuf, const char *place, struct hrd_gdr *is)
{
    const char *verb = is->send && is->receive ? "read and written" : is->send ? "read" : "written";
    const char *broken = works->receive ? t->why_send : t->why_receive;
    const bool none = !works->send && !works->receive, set = g->gpus->cfg.gdr == HRD_GDR_ON;
    char rates[240] = "";
    add_rate(rates, sizeof(rates), "read", &t->send_rate);
    add_rate(rates, sizeof(rates), "written", &t->receive_rate);
    if (is->ready)
        snprintf(is->used, sizeof(is->used), "memory of GPU %s, %s by %s port %u (%s);%s%s", g->dev.id, verb,
                 t->nic->name, t->nic->port, t->way, rates, set ? "; gdr = on" : "");
    if (!works->send || !works->receive) {
        snprintf(is->why, sizeof(is->why), "%s %s memory of GPU %s: %.300s%s%s", t->nic->name,
                 none          ? "reaches no"
                 : works->send ? "does not write"
                               : "does not read",
                 g->dev.id, broken, no_dmabuf[0] && none ? "; " : "", none ? no_dmabuf : "");
        snprintf(
            is->remedy, sizeof(is->remedy),
            "load nvidia-peermem or use NVIDIA's open kernel modules; where patterns arrive damaged or not "
            "at "
            "all, switch off ACS on the PCIe switches and the IOMMU's translation; gdr = off keeps to host "
            "memory");
    }
    if (works->send == is->send && works->receive == is->receive)
        return;
    hrd_text_add(
        is->why, sizeof(is->why),
        "%sgdr = auto takes the way through host memory where that is %.1f times as fast: memory of GPU "
        "%s, %s, is%s",
        is->why[0] ? "; " : "", STAGED_FASTER, g->dev.id, place, rates);
    if (!is->remedy[0])
        snprintf(is->remedy, sizeof(is->remedy),
                 "gdr = on in hreduced.conf takes the direct way all the same; 'hreducectl topo' says which "
                 "adapter "
                 "is nearer");
}

static void try_memory(struct gpu *g, const struct hrd_verbs_device *nic, struct hrd_gdr *is)
{
    char no_dmabuf[200] = "", place[300];
    struct hrd_gdr_trial t = {.dev = &g->dev, .nic = nic, .memory = &is->memory, .limit_ms = TRIAL_MS};
    ask_distance(g, nic, is, place, sizeof(place));
    ask_order(g);
    export(g, &is->memory, no_dmabuf, sizeof(no_dmabuf));
    t.flush = g->gdr.can_flush && g->gdr.ordering < HRG_ORDERING_ALL_DEVICES;
    hrd_gdr_trial(&t);
    bool ordered = g->gdr.can_flush || g->gdr.ordering >= HRG_ORDERING_OWNER;
    if (t.receive && !ordered)
        snprintf(t.why_receive, sizeof(t.why_receive),
                 "this GPU and driver have no way to tell when kernels see what an adapter wrote");
    struct hrd_gdr works = {.send = t.send && !t.stuck, .receive = t.receive && ordered && !t.stuck};
    is->read = t.send_rate;
    is->written = t.receive_rate;
    const enum hrd_gdr_mode mode = g->gpus->cfg.gdr;
    is->send = works.send && !hrd_gdr_too_slow(mode, &t.send_rate);
    is->receive = works.receive && !hrd_gdr_too_slow(mode, &t.receive_rate);
    is->receive_all = is->receive && (g->gdr.can_flush || g->gdr.ordering >= HRG_ORDERING_ALL_DEVICES);
    is->ready = is->send || is->receive;
    snprintf(is->memory.device, sizeof(is->memory.device), "%s", nic->name);
    is->memory.port = nic->port;
    explain(g, &t, &works, no_dmabuf, place, is);
    if (t.stuck)
        is->memory.base = NULL; /* the driver may still write there: it goes with the context */
}

static void say(const struct gpu *g, const struct hrd_gdr *is)
{
    if (is->ready)
        hrd_notice("GPUDirect RDMA: %s, verified, %" PRIu64 " MiB%s%s", is->used, is->memory.bytes >> 20,
                   is->why[0] ? "; " : "", is->why);
    else
        hrd_log(g->gpus->cfg.gdr == HRD_GDR_ON ? HRD_LOG_WARNING : HRD_LOG_NOTICE,
                "no GPUDirect RDMA with GPU %s, data goes through host memory: %s; %s", g->dev.id, is->why,
                is->remedy);
}

void hrd_gpu_gdr_up(struct gpu *g)
{
    struct hrd_gpus *gpus = g->gpus;
    struct hrd_gdr is = {.memory.dmabuf_fd = -1};
    pthread_mutex_lock(&gpus->lock);
    struct hrd_verbs_device nic = gpus->nic;
    bool have = gpus->have_nic, ready = g->gdr.is.ready;
    pthread_mutex_unlock(&gpus->lock);
    if (ready)
        return;
    if (gpus->cfg.gdr == HRD_GDR_OFF) {
        snprintf(is.why, sizeof(is.why), "gdr = off in hreduced.conf of node %s", gpus->node_name);
        snprintf(is.remedy, sizeof(is.remedy), "set gdr = auto there");
    } else if (!have) {
        snprintf(is.why, sizeof(is.why), "no RDMA adapter is in use on node %s", gpus->node_name);
        snprintf(is.remedy, sizeof(is.remedy), "see why the peers are not reached by verbs");
    } else {
        struct hrd_gdr trying = is;
        trying.trying = true;
        snprintf(trying.why, sizeof(trying.why), "memory of GPU %s is being tried with %s", g->dev.id,
                 nic.name);
        snprintf(trying.remedy, sizeof(trying.remedy), "wait a moment");
        publish(g, &trying);
        if (make_memory(g, &is))
            try_memory(g, &nic, &is);
    }
    if (!is.ready)
        give_memory_back(g, &is.memory);
    if (have && gpus->cfg.gdr != HRD_GDR_OFF)
        say(g, &is);
    publish(g, &is);
}

/* ---- and back ----------------------------------------------------------------------------------------------------- */

static bool want_back(struct gpu *g, bool want)
{
    pthread_mutex_lock(&g->gpus->lock);
    bool held = g->gdr.held;
    if (g->gdr.is.ready && g->gdr.is.wanted != want) {
        g->gdr.is.wanted = want;
        atomic_fetch_add_explicit(&g->gpus->gdr_epoch, 1, memory_order_release);
    }
    pthread_mutex_unlock(&g->gpus->lock);
    return !held;
}

bool hrd_gpu_gdr_idle(struct gpu *g, bool force)
{
    unsigned ms = 0;
    while (!want_back(g, true)) {
        if (!force)
            return false;
        if (ms++ == LET_GO_MS) {
            hrd_error("the agent does not let go of memory of GPU %s, which is given back all the same",
                      g->dev.id);
            break;
        }
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return true;
}

void hrd_gpu_gdr_stay(struct gpu *g)
{
    (void)want_back(g, false);
}

void hrd_gpu_gdr_down(struct gpu *g)
{
    struct hrd_tp_memory m = g->gdr.is.memory;
    bool ready = g->gdr.is.ready;
    publish(g, &(struct hrd_gdr){.memory.dmabuf_fd = -1});
    if (ready)
        give_memory_back(g, &m);
}

/* ---- any thread --------------------------------------------------------------------------------------------------- */

void hrd_gpus_set_nic(struct hrd_gpus *gpus, const struct hrd_verbs_device *nic)
{
    pthread_mutex_lock(&gpus->lock);
    bool same = gpus->have_nic && gpus->nic.port == nic->port && strcmp(gpus->nic.name, nic->name) == 0;
    gpus->nic = *nic;
    gpus->have_nic = true;
    for (unsigned i = 0; !same && gpus->listing == GPUS_LISTED && i < gpus->n; i++)
        if (gpus->gpu[i]->up && !gpus->gpu[i]->gdr.is.ready)
            hrd_gpu_ask_gdr(gpus->gpu[i]);
    pthread_mutex_unlock(&gpus->lock);
}

void hrd_gpus_gdr(const struct hrd_gpus *gpus, int16_t gpu, struct hrd_gdr *out)
{
    struct hrd_gpus *m = (struct hrd_gpus *)(uintptr_t)gpus;
    pthread_mutex_lock(&m->lock);
    *out = gpus->gpu[gpu]->gdr.is;
    pthread_mutex_unlock(&m->lock);
}

uint64_t hrd_gpus_gdr_epoch(const struct hrd_gpus *gpus)
{
    return atomic_load_explicit(&gpus->gdr_epoch, memory_order_acquire);
}

bool hrd_gpus_gdr_hold(struct hrd_gpus *gpus, int16_t gpu)
{
    struct gpu_gdr *d = &gpus->gpu[gpu]->gdr;
    pthread_mutex_lock(&gpus->lock);
    bool ok = d->is.ready && !d->is.wanted;
    d->held = d->held || ok;
    pthread_mutex_unlock(&gpus->lock);
    return ok;
}

void hrd_gpus_gdr_let_go(struct hrd_gpus *gpus, int16_t gpu)
{
    pthread_mutex_lock(&gpus->lock);
    gpus->gpu[gpu]->gdr.held = false;
    pthread_mutex_unlock(&gpus->lock);
}

int hrd_gpus_gdr_flush(struct hrd_gpus *gpus, int16_t gpu, bool all, bool *lost, char *why, size_t len)
{
    struct gpu *g = gpus->gpu[gpu];
    const struct hrg_driver *drv = g->dev.drv;
    *lost = false;
    if (g->gdr.ordering >= (all ? HRG_ORDERING_ALL_DEVICES : HRG_ORDERING_OWNER))
        return 0;
    hrg_result rc = drv->CtxSetCurrent(g->dev.ctx);
    if (rc == HRG_SUCCESS)
        rc = drv->FlushGPUDirectRDMAWrites(HRG_FLUSH_TARGET_CURRENT_CTX,
                                           all ? HRG_FLUSH_TO_ALL_DEVICES : HRG_FLUSH_TO_OWNER);
    if (rc == HRG_SUCCESS)
        return 0;
    *lost = hrd_gpu_failed(&g->dev, rc, "flushing what the adapter wrote", why, len);
    return -1;
}
