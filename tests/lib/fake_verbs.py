# SPDX-License-Identifier: MIT
"""Verbs without a device: daemons that load tests/sim/fake_ibverbs in libibverbs's place, and what their devices
are told to do. `tests/run --verbs` runs tests of other parts in this way, with HREDUCE_TEST_TRANSPORT=verbs."""

import os
import socket

from cluster import BUILD, VERBS

DIRECTORY = os.path.join(BUILD, "tests", "fake_ibverbs")
RDMACM = os.path.join(BUILD, "tests", "fake_rdmacm")


def environment(orders="", rdmacm=False):
    """Of a daemon with a fake device; orders: see tests/sim/fake_ibverbs/fake.h. rdmacm: with an RDMA-CM that knows no address
    of the device, rather than without one."""
    return {"LD_LIBRARY_PATH": f"{DIRECTORY}:{RDMACM}" if rdmacm else DIRECTORY, "FAKE_VERBS": orders}


def line_for(nnodes, config):
    """The line that makes daemons with this configuration use verbs, if this test is to."""
    return "transport = verbs\n" if VERBS and nnodes > 1 and "transport" not in config else ""


def check_used(logs):
    """Verbs were used where this test is to: by the daemons' own words, in logs of nodes that had links."""
    if not VERBS:
        return
    paths = [line for log in logs for line in log.splitlines() if "path to node" in line]
    wrong = [line for line in paths if ": verbs" not in line]
    assert not wrong, f"not over verbs: {wrong[0]}"


def order(pid, text):
    """Tells the device of a running daemon; returns its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind("")
        s.settimeout(10)
        s.sendto(text.encode(), f"\0hreduce-fake-verbs-control-{pid}")
        answer = s.recv(65536).decode()
    assert answer != "what is that?", f"the fake device does not know '{text}'"
    return answer


def stats(pid):
    return {name: int(value) for name, value in (word.split("=") for word in order(pid, "stats").split())}


def classes(pid):
    """{(service level, traffic class): queue pairs that are connected}"""
    found = {}
    for word in order(pid, "qps").split():
        _, state, sl, tc = map(int, word.split(":"))
        if state == 3:  # IBV_QPS_RTS
            found[sl, tc] = found.get((sl, tc), 0) + 1
    return found
