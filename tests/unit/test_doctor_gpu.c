/* SPDX-License-Identifier: MIT */
/* The checks of GPUs, each on a machine where it passes and on one where it does not. */
#include "tests/unit/doctor_machine.h"

#include "daemon/gpu/gpu.h"
#include "tests/sim/fake_gpu.h"

static struct hrd_gpu_states seen;

/* A GPU, and NVML that finds nothing wrong with it. */
static struct hrd_gpu_state *one_gpu(void)
{
    gpu();
    seen = (struct hrd_gpu_states){.n = 1,
                                   .total = 1,
                                   .gpu = {{.pci = "0000:03:00.0",
                                            .persistence = 1,
                                            .fabric = HRD_FABRIC_READY,
                                            .compute_mode = HRD_COMPUTE_SHARED}}};
    m.gpus = &seen;
    return &seen.gpu[0];
}

static void test_gpu_driver(void **state)
{
    (void)state;
    static const char *const nodes[] = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia5"};
    static const char version[] = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug "
                                  "19 01:15:15 UTC 2023\nGCC version:";
    char path[512];
    expect("gpu-driver", HRD_SKIP, "no NVIDIA GPU");
    gpu();
    expect("gpu-driver", HRD_FAIL, "no NVIDIA driver is loaded");
    put("/proc/driver/nvidia/version", version);
    put("/proc/driver/nvidia/gpus/0000:03:00.0/information", "Model: \t\t NVIDIA H200\nDevice Minor: \t 5");
    expect("gpu-driver", HRD_FAIL, "/dev/nvidiactl: No such file");
    for (int i = 0; i < 3; i++) {
        put(nodes[i], "");
        snprintf(path, sizeof(path), "%s%s", root, nodes[i]);
        chmod(path, 0666);
    }
    expect("gpu-driver", HRD_PASS, "1 GPUs, NVIDIA driver 535.104.05");
    chmod(path, 0600);
    expect("gpu-driver", HRD_FAIL, "/dev/nvidia5: Permission denied");
    expect_remedy("DeviceAllow");
    chmod(path, 0666);
    /* A container that was given one of two. */
    put("/sys/bus/pci/devices/0000:04:00.0/class", "0x030200");
    put("/sys/bus/pci/devices/0000:04:00.0/vendor", "0x10de");
    expect("gpu-driver", HRD_PASS, "1 of 2 have a device file here");
    gone("/dev/nvidia5");
    expect("gpu-driver", HRD_FAIL, "/dev/nvidia5: No such file");
    put("/dev/nvidia5", "");
    chmod(path, 0666);
    put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  510.108.03  Thu Oct");
    expect("gpu-driver", HRD_FAIL, "NVIDIA driver 510.108.03");
    expect_remedy("515");
}

static void test_health(void **state)
{
    (void)state;
    char path[512];
    expect("gpu-health", HRD_SKIP, "no NVIDIA GPU");
    gpu();
    expect("gpu-health", HRD_SKIP, "no NVIDIA driver");
    seen = (struct hrd_gpu_states){.why = "NVML does not start: Driver Not Loaded"};
    m.gpus = &seen;
    expect("gpu-health", HRD_SKIP, "NVML does not start");
    snprintf(path, sizeof(path), "%s/sys/bus/pci/devices/0000:03:00.0/config", root);
    put("/sys/bus/pci/devices/0000:03:00.0/config", "\xff\xff\xff\xff");
    expect("gpu-health", HRD_FAIL, "GPU 0000:03:00.0 has fallen off the bus");
    struct hrd_gpu_state *g = one_gpu();
    put("/sys/bus/pci/devices/0000:03:00.0/config", "\xde\x10\x30\x23");
    expect("gpu-health", HRD_PASS, "1 GPU answers and reports no fault");
    g->uncorrected = 2;
    expect("gpu-health", HRD_WARN, "GPU 0000:03:00.0 had 2 memory errors");
    g->uncorrected = 0;
    g->repair_pending = 1;
    expect("gpu-health", HRD_WARN, "GPU 0000:03:00.0 needs a reset");
    g->repair_failed = 1;
    expect("gpu-health", HRD_FAIL, "bad memory of GPU 0000:03:00.0 could not be taken out of use");
    g->repair_pending = g->repair_failed = 0;
    g->fabric = HRD_FABRIC_STARTING;
    expect("gpu-health", HRD_FAIL, "GPU 0000:03:00.0 hangs on NVSwitches");
    expect_remedy("nvidia-fabricmanager");
    g->fabric = HRD_FABRIC_NONE;
    seen.total = 3;
    expect("gpu-health", HRD_WARN, "only 1 of 3 GPUs were asked");
    snprintf(g->error, sizeof(g->error), "GPU is lost");
    expect("gpu-health", HRD_FAIL, "GPU 0000:03:00.0: GPU is lost");
    /* Of one that does not answer nothing else is said. */
    g->uncorrected = g->repair_failed = 1;
    expect("gpu-mode", HRD_PASS, "several processes");
}

