/* SPDX-License-Identifier: MIT */
/*
 * The floor of an all-reduce of N nodes with R ranks each on this machine: the same sums, the same copies and the same
 * bytes through the same number of sockets, done by one process a node with the threads that share the machine's cores,
 * without any protocol. Nothing that does this work on these cores is faster by more than noise; how far a real
 * all-reduce is above it is what its protocol costs.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <getopt.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/bench/floor_node.h"

#define MAX_SIZES 16u
#define MAX_LANES 16u
#define MAX_PARTIES (FLOOR_MAX_NODES * FLOOR_MAX_RANKS)
#define MAX_ITERS 2000u
#define MIN_ITERS 5u

static const char help[] =
    "usage: floor NxR [options]\n"
    "\n"
    "Measures what an all-reduce (float32 sum, in place) of N nodes with R ranks each cannot beat on this "
    "machine.\n"
    "Columns, in milliseconds, the median of an op's slowest thread:\n"
    "  reduce    each node adds its R buffers; each node adds the N partials of its block\n"
    "  exchange  2(N-1)/N of the size goes out of and into each node\n"
    "  fan-out   each node writes the result to its R buffers\n"
    "  sum       the three one after the other, each with all cores to itself\n"
    "  run       all three at once, chunk by chunk: the floor\n"
    "  +ranks    the same, started by N*R waiting processes and ended by waking them\n"
    "  cpu       processor time of such an op, all processes together\n"
    "One node sums and writes in one pass, so the first four are not measured.\n"
    "\n"
    "  -s, --sizes LIST      default 64K,1M,4M,16M\n"
    "  -k, --streams K       sockets between two nodes (default 4)\n"
    "  -t, --threads T       threads a node (default: the cores shared by the nodes, at least 1)\n"
    "  -u, --units LIST      unit sizes that are tried (default 128K,512K)\n"
    "  -n, --netns PID,...   node i runs in the network namespace of the i-th process\n"
    "  -a, --addr ADDR,...   address of node i (IPv4; default 127.0.0.1)\n"
    "  -T, --seconds S       time for one number (default 0.3)\n"
    "  -j, --json FILE       also write the results there\n";

enum job_kind { JOB_WORK, JOB_CHECK, JOB_QUIT };

struct node_words {
    _Alignas(128) _Atomic uint32_t posted; /* ops asked for by this node's ranks, times ranks */
    _Alignas(128) _Atomic uint32_t done;   /* ops that are complete */
    _Alignas(128) _Atomic uint32_t lanes;  /* threads that have finished, over all ops */
    _Atomic uint32_t stop;
    uint16_t port;
};

/* What all processes share. */
struct shared {
    pthread_barrier_t control; /* everyone: before and after a job */
    pthread_barrier_t setup, workers, ranks;
    enum job_kind kind;
    uint64_t size, unit;
    int what, nt, with_ranks;
    double seconds;
    _Atomic uint32_t go[2], iters;
    uint64_t wrong, cpu_ns; /* of all threads and ranks, for all ops of a job */
    struct node_words node[FLOOR_MAX_NODES];
    float time_us[MAX_ITERS][MAX_PARTIES];
};

static struct {
    unsigned nodes, ranks, lanes, streams, nsizes, nunits;
    uint64_t size[MAX_SIZES], max_size, unit[4], max_unit;
    double seconds;
    long netns[FLOOR_MAX_NODES];
    char addr[FLOOR_MAX_NODES][INET_ADDRSTRLEN];
    const char *json;
} cfg = {.streams = 4, .seconds = 0.3};

static struct shared *sh;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* ---- the measured loop, the same for threads and for ranks ----------------------------------------------- */

/* Decides, by the first party, whether there is another op; all parties leave here together. */
static int another(pthread_barrier_t *b, int first, uint32_t it, double start)
{
    if (first)
        sh->go[it & 1] = it < MAX_ITERS && (it < MIN_ITERS || now() - start < sh->seconds);
    pthread_barrier_wait(b);
    return (int)sh->go[it & 1];
}

static uint64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void add(uint64_t *to, uint64_t n)
{
    __atomic_fetch_add(to, n, __ATOMIC_RELAXED);
}

static void note(uint32_t it, unsigned party, double t0)
{
    sh->time_us[it][party] = (float)(1e6 * (now() - t0));
    if (party == 0)
        sh->iters = it + 1;
}

