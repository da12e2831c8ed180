/* SPDX-License-Identifier: MIT */
/* Each check of the doctor, on a machine where it passes and on one where it does not: files below a directory. */
#include "tests/unit/doctor_machine.h"

#include "daemon/doctor/facts.h"
#include "tests/sim/fake_cm.h"

/* ---- host -------------------------------------------------------------------------------------------------- */

static void test_kernel(void **state)
{
    (void)state;
    expect("kernel", HRD_SKIP, "cannot be read");
    put("/proc/sys/kernel/osrelease", "6.1.0-13-amd64");
    expect("kernel", HRD_PASS, "Linux 6.1.0-13-amd64");
    put("/proc/sys/kernel/osrelease", "5.3.0");
    expect("kernel", HRD_PASS, "5.3.0");
    put("/proc/sys/kernel/osrelease", "5.2.21");
    expect("kernel", HRD_FAIL, "5.2.21");
    put("/proc/sys/kernel/osrelease", "4.18.0-553.el8");
    expect("kernel", HRD_FAIL, "4.18");
}

static void test_clock(void **state)
{
    (void)state;
    expect("clock", HRD_PASS, "kept synchronised");
    clock_state = 0;
    expect("clock", HRD_WARN, "no service");
    expect_remedy("chrony");
    clock_state = -1;
    expect("clock", HRD_SKIP, "does not say");
}

static void test_governor(void **state)
{
    (void)state;
    expect("cpu-governor", HRD_SKIP, "does not control");
    put("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance");
    expect("cpu-governor", HRD_PASS, "performance");
    put("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave");
    expect("cpu-governor", HRD_WARN, "powersave");
    put("/sys/devices/system/cpu/intel_pstate/status", "active");
    expect("cpu-governor", HRD_PASS, "powersave");
}

/* ---- limits ------------------------------------------------------------------------------------------------ */

static void limits(const char *memlock, const char *nofile)
{
    char text[512];
    snprintf(text, sizeof(text),
             "Limit                     Soft Limit           Hard Limit           Units     \n"
             "Max open files            %-20s %-20s files     \n"
             "Max locked memory         %-20s %-20s bytes     ",
             nofile, "1048576", memlock, "unlimited");
    put("/proc/self/limits", text);
}

static void test_memlock(void **state)
{
    (void)state;
    expect("memlock", HRD_SKIP, "cannot be read");
    limits("65536", "65536");
    expect("memlock", HRD_PASS, "no RDMA device");
    rdma_nic("InfiniBand");
    expect("memlock", HRD_WARN,
           "a limit of 64 KiB for locked memory is too low for RDMA; 128 MiB are needed");
    expect_remedy("LimitMEMLOCK=infinity");
    set("transport", "verbs");
    expect("memlock", HRD_FAIL, "too low");
    limits("unlimited", "65536");
    expect("memlock", HRD_PASS, "not limited");
    limits("1073741824", "65536");
    expect("memlock", HRD_PASS, "1024 MiB may be locked, 128 MiB are enough");
}

static void test_open_files(void **state)
{
    (void)state;
    limits("65536", "65536");
    expect("open-files", HRD_PASS, "65536");
    limits("65536", "1024");
    expect("open-files", HRD_WARN, "1024 files may be open, but max_sessions = 1024 needs 3584");
    set("max_sessions", "100");
    expect("open-files", HRD_PASS, "812 are enough");
}

static void test_map_count(void **state)
{
    (void)state;
    put("/proc/sys/vm/max_map_count", "65530");
    expect("max-map-count", HRD_PASS, "65530");
    put("/proc/sys/vm/max_map_count", "8192");
    expect("max-map-count", HRD_WARN, "8192");
}

