/* SPDX-License-Identifier: MIT */
/*
 * How one op fails on every rank with the same sentence while the comm lives on. Node 0 of the comm decides:
 *
 *   any node   OP_REPORT  ->  node 0      it must fail, because ...
 *   node 0     OP_ABORT   ->  all         stop it
 *   each node  OP_MARK    ->  all, on every stream: nothing of it follows (its engine work and sends have ended)
 *   each node  OP_ACK     ->  node 0      quiet, all marks are in, slots are free again; missing: these ranks had not posted
 *   node 0     OP_FAILED  ->  all         the final sentence; ranks that posted get it now, late ones when they post
 *
 * A node that completed the op long ago takes part with empty hands. A node that is lost on the way fails the comm, which
 * ends all of this.
 */
#include "daemon/agent/types.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void abort_local(struct acomm *c, uint64_t number, uint32_t status, const char *text);

static struct afail *find_fail(struct acomm *c, uint64_t op)
{
    struct afail *f = c->fails;
    while (f && f->op != op)
        f = f->next;
    return f;
}

static void fail_free(struct acomm *c, struct afail *fail)
{
    struct afail **pf = &c->fails;
    while (*pf != fail)
        pf = &(*pf)->next;
    *pf = fail->next;
    for (uint32_t n = 0; n < c->nnodes; n++)
        free(fail->missing[n]);
    free(fail->missing);
    free(fail);
}

void hrd_abort_free(struct acomm *c)
{
    while (c->fails)
        fail_free(c, c->fails);
}

/* Node 0: starts to fail an op everywhere. */
static void decide(struct acomm *c, uint64_t op, uint32_t status, const char *text)
{
    if (find_fail(c, op))
        return;
    struct afail *f = xalloc(1, sizeof(*f));
    f->op = op;
    f->status = status;
    snprintf(f->text, sizeof(f->text), "%s", text);
    f->missing = xalloc(c->nnodes, sizeof(*f->missing));
    f->next = c->fails;
    c->fails = f;
    struct hrp_frame frame = hrd_frame(c, HRP_FRAME_OP_ABORT, op);
    frame.status = (uint8_t)status;
    hrd_frames_send_all(c, &frame, text);
    abort_local(c, op, status, text);
}

void hrd_abort_report(struct aop *op, uint32_t status, const char *fmt, ...)
{
    struct acomm *c = op->c;
    if (op->reported || c->failed || (op->state != OP_WAITING && op->state != OP_RUNNING))
        return;
    op->reported = true;
    char text[HRP_OP_TEXT];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (c->node == 0) {
        decide(c, op->op, status, text);
        return;
    }
    struct hrp_frame f = hrd_frame(c, HRP_FRAME_OP_REPORT, op->op);
    f.status = (uint8_t)status;
    hrd_frames_send(c, 0, 0, &f, text);
}

/* ---- every node -------------------------------------------------------------------------------------------- */

/* "rank 4 (node b, process 123), rank 5 (...)": local ranks that have not posted. */
static void missing_text(const struct acomm *c, const struct aop *op, char *buf, size_t len)
{
    size_t at = 0;
    buf[0] = '\0';
    for (uint32_t i = 0; i < c->nlocal; i++) {
        if (op && op->post[i].posted)
            continue;
        int n = snprintf(buf + at, len - at, "%srank %u (node %s, process %d)", at ? ", " : "",
                         c->local[i].rank, c->node_name[c->node], c->local[i].pid);
        if (n < 0 || (size_t)n >= len - at)
            return; /* as many as fit */
        at += (size_t)n;
    }
}

static void op_failed(struct acomm *c, uint64_t number, uint32_t status, const char *text)
{
    struct aop *op = hrd_op_find(c, number);
    if (!op || op->state != OP_FAILING || op->final)
        return;
    op->status = status;
    snprintf(op->text, sizeof(op->text), "%s", text);
    op->final = true;
    hrd_work_nan(op); /* hrd_abort_settle() answers when it has ended */
}

