/* SPDX-License-Identifier: MIT */
#include "client/bootstrap.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* ------------------------------------------------------------------------------------------- parsing */

static const char *env(const char *name)
{
    const char *value = getenv(name);
    return value != NULL && value[0] != 0 ? value : NULL;
}

static bool parse_number(const char *text, long max, long *out)
{
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != 0 || v < 0 || v > max)
        return false;
    *out = v;
    return true;
}

/* FNV-1a over a string and its terminator, so that ("a", "bc") differs from ("ab", "c"). */
static uint64_t hash_more(uint64_t h, const char *text)
{
    size_t len = text != NULL ? strlen(text) + 1 : 1;
    for (size_t i = 0; i < len; i++) {
        h ^= text != NULL ? (unsigned char)text[i] : 0xffu;
        h *= UINT64_C(0x100000001b3);
    }
    return h;
}

static uint64_t hash_env(const char *launcher, const char *const *names)
{
    uint64_t h = hash_more(UINT64_C(0xcbf29ce484222325), launcher);
    for (; *names != NULL; names++)
        h = hash_more(h, env(*names));
    return h;
}

static bool append(char *host, size_t size, size_t *len, const char *text, size_t n)
{
    if (*len + n + 1 > size)
        return false;
    memcpy(host + *len, text, n);
    *len += n;
    host[*len] = 0;
    return true;
}

bool hcl_first_host(const char *list, char *host, size_t size)
{
    size_t len = 0;
    const char *p = list;
    while (*p != 0 && *p != ',') {
        if (*p != '[') {
            size_t n = strcspn(p, "[,");
            if (memchr(p, ']', n) != NULL || !append(host, size, &len, p, n))
                return false;
            p += n;
            continue;
        }
        size_t n = strspn(p + 1, "0123456789");
        const char *close = strchr(p, ']');
        if (n == 0 || close == NULL || strchr("-,]", p[1 + n]) == NULL || !append(host, size, &len, p + 1, n))
            return false;
        p = close + 1;
    }
    return len > 0;
}

bool hcl_uri_host(const char *uri, char *host, size_t size)
{
    const char *p = strstr(uri, "://");
    if (p == NULL)
        return false;
    p += 3;
    size_t len = 0, n = *p == '[' ? strcspn(++p, "],") : strcspn(p, ",:;");
    return n > 0 && append(host, size, &len, p, n);
}

bool hcl_split_host(const char *text, char *host, size_t size, uint16_t *port)
{
    const char *colon = strchr(text, ':');
    const char *tail = NULL;
    size_t len = 0, n = strlen(text);
    if (text[0] == '[') {
        const char *close = strchr(text, ']');
        if (close == NULL || (close[1] != 0 && close[1] != ':'))
            return false;
        tail = close[1] == ':' ? close + 2 : NULL;
        text++;
        n = (size_t)(close - text);
    } else if (colon != NULL && strchr(colon + 1, ':') == NULL) { /* one colon: not a bare IPv6 address */
        tail = colon + 1;
        n = (size_t)(colon - text);
    }
    long value = 0;
    if (tail != NULL && (!parse_number(tail, 65535, &value) || value == 0))
        return false;
    *port = (uint16_t)value;
    return n > 0 && append(host, size, &len, text, n);
}

/* ------------------------------------------------------------------------------------------- launchers */

struct launcher {
    const char *name;
    const char *rank;
    const char *nranks;
    const char *attempt[8];
};

