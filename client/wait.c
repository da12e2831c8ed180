/* SPDX-License-Identifier: MIT */
/* From the daemon's done word to a result. */
#include <stdio.h>
#include <sched.h>
#include <string.h>

#include "client/comm.h"
#include "client/futex.h"
#include "client/gpu.h"
#include "client/spin.h"
#include "proto/status.h"

/* A waiter first looks again and again, giving up its core at each look, where that pays (spin.h): bounded, once a wait. */
#define SPIN_NS (200 * HCL_MS / 1000)
#define AWAY_NS (5 * HCL_MS / 1000) /* a core given up comes back within this, unless another took it */
#define LOOKS_PER_YIELD 32
#define CHECK_NS (500 * HCL_MS) /* how long a waiter sleeps before it looks after daemon and comm */
#define PASS_NS (HCL_MS / 50)   /* between looks at a stream that has only its copies left */
#define FEED_NS (HCL_MS)        /* ... while it also feeds ops other than its own */
bool hcl_op_over(struct hcl_comm *comm, uint64_t number, uint64_t *chunks, struct hcl_outcome *outcome)
{
    unsigned slot = number % HRP_OP_SLOTS;
    uint64_t done = atomic_load_explicit(&comm->area->flags[slot].done, memory_order_acquire);
    *chunks = 0;
    if (done == HRP_FLAG_POISON || done < hrp_flag(number, 0))
        return false; /* poison: the context knows more */
    *chunks = done & HRP_CHUNK_ALL;
    if (done >> HRP_CHUNK_BITS == number && *chunks != HRP_CHUNK_ALL)
        return false;
    const volatile struct hrp_completion *c = &comm->area->completion[slot];
    uint32_t status = c->status, len = c->text_len;
    outcome->text[0] = 0;
    if (done >> HRP_CHUNK_BITS != number || c->op != number || status >= HRP_NSTATUS ||
        status == HRP_IN_PROGRESS || len > HRP_OP_TEXT) {
        outcome->result = HCLIENT_PROTOCOL;
        snprintf(outcome->text, sizeof(outcome->text), "the hreduced daemon wrote a malformed completion");
        return true;
    }
    outcome->result = (hclient_result_t)status;
    if (status != HRP_OK) {
        memcpy(outcome->text, comm->area->completion[slot].text, len);
        outcome->text[len] = 0;
    }
    return true;
}

/* ----------------------------------------------------------------------------------------- the verdict */

/* Ends the comm when nothing better can come: no op of it waits longer than this allows. */
static void check_end(struct hcl_comm *comm)
{
    uint32_t verdict = atomic_load_explicit(&comm->verdict, memory_order_acquire);
    if (verdict != 0) {
        hcl_comm_end(comm, verdict, ""); /* the op was posted while the comm ended */
        return;
    }
    if (hcl_context_lost(comm->ctx)) {
        hcl_comm_end(comm, hcl_context_lost(comm->ctx), comm->ctx->lost_text);
        return;
    }
    if (atomic_load(&comm->destroying)) {
        hcl_comm_end(comm, HRP_ABORTED, "the communicator was destroyed while an op was waited for");
        return;
    }
    bool aborted = atomic_load(&comm->aborted);
    if (!aborted && atomic_load_explicit(&comm->area->state, memory_order_acquire) != HRP_COMM_FAILED)
        return;
    uint64_t now = hcl_now(), since = 0;
    if (atomic_compare_exchange_strong(&comm->ending_since, &since, now) || now - since < HCL_LET_GO_NS)
        return;
    char text[HRP_COMM_TEXT + 1];
    uint32_t status = hcl_comm_state(comm, text, sizeof(text));
    hcl_comm_end(comm, status, text);
}

/* --------------------------------------------------------------------------------------------- waiting */

struct look {
    bool complete;
    bool staged;
    bool fed;
    bool gpu;
    bool over; /* the daemon is done; of a stream it is awaited that it passes */
    bool left; /* ... but none has taken the output: deferred, and the caller waits by itself */
    uint64_t bytes;
};

/* Under lock: result and sentence of an op among the failures that are kept; `otherwise` when it is not. */
static hclient_result_t kept_failure(struct hcl_comm *comm, uint64_t number, hclient_result_t otherwise,
                                     const char **text)
{
    uint64_t n = comm->nfailures < HCL_FAILURES ? comm->nfailures : HCL_FAILURES;
    for (uint64_t i = 0; i < n; i++)
        if (comm->failures[i].number == number) {
            *text = comm->failures[i].text;
            return comm->failures[i].result;
        }
    return otherwise;
}

