/* SPDX-License-Identifier: MIT */
/* Checks of the machine as a whole. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/doctor/doctor.h"

void hrd_check_kernel(const struct hrd_machine *m, struct hrd_finding *f)
{
    char text[128], *end;
    if (!hrd_machine_text(m, text, sizeof(text), "/proc/sys/kernel/osrelease")) {
        hrd_find(f, HRD_SKIP, NULL, NULL, "/proc/sys/kernel/osrelease cannot be read");
        return;
    }
    long major = strtol(text, &end, 10), minor = *end == '.' ? strtol(end + 1, NULL, 10) : 0;
    if (major < 5 || (major == 5 && minor < 3))
        hrd_find(f, HRD_FAIL, "the daemon watches its clients by pidfd, which Linux has since 5.3",
                 "Boot a newer kernel.", "Linux %s", text);
    else
        hrd_find(f, HRD_PASS, NULL, NULL, "Linux %s", text);
}

void hrd_check_clock(const struct hrd_machine *m, struct hrd_finding *f)
{
    int state = m->clock_synchronised();
    if (state < 0)
        hrd_find(f, HRD_SKIP, NULL, NULL, "the kernel does not say whether its clock is synchronised");
    else if (state == 0)
        hrd_find(f, HRD_WARN,
                 "time limits do not depend on it, but log lines of several nodes cannot be put in order",
                 "Run chrony or systemd-timesyncd; a virtual machine may take its host's time instead.",
                 "the kernel says that no service keeps its clock synchronised");
    else
        hrd_find(f, HRD_PASS, NULL, NULL, "the clock is kept synchronised");
}

void hrd_check_governor(const struct hrd_machine *m, struct hrd_finding *f)
{
    char text[64];
    if (!hrd_machine_text(m, text, sizeof(text), "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"))
        hrd_find(f, HRD_SKIP, NULL, NULL, "the kernel does not control the frequency of the processor");
    else if (strcmp(text, "powersave") == 0 &&
             !hrd_machine_exists(m, "/sys/devices/system/cpu/intel_pstate/status") &&
             !hrd_machine_exists(m, "/sys/devices/system/cpu/amd_pstate/status"))
        /* Under intel_pstate and amd_pstate the word means something else: the hardware decides. */
        hrd_find(f, HRD_WARN,
                 "the processor stays at its lowest frequency, and every small operation waits for it",
                 "Set the governor to performance or schedutil (cpupower frequency-set -g performance).",
                 "scaling_governor is powersave");
    else
        hrd_find(f, HRD_PASS, NULL, NULL, "scaling_governor is %s", text);
}