static const struct launcher launchers[] = {
    /* MASTER_PORT tells apart two jobs that name no run: TORCHELASTIC_RUN_ID is "none" then. */
    {"torchrun",
     "RANK",
     "WORLD_SIZE",
     {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"}},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {"PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"}},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}},
};
#define NLAUNCHERS (sizeof(launchers) / sizeof(launchers[0]))

static hclient_result_t read_rank(const struct launcher *l, struct hcl_launch *out)
{
    const char *rank = env(l->rank), *nranks = env(l->nranks);
    long r, n;
    if (nranks == NULL)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s is set but %s is not; it must be 1 to %u", l->rank,
                        l->nranks, HRP_MAX_RANKS);
    if (!parse_number(nranks, HRP_MAX_RANKS, &n) || n == 0)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s is set but %s is '%s'; it must be 1 to %u", l->rank,
                        l->nranks, nranks, HRP_MAX_RANKS);
    if (!parse_number(rank, n - 1, &r))
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s is '%s'; it must be 0 to %ld (%s - 1)", l->rank, rank,
                        n - 1, l->nranks);
    out->launcher = l->name;
    out->rank = (uint32_t)r;
    out->nranks = (uint32_t)n;
    out->attempt = hash_env(l->name, l->attempt);
    return HCLIENT_OK;
}

static bool is_loopback(const char *host)
{
    return strncmp(host, "127.", 4) == 0 || strcmp(host, "::1") == 0 || strcmp(host, "localhost") == 0;
}

static bool one_node_of_mpi(void)
{
    const char *local = env("OMPI_COMM_WORLD_LOCAL_SIZE"), *all = env("OMPI_COMM_WORLD_SIZE");
    return local != NULL && all != NULL && strcmp(local, all) == 0;
}

/* Open MPI does not say where rank 0 runs, but where mpirun does; a PMIx server is each node's own, so its
   address names a common place only when there is one node. */
static bool mpi_root(char *host, size_t size)
{
    static const char *const uris[] = {"OMPI_MCA_orte_hnp_uri", "PMIX_SERVER_URI41", "PMIX_SERVER_URI4",
                                       "PMIX_SERVER_URI3",      "PMIX_SERVER_URI21", "PMIX_SERVER_URI2",
                                       "PMIX_SERVER_URI"};
    if (env("MASTER_ADDR") != NULL)
        return (size_t)snprintf(host, size, "%s", env("MASTER_ADDR")) < size;
    if (one_node_of_mpi())
        return (size_t)snprintf(host, size, "127.0.0.1") < size;
    for (size_t i = 0; i < sizeof(uris) / sizeof(uris[0]); i++)
        if (env(uris[i]) != NULL && hcl_uri_host(env(uris[i]), host, size) && !is_loopback(host))
            return true;
    return false;
}

static bool slurm_root(char *host, size_t size)
{
    if (env("SLURM_LAUNCH_NODE_IPADDR") != NULL)
        return (size_t)snprintf(host, size, "%s", env("SLURM_LAUNCH_NODE_IPADDR")) < size;
    const char *list = env("SLURM_STEP_NODELIST");
    if (list == NULL)
        list = env("SLURM_JOB_NODELIST");
    return list != NULL && hcl_first_host(list, host, size);
}

static hclient_result_t find_root(const struct launcher *l, struct hcl_launch *out, uint16_t *port)
{
    char *host = out->root_name;
    size_t size = sizeof(out->root_name);
    const char *given = env("HREDUCE_ROOT_ADDR");
    *port = 0;
    if (given != NULL)
        return hcl_split_host(given, host, size, port)
                   ? HCLIENT_OK
                   : hcl_fail(HCLIENT_INVALID_ARGUMENT,
                              "HREDUCE_ROOT_ADDR is '%s'; it must be host, host:port or [IPv6]:port", given);
    bool found;
    if (l == &launchers[0])
        found = env("MASTER_ADDR") != NULL && (size_t)snprintf(host, size, "%s", env("MASTER_ADDR")) < size;
    else if (l == &launchers[1])
        found = mpi_root(host, size);
    else
        found = slurm_root(host, size);
    if (found)
        return HCLIENT_OK;
    return hcl_fail(HCLIENT_INVALID_ARGUMENT,
                    "%s says that this is rank %u of %u, but not where to meet; set HREDUCE_ROOT_ADDR (or "
                    "MASTER_ADDR) on all ranks to a node that runs hreduced",
                    l->name, out->rank, out->nranks);
}

