/* SPDX-License-Identifier: MIT */
/* The configuration table and its parser. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/config_table.h"
#include "proto/wire.h"

struct heard {
    int n;
    char text[8192];
};

static void hear(void *ctx, const char *sentence)
{
    struct heard *h = ctx;
    h->n++;
    strncat(h->text, sentence, sizeof(h->text) - strlen(h->text) - 1);
    strncat(h->text, "\n", sizeof(h->text) - strlen(h->text) - 1);
}

/* Loads text as a file; what was reported is in *h. */
static int load(struct hrd_config *c, const char *text, size_t len, struct heard *h)
{
    char path[] = "/tmp/hrd-config-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, len), len);
    close(fd);
    *h = (struct heard){0};
    int rc = hrd_config_load(c, path, hear, h);
    unlink(path);
    return rc;
}

static void test_defaults(void **state)
{
    struct hrd_config c;
    char buf[128];
    (void)state;
    hrd_config_defaults(&c);
    assert_string_equal(c.socket, HRP_DEFAULT_SOCKET);
    assert_int_equal(c.port, HRP_DEFAULT_PORT);
    assert_int_equal(c.listen.n, 1);
    assert_string_equal(c.listen.v[0], "127.0.0.1");
    assert_int_equal(c.advertise.n, 0);
    assert_int_equal(c.peer_timeout_ms, 10000);
    assert_int_equal(c.op_timeout_ms, 600000);
    assert_int_equal(c.arena_bytes, 64 << 20);
    assert_true(hrd_config_unit_min(&c) == (uint64_t)(c.io_threads ? 256 : 512) << 10);
    c.unit_bytes = 128 << 10;
    assert_int_equal(hrd_config_unit_min(&c), 128 << 10); /* never a contradiction of the two */
    assert_int_equal(hrd_config_check(&c, NULL, NULL), 0);
    hrd_config_defaults(&c);
    assert_int_equal(c.eager_limit, 24 << 10);
    assert_int_equal(c.bandwidth, 0);
    assert_true(c.reproducible);
    assert_false(c.wire_f32);
    assert_in_range(c.threads, 1, 8);
    assert_in_range(c.io_threads, 0, 4);
    assert_int_equal(c.tcp_streams, c.io_threads < 4 ? 4 : 5);
    assert_true(c.node_name[0] != '\0' && strcmp(c.node_name, "auto") != 0);
    assert_int_equal(hrd_config_check(&c, NULL, NULL), 0);
    /* Each default, spelt out again, is itself. */
    for (unsigned i = 0; i < hrd_nkeys; i++) {
        struct hrd_config again = c;
        char err[256];
        if (!hrd_keys[i].name)
            continue;
        assert_non_null(hrd_config_get(&c, hrd_keys[i].name, buf, sizeof(buf)));
        assert_int_equal(hrd_config_set(&again, hrd_keys[i].name, buf, err, sizeof(err)), 0);
        assert_memory_equal(&again, &c, sizeof(c));
    }
}

