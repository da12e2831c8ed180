/* SPDX-License-Identifier: MIT */
/*
 * A daemon for the tests of the library: one process, which speaks the protocol and does ops of communicators
 * whose other ranks it makes up. Elements are i32, u8 or f32 of small whole numbers.
 *
 *   reductions      every other rank sends what this one sends: the result is nranks * x
 *   broadcast       from another root: element i is made_up(root, i)
 *   all_gather      element i of another rank's segment s is made_up(s, i)
 *
 * It works through the stream of a staged op chunk by chunk in the order that proto/shm.h defines, written
 * down here a second time. Special counts of an all_reduce ask for faults (FAKE_*).
 */
#ifndef CLIENT_FAKE_H
#define CLIENT_FAKE_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <linux/futex.h>

#include "proto/fdpass.h"
#include "proto/ring.h"
#include "proto/status.h"
#include "proto/wire.h"

#define FAKE_NCOMMS 8
#define FAKE_NMEM 64
#define FAKE_MISMATCH 666     /* this op fails, the comm goes on */
#define FAKE_NEVER 667        /* this op is never done */
#define FAKE_COMM_FAILS 668   /* the comm fails with this op */
#define FAKE_LIES 669         /* the completion is malformed */
#define FAKE_FAILS_LATE 70001 /* f32: one chunk is done, then the op fails */

struct fake_config {
    size_t window_bytes;
    bool frozen;  /* no heartbeat, no answers after WELCOME */
    bool mute;    /* no answers after WELCOME */
    bool dismiss; /* PATH ends the session, with a reason */
    bool garbage; /* the answer to PATH makes no sense */
    bool silent;  /* connections are taken and nothing is said */
    uint32_t abi; /* 0: the right one */
    bool slow;    /* sleeps between chunks */
};

struct fake_op {
    bool used;
    struct hrp_desc desc;
    uint64_t chunk;    /* done */
    uint64_t row, off; /* cursor in the stream: row of slices, segment, element in the slice */
    uint32_t seg;
};

struct fake_comm {
    bool joined;
    uint32_t nranks, rank;
    uint64_t head;
    char *window;
    struct fake_op op[HRP_OP_SLOTS];
};

struct fake_session {
    int sock;
    struct hrp_seg_header *seg;
    int doorbell;
    unsigned lost_rings; /* times it slept for a second although there was work */
    struct fake_comm comm[FAKE_NCOMMS];
    struct {
        char *p;
        size_t bytes;
    } mem[FAKE_NMEM];
};

/* The daemon's process has one thread; a race detector would only make its element loops slow. */
#define FAKE_LOOP __attribute__((no_sanitize("thread")))

FAKE_LOOP static int32_t made_up(uint32_t rank, uint64_t i)
{
    return (int32_t)((rank * 31u + (uint32_t)i * 7u) % 101u);
}

/* ------------------------------------------------------------------------------------------ arithmetic */

FAKE_LOOP static double fake_get(const char *p, unsigned dtype)
{
    int32_t i;
    float f;
    switch (dtype) {
    case HRP_I32:
        memcpy(&i, p, 4);
        return i;
    case HRP_F32:
        memcpy(&f, p, 4);
        return (double)f;
    default:
        return (unsigned char)*p;
    }
}

FAKE_LOOP static void fake_put(char *p, unsigned dtype, double v)
{
    int32_t i = (int32_t)v;
    float f = (float)v;
    switch (dtype) {
    case HRP_I32:
        memcpy(p, &i, 4);
        break;
    case HRP_F32:
        memcpy(p, &f, 4);
        break;
    default:
        *p = (char)(unsigned char)i;
    }
}

/* Element `off` of segment `seg`: in may be NULL where this rank sends nothing, out where it receives nothing. */
FAKE_LOOP static void fake_element(const struct fake_comm *c, const struct hrp_sig *sig, uint32_t seg,
                                   uint64_t off, const char *in, char *out)
{
    if (out == NULL)
        return;
    double v;
    switch (sig->coll) {
    case HRP_BROADCAST:
        v = sig->root == c->rank ? fake_get(in, sig->dtype) : made_up(sig->root, off);
        break;
    case HRP_ALL_GATHER:
        v = seg == c->rank ? fake_get(in, sig->dtype) : made_up(seg, off);
        break;
    default:
        v = fake_get(in, sig->dtype) * c->nranks;
    }
    fake_put(out, sig->dtype, v);
}

