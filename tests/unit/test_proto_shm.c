/* SPDX-License-Identifier: MIT */
/* The segment: header checks, the ring on good and hostile counters, the stream of staged ops. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/ring.h"
#include "proto/shm.h"
#include "proto/status.h"
#include "proto/types.h"

static void test_segment(void **state)
{
    (void)state;
    size_t size = hrp_seg_size(3);
    struct hrp_seg_header *seg = aligned_alloc(HRP_PAGE, size);
    memset((void *)seg, 0, size);
    assert_int_equal(hrp_seg_check(seg, size), -EPROTO); /* half-made */
    hrp_seg_init(seg, 3);
    assert_int_equal(hrp_seg_check(seg, size), 0);
    assert_int_equal(hrp_seg_check(seg, size - 1), -EPROTO);
    assert_int_equal(hrp_seg_check(seg, HRP_PAGE - 1), -EPROTO);
    assert_int_equal(hrp_seg_check(seg, 0), -EPROTO);
    for (uint32_t i = 0; i < 3; i++) {
        size_t at = (size_t)((char *)hrp_seg_comm(seg, i) - (char *)seg);
        assert_int_equal(at % HRP_PAGE, 0);
        assert_true(at >= HRP_PAGE && at + sizeof(struct hrp_comm_area) <= size);
    }
    struct hrp_seg_header good = *seg;
#define BREAK(field, value)                                  \
    do {                                                     \
        seg->field = (value);                                \
        assert_int_equal(hrp_seg_check(seg, size), -EPROTO); \
        seg->field = good.field;                             \
        assert_int_equal(hrp_seg_check(seg, size), 0);       \
    } while (0)
    BREAK(magic, 0);
    BREAK(magic, HRP_SEG_MAGIC + 1);
    BREAK(size, size + 1);
    BREAK(size, size - 1);
    BREAK(size, UINT64_MAX);
    BREAK(ncomms, 0);
    BREAK(ncomms, 4);
    BREAK(ncomms, UINT32_MAX);
    BREAK(comm_offset, 0);
    BREAK(comm_offset, 2 * HRP_PAGE);
    BREAK(comm_stride, 0);
    BREAK(comm_stride, UINT32_MAX);
    BREAK(op_slots, 0);
    BREAK(op_slots, 2 * HRP_OP_SLOTS);
    atomic_store(&seg->abi, HRP_ABI + 1); /* another minor version works */
    assert_int_equal(hrp_seg_check(seg, size), 0);
    atomic_store(&seg->abi, (HRP_ABI_MAJOR + 1) << 16);
    assert_int_equal(hrp_seg_check(seg, size), -EPROTONOSUPPORT);
    free(seg);
}

static struct hrp_comm_area *area_new(void)
{
    struct hrp_comm_area *area = aligned_alloc(HRP_PAGE, HRP_COMM_STRIDE);
    memset((void *)area, 0, sizeof(*area));
    return area;
}

static void test_ring_wraps(void **state)
{
    (void)state;
    struct hrp_comm_area *area = area_new();
    uint64_t head = 0, pushed = 0;
    struct hrp_desc d;
    assert_int_equal(hrp_ring_pop(area, &head, &d), 0);
    uint32_t rnd = 7;
    while (head < 10 * HRP_OP_SLOTS + 5) {
        rnd = rnd * 1664525u + 1013904223u;
        for (unsigned n = (rnd >> 16) % (HRP_OP_SLOTS + 3); n > 0; n--) {
            d = (struct hrp_desc){.op = pushed + 1, .sig.count = ~pushed};
            bool full = pushed - head == HRP_OP_SLOTS;
            assert_int_equal(hrp_ring_push(area, &d), full ? -EAGAIN : 0);
            pushed += !full;
        }
        for (unsigned n = (rnd >> 24) % (HRP_OP_SLOTS + 3); n > 0; n--) {
            uint64_t next = head;
            int rc = hrp_ring_pop(area, &head, &d);
            assert_int_equal(rc, next < pushed);
            if (rc == 1) {
                assert_int_equal(d.op, next + 1);
                assert_int_equal(d.sig.count, ~next);
                assert_int_equal(atomic_load(&area->head), head);
            }
        }
    }
    free(area);
}

