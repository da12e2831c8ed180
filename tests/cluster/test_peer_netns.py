#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Nodes in network namespaces of their own: which addresses they use and tell, which link the bytes take, what a
closed port, a filtered pair and an address that everybody has lead to."""
# timeout: 180

import ctypes
import json
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_hreduced import BUILD, SCALE, Daemon, check, run_tests, wait_for  # noqa: E402

PORT = 18515
RANK = os.path.join(BUILD, "tests", "fault", "helper_rank")
CLONE_NEWNET = 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


def run(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    check(done.returncode == 0, f"{' '.join(words)}: {done.stderr}")


class Namespace:
    """A network namespace that lives as long as its process, which ends with the test."""

    def __init__(self):
        self.holder = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE,
                                       preexec_fn=lambda: libc.prctl(1, 9, 0, 0, 0))
        self.holder.stdout.readline()
        self.ip("link", "set", "lo", "up")

    def ip(self, *words):
        run("nsenter", "-t", str(self.holder.pid), "-n", "ip", *words)

    def enter(self):
        """In a child, before exec."""
        fd = os.open(f"/proc/{self.holder.pid}/ns/net", os.O_RDONLY)
        if libc.setns(fd, CLONE_NEWNET) != 0:
            os._exit(99)
        os.close(fd)

    def sent(self, device):
        """Bytes that left through a device of this namespace."""
        out = subprocess.run(["nsenter", "-t", str(self.holder.pid), "-n", "cat", "/proc/net/dev"], capture_output=True,
                             text=True).stdout
        for line in out.splitlines():
            if line.strip().startswith(device + ":"):
                return int(line.split(":")[1].split()[8])
        raise AssertionError(f"no {device}")

    def end(self):
        self.holder.kill()
        self.holder.wait()
        self.holder.stdout.close()


class Net:
    """n nodes on one switch, with `links` links each: device ethL of node i has address 10.L.0.i+1."""

    def __init__(self, n, links=1, prefix="10.{link}.0.{node}/24"):
        self.switch = Namespace()
        self.nodes = [Namespace() for _ in range(n)]
        self.daemons = []
        for link in range(links):
            self.switch.ip("link", "add", f"br{link}", "type", "bridge")
            self.switch.ip("link", "set", f"br{link}", "up")
            for i, node in enumerate(self.nodes):
                end = f"n{i}l{link}"
                self.switch.ip("link", "add", end, "type", "veth", "peer", "name", f"eth{link}", "netns",
                               str(node.holder.pid))
                self.switch.ip("link", "set", end, "master", f"br{link}", "up")
                node.ip("addr", "add", prefix.format(link=link, node=i + 1), "dev", f"eth{link}")
                node.ip("link", "set", f"eth{link}", "up")

    def start(self, config="listen = 0.0.0.0\n", only=None, name="node{i}"):
        for i in range(len(self.nodes)) if only is None else only:
            d = Daemon(f"node{i}", f"port = {PORT}\nnode_name = {name.format(i=i)}\n{config}",
                       limits=self.nodes[i].enter)
            d.ctl("status", "--json")
            self.daemons.append(d)
        return self.daemons

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        try:
            for d in self.daemons:
                d.__exit__(kind, value, trace)
        finally:
            for namespace in [*self.nodes, self.switch]:
                namespace.end()


class Rank:
    """A process of helper_rank.c, driven by lines."""

    def __init__(self, daemon, rank, size, root):
        env = {**os.environ, "HREDUCE_SOCKET": daemon.socket, "RANK": str(rank), "WORLD_SIZE": str(size),
               "MASTER_ADDR": root}
        self.process = subprocess.Popen([RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
                                        preexec_fn=lambda: libc.prctl(1, 9, 0, 0, 0))
        self.tag = 0

    def send(self, command):
        self.tag += 1
        self.process.stdin.write(f"{self.tag} {command}\n")
        self.process.stdin.flush()

    def get(self):
        """(code, text) of the next answer."""
        line = self.process.stdout.readline()
        check(line, "a rank ended")
        words = line.rstrip("\n").split(" ", 3)
        return int(words[2]), words[3] if len(words) > 3 else ""

    def do(self, command):
        self.send(command)
        code, text = self.get()
        check(code == 0, f"{command}: {text}")
        return text

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Job:
    def __init__(self, daemons, root):
        self.ranks = [Rank(d, i, len(daemons), root) for i, d in enumerate(daemons)]

    def each(self, command):
        """Answers of all ranks; {i} in the command is the rank."""
        for i, rank in enumerate(self.ranks):
            rank.send(command.format(i=i))
        return [rank.get() for rank in self.ranks]

    def name(self, limit_ms=30000):
        return self.each(f"name 0 job {int(limit_ms * SCALE)} 0")

    def works(self, elements=1000003):
        for code, text in self.name():
            check(code == 0, text)
        for b in (0, 1):
            for code, text in self.each(f"buffer {b} plain {elements * 4}"):
                check(code == 0, text)
        for code, text in self.each(f"ops 0 0 1 {elements} 3 5"):
            check(code == 0, text)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.end()


def peers(daemon):
    return json.loads(daemon.ctl("status", "--json").stdout)["peers"]


def test_nodes_of_one_host_name():
    """Two daemons whose machines have the same name are two nodes."""
    with Net(2) as net:
        net.start(name="twin")
        with Job(net.daemons, "10.0.0.1") as job:
            job.works()
            check(len(peers(net.daemons[0])) == 1, "not one peer")


def test_ipv6():
    with Net(2, prefix="fd00:{link}::{node}/64") as net:
        for node in net.nodes:
            node.ip("link", "set", "eth0", "down")
        for i, node in enumerate(net.nodes):
            # Without duplicate address detection, which would take a second.
            node.ip("link", "set", "eth0", "up")
            node.ip("addr", "replace", f"fd00:0::{i + 1}/64", "dev", "eth0", "nodad")
        net.start("listen = ::\n")
        with Job(net.daemons, "fd00::1") as job:
            job.works()


def test_bridge_addresses_are_not_told():
    """Every host has 172.17.0.1: the real link is used. Forced to the bridge, nobody waits in vain."""
    with Net(2) as net:
        for node in net.nodes:
            node.ip("link", "add", "docker0", "type", "bridge")
            node.ip("addr", "add", "172.17.0.1/16", "dev", "docker0")
            node.ip("link", "set", "docker0", "up")
        net.start()
        a, b = net.daemons
        check("10.0.0.1" in a.text() and "172.17" not in a.text(), a.text())
        with Job(net.daemons, "10.0.0.1") as job:
            ident = job.ranks[0].do("id")
            for code, text in job.each(f"init 0 2 {{i}} {ident} 20000 0"):
                check(code == 0, text)
        for d in net.daemons:
            d.stop()
            d.configure(f"port = {PORT}\nnode_name = forced\nlisten = 0.0.0.0\ninterface = docker0\n")
            d.start()
            d.ctl("status", "--json")
        with Job(net.daemons, "172.17.0.1") as job:
            ident = job.ranks[0].do("id")
            begin = time.monotonic()
            job.ranks[1].send(f"init 0 2 1 {ident} 20000 0")
            code, text = job.ranks[1].get()
            print(f"   {text}")
            check(code != 0 and "reached myself at 172.17.0.1 port 18515" in text, text)
            check("'interface', 'advertise'" in text and time.monotonic() - begin < 5 * SCALE, text)


def test_one_port():
    """Every connection between daemons has the one port at one of its ends."""
    with Net(3) as net:
        net.start()
        with Job(net.daemons, "10.0.0.1") as job:
            job.works()
            for i, node in enumerate(net.nodes):
                out = subprocess.run(["nsenter", "-t", str(node.holder.pid), "-n", "cat", "/proc/net/tcp"],
                                     capture_output=True, text=True).stdout
                rows = [line.split() for line in out.splitlines()[1:]]
                ports = [{int(r[1].split(":")[1], 16), int(r[2].split(":")[1], 16)} for r in rows]
                check(len(ports) > 8 and all(PORT in p for p in ports), f"node {i}: {ports}")


def test_filtered_pair():
    """No packet passes between nodes 1 and 2: the error names exactly these two, on all ranks, and the way is tried
    for as long as peer_timeout says."""
    with Net(3) as net:
        net.start("listen = 0.0.0.0\npeer_timeout = 6s\n")
        for i, other in ((1, 3), (2, 2)):
            # A neighbour that is nobody: packets vanish as in a filter.
            net.nodes[i].ip("neigh", "replace", f"10.0.0.{other}", "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud",
                            "permanent")
        with Job(net.daemons, "10.0.0.1") as job:
            begin = time.monotonic()
            answers = job.name()
            took = time.monotonic() - begin
            # The library adds how the rank found its place.
            texts = {text.split(" [rank")[0] for _, text in answers}
            print("   " + "\n   ".join(texts))
            check(all(code == 7 for code, _ in answers) and len(texts) == 1, f"{answers}")
            text = texts.pop()
            check("node1" in text and "node2" in text and "node0" not in text, text)
            check("no answer (filtered by a firewall" in text or "did not connect" in text, text)
            check(5 < took < 15 * SCALE, f"it took {took:.1f} s")
        # The pair is open again: the next job works.
        net.nodes[1].ip("neigh", "del", "10.0.0.3", "dev", "eth0")
        net.nodes[2].ip("neigh", "del", "10.0.0.2", "dev", "eth0")
        with Job(net.daemons, "10.0.0.1") as job:
            job.works()


def test_closed_port():
    """Nobody listens at the root's address, or there is no route to it."""
    with Net(2) as net:
        net.start(only=[1])
        for root, words in (("10.0.0.1", "connection refused"), ("10.9.9.9", "no route")):
            with Job(net.daemons, root) as job:
                (code, text), = job.each(f"name 0 job {int(2000 * SCALE)} 0")
                print(f"   {text}")
                check(code == 5 and f"{root} port {PORT}: {words}" in text, f"{code} {text}")


