/* SPDX-License-Identifier: MIT */
/* Words of the membership. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/member_impl.h"
#include "daemon/text.h"

const char *hrd_ms_text(uint64_t ms, char *buf, size_t len)
{
    if (ms % 1000 == 0)
        snprintf(buf, len, "%llu s", (unsigned long long)ms / 1000);
    else
        snprintf(buf, len, "%llu ms", (unsigned long long)ms);
    return buf;
}

const char *hrd_ranks_text(const uint32_t *rank, uint32_t n, char *buf, size_t len)
{
    char tail[32];
    size_t reserve = (size_t)snprintf(tail, sizeof(tail), ", ... (%u in all)", n) + 1;
    buf[0] = 0;
    for (uint32_t i = 0; i < n;) {
        char one[32];
        uint32_t j = i;
        while (j + 1 < n && rank[j + 1] == rank[j] + 1)
            j++;
        if (j == i)
            snprintf(one, sizeof(one), "%s%u", i > 0 ? ", " : "", rank[i]);
        else
            snprintf(one, sizeof(one), "%s%u%s%u", i > 0 ? ", " : "", rank[i], j == i + 1 ? ", " : "-",
                     rank[j]);
        size_t room = j + 1 == n ? 1 : reserve;
        if (strlen(buf) + strlen(one) + room > len) {
            hrd_text_add(buf, len, "%s", i > 0 ? tail : tail + 2);
            return buf;
        }
        hrd_text_add(buf, len, "%s", one);
        i = j + 1;
    }
    return buf;
}

const char *hrd_key_text(const struct hrp_key *key, char *buf, size_t len)
{
    const char *s = key->nranks == 1 ? "" : "s";
    if (key->kind == HRP_KEY_NAME) {
        snprintf(buf, len, "communicator '%.*s'", (int)sizeof(key->name), key->name);
        if (key->nth > 0)
            hrd_text_add(buf, len, " number %u", key->nth);
        hrd_text_add(buf, len, " (%u rank%s)", key->nranks, s);
        return buf;
    }
    const uint8_t *nonce = (const uint8_t *)key->name;
    snprintf(buf, len, "communicator of id %02x%02x%02x%02x (%u rank%s)", nonce[0], nonce[1], nonce[2],
             nonce[3], key->nranks, s);
    return buf;
}

/* Ranks that have joined from one node. */
static uint32_t ranks_of(const struct rset *s, uint32_t no, uint32_t *out)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->nranks; i++)
        if (s->rank[i].no == no)
            out[n++] = s->rank[i].rank;
    return n;
}

static bool first_of_node(const struct rset *s, uint32_t i)
{
    for (uint32_t j = 0; j < i; j++)
        if (s->rank[j].no == s->rank[i].no)
            return false;
    return true;
}

void hrd_rset_missing_text(struct hrd_daemon *d, const struct rset *s, char *buf, size_t len)
{
    char key[128], took[32], ranks[600];
    uint32_t *list = hrd_member_alloc(s->key.nranks, sizeof(*list));
    uint32_t n = 0;
    for (uint32_t r = 0, at = 0; r < s->key.nranks; r++) {
        if (at < s->nranks && s->rank[at].rank == r)
            at++;
        else
            list[n++] = r;
    }
    hrd_ms_text(s->config.setup_timeout_ms, took, sizeof(took));
    snprintf(buf, len, "%s was not complete after %s: rank%s %s did not join",
             hrd_key_text(&s->key, key, sizeof(key)), took, n == 1 ? "" : "s",
             hrd_ranks_text(list, n, ranks, sizeof(ranks)));
    const char *sep = "; joined: ";
    for (uint32_t i = 0; i < s->nranks; i++) {
        if (!first_of_node(s, i))
            continue;
        n = ranks_of(s, s->rank[i].no, list);
        hrd_text_add(buf, len, "%s%s on node %s", sep, hrd_ranks_text(list, n, ranks, 128),
                     hrd_member_node_name(d, s->rank[i].no));
        sep = ", ";
    }
    if (s->note[0])
        hrd_text_add(buf, len, "; %s", s->note);
    free(list);
}

void hrd_rset_waits_text(struct hrd_daemon *d, struct rset *s, char *buf, size_t len)
{
    char key[128], ranks[200];
    unsigned long long seconds = (hrd_member_now(d) - s->start) / 1000;
    uint32_t *missing = hrd_member_alloc(s->key.nranks, sizeof(*missing)), n = 0;
    for (uint32_t r = 0; r < s->key.nranks; r++)
        if (!hrd_rset_rank(s, r))
            missing[n++] = r;
    hrd_key_text(&s->key, key, sizeof(key));
    if (n > 0)
        snprintf(buf, len, "%s: waiting for rank%s %s for %llu s", key, n == 1 ? "" : "s",
                 hrd_ranks_text(missing, n, ranks, sizeof(ranks)), seconds);
    else
        snprintf(buf, len,
                 "%s: all ranks are here, waiting for %u nodes to connect with each other for %llu s", key,
                 s->nnodes, seconds);
    free(missing);
}
