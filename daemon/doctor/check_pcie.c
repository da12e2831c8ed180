/* SPDX-License-Identifier: MIT */
/* Where NICs and GPUs are plugged in. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/doctor/doctor.h"

/* "16.0 GT/s PCIe" times lanes, in Mbit/s of payload; 0: unknown. */
static unsigned pcie_mbit(const char *speed, long lanes)
{
    double gt = strtod(speed, NULL);
    double coded = gt > 5.5 ? gt * 128 / 130 : gt * 8 / 10;
    return lanes > 0 ? (unsigned)(coded * 1000 * (double)lanes) : 0;
}

struct link {
    char now[32], most[32];
    long lanes, most_lanes;
};

static bool read_link(const struct hrd_machine *m, const char *dir, struct link *l)
{
    l->lanes = hrd_machine_number(m, -1, "%s/current_link_width", dir);
    l->most_lanes = hrd_machine_number(m, -1, "%s/max_link_width", dir);
    return hrd_machine_text(m, l->now, sizeof(l->now), "%s/current_link_speed", dir) &&
           hrd_machine_text(m, l->most, sizeof(l->most), "%s/max_link_speed", dir) && l->lanes > 0 &&
           l->most_lanes > 0;
}

static const char SEAT_REMEDY[] =
    "Seat the card anew, and see in the manual of the board which slots have all lanes, and "
    "whether the BIOS limits their speed.";

/* mbit: what has to go through, 0: unknown. speed: a lower speed counts (a GPU lowers it while idle). */
static void judge_link(struct hrd_finding *f, const char *name, const struct link *l, unsigned mbit,
                       bool speed)
{
    unsigned can = pcie_mbit(l->now, l->lanes);
    bool less = l->lanes < l->most_lanes || (speed && strtod(l->now, NULL) < strtod(l->most, NULL));
    if (mbit > 0 && can > 0 && can < mbit)
        hrd_find(f, HRD_FAIL, "the slot carries less than the link to the network", SEAT_REMEDY,
                 "%s runs at %s x%ld (%u Mbit/s), its network link at %u Mbit/s", name, l->now, l->lanes, can,
                 mbit);
    else if (less)
        hrd_find(f, HRD_WARN, "the PCIe link is slower than the card can do", SEAT_REMEDY,
                 "%s runs at %s x%ld and can do %s x%ld", name, l->now, l->lanes, l->most, l->most_lanes);
    else
        hrd_find(f, HRD_PASS, NULL, NULL, "%s runs at %s x%ld", name, l->now, l->lanes);
}

/* The device that a device is plugged into, out of the path that its link in /sys/bus/pci/devices leads to. */
static bool parent_of(const struct hrd_machine *m, const char *pci, char *parent, size_t len)
{
    char path[1024];
    if (!hrd_machine_link(m, path, sizeof(path), "/sys/bus/pci/devices/%s", pci))
        return false;
    char *last = strrchr(path, '/');
    if (last)
        *last = 0;
    last = strrchr(path, '/');
    if (!last || strlen(last + 1) != 12)
        return false;
    snprintf(parent, len, "%s", last + 1);
    return true;
}

/* What the slot of a GPU allows, GT/s; 0: unknown. A GPU that idles lowers its speed, so the speed now tells nothing. */
static double slot_speed(const struct hrd_machine *m, const char *pci, const struct link *l)
{
    char parent[32], text[32];
    if (!parent_of(m, pci, parent, sizeof(parent)) ||
        !hrd_machine_text(m, text, sizeof(text), "/sys/bus/pci/devices/%s/max_link_speed", parent))
        return 0;
    double slot = strtod(text, NULL), card = strtod(l->most, NULL);
    return slot < card ? slot : card;
}

