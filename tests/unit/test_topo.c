/* SPDX-License-Identifier: MIT */
/* Relations of PCIe devices and the choice of NICs, on topologies as hwloc records them (tests/lib/topo). */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/topo.h"

static struct hrd_topo *load(const char *name)
{
    char path[512], why[256] = "";
    struct hrd_topo *t = NULL;
    const char *root = getenv("HREDUCE_ROOT");
    snprintf(path, sizeof(path), "%s/tests/lib/topo/%s.xml", root ? root : ".", name);
    if (hrd_topo_load(&t, path, why, sizeof(why)) != 0)
        fail_msg("%s", why);
    return t;
}

static const char *between(const struct hrd_topo *t, const char *a, const char *b)
{
    static char name[16];
    struct hrd_topo_relation r, back;
    unsigned ia = hrd_topo_find(t, a), ib = hrd_topo_find(t, b);
    if (ia == HRD_TOPO_NONE || ib == HRD_TOPO_NONE)
        fail_msg("no %s or no %s", a, b);
    r = hrd_topo_between(t, ia, ib);
    back = hrd_topo_between(t, ib, ia);
    assert_int_equal(r.cls, back.cls);
    assert_int_equal(hrd_topo_find(t, hrd_topo_device(t, ia)->pci), ia);
    return hrd_topo_name(r, name, sizeof(name));
}

/* "NIC NIC ..." of GPU 0, 1, ... */
static const char *nics(const struct hrd_topo *t, const char *only)
{
    static char text[256];
    char why[256];
    text[0] = 0;
    for (unsigned i = 0; i < hrd_topo_count(t) && hrd_topo_device(t, i)->gpu; i++) {
        unsigned nic = hrd_topo_nic_for(t, i, only, why, sizeof(why));
        size_t at = strlen(text);
        assert_true(why[0] != 0);
        snprintf(text + at, sizeof(text) - at, "%s%s", i ? " " : "",
                 nic == HRD_TOPO_NONE ? "none" : hrd_topo_device(t, nic)->name);
    }
    return text;
}

static void test_one_switch(void **state)
{
    (void)state;
    struct hrd_topo *t = load("one-switch");
    assert_int_equal(hrd_topo_count(t), 4);
    assert_string_equal(hrd_topo_device(t, 0)->name, "GPU0");
    assert_string_equal(hrd_topo_device(t, 1)->pci, "0000:04:00.0");
    assert_string_equal(hrd_topo_device(t, 2)->name, "eno1");
    assert_false(hrd_topo_device(t, 2)->infiniband);
    assert_string_equal(hrd_topo_device(t, 3)->netif, "ib0");
    assert_true(hrd_topo_device(t, 3)->infiniband);
    assert_string_equal(between(t, "GPU0", "GPU1"), "PIX");
    assert_string_equal(between(t, "GPU0", "mlx5_0"), "PIX");
    assert_string_equal(between(t, "GPU0", "eno1"), "PHB");
    assert_string_equal(between(t, "mlx5_0", "ib0"), "X");
    /* Nothing is at that address. */
    assert_int_equal(hrd_topo_find(t, "0000:77:00.0"), HRD_TOPO_NONE);
    assert_string_equal(nics(t, NULL), "mlx5_0 mlx5_0");
    hrd_topo_free(t);
}

static void test_two_switches(void **state)
{
    (void)state;
    struct hrd_topo *t = load("two-switches");
    assert_string_equal(between(t, "GPU0", "GPU1"), "PIX");
    assert_string_equal(between(t, "GPU0", "GPU2"), "PXB");
    assert_string_equal(between(t, "GPU2", "GPU3"), "PIX");
    assert_string_equal(between(t, "GPU0", "GPU4"), "PHB");
    assert_string_equal(between(t, "GPU4", "GPU5"), "PHB");
    assert_string_equal(between(t, "GPU0", "mlx5_0"), "PIX");
    assert_string_equal(between(t, "GPU0", "mlx5_1"), "PXB");
    assert_string_equal(between(t, "mlx5_0", "mlx5_1"), "PXB");
    /* The last two are as near to one as to the other. */
    assert_string_equal(nics(t, NULL), "mlx5_0 mlx5_0 mlx5_1 mlx5_1 mlx5_0 mlx5_1");
    hrd_topo_free(t);
}

static void test_two_sockets(void **state)
{
    (void)state;
    struct hrd_topo *t = load("two-sockets");
    assert_string_equal(between(t, "GPU0", "GPU1"), "NODE");
    assert_string_equal(between(t, "GPU0", "GPU2"), "SYS");
    assert_string_equal(between(t, "GPU0", "mlx5_0"), "PHB");
    assert_string_equal(between(t, "GPU0", "mlx5_1"), "NODE");
    assert_string_equal(between(t, "GPU0", "mlx5_2"), "SYS");
    assert_int_equal(hrd_topo_device(t, 0)->numa, 0);
    assert_int_equal(hrd_topo_device(t, 3)->numa, 1);
    assert_string_equal(nics(t, NULL), "mlx5_0 mlx5_1 mlx5_2 mlx5_3");
    hrd_topo_free(t);
}

static void test_two_nics(void **state)
{
    (void)state;
    struct hrd_topo *t = load("two-nics");
    assert_string_equal(between(t, "mlx5_0", "mlx5_1"), "PIX");
    assert_string_equal(between(t, "GPU0", "mlx5_1"), "PHB");
    assert_string_equal(nics(t, NULL), "mlx5_0 mlx5_1 mlx5_0 mlx5_1");
    assert_string_equal(nics(t, "mlx5_1"), "mlx5_1 mlx5_1 mlx5_1 mlx5_1");
    assert_string_equal(nics(t, "mlx5_7"), "none none none none");
    assert_string_equal(nics(t, "GPU1"), "none none none none");
    hrd_topo_free(t);
}

