/* SPDX-License-Identifier: MIT */
/* The path report: never a guess, so every stage names what the agent really uses. */
#include "daemon/status.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char NOTHING_YET[] = "nothing moved yet";

/* One stage. Without `wanted`, `reason` and `remedy` it is what was wanted. */
static json_t *stage(json_t *stages, const char *name, const char *used)
{
    json_t *s = json_pack("{s:s, s:s}", "stage", name, "used", used);
    json_array_append_new(stages, s);
    return s;
}

static void wanted(json_t *s, const char *what, const char *reason, const char *remedy)
{
    json_object_set_new(s, "wanted", json_string(what));
    json_object_set_new(s, "reason", json_string(reason));
    json_object_set_new(s, "remedy", json_string(remedy));
}

/* "4 nodes x 8 ranks", or the counts when they differ. */
static void layout_text(const struct hrd_snapshot_comm *c, const json_t *member, char *buf, size_t len)
{
    const json_t *nodes = json_object_get(member, "nodes"), *node;
    size_t i, at = 0;
    json_int_t first = json_integer_value(json_object_get(json_array_get(nodes, 0), "ranks"));
    bool even = first > 0;
    json_array_foreach(nodes, i, node)
    {
        even = even && json_integer_value(json_object_get(node, "ranks")) == first;
    }
    if (even) {
        snprintf(buf, len, "%u node%s x %d rank%s", c->nnodes, c->nnodes == 1 ? "" : "s", (int)first,
                 first == 1 ? "" : "s");
        return;
    }
    at = (size_t)snprintf(buf, len, "%u ranks on %u node%s", c->nranks, c->nnodes, c->nnodes == 1 ? "" : "s");
    json_array_foreach(nodes, i, node)
    {
        if (at >= len)
            return;
        at += (size_t)snprintf(buf + at, len - at, "%s%" JSON_INTEGER_FORMAT, i == 0 ? ": " : " + ",
                               json_integer_value(json_object_get(node, "ranks")));
    }
}

static void buffers_stage(json_t *stages, const struct hrd_snapshot_comm *c)
{
    char used[160];
    if (c->bytes == 0) {
        stage(stages, "buffers", NOTHING_YET);
        return;
    }
    unsigned percent = (unsigned)((double)c->staged_bytes * 100.0 / (double)(c->bytes * c->nlocal) + 0.5);
    if (percent > 100)
        percent = 100;
    uint64_t on_gpu = c->engine_ops[HRD_ENGINE_DMA] + c->engine_ops[HRD_ENGINE_SM];
    if (percent == 0) {
        stage(stages, "buffers",
              on_gpu == 0             ? "shared memory, no copies"
              : on_gpu >= c->ops_done ? "GPU memory that the daemon maps"
                                      : "shared memory and GPU memory that the daemon maps");
        return;
    }
    snprintf(used, sizeof(used), "%u%% copied through the staging window, %u%% %s without copies", percent,
             100 - percent, on_gpu ? "shared or mapped GPU memory" : "shared");
    if (2 * c->staged_gpu_bytes > c->staged_bytes)
        wanted(stage(stages, "buffers", used), "GPU memory that the daemon maps",
               "the library copies GPU memory on the job's own stream: small operations, or memory that it "
               "could not "
               "give to the daemon",
               "nothing for small operations; for others what the library's path report or log says");
    else
        wanted(stage(stages, "buffers", used), "shared memory, no copies",
               "the job passes ordinary memory, which the daemon cannot see",
               "take buffers from hclient_mem_alloc()");
}

static void local_stage(json_t *stages, const char *name, const struct hrd_snapshot *snap,
                        const struct hrd_snapshot_comm *c)
{
    char used[240];
    const char *gpu = c->engine[0] ? c->engine : NULL;
    bool kernels = gpu && strcmp(gpu, "sm") == 0;
    snprintf(used, sizeof(used), "%s engine%s, %s, %u thread%s, %u local rank%s", gpu ? gpu : "host",
             kernels ? " (kernels read and write GPU memory)"
             : gpu   ? " (copy engines and the processor, no SM)"
                     : "",
             snap->simd, snap->threads, snap->threads == 1 ? "" : "s", c->nlocal, c->nlocal == 1 ? "" : "s");
    json_t *s = stage(stages, name, used);
    if (gpu)
        json_object_set_new(s, "why", json_string(c->engine_why));
    if (gpu && c->engine_out[0])
        wanted(s, "sm engine", c->engine_out,
               "'hreducectl doctor' says how GPUs reach each other; overlap = compute where copy engines are "
               "wanted");
}

