# SPDX-License-Identifier: MIT
"""Verbs between nodes: results, the path report, and what happens when something breaks in the middle."""

import time

from machines import Failed
from nodes import SOON, Perf, busy, everywhere, expect, path_lines, wait_for

# An error that somebody waits for comes within this, whatever broke: the peer timeout of 60 s, and emulation.
BROKEN = 240


def says_verbs(out):
    exchange = path_lines(out).get("exchange", "")
    expect(exchange.startswith("verbs, "), f"the path report says '{exchange}' instead of verbs")


def small(nodes):
    """Every element of some sizes around the limits of inline, eager and blocks, checked; the report says verbs."""
    says_verbs(Perf(nodes, "-b 4 -e 256K -f 16 -n 1 -w 1").ok())


def connected(nodes, setup, words):
    """A job over links that are made anew with this verbs_setup, and what the path report says of them."""
    for node in nodes:
        node.configure(verbs_setup=setup)
    everywhere(nodes, "systemctl restart hreduced.service")
    out = Perf(nodes, "-b 4 -e 256K -f 16 -n 1 -w 0").ok()
    says_verbs(out)
    exchange = path_lines(out)["exchange"]
    expect("connected by " in exchange and words in exchange, f"verbs_setup = {setup}, and the path report says '{exchange}'")
    for node in nodes:
        port = node.ctl("status")["peer_port"]
        expect(port["rdmacm_rejected"] == 0, f"{node.name}: requests by RDMA-CM were rejected: {port}")


def by_exchange(nodes):
    """Without RDMA-CM; also the new path after a flap."""
    return connects_and_flaps(nodes, "exchange", "verbs_setup = exchange in hreduced.conf")


def by_rdmacm(nodes):
    """Nothing but RDMA-CM; also the new path after a flap."""
    return connects_and_flaps(nodes, "rdmacm", "connected by RDMA-CM")


def connects_and_flaps(nodes, setup, words):
    try:
        connected(nodes, setup, words)
        return link_flap(nodes)
    finally:
        for node in nodes:
            node.configure()
        everywhere(nodes, "systemctl restart hreduced.service")


def every_size(nodes):
    """Sizes of all kinds with every element checked."""
    says_verbs(Perf(nodes, "-b 4 -e 8M -f 2 -n 1 -w 0", limit=400).ok())


def every_type(nodes):
    says_verbs(Perf(nodes, "-b 1536 -d all -o all -n 1 -w 0", limit=600).ok())
    for op in ("broadcast", "reduce_scatter", "all_gather", "barrier"):
        out = Perf(nodes, f"--op {op} -b 96K -n 1 -w 0" if op != "barrier" else "--op barrier -n 2 -w 0").ok()
        says_verbs(out)


def many_ranks(nodes):
    """Three ranks on each node, ordinary memory."""
    says_verbs(Perf(nodes, "-b 1000 -e 1000000 -f 10 -n 1 -w 0 --memory plain", ranks=3, limit=400).ok())


def path_report(nodes):
    """While a communicator lives: transport, device and addresses of each peer, from both ends."""
    job = busy(nodes, "64K")
    try:
        for here in nodes:
            path = here.ctl("path")["paths"][0]
            stage = [s for s in path["stages"] if s["stage"] == "exchange"][0]
            expect("wanted" not in stage, f"{here.name}: verbs are used, and the report wants {stage.get('wanted')}")
            peers = stage["peers"]
            expect(len(peers) == len(nodes) - 1, f"{here.name}: {len(peers)} peers in the report")
            for peer in peers:
                there = [n for n in nodes if n.name == peer["name"]]
                expect(there and peer["transport"] == "verbs", f"{here.name}: {peer}")
                expect(f"{here.rdma} port 1" in peer["address"] and there[0].address in peer["address"],
                       f"{here.name}: the report's address is '{peer['address']}'")
            text = here.run("hreducectl path").out
            expect("verbs" in text and "reason" not in text, f"{here.name}: hreducectl path says\n{text}")
    finally:
        job.kill()


def ended(job, began, what):
    """Every rank that still ran has got an error in words, in bounded time."""
    for one in job.jobs:
        result = one.wait(BROKEN)
        expect(result.status != 0, f"{what}: a rank ended well: {result}")
    return f"{time.monotonic() - began:.1f} s until every rank had ended"


def works_again(nodes):
    wait_for("all daemons to serve", lambda: all(node.serves() for node in nodes))
    says_verbs(Perf(nodes, "-b 256K -n 2 -w 0").ok())


def daemon_killed(nodes):
    """kill -9 in the middle of an op: the other side hears whom it lost, and the next job finds the restarted one."""
    job = busy(nodes)
    began = time.monotonic()
    nodes[1].run(f"kill -9 {nodes[1].pid()}")
    took = ended(job, began, "a daemon was killed")
    expect("node2" in job.jobs[0].result.out, f"node2 was killed, and node1's rank says only: {job.jobs[0].result}")
    wait_for("systemd to start it again", lambda: nodes[1].show("ActiveState") == "active" and nodes[1].serves())
    works_again(nodes)
    return took


