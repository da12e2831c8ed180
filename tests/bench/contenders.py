# SPDX-License-Identifier: MIT
"""How compare runs each contender on emulated hosts. Every run returns {bytes: result}; a result has time_us, p99_us
and wrong, and tx_bytes (of each node's interface, for one op) where that was measured. A run that fails raises
RunError."""

import json
import os
import shlex
import signal
import subprocess
import time

import netns

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HERE = os.path.dirname(os.path.abspath(__file__))
MEBI = 1 << 20


class RunError(Exception):
    """Why a run gave no numbers."""


class Shape:
    """Nodes x ranks on hosts, how ranks are dealt, and how fast the links are."""

    def __init__(self, name, nodes, ranks, round_robin=False, rate=None):
        self.name, self.nodes, self.ranks, self.round_robin, self.rate = name, nodes, ranks, round_robin, rate

    @property
    def size(self):
        return self.nodes * self.ranks

    def place(self, rank):
        """(node, local rank) of a rank."""
        if self.round_robin:
            return rank % self.nodes, rank // self.nodes
        return rank // self.ranks, rank % self.ranks

    def ideal(self, size_bytes):
        """Bytes a node has to send."""
        return 2 * (self.nodes - 1) * size_bytes // self.nodes


class Bench:
    """One shape's hosts and what all contenders need to run there."""

    def __init__(self, shape, cluster, work, options):
        self.shape, self.cluster, self.work, self.o = shape, cluster, work, options
        self.serial = 0
        self.interface = netns.INTERFACE if shape.nodes > 1 else None
        self.agent = os.path.join(work, "agent")
        self._write_agent()
        self.hostfile = os.path.join(work, "hosts")
        with open(self.hostfile, "w", encoding="ascii") as f:
            for a in cluster.addresses():
                f.write(f"{a} slots={shape.ranks}\n")

    def _write_agent(self):
        """What mpirun starts in place of ssh."""
        lines = ["#!/bin/sh", "host=$1; shift", "case $host in"]
        for host, addr in zip(self.cluster.hosts, self.cluster.addresses()):
            lines.append(f'{addr}) exec {shlex.join(host.enter(["sh", "-c"]))} "$*" ;;')
        lines += ["esac", 'echo "agent: unknown host $host" >&2; exit 1', ""]
        with open(self.agent, "w", encoding="ascii") as f:
            f.write("\n".join(lines))
        os.chmod(self.agent, 0o755)

    def build(self, name):
        return os.path.join(self.o.build, name)

    def ranks(self, argv, env, timeout, first_env=None):
        """Runs argv once a rank under torchrun's variables; returns rank 0's standard output."""
        self.serial += 1
        procs = []
        try:
            for rank in range(self.shape.size):
                node, local = self.shape.place(rank)
                vars_ = {"RANK": rank, "WORLD_SIZE": self.shape.size, "LOCAL_RANK": local,
                         "LOCAL_WORLD_SIZE": self.shape.ranks, "MASTER_ADDR": netns.address(0),
                         "MASTER_PORT": 20000 + self.serial, "TORCHELASTIC_RUN_ID": f"{os.getpid()}-{self.serial}"}
                vars_.update(env(node))
                if rank == 0 and first_env:
                    vars_.update(first_env)
                full = dict(os.environ, **{k: str(v) for k, v in vars_.items()})
                err = open(os.path.join(self.work, f"rank{rank}.err"), "w", encoding="utf-8")
                procs.append(self.cluster.hosts[node].popen(
                    argv(rank), env=full, stdin=subprocess.DEVNULL, stderr=err, text=True,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL))
                err.close()
            return self._collect(procs, timeout)
        finally:
            self._end(procs)

    def _collect(self, procs, timeout):
        deadline = time.monotonic() + timeout
        try:
            out = procs[0].communicate(timeout=timeout)[0]
            for p in procs:
                p.wait(timeout=max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RunError(f"not finished after {timeout:.0f} s") from None
        for rank, p in enumerate(procs):
            if p.returncode:
                with open(os.path.join(self.work, f"rank{rank}.err"), encoding="utf-8", errors="replace") as f:
                    text = f.read().strip().splitlines()
                raise RunError(f"rank {rank}: exit status {p.returncode}: {' / '.join(text[-3:])}")
        return out

    @staticmethod
    def _end(procs):
        for p in procs:
            if p.poll() is None:
                p.kill()
        for p in procs:
            p.wait()
            if p.stdout:
                p.stdout.close()

    def timeout(self, sizes):
        """Generous: what hangs is ended, what is slow is measured."""
        slow = 8 if self.shape.rate else 1
        return 60 + self.shape.size + sum(6 * self.o.seconds + slow * s * self.shape.size / (64 * MEBI) for s in sizes)

    def sent(self):
        return [h.counter() for h in self.cluster.hosts]


# ---- hreduce -----------------------------------------------------------------------------------------------


class Hreduce:
    """The daemons of one shape, and hreduce-perf beside them."""

    def __init__(self, bench):
        self.b = bench
        self.daemons = []
        self.guess = {}
        for i, host in enumerate(bench.cluster.hosts):
            config, log = self._path(i, "conf"), open(self._path(i, "log"), "w", encoding="utf-8")
            lines = {"socket": self._path(i, "sock"), "listen": netns.address(i), "port": 18515,
                     "node_name": f"node{i}", "tcp_streams": bench.o.streams}
            if bench.shape.nodes == 1:
                lines["listen"] = "127.0.0.1"
            lines.update(kv.split("=", 1) for kv in bench.o.daemon_config)
            with open(config, "w", encoding="utf-8") as f:
                f.writelines(f"{k} = {v}\n" for k, v in lines.items())
            self.daemons.append(host.popen([bench.build("hreduced"), "--config", config], stdin=subprocess.DEVNULL,
                                           stdout=log, stderr=log))
            log.close()
        self._wait_ready()

    def _path(self, node, what):
        return os.path.join(self.b.work, f"d{node}.{what}")

    def _wait_ready(self):
        deadline = time.monotonic() + 20
        for i, p in enumerate(self.daemons):
            while not os.path.exists(self._path(i, "sock")):
                if p.poll() is not None or time.monotonic() > deadline:
                    with open(self._path(i, "log"), encoding="utf-8", errors="replace") as f:
                        raise RunError(f"hreduced {i} did not start: {f.read().strip()[-500:]}")
                time.sleep(0.02)

    def pid(self, node):
        """Of the daemon as this machine sees it: the only child of its nsenter."""
        p = self.daemons[node].pid
        with open(f"/proc/{p}/task/{p}/children", encoding="ascii") as f:
            return int(f.read().split()[0])

    def env(self, node):
        """What ranks on that node need to find the daemons."""
        return {"HREDUCE_SOCKET": self._path(node, "sock"),
                "MASTER_ADDR": netns.address(0) if self.b.shape.nodes > 1 else "127.0.0.1"}

    def perf(self, size, iters, memory, check, extra=()):
        out = os.path.join(self.b.work, "perf.json")
        if os.path.exists(out):
            os.unlink(out)
        argv = [self.b.build("hreduce-perf"), "-b", str(size), "-e", str(size), "-n", str(iters), "-w", "3", "-c",
                str(check), "--memory", memory, "-T", "60", *extra]
        self.b.ranks(lambda rank: argv + (["--json", out] if rank == 0 else []), self.env, self.b.timeout([size] * 4))
        with open(out, encoding="utf-8") as f:
            return json.load(f)

    def iters(self, size, memory):
        us = self.guess.get((size, memory), 300 + size / 100)
        return max(5, min(300, int(1e6 * self.b.o.seconds / us)))

    def run(self, sizes, memory, check):
        out = {}
        for size in sizes:
            doc = self.perf(size, self.iters(size, memory), memory, check)
            r = next(r for r in doc["results"] if r["inplace"])
            self.guess[(size, memory)] = r["time_us"]
            out[size] = {"time_us": r["time_us"], "p99_us": r["p99_us"],
                         "wrong": sum(r["wrong"] for r in doc["results"]), "counted": r["wire_tx_bytes"]}
        return out

    def wire(self, size):
        """Bytes each node's interface sends for one op: the difference of two runs that differ in ops alone."""
        few, more = 4, 14
        sent = []
        for n in (few, more):
            before = self.b.sent()
            self.perf(size, n, "hclient", 0)
            sent.append([b - a for a, b in zip(before, self.b.sent())])
        # Each run makes the ops out of place and again in place.
        return [(b - a) // (2 * (more - few)) for a, b in zip(*sent)]

    def close(self):
        for p in self.daemons:
            if p.poll() is None:
                p.send_signal(signal.SIGTERM)
        for i, p in enumerate(self.daemons):
            try:
                p.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.b.cluster.hosts[i].kill_all()
                p.wait()


# ---- Open MPI ----------------------------------------------------------------------------------------------

_OB1 = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self,vader", "--mca", "btl_tcp_if_include",
        f"{netns.SUBNET}.0/24"]
_UCX = ["--mca", "pml", "ucx", "--mca", "opal_common_ucx_tls", "any", "--mca", "opal_common_ucx_devices", "any",
        "-x", "UCX_TLS=tcp,sm,self", "-x", f"UCX_NET_DEVICES={netns.INTERFACE}"]


def _algorithm(n, *more):
    return ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", str(n), *more]


_HAN = ["--mca", "coll_han_priority", "100", *(w for what in ("allreduce", "reduce", "bcast")
                                               for w in ("--mca", f"coll_han_use_simple_{what}", "1"))]

OMPI = {
    "ompi": _OB1,
    "ompi-raben": _OB1 + _algorithm(6),
    "ompi-segring": _OB1 + _algorithm(5, "--mca", "coll_tuned_allreduce_algorithm_segmentsize", "131072"),
    "ompi-ring": _OB1 + _algorithm(4),
    "ompi-han": _OB1 + _HAN,
    "ompi-ucx": _UCX,
    "ompi-ucx-raben": _UCX + _algorithm(6),
}


def mpi(bench, flags, sizes):
    argv = ["nsenter", "-t", str(bench.cluster.switch.pid), "-n", "--", "mpirun", "--allow-run-as-root",
            "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "--mca", "plm_rsh_agent",
            bench.agent, "--mca", "oob_tcp_if_include", f"{netns.SUBNET}.0/24", "--mca", "orte_tmpdir_base", bench.work,
            "--hostfile", bench.hostfile, "-np", str(bench.shape.size), "--map-by",
            "node" if bench.shape.round_robin else "slot", *flags, bench.build("tests/bench/allreduce_mpi"),
            ",".join(map(str, sizes)), str(bench.o.seconds), *([bench.interface] if bench.interface else [])]
    proc = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            preexec_fn=netns.die_with_parent, start_new_session=True, cwd=bench.work,
                            env=dict(os.environ, TMPDIR=bench.work))
    try:
        out, err = proc.communicate(timeout=bench.timeout(sizes))
    except subprocess.TimeoutExpired:
        raise RunError(f"not finished after {bench.timeout(sizes):.0f} s") from None
    finally:
        if proc.poll() is None:
            os.killpg(proc.pid, signal.SIGKILL)
            proc.communicate()
    if proc.returncode:
        raise RunError(f"exit status {proc.returncode}: {' / '.join(err.strip().splitlines()[-3:])}")
    return _lines(out)


