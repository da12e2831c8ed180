/* SPDX-License-Identifier: MIT */
/*
 * A fake librdmacm for tests, beside fake_verbs.h and on its devices: ids that find each other inside the process by
 * address and port, in event channels that can be polled, with every refusal and every event on demand. Of one thread.
 *
 * An address belongs to the device that has it as a RoCE v2 GID, or to which fake_cm_address() gave it. An id whose events
 * would come too late has none left, as in the kernel, unless a test raises one.
 */
#ifndef TESTS_SIM_FAKE_CM_H
#define TESTS_SIM_FAKE_CM_H

#include <stdbool.h>

#include "daemon/verbs/rdmacm_api.h"

/* Calls that can be made to fail. */
enum fake_cm_call {
    FAKE_CM_CHANNEL,
    FAKE_CM_CREATE,
    FAKE_CM_BIND,
    FAKE_CM_LISTEN,
    FAKE_CM_TOS,
    FAKE_CM_ADDR,
    FAKE_CM_ROUTE,
    FAKE_CM_CONNECT,
    FAKE_CM_ACCEPT,
    FAKE_CM_ESTABLISH,
    FAKE_CM_ATTR,
    FAKE_CM_NCALLS,
};

#define FAKE_CM_SILENCE ((enum rdma_cm_event_type)1000)

/* For the slot of fake_verbs(): nothing, until fake_cm_on(). */
const struct hrd_rdmacm *fake_cm_load(char *why, size_t len);
/* Whether there is one; fake_cm_reset() leaves it as it is. */
void fake_cm_on(bool on);
/* Forgets orders; fails the test when an id, a channel or an event still lives. */
void fake_cm_reset(void);
/* Behind `after` more the call fails with err, `times` times (0: for ever). */
void fake_cm_fail(enum fake_cm_call call, unsigned after, int err, unsigned times);
/* This event instead of the answer to the call (ADDR, ROUTE, CONNECT), `times` times; SILENCE: none. */
void fake_cm_answer(enum fake_cm_call call, enum rdma_cm_event_type type, int status, unsigned times);
unsigned fake_cm_calls(enum fake_cm_call call);
/* Ids and channels that live. */
unsigned fake_cm_objects(void);
/* Ids that are connected to each other, of both ends. */
unsigned fake_cm_connected(void);
/* IPoIB: the address, as text, is of that device and port. */
void fake_cm_address(const char *ip, const char *device, uint8_t port);
/* What the path's record says. */
void fake_cm_path(uint8_t sl, enum ibv_mtu mtu, uint16_t pkey_index);
/* The GID that RDMA-CM prefers, -1: the one of the address. */
void fake_cm_gid_index(int index);
/* Raises it on every id that is connected; on every listener; on an id that was never made, in all channels. */
void fake_cm_raise(enum rdma_cm_event_type type, int status);
void fake_cm_raise_listeners(enum rdma_cm_event_type type);
void fake_cm_raise_dead(enum rdma_cm_event_type type);
/* Somebody asks every listener for a connection. */
void fake_cm_stranger(const void *data, unsigned len, uint32_t qp_num);
/* Why the last one was rejected, "" when it was not. */
const char *fake_cm_stranger_heard(void);

#endif
