# SPDX-License-Identifier: MIT
"""hreduce-perf --local: the table, the JSON file, the wire bytes, wrong command lines, and that nothing is left
behind however it ends. timeout: 180"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.environ["HREDUCE_ROOT"], "tests", "lib"))
from cluster import BUILD, SCALE, VERBS, wait_for  # noqa: E402

PERF = os.path.join(BUILD, "hreduce-perf")
KEYS = {
    "op",
    "bytes",
    "count",
    "type",
    "redop",
    "inplace",
    "time_us",
    "p99_us",
    "algbw_GBps",
    "busbw_GBps",
    "wrong",
    "wire_tx_bytes",
    "wire_ideal_bytes",
}


def perf(*words, status=0):
    if VERBS and "--local" in words:
        words = (*words, "--daemon-config", "transport = verbs")
    done = subprocess.run([PERF, *words], capture_output=True, text=True, timeout=100 * SCALE)
    assert done.returncode == status, f"{words}: status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


def measure(*words):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        done = perf(*words, "--json", out.name)
        document = json.load(out)
        exchange = [s["used"] for s in document["path"].get("stages", []) if s["stage"] == "exchange"]
        assert not VERBS or all(used.startswith(("verbs", "none")) for used in exchange), exchange
        return done.stdout, document


def left_behind():
    return [name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("hreduce-")]


def test_table_and_json():
    text, document = measure("--local", "3x2", "-b", "1M", "-e", "4M", "-n", "4", "-w", "2")
    rows = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert [row[0] for row in rows] == [str(1 << 20), str(2 << 20), str(4 << 20)], text
    assert all(row[8] == "0" and row[12] == "0" for row in rows), text
    assert set(document) == {"results", "path"} and isinstance(document["path"], dict), document
    assert len(document["results"]) == 6
    for result in document["results"]:
        assert set(result) == KEYS, result
        assert result["wrong"] == 0 and result["time_us"] > 0 and result["p99_us"] >= result["time_us"]
        assert abs(result["algbw_GBps"] - result["bytes"] / result["time_us"] / 1e3) < 1e-3
        assert abs(result["busbw_GBps"] - result["algbw_GBps"] * 10 / 6) < 1e-3
        sent, ideal = result["wire_tx_bytes"], result["wire_ideal_bytes"]
        assert ideal == result["bytes"] * 4 // 3, result
        assert len(sent) == 3 and max(sent) <= 1.01 * ideal and min(sent) >= 0.99 * ideal, result


def test_placement_does_not_matter():
    _, document = measure("--local", "4x2", "--map", "roundrobin", "-b", "2M", "-n", "2", "-w", "1")
    for result in document["results"]:
        assert max(result["wire_tx_bytes"]) <= 1.01 * result["wire_ideal_bytes"], result
        assert min(result["wire_tx_bytes"]) >= 0.99 * result["wire_ideal_bytes"], result


def test_collectives():
    for op in ("broadcast", "reduce_scatter", "all_gather", "barrier"):
        _, document = measure("--local", "2x2", "--op", op, "-b", "1M", "-r", "3" if op == "broadcast" else "0", "-n", "3")
        assert all(r["wrong"] == 0 and r["op"] == op for r in document["results"]), document
        assert len(document["results"]) == (1 if op == "barrier" else 2)


def test_all_types():
    _, document = measure("--local", "2x2", "-d", "all", "-o", "all", "-b", "20000", "-n", "1", "-w", "1")
    assert len(document["results"]) == 100
    assert all(r["wrong"] == 0 for r in document["results"])


def test_modes():
    for words in (["--memory", "plain"], ["--blocking", "0"], ["--algo", "ring", "--reproducible", "0"], ["--algo", "gather"]):
        _, document = measure("--local", "3x1", "-b", "300K", "-n", "5", "-d", "bfloat16", *words)
        assert all(r["wrong"] == 0 for r in document["results"]), (words, document)


def test_usage():
    for words in (["-q"], ["-b", "4X"], ["--local", "0x2"], ["-d", "float7"], ["-b", "4M", "-e", "1M"], ["--map", "block", "--keep-logs", "x"]):
        done = perf(*words, status=2)
        assert done.stderr.startswith("hreduce-perf: ") and not done.stdout, done
    assert "--local NxR" in perf("--help").stdout


def test_failures_are_told():
    done = perf("--local", "1x1", "--daemon-config", "no_such_key = 1", status=1)
    assert "no_such_key" in done.stderr, done.stderr
    done = perf("--local", "1x2", "-b", "4", "--json", "/nowhere/x.json", status=1)
    assert "/nowhere/x.json" in done.stderr and " 4 " not in done.stdout, done
    assert not left_behind()


def test_killed_rank():
    """A rank that dies is named, everything else is taken down."""
    process = subprocess.Popen([PERF, "--local", "2x2", "-b", "8M", "-n", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(children(process.pid)) == 6, 20, "4 ranks and 2 daemons")
    time.sleep(1)
    ranks = [pid for pid in children(process.pid) if b"hreduced" not in command(pid)]
    os.kill(ranks[2], signal.SIGKILL)
    _, errors = process.communicate(timeout=60 * SCALE)
    assert process.returncode == 1 and "signal 9" in errors and "rank" in errors, errors
    assert not left_behind()


def command(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as f:
        return f.read().split(b"\0")[0]


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="utf-8") as f:
        return [int(word) for word in f.read().split()]


def test_signals():
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process = subprocess.Popen([PERF, "--local", "2x1", "-b", "4M", "-n", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_for(lambda p=process: len(children(p.pid)) == 4, 20, "ranks and daemons")
        time.sleep(0.3)
        below = children(process.pid)
        process.send_signal(sig)
        _, errors = process.communicate(timeout=30 * SCALE)
        assert process.returncode == 128 + sig, (process.returncode, errors)
        assert not left_behind()
        assert not [pid for pid in below if os.path.exists(f"/proc/{pid}")], "processes were left"


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            print(name, flush=True)
            test()
