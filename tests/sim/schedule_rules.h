/* SPDX-License-Identifier: MIT */
/* The rules that one node's schedule keeps by itself, whatever the algorithm (daemon/schedule.h says them). */
#ifndef TESTS_SCHEDULE_RULES_H
#define TESTS_SCHEDULE_RULES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "daemon/schedule.h"

static inline int rules_waits_for(const struct hrd_schedule *s, const struct hrd_step *step, uint32_t what)
{
    int found = step->src == what;
    for (uint32_t k = 0; k < step->in_count; k++)
        found |= s->list[step->in_first + k] == what;
    for (uint32_t k = 0; k < step->dep_count; k++)
        found |= s->list[step->dep_first + k] == what;
    return found;
}

static inline int rules_succeeds(const struct hrd_schedule *s, const struct hrd_step *step, uint32_t who)
{
    int found = 0;
    for (uint32_t k = 0; k < step->succ_count; k++)
        found += s->list[step->succ_first + k] == who;
    return found;
}

static inline void rules_list(const struct hrd_schedule *s, uint32_t i, uint32_t first, uint32_t count)
{
    assert_true(first <= s->nlist && count <= s->nlist - first);
    for (uint32_t k = 0; k < count; k++)
        assert_true(s->list[first + k] < i);
}

/* References point back, so that dependencies cannot go round; nwait and succ say the same as they do. */
static inline void rules_order(const struct hrd_schedule *s)
{
    uint64_t waits = 0, succs = 0;
    for (uint32_t i = 0; i < s->nsteps; i++) {
        const struct hrd_step *step = &s->steps[i];
        rules_list(s, i, step->in_first, step->in_count);
        rules_list(s, i, step->dep_first, step->dep_count);
        assert_true(step->src == HRD_NONE || step->src < i);
        assert_true(step->block < s->nblocks);
        waits += step->nwait;
        assert_int_equal(step->nwait, (step->src != HRD_NONE) + step->in_count + step->dep_count);
        succs += step->succ_count;
        for (uint32_t k = 0; k < step->succ_count; k++) {
            uint32_t next = s->list[step->succ_first + k];
            assert_true(next > i && next < s->nsteps);
            assert_true(rules_waits_for(s, &s->steps[next], i));
            assert_int_equal(rules_succeeds(s, step, next), 1);
        }
        if (step->src != HRD_NONE)
            assert_int_equal(rules_succeeds(s, &s->steps[step->src], i), 1);
        for (uint32_t k = 0; k < step->in_count; k++)
            assert_int_equal(rules_succeeds(s, &s->steps[s->list[step->in_first + k]], i), 1);
        for (uint32_t k = 0; k < step->dep_count; k++)
            assert_int_equal(rules_succeeds(s, &s->steps[s->list[step->dep_first + k]], i), 1);
    }
    assert_int_equal(waits, succs);
}

static inline int rules_sent_from(const struct hrd_schedule *s, uint32_t i)
{
    int sends = 0;
    for (uint32_t k = 0; k < s->steps[i].succ_count; k++) {
        const struct hrd_step *next = &s->steps[s->list[s->steps[i].succ_first + k]];
        sends += next->kind == HRD_STEP_SEND && next->src == i;
    }
    return sends;
}

/* A fold in place stands on exactly one input, a partial of the same block that nobody sends. */
static inline void rules_alias(const struct hrd_schedule *s, const struct hrd_step *fold)
{
    int over = 0;
    for (uint32_t k = 0; k < fold->in_count; k++) {
        uint32_t in = s->list[fold->in_first + k];
        if (s->steps[in].kind == HRD_STEP_RECV || s->steps[in].buf != fold->buf)
            continue;
        over++;
        assert_int_equal(rules_sent_from(s, in), 0);
        assert_int_equal(s->steps[in].block, fold->block);
        assert_int_equal(s->steps[in].value, HRD_VALUE_PARTIAL);
    }
    assert_int_equal(over, 1);
}

static inline void rules_buffers(const struct hrd_schedule *s)
{
    uint8_t *made = calloc(s->nbufs + 1, 1);
    for (uint32_t i = 0; i < s->nsteps; i++) {
        const struct hrd_step *step = &s->steps[i];
        if (step->kind == HRD_STEP_FOLD && step->final)
            assert_int_equal(step->buf != HRD_NONE, rules_sent_from(s, i) > 0);
        else if (step->kind == HRD_STEP_LOCAL || step->kind == HRD_STEP_FOLD)
            assert_true(step->buf < s->nbufs);
        else
            assert_int_equal(step->buf, HRD_NONE);
        if (step->buf == HRD_NONE)
            continue;
        assert_int_equal(s->buf_block[step->buf], step->block);
        assert_int_equal(s->buf_value[step->buf], step->value);
        if (step->kind == HRD_STEP_FOLD && !step->final)
            rules_alias(s, step);
        else
            assert_int_equal(made[step->buf]++, 0);
    }
    for (uint32_t i = 0; i < s->nbufs; i++)
        assert_int_equal(made[i], 1);
    free(made);
}

/* Whether step i waits, directly or through others, for the LOCAL step of its block. */
static inline int rules_after_local(const struct hrd_schedule *s, uint32_t i)
{
    const struct hrd_step *step = &s->steps[i];
    int found = step->kind == HRD_STEP_LOCAL;
    if (step->src != HRD_NONE)
        found |= s->steps[step->src].block == step->block && rules_after_local(s, step->src);
    for (uint32_t k = 0; k < step->in_count + step->dep_count && !found; k++) {
        uint32_t at = k < step->in_count ? step->in_first + k : step->dep_first + k - step->in_count;
        found |= s->steps[s->list[at]].block == step->block && rules_after_local(s, s->list[at]);
    }
    return found;
}

/* A block's output is written only after the local inputs of that block were read; and each RECV is used. */
static inline void rules_in_place(const struct hrd_schedule *s)
{
    uint8_t *has_local = calloc(s->nblocks, 1);
    for (uint32_t i = 0; i < s->nsteps; i++)
        if (s->steps[i].kind == HRD_STEP_LOCAL)
            has_local[s->steps[i].block] = 1;
    for (uint32_t i = 0; i < s->nsteps; i++) {
        const struct hrd_step *step = &s->steps[i];
        if ((step->kind == HRD_STEP_STORE || step->final) && has_local[step->block])
            assert_true(rules_after_local(s, i));
        if (step->kind == HRD_STEP_RECV) {
            assert_int_equal(step->nwait, 0);
            assert_true(step->succ_count > 0);
        }
    }
    free(has_local);
}

#endif
