/* SPDX-License-Identifier: MIT */
/* Groups: descriptors are pushed as always, the doorbells of a thread's group are rung once at its end. */
#include "client/context.h"

#define GROUP_CONTEXTS 8

static _Thread_local unsigned depth;
static _Thread_local struct hcl_context *waiting[GROUP_CONTEXTS]; /* with a reference each */
static _Thread_local unsigned nwaiting;

bool hcl_group_defer(struct hcl_context *ctx)
{
    if (depth == 0)
        return false;
    for (unsigned i = 0; i < nwaiting; i++)
        if (waiting[i] == ctx)
            return true;
    if (nwaiting == GROUP_CONTEXTS)
        return false;
    hcl_context_ref(ctx);
    atomic_fetch_add(&ctx->deferred, 1);
    waiting[nwaiting++] = ctx;
    return true;
}

void hcl_group_flush(void)
{
    while (nwaiting > 0) {
        struct hcl_context *ctx = waiting[--nwaiting];
        atomic_fetch_sub(&ctx->deferred, 1);
        hcl_doorbell_now(ctx);
        hcl_context_put(ctx);
    }
}

hclient_result_t hclient_group_start(void)
{
    HCL_ENTER();
    depth++;
    return HCLIENT_OK;
}

hclient_result_t hclient_group_end(void)
{
    HCL_ENTER();
    if (depth == 0)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                        "hclient_group_end without hclient_group_start on this thread");
    if (--depth == 0)
        hcl_group_flush();
    return HCLIENT_OK;
}