def moves_or_ends(job, node, began, what):
    """Either ops are done again, or every rank ends with an error in words."""
    before = node.ops()
    wait_for("an end of the job, or progress", lambda: not job.running() or node.ops() > before + 3, BROKEN)
    return "it went on" if job.running() else ended(job, began, what)


def link_flap(nodes):
    """The interface goes down for a moment in the middle of an op, for less than peer_timeout: operations go on."""
    job = busy(nodes)
    try:
        began = time.monotonic()
        earlier = nodes[0].ctl("status")["peer_port"]
        nodes[1].run("ip link set eth0 down; sleep 3; ip link set eth0 up")
        before = nodes[0].ops()
        wait_for("operations after the flap, or an end of the job",
                 lambda: not job.running() or nodes[0].ops() > before + 3, BROKEN)
        expect(job.running(), f"the link was down for 3 s, and the job ended: {[str(j.result) for j in job.jobs]}")
        took = f"{time.monotonic() - began:.1f} s from the flap to further operations"
        port = nodes[0].ctl("status")["peer_port"]
        expect(port["lost"] == earlier["lost"], f"a peer was lost: {port}, and before the flap {earlier}")
        took += f", {port['links_interrupted'] - earlier['links_interrupted']} interruption(s)"
    finally:
        job.kill()
    works_again(nodes)
    return took


def link_lost(nodes):
    """The interface goes down in the middle of an op and stays so: an error in bounded time."""
    job = busy(nodes)
    try:
        began = time.monotonic()
        nodes[1].run("ip link set eth0 down")
        took = ended(job, began, "the link stayed down")
    finally:
        nodes[1].run("ip link set eth0 up")
        job.kill()
    works_again(nodes)
    return took


def device_removed(nodes):
    """Somebody removes the RDMA device in the middle of an op. Most drivers take it away; rxe's waits until the last user
    has closed it. Either way ops go on or end in words, and once the daemon is gone so is the device."""
    job = busy(nodes)
    try:
        began = time.monotonic()
        gone = nodes[1].start_job("rdma link del rxe0", limit=2 * BROKEN)
        time.sleep(2)
        outcome = moves_or_ends(job, nodes[0], began, "the device was removed")
    finally:
        job.kill()
    nodes[1].systemctl("restart", "hreduced.service")
    result = gone.wait(BROKEN)
    expect(result.status == 0, f"the device was not removed: {result}")
    exchange = path_lines(Perf(nodes, "-b 64K -n 1 -w 0").ok()).get("exchange", "")
    expect(exchange.startswith("tcp"), f"there is no device, and the path report says '{exchange}'")
    nodes[1].run("rdma link add rxe0 type rxe netdev eth0; systemctl restart hreduced.service")
    works_again(nodes)
    return outcome


def no_device(nodes):
    """One node without a device: tcp, with a reason that names the node; required verbs is an error with the same."""
    nodes[1].run("systemctl stop hreduced.service; rdma link del rxe0; systemctl start hreduced.service")
    try:
        out = Perf(nodes, "-b 64K -n 1 -w 0").ok()
        exchange = path_lines(out).get("exchange", "")
        expect(exchange.startswith("tcp"), f"node2 has no device, and the path report says '{exchange}'")
        expect("node2" in out and "RDMA device" in out, f"the report does not say that node2 has no RDMA device:\n{out}")
        nodes[0].configure(require="verbs")
        nodes[0].systemctl("restart", "hreduced.service")
        for result in Perf(nodes, "-b 64K -n 1 -w 0").results():
            expect(result.status != 0, f"verbs are required, and the job ran: {result}")
            expect("node2" in result.out and "RDMA device" in result.out, f"the refusal does not say why: {result}")
    finally:
        nodes[1].run("rdma link add rxe0 type rxe netdev eth0")
        nodes[0].configure()
        everywhere(nodes, "systemctl restart hreduced.service")
    works_again(nodes)


def power_loss(vms, nodes):
    """A machine is gone without a word: the others hear it after the peer timeout, and go on without it."""
    job = busy(nodes)
    began = time.monotonic()
    vms[len(nodes)].power_off()
    for one in job.jobs[:-1]:
        result = one.wait(BROKEN)
        expect(result.status != 0 and nodes[-1].name in result.out,
               f"{nodes[-1].name} lost its power, and a rank says only: {result}")
    took = f"{time.monotonic() - began:.1f} s until the others' ranks had ended"
    try:
        job.jobs[-1].wait(SOON)
        raise Failed("a machine without power ran a command to its end")
    except Failed as e:
        expect("gone" in str(e), str(e))
    Perf(nodes[:-1], "-b 64K -n 1 -w 0").ok()
    return took
