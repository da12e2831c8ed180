/* SPDX-License-Identifier: MIT */
/*
 * One rank of a job that does nothing but one kind of op, back to back, so that what costs calls can be counted from
 * outside. Run under torchrun's variables beside a daemon; costs does that.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/hclient.h"

static int must(hclient_result_t r, const char *what)
{
    if (r == HCLIENT_OK)
        return 0;
    fprintf(stderr, "job: %s: %s\n", what, hclient_last_error(NULL));
    exit(1);
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: job BYTES OPS all_reduce|barrier hclient|plain   (float32 sum, in place)\n");
        return 2;
    }
    size_t bytes = strtoull(argv[1], NULL, 10);
    long ops = strtol(argv[2], NULL, 10);
    int barrier = strcmp(argv[3], "barrier") == 0;
    void *buf = NULL;
    hclient_comm_t comm;
    must(hclient_comm_init_name(&comm, "bench-job", NULL), "joining");
    if (strcmp(argv[4], "plain") == 0)
        buf = calloc(1, bytes);
    else
        must(hclient_mem_alloc(&buf, bytes), "memory");
    for (long i = 0; buf && i < ops; i++) {
        hclient_op_t op;
        if (barrier)
            must(hclient_barrier(comm, NULL, &op), "barrier");
        else
            must(hclient_all_reduce(comm, buf, buf, bytes / 4, HCLIENT_FLOAT32, HCLIENT_SUM, NULL, &op),
                 "all_reduce");
        must(hclient_wait(op), "waiting");
    }
    must(hclient_comm_destroy(comm), "leaving");
    return buf ? 0 : 1;
}
