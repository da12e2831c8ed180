/* SPDX-License-Identifier: MIT */
/* Sessions without an agent and without membership: this program plays both, and a client on a socket pair. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/member.h"
#include "daemon/memory.h"
#include "daemon/quota.h"
#include "daemon/session.h"
#include "proto/fdpass.h"

/* ---- what the other parts were told, in order ------------------------------------------------------------ */

static char heard[4096];

__attribute__((format(printf, 1, 2))) static void hear(const char *fmt, ...)
{
    size_t at = strlen(heard);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(heard + at, sizeof(heard) - at, fmt, ap);
    va_end(ap);
}

static void expect_heard(const char *text)
{
    assert_string_equal(heard, text);
    heard[0] = '\0';
}

static const _Atomic uint32_t *poisoned_word;

void hrd_agent_session_add(struct hrd_agent *a, uint64_t sid, struct hrp_seg_header *seg, int doorbell,
                           const _Atomic uint32_t *poisoned)
{
    (void)a;
    assert_true(doorbell >= 0);
    assert_int_equal(seg->magic, HRP_SEG_MAGIC);
    poisoned_word = poisoned;
    hear("agent: session %d\n", (int)sid);
}

void hrd_agent_session_end(struct hrd_agent *a, uint64_t sid, const char *why)
{
    (void)a;
    hear("agent: end %d: %s\n", (int)sid,
         strstr(why, "ended (killed")           ? "died"
         : strstr(why, "closed its connection") ? "left"
                                                : why);
}

void hrd_agent_buffer_add(struct hrd_agent *a, uint64_t sid, uint32_t id, void *base, uint64_t bytes)
{
    (void)a;
    (void)sid;
    memset(base, 1, bytes);
    hear("agent: buffer %u of %llu\n", id, (unsigned long long)bytes);
}

void hrd_agent_gpu_buffer_add(struct hrd_agent *a, uint64_t sid, uint32_t id, int16_t gpu, uint64_t device,
                              uint64_t bytes)
{
    (void)a;
    (void)sid;
    (void)device;
    hear("agent: buffer %u of %llu on GPU %d\n", id, (unsigned long long)bytes, gpu);
}

void hrd_agent_buffer_drop(struct hrd_agent *a, uint64_t sid, uint32_t id)
{
    (void)a;
    (void)sid;
    hear("agent: drop %u\n", id);
}

void hrd_agent_window_add(struct hrd_agent *a, uint64_t sid, uint32_t slot, void *base, uint64_t bytes)
{
    (void)a;
    (void)sid;
    memset(base, 1, bytes);
    hear("agent: window %u of %llu\n", slot, (unsigned long long)bytes);
}

void hrd_member_joining(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie,
                        const struct hrp_msg_join *join)
{
    char text[40];
    (void)d;
    snprintf(text, sizeof(text), "rank %u waits", join->rank);
    hrd_session_text(s, cookie, text);
}

void hrd_member_join(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie,
                     const struct hrp_msg_join *join)
{
    (void)d;
    int slot = hrd_session_slot_take(s);
    hear("member: join as uid %u in slot %d\n", join->key.uid, slot);
    if (slot < 0) {
        hrd_session_error(s, cookie, HRP_RESOURCE, HRP_SCOPE_COMM, "no slot");
        return;
    }
    struct hrp_msg msg = {.type = HRP_MSG_JOINED, .cookie = cookie};
    msg.body.joined.slot = (uint32_t)slot;
    msg.body.joined.nranks = msg.body.joined.nnodes = msg.body.joined.nlocal = 1;
    hrd_session_send(s, &msg, NULL, 0);
}

void hrd_member_leave(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, uint32_t slot)
{
    (void)d;
    hear("member: leave %u\n", slot);
    hrd_session_slot_free(s, slot);
    hrd_session_done(s, cookie);
}

void hrd_member_abort(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, uint32_t slot,
                      const char *text, size_t len)
{
    (void)d;
    hear("member: abort %u '%.*s'\n", slot, (int)len, text);
    hrd_session_done(s, cookie);
}

