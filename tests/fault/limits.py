#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Limits of the machine and of the configuration: a small /dev/shm, few descriptors, little memory to lock or to map,
quotas. What does not fit is refused in words that name the limit and the remedy; what needs none of it works."""
# timeout: 120

import ctypes
import os
import resource
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_fault import (  # noqa: E402
    OK, RESOURCE, SANITIZED, Cluster, Held, Job, Undisturbed, check, expect, run_tests, serves, wait_for,
)

CLONE_NEWNS = 0x00020000
MS_REC_PRIVATE = 0x44000


def small_shm(size):
    """Between fork and exec: /dev/shm as a container has it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter():
        if (
            libc.unshare(CLONE_NEWNS) != 0
            or libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None) != 0
            or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode()) != 0
        ):
            os._exit(3)

    return enter


def can_mount():
    """Not without root, and not in a chroot, whose root is no mount point."""
    child = os.fork()
    if child == 0:
        small_shm("1m")()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_small_shm():
    """8 ranks and the daemon with a /dev/shm of 1 MiB, then the ranks with the 64 MiB of a container."""
    if not can_mount():
        print("   (left out: this user, or this sandbox, cannot mount a small /dev/shm of its own)")
        return
    for size, ndaemons in (("1m", "1m"), ("64m", None)):
        with Cluster(1, limits=small_shm(ndaemons) if ndaemons else None) as cluster:
            for kind in ("plain", "alloc"):
                ranks = [cluster.rank(0, i, preexec=small_shm(size)) for i in range(8)]
                job = Job(cluster, [0] * 8, kind, 8 << 20, ranks=ranks)
                job.check(1, 1 << 17)
                job.all_do(f"post 0 0 0 1 {2 << 20}")
                job.all_do("wait 0")
                job.close()


def test_descriptors_of_the_daemon():
    """64 of them and 30 ranks: the last are refused with the reason, the first work on, nobody spins."""
    with Cluster(1, limits=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))) as cluster:
        node = cluster.nodes[0]
        with Undisturbed(cluster) as job:
            ranks = [cluster.rank(0, i) for i in range(30)]
            replies = {i: r.ask(f"buffer 0 alloc {1 << 16}") for i, r in enumerate(ranks)}
            refused = {i: r for i, r in replies.items() if r.code != OK}
            check(0 < len(refused) < 30, f"{len(refused)} of 30 were refused")
            expect(refused, RESOURCE, ("descriptor", "LimitNOFILE"))
            print(f"   {len(refused)} of 30 refused: {next(iter(refused.values())).text}")
            job.still()
            before = node.cpu_ticks()
            time.sleep(1)
            job.still()
            for rank in ranks:
                rank.close()
        time.sleep(0.3)
        before = node.cpu_ticks()
        time.sleep(1)
        check(node.cpu_ticks() - before < 30, "the daemon spins")
        serves(cluster)


def test_descriptors_of_a_rank():
    with Cluster(1) as cluster:
        serves(cluster)
        held = Held(cluster)
        for n in range(3, 12):
            rank = cluster.rank(0)
            rank.do(f"rlimit nofile {n}")
            reply = rank.ask(f"buffer 0 alloc {1 << 16}")
            if reply.code == OK:
                print(f"   {n} descriptors are enough for memory")
            else:
                check("descriptor" in reply.text or "open files" in reply.text, f"the limit is not named: {reply}")
                check("nofile" in reply.text.lower() or "ulimit -n" in reply.text, f"no remedy: {reply}")
                last = reply
            rank.close()
        print(f"   {last.text}")
        held.check()


