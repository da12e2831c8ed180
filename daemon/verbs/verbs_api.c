/* SPDX-License-Identifier: MIT */
#include "daemon/verbs/rdmacm_api.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define LIBRARY "libibverbs.so.1"

/* What is looked up by name. verbs.h hides some of these behind macros of the same name. */
#undef ibv_reg_mr
#undef ibv_query_port
#undef ibv_get_device_list

static struct {
    __typeof__(ibv_get_device_list) *get_device_list;
    __typeof__(ibv_free_device_list) *free_device_list;
    __typeof__(ibv_open_device) *open_device;
    __typeof__(ibv_close_device) *close_device;
    __typeof__(ibv_query_device) *query_device;
    __typeof__(ibv_query_port) *query_port;
    __typeof__(_ibv_query_gid_ex) *query_gid_ex;
    __typeof__(ibv_query_pkey) *query_pkey;
    __typeof__(ibv_alloc_pd) *alloc_pd;
    __typeof__(ibv_dealloc_pd) *dealloc_pd;
    __typeof__(ibv_reg_mr) *reg_mr;
    __typeof__(ibv_reg_dmabuf_mr) *reg_dmabuf_mr;
    __typeof__(ibv_dereg_mr) *dereg_mr;
    __typeof__(ibv_create_comp_channel) *create_comp_channel;
    __typeof__(ibv_destroy_comp_channel) *destroy_comp_channel;
    __typeof__(ibv_create_cq) *create_cq;
    __typeof__(ibv_destroy_cq) *destroy_cq;
    __typeof__(ibv_get_cq_event) *get_cq_event;
    __typeof__(ibv_ack_cq_events) *ack_cq_events;
    __typeof__(ibv_create_qp) *create_qp;
    __typeof__(ibv_modify_qp) *modify_qp;
    __typeof__(ibv_destroy_qp) *destroy_qp;
    __typeof__(ibv_get_async_event) *get_async_event;
    __typeof__(ibv_ack_async_event) *ack_async_event;
} lib;

static const struct {
    const char *name;
    void *at;
    int optional;
} symbols[] = {
    {"ibv_get_device_list", &lib.get_device_list, 0},
    {"ibv_free_device_list", &lib.free_device_list, 0},
    {"ibv_open_device", &lib.open_device, 0},
    {"ibv_close_device", &lib.close_device, 0},
    {"ibv_query_device", &lib.query_device, 0},
    {"ibv_query_port", &lib.query_port, 0},
    {"_ibv_query_gid_ex", &lib.query_gid_ex, 0},
    {"ibv_query_pkey", &lib.query_pkey, 0},
    {"ibv_alloc_pd", &lib.alloc_pd, 0},
    {"ibv_dealloc_pd", &lib.dealloc_pd, 0},
    {"ibv_reg_mr", &lib.reg_mr, 0},
    {"ibv_reg_dmabuf_mr", &lib.reg_dmabuf_mr, 1},
    {"ibv_dereg_mr", &lib.dereg_mr, 0},
    {"ibv_create_comp_channel", &lib.create_comp_channel, 0},
    {"ibv_destroy_comp_channel", &lib.destroy_comp_channel, 0},
    {"ibv_create_cq", &lib.create_cq, 0},
    {"ibv_destroy_cq", &lib.destroy_cq, 0},
    {"ibv_get_cq_event", &lib.get_cq_event, 0},
    {"ibv_ack_cq_events", &lib.ack_cq_events, 0},
    {"ibv_create_qp", &lib.create_qp, 0},
    {"ibv_modify_qp", &lib.modify_qp, 0},
    {"ibv_destroy_qp", &lib.destroy_qp, 0},
    {"ibv_get_async_event", &lib.get_async_event, 0},
    {"ibv_ack_async_event", &lib.ack_async_event, 0},
};

/* 0 or a positive errno, from calls that answer -1 with errno, a positive or a negative errno. */
static int result(int r)
{
    if (r == 0)
        return 0;
    if (r == -1)
        return errno ? errno : EIO;
    return r < 0 ? -r : r;
}

static int nonblocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? -1 : 0;
}

static struct ibv_context *real_open_device(struct ibv_device *dev)
{
    struct ibv_context *ctx = lib.open_device(dev);
    if (ctx && nonblocking(ctx->async_fd)) {
        int err = errno;
        lib.close_device(ctx);
        errno = err;
        return NULL;
    }
    return ctx;
}

static int real_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr)
{
    struct verbs_context *v = verbs_get_ctx_op(ctx, query_port);
    memset(attr, 0, sizeof(*attr));
    if (v)
        return result(v->query_port(ctx, port, attr, sizeof(*attr)));
    return result(lib.query_port(ctx, port, (struct _compat_ibv_port_attr *)attr));
}

static int real_query_gid(struct ibv_context *ctx, uint8_t port, uint32_t index, struct ibv_gid_entry *entry)
{
    return result(lib.query_gid_ex(ctx, port, index, entry, 0, sizeof(*entry)));
}