static const struct hrd_snapshot_link *find_link(const struct hrd_snapshot *snap, json_int_t id)
{
    for (uint32_t i = 0; i < snap->nlinks; i++) {
        if ((json_int_t)snap->link[i].peer == id)
            return &snap->link[i];
    }
    return NULL;
}

/* From where blocks are sent to this peer and where they are received, where the communicator has GPU memory. */
static void add_directions(json_t *entry, const struct hrd_snapshot_comm *c,
                           const struct hrd_snapshot_link *l)
{
    if (!c->gdr_used[0] || !l)
        return;
    json_object_set_new(entry, "send", json_string(l->gdr_send ? "GPU memory" : "host memory"));
    json_object_set_new(entry, "receive", json_string(l->gdr_receive ? "GPU memory" : "host memory"));
    if (l->gdr_why[0])
        json_object_set_new(entry, "gdr_reason", json_string(l->gdr_why));
}

static json_t *peers_of(struct hrd_daemon *d, const struct hrd_snapshot *snap,
                        const struct hrd_snapshot_comm *c, const json_t *member)
{
    const json_t *nodes = json_object_get(member, "nodes"), *node;
    json_t *peers = json_array();
    size_t i;
    json_array_foreach(nodes, i, node)
    {
        const json_t *name = json_object_get(node, "name");
        json_t *why = json_object_get(node, "reason");
        if (!json_is_integer(json_object_get(node, "peer")))
            continue;
        const struct hrd_snapshot_link *l =
            find_link(snap, json_integer_value(json_object_get(node, "link")));
        json_t *entry = json_pack("{s:i, s:s, s:s, s:i, s:s}", "node", (int)i, "name",
                                  json_is_string(name) ? json_string_value(name) : "?", "transport",
                                  l && l->transport[0] ? l->transport : "none (link lost)", "streams",
                                  l ? (int)l->nstreams : 0, "address", l ? l->detail : "");
        if (why)
            json_object_set(entry, "reason", why);
        if (json_object_get(node, "fell_back"))
            json_object_set_new(entry, "fell_back", json_true());
        if (json_object_get(node, "no_device"))
            json_object_set_new(entry, "no_device", json_true());
        if (json_object_get(node, "setup"))
            json_object_set(entry, "setup", json_object_get(node, "setup"));
        if (json_object_get(node, "setup_reason"))
            json_object_set(entry, "setup_reason", json_object_get(node, "setup_reason"));
        json_t *rails = l ? hrd_link_rails_json(d, l->peer, l) : NULL;
        if (rails)
            json_object_set_new(entry, "rails", rails);
        add_directions(entry, c, l);
        json_array_append_new(peers, entry);
    }
    return peers;
}

/* What all links have in common, or "mixed". */
static const char *common_transport(const json_t *peers)
{
    const json_t *peer;
    const char *name = NULL;
    size_t i;
    json_array_foreach(peers, i, peer)
    {
        const char *t = json_string_value(json_object_get(peer, "transport"));
        if (name && strcmp(name, t) != 0)
            return "mixed, see the peers";
        name = t;
    }
    return name ? name : "no link";
}

/* How much there is to say about a peer that is reached by something else than verbs. */
static int to_say(const json_t *peer)
{
    if (json_object_get(peer, "no_device")) /* nothing better was to be had */
        return 1;
    return json_object_get(peer, "reason") ? 3 : 2;
}

/* The one of these of which there is most to say; NULL: all are reached by verbs. */
static const json_t *slow_peer(const json_t *peers)
{
    const json_t *peer, *found = NULL;
    size_t i;
    json_array_foreach(peers, i, peer)
    {
        if (strcmp(json_string_value(json_object_get(peer, "transport")), "verbs") != 0 &&
            (!found || to_say(peer) > to_say(found)))
            found = peer;
    }
    return found;
}

/* The first rail of a link that is not what the configuration wants, and its peer in *of. */
static const json_t *rail_out(const json_t *peers, const json_t **of)
{
    const json_t *peer, *rail;
    size_t i, k;
    json_array_foreach(peers, i, peer)
    {
        json_array_foreach(json_object_get(peer, "rails"), k, rail)
        {
            *of = peer;
            if (strcmp(json_string_value(json_object_get(rail, "state")), "up") != 0)
                return rail;
        }
    }
    return NULL;
}