def test_memory_to_lock():
    """64 KiB of it, for the daemon too: host memory and TCP need none."""
    def limit():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    with Cluster(2, limits=limit) as cluster:
        for kind in ("plain", "alloc", "import"):
            ranks = [cluster.rank(i // 2, i, preexec=limit) for i in range(4)]
            job = Job(cluster, [0, 0, 1, 1], kind, 32 << 20, ranks=ranks)
            job.check(1, 1 << 18)
            job.all_do(f"post 0 0 0 1 {8 << 20}")
            job.all_do("wait 0")
            job.close()


def test_address_space_of_a_rank():
    """The daemon has made the memory, the rank cannot map it: told in words, and given back."""
    if SANITIZED:
        print("   (left out: sanitizers need all the address space)")
        return
    with Cluster(1) as cluster:
        serves(cluster)
        held = Held(cluster)
        rank = cluster.rank(0)
        rank.do("id")
        rank.do(f"rlimit as {256 << 20}")
        reply = rank.ask(f"buffer 0 alloc {512 << 20}")
        check(reply.code != OK and "Cannot allocate memory" in reply.text, f"{reply}")
        print(f"   {reply.text}")
        rank.do(f"buffer 1 alloc {1 << 20}")
        rank.close()
        held.check()


def test_quota():
    """Of one user, over all of its processes; what is freed is free for the next."""
    with Cluster(1, "max_memory_per_user = 96M\n") as cluster:
        with Undisturbed(cluster) as job:
            a, b = cluster.rank(0), cluster.rank(0)
            reply = {0: a.ask(f"buffer 0 alloc {1 << 30}")}
            expect(reply, RESOURCE, ("max_memory_per_user", "96M"))
            print(f"   {reply[0].text}")
            a.do(f"buffer 0 alloc {48 << 20}")
            expect({0: b.ask(f"buffer 0 alloc {48 << 20}")}, RESOURCE, ("max_memory_per_user",))
            a.do("free 0")
            wait_for("freed memory to come back", lambda: b.ask(f"buffer 0 alloc {48 << 20}").code == OK, 10)
            expect({0: a.ask(f"buffer 0 alloc {48 << 20}")}, RESOURCE, ("max_memory_per_user",))
            b.kill()
            wait_for("memory of a killed rank to come back", lambda: a.ask(f"buffer 0 alloc {48 << 20}").code == OK, 10)
            job.still()


def test_number_of_buffers():
    """Many small buffers: each costs the daemon one of the mappings that everybody shares."""
    with Cluster(1, "max_buffers_per_user = 20\n") as cluster:
        with Undisturbed(cluster) as job:
            ranks = [cluster.rank(0) for _ in range(4)]
            refused = None
            for n in range(24):
                reply = ranks[n % 4].ask(f"buffer {n // 4} alloc 4096")
                if reply.code != OK:
                    refused = reply
                    break
            check(refused is not None, "24 buffers more than the limit were given")
            expect({0: refused}, RESOURCE, ("max_buffers_per_user", "20"))
            print(f"   {refused.text}")
            ranks[0].kill()
            wait_for("the number of a killed rank to come back",
                     lambda: ranks[1].ask("buffer 7 alloc 4096").code == OK, 10)
            job.still()


def test_no_room_for_a_window():
    """The quota is met when the first ordinary buffer needs its window: the op is refused, in words, on that rank;
    memory that needs no window works."""
    with Cluster(1, "max_memory_per_user = 12M\nstaging_window = 8M\n") as cluster:
        ranks = [cluster.rank(0, i) for i in (0, 1)]
        job = Job(cluster, [0, 0], ranks=ranks)
        replies = [ranks[i].ask("post 0 0 0 1 1000") for i in (0, 1)]
        print("   " + "\n   ".join(map(str, replies)))
        check(replies[0].code == OK, f"{replies[0]}")
        expect({1: replies[1]}, RESOURCE, ("max_memory_per_user",))
        job.close()
        serves_small(cluster)


def serves_small(cluster):
    job = Job(cluster, [0, 0], "alloc", 1 << 16)
    job.check()
    job.close()


def test_too_many_communicators():
    """By max_comms of a process, and by the arena of the daemon."""
    with Cluster(2, "max_comms = 4\n") as cluster:
        job = Job(cluster, [0, 1])
        reply = {}
        for slot in range(1, 6):
            ident = job.ranks[0].do("id")
            reply = job.all(lambda i: f"init {slot} 2 {i} {ident} 20000 0")  # noqa: B023
            if any(r.code != OK for r in reply.values()):
                check(slot == 4, f"{slot} communicators, and the limit is 4")
                break
        expect(reply, RESOURCE, ("max_comms",))
        print(f"   {reply[1].text}")
        job.check()
        job.close()
    with Cluster(2, "arena_size = 8M\n") as cluster:
        job = Job(cluster, [0, 1])
        for slot in range(1, 10):
            ident = job.ranks[0].do("id")
            reply = job.all(lambda i: f"init {slot} 2 {i} {ident} 20000 0")  # noqa: B023
            if any(r.code != OK for r in reply.values()):
                break
        expect(reply, RESOURCE, ("arena", "arena_size", "8192 KiB"))
        print(f"   the {slot + 1}th: {reply[1].text}")
        job.check()
        # What a destroyed one had is free when all of its nodes are done with it.
        job.all_do("destroy 1")

        def fits():
            ident = job.ranks[0].do("id")
            return all(r.code == OK for r in job.all(lambda i: f"init 20 2 {i} {ident} 20000 0").values())

        wait_for("the room of a communicator that was destroyed", fits, 10)
        job.slot = 20
        job.check()


run_tests(globals())
