/* SPDX-License-Identifier: MIT */
/* hreducectl status */
#include "daemon/ctl/ctl.h"

#include <inttypes.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>

#include "proto/wire.h"

static const char *user_name(int64_t uid)
{
    const struct passwd *pw = getpwuid((uid_t)uid);
    return pw ? ctl_format("%s", pw->pw_name) : ctl_count(uid);
}

static void print_daemon(const char *socket, const json_t *doc)
{
    const json_t *d = json_object_get(doc, "daemon"), *m = json_object_get(doc, "memory");
    const json_t *c = json_object_get(doc, "clients");
    printf("hreduced %s on node %s, process %" PRId64 ", up %s%s\n", ctl_str(d, "version", "?"),
           ctl_str(d, "node", "?"), ctl_int(d, "pid"), ctl_age(ctl_num(d, "uptime_s")),
           json_is_true(json_object_get(d, "stopping")) ? ", stopping" : "");
    printf("  socket    %s\n", socket);
    printf("  peers     on %s port %" PRId64 "%s\n", ctl_str(d, "listen", "?"), ctl_int(d, "port"),
           json_is_true(json_object_get(d, "peers_authenticated")) ? "" : ", not authenticated");
    printf("  engine    host, %s, %" PRId64 " threads, %" PRId64 " for TCP; last turn of the agent %s ago\n",
           ctl_str(d, "simd", "?"), ctl_int(d, "threads"), ctl_int(d, "io_threads"),
           ctl_age((double)ctl_int(d, "agent_heartbeat_age_ms") / 1000));
    printf("  memory    arena %s, of it %s in use; sessions %s\n", ctl_bytes(ctl_int(m, "arena_bytes")),
           ctl_bytes(ctl_int(m, "arena_used")), ctl_bytes(ctl_int(m, "session_bytes")));
    printf("  clients   %" PRId64 " of %" PRId64 " processes; %" PRId64 " connections so far, %" PRId64
           " refused, %" PRId64 " ended for a fault\n",
           ctl_int(c, "sessions"), ctl_int(c, "max_sessions"), ctl_int(c, "accepted"), ctl_int(c, "refused"),
           ctl_int(c, "faults"));
}

static void print_gpus(const json_t *gpus)
{
    const json_t *list = json_object_get(gpus, "devices"), *g;
    size_t i;
    if (!json_is_true(json_object_get(gpus, "on"))) {
        printf("  GPUs      off by configuration\n");
        return;
    }
    if (json_array_size(list) == 0) {
        printf("  GPUs      none in use\n");
        return;
    }
    printf("  GPUs      %s of host memory pinned\n", ctl_bytes(ctl_int(gpus, "pinned_bytes")));
    json_array_foreach(list, i, g)
    {
        printf("            %s %s: ", ctl_str(g, "pci", "?"), ctl_str(g, "name", "?"));
        if (!json_is_true(json_object_get(g, "in_use")))
            printf("given back\n");
        else
            printf("%" PRId64 " allocation%s mapped (%s), %s of its memory taken by the engines\n",
                   ctl_int(g, "imports"), ctl_int(g, "imports") == 1 ? "" : "s",
                   ctl_bytes(ctl_int(g, "import_bytes")), ctl_bytes(ctl_int(g, "engine_bytes")));
        if (json_object_get(g, "lost"))
            printf("            %s\n", ctl_str(g, "lost", ""));
        if (json_object_get(g, "no_sm"))
            printf("            no sm engine: %s\n", ctl_str(g, "no_sm", ""));
        if (json_object_get(g, "gdr"))
            printf("            GPUDirect RDMA: %s\n", ctl_str(g, "gdr", ""));
        if (json_object_get(g, "no_gdr"))
            printf("            no GPUDirect RDMA: %s\n", ctl_str(g, "no_gdr", ""));
    }
}

static bool begin(const json_t *array, const char *what, const char *none)
{
    printf("\n%s", what);
    if (json_array_size(array) > 0) {
        printf("\n");
        return true;
    }
    printf(": %s\n", none);
    return false;
}

static void print_sessions(const json_t *array)
{
    static const char *const heading[] = {">pid",    "user",     "command",  ">age",
                                          ">memory", ">buffers", ">windows", ">comms"};
    struct ctl_table t;
    const json_t *s;
    size_t i;
    if (!begin(array, "processes", "none is connected"))
        return;
    ctl_table_begin(&t, 8, heading);
    json_array_foreach(array, i, s)
    {
        const char *row[] = {ctl_count(ctl_int(s, "pid")),
                             user_name(ctl_int(s, "uid")),
                             ctl_str(s, "command", ""),
                             ctl_age(ctl_num(s, "age_s")),
                             ctl_bytes(ctl_int(s, "memory_bytes")),
                             ctl_count(ctl_int(s, "buffers")),
                             ctl_count(ctl_int(s, "windows")),
                             ctl_count(ctl_int(s, "comms"))};
        ctl_table_row(&t, row);
    }
    ctl_table_end(&t, 2);
}