void hrd_member_session_gone(struct hrd_daemon *d, struct hrd_session *s, const char *why)
{
    (void)why;
    assert_null(hrd_session_find(d, s->sid));
    hear("member: gone %d\n", (int)s->sid);
}

void hrd_member_stamp_id(const struct hrd_daemon *d, struct hrp_unique_id *id)
{
    (void)d;
    (void)id;
}

uint64_t hrd_member_comm_of_slot(struct hrd_daemon *d, const struct hrd_session *s, uint32_t slot)
{
    (void)d;
    (void)s;
    return slot + 100;
}

unsigned hrd_peers_own_addrs(struct hrd_daemon *d, struct hrp_addr *out, unsigned max)
{
    (void)d;
    (void)out;
    (void)max;
    return 0;
}

void hrd_status_reply(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie)
{
    (void)d;
    /* Three parts and a bit. */
    size_t len = 3 * HRP_MSG_MAX;
    char *text = malloc(len + 1);
    assert_non_null(text);
    for (size_t i = 0; i < len; i++)
        text[i] = (char)('a' + i % 23);
    text[len] = '\0';
    hrd_session_text(s, cookie, text);
    free(text);
}

void hrd_path_reply(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie, uint32_t slot)
{
    (void)d;
    hear("path of %u\n", slot);
    hrd_session_text(s, cookie, "");
}

void hrd_doctor_request(struct hrd_daemon *d, struct hrd_session *s, uint64_t cookie,
                        const struct hrp_msg_doctor *m, const char *text, size_t len)
{
    (void)d;
    hear("doctor %u at %u: %.*s\n", m->what, m->peer, (int)len, text);
    hrd_session_text(s, cookie, "");
}

/* ---- the daemon and a client ------------------------------------------------------------------------------ */

struct world {
    struct hrd_daemon d;
    uv_loop_t loop;
    int sock; /* the client's */
    uint64_t cookie;
    int fds[HRP_MAX_FDS];
    int nfds;
    struct hrp_msg msg; /* the last that was received */
    unsigned char buf[HRP_MSG_MAX];
};

static void turn(struct world *w)
{
    uv_run(&w->loop, UV_RUN_NOWAIT);
}

static void close_fds(struct world *w)
{
    for (int i = 0; i < w->nfds; i++)
        close(w->fds[i]);
    w->nfds = 0;
}

static int setup(void **state)
{
    struct world *w = calloc(1, sizeof(*w));
    char err[256];
    int pair[2];
    assert_non_null(w);
    heard[0] = '\0';
    hrd_config_defaults(&w->d.cfg);
    w->d.cfg.max_comms = 3;
    w->d.cfg.window_bytes = 524288;
    snprintf(w->d.node_name, sizeof(w->d.node_name), "here");
    assert_int_equal(uv_loop_init(&w->loop), 0);
    w->d.loop = &w->loop;
    assert_int_equal(hrd_sessions_new(&w->d, err, sizeof(err)), 0);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    w->sock = pair[0];
    hrd_session_accept(&w->d, pair[1], NULL);
    *state = w;
    return 0;
}

/* Plays the agent: whatever was asked of it is done. */
static void agent_says(struct world *w, enum hrd_event_type type, uint64_t sid, uint32_t id)
{
    struct hrd_event ev = {.type = type, .sid = sid, .id = id};
    hrd_session_event(&w->d, &ev);
}

static int teardown(void **state)
{
    struct world *w = *state;
    hrd_sessions_end_all(&w->d, "the test ends");
    for (int i = 0; i < 200 && hrd_sessions_live(&w->d) > 0; i++) {
        turn(w);
        agent_says(w, HRD_EV_SESSION_GONE, 1, 0);
        usleep(1000);
    }
    assert_int_equal(hrd_sessions_live(&w->d), 0);
    hrd_sessions_free(&w->d);
    for (int i = 0; i < 100 && uv_run(&w->loop, UV_RUN_NOWAIT); i++)
        usleep(1000);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    close_fds(w);
    if (w->sock >= 0)
        close(w->sock);
    free(w);
    return 0;
}

