/* SPDX-License-Identifier: MIT */
/* Daemons that die, stand still or talk nonsense; forks, signals and exits of the job. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/time.h>

#include <cmocka.h>

#include "client/context.h"
#include "client/hclient.h"
#include "tests/unit/client_fake.h"

#define OK(call)                                                                           \
    do {                                                                                   \
        hclient_result_t r_ = (call);                                                      \
        if (r_ != HCLIENT_OK)                                                              \
            fail_msg("%s: %s: %s", #call, hclient_strerror(r_), hclient_last_error(NULL)); \
    } while (0)

static const struct fake_config plain = {.window_bytes = 1 << 20};

static atomic_int log_lines;
static char log_text[512];

static void count_log(void *user, hclient_log_level_t level, const char *text)
{
    (void)user;
    if (level <= HCLIENT_LOG_WARN && atomic_fetch_add(&log_lines, 1) == 0)
        snprintf(log_text, sizeof(log_text), "%s", text);
}

static hclient_comm_t make_comm(void)
{
    hclient_unique_id_t id;
    hclient_comm_t comm;
    OK(hclient_get_unique_id(&id));
    OK(hclient_comm_init_rank(&comm, 2, id, 0));
    return comm;
}

/* Tries until the daemon is there. */
static void one_op(hclient_comm_t comm)
{
    int32_t v = 4;
    hclient_op_t op;
    OK(hclient_all_reduce(comm, &v, &v, 1, HCLIENT_INT32, HCLIENT_SUM, NULL, &op));
    OK(hclient_wait(op));
    assert_int_equal(v, 8);
}

static void test_no_daemon(void **state)
{
    (void)state;
    hclient_unique_id_t id;
    void *p;
    setenv("HREDUCE_SOCKET", "/tmp/hclient-test-none.sock", 1);
    assert_int_equal(hclient_get_unique_id(&id), HCLIENT_DAEMON_LOST);
    assert_non_null(strstr(hclient_last_error(NULL), "/tmp/hclient-test-none.sock"));
    assert_int_equal(hclient_mem_alloc(&p, 10), HCLIENT_DAEMON_LOST);
    char long_path[200];
    memset(long_path, 'x', sizeof(long_path) - 1);
    long_path[sizeof(long_path) - 1] = 0;
    setenv("HREDUCE_SOCKET", long_path, 1);
    assert_int_equal(hclient_get_unique_id(&id), HCLIENT_INVALID_ARGUMENT);
    assert_non_null(strstr(hclient_last_error(NULL), "199 characters"));
}

struct waiter {
    pthread_t thread;
    hclient_op_t op;
    hclient_result_t result;
    uint64_t when;
};

static void *wait_main(void *arg)
{
    struct waiter *w = arg;
    w->result = hclient_wait(w->op);
    w->when = fake_now();
    return NULL;
}