static void test_memory_limit(void **state)
{
    (void)state;
    put("/proc/meminfo", "MemTotal:       65536000 kB\nMemFree: 1 kB");
    expect("memory-limit", HRD_PASS, "64000 MiB");
    put("/proc/self/cgroup", "0::/system.slice/hreduced.service");
    put("/sys/fs/cgroup/system.slice/hreduced.service/memory.max", "max");
    expect("memory-limit", HRD_PASS, "no limit");
    put("/sys/fs/cgroup/system.slice/memory.max", "8589934592");
    expect("memory-limit", HRD_WARN, "memory.max of /system.slice is 8192 MiB");
    put("/sys/fs/cgroup/system.slice/hreduced.service/memory.max", "104857600");
    expect("memory-limit", HRD_FAIL, "memory.max of /system.slice/hreduced.service is 100 MiB");
    put("/sys/fs/cgroup/system.slice/hreduced.service/memory.max", "68719476736");
    put("/sys/fs/cgroup/system.slice/memory.max", "max");
    expect("memory-limit", HRD_PASS, "65536 MiB");
    gone("/proc/self/cgroup");
    put("/proc/meminfo", "MemTotal:       100000 kB");
    expect("memory-limit", HRD_WARN, "arena_size is 64 MiB of this machine's 97 MiB");
}

static void test_huge_pages(void **state)
{
    (void)state;
    expect("huge-pages", HRD_SKIP, "no transparent");
    put("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never");
    expect("huge-pages", HRD_PASS, "[madvise]");
    put("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]");
    expect("huge-pages", HRD_WARN, "off");
}

/* ---- network ----------------------------------------------------------------------------------------------- */

static void test_address(void **state)
{
    (void)state;
    expect("address", HRD_PASS, "others are told 10.0.0.1 port 18515");
    set("listen", "127.0.0.1");
    expect("address", HRD_WARN, "127.0.0.1");
    set("listen", "0.0.0.0");
    set("interface", "ib7");
    expect("address", HRD_FAIL, "interface = ib7");
}

static void test_link_speed(void **state)
{
    (void)state;
    expect("link-speed", HRD_SKIP, "does not say how fast");
    now_mbit = 1000;
    expect("link-speed", HRD_PASS, "eth0 runs at 1000 Mbit/s");
    max_mbit = 25000;
    expect("link-speed", HRD_WARN, "eth0 runs at 1000 Mbit/s and can do 25000");
    now_mbit = 25000;
    expect("link-speed", HRD_PASS, "25000");
    set("listen", "127.0.0.1");
    expect("link-speed", HRD_SKIP, "no network interface");
}

static void conf(const char *netif, const char *key, const char *value)
{
    char path[128];
    snprintf(path, sizeof(path), "/proc/sys/net/ipv4/conf/%s/%s", netif, key);
    put(path, value);
}

static void test_arp(void **state)
{
    (void)state;
    iface("docker0", "172.17.0.1", 16);
    iface("br-5", "172.17.0.2", 16);
    iface("eth1", "10.0.1.1", 24);
    expect("arp", HRD_PASS, "no two interfaces");
    expect("rp-filter", HRD_PASS, "no two interfaces");
    iface("eth2", "10.0.0.2", 24);
    conf("all", "arp_ignore", "0");
    conf("eth0", "arp_ignore", "1");
    conf("eth0", "arp_announce", "2");
    expect("arp", HRD_WARN, "eth0 and eth2 lie in one subnet (arp_ignore 1 and 0, arp_announce 2 and 0)");
    expect_remedy("arp_announce = 2");
    conf("all", "arp_ignore", "1");
    expect("arp", HRD_WARN, "eth0 and eth2");
    conf("eth2", "arp_announce", "2");
    expect("arp", HRD_PASS, "each answers for itself");
    conf("eth2", "rp_filter", "1");
    expect("rp-filter", HRD_WARN, "rp_filter is 1");
    conf("all", "rp_filter", "2");
    expect("rp-filter", HRD_PASS, "not strict");
}

