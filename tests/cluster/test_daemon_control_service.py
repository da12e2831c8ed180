# SPDX-License-Identifier: MIT
# timeout: 180
"""The daemon as a service: one at a time, restart, notifications, socket activation, reload, stop, idle."""

import json
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import time

from helper_hreduced import (ALLOC, BUILD, CTL, ERROR, HREDUCECTL, HREDUCED, MEMORY, SCALE, SHUTDOWN, TMP, WELCOME,
                             Client, Daemon, check, run_tests, wait_for)

ROOT = os.environ["HREDUCE_ROOT"]


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=20 * SCALE)


def test_configuration():
    printed = output(HREDUCED, "--print-config").stdout
    with open(os.path.join(ROOT, "configs", "hreduced.conf")) as f:
        check(f.read() == printed, "configs/hreduced.conf is not what --print-config prints; make it anew with it")
    with open(os.path.join(ROOT, "daemon", "man", "hreduced.conf.5")) as f:
        check(f.read() == output(HREDUCED, "--print-config=man").stdout,
              "daemon/man/hreduced.conf.5 is not what --print-config=man prints; make it anew with it")
    # Every key, with its default given: no mistakes.
    path = os.path.join(TMP, "all.conf")
    with open(path, "w") as f:
        f.write(re.sub(r"^#(\w+ =)", r"\1", printed, flags=re.M))
    done = output(HREDUCED, "--check-config", "--config", path)
    check(done.returncode == 0 and "no mistakes" in done.stdout, done.stderr)
    with open(path, "w") as f:
        f.write("port = 18515\nprot = 1\n[x]\npeer_timeout = 5\nunit_size = 1Q\n")
    done = output(HREDUCED, "--check-config", "-c", path)
    check(done.returncode == 78, f"exit status {done.returncode}")
    check(f"{path}:2:" in done.stderr and "'port'" in done.stderr, done.stderr)
    check(f"{path}:4:" in done.stderr and "[x]" in done.stderr, done.stderr)
    done = output(HREDUCED, "--config", os.path.join(TMP, "none"))
    check(done.returncode == 78 and "no configuration file" in done.stderr, done.stderr)
    for configs, _, files in os.walk(os.path.join(ROOT, "configs")):
        for name in files:
            if name.endswith(".conf"):
                done = output(HREDUCED, "--check-config", "-c", os.path.join(configs, name))
                check(done.returncode == 0, f"{name}: {done.stderr}")
    check(output(HREDUCED, "--nonsense").returncode == 64, "usage")
    check(output(HREDUCED, "--version").stdout.startswith("hreduced "), "version")


def test_second_daemon():
    with Daemon() as d, Client(d) as c:
        inode = os.stat(d.socket).st_ino
        check(stat.S_IMODE(os.stat(d.socket).st_mode) == 0o660, "the socket's mode")
        begin = time.monotonic()
        done = output(HREDUCED, "--config", d.conf)
        check(done.returncode == 1 and f"process {d.pid}" in done.stderr, done.stderr)
        check(time.monotonic() - begin < 3 * SCALE, "the refusal took long")
        check(os.stat(d.socket).st_ino == inode, "the first daemon's socket was touched")
        m = c.ask(ALLOC, struct.pack("=Q", 4096))
        check(m.type == MEMORY, "the first daemon's client suffers")
        m.close()
    # Something else in the place of the socket is left alone, too.
    d = Daemon(name="file", start=False)
    with open(d.socket, "w") as f:
        f.write("precious")
    done = output(HREDUCED, "--config", d.conf)
    check(done.returncode == 1 and "not a socket" in done.stderr, done.stderr)
    with open(d.socket) as f:
        check(f.read() == "precious", "a file was overwritten")