static void compare_slots(const struct hrd_machine *m, struct hrd_finding *f, char (*gpu)[HRD_MACHINE_NAME],
                          unsigned gpus)
{
    struct link l;
    char dir[256];
    double speed[HRD_DOCTOR_GPUS] = {0}, best = 0;
    for (unsigned i = 0; i < gpus; i++) {
        snprintf(dir, sizeof(dir), "/sys/bus/pci/devices/%.63s", gpu[i]);
        if (read_link(m, dir, &l))
            speed[i] = slot_speed(m, gpu[i], &l);
        if (speed[i] > best)
            best = speed[i];
    }
    for (unsigned i = 0; i < gpus; i++)
        if (speed[i] > 0 && speed[i] < best)
            hrd_find(f, HRD_WARN, "the other GPUs wait for the one with the slow slot", SEAT_REMEDY,
                     "the slot of GPU %s allows %.1f GT/s, those of other GPUs %.1f GT/s", gpu[i], speed[i],
                     best);
}

void hrd_check_pcie_link(const struct hrd_machine *m, struct hrd_finding *f)
{
    struct hrd_nic nic[HRD_MAX_NICS];
    char gpu[HRD_DOCTOR_GPUS][HRD_MACHINE_NAME], dir[256], name[HRD_MACHINE_NAME + 8];
    struct link l;
    unsigned n = hrd_machine_nics(m, nic), gpus = hrd_machine_gpus(m, gpu, HRD_DOCTOR_GPUS);
    for (unsigned i = 0; i < n; i++) {
        snprintf(dir, sizeof(dir), "%s/device", nic[i].base);
        if (read_link(m, dir, &l))
            judge_link(f, nic[i].name, &l, nic[i].mbit, true);
    }
    for (unsigned i = 0; i < gpus; i++) {
        snprintf(dir, sizeof(dir), "/sys/bus/pci/devices/%.63s", gpu[i]);
        snprintf(name, sizeof(name), "GPU %.63s", gpu[i]);
        if (read_link(m, dir, &l))
            judge_link(f, name, &l, 0, false);
    }
    compare_slots(m, f, gpu, gpus);
    if (f->evidence[0] == 0)
        hrd_find(f, HRD_SKIP, NULL, NULL,
                 "no NIC or GPU says how it is linked (none on PCIe, or a virtual machine)");
}

/* ---- NUMA -------------------------------------------------------------------------------------------------- */

/* Whether any processor of a node is one that this process may use. */
static bool shares_cpu(const char *allowed, const char *of_node)
{
    for (long cpu = 0; cpu < 4096; cpu++)
        if (hrd_list_has(of_node, cpu) && hrd_list_has(allowed, cpu))
            return true;
    return false;
}

enum apart { APART_NOT, APART_CPUS, APART_MEMORY };

#define LIST_LEN 512

/* What of this process is far from a NUMA node, with the node's processors and what is allowed instead; NOT: nothing, or
   nobody knows. */
static enum apart far_from(const struct hrd_machine *m, long node, char *cpus, char *allowed)
{
    if (!hrd_machine_text(m, cpus, LIST_LEN, "/sys/devices/system/node/node%ld/cpulist", node))
        return APART_NOT;
    if (hrd_machine_line(m, "/proc/self/status", "Cpus_allowed_list:", allowed, LIST_LEN) &&
        !shares_cpu(allowed, cpus))
        return APART_CPUS;
    if (hrd_machine_line(m, "/proc/self/status", "Mems_allowed_list:", allowed, LIST_LEN) &&
        !hrd_list_has(allowed, node))
        return APART_MEMORY;
    return APART_NOT;
}

struct far {
    const char *kind;  /* "NIC" */
    const char *cause; /* by running, or having its memory, elsewhere */
};

/* dir: of the device, with its numa_node. True: the daemon is near, and nothing was said. */
static bool judge_node(const struct hrd_machine *m, struct hrd_finding *f, const char *name, const char *dir,
                       const struct far *far)
{
    char cpus[LIST_LEN], allowed[LIST_LEN], cause[256];
    long node = hrd_machine_number(m, -1, "%s/numa_node", dir);
    if (node < 0) {
        snprintf(cause, sizeof(cause), "memory and threads cannot be placed near the %s", far->kind);
        hrd_find(f, HRD_WARN, cause,
                 "Update the BIOS, or enable NUMA in it: its tables do not name the node of the slot.",
                 "the firmware does not say which NUMA node %s is on", name);
        return false;
    }
    enum apart apart = far_from(m, node, cpus, allowed);
    if (apart == APART_NOT)
        return true;
    if (apart == APART_CPUS)
        hrd_find(f, HRD_WARN, far->cause,
                 "Let CPUAffinity= or AllowedCPUs= of the unit have processors of that node.",
                 "%s is on NUMA node %ld (processors %s), the daemon may use %s", name, node, cpus, allowed);
    else
        hrd_find(f, HRD_WARN, far->cause, "Let NUMAMask= or AllowedMemoryNodes= of the unit have that node.",
                 "%s is on NUMA node %ld, the daemon may take memory of node %s", name, node, allowed);
    return false;
}