static const struct {
    const char *key, *value, *back; /* back NULL: refused */
} row[] = {
    {"arena_size", "4M", "4M"},
    {"arena_size", "4m", "4M"},
    {"arena_size", "6291456", "6M"},
    {"arena_size", "1T", "1T"},
    {"arena_size", "1025G", NULL},
    {"arena_size", "99999999999999999999", NULL},
    {"arena_size", "18014398509481984K", NULL}, /* 2^64 */
    {"arena_size", "4 M", NULL},
    {"arena_size", "4MB", NULL},
    {"arena_size", "-4M", NULL},
    {"arena_size", "", NULL},
    {"arena_size", "1M", NULL},
    {"unit_min", "auto", "auto"},
    {"unit_min", "4K", "4K"},
    {"unit_min", "0", NULL},
    {"unit_min", "any", NULL},
    {"peer_timeout", "1s", "1s"},
    {"peer_timeout", "1500ms", "1500ms"},
    {"peer_timeout", "2 min", "2min"},
    {"peer_timeout", "999ms", NULL},
    {"peer_timeout", "11min", NULL},
    {"peer_timeout", "10", NULL},
    {"peer_timeout", "10sec", NULL},
    {"op_timeout", "0", "0"},
    {"op_timeout", "0s", "0"},
    {"op_timeout", "24h", "24h"},
    {"op_timeout", "18446744073709551615h", NULL},
    {"port", "65535", "65535"},
    {"port", "0", NULL},
    {"port", "65536", NULL},
    {"port", "1e3", NULL},
    {"threads", "64", "64"},
    {"threads", "0", NULL},
    {"threads", "65", NULL},
    {"io_threads", "0", "0"},
    {"io_threads", "16", "16"},
    {"io_threads", "17", NULL},
    {"tcp_streams", "16", "16"},
    {"tcp_streams", "0", NULL},
    {"tcp_streams", "17", NULL},
    {"spin_us", "0", "0"},
    {"bandwidth", "100Gbit", "100Gbit"},
    {"bandwidth", "12.5G", "100Gbit"},
    {"bandwidth", "1Mbit", NULL},
    {"bandwidth", "nan", NULL},
    {"bandwidth", "1.2.3G", NULL},
    {"bandwidth", "auto", "auto"},
    {"listen", "10.0.0.1, fe80::1%eth0 ,::", "10.0.0.1, fe80::1%eth0, ::"},
    {"listen", "", NULL},
    {"listen", "localhost", NULL},
    {"listen", "10.0.0.256", NULL},
    {"listen", "fe80::1%", NULL},
    {"listen", "::%   !\t\tx", NULL}, /* a fuzzer's find: no interface is called that */
    {"listen", "fe80::1%sixteen_letters_", NULL},
    {"listen", "1.1.1.1,1.1.1.2,1.1.1.3,1.1.1.4,1.1.1.5,1.1.1.6,1.1.1.7,1.1.1.8,1.1.1.9", NULL},
    {"advertise", "", ""},
    {"verbs_device", "mlx5_0", "mlx5_0"},
    {"verbs_device", "mlx5_0:2, mlx5_1", "mlx5_0:2,mlx5_1"},
    {"verbs_device", "a,b,c,d", "a,b,c,d"},
    {"verbs_device", "a,b,c,d,e", NULL},
    {"verbs_device", "a,a", NULL},
    {"verbs_device", "a:1,a:2", "a:1,a:2"},
    {"verbs_device", "a:01, b:002", "a:1,b:2"},
    {"verbs_device", "a:1,a:01", NULL},
    {"verbs_device", "a,a:1", NULL},
    {"verbs_device", "a:2,a", NULL},
    {"verbs_device", "a,auto", NULL},
    {"verbs_device", "auto:1", NULL},
    {"verbs_device", "a:0", NULL},
    {"verbs_device", "a:256", NULL},
    {"verbs_device", "a:1x", NULL},
    {"verbs_device", ":1", NULL},
    {"verbs_device", ",", NULL},
    {"verbs_device", "", NULL},
    {"verbs_device", "a/b", NULL},
    {"verbs_device", "sixteen_letters_sixteen_letters_sixteen_letters_sixteen_letters_", NULL},
    {"interface", "ib0", "ib0"},
    {"interface", "10.1.0.0/16", "10.1.0.0/16"},
    {"interface", "fd00::/64", "fd00::/64"},
    {"interface", "10.1.0.0/33", NULL},
    {"interface", "10.1.0/16", NULL},
    {"interface", "ib0/16", NULL},
    {"interface", "an-interface-name-too-long", NULL},
    {"socket", "/run/x", "/run/x"},
    {"socket", "x", NULL},
    {"node_name", "node-1.a_b", "node-1.a_b"},
    {"node_name", "node 1", NULL},
    {"node_name", "", NULL},
    {"algorithm", "ring", "ring"},
    {"algorithm", "Ring", NULL},
    {"reproducible", "off", "off"},
    {"reproducible", "yes", NULL},
    {"wire", "f32", "f32"},
    {"transport", "verbs", "verbs"},
    {"transport", "ib", NULL},
    {"verbs_setup", "rdmacm", "rdmacm"},
    {"verbs_setup", "exchange", "exchange"},
    {"verbs_setup", "tcp", NULL},
    {"gdr", "on", "on"},
    {"gdr", "force", NULL},
    {"gdr_memory", "16M", "16M"},
    {"gdr_memory", "1M", NULL},
    {"verbs_gid_index", "auto", "auto"},
    {"verbs_gid_index", "3", "3"},
    {"verbs_gid_index", "256", NULL},
    {"verbs_pkey", "0x8001", "32769"},
    {"verbs_pkey", "0x", NULL},
    {"verbs_pkey", "0x1g", NULL},
    {"verbs_pkey", "0x10000", NULL},
    {"verbs_pkey", "0x123456789", NULL},
    {"verbs_service_level", "16", NULL},
    {"require", "verbs, gdr", "verbs, gdr"},
    {"require", "", ""},
    {"require", "verbs gdr", NULL},
    {"log_level", "debug", "debug"},
};

