/* SPDX-License-Identifier: MIT */
/*
 * MPS: one process for the contexts of all its clients. A fault of one of them, such as a kernel that runs wild, ends all.
 * Whoever finds the pipe of its control daemon becomes a client without being asked.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/doctor/doctor.h"

#define MAX_PROCESSES 32768
#define DEFAULT_PIPE "/tmp/nvidia-mps"

struct mps {
    bool control, server;
    long uid; /* of the server */
};

/* Names of processes end after 15 characters, so that both are called alike. */
static void look_at_process(const struct hrd_machine *m, const char *pid, struct mps *mps)
{
    char text[128], path[96];
    if (pid[0] < '0' || pid[0] > '9' || !hrd_machine_text(m, text, sizeof(text), "/proc/%s/comm", pid) ||
        strncmp(text, "nvidia-cuda-mps", 15) != 0)
        return;
    long n = hrd_machine_bytes(m, text, sizeof(text) - 1, "/proc/%s/cmdline", pid);
    text[n > 0 ? n : 0] = 0;
    if (strstr(text, "nvidia-cuda-mps-server")) {
        mps->server = true;
        snprintf(path, sizeof(path), "/proc/%.63s/status", pid);
        if (hrd_machine_line(m, path, "Uid:", text, sizeof(text)))
            mps->uid = strtol(text, NULL, 10);
    } else {
        mps->control = true;
    }
}

static void find_mps(const struct hrd_machine *m, struct mps *mps)
{
    char(*names)[HRD_MACHINE_NAME] = calloc(MAX_PROCESSES, sizeof(*names));
    unsigned n = names ? hrd_machine_list(m, "/proc", names, MAX_PROCESSES) : 0;
    for (unsigned i = 0; i < n; i++)
        look_at_process(m, names[i], mps);
    free(names);
}

/* Where this process would look for MPS. */
static void pipe_directory(const struct hrd_machine *m, char *dir, size_t len)
{
    static const char variable[] = "CUDA_MPS_PIPE_DIRECTORY=";
    char environment[16384];
    long n = hrd_machine_bytes(m, environment, sizeof(environment) - 1, "/proc/self/environ");
    snprintf(dir, len, DEFAULT_PIPE);
    for (long at = 0; at < n; at += (long)strlen(environment + at) + 1) {
        environment[n] = 0;
        if (strncmp(environment + at, variable, sizeof(variable) - 1) == 0)
            snprintf(dir, len, "%s", environment + at + sizeof(variable) - 1);
    }
}

void hrd_check_gpu_mps(const struct hrd_machine *m, struct hrd_finding *f)
{
    static const char remedy[] =
        "Keep the daemon out: Environment=CUDA_MPS_PIPE_DIRECTORY=/run/hreduced/no-mps in its unit "
        "(PrivateTmp=yes "
        "does it for the default directory).";
    struct mps mps = {.uid = -1};
    char dir[512];
    if (!hrd_machine_has_gpu(m, f))
        return;
    find_mps(m, &mps);
    pipe_directory(m, dir, sizeof(dir));
    bool client = hrd_machine_exists(m, "%s/control", dir);
    if (!mps.server && !mps.control && !client)
        hrd_find(f, HRD_PASS, NULL, NULL,
                 "MPS does not run: what one process does wrong on a GPU harms no other");
    else if (!client)
        hrd_find(
            f, HRD_PASS, NULL, NULL,
            "MPS runs%s, and the daemon is not its client: a job's fault does not reach the daemon, whose "
            "kernels take turns with the jobs' (its copies do not)",
            mps.server ? " for jobs" : " and has no client yet");
    else if (mps.server && mps.uid > 0 && mps.uid != (long)m->uid)
        hrd_find(f, HRD_FAIL,
                 "a server serves one user at a time: the daemon gets a context only when all processes of "
                 "that user "
                 "have ended, and jobs wait for it until then",
                 remedy, "the daemon finds MPS at %s, whose server runs for user %ld, not for user %u", dir,
                 mps.uid, (unsigned)m->uid);
    else
        hrd_find(f, HRD_WARN,
                 "the daemon is a client like the jobs: an illegal access of any of them ends its context "
                 "too, and "
                 "with it the GPU buffers of all jobs until it is started again",
                 remedy, "the daemon finds MPS at %s", dir);
}
