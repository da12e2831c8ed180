/* SPDX-License-Identifier: MIT */
#include "client/perf/machine.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

long long hpf_now_ms(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (long long)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

void hpf_sleep_ms(unsigned ms)
{
    struct timespec ts = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    nanosleep(&ts, NULL);
}

const char *hpf_status_text(int status, char *buf, size_t len)
{
    if (WIFSIGNALED(status))
        snprintf(buf, len, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        snprintf(buf, len, "exit status %d", WEXITSTATUS(status));
    return buf;
}

uint64_t hpf_proc_kib(const char *path, const char *name)
{
    uint64_t kib = 0;
    char line[256];
    size_t n = strlen(name);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f)) {
        if (strncmp(line, name, n) == 0 && line[n] == ':') {
            kib = strtoull(line + n + 1, NULL, 10);
            break;
        }
    }
    if (f)
        fclose(f);
    return kib;
}

static char *executable(const char *dir, size_t dirlen, const char *rest, const char *name)
{
    char *path = NULL;
    if (asprintf(&path, "%.*s%s/%s", (int)dirlen, dir, rest, name) < 0)
        return NULL;
    if (access(path, X_OK) == 0)
        return path;
    free(path);
    return NULL;
}

char *hpf_find_program(const char *name)
{
    const char *build = getenv("HREDUCE_BUILD");
    char *path = build ? executable(build, strlen(build), "", name) : NULL;
    if (path)
        return path;

    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n > 0) {
        self[n] = 0;
        size_t dir = (size_t)(strrchr(self, '/') - self);
        static const char *const beside[] = {"", "/../sbin", "/../bin"};
        for (size_t i = 0; i < sizeof(beside) / sizeof(beside[0]); i++)
            if ((path = executable(self, dir, beside[i], name)))
                return path;
    }
    const char *rest = getenv("PATH");
    while (rest && *rest) {
        size_t len = strcspn(rest, ":");
        if (len > 0 && (path = executable(rest, len, "", name)))
            return path;
        rest += len + (rest[len] == ':');
    }
    return NULL;
}
