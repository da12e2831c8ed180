/* SPDX-License-Identifier: MIT */
/* Results, sentences and the log of the library. */
#ifndef HCL_ERROR_H
#define HCL_ERROR_H

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "client/hclient.h"

#define HCL_TEXT 4096 /* longest sentence that is kept, with its NUL */

/* Sets the calling thread's sentence. */
void hcl_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Sets it and gives `result`. A macro, so that who reads a caller (compilers and checkers too) sees that what
   comes back is no success. */
#define hcl_fail(result, ...) (hcl_say(__VA_ARGS__), (result))
/* The same for a sentence of len bytes that the daemon wrote. */
hclient_result_t hcl_fail_text(hclient_result_t result, const char *text, size_t len);
/* Appends to the calling thread's sentence. */
void hcl_fail_more(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void hcl_log(hclient_log_level_t level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* A last word, which also goes to stderr where a callback takes the log; ends the process with SIGABRT, within two seconds
   whatever the callback does. */
_Noreturn void hcl_die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Set in the child of a process that has used the library: locks may be held for ever, nobody watches. */
extern atomic_bool hcl_inert;
hclient_result_t hcl_fail_inert(void);

/* The communicator that the thread's present call is about: what the sentence belongs to. */
void hcl_about(hclient_comm_t comm);

/* First line of every public function that does anything. */
#define HCL_ENTER()                                                 \
    do {                                                            \
        if (atomic_load_explicit(&hcl_inert, memory_order_relaxed)) \
            return hcl_fail_inert();                                \
        hcl_about(NULL);                                            \
    } while (0)

#endif
