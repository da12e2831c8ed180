/* SPDX-License-Identifier: MIT */
#include "daemon/config.h"

#include <ctype.h>
#include <errno.h>
#include <ini.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/config_value.h"
#include "daemon/gpu/gdr.h"
#include "proto/wire.h"

#define HRD_SECTION(title) {.section = title},
#define HRD_KEY(key, field, key_type, default_, min_, max_, reload_, help_) \
    {.name = key,                                                           \
     .def = default_,                                                       \
     .help = help_,                                                         \
     .offset = offsetof(struct hrd_config, field),                          \
     .size = sizeof(((struct hrd_config *)0)->field),                       \
     .min = min_,                                                           \
     .max = max_,                                                           \
     .type = HRD_KEY_##key_type,                                            \
     .reload = reload_},
const struct hrd_key hrd_keys[] = {
#include "daemon/config.def"
};
#undef HRD_KEY
#undef HRD_SECTION
const unsigned hrd_nkeys = sizeof(hrd_keys) / sizeof(hrd_keys[0]);

static const struct hrd_key *find_key(const char *name)
{
    for (unsigned i = 0; i < hrd_nkeys; i++) {
        if (hrd_keys[i].name && strcmp(hrd_keys[i].name, name) == 0)
            return &hrd_keys[i];
    }
    return NULL;
}

void hrd_config_defaults(struct hrd_config *c)
{
    memset(c, 0, sizeof(*c));
    for (unsigned i = 0; i < hrd_nkeys; i++) {
        /* A default that its own parser refuses is a mistake in config.def; a unit test finds it first. */
        if (hrd_keys[i].name && !hrd_value_set(c, &hrd_keys[i], hrd_keys[i].def))
            abort();
    }
}

/* ---- one key ----------------------------------------------------------------------------------------------
 */

