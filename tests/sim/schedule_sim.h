/* SPDX-License-Identifier: MIT */
/*
 * Runs the schedules of all nodes of one unit without daemons. What a step does to data is the caller's; this
 * file keeps the order: a step runs when what it waits for is finished, and of all that could happen next one
 * thing is drawn at random. A send takes three events (begin, end, arrival), so that whatever may happen while
 * a message is on its way does happen in some run.
 */
#ifndef TESTS_SCHEDULE_SIM_H
#define TESTS_SCHEDULE_SIM_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "daemon/schedule.h"

struct sim {
    uint32_t n;
    struct hrd_schedule **sched; /* [n] */
    const struct sim_ops *ops;
    void *ctx;
    uint64_t rng;
    uint32_t **waits; /* [n][nsteps] */
    uint8_t **done;   /* [n][nsteps] */
    struct sim_event *events;
    uint32_t nevents, cap;
    uint64_t executed;
};

struct sim_ops {
    /* LOCAL, FOLD, STORE, FUSED. */
    void (*engine)(struct sim *sim, uint32_t node, uint32_t step);
    /* A send starts (take a copy for the peer's step `recv`) and ends (the source must still be the same). */
    void (*send_begin)(struct sim *sim, uint32_t node, uint32_t step, uint32_t peer, uint32_t recv);
    void (*send_end)(struct sim *sim, uint32_t node, uint32_t step, uint32_t peer, uint32_t recv);
    /* The copy lies in the slot. */
    void (*arrive)(struct sim *sim, uint32_t node, uint32_t recv);
};

enum sim_what { SIM_RUN, SIM_SEND_END, SIM_ARRIVE };

struct sim_event {
    uint32_t node, step;
    uint8_t what;
};

static inline uint64_t sim_random(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* The RECV step at the peer that a SEND step ends in. */
static inline uint32_t sim_recv_of(const struct sim *sim, uint32_t node, uint32_t step)
{
    const struct hrd_step *send = &sim->sched[node]->steps[step];
    const struct hrd_schedule *peer = sim->sched[send->peer];
    assert_true(send->tag < peer->recvs[node].count);
    return peer->list[peer->recvs[node].first + send->tag];
}

static inline void sim_push(struct sim *sim, uint32_t node, uint32_t step, enum sim_what what)
{
    if (sim->nevents == sim->cap) {
        sim->cap = sim->cap ? sim->cap * 2 : 256;
        sim->events = realloc(sim->events, sim->cap * sizeof(*sim->events));
        assert_non_null(sim->events);
    }
    sim->events[sim->nevents++] = (struct sim_event){node, step, (uint8_t)what};
}

static inline void sim_done(struct sim *sim, uint32_t node, uint32_t step)
{
    const struct hrd_schedule *s = sim->sched[node];
    assert_false(sim->done[node][step]);
    sim->done[node][step] = 1;
    sim->executed++;
    for (uint32_t i = 0; i < s->steps[step].succ_count; i++) {
        uint32_t next = s->list[s->steps[step].succ_first + i];
        assert_true(sim->waits[node][next] > 0);
        if (--sim->waits[node][next] == 0)
            sim_push(sim, node, next, SIM_RUN);
    }
}

static inline void sim_event_run(struct sim *sim, struct sim_event e)
{
    const struct hrd_step *step = &sim->sched[e.node]->steps[e.step];
    if (e.what == SIM_ARRIVE) {
        sim->ops->arrive(sim, e.node, e.step);
        sim_done(sim, e.node, e.step);
    } else if (e.what == SIM_SEND_END) {
        uint32_t recv = sim_recv_of(sim, e.node, e.step);
        sim->ops->send_end(sim, e.node, e.step, step->peer, recv);
        sim_push(sim, step->peer, recv, SIM_ARRIVE);
        sim_done(sim, e.node, e.step);
    } else if (step->kind == HRD_STEP_SEND) {
        sim->ops->send_begin(sim, e.node, e.step, step->peer, sim_recv_of(sim, e.node, e.step));
        sim_push(sim, e.node, e.step, SIM_SEND_END);
    } else {
        sim->ops->engine(sim, e.node, e.step);
        sim_done(sim, e.node, e.step);
    }
}

/* Returns the number of steps of all nodes. */
static inline uint64_t sim_begin(struct sim *sim)
{
    uint64_t total = 0;
    sim->nevents = 0;
    sim->executed = 0;
    sim->waits = calloc((size_t)sim->n + 1, sizeof(*sim->waits));
    sim->done = calloc((size_t)sim->n + 1, sizeof(*sim->done));
    for (uint32_t i = 0; i < sim->n; i++) {
        const struct hrd_schedule *s = sim->sched[i];
        total += s->nsteps;
        sim->waits[i] = calloc(s->nsteps, sizeof(**sim->waits));
        sim->done[i] = calloc(s->nsteps, sizeof(**sim->done));
        for (uint32_t k = 0; k < s->nsteps; k++) {
            sim->waits[i][k] = s->steps[k].nwait;
            if (s->steps[k].nwait == 0 && s->steps[k].kind != HRD_STEP_RECV)
                sim_push(sim, i, k, SIM_RUN);
        }
    }
    return total;
}

static inline void sim_end(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->n; i++) {
        free(sim->waits[i]);
        free(sim->done[i]);
    }
    free(sim->waits);
    free(sim->done);
    free(sim->events);
    sim->events = NULL;
    sim->cap = 0;
}

