/* SPDX-License-Identifier: MIT */
/* The node's side: from the roster over links, reserve and vote to COMMIT, and afterwards until all ranks left. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/member_impl.h"

static struct lcomm *comm_by_id(struct hrd_members *m, const uint8_t *id)
{
    struct lcomm *c = m->comms;
    while (c && memcmp(c->id, id, sizeof(c->id)) != 0)
        c = c->next;
    return c;
}

static struct lcomm *comm_by_number(struct hrd_members *m, uint64_t comm)
{
    struct lcomm *c = m->comms;
    while (c && c->comm != comm)
        c = c->next;
    return c;
}

static void comm_free(struct lcomm *c)
{
    free(c->node_of_rank);
    free(c->node);
    free(c->local);
    free(c);
}

static void comm_drop(struct hrd_daemon *d, struct lcomm *c)
{
    struct lcomm **at = &d->members->comms;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    for (uint32_t i = 0; i < c->roster.nnodes; i++)
        if (c->node[i].linked)
            hrd_link_use(d, c->node[i].link, -1);
    comm_free(c);
}

static void tell_root(struct hrd_daemon *d, const struct lcomm *c, uint16_t type, uint32_t rank)
{
    struct hrp_peer_msg msg = {.type = type};
    memcpy(msg.body.comm.comm_id, c->id, sizeof(c->id));
    msg.body.comm.rank = rank;
    hrd_member_send(d, c->root_no, &msg);
}

static void vote(struct hrd_daemon *d, const uint8_t *id, uint32_t root_no, uint32_t status, const char *text)
{
    struct hrp_peer_msg msg = {.type = HRP_PEER_VOTE, .text = text, .text_len = strlen(text)};
    memcpy(msg.body.vote.comm_id, id, sizeof(msg.body.vote.comm_id));
    msg.body.vote.status = status;
    hrd_member_send(d, root_no, &msg);
}

/* ---- failure before COMMIT ------------------------------------------------------------------------------ */

/* The agent has the comm: it tells the other nodes and lets the ranks go. */
static void end_in_agent(struct hrd_daemon *d, struct lcomm *c)
{
    hrd_agent_comm_fail(d->agent, c->comm, c->status, c->text, true);
    for (uint32_t i = 0; i < c->roster.nlocal; i++)
        if (!c->local[i].left)
            hrd_agent_comm_leave(d->agent, c->comm, c->local[i].rank);
}

static void free_slots(struct hrd_daemon *d, struct lcomm *c)
{
    for (uint32_t i = 0; i < c->roster.nlocal; i++) {
        struct lrank *r = &c->local[i];
        struct hrd_session *s = r->left ? NULL : hrd_session_find(d, r->sid);
        if (s)
            hrd_session_slot_free(s, r->slot);
        r->left = true;
    }
}

/* The set-up is over on this node, with this sentence for each rank. The root's own verdict is not sent back. */
static void setup_failed(struct hrd_daemon *d, struct lcomm *c, uint32_t status, const char *text,
                         bool by_root)
{
    if (c->state == LCOMM_ENDING)
        return;
    c->status = status;
    snprintf(c->text, sizeof(c->text), "%s", text);
    for (uint32_t i = 0; i < c->roster.nlocal; i++) {
        struct hrd_session *s = c->local[i].left ? NULL : hrd_session_find(d, c->local[i].sid);
        if (s)
            hrd_session_error(s, c->local[i].cookie, (enum hrp_status)status, HRP_SCOPE_COMM, "%s", text);
    }
    d->members->setup_errors += c->roster.nlocal;
    if (!by_root)
        vote(d, c->id, c->root_no, status, text);
    enum lcomm_state was = c->state;
    c->state = LCOMM_ENDING;
    if (was == LCOMM_CONNECTING) {
        free_slots(d, c);
        comm_drop(d, c);
    } else if (was == LCOMM_ADDING) {
        c->adding = true; /* the agent's answer decides what there is to end */
    } else {
        end_in_agent(d, c);
    }
}