def test_kill_and_restart():
    d = Daemon()
    for _ in range(20):
        d.kill()
        check(os.path.exists(d.socket), "a killed daemon leaves its socket")
        begin = time.monotonic()
        d.start()
        with Client(d) as c:
            check(c.welcome.type == WELCOME, "no welcome after a restart")
        check(time.monotonic() - begin < 2 * SCALE, "a restart took longer than 2 s")
    check(d.stop() == 0 and not os.path.exists(d.socket), "the socket is still there after a stop")


class Notifications:
    """The socket of NOTIFY_SOCKET."""

    def __init__(self):
        self.path = os.path.join(TMP, "n")
        if os.path.exists(self.path):
            os.unlink(self.path)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.path)

    def next(self, word, seconds=5):
        """The first message with this word; what comes before it is dropped."""
        end = time.monotonic() + seconds * SCALE
        while True:
            self.sock.settimeout(max(end - time.monotonic(), 0.01))
            try:
                text = self.sock.recv(4096).decode()
            except socket.timeout:
                raise AssertionError(f"no {word} within {seconds} s")
            if word in text.split("\n") or any(line.startswith(word) for line in text.split("\n")):
                return text

    def drain(self):
        self.sock.setblocking(False)
        try:
            while True:
                self.sock.recv(4096)
        except BlockingIOError:
            pass