static void test_values(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
        struct hrd_config c, before;
        char err[512] = "", buf[700];
        hrd_config_defaults(&c);
        before = c;
        int rc = hrd_config_set(&c, row[i].key, row[i].value, err, sizeof(err));
        if (!row[i].back) {
            if (rc == 0)
                fail_msg("%s = %s was accepted", row[i].key, row[i].value);
            assert_memory_equal(&c, &before, sizeof(c));
            assert_non_null(strstr(err, row[i].key));
            assert_non_null(strstr(err, "must be"));
            continue;
        }
        if (rc != 0)
            fail_msg("%s", err);
        assert_string_equal(hrd_config_get(&c, row[i].key, buf, sizeof(buf)), row[i].back);
    }
}

static void test_long_values(void **state)
{
    struct hrd_config c;
    char err[512], value[5000];
    (void)state;
    hrd_config_defaults(&c);
    memset(value, 'a', sizeof(value));
    value[0] = '/';
    value[sizeof(value) - 1] = '\0';
    assert_int_equal(hrd_config_set(&c, "socket", value, err, sizeof(err)), -EINVAL);
    assert_int_equal(hrd_config_set(&c, "listen", value + 1, err, sizeof(err)), -EINVAL);
    assert_int_equal(hrd_config_set(&c, "node_name", value + 1, err, sizeof(err)), -EINVAL);
    assert_int_equal(hrd_config_set(&c, value, "1", err, sizeof(err)), -EINVAL);
    assert_true(strlen(err) < sizeof(err) - 1);
}

#define FILE_TEXT(text) text, sizeof(text) - 1

static void test_file(void **state)
{
    struct hrd_config c;
    struct heard h;
    char buf[128];
    (void)state;
    assert_int_equal(
        load(&c,
             FILE_TEXT("# a comment\n; another\n\nport=1234\n   unit_size = 2M # behind a value\n"
                       "\tlisten = 10.0.0.1\nlisten = ::1, 10.0.0.2 ; more\n"
                       "socket = /tmp/a#b\nlog_level = info\r\nmax_comms = 5"),
             &h),
        0);
    assert_int_equal(h.n, 0);
    assert_int_equal(c.port, 1234);
    assert_int_equal(c.unit_bytes, 2 << 20);
    assert_int_equal(c.listen.n, 3);
    assert_string_equal(hrd_config_get(&c, "listen", buf, sizeof(buf)), "10.0.0.1, ::1, 10.0.0.2");
    assert_string_equal(c.socket, "/tmp/a#b");
    assert_int_equal(c.max_comms, 5);
    assert_string_equal(hrd_config_get(&c, "log_level", buf, sizeof(buf)), "info");

    assert_int_equal(load(&c, FILE_TEXT(""), &h), 0);
    assert_int_equal(hrd_config_load(&c, "/nonexistent/x", hear, &h), -ENOENT);
    assert_int_equal(hrd_config_load(&c, "/tmp", hear, &h), 1);
}