static void test_nic_on_the_other_socket(void **state)
{
    (void)state;
    struct hrd_topo *t = load("nic-far");
    char why[256];
    assert_string_equal(between(t, "GPU0", "GPU1"), "PHB");
    assert_string_equal(between(t, "GPU0", "mlx5_0"), "SYS");
    assert_string_equal(between(t, "GPU2", "mlx5_0"), "PHB");
    assert_string_equal(nics(t, NULL), "mlx5_0 mlx5_0 mlx5_0");
    assert_int_equal(hrd_topo_nic_for(t, 0, NULL, why, sizeof(why)), hrd_topo_find(t, "mlx5_0"));
    assert_string_equal(why, "SYS: the link between NUMA nodes");
    hrd_topo_free(t);
}

/* The daemon uses one NIC, and it is not the near one: the reason names both. */
static void test_reason(void **state)
{
    (void)state;
    struct hrd_topo *t = load("two-sockets");
    char why[256];
    hrd_topo_nic_for(t, 0, "mlx5_3", why, sizeof(why));
    assert_string_equal(
        why, "SYS: the link between NUMA nodes; the one NIC that the daemon uses, though mlx5_0 is "
             "nearer (PHB)");
    hrd_topo_nic_for(t, 3, "ib3", why, sizeof(why));
    assert_string_equal(why, "PHB: a PCIe host bridge of the processor; the one NIC that the daemon uses");
    hrd_topo_free(t);
}

static void test_nvlink(void **state)
{
    (void)state;
    struct hrd_topo *t = load("two-sockets");
    hrd_topo_set_nvlinks(t, 0, 2, 18);
    assert_string_equal(between(t, "GPU0", "GPU2"), "NV18");
    assert_string_equal(between(t, "GPU0", "GPU1"), "NODE");
    assert_string_equal(between(t, "GPU0", "GPU0"), "X");
    hrd_topo_free(t);
}

static void test_addresses(void **state)
{
    (void)state;
    struct hrd_topo *t = load("two-switches");
    assert_int_equal(hrd_topo_find(t, "0000:0c:00.0"), 3);
    assert_int_equal(hrd_topo_find(t, "00000000:0C:00.0"), 3);
    assert_int_equal(hrd_topo_find(t, "0C:00.0"), 3);
    assert_int_equal(hrd_topo_find(t, "gpu3"), 3);
    assert_int_equal(hrd_topo_find(t, "0c:00.1"), HRD_TOPO_NONE);
    assert_int_equal(hrd_topo_find(t, "0001:0c:00.0"), HRD_TOPO_NONE);
    assert_int_equal(hrd_topo_find(t, ""), HRD_TOPO_NONE);
    assert_int_equal(hrd_topo_find(t, "ib"), HRD_TOPO_NONE);
    assert_int_equal(hrd_topo_find(t, "0c:00"), HRD_TOPO_NONE);
    hrd_topo_free(t);
}

static void test_bad_file(void **state)
{
    (void)state;
    struct hrd_topo *t = NULL;
    char why[256] = "";
    assert_int_not_equal(hrd_topo_load(&t, "/dev/null", why, sizeof(why)), 0);
    assert_null(t);
    assert_non_null(strstr(why, "/dev/null"));
    assert_int_not_equal(hrd_topo_load(&t, "/nonexistent.xml", why, sizeof(why)), 0);
    assert_non_null(strstr(why, "/nonexistent.xml"));
}

static void test_this_machine(void **state)
{
    (void)state;
    struct hrd_topo *t = NULL;
    char why[256] = "";
    if (hrd_topo_load(&t, NULL, why, sizeof(why)) != 0)
        fail_msg("%s", why);
    for (unsigned i = 0; i < hrd_topo_count(t); i++)
        assert_int_equal(hrd_topo_between(t, i, i).cls, HRD_TOPO_SELF);
    hrd_topo_free(t);
}

static void *load_some(void *start)
{
    pthread_barrier_wait(start);
    for (int i = 0; i < 3; i++) {
        struct hrd_topo *t = NULL;
        char why[256] = "";
        if (hrd_topo_load(&t, NULL, why, sizeof(why)) != 0)
            return start;
        hrd_topo_free(t);
    }
    return NULL;
}

/* The GPUs' threads ask at the same time; what is wrong with it is for TSan to say. */
static void test_several_threads(void **state)
{
    (void)state;
    pthread_t thread[4];
    pthread_barrier_t start;
    pthread_barrier_init(&start, NULL, 4);
    for (unsigned i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, load_some, &start), 0);
    for (unsigned i = 0; i < 4; i++) {
        void *failed = NULL;
        pthread_join(thread[i], &failed);
        assert_null(failed);
    }
    pthread_barrier_destroy(&start);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_switch),
        cmocka_unit_test(test_two_switches),
        cmocka_unit_test(test_two_sockets),
        cmocka_unit_test(test_two_nics),
        cmocka_unit_test(test_nic_on_the_other_socket),
        cmocka_unit_test(test_reason),
        cmocka_unit_test(test_nvlink),
        cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_bad_file),
        cmocka_unit_test(test_this_machine),
        cmocka_unit_test(test_several_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
