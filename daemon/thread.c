/* SPDX-License-Identifier: MIT */
#include "daemon/thread.h"

#include <signal.h>

int hrd_thread_start(pthread_t *thread, void *(*run)(void *), void *arg, const char *name)
{
    sigset_t all, old;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int err = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (err == 0)
        pthread_setname_np(*thread, name);
    return err;
}
