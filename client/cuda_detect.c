/* SPDX-License-Identifier: MIT */
/*
 * Tells GPU memory from host memory without linking or loading CUDA: a pointer can only be the driver's when
 * the driver's library is in the process already.
 */
#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>

#include "client/buffer.h"

#define CU_POINTER_ATTRIBUTE_MEMORY_TYPE 2
#define CU_POINTER_ATTRIBUTE_IS_MANAGED 8
#define CU_MEMORYTYPE_DEVICE 2
#define CU_MEMORYTYPE_ARRAY 3

typedef int (*attribute_fn)(void *data, int attribute, uint64_t pointer);

static _Atomic(attribute_fn) get_attribute;
static _Atomic unsigned long long checked; /* libraries ever loaded, at the last look, plus 1 */

static int first_object(struct dl_phdr_info *info, size_t size, void *arg)
{
    if (size >= offsetof(struct dl_phdr_info, dlpi_subs))
        *(unsigned long long *)arg = info->dlpi_adds;
    return 1;
}

/* The driver may be loaded at any time; looking for it again is only worth it after something was loaded. */
static attribute_fn find_driver(void)
{
    attribute_fn fn = atomic_load_explicit(&get_attribute, memory_order_acquire);
    if (fn != NULL)
        return fn;
    unsigned long long adds = 0;
    dl_iterate_phdr(first_object, &adds);
    if (atomic_load_explicit(&checked, memory_order_relaxed) == adds + 1)
        return NULL;
    void *lib = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (lib != NULL) {
        void *sym = dlsym(lib, "cuPointerGetAttribute");
        fn = (attribute_fn)(uintptr_t)sym;
        if (fn != NULL)
            atomic_store_explicit(&get_attribute, fn, memory_order_release);
        else
            dlclose(lib);
    }
    atomic_store_explicit(&checked, adds + 1, memory_order_relaxed);
    return fn;
}

int hcl_is_cuda_pointer(const void *p)
{
    attribute_fn fn = find_driver();
    unsigned type = 0, managed = 0;
    if (fn == NULL || fn(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uint64_t)(uintptr_t)p) != 0)
        return 0;
    if (type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_ARRAY)
        return 0;
    /* Managed memory can be read and written by the CPU like any other. */
    return fn(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, (uint64_t)(uintptr_t)p) != 0 || managed == 0;
}