/* ---- a node ---------------------------------------------------------------------------------------------- */

struct lane {
    pthread_t thread;
    unsigned node, index;
    char *const *buf;
    struct floor_worker w;
};

static void lane_part(struct lane *l)
{
    uint64_t each = (sh->size / cfg.lanes + 63) / 64 * 64, at = l->index * each;
    at = at < sh->size ? at : sh->size;
    l->w.bytes = l->index + 1 == cfg.lanes || sh->size - at < each ? sh->size - at : each;
    l->w.unit = sh->unit;
    l->w.what = sh->what;
    l->w.nt = sh->nt;
    for (unsigned r = 0; r < cfg.ranks; r++)
        l->w.buf[r] = l->buf[r] + at;
}

static void work_alone(struct lane *l)
{
    unsigned party = l->node * cfg.lanes + l->index;
    uint64_t cpu = cpu_ns();
    double start = now();
    for (uint32_t it = 0; another(&sh->workers, party == 0, it, start); it++) {
        double t0 = now();
        floor_run(&l->w);
        note(it, party, t0);
    }
    add(&sh->cpu_ns, cpu_ns() - cpu);
}

/* Woken by the node's last rank; the node's last thread wakes the ranks. */
static void work_for_ranks(struct lane *l)
{
    struct node_words *n = &sh->node[l->node];
    uint64_t cpu = cpu_ns();
    for (uint32_t op = 1;; op++) {
        uint32_t posted;
        while ((posted = n->posted) < op * cfg.ranks && !n->stop)
            futex_wait(&n->posted, posted);
        if (n->posted < op * cfg.ranks)
            break;
        floor_run(&l->w);
        if (atomic_fetch_add(&n->lanes, 1) + 1 == op * cfg.lanes) {
            n->done = op;
            futex_wake(&n->done);
        }
    }
    add(&sh->cpu_ns, cpu_ns() - cpu);
}

/* Values whose sum is exact, different for each rank and place. */
static float input(unsigned rank, uint64_t i)
{
    return (float)((i + 7 * rank) % 61);
}

static void check_job(struct lane *l)
{
    float *const *buf = (float *const *)l->w.buf;
    unsigned first = l->node * cfg.ranks, n = cfg.nodes * cfg.ranks;
    uint64_t base = (uint64_t)(l->w.buf[0] - l->buf[0]) / 4, count = l->w.bytes / 4, wrong = 0;
    for (unsigned r = 0; r < cfg.ranks; r++)
        for (uint64_t i = 0; i < count; i++)
            buf[r][i] = input(first + r, base + i);
    pthread_barrier_wait(&sh->workers);
    floor_run(&l->w);
    for (uint64_t i = 0; i < count; i++) {
        float want = 0;
        for (unsigned r = 0; r < n; r++)
            want += input(r, base + i);
        for (unsigned r = 0; r < cfg.ranks; r++)
            wrong += buf[r][i] != want;
    }
    add(&sh->wrong, wrong);
}

static void *lane_main(void *arg)
{
    struct lane *l = arg;
    for (;;) {
        pthread_barrier_wait(&sh->control);
        if (sh->kind == JOB_QUIT)
            return NULL;
        lane_part(l);
        if (sh->kind == JOB_CHECK)
            check_job(l);
        else if (sh->with_ranks)
            work_for_ranks(l);
        else
            work_alone(l);
        pthread_barrier_wait(&sh->control);
    }
}

/* Shared memory as a daemon would have it: one memfd a rank, every page present. */
static char *rank_memory(uint64_t bytes)
{
    int fd = memfd_create("floor", MFD_CLOEXEC);
    if (fd < 0 || posix_fallocate(fd, 0, (off_t)bytes))
        floor_die("memfd");
    char *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (p == MAP_FAILED)
        floor_die("mmap of a rank's buffer");
    close(fd);
    return p;
}

struct hello {
    uint32_t node, lane, stream;
};

static int listen_here(struct node_words *n, unsigned me)
{
    struct sockaddr_in a = {.sin_family = AF_INET};
    socklen_t len = sizeof(a);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    inet_pton(AF_INET, cfg.addr[me], &a.sin_addr);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, len) || listen(fd, 1024) ||
        getsockname(fd, (struct sockaddr *)&a, &len))
        floor_die("listen on the node's address");
    n->port = a.sin_port;
    return fd;
}

