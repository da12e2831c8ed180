/* SPDX-License-Identifier: MIT */
/*
 * The TCP transport by itself, with none, one and three I/O threads: two links that pass frames of every size, and a link
 * against a socket whose other end reads and writes as it likes. The test's thread takes the agent's place.
 */
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/poller.h"
#include "daemon/transport_tcp.h"

#define STREAMS 4u
#define AREA (UINT64_C(4) << 20) /* receive memory of a stream, with a guard at each end */
#define GUARD 64u
#define LIMIT_S 60

static struct hrd_tcp_io *io; /* of this pass */

struct message {
    struct hrd_tx tx;
    int dones, err;
    unsigned char *payload;
};

/* One end: a link, what it was told, and where its frames go. */
struct end {
    struct hrd_poller po;
    struct hrd_link *link;
    unsigned char *area[STREAMS];
    uint64_t used[STREAMS]; /* of it, at most */
    uint64_t next[STREAMS]; /* number of the stream's next frame */
    uint64_t arrived, payload_bytes;
    int lost;
    char why[200];
    bool refuse; /* place() and arrived() have objections: to a frame with, without payload */
};

static double now_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static uint32_t rnd(void)
{
    static uint32_t x = 2463534242u;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return x;
}

/* What every payload is a part of, where depends on its stream and number. */
static unsigned char text[AREA + 256];

static const unsigned char *pattern(uint64_t n, unsigned stream)
{
    return text + (n * 131 + stream * 31) % 256;
}

/* ---- an end ------------------------------------------------------------------------------------------------- */

static void *place(struct hrd_link *link, unsigned stream, const struct hrp_frame *f, const char **why)
{
    struct end *e = link->owner;
    *why = "the test does not like it";
    if (e->refuse || f->len > AREA)
        return NULL;
    e->used[stream] = f->len > e->used[stream] ? f->len : e->used[stream];
    return e->area[stream] + GUARD;
}

static int arrived(struct hrd_link *link, unsigned stream, const struct hrp_frame *f, void *payload,
                   const char **why)
{
    struct end *e = link->owner;
    unsigned char *p = payload, *area = e->area[stream];
    *why = "the test does not like it";
    if (e->refuse)
        return -1;
    assert_int_equal(f->op, ++e->next[stream]);
    assert_true(f->len == 0 ? p == NULL : p == area + GUARD);
    if (f->len && memcmp(p, pattern(f->op, stream), f->len) != 0)
        fail_msg("frame %llu of stream %u, of %u bytes, is wrong", (unsigned long long)f->op, stream, f->len);
    for (unsigned i = 0; i < GUARD; i++)
        assert_true(area[i] == 0xa5 && area[GUARD + f->len + i] == 0xa5);
    memset(area + GUARD, 0xa5, f->len);
    e->arrived++;
    e->payload_bytes += f->len;
    return 0;
}

static void lost(struct hrd_link *link, const char *why)
{
    struct end *e = link->owner;
    e->lost++;
    snprintf(e->why, sizeof(e->why), "%s", why);
}

static const struct hrd_link_handler handler = {.place = place, .arrived = arrived, .lost = lost};

/* Memory of ends that are gone, clean again: making it anew each time would be most of the test. */
static unsigned char *spare[2 * STREAMS];
static unsigned nspare;

static unsigned char *area_new(void)
{
    if (nspare > 0)
        return spare[--nspare];
    unsigned char *area = malloc(AREA + 2 * GUARD);
    memset(area, 0xa5, AREA + 2 * GUARD);
    return area;
}

static void area_free(unsigned char *area, uint64_t used)
{
    memset(area, 0xa5, used + 2 * GUARD);
    if (nspare < 2 * STREAMS)
        spare[nspare++] = area;
    else
        free(area);
}

static struct end *end_new(const int *fd, unsigned n)
{
    struct end *e = calloc(1, sizeof(*e));
    struct hrd_tcp_conn *conn = hrd_tcp_conn_new(fd, n);
    e->po.epfd = epoll_create1(EPOLL_CLOEXEC);
    conn->io = io;
    for (unsigned i = 0; i < STREAMS; i++)
        e->area[i] = area_new();
    e->link = hrd_transport_tcp.open(&conn->base, &e->po, &handler, e);
    assert_non_null(e->link);
    assert_int_equal(e->link->nstreams, n);
    return e;
}

static void end_close(struct end *e)
{
    if (e->link)
        hrd_transport_tcp.close(e->link);
    e->link = NULL;
}

static void end_free(struct end *e)
{
    end_close(e);
    for (unsigned i = 0; i < STREAMS; i++)
        area_free(e->area[i], e->used[i]);
    close(e->po.epfd);
    free(e);
}

