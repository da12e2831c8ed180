# SPDX-License-Identifier: MIT
"""Daemons and ranks that a test kills, stops and starves.

    with Cluster(2) as cluster:
        job = Job(cluster, [0, 0, 1, 1])
        job.check()                          # a few all-reduces, every element compared
        job.ranks[0].kill()
        reply = job.ranks[1].ask("wait 0")   # an error: code, sentence, when

Ranks are processes of helper_rank.c. Every limit here is for a loaded machine: how fast something was is
printed, not asserted. Everything is killed when the block is left; daemons must then stop with status 0,
unless the test killed them.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from helper_hreduced import BUILD, SCALE, Client, Daemon, check, run_tests, wait_for  # noqa: E402
from fake_verbs import check_used, line_for  # noqa: E402

__all__ = [
    "BUILD", "SCALE", "Client", "Daemon", "check", "run_tests", "wait_for", "RANK", "SANITIZED", "OK", "MISMATCH",
    "TIMEOUT", "RANK_LOST", "PEER_LOST", "ABORTED", "SUPERSEDED", "DAEMON_LOST", "UNRESPONSIVE", "RESOURCE",
    "REFUSED", "PROTOCOL", "WRONG", "SOON", "LONG", "Rank", "Cluster", "Job", "Undisturbed", "serves", "Node",
    "Held", "tell", "expect",
]

RANK = os.path.join(BUILD, "tests", "fault", "helper_rank")
SANITIZED = bool(os.environ.get("HREDUCE_SANITIZE"))

OK, MISMATCH, TIMEOUT, RANK_LOST, PEER_LOST, ABORTED = 0, 4, 5, 6, 7, 8
SUPERSEDED, DAEMON_LOST, UNRESPONSIVE, RESOURCE, REFUSED, PROTOCOL = 9, 10, 11, 12, 13, 14
WRONG = 100

# Within which an error must come, so that a slow machine fails no test; it is 1 s on an idle one.
SOON = 8
# For calls that must end at all.
LONG = 40


class Reply:
    def __init__(self, line):
        words = line.rstrip("\n").split(" ", 3)
        self.time, self.code = float(words[1]), int(words[2])
        self.text = words[3] if len(words) > 3 else ""

    def __repr__(self):
        return f"{self.code} '{self.text}'"


class Rank:
    """One process. number and name serve messages only."""

    def __init__(self, socket_path, number=0, env=None, prefix=(), preexec=None):
        environment = {**os.environ, "HREDUCE_SOCKET": socket_path, **(env or {})}
        self.number = number
        self.process = subprocess.Popen(
            [*prefix, RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=preexec
        )
        self.tag = 0
        self.replies = {}
        self.lock = threading.Lock()
        threading.Thread(target=self.read, daemon=True).start()

    @property
    def pid(self):
        return self.process.pid

    def slot(self, tag):
        with self.lock:
            return self.replies.setdefault(tag, queue.Queue())

    def read(self):
        for line in self.process.stdout:
            self.slot(int(line.split(" ", 1)[0])).put(Reply(line))

    def send(self, command, thread=False):
        """Starts a command; get() has its answer."""
        self.tag += 1
        self.process.stdin.write(f"{self.tag}{'&' if thread else ''} {command}\n")
        self.process.stdin.flush()
        return self.tag

    def get(self, tag, seconds=LONG):
        try:
            return self.slot(tag).get(timeout=seconds * SCALE)
        except queue.Empty:
            state = "is gone" if self.process.poll() is not None else "lives"
            raise AssertionError(f"rank {self.number} ({state}) gave no answer in {seconds * SCALE} s") from None

    def ask(self, command, seconds=LONG):
        return self.get(self.send(command), seconds)

    def do(self, command, seconds=LONG):
        """A command that must succeed; returns its text."""
        reply = self.ask(command, seconds)
        check(reply.code == OK, f"rank {self.number}: {command[:80]}: {reply}")
        return reply.text

    def kill(self, sig=signal.SIGKILL):
        """Returns when it was sent; after SIGKILL the process is gone and reaped."""
        begin = time.monotonic()
        self.process.send_signal(sig)
        if sig == signal.SIGKILL:
            self.process.wait()
        return begin

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Node(Daemon):
    """One daemon, with room for several communicators unless the test wants less."""

    killed = False

    def configure(self, config):
        if "arena_size" not in config:
            config = "arena_size = 24M\n" + config
        with open(self.conf, "w", encoding="utf-8") as f:
            f.write(f"socket = {self.socket}\nlog_level = info\n{config}")


class Cluster:
    """Daemons on 127.0.0.1, .2, ... with one port."""

    def __init__(self, nnodes, config="", name="n", limits=None, env=None):
        """config, env: of all daemons, or a function of the node's index."""
        # Below the ephemeral ports; by pid, so that suites side by side do not meet.
        self.port = 20000 + (os.getpid() * 16 + Cluster.made) % 12000
        Cluster.made += 1
        self.nodes = []
        self.ranks = []
        for i in range(nnodes):
            own = config(i) if callable(config) else config
            text = f"listen = 127.0.0.{i + 1}\nport = {self.port}\n{own}"
            text += line_for(nnodes, own)
            # The default of 10 s is too near on a machine where sanitized daemons of several suites share a core.
            if "peer_timeout" not in own:
                text += "peer_timeout = 60s\n"
            if "node_name" not in own:
                text += f"node_name = node{i}\n"
            own_env = env(i) if callable(env) else env
            self.nodes.append(Node(f"{name}{Cluster.made}-{i}", text, limits=limits, env=own_env, start=False))
            self.nodes[-1].start(wait=False)
        for node in self.nodes:
            wait_for("a daemon's socket", node.answers, 15)

    made = 0

    def kill(self, i):
        begin = time.monotonic()
        self.nodes[i].kill()
        self.nodes[i].killed = True
        return begin

    def restart(self, i):
        self.nodes[i].start()
        self.nodes[i].killed = False

    def rank(self, node, number=0, **more):
        rank = Rank(self.nodes[node].socket, number, **more)
        self.ranks.append(rank)
        return rank

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        for rank in self.ranks:
            rank.close()
        for i, node in enumerate(self.nodes):
            if kind:
                sys.stderr.write(f"---- daemon {i}\n{node.text()[-2500:]}\n")
                if node.alive():
                    node.process.send_signal(signal.SIGCONT)
                    node.kill()
            elif node.alive():
                node.process.send_signal(signal.SIGCONT)
                status = node.stop(15)
                check(status == 0, f"daemon {i} ended with {status}: {node.text()[-3000:]}")
            else:
                check(node.killed, f"daemon {i} ended by itself: {node.text()[-3000:]}")
        if not kind:
            check_used([node.text() for node in self.nodes])