static bool add_root(struct hcl_launch *out, const struct addrinfo *ai, uint16_t port)
{
    struct hrp_addr a = {.port = port};
    if (ai->ai_family == AF_INET) {
        a.family = 4;
        memcpy(a.ip, &((const struct sockaddr_in *)(const void *)ai->ai_addr)->sin_addr, 4);
    } else if (ai->ai_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)(const void *)ai->ai_addr;
        a.family = 6;
        a.scope_id = in6->sin6_scope_id;
        memcpy(a.ip, &in6->sin6_addr, 16);
    } else {
        return true;
    }
    for (uint32_t i = 0; i < out->nroots; i++)
        if (memcmp(&out->root[i], &a, sizeof(a)) == 0)
            return true;
    if (out->nroots == HRP_MAX_ADDRS)
        return false;
    out->root[out->nroots++] = a;
    return true;
}

static hclient_result_t resolve(struct hcl_launch *out, uint16_t port)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *list;
    int rc = getaddrinfo(out->root_name, NULL, &hints, &list);
    if (rc != 0)
        return hcl_fail(
            HCLIENT_INVALID_ARGUMENT,
            "cannot resolve the meeting point '%s': %s; set HREDUCE_ROOT_ADDR to an address of a node "
            "that runs hreduced",
            out->root_name, gai_strerror(rc));
    for (const struct addrinfo *ai = list; ai != NULL && add_root(out, ai, port); ai = ai->ai_next)
        ;
    freeaddrinfo(list);
    if (out->nroots == 0)
        return hcl_fail(HCLIENT_INVALID_ARGUMENT, "the meeting point '%s' has no IPv4 or IPv6 address",
                        out->root_name);
    return HCLIENT_OK;
}

hclient_result_t hcl_launch_read(struct hcl_launch *out)
{
    memset(out, 0, sizeof(*out));
    const struct launcher *l = NULL;
    for (size_t i = 0; i < NLAUNCHERS && l == NULL; i++)
        if (env(launchers[i].rank) != NULL)
            l = &launchers[i];
    if (l == NULL)
        return hcl_fail(
            HCLIENT_INVALID_ARGUMENT,
            "hclient_comm_init_name: no launcher's variables are set (RANK and WORLD_SIZE, "
            "OMPI_COMM_WORLD_RANK, or SLURM_PROCID); start with torchrun, mpirun or srun, set them, or "
            "use hclient_comm_init_rank with an id");
    uint16_t port;
    hclient_result_t r = read_rank(l, out);
    if (r == HCLIENT_OK)
        r = find_root(l, out, &port);
    return r == HCLIENT_OK ? resolve(out, port) : r;
}

int hcl_local_rank(void)
{
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        long v;
        if (env(names[i]) != NULL && parse_number(env(names[i]), HRP_MAX_RANKS, &v))
            return (int)v;
    }
    return -1;
}

/* ---------------------------------------------------------------------------------------------- names */

struct name {
    struct name *next;
    uint32_t count;
    char text[sizeof(((struct hrp_key *)0)->name)];
};
static pthread_mutex_t names_lock = PTHREAD_MUTEX_INITIALIZER;
static struct name *names; /* lives as long as the process: one entry a name ever used */

static struct name *find_name(const char *text)
{
    struct name *n = names;
    while (n != NULL && strcmp(n->text, text) != 0)
        n = n->next;
    if (n == NULL && (n = calloc(1, sizeof(*n))) != NULL) {
        snprintf(n->text, sizeof(n->text), "%s", text);
        n->next = names;
        names = n;
    }
    return n;
}

uint32_t hcl_name_take(const char *text)
{
    pthread_mutex_lock(&names_lock);
    struct name *n = find_name(text);
    uint32_t nth = n != NULL ? n->count++ : 0;
    pthread_mutex_unlock(&names_lock);
    return nth;
}

void hcl_name_give_back(const char *text, uint32_t nth)
{
    pthread_mutex_lock(&names_lock);
    struct name *n = find_name(text);
    if (n != NULL && n->count == nth + 1)
        n->count = nth;
    pthread_mutex_unlock(&names_lock);
}
