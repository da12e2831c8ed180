/* SPDX-License-Identifier: MIT */
/* The checks of a whole cluster: who differs from the others, who cannot be reached, which link is slow. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/doctor/facts.h"
#include "daemon/text.h"

/* Of what the slower of the two links can do. Below: something is wrong with that path; far below: it is useless. */
#define WARN_SHARE 0.6
#define FAIL_SHARE 0.3
/* Where nobody knows what the link can do, of what the best peer gets. */
#define ODD_SHARE 0.33
#define CLOCK_WARN_MS 1000.0

static void add(json_t *out, const char *name, struct hrd_finding *f)
{
    json_array_append_new(out, hrd_finding_json(name, "cluster", f));
}

static const char *str(const json_t *o, const char *key, const char *missing)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : missing;
}

/* ---- who differs -------------------------------------------------------------------------------------------- */

/* A value as text: of a member of the facts, or of one of its members ("net", "mtu"). False: that node has none. */
static bool value_of(const json_t *node, const char *part, const char *key, char *buf, size_t len)
{
    const json_t *facts = json_object_get(node, "facts");
    const json_t *v = json_object_get(part[0] ? json_object_get(facts, part) : facts, key);
    if (json_is_string(v))
        snprintf(buf, len, "%s", json_string_value(v));
    else if (json_is_integer(v))
        snprintf(buf, len, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
    else
        return false;
    return true;
}

struct ballot {
    unsigned n;
    struct {
        const char *name;
        char value[160];
    } node[]; /* as many as there are nodes */
};

static void vote(const json_t *nodes, const char *part, const char *key, struct ballot *b)
{
    const json_t *node;
    size_t i;
    b->n = 0;
    json_array_foreach(nodes, i, node)
    {
        char *value = b->node[b->n].value;
        if (!json_object_get(node, "facts"))
            continue;
        b->node[b->n].name = str(node, "name", "?");
        bool known = value_of(node, part, key, value, sizeof(b->node[0].value));
        /* An interface that does not say something does not differ; a device that is missing does. */
        if (strcmp(part, "net") == 0 && (!known || strcmp(value, "0") == 0))
            continue;
        if (!known)
            snprintf(value, sizeof(b->node[0].value), "none");
        b->n++;
    }
}

/* The value that most have, NULL when all have it or none has more than half. */
static const char *majority(const struct ballot *b, unsigned *votes)
{
    const char *best = NULL;
    *votes = 0;
    for (unsigned i = 0; i < b->n; i++) {
        unsigned same = 0;
        for (unsigned k = 0; k < b->n; k++)
            same += strcmp(b->node[i].value, b->node[k].value) == 0;
        if (same > *votes) {
            *votes = same;
            best = b->node[i].value;
        }
    }
    return *votes * 2 > b->n ? best : NULL;
}

/* "algorithm is ring on node3, auto on the other 3 nodes"; false: all agree. */
static bool differs(const json_t *nodes, const char *part, const char *key, const char *label, char *buf,
                    size_t len)
{
    struct ballot *b = malloc(sizeof(*b) + json_array_size(nodes) * sizeof(b->node[0]));
    unsigned votes = 0;
    buf[0] = 0;
    if (!b)
        abort();
    vote(nodes, part, key, b);
    const char *most = majority(b, &votes);
    if (votes < b->n) {
        hrd_text_add(buf, len, "%s is ", label);
        const char *sep = "";
        for (unsigned i = 0; i < b->n; i++) {
            if (most && strcmp(b->node[i].value, most) == 0)
                continue;
            hrd_text_add(buf, len, "%s%s on %s", sep, b->node[i].value, b->node[i].name);
            sep = ", ";
        }
        if (most)
            hrd_text_add(buf, len, ", %s on the other %u", most, votes);
    }
    free(b);
    return buf[0] != 0;
}

static const struct comparison {
    const char *check, *part, *key, *label;
    enum hrd_verdict verdict;
    const char *cause, *remedy;
} comparisons[] = {
    {"cluster-version", "", "version", "the version of hreduced", HRD_WARN,
     "nodes of different versions work together only as well as the older one can",
     "Install the same version on all nodes."},
    {"cluster-version", "", "protocol", "the protocol between daemons", HRD_WARN,
     "nodes of different versions work together only as well as the older one can",
     "Install the same version on all nodes."},
    {"cluster-kernel", "", "kernel", "the kernel", HRD_WARN,
     "most often harmless, but drivers and limits come with the kernel, and the node that differs is the "
     "first suspect "
     "when only it misbehaves",
     "Boot the same kernel on all nodes."},
    {"cluster-mtu", "net", "mtu", "the MTU", HRD_FAIL,
     "large packets of one node do not reach the other: small messages work, large ones hang until a time "
     "limit",
     "Set the same MTU on that interface of every node, and no less on the switches between them."},
    {"cluster-link", "net", "bytes_per_s", "the speed of the network link (bytes/s)", HRD_WARN,
     "the slowest node sets the pace of every operation",
     "See link-speed of that node; look at its cable and switch port."},
    {"cluster-rdma", "rdma", "link_layer", "the link layer of the RDMA device", HRD_WARN,
     "InfiniBand and RoCE cannot talk to each other: these nodes use tcp",
     "Set verbs_device to devices of one kind."},
    {"cluster-rdma", "rdma", "rate", "the rate of the RDMA port", HRD_WARN,
     "the slowest node sets the pace of every operation", "See rdma-rate of that node."},
    {"cluster-rdma", "rdma", "board", "the RDMA board", HRD_WARN,
     "different boards may differ in rate and features", "Expect the speed of the slower one."},
    {"cluster-rdma", "rdma", "firmware", "the firmware of the RDMA board", HRD_WARN,
     "most often harmless, but the node that differs is the first suspect when only it misbehaves",
     "Bring the boards to one firmware."},
    {"cluster-gpu", "gpu", "count", "the number of GPUs", HRD_WARN,
     "a GPU that is missing has fallen off the bus, or is hidden",
     "See nvidia-smi and the kernel log of that node."},
    {"cluster-gpu", "gpu", "driver", "the GPU driver", HRD_WARN,
     "most often harmless, but the node that differs is the first suspect when only it misbehaves",
     "Install the same driver on all nodes."},
};

static void compare(const json_t *nodes, json_t *out)
{
    enum { N = sizeof(comparisons) / sizeof(comparisons[0]) };
    char text[700];
    for (unsigned i = 0; i < N;) {
        const char *name = comparisons[i].check;
        struct hrd_finding f = {.verdict = HRD_SKIP};
        for (; i < N && strcmp(comparisons[i].check, name) == 0; i++) {
            const struct comparison *c = &comparisons[i];
            if (differs(nodes, c->part, c->key, c->label, text, sizeof(text)))
                hrd_find(&f, c->verdict, c->cause, c->remedy, "%s", text);
        }
        if (f.verdict == HRD_SKIP)
            hrd_find(&f, HRD_PASS, NULL, NULL, "all nodes agree");
        add(out, name, &f);
    }
}

/* Keys of every node's configuration. */
static void compare_configuration(const json_t *nodes, json_t *out)
{
    struct hrd_finding f = {.verdict = HRD_SKIP};
    const json_t *node;
    json_t *keys = json_object(), *value;
    const char *key;
    char text[700], label[128], part[] = "configuration";
    size_t i;
    json_array_foreach(nodes, i, node)
    {
        json_object_update_missing(keys, json_object_get(json_object_get(node, "facts"), part));
    }
    json_object_foreach(keys, key, value)
    {
        snprintf(label, sizeof(label), "%s", key);
        if (differs(nodes, part, key, label, text, sizeof(text)))
            hrd_find(&f, HRD_WARN,
                     "what the root of a communicator decides then depends on where its first rank happens "
                     "to run, and "
                     "what each node decides makes the nodes unequal",
                     "Use one hreduced.conf but for listen, interface, advertise, node_name and the device.",
                     "%s", text);
    }
    if (f.verdict == HRD_SKIP)
        hrd_find(&f, HRD_PASS, NULL, NULL, "all nodes agree");
    json_decref(keys);
    add(out, "cluster-configuration", &f);
}

/* ---- what the nodes said ------------------------------------------------------------------------------------ */

static void check_nodes(const json_t *nodes, json_t *out)
{
    struct hrd_finding f = {.verdict = HRD_SKIP};
    const json_t *node;
    size_t i;
    json_array_foreach(nodes, i, node)
    {
        const char *why = str(node, "failed", NULL);
        if (why)
            hrd_find(&f, HRD_FAIL, "nothing is known of it, and no communicator with it can be made",
                     "Start hreduced there; see 'listen' in its hreduced.conf, and whether a firewall stands "
                     "between.",
                     "%s: %s", str(node, "name", "?"), why);
    }
    if (f.verdict == HRD_SKIP)
        hrd_find(&f, json_array_size(nodes) > 1 ? HRD_PASS : HRD_SKIP, NULL, NULL,
                 json_array_size(nodes) > 1
                     ? "%zu nodes answered"
                     : "no other node is connected (%zu known): name them with --nodes",
                 json_array_size(nodes));
    add(out, "cluster-nodes", &f);
}

static void check_clocks(const json_t *nodes, json_t *out)
{
    struct hrd_finding f = {.verdict = HRD_SKIP};
    const json_t *node;
    size_t i;
    json_array_foreach(nodes, i, node)
    {
        if (!json_object_get(node, "clock_offset_ms"))
            continue;
        double off = json_number_value(json_object_get(node, "clock_offset_ms"));
        double error = json_number_value(json_object_get(node, "clock_error_ms"));
        bool bad = fabs(off) - error > CLOCK_WARN_MS;
        hrd_find(&f, bad ? HRD_WARN : HRD_PASS, "the log lines of the nodes cannot be put in order",
                 "Run chrony or systemd-timesyncd on all nodes.", "%s is %.1f ms (+-%.1f) %s",
                 str(node, "name", "?"), fabs(off), error, off < 0 ? "behind" : "ahead");
    }
    if (f.verdict == HRD_SKIP)
        hrd_find(&f, HRD_SKIP, NULL, NULL, "no other node was asked");
    add(out, "cluster-clock", &f);
}

static void check_reach(const json_t *reach, json_t *out)
{
    struct hrd_finding f = {.verdict = HRD_SKIP};
    const json_t *r, *other;
    size_t i, k, good = 0;
    json_array_foreach(reach, i, r)
    {
        bool some = false;
        if (json_is_true(json_object_get(r, "ok"))) {
            good++;
            continue;
        }
        json_array_foreach(reach, k, other)
        {
            some = some || (json_is_true(json_object_get(other, "ok")) &&
                            strcmp(str(other, "from", ""), str(r, "from", "")) == 0 &&
                            strcmp(str(other, "to", ""), str(r, "to", "")) == 0);
        }
        hrd_find(
            &f, some ? HRD_WARN : HRD_FAIL,
            some ? "the node tells others an address that does not work; each connection loses time on it"
                 : "either of two daemons may be the one that connects, so every pair must be open in both "
                   "directions",
            some ? "Set 'interface' or 'advertise' on the node that tells the address."
                 : "Open the daemon's port in the firewalls between them, and check 'listen' of the node "
                   "that is not "
                   "reached.",
            "from %s to %s at %s: %s", str(r, "from", "?"), str(r, "to", "?"), str(r, "address", "?"),
            str(r, "why", "?"));
    }
    if (f.verdict == HRD_SKIP)
        hrd_find(&f, good > 0 ? HRD_PASS : HRD_SKIP, NULL, NULL,
                 good > 0 ? "%zu connections in both directions were opened"
                          : "no other node was asked (%zu)",
                 good);
    add(out, "cluster-reach", &f);
}

/* ---- links -------------------------------------------------------------------------------------------------- */

static const json_t *node_of(const json_t *nodes, const char *name)
{
    const json_t *node;
    size_t i;
    json_array_foreach(nodes, i, node)
    {
        if (strcmp(str(node, "name", ""), name) == 0)
            return node;
    }
    return NULL;
}

/* Bytes a second that a node's link can do: as configured, or as the NIC says. 0: unknown. */
static double link_rate(const json_t *node, bool verbs)
{
    const json_t *facts = json_object_get(node, "facts");
    double told = (double)json_integer_value(json_object_get(facts, "bandwidth"));
    const json_t *nic = json_object_get(facts, verbs ? "rdma" : "net");
    return told > 0 ? told : (double)json_integer_value(json_object_get(nic, "bytes_per_s"));
}

static double nominal(const json_t *nodes, const json_t *probe)
{
    bool verbs = strcmp(str(probe, "transport", ""), "verbs") == 0;
    double a = link_rate(node_of(nodes, str(probe, "from", "")), verbs);
    double b = link_rate(node_of(nodes, str(probe, "to", "")), verbs);
    return a <= 0 || b <= 0 ? 0 : a < b ? a : b;
}

static double measured(const json_t *probe)
{
    return (double)json_integer_value(json_object_get(probe, "bytes_per_s"));
}

static void judge_probe(const json_t *nodes, const json_t *p, double best, struct hrd_finding *f)
{
    const char *from = str(p, "from", "?"), *to = str(p, "to", "?"), *why = str(p, "failed", NULL);
    if (why) {
        hrd_find(f, HRD_FAIL, "operations between these nodes fail or cannot be made",
                 "Put right what the evidence names; see cluster-reach.", "%s -> %s: %s", from, to, why);
        return;
    }
    double can = nominal(nodes, p), rate = measured(p);
    double share = can > 0 ? rate / can : best > 0 ? rate / best : 1;
    enum hrd_verdict v = can > 0             ? share < FAIL_SHARE   ? HRD_FAIL
                                               : share < WARN_SHARE ? HRD_WARN
                                                                    : HRD_PASS
                         : share < ODD_SHARE ? HRD_WARN
                                             : HRD_PASS;
    char against[96];
    if (can > 0)
        snprintf(against, sizeof(against), "%.0f%% of the link's %.2f GB/s", share * 100, can / 1e9);
    else
        snprintf(against, sizeof(against), "the link's rate is unknown; %.0f%% of the best here",
                 share * 100);
    hrd_find(f, v,
             strcmp(str(p, "transport", ""), "tcp") == 0 && can > 6e9
                 ? "tcp cannot fill a link this fast with one thread; verbs can"
                 : "that path is slower than its links: a bad cable or port, a limit (tc, switch), a busy "
                   "core, or other "
                   "traffic at this moment",
             "Repeat it on an idle cluster. Then see link-speed, rdma-rate, pcie-link and numa of the node "
             "that all slow "
             "lines have in common, and hreducectl path.",
             "%s -> %s: %.2f GB/s over %s (%s), %.0f us there and back, by %s", from, to, rate / 1e9,
             str(p, "transport", "?"), against, json_number_value(json_object_get(p, "round_trip_us")),
             str(p, "path", "?"));
}

/* One check a pair and direction, so that the slow one stands out. */
static void check_probes(const json_t *nodes, const json_t *probes, json_t *out)
{
    const json_t *p;
    double best = 0;
    size_t i;
    json_array_foreach(probes, i, p)
    {
        if (measured(p) > best)
            best = measured(p);
    }
    json_array_foreach(probes, i, p)
    {
        struct hrd_finding f = {.verdict = HRD_SKIP};
        judge_probe(nodes, p, best, &f);
        add(out, "cluster-rate", &f);
        json_t *last = json_array_get(out, json_array_size(out) - 1);
        json_object_set_new(last, "from", json_string(str(p, "from", "?")));
        json_object_set_new(last, "to", json_string(str(p, "to", "?")));
    }
}

json_t *hrd_doctor_cluster(const json_t *doc)
{
    json_t *out = json_array();
    const json_t *nodes = json_object_get(doc, "nodes");
    check_nodes(nodes, out);
    compare_configuration(nodes, out);
    compare(nodes, out);
    check_clocks(nodes, out);
    check_reach(json_object_get(doc, "reach"), out);
    check_probes(nodes, json_object_get(doc, "probes"), out);
    return out;
}
