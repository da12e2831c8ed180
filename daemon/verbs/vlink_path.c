/* SPDX-License-Identifier: MIT */
/*
 * A verbs link whose path fails. What a device tells apart decides:
 *
 *   the path    no acknowledgement, a queue pair that failed, another address of the port: the link is interrupted. Its
 *               queue pairs go into the error state, so that nothing of theirs arrives any more; what had arrived is
 *               read; then the connection is lent to the control thread, which makes new queue pairs with the peer
 *               (peer_mend.c). Each end tells the other how many messages it got on each queue pair, and what is missing
 *               is sent again: every message is handled exactly once and in order, so the ops above notice nothing but
 *               time. Memory regions and keys stay what they were.
 *   all else    a broken protocol, memory that may not be used, a dead device: the link is lost.
 */
#include "daemon/verbs/vlink.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "daemon/log.h"

/* For the device to give back its receive buffers. */
#define DRAIN_NS UINT64_C(1000000000)
#define DRAIN_BATCH 16

/* ---- lost ------------------------------------------------------------------------------------------------------- */

void hrd_vlink_broken(struct vlink *l, const char *why)
{
    char text[512];
    if (l->state == V_BROKEN)
        return;
    if (l->state != V_LENT)
        hrd_poller_del(l->poller, &l->completions);
    hrd_poller_del(l->poller, &l->events);
    l->state = V_BROKEN;
    if (l->port_down)
        snprintf(text, sizeof(text), "port %u of %s went down %" PRIu64 " ms ago; %s", l->dev.port,
                 l->dev.name, (hrd_vlink_now() - l->port_down) / 1000000, why);
    l->base.handler->lost(&l->base, l->port_down ? text : why);
}

static void read_events(struct vlink *l);

void hrd_vlink_broken_call(struct vlink *l, const char *what, int err)
{
    char text[160];
    if (l->state == V_UP || l->state == V_DRAINING)
        read_events(l); /* a device that is dead says so there, and that is the reason */
    snprintf(text, sizeof(text), "%s failed on %s: %s", what, l->dev.name, strerror(err));
    hrd_vlink_broken(l, text);
}

/* Nothing can be saved. The first completion that is not merely flushed says more than `hint`. */
static void broken_by_device(struct vlink *l, const char *hint)
{
    struct ibv_wc wc;
    char text[400];
    snprintf(text, sizeof(text), "%s", hint);
    for (unsigned i = 0; i < 4 * HRD_VSEND_WRS && l->dev.v->poll_cq(l->c->cq, 1, &wc) > 0; i++)
        if (wc.status != IBV_WC_SUCCESS && wc.status != IBV_WC_WR_FLUSH_ERR) {
            hrd_verbs_wc_text(l->c, &wc, text, sizeof(text));
            break;
        }
    hrd_vlink_broken(l, text);
}

/* ---- interrupted ------------------------------------------------------------------------------------------------ */

/* What new queue pairs put right. LOC_QP_OP_ERR is what soft-RoCE says when its interface is down and no route leads to
   the peer. */
static bool of_the_path(enum ibv_wc_status status)
{
    return status == IBV_WC_RETRY_EXC_ERR || status == IBV_WC_RESP_TIMEOUT_ERR ||
           status == IBV_WC_LOC_QP_OP_ERR || status == IBV_WC_WR_FLUSH_ERR;
}

/* why: "" when the completions are to say it. */
static void interrupt(struct vlink *l, const char *why)
{
    const struct hrd_verbs *v = l->dev.v;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    if (l->state != V_UP)
        return;
    l->state = V_DRAINING;
    l->drain_until = hrd_vlink_now() + DRAIN_NS;
    snprintf(l->why, sizeof(l->why), "%s", why);
    for (unsigned i = 0; i < l->c->n; i++)
        (void)v->modify_qp(l->c->q[i].qp, &attr,
                           IBV_QP_STATE); /* one that does not obey is not drained in time */
}

void hrd_vlink_interrupt(struct hrd_link *base, unsigned rail, const char *why)
{
    struct vlink *l = (struct vlink *)base;
    (void)rail;
    interrupt(l, why);
    hrd_vlink_drain(l);
}

