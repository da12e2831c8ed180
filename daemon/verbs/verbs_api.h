/* SPDX-License-Identifier: MIT */
/*
 * The only door to libibverbs. Everything above it calls through this table, so that tests put a fake in its place
 * (tests/sim/fake_verbs.h) and see every refusal a device can give.
 *
 * The real table is filled by dlopen of libibverbs.so.1 and not by linking: one binary serves nodes with and without
 * RDMA, a node without needs no RDMA package, and "not installed" is a reason in words instead of a daemon that does not
 * start. The calls of the data path are inline functions of verbs.h that jump through the device context, so dlopen costs
 * them nothing.
 *
 * Answers are those of the verbs call behind it, except that functions with an int result answer 0 or a positive errno
 * everywhere (verbs itself is of two minds), and those with a pointer NULL with errno.
 */
#ifndef HRD_VERBS_API_H
#define HRD_VERBS_API_H

#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>

struct hrd_rdmacm; /* rdmacm_api.h */

struct hrd_verbs {
    const char *name; /* "libibverbs.so.1", for sentences */

    struct ibv_device **(*get_device_list)(int *n);
    void (*free_device_list)(struct ibv_device **list);
    struct ibv_context *(*open_device)(struct ibv_device *dev);
    int (*close_device)(struct ibv_context *ctx);
    int (*query_device)(struct ibv_context *ctx, struct ibv_device_attr *attr);
    int (*query_port)(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr);
    /* The entry with its RoCE version; an empty or unreadable one is an error. */
    int (*query_gid)(struct ibv_context *ctx, uint8_t port, uint32_t index, struct ibv_gid_entry *entry);
    /* In host order. */
    int (*query_pkey)(struct ibv_context *ctx, uint8_t port, int index, uint16_t *pkey);

    struct ibv_pd *(*alloc_pd)(struct ibv_context *ctx);
    int (*dealloc_pd)(struct ibv_pd *pd);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *pd, void *addr, size_t len, int access);
    /* NULL slot: this libibverbs has no such call. */
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *pd, uint64_t offset, size_t len, uint64_t iova, int fd,
                                    int access);
    int (*dereg_mr)(struct ibv_mr *mr);

    struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *ctx);
    int (*destroy_comp_channel)(struct ibv_comp_channel *ch);
    struct ibv_cq *(*create_cq)(struct ibv_context *ctx, int cqe, struct ibv_comp_channel *ch);
    int (*destroy_cq)(struct ibv_cq *cq);
    /* How many of at most n, or negative. */
    int (*poll_cq)(struct ibv_cq *cq, int n, struct ibv_wc *wc);
    int (*req_notify_cq)(struct ibv_cq *cq);
    /* Takes one event off the channel, which is non-blocking, and acknowledges it; EAGAIN: there is none. */
    int (*next_cq_event)(struct ibv_comp_channel *ch);

    struct ibv_qp *(*create_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
    int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
    int (*destroy_qp)(struct ibv_qp *qp);
    int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
    int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

    /* Takes one asynchronous event, the descriptor of which is non-blocking, and acknowledges it. EAGAIN: there is none.
       Only the type is kept: objects it may name belong to the caller's context. */
    int (*next_async_event)(struct ibv_context *ctx, struct ibv_async_event *ev);

    /* RDMA-CM, which not every node has: NULL with a sentence. NULL slot: this one has none. */
    const struct hrd_rdmacm *(*rdmacm)(char *why, size_t len);
};

/* The real one, loaded once and kept; NULL with a sentence that says what to install. Any thread. */
const struct hrd_verbs *hrd_verbs_load(char *why, size_t len);

/* ---- words -------------------------------------------------------------------------------------------------- */

/* "RETRY_EXC_ERR"; "INIT"; "PORT_ERR": the names of verbs.h without their prefix. */
const char *hrd_verbs_wc_name(enum ibv_wc_status status);
const char *hrd_verbs_port_state(enum ibv_port_state state);
const char *hrd_verbs_event_name(enum ibv_event_type type);
/* What a completion status usually means, as the end of a sentence. */
const char *hrd_verbs_wc_meaning(enum ibv_wc_status status);
/* 256 for IBV_MTU_256, ...; 0 for no such value. */
unsigned hrd_verbs_mtu_bytes(enum ibv_mtu mtu);
/* The reverse; 0 for no such number of bytes. */
enum ibv_mtu hrd_verbs_mtu_of(unsigned bytes);

#endif
