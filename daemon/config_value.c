/* SPDX-License-Identifier: MIT */
/* Values of configuration keys: text to value, value to text, and what is allowed, in words. */
#include "daemon/config_value.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "daemon/gpu/gdr.h"
#include "daemon/log.h"
#include "daemon/text.h"
#include "kernels/kernels.h"
#include "proto/wire.h"

struct word {
    const char *name;
    uint64_t value;
};

static const struct word words_bool[] = {{"on", 1}, {"off", 0}, {NULL, 0}};
static const struct word words_algo[] = {{"auto", HRP_ALGO_AUTO},
                                         {"direct", HRP_ALGO_DIRECT},
                                         {"gather", HRP_ALGO_GATHER},
                                         {"pairwise", HRP_ALGO_PAIRWISE},
                                         {"ring", HRP_ALGO_RING},
                                         {"tree", HRP_ALGO_TREE},
                                         {NULL, 0}};
static const struct word words_wire[] = {{"type", 0}, {"f32", 1}, {NULL, 0}};
static const struct word words_transport[] = {{"auto", 0}, {"tcp", 1}, {"verbs", 2}, {NULL, 0}};
static const struct word words_setup[] = {
    {"auto", HRD_SETUP_AUTO}, {"rdmacm", HRD_SETUP_RDMACM}, {"exchange", HRD_SETUP_EXCHANGE}, {NULL, 0}};
static const struct word words_gdr[] = {
    {"auto", HRD_GDR_AUTO}, {"on", HRD_GDR_ON}, {"off", HRD_GDR_OFF}, {NULL, 0}};
static const struct word words_simd[] = {
    {"auto", 0}, {"scalar", HRK_SCALAR + 1}, {"avx2", HRK_AVX2 + 1}, {"avx512", HRK_AVX512 + 1}, {NULL, 0}};
static const struct word words_require[] = {
    {"verbs", HRP_REQUIRE_VERBS}, {"gdr", HRP_REQUIRE_GDR}, {"p2p", HRP_REQUIRE_P2P}, {NULL, 0}};
static const struct word words_level[] = {{"error", HRD_LOG_ERROR},   {"warning", HRD_LOG_WARNING},
                                          {"notice", HRD_LOG_NOTICE}, {"info", HRD_LOG_INFO},
                                          {"debug", HRD_LOG_DEBUG},   {NULL, 0}};

static const struct word *words_of(enum hrd_key_type type)
{
    switch (type) {
    case HRD_KEY_BOOL:
        return words_bool;
    case HRD_KEY_ALGO:
        return words_algo;
    case HRD_KEY_WIRE:
        return words_wire;
    case HRD_KEY_TRANSPORT:
        return words_transport;
    case HRD_KEY_SETUP:
        return words_setup;
    case HRD_KEY_GDR:
        return words_gdr;
    case HRD_KEY_SIMD:
        return words_simd;
    case HRD_KEY_REQUIRE:
        return words_require;
    case HRD_KEY_LEVEL:
        return words_level;
    default:
        return NULL;
    }
}

/* ---- what is allowed --------------------------------------------------------------------------------------
 */

static void list_words(const struct word *w, char *buf, size_t len)
{
    buf[0] = '\0';
    for (; w->name; w++) {
        size_t at = strlen(buf);
        const char *sep = at == 0 ? "" : (w[1].name ? ", " : " or ");
        snprintf(buf + at, len - at, "%s%s", sep, w->name);
    }
}

