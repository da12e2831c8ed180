/* SPDX-License-Identifier: MIT */
/*
 * Questions wait for the agent's snapshot; the answer is then put together from it and from what the control
 * thread knows. A user sees the sessions and communicators of that user; root and the daemon's own user see all.
 */
#include "daemon/status.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/session.h"
#include "daemon/version.h"

/* hreducectl waits 5 s. */
#define ANSWER_MS 4000
#define MAX_PENDING 16

enum question_kind { Q_STATUS, Q_PATH, Q_LOG };

struct question {
    struct question *next;
    struct hrd_daemon *d;
    uint64_t token;
    enum question_kind kind;
    uint64_t sid, cookie; /* who asks; Q_LOG: nobody */
    uint64_t comm;        /* Q_PATH: 0 means all that the asker may see */
    uv_timer_t timer;
};

static struct question *questions;
static uint64_t next_token;

/* ---- questions -------------------------------------------------------------------------------------------- */

static void on_question_closed(uv_handle_t *handle)
{
    free(handle->data);
}

static void drop(struct question *q)
{
    struct question **at = &questions;
    while (*at != q)
        at = &(*at)->next;
    *at = q->next;
    uv_close((uv_handle_t *)&q->timer, on_question_closed);
}

static void on_late(uv_timer_t *timer)
{
    struct question *q = timer->data;
    struct hrd_session *s = hrd_session_find(q->d, q->sid);
    if (s)
        hrd_session_error(s, q->cookie, HRP_UNRESPONSIVE, HRP_SCOPE_NONE,
                          "the agent of the daemon has not answered for %d s: it is stuck; see its log",
                          ANSWER_MS / 1000);
    drop(q);
}

static unsigned pending_of(const struct hrd_daemon *d, uint64_t sid)
{
    unsigned n = 0;
    for (const struct question *q = questions; q; q = q->next)
        n += q->d == d && q->sid == sid;
    return n;
}

static void ask(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, enum question_kind kind,
                uint64_t comm)
{
    uint64_t sid = s ? s->sid : 0;
    struct question *q = NULL;
    if (s && pending_of(d, sid) >= MAX_PENDING) {
        hrd_session_error(s, cookie, HRP_RESOURCE, HRP_SCOPE_NONE,
                          "%d questions of this process are waiting for their answers already", MAX_PENDING);
        return;
    }
    q = calloc(1, sizeof(*q));
    if (!q || uv_timer_init(d->loop, &q->timer) != 0) {
        free(q);
        if (s)
            hrd_session_error(s, cookie, HRP_RESOURCE, HRP_SCOPE_NONE, "the daemon is out of memory");
        return;
    }
    q->d = d;
    q->token = ++next_token;
    q->kind = kind;
    q->sid = sid;
    q->cookie = cookie;
    q->comm = comm;
    q->timer.data = q;
    q->next = questions;
    questions = q;
    uv_timer_start(&q->timer, on_late, ANSWER_MS, 0);
    hrd_agent_query(d->agent, q->token);
}

void hrd_status_reply(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie)
{
    ask(d, s, cookie, Q_STATUS, 0);
}

void hrd_path_reply(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, uint32_t slot)
{
    if (!hrd_session_segment(s)) { /* hreducectl has no slots: all communicators */
        ask(d, s, cookie, Q_PATH, 0);
        return;
    }
    uint64_t comm = hrd_member_comm_of_slot(d, s, slot);
    if (comm == 0) {
        hrd_session_error(s, cookie, HRP_INVALID_ARGUMENT, HRP_SCOPE_NONE,
                          "slot %u belongs to no communicator yet", slot);
        return;
    }
    ask(d, s, cookie, Q_PATH, comm);
}

void hrd_path_log(struct hrd_daemon *d, uint64_t comm)
{
    ask(d, NULL, 0, Q_LOG, comm);
}

void hrd_status_stop(struct hrd_daemon *d)
{
    struct question *next;
    for (struct question *q = questions; q; q = next) {
        next = q->next;
        if (q->d == d)
            drop(q);
    }
}

/* ---- joining what the parts know -------------------------------------------------------------------------- */

struct asker {
    uid_t uid;
    bool all;
};

static struct asker asker_of(const struct hrd_session *s)
{
    return (struct asker){.uid = s->uid, .all = s->uid == 0 || s->uid == geteuid()};
}

