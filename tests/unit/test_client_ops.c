/* SPDX-License-Identifier: MIT */
/* Collectives of the library against a made-up daemon: every element, both ways of placing memory. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/uio.h>

#include <cmocka.h>

#include "client/hclient.h"
#include "tests/unit/client_fake.h"

#define GUARD 64
#define WINDOW ((size_t)1 << 20)

#define OK(call)                                                                           \
    do {                                                                                   \
        hclient_result_t r_ = (call);                                                      \
        if (r_ != HCLIENT_OK)                                                              \
            fail_msg("%s: %s: %s", #call, hclient_strerror(r_), hclient_last_error(NULL)); \
    } while (0)

static hclient_comm_t make_comm(int nranks, int rank)
{
    hclient_unique_id_t id;
    hclient_comm_t comm;
    OK(hclient_get_unique_id(&id));
    OK(hclient_comm_init_rank(&comm, nranks, id, rank));
    return comm;
}

/* A buffer with guard bytes on both sides, at an odd offset when the elements are bytes. */
struct buf {
    char *raw, *p;
    size_t bytes;
    bool shared;
};

static struct buf buf_new(size_t bytes, size_t skew, bool shared)
{
    struct buf b = {.bytes = bytes, .shared = shared};
    size_t all = bytes + 2 * GUARD + skew;
    if (shared) {
        void *p;
        OK(hclient_mem_alloc(&p, all));
        b.raw = p;
    } else {
        b.raw = malloc(all);
    }
    memset(b.raw, 0xA5, all);
    b.p = b.raw + GUARD + skew;
    return b;
}

static void buf_free(struct buf *b)
{
    for (int i = 1; i <= GUARD; i++) {
        assert_int_equal((unsigned char)b->p[-i], 0xA5);
        assert_int_equal((unsigned char)b->p[b->bytes + (size_t)i - 1], 0xA5);
    }
    if (b->shared)
        OK(hclient_mem_free(b->raw));
    else
        free(b->raw);
}

/* One op with its buffers and what must come out. */
struct job {
    hclient_comm_t comm;
    uint32_t nranks, rank, root;
    enum hrp_coll coll;
    unsigned dtype;
    size_t count;
    bool in_place;
    struct buf send, recv;
    uint32_t seed;
    hclient_op_t op;
};

FAKE_LOOP static double input(const struct job *j, uint64_t i)
{
    return (double)((j->seed + (uint32_t)i * 2654435761u) >> 28); /* 0..15: sums fit a byte */
}

FAKE_LOOP static double expected(const struct job *j, uint64_t i)
{
    uint64_t n = j->count;
    switch (j->coll) {
    case HRP_BROADCAST:
        return j->root == j->rank ? input(j, i) : (double)(made_up(j->root, i) & 0xff);
    case HRP_REDUCE_SCATTER:
        return input(j, j->rank * n + i) * j->nranks;
    case HRP_ALL_GATHER:
        return i / n == j->rank ? input(j, i % n) : (double)made_up((uint32_t)(i / n), i % n);
    default:
        return input(j, i) * j->nranks;
    }
}

