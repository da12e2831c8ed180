/* SPDX-License-Identifier: MIT */
#include "daemon/ctl/ctl.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/version.h"
#include "proto/wire.h"

static const struct ctl_command commands[] = {
    {"status", "the daemon, its processes, communicators, operations and peers", ctl_status},
    {"path", "what each communicator really uses, what was wanted, and why not", ctl_path},
    {"metrics", "counters for Prometheus, as text", ctl_metrics},
    {"doctor", "what is wrong with this machine, or with --cluster between the nodes, and what to do",
     ctl_doctor},
    {"topo", "how GPUs and NICs are wired, and which NIC each GPU uses", ctl_topo},
    {"version", "versions of hreducectl and of the daemon", ctl_version},
};
enum { NCOMMANDS = sizeof(commands) / sizeof(commands[0]) };

static void print_usage(FILE *out)
{
    fputs("usage: hreducectl [--socket PATH] COMMAND [--json]\n\ncommands:\n", out);
    for (unsigned i = 0; i < NCOMMANDS; i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].help);
    fputs("\noptions:\n"
          "  -s, --socket PATH  the daemon's socket (HREDUCE_SOCKET, or " HRP_DEFAULT_SOCKET ")\n"
          "  -j, --json         the whole answer as JSON\n"
          "  -c, --cluster      doctor: ask the daemons of the other nodes, compare, measure the links\n"
          "      --nodes LIST   doctor: the same, with these nodes (names or addresses, by commas) besides "
          "those connected\n"
          "      --xml FILE     topo: a topology that lstopo wrote instead of this machine\n"
          "  -h, --help\n\n"
          "exit status: 0; 1 the daemon answered with an error; 2 it cannot be reached; 64 wrong usage;\n"
          "of doctor: 0 all is well, 3 warnings, 4 something does not work.\n"
          "See hreducectl(1).\n",
          out);
}

static const struct ctl_command *find_command(const char *name)
{
    for (unsigned i = 0; i < NCOMMANDS; i++) {
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    }
    return NULL;
}

int main(int argc, char **argv)
{
    static const struct option longs[] = {
        {"socket", required_argument, NULL, 's'}, {"json", no_argument, NULL, 'j'},
        {"cluster", no_argument, NULL, 'c'},      {"nodes", required_argument, NULL, 'n'},
        {"xml", required_argument, NULL, 'x'},    {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},      {NULL, 0, NULL, 0}};
    struct ctl_options o = {.socket = getenv("HREDUCE_SOCKET")};
    int opt;
    if (!o.socket || o.socket[0] == '\0')
        o.socket = HRP_DEFAULT_SOCKET;
    while ((opt = getopt_long(argc, argv, "s:jhc", longs, NULL)) != -1) {
        switch (opt) {
        case 's':
            o.socket = optarg;
            break;
        case 'j':
            o.json = true;
            break;
        case 'c':
            o.cluster = true;
            break;
        case 'n':
            o.nodes = optarg;
            break;
        case 'x':
            o.xml = optarg;
            break;
        case 'h':
            print_usage(stdout);
            return CTL_OK;
        case 'V':
            printf("hreducectl %s\n", HRD_VERSION);
            return CTL_OK;
        default:
            print_usage(stderr);
            return CTL_USAGE;
        }
    }
    if (optind >= argc) {
        print_usage(stderr);
        return CTL_USAGE;
    }
    const struct ctl_command *command = find_command(argv[optind]);
    if (!command || optind + 1 != argc) {
        ctl_complain("%s '%s'; 'hreducectl --help' lists the commands",
                     command ? "too many arguments after" : "there is no command", argv[optind]);
        return CTL_USAGE;
    }
    int rc = command->run(&o);
    if (fflush(stdout) != 0 && rc == CTL_OK) {
        ctl_complain("the output could not be written");
        return CTL_FAILED;
    }
    return rc;
}
