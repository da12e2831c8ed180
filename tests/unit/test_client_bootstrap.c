/* SPDX-License-Identifier: MIT */
/* What launchers' environments turn into. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/bootstrap.h"
#include "tests/unit/client_fake.h"

static const char *const names[] = {"RANK",
                                    "WORLD_SIZE",
                                    "LOCAL_RANK",
                                    "MASTER_ADDR",
                                    "MASTER_PORT",
                                    "TORCHELASTIC_RUN_ID",
                                    "TORCHELASTIC_RESTART_COUNT",
                                    "OMPI_COMM_WORLD_RANK",
                                    "OMPI_COMM_WORLD_SIZE",
                                    "OMPI_COMM_WORLD_LOCAL_RANK",
                                    "OMPI_COMM_WORLD_LOCAL_SIZE",
                                    "OMPI_MCA_orte_hnp_uri",
                                    "PMIX_NAMESPACE",
                                    "PMIX_SERVER_URI",
                                    "PMIX_SERVER_URI2",
                                    "PMIX_SERVER_URI21",
                                    "PMIX_SERVER_URI3",
                                    "PMIX_SERVER_URI4",
                                    "PMIX_SERVER_URI41",
                                    "SLURM_PROCID",
                                    "SLURM_NTASKS",
                                    "SLURM_LOCALID",
                                    "SLURM_JOB_ID",
                                    "SLURM_STEP_ID",
                                    "SLURM_RESTART_COUNT",
                                    "SLURM_LAUNCH_NODE_IPADDR",
                                    "SLURM_STEP_NODELIST",
                                    "SLURM_JOB_NODELIST",
                                    "HREDUCE_ROOT_ADDR"};

/* The environment is exactly this: name, value, name, value, ..., NULL. */
#define set_env(...) set_env_list((const char *const[]){__VA_ARGS__})
static void set_env_list(const char *const *list)
{
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        unsetenv(names[i]);
    for (; list[0] != NULL; list += 2)
        setenv(list[0], list[1], 1);
}

static struct hcl_launch good(void)
{
    struct hcl_launch l;
    if (hcl_launch_read(&l) != HCLIENT_OK)
        fail_msg("%s", hclient_last_error(NULL));
    return l;
}

static void bad(const char *words)
{
    struct hcl_launch l;
    assert_int_equal(hcl_launch_read(&l), HCLIENT_INVALID_ARGUMENT);
    if (strstr(hclient_last_error(NULL), words) == NULL)
        fail_msg("'%s' is not in: %s", words, hclient_last_error(NULL));
}

static void assert_root(const struct hcl_launch *l, const char *name, uint16_t port, uint8_t first_byte)
{
    assert_string_equal(l->root_name, name);
    assert_true(l->nroots >= 1);
    assert_int_equal(l->root[0].port, port);
    assert_int_equal(l->root[0].ip[0], first_byte);
    assert_int_equal(hrp_addr_check(&l->root[0]), 0);
}

static void test_torchrun(void **state)
{
    (void)state;
    set_env("RANK", "3", "WORLD_SIZE", "8", "LOCAL_RANK", "1", "MASTER_ADDR", "10.1.2.3", "MASTER_PORT",
            "29500", "TORCHELASTIC_RUN_ID", "none", "TORCHELASTIC_RESTART_COUNT", "0", NULL);
    struct hcl_launch a = good();
    assert_string_equal(a.launcher, "torchrun");
    assert_int_equal(a.rank, 3);
    assert_int_equal(a.nranks, 8);
    assert_int_equal(hcl_local_rank(), 1);
    assert_root(&a, "10.1.2.3", 0, 10);
    setenv("RANK", "5", 1);
    assert_int_equal(good().attempt, a.attempt); /* same on all ranks */
    setenv("TORCHELASTIC_RESTART_COUNT", "1", 1);
    assert_int_not_equal(good().attempt, a.attempt);
    setenv("TORCHELASTIC_RESTART_COUNT", "0", 1);
    setenv("MASTER_PORT", "29501", 1);
    assert_int_not_equal(good().attempt, a.attempt);
    setenv("HREDUCE_ROOT_ADDR", "[::1]:777", 1);
    a = good();
    assert_int_equal(a.root[0].family, 6);
    assert_int_equal(a.root[0].port, 777);
    setenv("HREDUCE_ROOT_ADDR", "127.0.0.2:99999", 1);
    bad("HREDUCE_ROOT_ADDR is '127.0.0.2:99999'");

    set_env(NULL);
    assert_int_equal(hcl_local_rank(), -1);
    bad("no launcher");
    set_env("RANK", "3", NULL);
    bad("WORLD_SIZE is not");
    set_env("RANK", "3", "WORLD_SIZE", "3", "MASTER_ADDR", "127.0.0.1", NULL);
    bad("RANK is '3'; it must be 0 to 2");
    set_env("RANK", "1x", "WORLD_SIZE", "3", "MASTER_ADDR", "127.0.0.1", NULL);
    bad("RANK is '1x'");
    set_env("RANK", "-1", "WORLD_SIZE", "3", "MASTER_ADDR", "127.0.0.1", NULL);
    bad("RANK is '-1'");
    set_env("RANK", "0", "WORLD_SIZE", "0", "MASTER_ADDR", "127.0.0.1", NULL);
    bad("WORLD_SIZE is '0'");
    set_env("RANK", "0", "WORLD_SIZE", "4097", "MASTER_ADDR", "127.0.0.1", NULL);
    bad("WORLD_SIZE is '4097'");
    set_env("RANK", "0", "WORLD_SIZE", "2", NULL);
    bad("HREDUCE_ROOT_ADDR");
    set_env("RANK", "0", "WORLD_SIZE", "2", "MASTER_ADDR", "no-such-host.invalid", NULL);
    bad("cannot resolve the meeting point 'no-such-host.invalid'");
}