static void test_tcp_buffers(void **state)
{
    (void)state;
    expect("tcp-buffers", HRD_SKIP, "cannot be read");
    put("/proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456");
    put("/proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t4194304");
    expect("tcp-buffers", HRD_PASS, "6144 KiB and send from 4096 KiB");
    put("/proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t262144");
    expect("tcp-buffers", HRD_WARN, "256 KiB");
}

/* ---- rdma -------------------------------------------------------------------------------------------------- */

static void test_modules(void **state)
{
    (void)state;
    expect("rdma-modules", HRD_SKIP, "no NIC");
    put("/sys/bus/pci/devices/0000:05:00.0/class", "0x020700");
    put("/sys/bus/pci/devices/0000:05:00.0/vendor", "0x15b3");
    put_link("/sys/bus/pci/devices/0000:05:00.0/driver", "../../../../bus/pci/drivers/mlx5_core");
    expect("rdma-modules", HRD_WARN, "0000:05:00.0 has driver mlx5_core, but the kernel made no RDMA device");
    expect_remedy("mlx5_ib");
    put("/sys/class/infiniband/mlx5_0/node_type", "1: CA");
    expect("rdma-modules", HRD_WARN, "ib_uverbs is not loaded");
    expect_remedy("modprobe ib_uverbs");
    set("require", "verbs");
    expect("rdma-modules", HRD_FAIL, "ib_uverbs");
    put("/sys/class/infiniband_verbs/abi_version", "6");
    expect("rdma-modules", HRD_PASS, "mlx5_0 is there");
    set("require", "");
    set("transport", "tcp");
    expect("rdma-modules", HRD_SKIP, "transport = tcp");
}

static void test_device(void **state)
{
    (void)state;
    /* No device and none expected: a machine without RDMA is well, and says in which namespace it looked. */
    expect("rdma-device", HRD_SKIP,
           "no RDMA device in this network namespace (no driver loaded, or 'rdma system' mode "
           "exclusive?)");
    set("transport", "verbs");
    expect("rdma-device", HRD_FAIL, "no RDMA device in this network namespace");
    set("transport", "auto");
    put("/sys/bus/pci/devices/0000:05:00.0/class", "0x020700");
    expect("rdma-device", HRD_WARN, "no RDMA device in this network namespace");
    m.verbs = NULL;
    expect("rdma-device", HRD_WARN, "libibverbs.so.1 cannot be loaded");
    m.verbs = fake_verbs();
    fake_verbs_plain();
    expect("rdma-device", HRD_PASS, "fake0 port 1, RoCE v2, GID 3 (10.0.0.1)");
    iface("eth1", "10.9.0.1", 24);
    set("interface", "eth1");
    expect("rdma-device", HRD_WARN, "no RoCE address is one of those");
    set("verbs_gid_index", "3");
    expect("rdma-device", HRD_PASS, "fake0 port 1, RoCE v2, GID 3");
    fake_verbs_rails(2, NULL);
    snprintf(cfg.verbs_device, sizeof(cfg.verbs_device), "fake0,fake1:1");
    expect("rdma-device", HRD_PASS, "fake1 port 1, RoCE v2, GID 3 (10.0.1.1)");
    fake_verbs_device_port(1, false);
    expect("rdma-device", HRD_WARN, "port 1 of fake1 is DOWN");
    fake_verbs_plain();
    snprintf(cfg.verbs_device, sizeof(cfg.verbs_device), "auto");
    set("verbs_gid_index", "7");
    expect("rdma-device", HRD_WARN, "verbs_gid_index = 7");
    set("transport", "tcp");
    expect("rdma-device", HRD_SKIP, "transport = tcp");
}