static void test_xid(void **state)
{
    (void)state;
    expect("gpu-xid", HRD_SKIP, "no NVIDIA GPU");
    gpu();
    expect("gpu-xid", HRD_SKIP, "only root");
    kernel_log = "<6>[    0.000000] Linux version 6.1\n";
    expect("gpu-xid", HRD_PASS, "no Xid");
    kernel_log = "<3>[12.5] NVRM: Xid (PCI:0000:03:00): 31, pid=77, name=python3, MMU Fault\n"
                 "<3>[13.5] NVRM: Xid (PCI:0000:03:00): 31, pid=78, name=python3, MMU Fault\n"
                 "<3>[13.5] NVRM: Xid (PCI:0000:03:00";
    expect("gpu-xid", HRD_PASS, "GPU 0000:03:00: Xid 31, 2 times");
    kernel_log = "<3>[12.5] NVRM: Xid (PCI:0000:03:00): 31, pid=77, name=python3, MMU Fault\n"
                 "<3>[13.5] NVRM: Xid (PCI:0000:04:00): 79, pid='<unknown>', GPU has fallen off the bus.\n";
    expect("gpu-xid", HRD_WARN, "GPU 0000:04:00: Xid 79 (fell off the bus), 1 time");
}

static void test_persistence(void **state)
{
    (void)state;
    struct hrd_gpu_state *g = one_gpu();
    expect("gpu-persistence", HRD_PASS, "is on");
    g->persistence = 0;
    expect("gpu-persistence", HRD_WARN, "off on 0000:03:00.0");
    expect_remedy("nvidia-persistenced");
}

static void test_mode(void **state)
{
    (void)state;
    struct hrd_gpu_state *g = one_gpu();
    expect("gpu-mode", HRD_PASS, "compute mode default");
    g->compute_mode = HRD_COMPUTE_ONE_PROCESS;
    expect("gpu-mode", HRD_WARN, "compute mode of 0000:03:00.0 is exclusive");
    set("require", "p2p");
    expect("gpu-mode", HRD_FAIL, "exclusive");
    g->compute_mode = HRD_COMPUTE_PROHIBITED;
    expect("gpu-mode", HRD_FAIL, "prohibited");
}

static void test_mig(void **state)
{
    (void)state;
    struct hrd_gpu_state *g = one_gpu();
    expect("gpu-mig", HRD_PASS, "MIG is off");
    g->mig_pending = 1;
    expect("gpu-mig", HRD_WARN, "waits for a reset");
    g->mig = 1;
    expect("gpu-mig", HRD_WARN, "MIG is on: 0000:03:00.0");
    g->mig = g->mig_pending = -1;
    expect("gpu-mig", HRD_PASS, "MIG is off");
}

static void process(const char *pid, const char *command, const char *uid)
{
    char path[128], text[128];
    snprintf(path, sizeof(path), "/proc/%s/comm", pid);
    snprintf(text, sizeof(text), "%.15s", command);
    put(path, text);
    snprintf(path, sizeof(path), "/proc/%s/cmdline", pid);
    put(path, command);
    snprintf(path, sizeof(path), "/proc/%s/status", pid);
    snprintf(text, sizeof(text), "Name:\tx\nUid:\t%s\t%s\t%s\t%s", uid, uid, uid, uid);
    put(path, text);
}

static void test_mps(void **state)
{
    (void)state;
    expect("gpu-mps", HRD_SKIP, "no NVIDIA GPU");
    gpu();
    process("77", "python3", "1000");
    expect("gpu-mps", HRD_PASS, "MPS does not run");
    process("80", "nvidia-cuda-mps-control", "0");
    expect("gpu-mps", HRD_PASS, "MPS runs and has no client yet, and the daemon is not its client");
    process("81", "nvidia-cuda-mps-server", "1000");
    expect("gpu-mps", HRD_PASS, "MPS runs for jobs, and the daemon is not its client");
    put("/tmp/nvidia-mps/control", "");
    expect("gpu-mps", HRD_FAIL, "server runs for user 1000, not for user 999");
    expect_remedy("CUDA_MPS_PIPE_DIRECTORY");
    process("81", "nvidia-cuda-mps-server", "999");
    expect("gpu-mps", HRD_WARN, "finds MPS at /tmp/nvidia-mps");
    process("81", "nvidia-cuda-mps-server", "0"); /* of all users */
    expect("gpu-mps", HRD_WARN, "finds MPS at /tmp/nvidia-mps");
    put("/proc/self/environ", "CUDA_MPS_PIPE_DIRECTORY=/run/hreduced/no-mps");
    expect("gpu-mps", HRD_PASS, "the daemon is not its client");
}

