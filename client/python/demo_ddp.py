#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains a small model twice, its gradients averaged by gloo and by hreduce, and compares the weights.

    demo_ddp.py --local 2x2     starts 2 daemons (nodes) with 2 ranks each on this machine
    demo_ddp.py ... --cuda      the model on GPUs: rank r of a node on GPU r, modulo their number
    torchrun ... demo_ddp.py    uses the hreduced daemon of each node

Exit status 0: the weights agree. HREDUCE_BUILD: where hreduced and libhclient.so are (default: build/).
"""

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.path.abspath(os.environ.get("HREDUCE_BUILD", os.path.join(HERE, "..", "..", "build")))
START_SECONDS = 20
PR_SET_PDEATHSIG = 1

# What both trainings have in common. The difference of the weights is rounding alone: the two libraries add in
# another order.
FEATURES, HIDDEN, CLASSES, BATCH = 64, 512, 10, 32
RATE, BUCKET_MB, TOLERANCE = 0.1, 1, 1e-5


# ------------------------------------------------------------------------------------------------ a rank


def train(steps, rank, hook_comm, device):
    """Returns the final weights as one vector, the first and the last loss, the seconds, and the number of
    buckets a step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, CLASSES),
    ).to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    buckets = [0]
    if hook_comm is not None:
        import hclient.torch

        def hook(comm, bucket):
            buckets[0] += 1
            return hclient.torch.allreduce_hook(comm, bucket)

        ddp.register_comm_hook(hook_comm, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE, momentum=0.9)
    data = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(BATCH, FEATURES, generator=data)
    y = x[:, :CLASSES].argmax(dim=1).to(device)
    x = x.to(device)
    losses = []
    start = time.monotonic()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if hook_comm is not None:
        hook_comm.wait()
    seconds = time.monotonic() - start
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()
    return weights, losses[0], losses[-1], seconds, buckets[0] // steps


def run_rank(steps, cuda):
    """One training process. Returns the exit status."""
    sys.path.insert(0, HERE)
    import torch
    import torch.distributed as dist

    import hclient

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = torch.device("cpu")
    if cuda:
        if not torch.cuda.is_available():
            raise SystemExit("demo-ddp: --cuda: this PyTorch sees no GPU")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)

    def say(text):
        if rank == 0:
            print(text, flush=True)

    with hclient.Comm.from_name("demo-ddp", setup_timeout=60) as comm:
        say(f"{comm.nranks} ranks on {comm.nnodes} nodes, communicator {comm.id}, daemon {comm.daemon_version}")
        plain, first, last, seconds, _ = train(steps, rank, None, device)
        say(f"gloo     {steps} steps, {plain.numel()} weights, loss {first:.4f} to {last:.4f}, {seconds:.2f} s")
        ours, first, last, seconds, buckets = train(steps, rank, comm, device)
        say(f"hreduce  {steps} steps, {buckets} buckets a step, loss {first:.4f} to {last:.4f}, {seconds:.2f} s")

        # The weights of all ranks, bit for bit, by hreduce itself; and against gloo's.
        everyone = torch.empty(comm.nranks * ours.numel())
        comm.all_gather(ours, everyone)
        same = all(torch.equal(part, ours) for part in everyone.chunk(comm.nranks))
        difference = (ours - plain).abs().max().item()
        say(f"weights  equal on all ranks, bit for bit: {same}; largest difference to gloo's {difference:.3g}")
        path = json.loads(comm.path())
        for stage in path.get("stages", []):
            if isinstance(stage, dict):
                say(f"path     {stage.get('stage', '')}: {stage.get('used', '')}")
        good = same and buckets > 1 and last < first and difference <= TOLERANCE
        verdict = torch.tensor([1 if good else 0], dtype=torch.int32)
        comm.all_reduce(verdict, op="min")
    dist.destroy_process_group()
    say("demo-ddp: the weights agree" if verdict.item() else f"demo-ddp: FAILED on rank {rank} or another")
    return 0 if verdict.item() else 1


# --------------------------------------------------------------------------------------------- this machine


