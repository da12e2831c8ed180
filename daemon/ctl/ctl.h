/* SPDX-License-Identifier: MIT */
/*
 * hreducectl: one command a file; main.c has their table. Everything a command prints goes to stdout, complaints
 * to stderr; no wait is longer than CTL_TIMEOUT_MS.
 */
#ifndef HRD_CTL_H
#define HRD_CTL_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CTL_TIMEOUT_MS 5000

/* Exit statuses, documented in hreducectl(1). */
enum {
    CTL_OK = 0,
    CTL_FAILED = 1,      /* the daemon answered with an error, or not as expected */
    CTL_UNREACHABLE = 2, /* no daemon behind the socket, no permission, or no answer in time */
    CTL_DOCTOR_WARN = 3, /* doctor: something is not as good as it could be */
    CTL_DOCTOR_FAIL = 4, /* doctor: something does not work */
    CTL_USAGE = 64,
};

struct ctl_options {
    const char *socket;
    bool json;
    bool cluster;      /* doctor: ask the other nodes, too */
    const char *nodes; /* doctor: "node2,10.0.0.3", these as well; NULL: none */
    const char *xml;   /* topo: a recorded topology instead of this machine */
};

struct ctl_command {
    const char *name;
    const char *help;
    int (*run)(const struct ctl_options *options);
};

/* ---- commands ---- */
int ctl_status(const struct ctl_options *options);
int ctl_metrics(const struct ctl_options *options);
int ctl_path(const struct ctl_options *options);
int ctl_doctor(const struct ctl_options *options);
int ctl_topo(const struct ctl_options *options);
int ctl_version(const struct ctl_options *options);

/* ---- client.c ---- */

struct ctl_client {
    int sock;
    const char *path;
    char daemon_version[32];
    uint32_t daemon_abi; /* as HRP_ABI */
    unsigned wait_ms;    /* for one answer */
    uint64_t deadline_ms;
    uint64_t cookie;
    bool keep_error; /* failures are kept in error instead of being printed */
    char error[2200];
};

/* Connects and says hello. CTL_OK, or an exit status with the reason printed. */
int ctl_connect(struct ctl_client *c, const char *path);
void ctl_close(struct ctl_client *c);
/* Sends a request without a body of its own and parses the JSON text that answers it; *doc is the caller's. */
int ctl_ask(struct ctl_client *c, unsigned type, json_t **doc);
/* The same for a request with a body (its cookie is filled in), and another time limit. */
struct hrp_msg;
int ctl_ask_msg(struct ctl_client *c, struct hrp_msg *msg, unsigned wait_ms, json_t **doc);
/* ctl_connect(), ctl_ask(), ctl_close(). */
int ctl_ask_once(const char *path, unsigned type, json_t **doc);

/* ---- text.c: what people read ---- */

/* A complaint: "hreducectl: " and the sentence. */
void ctl_complain(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Prints text of the daemon's: its words are harmless, but a terminal obeys control characters from anywhere. */
void ctl_print(const char *text);
/* Complaints are for nobody while a command only asks whether something is there. */
void ctl_mute(bool muted);
/* Members of JSON objects, with answers for what is missing. */
const char *ctl_str(const json_t *object, const char *key, const char *missing);
int64_t ctl_int(const json_t *object, const char *key);
double ctl_num(const json_t *object, const char *key);

/* Short texts, each in a buffer of its own that lives until the 32nd call after it. */
const char *ctl_bytes(int64_t bytes); /* 12.3 MiB */
const char *ctl_age(double seconds);  /* 850 ms, 12.3 s, 3 min 5 s, 2 h 10 min, 4 d 3 h */
const char *ctl_count(int64_t n);     /* 1234567 */
const char *ctl_format(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* A table whose columns are as wide as they must be. A heading that begins with '>' is set flush right. */
#define CTL_MAX_COLUMNS 72
struct ctl_table {
    unsigned columns;
    const char *heading[CTL_MAX_COLUMNS];
    char **cell; /* columns of each row */
    unsigned rows, room;
};
void ctl_table_begin(struct ctl_table *t, unsigned columns, const char *const *headings);
/* columns texts; copied. Control characters are replaced. */
void ctl_table_row(struct ctl_table *t, const char *const *texts);
/* Prints with an indent and frees. */
void ctl_table_end(struct ctl_table *t, unsigned indent);

#endif
