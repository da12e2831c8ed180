/* SPDX-License-Identifier: MIT */
/* Which engine an op gets: hints, refusals, and without a hint how long kernels wait beside what copies would take. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/agent/types.h"

#define RANKS 4u
#define MIB ((uint64_t)1 << 20)

static uint64_t kernels_wait;
static unsigned asked;
static const char *no_sm, *no_dma;

static const char *sm_refuses(struct hrd_engine *e, const struct hrd_engine_ask *ask)
{
    (void)e, (void)ask;
    asked++;
    return no_sm;
}

static const char *dma_refuses(struct hrd_engine *e, const struct hrd_engine_ask *ask)
{
    (void)e, (void)ask;
    return no_dma;
}

static uint64_t waited(struct hrd_engine *e, uint64_t gpus)
{
    (void)e, (void)gpus;
    return kernels_wait;
}

static const struct hrd_engine_table sm_table = {.name = "sm", .refuses = sm_refuses, .waited = waited};
static const struct hrd_engine_table dma_table = {.name = "dma", .refuses = dma_refuses, .waited = waited};

static struct hrd_engine host, dma = {&dma_table}, sm = {&sm_table};
static struct hrd_agent *agent;
static struct acomm comm;
static struct aop *op;
static char memory[1];

static int setup(void **state)
{
    (void)state;
    agent = calloc(1, sizeof(*agent));
    op = calloc(1, sizeof(*op) + RANKS * sizeof(op->post[0]));
    comm = (struct acomm){.a = agent, .nranks = RANKS, .nnodes = 1, .nlocal = RANKS};
    op->c = &comm;
    agent->engine[HRD_ENGINE_HOST] = &host;
    agent->engine[HRD_ENGINE_DMA] = &dma;
    agent->engine[HRD_ENGINE_SM] = &sm;
    kernels_wait = 0;
    no_sm = no_dma = NULL;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    free(agent);
    free(op);
    return 0;
}

/* The engine for an all_reduce of bytes with rank i's buffers on GPU i % gpus; gpus 0: in host memory. */
static const struct hrd_engine *chosen(uint64_t bytes, int gpus, uint8_t overlap)
{
    op->sig =
        (struct hrp_sig){.coll = HRP_ALL_REDUCE, .count = bytes / 4, .dtype = HRP_F32, .redop = HRP_SUM};
    for (uint32_t i = 0; i < RANKS; i++) {
        struct hrd_span s = {.base = memory, .gpu = (int16_t)(gpus ? (int)i % gpus : HRD_HOST_MEMORY)};
        op->post[i] = (struct apost){.posted = true, .overlap = overlap, .in = s, .out = s};
    }
    assert_null(hrd_choose_engine(op));
    return op->engine;
}

static void hints(void **state)
{
    (void)state;
    kernels_wait = UINT64_C(1000000000);
    assert_ptr_equal(chosen(MIB, 4, HRP_OVERLAP_IDLE), &sm);
    kernels_wait = 0;
    assert_ptr_equal(chosen(MIB, 4, HRP_OVERLAP_COMPUTE), &dma);
    assert_ptr_equal(chosen(MIB, 0, HRP_OVERLAP_IDLE), &host);
    no_sm = "none";
    assert_ptr_equal(chosen(MIB, 4, HRP_OVERLAP_IDLE), &dma);
    assert_non_null(strstr(comm.stat.engine_why, "the other engine is out: none"));
    no_dma = "neither";
    assert_string_equal(hrd_choose_engine(op), "neither");
}

/* Kernels that wait for the change between two processes alone, some 150 us, are the better way only for what takes copies
   longer than that. */
static void waits(void **state)
{
    (void)state;
    assert_ptr_equal(chosen(1024, 4, HRP_OVERLAP_AUTO), &sm);
    kernels_wait = 150000;
    assert_ptr_equal(chosen(256 << 10, 4, HRP_OVERLAP_AUTO), &dma);
    assert_ptr_equal(chosen(4 * MIB, 4, HRP_OVERLAP_AUTO), &sm);
    assert_ptr_equal(chosen(64 * MIB, 4, HRP_OVERLAP_AUTO), &sm);
    kernels_wait = 2000000; /* a time slice */
    assert_ptr_equal(chosen(16 * MIB, 4, HRP_OVERLAP_AUTO), &dma);
    assert_non_null(strstr(comm.stat.engine_why, "2000 us"));
    assert_ptr_equal(chosen(16 * MIB, 1, HRP_OVERLAP_AUTO), &sm); /* four ranks share a link */
}

/* The words are made again for what is worth telling, not for every microsecond. */
static void same_words(void **state)
{
    (void)state;
    chosen(1024, 4, HRP_OVERLAP_AUTO);
    assert_non_null(strstr(comm.stat.engine_why, "less than 100 us"));
    strcpy(comm.stat.engine_why, "kept");
    for (kernels_wait = 0; kernels_wait < 100000; kernels_wait += 9000)
        chosen(1024, 4, HRP_OVERLAP_AUTO);
    assert_string_equal(comm.stat.engine_why, "kept");
    kernels_wait = 320000;
    chosen(64 * MIB, 4, HRP_OVERLAP_AUTO);
    assert_non_null(strstr(comm.stat.engine_why, "some 300 us"));
}

/* What the engine was asked for an op it is not asked again for the advice, unless the op shows no GPU. */
static void advice(void **state)
{
    (void)state;
    chosen(1024, 4, HRP_OVERLAP_AUTO);
    for (uint32_t i = 0; i < RANKS; i++)
        op->post[i].stream = true;
    asked = 0;
    assert_int_equal(hrd_choose_advice(op), HRP_ADVICE_IN_PLACE);
    assert_int_equal(asked, 0);
    kernels_wait = 2000000;
    chosen(1024, 4, HRP_OVERLAP_AUTO);
    for (uint32_t i = 0; i < RANKS; i++)
        op->post[i].stream = true;
    assert_int_equal(hrd_choose_advice(op), 0);
    op->sm_asked = false; /* as from a window */
    kernels_wait = asked = 0;
    assert_int_equal(hrd_choose_advice(op), HRP_ADVICE_IN_PLACE);
    assert_int_equal(asked, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(hints, setup, teardown),
        cmocka_unit_test_setup_teardown(waits, setup, teardown),
        cmocka_unit_test_setup_teardown(same_words, setup, teardown),
        cmocka_unit_test_setup_teardown(advice, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
