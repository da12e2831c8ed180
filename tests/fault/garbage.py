#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Nonsense on the Unix socket and the TCP port while a job runs: each connection is dropped, nothing else notices.
Random bytes, half messages, senders that are slow or silent, lengths that are lies, floods."""
# timeout: 90

import json
import os
import random
import socket
import struct
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_fault import (  # noqa: E402
    BUILD, SCALE, Client, Cluster, Held, Node, Undisturbed, check, run_tests, serves, wait_for,
)

ROOT = os.environ["HREDUCE_ROOT"]


def dial(cluster, i=0):
    s = socket.create_connection((f"127.0.0.{i + 1}", cluster.port), 20)
    s.settimeout(20 * SCALE)
    return s


def closed(s):
    """Whether the daemon closes the connection; what it still says is read."""
    try:
        while s.recv(65536):
            pass
        return True
    except ConnectionError:
        return True
    except socket.timeout:
        return False


def recorded_hello(cluster):
    """The first bytes that a daemon says when it dials another."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.9", cluster.port))
        listener.listen(8)
        listener.settimeout(15 * SCALE)
        rank = cluster.rank(0)
        env = f"127.0.0.9:{cluster.port}"
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("HREDUCE_ROOT_ADDR", env)):
            rank.do(f"env {name} {value}")
        rank.send("name 0 trap 2000 0", thread=True)
        s, _ = listener.accept()
        with s:
            s.settimeout(5 * SCALE)
            time.sleep(0.3)
            hello = s.recv(65536)
        rank.close()
    return hello


def test_tcp_port():
    generator = random.Random(11)
    with Cluster(2) as cluster:
        serves(cluster)
        hello = recorded_hello(cluster)
        check(len(hello) > 16, "a daemon that dials says nothing first")
        print(f"   a hello has {len(hello)} bytes")
        with Undisturbed(cluster) as job:
            for length in (1, 7, 16, 64, 1000, 70000):
                with dial(cluster) as s:
                    try:
                        s.sendall(generator.randbytes(length))
                        s.shutdown(socket.SHUT_WR)
                    except OSError:
                        pass
                    check(closed(s), f"{length} random bytes, and the connection is open")
            job.still()
            # A hello cut anywhere, with each byte wrong, and with more behind it than may be.
            for cut in range(0, len(hello), max(1, len(hello) // 12)):
                with dial(cluster) as s:
                    s.sendall(hello[:cut])
                    s.shutdown(socket.SHUT_WR)
                    check(closed(s), f"{cut} bytes of a hello, and the connection is open")
            for at in range(0, len(hello), max(1, len(hello) // 24)):
                wrong = bytearray(hello)
                wrong[at] ^= 0xff
                with dial(cluster) as s:
                    try:
                        s.sendall(bytes(wrong) + generator.randbytes(100))
                        s.shutdown(socket.SHUT_WR)
                    except OSError:
                        pass
                    check(closed(s), f"byte {at} of a hello was wrong, and the connection is open")
            with dial(cluster) as s:
                try:
                    s.sendall(hello + b"\xff" * 100000)
                    s.shutdown(socket.SHUT_WR)
                except OSError:
                    pass
                check(closed(s), "a hello and lies, and the connection is open")
            job.still()
        serves(cluster)


def test_tcp_port_slowly():
    """Silent and slow ones: dropped after some seconds, however they drip."""
    with Cluster(2) as cluster:
        hello = recorded_hello(cluster)
        with Undisturbed(cluster) as job:
            silent, slow = dial(cluster), dial(cluster, 1)
            begin = time.monotonic()
            for byte in hello[:-1]:
                try:
                    slow.send(bytes([byte]))
                except OSError:
                    break
                if time.monotonic() - begin > 9 * SCALE:
                    break
                time.sleep(9 * SCALE / len(hello))
            check(closed(silent), "a silent connection stays")
            check(closed(slow), "a slow connection stays")
            print(f"   both were dropped {time.monotonic() - begin:.1f} s after they came")
            silent.close()
            slow.close()
            job.still()


def test_tcp_flood():
    """More connections than the daemon accepts strangers; it keeps its descriptors for others and serves on."""
    with Cluster(2) as cluster:
        serves(cluster)
        with Undisturbed(cluster) as job:
            sockets = []
            for _ in range(700):
                try:
                    sockets.append(dial(cluster))
                except OSError:
                    break
            time.sleep(0.3)
            held = cluster.nodes[0].fds()
            print(f"   {len(sockets)} connections made, the daemon has {held} descriptors")
            check(held < 650, "the daemon keeps any number of strangers")
            job.still()
            serves(cluster)
            for s in sockets:
                s.close()
            wait_for("the descriptors to be free", lambda: cluster.nodes[0].fds() < 80, 15)


def test_unix_socket():
    generator = random.Random(12)
    with Cluster(1) as cluster:
        node = cluster.nodes[0]
        serves(cluster)
        held = Held(cluster)
        with Undisturbed(cluster) as job:
            for n in range(300):
                with Client(node, hello=n % 3 != 0) as c:
                    size = generator.choice((0, 1, 15, 16, 17, 40, 64, 300, 5000, 64999))
                    data = bytearray(generator.randbytes(size))
                    if size >= 16 and n % 2:
                        # A header that is right, and a body that is not.
                        struct.pack_into("=HHIQ", data, 0, 0x6872, generator.randrange(0, 22), size, n)
                    fds = [0] * generator.choice((0, 0, 1, 2, 3))
                    try:
                        c.send_raw(bytes(data) or b"\0", fds)
                    except OSError:
                        pass
            job.still()
            clients = [Client(node, hello=False) for _ in range(100)]
            time.sleep(0.2)
            job.still()
            for c in clients:
                c.close()
        held.check()
        serves(cluster)

        def none_left():
            return json.loads(node.ctl("status", "--json").stdout)["clients"]["sessions"] == 0

        wait_for("the sessions of garbage to end", none_left, 10)


def test_two_daemons_one_socket():
    """The second refuses in words and leaves the socket and the job of the first alone; also another one whose
    TCP port is taken."""
    with Cluster(1) as cluster:
        first = cluster.nodes[0]
        with Undisturbed(cluster) as job:
            done = subprocess.run(
                [os.path.join(BUILD, "hreduced"), "--config", first.conf], capture_output=True, text=True, timeout=30 * SCALE
            )
            print(f"   {done.stderr.strip().splitlines()[-1]}")
            check(done.returncode != 0 and first.socket in done.stderr, "the second daemon did not refuse")
            job.still()
            other = Node("port", f"listen = 127.0.0.1\nport = {cluster.port}\n", start=False)
            done = subprocess.run(
                [os.path.join(BUILD, "hreduced"), "--config", other.conf], capture_output=True, text=True, timeout=30 * SCALE
            )
            print(f"   {done.stderr.strip().splitlines()[-1]}")
            check(done.returncode != 0 and str(cluster.port) in done.stderr, "a taken port was not refused")
            job.still()


run_tests(globals())
