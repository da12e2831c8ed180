/* SPDX-License-Identifier: MIT */
/* The root's side: joins are collected by key; a complete set becomes a communicator, or nothing at all. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "daemon/member_impl.h"

static void recheck_waits(struct hrd_daemon *d);

/* ---- answers -------------------------------------------------------------------------------------------- */

static void refuse(struct hrd_daemon *d, uint32_t to, uint64_t join, uint32_t status, const char *text)
{
    struct hrp_peer_msg msg = {.type = HRP_PEER_REFUSE, .text = text, .text_len = strlen(text)};
    msg.body.refuse.join = join;
    msg.body.refuse.status = status;
    hrd_member_send(d, to, &msg);
}

static void fail_to_nodes(struct hrd_daemon *d, const struct rset *s, uint32_t status, const char *text)
{
    struct hrp_peer_msg msg = {.type = HRP_PEER_FAIL, .text = text, .text_len = strlen(text)};
    memcpy(msg.body.vote.comm_id, s->id, sizeof(s->id));
    msg.body.vote.status = status;
    for (uint32_t i = 0; i < s->nnodes; i++)
        if (!s->node[i].gone)
            hrd_member_send(d, s->node[i].no, &msg);
}

/* A set that is not committed ends, for all of its ranks. */
static void set_fail(struct hrd_daemon *d, struct rset *s, uint32_t status, const char *text)
{
    char key[128];
    hrd_key_text(&s->key, key, sizeof(key));
    bool named = strncmp(text, key, strlen(key)) == 0; /* most of the sentences begin so */
    hrd_log(HRD_LOG_WARNING, "%s%s%s", named ? "" : key, named ? "" : " was not made: ", text);
    if (s->state == RSET_VOTE)
        fail_to_nodes(d, s, status, text);
    else
        for (uint32_t i = 0; i < s->nranks; i++)
            refuse(d, s->rank[i].no, s->rank[i].join, status, text);
    hrd_rset_free(d->members, s);
    recheck_waits(d);
}

/* ---- a complete set ------------------------------------------------------------------------------------- */

static void start_vote(struct hrd_daemon *d, struct rset *s)
{
    uint64_t comm = 0;
    do {
        if (getrandom(s->id, sizeof(s->id), 0) != (ssize_t)sizeof(s->id))
            abort();
        memcpy(&comm, s->id, sizeof(comm));
    } while (comm == 0);
    s->state = RSET_VOTE;
    /* A little more than the nodes give themselves: their sentences say more than ours can. */
    s->deadline = hrd_member_now(d) + hrd_member_phase_ms(d, &s->config) + ROOT_GRACE_MS;
    hrd_rset_send_roster(d, s);
}

static void set_complete(struct hrd_daemon *d, struct rset *s)
{
    char why[HRP_COMM_TEXT], key[128], what[200];
    uint32_t status = hrd_config_possible(&s->config, NULL, what, sizeof(what));
    if (status == HRP_OK)
        status = hrd_rset_number_nodes(d, s, what, sizeof(what));
    if (status != HRP_OK) {
        snprintf(why, sizeof(why), "%s cannot be made: %s", hrd_key_text(&s->key, key, sizeof(key)), what);
        set_fail(d, s, status, why);
        return;
    }
    s->state = RSET_MEASURE;
    s->until = hrd_member_now(d) + MEASURE_MS;
    if (hrd_rset_measured(d, s))
        start_vote(d, s);
}

void hrd_root_rtt(struct hrd_daemon *d)
{
    for (struct rset *s = d->members->sets; s; s = s->next)
        if (s->state == RSET_MEASURE && hrd_rset_measured(d, s))
            start_vote(d, s);
}

