/* SPDX-License-Identifier: MIT */
#include "client/gpu.h"

#include <stdio.h>

enum where { NOWHERE, HOST, GPU };

hclient_result_t hcl_gpu_fail(const struct hrg_driver *drv, const char *call, const char *what,
                              hrg_result error)
{
    char text[160];
    return hcl_fail(error == HRG_ERROR_OUT_OF_MEMORY ? HCLIENT_RESOURCE : HCLIENT_SYSTEM, "%s: %s failed: %s",
                    call, what, hrg_error_text(drv, error, text, sizeof(text)));
}

/* Managed memory counts as GPU memory: only its stream knows when its contents are there. Pinned host memory does not. */
static enum where where_is(const struct hrg_driver *drv, const void *p, uint64_t bytes)
{
    unsigned type = 0, managed = 0;
    if (bytes == 0)
        return NOWHERE;
    hrg_ptr ptr = (hrg_ptr)(uintptr_t)p;
    if (drv->PointerGetAttribute(&type, HRG_PTR_MEMORY_TYPE, ptr) != HRG_SUCCESS)
        return HOST;
    if (type == HRG_MEMORY_DEVICE || type == HRG_MEMORY_ARRAY || type == HRG_MEMORY_UNIFIED)
        return GPU;
    return drv->PointerGetAttribute(&managed, HRG_PTR_IS_MANAGED, ptr) == HRG_SUCCESS && managed ? GPU : HOST;
}

bool hcl_gpu_wants(const struct hrg_driver *drv, const struct hcl_call *c, hclient_result_t *result)
{
    enum where send = where_is(drv, c->send, c->send_bytes);
    bool same = c->send == c->recv && c->send_bytes > 0 && c->recv_bytes > 0;
    enum where recv = same ? send : where_is(drv, c->recv, c->recv_bytes);
    *result = HCLIENT_OK;
    if (send == GPU && recv == HOST)
        *result =
            hcl_fail(HCLIENT_UNSUPPORTED,
                     "%s: send %p is GPU memory and recv %p is host memory; use one kind of memory on a rank",
                     c->name, (const void *)c->send, (void *)c->recv);
    else if (send == HOST && recv == GPU)
        *result =
            hcl_fail(HCLIENT_UNSUPPORTED,
                     "%s: send %p is host memory and recv %p is GPU memory; use one kind of memory on a rank",
                     c->name, (const void *)c->send, (void *)c->recv);
    else if (c->stream != NULL && (send == HOST || recv == HOST))
        *result = hcl_fail(HCLIENT_INVALID_ARGUMENT,
                           "%s: stream is %p, but %s %p is host memory; stream must be NULL for host buffers",
                           c->name, c->stream, send == HOST ? "send" : "recv",
                           send == HOST ? (const void *)c->send : (const void *)c->recv);
    return *result != HCLIENT_OK || send == GPU || recv == GPU || c->stream != NULL;
}

/* ---- the scope ----------------------------------------------------------------------------------------------------- */

static bool is_default(hrg_stream stream)
{
    return stream == NULL || stream == HRG_STREAM_LEGACY || stream == HRG_STREAM_PER_THREAD;
}

static hclient_result_t refuse_capture(const struct hrg_driver *drv, const char *call, hrg_stream stream)
{
    int status = HRG_CAPTURE_NONE;
    hrg_result r = drv->StreamIsCapturing(stream, &status);
    if (r == HRG_SUCCESS && status == HRG_CAPTURE_NONE)
        return HCLIENT_OK;
    if (r == HRG_SUCCESS || r == HRG_ERROR_STREAM_CAPTURE_IMPLICIT)
        return hcl_fail(
            HCLIENT_UNSUPPORTED,
            "%s: stream %p is %s a graph; collectives cannot be captured, call this outside of the capture "
            "(which goes on)",
            call, (void *)stream,
            r == HRG_SUCCESS ? "capturing" : "the legacy default stream while another stream captures");
    return hcl_gpu_fail(drv, call, "asking the stream about capture (is it a stream of this process?)", r);
}

