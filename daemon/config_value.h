/* SPDX-License-Identifier: MIT */
#ifndef HRD_CONFIG_VALUE_H
#define HRD_CONFIG_VALUE_H

#include "daemon/config_table.h"

/* Parses value into the key's member; false (member unchanged) when it is not allowed. "auto" is resolved. */
bool hrd_value_set(struct hrd_config *c, const struct hrd_key *key, const char *value);
/* The member as it would stand in the file; returns buf. */
const char *hrd_value_text(const struct hrd_config *c, const struct hrd_key *key, char *buf, size_t len);

#endif