/* A turn of the agent. */
static void turn(struct end *e, int timeout_ms)
{
    struct epoll_event ev[16];
    if (!e->link)
        return;
    if (hrd_transport_tcp.poll(e->link) || hrd_transport_tcp.arm(e->link))
        timeout_ms = 0;
    int n = epoll_wait(e->po.epfd, ev, 16, timeout_ms);
    for (int i = 0; i < n; i++) {
        struct hrd_pollable *p = ev[i].data.ptr;
        p->ready(p, ev[i].events);
    }
    if (!e->lost)
        hrd_transport_tcp.flush(e->link);
}

static void done(struct hrd_tx *tx, int err)
{
    struct message *m = tx->owner;
    m->dones++;
    m->err = err;
}

/* Frame n of its stream. */
static void send_message(struct end *e, struct message *m, unsigned stream, uint64_t n, uint32_t len)
{
    *m = (struct message){.payload = malloc(len ? len : 1)};
    memcpy(m->payload, pattern(n, stream), len);
    m->tx = (struct hrd_tx){.frame = {.magic = HRP_FRAME_MAGIC, .type = HRP_FRAME_DATA, .op = n, .len = len},
                            .payload = m->payload,
                            .stream = stream,
                            .done = done,
                            .owner = m};
    hrd_transport_tcp.send(e->link, &m->tx);
}

/* Every one is done, once, and with success unless err_allowed. */
static void check_done(struct message *m, unsigned n, bool err_allowed)
{
    for (unsigned i = 0; i < n; i++) {
        assert_int_equal(m[i].dones, 1);
        if (m[i].err)
            assert_true(err_allowed && m[i].err == -ECANCELED);
        free(m[i].payload);
    }
}

/* ---- sockets ------------------------------------------------------------------------------------------------- */

static void unix_pair(int *a, int *b)
{
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
    *a = pair[0];
    *b = pair[1];
}