const char *hrd_key_allowed(const struct hrd_key *key, char *buf, size_t len)
{
    char lo[32], hi[32], words[128];
    switch (key->type) {
    case HRD_KEY_PATH:
        snprintf(buf, len, "an absolute path of at most %zu characters", key->size - 1);
        break;
    case HRD_KEY_NAME:
        snprintf(buf, len, "a name of letters, digits, '.', '_' and '-', at most %zu characters",
                 key->size - 1);
        break;
    case HRD_KEY_DEVICES:
        snprintf(buf, len, "auto, or up to %u different devices as NAME or NAME:PORT, separated by commas",
                 HRD_MAX_DEVICES);
        break;
    case HRD_KEY_ADDRS:
        snprintf(buf, len, "IPv4 or IPv6 addresses separated by commas, at most %d", HRD_MAX_LISTEN);
        break;
    case HRD_KEY_IFACE:
        snprintf(buf, len, "auto, the name of an interface, or a subnet as ADDRESS/BITS");
        break;
    case HRD_KEY_UINT:
    case HRD_KEY_PORT:
        snprintf(buf, len, "a whole number from %" PRIu64 " to %" PRIu64, key->min, key->max);
        break;
    case HRD_KEY_AUTOUINT:
        snprintf(buf, len, "auto, or a whole number from %" PRIu64 " to %" PRIu64, key->min, key->max);
        break;
    case HRD_KEY_OPTUINT:
        snprintf(buf, len, "auto, or a whole number from %" PRIu64 " to %" PRIu64 " (0x for hexadecimal)",
                 key->min, key->max);
        break;
    case HRD_KEY_SIZE:
    case HRD_KEY_AUTOSIZE:
        snprintf(buf, len, "%sbytes, or a whole number with K, M, G or T (powers of 1024), from %s to %s",
                 key->type == HRD_KEY_AUTOSIZE ? "auto, " : "", hrd_size_text(key->min, lo, sizeof(lo)),
                 hrd_size_text(key->max, hi, sizeof(hi)));
        break;
    case HRD_KEY_TIME:
        snprintf(buf, len, "a whole number with its unit (ms, s, min or h), from %s to %s",
                 hrd_time_text(key->min, lo, sizeof(lo)), hrd_time_text(key->max, hi, sizeof(hi)));
        break;
    case HRD_KEY_RATE:
        snprintf(buf, len,
                 "auto, a link rate in Mbit or Gbit (100Gbit), or bytes per second with K, M or G "
                 "(powers of 1000), from 1M to 10000G");
        break;
    case HRD_KEY_REQUIRE:
        list_words(words_require, words, sizeof(words));
        snprintf(buf, len, "nothing, or a list separated by commas of %s", words);
        break;
    default:
        list_words(words_of(key->type), words, sizeof(words));
        snprintf(buf, len, "%s", words);
        break;
    }
    return buf;
}

const char *hrd_transport_name(unsigned transport)
{
    for (const struct word *w = words_transport; w->name; w++)
        if ((unsigned)w->value == transport)
            return w->name;
    return "?";
}

const char *hrd_size_text(uint64_t bytes, char *buf, size_t len)
{
    static const char unit[] = {'\0', 'K', 'M', 'G', 'T'};
    unsigned u = 0;
    while (bytes != 0 && bytes % 1024 == 0 && u < 4) {
        bytes /= 1024;
        u++;
    }
    snprintf(buf, len, "%" PRIu64 "%.1s", bytes, &unit[u]);
    return buf;
}

const char *hrd_time_text(uint64_t ms, char *buf, size_t len)
{
    if (ms == 0)
        snprintf(buf, len, "0");
    else if (ms % 3600000 == 0)
        snprintf(buf, len, "%" PRIu64 "h", ms / 3600000);
    else if (ms % 60000 == 0)
        snprintf(buf, len, "%" PRIu64 "min", ms / 60000);
    else if (ms % 1000 == 0)
        snprintf(buf, len, "%" PRIu64 "s", ms / 1000);
    else
        snprintf(buf, len, "%" PRIu64 "ms", ms);
    return buf;
}

/* ---- text to value ----------------------------------------------------------------------------------------
 */

