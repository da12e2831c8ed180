/* SPDX-License-Identifier: MIT */
#include "proto/wire.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "proto/status.h"

#define BYTES_MAX (UINT64_C(1) << 62)
#define NCOMMS_MAX 65536u

static const struct {
    const char *name;
    uint16_t size;     /* of the body now */
    uint16_t min_size; /* of the body in version 1.0 */
    int8_t nfds;
    bool text;
} types[HRP_NMSGS] = {
#define TYPE(t, member, fds, has_text) \
    [HRP_MSG_##t] = {#t, sizeof(((union hrp_msg_body *)0)->member), V1_0_##member, fds, has_text}
/* A body that grows keeps its number here. */
#define V1_0_hello 16
#define V1_0_welcome 64
#define V1_0_error 8
#define V1_0_empty 4
#define V1_0_id 128
#define V1_0_join 232
#define V1_0_joined 40
#define V1_0_slot 8
#define V1_0_alloc 8
#define V1_0_memory 16
#define V1_0_import 16
#define V1_0_buffer 8
#define V1_0_text 8
/* of version 1.1 */
#define V1_0_import_gpu 96
#define V1_0_gpu_part 16
/* of version 1.2 */
#define V1_0_doctor 16
    TYPE(HELLO, hello, 1, false),
    TYPE(WELCOME, welcome, 3, false),
    TYPE(ERROR, error, 0, true),
    TYPE(GET_ID, empty, 0, false),
    TYPE(ID, id, 0, false),
    TYPE(JOIN, join, 0, false),
    TYPE(JOINED, joined, 0, false),
    TYPE(LEAVE, slot, 0, false),
    TYPE(ABORT, slot, 0, true),
    TYPE(WINDOW, slot, 0, false),
    TYPE(ALLOC, alloc, 0, false),
    TYPE(MEMORY, memory, 1, false),
    TYPE(IMPORT, import, 1, false),
    TYPE(REGISTERED, buffer, 0, false),
    TYPE(FREE, buffer, 0, false),
    TYPE(DONE, empty, 0, false),
    TYPE(PATH, slot, 0, false),
    TYPE(STATUS, empty, 0, false),
    TYPE(TEXT, text, 0, true),
    TYPE(IMPORT_GPU, import_gpu, 0, false),
    TYPE(GPU_PART, gpu_part, 1, false),
    TYPE(DOCTOR, doctor, 0, true),
    TYPE(JOINING, join, 0, false),
#undef TYPE
};
_Static_assert(sizeof(struct hrp_msg_hello) == V1_0_hello, "layout");
_Static_assert(sizeof(struct hrp_msg_welcome) == V1_0_welcome, "layout");
_Static_assert(sizeof(struct hrp_msg_error) == V1_0_error, "layout");
_Static_assert(sizeof(struct hrp_msg_empty) == V1_0_empty, "layout");
_Static_assert(sizeof(struct hrp_msg_id) == V1_0_id, "layout");
_Static_assert(sizeof(struct hrp_msg_join) == V1_0_join, "layout");
_Static_assert(offsetof(struct hrp_msg_joined, require) == V1_0_joined, "layout");
_Static_assert(sizeof(struct hrp_msg_joined) == V1_0_joined + 8, "layout");
_Static_assert(sizeof(struct hrp_msg_slot) == V1_0_slot, "layout");
_Static_assert(sizeof(struct hrp_msg_alloc) == V1_0_alloc, "layout");
_Static_assert(sizeof(struct hrp_msg_memory) == V1_0_memory, "layout");
_Static_assert(sizeof(struct hrp_msg_import) == V1_0_import, "layout");
_Static_assert(sizeof(struct hrp_msg_buffer) == V1_0_buffer, "layout");
_Static_assert(sizeof(struct hrp_msg_text) == V1_0_text, "layout");
_Static_assert(offsetof(struct hrp_msg_import_gpu, mig) == V1_0_import_gpu, "layout");
_Static_assert(sizeof(struct hrp_msg_import_gpu) == V1_0_import_gpu + 8, "layout");
_Static_assert(sizeof(struct hrp_msg_gpu_part) == V1_0_gpu_part, "layout");
_Static_assert(sizeof(struct hrp_msg_doctor) == V1_0_doctor, "layout");

int hrp_msg_nfds(unsigned type)
{
    return type > 0 && type < HRP_NMSGS ? types[type].nfds : -1;
}

const char *hrp_msg_name(unsigned type)
{
    return type > 0 && type < HRP_NMSGS ? types[type].name : "unknown message";
}

static bool all_zero(const void *p, size_t len)
{
    const unsigned char *b = p;
    for (size_t i = 0; i < len; i++)
        if (b[i] != 0)
            return false;
    return true;
}

int hrp_addr_check(const struct hrp_addr *addr)
{
    if (addr->reserved != 0)
        return -EPROTO;
    if (addr->family == 4)
        return addr->scope_id == 0 && all_zero(addr->ip + 4, 12) ? 0 : -EPROTO;
    return addr->family == 6 ? 0 : -EPROTO;
}

/* n addresses of HRP_MAX_ADDRS in use, the others zero. */
static bool addrs_ok(const struct hrp_addr *addr, uint32_t n)
{
    if (n == 0 || n > HRP_MAX_ADDRS)
        return false;
    for (uint32_t i = 0; i < n; i++)
        if (hrp_addr_check(&addr[i]) != 0)
            return false;
    return all_zero(addr + n, (HRP_MAX_ADDRS - n) * sizeof(*addr));
}

int hrp_unique_id_check(const struct hrp_unique_id *id)
{
    bool ok = id->magic == HRP_ID_MAGIC && id->version == HRP_ID_VERSION && addrs_ok(id->addr, id->naddrs) &&
              all_zero(id->reserved, sizeof(id->reserved));
    return ok ? 0 : -EPROTO;
}

static bool hello_ok(const struct hrp_msg_hello *m)
{
    if (m->abi >> 16 != HRP_ABI_MAJOR)
        return true;
    return (m->flags & ~HRP_HELLO_CTL) == 0 && m->pid > 0 && m->reserved == 0;
}

static bool welcome_ok(const struct hrp_msg_welcome *m)
{
    if (m->abi >> 16 != HRP_ABI_MAJOR)
        return true;
    if (m->ncomms > NCOMMS_MAX || m->segment_bytes > BYTES_MAX || m->window_bytes > BYTES_MAX ||
        m->window_bytes % HRP_PAGE != 0 || !all_zero(m->reserved, sizeof(m->reserved)) ||
        memchr(m->version, 0, sizeof(m->version)) == NULL)
        return false;
    if (m->ncomms == 0)
        return m->segment_bytes == 0;
    return m->segment_bytes >= hrp_seg_size(m->ncomms) && m->window_bytes > 0;
}

static bool key_ok(const struct hrp_key *k)
{
    if (k->nranks == 0 || k->nranks > HRP_MAX_RANKS)
        return false;
    if (k->kind == HRP_KEY_ID)
        return k->nth == 0 && k->attempt == 0 && all_zero(k->name + 16, sizeof(k->name) - 16);
    if (k->kind != HRP_KEY_NAME || k->name[0] == 0)
        return false;
    /* Names are printed in logs and reports of other people. */
    size_t len = strnlen(k->name, sizeof(k->name));
    for (size_t i = 0; i < len; i++)
        if (k->name[i] < 0x20 || k->name[i] > 0x7e)
            return false;
    return len < sizeof(k->name) && all_zero(k->name + len, sizeof(k->name) - len);
}

static bool config_ok(const struct hrp_comm_config *c)
{
    return c->algo < HRP_NALGOS && c->reproducible <= HRP_ON && c->wire_f32 <= HRP_ON && c->transport <= 2 &&
           (c->require & ~HRP_REQUIRE_ALL) == 0 && c->overlap < HRP_NOVERLAPS && c->service_level <= 15 &&
           c->class_set <= (HRP_CLASS_SL | HRP_CLASS_TC) && all_zero(c->reserved, sizeof(c->reserved));
}

static bool joined_ok(const struct hrp_msg_joined *m)
{
    return m->nranks >= 1 && m->nranks <= HRP_MAX_RANKS && m->nnodes >= 1 && m->nnodes <= HRP_MAX_NODES &&
           m->nnodes <= m->nranks && m->node < m->nnodes && m->nlocal >= 1 && m->nlocal <= m->nranks &&
           m->slot < NCOMMS_MAX && m->reserved == 0 && (m->require & ~HRP_REQUIRE_ALL) == 0;
}

static bool import_gpu_ok(const struct hrp_msg_import_gpu *m)
{
    if (m->bytes == 0 || m->bytes > BYTES_MAX)
        return false;
    if (m->kind == HRP_GPU_LEGACY)
        return m->nparts == 0;
    return m->kind == HRP_GPU_VMM && m->nparts > 0 && m->nparts <= HRP_GPU_PARTS_MAX &&
           all_zero(m->handle, sizeof(m->handle));
}

static bool doctor_ok(const struct hrp_msg_doctor *m)
{
    if (m->what == 0 || m->what >= HRP_NDOCTOR || m->what == HRP_DOCTOR_LINK || m->back > 1 ||
        m->reserved != 0)
        return false;
    bool local = m->what == HRP_DOCTOR_DIAL || (m->what == HRP_DOCTOR_HERE && !m->back);
    return local ? m->peer == 0 && m->back == 0 : m->peer != 0;
}

static bool body_ok(unsigned type, const union hrp_msg_body *b)
{
    switch (type) {
    case HRP_MSG_HELLO:
        return hello_ok(&b->hello);
    case HRP_MSG_WELCOME:
        return welcome_ok(&b->welcome);
    case HRP_MSG_ERROR:
        return b->error.status > HRP_IN_PROGRESS && b->error.status < HRP_NSTATUS &&
               b->error.scope <= HRP_SCOPE_SESSION;
    case HRP_MSG_ID:
        return hrp_unique_id_check(&b->id.id) == 0;
    case HRP_MSG_JOIN:
    case HRP_MSG_JOINING:
        return key_ok(&b->join.key) && b->join.rank < b->join.key.nranks &&
               addrs_ok(b->join.root, b->join.nroots) && config_ok(&b->join.config);
    case HRP_MSG_JOINED:
        return joined_ok(&b->joined);
    case HRP_MSG_LEAVE:
    case HRP_MSG_ABORT:
    case HRP_MSG_WINDOW:
    case HRP_MSG_PATH:
        return b->slot.slot < NCOMMS_MAX && b->slot.reserved == 0;
    case HRP_MSG_ALLOC:
        return b->alloc.bytes > 0 && b->alloc.bytes <= BYTES_MAX;
    case HRP_MSG_MEMORY:
        return b->memory.bytes > 0 && b->memory.bytes <= BYTES_MAX && b->memory.reserved == 0;
    case HRP_MSG_IMPORT:
        return b->import.bytes > 0 && b->import.bytes <= BYTES_MAX && b->import.offset <= BYTES_MAX &&
               b->import.offset % HRP_PAGE == 0;
    case HRP_MSG_REGISTERED:
    case HRP_MSG_FREE:
        return b->buffer.reserved == 0;
    case HRP_MSG_TEXT:
        return b->text.more <= 1 && b->text.reserved == 0;
    case HRP_MSG_IMPORT_GPU:
        return import_gpu_ok(&b->import_gpu);
    case HRP_MSG_GPU_PART:
        return b->gpu_part.bytes > 0 && b->gpu_part.bytes <= BYTES_MAX && b->gpu_part.offset <= BYTES_MAX &&
               b->gpu_part.bytes % HRP_PAGE == 0 && b->gpu_part.offset % HRP_PAGE == 0;
    case HRP_MSG_DOCTOR:
        return doctor_ok(&b->doctor);
    default: /* GET_ID, DONE, STATUS */
        return b->empty.reserved == 0;
    }
}

/* Nothing of the sender's memory travels in bytes that mean nothing. */
static void scrub(unsigned type, union hrp_msg_body *b)
{
    switch (type) {
    case HRP_MSG_HELLO:
        b->hello.reserved = 0;
        break;
    case HRP_MSG_WELCOME: {
        memset(b->welcome.reserved, 0, sizeof(b->welcome.reserved));
        size_t len = strnlen(b->welcome.version, sizeof(b->welcome.version));
        memset(b->welcome.version + len, 0, sizeof(b->welcome.version) - len);
        break;
    }
    case HRP_MSG_JOIN:
    case HRP_MSG_JOINING:
        memset(b->join.config.reserved, 0, sizeof(b->join.config.reserved));
        break;
    case HRP_MSG_JOINED:
        b->joined.reserved = 0;
        break;
    case HRP_MSG_LEAVE:
    case HRP_MSG_ABORT:
    case HRP_MSG_WINDOW:
    case HRP_MSG_PATH:
        b->slot.reserved = 0;
        break;
    case HRP_MSG_MEMORY:
        b->memory.reserved = 0;
        break;
    case HRP_MSG_REGISTERED:
    case HRP_MSG_FREE:
        b->buffer.reserved = 0;
        break;
    case HRP_MSG_TEXT:
        b->text.reserved = 0;
        break;
    case HRP_MSG_DOCTOR:
        b->doctor.reserved = 0;
        break;
    case HRP_MSG_GET_ID:
    case HRP_MSG_DONE:
    case HRP_MSG_STATUS:
        b->empty.reserved = 0;
        break;
    default:
        break;
    }
}

long hrp_msg_encode(const struct hrp_msg *msg, void *buf, size_t size)
{
    if (hrp_msg_nfds(msg->type) < 0)
        return -EINVAL;
    size_t body = types[msg->type].size;
    size_t text = msg->text != NULL ? msg->text_len : 0;
    if (text > 0 && !types[msg->type].text)
        return -EINVAL;
    union hrp_msg_body b = msg->body;
    scrub(msg->type, &b);
    if (!body_ok(msg->type, &b))
        return -EINVAL;
    if (text > HRP_MSG_MAX || sizeof(struct hrp_msg_hdr) + body + text > HRP_MSG_MAX ||
        sizeof(struct hrp_msg_hdr) + body + text > size)
        return -EMSGSIZE;
    struct hrp_msg_hdr hdr = {.magic = HRP_MSG_MAGIC,
                              .type = msg->type,
                              .len = (uint32_t)(sizeof(hdr) + body + text),
                              .cookie = msg->cookie};
    char *out = buf;
    memcpy(out, &hdr, sizeof(hdr));
    memcpy(out + sizeof(hdr), &b, body);
    if (text > 0)
        memcpy(out + sizeof(hdr) + body, msg->text, text);
    return (long)hdr.len;
}

int hrp_msg_decode(struct hrp_msg *msg, const void *buf, size_t len)
{
    struct hrp_msg_hdr hdr;
    if (len < sizeof(hdr) || len > HRP_MSG_MAX)
        return -EPROTO;
    memcpy(&hdr, buf, sizeof(hdr));
    if (hdr.magic != HRP_MSG_MAGIC || hdr.len != len || hrp_msg_nfds(hdr.type) < 0)
        return -EPROTO;
    const char *body = (const char *)buf + sizeof(hdr);
    size_t have = len - sizeof(hdr);
    size_t size = types[hdr.type].size;
    if (have < types[hdr.type].min_size)
        return -EPROTO;
    memset(msg, 0, sizeof(*msg));
    msg->type = hdr.type;
    msg->cookie = hdr.cookie;
    memcpy(&msg->body, body, have < size ? have : size);
    if (types[hdr.type].text && have > size) {
        msg->text = body + size;
        msg->text_len = have - size;
    }
    return body_ok(hdr.type, &msg->body) ? 0 : -EPROTO;
}
