/* SPDX-License-Identifier: MIT */
/* Two nodes over the fake verbs layer, for the tests of the transport. */
#ifndef TESTS_UNIT_VERBS_NODES_H
#define TESTS_UNIT_VERBS_NODES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

#include "tests/sim/agents.h"
#include "tests/sim/fake_verbs.h"

#define COMM 9u
/* Bytes before and behind a result that nobody may write. */
#define GUARD 64u

static inline void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

static inline void events(struct sim *s, int turns)
{
    for (int i = 0; i < turns; i++) {
        sim_events(s);
        nap();
    }
}

static inline struct sim *two_nodes(struct sim_options *o)
{
    static const uint32_t map[2] = {0, 1};
    struct sim *s = calloc(1, sizeof(*s));
    o->verbs = true;
    sim_start(s, 2, 2, map, o);
    return s;
}

static inline void stop(struct sim *s)
{
    sim_stop(s);
    free(s);
    fake_verbs_hold(false);
    assert_int_equal(fake_verbs_objects(), 0);
}

/* Small whole numbers: their sums are exact. */
static inline float number(uint32_t rank, uint64_t i, uint64_t salt)
{
    return (float)((i * 2654435761u + salt + rank * 40503u) % 4096);
}

#endif
