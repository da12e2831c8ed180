/* SPDX-License-Identifier: MIT */
/*
 * A rank that does what it is told: the tests of this directory start processes of it, kill and stop them.
 *
 * Each line of standard input is "TAG COMMAND ARGUMENT...", each answer one line of standard output:
 * "TAG SECONDS CODE TEXT", SECONDS on CLOCK_MONOTONIC, CODE a hclient_result_t (or WRONG, BROKEN), TEXT the
 * answer or the sentence of the error. Commands run in a thread each when TAG is followed by '&', so that a
 * rank can be told to abort while it waits. End of input is exit, without any clean-up.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/hclient.h"

enum { WRONG = 100, BROKEN = 101 }; /* a result is wrong; the test itself is */
enum { SLOTS = 300, BUFFERS = 64, OPS = 256, WORDS = 12, TEXT = 4096 };

static hclient_comm_t comms[SLOTS];
static hclient_op_t ops[OPS];
static struct buffer {
    float *at;
    size_t bytes;
    int fd;
    bool shared;
} buffers[BUFFERS];

struct job {
    char line[1024];
};

struct call {
    char *word[WORDS];
    int n;
    char text[TEXT];
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int say(struct call *c, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static int say(struct call *c, int code, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->text, sizeof(c->text), fmt, ap);
    va_end(ap);
    return code;
}

static int result(struct call *c, hclient_result_t r)
{
    return r == HCLIENT_OK ? say(c, 0, "ok") : say(c, (int)r, "%s", hclient_last_error(NULL));
}

static long arg(const struct call *c, int i)
{
    return i < c->n ? strtol(c->word[i], NULL, 0) : 0;
}

static unsigned index_arg(const struct call *c, int i, unsigned limit)
{
    long v = arg(c, i);
    return v < 0 || (unsigned long)v >= limit ? 0 : (unsigned)v;
}

/* Small integers: sums of them are exact in any order, and differ at each place, rank and seed. */
static float input(unsigned long seed, unsigned rank, size_t i)
{
    uint64_t x = (seed * 4096 + rank) * UINT64_C(0x9e3779b97f4a7c15) + i * UINT64_C(0xd6e8feb86659fd93);
    x ^= x >> 32;
    x *= UINT64_C(0xd6e8feb86659fd93);
    return (float)(int)(x >> 54) - 512.0f;
}

/* ---- joining --------------------------------------------------------------------------------------------- */

static int do_id(struct call *c)
{
    hclient_unique_id_t id;
    hclient_result_t r = hclient_get_unique_id(&id);
    if (r != HCLIENT_OK)
        return result(c, r);
    for (size_t i = 0; i < sizeof(id.internal); i++)
        snprintf(c->text + 2 * i, 3, "%02x", (unsigned char)id.internal[i]);
    return 0;
}

static int unhex(const char *hex, hclient_unique_id_t *id)
{
    for (size_t i = 0; i < sizeof(id->internal); i++) {
        unsigned byte;
        if (sscanf(hex + 2 * i, "%2x", &byte) != 1)
            return -1;
        id->internal[i] = (char)byte;
    }
    return 0;
}

/* init COMM NRANKS RANK ID SETUP_MS OP_MS [ALGO TRANSPORT REQUIRE SERVICE_LEVEL]; 0: the default */
static int do_init(struct call *c)
{
    hclient_unique_id_t id;
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    if (c->n < 5 || unhex(c->word[4], &id) < 0)
        return say(c, BROKEN, "init COMM NRANKS RANK ID SETUP_MS OP_MS");
    config.setup_timeout_ms = (uint32_t)arg(c, 5);
    config.op_timeout_ms = (uint32_t)arg(c, 6);
    config.algo = (int)arg(c, 7);
    config.transport = (int)arg(c, 8);
    config.require = (uint32_t)arg(c, 9);
    config.service_level = (int)arg(c, 10);
    return result(c, hclient_comm_init_rank_config(&comms[index_arg(c, 1, SLOTS)], (int)arg(c, 2), id,
                                                   (int)arg(c, 3), &config));
}

/* name COMM NAME SETUP_MS OP_MS */
static int do_name(struct call *c)
{
    hclient_comm_config_t config = HCLIENT_COMM_CONFIG_INITIALIZER;
    config.setup_timeout_ms = (uint32_t)arg(c, 3);
    config.op_timeout_ms = (uint32_t)arg(c, 4);
    return result(c, hclient_comm_init_name(&comms[index_arg(c, 1, SLOTS)], c->word[2], &config));
}

static int do_env(struct call *c)
{
    return setenv(c->word[1], c->n > 2 ? c->word[2] : "", 1) == 0 ? 0 : BROKEN;
}

static int do_info(struct call *c)
{
    hclient_comm_info_t info = HCLIENT_COMM_INFO_INITIALIZER;
    hclient_result_t r = hclient_comm_get_info(comms[index_arg(c, 1, SLOTS)], &info);
    if (r != HCLIENT_OK)
        return result(c, r);
    return say(c, 0, "nnodes=%d node=%d local=%d id=%s", info.nnodes, info.node, info.local_size, info.id);
}

static int do_path(struct call *c)
{
    char *json = NULL;
    hclient_result_t r = hclient_comm_path(comms[index_arg(c, 1, SLOTS)], &json);
    if (r != HCLIENT_OK)
        return result(c, r);
    say(c, 0, "%s", json);
    hclient_free(json);
    for (char *p = c->text; *p; p++)
        *p = *p == '\n' ? ' ' : *p;
    return 0;
}

static int do_async(struct call *c)
{
    hclient_result_t error = HCLIENT_OK;
    hclient_comm_t comm = comms[index_arg(c, 1, SLOTS)];
    hclient_result_t r = hclient_comm_get_async_error(comm, &error);
    return r != HCLIENT_OK ? result(c, r) : say(c, (int)error, "%s", hclient_last_error(comm));
}

/* ---- memory ---------------------------------------------------------------------------------------------- */

static int import(struct call *c, struct buffer *b)
{
    b->fd = memfd_create("hreduce-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (b->fd < 0 || ftruncate(b->fd, (off_t)b->bytes) < 0 || fcntl(b->fd, F_ADD_SEALS, F_SEAL_SHRINK) < 0)
        return say(c, BROKEN, "memfd: %s", strerror(errno));
    b->at = mmap(NULL, b->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, b->fd, 0);
    if (b->at == MAP_FAILED)
        return say(c, BROKEN, "mmap: %s", strerror(errno));
    return result(c, hclient_mem_import_fd(b->at, b->bytes, b->fd, 0));
}

/* buffer BUFFER plain|alloc|import BYTES */
static int do_buffer(struct call *c)
{
    struct buffer *b = &buffers[index_arg(c, 1, BUFFERS)];
    const char *kind = c->n > 3 ? c->word[2] : "";
    *b = (struct buffer){.bytes = (size_t)arg(c, 3), .fd = -1};
    if (!strcmp(kind, "alloc")) {
        void *p = NULL;
        hclient_result_t r = hclient_mem_alloc(&p, b->bytes);
        b->at = p;
        b->shared = true;
        return result(c, r);
    }
    if (!strcmp(kind, "import")) {
        b->shared = true;
        return import(c, b);
    }
    b->at = mmap(NULL, b->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return b->at == MAP_FAILED ? say(c, BROKEN, "no memory") : 0;
}

static int do_free(struct call *c)
{
    struct buffer *b = &buffers[index_arg(c, 1, BUFFERS)];
    if (b->shared)
        return result(c, hclient_mem_free(b->at));
    munmap(b->at, b->bytes);
    return 0;
}

/* fill BUFFER SEED RANK */
static int do_fill(struct call *c)
{
    struct buffer *b = &buffers[index_arg(c, 1, BUFFERS)];
    for (size_t i = 0; i < b->bytes / sizeof(float); i++)
        b->at[i] = input((unsigned long)arg(c, 2), (unsigned)arg(c, 3), i);
    return 0;
}

/* same BUFFER SEED RANK: still what fill wrote? */
static int do_same(struct call *c)
{
    struct buffer *b = &buffers[index_arg(c, 1, BUFFERS)];
    for (size_t i = 0; i < b->bytes / sizeof(float); i++)
        if (b->at[i] != input((unsigned long)arg(c, 2), (unsigned)arg(c, 3), i))
            return say(c, WRONG, "element %zu of the buffer was changed", i);
    return 0;
}

/* punch BUFFER OFFSET BYTES, truncate BUFFER BYTES: of imported memory, behind the library's back */
static int do_punch(struct call *c)
{
    int fd = buffers[index_arg(c, 1, BUFFERS)].fd;
    if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, arg(c, 2), arg(c, 3)) < 0)
        return say(c, BROKEN, "fallocate: %s", strerror(errno));
    return 0;
}

static int do_truncate(struct call *c)
{
    int fd = buffers[index_arg(c, 1, BUFFERS)].fd;
    return ftruncate(fd, arg(c, 2)) < 0 ? say(c, BROKEN, "ftruncate: %s", strerror(errno)) : 0;
}

/* ---- operations ------------------------------------------------------------------------------------------ */

/* post COMM OP SEND RECV COUNT [DTYPE [REDOP]] */
static int do_post(struct call *c)
{
    hclient_data_type_t dtype = (hclient_data_type_t)arg(c, 6);
    hclient_red_op_t redop = (hclient_red_op_t)arg(c, 7);
    return result(c, hclient_all_reduce(comms[index_arg(c, 1, SLOTS)], buffers[index_arg(c, 3, BUFFERS)].at,
                                        buffers[index_arg(c, 4, BUFFERS)].at, (size_t)arg(c, 5), dtype, redop,
                                        NULL, &ops[index_arg(c, 2, OPS)]));
}

static int do_wait(struct call *c)
{
    return result(c, hclient_wait(ops[index_arg(c, 1, OPS)]));
}

static int do_test(struct call *c)
{
    return result(c, hclient_test(ops[index_arg(c, 1, OPS)]));
}

static int check_sum(struct call *c, const float *out, size_t count, unsigned long seed, unsigned nranks)
{
    for (size_t i = 0; i < count; i++) {
        float want = 0;
        for (unsigned r = 0; r < nranks; r++)
            want += input(seed, r, i);
        if (out[i] != want)
            return say(c, WRONG, "element %zu is %g, not %g", i, (double)out[i], (double)want);
    }
    return 0;
}

/* ops COMM SEND RECV COUNT N SEED: N all-reduces on fresh inputs, every element of each result checked */
static int do_ops(struct call *c)
{
    hclient_comm_t comm = comms[index_arg(c, 1, SLOTS)];
    struct buffer *send = &buffers[index_arg(c, 2, BUFFERS)], *recv = &buffers[index_arg(c, 3, BUFFERS)];
    size_t count = (size_t)arg(c, 4);
    int rank = 0, nranks = 0;
    hclient_comm_user_rank(comm, &rank);
    hclient_comm_count(comm, &nranks);
    for (long n = 0; n < arg(c, 5); n++) {
        unsigned long seed = (unsigned long)(arg(c, 6) + n);
        hclient_op_t op;
        for (size_t i = 0; i < count; i++)
            send->at[i] = input(seed, (unsigned)rank, i);
        hclient_result_t r =
            hclient_all_reduce(comm, send->at, recv->at, count, HCLIENT_FLOAT32, HCLIENT_SUM, NULL, &op);
        if (r == HCLIENT_OK)
            r = hclient_wait(op);
        if (r != HCLIENT_OK)
            return result(c, r);
        if (check_sum(c, recv->at, count, seed, (unsigned)nranks) != 0)
            return WRONG;
    }
    return 0;
}

/* loop COMM SEND RECV COUNT: all-reduces on the same buffers until one fails */
static int do_loop(struct call *c)
{
    hclient_comm_t comm = comms[index_arg(c, 1, SLOTS)];
    struct buffer *send = &buffers[index_arg(c, 2, BUFFERS)], *recv = &buffers[index_arg(c, 3, BUFFERS)];
    hclient_result_t r = HCLIENT_OK;
    while (r == HCLIENT_OK) {
        hclient_op_t op;
        r = hclient_all_reduce(comm, send->at, recv->at, (size_t)arg(c, 4), HCLIENT_FLOAT32, HCLIENT_SUM,
                               NULL, &op);
        if (r == HCLIENT_OK)
            r = hclient_wait(op);
    }
    return result(c, r);
}

static int do_abort(struct call *c)
{
    return result(c, hclient_comm_abort(comms[index_arg(c, 1, SLOTS)]));
}

static int do_destroy(struct call *c)
{
    return result(c, hclient_comm_destroy(comms[index_arg(c, 1, SLOTS)]));
}

/* ---- the process ----------------------------------------------------------------------------------------- */

/* fork N: N children that hold every descriptor and sleep, as a data loader's workers do; each has first asked
 * the library for something. Their pids are the answer, and their end is the test's affair. */
static int do_fork(struct call *c)
{
    int ends[2];
    size_t used = 0;
    if (pipe(ends) < 0)
        return BROKEN;
    for (long i = 0; i < arg(c, 1); i++) {
        pid_t pid = fork();
        if (pid < 0)
            return say(c, BROKEN, "fork: %s", strerror(errno));
        if (pid > 0) {
            used += (size_t)snprintf(c->text + used, sizeof(c->text) - used, "%d ", (int)pid);
            continue;
        }
        hclient_unique_id_t id;
        unsigned char code = (unsigned char)hclient_get_unique_id(&id);
        if (write(ends[1], &code, 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    for (long i = 0; i < arg(c, 1); i++) {
        unsigned char code = 0;
        if (read(ends[0], &code, 1) != 1 || code != HCLIENT_UNSUPPORTED)
            return say(c, WRONG, "the library answers %u in a forked child", code);
    }
    close(ends[0]);
    close(ends[1]);
    return 0;
}

/* rlimit nofile|memlock|as N */
static int do_rlimit(struct call *c)
{
    int what = !strcmp(c->word[1], "nofile")    ? RLIMIT_NOFILE
               : !strcmp(c->word[1], "memlock") ? RLIMIT_MEMLOCK
                                                : RLIMIT_AS;
    struct rlimit limit = {(rlim_t)arg(c, 2), (rlim_t)arg(c, 2)};
    return setrlimit((__rlimit_resource_t)what, &limit) < 0 ? say(c, BROKEN, "%s", strerror(errno)) : 0;
}

/* exit exit|_exit|return N */
static int do_exit(struct call *c)
{
    if (c->n > 1 && !strcmp(c->word[1], "_exit"))
        _exit(0);
    exit(0);
}

/* cpu: seconds of processor time so far */
static int do_cpu(struct call *c)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return say(c, 0, "%.6f", (double)t.tv_sec + (double)t.tv_nsec * 1e-9);
}

static const struct {
    const char *name;
    int (*fn)(struct call *c);
} commands[] = {{"id", do_id},
                {"init", do_init},
                {"name", do_name},
                {"env", do_env},
                {"info", do_info},
                {"path", do_path},
                {"async", do_async},
                {"buffer", do_buffer},
                {"free", do_free},
                {"fill", do_fill},
                {"same", do_same},
                {"punch", do_punch},
                {"truncate", do_truncate},
                {"post", do_post},
                {"wait", do_wait},
                {"test", do_test},
                {"ops", do_ops},
                {"loop", do_loop},
                {"abort", do_abort},
                {"destroy", do_destroy},
                {"fork", do_fork},
                {"rlimit", do_rlimit},
                {"exit", do_exit},
                {"cpu", do_cpu}};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *perform(void *p)
{
    struct job *job = p;
    struct call *c = calloc(1, sizeof(*c));
    char *save = NULL, *tag = strtok_r(job->line, " \n", &save);
    int code = BROKEN;
    if (!c)
        abort();
    for (char *w = strtok_r(NULL, " \n", &save); w && c->n < WORDS; w = strtok_r(NULL, " \n", &save))
        c->word[c->n++] = w;
    say(c, 0, "no such command");
    for (size_t i = 0; c->n && i < sizeof(commands) / sizeof(commands[0]); i++) {
        if (!strcmp(commands[i].name, c->word[0])) {
            say(c, 0, "ok");
            code = commands[i].fn(c);
        }
    }
    double t = now();
    pthread_mutex_lock(&lock);
    printf("%s %.6f %d %s\n", tag, t, code, c->text);
    fflush(stdout);
    pthread_mutex_unlock(&lock);
    free(c);
    free(job);
    return NULL;
}

int main(void)
{
    char line[1024];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (fgets(line, sizeof(line), stdin)) {
        /* A command that follows another's answer comes after it: for TSan, which does not see the test. */
        pthread_mutex_lock(&lock);
        pthread_mutex_unlock(&lock);
        struct job *job = calloc(1, sizeof(*job));
        if (!job)
            abort();
        char *mark = strchr(line, '&');
        if (mark)
            *mark = ' ';
        snprintf(job->line, sizeof(job->line), "%s", line);
        if (!mark) {
            perform(job);
            continue;
        }
        pthread_t thread;
        if (pthread_create(&thread, NULL, perform, job) != 0)
            abort();
        pthread_detach(thread);
    }
    _exit(0);
}
