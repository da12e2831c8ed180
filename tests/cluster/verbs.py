#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Which path real daemons take when verbs can be had on all nodes, on some, with conditions, or not at all, on simulated
devices: one decision on both ends, told in words to the job, in the log and in the metrics."""
# timeout: 120

import json
import os
import re
import resource
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fault"))
from helper_fault import BUILD, OK, RESOURCE, SCALE, Cluster, Job, check, run_tests, wait_for  # noqa: E402
from fake_verbs import classes, environment, order, stats  # noqa: E402

TCP, VERBS = 1, 2  # HCLIENT_TRANSPORT_*
REQUIRE_VERBS = 1


def cluster_of(*orders, config="", limits=None):
    return Cluster(len(orders), config, env=lambda i: environment(orders[i]), limits=limits)


def exchange(job, rank=0):
    """The exchange stage of a rank's path report, with the peer's entry."""
    report = json.loads(job.ranks[rank].do(f"path {job.slot}"))
    stage = [s for s in report["stages"] if s["stage"] == "exchange"][0]
    return stage, stage["peers"][0]


def refused(cluster, words, more="", code=None):
    """Both ranks of a job on two nodes are refused, with these words."""
    ranks = [cluster.rank(0), cluster.rank(1)]
    ident = ranks[0].do("id")
    tags = [r.send(f"init 0 2 {i} {ident} 20000 0 {more}") for i, r in enumerate(ranks)]
    for i, tag in enumerate(tags):
        reply = ranks[i].get(tag)
        check(reply.code == code if code else reply.code != OK, f"rank {i} was not refused: {reply}")
        for word in words:
            check(word in reply.text, f"rank {i}: '{word}' is missing in: {reply.text}")
        ranks[i].close()
    print(f"   {reply.text}")


def fell_back(cluster, job, words):
    """Over tcp, and everybody is told why."""
    for rank in (0, 1):
        stage, peer = exchange(job, rank)
        check(stage["used"].startswith("tcp") and stage["wanted"] == "verbs", f"{stage}")
        for word in words:
            check(word in stage["reason"], f"'{word}' is missing in: {stage['reason']}")
    metrics = cluster.nodes[0].ctl("metrics").stdout
    check("hreduce_peer_fell_back{" in metrics, "no metric of it")
    check(any("instead of verbs" in line for line in cluster.nodes[0].text().splitlines()), "not in the log")
    print(f"   {stage['reason']}")


def test_both_can():
    """Nothing configured: verbs, by devices' names in the report, and the bytes went through them."""
    with cluster_of("", "") as cluster:
        job = Job(cluster, [0, 1], "alloc", 1 << 20)
        job.check(2, 1 << 18)
        for i in (0, 1):
            stage, peer = exchange(job, i)
            check(stage["used"].startswith("verbs, ") and "wanted" not in stage, f"{stage}")
            check(peer["transport"] == "verbs" and "fakeib0 port 1, RoCE v2, GID 0" in peer["address"], f"{peer}")
            sent = stats(cluster.nodes[i].pid)
            check(sent["bytes"] >= 2 << 20 and sent["rnr"] == 0, f"{sent}")
        check("path to node node1: verbs" in cluster.nodes[0].text(), "not in the log")
        # Forced by the job: beside the other, nothing of it through the devices; against a condition it is refused.
        before = stats(cluster.nodes[0].pid)
        forced = Job(cluster, [0, 1], more=f"0 {TCP}")
        forced.check()
        check(exchange(forced)[0]["used"].startswith("tcp (forced by transport of the job"), f"{exchange(forced)}")
        check(stats(cluster.nodes[0].pid) == before, "a job that forced tcp moved something through the device")
        refused(cluster, ["so was require = verbs"], f"0 {TCP} {REQUIRE_VERBS}")
        job.check()


