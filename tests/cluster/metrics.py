#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""hreducectl metrics: what it counts is what was done, and the number of its series does not grow with jobs."""
# timeout: 120

import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "lib"))
sys.path.insert(0, os.path.join(ROOT, "client", "python"))

import cluster  # noqa: E402

OPS = 100
COUNT = 1 << 20
LINE = re.compile(r'^([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)$')


def work(bytes_, ops):
    """One rank of a job: `ops` all-reduces of ones, each checked at both ends."""
    import array
    import hclient

    if ops == 0:  # a set-up that is refused
        try:
            hclient.Comm.from_name("refused", require=2)  # gdr
        except hclient.Error as error:
            assert "gdr" in str(error), error
            return
        raise AssertionError("gdr was granted")
    with hclient.Comm.from_name("metrics") as comm:
        data = array.array("f", [1.0]) * (bytes_ // 4)
        for _ in range(ops):
            data[0] = data[-1] = 1.0
            comm.all_reduce(data)
            assert data[0] == data[-1] == comm.nranks, data[0]


def scrape(node):
    """{name: {labels: value}}; every line must be of the format, every family have its two comments."""
    families = {}
    described = set()
    for line in node.ctl("metrics").splitlines():
        if line.startswith("# "):
            described.add(tuple(line.split(" ")[1:3]))
            continue
        match = LINE.match(line)
        assert match, f"not a line of the format: {line!r}"
        name = match.group(1)
        base = re.sub(r"_(bucket|sum|count)$", "", name) if "duration" in name else name
        assert {("HELP", base), ("TYPE", base)} <= described, f"{name} comes before its HELP and TYPE"
        series = families.setdefault(name, {})
        assert match.group(2) not in series, f"twice: {line}"
        series[match.group(2)] = float(match.group(3))
    return families


def series(families):
    return sum(len(f) for f in families.values())


def job(c, bytes_, ops):
    env = {"LD_PRELOAD": os.environ["HREDUCE_PRELOAD"]} if os.environ.get("HREDUCE_PRELOAD") else {}
    # The interpreter never frees all it has.
    env["ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
    c.wait(c.ranks(4, [sys.executable, os.path.abspath(__file__), str(bytes_), str(ops)], env=env), 60)


def near(value, wanted, what):
    assert abs(value - wanted) <= 0.02 * wanted, f"{what}: {value}, not {wanted} within 2 %"


def main():
    with cluster.Cluster(2) as c:
        before = [scrape(n) for n in c.nodes]
        assert before[0]["hreduce_ops_total"][None] == 0
        job(c, 4 * COUNT, OPS)
        after = [scrape(n) for n in c.nodes]
        for f in after:
            assert f["hreduce_ops_total"][None] == OPS, f["hreduce_ops_total"]
            assert f["hreduce_op_errors_total"][None] == 0
            assert f["hreduce_data_bytes_total"][None] == OPS * 4 * COUNT
            assert sum(f["hreduce_algorithm_ops_total"].values()) == OPS
            assert f["hreduce_op_duration_seconds_count"][None] == OPS
            buckets = list(f["hreduce_op_duration_seconds_bucket"].values())
            assert buckets == sorted(buckets) and buckets[-1] == OPS, buckets
            whole = f["hreduce_op_duration_seconds_sum"][None]
            assert whole > 0
            assert f["hreduce_collective_ops_total"] == {'collective="all_reduce"': OPS}, f["hreduce_collective_ops_total"]
            stages = f["hreduce_op_stage_seconds_total"]
            names = ("post", "ready", "begin", "reduce", "exchange", "work", "done")
            assert list(stages) == [f'collective="all_reduce",stage="{s}"' for s in names], stages
            took = dict(zip(names, stages.values()))
            assert took["begin"] == 0 and min(took["reduce"], took["exchange"], took["work"]) > 0, took
            # The duration counts from the first rank that is ready, the stages from the first that called.
            assert sum(took.values()) > 0.9 * whole, took
            # 2(N-1)/N of the data for two nodes, and headers.
            for labels, value in f["hreduce_peer_bytes_total"].items():
                near(value, OPS * 4 * COUNT, labels)
        sent = [sum(v for k, v in f["hreduce_peer_bytes_total"].items() if 'direction="tx"' in k) for f in after]
        got = [sum(v for k, v in f["hreduce_peer_bytes_total"].items() if 'direction="rx"' in k) for f in after]
        for a, b in ((sent[0], got[1]), (sent[1], got[0])):
            near(a, b, "what one end sent and the other received")
        job(c, 0, 0)
        for n in c.nodes:
            f = scrape(n)
            assert f["hreduce_setup_errors_total"][None] == 2, f["hreduce_setup_errors_total"]
            assert f["hreduce_communicator_failures_total"][None] == 0
        for _ in range(8):
            job(c, 4096, 2)
        last = scrape(c.nodes[0])
        assert last["hreduce_ops_total"][None] == OPS + 16
        assert series(last) <= series(after[0]) + 1, f"{series(after[0])} series became {series(last)}"


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 1 else main()
