/* SPDX-License-Identifier: MIT */
/* The commands of agent.h: posted by the control thread, run by the agent in order. */
#include "daemon/agent/types.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum command_type {
    CMD_SESSION_ADD,
    CMD_SESSION_END,
    CMD_BUFFER_ADD,
    CMD_BUFFER_DROP,
    CMD_WINDOW_ADD,
    CMD_LINK_UP,
    CMD_LINK_DOWN,
    CMD_LINK_INTERRUPT,
    CMD_LINK_RESUME,
    CMD_COMM_ADD,
    CMD_COMM_FAIL,
    CMD_COMM_LEAVE,
    CMD_QUERY,
    CMD_PROBE,
};

struct command {
    enum command_type type;
    uint64_t sid, comm, bytes;
    uint32_t id; /* buffer, slot, peer, rank or status */
    unsigned rail;
    int16_t gpu; /* buffer */
    int fd;
    bool tell;
    void *base;
    const _Atomic uint32_t *poisoned;
    const struct hrd_transport *tp;
    struct hrd_conn *conn;
    struct hrd_comm_spec *spec; /* owns its arrays */
    char *text;
    struct command *next;
};

static void post(struct hrd_agent *a, const struct command *proto)
{
    struct command *c = xalloc(1, sizeof(*c));
    *c = *proto;
    pthread_mutex_lock(&a->command_lock);
    if (a->command_last)
        a->command_last->next = c;
    else
        a->command_first = c;
    a->command_last = c;
    atomic_store_explicit(&a->command_any, true, memory_order_seq_cst);
    pthread_mutex_unlock(&a->command_lock);
    uint64_t one = 1;
    while (write(a->wake.fd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
}

static char *copy_text(const char *s)
{
    char *t = strdup(s ? s : "");
    if (!t)
        abort();
    return t;
}

static void *copy_array(const void *src, size_t n, size_t size)
{
    void *p = xalloc(n, size);
    memcpy(p, src, n * size);
    return p;
}

/* ---- the control thread's side ---------------------------------------------------------------------------- */

void hrd_agent_session_add(struct hrd_agent *a, uint64_t sid, struct hrp_seg_header *seg, int doorbell,
                           const _Atomic uint32_t *poisoned)
{
    post(a, &(struct command){
                .type = CMD_SESSION_ADD, .sid = sid, .base = seg, .fd = doorbell, .poisoned = poisoned});
}

void hrd_agent_session_end(struct hrd_agent *a, uint64_t sid, const char *why)
{
    post(a, &(struct command){.type = CMD_SESSION_END, .sid = sid, .text = copy_text(why)});
}

void hrd_agent_buffer_add(struct hrd_agent *a, uint64_t sid, uint32_t id, void *base, uint64_t bytes)
{
    post(a, &(struct command){.type = CMD_BUFFER_ADD,
                              .sid = sid,
                              .id = id,
                              .base = base,
                              .bytes = bytes,
                              .gpu = HRD_HOST_MEMORY});
}

void hrd_agent_gpu_buffer_add(struct hrd_agent *a, uint64_t sid, uint32_t id, int16_t gpu, uint64_t device,
                              uint64_t bytes)
{
    post(a, &(struct command){.type = CMD_BUFFER_ADD,
                              .sid = sid,
                              .id = id,
                              .base = (char *)(uintptr_t)device,
                              .bytes = bytes,
                              .gpu = gpu});
}

void hrd_agent_buffer_drop(struct hrd_agent *a, uint64_t sid, uint32_t id)
{
    post(a, &(struct command){.type = CMD_BUFFER_DROP, .sid = sid, .id = id});
}

void hrd_agent_window_add(struct hrd_agent *a, uint64_t sid, uint32_t slot, void *base, uint64_t bytes)
{
    post(a, &(struct command){.type = CMD_WINDOW_ADD, .sid = sid, .id = slot, .base = base, .bytes = bytes});
}

void hrd_agent_link_up(struct hrd_agent *a, uint32_t peer, const char *name, const struct hrd_transport *tp,
                       struct hrd_conn *conn)
{
    post(a,
         &(struct command){.type = CMD_LINK_UP, .id = peer, .text = copy_text(name), .tp = tp, .conn = conn});
}

void hrd_agent_link_down(struct hrd_agent *a, uint32_t peer, const char *why)
{
    post(a, &(struct command){.type = CMD_LINK_DOWN, .id = peer, .text = copy_text(why)});
}

void hrd_agent_link_interrupt(struct hrd_agent *a, uint32_t peer, unsigned rail, const char *why)
{
    post(a, &(struct command){.type = CMD_LINK_INTERRUPT, .id = peer, .rail = rail, .text = copy_text(why)});
}

void hrd_agent_link_resume(struct hrd_agent *a, uint32_t peer, unsigned rail)
{
    post(a, &(struct command){.type = CMD_LINK_RESUME, .id = peer, .rail = rail});
}

void hrd_agent_comm_add(struct hrd_agent *a, const struct hrd_comm_spec *spec)
{
    struct hrd_comm_spec *s = copy_array(spec, 1, sizeof(*spec));
    s->node_of_rank = copy_array(spec->node_of_rank, spec->nranks, sizeof(uint32_t));
    s->peer_of_node = copy_array(spec->peer_of_node, spec->nnodes, sizeof(uint32_t));
    s->local = copy_array(spec->local, spec->nlocal, sizeof(*spec->local));
    char **names = xalloc(spec->nnodes, sizeof(*names));
    for (uint32_t i = 0; i < spec->nnodes; i++)
        names[i] = copy_text(spec->node_name[i]);
    s->node_name = (const char *const *)names;
    post(a, &(struct command){.type = CMD_COMM_ADD, .spec = s});
}

void hrd_agent_comm_fail(struct hrd_agent *a, uint64_t comm, uint32_t status, const char *text,
                         bool tell_peers)
{
    post(a,
         &(struct command){
             .type = CMD_COMM_FAIL, .comm = comm, .id = status, .text = copy_text(text), .tell = tell_peers});
}

void hrd_agent_comm_leave(struct hrd_agent *a, uint64_t comm, uint32_t rank)
{
    post(a, &(struct command){.type = CMD_COMM_LEAVE, .comm = comm, .id = rank});
}

void hrd_agent_query(struct hrd_agent *a, uint64_t token)
{
    post(a, &(struct command){.type = CMD_QUERY, .bytes = token});
}

void hrd_agent_probe(struct hrd_agent *a, uint32_t link, uint64_t token)
{
    post(a, &(struct command){.type = CMD_PROBE, .id = link, .bytes = token});
}

/* ---- the agent's side -------------------------------------------------------------------------------------- */

static void doorbell_ready(struct hrd_pollable *p, uint32_t events)
{
    (void)p;
    (void)events; /* the turn that follows looks at every session's submit counter */
}

static void session_add(struct hrd_agent *a, const struct command *cmd)
{
    struct asession *s = xalloc(1, sizeof(*s));
    s->a = a;
    s->sid = cmd->sid;
    s->seg = cmd->base;
    s->poisoned = cmd->poisoned;
    s->doorbell = (struct hrd_pollable){.ready = doorbell_ready, .fd = cmd->fd};
    s->next = a->sessions;
    a->sessions = s;
    if (hrd_poller_add(&a->poller, &s->doorbell, EPOLLIN | EPOLLET))
        hrd_session_fault(s, "cannot watch the session's doorbell: %s", strerror(errno));
}

static void session_free(struct asession *s)
{
    hrd_poller_del(&s->a->poller, &s->doorbell);
    for (unsigned i = 0; i < BUFFER_BUCKETS; i++)
        while (s->buffer[i]) {
            struct abuffer *b = s->buffer[i];
            s->buffer[i] = b->next;
            free(b);
        }
    free(s);
}

void hrd_agent_end_sessions(struct hrd_agent *a)
{
    a->sessions_to_end = false;
    for (struct asession **ps = &a->sessions; *ps;) {
        struct asession *s = *ps;
        if (!s->ending || s->ranks) {
            ps = &s->next;
            continue;
        }
        *ps = s->next;
        uint64_t sid = s->sid;
        session_free(s);
        /* Last: the control thread then closes the doorbell, and its number may be another session's at once. */
        hrd_agent_emit(a, HRD_EV_SESSION_GONE, sid, 0, 0, 0, NULL);
    }
}

static void session_end(struct hrd_agent *a, const struct command *cmd)
{
    struct asession *s = hrd_agent_session(a, cmd->sid);
    if (!s || s->ending)
        return;
    s->ending = true;
    snprintf(s->why, sizeof(s->why), "%s", cmd->text);
    struct arank *next;
    for (struct arank *r = s->ranks; r; r = next) {
        next = r->next_in_session; /* leaving may unlink r */
        struct acomm *c = r->c;
        hrd_comm_fail(c, HRP_RANK_LOST, true, "rank %u on node %s: %s", r->rank, a->node_name, cmd->text);
        hrd_comm_leave(c, r);
    }
    a->sessions_to_end = true;
}

static void buffer_add(struct hrd_agent *a, const struct command *cmd)
{
    struct asession *s = hrd_agent_session(a, cmd->sid);
    if (!s)
        return;
    struct abuffer *b = xalloc(1, sizeof(*b));
    b->id = cmd->id;
    b->base = cmd->base;
    b->bytes = cmd->bytes;
    b->gpu = cmd->gpu;
    b->next = s->buffer[b->id % BUFFER_BUCKETS];
    s->buffer[b->id % BUFFER_BUCKETS] = b;
    s->seen_submits--; /* a descriptor may be parked for it: look again */
}

static void buffer_drop(struct hrd_agent *a, const struct command *cmd)
{
    struct asession *s = hrd_agent_session(a, cmd->sid);
    if (s && !s->ending && !s->faulted)
        hrd_ingest_session(s); /* ops that were posted before the buffer was freed still have it */
    struct abuffer *b = s ? hrd_session_buffer(s, cmd->id) : NULL;
    if (!b)
        return;
    b->dropping = true;
    hrd_buffer_settle(s, b);
}

/* A unit starts when all of its input is in the window, while up to a chunk at each end still waits to be copied: a window
   below this could wait for itself. */
static uint64_t window_least(const struct acomm *c)
{
    uint64_t row = (uint64_t)c->nranks * 64 * 8; /* the stream's rows, see hrp_stage_slice() */
    if (row < UINT64_C(1) << 20)
        row = UINT64_C(1) << 20;
    return c->env.unit_bytes + 2 * HRP_STAGE_CHUNK + 2 * row;
}

static void window_add(struct hrd_agent *a, const struct command *cmd)
{
    struct asession *s = hrd_agent_session(a, cmd->sid);
    for (struct arank *r = s ? s->ranks : NULL; r; r = r->next_in_session) {
        if (r->slot != cmd->id || r->left)
            continue;
        r->window = cmd->base;
        r->window_bytes = cmd->bytes;
        s->seen_submits--;
        if (cmd->bytes >= window_least(r->c))
            continue;
        struct acomm *c = r->c;
        hrd_comm_fail(c, HRP_RESOURCE, true,
                      "node %s: staging_window is %" PRIu64 " KiB, but units of %" PRIu64
                      " KiB over %u ranks need %" PRIu64 " KiB; raise staging_window there, lower unit_size "
                      "on the root's node, or use hclient_mem_alloc()",
                      a->node_name, cmd->bytes >> 10, c->env.unit_bytes >> 10, c->nranks,
                      window_least(c) >> 10);
        hrd_comm_settle(c);
        return;
    }
}

static int domain_grow(void *ctx, uint64_t off, uint64_t len)
{
    struct alink *l = ctx;
    if (!l->link) /* being taken apart */
        return -1;
    return l->link->tp->expose(l->link, off, hrd_arena_at(l->a->arena, off), len);
}

static void domain_shrink(void *ctx, uint64_t off, uint64_t len)
{
    struct alink *l = ctx;
    if (!l->link)
        return;
    l->link->tp->withdraw(l->link, off, len);
    l->dirty = true;
}

static void link_up(struct hrd_agent *a, const struct command *cmd)
{
    struct alink *l = xalloc(1, sizeof(*l));
    l->a = a;
    l->peer = cmd->id;
    l->probe_slot = HRD_ARENA_NONE;
    snprintf(l->name, sizeof(l->name), "%s", cmd->text);
    l->next = a->links;
    a->links = l;
    l->link = cmd->tp->open(cmd->conn, &a->poller, &hrd_frames_handler, l);
    if (l->link) {
        l->nstreams = l->link->nstreams;
        struct hrd_arena_watch watch = {.grow = domain_grow, .shrink = domain_shrink, .ctx = l};
        if (cmd->tp->caps & HRD_TP_RDMA && hrd_arena_domain_open(a->arena, l->peer, &watch))
            abort(); /* peer numbers are never used again */
        return;
    }
    snprintf(l->why, sizeof(l->why), "the %s link to node %s could not be opened: %s", cmd->tp->name, l->name,
             strerror(errno));
    l->lost = true;
    a->links_to_close = true;
}

static struct alink *find_link(struct hrd_agent *a, uint32_t peer)
{
    struct alink *l = a->links;
    while (l && l->peer != peer)
        l = l->next;
    return l;
}

static void link_interrupt(struct hrd_agent *a, const struct command *cmd)
{
    struct alink *l = find_link(a, cmd->id);
    if (l && l->link && !l->lost && l->link->tp->interrupt)
        l->link->tp->interrupt(l->link, cmd->rail, cmd->text);
}

static void link_resume(struct hrd_agent *a, const struct command *cmd)
{
    struct alink *l = find_link(a, cmd->id);
    if (!l || !l->link || l->lost || !(l->interrupted >> cmd->rail & 1))
        return;
    l->interrupted &= ~(1u << cmd->rail);
    l->link->tp->resume(l->link, cmd->rail);
}

static void link_down(struct hrd_agent *a, const struct command *cmd)
{
    struct alink *l = find_link(a, cmd->id);
    if (!l) { /* it was lost at the same time and LINK_LOST is on its way; the answer is still owed */
        hrd_agent_emit(a, HRD_EV_LINK_GONE, 0, 0, cmd->id, HRP_PEER_LOST, cmd->text);
        return;
    }
    if (!l->lost && !l->dropped)
        snprintf(l->why, sizeof(l->why), "%s", cmd->text);
    l->dropped = true;
    a->links_to_close = true;
}

static void comm_fail(struct hrd_agent *a, const struct command *cmd)
{
    struct acomm *c = hrd_agent_comm(a, cmd->comm);
    if (!c)
        return;
    hrd_comm_fail(c, cmd->id, cmd->tell, "%s", cmd->text);
    hrd_comm_settle(c);
}

static void comm_leave(struct hrd_agent *a, const struct command *cmd)
{
    struct acomm *c = hrd_agent_comm(a, cmd->comm);
    for (uint32_t i = 0; c && i < c->nlocal; i++)
        if (c->local[i].rank == cmd->id) {
            hrd_comm_leave(c, &c->local[i]);
            return;
        }
}

static void snapshot_comm(const struct acomm *c, struct hrd_snapshot_comm *out, uint64_t now)
{
    *out = c->stat;
    out->comm = c->id;
    out->nranks = c->nranks;
    out->nnodes = c->nnodes;
    out->node = c->node;
    out->nlocal = c->nlocal;
    out->status = c->status;
    out->last_op_age_ms = c->last_done_ns ? (now - c->last_done_ns) / 1000000 : UINT64_MAX;
    for (const struct aop *op = c->ops; op; op = op->next)
        if (op->state != OP_DONE && op->start_ns) {
            out->op_oldest = op->op;
            out->op_age_ms = (now - op->start_ns) / 1000000;
            break;
        }
}

static void add_counts(const struct hrd_link *l, struct hrd_snapshot_link *o)
{
    o->tx_bytes += l->tx_bytes;
    o->rx_bytes += l->rx_bytes;
    o->tx_frames += l->tx_frames;
    o->rx_frames += l->rx_frames;
    o->interruptions += l->interruptions;
    o->port_downs += l->port_downs;
    o->device_events += l->device_events;
}

static void snapshot_counts(const struct hrd_link *l, struct hrd_snapshot_link *o)
{
    o->nrails = l->nrails;
    if (l->nrails == 0)
        add_counts(l, o);
    for (unsigned k = 0; k < l->nrails; k++) {
        const struct hrd_link *r = l->rail[k];
        add_counts(r, o);
        snprintf(o->rail[k].detail, sizeof(o->rail[k].detail), "%s", r->detail);
        o->rail[k].tx_bytes = r->tx_bytes;
        o->rail[k].rx_bytes = r->rx_bytes;
    }
}

static void query(struct hrd_agent *a, uint64_t token)
{
    struct hrd_snapshot *s = xalloc(1, sizeof(*s));
    s->arena_bytes = hrd_arena_size(a->arena);
    s->arena_used = hrd_arena_used(a->arena);
    s->threads = a->cfg.threads;
    snprintf(s->simd, sizeof(s->simd), "%s", hrk_level_name(hrk_get_level()));
    for (struct acomm *c = a->comms; c; c = c->next) {
        s->ncomms++;
        s->arena_reserved += c->reserve_send_bytes;
        for (uint32_t n = 0; n < c->nnodes; n++)
            s->arena_reserved += c->reserve_recv_bytes[n];
    }
    for (struct alink *l = a->links; l; l = l->next)
        s->nlinks++;
    for (struct asession *x = a->sessions; x; x = x->next)
        s->nsessions++;
    s->comm = xalloc(s->ncomms, sizeof(*s->comm));
    s->link = xalloc(s->nlinks, sizeof(*s->link));
    uint32_t i = 0;
    s->total = a->gone;
    for (struct acomm *c = a->comms; c; c = c->next) {
        hrd_comm_count(&s->total, &c->stat);
        snapshot_comm(c, &s->comm[i++], a->now);
    }
    i = 0;
    for (struct alink *l = a->links; l; l = l->next) {
        struct hrd_snapshot_link *o = &s->link[i++];
        o->peer = l->peer;
        snprintf(o->name, sizeof(o->name), "%s", l->name);
        if (!l->link)
            continue;
        o->nstreams = l->nstreams;
        snprintf(o->transport, sizeof(o->transport), "%s", l->link->tp->name);
        snprintf(o->detail, sizeof(o->detail), "%s", l->link->detail);
        o->interrupted = l->interrupted != 0;
        snapshot_counts(l->link, o);
        hrd_pools_describe(l, o);
    }
    struct hrd_event *ev = xalloc(1, sizeof(*ev));
    ev->type = HRD_EV_SNAPSHOT;
    ev->token = token;
    ev->snapshot = s;
    hrd_agent_emit_event(a, ev);
}

void hrd_snapshot_free(struct hrd_snapshot *s)
{
    if (!s)
        return;
    free(s->comm);
    free(s->link);
    free(s);
}

static void spec_free(struct hrd_comm_spec *s)
{
    if (!s)
        return;
    for (uint32_t i = 0; i < s->nnodes; i++)
        free((char *)(uintptr_t)s->node_name[i]);
    free((void *)(uintptr_t)s->node_name);
    free((void *)(uintptr_t)s->node_of_rank);
    free((void *)(uintptr_t)s->peer_of_node);
    free((void *)(uintptr_t)s->local);
    free(s);
}

static void run(struct hrd_agent *a, struct command *cmd)
{
    switch (cmd->type) {
    case CMD_SESSION_ADD:
        session_add(a, cmd);
        break;
    case CMD_SESSION_END:
        session_end(a, cmd);
        break;
    case CMD_BUFFER_ADD:
        buffer_add(a, cmd);
        break;
    case CMD_BUFFER_DROP:
        buffer_drop(a, cmd);
        break;
    case CMD_WINDOW_ADD:
        window_add(a, cmd);
        break;
    case CMD_LINK_UP:
        link_up(a, cmd);
        break;
    case CMD_LINK_DOWN:
        link_down(a, cmd);
        break;
    case CMD_LINK_INTERRUPT:
        link_interrupt(a, cmd);
        break;
    case CMD_LINK_RESUME:
        link_resume(a, cmd);
        break;
    case CMD_COMM_ADD:
        hrd_comm_add(a, cmd->spec);
        break;
    case CMD_COMM_FAIL:
        comm_fail(a, cmd);
        break;
    case CMD_COMM_LEAVE:
        comm_leave(a, cmd);
        break;
    case CMD_QUERY:
        query(a, cmd->bytes);
        break;
    case CMD_PROBE:
        hrd_probe_start(a, cmd->id, cmd->bytes);
        break;
    }
}

void hrd_agent_run_commands(struct hrd_agent *a)
{
    pthread_mutex_lock(&a->command_lock);
    struct command *cmd = a->command_first;
    a->command_first = a->command_last = NULL;
    atomic_store_explicit(&a->command_any, false, memory_order_relaxed);
    pthread_mutex_unlock(&a->command_lock);
    while (cmd) {
        struct command *next = cmd->next;
        run(a, cmd);
        spec_free(cmd->spec);
        free(cmd->text);
        free(cmd);
        cmd = next;
    }
}
