/* SPDX-License-Identifier: MIT */
/* What a communicator can be asked, and what it cannot do yet. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/comm.h"
#include "client/futex.h"
#include "client/gpu.h"

static hclient_result_t get_number(hclient_comm_t handle, const char *call, size_t field, int *out)
{
    struct hcl_comm *comm;
    hclient_result_t r = hcl_comm_enter(handle, call, &comm);
    if (r != HCLIENT_OK)
        return r;
    if (out == NULL)
        r = hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: the place for the answer is NULL", call);
    else
        *out = (int)*(const uint32_t *)((const char *)comm + field);
    hcl_handle_put(handle);
    return r;
}

hclient_result_t hclient_comm_count(hclient_comm_t comm, int *nranks)
{
    HCL_ENTER();
    return get_number(comm, "hclient_comm_count", offsetof(struct hcl_comm, nranks), nranks);
}

hclient_result_t hclient_comm_user_rank(hclient_comm_t comm, int *rank)
{
    HCL_ENTER();
    return get_number(comm, "hclient_comm_user_rank", offsetof(struct hcl_comm, rank), rank);
}

hclient_result_t hclient_comm_get_info(hclient_comm_t handle, hclient_comm_info_t *info)
{
    HCL_ENTER();
    struct hcl_comm *comm;
    hclient_result_t r = hcl_comm_enter(handle, "hclient_comm_get_info", &comm);
    if (r != HCLIENT_OK)
        return r;
    if (info == NULL || info->size < offsetof(hclient_comm_info_t, nnodes)) {
        r = hcl_fail(
            HCLIENT_INVALID_ARGUMENT,
            "hclient_comm_get_info: info is %p, its size %zu; start with HCLIENT_COMM_INFO_INITIALIZER",
            (void *)info, info != NULL ? info->size : 0);
    } else {
        hclient_comm_info_t i = {.size = info->size,
                                 .nranks = (int)comm->nranks,
                                 .rank = (int)comm->rank,
                                 .nnodes = (int)comm->nnodes,
                                 .node = (int)comm->node,
                                 .local_size = (int)comm->nlocal,
                                 .local_rank = comm->local_rank,
                                 .op_timeout_ms = comm->op_timeout_ms};
        for (size_t b = 0; b < sizeof(comm->id); b++)
            snprintf(i.id + 2 * b, 3, "%02x", comm->id[b]);
        memcpy(i.daemon_version, comm->ctx->version, sizeof(i.daemon_version));
        memcpy(info, &i, info->size < sizeof(i) ? info->size : sizeof(i));
    }
    hcl_handle_put(handle);
    return r;
}

hclient_result_t hclient_comm_get_async_error(hclient_comm_t handle, hclient_result_t *error)
{
    HCL_ENTER();
    struct hcl_comm *comm;
    hclient_result_t r = hcl_comm_enter(handle, "hclient_comm_get_async_error", &comm);
    if (r != HCLIENT_OK)
        return r;
    char text[HRP_COMM_TEXT + 1];
    if (error == NULL)
        r = hcl_fail(HCLIENT_INVALID_ARGUMENT, "hclient_comm_get_async_error: error is NULL");
    else
        *error = (hclient_result_t)hcl_comm_state(comm, text, sizeof(text));
    hcl_handle_put(handle);
    return r;
}

hclient_result_t hclient_comm_path(hclient_comm_t handle, char **json)
{
    HCL_ENTER();
    struct hcl_comm *comm;
    hclient_result_t r = hcl_comm_enter(handle, "hclient_comm_path", &comm);
    if (r != HCLIENT_OK)
        return r;
    struct hrp_msg msg = {.type = HRP_MSG_PATH};
    msg.body.slot.slot = comm->slot;
    struct hcl_reply reply = HCL_REPLY_NULL;
    if (json == NULL)
        r = hcl_fail(HCLIENT_INVALID_ARGUMENT, "hclient_comm_path: json is NULL");
    else
        r = hcl_request(comm->ctx, &msg, NULL, 0, HRP_MSG_TEXT, HCL_REPLY_NS, &reply);
    if (r == HCLIENT_OK) {
        *json = hcl_gpu_report(comm, reply.text); /* the caller's */
        reply.text = NULL;
    }
    hcl_reply_deinit(&reply);
    hcl_handle_put(handle);
    return r;
}

void hclient_free(void *p)
{
    free(p);
}

hclient_result_t hclient_comm_split(hclient_comm_t comm, int color, int key, hclient_comm_t *newcomm,
                                    const hclient_comm_config_t *config)
{
    HCL_ENTER();
    (void)comm, (void)color, (void)key, (void)newcomm, (void)config;
    return hcl_fail(
        HCLIENT_UNSUPPORTED,
        "hclient_comm_split is not built yet; make each part with hclient_get_unique_id on one of "
        "its ranks and hclient_comm_init_rank");
}

hclient_result_t hclient_red_op_create_pre_mul_sum(hclient_red_op_t *op, const void *scalar,
                                                   hclient_data_type_t dtype, hclient_comm_t comm)
{
    HCL_ENTER();
    (void)op, (void)scalar, (void)dtype, (void)comm;
    return hcl_fail(HCLIENT_UNSUPPORTED,
                    "a sum with a factor is not built yet; scale the input, or use HCLIENT_AVG");
}

hclient_result_t hclient_red_op_destroy(hclient_red_op_t op, hclient_comm_t comm)
{
    HCL_ENTER();
    (void)comm;
    return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                    "hclient_red_op_destroy: %d is not a reduction that was created", (int)op);
}
