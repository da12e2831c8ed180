/* SPDX-License-Identifier: MIT */
/* Outgoing control connections: one pass over the addresses of another daemon. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/peer_impl.h"

void hrd_peer_dial(struct hrd_daemon *d, hrd_peer_dialed *dialed, uint64_t token, const struct hrp_addr *addr,
                   unsigned naddrs, const uint8_t *expect, unsigned expect_len)
{
    struct dial *dl = calloc(1, sizeof(*dl));
    if (!dl)
        abort();
    dl->dialed = dialed;
    dl->token = token;
    dl->naddrs = naddrs < HRP_MAX_ADDRS ? naddrs : HRP_MAX_ADDRS;
    memcpy(dl->addr, addr, dl->naddrs * sizeof(addr[0]));
    dl->expect_len = expect_len <= sizeof(dl->expect) ? expect_len : sizeof(dl->expect);
    if (dl->expect_len > 0)
        memcpy(dl->expect, expect, dl->expect_len);
    dl->fresh = true;
    dl->next = d->peers->dials;
    d->peers->dials = dl;
    hrd_peer_soon(d);
}

static void unlink_dial(struct hrd_peers *ps, struct dial *dl)
{
    struct dial **at = &ps->dials;
    while (*at != dl)
        at = &(*at)->next;
    *at = dl->next;
}

void hrd_dial_answer(struct hrd_daemon *d, struct dial *dl, uint32_t status, uint32_t no, const char *why)
{
    unlink_dial(d->peers, dl);
    dl->dialed(d, dl->token, status, no, why);
    free(dl);
}

/* One address did not do. The sentence lists them all; another try is worth it if it is for any of them. */
static void note_failure(struct dial *dl, const struct hrp_addr *to, uint32_t status, const char *why)
{
    char at[HRD_ADDR_TEXT + 16];
    size_t len = strlen(dl->why);
    if (status == HRP_SHUTDOWN || status == HRP_RESOURCE)
        status = HRP_PEER_LOST;
    if (dl->status == HRP_OK || status == HRP_PEER_LOST)
        dl->status = status;
    bool says_where = strstr(why, hrd_addr_port_text(to, at, sizeof(at))) != NULL;
    snprintf(dl->why + len, sizeof(dl->why) - len, "%s%s%s%s", len > 0 ? "; " : "", says_where ? "" : at,
             says_where ? "" : ": ", why);
}

void hrd_dial_next(struct hrd_daemon *d, struct dial *dl)
{
    char why[256];
    for (; dl->at < dl->naddrs; dl->at++) {
        struct hrp_addr to = dl->addr[dl->at];
        if (to.port == 0)
            to.port = d->peers->net.port;
        struct conn *c = hrd_conn_dial(d, &to, HRP_PEER_CONTROL, why, sizeof(why));
        if (c) {
            c->dial = dl;
            dl->conn = c;
            return;
        }
        note_failure(dl, &to, HRP_PEER_LOST, why);
    }
    hrd_dial_answer(d, dl, dl->status != HRP_OK ? dl->status : HRP_PEER_LOST, 0,
                    dl->why[0] ? dl->why : "it has no address");
}

void hrd_dial_failed(struct hrd_daemon *d, struct dial *dl, uint32_t status, const char *why)
{
    struct hrp_addr to = dl->addr[dl->at];
    if (to.port == 0)
        to.port = d->peers->net.port;
    note_failure(dl, &to, status, why);
    dl->at++;
    hrd_dial_next(d, dl);
}

void hrd_dial_peer(struct hrd_daemon *d, uint32_t no, const char *why)
{
    for (struct dial *dl = d->peers->dials; dl;) {
        if (dl->wait_peer != no) {
            dl = dl->next;
            continue;
        }
        dl->wait_peer = 0;
        if (why)
            hrd_dial_failed(d, dl, HRP_PEER_LOST, why);
        else
            hrd_dial_answer(d, dl, HRP_OK, no, NULL);
        dl = d->peers->dials; /* the list may have changed in any way */
    }
}

void hrd_dial_start_fresh(struct hrd_daemon *d)
{
    for (struct dial *dl = d->peers->dials; dl;) {
        if (!dl->fresh) {
            dl = dl->next;
            continue;
        }
        dl->fresh = false;
        hrd_dial_next(d, dl);
        dl = d->peers->dials;
    }
}

void hrd_dial_free_all(struct hrd_peers *ps)
{
    while (ps->dials) {
        struct dial *dl = ps->dials;
        ps->dials = dl->next;
        free(dl);
    }
}
