/* SPDX-License-Identifier: MIT */
/* The NVIDIA driver, what it lets through, and what the daemon found between its GPUs. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/doctor/doctor.h"
#include "daemon/gpu/gpu.h"

/* The first that has the second version of the stream memory operations (CUDA 11.7), without which jobs' GPU buffers are
   refused: kernels/gpu_functions.def. */
#define NEEDED_DRIVER 515

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

static void judge_file(const struct hrd_machine *m, struct hrd_finding *f, const char *file)
{
    int err = hrd_machine_access(m, file);
    if (err != 0)
        hrd_find(f, HRD_FAIL, "the user of the daemon cannot use the GPUs",
                 err == ENOENT
                     ? "Run nvidia-modprobe -u -c=0 or nvidia-persistenced; PrivateDevices= in the unit or a "
                       "container without GPUs hides them, too."
                     : "Check the mode of the file and DeviceAllow= in the unit of hreduced.",
                 "%s: %s", file, strerror(err));
}

/* A GPU's own file. One that is not there is a GPU that was not given to this container, if others were. */
static void judge_files(const struct hrd_machine *m, struct hrd_finding *f, char (*gpu)[HRD_MACHINE_NAME],
                        unsigned gpus)
{
    char path[HRD_DOCTOR_GPUS][64], dir[160], minor[16];
    unsigned there = 0;
    for (unsigned i = 0; i < gpus; i++) {
        snprintf(dir, sizeof(dir), "/proc/driver/nvidia/gpus/%.63s/information", gpu[i]);
        if (!hrd_machine_line(m, dir, "Device Minor:", minor, sizeof(minor)))
            snprintf(minor, sizeof(minor), "%u", i);
        snprintf(path[i], sizeof(path[i]), "/dev/nvidia%s", minor);
        there += hrd_machine_access(m, path[i]) != ENOENT;
    }
    if (there == 0)
        judge_file(m, f, path[0]);
    for (unsigned i = 0; i < gpus; i++)
        if (hrd_machine_access(m, path[i]) != ENOENT)
            judge_file(m, f, path[i]);
    if (there > 0 && there < gpus)
        hrd_find(f, HRD_PASS, NULL, NULL, "%u of %u have a device file here", there, gpus);
}

void hrd_check_gpu_driver(const struct hrd_machine *m, struct hrd_finding *f)
{
    char gpu[HRD_DOCTOR_GPUS][HRD_MACHINE_NAME], version[64];
    unsigned gpus = hrd_machine_gpus(m, gpu, HRD_DOCTOR_GPUS);
    if (!hrd_machine_has_gpu(m, f))
        return;
    if (!driver_version(m, version, sizeof(version))) {
        hrd_find(f, HRD_FAIL, "GPU buffers cannot be used",
                 "Install the NVIDIA driver and load it (modprobe nvidia).",
                 "%u GPUs on PCIe (%s first), but no NVIDIA driver is loaded", gpus, gpu[0]);
        return;
    }
    long major = strtol(version, NULL, 10);
    if (major > 0 && major < NEEDED_DRIVER)
        hrd_find(
            f, HRD_FAIL,
            "it cannot write and wait for words in stream order as calls with a stream need it (the second "
            "version of the stream memory operations, CUDA 11.7), so GPU buffers are refused",
            "Install a driver of version 515 or later.", "%u GPUs, NVIDIA driver %s", gpus, version);
    else
        hrd_find(f, HRD_PASS, NULL, NULL, "%u GPUs, NVIDIA driver %s", gpus, version);
    judge_file(m, f, "/dev/nvidiactl");
    judge_file(m, f, "/dev/nvidia-uvm");
    judge_files(m, f, gpu, gpus);
}

/* ---- GPUDirect RDMA ---------------------------------------------------------------------------------------- */

/* Linux registers dmabufs with an RDMA device since 5.12. */
static bool kernel_takes_dmabuf(const struct hrd_machine *m)
{
    char text[128], *end;
    if (!hrd_machine_text(m, text, sizeof(text), "/proc/sys/kernel/osrelease"))
        return true;
    long major = strtol(text, &end, 10), minor = *end == '.' ? strtol(end + 1, NULL, 10) : 0;
    return major > 5 || (major == 5 && minor >= 12);
}

void hrd_check_gpu_direct(const struct hrd_machine *m, struct hrd_finding *f)
{
    char names[1][HRD_MACHINE_NAME];
    if (!hrd_machine_has_gpu(m, f))
        return;
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
    static const char cause[] =
        "the NIC probably cannot read and write GPU memory, so data is copied through host memory";
    if (peermem || (open_module && kernel_takes_dmabuf(m)))
        hrd_find(f, HRD_PASS, NULL, NULL, "%s; 'hreducectl path' says what a communicator really uses",
                 peermem ? "nvidia_peermem is loaded"
                         : "the open kernel modules can export GPU memory (dmabuf)");
    else if (open_module)
        hrd_find(
            f, HRD_WARN, cause, "modprobe nvidia_peermem, or boot Linux 5.12 or later.",
            "nvidia_peermem is not loaded, and this kernel cannot register what NVIDIA's open kernel modules "
            "export (dmabuf)");
    else
        hrd_find(f, HRD_WARN, cause,
                 "modprobe nvidia_peermem, or install the open variant of NVIDIA's kernel modules.",
                 "neither nvidia_peermem nor NVIDIA's open kernel modules are loaded");
}

