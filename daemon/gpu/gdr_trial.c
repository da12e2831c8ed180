/* SPDX-License-Identifier: MIT */
/*
 * Whether an adapter reaches the memory of a GPU: patterns of several sizes go through a connection of the adapter with
 * itself, from host memory into the GPU's and from there into host memory, the way an op's blocks go: an RDMA write, and a
 * message behind it that says so. What arrived is read on the other side of the bus, by the driver or by the processor.
 *
 * Then pieces go the same way, and in turns with them others by the way that is taken otherwise: the same connection, but from
 * host memory into host memory, while a copy engine moves as much between that and the GPU. In an op the two overlap as well,
 * as there are several units on their way, so the slower of the two counts. Both go over the adapter's own place on the bus
 * twice; what differs is what lies between it and the GPU.
 */
#include "daemon/gpu/gdr_trial.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "daemon/relax.h"
#include "daemon/verbs/conn.h"

#define PATTERN_BYTES ((size_t)1 << 20)
#define OUT 0                    /* what is sent */
#define IN PATTERN_BYTES         /* where the adapter writes */
#define BACK (2 * PATTERN_BYTES) /* where the driver copies to */
#define HOST_BYTES (3 * PATTERN_BYTES)
#define RATE_PIECES 16    /* each way, of PATTERN_BYTES; fewer where they are slow: */
#define RATE_S 0.25       /* for both ways, after */
#define RATE_PIECES_MIN 6 /* of them */
#define SPIN_S 0.002      /* a sleep is longer than a piece takes */
#define NOTE_BYTES 64u

/* Both ends, and what they registered of the GPU's memory and of the host's. */
struct rig {
    struct hrd_gdr_trial *t;
    struct hrd_verbs_conn *a, *b; /* a writes, b is written into */
    struct hrd_mr from_gpu, to_gpu, to_host;
    unsigned char *host; /* pinned, HOST_BYTES */
    hrg_stream stream;
    hrg_event event;
};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
}

/* Between two looks at something that began then. */
static void pause_since(double begun)
{
    if (now_s() - begun < SPIN_S)
        hrd_relax();
    else
        nap();
}

static double deadline(const struct rig *r)
{
    return now_s() + r->t->limit_ms * 1e-3;
}

/* ---- the driver's side -------------------------------------------------------------------------------------------- */

static int failed(const struct rig *r, hrg_result rc, const char *what, char *why, size_t len)
{
    char error[128];
    if (hrg_error_is_sticky(rc))
        hrd_gpu_failed(r->t->dev, rc, what, why, len);
    snprintf(why, len, "%s failed: %s", what, hrg_error_text(r->t->dev->drv, rc, error, sizeof(error)));
    return -1;
}

/* Of GPU memory at `off`, from or to `host`. */
static hrg_result begin_copy(struct rig *r, bool to_gpu, size_t off, unsigned char *host, size_t bytes)
{
    const struct hrg_driver *drv = r->t->dev->drv;
    hrg_ptr at = (hrg_ptr)(uintptr_t)r->t->memory->base + off;
    hrg_result rc = to_gpu ? drv->MemcpyHtoDAsync(at, host, bytes, r->stream)
                           : drv->MemcpyDtoHAsync(host, at, bytes, r->stream);
    return rc == HRG_SUCCESS ? drv->EventRecord(r->event, r->stream) : rc;
}

/* rc: of begin_copy(). */
static int end_copy(struct rig *r, hrg_result rc, char *why, size_t len)
{
    const struct hrg_driver *drv = r->t->dev->drv;
    double begun = now_s(), end = deadline(r);
    while (rc == HRG_SUCCESS && (rc = drv->EventQuery(r->event)) == HRG_ERROR_NOT_READY) {
        if (now_s() > end) {
            r->t->stuck = true;
            snprintf(why, len, "a copy of the driver did not end in time");
            return -1;
        }
        pause_since(begun);
        rc = HRG_SUCCESS;
    }
    return rc == HRG_SUCCESS ? 0 : failed(r, rc, "a copy of the driver", why, len);
}

static int copy(struct rig *r, bool to_gpu, size_t off, unsigned char *host, size_t bytes, char *why,
                size_t len)
{
    return end_copy(r, begin_copy(r, to_gpu, off, host, bytes), why, len);
}