/* ", 1 of 2 rails": the fewest of a peer. */
static void rails_text(const json_t *peers, char *buf, size_t len)
{
    const json_t *peer, *rail;
    size_t i, k, least = SIZE_MAX, most = 0;
    json_array_foreach(peers, i, peer)
    {
        const json_t *rails = json_object_get(peer, "rails");
        size_t n = 0;
        json_array_foreach(rails, k, rail)
        {
            n += strcmp(json_string_value(json_object_get(rail, "state")), "not used") != 0;
        }
        if (!rails)
            n = 1;
        least = n < least ? n : least;
        most = json_array_size(rails) > most ? json_array_size(rails) : most;
    }
    buf[0] = '\0';
    if (most > 1)
        snprintf(buf, len, ", %zu of %zu rails", least, most);
}

static bool tcp_asked(const json_t *member)
{
    const char *asked = json_string_value(json_object_get(member, "transport"));
    return asked && strcmp(asked, "tcp") == 0;
}

/* Who decided about the transport, when it was not left to what the nodes can; and where they can nothing else. */
static const char *forced(const struct hrd_daemon *d, const json_t *member, bool no_device)
{
    const char *asked = json_string_value(json_object_get(member, "transport"));
    if (d->cfg.transport != 0)
        return " (forced by transport in hreduced.conf)";
    if (asked && strcmp(asked, "auto") != 0)
        return " (forced by transport of the job or of its root node)";
    return no_device ? " (no RDMA device on this node and its peers)" : "";
}

/* ", connected by exchange instead of RDMA-CM on n1: no RDMA-CM there": of the first peer that has a reason, or of all. */
static void setup_text(const json_t *peers, char *buf, size_t len)
{
    const json_t *peer, *first = NULL;
    size_t i;
    json_array_foreach(peers, i, peer)
    {
        if (json_object_get(peer, "setup") && (!first || !json_object_get(first, "setup_reason")))
            first = peer;
    }
    const char *why = json_string_value(json_object_get(first, "setup_reason"));
    buf[0] = '\0';
    if (!first)
        return;
    if (!why)
        snprintf(buf, len, ", connected by %s", json_string_value(json_object_get(first, "setup")));
    else /* of hrd_peer_setup(): begins with "node " */
        snprintf(buf, len, ", connected by exchange instead of RDMA-CM on %s", why + strlen("node "));
}

/* A link of one stream is the agent's, whatever threads there are. */
static void io_text(const struct hrd_config *cfg, unsigned streams, char *buf, size_t len)
{
    if (streams > 1 && cfg->io_threads > 0)
        snprintf(buf, len, ", copied by %u I/O thread%s", cfg->io_threads, cfg->io_threads == 1 ? "" : "s");
    else
        snprintf(buf, len, ", copied by the agent's thread");
}

static void exchange_stage(json_t *stages, struct hrd_daemon *d, const struct hrd_snapshot *snap,
                           const struct hrd_snapshot_comm *c, const json_t *member)
{
    char used[1000], class[64] = "", setup[600], io[64] = "", rails[64];
    if (c->nnodes == 1) {
        stage(stages, "exchange", "none: all ranks are on this node");
        return;
    }
    json_t *peers = peers_of(d, snap, c, member);
    json_int_t streams = json_integer_value(json_object_get(json_array_get(peers, 0), "streams"));
    const char *transport = common_transport(peers);
    const json_t *slow = slow_peer(peers), *out, *of = NULL;
    bool no_device = slow && json_object_get(slow, "no_device");
    if (!slow)
        snprintf(class, sizeof(class), ", service level %d, traffic class %d",
                 (int)json_integer_value(json_object_get(member, "service_level")),
                 (int)json_integer_value(json_object_get(member, "traffic_class")));
    setup_text(peers, setup, sizeof(setup));
    rails_text(peers, rails, sizeof(rails));
    if (strcmp(transport, "tcp") == 0)
        io_text(&d->cfg, (unsigned)streams, io, sizeof(io));
    snprintf(used, sizeof(used), "%s%s%s, %d %s%s a peer%s%s, peers not authenticated%s", transport,
             forced(d, member, no_device), rails, (int)streams, slow ? "stream" : "queue pair",
             streams == 1 ? "" : "s", io, class, setup);
    json_t *s = stage(stages, "exchange", used);
    if (slow && !no_device && !tcp_asked(member)) {
        const char *why = json_string_value(json_object_get(slow, "reason"));
        wanted(s, "verbs", why ? why : "the link is lost",
               "'hreducectl doctor' on that node says what to do; where that is how it should be, set "
               "transport = tcp");
    }
    if (!slow && (out = rail_out(peers, &of))) {
        char wish[64], why[900];
        snprintf(wish, sizeof(wish), "%zu rails", json_array_size(json_object_get(of, "rails")));
        snprintf(why, sizeof(why), "rail %d with node %s is %s: %s",
                 (int)json_integer_value(json_object_get(out, "rail")),
                 json_string_value(json_object_get(of, "name")),
                 json_string_value(json_object_get(out, "state")),
                 json_string_value(json_object_get(out, "reason")));
        wanted(s, wish, why,
               "'hreducectl doctor' on that node; a rail that was put right is used again when no "
               "communicator uses the "
               "link for 2 seconds, so by the next job; or name fewer devices in verbs_device on all nodes");
    }
    json_object_set_new(s, "peers", peers);
}