class Job:
    """Ranks on nodes (a node's index for each rank), joined to one communicator in slot 0 of each process, with
    buffers 0 (input) and 1 (output) of `bytes` and `kind` ("plain" is staged, "alloc" is not copied)."""

    def __init__(self, cluster, where, kind="plain", size=1 << 16, op_ms=0, setup_ms=30000, ranks=None, slot=0, more=""):
        """more: further words of helper_rank's init."""
        self.cluster, self.where, self.slot, self.size, self.more = cluster, where, slot, size, more
        self.kind = kind
        self.ranks = ranks or [cluster.rank(node, i) for i, node in enumerate(where)]
        self.join(op_ms, setup_ms)

    def join(self, op_ms=0, setup_ms=30000):
        ident = self.ranks[0].do("id")
        n = len(self.ranks)
        self.all_do(lambda i: f"init {self.slot} {n} {i} {ident} {setup_ms} {op_ms} {self.more}")
        for b in (0, 1):
            self.all_do(f"buffer {b} {self.kind} {self.size}")

    def send(self, command, thread=False, but=()):
        """{rank: tag}; command is a text, or a function of the rank's number."""
        text = command if callable(command) else lambda i: command
        return {i: r.send(text(i), thread) for i, r in enumerate(self.ranks) if i not in but}

    def get(self, tags, seconds=LONG, but=()):
        return {i: self.ranks[i].get(tag, seconds) for i, tag in tags.items() if i not in but}

    def all(self, command, seconds=LONG, but=()):
        return self.get(self.send(command, but=but), seconds)

    def all_do(self, command, seconds=LONG, but=()):
        for i, reply in self.all(command, seconds, but).items():
            check(reply.code == OK, f"rank {i}: {str(command)[:80]}: {reply}")

    def check(self, n=3, count=5001, seed=1):
        """A few all-reduces, all elements of the results compared."""
        self.all_do(f"ops {self.slot} 0 1 {count} {n} {seed}")

    def loop(self, count=None):
        """All-reduces until one fails; get() has the error."""
        return self.send(f"loop {self.slot} 0 1 {count or self.size // 4}", thread=True)

    def close(self):
        for rank in self.ranks:
            rank.close()


