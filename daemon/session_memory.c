/* SPDX-License-Identifier: MIT */
/*
 * What a session has mapped: segment, staging windows, buffers. The kernel clears pages when they are reserved,
 * which takes long for large ones, so memory is made (and large memory given back) on libuv's worker threads.
 */
#include "daemon/session_priv.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/config_table.h"
#include "daemon/guard.h"
#include "daemon/version.h"

/* Unmapping the last reference to more than this is worth a worker thread. */
#define RELEASE_INLINE ((size_t)16 << 20)

enum job_kind { JOB_SEGMENT, JOB_WINDOW, JOB_ALLOC };

struct job {
    uv_work_t work;
    struct hrd_session_priv *p;
    enum job_kind kind;
    uint64_t cookie;
    uint32_t slot, generation; /* JOB_WINDOW */
    uint32_t ncomms;           /* JOB_SEGMENT */
    uint64_t bytes;
    struct hrd_memory mem;
    int fd; /* result: the memfd, or negative errno */
    char err[512];
};

/* ---- charging and giving back ----------------------------------------------------------------------------- */

int hrd_session_charge(struct hrd_session_priv *p, struct hrd_charge *c, uint64_t cookie, uint64_t bytes,
                       uint32_t sessions)
{
    struct hrd_daemon *d = p->d;
    struct hrd_quotas *q = &d->sessions->quotas;
    struct hrd_quota_limits limits = {.bytes = d->cfg.max_memory_per_user,
                                      .sessions = d->cfg.max_sessions_per_user,
                                      .charges = d->cfg.max_buffers_per_user};
    char held[32], more[32], limit[32], text[400];
    int rc = hrd_charge_take(c, q, p->pub.uid, bytes, sessions, &limits);
    if (rc == 0)
        return 0;
    if (rc < 0)
        snprintf(text, sizeof(text), "the daemon is out of memory");
    else if (sessions > 0 && hrd_quota_sessions(q, p->pub.uid) >= limits.sessions)
        snprintf(text, sizeof(text),
                 "user %u has %u processes connected; max_sessions_per_user in hreduced.conf allows %u",
                 (unsigned)p->pub.uid, hrd_quota_sessions(q, p->pub.uid), limits.sessions);
    else if (hrd_quota_charges(q, p->pub.uid) >= limits.charges)
        snprintf(
            text, sizeof(text),
            "user %u has %u pieces of shared memory (buffers, windows, sessions); max_buffers_per_user in "
            "hreduced.conf allows %u: free some, or make fewer and larger ones",
            (unsigned)p->pub.uid, hrd_quota_charges(q, p->pub.uid), limits.charges);
    else
        snprintf(
            text, sizeof(text),
            "user %u holds %s of shared memory and asks for %s more; max_memory_per_user in hreduced.conf "
            "allows %s",
            (unsigned)p->pub.uid, hrd_size_text(hrd_quota_bytes(q, p->pub.uid), held, sizeof(held)),
            hrd_size_text(bytes, more, sizeof(more)), hrd_size_text(limits.bytes, limit, sizeof(limit)));
    if (p->state == HRD_S_HELLO)
        hrd_client_refuse(p, cookie, HRP_RESOURCE, "%s", text);
    else
        hrd_session_error(&p->pub, cookie, HRP_RESOURCE, HRP_SCOPE_NONE, "%s", text);
    return -1;
}

struct release {
    uv_work_t work;
    struct hrd_daemon *d;
    struct hrd_memory mem;
    uint64_t sid, cookie;
};

static void release_on_worker(uv_work_t *work)
{
    struct release *r = work->data;
    munmap(r->mem.base, r->mem.len);
}

static void release_done(uv_work_t *work, int status)
{
    struct release *r = work->data;
    (void)status;
    hrd_charge_drop(&r->mem.charge);
    r->d->sessions->releasing--;
    struct hrd_session_priv *p = r->cookie ? hrd_session_lookup(r->d, r->sid) : NULL;
    if (p)
        hrd_session_done(&p->pub, r->cookie);
    free(r);
}

