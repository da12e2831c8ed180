/* SPDX-License-Identifier: MIT */
/* Two daemons' control sides in one process, with agents and the fake verbs layer, for the tests of their links. */
#ifndef TESTS_UNIT_PEER_NODES_H
#define TESTS_UNIT_PEER_NODES_H

#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/peer_impl.h"
#include "proto/status.h"
#include "tests/sim/fake_cm.h"
#include "tests/sim/fake_verbs.h"

static uv_loop_t loop;
static struct hrd_daemon d[2]; /* d[0] dials */

static inline void make(int i, uint16_t port)
{
    char err[512] = "";
    memset(&d[i], 0, sizeof(d[i]));
    hrd_config_defaults(&d[i].cfg);
    d[i].cfg.port = (uint16_t)(port + i);
    d[i].loop = &loop;
    d[i].verbs = fake_verbs();
    memset(d[i].instance, i + 1, sizeof(d[i].instance));
    snprintf(d[i].node_name, sizeof(d[i].node_name), "n%d", i);
    struct hrd_agent_config ac = {.arena_bytes = 4 << 20,
                                  .threads = 1,
                                  .unit_bytes = 1 << 20,
                                  .unit_min_bytes = 1 << 18,
                                  .chunk_bytes = 1 << 16,
                                  .eager_limit = 4096,
                                  .stall_warning_ms = 60000,
                                  .node_name = d[i].node_name};
    if (hrd_agent_new(&d[i].agent, &ac, err, sizeof(err)) || hrd_members_new(&d[i]) ||
        hrd_peers_new(&d[i], err, sizeof(err)))
        fail_msg("%s", err);
}

static inline void turn(void)
{
    uv_run(&loop, UV_RUN_NOWAIT);
    for (int i = 0; i < 2; i++) {
        struct hrd_event *ev = hrd_agent_take_events(d[i].agent);
        while (ev) {
            struct hrd_event *next = ev->next;
            hrd_peer_event(&d[i], ev);
            free(ev);
            ev = next;
        }
    }
    nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
}

static inline struct hrd_peer *peer_of(int i)
{
    return d[i].peers->peers;
}

/* Nobody listens there. */
static inline bool port_free(uint16_t port)
{
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    bool ok = bind(fd, (struct sockaddr *)&a, sizeof(a)) == 0;
    close(fd);
    return ok;
}

/* Connects the two; no link yet. */
static inline void begin(void)
{
    static uint16_t port;
    struct hrp_addr to;
    fake_verbs_plain();
    /* Programs that run side by side have process numbers side by side. */
    port = (uint16_t)(port ? port + 2 : 20000 + getpid() % 12000 * 499 % 12000);
    while (!port_free(port) || !port_free((uint16_t)(port + 1)))
        port = (uint16_t)(port + 2);
    uv_loop_init(&loop);
    make(0, port);
    make(1, port);
    assert_int_equal(hrd_addr_parse("127.0.0.1", (uint16_t)(port + 1), &to), 0);
    hrd_peer_dial(&d[0], hrd_member_dialed, 1, &to, 1, NULL, 0);
    for (int i = 0; i < 20000; i++) {
        turn();
        if (hrd_peer_find(&d[0], d[1].instance) && hrd_peer_find(&d[1], d[0].instance))
            return;
    }
    fail_msg("the two do not connect");
}

static const struct hrd_link_want any;

/* What is known of the first class. */
static inline struct plink *class_of(int i)
{
    return hrd_link_class(&d[i], peer_of(i), 0, 0);
}

static inline int ask(int i, const struct hrd_link_want *want)
{
    uint32_t link = 0;
    int r = hrd_peer_link(&d[i], peer_of(i)->no, want, &link);
    assert_true(r != 1 || hrd_link_by_id(d[i].peers, link));
    return r;
}

/* Asks for the link on both ends until both have it, or an answer that there is none. */
static inline void link_up(bool expected)
{
    for (int i = 0; i < 20000; i++) {
        int up0 = ask(0, &any), up1 = ask(1, &any);
        if (up0 == 1 && up1 == 1) {
            assert_true(expected);
            return;
        }
        turn();
        if (!expected && class_of(0)->why[0] && class_of(1)->why[0])
            return;
    }
    fail_msg("no answer about the link");
}

static inline void link_is(const char *transport, const char *words)
{
    const char *why;
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < 4000 && words[0]; k++) { /* the other end's reason may come behind its streams */
            (void)hrd_peer_transport(&d[i], peer_of(i)->no, &any, &why);
            if (strstr(why, words))
                break;
            turn();
        }
        assert_string_equal(hrd_peer_transport(&d[i], peer_of(i)->no, &any, &why), transport);
        if (words[0] ? !strstr(why, words) : why[0])
            fail_msg("node %d: '%s' does not say '%s'", i, why, words);
    }
}

static inline void end(void)
{
    for (int i = 0; i < 2; i++)
        hrd_peers_free(&d[i]);
    for (int i = 0; i < 2; i++)
        hrd_members_free(&d[i]);
    for (int i = 0; i < 50; i++)
        uv_run(&loop, UV_RUN_NOWAIT);
    for (int i = 0; i < 2; i++)
        hrd_agent_free(d[i].agent);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
    fake_verbs_hold(false);
    fake_verbs_reset(); /* nothing is left */
    fake_cm_reset();
}

static inline struct plink *verbs_of(int i)
{
    struct plink *l = peer_of(i) ? peer_of(i)->links : NULL;
    while (l && l->tcp)
        l = l->next;
    return l;
}

static inline void wait_mended(unsigned times)
{
    for (int i = 0; i < 20000; i++) {
        turn();
        if (!peer_of(0) || !peer_of(1))
            fail_msg("a peer was lost");
        if (verbs_of(0)->mended >= times && verbs_of(1)->mended >= times)
            break;
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(verbs_of(i)->mended, times);
        assert_null(verbs_of(i)->lent);
        assert_int_equal(verbs_of(i)->down_since, 0);
        assert_int_equal(d[i].peers->mended, times);
        assert_int_equal(d[i].peers->interrupted, times);
    }
    link_is("verbs", "");
}

static inline void wait_lost(void)
{
    for (int i = 0; i < 20000 && (d[0].peers->peers || d[1].peers->peers); i++)
        turn();
    for (int i = 0; i < 2; i++) {
        assert_null(d[i].peers->peers);
        assert_int_equal(d[i].peers->lost, 1);
    }
}

#endif
