/* SPDX-License-Identifier: MIT */
/* Configuration values: the first byte chooses the key, the rest is its value. What is accepted must print as something that
   is accepted again with the same meaning. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const keys[] = {"socket",      "listen",     "port",         "interface",   "bandwidth",
                                   "require",     "arena_size", "peer_timeout", "op_timeout",  "threads",
                                   "algorithm",   "wire",       "unit_size",    "eager_limit", "log_level",
                                   "tcp_streams", "advertise",  "node_name",    "max_sessions"};

static void ignore(void *ctx, const char *sentence)
{
    (void)ctx;
    if (!*sentence)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1 || size > 512)
        return 0;
    const char *key = keys[data[0] % (sizeof(keys) / sizeof(keys[0]))];
    char value[512], err[512] = "", first[2048], second[2048];
    memcpy(value, data + 1, size - 1);
    value[size - 1] = '\0';
    struct hrd_config c;
    hrd_config_defaults(&c);
    if (hrd_config_set(&c, key, value, err, sizeof(err)) != 0) {
        if (!*err)
            abort(); /* a refusal is a sentence */
        return 0;
    }
    if (!hrd_config_get(&c, key, first, sizeof(first)))
        abort();
    (void)hrd_config_check(&c, ignore, NULL);
    struct hrd_config again;
    hrd_config_defaults(&again);
    if (*first && hrd_config_set(&again, key, first, err, sizeof(err)) != 0)
        abort();
    if (*first && strcmp(first, hrd_config_get(&again, key, second, sizeof(second))) != 0)
        abort();
    return 0;
}