/* Runs the unit until nothing can happen any more; returns the number of steps that never ran (a deadlock). */
static inline uint64_t sim_run(struct sim *sim)
{
    uint64_t total = sim_begin(sim);
    while (sim->nevents > 0) {
        uint32_t pick = (uint32_t)(sim_random(&sim->rng) % sim->nevents);
        struct sim_event e = sim->events[pick];
        sim->events[pick] = sim->events[--sim->nevents];
        sim_event_run(sim, e);
    }
    sim_end(sim);
    return total - sim->executed;
}

/* What the wire sees when every message takes one tick, however many there are, and engines take none. */
struct sim_ticks {
    uint32_t ticks;
    uint32_t max_senders;   /* to one node at a time */
    uint32_t max_receivers; /* of one node at a time */
    uint32_t max_peers;     /* that one node sends to or receives from at a time */
};

/* Counts what goes on in one tick; talk[from * n + to] says who sends to whom. */
static inline void sim_count_talk(struct sim_ticks *t, const uint8_t *talk, uint32_t n)
{
    t->ticks++;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t to = 0, from = 0, both = 0;
        for (uint32_t p = 0; p < n; p++) {
            uint32_t out = talk[i * n + p], in = talk[p * n + i];
            to += out;
            from += in;
            both += out | in;
        }
        t->max_receivers = to > t->max_receivers ? to : t->max_receivers;
        t->max_senders = from > t->max_senders ? from : t->max_senders;
        t->max_peers = both > t->max_peers ? both : t->max_peers;
    }
}

static inline struct sim_ticks sim_lockstep(struct sim *sim)
{
    struct sim_ticks t = {0};
    uint8_t *talk = calloc((size_t)sim->n * sim->n, 1); /* [from][to] in this tick */
    struct sim_event *sent = NULL, *next;
    uint32_t nsent = 0;
    sim_begin(sim);
    for (;;) {
        nsent = 0;
        for (size_t i = 0; i < (size_t)sim->n * sim->n; i++)
            talk[i] = 0;
        while (sim->nevents > 0) {
            struct sim_event e = sim->events[--sim->nevents];
            const struct hrd_step *step = &sim->sched[e.node]->steps[e.step];
            if (step->kind != HRD_STEP_SEND) {
                sim_done(sim, e.node, e.step);
                continue;
            }
            next = realloc(sent, (nsent + 1) * sizeof(*sent));
            assert_non_null(next);
            sent = next;
            sent[nsent++] = e;
            talk[e.node * sim->n + step->peer] = 1;
        }
        if (nsent == 0)
            break;
        sim_count_talk(&t, talk, sim->n);
        for (uint32_t i = 0; i < nsent; i++) {
            uint32_t peer = sim->sched[sent[i].node]->steps[sent[i].step].peer;
            sim_done(sim, peer, sim_recv_of(sim, sent[i].node, sent[i].step));
            sim_done(sim, sent[i].node, sent[i].step);
        }
    }
    sim_end(sim);
    free(sent);
    free(talk);
    return t;
}

#endif
