/* SPDX-License-Identifier: MIT */
/* What the root makes of a complete set: configuration, numbering of the nodes, measurements, roster. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/gpu/gdr.h"
#include "daemon/member_impl.h"
#include "daemon/plan.h"

/* ---- configuration -------------------------------------------------------------------------------------- */

void hrd_config_resolve(const struct hrd_config *cfg, struct hrp_comm_config *c)
{
    if (c->setup_timeout_ms == 0)
        c->setup_timeout_ms = cfg->setup_timeout_ms;
    if (c->op_timeout_ms == 0)
        c->op_timeout_ms = cfg->op_timeout_ms != 0 ? cfg->op_timeout_ms : UINT32_MAX;
    if (c->algo == HRP_ALGO_AUTO)
        c->algo = cfg->algorithm;
    if (c->reproducible == HRP_DEFAULT)
        c->reproducible = cfg->reproducible ? HRP_ON : HRP_OFF;
    if (c->wire_f32 == HRP_DEFAULT)
        c->wire_f32 = cfg->wire_f32 ? HRP_ON : HRP_OFF;
    if (c->transport == 0)
        c->transport = cfg->transport; /* 0 stays: whatever the links are */
    c->require |= cfg->require;
    if (!(c->class_set & HRP_CLASS_SL))
        c->service_level = (uint8_t)cfg->verbs_service_level;
    if (!(c->class_set & HRP_CLASS_TC))
        c->traffic_class = (uint8_t)cfg->verbs_traffic_class;
    c->class_set = HRP_CLASS_SL | HRP_CLASS_TC;
}

uint32_t hrd_config_possible(const struct hrp_comm_config *c, const struct hrd_config *own, char *why,
                             size_t len)
{
    uint32_t require = c->require | (own ? own->require : 0);
    if (c->transport == HRD_WANT_TCP && (require & HRP_REQUIRE_VERBS || (own && own->transport == 2))) {
        snprintf(why, len, "transport = tcp was asked for, but %s",
                 c->require & HRP_REQUIRE_VERBS            ? "so was require = verbs"
                 : own && own->require & HRP_REQUIRE_VERBS ? "require = verbs stands in its hreduced.conf"
                                                           : "transport = verbs stands in its hreduced.conf");
        return HRP_UNSUPPORTED;
    }
    /* What reaches what is known only with an operation's memory: see agent/pool.c, and p2p_refusal() in agent/choose.c. */
    const char *what = require & HRP_REQUIRE_GDR ? "gdr" : "p2p";
    const char *off = !(require & (HRP_REQUIRE_GDR | HRP_REQUIRE_P2P)) || !own ? NULL
                      : !own->gpu                    ? "gpu = off stands in its hreduced.conf; set gpu = on"
                      : !(require & HRP_REQUIRE_GDR) ? NULL
                      : own->gdr == HRD_GDR_OFF      ? "gdr = off stands in its hreduced.conf"
                      : c->transport == HRD_WANT_TCP ? "so was transport = tcp"
                                                     : NULL;
    if (off) {
        snprintf(why, len, "require = %s was asked for, but %s", what, off);
        return HRP_UNSUPPORTED;
    }
    return HRP_OK;
}

static const char *const algos[HRP_NALGOS] = {"auto", "direct", "gather", "pairwise", "ring", "tree"};
static const char *const overlaps[HRP_NOVERLAPS] = {"auto", "compute", "idle"};
static const char *const switches[] = {"default", "off", "on"};

static void timeout_words(uint32_t ms, char buf[32])
{
    if (ms == UINT32_MAX)
        snprintf(buf, 32, "none");
    else
        hrd_ms_text(ms, buf, 32);
}

