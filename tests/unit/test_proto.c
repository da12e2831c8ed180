/* SPDX-License-Identifier: MIT */
/*
 * Socket messages: every type whole, truncated at every length, longer than it is, and with each field at and
 * beyond its limits, in both directions of the codec.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/status.h"
#include "proto/wire.h"

#define HDR sizeof(struct hrp_msg_hdr)

static const struct {
    unsigned type;
    size_t size;
    bool text;
    int nfds;
} types[] = {
    {HRP_MSG_HELLO, sizeof(struct hrp_msg_hello), false, 1},
    {HRP_MSG_WELCOME, sizeof(struct hrp_msg_welcome), false, 3},
    {HRP_MSG_ERROR, sizeof(struct hrp_msg_error), true, 0},
    {HRP_MSG_GET_ID, sizeof(struct hrp_msg_empty), false, 0},
    {HRP_MSG_ID, sizeof(struct hrp_msg_id), false, 0},
    {HRP_MSG_JOIN, sizeof(struct hrp_msg_join), false, 0},
    {HRP_MSG_JOINED, sizeof(struct hrp_msg_joined), false, 0},
    {HRP_MSG_LEAVE, sizeof(struct hrp_msg_slot), false, 0},
    {HRP_MSG_ABORT, sizeof(struct hrp_msg_slot), true, 0},
    {HRP_MSG_WINDOW, sizeof(struct hrp_msg_slot), false, 0},
    {HRP_MSG_ALLOC, sizeof(struct hrp_msg_alloc), false, 0},
    {HRP_MSG_MEMORY, sizeof(struct hrp_msg_memory), false, 1},
    {HRP_MSG_IMPORT, sizeof(struct hrp_msg_import), false, 1},
    {HRP_MSG_REGISTERED, sizeof(struct hrp_msg_buffer), false, 0},
    {HRP_MSG_FREE, sizeof(struct hrp_msg_buffer), false, 0},
    {HRP_MSG_DONE, sizeof(struct hrp_msg_empty), false, 0},
    {HRP_MSG_PATH, sizeof(struct hrp_msg_slot), false, 0},
    {HRP_MSG_STATUS, sizeof(struct hrp_msg_empty), false, 0},
    {HRP_MSG_TEXT, sizeof(struct hrp_msg_text), true, 0},
    {HRP_MSG_IMPORT_GPU, sizeof(struct hrp_msg_import_gpu), false, 0},
    {HRP_MSG_GPU_PART, sizeof(struct hrp_msg_gpu_part), false, 1},
    {HRP_MSG_DOCTOR, sizeof(struct hrp_msg_doctor), true, 0},
    {HRP_MSG_JOINING, sizeof(struct hrp_msg_join), false, 0},
};
#define NTYPES (sizeof(types) / sizeof(types[0]))
_Static_assert(NTYPES == HRP_NMSGS - 1, "every type is tested");

static struct hrp_addr addr4(uint8_t last)
{
    return (struct hrp_addr){.family = 4, .port = 18515, .ip = {10, 0, 0, last}};
}

static struct hrp_addr addr6(void)
{
    return (struct hrp_addr){.family = 6, .scope_id = 2, .ip = {0xfe, 0x80, [15] = 1}};
}

/* A message of the type with every field in use. */
static struct hrp_msg sample(unsigned type)
{
    struct hrp_msg m = {.type = (uint16_t)type, .cookie = UINT64_C(0x1122334455667788)};
    union hrp_msg_body *b = &m.body;
    switch (type) {
    case HRP_MSG_HELLO:
        b->hello = (struct hrp_msg_hello){.abi = HRP_ABI, .flags = HRP_HELLO_CTL, .pid = 4242};
        break;
    case HRP_MSG_WELCOME:
        b->welcome = (struct hrp_msg_welcome){.abi = HRP_ABI,
                                              .ncomms = 8,
                                              .segment_bytes = hrp_seg_size(8),
                                              .window_bytes = 8 << 20,
                                              .port = 18515,
                                              .version = "0.1.0"};
        break;
    case HRP_MSG_ERROR:
        b->error = (struct hrp_msg_error){.status = HRP_REFUSED, .scope = HRP_SCOPE_COMM};
        break;
    case HRP_MSG_ID:
        b->id.id = (struct hrp_unique_id){.magic = HRP_ID_MAGIC,
                                          .version = HRP_ID_VERSION,
                                          .naddrs = 2,
                                          .nonce = {1, 2, 3},
                                          .addr = {addr4(1), addr6()}};
        break;
    case HRP_MSG_JOIN:
    case HRP_MSG_JOINING:
        b->join = (struct hrp_msg_join){.key = {.kind = HRP_KEY_NAME,
                                                .uid = 77,
                                                .nranks = 32,
                                                .nth = 3,
                                                .attempt = UINT64_MAX,
                                                .name = "grad ~!"},
                                        .rank = 31,
                                        .nroots = 3,
                                        .root = {addr4(1), addr6(), addr4(2)},
                                        .config = {.setup_timeout_ms = 1000,
                                                   .op_timeout_ms = UINT32_MAX,
                                                   .algo = HRP_ALGO_TREE,
                                                   .reproducible = HRP_ON,
                                                   .wire_f32 = HRP_OFF,
                                                   .transport = 2,
                                                   .require = 7,
                                                   .overlap = HRP_OVERLAP_IDLE}};
        break;
    case HRP_MSG_JOINED:
        b->joined = (struct hrp_msg_joined){.slot = 7,
                                            .nranks = 32,
                                            .nnodes = 4,
                                            .node = 3,
                                            .nlocal = 8,
                                            .op_timeout_ms = 5,
                                            .comm_id = {9},
                                            .require = HRP_REQUIRE_P2P};
        break;
    case HRP_MSG_LEAVE:
    case HRP_MSG_ABORT:
    case HRP_MSG_WINDOW:
    case HRP_MSG_PATH:
        b->slot.slot = 5;
        break;
    case HRP_MSG_ALLOC:
        b->alloc.bytes = UINT64_C(1) << 40;
        break;
    case HRP_MSG_MEMORY:
        b->memory = (struct hrp_msg_memory){.bytes = 8192, .id = 6};
        break;
    case HRP_MSG_IMPORT:
        b->import = (struct hrp_msg_import){.offset = 4096, .bytes = 100};
        break;
    case HRP_MSG_REGISTERED:
    case HRP_MSG_FREE:
        b->buffer.id = UINT32_MAX;
        break;
    case HRP_MSG_TEXT:
        b->text.more = 1;
        break;
    case HRP_MSG_IMPORT_GPU:
        b->import_gpu = (struct hrp_msg_import_gpu){
            .uuid = {1, 2, 3, [15] = 16}, .bytes = 3 << 21, .kind = HRP_GPU_LEGACY, .handle = {7, [63] = 9}};
        break;
    case HRP_MSG_GPU_PART:
        b->gpu_part = (struct hrp_msg_gpu_part){.offset = 2 << 20, .bytes = 4 << 20};
        break;
    case HRP_MSG_DOCTOR:
        b->doctor = (struct hrp_msg_doctor){.what = HRP_DOCTOR_PROBE, .peer = 3, .back = 1};
        break;
    default:
        break;
    }
    return m;
}

