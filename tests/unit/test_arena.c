/* SPDX-License-Identifier: MIT */
/* The arena: no allocation overlaps another, domains lie apart, nothing is lost. */
#include "daemon/arena.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#define PAGE HRD_ARENA_PAGE
#define SIZE (UINT64_C(8) << 20)
#define PAGES (SIZE / PAGE)
#define NDOMAINS 4

/* What the watchers were told: the owner of each page, 0: nobody. */
struct ownership {
    uint8_t owner[PAGES];
    int refuse;
    unsigned grown, shrunk;
};

struct watcher {
    struct ownership *o;
    uint8_t id;
};

static int grow(void *ctx, uint64_t off, uint64_t len)
{
    struct watcher *w = ctx;
    if (w->o->refuse)
        return -1;
    assert_true(len > 0 && off % PAGE == 0 && len % PAGE == 0 && off + len <= SIZE);
    for (uint64_t p = off / PAGE; p < (off + len) / PAGE; p++) {
        assert_int_equal(w->o->owner[p], 0);
        w->o->owner[p] = w->id;
    }
    w->o->grown++;
    return 0;
}

static void shrink(void *ctx, uint64_t off, uint64_t len)
{
    struct watcher *w = ctx;
    for (uint64_t p = off / PAGE; p < (off + len) / PAGE; p++) {
        assert_int_equal(w->o->owner[p], w->id);
        w->o->owner[p] = 0;
    }
    w->o->shrunk++;
}

static uint32_t rnd_state;

static uint32_t rnd(uint32_t n)
{
    rnd_state = rnd_state * 1664525u + 1013904223u;
    return (rnd_state >> 8) % n;
}

static void test_ordinary(void **state)
{
    (void)state;
    struct hrd_arena *a = hrd_arena_new(SIZE - 1);
    assert_int_equal(hrd_arena_size(a), SIZE);
    assert_int_equal(hrd_arena_alloc(a, 7, 0), 0);
    assert_int_equal(hrd_arena_used(a), 0);
    /* Without an opened domain: first fit over all, whatever the number says. */
    assert_int_equal(hrd_arena_alloc(a, 7, 1), 0);
    assert_int_equal(hrd_arena_alloc(a, HRD_DOMAIN_SEND, PAGE + 1), PAGE);
    assert_int_equal(hrd_arena_alloc(a, 8, SIZE), HRD_ARENA_NONE);
    assert_int_equal(hrd_arena_alloc(a, 8, SIZE - 3 * PAGE), 3 * PAGE);
    assert_int_equal(hrd_arena_alloc(a, 8, 1), HRD_ARENA_NONE);
    hrd_arena_release(a, PAGE, PAGE + 1);
    assert_int_equal(hrd_arena_alloc(a, 9, 2 * PAGE), PAGE);
    hrd_arena_release(a, 0, 1);
    hrd_arena_release(a, 3 * PAGE, SIZE - 3 * PAGE);
    hrd_arena_release(a, PAGE, 2 * PAGE);
    assert_int_equal(hrd_arena_used(a), 0);
    assert_int_equal(hrd_arena_alloc(a, 9, SIZE), 0);
    hrd_arena_free(a);
}

static void test_open_close(void **state)
{
    (void)state;
    struct ownership o = {0};
    struct watcher w = {&o, 1};
    struct hrd_arena_watch watch = {grow, shrink, &w};
    struct hrd_arena *a = hrd_arena_new(SIZE);
    assert_int_equal(hrd_arena_domain_open(a, HRD_DOMAIN_SEND, &watch), -EINVAL);
    assert_int_equal(hrd_arena_domain_open(a, 5, &watch), 0);
    assert_int_equal(hrd_arena_domain_open(a, 5, &watch), -EEXIST);
    assert_int_equal(o.grown, 0); /* nothing before it is needed */
    uint64_t x = hrd_arena_alloc(a, 5, PAGE), y = hrd_arena_alloc(a, 5, PAGE);
    assert_int_equal(o.grown, 1); /* one granule serves both */
    assert_true(x != HRD_ARENA_NONE && y != HRD_ARENA_NONE && x != y);
    assert_int_equal(o.owner[x / PAGE], 1);
    hrd_arena_release(a, x, PAGE);
    assert_int_equal(o.shrunk, 0);
    hrd_arena_domain_close(a, 5);
    assert_int_equal(o.shrunk, 0);
    hrd_arena_domain_close(a, 5);
    assert_int_equal(hrd_arena_used(a), PAGE); /* y outlives its domain */
    assert_int_equal(hrd_arena_alloc(a, HRD_DOMAIN_SEND, SIZE), HRD_ARENA_NONE);
    hrd_arena_release(a, y, PAGE);
    assert_int_equal(hrd_arena_alloc(a, HRD_DOMAIN_SEND, SIZE), 0);
    hrd_arena_free(a);
}

static void test_refused_range(void **state)
{
    (void)state;
    struct ownership o = {.refuse = 1};
    struct watcher w = {&o, 1};
    struct hrd_arena_watch watch = {grow, shrink, &w};
    struct hrd_arena *a = hrd_arena_new(SIZE);
    assert_int_equal(hrd_arena_domain_open(a, 5, &watch), 0);
    assert_int_equal(hrd_arena_alloc(a, 5, PAGE), HRD_ARENA_NONE);
    assert_int_equal(hrd_arena_used(a), 0);
    uint64_t all = hrd_arena_alloc(a, HRD_DOMAIN_SEND, SIZE);
    assert_int_equal(all, 0); /* nothing was lost by it */
    hrd_arena_release(a, all, SIZE);
    o.refuse = 0;
    assert_true(hrd_arena_alloc(a, 5, PAGE) != HRD_ARENA_NONE);
    hrd_arena_free(a);
}

