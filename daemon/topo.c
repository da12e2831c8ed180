/* SPDX-License-Identifier: MIT */
#include "daemon/topo.h"

#include <errno.h>
#include <hwloc.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define VENDOR_NVIDIA 0x10de
#define CLASS_DISPLAY 0x03 /* high byte of the PCI class */
#define CLASS_NETWORK 0x02

struct hrd_topo {
    hwloc_topology_t hw;
    unsigned n, ngpus;
    struct hrd_topo_device dev[HRD_TOPO_DEVICES];
    hwloc_obj_t obj[HRD_TOPO_DEVICES];
    unsigned char nvlinks[HRD_TOPO_DEVICES][HRD_TOPO_DEVICES];
};

/* ---- finding devices -------------------------------------------------------------------------------------- */

static bool is_osdev(hwloc_obj_t o, hwloc_obj_osdev_type_t type)
{
    return o->type == HWLOC_OBJ_OS_DEVICE && o->attr->osdev.type == type && o->name;
}

/* Names of the devices that drivers made of a PCI device, below it at any depth. */
static void os_names(hwloc_obj_t pci, struct hrd_topo_device *d)
{
    for (hwloc_obj_t o = pci->io_first_child; o; o = o->next_sibling) {
        os_names(o, d);
        if (is_osdev(o, HWLOC_OBJ_OSDEV_OPENFABRICS)) {
            d->infiniband = true;
            snprintf(d->name, sizeof(d->name), "%s", o->name);
        } else if (is_osdev(o, HWLOC_OBJ_OSDEV_NETWORK)) {
            size_t at = strlen(d->netif);
            snprintf(d->netif + at, sizeof(d->netif) - at, "%s%s", at ? "," : "", o->name);
        }
    }
}

/* -1: attached to the whole of a machine that has several nodes, which is how hwloc says that it does not know. */
static int numa_of(hwloc_topology_t hw, hwloc_obj_t o)
{
    hwloc_obj_t place = hwloc_get_non_io_ancestor_obj(hw, o);
    int nodes = hwloc_get_nbobjs_by_type(hw, HWLOC_OBJ_NUMANODE);
    if (nodes > 1 && place->depth == 0)
        return -1;
    return place->nodeset ? hwloc_bitmap_first(place->nodeset) : 0;
}

static void pci_text(hwloc_obj_t o, char *buf, size_t len)
{
    const struct hwloc_pcidev_attr_s *p = &o->attr->pcidev;
    snprintf(buf, len, "%04x:%02x:%02x.%x", p->domain, p->bus, p->dev, p->func);
}

static bool describe(struct hrd_topo *t, hwloc_obj_t o, bool gpu)
{
    const struct hwloc_pcidev_attr_s *p = &o->attr->pcidev;
    struct hrd_topo_device d = {.gpu = gpu, .numa = numa_of(t->hw, o)};
    bool is_gpu = p->class_id >> 8 == CLASS_DISPLAY && p->vendor_id == VENDOR_NVIDIA;
    os_names(o, &d);
    bool is_nic = !is_gpu && (p->class_id >> 8 == CLASS_NETWORK || d.infiniband || d.netif[0]);
    if (gpu ? !is_gpu : !is_nic)
        return true;
    if (t->n == HRD_TOPO_DEVICES)
        return false;
    pci_text(o, d.pci, sizeof(d.pci));
    if (gpu)
        snprintf(d.name, sizeof(d.name), "GPU%u", t->n);
    else if (!d.name[0])
        snprintf(d.name, sizeof(d.name), "%s", d.netif[0] ? d.netif : d.pci);
    t->dev[t->n] = d;
    t->obj[t->n++] = o;
    return true;
}

static unsigned long address_of(hwloc_obj_t o)
{
    const struct hwloc_pcidev_attr_s *p = &o->attr->pcidev;
    return (unsigned long)p->domain << 16 | (unsigned long)p->bus << 8 | (unsigned long)p->dev << 3 | p->func;
}