static void test_daemon_killed(void **state)
{
    (void)state;
    struct fake f = fake_start(&plain);
    hclient_set_log_callback(count_log, NULL);
    atomic_store(&log_lines, 0);
    hclient_comm_t comm = make_comm();
    void *mem;
    OK(hclient_mem_alloc(&mem, 8192));
    int32_t v[FAKE_NEVER] = {0};
    struct waiter w[8];
    for (int i = 0; i < 8; i++) {
        void *p = i % 2 ? (void *)v : mem;
        OK(hclient_all_reduce(comm, p, p, FAKE_NEVER, HCLIENT_INT32, HCLIENT_SUM, NULL, &w[i].op));
        pthread_create(&w[i].thread, NULL, wait_main, &w[i]);
    }
    usleep(50000);
    uint64_t t = fake_now();
    fake_stop(&f);
    for (int i = 0; i < 8; i++) {
        pthread_join(w[i].thread, NULL);
        assert_int_equal(w[i].result, HCLIENT_DAEMON_LOST);
        assert_true(w[i].when - t < fake_second());
    }
    hclient_result_t async;
    hclient_op_t op;
    OK(hclient_comm_get_async_error(comm, &async));
    assert_int_equal(async, HCLIENT_DAEMON_LOST);
    assert_non_null(strstr(hclient_last_error(comm), f.path));
    assert_int_equal(hclient_barrier(comm, NULL, &op), HCLIENT_DAEMON_LOST);
    assert_int_equal(hclient_test(w[0].op), HCLIENT_DAEMON_LOST);

    /* A new daemon, the same process: the old communicator stays lost, new ones work. */
    struct fake g = fake_start(&plain);
    hclient_comm_t next = make_comm();
    one_op(next);
    assert_int_equal(hclient_barrier(comm, NULL, &op), HCLIENT_DAEMON_LOST);
    /* Memory of the old daemon is ordinary memory to the new one. */
    ((int32_t *)mem)[1000] = 21;
    OK(hclient_all_reduce(next, (int32_t *)mem + 1000, (int32_t *)mem + 1000, 1, HCLIENT_INT32, HCLIENT_SUM,
                          NULL, &op));
    OK(hclient_wait(op));
    assert_int_equal(((int32_t *)mem)[1000], 42);
    t = fake_now();
    OK(hclient_comm_abort(comm));
    OK(hclient_comm_destroy(comm));
    OK(hclient_mem_free(mem));
    assert_true(fake_now() - t < fake_second());
    OK(hclient_comm_destroy(next));
    assert_int_equal(atomic_load(&log_lines), 1);
    assert_non_null(strstr(log_text, f.path));
    hclient_set_log_callback(NULL, NULL);
    fake_stop(&g);
}

/* The waits of two daemons that stand still take 10 s each: side by side, in processes of their own. */
static int stand_still(const struct fake_config *config, hclient_result_t expected)
{
    struct fake f = fake_start(config);
    hclient_comm_t comm;
    hclient_unique_id_t id;
    uint64_t t = fake_now();
    hclient_set_log_callback(count_log, NULL);
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "2", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    hclient_result_t r =
        config->silent ? hclient_get_unique_id(&id) : hclient_comm_init_name(&comm, "x", NULL);
    uint64_t took = fake_now() - t;
    fake_stop(&f);
    if (r != expected)
        fprintf(stderr, "%s: %s\n", hclient_strerror(r), hclient_last_error(NULL));
    return r == expected && took > UINT64_C(8000000000) && took < 13 * fake_second() ? 0 : 1;
}

static void test_daemon_stands_still(void **state)
{
    (void)state;
    pid_t pid[2];
    for (int i = 0; i < 2; i++) {
        pid[i] = fork();
        if (pid[i] == 0) {
            struct fake_config config = plain;
            config.frozen = i == 0;
            config.silent = i == 1;
            _exit(stand_still(&config, HCLIENT_UNRESPONSIVE));
        }
    }
    for (int i = 0; i < 2; i++) {
        int status = -1;
        waitpid(pid[i], &status, 0);
        assert_int_equal(status, 0);
    }
}

struct asker {
    pthread_t thread;
    struct hcl_context *ctx;
    uint16_t type;
    uint64_t limit_ns;
    hclient_result_t result;
};

static atomic_int ended; /* of them */

static void *ask_main(void *arg)
{
    struct asker *a = arg;
    struct hrp_msg msg = {.type = a->type};
    msg.body.alloc.bytes = a->type == HRP_MSG_ALLOC ? 4096 : 0;
    a->result = hcl_request(a->ctx, &msg, NULL, 0, a->type == HRP_MSG_ALLOC ? HRP_MSG_MEMORY : HRP_MSG_ID,
                            a->limit_ns, NULL);
    atomic_fetch_add(&ended, 1);
    return NULL;
}

static void ask(struct asker *a, struct hcl_context *ctx, uint16_t type, uint64_t limit_ns)
{
    *a = (struct asker){.ctx = ctx, .type = type, .limit_ns = limit_ns};
    assert_int_equal(pthread_create(&a->thread, NULL, ask_main, a), 0);
}

/* The daemon has as many requests for memory as it takes, and answers none. One more waits for room first, and no longer
   for both than its limit: a request whose limit is longer by three quarters ends after it. */
