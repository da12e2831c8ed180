# SPDX-License-Identifier: MIT
"""A real job: a small model trained by PyTorch DDP, its gradients averaged by hreduce, has the weights of a plain
all-reduce run; and when a daemon dies, backward() raises on every rank. timeout: 240"""

import os
import subprocess
import sys
import time

ROOT = os.environ["HREDUCE_ROOT"]
sys.path.insert(0, os.path.join(ROOT, "tests", "lib"))
sys.path.insert(0, os.path.join(ROOT, "client", "python"))
from cluster import SCALE, Cluster, free_port  # noqa: E402

PYTHON = os.environ.get("HREDUCE_PYTHON", sys.executable)


def rank_main():
    """Trains until the daemon of node 1 is killed."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import hclient.torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = hclient.Comm.from_name("doomed", setup_timeout=60)
    model = DistributedDataParallel(torch.nn.Linear(100, 100))
    model.register_comm_hook(comm, hclient.torch.allreduce_hook)
    end = time.monotonic() + 60 * SCALE
    steps = 0
    while time.monotonic() < end:
        before = [p.detach().clone() for p in model.parameters()]
        try:
            model(torch.randn(8, 100)).sum().backward()
        except RuntimeError as error:
            text = str(error)
            assert "lost" in text, text
            assert all(torch.equal(p, q) for p, q in zip(before, model.parameters()))
            assert comm.error() is not None
            print(f"ok after {steps} steps: {text.splitlines()[0]}", flush=True)
            os._exit(0)  # the process group is as broken as the communicator
        steps += 1
        if steps == 3 and comm.rank == 0:
            print("training", flush=True)
    print("backward() never failed", flush=True)
    os._exit(1)


def daemon_dies():
    with Cluster(2) as cluster:
        env = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": str(free_port(["127.0.0.1"]))}
        env["HREDUCE_ROOT_ADDR"] = f"127.0.0.1:{cluster.port}"
        ranks = cluster.ranks(4, [PYTHON, os.path.abspath(__file__), "rank"], env=env)
        line = ranks[0].stdout.readline()
        assert line == "training\n", line + ranks[0].communicate()[0]
        cluster.nodes[1].kill()
        for output in cluster.wait(ranks, 30):
            assert "ok after" in output, output


def main():
    if os.environ.get("HREDUCE_SANITIZE"):
        print("SKIP: PyTorch is not built for sanitizers")
        return 77
    if subprocess.run([PYTHON, "-c", "import torch"], capture_output=True, check=False).returncode != 0:
        print(f"SKIP: {PYTHON} has no torch (Debian: python3-torch)")
        return 77
    demo = os.path.join(ROOT, "client", "python", "demo_ddp.py")
    done = subprocess.run([PYTHON, demo, "--local", "2x2", "--steps", "8"], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, f"the demonstration ended with {done.returncode}"
    assert done.stdout.endswith("demo-ddp: the weights agree\n")
    daemon_dies()
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank_main()
    else:
        sys.exit(main())
