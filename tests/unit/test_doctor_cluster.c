/* SPDX-License-Identifier: MIT */
/* The checks between nodes, on what nodes might have said. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/doctor/facts.h"

static json_t *doc;

static json_t *list(const char *key)
{
    return json_object_get(doc, key);
}

static void node(const char *name)
{
    json_t *facts = json_pack("{s:s, s:s, s:s, s:{s:s, s:s}, s:i, s:{s:i, s:I}, s:{}, s:{s:i}}", "version",
                              "0.1.0", "protocol", "1.2", "kernel", "6.1.0", "configuration", "algorithm",
                              "auto", "threads", "8", "bandwidth", 0, "net", "mtu", 9000, "bytes_per_s",
                              (json_int_t)1250000000, "rdma", "gpu", "count", 8);
    assert_non_null(facts);
    json_array_append_new(list("nodes"), json_pack("{s:s, s:o}", "name", name, "facts", facts));
}

/* Changes a fact of node i; part "": of the facts themselves. */
static void fact(unsigned i, const char *part, const char *key, json_t *value)
{
    json_t *facts = json_object_get(json_array_get(list("nodes"), i), "facts");
    json_object_set_new(part[0] ? json_object_get(facts, part) : facts, key, value);
}

static void reach(const char *from, const char *to, const char *address, const char *why)
{
    json_array_append_new(list("reach"),
                          json_pack("{s:s, s:s, s:s, s:b, s:s}", "from", from, "to", to, "address", address,
                                    "ok", why == NULL, "why", why ? why : ""));
}

static void probe(const char *from, const char *to, const char *transport, double rate)
{
    json_array_append_new(list("probes"), json_pack("{s:s, s:s, s:s, s:s, s:f, s:I}", "from", from, "to", to,
                                                    "transport", transport, "path", "a path", "round_trip_us",
                                                    20.0, "bytes_per_s", (json_int_t)rate));
}

static int fresh(void **state)
{
    (void)state;
    json_decref(doc);
    doc = json_pack("{s:[], s:[], s:[]}", "nodes", "reach", "probes");
    node("a");
    node("b");
    node("c");
    return 0;
}

static int done(void **state)
{
    (void)state;
    json_decref(doc);
    doc = NULL;
    return 0;
}

/* n-th check of that name (from 0). */
static void expect_nth(const char *name, unsigned n, const char *verdict, const char *words)
{
    json_t *all = hrd_doctor_cluster(doc), *c, *found = NULL;
    size_t i;
    json_array_foreach(all, i, c)
    {
        if (!found && strcmp(json_string_value(json_object_get(c, "check")), name) == 0 && n-- == 0)
            found = c;
    }
    if (!found)
        fail_msg("no check %s", name);
    const char *v = json_string_value(json_object_get(found, "verdict"));
    const char *e = json_string_value(json_object_get(found, "evidence"));
    if (strcmp(v, verdict) != 0 || !strstr(e, words))
        fail_msg("%s: %s instead of %s, or no '%s': %s", name, v, verdict, words, e);
    bool bad = strcmp(verdict, "warn") == 0 || strcmp(verdict, "fail") == 0;
    assert_int_equal(bad, json_string_value(json_object_get(found, "remedy"))[0] != 0);
    assert_int_equal(bad, json_string_value(json_object_get(found, "cause"))[0] != 0);
    json_decref(all);
}

static void expect(const char *name, const char *verdict, const char *words)
{
    expect_nth(name, 0, verdict, words);
}

/* However many there are, the last one counts like the first. */
static void test_many_nodes(void **state)
{
    (void)state;
    for (unsigned i = 0; i < 200; i++)
        node("more");
    node("last");
    fact(203, "", "kernel", json_string("5.15.0"));
    expect("cluster-kernel", "warn", "the kernel is 5.15.0 on last, 6.1.0 on the other 203");
}