static void test_no_room(void **state)
{
    (void)state;
    struct fake_config config = plain;
    config.mute = true;
    struct fake f = fake_start(&config);
    struct asker full[HRP_MEMORY_JOBS], late, other;
    struct hcl_context *ctx;
    const uint64_t limit = 4 * fake_second();
    OK(hcl_context_get(NULL, &ctx));
    atomic_store(&ended, 0);
    for (unsigned i = 0; i < HRP_MEMORY_JOBS; i++)
        ask(&full[i], ctx, HRP_MSG_ALLOC, fake_second() / 4);
    for (unsigned i = 0; i < HRP_MEMORY_JOBS; i++) {
        pthread_join(full[i].thread, NULL);
        assert_int_equal(full[i].result, HCLIENT_UNRESPONSIVE);
    }
    ask(&late, ctx, HRP_MSG_ALLOC, limit);
    ask(&other, ctx, HRP_MSG_GET_ID, limit + 3 * limit / 4);
    pthread_join(late.thread, NULL);
    assert_int_equal(late.result, HCLIENT_UNRESPONSIVE);
    assert_int_equal(atomic_load(&ended), HRP_MEMORY_JOBS + 1);
    pthread_join(other.thread, NULL);
    assert_int_equal(other.result, HCLIENT_UNRESPONSIVE);
    hcl_context_put(ctx);
    fake_stop(&f);
}

static void test_daemon_talks_nonsense(void **state)
{
    (void)state;
    struct fake_config config = plain;
    config.garbage = true;
    struct fake f = fake_start(&config);
    hclient_set_log_callback(count_log, NULL);
    hclient_comm_t comm = make_comm();
    one_op(comm);
    char *json;
    assert_int_equal(hclient_comm_path(comm, &json), HCLIENT_PROTOCOL);
    hclient_op_t op;
    assert_int_equal(hclient_barrier(comm, NULL, &op), HCLIENT_PROTOCOL);
    OK(hclient_comm_destroy(comm));
    fake_stop(&f);

    /* A session that the daemon ends gets its reason, not just an end. */
    config = plain;
    config.dismiss = true;
    f = fake_start(&config);
    comm = make_comm();
    assert_int_equal(hclient_comm_path(comm, &json), HCLIENT_RESOURCE);
    assert_int_equal(hclient_barrier(comm, NULL, &op), HCLIENT_RESOURCE);
    assert_non_null(strstr(hclient_last_error(NULL), "a buffer was truncated"));
    void *mem;
    OK(hclient_mem_alloc(&mem, 10)); /* in a new session of the same daemon */
    OK(hclient_mem_free(mem));
    OK(hclient_comm_destroy(comm));
    fake_stop(&f);

    config = plain;
    config.abi = (HRP_ABI_MAJOR + 1) << 16;
    f = fake_start(&config);
    hclient_unique_id_t id;
    assert_int_equal(hclient_get_unique_id(&id), HCLIENT_VERSION);
    assert_non_null(strstr(hclient_last_error(NULL), "version 2"));
    fake_stop(&f);
    hclient_set_log_callback(NULL, NULL);
}

static void test_refusals(void **state)
{
    (void)state;
    struct fake f = fake_start(&plain);
    hclient_comm_t comm = NULL;
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "2", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    assert_int_equal(hclient_comm_init_name(&comm, "refuse", NULL), HCLIENT_REFUSED);
    assert_null(comm);
    assert_non_null(strstr(hclient_last_error(NULL), "rank 0 is here already"));
    assert_non_null(strstr(hclient_last_error(NULL), "meeting at 127.0.0.1"));
    void *p;
    assert_int_equal(hclient_mem_alloc(&p, (size_t)1 << 40), HCLIENT_RESOURCE);
    assert_non_null(strstr(hclient_last_error(NULL), "quota"));
    fake_stop(&f);
}

