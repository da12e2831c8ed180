/* SPDX-License-Identifier: MIT */
/*
 * A machine for checks of the doctor: files below a directory, and what else struct hrd_machine shows. For programs of
 * cmocka tests; each has its own.
 */
#ifndef TESTS_UNIT_DOCTOR_MACHINE_H
#define TESTS_UNIT_DOCTOR_MACHINE_H

#include <errno.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/doctor/doctor.h"
#include "tests/sim/fake_verbs.h"

static char root[256];
static struct hrd_config cfg;
static struct hrd_netif ifs[8];
static struct hrd_machine m;
static unsigned now_mbit, max_mbit; /* of eth0 */
static int clock_state;
static bool looked_bad[64], looked_good[64]; /* by check */
static const char *kernel_log;               /* NULL: not for this user */

/* ---- a machine of files ------------------------------------------------------------------------------------ */

static inline void make_dirs(const char *path)
{
    char part[1024];
    snprintf(part, sizeof(part), "%s", path);
    for (char *at = strchr(part + strlen(root) + 1, '/'); at; at = strchr(at + 1, '/')) {
        *at = 0;
        mkdir(part, 0755);
        *at = '/';
    }
}

static inline void put(const char *path, const char *text)
{
    char full[1024];
    snprintf(full, sizeof(full), "%s%s", root, path);
    make_dirs(full);
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    fprintf(f, "%s\n", text);
    fclose(f);
}

static inline void put_link(const char *path, const char *target)
{
    char full[1024];
    snprintf(full, sizeof(full), "%s%s", root, path);
    make_dirs(full);
    unlink(full);
    assert_int_equal(symlink(target, full), 0);
}

static inline void gone(const char *path)
{
    char full[1024];
    snprintf(full, sizeof(full), "%s%s", root, path);
    assert_int_equal(unlink(full), 0);
}

static inline int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st;
    (void)kind;
    (void)where;
    return remove(path);
}

static inline unsigned fake_mbit(const char *name, bool most)
{
    assert_string_equal(name, "eth0");
    return most ? max_mbit : now_mbit;
}

static inline unsigned fake_mtu(const char *name)
{
    assert_string_equal(name, "eth0");
    return 1500;
}

static inline int fake_clock(void)
{
    return clock_state;
}

static inline long fake_log(char *buf, size_t len)
{
    errno = EPERM;
    return kernel_log ? snprintf(buf, len, "%s", kernel_log) : -1;
}

static inline void iface(const char *name, const char *addr, unsigned bits)
{
    struct hrd_netif *f = &ifs[m.nifs++];
    memset(f, 0, sizeof(*f));
    snprintf(f->name, sizeof(f->name), "%s", name);
    f->index = m.nifs;
    f->up = true;
    f->loopback = strcmp(name, "lo") == 0;
    f->virt = hrd_netif_virtual_name(name);
    f->bits = bits;
    assert_int_equal(hrd_addr_parse(addr, 0, &f->addr), 0);
}

static inline void set(const char *key, const char *value)
{
    char err[256] = "";
    if (hrd_config_set(&cfg, key, value, err, sizeof(err)) != 0)
        fail_msg("%s", err);
}

/* A node of a cluster without RDMA. */
static inline int fresh(void **state)
{
    (void)state;
    const char *tmp = getenv("TMPDIR");
    snprintf(root, sizeof(root), "%s/machine", tmp ? tmp : "/tmp");
    nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    mkdir(root, 0755);
    fake_verbs_reset();
    hrd_config_defaults(&cfg);
    set("listen", "0.0.0.0");
    now_mbit = max_mbit = 0;
    clock_state = 1;
    kernel_log = NULL;
    m = (struct hrd_machine){.root = root,
                             .cfg = &cfg,
                             .ifs = ifs,
                             .uid = 999,
                             .verbs = fake_verbs(),
                             .verbs_why = "libibverbs.so.1 cannot be loaded",
                             .netif_mbit = fake_mbit,
                             .netif_mtu = fake_mtu,
                             .ask_gpus = hrd_gpu_states_ask,
                             .kernel_log = fake_log,
                             .clock_synchronised = fake_clock};
    iface("lo", "127.0.0.1", 8);
    iface("eth0", "10.0.0.1", 24);
    return 0;
}