static void test_agreement(void **state)
{
    (void)state;
    static const char *const same[] = {
        "cluster-configuration", "cluster-version", "cluster-kernel", "cluster-mtu",
        "cluster-link",          "cluster-rdma",    "cluster-gpu"};
    expect("cluster-nodes", "pass", "3 nodes answered");
    for (size_t i = 0; i < sizeof(same) / sizeof(same[0]); i++)
        expect(same[i], "pass", "all nodes agree");
    expect("cluster-clock", "skip", "no other node");
    expect("cluster-reach", "skip", "no other node");
}

/* The odd one out is named, with its value and that of the others. */
static void test_odd_one(void **state)
{
    (void)state;
    fact(1, "", "version", json_string("0.0.9"));
    expect("cluster-version", "warn", "the version of hreduced is 0.0.9 on b, 0.1.0 on the other 2");
    fact(2, "", "protocol", json_string("1.1"));
    expect("cluster-version", "warn", "the protocol between daemons is 1.1 on c, 1.2 on the other 2");
    fact(0, "", "kernel", json_string("5.15.0"));
    expect("cluster-kernel", "warn", "5.15.0 on a, 6.1.0 on the other 2");
    fact(2, "net", "mtu", json_integer(1500));
    expect("cluster-mtu", "fail", "the MTU is 1500 on c, 9000 on the other 2");
    fact(1, "net", "bytes_per_s", json_integer(125000000));
    expect("cluster-link", "warn", "125000000 on b");
    fact(1, "gpu", "count", json_integer(7));
    expect("cluster-gpu", "warn", "7 on b, 8 on the other 2");
    fact(1, "gpu", "driver", json_string("535.104.05"));
    expect("cluster-gpu", "warn", "the GPU driver is 535.104.05 on b, none on the other 2");
    fact(0, "rdma", "rate", json_string("100 Gb/sec (4X EDR)"));
    fact(1, "rdma", "rate", json_string("100 Gb/sec (4X EDR)"));
    expect("cluster-rdma", "warn",
           "the rate of the RDMA port is none on c, 100 Gb/sec (4X EDR) on the other 2");
    fact(2, "rdma", "rate", json_string("100 Gb/sec (4X EDR)"));
    expect("cluster-rdma", "pass", "all nodes agree");
    fact(2, "rdma", "link_layer", json_string("Ethernet"));
    expect("cluster-rdma", "warn", "the link layer of the RDMA device is Ethernet on c");
}

static void test_configuration(void **state)
{
    (void)state;
    fact(1, "configuration", "algorithm", json_string("ring"));
    expect("cluster-configuration", "warn", "algorithm is ring on b, auto on the other 2");
    /* No majority: everybody is named. */
    fact(2, "configuration", "algorithm", json_string("tree"));
    expect("cluster-configuration", "warn", "algorithm is auto on a, ring on b, tree on c");
    fact(2, "configuration", "new_key", json_string("1"));
    expect("cluster-configuration", "warn", "new_key is 1 on c, none on the other 2");
}

/* What an interface does not say is no difference. */
static void test_unknown(void **state)
{
    (void)state;
    fact(1, "net", "bytes_per_s", json_integer(0));
    expect("cluster-link", "pass", "all nodes agree");
    json_object_del(json_object_get(json_object_get(json_array_get(list("nodes"), 2), "facts"), "net"),
                    "mtu");
    expect("cluster-mtu", "pass", "all nodes agree");
}

static void test_nodes(void **state)
{
    (void)state;
    json_array_append_new(list("nodes"),
                          json_pack("{s:s, s:s}", "name", "10.0.0.9", "failed", "connection refused"));
    expect("cluster-nodes", "fail", "10.0.0.9: connection refused");
    expect("cluster-mtu", "pass", "all nodes agree");
    json_array_clear(list("nodes"));
    node("a");
    expect("cluster-nodes", "skip", "no other node is connected");
}

static void test_clock(void **state)
{
    (void)state;
    json_t *b = json_array_get(list("nodes"), 1);
    json_object_set_new(b, "clock_offset_ms", json_real(-12.0));
    json_object_set_new(b, "clock_error_ms", json_real(0.5));
    expect("cluster-clock", "pass", "b is 12.0 ms (+-0.5) behind");
    json_object_set_new(b, "clock_offset_ms", json_real(2500.0));
    expect("cluster-clock", "warn", "b is 2500.0 ms (+-0.5) ahead");
    json_object_set_new(b, "clock_error_ms", json_real(2000.0));
    expect("cluster-clock", "pass", "2500.0");
}

