/* SPDX-License-Identifier: MIT */
/* Calls that must be refused in words, with nothing queued. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "client/hclient.h"
#include "client/buffer.h"
#include "tests/unit/client_fake.h"

#define OK(call)                                                                           \
    do {                                                                                   \
        hclient_result_t r_ = (call);                                                      \
        if (r_ != HCLIENT_OK)                                                              \
            fail_msg("%s: %s: %s", #call, hclient_strerror(r_), hclient_last_error(NULL)); \
    } while (0)

/* Refused with this code, and the sentence has this in it. */
#define REFUSED(code, words, call)                                   \
    do {                                                             \
        hclient_result_t r_ = (call);                                \
        const char *e_ = hclient_last_error(NULL);                   \
        if (r_ != (code) || strstr(e_, words) == NULL)               \
            fail_msg("%s: %s: %s", #call, hclient_strerror(r_), e_); \
    } while (0)
#define BAD(words, call) REFUSED(HCLIENT_INVALID_ARGUMENT, words, call)

static struct fake fake;

static int start(void **state)
{
    (void)state;
    struct fake_config config = {.window_bytes = 1 << 20};
    fake = fake_start(&config);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    fake_stop(&fake);
    return 0;
}

static void test_init(void **state)
{
    (void)state;
    hclient_unique_id_t id, broken;
    hclient_comm_t comm = NULL;
    BAD("id is NULL", hclient_get_unique_id(NULL));
    OK(hclient_get_unique_id(&id));
    BAD("comm is NULL", hclient_comm_init_rank(NULL, 1, id, 0));
    BAD("nranks is 0", hclient_comm_init_rank(&comm, 0, id, 0));
    BAD("nranks is 4097", hclient_comm_init_rank(&comm, 4097, id, 0));
    BAD("rank 2 is not", hclient_comm_init_rank(&comm, 2, id, 2));
    BAD("rank -1 is not", hclient_comm_init_rank(&comm, 2, id, -1));
    for (size_t i = 0; i < sizeof(id); i++) {
        if (i >= 8 && i < 24)
            continue; /* the nonce may be anything */
        broken = id;
        broken.internal[i] = (char)(broken.internal[i] ^ 0x5a);
        bool address = i >= 26 && i < 36; /* port, scope and IPv4 address of the one address */
        hclient_result_t r = hclient_comm_init_rank(&comm, 1, broken, 0);
        if (address && r == HCLIENT_OK)
            OK(hclient_comm_destroy(comm));
        else
            assert_int_equal(r, HCLIENT_INVALID_ARGUMENT);
    }

    hclient_comm_config_t c = HCLIENT_COMM_CONFIG_INITIALIZER;
    c.size = 3;
    BAD("config.size is 3", hclient_comm_init_rank_config(&comm, 1, id, 0, &c));
    c.size = sizeof(c);
    c.algo = 6;
    BAD("config.algo is 6", hclient_comm_init_rank_config(&comm, 1, id, 0, &c));
    c.algo = 0;
    c.wire_f32 = -1;
    BAD("config.wire_f32 is -1", hclient_comm_init_rank_config(&comm, 1, id, 0, &c));
    c.wire_f32 = 0;
    c.reproducible = 3;
    BAD("config.reproducible is 3", hclient_comm_init_rank_config(&comm, 1, id, 0, &c));
    c.reproducible = 0;
    c.transport = 3;
    BAD("config.transport is 3", hclient_comm_init_rank_config(&comm, 1, id, 0, &c));
    c.transport = 0;
    c.service_level = HCLIENT_CLASS(16);
    BAD("config.service_level is 17", hclient_comm_init_rank_config(&comm, 1, id, 0, &c));
    c.service_level = 0;
    c.overlap = 3;
    BAD("config.overlap is 3", hclient_comm_init_rank_config(&comm, 1, id, 0, &c));
    c.overlap = 0;
    c.traffic_class = HCLIENT_CLASS(256);
    BAD("config.traffic_class is 257", hclient_comm_init_rank_config(&comm, 1, id, 0, &c));
    c.traffic_class = 0;
    c.require = 8;
    BAD("config.require is 0x8", hclient_comm_init_rank_config(&comm, 1, id, 0, &c));
    struct {
        hclient_comm_config_t c;
        uint64_t more;
    } longer = {.c = HCLIENT_COMM_CONFIG_INITIALIZER};
    longer.c.size = sizeof(longer);
    longer.c.op_timeout_ms = 777;
    OK(hclient_comm_init_rank_config(&comm, 1, id, 0, &longer.c));
    hclient_comm_info_t info = HCLIENT_COMM_INFO_INITIALIZER;
    OK(hclient_comm_get_info(comm, &info));
    assert_int_equal(info.op_timeout_ms, 777);
    OK(hclient_comm_destroy(comm));
    longer.more = 1;
    REFUSED(HCLIENT_UNSUPPORTED, "newer", hclient_comm_init_rank_config(&comm, 1, id, 0, &longer.c));
}

static void test_collectives(void **state)
{
    (void)state;
    hclient_unique_id_t id;
    hclient_comm_t comm;
    hclient_op_t op = {0};
    int32_t v[64] = {0};
    const size_t huge = (size_t)1 << 62;
    OK(hclient_get_unique_id(&id));
    OK(hclient_comm_init_rank(&comm, 4, id, 1));
    hclient_data_type_t t = HCLIENT_INT32;

    BAD("not a communicator", hclient_all_reduce(NULL, v, v, 1, t, HCLIENT_SUM, NULL, &op));
    BAD("not a communicator", hclient_all_reduce((hclient_comm_t)v, v, v, 1, t, HCLIENT_SUM, NULL, &op));
    REFUSED(HCLIENT_INVALID_ARGUMENT, "stream", hclient_all_reduce(comm, v, v, 1, t, HCLIENT_SUM, v, &op));
    BAD("dtype 10", hclient_all_reduce(comm, v, v, 1, (hclient_data_type_t)10, HCLIENT_SUM, NULL, &op));
    BAD("reduction 5", hclient_all_reduce(comm, v, v, 1, t, (hclient_red_op_t)5, NULL, &op));
    BAD("send is NULL", hclient_all_reduce(comm, NULL, v, 1, t, HCLIENT_SUM, NULL, &op));
    BAD("recv is NULL", hclient_all_reduce(comm, v, NULL, 1, t, HCLIENT_SUM, NULL, &op));
    BAD("more than 2^62", hclient_all_reduce(comm, v, v, huge, t, HCLIENT_SUM, NULL, &op));
    BAD("more than 2^62", hclient_all_reduce(comm, v, v, SIZE_MAX, t, HCLIENT_SUM, NULL, &op));
    BAD("more than 2^62", hclient_all_gather(comm, v, v, huge / 8, t, NULL, &op));
    BAD("address space",
        hclient_all_reduce(comm, (void *)(UINTPTR_MAX - 64), v, 100, t, HCLIENT_SUM, NULL, &op));
    REFUSED(HCLIENT_UNSUPPORTED, "hclient_mem_alloc",
            hclient_all_reduce(comm, v, v, (size_t)1 << 36, t, HCLIENT_SUM, NULL, &op));
    BAD("root 4", hclient_broadcast(comm, v, v, 1, t, 4, NULL, &op));
    BAD("root -1", hclient_broadcast(comm, v, v, 1, t, -1, NULL, &op));

    BAD("overlap", hclient_all_reduce(comm, v, v + 1, 10, t, HCLIENT_SUM, NULL, &op));
    BAD("overlap", hclient_all_reduce(comm, v + 9, v, 10, t, HCLIENT_SUM, NULL, &op));
    BAD("overlap", hclient_reduce_scatter(comm, v, v, 4, t, HCLIENT_SUM, NULL, &op));
    BAD("overlap", hclient_reduce_scatter(comm, v, v + 8, 4, t, HCLIENT_SUM, NULL, &op));
    BAD("overlap", hclient_all_gather(comm, v, v, 4, t, NULL, &op));
    BAD("overlap", hclient_broadcast(comm, v, v + 1, 4, t, 1, NULL, &op));
    assert_non_null(strstr(hclient_last_error(comm), "overlap"));
    BAD("ptr is NULL", hclient_mem_alloc(NULL, 1));
    assert_string_equal(hclient_last_error(comm), ""); /* that was not about the communicator */
    assert_int_equal(op.number, 0);                    /* no output, and nothing was queued: */
    OK(hclient_barrier(comm, NULL, &op));
    assert_int_equal(op.number, 1);
    OK(hclient_wait(op));

    /* What is legal and looks odd. */
    OK(hclient_all_reduce(comm, v, v + 10, 10, t, HCLIENT_SUM, NULL, &op));
    OK(hclient_reduce_scatter(comm, v, v + 4, 4, t, HCLIENT_SUM, NULL, &op));
    OK(hclient_all_gather(comm, v + 4, v, 4, t, NULL, &op));
    OK(hclient_broadcast(comm, NULL, v, 4, t, 0, NULL, &op));
    OK(hclient_broadcast(comm, v + 1, v, 4, t, 0, NULL, &op)); /* send is not looked at */
    OK(hclient_all_reduce(comm, NULL, NULL, 0, t, HCLIENT_SUM, NULL, &op));
    OK(hclient_all_gather(comm, NULL, NULL, 0, t, NULL, &op));
    OK(hclient_all_reduce(comm, v, v, 1, t, HCLIENT_AVG, NULL, NULL));
    OK(hclient_comm_wait(comm));
    hclient_op_t none = {0};
    OK(hclient_wait(none));
    OK(hclient_test(none));

    REFUSED(HCLIENT_UNSUPPORTED, "hclient_comm_init_rank", hclient_comm_split(comm, 0, 0, &comm, NULL));
    hclient_red_op_t redop;
    REFUSED(HCLIENT_UNSUPPORTED, "HCLIENT_AVG", hclient_red_op_create_pre_mul_sum(&redop, v, t, comm));
    BAD("not a reduction", hclient_red_op_destroy(HCLIENT_SUM, comm));
    OK(hclient_comm_destroy(comm));
}

static void test_memory(void **state)
{
    (void)state;
    hclient_unique_id_t id;
    hclient_comm_t comm;
    void *p, *handle, *handle2;
    int v[10];
    BAD("ptr is NULL", hclient_mem_alloc(NULL, 1));
    BAD("size is 0", hclient_mem_alloc(&p, 0));
    BAD("not the start", hclient_mem_free(v));
    OK(hclient_mem_free(NULL));
    OK(hclient_mem_alloc(&p, 100));
    BAD("not the start", hclient_mem_free((char *)p + 1));
    for (int i = 0; i < 4096; i++)
        assert_int_equal(((char *)p)[i], 0);
    OK(hclient_mem_free(p));
    BAD("was freed before", hclient_mem_free(p));

    BAD("bytes 0", hclient_mem_import_fd(v, 0, 0, 0));
    BAD("fd -1", hclient_mem_import_fd((void *)4096, 4096, -1, 0));

    OK(hclient_get_unique_id(&id));
    OK(hclient_comm_init_rank(&comm, 1, id, 0));
    BAD("size 0", hclient_comm_register(comm, v, 0, &handle));
    OK(hclient_comm_register(comm, v, sizeof(v), &handle));
    OK(hclient_comm_register(comm, v, sizeof(v), &handle2));
    OK(hclient_comm_deregister(comm, handle));
    BAD("not a registration", hclient_comm_deregister(comm, handle));
    BAD("not a registration", hclient_comm_deregister(comm, v));
    /* Not staged over what lies behind it. */
    hclient_op_t op;
    OK(hclient_mem_alloc(&p, 4096));
    BAD("4 bytes over the end of the shared memory",
        hclient_all_reduce(comm, v, p, 1025, HCLIENT_INT32, HCLIENT_SUM, NULL, &op));
    BAD("4000 bytes over the end of the shared memory",
        hclient_all_reduce(comm, (char *)p + 4000, p, 1024, HCLIENT_INT32, HCLIENT_SUM, NULL, &op));
    OK(hclient_mem_free(p));
    OK(hclient_comm_destroy(comm));
    int version;
    OK(hclient_get_version(&version));
    assert_int_equal(version, HCLIENT_VERSION_CODE);
    BAD("version is NULL", hclient_get_version(NULL));
    assert_string_equal(hclient_strerror(HCLIENT_RANK_LOST), "rank lost");
    assert_string_equal(hclient_strerror((hclient_result_t)99), "unknown status");
}

/* The table behind zero copy: neighbours, gaps, borders. */
static void test_regions(void **state)
{
    (void)state;
    struct hcl_regions r = {.n = 0};
    struct hcl_region out;
    uint32_t id;
    uint64_t offset;
    hcl_regions_init(&r);
    for (uint32_t i = 0; i < 200; i++) { /* [1000 * k, 1000 * k + 500) in a shuffled order */
        uint32_t k = i * 73 % 200 + 1;
        struct hcl_region g = {.base = 1000 * k, .len = 500, .id = k};
        assert_int_equal(hcl_regions_add(&r, &g), 0);
    }
    struct hcl_region clash[] = {{.base = 1000, .len = 500},
                                 {.base = 900, .len = 101},
                                 {.base = 1499, .len = 1},
                                 {.base = 1, .len = 999999}};
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(hcl_regions_add(&r, &clash[i]), -EEXIST);
    for (uint32_t k = 1; k <= 200; k++) {
        uintptr_t b = 1000 * k;
        assert_true(hcl_regions_find(&r, (void *)b, 500, &id, &offset));
        assert_int_equal(id, k);
        assert_int_equal(offset, 0);
        assert_true(hcl_regions_find(&r, (void *)(b + 499), 1, &id, &offset));
        assert_int_equal(offset, 499);
        assert_false(hcl_regions_find(&r, (void *)b, 501, &id, &offset));
        assert_false(hcl_regions_find(&r, (void *)(b + 1), 500, &id, &offset));
        assert_false(hcl_regions_find(&r, (void *)(b + 500), 1, &id, &offset));
        assert_false(hcl_regions_find(&r, (void *)(b - 1), 2, &id, &offset));
        assert_false(hcl_regions_find(&r, (void *)(b + 10), SIZE_MAX, &id, &offset));
    }
    for (uint32_t k = 200; k >= 1; k--) {
        assert_false(hcl_regions_take(&r, 1000 * k + 1, &out));
        assert_true(hcl_regions_take(&r, 1000 * k, &out));
        assert_int_equal(out.id, k);
        assert_false(hcl_regions_find(&r, (void *)(uintptr_t)(1000 * k), 1, &id, &offset));
    }
    hcl_regions_deinit(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_init, start, stop),
        cmocka_unit_test_setup_teardown(test_collectives, start, stop),
        cmocka_unit_test_setup_teardown(test_memory, start, stop),
        cmocka_unit_test(test_regions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
