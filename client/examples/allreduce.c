/* SPDX-License-Identifier: MIT */
/* Sums a vector over all ranks of a job started by torchrun, mpirun or srun. */
#include <hclient.h>
#include <stdio.h>
#include <stdlib.h>

#define N (1 << 20)

static void check(hclient_result_t r, hclient_comm_t comm)
{
    if (r != HCLIENT_OK) {
        fprintf(stderr, "%s\n", hclient_last_error(comm));
        exit(1);
    }
}

int main(void)
{
    hclient_comm_t comm = NULL;
    int rank, nranks;
    float *v;

    check(hclient_comm_init_name(&comm, "example", NULL), NULL);
    check(hclient_comm_user_rank(comm, &rank), comm);
    check(hclient_comm_count(comm, &nranks), comm);
    check(hclient_mem_alloc((void **)&v, N * sizeof(float)), NULL); /* shared with the daemon: no copies */
    for (int i = 0; i < N; i++)
        v[i] = (float)rank;

    hclient_op_t op;
    check(hclient_all_reduce(comm, v, v, N, HCLIENT_FLOAT32, HCLIENT_SUM, NULL, &op), comm);
    check(hclient_wait(op), comm); /* the result is in v, on every rank the same */

    if (v[N - 1] != (float)(nranks * (nranks - 1) / 2)) {
        fprintf(stderr, "rank %d: wrong sum %f\n", rank, (double)v[N - 1]);
        return 1;
    }
    if (rank == 0)
        printf("sum over %d ranks: %g\n", nranks, (double)v[N - 1]);
    check(hclient_comm_destroy(comm), NULL);
    return 0;
}
