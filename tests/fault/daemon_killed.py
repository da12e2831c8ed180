#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""SIGKILL of a daemon while idle and in the middle of ops: its own ranks get DAEMON_LOST, the others PEER_LOST.
Started again at once it serves new jobs, also of the very processes that lost it. Whoever waits in whatever
thread is woken, and nobody burns processor time afterwards."""
# timeout: 150

import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_fault import (  # noqa: E402
    DAEMON_LOST, OK, PEER_LOST, SANITIZED, SCALE, SOON, Cluster, Job, check, expect, run_tests, serves, tell, wait_for,
)

LARGE = 16 << 20


def told(job, dead, begin, replies, what):
    for i, reply in replies.items():
        if job.where[i] == dead:
            expect({i: reply}, DAEMON_LOST, (), begin)
        else:
            expect({i: reply}, PEER_LOST, (f"node{dead}",), begin)
    tell(what, begin, replies)


def idle(cluster, where, dead):
    job = Job(cluster, where)
    job.check()
    begin = cluster.kill(dead)
    wait_for("the loss to be known", lambda: all(r.code != OK for r in job.all("async 0").values()), SOON)
    told(job, dead, begin, job.all("async 0"), "idle")
    told(job, dead, time.monotonic(), job.all("post 0 0 0 1 100"), "the next op")
    cluster.restart(dead)
    return job


def in_the_middle(cluster, where, dead, kind):
    job = Job(cluster, where, kind, LARGE)
    loops = job.loop()
    time.sleep(0.4)
    begin = cluster.kill(dead)
    cluster.restart(dead)
    told(job, dead, begin, job.get(loops), f"in an op, {kind} memory")
    return job


def again(cluster, job, slot):
    """The same processes, without exec, in a new communicator."""
    job.all_do(f"destroy {slot - 1}")
    job.slot = slot
    job.join()
    job.check(100, 501)


def test_three_nodes():
    where = [0, 0, 1, 1, 2, 2]
    with Cluster(3) as cluster:
        for dead in (1, 0):
            again(cluster, idle(cluster, where, dead), 1)
            for kind in ("plain", "alloc"):
                again(cluster, in_the_middle(cluster, where, dead, kind), 1)
            for rank in cluster.ranks:
                rank.close()
        serves(cluster)


def test_io_threads():
    """In the middle of blocks that I/O threads move."""
    where = [0, 1, 2]
    with Cluster(3, "io_threads = 2\n") as cluster:
        for dead in (1, 0, 2):
            job = in_the_middle(cluster, where, dead, "alloc")
            again(cluster, job, 1)
            for rank in job.ranks:
                rank.close()
        serves(cluster)


def test_one_node():
    with Cluster(1) as cluster:
        job = Job(cluster, [0, 0])
        for slot in range(1, 7):
            job.check()
            loops = job.loop(64 if slot % 2 else None)
            time.sleep(0.05 * slot)
            begin = cluster.kill(0)
            cluster.restart(0)
            told(job, 0, begin, job.get(loops), "one node")
            again(cluster, job, slot)


def test_reconnect_many_times():
    """Without waiting for the daemon to be killed in any particular state."""
    where = [0, 0, 1, 1]
    with Cluster(2) as cluster:
        job = Job(cluster, where)
        for slot in range(1, 5 if SANITIZED else 21):
            dead = slot % 2
            begin = cluster.kill(dead)
            if slot % 4 < 2:
                told(job, dead, begin, job.get(job.loop()), "the next op")
            cluster.restart(dead)
            again(cluster, job, slot)


def test_threads_in_wait():
    """8 threads of a rank in hclient_wait() for ops that the other rank never posts."""
    with Cluster(1) as cluster:
        job = Job(cluster, [0, 0])
        rank = job.ranks[0]
        for op in range(8):
            rank.do(f"post 0 {op} 0 1 {100 if op % 2 else 16384}")
        waits = [rank.send(f"wait {op}", thread=True) for op in range(8)]
        time.sleep(0.3)
        begin = cluster.kill(0)
        replies = {op: rank.get(tag) for op, tag in enumerate(waits)}
        expect(replies, DAEMON_LOST, (), begin)
        tell("8 threads", begin, replies)
        time.sleep(0.3)
        before = float(rank.do("cpu"))
        time.sleep(1.5)
        used = float(rank.do("cpu")) - before
        print(f"   {used:.4f} s of processor time in 1.5 s afterwards")
        check(used < 0.3 * SCALE, f"{used} s of processor time used after the daemon's death")


run_tests(globals())
