/* SPDX-License-Identifier: MIT */
/* InfiniBand and RoCE. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/doctor/doctor.h"
#include "daemon/verbs/device.h"

#define MAX_PORTS 8u
#define MAX_GIDS 256u

/* Without verbs the daemons go on with tcp, unless that is forbidden. */
static enum hrd_verdict bad(const struct hrd_machine *m)
{
    return hrd_needs_rdma(m) ? HRD_FAIL : HRD_WARN;
}

/* Whether there is anything to look at; what is missing is for rdma-modules and rdma-device to say. */
static bool devices(const struct hrd_machine *m, struct hrd_finding *f, struct hrd_nic *nic, unsigned *n)
{
    unsigned all = hrd_machine_nics(m, nic);
    *n = 0;
    for (unsigned i = 0; i < all; i++)
        if (nic[i].rdma)
            nic[(*n)++] = nic[i];
    if (!hrd_wants_rdma(m))
        hrd_find(f, HRD_SKIP, NULL, NULL, "transport = tcp in hreduced.conf");
    else if (*n == 0)
        hrd_find(f, HRD_SKIP, NULL, NULL, "there is no RDMA device to look at");
    return *n > 0;
}

void hrd_check_modules(const struct hrd_machine *m, struct hrd_finding *f)
{
    char pci[HRD_MACHINE_NAME], driver[256], names[1][HRD_MACHINE_NAME];
    bool hardware = hrd_machine_rdma_hardware(m, pci, sizeof(pci));
    bool device = hrd_machine_list(m, "/sys/class/infiniband", names, 1) > 0;
    if (!hrd_wants_rdma(m)) {
        hrd_find(f, HRD_SKIP, NULL, NULL, "transport = tcp in hreduced.conf");
    } else if (device && !hrd_machine_exists(m, "/sys/class/infiniband_verbs")) {
        hrd_find(f, bad(m), "programs reach RDMA devices by way of this module",
                 "modprobe ib_uverbs, and write its name to /etc/modules-load.d/rdma.conf.",
                 "%s is there, but the module ib_uverbs is not loaded", names[0]);
    } else if (device) {
        hrd_find(f, HRD_PASS, NULL, NULL, "%s is there, ib_uverbs is loaded", names[0]);
    } else if (hardware) {
        if (!hrd_machine_link(m, driver, sizeof(driver), "/sys/bus/pci/devices/%s/driver", pci))
            snprintf(driver, sizeof(driver), "none");
        const char *name = strrchr(driver, '/') ? strrchr(driver, '/') + 1 : driver;
        hrd_find(
            f, bad(m), "the NIC's RDMA driver is a module of its own beside the network driver",
            "modprobe mlx5_ib (or the RDMA driver of this NIC). In a container or network namespace, see "
            "rdma-device.",
            "the NIC at %s has driver %s, but the kernel made no RDMA device of it", pci, name);
    } else {
        hrd_find(f, HRD_SKIP, NULL, NULL, "this machine has no NIC that is known for RDMA");
    }
}

static void check_device(const struct hrd_machine *m, unsigned rail, struct hrd_finding *f)
{
    struct hrd_verbs_device dev;
    char why[512] = "", pci[HRD_MACHINE_NAME];
    if (hrd_machine_rdma(m, rail, &dev, why, sizeof(why))) {
        hrd_find(f, dev.note[0] ? HRD_WARN : HRD_PASS,
                 "the daemon uses the device, but not as well as it could",
                 "Follow the note; see the verbs_ keys in hreduced.conf(5).", "%s%s%s", dev.text,
                 dev.note[0] ? "; " : "", dev.note);
        return;
    }
    /* Nothing is wrong with a machine that has no such NIC and was not told to use one. */
    bool expected = hrd_needs_rdma(m) || hrd_machine_rdma_hardware(m, pci, sizeof(pci)) ||
                    hrd_machine_exists(m, "/sys/class/infiniband") ||
                    strcmp(m->cfg->verbs_device, "auto") != 0;
    const char *cause =
        hrd_verbs_rails(m->cfg) > 1 ? "links lack this rail, and without any verbs is not used"
        : hrd_needs_rdma(m) ? "the configuration accepts nothing but verbs, so no communicator can be made"
                            : "data between nodes goes over tcp, which is several times slower";
    hrd_find(f, !expected ? HRD_SKIP : bad(m), cause,
             "Put right what the evidence names, and see the other rdma checks. Where tcp is what you want, "
             "set transport "
             "= tcp.",
             "%s", why);
}