static int dial(unsigned peer, struct hello hello)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = sh->node[peer].port};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    inet_pton(AF_INET, cfg.addr[peer], &a.sin_addr);
    if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof(a)) ||
        send(fd, &hello, sizeof(hello), 0) != (ssize_t)sizeof(hello))
        floor_die("connect to a peer");
    return fd;
}

static void join(struct lane *lanes, struct hello h, unsigned peer, int fd)
{
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    lanes[h.lane].w.stream[peer][h.stream].fd = fd;
}

/* Every node dials those before it and is dialled by those behind it. */
static void connect_all(struct lane *lanes, unsigned me, unsigned streams)
{
    int fd = listen_here(&sh->node[me], me);
    pthread_barrier_wait(&sh->setup);
    for (unsigned p = 0; p < me; p++)
        for (uint32_t l = 0; l < cfg.lanes; l++)
            for (uint32_t k = 0; k < streams; k++)
                join(lanes, (struct hello){me, l, k}, p, dial(p, (struct hello){me, l, k}));
    for (unsigned i = 0; i < (cfg.nodes - 1 - me) * cfg.lanes * streams; i++) {
        struct hello h;
        int c = accept(fd, NULL, NULL);
        if (c < 0 || recv(c, &h, sizeof(h), MSG_WAITALL) != (ssize_t)sizeof(h))
            floor_die("accept a peer");
        if (h.node >= cfg.nodes || h.lane >= cfg.lanes || h.stream >= streams) {
            errno = EPROTO;
            floor_die("a foreign connection");
        }
        join(lanes, h, h.node, c);
    }
    close(fd);
}

static void enter_netns(long pid)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%ld/ns/net", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWNET))
        floor_die(path);
    close(fd);
}

static void node_main(unsigned me)
{
    static struct lane lanes[MAX_LANES];
    static char *buf[FLOOR_MAX_RANKS];
    unsigned streams = cfg.streams / cfg.lanes ? cfg.streams / cfg.lanes : 1;
    if (cfg.netns[me])
        enter_netns(cfg.netns[me]);
    for (unsigned r = 0; r < cfg.ranks; r++)
        buf[r] = rank_memory(cfg.max_size);
    connect_all(lanes, me, streams);
    for (unsigned i = 0; i < cfg.lanes; i++) {
        struct lane *l = &lanes[i];
        l->node = me;
        l->index = i;
        l->buf = buf;
        l->w.nodes = cfg.nodes;
        l->w.me = me;
        l->w.ranks = cfg.ranks;
        l->w.streams = streams;
        l->w.window = floor_window(streams);
        l->w.slot = calloc(l->w.window, sizeof(*l->w.slot));
        l->w.arena = rank_memory(floor_arena_bytes(cfg.nodes, streams, cfg.max_unit));
        if (!l->w.slot || pthread_create(&l->thread, NULL, lane_main, l))
            floor_die("start of a thread");
    }
    for (unsigned i = 0; i < cfg.lanes; i++)
        pthread_join(lanes[i].thread, NULL);
    exit(0);
}

/* ---- a rank ---------------------------------------------------------------------------------------------- */

static void rank_ops(unsigned me)
{
    struct node_words *n = &sh->node[me / cfg.ranks];
    uint64_t cpu = cpu_ns();
    double start = now();
    uint32_t it;
    for (it = 0; another(&sh->ranks, me == 0, it, start); it++) {
        double t0 = now();
        if (atomic_fetch_add(&n->posted, 1) + 1 == (it + 1) * cfg.ranks)
            futex_wake(&n->posted);
        while (n->done != it + 1)
            futex_wait(&n->done, it);
        note(it, me, t0);
    }
    n->stop = 1;
    futex_wake(&n->posted);
    add(&sh->cpu_ns, cpu_ns() - cpu);
}

static void rank_main(unsigned me)
{
    for (;;) {
        pthread_barrier_wait(&sh->control);
        if (sh->kind == JOB_QUIT)
            exit(0);
        if (sh->kind == JOB_WORK && sh->with_ranks)
            rank_ops(me);
        pthread_barrier_wait(&sh->control);
    }
}

