# SPDX-License-Identifier: MIT
"""A communication hook for DistributedDataParallel, on CPU and CUDA tensors.

    comm = hclient.Comm.from_name("ddp")
    model = DistributedDataParallel(module)
    model.register_comm_hook(comm, hclient.torch.allreduce_hook)

Each bucket of gradients is averaged by hreduce, in place, while backward goes on with the next. On CPU
tensors an op that failed makes backward() raise, so that no optimizer step is made with what is in the
bucket. The process group of DDP (gloo) is still needed for what DDP does beside: checking parameters and
broadcasting buffers.

On CUDA tensors nothing waits on the processor: the ops run on a stream of their own beside backward, and what DDP does next
is ordered behind them on the GPU. An op that fails ends the process, unless the communicator was made with
on_error="release": then it is noticed at the next bucket, which raises; that of a step's last bucket only in the next step.
Where the optimizer must not see what such an op left (NaN where the daemon or the library could fill it), call comm.wait()
between backward() and step(): it waits for the ops and raises.

Where CUDA_DEVICE_MAX_CONNECTIONS is 1 or 2, a stream that waits would hold up backward itself. There the waits for the
buckets of a step are put into the stream together, with its last bucket.
"""

import collections
import os
import queue
import threading
import weakref

import torch

from . import Error

_DEFER = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") in ("1", "2")
_NO_ROOM = 3, 12  # unsupported, no resource

_waiters = weakref.WeakKeyDictionary()
_streams = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Waiter:
    """One thread a communicator that waits for its ops, in order, and completes their futures."""

    def __init__(self):
        self.jobs = queue.SimpleQueue()
        self.thread = threading.Thread(target=_wait_for_jobs, args=(self.jobs,), name="hclient-ddp", daemon=True)
        self.thread.start()


def _wait_for_jobs(jobs):
    while True:
        job = jobs.get()
        if job is None:
            return
        op, future = job
        try:
            op.wait()
            future.set_result(None)
        except Exception as error:  # whatever it is, the thread that waits for the future must learn of it
            future.set_result(error)
        del job, op, future


def _waiter_of(comm):
    with _lock:
        waiter = _waiters.get(comm)
        if waiter is None:
            waiter = _waiters[comm] = _Waiter()
            weakref.finalize(comm, waiter.jobs.put, None).atexit = False
        return waiter


class _Stream:
    """The stream of a communicator's ops on one device, and those not known to be over."""

    def __init__(self, device):
        self.stream = torch.cuda.Stream(device)
        self.ops = collections.deque()
        self.deferred = []  # ops with their futures and tensors

    def post(self, comm, tensor, future):
        """In this stream: the op; the future completes with the tensor, at once or, deferred, with flush()."""
        if _DEFER:
            try:
                op = comm.all_reduce(tensor, op="avg", defer=True)
                self.ops.append(op)
                self.deferred.append((op, future, tensor))
                return
            except Error as error:
                if error.code not in _NO_ROOM:
                    raise
            self.flush()  # what the others hold is needed; from here on the waits come with the calls
        self.ops.append(comm.all_reduce(tensor, op="avg", wait=False))
        future.set_result(tensor)  # remembers this stream's place, which whoever uses the value waits for

    def flush(self):
        """In this stream: waits for what was deferred."""
        deferred, self.deferred = self.deferred, []
        for op, future, tensor in deferred:
            op.stream_wait(self.stream)
            future.set_result(tensor)

    def check(self, comm):
        """Raises for an op, or the communicator, that failed."""
        error = comm.error()
        if error is not None:
            raise error
        while self.ops and self.ops[0].done():
            self.ops.popleft()


def _on_gpu(comm, bucket, tensor):
    with _lock:
        side = _streams.setdefault(comm, {}).setdefault(tensor.device, None)
        if side is None:
            side = _streams[comm][tensor.device] = _Stream(tensor.device)
    side.check(comm)
    side.stream.wait_stream(torch.cuda.current_stream(tensor.device))
    future = torch.futures.Future(devices=[tensor.device])
    with torch.cuda.stream(side.stream):
        if bucket.index() == 0:
            side.flush()  # of a backward that broke off
        side.post(comm, tensor, future)
        if bucket.is_last():
            side.flush()
    return future


def allreduce_hook(comm, bucket):
    """For register_comm_hook(): averages the bucket over the ranks of comm. The future that is returned
    completes with the bucket's own tensor."""
    tensor = bucket.buffer()
    if tensor.device.type == "cuda":
        return _on_gpu(comm, bucket, tensor)
    if tensor.device.type != "cpu":
        raise TypeError(f"the gradients are on {tensor.device}; hreduce takes those of CPUs and CUDA GPUs")
    op = comm.all_reduce(tensor, op="avg", wait=False)
    future = torch.futures.Future()

    def result(done):
        error = done.value()
        if error is not None:
            raise error
        return tensor

    # An exception of a callback becomes the error of the future; set_exception() would reach C++ as a value.
    averaged = future.then(result)
    _waiter_of(comm).jobs.put((op, future))
    return averaged
