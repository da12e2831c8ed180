/* SPDX-License-Identifier: MIT */
/* hreducectl topo: the matrix of GPUs and NICs, and the NIC of each GPU. Needs no daemon. */
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "daemon/ctl/ctl.h"
#include "daemon/text.h"
#include "daemon/topo.h"
#include "proto/wire.h"

static const char *class_between(const struct hrd_topo *t, unsigned a, unsigned b)
{
    char name[16];
    return ctl_format("%s", hrd_topo_name(hrd_topo_between(t, a, b), name, sizeof(name)));
}

/* ---- as JSON ---------------------------------------------------------------------------------------------- */

static json_t *devices_json(const struct hrd_topo *t)
{
    json_t *list = json_array();
    for (unsigned i = 0; i < hrd_topo_count(t); i++) {
        const struct hrd_topo_device *d = hrd_topo_device(t, i);
        json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s, s:b, s:i}", "name", d->name, "kind",
                                              d->gpu ? "gpu" : "nic", "pci", d->pci, "interface", d->netif,
                                              "rdma", d->infiniband, "numa_node", d->numa));
    }
    return list;
}

static json_t *matrix_json(const struct hrd_topo *t)
{
    json_t *rows = json_array();
    for (unsigned i = 0; i < hrd_topo_count(t); i++) {
        json_t *row = json_array();
        for (unsigned k = 0; k < hrd_topo_count(t); k++)
            json_array_append_new(row, json_string(class_between(t, i, k)));
        json_array_append_new(rows, row);
    }
    return rows;
}

static json_t *nics_json(const struct hrd_topo *t, const char *only)
{
    json_t *list = json_array();
    char why[256];
    for (unsigned i = 0; i < hrd_topo_count(t) && hrd_topo_device(t, i)->gpu; i++) {
        unsigned nic = hrd_topo_nic_for(t, i, only, why, sizeof(why));
        json_array_append_new(list, json_pack("{s:s, s:s?, s:s}", "gpu", hrd_topo_device(t, i)->name, "nic",
                                              nic == HRD_TOPO_NONE ? NULL : hrd_topo_device(t, nic)->name,
                                              "reason", why));
    }
    return list;
}

/* ---- for people ------------------------------------------------------------------------------------------- */

static void print_matrix(const struct hrd_topo *t)
{
    const char *heading[CTL_MAX_COLUMNS] = {""}, *row[CTL_MAX_COLUMNS];
    struct ctl_table table;
    unsigned n = hrd_topo_count(t);
    for (unsigned i = 0; i < n; i++)
        heading[i + 1] = hrd_topo_device(t, i)->name;
    heading[n + 1] = "NUMA node";
    heading[n + 2] = "PCI address";
    ctl_table_begin(&table, n + 3, heading);
    for (unsigned i = 0; i < n; i++) {
        const struct hrd_topo_device *d = hrd_topo_device(t, i);
        char cell[HRD_TOPO_DEVICES][16];
        row[0] = d->name;
        for (unsigned k = 0; k < n; k++)
            row[k + 1] = hrd_topo_name(hrd_topo_between(t, i, k), cell[k], sizeof(cell[k]));
        row[n + 1] = d->numa < 0 ? "unknown" : ctl_count(d->numa);
        row[n + 2] = d->pci;
        ctl_table_row(&table, row);
    }
    ctl_table_end(&table, 2);
}

static void print_legend(const struct hrd_topo *t)
{
    bool seen[HRD_TOPO_SYS + 1] = {false};
    for (unsigned i = 0; i < hrd_topo_count(t); i++)
        for (unsigned k = 0; k < i; k++)
            seen[hrd_topo_between(t, i, k).cls] = true;
    putchar('\n');
    for (int c = HRD_TOPO_NV; c <= HRD_TOPO_SYS; c++)
        if (seen[c])
            printf("  %-5s %s\n", hrd_topo_class_name((enum hrd_topo_class)c),
                   hrd_topo_words((enum hrd_topo_class)c));
}