static void test_round_trip(void **state)
{
    (void)state;
    static char buf[HRP_MSG_MAX + 1];
    for (size_t i = 0; i < NTYPES; i++) {
        struct hrp_msg m = sample(types[i].type), out;
        if (types[i].text) {
            m.text = "the sentence";
            m.text_len = 12;
        }
        long len = hrp_msg_encode(&m, buf, sizeof(buf));
        assert_int_equal(len, HDR + types[i].size + m.text_len);
        assert_int_equal(hrp_msg_decode(&out, buf, (size_t)len), 0);
        assert_int_equal(out.type, m.type);
        assert_int_equal(out.cookie, m.cookie);
        assert_memory_equal(&out.body, &m.body, types[i].size);
        assert_int_equal(out.text_len, m.text_len);
        if (m.text_len > 0)
            assert_memory_equal(out.text, m.text, m.text_len);
        else
            assert_null(out.text);
        assert_int_equal(hrp_msg_nfds(types[i].type), types[i].nfds);
        assert_string_not_equal(hrp_msg_name(types[i].type), "unknown message");

        /* From an odd address, with anything behind it. */
        static char odd[HRP_MSG_MAX];
        memset(odd, 0xee, sizeof(odd));
        memcpy(odd + 1, buf, (size_t)len);
        assert_int_equal(hrp_msg_decode(&out, odd + 1, (size_t)len), 0);
        assert_memory_equal(&out.body, &m.body, types[i].size);
    }
    static const unsigned unknown[] = {0, HRP_NMSGS, 255, 65535};
    for (size_t i = 0; i < 4; i++) {
        struct hrp_msg m = {.type = (uint16_t)unknown[i]};
        assert_int_equal(hrp_msg_nfds(unknown[i]), -1);
        assert_string_equal(hrp_msg_name(unknown[i]), "unknown message");
        assert_int_equal(hrp_msg_encode(&m, buf, sizeof(buf)), -EINVAL);
    }
}

