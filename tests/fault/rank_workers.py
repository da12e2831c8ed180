#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A rank with forked data-loader workers is killed: its sockets live on in them, and still everybody is told at
once. In the workers the library is inert, and their end disturbs nobody."""
# timeout: 60

import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_fault import RANK_LOST, Cluster, Held, Job, expect, run_tests, serves, tell  # noqa: E402


def end(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_rank_killed():
    with Cluster(2) as cluster:
        serves(cluster)
        held = Held(cluster)
        for kind in ("plain", "alloc"):
            job = Job(cluster, [0, 0, 1, 1], kind, 4 << 20)
            job.check()
            workers = [int(pid) for pid in job.ranks[1].do("fork 4").split()]
            try:
                # Their parent's library works on beside them.
                job.check(5)
                loops = job.loop()
                time.sleep(0.3)
                begin = job.ranks[1].kill()
                replies = job.get(loops, but=(1,))
                expect(replies, RANK_LOST, ("rank 1", job.ranks[1].pid, "node0"), begin)
                tell(f"{kind}, in an op", begin, replies)
                serves(cluster)
            finally:
                end(workers)
            job.close()
        held.check()


def test_idle_rank_killed():
    with Cluster(1) as cluster:
        job = Job(cluster, [0, 0])
        workers = [int(pid) for pid in job.ranks[0].do("fork 4").split()]
        try:
            job.ranks[1].do("post 0 0 0 1 1000")
            wait = job.ranks[1].send("wait 0")
            time.sleep(0.2)
            begin = job.ranks[0].kill()
            expect({1: job.ranks[1].get(wait)}, RANK_LOST, ("rank 0", job.ranks[0].pid), begin)
        finally:
            end(workers)


def test_workers_killed():
    """They are nothing to the daemon."""
    with Cluster(1) as cluster:
        job = Job(cluster, [0, 0])
        end(int(pid) for pid in job.ranks[0].do("fork 4").split())
        job.check(50)


run_tests(globals())