static struct look look_at(struct hcl_comm *comm, uint64_t number)
{
    struct hcl_op *op = &comm->ops[number % HRP_OP_SLOTS];
    struct look look = {.complete = true};
    struct hcl_outcome outcome;
    outcome.result = HCLIENT_OK;
    uint64_t chunks;
    bool over = false;
    pthread_mutex_lock(&comm->lock);
    if (op->number == number && !op->complete) {
        look.staged = op->staged;
        look.fed = op->staged && atomic_load_explicit(&op->in, memory_order_relaxed) == op->nchunks;
        look.bytes = hrp_sig_bytes(&op->sig, comm->nranks);
        look.complete = false;
        look.gpu = op->gpu;
        look.left = op->deferred;
        look.over = !op->staged && hcl_op_over(comm, number, &chunks, &outcome);
        over = look.over && (!op->gpu || hcl_gpu_passed(comm, number));
    }
    pthread_mutex_unlock(&comm->lock);
    if (over) {
        hcl_op_complete(comm, number, outcome.result, outcome.text);
        look.complete = true;
    }
    return look;
}

static void sleep_on(struct hrp_op_flags *flags, uint64_t seen, uint64_t ns)
{
    atomic_store_explicit(&flags->waiting, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&flags->done, memory_order_seq_cst) == seen)
        hcl_futex_wait(hcl_low_word(&flags->done), (uint32_t)seen, ns);
}

static void sleep_for_turn(struct hcl_stage *stage, uint32_t seen)
{
    atomic_fetch_add(&stage->sleepers, 1);
    if (atomic_load(&stage->turns) == seen)
        hcl_futex_wait(&stage->turns, seen, CHECK_NS);
    atomic_fetch_sub(&stage->sleepers, 1);
}

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static enum hcl_spin_end spin_on(const struct hrp_op_flags *flags, uint64_t seen)
{
    uint64_t now = hcl_now(), begin = now, end = now + SPIN_NS, away = 0;
    do {
        for (int i = 0; i < LOOKS_PER_YIELD; i++) {
            if (atomic_load_explicit(&flags->done, memory_order_relaxed) != seen)
                return HCL_SPIN_SAW;
            relax();
        }
        uint64_t given_up = hcl_now();
        sched_yield();
        now = hcl_now();
        if (now - given_up > AWAY_NS)
            away += now - given_up;
    } while (now < end);
    return away > (now - begin) / 4 ? HCL_SPIN_VAIN : HCL_SPIN_FREE;
}

/* One round: look, move staged bytes, sleep. True: the op is complete. */
static bool wait_round(struct hcl_comm *comm, uint64_t number, bool *spun)
{
    struct hcl_stage *stage = &comm->stage;
    /* What is slept on is read before it is looked at, so that no change falls in between. */
    uint64_t front = atomic_load(&stage->front);
    uint32_t turns = atomic_load(&stage->turns);
    struct hrp_op_flags *own = &comm->area->flags[number % HRP_OP_SLOTS];
    struct hrp_op_flags *first = &comm->area->flags[front % HRP_OP_SLOTS];
    uint64_t own_seen = atomic_load_explicit(&own->done, memory_order_acquire);
    uint64_t first_seen = atomic_load_explicit(&first->done, memory_order_acquire);

    enum hcl_stage_turn turn = atomic_load(&stage->live) > 0 ? hcl_stage_progress(comm) : HCL_STAGE_IDLE;
    struct look look = look_at(comm, number);
    if (look.complete)
        return true;
    hcl_group_flush();
    if (atomic_load(&comm->ctx->deferred) > 0)
        hcl_doorbell_now(comm->ctx); /* the op may be part of another thread's group */
    check_end(comm);
    if (turn >= HCL_STAGE_MOVED || atomic_load_explicit(&comm->verdict, memory_order_acquire) != 0)
        return false;
    if (look.left && look.over) {
        hcl_gpu_take(comm, number);
    } else if (look.gpu && look.over) {
        struct timespec ts = hcl_timespec(PASS_NS);
        nanosleep(&ts, NULL);
    } else if (look.staged && turn == HCL_STAGE_BUSY) {
        sleep_for_turn(stage, turns);
    } else if (look.staged && !look.fed) {
        /* Only room in the window helps, which the oldest op frees. (It changed: look again.) */
        if (front != 0 && front == atomic_load(&stage->front))
            sleep_on(first, first_seen, CHECK_NS);
    } else {
        bool looked = *spun;
        *spun = true;
        if (!looked && hcl_spin_pays(&comm->spin, look.bytes))
            hcl_spin_ended(&comm->spin, look.bytes, spin_on(own, own_seen));
        else
            sleep_on(own, own_seen, atomic_load(&stage->unfed) > 0 ? FEED_NS : CHECK_NS);
    }
    return false;
}

