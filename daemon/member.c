/* SPDX-License-Identifier: MIT */
/* Entry points of the membership: each takes its part of the news and lets the queued messages run. */
#include "daemon/member.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/member_impl.h"

void *hrd_member_alloc(size_t n, size_t size)
{
    void *p = calloc(n > 0 ? n : 1, size);
    if (!p)
        abort();
    return p;
}

static uint64_t monotonic_ms(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000u + (uint64_t)ts.tv_nsec / 1000000u;
}

uint64_t hrd_member_now(struct hrd_daemon *d)
{
    return d->members->clock();
}

uint64_t hrd_member_id(struct hrd_daemon *d)
{
    return ++d->members->last_id;
}

const char *hrd_member_node_name(struct hrd_daemon *d, uint32_t no)
{
    struct hrd_peer_info info;
    if (no == HRD_SELF)
        return d->node_name;
    return hrd_peer_info(d, no, &info) ? info.name : "unknown";
}

uint64_t hrd_member_phase_ms(const struct hrd_daemon *d, const struct hrp_comm_config *c)
{
    return c->setup_timeout_ms < d->cfg.peer_timeout_ms ? c->setup_timeout_ms : d->cfg.peer_timeout_ms;
}

void hrd_member_stamp_id(const struct hrd_daemon *d, struct hrp_unique_id *id)
{
    memcpy(id->nonce + 8, d->instance, 8);
}

/* ---- messages ------------------------------------------------------------------------------------------- */

void hrd_member_send(struct hrd_daemon *d, uint32_t to, const struct hrp_peer_msg *msg)
{
    struct hrd_members *m = d->members;
    if (to == NO_ROOT)
        return;
    if (to != HRD_SELF) {
        hrd_peer_send(d, to, msg);
        return;
    }
    size_t size = hrp_peer_size(msg);
    struct self_msg *q = hrd_member_alloc(1, sizeof(*q) + size);
    long len = hrp_peer_encode(msg, q->data, size);
    if (len < 0)
        abort(); /* we made it ourselves */
    q->len = (size_t)len;
    *m->self_last = q;
    m->self_last = &q->next;
}

static bool dispatch(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg)
{
    switch (msg->type) {
    case HRP_PEER_JOIN:
        hrd_root_join(d, from, &msg->body.join);
        return true;
    case HRP_PEER_REFUSE:
        hrd_join_refused(d, from, msg);
        return true;
    case HRP_PEER_WITHDRAW:
        hrd_root_withdraw(d, from, msg);
        return true;
    case HRP_PEER_JOINING:
        hrd_root_joining(d, from, msg);
        return true;
    case HRP_PEER_WAITS:
        hrd_join_waits(d, from, msg);
        return true;
    case HRP_PEER_ROSTER:
        return hrd_node_roster(d, from, msg);
    case HRP_PEER_VOTE:
        hrd_root_vote(d, from, msg);
        return true;
    case HRP_PEER_COMMIT:
        return hrd_node_commit(d, from, msg);
    case HRP_PEER_FAIL:
        hrd_node_failed(d, from, msg);
        return true;
    case HRP_PEER_LEFT:
        hrd_root_left(d, from, msg);
        return true;
    case HRP_PEER_GONE:
        hrd_root_gone(d, from, msg);
        return true;
    default:
        return false;
    }
}

static bool busy(const struct hrd_members *m)
{
    return m->ways || m->joins || m->waits || hrd_root_busy(m) || hrd_node_busy(m);
}

static void on_timer(uv_timer_t *timer)
{
    hrd_members_tick(timer->data);
}

static void enter(struct hrd_daemon *d)
{
    d->members->depth++;
}

/* The outermost caller lets the daemon's messages to itself run, then sets the timer. */
static void leave(struct hrd_daemon *d)
{
    struct hrd_members *m = d->members;
    if (m->depth == 1) {
        while (m->self_first) {
            struct self_msg *q = m->self_first;
            struct hrp_peer_msg msg;
            m->self_first = q->next;
            if (!m->self_first)
                m->self_last = &m->self_first;
            if (hrp_peer_decode(&msg, q->data, q->len) != 0 || !dispatch(d, HRD_SELF, &msg))
                abort(); /* we made it ourselves */
            free(q);
        }
        if (d->loop && busy(m) != m->ticking) {
            m->ticking = !m->ticking;
            if (m->ticking)
                uv_timer_start(&m->timer, on_timer, MEMBER_TICK_MS, MEMBER_TICK_MS);
            else
                uv_timer_stop(&m->timer);
        }
    }
    m->depth--;
}

/* ---- from the peers ------------------------------------------------------------------------------------- */

