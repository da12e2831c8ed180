#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""CUDA tensors in the Python binding, on the driver without a GPU: objects that look like torch's tensors and streams are
reduced in the order of their stream, without a wait of the processor. timeout: 120"""

import ctypes
import os
import sys
import types

ROOT = os.environ["HREDUCE_ROOT"]
BUILD = os.environ["HREDUCE_BUILD"]
FAKE = os.path.join(BUILD, "tests", "libcuda_fake.so.1")
COUNT = 50001


class Stream:
    def __init__(self, handle):
        self.cuda_stream = handle


class Tensor:
    """As much of a torch tensor as the binding looks at."""

    dtype = "torch.float32"
    device = "cuda:0"
    is_cuda = True

    def __init__(self, cuda, count):
        pointer = ctypes.c_uint64()
        check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4 * count)))
        self.address, self.count, self.recorded = pointer.value, count, []

    def is_contiguous(self):
        return True

    def data_ptr(self):
        return self.address

    def numel(self):
        return self.count

    def record_stream(self, stream):
        self.recorded.append(stream)


def check(result):
    assert result == 0, f"CUDA error {result}"


def rank():
    cuda = ctypes.CDLL(FAKE)
    context, stream, host = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuInit(0))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    check(cuda.cuCtxSetCurrent(context))
    check(cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0))
    check(cuda.cuMemAllocHost_v2(ctypes.byref(host), ctypes.c_size_t(4 * COUNT)))
    numbers = (ctypes.c_float * COUNT).from_address(host.value)
    current = Stream(stream.value)
    sys.modules["torch"] = types.SimpleNamespace(
        cuda=types.SimpleNamespace(current_stream=lambda device: current), __name__="torch"
    )
    sys.path.insert(0, os.path.join(ROOT, "client", "python"))
    import hclient

    comm = hclient.Comm.from_name("gpu")
    tensor, out = Tensor(cuda, COUNT), Tensor(cuda, COUNT)
    copy = 4 * COUNT
    for turn in range(5):
        for i in range(COUNT):
            numbers[i] = i % 97 + comm.rank + turn
        check(cuda.cuMemcpyHtoDAsync_v2(ctypes.c_uint64(tensor.address), host, ctypes.c_size_t(copy), stream))
        assert comm.all_reduce(tensor, out) is None
        op = comm.all_reduce(out, op="avg", wait=False)
        check(cuda.cuMemcpyDtoHAsync_v2(host, ctypes.c_uint64(out.address), ctypes.c_size_t(copy), stream))
        check(cuda.cuStreamSynchronize(stream))
        n = comm.nranks
        for i in range(COUNT):
            want = n * (i % 97 + turn) + n * (n - 1) // 2
            assert numbers[i] == want, f"element {i} is {numbers[i]}, not {want}"
        op.wait()
        assert op.done() and tensor.recorded[-1] is current
    assert comm.error() is None
    try:
        comm.all_reduce(tensor, (ctypes.c_float * COUNT)())
    except hclient.Error as error:
        assert "one kind of memory" in str(error), error
    else:
        raise AssertionError("GPU input and host output were not refused")
    comm.close()


def main():
    sys.path.insert(0, os.path.join(ROOT, "tests", "lib"))
    from cluster import Cluster

    os.environ["HREDUCE_CUDA_LIBRARY"] = FAKE
    env = {"LD_PRELOAD": os.environ["HREDUCE_PRELOAD"]} if os.environ.get("HREDUCE_PRELOAD") else {}
    env["ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
    command = [os.environ.get("HREDUCE_PYTHON", sys.executable), os.path.abspath(__file__), "rank"]
    with Cluster(2) as cluster:
        cluster.wait(cluster.ranks(4, command, env=env), 100)


if __name__ == "__main__":
    rank() if "rank" in sys.argv else main()
