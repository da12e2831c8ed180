# SPDX-License-Identifier: MIT
"""The installed package under a real systemd: what the unit promises."""

import re

from nodes import SOON, Perf, everywhere, expect, wait_for


def start(nodes):
    """Type=notify: start returns when the daemon serves, as its own user, and the status text says what it does."""
    for node in nodes:
        node.configure()
    everywhere(nodes, "systemctl enable --now hreduced.socket hreduced.service")
    for node in nodes:
        expect(node.show("ActiveState") == "active", f"{node.name}: the service is {node.show('ActiveState')}")
        expect(node.serves(), f"{node.name}: started, but it does not serve")
        expect("serving" in node.show("StatusText"), f"{node.name}: its status text is '{node.show('StatusText')}'")
        user = node.run(f"ps -o user= -p {node.pid()}").out.strip()
        expect(user == "hreduce", f"{node.name}: the daemon runs as {user}")


def sandbox(nodes):
    """What the unit takes away is gone, what verbs need is there, and the score is what it was meant to be."""
    node = nodes[0]
    score = node.run(["systemd-analyze", "security", "--no-pager", "hreduced.service"], limit=120).out
    found = re.search(r"exposure level for hreduced.service: ([\d.]+)", score)
    expect(found, f"systemd-analyze security says no score:\n{score}")
    expect(float(found.group(1)) <= 3.0, f"the exposure level is {found.group(1)}, more than 3.0")
    status = node.run(f"cat /proc/{node.pid()}/status").out
    for line in ("CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
        expect(line in status, f"'{line}' is not in the daemon's /proc/PID/status")
    limit = node.run(f"grep 'Max locked memory' /proc/{node.pid()}/limits").out
    expect("unlimited" in limit, f"the daemon's limit of locked memory: {limit}")
    return f"exposure {found.group(1)}"


def journal(nodes):
    """The path of a communicator is an entry with fields to filter by."""
    Perf(nodes, "-b 4K -n 1 -w 0").ok()
    entries = [e for e in nodes[0].journal() if "HREDUCE_COMM" in e and " path: " in str(e.get("MESSAGE"))]
    expect(entries, "the journal has no entry with HREDUCE_COMM about a communicator's path")
    entry = entries[-1]
    expect(re.fullmatch(r"[0-9a-f]{32}", entry.get("MESSAGE_ID", "")), f"no MESSAGE_ID in {entry}")
    expect(entry.get("_SYSTEMD_UNIT") == "hreduced.service", f"the entry's unit is {entry.get('_SYSTEMD_UNIT')}")
    expect(entry.get("PRIORITY") in ("4", "5"), f"its priority is {entry.get('PRIORITY')}, not notice or warning")
    same = nodes[0].journal(f"HREDUCE_COMM={entry['HREDUCE_COMM']}")
    expect(entry["__CURSOR"] in [e["__CURSOR"] for e in same], "the field does not find the entry")


def reload(nodes):
    """A reload applies what can be applied while a communicator lives, and keeps the process."""
    node = nodes[0]
    before = node.pid()
    node.configure(log_level="info", max_sessions="77")
    node.systemctl("reload", "hreduced.service")
    wait_for("the reloaded key", lambda: node.ctl("status")["clients"]["max_sessions"] == 77)
    expect(node.pid() == before, "a reload started another process")
    node.run("echo 'port = nonsense' >>/etc/hreduced/hreduced.conf")
    node.attempt("systemctl reload hreduced.service")
    expect(node.serves() and node.pid() == before, "a mistake in the configuration ended the daemon at a reload")
    node.configure()
    node.systemctl("reload", "hreduced.service")
    wait_for("the default", lambda: node.ctl("status")["clients"]["max_sessions"] != 77)


def restart(nodes):
    """After a restart of one node jobs run as before."""
    node = nodes[1]
    old = node.pid()
    node.systemctl("restart", "hreduced.service")
    expect(node.pid() not in (0, old), "a restart did not make a new process")
    Perf(nodes, "-b 64K -n 2 -w 0").ok()


def socket_activation(nodes):
    """While the service is down its socket is up; the first that connects starts it and is served."""
    node = nodes[0]
    node.systemctl("stop", "hreduced.service")
    expect(node.show("ActiveState") == "inactive", f"stopped, the service is {node.show('ActiveState')}")
    expect(node.show("ActiveState", "hreduced.socket") == "active", "the socket unit went with the service")
    said = node.run("stat -c '%U %G %a' /run/hreduced/hreduced.sock").out.strip()
    expect(said == "hreduce hreduce 660", f"the socket belongs to {said}")
    Perf(nodes, "-b 64K -n 2 -w 0").ok()
    expect(node.show("ActiveState") == "active", "it was used, and is not active")


def stop(nodes):
    """A stop is a clean end within its limit, and the other node goes on."""
    node = nodes[1]
    node.systemctl("stop", "hreduced.service", "hreduced.socket")
    expect(node.show("Result") == "success", f"the stop's result is {node.show('Result')}")
    expect(nodes[0].serves(), "the other node's daemon does not serve any longer")
    expect(not node.serves(), "stopped with its socket, it serves")


def watchdog(nodes):
    """A daemon that does not turn any more is killed by systemd and started again. (Stopped, it cannot take the first signal,
    and need not be given time for that.)"""
    node = nodes[1]
    node.run("mkdir -p /run/systemd/system/hreduced.service.d && "
             "printf '[Service]\\nWatchdogSec=8s\\nTimeoutAbortSec=2s\\n' >/run/systemd/system/hreduced.service.d/test.conf")
    node.systemctl("daemon-reload")
    node.systemctl("restart", "hreduced.service")
    pid, before = node.pid(), int(node.show("NRestarts"))
    node.run(f"kill -STOP {pid}")
    wait_for("the restart by the watchdog", lambda: int(node.show("NRestarts")) > before, 2 * SOON)
    wait_for("the new daemon", node.serves)
    said = node.run("journalctl -b --no-pager -o cat -u hreduced.service | grep -i watchdog").out
    expect("timeout" in said, f"the journal does not name the watchdog: {said}")
    expect(node.pid() != pid, "the stopped process is still the service's")
    node.run("rm -r /run/systemd/system/hreduced.service.d")
    node.systemctl("daemon-reload")
    node.systemctl("restart", "hreduced.service")
    Perf(nodes, "-b 64K -n 2 -w 0").ok()
