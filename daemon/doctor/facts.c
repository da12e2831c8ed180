/* SPDX-License-Identifier: MIT */
#include "daemon/doctor/facts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/config_table.h"
#include "daemon/text.h"
#include "daemon/verbs/device.h"
#include "daemon/version.h"
#include "proto/peer.h"

/* What is a node's own: nobody wonders that it differs. */
static bool own_key(const char *name)
{
    static const char *const own[] = {"socket",    "listen",       "advertise",  "node_name",
                                      "interface", "verbs_device", "verbs_port", "verbs_gid_index"};
    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
        if (strcmp(own[i], name) == 0)
            return true;
    return false;
}

static json_t *config_json(const struct hrd_config *cfg)
{
    json_t *o = json_object();
    char value[1024];
    for (unsigned i = 0; i < hrd_nkeys; i++)
        if (!hrd_keys[i].section && !own_key(hrd_keys[i].name) &&
            hrd_config_get(cfg, hrd_keys[i].name, value, sizeof(value)))
            json_object_set_new(o, hrd_keys[i].name, json_string(value));
    return o;
}

static void set_text(json_t *o, const char *key, const struct hrd_machine *m, const char *base,
                     const char *file)
{
    char text[128];
    if (!hrd_machine_text(m, text, sizeof(text), "%s/%s", base, file))
        return;
    hrd_text_printable(text);
    json_object_set_new(o, key, json_string(text));
}

static json_t *net_json(const struct hrd_machine *m)
{
    struct hrd_net net;
    char netif[IFNAMSIZ] = "", addr[HRD_ADDR_TEXT] = "";
    json_t *o = json_object();
    if (!hrd_machine_own(m, &net, netif, sizeof(netif)) || hrd_addr_is_loopback(&net.own[0]))
        return o;
    unsigned mbit = m->netif_mbit(netif, false);
    json_object_set_new(o, "address", json_string(hrd_addr_text(&net.own[0], addr, sizeof(addr))));
    json_object_set_new(o, "interface", json_string(netif));
    json_object_set_new(o, "mtu", json_integer(m->netif_mtu(netif)));
    json_object_set_new(o, "bytes_per_s", json_integer((json_int_t)mbit * 125000));
    return o;
}

/* Of the device that links take; where none can be taken, of the first. */
static json_t *rdma_json(const struct hrd_machine *m)
{
    struct hrd_nic nic[HRD_MAX_NICS];
    struct hrd_verbs_device dev;
    char why[512], file[64];
    unsigned n = hrd_machine_nics(m, nic), at = 0;
    bool used = hrd_wants_rdma(m) && hrd_machine_rdma(m, 0, &dev, why, sizeof(why));
    json_t *o = json_object();
    while (at < n && !(nic[at].rdma && (!used || strcmp(nic[at].name, dev.name) == 0)))
        at++;
    if (at == n)
        return o;
    unsigned port = used ? dev.port : hrd_machine_port(m, &nic[at]);
    json_object_set_new(o, "device", json_string(nic[at].name));
    json_object_set_new(o, "bytes_per_s", json_integer((json_int_t)nic[at].mbit * 125000));
    snprintf(file, sizeof(file), "ports/%u/rate", port);
    set_text(o, "rate", m, nic[at].base, file);
    snprintf(file, sizeof(file), "ports/%u/link_layer", port);
    set_text(o, "link_layer", m, nic[at].base, file);
    set_text(o, "firmware", m, nic[at].base, "fw_ver");
    set_text(o, "board", m, nic[at].base, "board_id");
    return o;
}

static json_t *gpu_json(const struct hrd_machine *m)
{
    char gpu[32][HRD_MACHINE_NAME];
    json_t *o = json_object();
    json_object_set_new(o, "count", json_integer(hrd_machine_gpus(m, gpu, 32)));
    set_text(o, "driver", m, "/proc/driver/nvidia", "version");
    return o;
}

json_t *hrd_doctor_facts(const struct hrd_machine *m)
{
    json_t *o = json_object();
    char kernel[128] = "", protocol[16];
    (void)hrd_machine_text(m, kernel, sizeof(kernel), "/proc/sys/kernel/osrelease");
    snprintf(protocol, sizeof(protocol), "%u.%u", HRP_PEER_MAJOR, HRP_PEER_MINOR);
    json_object_set_new(o, "version", json_string(HRD_VERSION));
    json_object_set_new(o, "protocol", json_string(protocol));
    json_object_set_new(o, "kernel", json_string(kernel));
    json_object_set_new(o, "cores", json_integer(sysconf(_SC_NPROCESSORS_ONLN)));
    json_object_set_new(o, "configuration", config_json(m->cfg));
    json_object_set_new(o, "bandwidth", json_integer((json_int_t)m->cfg->bandwidth));
    json_object_set_new(o, "net", net_json(m));
    json_object_set_new(o, "rdma", rdma_json(m));
    json_object_set_new(o, "gpu", gpu_json(m));
    return o;
}