/* Takes out what belongs to other users; steals array. */
static json_t *filter(json_t *array, const struct asker *who)
{
    for (size_t i = json_array_size(array); i > 0 && !who->all; i--) {
        const json_t *uid = json_object_get(json_array_get(array, i - 1), "uid");
        if (uid && json_integer_value(uid) != (json_int_t)who->uid)
            json_array_remove(array, i - 1);
    }
    return array ? array : json_array();
}

static json_t *find_member(const json_t *members, uint64_t comm)
{
    char id[24];
    size_t i;
    json_t *m;
    snprintf(id, sizeof(id), "%016" PRIx64, comm);
    json_array_foreach(members, i, m)
    {
        const char *text = json_string_value(json_object_get(m, "comm"));
        if (text && strcmp(text, id) == 0)
            return m;
    }
    return NULL;
}

static void set_int(json_t *o, const char *key, uint64_t value)
{
    json_object_set_new(o, key, json_integer((json_int_t)value));
}

/* What is counted for each communicator, and for all of them together. */
static void add_counters(json_t *o, const struct hrd_snapshot_comm *c)
{
    set_int(o, "ops_done", c->ops_done);
    set_int(o, "ops_failed", c->ops_failed);
    set_int(o, "bytes", c->bytes);
    set_int(o, "staged_bytes", c->staged_bytes);
    set_int(o, "tx_bytes", c->tx_bytes);
    set_int(o, "rx_bytes", c->rx_bytes);
    json_object_set_new(o, "algorithms", hrd_algorithms_json(c));
}

/* The agent's figures go into the member's object. */
static void add_comm_figures(json_t *m, const struct hrd_snapshot_comm *c)
{
    set_int(m, "nranks", c->nranks);
    set_int(m, "nnodes", c->nnodes);
    set_int(m, "node", c->node);
    set_int(m, "nlocal", c->nlocal);
    json_object_set_new(m, "status", json_string(hrp_status_name(c->status)));
    add_counters(m, c);
    json_object_set_new(m, "op_in_progress",
                        c->op_oldest ? json_integer((json_int_t)c->op_oldest) : json_null());
    json_object_set_new(m, "op_age_ms", c->op_oldest ? json_integer((json_int_t)c->op_age_ms) : json_null());
    json_object_set_new(m, "last_op_age_ms",
                        c->last_op_age_ms != UINT64_MAX ? json_integer((json_int_t)c->last_op_age_ms)
                                                        : json_null());
}

static json_t *comms_json(struct hrd_daemon *d, const struct hrd_snapshot *snap, const struct asker *who)
{
    json_t *members = filter(hrd_members_json(d), who);
    for (uint32_t i = 0; i < snap->ncomms; i++) {
        json_t *m = find_member(members, snap->comm[i].comm);
        if (!m)
            continue;
        add_comm_figures(m, &snap->comm[i]);
        json_object_set_new(m, "path", hrd_path_json(d, snap, &snap->comm[i], m));
    }
    return members;
}

static void add_link_figures(struct hrd_daemon *d, json_t *o, const struct hrd_snapshot_link *l)
{
    json_t *rails = hrd_link_rails_json(d, l->peer, l);
    if (rails)
        json_object_set_new(o, "rails", rails);
    json_object_set_new(o, "transport", json_string(l->transport));
    json_object_set_new(o, "address", json_string(l->detail));
    set_int(o, "streams", l->nstreams);
    set_int(o, "tx_bytes", l->tx_bytes);
    set_int(o, "rx_bytes", l->rx_bytes);
    set_int(o, "tx_frames", l->tx_frames);
    set_int(o, "rx_frames", l->rx_frames);
    set_int(o, "interruptions", l->interruptions);
    set_int(o, "port_downs", l->port_downs);
    set_int(o, "device_events", l->device_events);
}

/* A peer's figures are those of its links together; what cannot be added up is that of the first. */
static void add_peer_figures(json_t *p, const json_t *links)
{
    static const char *const sums[] = {"tx_bytes", "rx_bytes", "tx_frames", "rx_frames"};
    static const char *const firsts[] = {"transport", "address", "streams"};
    const json_t *o;
    size_t i;
    for (unsigned k = 0; k < sizeof(firsts) / sizeof(firsts[0]); k++) {
        json_t *v = json_object_get(json_array_get(links, 0), firsts[k]);
        if (v)
            json_object_set(p, firsts[k], v);
    }
    for (unsigned k = 0; json_array_size(links) > 0 && k < sizeof(sums) / sizeof(sums[0]); k++) {
        json_int_t sum = 0;
        json_array_foreach(links, i, o)
        {
            sum += json_integer_value(json_object_get(o, sums[k]));
        }
        json_object_set_new(p, sums[k], json_integer(sum));
    }
    if (json_array_size(links) > 1)
        json_object_set_new(p, "transport",
                            json_sprintf("%s +%zu", json_string_value(json_object_get(p, "transport")),
                                         json_array_size(links) - 1));
}

