#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""SIGKILL of a rank while idle, before it posts, and in the middle of large ops: every other rank, on other nodes
too, is told which rank and where; the same daemons serve the next job; nothing is left behind."""
# timeout: 150

import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_fault import OK, RANK_LOST, SOON, Cluster, Held, Job, expect, run_tests, serves, tell, wait_for  # noqa: E402

LARGE = 16 << 20


def told(job, victim, begin, replies, what):
    words = (f"rank {victim}", job.ranks[victim].pid, f"node{job.where[victim]}")
    expect(replies, RANK_LOST, words, begin)
    tell(what, begin, replies)


def idle(cluster, where, victim):
    """Nobody is in a call: the communicator's state tells, and so does the next op."""
    job = Job(cluster, where)
    job.check()
    begin = job.ranks[victim].kill()

    def known():
        return all(r.code != OK for r in job.all("async 0", but=(victim,)).values())

    wait_for("the loss to be known everywhere", known, SOON)
    told(job, victim, begin, job.all("async 0", but=(victim,)), "idle")
    expect(job.all("post 0 0 0 1 100", but=(victim,)), RANK_LOST, (f"rank {victim}",))
    job.close()


def before_posting(cluster, where, victim):
    """The others have posted and wait for it."""
    job = Job(cluster, where)
    job.check()
    job.all_do("post 0 0 0 1 5000", but=(victim,))
    waits = job.send("wait 0", but=(victim,))
    time.sleep(0.1)
    begin = job.ranks[victim].kill()
    told(job, victim, begin, job.get(waits), "before posting")
    job.close()


def in_the_middle(cluster, where, victim, kind):
    job = Job(cluster, where, kind, LARGE)
    loops = job.loop()
    time.sleep(0.4)
    begin = job.ranks[victim].kill()
    told(job, victim, begin, job.get(loops, but=(victim,)), f"in an op, {kind} memory")
    # Still the communicator's state and no more: the process itself can go on with another one.
    expect(job.all("post 0 0 0 1 100", but=(victim,)), RANK_LOST)
    job.all_do("destroy 0", but=(victim,))
    rest = [r for i, r in enumerate(job.ranks) if i != victim]
    again = Job(cluster, [w for i, w in enumerate(where) if i != victim], ranks=rest, slot=1)
    again.check()
    job.close()


def shape(where):
    nnodes = max(where) + 1
    with Cluster(nnodes) as cluster:
        serves(cluster)
        held = Held(cluster)
        for victim in (0, len(where) - 1):
            idle(cluster, where, victim)
            before_posting(cluster, where, victim)
            for kind in ("plain", "alloc"):
                in_the_middle(cluster, where, victim, kind)
        serves(cluster)
        held.check()


def test_2x2():
    shape([0, 0, 1, 1])


def test_3x2():
    shape([0, 0, 1, 1, 2, 2])


run_tests(globals())