/* Decodes `len` bytes that lie against the end of an allocation, so that a read beyond is an error of the
   sanitizer's. */
static int decode_exact(struct hrp_msg *out, const void *buf, size_t len)
{
    char *copy = malloc(len > 0 ? len : 1);
    if (len > 0)
        memcpy(copy, buf, len);
    int rc = hrp_msg_decode(out, copy, len);
    free(copy);
    return rc;
}

static void set_len(char *buf, size_t len)
{
    uint32_t l = (uint32_t)len;
    memcpy(buf + offsetof(struct hrp_msg_hdr, len), &l, sizeof(l));
}

static void test_truncated(void **state)
{
    (void)state;
    static char buf[HRP_MSG_MAX + 1];
    struct hrp_msg out;
    for (size_t i = 0; i < NTYPES; i++) {
        struct hrp_msg m = sample(types[i].type);
        size_t full = (size_t)hrp_msg_encode(&m, buf, sizeof(buf));
        for (size_t len = 0; len < full; len++) {
            assert_int_equal(decode_exact(&out, buf, len), -EPROTO); /* the length word does not fit */
            set_len(buf, len);
            /* Nor does a body that short, unless an older side sends it so. */
            size_t first = types[i].type == HRP_MSG_JOINED       ? offsetof(struct hrp_msg_joined, require)
                           : types[i].type == HRP_MSG_IMPORT_GPU ? offsetof(struct hrp_msg_import_gpu, mig)
                                                                 : full;
            bool older = len >= HDR + first;
            assert_int_equal(decode_exact(&out, buf, len), older ? 0 : -EPROTO);
            set_len(buf, full);
        }
        assert_int_equal(decode_exact(&out, buf, full), 0);
    }
}

static void test_oversized(void **state)
{
    (void)state;
    static char buf[HRP_MSG_MAX + 16];
    struct hrp_msg out;
    for (size_t i = 0; i < NTYPES; i++) {
        struct hrp_msg m = sample(types[i].type);
        memset(buf, 0, sizeof(buf));
        size_t full = (size_t)hrp_msg_encode(&m, buf, sizeof(buf));
        /* More than the length word says. */
        assert_int_equal(hrp_msg_decode(&out, buf, full + 1), -EPROTO);
        /* A longer body of a newer side: what is unknown is dropped. With a text tail it is text. */
        memset(buf + full, 0x77, HRP_MSG_MAX - full);
        for (size_t more = 1; more < 200; more += 33) {
            set_len(buf, full + more);
            assert_int_equal(decode_exact(&out, buf, full + more), 0);
            assert_memory_equal(&out.body, &m.body, types[i].size);
            assert_int_equal(out.text_len, types[i].text ? more : 0);
        }
        set_len(buf, HRP_MSG_MAX);
        assert_int_equal(hrp_msg_decode(&out, buf, HRP_MSG_MAX), 0);
        set_len(buf, HRP_MSG_MAX + 1);
        assert_int_equal(hrp_msg_decode(&out, buf, HRP_MSG_MAX + 1), -EPROTO);
    }
}

