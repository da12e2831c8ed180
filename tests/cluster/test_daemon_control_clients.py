# SPDX-License-Identifier: MIT
# timeout: 180
"""Clients that break the rules cost themselves their session and nobody else anything."""

import ctypes
import json
import os
import random
import resource
import struct
import time

from helper_hreduced import (ABI, ALLOC, CTL, DONE, ERROR, FREE, GET_ID, HEADER, HELLO, ID, IMPORT, INVALID_ARGUMENT,
                             JOIN, LEAVE, MAGIC, MEMORY, PATH, PROTOCOL, REGISTERED, RESOURCE, STATUS, VERSION, WELCOME,
                             WINDOW, Client, Daemon, check, run_tests, wait_for)


def is_welcome(daemon):
    with Client(daemon) as c:
        return c.welcome is not None and c.welcome.type == WELCOME


def serves(daemon):
    """A fresh client gets everything: the rest of a test's bad company did no harm."""
    with Client(daemon) as c:
        check(c.welcome.type == WELCOME and len(c.welcome.fds) == 3, "a fresh client is not welcome")
        m = c.ask(ALLOC, struct.pack("=Q", 1 << 20))
        check(m.type == MEMORY and len(m.fds) == 1, "no memory for a fresh client")
        size, number, _ = struct.unpack("=QII", m.body)
        check(size == 1 << 20 and os.fstat(m.fds[0]).st_size == size, "the memory has the wrong size")
        m.close()
        m = c.ask(FREE, struct.pack("=II", number, 0))
        check(m.type == DONE, "memory cannot be freed")


def expect_error(message, status, *words):
    check(message is not None and message.type == ERROR, f"no error, but {message and message.type}")
    check(message.status == status, f"status {message.status} instead of {status}: {message.text}")
    for word in words:
        check(word in message.text, f"no '{word}' in: {message.text}")


def faults(daemon):
    with Client(daemon, flags=CTL) as c:
        return json.loads(c.status())["clients"]["faults"]


def test_garbage():
    generator = random.Random(7)
    with Daemon() as d:
        pipe = os.pipe()
        for i in range(60):
            with Client(d, hello=i % 3 == 0, timeout=5) as c:
                size = generator.choice([1, 2, 15, 16, 17, 24, 40, 300, 4000, 64999, 65000, 65001, 69000])
                data = generator.randbytes(size)
                if i % 4 == 1:
                    data = HEADER.pack(MAGIC, generator.randrange(0, 24), size, 1) + data[HEADER.size:]
                c.send_raw(data, generator.choice([[], pipe, pipe + pipe]))
                check(c.dropped(), f"message {i} of {size} bytes was swallowed")
        for fd in pipe:
            os.close(fd)
        check(faults(d) >= 40, "faults are not counted")
        serves(d)
        check(d.text().count("malformed") <= 12, "the log is not limited")


def test_wrong_requests():
    body = struct.pack("=IIiI", ABI, 0, os.getpid(), 0)
    join = bytes(232)
    with Daemon() as d:
        pidfd = os.pidfd_open(os.getpid())
        pipe = os.pipe()
        # HELLO with no descriptor, a pipe, the pidfd of another process, two descriptors; not the first message.
        for fds in ([], [pipe[0]], [pidfd, pidfd]):
            with Client(d, hello=False) as c:
                c.send(HELLO, body, fds)
                check(c.dropped(), f"HELLO with {len(fds)} descriptors was accepted")
        other = os.pidfd_open(d.pid)
        with Client(d, hello=False) as c:
            c.send(HELLO, body, [other])
            check(c.dropped(), "the pidfd of another process was accepted")
        with Client(d, hello=False) as c:
            c.send(STATUS, struct.pack("=I", 0))
            check(c.dropped(), "STATUS before HELLO was answered")
        with Client(d) as c:
            c.send(HELLO, body, [pidfd])
            check(c.dropped(), "a second HELLO was accepted")
        with Client(d) as c:
            c.send(WELCOME, bytes(64), [pidfd, pidfd, pidfd])
            check(c.dropped(), "WELCOME was taken from a client")
        with Client(d, flags=CTL) as c:
            c.send(JOIN, join)
            check(c.dropped(), "a control client may join")
        with Client(d) as c:
            for kind in (LEAVE, WINDOW, PATH):
                expect_error(c.ask(kind, struct.pack("=II", 3, 0)), INVALID_ARGUMENT, "slot 3")
                expect_error(c.ask(kind, struct.pack("=II", 60000, 0)), INVALID_ARGUMENT, "60000")
            expect_error(c.ask(FREE, struct.pack("=II", 77, 0)), INVALID_ARGUMENT, "77")
            m = c.ask(GET_ID, struct.pack("=I", 0))
            check(m.type == ID, "no id after errors")
        with Client(d, hello=False) as c:
            expect_error(c.hello(abi=9 << 16), VERSION, "version 9", "version 1")
            check(c.dropped(), "another major version stays connected")
        for fd in (pidfd, other, *pipe):
            os.close(fd)
        serves(d)