def _lines(text):
    out = {}
    for line in text.splitlines():
        if line.startswith("{"):
            r = json.loads(line)
            out[r["bytes"]] = r
    if not out:
        raise RunError("no result in its output")
    return out


# ---- gloo, the floor ---------------------------------------------------------------------------------------


def gloo(bench, sizes):
    argv = [bench.o.python, os.path.join(HERE, "allreduce_gloo.py"), ",".join(map(str, sizes)), str(bench.o.seconds)]
    if bench.interface:
        argv.append(bench.interface)
    first = bench.interface or "lo"
    return _lines(bench.ranks(lambda rank: argv,
                              lambda node: {"GLOO_SOCKET_IFNAME": first, "OMP_NUM_THREADS": 1},
                              bench.timeout(sizes) + 4 * bench.shape.size + 30 * len(sizes)))


def floor(bench, sizes):
    out = os.path.join(bench.work, "floor.json")
    s = bench.shape
    argv = [bench.build("tests/bench/floor"), f"{s.nodes}x{s.ranks}", "--sizes", ",".join(map(str, sizes)), "--streams",
            str(bench.o.streams), "--seconds", str(bench.o.floor_seconds), "--json", out, "--netns",
            ",".join(map(str, bench.cluster.pids()))]
    if s.nodes > 1:
        argv += ["--addr", ",".join(bench.cluster.addresses())]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              text=True, timeout=bench.timeout(sizes) + 60, check=False,
                              preexec_fn=netns.die_with_parent)
    except subprocess.TimeoutExpired:
        raise RunError("not finished in time") from None
    if done.returncode:
        raise RunError(f"exit status {done.returncode}: {done.stderr.strip()}")
    with open(out, encoding="utf-8") as f:
        doc = json.load(f)
    return {r["bytes"]: dict(r, time_us=1e3 * r["run_ms"], wrong=0) for r in doc["results"]}