def test_one_cannot():
    """tcp with the reason on both, or an error where verbs are a condition: no device, a port without subnet manager, no
    such partition, no memory to register."""
    # What the device of node1 is like, lines of its configuration, and what is said of it.
    cases = [
        ("devices 0", "", ["node1", "no RDMA device in this network namespace"]),
        ("link ib; port init", "", ["node1", "port 1 of fakeib0 is INIT", "subnet manager"]),
        ("", "verbs_pkey = 0x8002\n", ["node1", "0x0002", "partition", "fakeib0"]),
        ("limit reg_mr 0", "", ["node1", "65536", "too low for RDMA", "LimitMEMLOCK=infinity"]),
        ("limit create_qp 1", "", ["node1", "queue pair", "rdma.max"]),
        ("", "transport = tcp\n", ["node1", "transport = tcp in hreduced.conf"]),
    ]

    def memlock():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    for orders, config, words in cases:
        lines = ["", config]
        with cluster_of("", orders, config=lambda i: lines[i], limits=memlock) as cluster:  # noqa: B023
            refused(cluster, words, f"0 0 {REQUIRE_VERBS}")
            job = Job(cluster, [0, 1])
            job.check()
            fell_back(cluster, job, words)
            job.close()


def test_one_of_three():
    """A communicator over both: verbs between those who can, tcp with the third, and each peer says which."""
    with cluster_of("", "", "devices 0") as cluster:
        job = Job(cluster, [0, 1, 2])
        job.check(3, 16001)
        for rank in (0, 1, 2):
            stage, _ = exchange(job, rank)
            found = {peer["name"]: peer["transport"] for peer in stage["peers"]}
            expected = {f"node{i}": "tcp" if 2 in (i, rank) else "verbs" for i in range(3) if i != rank}
            check(found == expected, f"{found} instead of {expected}")
            check("node2: no RDMA device" in stage["reason"], f"{stage}")


def test_no_device():
    """No device anywhere: tcp is what was wanted, on all nodes, and the log says so."""
    with cluster_of("devices 0", "devices 0") as cluster:
        job = Job(cluster, [0, 1])
        job.check()
        for rank in (0, 1):
            stage, peer = exchange(job, rank)
            check(stage["used"].startswith("tcp (no RDMA device on this node and its peers)"), f"{stage}")
            check("wanted" not in stage and "neither node has an RDMA device" in peer["reason"], f"{stage}")
        for node in cluster.nodes:
            line = [text for text in node.text().splitlines() if "path to node" in text][0]
            check("instead of" not in line and "neither node has an RDMA device (node" in line, line)
            check("hreduce_peer_fell_back{" not in node.ctl("metrics").stdout, "a metric of it")
        refused(cluster, ["verbs", "neither node has an RDMA device"], f"0 0 {REQUIRE_VERBS}")


def test_late():
    """What was wrong passes: communicators that are there keep their path, the next one after them is made over verbs."""
    for node in (0, 1):
        orders = ["", ""]
        orders[node] = "port down"
        with cluster_of(*orders) as cluster:
            job = Job(cluster, [0, 1])
            job.check()
            fell_back(cluster, job, [f"node{node}", "port 1 of fakeib0 is DOWN"])
            order(cluster.nodes[node].pid, "port up")
            if node == 1:
                time.sleep(2.5)  # longer than until the next attempt would be
                again = Job(cluster, [0, 1])
                again.check()
                check(exchange(again)[0]["used"].startswith("tcp"), "two links with one peer at a time")
                again.all_do("destroy 0")
            job.all_do("destroy 0")
            wait_for("verbs to be tried again", lambda: "path to node node1: verbs" in cluster.nodes[0].text(), 30)
            job.slot = 1
            job.join()
            job.check()
            check(exchange(job)[0]["used"].startswith("verbs"), f"{exchange(job)}")


def test_partition_by_value():
    """The key stands at other places of the two tables."""
    config = "transport = verbs\nverbs_pkey = 0x8001\n"
    with cluster_of("link ib; pkey 0xffff,0x8001", "link ib; pkey 0x8001,0xffff", config=config) as cluster:
        job = Job(cluster, [0, 1])
        job.check()
        check("InfiniBand, LID" in exchange(job)[1]["address"], f"{exchange(job)}")


