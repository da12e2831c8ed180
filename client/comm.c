/* SPDX-License-Identifier: MIT */
/* Joining, leaving and the state of a communicator. */
#include "client/comm.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/bootstrap.h"
#include "client/futex.h"
#include "client/gpu.h"
#include "proto/status.h"

/* When the caller leaves the setup timeout to the daemon, that decides; this only bounds the wait. */
#define JOIN_NS (3600 * HCL_SEC)
#define JOIN_MARGIN_NS (30 * HCL_SEC)
#define ABORT_SEND_NS (300 * HCL_MS)
#define ABORT_ALL_NS (900 * HCL_MS)
/* How long destroying waits for CUDA streams. When the session was lost they are released HCL_LET_GO_NS later, and by nobody
   else than the thread that destroys; the rest is for a loss that shows only while it waits. */
#define STREAMS_NS (HCL_LET_GO_NS + 4 * HCL_SEC)

hclient_result_t hcl_comm_enter(hclient_comm_t handle, const char *call, struct hcl_comm **comm)
{
    *comm = hcl_handle_get(handle);
    hcl_about(handle);
    if (*comm != NULL)
        return HCLIENT_OK;
    return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: %p is not a communicator%s", call, (void *)handle,
                    handle == NULL ? "" : " (any more: was it destroyed?)");
}

/* ----------------------------------------------------------------------------------------------- state */

static uint32_t area_failure(struct hcl_comm *comm, char *text, size_t size)
{
    struct hrp_comm_area *area = comm->area;
    if (atomic_load_explicit(&area->state, memory_order_acquire) != HRP_COMM_FAILED)
        return 0;
    const volatile uint32_t *status = &area->status, *text_len = &area->text_len;
    uint32_t s = *status, len = *text_len;
    if (s < HRP_INVALID_ARGUMENT || s >= HRP_NSTATUS)
        s = HRP_PROTOCOL;
    if (len > HRP_COMM_TEXT)
        len = HRP_COMM_TEXT;
    if (len >= size)
        len = (uint32_t)size - 1;
    memcpy(text, area->text, len);
    text[len] = 0;
    return s;
}

uint32_t hcl_comm_state(struct hcl_comm *comm, char *text, size_t size)
{
    uint32_t status = atomic_load_explicit(&comm->verdict, memory_order_acquire);
    if (status != 0) {
        snprintf(text, size, "%s", comm->verdict_text);
        return status;
    }
    status = hcl_context_lost(comm->ctx);
    if (status != 0) {
        snprintf(text, size, "%s", comm->ctx->lost_text);
        return status;
    }
    if (atomic_load(&comm->aborted)) {
        snprintf(text, size,
                 "the communicator was aborted: rank %u (this one, of %u) called hclient_comm_abort",
                 comm->rank, comm->nranks);
        return HRP_ABORTED;
    }
    return area_failure(comm, text, size);
}

bool hcl_comm_last_error(hclient_comm_t handle, char *buf, size_t size)
{
    struct hcl_comm *comm = hcl_handle_get(handle);
    if (comm == NULL) {
        snprintf(buf, size, "%p is not a communicator", (void *)handle);
        return true;
    }
    bool failed = hcl_comm_state(comm, buf, size) != 0;
    if (!failed) {
        pthread_mutex_lock(&comm->lock);
        if (comm->nfailures > 0)
            snprintf(buf, size, "%s", comm->failures[(comm->nfailures - 1) % HCL_FAILURES].text);
        pthread_mutex_unlock(&comm->lock);
    }
    hcl_handle_put(handle);
    return failed;
}

void hcl_comm_wake(struct hcl_comm *comm)
{
    for (unsigned i = 0; i < HRP_OP_SLOTS; i++)
        hcl_futex_wake(hcl_low_word(&comm->area->flags[i].done));
    atomic_fetch_add(&comm->stage.turns, 1);
    hcl_futex_wake(&comm->stage.turns);
}

bool hcl_comm_pending(struct hcl_comm *comm)
{
    bool pending = false;
    pthread_mutex_lock(&comm->lock);
    for (unsigned i = 0; i < HRP_OP_SLOTS && !pending; i++)
        pending = comm->ops[i].number != 0 && !comm->ops[i].complete;
    pthread_mutex_unlock(&comm->lock);
    return pending;
}

