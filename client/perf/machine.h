/* SPDX-License-Identifier: MIT */
/* Small questions to the machine: time, programs, /proc. */
#ifndef HPF_MACHINE_H
#define HPF_MACHINE_H

#include <stddef.h>
#include <stdint.h>

/*
 * Path of a program of this project, to be freed: $HREDUCE_BUILD/NAME (tests), beside the running executable,
 * ../sbin and ../bin of it, then PATH. NULL when there is none.
 */
char *hpf_find_program(const char *name);

/* CLOCK_MONOTONIC in ms. */
long long hpf_now_ms(void);
/* Sleeps; returns early on a signal. */
void hpf_sleep_ms(unsigned ms);
/* A field of /proc/meminfo or /proc/PID/status ("MemAvailable", "VmRSS"), in KiB; 0 when it is not there. */
uint64_t hpf_proc_kib(const char *path, const char *name);
/* "exit status 3", "signal 9 (Killed)"; buf is returned. */
const char *hpf_status_text(int status, char *buf, size_t len);

#endif
