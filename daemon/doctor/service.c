/* SPDX-License-Identifier: MIT */
/*
 * The doctor inside the daemon. A question comes from hreducectl or from another daemon; what it takes is the same for
 * both:
 *
 *   HERE    the checks and facts of this machine, on a thread of libuv's pool: they open devices
 *   DIAL    connections with the daemons at some addresses, then the list of peers
 *   REACH   a TCP connection to the peer's port at each of its addresses, on a thread of the pool
 *   PROBE   the data link with a peer, made if there is none, measured by the agent
 *   LINK    that link and nothing more: whoever of the two dials must want it
 *
 * and for each but DIAL "the peer does it": the question goes to the other daemon as ASK and its TELL is the answer. All
 * questions lie in one list, each with a time limit; who asked may be gone when the answer is there.
 */
#include <errno.h>
#include <jansson.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "daemon/control.h"
#include "daemon/doctor/facts.h"
#include "daemon/gpu/gpu.h"
#include "daemon/log.h"
#include "daemon/peer.h"
#include "daemon/verbs/verbs_api.h"
#include "daemon/version.h"

#define TICK_MS 20u
#define ASK_MS 10000u       /* of a question to another daemon: below HRD_DOCTOR_MS */
#define REACH_MS 2000       /* for all addresses of a peer together */
#define MAX_OF_ONE 4u       /* questions of one asker at a time */
#define MAX_DIALS 64u       /* addresses in one DIAL */
#define MAX_TELL (1u << 18) /* bytes of an answer */

struct ask {
    struct ask *next;
    struct hrd_daemon *d;
    uint64_t id; /* never used again */
    uint64_t sid, cookie;
    uint32_t asker; /* peer that asked, 0: hreducectl (sid) */
    uint64_t asker_token;
    uint64_t began_ns;
    uint32_t what, peer;
    bool back;
    uv_timer_t timer;
    uint64_t deadline; /* uv_now() */
    /* DIAL */
    unsigned dials;
    char *dialed[MAX_DIALS]; /* addresses as they were given */
    json_t *failed;
    /* PROBE, LINK */
    bool wanted; /* the peer was asked for the link, too */
    bool probing;
    uint32_t link;     /* probing: it must not go meanwhile */
    uint64_t retry_at; /* uv_now() */
    char why[400];     /* what the last attempt at the link failed with */
    /* back */
    char *text;
    size_t len;
};

static struct ask *asks;
static uint64_t last_id;

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec ts;
    clock_gettime(clock, &ts);
    return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

/* ---- the list ----------------------------------------------------------------------------------------------- */

static struct ask *find(const struct hrd_daemon *d, uint64_t id)
{
    struct ask *a = asks;
    while (a && (a->d != d || a->id != id))
        a = a->next;
    return a;
}

static void ask_closed(uv_handle_t *h)
{
    free(h->data);
}

static void drop(struct ask *a)
{
    struct ask **at = &asks;
    while (*at != a)
        at = &(*at)->next;
    *at = a->next;
    json_decref(a->failed);
    for (unsigned i = 0; i < MAX_DIALS; i++)
        free(a->dialed[i]);
    free(a->text);
    if (a->probing)
        hrd_link_use(a->d, a->link, -1);
    uv_close((uv_handle_t *)&a->timer, ask_closed);
}

/* To another daemon: the text in parts. */
static void tell(struct ask *a, uint32_t status, const char *text, size_t len)
{
    struct hrp_peer_msg msg = {.type = HRP_PEER_TELL,
                               .body.tell = {.token = a->asker_token,
                                             .status = status,
                                             .took_ns = clock_ns(CLOCK_MONOTONIC) - a->began_ns,
                                             .clock_ns = clock_ns(CLOCK_REALTIME)}};
    if (status != HRP_OK && len > HRP_PEER_TEXT)
        len = HRP_PEER_TEXT;
    do {
        size_t part = len < HRP_PEER_TEXT ? len : HRP_PEER_TEXT;
        msg.body.tell.more = len > part;
        msg.text = text;
        msg.text_len = part;
        hrd_peer_send(a->d, a->asker, &msg);
        text += part;
        len -= part;
    } while (len > 0);
}

