#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""tests/gpu/mps, which comparisons on one GPU run under: its MPS daemon (here a stand-in that listens as the real one) serves
the command and is gone afterwards with its server and directory, also when the command fails, when everything that was
started here is killed, and when the daemon does not hear."""
# timeout: 90

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MPS = os.path.join(HERE, "..", "gpu", "mps")

CONTROL = '''#!/usr/bin/env python3
import ctypes, os, signal, socket, sys
path = os.path.join(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "control")
how = os.environ.get("STAND_IN", "")
if sys.argv[1:] != ["-f"]:
    c = socket.socket(socket.AF_UNIX)
    c.connect(path)
    c.sendall(sys.stdin.read().encode())
    print(c.recv(100).decode(), end="")
    sys.exit(0)
if how == "refuses":
    sys.exit("no GPU for MPS")
server = os.fork()
if server == 0:
    ctypes.CDLL(None).prctl(15, b"nvidia-cuda-mps", 0, 0, 0)
    signal.pause()
s = socket.socket(socket.AF_UNIX)
s.bind(path)
s.listen(4)
with open(os.environ["STAND_IN_PIDS"], "w") as f:
    f.write(f"{os.getpid()} {server}")
while True:
    c, _ = s.accept()
    words = c.recv(100).decode()
    if words.startswith("quit") and how == "deaf":
        signal.pause()
    if words.startswith("quit"):
        os.kill(server, signal.SIGKILL)
        sys.exit(0)
    c.sendall(f"{server}\\n".encode())
    c.close()
'''


class Place:
    """A temporary directory with the stand-in, and the environment that leads to it."""

    def __init__(self, how=""):
        self.dir = tempfile.TemporaryDirectory(prefix="hreduce-mps-test-")
        control = os.path.join(self.dir.name, "control")
        self.pids = os.path.join(self.dir.name, "pids")
        self.env = dict(os.environ, HREDUCE_MPS_CONTROL=control, STAND_IN=how, STAND_IN_PIDS=self.pids)
        with open(control, "w", encoding="utf-8") as f:
            f.write(CONTROL)
        os.chmod(control, 0o755)

    def run(self, *command):
        return subprocess.run([MPS, *command], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=60, check=False)

    def gone(self, mps_dir):
        with open(self.pids, encoding="utf-8") as f:
            pids = [int(word) for word in f.read().split()]
        return not any(alive(pid) for pid in pids) and not os.path.exists(mps_dir)


def alive(pid):
    """A process of the stand-in that has not ended, whoever its parent is by now."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
            return f.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def expect(condition, text):
    if not condition:
        sys.exit(text)


def test_serves(how):
    place = Place(how)
    p = place.run("sh", "-c", 'test -S "$CUDA_MPS_PIPE_DIRECTORY/control" && dirname "$CUDA_MPS_LOG_DIRECTORY"; exit 5')
    mps_dir = p.stdout.strip()
    expect(p.returncode == 5 and mps_dir.startswith("/tmp/"), f"{how}: status {p.returncode}: {p.stdout}")
    expect(place.gone(mps_dir), f"{how}: something is left of it")


def test_killed():
    place = Place()
    p = subprocess.Popen([MPS, "sh", "-c", 'dirname "$CUDA_MPS_LOG_DIRECTORY"; sleep 60'], env=place.env,
                         stdout=subprocess.PIPE, text=True, start_new_session=True)
    mps_dir = p.stdout.readline().strip()
    expect(os.path.isdir(mps_dir), f"there is no {mps_dir}")
    os.killpg(p.pid, signal.SIGKILL)
    p.wait()
    end = time.monotonic() + 40
    while not place.gone(mps_dir):
        expect(time.monotonic() < end, "the MPS daemon outlived what was started under it")
        time.sleep(0.1)


def test_refused():
    p = Place("refuses").run("true")
    expect(p.returncode == 1 and "no GPU for MPS" in p.stdout, f"status {p.returncode}: {p.stdout}")


def test_absent():
    place = Place()
    os.remove(place.env.pop("HREDUCE_MPS_CONTROL"))
    if runpy.run_path(MPS)["find_control"]() is None:
        p = place.run("true")
        expect(p.returncode == 77, f"status {p.returncode}: {p.stdout}")


for way in ("", "deaf"):
    test_serves(way)
test_killed()
test_refused()
test_absent()