/* The next PCI device in the order of addresses: hwloc's own order is that of its tree. */
static hwloc_obj_t next_pci(hwloc_topology_t hw, hwloc_obj_t after)
{
    hwloc_obj_t best = NULL;
    for (hwloc_obj_t o = hwloc_get_next_pcidev(hw, NULL); o; o = hwloc_get_next_pcidev(hw, o))
        if ((!after || address_of(o) > address_of(after)) && (!best || address_of(o) < address_of(best)))
            best = o;
    return best;
}

static int collect(struct hrd_topo *t, char *why, size_t len)
{
    for (int pass = 0; pass < 2; pass++) {
        for (hwloc_obj_t o = next_pci(t->hw, NULL); o; o = next_pci(t->hw, o))
            if (!describe(t, o, pass == 0)) {
                snprintf(why, len, "this machine has more than %d GPUs and NICs", HRD_TOPO_DEVICES);
                return -E2BIG;
            }
        if (pass == 0)
            t->ngpus = t->n;
    }
    return 0;
}

/* Plugins of hwloc that are not wanted: they start drivers (a context on every GPU, a connection to an X server), or read
   the PCI devices once more than Linux's own part does and leave the list of their names behind at every look. */
static void leave_out_plugins(hwloc_topology_t hw)
{
    static const char *const plugin[] = {"pci", "opencl", "gl", "cuda", "nvml", "rsmi", "levelzero"};
    for (size_t i = 0; i < sizeof(plugin) / sizeof(plugin[0]); i++)
        hwloc_topology_set_components(hw, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, plugin[i]);
}

/* Every GPU has a thread that asks how far the NICs are. hwloc's topologies are independent, but libudev, which it
   asks for names, has a seed of its hash tables that all threads share and set without a lock. */
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

int hrd_topo_load(struct hrd_topo **out, const char *xml, char *why, size_t len)
{
    struct hrd_topo *t = calloc(1, sizeof(*t));
    if (!t || hwloc_topology_init(&t->hw) != 0) {
        free(t);
        snprintf(why, len, "out of memory for the topology");
        return -ENOMEM;
    }
    int r = 0;
    if (xml && hwloc_topology_set_xml(t->hw, xml) != 0) {
        r = errno ? -errno : -EINVAL;
        snprintf(why, len, "%s is no topology that hwloc can read (%s)", xml, strerror(-r));
    } else {
        leave_out_plugins(t->hw);
        hwloc_topology_set_io_types_filter(t->hw, HWLOC_TYPE_FILTER_KEEP_ALL);
        pthread_mutex_lock(&loading);
        int loaded = hwloc_topology_load(t->hw);
        int err = errno;
        pthread_mutex_unlock(&loading);
        errno = err;
        if (loaded != 0) {
            r = errno ? -errno : -EINVAL;
            snprintf(why, len, "hwloc cannot read the topology of %s (%s)", xml ? xml : "this machine",
                     strerror(-r));
        }
    }
    if (r == 0)
        r = collect(t, why, len);
    if (r != 0) {
        hrd_topo_free(t);
        return r;
    }
    *out = t;
    return 0;
}

void hrd_topo_free(struct hrd_topo *t)
{
    if (!t)
        return;
    hwloc_topology_destroy(t->hw);
    free(t);
}

unsigned hrd_topo_count(const struct hrd_topo *t)
{
    return t->n;
}

const struct hrd_topo_device *hrd_topo_device(const struct hrd_topo *t, unsigned i)
{
    return &t->dev[i];
}