void hcl_comm_report(struct hcl_comm *comm)
{
    char text[HRP_COMM_TEXT + 1];
    if (area_failure(comm, text, sizeof(text)) != 0 && !atomic_exchange(&comm->reported, true))
        hcl_log(HCLIENT_LOG_INFO, "a communicator of %u ranks failed: %s", comm->nranks, text);
}

/* Under lock: keeps the failure of an op. */
static void keep_failure(struct hcl_comm *comm, uint64_t number, hclient_result_t result, const char *text)
{
    if (comm->first_failure == 0)
        comm->first_failure = number;
    if (comm->failures == NULL)
        comm->failures = calloc(HCL_FAILURES, sizeof(*comm->failures));
    if (comm->failures == NULL)
        return; /* the result stays in the op's slot, without its sentence */
    struct hcl_failure *f = &comm->failures[comm->nfailures++ % HCL_FAILURES];
    if (f->number > comm->forgotten)
        comm->forgotten = f->number;
    f->number = number;
    f->result = result;
    snprintf(f->text, sizeof(f->text), "%s", text != NULL && text[0] != 0 ? text : hclient_strerror(result));
}

void hcl_op_complete(struct hcl_comm *comm, uint64_t number, hclient_result_t result, const char *text)
{
    struct hcl_op *op = &comm->ops[number % HRP_OP_SLOTS];
    pthread_mutex_lock(&comm->lock);
    if (op->number == number && !op->complete) {
        op->complete = true;
        op->result = result;
        if (result != HCLIENT_OK)
            keep_failure(comm, number, result, text);
    }
    pthread_mutex_unlock(&comm->lock);
}

/* What the daemon has finished counts as finished, whatever comes after; of a stream, when that has its output as well. */
static void harvest(struct hcl_comm *comm)
{
    for (unsigned i = 0; i < HRP_OP_SLOTS; i++) {
        struct hcl_outcome outcome;
        uint64_t chunks;
        pthread_mutex_lock(&comm->lock);
        const struct hcl_op *op = &comm->ops[i];
        bool busy = op->staged || (op->gpu && !hcl_gpu_passed(comm, op->number));
        uint64_t number = op->complete || busy ? 0 : op->number;
        pthread_mutex_unlock(&comm->lock);
        if (number != 0 && hcl_op_over(comm, number, &chunks, &outcome))
            hcl_op_complete(comm, number, outcome.result, outcome.text);
    }
}

void hcl_comm_end(struct hcl_comm *comm, uint32_t status, const char *text)
{
    if (atomic_load_explicit(&comm->verdict, memory_order_acquire) == 0) {
        harvest(comm);
        if (atomic_load(&comm->stage.live) > 0)
            hcl_stage_progress(comm);
    }
    pthread_mutex_lock(&comm->lock);
    if (atomic_load_explicit(&comm->verdict, memory_order_relaxed) == 0) {
        snprintf(comm->verdict_text, sizeof(comm->verdict_text), "%s", text);
        atomic_store_explicit(&comm->verdict, status, memory_order_release);
    }
    pthread_mutex_unlock(&comm->lock);
    status = atomic_load_explicit(&comm->verdict, memory_order_acquire);
    hcl_stage_end(comm);
    for (unsigned i = 0; i < HRP_OP_SLOTS; i++) {
        pthread_mutex_lock(&comm->lock);
        uint64_t number = comm->ops[i].complete ? 0 : comm->ops[i].number;
        pthread_mutex_unlock(&comm->lock);
        if (number != 0)
            hcl_op_complete(comm, number, (hclient_result_t)status, comm->verdict_text);
    }
    hcl_comm_wake(comm);
}

void hcl_comm_give_up(struct hcl_comm *comm, hclient_result_t result, const char *why)
{
    char text[HRP_OP_TEXT];
    struct hrp_msg msg = {.type = HRP_MSG_ABORT, .text = text};
    int n = snprintf(text, sizeof(text), "rank %u: %s", comm->rank, why);
    msg.text_len = (size_t)n < sizeof(text) ? (size_t)n : sizeof(text) - 1;
    msg.body.slot.slot = comm->slot;
    hcl_send_only(comm->ctx, &msg, HRP_MSG_DONE);
    hcl_comm_end(comm, (uint32_t)result, why); /* results are statuses, by number */
}

/* ---------------------------------------------------------------------------------------------- joining */