/* ------------------------------------------------------------------------------------------------ ops */

static void fake_done(struct hrp_comm_area *area, uint64_t op, uint64_t chunks)
{
    struct hrp_op_flags *f = &area->flags[op % HRP_OP_SLOTS];
    atomic_store(&f->done, hrp_flag(op, chunks));
    if (atomic_load(&f->waiting))
        syscall(SYS_futex, &f->done, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void fake_complete(struct hrp_comm_area *area, uint64_t op, uint32_t status, const char *text)
{
    struct hrp_completion *c = &area->completion[op % HRP_OP_SLOTS];
    c->op = op;
    c->status = status;
    c->scope = status == HRP_OK ? HRP_SCOPE_NONE : HRP_SCOPE_OP;
    c->text_len = (uint32_t)strlen(text);
    memcpy(c->text, text, c->text_len);
    fake_done(area, op, HRP_CHUNK_ALL);
}

static void fake_fail_comm(struct fake_comm *c, struct hrp_comm_area *area, uint32_t status, const char *text)
{
    area->status = status;
    area->scope = HRP_SCOPE_COMM;
    area->text_len = (uint32_t)strlen(text);
    memcpy(area->text, text, area->text_len);
    atomic_store(&area->state, HRP_COMM_FAILED);
    for (unsigned i = 0; i < HRP_OP_SLOTS; i++)
        if (c->op[i].used) {
            c->op[i].used = false;
            fake_complete(area, c->op[i].desc.op, status, text);
        }
}

FAKE_LOOP static void fake_shared_op(struct fake_session *s, struct fake_comm *c, const struct hrp_desc *d)
{
    const char *in = d->in.kind == HRP_BUF_SHARED ? s->mem[d->in.id].p + d->in.offset : NULL;
    char *out = d->out.kind == HRP_BUF_SHARED ? s->mem[d->out.id].p + d->out.offset : NULL;
    uint64_t es = hrp_dtype_size(d->sig.dtype), seg_bytes = d->sig.count * es;
    for (uint32_t seg = 0; seg < hrp_sig_segments(&d->sig, c->nranks); seg++)
        for (uint64_t i = 0; i < d->sig.count; i++) {
            const char *src = in == NULL ? NULL : in + i * es;
            char *dst = out == NULL ? NULL : out + i * es;
            if (d->sig.coll == HRP_REDUCE_SCATTER) {
                src += seg * seg_bytes;
                dst = seg == c->rank ? dst : NULL;
            }
            if (d->sig.coll == HRP_ALL_GATHER) {
                src = seg == c->rank ? src : NULL;
                dst += seg * seg_bytes;
            }
            fake_element(c, &d->sig, seg, i, src, dst);
        }
}

/* One chunk of the stream, at the op's cursor. */
FAKE_LOOP static void fake_chunk(struct fake_session *s, struct fake_comm *c, struct fake_op *op,
                                 size_t window_bytes)
{
    const struct hrp_desc *d = &op->desc;
    uint64_t es = hrp_dtype_size(d->sig.dtype), bytes = hrp_sig_bytes(&d->sig, c->nranks);
    uint64_t slice = hrp_stage_slice(&d->sig, c->nranks);
    uint32_t nseg = hrp_sig_segments(&d->sig, c->nranks);
    uint64_t end = (op->chunk + 1) * HRP_STAGE_CHUNK < bytes ? (op->chunk + 1) * HRP_STAGE_CHUNK : bytes;
    (void)s;
    for (uint64_t pos = op->chunk * HRP_STAGE_CHUNK; pos < end; pos += es) {
        char *p = c->window + (d->out.offset + pos) % window_bytes;
        uint64_t off = op->row * slice + op->off;
        bool mine = d->sig.coll != HRP_REDUCE_SCATTER || op->seg == c->rank;
        fake_element(c, &d->sig, op->seg, off, p, mine ? p : NULL);
        /* To the next element of the stream. */
        op->off++;
        if (op->off == slice || op->row * slice + op->off == d->sig.count) {
            op->off = 0;
            if (++op->seg == nseg) {
                op->seg = 0;
                op->row++;
            }
        }
    }
    op->chunk++;
}

static bool fake_special(struct fake_comm *c, struct hrp_comm_area *area, struct fake_op *op)
{
    const struct hrp_desc *d = &op->desc;
    if (d->sig.coll != HRP_ALL_REDUCE)
        return false;
    switch (d->sig.count) {
    case FAKE_NEVER:
        return true;
    case FAKE_MISMATCH:
        op->used = false;
        fake_complete(area, d->op, HRP_MISMATCH, "rank 0 has 666 elements, rank 1 has 665");
        return true;
    case FAKE_COMM_FAILS:
        fake_fail_comm(c, area, HRP_RANK_LOST, "rank 1 (pid 77 on node 0) ended");
        return true;
    case FAKE_LIES:
        op->used = false;
        fake_complete(area, d->op, 4711, "");
        return true;
    default:
        return false;
    }
}

/* One step of the oldest op; whether something moved. */
static bool fake_step(struct fake_session *s, struct fake_comm *c, struct hrp_comm_area *area,
                      const struct fake_config *config, uint64_t op_number)
{
    struct fake_op *op = &c->op[op_number % HRP_OP_SLOTS];
    if (!op->used || op->desc.op != op_number || fake_special(c, area, op))
        return false;
    const struct hrp_desc *d = &op->desc;
    uint64_t ready = atomic_load(&area->flags[op_number % HRP_OP_SLOTS].ready);
    if (d->out.kind != HRP_BUF_WINDOW && d->in.kind != HRP_BUF_WINDOW) {
        if (ready < hrp_flag(d->op, HRP_CHUNK_ALL))
            return false;
        fake_shared_op(s, c, d);
        op->used = false;
        fake_complete(area, d->op, HRP_OK, "");
        return true;
    }
    uint64_t nchunks = (hrp_sig_bytes(&d->sig, c->nranks) + HRP_STAGE_CHUNK - 1) / HRP_STAGE_CHUNK;
    if (op->chunk == 1 && d->sig.count == FAKE_FAILS_LATE) {
        usleep(200000); /* the library takes the chunk that is done */
        op->used = false;
        fake_complete(area, d->op, HRP_TIMEOUT, "rank 1 was late");
        return true;
    }
    if (ready < hrp_flag(d->op, op->chunk + 1))
        return false;
    if (config->slow)
        usleep(2000);
    fake_chunk(s, c, op, config->window_bytes);
    if (op->chunk < nchunks) {
        fake_done(area, d->op, op->chunk);
    } else {
        op->used = false;
        fake_complete(area, d->op, HRP_OK, "");
    }
    return true;
}

/* The agent's duty: takes descriptors, works in order of posting. Whether something moved. */
static bool fake_agent(struct fake_session *s, const struct fake_config *config)
{
    bool moved = false;
    for (uint32_t i = 0; s->seg != NULL && i < FAKE_NCOMMS; i++) {
        struct fake_comm *c = &s->comm[i];
        struct hrp_comm_area *area = hrp_seg_comm(s->seg, i);
        struct hrp_desc d;
        while (c->joined && hrp_ring_pop(area, &c->head, &d) == 1) {
            c->op[d.op % HRP_OP_SLOTS] = (struct fake_op){.used = true, .desc = d};
            moved = true;
        }
        for (uint64_t k = c->head < HRP_OP_SLOTS ? 1 : c->head - HRP_OP_SLOTS + 1; k <= c->head; k++)
            if (c->op[k % HRP_OP_SLOTS].used) {
                bool stuck = !fake_step(s, c, area, config, k);
                moved = moved || !stuck;
                if (c->op[k % HRP_OP_SLOTS].used && c->op[k % HRP_OP_SLOTS].desc.out.kind == HRP_BUF_WINDOW)
                    break;
            }
    }
    return moved;
}

/* --------------------------------------------------------------------------------------------- messages */

static int fake_memfd(size_t bytes)
{
    int fd = memfd_create("fake", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        abort();
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    return fd;
}

static void *fake_map(int fd, size_t bytes, off_t offset)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
    if (p == MAP_FAILED)
        abort();
    return p;
}

static void fake_send(struct fake_session *s, struct hrp_msg *m, const int *fds, int nfds)
{
    char buf[8192];
    long len = hrp_msg_encode(m, buf, sizeof(buf));
    if (len < 0)
        abort();
    hrp_send_fds(s->sock, buf, (size_t)len, fds, nfds);
}

static void fake_error(struct fake_session *s, uint64_t cookie, uint32_t status, const char *text)
{
    struct hrp_msg m = {.type = HRP_MSG_ERROR, .cookie = cookie, .text = text, .text_len = strlen(text)};
    m.body.error.status = status;
    fake_send(s, &m, NULL, 0);
}

static void fake_welcome(struct fake_session *s, const struct hrp_msg *req, const struct fake_config *config)
{
    size_t bytes = hrp_seg_size(FAKE_NCOMMS);
    int seg = fake_memfd(bytes);
    s->seg = fake_map(seg, bytes, 0);
    hrp_seg_init(s->seg, FAKE_NCOMMS);
    atomic_store(&s->seg->agent_asleep, 0);
    s->doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int fds[3] = {seg, (int)syscall(SYS_pidfd_open, getpid(), 0), s->doorbell};
    struct hrp_msg m = {.type = HRP_MSG_WELCOME, .cookie = req->cookie};
    m.body.welcome.abi = config->abi != 0 ? config->abi : HRP_ABI;
    m.body.welcome.ncomms = FAKE_NCOMMS;
    m.body.welcome.segment_bytes = bytes;
    m.body.welcome.window_bytes = config->window_bytes;
    snprintf(m.body.welcome.version, sizeof(m.body.welcome.version), "0.0.fake");
    fake_send(s, &m, fds, 3);
    close(fds[0]);
    close(fds[1]);
}

static void fake_join(struct fake_session *s, const struct hrp_msg *req)
{
    const struct hrp_msg_join *j = &req->body.join;
    if (j->key.kind == HRP_KEY_NAME && strcmp(j->key.name, "hang") == 0)
        return;
    if (j->key.kind == HRP_KEY_NAME && strcmp(j->key.name, "refuse") == 0) {
        fake_error(s, req->cookie, HRP_REFUSED, "rank 0 is here already (pid 5)");
        return;
    }
    uint32_t slot = 0;
    while (slot < FAKE_NCOMMS && s->comm[slot].joined)
        slot++;
    if (slot == FAKE_NCOMMS) {
        fake_error(s, req->cookie, HRP_RESOURCE, "no slot is free");
        return;
    }
    struct hrp_comm_area *area = hrp_seg_comm(s->seg, slot);
    memset((void *)area, 0, sizeof(*area));
    atomic_store(&area->state, HRP_COMM_ACTIVE);
    s->comm[slot] = (struct fake_comm){.joined = true, .nranks = j->key.nranks, .rank = j->rank};
    struct hrp_msg m = {.type = HRP_MSG_JOINED, .cookie = req->cookie};
    /* What the test wants to see of the request comes back in the id. */
    m.body.joined = (struct hrp_msg_joined){.slot = slot,
                                            .nranks = j->key.nranks,
                                            .nnodes = 1,
                                            .nlocal = j->key.nranks,
                                            .op_timeout_ms = j->config.op_timeout_ms};
    memcpy(m.body.joined.comm_id, &j->key.nth, 4);
    memcpy(m.body.joined.comm_id + 4, &j->root[0].port, 2);
    memcpy(m.body.joined.comm_id + 8, &j->key.attempt, 8);
    fake_send(s, &m, NULL, 0);
}

static void fake_memory(struct fake_session *s, const struct hrp_msg *req, const struct fake_config *config)
{
    size_t bytes = config->window_bytes;
    uint32_t id = req->body.slot.slot;
    if (req->type == HRP_MSG_ALLOC) {
        bytes = (req->body.alloc.bytes + HRP_PAGE - 1) / HRP_PAGE * HRP_PAGE;
        for (id = 0; id < FAKE_NMEM && s->mem[id].p != NULL;)
            id++;
        if (id == FAKE_NMEM || bytes > ((size_t)1 << 32)) {
            fake_error(s, req->cookie, HRP_RESOURCE, "the memory quota of 4 GiB is used up");
            return;
        }
    }
    int fd = fake_memfd(bytes);
    char *p = fake_map(fd, bytes, 0);
    if (req->type == HRP_MSG_ALLOC) {
        s->mem[id].p = p;
        s->mem[id].bytes = bytes;
    } else {
        s->comm[id].window = p;
    }
    struct hrp_msg m = {.type = HRP_MSG_MEMORY, .cookie = req->cookie};
    m.body.memory.bytes = bytes;
    m.body.memory.id = id;
    fake_send(s, &m, &fd, 1);
    close(fd);
}

static void fake_import(struct fake_session *s, const struct hrp_msg *req, int fd)
{
    uint32_t id = 0;
    while (s->mem[id].p != NULL)
        id++;
    s->mem[id].p = fake_map(fd, req->body.import.bytes, (off_t)req->body.import.offset);
    s->mem[id].bytes = req->body.import.bytes;
    struct hrp_msg m = {.type = HRP_MSG_REGISTERED, .cookie = req->cookie};
    m.body.buffer.id = id;
    fake_send(s, &m, NULL, 0);
}

static void fake_path(struct fake_session *s, const struct hrp_msg *req, const struct fake_config *config)
{
    if (config->dismiss) {
        fake_error(s, 0, HRP_RESOURCE, "the session ends: a buffer was truncated");
        shutdown(s->sock, SHUT_RDWR);
        return;
    }
    if (config->garbage) {
        hrp_send_fds(s->sock, "nonsense", 8, NULL, 0);
        return;
    }
    struct hrp_msg m = {.type = HRP_MSG_TEXT, .cookie = req->cookie, .text = "{\"lost\":", .text_len = 8};
    m.body.text.more = 1;
    fake_send(s, &m, NULL, 0);
    m.body.text.more = 0;
    char text[16];
    m.text_len = (size_t)snprintf(text, sizeof(text), "%u}", s->lost_rings);
    m.text = text;
    fake_send(s, &m, NULL, 0);
}

static void fake_message(struct fake_session *s, const struct hrp_msg *req, int fd,
                         const struct fake_config *config)
{
    struct hrp_msg done = {.type = HRP_MSG_DONE, .cookie = req->cookie};
    struct hrp_msg id = {.type = HRP_MSG_ID, .cookie = req->cookie};
    if ((config->frozen || config->mute) && req->type != HRP_MSG_HELLO)
        return;
    switch (req->type) {
    case HRP_MSG_HELLO:
        fake_welcome(s, req, config);
        break;
    case HRP_MSG_GET_ID:
        id.body.id.id = (struct hrp_unique_id){.magic = HRP_ID_MAGIC, .version = HRP_ID_VERSION, .naddrs = 1};
        id.body.id.id.addr[0] = (struct hrp_addr){.family = 4, .port = 1234, .ip = {127, 0, 0, 1}};
        fake_send(s, &id, NULL, 0);
        break;
    case HRP_MSG_JOIN:
        fake_join(s, req);
        break;
    case HRP_MSG_ABORT:
        fake_send(s, &done, NULL, 0);
        fake_fail_comm(&s->comm[req->body.slot.slot], hrp_seg_comm(s->seg, req->body.slot.slot), HRP_ABORTED,
                       "rank 0 called hclient_comm_abort");
        break;
    case HRP_MSG_LEAVE:
        if (s->comm[req->body.slot.slot].window != NULL)
            munmap(s->comm[req->body.slot.slot].window, config->window_bytes);
        s->comm[req->body.slot.slot].joined = false;
        fake_send(s, &done, NULL, 0);
        break;
    case HRP_MSG_WINDOW:
    case HRP_MSG_ALLOC:
        fake_memory(s, req, config);
        break;
    case HRP_MSG_IMPORT:
        fake_import(s, req, fd);
        break;
    case HRP_MSG_FREE:
        munmap(s->mem[req->body.buffer.id].p, s->mem[req->body.buffer.id].bytes);
        s->mem[req->body.buffer.id].p = NULL;
        fake_send(s, &done, NULL, 0);
        break;
    case HRP_MSG_PATH:
        fake_path(s, req, config);
        break;
    default:
        abort();
    }
}

/* False: the client hung up. */
static bool fake_receive(struct fake_session *s, const struct fake_config *config)
{
    static char buf[HRP_MSG_MAX];
    int fds[HRP_MAX_FDS] = {-1}, nfds = 0;
    long len = hrp_recv_fds(s->sock, buf, sizeof(buf), fds, HRP_MAX_FDS, &nfds);
    if (len == -EAGAIN)
        return true;
    struct hrp_msg m;
    if (len <= 0)
        return false;
    if (hrp_msg_decode(&m, buf, (size_t)len) != 0 || hrp_msg_nfds(m.type) != nfds)
        abort();
    if (!config->silent)
        fake_message(s, &m, fds[0], config);
    for (int i = 0; i < nfds; i++)
        close(fds[i]);
    return true;
}

/* --------------------------------------------------------------------------------------------- process */

static uint64_t fake_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Sleeps as the agent does, and counts the doorbells that did not ring; the path report gives the number. */
static void fake_sleep(struct fake_session *s, int listener, const struct fake_config *config)
{
    uint64_t count;
    if (s->seg != NULL) {
        atomic_store(&s->seg->agent_asleep, 1);
        atomic_load(&s->seg->submits);
        if (fake_agent(s, config)) {
            atomic_store(&s->seg->agent_asleep, 0);
            return;
        }
    }
    struct pollfd pfd[3] = {{.fd = listener, .events = POLLIN},
                            {.fd = s->sock, .events = POLLIN},
                            {.fd = s->seg != NULL ? s->doorbell : -1, .events = POLLIN}};
    if (poll(pfd, 3, 1000) == 0 && fake_agent(s, config))
        s->lost_rings++;
    if (pfd[2].revents && read(s->doorbell, &count, sizeof(count)) < 0)
        return;
    if (s->seg != NULL)
        atomic_store(&s->seg->agent_asleep, 0);
}

static void fake_run(int listener, const struct fake_config *config)
{
    static struct fake_session s;
    s.sock = -1;
    for (;;) {
        fake_sleep(&s, s.sock < 0 ? listener : -1, config);
        if (s.sock < 0) {
            s.sock = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
            continue;
        }
        if (s.seg != NULL && !config->frozen)
            atomic_store(&s.seg->heartbeat_ns, fake_now());
        if (!fake_receive(&s, config)) {
            close(s.sock);
            if (s.seg != NULL)
                close(s.doorbell);
            memset(&s, 0, sizeof(s));
            s.sock = -1;
        }
        for (int i = 0; i < 64 && fake_agent(&s, config); i++)
            ;
    }
}

/* A second, longer under sanitizers. */
static inline uint64_t fake_second(void)
{
    const char *scale = getenv("HREDUCE_TIME_SCALE");
    return UINT64_C(1000000000) * (scale != NULL ? strtoull(scale, NULL, 10) : 1);
}

struct fake {
    pid_t pid;
    char path[108];
};

/* Starts one and points HREDUCE_SOCKET at it. One client at a time. */
static struct fake fake_start(const struct fake_config *config)
{
    static unsigned nth;
    struct fake f;
    snprintf(f.path, sizeof(f.path), "/tmp/hclient-test-%d-%u.sock", (int)getpid(), nth++);
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    memcpy(addr.sun_path, f.path, sizeof(addr.sun_path));
    unlink(f.path);
    if (bind(listener, (struct sockaddr *)&addr, sizeof(addr)) != 0 || listen(listener, 8) != 0)
        abort();
    f.pid = fork();
    if (f.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        fake_run(listener, config);
    }
    close(listener);
    setenv("HREDUCE_SOCKET", f.path, 1);
    return f;
}

static void fake_stop(struct fake *f)
{
    kill(f->pid, SIGKILL);
    waitpid(f->pid, NULL, 0);
    unlink(f->path);
}

#endif