bool hrd_member_msg(struct hrd_daemon *d, uint32_t no, const struct hrp_peer_msg *msg)
{
    enter(d);
    bool ok = dispatch(d, no, msg);
    leave(d);
    return ok;
}

void hrd_member_dialed(struct hrd_daemon *d, uint64_t token, uint32_t status, uint32_t no, const char *why)
{
    if (!d->members)
        return;
    enter(d);
    if (!hrd_node_dialed(d, token, status, no, why))
        hrd_join_dialed(d, token, status, no, why);
    leave(d);
}

void hrd_member_peer_up(struct hrd_daemon *d, uint32_t no)
{
    (void)no;
    enter(d);
    hrd_node_connect_all(d);
    leave(d);
}

void hrd_member_link(struct hrd_daemon *d, uint32_t no, const char *why)
{
    enter(d);
    if (why)
        hrd_node_link_failed(d, no, why);
    else
        hrd_node_connect_all(d);
    leave(d);
}

void hrd_member_link_refused(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want,
                             uint32_t status, const char *why)
{
    enter(d);
    hrd_node_link_refused(d, no, want, status, why);
    leave(d);
}

void hrd_member_rtt(struct hrd_daemon *d, uint32_t no)
{
    (void)no;
    enter(d);
    hrd_root_rtt(d);
    leave(d);
}

void hrd_member_peer_lost(struct hrd_daemon *d, uint32_t peer, const char *why)
{
    if (!d->members)
        return;
    enter(d);
    /* As node first: what it tells the lost root goes nowhere; as root it then tells the others. */
    hrd_node_peer_lost(d, peer, why);
    hrd_join_peer_lost(d, peer, why);
    hrd_root_peer_lost(d, peer, why);
    leave(d);
}

/* ---- from the agent and the sessions; JOIN, LEAVE and ABORT are in member_join.c and member_node.c ------- */

void hrd_member_event(struct hrd_daemon *d, const struct hrd_event *ev)
{
    if (!d->members)
        return;
    enter(d);
    hrd_node_event(d, ev);
    leave(d);
}

void hrd_member_session_gone(struct hrd_daemon *d, struct hrd_session *s, const char *why)
{
    if (!d->members)
        return;
    enter(d);
    hrd_join_session_gone(d, s->sid, why);
    hrd_node_session_gone(d, s->sid, why);
    leave(d);
}

void hrd_member_joining(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie,
                        const struct hrp_msg_join *join)
{
    if (!d->members) {
        hrd_session_error(s, cookie, HRP_SHUTDOWN, HRP_SCOPE_NONE, "the daemon of node %s is stopping",
                          d->node_name);
        return;
    }
    enter(d);
    hrd_join_joining(d, s, cookie, join);
    leave(d);
}

void hrd_member_join(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie,
                     const struct hrp_msg_join *join)
{
    if (!d->members)
        return;
    enter(d);
    hrd_join_start(d, s, cookie, join);
    leave(d);
}

void hrd_member_leave(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, uint32_t slot)
{
    if (!d->members)
        return;
    enter(d);
    hrd_node_leave(d, s, cookie, slot);
    leave(d);
}

void hrd_member_abort(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, uint32_t slot,
                      const char *text, size_t len)
{
    if (!d->members)
        return;
    enter(d);
    hrd_node_abort(d, s, cookie, slot, text, len);
    leave(d);
}

void hrd_members_tick(struct hrd_daemon *d)
{
    enter(d);
    hrd_root_tick(d);
    hrd_node_tick(d);
    hrd_join_tick(d);
    leave(d);
}

/* ---- start and end -------------------------------------------------------------------------------------- */

int hrd_members_new(struct hrd_daemon *d)
{
    struct hrd_members *m = calloc(1, sizeof(*m));
    if (!m)
        return -ENOMEM;
    m->self_last = &m->self_first;
    m->clock = monotonic_ms;
    if (d->loop) {
        uv_timer_init(d->loop, &m->timer);
        m->timer.data = d;
    }
    d->members = m;
    return 0;
}

static void timer_freed(uv_handle_t *h)
{
    free(h->data);
}

void hrd_members_free(struct hrd_daemon *d)
{
    struct hrd_members *m = d->members;
    if (!m)
        return;
    d->members = NULL;
    hrd_join_free_all(m);
    hrd_node_free_all(m);
    hrd_root_free_all(m);
    while (m->self_first) {
        struct self_msg *q = m->self_first;
        m->self_first = q->next;
        free(q);
    }
    if (!d->loop) {
        free(m);
        return;
    }
    m->timer.data = m;
    uv_close((uv_handle_t *)&m->timer, timer_freed);
}
