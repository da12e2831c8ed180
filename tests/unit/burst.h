/* SPDX-License-Identifier: MIT */
/* Ops of two nodes over the fake verbs layer that are in flight together, and their exact results. */
#ifndef TESTS_UNIT_BURST_H
#define TESTS_UNIT_BURST_H

#include "tests/unit/verbs_nodes.h"

#include <stdio.h>
#include <string.h>

#include "proto/status.h"

#define FLIGHT 5u

static inline uint32_t rnd(uint32_t below)
{
    static uint64_t x = 88172645463325252u;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return (uint32_t)(x >> 33) % below;
}

/* Some all_reduces in flight together, out of place, of fresh numbers, with guards around the results. */
struct burst {
    uint64_t count[FLIGHT], off[FLIGHT], op[2][FLIGHT], pad;
    uint32_t timeout_ms; /* of its ops; 0: none */
};

static inline void burst_post(struct sim *s, struct burst *b)
{
    uint64_t at = 0, half = s->rank[0].pool_bytes / 2;
    b->pad = rnd(1u << 30);
    for (unsigned k = 0; k < FLIGHT; k++) {
        b->count[k] = rnd(3) ? 1 + rnd(2000) : 1 + rnd(80000);
        b->off[k] = at + GUARD;
        at += (b->count[k] * 4 + 2 * GUARD + 63) / 64 * 64;
    }
    for (uint32_t r = 0; r < 2; r++) {
        memset(s->rank[r].pool + half, 0x5a, half);
        for (unsigned k = 0; k < FLIGHT; k++) {
            struct hrp_sig sig = {.coll = HRP_ALL_REDUCE, .count = b->count[k], .redop = HRP_SUM};
            float *in = (float *)(void *)(s->rank[r].pool + b->off[k]);
            for (uint64_t i = 0; i < b->count[k]; i++)
                in[i] = number(r, i, b->pad + k);
            struct hrp_desc desc = {.op = ++s->rank[r].posted[0],
                                    .sig = sig,
                                    .timeout_ms = b->timeout_ms,
                                    .in = {.kind = HRP_BUF_SHARED, .id = 1, .offset = b->off[k]},
                                    .out = {.kind = HRP_BUF_SHARED, .id = 1, .offset = half + b->off[k]}};
            sim_push(s, r, 0, &desc, hrp_flag(desc.op, HRP_CHUNK_ALL));
            b->op[r][k] = desc.op;
        }
    }
}

static inline void burst_check(struct sim *s, const struct burst *b)
{
    uint64_t half = s->rank[0].pool_bytes / 2;
    for (uint32_t r = 0; r < 2; r++)
        for (unsigned k = 0; k < FLIGHT; k++) {
            char text[HRP_OP_TEXT + 1] = "";
            if (sim_wait(s, r, 0, b->op[r][k], text) != HRP_OK)
                fail_msg("rank %u op %u: %s", r, k, text);
            const char *raw = s->rank[r].pool + half + b->off[k];
            const float *out = (const float *)(const void *)raw;
            for (uint64_t i = 0; i < b->count[k]; i++)
                if (out[i] != number(0, i, b->pad + k) + number(1, i, b->pad + k))
                    fail_msg("rank %u op %u element %llu", r, k, (unsigned long long)i);
            for (unsigned g = 1; g <= GUARD; g++)
                if (raw[-(int)g] != 0x5a || raw[b->count[k] * 4 + g - 1] != 0x5a)
                    fail_msg("rank %u op %u: a guard was written", r, k);
        }
}

/* Bursts while an acknowledgement is lost somewhere, its message with it or not: they go on where they were. */
static inline void burst_mended(struct sim *s)
{
    unsigned lost = 0;
    s->mend = true;
    for (int round = 0; round < 40; round++) {
        struct burst b = {0};
        fake_verbs_lose(rnd(round % 2 ? 12 : 150), rnd(2));
        burst_post(s, &b);
        burst_check(s, &b);
        lost += !fake_verbs_to_lose();
    }
    if (lost < 20 || s->mended < 20) /* else it shows nothing */
        fail_msg("%u acknowledgements were lost and a path was made anew %u times", lost, s->mended);
    assert_int_equal(s->node[0].comms_failed + s->node[1].comms_failed, 0);
    assert_int_equal(fake_verbs_rnr(), 0);
}

#endif