static int real_query_pkey(struct ibv_context *ctx, uint8_t port, int index, uint16_t *pkey)
{
    __be16 value = 0;
    int r = result(lib.query_pkey(ctx, port, index, &value));
    *pkey = (uint16_t)(((uint16_t)value & 0xff) << 8 | (uint16_t)value >> 8);
    return r;
}

static int real_query_device(struct ibv_context *ctx, struct ibv_device_attr *attr)
{
    return result(lib.query_device(ctx, attr));
}

static int real_dealloc_pd(struct ibv_pd *pd)
{
    return result(lib.dealloc_pd(pd));
}

static int real_dereg_mr(struct ibv_mr *mr)
{
    return result(lib.dereg_mr(mr));
}

static struct ibv_comp_channel *real_create_comp_channel(struct ibv_context *ctx)
{
    struct ibv_comp_channel *ch = lib.create_comp_channel(ctx);
    if (ch && nonblocking(ch->fd)) {
        int err = errno;
        lib.destroy_comp_channel(ch);
        errno = err;
        return NULL;
    }
    return ch;
}

static struct ibv_cq *real_create_cq(struct ibv_context *ctx, int cqe, struct ibv_comp_channel *ch)
{
    return lib.create_cq(ctx, cqe, NULL, ch, 0);
}

static int real_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
    return ibv_poll_cq(cq, n, wc);
}

static int real_req_notify_cq(struct ibv_cq *cq)
{
    return result(ibv_req_notify_cq(cq, 0));
}

static int real_next_cq_event(struct ibv_comp_channel *ch)
{
    struct ibv_cq *cq;
    void *arg;
    if (lib.get_cq_event(ch, &cq, &arg))
        return errno ? errno : EIO;
    lib.ack_cq_events(cq, 1);
    return 0;
}

static int real_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    return result(lib.modify_qp(qp, attr, mask));
}

static int real_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    return result(ibv_post_send(qp, wr, bad));
}

static int real_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    return result(ibv_post_recv(qp, wr, bad));
}

static int real_next_async_event(struct ibv_context *ctx, struct ibv_async_event *ev)
{
    if (lib.get_async_event(ctx, ev))
        return errno ? errno : EIO;
    lib.ack_async_event(ev);
    return 0;
}

static struct hrd_verbs real = {
    .name = LIBRARY,
    .open_device = real_open_device,
    .query_device = real_query_device,
    .query_port = real_query_port,
    .query_gid = real_query_gid,
    .query_pkey = real_query_pkey,
    .dealloc_pd = real_dealloc_pd,
    .dereg_mr = real_dereg_mr,
    .create_comp_channel = real_create_comp_channel,
    .create_cq = real_create_cq,
    .poll_cq = real_poll_cq,
    .req_notify_cq = real_req_notify_cq,
    .next_cq_event = real_next_cq_event,
    .modify_qp = real_modify_qp,
    .post_send = real_post_send,
    .post_recv = real_post_recv,
    .next_async_event = real_next_async_event,
    .rdmacm = hrd_rdmacm_load,
};

/* Calls whose answers are fine as they are. */
static void fill_rest(void)
{
    real.get_device_list = lib.get_device_list;
    real.free_device_list = lib.free_device_list;
    real.close_device = lib.close_device;
    real.alloc_pd = lib.alloc_pd;
    real.reg_mr = lib.reg_mr;
    real.reg_dmabuf_mr = lib.reg_dmabuf_mr;
    real.destroy_comp_channel = lib.destroy_comp_channel;
    real.destroy_cq = lib.destroy_cq;
    real.create_qp = lib.create_qp;
    real.destroy_qp = lib.destroy_qp;
}

static bool loaded;

static int load(char *why, size_t len)
{
    void *handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        snprintf(why, len, LIBRARY " cannot be loaded (%s): install libibverbs1 and ibverbs-providers",
                 dlerror());
        return -1;
    }
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *symbol = dlsym(handle, symbols[i].name);
        if (!symbol && !symbols[i].optional) {
            snprintf(why, len, LIBRARY " is too old: it has no %s; install rdma-core 35 or later",
                     symbols[i].name);
            dlclose(handle);
            return -1;
        }
        memcpy(symbols[i].at, &symbol, sizeof(symbol));
    }
    fill_rest();
    loaded = true; /* never unloaded: providers register things of their own in the process */
    return 0;
}

const struct hrd_verbs *hrd_verbs_load(char *why, size_t len)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    bool ok = loaded || load(why, len) == 0;
    pthread_mutex_unlock(&lock);
    return ok ? &real : NULL;
}

