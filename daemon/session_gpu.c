/* SPDX-License-Identifier: MIT */
/*
 * GPU memory of a session: registered by IMPORT_GPU, opened and closed by the GPU's thread, which answers by events. A
 * request under way counts as one of the session's jobs, so that nothing of the session goes before it is answered.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/gpu/gpu.h"
#include "daemon/session_priv.h"

/* ---- registering -------------------------------------------------------------------------------------------- */

static void drop_parts(struct hrd_gpu_parts *parts)
{
    for (uint32_t i = 0; i < parts->got; i++)
        close(parts->fd[i]);
    free(parts->fd);
    free(parts->part_bytes);
    *parts = (struct hrd_gpu_parts){0};
}

static void start_import(struct hrd_session_priv *p, uint64_t cookie, const struct hrd_gpu_source *source)
{
    p->jobs++;
    hrd_gpus_import(p->d->gpus, p->pub.sid, cookie, source);
}

void hrd_session_import_gpu(struct hrd_session_priv *p, uint64_t cookie, const struct hrp_msg_import_gpu *m)
{
    struct hrd_gpu_parts *parts = &p->gpu_parts;
    if (parts->msg.nparts) {
        hrd_client_fault(p, "process %d sent IMPORT_GPU before all parts of the one before", (int)p->pub.pid);
        return;
    }
    if (!p->d->gpus) {
        hrd_session_error(&p->pub, cookie, HRP_UNSUPPORTED, HRP_SCOPE_NONE,
                          "the daemon on %s maps no GPU memory", p->d->node_name);
        return;
    }
    if (!hrd_session_may_start_job(p, cookie))
        return;
    if (m->kind == HRP_GPU_LEGACY) {
        struct hrd_gpu_source source = {.uid = p->pub.uid, .msg = *m};
        start_import(p, cookie, &source);
        return;
    }
    parts->fd = calloc(m->nparts, sizeof(*parts->fd));
    parts->part_bytes = calloc(m->nparts, sizeof(*parts->part_bytes));
    if (!parts->fd || !parts->part_bytes) {
        drop_parts(parts);
        hrd_session_error(&p->pub, cookie, HRP_RESOURCE, HRP_SCOPE_NONE, "the daemon is out of memory");
        return;
    }
    parts->cookie = cookie;
    parts->msg = *m;
}

void hrd_session_gpu_part(struct hrd_session_priv *p, uint64_t cookie, const struct hrp_msg_gpu_part *m,
                          int fd)
{
    struct hrd_gpu_parts *parts = &p->gpu_parts;
    if (parts->msg.nparts == 0 || cookie != parts->cookie) {
        close(fd);
        if (parts->msg.nparts) /* otherwise of an import that was refused at once */
            hrd_client_fault(p, "process %d sent a GPU_PART of another IMPORT_GPU", (int)p->pub.pid);
        return;
    }
    if (m->offset != parts->bytes || m->bytes > parts->msg.bytes - parts->bytes) {
        close(fd);
        hrd_client_fault(p, "process %d sent parts of GPU memory that do not make one range",
                         (int)p->pub.pid);
        return;
    }
    parts->fd[parts->got] = fd;
    parts->part_bytes[parts->got++] = m->bytes;
    parts->bytes += m->bytes;
    if (parts->got < parts->msg.nparts)
        return;
    if (parts->bytes != parts->msg.bytes) {
        hrd_client_fault(p, "process %d sent too little of the GPU memory that it announced",
                         (int)p->pub.pid);
        return;
    }
    struct hrd_gpu_source source = {
        .uid = p->pub.uid, .msg = parts->msg, .fd = parts->fd, .part_bytes = parts->part_bytes};
    *parts = (struct hrd_gpu_parts){0};
    start_import(p, cookie, &source);
}

static void close_import(struct hrd_session_priv *p, uint64_t cookie, struct hrd_gpu_import *import)
{
    p->jobs++;
    hrd_gpus_close(p->d->gpus, p->pub.sid, cookie, import);
}

static void imported(struct hrd_session_priv *p, const struct hrd_gpu_event *ev)
{
    struct hrd_charge charge = {0};
    if (!ev->import) {
        hrd_session_error(&p->pub, ev->token, HRP_UNSUPPORTED, HRP_SCOPE_NONE, "%s", ev->text);
        return;
    }
    /* The GPU's memory is the job's; what counts here is one more thing to keep. */
    struct hrd_buffer *b = NULL;
    if (p->state == HRD_S_OPEN && hrd_session_charge(p, &charge, ev->token, 0, 0) == 0) {
        b = calloc(1, sizeof(*b));
        if (!b) {
            hrd_charge_drop(&charge);
            hrd_session_error(&p->pub, ev->token, HRP_RESOURCE, HRP_SCOPE_NONE,
                              "the daemon is out of memory");
        }
    }
    if (!b) {
        close_import(p, 0, ev->import);
        return;
    }
    b->mem.charge = charge;
    b->import = ev->import;
    hrd_session_keep_buffer(p, b);
    hrd_agent_gpu_buffer_add(p->d->agent, p->pub.sid, b->id, ev->gpu, ev->device, ev->bytes);
    struct hrp_msg msg = {.type = HRP_MSG_REGISTERED, .cookie = ev->token};
    msg.body.buffer.id = b->id;
    hrd_session_send(&p->pub, &msg, NULL, 0);
}

/* ---- giving back -------------------------------------------------------------------------------------------- */

static void release(struct hrd_session_priv *p, struct hrd_buffer *b, uint64_t cookie)
{
    hrd_charge_drop(&b->mem.charge);
    close_import(p, cookie, b->import);
    free(b);
}

void hrd_session_gpu_release(struct hrd_session_priv *p, struct hrd_buffer *b)
{
    release(p, b, b->drop_cookie);
}

void hrd_session_gpu_release_all(struct hrd_session_priv *p)
{
    drop_parts(&p->gpu_parts);
    for (unsigned i = 0; i < HRD_BUFFER_BUCKETS; i++)
        for (struct hrd_buffer **at = &p->buffers[i]; *at;) {
            struct hrd_buffer *b = *at;
            if (!b->import) {
                at = &b->next;
                continue;
            }
            *at = b->next;
            p->nbuffers--;
            release(p, b, 0);
        }
}

void hrd_session_gpu_event(struct hrd_daemon *d, const struct hrd_gpu_event *ev)
{
    struct hrd_session_priv *p = hrd_session_lookup(d, ev->sid); /* its job keeps it */
    if (!p)
        return;
    p->jobs--;
    if (ev->type == HRD_GPU_IMPORTED)
        imported(p, ev);
    else if (ev->token)
        hrd_session_done(&p->pub, ev->token);
    hrd_session_try_free(p);
}