static unsigned edit_distance(const char *a, const char *b)
{
    enum { MAX = 32 };
    unsigned row[MAX + 1];
    size_t la = strlen(a), lb = strlen(b);
    if (la > MAX || lb > MAX)
        return MAX;
    for (unsigned j = 0; j <= lb; j++)
        row[j] = j;
    for (size_t i = 1; i <= la; i++) {
        unsigned diagonal = row[0];
        row[0] = (unsigned)i;
        for (size_t j = 1; j <= lb; j++) {
            unsigned best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[lb];
}

static const char *similar_key(const char *name)
{
    const char *found = NULL;
    /* Up to half of the letters may be wrong (two that changed places count twice): more is another word. */
    unsigned best = (unsigned)strlen(name) / 2 + 1;
    best = best < 4 ? best : 4;
    for (unsigned i = 0; i < hrd_nkeys; i++) {
        unsigned d = hrd_keys[i].name ? edit_distance(name, hrd_keys[i].name) : best;
        if (d < best) {
            best = d;
            found = hrd_keys[i].name;
        }
    }
    return found;
}

int hrd_config_set(struct hrd_config *c, const char *name, const char *value, char *err, size_t errlen)
{
    const struct hrd_key *key = find_key(name);
    char allowed[256];
    if (!key) {
        const char *near = similar_key(name);
        snprintf(err, errlen, "there is no key '%.64s'%s%s%s; hreduced --print-config lists all keys", name,
                 near ? " (did you mean '" : "", near ? near : "", near ? "'?)" : "");
        return -EINVAL;
    }
    if (!hrd_value_set(c, key, value)) {
        snprintf(err, errlen, "%s = %.200s is not allowed: it must be %s", name, value,
                 hrd_key_allowed(key, allowed, sizeof(allowed)));
        return -EINVAL;
    }
    return 0;
}

const char *hrd_config_get(const struct hrd_config *c, const char *name, char *buf, size_t len)
{
    const struct hrd_key *key = find_key(name);
    return key ? hrd_value_text(c, key, buf, len) : NULL;
}

/* ---- the file ---------------------------------------------------------------------------------------------
 */

struct loader {
    struct hrd_config *c;
    const char *path;
    FILE *file;
    hrd_config_report *report;
    void *ctx;
    unsigned line;
    int problems;
    unsigned seen[128]; /* by key: line of its first appearance */
};
_Static_assert(sizeof(hrd_keys) / sizeof(hrd_keys[0]) <= 128, "struct loader.seen holds every key");

__attribute__((format(printf, 2, 3))) static void problem(struct loader *l, const char *fmt, ...)
{
    char text[512], sentence[800];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    snprintf(sentence, sizeof(sentence), "%.256s:%u: %s", l->path, l->line, text);
    l->problems++;
    if (l->report)
        l->report(l->ctx, sentence);
}

static void cut_comment(char *line)
{
    for (char *p = line; *p; p++) {
        if ((*p == '#' || *p == ';') && (p == line || p[-1] == ' ' || p[-1] == '\t')) {
            *p = '\0';
            return;
        }
    }
}

/*
 * inih's fgets: one line without leading blanks, so that an indented key is a key and no continuation of the
 * line above. Lines that inih would misread (too long, NUL inside) are reported here and given to it empty.
 */
static char *read_line(char *buf, int size, void *stream)
{
    struct loader *l = stream;
    char *line = NULL;
    size_t room = 0;
    ssize_t len = getline(&line, &room, l->file);
    if (len < 0) {
        free(line);
        return NULL;
    }
    l->line++;
    buf[0] = '\0';
    if (memchr(line, '\0', (size_t)len) != NULL) {
        problem(l, "the line has a NUL character; this is no text file");
    } else {
        cut_comment(line);
        char *from = line + strspn(line, " \t");
        size_t n = strcspn(from, "\r\n");
        if (n >= (size_t)size - 1)
            problem(l,
                    "the line is %zu characters long, at most %d are read; lists may be spread over several "
                    "lines with the same key",
                    n, size - 2);
        else
            memcpy(buf, from, n);
        if (n < (size_t)size - 1)
            buf[n] = '\0';
    }
    free(line);
    return buf;
}

static bool is_list(const struct hrd_key *key)
{
    return key->type == HRD_KEY_ADDRS || key->type == HRD_KEY_REQUIRE;
}

/* A list given on several lines is one list. */
static int set_more(struct loader *l, const struct hrd_key *key, const char *value, char *err, size_t errlen)
{
    char both[1024], before[768];
    hrd_value_text(l->c, key, before, sizeof(before));
    snprintf(both, sizeof(both), "%s, %s", before, value);
    return hrd_config_set(l->c, key->name, both, err, errlen);
}

static int on_key(void *user, const char *section, const char *name, const char *value)
{
    struct loader *l = user;
    const struct hrd_key *key = find_key(name);
    char err[512];
    int rc;
    if (section[0] != '\0') {
        problem(l, "the key '%.64s' stands below [%.64s]; this file has no sections", name, section);
        return 1;
    }
    unsigned *seen = key ? &l->seen[key - hrd_keys] : NULL;
    if (seen && *seen && !is_list(key)) {
        problem(l, "%s was already given in line %u; give it once", name, *seen);
        return 1;
    }
    if (seen && *seen)
        rc = set_more(l, key, value, err, sizeof(err));
    else
        rc = hrd_config_set(l->c, name, value, err, sizeof(err));
    if (seen && !*seen)
        *seen = l->line;
    if (rc != 0)
        problem(l, "%s", err);
    return 1;
}

int hrd_config_load(struct hrd_config *c, const char *path, hrd_config_report *report, void *ctx)
{
    struct loader l = {.c = c, .path = path, .report = report, .ctx = ctx};
    hrd_config_defaults(c);
    l.file = fopen(path, "re");
    if (!l.file && errno == ENOENT)
        return -ENOENT;
    char sentence[512];
    if (!l.file) {
        snprintf(sentence, sizeof(sentence), "%.256s cannot be read: %s", path, strerror(errno));
        if (report)
            report(ctx, sentence);
        return 1;
    }
    int bad = ini_parse_stream(read_line, &l, on_key, &l);
    if (ferror(l.file)) {
        problem(&l, "reading stopped here: %s", strerror(errno));
    } else if (bad > 0) {
        l.line = (unsigned)bad;
        problem(&l, "the line is neither 'key = value' nor a comment");
    }
    fclose(l.file);
    return l.problems + (l.problems == 0 ? hrd_config_check(c, report, ctx) : 0);
}

/* ---- keys against each other ------------------------------------------------------------------------------
 */

struct checker {
    hrd_config_report *report;
    void *ctx;
    int problems;
};

__attribute__((format(printf, 3, 4))) static void expect(struct checker *k, bool good, const char *fmt, ...)
{
    char sentence[512];
    va_list ap;
    if (good)
        return;
    va_start(ap, fmt);
    vsnprintf(sentence, sizeof(sentence), fmt, ap);
    va_end(ap);
    k->problems++;
    if (k->report)
        k->report(k->ctx, sentence);
}

int hrd_config_check(const struct hrd_config *c, hrd_config_report *report, void *ctx)
{
    struct checker k = {.report = report, .ctx = ctx};
    char a[32], b[32];
    expect(&k, c->unit_min_bytes <= c->unit_bytes, "unit_min (%s) must not be larger than unit_size (%s)",
           hrd_size_text(c->unit_min_bytes, a, sizeof(a)), hrd_size_text(c->unit_bytes, b, sizeof(b)));
    expect(&k, c->window_bytes % 262144 == 0, "staging_window (%s) must be a multiple of 256K",
           hrd_size_text(c->window_bytes, a, sizeof(a)));
    expect(&k, !c->reproducible || c->algorithm <= HRP_ALGO_GATHER,
           "algorithm = %s sums in an order of its own; it needs reproducible = off",
           hrd_config_get(c, "algorithm", a, sizeof(a)));
    expect(&k, c->transport != 1 || !(c->require & (HRP_REQUIRE_VERBS | HRP_REQUIRE_GDR)),
           "transport = tcp contradicts require = %s, because tcp is neither verbs nor gdr",
           hrd_config_get(c, "require", b, sizeof(b)));
    expect(&k, c->gdr != HRD_GDR_OFF || !(c->require & HRP_REQUIRE_GDR), "gdr = off contradicts require = %s",
           hrd_config_get(c, "require", b, sizeof(b)));
    expect(&k, c->verbs_mtu == UINT32_MAX || (c->verbs_mtu & (c->verbs_mtu - 1)) == 0,
           "verbs_mtu (%u) must be 256, 512, 1024, 2048 or 4096", c->verbs_mtu);
    return k.problems;
}

/* ---- reload -----------------------------------------------------------------------------------------------
 */

unsigned hrd_config_reload(struct hrd_config *cur, const struct hrd_config *fresh, hrd_config_report *report,
                           void *ctx)
{
    unsigned taken = 0;
    for (unsigned i = 0; i < hrd_nkeys; i++) {
        const struct hrd_key *key = &hrd_keys[i];
        char *old = (char *)cur + key->offset;
        const char *now = (const char *)fresh + key->offset;
        if (!key->name || memcmp(old, now, key->size) == 0)
            continue;
        if (key->reload) {
            memcpy(old, now, key->size);
            taken++;
        } else if (report) {
            report(ctx, key->name);
        }
    }
    return taken;
}
