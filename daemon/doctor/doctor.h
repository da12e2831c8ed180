/* SPDX-License-Identifier: MIT */
/*
 * What is wrong with this machine, in sentences. One table of checks (doctor.c), one file a group (check_*.c). A check
 * sees the machine only through struct hrd_machine, so that each can be shown a machine on which it fails; it changes
 * nothing, takes no lock and starts no program. The daemon runs the table as the user and in the control group that its
 * jobs depend on; hreducectl runs it itself where no daemon answers.
 */
#ifndef HRD_DOCTOR_H
#define HRD_DOCTOR_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "daemon/config.h"
#include "daemon/netif.h"

struct hrd_verbs;
struct hrd_verbs_device;
struct hrd_gpu_pair_info; /* daemon/gpu/gpu.h */

#define HRD_MACHINE_NAME 64 /* of a file in a listing */
#define HRD_DOCTOR_GPUS 32u

/* As NVML numbers them. */
enum hrd_compute_mode {
    HRD_COMPUTE_SHARED,
    HRD_COMPUTE_ONE_THREAD,
    HRD_COMPUTE_PROHIBITED,
    HRD_COMPUTE_ONE_PROCESS
};
enum hrd_gpu_fabric { HRD_FABRIC_NONE, HRD_FABRIC_NOT_STARTED, HRD_FABRIC_STARTING, HRD_FABRIC_READY };

/* What NVML says of a GPU; -1: it does not say. */
struct hrd_gpu_state {
    char pci[HRD_MACHINE_NAME]; /* "0000:3b:00.0"; "number 3": not even its address is known */
    char error[128];            /* not empty: why it does not answer, and nothing else is known */
    int compute_mode;           /* enum hrd_compute_mode */
    int mig, mig_pending;       /* 1: on; on after the next reset */
    int persistence;            /* 1: on */
    long uncorrected;           /* memory errors since the driver was loaded */
    int repair_pending;         /* 1: bad memory is taken out of use by the next reset */
    int repair_failed;          /* 1: there was no spare memory left */
    int fabric;                 /* NVSwitches: enum hrd_gpu_fabric */
};

struct hrd_gpu_states {
    unsigned n, total; /* asked, of so many */
    struct hrd_gpu_state gpu[HRD_DOCTOR_GPUS];
    char why[256]; /* n is 0: why nothing is known */
};

/* The window onto a machine. Its members are the caller's and live as long as it is used. */
struct hrd_machine {
    const char *root; /* in front of every path: "" is this machine */
    const struct hrd_config *cfg;
    const struct hrd_netif *ifs;
    unsigned nifs;
    uid_t uid; /* whose access to device files counts */
    const gid_t *gids;
    unsigned ngids;
    bool self; /* that user is who runs the checks: files are opened, not judged by their mode */
    const struct hrd_verbs *verbs; /* NULL: libibverbs is not there, for the reason verbs_why */
    const char *verbs_why;
    /* Of the GPUs; asked once a report, by hrd_doctor_run(), where it is NULL and there is an NVIDIA driver. */
    const struct hrd_gpu_states *gpus;
    void (*ask_gpus)(struct hrd_gpu_states *out);
    /* What the daemon found between its GPUs; NULL: these are not the eyes of a daemon. */
    const struct hrd_gpu_pair_info *pairs;
    unsigned npairs;
    long (*kernel_log)(char *buf, size_t len); /* bytes of its end, or -1 with errno */
    /* Of an interface, from the kernel: /sys shows those of the namespace in which it was mounted, not the own ones. */
    unsigned (*netif_mbit)(const char *name,
                           bool most);       /* its speed, or that of its fastest mode; 0: it does not say */
    unsigned (*netif_mtu)(const char *name); /* 0: there is no such interface */
    int (*clock_synchronised)(void);         /* 1, 0, or -1: the kernel does not say */
};

/* This machine as seen by this process. cfg, ifs: the caller's. Loads libibverbs. */
void hrd_machine_here(struct hrd_machine *m, const struct hrd_config *cfg, const struct hrd_netif *ifs,
                      unsigned nifs);

/* ---- machine.c: reading ------------------------------------------------------------------------------------ */

