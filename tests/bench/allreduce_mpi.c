/* SPDX-License-Identifier: MIT */
/*
 * MPI_Allreduce (float32 sum, in place) as compare measures it: barrier, one op, the slowest rank's time, the median.
 * Prints one line of JSON a size. Run it under mpirun; the last argument names the interface whose sent bytes count.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ITERS 2000
#define MIN_ITERS 5

static int rank, nranks;
static MPI_Comm leaders = MPI_COMM_NULL; /* one rank a node */
static double spent[MAX_ITERS], slowest[MAX_ITERS];

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static float input(int r, size_t i)
{
    return (float)((i + 7 * (size_t)r) % 61);
}

/* Elements that differ from the exact sum on any rank. */
static long check(float *buf, size_t count)
{
    long wrong = 0, total = 0;
    for (size_t i = 0; i < count; i++)
        buf[i] = input(rank, i);
    MPI_Allreduce(MPI_IN_PLACE, buf, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    for (size_t i = 0; i < count; i++) {
        float want = 0;
        for (int r = 0; r < nranks; r++)
            want += input(r, i);
        wrong += buf[i] != want;
    }
    MPI_Allreduce(&wrong, &total, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    return total;
}

static double one_op(float *buf, size_t count)
{
    MPI_Barrier(MPI_COMM_WORLD);
    double t0 = MPI_Wtime();
    MPI_Allreduce(MPI_IN_PLACE, buf, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    return MPI_Wtime() - t0;
}

/* As many ops as fit the time, the same number on all ranks. */
static int how_many(float *buf, size_t count, double seconds)
{
    double t = 0;
    for (int i = 0; i < 3; i++)
        t = one_op(buf, count);
    int n = t > 0 && seconds / t < MAX_ITERS ? (int)(seconds / t) : MAX_ITERS;
    n = n < MIN_ITERS ? MIN_ITERS : n;
    MPI_Bcast(&n, 1, MPI_INT, 0, MPI_COMM_WORLD);
    return n;
}

static unsigned long long sent_bytes(const char *interface)
{
    char line[512];
    unsigned long long bytes = 0;
    FILE *f = fopen("/proc/self/net/dev", "r");
    while (f && fgets(line, sizeof(line), f)) {
        char *name = line + strspn(line, " "), *colon = strchr(name, ':');
        if (!colon)
            continue;
        *colon = 0;
        if (strcmp(name, interface) != 0)
            continue;
        char *at = colon + 1;
        for (int i = 0; i < 9; i++) /* the ninth number is the bytes sent */
            bytes = strtoull(at, &at, 10);
    }
    if (f)
        fclose(f);
    return bytes;
}

/* Bytes that each node sent in one op, from a loop of n without barriers; printed by rank 0. */
static void wire(float *buf, size_t count, int n, const char *interface)
{
    unsigned long long sent = 0, *all = NULL;
    int nodes = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    sent = sent_bytes(interface);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < n; i++)
        MPI_Allreduce(MPI_IN_PLACE, buf, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
    sent = sent_bytes(interface) - sent;
    if (leaders == MPI_COMM_NULL)
        return;
    MPI_Comm_size(leaders, &nodes);
    all = calloc((size_t)nodes, sizeof(*all));
    if (!all)
        MPI_Abort(MPI_COMM_WORLD, 1);
    MPI_Gather(&sent, 1, MPI_UNSIGNED_LONG_LONG, all, 1, MPI_UNSIGNED_LONG_LONG, 0, leaders);
    for (int i = 0; rank == 0 && i < nodes; i++)
        printf("%s%llu", i ? ", " : ", \"tx_bytes\": [", all[i] / (unsigned long long)n);
    if (rank == 0)
        printf("]");
    free(all);
}

static void find_leaders(void)
{
    MPI_Comm node;
    int local;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
    MPI_Comm_rank(node, &local);
    MPI_Comm_split(MPI_COMM_WORLD, local == 0 ? 0 : MPI_UNDEFINED, rank, &leaders);
    MPI_Comm_free(&node);
}

static void measure(size_t bytes, double seconds, const char *interface)
{
    size_t count = bytes / sizeof(float);
    float *buf = malloc(bytes ? bytes : 1);
    if (!buf)
        MPI_Abort(MPI_COMM_WORLD, 1);
    long wrong = check(buf, count);
    int n = how_many(buf, count, seconds);
    for (int i = 0; i < n; i++)
        spent[i] = one_op(buf, count);
    MPI_Reduce(spent, slowest, n, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    qsort(slowest, (size_t)n, sizeof(slowest[0]), by_value);
    if (rank == 0)
        printf("{\"bytes\": %zu, \"time_us\": %.2f, \"p99_us\": %.2f, \"iters\": %d, \"wrong\": %ld", bytes,
               1e6 * slowest[n / 2], 1e6 * slowest[n - 1 - n / 100], n, wrong);
    if (interface && bytes >= 1 << 20)
        wire(buf, count, n < 10 ? n : 10, interface);
    if (rank == 0) {
        printf("}\n");
        fflush(stdout);
    }
    free(buf);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    if (argc < 3) {
        if (rank == 0)
            fprintf(stderr, "usage: mpirun ... allreduce_mpi BYTES[,BYTES...] SECONDS [INTERFACE]\n");
        MPI_Finalize();
        return 2;
    }
    find_leaders();
    char *save = NULL;
    double seconds = strtod(argv[2], NULL);
    for (char *t = strtok_r(argv[1], ",", &save); t; t = strtok_r(NULL, ",", &save))
        measure(strtoull(t, NULL, 10), seconds, argc > 3 ? argv[3] : NULL);
    if (leaders != MPI_COMM_NULL)
        MPI_Comm_free(&leaders);
    MPI_Finalize();
    return 0;
}
