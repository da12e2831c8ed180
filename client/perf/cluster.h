/* SPDX-License-Identifier: MIT */
/*
 * Several daemons on one machine, as hreduce-perf --local and the tests use them: one a node, each with a
 * directory of its own (configuration, socket, log) and an address of its own in 127.0.0.0/8, all on one port.
 *
 * Nothing outlives the process that started it: daemons get SIGKILL when it dies, and hpf_cluster_free() ends
 * them and removes the directories. All calls are for one thread, the one that started the cluster (the death
 * signal is bound to it). Errors are sentences in err; every wait is bounded.
 */
#ifndef HPF_CLUSTER_H
#define HPF_CLUSTER_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "client/perf/machine.h"

#define HPF_MAX_NODES 64u
#define HPF_SOCKET_PATH 108

struct hpf_node {
    pid_t pid;  /* 0: not running */
    int status; /* of waitpid(), valid once it ran and pid is 0 again */
    char dir[84];
    char socket[HPF_SOCKET_PATH];
    char addr[24];
};

struct hpf_cluster {
    unsigned nnodes;
    struct hpf_node *node;
    unsigned port;
    int port_lock; /* holds the port against other clusters of ours */
    char root[72]; /* directory of all nodes */
    char *program; /* hreduced */
    char *keep_logs;
    pid_t owner; /* a forked child's copy must not end the daemons */
    unsigned timeout_ms;
};

struct hpf_cluster_options {
    unsigned nnodes;         /* 1..HPF_MAX_NODES */
    const char *const *keys; /* "key=value" lines for every daemon, beside those made here */
    unsigned nkeys;
    const char *const
        *node_keys;        /* NULL, or [nnodes] further lines for one node (newline between them), or NULL */
    const char *keep_logs; /* NULL, or an existing directory that gets the logs when the cluster ends */
    unsigned timeout_ms;   /* for a start and for a stop; 0: 15 s */
};

/* Starts all daemons and returns when each accepts connections. 0, or -1 and nothing is left running. */
int hpf_cluster_new(struct hpf_cluster **out, const struct hpf_cluster_options *options, char *err,
                    size_t errlen);
/*
 * Ends all daemons (SIGTERM, after the timeout SIGKILL) and removes everything. 0, or -1 when a daemon did
 * not end by itself with status 0; one that was killed on purpose (hpf_node_kill) does not count. NULL is
 * allowed.
 */
int hpf_cluster_free(struct hpf_cluster *c, char *err, size_t errlen);

/* One daemon: start it again after it ended, in the same directory and on the same address. */
int hpf_node_start(struct hpf_cluster *c, unsigned node, char *err, size_t errlen);
/* Sends a signal; SIGKILL is waited for. */
void hpf_node_kill(struct hpf_cluster *c, unsigned node, int sig);
/* Waits until the daemon has ended. True when it has. */
bool hpf_node_wait(struct hpf_cluster *c, unsigned node, unsigned timeout_ms);
/* False once it has ended, by itself or not. */
bool hpf_node_alive(struct hpf_cluster *c, unsigned node);
/* The last lines of its log, for a message; always terminated. */
void hpf_node_log_tail(const struct hpf_cluster *c, unsigned node, char *buf, size_t len);

#endif