/* Of a configuration, what stays in this process. */
struct own_config {
    const char *socket;
    bool trap;
    uint32_t require;
};

static struct hcl_comm *comm_new(struct hcl_context *ctx, const struct hrp_msg_joined *j, uint32_t rank,
                                 const struct own_config *own)
{
    struct hcl_comm *comm = calloc(1, sizeof(*comm));
    if (comm == NULL)
        return NULL;
    comm->ctx = ctx;
    comm->area = hrp_seg_comm(ctx->seg, j->slot);
    comm->slot = j->slot;
    comm->nranks = j->nranks;
    comm->rank = rank;
    comm->nnodes = j->nnodes;
    comm->node = j->node;
    comm->nlocal = j->nlocal;
    comm->local_rank = hcl_local_rank();
    comm->op_timeout_ms = j->op_timeout_ms;
    comm->trap = own->trap;
    comm->require = j->require | own->require; /* an older daemon does not say it */
    memcpy(comm->id, j->comm_id, sizeof(comm->id));
    pthread_mutex_init(&comm->post_lock, NULL);
    pthread_mutex_init(&comm->lock, NULL);
    hcl_stage_init(&comm->stage);
    comm->handle = hcl_handle_new(comm);
    return comm;
}

static void comm_free(struct hcl_comm *comm)
{
    if (comm->handle != NULL)
        hcl_handle_free(comm->handle);
    hcl_stage_deinit(&comm->stage);
    hcl_registrations_free(comm);
    pthread_mutex_destroy(&comm->post_lock);
    pthread_mutex_destroy(&comm->lock);
    free(comm->failures);
    free(comm);
}

static void send_leave(struct hcl_context *ctx, uint32_t slot)
{
    struct hrp_msg msg = {.type = HRP_MSG_LEAVE};
    msg.body.slot.slot = slot;
    hcl_send_only(ctx, &msg, HRP_MSG_DONE);
}

/* The reply to JOIN becomes a communicator. */
static hclient_result_t adopt(struct hcl_context *ctx, const struct hrp_msg_joined *j, uint32_t nranks,
                              uint32_t rank, const struct own_config *own, hclient_comm_t *out)
{
    if (j->slot >= ctx->ncomms || j->nranks != nranks)
        return hcl_fail(HCLIENT_PROTOCOL,
                        "the hreduced daemon answered JOIN of %u ranks with slot %u, %u ranks", nranks,
                        j->slot, j->nranks);
    struct hcl_comm *comm = comm_new(ctx, j, rank, own);
    if (comm == NULL || comm->handle == NULL) {
        if (comm != NULL)
            comm_free(comm);
        send_leave(ctx, j->slot);
        return hcl_fail(HCLIENT_RESOURCE, "out of memory, or more than 65536 communicators in this process");
    }
    pthread_mutex_lock(&ctx->lock);
    comm->next = ctx->comms;
    ctx->comms = comm;
    pthread_mutex_unlock(&ctx->lock);
    *out = comm->handle;
    return HCLIENT_OK;
}

static hclient_result_t join(const struct own_config *own, struct hrp_msg_join *body, hclient_comm_t *out)
{
    struct hcl_context *ctx;
    hclient_result_t r = hcl_context_get(own->socket, &ctx);
    if (r != HCLIENT_OK)
        return r;
    struct hrp_msg msg = {.type = HRP_MSG_JOIN};
    msg.body.join = *body;
    uint64_t timeout = JOIN_NS;
    if (body->config.setup_timeout_ms != 0)
        timeout = body->config.setup_timeout_ms * HCL_MS + JOIN_MARGIN_NS;
    struct hcl_reply reply = HCL_REPLY_NULL;
    r = hcl_request(ctx, &msg, NULL, 0, HRP_MSG_JOINED, timeout, &reply);
    if (r == HCLIENT_OK)
        r = adopt(ctx, &reply.msg.body.joined, body->key.nranks, body->rank, own, out);
    if (r != HCLIENT_OK)
        hcl_context_put(ctx); /* else the comm holds it */
    return r;
}

