/* SPDX-License-Identifier: MIT */
/* The agent's thread: its duty cycle, its queues, and when it sleeps. */
#include "daemon/agent/types.h"

#include "daemon/gpu/engine_dma.h"
#include "daemon/gpu/engine_sm.h"
#include "daemon/thread.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#define TICK_NS UINT64_C(100000000)
/* Idle wakeups keep the heartbeat fresh; four a second are nothing. */
#define SLEEP_MS 250
#define MAX_EVENTS 64
/* Units of a comm in flight: enough for reduce, exchange and broadcast to overlap, few enough that their memory stays in
   cache. */
#define DEPTH 4u
/* Between two looks at what tells nobody when it ends: the words that GPU streams write, copies in flight. */
#define NAP_NS 50000

static void write_eventfd(int fd)
{
    uint64_t one = 1;
    while (write(fd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
}

static void wake_ready(struct hrd_pollable *p, uint32_t events)
{
    (void)events;
    uint64_t n;
    while (read(p->fd, &n, sizeof(n)) < 0 && errno == EINTR)
        ;
}

void hrd_agent_emit_event(struct hrd_agent *a, struct hrd_event *ev)
{
    pthread_mutex_lock(&a->event_lock);
    if (a->event_last)
        a->event_last->next = ev;
    else
        a->event_first = ev;
    a->event_last = ev;
    pthread_mutex_unlock(&a->event_lock);
    write_eventfd(a->event_fd);
}

void hrd_agent_emit(struct hrd_agent *a, enum hrd_event_type type, uint64_t sid, uint64_t comm, uint32_t id,
                    uint32_t status, const char *text)
{
    struct hrd_event *ev = xalloc(1, sizeof(*ev));
    ev->type = type;
    ev->sid = sid;
    ev->comm = comm;
    ev->id = id;
    ev->status = status;
    if (text)
        snprintf(ev->text, sizeof(ev->text), "%s", text);
    hrd_agent_emit_event(a, ev);
}

struct hrd_event *hrd_agent_take_events(struct hrd_agent *a)
{
    uint64_t n;
    while (read(a->event_fd, &n, sizeof(n)) < 0 && errno == EINTR)
        ;
    pthread_mutex_lock(&a->event_lock);
    struct hrd_event *ev = a->event_first;
    a->event_first = a->event_last = NULL;
    pthread_mutex_unlock(&a->event_lock);
    return ev;
}

int hrd_agent_event_fd(const struct hrd_agent *a)
{
    return a->event_fd;
}

uint64_t hrd_agent_heartbeat(const struct hrd_agent *a)
{
    return atomic_load_explicit(&a->heartbeat, memory_order_relaxed);
}

void hrd_agent_arena(const struct hrd_agent *a, void **base, uint64_t *bytes)
{
    *base = hrd_arena_at(a->arena, 0);
    *bytes = hrd_arena_size(a->arena);
}

struct acomm *hrd_agent_comm(struct hrd_agent *a, uint64_t id)
{
    struct acomm *c = a->bucket[id % COMM_BUCKETS];
    while (c && c->id != id)
        c = c->next_in_bucket;
    return c;
}

struct asession *hrd_agent_session(struct hrd_agent *a, uint64_t sid)
{
    struct asession *s = a->sessions;
    while (s && s->sid != sid)
        s = s->next;
    return s;
}

/* ---- one turn -------------------------------------------------------------------------------------------- */

static void look_at_rings(struct hrd_agent *a)
{
    for (struct asession *s = a->sessions; s; s = s->next) {
        if (s->ending || s->faulted)
            continue;
        uint32_t submits = atomic_load_explicit(&s->seg->submits, memory_order_seq_cst);
        if (submits == s->seen_submits)
            continue;
        s->seen_submits = submits;
        a->busy++;
        hrd_ingest_session(s);
    }
}

/* GPU streams ring no doorbell. */
static void look_at_streams(struct hrd_agent *a)
{
    for (struct acomm *c = a->streams ? a->comms : NULL; c; c = c->next) {
        if (!c->streams || !hrd_ingest_ready(c))
            continue;
        a->busy++;
        a->work_to_admit = true;
    }
}

/* Off first: what the sends that end now set going (marks, the next step) must not be queued on a link that is being
   taken apart. */
static void close_link(struct alink *l)
{
    struct hrd_link *link = l->link;
    l->link = NULL;
    if (link)
        link->tp->close(link);
    hrd_probe_link_closed(l);
    hrd_pools_link_closed(l);
    hrd_arena_domain_close(l->a->arena, l->peer); /* nobody outside reaches it any more */
}

static void fail_comms_of(struct alink *l)
{
    for (struct acomm *c = l->a->comms, *next; c; c = next) {
        next = c->next;
        uint32_t node = hrd_frames_node(c, l);
        if (node == HRD_NONE)
            continue;
        if (!l->link)
            c->link[node] = NULL; /* what it might still have sent can no longer arrive */
        hrd_comm_fail(c, HRP_PEER_LOST, true, "%s", l->why);
        hrd_comm_settle(c);
    }
}

/* Another rail's connection is in the hands of the control thread, which lets go of it first: link_down follows. */
static void lose_open_link(struct alink *l)
{
    if (l->told)
        return;
    l->told = true;
    fail_comms_of(l);
    struct hrd_event *ev = xalloc(1, sizeof(*ev));
    ev->type = HRD_EV_LINK_LOST;
    ev->id = l->peer;
    ev->status = HRP_PEER_LOST;
    ev->open = true;
    snprintf(ev->text, sizeof(ev->text), "%s", l->why);
    hrd_agent_emit_event(l->a, ev);
}

static void close_lost_links(struct hrd_agent *a)
{
    a->links_to_close = false;
    for (struct alink **pl = &a->links; *pl;) {
        struct alink *l = *pl;
        bool lent = l->interrupted != 0 && !l->dropped;
        if (l->lost && lent)
            lose_open_link(l);
        if (lent || (!l->lost && !l->dropped)) {
            pl = &l->next;
            continue;
        }
        close_link(l);
        fail_comms_of(l);
        hrd_agent_emit(a, l->dropped ? HRD_EV_LINK_GONE : HRD_EV_LINK_LOST, 0, 0, l->peer, HRP_PEER_LOST,
                       l->why);
        *pl = l->next;
        free(l);
    }
}

static void flush_links(struct hrd_agent *a)
{
    for (struct alink *l = a->links; l; l = l->next) {
        if (!l->dirty)
            continue;
        l->dirty = false;
        if (l->link && !l->lost)
            l->link->tp->flush(l->link);
    }
}

static void poll_links(struct hrd_agent *a)
{
    for (struct alink *l = a->links; l; l = l->next)
        if (l->link && !l->lost && l->link->tp->poll)
            a->busy += l->link->tp->poll(l->link);
}

static void tick(struct hrd_agent *a)
{
    a->next_tick = a->now + TICK_NS;
    for (struct acomm *c = a->comms, *next; c; c = next) {
        next = c->next;
        hrd_comm_tick(c);
    }
    hrd_pools_tick(a);
}

static void beat(struct hrd_agent *a)
{
    a->now = now_ns();
    atomic_store_explicit(&a->heartbeat, a->now, memory_order_relaxed);
    for (struct asession *s = a->sessions; s; s = s->next)
        if (!s->faulted)
            atomic_store_explicit(&s->seg->heartbeat_ns, a->now, memory_order_relaxed);
}

static void poll_engines(struct hrd_agent *a)
{
    for (unsigned i = 0; i < HRD_NENGINES; i++)
        if (a->engine[i])
            a->busy += a->engine[i]->table->poll(a->engine[i]);
}

/* Everything that can be done without waiting. */
static void turn(struct hrd_agent *a)
{
    if (atomic_load_explicit(&a->command_any, memory_order_acquire)) {
        a->busy++;
        hrd_agent_run_commands(a);
    }
    look_at_rings(a);
    poll_links(a);
    look_at_streams(a);
    poll_engines(a);
    if (a->work_to_admit) {
        hrd_pipeline_admit(a);
        poll_engines(a); /* small work was done at once */
    }
    flush_links(a);
    if (a->links_to_close)
        close_lost_links(a);
    if (a->now >= a->next_tick)
        tick(a);
    if (a->sessions_to_end)
        hrd_agent_end_sessions(a);
}

static void set_asleep(struct hrd_agent *a, uint32_t asleep)
{
    for (struct asession *s = a->sessions; s; s = s->next)
        if (!s->faulted)
            atomic_store_explicit(&s->seg->agent_asleep, asleep, memory_order_seq_cst);
}

/* Announces sleep, then looks once more: 1 when something came in between. */
static int anything_new(struct hrd_agent *a)
{
    for (unsigned i = 0; i < HRD_NENGINES; i++)
        if (a->engine[i] && a->engine[i]->table->arm(a->engine[i], 1))
            return 1;
    if (atomic_load_explicit(&a->command_any, memory_order_seq_cst) || a->work_to_admit ||
        a->links_to_close || a->sessions_to_end)
        return 1;
    for (struct asession *s = a->sessions; s; s = s->next)
        if (!s->ending && !s->faulted &&
            atomic_load_explicit(&s->seg->submits, memory_order_seq_cst) != s->seen_submits)
            return 1;
    for (struct alink *l = a->links; l; l = l->next)
        if (l->dirty || (l->link && !l->lost && l->link->tp->arm && l->link->tp->arm(l->link)))
            return 1;
    return a->links_to_close || a->work_to_admit; /* what the links just brought */
}

static void poll_once(struct hrd_agent *a, int timeout_ms)
{
    struct epoll_event ev[MAX_EVENTS];
    int n = epoll_wait(a->poller.epfd, ev, MAX_EVENTS, timeout_ms);
    a->now = now_ns();
    for (int i = 0; i < n; i++) {
        struct hrd_pollable *p = ev[i].data.ptr;
        p->ready(p, ev[i].events);
        a->busy++;
    }
}

static bool ops_pending(const struct hrd_agent *a)
{
    for (const struct acomm *c = a->comms; c; c = c->next)
        if (c->ops || c->failed)
            return true;
    return false;
}

static bool engines_silent(struct hrd_agent *a)
{
    for (unsigned i = 0; i < HRD_NENGINES; i++)
        if (a->engine[i] && a->engine[i]->table->silent && a->engine[i]->table->silent(a->engine[i]))
            return true;
    return false;
}

/* Something will happen of which nobody tells: the agent only naps. */
static bool must_look(struct hrd_agent *a)
{
    return a->streams > 0 || engines_silent(a);
}

static void nap(struct hrd_agent *a)
{
    struct pollfd p = {.fd = a->poller.epfd, .events = POLLIN};
    struct timespec t = {.tv_nsec = NAP_NS};
    ppoll(&p, 1, &t, NULL);
    poll_once(a, 0);
}

static unsigned help_engines(struct hrd_agent *a)
{
    unsigned n = 0;
    for (unsigned i = 0; i < HRD_NENGINES && !n; i++)
        if (a->engine[i])
            n = a->engine[i]->table->help(a->engine[i]);
    return n;
}

static void disarm_engines(struct hrd_agent *a)
{
    for (unsigned i = 0; i < HRD_NENGINES; i++)
        if (a->engine[i])
            a->engine[i]->table->arm(a->engine[i], 0);
}

/* While reduce threads work, the core is theirs: the end of their work wakes the agent. */
static bool engine_busy(const struct hrd_agent *a)
{
    if (a->cfg.spin_always)
        return false;
    for (const struct acomm *c = a->comms; c; c = c->next)
        if (c->works)
            return true;
    return false;
}

/* What a device works on ends soon and rings nobody, and a nap would be a good part of it. */
#define SILENT_SPINS 10u

static uint64_t spin_ns(struct hrd_agent *a)
{
    uint64_t spin = a->cfg.spin_us * UINT64_C(1000);
    return engines_silent(a) ? spin * SILENT_SPINS : spin;
}

/* Between two looks at descriptors: a system call takes about as long as a GPU's word to come here. */
#define LOOK_NS 4000u

/* Only words in memory are awaited, and no frames, which come by system calls. */
static bool awaits_words(struct hrd_agent *a)
{
    for (const struct acomm *c = a->comms; c; c = c->next)
        if (c->nnodes > 1 && c->active)
            return false;
    return must_look(a);
}

static void look_closely(struct hrd_agent *a)
{
    uint64_t end = now_ns() + LOOK_NS;
    do {
        look_at_rings(a);
        look_at_streams(a);
        poll_engines(a);
    } while (!a->busy && now_ns() < end);
}

static void *agent_thread(void *arg)
{
    struct hrd_agent *a = arg;
    uint64_t last_busy = now_ns();
    prctl(PR_SET_TIMERSLACK, (unsigned long)NAP_NS / 10, 0, 0, 0);
    while (!atomic_load_explicit(&a->stop, memory_order_acquire)) {
        a->busy = 0;
        beat(a);
        turn(a);
        poll_once(a, 0);
        if (!a->busy)
            a->busy += help_engines(a);
        if (a->busy) {
            last_busy = a->now;
            continue;
        }
        if (a->now - last_busy < spin_ns(a) && (must_look(a) || !engine_busy(a))) {
            if (awaits_words(a))
                look_closely(a);
            if (a->busy)
                last_busy = a->now;
            else
                sched_yield(); /* whoever has the work we wait for may need this core */
            continue;
        }
        set_asleep(a, 1);
        if (!anything_new(a)) {
            if (must_look(a))
                nap(a);
            else
                poll_once(a, ops_pending(a) ? (int)(TICK_NS / 1000000) : SLEEP_MS);
        }
        disarm_engines(a);
        set_asleep(a, 0);
        if (a->busy)
            last_busy = a->now;
    }
    return NULL;
}

/* ---- start and stop -------------------------------------------------------------------------------------- */

static int open_gpu_engines(struct hrd_agent *a, char *errtext, size_t errlen)
{
    struct hrd_engine *host = a->engine[HRD_ENGINE_HOST];
    hrd_gpus_pin(a->cfg.gpus, hrd_arena_at(a->arena, 0), hrd_arena_size(a->arena));
    a->engine[HRD_ENGINE_DMA] = hrd_engine_dma_new(a->cfg.gpus, host, a->cfg.dma_bytes);
    if (a->engine[HRD_ENGINE_DMA])
        a->engine[HRD_ENGINE_SM] = hrd_engine_sm_new(a->cfg.gpus, host);
    if (a->engine[HRD_ENGINE_SM])
        return 0;
    int err = errno;
    snprintf(errtext, errlen,
             "cannot map %llu bytes for copies from and to GPUs: %s; set dma_memory to what this machine has",
             (unsigned long long)a->cfg.dma_bytes, strerror(err));
    return -err;
}

static int agent_open(struct hrd_agent *a, char *errtext, size_t errlen)
{
    a->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    a->wake = (struct hrd_pollable){.ready = wake_ready, .fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    a->poller.epfd = epoll_create1(EPOLL_CLOEXEC);
    if (a->event_fd < 0 || a->wake.fd < 0 || a->poller.epfd < 0 ||
        hrd_poller_add(&a->poller, &a->wake, EPOLLIN)) {
        int err = errno;
        snprintf(errtext, errlen, "cannot make the agent's descriptors: %s; check the file descriptor limit",
                 strerror(err));
        return -err;
    }
    a->arena = hrd_arena_new(a->cfg.arena_bytes);
    if (!a->arena) {
        int err = errno;
        snprintf(errtext, errlen,
                 "cannot map an arena of %llu bytes: %s; set arena_size to what this machine has",
                 (unsigned long long)a->cfg.arena_bytes, strerror(err));
        return -err;
    }
    a->host = (struct apool){.arena = a->arena, .gpu = HRD_HOST_MEMORY};
    a->engine[HRD_ENGINE_HOST] = hrd_engine_host_new(a->cfg.threads, a->cfg.chunk_bytes, a->wake.fd);
    if (!a->engine[HRD_ENGINE_HOST]) {
        int err = errno;
        snprintf(errtext, errlen,
                 "cannot start %u reduce threads: %s; lower threads or raise the process limit",
                 a->cfg.threads, strerror(err));
        return -err;
    }
    return a->cfg.gpus ? open_gpu_engines(a, errtext, errlen) : 0;
}

static void agent_close(struct hrd_agent *a)
{
    for (unsigned i = HRD_NENGINES; i-- > 0;) /* the host engine works for the others */
        if (a->engine[i])
            a->engine[i]->table->free(a->engine[i]);
    hrd_arena_free(a->arena);
    if (a->poller.epfd >= 0)
        close(a->poller.epfd);
    if (a->wake.fd >= 0)
        close(a->wake.fd);
    if (a->event_fd >= 0)
        close(a->event_fd);
    pthread_mutex_destroy(&a->command_lock);
    pthread_mutex_destroy(&a->event_lock);
    free(a);
}

int hrd_agent_new(struct hrd_agent **out, const struct hrd_agent_config *cfg, char *errtext, size_t errlen)
{
    struct hrd_agent *a = xalloc(1, sizeof(*a));
    a->cfg = *cfg;
    snprintf(a->node_name, sizeof(a->node_name), "%s", cfg->node_name ? cfg->node_name : "?");
    a->cfg.node_name = a->node_name;
    if (!a->cfg.depth)
        a->cfg.depth = DEPTH;
    a->event_fd = a->wake.fd = a->poller.epfd = -1;
    pthread_mutex_init(&a->command_lock, NULL);
    pthread_mutex_init(&a->event_lock, NULL);
    int err = agent_open(a, errtext, errlen);
    if (!err) {
        atomic_store(&a->heartbeat, now_ns());
        err = -hrd_thread_start(&a->thread, agent_thread, a, "hrd-agent");
        if (err)
            snprintf(errtext, errlen, "cannot start the agent's thread: %s", strerror(-err));
    }
    if (err) {
        agent_close(a);
        return err;
    }
    *out = a;
    return 0;
}

void hrd_agent_free(struct hrd_agent *a)
{
    if (!a)
        return;
    atomic_store_explicit(&a->stop, true, memory_order_release);
    write_eventfd(a->wake.fd);
    pthread_join(a->thread, NULL);
    hrd_agent_run_commands(a); /* frees what was posted and never run */
    for (struct alink *l = a->links; l; l = l->next)
        close_link(l); /* before the units go whose payload waits there */
    while (a->comms)
        hrd_comm_free(a->comms);
    hrd_pools_free(a);
    while (a->links) {
        struct alink *l = a->links;
        a->links = l->next;
        free(l);
    }
    while (a->sessions) {
        struct asession *s = a->sessions;
        a->sessions = s->next;
        for (unsigned i = 0; i < BUFFER_BUCKETS; i++)
            while (s->buffer[i]) {
                struct abuffer *b = s->buffer[i];
                s->buffer[i] = b->next;
                free(b);
            }
        free(s);
    }
    while (a->orphans) {
        struct aorphan *o = a->orphans;
        a->orphans = o->next;
        free(o);
    }
    struct hrd_event *ev = hrd_agent_take_events(a);
    while (ev) {
        struct hrd_event *next = ev->next;
        if (ev->snapshot)
            hrd_snapshot_free(ev->snapshot);
        free(ev);
        ev = next;
    }
    agent_close(a);
}