void hrd_check_rdma_device(const struct hrd_machine *m, struct hrd_finding *f)
{
    if (!hrd_wants_rdma(m)) {
        hrd_find(f, HRD_SKIP, NULL, NULL, "transport = tcp in hreduced.conf");
        return;
    }
    for (unsigned rail = 0; rail < hrd_verbs_rails(m->cfg); rail++)
        check_device(m, rail, f);
}

void hrd_check_rdma_access(const struct hrd_machine *m, struct hrd_finding *f)
{
    struct hrd_nic nic[HRD_MAX_NICS];
    char names[HRD_MAX_NICS][HRD_MACHINE_NAME], ibdev[HRD_MACHINE_NAME], path[128];
    unsigned n;
    if (!devices(m, f, nic, &n))
        return;
    unsigned nodes = hrd_machine_list(m, "/sys/class/infiniband_verbs", names, HRD_MAX_NICS);
    for (unsigned i = 0; i < n; i++)
        for (unsigned k = 0; k < nodes; k++) {
            if (!hrd_machine_text(m, ibdev, sizeof(ibdev), "/sys/class/infiniband_verbs/%s/ibdev",
                                  names[k]) ||
                strcmp(ibdev, nic[i].name) != 0)
                continue;
            snprintf(path, sizeof(path), "/dev/infiniband/%.63s", names[k]);
            int err = hrd_machine_access(m, path);
            if (err == 0)
                hrd_find(f, HRD_PASS, NULL, NULL, "%s (%s) can be opened", path, nic[i].name);
            else if (err == ENOENT)
                hrd_find(f, bad(m),
                         "udev did not make the device file, or this is a container that was not given it",
                         "Install rdma-core and run 'udevadm trigger'; give a container the directory "
                         "/dev/infiniband.",
                         "%s (%s) does not exist", path, nic[i].name);
            else
                hrd_find(f, bad(m), "the user of the daemon may not use the RDMA device",
                         "Check the mode of the file (0666 by rdma-core's udev rules) and DeviceAllow= in "
                         "the unit of "
                         "hreduced.",
                         "%s (%s) cannot be opened by user %u: %s", path, nic[i].name, (unsigned)m->uid,
                         strerror(err));
        }
    if (f->evidence[0] == 0)
        hrd_find(f, HRD_SKIP, NULL, NULL, "the kernel lists no device file; see rdma-modules");
}

void hrd_check_rdma_cm(const struct hrd_machine *m, struct hrd_finding *f)
{
    static const char
        file[] = "/dev/infiniband/rdma_cm",
        cause[] = "queue pairs are connected without RDMA-CM, so without what the subnet manager and the "
                  "kernel know of the path";
    struct hrd_nic nic[HRD_MAX_NICS];
    char why[256];
    unsigned n;
    if (!devices(m, f, nic, &n))
        return;
    if (m->cfg->verbs_setup == HRD_SETUP_EXCHANGE) {
        hrd_find(f, HRD_SKIP, NULL, NULL, "verbs_setup = exchange in hreduced.conf");
        return;
    }
    enum hrd_verdict missing = m->cfg->verbs_setup == HRD_SETUP_RDMACM ? bad(m) : HRD_WARN;
    int err = hrd_machine_access(m, file);
    if (m->verbs && m->verbs->rdmacm && !m->verbs->rdmacm(why, sizeof(why)))
        hrd_find(f, missing, cause, "Install librdmacm1, or set verbs_setup = exchange.", "%s", why);
    else if (err == ENOENT)
        hrd_find(
            f, missing, cause,
            "modprobe rdma_ucm, and write its name to /etc/modules-load.d/rdma.conf; give a container the "
            "directory /dev/infiniband. Or set verbs_setup = exchange.",
            "%s does not exist", file);
    else if (err)
        hrd_find(
            f, missing, cause,
            "Check the mode of the file (0666 by rdma-core's udev rules) and DeviceAllow= in the unit of "
            "hreduced.",
            "%s cannot be opened by user %u: %s", file, (unsigned)m->uid, strerror(err));
    else
        hrd_find(f, HRD_PASS, NULL, NULL, "%s can be opened", file);
}

