/* SPDX-License-Identifier: MIT */
/*
 * What tests of the GPU parts over the fake driver (tests/sim/fake_cuda) have in common. Each test runs in a child: the
 * driver is loaded once a process, with the failures that the environment orders.
 */
#ifndef TEST_SIM_FAKE_GPU_H
#define TEST_SIM_FAKE_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include "kernels/gpu_driver.h"

/* For every wait of a test, and a fifth of what a test may take. */
#define LIMIT_S 60

/* In a child a failed assertion of cmocka would jump into the parent's copy: say it and leave. */
#define CHECK(condition)                                                                        \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            (void)fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
            _exit(1);                                                                           \
        }                                                                                       \
    } while (0)
#define OK(call) CHECK((call) == HRG_SUCCESS)

/* From here on this process's CUDA driver is the fake beside the running program, and kernels can be loaded. With
   HREDUCE_TEST_GPU in the environment nothing changes: a test that can then runs on a real one. */
void fake_gpu_use(void);
/* fake_gpu_use(), loads the driver and starts it. */
const struct hrg_driver *fake_gpu_driver(void);
/* How often the driver's function was called in this process: "IpcOpenMemHandle". */
unsigned fake_gpu_calls(const char *name);
/* Is called when somebody asks that what an adapter wrote into GPU memory be visible. */
void fake_gpu_on_flush(void (*called)(void));

/* Fresh numbers, whose seed is printed. */
void fake_gpu_seed(void);
uint64_t fake_gpu_random(void);
/* Random bytes, of which each aligned word is masked. Pieces of one random megabyte: sanitized loops are slow, copies are
   not. */
void fake_gpu_fill(void *p, size_t bytes, uint64_t mask);
/* Whether they are equal; *at: the first byte that is not. */
bool fake_gpu_same(const void *a, const void *b, size_t bytes, size_t *at);

struct fake_gpu_body {
    void (*run)(void);
};
/* A cmocka test whose state is a struct fake_gpu_body: runs it in a child, which must end with 0 in time. */
void fake_gpu_in_child(void **state);
#define FAKE_GPU_TEST(fn)                                                   \
    {                                                                       \
        "test_" #fn, fake_gpu_in_child, NULL, NULL, &(struct fake_gpu_body) \
        {                                                                   \
            fn                                                              \
        }                                                                   \
    }

#endif