#define CHECK_RANGE(field, max, meaning)                                                                   \
    do {                                                                                                   \
        if (c.field < 0 || c.field > (max))                                                                \
            return hcl_fail(HCLIENT_INVALID_ARGUMENT, "config." #field " is %d; it is " meaning, c.field); \
    } while (0)

static hclient_result_t take_config(const hclient_comm_config_t *config, struct hrp_comm_config *out,
                                    struct own_config *own)
{
    hclient_comm_config_t c = HCLIENT_COMM_CONFIG_INITIALIZER;
    if (config != NULL) {
        if (config->size < offsetof(hclient_comm_config_t, setup_timeout_ms))
            return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                            "config.size is %zu; start with HCLIENT_COMM_CONFIG_INITIALIZER", config->size);
        const char *extra = (const char *)config;
        for (size_t i = sizeof(c); i < config->size; i++)
            if (extra[i] != 0)
                return hcl_fail(
                    HCLIENT_UNSUPPORTED,
                    "the program sets a field of hclient_comm_config_t that this library (%d) does "
                    "not know; load a newer libhclient",
                    HCLIENT_VERSION_CODE);
        memcpy(&c, config, config->size < sizeof(c) ? config->size : sizeof(c));
    }
    CHECK_RANGE(algo, HRP_NALGOS - 1, "one of HCLIENT_ALGO_*");
    CHECK_RANGE(reproducible, HRP_ON, "HCLIENT_DEFAULT, HCLIENT_OFF or HCLIENT_ON");
    CHECK_RANGE(wire_f32, HRP_ON, "HCLIENT_DEFAULT, HCLIENT_OFF or HCLIENT_ON");
    CHECK_RANGE(transport, 2, "one of HCLIENT_TRANSPORT_*");
    CHECK_RANGE(overlap, HRP_NOVERLAPS - 1, "one of HCLIENT_OVERLAP_*");
    CHECK_RANGE(on_error, HCLIENT_ON_ERROR_TRAP, "one of HCLIENT_ON_ERROR_*");
    CHECK_RANGE(service_level, 16, "HCLIENT_CLASS(0) to HCLIENT_CLASS(15)");
    CHECK_RANGE(traffic_class, 256, "HCLIENT_CLASS(0) to HCLIENT_CLASS(255)");
    if (c.require & ~HRP_REQUIRE_ALL)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "config.require is 0x%x; it is made of HCLIENT_REQUIRE_*",
                        c.require);
    *out = (struct hrp_comm_config){.setup_timeout_ms = c.setup_timeout_ms,
                                    .op_timeout_ms = c.op_timeout_ms,
                                    .algo = (uint8_t)c.algo,
                                    .reproducible = (uint8_t)c.reproducible,
                                    .wire_f32 = (uint8_t)c.wire_f32,
                                    .transport = (uint8_t)c.transport,
                                    .overlap = (uint8_t)c.overlap,
                                    .require = c.require};
    if (c.service_level) {
        out->service_level = (uint8_t)(c.service_level - 1);
        out->class_set |= HRP_CLASS_SL;
    }
    if (c.traffic_class) {
        out->traffic_class = (uint8_t)(c.traffic_class - 1);
        out->class_set |= HRP_CLASS_TC;
    }
    *own = (struct own_config){
        .socket = c.socket, .trap = c.on_error == HCLIENT_ON_ERROR_TRAP, .require = c.require};
    return HCLIENT_OK;
}

hclient_result_t hclient_comm_init_rank_config(hclient_comm_t *comm, int nranks, hclient_unique_id_t id,
                                               int rank, const hclient_comm_config_t *config)
{
    HCL_ENTER();
    if (comm == NULL)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "hclient_comm_init_rank: comm is NULL");
    if (nranks < 1 || nranks > (int)HRP_MAX_RANKS)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "hclient_comm_init_rank: nranks is %d; it is 1 to %u",
                        nranks, HRP_MAX_RANKS);
    if (rank < 0 || rank >= nranks)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "hclient_comm_init_rank: rank %d is not among 0 to %d",
                        rank, nranks - 1);
    struct hrp_unique_id uid;
    memcpy(&uid, &id, sizeof(uid));
    if (hrp_unique_id_check(&uid) != 0)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                        "hclient_comm_init_rank: these %d bytes are not an id of hclient_get_unique_id; did "
                        "all of them reach this rank?",
                        HCLIENT_UNIQUE_ID_BYTES);
    struct hrp_msg_join join_body = {.rank = (uint32_t)rank, .nroots = uid.naddrs};
    join_body.key.kind = HRP_KEY_ID;
    join_body.key.nranks = (uint32_t)nranks;
    memcpy(join_body.key.name, uid.nonce, sizeof(uid.nonce));
    memcpy(join_body.root, uid.addr, sizeof(uid.addr));
    struct own_config own;
    hclient_result_t r = take_config(config, &join_body.config, &own);
    return r != HCLIENT_OK ? r : join(&own, &join_body, comm);
}