static int flush(const struct rig *r, char *why, size_t len)
{
    if (!r->t->flush)
        return 0;
    hrg_result rc =
        r->t->dev->drv->FlushGPUDirectRDMAWrites(HRG_FLUSH_TARGET_CURRENT_CTX, HRG_FLUSH_TO_ALL_DEVICES);
    return rc == HRG_SUCCESS ? 0 : failed(r, rc, "flushing what the adapter wrote", why, len);
}

/* ---- the adapter's side ------------------------------------------------------------------------------------------- */

/* The next completion of one end, which must be good. */
static int completion(const struct rig *r, struct hrd_verbs_conn *c, bool recv, double end, char *why,
                      size_t len)
{
    struct ibv_wc wc;
    double begun = now_s();
    int n;
    while ((n = c->dev.v->poll_cq(c->cq, 1, &wc)) == 0) {
        if (now_s() > end) {
            snprintf(why, len, "%s did not complete a write in time", r->t->nic->name);
            return -1;
        }
        pause_since(begun);
    }
    if (n < 0) {
        snprintf(why, len, "the completion queue of %s failed", r->t->nic->name);
        return -1;
    }
    if (wc.status != IBV_WC_SUCCESS) {
        hrd_verbs_wc_text(c, &wc, why, len);
        return -1;
    }
    uint32_t slot = hrd_wr_slot(wc.wr_id);
    if (!recv == !(wc.wr_id & HRD_WR_RECV) && (!recv || hrd_verbs_post_recv(c, 0, &slot, 1) == 0))
        return 0;
    snprintf(why, len, "%s completed what nobody asked for", r->t->nic->name);
    return -1;
}

