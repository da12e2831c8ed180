#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
# timeout: 180
"""hreducectl doctor and topo: without a daemon, with one, and over nodes in network namespaces, of which one is not like
the others."""

import json
import os
import resource
import struct
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_hreduced import HREDUCECTL, SCALE, TMP, Client, Daemon, check, run_tests  # noqa: E402
from test_peer_netns import Net, run  # noqa: E402

ROOT = os.environ["HREDUCE_ROOT"]
OK, FAILED, WARN, FAIL, USAGE = 0, 1, 3, 4, 64
DOCTOR = 22
NAMESPACES = os.getuid() == 0 and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


def ctl(*words, environment=None):
    return subprocess.run([HREDUCECTL, *words], capture_output=True, text=True, timeout=60 * SCALE, env=environment)


def report(daemon, *words):
    """The JSON report, and the exit status that agrees with it."""
    done = ctl("--socket", daemon.socket, "doctor", "--json", *words)
    check(done.returncode in (OK, WARN, FAIL), f"{done.returncode}: {done.stderr}")
    doc = json.loads(done.stdout)
    verdicts = {c["verdict"] for node in doc["nodes"] for c in node.get("checks", [])}
    verdicts |= {c["verdict"] for c in doc.get("cluster", [])}
    worst = FAIL if "fail" in verdicts else WARN if "warn" in verdicts else OK
    check(done.returncode == worst, f"exit status {done.returncode} with {verdicts}")
    for c in [c for node in doc["nodes"] for c in node.get("checks", [])] + doc.get("cluster", []):
        bad = c["verdict"] in ("warn", "fail")
        check(c["evidence"] and bool(c["cause"]) == bad and bool(c["remedy"]) == bad, f"incomplete: {c}")
    return doc


def one(checks, name):
    found = [c for c in checks if c["check"] == name]
    check(len(found) == 1, f"{len(found)} checks {name}")
    return found[0]


def test_without_a_daemon():
    done = ctl("--socket", os.path.join(TMP, "nobody"), "doctor", "--json")
    check(done.returncode == FAIL, f"exit status {done.returncode}: {done.stderr}")
    node, = json.loads(done.stdout)["nodes"]
    check("hreducectl" in node["by"], node["by"])
    daemon = one(node["checks"], "daemon")
    check(daemon["verdict"] == "fail" and "nobody" in daemon["evidence"], daemon)
    check(one(node["checks"], "kernel")["verdict"] == "pass", "the checks were not made")
    done = ctl("--socket", os.path.join(TMP, "nobody"), "doctor")
    check(done.returncode == FAIL and "FAIL" in done.stdout and "remedy" in done.stdout, done.stdout)


def test_one_node():
    with Daemon(config="listen = 127.0.0.1\n") as d:
        doc = report(d)
        node, = doc["nodes"]
        check("cluster" not in doc and len(node["checks"]) >= 25, "one machine's checks")
        # The limits are those of the daemon, not of hreducectl.
        address = one(node["checks"], "address")
        check(address["verdict"] == "warn" and "127.0.0.1" in address["evidence"], address)
        text = ctl("--socket", d.socket, "doctor").stdout
        check(text.rstrip().split("\n")[-1].endswith("skip") and "node " in text, text)
    with Daemon(name="limits", config="max_sessions = 5000\n",
                limits=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (900, 900))) as d:
        files = one(report(d)["nodes"][0]["checks"], "open-files")
        check(files["verdict"] == "warn" and "900 files" in files["evidence"], files)
    with Daemon(name="verbs", config="transport = verbs\n") as d:
        # No test machine has an RDMA device that the daemon may not use; where there is none, that is now a fault.
        if not os.path.isdir("/sys/class/infiniband") or not os.listdir("/sys/class/infiniband"):
            device = one(report(d)["nodes"][0]["checks"], "rdma-device")
            check(device["verdict"] == "fail", device)


