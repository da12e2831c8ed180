#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What anybody may send to the TCP port of a daemon: garbage, half a hello, nothing at all, another version, a
stream that belongs to nobody. The connection is dropped and counted, and nobody else notices."""
# timeout: 90

import json
import os
import resource
import select
import socket
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_hreduced import SCALE, Daemon, check, free_port, run_tests, wait_for  # noqa: E402

# proto/peer.h
MAGIC = 0x70657268
CONTROL, DATA = 1, 2
HELLO_BYTES, REPLY_BYTES, CONFIRM_BYTES = 512, 512, 256
OK, PEER_LOST, VERSION = 0, 7, 15
UP, PING, PONG, BYE = 1, 2, 3, 4
HEADER = struct.Struct("<IHHII")
HELLO_TIMEOUT = 5


def address(port):
    return struct.pack("<BBHI16s", 4, 0, port, 0, bytes([127, 0, 0, 9]))


def hello(role=CONTROL, major=1, instance=b"\7" * 16, magic=MAGIC, stream=0, nstreams=4, peer_no=0, link=0, port=1):
    data = struct.pack("<IHHBBHHHIIQ16s", magic, major, 0, role, 1, port, stream, nstreams, peer_no, 0, link, instance)
    data += address(port) + bytes(3 * 24) + b"stranger".ljust(72, b"\0")
    return data.ljust(HELLO_BYTES, b"\0")


def confirm(peer_no=1):
    return struct.pack("<II", MAGIC, peer_no).ljust(CONFIRM_BYTES, b"\0")


def message(kind, body=b"", magic=MAGIC, length=None):
    return HEADER.pack(magic, kind, 0, len(body) if length is None else length, 0) + body


class Peer:
    """A connection to the peer port."""

    def __init__(self, daemon, *data):
        self.sock = socket.create_connection(("127.0.0.1", daemon.port), 5 * SCALE)
        self.sock.settimeout(10 * SCALE)
        for part in data:
            self.sock.sendall(part)

    def read(self, size):
        data = b""
        while len(data) < size:
            part = self.sock.recv(size - len(data))
            check(part, f"closed after {len(data)} of {size} bytes")
            data += part
        return data

    def reply(self):
        """(status, node name, sentence)"""
        data = self.read(REPLY_BYTES)
        magic, major, _, status = struct.unpack_from("<IHHI", data)
        check((magic, major) == (MAGIC, 1), "the reply is none")
        text = data[208:384].split(b"\0")[0].decode()
        return status, data[136:208].split(b"\0")[0].decode(), text

    def message(self):
        magic, kind, _, length, _ = HEADER.unpack(self.read(HEADER.size))
        check(magic == MAGIC, "a message without magic")
        return kind, self.read(length)

    def up(self):
        """A whole opening of a control connection."""
        self.sock.sendall(hello())
        status, _, text = self.reply()
        check(status == OK, text)
        self.sock.sendall(confirm())
        kind, body = self.message()
        check(kind == UP and struct.unpack_from("<I", body)[0] > 0, "no UP")
        return self

    def dropped(self, seconds=10):
        """Whether the daemon closes the connection; what it still says is read."""
        self.sock.settimeout(seconds * SCALE)
        try:
            while self.sock.recv(65536):
                pass
            return True
        except ConnectionResetError:
            return True
        except socket.timeout:
            return False

    def close(self):
        self.sock.close()


def daemon(name, config=""):
    port = free_port()
    d = Daemon(name, f"port = {port}\nnode_name = target\n{config}")
    d.port = port
    # The socket is there before the port is: only an answer says that everything is up.
    d.ctl("status", "--json")
    return d


def fds_at_rest(d):
    """Descriptors of a daemon with which nobody is connected; hreducectl's session takes a moment to go."""
    last, since = d.fds(), time.monotonic()
    while time.monotonic() - since < 0.3 * SCALE:
        time.sleep(0.02)
        if d.fds() != last:
            last, since = d.fds(), time.monotonic()
    return last


def port_counters(d):
    return json.loads(d.ctl("status", "--json").stdout)["peer_port"]


def expect_counter(d, key, value):
    wait_for(f"{key} = {value}", lambda: port_counters(d)[key] == value)