def test_notifications():
    n = Notifications()
    d = Daemon(env={"NOTIFY_SOCKET": n.path, "WATCHDOG_USEC": "300000"}, start=False)
    d.start(wait=False)
    check("STATUS=" in n.next("READY=1", 10), "READY without a status")
    for _ in range(3):
        n.next("WATCHDOG=1", 2)
    before = time.monotonic_ns() // 1000
    d.configure("max_sessions = 5\nthreads = 1\n")
    d.process.send_signal(signal.SIGHUP)
    text = n.next("RELOADING=1")
    stamp = int(re.search(r"MONOTONIC_USEC=(\d+)", text).group(1))
    check(before <= stamp <= time.monotonic_ns() // 1000, "RELOADING without its time")
    n.next("READY=1")
    check(json.loads(d.ctl("status", "--json").stdout)["clients"]["max_sessions"] == 5, "the new value is not in force")
    if os.cpu_count() > 1:
        check("threads was changed" in d.text(), "a key that needs a restart is not named")
    # A mistake in the file changes nothing and ends in READY as well.
    d.configure("max_sessions = banana\n")
    d.process.send_signal(signal.SIGHUP)
    n.next("RELOADING=1")
    n.next("READY=1")
    check("banana" in d.text(), "the mistake is not named")
    check(json.loads(d.ctl("status", "--json").stdout)["clients"]["max_sessions"] == 5, "a mistake changed something")
    with Client(d):
        check("1 process" in n.next("STATUS=serving", 5), "the status text")
    check("<5>" in d.text() or "<6>" in d.text(), "no priorities in the log under systemd")
    d.process.send_signal(signal.SIGTERM)
    n.next("STOPPING=1")
    check(d.process.wait(8 * SCALE) == 0, "exit status")


def test_systemd_that_does_not_read():
    """The notification socket is full: the daemon serves on, and stops in time."""
    n = Notifications()
    d = Daemon(env={"NOTIFY_SOCKET": n.path, "WATCHDOG_USEC": "60000"}, start=False)
    d.start(wait=False)
    n.next("READY=1", 10)
    time.sleep(2)  # a hundred WATCHDOG=1, and the queue has room for a few
    begin = time.monotonic()
    with Client(d) as c:
        check(c.welcome.type == WELCOME, "no welcome")
    check(d.stop() == 0, "exit status")
    check(time.monotonic() - begin < 4 * SCALE, "the daemon hangs on its notifications")


def test_watchdog_is_the_agents():
    """A daemon whose agent stands still is not alive, although its loop is."""
    n = Notifications()
    d = Daemon(env={"NOTIFY_SOCKET": n.path, "WATCHDOG_USEC": "300000"}, start=False)
    d.start(wait=False)
    n.next("WATCHDOG=1", 10)
    stopped = freeze_threads_but_main(d.pid)
    if not stopped:
        d.kill()
        print("   (left out: single threads cannot be stopped here)")
        return
    try:
        time.sleep(3)
        n.drain()
        try:
            n.next("WATCHDOG=1", 2)
        except AssertionError:
            pass
        else:
            raise AssertionError("the watchdog is fed beside a stuck agent")
        with Client(d, flags=CTL) as c:
            c.send(17 + 1, struct.pack("=I", 0))
            m = c.receive()
            check(m.type == ERROR and "stuck" in m.text, "STATUS with a stuck agent")
    finally:
        for tracer in stopped:
            tracer.kill()
            tracer.wait()
        d.kill()


def freeze_threads_but_main(pid):
    """One helper process a thread attaches with ptrace and holds it."""
    script = ("import ctypes, sys, time\n"
              "libc = ctypes.CDLL(None, use_errno=True)\n"
              "if libc.ptrace(0x4206, int(sys.argv[1]), None, None) or libc.ptrace(0x4207, int(sys.argv[1]), None, None):\n"
              "    sys.exit('ptrace')\n"
              "print('held', flush=True)\n"
              "time.sleep(60)\n")
    tracers = []
    for tid in os.listdir(f"/proc/{pid}/task"):
        if int(tid) == pid:
            continue
        tracer = subprocess.Popen(["/usr/bin/python3", "-c", script, tid], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        tracers.append(tracer)
        if tracer.stdout.readline() != b"held\n":
            for t in tracers:
                t.kill()
                t.wait()
            return []
    return tracers


def activated(kind, d):
    """Starts the daemon as systemd would, with a listening socket as descriptor 3."""
    listener = socket.socket(socket.AF_UNIX, kind)
    if os.path.exists(d.socket):
        os.unlink(d.socket)
    listener.bind(d.socket)
    listener.listen(16)
    with open(d.log, "a") as log:
        d.process = subprocess.Popen(
            ["/bin/sh", "-c", f'exec 3<&{listener.fileno()}; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" --config "$1"', HREDUCED,
             d.conf], pass_fds=[listener.fileno()], stderr=log)
    return listener


def test_socket_activation():
    d = Daemon(start=False)
    with activated(socket.SOCK_SEQPACKET, d) as listener:
        # Connected before the daemon is there: waits, as after a restart.
        with Client(d) as c:
            check(c.welcome.type == WELCOME, "no welcome through an activated socket")
            check("(from systemd)" in d.text(), "the log does not say where the socket is from")
        # A daemon started by hand beside it keeps its hands off.
        done = output(HREDUCED, "--config", d.conf)
        check(done.returncode == 1 and "listens on" in done.stderr, done.stderr)
        check(d.stop() == 0 and os.path.exists(d.socket), "systemd's socket was removed")
        done = output(HREDUCED, "--config", d.conf)
        check(done.returncode == 1 and "listens on" in done.stderr, "started beside systemd's socket: " + done.stderr)
        listener.close()
    with activated(socket.SOCK_STREAM, d):
        check(d.process.wait(10 * SCALE) == 1 and "ListenSequentialPacket" in d.text(), "a stream socket was taken")


def test_stop_with_clients():
    d = Daemon()
    with Client(d) as c, Client(d, hello=False) as late:
        begin = time.monotonic()
        d.process.send_signal(signal.SIGTERM)
        m = c.receive()
        check(m is not None and m.type == ERROR and m.status == SHUTDOWN and m.cookie == 0, "no farewell")
        check("stopping" in m.text, m.text)
        check(c.dropped(), "the session lives on")
        check(late.dropped(), "a connection without HELLO lives on")
        check(d.process.wait(8 * SCALE) == 0, "exit status")
        check(time.monotonic() - begin < 3 * SCALE, "a stop took longer than 3 s")


def test_signals_at_start():
    """From the moment that its socket is there, signals mean what they mean later."""
    for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) * 3:
        d = Daemon(start=False)
        d.start(wait=False)
        deadline = time.monotonic() + 10 * SCALE
        while not d.answers():
            check(time.monotonic() < deadline, "no socket: " + d.text())
        d.process.send_signal(sig)
        if sig == signal.SIGHUP:
            with Client(d) as c:
                check(c.welcome.type == WELCOME, "no welcome after SIGHUP: " + d.text())
            check(d.stop() == 0, "exit status after SIGHUP")
        else:
            check(d.process.wait(10 * SCALE) == 0, f"{sig.name}: exit status {d.process.returncode}: {d.text()}")
        check(not os.path.exists(d.socket), f"{sig.name} left the socket there")


def test_idle():
    """No processor time, no entry in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    with Daemon() as d:
        clients = [Client(d) for _ in range(8)]
        for c in clients:
            c.ask(ALLOC, struct.pack("=Q", 1 << 20)).close()
        time.sleep(0.3)
        ticks, begin = d.cpu_ticks(), time.monotonic()
        time.sleep(4)
        share = (d.cpu_ticks() - ticks) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - begin)
        check(share < 0.01 * SCALE, f"an idle daemon takes {share:.1%} of a core")
        check(set(os.listdir("/dev/shm")) <= before, "something appeared in /dev/shm")
        with open(f"/proc/{d.pid}/maps") as f:
            check("/dev/shm" not in f.read(), "/dev/shm is mapped")
        for c in clients:
            c.close()


def test_ctl():
    d = Daemon(start=False)
    done = d.ctl("status", check_status=False)
    check(done.returncode == 2 and d.socket in done.stderr and "systemctl start" in done.stderr, done.stderr)
    d.start()
    text = d.ctl("status").stdout
    check("hreduced " in text and "not authenticated" in text and d.socket in text, text)
    with Client(d):
        row = [line for line in d.ctl("status").stdout.splitlines() if f"{os.getpid()}" in line]
        check(len(row) == 1 and "python3" in row[0], "no row for this process")
    check("no communicators" in d.ctl("path").stdout, "path without communicators")
    check(json.loads(d.ctl("path", "--json").stdout)["paths"] == [], "path --json")
    version = json.loads(d.ctl("version", "--json").stdout)
    check(version["hreduced"] == version["hreducectl"], f"{version}")
    check(d.ctl("frobnicate", check_status=False).returncode == 64, "an unknown command")
    check(d.ctl("status", "extra", check_status=False).returncode == 64, "an argument too many")
    environment = dict(os.environ, HREDUCE_SOCKET=d.socket)
    check(subprocess.run([HREDUCECTL, "version"], env=environment, capture_output=True).returncode == 0, "HREDUCE_SOCKET")
    d.process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    done = d.ctl("status", check_status=False)
    check(done.returncode == 2 and "did not answer" in done.stderr, done.stderr)
    check(4 < time.monotonic() - begin < 7 * SCALE, "not after 5 s")
    d.process.send_signal(signal.SIGCONT)
    check(d.stop() == 0, "exit status")
    d.kill()
    done = d.ctl("status", check_status=False)
    check(done.returncode == 2, done.stderr)


def test_log_reader_that_is_stuck():
    """Nobody reads standard error: the daemon serves on."""
    d = Daemon(start=False)
    reader, writer = os.pipe()
    d.process = subprocess.Popen([HREDUCED, "--config", d.conf], stderr=writer)
    wait_for("the daemon", d.answers, 10)
    for _ in range(600):
        with Client(d) as c:
            check(c.welcome.type == WELCOME, "no welcome with a full log")
    os.set_blocking(reader, False)
    os.read(reader, 1 << 20)
    with Client(d):
        pass
    check(d.stop() == 0, "exit status")
    check(b"log lines lost" in os.read(reader, 1 << 20), "lost lines are not counted")
    os.close(reader)
    os.close(writer)


if __name__ == "__main__":
    assert BUILD
    run_tests(globals())
