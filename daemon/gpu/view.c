/* SPDX-License-Identifier: MIT */
/*
 * What an import is called by the kernels of other GPUs. Peer access covers what this process allocated, not what it opened
 * by an IPC handle: each context whose kernels touch that opens the handle too, and may get another address. A mapping of
 * cuMemMap has one address for all that cuMemSetAccess named.
 *
 * Views are opened when their import is, or when the other GPU comes up, before anybody is told of the import or the pair;
 * they are closed before the import, or before the other GPU goes down. Always under the pair lock: with it held no GPU
 * goes down, so that one GPU's thread may use the context of another.
 */
#include <stdio.h>

#include "daemon/gpu/gpu_int.h"
#include "daemon/log.h"

/* Why kernels of `at` lack some import of `owner`: that of the first, so that it is the same as long as nothing changes. */
static void look_again(struct gpu *owner, struct gpu *at)
{
    const char *why = NULL;
    for (const struct hrd_gpu_import *i = owner->imports; i && !why; i = i->next)
        why = i->view[at->dev.gpu].why;
    atomic_store_explicit(&owner->pair[at->dev.gpu].unreached, why, memory_order_release);
}

static void set_view(struct hrd_gpu_import *i, struct gpu *at, struct gpu_view view)
{
    struct hrd_gpus *gpus = at->gpus;
    pthread_mutex_lock(&gpus->lock);
    i->view[at->dev.gpu] = view;
    look_again(i->g, at);
    atomic_fetch_add_explicit(&gpus->views_epoch, 1, memory_order_release);
    pthread_mutex_unlock(&gpus->lock);
}

/* On the thread of `self`, whose context is current before and after. */
static void open_view(struct hrd_gpu_import *i, struct gpu *at, const struct gpu *self)
{
    struct gpu_view view = {.ptr = i->ptr};
    char phrase[200] = "", why[300];
    if (i->source.msg.kind == HRP_GPU_LEGACY) {
        (void)at->dev.drv->CtxSetCurrent(at->dev.ctx);
        if (hrd_gpu_map_again(at, i, &view.ptr, phrase, sizeof(phrase)) != 0)
            view.ptr = 0;
        (void)at->dev.drv->CtxSetCurrent(self->dev.ctx);
    } else if (i->alone) {
        snprintf(phrase, sizeof(phrase), "%s", i->alone);
        view.ptr = 0;
    }
    if (!view.ptr) {
        snprintf(why, sizeof(why), "kernels of GPU %s cannot be given memory of GPU %s: %s", at->dev.id,
                 i->g->dev.id, phrase);
        view.why = hrd_gpus_keep(at->gpus, why);
        if (!atomic_load(&i->g->pair[at->dev.gpu].unreached)) /* else it was said */
            hrd_notice("%s; operations over both use the copy engines", why);
    }
    set_view(i, at, view);
}

static void close_view(struct hrd_gpu_import *i, struct gpu *at, const struct gpu *self)
{
    hrg_ptr ptr = i->view[at->dev.gpu].ptr;
    set_view(i, at, (struct gpu_view){0});
    if (!ptr || i->source.msg.kind != HRP_GPU_LEGACY)
        return;
    (void)at->dev.drv->CtxSetCurrent(at->dev.ctx);
    hrd_gpu_unmap(at, &i->source, ptr);
    (void)at->dev.drv->CtxSetCurrent(self->dev.ctx);
}

void hrd_gpu_import_link(struct hrd_gpu_import *i)
{
    struct gpu *g = i->g;
    struct hrd_gpus *gpus = g->gpus;
    pthread_mutex_lock(&gpus->pair_lock);
    pthread_mutex_lock(&gpus->lock);
    i->next = g->imports;
    g->imports = i;
    g->nimports++;
    g->import_bytes += i->source.msg.bytes;
    pthread_mutex_unlock(&gpus->lock);
    for (unsigned k = 0; k < gpus->n; k++)
        if (gpus->gpu[k] != g && atomic_load(&g->pair[k].direct))
            open_view(i, gpus->gpu[k], g);
    pthread_mutex_unlock(&gpus->pair_lock);
}

void hrd_gpu_import_unlink(struct hrd_gpu_import *i)
{
    struct gpu *g = i->g;
    struct hrd_gpus *gpus = g->gpus;
    pthread_mutex_lock(&gpus->pair_lock);
    for (unsigned k = 0; k < gpus->n; k++)
        if (gpus->gpu[k] != g && atomic_load(&g->pair[k].direct))
            close_view(i, gpus->gpu[k], g);
    pthread_mutex_lock(&gpus->lock);
    struct hrd_gpu_import **at = &g->imports;
    while (*at != i)
        at = &(*at)->next;
    *at = i->next;
    g->nimports--;
    g->import_bytes -= i->source.msg.bytes;
    pthread_mutex_unlock(&gpus->lock);
    pthread_mutex_unlock(&gpus->pair_lock);
}

void hrd_gpu_views_take(struct gpu *g, struct gpu *owner)
{
    for (struct hrd_gpu_import *i = owner->imports; i; i = i->next)
        open_view(i, g, g);
}

void hrd_gpu_views_drop(struct gpu *g, struct gpu *owner)
{
    for (struct hrd_gpu_import *i = owner->imports; i; i = i->next)
        close_view(i, g, g);
}

bool hrd_gpus_reach(const struct hrd_gpus *gpus, int16_t owner, int16_t at, const char **why)
{
    *why = atomic_load_explicit(&gpus->gpu[owner]->pair[at].unreached, memory_order_acquire);
    return *why == NULL;
}

uint64_t hrd_gpus_views_epoch(const struct hrd_gpus *gpus)
{
    return atomic_load_explicit(&gpus->views_epoch, memory_order_acquire);
}

uint64_t hrd_gpus_view(const struct hrd_gpus *gpus, int16_t owner, int16_t at, uint64_t addr)
{
    struct hrd_gpus *m = (struct hrd_gpus *)(uintptr_t)gpus;
    uint64_t found = 0;
    pthread_mutex_lock(&m->lock);
    for (const struct hrd_gpu_import *i = gpus->gpu[owner]->imports; i && !found; i = i->next)
        if (addr >= i->ptr && addr - i->ptr < i->source.msg.bytes && i->view[at].ptr)
            found = i->view[at].ptr + (addr - i->ptr);
    /* What this process allocated has one address for all who have access. */
    const struct hrd_tp_memory *own = &gpus->gpu[owner]->gdr.is.memory;
    uint64_t base = (uintptr_t)own->base;
    if (!found && own->base && addr >= base && addr - base < own->bytes &&
        atomic_load_explicit(&gpus->gpu[owner]->pair[at].direct, memory_order_acquire))
        found = addr;
    pthread_mutex_unlock(&m->lock);
    return found;
}
