/* SPDX-License-Identifier: MIT */
/* The host engine by itself. */
#include "daemon/engine.h"

#include <dirent.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define THREADS 6

/* A copy of n floats by the engine; the work is freed with check_copy(). */
struct copy {
    struct hrd_work *w;
    float *src, *dst;
    uint64_t n;
    unsigned done;
};

static void count_done(struct hrd_work *w, const struct hrd_work_error *error)
{
    assert_null(error);
    ++*(unsigned *)w->owner;
}

static void start_copy(struct hrd_engine *e, struct copy *c, uint64_t n)
{
    *c = (struct copy){.w = calloc(1, sizeof(*c->w) + 2 * sizeof(c->w->span[0])),
                       .src = calloc(n, sizeof(float)),
                       .dst = calloc(n, sizeof(float)),
                       .n = n};
    for (uint64_t i = 0; i < n; i++)
        c->src[i] = (float)i;
    c->w->kind = HRD_WORK_COPY;
    c->w->nsrc = c->w->ndst = 1;
    c->w->n = n;
    c->w->span[0].base = (char *)c->src;
    c->w->span[1].base = (char *)c->dst;
    c->w->owner = &c->done;
    c->w->done = count_done;
    e->table->submit(e, c->w);
}

/* An agent that only looks. */
static void end_copy(struct hrd_engine *e, struct copy *c)
{
    for (int i = 0; i < 50000 && !c->done; i++) {
        e->table->poll(e);
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    if (c->done != 1)
        fail_msg("work over %llu floats ended %u times", (unsigned long long)c->n, c->done);
    for (uint64_t i = 0; i < c->n; i++)
        assert_true(c->dst[i] == (float)i);
    free(c->w);
    free(c->dst);
    free(c->src);
}

/* An agent that is busy with other jobs only looks, and never helps: the work is done all the same. Of every size, because
   small work is done at once and large work wakes threads by itself. */
static void test_done_without_help(void **state)
{
    (void)state;
    int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct hrd_engine *e = hrd_engine_host_new(2, 64 << 10, wake);
    assert_non_null(e);
    for (uint64_t n = 1000; n <= 1000000; n *= 2) {
        struct copy c;
        start_copy(e, &c, n);
        end_copy(e, &c);
    }
    e->table->free(e);
    close(wake);
}

/* While more is expected the threads look for it themselves; after that it is as before. With so many of them there are not
   always cores enough, so that the agent may be let in, too. */
static void test_expected(void **state)
{
    (void)state;
    int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct hrd_engine *e = hrd_engine_host_new(THREADS, 1 << 20, wake);
    struct copy c[8];
    assert_non_null(e);
    for (unsigned round = 0; round < 3; round++) {
        hrd_engine_host_expect(e, true);
        for (unsigned i = 0; i < 8; i++) {
            start_copy(e, &c[i], 30000 + 40000 * i + round);
            e->table->help(e);
        }
        for (unsigned i = 0; i < 8; i++)
            end_copy(e, &c[i]);
        hrd_engine_host_expect(e, false);
        start_copy(e, &c[0], 200000);
        end_copy(e, &c[0]);
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); /* longer than threads go on looking */
        start_copy(e, &c[0], 200000);
        while (e->table->help(e))
            ;
        end_copy(e, &c[0]);
    }
    hrd_engine_host_expect(e, true); /* and then it ends */
    e->table->free(e);
    close(wake);
}

/* Threads of this process with the engine's name that sleep now. */
static unsigned asleep(void)
{
    unsigned n = 0;
    DIR *d = opendir("/proc/self/task");
    assert_non_null(d);
    for (struct dirent *entry; (entry = readdir(d));) {
        char path[300], line[256] = "";
        snprintf(path, sizeof(path), "/proc/self/task/%s/stat", entry->d_name);
        FILE *f = fopen(path, "r");
        if (!f)
            continue;
        if (fgets(line, sizeof(line), f) && strstr(line, "(hrd-reduce) S"))
            n++;
        (void)fclose(f);
    }
    closedir(d);
    return n;
}

/* All on one core, they take it from each other, and would from whoever has the work: they stop looking for a while. */
static void test_crowded(void **state)
{
    (void)state;
    cpu_set_t all, one;
    assert_int_equal(sched_getaffinity(0, sizeof(all), &all), 0);
    CPU_ZERO(&one);
    for (size_t i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++)
        if (CPU_ISSET(i, &all))
            CPU_SET(i, &one);
    int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert_int_equal(sched_setaffinity(0, sizeof(one), &one), 0);
    struct hrd_engine *e = hrd_engine_host_new(THREADS, 1 << 20, wake);
    assert_non_null(e);
    for (unsigned round = 0; round < 3; round++) {
        hrd_engine_host_expect(e, true);
        struct copy c; /* wakes them, where they sleep still */
        start_copy(e, &c, 200000);
        end_copy(e, &c);
        for (unsigned i = 0; asleep() < THREADS; i++) {
            if (i == 10000)
                fail_msg("threads that share one core do not stop looking for work");
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
        /* What came meanwhile is the agent's when they could look again but sleep: too little to wake anybody for. */
        start_copy(e, &c, 30000);
        nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
        while (e->table->help(e))
            ;
        for (unsigned i = 0; i < 20 && !c.done; i++) { /* fewer looks than wake somebody by themselves */
            e->table->poll(e);
            nanosleep(&(struct timespec){.tv_nsec = c.done ? 0 : 20000000}, NULL);
        }
        if (!c.done)
            fail_msg("work that came while cores were short is nobody's");
        end_copy(e, &c);
        for (unsigned i = 0; i < 20; i++) { /* and work is done all the same */
            start_copy(e, &c, 50000 * (1 + i % 4));
            end_copy(e, &c);
        }
    }
    e->table->free(e);
    close(wake);
    assert_int_equal(sched_setaffinity(0, sizeof(all), &all), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_done_without_help),
        cmocka_unit_test(test_expected),
        cmocka_unit_test(test_crowded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
