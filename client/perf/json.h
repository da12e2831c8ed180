/* SPDX-License-Identifier: MIT */
/* As much JSON as reading the daemon's reports needs; nothing is copied. */
#ifndef HPF_JSON_H
#define HPF_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* A value inside a text that somebody else owns. */
struct hpf_json {
    const char *at, *end;
};

/* A whole document; false when it is not valid JSON or nests deeper than 64. */
bool hpf_json_parse(const char *text, struct hpf_json *value);
/* Member of an object, element of an array; false when value is no such thing or has none. */
bool hpf_json_member(struct hpf_json value, const char *name, struct hpf_json *out);
bool hpf_json_element(struct hpf_json value, size_t index, struct hpf_json *out);
/* A non-negative integer below 2^64. */
bool hpf_json_uint(struct hpf_json value, uint64_t *out);
/* A string, with \uXXXX outside ASCII as '?'; cut to len. */
bool hpf_json_string(struct hpf_json value, char *buf, size_t len);
/* The text as a JSON string, with its quotes. */
void hpf_json_print_string(FILE *f, const char *text);

#endif