def test_chosen_link():
    """Two links of each node in one subnet, where the route always takes the first: with interface = eth1 the bytes
    of both directions take eth1."""
    with Net(2, links=1) as net:
        net.switch.ip("link", "add", "name", "br9", "type", "bridge")
        net.switch.ip("link", "set", "br9", "up")
        for i, node in enumerate(net.nodes):
            net.switch.ip("link", "add", f"n{i}x", "type", "veth", "peer", "name", "eth1", "netns", str(node.holder.pid))
            net.switch.ip("link", "set", f"n{i}x", "master", "br9", "up")
            node.ip("addr", "add", f"10.0.0.10{i + 1}/24", "dev", "eth1")
            node.ip("link", "set", "eth1", "up")
            for device in ("all", "eth0", "eth1"):
                subprocess.run(["nsenter", "-t", str(node.holder.pid), "-n", "sh", "-c",
                                f"echo 1 > /proc/sys/net/ipv4/conf/{device}/arp_ignore"], check=False)
        net.start("listen = 0.0.0.0\ninterface = eth1\n")
        before = [[n.sent("eth0"), n.sent("eth1")] for n in net.nodes]
        with Job(net.daemons, "10.0.0.101") as job:
            job.works()
        for i, node in enumerate(net.nodes):
            other, chosen = node.sent("eth0") - before[i][0], node.sent("eth1") - before[i][1]
            print(f"   node {i}: eth0 {other} bytes, eth1 {chosen} bytes")
            check(chosen > 4000000 and other < 100000, "the bytes took the other link")


