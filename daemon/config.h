/* SPDX-License-Identifier: MIT */
/*
 * Configuration of hreduced. The keys stand in config.def; this is where their values end up. Read by the
 * control thread only; other threads get copies of what they need.
 */
#ifndef HRD_CONFIG_H
#define HRD_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define HRD_DEFAULT_CONFIG "/etc/hreduced/hreduced.conf"
#define HRD_MAX_DEVICES 4u
#define HRD_DEVICE_NAME 60u /* with its NUL */
#define HRD_MAX_LISTEN 8

/* IP addresses as text, checked by the parser; IPv6 link-local ones may end in %interface. */
struct hrd_addr_list {
    unsigned n;
    char v[HRD_MAX_LISTEN][64];
};

/* How the queue pairs of a verbs link are connected. */
enum hrd_setup { HRD_SETUP_AUTO = 0, HRD_SETUP_RDMACM = 1, HRD_SETUP_EXCHANGE = 2 };

struct hrd_config {
    char socket[108];
    char socket_group[64];

    struct hrd_addr_list listen;    /* never empty */
    struct hrd_addr_list advertise; /* n == 0: by interface */
    char interface[64];             /* "auto", an interface's name, or a subnet "ADDRESS/BITS" */
    char node_name[65];             /* resolved: never "auto" */
    uint16_t port;
    uint8_t transport;      /* as hrp_comm_config.transport: 0 auto, 1 tcp, 2 verbs */
    uint32_t require;       /* HRP_REQUIRE_* */
    uint32_t tcp_streams;   /* resolved: 1..HRD_TCP_STREAMS_MAX */
    char verbs_device[256]; /* "auto", or devices as NAME or NAME:PORT, separated by commas */
    uint32_t verbs_port;    /* UINT32_MAX: auto, likewise: */
    uint32_t verbs_gid_index;
    uint32_t verbs_pkey;
    uint32_t verbs_mtu;
    uint32_t verbs_service_level, verbs_traffic_class, verbs_classes;
    uint32_t verbs_timeout, verbs_retry;
    uint32_t verbs_queue_pairs;
    uint8_t verbs_setup; /* enum hrd_setup */
    uint64_t bandwidth;  /* bytes per second of a node in one direction; 0: to be measured */

    uint32_t peer_timeout_ms;
    uint32_t setup_timeout_ms;
    uint32_t op_timeout_ms; /* 0: none */
    uint32_t stall_warning_ms;

    uint64_t arena_bytes;
    uint64_t window_bytes; /* staging window of one rank of one comm */
    uint64_t max_memory_per_user;

    bool gpu;
    uint32_t gpu_idle_ms;
    uint64_t dma_bytes; /* pinned memory for copies from and to GPUs */
    uint8_t gdr;        /* enum hrd_gdr_mode */
    uint64_t gdr_bytes; /* of each GPU */

    uint32_t max_sessions;
    uint32_t max_sessions_per_user;
    uint32_t max_buffers_per_user;
    uint32_t max_comms; /* slots of a session's segment */

    uint32_t threads;    /* resolved: 1..64 */
    uint32_t io_threads; /* resolved: 0..HRD_TCP_IO_THREADS_MAX */
    uint32_t spin_us;    /* resolved */
    uint8_t simd;        /* 0: auto; else enum hrk_level + 1 */

    uint8_t algorithm; /* enum hrp_algo */
    bool reproducible;
    bool wire_f32;
    uint64_t unit_bytes;
    uint64_t unit_min_bytes; /* 0: auto, see hrd_config_unit_min() */
    uint64_t chunk_bytes;
    uint64_t eager_limit; /* bytes */

    int log_level; /* enum hrd_log_level */
};

/* Gets each problem as one sentence without a newline. */
typedef void hrd_config_report(void *ctx, const char *sentence);

/* Every key's default, with "auto" resolved for this machine. */
void hrd_config_defaults(struct hrd_config *c);
/*
 * Defaults, then the file. All problems of the file are reported, not only the first. Returns their number,
 * or -ENOENT (nothing reported) when there is no such file. Blocks on file I/O.
 */
int hrd_config_load(struct hrd_config *c, const char *path, hrd_config_report *report, void *ctx);
/* One key; 0, or -EINVAL with a sentence. Does not check keys against each other. */
int hrd_config_set(struct hrd_config *c, const char *name, const char *value, char *err, size_t errlen);
/* unit_min, with "auto" resolved for this machine and unit_size. */
uint64_t hrd_config_unit_min(const struct hrd_config *c);
/* What one key alone cannot know (unit_min above unit_size, ...). Returns the number of problems. */
int hrd_config_check(const struct hrd_config *c, hrd_config_report *report, void *ctx);
/* A value of the key `transport`, of a communicator's config too: "auto", "tcp", "verbs". */
const char *hrd_transport_name(unsigned transport);
/* The value of a key as it would stand in the file; NULL for an unknown key. Returns buf. */
const char *hrd_config_get(const struct hrd_config *c, const char *name, char *buf, size_t len);

/* Takes over what SIGHUP may change; report gets the name of each key that differs but needs a restart.
   Returns how many keys were taken over. */
unsigned hrd_config_reload(struct hrd_config *cur, const struct hrd_config *fresh, hrd_config_report *report,
                           void *ctx);

/* The complete, commented hreduced.conf: all keys with their defaults. */
void hrd_config_print(FILE *out);
/* hreduced.conf(5), troff. */
void hrd_config_print_man(FILE *out);

#endif
