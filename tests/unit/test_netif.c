/* SPDX-License-Identifier: MIT */
/* Choice of own addresses, on lists of interfaces as real machines have them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/netif.h"

static struct hrd_netif ifs[16];
static unsigned nifs;

static void iface(const char *name, const char *addr, unsigned bits)
{
    struct hrd_netif *f = &ifs[nifs++];
    memset(f, 0, sizeof(*f));
    snprintf(f->name, sizeof(f->name), "%s", name);
    f->index = nifs;
    f->up = true;
    f->loopback = strcmp(name, "lo") == 0;
    f->virt = hrd_netif_virtual_name(name);
    f->bits = bits;
    assert_int_equal(hrd_addr_parse(addr, 0, &f->addr), 0);
}

/* A cluster node: two links, docker, IPv6. */
static void cluster_node(void)
{
    nifs = 0;
    iface("lo", "127.0.0.1", 8);
    iface("docker0", "172.17.0.1", 16);
    iface("br-12ab", "172.18.0.1", 16);
    iface("veth9", "169.254.1.1", 16);
    iface("eno1", "192.168.1.5", 24);
    iface("ib0", "10.1.0.5", 16);
    iface("lo", "::1", 128);
    iface("eno1", "fd00::5", 64);
    iface("ib0", "fe80::5", 64);
}

static struct hrd_config config(const char *listen, const char *interface)
{
    struct hrd_config c;
    memset(&c, 0, sizeof(c));
    c.port = 18515;
    char copy[256], *save = NULL;
    snprintf(copy, sizeof(copy), "%s", listen);
    for (char *a = strtok_r(copy, " ", &save); a; a = strtok_r(NULL, " ", &save))
        snprintf(c.listen.v[c.listen.n++], sizeof(c.listen.v[0]), "%s", a);
    snprintf(c.interface, sizeof(c.interface), "%s", interface);
    return c;
}

/* "ADDR ADDR ..." of what is told to others, or the error. */
static const char *chosen(const struct hrd_config *c, struct hrd_net *net)
{
    static char text[512];
    char one[HRD_ADDR_TEXT];
    if (hrd_netif_choose(c, ifs, nifs, net, text, sizeof(text)) != 0)
        return text;
    text[0] = 0;
    for (unsigned i = 0; i < net->nown; i++) {
        assert_int_equal(net->own[i].port, 18515);
        snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%s", i ? " " : "",
                 hrd_addr_text(&net->own[i], one, sizeof(one)));
    }
    return text;
}

static const char *choose(const char *listen, const char *interface)
{
    struct hrd_config c = config(listen, interface);
    struct hrd_net net;
    return chosen(&c, &net);
}

static void test_choice(void **state)
{
    (void)state;
    cluster_node();
    assert_string_equal(choose("127.0.0.1", "auto"), "127.0.0.1");
    assert_string_equal(choose("127.0.0.3", "auto"), "127.0.0.3");
    /* never docker, bridges, veth; IPv4 before IPv6 before link-local */
    assert_string_equal(choose("0.0.0.0", "auto"), "192.168.1.5 10.1.0.5");
    assert_string_equal(choose("0.0.0.0 ::", "auto"), "192.168.1.5 10.1.0.5 fd00::5 fe80::5");
    assert_string_equal(choose("::", "auto"), "192.168.1.5 10.1.0.5 fd00::5 fe80::5");
    assert_string_equal(choose("10.1.0.5", "auto"), "10.1.0.5");
    assert_string_equal(choose("0.0.0.0", "ib0"), "10.1.0.5");
    assert_string_equal(choose("0.0.0.0", "192.168.0.0/16"), "192.168.1.5");
    assert_string_equal(choose("::", "ib0"), "10.1.0.5 fe80::5");
    assert_string_equal(choose(":: 0.0.0.0", "fd00::/8"), "fd00::5");
    /* what is asked for is taken, bridges too */
    assert_string_equal(choose("0.0.0.0", "docker0"), "172.17.0.1");
    assert_string_equal(choose("172.17.0.1", "auto"), "172.17.0.1");
    assert_string_equal(choose("10.1.0.5 192.168.1.5", "192.168.1.0/24"), "192.168.1.5");
}