def test_import():
    with Daemon() as d, Client(d) as c:
        def ask(fd, offset, size):
            m = c.ask(IMPORT, struct.pack("=QQ", offset, size), [fd])
            check(m is not None, "the session ended")
            return m

        import fcntl
        add_seals, shrink, write = 1033, 2, 8
        fd = os.memfd_create("good", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 1 << 20)
        expect_error(ask(fd, 0, 4096), INVALID_ARGUMENT, "F_SEAL_SHRINK")
        fcntl.fcntl(fd, add_seals, shrink)
        expect_error(ask(fd, 0, (1 << 20) + 1), INVALID_ARGUMENT, "1048577")
        expect_error(ask(fd, 1 << 20, 4096), INVALID_ARGUMENT, "within")
        expect_error(ask(fd, 1 << 40, 1 << 61), RESOURCE, "max_memory_per_user")
        m = ask(fd, 4096, 5000)
        check(m.type == REGISTERED, "a good memfd was refused")
        number = struct.unpack("=II", m.body)[0]
        # Its pages vanish: the daemon has not touched them and does not mind.
        os.posix_fallocate(fd, 0, 4096)
        check(c.ask(FREE, struct.pack("=II", number, 0)).type == DONE, "FREE of an imported buffer")
        fcntl.fcntl(fd, add_seals, write)
        expect_error(ask(fd, 0, 4096), INVALID_ARGUMENT, "writing")
        os.close(fd)
        try:
            fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
            expect_error(ask(fd, 0, 4096), INVALID_ARGUMENT, "huge")
            os.close(fd)
        except OSError:
            pass  # a kernel without huge pages
        with open(__file__) as f:
            expect_error(ask(f.fileno(), 0, 100), INVALID_ARGUMENT, "memfd")
        serves(d)


def test_quota():
    config = "max_memory_per_user = 8M\nmax_sessions = 3\nmax_comms = 4\n"
    with Daemon(config=config) as d, Client(d) as a:
        m = a.ask(ALLOC, struct.pack("=Q", 6 << 20))
        check(m.type == MEMORY, "6M of 8M")
        m.close()
        with Client(d) as b:
            expect_error(b.ask(ALLOC, struct.pack("=Q", 6 << 20)), RESOURCE, "max_memory_per_user", "8M")
            expect_error(b.ask(ALLOC, struct.pack("=Q", 1 << 60)), RESOURCE, "max_memory_per_user")
            with Client(d) as third, Client(d, hello=False) as fourth:
                check(third.welcome.type == WELCOME, "the third of three")
                expect_error(fourth.hello(), RESOURCE, "max_sessions", "3")
                check(fourth.dropped(), "a refused process stays connected")
                # A control client is no process that max_sessions counts.
                check(json.loads(d.ctl("status", "--json").stdout)["clients"]["sessions"] == 3, "3 sessions")
        a.close()
        wait_for("memory to come back", lambda: json.loads(d.ctl("status", "--json").stdout)["memory"]["session_bytes"] == 0)
        with Client(d) as b:
            m = b.ask(ALLOC, struct.pack("=Q", 6 << 20))
            check(m.type == MEMORY, "memory of an ended session is still charged")
            m.close()