static void test_reach(void **state)
{
    (void)state;
    reach("a", "b", "10.0.0.2 port 18515", NULL);
    reach("b", "a", "10.0.0.1 port 18515", NULL);
    expect("cluster-reach", "pass", "2 connections");
    reach("b", "a", "192.168.0.1 port 18515", "no route to it");
    expect("cluster-reach", "warn", "from b to a at 192.168.0.1 port 18515: no route to it");
    reach("c", "a", "10.0.0.1 port 18515", "no answer");
    expect("cluster-reach", "fail", "from c to a at 10.0.0.1 port 18515: no answer");
}

static void test_rate(void **state)
{
    (void)state;
    probe("a", "b", "tcp", 1.1e9);
    probe("b", "a", "tcp", 0.7e9);
    probe("a", "c", "tcp", 0.36e9);
    expect_nth("cluster-rate", 0, "pass", "a -> b: 1.10 GB/s over tcp (88% of the link's 1.25 GB/s), 20 us");
    expect_nth("cluster-rate", 1, "warn", "b -> a: 0.70 GB/s over tcp (56%");
    expect_nth("cluster-rate", 2, "fail", "a -> c: 0.36 GB/s over tcp (29%");
    /* The configured rate counts before what the NIC says, and the slower end decides. */
    fact(2, "", "bandwidth", json_integer(400000000));
    expect_nth("cluster-rate", 2, "pass", "90% of the link's 0.40 GB/s");
    /* Over verbs it is the RDMA device's rate. */
    fact(0, "rdma", "bytes_per_s", json_integer(12500000000));
    fact(1, "rdma", "bytes_per_s", json_integer(12500000000));
    probe("a", "b", "verbs", 3e9);
    expect_nth("cluster-rate", 3, "fail", "3.00 GB/s over verbs (24% of the link's 12.50 GB/s)");
    json_array_append_new(list("probes"), json_pack("{s:s, s:s, s:s}", "from", "a", "to", "c", "failed",
                                                    "no data link came up"));
    expect_nth("cluster-rate", 4, "fail", "a -> c: no data link came up");
}

/* Nobody knows what the links can do: who is far behind the best is named. */
static void test_rate_unknown(void **state)
{
    (void)state;
    for (unsigned i = 0; i < 3; i++)
        fact(i, "net", "bytes_per_s", json_integer(0));
    probe("a", "b", "tcp", 2e9);
    probe("a", "c", "tcp", 0.5e9);
    expect_nth("cluster-rate", 0, "pass", "the link's rate is unknown; 100% of the best here");
    expect_nth("cluster-rate", 1, "warn", "25% of the best here");
}

/* An answer of another version, or of one that lies, is no reason to fall over. */
static void test_nonsense(void **state)
{
    (void)state;
    static const char *const text[] = {
        "{}", "[]", "{\"nodes\": 3, \"reach\": {}, \"probes\": \"x\"}",
        "{\"nodes\": [1, null, {\"facts\": 3}, {\"name\": 5, \"facts\": {\"net\": 7, \"configuration\": "
        "[]}}], "
        "\"reach\": [[], {\"ok\": 3}], \"probes\": [{}, {\"bytes_per_s\": -1, \"from\": 1}]}"};
    for (size_t i = 0; i < sizeof(text) / sizeof(text[0]); i++) {
        json_t *bad = json_loads(text[i], 0, NULL);
        assert_non_null(bad);
        json_t *out = hrd_doctor_cluster(bad);
        assert_true(json_array_size(out) >= 10);
        json_decref(out);
        json_decref(bad);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fresh, done)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_agreement), TEST(test_many_nodes),   TEST(test_odd_one),  TEST(test_configuration),
        TEST(test_unknown),   TEST(test_nodes),        TEST(test_clock),    TEST(test_reach),
        TEST(test_rate),      TEST(test_rate_unknown), TEST(test_nonsense),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