static void test_open_mpi(void **state)
{
    (void)state;
    set_env("OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "4", "OMPI_COMM_WORLD_LOCAL_RANK", "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE", "2", "PMIX_NAMESPACE", "77", "OMPI_MCA_orte_hnp_uri",
            "3932160.0;tcp://10.7.0.1,172.17.0.1:45678", NULL);
    struct hcl_launch a = good();
    assert_string_equal(a.launcher, "Open MPI");
    assert_int_equal(a.rank, 1);
    assert_int_equal(a.nranks, 4);
    assert_int_equal(hcl_local_rank(), 1);
    assert_root(&a, "10.7.0.1", 0, 10);
    setenv("PMIX_NAMESPACE", "78", 1);
    assert_int_not_equal(good().attempt, a.attempt);
    setenv("MASTER_ADDR", "127.0.0.9", 1);
    a = good();
    assert_root(&a, "127.0.0.9", 0, 127);

    /* A PMIx server listens on each node's loopback: no meeting point for two nodes, fine for one. */
    set_env("OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "4", "OMPI_COMM_WORLD_LOCAL_SIZE", "2",
            "PMIX_SERVER_URI2", "1.0;tcp4://127.0.0.1:40001", NULL);
    bad("not where to meet");
    setenv("PMIX_SERVER_URI3", "1.0;tcp4://10.9.0.1:40001", 1);
    a = good();
    assert_root(&a, "10.9.0.1", 0, 10);
    unsetenv("PMIX_SERVER_URI3");
    setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4", 1);
    a = good();
    assert_root(&a, "127.0.0.1", 0, 127);
}

static void test_slurm(void **state)
{
    (void)state;
    set_env("SLURM_PROCID", "2", "SLURM_NTASKS", "16", "SLURM_LOCALID", "0", "SLURM_JOB_ID", "5",
            "SLURM_STEP_ID", "0", "SLURM_STEP_NODELIST", "127.0.0.[4-6]", NULL);
    struct hcl_launch a = good();
    assert_string_equal(a.launcher, "Slurm");
    assert_int_equal(a.rank, 2);
    assert_int_equal(a.nranks, 16);
    assert_int_equal(hcl_local_rank(), 0);
    assert_root(&a, "127.0.0.4", 0, 127);
    setenv("SLURM_RESTART_COUNT", "1", 1);
    assert_int_not_equal(good().attempt, a.attempt);
    setenv("SLURM_LAUNCH_NODE_IPADDR", "192.168.1.1", 1);
    a = good();
    assert_root(&a, "192.168.1.1", 0, 192);
    set_env("SLURM_PROCID", "2", "SLURM_NTASKS", "16", "SLURM_JOB_NODELIST", "127.0.0.7,x", NULL);
    a = good();
    assert_root(&a, "127.0.0.7", 0, 127);
    setenv("SLURM_STEP_NODELIST", "n[a]", 1);
    bad("not where to meet");
    /* torchrun under srun: torchrun knows better. */
    setenv("RANK", "1", 1);
    setenv("WORLD_SIZE", "2", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    assert_string_equal(good().launcher, "torchrun");
}

static void test_lists(void **state)
{
    (void)state;
    static const struct {
        const char *list, *first; /* NULL: malformed */
    } cases[] = {{"node1", "node1"},
                 {"node[1-4,7]", "node1"},
                 {"node[001-004,7]-ib0", "node001-ib0"},
                 {"node[7],other[1-2]", "node7"},
                 {"rack[2-3]n[05,09]x", "rack2n05x"},
                 {"a,b[1-2]", "a"},
                 {"[3-4]", "3"},
                 {"", NULL},
                 {",a", NULL},
                 {"n[", NULL},
                 {"n[1", NULL},
                 {"n[1-2", NULL},
                 {"n[]", NULL},
                 {"n[-2]", NULL},
                 {"n[1x]", NULL},
                 {"n]1", NULL}};
    char host[16];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool ok = hcl_first_host(cases[i].list, host, sizeof(host));
        assert_int_equal(ok, cases[i].first != NULL);
        if (ok)
            assert_string_equal(host, cases[i].first);
    }
    assert_false(hcl_first_host("a-name-of-17-byte", host, sizeof(host)));
    assert_true(hcl_first_host("a-name-of-15byt", host, sizeof(host)));

    char h[64];
    assert_true(hcl_uri_host("1.0;tcp://10.0.0.1,10.1.0.1:5", h, sizeof(h)));
    assert_string_equal(h, "10.0.0.1");
    assert_true(hcl_uri_host("1.0;tcp6://[fe80::1]:5", h, sizeof(h)));
    assert_string_equal(h, "fe80::1");
    assert_false(hcl_uri_host("1.0;", h, sizeof(h)));
    assert_false(hcl_uri_host("1.0;tcp://", h, sizeof(h)));

    static const struct {
        const char *text, *host;
        uint16_t port;
    } splits[] = {{"n1", "n1", 0},
                  {"n1:18515", "n1", 18515},
                  {"10.0.0.1:1", "10.0.0.1", 1},
                  {"::1", "::1", 0},
                  {"[::1]", "::1", 0},
                  {"[fe80::1%eth0]:9", "fe80::1%eth0", 9},
                  {"n1:", NULL, 0},
                  {"n1:0", NULL, 0},
                  {"n1:65536", NULL, 0},
                  {":5", NULL, 0},
                  {"", NULL, 0},
                  {"[::1", NULL, 0},
                  {"[::1]x", NULL, 0},
                  {"[]:5", NULL, 0},
                  {"n1:5x", NULL, 0}};
    for (size_t i = 0; i < sizeof(splits) / sizeof(splits[0]); i++) {
        uint16_t port;
        bool ok = hcl_split_host(splits[i].text, h, sizeof(h), &port);
        if (ok != (splits[i].host != NULL))
            fail_msg("'%s'", splits[i].text);
        if (ok) {
            assert_string_equal(h, splits[i].host);
            assert_int_equal(port, splits[i].port);
        }
    }
}