def test_no_ipoib():
    """InfiniBand ports whose nodes have no IPoIB address: the daemons exchange LIDs, and say why not RDMA-CM; with nothing but
    RDMA-CM allowed there are no verbs."""
    why = "RDMA-CM needs an IP address of port 1 of fakeib0, and this node has none: give its IPoIB interface one"
    with Cluster(2, env=lambda i: environment("link ib", rdmacm=True)) as cluster:
        job = Job(cluster, [0, 1], "alloc", 1 << 20)
        job.check(2, 1 << 18)
        for i in (0, 1):
            stage, peer = exchange(job, i)
            check(stage["used"].startswith("verbs, ") and "wanted" not in stage, f"{stage}")
            check("connected by exchange instead of RDMA-CM on node" in stage["used"], f"{stage}")
            check(peer["setup"] == "exchange" and why in peer["setup_reason"], f"{peer}")
            check("InfiniBand, LID" in peer["address"] and " to LID " in peer["address"], f"{peer}")
            check(stats(cluster.nodes[i].pid)["bytes"] >= 2 << 20, "the bytes took another way")
            line = [text for text in cluster.nodes[i].text().splitlines() if "path to node" in text][0]
            check(why in line, line)
    for node in (0, 1):
        lines = ["", ""]
        lines[node] = "verbs_setup = rdmacm\n"
        with Cluster(2, lambda i: lines[i], env=lambda i: environment("link ib", rdmacm=True)) as cluster:  # noqa: B023
            refused(cluster, ["verbs_setup = rdmacm, but node", why], f"0 0 {REQUIRE_VERBS}")
            job = Job(cluster, [0, 1])
            job.check()
            fell_back(cluster, job, [f"node{node}: verbs_setup = rdmacm, but node", why])


def test_classes_of_jobs():
    """Each job's service level is on its queue pairs, on both nodes."""
    with cluster_of("", "") as cluster:
        jobs = [Job(cluster, [0, 1], more=f"0 {VERBS} 0 {sl + 1}") for sl in (0, 3)]
        for node in cluster.nodes:
            found = classes(node.pid)
            check(set(found) == {(0, 0), (3, 0)}, f"{found}")
        for job, sl in zip(jobs, (0, 3)):
            job.check()
            check(f"service level {sl}" in exchange(job)[0]["used"], f"{exchange(job)}")


def test_objects_run_out():
    """By the number of classes and by the device's objects: whom it meets is refused or falls back in words, who had a
    link works on, and objects are given back. They are links': ten more jobs need none."""
    with cluster_of("limit create_qp 4", "", config="transport = verbs\n") as cluster:
        jobs = [Job(cluster, [0, 1], more=f"0 {VERBS} 0 {sl + 1}") for sl in (0, 1)]
        refused(cluster, ["node0", "queue pair", "rdma.max"], f"0 {VERBS} 0 3")
        more = [Job(cluster, [0, 1], more=f"0 {VERBS} 0 1") for _ in range(4)]
        for job in jobs + more:
            job.check()
        check(stats(cluster.nodes[0].pid)["create_qp"] == 4, f"{stats(cluster.nodes[0].pid)}")
        for job in jobs[1:] + more:
            job.all_do("destroy 0")
        order(cluster.nodes[0].pid, "limit create_qp -1")
        Job(cluster, [0, 1], more=f"0 {VERBS} 0 3").check()
        jobs[0].check()


def test_no_region_for_one_job():
    """Registration fails for one communicator: it is refused, the others do not notice."""
    with cluster_of("", "", config="transport = verbs\n") as cluster:
        job = Job(cluster, [0, 1])
        job.check()
        order(cluster.nodes[0].pid, f"limit reg_mr {stats(cluster.nodes[0].pid)['reg_mr']}")
        refused(cluster, ["node0: no receive memory", "host memory cannot be registered"], code=RESOURCE)
        job.check(20)
        order(cluster.nodes[0].pid, "limit reg_mr -1")
        Job(cluster, [0, 1]).check()


