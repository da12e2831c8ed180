/* SPDX-License-Identifier: MIT */
/*
 * How fast the host arithmetic moves memory, beside memcpy on the same buffers. GB/s count every byte read and every
 * byte written once (a read for ownership is not counted, so plain stores look slower than they load the memory).
 *
 *     kernels [-l scalar|avx2|avx512] [-t f32|...] [-o sum|...] [-b block KiB]
 *
 * Each row goes over its buffers block by block (one hrk call a block), as the reduce threads do: "cached" over one
 * block again and again, "memory" over 48 MiB a buffer.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernels/kernels.h"

#define BUFFERS 17
#define BYTES ((size_t)48 << 20)

static uint8_t *buffer[BUFFERS];
static unsigned dtype = HRP_F32, op = HRP_SUM;

struct row {
    const char *name;
    unsigned nsrc, ndst; /* nsrc 0: hrk_copy of one source; ndst 0: memcpy */
    int in_place, stream;
};

static const struct row rows[] = {
    {"memcpy", 1, 0, 0, 0},           {"8 -> 8 in place", 8, 8, 1, 0}, {"8 -> 8", 8, 8, 0, 0},
    {"8 -> 8 stream", 8, 8, 0, 1},    {"8 -> 1", 8, 1, 0, 0},          {"8 -> 1 stream", 8, 1, 0, 1},
    {"4 -> 4 in place", 4, 4, 1, 0},  {"4 -> 1", 4, 1, 0, 0},          {"2 -> 1", 2, 1, 0, 0},
    {"2 -> 1 stream", 2, 1, 0, 1},    {"copy to 8", 0, 8, 0, 0},       {"copy to 8 stream", 0, 8, 0, 1},
    {"copy to 1 stream", 0, 1, 0, 1},
};

/* Time of this thread alone, so that a busy machine disturbs the figures less. */
static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void call(const struct row *r, size_t at, size_t bytes)
{
    const struct hrk_fold *f;
    struct hrk_fold fold = hrk_fold_single(dtype, op, r->nsrc);
    const void *src[BUFFERS];
    void *dst[BUFFERS];
    const unsigned nsrc = r->nsrc ? r->nsrc : 1;

    fold.stream = (uint8_t)r->stream;
    f = &fold;
    for (unsigned s = 0; s < nsrc; s++)
        src[s] = buffer[s] + at;
    for (unsigned d = 0; d < r->ndst; d++)
        dst[d] = buffer[r->in_place ? d : nsrc + d] + at;
    if (r->ndst == 0)
        memcpy(buffer[1] + at, src[0], bytes);
    else if (r->nsrc == 0)
        hrk_copy(dst, r->ndst, src[0], bytes, r->stream);
    else
        hrk_fold(f, dst, r->ndst, src, nsrc, bytes / hrp_dtype_size(dtype));
}

/* Best rate of a few passes. */
static double rate(const struct row *r, size_t block, int cached)
{
    const double streams = (r->nsrc ? r->nsrc : 1) + (r->ndst ? r->ndst : 1);
    double best = 0, until = now() + 0.25;
    int passes = 0;

    while (passes++ < 3 || now() < until) {
        double begin = now(), gbs;

        for (size_t at = 0; at < BYTES; at += block)
            call(r, cached ? 0 : at, block);
        gbs = streams * (double)BYTES / (now() - begin) * 1e-9;
        best = gbs > best ? gbs : best;
    }
    return best;
}

static unsigned find(const char *(*name)(unsigned), unsigned n, const char *text)
{
    for (unsigned i = 0; i < n; i++) {
        if (strcmp(name(i), text) == 0)
            return i;
    }
    fprintf(stderr, "kernels: unknown name '%s'\n", text);
    exit(2);
}

static const char *level_name(unsigned level)
{
    return hrk_level_name((enum hrk_level)level);
}

int main(int argc, char **argv)
{
    size_t only = 0;
    int c;

    while ((c = getopt(argc, argv, "l:t:o:b:")) != -1) {
        if (c == 'l' && hrk_set_level((enum hrk_level)find(level_name, 3, optarg)) != 0) {
            fprintf(stderr, "kernels: this machine has no %s\n", optarg);
            return 2;
        }
        if (c == 't')
            dtype = find(hrp_dtype_name, HRP_NDTYPES, optarg);
        if (c == 'o')
            op = find(hrp_redop_name, HRP_NREDOPS, optarg);
        if (c == 'b')
            only = strtoul(optarg, NULL, 10) << 10;
        if (c == '?')
            return 2;
    }
    for (unsigned i = 0; i < BUFFERS; i++) {
        buffer[i] = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (buffer[i] == MAP_FAILED) {
            perror("kernels: mmap");
            return 1;
        }
        memset(buffer[i], 0, BYTES);
    }
    printf("%s %s %s, GB/s read and written\n", hrk_level_name(hrk_get_level()), hrp_dtype_name(dtype),
           hrp_redop_name(op));
    printf("%-20s", "block KiB");
    for (size_t block = 16 << 10; block <= 1 << 20; block *= 4) {
        if (!only || block == only)
            printf("%9zu cached   memory", block >> 10);
    }
    printf("\n");
    for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++) {
        printf("%-20s", rows[r].name);
        for (size_t block = 16 << 10; block <= 1 << 20; block *= 4) {
            if (!only || block == only)
                printf("%16.1f %8.1f", rate(&rows[r], block, 1), rate(&rows[r], block, 0));
        }
        printf("\n");
        fflush(stdout);
    }
    return 0;
}