FAKE_LOOP static void job_post(struct job *j, size_t skew, bool shared)
{
    size_t es = hrp_dtype_size(j->dtype), one = j->count * es, all = one * j->nranks;
    size_t send_bytes = j->coll == HRP_REDUCE_SCATTER ? all : one;
    size_t recv_bytes = j->coll == HRP_ALL_GATHER ? all : one;
    size_t send_n = send_bytes / es;
    char *send, *recv;
    if (j->in_place) {
        j->send = buf_new(send_bytes > recv_bytes ? send_bytes : recv_bytes, skew, shared);
        send = recv = j->send.p;
        if (j->coll == HRP_REDUCE_SCATTER)
            recv += j->rank * one;
        if (j->coll == HRP_ALL_GATHER)
            send += j->rank * one;
        j->recv = (struct buf){.p = recv};
    } else {
        j->send = buf_new(send_bytes, skew, shared);
        j->recv = buf_new(recv_bytes, skew, shared);
        send = j->send.p;
        recv = j->recv.p;
    }
    for (size_t i = 0; i < send_n; i++)
        fake_put(send + i * es, j->dtype, input(j, i));
    hclient_data_type_t t = (hclient_data_type_t)j->dtype;
    switch (j->coll) {
    case HRP_BROADCAST:
        OK(hclient_broadcast(j->comm, send, recv, j->count, t, (int)j->root, NULL, &j->op));
        break;
    case HRP_REDUCE_SCATTER:
        OK(hclient_reduce_scatter(j->comm, send, recv, j->count, t, HCLIENT_SUM, NULL, &j->op));
        break;
    case HRP_ALL_GATHER:
        OK(hclient_all_gather(j->comm, send, recv, j->count, t, NULL, &j->op));
        break;
    default:
        OK(hclient_all_reduce(j->comm, send, recv, j->count, t, HCLIENT_SUM, NULL, &j->op));
    }
}

FAKE_LOOP static void job_finish(struct job *j)
{
    OK(hclient_wait(j->op));
    size_t es = hrp_dtype_size(j->dtype);
    size_t n = j->coll == HRP_ALL_GATHER ? j->count * j->nranks : j->count;
    for (size_t i = 0; i < n; i++) {
        double got = fake_get(j->recv.p + i * es, j->dtype), want = expected(j, i);
        if (got != want)
            fail_msg("%s of %zu x %s, %u ranks, rank %u, in place %d: element %zu is %g, not %g",
                     hrp_coll_name(j->coll), j->count, hrp_dtype_name(j->dtype), j->nranks, j->rank,
                     j->in_place, i, got, want);
    }
    buf_free(&j->send);
    if (!j->in_place)
        buf_free(&j->recv);
}

static struct fake fake;

static int start(void **state)
{
    (void)state;
    struct fake_config config = {.window_bytes = WINDOW};
    fake = fake_start(&config);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    fake_stop(&fake);
    return 0;
}

static void every_collective(bool shared)
{
    static const size_t counts[] = {0, 1, 3, 1000, 65536, 65537, 300001};
    static const enum hrp_coll colls[] = {HRP_ALL_REDUCE, HRP_BROADCAST, HRP_REDUCE_SCATTER, HRP_ALL_GATHER};
    static const struct {
        int nranks, rank;
    } shapes[] = {{1, 0}, {2, 1}, {5, 2}};
    for (size_t s = 0; s < 3; s++) {
        hclient_comm_t comm = make_comm(shapes[s].nranks, shapes[s].rank);
        for (size_t c = 0; c < 4; c++)
            for (size_t n = 0; n < sizeof(counts) / sizeof(counts[0]); n++)
                for (int place = 0; place < 2; place++)
                    for (uint32_t root = 0;
                         root < (colls[c] == HRP_BROADCAST && shapes[s].nranks > 1 ? 2 : 1); root++) {
                        struct job j = {.comm = comm,
                                        .nranks = (uint32_t)shapes[s].nranks,
                                        .rank = (uint32_t)shapes[s].rank,
                                        .root = root,
                                        .coll = colls[c],
                                        .dtype = n % 2 ? HRP_U8 : HRP_I32,
                                        .count = counts[n],
                                        .in_place = place,
                                        .seed = (uint32_t)(s * 100 + c * 10 + n)};
                        job_post(&j, j.dtype == HRP_U8 ? 1 : 4, shared);
                        job_finish(&j);
                    }
        OK(hclient_comm_destroy(comm));
    }
}

static void test_staged(void **state)
{
    (void)state;
    every_collective(false);
}

static void test_zero_copy(void **state)
{
    (void)state;
    every_collective(true);
}

