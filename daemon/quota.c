/* SPDX-License-Identifier: MIT */
#include "daemon/quota.h"

#include <errno.h>
#include <stdlib.h>

struct hrd_quota_user {
    struct hrd_quotas *owner;
    struct hrd_quota_user *next;
    uid_t uid;
    uint32_t charges; /* the user goes with the last one */
    uint32_t sessions;
    uint64_t bytes;
};

static struct hrd_quota_user *find_user(const struct hrd_quotas *q, uid_t uid)
{
    struct hrd_quota_user *u = q->users;
    while (u && u->uid != uid)
        u = u->next;
    return u;
}

static void drop_unused(struct hrd_quota_user *u)
{
    if (u->charges > 0)
        return;
    struct hrd_quota_user **at = &u->owner->users;
    while (*at != u)
        at = &(*at)->next;
    *at = u->next;
    free(u);
}

int hrd_charge_take(struct hrd_charge *charge, struct hrd_quotas *q, uid_t uid, uint64_t bytes,
                    uint32_t sessions, const struct hrd_quota_limits *limits)
{
    struct hrd_quota_user *u = find_user(q, uid);
    uint64_t held = u ? u->bytes : 0;
    uint32_t held_sessions = u ? u->sessions : 0;
    /* A limit lowered by a reload may lie below what is held: compare without subtracting. */
    if ((u && u->charges >= limits->charges) ||
        (bytes > 0 && (bytes > limits->bytes || held > limits->bytes - bytes)) ||
        (sessions > 0 && (sessions > limits->sessions || held_sessions > limits->sessions - sessions)))
        return 1;
    if (!u) {
        u = calloc(1, sizeof(*u));
        if (!u)
            return -ENOMEM;
        u->owner = q;
        u->uid = uid;
        u->next = q->users;
        q->users = u;
    }
    u->charges++;
    u->bytes += bytes;
    u->sessions += sessions;
    *charge = (struct hrd_charge){.user = u, .bytes = bytes, .sessions = sessions};
    return 0;
}

void hrd_charge_drop(struct hrd_charge *charge)
{
    struct hrd_quota_user *u = charge->user;
    if (!u)
        return;
    u->charges--;
    u->bytes -= charge->bytes;
    u->sessions -= charge->sessions;
    *charge = HRD_CHARGE_NONE;
    drop_unused(u);
}

uint64_t hrd_quota_bytes(const struct hrd_quotas *q, uid_t uid)
{
    const struct hrd_quota_user *u = find_user(q, uid);
    return u ? u->bytes : 0;
}

uint32_t hrd_quota_charges(const struct hrd_quotas *q, uid_t uid)
{
    const struct hrd_quota_user *u = find_user(q, uid);
    return u ? u->charges : 0;
}

uint32_t hrd_quota_sessions(const struct hrd_quotas *q, uid_t uid)
{
    const struct hrd_quota_user *u = find_user(q, uid);
    return u ? u->sessions : 0;
}