/* Unmaps; the charge goes when the memory is really gone, and only then is the request of that cookie (0: none) answered: who
   asks for more on the answer must find it free. */
static void give_back(struct hrd_session_priv *p, struct hrd_memory *mem, uint64_t cookie)
{
    struct hrd_sessions *ss = p->d->sessions;
    if (!mem->base)
        return;
    hrd_guard_remove(mem->base);
    ss->memory_bytes -= mem->len;
    struct release *r = mem->len > RELEASE_INLINE ? calloc(1, sizeof(*r)) : NULL;
    if (r) {
        r->work.data = r;
        r->d = p->d;
        r->mem = *mem;
        r->sid = p->pub.sid;
        r->cookie = cookie;
        ss->releasing++;
        if (uv_queue_work(p->d->loop, &r->work, release_on_worker, release_done) == 0) {
            *mem = (struct hrd_memory){0};
            return;
        }
        ss->releasing--;
        free(r);
    }
    munmap(mem->base, mem->len);
    hrd_charge_drop(&mem->charge);
    *mem = (struct hrd_memory){0};
    if (cookie)
        hrd_session_done(&p->pub, cookie);
}

/* The mapping becomes the session's: registered with the guard and counted. */
static int adopt(struct hrd_session_priv *p, struct hrd_memory *mem)
{
    int rc = hrd_guard_add(mem->base, mem->len, &p->poisoned);
    if (rc == 0)
        p->d->sessions->memory_bytes += mem->len;
    return rc;
}

static void discard(struct hrd_memory *mem)
{
    if (mem->base)
        munmap(mem->base, mem->len);
    hrd_charge_drop(&mem->charge);
    *mem = (struct hrd_memory){0};
}

/* ---- jobs ------------------------------------------------------------------------------------------------- */

static void make_on_worker(uv_work_t *work)
{
    static const char *const name[] = {"hreduce-segment", "hreduce-window", "hreduce-buffer"};
    struct job *j = work->data;
    j->fd = hrd_memfd_make(name[j->kind], j->bytes, &j->mem.base, &j->mem.len, j->err, sizeof(j->err));
}

static void segment_made(struct hrd_session_priv *p, struct job *j);
static void window_made(struct hrd_session_priv *p, struct job *j);
static void alloc_made(struct hrd_session_priv *p, struct job *j);

static void make_done(uv_work_t *work, int status)
{
    struct job *j = work->data;
    struct hrd_session_priv *p = j->p;
    p->jobs--;
    if (status != 0 && j->fd == 0) {
        j->fd = status;
        snprintf(j->err, sizeof(j->err), "shared memory could not be made: %s", uv_strerror(status));
    }
    if (j->kind == JOB_WINDOW && j->slot < p->nslots && p->slots[j->slot].generation == j->generation)
        p->slots[j->slot].window_pending = false;
    if (p->state < HRD_S_ENDING) {
        if (j->fd < 0 && p->state == HRD_S_HELLO)
            hrd_client_refuse(p, j->cookie, HRP_RESOURCE, "%s", j->err);
        else if (j->fd < 0)
            hrd_session_error(&p->pub, j->cookie, HRP_RESOURCE, HRP_SCOPE_NONE, "%s", j->err);
        else if (j->kind == JOB_SEGMENT)
            segment_made(p, j);
        else if (j->kind == JOB_WINDOW)
            window_made(p, j);
        else
            alloc_made(p, j);
    }
    /* What the session took over is no longer in the job. */
    discard(&j->mem);
    if (j->fd >= 0)
        close(j->fd);
    free(j);
    hrd_session_try_free(p);
}