hclient_result_t hclient_comm_init_rank(hclient_comm_t *comm, int nranks, hclient_unique_id_t id, int rank)
{
    return hclient_comm_init_rank_config(comm, nranks, id, rank, NULL);
}

static hclient_result_t check_name(const char *name)
{
    size_t len = name != NULL ? strlen(name) : 0;
    size_t most = sizeof(((struct hrp_key *)0)->name) - 1;
    if (len == 0 || len > most)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                        "hclient_comm_init_name: the name has %zu characters; it may have 1 to %zu", len,
                        most);
    for (size_t i = 0; i < len; i++)
        if (name[i] < 0x20 || name[i] > 0x7e)
            return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                            "hclient_comm_init_name: byte %zu of the name (0x%02x) is not printable ASCII", i,
                            (unsigned)(unsigned char)name[i]);
    return HCLIENT_OK;
}

hclient_result_t hclient_comm_init_name(hclient_comm_t *comm, const char *name,
                                        const hclient_comm_config_t *config)
{
    HCL_ENTER();
    if (comm == NULL)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "hclient_comm_init_name: comm is NULL");
    struct hrp_msg_join body = {.rank = 0};
    struct own_config own;
    hclient_result_t r = check_name(name);
    if (r == HCLIENT_OK)
        r = take_config(config, &body.config, &own);
    struct hcl_launch launch;
    if (r == HCLIENT_OK)
        r = hcl_launch_read(&launch);
    if (r != HCLIENT_OK)
        return r;
    body.key.kind = HRP_KEY_NAME;
    body.key.nranks = launch.nranks;
    body.key.attempt = launch.attempt;
    memcpy(body.key.name, name, strlen(name));
    body.rank = launch.rank;
    body.nroots = launch.nroots;
    memcpy(body.root, launch.root, sizeof(body.root));
    body.key.nth = hcl_name_take(name);
    r = join(&own, &body, comm);
    if (r != HCLIENT_OK) {
        hcl_name_give_back(name, body.key.nth);
        hcl_fail_more(" [rank %u of %u by %s, meeting at %s]", launch.rank, launch.nranks, launch.launcher,
                      launch.root_name);
    }
    return r;
}

hclient_result_t hclient_get_unique_id(hclient_unique_id_t *id)
{
    HCL_ENTER();
    if (id == NULL)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "hclient_get_unique_id: id is NULL");
    struct hcl_context *ctx;
    hclient_result_t r = hcl_context_get(NULL, &ctx);
    if (r != HCLIENT_OK)
        return r;
    struct hrp_msg msg = {.type = HRP_MSG_GET_ID};
    struct hcl_reply reply = HCL_REPLY_NULL;
    r = hcl_request(ctx, &msg, NULL, 0, HRP_MSG_ID, HCL_REPLY_NS, &reply);
    if (r == HCLIENT_OK)
        memcpy(id, &reply.msg.body.id.id, sizeof(*id));
    hcl_context_put(ctx);
    return r;
}

/* ---------------------------------------------------------------------------------------------- leaving */

static void unlink_comm(struct hcl_comm *comm)
{
    pthread_mutex_lock(&comm->ctx->lock);
    struct hcl_comm **p = &comm->ctx->comms;
    while (*p != comm)
        p = &(*p)->next;
    *p = comm->next;
    pthread_mutex_unlock(&comm->ctx->lock);
}

/*
 * Streams that have not passed their ops are let go as by an abort: after LEAVE nobody would raise their words. False: some
 * have not come yet. What they will read and write then stays, with all the session, for the rest of the process.
 */