static void test_access(void **state)
{
    (void)state;
    char path[512];
    gid_t group = getegid();
    expect("rdma-access", HRD_SKIP, "no RDMA device");
    rdma_nic("InfiniBand");
    snprintf(path, sizeof(path), "%s/dev/infiniband/uverbs0", root);
    expect("rdma-access", HRD_PASS, "/dev/infiniband/uverbs0 (mlx5_0) can be opened");
    chmod(path, 0660);
    expect("rdma-access", HRD_WARN, "cannot be opened by user 999: Permission denied");
    m.gids = &group;
    m.ngids = 1;
    expect("rdma-access", HRD_PASS, "can be opened");
    chmod(path, 0600);
    expect("rdma-access", HRD_WARN, "Permission denied");
    m.uid = geteuid();
    expect("rdma-access", HRD_PASS, "can be opened");
    m.self = true;
    expect("rdma-access", HRD_PASS, "can be opened");
    gone("/dev/infiniband/uverbs0");
    expect("rdma-access", HRD_WARN, "does not exist");
    expect_remedy("rdma-core");
    m.self = false;
    expect("rdma-access", HRD_WARN, "does not exist");
}

static void test_cm(void **state)
{
    (void)state;
    char path[512];
    fake_cm_on(true);
    expect("rdma-cm", HRD_SKIP, "no RDMA device");
    rdma_nic("InfiniBand");
    expect("rdma-cm", HRD_WARN, "/dev/infiniband/rdma_cm does not exist");
    expect_remedy("modprobe rdma_ucm");
    put("/dev/infiniband/rdma_cm", "");
    snprintf(path, sizeof(path), "%s/dev/infiniband/rdma_cm", root);
    chmod(path, 0666);
    expect("rdma-cm", HRD_PASS, "/dev/infiniband/rdma_cm can be opened");
    chmod(path, 0600);
    expect("rdma-cm", HRD_WARN, "cannot be opened by user 999: Permission denied");
    set("verbs_setup", "rdmacm");
    set("transport", "verbs");
    expect("rdma-cm", HRD_FAIL, "cannot be opened");
    fake_cm_on(false);
    expect("rdma-cm", HRD_FAIL, "librdmacm.so.1 cannot be loaded");
    expect_remedy("librdmacm1");
    set("verbs_setup", "exchange");
    expect("rdma-cm", HRD_SKIP, "verbs_setup = exchange");
}

/* What is compared with other nodes is the device that is used, not the first one. */
static void test_facts_of_rdma(void **state)
{
    (void)state;
    rdma_nic("InfiniBand"); /* mlx5_0, which cannot be opened */
    put("/sys/class/infiniband/a0/ports/1/rate", "10 Gb/sec (1X)");
    put("/sys/class/infiniband/fake0/ports/1/rate", "25 Gb/sec (1X EDR)");
    put("/sys/class/infiniband/fake0/ports/1/link_layer", "Ethernet");
    json_t *facts = hrd_doctor_facts(&m), *rdma = json_object_get(facts, "rdma");
    assert_string_equal(json_string_value(json_object_get(rdma, "device")), "a0"); /* there is none to use */
    json_decref(facts);
    fake_verbs_plain();
    facts = hrd_doctor_facts(&m);
    rdma = json_object_get(facts, "rdma");
    assert_string_equal(json_string_value(json_object_get(rdma, "device")), "fake0");
    assert_string_equal(json_string_value(json_object_get(rdma, "rate")), "25 Gb/sec (1X EDR)");
    json_decref(facts);
}

static void test_port(void **state)
{
    (void)state;
    rdma_nic("InfiniBand");
    expect("rdma-port", HRD_PASS, "mlx5_0 port 1 (InfiniBand) is ACTIVE");
    put("/sys/class/infiniband/mlx5_0/ports/1/state", "2: INIT");
    expect("rdma-port", HRD_WARN, "is INIT");
    expect_remedy("opensm");
    put("/sys/class/infiniband/mlx5_0/ports/1/state", "3: ARMED");
    expect("rdma-port", HRD_WARN, "is ARMED");
    put("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN");
    expect("rdma-port", HRD_WARN, "is DOWN");
    set("transport", "verbs");
    expect("rdma-port", HRD_FAIL, "is DOWN");
    /* A second port works: the first may be without a cable, unless it is the one that was chosen. */
    put("/sys/class/infiniband/mlx5_0/ports/2/state", "4: ACTIVE");
    expect("rdma-port", HRD_PASS, "port 1 (InfiniBand) is DOWN; mlx5_0 port 2");
    set("verbs_port", "1");
    expect("rdma-port", HRD_FAIL, "is DOWN");
    set("verbs_port", "auto");
    set("verbs_device", "mlx5_7");
    expect("rdma-port", HRD_SKIP, "no RDMA device");
}