static void print_nics(const struct hrd_topo *t, const char *only)
{
    static const char *const heading[] = {"GPU", "NIC", "why"};
    struct ctl_table table;
    char why[256];
    if (only)
        printf("\nthe NIC of each GPU (the daemon uses %s)\n", only);
    else
        printf("\nthe nearest NIC of each GPU\n");
    ctl_table_begin(&table, 3, heading);
    for (unsigned i = 0; i < hrd_topo_count(t) && hrd_topo_device(t, i)->gpu; i++) {
        unsigned nic = hrd_topo_nic_for(t, i, only, why, sizeof(why));
        const char *row[] = {hrd_topo_device(t, i)->name,
                             nic == HRD_TOPO_NONE ? "none" : hrd_topo_device(t, nic)->name, why};
        ctl_table_row(&table, row);
    }
    ctl_table_end(&table, 2);
}

static void print_topo(const struct hrd_topo *t, const char *only, const char *rails, const char *nvlink)
{
    unsigned n = hrd_topo_count(t);
    if (n == 0) {
        printf("this machine has no NVIDIA GPU and no NIC on PCIe\n");
        return;
    }
    print_matrix(t);
    print_legend(t);
    if (nvlink[0])
        printf("\n%s\n", nvlink);
    if (hrd_topo_device(t, 0)->gpu)
        print_nics(t, only);
    else
        printf("\nthis machine has no NVIDIA GPU\n");
    if (rails[0])
        printf("\nrails of links with other nodes: %s; blocks in host memory go over all, memory of GPUs "
               "over the first\n",
               rails);
}

/* The NIC that this node's daemon uses, where one runs; "" when it cannot be asked or uses none. rails: all, where it uses
   several. */
static void ask_daemon(const struct ctl_options *o, char *nic, size_t len, char *rails, size_t room)
{
    json_t *doc = NULL, *list, *name;
    size_t i;
    nic[0] = rails[0] = 0;
    ctl_mute(true);
    if (ctl_ask_once(o->socket, HRP_MSG_STATUS, &doc) == CTL_OK)
        snprintf(nic, len, "%s", ctl_str(json_object_get(doc, "peer_port"), "nic", ""));
    list = json_object_get(json_object_get(doc, "peer_port"), "rails");
    if (json_array_size(list) > 1) {
        json_array_foreach(list, i, name)
        {
            hrd_text_list(rails, room, json_string_value(name));
        }
    }
    ctl_mute(false);
    json_decref(doc);
}

int ctl_topo(const struct ctl_options *o)
{
    struct hrd_topo *t = NULL;
    char why[512] = "", nic[64] = "", rails[300] = "";
    if (hrd_topo_load(&t, o->xml, why, sizeof(why)) != 0) {
        ctl_complain("%s", why);
        return CTL_FAILED;
    }
    if (!o->xml) {
        ask_daemon(o, nic, sizeof(nic), rails, sizeof(rails));
        if (hrd_topo_ask_nvml(t, why, sizeof(why)) == 0)
            why[0] = 0;
    }
    /* The daemon may use what has no place in the PCIe tree (loopback, soft-RoCE, a bond): that is no choice of a NIC. */
    unsigned at = nic[0] ? hrd_topo_find(t, nic) : HRD_TOPO_NONE;
    const char *only = at != HRD_TOPO_NONE && !hrd_topo_device(t, at)->gpu ? nic : NULL;
    if (o->json) {
        json_t *doc =
            json_pack("{s:i, s:o, s:o, s:o, s:s?}", "format", 1, "devices", devices_json(t), "matrix",
                      matrix_json(t), "nics", nics_json(t, only), "nvlink_unknown", why[0] ? why : NULL);
        json_dumpf(doc, stdout, JSON_INDENT(2));
        putchar('\n');
        json_decref(doc);
    } else {
        print_topo(t, only, rails, why);
    }
    hrd_topo_free(t);
    return CTL_OK;
}