void hrd_vlink_failed(struct vlink *l, const struct ibv_wc *wc)
{
    char text[sizeof(l->why)];
    hrd_verbs_wc_text(l->c, wc, text, sizeof(text));
    if (!of_the_path(wc->status))
        hrd_vlink_broken(l, text);
    else if (l->state == V_UP)
        interrupt(l, wc->status == IBV_WC_WR_FLUSH_ERR ? "" : text);
    else if (!l->why[0] && wc->status != IBV_WC_WR_FLUSH_ERR)
        memcpy(l->why, text, sizeof(text));
}

static bool drained(const struct vlink *l)
{
    for (unsigned i = 0; i < l->c->n; i++)
        if (l->q[i].posted > 0)
            return false;
    return true;
}

/* Nothing of the old queue pairs can arrive any more, and everything that had arrived was handled. */
static void lend(struct vlink *l)
{
    char text[sizeof(l->why) + 100];
    if (!l->why[0])
        snprintf(l->why, sizeof(l->why), "a queue pair of %s failed without saying why", l->dev.name);
    if (l->port_down) /* first: what a queue pair says is long, and cut short on its way to a rank */
        snprintf(text, sizeof(text), "port %u of %s went down; %s", l->dev.port, l->dev.name, l->why);
    else
        snprintf(text, sizeof(text), "%s", l->why);
    l->state = V_LENT;
    l->why[0] = '\0';
    l->base.interruptions++;
    hrd_poller_del(l->poller, &l->completions);
    l->base.handler->interrupted(&l->base, 0, &l->c->base, text);
}

unsigned hrd_vlink_drain(struct vlink *l)
{
    struct ibv_wc wc[DRAIN_BATCH];
    unsigned total = 0;
    int n = DRAIN_BATCH;
    while (n == DRAIN_BATCH && l->state == V_DRAINING) {
        n = l->dev.v->poll_cq(l->c->cq, DRAIN_BATCH, wc);
        for (int k = 0; k < n && l->state == V_DRAINING; k++)
            hrd_vlink_completion(l, &wc[k]);
        total += n > 0 ? (unsigned)n : 0;
    }
    hrd_vlink_report_sent(l);
    if (l->state != V_DRAINING)
        return total;
    read_events(l); /* a device that is dead says so there */
    if (l->state == V_DRAINING && drained(l)) {
        lend(l);
    } else if (l->state == V_DRAINING && (n < 0 || hrd_vlink_now() > l->drain_until)) {
        char text[sizeof(l->why) + 100];
        snprintf(text, sizeof(text), "%s%sits queue pairs did not give back their buffers", l->why,
                 l->why[0] ? ", and " : "");
        hrd_vlink_broken(l, text);
    }
    return total;
}

void hrd_vlink_resume(struct hrd_link *base, unsigned rail)
{
    struct vlink *l = (struct vlink *)base;
    (void)rail;
    if (l->state != V_LENT)
        return;
    read_events(l); /* of the old queue pairs */
    hrd_vlink_describe(l);
    if (l->why[0]) {
        hrd_vlink_broken(l, l->why);
        return;
    }
    l->completions.fd = l->c->channel->fd;
    l->state = V_UP;
    if (hrd_poller_add(l->poller, &l->completions, EPOLLIN)) {
        hrd_vlink_broken_call(l, "watching the completion queue", errno);
        return;
    }
    hrd_vlink_send_again(l);
}

/* ---- asynchronous events ---------------------------------------------------------------------------------------- */

static bool gid_changed(const struct vlink *l)
{
    const struct hrd_verbs_device *d = &l->dev;
    struct ibv_gid_entry e;
    if (!d->global)
        return false;
    return d->v->query_gid(l->c->ctx, d->port, d->gid_index, &e) != 0 ||
           memcmp(&e.gid, &d->gid, sizeof(e.gid)) != 0;
}

static bool pkey_changed(const struct vlink *l)
{
    const struct hrd_verbs_device *d = &l->dev;
    uint16_t pkey = 0;
    return d->v->query_pkey(l->c->ctx, d->port, d->pkey_index, &pkey) != 0 || pkey != d->pkey;
}

