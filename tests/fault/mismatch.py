#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Ranks that disagree, and ranks that do not come. One sentence, the same on all ranks; no output is touched; the
communicator goes on with the next op."""
# timeout: 90

import os
import re
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_fault import (  # noqa: E402
    MISMATCH, OK, RANK_LOST, SCALE, TIMEOUT, Cluster, Job, check, expect, run_tests, tell,
)

F32, F64, SUM, MAX = 0, 1, 0, 3
# The deadline in ms: the ops that are to succeed have it too, so it must do for them on a busy machine.
LIMIT = 3000 * int(SCALE)


def same_text(replies):
    texts = {r.text for r in replies.values()}
    check(len(texts) == 1, f"the ranks were told different things: {texts}")
    return texts.pop()


def untouched(job):
    """Inputs and outputs are what fill_all() wrote."""
    job.all_do(lambda i: f"same 0 11 {i}")
    job.all_do(lambda i: f"same 1 12 {i}")


def fill_all(job):
    job.all_do(lambda i: f"fill 0 11 {i}")
    job.all_do(lambda i: f"fill 1 12 {i}")


def disagree(job, words, post):
    """post(i): COUNT DTYPE REDOP of rank i."""
    fill_all(job)
    begin = time.monotonic()
    job.all_do(lambda i: f"post {job.slot} 0 0 1 {post(i)}")
    replies = job.all("wait 0")
    expect(replies, MISMATCH, words, begin)
    text = same_text(replies)
    check(len(set(re.findall(r"rank (\d+)", text))) == 2, f"not two ranks in: {text}")
    tell(text, begin, replies)
    untouched(job)
    job.check()


def test_mismatch():
    with Cluster(2) as cluster:
        where = [0, 0, 0, 0, 1, 1, 1, 1]
        for kind in ("alloc", "plain"):
            job = Job(cluster, where, kind, 4 * 409600)
            disagree(job, ("rank 0", "409600", "409598"), lambda i: 409600 if i == 0 else 409598)
            disagree(job, ("rank 0", " 1 ", "409600"), lambda i: 1 if i == 0 else 409600)
            job.close()
            job = Job(cluster, where, kind, 1 << 16)
            disagree(job, ("rank 7", "6000", "5999"), lambda i: 6000 if i == 7 else 5999)
            disagree(job, ("f32", "f64"), lambda i: f"1000 {F64 if i == 5 else F32}")
            disagree(job, ("sum", "max"), lambda i: f"1000 {F32} {MAX if i > 3 else SUM}")
            disagree(job, ("rank 3", " 0 "), lambda i: 0 if i == 3 else 1000)
            job.close()


def missing(job, absent, op_ms):
    """Everybody but `absent` posts; the deadline runs from the first; all are told who did not come, those as
    well."""
    fill_all(job)
    begin = time.monotonic()
    job.all_do(f"post {job.slot} 0 0 1 5000", but=absent)
    replies = job.all("wait 0", but=absent)
    expect(replies, TIMEOUT, (), begin, op_ms / 1000 + 8)
    check(all(r.time - begin > op_ms / 1000 - 0.05 for r in replies.values()), "the deadline came too early")
    for i in absent:
        job.ranks[i].do(f"post {job.slot} 0 0 1 5000")
        replies[i] = job.ranks[i].ask("wait 0")
    expect(replies, TIMEOUT)
    text = same_text(replies)
    tell(f"{op_ms} ms: {text}", begin, {i: r for i, r in replies.items() if i not in absent})
    named = set(map(int, re.findall(r"rank (\d+)", text)))
    check(named == set(absent), f"{absent} were missing, named are {named}: {text}")
    for i in absent:
        check(f"node{job.where[i]}" in text and str(job.ranks[i].pid) in text, f"no node or pid in: {text}")
    untouched(job)
    job.check()


def test_deadline():
    """3 nodes x 3 ranks; 4 and 7 do not come."""
    with Cluster(3, "stall_warning = 300ms\n") as cluster:
        job = Job(cluster, [0, 0, 0, 1, 1, 1, 2, 2, 2], op_ms=LIMIT)
        job.check()
        missing(job, (4, 7), LIMIT)
        missing(job, (0,), LIMIT)
        logs = "".join(node.text() for node in cluster.nodes)
        warned = [line for line in logs.splitlines() if "rank 4" in line and "rank 7" in line and "warning" in line]
        check(warned, "no stall warning before the deadline that names ranks 4 and 7")
        job.close()


def test_whole_node_absent():
    """No rank of a node comes: all of its ranks are named."""
    with Cluster(2) as cluster:
        job = Job(cluster, [0, 0, 1, 1], "alloc", 1 << 20, op_ms=LIMIT)
        missing(job, (2, 3), LIMIT)
        missing(job, (0, 1), LIMIT)


def test_deadline_of_large_ops():
    """Units are under way on the other nodes' side: they are called back and the next op is right."""
    with Cluster(3) as cluster:
        job = Job(cluster, [0, 0, 1, 1, 2, 2], "alloc", 8 << 20, op_ms=LIMIT)
        for absent in ((5,), (0,), (2, 3)):
            begin = time.monotonic()
            job.all_do(f"post 0 0 0 1 {2 << 20}", but=absent)
            replies = job.all("wait 0", but=absent)
            expect(replies, TIMEOUT, tuple(f"rank {i}" for i in absent), begin, 12)
            for i in absent:
                job.ranks[i].do("post 0 0 0 1 5000")
                check(job.ranks[i].ask("wait 0").code == TIMEOUT, "the late rank was told something else")
            job.check(2, 1 << 18)


def test_stalled_jobs_log_little():
    """8 ranks with ops that wait for one: a few lines, not one for each rank and op."""
    with Cluster(1, "stall_warning = 200ms\n") as cluster:
        job = Job(cluster, [0] * 8)
        job.check()
        before = len(cluster.nodes[0].text().splitlines())
        for n in range(30):
            job.all_do(f"post 0 {n} 0 1 100", but=(3,))
        time.sleep(3)
        lines = cluster.nodes[0].text().splitlines()[before:]
        print("   " + "\n   ".join(line[:200] for line in lines))
        check(any("rank 3" in line for line in lines), "the stall is not in the log")
        check(len(lines) <= 20, f"{len(lines)} lines for one stall")
        waits = job.send("wait 29", but=(3,))
        job.ranks[3].kill()
        expect(job.get(waits), (RANK_LOST, OK), ("rank 3",))


run_tests(globals())