/* ---- roster --------------------------------------------------------------------------------------------- */

/* Takes the joins of the roster's local ranks. Returns the rank that is not there any more, -1: all are. */
static int64_t take_joins(struct hrd_daemon *d, struct lcomm *c, const struct hrp_peer_msg *msg)
{
    uint32_t n = 0;
    int64_t missing = -1;
    for (uint32_t rank = 0; rank < c->roster.nranks; rank++) {
        if (c->node_of_rank[rank] != c->roster.node)
            continue;
        struct join *j = hrd_join_find(d, msg->joins[n], c->root_no);
        struct lrank *r = &c->local[n++];
        r->rank = rank;
        if (!j || j->rank != rank || memcmp(&j->key, &c->roster.key, sizeof(j->key)) != 0) {
            missing = rank;
            r->left = true;
            continue;
        }
        r->slot = j->slot;
        r->pid = j->pid;
        r->sid = j->sid;
        r->cookie = j->cookie;
        hrd_join_drop(d, j);
    }
    return missing;
}

static struct lcomm *comm_new(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg)
{
    const struct hrp_peer_roster *b = &msg->body.roster;
    struct lcomm *c = hrd_member_alloc(1, sizeof(*c));
    memcpy(c->id, b->comm_id, sizeof(c->id));
    memcpy(&c->comm, b->comm_id, sizeof(c->comm));
    c->roster = *b;
    c->require = b->config.require | d->cfg.require;
    c->want = (struct hrd_link_want){
        .transport = b->config.transport, .sl = b->config.service_level, .tc = b->config.traffic_class};
    c->root_no = from;
    c->start = hrd_member_now(d);
    c->deadline = c->start + hrd_member_phase_ms(d, &b->config);
    c->node_of_rank = hrd_member_alloc(b->nranks, sizeof(uint32_t));
    memcpy(c->node_of_rank, msg->node_of_rank, b->nranks * sizeof(uint32_t));
    c->node = hrd_member_alloc(b->nnodes, sizeof(*c->node));
    for (uint32_t i = 0; i < b->nnodes; i++)
        c->node[i].id = msg->nodes[i];
    c->local = hrd_member_alloc(b->nlocal, sizeof(*c->local));
    c->next = d->members->comms;
    d->members->comms = c;
    return c;
}

static bool connect_step(struct hrd_daemon *d, struct lcomm *c);

bool hrd_node_roster(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg)
{
    const struct hrp_peer_roster *b = &msg->body.roster;
    char text[HRP_COMM_TEXT], key[128], what[200];
    uint64_t comm;
    memcpy(&comm, b->comm_id, sizeof(comm));
    if (memcmp(msg->nodes[b->node].instance, d->instance, sizeof(d->instance)) != 0 ||
        comm_by_number(d->members, comm))
        return false;
    struct lcomm *c = comm_new(d, from, msg);
    int64_t missing = take_joins(d, c, msg);
    hrd_key_text(&b->key, key, sizeof(key));
    if (missing >= 0) {
        snprintf(text, sizeof(text), "rank %lld on node %s died while %s was set up", (long long)missing,
                 d->node_name, key);
        setup_failed(d, c, HRP_RANK_LOST, text, false);
        return true;
    }
    uint32_t status = hrd_config_possible(&b->config, &d->cfg, what, sizeof(what));
    if (status != HRP_OK) {
        snprintf(text, sizeof(text), "%s cannot be made on node %s: %s", key, d->node_name, what);
        setup_failed(d, c, status, text, false);
        return true;
    }
    connect_step(d, c);
    return true;
}

/* ---- links ---------------------------------------------------------------------------------------------- */