/* Ops many times the window, with odd ends, so that the stream wraps at every place. */
static void test_window_wrap(void **state)
{
    (void)state;
    hclient_comm_t comm = make_comm(3, 1);
    for (uint32_t i = 0; i < 6; i++) {
        struct job j = {.comm = comm,
                        .nranks = 3,
                        .rank = 1,
                        .coll = i % 3 == 0   ? HRP_ALL_REDUCE
                                : i % 3 == 1 ? HRP_REDUCE_SCATTER
                                             : HRP_ALL_GATHER,
                        .dtype = HRP_U8,
                        .count = 1777777 + 4099 * i,
                        .in_place = i % 2,
                        .seed = i};
        job_post(&j, 1, false);
        job_finish(&j);
    }
    OK(hclient_comm_destroy(comm));
}

/* More ops than slots, of all sizes and both kinds, on two comms, waited for in a random order. */
static void test_many_outstanding(void **state)
{
    (void)state;
    enum { N = 200, DEPTH = 24 };
    hclient_comm_t comm[2] = {make_comm(2, 0), make_comm(4, 3)};
    struct job jobs[DEPTH] = {0};
    uint32_t rnd = 12345;
    for (int i = 0; i < N; i++) {
        rnd = rnd * 1664525u + 1013904223u;
        struct job *j = &jobs[(rnd >> 16) % DEPTH];
        if (j->comm != NULL)
            job_finish(j);
        int which = (rnd >> 8) & 1;
        *j = (struct job){.comm = comm[which],
                          .nranks = which ? 4 : 2,
                          .rank = which ? 3 : 0,
                          .coll = (enum hrp_coll)((rnd >> 9) % 4),
                          .dtype = rnd & 0x800 ? HRP_U8 : HRP_I32,
                          .count = (rnd >> 12) % 7 ? (rnd >> 5) % 3000 : (rnd >> 5) % 400000,
                          .in_place = (rnd >> 21) & 1,
                          .seed = rnd};
        job_post(j, 4, (rnd >> 23) % 3 == 0);
    }
    for (int i = 0; i < DEPTH; i++)
        if (jobs[i].comm != NULL)
            job_finish(&jobs[i]);
    OK(hclient_comm_wait(comm[0]));
    OK(hclient_comm_wait(comm[1]));
    OK(hclient_comm_destroy(comm[0]));
    OK(hclient_comm_destroy(comm[1]));
}

/* What another thread may be writing: through the kernel, so that no race is seen in looking. */
static unsigned char peek(const unsigned char *p)
{
    unsigned char v = 0;
    struct iovec to = {&v, 1}, from = {(void *)p, 1};
    if (syscall(SYS_process_vm_readv, getpid(), &to, 1, &from, 1, 0) != 1)
        abort();
    return v;
}

/* Nobody is inside the library: the watcher must move what does not fit the window. */
static void test_watcher_feeds(void **state)
{
    (void)state;
    hclient_comm_t a = make_comm(2, 0), b = make_comm(2, 0);
    size_t n = 5 * WINDOW;
    unsigned char *x = malloc(n), *y = malloc(n);
    memset(x, 3, n);
    memset(y, 5, n);
    hclient_op_t oy, ox;
    OK(hclient_all_reduce(a, x, x, n, HCLIENT_UINT8, HCLIENT_SUM, NULL, &ox));
    OK(hclient_all_reduce(b, y, y, n, HCLIENT_UINT8, HCLIENT_SUM, NULL, &oy));
    /* The last byte goes into the window when what lies a window before it has been copied out. */
    size_t seen = n - 2 * WINDOW;
    uint64_t end = fake_now() + 10 * fake_second();
    while ((peek(x + seen) != 6 || peek(y + seen) != 10) && fake_now() < end)
        usleep(1000);
    assert_int_equal(peek(x + seen), 6);
    assert_int_equal(peek(y + seen), 10);
    OK(hclient_wait(oy));
    OK(hclient_wait(ox));
    for (size_t i = 0; i < n; i++)
        if (x[i] != 6 || y[i] != 10)
            fail_msg("byte %zu: %d %d", i, x[i], y[i]);
    free(x);
    free(y);
    OK(hclient_comm_destroy(a));
    OK(hclient_comm_destroy(b));
}

