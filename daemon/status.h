/* SPDX-License-Identifier: MIT */
/* Documents for hreducectl, hclient_comm_path() and the log: see control.h for the requests. Control thread. */
#ifndef HRD_STATUS_H
#define HRD_STATUS_H

#include <jansson.h>

#include "daemon/control.h"

/* Logs the path of a communicator, at notice level, once the agent's figures are here. */
void hrd_path_log(struct hrd_daemon *d, uint64_t comm);
/* Stops the timers of questions that the agent has not answered; the loop must run once more. */
void hrd_status_stop(struct hrd_daemon *d);

/* ---- path.c ---- */

/*
 * The path report of one communicator: what every stage uses, what was wanted, and for each difference the
 * reason and the remedy. member: its object of hrd_members_json(); links: the agent's. New reference.
 */
json_t *hrd_path_json(struct hrd_daemon *d, const struct hrd_snapshot *snap,
                      const struct hrd_snapshot_comm *comm, const json_t *member);
/* Ops by the algorithm that moved them between the nodes, those that occurred. New reference. */
json_t *hrd_algorithms_json(const struct hrd_snapshot_comm *comm);
/* Some node is reached by tcp although one of the two ends could verbs. */
bool hrd_path_fell_back(const json_t *path);
json_t *hrd_engines_json(const struct hrd_snapshot_comm *comm);
/* Of each collective that occurred: completed ops, and where their time went. New reference. */
json_t *hrd_collectives_json(const struct hrd_snapshot_comm *comm);
/* GPUs that jobs registered memory of, and the host memory pinned for them. */
json_t *hrd_gpus_json(const struct hrd_daemon *d);
/* The path report in one line. */
void hrd_path_line(const json_t *path, char *buf, size_t len);

#endif