/* One step towards a link with that node. True: it is there. */
static bool connect_node(struct hrd_daemon *d, const struct lcomm *c, struct lnode *n)
{
    if (n->linked || memcmp(n->id.instance, d->instance, sizeof(d->instance)) == 0)
        return true;
    uint64_t now = hrd_member_now(d);
    if (n->no == 0)
        n->no = hrd_peer_find(d, n->id.instance);
    if (n->no == 0) {
        if (n->token == 0 && now >= n->retry_at && hrd_peer_dials(d, n->id.instance)) {
            n->token = hrd_member_id(d);
            hrd_peer_dial(d, hrd_member_dialed, n->token, n->id.addr, n->id.naddrs, n->id.instance,
                          sizeof(n->id.instance));
        }
        return false;
    }
    if (now < n->retry_at)
        return false;
    int r = hrd_peer_link(d, n->no, &c->want, &n->link);
    if (r == -ENOENT)
        n->no = 0;
    n->linked = r == 1;
    if (n->linked)
        hrd_link_use(d, n->link, 1);
    return n->linked;
}

/* Both ends of a link in the order of the roster: the same words on both. */
static void name_ends(const struct lcomm *c, uint32_t other, const char **first, const char **second)
{
    uint32_t node = c->roster.node;
    *first = c->node[node < other ? node : other].id.name;
    *second = c->node[node < other ? other : node].id.name;
}

/* What the links are against what was asked for. False: the comm cannot be, and has ended. */
static bool links_serve(struct hrd_daemon *d, struct lcomm *c)
{
    const struct hrp_comm_config *cfg = &c->roster.config;
    uint32_t require = c->require & (HRP_REQUIRE_VERBS | HRP_REQUIRE_GDR);
    bool verbs = cfg->transport == 2 || require;
    char text[HRP_COMM_TEXT], key[128];
    const char *first, *second;
    for (uint32_t i = 0; verbs && i < c->roster.nnodes; i++) {
        const char *why;
        if (i == c->roster.node || strcmp(hrd_peer_transport(d, c->node[i].no, &c->want, &why), "verbs") == 0)
            continue;
        hrd_key_text(&c->roster.key, key, sizeof(key));
        name_ends(c, i, &first, &second);
        snprintf(text, sizeof(text),
                 "%s was not made: %s was asked for, but nodes %s and %s exchange over tcp: %s", key,
                 cfg->transport == 2           ? "transport = verbs"
                 : require & HRP_REQUIRE_VERBS ? "require = verbs"
                                               : "require = gdr",
                 first, second, why);
        setup_failed(d, c, HRP_UNSUPPORTED, text, false);
        return false;
    }
    return true;
}

static void add_to_agent(struct hrd_daemon *d, struct lcomm *c)
{
    const struct hrp_peer_roster *b = &c->roster;
    uint32_t *peers = hrd_member_alloc(b->nnodes, sizeof(*peers));
    const char **names = hrd_member_alloc(b->nnodes, sizeof(*names));
    struct hrd_comm_rank *local = hrd_member_alloc(b->nlocal, sizeof(*local));
    for (uint32_t i = 0; i < b->nnodes; i++) {
        peers[i] = i == b->node ? HRD_NO_PEER : c->node[i].link;
        names[i] = c->node[i].id.name;
    }
    for (uint32_t i = 0; i < b->nlocal; i++)
        local[i] = (struct hrd_comm_rank){.rank = c->local[i].rank,
                                          .slot = c->local[i].slot,
                                          .sid = c->local[i].sid,
                                          .pid = c->local[i].pid};
    struct hrd_comm_spec spec = {.comm = c->comm,
                                 .nranks = b->nranks,
                                 .nnodes = b->nnodes,
                                 .node = b->node,
                                 .nlocal = b->nlocal,
                                 .node_of_rank = c->node_of_rank,
                                 .peer_of_node = peers,
                                 .node_name = names,
                                 .local = local,
                                 .config = b->config,
                                 .eager_limit = b->eager_limit,
                                 .unit_bytes = b->unit_bytes,
                                 .unit_min_bytes = b->unit_min_bytes,
                                 .latency_ns = b->latency_ns,
                                 .bandwidth = b->bandwidth,
                                 .eager_blocks = (b->plan & HRP_PLAN_EAGER_BLOCKS) != 0};
    spec.config.require = c->require;
    c->state = LCOMM_ADDING;
    hrd_agent_comm_add(d->agent, &spec);
    free(local);
    free(names);
    free(peers);
}

