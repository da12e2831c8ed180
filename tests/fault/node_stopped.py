#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Processes that stand still. A node with its ranks: the others have PEER_LOST after the peer timeout, and the node's
waking up later harms nobody. An idle rank: nothing happens at all. A daemon under its ranks: they say that it is
unresponsive."""
# timeout: 120

import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_fault import (  # noqa: E402
    OK, PEER_LOST, RANK_LOST, SCALE, UNRESPONSIVE, Cluster, Job, check, expect, run_tests, serves, tell,
)

STOP, CONT = signal.SIGSTOP, signal.SIGCONT


def stop_node(cluster, job, node, sig):
    cluster.nodes[node].process.send_signal(sig)
    for i, rank in enumerate(job.ranks):
        if job.where[i] == node:
            rank.process.send_signal(sig)


def test_whole_node():
    """In the middle of ops, then with an op posted by the others, then idle."""
    where = [0, 0, 1, 1, 2, 2]
    with Cluster(3, f"peer_timeout = {2 * SCALE:.0f}s\nio_threads = 2\n") as cluster:
        for state in ("busy", "posted", "idle"):
            job = Job(cluster, where, "alloc", 4 << 20)
            gone = (2, 3)
            job.check()
            tags = job.loop() if state == "busy" else {}
            time.sleep(0.3)
            begin = time.monotonic()
            stop_node(cluster, job, 1, STOP)
            if state == "posted":
                job.all_do("post 0 0 0 1 1000", but=gone)
                tags = job.send("wait 0", but=gone)
            if state == "idle":
                time.sleep(4.5 * SCALE)
                replies = job.all("async 0", but=gone)
            else:
                replies = job.get(tags, but=gone)
            expect(replies, PEER_LOST, ("node1",), begin, 12)
            tell(f"node stopped while {state}", begin, replies)
            # The survivors work without it,
            rest = [i for i in range(6) if i not in gone]
            new = Job(cluster, [where[i] for i in rest], ranks=[job.ranks[i] for i in rest], slot=1)
            new.check()
            # its waking up disturbs nobody, its ranks learn it too,
            stop_node(cluster, job, 1, CONT)
            new.check(20)
            late = {i: job.ranks[i] for i in gone}
            if state == "busy":
                expect(job.get({i: tags[i] for i in gone}), (PEER_LOST, RANK_LOST))
            else:
                expect({i: r.ask("post 0 0 0 1 1000") for i, r in late.items()}, (PEER_LOST, RANK_LOST, OK))
            # and it serves again.
            job.close()
            serves(cluster)


def test_idle_rank():
    """Not dead, only quiet."""
    with Cluster(2, "peer_timeout = 1s\n") as cluster:
        job = Job(cluster, [0, 0, 1, 1])
        job.check()
        job.ranks[1].process.send_signal(STOP)
        job.ranks[2].process.send_signal(STOP)
        time.sleep(4)
        tags = job.send("ops 0 0 1 5001 3 7")
        time.sleep(1)
        for i in (1, 2):
            job.ranks[i].process.send_signal(CONT)
        expect(job.get(tags), OK)


def test_daemon_stands_still():
    """The library tells by the daemon's heartbeat; continued, the daemon goes on with its other clients."""
    with Cluster(1) as cluster:
        job = Job(cluster, [0, 0])
        job.check()
        other = cluster.rank(0)
        other.do("id")
        job.ranks[0].do("post 0 0 0 1 1000")
        begin = time.monotonic()
        cluster.nodes[0].process.send_signal(STOP)
        reply = {0: job.ranks[0].ask("wait 0", 60)}
        expect(reply, UNRESPONSIVE, (), begin, 30)
        tell("daemon stopped", begin, reply)
        cluster.nodes[0].process.send_signal(CONT)
        check(other.ask("id").code == OK, "the daemon does not answer after SIGCONT")
        job.close()
        serves(cluster)


run_tests(globals())