static void test_ring_hostile(void **state)
{
    (void)state;
    struct hrp_comm_area *area = area_new();
    uint64_t head = 100;
    struct hrp_desc d;
    static const uint64_t tails[] = {0, 1, 99, 100 + HRP_OP_SLOTS + 1, UINT64_MAX, UINT64_MAX / 2};
    for (size_t i = 0; i < sizeof(tails) / sizeof(tails[0]); i++) {
        atomic_store(&area->tail, tails[i]);
        assert_int_equal(hrp_ring_pop(area, &head, &d), -EPROTO);
        assert_int_equal(head, 100);
    }
    atomic_store(&area->tail, 100 + HRP_OP_SLOTS);
    atomic_store(&area->head, 5); /* the shared head is only shown, never believed */
    assert_int_equal(hrp_ring_pop(area, &head, &d), 1);
    assert_int_equal(head, 101);
    /* Counters near the end of 64 bits. */
    head = UINT64_MAX - 1;
    atomic_store(&area->head, head);
    atomic_store(&area->tail, head);
    for (uint64_t i = 0; i < HRP_OP_SLOTS; i++) {
        d = (struct hrp_desc){.op = i};
        assert_int_equal(hrp_ring_push(area, &d), 0);
    }
    assert_int_equal(hrp_ring_push(area, &d), -EAGAIN);
    for (uint64_t i = 0; i < HRP_OP_SLOTS; i++) {
        assert_int_equal(hrp_ring_pop(area, &head, &d), 1);
        assert_int_equal(d.op, i);
    }
    assert_int_equal(hrp_ring_pop(area, &head, &d), 0);
    free(area);
}

static void *push_many(void *arg)
{
    struct hrp_comm_area *area = arg;
    for (uint64_t i = 1; i <= 20000;) {
        struct hrp_desc d = {.op = i, .sig.count = i * 3, .in.offset = i * 5, .out.offset = i * 7};
        if (hrp_ring_push(area, &d) == 0)
            i++;
        else
            sched_yield();
    }
    return NULL;
}

static void test_ring_threads(void **state)
{
    (void)state;
    struct hrp_comm_area *area = area_new();
    pthread_t t;
    pthread_create(&t, NULL, push_many, area);
    uint64_t head = 0;
    for (uint64_t i = 1; i <= 20000;) {
        struct hrp_desc d;
        int rc = hrp_ring_pop(area, &head, &d);
        assert_true(rc >= 0);
        if (rc == 0) {
            sched_yield();
            continue;
        }
        assert_int_equal(d.op, i);
        assert_int_equal(d.sig.count, i * 3);
        assert_int_equal(d.in.offset, i * 5);
        assert_int_equal(d.out.offset, i * 7);
        i++;
    }
    pthread_join(t, NULL);
    free(area);
}

/* Every element of the data space has its place in the stream, and the stream has no gaps. */
static void stream_covers(struct hrp_sig sig, uint32_t nranks)
{
    uint64_t es = hrp_dtype_size(sig.dtype), bytes = hrp_sig_bytes(&sig, nranks);
    uint32_t nseg = hrp_sig_segments(&sig, nranks);
    uint64_t slice = hrp_stage_slice(&sig, nranks);
    unsigned char *seen = calloc(1, bytes / es + 1);
    for (uint32_t s = 0; s < nseg; s++)
        for (uint64_t i = 0; i < sig.count; i++) {
            uint64_t pos = hrp_stage_pos(&sig, nranks, s, i);
            if (pos % es != 0 || pos >= bytes || seen[pos / es]++)
                fail_msg("%s, %u ranks, count %llu: element %llu of segment %u at %llu",
                         hrp_coll_name(sig.coll), nranks, (unsigned long long)sig.count,
                         (unsigned long long)i, s, (unsigned long long)pos);
            /* Contiguous inside a slice: what is copied at once. */
            if (i % slice != 0 && pos != hrp_stage_pos(&sig, nranks, s, i - 1) + es)
                fail_msg("a gap before element %llu of segment %u", (unsigned long long)i, s);
        }
    for (uint64_t p = 0; p < bytes / es; p++)
        if (seen[p] != 1)
            fail_msg("nothing lies at %llu", (unsigned long long)(p * es));
    free(seen);
}