static void store(struct hrd_config *c, const struct hrd_key *key, uint64_t value)
{
    void *at = (char *)c + key->offset;
    uint8_t v8 = (uint8_t)value;
    uint16_t v16 = (uint16_t)value;
    uint32_t v32 = (uint32_t)value;
    switch (key->size) {
    case 1:
        memcpy(at, &v8, 1);
        break;
    case 2:
        memcpy(at, &v16, 2);
        break;
    case 4:
        memcpy(at, &v32, 4);
        break;
    default:
        memcpy(at, &value, 8);
        break;
    }
}

/* Digits at *s, which is moved behind them. */
static bool take_number(const char **s, uint64_t *out)
{
    uint64_t v = 0;
    const char *p = *s;
    if (!isdigit((unsigned char)*p))
        return false;
    for (; isdigit((unsigned char)*p); p++) {
        unsigned d = (unsigned)(*p - '0');
        if (v > (UINT64_MAX - d) / 10)
            return false;
        v = v * 10 + d;
    }
    *s = p;
    *out = v;
    return true;
}

static bool parse_uint(const char *s, uint64_t *out)
{
    return take_number(&s, out) && *s == '\0';
}

static bool parse_hex(const char *s, uint64_t *out)
{
    if (s[0] != '0' || (s[1] != 'x' && s[1] != 'X') || !isxdigit((unsigned char)s[2]) || strlen(s) > 2 + 8)
        return false;
    char *end;
    *out = strtoull(s + 2, &end, 16);
    return *end == '\0';
}

static bool parse_size(const char *s, uint64_t *out)
{
    static const char unit[] = "KMGT";
    uint64_t v, shift = 0;
    if (!take_number(&s, &v))
        return false;
    if (*s != '\0') {
        const char *u = strchr(unit, toupper((unsigned char)*s));
        if (!u || s[1] != '\0')
            return false;
        shift = 10 * (uint64_t)(u - unit + 1);
    }
    if (v > UINT64_MAX >> shift)
        return false;
    *out = v << shift;
    return true;
}

static bool parse_time(const char *s, uint64_t *out)
{
    static const struct word unit[] = {{"ms", 1}, {"s", 1000}, {"min", 60000}, {"h", 3600000}, {NULL, 0}};
    uint64_t v;
    if (!take_number(&s, &v))
        return false;
    while (*s == ' ')
        s++;
    if (*s == '\0') {
        /* A number alone would be read as seconds by one and milliseconds by the other. */
        *out = 0;
        return v == 0;
    }
    for (const struct word *u = unit; u->name; u++) {
        if (strcmp(s, u->name) == 0) {
            if (v > UINT64_MAX / u->value)
                return false;
            *out = v * u->value;
            return true;
        }
    }
    return false;
}

/* Bytes per second. */
static bool parse_rate(const char *s, uint64_t *out)
{
    static const struct {
        const char *name;
        double factor;
    } unit[] = {{"", 1}, {"K", 1e3}, {"M", 1e6}, {"G", 1e9}, {"Mbit", 125e3}, {"Gbit", 125e6}};
    size_t len = strspn(s, "0123456789.");
    char *end;
    if (!isdigit((unsigned char)*s) || len > 20)
        return false;
    double v = strtod(s, &end);
    if (end != s + len)
        return false;
    for (size_t i = 0; i < sizeof(unit) / sizeof(unit[0]); i++) {
        if (strcasecmp(end, unit[i].name) == 0) {
            v = v * unit[i].factor + 0.5;
            if (v >= 1e18)
                return false;
            *out = (uint64_t)v;
            return true;
        }
    }
    return false;
}

static bool valid_name(const char *s)
{
    size_t good = strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-");
    return *s != '\0' && s[good] == '\0';
}

/* What the kernel takes as a name, less what would be hard to see in a file. */
static bool valid_interface_name(const char *s)
{
    size_t n = strlen(s);
    return n > 0 && n < 16 &&
           strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:@") == n;
}

static bool valid_addr(const char *s)
{
    unsigned char ip[16];
    char host[64];
    if (inet_pton(AF_INET, s, ip) == 1)
        return true;
    size_t n = strcspn(s, "%");
    if (n >= sizeof(host) || (s[n] == '%' && !valid_interface_name(s + n + 1)))
        return false;
    memcpy(host, s, n);
    host[n] = '\0';
    return inet_pton(AF_INET6, host, ip) == 1;
}