static bool is_ethernet(const struct hrd_machine *m, const struct hrd_nic *nic, unsigned port)
{
    char text[32];
    return hrd_machine_text(m, text, sizeof(text), "%s/ports/%u/link_layer", nic->base, port) &&
           strcmp(text, "Ethernet") == 0;
}

/* "4: ACTIVE" */
static bool port_state(const struct hrd_machine *m, const struct hrd_nic *nic, unsigned port, char *state,
                       size_t len)
{
    char text[64];
    if ((m->cfg->verbs_port != UINT32_MAX && m->cfg->verbs_port != port) ||
        !hrd_machine_text(m, text, sizeof(text), "%s/ports/%u/state", nic->base, port))
        return false;
    const char *at = strstr(text, ": ");
    snprintf(state, len, "%s", at ? at + 2 : text);
    return true;
}

static void judge_port(const struct hrd_machine *m, struct hrd_finding *f, const struct hrd_nic *nic,
                       unsigned port, const char *state, enum hrd_verdict down)
{
    bool ethernet = is_ethernet(m, nic, port);
    const char *layer = ethernet ? "Ethernet" : "InfiniBand";
    if (strcmp(state, "ACTIVE") == 0)
        hrd_find(f, HRD_PASS, NULL, NULL, "%s port %u (%s) is ACTIVE", nic->name, port, layer);
    else if (strcmp(state, "INIT") == 0 && !ethernet)
        hrd_find(f, bad(m), "the cable is in, but no subnet manager has given the port an address",
                 "Start a subnet manager: on the switch, or opensm on one node of the fabric.",
                 "%s port %u (%s) is INIT", nic->name, port, layer);
    else if (strcmp(state, "ARMED") == 0)
        hrd_find(f, bad(m), "the subnet manager has not finished with this port",
                 "Wait for it, and see its log when the state stays.", "%s port %u (%s) is ARMED", nic->name,
                 port, layer);
    else
        hrd_find(f, down, "the port has no link",
                 ethernet ? "Check that its network interface is up (ip link) and the cable is in."
                          : "Check the cable and the port of the switch.",
                 "%s port %u (%s) is %s", nic->name, port, layer, state);
}

void hrd_check_rdma_port(const struct hrd_machine *m, struct hrd_finding *f)
{
    struct hrd_nic nic[HRD_MAX_NICS];
    char state[64];
    unsigned n, active = 0;
    if (!devices(m, f, nic, &n))
        return;
    for (unsigned i = 0; i < n; i++)
        for (unsigned port = 1; port <= MAX_PORTS; port++)
            active += port_state(m, &nic[i], port, state, sizeof(state)) && strcmp(state, "ACTIVE") == 0;
    /* A port that is not cabled is nothing to worry about where another one works. */
    for (unsigned i = 0; i < n; i++)
        for (unsigned port = 1; port <= MAX_PORTS; port++)
            if (port_state(m, &nic[i], port, state, sizeof(state)))
                judge_port(m, f, &nic[i], port, state, active > 0 ? HRD_PASS : bad(m));
}

/* The best rate among devices of the same kind. */
static unsigned best_of_board(const struct hrd_machine *m, const struct hrd_nic *nic, unsigned n,
                              const char *board, const char **who)
{
    char other[128];
    unsigned best = 0;
    for (unsigned i = 0; i < n; i++)
        if (nic[i].mbit > best && hrd_machine_text(m, other, sizeof(other), "%s/board_id", nic[i].base) &&
            strcmp(other, board) == 0) {
            best = nic[i].mbit;
            *who = nic[i].name;
        }
    return best;
}

