# SPDX-License-Identifier: MIT
"""hreduce as it is installed, on the nodes of a test: the package, its service, and jobs over several nodes."""

import json
import os
import re
import subprocess
import time

from kernel import ROOT
from machines import Failed

USER = "rank"  # ranks run as this user, a member of the group hreduce and nothing else
CONF = "/etc/hreduced/hreduced.conf"
# For whatever ends quickly on real machines: emulated ones, two of them on two busy cores, are a hundred times slower.
SOON = 60


def expect(condition, sentence):
    if not condition:
        raise Failed(sentence)


def wait_for(what, condition, limit=SOON):
    """The first true value of condition()."""
    end = time.monotonic() + limit
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise Failed(f"waited {limit} s in vain for {what}")
        time.sleep(0.3)


def make_package(build, place):
    """`make install` of what is built, below a folder that the machines copy to their roots."""
    done = subprocess.run(
        ["make", "-s", "-C", ROOT, "install", "SKIP_BUILD=1", f"BUILD={build}", f"DESTDIR={place}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
    expect(done.returncode == 0, f"make install failed:\n{done.stdout}")


def everywhere(nodes, command, limit=120):
    """One command on all nodes at the same time; their results, each a success."""
    results = [job.wait() for job in [node.start_job(command, limit) for node in nodes]]
    for node, result in zip(nodes, results):
        expect(result.status == 0, f"{node.name}: {result}")
    return results


# The unit's limits are for machines that are not emulated: what misses them here is late, not wrong.
PATIENT = r"[Service]\nTimeoutStartSec=300s\nWatchdogSec=120s\n"


def install(nodes, package):
    """As the README says it."""
    everywhere(nodes, f"cp -a {package}/. / && ldconfig && systemd-sysusers hreduced.conf && systemd-tmpfiles --create "
                      f"hreduced.conf && useradd -M -G hreduce {USER} && cd /etc/systemd/system && "
                      f"mkdir hreduced.service.d && printf '{PATIENT}' >hreduced.service.d/patient.conf && "
                      "systemctl daemon-reload", limit=240)


# Whatever the case before it left behind: the device is there, the socket and the service are up.
READY = """
rdma link show rxe0/1 >/dev/null 2>&1 || rdma link add rxe0 type rxe netdev eth0
systemctl is-active -q hreduced.socket || systemctl stop hreduced.service
systemctl start hreduced.socket hreduced.service
"""


class Node:
    """The service on one machine."""

    def __init__(self, machine):
        self.run, self.attempt, self.start_job = machine.run, machine.attempt, machine.start
        self.name, self.address, self.rdma = machine.name, machine.address, machine.rdma

    def configure(self, **keys):
        """What a node of a test needs, and more. Emulated machines acknowledge late: with the usual 67 ms soft-RoCE sends
        again what is on its way; 18 is 1 s. They are as late with heartbeats and when they connect."""
        keys = {"listen": self.address, "arena_size": "16M", "verbs_timeout": 18, "peer_timeout": "60s", **keys}
        lines = "\\n".join(f"{key} = {value}" for key, value in keys.items())
        self.run(f"printf '{lines}\\n' >{CONF}")

    def systemctl(self, *words):
        return self.run(["systemctl", *words], limit=120)

    def show(self, name, unit="hreduced.service"):
        return self.run(["systemctl", "show", "-P", name, unit]).out.strip()

    def pid(self):
        return int(self.show("MainPID"))

    def serves(self):
        return self.attempt("hreducectl version >/dev/null").status == 0

    def journal(self, *words):
        """The daemon's entries of this boot, as objects."""
        said = self.run(["journalctl", "-b", "-o", "json", "--no-pager", "SYSLOG_IDENTIFIER=hreduced", *words], limit=120)
        return [json.loads(line) for line in said.out.splitlines() if line.startswith("{")]

    def ctl(self, *words):
        said = self.attempt(["hreducectl", *words, "--json"])
        expect(said.status == 0, f"{self.name}: {said}")
        return json.loads(said.out)

    def ops(self):
        """How many this node has done on its only communicator; -1: there is none."""
        said = self.attempt("hreducectl status --json")
        comms = json.loads(said.out)["comms"] if said.status == 0 else []
        return comms[0].get("ops_done", -1) if len(comms) == 1 else -1


class Perf:
    """hreduce-perf with one or more ranks on each of the nodes, as torchrun would start it."""

    made = 0
    started = []

    def __init__(self, nodes, args, ranks=1, limit=180):
        Perf.made += 1
        Perf.started.append(self)
        self.nodes, self.jobs = nodes, []
        world = len(nodes) * ranks
        for i, node in enumerate(nodes):
            for local in range(ranks):
                env = {"RANK": i * ranks + local, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks,
                       "MASTER_ADDR": nodes[0].address, "MASTER_PORT": 7000,
                       "TORCHELASTIC_RUN_ID": f"perf{os.getpid()}-{Perf.made}", "TORCHELASTIC_RESTART_COUNT": 0}
                words = " ".join(f"{name}={value}" for name, value in env.items())
                self.jobs.append(node.start_job(
                    f"exec setpriv --reuid={USER} --regid={USER} --init-groups env {words} hreduce-perf -T {2 * SOON} {args}",
                    limit=limit))

    def running(self):
        """Whether all ranks are."""
        return all(job.running() for job in self.jobs)

    def results(self):
        return [job.wait() for job in self.jobs]

    def ok(self):
        """Rank 0's output; every rank must have ended well, without a wrong element."""
        results = self.results()
        for result in results:
            expect(result.status == 0, str(result))
        expect(re.search(r"Wrong elements *: 0 OK", results[0].out), str(results[0]))
        return results[0].out

    def kill(self):
        for job in self.jobs:
            if job.running() and job.machine.jobs is not None:
                job.kill()
                job.wait(SOON)


def kill_jobs():
    """No job outlives its case, however that ended."""
    while Perf.started:
        Perf.started.pop().kill()


def busy(nodes, size="1M"):
    """A job in the middle of its operations, of which several are in flight at any time: it would go on for hours."""
    job = Perf(nodes, f"-b {size} -n 1000000 -w 0 -c 0 -z 0", limit=400)
    wait_for("the job's first operations", lambda: nodes[0].ops() > 3 or not job.running(), 180)
    expect(job.running(), f"the job has ended: {job.jobs[0].result}")
    return job


def path_lines(out):
    """The stages of the path report that hreduce-perf prints: {'exchange': 'verbs, ...', ...}."""
    found = {}
    for line in out.split("# Path, from", 1)[-1].splitlines():
        stage = re.match(r"# (layout|buffers|local reduce|exchange|algorithm|local broadcast) +(.*)", line)
        if stage:
            found[stage.group(1)] = stage.group(2)
    return found
