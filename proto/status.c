/* SPDX-License-Identifier: MIT */
#include "proto/status.h"

static const char *const names[HRP_NSTATUS] = {
    "ok",          "in progress", "invalid argument", "unsupported",   "mismatch",     "timeout",
    "rank lost",   "peer lost",   "aborted",          "superseded",    "daemon lost",  "daemon unresponsive",
    "no resource", "refused",     "protocol error",   "wrong version", "system error", "daemon is stopping",
};

const char *hrp_status_name(uint32_t status)
{
    return status < HRP_NSTATUS ? names[status] : "unknown status";
}
