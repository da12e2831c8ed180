/* SPDX-License-Identifier: MIT */
/* The GPUs themselves, by NVML, sysfs and the kernel's log. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/doctor/doctor.h"
#include "daemon/text.h"

/* NULL: there is nothing to judge, which was said. */
static const struct hrd_gpu_states *states(const struct hrd_machine *m, struct hrd_finding *f)
{
    if (!hrd_machine_has_gpu(m, f))
        return NULL;
    if (m->gpus && m->gpus->n > 0)
        return m->gpus;
    hrd_find(f, HRD_SKIP, NULL, NULL, "%s", m->gpus ? m->gpus->why : "no NVIDIA driver is loaded");
    return NULL;
}

/* "0000:18:00.0, 0000:2a:00.0": the GPUs of which it holds; how many. */
static unsigned which(const struct hrd_gpu_states *s, bool (*holds)(const struct hrd_gpu_state *), char *list,
                      size_t len)
{
    unsigned n = 0;
    list[0] = 0;
    for (unsigned i = 0; i < s->n; i++) {
        if (s->gpu[i].error[0] || !holds(&s->gpu[i]))
            continue;
        hrd_text_list(list, len, s->gpu[i].pci);
        n++;
    }
    return n;
}

static const char *plural(unsigned n)
{
    return n == 1 ? "" : "s";
}

/* ---- health ------------------------------------------------------------------------------------------------ */

/* A device that fell off the bus answers with ones. */
static bool fell_off(const struct hrd_machine *m, const char *pci)
{
    unsigned char vendor[2];
    return hrd_machine_bytes(m, vendor, sizeof(vendor), "/sys/bus/pci/devices/%s/config", pci) == 2 &&
           vendor[0] == 0xff && vendor[1] == 0xff;
}

static bool repair_failed(const struct hrd_gpu_state *g)
{
    return g->repair_failed == 1;
}

static bool repair_pending(const struct hrd_gpu_state *g)
{
    return g->repair_pending == 1;
}

static bool no_fabric(const struct hrd_gpu_state *g)
{
    return g->fabric == HRD_FABRIC_NOT_STARTED || g->fabric == HRD_FABRIC_STARTING;
}

static void judge_state(struct hrd_finding *f, const struct hrd_gpu_states *s)
{
    static const char reset[] =
        "Stop its jobs and reset it (nvidia-smi --gpu-reset -i ADDRESS), or boot anew.";
    char list[512];
    unsigned n;
    for (unsigned i = 0; i < s->n; i++) {
        const struct hrd_gpu_state *g = &s->gpu[i];
        if (g->error[0])
            hrd_find(
                f, HRD_FAIL, "the driver cannot reach it any more; jobs that use it fail",
                "Stop its jobs and reset it (nvidia-smi --gpu-reset), or boot anew; see gpu-xid as root.",
                "GPU %s: %s", g->pci, g->error);
        else if (g->uncorrected > 0)
            hrd_find(f, HRD_WARN, "each of them ended a job or made its data wrong", reset,
                     "GPU %s had %ld memory errors that could not be corrected", g->pci, g->uncorrected);
    }
    if ((n = which(s, repair_failed, list, sizeof(list))) > 0)
        hrd_find(f, HRD_FAIL, "its memory has no spare rows left: errors will come back",
                 "Have the GPU replaced.", "bad memory of GPU%s %s could not be taken out of use", plural(n),
                 list);
    if ((n = which(s, repair_pending, list, sizeof(list))) > 0)
        hrd_find(f, HRD_WARN, "bad memory stays in use until then", reset,
                 "GPU%s %s need%s a reset to take bad memory out of use", plural(n), list, n == 1 ? "s" : "");
    if ((n = which(s, no_fabric, list, sizeof(list))) > 0)
        hrd_find(f, HRD_FAIL, "CUDA does not start on them (error 802: system not yet initialized)",
                 "Start the service nvidia-fabricmanager, of the same version as the driver.",
                 "GPU%s %s hang%s on NVSwitches that are not set up", plural(n), list, n == 1 ? "s" : "");
}