static void say(struct world *w, uint16_t type, const union hrp_msg_body *body, int fd)
{
    struct hrp_msg msg = {.type = type, .cookie = ++w->cookie};
    unsigned char buf[1024];
    if (body)
        msg.body = *body;
    long len = hrp_msg_encode(&msg, buf, sizeof(buf));
    assert_true(len > 0);
    assert_int_equal(hrp_send_fds(w->sock, buf, (size_t)len, &fd, fd >= 0), 0);
}

/* Runs the loop until a message is there. 0: it is in w->msg; 1: the socket was closed; -1: nothing came. */
static int listen_for(struct world *w)
{
    for (int i = 0; i < 300; i++) {
        turn(w);
        close_fds(w);
        long n = hrp_recv_fds(w->sock, w->buf, sizeof(w->buf), w->fds, HRP_MAX_FDS, &w->nfds);
        if (n == 0)
            return 1;
        if (n > 0) {
            assert_int_equal(hrp_msg_decode(&w->msg, w->buf, (size_t)n), 0);
            return 0;
        }
        assert_int_equal(n, -EAGAIN);
        usleep(1000);
    }
    return -1;
}

static void expect(struct world *w, uint16_t type)
{
    assert_int_equal(listen_for(w), 0);
    if (w->msg.type != type)
        fail_msg("%s came: %.*s", hrp_msg_name(w->msg.type), (int)w->msg.text_len,
                 w->msg.text ? w->msg.text : "");
    assert_int_equal(w->msg.cookie, w->cookie);
    assert_int_equal(w->nfds, hrp_msg_nfds(type));
}

static void hello(struct world *w, uint32_t flags)
{
    union hrp_msg_body b = {.hello = {.abi = HRP_ABI, .flags = flags, .pid = getpid()}};
    int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    assert_true(pidfd >= 0);
    say(w, HRP_MSG_HELLO, &b, pidfd);
    close(pidfd);
    expect(w, HRP_MSG_WELCOME);
}

static uint32_t join(struct world *w)
{
    union hrp_msg_body b = {.join = {.key = {.kind = HRP_KEY_NAME, .nranks = 1, .name = "x"}, .nroots = 1}};
    b.join.root[0].family = 4;
    say(w, HRP_MSG_JOIN, &b, -1);
    expect(w, HRP_MSG_JOINED);
    return w->msg.body.joined.slot;
}

static void ask_slot(struct world *w, uint16_t type, uint32_t number)
{
    union hrp_msg_body b = {.slot = {.slot = number}};
    say(w, type, &b, -1);
}

/* ---- tests ------------------------------------------------------------------------------------------------ */

static void test_welcome(void **state)
{
    struct world *w = *state;
    hello(w, 0);
    assert_int_equal(w->msg.body.welcome.ncomms, 3);
    assert_int_equal(w->msg.body.welcome.window_bytes, 524288);
    size_t size = w->msg.body.welcome.segment_bytes;
    struct hrp_seg_header *seg = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, w->fds[0], 0);
    assert_ptr_not_equal(seg, MAP_FAILED);
    assert_int_equal(hrp_seg_check(seg, size), 0);
    /* Sealed: neither smaller nor larger. */
    assert_int_equal(ftruncate(w->fds[0], 0), -1);
    assert_int_equal(ftruncate(w->fds[0], (off_t)(2 * size)), -1);
    munmap(seg, size);
    expect_heard("agent: session 1\n");
    assert_non_null(hrd_session_find(&w->d, 1));
    assert_null(hrd_session_find(&w->d, 2));
}

/* Memberships first, then the agent; the socket is closed only when the agent has let go. */
static void end_in_order(struct world *w, const char *agent_line)
{
    char expected[128];
    for (int i = 0; i < 100 && !strstr(heard, "agent: end"); i++) {
        turn(w);
        usleep(1000);
    }
    snprintf(expected, sizeof(expected), "member: gone 1\n%s", agent_line);
    expect_heard(expected);
    assert_null(hrd_session_find(&w->d, 1));
    assert_int_equal(hrd_sessions_live(&w->d), 1);
    struct hrd_session_totals t;
    hrd_sessions_totals(&w->d, &t);
    assert_int_equal(t.memory_bytes, hrp_seg_size(3));
    agent_says(w, HRD_EV_SESSION_GONE, 1, 0);
    turn(w);
    hrd_sessions_totals(&w->d, &t);
    assert_int_equal(t.memory_bytes, 0);
    assert_int_equal(hrd_sessions_live(&w->d), 0);
}

