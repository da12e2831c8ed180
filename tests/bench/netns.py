# SPDX-License-Identifier: MIT
"""Emulated hosts on one Linux machine: what compare and other root-only tests run their nodes in.

A host is a set of namespaces of its own (network, IPC, UTS, mount, PID) with a private /dev/shm, so that programs on
two hosts have nothing but the network between them. The hosts hang on a bridge in a namespace of its own by veth
pairs; inside, the interface is called net0 and host i has the address 10.99.0.(i+1).

Each namespace lives as long as its first process, which the kernel kills when this one ends, however it ends; with it
go every process on that host, the interfaces and the bridge. So nothing is left behind, not even after SIGKILL.
"""

import ctypes
import os
import shlex
import signal
import subprocess
import time

SUBNET = "10.99.0"
PREFIX_LENGTH = 24
INTERFACE = "net0"
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class NetnsError(Exception):
    """What could not be set up, in words."""


def die_with_parent():
    """For preexec_fn: the child does not outlive the thread that started it."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def address(i):
    return f"{SUBNET}.{i + 1}"


def _run(argv, what):
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30, check=False)
    if done.returncode:
        raise NetnsError(f"{what}: {done.stdout.strip() or 'exit status %d' % done.returncode} "
                         f"(command: {shlex.join(argv)})")
    return done.stdout


# Its own pid as the rest of the machine sees it, before it hides that view behind its own /proc.
_HOLDER = """
set -e
read -r pid rest < /proc/self/stat
mount -t proc proc /proc
mount -t sysfs sysfs /sys 2>/dev/null || true
mount -t tmpfs -o mode=1777,size=%(shm)s tmpfs /dev/shm
hostname '%(name)s'
ip link set lo up
echo "$pid"
# Zombies of killed programs are inherited by this process.
trap : CHLD
while :; do sleep 3600 & wait; done
"""


class Namespace:
    """One set of namespaces and the process that holds it."""

    def __init__(self, name, shm="50%"):
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--ipc", "--uts", "--mount", "--pid", "--fork", "--kill-child=SIGKILL",
             "--propagation", "private", "sh", "-c", _HOLDER % {"name": name, "shm": shm}],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=die_with_parent, start_new_session=True)
        line = self._holder.stdout.readline().strip()
        if not line.isdigit():
            self._holder.kill()
            raise NetnsError(f"namespaces for {name}: {self._holder.communicate()[1].strip()}")
        self.pid = int(line)
        self.name = name

    def enter(self, argv):
        """The command that runs argv here."""
        return ["nsenter", "-t", str(self.pid), "-n", "-i", "-u", "-m", "-p", "--", *argv]

    def run(self, *argv):
        return _run(self.enter(list(argv)), f"on {self.name}")

    def popen(self, argv, **kw):
        return subprocess.Popen(self.enter(argv), preexec_fn=die_with_parent, **kw)

    def kill_all(self):
        """Ends every process here but the first; the namespace and its network stay."""
        subprocess.run(self.enter(["sh", "-c", "kill -9 -1"]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                       timeout=30, check=False)

    def counter(self, which="tx_bytes", interface=INTERFACE):
        """Bytes the interface sent (tx_bytes) or received (rx_bytes) so far."""
        with open(f"/proc/{self.pid}/net/dev", encoding="ascii") as f:
            for line in f:
                name, _, rest = line.partition(":")
                if name.strip() == interface:
                    return int(rest.split()[8 if which == "tx_bytes" else 0])
        raise NetnsError(f"{self.name} has no interface {interface}")

    def kill(self):
        """Begins the end of this namespace and everything in it; close() waits for it."""
        if self._holder.poll() is None:
            self._holder.kill()

    def close(self):
        self.kill()
        self._holder.wait()
        self._holder.stdout.close()
        self._holder.stderr.close()
        # The first process is killed by the kernel at the same time, but ends a little later.
        for _ in range(200):
            if not os.path.exists(f"/proc/{self.pid}"):
                return
            time.sleep(0.01)


class Cluster:
    """n hosts on a switch.

    rate: of each link and direction, in tc's words ("1gbit"); None: as fast as the machine is.
    congestion: the TCP congestion control of every host; None: the machine's default.
    """

    def __init__(self, n, rate=None, congestion=None, prefix="node"):
        self.hosts = []
        self.switch = None
        try:
            self.switch = Namespace("switch")
            self._bridge()
            for i in range(n):
                self.hosts.append(Namespace(f"{prefix}{i}"))
                self._link(i, rate, congestion)
        except BaseException:
            self.close()
            raise

    def _bridge(self):
        s = self.switch
        s.run("ip", "link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0")
        s.run("ip", "addr", "add", f"{SUBNET}.254/{PREFIX_LENGTH}", "dev", "br0")
        s.run("ip", "link", "set", "br0", "up")

    def _link(self, i, rate, congestion):
        host, port = self.hosts[i], f"port{i}"
        self.switch.run("ip", "link", "add", port, "type", "veth", "peer", "name", "peer")
        # In the switch's network, but with this machine's pids.
        _run(["nsenter", "-t", str(self.switch.pid), "-n", "--", "ip", "link", "set", "peer", "netns",
              str(host.pid)], "moving an interface")
        self.switch.run("ip", "link", "set", port, "master", "br0", "up")
        host.run("ip", "link", "set", "peer", "name", INTERFACE)
        host.run("ip", "addr", "add", f"{address(i)}/{PREFIX_LENGTH}", "dev", INTERFACE)
        host.run("ip", "link", "set", INTERFACE, "up")
        if congestion:
            # By route, not by sysctl: a namespace may set only what the machine allows to ordinary users.
            host.run("ip", "route", "replace", f"{SUBNET}.0/{PREFIX_LENGTH}", "dev", INTERFACE, "proto", "kernel",
                     "scope", "link", "src", address(i), "congctl", congestion)
        if rate:
            shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "20ms"]
            host.run("tc", "qdisc", "add", "dev", INTERFACE, *shape)
            self.switch.run("tc", "qdisc", "add", "dev", port, *shape)

    def pids(self):
        return [h.pid for h in self.hosts]

    def addresses(self):
        return [address(i) for i in range(len(self.hosts))]

    def kill_all(self):
        for h in self.hosts:
            h.kill_all()

    def close(self):
        everything = [ns for ns in [*self.hosts, self.switch] if ns]
        for ns in everything:
            ns.kill()
        for ns in everything:
            ns.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
