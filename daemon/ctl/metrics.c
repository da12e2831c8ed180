/* SPDX-License-Identifier: MIT */
/*
 * hreducectl metrics: the daemon's counters in Prometheus's text format (version 0.0.4), for node_exporter's textfile
 * collector or anything else that can run a command. Counters are the daemon's since its start. What has a label exists
 * once a peer or a living communicator, so that the number of series is bounded however many jobs come and go.
 */
#include "daemon/ctl/ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/wire.h"

static void family(const char *name, const char *type, const char *help)
{
    printf("# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void single(const char *name, const char *type, const char *help, int64_t value)
{
    family(name, type, help);
    printf("%s %" PRId64 "\n", name, value);
}

/* A label's value; the format wants \, " and newlines escaped. */
static void print_label(const char *name, const char *value)
{
    printf("%s=\"", name);
    for (; *value; value++) {
        if (*value == '\n')
            fputs("\\n", stdout);
        else if (*value == '\\' || *value == '"')
            printf("\\%c", *value);
        else
            putchar(*value);
    }
    putchar('"');
}

static void print_times(const json_t *totals)
{
    const char *name = "hreduce_op_duration_seconds";
    const json_t *times = json_object_get(totals, "times"), *t;
    size_t i;
    int64_t ops = 0;
    family(name, "histogram", "Time of completed operations, from the first local rank's readiness on.");
    json_array_foreach(times, i, t)
    {
        ops += ctl_int(t, "ops");
        if (json_is_integer(json_object_get(t, "upto_us")))
            printf("%s_bucket{le=\"%g\"} %" PRId64 "\n", name, (double)ctl_int(t, "upto_us") / 1e6, ops);
        else
            printf("%s_bucket{le=\"+Inf\"} %" PRId64 "\n", name, ops);
    }
    printf("%s_sum %.6f\n%s_count %" PRId64 "\n", name, (double)ctl_int(totals, "time_us") / 1e6, name, ops);
}

static void print_collectives(const json_t *totals)
{
    json_t *colls = json_object_get(totals, "collectives"), *c, *ns;
    const char *coll, *stage;
    family("hreduce_collective_ops_total", "counter", "Completed operations by collective.");
    json_object_foreach(colls, coll, c)
    {
        printf("hreduce_collective_ops_total{");
        print_label("collective", coll);
        printf("} %" PRId64 "\n", ctl_int(c, "ops"));
    }
    family(
        "hreduce_op_stage_seconds_total", "counter",
        "Time of completed operations by stage: post (waiting for local ranks to call), ready (for their "
        "streams), begin (for a GPU to get its work), reduce (of the local ranks' inputs, where there are "
        "more nodes), exchange (with them, what the stage before does not hide), work (on the result), done "
        "(telling the ranks).");
    json_object_foreach(colls, coll, c)
    {
        json_object_foreach(json_object_get(c, "stage_ns"), stage, ns)
        {
            printf("hreduce_op_stage_seconds_total{");
            print_label("collective", coll);
            printf(",");
            print_label("stage", stage);
            printf("} %.9f\n", (double)json_integer_value(ns) / 1e9);
        }
    }
}

static void print_totals(const json_t *totals)
{
    const json_t *algorithms = json_object_get(totals, "algorithms"), *ops;
    const char *algorithm;
    single("hreduce_ops_total", "counter", "Operations completed on this node.", ctl_int(totals, "ops_done"));
    single("hreduce_op_errors_total", "counter", "Errors given to local ranks, one a rank and operation.",
           ctl_int(totals, "ops_failed"));
    single("hreduce_setup_errors_total", "counter",
           "Set-ups of a communicator that failed, one a rank of this node.",
           ctl_int(totals, "setup_errors"));
    single("hreduce_communicator_failures_total", "counter",
           "Communicators that failed: a rank or peer was lost, or a rank aborted.",
           ctl_int(totals, "communicators_failed"));
    single("hreduce_data_bytes_total", "counter", "Bytes of the data that completed operations were about.",
           ctl_int(totals, "bytes"));
    single("hreduce_staged_bytes_total", "counter",
           "Bytes that ranks of this node passed through staging windows: each rank's count.",
           ctl_int(totals, "staged_bytes"));
    family("hreduce_algorithm_ops_total", "counter", "Completed operations by algorithm between the nodes.");
    json_object_foreach((json_t *)algorithms, algorithm, ops)
    {
        printf("hreduce_algorithm_ops_total{");
        print_label("algorithm", algorithm);
        printf("} %" PRId64 "\n", (int64_t)json_integer_value(ops));
    }
    print_times(totals);
    print_collectives(totals);
}

/* There is a link of each class. */
static void print_class(const json_t *l)
{
    if (json_object_get(l, "traffic_class"))
        printf(",service_level=\"%" PRId64 "\",traffic_class=\"%" PRId64 "\"", ctl_int(l, "service_level"),
               ctl_int(l, "traffic_class"));
}

static void print_link(const json_t *p, const json_t *l)
{
    for (int tx = 0; tx < 2 && json_object_get(l, "tx_bytes"); tx++) {
        printf("hreduce_peer_bytes_total{");
        print_label("peer", ctl_str(p, "name", "?"));
        putchar(',');
        print_label("transport", ctl_str(l, "transport", "?"));
        print_class(l);
        printf(",direction=\"%s\"} %" PRId64 "\n", tx ? "tx" : "rx",
               ctl_int(l, tx ? "tx_bytes" : "rx_bytes"));
    }
}

static void rail_labels(const json_t *p, const json_t *l, const json_t *r)
{
    print_label("peer", ctl_str(p, "name", "?"));
    putchar(',');
    print_label("device", ctl_str(r, "device", "?"));
    printf(",rail=\"%" PRId64 "\"", ctl_int(r, "rail"));
    print_class(l);
}

static void print_rail(const json_t *p, const json_t *l, const json_t *r)
{
    for (int tx = 0; tx < 2 && json_object_get(r, "tx_bytes"); tx++) {
        printf("hreduce_rail_bytes_total{");
        rail_labels(p, l, r);
        printf(",direction=\"%s\"} %" PRId64 "\n", tx ? "tx" : "rx",
               ctl_int(r, tx ? "tx_bytes" : "rx_bytes"));
    }
}

static void print_rail_up(const json_t *p, const json_t *l, const json_t *r)
{
    printf("hreduce_rail_up{");
    rail_labels(p, l, r);
    printf("} %d\n", strcmp(ctl_str(r, "state", ""), "up") == 0);
}

static void each_rail(const json_t *peers, void (*print)(const json_t *p, const json_t *l, const json_t *r))
{
    const json_t *p, *l, *r;
    size_t i, k, j;
    json_array_foreach(peers, i, p)
    {
        json_array_foreach(json_object_get(p, "links"), k, l)
        {
            json_array_foreach(json_object_get(l, "rails"), j, r)
            {
                print(p, l, r);
            }
        }
    }
}

/* Only where verbs_device names several devices. */
static void print_rails(const json_t *peers)
{
    family("hreduce_rail_bytes_total", "counter", "Of that, over each rail of a link over several NICs.");
    each_rail(peers, print_rail);
    family("hreduce_rail_up", "gauge",
           "Whether that rail is in use: 0 when its path is away or it was left out.");
    each_rail(peers, print_rail_up);
}

/* How much went to and came from each peer, and how: one series a link and direction; and which peers have no verbs link
   although one of the two ends could. */
static void print_peers(const json_t *peers)
{
    const json_t *p, *l;
    size_t i, k;
    family("hreduce_peer_bytes_total", "counter",
           "Payload and headers exchanged with another node over a link that is up.");
    json_array_foreach(peers, i, p)
    {
        json_array_foreach(json_object_get(p, "links"), k, l)
        {
            print_link(p, l);
        }
    }
    print_rails(peers);
    family("hreduce_peer_fell_back", "gauge",
           "1 for a peer that is reached by tcp instead of verbs, and why.");
    json_array_foreach(peers, i, p)
    {
        if (!json_object_get(p, "no_verbs"))
            continue;
        printf("hreduce_peer_fell_back{");
        print_label("peer", ctl_str(p, "name", "?"));
        putchar(',');
        print_label("reason", ctl_str(p, "no_verbs", "?"));
        printf("} 1\n");
    }
}

static void print_flaps(const json_t *port)
{
    single("hreduce_links_interrupted_total", "counter", "Times that the path of a verbs link failed.",
           ctl_int(port, "links_interrupted"));
    single("hreduce_links_mended_total", "counter", "Times that such a link got a new path and went on.",
           ctl_int(port, "links_mended"));
    single("hreduce_rdmacm_rejected_total", "counter",
           "Connect requests by RDMA-CM that no control connection knew of.",
           ctl_int(port, "rdmacm_rejected"));
}

/* A gauge of every living communicator; NULL values (no operation so far, none in progress) are left out. */
static void print_ages(const json_t *comms, const char *name, const char *key, const char *help)
{
    const json_t *c;
    size_t i;
    family(name, "gauge", help);
    json_array_foreach(comms, i, c)
    {
        if (!json_is_integer(json_object_get(c, key)))
            continue;
        printf("%s{", name);
        print_label("comm", ctl_str(c, "comm", "?"));
        printf(",uid=\"%" PRId64 "\"} %.3f\n", ctl_int(c, "uid"), (double)ctl_int(c, key) / 1e3);
    }
}

int ctl_metrics(const struct ctl_options *o)
{
    json_t *doc = NULL;
    int rc = ctl_ask_once(o->socket, HRP_MSG_STATUS, &doc);
    if (rc != CTL_OK)
        return rc;
    const json_t *daemon = json_object_get(doc, "daemon"), *memory = json_object_get(doc, "memory");
    const json_t *clients = json_object_get(doc, "clients"), *comms = json_object_get(doc, "comms");
    if (o->json) {
        json_dumpf(json_object_get(doc, "totals"), stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
        putchar('\n');
        json_decref(doc);
        return CTL_OK;
    }
    family("hreduce_info", "gauge", "1; the labels say what runs here.");
    printf("hreduce_info{");
    print_label("version", ctl_str(daemon, "version", "?"));
    putchar(',');
    print_label("node", ctl_str(daemon, "node", "?"));
    printf("} 1\n");
    single("hreduce_uptime_seconds", "gauge", "Since the daemon's start.",
           (int64_t)ctl_num(daemon, "uptime_s"));
    print_totals(json_object_get(doc, "totals"));
    single("hreduce_sessions", "gauge", "Connected processes.", ctl_int(clients, "sessions"));
    single("hreduce_sessions_refused_total", "counter", "Connections that a limit refused.",
           ctl_int(clients, "refused"));
    single("hreduce_client_faults_total", "counter", "Sessions ended because the process broke the protocol.",
           ctl_int(clients, "faults"));
    single("hreduce_communicators", "gauge", "Living communicators that may be seen.",
           (int64_t)json_array_size(comms));
    single("hreduce_arena_bytes", "gauge", "The daemon's memory for exchange.",
           ctl_int(memory, "arena_bytes"));
    single("hreduce_arena_used_bytes", "gauge", "Of it, what is in use.", ctl_int(memory, "arena_used"));
    print_peers(json_object_get(doc, "peers"));
    print_flaps(json_object_get(doc, "peer_port"));
    print_ages(comms, "hreduce_comm_last_op_age_seconds", "last_op_age_ms",
               "Since the last completed operation of a communicator.");
    print_ages(comms, "hreduce_comm_op_age_seconds", "op_age_ms",
               "Of the operation in progress, since its first local rank was ready.");
    json_decref(doc);
    return CTL_OK;
}
