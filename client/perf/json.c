/* SPDX-License-Identifier: MIT */
#include "client/perf/json.h"

#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 64

static const char *space(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r'))
        p++;
    return p;
}

/* The skip functions return the end of what begins at p, or NULL. */
static const char *skip_string(const char *p, const char *end)
{
    if (p >= end || *p != '"')
        return NULL;
    for (p++; p < end; p++) {
        if (*p == '"')
            return p + 1;
        if (*p == '\\')
            p++;
    }
    return NULL;
}

static const char *skip_word(const char *p, const char *end, const char *word)
{
    size_t n = strlen(word);
    return (size_t)(end - p) >= n && memcmp(p, word, n) == 0 ? p + n : NULL;
}

static const char *skip_number(const char *p, const char *end)
{
    size_t n = 0;
    while (p + n < end && p[n] && strchr("+-.0123456789eE", p[n]))
        n++;
    return n > 0 ? p + n : NULL;
}

static const char *skip_value(const char *p, const char *end, unsigned depth);

static const char *skip_list(const char *p, const char *end, unsigned depth)
{
    bool object = *p == '{';
    char close = object ? '}' : ']';
    p = space(p + 1, end);
    if (p < end && *p == close)
        return p + 1;
    while (p < end) {
        if (object) {
            p = skip_string(p, end);
            p = p ? space(p, end) : NULL;
            if (!p || p >= end || *p != ':')
                return NULL;
            p = space(p + 1, end);
        }
        p = skip_value(p, end, depth + 1);
        p = p ? space(p, end) : NULL;
        if (!p || p >= end)
            return NULL;
        if (*p == close)
            return p + 1;
        if (*p != ',')
            return NULL;
        p = space(p + 1, end);
    }
    return NULL;
}

static const char *skip_value(const char *p, const char *end, unsigned depth)
{
    if (p >= end || depth > MAX_DEPTH)
        return NULL;
    switch (*p) {
    case '{':
    case '[':
        return skip_list(p, end, depth);
    case '"':
        return skip_string(p, end);
    case 't':
        return skip_word(p, end, "true");
    case 'f':
        return skip_word(p, end, "false");
    case 'n':
        return skip_word(p, end, "null");
    default:
        return skip_number(p, end);
    }
}

bool hpf_json_parse(const char *text, struct hpf_json *value)
{
    const char *end = text + strlen(text);
    value->at = space(text, end);
    value->end = skip_value(value->at, end, 0);
    return value->end && space(value->end, end) == end;
}

static bool next_value(const char **p, const char *end, struct hpf_json *out)
{
    out->at = *p;
    out->end = skip_value(*p, end, 0);
    if (!out->end)
        return false;
    *p = space(out->end, end);
    if (*p < end && **p == ',')
        *p = space(*p + 1, end);
    return true;
}

bool hpf_json_member(struct hpf_json value, const char *name, struct hpf_json *out)
{
    if (value.at >= value.end || *value.at != '{')
        return false;
    size_t n = strlen(name);
    const char *p = space(value.at + 1, value.end);
    while (p < value.end && *p == '"') {
        const char *key = p + 1, *after = skip_string(p, value.end);
        if (!after)
            return false;
        bool found = (size_t)(after - 1 - key) == n && memcmp(key, name, n) == 0;
        p = space(after, value.end);
        p = p < value.end ? space(p + 1, value.end) : p; /* the colon */
        if (!next_value(&p, value.end, out))
            return false;
        if (found)
            return true;
    }
    return false;
}

bool hpf_json_element(struct hpf_json value, size_t index, struct hpf_json *out)
{
    if (value.at >= value.end || *value.at != '[')
        return false;
    const char *p = space(value.at + 1, value.end);
    while (p < value.end && *p != ']') {
        if (!next_value(&p, value.end, out))
            return false;
        if (index-- == 0)
            return true;
    }
    return false;
}

bool hpf_json_uint(struct hpf_json value, uint64_t *out)
{
    char digits[24];
    size_t n = value.end > value.at ? (size_t)(value.end - value.at) : 0;
    if (n == 0 || n >= sizeof(digits) || strspn(value.at, "0123456789") < n)
        return false;
    memcpy(digits, value.at, n);
    digits[n] = 0;
    *out = strtoull(digits, NULL, 10);
    return true;
}

static char unescape(char c)
{
    switch (c) {
    case 'n':
        return '\n';
    case 't':
        return '\t';
    case 'r':
    case 'b':
    case 'f':
        return ' ';
    default:
        return c;
    }
}

bool hpf_json_string(struct hpf_json value, char *buf, size_t len)
{
    if (len == 0 || value.end - value.at < 2 || *value.at != '"')
        return false;
    size_t n = 0;
    for (const char *p = value.at + 1; p < value.end - 1 && n + 1 < len; p++) {
        if (*p != '\\') {
            buf[n++] = *p;
        } else if (p[1] == 'u' && value.end - p > 6) {
            char hex[5] = {p[2], p[3], p[4], p[5], 0};
            unsigned long code = strtoul(hex, NULL, 16);
            buf[n++] = code < 128 ? (char)code : '?';
            p += 5;
        } else {
            buf[n++] = unescape(*++p);
        }
    }
    buf[n] = 0;
    return true;
}

void hpf_json_print_string(FILE *f, const char *text)
{
    fputc('"', f);
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (*p == '"' || *p == '\\')
            fprintf(f, "\\%c", *p);
        else if (*p < 32)
            fprintf(f, "\\u%04x", *p);
        else
            fputc(*p, f);
    }
    fputc('"', f);
}
