/* SPDX-License-Identifier: MIT */
#ifndef HRD_THREAD_H
#define HRD_THREAD_H

#include <pthread.h>

/*
 * A thread of the daemon: signals are the control loop's, so all are blocked in it but SIGBUS, which is raised at the thread
 * that touched memory of a client that is no more (guard.c). name: at most 15 characters. 0 or errno.
 */
int hrd_thread_start(pthread_t *thread, void *(*run)(void *), void *arg, const char *name);

#endif