static void test_rate(void **state)
{
    (void)state;
    rdma_nic("InfiniBand");
    expect("rdma-rate", HRD_PASS, "mlx5_0 runs at 100 Gb/sec (4X EDR)");
    put("/sys/class/infiniband/mlx5_0/ports/1/rate", "25 Gb/sec (1X EDR)");
    expect("rdma-rate", HRD_WARN, "mlx5_0 runs at 25 Gb/sec (1X EDR)");
    put("/sys/class/infiniband/mlx5_0/ports/1/rate", "40 Gb/sec (4X QDR)");
    put("/sys/class/infiniband/mlx5_1/ports/1/rate", "100 Gb/sec (4X EDR)");
    put("/sys/class/infiniband/mlx5_1/ports/1/state", "4: ACTIVE");
    put("/sys/class/infiniband/mlx5_1/board_id", "MT_0000000999");
    expect("rdma-rate", HRD_PASS, "mlx5_0 runs at 40 Gb/sec");
    put("/sys/class/infiniband/mlx5_1/board_id", "MT_0000000012");
    expect("rdma-rate", HRD_WARN, "mlx5_0 runs at 40 Gb/sec (4X QDR), mlx5_1 at 100 Gbit/s");
    set("verbs_device", "mlx5_0");
    expect("rdma-rate", HRD_PASS, "40 Gb/sec");
    max_mbit = 200000;
    expect("rdma-rate", HRD_WARN, "and can do 200 Gbit/s");
    /* The port that is in use. */
    max_mbit = 0;
    put("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN");
    expect("rdma-rate", HRD_SKIP, "no port is active");
    put("/sys/class/infiniband/mlx5_0/ports/2/state", "4: ACTIVE");
    put("/sys/class/infiniband/mlx5_0/ports/2/rate", "50 Gb/sec (2X EDR)");
    put("/sys/class/infiniband/mlx5_0/ports/2/link_layer", "InfiniBand");
    expect("rdma-rate", HRD_WARN, "mlx5_0 runs at 50 Gb/sec (2X EDR)");
}

static void test_gid(void **state)
{
    (void)state;
    rdma_nic("InfiniBand");
    expect("rdma-gid", HRD_SKIP, "by LID");
    put("/sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet");
    expect("rdma-gid", HRD_PASS, "GID 2 of mlx5_0 is RoCE v2 and this node's address");
    put("/sys/class/infiniband/mlx5_0/ports/1/gids/2", "0000:0000:0000:0000:0000:ffff:0a09:0001");
    expect("rdma-gid", HRD_WARN, "GID 2 of mlx5_0 is RoCE v2, but not an address that others are told");
    gone("/sys/class/infiniband/mlx5_0/ports/1/gids/2");
    expect("rdma-gid", HRD_WARN, "no RoCE v2 entry but link-local ones");
    set("transport", "verbs");
    expect("rdma-gid", HRD_FAIL, "no device has the entry");
    set("verbs_port", "2");
    put("/sys/class/infiniband/mlx5_0/ports/2/link_layer", "Ethernet");
    put("/sys/class/infiniband/mlx5_0/ports/2/gids/0", "0000:0000:0000:0000:0000:ffff:0a00:0001");
    put("/sys/class/infiniband/mlx5_0/ports/2/gid_attrs/types/0", "RoCE v2");
    expect("rdma-gid", HRD_PASS, "GID 0 of mlx5_0 is RoCE v2 and this node's address");
}