/* ---- CUDA IPC ---------------------------------------------------------------------------------------------- */

#define STAGED                                                                                        \
    "legacy CUDA IPC hands GPU memory over only inside one IPC and one PID namespace; jobs that are " \
    "elsewhere "                                                                                      \
    "copy it on their own stream instead, or are refused"

/* What mounts of /proc with hidepid= hide: the option, or false. */
static bool hides_processes(const struct hrd_machine *m, char *option, size_t len)
{
    char mounts[8192], *save = NULL;
    if (!hrd_machine_text(m, mounts, sizeof(mounts), "/proc/self/mounts"))
        return false;
    for (char *line = strtok_r(mounts, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        const char *at = strstr(line, "hidepid=");
        if (!at || !strstr(line, " /proc proc ") || strncmp(at, "hidepid=0", 9) == 0 ||
            strncmp(at, "hidepid=off", 11) == 0)
            continue;
        snprintf(option, len, "%.*s", (int)strcspn(at, ", "), at);
        return true;
    }
    return false;
}

void hrd_check_gpu_ipc(const struct hrd_machine *m, struct hrd_finding *f)
{
    static const char *const kinds[] = {"ipc", "pid"};
    char name[64], option[64];
    if (!hrd_machine_has_gpu(m, f))
        return;
    for (unsigned i = 0; i < 2; i++)
        if (!hrd_machine_namespace(m, kinds[i], name, sizeof(name)) && name[0])
            hrd_find(f, HRD_WARN, STAGED,
                     "Run the daemon outside of a container, or in one that has the machine's namespaces "
                     "(--ipc=host --pid=host), and jobs' containers likewise.",
                     "the daemon is in a namespace of a container (%s)", name);
    if (hides_processes(m, option, sizeof(option)))
        hrd_find(
            f, HRD_WARN, "the daemon does not see the processes of other users, whose memory it is to open",
            "Leave ProtectProc= out of the unit, or mount /proc with gid= of a group that the daemon is in.",
            "/proc is mounted with %s", option);
    if (!hrd_machine_exists(m, "/dev/shm"))
        hrd_find(f, HRD_WARN, "the NVIDIA driver keeps what processes share by CUDA IPC there",
                 "Mount a tmpfs at /dev/shm.", "there is no /dev/shm");
    if (f->evidence[0] == 0)
        hrd_find(f, HRD_PASS, NULL, NULL, "the daemon is in the machine's IPC and PID namespaces");
}

/* ---- pairs ------------------------------------------------------------------------------------------------- */

static void judge_bad_pair(const struct hrd_machine *m, struct hrd_finding *f,
                           const struct hrd_gpu_pair_info *p)
{
    char why[160], cause[400];
    bool seen = hrd_machine_redirects(m, p->pci[0], p->pci[1], why, sizeof(why));
    snprintf(cause, sizeof(cause),
             "what the GPUs say of each other is not what their connection does, so data between them goes "
             "through host memory. %s",
             seen ? why : "Likely a PCIe switch (ACS) or the IOMMU redirects it, which root sees");
    hrd_find(f, m->cfg->require & HRP_REQUIRE_P2P ? HRD_FAIL : HRD_WARN, cause,
             "See acs and iommu in this report, as root: disable ACS on the switch, boot with iommu=pt. The "
             "pair is "
             "tried again when the GPUs come into use the next time.",
             "GPUs %s and %s claim peer access, but %s", p->id[0], p->id[1], p->why);
}

void hrd_check_gpu_pairs(const struct hrd_machine *m, struct hrd_finding *f)
{
    const struct hrd_gpu_pair_info *slowest = NULL, *refused = NULL;
    unsigned direct = 0, host = 0;
    if (!hrd_machine_has_gpu(m, f))
        return;
    if (!m->pairs) {
        hrd_find(f, HRD_SKIP, NULL, NULL, "only a daemon that runs knows the pairs that it verified");
        return;
    }
    for (unsigned i = 0; i < m->npairs; i++) {
        const struct hrd_gpu_pair_info *p = &m->pairs[i];
        if (p->state == HRD_PAIR_BAD) {
            judge_bad_pair(m, f, p);
        } else if (p->state == HRD_PAIR_REFUSED) {
            refused = p;
            host++;
        } else {
            direct++;
            if (!slowest || p->bytes_per_s < slowest->bytes_per_s)
                slowest = p;
        }
    }
    if (slowest)
        hrd_find(f, HRD_PASS, NULL, NULL,
                 "%u pair%s verified to access each other directly, the slowest (%s and %s) at %.1f GB/s",
                 direct, direct == 1 ? " is" : "s are", slowest->id[0], slowest->id[1],
                 slowest->bytes_per_s / 1e9);
    if (refused)
        hrd_find(f, HRD_PASS, NULL, NULL, "%u pair%s through host memory: %s", host,
                 host == 1 ? " goes" : "s go", refused->why);
    if (m->npairs == 0)
        hrd_find(
            f, HRD_SKIP, NULL, NULL,
            "no two GPUs were in use together since the daemon started; a pair is verified when they first "
            "are");
}
