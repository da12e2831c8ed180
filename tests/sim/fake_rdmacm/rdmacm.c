/* SPDX-License-Identifier: MIT */
/*
 * A librdmacm whose kernel knows no address of any RDMA device, as on InfiniBand without IPoIB: channels and ids can be made, an
 * address cannot be bound (a loopback one can, and is no device's), so that nothing behind that is ever called. A directory
 * with it as librdmacm.so.1 in LD_LIBRARY_PATH, beside that of fake_ibverbs, is all it takes.
 */
#include <errno.h>
#include <netinet/in.h>
#include <rdma/rdma_cma.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define FAKE_API __attribute__((visibility("default")))

FAKE_API struct rdma_event_channel *rdma_create_event_channel(void)
{
    struct rdma_event_channel *ch = calloc(1, sizeof(*ch));
    if (ch != NULL)
        ch->fd = eventfd(0, EFD_CLOEXEC);
    return ch;
}

FAKE_API void rdma_destroy_event_channel(struct rdma_event_channel *ch)
{
    close(ch->fd);
    free(ch);
}

FAKE_API int rdma_create_id(struct rdma_event_channel *ch, struct rdma_cm_id **id, void *context,
                            enum rdma_port_space ps)
{
    *id = calloc(1, sizeof(**id));
    if (*id == NULL)
        return -1;
    (*id)->channel = ch;
    (*id)->context = context;
    (*id)->ps = ps;
    return 0;
}

FAKE_API int rdma_destroy_id(struct rdma_cm_id *id)
{
    free(id);
    return 0;
}

FAKE_API int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *addr)
{
    const struct sockaddr_in *in = (const struct sockaddr_in *)(const void *)addr;
    (void)id;
    if (addr->sa_family == AF_INET && ntohl(in->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET)
        return 0;
    errno = ENODEV;
    return -1;
}

FAKE_API int rdma_get_cm_event(struct rdma_event_channel *ch, struct rdma_cm_event **event)
{
    (void)ch, (void)event;
    errno = EAGAIN;
    return -1;
}

/* What is left is looked up by name, and called only on an id that belongs to a device. */
#define NEVER(name)                                  \
    FAKE_API void never_##name(void) __asm__(#name); \
    void never_##name(void)                          \
    {                                                \
        abort();                                     \
    }

NEVER(rdma_ack_cm_event)
NEVER(rdma_listen)
NEVER(rdma_get_src_port)
NEVER(rdma_set_option)
NEVER(rdma_resolve_addr)
NEVER(rdma_resolve_route)
NEVER(rdma_connect)
NEVER(rdma_accept)
NEVER(rdma_reject)
NEVER(rdma_establish)
NEVER(rdma_init_qp_attr)