static void test_doorbells_and_groups(void **state)
{
    (void)state;
    hclient_comm_t comm = make_comm(2, 0);
    int32_t v[16];
    for (int round = 0; round < 200; round++) {
        if (round % 20 == 0)
            usleep(2000); /* the agent goes to sleep */
        OK(hclient_group_start());
        hclient_op_t last = {0};
        for (int i = 0; i < 16; i++) {
            v[i] = i + round;
            OK(hclient_all_reduce(comm, &v[i], &v[i], 1, HCLIENT_INT32, HCLIENT_SUM, NULL, &last));
        }
        if (round % 2)
            OK(hclient_wait(last)); /* inside the group */
        OK(hclient_group_end());
        OK(hclient_comm_wait(comm));
        for (int i = 0; i < 16; i++)
            assert_int_equal(v[i], 2 * (i + round));
    }
    /* Rung by the end of the group alone, and by a wait in a group for what does not fit the window at once. */
    for (int round = 0; round < 12; round++) {
        usleep(5000);
        hclient_op_t op;
        OK(hclient_group_start());
        OK(hclient_barrier(comm, NULL, &op));
        OK(hclient_group_end());
        while (hclient_test(op) == HCLIENT_IN_PROGRESS)
            usleep(100);
        size_t n = 3 * WINDOW;
        unsigned char *p = calloc(1, n);
        OK(hclient_group_start());
        OK(hclient_all_reduce(comm, p, p, n, HCLIENT_UINT8, HCLIENT_SUM, NULL, &op));
        OK(hclient_wait(op));
        OK(hclient_group_end());
        free(p);
    }
    /* On a busy machine one may be late by a second; what never rings is missed a dozen times. */
    char *report;
    unsigned lost = 0;
    OK(hclient_comm_path(comm, &report));
    assert_int_equal(sscanf(report, "{\"lost\":%u}", &lost), 1);
    hclient_free(report);
    assert_true(lost <= 2);
    assert_int_equal(hclient_group_end(), HCLIENT_INVALID_ARGUMENT);
    OK(hclient_barrier(comm, NULL, NULL));
    OK(hclient_comm_wait(comm));
    OK(hclient_comm_destroy(comm));
}

static void test_import(void **state)
{
    (void)state;
    hclient_comm_t comm = make_comm(2, 0);
    size_t bytes = 1 << 20;
    int fd = memfd_create("own", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, (off_t)bytes + 4096), 0);
    int32_t *p = fake_map(fd, bytes, 4096);
    assert_int_equal(hclient_mem_import_fd(p, bytes, fd, 4096), HCLIENT_INVALID_ARGUMENT);
    assert_non_null(strstr(hclient_last_error(NULL), "F_SEAL_SHRINK"));
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK);
    assert_int_equal(hclient_mem_import_fd(p, bytes + 4096, fd, 4096), HCLIENT_INVALID_ARGUMENT);
    assert_int_equal(hclient_mem_import_fd(p, bytes, fd, 100), HCLIENT_INVALID_ARGUMENT);
    char *other = fake_map(fake_memfd(bytes), bytes, 0);
    memset(other, 1, bytes);
    assert_int_equal(hclient_mem_import_fd(other, bytes, fd, 4096), HCLIENT_INVALID_ARGUMENT);
    munmap(other, bytes);
    OK(hclient_mem_import_fd(p, bytes, fd, 4096));
    assert_int_equal(hclient_mem_import_fd(p, bytes, fd, 4096), HCLIENT_INVALID_ARGUMENT);
    close(fd);
    for (int i = 0; i < 1000; i++)
        p[i] = i;
    hclient_op_t op;
    OK(hclient_all_reduce(comm, p, p + 1000, 1000, HCLIENT_INT32, HCLIENT_SUM, NULL, &op));
    OK(hclient_wait(op));
    for (int i = 0; i < 1000; i++)
        assert_int_equal(p[1000 + i], 2 * i);
    OK(hclient_mem_free(p));
    p[0] = 1; /* the mapping is still ours */
    assert_int_equal(hclient_mem_free(p), HCLIENT_INVALID_ARGUMENT);
    munmap(p, bytes);
    OK(hclient_comm_destroy(comm));
}