/* The device or the peer is beyond help. */
static void fatal(struct vlink *l, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void fatal(struct vlink *l, const char *fmt, ...)
{
    char text[200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (l->state == V_LENT)
        memcpy(l->why, text, sizeof(text)); /* the control thread has it; it will hear */
    else
        broken_by_device(l, text);
}

static void on_port_event(struct vlink *l, bool up)
{
    const struct hrd_verbs_device *d = &l->dev;
    uint64_t ms = l->port_down ? (hrd_vlink_now() - l->port_down) / 1000000 : 0;
    if (!up) { /* a short flap is ridden out by the device's retries, a longer one by new queue pairs */
        l->base.port_downs += l->port_down == 0;
        if (!l->port_down)
            hrd_warn("port %u of %s went down; the verbs link %s waits for it", d->port, d->name,
                     l->base.detail);
        l->port_down = l->port_down ? l->port_down : hrd_vlink_now();
        return;
    }
    if (l->port_down)
        hrd_notice("port %u of %s is up again after %" PRIu64 " ms", d->port, d->name, ms);
    l->port_down = 0;
}

static void on_event(struct vlink *l, const struct ibv_async_event *ev)
{
    const struct hrd_verbs_device *d = &l->dev;
    char at[64], text[200];
    bool port = ev->element.port_num == d->port;
    l->base.device_events++;
    switch (ev->event_type) {
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_PORT_ACTIVE:
        if (port)
            on_port_event(l, ev->event_type == IBV_EVENT_PORT_ACTIVE);
        return;
    case IBV_EVENT_GID_CHANGE:
        if (!port || !gid_changed(l))
            return;
        snprintf(text, sizeof(text), "GID %u of %s is no longer %s: the address of its interface changed",
                 d->gid_index, d->name, hrd_verbs_gid_text(&d->gid, at, sizeof(at)));
        interrupt(l, text);
        return;
    case IBV_EVENT_LID_CHANGE:
        if (!port || d->ethernet)
            return;
        snprintf(text, sizeof(text), "the subnet manager gave port %u of %s another LID", d->port, d->name);
        interrupt(l, text);
        return;
    case IBV_EVENT_PKEY_CHANGE:
        if (!port || !pkey_changed(l))
            return;
        snprintf(text, sizeof(text), "the subnet manager changed the partition table of port %u of %s",
                 d->port, d->name);
        interrupt(l, text);
        return;
    case IBV_EVENT_QP_FATAL:
        snprintf(text, sizeof(text), "a queue pair of %s failed (QP_FATAL)", d->name);
        interrupt(l, text);
        return;
    case IBV_EVENT_DEVICE_FATAL:
        fatal(l, "%s reports a fatal error (DEVICE_FATAL): see the kernel log", d->name);
        return;
    case IBV_EVENT_CQ_ERR:
        fatal(l, "the completion queue of %s overran (CQ_ERR)", d->name);
        return;
    case IBV_EVENT_QP_ACCESS_ERR:
        fatal(l, "the peer wrote where it may not (QP_ACCESS_ERR on %s)", d->name);
        return;
    case IBV_EVENT_QP_REQ_ERR:
        fatal(l, "the peer sent what its queue pair may not (QP_REQ_ERR on %s)", d->name);
        return;
    default:
        hrd_debug("%s: %s", d->name, hrd_verbs_event_name(ev->event_type));
        return;
    }
}

static void read_events(struct vlink *l)
{
    struct ibv_async_event ev;
    for (unsigned i = 0; i < 64 && l->state != V_BROKEN && l->dev.v->next_async_event(l->c->ctx, &ev) == 0;
         i++)
        on_event(l, &ev);
}

void hrd_vlink_events(struct hrd_pollable *p, uint32_t events)
{
    struct vlink *l = (struct vlink *)((char *)p - offsetof(struct vlink, events));
    (void)events;
    if (l->state == V_BROKEN)
        return;
    read_events(l);
    if (l->state == V_DRAINING)
        hrd_vlink_drain(l);
}