static bool valid_interface(const char *s)
{
    unsigned char ip[16];
    char host[64];
    const char *slash = strchr(s, '/');
    uint64_t bits;
    if (!slash)
        return valid_interface_name(s);
    if ((size_t)(slash - s) >= sizeof(host) || !parse_uint(slash + 1, &bits))
        return false;
    memcpy(host, s, (size_t)(slash - s));
    host[slash - s] = '\0';
    return (inet_pton(AF_INET, host, ip) == 1 && bits <= 32) ||
           (inet_pton(AF_INET6, host, ip) == 1 && bits <= 128);
}

/* The next item of a comma-separated list, without blanks around it; false at the end. */
static bool next_item(const char **s, char *item, size_t size)
{
    const char *p = *s + strspn(*s, " \t,");
    if (*p == '\0')
        return false;
    size_t n = strcspn(p, ",");
    *s = p + n;
    while (n > 0 && (p[n - 1] == ' ' || p[n - 1] == '\t'))
        n--;
    if (n >= size)
        n = size - 1; /* too long for anything valid, and refused as such */
    memcpy(item, p, n);
    item[n] = '\0';
    return true;
}

static bool set_addrs(struct hrd_config *c, const struct hrd_key *key, const char *value)
{
    struct hrd_addr_list list = {0};
    char item[64] = ""; /* zero behind the text: a reload compares the members as bytes */
    while (next_item(&value, item, sizeof(item))) {
        if (list.n == HRD_MAX_LISTEN || !valid_addr(item))
            return false;
        memcpy(list.v[list.n++], item, sizeof(item));
        memset(item, 0, sizeof(item));
    }
    if (list.n == 0 && key->def[0] != '\0')
        return false;
    memcpy((char *)c + key->offset, &list, sizeof(list));
    return true;
}

static bool find_word(const struct word *w, const char *name, uint64_t *value)
{
    for (; w->name; w++) {
        if (strcmp(w->name, name) == 0) {
            *value = w->value;
            return true;
        }
    }
    return false;
}

static bool set_require(struct hrd_config *c, const struct hrd_key *key, const char *value)
{
    char item[16];
    uint64_t bits = 0, bit;
    while (next_item(&value, item, sizeof(item))) {
        if (!find_word(words_require, item, &bit))
            return false;
        bits |= bit;
    }
    store(c, key, bits);
    return true;
}

static bool set_text(struct hrd_config *c, const struct hrd_key *key, const char *value)
{
    char *at = (char *)c + key->offset;
    size_t len = strlen(value);
    if (len >= key->size)
        return false;
    memset(at, 0, key->size);
    memcpy(at, value, len);
    return true;
}

static unsigned usable_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0)
        return (unsigned)CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (unsigned)n : 1;
}

/* A core copies some 4 GB/s through a socket: four keep up with 100 Gbit/s in one direction. */
static unsigned auto_io_threads(unsigned cores)
{
    return cores / 4 < 4 ? cores / 4 : 4;
}

static uint64_t auto_number(const struct hrd_key *key)
{
    unsigned cores = usable_cores();
    if (strcmp(key->name, "threads") == 0) {
        unsigned most = cores / 4 > 8 ? cores / 4 : 8;
        return cores < most ? cores : most < 64 ? most : 64;
    }
    if (strcmp(key->name, "io_threads") == 0)
        return auto_io_threads(cores);
    if (strcmp(key->name, "tcp_streams") == 0)
        return auto_io_threads(cores) < 4 ? 4 : 5;
    return 200; /* spin_us: a hand-over to a sleeper costs up to 50 us, and a daemon waits for several in one op */
}

