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

static void count_done(struct hrd_work *w, const struct hrd_work_error *error)
{
    assert_null(error);
    ++*(unsigned *)w->owner;
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
        float *src = calloc(n, sizeof(float)), *dst = calloc(n, sizeof(float));
        struct hrd_work *w = calloc(1, sizeof(*w) + 2 * sizeof(w->span[0]));
        unsigned done = 0;
        for (uint64_t i = 0; i < n; i++)
            src[i] = (float)i;
        w->kind = HRD_WORK_COPY;
        w->nsrc = w->ndst = 1;
        w->n = n;
        w->span[0].base = (char *)src;
        w->span[1].base = (char *)dst;
        w->owner = &done;
        w->done = count_done;
        e->table->submit(e, w);
        for (int i = 0; i < 50000 && !done; i++) {
            e->table->poll(e);
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        }
        if (!done)
            fail_msg("work over %llu floats stands still", (unsigned long long)n);
        for (uint64_t i = 0; i < n; i++)
            assert_true(dst[i] == (float)i);
        free(w);
        free(dst);
        free(src);
    }
    e->table->free(e);
    close(wake);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_done_without_help),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
