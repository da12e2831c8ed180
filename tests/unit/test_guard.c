/* SPDX-License-Identifier: MIT */
/* The SIGBUS guard: memory that vanishes costs its owner, and nobody else. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/guard.h"

#define PAGES 64

struct victim {
    int fd;
    unsigned char *base;
    size_t len;
    _Atomic uint32_t poisoned;
};

static size_t page(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static void make(struct victim *v)
{
    v->len = PAGES * page();
    v->fd = memfd_create("victim", MFD_CLOEXEC);
    assert_true(v->fd >= 0);
    assert_int_equal(ftruncate(v->fd, (off_t)v->len), 0);
    v->base = mmap(NULL, v->len, PROT_READ | PROT_WRITE, MAP_SHARED, v->fd, 0);
    assert_ptr_not_equal(v->base, MAP_FAILED);
    memset(v->base, 7, v->len);
    atomic_store(&v->poisoned, 0);
    assert_int_equal(hrd_guard_add(v->base, v->len, &v->poisoned), 0);
}

static void unmake(struct victim *v)
{
    hrd_guard_remove(v->base);
    munmap(v->base, v->len);
    close(v->fd);
}

/* Reads the eventfd; whether somebody was poisoned. */
static bool woken(int fd)
{
    uint64_t n;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 0) == 1 && read(fd, &n, sizeof(n)) == (ssize_t)sizeof(n);
}

static void test_truncation(void **state)
{
    int fd = hrd_guard_init();
    struct victim a, b;
    (void)state;
    assert_true(fd >= 0);
    assert_int_equal(hrd_guard_init(), fd);
    make(&a);
    make(&b);
    assert_int_equal(ftruncate(a.fd, (off_t)(3 * page())), 0);
    errno = 77;
    assert_int_equal(*(volatile unsigned char *)(a.base + 10 * page() + 5), 0);
    assert_int_equal(errno, 77);
    assert_int_equal(atomic_load(&a.poisoned), 1);
    assert_int_equal(atomic_load(&b.poisoned), 0);
    assert_true(woken(fd));
    /* What is there still is, and everything from the fault on can be written. */
    assert_int_equal(a.base[2 * page()], 7);
    memset(a.base + 10 * page(), 1, a.len - 10 * page());
    assert_false(woken(fd));
    /* Before the fault: again one. */
    memset(a.base, 2, a.len);
    assert_true(woken(fd));
    assert_int_equal(b.base[10 * page()], 7);
    unmake(&a);
    unmake(&b);
}

static void *touch_all(void *arg)
{
    struct victim *v = arg;
    unsigned sum = 0;
    for (size_t i = 0; i < v->len; i += 512)
        sum += ((volatile unsigned char *)v->base)[i];
    return (void *)(uintptr_t)sum;
}

/* Several threads fault at once, while the control thread adds and removes others' ranges. */
static void test_threads(void **state)
{
    enum { VICTIMS = 4, THREADS = 3, OTHERS = 1500 };
    static struct victim v[VICTIMS];
    static _Atomic uint32_t other;
    pthread_t t[VICTIMS][THREADS];
    hrd_guard_init();
    char *place = mmap(NULL, (size_t)OTHERS * page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    (void)state;
    assert_ptr_not_equal(place, MAP_FAILED);
    for (int i = 0; i < VICTIMS; i++) {
        make(&v[i]);
        assert_int_equal(ftruncate(v[i].fd, 0), 0);
    }
    for (int i = 0; i < VICTIMS; i++)
        for (int k = 0; k < THREADS; k++)
            assert_int_equal(pthread_create(&t[i][k], NULL, touch_all, &v[i]), 0);
    for (int i = 0; i < OTHERS; i++)
        assert_int_equal(hrd_guard_add(place + (size_t)i * page(), page(), &other), 0);
    for (int i = 0; i < OTHERS; i++)
        hrd_guard_remove(place + (size_t)i * page());
    for (int i = 0; i < VICTIMS; i++) {
        for (int k = 0; k < THREADS; k++)
            pthread_join(t[i][k], NULL);
        assert_int_equal(atomic_load(&v[i].poisoned), 1);
    }
    assert_int_equal(atomic_load(&other), 0);
    for (int i = 0; i < VICTIMS; i++)
        unmake(&v[i]);
    munmap(place, (size_t)OTHERS * page());
    woken(hrd_guard_init());
}

/* A gigabyte that vanishes costs one mapping, not one a page. */
static void test_one_mapping(void **state)
{
    struct victim v;
    char line[512];
    int maps = 0;
    (void)state;
    hrd_guard_init();
    make(&v);
    assert_int_equal(ftruncate(v.fd, 0), 0);
    for (size_t i = 0; i < v.len; i += page())
        v.base[i] = 1;
    FILE *f = fopen("/proc/self/maps", "r");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f)) {
        uintptr_t at = (uintptr_t)strtoull(line, NULL, 16);
        maps += at >= (uintptr_t)v.base && at < (uintptr_t)v.base + v.len;
    }
    fclose(f);
    assert_in_range(maps, 1, 2);
    unmake(&v);
    woken(hrd_guard_init());
}

static int run_child(void (*fn)(void))
{
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        fn();
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void fault_outside(void)
{
    struct victim v;
    hrd_guard_init();
    make(&v);
    hrd_guard_remove(v.base);
    if (ftruncate(v.fd, 0) == 0)
        v.base[0] = 1;
}

static void sent_by_somebody(void)
{
    hrd_guard_init();
    kill(getpid(), SIGBUS);
}

static void test_elsewhere(void **state)
{
    (void)state;
    assert_int_equal(run_child(fault_outside), SIGBUS);
    assert_int_equal(run_child(sent_by_somebody), SIGBUS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_truncation),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_one_mapping),
        cmocka_unit_test(test_elsewhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