static void test_end_by_the_client(void **state)
{
    struct world *w = *state;
    hello(w, 0);
    expect_heard("agent: session 1\n");
    close_fds(w);
    close(w->sock);
    w->sock = -1;
    end_in_order(w, "agent: end 1: left\n");
}

static void test_end_by_a_fault(void **state)
{
    struct world *w = *state;
    hello(w, 0);
    expect_heard("agent: session 1\n");
    assert_int_equal(send(w->sock, "nonsense", 8, 0), 8);
    /* The farewell comes at once, the end of file only after SESSION_GONE. */
    assert_int_equal(listen_for(w), 0);
    assert_int_equal(w->msg.type, HRP_MSG_ERROR);
    assert_int_equal(w->msg.cookie, 0);
    assert_int_equal(w->msg.body.error.status, HRP_PROTOCOL);
    assert_int_equal(listen_for(w), -1);
    assert_non_null(strstr(heard, "agent: end 1"));
    agent_says(w, HRD_EV_SESSION_GONE, 1, 0);
    assert_int_equal(listen_for(w), 1);
    struct hrd_session_totals t;
    hrd_sessions_totals(&w->d, &t);
    assert_int_equal(t.faults, 1);
}

static void test_fault_found_by_the_agent(void **state)
{
    struct world *w = *state;
    hello(w, 0);
    struct hrd_event ev = {.type = HRD_EV_SESSION_FAULT, .sid = 1, .text = "its ring is nonsense"};
    hrd_session_event(&w->d, &ev);
    hrd_session_event(&w->d, &ev);
    assert_int_equal(listen_for(w), 0);
    assert_non_null(memmem(w->msg.text, w->msg.text_len, "its ring is nonsense", 20));
    expect_heard("agent: session 1\nmember: gone 1\nagent: end 1: its ring is nonsense\n");
}

static void test_buffers(void **state)
{
    struct world *w = *state;
    union hrp_msg_body b = {.alloc = {.bytes = 5000}};
    hello(w, 0);
    say(w, HRP_MSG_ALLOC, &b, -1);
    expect(w, HRP_MSG_MEMORY);
    uint32_t id = w->msg.body.memory.id;
    assert_int_equal(w->msg.body.memory.bytes, 8192);
    unsigned char *p = mmap(NULL, 8192, PROT_READ, MAP_SHARED, w->fds[0], 0);
    assert_ptr_not_equal(p, MAP_FAILED);
    assert_int_equal(p[8191], 1); /* the fake agent's mark */
    munmap(p, 8192);
    expect_heard("agent: session 1\nagent: buffer 1 of 8192\n");

    b = (union hrp_msg_body){.buffer = {.id = id}};
    say(w, HRP_MSG_FREE, &b, -1);
    assert_int_equal(listen_for(w), -1); /* an op may still use it */
    expect_heard("agent: drop 1\n");
    uint64_t first = w->cookie;
    say(w, HRP_MSG_FREE, &b, -1);
    expect(w, HRP_MSG_ERROR);
    agent_says(w, HRD_EV_BUFFER_GONE, 1, 99); /* none of ours */
    agent_says(w, HRD_EV_BUFFER_GONE, 1, id);
    w->cookie = first;
    expect(w, HRP_MSG_DONE);
    struct hrd_session_totals t;
    hrd_sessions_totals(&w->d, &t);
    assert_int_equal(t.memory_bytes, hrp_seg_size(3));
}