static void test_ipc(void **state)
{
    (void)state;
    expect("gpu-ipc", HRD_SKIP, "no NVIDIA GPU");
    gpu();
    expect("gpu-ipc", HRD_WARN, "no /dev/shm");
    put("/dev/shm/x", "");
    put_link("/proc/self/ns/pid", "pid:[4026531836]");
    put_link("/proc/self/ns/ipc", "ipc:[4026531839]");
    put("/proc/self/mounts", "proc /proc proc rw,nosuid,hidepid=off 0 0\ntmpfs /run tmpfs rw,hidepid=2 0 0");
    expect("gpu-ipc", HRD_PASS, "the machine's IPC and PID namespaces");
    put_link("/proc/self/ns/ipc", "ipc:[4026532201]");
    expect("gpu-ipc", HRD_WARN, "in a namespace of a container (ipc:[4026532201])");
    expect_remedy("--ipc=host");
    put_link("/proc/self/ns/ipc", "ipc:[4026531839]");
    put("/proc/self/mounts", "sysfs /sys sysfs rw 0 0\nproc /proc proc rw,hidepid=invisible,gid=5 0 0");
    expect("gpu-ipc", HRD_WARN, "/proc is mounted with hidepid=invisible");
}

static void test_pairs(void **state)
{
    (void)state;
    struct hrd_gpu_pair_info p[] = {
        {.pci = {"0000:03:00.0", "0000:04:00.0"},
         .id = {"0000:03:00.0 MIG-1", "0000:04:00.0"},
         .state = HRD_PAIR_DIRECT,
         .bytes_per_s = 5e10},
        {.id = {"0000:03:00.0", "0000:05:00.0"}, .state = HRD_PAIR_DIRECT, .bytes_per_s = 2.5e10},
        {.id = {"0000:04:00.0", "0000:05:00.0"},
         .state = HRD_PAIR_REFUSED,
         .why = "the driver says that 0000:04:00.0 cannot access 0000:05:00.0"}};
    expect("gpu-pairs", HRD_SKIP, "no NVIDIA GPU");
    gpu();
    expect("gpu-pairs", HRD_SKIP, "only a daemon");
    m.pairs = p;
    expect("gpu-pairs", HRD_SKIP, "no two GPUs were in use together");
    m.npairs = 3;
    expect("gpu-pairs", HRD_PASS,
           "2 pairs are verified to access each other directly, the slowest (0000:03:00.0 and 0000:05:00.0) "
           "at 25.0 "
           "GB/s; 1 pair goes through host memory: the driver says that 0000:04:00.0 cannot");
    p[0].state = HRD_PAIR_BAD;
    snprintf(p[0].why, sizeof(p[0].why),
             "4096 bytes copied from 0000:03:00.0 to 0000:04:00.0 arrived damaged");
    expect("gpu-pairs", HRD_WARN,
           "GPUs 0000:03:00.0 MIG-1 and 0000:04:00.0 claim peer access, but 4096 bytes");
    assert_non_null(strstr(last.cause, "Likely a PCIe switch (ACS) or the IOMMU"));
    put("/sys/bus/pci/devices/0000:03:00.0/iommu_group/type", "DMA-FQ");
    expect("gpu-pairs", HRD_WARN, "claim peer access");
    assert_non_null(strstr(last.cause, "the IOMMU translates their addresses (type DMA-FQ)"));
    set("require", "p2p");
    expect("gpu-pairs", HRD_FAIL, "claim peer access");
}

