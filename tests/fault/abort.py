#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""hclient_comm_abort() from another thread while a rank waits, on one rank, on several, twice, with peers dead: it
returns, and everybody is told. Then processes that end in every order of free, destroy and exit."""
# timeout: 90

import itertools
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_fault import (  # noqa: E402
    ABORTED, DAEMON_LOST, OK, RANK_LOST, SANITIZED, Cluster, Held, Job, check, expect, run_tests, serves, tell,
)


def test_many_times():
    """A comm each: everybody waits for an op that rank 3 never posts, one thread of one rank aborts."""
    with Cluster(1) as cluster:
        serves(cluster)
        held = Held(cluster)
        job = Job(cluster, [0, 0, 0, 0])
        slowest = 0.0
        for n in range(30 if SANITIZED else 200):
            job.slot = n + 1
            ident = job.ranks[0].do("id")
            job.all_do(lambda i: f"init {job.slot} 4 {i} {ident} 20000 0")  # noqa: B023
            absent = (3,) if n % 2 else ()
            if absent:
                job.all_do(f"post {job.slot} 0 0 1 1000", but=absent)
                waits = job.send("wait 0", thread=True, but=absent)
            else:
                waits = job.send(f"loop {job.slot} 0 1 1000", thread=True)
            begin = time.monotonic()
            replies = [job.ranks[i].ask(f"abort {job.slot}") for i in ((n % 4,) if n % 3 else (0, 2))]
            check(all(r.code == OK for r in replies), f"abort gave {replies}")
            told = job.get(waits)
            expect(told, ABORTED, (), begin)
            slowest = max(slowest, *(r.time - begin for r in [*replies, *told.values()]))
            expect({0: job.ranks[n % 4].ask(f"abort {job.slot}")}, OK)
            expect(job.all(f"post {job.slot} 0 0 1 10"), ABORTED)
            job.all_do(f"destroy {job.slot}")
        print(f"   the slowest took {slowest:.3f} s")
        job.close()
        held.check()


def test_across_nodes():
    with Cluster(2) as cluster:
        job = Job(cluster, [0, 0, 1, 1], "alloc", 8 << 20)
        for slot in range(1, 6):
            loops = job.loop()
            time.sleep(0.15)
            begin = time.monotonic()
            expect({0: job.ranks[slot % 4].ask(f"abort {job.slot}")}, OK)
            told = job.get(loops)
            expect(told, ABORTED, (f"rank {slot % 4}",), begin)
            tell("in large ops", begin, told)
            job.all_do(f"destroy {job.slot}")
            job.slot = slot
            job.join()
            job.check()


def test_peers_dead():
    """With the other rank stopped, killed, and without a daemon."""
    with Cluster(1) as cluster:
        job = Job(cluster, [0, 0])
        job.ranks[0].do("post 0 0 0 1 1000")
        wait = job.ranks[0].send("wait 0", thread=True)
        job.ranks[1].process.send_signal(19)
        begin = time.monotonic()
        expect({0: job.ranks[0].ask("abort 0")}, OK, (), begin)
        expect({0: job.ranks[0].get(wait)}, ABORTED, (), begin)
        job.ranks[1].kill()
        expect({0: job.ranks[0].ask("abort 0")}, OK)
        expect({0: job.ranks[0].ask("destroy 0")}, OK)

        job = Job(cluster, [0, 0])
        job.ranks[0].do("post 0 0 0 1 1000")
        job.ranks[1].kill()
        expect({0: job.ranks[0].ask("wait 0")}, RANK_LOST)
        begin = time.monotonic()
        expect({0: job.ranks[0].ask("abort 0")}, OK, (), begin)

        job = Job(cluster, [0, 0])
        job.ranks[0].do("post 0 0 0 1 1000")
        wait = job.ranks[0].send("wait 0", thread=True)
        cluster.kill(0)
        begin = time.monotonic()
        expect({0: job.ranks[0].ask("abort 0")}, (OK, DAEMON_LOST), (), begin)
        expect({0: job.ranks[0].get(wait)}, (ABORTED, DAEMON_LOST), (), begin)
        expect({0: job.ranks[0].ask("destroy 0")}, OK)
        check(job.ranks[0].process.poll() is None, "the rank died")


def test_ends():
    """Buffers freed, communicator destroyed, process ended in every order, and some left out. Under ASan a
    double free or a leak of a thread at exit would be told."""
    with Cluster(1) as cluster:
        serves(cluster)
        held = Held(cluster)
        steps = {"free 0", "free 1", "destroy 0", "free 2"}
        orders = [o for n in range(5) for o in itertools.permutations(sorted(steps), n)]
        step = 9 if SANITIZED else 3
        for n, order in enumerate(orders[::step]):
            job = Job(cluster, [0, 0], ("plain", "alloc", "import")[n % 3])
            job.all_do("buffer 2 alloc 65536")
            job.check(1)
            if n % 4 == 1:
                job.all_do("post 0 0 0 1 100", but=(1,))
                order = [s for s in order if not s.startswith("free")]
            for command in order:
                job.all(command)
            if n % 5 == 2:
                job.send("loop 0 2 2 16384", thread=True)
            how = ("exit", "exit _exit")[n % 2]
            for rank in job.ranks:
                rank.send(how)
            for rank in job.ranks:
                status = rank.process.wait(30)
                check(status == 0, f"after {order} and {how} a rank ended with {status}")
            cluster.ranks.clear()
        held.check()


run_tests(globals())