def test_garbage():
    with daemon("garbage") as d:
        fds = fds_at_rest(d)
        noise = [os.urandom(HELLO_BYTES), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(HELLO_BYTES, b" "), bytes(HELLO_BYTES),
                 b"\x16\x03\x01\x02\x00\x01".ljust(HELLO_BYTES, b"\1"), os.urandom(100000), hello(magic=1), hello(role=3),
                 hello(port=0), hello(instance=bytes(16)), hello(nstreams=0), hello(role=DATA), hello(link=1)]
        for data in noise:
            check(Peer(d, data).dropped(), f"still connected after {data[:16]}")
        expect_counter(d, "garbage", len(noise))
        warnings = d.text().count("does not speak this protocol")
        check(0 < warnings <= 5, f"{warnings} lines of log for {len(noise)} strangers")
        # The confirmation is part of the opening as well.
        p = Peer(d, hello())
        check(p.reply()[0] == OK, "a sound hello was refused")
        p.sock.sendall(confirm(peer_no=0))
        check(p.dropped(), "a confirmation without a number was taken")
        for _ in range(50):
            Peer(d, b"x" * 10).close()
        Peer(d).up().close()
        wait_for("all descriptors to be closed", lambda: d.fds() <= fds)


def test_silence():
    """Who does not say who he is, or only half of it, is out after some seconds; a daemon with many of them still
    takes a new one at once."""
    with daemon("silent") as d:
        fds = fds_at_rest(d)
        silent = [Peer(d) for _ in range(3)] + [Peer(d, hello()[:n]) for n in (1, 16, HELLO_BYTES - 1)]
        no_confirm = Peer(d, hello())
        check(no_confirm.reply()[0] == OK, "a sound hello was refused")
        begin = time.monotonic()
        Peer(d).up().close()
        check(time.monotonic() - begin < 2 * SCALE, "a newcomer waited for silent ones")
        for p in silent + [no_confirm]:
            check(p.dropped(HELLO_TIMEOUT + 4), "a silent connection is kept")
        expect_counter(d, "silent", len(silent) + 1)
        # Byte by byte, slower than the limit.
        slow = Peer(d)
        begin = time.monotonic()
        dropped = False
        while not dropped and time.monotonic() - begin < (HELLO_TIMEOUT + 4) * SCALE:
            try:
                slow.sock.sendall(hello()[:1])
                dropped = bool(select.select([slow.sock], [], [], 0.3)[0]) and not slow.sock.recv(1)
            except OSError:
                dropped = True
        check(dropped, "a connection that drips is kept")
        wait_for("all descriptors to be closed", lambda: d.fds() <= fds)


def test_many_strangers():
    """More than fit: the oldest silent ones go, and a daemon gets through."""
    with daemon("many") as d:
        fds = fds_at_rest(d)
        crowd = [Peer(d) for _ in range(600)]
        wait_for("all to be accepted", lambda: port_counters(d)["accepted"] >= len(crowd))
        check(d.fds() - fds < 550, "strangers without limit")
        Peer(d).up().close()
        for p in crowd:
            p.close()
        wait_for("all descriptors to be closed", lambda: d.fds() <= fds)


def test_no_descriptors():
    """Out of file descriptors: newcomers are turned away without a busy loop, those who are there stay, and it is
    over when descriptors are free again."""
    port = free_port()
    limit = 60
    with Daemon("nofile", f"port = {port}\nnode_name = target\n",
                limits=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))) as d:
        d.port = port
        d.ctl("status", "--json")
        fds_at_rest(d)
        good = Peer(d).up()
        crowd = [Peer(d) for _ in range(limit)]
        check(any(p.dropped(3) for p in crowd[-3:]), "nobody was turned away")
        check(d.fds() <= limit, "more descriptors than there are")
        before, begin = d.cpu_ticks(), time.monotonic()
        time.sleep(1)
        busy = (d.cpu_ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - begin)
        check(busy < 0.3, f"{busy:.0%} of a core while there are no descriptors")
        good.sock.sendall(message(PING, struct.pack("<Q", 5)))
        while good.message()[0] != PONG:
            pass
        check(d.text().count("no file descriptor is left") == 1, "the log does not say it, or more than once")
        for p in crowd:
            p.close()
        wait_for("descriptors to be free", lambda: d.fds() < limit - 20)
        Peer(d, hello(instance=b"\2" * 16)).reply()


