# SPDX-License-Identifier: MIT
"""The tables of compare."""

import os
import statistics

MEBI = 1 << 20
ZERO_COPY, PLAIN = "hreduce", "hreduce, plain memory"

# What hreduce is to reach: how many times faster than the best Open MPI, as (from this size on, factor).
GOALS = {
    "1x8": [(0, 1.0), (MEBI, 1.5)],
    "4x2": [(0, 1.0), (MEBI, 1.3), (4 * MEBI, 1.5)],
    "3x4": [(MEBI, 1.3), (4 * MEBI, 2.0)],
    "4x8": [(MEBI, 2.5)],
}
# How far above the floor it may be: by shape, else for all.
FLOOR_GOALS = {"4x2-1gbit": [(4 * MEBI, 1.10), (16 * MEBI, 1.05)]}
FLOOR_GOAL = [(0, 1.3)]


def size_text(n):
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if n >> shift and n % (1 << shift) == 0:
            return f"{n >> shift} {unit}"
    return f"{n} B"


def goal(steps, size):
    """The factor that holds from the largest start up to this size; None: there is none."""
    found = None
    for start, factor in steps:
        if size >= start:
            found = factor
    return found


class Results:
    """Every number of a run of compare, by shape, contender and size, in the order of the rounds."""

    def __init__(self):
        self.runs = []      # {shape, name, bytes, round, time_us, ...}
        self.failures = []  # {shape, name, round, why}
        self.wire = {}      # shape -> {name: {bytes: {"interface": [...], "counted": [...]}}}

    def add(self, shape, name, round_, by_size):
        for size, r in by_size.items():
            self.runs.append(dict(r, shape=shape, name=name, bytes=size, round=round_))
            if r.get("tx_bytes"):
                self.wire.setdefault(shape, {}).setdefault(name, {})[size] = {"interface": r["tx_bytes"]}

    def add_wire(self, shape, name, size, interface, counted):
        self.wire.setdefault(shape, {}).setdefault(name, {})[size] = {"interface": interface, "counted": counted}

    def fail(self, shape, name, round_, why):
        self.failures.append({"shape": shape, "name": name, "round": round_, "why": why})

    def ms(self, shape, name, size, key="time_us", scale=1e-3):
        values = [r[key] for r in self.runs
                  if r["shape"] == shape and r["name"] == name and r["bytes"] == size and r.get(key) is not None]
        return statistics.median(values) * scale if values else None

    def names(self, shape):
        return list(dict.fromkeys(r["name"] for r in self.runs if r["shape"] == shape))

    def sizes(self, shape):
        return sorted({r["bytes"] for r in self.runs if r["shape"] == shape})

    def best(self, shape, size, prefix="ompi"):
        """(ms, name) of the fastest whose name begins so."""
        found = [(self.ms(shape, n, size), n) for n in self.names(shape) if n.startswith(prefix)]
        found = [f for f in found if f[0] is not None]
        return min(found) if found else (None, None)

    def wrong(self):
        return [r for r in self.runs if r.get("wrong")]


def _num(v):
    if v is None:
        return "-"
    return f"{v:.3f}" if v < 1 else f"{v:.2f}" if v < 10 else f"{v:.1f}"


def _ratio(a, b):
    return f"{a / b:.2f}" if a and b else "-"


def _table(head, rows, markdown):
    rows = [[str(c) for c in row] for row in rows]
    if markdown:
        lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        return "\n".join(lines + ["| " + " | ".join(r) + " |" for r in rows])
    width = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(r, width)) for r in [head, *rows])


def time_table(results, shape, markdown):
    head = ["size", "hreduce", "plain", "Open MPI", "which", "gloo", "floor", "floor+ranks", "Open MPI/hreduce", "goal",
            "gloo/hreduce", "hreduce/floor", "goal", "hreduce/(floor+ranks)", "plain/floor"]
    rows = []
    for size in results.sizes(shape):
        zc, plain = results.ms(shape, ZERO_COPY, size), results.ms(shape, PLAIN, size)
        mpi, which = results.best(shape, size)
        gloo = results.ms(shape, "gloo", size)
        floor = results.ms(shape, "floor", size)
        ranks = results.ms(shape, "floor", size, "with_ranks_ms", 1)
        rows.append([size_text(size), _num(zc), _num(plain), _num(mpi), which or "-", _num(gloo), _num(floor),
                     _num(ranks), _ratio(mpi, zc), goal(GOALS.get(shape, []), size) or "-", _ratio(gloo, zc),
                     _ratio(zc, floor), goal(FLOOR_GOALS.get(shape, FLOOR_GOAL), size) or "-", _ratio(zc, ranks),
                     _ratio(plain, floor)])
    return _table(head, rows, markdown)


