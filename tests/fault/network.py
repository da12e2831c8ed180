#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Which addresses, links and ports are used, and what is said when they do not lead anywhere: nodes in network
namespaces of their own, joined by a bridge. Everything goes with the processes that hold the namespaces."""
# timeout: 90

import ctypes
import json
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_fault import (  # noqa: E402
    OK, PEER_LOST, SCALE, Cluster, Job, Node, check, expect, run_tests, tell, wait_for,
)

CLONE_NEWNET = 0x40000000
PORT = 18999
LIBC = ctypes.CDLL(None, use_errno=True)


def ip(*words, inside=None):
    command = ["ip", *words]
    if inside:
        command = ["nsenter", "-t", str(inside), "-n", *command]
    done = subprocess.run(command, capture_output=True, text=True)
    check(done.returncode == 0, f"{' '.join(command)}: {done.stderr}")
    return done.stdout


def own_arp(pid):
    """Two links in one subnet: each answers for its own address alone, as such machines have to be set up."""
    for name, value in (("arp_ignore", 1), ("arp_announce", 2)):
        write = f"echo {value} > /proc/sys/net/ipv4/conf/all/{name}"
        done = subprocess.run(["nsenter", "-t", str(pid), "-n", "sh", "-c", write], capture_output=True, text=True)
        check(done.returncode == 0, f"{write}: {done.stderr}")


class Net(Cluster):
    """Nodes i = 0, 1, ... at 10.77.0.(i + 1) on eth0 and, with links = 2, at 10.77.0.(i + 101) on eth1."""

    made = 0

    def __init__(self, nnodes, config, links=1, extra=None, start=True):  # pylint: disable=super-init-not-called
        Net.made += 1
        self.nodes, self.ranks, self.holders = [], [], []
        self.port = PORT
        self.bridge = f"br{Net.made}"
        ip("link", "add", self.bridge, "type", "bridge")
        ip("link", "set", self.bridge, "up")
        for i in range(nnodes):
            holder = subprocess.Popen(["unshare", "-n", "sleep", "1000"])
            self.holders.append(holder)
            own = os.readlink("/proc/self/ns/net")
            wait_for("a namespace", lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != own, 10)  # noqa: B023
            ip("link", "set", "lo", "up", inside=holder.pid)
            if links > 1:
                own_arp(holder.pid)
            for link in range(links):
                self.link(i, link, holder.pid)
            if extra:
                extra(i, holder.pid)
            node = Node(f"net{Net.made}-{i}", f"port = {PORT}\nnode_name = node{i}\n{config(i)}", limits=self.enter(i), start=False)
            self.nodes.append(node)
            if start:
                node.start()

    def link(self, i, link, pid):
        name = f"v{Net.made}-{i}-{link}"
        ip("link", "add", name, "type", "veth", "peer", "name", "eth", "netns", str(pid))
        ip("link", "set", "eth", "name", f"eth{link}", inside=pid)
        ip("link", "set", name, "master", self.bridge, "up")
        ip("addr", "add", f"10.77.0.{i + 1 + 100 * link}/24", "dev", f"eth{link}", inside=pid)
        ip("link", "set", f"eth{link}", "up", inside=pid)

    def enter(self, i):
        path = f"/proc/{self.holders[i].pid}/ns/net"

        def setns():
            fd = os.open(path, os.O_RDONLY)
            if LIBC.setns(fd, CLONE_NEWNET) != 0:
                os._exit(3)
            os.close(fd)

        return setns

    def sent(self, i, device):
        text = ip("-s", "-j", "link", "show", "dev", device, inside=self.holders[i].pid)
        return json.loads(text)[0]["stats64"]["tx"]["bytes"]

    def lose_way(self, i, j):
        """What node i sends to node j vanishes without a word, as behind a firewall that drops."""
        where = f"10.77.0.{j + 1}"
        ip("neigh", "replace", where, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent",
           inside=self.holders[i].pid)

    def __exit__(self, kind, value, trace):
        try:
            super().__exit__(kind, value, trace)
        finally:
            for holder in self.holders:
                holder.kill()
                holder.wait()
            ip("link", "del", self.bridge)


def connections(pid):
    """(local address, local port, remote address, remote port) of the established TCP connections there."""
    found = []
    with open(f"/proc/{pid}/net/tcp", encoding="utf-8") as table:
        for line in list(table)[1:]:
            words = line.split()
            if words[3] == "01":
                ends = []
                for end in words[1:3]:
                    address, port = end.split(":")
                    ends += [".".join(str(b) for b in reversed(bytes.fromhex(address))), int(port, 16)]
                found.append(tuple(ends))
    return found


def addresses(job, i):
    path = json.loads(job.ranks[i].do("path 0"))
    return [peer["address"] for stage in path["stages"] for peer in stage.get("peers", [])]


def test_one_port():
    """Whatever daemons say to each other, one end of the connection is the configured port."""
    with Net(3, lambda i: f"listen = 10.77.0.{i + 1}\n") as net:
        job = Job(net, [0, 0, 1, 1, 2, 2])
        job.check()
        for node in net.nodes:
            found = connections(node.pid)
            check(found, "no connections at all")
            for local, lport, remote, rport in found:
                check(PORT in (lport, rport), f"a connection {local}:{lport} to {remote}:{rport}")
        job.close()


def test_a_pair_that_cannot_talk():
    """Packets between nodes 1 and 2 vanish: setting up says which two, to everybody."""
    with Net(3, lambda i: f"listen = 10.77.0.{i + 1}\n") as net:
        net.lose_way(1, 2)
        net.lose_way(2, 1)
        ranks = [net.rank(i, i) for i in range(3)]
        ident = ranks[0].do("id")
        begin = time.monotonic()
        tags = {i: r.send(f"init 0 3 {i} {ident} {6000 * SCALE:.0f} 0") for i, r in enumerate(ranks)}
        replies = {i: ranks[i].get(t) for i, t in tags.items()}
        for reply in replies.values():
            print(f"   {reply}")
        check(all(r.code != OK for r in replies.values()), "a communicator whose nodes cannot reach each other")
        tell("told", begin, replies)
        for reply in replies.values():
            check("10.77.0.2" in reply.text or "10.77.0.3" in reply.text, f"no address in: {reply.text}")
            check("node1" in reply.text or "node2" in reply.text, f"no node in: {reply.text}")


def test_a_cut_cable():
    """In the middle of ops packets stop: after the peer timeout everybody is told."""
    keys = f"peer_timeout = {2 * SCALE:.0f}s\nio_threads = 2\n"
    with Net(2, lambda i: f"listen = 10.77.0.{i + 1}\n{keys}") as net:
        job = Job(net, [0, 0, 1, 1], "alloc", 4 << 20)
        job.check()
        loops = job.loop()
        time.sleep(0.3)
        begin = time.monotonic()
        ip("link", "set", f"v{Net.made}-1-0", "down")
        replies = job.get(loops)
        for i, reply in replies.items():
            expect({i: reply}, PEER_LOST, (f"node{0 if i > 1 else 1}",), begin, 12)
        tell("cable cut", begin, replies)
        ip("link", "set", f"v{Net.made}-1-0", "up")
        job.all_do("destroy 0")
        job.slot = 1
        job.join()
        job.check()
        job.close()


def docker(i, pid):
    """The same address on every node, as docker makes it."""
    ip("link", "add", "docker0", "type", "bridge", inside=pid)
    ip("addr", "add", "172.17.0.1/16", "dev", "docker0", inside=pid)
    ip("link", "set", "docker0", "up", inside=pid)


def test_container_bridge():
    """It is never advertised; told to use it, the daemon finds that it reached itself."""
    with Net(2, lambda i: "listen = 0.0.0.0\n", extra=docker) as net:
        job = Job(net, [0, 0, 1, 1])
        job.check()
        for i in (0, 2):
            found = addresses(job, i)
            print(f"   {found}")
            check(found and all("10.77.0." in a and "172.17" not in a for a in found), f"the wrong link: {found}")
        job.close()
    with Net(2, lambda i: "listen = 0.0.0.0\ninterface = docker0\n", extra=docker) as net:
        ranks = [net.rank(i, i) for i in range(2)]
        ident = ranks[0].do("id")
        tags = {i: r.send(f"init 0 2 {i} {ident} {4000 * SCALE:.0f} 0") for i, r in enumerate(ranks)}
        replies = {i: ranks[i].get(t) for i, t in tags.items()}
        for reply in replies.values():
            print(f"   {reply}")
        check(all(r.code != OK for r in replies.values()), "joined over an address that both nodes have")
        check("172.17.0.1" in replies[1].text and "reached myself" in replies[1].text, "not said that it reached itself")


def test_two_links():
    """Both in one subnet: only the chosen one sends, on both nodes."""
    for chosen, idle in (("eth1", "eth0"), ("eth0", "eth1")):
        with Net(2, lambda i: f"listen = 0.0.0.0\ninterface = {chosen}\n", links=2) as net:  # noqa: B023
            job = Job(net, [0, 1], "alloc", 4 << 20)
            job.check()
            before = [(net.sent(i, chosen), net.sent(i, idle)) for i in (0, 1)]
            job.check(3, 1 << 20)
            for i in (0, 1):
                used, other = net.sent(i, chosen) - before[i][0], net.sent(i, idle) - before[i][1]
                print(f"   node {i}: {used} bytes by {chosen}, {other} by {idle}")
                check(used > 10 << 20, f"node {i} sent only {used} bytes over {chosen}")
                check(other < 20000, f"node {i} sent {other} bytes over {idle}")
            job.close()


def main():
    if os.getuid() != 0 or LIBC.unshare(CLONE_NEWNET) != 0:
        print("SKIP: needs root and the right to make network namespaces")
        sys.exit(77)
    try:
        ip("link", "set", "lo", "up")
        ip("link", "add", "t0", "type", "veth", "peer", "name", "t1")
        ip("link", "del", "t0")
        ip("link", "add", "t0", "type", "bridge")
        ip("link", "del", "t0")
    except (AssertionError, OSError) as error:
        print(f"SKIP: needs ip (iproute2), veth and bridges: {error}")
        sys.exit(77)
    run_tests(globals())


main()
