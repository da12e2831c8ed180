/* SPDX-License-Identifier: MIT */
/* The NVIDIA driver. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/doctor/doctor.h"

#define MAX_GPUS 32u

/* "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ...": the first word with two dots or one. */
static bool driver_version(const struct hrd_machine *m, char *out, size_t len)
{
    char text[512], *save = NULL;
    if (!hrd_machine_text(m, text, sizeof(text), "/proc/driver/nvidia/version"))
        return false;
    for (char *word = strtok_r(text, " \n", &save); word; word = strtok_r(NULL, " \n", &save))
        if (strspn(word, "0123456789.") == strlen(word) && strchr(word, '.')) {
            snprintf(out, len, "%s", word);
            return true;
        }
    snprintf(out, len, "of an unknown version");
    return true;
}

void hrd_check_gpu_driver(const struct hrd_machine *m, struct hrd_finding *f)
{
    static const char *const nodes[] = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"};
    char gpu[MAX_GPUS][HRD_MACHINE_NAME], version[64];
    unsigned gpus = hrd_machine_gpus(m, gpu, MAX_GPUS);
    if (gpus == 0) {
        hrd_find(f, HRD_SKIP, NULL, NULL, "this machine has no NVIDIA GPU");
        return;
    }
    if (!driver_version(m, version, sizeof(version))) {
        hrd_find(f, HRD_FAIL, "GPU buffers cannot be used",
                 "Install the NVIDIA driver and load it (modprobe nvidia).",
                 "%u GPUs on PCIe (%s first), but no NVIDIA driver is loaded", gpus, gpu[0]);
        return;
    }
    hrd_find(f, HRD_PASS, NULL, NULL, "%u GPUs, NVIDIA driver %s", gpus, version);
    for (size_t i = 0; i < sizeof(nodes) / sizeof(nodes[0]); i++) {
        int err = hrd_machine_access(m, nodes[i]);
        if (err != 0)
            hrd_find(
                f, HRD_FAIL, "the user of the daemon cannot use the GPUs",
                err == ENOENT
                    ? "Run nvidia-modprobe -u -c=0 or nvidia-persistenced; PrivateDevices= in the unit or a "
                      "container without GPUs hides them, too."
                    : "Check the mode of the file and DeviceAllow= in the unit of hreduced.",
                "%s: %s", nodes[i], strerror(err));
    }
}

void hrd_check_gpu_direct(const struct hrd_machine *m, struct hrd_finding *f)
{
    char gpu[1][HRD_MACHINE_NAME], names[1][HRD_MACHINE_NAME];
    if (hrd_machine_gpus(m, gpu, 1) == 0) {
        hrd_find(f, HRD_SKIP, NULL, NULL, "this machine has no NVIDIA GPU");
        return;
    }
    if (!hrd_wants_rdma(m) || hrd_machine_list(m, "/sys/class/infiniband", names, 1) == 0) {
        hrd_find(f, HRD_SKIP, NULL, NULL, "there is no RDMA device that could reach a GPU");
        return;
    }
    /* Which of the ways works is known only when GPU memory is registered: the path report says what was taken. */
    bool open_module =
        hrd_machine_exists(m, "/sys/module/nvidia/parameters") &&
        hrd_machine_line(m, "/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open", (char[8]){0}, 8);
    bool peermem = hrd_machine_exists(m, "/sys/module/nvidia_peermem") ||
                   hrd_machine_exists(m, "/sys/module/nv_peer_mem");
    if (peermem || open_module)
        hrd_find(f, HRD_PASS, NULL, NULL, "%s; 'hreducectl path' says what a communicator really uses",
                 peermem ? "nvidia_peermem is loaded"
                         : "the open kernel modules can export GPU memory (dmabuf)");
    else
        hrd_find(f, HRD_WARN,
                 "the NIC probably cannot read and write GPU memory, so data is copied through host memory",
                 "modprobe nvidia_peermem, or install the open variant of NVIDIA's kernel modules.",
                 "neither nvidia_peermem nor NVIDIA's open kernel modules are loaded");
}