/* "3B:00.0", "0000:3b:00.0" and the driver's "00000000:3B:00.0" are one address. */
static bool pci_number(const char *text, unsigned long *out)
{
    unsigned long part[4] = {0};
    unsigned n = 0;
    const char *at = text;
    for (char *end; n < 4; at = end + 1, n++) {
        part[n] = strtoul(at, &end, 16);
        if (end == at)
            return false;
        if (*end == 0)
            break;
        if (*end != (n > 0 && strchr(end, ':') == NULL ? '.' : ':'))
            return false;
    }
    if (n != 2 && n != 3) /* bus:device.function with or without a domain before them */
        return false;
    const unsigned long *low = part + n - 2;
    *out = (n == 3 ? part[0] << 16 : 0) | low[0] << 8 | low[1] << 3 | low[2];
    return true;
}

static bool same_pci(const char *a, const char *b)
{
    unsigned long na, nb;
    return pci_number(a, &na) && pci_number(b, &nb) && na == nb;
}

static bool in_list(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = list; n > 0 && (at = strstr(at, name)) != NULL; at++)
        if ((at == list || at[-1] == ',') && (at[n] == 0 || at[n] == ','))
            return true;
    return false;
}

unsigned hrd_topo_find(const struct hrd_topo *t, const char *what)
{
    for (unsigned i = 0; i < t->n; i++)
        if (strcasecmp(t->dev[i].name, what) == 0 || in_list(t->dev[i].netif, what) ||
            same_pci(t->dev[i].pci, what))
            return i;
    return HRD_TOPO_NONE;
}

/* ---- relations -------------------------------------------------------------------------------------------- */

static bool is_pci_bridge(hwloc_obj_t o)
{
    return o->type == HWLOC_OBJ_BRIDGE && o->attr->bridge.upstream_type == HWLOC_OBJ_BRIDGE_PCI;
}

/* PCI bridges strictly between o and its ancestor top. A switch is two of them on the way up: the port that o hangs on,
   and the port towards the root. */
static unsigned bridges_below(hwloc_obj_t o, hwloc_obj_t top)
{
    unsigned n = 0;
    for (o = o->parent; o && o != top; o = o->parent)
        n += is_pci_bridge(o);
    return n;
}

static hwloc_obj_t common(hwloc_obj_t a, hwloc_obj_t b)
{
    for (; a; a = a->parent)
        for (hwloc_obj_t o = b; o; o = o->parent)
            if (o == a)
                return a;
    return NULL;
}

static enum hrd_topo_class classify(const struct hrd_topo *t, hwloc_obj_t a, hwloc_obj_t b)
{
    if (a == b)
        return HRD_TOPO_SELF;
    hwloc_obj_t top = common(a, b);
    if (top->type == HWLOC_OBJ_BRIDGE || top->type == HWLOC_OBJ_PCI_DEVICE) {
        if (!is_pci_bridge(top))
            return HRD_TOPO_PHB; /* the two meet at the host bridge */
        return bridges_below(a, top) <= 1 && bridges_below(b, top) <= 1 ? HRD_TOPO_PIX : HRD_TOPO_PXB;
    }
    int na = numa_of(t->hw, a), nb = numa_of(t->hw, b);
    /* Unknown is taken for far: what is far goes through host memory, which always works. */
    return na >= 0 && na == nb ? HRD_TOPO_NODE : HRD_TOPO_SYS;
}

struct hrd_topo_relation hrd_topo_between(const struct hrd_topo *t, unsigned a, unsigned b)
{
    struct hrd_topo_relation r = {.cls = classify(t, t->obj[a], t->obj[b]), .nvlinks = t->nvlinks[a][b]};
    if (r.nvlinks > 0 && a != b)
        r.cls = HRD_TOPO_NV;
    return r;
}

void hrd_topo_set_nvlinks(struct hrd_topo *t, unsigned a, unsigned b, unsigned links)
{
    t->nvlinks[a][b] = t->nvlinks[b][a] = (unsigned char)links;
}

const char *hrd_topo_name(struct hrd_topo_relation r, char *buf, size_t len)
{
    if (r.cls == HRD_TOPO_NV)
        snprintf(buf, len, "NV%u", r.nvlinks);
    else
        snprintf(buf, len, "%s", hrd_topo_class_name(r.cls));
    return buf;
}