def memory_group(limit):
    """A new control group with a memory limit, and the file that moves a process into it; or None."""
    for base, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = f"{base}/hreduce-test-{os.getpid()}"
        try:
            os.mkdir(group)
            with open(f"{group}/{file}", "w") as f:
                f.write(str(limit))
            return group
        except OSError:
            if os.path.isdir(group):
                os.rmdir(group)
    return None


def test_memory_limit():
    """A limit on the daemon's memory: asking for more is refused in words, before the kernel has to kill."""
    group = memory_group(128 << 20)
    if not group:
        print("   (left out: no memory control group can be made here)")
        return

    def enter():
        with open(f"{group}/cgroup.procs", "w") as f:
            f.write(str(os.getpid()))

    try:
        with Daemon(limits=enter) as d, Client(d) as c:
            held = []
            for _ in range(30):
                m = c.ask(ALLOC, struct.pack("=Q", 8 << 20))
                check(m is not None, "the daemon is gone")
                if m.type == ERROR:
                    break
                held.append(m)
            expect_error(m, RESOURCE, "8M", "control group", os.path.basename(group), "MemoryMax")
            check(3 <= len(held) <= 12, f"{len(held)} times 8M of 128M less the daemon's own")
            expect_error(c.ask(ALLOC, struct.pack("=Q", 1 << 30)), RESOURCE, "1G", "control group")
            # Holes are filled again on the daemon's account, which had them before: no harm.
            fd = held[0].fds[0]
            libc = ctypes.CDLL(None, use_errno=True)
            check(libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(8 << 20)) == 0, "punching a hole")
            for m in held:
                m.close()
            check(d.alive(), "the daemon was killed")
        with Daemon(name="again", limits=enter) as d:
            serves(d)
    finally:
        wait_for("the control group to be empty", lambda: not open(f"{group}/cgroup.procs").read())
        os.rmdir(group)


def test_sessions_per_user():
    with Daemon(config="max_sessions_per_user = 2\n") as d, Client(d), Client(d), Client(d, hello=False) as c:
        expect_error(c.hello(), RESOURCE, "max_sessions_per_user", "2")


def test_never_reads():
    """A client that asks and does not read is ended once too many replies wait; the others do not notice."""
    with Daemon() as d, Client(d) as good, Client(d, timeout=20) as bad:
        bad.sock.setblocking(False)
        end = time.monotonic() + 20
        sent = 0
        while True:
            check(time.monotonic() < end, f"{sent} requests, and the session lives")
            try:
                # An unknown buffer: answered at once with a sentence.
                bad.send(FREE, struct.pack("=II", 99, 0))
                sent += 1
            except BlockingIOError:
                time.sleep(0.001)
            except (BrokenPipeError, ConnectionResetError):
                break
        wait_for("the fault to be counted", lambda: faults(d) == 1)
        check("does not read its socket" in d.text(), "the log does not say why")
        check(good.ask(FREE, struct.pack("=II", 5, 0)).type == ERROR, "the other session suffers")


def test_silent():
    """Connected without a word: dropped after some seconds, meanwhile no processor time."""
    with Daemon() as d:
        with Client(d, hello=False, timeout=8) as c:
            begin = time.monotonic()
            check(c.dropped(), "a silent connection lives on")
            check(3 < time.monotonic() - begin < 8 * 5, "not after 5 s")


