/* SPDX-License-Identifier: MIT */
/*
 * What users hold of the daemon. A charge is a value inside the object that it pays for and is dropped with it,
 * so that nothing stays charged when a process dies. Control thread only.
 */
#ifndef HRD_QUOTA_H
#define HRD_QUOTA_H

#include <stdint.h>
#include <sys/types.h>

struct hrd_quota_user;

struct hrd_charge {
    struct hrd_quota_user *user; /* NULL: nothing is charged */
    uint64_t bytes;
    uint32_t sessions;
};
#define HRD_CHARGE_NONE ((struct hrd_charge){0})

struct hrd_quota_limits {
    uint64_t bytes;
    uint32_t sessions;
    uint32_t charges; /* as many things that are charged at once */
};

/* All users; a value in its owner, zero at first. */
struct hrd_quotas {
    struct hrd_quota_user *users;
};

/* Charges uid; *charge is set on success only. 0; 1: over a limit;
 * -ENOMEM. */
int hrd_charge_take(struct hrd_charge *charge, struct hrd_quotas *q, uid_t uid, uint64_t bytes,
                    uint32_t sessions, const struct hrd_quota_limits *limits);
/* Any number of times. */
void hrd_charge_drop(struct hrd_charge *charge);
/* What uid holds. */
uint64_t hrd_quota_bytes(const struct hrd_quotas *q, uid_t uid);
uint32_t hrd_quota_charges(const struct hrd_quotas *q, uid_t uid);
uint32_t hrd_quota_sessions(const struct hrd_quotas *q, uid_t uid);

#endif