static void test_stream(void **state)
{
    (void)state;
    static const uint32_t ranks[] = {1, 2, 3, 7, 32};
    static const unsigned dtypes[] = {HRP_U8, HRP_F16, HRP_F32, HRP_F64};
    for (size_t r = 0; r < 5; r++)
        for (size_t d = 0; d < 4; d++)
            for (unsigned coll = 0; coll < HRP_BARRIER; coll++) {
                struct hrp_sig sig = {.coll = (uint8_t)coll, .dtype = (uint8_t)dtypes[d], .count = 1};
                uint64_t slice = hrp_stage_slice(&sig, ranks[r]);
                uint64_t counts[] = {
                    1, 2, 63, 64, 65, 1000, slice - 1, slice, slice + 1, 2 * slice, 2 * slice + 17};
                for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
                    if (counts[c] == 0 || counts[c] * ranks[r] > 1100000)
                        continue;
                    sig.count = counts[c];
                    stream_covers(sig, ranks[r]);
                }
                /* A slice of all segments is at most a chunk's multiple that a window of few MiB holds, and is
                   whole in elements however many ranks there are. */
                sig.count = UINT64_C(1) << 40;
                if (hrp_sig_segments(&sig, ranks[r]) > 1) {
                    assert_true(hrp_stage_slice(&sig, ranks[r]) * ranks[r] * hrp_dtype_size(sig.dtype) <=
                                UINT64_C(1) << 20);
                    assert_true(hrp_stage_slice(&sig, ranks[r]) >= 64);
                }
            }
    struct hrp_sig many = {.coll = HRP_ALL_GATHER, .dtype = HRP_F64, .count = 100};
    assert_int_equal(hrp_stage_slice(&many, 4096), 64);
    stream_covers(many, 4096);
}

static void test_signatures(void **state)
{
    (void)state;
    struct hrp_sig good = {.coll = HRP_BROADCAST, .dtype = HRP_BF16, .count = 5, .root = 3};
    char text[80];
    assert_int_equal(hrp_sig_check(&good, 4), 0);
    assert_int_equal(hrp_sig_check(&good, 3), -EINVAL); /* root 3 */
    assert_int_equal(hrp_sig_check(&good, 0), -EINVAL);
    assert_string_equal(hrp_sig_text(&good, text, sizeof(text)), "broadcast of 5 x bf16, root 3");
    struct hrp_sig s = good;
    s.coll = HRP_NCOLLS;
    assert_int_equal(hrp_sig_check(&s, 4), -EINVAL);
    s = good;
    s.dtype = HRP_NDTYPES;
    assert_int_equal(hrp_sig_check(&s, 4), -EINVAL);
    s = good;
    s.redop = HRP_NREDOPS;
    assert_int_equal(hrp_sig_check(&s, 4), -EINVAL);
    s = good;
    s.reserved = 1;
    assert_int_equal(hrp_sig_check(&s, 4), -EINVAL);
    s = good;
    s.coll = HRP_ALL_REDUCE; /* has no root */
    assert_int_equal(hrp_sig_check(&s, 4), -EINVAL);
    s.root = 0;
    s.count = UINT64_C(1) << 61;
    assert_int_equal(hrp_sig_check(&s, 4), 0);
    s.count++;
    assert_int_equal(hrp_sig_check(&s, 4), -EINVAL);
    s.coll = HRP_ALL_GATHER;
    s.count = UINT64_C(1) << 59;
    assert_int_equal(hrp_sig_check(&s, 4), 0);
    assert_int_equal(hrp_sig_check(&s, 5), -EINVAL);
    s = (struct hrp_sig){.coll = HRP_BARRIER, .count = 1};
    assert_int_equal(hrp_sig_check(&s, 4), -EINVAL);
    for (unsigned i = 0; i < HRP_NSTATUS; i++)
        assert_string_not_equal(hrp_status_name(i), "unknown status");
    assert_string_equal(hrp_status_name(HRP_NSTATUS), "unknown status");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_segment),      cmocka_unit_test(test_ring_wraps),
        cmocka_unit_test(test_ring_hostile), cmocka_unit_test(test_ring_threads),
        cmocka_unit_test(test_stream),       cmocka_unit_test(test_signatures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
