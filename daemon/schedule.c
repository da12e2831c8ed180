/* SPDX-License-Identifier: MIT */
#include "daemon/schedule.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/schedule_build.h"

static const char *const algo_names[HRD_NALGOS] = {"auto", "direct", "gather", "pairwise",
                                                   "ring", "tree",   "local"};

const char *hrd_algo_name(unsigned algo)
{
    return algo < HRD_NALGOS ? algo_names[algo] : "unknown algorithm";
}

int hrd_algo_parse(const char *name)
{
    for (int i = HRD_ALGO_AUTO; i <= HRD_ALGO_TREE; i++)
        if (strcmp(name, algo_names[i]) == 0)
            return i;
    return -1;
}

int hrd_schedule_serves(unsigned algo, unsigned coll)
{
    if (coll >= HRP_NCOLLS)
        return 0;
    switch (algo) {
    case HRD_ALGO_DIRECT:
        return coll != HRP_BARRIER;
    case HRD_ALGO_PAIRWISE:
    case HRD_ALGO_RING:
        return coll == HRP_ALL_REDUCE || coll == HRP_REDUCE_SCATTER || coll == HRP_ALL_GATHER;
    case HRD_ALGO_TREE:
        return coll == HRP_ALL_REDUCE;
    case HRD_ALGO_GATHER:
    case HRD_ALGO_LOCAL:
        return 1;
    default:
        return 0;
    }
}

uint16_t hrd_schedule_nblocks(unsigned algo, unsigned coll, uint32_t nnodes)
{
    bool whole = algo == HRD_ALGO_GATHER || algo == HRD_ALGO_TREE || algo == HRD_ALGO_LOCAL;
    bool by_node = coll == HRP_REDUCE_SCATTER || coll == HRP_ALL_GATHER;
    return whole && !by_node ? 1 : (uint16_t)nnodes;
}

/* The array with room for one element more (they double), or NULL when there is an error; then it is as it was. */
static void *grow(struct sched_build *b, void *array, uint32_t *cap, uint32_t used, size_t size)
{
    if (b->err != 0)
        return NULL;
    if (used < *cap)
        return array;
    uint32_t want = *cap ? *cap * 2 : 64;
    void *p = realloc(array, want * size);
    if (p == NULL)
        b->err = -ENOMEM;
    else
        *cap = want;
    return p;
}

static struct hrd_step *add_step(struct sched_build *b, unsigned kind, uint32_t block, unsigned value)
{
    struct hrd_schedule *s = b->s;
    struct hrd_step *steps = grow(b, s->steps, &b->cap_steps, s->nsteps, sizeof(*steps));
    if (steps == NULL)
        return NULL;
    s->steps = steps;
    struct hrd_step *step = &steps[s->nsteps++];
    *step = (struct hrd_step){.kind = (uint8_t)kind,
                              .value = (uint8_t)value,
                              .block = (uint16_t)block,
                              .src = HRD_NONE,
                              .buf = HRD_NONE};
    return step;
}

static void add_list(struct sched_build *b, uint32_t index)
{
    struct hrd_schedule *s = b->s;
    uint32_t *list = grow(b, s->list, &b->cap_list, s->nlist, sizeof(*list));
    if (list == NULL)
        return;
    s->list = list;
    list[s->nlist++] = index;
}

static uint32_t add_buf(struct sched_build *b, uint32_t block, unsigned value)
{
    struct hrd_schedule *s = b->s;
    uint32_t cap = b->cap_bufs;
    uint16_t *blocks = grow(b, s->buf_block, &cap, s->nbufs, sizeof(*blocks));
    if (blocks == NULL)
        return HRD_NONE;
    s->buf_block = blocks;
    uint8_t *values = grow(b, s->buf_value, &b->cap_bufs, s->nbufs, sizeof(*values));
    if (values == NULL)
        return HRD_NONE;
    s->buf_value = values;
    blocks[s->nbufs] = (uint16_t)block;
    values[s->nbufs] = (uint8_t)value;
    return s->nbufs++;
}

static uint32_t newest(const struct sched_build *b)
{
    return b->err == 0 ? b->s->nsteps - 1 : HRD_NONE;
}

static void add_dep(struct sched_build *b, uint32_t index)
{
    struct hrd_step *step = &b->s->steps[b->s->nsteps - 1];
    if (step->dep_count == 0)
        step->dep_first = b->s->nlist;
    step->dep_count++;
    add_list(b, index);
}

uint32_t sb_local(struct sched_build *b, uint32_t block, unsigned value)
{
    uint32_t buf = add_buf(b, block, value);
    struct hrd_step *step = add_step(b, HRD_STEP_LOCAL, block, value);
    if (step != NULL) {
        step->buf = buf;
        step->cover_first = (uint16_t)b->me;
        step->cover_count = 1;
    }
    return newest(b);
}