/* Where the blocks of large operations over GPU memory lie between the local stages and the exchange. */
static void memory_stage(json_t *stages, const struct hrd_snapshot_comm *c)
{
    char used[640];
    if (!c->gdr_used[0])
        return;
    int n = snprintf(used, sizeof(used), "%s", c->gdr_used);
    if (c->gdr_units > 0 || c->gdr_full > 0)
        snprintf(used + n, sizeof(used) - (size_t)n, ", %" PRIu64 " of %" PRIu64 " blocks", c->gdr_units,
                 c->gdr_units + c->gdr_full);
    json_t *s = stage(stages, "exchange memory", used);
    if (c->gdr_why[0])
        wanted(s, "GPU memory that the adapter reads and writes", c->gdr_why, c->gdr_remedy);
    else if (c->gdr_full > 0)
        wanted(s, "GPU memory for all blocks", "there was no room for some",
               "raise gdr_memory in hreduced.conf");
}

/* The plan says itself when the configuration decided. "auto" is what the root asked for, for all nodes. */
static void algorithm_stage(json_t *stages, const struct hrd_snapshot_comm *c, const json_t *member)
{
    const char *asked = json_string_value(json_object_get(member, "algorithm"));
    char used[64];
    if (asked && strcmp(asked, "auto") != 0)
        snprintf(used, sizeof(used), "%s, set by configuration; no operation yet", asked);
    else
        snprintf(used, sizeof(used), "chosen by size, no operation yet");
    stage(stages, "algorithm", c->last_plan[0] ? c->last_plan : used);
}

json_t *hrd_engines_json(const struct hrd_snapshot_comm *c)
{
    static const char *const engine[HRD_NENGINES] = {"host", "dma", "sm"};
    json_t *ops = json_object();
    for (unsigned i = 0; i < HRD_NENGINES; i++)
        if (c->engine_ops[i] > 0)
            json_object_set_new(ops, engine[i], json_integer((json_int_t)c->engine_ops[i]));
    return ops;
}

json_t *hrd_algorithms_json(const struct hrd_snapshot_comm *c)
{
    static const char *const algo[HRP_NALGOS] = {"local", "direct", "gather", "pairwise", "ring", "tree"};
    json_t *ops = json_object();
    for (unsigned i = 0; i < HRP_NALGOS; i++)
        if (c->algo_ops[i] > 0)
            json_object_set_new(ops, algo[i], json_integer((json_int_t)c->algo_ops[i]));
    return ops;
}

static json_t *stages_json(const uint64_t stage_ns[HRD_NSTAGES])
{
    static const char *const name[HRD_NSTAGES] = {"post",     "ready", "begin", "reduce",
                                                  "exchange", "work",  "done"};
    json_t *o = json_object();
    for (unsigned i = 0; i < HRD_NSTAGES; i++)
        json_object_set_new(o, name[i], json_integer((json_int_t)stage_ns[i]));
    return o;
}

static json_t *all_stages_json(const struct hrd_snapshot_comm *c)
{
    uint64_t sum[HRD_NSTAGES] = {0};
    for (unsigned k = 0; k < HRP_NCOLLS; k++)
        for (unsigned i = 0; i < HRD_NSTAGES; i++)
            sum[i] += c->stage_ns[k][i];
    return stages_json(sum);
}

