#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Real daemons over several simulated devices each: blocks on all rails by their rates, rails that one of the nodes lacks, and
rails whose path or device fails in the midst of operations. Results are exact, and every rail that is not used is told in
words to the job, in the log, in the status and in the metrics."""
# timeout: 180

import json
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fault"))
from helper_fault import (  # noqa: E402
    PEER_LOST, SCALE, Cluster, Job, Undisturbed, check, expect, run_tests, serves, wait_for,
)
from fake_verbs import environment, order, stats  # noqa: E402

# The device gives up after (4.096 us << 10) * 8 = 34 ms.
TWO = "transport = verbs\nverbs_timeout = 10\nverbs_device = fakeib0,fakeib1\n"
ONE = "transport = verbs\nverbs_timeout = 10\nverbs_device = fakeib0\n"
LARGE = 1 << 20  # floats


class Rails(Cluster):
    """orders, config: of all nodes, or one a node."""

    def __init__(self, nnodes=2, config=TWO, orders=""):
        def of(what, i):
            return what if isinstance(what, str) else what[i]
        super().__init__(nnodes, lambda i: of(config, i), env=lambda i: environment("; ".join(filter(None, ["devices 2", of(orders, i)]))))

    def order(self, node, text):
        return order(self.nodes[node].pid, text)

    def status(self, node):
        return json.loads(self.nodes[node].ctl("status", "--json").stdout)

    def log(self, node):
        return self.nodes[node].text()

    def sent(self, node, since=(0, 0)):
        """Payload that each device of the node sent."""
        now = stats(self.nodes[node].pid)
        return [now[f"bytes{i}"] - since[i] for i in range(2)]


class Lossless(Undisturbed):
    """A job whose results are checked all the time, all ops of it large enough for both rails."""

    def __init__(self, cluster):
        self.job = big_job(cluster, (0, 0, 1, 1))
        self.seed = 1

    def start(self):
        self.tags = self.job.send(f"ops 0 0 1 300001 20 {self.seed}", thread=True)
        self.seed += 20


def exchange(job, rank=0):
    """The exchange stage of a rank's path report, and the rails of its first peer."""
    report = json.loads(job.ranks[rank].do(f"path {job.slot}"))
    stage = [s for s in report["stages"] if s["stage"] == "exchange"][0]
    return stage, stage["peers"][0].get("rails")


def large(job, ops=4):
    job.check(ops, LARGE)


def big_job(cluster, where=(0, 1), **more):
    return Job(cluster, list(where), "alloc", 4 << 20, **more)


def share(sent):
    """Of the first of the two, in percent."""
    return 100 * sent[0] / sum(sent)


def one_rail(cluster, job, rail, words):
    """Only that one is used, on both nodes, and everybody is told why."""
    for node in (0, 1):
        stage, rails = exchange(job, node)
        check(", 1 of 2 rails" in stage["used"] and stage["wanted"] == "2 rails", f"{stage}")
        check([r["state"] for r in rails] == ["up" if i == rail else "not used" for i in range(2)], f"{rails}")
        for word in words:
            check(word in rails[1 - rail]["reason"], f"'{word}' is missing in: {rails[1 - rail]['reason']}")
            check(word in stage["reason"], f"'{word}' is missing in: {stage['reason']}")
        log = cluster.log(node)
        check(f"rail {1 - rail} of the link with node node{1 - node} is not used" in log, "not in the log")
        metrics = cluster.nodes[node].ctl("metrics").stdout
        up = [line for line in metrics.splitlines() if line.startswith("hreduce_rail_up")]
        check(sorted(line[-1] for line in up) == ["0", "1"], f"{up}")
    before = cluster.sent(0)
    large(job)
    sent = cluster.sent(0, before)
    check(sent[1 - rail] == 0 and sent[rail] > 4 * LARGE, f"{sent}")
    print(f"   {stage['reason'][:300]}")


def test_shares():
    """Equal rails take equal shares, unequal ones by their rates, whichever of the two nodes has the slower port."""
    for orders, expected in (("", 50), ("on 1 lanes 2", 67), (("on 0 lanes 2", ""), 33)):
        with Rails(orders=orders) as cluster:
            job = big_job(cluster)
            before = [cluster.sent(node) for node in (0, 1)]
            large(job)
            for node in (0, 1):
                sent = cluster.sent(node, before[node])
                check(abs(share(sent) - expected) < 5, f"{orders}: node{node} sent {sent}, not {expected} %")
                print(f"   '{orders}': node{node} sent {sent[0]} and {sent[1]} bytes")