def floor_table(results, shape, markdown):
    head = ["size", "reduce", "exchange", "fan-out", "one after the other", "at once", "with ranks"]
    rows = []
    for size in results.sizes(shape):
        parts = [results.ms(shape, "floor", size, k, 1) for k in ("reduce_ms", "exchange_ms", "fanout_ms")]
        if parts[0] is None or not any(parts):
            continue
        rows.append([size_text(size), *map(_num, parts), _num(sum(parts)), _num(results.ms(shape, "floor", size)),
                     _num(results.ms(shape, "floor", size, "with_ranks_ms", 1))])
    return _table(head, rows, markdown) if rows else ""


def placement_table(results, shape, markdown):
    """Ranks dealt round-robin against the same nodes with contiguous ranks, where both were run."""
    base = shape.removesuffix("-roundrobin")
    rows = []
    for size in results.sizes(shape) if base != shape else []:
        dealt, contiguous = results.ms(shape, ZERO_COPY, size), results.ms(base, ZERO_COPY, size)
        if dealt and contiguous:
            rows.append([size_text(size), _num(dealt), _num(contiguous), _ratio(dealt, contiguous), 1.05])
    head = ["size", "dealt round-robin", "contiguous", "ratio", "goal"]
    return _table(head, rows, markdown) if rows else ""


def peers_table(results, shape, markdown):
    names = [n for n in results.names(shape) if n != "floor"]
    return _table(["size", *names], [[size_text(s), *(_num(results.ms(shape, n, s)) for n in names)]
                                     for s in results.sizes(shape)], markdown)


def wire_table(results, shape, ideal, markdown):
    rows = []
    for name, sizes in results.wire.get(shape, {}).items():
        for size, w in sorted(sizes.items()):
            want = ideal(size)
            seen = w["interface"]
            row = [name, size_text(size), f"{want}", f"{min(seen) / want:.3f}", f"{max(seen) / want:.3f}"]
            counted = w.get("counted")
            row += [f"{min(counted) / want:.4f}", f"{max(counted) / want:.4f}"] if counted else ["-", "-"]
            rows.append(row)
    head = ["contender", "size", "ideal bytes", "interface, least", "interface, most", "counted, least",
            "counted, most"]
    return _table(head, rows, markdown) if rows else ""


def show(results, shape, ideal, title, markdown):
    heading = "### {}\n" if markdown else "\n=== {} ===\n"
    parts = [heading.format(title), time_table(results, shape, markdown), "",
             "Every setting, ms:", "", peers_table(results, shape, markdown), ""]
    placement = placement_table(results, shape, markdown)
    if placement:
        parts += ["hreduce by placement of the ranks, ms:", "", placement, ""]
    floor = floor_table(results, shape, markdown)
    if floor:
        parts += ["The floor's parts, ms:", "", floor, ""]
    wire = wire_table(results, shape, ideal, markdown)
    if wire:
        parts += ["Bytes that a node sends for one op, against 2(N-1)/N of the size:", "", wire, ""]
    for f in results.failures:
        if f["shape"] == shape:
            parts.append(f"{f['name']}, round {f['round']}: no result: {f['why']}")
    return "\n".join(parts)


BEGIN, END = "<!-- tables of tests/bench/compare: begin -->", "<!-- tables of tests/bench/compare: end -->"


def write(path, text):
    """Into the file, between the two marks where it has them."""
    text = f"{BEGIN}\n{text.strip()}\n{END}\n"
    old = ""
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            old = f.read()
    if BEGIN in old and END in old:
        text = old[:old.index(BEGIN)] + text + old[old.index(END) + len(END):].lstrip("\n")
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
