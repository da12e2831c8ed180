/* SPDX-License-Identifier: MIT */
#include "daemon/numa.h"

#include <ctype.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PREFERRED 1 /* MPOL_PREFERRED of linux/mempolicy.h */

/* The first line; false: there is none. */
static bool read_line(const char *path, char *line, int len)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    bool ok = fgets(line, len, f) != NULL;
    fclose(f);
    return ok;
}

/* "0", "0-1", "0,2-3": the nodes are numbered from 0 up to the last that is named. */
unsigned hrd_numa_nodes(const char *sysfs)
{
    char path[PATH_MAX], line[256];
    snprintf(path, sizeof(path), "%s/devices/system/node/online", sysfs);
    if (!read_line(path, line, sizeof(line)))
        return 1;
    const char *last = line;
    for (const char *p = line; *p; p++)
        if (*p == '-' || *p == ',')
            last = p + 1;
    unsigned long n = strtoul(last, NULL, 10) + 1;
    return n < HRD_NUMA_MAX ? (unsigned)n : HRD_NUMA_MAX;
}

unsigned hrd_numa_of_pci(const char *sysfs, const char *pci)
{
    char path[PATH_MAX], line[64], id[32];
    size_t n = 0;
    for (; pci[n] && n + 1 < sizeof(id); n++)
        id[n] = (char)tolower((unsigned char)pci[n]);
    id[n] = '\0';
    snprintf(path, sizeof(path), "%s/bus/pci/devices/%s/numa_node", sysfs, id);
    long node = read_line(path, line, sizeof(line)) ? strtol(line, NULL, 10) : -1;
    return node >= 0 && node < (long)hrd_numa_nodes(sysfs) ? (unsigned)node : 0;
}

void hrd_numa_prefer(void *base, uint64_t bytes, unsigned node)
{
    unsigned long mask = 1UL << node;
    (void)syscall(SYS_mbind, base, bytes, PREFERRED, &mask, 8 * sizeof(mask), 0);
}