static void test_rdma_mtu(void **state)
{
    (void)state;
    rdma_nic("Ethernet");
    expect("rdma-mtu", HRD_PASS, "eth0 of mlx5_0 has MTU 9000");
    put("/sys/class/infiniband/mlx5_0/device/net/eth0/mtu", "1500");
    expect("rdma-mtu", HRD_WARN, "has MTU 1500, so RoCE packets carry 1024 bytes");
    put("/sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand");
    expect("rdma-mtu", HRD_SKIP, "no RoCE device");
}

static void test_rdma_cgroup(void **state)
{
    (void)state;
    rdma_nic("InfiniBand");
    expect("rdma-cgroup", HRD_SKIP, "version 2");
    put("/proc/self/cgroup", "0::/system.slice/hreduced.service");
    expect("rdma-cgroup", HRD_PASS, "no limit");
    put("/sys/fs/cgroup/system.slice/rdma.max",
        "mlx5_1 hca_handle=2 hca_object=20\nmlx5_0 hca_handle=max hca_object=max");
    expect("rdma-cgroup", HRD_PASS, "no limit");
    put("/sys/fs/cgroup/system.slice/rdma.max",
        "mlx5_1 hca_handle=2 hca_object=9\nmlx5_0 hca_handle=2 hca_object=20");
    expect("rdma-cgroup", HRD_WARN, "rdma.max of /system.slice allows 20 objects of mlx5_0, about 2 nodes");
    put("/sys/fs/cgroup/system.slice/rdma.max", "mlx5_0 hca_handle=2 hca_object=4000");
    expect("rdma-cgroup", HRD_PASS, "high enough");
}

/* ---- pcie -------------------------------------------------------------------------------------------------- */

static void test_pcie_link(void **state)
{
    (void)state;
    expect("pcie-link", HRD_SKIP, "no NIC or GPU");
    rdma_nic("InfiniBand");
    expect("pcie-link", HRD_PASS, "mlx5_0 runs at 16.0 GT/s PCIe x16");
    put("/sys/class/infiniband/mlx5_0/device/current_link_width", "8");
    expect("pcie-link", HRD_WARN, "mlx5_0 runs at 16.0 GT/s PCIe x8 and can do 16.0 GT/s PCIe x16");
    put("/sys/class/infiniband/mlx5_0/device/current_link_width", "4");
    expect("pcie-link", HRD_FAIL,
           "mlx5_0 runs at 16.0 GT/s PCIe x4 (63015 Mbit/s), its network link at 100000 Mbit/s");
    put("/sys/class/infiniband/mlx5_0/device/current_link_width", "16");
    put("/sys/class/infiniband/mlx5_0/device/current_link_speed", "8.0 GT/s PCIe");
    expect("pcie-link", HRD_WARN, "8.0 GT/s PCIe x16 and can do");
    set("transport", "tcp");
    gpu();
    put("/sys/bus/pci/devices/0000:03:00.0/current_link_speed", "2.5 GT/s PCIe");
    put("/sys/bus/pci/devices/0000:03:00.0/max_link_speed", "32.0 GT/s PCIe");
    put("/sys/bus/pci/devices/0000:03:00.0/current_link_width", "16");
    put("/sys/bus/pci/devices/0000:03:00.0/max_link_width", "16");
    expect("pcie-link", HRD_PASS, "GPU 0000:03:00.0 runs at 2.5 GT/s PCIe x16"); /* idle */
    put("/sys/bus/pci/devices/0000:03:00.0/current_link_width", "8");
    expect("pcie-link", HRD_WARN, "GPU 0000:03:00.0");
    put("/sys/bus/pci/devices/0000:03:00.0/current_link_width", "16");
    put("/sys/bus/pci/devices/0000:00:01.0/max_link_speed", "8.0 GT/s PCIe");
    expect("pcie-link", HRD_PASS, "GPU 0000:03:00.0 runs at"); /* the only one: that is what the board has */
    static const char *const other[][2] = {{"class", "0x030200"},
                                           {"vendor", "0x10de"},
                                           {"current_link_speed", "2.5 GT/s PCIe"},
                                           {"max_link_speed", "32.0 GT/s PCIe"},
                                           {"current_link_width", "16"},
                                           {"max_link_width", "16"}};
    for (size_t i = 0; i < sizeof(other) / sizeof(other[0]); i++) {
        char path[128];
        snprintf(path, sizeof(path), "/sys/devices/pci0000:00/0000:00:02.0/0000:04:00.0/%s", other[i][0]);
        put(path, other[i][1]);
    }
    put("/sys/devices/pci0000:00/0000:00:02.0/max_link_speed", "32.0 GT/s PCIe");
    put_link("/sys/bus/pci/devices/0000:04:00.0", "../../../devices/pci0000:00/0000:00:02.0/0000:04:00.0");
    put_link("/sys/bus/pci/devices/0000:00:02.0", "../../../devices/pci0000:00/0000:00:02.0");
    expect("pcie-link", HRD_WARN,
           "the slot of GPU 0000:03:00.0 allows 8.0 GT/s, those of other GPUs 32.0 GT/s");
}

