/* SPDX-License-Identifier: MIT */
/*
 * A fake libibverbs for tests: devices as a test describes them, queue pairs that reach each other inside the process with
 * the rules of RC (order, protection domains, keys and bounds, receiver-not-ready, the error state that flushes), and every
 * refusal on demand. Thread-safe; one world a process.
 */
#ifndef TESTS_SIM_FAKE_VERBS_H
#define TESTS_SIM_FAKE_VERBS_H

#include <stdbool.h>

#include "daemon/verbs/conn.h"

#define FAKE_GIDS 8
#define FAKE_PORTS 2
#define FAKE_DEVICES 4

struct fake_gid {
    int err; /* the slot cannot be read */
    uint32_t type;
    union ibv_gid gid;
};

struct fake_port {
    struct ibv_port_attr attr; /* gid_tbl_len and pkey_tbl_len are filled in */
    struct fake_gid gid[FAKE_GIDS];
    uint16_t pkey[4]; /* up to the first 0 */
};

struct fake_device {
    const char *name;
    int open_err;
    unsigned nports;
    struct fake_port port[FAKE_PORTS];
};

/* Calls that can be made to fail. */
enum fake_call {
    FAKE_ALLOC_PD,
    FAKE_REG_MR,      /* of host memory */
    FAKE_REG_PEERMEM, /* of an address that the fake CUDA driver gave */
    FAKE_REG_DMABUF,
    FAKE_CREATE_CHANNEL,
    FAKE_CREATE_CQ,
    FAKE_CREATE_QP,
    FAKE_MODIFY_QP,
    FAKE_POST_SEND,
    FAKE_POST_RECV,
    FAKE_NOTIFY,
    FAKE_NCALLS,
};

/* Forgets devices and orders; fails the test when an object still lives. */
void fake_verbs_reset(void);
/* One active RoCE port "fake0" with an IPv4 GID at index 3. */
void fake_verbs_plain(void);
/* So many such devices, "fake0", "fake1", ...; lanes: of each, 4 are 12.5 GB/s, 2 half of that; NULL: 4. */
void fake_verbs_rails(unsigned n, const unsigned *lanes);
/* The same for one device. Its port: down also for who asks about its state. Gone: with DEVICE_FATAL, and not to be opened. */
void fake_verbs_device_port(unsigned dev, bool up);
void fake_verbs_device_gone(unsigned dev, bool gone);
/* Nothing that it sends is acknowledged, and nobody is told why. */
void fake_verbs_device_silent(unsigned dev, bool silent);
/* Payload that queue pairs of this device sent. */
uint64_t fake_verbs_device_bytes(unsigned dev);
struct hrd_verbs_device fake_verbs_device_of(const char *name);
/* False: it cannot be used now. */
bool fake_verbs_find(const char *name, struct hrd_verbs_device *dev);
/* The device for conn_new of fake_verbs_plain(). */
struct hrd_verbs_device fake_verbs_device(void);
void fake_verbs_add(const struct fake_device *dev);
/* list_err: what get_device_list() fails with, 0: it works. */
void fake_verbs_list_error(int list_err);
/* After `after` more successes the call fails with err, `times` times (0: for ever). FAKE_POST_SEND with EIO: the device is
   dead, and DEVICE_FATAL comes with it. */
void fake_verbs_fail(enum fake_call call, unsigned after, int err, unsigned times);
unsigned fake_verbs_calls(enum fake_call call);
/* The next `n` sends fail with this status, vendor error 0x81. */
void fake_verbs_wc_error(enum ibv_wc_status status, unsigned n);
/* Behind `after` more sends the next one is not acknowledged: RETRY_EXC_ERR at its sender, arrived or not. */
void fake_verbs_lose(unsigned after, bool arrived);
/* How many of those are still to come (0 or 1). */
unsigned fake_verbs_to_lose(void);
/* Sends are kept and not executed until false comes. */
void fake_verbs_hold(bool hold);
/* The link: while it is down every send ends with RETRY_EXC_ERR. Raises PORT_ERR or PORT_ACTIVE on all contexts. */
void fake_verbs_port(bool up);
/* The address of GID 3 of the first device. */
void fake_verbs_set_gid(const char *ipv4);
/*
 * GPU memory of the fake CUDA driver: a dmabuf is mapped and used as an adapter would, by nobody else's address.
 * late: what is written there is kept, and lies there only after fake_verbs_visible(). damage: the last byte of what is
 * written into, or sent from, GPU memory is wrong.
 */
void fake_verbs_gpu(bool late, bool damage_in, bool damage_out);
void fake_verbs_visible(void);
/* From now on a write of 1 MiB or more takes as long as at this rate (bytes a second; 0: no time): into GPU memory, out of it,
   and where none has a part in it. */
void fake_verbs_rates(uint64_t in, uint64_t out, uint64_t host);
/* How bytes get from and into GPU memory; NULL: its dmabuf is mapped. On a real GPU, whose cannot be, a test has the driver
   copy them in the adapter's place. */
extern void (*fake_verbs_copy)(void *to, bool to_gpu, const void *from, bool from_gpu, size_t len);
/* Regions of GPU memory that are registered now. */
unsigned fake_verbs_gpu_regions(void);
/* Bytes that were written into (in) or sent from GPU memory. */
uint64_t fake_verbs_gpu_bytes(bool in);
/* Raises an event on every open context. */
void fake_verbs_event(enum ibv_event_type type, unsigned port);
/* From now on completion queues hold this many entries, 0: what was asked for. */
void fake_verbs_cq_limit(int entries);
/* Objects that live: contexts, domains, regions, channels, queues and queue pairs. */
unsigned fake_verbs_objects(void);
/* How often a sender met a receiver without a buffer. */
unsigned fake_verbs_rnr(void);
/* Queue pairs that live and were connected with this class. */
unsigned fake_verbs_qps(uint8_t sl, uint8_t tc);
/* Attributes of the last transition to RTR. */
struct ibv_qp_attr fake_verbs_last_rtr(void);

const struct hrd_verbs *fake_verbs(void);

/* Of connections made by fake_verbs_pair(); 10000. */
extern uint32_t fake_verbs_stall_ms;
/* Two connected and probed ends over arenas of the caller's. Fails the test if they cannot be. */
void fake_verbs_pair_on(const struct hrd_verbs_device *dev, struct hrd_verbs_conn **a, void *arena_a,
                        uint64_t len_a, struct hrd_verbs_conn **b, void *arena_b, uint64_t len_b,
                        unsigned queues);
/* The same on fake_verbs_device(). */
void fake_verbs_pair(struct hrd_verbs_conn **a, void *arena_a, uint64_t len_a, struct hrd_verbs_conn **b,
                     void *arena_b, uint64_t len_b, unsigned queues);

#endif