static json_t *peers_json(struct hrd_daemon *d, const struct hrd_snapshot *snap)
{
    json_t *peers = hrd_peers_json(d), *p, *o;
    size_t i, j;
    json_array_foreach(peers, i, p)
    {
        json_t *links = json_object_get(p, "links");
        json_array_foreach(links, j, o)
        {
            for (uint32_t k = 0; k < snap->nlinks; k++)
                if ((json_int_t)snap->link[k].peer == json_integer_value(json_object_get(o, "link")))
                    add_link_figures(d, o, &snap->link[k]);
        }
        add_peer_figures(p, links);
    }
    return peers ? peers : json_array();
}

static uint64_t heartbeat_age_ms(const struct hrd_daemon *d)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    uint64_t now = (uint64_t)ts.tv_sec * 1000000000 + (uint64_t)ts.tv_nsec;
    uint64_t beat = hrd_agent_heartbeat(d->agent);
    return beat < now ? (now - beat) / 1000000 : 0;
}

/* From the process's own start, so that nothing has to be kept. */
static double uptime_s(void)
{
    char text[1024];
    struct timespec ts;
    FILE *f = fopen("/proc/self/stat", "re");
    if (!f)
        return 0;
    size_t n = fread(text, 1, sizeof(text) - 1, f);
    fclose(f);
    text[n] = '\0';
    /* Fields are counted behind the name, which may have blanks: start time is the 20th. */
    const char *at = strrchr(text, ')');
    for (int field = 0; at && field < 20; field++)
        at = strchr(at + 1, ' ');
    clock_gettime(CLOCK_BOOTTIME, &ts);
    if (!at)
        return 0;
    double up = (double)ts.tv_sec + (double)ts.tv_nsec / 1e9 -
                (double)strtoull(at, NULL, 10) / (double)sysconf(_SC_CLK_TCK);
    return up > 0 ? up : 0;
}

static json_t *daemon_json(const struct hrd_daemon *d, const struct hrd_snapshot *snap)
{
    char instance[33], listen[640], interface[64];
    for (size_t i = 0; i < sizeof(d->instance); i++)
        snprintf(instance + 2 * i, 3, "%02x", d->instance[i]);
    hrd_config_get(&d->cfg, "listen", listen, sizeof(listen));
    hrd_config_get(&d->cfg, "interface", interface, sizeof(interface));
    return json_pack("{s:s, s:s, s:s, s:i, s:f, s:b, s:s, s:i, s:s, s:b, s:i, s:i, s:s, s:I}", "version",
                     HRD_VERSION, "node", d->node_name, "instance", instance, "pid", (int)getpid(),
                     "uptime_s", uptime_s(), "stopping", d->stopping, "listen", listen, "port",
                     (int)d->cfg.port, "interface", interface, "peers_authenticated", false, "threads",
                     (int)snap->threads, "io_threads", d->tcp_io ? (int)d->cfg.io_threads : 0, "simd",
                     snap->simd, "agent_heartbeat_age_ms", (json_int_t)heartbeat_age_ms(d));
}

static json_t *memory_json(const struct hrd_daemon *d, const struct hrd_snapshot *snap)
{
    struct hrd_session_totals t;
    hrd_sessions_totals(d, &t);
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "arena_bytes", (json_int_t)snap->arena_bytes,
                     "arena_used", (json_int_t)snap->arena_used, "arena_reserved",
                     (json_int_t)snap->arena_reserved, "session_bytes", (json_int_t)t.memory_bytes,
                     "window_bytes", (json_int_t)d->cfg.window_bytes, "max_memory_per_user",
                     (json_int_t)d->cfg.max_memory_per_user);
}

static json_t *clients_json(const struct hrd_daemon *d)
{
    struct hrd_session_totals t;
    hrd_sessions_totals(d, &t);
    return json_pack("{s:i, s:i, s:I, s:I, s:I}", "sessions", (int)hrd_sessions_count(d), "max_sessions",
                     (int)d->cfg.max_sessions, "accepted", (json_int_t)t.accepted, "refused",
                     (json_int_t)t.refused, "faults", (json_int_t)t.faults);
}