static void test_refusals(void **state)
{
    (void)state;
    cluster_node();
    assert_non_null(
        strstr(choose("0.0.0.0", "ib7"), "interface = ib7: no interface that is up has a matching"));
    assert_non_null(strstr(choose("0.0.0.0", "10.9.0.0/16"), "10.9.0.0/16"));
    assert_non_null(
        strstr(choose("127.0.0.1", "ib0"), "none of the addresses in 'listen' (127.0.0.1) belongs"));
    assert_non_null(
        strstr(choose("0.0.0.0", "10.9.0.0/33"), "neither the name of an interface nor a subnet"));
    assert_non_null(strstr(choose("0.0.0.0", "10.9.0.0/"), "neither"));
    assert_non_null(strstr(choose("0.0.0.0", "10.9.0/8"), "neither"));
    assert_non_null(strstr(choose("10.1.0.300", "auto"), "'10.1.0.300' is not"));
    ifs[5].up = false;
    assert_non_null(strstr(choose("0.0.0.0", "ib0"), "no interface that is up"));
    ifs[5].up = true;
    assert_non_null(strstr(choose("0.0.0.0", "fd00::/8"), "no interface that is up"));
}

static void test_machines_with_little(void **state)
{
    (void)state;
    nifs = 0;
    iface("lo", "127.0.0.1", 8);
    assert_string_equal(choose("0.0.0.0", "auto"), "127.0.0.1");
    iface("veth0", "10.0.3.2", 24); /* a container */
    assert_string_equal(choose("0.0.0.0", "auto"), "10.0.3.2");
    for (int i = 0; i < 6; i++) {
        char name[16], addr[32];
        snprintf(name, sizeof(name), "eth%d", i);
        snprintf(addr, sizeof(addr), "10.2.%d.1", i);
        iface(name, addr, 24);
    }
    assert_string_equal(choose("0.0.0.0", "auto"), "10.2.0.1 10.2.1.1 10.2.2.1 10.2.3.1");
}

static void test_advertise(void **state)
{
    (void)state;
    cluster_node();
    struct hrd_config c = config("0.0.0.0", "ib0");
    struct hrd_net net;
    c.advertise.n = 2;
    strcpy(c.advertise.v[0], "203.0.113.7");
    strcpy(c.advertise.v[1], "10.1.0.5");
    assert_string_equal(chosen(&c, &net), "203.0.113.7 10.1.0.5");
    /* the source stays an address that this machine has */
    assert_int_equal(net.nsource, 1);
    struct hrp_addr want;
    hrd_addr_parse("10.1.0.5", 0, &want);
    assert_true(hrd_addr_same_ip(&net.source[0], &want));
    strcpy(c.advertise.v[1], "0.0.0.0");
    assert_non_null(strstr(chosen(&c, &net), "not an address that others can connect to"));
}

static const char *source(const char *listen, const char *interface, const char *to)
{
    static char text[HRD_ADDR_TEXT];
    struct hrd_config c = config(listen, interface);
    struct hrd_net net;
    struct hrp_addr a, from;
    chosen(&c, &net);
    hrd_addr_parse(to, 1, &a);
    return hrd_netif_source(&net, ifs, nifs, &a, &from) ? hrd_addr_text(&from, text, sizeof(text)) : "any";
}

static void test_source(void **state)
{
    (void)state;
    cluster_node();
    assert_string_equal(source("0.0.0.0", "auto", "10.1.0.9"), "any");
    assert_string_equal(source("0.0.0.0", "ib0", "10.1.0.9"), "10.1.0.5");
    assert_string_equal(source("0.0.0.0", "ib0", "192.168.1.9"), "10.1.0.5");
    assert_string_equal(source("192.168.1.5 10.1.0.5", "auto", "10.1.0.9"), "10.1.0.5");
    assert_string_equal(source("192.168.1.5 10.1.0.5", "auto", "8.8.8.8"), "192.168.1.5");
    assert_string_equal(source("127.0.0.2", "auto", "127.0.0.1"), "127.0.0.2");
    assert_string_equal(source("127.0.0.2", "auto", "10.1.0.9"), "any");
    assert_string_equal(source("10.1.0.5", "auto", "127.0.0.1"), "any");
    assert_string_equal(source("10.1.0.5", "auto", "fd00::9"), "any");
}

static bool mine(const char *listen, const char *interface, const char *addr, uint16_t port)
{
    struct hrd_config c = config(listen, interface);
    struct hrd_net net;
    struct hrp_addr a;
    chosen(&c, &net);
    assert_int_equal(hrd_addr_parse(addr, port, &a), 0);
    return hrd_netif_is_mine(&net, ifs, nifs, &a);
}

