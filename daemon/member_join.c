/* SPDX-License-Identifier: MIT */
/* Local ranks that want to join: reaching the root daemon, until its roster, its refusal or the time limit. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/member_impl.h"

/* ---- ways to a root ------------------------------------------------------------------------------------- */

static void way_release(struct hrd_daemon *d, struct way *w)
{
    if (!w || --w->njoins > 0)
        return;
    struct way **at = &d->members->ways;
    while (*at != w)
        at = &(*at)->next;
    *at = w->next;
    free(w); /* a dial in progress is answered with a token that nobody knows any more */
}

static void way_dial(struct hrd_daemon *d, struct way *w)
{
    w->token = hrd_member_id(d);
    hrd_peer_dial(d, hrd_member_dialed, w->token, w->addr, w->naddrs, w->expect, w->expect_len);
}

static void way_take(struct hrd_daemon *d, struct join *j)
{
    struct hrd_members *m = d->members;
    uint8_t expect[8] = {0};
    unsigned expect_len = 0;
    if (j->key.kind == HRP_KEY_ID) {
        memcpy(expect, j->key.name + 8, 8);
        expect_len = 8;
    }
    struct way *w = m->ways;
    while (w && !(w->naddrs == j->nroots && w->expect_len == expect_len &&
                  memcmp(w->addr, j->root, sizeof(w->addr)) == 0 && memcmp(w->expect, expect, 8) == 0))
        w = w->next;
    if (!w) {
        w = hrd_member_alloc(1, sizeof(*w));
        w->naddrs = j->nroots;
        memcpy(w->addr, j->root, sizeof(w->addr));
        memcpy(w->expect, expect, 8);
        w->expect_len = expect_len;
        w->retry_ms = DIAL_RETRY_MIN_MS;
        w->said_at = hrd_member_now(d);
        w->next = m->ways;
        m->ways = w;
        way_dial(d, w);
    }
    w->njoins++;
    j->way = w;
}

/* ---- joins ---------------------------------------------------------------------------------------------- */

static void answer_joining(struct hrd_daemon *d, struct join *j, const char *text);

void hrd_join_drop(struct hrd_daemon *d, struct join *j)
{
    struct join **at = &d->members->joins;
    while (*at != j)
        at = &(*at)->next;
    *at = j->next;
    answer_joining(d, j, NULL);
    way_release(d, j->way);
    free(j);
}

void hrd_join_fail(struct hrd_daemon *d, struct join *j, uint32_t status, const char *text)
{
    struct hrd_session *s = hrd_session_find(d, j->sid);
    d->members->setup_errors++;
    if (s) {
        hrd_session_error(s, j->cookie, (enum hrp_status)status, HRP_SCOPE_COMM, "%s", text);
        hrd_session_slot_free(s, j->slot);
    }
    hrd_join_drop(d, j);
}

static void give_to_root(struct hrd_daemon *d, struct join *j, uint32_t no)
{
    struct way *w = j->way;
    struct hrp_peer_msg msg = {.type = HRP_PEER_JOIN};
    struct hrp_peer_join *b = &msg.body.join;
    b->key = j->key;
    b->config = j->config;
    b->join = j->id;
    b->rank = j->rank;
    b->pid = j->pid;
    b->waited_ms = (uint32_t)(hrd_member_now(d) - j->start);
    j->way = NULL;
    j->root_no = no;
    way_release(d, w);
    hrd_member_send(d, no, &msg);
}

/* Whether the rank's root is this daemon: for an id the id itself says so, a name comes with an address. */
static bool root_is_here(struct hrd_daemon *d, const struct join *j)
{
    if (j->key.kind == HRP_KEY_ID)
        return memcmp(j->key.name + 8, d->instance, 8) == 0;
    for (unsigned i = 0; i < j->nroots; i++)
        if (hrd_peers_is_mine(d, &j->root[i]))
            return true;
    return false;
}

void hrd_join_start(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie,
                    const struct hrp_msg_join *msg)
{
    struct hrd_members *m = d->members;
    if (d->stopping) {
        hrd_session_error(s, cookie, HRP_SHUTDOWN, HRP_SCOPE_COMM,
                          "the daemon of node %s is stopping and takes no new communicators", d->node_name);
        return;
    }
    int slot = hrd_session_slot_take(s);
    if (slot < 0) {
        hrd_session_error(s, cookie, HRP_RESOURCE, HRP_SCOPE_COMM,
                          "this process has %u communicators already, which is the limit (key 'max_comms' of "
                          "hreduced.conf on node %s): destroy one first",
                          d->cfg.max_comms, d->node_name);
        return;
    }
    struct join *j = hrd_member_alloc(1, sizeof(*j));
    j->id = hrd_member_id(d);
    j->sid = s->sid;
    j->cookie = cookie;
    j->rank = msg->rank;
    j->pid = s->pid;
    j->slot = (uint32_t)slot;
    j->key = msg->key;
    j->key.uid = s->uid;
    j->config = msg->config;
    j->nroots = msg->nroots;
    memcpy(j->root, msg->root, sizeof(j->root));
    j->start = hrd_member_now(d);
    j->deadline =
        j->start + (j->config.setup_timeout_ms ? j->config.setup_timeout_ms : d->cfg.setup_timeout_ms);
    j->next = m->joins;
    m->joins = j;
    if (root_is_here(d, j))
        give_to_root(d, j, HRD_SELF);
    else
        way_take(d, j);
}

