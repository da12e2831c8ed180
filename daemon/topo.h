/* SPDX-License-Identifier: MIT */
/*
 * How this machine's GPUs and NICs are wired: PCIe and NUMA from hwloc, NVLink from NVML where it is installed. The
 * classes and their names are those of `nvidia-smi topo -m`. A topology is immutable once it is loaded; any thread may
 * read it.
 */
#ifndef HRD_TOPO_H
#define HRD_TOPO_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#define HRD_TOPO_DEVICES 64
#define HRD_TOPO_NONE UINT_MAX

/* From near to far. */
enum hrd_topo_class {
    HRD_TOPO_SELF, /* the same device */
    HRD_TOPO_NV,   /* NVLink */
    HRD_TOPO_PIX,  /* at most one PCIe switch */
    HRD_TOPO_PXB,  /* several PCIe switches, no host bridge */
    HRD_TOPO_PHB,  /* one PCIe host bridge: through the processor */
    HRD_TOPO_NODE, /* several host bridges of one NUMA node */
    HRD_TOPO_SYS,  /* between NUMA nodes */
};

struct hrd_topo_relation {
    enum hrd_topo_class cls;
    unsigned nvlinks; /* NV: how many */
};

struct hrd_topo_device {
    bool gpu;        /* or else a NIC */
    char name[48];   /* "GPU0" in the order of PCI addresses, as nvidia-smi numbers them; "mlx5_0", "eth0" */
    char pci[16];    /* "0000:3b:00.0" */
    char netif[48];  /* NIC: "ib0", "eth0"; several joined by a comma; "": none */
    int numa;        /* its NUMA node; -1: the firmware does not say */
    bool infiniband; /* NIC: an RDMA device (InfiniBand or RoCE) */
};

struct hrd_topo;

/*
 * Reads this machine, or (xml not NULL) a file that lstopo or hwloc wrote. 0 or negative errno with a sentence. Blocks
 * for tens of milliseconds. The result is the caller's.
 */
int hrd_topo_load(struct hrd_topo **out, const char *xml, char *why, size_t len);
void hrd_topo_free(struct hrd_topo *t);

/* GPUs first, then NICs; by PCI address in both. */
unsigned hrd_topo_count(const struct hrd_topo *t);
const struct hrd_topo_device *hrd_topo_device(const struct hrd_topo *t, unsigned i);
/* By name, netif or PCI address ("0000:3b:00.0", "3b:00.0", any case); HRD_TOPO_NONE: there is no such device. */
unsigned hrd_topo_find(const struct hrd_topo *t, const char *what);

/* Between two devices of the list. */
struct hrd_topo_relation hrd_topo_between(const struct hrd_topo *t, unsigned a, unsigned b);
/* Links between two GPUs, as NVML counts them. Before others read. */
void hrd_topo_set_nvlinks(struct hrd_topo *t, unsigned a, unsigned b, unsigned links);
/* Fills in all of them with NVML. 0, or -ENOENT (not installed: there is no NVIDIA driver) or -EIO with a sentence. */
int hrd_topo_ask_nvml(struct hrd_topo *t, char *why, size_t len);

/* "PIX", "NV18"; returns buf. */
const char *hrd_topo_name(struct hrd_topo_relation r, char *buf, size_t len);
/* "PIX", "NV#" */
const char *hrd_topo_class_name(enum hrd_topo_class cls);
/* What lies between two such devices: "at most one PCIe switch". */
const char *hrd_topo_words(enum hrd_topo_class cls);

/*
 * The NIC that data of GPU i should take, and why, in words. only: NULL, or the name of the one NIC that may be used.
 * Nearest first; among equals RDMA devices, then the one that fewer of the GPUs before i have, then the lower address:
 * a pure function of the topology. HRD_TOPO_NONE with the reason when there is none.
 */
unsigned hrd_topo_nic_for(const struct hrd_topo *t, unsigned gpu, const char *only, char *why, size_t len);

#endif