uint64_t hrd_config_unit_min(const struct hrd_config *c)
{
    if (c->unit_min_bytes != 0)
        return c->unit_min_bytes;
    uint64_t bytes = UINT64_C(1) << (auto_io_threads(usable_cores()) > 0 ? 18 : 19);
    return bytes < c->unit_bytes ? bytes : c->unit_bytes;
}

static bool set_name(struct hrd_config *c, const struct hrd_key *key, const char *value)
{
    char host[65] = "";
    if (strcmp(key->name, "node_name") == 0 && strcmp(value, "auto") == 0) {
        if (gethostname(host, sizeof(host) - 1) != 0 || host[0] == '\0')
            memcpy(host, "localhost", 10);
        return set_text(c, key, host);
    }
    return valid_name(value) && set_text(c, key, value);
}

/* "mlx5_0" or "mlx5_0:1": the name stays in text, and of the port its number, 0 for the first that is up. */
static bool split_device(char *text, unsigned *port)
{
    char *colon = strchr(text, ':'), *end;
    *port = 0;
    if (colon) {
        unsigned long n = isdigit((unsigned char)colon[1]) ? strtoul(colon + 1, &end, 10) : 0;
        if (n < 1 || n > 255 || *end)
            return false;
        *port = (unsigned)n;
        *colon = '\0';
    }
    return valid_name(text) && strlen(text) < HRD_DEVICE_NAME && !(colon && strcmp(text, "auto") == 0);
}

/* Kept without the spaces, and port numbers without leading zeros. A device without a port may be any port of it. */
static bool set_devices(struct hrd_config *c, const struct hrd_key *key, const char *value)
{
    char copy[256], *list[HRD_MAX_DEVICES], all[sizeof(copy)] = "", *save = NULL;
    unsigned n = 0, port[HRD_MAX_DEVICES];
    if (strlen(value) >= sizeof(copy))
        return false;
    memcpy(copy, value, strlen(value) + 1);
    for (char *at = strtok_r(copy, ", ", &save); at; at = strtok_r(NULL, ", ", &save)) {
        if (n == HRD_MAX_DEVICES || !split_device(at, &port[n]))
            return false;
        for (unsigned i = 0; i < n; i++)
            if (strcmp(list[i], "auto") == 0 || strcmp(at, "auto") == 0 ||
                (strcmp(list[i], at) == 0 && (port[i] == port[n] || !port[i] || !port[n])))
                return false;
        list[n++] = at;
    }
    for (unsigned i = 0; i < n; i++) {
        hrd_text_add(all, sizeof(all), "%s%s", i ? "," : "", list[i]);
        if (port[i])
            hrd_text_add(all, sizeof(all), ":%u", port[i]);
    }
    return n > 0 && set_text(c, key, all);
}

static bool set_number(struct hrd_config *c, const struct hrd_key *key, const char *value)
{
    uint64_t v;
    bool ok;
    if (key->type == HRD_KEY_AUTOUINT && strcmp(value, "auto") == 0) {
        store(c, key, auto_number(key));
        return true;
    }
    if ((key->type == HRD_KEY_RATE || key->type == HRD_KEY_AUTOSIZE) && strcmp(value, "auto") == 0) {
        store(c, key, 0);
        return true;
    }
    if (key->type == HRD_KEY_OPTUINT && strcmp(value, "auto") == 0) {
        store(c, key, UINT32_MAX);
        return true;
    }
    if (key->type == HRD_KEY_SIZE || key->type == HRD_KEY_AUTOSIZE)
        ok = parse_size(value, &v);
    else if (key->type == HRD_KEY_TIME)
        ok = parse_time(value, &v);
    else if (key->type == HRD_KEY_RATE)
        ok = parse_rate(value, &v);
    else if (key->type == HRD_KEY_OPTUINT)
        ok = parse_hex(value, &v) || parse_uint(value, &v);
    else
        ok = parse_uint(value, &v);
    if (!ok || v < key->min || v > key->max)
        return false;
    store(c, key, v);
    return true;
}

