#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""CUDA tensors in the Python binding, on the driver without a GPU: objects that look like torch's tensors and streams are
reduced in the order of their stream, without a wait of the processor; with waits that come later; and by the hook for
DistributedDataParallel, with one hardware queue and without that limit. timeout: 120"""

import ctypes
import os
import sys
import types

ROOT = os.environ["HREDUCE_ROOT"]
BUILD = os.environ["HREDUCE_BUILD"]
FAKE = os.path.join(BUILD, "tests", "libcuda_fake.so.1")
COUNT = 50001
BUCKETS = 4


class Stream:
    def __init__(self, handle):
        self.cuda_stream = handle

    def wait_stream(self, other):
        event = ctypes.c_void_p()
        check(CUDA.cuEventCreate(ctypes.byref(event), 2))
        check(CUDA.cuEventRecord(event, ctypes.c_void_p(other.cuda_stream)))
        check(CUDA.cuStreamWaitEvent(ctypes.c_void_p(self.cuda_stream), event, 0))


class Device:
    type = "cuda"


class Tensor:
    """As much of a torch tensor as the binding looks at."""

    dtype = "torch.float32"
    device = Device()
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


CUDA = None  # the driver


def new_stream():
    stream = ctypes.c_void_p()
    check(CUDA.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0))
    return Stream(stream.value)


class Future:
    """Of torch.futures: remembers where in the current stream its value came."""

    def __init__(self, devices):
        self.value, self.stream = None, None

    def set_result(self, value):
        self.value, self.stream = value, torch().cuda.current

    def wait(self):
        torch().cuda.current.wait_stream(self.stream)
        return self.value


class InStream:
    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        self.old, torch().cuda.current = torch().cuda.current, self.stream

    def __exit__(self, *exception):
        torch().cuda.current = self.old


class Bucket:
    def __init__(self, number, tensor):
        self.number, self.tensor = number, tensor

    def index(self):
        return self.number

    def is_last(self):
        return self.number == BUCKETS - 1

    def buffer(self):
        return self.tensor


def torch():
    return sys.modules["torch"]


def put(tensor, host, numbers, first, stream):
    for i in range(tensor.count):
        numbers[i] = first + i % 97
    size = ctypes.c_size_t(4 * tensor.count)
    check(CUDA.cuMemcpyHtoDAsync_v2(ctypes.c_uint64(tensor.address), host, size, ctypes.c_void_p(stream.cuda_stream)))
    check(CUDA.cuStreamSynchronize(ctypes.c_void_p(stream.cuda_stream)))


def expect(tensor, host, numbers, want, stream):
    handle, size = ctypes.c_void_p(stream.cuda_stream), ctypes.c_size_t(4 * tensor.count)
    check(CUDA.cuMemcpyDtoHAsync_v2(host, ctypes.c_uint64(tensor.address), size, handle))
    check(CUDA.cuStreamSynchronize(handle))
    for i in range(tensor.count):
        assert numbers[i] == want + i % 97, f"element {i} is {numbers[i]}, not {want + i % 97}"


def defer(comm, host, numbers):
    """An op that no stream waits for, until one does; and one that the processor waits for."""
    own, other = torch().cuda.current, new_stream()
    average = (comm.nranks - 1) / 2
    tensor = Tensor(CUDA, 5000)
    put(tensor, host, numbers, comm.rank, own)
    op = comm.all_reduce(tensor, op="avg", defer=True, overlap="idle")
    op.stream_wait(other)
    expect(tensor, host, numbers, average, other)
    assert tensor.recorded == [own, other] and not comm._deferred
    put(tensor, host, numbers, comm.rank, own)
    op = comm.all_reduce(tensor, op="avg", defer=True)
    assert len(comm._deferred) == 1
    op.wait()
    expect(tensor, host, numbers, average, own)
    assert not comm._deferred


def hook(comm, host, numbers):
    """Two backward passes of some buckets. Where waits are deferred, the last rank is late with each but the last: it posts
    when the others have computed something behind theirs, which they never do in a stream that stands still."""
    import hclient.torch
    from cluster import wait_for

    def marks(turn, i):
        return [os.path.join(os.environ["HREDUCE_TEST_MARKS"], f"beside-{turn}-{i}-{r}") for r in range(comm.nranks)]

    last = comm.nranks - 1
    assert hclient.torch._DEFER == (os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1")
    compute = torch().cuda.current
    beside = Tensor(CUDA, 1000)
    for turn in range(2):
        tensors = [Tensor(CUDA, 3000 * (i + 1)) for i in range(BUCKETS)]
        for i, tensor in enumerate(tensors):
            put(tensor, host, numbers, comm.rank + turn + i, compute)
        futures = []
        for i, tensor in enumerate(tensors):
            late = hclient.torch._DEFER and i < BUCKETS - 1
            if late and comm.rank == last:
                wait_for(
                    lambda: all(map(os.path.exists, marks(turn, i)[:last])),  # noqa: B023
                    30,
                    f"the other ranks' work beside bucket {i}, which this rank has not posted",
                )
            futures.append(hclient.torch.allreduce_hook(comm, Bucket(i, tensor)))
            if late:
                assert futures[-1].value is None
                handle = ctypes.c_void_p(compute.cuda_stream)
                check(CUDA.cuMemsetD8Async(ctypes.c_uint64(beside.address), 1, ctypes.c_size_t(4000), handle))
                check(CUDA.cuStreamSynchronize(handle))
                open(marks(turn, i)[comm.rank], "x", encoding="utf-8").close()
        for i, future in enumerate(futures):
            assert future.wait() is tensors[i]
            expect(tensors[i], host, numbers, (comm.nranks - 1) / 2 + turn + i, compute)
    comm.wait()


def rank():
    global CUDA
    cuda = CUDA = ctypes.CDLL(FAKE)
    context, stream, host = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuInit(0))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    check(cuda.cuCtxSetCurrent(context))
    check(cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0))
    check(cuda.cuMemAllocHost_v2(ctypes.byref(host), ctypes.c_size_t(4 * COUNT)))
    numbers = (ctypes.c_float * COUNT).from_address(host.value)
    current = Stream(stream.value)
    cuda_module = types.SimpleNamespace(current=current, stream=InStream, Stream=lambda device: new_stream())
    cuda_module.current_stream = lambda device: cuda_module.current
    sys.modules["torch"] = types.SimpleNamespace(
        cuda=cuda_module, futures=types.SimpleNamespace(Future=Future), __name__="torch"
    )
    sys.path[:0] = [os.path.join(ROOT, "client", "python"), os.path.join(ROOT, "tests", "lib")]
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
    defer(comm, host, numbers)
    hook(comm, host, numbers)
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
        env["HREDUCE_TEST_MARKS"] = cluster.root
        cluster.wait(cluster.ranks(4, command, env=env), 100)
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        cluster.wait(cluster.ranks(4, command, env=env), 100)


if __name__ == "__main__":
    rank() if "rank" in sys.argv else main()
