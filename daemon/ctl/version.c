/* SPDX-License-Identifier: MIT */
/* hreducectl version */
#include "daemon/ctl/ctl.h"

#include <stdio.h>

#include "daemon/version.h"

int ctl_version(const struct ctl_options *o)
{
    struct ctl_client c;
    if (!o->json) {
        printf("hreducectl %s\n", HRD_VERSION);
        fflush(stdout); /* before a complaint about the daemon */
    }
    int rc = ctl_connect(&c, o->socket);
    if (o->json)
        printf("{\"hreducectl\": \"%s\", \"hreduced\": %s%s%s}\n", HRD_VERSION, rc == CTL_OK ? "\"" : "",
               rc == CTL_OK ? c.daemon_version : "null", rc == CTL_OK ? "\"" : "");
    else if (rc == CTL_OK)
        printf("hreduced   %s\n", c.daemon_version);
    if (rc == CTL_OK)
        ctl_close(&c);
    return rc;
}
