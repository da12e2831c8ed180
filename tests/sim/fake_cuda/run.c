/* SPDX-License-Identifier: MIT */
/* What is put into streams, and the work when a stream comes to it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/sim/fake_cuda/fake.h"

static int64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec * INT64_C(1000000000) + ts.tv_nsec;
}

/* ---- when a stream comes to it ------------------------------------------------------------------------------------- */

static void run_copy(const struct fake_item *item)
{
    int a = item->dst_index, b = item->src_index;
    if (a >= 0 && b >= 0 && a != b && fake_pair("FAKE_CUDA_HANG_PAIRS", a, b))
        for (;;) {
            struct timespec ts = {.tv_sec = 1};
            nanosleep(&ts, NULL);
        }
    if (a >= 0 && b >= 0 && a != b && fake_pair("FAKE_CUDA_ZERO_PAIRS", a, b))
        memset(item->dst, 0, item->bytes);
    else
        memmove(item->dst, item->src, item->bytes);
}

/*
 * Whoever passes a wait sees what was written before the word that let it pass, also where the one who wrote it followed a word of
 * a stream of this process in another process. A race detector sees this process alone, so it is shown the order here.
 */
static _Atomic uint64_t words_order;

/* The driver's comparison is cyclic. */
static bool reached(const struct fake_item *item)
{
    if (item->half) {
        uint32_t v = atomic_load((_Atomic uint32_t *)(void *)item->word);
        uint32_t want = (uint32_t)item->operand;
        return (item->flags & 3) == HRG_WAIT_EQ ? v == want : (int32_t)(v - want) >= 0;
    }
    uint64_t v = atomic_load((_Atomic uint64_t *)item->word);
    return (item->flags & 3) == HRG_WAIT_EQ ? v == item->operand : (int64_t)(v - item->operand) >= 0;
}

static void run_wait(const struct fake_item *item)
{
    int64_t end = now_ns() + (int64_t)fake.wait_s * 1000000000;
    for (unsigned looks = 0; !reached(item); looks++) {
        if (now_ns() > end)
            fake_die("a stream has waited %u s for %llx at %p, which holds %llx", fake.wait_s,
                     (unsigned long long)item->operand, (void *)item->word,
                     (unsigned long long)atomic_load((_Atomic uint64_t *)item->word));
        struct timespec ts = {.tv_nsec = looks < 50 ? 10000 : 200000};
        nanosleep(&ts, NULL);
    }
    (void)atomic_load(&words_order);
}

void fake_run_item(struct fake_item *item)
{
    /* After a sticky error nothing runs, but everything ends. */
    if (fake_run(item->name) != HRG_SUCCESS)
        return;
    switch (item->work) {
    case FAKE_COPY:
        run_copy(item);
        break;
    case FAKE_SET:
        memset(item->dst, item->value, item->bytes);
        break;
    case FAKE_WRITE:
        atomic_fetch_add(&words_order, 1);
        if (item->half)
            atomic_store((_Atomic uint32_t *)(void *)item->word, (uint32_t)item->operand);
        else
            atomic_store((_Atomic uint64_t *)item->word, item->operand);
        break;
    case FAKE_WAIT:
        run_wait(item);
        break;
    case FAKE_MARK:
        atomic_store(&item->event->ns, now_ns());
        break;
    case FAKE_LAUNCH:
        item->launch(item->args);
        break;
    case FAKE_NOTHING:
        break;
    }
}

/* ---- copies -------------------------------------------------------------------------------------------------------- */

enum side { DEVICE, HOST };

static hrg_result post_copy(const char *name, uint64_t dst, enum side to, uint64_t src, enum side from,
                            size_t bytes, hrg_stream stream)
{
    hrg_result r;
    struct hrg_stream_st *s = fake_stream(stream, &r);
    if (s == NULL)
        return r;
    if (bytes == 0)
        return HRG_SUCCESS;
    int dst_index = -1, src_index = -1;
    char *d = to == DEVICE ? fake_device_range(dst, bytes, &dst_index) : (char *)(uintptr_t)dst;
    char *p = from == DEVICE ? fake_device_range(src, bytes, &src_index) : (char *)(uintptr_t)src;
    if (d == NULL || p == NULL || (to == HOST && !fake_host_range(d, bytes)) ||
        (from == HOST && !fake_host_range(p, bytes)))
        return HRG_ERROR_INVALID_VALUE;
    struct fake_item *item = fake_item_new(name, s, FAKE_COPY);
    item->dst = d;
    item->src = p;
    item->bytes = bytes;
    item->dst_index = dst_index;
    item->src_index = src_index;
    return fake_post(item);
}

FAKE_API hrg_result cuMemcpyDtoHAsync_v2(void *dst, hrg_ptr src, size_t bytes, hrg_stream stream)
{
    FAKE_ENTER("MemcpyDtoHAsync", 0);
    return post_copy("MemcpyDtoHAsync", (uint64_t)(uintptr_t)dst, HOST, src, DEVICE, bytes, stream);
}

FAKE_API hrg_result cuMemcpyHtoDAsync_v2(hrg_ptr dst, const void *src, size_t bytes, hrg_stream stream)
{
    FAKE_ENTER("MemcpyHtoDAsync", 0);
    return post_copy("MemcpyHtoDAsync", dst, DEVICE, (uint64_t)(uintptr_t)src, HOST, bytes, stream);
}