bool hrd_session_may_start_job(struct hrd_session_priv *p, uint64_t cookie)
{
    if (p->jobs < HRP_MEMORY_JOBS)
        return true;
    hrd_session_error(&p->pub, cookie, HRP_RESOURCE, HRP_SCOPE_NONE,
                      "%u requests for memory of this process are being served; wait for their replies",
                      p->jobs);
    return false;
}

static struct job *start_job(struct hrd_session_priv *p, enum job_kind kind, uint64_t cookie, uint64_t bytes)
{
    uint32_t sessions = kind == JOB_SEGMENT;
    if (!hrd_session_may_start_job(p, cookie))
        return NULL;
    struct job *j = calloc(1, sizeof(*j));
    if (!j) {
        hrd_session_kill(&p->pub, "the daemon is out of memory");
        return NULL;
    }
    if (hrd_session_charge(p, &j->mem.charge, cookie, bytes, sessions) != 0) {
        free(j);
        return NULL;
    }
    *j = (struct job){.p = p, .kind = kind, .cookie = cookie, .bytes = bytes, .mem.charge = j->mem.charge};
    j->work.data = j;
    p->jobs++;
    int rc = uv_queue_work(p->d->loop, &j->work, make_on_worker, make_done);
    if (rc != 0) {
        p->jobs--;
        discard(&j->mem);
        free(j);
        hrd_session_kill(&p->pub, "the daemon could not start a worker thread");
        return NULL;
    }
    return j;
}

/* ---- segment ---------------------------------------------------------------------------------------------- */

void hrd_session_make_segment(struct hrd_session_priv *p, uint64_t cookie)
{
    uint32_t ncomms = p->d->cfg.max_comms;
    struct job *j = start_job(p, JOB_SEGMENT, cookie, hrp_seg_size(ncomms));
    if (!j)
        return;
    j->ncomms = ncomms;
    p->counted = true;
    p->d->sessions->counted++;
}

static void segment_made(struct hrd_session_priv *p, struct job *j)
{
    p->doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (p->doorbell < 0) {
        hrd_client_refuse(p, j->cookie, HRP_RESOURCE,
                          "the daemon has no free descriptor for this process: %s; raise LimitNOFILE= of "
                          "hreduced.service",
                          strerror(errno));
        return;
    }
    p->slots = calloc(j->ncomms, sizeof(*p->slots));
    if (!p->slots || adopt(p, &j->mem) != 0) {
        hrd_client_refuse(p, j->cookie, HRP_RESOURCE, "the daemon is out of memory");
        return;
    }
    p->nslots = j->ncomms;
    p->segment = j->mem;
    j->mem = (struct hrd_memory){0};
    hrp_seg_init(p->segment.base, p->nslots);
    hrd_agent_session_add(p->d->agent, p->pub.sid, p->segment.base, p->doorbell, &p->poisoned);
    p->in_agent = true;
    hrd_session_welcome(p, j->cookie, j->fd);
}

void hrd_session_welcome(struct hrd_session_priv *p, uint64_t cookie, int segment_fd)
{
    struct hrd_daemon *d = p->d;
    int own = d->sessions->own_pidfd;
    /* hreducectl gets the pidfd three times: the number of descriptors belongs to the message. */
    int fds[3] = {p->ctl ? own : segment_fd, own, p->ctl ? own : p->doorbell};
    struct hrp_msg msg = {.type = HRP_MSG_WELCOME, .cookie = cookie};
    struct hrp_msg_welcome *w = &msg.body.welcome;
    w->abi = HRP_ABI;
    w->ncomms = p->nslots;
    w->segment_bytes = p->segment.len;
    w->window_bytes = p->window_bytes = d->cfg.window_bytes;
    w->port = d->cfg.port;
    snprintf(w->version, sizeof(w->version), "%s", HRD_VERSION);
    p->state = HRD_S_OPEN;
    p->opened = true;
    hrd_log(p->ctl ? HRD_LOG_DEBUG : HRD_LOG_INFO, "session %llu: process %d (%s) of uid %u",
            (unsigned long long)p->pub.sid, (int)p->pub.pid, p->command, (unsigned)p->pub.uid);
    hrd_session_send(&p->pub, &msg, fds, 3);
}

