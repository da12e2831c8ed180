/* SPDX-License-Identifier: MIT */
#include "daemon/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void hrd_text_add(char *buf, size_t len, const char *fmt, ...)
{
    size_t at = strlen(buf);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(buf + at, len - at, fmt, ap);
    va_end(ap);
}

void hrd_text_list(char *buf, size_t len, const char *item)
{
    hrd_text_add(buf, len, "%s%s", buf[0] ? ", " : "", item);
}

void hrd_text_printable(char *text)
{
    for (; *text; text++)
        if (*text < 0x20 || *text > 0x7e)
            *text = *text == '\n' || *text == '\t' ? ' ' : '?';
}