static void test_encode_limits(void **state)
{
    (void)state;
    static char buf[HRP_MSG_MAX + 1], text[HRP_MSG_MAX];
    memset(text, 'x', sizeof(text));
    for (size_t i = 0; i < NTYPES; i++) {
        struct hrp_msg m = sample(types[i].type), out;
        size_t full = HDR + types[i].size;
        for (size_t room = 0; room < full; room++)
            assert_int_equal(hrp_msg_encode(&m, buf, room), -EMSGSIZE);
        m.text = text;
        m.text_len = 1;
        if (!types[i].text) {
            assert_int_equal(hrp_msg_encode(&m, buf, sizeof(buf)), -EINVAL);
            continue;
        }
        m.text_len = HRP_MSG_MAX - full;
        assert_int_equal(hrp_msg_encode(&m, buf, sizeof(buf)), HRP_MSG_MAX);
        assert_int_equal(hrp_msg_decode(&out, buf, HRP_MSG_MAX), 0);
        assert_int_equal(out.text_len, m.text_len);
        m.text_len++;
        assert_int_equal(hrp_msg_encode(&m, buf, sizeof(buf)), -EMSGSIZE);
        m.text_len = SIZE_MAX;
        assert_int_equal(hrp_msg_encode(&m, buf, sizeof(buf)), -EMSGSIZE);
    }
}

static void test_header(void **state)
{
    (void)state;
    char buf[512];
    struct hrp_msg m = sample(HRP_MSG_LEAVE), out;
    size_t len = (size_t)hrp_msg_encode(&m, buf, sizeof(buf));
    struct hrp_msg_hdr h, bad;
    memcpy(&h, buf, sizeof(h));
    bad = h;
    bad.magic = (uint16_t)~HRP_MSG_MAGIC;
    memcpy(buf, &bad, sizeof(bad));
    assert_int_equal(hrp_msg_decode(&out, buf, len), -EPROTO);
    for (unsigned type = 0; type < 70000; type += type < 300 ? 1 : 997) {
        bad = h;
        bad.type = (uint16_t)type;
        memcpy(buf, &bad, sizeof(bad));
        int rc = hrp_msg_decode(&out, buf, len);
        if (bad.type == 0 || bad.type >= HRP_NMSGS)
            assert_int_equal(rc, -EPROTO);
    }
    for (uint32_t l = 0; l < 100; l++) {
        bad = h;
        bad.len = l;
        memcpy(buf, &bad, sizeof(bad));
        assert_int_equal(hrp_msg_decode(&out, buf, len), l == len ? 0 : -EPROTO);
    }
}

/* ------------------------------------------------------------------------------------- fields in range */

