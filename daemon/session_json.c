/* SPDX-License-Identifier: MIT */
#include <jansson.h>

#include "daemon/session_priv.h"

static uint64_t held_bytes(const struct hrd_session_priv *p, unsigned *windows)
{
    uint64_t n = p->segment.len;
    *windows = 0;
    for (uint32_t i = 0; i < p->nslots; i++) {
        n += p->slots[i].window.len;
        *windows += p->slots[i].window.base != NULL;
    }
    for (unsigned i = 0; i < HRD_BUFFER_BUCKETS; i++) {
        for (const struct hrd_buffer *b = p->buffers[i]; b; b = b->next)
            n += b->mem.len;
    }
    return n;
}

static int comms_of(const struct hrd_session_priv *p)
{
    int n = 0;
    for (uint32_t i = 0; i < p->nslots; i++)
        n += p->slots[i].taken;
    return n;
}

/* Control clients are left out: they look, they do not use. */
json_t *hrd_sessions_json(struct hrd_daemon *d)
{
    json_t *array = json_array();
    for (const struct hrd_session_priv *p = d->sessions->all; p; p = p->next) {
        unsigned windows;
        uint64_t bytes = held_bytes(p, &windows);
        if (p->ctl || p->state == HRD_S_HELLO)
            continue;
        json_array_append_new(
            array, json_pack("{s:I, s:i, s:I, s:s, s:f, s:I, s:i, s:i, s:i, s:b}", "session",
                             (json_int_t)p->pub.sid, "pid", (int)p->pub.pid, "uid", (json_int_t)p->pub.uid,
                             "command", p->command, "age_s", (double)(uv_now(d->loop) - p->since_ms) / 1000.0,
                             "memory_bytes", (json_int_t)bytes, "buffers", (int)p->nbuffers, "windows",
                             (int)windows, "comms", comms_of(p), "ending", p->state >= HRD_S_ENDING));
    }
    return array;
}