def test_address_that_comes_late():
    """An interface gets its address after the daemon's start: it is told to others from then on."""
    with Net(2) as net:
        for i, node in enumerate(net.nodes):
            node.ip("addr", "del", f"10.0.0.{i + 1}/24", "dev", "eth0")
        net.start()
        for i, node in enumerate(net.nodes):
            node.ip("addr", "add", f"10.0.0.{i + 1}/24", "dev", "eth0")
        with Job(net.daemons, "10.0.0.1") as job:
            ident = job.ranks[0].do("id")
            for code, text in job.each(f"init 0 2 {{i}} {ident} 20000 0"):
                check(code == 0, text)


def test_link_goes_down():
    """The cable of a node is pulled: the others are told within peer_timeout, and it works again afterwards."""
    with Net(3) as net:
        net.start("listen = 0.0.0.0\npeer_timeout = 2s\n")
        with Job(net.daemons, "10.0.0.1") as job:
            job.works()
            net.switch.ip("link", "set", "n2l0", "down")
            begin = time.monotonic()
            wait_for("the loss", lambda: all("node2" not in str(peers(d)) for d in net.daemons[:2]), 8)
            took = time.monotonic() - begin
            print(f"   noticed after {took:.1f} s")
            check(took > 1, "noticed before the time limit")
            job.ranks[0].send("ops 0 0 1 1000 1 9")
            code, text = job.ranks[0].get()
            check(code == 7 and "node2" in text and "was silent for 2 s" in text, f"{code} {text}")
        net.switch.ip("link", "set", "n2l0", "up")
        with Job(net.daemons, "10.0.0.1") as job:
            job.works()


if __name__ == "__main__":
    if os.getuid() != 0 or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode != 0:
        print("SKIP: network namespaces need root")
        sys.exit(77)
    if not os.access(RANK, os.X_OK):
        print("SKIP: helper_rank is not built")
        sys.exit(77)
    run_tests(globals())