/* A file's text without the last newline. False: it is not there or cannot be read (errno). */
bool hrd_machine_text(const struct hrd_machine *m, char *buf, size_t len, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* A file that begins with a decimal number, "N units" included. */
long hrd_machine_number(const struct hrd_machine *m, long missing, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
bool hrd_machine_exists(const struct hrd_machine *m, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* Where a symbolic link leads, as it is written. */
bool hrd_machine_link(const struct hrd_machine *m, char *buf, size_t len, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* Bytes of a file, or -1 with errno. */
long hrd_machine_bytes(const struct hrd_machine *m, void *buf, size_t len, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* Names in a directory, sorted; how many of at most max. */
unsigned hrd_machine_list(const struct hrd_machine *m, const char *dir, char (*names)[HRD_MACHINE_NAME],
                          unsigned max);
/* 0: the user may read and write the file; otherwise errno. */
int hrd_machine_access(const struct hrd_machine *m, const char *file);
/* The line of a file that begins with `key`, behind it and its blanks. */
bool hrd_machine_line(const struct hrd_machine *m, const char *path, const char *key, char *buf, size_t len);
/* What its namespace of this kind ("pid") is called: "pid:[4026531836]"; and whether that is the one the machine booted with. */
bool hrd_machine_namespace(const struct hrd_machine *m, const char *kind, char *buf, size_t len);
/* Whether number n is in a list like "0-3,8". */
bool hrd_list_has(const char *list, long n);

/* ---- what checks share: devices.c -------------------------------------------------------------------------- */

struct hrd_finding;

/* A NIC that matters here, or a GPU. */
struct hrd_nic {
    char name[HRD_MACHINE_NAME];
    char base[160]; /* "/sys/class/infiniband/mlx5_0"; its PCI device is base/device */
    bool rdma;
    unsigned mbit; /* its rate; 0: unknown or down */
};
#define HRD_MAX_NICS 32
/* RDMA devices that the configuration allows, and the interface of the own address. */
unsigned hrd_machine_nics(const struct hrd_machine *m, struct hrd_nic *out);
/* The device and port that links would take now; false with a sentence. Opens devices. */
bool hrd_machine_rdma(const struct hrd_machine *m, unsigned rail, struct hrd_verbs_device *dev, char *why,
                      size_t len);
/* The port of an RDMA device that counts: the configured one, or the first that is ACTIVE, or 1. */
unsigned hrd_machine_port(const struct hrd_machine *m, const struct hrd_nic *nic);
/* PCI addresses of NVIDIA's GPUs. */
unsigned hrd_machine_gpus(const struct hrd_machine *m, char (*out)[HRD_MACHINE_NAME], unsigned max);
/* There is one; else the check is skipped in words. */
bool hrd_machine_has_gpu(const struct hrd_machine *m, struct hrd_finding *f);
/* What stands between devices on PCIe and could redirect, slow down or damage what one writes to the other: a phrase, or
   false. Some of it only root sees. check_pcie.c */
bool hrd_machine_redirects(const struct hrd_machine *m, const char *a, const char *b, char *buf, size_t len);
/* The configuration may use verbs; it accepts nothing else. */
bool hrd_wants_rdma(const struct hrd_machine *m);
bool hrd_needs_rdma(const struct hrd_machine *m);
/* A NIC on PCIe that could be an RDMA device, "" when there is none. */
bool hrd_machine_rdma_hardware(const struct hrd_machine *m, char *pci, size_t len);
/* The interface of the address that others are told; false: there is none. */
bool hrd_machine_own(const struct hrd_machine *m, struct hrd_net *net, char *netif, size_t len);

/* ---- findings ---------------------------------------------------------------------------------------------- */

enum hrd_verdict { HRD_SKIP, HRD_PASS, HRD_WARN, HRD_FAIL }; /* from good to bad */

struct hrd_finding {
    enum hrd_verdict verdict;
    char evidence[1024]; /* what was seen */
    char cause[512];     /* why that is bad; "" for PASS and SKIP */
    char remedy[512];    /* what to do */
};

/* Adds evidence; the verdict becomes the worse one, with the cause and remedy of the first that was as bad. */
void hrd_find(struct hrd_finding *f, enum hrd_verdict verdict, const char *cause, const char *remedy,
              const char *fmt, ...) __attribute__((format(printf, 5, 6)));

struct hrd_check {
    const char *name;  /* "memlock": stable, for scripts */
    const char *group; /* "limits" */
    void (*run)(const struct hrd_machine *m, struct hrd_finding *f);
    bool root; /* sees more as root, outside of the unit's sandbox */
};

extern const struct hrd_check hrd_checks[];
extern const unsigned hrd_nchecks;

const char *hrd_verdict_name(enum hrd_verdict v); /* "pass" */

/* The checks. */
void hrd_check_kernel(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_modules(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_governor(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_clock(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_rdma_device(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_rdma_access(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_rdma_cm(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_rdma_port(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_rdma_rate(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_rdma_gid(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_rdma_mtu(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_rdma_cgroup(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_memlock(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_nofile(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_map_count(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_huge_pages(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_memory_limit(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_address(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_link_speed(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_arp(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_rp_filter(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_tcp_buffers(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_pcie_link(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_numa(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_acs(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_iommu(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_gpu_driver(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_gpu_direct(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_gpu_health(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_gpu_xid(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_gpu_persistence(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_gpu_mode(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_gpu_mig(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_gpu_mps(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_gpu_ipc(const struct hrd_machine *m, struct hrd_finding *f);
void hrd_check_gpu_pairs(const struct hrd_machine *m, struct hrd_finding *f);

/* {check, group, verdict, evidence, cause, remedy}, the caller's. What is not printable in f is replaced. */
json_t *hrd_finding_json(const char *name, const char *group, struct hrd_finding *f);
/* Runs one. */
json_t *hrd_doctor_one(const struct hrd_check *c, const struct hrd_machine *m);
/* All of them: an array. Blocks for up to a second, where GPUs have to be woken for some: opens devices. */
json_t *hrd_doctor_run(const struct hrd_machine *m);
/* Asks NVML. Blocks, see there; the answer for hrd_machine.ask_gpus. */
void hrd_gpu_states_ask(struct hrd_gpu_states *out);

#endif