/* The context in which default streams are meant: the current one, when it is of the buffer's device. */
static hclient_result_t find_context(const struct hrg_driver *drv, const char *call, hrg_ptr near,
                                     hrg_ctx *ctx, hrg_device *retained)
{
    hrg_ctx current = NULL;
    hrg_device current_dev = -1, dev = -1;
    if (drv->CtxGetCurrent(&current) == HRG_SUCCESS && current != NULL)
        drv->CtxGetDevice(&current_dev);
    *ctx = NULL;
    if (near == 0 || drv->PointerGetAttribute(&dev, HRG_PTR_DEVICE_ORDINAL, near) != HRG_SUCCESS || dev < 0)
        dev = current_dev;
    if (dev == current_dev && current != NULL) {
        *ctx = current;
        return HCLIENT_OK;
    }
    if (near != 0 && drv->PointerGetAttribute(ctx, HRG_PTR_CONTEXT, near) == HRG_SUCCESS && *ctx != NULL)
        return HCLIENT_OK;
    unsigned flags;
    int active = 0;
    if (dev >= 0 && drv->DevicePrimaryCtxGetState(dev, &flags, &active) == HRG_SUCCESS && active &&
        drv->DevicePrimaryCtxRetain(ctx, dev) == HRG_SUCCESS) {
        *retained = dev;
        return HCLIENT_OK;
    }
    return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                    "%s: no CUDA context is current in this thread; call cudaSetDevice() or give a stream",
                    call);
}

static hclient_result_t enter_context(const char *call, hrg_stream stream, hrg_ptr near,
                                      struct hcl_gpu_scope *scope)
{
    const struct hrg_driver *drv = scope->drv;
    hrg_ctx ctx = NULL;
    if (is_default(stream)) {
        hclient_result_t found = find_context(drv, call, near, &ctx, &scope->retained);
        if (found != HCLIENT_OK)
            return found;
    } else {
        hrg_result r = drv->StreamGetCtx(stream, &ctx);
        if (r != HRG_SUCCESS)
            return hcl_gpu_fail(drv, call, "asking the stream for its context", r);
    }
    hrg_result r = drv->CtxPushCurrent(ctx);
    if (r != HRG_SUCCESS)
        return hcl_gpu_fail(drv, call, "making the stream's context current", r);
    scope->pushed = true;
    return HCLIENT_OK;
}

hclient_result_t hcl_gpu_enter(const struct hrg_driver *drv, const char *call, hrg_stream stream,
                               hrg_ptr near, struct hcl_gpu_scope *scope)
{
    *scope = (struct hcl_gpu_scope){.drv = drv, .retained = -1, .mode = HRG_CAPTURE_MODE_RELAXED};
    hclient_result_t r = HCLIENT_OK;
    if (!is_default(stream)) /* default streams are of a context, which must be current first */
        r = refuse_capture(drv, call, stream);
    if (r == HCLIENT_OK)
        r = enter_context(call, stream, near, scope);
    if (r == HCLIENT_OK && is_default(stream))
        r = refuse_capture(drv, call, stream);
    if (r != HCLIENT_OK) {
        hcl_gpu_leave(scope);
        return r;
    }
    scope->relaxed = drv->ThreadExchangeStreamCaptureMode(&scope->mode) == HRG_SUCCESS;
    return HCLIENT_OK;
}

void hcl_gpu_leave(struct hcl_gpu_scope *scope)
{
    if (scope->relaxed)
        scope->drv->ThreadExchangeStreamCaptureMode(&scope->mode);
    hrg_ctx popped;
    if (scope->pushed)
        scope->drv->CtxPopCurrent(&popped);
    if (scope->retained >= 0)
        scope->drv->DevicePrimaryCtxRelease(scope->retained);
    scope->relaxed = scope->pushed = false;
    scope->retained = -1;
}
