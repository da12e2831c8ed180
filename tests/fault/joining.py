#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What keeps a communicator from being made: ranks that are missing, doubled, of another size, of another user; a
daemon that comes late or never; the same job again and again after it was killed."""
# timeout: 120

import ctypes
import os
import socket
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_fault import (  # noqa: E402
    OK, PEER_LOST, RANK_LOST, REFUSED, SANITIZED, SCALE, SUPERSEDED, TIMEOUT, Cluster, Job, check, expect, run_tests, serves,
)

CLONE_NEWUTS = 0x04000000


def init(rank, ident, n, i, setup_ms, slot=0):
    return rank.send(f"init {slot} {n} {i} {ident} {setup_ms} 0")


def test_missing_ranks():
    """2, 5 and 6 of 8 never come: everybody who did is told all three."""
    with Cluster(2) as cluster:
        ranks = {i: cluster.rank(i // 4, i) for i in range(8) if i not in (2, 5, 6)}
        ident = ranks[0].do("id")
        begin = time.monotonic()
        tags = {i: init(r, ident, 8, i, 1000 * SCALE) for i, r in ranks.items()}
        replies = {i: ranks[i].get(tag) for i, tag in tags.items()}
        expect(replies, TIMEOUT, ("2", "5", "6"), begin, 10)
        texts = {r.text for r in replies.values()}
        print("   " + "\n   ".join(texts))
        check(len(texts) == 1 and "ranks 2, 5, 6 did not join" in texts.pop(), "not exactly the missing ranks are listed")
        serves(cluster)


def test_late_daemon():
    """The third node's daemon starts some seconds after the ranks: they wait for it. With a short limit the error
    says which address did not answer."""
    with Cluster(3) as cluster:
        cluster.kill(2)
        ranks = [cluster.rank(i, i) for i in (0, 1)]
        ident = ranks[0].do("id")
        tags = [init(r, ident, 3, i, 60000) for i, r in enumerate(ranks)]
        time.sleep(2)
        cluster.restart(2)
        ranks.append(cluster.rank(2, 2))
        tags.append(init(ranks[2], ident, 3, 2, 60000))
        for rank, tag in zip(ranks, tags):
            check(rank.get(tag).code == OK, "the late node did not join")
        for rank in ranks:
            for b in (0, 1):
                rank.do(f"buffer {b} plain 65536")
        tags = [r.send("ops 0 0 1 5001 3 5") for r in ranks]
        for rank, tag in zip(ranks, tags):
            check(rank.get(tag).code == OK, "an op after the late join failed")


def test_root_daemon_gone():
    """The meeting point does not answer."""
    with Cluster(2) as cluster:
        root = cluster.rank(0)
        ident = root.do("id")
        cluster.kill(0)
        begin = time.monotonic()
        rank = cluster.rank(1, 1)
        reply = rank.get(init(rank, ident, 2, 1, 1500 * SCALE))
        expect({1: reply}, (TIMEOUT, PEER_LOST), ("127.0.0.1", cluster.port), begin, 12)
        print(f"   {reply.text}")
        cluster.restart(0)
        # Another instance: the id is of a daemon that is no more.
        begin = time.monotonic()
        reply = rank.get(init(rank, ident, 2, 1, 3000 * SCALE))
        check(reply.code != OK, "joined by an id of a daemon that was restarted")
        print(f"   {reply.text}")
        serves(cluster)


def test_root_rank_joins_late():
    """A root's daemon that starts late is waited for, by name."""
    with Cluster(2) as cluster:
        cluster.kill(0)
        env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "late"}
        other = cluster.rank(1, 1, env=env)
        tag = other.send("name 0 job 30000 0")
        time.sleep(1)
        cluster.restart(0)
        root = cluster.rank(0, 0, env={**env, "RANK": "0"})
        root.do("name 0 job 30000 0")
        check(other.get(tag).code == OK, "the other rank did not join")


def test_rank_twice():
    with Cluster(2) as cluster:
        a, b, c = (cluster.rank(n, i) for i, n in enumerate((0, 1, 1)))
        ident = a.do("id")
        first = init(a, ident, 3, 0, 20000)
        second = init(b, ident, 3, 1, 20000)
        time.sleep(0.3)
        reply = c.get(init(c, ident, 3, 1, 20000))
        expect({2: reply}, REFUSED, ("rank 1", b.pid))
        print(f"   {reply.text}")
        # Its own rank is still welcome, and the communicator is made.
        third = init(c, ident, 3, 2, 20000)
        for rank, tag in ((a, first), (b, second), (c, third)):
            check(rank.get(tag).code == OK, "the others were disturbed by the double")
        # Once it is made, nobody joins any more.
        d = cluster.rank(0, 3)
        reply = d.get(init(d, ident, 3, 1, 3000))
        check(reply.code != OK, "a second rank 1 joined a communicator that is made")
        print(f"   {reply}")


