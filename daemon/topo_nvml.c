/* SPDX-License-Identifier: MIT */
/* NVLinks, from NVML. */
#include <errno.h>
#include <stdio.h>

#include "daemon/nvml.h"
#include "daemon/topo.h"

#define NVML_LINKS 18u    /* of one GPU, at most */
#define NVML_REMOTE_GPU 0 /* what a link leads to */
#define NVML_REMOTE_SWITCH 2

/* Links of one GPU: to[j] those that lead to GPU j itself; returns how many lead to a switch. */
static unsigned links_of(const struct hrd_nvml *n, const struct hrd_topo *t, unsigned gpu, unsigned *to)
{
    hrd_nvml_device h;
    unsigned switched = 0;
    if (n->by_pci(hrd_topo_device(t, gpu)->pci, &h) != HRD_NVML_OK)
        return 0; /* not the driver's: bound to another, or hidden from this container */
    for (unsigned l = 0; l < NVML_LINKS; l++) {
        unsigned enabled = 0;
        int type = -1;
        struct hrd_nvml_pci pci = {{0}, 0, 0, 0, 0, 0, {0}};
        if (n->link_state(h, l, &enabled) != HRD_NVML_OK || enabled != HRD_NVML_ENABLED)
            continue;
        if (n->link_remote_type(h, l, &type) != HRD_NVML_OK)
            continue;
        switched += type == NVML_REMOTE_SWITCH;
        if (type != NVML_REMOTE_GPU || n->link_remote(h, l, &pci) != HRD_NVML_OK)
            continue;
        pci.id[sizeof(pci.id) - 1] = 0;
        unsigned j = hrd_topo_find(t, pci.id);
        if (j != HRD_TOPO_NONE)
            to[j]++;
    }
    return switched;
}

int hrd_topo_ask_nvml(struct hrd_topo *t, char *why, size_t len)
{
    struct hrd_nvml n;
    unsigned gpus = 0;
    char phrase[300];
    while (gpus < hrd_topo_count(t) && hrd_topo_device(t, gpus)->gpu)
        gpus++;
    if (gpus == 0)
        return 0;
    int r = hrd_nvml_open(&n, phrase, sizeof(phrase));
    if (r == 0 && (!n.link_state || !n.link_remote || !n.link_remote_type)) {
        snprintf(phrase, sizeof(phrase), "the driver is too old to say anything about NVLinks");
        hrd_nvml_close(&n);
        r = -EIO;
    }
    if (r != 0) {
        snprintf(why, len, "%s, so nothing is known of NVLinks", phrase);
        return r;
    }
    unsigned to[HRD_TOPO_DEVICES][HRD_TOPO_DEVICES] = {{0}}, switched[HRD_TOPO_DEVICES];
    for (unsigned i = 0; i < gpus; i++)
        switched[i] = links_of(&n, t, i, to[i]);
    /* A switch connects every GPU that has links to it with every other. */
    for (unsigned i = 0; i < gpus; i++)
        for (unsigned j = i + 1; j < gpus; j++)
            hrd_topo_set_nvlinks(t, i, j, to[i][j] + (switched[i] < switched[j] ? switched[i] : switched[j]));
    hrd_nvml_close(&n);
    return 0;
}