static void test_mine(void **state)
{
    (void)state;
    cluster_node();
    /* several daemons on one machine */
    assert_true(mine("127.0.0.2", "auto", "127.0.0.2", 0));
    assert_true(mine("127.0.0.2", "auto", "127.0.0.2", 18515));
    assert_false(mine("127.0.0.2", "auto", "127.0.0.2", 18516));
    assert_false(mine("127.0.0.2", "auto", "127.0.0.1", 0));
    assert_false(mine("127.0.0.1", "auto", "127.0.0.2", 0));
    /* MASTER_ADDR is the host's name, the daemon has the default configuration */
    assert_true(mine("127.0.0.1", "auto", "127.0.1.1", 0));
    assert_true(mine("127.0.0.1", "auto", "192.168.1.5", 0));
    assert_false(mine("127.0.0.1", "auto", "192.168.1.6", 0));
    /* MASTER_ADDR=localhost on a node of a cluster */
    assert_true(mine("10.1.0.5", "auto", "127.0.0.1", 0));
    assert_true(mine("10.1.0.5", "auto", "10.1.0.5", 0));
    assert_false(mine("10.1.0.5", "auto", "10.1.0.6", 0));
    assert_true(mine("0.0.0.0", "auto", "10.1.0.5", 0));
    assert_true(mine("0.0.0.0", "auto", "127.0.0.1", 0));
    assert_true(mine("0.0.0.0", "ib0", "192.168.1.5", 0));
    assert_false(mine("0.0.0.0", "auto", "10.1.0.6", 0));
    assert_true(mine("0.0.0.0 ::", "auto", "fd00::5", 0));
}

static void test_names(void **state)
{
    (void)state;
    static const char *const virt[] = {"docker0", "br-0a1b",   "veth12", "virbr0",
                                       "cni0",    "flannel.1", "cali1",  "tap0"};
    static const char *const real[] = {"eth0", "eno1", "ib0",  "enp3s0f0", "bond0",
                                       "br0",  "lo",   "hsn0", "vlan7"};
    for (size_t i = 0; i < sizeof(virt) / sizeof(virt[0]); i++)
        assert_true(hrd_netif_virtual_name(virt[i]));
    for (size_t i = 0; i < sizeof(real) / sizeof(real[0]); i++)
        assert_false(hrd_netif_virtual_name(real[i]));
}

static void test_addresses(void **state)
{
    (void)state;
    struct hrp_addr a, b;
    char text[HRD_ADDR_TEXT + 16];
    static const char *const bad[] = {"",    "1.2.3",    "1.2.3.4.5", "host",           "1.2.3.4%lo",
                                      "::g", "1.2.3.4 ", "fe80::1%",  "fe80::1%nosuch0"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_true(hrd_addr_parse(bad[i], 0, &a) < 0);
    static const char *const good[] = {"1.2.3.4", "::1", "fd00::12", "fe80::1%lo"};
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        struct sockaddr_storage ss;
        assert_int_equal(hrd_addr_parse(good[i], 77, &a), 0);
        assert_string_equal(hrd_addr_text(&a, text, sizeof(text)), good[i]);
        assert_true(hrd_addr_to_sockaddr(&a, &ss) > 0);
        assert_int_equal(hrd_addr_from_sockaddr((struct sockaddr *)&ss, &b), 0);
        assert_memory_equal(&a, &b, sizeof(a));
    }
    hrd_addr_parse("10.0.0.1", 18515, &a);
    assert_string_equal(hrd_addr_port_text(&a, text, sizeof(text)), "10.0.0.1 port 18515");
    /* A connection over IPv4 that a dual socket took is an IPv4 address. */
    struct sockaddr_storage ss;
    struct hrp_addr mapped = {.family = 6, .port = 1, .ip = {[10] = 0xff, [11] = 0xff, 10, 0, 0, 1}};
    hrd_addr_to_sockaddr(&mapped, &ss);
    assert_int_equal(hrd_addr_from_sockaddr((struct sockaddr *)&ss, &b), 0);
    assert_true(hrd_addr_same_ip(&a, &b));
    ss.ss_family = AF_UNIX;
    assert_true(hrd_addr_from_sockaddr((struct sockaddr *)&ss, &b) < 0);
}

/* The machine this runs on: whatever it has, loopback is among it. */
static void test_this_machine(void **state)
{
    (void)state;
    struct hrd_netif *list;
    int n = hrd_netif_list(&list);
    bool found = false;
    assert_true(n > 0);
    for (int i = 0; i < n; i++)
        found = found ||
                (list[i].loopback && list[i].up && hrd_addr_is_loopback(&list[i].addr) && list[i].bits >= 8);
    assert_true(found);
    free(list);
    assert_int_equal(hrd_netif_speed("../../etc/passwd"), 0);
    assert_int_equal(hrd_netif_speed("nosuch0"), 0);
    assert_int_equal(hrd_netif_speed(""), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_machines_with_little),
        cmocka_unit_test(test_advertise),
        cmocka_unit_test(test_source),
        cmocka_unit_test(test_mine),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_this_machine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