/* One more NIC: mlx5_0, of the given link layer, ACTIVE, 100 Gbit/s, on NUMA node 0, fully linked. */
static inline void rdma_nic(const char *layer)
{
    static const char dev[] = "/sys/class/infiniband/mlx5_0";
    static const char *const files[][2] = {{"/ports/1/state", "4: ACTIVE"},
                                           {"/ports/1/rate", "100 Gb/sec (4X EDR)"},
                                           {"/board_id", "MT_0000000012"},
                                           {"/device/net/eth0/mtu", "9000"},
                                           {"/device/current_link_speed", "16.0 GT/s PCIe"},
                                           {"/device/max_link_speed", "16.0 GT/s PCIe"},
                                           {"/device/current_link_width", "16"},
                                           {"/device/max_link_width", "16"},
                                           {"/device/numa_node", "0"},
                                           {"/ports/1/gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001"},
                                           {"/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0001"},
                                           {"/ports/1/gids/2", "0000:0000:0000:0000:0000:ffff:0a00:0001"},
                                           {"/ports/1/gid_attrs/types/0", "RoCE v2"},
                                           {"/ports/1/gid_attrs/types/1", "IB/RoCE v1"},
                                           {"/ports/1/gid_attrs/types/2", "RoCE v2"}};
    char path[512];
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        snprintf(path, sizeof(path), "%s%s", dev, files[i][0]);
        put(path, files[i][1]);
    }
    snprintf(path, sizeof(path), "%s/ports/1/link_layer", dev);
    put(path, layer);
    put("/sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0");
    put("/dev/infiniband/uverbs0", "");
    snprintf(path, sizeof(path), "%s/dev/infiniband/uverbs0", root);
    chmod(path, 0666);
    put("/sys/bus/pci/devices/0000:05:00.0/class", "0x020700");
    put("/sys/bus/pci/devices/0000:05:00.0/vendor", "0x15b3");
}

static inline void gpu(void)
{
    put("/sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0/class", "0x030200");
    put("/sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0/vendor", "0x10de");
    put_link("/sys/bus/pci/devices/0000:03:00.0", "../../../devices/pci0000:00/0000:00:01.0/0000:03:00.0");
    put_link("/sys/bus/pci/devices/0000:00:01.0", "../../../devices/pci0000:00/0000:00:01.0");
}

/* ---- asking ------------------------------------------------------------------------------------------------ */

static struct hrd_finding last;

static inline void expect(const char *name, enum hrd_verdict verdict, const char *words)
{
    unsigned i = 0;
    while (i < hrd_nchecks && strcmp(hrd_checks[i].name, name) != 0)
        i++;
    assert_true(i < hrd_nchecks);
    last = (struct hrd_finding){.verdict = HRD_SKIP};
    hrd_checks[i].run(&m, &last);
    if (last.verdict != verdict || !strstr(last.evidence, words))
        fail_msg("%s: %s instead of %s, or no '%s': %s", name, hrd_verdict_name(last.verdict),
                 hrd_verdict_name(verdict), words, last.evidence);
    looked_good[i] = looked_good[i] || verdict == HRD_PASS;
    looked_bad[i] = looked_bad[i] || verdict >= HRD_WARN;
    /* Whatever is wrong has a cause and a remedy; what is right has neither. */
    assert_int_equal(verdict >= HRD_WARN, last.cause[0] != 0);
    assert_int_equal(verdict >= HRD_WARN, last.remedy[0] != 0);
}

static inline void expect_remedy(const char *words)
{
    if (!strstr(last.remedy, words))
        fail_msg("no '%s' in: %s", words, last.remedy);
}

/* Whether the checks of the group (or of all others) were shown a machine on which they pass and one on which they do not. */
static inline void every_check_was_both(const char *group, bool others)
{
    for (unsigned i = 0; i < hrd_nchecks; i++)
        if ((strcmp(hrd_checks[i].group, group) != 0) == others && (!looked_good[i] || !looked_bad[i]))
            fail_msg("no test makes %s %s", hrd_checks[i].name, looked_good[i] ? "fail" : "pass");
}

#endif
