/* SPDX-License-Identifier: MIT */
/* hreducectl path */
#include "daemon/ctl/ctl.h"

#include <inttypes.h>
#include <stdio.h>

#include "proto/wire.h"

static void print_line(const char *label, const char *text)
{
    printf("  %-16s ", label);
    ctl_print(text);
    putchar('\n');
}

static void print_rails(const json_t *rails)
{
    const json_t *r;
    size_t i;
    json_array_foreach(rails, i, r)
    {
        if (json_object_get(r, "reason"))
            print_line("", ctl_format("    rail %" PRId64 " %s: %s", ctl_int(r, "rail"),
                                      ctl_str(r, "state", "?"), ctl_str(r, "reason", "")));
        else
            print_line("", ctl_format("    rail %" PRId64 ": %s, %" PRId64 " queue pairs, connected by %s",
                                      ctl_int(r, "rail"), ctl_str(r, "address", "?"),
                                      ctl_int(r, "queue_pairs"), ctl_str(r, "setup", "?")));
    }
}

static void print_stage(const json_t *s)
{
    const json_t *peers = json_object_get(s, "peers"), *p;
    size_t i;
    print_line(ctl_str(s, "stage", "?"), ctl_str(s, "used", "?"));
    json_array_foreach(peers, i, p)
    {
        const char *setup = ctl_str(p, "setup", "");
        print_line("",
                   ctl_format("node %" PRId64 " %s: %s, %" PRId64 " streams, %s%s%s", ctl_int(p, "node"),
                              ctl_str(p, "name", "?"), ctl_str(p, "transport", "?"), ctl_int(p, "streams"),
                              ctl_str(p, "address", ""), setup[0] ? ", connected by " : "", setup));
        print_rails(json_object_get(p, "rails"));
        if (json_object_get(p, "send"))
            print_line("", ctl_format("    large blocks sent from %s, received in %s",
                                      ctl_str(p, "send", "?"), ctl_str(p, "receive", "?")));
        if (json_object_get(p, "gdr_reason"))
            print_line("", ctl_format("    because %s", ctl_str(p, "gdr_reason", "")));
    }
    if (json_object_get(s, "why"))
        print_line("    because", ctl_str(s, "why", ""));
    if (json_object_get(s, "wanted")) {
        print_line("    wanted", ctl_str(s, "wanted", ""));
        print_line("    because", ctl_str(s, "reason", ""));
        print_line("    remedy", ctl_str(s, "remedy", ""));
    }
}

static void print_path(const json_t *path)
{
    const json_t *stages = json_object_get(path, "stages"), *s;
    size_t i;
    printf("communicator %s: %s, here node %" PRId64 " (%s)\n", ctl_str(path, "comm", "?"),
           ctl_str(path, "layout", "?"), ctl_int(path, "node"), ctl_str(path, "node_name", "?"));
    json_array_foreach(stages, i, s)
    {
        print_stage(s);
    }
}

int ctl_path(const struct ctl_options *o)
{
    json_t *doc = NULL;
    int rc = ctl_ask_once(o->socket, HRP_MSG_PATH, &doc);
    if (rc != CTL_OK)
        return rc;
    const json_t *paths = json_object_get(doc, "paths"), *p;
    size_t i;
    if (o->json) {
        json_dumpf(doc, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
        putchar('\n');
    } else if (json_array_size(paths) == 0) {
        printf("no communicators on node %s\n", ctl_str(doc, "node", "?"));
    }
    if (!o->json) {
        json_array_foreach(paths, i, p)
        {
            if (i > 0)
                putchar('\n');
            print_path(p);
        }
    }
    json_decref(doc);
    return CTL_OK;
}
