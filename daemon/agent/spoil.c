/* SPDX-License-Identifier: MIT */
/*
 * Failed ops that a CUDA stream copies out of a window. The job enqueued those copies with the call, and nothing takes them
 * back: whenever its stream comes to the op, perhaps long after it failed, it copies its input in, waits for done, and copies
 * out what it finds there, which would be its own input, numbers like any other. So such a rank is not answered at once. For as
 * long as its stream feeds the window, what it fed becomes NaN and then done, piece by piece; with the last piece comes the
 * error. Types without a NaN are answered at once: their output is undefined.
 *
 * This outlives the op, which may be over for everybody else.
 */
#include "daemon/agent/types.h"

#include <stdio.h>

/* Most that one look fills: it is done on the agent's thread. */
#define TURN_CHUNKS (UINT64_C(4) << 20 >> 18)
_Static_assert(TURN_CHUNKS *HRP_STAGE_CHUNK == UINT64_C(4) << 20, "4 MiB");

struct aspoil {
    struct arank *r;
    uint64_t op;
    uint64_t at, bytes; /* its stream in the window */
    uint64_t raised;    /* chunks */
    uint8_t dtype;
    uint32_t status;
    enum hrp_scope scope;
    char text[HRP_OP_TEXT + 1];
    struct aspoil *next;
};

bool hrd_spoil_takes(struct arank *r, uint64_t op, const struct apost *p, uint32_t status,
                     enum hrp_scope scope, const char *text)
{
    struct acomm *c = r->c;
    if (!p->stream || !p->staged || p->dtype > HRP_BF16 || p->stream_bytes == 0)
        return false;
    struct aspoil *s = xalloc(1, sizeof(*s));
    *s = (struct aspoil){.r = r,
                         .op = op,
                         .at = p->out.base ? p->out.off : p->in.off,
                         .bytes = p->stream_bytes,
                         .raised = p->raised,
                         .dtype = p->dtype,
                         .status = status,
                         .scope = scope,
                         .next = c->spoils};
    snprintf(s->text, sizeof(s->text), "%s", text ? text : "");
    c->spoils = s;
    c->streams++; /* to be looked at */
    c->a->streams++;
    return true;
}

/* Whether it is over. */
static bool step(struct acomm *c, struct aspoil *s, bool *moved)
{
    struct arank *r = s->r;
    if (!hrd_complete_reachable(r) || r->posted >= s->op + HRP_OP_SLOTS)
        return true; /* nobody waits for it: the rank left, or its slot is another op's */
    uint64_t ready = atomic_load_explicit(&r->area->flags[s->op % HRP_OP_SLOTS].ready, memory_order_acquire);
    if (ready >> HRP_CHUNK_BITS != s->op)
        return false;
    uint64_t chunks = ready & HRP_CHUNK_ALL, all = (s->bytes + HRP_STAGE_CHUNK - 1) / HRP_STAGE_CHUNK;
    uint64_t to = chunks < all ? chunks : all;
    if (to > s->raised + TURN_CHUNKS)
        to = s->raised + TURN_CHUNKS;
    if (to > s->raised) {
        uint64_t end = to * HRP_STAGE_CHUNK;
        hrk_fill_nan_ring(s->dtype, r->window, r->window_bytes, s->at + s->raised * HRP_STAGE_CHUNK,
                          s->at + (end < s->bytes ? end : s->bytes));
        s->raised = to;
        *moved = true;
    }
    if (s->raised == all && chunks == HRP_CHUNK_ALL) {
        hrd_complete_rank(c, r, s->op, s->status, s->scope, s->text);
        return true;
    }
    if (*moved)
        hrd_complete_raise(r, s->op, s->raised);
    return false;
}

bool hrd_spoil_look(struct acomm *c)
{
    bool any = false;
    for (struct aspoil **ps = &c->spoils; *ps;) {
        struct aspoil *s = *ps;
        bool moved = false, over = step(c, s, &moved);
        any = any || moved || over;
        if (!over) {
            ps = &s->next;
            continue;
        }
        *ps = s->next;
        c->streams--;
        c->a->streams--;
        free(s);
    }
    return any;
}

void hrd_spoil_free(struct acomm *c)
{
    for (struct aspoil *s = c->spoils, *next; s; s = next) {
        next = s->next;
        free(s);
    }
    c->spoils = NULL;
}
