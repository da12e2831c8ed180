/* SPDX-License-Identifier: MIT */
/* config.def as data, for config.c and config_print.c. */
#ifndef HRD_CONFIG_TABLE_H
#define HRD_CONFIG_TABLE_H

#include "daemon/config.h"

enum hrd_key_type {
    HRD_KEY_PATH,
    HRD_KEY_NAME,
    HRD_KEY_DEVICES,
    HRD_KEY_ADDRS,
    HRD_KEY_IFACE,
    HRD_KEY_UINT,
    HRD_KEY_AUTOUINT,
    HRD_KEY_OPTUINT,
    HRD_KEY_SIZE,
    HRD_KEY_AUTOSIZE,
    HRD_KEY_TIME,
    HRD_KEY_RATE,
    HRD_KEY_BOOL,
    HRD_KEY_ALGO,
    HRD_KEY_WIRE,
    HRD_KEY_TRANSPORT,
    HRD_KEY_SETUP,
    HRD_KEY_GDR,
    HRD_KEY_SIMD,
    HRD_KEY_REQUIRE,
    HRD_KEY_LEVEL,
    HRD_KEY_PORT,
};

enum { HRD_RESTART = 0, HRD_RELOAD = 1 };

struct hrd_key {
    const char *section; /* a heading: the other members are unused; NULL: a key */
    const char *name;
    const char *def;
    const char *help;
    size_t offset, size; /* of the member in struct hrd_config */
    uint64_t min, max;
    enum hrd_key_type type;
    int reload;
};

extern const struct hrd_key hrd_keys[];
extern const unsigned hrd_nkeys;

/* "a whole number from 1 to 65535"; returns buf. */
const char *hrd_key_allowed(const struct hrd_key *key, char *buf, size_t len);
/* 64M, 10s: the shortest exact spelling that the parser reads back. */
const char *hrd_size_text(uint64_t bytes, char *buf, size_t len);
const char *hrd_time_text(uint64_t ms, char *buf, size_t len);

#endif