def die_with_parent():
    """Between fork and exec: no daemon or rank outlives the demo."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def free_port(addresses):
    """A port that is free on all of the addresses."""
    for _ in range(100):
        port = random.randrange(20000, 32000)
        sockets = []
        try:
            for address in addresses:
                s = socket.socket()
                sockets.append(s)
                s.bind((address, port))
            return port
        except OSError:
            continue
        finally:
            for s in sockets:
                s.close()
    raise SystemExit("demo-ddp: no TCP port is free on " + ", ".join(addresses))


def start_daemon(directory, address, port):
    """One node's daemon; returns its process and socket."""
    os.mkdir(directory)
    path = os.path.join(directory, "s")
    config = os.path.join(directory, "hreduced.conf")
    with open(config, "w", encoding="utf-8") as f:
        f.write(f"socket = {path}\nlisten = {address}\nport = {port}\n")
    with open(os.path.join(directory, "log"), "wb") as log:
        process = subprocess.Popen(
            [os.path.join(BUILD, "hreduced"), "--config", config],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
    return process, path


def wait_for_socket(process, path):
    """Until the daemon takes connections."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            try:
                s.connect(path)
                return
            except OSError:
                time.sleep(0.02)
    with open(os.path.join(os.path.dirname(path), "log"), encoding="utf-8", errors="replace") as log:
        raise SystemExit(f"demo-ddp: {BUILD}/hreduced did not start:\n{log.read()}")


def run_local(nodes, ranks_per_node, arguments):
    """Daemons and ranks on this machine. Returns the exit status."""
    if not os.path.exists(os.path.join(BUILD, "hreduced")):
        raise SystemExit(f"demo-ddp: {BUILD}/hreduced is missing; run make, or set HREDUCE_BUILD")
    root = tempfile.mkdtemp(prefix="hreduce-ddp-")
    addresses = [f"127.0.0.{i + 1}" for i in range(nodes)]
    port, torch_port = free_port(addresses), free_port(["127.0.0.1"])
    processes, ranks = [], []
    try:
        print(f"starting {nodes} daemons on {addresses[0]} to {addresses[-1]}, {ranks_per_node} ranks each", flush=True)
        daemons = [start_daemon(os.path.join(root, str(i)), a, port) for i, a in enumerate(addresses)]
        processes += [p for p, _ in daemons]
        for process, path in daemons:
            wait_for_socket(process, path)
        for rank in range(nodes * ranks_per_node):
            env = dict(
                os.environ,
                RANK=str(rank),
                WORLD_SIZE=str(nodes * ranks_per_node),
                LOCAL_RANK=str(rank % ranks_per_node),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(torch_port),
                HREDUCE_SOCKET=daemons[rank // ranks_per_node][1],
                HREDUCE_ROOT_ADDR=f"{addresses[0]}:{port}",
                HREDUCE_BUILD=BUILD,
                GLOO_SOCKET_IFNAME="lo",
            )
            command = [sys.executable, os.path.abspath(__file__), *arguments]
            ranks.append(subprocess.Popen(command, env=env, preexec_fn=die_with_parent))
        processes += ranks
        return max(abs(r.wait()) for r in ranks)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        shutil.rmtree(root)


def main():
    """Parses the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local", metavar="NxR", help="start N daemons with R ranks each on this machine")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default 20)")
    parser.add_argument("--cuda", action="store_true", help="train on GPUs")
    args = parser.parse_args()
    if args.local is None:
        return run_rank(args.steps, args.cuda)
    try:
        nodes, ranks = (int(n) for n in args.local.lower().split("x"))
    except ValueError:
        parser.error(f"--local {args.local}: write NxR, for instance 2x2")
    if not (1 <= nodes <= 16 and 1 <= ranks <= 64):
        parser.error(f"--local {args.local}: 1 to 16 daemons with 1 to 64 ranks each")
    return run_local(nodes, ranks, ["--steps", str(args.steps)] + ["--cuda"] * args.cuda)


if __name__ == "__main__":
    sys.exit(main())