/* Ends the question with an error. */
static void refuse(struct ask *a, uint32_t status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void refuse(struct ask *a, uint32_t status, const char *fmt, ...)
{
    char text[HRP_PEER_TEXT];
    struct hrd_session *s = a->asker ? NULL : hrd_session_find(a->d, a->sid);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (a->asker)
        tell(a, status, text, strlen(text));
    else if (s)
        hrd_session_error(s, a->cookie, status, HRP_SCOPE_NONE, "%s", text);
    drop(a);
}

/* Ends the question with an answer, which it takes. */
static void answer(struct ask *a, json_t *doc)
{
    struct hrd_session *s = a->asker ? NULL : hrd_session_find(a->d, a->sid);
    char *text = doc ? json_dumps(doc, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(doc);
    if (!text) {
        refuse(a, HRP_RESOURCE, "the daemon on %s is out of memory for its answer", a->d->node_name);
        return;
    }
    if (a->asker)
        tell(a, HRP_OK, text, strlen(text));
    else if (s)
        hrd_session_text(s, a->cookie, text);
    free(text);
    drop(a);
}

/* ---- HERE and REACH: on a thread of the pool ---------------------------------------------------------------- */

struct job {
    struct job *next;
    uv_work_t work;
    struct hrd_daemon *d;
    uint64_t id; /* of the question */
    struct hrd_config cfg;
    struct hrd_netif *ifs;
    struct hrd_gpu_pair_info *pairs;
    struct hrd_machine machine;
    unsigned naddrs; /* REACH */
    struct hrp_addr addr[HRP_MAX_ADDRS];
    json_t *result;
};

/* Not done yet. Their threads may outlive the daemon's end: what they use is their own. */
static struct job *jobs;

static void job_free(struct job *j)
{
    struct job **at = &jobs;
    while (*at && *at != j)
        at = &(*at)->next;
    if (*at)
        *at = j->next;
    json_decref(j->result);
    free(j->ifs);
    free(j->pairs);
    free(j);
}

static void job_here(uv_work_t *w)
{
    struct job *j = w->data;
    j->result = json_pack("{s:o, s:o}", "facts", hrd_doctor_facts(&j->machine), "checks",
                          hrd_doctor_run(&j->machine));
}

static const char *connect_words(int err)
{
    switch (err) {
    case ECONNREFUSED:
        return "connection refused: no daemon listens there, or a firewall rejects";
    case ETIMEDOUT:
        return "no answer: filtered by a firewall, or the machine is down";
    case EHOSTUNREACH:
    case ENETUNREACH:
        return "no route to it";
    default:
        return strerror(err);
    }
}

/* 0 or errno, before the clock shows `until` (ns). */
static int try_connect(const struct hrp_addr *addr, uint64_t until)
{
    struct sockaddr_storage ss;
    socklen_t len = hrd_addr_to_sockaddr(addr, &ss), errlen = sizeof(int);
    int err = 0,
        fd = socket(addr->family == 6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return errno;
    if (connect(fd, (struct sockaddr *)&ss, len) != 0 && errno != EINPROGRESS) {
        err = errno;
    } else {
        struct pollfd p = {.fd = fd, .events = POLLOUT};
        uint64_t now = clock_ns(CLOCK_MONOTONIC);
        int left = until > now ? (int)((until - now) / 1000000) : 0;
        if (poll(&p, 1, left) <= 0)
            err = ETIMEDOUT;
        else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &errlen) != 0)
            err = errno;
    }
    close(fd);
    return err;
}

static void job_reach(uv_work_t *w)
{
    struct job *j = w->data;
    char text[HRD_ADDR_TEXT + 16];
    j->result = json_array();
    for (unsigned i = 0; i < j->naddrs; i++) {
        uint64_t share = (uint64_t)REACH_MS * 1000000 / j->naddrs;
        int err = try_connect(&j->addr[i], clock_ns(CLOCK_MONOTONIC) + share);
        json_array_append_new(j->result, json_pack("{s:s, s:b, s:s}", "address",
                                                   hrd_addr_port_text(&j->addr[i], text, sizeof(text)), "ok",
                                                   err == 0, "why", err ? connect_words(err) : ""));
    }
}

static void job_done(uv_work_t *w, int status)
{
    struct job *j = w->data;
    struct ask *a = find(j->d, j->id);
    if (a && status == 0 && j->result) {
        answer(a, j->result);
        j->result = NULL;
    } else if (a) {
        refuse(a, HRP_RESOURCE, "the daemon on %s is out of memory for the checks", a->d->node_name);
    }
    job_free(j);
}

/* A copy, because the thread may outlive the GPUs' part of the daemon. */
static void take_pairs(struct job *j)
{
    unsigned n = j->d->gpus ? hrd_gpus_pairs(j->d->gpus, NULL, 0) : 0;
    j->pairs = calloc(n + 1, sizeof(*j->pairs));
    if (j->pairs && n > 0) {
        unsigned now = hrd_gpus_pairs(j->d->gpus, j->pairs, n);
        n = now < n ? now : n;
    }
    j->machine.pairs = j->pairs;
    j->machine.npairs = j->pairs ? n : 0;
}

static void start_job(struct ask *a, uv_work_cb run)
{
    struct hrd_daemon *d = a->d;
    struct hrd_peer_info info;
    struct job *j = calloc(1, sizeof(*j));
    if (!j) {
        refuse(a, HRP_RESOURCE, "the daemon on %s is out of memory", d->node_name);
        return;
    }
    int n = hrd_netif_list(&j->ifs);
    j->d = d;
    j->id = a->id;
    j->cfg = d->cfg;
    j->work.data = j;
    hrd_machine_here(&j->machine, &j->cfg, j->ifs, n > 0 ? (unsigned)n : 0);
    if (d->verbs)
        j->machine.verbs = d->verbs;
    take_pairs(j);
    if (a->peer && hrd_peer_info(d, a->peer, &info)) {
        j->naddrs = info.naddrs;
        memcpy(j->addr, info.addr, info.naddrs * sizeof(info.addr[0]));
    }
    int r = uv_queue_work(d->loop, &j->work, run, job_done);
    if (r == 0) {
        j->next = jobs;
        jobs = j;
    } else {
        job_free(j);
        refuse(a, HRP_SYSTEM, "the daemon on %s cannot start a thread: %s", d->node_name, uv_strerror(r));
    }
}

/* ---- DIAL --------------------------------------------------------------------------------------------------- */

static void add_peer(struct hrd_daemon *d, json_t *list, const struct json_t *known)
{
    struct hrd_peer_info info;
    uint32_t no = (uint32_t)json_integer_value(json_object_get(known, "peer"));
    if (hrd_peer_info(d, no, &info))
        json_array_append_new(list,
                              json_pack("{s:I, s:s, s:s, s:b}", "peer", (json_int_t)no, "name", info.name,
                                        "address", info.where, "answers", info.minor >= HRP_PEER_MINOR_ASK));
}

static void answer_dial(struct ask *a)
{
    json_t *peers = json_array(), *known = hrd_peers_json(a->d), *p;
    size_t i;
    json_array_foreach(known, i, p)
    {
        add_peer(a->d, peers, p);
    }
    json_decref(known);
    answer(a, json_pack("{s:s, s:o, s:O}", "node", a->d->node_name, "peers", peers, "failed", a->failed));
}

static void on_dialed(struct hrd_daemon *d, uint64_t token, uint32_t status, uint32_t no, const char *why)
{
    struct ask *a = find(d, token / MAX_DIALS);
    (void)no;
    if (!a)
        return;
    /* "reached myself": the own address is in many a list of all nodes. */
    if (status != HRP_OK && !(why && strstr(why, "reached myself")))
        json_array_append_new(a->failed, json_pack("{s:s, s:s}", "address", a->dialed[token % MAX_DIALS],
                                                   "why", why ? why : "it does not answer"));
    if (--a->dials == 0)
        answer_dial(a);
}

static void start_dial(struct ask *a, const char *text, size_t len)
{
    char list[8192], *save = NULL;
    struct hrp_addr addr[MAX_DIALS];
    unsigned n = 0;
    if (len >= sizeof(list)) {
        refuse(a, HRP_INVALID_ARGUMENT, "the list of addresses is longer than %zu bytes", sizeof(list) - 1);
        return;
    }
    memcpy(list, text, len);
    list[len] = 0;
    a->failed = json_array();
    for (char *word = strtok_r(list, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        if (n == MAX_DIALS) {
            refuse(a, HRP_INVALID_ARGUMENT, "more than %u addresses", MAX_DIALS);
            return;
        }
        if (hrd_addr_parse(word, 0, &addr[n]) != 0 || hrd_addr_is_any(&addr[n])) {
            refuse(a, HRP_INVALID_ARGUMENT, "one of the addresses is no IP address of another node");
            return;
        }
        a->dialed[n++] = strdup(word);
    }
    if (n == 0) {
        answer_dial(a);
        return;
    }
    a->dials = n;
    for (unsigned i = 0; i < n; i++)
        hrd_peer_dial(a->d, on_dialed, a->id * MAX_DIALS + i, &addr[i], 1, NULL, 0);
}

/* ---- PROBE -------------------------------------------------------------------------------------------------- */

/* The daemon of the two that does not dial can only wait, so the other one has to want the link as well. */
static void want_there(struct ask *a, const uint8_t instance[16])
{
    struct hrp_peer_msg msg = {.type = HRP_PEER_ASK, .body.ask = {.token = a->id, .what = HRP_DOCTOR_LINK}};
    if (a->wanted || a->what != HRP_DOCTOR_PROBE || hrd_peer_dials(a->d, instance))
        return;
    a->wanted = true;
    hrd_peer_send(a->d, a->peer, &msg);
}

static bool waits_for_link(const struct ask *a)
{
    return (a->what == HRP_DOCTOR_PROBE || a->what == HRP_DOCTOR_LINK) && !a->back && !a->probing;
}

/* The link that a communicator without wishes of its own would get. */
static struct hrd_link_want own_want(const struct hrd_config *c)
{
    return (struct hrd_link_want){.transport = c->transport,
                                  .sl = (uint8_t)c->verbs_service_level,
                                  .tc = (uint8_t)c->verbs_traffic_class};
}

/* Waits for the link, then measures. */
static void link_step(struct ask *a)
{
    struct hrd_link_want want = own_want(&a->d->cfg);
    struct hrd_peer_info info;
    uint32_t link = 0;
    if (!waits_for_link(a) || uv_now(a->d->loop) < a->retry_at || !hrd_peer_info(a->d, a->peer, &info))
        return;
    if (hrd_peer_link(a->d, a->peer, &want, &link) != 1) {
        want_there(a, info.instance);
        return;
    }
    if (a->what == HRP_DOCTOR_LINK) {
        answer(a, json_object());
        return;
    }
    a->probing = true;
    a->link = link;
    hrd_link_use(a->d, link, 1);
    hrd_agent_probe(a->d->agent, link, a->id);
}

void hrd_doctor_link_failed(struct hrd_daemon *d, uint32_t peer, const char *why)
{
    for (struct ask *a = asks; a; a = a->next)
        if (a->d == d && a->peer == peer && waits_for_link(a)) {
            snprintf(a->why, sizeof(a->why), "%s", why);
            a->retry_at = uv_now(d->loop) + HRD_LINK_RETRY_MS;
        }
}

void hrd_doctor_link_refused(struct hrd_daemon *d, uint32_t peer, const struct hrd_link_want *want,
                             uint32_t status, const char *why)
{
    struct hrd_link_want own = own_want(&d->cfg);
    struct hrd_peer_info info = {.name = "?"};
    if (own.transport == HRD_WANT_TCP || own.sl != want->sl || own.tc != want->tc)
        return;
    (void)hrd_peer_info(d, peer, &info);
    for (struct ask *a = asks, *next; a; a = next) {
        next = a->next; /* refuse() ends the question */
        if (a->d == d && a->peer == peer && waits_for_link(a))
            refuse(a, status, "no data link with node %s: %s", info.name, why);
    }
}

void hrd_doctor_event(struct hrd_daemon *d, const struct hrd_event *ev)
{
    struct ask *a = find(d, ev->token);
    const struct hrd_probe_result *r = &ev->probe;
    if (!a)
        return;
    if (ev->status != HRP_OK) {
        refuse(a, ev->status, "the link cannot be measured: %s", ev->text);
        return;
    }
    answer(a, json_pack("{s:s, s:s, s:i, s:f, s:f, s:I}", "transport", r->transport, "path", r->detail,
                        "streams", (int)r->nstreams, "round_trip_us", (double)r->rtt_ns / 1e3,
                        "least_round_trip_us", (double)r->rtt_min_ns / 1e3, "bytes_per_s",
                        (json_int_t)r->bytes_per_s));
}

/* ---- what the peer does ------------------------------------------------------------------------------------- */

static void send_ask(struct ask *a)
{
    struct hrp_peer_msg msg = {.type = HRP_PEER_ASK, .body.ask = {.token = a->id, .what = a->what}};
    hrd_peer_send(a->d, a->peer, &msg);
}

/* How far the peer's clock is from the own one: it was read somewhere between ASK and TELL. */
static void add_clock(json_t *doc, const struct ask *a, const struct hrp_peer_tell *t)
{
    uint64_t whole = clock_ns(CLOCK_MONOTONIC) - a->began_ns;
    uint64_t way = t->took_ns < whole ? whole - t->took_ns : 0; /* there and back */
    double off = (double)((int64_t)t->clock_ns - (int64_t)clock_ns(CLOCK_REALTIME)) + (double)way / 2;
    json_object_set_new(doc, "clock_offset_ms", json_real(off / 1e6));
    json_object_set_new(doc, "clock_error_ms", json_real((double)way / 2e6));
}

static void told(struct hrd_daemon *d, uint32_t peer, const struct hrp_peer_msg *msg)
{
    const struct hrp_peer_tell *t = &msg->body.tell;
    struct ask *a = find(d, t->token);
    if (!a || !a->back || a->peer != peer)
        return; /* too late */
    if (t->status != HRP_OK) {
        refuse(a, t->status, "%.*s", (int)msg->text_len, msg->text ? msg->text : "");
        return;
    }
    char *more = a->len + msg->text_len <= MAX_TELL ? realloc(a->text, a->len + msg->text_len + 1) : NULL;
    if (!more) {
        refuse(a, HRP_RESOURCE, "the answer of the other node is too long");
        return;
    }
    a->text = more;
    if (msg->text_len > 0)
        memcpy(a->text + a->len, msg->text, msg->text_len);
    a->len += msg->text_len;
    if (t->more)
        return;
    json_error_t error;
    json_t *doc = json_loadb(a->text, a->len, 0, &error);
    if (!doc) {
        refuse(a, HRP_PROTOCOL, "the answer of the other node is no JSON (%s)", error.text);
        return;
    }
    if (a->what == HRP_DOCTOR_HERE)
        add_clock(doc, a, t);
    answer(a, doc);
}

/* ---- questions ---------------------------------------------------------------------------------------------- */

static void on_tick(uv_timer_t *timer)
{
    struct ask *a = timer->data;
    struct hrd_peer_info info = {.name = "?"};
    const char *why = "";
    if (a->peer && !hrd_peer_info(a->d, a->peer, &info)) {
        refuse(a, HRP_PEER_LOST, "the connection with that node is lost");
    } else if (uv_now(a->d->loop) < a->deadline) {
        if (waits_for_link(a))
            link_step(a);
    } else if (waits_for_link(a)) {
        struct hrd_link_want want = own_want(&a->d->cfg);
        (void)hrd_peer_transport(a->d, a->peer, &want, &why);
        why = why[0] ? why : a->why;
        refuse(a, HRP_PEER_LOST, "no data link with node %s came up in %u s%s%s", info.name, ASK_MS / 1000,
               why[0] ? ": " : "", why);
    } else if (a->peer) {
        refuse(a, HRP_UNRESPONSIVE, "node %s did not answer in %u s", info.name, ASK_MS / 1000);
    } else {
        refuse(a, HRP_UNRESPONSIVE, "it was not done in %u s", ASK_MS / 1000);
    }
}

static struct ask *ask_new(struct hrd_daemon *d, uint32_t what, uint32_t peer, bool back)
{
    struct ask *a = calloc(1, sizeof(*a));
    if (!a || uv_timer_init(d->loop, &a->timer) != 0)
        abort();
    a->d = d;
    a->id = ++last_id;
    a->what = what;
    a->peer = peer;
    a->back = back;
    a->began_ns = clock_ns(CLOCK_MONOTONIC);
    a->timer.data = a;
    a->deadline = uv_now(d->loop) + (back ? HRD_DOCTOR_MS - 1000 : ASK_MS);
    a->next = asks;
    asks = a;
    uv_timer_start(&a->timer, on_tick, TICK_MS, TICK_MS);
    return a;
}

static unsigned waiting(const struct hrd_daemon *d, uint64_t sid, uint32_t asker)
{
    unsigned n = 0;
    for (const struct ask *a = asks; a; a = a->next)
        n += a->d == d && a->sid == sid && a->asker == asker;
    return n;
}

static void start(struct ask *a, const char *text, size_t len)
{
    if (a->back)
        send_ask(a);
    else if (a->what == HRP_DOCTOR_HERE)
        start_job(a, job_here);
    else if (a->what == HRP_DOCTOR_REACH)
        start_job(a, job_reach);
    else if (a->what == HRP_DOCTOR_DIAL)
        start_dial(a, text, len);
    else
        link_step(a);
}

void hrd_doctor_request(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie,
                        const struct hrp_msg_doctor *m, const char *text, size_t len)
{
    struct hrd_peer_info info;
    if (waiting(d, s->sid, 0) >= MAX_OF_ONE) {
        hrd_session_error(s, cookie, HRP_RESOURCE, HRP_SCOPE_NONE,
                          "%u questions of this process are being worked on", MAX_OF_ONE);
        return;
    }
    if (m->peer && !hrd_peer_info(d, m->peer, &info)) {
        hrd_session_error(s, cookie, HRP_PEER_LOST, HRP_SCOPE_NONE, "node %u is not connected any more",
                          m->peer);
        return;
    }
    if (m->peer && (m->back || m->what == HRP_DOCTOR_PROBE) && info.minor < HRP_PEER_MINOR_ASK) {
        hrd_session_error(s, cookie, HRP_UNSUPPORTED, HRP_SCOPE_NONE,
                          "hreduced on node %s is too old to be asked: bring it to version " HRD_VERSION,
                          info.name);
        return;
    }
    struct ask *a = ask_new(d, m->what, m->peer, m->back);
    a->sid = s->sid;
    a->cookie = cookie;
    start(a, text, len);
}

void hrd_doctor_msg(struct hrd_daemon *d, uint32_t peer, const struct hrp_peer_msg *msg)
{
    if (msg->type == HRP_PEER_TELL) {
        told(d, peer, msg);
        return;
    }
    bool busy = waiting(d, 0, peer) >= MAX_OF_ONE;
    struct ask *a = ask_new(d, msg->body.ask.what, msg->body.ask.what == HRP_DOCTOR_HERE ? 0 : peer, false);
    a->asker = peer;
    a->asker_token = msg->body.ask.token;
    if (busy)
        refuse(a, HRP_RESOURCE, "node %s works on %u questions of that node already", d->node_name,
               MAX_OF_ONE);
    else
        start(a, "", 0);
}

void hrd_doctor_stop(struct hrd_daemon *d)
{
    struct ask *next;
    for (struct ask *a = asks; a; a = next) {
        next = a->next;
        if (a->d == d)
            drop(a);
    }
    for (struct job *j = jobs; j; j = j->next)
        if (j->d == d)
            uv_cancel((uv_req_t *)&j->work); /* one that runs goes on; its end is waited for a while */
}