/* ---- jobs, as seen by the process that gives them -------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The median over the ops of the slowest party's time, in ms. */
static double median(unsigned parties)
{
    static float slowest[MAX_ITERS];
    for (uint32_t i = 0; i < sh->iters; i++) {
        slowest[i] = 0;
        for (unsigned p = 0; p < parties; p++)
            slowest[i] = sh->time_us[i][p] > slowest[i] ? sh->time_us[i][p] : slowest[i];
    }
    qsort(slowest, sh->iters, sizeof(slowest[0]), by_value);
    return 1e-3 * (double)slowest[sh->iters / 2];
}

static double job(enum job_kind kind, int what, uint64_t unit, int nt, int with_ranks)
{
    sh->kind = kind;
    sh->what = what;
    sh->unit = unit;
    sh->nt = nt;
    sh->with_ranks = with_ranks;
    sh->iters = 0;
    sh->cpu_ns = 0;
    for (unsigned i = 0; i < cfg.nodes; i++)
        sh->node[i].posted = sh->node[i].done = sh->node[i].lanes = sh->node[i].stop = 0;
    pthread_barrier_wait(&sh->control);
    if (kind == JOB_QUIT)
        return 0;
    pthread_barrier_wait(&sh->control);
    return kind == JOB_CHECK ? 0 : median(with_ranks ? cfg.nodes * cfg.ranks : cfg.nodes * cfg.lanes);
}

/* Processor time of one op of the last job, all processes together, in ms. */
static double cpu_of_op(void)
{
    return 1e-6 * (double)sh->cpu_ns / sh->iters;
}

struct row {
    uint64_t size, unit;
    double reduce, exchange, fan, run, with_ranks, cpu, cpu_with_ranks;
    int nt;
};

static double least(double a, double b)
{
    return a == 0 || b < a ? b : a;
}

static void measure(struct row *r, uint64_t size)
{
    *r = (struct row){.size = sh->size = size};
    for (unsigned i = 0; i < cfg.nunits; i++) {
        uint64_t unit = cfg.unit[i];
        if (i > 0 && cfg.unit[i - 1] >= size / cfg.lanes)
            break;
        job(JOB_CHECK, FLOOR_ALL, unit, (int)(i & 1), 0);
        if (cfg.nodes > 1) {
            r->reduce = least(r->reduce, job(JOB_WORK, FLOOR_FOLD, unit, 0, 0));
            r->exchange = least(r->exchange, job(JOB_WORK, FLOOR_NET, unit, 0, 0));
        }
        for (int nt = 0; nt < 2; nt++) {
            if (cfg.nodes > 1)
                r->fan = least(r->fan, job(JOB_WORK, FLOOR_FAN, unit, nt, 0));
            double t = job(JOB_WORK, FLOOR_ALL, unit, nt, 0);
            if (r->run == 0 || t < r->run) {
                r->run = t;
                r->cpu = cpu_of_op();
                r->unit = unit;
                r->nt = nt;
            }
        }
    }
    r->with_ranks = job(JOB_WORK, FLOOR_ALL, r->unit, r->nt, 1);
    r->cpu_with_ranks = cpu_of_op();
}

static void print_row(const struct row *r)
{
    char size[24];
    if (r->size % 1024)
        snprintf(size, sizeof(size), "%llu B", (unsigned long long)r->size);
    else
        snprintf(size, sizeof(size), r->size % 1048576 ? "%.0f KiB" : "%.0f MiB",
                 (double)r->size / (r->size % 1048576 ? 1024 : 1048576));
    if (cfg.nodes > 1)
        printf("%9s %9.3f %9.3f %9.3f %9.3f", size, r->reduce, r->exchange, r->fan,
               r->reduce + r->exchange + r->fan);
    else
        printf("%9s %9s %9s %9s %9s", size, "-", "-", "-", "-");
    printf(" %9.3f %9.3f %9.3f   unit %.0f KiB%s\n", r->run, r->with_ranks, r->cpu_with_ranks,
           (double)r->unit / 1024, r->nt ? ", streaming stores" : "");
    fflush(stdout);
}