static void commit(struct hrd_daemon *d, struct rset *s)
{
    struct hrp_peer_msg msg = {.type = HRP_PEER_COMMIT};
    char key[128];
    memcpy(msg.body.comm.comm_id, s->id, sizeof(s->id));
    for (uint32_t i = 0; i < s->nnodes; i++)
        hrd_member_send(d, s->node[i].no, &msg);
    s->state = RSET_COMMITTED;
    hrd_info("%s is made: %u node%s", hrd_key_text(&s->key, key, sizeof(key)), s->nnodes,
             s->nnodes == 1 ? "" : "s");
}

void hrd_root_vote(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg)
{
    struct rset *s = hrd_rset_by_id(d->members, msg->body.vote.comm_id);
    if (!s || s->state != RSET_VOTE)
        return; /* failed or committed meanwhile */
    bool all = true;
    for (uint32_t i = 0; i < s->nnodes; i++) {
        if (s->node[i].no == from && msg->body.vote.status != HRP_OK) {
            char text[HRP_PEER_TEXT + 1];
            snprintf(text, sizeof(text), "%.*s", (int)msg->text_len,
                     msg->text ? msg->text : "a node refused");
            s->node[i].gone = true; /* it knows */
            set_fail(d, s, msg->body.vote.status, text);
            return;
        }
        s->node[i].voted = s->node[i].voted || s->node[i].no == from;
        all = all && s->node[i].voted;
    }
    if (all)
        commit(d, s);
}

/* ---- joins ---------------------------------------------------------------------------------------------- */

static void supersede(struct hrd_daemon *d, struct rset *s, uint32_t from, const struct hrp_peer_join *join)
{
    char text[HRP_COMM_TEXT], key[128];
    snprintf(text, sizeof(text),
             "%s was replaced by a newer one of the same name: rank %u, whose former process is gone, joined "
             "again "
             "as process %d on node %s",
             hrd_key_text(&s->key, key, sizeof(key)), join->rank, join->pid, hrd_member_node_name(d, from));
    hrd_notice("%s", text);
    fail_to_nodes(d, s, HRP_SUPERSEDED, text);
    hrd_rset_free(d->members, s);
}

static void refuse_duplicate(struct hrd_daemon *d, const struct rset *s, const struct rrank *holder,
                             uint32_t from, const struct hrp_peer_join *join)
{
    char text[HRP_COMM_TEXT], key[128];
    snprintf(text, sizeof(text),
             "rank %u of %s is taken: process %d on node %s holds it and is alive. Two processes were "
             "started with "
             "the same rank, or an older job with the same name still runs",
             join->rank, hrd_key_text(&s->key, key, sizeof(key)), holder->pid,
             hrd_member_node_name(d, holder->no));
    hrd_notice("refused process %d on node %s: %s", join->pid, hrd_member_node_name(d, from), text);
    refuse(d, from, join->join, HRP_REFUSED, text);
}

/* The rank is held. The news that its holder is dead may be on its way (its daemon is another than the new
   process's), so the join waits for a moment. */
static void hold(struct hrd_daemon *d, struct rset *s, struct rrank *holder, uint32_t from,
                 const struct hrp_peer_join *join, uint64_t until)
{
    uint64_t now = hrd_member_now(d);
    if (until != 0 && now >= until) {
        refuse_duplicate(d, s, holder, from, join);
        return;
    }
    struct rwait *w = hrd_member_alloc(1, sizeof(*w));
    w->no = from;
    w->join = *join;
    w->until = until != 0 ? until : now + HOLDER_GRACE_MS;
    w->next = d->members->waits;
    d->members->waits = w;
}

static bool wrong_size(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_join *join)
{
    struct rset *s = hrd_rset_of_other_size(d->members, &join->key);
    char text[HRP_COMM_TEXT], key[128];
    if (!s || s->nranks == 0)
        return false;
    snprintf(
        text, sizeof(text),
        "rank %u (process %d on node %s) has world size %u, but rank %u (process %d on node %s) joined %s",
        join->rank, join->pid, hrd_member_node_name(d, from), join->key.nranks, s->rank[0].rank,
        s->rank[0].pid, hrd_member_node_name(d, s->rank[0].no), hrd_key_text(&s->key, key, sizeof(key)));
    snprintf(s->note, sizeof(s->note),
             "rank %u (process %d on node %s) came with world size %u and was refused", join->rank, join->pid,
             hrd_member_node_name(d, from), join->key.nranks);
    hrd_notice("refused: %s", text);
    refuse(d, from, join->join, HRP_REFUSED, text);
    return true;
}

