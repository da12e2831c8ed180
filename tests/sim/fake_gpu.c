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

unsigned fake_gpu_calls(const char *name)
{
    char why[512];
    const struct hrg_driver *drv = hrg_driver_get(why, sizeof(why));
    CHECK(drv != NULL);
    void *lib = dlopen(drv->library, RTLD_LAZY | RTLD_NOLOAD);
    CHECK(lib != NULL);
    unsigned (*fn)(const char *);
    *(void **)&fn = dlsym(lib, "fake_cuda_calls");
    CHECK(fn != NULL);
    unsigned n = fn(name);
    dlclose(lib);
    return n;
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