/* buffer: of each direction, so small that nothing large passes in one call. */
static void tcp_pair(int *a, int *b, int buffer)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(at);
    int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    *a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(l >= 0 && *a >= 0);
    for (int i = 0; buffer && i < 2; i++) {
        assert_int_equal(setsockopt(i ? l : *a, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof(buffer)), 0);
        assert_int_equal(setsockopt(i ? l : *a, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof(buffer)), 0);
    }
    assert_int_equal(bind(l, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(l, 1), 0);
    assert_int_equal(getsockname(l, (struct sockaddr *)&at, &len), 0);
    assert_int_equal(connect(*a, (struct sockaddr *)&at, sizeof(at)), 0);
    *b = accept4(l, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    assert_true(*b >= 0);
    int on = 1;
    assert_int_equal(ioctl(*a, FIONBIO, &on), 0);
    close(l);
}

static void pairs(int *a, int *b, unsigned n, int kind)
{
    for (unsigned i = 0; i < n; i++) {
        if (kind == 0)
            unix_pair(&a[i], &b[i]);
        else
            tcp_pair(&a[i], &b[i], kind == 1 ? 0 : 8192);
    }
}

/* ---- two links ------------------------------------------------------------------------------------------------ */

static const uint32_t sizes[] = {0,    1,    79,     80,    81,    4096,  8111,        8112,
                                 8113, 8192, 8272,   65535, 65536, 65537, (256 << 10), (1 << 20) + 13,
                                 0,    0,    3 << 20};
#define NSIZES (sizeof(sizes) / sizeof(sizes[0]))

/* Both ends send everything on every stream, in an order of its own, some of it while the other's arrives. */
static void everything(int kind, unsigned nstreams)
{
    enum { EACH = NSIZES };
    uint32_t most = kind == 2 ? 12000 : UINT32_MAX; /* small buffers: a switch of threads every few KiB */
    int a[STREAMS], b[STREAMS];
    pairs(a, b, nstreams, kind);
    struct end *e[2] = {end_new(a, nstreams), end_new(b, nstreams)};
    struct message *m = calloc(2 * STREAMS * EACH, sizeof(*m));
    unsigned sent[2][STREAMS] = {{0}}, left = 2 * nstreams * EACH, total = left;
    uint64_t bytes = 0;
    double limit = now_s() + LIMIT_S;
    while (left > 0 || e[0]->arrived + e[1]->arrived < total ||
           e[0]->link->tx_frames + e[1]->link->tx_frames < total) {
        for (unsigned k = 0; k < 3 && left > 0; k++) {
            unsigned side = rnd() % 2, s = rnd() % nstreams;
            unsigned n = sent[side][s];
            if (n == EACH)
                continue;
            uint32_t len = sizes[(n + s) % NSIZES] % most;
            send_message(e[side], &m[(side * STREAMS + s) * EACH + n], s, n + 1, len);
            sent[side][s]++;
            bytes += len;
            left--;
        }
        turn(e[0], left ? 0 : 1);
        turn(e[1], left ? 0 : 1);
        assert_true(!e[0]->lost && !e[1]->lost && now_s() < limit);
    }
    assert_int_equal(e[0]->payload_bytes + e[1]->payload_bytes, bytes);
    assert_int_equal(e[0]->link->rx_frames + e[1]->link->rx_frames, total);
    assert_int_equal(e[0]->link->rx_bytes, e[1]->link->tx_bytes);
    assert_int_equal(e[1]->link->rx_bytes, e[0]->link->tx_bytes);
    end_close(e[0]);
    end_close(e[1]);
    for (unsigned side = 0; side < 2; side++)
        for (unsigned s = 0; s < nstreams; s++)
            check_done(&m[(side * STREAMS + s) * EACH], EACH, false);
    end_free(e[0]);
    end_free(e[1]);
    free(m);
}

static void test_every_size(void **state)
{
    (void)state;
    everything(1, STREAMS);
    everything(2, 3);
    everything(0, 1);
    everything(0, 2);
}

/* Closed at any moment, while frames are under way in both directions: every frame is done once, and the memory that frames
   went to is the test's again as soon as close() is back. */
static void test_close_in_flight(void **state)
{
    (void)state;
    enum { N = 24, ROUNDS = 20, LEN = 300000 };
    for (unsigned round = 0; round < ROUNDS; round++) {
        int a[STREAMS], b[STREAMS];
        struct message m[2][N];
        pairs(a, b, STREAMS, (int)(round % 2));
        struct end *e[2] = {end_new(a, STREAMS), end_new(b, STREAMS)};
        for (unsigned side = 0; side < 2; side++)
            for (unsigned i = 0; i < N; i++)
                send_message(e[side], &m[side][i], i % STREAMS, i / STREAMS + 1, i % 3 ? LEN : 100);
        for (unsigned i = rnd() % 40; i > 0; i--) {
            turn(e[0], 0);
            turn(e[1], 0);
        }
        unsigned first = rnd() % 2;
        struct end *gone = e[first];
        end_close(gone);
        check_done(m[first], N, true);
        for (unsigned s = 0; s < STREAMS; s++)
            memset(gone->area[s], 0x3c, GUARD + (gone->used[s] = LEN));
        for (int i = 0; i < 5; i++)
            turn(e[!first], 1);
        for (unsigned s = 0; s < STREAMS; s++)
            for (uint64_t i = 0; i < GUARD + LEN; i++)
                if (gone->area[s][i] != 0x3c)
                    fail_msg("stream %u: byte %llu was written after close", s, (unsigned long long)i);
        end_free(gone);
        end_close(e[!first]);
        check_done(m[!first], N, true);
        end_free(e[!first]);
    }
}

/* Closed right behind a send, while its thread is at the first of the two things that it was told. */
static void test_close_behind_send(void **state)
{
    (void)state;
    enum { ROUNDS = 3000 };
    for (unsigned round = 0; round < ROUNDS; round++) {
        int a[STREAMS], b[STREAMS];
        struct message m[STREAMS];
        pairs(a, b, STREAMS, 0);
        struct end *e = end_new(a, STREAMS);
        for (unsigned s = 0; s < STREAMS; s++)
            send_message(e, &m[s], s, 1, 100);
        hrd_transport_tcp.flush(e->link);
        for (volatile unsigned i = rnd() % 2000; i > 0; i--)
            ;
        end_close(e);
        check_done(m, STREAMS, true);
        end_free(e);
        for (unsigned s = 0; s < STREAMS; s++)
            close(b[s]);
    }
}

/* ---- a link and a socket of the test's own ---------------------------------------------------------------------- */

struct bare {
    struct end *e;
    int fd[STREAMS]; /* the other ends */
};

static struct bare bare_new(int kind)
{
    struct bare v;
    int a[STREAMS];
    pairs(a, v.fd, STREAMS, kind);
    v.e = end_new(a, STREAMS);
    return v;
}

static void bare_free(struct bare *v)
{
    for (unsigned i = 0; i < STREAMS; i++)
        if (v->fd[i] >= 0)
            close(v->fd[i]);
    end_free(v->e);
}

static void put(struct bare *v, unsigned stream, const void *p, size_t n, bool in_pieces)
{
    const char *at = p;
    double limit = now_s() + LIMIT_S;
    while (n > 0) {
        size_t some = in_pieces && n > 1 ? 1 + rnd() % (rnd() % 4 ? 200 : 30000) : n;
        ssize_t k = send(v->fd[stream], at, some < n ? some : n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (k > 0) {
            at += k;
            n -= (size_t)k;
        }
        if (in_pieces || k < 0)
            turn(v->e, 0);
        assert_true(now_s() < limit);
    }
}

static void put_frame(struct bare *v, unsigned stream, uint64_t n, uint32_t len, bool in_pieces)
{
    size_t size = sizeof(struct hrp_frame) + len;
    unsigned char *p = malloc(size);
    struct hrp_frame f = {.magic = HRP_FRAME_MAGIC, .type = HRP_FRAME_DATA, .op = n, .len = len};
    memcpy(p, &f, sizeof(f));
    memcpy(p + sizeof(f), pattern(n, stream), len);
    put(v, stream, p, size, in_pieces);
    free(p);
}

static void wait_arrived(struct end *e, uint64_t n)
{
    double limit = now_s() + LIMIT_S;
    while (e->arrived < n) {
        turn(e, 5);
        assert_true(!e->lost && now_s() < limit);
    }
}

static void wait_lost(struct bare *v, const char *words)
{
    double limit = now_s() + LIMIT_S;
    while (!v->e->lost) {
        turn(v->e, 5);
        assert_true(now_s() < limit);
    }
    for (int i = 0; i < 3; i++)
        turn(v->e, 1);
    assert_int_equal(v->e->lost, 1);
    if (!strstr(v->e->why, words))
        fail_msg("'%s' does not say '%s'", v->e->why, words);
}

/* Headers and payloads that come in bits, and several frames in one. */
static void test_in_pieces(void **state)
{
    (void)state;
    struct bare v = bare_new(0);
    uint64_t n[STREAMS] = {0}, count = 0;
    for (unsigned i = 0; i < 60; i++) {
        unsigned s = rnd() % STREAMS;
        put_frame(&v, s, ++n[s], i % 2 ? rnd() % 100 : rnd() % 40000, true);
        count++;
    }
    for (unsigned s = 0; s < STREAMS; s++)
        for (unsigned i = 0; i < 30; i++, count++)
            put_frame(&v, s, ++n[s], i % 3 ? 0 : rnd() % 5000, false);
    wait_arrived(v.e, count);
    bare_free(&v);
}

/* The other end takes a few bytes now and then: they are the right ones. */
static void test_read_in_pieces(void **state)
{
    (void)state;
    enum { N = 6 };
    struct bare v = bare_new(2);
    struct message m[N];
    unsigned char *got = malloc(1 << 20);
    for (unsigned s = 0; s < 2; s++) {
        uint64_t total = 0, have = 0;
        for (unsigned i = 0; i < N; i++) {
            uint32_t len = i % 2 ? 60000 + rnd() % 10000 : rnd() % 100;
            send_message(v.e, &m[i], s, i + 1, len);
            total += sizeof(struct hrp_frame) + len;
        }
        double limit = now_s() + LIMIT_S;
        while (have < total) {
            turn(v.e, 0);
            ssize_t k = recv(v.fd[s], got + have, 1 + rnd() % 5000, MSG_DONTWAIT);
            assert_true(k > 0 || (k < 0 && errno == EAGAIN));
            have += k > 0 ? (uint64_t)k : 0;
            assert_true(now_s() < limit);
        }
        const unsigned char *p = got;
        for (unsigned i = 0; i < N; i++) {
            assert_memory_equal(p, &m[i].tx.frame, sizeof(struct hrp_frame));
            p += sizeof(struct hrp_frame);
            assert_memory_equal(p, m[i].payload, m[i].tx.frame.len);
            p += m[i].tx.frame.len;
        }
        while (!m[N - 1].dones) {
            turn(v.e, 1);
            assert_true(now_s() < limit);
        }
        check_done(m, N, false);
    }
    free(got);
    bare_free(&v);
}

/* A peer that reads nothing keeps nobody else from a thread, and closing does not wait for it. */
static void test_peer_stands_still(void **state)
{
    (void)state;
    enum { N = 12 };
    struct bare still = bare_new(0);
    struct message m[N];
    for (unsigned i = 0; i < N; i++)
        send_message(still.e, &m[i], i % STREAMS, i / STREAMS + 1, 3 << 20);
    for (int i = 0; i < 50; i++)
        turn(still.e, 1);
    put_frame(&still, 1, 1, 3000, false);
    wait_arrived(still.e, 1); /* the other direction goes on */
    everything(2, 2);
    unsigned waiting = 0;
    for (unsigned i = 0; i < N; i++)
        waiting += !m[i].dones;
    assert_true(waiting >= STREAMS);
    end_close(still.e);
    check_done(m, N, true);
    bare_free(&still);
}

static void test_ends(void **state)
{
    (void)state;
    for (unsigned how = 0; how < 6; how++)
        for (unsigned s = 0; s < STREAMS; s += STREAMS - 1) {
            struct bare v = bare_new(how == 5 ? 1 : (int)(how % 2));
            struct hrp_frame f = {
                .magic = HRP_FRAME_MAGIC, .type = HRP_FRAME_DATA, .op = 1, .len = how % 2 ? 100000 : 100};
            char half[50000] = {0};
            struct linger now = {.l_onoff = 1};
            const char *words = "the peer closed the connection";
            switch (how) {
            case 0: /* between frames, one of which came just before */
                put_frame(&v, s, 1, 1000, false);
                close(v.fd[s]);
                v.fd[s] = -1;
                break;
            case 1: /* in a payload */
                put(&v, s, &f, sizeof(f), false);
                put(&v, s, half, sizeof(half), false);
                assert_int_equal(shutdown(v.fd[s], SHUT_WR), 0);
                break;
            case 2: /* in a header */
                put(&v, s, &f, sizeof(f) / 2, false);
                assert_int_equal(shutdown(v.fd[s], SHUT_WR), 0);
                break;
            case 3: /* no header at all */
                f.magic++;
                put(&v, s, &f, sizeof(f), false);
                words = "malformed frame header";
                break;
            case 4: /* refused, with and without payload */
                v.e->refuse = true;
                f.len = s ? 100 : 0;
                put(&v, s, &f, sizeof(f), false);
                words = "the test does not like it";
                break;
            default:
                assert_int_equal(setsockopt(v.fd[s], SOL_SOCKET, SO_LINGER, &now, sizeof(now)), 0);
                close(v.fd[s]);
                v.fd[s] = -1;
                words = "Connection reset by peer";
                break;
            }
            wait_lost(&v, words);
            assert_int_equal(v.e->arrived, how == 0);
            bare_free(&v);
        }
}

/* What the peer said on stream 0 comes before the end of another stream that it closed behind it. */
static void test_last_words(void **state)
{
    (void)state;
    for (unsigned i = 0; i < 20; i++) {
        struct bare v = bare_new((int)(i % 2));
        put_frame(&v, 0, 1, 500, false);
        for (unsigned s = STREAMS; s-- > 0;) {
            close(v.fd[s]);
            v.fd[s] = -1;
        }
        wait_lost(&v, "the peer closed the connection");
        assert_int_equal(v.e->arrived, 1);
        bare_free(&v);
    }
}

/* A link that was sent to when the other side is gone already. */
static void test_send_into_the_void(void **state)
{
    (void)state;
    enum { N = 8 };
    struct bare v = bare_new(0);
    struct message m[N];
    for (unsigned s = 0; s < STREAMS; s++) {
        close(v.fd[s]);
        v.fd[s] = -1;
    }
    for (unsigned i = 0; i < N; i++)
        send_message(v.e, &m[i], i % STREAMS, i / STREAMS + 1, 100000);
    wait_lost(&v, "");
    end_close(v.e);
    check_done(m, N, true);
    bare_free(&v);
}

int main(void)
{
    static const struct {
        unsigned threads, spin_us;
        const char *name;
    } pass[] = {{0, 0, "the agent alone"}, {1, 0, "1 I/O thread"}, {3, 100, "3 I/O threads"}};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_size),
        cmocka_unit_test(test_close_in_flight),
        cmocka_unit_test(test_close_behind_send),
        cmocka_unit_test(test_in_pieces),
        cmocka_unit_test(test_read_in_pieces),
        cmocka_unit_test(test_peer_stands_still),
        cmocka_unit_test(test_ends),
        cmocka_unit_test(test_last_words),
        cmocka_unit_test(test_send_into_the_void),
    };
    int failed = 0;
    for (size_t i = 0; i < sizeof(text); i++)
        text[i] = (unsigned char)(i * 7 + (i >> 8) * 13 + (i >> 16));
    for (size_t i = 0; i < sizeof(pass) / sizeof(pass[0]); i++) {
        io = pass[i].threads ? hrd_tcp_io_new(pass[i].threads, pass[i].spin_us) : NULL;
        failed += cmocka_run_group_tests_name(pass[i].name, tests, NULL, NULL);
        hrd_tcp_io_free(io);
    }
    while (nspare > 0)
        free(spare[--nspare]);
    return failed;
}
