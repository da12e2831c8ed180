#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Verbs links whose path, device or other end fails under real daemons, on simulated devices: ports that go down for a
moment, for seconds, for good; another address; an acknowledgement that is lost; a device that dies; a daemon that is
killed while its link is made anew. What can go on goes on with right results, the rest ends in words."""
# timeout: 120

import json
import os
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_fault import (  # noqa: E402
    PEER_LOST, SCALE, Cluster, Job, Undisturbed, check, expect, run_tests, serves, wait_for,
)
from fake_verbs import environment, order, stats  # noqa: E402

WHERE = [0, 0, 1, 1]
# The device gives up after (4.096 us << 10) * 8 = 34 ms, so that few seconds are enough for several paths.
QUICK = "transport = verbs\nverbs_timeout = 10\n"


class Verbs(Cluster):
    def __init__(self, nnodes=2, config=QUICK, orders=""):
        super().__init__(nnodes, config, env=lambda i: environment(orders(i) if callable(orders) else orders))

    def order(self, node, text):
        return order(self.nodes[node].pid, text)

    def links(self, node):
        """What the status of a node says of its links."""
        return json.loads(self.nodes[node].ctl("status", "--json").stdout)["peer_port"]


class Lossless(Undisturbed):
    """A job whose results are checked all the time, some ops of it large."""

    def start(self):
        self.tags = self.job.send(f"ops 0 0 1 16001 20 {self.seed}", thread=True)
        self.seed += 20


def mended(cluster, before, what):
    wait_for(f"a new path after {what}", lambda: cluster.links(0)["links_mended"] > before, 20)


def test_flap():
    """Shorter than the device's own retries, (4.096 us << 17) * 8 = 4.3 s: nothing happens but time."""
    with Verbs(config="transport = verbs\nverbs_timeout = 17\n") as cluster, Lossless(cluster) as job:
        job.still()
        for node in (0, 1):
            cluster.order(node, "port down")
            time.sleep(0.1)
            cluster.order(node, "port up")
            job.still()
        check(cluster.links(0)["links_interrupted"] == 0, "a short flap interrupted the link")
        check(stats(cluster.nodes[0].pid)["bytes"] > 0, "nothing went through the device")
        check(all(stats(node.pid)["rnr"] == 0 for node in cluster.nodes), "a sender met a receiver without a buffer")


def test_longer_flap():
    """The link is interrupted, made anew, and no op notices anything but time; so too with another address, and when an
    acknowledgement is lost whose message had arrived."""
    with Verbs() as cluster, Lossless(cluster) as job:
        for node in (0, 1):
            before = cluster.links(0)["links_mended"]
            job.over()
            cluster.order(node, "port down")
            job.start()  # these ops meet it, however fast they are
            time.sleep(0.6)
            log = cluster.nodes[node].text
            wait_for("the log to say that the port is down", lambda: "port 1 of fakeib0 went down" in log())  # noqa: B023
            cluster.order(node, "port up")
            mended(cluster, before, f"a flap of node{node}")
        for what in ("gid 10.255.0.7", "lose 5", "lose 6"):
            before = cluster.links(0)["links_mended"]
            job.over()
            cluster.order(1, what)
            job.start()
            mended(cluster, before, what)


def test_port_stays_down():
    """Lost with the peer, in words: device, port, peer, and what the device said. The others go on; when the port is up
    again so does everybody."""
    with Verbs(3, QUICK + f"peer_timeout = {2 * SCALE:.0f}s\n") as cluster:
        job = Job(cluster, [0, 1, 2], "alloc", 4 << 20)
        rest = Job(cluster, [0, 2])
        job.check()
        loops = job.loop()
        time.sleep(0.2)
        begin = time.monotonic()
        cluster.order(1, "port down")
        replies = job.get(loops)
        print("   " + "\n   ".join(map(str, replies.values())))
        expect(replies, PEER_LOST, (), begin, 20)
        expect({0: replies[0]}, PEER_LOST, ("node1", "fakeib0", "port 1"))
        # Where node1 is too slow to say why within peer_timeout, the others know what their own queue pairs say.
        for i, reply in replies.items():
            check("fakeib0 is DOWN" in reply.text or "RETRY_EXC_ERR" in reply.text, f"rank {i}: no reason: {reply}")
        rest.check(20)

        def given_up(node):
            peers = json.loads(node.ctl("status", "--json").stdout)["peers"]
            return all(link["state"] == "up" for peer in peers for link in peer["links"])

        # A link that is still interrupted would take a communicator that waits for it along.
        wait_for("all links of node1 to be given up", lambda: all(map(given_up, cluster.nodes)))
        cluster.order(1, "port up")
        job.close()
        serves(cluster, [0, 1, 2])