FAKE_API hrg_result cuMemcpyDtoDAsync_v2(hrg_ptr dst, hrg_ptr src, size_t bytes, hrg_stream stream)
{
    FAKE_ENTER("MemcpyDtoDAsync", 0);
    return post_copy("MemcpyDtoDAsync", dst, DEVICE, src, DEVICE, bytes, stream);
}

FAKE_API hrg_result cuMemcpyPeerAsync(hrg_ptr dst, hrg_ctx dst_ctx, hrg_ptr src, hrg_ctx src_ctx,
                                      size_t bytes, hrg_stream stream)
{
    FAKE_ENTER("MemcpyPeerAsync", 0);
    if (dst_ctx == NULL || src_ctx == NULL)
        return HRG_ERROR_INVALID_CONTEXT;
    return post_copy("MemcpyPeerAsync", dst, DEVICE, src, DEVICE, bytes, stream);
}

/* Each copy in the stream's order, which is one of those that a batch may have. */
FAKE_API hrg_result cuMemcpyBatchAsync(hrg_ptr *dsts, hrg_ptr *srcs, size_t *sizes, size_t count,
                                       struct hrg_copy_attributes *attributes, size_t *first_of_attributes,
                                       size_t nattributes, size_t *failed, hrg_stream stream)
{
    FAKE_ENTER("MemcpyBatchAsync", 0);
    *failed = SIZE_MAX;
    if (count == 0 || nattributes == 0 || nattributes > count || first_of_attributes[0] != 0 ||
        attributes[0].src_access_order < HRG_SRC_ACCESS_STREAM || stream == NULL ||
        stream == HRG_STREAM_LEGACY)
        return HRG_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        hrg_result r = post_copy("MemcpyBatchAsync", dsts[i], dsts[i] & FAKE_TAG ? DEVICE : HOST, srcs[i],
                                 srcs[i] & FAKE_TAG ? DEVICE : HOST, sizes[i], stream);
        if (r != HRG_SUCCESS) {
            *failed = i;
            return r;
        }
    }
    return HRG_SUCCESS;
}

FAKE_API hrg_result cuMemsetD8Async(hrg_ptr dst, unsigned char value, size_t bytes, hrg_stream stream)
{
    FAKE_ENTER("MemsetD8Async", 0);
    hrg_result r;
    struct hrg_stream_st *s = fake_stream(stream, &r);
    int index;
    char *d = bytes > 0 ? fake_device_range(dst, bytes, &index) : NULL;
    if (s == NULL || bytes == 0)
        return r;
    if (d == NULL)
        return HRG_ERROR_INVALID_VALUE;
    struct fake_item *item = fake_item_new("MemsetD8Async", s, FAKE_SET);
    item->dst = d;
    item->value = value;
    item->bytes = bytes;
    return fake_post(item);
}

/* ---- words --------------------------------------------------------------------------------------------------------- */

static hrg_result post_word(const char *name, enum fake_work work, hrg_stream stream, hrg_ptr addr,
                            uint64_t value, unsigned flags, bool half)
{
    hrg_result r;
    struct hrg_stream_st *s = fake_stream(stream, &r);
    if (s == NULL)
        return r;
    int index;
    size_t bytes = half ? 4 : 8;
    char *p = fake_device_range(addr, bytes, &index);
    /* Registered memory has a device address of its own here; the host's is a mistake that some machines forgive. */
    if (p == NULL || addr % bytes != 0 || !(addr & FAKE_TAG))
        return HRG_ERROR_INVALID_VALUE;
    struct fake_item *item = fake_item_new(name, s, work);
    item->word = (uint64_t *)(void *)p;
    item->operand = value;
    item->flags = flags;
    item->half = half;
    return fake_post(item);
}

FAKE_API hrg_result cuStreamWaitValue64_v2(hrg_stream stream, hrg_ptr addr, uint64_t value, unsigned flags)
{
    FAKE_ENTER("StreamWaitValue64", 0);
    return post_word("StreamWaitValue64", FAKE_WAIT, stream, addr, value, flags, false);
}

FAKE_API hrg_result cuStreamWriteValue64_v2(hrg_stream stream, hrg_ptr addr, uint64_t value, unsigned flags)
{
    FAKE_ENTER("StreamWriteValue64", 0);
    return post_word("StreamWriteValue64", FAKE_WRITE, stream, addr, value, flags, false);
}

FAKE_API hrg_result cuStreamBatchMemOp_v2(hrg_stream stream, unsigned n, union hrg_memop *ops, unsigned flags)
{
    FAKE_ENTER("StreamBatchMemOp", 0);
    if (flags != 0 || n > 256)
        return HRG_ERROR_INVALID_VALUE;
    hrg_result r = HRG_SUCCESS;
    for (unsigned i = 0; i < n && r == HRG_SUCCESS; i++) {
        const union hrg_memop *o = &ops[i];
        switch (o->operation) {
        case HRG_MEMOP_WAIT_32:
        case HRG_MEMOP_WAIT_64:
            r = post_word("StreamBatchMemOp", FAKE_WAIT, stream, o->value.address, o->value.value,
                          o->value.flags, o->operation == HRG_MEMOP_WAIT_32);
            break;
        case HRG_MEMOP_WRITE_32:
        case HRG_MEMOP_WRITE_64:
            r = post_word("StreamBatchMemOp", FAKE_WRITE, stream, o->value.address, o->value.value,
                          o->value.flags, o->operation == HRG_MEMOP_WRITE_32);
            break;
        case HRG_MEMOP_BARRIER:
        case HRG_MEMOP_FLUSH_REMOTE_WRITES:
            break;
        default:
            r = HRG_ERROR_INVALID_VALUE;
        }
    }
    return r;
}