void hrd_check_rdma_rate(const struct hrd_machine *m, struct hrd_finding *f)
{
    static const char cable[] =
        "Look at the cable and its seat, at the port of the switch, and at the counters "
        "symbol_error and link_downed below /sys/class/infiniband.";
    struct hrd_nic nic[HRD_MAX_NICS];
    char rate[64], board[128], state[64], netdevs[4][HRD_MACHINE_NAME], dir[256];
    unsigned n;
    if (!devices(m, f, nic, &n))
        return;
    for (unsigned i = 0; i < n; i++) {
        const char *who = nic[i].name;
        unsigned port = hrd_machine_port(m, &nic[i]);
        if (!port_state(m, &nic[i], port, state, sizeof(state)) || strcmp(state, "ACTIVE") != 0 ||
            !hrd_machine_text(m, rate, sizeof(rate), "%s/ports/%u/rate", nic[i].base, port))
            continue;
        const char *width = strchr(rate, '(');
        bool narrow = width && (strncmp(width, "(1X", 3) == 0 || strncmp(width, "(2X", 3) == 0) &&
                      !is_ethernet(m, &nic[i], port);
        unsigned best = 0, most = 0;
        if (hrd_machine_text(m, board, sizeof(board), "%s/board_id", nic[i].base))
            best = best_of_board(m, nic, n, board, &who);
        snprintf(dir, sizeof(dir), "%s/device/net", nic[i].base);
        if (hrd_machine_list(m, dir, netdevs, 1) == 1)
            most = m->netif_mbit(netdevs[0], true);
        if (narrow)
            hrd_find(f, HRD_WARN, "an InfiniBand link has four lanes; some did not come up", cable,
                     "%s runs at %s", nic[i].name, rate);
        else if (best > nic[i].mbit)
            hrd_find(f, HRD_WARN, "another device of the same kind is faster", cable,
                     "%s runs at %s, %s at %u Gbit/s", nic[i].name, rate, who, best / 1000);
        else if (most > nic[i].mbit)
            hrd_find(f, HRD_WARN, "the link runs below what the NIC can do", cable,
                     "%s runs at %s and can do %u Gbit/s", nic[i].name, rate, most / 1000);
        else
            hrd_find(f, HRD_PASS, NULL, NULL, "%s runs at %s", nic[i].name, rate);
    }
    if (f->evidence[0] == 0)
        hrd_find(f, HRD_SKIP, NULL, NULL, "no port is active");
}

/* 0: none, 1: an address of RoCE v2, 2: and it is the own one. */
static int look_for_gid(const struct hrd_machine *m, const struct hrd_nic *nic, const struct hrd_net *net,
                        unsigned *index)
{
    char text[64], type[32];
    union ibv_gid gid;
    unsigned port = hrd_machine_port(m, nic);
    int found = 0;
    for (unsigned i = 0; i < MAX_GIDS; i++) {
        if (!hrd_machine_text(m, text, sizeof(text), "%s/ports/%u/gids/%u", nic->base, port, i)) {
            if (errno == ENOENT)
                break;
            continue;
        }
        if (!hrd_machine_text(m, type, sizeof(type), "%s/ports/%u/gid_attrs/types/%u", nic->base, port, i) ||
            strcmp(type, "RoCE v2") != 0 || inet_pton(AF_INET6, text, gid.raw) != 1 ||
            (gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80))
            continue;
        bool own = false;
        for (unsigned a = 0; net && a < net->nown; a++)
            own = own || hrd_verbs_gid_is(&gid, &net->own[a]);
        if (found == 0 || own) {
            *index = i;
            found = own ? 2 : 1;
        }
        if (own)
            break;
    }
    return found;
}

void hrd_check_rdma_gid(const struct hrd_machine *m, struct hrd_finding *f)
{
    struct hrd_nic nic[HRD_MAX_NICS];
    struct hrd_net net;
    char netif[IFNAMSIZ];
    unsigned n, good = 0, roce = 0;
    if (!devices(m, f, nic, &n))
        return;
    bool own = hrd_machine_own(m, &net, netif, sizeof(netif)) && !net.local_only;
    for (unsigned i = 0; i < n; i++) {
        unsigned index = 0;
        if (!is_ethernet(m, &nic[i], hrd_machine_port(m, &nic[i])))
            continue;
        roce++;
        int found = look_for_gid(m, &nic[i], own ? &net : NULL, &index);
        good += found == 2 || (found == 1 && !own);
        if (found == 0)
            hrd_find(f, HRD_SKIP, NULL, NULL, "%s has no RoCE v2 entry but link-local ones", nic[i].name);
        else
            hrd_find(f, HRD_SKIP, NULL, NULL, "GID %u of %s is RoCE v2%s", index, nic[i].name,
                     found == 2 ? " and this node's address"
                     : own      ? ", but not an address that others are told"
                                : "");
    }
    if (roce == 0)
        hrd_find(f, HRD_SKIP, NULL, NULL, "InfiniBand is addressed by LID");
    else if (good > 0)
        f->verdict = HRD_PASS;
    else
        hrd_find(
            f, bad(m),
            "RoCE packets are addressed by the IP address of the device's network interface, and the daemon "
            "tells "
            "others another one, or there is none",
            "Give the device's network interface an IP address, and name that interface in 'interface' of "
            "hreduced.conf; or set verbs_gid_index.",
            "no device has the entry that is needed");
}

