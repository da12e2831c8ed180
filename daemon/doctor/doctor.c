/* SPDX-License-Identifier: MIT */
#include "daemon/doctor/doctor.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "daemon/text.h"

/* In the order in which one thing needs the other. */
const struct hrd_check hrd_checks[] = {
    {"kernel", "host", hrd_check_kernel, false},
    {"clock", "host", hrd_check_clock, true}, /* ProtectClock= in the unit hides it from the daemon */
    {"cpu-governor", "host", hrd_check_governor, false},
    {"memlock", "limits", hrd_check_memlock, false},
    {"open-files", "limits", hrd_check_nofile, false},
    {"max-map-count", "limits", hrd_check_map_count, false},
    {"memory-limit", "limits", hrd_check_memory_limit, false},
    {"huge-pages", "limits", hrd_check_huge_pages, false},
    {"address", "network", hrd_check_address, false},
    {"link-speed", "network", hrd_check_link_speed, false},
    {"arp", "network", hrd_check_arp, false},
    {"rp-filter", "network", hrd_check_rp_filter, false},
    {"tcp-buffers", "network", hrd_check_tcp_buffers, false},
    {"rdma-modules", "rdma", hrd_check_modules, false},
    {"rdma-device", "rdma", hrd_check_rdma_device, false},
    {"rdma-access", "rdma", hrd_check_rdma_access, false},
    {"rdma-cm", "rdma", hrd_check_rdma_cm, false},
    {"rdma-port", "rdma", hrd_check_rdma_port, false},
    {"rdma-rate", "rdma", hrd_check_rdma_rate, false},
    {"rdma-gid", "rdma", hrd_check_rdma_gid, false},
    {"rdma-mtu", "rdma", hrd_check_rdma_mtu, false},
    {"rdma-cgroup", "rdma", hrd_check_rdma_cgroup, false},
    {"pcie-link", "pcie", hrd_check_pcie_link, false},
    {"numa", "pcie", hrd_check_numa, false},
    {"acs", "pcie", hrd_check_acs, true},
    {"iommu", "pcie", hrd_check_iommu, false},
    {"gpu-driver", "gpu", hrd_check_gpu_driver, false},
    {"gpu-health", "gpu", hrd_check_gpu_health, false},
    {"gpu-xid", "gpu", hrd_check_gpu_xid, true},
    {"gpu-persistence", "gpu", hrd_check_gpu_persistence, false},
    {"gpu-mode", "gpu", hrd_check_gpu_mode, false},
    {"gpu-mig", "gpu", hrd_check_gpu_mig, false},
    {"gpu-mps", "gpu", hrd_check_gpu_mps, false},
    {"gpu-ipc", "gpu", hrd_check_gpu_ipc, false},
    {"gpu-pairs", "gpu", hrd_check_gpu_pairs, false},
    {"gpu-direct", "gpu", hrd_check_gpu_direct, false},
};
const unsigned hrd_nchecks = sizeof(hrd_checks) / sizeof(hrd_checks[0]);

const char *hrd_verdict_name(enum hrd_verdict v)
{
    static const char *const names[] = {"skip", "pass", "warn", "fail"};
    return names[v];
}

void hrd_find(struct hrd_finding *f, enum hrd_verdict verdict, const char *cause, const char *remedy,
              const char *fmt, ...)
{
    size_t at = strlen(f->evidence);
    va_list ap;
    if (at > 0 && at + 3 < sizeof(f->evidence)) {
        memcpy(f->evidence + at, "; ", 3);
        at += 2;
    }
    va_start(ap, fmt);
    vsnprintf(f->evidence + at, sizeof(f->evidence) - at, fmt, ap);
    va_end(ap);
    if (verdict <= f->verdict)
        return;
    f->verdict = verdict;
    if (verdict < HRD_WARN)
        return;
    snprintf(f->cause, sizeof(f->cause), "%s", cause ? cause : "");
    snprintf(f->remedy, sizeof(f->remedy), "%s", remedy ? remedy : "");
}

json_t *hrd_finding_json(const char *name, const char *group, struct hrd_finding *f)
{
    hrd_text_printable(f->evidence); /* what stands in files of a machine may be anything */
    hrd_text_printable(f->cause);
    hrd_text_printable(f->remedy);
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s}", "check", name, "group", group, "verdict",
                     hrd_verdict_name(f->verdict), "evidence", f->evidence, "cause", f->cause, "remedy",
                     f->remedy);
}

json_t *hrd_doctor_one(const struct hrd_check *c, const struct hrd_machine *m)
{
    struct hrd_finding f = {.verdict = HRD_SKIP};
    c->run(m, &f);
    return hrd_finding_json(c->name, c->group, &f);
}

json_t *hrd_doctor_run(const struct hrd_machine *m)
{
    struct hrd_machine asked = *m;
    struct hrd_gpu_states gpus;
    json_t *all = json_array();
    /* Not without a driver: to ask for GPUs could load it. */
    if (!m->gpus && hrd_machine_exists(m, "/proc/driver/nvidia/version")) {
        m->ask_gpus(&gpus);
        asked.gpus = &gpus;
    }
    for (unsigned i = 0; i < hrd_nchecks; i++)
        json_array_append_new(all, hrd_doctor_one(&hrd_checks[i], &asked));
    return all;
}