/* All ranks must ask for the same; nobody can say who is right, so nobody gets it. */
static bool wrong_config(struct hrd_daemon *d, struct rset *s, uint32_t from,
                         const struct hrp_peer_join *join, const struct hrp_comm_config *config)
{
    const char *field;
    char va[32], vb[32], text[HRP_COMM_TEXT], key[128];
    if (s->nranks == 0 || !hrd_config_differs(&s->config, config, &field, va, vb))
        return false;
    snprintf(text, sizeof(text),
             "the ranks of %s disagree on '%s': rank %u (process %d on node %s) asks for %s, rank %u "
             "(process %d on "
             "node %s) for %s",
             hrd_key_text(&s->key, key, sizeof(key)), field, s->rank[0].rank, s->rank[0].pid,
             hrd_member_node_name(d, s->rank[0].no), va, join->rank, join->pid, hrd_member_node_name(d, from),
             vb);
    refuse(d, from, join->join, HRP_MISMATCH, text);
    set_fail(d, s, HRP_MISMATCH, text);
    return true;
}

/* until: 0 for a join that has just arrived, otherwise when it has waited long enough for its holder. */
static void join_or_wait(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_join *join,
                         uint64_t until)
{
    struct rset *s = hrd_rset_by_key(d->members, &join->key);
    struct rrank *holder = s ? hrd_rset_rank(s, join->rank) : NULL;
    struct hrp_comm_config config = join->config;
    hrd_config_resolve(&d->cfg, &config);
    if (holder && !holder->gone) {
        hold(d, s, holder, from, join, until);
        return;
    }
    if (holder) {
        supersede(d, s, from, join);
        s = NULL;
    }
    if (!s && wrong_size(d, from, join))
        return;
    if (!s)
        s = hrd_rset_new(d, join, &config);
    if (wrong_config(d, s, from, join, &config))
        return;
    hrd_rset_insert(s, from, join);
    /* The one that waits longest says when the time is over. */
    uint64_t waited = join->waited_ms < config.setup_timeout_ms ? join->waited_ms : config.setup_timeout_ms;
    uint64_t deadline = hrd_member_now(d) + config.setup_timeout_ms - waited;
    if (deadline < s->deadline)
        s->deadline = deadline;
    if (s->nranks == s->key.nranks)
        set_complete(d, s);
}

void hrd_root_join(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_join *join)
{
    join_or_wait(d, from, join, 0);
}

/* Something changed: joins that wait for a holder may go on, or have waited long enough. */
static void recheck_waits(struct hrd_daemon *d)
{
    struct rwait *all = d->members->waits;
    d->members->waits = NULL;
    while (all) {
        struct rwait *w = all;
        all = w->next;
        join_or_wait(d, w->no, &w->join, w->until);
        free(w);
    }
}

/* ---- those who go --------------------------------------------------------------------------------------- */

static bool drop_wait(struct hrd_members *m, uint32_t from, uint64_t join)
{
    for (struct rwait **at = &m->waits; *at; at = &(*at)->next)
        if ((*at)->no == from && (*at)->join.join == join) {
            struct rwait *w = *at;
            *at = w->next;
            free(w);
            return true;
        }
    return false;
}