const char *hrd_topo_class_name(enum hrd_topo_class cls)
{
    static const char *const names[] = {"X", "NV#", "PIX", "PXB", "PHB", "NODE", "SYS"};
    return names[cls];
}

const char *hrd_topo_words(enum hrd_topo_class cls)
{
    static const char *const words[] = {"the same device",
                                        "NVLink",
                                        "at most one PCIe switch",
                                        "several PCIe switches, no host bridge",
                                        "a PCIe host bridge of the processor",
                                        "several host bridges of one NUMA node",
                                        "the link between NUMA nodes"};
    return words[cls];
}

/* ---- which NIC -------------------------------------------------------------------------------------------- */

/* Whether NIC x is the better one for the GPU; used: GPUs that each NIC has already. */
static bool better(const struct hrd_topo *t, unsigned gpu, const unsigned *used, unsigned x, unsigned y)
{
    enum hrd_topo_class cx = hrd_topo_between(t, gpu, x).cls, cy = hrd_topo_between(t, gpu, y).cls;
    if (cx != cy)
        return cx < cy;
    if (t->dev[x].infiniband != t->dev[y].infiniband)
        return t->dev[x].infiniband;
    return used[x] < used[y];
}

/* Which NICs can carry anything fast: where there are RDMA devices, those. */
static bool candidate(const struct hrd_topo *t, unsigned nic)
{
    bool any = false;
    for (unsigned i = t->ngpus; i < t->n; i++)
        any = any || t->dev[i].infiniband;
    return !any || t->dev[nic].infiniband;
}

static unsigned nearest(const struct hrd_topo *t, unsigned gpu, unsigned *ties)
{
    unsigned used[HRD_TOPO_DEVICES] = {0}, best = HRD_TOPO_NONE;
    for (unsigned g = 0; g <= gpu; g++) {
        best = HRD_TOPO_NONE;
        for (unsigned i = t->ngpus; i < t->n; i++)
            if (candidate(t, i) && (best == HRD_TOPO_NONE || better(t, g, used, i, best)))
                best = i;
        if (best == HRD_TOPO_NONE)
            return best;
        used[best]++;
    }
    *ties = 0;
    for (unsigned i = t->ngpus; i < t->n; i++)
        *ties += candidate(t, i) && i != best &&
                 hrd_topo_between(t, gpu, i).cls == hrd_topo_between(t, gpu, best).cls;
    return best;
}

unsigned hrd_topo_nic_for(const struct hrd_topo *t, unsigned gpu, const char *only, char *why, size_t len)
{
    char name[16], other[16];
    unsigned ties = 0, near = nearest(t, gpu, &ties);
    if (near == HRD_TOPO_NONE) {
        snprintf(why, len, "this machine has no NIC on PCIe");
        return near;
    }
    struct hrd_topo_relation rn = hrd_topo_between(t, gpu, near);
    hrd_topo_name(rn, name, sizeof(name));
    if (!only) {
        snprintf(why, len, "%s: %s%s", name, hrd_topo_words(rn.cls),
                 ties ? "; equally near ones are shared out among the GPUs" : "");
        return near;
    }
    unsigned i = hrd_topo_find(t, only);
    if (i == HRD_TOPO_NONE || i < t->ngpus) {
        snprintf(why, len, "%s is no NIC of this machine's PCIe tree", only);
        return HRD_TOPO_NONE;
    }
    struct hrd_topo_relation r = hrd_topo_between(t, gpu, i);
    hrd_topo_name(r, other, sizeof(other));
    if (r.cls > rn.cls)
        snprintf(why, len, "%s: %s; the one NIC that the daemon uses, though %s is nearer (%s)", other,
                 hrd_topo_words(r.cls), t->dev[near].name, name);
    else
        snprintf(why, len, "%s: %s; the one NIC that the daemon uses", other, hrd_topo_words(r.cls));
    return i;
}