static void test_mistakes(void **state)
{
    struct hrd_config c;
    struct heard h;
    char text[600];
    (void)state;
    /* Every mistake is reported, with its line. */
    assert_int_equal(
        load(&c, FILE_TEXT("port = 1\nporf = 2\nunit_size = big\nport = 3\nwhat\n[s]\nport = 4\n"), &h), 5);
    assert_non_null(strstr(h.text, ":2: there is no key 'porf' (did you mean 'port'?)"));
    assert_non_null(strstr(h.text, ":3: unit_size = big is not allowed"));
    assert_non_null(strstr(h.text, ":4: port was already given in line 1"));
    assert_non_null(strstr(h.text, ":5: the line is neither"));
    assert_non_null(strstr(h.text, ":7: the key 'port' stands below [s]"));

    assert_int_equal(load(&c, FILE_TEXT("port = 1\0 2\n"), &h), 1);
    assert_non_null(strstr(h.text, ":1: the line has a NUL"));

    memset(text, 'a', sizeof(text));
    memcpy(text, "socket = /", 10);
    text[sizeof(text) - 1] = '\n';
    assert_int_equal(load(&c, text, sizeof(text), &h), 1);
    assert_non_null(strstr(h.text, ":1: the line is 599 characters long"));
}

static void test_keys_against_each_other(void **state)
{
    struct hrd_config c;
    struct heard h;
    (void)state;
    assert_int_equal(load(&c, FILE_TEXT("unit_size = 128K\nunit_min = 256K\n"), &h), 1);
    assert_non_null(strstr(h.text, "unit_min (256K) must not be larger than unit_size (128K)"));
    assert_int_equal(load(&c, FILE_TEXT("unit_size = 128K\n"), &h), 0); /* unit_min follows it */
    assert_int_equal(load(&c, FILE_TEXT("algorithm = ring\n"), &h), 1);
    assert_non_null(strstr(h.text, "reproducible = off"));
    assert_int_equal(load(&c, FILE_TEXT("algorithm = ring\nreproducible = off\n"), &h), 0);
    assert_int_equal(load(&c, FILE_TEXT("transport = tcp\nrequire = verbs\n"), &h), 1);
    assert_int_equal(load(&c, FILE_TEXT("verbs_mtu = 1500\n"), &h), 1);
    assert_int_equal(load(&c, FILE_TEXT("staging_window = 1000000\n"), &h), 1);
}

static void test_reload(void **state)
{
    struct hrd_config cur, fresh;
    struct heard h = {0};
    char err[200];
    (void)state;
    hrd_config_defaults(&cur);
    hrd_config_defaults(&fresh);
    assert_int_equal(hrd_config_reload(&cur, &fresh, hear, &h), 0);
    assert_int_equal(h.n, 0);
    assert_int_equal(hrd_config_set(&fresh, "op_timeout", "7s", err, sizeof(err)), 0);
    assert_int_equal(hrd_config_set(&fresh, "listen", "10.9.8.7", err, sizeof(err)), 0);
    assert_int_equal(hrd_config_set(&fresh, "listen", "127.0.0.1, ::1", err, sizeof(err)), 0);
    assert_int_equal(hrd_config_reload(&cur, &fresh, hear, &h), 1);
    assert_int_equal(cur.op_timeout_ms, 7000);
    assert_int_equal(cur.listen.n, 1);
    assert_string_equal(h.text, "listen\n");
    /* A list that went through other values and back is unchanged, byte by byte. */
    assert_int_equal(hrd_config_set(&fresh, "listen", "127.0.0.1", err, sizeof(err)), 0);
    h = (struct heard){0};
    assert_int_equal(hrd_config_reload(&cur, &fresh, hear, &h), 0);
    assert_int_equal(h.n, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),    cmocka_unit_test(test_values),
        cmocka_unit_test(test_long_values), cmocka_unit_test(test_file),
        cmocka_unit_test(test_mistakes),    cmocka_unit_test(test_keys_against_each_other),
        cmocka_unit_test(test_reload),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
