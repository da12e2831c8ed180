/* SPDX-License-Identifier: MIT */
/* Client messages: whatever decodes must encode to something that decodes and encodes to the same. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "proto/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t in[HRP_MSG_MAX], out[HRP_MSG_MAX];
    struct hrp_msg msg, again;
    if (hrp_msg_decode(&msg, data, size) == 0 && size < sizeof(struct hrp_msg_hdr))
        abort();
    if (size < sizeof(struct hrp_msg_hdr) || size > sizeof(in))
        return 0;
    /* A right magic, length and type, so that the fuzzer spends its time behind them. */
    memcpy(in, data, size);
    struct hrp_msg_hdr *hdr = (struct hrp_msg_hdr *)(void *)in;
    hdr->magic = HRP_MSG_MAGIC;
    hdr->len = (uint32_t)size;
    hdr->type %= HRP_NMSGS;
    if (hrp_msg_decode(&msg, in, size) != 0)
        return 0;
    if (hrp_msg_nfds(msg.type) < 0 || !hrp_msg_name(msg.type))
        abort();
    long n = hrp_msg_encode(&msg, out, sizeof(out));
    if (n < 0 || hrp_msg_decode(&again, out, (size_t)n) != 0)
        abort();
    /* Reserved fields are dropped by the first encoding, so the second must be its equal. */
    static uint8_t out2[HRP_MSG_MAX];
    if (hrp_msg_encode(&again, out2, sizeof(out2)) != n || memcmp(out, out2, (size_t)n) != 0 ||
        again.cookie != msg.cookie || again.text_len != msg.text_len)
        abort();
    if (msg.text_len && memcmp(again.text, msg.text, msg.text_len) != 0)
        abort();
    return 0;
}