json_t *hrd_collectives_json(const struct hrd_snapshot_comm *c)
{
    json_t *colls = json_object();
    for (unsigned k = 0; k < HRP_NCOLLS; k++) {
        if (c->coll_ops[k] == 0)
            continue;
        json_object_set_new(colls, hrp_coll_name(k),
                            json_pack("{s:I, s:o}", "ops", (json_int_t)c->coll_ops[k], "stage_ns",
                                      stages_json(c->stage_ns[k])));
    }
    return colls;
}

/* What a job needs to measure an op's cost on its node and between the nodes, and to know which result is promised. */
static void add_figures(json_t *path, const struct hrd_snapshot_comm *c, const json_t *member)
{
    static const char *const settings[] = {"reproducible", "wire"};
    json_object_set_new(path, "ops_done", json_integer((json_int_t)c->ops_done));
    json_object_set_new(path, "tx_bytes", json_integer((json_int_t)c->tx_bytes));
    json_object_set_new(path, "rx_bytes", json_integer((json_int_t)c->rx_bytes));
    json_object_set_new(path, "algorithms", hrd_algorithms_json(c));
    json_object_set_new(path, "engines", hrd_engines_json(c));
    json_object_set_new(path, "stage_ns", all_stages_json(c));
    for (unsigned i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        json_t *v = json_object_get(member, settings[i]);
        if (v)
            json_object_set(path, settings[i], v);
    }
}

json_t *hrd_path_json(struct hrd_daemon *d, const struct hrd_snapshot *snap,
                      const struct hrd_snapshot_comm *c, const json_t *member)
{
    char id[24], layout[256];
    json_t *stages = json_array();
    snprintf(id, sizeof(id), "%016" PRIx64, c->comm);
    layout_text(c, member, layout, sizeof(layout));
    buffers_stage(stages, c);
    local_stage(stages, "local reduce", snap, c);
    exchange_stage(stages, d, snap, c, member);
    memory_stage(stages, c);
    algorithm_stage(stages, c, member);
    local_stage(stages, "local broadcast", snap, c);
    json_t *path = json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:s, s:o}", "comm", id, "layout", layout,
                             "nranks", (int)c->nranks, "nnodes", (int)c->nnodes, "node", (int)c->node,
                             "nlocal", (int)c->nlocal, "node_name", d->node_name, "stages", stages);
    add_figures(path, c, member);
    return path;
}

/* "tcp instead of verbs on n3: port 1 of mlx5_0 is DOWN (4 streams a peer)" */
static int used_text(const json_t *s, char *buf, size_t len)
{
    const char *used = json_string_value(json_object_get(s, "used"));
    const char *reason = json_string_value(json_object_get(s, "reason"));
    size_t head = strcspn(used, ",");
    if (!reason)
        return snprintf(buf, len, "%s", used);
    bool node = strncmp(reason, "node ", 5) == 0;
    bool more = strncmp(used + head, ", ", 2) == 0;
    return snprintf(buf, len, "%.*s instead of %s%s%s%s%s%s", (int)head, used,
                    json_string_value(json_object_get(s, "wanted")), node ? " on " : ": ",
                    reason + (node ? 5 : 0), more ? " (" : "", more ? used + head + 2 : "", more ? ")" : "");
}

bool hrd_path_fell_back(const json_t *path)
{
    const json_t *stages = json_object_get(path, "stages"), *s, *p;
    size_t i, k;
    json_array_foreach(stages, i, s)
    {
        json_array_foreach(json_object_get(s, "peers"), k, p)
        {
            if (json_object_get(p, "fell_back"))
                return true;
        }
    }
    return false;
}

void hrd_path_line(const json_t *path, char *buf, size_t len)
{
    const json_t *stages = json_object_get(path, "stages"), *s;
    size_t i, at = (size_t)snprintf(buf, len, "%s", json_string_value(json_object_get(path, "layout")));
    json_array_foreach(stages, i, s)
    {
        const char *used = json_string_value(json_object_get(s, "used"));
        if (at >= len)
            return;
        if (strcmp(used, NOTHING_YET) == 0)
            continue;
        at += (size_t)snprintf(buf + at, len - at, "; %s: ", json_string_value(json_object_get(s, "stage")));
        if (at < len)
            at += (size_t)used_text(s, buf + at, len - at);
        const char *why = json_string_value(json_object_get(s, "why"));
        if (why && at < len)
            at += (size_t)snprintf(buf + at, len - at, " (%s)", why);
    }
}