static void test_fork(void **state)
{
    (void)state;
    struct fake f = fake_start(&plain);
    hclient_comm_t comm = make_comm();
    one_op(comm);
    for (int i = 0; i < 3; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            int32_t v = 1;
            hclient_op_t op;
            hclient_unique_id_t id;
            int bad = hclient_all_reduce(comm, &v, &v, 1, HCLIENT_INT32, HCLIENT_SUM, NULL, &op) !=
                      HCLIENT_UNSUPPORTED;
            bad += strstr(hclient_last_error(NULL), "forked") == NULL;
            bad += hclient_comm_destroy(comm) != HCLIENT_UNSUPPORTED;
            bad += hclient_get_unique_id(&id) != HCLIENT_UNSUPPORTED;
            bad += hclient_mem_free(&v) != HCLIENT_UNSUPPORTED;
            (void)hclient_last_error(comm);
#ifdef __SANITIZE_ADDRESS__
            _exit(bad); /* the leak checker looks for the parent's threads in vain */
#else
            exit(bad); /* exit handlers too */
#endif
        }
        one_op(comm);
        int status = -1;
        waitpid(pid, &status, 0);
        assert_int_equal(status, 0);
    }
    one_op(comm);
    OK(hclient_comm_destroy(comm));
    fake_stop(&f);
}

static atomic_int alarms;

static void on_alarm(int signo)
{
    (void)signo;
    atomic_fetch_add(&alarms, 1);
}

static void test_signals(void **state)
{
    (void)state;
    struct fake_config config = plain;
    config.slow = true;
    struct fake f = fake_start(&config);
    struct sigaction sa = {.sa_handler = on_alarm}, old; /* without SA_RESTART */
    sigaction(SIGALRM, &sa, &old);
    struct itimerval every_ms = {{0, 1000}, {0, 1000}}, off = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &every_ms, NULL);
    size_t n = 3 << 20;
    unsigned char *p = malloc(n);
    for (int round = 0; round < 3; round++) {
        hclient_comm_t comm = make_comm();
        memset(p, 7, n);
        hclient_op_t op;
        OK(hclient_all_reduce(comm, p, p, n, HCLIENT_UINT8, HCLIENT_SUM, NULL, &op));
        OK(hclient_wait(op));
        for (size_t i = 0; i < n; i++)
            if (p[i] != 14)
                fail_msg("byte %zu is %d", i, p[i]);
        OK(hclient_comm_destroy(comm));
    }
    setitimer(ITIMER_REAL, &off, NULL);
    sigaction(SIGALRM, &old, NULL);
    assert_true(atomic_load(&alarms) > 10);
    free(p);
    fake_stop(&f);
}

/* Exits in several orders, calls in exit handlers included. */
static hclient_comm_t exit_comm;
static void *exit_mem;
static int exit_order;

static void at_exit(void)
{
    if (exit_order & 1)
        hclient_mem_free(exit_mem);
    hclient_comm_wait(exit_comm);
    if (exit_order & 2)
        hclient_comm_destroy(exit_comm);
    if (exit_order & 4)
        hclient_comm_destroy(exit_comm);
    hclient_mem_free(exit_mem);
}

static void test_exits(void **state)
{
    (void)state;
    for (int order = 0; order < 8; order++) {
        pid_t pid = fork();
        if (pid == 0) {
            struct fake f = fake_start(&plain);
            exit_order = order;
            atexit(at_exit);
            exit_comm = make_comm();
            OK(hclient_mem_alloc(&exit_mem, 100));
            one_op(exit_comm);
            int32_t v = 1;
            OK(hclient_all_reduce(exit_comm, &v, &v, 1, HCLIENT_INT32, HCLIENT_SUM, NULL, NULL));
            unlink(f.path);
            exit(0);
        }
        int status = -1;
        waitpid(pid, &status, 0);
        assert_int_equal(status, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_daemon_stands_still), /* first: it forks before the library is used */
        cmocka_unit_test(test_exits),
        cmocka_unit_test(test_no_daemon),
        cmocka_unit_test(test_daemon_killed),
        cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_daemon_talks_nonsense),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_signals),
        cmocka_unit_test(test_fork),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