def test_usage():
    with Daemon() as d:
        check(ctl("--socket", d.socket, "doctor", "--nodes", "no.such.host.invalid").returncode == USAGE, "a name")
        check(ctl("--socket", d.socket, "doctor", "more").returncode == USAGE, "an argument")
        # hreducectl's own questions only.
        with Client(d) as c:
            c.send(DOCTOR, struct.pack("=IIII", 1, 0, 0, 0))
            check(c.dropped(), "a job may ask the doctor")
        with Client(d, flags=1) as c:
            m = c.ask(DOCTOR, struct.pack("=IIII", 4, 77, 0, 0))
            check(m.type == 3 and "77 is not connected" in m.text, "a peer that does not exist")
            m = c.ask(DOCTOR, struct.pack("=IIII", 2, 0, 0, 0) + b"10.0.0.1 nonsense")
            check(m.type == 3 and "no IP address" in m.text, "nonsense for an address")


def test_topo():
    xml = os.path.join(ROOT, "tests", "lib", "topo", "two-sockets.xml")
    done = ctl("topo", "--xml", xml)
    check(done.returncode == OK, done.stderr)
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.startswith("  GPU")}
    check(rows["GPU3"][:4] == ["mlx5_3", "PHB:", "a", "PCIe"], done.stdout)
    doc = json.loads(ctl("topo", "--json", "--xml", xml).stdout)
    check(doc["matrix"][0][1] == "NODE" and doc["matrix"][0][2] == "SYS" and doc["matrix"][0][0] == "X", doc["matrix"])
    check([n["nic"] for n in doc["nics"]] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"], doc["nics"])
    check(ctl("topo", "--xml", "/dev/null").returncode == FAILED, "no topology")
    with Daemon() as d:
        check(ctl("--socket", d.socket, "topo").returncode == OK, "this machine")


def test_cluster():
    """Three nodes: nothing is wrong between them. Then one has another configuration, and a fourth address is nobody's."""
    if not NAMESPACES:
        return
    with Net(3) as net:
        net.start("listen = 0.0.0.0\nbandwidth = 100000000\n", only=[0, 1])
        net.start("listen = 0.0.0.0\nbandwidth = 100000000\nunit_size = 512K\n", only=[2])
        first = net.daemons[0]
        # Nobody is known yet.
        check(one(report(first, "--cluster")["cluster"], "cluster-nodes")["verdict"] == "skip", "nobody is known")
        doc = report(first, "--nodes", "10.0.0.2,10.0.0.3,10.0.0.1")
        names = sorted(n["name"] for n in doc["nodes"])
        check(names == ["node0", "node1", "node2"], names)
        check(all(len(n["checks"]) >= 25 for n in doc["nodes"]), "checks of all nodes")
        cluster = doc["cluster"]
        for name in ("cluster-nodes", "cluster-version", "cluster-kernel", "cluster-mtu", "cluster-link", "cluster-clock",
                     "cluster-reach"):
            check(one(cluster, name)["verdict"] == "pass", one(cluster, name))
        config = one(cluster, "cluster-configuration")
        check(config["verdict"] == "warn", config)
        check(config["evidence"] == "unit_size is 512K on node2, 1M on the other 2", config)
        rates = [c for c in cluster if c["check"] == "cluster-rate"]
        check(len(rates) == 4 and all(c["verdict"] == "pass" and "over tcp" in c["evidence"] for c in rates), rates)
        # Now they are connected, and need not be named.
        doc = report(first, "--cluster", "--nodes", "10.0.0.99")
        nodes = one(doc["cluster"], "cluster-nodes")
        check(nodes["verdict"] == "fail" and "10.0.0.99" in nodes["evidence"], nodes)
        check(len(doc["nodes"]) == 4, "three nodes and one that is not there")


def test_slow_link():
    """One node's link is limited to 1 Gbit/s: that node's lines are bad, in both directions, and nobody else's."""
    if not NAMESPACES:
        return
    with Net(3) as net:
        limit = ("root", "tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms")
        run("nsenter", "-t", str(net.nodes[2].holder.pid), "-n", "tc", "qdisc", "add", "dev", "eth0", *limit)
        run("nsenter", "-t", str(net.switch.holder.pid), "-n", "tc", "qdisc", "add", "dev", "n2l0", *limit)
        # 4 Gbit/s are what the test's machine surely does.
        net.start("listen = 0.0.0.0\nbandwidth = 500M\n" if SCALE == 1 else "listen = 0.0.0.0\nbandwidth = 300M\n")
        doc = report(net.daemons[0], "--nodes", "10.0.0.2,10.0.0.3")
        rates = [c for c in doc["cluster"] if c["check"] == "cluster-rate"]
        for c in rates:
            print(f"   {c['verdict']} {c['evidence']}")
        check(len(rates) == 4, f"{len(rates)} lines")
        for c in rates:
            slow = "node2" in (c["from"], c["to"])
            check((c["verdict"] != "pass") == slow, f"{c['verdict']}: {c['evidence']}")
        for p in doc["probes"]:
            if "node2" in (p["from"], p["to"]):
                check(p["bytes_per_s"] < 140e6, f"faster than 1 Gbit/s: {p}")
            check(p["transport"] == "tcp" and p["round_trip_us"] > 0 and p["path"], p)


def test_mtu_and_firewall():
    """A node with another MTU is named; so is a direction in which the port cannot be reached."""
    if not NAMESPACES:
        return
    with Net(3) as net:
        net.nodes[1].ip("link", "set", "eth0", "mtu", "1400")
        net.start("listen = 0.0.0.0\nbandwidth = 100000000\n")
        first = net.daemons[0]
        mtu = one(report(first, "--nodes", "10.0.0.2,10.0.0.3")["cluster"], "cluster-mtu")
        check(mtu["verdict"] == "fail" and "1400 on node1, 1500 on the other 2" in mtu["evidence"], mtu)
        # Packets of new connections from node2 to node0 vanish; those that are there go on.
        net.nodes[2].ip("rule", "add", "to", "10.0.0.1", "ipproto", "tcp", "dport", "18515", "blackhole")
        reach = one(report(first, "--cluster")["cluster"], "cluster-reach")
        print(f"   {reach['evidence']}")
        check(reach["verdict"] == "fail" and "from node2 to node0 at 10.0.0.1 port 18515" in reach["evidence"], reach)
        check("node1" not in reach["evidence"], reach)


def test_no_link():
    """Verbs are required and nobody has a device: each probe is answered at once, with the reason."""
    if not NAMESPACES or os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        return
    with Net(2) as net:
        net.start("listen = 0.0.0.0\ntransport = verbs\n")
        rates = [c for c in report(net.daemons[0], "--nodes", "10.0.0.2")["cluster"] if c["check"] == "cluster-rate"]
        check(len(rates) == 2, f"{len(rates)} lines")
        for c in rates:
            print(f"   {c['evidence']}")
            check(c["verdict"] == "fail" and "no data link with node node" in c["evidence"], c)
            check("came up in" not in c["evidence"] and ": node node" in c["evidence"], c)


def test_two_interfaces_in_one_subnet():
    if not NAMESPACES:
        return
    with Net(1) as net:
        node = net.nodes[0]
        node.ip("link", "add", "eth9", "type", "veth", "peer", "name", "end9")
        node.ip("link", "set", "end9", "up")
        node.ip("addr", "add", "10.0.0.50/24", "dev", "eth9")
        node.ip("link", "set", "eth9", "up")
        net.start()
        arp = one(report(net.daemons[0])["nodes"][0]["checks"], "arp")
        check(arp["verdict"] == "warn" and "eth0 and eth9" in arp["evidence"] and "arp_ignore" in arp["remedy"], arp)
        for key, value in (("arp_ignore", 1), ("arp_announce", 2)):
            run("nsenter", "-t", str(node.holder.pid), "-n", "sh", "-c",
                f"echo {value} > /proc/sys/net/ipv4/conf/all/{key}")
        arp = one(report(net.daemons[0])["nodes"][0]["checks"], "arp")
        check(arp["verdict"] == "pass", arp)


if __name__ == "__main__":
    run_tests(globals())