static void write_json(const struct row *row, unsigned n)
{
    FILE *f = fopen(cfg.json, "w");
    if (!f)
        floor_die(cfg.json);
    fprintf(f, "{\"nodes\": %u, \"ranks\": %u, \"threads\": %u, \"streams\": %u, \"results\": [", cfg.nodes,
            cfg.ranks, cfg.lanes, cfg.streams);
    for (unsigned i = 0; i < n; i++)
        fprintf(f,
                "%s\n {\"bytes\": %llu, \"reduce_ms\": %.4f, \"exchange_ms\": %.4f, \"fanout_ms\": %.4f, "
                "\"run_ms\": %.4f, \"with_ranks_ms\": %.4f, \"cpu_ms\": %.4f, "
                "\"cpu_with_ranks_ms\": %.4f, \"unit\": %llu, \"streaming\": %d}",
                i ? "," : "", (unsigned long long)row[i].size, row[i].reduce, row[i].exchange, row[i].fan,
                row[i].run, row[i].with_ranks, row[i].cpu, row[i].cpu_with_ranks,
                (unsigned long long)row[i].unit, row[i].nt);
    fprintf(f, "\n]}\n");
    if (fclose(f))
        floor_die(cfg.json);
}

static void *measure_all(void *arg)
{
    struct row *row = arg;
    printf("floor of %ux%u, float32 sum in place: %u thread%s a node, %u streams a peer, %s\n", cfg.nodes,
           cfg.ranks, cfg.lanes, cfg.lanes > 1 ? "s" : "", cfg.streams, hrk_level_name(hrk_get_level()));
    printf("%9s %9s %9s %9s %9s %9s %9s   (ms)\n", "size", "reduce", "exchange", "fan-out", "sum", "run",
           "+ranks");
    for (unsigned i = 0; i < cfg.nsizes; i++) {
        measure(&row[i], cfg.size[i]);
        print_row(&row[i]);
    }
    job(JOB_QUIT, 0, 0, 0, 0);
    return NULL;
}

/* ---- start ----------------------------------------------------------------------------------------------- */

static void shared_barrier(pthread_barrier_t *b, unsigned n)
{
    pthread_barrierattr_t a;
    pthread_barrierattr_init(&a);
    pthread_barrierattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    errno = pthread_barrier_init(b, &a, n);
    if (errno)
        floor_die("barrier");
}

static void start(void (*run)(unsigned), unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        pid_t parent = getpid(), pid = fork();
        if (pid < 0)
            floor_die("fork");
        if (pid == 0) {
            /* Nothing outlives the parent, however it ends. */
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent)
                exit(1);
            run(i);
        }
    }
}

static uint64_t parse_size(const char *text, char **end)
{
    uint64_t v = strtoull(text, end, 10);
    unsigned shift = **end == 'K' ? 10 : **end == 'M' ? 20 : **end == 'G' ? 30 : 0;
    if (shift)
        (*end)++;
    return v << shift;
}

static unsigned parse_sizes(const char *text, uint64_t *out, unsigned max, uint64_t *largest)
{
    unsigned n = 0;
    char *end = (char *)(uintptr_t)text;
    *largest = 0;
    while (n < max) {
        out[n] = parse_size(end, &end);
        if (out[n] == 0 || out[n] % 4)
            return 0;
        *largest = out[n] > *largest ? out[n] : *largest;
        n++;
        if (*end != ',')
            return *end ? 0 : n;
        end++;
    }
    return 0;
}

static int parse_lists(char *text, int addr)
{
    char *save = NULL;
    unsigned i = 0;
    for (char *t = strtok_r(text, ",", &save); t && i < FLOOR_MAX_NODES;
         t = strtok_r(NULL, ",", &save), i++) {
        if (addr)
            snprintf(cfg.addr[i], sizeof(cfg.addr[i]), "%s", t);
        else
            cfg.netns[i] = strtol(t, NULL, 10);
    }
    return i == cfg.nodes;
}

static int parse_shape(const char *text)
{
    char *end;
    cfg.nodes = (unsigned)strtoul(text, &end, 10);
    if (*end != 'x')
        return 0;
    cfg.ranks = (unsigned)strtoul(end + 1, &end, 10);
    return !*end && cfg.nodes > 0 && cfg.nodes <= FLOOR_MAX_NODES && cfg.ranks > 0 &&
           cfg.ranks <= FLOOR_MAX_RANKS;
}

