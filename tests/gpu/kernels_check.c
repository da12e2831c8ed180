/* SPDX-License-Identifier: MIT */
/*
 * kernels_check [THIN]: the kernels on real GPUs, in all cases of tests/lib/gpu_cases.h: launched on each GPU, with sources
 * and destinations dealt over its own memory, two other GPUs' and pinned host memory. Every THIN-th case (23) on the first
 * GPU, fewer on the others. Also runs on the fake driver.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/lib/gpu_job.h"
#include "tests/lib/gpu_cases.h"

#define MAX_GPUS 16
#define THIN 23u
#define THINNER 8u /* on the other GPUs */

struct place {
    struct gj_gpu *gpu[GPU_CASES_BANKS]; /* NULL: pinned host memory, nothing to copy */
    struct gj_gpu *launcher;
};

static int run(struct gpu_cases_lab *lab, struct hrg_launch *l)
{
    struct place *p = lab->own;
    for (unsigned b = 0; b < GPU_CASES_BANKS; b++)
        if (p->gpu[b])
            gj_upload(p->launcher, lab->bank[b].device, lab->bank[b].host, lab->bank_bytes);
    gj_launch(p->launcher, l);
    gj_wait(p->launcher);
    for (unsigned b = 0; b < GPU_CASES_BANKS; b++)
        if (p->gpu[b])
            gj_download(p->launcher, lab->bank[b].host, lab->bank[b].device, lab->bank_bytes);
    /* The counter is ready for the next launch, and the word came from this one. */
    return atomic_load(p->launcher->word) == p->launcher->launches ? 0 : -1;
}

static void check_gpu(struct gj_gpu *all, int n, int at, unsigned thin)
{
    struct place place = {.launcher = &all[at]};
    struct gpu_cases_lab lab = {.bank_bytes = gpu_cases_bank_bytes(),
                                .max_blocks = 2 * all[at].multiprocessors,
                                .run = run,
                                .own = &place};
    uint64_t began = gj_now_ns();
    char why[256];
    int peers = 0;
    for (unsigned b = 0; b < GPU_CASES_BANKS; b++) {
        struct gj_gpu *owner = &all[(at + (int)(b == 3 ? 2 : b)) % n];
        if (b == 2) { /* pinned: the kernel works on the host's copy itself */
            lab.bank[b].host = gj_pinned(&all[at], lab.bank_bytes, &lab.bank[b].device);
            continue;
        }
        if (!gj_peers(&all[at], owner))
            owner = &all[at];
        peers += owner != &all[at];
        place.gpu[b] = owner;
        lab.bank[b].device = gj_alloc(owner, lab.bank_bytes);
        gj_use(&all[at]);
        lab.bank[b].host = gj_pinned(&all[at], lab.bank_bytes, NULL);
    }
    gj_use(&all[at]);
    long cases = gpu_cases_run(&lab, gj_now_ns(), thin, why, sizeof(why));
    if (cases < 0)
        gj_die("GPU %d: %s", at, why);
    printf("GPU %d: %ld cases right, memory of %d other GPUs among them, %.1f s\n", at, cases, peers,
           (double)(gj_now_ns() - began) * 1e-9);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static struct gj_gpu gpu[MAX_GPUS];
    unsigned thin = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 10) : THIN;
    int n;
    const struct hrg_driver *drv = gj_driver(&n);
    if (n > MAX_GPUS)
        n = MAX_GPUS;
    for (int i = 0; i < n; i++) {
        gj_open(&gpu[i], drv, i);
        gj_load_kernels(&gpu[i]);
    }
    for (int i = 0; i < n; i++)
        check_gpu(gpu, n, i, i == 0 ? thin : thin * THINNER);
    return 0;
}
