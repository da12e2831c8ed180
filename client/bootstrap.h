/* SPDX-License-Identifier: MIT */
/* What a launcher's environment says about this process. */
#ifndef HCL_BOOTSTRAP_H
#define HCL_BOOTSTRAP_H

#include "client/error.h"
#include "proto/wire.h"

struct hcl_launch {
    const char *launcher; /* "torchrun", "Open MPI", "Slurm"; static */
    uint32_t rank;
    uint32_t nranks;
    uint64_t attempt; /* hash of what tells this start of this job from others */
    char root_name[256];
    uint32_t nroots;
    struct hrp_addr root[HRP_MAX_ADDRS];
};

/* Reads the environment and resolves the meeting point (may ask the name service). */
hclient_result_t hcl_launch_read(struct hcl_launch *out);
/* LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK or SLURM_LOCALID; -1: none of them. */
int hcl_local_rank(void);

/* How many communicators of this name the process has made before; counts this one. */
uint32_t hcl_name_take(const char *text);
/* It was not made after all. */
void hcl_name_give_back(const char *text, uint32_t nth);

/* The first host of a Slurm list ("n[07-09,12]x,m3" is "n07x"). False: malformed, or longer than size. */
bool hcl_first_host(const char *list, char *host, size_t size);
/* The host of Open MPI's "123.0;tcp://10.0.0.1,10.1.0.1:45678". False: it has none. */
bool hcl_uri_host(const char *uri, char *host, size_t size);
/* "host", "host:port", "[v6]:port", "v6". False: malformed. port 0: none was given. */
bool hcl_split_host(const char *text, char *host, size_t size, uint16_t *port);

#endif