static void test_failures(void **state)
{
    (void)state;
    hclient_comm_t comm = make_comm(2, 0);
    static float f[FAKE_FAILS_LATE];
    static int32_t v[1000];
    hclient_result_t async;
    hclient_op_t bad, good;
    v[0] = 21;
    OK(hclient_all_reduce(comm, v, v, FAKE_MISMATCH, HCLIENT_INT32, HCLIENT_SUM, NULL, &bad));
    OK(hclient_all_reduce(comm, v, v, 1, HCLIENT_INT32, HCLIENT_SUM, NULL, &good));
    for (int again = 0; again < 2; again++) {
        assert_int_equal(hclient_wait(bad), HCLIENT_MISMATCH);
        assert_non_null(strstr(hclient_last_error(NULL), "666 elements, rank 1"));
        assert_int_equal(hclient_test(bad), HCLIENT_MISMATCH);
    }
    assert_non_null(strstr(hclient_last_error(comm), "666"));
    OK(hclient_wait(good));
    assert_int_equal(v[0], 42); /* untouched by the op that failed */
    OK(hclient_comm_get_async_error(comm, &async));
    assert_int_equal(async, HCLIENT_OK);
    assert_int_equal(hclient_comm_wait(comm), HCLIENT_MISMATCH);
    OK(hclient_comm_wait(comm)); /* reported once */

    /* What was written of a failed op is no number; what was not is untouched. */
    for (int i = 0; i < FAKE_FAILS_LATE; i++)
        f[i] = 1;
    OK(hclient_all_reduce(comm, f, f, FAKE_FAILS_LATE, HCLIENT_FLOAT32, HCLIENT_SUM, NULL, &bad));
    assert_int_equal(hclient_wait(bad), HCLIENT_TIMEOUT);
    for (size_t i = 0; i < HRP_STAGE_CHUNK / 4; i++)
        assert_true(f[i] != f[i]);
    for (size_t i = HRP_STAGE_CHUNK / 4; i < FAKE_FAILS_LATE; i++)
        assert_true(f[i] == 1.0f);

    /* Old failures are found, and when they are not it is said. */
    hclient_op_t first = {0};
    for (int i = 0; i < 300; i++) {
        OK(hclient_all_reduce(comm, v, v, FAKE_MISMATCH, HCLIENT_INT32, HCLIENT_SUM, NULL, &bad));
        if (i == 0)
            first = bad;
        if (i == 100)
            assert_int_equal(hclient_wait(first), HCLIENT_MISMATCH);
    }
    assert_int_equal(hclient_wait(bad), HCLIENT_MISMATCH);
    assert_int_equal(hclient_wait(first), HCLIENT_INVALID_ARGUMENT);
    assert_non_null(strstr(hclient_last_error(NULL), "too old"));
    bad.number++;
    assert_int_equal(hclient_wait(bad), HCLIENT_INVALID_ARGUMENT);

    OK(hclient_all_reduce(comm, v, v, FAKE_LIES, HCLIENT_INT32, HCLIENT_SUM, NULL, &bad));
    assert_int_equal(hclient_wait(bad), HCLIENT_PROTOCOL);

    /* The comm fails: pending and later ops, and only they. */
    OK(hclient_all_reduce(comm, v, v, FAKE_NEVER, HCLIENT_INT32, HCLIENT_SUM, NULL, &good));
    OK(hclient_comm_destroy(comm));
    comm = make_comm(2, 0);
    OK(hclient_all_reduce(comm, v, v, FAKE_COMM_FAILS, HCLIENT_INT32, HCLIENT_SUM, NULL, &bad));
    assert_int_equal(hclient_wait(bad), HCLIENT_RANK_LOST);
    assert_int_equal(hclient_all_reduce(comm, v, v, 1, HCLIENT_INT32, HCLIENT_SUM, NULL, &good),
                     HCLIENT_RANK_LOST);
    assert_non_null(strstr(hclient_last_error(NULL), "pid 77"));
    OK(hclient_comm_get_async_error(comm, &async));
    assert_int_equal(async, HCLIENT_RANK_LOST);
    assert_non_null(strstr(hclient_last_error(comm), "pid 77"));
    OK(hclient_comm_destroy(comm));
}