static void coordinator_ack(struct acomm *c, uint64_t number, uint32_t node, const char *missing)
{
    struct afail *f = find_fail(c, number);
    if (!f || f->missing[node])
        return;
    f->missing[node] = strdup(missing);
    if (!f->missing[node])
        abort();
    if (++f->nacks < c->nnodes)
        return;
    char text[HRP_OP_TEXT];
    size_t at = (size_t)snprintf(text, sizeof(text), "%s", f->text);
    if (f->status == HRP_TIMEOUT) {
        const char *sep = "; missing: ";
        for (uint32_t n = 0; n < c->nnodes && at < sizeof(text); n++) {
            if (!*f->missing[n])
                continue;
            at += (size_t)snprintf(text + at, sizeof(text) - at, "%s%s", sep, f->missing[n]);
            sep = ", ";
        }
        if (*sep == ';' && at < sizeof(text))
            snprintf(text + at, sizeof(text) - at,
                     "; every rank had posted it, the exchange itself did not finish");
    }
    uint32_t status = f->status;
    fail_free(c, f);
    hrd_log_event(HRD_LOG_WARNING, HRD_MSGID_COMM_FAILED, c->id,
                  "comm %016" PRIx64 ": op failed on all ranks: %s", c->id, text);
    struct hrp_frame frame = hrd_frame(c, HRP_FRAME_OP_FAILED, number);
    frame.status = (uint8_t)status;
    hrd_frames_send_all(c, &frame, text);
    op_failed(c, number, status, text);
}

static void acknowledge(struct acomm *c, uint64_t number, const struct aop *op, uint32_t status)
{
    char missing[HRP_OP_TEXT] = "";
    if (status == HRP_TIMEOUT && number > c->done_wm)
        missing_text(c, op, missing, sizeof(missing));
    if (c->node == 0) {
        coordinator_ack(c, number, 0, missing);
        return;
    }
    struct hrp_frame f = hrd_frame(c, HRP_FRAME_OP_ACK, number);
    hrd_frames_send(c, 0, 0, &f, missing);
}

static void abort_local(struct acomm *c, uint64_t number, uint32_t status, const char *text)
{
    struct aop *done = hrd_op_find(c, number);
    if (number <= c->done_wm || (done && done->state == OP_DONE)) {
        hrd_frames_send_marks(c, HRP_FRAME_OP_MARK, number);
        char none[1] = "";
        if (c->node == 0) {
            coordinator_ack(c, number, 0, none);
        } else {
            struct hrp_frame f = hrd_frame(c, HRP_FRAME_OP_ACK, number);
            hrd_frames_send(c, 0, 0, &f, none);
        }
        return;
    }
    struct aop *op = hrd_op_get(c, number);
    if (!op) {
        hrd_comm_fail(c, HRP_PROTOCOL, true,
                      "op %" PRIu64 " failed on another node while this one is at op %" PRIu64, number,
                      c->done_wm + 1);
        return;
    }
    if (op->state == OP_FAILING || op->state == OP_FAILED)
        return;
    op->state = OP_FAILING;
    op->status = status;
    snprintf(op->text, sizeof(op->text), "%s", text);
}

bool hrd_abort_all_marked(const struct acomm *c, const uint16_t *marks)
{
    for (uint32_t n = 0; n < c->nnodes; n++)
        if (c->link[n] && (!marks || marks[n] != (1u << c->link[n]->nstreams) - 1))
            return false;
    return true;
}

static void settle_failing(struct aop *op)
{
    struct acomm *c = op->c;
    if (!op->marked && op->works == 0 && op->txs == 0) {
        op->marked = true;
        hrd_frames_send_marks(c, HRP_FRAME_OP_MARK, op->op);
    }
    if (op->marked && !op->acked && hrd_abort_all_marked(c, op->marks)) {
        op->acked = true;
        hrd_pipeline_drop_units(op);
        acknowledge(c, op->op, op, op->status);
    }
}