static void test_slots_and_windows(void **state)
{
    struct world *w = *state;
    hello(w, 0);
    assert_int_equal(join(w), 0);
    assert_int_equal(join(w), 1);
    ask_slot(w, HRP_MSG_WINDOW, 1);
    expect(w, HRP_MSG_MEMORY);
    assert_int_equal(w->msg.body.memory.bytes, 524288);
    ask_slot(w, HRP_MSG_WINDOW, 1);
    expect(w, HRP_MSG_ERROR);
    ask_slot(w, HRP_MSG_LEAVE, 1);
    expect(w, HRP_MSG_DONE);
    ask_slot(w, HRP_MSG_WINDOW, 1);
    expect(w, HRP_MSG_ERROR);
    /* The window was given back with the slot; the next user makes a new one. */
    assert_int_equal(join(w), 1);
    ask_slot(w, HRP_MSG_WINDOW, 1);
    expect(w, HRP_MSG_MEMORY);
    struct hrd_session_totals t;
    hrd_sessions_totals(&w->d, &t);
    assert_int_equal(t.memory_bytes, hrp_seg_size(3) + 524288);

    /* Left while its window is being made: the memory goes back, the next user of the slot is not confused. */
    assert_int_equal(join(w), 2);
    ask_slot(w, HRP_MSG_WINDOW, 2);
    uint64_t window_cookie = w->cookie;
    ask_slot(w, HRP_MSG_LEAVE, 2);
    uint64_t leave_cookie = w->cookie;
    bool done = false, refused = false;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(listen_for(w), 0);
        done |= w->msg.type == HRP_MSG_DONE && w->msg.cookie == leave_cookie;
        refused |= w->msg.cookie == window_cookie;
    }
    assert_true(done && refused);
    hrd_sessions_totals(&w->d, &t);
    assert_int_equal(t.memory_bytes, hrp_seg_size(3) + 524288);
}

static uint64_t comms_seen;
static void count_comm(struct hrd_daemon *d, uint64_t comm)
{
    (void)d;
    comms_seen = comms_seen * 1000 + comm;
}

static void test_each_comm(void **state)
{
    struct world *w = *state;
    hello(w, 0);
    join(w);
    join(w);
    comms_seen = 0;
    hrd_sessions_each_comm(&w->d, count_comm);
    assert_int_equal(comms_seen, 100101);
}

/* The client stops reading in the middle of a long answer: what fits is sent, the rest waits. */
static void test_queue(void **state)
{
    struct world *w = *state;
    hello(w, HRP_HELLO_CTL);
    expect_heard("");
    for (int i = 0; i < 3; i++)
        say(w, HRP_MSG_STATUS, NULL, -1);
    for (int i = 0; i < 20; i++)
        turn(w);
    assert_non_null(hrd_session_find(&w->d, 1));
    for (unsigned doc = 0; doc < 3; doc++) {
        size_t at = 0;
        do {
            assert_int_equal(listen_for(w), 0);
            assert_int_equal(w->msg.type, HRP_MSG_TEXT);
            for (size_t i = 0; i < w->msg.text_len; i++, at++)
                assert_int_equal(w->msg.text[i], 'a' + at % 23);
        } while (w->msg.body.text.more);
        assert_int_equal(at, 3 * HRP_MSG_MAX);
    }
    /* Forty such answers that nobody reads are too many. */
    for (int i = 0; i < 40; i++) {
        struct hrp_msg msg = {.type = HRP_MSG_STATUS, .cookie = 1};
        unsigned char buf[64];
        long len = hrp_msg_encode(&msg, buf, sizeof(buf));
        if (hrp_send_fds(w->sock, buf, (size_t)len, NULL, 0) != 0)
            break;
        turn(w);
    }
    turn(w);
    assert_null(hrd_session_find(&w->d, 1));
}

static void test_stopping(void **state)
{
    struct world *w = *state;
    union hrp_msg_body b = {.join = {.key = {.kind = HRP_KEY_NAME, .nranks = 1, .name = "x"}, .nroots = 1}};
    b.join.root[0].family = 4;
    hello(w, 0);
    w->d.stopping = true;
    say(w, HRP_MSG_JOIN, &b, -1);
    expect(w, HRP_MSG_ERROR);
    assert_int_equal(w->msg.body.error.status, HRP_SHUTDOWN);
    expect_heard("agent: session 1\n");
}

