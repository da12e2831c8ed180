/* SPDX-License-Identifier: MIT */
/*
 * tree: partials go up a binary tree to its root, the result comes down; units follow one another through it.
 * Units with even and odd numbers use two trees such that a node inside one is a leaf of the other (except
 * one node, a leaf of both, when their number is odd): together they load both directions of every link.
 *
 * In the tree over positions 1..n a position stands above those around it by the number of zeros its binary
 * form ends with. A subtree is a range of positions, which keeps what a partial covers one range of nodes.
 */
#include "daemon/schedule_build.h"

/* The tree is on positions; variant 1 mirrors them, or for an odd n shifts them by one. */
static uint32_t node_at(const struct sched_build *b, uint32_t pos)
{
    if (b->s->key.variant == 0)
        return pos - 1;
    if (b->n % 2 == 0)
        return b->n - pos;
    return (pos + b->n - 2) % b->n;
}

static uint32_t position_of(const struct sched_build *b, uint32_t node)
{
    if (b->s->key.variant == 0)
        return node + 1;
    if (b->n % 2 == 0)
        return b->n - node;
    return (node + 1) % b->n + 1;
}

static uint32_t low_bit(uint32_t pos)
{
    return pos & (~pos + 1);
}

/* 0: none. A right child beyond n is replaced by the highest position of its subtree that exists. */
static uint32_t left_child(uint32_t pos)
{
    uint32_t half = low_bit(pos) / 2;
    return half == 0 ? 0 : pos - half;
}

static uint32_t right_child(uint32_t n, uint32_t pos)
{
    for (uint32_t half = low_bit(pos) / 2; half > 0; half /= 2)
        if (pos + half <= n)
            return pos + half;
    return 0;
}

/* Not for the root. A parent beyond n does not exist; then the next one up took its place. */
static uint32_t parent(uint32_t n, uint32_t pos)
{
    uint32_t p = pos;
    do {
        uint32_t bit = low_bit(p);
        p = (p ^ bit) | (bit << 1);
    } while (p > n);
    return p;
}

/* Levels of the subtree below a position; a leaf has 0. */
static uint32_t height(uint32_t n, uint32_t pos)
{
    uint32_t child[2] = {left_child(pos), right_child(n, pos)}, h = 0;
    for (int i = 0; i < 2; i++) {
        if (child[i] == 0)
            continue;
        uint32_t below = 1 + height(n, child[i]);
        if (below > h)
            h = below;
    }
    return h;
}

/* The nodes of a subtree, as a range that may wrap around n. */
static struct sb_cover cover(const struct sched_build *b, uint32_t pos)
{
    uint32_t reach = low_bit(pos) - 1;
    uint32_t lo = pos - reach, hi = pos + reach < b->n ? pos + reach : b->n;
    uint32_t first = b->s->key.variant == 1 && b->n % 2 == 0 ? node_at(b, hi) : node_at(b, lo);
    return (struct sb_cover){first, hi - lo + 1};
}

struct family {
    uint32_t pos, parent, root;
    uint32_t child[2]; /* lower range of nodes first; 0: none */
};

static struct family family_of(const struct sched_build *b)
{
    struct family f = {.pos = position_of(b, b->me), .root = 1};
    uint32_t left = left_child(f.pos), right = right_child(b->n, f.pos);
    int mirrored = b->s->key.variant == 1 && b->n % 2 == 0;
    f.child[0] = mirrored ? right : left;
    f.child[1] = mirrored ? left : right;
    while (f.root * 2 <= b->n)
        f.root *= 2;
    f.parent = f.pos == f.root ? 0 : parent(b->n, f.pos);
    return f;
}

static uint32_t from_child(struct sched_build *b, uint32_t pos)
{
    return sb_recv(b, 0, HRD_VALUE_PARTIAL, node_at(b, pos), height(b->n, pos), cover(b, pos));
}

/* Folds the children's partials around my own; returns what goes up, or at the root the result. */
static uint32_t tree_up(struct sched_build *b, const struct family *f, uint32_t local)
{
    uint32_t in[3], count = 0;
    if (f->child[0] != 0)
        in[count++] = from_child(b, f->child[0]);
    in[count++] = local;
    if (f->child[1] != 0)
        in[count++] = from_child(b, f->child[1]);
    if (f->parent == 0)
        return sb_fold_final(b, in, count, 1);
    return count == 1 ? local : sb_fold_over(b, local, in, count);
}

void sched_tree(struct sched_build *b)
{
    struct family f = family_of(b);
    uint32_t local = sb_local(b, 0, HRD_VALUE_PARTIAL);
    uint32_t value = tree_up(b, &f, local);
    uint32_t top = height(b->n, f.root), depth = 0;
    for (uint32_t p = f.pos; p != f.root; p = parent(b->n, p))
        depth++;
    if (f.parent != 0) {
        uint32_t up = node_at(b, f.parent);
        sb_send(b, value, up, height(b->n, f.pos));
        value = sb_recv(b, 0, HRD_VALUE_RESULT, up, top + depth - 1, (struct sb_cover){0, b->n});
    }
    for (int i = 0; i < 2; i++)
        if (f.child[i] != 0)
            sb_send(b, value, node_at(b, f.child[i]), top + depth);
    if (f.parent != 0)
        sb_store(b, value, local);
}