/* What reaches the daemon of a communicator by name: the fake one echoes it in the id. */
static void test_names(void **state)
{
    (void)state;
    struct fake_config config = {.window_bytes = 1 << 20};
    struct fake f = fake_start(&config);
    set_env("RANK", "1", "WORLD_SIZE", "2", "MASTER_ADDR", "127.0.0.1", "HREDUCE_ROOT_ADDR", "127.0.0.1:258",
            NULL);
    static const struct {
        const char *name, *nth;
    } calls[] = {{"grad", "00"}, {"grad", "01"}, {"other", "00"}, {"refuse", NULL}, {"grad", "02"}};
    hclient_comm_t comm[5] = {NULL};
    for (int i = 0; i < 5; i++) {
        hclient_result_t r = hclient_comm_init_name(&comm[i], calls[i].name, NULL);
        assert_int_equal(r, calls[i].nth != NULL ? HCLIENT_OK : HCLIENT_REFUSED);
        if (r != HCLIENT_OK)
            continue;
        hclient_comm_info_t info = HCLIENT_COMM_INFO_INITIALIZER;
        assert_int_equal(hclient_comm_get_info(comm[i], &info), HCLIENT_OK);
        assert_int_equal(info.rank, 1);
        assert_memory_equal(info.id, calls[i].nth, 2);
        assert_memory_equal(info.id + 8, "0201", 4); /* port 258 */
    }
    /* A name that failed was not counted. */
    assert_int_equal(hcl_name_take("refuse"), 0);
    for (int i = 0; i < 5; i++)
        if (comm[i] != NULL)
            assert_int_equal(hclient_comm_destroy(comm[i]), HCLIENT_OK);
    char long_name[80];
    memset(long_name, 'n', sizeof(long_name));
    long_name[72] = 0;
    assert_int_equal(hclient_comm_init_name(&comm[0], long_name, NULL), HCLIENT_INVALID_ARGUMENT);
    assert_int_equal(hclient_comm_init_name(&comm[0], "", NULL), HCLIENT_INVALID_ARGUMENT);
    assert_int_equal(hclient_comm_init_name(&comm[0], NULL, NULL), HCLIENT_INVALID_ARGUMENT);
    assert_int_equal(hclient_comm_init_name(&comm[0], "a\nb", NULL), HCLIENT_INVALID_ARGUMENT);
    assert_int_equal(hclient_comm_init_name(NULL, "a", NULL), HCLIENT_INVALID_ARGUMENT);
    long_name[71] = 0;
    assert_int_equal(hclient_comm_init_name(&comm[0], long_name, NULL), HCLIENT_OK);
    assert_int_equal(hclient_comm_destroy(comm[0]), HCLIENT_OK);
    fake_stop(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_torchrun), cmocka_unit_test(test_open_mpi), cmocka_unit_test(test_slurm),
        cmocka_unit_test(test_lists),    cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