bool hrd_config_differs(const struct hrp_comm_config *a, const struct hrp_comm_config *b, const char **field,
                        char va[32], char vb[32])
{
    if (a->setup_timeout_ms != b->setup_timeout_ms || a->op_timeout_ms != b->op_timeout_ms) {
        bool setup = a->setup_timeout_ms != b->setup_timeout_ms;
        *field = setup ? "set-up timeout" : "op timeout";
        timeout_words(setup ? a->setup_timeout_ms : a->op_timeout_ms, va);
        timeout_words(setup ? b->setup_timeout_ms : b->op_timeout_ms, vb);
        return true;
    }
    if (a->algo != b->algo) {
        *field = "algorithm";
        snprintf(va, 32, "%s", algos[a->algo]);
        snprintf(vb, 32, "%s", algos[b->algo]);
        return true;
    }
    if (a->reproducible != b->reproducible || a->wire_f32 != b->wire_f32) {
        bool first = a->reproducible != b->reproducible;
        *field = first ? "reproducible" : "wire = f32";
        snprintf(va, 32, "%s", switches[first ? a->reproducible : a->wire_f32]);
        snprintf(vb, 32, "%s", switches[first ? b->reproducible : b->wire_f32]);
        return true;
    }
    if (a->transport != b->transport) {
        *field = "transport";
        snprintf(va, 32, "%s", hrd_transport_name(a->transport));
        snprintf(vb, 32, "%s", hrd_transport_name(b->transport));
        return true;
    }
    if (a->overlap != b->overlap) {
        *field = "overlap";
        snprintf(va, 32, "%s", overlaps[a->overlap]);
        snprintf(vb, 32, "%s", overlaps[b->overlap]);
        return true;
    }
    if (a->service_level != b->service_level || a->traffic_class != b->traffic_class) {
        bool sl = a->service_level != b->service_level;
        *field = sl ? "service level" : "traffic class";
        snprintf(va, 32, "%u", (unsigned)(sl ? a->service_level : a->traffic_class));
        snprintf(vb, 32, "%u", (unsigned)(sl ? b->service_level : b->traffic_class));
        return true;
    }
    if (a->require != b->require) {
        *field = "require";
        snprintf(va, 32, "bits %u", a->require);
        snprintf(vb, 32, "bits %u", b->require);
        return true;
    }
    return false;
}

/* ---- nodes ---------------------------------------------------------------------------------------------- */

static uint32_t node_of(const struct rset *s, uint32_t no)
{
    uint32_t i = 0;
    while (i < s->nnodes && s->node[i].no != no)
        i++;
    return i;
}

uint32_t hrd_rset_number_nodes(struct hrd_daemon *d, struct rset *s, char *why, size_t len)
{
    s->node = hrd_member_alloc(HRP_MAX_NODES, sizeof(*s->node));
    s->nnodes = 0;
    for (uint32_t r = 0; r < s->nranks; r++) {
        uint32_t i = node_of(s, s->rank[r].no);
        if (i < s->nnodes)
            continue;
        if (s->nnodes == HRP_MAX_NODES) {
            snprintf(why, len, "its ranks live on more than %u nodes, which is the limit of this version",
                     HRP_MAX_NODES);
            return HRP_RESOURCE;
        }
        s->node[i].no = s->rank[r].no;
        snprintf(s->node[i].name, sizeof(s->node[i].name), "%s", hrd_member_node_name(d, s->rank[r].no));
        s->nnodes++;
    }
    return HRP_OK;
}

/* ---- measurements --------------------------------------------------------------------------------------- */

bool hrd_rset_measured(struct hrd_daemon *d, const struct rset *s)
{
    struct hrd_peer_info info;
    for (uint32_t i = 0; i < s->nnodes; i++)
        if (s->node[i].no != HRD_SELF && hrd_peer_info(d, s->node[i].no, &info) && info.rtt_samples < 4)
            return false;
    return true;
}

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Half the median of the round trips to the other nodes. A control round trip passes two event loops, so this
   is an upper bound of what the data streams do; all nodes get the same number, which is what matters. */
static uint64_t latency_ns(struct hrd_daemon *d, const struct rset *s)
{
    uint64_t rtt[HRP_MAX_NODES];
    unsigned n = 0;
    struct hrd_peer_info info;
    for (uint32_t i = 0; i < s->nnodes; i++)
        if (s->node[i].no != HRD_SELF && hrd_peer_info(d, s->node[i].no, &info) && info.rtt_ns > 0)
            rtt[n++] = info.rtt_ns;
    if (n == 0)
        return 50000;
    qsort(rtt, n, sizeof(rtt[0]), compare_u64);
    return rtt[n / 2] / 2 + 1;
}

/* ---- roster --------------------------------------------------------------------------------------------- */