def test_reports():
    """Path, status, log, metrics and topology name both rails and count their bytes."""
    with Rails() as cluster:
        job = big_job(cluster)
        large(job)
        stage, rails = exchange(job)
        check(", 2 of 2 rails, 4 queue pairs a peer" in stage["used"] and "wanted" not in stage, f"{stage}")
        for i, rail in enumerate(rails):
            check(rail["state"] == "up" and rail["device"] == f"fakeib{i} port 1", f"{rail}")
            check(f"fakeib{i} port 1, RoCE v2, GID 0" in rail["address"], f"{rail}")
            check(rail["tx_bytes"] > 4 * LARGE and rail["rx_bytes"] > 4 * LARGE and rail["queue_pairs"] == 2, f"{rail}")
        text = cluster.nodes[0].ctl("path").stdout
        check("rail 0: fakeib0 port 1" in text and "rail 1: fakeib1 port 1" in text, text)
        status = cluster.status(0)
        link = status["peers"][0]["links"][0]
        check([r["state"] for r in link["rails"]] == ["up", "up"] and link["state"] == "up", f"{link}")
        check(link["tx_bytes"] == sum(r["tx_bytes"] for r in link["rails"]), f"{link}")
        check(status["peer_port"]["rails"] == ["fakeib0", "fakeib1"], f"{status['peer_port']}")
        topo = cluster.nodes[0].ctl("topo").stdout
        check("fakeib0, fakeib1" in topo or "no NIC on PCIe" in topo, topo)
        log = cluster.log(0)
        check("2 rails of 2 (fakeib0 port 1, fakeib1 port 1), 4 queue pairs" in log, "not in the log")
        metrics = cluster.nodes[0].ctl("metrics").stdout
        for i in range(2):
            labels = f'{{peer="node1",device="fakeib{i} port 1",rail="{i}",service_level="0",traffic_class="0"'
            check(f"hreduce_rail_up{labels}}} 1" in metrics, metrics)
            check(f'hreduce_rail_bytes_total{labels},direction="tx"}}' in metrics, metrics)


def test_other_lists():
    """One of the nodes names one device only, or another device at the first place."""
    for lists in ((TWO, ONE), (ONE, TWO)):
        with Rails(config=lists) as cluster:
            short = lists.index(ONE)
            one_rail(cluster, big_job(cluster), 0, [f"node node{short} names 1 device"])
    swapped = TWO.replace("fakeib0,fakeib1", "fakeib1:1, fakeib0:1")
    with Rails(config=(TWO, swapped)) as cluster:
        large(big_job(cluster))
        check(all(abs(share(cluster.sent(node)) - 50) < 10 for node in (0, 1)), "not both")


def test_down_at_start():
    """Either rail of either node: the other carries all. When the port is up a link that nobody uses is made anew."""
    for node, rail in ((0, 1), (1, 0)):
        orders = ["", ""]
        orders[node] = f"on {rail} port down"
        with Rails(orders=orders) as cluster:
            job = big_job(cluster)
            one_rail(cluster, job, 1 - rail, [f"node{node}", f"port 1 of fakeib{rail} is DOWN"])
            cluster.order(node, f"on {rail} port up")
            job.all_do("destroy 0")
            wait_for("the link to go", lambda: not cluster.status(0)["peers"][0]["links"], 30)  # noqa: B023
            job.slot = 1
            job.join()
            large(job)
            check([r["state"] for r in exchange(job)[1]] == ["up", "up"], f"{exchange(job)}")


def test_flaps():
    """A flap of one rail's port, an acknowledgement that is lost, another address: a new path for that rail, and no op notices
    anything but time."""
    with Rails() as cluster, Lossless(cluster) as job:
        for node in (0, 1):
            for rail in (0, 1):
                before = cluster.status(0)["peer_port"]["links_mended"]
                job.over()
                cluster.order(node, f"on {rail} port down")
                job.start()  # these ops meet it, however fast they are
                time.sleep(0.6)
                cluster.order(node, f"on {rail} port up")
                wait_for("a new path", lambda: cluster.status(0)["peer_port"]["links_mended"] > before, 20)  # noqa: B023
                check(f"rail {rail} of the link with node node{1 - node}" in cluster.log(node), "not in the log")
        for what in ("on 1 gid 11.255.0.7", "lose 5", "lose 6"):
            before = cluster.status(0)["peer_port"]["links_mended"]
            job.over()
            cluster.order(1, what)
            job.start()
            wait_for(f"a new path after {what}", lambda: cluster.status(0)["peer_port"]["links_mended"] > before, 20)  # noqa: B023
        check(all(stats(node.pid)["rnr"] == 0 for node in cluster.nodes), "a sender met a receiver without a buffer")


def test_lost():
    """A port that stays down, or a device that dies, in the midst of ops: an end in words that name the rail, the device and
    the peer; later communicators have the other rail."""
    for rail in (0, 1):
        for what, word in (("port down", f"fakeib{rail}"), ("fatal", "DEVICE_FATAL")):
            with Rails(config=TWO + f"peer_timeout = {2 * SCALE:.0f}s\n") as cluster:
                job = big_job(cluster, (0, 0, 1, 1))
                large(job)
                loops = job.loop()
                time.sleep(0.2)
                begin = time.monotonic()
                cluster.order(1, f"on {rail} {what}")
                replies = job.get(loops)
                expect(replies, PEER_LOST, (), begin, 20)
                check(any(word in r.text for r in replies.values()), f"{replies}")
                print(f"   {what} of rail {rail}: {replies[0]}")
                job.close()
                serves(cluster)
                again = big_job(cluster)
                one_rail(cluster, again, 1 - rail, ["node1", f"fakeib{rail}"])


run_tests(globals())
