/* SPDX-License-Identifier: MIT */
#include "tests/sim/fake_gpu.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

static uint64_t random_state;

void fake_gpu_use(void)
{
    char self[4096], path[4200];
    if (getenv("HREDUCE_TEST_GPU"))
        return;
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    CHECK(n > 0);
    self[n] = '\0';
    setenv("HREDUCE_GPU_KERNELS", self, 1); /* any file is an image to the fake */
    for (int i = 0; i < 2; i++)
        *strrchr(self, '/') = '\0';
    snprintf(path, sizeof(path), "%s/libcuda_fake.so.1", self);
    setenv("HREDUCE_CUDA_LIBRARY", path, 1);
}

const struct hrg_driver *fake_gpu_driver(void)
{
    char why[512] = "";
    fake_gpu_use();
    const struct hrg_driver *drv = hrg_driver_get(why, sizeof(why));
    if (!drv)
        (void)fprintf(stderr, "%s\n", why);
    CHECK(drv != NULL);
    OK(drv->Init(0));
    return drv;
}

/* A function of the fake driver that the driver does not have; it stays loaded. */
static void *fake_function(const char *name)
{
    char why[512];
    const struct hrg_driver *drv = hrg_driver_get(why, sizeof(why));
    CHECK(drv != NULL);
    void *lib = dlopen(drv->library, RTLD_LAZY | RTLD_NOLOAD);
    CHECK(lib != NULL);
    void *fn = dlsym(lib, name);
    CHECK(fn != NULL);
    dlclose(lib);
    return fn;
}

unsigned fake_gpu_calls(const char *name)
{
    unsigned (*fn)(const char *);
    *(void **)&fn = fake_function("fake_cuda_calls");
    return fn(name);
}

void fake_gpu_on_flush(void (*called)(void))
{
    void (*fn)(void (*)(void));
    *(void **)&fn = fake_function("fake_cuda_on_flush");
    fn(called);
}

void fake_gpu_seed(void)
{
    random_state = (uint64_t)time(NULL) * 1000003u + (uint64_t)getpid();
    (void)fprintf(stderr, "seed %llu\n", (unsigned long long)random_state);
}

/* splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014. */
uint64_t fake_gpu_random(void)
{
    uint64_t z = random_state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

#define POOL_WORDS ((size_t)1 << 17)
#define PIECE ((size_t)64 << 10)

void fake_gpu_fill(void *p, size_t bytes, uint64_t mask)
{
    static uint64_t pool[POOL_WORDS], pool_mask; /* of 0 to begin with, as all words are */
    char *to = p;
    if (pool_mask != mask) {
        pool_mask = mask;
        for (size_t i = 0; i < POOL_WORDS; i++)
            pool[i] = fake_gpu_random() & mask;
    }
    for (size_t at = 0; at < bytes; at += PIECE) {
        size_t n = bytes - at < PIECE ? bytes - at : PIECE;
        memcpy(to + at, pool + fake_gpu_random() % (POOL_WORDS - PIECE / sizeof(*pool)), n);
    }
}

bool fake_gpu_same(const void *a, const void *b, size_t bytes, size_t *at)
{
    const unsigned char *x = a, *y = b;
    if (memcmp(x, y, bytes) == 0)
        return true;
    for (*at = 0; x[*at] == y[*at];)
        ++*at;
    return false;
}

void fake_gpu_in_child(void **state)
{
    const struct fake_gpu_body *b = *state;
    int status;
    (void)fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(5 * LIMIT_S);
        b->run();
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}