class Undisturbed:
    """A job that runs all the time and whose every result is checked."""

    def __init__(self, cluster):
        self.job = Job(cluster, [n for n in range(len(cluster.nodes)) for _ in (0, 1)])
        self.seed = 1

    def __enter__(self):
        self.start()
        return self

    def start(self):
        self.tags = self.job.send(f"ops 0 0 1 5001 20 {self.seed}", thread=True)
        self.seed += 20

    def over(self):
        """The ops that were posted so far are right, and no more are posted."""
        for i, reply in self.job.get(self.tags).items():
            check(reply.code == OK, f"rank {i} was disturbed: {reply}")

    def still(self):
        """The ops that were posted so far are right; more are posted."""
        self.over()
        self.start()

    def __exit__(self, kind, value, trace):
        if not kind:
            self.still()
            self.job.get(self.tags)
            self.job.close()


def serves(cluster, where=None):
    """The daemons run a new job."""
    job = Job(cluster, where or [i for i in range(len(cluster.nodes)) for _ in (0, 1)])
    job.check()
    job.all_do("destroy 0")
    job.close()


class Held:
    """What a daemon holds while no job runs: descriptors, threads, mappings, memory. Compared later."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.before = self.settle()

    def look(self):
        found = []
        for node in self.cluster.nodes:
            with open(f"/proc/{node.pid}/maps", encoding="utf-8") as maps:
                memfds = sum("/memfd:" in line for line in maps)
            status = json.loads(node.ctl("status", "--json").stdout)
            held = {"threads": len(os.listdir(f"/proc/{node.pid}/task")), "descriptors": node.fds(), "memfds": memfds}
            held |= {key: status["memory"][key] for key in ("arena_used", "arena_reserved", "session_bytes")}
            found.append(held | {"sessions": status["clients"]["sessions"], "comms": len(status["comms"])})
        found.append({"/dev/shm": sorted(os.listdir("/dev/shm"))})
        return found

    def settle(self):
        last = self.look()
        for _ in range(20):
            time.sleep(0.1)
            now = self.look()
            if now == last:
                return now
            last = now
        return last

    def check(self):
        now = []

        def same():
            now[:] = self.look()
            return now == self.before

        try:
            wait_for("", same, 10)
        except AssertionError:
            raise AssertionError(f"something leaked: {self.before} before, {now} afterwards") from None


def tell(what, begin, replies):
    """Prints how long after `begin` the last answer came."""
    print(f"   {what}: last of {len(replies)} after {max(r.time for r in replies.values()) - begin:.3f} s", flush=True)


def expect(replies, code, words=(), begin=None, within=SOON):
    """Every reply is this error, its sentence has all words, it came soon after begin."""
    for i, reply in replies.items():
        codes = code if isinstance(code, tuple) else (code,)
        check(reply.code in codes, f"rank {i}: expected {code}, got {reply}")
        for word in words:
            check(str(word) in reply.text, f"rank {i}: '{word}' is missing in: {reply.text}")
        if begin is not None:
            check(reply.time - begin < within * SCALE, f"rank {i}: the error came after {reply.time - begin:.1f} s")
