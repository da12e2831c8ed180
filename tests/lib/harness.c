/* SPDX-License-Identifier: MIT */
/* The parent's side: daemons, jobs, and looking at them from outside. */
#include "tests/lib/harness.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Clusters that run, so that a test that dies ends them in order and shows what they had to say. */
#define MAX_KEYS 32u
#define MAX_LIVE 8
static struct hpf_cluster *live[MAX_LIVE];

static void remember(struct hpf_cluster *c)
{
    for (unsigned i = 0; i < MAX_LIVE; i++) {
        if (!live[i]) {
            live[i] = c;
            return;
        }
    }
}

static void forget(const struct hpf_cluster *c)
{
    for (unsigned i = 0; i < MAX_LIVE; i++)
        if (live[i] == c)
            live[i] = NULL;
}

static void end_live(void)
{
    char text[2000];
    for (unsigned i = 0; i < MAX_LIVE; i++) {
        struct hpf_cluster *c = live[i];
        if (!c || c->owner != getpid())
            continue;
        live[i] = NULL;
        for (unsigned n = 0; n < c->nnodes && n < 4; n++) {
            hpf_node_log_tail(c, n, text, sizeof(text));
            fprintf(stderr, "---- the end of the log of node %u:\n%s\n", n, text);
        }
        hpf_cluster_free(c, text, sizeof(text));
    }
}

void ht_die(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fflush(stdout);
    /* The word by which tests/run finds the sentence among the logs. */
    fputs("FAILED: ", stderr);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
    end_live();
    exit(1);
}

void ht_skip(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fflush(stderr);
    vprintf(fmt, ap);
    printf("\n");
    va_end(ap);
    exit(77);
}

unsigned ht_ms(unsigned ms)
{
    const char *scale = getenv("HREDUCE_TIME_SCALE");
    unsigned long factor = scale ? strtoul(scale, NULL, 10) : 1;
    return factor > 1 ? ms * (unsigned)factor : ms;
}

bool ht_sanitized(void)
{
    const char *s = getenv("HREDUCE_SANITIZE");
    return s && s[0];
}

uint64_t ht_memory_available(void)
{
    return hpf_proc_kib("/proc/meminfo", "MemAvailable") << 10;
}

/* ---- daemons and jobs ------------------------------------------------------------------------------------ */

bool ht_over_verbs(void)
{
    const char *transport = getenv("HREDUCE_TEST_TRANSPORT");
    return transport && strcmp(transport, "verbs") == 0;
}

struct hpf_cluster *ht_cluster(unsigned nnodes, const char *const *keys)
{
    char err[2048];
    const char *all[MAX_KEYS + 1];
    unsigned nkeys = 0;
    for (; keys && keys[nkeys]; nkeys++) {
        HT_CHECK(nkeys < MAX_KEYS, "a test may set %u keys", MAX_KEYS);
        all[nkeys] = keys[nkeys];
    }
    if (ht_over_verbs() && nnodes > 1)
        all[nkeys++] = "transport = verbs";
    struct hpf_cluster_options options = {
        .nnodes = nnodes, .keys = all, .nkeys = nkeys, .timeout_ms = ht_ms(20000)};
    struct hpf_cluster *c = NULL;
    if (hpf_cluster_new(&c, &options, err, sizeof(err)) < 0)
        ht_die("%s", err);
    remember(c);
    return c;
}

void ht_cluster_end(struct hpf_cluster *c)
{
    char err[2048];
    for (unsigned i = 0; ht_over_verbs() && i < c->nnodes; i++)
        HT_CHECK(!ht_log_has(c, i, ": tcp, "), "node %u exchanged over tcp", i);
    forget(c);
    if (hpf_cluster_free(c, err, sizeof(err)) < 0)
        ht_die("%s", err);
}

/* Of the job that is being started; the ranks inherit them. */
static size_t inherited_user_offset, inherited_expected_bytes;

struct hpf_job *ht_start(struct hpf_cluster *c, const struct ht_job *job)
{
    char err[2048];
    if (job->nranks > HT_MAX_RANKS)
        ht_die("a test may have %u ranks, not %u", HT_MAX_RANKS, job->nranks);
    inherited_expected_bytes = job->expected_bytes;
    inherited_user_offset = (sizeof(struct ht_page) + job->expected_bytes + 63) / 64 * 64;
    struct hpf_job_options options = {.nranks = job->nranks,
                                      .node_of_rank = job->map,
                                      .fn = job->fn,
                                      .arg = job->arg,
                                      .shared_bytes = inherited_user_offset + job->shared_bytes};
    struct hpf_job *started = NULL;
    if (hpf_job_start(&started, c, &options, err, sizeof(err)) < 0)
        ht_die("%s", err);
    ((struct ht_page *)hpf_job_shared(started))->user_offset = inherited_user_offset;
    return started;
}