def test_no_io_threads():
    """They are for tcp, which a node with transport = verbs does not take for any job."""
    lines = ["io_threads = 2\n", "io_threads = 2\ntransport = verbs\n"]
    with cluster_of("", "", config=lambda i: lines[i]) as cluster:
        Job(cluster, [0, 1]).check()
        for node, expected in zip(cluster.nodes, (2, 0)):
            task = f"/proc/{node.pid}/task"
            names = [open(f"{task}/{t}/comm").read().strip() for t in os.listdir(task)]
            check(names.count("hrd-io") == expected, f"{names}")
        refused(cluster, ["transport = tcp was asked for, but transport = verbs stands"], f"0 {TCP}")


def gpu_job(orders, *keys):
    """hreduce-perf on GPU buffers of two nodes, every element checked; the process, and its JSON document."""
    perf = os.path.join(BUILD, "hreduce-perf")
    tests = os.path.join(BUILD, "tests")
    out = os.path.join(os.environ["TMPDIR"], "gpu.json")
    lines = [word for key in ("transport = verbs", "gdr = on", *keys) for word in ("--daemon-config", key)]
    more = {"HREDUCE_CUDA_LIBRARY": os.path.join(tests, "libcuda_fake.so.1"), "HREDUCE_GPU_KERNELS": perf}
    done = subprocess.run([perf, "--local", "2x1", "--gpu", "--overlap", "idle", "-b", "256K", "-n", "2", "-w", "1", "--json", out, *lines],
                          env={**os.environ, **environment(orders), **more}, capture_output=True, text=True,
                          timeout=60 * SCALE)
    if done.returncode != 0:
        return done, None
    with open(out, encoding="utf-8") as f:
        document = json.load(f)
    check(all(result["wrong"] == 0 for result in document["results"]), f"{document['results']}")
    return done, document


def test_gpu_memory():
    """The device reaches GPU memory by dmabuf, by the peer-memory module, or not at all; each is told, and required it is
    an error."""
    for orders in ("gpu dmabuf", "gpu peermem"):
        done, document = gpu_job(orders)
        check(document is not None, f"{orders}: {done.stdout[-1500:]} {done.stderr[-1500:]}")
        exchange_stage = [s for s in document["path"]["stages"] if s["stage"] == "exchange"][0]
        for peer in exchange_stage["peers"]:
            check((peer["send"], peer["receive"]) == ("GPU memory", "GPU memory"), f"{orders}: {peer}")
        memory = [s for s in document["path"]["stages"] if s["stage"] == "exchange memory"][0]
        for verb in ("read", "written"):
            rates = re.search(verb + r" at (\d+) MB/s directly, (\d+) MB/s through host memory", memory["used"])
            check(rates and int(rates[1]) > 0 and int(rates[2]) > 0, f"{orders}: {memory}")
    done, document = gpu_job("devices 2; gpu dmabuf", "verbs_device = fakeib0,fakeib1")
    check(document is not None, f"two rails: {done.stdout[-1500:]} {done.stderr[-1500:]}")
    exchange_stage = [s for s in document["path"]["stages"] if s["stage"] == "exchange"][0]
    for peer in exchange_stage["peers"]:
        check((peer["send"], peer["receive"]) == ("GPU memory", "GPU memory"), f"two rails: {peer}")
        sent = [rail["tx_bytes"] for rail in peer["rails"]]
        check(sent[0] > 256 << 10 > sent[1], f"memory of GPUs goes over the first rail, not {sent}")
    done, _ = gpu_job("gpu none", "require = gdr")
    check(done.returncode == 1, f"{done.returncode}: {done.stdout[-1500:]} {done.stderr[-1500:]}")
    for word in ("require = gdr", "dmabuf", "Operation not supported", "Bad address"):
        check(word in done.stderr, f"'{word}' is missing in: {done.stderr}")
    print(f"   {done.stderr.splitlines()[0][:600]}")


run_tests(globals())