def test_descriptor_limit():
    """64 descriptors, 40 clients: some are refused with the reason, the others work, the daemon does not spin."""
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    with Daemon(limits=limit) as d:
        d.ctl("version")  # it has started for good
        base = d.fds()
        clients, refused = [], 0
        for _ in range(40):
            c = Client(d, hello=False)
            m = c.hello()
            if m is not None and m.type == WELCOME:
                c.welcome = m
                clients.append(c)
            else:
                expect_error(m, RESOURCE, "64", "LimitNOFILE")
                refused += 1
                c.close()
        check(len(clients) >= 5 and refused >= 5, f"{len(clients)} served, {refused} refused")
        before, begin = d.cpu_ticks(), time.monotonic()
        idle = [Client(d, hello=False) for _ in range(60)]
        time.sleep(2)
        used = (d.cpu_ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - begin)
        check(used < 0.05, f"{used:.0%} of a core with the limit reached")
        for c in idle:
            c.close()
        for c in clients:
            m = c.ask(ALLOC, struct.pack("=Q", 4096))
            check(m.type in (MEMORY, ERROR), "an earlier client was lost")
            m.close()
            c.close()
        wait_for("descriptors to come back", lambda: d.fds() <= base)
        # Those of the idle ones that still stood in the socket's queue are accepted, and found closed, one after the other.
        wait_for("a fresh client to be welcome", lambda: is_welcome(d))
        serves(d)


def test_no_descriptor_leaks():
    with Daemon() as d:
        serves(d)
        wait_for("the first client to go", lambda: json.loads(d.ctl("status", "--json").stdout)["clients"]["sessions"] == 0)
        base = d.fds()
        for i in range(200):
            with Client(d, hello=i % 10 != 9) as c:
                if i % 4 == 0:
                    c.ask(ALLOC, struct.pack("=Q", 8192)).close()
        # The control client that looked just before may still have been counted in base.
        wait_for(f"{base} descriptors at most", lambda: d.fds() <= base)
        with open(f"/proc/{d.pid}/maps") as f:
            left = [line for line in f if "hreduce-" in line]
        check(not left, f"mappings are left: {left[:3]}")


def test_death_of_a_process_with_children():
    """The socket lives on in a forked child; the pidfd tells."""
    with Daemon() as d:
        ready, go = os.pipe()
        parent = os.fork()
        if parent == 0:
            c = Client(d)
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
            os.write(go, b"%d" % c.welcome.type)
            time.sleep(30)
            os._exit(0)
        check(os.read(ready, 1) == b"2", "no welcome")
        check(json.loads(d.ctl("status", "--json").stdout)["clients"]["sessions"] == 1, "one session")
        begin = time.monotonic()
        children = open(f"/proc/{parent}/task/{parent}/children").read().split()
        os.kill(parent, 9)
        os.waitpid(parent, 0)
        wait_for("the session to end", lambda: json.loads(d.ctl("status", "--json").stdout)["clients"]["sessions"] == 0, 1)
        check(time.monotonic() - begin < 1, "it took longer than a second")
        check(f"process {parent} ended" in d.text(), "the log does not say that it ended")
        for child in children:
            os.kill(int(child), 9)
        os.close(ready)
        os.close(go)


def test_status_is_private():
    """Another user sees neither processes nor communicators of ours."""
    if os.getuid() != 0:
        print("   (left out: needs root to become somebody else)")
        return
    with Daemon() as d, Client(d):
        os.chmod(os.path.dirname(os.environ["TMPDIR"]), 0o755)
        os.chmod(os.environ["TMPDIR"], 0o755)
        os.chmod(d.socket, 0o666)
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            os.setgid(65534)
            os.setuid(65534)
            with Client(d, flags=CTL) as c:
                os.write(go, c.status().encode())
            os._exit(0)
        os.waitpid(child, 0)
        doc = json.loads(os.read(ready, 65536))
        check(doc["sessions"] == [] and doc["clients"]["sessions"] == 1, f"seen: {doc['sessions']}")
        check(len(json.loads(d.ctl("status", "--json").stdout)["sessions"]) == 1, "root sees it")
        os.close(ready)
        os.close(go)


if __name__ == "__main__":
    assert PROTOCOL
    run_tests(globals())
