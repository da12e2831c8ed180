/* SPDX-License-Identifier: MIT */
#include "daemon/verbs/rdmacm_api.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define LIBRARY "librdmacm.so.1"

static struct {
    __typeof__(rdma_create_event_channel) *create_event_channel;
    __typeof__(rdma_destroy_event_channel) *destroy_event_channel;
    __typeof__(rdma_get_cm_event) *get_cm_event;
    __typeof__(rdma_ack_cm_event) *ack_cm_event;
    __typeof__(rdma_create_id) *create_id;
    __typeof__(rdma_destroy_id) *destroy_id;
    __typeof__(rdma_bind_addr) *bind_addr;
    __typeof__(rdma_listen) *listen;
    __typeof__(rdma_get_src_port) *get_src_port;
    __typeof__(rdma_set_option) *set_option;
    __typeof__(rdma_resolve_addr) *resolve_addr;
    __typeof__(rdma_resolve_route) *resolve_route;
    __typeof__(rdma_connect) *connect;
    __typeof__(rdma_accept) *accept;
    __typeof__(rdma_reject) *reject;
    __typeof__(rdma_establish) *establish;
    __typeof__(rdma_init_qp_attr) *init_qp_attr;
} lib;

static const struct {
    const char *name;
    void *at;
} symbols[] = {
    {"rdma_create_event_channel", &lib.create_event_channel},
    {"rdma_destroy_event_channel", &lib.destroy_event_channel},
    {"rdma_get_cm_event", &lib.get_cm_event},
    {"rdma_ack_cm_event", &lib.ack_cm_event},
    {"rdma_create_id", &lib.create_id},
    {"rdma_destroy_id", &lib.destroy_id},
    {"rdma_bind_addr", &lib.bind_addr},
    {"rdma_listen", &lib.listen},
    {"rdma_get_src_port", &lib.get_src_port},
    {"rdma_set_option", &lib.set_option},
    {"rdma_resolve_addr", &lib.resolve_addr},
    {"rdma_resolve_route", &lib.resolve_route},
    {"rdma_connect", &lib.connect},
    {"rdma_accept", &lib.accept},
    {"rdma_reject", &lib.reject},
    {"rdma_establish", &lib.establish},
    {"rdma_init_qp_attr", &lib.init_qp_attr},
};

/* From calls that answer -1 with errno, or a negative errno. */
static int result(int r)
{
    if (r == 0)
        return 0;
    return r == -1 ? (errno ? errno : EIO) : r < 0 ? -r : r;
}

static struct rdma_event_channel *real_create_channel(void)
{
    struct rdma_event_channel *ch = lib.create_event_channel();
    int flags = ch ? fcntl(ch->fd, F_GETFL) : 0;
    if (ch && (flags < 0 || fcntl(ch->fd, F_SETFL, flags | O_NONBLOCK) < 0)) {
        int err = errno;
        lib.destroy_event_channel(ch);
        errno = err;
        return NULL;
    }
    return ch;
}

static int real_next_event(struct rdma_event_channel *ch, struct hrd_cm_event *ev)
{
    struct rdma_cm_event *e;
    if (lib.get_cm_event(ch, &e))
        return errno ? errno : EIO;
    const struct rdma_conn_param *p = &e->param.conn;
    memset(ev, 0, sizeof(*ev));
    ev->type = e->event;
    ev->id = e->id;
    ev->status = e->status;
    ev->qp_num = p->qp_num;
    if (p->private_data && p->private_data_len > 0) {
        ev->data_len = p->private_data_len;
        memcpy(ev->data, p->private_data, p->private_data_len);
    }
    if (e->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
        ev->listener = e->listen_id;
        memcpy(&ev->from, &e->id->route.addr.dst_storage, sizeof(ev->from));
    }
    lib.ack_cm_event(e);
    return 0;
}

static struct rdma_cm_id *real_create_id(struct rdma_event_channel *ch)
{
    struct rdma_cm_id *id;
    return lib.create_id(ch, &id, NULL, RDMA_PS_TCP) ? NULL : id;
}

static void real_destroy_id(struct rdma_cm_id *id)
{
    lib.destroy_id(id);
}

static const char *real_device(const struct rdma_cm_id *id, uint8_t *port)
{
    *port = id->port_num;
    return id->verbs ? id->verbs->device->name : "";
}

static int real_bind_addr(struct rdma_cm_id *id, struct sockaddr *addr)
{
    return result(lib.bind_addr(id, addr));
}