struct waiter {
    pthread_t thread;
    hclient_op_t op;
    hclient_result_t result;
};

static void *wait_main(void *arg)
{
    struct waiter *w = arg;
    w->result = hclient_wait(w->op);
    return NULL;
}

static void test_abort(void **state)
{
    (void)state;
    for (int staged = 0; staged < 2; staged++) {
        hclient_comm_t comm = make_comm(2, 0);
        void *mem = calloc(1, FAKE_NEVER * 4), *shared;
        OK(hclient_mem_alloc(&shared, FAKE_NEVER * 4));
        struct waiter w[8];
        for (int i = 0; i < 8; i++) {
            if (i < 4)
                OK(hclient_all_reduce(comm, staged ? mem : shared, staged ? mem : shared, FAKE_NEVER,
                                      HCLIENT_INT32, HCLIENT_SUM, NULL, &w[i].op));
            else
                w[i].op = w[i - 4].op; /* two threads an op */
            pthread_create(&w[i].thread, NULL, wait_main, &w[i]);
        }
        usleep(20000);
        uint64_t t = fake_now();
        OK(hclient_comm_abort(comm));
        for (int i = 0; i < 8; i++) {
            pthread_join(w[i].thread, NULL);
            assert_int_equal(w[i].result, HCLIENT_ABORTED);
        }
        OK(hclient_comm_abort(comm));
        assert_true(fake_now() - t < fake_second());
        hclient_op_t op;
        assert_int_equal(hclient_all_reduce(comm, mem, mem, 1, HCLIENT_INT32, HCLIENT_SUM, NULL, &op),
                         HCLIENT_ABORTED);
        OK(hclient_comm_destroy(comm));
        OK(hclient_mem_free(shared));
        free(mem);
    }
}

static void test_destroy_any_order(void **state)
{
    (void)state;
    hclient_comm_t comm = make_comm(2, 0);
    void *reg, *mem;
    int32_t v[FAKE_NEVER] = {0};
    OK(hclient_mem_alloc(&mem, 100));
    OK(hclient_comm_register(comm, v, sizeof(v), &reg));
    struct waiter w;
    OK(hclient_all_reduce(comm, v, v, FAKE_NEVER, HCLIENT_INT32, HCLIENT_SUM, NULL, &w.op));
    pthread_create(&w.thread, NULL, wait_main, &w);
    usleep(20000);
    OK(hclient_comm_destroy(comm)); /* wakes the waiter */
    pthread_join(w.thread, NULL);
    assert_int_equal(w.result, HCLIENT_ABORTED);
    assert_int_equal(hclient_comm_destroy(comm), HCLIENT_INVALID_ARGUMENT);
    assert_int_equal(hclient_comm_deregister(comm, reg), HCLIENT_INVALID_ARGUMENT);
    assert_int_equal(hclient_wait(w.op), HCLIENT_INVALID_ARGUMENT);
    assert_int_equal(hclient_comm_wait(comm), HCLIENT_INVALID_ARGUMENT);
    assert_non_null(strstr(hclient_last_error(comm), "not a communicator"));
    hclient_comm_t next = make_comm(2, 0); /* takes the same place, and is not the old one */
    assert_int_equal(hclient_comm_abort(comm), HCLIENT_INVALID_ARGUMENT);
    OK(hclient_barrier(next, NULL, NULL));
    OK(hclient_comm_wait(next));
    OK(hclient_comm_destroy(next));
    ((char *)mem)[99] = 1;
    OK(hclient_mem_free(mem));
    assert_int_equal(hclient_mem_free(mem), HCLIENT_INVALID_ARGUMENT);
    assert_int_equal(hclient_comm_destroy(NULL), HCLIENT_INVALID_ARGUMENT);
}