void hrd_check_rdma_mtu(const struct hrd_machine *m, struct hrd_finding *f)
{
    struct hrd_nic nic[HRD_MAX_NICS];
    char netdevs[4][HRD_MACHINE_NAME], dir[256];
    unsigned n;
    if (!devices(m, f, nic, &n))
        return;
    for (unsigned i = 0; i < n; i++) {
        snprintf(dir, sizeof(dir), "%s/device/net", nic[i].base);
        if (!is_ethernet(m, &nic[i], hrd_machine_port(m, &nic[i])) ||
            hrd_machine_list(m, dir, netdevs, 1) == 0)
            continue;
        long mtu = hrd_machine_number(m, -1, "%s/%s/mtu", dir, netdevs[0]);
        if (mtu < 0)
            continue;
        /* RoCE headers take up to 128 bytes of a frame. */
        if (mtu < 4096 + 128)
            hrd_find(
                f, HRD_WARN,
                "packets of RoCE are powers of two below the MTU of the network interface; 4096 bytes are "
                "fastest",
                "Set an MTU of 4200 or 9000 on the interface of every node and on the switches.",
                "%s of %s has MTU %ld, so RoCE packets carry %u bytes", netdevs[0], nic[i].name, mtu,
                mtu >= 2048 + 128   ? 2048u
                : mtu >= 1024 + 128 ? 1024u
                                    : 512u);
        else
            hrd_find(f, HRD_PASS, NULL, NULL, "%s of %s has MTU %ld", netdevs[0], nic[i].name, mtu);
    }
    if (f->evidence[0] == 0)
        hrd_find(f, HRD_SKIP, NULL, NULL, "there is no RoCE device with a network interface");
}

/* "mlx5_0 hca_handle=2 hca_object=2000" */
static long cgroup_limit(const char *text, const char *device, const char *key)
{
    char copy[2048], *save = NULL;
    size_t n = strlen(device), k = strlen(key);
    snprintf(copy, sizeof(copy), "%s", text);
    for (char *line = strtok_r(copy, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (strncmp(line, device, n) != 0 || line[n] != ' ')
            continue;
        const char *at = strstr(line + n, key);
        if (at && at[k] == '=' && at[k + 1] != 'm')
            return strtol(at + k + 1, NULL, 10);
    }
    return -1;
}

void hrd_check_rdma_cgroup(const struct hrd_machine *m, struct hrd_finding *f)
{
    struct hrd_nic nic[HRD_MAX_NICS];
    char group[512], text[2048];
    unsigned n, limits = 0;
    /* A link: a domain, a completion queue, a channel, its queue pairs and some memory regions. */
    long per_link = 8 + m->cfg->verbs_queue_pairs, need = 16 * per_link;
    if (!devices(m, f, nic, &n))
        return;
    if (!hrd_machine_line(m, "/proc/self/cgroup", "0::", group, sizeof(group))) {
        hrd_find(f, HRD_SKIP, NULL, NULL, "control groups of version 2 are not in use");
        return;
    }
    for (char *slash; (slash = strrchr(group, '/')) != NULL; *slash = 0) {
        if (slash[1] == 0 || !hrd_machine_text(m, text, sizeof(text), "/sys/fs/cgroup%s/rdma.max", group))
            continue;
        for (unsigned i = 0; i < n; i++) {
            long objects = cgroup_limit(text, nic[i].name, "hca_object");
            limits += objects >= 0;
            if (objects >= 0 && objects < need)
                hrd_find(f, bad(m),
                         "each peer takes a dozen objects of the device; when they run out, links to further "
                         "nodes are "
                         "refused and fall back to tcp",
                         "Raise the limit: write to rdma.max of that group, or remove it.",
                         "rdma.max of %s allows %ld objects of %s, about %ld nodes", group, objects,
                         nic[i].name, objects / per_link);
        }
    }
    if (f->verdict == HRD_SKIP)
        hrd_find(f, HRD_PASS, NULL, NULL,
                 limits ? "the limits of the control group are high enough" : "no limit of a control group");
}