struct join *hrd_join_find(struct hrd_daemon *d, uint64_t id, uint32_t root_no)
{
    struct join *j = d->members->joins;
    while (j && !(j->id == id && !j->way && j->root_no == root_no))
        j = j->next;
    return j;
}

/* ---- what a join waits for ------------------------------------------------------------------------------- */

static void waits_text(struct hrd_daemon *d, const struct join *j, const struct hrp_key *key, char *buf,
                       size_t len)
{
    struct rset *set = j && !j->way && j->root_no == HRD_SELF ? hrd_rset_by_key(d->members, key) : NULL;
    char name[128];
    hrd_key_text(key, name, sizeof(name));
    if (set && hrd_root_held_text(d, HRD_SELF, j->id, buf, len))
        return;
    if (set)
        hrd_rset_waits_text(d, set, buf, len);
    else if (!j)
        snprintf(buf, len, "%s: all ranks are here, waiting for its nodes to connect with each other", name);
    else if (j->way)
        snprintf(buf, len, "%s: rank %u waits for its root daemon: %s", name, j->rank,
                 j->way->error[0] ? j->way->error : "no answer yet");
    else
        snprintf(buf, len,
                 "%s: rank %u waits for other ranks; the daemon of node %s knows which ('hreducectl status' "
                 "there, or its log)",
                 name, j->rank, hrd_member_node_name(d, j->root_no));
}

static bool root_can_say(struct hrd_daemon *d, const struct join *j)
{
    struct hrd_peer_info info;
    return !j->way && j->root_no != HRD_SELF && !j->asked && hrd_peer_info(d, j->root_no, &info) &&
           info.minor >= HRP_PEER_MINOR_JOINING;
}

void hrd_join_joining(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie,
                      const struct hrp_msg_join *msg)
{
    struct hrp_key key = msg->key;
    char text[HRP_COMM_TEXT];
    key.uid = s->uid;
    struct join *j = d->members->joins;
    while (j && !(j->sid == s->sid && j->rank == msg->rank && memcmp(&j->key, &key, sizeof(key)) == 0))
        j = j->next;
    if (j && root_can_say(d, j)) {
        struct hrp_peer_msg ask = {.type = HRP_PEER_JOINING, .body.refuse.join = j->id};
        j->asked = cookie;
        hrd_member_send(d, j->root_no, &ask);
        return;
    }
    waits_text(d, j, &key, text, sizeof(text));
    hrd_session_text(s, cookie, text);
}

/* NULL: it does not wait any more, or what for will be known otherwise. */
static void answer_joining(struct hrd_daemon *d, struct join *j, const char *text)
{
    struct hrd_session *s = j->asked ? hrd_session_find(d, j->sid) : NULL;
    if (s && text)
        hrd_session_text(s, j->asked, text);
    else if (s)
        hrd_session_error(s, j->asked, HRP_INVALID_ARGUMENT, HRP_SCOPE_NONE, "rank %u waits no longer",
                          j->rank);
    j->asked = 0;
}

void hrd_join_waits(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg)
{
    char text[HRP_PEER_TEXT + 1];
    struct join *j = hrd_join_find(d, msg->body.refuse.join, from);
    if (!j)
        return; /* of one that has ended meanwhile */
    snprintf(text, sizeof(text), "%.*s (said by the daemon of node %s, its root)", (int)msg->text_len,
             msg->text ? msg->text : "", hrd_member_node_name(d, from));
    answer_joining(d, j, text);
}

/* ---- ends ------------------------------------------------------------------------------------------------ */

void hrd_join_refused(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg)
{
    char text[HRP_PEER_TEXT + 1];
    struct join *j = hrd_join_find(d, msg->body.refuse.join, from);
    if (!j)
        return; /* withdrawn meanwhile */
    snprintf(text, sizeof(text), "%.*s", (int)msg->text_len,
             msg->text ? msg->text : "refused by the root daemon");
    hrd_join_fail(d, j, msg->body.refuse.status, text);
}