static void *post_main(void *arg)
{
    hclient_comm_t comm = arg;
    int32_t v[300];
    for (int round = 0; round < 100; round++) {
        hclient_op_t op;
        for (int i = 0; i < 300; i++)
            v[i] = i;
        OK(hclient_all_reduce(comm, v, v, 300, HCLIENT_INT32, HCLIENT_SUM, NULL, &op));
        OK(hclient_wait(op));
        for (int i = 0; i < 300; i++)
            assert_int_equal(v[i], 2 * i);
    }
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    hclient_comm_t comm = make_comm(2, 1);
    pthread_t t[8];
    for (int i = 0; i < 8; i++)
        pthread_create(&t[i], NULL, post_main, comm);
    for (int i = 0; i < 8; i++)
        pthread_join(t[i], NULL);
    OK(hclient_comm_destroy(comm));
}

static unsigned open_fds(void)
{
    unsigned n = 0;
    for (int fd = 0; fd < 256; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

static void test_info_and_leaks(void **state)
{
    (void)state;
    unsigned before = open_fds();
    for (int i = 0; i < 20; i++) {
        hclient_comm_t comm = make_comm(3, 1);
        hclient_comm_info_t info = HCLIENT_COMM_INFO_INITIALIZER;
        int n, rank;
        char *json;
        OK(hclient_comm_count(comm, &n));
        OK(hclient_comm_user_rank(comm, &rank));
        OK(hclient_comm_get_info(comm, &info));
        assert_int_equal(n, 3);
        assert_int_equal(rank, 1);
        assert_int_equal(info.nranks, 3);
        assert_string_equal(info.daemon_version, "0.0.fake");
        assert_int_equal(strlen(info.id), 32);
        hclient_comm_info_t small = {.size = offsetof(hclient_comm_info_t, nnodes), .nnodes = 77};
        OK(hclient_comm_get_info(comm, &small));
        assert_int_equal(small.rank, 1);
        assert_int_equal(small.nnodes, 77);
        OK(hclient_comm_path(comm, &json));
        assert_string_equal(json, "{\"lost\":0}");
        hclient_free(json);
        int32_t v = 1;
        OK(hclient_all_reduce(comm, &v, &v, 1, HCLIENT_INT32, HCLIENT_SUM, NULL, NULL));
        OK(hclient_comm_wait(comm));
        assert_int_equal(v, 3);
        OK(hclient_comm_destroy(comm));
    }
    assert_int_equal(open_fds(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_staged, start, stop),
        cmocka_unit_test_setup_teardown(test_zero_copy, start, stop),
        cmocka_unit_test_setup_teardown(test_window_wrap, start, stop),
        cmocka_unit_test_setup_teardown(test_many_outstanding, start, stop),
        cmocka_unit_test_setup_teardown(test_watcher_feeds, start, stop),
        cmocka_unit_test_setup_teardown(test_doorbells_and_groups, start, stop),
        cmocka_unit_test_setup_teardown(test_import, start, stop),
        cmocka_unit_test_setup_teardown(test_failures, start, stop),
        cmocka_unit_test_setup_teardown(test_abort, start, stop),
        cmocka_unit_test_setup_teardown(test_destroy_any_order, start, stop),
        cmocka_unit_test_setup_teardown(test_threads, start, stop),
        cmocka_unit_test_setup_teardown(test_info_and_leaks, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