void hrd_root_withdraw(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg)
{
    if (drop_wait(d->members, from, msg->body.refuse.join))
        return;
    for (struct rset *s = d->members->sets; s; s = s->next)
        for (uint32_t i = 0; s->state != RSET_COMMITTED && i < s->nranks; i++) {
            const struct rrank *r = &s->rank[i];
            if (r->no != from || r->join != msg->body.refuse.join)
                continue;
            char text[HRP_COMM_TEXT], key[128];
            snprintf(text, sizeof(text), "rank %u (process %d on node %s) was lost while %s was set up: %.*s",
                     r->rank, r->pid, hrd_member_node_name(d, from), hrd_key_text(&s->key, key, sizeof(key)),
                     msg->text ? (int)msg->text_len : 7, msg->text ? msg->text : "it died");
            set_fail(d, s, HRP_RANK_LOST, text);
            return;
        }
}

bool hrd_root_held_text(struct hrd_daemon *d, uint32_t from, uint64_t join, char *buf, size_t len)
{
    char key[128];
    const struct rwait *w = d->members->waits;
    while (w && !(w->no == from && w->join.join == join))
        w = w->next;
    struct rset *s = w ? hrd_rset_by_key(d->members, &w->join.key) : NULL;
    const struct rrank *holder = s ? hrd_rset_rank(s, w->join.rank) : NULL;
    if (!holder)
        return false;
    snprintf(
        buf, len,
        "%s: rank %u is held by process %d on node %s; unless that turns out to have ended within %u ms this "
        "one is refused",
        hrd_key_text(&s->key, key, sizeof(key)), w->join.rank, holder->pid,
        hrd_member_node_name(d, holder->no), HOLDER_GRACE_MS);
    return true;
}

static bool root_waits_text(struct hrd_daemon *d, uint32_t from, uint64_t join, char *buf, size_t len)
{
    for (struct rset *s = d->members->sets; s; s = s->next)
        for (uint32_t i = 0; s->state != RSET_COMMITTED && i < s->nranks; i++)
            if (s->rank[i].no == from && s->rank[i].join == join) {
                hrd_rset_waits_text(d, s, buf, len);
                return true;
            }
    return hrd_root_held_text(d, from, join, buf, len);
}

void hrd_root_joining(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg)
{
    char text[HRP_COMM_TEXT];
    if (!root_waits_text(d, from, msg->body.refuse.join, text, sizeof(text)))
        return;
    struct hrp_peer_msg answer = {.type = HRP_PEER_WAITS, .text = text, .text_len = strlen(text)};
    answer.body.refuse.join = msg->body.refuse.join;
    hrd_member_send(d, from, &answer);
}

static void forget_if_gone(struct hrd_members *m, struct rset *s)
{
    for (uint32_t i = 0; i < s->nnodes; i++)
        if (!s->node[i].gone)
            return;
    hrd_rset_free(m, s);
}

void hrd_root_left(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg)
{
    struct rset *s = hrd_rset_by_id(d->members, msg->body.comm.comm_id);
    struct rrank *r = s && s->state == RSET_COMMITTED ? hrd_rset_rank(s, msg->body.comm.rank) : NULL;
    if (!r || r->no != from)
        return;
    r->gone = true;
    recheck_waits(d);
}

static void node_gone(struct hrd_daemon *d, struct rset *s, uint32_t no)
{
    for (uint32_t i = 0; i < s->nranks; i++)
        s->rank[i].gone = s->rank[i].gone || s->rank[i].no == no;
    for (uint32_t i = 0; i < s->nnodes; i++)
        s->node[i].gone = s->node[i].gone || s->node[i].no == no;
    forget_if_gone(d->members, s);
}

void hrd_root_gone(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg)
{
    struct rset *s = hrd_rset_by_id(d->members, msg->body.comm.comm_id);
    if (!s || s->state != RSET_COMMITTED)
        return;
    node_gone(d, s, from);
    recheck_waits(d);
}

static struct rset *pending_with(struct hrd_members *m, uint32_t no)
{
    for (struct rset *s = m->sets; s; s = s->next)
        for (uint32_t i = 0; s->state != RSET_COMMITTED && i < s->nranks; i++)
            if (s->rank[i].no == no)
                return s;
    return NULL;
}