/* False: the comm cannot be, and is gone. */
static bool connect_step(struct hrd_daemon *d, struct lcomm *c)
{
    bool all = true;
    if (c->state != LCOMM_CONNECTING)
        return true;
    for (uint32_t i = 0; i < c->roster.nnodes; i++)
        if (!connect_node(d, c, &c->node[i]))
            all = false;
    if (!all)
        return true;
    if (!links_serve(d, c))
        return false;
    add_to_agent(d, c);
    return true;
}

void hrd_node_connect_all(struct hrd_daemon *d)
{
    for (struct lcomm *c = d->members->comms, *next; c; c = next) {
        next = c->next; /* a comm that the links do not serve is gone afterwards */
        connect_step(d, c);
    }
}

void hrd_node_link_refused(struct hrd_daemon *d, uint32_t no, const struct hrd_link_want *want,
                           uint32_t status, const char *why)
{
    char text[HRP_COMM_TEXT], key[128];
    const char *first, *second;
    for (struct lcomm *c = d->members->comms, *next; c; c = next) {
        next = c->next;
        if (c->want.transport == HRD_WANT_TCP || c->want.sl != want->sl || c->want.tc != want->tc)
            continue;
        for (uint32_t i = 0; c->state == LCOMM_CONNECTING && i < c->roster.nnodes; i++) {
            if (c->node[i].no != no || i == c->roster.node)
                continue;
            name_ends(c, i, &first, &second);
            hrd_key_text(&c->roster.key, key, sizeof(key));
            snprintf(text, sizeof(text), "%s was not made: nodes %s and %s cannot exchange over verbs%s: %s",
                     key, first, second, status == HRP_RESOURCE ? "" : ", which is required", why);
            setup_failed(d, c, status, text, false);
            break;
        }
    }
}

bool hrd_node_dialed(struct hrd_daemon *d, uint64_t token, uint32_t status, uint32_t no, const char *why)
{
    for (struct lcomm *c = d->members->comms; c; c = c->next)
        for (uint32_t i = 0; i < c->roster.nnodes; i++) {
            struct lnode *n = &c->node[i];
            if (n->token != token)
                continue;
            n->token = 0;
            if (status == HRP_OK) {
                n->no = no;
            } else {
                snprintf(n->error, sizeof(n->error), "%s", why);
                n->retry_at = hrd_member_now(d) + HRD_LINK_RETRY_MS;
            }
            connect_step(d, c);
            return true;
        }
    return false;
}

void hrd_node_link_failed(struct hrd_daemon *d, uint32_t no, const char *why)
{
    for (struct lcomm *c = d->members->comms; c; c = c->next)
        for (uint32_t i = 0; c->state == LCOMM_CONNECTING && i < c->roster.nnodes; i++)
            if (c->node[i].no == no) {
                snprintf(c->node[i].error, sizeof(c->node[i].error), "%s", why);
                c->node[i].retry_at = hrd_member_now(d) + HRD_LINK_RETRY_MS;
            }
}

/* The sentence of a node that could not be connected. */
static void unconnected_text(struct hrd_daemon *d, const struct lcomm *c, const struct lnode *n, char *text,
                             size_t len)
{
    char key[128], at[HRD_ADDR_TEXT + 16], took[32], path[1200];
    hrd_key_text(&c->roster.key, key, sizeof(key));
    hrd_addr_port_text(&n->id.addr[0], at, sizeof(at));
    hrd_ms_text(hrd_member_phase_ms(d, &c->roster.config), took, sizeof(took));
    if (n->no != 0 && hrd_peer_mending(d, n->no, &c->want, path, sizeof(path)))
        snprintf(text, len, "%s was not made: nodes %s and %s could not exchange within %s: %s", key,
                 d->node_name, n->id.name, took, path);
    else if (n->error[0])
        snprintf(text, len, "%s was not made: node %s cannot connect to node %s: %s", key, d->node_name,
                 n->id.name, n->error);
    else if (hrd_peer_dials(d, n->id.instance))
        snprintf(text, len, "%s was not made: node %s has no answer from node %s (%s) after %s", key,
                 d->node_name, n->id.name, at, took);
    else
        snprintf(text, len,
                 "%s was not made: node %s (%s) did not connect to node %s within %s; a firewall on the way "
                 "to its "
                 "port %u?",
                 key, n->id.name, at, d->node_name, took, d->cfg.port);
}