static json_t *totals_json(const struct hrd_daemon *d, const struct hrd_snapshot_comm *t)
{
    static const uint64_t bounds[HRD_NTIMES - 1] = HRD_TIME_BOUNDS;
    json_t *o = json_object(), *times = json_array();
    add_counters(o, t);
    set_int(o, "setup_errors", hrd_members_setup_errors(d));
    set_int(o, "communicators_failed", t->failures);
    set_int(o, "time_us", t->time_us);
    json_object_set_new(o, "collectives", hrd_collectives_json(t));
    for (unsigned i = 0; i < HRD_NTIMES; i++)
        json_array_append_new(
            times, json_pack("{s:o, s:I}", "upto_us",
                             i < HRD_NTIMES - 1 ? json_integer((json_int_t)bounds[i]) : json_null(), "ops",
                             (json_int_t)t->time_ops[i]));
    json_object_set_new(o, "times", times);
    return o;
}

/* ---- answers ---------------------------------------------------------------------------------------------- */

static void reply_json(struct hrd_session *s, uint64_t cookie, json_t *doc)
{
    char *text = doc ? json_dumps(doc, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    if (text)
        hrd_session_text(s, cookie, text);
    else
        hrd_session_error(s, cookie, HRP_RESOURCE, HRP_SCOPE_NONE,
                          "the daemon is out of memory for its answer");
    free(text);
    json_decref(doc);
}

static void answer_status(const struct question *q, struct hrd_session *s, const struct hrd_snapshot *snap)
{
    struct hrd_daemon *d = q->d;
    struct asker who = asker_of(s);
    reply_json(s, q->cookie,
               json_pack("{s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "format", 1, "daemon",
                         daemon_json(d, snap), "totals", totals_json(d, &snap->total), "memory",
                         memory_json(d, snap), "clients", clients_json(d), "sessions",
                         filter(hrd_sessions_json(d), &who), "comms", comms_json(d, snap, &who), "peers",
                         peers_json(d, snap), "peer_port", hrd_peer_port_json(d), "gpus", hrd_gpus_json(d)));
}

static void answer_paths(const struct question *q, struct hrd_session *s, const struct hrd_snapshot *snap)
{
    struct asker who = asker_of(s);
    json_t *comms = comms_json(q->d, snap, &who), *paths = json_array(), *m;
    size_t i;
    json_array_foreach(comms, i, m)
    {
        json_t *path = json_object_get(m, "path");
        if (path)
            json_array_append(paths, path);
    }
    json_decref(comms);
    reply_json(s, q->cookie,
               json_pack("{s:i, s:s, s:o}", "format", 1, "node", q->d->node_name, "paths", paths));
}

/* The path of one communicator; NULL when it is gone. */
static json_t *one_path(const struct question *q, const struct hrd_snapshot *snap)
{
    json_t *members = hrd_members_json(q->d), *path = NULL;
    for (uint32_t i = 0; i < snap->ncomms && !path; i++) {
        if (snap->comm[i].comm == q->comm)
            path = hrd_path_json(q->d, snap, &snap->comm[i], find_member(members, q->comm));
    }
    json_decref(members);
    return path;
}

static void log_path(const struct question *q, const struct hrd_snapshot *snap)
{
    char line[2048];
    json_t *path = one_path(q, snap);
    if (!path)
        return;
    hrd_path_line(path, line, sizeof(line));
    hrd_log_event(hrd_path_fell_back(path) ? HRD_LOG_WARNING : HRD_LOG_NOTICE, HRD_MSGID_COMM_PATH, q->comm,
                  "comm %016" PRIx64 " path: %s", q->comm, line);
    json_decref(path);
}

static void answer_path(const struct question *q, struct hrd_session *s, const struct hrd_snapshot *snap)
{
    json_t *path = one_path(q, snap);
    if (path)
        reply_json(s, q->cookie, path);
    else
        hrd_session_error(s, q->cookie, HRP_INVALID_ARGUMENT, HRP_SCOPE_NONE, "the communicator is gone");
}

void hrd_status_event(struct hrd_daemon *d, struct hrd_event *ev)
{
    struct question *q = questions;
    while (q && (q->d != d || q->token != ev->token))
        q = q->next;
    struct hrd_session *s = q ? hrd_session_find(d, q->sid) : NULL;
    if (q && q->kind == Q_LOG)
        log_path(q, ev->snapshot);
    else if (s && q->kind == Q_STATUS)
        answer_status(q, s, ev->snapshot);
    else if (s && q->comm == 0)
        answer_paths(q, s, ev->snapshot);
    else if (s)
        answer_path(q, s, ev->snapshot);
    if (q)
        drop(q);
    hrd_snapshot_free(ev->snapshot);
    ev->snapshot = NULL;
}
