/* SPDX-License-Identifier: MIT */
/* The path report's words for what the nodes exchange over. */
#include "daemon/status.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define NEITHER "neither node has an RDMA device (n0: no driver; n2: no driver)"
#define DOWN "node n2: port 1 of mlx5_0 is DOWN: is the cable in?"

/* Three nodes, this one the first: n1 by the link `first`, n2 by the link `second`. */
static json_t *report(uint8_t configured, const char *asked, const char *first, const char *second,
                      const char *why[2], char line[1024])
{
    static struct hrd_daemon d;
    struct hrd_snapshot_link link[2] = {{.peer = 11, .nstreams = 2}, {.peer = 12, .nstreams = 2}};
    struct hrd_snapshot snap = {.threads = 2, .simd = "avx2", .nlinks = 2, .link = link};
    struct hrd_snapshot_comm c = {.comm = 1, .nranks = 3, .nnodes = 3, .nlocal = 1};
    json_t *member =
        json_pack("{s:s, s:s, s:[{s:s, s:i}, {s:s, s:i, s:i, s:i}, {s:s, s:i, s:i, s:i}]}", "transport",
                  asked, "algorithm", "auto", "nodes", "name", "n0", "ranks", 1, "name", "n1", "ranks", 1,
                  "peer", 1, "link", 11, "name", "n2", "ranks", 1, "peer", 2, "link", 12);
    d.cfg.transport = configured;
    snprintf(d.node_name, sizeof(d.node_name), "n0");
    snprintf(link[0].transport, sizeof(link[0].transport), "%s", first);
    snprintf(link[1].transport, sizeof(link[1].transport), "%s", second);
    for (size_t i = 0; i < 2; i++) {
        json_t *node = json_array_get(json_object_get(member, "nodes"), i + 1);
        if (!why[i])
            continue;
        json_object_set_new(node, "reason", json_string(why[i]));
        json_object_set_new(node, strcmp(why[i], NEITHER) == 0 ? "no_device" : "fell_back", json_true());
    }
    json_t *path = hrd_path_json(&d, &snap, &c, member);
    hrd_path_line(path, line, 1024);
    json_decref(member);
    return path;
}

static void says(const char *line, const char *words)
{
    if (!strstr(line, words))
        fail_msg("'%s' does not say '%s'", line, words);
}

static void test_exchange(void **state)
{
    (void)state;
    static const struct {
        uint8_t configured;
        const char *asked, *first, *second, *why[2], *words;
        bool fell_back;
    } row[] = {
        {0, "auto", "verbs", "verbs", {0}, "exchange: verbs, 2 queue pairs a peer", false},
        {0,
         "auto",
         "tcp",
         "tcp",
         {NULL, DOWN},
         "exchange: tcp instead of verbs on n2: port 1 of mlx5_0 is DOWN: is the cable in? (2 streams a "
         "peer, ",
         true},
        {0,
         "auto",
         "verbs",
         "tcp",
         {NULL, DOWN},
         "exchange: mixed instead of verbs on n2: port 1 of mlx5_0",
         true},
        {0, "auto", "tcp", "tcp", {0}, "exchange: tcp instead of verbs: the link is lost (", false},
        {0,
         "auto",
         "tcp",
         "tcp",
         {NEITHER, DOWN},
         "exchange: tcp instead of verbs on n2: port 1 of mlx5_0",
         true},
        {0,
         "auto",
         "tcp",
         "tcp",
         {DOWN, NEITHER},
         "exchange: tcp instead of verbs on n2: port 1 of mlx5_0",
         true},
        {0,
         "auto",
         "tcp",
         "tcp",
         {NEITHER, NEITHER},
         "exchange: tcp (no RDMA device on this node and its peers), 2 streams a peer",
         false},
        {1, "tcp", "tcp", "tcp", {0}, "exchange: tcp (forced by transport in hreduced.conf)", false},
        {0,
         "tcp",
         "tcp",
         "tcp",
         {0},
         "exchange: tcp (forced by transport of the job or of its root node)",
         false},
        {0, "verbs", "verbs", "verbs", {0}, "exchange: verbs (forced by transport of the job", false},
    };
    for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
        char line[1024];
        const char *why[2] = {row[i].why[0], row[i].why[1]};
        json_t *path = report(row[i].configured, row[i].asked, row[i].first, row[i].second, why, line);
        bool neither = why[0] && why[1] && strcmp(why[0], why[1]) == 0;
        says(line, row[i].words);
        assert_int_equal(hrd_path_fell_back(path), row[i].fell_back);
        if (strcmp(row[i].asked, "tcp") == 0 || neither)
            assert_null(strstr(line, "instead of"));
        json_decref(path);
    }
}