static bool release_streams(struct hcl_comm *comm)
{
    if (comm->gpu == NULL)
        return true;
    if (hcl_gpu_pending(comm) && !hcl_context_lost(comm->ctx)) {
        char text[96];
        struct hrp_msg msg = {.type = HRP_MSG_ABORT, .text = text};
        msg.text_len =
            (size_t)snprintf(text, sizeof(text), "rank %u destroyed it while ops were pending", comm->rank);
        msg.body.slot.slot = comm->slot;
        hcl_request(comm->ctx, &msg, NULL, 0, HRP_MSG_DONE, HCL_REPLY_NS, NULL);
    }
    if (hcl_gpu_deinit(comm, STREAMS_NS))
        return true;
    hcl_log(HCLIENT_LOG_WARN,
            "a communicator of %u ranks was destroyed while a CUDA stream had not come to its last op on it "
            "for %llu s; its "
            "memory is kept. Synchronize streams before hclient_comm_destroy",
            comm->nranks, (unsigned long long)(STREAMS_NS / HCL_SEC));
    return false;
}

hclient_result_t hclient_comm_destroy(hclient_comm_t handle)
{
    HCL_ENTER();
    struct hcl_comm *comm;
    if (!hcl_handle_close(handle, &comm))
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "hclient_comm_destroy: %p is not a communicator%s",
                        (void *)handle, handle == NULL ? "" : " (any more: was it destroyed?)");
    hcl_group_flush();  /* ops of this thread's group that others wait for */
    hcl_gpu_trap(comm); /* what failed before this rank ended the comm is not its own doing */
    atomic_store(&comm->destroying, true);
    while (!hcl_handle_idle(handle)) {
        hcl_comm_wake(comm);
        struct timespec ts = hcl_timespec(HCL_MS / 2);
        nanosleep(&ts, NULL);
    }
    struct hcl_context *ctx = comm->ctx;
    hclient_result_t r = HCLIENT_OK;
    if (!release_streams(comm))
        return HCLIENT_OK; /* without LEAVE: the slot and its words are not used again */
    if (!hcl_context_lost(ctx)) {
        struct hrp_msg msg = {.type = HRP_MSG_LEAVE};
        msg.body.slot.slot = comm->slot;
        r = hcl_request(ctx, &msg, NULL, 0, HRP_MSG_DONE, HCL_REPLY_NS, NULL);
        if (hcl_context_lost(ctx))
            r = HCLIENT_OK; /* the daemon left first */
    }
    unlink_comm(comm);
    comm_free(comm);
    hcl_context_put(ctx);
    return r;
}

/* Waits until the ops are complete, so that their buffers are free, but not longer than an abort may take. */
static void await_quiet(struct hcl_comm *comm, uint64_t deadline)
{
    while (hcl_comm_pending(comm) && !hcl_context_lost(comm->ctx) && hcl_now() < deadline) {
        harvest(comm);
        hcl_gpu_trap(comm); /* streams that are held */
        if (atomic_load(&comm->stage.live) > 0)
            hcl_stage_progress(comm);
        struct timespec ts = hcl_timespec(HCL_MS);
        nanosleep(&ts, NULL);
    }
}

hclient_result_t hclient_comm_abort(hclient_comm_t handle)
{
    HCL_ENTER();
    struct hcl_comm *comm;
    hclient_result_t r = hcl_comm_enter(handle, "hclient_comm_abort", &comm);
    if (r != HCLIENT_OK)
        return r;
    uint64_t deadline = hcl_now() + ABORT_ALL_NS;
    hcl_gpu_trap(comm); /* as in hclient_comm_destroy() */
    if (!atomic_exchange(&comm->aborted, true) && !hcl_context_lost(comm->ctx)) {
        char text[96];
        struct hrp_msg msg = {.type = HRP_MSG_ABORT, .text = text};
        msg.text_len = (size_t)snprintf(text, sizeof(text), "rank %u called hclient_comm_abort", comm->rank);
        msg.body.slot.slot = comm->slot;
        /* An answer that does not come in time changes nothing: the message is on its way. */
        hcl_request(comm->ctx, &msg, NULL, 0, HRP_MSG_DONE, ABORT_SEND_NS, NULL);
    }
    await_quiet(comm, deadline);
    char text[HRP_COMM_TEXT + 1];
    uint32_t status = hcl_comm_state(comm, text, sizeof(text));
    /* Ops that the daemon has not let go of stay incomplete: whoever waits for them does so within its own bound. */
    if (!hcl_comm_pending(comm) || hcl_context_lost(comm->ctx))
        hcl_comm_end(comm, status, text);
    hcl_handle_put(handle);
    return HCLIENT_OK;
}