void hrd_check_numa(const struct hrd_machine *m, struct hrd_finding *f)
{
    static const struct far of_nic = {
        "NIC",
        "everything that is sent crosses the link between NUMA nodes, because the daemon is not near the "
        "NIC"};
    static const struct far of_gpu = {
        "GPU", "every copy between that GPU and host memory crosses the link between NUMA nodes, because the "
               "daemon is not near the GPU"};
    struct hrd_nic nic[HRD_MAX_NICS];
    char gpu[HRD_DOCTOR_GPUS][HRD_MACHINE_NAME], dir[256], name[HRD_MACHINE_NAME + 8];
    unsigned n = hrd_machine_nics(m, nic), gpus = hrd_machine_gpus(m, gpu, HRD_DOCTOR_GPUS), near_gpus = 0;
    if (!hrd_machine_exists(m, "/sys/devices/system/node/node1")) {
        hrd_find(f, HRD_PASS, NULL, NULL, "this machine has one NUMA node");
        return;
    }
    for (unsigned i = 0; i < n; i++) {
        snprintf(dir, sizeof(dir), "%s/device", nic[i].base);
        if (hrd_machine_exists(m, "%s/numa_node", dir) && judge_node(m, f, nic[i].name, dir, &of_nic))
            hrd_find(f, HRD_PASS, NULL, NULL, "%s is on NUMA node %ld, whose processors the daemon may use",
                     nic[i].name, hrd_machine_number(m, -1, "%s/numa_node", dir));
    }
    for (unsigned i = 0; i < gpus; i++) {
        snprintf(dir, sizeof(dir), "/sys/bus/pci/devices/%.63s", gpu[i]);
        snprintf(name, sizeof(name), "GPU %.63s", gpu[i]);
        near_gpus += hrd_machine_exists(m, "%s/numa_node", dir) && judge_node(m, f, name, dir, &of_gpu);
    }
    if (near_gpus > 0)
        hrd_find(f, HRD_PASS, NULL, NULL,
                 "%u GPU%s on NUMA nodes whose processors and memory the daemon may use", near_gpus,
                 near_gpus == 1 ? " is" : "s are");
    if (f->evidence[0] == 0)
        hrd_find(f, HRD_SKIP, NULL, NULL, "no NIC or GPU says which NUMA node it is on");
}

/* ---- ACS, IOMMU -------------------------------------------------------------------------------------------- */

#define ACS_CAPABILITY 0x000du
#define ACS_REDIRECTS (0x04u | 0x08u | 0x10u) /* requests, completions, upstream forwarding */

/* The control word of a bridge's ACS capability. -1: it has none, -2: not to be read by this user. */
static int acs_control(const struct hrd_machine *m, const char *pci)
{
    uint8_t config[4096];
    long n = hrd_machine_bytes(m, config, sizeof(config), "/sys/bus/pci/devices/%s/config", pci);
    if (n < 0x104)
        return -2;
    for (unsigned at = 0x100, left = 64; at >= 0x100 && at + 8 <= (unsigned)n && left > 0; left--) {
        uint32_t head = (uint32_t)config[at] | (uint32_t)config[at + 1] << 8 |
                        (uint32_t)config[at + 2] << 16 | (uint32_t)config[at + 3] << 24;
        if ((head & 0xffff) == ACS_CAPABILITY)
            return config[at + 6] | config[at + 7] << 8;
        at = head >> 20;
    }
    return -1;
}