void hcl_wait_complete(struct hcl_comm *comm, uint64_t number)
{
    struct hcl_stage *stage = &comm->stage;
    if (atomic_load(&stage->live) == 0 && look_at(comm, number).complete)
        return;
    hcl_group_flush();
    atomic_fetch_add(&stage->feeders, 1);
    bool spun = false;
    while (!wait_round(comm, number, &spun))
        ;
    atomic_fetch_sub(&stage->feeders, 1);
    if (atomic_load(&stage->unfed) > 0 && !atomic_load(&comm->ctx->feeding))
        hcl_watcher_wake(comm->ctx); /* nobody feeds the others now */
}

/* ------------------------------------------------------------------------------------------ the calls */

/* The result of a complete op, its sentence the thread's. */
static hclient_result_t result_of(struct hcl_comm *comm, uint64_t number)
{
    const struct hcl_op *op = &comm->ops[number % HRP_OP_SLOTS];
    const char *text = "";
    pthread_mutex_lock(&comm->lock);
    hclient_result_t r = op->number == number ? op->result : HCLIENT_OK;
    if (r != HCLIENT_OK || op->number != number)
        r = kept_failure(comm, number, r, &text);
    bool lost = r == HCLIENT_OK && op->number != number && number <= comm->forgotten;
    if (r != HCLIENT_OK)
        hcl_say("%s", text);
    pthread_mutex_unlock(&comm->lock);
    if (lost)
        return hcl_fail(
            HCLIENT_INVALID_ARGUMENT,
            "the result of op %llu is too old to tell: %d ops failed after it; wait for ops sooner",
            (unsigned long long)number, HCL_FAILURES);
    return r;
}

hclient_result_t hcl_op_enter(hclient_op_t op, const char *call, struct hcl_comm **comm)
{
    hclient_result_t r = hcl_comm_enter(op.comm, call, comm);
    if (r != HCLIENT_OK)
        return r;
    uint64_t posted = atomic_load_explicit(&(*comm)->posted, memory_order_acquire);
    if (op.number <= posted)
        return HCLIENT_OK;
    hcl_handle_put(op.comm);
    return hcl_fail(HCLIENT_INVALID_ARGUMENT, "%s: op %llu was never posted; the last one is %llu", call,
                    (unsigned long long)op.number, (unsigned long long)posted);
}

hclient_result_t hclient_wait(hclient_op_t op)
{
    HCL_ENTER();
    if (op.number == 0)
        return HCLIENT_OK;
    struct hcl_comm *comm;
    hclient_result_t r = hcl_op_enter(op, "hclient_wait", &comm);
    if (r != HCLIENT_OK)
        return r;
    hcl_wait_complete(comm, op.number);
    r = result_of(comm, op.number);
    hcl_handle_put(op.comm);
    return r;
}

hclient_result_t hclient_test(hclient_op_t op)
{
    HCL_ENTER();
    if (op.number == 0)
        return HCLIENT_OK;
    struct hcl_comm *comm;
    hclient_result_t r = hcl_op_enter(op, "hclient_test", &comm);
    if (r != HCLIENT_OK)
        return r;
    if (atomic_load(&comm->stage.live) > 0)
        hcl_stage_progress(comm);
    struct look look = look_at(comm, op.number);
    if (!look.complete && look.over && look.left)
        hcl_gpu_take(comm, op.number);
    if (!look.complete)
        check_end(comm);
    r = look_at(comm, op.number).complete ? result_of(comm, op.number) : HCLIENT_IN_PROGRESS;
    hcl_handle_put(op.comm);
    return r;
}

hclient_result_t hclient_comm_wait(hclient_comm_t handle)
{
    HCL_ENTER();
    struct hcl_comm *comm;
    hclient_result_t r = hcl_comm_enter(handle, "hclient_comm_wait", &comm);
    if (r != HCLIENT_OK)
        return r;
    uint64_t posted = atomic_load_explicit(&comm->posted, memory_order_acquire);
    uint64_t first = posted > HRP_OP_SLOTS ? posted - HRP_OP_SLOTS + 1 : 1;
    for (uint64_t k = first; k <= posted; k++)
        hcl_wait_complete(comm, k);
    pthread_mutex_lock(&comm->lock);
    uint64_t failed = comm->first_failure;
    comm->first_failure = 0;
    pthread_mutex_unlock(&comm->lock);
    r = failed != 0 ? result_of(comm, failed) : HCLIENT_OK;
    hcl_handle_put(handle);
    return r;
}
