/* SPDX-License-Identifier: MIT */
/* Kernels: found by name, run on the CPU by a stream's thread (kernels/gpu_kernels_cpu.c). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/gpu_kernels.h"
#include "tests/sim/fake_cuda/fake.h"

struct hrg_module_st {
    const void *image;
};

struct hrg_function_st {
    struct hrg_function_st *next;
    char name[64];
};

static struct hrg_function_st *functions; /* under fake_lock; one a name, for ever */

/* A launch as a stream's thread finds it. */
struct launch {
    const char *name;
    uint32_t blocks, threads;
    struct hrg_ctx_st *ctx;
    union {
        uint64_t word[1];
        struct hrg_launch l; /* larger than any parameter */
    } args;
};

/* Bytes of the kernel's one parameter; 0: there is no kernel so named. */
static size_t parameter_bytes(const char *name)
{
    for (int k = 0; k < HRG_NKERNELS; k++) {
        if (strcmp(name, hrg_kernel_name[k]) != 0)
            continue;
        return k == HRG_copy       ? sizeof(struct hrg_copy_args)
               : k == HRG_fill_nan ? sizeof(struct hrg_nan_args)
                                   : sizeof(struct hrg_fold_args);
    }
    return 0;
}

static bool reaches(const struct hrg_ctx_st *ctx, const struct fake_alloc *a)
{
    if (a->kind == FAKE_VMM)
        return a->reach >> ctx->index & 1;
    if (a->kind == FAKE_IMPORTED)
        return a->opened == ctx->index;
    return a->index < 0 || a->index == ctx->index || (atomic_load(&ctx->peers) >> a->index & 1);
}

/* Device addresses in the parameter become this process's: words that carry the tag and lie in an allocation. False: one
   lies on a device that this context has no access to. */
static bool translate(struct launch *launch, size_t bytes)
{
    bool reachable = true;
    for (size_t i = 0; i < bytes / sizeof(uint64_t); i++) {
        uint64_t *word = &launch->args.word[0] + i;
        if ((*word >> 48) != (FAKE_TAG >> 48))
            continue;
        pthread_mutex_lock(&fake_lock);
        const struct fake_alloc *a = fake_find(*word, 1);
        if (a != NULL) {
            *word &= ~FAKE_TAG;
            reachable = reachable && reaches(launch->ctx, a);
        }
        pthread_mutex_unlock(&fake_lock);
    }
    return reachable;
}

/* On the stream's thread. */
static void run(void *args)
{
    const struct launch *launch = args;
    int err = launch->name ? hrg_cpu_launch(launch->name, launch->blocks, launch->threads, &launch->args)
                           : HRG_ERROR_ILLEGAL_ADDRESS;
    if (err != 0)
        fake_stick(err);
}

FAKE_API hrg_result cuModuleGetFunction(hrg_function *function, hrg_module module, const char *name)
{
    FAKE_ENTER("ModuleGetFunction", 0);
    if (module == NULL)
        return HRG_ERROR_INVALID_HANDLE;
    if (parameter_bytes(name) == 0 || strlen(name) >= sizeof(functions->name))
        return HRG_ERROR_NOT_FOUND;
    pthread_mutex_lock(&fake_lock);
    struct hrg_function_st *f = functions;
    while (f != NULL && strcmp(f->name, name) != 0)
        f = f->next;
    if (f == NULL) {
        f = fake_zalloc(sizeof(*f));
        snprintf(f->name, sizeof(f->name), "%s", name);
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
    size_t bytes = parameter_bytes(function->name);
    struct fake_item *item = fake_item_new("LaunchKernel", s, FAKE_LAUNCH);
    struct launch *launch = fake_zalloc(sizeof(*launch));
    *launch = (struct launch){.name = function->name, .blocks = grid_x, .threads = block_x, .ctx = s->ctx};
    /* The driver copies parameters before it returns. */
    memcpy(&launch->args, params[0], bytes);
    if (!translate(launch, bytes))
        launch->name = NULL;
    item->launch = run;
    item->args = launch;
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