/* Puts `value` into a field of a sample and runs it through both directions of the codec. */
static void field(unsigned type, size_t offset, size_t size, uint64_t value, bool valid)
{
    char buf[512];
    struct hrp_msg m = sample(type), out;
    size_t len = (size_t)hrp_msg_encode(&m, buf, sizeof(buf));
    memcpy(buf + HDR + offset, &value, size);
    int rc = hrp_msg_decode(&out, buf, len);
    if (rc != (valid ? 0 : -EPROTO))
        fail_msg("%s, %zu bytes at %zu = %llu: decode says %d", hrp_msg_name(type), size, offset,
                 (unsigned long long)value, rc);
    memcpy((char *)&m.body + offset, &value, size);
    long n = hrp_msg_encode(&m, buf, sizeof(buf));
    if (valid ? n != (long)len : n != -EINVAL)
        fail_msg("%s, %zu bytes at %zu = %llu: encode says %ld", hrp_msg_name(type), size, offset,
                 (unsigned long long)value, n);
}
#define FIELD(type, part, name, value, valid)                                                             \
    field(type, offsetof(struct hrp_msg_##part, name), sizeof(((struct hrp_msg_##part *)0)->name), value, \
          valid)

/* A reserved field is refused when it arrives and zeroed when it leaves. */
static void reserved(unsigned type, size_t offset, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        char buf[512];
        struct hrp_msg m = sample(type), out;
        ((char *)&m.body)[offset + i] = 1;
        size_t len = (size_t)hrp_msg_encode(&m, buf, sizeof(buf));
        assert_int_equal(hrp_msg_decode(&out, buf, len), 0);
        assert_int_equal(((char *)&out.body)[offset + i], 0);
        buf[HDR + offset + i] = 1;
        if (hrp_msg_decode(&out, buf, len) != -EPROTO)
            fail_msg("%s: reserved byte at %zu", hrp_msg_name(type), offset + i);
    }
}
#define RESERVED(type, part, name) \
    reserved(type, offsetof(struct hrp_msg_##part, name), sizeof(((struct hrp_msg_##part *)0)->name))

static void test_session_fields(void **state)
{
    (void)state;
    FIELD(HRP_MSG_HELLO, hello, flags, 0, true);
    FIELD(HRP_MSG_HELLO, hello, flags, 2, false);
    FIELD(HRP_MSG_HELLO, hello, flags, UINT32_MAX, false);
    FIELD(HRP_MSG_HELLO, hello, pid, 0, false);
    FIELD(HRP_MSG_HELLO, hello, pid, UINT32_MAX, false);
    FIELD(HRP_MSG_HELLO, hello, pid, INT32_MAX, true);
    FIELD(HRP_MSG_HELLO, hello, abi, HRP_ABI + 1, true); /* another minor version */
    RESERVED(HRP_MSG_HELLO, hello, reserved);

    FIELD(HRP_MSG_WELCOME, welcome, ncomms, 0, false); /* without a segment, segment_bytes is 0 too */
    FIELD(HRP_MSG_WELCOME, welcome, ncomms, 9, false);
    FIELD(HRP_MSG_WELCOME, welcome, ncomms, UINT32_MAX, false);
    FIELD(HRP_MSG_WELCOME, welcome, segment_bytes, hrp_seg_size(8) - 1, false);
    FIELD(HRP_MSG_WELCOME, welcome, segment_bytes, UINT64_MAX, false);
    FIELD(HRP_MSG_WELCOME, welcome, window_bytes, 0, false);
    FIELD(HRP_MSG_WELCOME, welcome, window_bytes, 4097, false);
    FIELD(HRP_MSG_WELCOME, welcome, window_bytes, UINT64_MAX - 4095, false);
    FIELD(HRP_MSG_WELCOME, welcome, port, 0, true);
    RESERVED(HRP_MSG_WELCOME, welcome, reserved);
    char buf[512];
    struct hrp_msg m = sample(HRP_MSG_WELCOME), out;
    memset(m.body.welcome.version, 'v', sizeof(m.body.welcome.version));
    assert_int_equal(hrp_msg_encode(&m, buf, sizeof(buf)), -EINVAL);
    m = sample(HRP_MSG_WELCOME);
    m.body.welcome.ncomms = 0;
    m.body.welcome.segment_bytes = m.body.welcome.window_bytes = 0; /* hreducectl */
    assert_true(hrp_msg_encode(&m, buf, sizeof(buf)) > 0);

    /* Of another major version only the version matters. */
    m = sample(HRP_MSG_HELLO);
    m.body.hello = (struct hrp_msg_hello){.abi = 7 << 16, .flags = UINT32_MAX, .pid = -1};
    long len = hrp_msg_encode(&m, buf, sizeof(buf));
    assert_int_equal(hrp_msg_decode(&out, buf, (size_t)len), 0);
    assert_int_equal(out.body.hello.abi, 7 << 16);

    FIELD(HRP_MSG_ERROR, error, status, HRP_OK, false);
    FIELD(HRP_MSG_ERROR, error, status, HRP_IN_PROGRESS, false);
    FIELD(HRP_MSG_ERROR, error, status, HRP_NSTATUS - 1, true);
    FIELD(HRP_MSG_ERROR, error, status, HRP_NSTATUS, false);
    FIELD(HRP_MSG_ERROR, error, scope, HRP_SCOPE_SESSION, true);
    FIELD(HRP_MSG_ERROR, error, scope, HRP_SCOPE_SESSION + 1, false);
    static const unsigned empty[] = {HRP_MSG_GET_ID, HRP_MSG_DONE, HRP_MSG_STATUS};
    for (size_t i = 0; i < 3; i++)
        RESERVED(empty[i], empty, reserved);
    static const unsigned slots[] = {HRP_MSG_LEAVE, HRP_MSG_ABORT, HRP_MSG_WINDOW, HRP_MSG_PATH};
    for (size_t i = 0; i < 4; i++) {
        RESERVED(slots[i], slot, reserved);
        FIELD(slots[i], slot, slot, UINT32_MAX, false);
    }
    FIELD(HRP_MSG_TEXT, text, more, 0, true);
    FIELD(HRP_MSG_TEXT, text, more, 2, false);
    RESERVED(HRP_MSG_TEXT, text, reserved);
    RESERVED(HRP_MSG_DOCTOR, doctor, reserved);
    FIELD(HRP_MSG_DOCTOR, doctor, what, 0, false);
    FIELD(HRP_MSG_DOCTOR, doctor, what, HRP_NDOCTOR, false);
    FIELD(HRP_MSG_DOCTOR, doctor, what, HRP_DOCTOR_LINK, false);
    FIELD(HRP_MSG_DOCTOR, doctor, what, HRP_DOCTOR_HERE, true);
    FIELD(HRP_MSG_DOCTOR, doctor, what, HRP_DOCTOR_DIAL, false);
    FIELD(HRP_MSG_DOCTOR, doctor, peer, 0, false);
    FIELD(HRP_MSG_DOCTOR, doctor, back, 0, true);
    FIELD(HRP_MSG_DOCTOR, doctor, back, 2, false);
}

static void test_memory_fields(void **state)
{
    (void)state;
    const uint64_t most = UINT64_C(1) << 62;
    FIELD(HRP_MSG_ALLOC, alloc, bytes, 0, false);
    FIELD(HRP_MSG_ALLOC, alloc, bytes, 1, true);
    FIELD(HRP_MSG_ALLOC, alloc, bytes, most, true);
    FIELD(HRP_MSG_ALLOC, alloc, bytes, most + 1, false);
    FIELD(HRP_MSG_MEMORY, memory, bytes, 0, false);
    FIELD(HRP_MSG_MEMORY, memory, bytes, UINT64_MAX, false);
    RESERVED(HRP_MSG_MEMORY, memory, reserved);
    FIELD(HRP_MSG_IMPORT, import, bytes, 0, false);
    FIELD(HRP_MSG_IMPORT, import, bytes, UINT64_MAX, false);
    FIELD(HRP_MSG_IMPORT, import, offset, 0, true);
    FIELD(HRP_MSG_IMPORT, import, offset, 1, false);
    FIELD(HRP_MSG_IMPORT, import, offset, UINT64_MAX - 4095, false);
    RESERVED(HRP_MSG_REGISTERED, buffer, reserved);
    RESERVED(HRP_MSG_FREE, buffer, reserved);
}

static void test_gpu_fields(void **state)
{
    (void)state;
    const uint64_t most = UINT64_C(1) << 62;
    const unsigned i = HRP_MSG_IMPORT_GPU, p = HRP_MSG_GPU_PART;
    FIELD(i, import_gpu, bytes, 0, false);
    FIELD(i, import_gpu, bytes, 1, true); /* an allocation may have any size */
    FIELD(i, import_gpu, bytes, most, true);
    FIELD(i, import_gpu, bytes, most + 1, false);
    FIELD(i, import_gpu, kind, 0, false);
    FIELD(i, import_gpu, kind, HRP_GPU_VMM, false); /* with an IPC handle and no part */
    FIELD(i, import_gpu, kind, HRP_GPU_VMM + 1, false);
    FIELD(i, import_gpu, nparts, 1, false);

    char buf[512];
    struct hrp_msg m = sample(i), out;
    m.body.import_gpu.kind = HRP_GPU_VMM;
    memset(m.body.import_gpu.handle, 0, sizeof(m.body.import_gpu.handle));
    static const uint32_t parts[] = {1, 2, HRP_GPU_PARTS_MAX, 0, HRP_GPU_PARTS_MAX + 1, UINT32_MAX};
    for (size_t k = 0; k < 6; k++) {
        m.body.import_gpu.nparts = parts[k];
        long len = hrp_msg_encode(&m, buf, sizeof(buf));
        assert_int_equal(len, k < 3 ? (long)(HDR + sizeof(m.body.import_gpu)) : -EINVAL);
        if (k < 3)
            assert_int_equal(hrp_msg_decode(&out, buf, (size_t)len), 0);
    }
    m.body.import_gpu.nparts = 1;
    for (size_t b = 0; b < sizeof(m.body.import_gpu.handle); b++) {
        m.body.import_gpu.handle[b] = 1;
        assert_int_equal(hrp_msg_encode(&m, buf, sizeof(buf)), -EINVAL);
        m.body.import_gpu.handle[b] = 0;
    }

    FIELD(p, gpu_part, bytes, 0, false);
    FIELD(p, gpu_part, bytes, 4096, true);
    FIELD(p, gpu_part, bytes, 4097, false);
    FIELD(p, gpu_part, bytes, most + 4096, false);
    FIELD(p, gpu_part, offset, 0, true);
    FIELD(p, gpu_part, offset, 1, false);
    FIELD(p, gpu_part, offset, UINT64_MAX - 4095, false);
    FIELD(HRP_MSG_JOIN, join, config.overlap, HRP_OVERLAP_COMPUTE, true);
    FIELD(HRP_MSG_JOIN, join, config.overlap, HRP_NOVERLAPS, false);
}

static void test_join_fields(void **state)
{
    (void)state;
    const unsigned j = HRP_MSG_JOIN;
    FIELD(j, join, key.kind, 0, false);
    FIELD(j, join, key.kind, 3, false);
    FIELD(j, join, key.kind, HRP_KEY_ID, false); /* with a name's nth and attempt */
    FIELD(j, join, key.nranks, 0, false);
    FIELD(j, join, key.nranks, 31, false); /* rank 31 */
    FIELD(j, join, key.nranks, HRP_MAX_RANKS, true);
    FIELD(j, join, key.nranks, HRP_MAX_RANKS + 1, false);
    FIELD(j, join, key.uid, UINT32_MAX, true);
    FIELD(j, join, rank, 32, false);
    FIELD(j, join, rank, UINT32_MAX, false);
    FIELD(j, join, nroots, 0, false);
    FIELD(j, join, nroots, 2, false); /* the third is not zero */
    FIELD(j, join, nroots, 4, false); /* the fourth is nothing */
    FIELD(j, join, nroots, HRP_MAX_ADDRS + 1, false);
    FIELD(j, join, nroots, UINT32_MAX, false);
    FIELD(j, join, config.algo, HRP_NALGOS, false);
    FIELD(j, join, config.algo, 255, false);
    FIELD(j, join, config.reproducible, HRP_ON + 1, false);
    FIELD(j, join, config.wire_f32, HRP_ON + 1, false);
    FIELD(j, join, config.transport, 3, false);
    FIELD(j, join, config.require, 8, false);
    RESERVED(j, join, config.reserved);
    for (unsigned i = 0; i < 3; i++) {
        size_t a = offsetof(struct hrp_msg_join, root) + i * sizeof(struct hrp_addr);
        field(j, a + offsetof(struct hrp_addr, family), 1, 0, false);
        field(j, a + offsetof(struct hrp_addr, family), 1, 5, false);
        field(j, a + offsetof(struct hrp_addr, family), 1, 255, false);
        field(j, a + offsetof(struct hrp_addr, reserved), 1, 1, false);
        field(j, a + offsetof(struct hrp_addr, scope_id), 4, 1, i == 1); /* IPv6 alone has scopes */
        field(j, a + offsetof(struct hrp_addr, ip) + 4, 1, 1, i == 1);
        field(j, a + offsetof(struct hrp_addr, ip) + 15, 1, 9, i == 1);
    }
    for (unsigned b = 0; b < sizeof(struct hrp_addr); b++) /* an address that is not in use */
        field(j, offsetof(struct hrp_msg_join, root) + 3 * sizeof(struct hrp_addr) + b, 1, 1, false);
    size_t name = offsetof(struct hrp_msg_join, key.name);
    field(j, name, 1, 0, false); /* empty, with something behind */
    field(j, name, 1, '\n', false);
    field(j, name, 1, 0x7f, false);
    field(j, name, 1, 0xc3, false);
    field(j, name + 8, 1, 'x', false); /* behind the end */
    field(j, name + 71, 1, 'x', false);

    char buf[512];
    struct hrp_msg m = sample(j);
    memset(m.body.join.key.name, 'n', sizeof(m.body.join.key.name));
    assert_int_equal(hrp_msg_encode(&m, buf, sizeof(buf)), -EINVAL); /* no NUL */
    m.body.join.key.name[71] = 0;
    assert_true(hrp_msg_encode(&m, buf, sizeof(buf)) > 0);
    m.body.join.key = (struct hrp_key){.kind = HRP_KEY_ID, .nranks = 32, .name = "\1\2\3"};
    memset(m.body.join.key.name, 0xff, 16);
    assert_true(hrp_msg_encode(&m, buf, sizeof(buf)) > 0);
    m.body.join.key.name[16] = 1;
    assert_int_equal(hrp_msg_encode(&m, buf, sizeof(buf)), -EINVAL);
    m.body.join.key.name[16] = 0;
    m.body.join.key.nth = 1;
    assert_int_equal(hrp_msg_encode(&m, buf, sizeof(buf)), -EINVAL);
    m.body.join.key.nth = 0;
    m.body.join.key.attempt = 1;
    assert_int_equal(hrp_msg_encode(&m, buf, sizeof(buf)), -EINVAL);
}

static void test_joined_and_id_fields(void **state)
{
    (void)state;
    const unsigned j = HRP_MSG_JOINED;
    FIELD(j, joined, slot, 65535, true);
    FIELD(j, joined, slot, 65536, false);
    FIELD(j, joined, nranks, 0, false);
    FIELD(j, joined, nranks, 7, false); /* less than nlocal */
    FIELD(j, joined, nranks, HRP_MAX_RANKS + 1, false);
    FIELD(j, joined, nnodes, 0, false);
    FIELD(j, joined, nnodes, 3, false); /* node 3 */
    FIELD(j, joined, nnodes, 33, false);
    FIELD(j, joined, nnodes, HRP_MAX_NODES + 1, false);
    FIELD(j, joined, node, 4, false);
    FIELD(j, joined, nlocal, 0, false);
    FIELD(j, joined, nlocal, 33, false);
    FIELD(j, joined, require, HRP_REQUIRE_VERBS, true);
    FIELD(j, joined, require, 8, false);
    RESERVED(j, joined, reserved);

    const unsigned i = HRP_MSG_ID;
    FIELD(i, id, id.magic, 0, false);
    FIELD(i, id, id.version, HRP_ID_VERSION + 1, false);
    FIELD(i, id, id.naddrs, 0, false);
    FIELD(i, id, id.naddrs, 1, false);
    FIELD(i, id, id.naddrs, 3, false);
    FIELD(i, id, id.naddrs, HRP_MAX_ADDRS + 1, false);
    FIELD(i, id, id.naddrs, 65535, false);
    for (size_t b = 0; b < sizeof(((struct hrp_unique_id *)0)->reserved); b++)
        field(i, offsetof(struct hrp_unique_id, reserved) + b, 1, 1, false);
}

/* Any bytes at all: decode answers, and what it accepts it can encode again to the same. */
static void test_noise(void **state)
{
    (void)state;
    uint32_t rnd = 1;
    char buf[512], again[512];
    unsigned accepted = 0;
    for (unsigned n = 0; n < 200000; n++) {
        size_t i = n % NTYPES;
        struct hrp_msg m = sample(types[i].type), out;
        size_t len = (size_t)hrp_msg_encode(&m, buf, sizeof(buf));
        for (unsigned k = 0; k < 1 + n % 3; k++) {
            rnd = rnd * 1664525u + 1013904223u;
            buf[(rnd >> 8) % len] ^= (char)(1 << (rnd >> 5) % 8);
        }
        if (hrp_msg_decode(&out, buf, len) != 0)
            continue;
        accepted++;
        /* A flipped type may be that of a shorter body, the rest is dropped then. */
        long n2 = hrp_msg_encode(&out, again, sizeof(again));
        bool grew = out.type == HRP_MSG_JOINED; /* what an older side does not send is zero */
        assert_true(n2 > (long)HDR && (grew || n2 <= (long)len));
        if (n2 > (long)len)
            n2 = (long)len;
        if (out.type == HRP_MSG_WELCOME || out.type == HRP_MSG_HELLO)
            continue; /* bytes behind the version's end, or another major version's, are not kept */
        assert_memory_equal(buf + HDR, again + HDR, (size_t)n2 - HDR);
    }
    assert_true(accepted > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),    cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_oversized),     cmocka_unit_test(test_encode_limits),
        cmocka_unit_test(test_header),        cmocka_unit_test(test_session_fields),
        cmocka_unit_test(test_memory_fields), cmocka_unit_test(test_gpu_fields),
        cmocka_unit_test(test_join_fields),   cmocka_unit_test(test_joined_and_id_fields),
        cmocka_unit_test(test_noise),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