uint32_t sb_send(struct sched_build *b, uint32_t src, uint32_t peer, uint32_t round)
{
    struct hrd_step *step = add_step(b, HRD_STEP_SEND, 0, 0);
    if (step != NULL) {
        const struct hrd_step *from = &b->s->steps[src];
        step->block = from->block;
        step->value = from->value;
        step->cover_first = from->cover_first;
        step->cover_count = from->cover_count;
        step->src = src;
        step->peer = (uint16_t)peer;
        step->round = (uint16_t)round;
        step->tag = (uint16_t)b->s->sends[peer].count++;
    }
    return newest(b);
}

uint32_t sb_send_after(struct sched_build *b, uint32_t src, uint32_t peer, uint32_t round, uint32_t dep)
{
    uint32_t send = sb_send(b, src, peer, round);
    if (b->err == 0 && dep != HRD_NONE && dep != src)
        add_dep(b, dep);
    return send;
}

uint32_t sb_send_ordered(struct sched_build *b, uint32_t src, uint32_t peer, uint32_t round)
{
    return b->last_send = sb_send_after(b, src, peer, round, b->last_send);
}

uint32_t sb_recv(struct sched_build *b, uint32_t block, unsigned value, uint32_t peer, uint32_t round,
                 struct sb_cover cover)
{
    struct hrd_step *step = add_step(b, HRD_STEP_RECV, block, value);
    if (step != NULL) {
        step->peer = (uint16_t)peer;
        step->round = (uint16_t)round;
        step->tag = (uint16_t)b->s->recvs[peer].count++;
        step->cover_first = (uint16_t)(cover.first % b->n);
        step->cover_count = (uint16_t)cover.count;
    }
    return newest(b);
}

/*
 * The inputs must cover neighbouring ranges of nodes, so that the sum can be described by one range. In node
 * order the first range may be node 0's while the whole wraps around; a full cover is written as 0, n.
 */
static struct hrd_step *add_fold(struct sched_build *b, const uint32_t *in, uint32_t count, unsigned value)
{
    if (b->err != 0)
        return NULL;
    struct hrd_step *step = add_step(b, HRD_STEP_FOLD, b->s->steps[in[0]].block, value);
    if (step == NULL)
        return NULL;
    uint32_t covered = 0;
    step->in_first = b->s->nlist;
    step->in_count = count;
    for (uint32_t i = 0; i < count; i++) {
        covered += b->s->steps[in[i]].cover_count;
        add_list(b, in[i]);
    }
    step->cover_first = covered == b->n ? 0 : b->s->steps[in[0]].cover_first;
    step->cover_count = (uint16_t)covered;
    return b->err == 0 ? step : NULL;
}

uint32_t sb_fold_over(struct sched_build *b, uint32_t over, const uint32_t *in, uint32_t count)
{
    struct hrd_step *step = add_fold(b, in, count, HRD_VALUE_PARTIAL);
    if (step != NULL)
        step->buf = b->s->steps[over].buf;
    return newest(b);
}

uint32_t sb_fold_final(struct sched_build *b, const uint32_t *in, uint32_t count, int sent)
{
    struct hrd_step *step = add_fold(b, in, count, HRD_VALUE_RESULT);
    if (step != NULL) {
        step->final = 1;
        /* Not over an input: a result may be narrower than the partials, and threads share the block. */
        if (sent)
            step->buf = add_buf(b, step->block, HRD_VALUE_RESULT);
    }
    return newest(b);
}

uint32_t sb_store(struct sched_build *b, uint32_t src, uint32_t local)
{
    if (b->err != 0)
        return HRD_NONE;
    const struct hrd_step from = b->s->steps[src];
    struct hrd_step *step = add_step(b, HRD_STEP_STORE, from.block, HRD_VALUE_RESULT);
    if (step != NULL) {
        step->src = src;
        step->cover_first = from.cover_first;
        step->cover_count = from.cover_count;
        if (local != HRD_NONE && local != src)
            add_dep(b, local);
    }
    return newest(b);
}

void sb_fused(struct sched_build *b)
{
    struct hrd_step *step = add_step(b, HRD_STEP_FUSED, 0, HRD_VALUE_RESULT);
    if (step != NULL) {
        step->final = 1;
        step->cover_count = 1;
    }
}

/* Calls fn for every step that step i waits for; the sb_ functions never name one twice. */
typedef void waits_fn(struct hrd_schedule *s, uint32_t i, uint32_t p);

static void each_wait(struct hrd_schedule *s, uint32_t i, waits_fn *fn)
{
    const struct hrd_step *step = &s->steps[i];
    if (step->src != HRD_NONE)
        fn(s, i, step->src);
    for (uint32_t k = 0; k < step->in_count; k++)
        fn(s, i, s->list[step->in_first + k]);
    for (uint32_t k = 0; k < step->dep_count; k++)
        fn(s, i, s->list[step->dep_first + k]);
}