/* The memory goes while a worker thread still makes some of it. */
static void test_end_while_memory_is_made(void **state)
{
    struct world *w = *state;
    union hrp_msg_body b = {.alloc = {.bytes = 64 << 20}};
    hello(w, 0);
    say(w, HRP_MSG_ALLOC, &b, -1);
    turn(w);
    hrd_session_kill(hrd_session_find(&w->d, 1), "enough");
    turn(w);
    agent_says(w, HRD_EV_SESSION_GONE, 1, 0);
    for (int i = 0; i < 2000 && hrd_sessions_live(&w->d) > 0; i++) {
        turn(w);
        usleep(1000);
    }
    assert_int_equal(hrd_sessions_live(&w->d), 0);
    struct hrd_session_totals t;
    hrd_sessions_totals(&w->d, &t);
    assert_int_equal(t.memory_bytes, 0);
}

/* ---- quota ------------------------------------------------------------------------------------------------ */

static void test_quota(void **state)
{
    struct hrd_quotas q = {0};
    struct hrd_quota_limits limits = {.bytes = 100, .sessions = 2, .charges = 2};
    struct hrd_charge a = HRD_CHARGE_NONE, b = HRD_CHARGE_NONE, c = HRD_CHARGE_NONE;
    (void)state;
    assert_int_equal(hrd_charge_take(&a, &q, 7, 60, 1, &limits), 0);
    assert_int_equal(hrd_charge_take(&b, &q, 7, 41, 0, &limits), 1);
    assert_null(b.user);
    assert_int_equal(hrd_charge_take(&b, &q, 7, UINT64_MAX, 0, &limits), 1);
    assert_int_equal(hrd_charge_take(&b, &q, 7, 40, 1, &limits), 0);
    assert_int_equal(hrd_charge_take(&c, &q, 7, 0, 1, &limits), 1);
    assert_int_equal(hrd_charge_take(&c, &q, 8, 100, 2, &limits), 0);
    assert_int_equal(hrd_quota_bytes(&q, 7), 100);
    assert_int_equal(hrd_quota_sessions(&q, 7), 2);
    assert_int_equal(hrd_quota_charges(&q, 7), 2);
    /* Two things are two things, of whatever size. */
    struct hrd_charge third = HRD_CHARGE_NONE;
    limits.bytes = 1000;
    assert_int_equal(hrd_charge_take(&third, &q, 7, 1, 0, &limits), 1);
    assert_null(third.user);
    /* A limit lowered below what is held. */
    limits.bytes = 10;
    hrd_charge_drop(&b);
    assert_int_equal(hrd_charge_take(&b, &q, 7, 1, 0, &limits), 1);
    hrd_charge_drop(&b);
    hrd_charge_drop(&a);
    hrd_charge_drop(&a);
    assert_int_equal(hrd_quota_bytes(&q, 7), 0);
    hrd_charge_drop(&c);
    assert_null(q.users);
}

static void test_headroom(void **state)
{
    char where[640] = "", err[512] = "";
    void *base;
    size_t len;
    (void)state;
    uint64_t left = hrd_memory_headroom(where, sizeof(where));
    if (left == UINT64_MAX)
        skip();
    /* More than there is: refused, and not by the kernel's choice of a victim. */
    assert_int_equal(hrd_memfd_make("x", left + (UINT64_C(1) << 30), &base, &len, err, sizeof(err)), -ENOMEM);
    assert_non_null(strstr(err, "are left of"));
    assert_int_equal(hrd_memfd_make("x", UINT64_MAX, &base, &len, err, sizeof(err)), -ENOMEM);
}

#define SESSION_TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        SESSION_TEST(test_welcome),        SESSION_TEST(test_end_by_the_client),
        SESSION_TEST(test_end_by_a_fault), SESSION_TEST(test_fault_found_by_the_agent),
        SESSION_TEST(test_buffers),        SESSION_TEST(test_slots_and_windows),
        SESSION_TEST(test_each_comm),      SESSION_TEST(test_queue),
        SESSION_TEST(test_stopping),       SESSION_TEST(test_end_while_memory_is_made),
        cmocka_unit_test(test_quota),      cmocka_unit_test(test_headroom),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
