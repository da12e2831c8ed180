/* SPDX-License-Identifier: MIT */
/* The compiled kernels: built into this binary, or from a file. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/gpu_kernels.h"

#ifdef HRG_IMAGE_FILE
/* The driver reads the length from the image itself. */
__asm__(".section .rodata.hrg_image,\"a\",@progbits\n"
        ".balign 16\n"
        ".local hrg_image\n"
        "hrg_image:\n"
        ".incbin \"" HRG_IMAGE_FILE "\"\n"
        ".quad 0\n"
        ".previous\n");
extern const char hrg_image[] __attribute__((visibility("hidden")));
#endif

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const void *image;
static char reason[512];

static void map_file(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;

    if (fd < 0 || fstat(fd, &st) != 0) {
        (void)snprintf(reason, sizeof(reason), "HREDUCE_GPU_KERNELS names %s, which cannot be read: %s", path,
                       strerror(errno));
    } else if (st.st_size == 0) {
        (void)snprintf(reason, sizeof(reason), "HREDUCE_GPU_KERNELS names %s, which is empty", path);
    } else {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);

        if (p == MAP_FAILED)
            (void)snprintf(reason, sizeof(reason), "HREDUCE_GPU_KERNELS names %s, which cannot be mapped: %s",
                           path, strerror(errno));
        else
            image = p;
    }
    if (fd >= 0)
        (void)close(fd);
}

static void find_image(void)
{
    const char *path = getenv("HREDUCE_GPU_KERNELS");

    if (path && path[0]) {
        map_file(path);
        return;
    }
#ifdef HRG_IMAGE_FILE
    image = hrg_image;
#else
    (void)snprintf(reason, sizeof(reason),
                   "this build has no GPU kernels (it was made without nvcc, or with CUDA=0); build it where "
                   "the CUDA toolkit is, or name their image in HREDUCE_GPU_KERNELS");
#endif
}

const void *hrg_kernels_image(const char **why)
{
    (void)pthread_once(&once, find_image);
    if (why)
        *why = image ? "" : reason;
    return image;
}