struct hrp_seg_header *hrd_session_segment(struct hrd_session *s)
{
    return s->priv->segment.base;
}

int hrd_session_slot_take(struct hrd_session *s)
{
    struct hrd_session_priv *p = s->priv;
    for (uint32_t i = 0; i < p->nslots; i++) {
        if (!p->slots[i].taken) {
            p->slots[i].taken = true;
            memset(hrp_seg_comm(p->segment.base, i), 0, sizeof(struct hrp_comm_area));
            return (int)i;
        }
    }
    return -1;
}

void hrd_session_slot_free(struct hrd_session *s, uint32_t slot)
{
    struct hrd_session_priv *p = s->priv;
    if (slot >= p->nslots || !p->slots[slot].taken)
        return;
    give_back(p, &p->slots[slot].window, 0);
    p->slots[slot] = (struct hrd_slot){.generation = p->slots[slot].generation + 1};
}

/* ---- windows ---------------------------------------------------------------------------------------------- */

void hrd_session_window(struct hrd_session_priv *p, uint64_t cookie, uint32_t slot)
{
    struct hrd_slot *s = &p->slots[slot];
    if (s->window.base || s->window_pending) {
        hrd_session_error(&p->pub, cookie, HRP_INVALID_ARGUMENT, HRP_SCOPE_NONE,
                          "communicator slot %u has its staging window already", slot);
        return;
    }
    struct job *j = start_job(p, JOB_WINDOW, cookie, p->window_bytes);
    if (!j)
        return;
    j->slot = slot;
    j->generation = s->generation;
    s->window_pending = true;
}

static void reply_memory(struct hrd_session_priv *p, struct job *j, uint32_t id, size_t len)
{
    struct hrp_msg msg = {.type = HRP_MSG_MEMORY, .cookie = j->cookie};
    msg.body.memory.bytes = len;
    msg.body.memory.id = id;
    hrd_session_send(&p->pub, &msg, &j->fd, 1);
}

static void window_made(struct hrd_session_priv *p, struct job *j)
{
    struct hrd_slot *s = &p->slots[j->slot];
    if (!s->taken || s->generation != j->generation) {
        hrd_session_error(&p->pub, j->cookie, HRP_INVALID_ARGUMENT, HRP_SCOPE_NONE,
                          "communicator slot %u was left before its staging window was made", j->slot);
        return;
    }
    if (adopt(p, &j->mem) != 0) {
        hrd_session_error(&p->pub, j->cookie, HRP_RESOURCE, HRP_SCOPE_NONE, "the daemon is out of memory");
        return;
    }
    s->window = j->mem;
    j->mem = (struct hrd_memory){0};
    hrd_agent_window_add(p->d->agent, p->pub.sid, j->slot, s->window.base, s->window.len);
    reply_memory(p, j, j->slot, s->window.len);
}

/* ---- buffers ---------------------------------------------------------------------------------------------- */

static struct hrd_buffer **find_buffer(struct hrd_session_priv *p, uint32_t id)
{
    struct hrd_buffer **at = &p->buffers[id % HRD_BUFFER_BUCKETS];
    while (*at && (*at)->id != id)
        at = &(*at)->next;
    return at;
}

void hrd_session_keep_buffer(struct hrd_session_priv *p, struct hrd_buffer *b)
{
    do
        b->id = ++p->next_buffer_id;
    while (b->id == 0 || *find_buffer(p, b->id));
    struct hrd_buffer **bucket = &p->buffers[b->id % HRD_BUFFER_BUCKETS];
    b->next = *bucket;
    *bucket = b;
    p->nbuffers++;
}

