/* SPDX-License-Identifier: MIT */
/*
 * The door to librdmacm, behind the one of verbs_api.h: filled by dlopen, and optional, because queue pairs can be
 * connected without it.
 *
 * The queue pairs stay the caller's own and are connected with what init_qp_attr() answers; RDMA-CM sees nothing of them
 * but their numbers. Answers are 0 or a positive errno, NULL with errno.
 */
#ifndef HRD_RDMACM_API_H
#define HRD_RDMACM_API_H

#include <rdma/rdma_cma.h>

#include "daemon/verbs/verbs_api.h"

/* An event, copied: the original is acknowledged already, so that nothing waits for it when its id is destroyed. */
struct hrd_cm_event {
    enum rdma_cm_event_type type;
    struct rdma_cm_id *id;
    struct rdma_cm_id *listener;  /* CONNECT_REQUEST; id is new then, and the receiver's to destroy */
    int status;                   /* negative errno; REJECTED: a reason of the CM protocol, positive */
    uint32_t qp_num;              /* CONNECT_REQUEST, CONNECT_RESPONSE: the other end's */
    struct sockaddr_storage from; /* CONNECT_REQUEST */
    unsigned data_len;
    unsigned char data[256]; /* of the other end; may be longer than what it sent, with zeros behind */
};

struct hrd_rdmacm {
    const char *name; /* "librdmacm.so.1", for sentences */

    /* Its descriptor is non-blocking. */
    struct rdma_event_channel *(*create_channel)(void);
    void (*destroy_channel)(struct rdma_event_channel *ch);
    /* EAGAIN: there is none. */
    int (*next_event)(struct rdma_event_channel *ch, struct hrd_cm_event *ev);

    struct rdma_cm_id *(*create_id)(struct rdma_event_channel *ch);
    /* Also ends its connection; no event of it comes any more. */
    void (*destroy_id)(struct rdma_cm_id *id);
    /* The device that it is bound to, "" while there is none, and its port. */
    const char *(*device)(const struct rdma_cm_id *id, uint8_t *port);
    int (*bind_addr)(struct rdma_cm_id *id, struct sockaddr *addr);
    int (*listen)(struct rdma_cm_id *id, int backlog);
    uint16_t (*port)(struct rdma_cm_id *id); /* bound to, host order */
    /* Traffic class of what comes after. */
    int (*set_tos)(struct rdma_cm_id *id, uint8_t tos);
    /* ADDR_RESOLVED or ADDR_ERROR, ROUTE_RESOLVED or ROUTE_ERROR follow. */
    int (*resolve_addr)(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int ms);
    int (*resolve_route)(struct rdma_cm_id *id, int ms);
    /* CONNECT_RESPONSE, REJECTED, UNREACHABLE or CONNECT_ERROR follows, after a minute or more perhaps. */
    int (*connect)(struct rdma_cm_id *id, struct rdma_conn_param *param);
    int (*accept)(struct rdma_cm_id *id, struct rdma_conn_param *param);
    int (*reject)(struct rdma_cm_id *id, const void *data, uint8_t len);
    int (*establish)(struct rdma_cm_id *id);
    int (*init_qp_attr)(struct rdma_cm_id *id, struct ibv_qp_attr *attr, int *mask);
};

/* The real one, loaded once and kept; NULL with a sentence that says what to install. Any thread. */
const struct hrd_rdmacm *hrd_rdmacm_load(char *why, size_t len);

/* "ADDR_ERROR": the name without its prefix. */
const char *hrd_rdmacm_event_name(enum rdma_cm_event_type type);
/* What the status of REJECTED usually means; the end of a sentence. */
const char *hrd_rdmacm_reject_meaning(int status);

#endif