static void test_numa(void **state)
{
    (void)state;
    rdma_nic("InfiniBand");
    expect("numa", HRD_PASS, "one NUMA node");
    put("/sys/devices/system/node/node0/cpulist", "0-15,32-47");
    put("/sys/devices/system/node/node1/cpulist", "16-31,48-63");
    put("/proc/self/status", "Name:\threduced\nCpus_allowed_list:\t0-63");
    expect("numa", HRD_PASS, "mlx5_0 is on NUMA node 0, whose processors the daemon may use");
    put("/proc/self/status", "Name:\threduced\nCpus_allowed_list:\t16-31");
    expect("numa", HRD_WARN, "mlx5_0 is on NUMA node 0 (processors 0-15,32-47), the daemon may use 16-31");
    put("/proc/self/status", "Name:\threduced\nCpus_allowed_list:\t16-33");
    expect("numa", HRD_PASS, "node 0");
    gpu();
    put("/sys/bus/pci/devices/0000:03:00.0/numa_node", "1");
    expect("numa", HRD_PASS, "1 GPU is on NUMA nodes whose processors and memory");
    put("/proc/self/status", "Name:\threduced\nCpus_allowed_list:\t0-63\nMems_allowed_list:\t0");
    expect("numa", HRD_WARN, "GPU 0000:03:00.0 is on NUMA node 1, the daemon may take memory of node 0");
    expect_remedy("NUMAMask=");
    put("/proc/self/status", "Name:\threduced\nCpus_allowed_list:\t0-15\nMems_allowed_list:\t0-1");
    expect("numa", HRD_WARN,
           "GPU 0000:03:00.0 is on NUMA node 1 (processors 16-31,48-63), the daemon may use 0-15");
    put("/sys/class/infiniband/mlx5_0/device/numa_node", "-1");
    expect("numa", HRD_WARN, "does not say");
}

/* The first 256 bytes of PCI's configuration space, then one extended capability of the given kind and control word. */
static void config_space(const char *pci, unsigned kind, unsigned control, size_t len)
{
    char path[512];
    unsigned char bytes[4096] = {0};
    bytes[0x100] = 0x01; /* another capability first: advanced error reporting, the next one at 0x148 */
    bytes[0x102] = 0x01;
    bytes[0x103] = 0x14;
    bytes[0x102] = 0x81;
    bytes[0x148] = (unsigned char)kind;
    bytes[0x14a] = 0x01;
    bytes[0x14e] = (unsigned char)control;
    snprintf(path, sizeof(path), "%s/sys/bus/pci/devices/%s/config", root, pci);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, len, f), len);
    fclose(f);
}

