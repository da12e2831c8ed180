/* SPDX-License-Identifier: MIT */
/* Limits that the kernel sets to a process and to its control group. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/doctor/doctor.h"

#define NO_LIMIT (-1L)
#define MIB (1L << 20)

/* The soft limit, NO_LIMIT, or -2: the file cannot be read. */
static long limit_of(const struct hrd_machine *m, const char *name)
{
    char text[128];
    if (!hrd_machine_line(m, "/proc/self/limits", name, text, sizeof(text)))
        return -2;
    return strncmp(text, "unlimited", 9) == 0 ? NO_LIMIT : strtol(text, NULL, 10);
}

void hrd_check_memlock(const struct hrd_machine *m, struct hrd_finding *f)
{
    long limit = limit_of(m, "Max locked memory"), need = (long)m->cfg->arena_bytes + 64 * MIB;
    char pci[HRD_MACHINE_NAME];
    bool matters =
        hrd_wants_rdma(m) && (hrd_needs_rdma(m) || hrd_machine_rdma_hardware(m, pci, sizeof(pci)) ||
                              hrd_machine_exists(m, "/sys/class/infiniband_verbs/uverbs0"));
    if (limit == -2)
        hrd_find(f, HRD_SKIP, NULL, NULL, "/proc/self/limits cannot be read");
    else if (limit == NO_LIMIT)
        hrd_find(f, HRD_PASS, NULL, NULL, "locked memory is not limited");
    else if (limit >= need)
        hrd_find(f, HRD_PASS, NULL, NULL, "%ld MiB may be locked, %ld MiB are enough", limit / MIB,
                 need / MIB);
    else if (!matters)
        hrd_find(f, HRD_PASS, NULL, NULL,
                 "%ld KiB may be locked; there is no RDMA device that would need more", limit >> 10);
    else
        hrd_find(
            f, hrd_needs_rdma(m) ? HRD_FAIL : HRD_WARN,
            "an RDMA device works on locked memory alone, and the arena does not fit: registering it fails "
            "with "
            "'cannot allocate memory'",
            "Set LimitMEMLOCK=infinity in the unit of hreduced (limits.conf does not apply to services).",
            "a limit of %ld KiB for locked memory is too low for RDMA; %ld MiB are needed", limit >> 10,
            need / MIB);
}

void hrd_check_nofile(const struct hrd_machine *m, struct hrd_finding *f)
{
    long limit = limit_of(m, "Max open files"), need = 3L * m->cfg->max_sessions + 512;
    if (limit == -2)
        hrd_find(f, HRD_SKIP, NULL, NULL, "/proc/self/limits cannot be read");
    else if (limit == NO_LIMIT || limit >= need)
        hrd_find(f, HRD_PASS, NULL, NULL, "%ld files may be open, %ld are enough for max_sessions = %u",
                 limit, need, m->cfg->max_sessions);
    else
        hrd_find(f, HRD_WARN, "each process takes three descriptors, and the last ones would be refused",
                 "Set LimitNOFILE=65536 in the unit of hreduced, or lower max_sessions.",
                 "%ld files may be open, but max_sessions = %u needs %ld", limit, m->cfg->max_sessions, need);
}

void hrd_check_map_count(const struct hrd_machine *m, struct hrd_finding *f)
{
    /* A segment, a window for each communicator, and some buffers; a small part of them in use at once. */
    long limit = hrd_machine_number(m, -1, "/proc/sys/vm/max_map_count"),
         need = 16L * m->cfg->max_sessions + 4096;
    if (limit < 0)
        hrd_find(f, HRD_SKIP, NULL, NULL, "/proc/sys/vm/max_map_count cannot be read");
    else if (limit >= need)
        hrd_find(f, HRD_PASS, NULL, NULL, "vm.max_map_count is %ld", limit);
    else
        hrd_find(f, HRD_WARN, "the daemon maps the segments, windows and buffers of all its clients",
                 "Set vm.max_map_count to 262144 (sysctl), or lower max_sessions.",
                 "vm.max_map_count is %ld, but max_sessions = %u may need %ld", limit, m->cfg->max_sessions,
                 need);
}

/* The least limit of the own control group and those above it. False: there is none. */
static bool least_memory_max(const struct hrd_machine *m, long *least, char *where, size_t len)
{
    char group[512], text[64];
    bool found = false;
    if (!hrd_machine_line(m, "/proc/self/cgroup", "0::", group, sizeof(group)))
        return false;
    for (char *slash; (slash = strrchr(group, '/')) != NULL; *slash = 0) {
        if (slash[1] == 0)
            continue;
        if (!hrd_machine_text(m, text, sizeof(text), "/sys/fs/cgroup%s/memory.max", group) || text[0] == 'm')
            continue;
        long n = strtol(text, NULL, 10);
        if (found && n >= *least)
            continue;
        found = true;
        *least = n;
        snprintf(where, len, "%s", group);
    }
    return found;
}

void hrd_check_memory_limit(const struct hrd_machine *m, struct hrd_finding *f)
{
    char where[512], text[64];
    long least = 0, arena = (long)m->cfg->arena_bytes, user = (long)m->cfg->max_memory_per_user;
    if (least_memory_max(m, &least, where, sizeof(where))) {
        if (least < arena + 256 * MIB)
            hrd_find(f, HRD_FAIL,
                     "the arena alone does not fit into the control group, so the daemon is killed",
                     "Raise MemoryMax= of the unit, or lower arena_size.",
                     "memory.max of %s is %ld MiB, arena_size "
                     "%ld MiB",
                     where, least / MIB, arena / MIB);
        else if (least < arena + user)
            hrd_find(
                f, HRD_WARN,
                "shared memory of jobs is charged to the daemon: one user who takes what max_memory_per_user "
                "allows brings the daemon to its limit",
                "Raise MemoryMax= of the unit, or lower max_memory_per_user.",
                "memory.max of %s is %ld MiB, arena_size and max_memory_per_user together are %ld MiB", where,
                least / MIB, (arena + user) / MIB);
        else
            hrd_find(f, HRD_PASS, NULL, NULL, "memory.max of %s is %ld MiB", where, least / MIB);
        return;
    }
    if (!hrd_machine_line(m, "/proc/meminfo", "MemTotal:", text, sizeof(text))) {
        hrd_find(f, HRD_SKIP, NULL, NULL, "/proc/meminfo cannot be read");
        return;
    }
    long total = strtol(text, NULL, 10) / 1024;
    if (arena / MIB > total / 2)
        hrd_find(f, HRD_WARN, "the arena is memory that jobs cannot have", "Lower arena_size.",
                 "arena_size is %ld MiB of this machine's %ld MiB", arena / MIB, total);
    else
        hrd_find(f, HRD_PASS, NULL, NULL, "no limit of the control group; the machine has %ld MiB", total);
}

void hrd_check_huge_pages(const struct hrd_machine *m, struct hrd_finding *f)
{
    char text[128];
    if (!hrd_machine_text(m, text, sizeof(text), "/sys/kernel/mm/transparent_hugepage/enabled"))
        hrd_find(f, HRD_SKIP, NULL, NULL, "this kernel has no transparent huge pages");
    else if (strstr(text, "[never]"))
        hrd_find(f, HRD_WARN,
                 "the arena asks for huge pages and gets small ones, which costs a few per cent of the "
                 "rate of large operations",
                 "Write madvise to /sys/kernel/mm/transparent_hugepage/enabled.",
                 "transparent huge pages are off");
    else
        hrd_find(f, HRD_PASS, NULL, NULL, "transparent huge pages: %s", text);
}
