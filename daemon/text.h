/* SPDX-License-Identifier: MIT */
/* Sentences put together. */
#ifndef HRD_TEXT_H
#define HRD_TEXT_H

#include <stddef.h>

/* Appends to the string in buf; what does not fit into len bytes is cut. */
void hrd_text_add(char *buf, size_t len, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* The same for the next item of a list, with a comma before any but the first. */
void hrd_text_list(char *buf, size_t len, const char *item);
/* Text of another's making, for a log, a terminal or JSON: what is not printable ASCII becomes '?', a line's end a blank. */
void hrd_text_printable(char *text);

#endif