static void withdraw(struct hrd_daemon *d, const struct join *j, const char *why)
{
    if (j->way)
        return;
    struct hrp_peer_msg msg = {.type = HRP_PEER_WITHDRAW, .text = why, .text_len = strlen(why)};
    msg.body.refuse.join = j->id;
    hrd_member_send(d, j->root_no, &msg);
}

void hrd_join_session_gone(struct hrd_daemon *d, uint64_t sid, const char *why)
{
    for (struct join *j = d->members->joins, *next; j; j = next) {
        next = j->next;
        if (j->sid != sid)
            continue;
        withdraw(d, j, why);
        hrd_join_drop(d, j);
    }
}

/* ---- news about the root -------------------------------------------------------------------------------- */

static void unreachable(struct hrd_daemon *d, struct join *j, uint32_t status, const char *how,
                        const char *why)
{
    char text[HRP_COMM_TEXT], key[128];
    snprintf(text, sizeof(text), "rank %u cannot join %s: its root daemon %s: %s", j->rank,
             hrd_key_text(&j->key, key, sizeof(key)), how, why);
    hrd_join_fail(d, j, status, text);
}

void hrd_join_dialed(struct hrd_daemon *d, uint64_t token, uint32_t status, uint32_t no, const char *why)
{
    struct way *w = d->members->ways;
    while (w && w->token != token)
        w = w->next;
    if (!w)
        return;
    w->token = 0;
    if (status == HRP_PEER_LOST) {
        snprintf(w->error, sizeof(w->error), "%s", why);
        w->retry_at = hrd_member_now(d) + w->retry_ms;
        w->retry_ms = w->retry_ms * 2 < DIAL_RETRY_MAX_MS ? w->retry_ms * 2 : DIAL_RETRY_MAX_MS;
        return;
    }
    /* The last join takes the way with it. */
    unsigned left = w->njoins;
    for (struct join *j = d->members->joins, *next; j && left > 0; j = next) {
        next = j->next;
        if (j->way != w)
            continue;
        left--;
        if (status == HRP_OK)
            give_to_root(d, j, no);
        else
            unreachable(d, j, status, "cannot be used", why);
    }
}

void hrd_join_peer_lost(struct hrd_daemon *d, uint32_t no, const char *why)
{
    for (struct join *j = d->members->joins; j; j = j->next) {
        if (j->way || j->root_no != no)
            continue;
        way_take(d, j);
        snprintf(j->way->error, sizeof(j->way->error), "%s", why);
        if (j->asked) {
            char text[HRP_COMM_TEXT];
            waits_text(d, j, &j->key, text, sizeof(text));
            answer_joining(d, j, text);
        }
    }
}

static void way_tick(struct hrd_daemon *d, struct way *w)
{
    uint64_t now = hrd_member_now(d);
    if (w->token == 0 && now >= w->retry_at)
        way_dial(d, w);
    if (now - w->said_at >= PROGRESS_MS) {
        w->said_at = now;
        hrd_notice("%u rank%s of this node wait%s for their root daemon: %s", w->njoins,
                   w->njoins == 1 ? "" : "s", w->njoins == 1 ? "s" : "",
                   w->error[0] ? w->error : "no answer yet");
    }
}

static void join_tick(struct hrd_daemon *d, struct join *j)
{
    uint64_t now = hrd_member_now(d);
    char how[128], took[32];
    if (now < j->deadline || (!j->way && now < j->deadline + ROOT_GRACE_MS))
        return;
    hrd_ms_text(j->deadline - j->start, took, sizeof(took));
    if (j->way) {
        char why[512];
        snprintf(how, sizeof(how), "could not be reached for %s", took);
        snprintf(why, sizeof(why), "%s", j->way->error[0] ? j->way->error : "no answer");
        unreachable(d, j, HRP_TIMEOUT, how, why);
    } else {
        snprintf(how, sizeof(how), "(node %.60s) did not answer for %s", hrd_member_node_name(d, j->root_no),
                 took);
        withdraw(d, j, "its daemon waits no longer");
        unreachable(d, j, HRP_TIMEOUT, how, "it is connected but does not decide");
    }
}

void hrd_join_tick(struct hrd_daemon *d)
{
    for (struct join *j = d->members->joins, *next; j; j = next) {
        next = j->next;
        join_tick(d, j);
    }
    for (struct way *w = d->members->ways; w; w = w->next)
        way_tick(d, w);
}

void hrd_join_free_all(struct hrd_members *m)
{
    while (m->joins) {
        struct join *j = m->joins;
        m->joins = j->next;
        free(j);
    }
    while (m->ways) {
        struct way *w = m->ways;
        m->ways = w->next;
        free(w);
    }
}
