/* SPDX-License-Identifier: MIT */
#include "daemon/ctl/ctl.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool mute;

void ctl_mute(bool muted)
{
    mute = muted;
}

void ctl_complain(const char *fmt, ...)
{
    va_list ap;
    if (mute)
        return;
    fputs("hreducectl: ", stderr);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
}

/* ---- JSON ------------------------------------------------------------------------------------------------- */

const char *ctl_str(const json_t *object, const char *key, const char *missing)
{
    const char *s = json_string_value(json_object_get(object, key));
    return s ? s : missing;
}

int64_t ctl_int(const json_t *object, const char *key)
{
    return json_integer_value(json_object_get(object, key));
}

double ctl_num(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

/* ---- short texts ------------------------------------------------------------------------------------------ */

enum { TEXTS = 32, TEXT_BYTES = 256 };

static char *next_text(void)
{
    static char text[TEXTS][TEXT_BYTES];
    static unsigned at;
    return text[at++ % TEXTS];
}

const char *ctl_format(const char *fmt, ...)
{
    char *t = next_text();
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(t, TEXT_BYTES, fmt, ap);
    va_end(ap);
    return t;
}

const char *ctl_count(int64_t n)
{
    return ctl_format("%" PRId64, n);
}

const char *ctl_bytes(int64_t bytes)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double v = (double)bytes;
    unsigned u = 0;
    while (v >= 1024 && u < 5) {
        v /= 1024;
        u++;
    }
    return u == 0 ? ctl_format("%" PRId64 " B", bytes) : ctl_format("%.1f %s", v, unit[u]);
}

const char *ctl_age(double seconds)
{
    int64_t s = (int64_t)seconds;
    if (seconds < 0)
        return "-";
    if (seconds < 1)
        return ctl_format("%.0f ms", seconds * 1000);
    if (s < 60)
        return ctl_format("%.1f s", seconds);
    if (s < 3600)
        return ctl_format("%" PRId64 " min %" PRId64 " s", s / 60, s % 60);
    if (s < 86400)
        return ctl_format("%" PRId64 " h %" PRId64 " min", s / 3600, s % 3600 / 60);
    return ctl_format("%" PRId64 " d %" PRId64 " h", s / 86400, s % 86400 / 3600);
}

/* ---- tables ----------------------------------------------------------------------------------------------- */

static char cleaned(char c)
{
    return (unsigned char)c < 0x20 || c == 0x7f ? '?' : c;
}

void ctl_print(const char *text)
{
    for (; *text; text++)
        putchar(cleaned(*text));
}

static char *copy_clean(const char *text)
{
    char *copy = strdup(text ? text : "");
    if (!copy)
        abort();
    for (char *p = copy; *p; p++)
        *p = cleaned(*p);
    return copy;
}

void ctl_table_begin(struct ctl_table *t, unsigned columns, const char *const *headings)
{
    *t = (struct ctl_table){.columns = columns};
    for (unsigned i = 0; i < columns; i++)
        t->heading[i] = headings[i];
}

void ctl_table_row(struct ctl_table *t, const char *const *texts)
{
    if (t->rows == t->room) {
        t->room = t->room * 2 + 16;
        char **more = realloc(t->cell, sizeof(*more) * t->room * t->columns);
        if (!more)
            abort();
        t->cell = more;
    }
    for (unsigned i = 0; i < t->columns; i++)
        t->cell[(size_t)t->rows * t->columns + i] = copy_clean(texts[i]);
    t->rows++;
}

static bool flush_right(const struct ctl_table *t, unsigned column)
{
    return t->heading[column][0] == '>';
}

static const char *title(const struct ctl_table *t, unsigned column)
{
    return t->heading[column] + flush_right(t, column);
}

static void print_row(const struct ctl_table *t, char *const *cells, const int *width, unsigned indent)
{
    printf("%*s", (int)indent, "");
    for (unsigned i = 0; i < t->columns; i++) {
        const char *text = cells ? cells[i] : title(t, i);
        bool last = i + 1 == t->columns;
        if (flush_right(t, i))
            printf("%*s%s", width[i], text, last ? "" : "  ");
        else
            printf("%-*s%s", last ? 0 : width[i], text, last ? "" : "  ");
    }
    putchar('\n');
}

void ctl_table_end(struct ctl_table *t, unsigned indent)
{
    int width[CTL_MAX_COLUMNS];
    for (unsigned i = 0; i < t->columns; i++) {
        width[i] = (int)strlen(title(t, i));
        for (unsigned r = 0; r < t->rows; r++) {
            int n = (int)strlen(t->cell[(size_t)r * t->columns + i]);
            if (n > width[i])
                width[i] = n;
        }
    }
    print_row(t, NULL, width, indent);
    for (unsigned r = 0; r < t->rows; r++)
        print_row(t, &t->cell[(size_t)r * t->columns], width, indent);
    for (size_t i = 0; i < (size_t)t->rows * t->columns; i++)
        free(t->cell[i]);
    free(t->cell);
}
