/* SPDX-License-Identifier: MIT */
/* Control messages between daemons: hello, reply, confirm and every framed message. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "proto/peer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void fixed(const uint8_t *data, size_t size)
{
    struct hrp_peer_hello h;
    struct hrp_peer_reply r;
    struct hrp_peer_confirm c;
    if (size >= sizeof(h)) {
        memcpy(&h, data, sizeof(h));
        (void)hrp_peer_hello_check(&h);
    }
    if (size >= sizeof(r)) {
        memcpy(&r, data, sizeof(r));
        (void)hrp_peer_reply_check(&r);
    }
    if (size >= sizeof(c)) {
        memcpy(&c, data, sizeof(c));
        (void)hrp_peer_confirm_check(&c);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size > 0 && data[0] & 1)
        fixed(data + 1, size - 1);
    static _Alignas(8) uint8_t in[HRP_PEER_MSG_MAX];
    struct hrp_peer_msg msg;
    if (size < sizeof(struct hrp_peer_hdr) || size > sizeof(in))
        return 0;
    /* A right magic, length and type, so that the fuzzer spends its time behind them. */
    memcpy(in, data, size);
    struct hrp_peer_hdr *hdr = (struct hrp_peer_hdr *)(void *)in;
    hdr->magic = HRP_PEER_MAGIC;
    hdr->len = (uint32_t)(size - sizeof(*hdr));
    hdr->reserved = 0;
    hdr->reserved1 = 0;
    hdr->type %= HRP_PEER_NTYPES + 1;
    if (hrp_peer_decode(&msg, in, size) != 0)
        return 0;
    size_t need = hrp_peer_size(&msg);
    uint8_t *out = malloc(need ? need : 1);
    if (!out)
        return 0;
    long n = hrp_peer_encode(&msg, out, need);
    struct hrp_peer_msg again;
    if (n < 0 || hrp_peer_decode(&again, out, (size_t)n) != 0)
        abort();
    free(out);
    return 0;
}