/* ---- words -------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name, *meaning;
} statuses[] = {
    [IBV_WC_SUCCESS] = {"SUCCESS", "it worked"},
    [IBV_WC_LOC_LEN_ERR] = {"LOC_LEN_ERR",
                            "a message was longer than the receive buffer: the peer broke the protocol"},
    [IBV_WC_LOC_QP_OP_ERR] = {"LOC_QP_OP_ERR",
                              "an error inside this queue pair: a fault of this daemon or its driver"},
    [IBV_WC_LOC_EEC_OP_ERR] = {"LOC_EEC_OP_ERR", "an error inside this device"},
    [IBV_WC_LOC_PROT_ERR] = {"LOC_PROT_ERR",
                             "memory was used that is not registered: a fault of this daemon or of "
                             "its driver (GPU memory without a working peer-memory module?)"},
    [IBV_WC_WR_FLUSH_ERR] = {"WR_FLUSH_ERR", "the queue pair had failed before"},
    [IBV_WC_MW_BIND_ERR] = {"MW_BIND_ERR", "a memory window could not be bound"},
    [IBV_WC_BAD_RESP_ERR] = {"BAD_RESP_ERR", "the peer's device answered nonsense: firmware or cable"},
    [IBV_WC_LOC_ACCESS_ERR] = {"LOC_ACCESS_ERR", "the peer wrote where this daemon had not allowed it"},
    [IBV_WC_REM_INV_REQ_ERR] = {"REM_INV_REQ_ERR",
                                "the peer refused the request: its receive buffer was too small, or "
                                "the two ends are set up differently (MTU?)"},
    [IBV_WC_REM_ACCESS_ERR] = {"REM_ACCESS_ERR",
                               "the peer does not allow writing there: it has withdrawn the region, "
                               "or this daemon used a wrong slot"},
    [IBV_WC_REM_OP_ERR] = {"REM_OP_ERR", "the peer's device failed"},
    [IBV_WC_RETRY_EXC_ERR] = {"RETRY_EXC_ERR",
                              "retry exceeded, the peer did not acknowledge in time: link down, wrong "
                              "GID or VLAN, MTU larger than a switch passes, lossy RoCE, or the peer "
                              "is gone"},
    [IBV_WC_RNR_RETRY_EXC_ERR] = {"RNR_RETRY_EXC_ERR",
                                  "the peer had no receive buffer: it broke the flow control"},
    [IBV_WC_LOC_RDD_VIOL_ERR] = {"LOC_RDD_VIOL_ERR", "an error inside this device"},
    [IBV_WC_REM_INV_RD_REQ_ERR] = {"REM_INV_RD_REQ_ERR", "the peer refused the request"},
    [IBV_WC_REM_ABORT_ERR] = {"REM_ABORT_ERR", "the peer aborted the operation"},
    [IBV_WC_INV_EECN_ERR] = {"INV_EECN_ERR", "an error inside this device"},
    [IBV_WC_INV_EEC_STATE_ERR] = {"INV_EEC_STATE_ERR", "an error inside this device"},
    [IBV_WC_FATAL_ERR] = {"FATAL_ERR", "the device failed: see the kernel log"},
    [IBV_WC_RESP_TIMEOUT_ERR] = {"RESP_TIMEOUT_ERR", "the peer's device did not answer in time"},
    [IBV_WC_GENERAL_ERR] = {"GENERAL_ERR", "an error that the device does not explain: see the kernel log"},
};

const char *hrd_verbs_wc_name(enum ibv_wc_status status)
{
    size_t i = (size_t)status;
    return i < sizeof(statuses) / sizeof(statuses[0]) && statuses[i].name ? statuses[i].name
                                                                          : "unknown status";
}

const char *hrd_verbs_wc_meaning(enum ibv_wc_status status)
{
    size_t i = (size_t)status;
    return i < sizeof(statuses) / sizeof(statuses[0]) && statuses[i].meaning
               ? statuses[i].meaning
               : "a status this version does not know";
}

const char *hrd_verbs_port_state(enum ibv_port_state state)
{
    static const char *const names[] = {"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"};
    size_t i = (size_t)state;
    return i < sizeof(names) / sizeof(names[0]) ? names[i] : "in an unknown state";
}

const char *hrd_verbs_event_name(enum ibv_event_type type)
{
    static const char *const names[] = {"CQ_ERR",
                                        "QP_FATAL",
                                        "QP_REQ_ERR",
                                        "QP_ACCESS_ERR",
                                        "COMM_EST",
                                        "SQ_DRAINED",
                                        "PATH_MIG",
                                        "PATH_MIG_ERR",
                                        "DEVICE_FATAL",
                                        "PORT_ACTIVE",
                                        "PORT_ERR",
                                        "LID_CHANGE",
                                        "PKEY_CHANGE",
                                        "SM_CHANGE",
                                        "SRQ_ERR",
                                        "SRQ_LIMIT_REACHED",
                                        "QP_LAST_WQE_REACHED",
                                        "CLIENT_REREGISTER",
                                        "GID_CHANGE",
                                        "WQ_FATAL"};
    size_t i = (size_t)type;
    return i < sizeof(names) / sizeof(names[0]) ? names[i] : "unknown event";
}

unsigned hrd_verbs_mtu_bytes(enum ibv_mtu mtu)
{
    return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128u << mtu : 0;
}

enum ibv_mtu hrd_verbs_mtu_of(unsigned bytes)
{
    for (int m = IBV_MTU_256; m <= IBV_MTU_4096; m++)
        if (128u << m == bytes)
            return (enum ibv_mtu)m;
    return (enum ibv_mtu)0;
}