def test_other_size():
    with Cluster(2) as cluster:
        a, b, c = (cluster.rank(n, i) for i, n in enumerate((0, 1, 0)))
        ident = a.do("id")
        first = init(a, ident, 2, 0, 20000)
        time.sleep(0.2)
        reply = c.get(init(c, ident, 3, 1, 20000))
        print(f"   {reply}")
        expect({2: reply}, REFUSED, ("2", "3"))
        second = init(b, ident, 2, 1, 20000)
        check(a.get(first).code == OK and b.get(second).code == OK, "the others were disturbed")


def test_other_user():
    """Somebody else's id, and somebody else's name: other communicators, as if nobody were there."""
    if os.getuid() != 0:
        print("   (left out: needs root to become somebody else)")
        return
    with Cluster(1) as cluster:
        top = os.path.dirname(os.environ["TMPDIR"].rstrip("/"))
        for path in (top, os.environ["TMPDIR"], cluster.nodes[0].dir):
            os.chmod(path, 0o755)
        os.chmod(cluster.nodes[0].socket, 0o666)
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "x"}
        a = cluster.rank(0, 0, env=env)
        b = cluster.rank(0, 1, env={**env, "RANK": "1"}, preexec=lambda: (os.setgid(65534), os.setuid(65534)))
        ident = a.do("id")
        first = init(a, ident, 2, 0, 1500 * SCALE)
        reply = b.get(init(b, ident, 2, 1, 1500 * SCALE))
        print(f"   by id: {reply}")
        check(reply.code in (REFUSED, TIMEOUT), f"another user's join: {reply}")
        expect({0: a.get(first)}, TIMEOUT, ("1",))
        first = a.send(f"name 1 job {1500 * SCALE:.0f} 0")
        reply = b.ask(f"name 1 job {1500 * SCALE:.0f} 0")
        check(reply.code in (REFUSED, TIMEOUT), f"another user's join by name: {reply}")
        expect({0: a.get(first)}, TIMEOUT, ("1",))
        os.chmod(cluster.nodes[0].socket, 0o660)
        c = cluster.rank(0, 2, preexec=lambda: (os.setgroups([]), os.setgid(65534), os.setuid(65534)))
        reply = c.ask("id")
        check(reply.code != OK and "ermission" in reply.text, f"no group, and still: {reply}")
        print(f"   {reply.text}")
        serves(cluster)


def test_killed_and_again():
    """The same name, at once after all ranks were killed, 50 times: never in the way of itself."""
    with Cluster(2) as cluster:
        env = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "same"}
        for n in range(10 if SANITIZED else 50):
            ranks = [cluster.rank(i // 2, i, env={**env, "RANK": str(i)}) for i in range(4)]
            tags = [r.send("name 0 job 20000 0") for r in ranks]
            for rank, tag in zip(ranks, tags):
                reply = rank.get(tag)
                check(reply.code == OK, f"attempt {n}: {reply}")
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.close()
            cluster.ranks.clear()
        serves(cluster)


def test_killed_while_joining():
    """Some had joined when the job was killed; a new attempt starts while the last rank of the old one lives."""
    with Cluster(2) as cluster:
        env = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "half"}

        def start(i):
            rank = cluster.rank(i // 2, i, env={**env, "RANK": str(i)})
            return rank, rank.send(f"name 0 job {4000 * SCALE:.0f} 0")

        old = [start(i) for i in range(3)]
        time.sleep(0.3)
        for rank, _ in old[:2]:
            rank.kill()
        new = [start(i) for i in (0, 1, 3)]
        # The old rank 2 still lives and holds its place: the set is complete with it, or it is told why not.
        reply = old[2][0].get(old[2][1])
        print(f"   the survivor: {reply}")
        for rank, tag in new:
            got = rank.get(tag)
            check(got.code in (OK, SUPERSEDED, RANK_LOST, TIMEOUT), f"a new rank: {got}")
        for rank in cluster.ranks:
            rank.close()
        serves(cluster)


def unshared_name(name):
    """Between fork and exec: another host name, as in a container."""
    def enter():
        if ctypes.CDLL(None).unshare(CLONE_NEWUTS) == 0:
            socket.sethostname(name)

    return enter


def test_host_names_decide_nothing():
    """Ranks with different host names under one daemon share a node; two daemons with one host name are two."""
    if os.getuid() != 0:
        print("   (left out: needs root)")
        return
    with Cluster(2, "node_name = samename\n") as cluster:
        ranks = [cluster.rank(i // 2, i, preexec=unshared_name(f"container{i}")) for i in range(4)]
        job = Job(cluster, [0, 0, 1, 1], ranks=ranks)
        for i, reply in job.all("info 0").items():
            check(f"nnodes=2 node={i // 2} local=2" in reply.text, f"rank {i}: {reply.text}")
        job.check()


run_tests(globals())