def test_fatal():
    """The device dies: its links end at once, with the reason, and later communicators are refused with it; when it is
    back they work."""
    with Verbs() as cluster:
        job = Job(cluster, WHERE, "alloc", 4 << 20)
        job.check()
        loops = job.loop()
        time.sleep(0.2)
        begin = time.monotonic()
        cluster.order(1, "fatal")
        replies = job.get(loops)
        expect(replies, PEER_LOST, (), begin)
        print("   " + "\n   ".join(map(str, replies.values())))
        for i, reply in replies.items():
            check("DEVICE_FATAL" in reply.text, f"rank {i}: not said that the device died: {reply}")
        job.close()
        ranks = [cluster.rank(0), cluster.rank(1)]
        ident = ranks[0].do("id")
        tags = [r.send(f"init 0 2 {i} {ident} 20000 0") for i, r in enumerate(ranks)]
        for i, tag in enumerate(tags):
            reply = ranks[i].get(tag)
            check(reply.code != 0 and "fakeib0 cannot be opened" in reply.text, f"{reply}")
        cluster.order(1, "revive")
        serves(cluster)


def test_begins_when_mended():
    """A communicator that is asked for while the path is away begins when it is back, or fails with what keeps it away."""

    def down(cluster):
        job = Job(cluster, WHERE)
        job.check()
        before = [cluster.links(i)["links_interrupted"] for i in (0, 1)]
        job.loop()
        cluster.order(1, "port down")
        wait_for("both ends to notice", lambda: all(cluster.links(i)["links_interrupted"] > before[i] for i in (0, 1)))

    def fails(cluster, setup_ms, words):
        ranks = [cluster.rank(0), cluster.rank(1)]
        ident = ranks[0].do("id")
        tags = {i: r.send(f"init 0 2 {i} {ident} {setup_ms:.0f} 0") for i, r in enumerate(ranks)}
        replies = {i: ranks[i].get(tag) for i, tag in tags.items()}
        print(f"   {replies[0]}")
        expect(replies, PEER_LOST, words)

    def waits(node):
        comms = json.loads(node.ctl("status", "--json").stdout)["comms"]
        return any(comm["state"] == "connecting" for comm in comms)

    with Verbs() as cluster:
        down(cluster)
        made, ranks = [], [cluster.rank(0, 0), cluster.rank(1, 1)]
        thread = threading.Thread(target=lambda: made.append(Job(cluster, [0, 1], ranks=ranks)))
        thread.start()
        wait_for("both nodes to wait for the path", lambda: all(map(waits, cluster.nodes)))
        check(not made, "a communicator was made without a path")
        cluster.order(1, "port up")
        thread.join()
        check(made, "the communicator was not made after all")
        made[0].check()
        down(cluster)
        fails(cluster, 2000 * SCALE, ("was not made", "could not exchange within", "path of their verbs link is away"))
        cluster.order(1, "port up")
    with Verbs(config=QUICK + f"peer_timeout = {6 * SCALE:.0f}s\n") as cluster:
        down(cluster)
        time.sleep(1)  # or its own limit, which is the same, could come first
        fails(cluster, 60000, ("lost its data link", "no new path within", "was set up"))
        cluster.order(1, "port up")


def test_killed_while_mending():
    """The other end dies while the path is away: told as soon as its control connection ends, and nothing is left."""
    for victim in (0, 1):
        with Verbs() as cluster:
            job = Job(cluster, WHERE)
            job.check()
            loops = job.loop()
            time.sleep(0.1)
            cluster.order(1 - victim, "port down")
            wait_for("the link to be interrupted", lambda: cluster.links(1 - victim)["links_interrupted"] == 1)  # noqa: B023
            begin = cluster.kill(victim)
            survivors = {i: t for i, t in loops.items() if WHERE[i] != victim}
            expect(job.get(survivors), PEER_LOST, (f"node{victim}",), begin)
            cluster.order(1 - victim, "port up")
            job.close()
            cluster.restart(victim)
            serves(cluster)
            now = stats(cluster.nodes[1 - victim].pid)
            check(now["open_device"] == 1, f"objects of the old link are left: {now}")


def test_flapping():
    """Ports of both nodes at random for some seconds."""
    with Verbs(3) as cluster, Lossless(cluster) as job:
        end = time.monotonic() + 3

        def flap(node):
            pause = 0.03 * (node + 1)
            while time.monotonic() < end:
                cluster.order(node, "port down")
                time.sleep(pause)
                cluster.order(node, "port up")
                time.sleep(0.3 - pause)

        threads = [threading.Thread(target=flap, args=(node,)) for node in (0, 1)]
        for t in threads:
            t.start()
        while any(t.is_alive() for t in threads):
            job.still()  # or the ops would be over before the first flap is
        for t in threads:
            t.join()
        job.still()
        links = [cluster.links(node) for node in (0, 1)]
        check(links[1]["links_interrupted"] > 0, "no flap met an op")
        print("   " + ", ".join(f"{k['links_interrupted']} interruptions, {k['links_mended']} new paths" for k in links))


run_tests(globals())