bool hrd_value_set(struct hrd_config *c, const struct hrd_key *key, const char *value)
{
    uint64_t v;
    switch (key->type) {
    case HRD_KEY_PATH:
        return value[0] == '/' && set_text(c, key, value);
    case HRD_KEY_NAME:
        return set_name(c, key, value);
    case HRD_KEY_DEVICES:
        return set_devices(c, key, value);
    case HRD_KEY_ADDRS:
        return set_addrs(c, key, value);
    case HRD_KEY_IFACE:
        return valid_interface(value) && set_text(c, key, value);
    case HRD_KEY_REQUIRE:
        return set_require(c, key, value);
    case HRD_KEY_UINT:
    case HRD_KEY_AUTOUINT:
    case HRD_KEY_OPTUINT:
    case HRD_KEY_PORT:
    case HRD_KEY_SIZE:
    case HRD_KEY_AUTOSIZE:
    case HRD_KEY_TIME:
    case HRD_KEY_RATE:
        return set_number(c, key, value);
    default:
        if (!find_word(words_of(key->type), value, &v))
            return false;
        store(c, key, v);
        return true;
    }
}

/* ---- value to text ----------------------------------------------------------------------------------------
 */

static uint64_t load(const struct hrd_config *c, const struct hrd_key *key)
{
    const void *at = (const char *)c + key->offset;
    uint8_t v8;
    uint16_t v16;
    uint32_t v32;
    uint64_t v64;
    switch (key->size) {
    case 1:
        memcpy(&v8, at, 1);
        return v8;
    case 2:
        memcpy(&v16, at, 2);
        return v16;
    case 4:
        memcpy(&v32, at, 4);
        return v32;
    default:
        memcpy(&v64, at, 8);
        return v64;
    }
}

static void addrs_text(const struct hrd_addr_list *list, char *buf, size_t len)
{
    buf[0] = '\0';
    for (unsigned i = 0; i < list->n; i++)
        hrd_text_list(buf, len, list->v[i]);
}

static void rate_text(uint64_t v, char *buf, size_t len)
{
    if (v == 0)
        snprintf(buf, len, "auto");
    else if (v % 125000000 == 0)
        snprintf(buf, len, "%" PRIu64 "Gbit", v / 125000000);
    else if (v % 125000 == 0)
        snprintf(buf, len, "%" PRIu64 "Mbit", v / 125000);
    else
        snprintf(buf, len, "%" PRIu64, v);
}

const char *hrd_value_text(const struct hrd_config *c, const struct hrd_key *key, char *buf, size_t len)
{
    const void *at = (const char *)c + key->offset;
    uint64_t v;
    buf[0] = '\0';
    switch (key->type) {
    case HRD_KEY_PATH:
    case HRD_KEY_NAME:
    case HRD_KEY_DEVICES:
    case HRD_KEY_IFACE:
        snprintf(buf, len, "%s", (const char *)at);
        return buf;
    case HRD_KEY_ADDRS:
        addrs_text(at, buf, len);
        return buf;
    default:
        break;
    }
    v = load(c, key);
    if (key->type == HRD_KEY_SIZE || (key->type == HRD_KEY_AUTOSIZE && v != 0))
        return hrd_size_text(v, buf, len);
    if (key->type == HRD_KEY_TIME)
        return hrd_time_text(v, buf, len);
    if (key->type == HRD_KEY_RATE) {
        rate_text(v, buf, len);
        return buf;
    }
    if (key->type == HRD_KEY_AUTOSIZE || (key->type == HRD_KEY_OPTUINT && v == UINT32_MAX)) {
        snprintf(buf, len, "auto");
        return buf;
    }
    const struct word *w = words_of(key->type);
    if (!w)
        snprintf(buf, len, "%" PRIu64, v);
    for (; w && w->name; w++) {
        if (key->type == HRD_KEY_REQUIRE ? (v & w->value) != 0 : v == w->value)
            hrd_text_list(buf, len, w->name);
    }
    return buf;
}