static void test_gpu_direct(void **state)
{
    (void)state;
    expect("gpu-direct", HRD_SKIP, "no NVIDIA GPU");
    gpu();
    expect("gpu-direct", HRD_SKIP, "no RDMA device");
    rdma_nic("InfiniBand");
    put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05");
    expect("gpu-direct", HRD_WARN, "neither nvidia_peermem");
    put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15");
    put("/sys/module/nvidia/parameters/x", "");
    put("/proc/sys/kernel/osrelease", "6.1.0");
    expect("gpu-direct", HRD_PASS, "dmabuf");
    put("/proc/sys/kernel/osrelease", "5.4.0-150-generic");
    expect("gpu-direct", HRD_WARN, "this kernel cannot register");
    put("/sys/module/nvidia_peermem/refcnt", "0");
    expect("gpu-direct", HRD_PASS, "nvidia_peermem is loaded");
}

/* ---- NVML itself ------------------------------------------------------------------------------------------- */

static void nvml_says(const char *what)
{
    fake_gpu_use();
    setenv("HREDUCE_NVML_LIBRARY", getenv("HREDUCE_CUDA_LIBRARY"), 1);
    setenv("FAKE_CUDA_DEVICES", "3", 1);
    setenv("FAKE_NVML", what, 1);
    hrd_gpu_states_ask(&seen);
}

/* What NVML says arrives where the checks look for it. */
static void test_nvml(void **state)
{
    (void)state;
    setenv("HREDUCE_NVML_LIBRARY", "/nowhere/libnvidia-ml.so.1", 1);
    hrd_gpu_states_ask(&seen);
    assert_int_equal(seen.n, 0);
    assert_non_null(strstr(seen.why, "/nowhere/libnvidia-ml.so.1 cannot be loaded"));
    nvml_says("init=9");
    assert_int_equal(seen.n, 0);
    assert_non_null(strstr(seen.why, "NVML does not start: Driver Not Loaded"));
    nvml_says("");
    assert_true(seen.n == 3 && seen.total == 3 && seen.why[0] == 0);
    for (unsigned i = 0; i < 3; i++) {
        const struct hrd_gpu_state *g = &seen.gpu[i];
        char pci[32];
        snprintf(pci, sizeof(pci), "0000:%02x:00.0", (i + 1) * 0x10);
        assert_string_equal(g->pci, pci);
        assert_true(!g->error[0] && g->compute_mode == 0 && g->mig == 0 && g->mig_pending == 0 &&
                    g->persistence == 1 && g->uncorrected == 0 && g->repair_pending == 0 &&
                    g->repair_failed == 0 && g->fabric == HRD_FABRIC_NONE);
    }
    nvml_says("mode=3,mig=1,mig_pending=0,persistence=0,ecc=7,pending=1,failed=1,fabric=2,lost=1");
    assert_int_equal(seen.n, 3);
    assert_string_equal(seen.gpu[1].pci, "number 1");
    assert_string_equal(seen.gpu[1].error, "GPU is lost");
    const struct hrd_gpu_state *g = &seen.gpu[2];
    assert_true(g->compute_mode == HRD_COMPUTE_ONE_PROCESS && g->mig == 1 && g->mig_pending == 0 &&
                g->persistence == 0 && g->uncorrected == 7 && g->repair_pending == 1 &&
                g->repair_failed == 1 && g->fabric == HRD_FABRIC_STARTING);
    /* A GPU before Ampere retires pages and knows no MIG. */
    nvml_says("mig=2,pending=2,pages=1");
    assert_true(seen.gpu[0].mig == -1 && seen.gpu[0].repair_pending == 1 && seen.gpu[0].repair_failed == -1);
}

/* A report asks NVML by itself, and only where there is a driver. */
static void test_report_asks(void **state)
{
    (void)state;
    gpu();
    for (int driver = 0; driver < 2; driver++) {
        if (driver)
            put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05");
        nvml_says("mode=2");
        json_t *all = hrd_doctor_run(&m), *check;
        const char *verdict = NULL;
        size_t i;
        json_array_foreach(all, i, check)
        {
            if (strcmp(json_string_value(json_object_get(check, "check")), "gpu-mode") == 0)
                verdict = json_string_value(json_object_get(check, "verdict"));
        }
        assert_string_equal(verdict, driver ? "fail" : "skip");
        json_decref(all);
    }
}

/* Must run last. */
static void test_every_check_was_both(void **state)
{
    (void)state;
    every_check_was_both("gpu", false);
}

#define TEST(name) cmocka_unit_test_setup(name, fresh)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_gpu_driver),
        TEST(test_health),
        TEST(test_xid),
        TEST(test_persistence),
        TEST(test_mode),
        TEST(test_mig),
        TEST(test_mps),
        TEST(test_ipc),
        TEST(test_pairs),
        TEST(test_gpu_direct),
        TEST(test_nvml),
        TEST(test_report_asks),
        TEST(test_every_check_was_both),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
