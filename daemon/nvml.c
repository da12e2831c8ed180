/* SPDX-License-Identifier: MIT */
#include "daemon/nvml.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int hrd_nvml_open(struct hrd_nvml *n, char *why, size_t len)
{
    const char *file = getenv("HREDUCE_NVML_LIBRARY");
    if (!file || !file[0])
        file = "libnvidia-ml.so.1";
    memset(n, 0, sizeof(*n));
    n->library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!n->library) {
        snprintf(why, len, "%s cannot be loaded: no NVIDIA driver is installed", file);
        return -ENOENT;
    }
    const struct {
        const char *name;
        bool needed;
        void *at;
    } symbols[] = {{"nvmlErrorString", true, &n->error},
#define FN(field, symbol, must, args) {#symbol, must, &n->field},
                   HRD_NVML_FUNCTIONS(FN)
#undef FN
    };
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *symbol = dlsym(n->library, symbols[i].name);
        if (!symbol && symbols[i].needed) {
            snprintf(why, len, "%s has no %s: the driver is too old", file, symbols[i].name);
            dlclose(n->library);
            return -EIO;
        }
        memcpy(symbols[i].at, &symbol, sizeof(symbol));
    }
    int code = n->init();
    if (code == HRD_NVML_OK)
        return 0;
    snprintf(why, len, "NVML does not start: %s", n->error(code));
    dlclose(n->library);
    return -EIO;
}

void hrd_nvml_close(struct hrd_nvml *n)
{
    n->shutdown();
    dlclose(n->library);
}
