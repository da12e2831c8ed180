/* SPDX-License-Identifier: MIT */
/* The root's records: which ranks have joined under a key. */
#include <stdlib.h>
#include <string.h>

#include "daemon/member_impl.h"

struct rset *hrd_rset_by_key(struct hrd_members *m, const struct hrp_key *key)
{
    struct rset *s = m->sets;
    while (s && memcmp(&s->key, key, sizeof(*key)) != 0)
        s = s->next;
    return s;
}

struct rset *hrd_rset_by_id(struct hrd_members *m, const uint8_t *id)
{
    struct rset *s = m->sets;
    while (s &&
           !((s->state == RSET_VOTE || s->state == RSET_COMMITTED) && memcmp(s->id, id, sizeof(s->id)) == 0))
        s = s->next;
    return s;
}

/* A set that is still being made whose ranks believe in another world size. */
struct rset *hrd_rset_of_other_size(struct hrd_members *m, const struct hrp_key *key)
{
    for (struct rset *s = m->sets; s; s = s->next) {
        struct hrp_key k = s->key;
        k.nranks = key->nranks;
        if (s->state != RSET_COMMITTED && s->key.nranks != key->nranks && memcmp(&k, key, sizeof(k)) == 0)
            return s;
    }
    return NULL;
}

void hrd_rset_free(struct hrd_members *m, struct rset *s)
{
    struct rset **at = &m->sets;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    free(s->rank);
    free(s->node);
    free(s);
}

struct rset *hrd_rset_new(struct hrd_daemon *d, const struct hrp_peer_join *join,
                          const struct hrp_comm_config *config)
{
    uint64_t now = hrd_member_now(d), waited = join->waited_ms;
    struct rset *s = hrd_member_alloc(1, sizeof(*s));
    s->key = join->key;
    s->config = *config;
    s->start = s->said_at = now;
    if (waited > config->setup_timeout_ms)
        waited = config->setup_timeout_ms;
    s->deadline = now + config->setup_timeout_ms - waited;
    s->next = d->members->sets;
    d->members->sets = s;
    return s;
}

struct rrank *hrd_rset_rank(struct rset *s, uint32_t rank)
{
    for (uint32_t i = 0; i < s->nranks; i++)
        if (s->rank[i].rank == rank)
            return &s->rank[i];
    return NULL;
}

void hrd_rset_insert(struct rset *s, uint32_t no, const struct hrp_peer_join *join)
{
    if (s->nranks == s->room) {
        s->room = s->room ? s->room * 2 : 8;
        s->rank = realloc(s->rank, s->room * sizeof(*s->rank));
        if (!s->rank)
            abort();
    }
    uint32_t i = s->nranks++;
    for (; i > 0 && s->rank[i - 1].rank > join->rank; i--)
        s->rank[i] = s->rank[i - 1];
    s->rank[i] = (struct rrank){.rank = join->rank, .no = no, .join = join->join, .pid = join->pid};
}
