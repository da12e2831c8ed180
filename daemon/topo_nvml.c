/* SPDX-License-Identifier: MIT */
/*
 * NVLinks, from NVML. Loaded at run time, because it belongs to the driver and exists only where that is installed; no
 * NVIDIA header is needed. HREDUCE_NVML_LIBRARY names another file (tests).
 */
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/topo.h"

#define NVML_OK 0
#define NVML_LINKS 18u    /* of one GPU, at most */
#define NVML_REMOTE_GPU 0 /* what a link leads to */
#define NVML_REMOTE_SWITCH 2
#define NVML_ENABLED 1

typedef struct nvml_device *nvml_handle;

/* nvmlPciInfo_t, as its first version to have the long address laid it out. */
struct nvml_pci {
    char short_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
};

struct nvml {
    void *lib;
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_pci)(const char *pci, nvml_handle *out);
    int (*link_state)(nvml_handle h, unsigned link, unsigned *enabled);
    int (*link_remote)(nvml_handle h, unsigned link, struct nvml_pci *out);
    int (*link_remote_type)(nvml_handle h, unsigned link, int *type);
    const char *(*error)(int code);
};

static int load(struct nvml *n, char *why, size_t len)
{
    const char *file = getenv("HREDUCE_NVML_LIBRARY");
    if (!file || !file[0])
        file = "libnvidia-ml.so.1";
    n->lib = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!n->lib) {
        snprintf(why, len,
                 "%s cannot be loaded: no NVIDIA driver is installed, so nothing is known of NVLinks", file);
        return -ENOENT;
    }
    const struct {
        const char *name;
        void *at;
    } symbols[] = {{"nvmlInit_v2", &n->init},
                   {"nvmlShutdown", &n->shutdown},
                   {"nvmlDeviceGetHandleByPciBusId_v2", &n->by_pci},
                   {"nvmlDeviceGetNvLinkState", &n->link_state},
                   {"nvmlDeviceGetNvLinkRemotePciInfo_v2", &n->link_remote},
                   {"nvmlDeviceGetNvLinkRemoteDeviceType", &n->link_remote_type},
                   {"nvmlErrorString", &n->error}};
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *symbol = dlsym(n->lib, symbols[i].name);
        if (!symbol) {
            snprintf(why, len, "%s has no %s: the driver is too old to say anything about NVLinks", file,
                     symbols[i].name);
            dlclose(n->lib);
            return -EIO;
        }
        memcpy(symbols[i].at, &symbol, sizeof(symbol));
    }
    int code = n->init();
    if (code == NVML_OK)
        return 0;
    snprintf(why, len, "NVML does not start (%s), so nothing is known of NVLinks", n->error(code));
    dlclose(n->lib);
    return -EIO;
}

/* Links of one GPU: to[j] those that lead to GPU j itself; returns how many lead to a switch. */
static unsigned links_of(const struct nvml *n, const struct hrd_topo *t, unsigned gpu, unsigned *to)
{
    nvml_handle h;
    unsigned switched = 0;
    if (n->by_pci(hrd_topo_device(t, gpu)->pci, &h) != NVML_OK)
        return 0; /* not the driver's: bound to another, or hidden from this container */
    for (unsigned l = 0; l < NVML_LINKS; l++) {
        unsigned enabled = 0;
        int type = -1;
        struct nvml_pci pci = {{0}, 0, 0, 0, 0, 0, {0}};
        if (n->link_state(h, l, &enabled) != NVML_OK || enabled != NVML_ENABLED)
            continue;
        if (n->link_remote_type(h, l, &type) != NVML_OK)
            continue;
        switched += type == NVML_REMOTE_SWITCH;
        if (type != NVML_REMOTE_GPU || n->link_remote(h, l, &pci) != NVML_OK)
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
    struct nvml n;
    unsigned gpus = 0;
    while (gpus < hrd_topo_count(t) && hrd_topo_device(t, gpus)->gpu)
        gpus++;
    if (gpus == 0)
        return 0;
    int r = load(&n, why, len);
    if (r != 0)
        return r;
    unsigned to[HRD_TOPO_DEVICES][HRD_TOPO_DEVICES] = {{0}}, switched[HRD_TOPO_DEVICES];
    for (unsigned i = 0; i < gpus; i++)
        switched[i] = links_of(&n, t, i, to[i]);
    /* A switch connects every GPU that has links to it with every other. */
    for (unsigned i = 0; i < gpus; i++)
        for (unsigned j = i + 1; j < gpus; j++)
            hrd_topo_set_nvlinks(t, i, j, to[i][j] + (switched[i] < switched[j] ? switched[i] : switched[j]));
    n.shutdown();
    dlclose(n.lib);
    return 0;
}