void hrd_check_gpu_health(const struct hrd_machine *m, struct hrd_finding *f)
{
    char gpu[HRD_DOCTOR_GPUS][HRD_MACHINE_NAME];
    unsigned gpus = hrd_machine_gpus(m, gpu, HRD_DOCTOR_GPUS);
    for (unsigned i = 0; i < gpus; i++)
        if (fell_off(m, gpu[i]))
            hrd_find(
                f, HRD_FAIL,
                "it is still listed, but nothing answers at its address: it lost power or its link",
                "Boot the machine anew, from power off. When it happens again: the slot, the power, the GPU.",
                "GPU %s has fallen off the bus", gpu[i]);
    const struct hrd_gpu_states *s = states(m, f);
    if (!s)
        return;
    judge_state(f, s);
    if (s->n < s->total)
        hrd_find(f, HRD_WARN, "without persistence mode the driver wakes each GPU for each question",
                 "See gpu-persistence.", "the driver took so long that only %u of %u GPUs were asked", s->n,
                 s->total);
    if (f->verdict == HRD_SKIP)
        hrd_find(f, HRD_PASS, NULL, NULL, "%u GPU%s answer%s and report%s no fault", s->n, plural(s->n),
                 s->n == 1 ? "s" : "", s->n == 1 ? "s" : "");
}

/* ---- Xid: what the driver reported to the kernel's log ------------------------------------------------------ */

#define LOG_BYTES ((size_t)1 << 20)
#define XIDS 16

struct xid {
    char pci[16];
    long number;
    unsigned times;
};

/* Faults of the machine; of all others the job's own mistake is the usual reason. */
static const struct {
    long number;
    const char *words;
} fault[] = {{48, "memory error that could not be corrected"},
             {61, "its microcontroller stopped"},
             {62, "its microcontroller stopped"},
             {63, "bad memory is to be taken out of use"},
             {64, "bad memory could not be taken out of use"},
             {74, "NVLink error"},
             {79, "fell off the bus"},
             {92, "many memory errors that were corrected"},
             {95, "memory error that hit all its jobs"},
             {119, "its firmware did not answer"},
             {120, "its firmware failed"},
             {140, "memory error that could not be corrected"}};

static const char *fault_words(long number)
{
    for (size_t i = 0; i < sizeof(fault) / sizeof(fault[0]); i++)
        if (fault[i].number == number)
            return fault[i].words;
    return NULL;
}

/* "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus." */
static unsigned find_xids(const char *log, struct xid *out)
{
    unsigned n = 0;
    for (const char *at = log; (at = strstr(at, "Xid (PCI:")) != NULL;) {
        struct xid x = {.times = 1};
        at += strlen("Xid (PCI:");
        size_t len = strcspn(at, ")\n");
        if (len == 0 || len >= sizeof(x.pci) || at[len] != ')' || at[len + 1] != ':')
            continue;
        memcpy(x.pci, at, len);
        x.number = strtol(at + len + 2, NULL, 10);
        unsigned i = 0;
        while (i < n && (out[i].number != x.number || strcmp(out[i].pci, x.pci) != 0))
            i++;
        if (i < n)
            out[i].times++;
        else if (n < XIDS)
            out[n++] = x;
    }
    return n;
}

void hrd_check_gpu_xid(const struct hrd_machine *m, struct hrd_finding *f)
{
    struct xid xid[XIDS];
    if (!hrd_machine_has_gpu(m, f))
        return;
    char *log = malloc(LOG_BYTES);
    long len = log ? m->kernel_log(log, LOG_BYTES - 1) : -1;
    if (len < 0) {
        hrd_find(f, HRD_SKIP, NULL, NULL,
                 log && errno == EPERM ? "only root may read the kernel's log"
                                       : "the kernel's log cannot be read");
        free(log);
        return;
    }
    log[len] = 0;
    unsigned n = find_xids(log, xid);
    free(log);
    for (unsigned i = 0; i < n; i++) {
        const char *words = fault_words(xid[i].number);
        if (words)
            hrd_find(
                f, HRD_WARN, "the driver reported a fault of the GPU or its connection, not of a job",
                "See gpu-health. Reset the GPU; when it comes back, look at its power, cooling and slot, and "
                "have it replaced.",
                "GPU %s: Xid %ld (%s), %u time%s", xid[i].pci, xid[i].number, words, xid[i].times,
                plural(xid[i].times));
        else
            hrd_find(f, HRD_PASS, NULL, NULL, "GPU %s: Xid %ld, %u time%s, by a job as a rule", xid[i].pci,
                     xid[i].number, xid[i].times, plural(xid[i].times));
    }
    if (n == 0)
        hrd_find(f, HRD_PASS, NULL, NULL, "the kernel's log has no Xid");
}