/* One write and the message behind it. */
static int write_through(const struct rig *r, const void *from, uint32_t lkey, const void *to, uint32_t rkey,
                         size_t bytes, char *why, size_t len)
{
    struct ibv_sge data = {.addr = (uintptr_t)from, .length = (uint32_t)bytes, .lkey = lkey};
    struct ibv_sge note = {
        .addr = (uintptr_t)r->a->q[0].tx, .length = NOTE_BYTES, .lkey = r->a->buffers_mr.mr->lkey};
    struct ibv_send_wr *bad;
    struct ibv_send_wr told = {
        .sg_list = &note, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
    struct ibv_send_wr wr = {.next = &told,
                             .sg_list = &data,
                             .num_sge = 1,
                             .opcode = IBV_WR_RDMA_WRITE,
                             .wr.rdma = {.remote_addr = (uintptr_t)to, .rkey = rkey}};
    double end = deadline(r);
    int err = r->a->dev.v->post_send(r->a->q[0].qp, &wr, &bad);
    if (err) {
        snprintf(why, len, "%s takes no work (%s)", r->t->nic->name, strerror(err));
        return -1;
    }
    return completion(r, r->a, false, end, why, len) || completion(r, r->b, true, end, why, len) ? -1 : 0;
}

/* ---- the two directions ------------------------------------------------------------------------------------------- */

static void paint(const struct rig *r, size_t bytes, unsigned salt)
{
    for (size_t i = 0; i < bytes; i++)
        r->host[OUT + i] = (unsigned char)(i * 151 + (i >> 8) * 29 + bytes + salt);
}

static int arrived(const struct rig *r, size_t at, size_t bytes, const char *where, char *why, size_t len)
{
    if (memcmp(r->host + OUT, r->host + at, bytes) == 0)
        return 0;
    snprintf(why, len, "%zu bytes that %s wrote into %s arrived damaged", bytes, r->t->nic->name, where);
    return -1;
}

/* Both places are cleared first, so that nothing old can pass for what was written. */
static int receive_one(struct rig *r, size_t off, size_t bytes, char *why, size_t len)
{
    memset(r->host + BACK, 0, bytes);
    if (copy(r, true, off, r->host + BACK, bytes, why, len))
        return -1;
    paint(r, bytes, 1);
    if (write_through(r, r->host + OUT, r->a->arena_mr.mr->lkey, r->t->memory->base + off, r->to_gpu.mr->rkey,
                      bytes, why, len) ||
        flush(r, why, len) || copy(r, false, off, r->host + BACK, bytes, why, len))
        return -1;
    return arrived(r, BACK, bytes, "its memory", why, len);
}

static int send_one(struct rig *r, size_t off, size_t bytes, char *why, size_t len)
{
    paint(r, bytes, 2);
    memset(r->host + IN, 0, bytes);
    if (copy(r, true, off, r->host + OUT, bytes, why, len) ||
        write_through(r, r->t->memory->base + off, r->from_gpu.mr->lkey, r->host + IN, r->to_host.mr->rkey,
                      bytes, why, len))
        return -1;
    return arrived(r, IN, bytes, "host memory", why, len);
}

static bool patterns(struct rig *r, int (*one)(struct rig *, size_t, size_t, char *, size_t), char *why,
                     size_t len)
{
    static const struct {
        size_t off, bytes;
    } shape[] = {{0, 4}, {12, 4096}, {4096, 65540}, {0, PATTERN_BYTES}};
    for (size_t i = 0; i < sizeof(shape) / sizeof(shape[0]); i++)
        if (shape[i].off + shape[i].bytes <= r->t->memory->bytes &&
            one(r, shape[i].off, shape[i].bytes, why, len))
            return false;
    return true;
}

/* ---- how fast ----------------------------------------------------------------------------------------------------- */

/* A way of a piece: what the adapter does, and what the driver does beside it. No flush: in an op one serves many blocks. */
struct way {
    const void *from, *to;
    uint32_t lkey, rkey;
    enum { NO_COPY, TO_GPU, FROM_GPU } copy;
};

static int piece(struct rig *r, const struct way *w, double *best, char *why, size_t len)
{
    double begun = now_s();
    hrg_result rc =
        w->copy ? begin_copy(r, w->copy == TO_GPU, 0, r->host + BACK, PATTERN_BYTES) : HRG_SUCCESS;
    int wrote = write_through(r, w->from, w->lkey, w->to, w->rkey, PATTERN_BYTES, why, len);
    /* Also after a write that failed: nothing may be on its way when the memory goes. */
    if ((w->copy && end_copy(r, rc, why, len)) || wrote)
        return -1;
    double rate = (double)PATTERN_BYTES / (now_s() - begun);
    *best = rate > *best ? rate : *best;
    return 0;
}

/* In turns, so that what disturbs one disturbs the other. False: *why. */
static bool measure(struct rig *r, const struct way *direct, const struct way *staged,
                    struct hrd_gdr_rate *rate, char *why, size_t len)
{
    double begun = now_s();
    for (unsigned i = 0; i < RATE_PIECES && (i < RATE_PIECES_MIN || now_s() - begun < RATE_S); i++)
        if (piece(r, direct, &rate->direct, why, len) || piece(r, staged, &rate->staged, why, len))
            return false;
    return true;
}

/* ---- set-up ------------------------------------------------------------------------------------------------------- */

static int host_memory(struct rig *r, char *why, size_t len)
{
    const struct hrg_driver *drv = r->t->dev->drv;
    void *host = NULL;
    hrg_result rc = drv->MemHostAlloc(&host, HOST_BYTES, HRG_HOST_PORTABLE);
    r->host = host;
    if (rc == HRG_SUCCESS)
        rc = drv->StreamCreateWithPriority(&r->stream, HRG_STREAM_NON_BLOCKING, 0);
    if (rc == HRG_SUCCESS)
        rc = drv->EventCreate(&r->event, HRG_EVENT_DISABLE_TIMING);
    return rc == HRG_SUCCESS ? 0 : failed(r, rc, "memory for the trial", why, len);
}

static int connection(struct rig *r, char *why, size_t len)
{
    const uint64_t nonce = UINT64_C(0x6864742d74726961);
    double end = deadline(r);
    int ra = 0, rb = 0;
    r->a = hrd_verbs_conn_new(r->t->nic, 1, r->host, HOST_BYTES, nonce, r->t->limit_ms, why, len);
    r->b =
        r->a ? hrd_verbs_conn_new(r->t->nic, 1, r->host, HOST_BYTES, nonce, r->t->limit_ms, why, len) : NULL;
    if (!r->b || hrd_verbs_conn_connect(r->b, &r->a->local, false, why, len) ||
        hrd_verbs_conn_connect(r->a, &r->b->local, true, why, len))
        return -1;
    while ((ra == 0 || rb == 0) && ra >= 0 && rb >= 0) {
        rb = rb ? rb : hrd_verbs_conn_probe(r->b, why, len);
        ra = ra ? ra : hrd_verbs_conn_probe(r->a, why, len);
        if (ra > 0 && rb > 0)
            break;
        if (ra >= 0 && rb >= 0 && now_s() > end) {
            snprintf(why, len, "%s does not reach itself", r->t->nic->text);
            return -1;
        }
        nap();
    }
    return ra == 1 && rb == 1 ? 0 : -1;
}

static int gpu_memory(struct hrd_verbs_conn *c, const struct hrd_tp_memory *m, int access, struct hrd_mr *out,
                      char *why, size_t len)
{
    struct hrd_mr_source src = {.addr = m->base,
                                .len = m->bytes,
                                .gpu = true,
                                .dmabuf_fd = m->dmabuf_fd,
                                .dmabuf_err = m->dmabuf_err};
    return hrd_mr_register(c->dev.v, c->pd, &c->memory, &src, access, out, why, len);
}

/* Where the host's memory is written into. */
static int host_sink(struct rig *r, char *why, size_t len)
{
    struct hrd_mr_source sink = {.addr = r->host + IN, .len = PATTERN_BYTES};
    return hrd_mr_register(r->b->dev.v, r->b->pd, &r->b->memory, &sink,
                           IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, &r->to_host, why, len);
}

/* Host memory into host memory. */
static struct way through_host(const struct rig *r)
{
    return (struct way){.from = r->host + OUT,
                        .lkey = r->a->arena_mr.mr->lkey,
                        .to = r->host + IN,
                        .rkey = r->to_host.mr->rkey};
}

static void try_receive(struct rig *r)
{
    struct hrd_gdr_trial *t = r->t;
    if (gpu_memory(r->b, t->memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, &r->to_gpu,
                   t->why_receive, sizeof(t->why_receive)) ||
        host_sink(r, t->why_receive, sizeof(t->why_receive)))
        return;
    snprintf(t->way, sizeof(t->way), "%s", hrd_mr_way_name(r->to_gpu.way));
    struct way staged = through_host(r), direct = staged;
    staged.copy = TO_GPU;
    direct.to = t->memory->base;
    direct.rkey = r->to_gpu.mr->rkey;
    t->receive = patterns(r, receive_one, t->why_receive, sizeof(t->why_receive)) &&
                 measure(r, &direct, &staged, &t->receive_rate, t->why_receive, sizeof(t->why_receive));
}

static void try_send(struct rig *r)
{
    struct hrd_gdr_trial *t = r->t;
    if (gpu_memory(r->a, t->memory, 0, &r->from_gpu, t->why_send, sizeof(t->why_send)) ||
        host_sink(r, t->why_send, sizeof(t->why_send)))
        return;
    snprintf(t->way, sizeof(t->way), "%s", hrd_mr_way_name(r->from_gpu.way));
    struct way staged = through_host(r), direct = staged;
    staged.copy = FROM_GPU;
    direct.from = t->memory->base;
    direct.lkey = r->from_gpu.mr->lkey;
    t->send = patterns(r, send_one, t->why_send, sizeof(t->why_send)) &&
              measure(r, &direct, &staged, &t->send_rate, t->why_send, sizeof(t->why_send));
}

/* The queue pairs go first: without them no adapter touches any of the memory. */
static void take_apart(struct rig *r)
{
    const struct hrd_verbs *v = r->t->nic->v;
    const struct hrg_driver *drv = r->t->dev->drv;
    struct hrd_verbs_conn *end[2] = {r->a, r->b};
    for (int i = 0; i < 2; i++) {
        if (!end[i] || !end[i]->q[0].qp)
            continue;
        v->destroy_qp(end[i]->q[0].qp);
        end[i]->q[0].qp = NULL;
    }
    hrd_mr_free(v, &r->from_gpu);
    hrd_mr_free(v, &r->to_gpu);
    hrd_mr_free(v, &r->to_host);
    for (int i = 0; i < 2; i++)
        if (end[i])
            hrd_verbs_conn_free(end[i]);
    if (r->t->stuck)
        return; /* a copy may still come to it */
    if (r->event)
        drv->EventDestroy(r->event);
    if (r->stream)
        drv->StreamDestroy(r->stream);
    if (r->host)
        drv->MemFreeHost(r->host);
}

/* A queue pair that failed in one direction is no use for the other. */
static void one_direction(struct hrd_gdr_trial *t, void (*try)(struct rig *), char *why, size_t len)
{
    struct rig r = {.t = t};
    if (t->stuck)
        snprintf(why, len, "a copy of the driver is stuck");
    else if (host_memory(&r, why, len) == 0 && connection(&r, why, len) == 0)
        try(&r);
    take_apart(&r);
}

void hrd_gdr_trial(struct hrd_gdr_trial *t)
{
    one_direction(t, try_receive, t->why_receive, sizeof(t->why_receive));
    one_direction(t, try_send, t->why_send, sizeof(t->why_send));
}
