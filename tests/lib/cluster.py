# SPDX-License-Identifier: MIT
"""Daemons and ranks of one test, for tests in Python; what tests/lib/harness.h is for tests in C.

    with Cluster(2, ["arena_size = 16M"]) as cluster:
        ranks = cluster.ranks(4, [program, "argument"])
        cluster.wait(ranks, 30)

Everything is killed and removed when the block is left. A daemon that does not end by itself with status 0
then fails the test, unless the test killed it. Times are in seconds and longer under sanitizers.
"""

import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time

BUILD = os.environ.get("HREDUCE_BUILD", os.path.join(os.path.dirname(__file__), "..", "..", "build"))
# Every daemon of the test exchanges over verbs or not at all: see fake_verbs.py.
VERBS = os.environ.get("HREDUCE_TEST_TRANSPORT") == "verbs"
SCALE = int(os.environ.get("HREDUCE_TIME_SCALE", "1"))
PR_SET_PDEATHSIG = 1


def die_with_parent():
    """Between fork and exec: whatever happens to the test, its processes end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def wait_for(condition, seconds, what):
    """Calls condition until it is true and returns its value."""
    end = time.monotonic() + seconds * SCALE
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"waited {seconds * SCALE} s in vain for {what}"
        time.sleep(0.01)


def free_port(addresses):
    """A port below the ephemeral range that is free on all of the addresses."""
    for _ in range(200):
        port = random.randrange(20000, 32000)
        sockets = []
        try:
            for address in addresses:
                s = socket.socket()
                sockets.append(s)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.bind((address, port))
                s.listen(1)
            return port
        except OSError:
            continue
        finally:
            for s in sockets:
                s.close()
    raise AssertionError("no TCP port is free")


class Node:
    """One daemon."""

    def __init__(self, root, index, port, keys):
        self.index = index
        self.address = f"127.0.0.{index + 1}"
        self.directory = os.path.join(root, str(index))
        self.socket = os.path.join(self.directory, "s")
        self.config = os.path.join(self.directory, "hreduced.conf")
        self.log_path = os.path.join(self.directory, "log")
        self.process = None
        self.killed = False
        os.mkdir(self.directory)
        lines = {"socket": self.socket, "listen": self.address, "port": port, "node_name": f"node{index}"}
        lines.update(tuple(word.strip() for word in key.split("=", 1)) for key in keys)
        with open(self.config, "w", encoding="utf-8") as config:
            config.writelines(f"{key} = {value}\n" for key, value in lines.items())

    @property
    def pid(self):
        return self.process.pid

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as log:
            return log.read()

    def launch(self):
        self.killed = False
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [os.path.join(BUILD, "hreduced"), "--config", self.config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def accepts(self):
        assert self.process.poll() is None, f"the daemon of node {self.index} ended: {self.log()[-1000:]}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            try:
                s.connect(self.socket)
                return True
            except OSError:
                return False

    def start(self):
        self.launch()
        wait_for(self.accepts, 15, f"the socket of node {self.index}")

    def kill(self, sig=signal.SIGKILL):
        """Sends a signal; after SIGKILL the daemon is gone when this returns."""
        self.process.send_signal(sig)
        if sig == signal.SIGKILL:
            self.killed = True
            self.process.wait()

    def status(self):
        return json.loads(self.ctl("status", "--json"))

    def ctl(self, *words):
        return subprocess.run(
            [os.path.join(BUILD, "hreducectl"), "--socket", self.socket, *words],
            check=True,
            capture_output=True,
            text=True,
            timeout=20 * SCALE,
        ).stdout


class Cluster:
    def __init__(self, nnodes, keys=(), node_keys=None):
        """keys: configuration lines of every daemon; node_keys: {index: lines} of single ones."""
        self.root = tempfile.mkdtemp(prefix="hreduce-", dir=os.environ.get("TMPDIR", "/tmp"))
        port = free_port([f"127.0.0.{i + 1}" for i in range(nnodes)])
        self.port = port
        extra = node_keys or {}
        if VERBS and nnodes > 1 and not any("transport" in key for key in keys):
            keys = [*keys, "transport = verbs"]
        self.nodes = [Node(self.root, i, port, [*keys, *extra.get(i, [])]) for i in range(nnodes)]
        self.started = []

    def __enter__(self):
        try:
            for node in self.nodes:
                node.launch()
            for node in self.nodes:
                wait_for(node.accepts, 15, f"the socket of node {node.index}")
        except BaseException:
            self.stop(check=False)
            raise
        return self

    def __exit__(self, kind, value, traceback):
        self.stop(check=kind is None)

    def ranks(self, nranks, command, node_of_rank=None, env=None):
        """Starts a process a rank with torchrun's variables. Returns the list of subprocess.Popen."""
        per_node = -(-nranks // len(self.nodes))
        where = node_of_rank or [r // per_node for r in range(nranks)]
        processes = []
        for rank in range(nranks):
            variables = {
                "HREDUCE_SOCKET": self.nodes[where[rank]].socket,
                "RANK": str(rank),
                "WORLD_SIZE": str(nranks),
                "LOCAL_RANK": str(where[:rank].count(where[rank])),
                "MASTER_ADDR": self.nodes[where[0]].address,
                "TORCHELASTIC_RUN_ID": os.path.basename(self.root),
                "LD_LIBRARY_PATH": BUILD,
            }
            processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **variables, **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    preexec_fn=die_with_parent,
                )
            )
        self.started += processes
        return processes

    @staticmethod
    def wait(processes, seconds, check=True):
        """Outputs of the ranks; each must end with status 0 (check) in this time."""
        end = time.monotonic() + seconds * SCALE
        outputs = []
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
            outputs.append(output)
            if check:
                assert process.returncode == 0, f"rank {rank} ended with {process.returncode}: {output[-1500:]}"
        return outputs

    def stop(self, check=True):
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
        problems = []
        running = [n for n in self.nodes if n.process is not None]
        for node in running:
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGTERM)
                node.process.send_signal(signal.SIGCONT)
        for node in running:
            try:
                status = node.process.wait(timeout=15 * SCALE)
            except subprocess.TimeoutExpired:
                node.process.kill()
                status = node.process.wait()
                problems.append(f"node {node.index} did not stop: {node.log()[-1000:]}")
            if status != 0 and not node.killed:
                problems.append(f"node {node.index} ended with {status}: {node.log()[-1000:]}")
        shutil.rmtree(self.root, ignore_errors=True)
        assert not (check and problems), "; ".join(problems)