/* One entry a peer, with what its own link is. */
static void test_peers(void **state)
{
    (void)state;
    char line[1024];
    const char *why[2] = {NULL, DOWN};
    json_t *path = report(0, "auto", "verbs", "tcp", why, line), *peers;
    peers = json_object_get(json_array_get(json_object_get(path, "stages"), 2), "peers");
    assert_int_equal(json_array_size(peers), 2);
    assert_string_equal(json_string_value(json_object_get(json_array_get(peers, 0), "transport")), "verbs");
    assert_null(json_object_get(json_array_get(peers, 0), "reason"));
    assert_string_equal(json_string_value(json_object_get(json_array_get(peers, 1), "transport")), "tcp");
    assert_string_equal(json_string_value(json_object_get(json_array_get(peers, 1), "reason")), DOWN);
    json_decref(path);
}

/* What GPUDirect RDMA does is a stage of its own, and each peer has both directions. */
static void test_gdr(void **state)
{
    (void)state;
    static struct hrd_daemon d;
    static struct hrd_snapshot_link link = {
        .peer = 11, .nstreams = 2, .transport = "verbs", .gdr_receive = true};
    struct hrd_snapshot snap = {.threads = 2, .simd = "avx2", .nlinks = 1, .link = &link};
    struct hrd_snapshot_comm c = {.comm = 1, .nranks = 2, .nnodes = 2, .nlocal = 1};
    json_t *member =
        json_pack("{s:s, s:s, s:[{s:s, s:i}, {s:s, s:i, s:i, s:i}]}", "transport", "auto", "algorithm",
                  "auto", "nodes", "name", "n0", "ranks", 1, "name", "n1", "ranks", 1, "peer", 1, "link", 11);
    char line[1024];
    json_t *path = hrd_path_json(&d, &snap, &c, member);
    hrd_path_line(path, line, sizeof(line));
    assert_null(strstr(line, "exchange memory"));
    json_decref(path);
    snprintf(c.gdr_used, sizeof(c.gdr_used), "memory of GPU 0000:10:00.0, written by mlx5_0 port 1 (way)");
    snprintf(c.gdr_why, sizeof(c.gdr_why), "mlx5_0 does not read memory of GPU 0000:10:00.0: damaged");
    snprintf(c.gdr_remedy, sizeof(c.gdr_remedy), "switch off ACS");
    c.gdr_units = 3;
    c.gdr_full = 1;
    path = hrd_path_json(&d, &snap, &c, member);
    hrd_path_line(path, line, sizeof(line));
    says(line, "exchange memory: memory of GPU 0000:10:00.0 instead of GPU memory that the adapter reads and "
               "writes: mlx5_0 does not read memory of GPU 0000:10:00.0: damaged (written by mlx5_0 port 1 "
               "(way), 3 of 4 blocks)");
    const json_t *stages = json_object_get(path, "stages"), *s, *peer;
    size_t i;
    json_array_foreach(stages, i, s)
    {
        peer = json_array_get(json_object_get(s, "peers"), 0);
        if (!peer)
            continue;
        assert_string_equal(json_string_value(json_object_get(peer, "send")), "host memory");
        assert_string_equal(json_string_value(json_object_get(peer, "receive")), "GPU memory");
    }
    json_decref(path);
    json_decref(member);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exchange),
        cmocka_unit_test(test_gdr),
        cmocka_unit_test(test_peers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