void hrd_root_peer_lost(struct hrd_daemon *d, uint32_t no, const char *why)
{
    struct hrd_members *m = d->members;
    for (struct rwait **at = &m->waits; *at;) {
        struct rwait *w = *at;
        if (w->no != no) {
            at = &w->next;
            continue;
        }
        *at = w->next;
        free(w);
    }
    /* Failing one lets waiting joins run, which may change the list in any way. */
    for (struct rset *s; (s = pending_with(m, no)) != NULL;) {
        char text[HRP_COMM_TEXT], key[128];
        snprintf(text, sizeof(text), "%s while %s was set up", why, hrd_key_text(&s->key, key, sizeof(key)));
        set_fail(d, s, HRP_PEER_LOST, text);
    }
    for (struct rset *s = m->sets, *next; s; s = next) {
        next = s->next;
        if (s->state == RSET_COMMITTED)
            node_gone(d, s, no);
    }
    recheck_waits(d);
}

/* ---- time ----------------------------------------------------------------------------------------------- */

static void vote_timeout(struct hrd_daemon *d, struct rset *s)
{
    char text[HRP_COMM_TEXT], key[128];
    size_t len;
    snprintf(text, sizeof(text), "%s was not made: no answer from node",
             hrd_key_text(&s->key, key, sizeof(key)));
    const char *sep = " ";
    for (uint32_t i = 0; i < s->nnodes; i++) {
        len = strlen(text);
        if (!s->node[i].voted) {
            snprintf(text + len, sizeof(text) - len, "%s%s", sep, s->node[i].name);
            sep = ", ";
        }
    }
    len = strlen(text);
    snprintf(text + len, sizeof(text) - len, " after all ranks had joined");
    set_fail(d, s, HRP_TIMEOUT, text);
}

static struct rset *first_late(struct hrd_daemon *d)
{
    struct rset *s = d->members->sets;
    while (s && (s->state == RSET_COMMITTED || s->state == RSET_MEASURE || hrd_member_now(d) < s->deadline))
        s = s->next;
    return s;
}

static void set_late(struct hrd_daemon *d, struct rset *s)
{
    char text[HRP_COMM_TEXT];
    if (s->state == RSET_VOTE) {
        vote_timeout(d, s);
        return;
    }
    hrd_rset_missing_text(d, s, text, sizeof(text));
    set_fail(d, s, HRP_TIMEOUT, text);
}

static void set_progress(struct hrd_daemon *d, struct rset *s)
{
    uint64_t now = hrd_member_now(d);
    char text[512];
    if (s->state != RSET_COLLECT || now - s->said_at < PROGRESS_MS)
        return;
    s->said_at = now;
    hrd_rset_waits_text(d, s, text, sizeof(text));
    hrd_notice("%s", text);
}

void hrd_root_tick(struct hrd_daemon *d)
{
    struct hrd_members *m = d->members;
    /* Failing one lets waiting joins run, which may change the list in any way. */
    for (struct rset *s; (s = first_late(d)) != NULL;)
        set_late(d, s);
    for (struct rset *s = m->sets; s; s = s->next) {
        if (s->state == RSET_MEASURE && hrd_member_now(d) >= s->until)
            start_vote(d, s);
        set_progress(d, s);
    }
    if (m->waits)
        recheck_waits(d);
}

bool hrd_root_busy(const struct hrd_members *m)
{
    for (const struct rset *s = m->sets; s; s = s->next)
        if (s->state != RSET_COMMITTED)
            return true;
    return false;
}

void hrd_root_free_all(struct hrd_members *m)
{
    while (m->sets)
        hrd_rset_free(m, m->sets);
    while (m->waits) {
        struct rwait *w = m->waits;
        m->waits = w->next;
        free(w);
    }
}