static void count_wait(struct hrd_schedule *s, uint32_t i, uint32_t p)
{
    s->steps[i].nwait++;
    s->steps[p].succ_count++;
}

static void note_succ(struct hrd_schedule *s, uint32_t i, uint32_t p)
{
    s->list[s->steps[p].succ_first + s->steps[p].succ_count++] = i;
}

/* Gives each derived list its place behind what list[] holds; returns the new length. */
static uint32_t place_lists(struct hrd_schedule *s)
{
    uint32_t at = s->nlist;
    for (uint32_t i = 0; i < s->nsteps; i++)
        each_wait(s, i, count_wait);
    for (uint32_t i = 0; i < s->nsteps; i++) {
        s->steps[i].succ_first = at;
        at += s->steps[i].succ_count;
        s->steps[i].succ_count = 0; /* counted again as they are written */
    }
    for (uint32_t p = 0; p < s->key.nnodes; p++) {
        s->sends[p].first = at;
        at += s->sends[p].count;
        s->recvs[p].first = at;
        at += s->recvs[p].count;
    }
    return at;
}

static void write_lists(struct hrd_schedule *s)
{
    for (uint32_t i = 0; i < s->nsteps; i++) {
        const struct hrd_step *step = &s->steps[i];
        each_wait(s, i, note_succ);
        if (step->kind != HRD_STEP_SEND && step->kind != HRD_STEP_RECV)
            continue;
        const struct hrd_messages *m = step->kind == HRD_STEP_SEND ? s->sends : s->recvs;
        s->list[m[step->peer].first + step->tag] = i;
        if (step->round >= s->nrounds)
            s->nrounds = (uint16_t)(step->round + 1);
    }
}

/* Appends the derived lists (successors, messages by peer), whose sizes are known only now. */
static int finish(struct sched_build *b)
{
    struct hrd_schedule *s = b->s;
    if (b->err != 0)
        return b->err;
    uint32_t length = place_lists(s);
    uint32_t *list = realloc(s->list, (length ? length : 1) * sizeof(*list));
    if (list == NULL)
        return -ENOMEM;
    s->list = list;
    s->nlist = length;
    write_lists(s);
    return 0;
}

static bool key_ok(const struct hrd_schedule_key *key)
{
    uint32_t n = key->nnodes;
    if (n == 0 || n > HRD_MAX_NODES || key->me >= n || key->root_node >= n)
        return false;
    if (!hrd_schedule_serves(key->algo, key->coll) || (n == 1) != (key->algo == HRD_ALGO_LOCAL))
        return false;
    if (key->root_node != 0 && key->coll != HRP_BROADCAST)
        return false;
    if (key->variant > (key->algo == HRD_ALGO_TREE ? 1 : 0))
        return false;
    if (key->algo == HRD_ALGO_PAIRWISE && (n & (n - 1)) != 0)
        return false;
    return key->algo != HRD_ALGO_TREE || n >= 4;
}

static void build(struct sched_build *b)
{
    switch (b->s->key.algo) {
    case HRD_ALGO_LOCAL:
        sb_fused(b);
        break;
    case HRD_ALGO_DIRECT:
        sched_direct(b);
        break;
    case HRD_ALGO_GATHER:
        sched_gather(b);
        break;
    case HRD_ALGO_PAIRWISE:
        sched_pairwise(b);
        break;
    case HRD_ALGO_RING:
        sched_ring(b);
        break;
    default:
        sched_tree(b);
        break;
    }
}

int hrd_schedule_build(const struct hrd_schedule_key *key, struct hrd_schedule **out)
{
    if (!key_ok(key))
        return -EINVAL;
    struct hrd_schedule *s = calloc(1, sizeof(*s));
    if (s == NULL)
        return -ENOMEM;
    s->key = *key;
    s->nblocks = hrd_schedule_nblocks(key->algo, key->coll, key->nnodes);
    s->recvs = calloc(key->nnodes, sizeof(*s->recvs));
    s->sends = calloc(key->nnodes, sizeof(*s->sends));
    struct sched_build b = {.s = s, .n = key->nnodes, .me = key->me, .last_send = HRD_NONE};
    if (s->recvs == NULL || s->sends == NULL)
        b.err = -ENOMEM;
    else
        build(&b);
    int rc = finish(&b);
    if (rc != 0) {
        hrd_schedule_free(s);
        return rc;
    }
    *out = s;
    return 0;
}

void hrd_schedule_free(struct hrd_schedule *s)
{
    if (s == NULL)
        return;
    free(s->steps);
    free(s->list);
    free(s->buf_block);
    free(s->buf_value);
    free(s->recvs);
    free(s->sends);
    free(s);
}
