# SPDX-License-Identifier: MIT
"""torch.distributed.all_reduce over gloo (float32 sum) as compare measures it: barrier, one op, the slowest rank's
time, the median. One rank; rank, size and meeting point come from torchrun's variables. Rank 0 prints a line of JSON a
size.

usage: allreduce_gloo.py BYTES[,BYTES...] SECONDS [INTERFACE]
"""

import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist

MIN_ITERS, MAX_ITERS = 5, 500


def sent_bytes(interface):
    with open("/proc/self/net/dev", encoding="ascii") as f:
        for line in f:
            name, _, rest = line.partition(":")
            if name.strip() == interface:
                return int(rest.split()[8])
    return 0


def one_op(t):
    dist.barrier()
    t0 = time.perf_counter()
    dist.all_reduce(t)
    return time.perf_counter() - t0


def check(t, rank, size):
    i = torch.arange(t.numel(), dtype=torch.int64)
    t.copy_((i + 7 * rank) % 61)
    dist.all_reduce(t)
    want = torch.zeros_like(t)
    for r in range(size):
        want += (i + 7 * r) % 61
    wrong = torch.tensor([int((t != want).sum())])
    dist.all_reduce(wrong)
    return int(wrong[0])


def wire(t, n, interface, rank, size):
    """Bytes each node sent in one op."""
    dist.barrier()
    before = sent_bytes(interface)
    dist.barrier()
    for _ in range(n):
        dist.all_reduce(t)
    dist.barrier()
    sent = torch.zeros(size, dtype=torch.int64)
    if os.environ.get("LOCAL_RANK") == "0":
        sent[rank] = (sent_bytes(interface) - before) // n
    dist.all_reduce(sent)
    return [int(x) for x in sent if x > 0]


def measure(size_bytes, seconds, interface, rank, size):
    t = torch.zeros(size_bytes // 4, dtype=torch.float32)
    wrong = check(t, rank, size)
    t.fill_(1.0)
    n = torch.tensor([min(MAX_ITERS, max(MIN_ITERS, int(seconds / one_op(t))))])
    dist.broadcast(n, 0)
    n = int(n[0])
    times = torch.tensor([one_op(t) for _ in range(n)], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    times = sorted(times.tolist())
    out = {"bytes": size_bytes, "time_us": 1e6 * times[n // 2], "p99_us": 1e6 * times[n - 1 - n // 100], "iters": n,
           "wrong": wrong}
    if interface and size_bytes >= 1 << 20:
        out["tx_bytes"] = wire(t, 5, interface, rank, size)
    if rank == 0:
        print(json.dumps(out), flush=True)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    for n in sys.argv[1].split(","):
        measure(int(n), float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None, rank, size)
    dist.barrier()


if __name__ == "__main__":
    main()
