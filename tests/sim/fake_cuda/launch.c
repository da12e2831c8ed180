/* SPDX-License-Identifier: MIT */
/* Kernels: found by name, run on the CPU by a stream's thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/fake_cuda/fake.h"

struct hrg_module_st {
    const void *image;
};

struct hrg_function_st {
    struct hrg_function_st *next;
    char name[64];
    size_t bytes; /* of its one parameter */
};

static struct hrg_function_st *functions; /* under fake_lock; one a name, for ever */

/* Kernels that run here, with the bytes of their parameter struct. NULL: none so named. */
static void (*kernel(const char *name, size_t *bytes))(void *args)
{
    (void)name;
    *bytes = 0;
    return NULL;
}

/* Device addresses in the parameter become this process's: words that carry the tag and lie in an allocation. */
static void translate(void *args, size_t bytes)
{
    for (size_t at = 0; at + 8 <= bytes; at += 8) {
        uint64_t word;
        memcpy(&word, (char *)args + at, 8);
        if ((word >> 48) != (FAKE_TAG >> 48))
            continue;
        pthread_mutex_lock(&fake_lock);
        if (fake_find(word, 1) != NULL)
            word &= ~FAKE_TAG;
        pthread_mutex_unlock(&fake_lock);
        memcpy((char *)args + at, &word, 8);
    }
}

FAKE_API hrg_result cuModuleGetFunction(hrg_function *function, hrg_module module, const char *name)
{
    FAKE_ENTER("ModuleGetFunction", 0);
    size_t bytes;
    if (module == NULL)
        return HRG_ERROR_INVALID_HANDLE;
    if (kernel(name, &bytes) == NULL || strlen(name) >= sizeof(functions->name))
        return HRG_ERROR_NOT_FOUND;
    pthread_mutex_lock(&fake_lock);
    struct hrg_function_st *f = functions;
    while (f != NULL && strcmp(f->name, name) != 0)
        f = f->next;
    if (f == NULL) {
        f = fake_zalloc(sizeof(*f));
        snprintf(f->name, sizeof(f->name), "%s", name);
        f->bytes = bytes;
        f->next = functions;
        functions = f;
    }
    pthread_mutex_unlock(&fake_lock);
    *function = f;
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuLaunchKernel(hrg_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z,
                                   unsigned shared_bytes, hrg_stream stream, void **params, void **extra)
{
    FAKE_ENTER("LaunchKernel", 0);
    hrg_result r;
    struct hrg_stream_st *s = fake_stream(stream, &r);
    if (s == NULL)
        return r;
    if (function == NULL || params == NULL || extra != NULL || grid_x == 0 || grid_y != 1 || grid_z != 1 ||
        block_x == 0 || block_x > 1024 || block_y != 1 || block_z != 1 || shared_bytes > 0)
        return HRG_ERROR_INVALID_VALUE;
    size_t bytes;
    struct fake_item *item = fake_item_new("LaunchKernel", s, FAKE_LAUNCH);
    item->launch = kernel(function->name, &bytes);
    /* The driver copies parameters before it returns. */
    item->args = fake_zalloc(bytes + 1);
    memcpy(item->args, params[0], bytes);
    translate(item->args, bytes);
    return fake_post(item);
}

FAKE_API hrg_result cuModuleLoadData(hrg_module *module, const void *image)
{
    FAKE_ENTER("ModuleLoadData", FAKE_UNSAFE);
    if (fake_current() == NULL)
        return HRG_ERROR_INVALID_CONTEXT;
    if (image == NULL)
        return HRG_ERROR_INVALID_IMAGE;
    *module = fake_zalloc(sizeof(**module));
    (*module)->image = image;
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuModuleUnload(hrg_module module)
{
    FAKE_ENTER("ModuleUnload", FAKE_UNSAFE);
    free(module);
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuFuncGetAttribute(int *value, int attribute, hrg_function function)
{
    FAKE_ENTER("FuncGetAttribute", 0);
    (void)function;
    *value = attribute == HRG_FUNC_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuFuncSetAttribute(hrg_function function, int attribute, int value)
{
    FAKE_ENTER("FuncSetAttribute", 0);
    (void)function, (void)attribute, (void)value;
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, hrg_function function,
                                                                int block_size, size_t dynamic_shared)
{
    FAKE_ENTER("OccupancyMaxActiveBlocksPerMultiprocessor", 0);
    (void)function, (void)dynamic_shared;
    *blocks = block_size > 0 ? 2048 / block_size : 0;
    return HRG_SUCCESS;
}