/* What a domain keeps without using it goes to whoever needs it: to ordinary memory and to other domains. */
static void test_reclaim(void **state)
{
    (void)state;
    struct ownership o = {0};
    struct watcher w[2] = {{&o, 1}, {&o, 2}};
    struct hrd_arena *a = hrd_arena_new(SIZE);
    for (uint32_t i = 0; i < 2; i++) {
        struct hrd_arena_watch watch = {grow, shrink, &w[i]};
        assert_int_equal(hrd_arena_domain_open(a, 10 + i, &watch), 0);
    }
    uint64_t x = hrd_arena_alloc(a, 10, SIZE / 2);
    assert_true(x != HRD_ARENA_NONE);
    assert_int_equal(hrd_arena_alloc(a, 11, SIZE / 2 + PAGE), HRD_ARENA_NONE);
    hrd_arena_release(a, x, SIZE / 2);
    uint64_t y = hrd_arena_alloc(a, 11, SIZE / 2 + PAGE);
    assert_true(y != HRD_ARENA_NONE);
    assert_int_equal(o.shrunk, 1);
    hrd_arena_release(a, y, SIZE / 2 + PAGE);
    uint64_t z = hrd_arena_alloc(a, HRD_DOMAIN_SEND, SIZE);
    assert_int_equal(z, 0);
    assert_int_equal(o.shrunk, 2);
    for (uint64_t p = 0; p < PAGES; p++)
        assert_int_equal(o.owner[p], 0);
    /* A rest smaller than a granule is still of use. */
    hrd_arena_release(a, 0, SIZE);
    assert_int_equal(hrd_arena_alloc(a, HRD_DOMAIN_SEND, SIZE - PAGE), 0);
    assert_int_equal(hrd_arena_alloc(a, 10, PAGE), SIZE - PAGE);
    hrd_arena_free(a);
}

struct piece {
    uint64_t off, bytes;
    uint32_t domain; /* index, NDOMAINS: ordinary */
};

static void test_random(void **state)
{
    (void)state;
    enum { N = 200 };
    struct ownership o = {0};
    struct watcher w[NDOMAINS];
    bool open[NDOMAINS];
    struct piece piece[N] = {0};
    static uint8_t taken[PAGES];
    memset(taken, 0, sizeof(taken));
    struct hrd_arena *a = hrd_arena_new(SIZE);
    uint64_t used = 0;
    for (uint32_t i = 0; i < NDOMAINS; i++) {
        w[i] = (struct watcher){&o, (uint8_t)(i + 1)};
        struct hrd_arena_watch watch = {grow, shrink, &w[i]};
        assert_int_equal(hrd_arena_domain_open(a, i, &watch), 0);
        open[i] = true;
    }
    for (int step = 0; step < 20000; step++) {
        struct piece *p = &piece[rnd(N)];
        o.refuse = rnd(50) == 0;
        if (p->bytes) {
            uint64_t n = (p->bytes + PAGE - 1) / PAGE;
            memset(taken + p->off / PAGE, 0, n);
            used -= n * PAGE;
            hrd_arena_release(a, p->off, p->bytes);
            p->bytes = 0;
        } else {
            p->domain = rnd(NDOMAINS + 1);
            p->bytes = 1 + rnd(rnd(4) ? 4 * PAGE : SIZE / 8);
            p->off = hrd_arena_alloc(a, p->domain, p->bytes);
            uint64_t n = (p->bytes + PAGE - 1) / PAGE;
            if (p->off == HRD_ARENA_NONE) {
                p->bytes = 0;
            } else {
                used += n * PAGE;
                for (uint64_t i = p->off / PAGE; i < p->off / PAGE + n; i++) {
                    assert_int_equal(taken[i], 0);
                    taken[i] = 1;
                    bool apart = p->domain < NDOMAINS && open[p->domain];
                    assert_int_equal(o.owner[i], apart ? p->domain + 1 : 0);
                }
            }
        }
        assert_int_equal(hrd_arena_used(a), used);
        if (rnd(500) == 0) {
            uint32_t i = rnd(NDOMAINS);
            hrd_arena_domain_close(a, i);
            for (uint64_t k = 0; k < PAGES; k++)
                if (o.owner[k] == i + 1)
                    o.owner[k] = 0;
            struct hrd_arena_watch watch = {grow, shrink, &w[i]};
            open[i] = rnd(4) != 0;
            if (open[i])
                assert_int_equal(hrd_arena_domain_open(a, i, &watch), 0);
        }
    }
    o.refuse = 0;
    for (int i = 0; i < N; i++)
        hrd_arena_release(a, piece[i].off, piece[i].bytes);
    assert_int_equal(hrd_arena_used(a), 0);
    assert_int_equal(hrd_arena_alloc(a, HRD_DOMAIN_SEND, SIZE), 0);
    assert_true(o.grown > 0 && o.shrunk > 0);
    hrd_arena_free(a);
}

int main(void)
{
    rnd_state = (uint32_t)time(NULL);
    print_message("seed %u\n", rnd_state);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ordinary),      cmocka_unit_test(test_open_close),
        cmocka_unit_test(test_refused_range), cmocka_unit_test(test_reclaim),
        cmocka_unit_test(test_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