/* Bridges above a device, out of the path that its link in /sys/bus/pci/devices leads to. */
static void look_above(const struct hrd_machine *m, const char *pci, char *bridge, size_t len, bool *hidden)
{
    char path[1024], *save = NULL;
    if (!hrd_machine_link(m, path, sizeof(path), "/sys/bus/pci/devices/%s", pci))
        return;
    for (char *part = strtok_r(path, "/", &save); part; part = strtok_r(NULL, "/", &save)) {
        if (strlen(part) != 12 || part[4] != ':' || part[7] != ':' || strcmp(part, pci) == 0)
            continue;
        int control = acs_control(m, part);
        *hidden = *hidden || control == -2;
        if (control >= 0 && (unsigned)control & ACS_REDIRECTS && bridge[0] == 0)
            snprintf(bridge, len, "%s", part);
    }
}

bool hrd_machine_redirects(const struct hrd_machine *m, const char *a, const char *b, char *buf, size_t len)
{
    const char *pci[] = {a, b};
    char bridge[32] = "", type[32];
    bool hidden = false;
    for (unsigned i = 0; i < 2; i++)
        look_above(m, pci[i], bridge, sizeof(bridge), &hidden);
    if (bridge[0]) {
        snprintf(buf, len, "the PCIe bridge %s above them redirects (ACS)", bridge);
        return true;
    }
    for (unsigned i = 0; i < 2; i++)
        if (hrd_machine_text(m, type, sizeof(type), "/sys/bus/pci/devices/%s/iommu_group/type", pci[i]) &&
            strcmp(type, "identity") != 0) {
            snprintf(buf, len, "the IOMMU translates their addresses (type %s)", type);
            return true;
        }
    return false;
}

void hrd_check_acs(const struct hrd_machine *m, struct hrd_finding *f)
{
    char gpu[HRD_DOCTOR_GPUS][HRD_MACHINE_NAME], bridge[32] = "";
    unsigned gpus = hrd_machine_gpus(m, gpu, HRD_DOCTOR_GPUS);
    bool hidden = false;
    for (unsigned i = 0; i < gpus; i++)
        look_above(m, gpu[i], bridge, sizeof(bridge), &hidden);
    if (gpus == 0)
        hrd_find(f, HRD_SKIP, NULL, NULL, "no GPU: nothing goes from one PCIe device to another");
    else if (bridge[0])
        hrd_find(f, HRD_WARN,
                 "access control sends what one GPU or NIC writes to another by way of the processor: slow, "
                 "and on some "
                 "machines wrong data",
                 "Switch ACS off in the BIOS, or for these bridges with 'setpci -s BRIDGE ECAP_ACS+6.w=0000' "
                 "at each boot. "
                 "Virtual machines with passed-through devices need it on.",
                 "the PCIe bridge %s above a GPU redirects (ACS)", bridge);
    else if (hidden)
        hrd_find(f, HRD_SKIP, NULL, NULL, "only root may read the ACS registers of the bridges");
    else
        hrd_find(f, HRD_PASS, NULL, NULL, "no PCIe bridge above the %u GPUs redirects (ACS)", gpus);
}

void hrd_check_iommu(const struct hrd_machine *m, struct hrd_finding *f)
{
    char gpu[HRD_DOCTOR_GPUS][HRD_MACHINE_NAME], type[32];
    unsigned gpus = hrd_machine_gpus(m, gpu, HRD_DOCTOR_GPUS), known = 0;
    for (unsigned i = 0; i < gpus; i++) {
        if (!hrd_machine_text(m, type, sizeof(type), "/sys/bus/pci/devices/%s/iommu_group/type", gpu[i]))
            continue;
        known++;
        if (strcmp(type, "identity") != 0)
            hrd_find(f, HRD_WARN,
                     "the IOMMU translates what GPUs and NICs write to each other: slow, and on some "
                     "machines wrong data",
                     "Boot with iommu=pt (and intel_iommu=on or amd_iommu=on), or switch the IOMMU off in "
                     "the BIOS.",
                     "GPU %s is in an IOMMU group of type %s", gpu[i], type);
    }
    if (gpus == 0)
        hrd_find(f, HRD_SKIP, NULL, NULL, "no GPU: nothing goes from one PCIe device to another");
    else if (f->verdict == HRD_SKIP)
        hrd_find(f, HRD_PASS, NULL, NULL,
                 known ? "the IOMMU passes the GPUs' addresses through" : "no IOMMU stands before the GPUs");
}
