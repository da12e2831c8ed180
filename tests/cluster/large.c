/* SPDX-License-Identifier: MIT */
/*
 * More than 2^31 elements and bytes: 2^31 + 5 of i8 over two nodes, and f32 at byte offsets above 2^32 of one
 * allocation. Counts that cannot be are refused in words. timeout: 300
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "tests/lib/harness.h"

#define BIG ((UINT64_C(1) << 31) + 5)

static int refused(struct hpf_rank *me, struct ht_env *e, size_t count, unsigned char *p)
{
    hclient_result_t r = hclient_all_reduce(e->comm, p, p, count, HCLIENT_INT64, HCLIENT_SUM, NULL, NULL);
    HT_EXPECT(me, r == HCLIENT_INVALID_ARGUMENT && hclient_last_error(NULL)[0],
              "a count of %zu gave %s instead of a refusal in words", count, hclient_strerror(r));
    return 0;
}

/* In place, in one allocation; the few gigabytes would take minutes to check at every element by random
   numbers, so the input is a short pattern whose length is prime. */
static int big_i8(struct hpf_rank *me, struct ht_env *e, unsigned char *p)
{
    enum { PRIME = 65521 };
    static unsigned char row[PRIME], want[PRIME];
    for (unsigned i = 0; i < PRIME; i++) {
        row[i] = (unsigned char)(i * 31 + me->rank * 77);
        want[i] = 0;
        for (unsigned r = 0; r < me->nranks; r++)
            want[i] = (unsigned char)(want[i] + i * 31 + r * 77);
    }
    for (uint64_t at = 0; at < BIG; at += PRIME)
        memcpy(p + at, row, BIG - at < PRIME ? BIG - at : PRIME);
    memset(p + BIG, 0x77, 64);
    hclient_op_t op;
    HT_TRY(me, hclient_all_reduce(e->comm, p, p, BIG, HCLIENT_INT8, HCLIENT_SUM, NULL, &op));
    HT_TRY(me, hclient_wait(op));
    hpf_rank_progress(me);
    for (uint64_t at = 0; at < BIG; at += PRIME)
        HT_EXPECT(me, memcmp(p + at, want, BIG - at < PRIME ? BIG - at : PRIME) == 0,
                  "the sum is wrong between bytes %" PRIu64 " and %" PRIu64, at, at + PRIME);
    for (unsigned i = 0; i < 64; i++)
        HT_EXPECT(me, p[BIG + i] == 0x77, "byte %u behind the buffer was overwritten", i);
    return 0;
}

static int high_offset(struct ht_env *e, unsigned char *p, uint64_t bytes)
{
    struct ht_coll c = {.coll = HRP_ALL_REDUCE,
                        .dtype = HRP_F32,
                        .redop = HRP_SUM,
                        .count = 100003,
                        .inplace = true,
                        .recv_mem = HT_ALLOC};
    struct ht_flight f;
    size_t area = ht_area_bytes(e, &c);
    if (ht_post(e, &c, NULL, p + (bytes - area) / 4096 * 4096, &f) != 0 || ht_verify(e, &f) != 0)
        return 1;
    return 0;
}

static int rank_main(struct hpf_rank *me)
{
    struct ht_env e;
    /* One rank with offsets above 2^32 is enough, and memory is not free. */
    uint64_t bytes = (UINT64_C(1) << (me->rank == 0 ? 32 : 31)) + (UINT64_C(1) << 24);
    void *p = NULL;
    if (ht_join(&e, me, 0, NULL) != 0)
        return 1;
    HT_TRY(me, hclient_mem_alloc(&p, bytes));
    if (refused(me, &e, (size_t)1 << 62, p) != 0 || refused(me, &e, SIZE_MAX, p) != 0)
        return 1;
    if (big_i8(me, &e, p) != 0 || high_offset(&e, p, bytes) != 0)
        return 1;
    HT_TRY(me, hclient_mem_free(p));
    return ht_leave(&e);
}

int main(void)
{
    if (ht_memory_available() < UINT64_C(12) << 30)
        ht_skip("needs 12 GiB of free memory, and %" PRIu64 " MiB are available",
                ht_memory_available() >> 20);
    if (ht_sanitized())
        ht_skip("takes too long under a sanitizer");
    struct hpf_cluster *c = ht_cluster(2, NULL);
    struct ht_job job = {.nranks = 2, .fn = rank_main};
    struct hpf_job *started = ht_start(c, &job);
    ht_finish(started, 200000);
    ht_cluster_end(c);
    return 0;
}