/* The side that dials knows more: the one that is only waited for has a little longer. */
static void connect_timeout(struct hrd_daemon *d, struct lcomm *c)
{
    char text[HRP_COMM_TEXT];
    bool patient = hrd_member_now(d) < c->deadline + WAITER_GRACE_MS;
    for (uint32_t i = 0; i < c->roster.nnodes; i++) {
        const struct lnode *n = &c->node[i];
        if (n->linked || i == c->roster.node || (patient && !hrd_peer_dials(d, n->id.instance)))
            continue;
        unconnected_text(d, c, n, text, sizeof(text));
        setup_failed(d, c, HRP_PEER_LOST, text, false);
        return;
    }
}

void hrd_node_peer_lost(struct hrd_daemon *d, uint32_t no, const char *why)
{
    char text[HRP_COMM_TEXT], key[128];
    for (struct lcomm *c = d->members->comms, *next; c; c = next) {
        next = c->next;
        bool concerned = c->root_no == no;
        if (c->root_no == no)
            c->root_no = NO_ROOT;
        for (uint32_t i = 0; i < c->roster.nnodes; i++)
            concerned = concerned || (c->state == LCOMM_CONNECTING && c->node[i].no == no);
        /* From ADDING on the agent reports links; from COMMIT on the root does not matter any more. */
        if (!concerned || c->state == LCOMM_ACTIVE || c->state == LCOMM_ENDING)
            continue;
        snprintf(text, sizeof(text), "%s while %s was set up", why,
                 hrd_key_text(&c->roster.key, key, sizeof(key)));
        setup_failed(d, c, HRP_PEER_LOST, text, false);
    }
}

/* ---- the root's verdict --------------------------------------------------------------------------------- */

static void send_joined(struct hrd_daemon *d, const struct lcomm *c, const struct lrank *r)
{
    struct hrd_session *s = r->left ? NULL : hrd_session_find(d, r->sid);
    if (!s)
        return;
    struct hrp_msg msg = {.type = HRP_MSG_JOINED, .cookie = r->cookie};
    struct hrp_msg_joined *b = &msg.body.joined;
    b->slot = r->slot;
    b->nranks = c->roster.nranks;
    b->nnodes = c->roster.nnodes;
    b->node = c->roster.node;
    b->nlocal = c->roster.nlocal;
    b->op_timeout_ms = c->roster.config.op_timeout_ms;
    b->require = c->require;
    memcpy(b->comm_id, c->id, sizeof(b->comm_id));
    hrd_session_send(s, &msg, NULL, 0);
}

bool hrd_node_commit(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg)
{
    struct lcomm *c = comm_by_id(d->members, msg->body.comm.comm_id);
    char key[128];
    if (!c || c->state == LCOMM_ENDING)
        return true; /* ended here meanwhile; the agent told the others */
    if (c->root_no != from || c->state != LCOMM_VOTED)
        return false;
    c->state = LCOMM_ACTIVE;
    for (uint32_t i = 0; i < c->roster.nlocal; i++)
        send_joined(d, c, &c->local[i]);
    hrd_log_event(HRD_LOG_INFO, NULL, c->comm, "%s: this node is %u of %u, with %u of its ranks",
                  hrd_key_text(&c->roster.key, key, sizeof(key)), c->roster.node, c->roster.nnodes,
                  c->roster.nlocal);
    return true;
}

