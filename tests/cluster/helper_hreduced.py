# SPDX-License-Identifier: MIT
"""For tests of the daemon itself: starts one, and speaks proto/wire.h to it byte by byte, so that a test can also
say what libhclient never would."""

import os
import signal
import socket
import struct
import subprocess
import sys
import time

BUILD = os.environ["HREDUCE_BUILD"]
HREDUCED = os.path.join(BUILD, "hreduced")
HREDUCECTL = os.path.join(BUILD, "hreducectl")
TMP = os.environ["TMPDIR"]
SCALE = float(os.environ.get("HREDUCE_TIME_SCALE", "1"))

HELLO, WELCOME, ERROR, GET_ID, ID, JOIN, JOINED, LEAVE, ABORT, WINDOW = range(1, 11)
ALLOC, MEMORY, IMPORT, REGISTERED, FREE, DONE, PATH, STATUS, TEXT = range(11, 20)
MAGIC = 0x6872
ABI = 1 << 16
CTL = 1
HEADER = struct.Struct("=HHIQ")

# enum hrp_status
INVALID_ARGUMENT, UNRESPONSIVE, RESOURCE, REFUSED, PROTOCOL, VERSION, SHUTDOWN = 2, 11, 12, 13, 14, 15, 17


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def wait_for(what, condition, seconds=5):
    end = time.monotonic() + seconds * SCALE
    while not condition():
        check(time.monotonic() < end, f"waited in vain for: {what}")
        time.sleep(0.01)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Daemon:
    """One hreduced with a socket, port and log file of its own."""

    def __init__(self, name="d", config="", limits=None, env=None, pass_fds=(), start=True):
        self.dir = os.path.join(TMP, name)
        os.makedirs(self.dir, exist_ok=True)
        self.socket = os.path.join(self.dir, "s")
        self.conf = os.path.join(self.dir, "conf")
        self.log = os.path.join(self.dir, "log")
        self.limits, self.env, self.pass_fds = limits, env or {}, pass_fds
        self.process = None
        self.configure(config)
        if start:
            self.start()

    def configure(self, config):
        text = f"socket = {self.socket}\narena_size = 4M\nlog_level = debug\n"
        if "port" not in config:
            text += f"port = {free_port()}\n"
        with open(self.conf, "w") as f:
            f.write(text + config)

    def start(self, wait=True):
        environment = {k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID")}
        environment.update(self.env)
        with open(self.log, "a") as log:
            self.process = subprocess.Popen([HREDUCED, "--config", self.conf], stderr=log, stdout=log, env=environment,
                                            preexec_fn=self.limits, pass_fds=self.pass_fds)
        if wait:
            wait_for("the daemon's socket", self.answers, 10)
        return self

    def answers(self):
        check(self.process.poll() is None, f"the daemon ended: {self.text()}")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
                s.connect(self.socket)
            return True
        except OSError:
            return False

    @property
    def pid(self):
        return self.process.pid

    def fds(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def cpu_ticks(self):
        with open(f"/proc/{self.pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    def alive(self):
        return self.process.poll() is None

    def text(self):
        with open(self.log) as f:
            return f.read()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self, seconds=8):
        """SIGTERM; returns the exit status."""
        if self.process is None or self.process.poll() is not None:
            return None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds * SCALE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the daemon did not stop in {seconds} s: {self.text()}")

    def ctl(self, *arguments, check_status=True):
        done = subprocess.run([HREDUCECTL, "--socket", self.socket, *arguments], capture_output=True, text=True,
                              timeout=30 * SCALE)
        if check_status:
            check(done.returncode == 0, f"hreducectl {arguments}: {done.stderr}")
        return done

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if self.process is None or self.process.poll() is not None:
            return
        if kind:
            sys.stderr.write(self.text())
            self.kill()
        else:
            check(self.stop() == 0, f"the daemon's exit status: {self.text()}")


class Message:
    def __init__(self, data, fds):
        self.magic, self.type, self.length, self.cookie = HEADER.unpack_from(data)
        self.body = data[HEADER.size:]
        self.fds = fds

    def close(self):
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    # ERROR
    @property
    def status(self):
        return struct.unpack_from("=I", self.body)[0]

    @property
    def text(self):
        return self.body[8:].decode()


class Client:
    """A connection. hello=False: nothing is said yet."""

    def __init__(self, daemon, hello=True, flags=0, timeout=10):
        self.cookie = 0
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(timeout * SCALE)
        self.sock.connect(daemon if isinstance(daemon, str) else daemon.socket)
        self.welcome = None
        if hello:
            self.welcome = self.hello(flags)

    def hello(self, flags=0, abi=ABI, pid=None):
        pidfd = os.pidfd_open(pid or os.getpid())
        try:
            self.send(HELLO, struct.pack("=IIiI", abi, flags, os.getpid(), 0), [pidfd])
        finally:
            os.close(pidfd)
        return self.receive()

    def send(self, kind, body=b"", fds=(), cookie=None):
        if cookie is None:
            self.cookie += 1
            cookie = self.cookie
        self.send_raw(HEADER.pack(MAGIC, kind, HEADER.size + len(body), cookie) + body, fds)

    def send_raw(self, data, fds=()):
        if fds:
            socket.send_fds(self.sock, [data], list(fds))
        else:
            self.sock.send(data)

    def receive(self):
        """The next message, or None when the daemon closed the connection."""
        try:
            data, fds, flags, _ = socket.recv_fds(self.sock, 70000, 8)
        except ConnectionResetError:
            return None
        check(not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC), "a truncated message")
        return Message(data, fds) if data else None

    def ask(self, kind, body=b"", fds=()):
        self.send(kind, body, fds)
        return self.receive()

    def dropped(self):
        """Whether the daemon ends the session; what it still says is read."""
        while True:
            try:
                message = self.receive()
            except socket.timeout:
                return False
            if message is None:
                return True
            message.close()

    def status(self):
        """The status document as text."""
        self.send(STATUS, struct.pack("=I", 0))
        text = b""
        while True:
            m = self.receive()
            check(m is not None and m.type == TEXT, "no answer to STATUS")
            text += m.body[8:]
            if not struct.unpack_from("=I", m.body)[0]:
                return text.decode()

    def close(self):
        self.sock.close()
        if self.welcome:
            self.welcome.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def run_tests(module):
    """Runs every function test_* in the order of the file."""
    if not os.access(HREDUCED, os.X_OK):
        print("SKIP: hreduced is not built")
        sys.exit(77)
    for name, function in list(module.items()):
        if name.startswith("test_"):
            begin = time.monotonic()
            function()
            print(f"ok {name} ({time.monotonic() - begin:.1f} s)", flush=True)