void hrd_abort_settle(struct acomm *c)
{
    for (struct aop *op = c->ops; op && !c->failed; op = op->next)
        if (op->state == OP_FAILING)
            settle_failing(op);
    for (struct aop *op = c->ops; op && !c->failed; op = op->next) {
        if (op->state != OP_FAILING || !op->final || op->works)
            continue;
        op->state = OP_FAILED;
        hrd_complete_error(op, op->status, HRP_SCOPE_OP, op->text);
    }
    hrd_op_advance(c);
}

void hrd_abort_frame(struct acomm *c, uint32_t node, unsigned stream, const struct hrp_frame *f,
                     const char *text)
{
    struct aop *op;
    uint16_t bit = (uint16_t)(1u << stream);
    uint32_t status =
        f->status > HRP_IN_PROGRESS ? f->status : HRP_PROTOCOL; /* a failure never reads as success */
    switch (f->type) {
    case HRP_FRAME_COMM_FAIL:
        hrd_comm_fail(c, status, true, "%s", text);
        return;
    case HRP_FRAME_COMM_MARK:
        c->marks[node] |= bit;
        return;
    default:
        break;
    }
    if (c->failed)
        return;
    switch (f->type) {
    case HRP_FRAME_OP_REPORT:
        if (c->node == 0)
            decide(c, f->op, status, text);
        break;
    case HRP_FRAME_OP_ABORT:
        if (node == 0)
            abort_local(c, f->op, status, text);
        break;
    case HRP_FRAME_OP_ACK:
        if (c->node == 0)
            coordinator_ack(c, f->op, node, text);
        break;
    case HRP_FRAME_OP_FAILED:
        if (node == 0)
            op_failed(c, f->op, status, text);
        break;
    case HRP_FRAME_OP_MARK:
        op = hrd_op_get(c, f->op);
        if (!op)
            break; /* complete here: nothing of it was in flight */
        if (!op->marks)
            op->marks = xalloc(c->nnodes, sizeof(*op->marks));
        op->marks[node] |= bit;
        break;
    default:
        break;
    }
}

/* ---- time -------------------------------------------------------------------------------------------------- */

static void warn_stalled(struct aop *op, uint64_t age_ms)
{
    struct acomm *c = op->c;
    char what[96], missing[HRP_OP_TEXT];
    missing_text(c, op, missing, sizeof(missing));
    hrp_sig_text(&op->sig, what, sizeof(what));
    op->warned = true;
    hrd_log_event(HRD_LOG_WARNING, NULL, c->id,
                  "comm %016" PRIx64 ": op %" PRIu64 " (%s) waits since %" PRIu64 " ms for %s", c->id, op->op,
                  what, age_ms, *missing ? missing : "ranks of other nodes; their daemons name them");
}

void hrd_abort_deadlines(struct acomm *c)
{
    uint64_t now = c->a->now;
    bool told = false; /* what stalls the oldest op stalls those behind it: one line for all */
    for (struct aop *op = c->ops; op && !c->failed; op = op->next) {
        if (!op->start_ns || (op->state != OP_WAITING && op->state != OP_RUNNING))
            continue;
        uint64_t age_ms = now > op->start_ns ? (now - op->start_ns) / 1000000 : 0;
        if (!told && !op->warned && age_ms >= c->a->cfg.stall_warning_ms)
            warn_stalled(op, age_ms);
        told = told || op->warned;
        if (op->deadline_ns && now >= op->deadline_ns) {
            char what[96];
            hrp_sig_text(&op->sig, what, sizeof(what));
            hrd_abort_report(op, HRP_TIMEOUT,
                             "op %" PRIu64 " (%s) did not complete within its deadline of %" PRIu64 " ms",
                             op->op, what, (op->deadline_ns - op->start_ns) / 1000000);
        }
    }
}
