/* SPDX-License-Identifier: MIT */
/* The devices that several checks look at. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/doctor/doctor.h"
#include "daemon/verbs/device.h"

#define MAX_PCI 512

bool hrd_wants_rdma(const struct hrd_machine *m)
{
    return m->cfg->transport != 1;
}

bool hrd_needs_rdma(const struct hrd_machine *m)
{
    return m->cfg->transport == 2 || (m->cfg->require & HRP_REQUIRE_VERBS) != 0;
}

static unsigned long hex_file(const struct hrd_machine *m, const char *pci, const char *file)
{
    char text[32];
    if (!hrd_machine_text(m, text, sizeof(text), "/sys/bus/pci/devices/%s/%s", pci, file))
        return 0;
    return strtoul(text, NULL, 16);
}

/* InfiniBand controllers, and NVIDIA's (Mellanox's) Ethernet ones, all of which speak RoCE. */
bool hrd_machine_rdma_hardware(const struct hrd_machine *m, char *pci, size_t len)
{
    static const unsigned long infiniband = 0x0207, ethernet = 0x0200, mellanox = 0x15b3;
    char(*names)[HRD_MACHINE_NAME] = calloc(MAX_PCI, sizeof(*names));
    unsigned n = names ? hrd_machine_list(m, "/sys/bus/pci/devices", names, MAX_PCI) : 0;
    bool found = false;
    pci[0] = 0;
    for (unsigned i = 0; i < n && !found; i++) {
        unsigned long class = hex_file(m, names[i], "class") >> 8;
        found = class == infiniband || (class == ethernet && hex_file(m, names[i], "vendor") == mellanox);
        if (found)
            snprintf(pci, len, "%s", names[i]);
    }
    free(names);
    return found;
}

unsigned hrd_machine_gpus(const struct hrd_machine *m, char (*out)[HRD_MACHINE_NAME], unsigned max)
{
    char(*names)[HRD_MACHINE_NAME] = calloc(MAX_PCI, sizeof(*names));
    unsigned n = names ? hrd_machine_list(m, "/sys/bus/pci/devices", names, MAX_PCI) : 0, found = 0;
    for (unsigned i = 0; i < n && found < max; i++)
        if (hex_file(m, names[i], "vendor") == 0x10de && hex_file(m, names[i], "class") >> 16 == 0x03)
            memcpy(out[found++], names[i], sizeof(names[i]));
    free(names);
    return found;
}

bool hrd_machine_has_gpu(const struct hrd_machine *m, struct hrd_finding *f)
{
    char gpu[1][HRD_MACHINE_NAME];
    if (hrd_machine_gpus(m, gpu, 1) > 0)
        return true;
    hrd_find(f, HRD_SKIP, NULL, NULL, "this machine has no NVIDIA GPU");
    return false;
}

bool hrd_machine_own(const struct hrd_machine *m, struct hrd_net *net, char *netif, size_t len)
{
    char err[256];
    netif[0] = 0;
    if (hrd_netif_choose(m->cfg, m->ifs, m->nifs, net, err, sizeof(err)) != 0 || net->nown == 0)
        return false;
    snprintf(netif, len, "%s", hrd_netif_name_of(m->ifs, m->nifs, &net->own[0]));
    return netif[0] != 0;
}

bool hrd_machine_rdma(const struct hrd_machine *m, unsigned rail, struct hrd_verbs_device *dev, char *why,
                      size_t len)
{
    struct hrd_verbs_want want = hrd_verbs_want_of(m->cfg, rail);
    struct hrd_net net;
    char netif[IFNAMSIZ];
    if (rail == 0 && hrd_machine_own(m, &net, netif, sizeof(netif)) && !net.local_only) {
        want.addr = net.own;
        want.naddrs = net.nown;
    }
    if (!m->verbs)
        snprintf(why, len, "%s", m->verbs_why);
    return m->verbs && hrd_verbs_choose(m->verbs, &want, dev, why, len) == 0;
}

unsigned hrd_machine_port(const struct hrd_machine *m, const struct hrd_nic *nic)
{
    char state[64];
    for (unsigned i = 0; i < hrd_verbs_rails(m->cfg); i++) {
        struct hrd_verbs_want want = hrd_verbs_want_of(m->cfg, i);
        bool its = strcmp(want.device, "auto") == 0 || strcmp(want.device, nic->name) == 0;
        if (its && want.port != HRD_VERBS_AUTO)
            return want.port;
    }
    for (unsigned port = 1; hrd_machine_text(m, state, sizeof(state), "%s/ports/%u/state", nic->base, port);
         port++)
        if (strstr(state, "ACTIVE"))
            return port;
    return 1;
}

/* "100 Gb/sec (4X EDR)" */
static unsigned rdma_mbit(const struct hrd_machine *m, const char *name)
{
    char text[64];
    unsigned best = 0;
    for (unsigned port = 1; port <= 4; port++) {
        if (!hrd_machine_text(m, text, sizeof(text), "/sys/class/infiniband/%s/ports/%u/rate", name, port))
            break;
        double gbit = strtod(text, NULL);
        if (gbit * 1000 > best)
            best = (unsigned)(gbit * 1000);
    }
    return best;
}

unsigned hrd_machine_nics(const struct hrd_machine *m, struct hrd_nic *out)
{
    char names[HRD_MAX_NICS][HRD_MACHINE_NAME], netif[IFNAMSIZ];
    struct hrd_net net;
    unsigned n = 0;
    unsigned found =
        hrd_wants_rdma(m) ? hrd_machine_list(m, "/sys/class/infiniband", names, HRD_MAX_NICS - 1) : 0;
    for (unsigned i = 0; i < found; i++) {
        if (!hrd_verbs_named(m->cfg, names[i]))
            continue;
        struct hrd_nic *d = &out[n++];
        *d = (struct hrd_nic){.rdma = true, .mbit = rdma_mbit(m, names[i])};
        memcpy(d->name, names[i], sizeof(d->name));
        snprintf(d->base, sizeof(d->base), "/sys/class/infiniband/%.63s", names[i]);
    }
    if (hrd_machine_own(m, &net, netif, sizeof(netif)) && !hrd_addr_is_loopback(&net.own[0])) {
        struct hrd_nic *d = &out[n++];
        *d = (struct hrd_nic){.rdma = false, .mbit = m->netif_mbit(netif, false)};
        snprintf(d->name, sizeof(d->name), "%s", netif);
        snprintf(d->base, sizeof(d->base), "/sys/class/net/%s", netif);
    }
    return n;
}