static void describe_self(struct hrd_daemon *d, struct hrp_peer_node *n)
{
    memcpy(n->instance, d->instance, sizeof(n->instance));
    n->naddrs = (uint8_t)hrd_peers_own_addrs(d, n->addr, HRP_MAX_ADDRS);
}

static void describe_peer(struct hrd_daemon *d, uint32_t no, struct hrp_peer_node *n)
{
    struct hrd_peer_info info;
    if (!hrd_peer_info(d, no, &info))
        return; /* cannot be: losing it has failed the set */
    memcpy(n->instance, info.instance, sizeof(n->instance));
    n->naddrs = (uint8_t)info.naddrs;
    memcpy(n->addr, info.addr, info.naddrs * sizeof(n->addr[0]));
}

static void send_to_node(struct hrd_daemon *d, const struct rset *s, uint32_t node, struct hrp_peer_msg *msg,
                         uint64_t *joins)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < s->nranks; r++)
        if (msg->node_of_rank[r] == node)
            joins[n++] = s->rank[r].join;
    msg->body.roster.node = node;
    msg->body.roster.nlocal = n;
    msg->joins = joins;
    hrd_member_send(d, s->node[node].no, msg);
}

/* Whether the daemons of all nodes are of this minor version or a later one. */
static bool all_know(struct hrd_daemon *d, const struct rset *s, unsigned minor)
{
    for (uint32_t i = 0; i < s->nnodes; i++) {
        struct hrd_peer_info info;
        if (s->node[i].no != HRD_SELF && (!hrd_peer_info(d, s->node[i].no, &info) || info.minor < minor))
            return false;
    }
    return true;
}

void hrd_rset_send_roster(struct hrd_daemon *d, struct rset *s)
{
    struct hrp_peer_node *nodes = hrd_member_alloc(s->nnodes, sizeof(*nodes));
    uint32_t *node_of_rank = hrd_member_alloc(s->nranks, sizeof(*node_of_rank));
    uint64_t *joins = hrd_member_alloc(s->nranks, sizeof(*joins));
    for (uint32_t i = 0; i < s->nnodes; i++) {
        for (size_t c = 0; c < sizeof(nodes[i].name) && s->node[i].name[c]; c++)
            nodes[i].name[c] =
                s->node[i].name[c] >= 0x20 && s->node[i].name[c] <= 0x7e ? s->node[i].name[c] : '?';
        if (s->node[i].no == HRD_SELF)
            describe_self(d, &nodes[i]);
        else
            describe_peer(d, s->node[i].no, &nodes[i]);
    }
    for (uint32_t r = 0; r < s->nranks; r++)
        node_of_rank[r] = node_of(s, s->rank[r].no);
    struct hrp_peer_msg msg = {.type = HRP_PEER_ROSTER, .nodes = nodes, .node_of_rank = node_of_rank};
    struct hrp_peer_roster *b = &msg.body.roster;
    memcpy(b->comm_id, s->id, sizeof(b->comm_id));
    b->key = s->key;
    b->config = s->config;
    b->nranks = s->nranks;
    b->nnodes = s->nnodes;
    b->eager_limit = (uint32_t)d->cfg.eager_limit;
    b->unit_bytes = d->cfg.unit_bytes;
    b->unit_min_bytes = hrd_config_unit_min(&d->cfg);
    b->latency_ns = latency_ns(d, s);
    b->bandwidth = d->cfg.bandwidth != 0 ? d->cfg.bandwidth : hrd_peers_link_speed(d);
    bool eager_blocks = s->nnodes <= HRD_EAGER_BLOCK_NODES && all_know(d, s, HRP_PEER_MINOR_EAGER_BLOCKS);
    b->plan = eager_blocks ? HRP_PLAN_EAGER_BLOCKS : 0;
    for (uint32_t i = 0; i < s->nnodes; i++) {
        struct hrd_peer_info info;
        bool old = s->node[i].no != HRD_SELF && hrd_peer_info(d, s->node[i].no, &info) && info.minor < 1;
        b->config.transport =
            s->config.transport == 0 && old ? 1 : s->config.transport; /* it knows tcp alone */
        send_to_node(d, s, i, &msg, joins);
    }
    free(joins);
    free(node_of_rank);
    free(nodes);
}