def test_other_version():
    with daemon("version") as d:
        p = Peer(d, hello(major=2))
        status, node, text = p.reply()
        check(status == VERSION and node == "target", f"status {status}")
        check("version 1" in text and "yours is 2" in text and "same release" in text, text)
        check(p.dropped(), "another version stays connected")


def test_stream_of_nobody():
    with daemon("stream") as d:
        p = Peer(d, hello(role=DATA, link=5, peer_no=1))
        status, _, text = p.reply()
        check(status == PEER_LOST and "no control connection" in text, f"{status} {text}")
        check(p.dropped(), "a stream of nobody stays connected")
        expect_counter(d, "refused", 1)


def test_wrong_messages():
    """After the opening: whatever is no message ends that connection."""
    wrong = [b"x" * 16, message(UP, struct.pack("<II", 1, 0)), message(PING, bytes(7)), message(99, bytes(8)),
             message(PING, bytes(8), magic=1), message(BYE, bytes(8), length=1 << 30), message(BYE, bytes(8 + 2049)),
             message(5, bytes(152)), message(8, bytes(200)), message(9, b"\1" + bytes(23))[:-1] + b"\1"]
    with daemon("messages") as d:
        good = Peer(d)
        good.sock.sendall(hello(instance=b"\1" * 16))
        good.reply()
        good.sock.sendall(confirm(5))
        check(good.message()[0] == UP, "no UP")
        for i, data in enumerate(wrong):
            p = Peer(d).up()
            p.sock.sendall(data)
            check(p.dropped(), f"message {i} was taken")
        # A message that is cut off, and one that makes no sense but harms nobody.
        p = Peer(d).up()
        p.sock.sendall(message(PING, bytes(8))[:-1])
        p.close()
        p = Peer(d).up()
        p.sock.sendall(message(10, b"\1" * 16 + bytes(8)))  # COMMIT of nothing
        p.sock.sendall(message(PING, struct.pack("<Q", 77)))
        while True:
            kind, body = p.message()
            if kind == PONG:
                break
        check(struct.unpack("<Q", body)[0] == 77, "PONG has another stamp")
        # The first one is still served: its pings come.
        good.sock.sendall(message(PING, struct.pack("<Q", 5)))
        while good.message()[0] != PONG:
            pass


def test_goodbye():
    """A daemon that stops says so; one that dies is noticed by its connection."""
    with daemon("bye") as d:
        p = Peer(d).up()
        d.stop()
        kinds = []
        try:
            while True:
                kinds.append(p.message()[0])
        except (AssertionError, OSError):
            pass
        check(BYE in kinds, f"no goodbye in {kinds}")


def test_same_peer_again():
    """The same daemon connects anew, with another number: the old connection is dead and goes."""
    with daemon("again") as d:
        old = Peer(d).up()
        new = Peer(d, hello())
        new.reply()
        new.sock.sendall(confirm(peer_no=2))
        check(new.message()[0] == UP, "no UP")
        check(old.dropped(), "the old connection is kept")
        wait_for("the line of log", lambda: "has given up the connection" in d.text())
        # With the same number it is a third connection of one pair: one too many.
        more = Peer(d, hello())
        more.reply()
        more.sock.sendall(confirm(peer_no=2))
        check(more.message()[0] == UP, "no UP for the second direction")
        third = Peer(d, hello())
        third.reply()
        third.sock.sendall(confirm(peer_no=2))
        check(third.dropped(), "a third connection of one pair is kept")


def test_silent_peer():
    """A peer that says nothing more is lost after peer_timeout."""
    with daemon("lost", "peer_timeout = 1s\n") as d:
        p = Peer(d).up()
        begin = time.monotonic()
        check(p.dropped(5), "a silent peer is kept")
        check(time.monotonic() - begin > 0.7, "lost too early")
        wait_for("the line of log", lambda: "was silent for 1 s" in d.text())
        expect_counter(d, "lost", 1)


if __name__ == "__main__":
    run_tests(globals())