void hrd_node_failed(struct hrd_daemon *d, uint32_t from, const struct hrp_peer_msg *msg)
{
    struct lcomm *c = comm_by_id(d->members, msg->body.vote.comm_id);
    char text[HRP_PEER_TEXT + 1];
    if (!c || c->root_no != from)
        return;
    snprintf(text, sizeof(text), "%.*s", (int)msg->text_len, msg->text ? msg->text : "the root gave it up");
    if (c->state != LCOMM_ACTIVE)
        setup_failed(d, c, msg->body.vote.status, text, true);
    else if (msg->body.vote.status == HRP_SUPERSEDED)
        hrd_agent_comm_fail(d->agent, c->comm, HRP_SUPERSEDED, text, true);
}

/* ---- ranks ---------------------------------------------------------------------------------------------- */

static struct lrank *rank_by_slot(struct hrd_daemon *d, uint64_t sid, uint32_t slot, struct lcomm **out)
{
    for (struct lcomm *c = d->members->comms; c; c = c->next)
        for (uint32_t i = 0; c->state == LCOMM_ACTIVE && i < c->roster.nlocal; i++)
            if (!c->local[i].left && c->local[i].sid == sid && c->local[i].slot == slot) {
                *out = c;
                return &c->local[i];
            }
    return NULL;
}

uint64_t hrd_member_comm_of_slot(struct hrd_daemon *d, const struct hrd_session *s, uint32_t slot)
{
    struct lcomm *c;
    return d->members && rank_by_slot(d, s->sid, slot, &c) ? c->comm : 0;
}

void hrd_node_leave(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, uint32_t slot)
{
    struct lcomm *c;
    struct lrank *r = rank_by_slot(d, s->sid, slot, &c);
    if (!r || r->leaving) {
        hrd_session_error(s, cookie, HRP_INVALID_ARGUMENT, HRP_SCOPE_NONE,
                          r ? "the communicator in slot %u is being left already"
                            : "there is no communicator in slot %u",
                          slot);
        return;
    }
    r->leaving = true;
    r->cookie = cookie;
    hrd_agent_comm_leave(d->agent, c->comm, r->rank);
}

void hrd_node_abort(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, uint32_t slot,
                    const char *text, size_t len)
{
    struct lcomm *c;
    struct lrank *r = rank_by_slot(d, s->sid, slot, &c);
    char why[HRP_COMM_TEXT];
    if (!r) {
        hrd_session_error(s, cookie, HRP_INVALID_ARGUMENT, HRP_SCOPE_NONE,
                          "there is no communicator in slot %u", slot);
        return;
    }
    if (len > 0)
        snprintf(why, sizeof(why), "rank %u (process %d on node %s) aborted: %.*s", r->rank, r->pid,
                 d->node_name, (int)(len < 1500 ? len : 1500), text);
    else
        snprintf(why, sizeof(why), "rank %u (process %d on node %s) aborted the communicator", r->rank,
                 r->pid, d->node_name);
    hrd_agent_comm_fail(d->agent, c->comm, HRP_ABORTED, why, true);
    hrd_session_done(s, cookie);
}

void hrd_node_session_gone(struct hrd_daemon *d, uint64_t sid, const char *why)
{
    for (struct lcomm *c = d->members->comms, *next; c; c = next) {
        struct lrank *gone = NULL;
        next = c->next;
        for (uint32_t i = 0; i < c->roster.nlocal; i++) {
            struct lrank *r = &c->local[i];
            if (r->left || r->sid != sid)
                continue;
            r->left = true; /* the agent hears of it through hrd_agent_session_end() */
            gone = r;
            if (c->state == LCOMM_ACTIVE)
                tell_root(d, c, HRP_PEER_LEFT, r->rank);
        }
        if (!gone || c->state == LCOMM_ACTIVE)
            continue;
        char text[HRP_COMM_TEXT], key[128];
        snprintf(text, sizeof(text), "rank %u (process %d on node %s) was lost while %s was set up: %s",
                 gone->rank, gone->pid, d->node_name, hrd_key_text(&c->roster.key, key, sizeof(key)), why);
        setup_failed(d, c, HRP_RANK_LOST, text, false);
    }
}

