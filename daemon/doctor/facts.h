/* SPDX-License-Identifier: MIT */
/* What the nodes of a cluster should agree in, and where they do not. */
#ifndef HRD_DOCTOR_FACTS_H
#define HRD_DOCTOR_FACTS_H

#include "daemon/doctor/doctor.h"

/*
 * Of one machine: version, protocol, kernel, cores, configuration (keys that are a node's own left out), bandwidth (as
 * configured, 0: auto), net {address, interface, mtu, bytes_per_s}, rdma {device, rate, ...} or {}, gpu {count, driver}.
 */
json_t *hrd_doctor_facts(const struct hrd_machine *m);

/*
 * The checks of a whole cluster, as an array like that of hrd_doctor_run(). doc:
 *   nodes   [{name, facts, clock_offset_ms, clock_error_ms, failed (why nothing is known)}], the asking node first
 *   reach   [{from, to, address, ok, why}]
 *   probes  [{from, to, transport, path, round_trip_us, bytes_per_s} or {from, to, failed}]
 * A pure function.
 */
json_t *hrd_doctor_cluster(const json_t *doc);

#endif
