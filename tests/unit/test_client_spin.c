/* SPDX-License-Identifier: MIT */
/* When a waiter looks before it sleeps. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "client/spin.h"

/* n waits for ops of that size; how many looked, which all ended so. */
static unsigned waits(struct hcl_spin *s, uint64_t bytes, unsigned n, enum hcl_spin_end how)
{
    unsigned looked = 0;
    for (unsigned i = 0; i < n; i++) {
        bool pays = hcl_spin_pays(s, bytes);
        if (pays)
            hcl_spin_ended(s, bytes, how);
        looked += pays;
    }
    return looked;
}

static void looks_in_vain_become_rare(void **state)
{
    (void)state;
    struct hcl_spin s = {{{0}}};
    assert_in_range(waits(&s, 4096, HCL_SPIN_RETRY, HCL_SPIN_VAIN), 1, HCL_SPIN_DEBT);
    assert_int_equal(waits(&s, 4096, 10 * (HCL_SPIN_RETRY + 1), HCL_SPIN_VAIN), 10);
}

static void a_core_that_nobody_wants_costs_nothing(void **state)
{
    (void)state;
    struct hcl_spin s = {{{0}}};
    assert_int_equal(waits(&s, 4096, 1000, HCL_SPIN_FREE), 1000);
}

static void looks_that_see_the_end_stay(void **state)
{
    (void)state;
    struct hcl_spin s = {{{0}}};
    assert_int_equal(waits(&s, 4096, 1000, HCL_SPIN_SAW), 1000);
    /* three of four */
    for (unsigned i = 0; i < 1000; i++) {
        assert_true(hcl_spin_pays(&s, 4096));
        hcl_spin_ended(&s, 4096, i % 4 == 3 ? HCL_SPIN_VAIN : HCL_SPIN_SAW);
    }
    /* one of two */
    unsigned looked = 0;
    for (unsigned i = 0; i < 1000; i++)
        looked += waits(&s, 4096, 1, i % 2 ? HCL_SPIN_VAIN : HCL_SPIN_SAW);
    assert_in_range(looked, 1, 200);
}

static void they_come_back(void **state)
{
    (void)state;
    struct hcl_spin s = {{{0}}};
    waits(&s, 4096, 1000, HCL_SPIN_VAIN);
    assert_in_range(waits(&s, 4096, 1000, HCL_SPIN_SAW), 1000 - HCL_SPIN_RETRY, 1000);
}

static void sizes_are_judged_apart(void **state)
{
    (void)state;
    struct hcl_spin s = {{{0}}};
    waits(&s, HCL_SPIN_BYTES, 1000, HCL_SPIN_VAIN);
    waits(&s, 8193, 20, HCL_SPIN_VAIN);
    assert_true(hcl_spin_pays(&s, 0));
    assert_true(hcl_spin_pays(&s, 1));
    assert_true(hcl_spin_pays(&s, 8192));
    assert_true(hcl_spin_pays(&s, 16385));
    assert_false(hcl_spin_pays(&s, 16384));
}

static void large_ops_are_slept_for(void **state)
{
    (void)state;
    struct hcl_spin s = {{{0}}};
    assert_true(hcl_spin_pays(&s, HCL_SPIN_BYTES));
    assert_false(hcl_spin_pays(&s, HCL_SPIN_BYTES + 1));
    assert_false(hcl_spin_pays(&s, UINT64_MAX));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(looks_in_vain_become_rare),
        cmocka_unit_test(a_core_that_nobody_wants_costs_nothing),
        cmocka_unit_test(looks_that_see_the_end_stay),
        cmocka_unit_test(they_come_back),
        cmocka_unit_test(sizes_are_judged_apart),
        cmocka_unit_test(large_ops_are_slept_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