/* Takes over mem; 0: refused, and the client was told. */
static uint32_t add_buffer(struct hrd_session_priv *p, uint64_t cookie, struct hrd_memory *mem)
{
    struct hrd_buffer *b = calloc(1, sizeof(*b));
    if (!b || adopt(p, mem) != 0) {
        hrd_session_error(
            &p->pub, cookie, HRP_RESOURCE, HRP_SCOPE_NONE,
            "the daemon is out of memory for one more than the %u shared buffers of this process",
            p->nbuffers);
        free(b);
        return 0;
    }
    b->mem = *mem;
    *mem = (struct hrd_memory){0};
    hrd_session_keep_buffer(p, b);
    hrd_agent_buffer_add(p->d->agent, p->pub.sid, b->id, b->mem.base, b->mem.len);
    return b->id;
}

void hrd_session_alloc(struct hrd_session_priv *p, uint64_t cookie, uint64_t bytes)
{
    start_job(p, JOB_ALLOC, cookie, bytes);
}

static void alloc_made(struct hrd_session_priv *p, struct job *j)
{
    size_t len = j->mem.len;
    uint32_t id = add_buffer(p, j->cookie, &j->mem);
    if (id != 0)
        reply_memory(p, j, id, len);
}

void hrd_session_import(struct hrd_session_priv *p, uint64_t cookie, const struct hrp_msg_import *m, int fd)
{
    struct hrd_memory mem = {0};
    char err[400];
    /* Charged as well: holes of the client's memfd are filled on the daemon's account. */
    if (hrd_session_charge(p, &mem.charge, cookie, m->bytes, 0) != 0) {
        close(fd);
        return;
    }
    int rc = hrd_memfd_import(fd, m->offset, m->bytes, &mem.base, err, sizeof(err));
    close(fd);
    if (rc != 0) {
        hrd_charge_drop(&mem.charge);
        hrd_session_error(&p->pub, cookie, rc == -ENOMEM ? HRP_RESOURCE : HRP_INVALID_ARGUMENT,
                          HRP_SCOPE_NONE, "%s", err);
        return;
    }
    mem.len = (size_t)m->bytes;
    uint32_t id = add_buffer(p, cookie, &mem);
    if (id == 0) {
        discard(&mem);
        return;
    }
    struct hrp_msg msg = {.type = HRP_MSG_REGISTERED, .cookie = cookie};
    msg.body.buffer.id = id;
    hrd_session_send(&p->pub, &msg, NULL, 0);
}

void hrd_session_free_buffer(struct hrd_session_priv *p, uint64_t cookie, uint32_t id)
{
    struct hrd_buffer *b = *find_buffer(p, id);
    if (!b || b->dropping) {
        hrd_session_error(&p->pub, cookie, HRP_INVALID_ARGUMENT, HRP_SCOPE_NONE,
                          "this process has no shared buffer %u", id);
        return;
    }
    b->dropping = true;
    b->drop_cookie = cookie;
    hrd_agent_buffer_drop(p->d->agent, p->pub.sid, id);
}

void hrd_session_buffer_gone(struct hrd_session_priv *p, uint32_t id)
{
    struct hrd_buffer **at = find_buffer(p, id);
    struct hrd_buffer *b = *at;
    if (!b || !b->dropping)
        return;
    *at = b->next;
    p->nbuffers--;
    if (b->import) {
        hrd_session_gpu_release(p, b);
        return;
    }
    give_back(p, &b->mem, b->drop_cookie);
    free(b);
}

void hrd_session_unmap_all(struct hrd_session_priv *p)
{
    for (unsigned i = 0; i < HRD_BUFFER_BUCKETS; i++) {
        while (p->buffers[i]) {
            struct hrd_buffer *b = p->buffers[i];
            p->buffers[i] = b->next;
            give_back(p, &b->mem, 0);
            free(b);
        }
    }
    for (uint32_t i = 0; i < p->nslots; i++)
        give_back(p, &p->slots[i].window, 0);
    free(p->slots);
    p->slots = NULL;
    p->nslots = 0;
    give_back(p, &p->segment, 0);
}
