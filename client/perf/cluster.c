/* SPDX-License-Identifier: MIT */
#include "client/perf/cluster.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define DEFAULT_TIMEOUT_MS 15000u
/* Below the range that connect() takes its source ports from, so that no connection can sit on one. */
#define PORT_FIRST 20000u
#define PORT_COUNT 12000u

static int fail(char *err, size_t errlen, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static int fail(char *err, size_t errlen, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err, errlen, fmt, ap);
    va_end(ap);
    return -1;
}

/* ---- directories and ports ------------------------------------------------------------------------------- */

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st, (void)flag, (void)ftw;
    remove(path);
    return 0;
}

static void remove_tree(const char *path)
{
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static int make_root(struct hpf_cluster *c, char *err, size_t errlen)
{
    const char *const candidates[] = {getenv("TMPDIR"), getenv("XDG_RUNTIME_DIR"), "/tmp"};
    for (size_t i = 0; i < 3; i++) {
        const char *base = candidates[i];
        /* A socket's path has 107 characters; a base that leaves no room for ours is passed over. */
        if (!base || base[0] != '/' || strlen(base) > sizeof(c->root) - sizeof("/hreduce-XXXXXX"))
            continue;
        snprintf(c->root, sizeof(c->root), "%s/hreduce-XXXXXX", base);
        if (mkdtemp(c->root))
            return 0;
    }
    c->root[0] = 0;
    return fail(
        err, errlen,
        "no directory for the daemons' sockets could be made in $TMPDIR, $XDG_RUNTIME_DIR or /tmp: %s",
        strerror(errno));
}

/* An abstract socket's name lives as long as a process holds it: a lock that cannot go stale. */
static int lock_port(unsigned port)
{
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    int n = snprintf(un.sun_path + 1, sizeof(un.sun_path) - 1, "hreduce-local-port-%u", port);
    if (bind(fd, (struct sockaddr *)&un,
             (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static bool port_free(const char *addr, unsigned port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return false;
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, addr, &in.sin_addr);
    int one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    bool ok = bind(fd, (struct sockaddr *)&in, sizeof(in)) == 0 && listen(fd, 1) == 0;
    close(fd);
    return ok;
}

static int choose_port(struct hpf_cluster *c, char *err, size_t errlen)
{
    unsigned first = (unsigned)getpid() * 7u % PORT_COUNT;
    for (unsigned i = 0; i < PORT_COUNT; i++) {
        unsigned port = PORT_FIRST + (first + i) % PORT_COUNT;
        int lock = lock_port(port);
        if (lock < 0)
            continue;
        unsigned node = 0;
        while (node < c->nnodes && port_free(c->node[node].addr, port))
            node++;
        if (node == c->nnodes) {
            c->port = port;
            c->port_lock = lock;
            return 0;
        }
        close(lock);
    }
    return fail(err, errlen, "no TCP port of %u to %u is free on all of 127.0.0.1 to 127.0.0.%u", PORT_FIRST,
                PORT_FIRST + PORT_COUNT - 1, c->nnodes);
}

/* Whether a caller's line sets this key. */
static bool sets(const char *line, const char *key)
{
    size_t n = strlen(key);
    return line && strncmp(line, key, n) == 0 && (line[n] == ' ' || line[n] == '=');
}

static bool given(const struct hpf_cluster_options *o, unsigned node, const char *key)
{
    for (unsigned k = 0; k < o->nkeys; k++)
        if (sets(o->keys[k], key))
            return true;
    const char *line = o->node_keys ? o->node_keys[node] : NULL;
    while (line && !sets(line, key)) {
        line = strchr(line, '\n');
        line = line ? line + 1 : NULL;
    }
    return line != NULL;
}

static int write_config(struct hpf_cluster *c, unsigned i, const struct hpf_cluster_options *o, char *err,
                        size_t errlen)
{
    struct hpf_node *n = &c->node[i];
    char path[128];
    snprintf(path, sizeof(path), "%s/hreduced.conf", n->dir);
    FILE *f = fopen(path, "we");
    if (!f)
        return fail(err, errlen, "cannot write %s: %s", path, strerror(errno));
    fprintf(f, "socket = %s\nport = %u\n", n->socket, c->port);
    if (!given(o, i, "listen"))
        fprintf(f, "listen = %s\n", n->addr);
    if (!given(o, i, "node_name"))
        fprintf(f, "node_name = node%u\n", i);
    for (unsigned k = 0; k < o->nkeys; k++)
        fprintf(f, "%s\n", o->keys[k]);
    if (o->node_keys && o->node_keys[i])
        fprintf(f, "%s\n", o->node_keys[i]);
    if (fclose(f) != 0)
        return fail(err, errlen, "cannot write %s: %s", path, strerror(errno));
    return 0;
}

/* ---- one daemon ------------------------------------------------------------------------------------------ */

static void log_path(const struct hpf_cluster *c, unsigned i, char *buf, size_t len)
{
    snprintf(buf, len, "%s/log", c->node[i].dir);
}

void hpf_node_log_tail(const struct hpf_cluster *c, unsigned node, char *buf, size_t len)
{
    buf[0] = 0;
    char path[128];
    log_path(c, node, path, sizeof(path));
    FILE *f = fopen(path, "re");
    if (!f || len < 2) {
        if (f)
            fclose(f);
        return;
    }
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    long from = size > (long)len - 1 ? size - (long)len + 1 : 0;
    fseek(f, from, SEEK_SET);
    size_t n = fread(buf, 1, len - 1, f);
    fclose(f);
    while (n > 0 && buf[n - 1] == '\n')
        n--;
    buf[n] = 0;
}

_Noreturn static void run_daemon(const struct hpf_cluster *c, unsigned i, pid_t parent)
{
    /* A signal for the terminal's foreground group is the parent's to handle: it ends us in order. */
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    char path[128];
    log_path(c, i, path, sizeof(path));
    int log = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (log < 0 || null < 0)
        _exit(1);
    dup2(null, 0);
    dup2(log, 1);
    dup2(log, 2);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    snprintf(path, sizeof(path), "%s/hreduced.conf", c->node[i].dir);
    execl(c->program, c->program, "--config", path, (char *)NULL);
    dprintf(2, "cannot execute %s: %s\n", c->program, strerror(errno));
    _exit(127);
}

bool hpf_node_alive(struct hpf_cluster *c, unsigned node)
{
    struct hpf_node *n = &c->node[node];
    if (n->pid == 0)
        return false;
    int status;
    pid_t r = waitpid(n->pid, &status, WNOHANG);
    if (r == 0 || (r < 0 && errno == EINTR))
        return true;
    n->status = r > 0 ? status : 0;
    n->pid = 0;
    return false;
}

bool hpf_node_wait(struct hpf_cluster *c, unsigned node, unsigned timeout_ms)
{
    long long deadline = hpf_now_ms() + timeout_ms;
    while (hpf_node_alive(c, node)) {
        if (hpf_now_ms() > deadline)
            return false;
        hpf_sleep_ms(2);
    }
    return true;
}

void hpf_node_kill(struct hpf_cluster *c, unsigned node, int sig)
{
    if (!hpf_node_alive(c, node))
        return;
    kill(c->node[node].pid, sig);
    if (sig == SIGKILL) {
        hpf_node_wait(c, node, c->timeout_ms);
        c->node[node].status = 0;
    }
}

static bool accepts(const char *path)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return false;
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    snprintf(un.sun_path, sizeof(un.sun_path), "%s", path);
    bool ok = connect(fd, (struct sockaddr *)&un, sizeof(un)) == 0;
    close(fd);
    return ok;
}

static int launch(struct hpf_cluster *c, unsigned i, char *err, size_t errlen)
{
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid < 0)
        return fail(err, errlen, "cannot start a process for node %u: %s", i, strerror(errno));
    if (pid == 0)
        run_daemon(c, i, parent);
    c->node[i].pid = pid;
    c->node[i].status = 0;
    return 0;
}

static int await_socket(struct hpf_cluster *c, unsigned i, char *err, size_t errlen)
{
    char tail[600], text[64];
    long long deadline = hpf_now_ms() + c->timeout_ms;
    while (!accepts(c->node[i].socket)) {
        if (!hpf_node_alive(c, i)) {
            hpf_node_log_tail(c, i, tail, sizeof(tail));
            return fail(err, errlen, "the daemon of node %u (%s) ended at its start with %s; it wrote: %s", i,
                        c->program, hpf_status_text(c->node[i].status, text, sizeof(text)), tail);
        }
        if (hpf_now_ms() > deadline) {
            hpf_node_log_tail(c, i, tail, sizeof(tail));
            return fail(err, errlen, "the daemon of node %u did not open %s in %u ms; it wrote: %s", i,
                        c->node[i].socket, c->timeout_ms, tail);
        }
        hpf_sleep_ms(5);
    }
    return 0;
}

int hpf_node_start(struct hpf_cluster *c, unsigned node, char *err, size_t errlen)
{
    if (hpf_node_alive(c, node))
        return fail(err, errlen, "the daemon of node %u runs already as process %d", node,
                    (int)c->node[node].pid);
    if (launch(c, node, err, errlen) < 0)
        return -1;
    return await_socket(c, node, err, errlen);
}

/* ---- all of them ----------------------------------------------------------------------------------------- */

static int prepare(struct hpf_cluster *c, const struct hpf_cluster_options *o, char *err, size_t errlen)
{
    c->program = hpf_find_program("hreduced");
    if (!c->program)
        return fail(
            err, errlen,
            "hreduced was found neither beside this program nor in PATH; build it with make, or install it");
    if (make_root(c, err, errlen) < 0)
        return -1;
    for (unsigned i = 0; i < c->nnodes; i++) {
        struct hpf_node *n = &c->node[i];
        snprintf(n->dir, sizeof(n->dir), "%s/%u", c->root, i);
        snprintf(n->socket, sizeof(n->socket), "%s/s", n->dir);
        snprintf(n->addr, sizeof(n->addr), "127.0.0.%u", i + 1);
        if (mkdir(n->dir, 0700) < 0)
            return fail(err, errlen, "cannot make %s: %s", n->dir, strerror(errno));
    }
    if (choose_port(c, err, errlen) < 0)
        return -1;
    for (unsigned i = 0; i < c->nnodes; i++)
        if (write_config(c, i, o, err, errlen) < 0)
            return -1;
    return 0;
}

int hpf_cluster_new(struct hpf_cluster **out, const struct hpf_cluster_options *o, char *err, size_t errlen)
{
    if (o->nnodes < 1 || o->nnodes > HPF_MAX_NODES)
        return fail(err, errlen, "%u nodes are asked for; it can be 1 to %u", o->nnodes, HPF_MAX_NODES);
    struct hpf_cluster *c = calloc(1, sizeof(*c));
    struct hpf_node *node = calloc(o->nnodes, sizeof(*node));
    if (!c || !node) {
        free(c);
        free(node);
        return fail(err, errlen, "out of memory");
    }
    c->node = node;
    c->nnodes = o->nnodes;
    c->port_lock = -1;
    c->owner = getpid();
    c->timeout_ms = o->timeout_ms ? o->timeout_ms : DEFAULT_TIMEOUT_MS;
    c->keep_logs = o->keep_logs ? strdup(o->keep_logs) : NULL;

    int rc = prepare(c, o, err, errlen);
    for (unsigned i = 0; rc == 0 && i < c->nnodes; i++)
        rc = launch(c, i, err, errlen);
    for (unsigned i = 0; rc == 0 && i < c->nnodes; i++)
        rc = await_socket(c, i, err, errlen);
    if (rc < 0) {
        char ignored[256];
        hpf_cluster_free(c, ignored, sizeof(ignored));
        return -1;
    }
    *out = c;
    return 0;
}

static void keep_log(const struct hpf_cluster *c, unsigned i)
{
    char from[128], to[PATH_MAX], buf[4096];
    log_path(c, i, from, sizeof(from));
    snprintf(to, sizeof(to), "%s/node%u.log", c->keep_logs, i);
    FILE *in = fopen(from, "re"), *out = fopen(to, "we");
    size_t n;
    while (in && out && (n = fread(buf, 1, sizeof(buf), in)) > 0)
        fwrite(buf, 1, n, out);
    if (!out)
        fprintf(stderr, "the log of node %u could not be kept as %s: %s\n", i, to, strerror(errno));
    if (in)
        fclose(in);
    if (out)
        fclose(out);
}

static int end_node(struct hpf_cluster *c, unsigned i, long long deadline, char *err, size_t errlen)
{
    struct hpf_node *n = &c->node[i];
    long long left = deadline - hpf_now_ms();
    char tail[600], text[64];
    if (!hpf_node_wait(c, i, left > 0 ? (unsigned)left : 0)) {
        pid_t pid = n->pid;
        hpf_node_kill(c, i, SIGKILL);
        hpf_node_log_tail(c, i, tail, sizeof(tail));
        return fail(err, errlen,
                    "the daemon of node %u (process %d) did not stop in %u ms and was killed; it wrote: %s",
                    i, (int)pid, c->timeout_ms, tail);
    }
    if (n->status != 0) {
        hpf_node_log_tail(c, i, tail, sizeof(tail));
        return fail(err, errlen, "the daemon of node %u ended with %s; it wrote: %s", i,
                    hpf_status_text(n->status, text, sizeof(text)), tail);
    }
    return 0;
}

int hpf_cluster_free(struct hpf_cluster *c, char *err, size_t errlen)
{
    if (!c)
        return 0;
    int rc = 0;
    if (c->owner == getpid()) {
        for (unsigned i = 0; i < c->nnodes; i++) {
            hpf_node_kill(c, i, SIGTERM);
            /* One that a test stopped could not hear the other signal. */
            hpf_node_kill(c, i, SIGCONT);
        }
        long long deadline = hpf_now_ms() + c->timeout_ms;
        for (unsigned i = 0; i < c->nnodes; i++)
            if (end_node(c, i, deadline, err, errlen) < 0)
                rc = -1;
        for (unsigned i = 0; c->keep_logs && c->root[0] && i < c->nnodes; i++)
            keep_log(c, i);
        if (c->root[0])
            remove_tree(c->root);
    }
    if (c->port_lock >= 0)
        close(c->port_lock);
    free(c->keep_logs);
    free(c->program);
    free(c->node);
    free(c);
    return rc;
}
