/* SPDX-License-Identifier: MIT */
/* The running service: start, signals, reload, watchdog, orderly stop. */
#ifndef HRD_SERVICE_H
#define HRD_SERVICE_H

#include "daemon/config.h"

/* Runs until a signal stops it. config_path is read again on SIGHUP; must_exist: it was named on the command line.
 * Returns the process's exit status. */
int hrd_service_run(const struct hrd_config *cfg, const char *config_path, bool must_exist);

#endif