static void test_acs(void **state)
{
    (void)state;
    expect("acs", HRD_SKIP, "no GPU");
    gpu();
    config_space("0000:00:01.0", 0x0d, 0x1d, 64);
    expect("acs", HRD_SKIP, "only root");
    config_space("0000:00:01.0", 0x0d, 0x1d, 4096);
    expect("acs", HRD_WARN, "bridge 0000:00:01.0 above a GPU redirects");
    expect_remedy("setpci");
    config_space("0000:00:01.0", 0x0d, 0x01, 4096);
    expect("acs", HRD_PASS, "no PCIe bridge");
    config_space("0000:00:01.0", 0x0b, 0x1d, 4096);
    expect("acs", HRD_PASS, "no PCIe bridge");
}

static void test_iommu(void **state)
{
    (void)state;
    expect("iommu", HRD_SKIP, "no GPU");
    gpu();
    expect("iommu", HRD_PASS, "no IOMMU");
    put("/sys/bus/pci/devices/0000:03:00.0/iommu_group/type", "identity");
    expect("iommu", HRD_PASS, "passes");
    put("/sys/bus/pci/devices/0000:03:00.0/iommu_group/type", "DMA-FQ");
    expect("iommu", HRD_WARN, "GPU 0000:03:00.0 is in an IOMMU group of type DMA-FQ");
    expect_remedy("iommu=pt");
}

/* ---- the whole --------------------------------------------------------------------------------------------- */

static void test_lists(void **state)
{
    (void)state;
    assert_true(hrd_list_has("0-3,8", 0) && hrd_list_has("0-3,8", 3) && hrd_list_has("0-3,8", 8));
    assert_false(hrd_list_has("0-3,8", 4) || hrd_list_has("0-3,8", 9) || hrd_list_has("", 0) ||
                 hrd_list_has("x", 0) || hrd_list_has("1", 0));
}

/* The report of a machine without anything is complete, and valid JSON whatever stands in its files. */
static void test_report(void **state)
{
    (void)state;
    json_t *check;
    size_t i;
    put("/proc/sys/kernel/osrelease", "6.1\xff\x01 \xc3");
    json_t *all = hrd_doctor_run(&m);
    assert_int_equal(json_array_size(all), hrd_nchecks);
    json_array_foreach(all, i, check)
    {
        assert_string_equal(json_string_value(json_object_get(check, "check")), hrd_checks[i].name);
        assert_non_null(json_string_value(json_object_get(check, "verdict")));
        assert_true(strlen(json_string_value(json_object_get(check, "evidence"))) > 0);
    }
    json_decref(all);
}

/* This machine, whatever it is. */
static void test_here(void **state)
{
    (void)state;
    struct hrd_netif *list = NULL;
    int n = hrd_netif_list(&list);
    assert_true(n >= 0);
    hrd_machine_here(&m, &cfg, list, (unsigned)n);
    json_t *all = hrd_doctor_run(&m);
    assert_int_equal(json_array_size(all), hrd_nchecks);
    json_decref(all);
    free(list);
}

/* Must run last. */
static void test_every_check_was_both(void **state)
{
    (void)state;
    every_check_was_both("gpu", true); /* those are in test_doctor_gpu.c */
}

#define TEST(name) cmocka_unit_test_setup(name, fresh)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_kernel),       TEST(test_clock),         TEST(test_governor),
        TEST(test_memlock),      TEST(test_open_files),    TEST(test_map_count),
        TEST(test_memory_limit), TEST(test_huge_pages),    TEST(test_address),
        TEST(test_link_speed),   TEST(test_arp),           TEST(test_tcp_buffers),
        TEST(test_modules),      TEST(test_device),        TEST(test_access),
        TEST(test_port),         TEST(test_rate),          TEST(test_gid),
        TEST(test_rdma_mtu),     TEST(test_rdma_cgroup),   TEST(test_pcie_link),
        TEST(test_numa),         TEST(test_acs),           TEST(test_iommu),
        TEST(test_lists),        TEST(test_report),        TEST(test_here),
        TEST(test_cm),           TEST(test_facts_of_rdma), TEST(test_every_check_was_both),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