/* What its ranks call it: the name and its number, or the beginning of the unique id. */
static const char *key_name(const json_t *c)
{
    const json_t *key = json_object_get(c, "key");
    const char *name = ctl_str(key, "name", NULL);
    if (name)
        return ctl_int(key, "number") > 0 ? ctl_format("%s.%" PRId64, name, ctl_int(key, "number")) : name;
    return ctl_format("id %.8s", ctl_str(key, "id", "?"));
}

/* What the communicator is doing: "op 12 for 350 ms", "idle for 2 s", or why it ended. */
static const char *activity(const json_t *c)
{
    const char *status = ctl_str(c, "status", "");
    if (ctl_str(c, "missing", "")[0] != '\0')
        return ctl_format("waits for rank %s for %s", ctl_str(c, "missing", ""),
                          ctl_age((double)ctl_int(c, "age_ms") / 1000));
    if (status[0] == '\0')
        return ctl_str(c, "state", "being made");
    if (strcmp(status, "ok") != 0)
        return ctl_format("failed: %s", status);
    if (json_is_integer(json_object_get(c, "op_in_progress")))
        return ctl_format("op %" PRId64 " for %s", ctl_int(c, "op_in_progress"),
                          ctl_age((double)ctl_int(c, "op_age_ms") / 1000));
    if (json_is_integer(json_object_get(c, "last_op_age_ms")))
        return ctl_format("idle for %s", ctl_age((double)ctl_int(c, "last_op_age_ms") / 1000));
    return "no op yet";
}

static void print_comms(const json_t *array)
{
    static const char *const heading[] = {"comm", "name",    "user",  ">ranks", ">nodes",    ">local",
                                          ">ops", ">failed", ">data", ">sent",  ">received", "now"};
    struct ctl_table t;
    const json_t *c;
    size_t i;
    if (!begin(array, "communicators", "none"))
        return;
    ctl_table_begin(&t, 12, heading);
    json_array_foreach(array, i, c)
    {
        const char *row[] = {ctl_str(c, "comm", "-"),
                             key_name(c),
                             json_object_get(c, "uid") ? user_name(ctl_int(c, "uid")) : "-",
                             ctl_count(ctl_int(c, "nranks")),
                             ctl_count(ctl_int(c, "nnodes")),
                             ctl_count(ctl_int(c, "nlocal")),
                             ctl_count(ctl_int(c, "ops_done")),
                             ctl_count(ctl_int(c, "ops_failed")),
                             ctl_bytes(ctl_int(c, "bytes")),
                             ctl_bytes(ctl_int(c, "tx_bytes")),
                             ctl_bytes(ctl_int(c, "rx_bytes")),
                             activity(c)};
        ctl_table_row(&t, row);
    }
    ctl_table_end(&t, 2);
}

static void print_peers(const json_t *array)
{
    static const char *const heading[] = {"node",  "state",     "transport", ">streams",
                                          ">sent", ">received", "address"};
    struct ctl_table t;
    const json_t *p;
    size_t i;
    if (!begin(array, "peers", "none is connected"))
        return;
    ctl_table_begin(&t, 7, heading);
    json_array_foreach(array, i, p)
    {
        const char *row[] = {ctl_str(p, "name", "?"),           ctl_str(p, "state", "-"),
                             ctl_str(p, "transport", "-"),      ctl_count(ctl_int(p, "streams")),
                             ctl_bytes(ctl_int(p, "tx_bytes")), ctl_bytes(ctl_int(p, "rx_bytes")),
                             ctl_str(p, "address", "-")};
        ctl_table_row(&t, row);
    }
    ctl_table_end(&t, 2);
}

int ctl_status(const struct ctl_options *o)
{
    json_t *doc = NULL;
    int rc = ctl_ask_once(o->socket, HRP_MSG_STATUS, &doc);
    if (rc != CTL_OK)
        return rc;
    if (o->json) {
        json_dumpf(doc, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
        putchar('\n');
    } else {
        print_daemon(o->socket, doc);
        print_gpus(json_object_get(doc, "gpus"));
        print_sessions(json_object_get(doc, "sessions"));
        print_comms(json_object_get(doc, "comms"));
        print_peers(json_object_get(doc, "peers"));
    }
    json_decref(doc);
    return CTL_OK;
}