/* ---- the agent's news ----------------------------------------------------------------------------------- */

static void on_ready(struct hrd_daemon *d, struct lcomm *c, const struct hrd_event *ev)
{
    if (c->state == LCOMM_ENDING && c->adding) {
        c->adding = false;
        if (ev->status == HRP_OK) {
            end_in_agent(d, c);
        } else {
            free_slots(d, c);
            comm_drop(d, c);
        }
        return;
    }
    if (c->state != LCOMM_ADDING)
        return;
    if (ev->status != HRP_OK) {
        c->state = LCOMM_CONNECTING; /* nothing is in the agent */
        setup_failed(d, c, ev->status, ev->text, false);
        return;
    }
    c->state = LCOMM_VOTED;
    /* Beyond what the root gives itself: its sentence says more. */
    c->deadline = hrd_member_now(d) + hrd_member_phase_ms(d, &c->roster.config) + 2 * ROOT_GRACE_MS;
    vote(d, c->id, c->root_no, HRP_OK, "");
}

static void on_left(struct hrd_daemon *d, struct lcomm *c, uint32_t rank)
{
    for (uint32_t i = 0; i < c->roster.nlocal; i++) {
        struct lrank *r = &c->local[i];
        if (r->rank != rank || r->left)
            continue;
        struct hrd_session *s = hrd_session_find(d, r->sid);
        r->left = true;
        if (s)
            hrd_session_slot_free(s, r->slot);
        if (s && r->leaving)
            hrd_session_done(s, r->cookie);
        if (c->state == LCOMM_ACTIVE)
            tell_root(d, c, HRP_PEER_LEFT, rank);
    }
}

void hrd_node_event(struct hrd_daemon *d, const struct hrd_event *ev)
{
    struct lcomm *c = comm_by_number(d->members, ev->comm);
    if (!c)
        return;
    switch (ev->type) {
    case HRD_EV_COMM_READY:
        on_ready(d, c, ev);
        break;
    case HRD_EV_COMM_FAILED:
        if (c->state == LCOMM_VOTED)
            setup_failed(d, c, ev->status, ev->text, false);
        c->failed = true;
        break;
    case HRD_EV_COMM_LEFT:
        on_left(d, c, ev->id);
        break;
    case HRD_EV_COMM_GONE:
        tell_root(d, c, HRP_PEER_GONE, 0);
        free_slots(d, c);
        comm_drop(d, c);
        break;
    default:
        break;
    }
}

/* ---- time ----------------------------------------------------------------------------------------------- */

void hrd_node_tick(struct hrd_daemon *d)
{
    uint64_t now = hrd_member_now(d);
    char text[HRP_COMM_TEXT], key[128];
    for (struct lcomm *c = d->members->comms, *next; c; c = next) {
        next = c->next;
        if (!connect_step(d, c))
            continue;
        if (c->state == LCOMM_CONNECTING && now >= c->deadline) {
            connect_timeout(d, c);
        } else if (c->state == LCOMM_VOTED && now >= c->deadline) {
            snprintf(
                text, sizeof(text),
                "%s was not made: node %s was ready and did not hear the verdict of the root daemon in time",
                hrd_key_text(&c->roster.key, key, sizeof(key)), d->node_name);
            setup_failed(d, c, HRP_TIMEOUT, text, false);
        }
    }
}

bool hrd_node_busy(const struct hrd_members *m)
{
    for (const struct lcomm *c = m->comms; c; c = c->next)
        if (c->state == LCOMM_CONNECTING || c->state == LCOMM_VOTED)
            return true;
    return false;
}

void hrd_node_free_all(struct hrd_members *m)
{
    while (m->comms) {
        struct lcomm *c = m->comms;
        m->comms = c->next;
        comm_free(c);
    }
}
