/* SPDX-License-Identifier: MIT */
/* The host engine by itself. */
#include "daemon/engine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

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

/* While more is expected the threads do all of it and leave the agent alone; after that it is as before. */
static void test_expected(void **state)
{
    (void)state;
    int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct hrd_engine *e = hrd_engine_host_new(6, 1 << 20, wake);
    struct copy c[8];
    assert_non_null(e);
    for (unsigned round = 0; round < 3; round++) {
        hrd_engine_host_expect(e, true);
        for (unsigned i = 0; i < 8; i++) {
            start_copy(e, &c[i], 30000 + 40000 * i + round);
            assert_int_equal(e->table->help(e), 0);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_done_without_help),
        cmocka_unit_test(test_expected),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