/* ---- modes ------------------------------------------------------------------------------------------------- */

static bool persistence_off(const struct hrd_gpu_state *g)
{
    return g->persistence == 0;
}

void hrd_check_gpu_persistence(const struct hrd_machine *m, struct hrd_finding *f)
{
    char list[512];
    const struct hrd_gpu_states *s = states(m, f);
    if (!s)
        return;
    unsigned n = which(s, persistence_off, list, sizeof(list));
    if (n > 0)
        hrd_find(
            f, HRD_WARN,
            "when nobody uses a GPU, the driver shuts it down; the first job after that waits seconds for "
            "it, "
            "and counters of errors begin anew",
            "Enable nvidia-persistenced (systemctl enable --now nvidia-persistenced), or nvidia-smi -pm 1.",
            "persistence mode is off on %s", list);
    else
        hrd_find(f, HRD_PASS, NULL, NULL, "persistence mode is on");
}

static bool prohibited(const struct hrd_gpu_state *g)
{
    return g->compute_mode == HRD_COMPUTE_PROHIBITED;
}

static bool exclusive(const struct hrd_gpu_state *g)
{
    return g->compute_mode == HRD_COMPUTE_ONE_PROCESS || g->compute_mode == HRD_COMPUTE_ONE_THREAD;
}

void hrd_check_gpu_mode(const struct hrd_machine *m, struct hrd_finding *f)
{
    char list[512];
    const struct hrd_gpu_states *s = states(m, f);
    if (!s)
        return;
    if (which(s, prohibited, list, sizeof(list)) > 0)
        hrd_find(f, HRD_FAIL, "no process can compute on it", "nvidia-smi -c DEFAULT",
                 "compute mode of %s is prohibited", list);
    if (which(s, exclusive, list, sizeof(list)) > 0)
        hrd_find(f, m->cfg->require & HRP_REQUIRE_P2P ? HRD_FAIL : HRD_WARN,
                 "one process at a time gets a context: the job has it, so the daemon gets none, and jobs "
                 "copy GPU "
                 "memory on their own stream instead",
                 "nvidia-smi -c DEFAULT. Where the mode has to stay, daemon and jobs need one MPS server, "
                 "with what "
                 "gpu-mps says of it.",
                 "compute mode of %s is exclusive", list);
    if (f->verdict == HRD_SKIP)
        hrd_find(f, HRD_PASS, NULL, NULL, "several processes may use each GPU (compute mode default)");
}

static bool mig_on(const struct hrd_gpu_state *g)
{
    return g->mig == 1;
}

static bool mig_changes(const struct hrd_gpu_state *g)
{
    return g->mig >= 0 && g->mig_pending >= 0 && g->mig != g->mig_pending;
}

void hrd_check_gpu_mig(const struct hrd_machine *m, struct hrd_finding *f)
{
    char list[512];
    const struct hrd_gpu_states *s = states(m, f);
    if (!s)
        return;
    unsigned n = which(s, mig_on, list, sizeof(list));
    if (n > 0)
        hrd_find(f, HRD_WARN,
                 "an instance is used like a GPU of its own, but instances cannot access each other, and a "
                 "process "
                 "sees one of them: data between ranks goes through host memory",
                 "For jobs over several ranks switch it off (nvidia-smi -mig 0). Where it stays, give the "
                 "daemon the "
                 "jobs' instances, with their files below /dev/nvidia-caps.",
                 "MIG is on: %s", list);
    if ((n = which(s, mig_changes, list, sizeof(list))) > 0)
        hrd_find(f, HRD_WARN, "the mode changes with the next reset, under the feet of whoever runs then",
                 "Stop its jobs and reset it (nvidia-smi --gpu-reset).", "MIG of %s waits for a reset to %s",
                 list, s->n == n ? "change" : "change there");
    if (f->verdict == HRD_SKIP)
        hrd_find(f, HRD_PASS, NULL, NULL, "MIG is off");
}