static int parse_option(int opt, char *arg)
{
    switch (opt) {
    case 's':
        return (cfg.nsizes = parse_sizes(arg, cfg.size, MAX_SIZES, &cfg.max_size)) > 0;
    case 'u':
        return (cfg.nunits = parse_sizes(arg, cfg.unit, 4, &cfg.max_unit)) > 0;
    case 'k':
        return (cfg.streams = (unsigned)strtoul(arg, NULL, 10)) > 0 && cfg.streams <= FLOOR_MAX_STREAMS;
    case 't':
        return (cfg.lanes = (unsigned)strtoul(arg, NULL, 10)) > 0 && cfg.lanes <= MAX_LANES;
    case 'n':
    case 'a':
        return parse_lists(arg, opt == 'a');
    case 'T':
        return (cfg.seconds = strtod(arg, NULL)) > 0;
    case 'j':
        cfg.json = arg;
        return 1;
    default:
        return 0;
    }
}

static void parse(int argc, char **argv)
{
    static const struct option options[] = {
        {"sizes", 1, NULL, 's'}, {"streams", 1, NULL, 'k'}, {"threads", 1, NULL, 't'},
        {"units", 1, NULL, 'u'}, {"netns", 1, NULL, 'n'},   {"addr", 1, NULL, 'a'},
        {"json", 1, NULL, 'j'},  {"help", 0, NULL, 'h'},    {"seconds", 1, NULL, 'T'},
        {NULL, 0, NULL, 0},
    };
    int opt, ok = argc > 1 && parse_shape(argv[1]);
    cfg.nsizes = parse_sizes("64K,1M,4M,16M", cfg.size, MAX_SIZES, &cfg.max_size);
    cfg.nunits = parse_sizes("128K,512K", cfg.unit, 4, &cfg.max_unit);
    for (unsigned i = 0; i < FLOOR_MAX_NODES; i++)
        snprintf(cfg.addr[i], sizeof(cfg.addr[i]), "127.0.0.1");
    if (argc > 1 && (strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "--help") == 0)) {
        fputs(help, stdout);
        exit(0);
    }
    for (optind = 2; ok && (opt = getopt_long(argc, argv, "s:k:t:u:n:a:T:j:", options, NULL)) != -1;)
        ok = parse_option(opt, optarg);
    if (!ok || optind < argc) {
        fprintf(stderr,
                "floor: a wrong command line; floor --help says how (at most %u nodes, %u ranks a node)\n",
                FLOOR_MAX_NODES, FLOOR_MAX_RANKS);
        exit(2);
    }
    unsigned cores = (unsigned)sysconf(_SC_NPROCESSORS_ONLN);
    if (!cfg.lanes)
        cfg.lanes = cores / cfg.nodes < 1 ? 1 : cores / cfg.nodes > 8 ? 8 : cores / cfg.nodes;
}

int main(int argc, char **argv)
{
    static struct row row[MAX_SIZES];
    pthread_t thread;
    parse(argc, argv);
    sh = mmap(NULL, sizeof(*sh), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (sh == MAP_FAILED)
        floor_die("shared memory");
    sh->seconds = cfg.seconds;
    unsigned parties = cfg.nodes * (cfg.ranks + cfg.lanes);
    shared_barrier(&sh->control, parties + 1);
    shared_barrier(&sh->workers, cfg.nodes * cfg.lanes);
    shared_barrier(&sh->setup, cfg.nodes);
    shared_barrier(&sh->ranks, cfg.nodes * cfg.ranks);
    /* Each size has at most 4 units x 5 numbers; what takes longer than this hangs. */
    alarm((unsigned)(60 + cfg.nsizes * 40 * (1 + cfg.seconds)));
    start(node_main, cfg.nodes);
    start(rank_main, cfg.nodes * cfg.ranks);
    if (pthread_create(&thread, NULL, measure_all, row))
        floor_die("start of a thread");
    for (unsigned left = cfg.nodes * (1 + cfg.ranks); left > 0; left--) {
        int status;
        if (wait(&status) < 0 || status != 0) {
            fprintf(stderr, "floor: one of its processes failed\n");
            exit(1); /* the others end with this one */
        }
    }
    pthread_join(thread, NULL);
    if (cfg.json)
        write_json(row, cfg.nsizes);
    if (sh->wrong)
        fprintf(stderr, "floor: %llu wrong values: the numbers are worth nothing\n",
                (unsigned long long)sh->wrong);
    return sh->wrong != 0;
}
