#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Clients that lie. A rank that speaks proto/wire.h by itself, or that works behind libhclient's back, does to its
shared memory, ring, doorbell and socket what it can; the other ranks of its communicator get an error, and a job
beside it notices nothing."""
# timeout: 150

import errno
import fcntl
import mmap
import os
import random
import signal
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_fault import (  # noqa: E402
    OK, RANK_LOST, SANITIZED, SCALE, SOON, TIMEOUT, Client, Cluster, Held, Job, Undisturbed, check, expect, run_tests,
    serves, tell, wait_for,
)
from helper_hreduced import ABORT, ALLOC, FREE, IMPORT, GET_ID, JOIN, JOINED, LEAVE, MEMORY, PATH, STATUS, WINDOW  # noqa: E402

PAGE, STRIDE, SLOTS, LINE = 4096, 49152, 32, 128
TAIL, DESCRIPTORS = 10368, 10624
NONE, SHARED, WINDOWED = 0, 1, 2
MEMORY_GROUPS = "/sys/fs/cgroup/memory"


class Liar(Client):
    """A rank without libhclient."""

    def __init__(self, node):
        super().__init__(node, timeout=20)
        self.segment = mmap.mmap(self.welcome.fds[0], 0)
        self.doorbell = self.welcome.fds[2]
        self.slot = self.posted = 0

    def join(self, ident, nranks, rank, op_ms):
        """Sends the JOIN; joined() has the answer."""
        raw = bytes.fromhex(ident)
        naddrs = struct.unpack_from("=H", raw, 6)[0]
        key = struct.pack("=IIIIQ72s", 1, 0, nranks, 0, 0, raw[8:24])
        self.send(JOIN, key + struct.pack("=II", rank, naddrs) + raw[24:120] + struct.pack("=II24x", 30000, op_ms))

    def joined(self):
        m = self.receive()
        check(m is not None and m.type == JOINED, f"no JOINED but {m and m.type}: {m and m.body}")
        self.slot = struct.unpack_from("=I", m.body)[0]

    def alloc(self, size):
        m = self.ask(ALLOC, struct.pack("=Q", size))
        check(m.type == MEMORY, "no memory")
        m.close()
        return struct.unpack_from("=QI", m.body)[1]

    def at(self, offset):
        return PAGE + self.slot * STRIDE + offset

    def store(self, offset, value, form="=Q"):
        struct.pack_into(form, self.segment, offset, value)

    def descriptor(self, count, buf_in, buf_out, op=None, coll=0, dtype=0, redop=0, root=0, timeout=0, flags=0):
        return struct.pack(
            "=QQIBBBBIIQIIQII64x", op or self.posted + 1, count, root, coll, dtype, redop, 0, *buf_in, *buf_out, timeout, flags
        )

    def push(self, descriptor, ready=None):
        place = self.posted % SLOTS
        begin = self.at(DESCRIPTORS + place * 128)
        self.segment[begin:begin + 128] = descriptor
        self.posted += 1
        flag = self.at((self.posted % SLOTS) * 2 * LINE)
        self.store(flag, (self.posted << 20 | 0xfffff) if ready is None else ready)
        self.store(self.at(TAIL), self.posted)
        self.ring()

    def ring(self):
        submits = struct.unpack_from("=I", self.segment, 3 * LINE)[0]
        self.store(3 * LINE, (submits + 1) & 0xffffffff, "=I")
        os.write(self.doorbell, struct.pack("=Q", 1))

    def close(self):
        self.segment.close()
        super().close()


class Trial:
    """A communicator of 2 x 2 ranks of which rank 1 lies."""

    def __init__(self, cluster, op_ms=0):
        self.ranks = {i: cluster.rank(i // 2, i) for i in (0, 2, 3)}
        ident = self.ranks[0].do("id")
        tags = {i: r.send(f"init 0 4 {i} {ident} 30000 {op_ms}") for i, r in self.ranks.items()}
        self.liar = Liar(cluster.nodes[0])
        self.liar.join(ident, 4, 1, op_ms)
        self.liar.joined()
        for i, tag in tags.items():
            check(self.ranks[i].get(tag).code == OK, f"rank {i} did not join")
            for b in (0, 1):
                self.ranks[i].do(f"buffer {b} alloc {4 << 20}")

    def __enter__(self):
        return self

    def post(self, count):
        for rank in self.ranks.values():
            rank.do(f"post 0 0 0 1 {count}")
        return {i: r.send("wait 0", thread=True) for i, r in self.ranks.items()}

    def get(self, waits):
        return {i: self.ranks[i].get(tag) for i, tag in waits.items()}

    def __exit__(self, *_):
        self.liar.close()
        for rank in self.ranks.values():
            rank.close()


def test_an_honest_liar():
    """What the lies below are measured against: said right, the same messages make a right all-reduce."""
    with Cluster(2) as cluster, Trial(cluster) as trial:
        liar = trial.liar
        a = liar.alloc(4 << 20)
        waits = trial.post(1 << 20)
        liar.push(liar.descriptor(1 << 20, (SHARED, a, 0), (SHARED, a, 0)))
        expect(trial.get(waits), OK)


def test_lies_in_the_ring():
    generator = random.Random(5)
    big = (1 << 62) // 4
    # Everything but the named is right: count 1000, one allocation of 4 MiB as input and output.
    lies = {
        "input beyond the buffer": lambda d, b: d(1000, (SHARED, b, (4 << 20) - 100), (SHARED, b, 0)),
        "output beyond the buffer": lambda d, b: d(1000, (SHARED, b, 0), (SHARED, b, (4 << 20) - 3996)),
        "an offset that wraps": lambda d, b: d(1000, (SHARED, b, 0), (SHARED, b, 2**64 - 2000)),
        "a count that wraps": lambda d, b: d(big + 1, (SHARED, b, 0), (SHARED, b, 0)),
        "more than the buffer holds": lambda d, b: d(1 << 21, (SHARED, b, 0), (SHARED, b, 0)),
        "an unknown collective": lambda d, b: d(1000, (SHARED, b, 0), (SHARED, b, 0), coll=77),
        "an unknown type": lambda d, b: d(1000, (SHARED, b, 0), (SHARED, b, 0), dtype=200),
        "an unknown reduction": lambda d, b: d(1000, (SHARED, b, 0), (SHARED, b, 0), redop=9),
        "an unknown kind of buffer": lambda d, b: d(1000, (77, b, 0), (SHARED, b, 0)),
        "no input": lambda d, b: d(1000, (NONE, 0, 0), (SHARED, b, 0)),
        "a window that was never made": lambda d, b: d(1000, (WINDOWED, 0, 0), (WINDOWED, 0, 0)),
        "flags": lambda d, b: d(1000, (SHARED, b, 0), (SHARED, b, 0), flags=0xffff),
        "an op of the past": lambda d, b: d(1000, (SHARED, b, 0), (SHARED, b, 0), op=2**63),
        "an op of the future": lambda d, b: d(1000, (SHARED, b, 0), (SHARED, b, 0), op=40),
        "random bytes": lambda d, b: generator.randbytes(128),
    }
    with Cluster(2) as cluster:
        serves(cluster)
        held = Held(cluster)
        with Undisturbed(cluster) as job:
            for what, lie in lies.items():
                with Trial(cluster, 3000 * int(SCALE)) as trial:
                    buffer = trial.liar.alloc(4 << 20)
                    waits = trial.post(1000)
                    begin = time.monotonic()
                    trial.liar.push(lie(trial.liar.descriptor, buffer))
                    replies = trial.get(waits)
                    check(all(r.code != OK for r in replies.values()), f"{what}: succeeded")
                    check(all(r.time - begin < SOON * SCALE for r in replies.values()), f"{what}: the error came late")
                    print(f"   {what}: {replies[3].text}")
            for what, tail in (("a tail too far", 1000), ("a tail that goes back", 2**64 - 5)):
                with Trial(cluster, 3000 * int(SCALE)) as trial:
                    waits = trial.post(1000)
                    trial.liar.store(trial.liar.at(TAIL), tail)
                    trial.liar.ring()
                    replies = trial.get(waits)
                    check(all(r.code != OK for r in replies.values()), f"{what}: succeeded")
                    print(f"   {what}: {replies[3].text}")
            job.still()
        held.check()
        serves(cluster)


def test_segment_scribbled_over():
    """Random bytes all over the segment, again and again, in the middle of ops."""
    generator = random.Random(6)
    with Cluster(2) as cluster, Undisturbed(cluster) as job:
        for _ in range(3):
            with Trial(cluster, 4000 * int(SCALE)) as trial:
                liar = trial.liar
                a = liar.alloc(4 << 20)
                waits = trial.post(1 << 20)
                liar.push(liar.descriptor(1 << 20, (SHARED, a, 0), (SHARED, a, 0)))
                end = time.monotonic() + 1
                while time.monotonic() < end:
                    at = generator.randrange(0, len(liar.segment) - 4096)
                    length = generator.choice((4, 8, 64, 4096))
                    liar.segment[at:at + length] = generator.randbytes(length)
                    try:
                        os.write(liar.doorbell, struct.pack("=Q", 1))
                    except OSError:
                        pass
                trial.get(waits)
            job.still()
        serves(cluster)


def test_buffers_that_never_come():
    """A registration may be under way, so the op waits for it, as long as its deadline lets it."""
    with Cluster(2) as cluster, Undisturbed(cluster) as job:
        for kind in ((SHARED, 12345, 0), (SHARED, 0xffffffff, 0)):
            with Trial(cluster, 1500 * int(SCALE)) as trial:
                waits = trial.post(1000)
                begin = time.monotonic()
                trial.liar.push(trial.liar.descriptor(1000, kind, kind))
                replies = trial.get(waits)
                expect(replies, (TIMEOUT, RANK_LOST), (), begin)
                tell(replies[3].text, begin, replies)
        job.still()


def test_socket_closed_with_ops_pending():
    with Cluster(2) as cluster:
        serves(cluster)
        held = Held(cluster)
        with Undisturbed(cluster) as job:
            for size in (1000, 1 << 20):
                with Trial(cluster) as trial:
                    buffer = trial.liar.alloc(4 << 20)
                    waits = trial.post(size)
                    if size > 1000:
                        trial.liar.push(trial.liar.descriptor(size, (SHARED, buffer, 0), (SHARED, buffer, 0)))
                        trial.get(waits)
                        waits = trial.post(size)
                    begin = time.monotonic()
                    trial.liar.sock.close()
                    expect(trial.get(waits), RANK_LOST, ("rank 1",), begin)
            job.still()
        held.check()


def test_doorbell():
    """O_NONBLOCK cleared and the counter full: whoever rings would wait for ever. The daemon never does."""
    with Cluster(2) as cluster, Undisturbed(cluster) as job, Trial(cluster) as trial:
        liar = trial.liar
        buffer = liar.alloc(4 << 20)
        fcntl.fcntl(liar.doorbell, fcntl.F_SETFL, 0)
        os.write(liar.doorbell, struct.pack("=Q", 2**64 - 2))
        job.still()
        fcntl.fcntl(liar.doorbell, fcntl.F_SETFL, os.O_NONBLOCK)
        waits = trial.post(1000)
        try:
            liar.push(liar.descriptor(1000, (SHARED, buffer, 0), (SHARED, buffer, 0)))
        except BlockingIOError:
            pass
        time.sleep(0.5)
        job.still()
        liar.sock.close()
        expect(trial.get(waits), (OK, RANK_LOST))


def test_never_reads():
    """Asks and asks, memory and reports, and never looks at an answer."""
    with Cluster(2) as cluster, Undisturbed(cluster) as job, Trial(cluster) as trial:
        liar = trial.liar
        liar.sock.setblocking(False)
        end = time.monotonic() + 3
        sent = 0
        while time.monotonic() < end:
            try:
                for kind, body in ((STATUS, bytes(4)), (ALLOC, struct.pack("=Q", 4096)), (PATH, struct.pack("=II", liar.slot, 0))):
                    liar.send(kind, body)
                    sent += 1
            except BlockingIOError:
                time.sleep(0.01)
            except OSError as error:
                check(error.errno in (errno.EPIPE, errno.ECONNRESET), str(error))
                print(f"   ended after {sent} requests")
                break
        job.still()
        replies = {i: r.ask("post 0 0 0 1 1000") for i, r in trial.ranks.items()}
        expect(replies, (OK, RANK_LOST))
        for node in cluster.nodes:
            with open(f"/proc/{node.pid}/status", encoding="utf-8") as status:
                kib = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
            check(SANITIZED or kib < 200 << 10, f"the daemon keeps {kib} KiB for a client that does not read")


def test_requests_at_random():
    """Well-formed messages with slots, buffers and sizes that mean nothing, in any order, while ops run."""
    generator = random.Random(8)
    with Cluster(2) as cluster:
        serves(cluster)
        held = Held(cluster)
        with Undisturbed(cluster) as job:
            for _ in range(4):
                with Trial(cluster, 3000 * int(SCALE)) as trial:
                    liar = trial.liar
                    waits = trial.post(1000)
                    for _ in range(300):
                        kind = generator.choice((ALLOC, WINDOW, FREE, PATH, ABORT, GET_ID, LEAVE, IMPORT))
                        number = generator.choice((0, 1, 2, 15, 16, 77, 2**31, 2**32 - 1))
                        body = struct.pack("=II", number, 0)
                        fds = []
                        if kind == GET_ID:
                            body = bytes(4)
                        elif kind == IMPORT:
                            body = struct.pack("=QQ", number, generator.choice((0, 1, 4096, 2**63)))
                            fds = [generator.choice((0, liar.doorbell, liar.welcome.fds[0], liar.sock.fileno()))]
                        elif kind == ALLOC:
                            body = struct.pack("=Q", generator.choice((0, 1, 4096, 1 << 20, 2**40, 2**63, 2**64 - 1)))
                        try:
                            m = liar.ask(kind, body, fds)
                        except OSError:
                            break
                        if m is None:
                            break
                        m.close()
                    liar.sock.close()
                    replies = trial.get(waits)
                    check(all(r.code != OK for r in replies.values()), "an op without rank 1 succeeded")
            job.still()
        held.check()


# ---- memory that is taken away ------------------------------------------------------------------------------


def test_holes():
    """A rank punches holes into imported memory in the middle of ops. Its results are its own affair; the ops go
    on, or only this session ends."""
    with Cluster(2) as cluster, Undisturbed(cluster) as other:
        job = Job(cluster, [0, 0, 1, 1], "import", 16 << 20)
        loops = job.loop()
        for n in range(60):
            at = (n * 7 % 16) << 20
            for b in (0, 1):
                job.ranks[1].do(f"punch {b} {at} {1 << 20}")
            if n % 10 == 0:
                job.ranks[1].do(f"punch 0 0 {16 << 20}")
        begin = job.ranks[1].kill()
        expect(job.get(loops, but=(1,)), RANK_LOST, ("rank 1",), begin)
        other.still()
        job.close()


def test_truncation():
    """The seal that an import must have forbids it: the kernel refuses, and the ops go on."""
    with Cluster(1) as cluster, Undisturbed(cluster):
        job = Job(cluster, [0, 0], "import", 4 << 20)
        loops = job.loop()
        for size in (4096, 0, (4 << 20) - 1):
            reply = job.ranks[1].ask(f"truncate 0 {size}")
            check("not permitted" in reply.text, f"truncated: {reply}")
        begin = job.ranks[1].kill()
        expect(job.get(loops, but=(1,)), RANK_LOST, ("rank 1",), begin)


def memory_group(name, limit):
    """A new memory cgroup, or None."""
    path = f"{MEMORY_GROUPS}/{name}"
    try:
        os.mkdir(path)
        with open(f"{path}/memory.limit_in_bytes", "w", encoding="utf-8") as f:
            f.write(str(limit))
        return path
    except OSError as error:
        print(f"   (left out: no memory cgroup can be made here: {error})")
        return None


def test_rank_at_its_memory_limit():
    """A rank in a memory cgroup that is full: holes that the daemon fills again, and then the kernel's end of the
    rank itself in the middle of ops. The daemon, outside of that cgroup, and the others live."""
    name = f"hreduce-test-{os.getpid()}"
    path = memory_group(name, 48 << 20)
    if not path:
        return
    try:
        with Cluster(2) as cluster, Undisturbed(cluster) as other:
            ranks = [cluster.rank(i // 2, i) for i in range(4)]
            if not SANITIZED:
                with open(f"{path}/cgroup.procs", "w", encoding="utf-8") as f:
                    f.write(str(ranks[1].pid))
            job = Job(cluster, [0, 0, 1, 1], "import", 16 << 20, ranks=ranks)
            job.all_do(lambda i: f"fill 0 1 {i}")
            loops = job.loop()
            for n in range(20):
                job.ranks[1].do(f"punch {n % 2} 0 {16 << 20}")
                time.sleep(0.02)
            other.still()
            if SANITIZED:
                job.ranks[1].kill()
            else:
                job.ranks[1].do(f"buffer 5 plain {256 << 20}")
                job.ranks[1].send("fill 5 1 1")
                wait_for("the kernel to end the rank", lambda: job.ranks[1].process.poll() is not None, 30)
                check(job.ranks[1].process.returncode == -signal.SIGKILL, "the rank did not reach its limit")
            expect(job.get(loops, but=(1,)), RANK_LOST, ("rank 1",))
            job.close()
            serves(cluster)
    finally:
        for _ in range(50):
            try:
                os.rmdir(path)
                break
            except OSError:
                time.sleep(0.1)


run_tests(globals())