static int real_listen(struct rdma_cm_id *id, int backlog)
{
    return result(lib.listen(id, backlog));
}

static uint16_t real_port(struct rdma_cm_id *id)
{
    return ntohs(lib.get_src_port(id));
}

static int real_set_tos(struct rdma_cm_id *id, uint8_t tos)
{
    return result(lib.set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, sizeof(tos)));
}

static int real_resolve_addr(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int ms)
{
    return result(lib.resolve_addr(id, from, to, ms));
}

static int real_resolve_route(struct rdma_cm_id *id, int ms)
{
    return result(lib.resolve_route(id, ms));
}

static int real_connect(struct rdma_cm_id *id, struct rdma_conn_param *param)
{
    return result(lib.connect(id, param));
}

static int real_accept(struct rdma_cm_id *id, struct rdma_conn_param *param)
{
    return result(lib.accept(id, param));
}

static int real_reject(struct rdma_cm_id *id, const void *data, uint8_t len)
{
    return result(lib.reject(id, data, len));
}

static int real_establish(struct rdma_cm_id *id)
{
    return result(lib.establish(id));
}

static int real_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *attr, int *mask)
{
    return result(lib.init_qp_attr(id, attr, mask));
}

static struct hrd_rdmacm real = {
    .name = LIBRARY,
    .create_channel = real_create_channel,
    .next_event = real_next_event,
    .create_id = real_create_id,
    .destroy_id = real_destroy_id,
    .device = real_device,
    .bind_addr = real_bind_addr,
    .listen = real_listen,
    .port = real_port,
    .set_tos = real_set_tos,
    .resolve_addr = real_resolve_addr,
    .resolve_route = real_resolve_route,
    .connect = real_connect,
    .accept = real_accept,
    .reject = real_reject,
    .establish = real_establish,
    .init_qp_attr = real_init_qp_attr,
};

static bool loaded;

static int load(char *why, size_t len)
{
    void *handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        snprintf(why, len, LIBRARY " cannot be loaded (%s): install librdmacm1", dlerror());
        return -1;
    }
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *symbol = dlsym(handle, symbols[i].name);
        if (!symbol) {
            snprintf(why, len, LIBRARY " is too old: it has no %s; install rdma-core 35 or later",
                     symbols[i].name);
            dlclose(handle);
            return -1;
        }
        memcpy(symbols[i].at, &symbol, sizeof(symbol));
    }
    real.destroy_channel = lib.destroy_event_channel;
    loaded = true; /* never unloaded: it keeps the devices open that it has used */
    return 0;
}

const struct hrd_rdmacm *hrd_rdmacm_load(char *why, size_t len)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    bool ok = loaded || load(why, len) == 0;
    pthread_mutex_unlock(&lock);
    return ok ? &real : NULL;
}

/* ---- words ------------------------------------------------------------------------------------------------------ */

const char *hrd_rdmacm_event_name(enum rdma_cm_event_type type)
{
    static const char *const names[] = {
        "ADDR_RESOLVED",   "ADDR_ERROR",       "ROUTE_RESOLVED", "ROUTE_ERROR",
        "CONNECT_REQUEST", "CONNECT_RESPONSE", "CONNECT_ERROR",  "UNREACHABLE",
        "REJECTED",        "ESTABLISHED",      "DISCONNECTED",   "DEVICE_REMOVAL",
        "MULTICAST_JOIN",  "MULTICAST_ERROR",  "ADDR_CHANGE",    "TIMEWAIT_EXIT"};
    size_t i = (size_t)type;
    return i < sizeof(names) / sizeof(names[0]) ? names[i] : "unknown event";
}

const char *hrd_rdmacm_reject_meaning(int status)
{
    switch (status) {
    case 1:
    case 2:
    case 3:
        return "the other end's device or kernel has no room for the connection";
    case 4:
        return "the other end waited in vain for the last message of the handshake: packets are lost";
    case 8:
        return "nobody listens there: the daemon has just ended, or the address belongs to another machine";
    case 10:
        return "the other end still counts an older connection with the same queue pair number as open; it "
               "ends by itself";
    case 12:
    case 13:
        return "the other end does not know the address that was asked for: wrong GID, LID or subnet";
    case 28:
        return "the other end's program said no";
    default:
        return "see the reject reasons of the InfiniBand CM protocol";
    }
}