void *ht_job_user_shared(struct hpf_job *job)
{
    struct ht_page *page = hpf_job_shared(job);
    return (char *)page + page->user_offset;
}

void *ht_shared(struct hpf_rank *me)
{
    return (char *)me->shared + inherited_user_offset;
}

size_t ht_expected_bytes(void)
{
    return inherited_expected_bytes;
}

void ht_finish(struct hpf_job *job, unsigned timeout_ms)
{
    char err[2048];
    if (hpf_job_wait(job, ht_ms(timeout_ms), err, sizeof(err)) < 0)
        ht_die("%s", err);
    hpf_job_free(job);
}

void ht_run(struct hpf_cluster *c, const struct ht_job *job)
{
    ht_finish(ht_start(c, job), 60000);
}

/* ---- looking from outside -------------------------------------------------------------------------------- */

/* What a program prints, to be freed. */
static char *output_of(const char *program, char *const *argv)
{
    enum { ROOM = 1 << 20 };
    int fd[2], status = 0;
    char *text = calloc(1, ROOM);
    if (!text || pipe2(fd, O_CLOEXEC) < 0)
        ht_die("no pipe to %s: %s", program, strerror(errno));
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fd[1], 1);
        dup2(fd[1], 2);
        execv(program, argv);
        _exit(127);
    }
    close(fd[1]);
    size_t n = 0;
    for (ssize_t got = 1; n < ROOM - 1 && got > 0; n += got > 0 ? (size_t)got : 0)
        got = read(fd[0], text + n, ROOM - 1 - n);
    close(fd[0]);
    if (pid < 0 || waitpid(pid, &status, 0) < 0 || status != 0)
        ht_die("%s ended with wait status %d and printed: %.500s", program, status, text);
    return text;
}

char *ht_status(struct hpf_cluster *c, unsigned node)
{
    char *program = hpf_find_program("hreducectl");
    if (!program)
        ht_die("hreducectl is not built");
    char *argv[] = {program,          (char *)"--socket", c->node[node].socket,
                    (char *)"status", (char *)"--json",   NULL};
    char *text = output_of(program, argv);
    free(program);
    return text;
}

static long count_entries(const char *path)
{
    DIR *d = opendir(path);
    if (!d)
        return -1;
    long n = 0;
    for (struct dirent *e = readdir(d); e; e = readdir(d))
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static long count_in_proc(pid_t pid, const char *what)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, what);
    return count_entries(path);
}

long ht_fds(pid_t pid)
{
    return count_in_proc(pid, "fd");
}

long ht_threads(pid_t pid)
{
    return count_in_proc(pid, "task");
}

long ht_shm_entries(void)
{
    return count_entries("/dev/shm");
}

static long status_kib(pid_t pid, const char *field)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    uint64_t kib = hpf_proc_kib(path, field);
    return kib ? (long)kib : -1;
}

long ht_rss_kib(pid_t pid)
{
    return status_kib(pid, "VmRSS");
}

long ht_space_kib(pid_t pid)
{
    return status_kib(pid, "VmSize");
}

long ht_maps(pid_t pid)
{
    char path[64], line[512];
    long n = 0;
    snprintf(path, sizeof(path), "/proc/%d/maps", (int)pid);
    FILE *f = fopen(path, "re");
    if (!f)
        return -1;
    while (fgets(line, sizeof(line), f))
        n += strchr(line, '\n') != NULL;
    fclose(f);
    return n;
}

bool ht_log_has(const struct hpf_cluster *c, unsigned node, const char *text)
{
    char path[128], *line = NULL;
    size_t room = 0;
    bool found = false;
    snprintf(path, sizeof(path), "%s/log", c->node[node].dir);
    FILE *f = fopen(path, "re");
    while (f && !found && getline(&line, &room, f) > 0)
        found = strstr(line, text) != NULL;
    free(line);
    if (f)
        fclose(f);
    return found;
}
