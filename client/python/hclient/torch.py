# SPDX-License-Identifier: MIT
"""A communication hook for DistributedDataParallel on CPU tensors.

    comm = hclient.Comm.from_name("ddp")
    model = DistributedDataParallel(module)
    model.register_comm_hook(comm, hclient.torch.allreduce_hook)

Each bucket of gradients is averaged by hreduce, in place, while backward goes on with the next. An op that
failed makes backward() raise, so that no optimizer step is made with what is in the bucket. The process
group of DDP (gloo) is still needed for what DDP does beside: checking parameters and broadcasting buffers.
"""

import queue
import threading
import weakref

import torch

_waiters = weakref.WeakKeyDictionary()
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


def allreduce_hook(comm, bucket):
    """For register_comm_hook(): averages the bucket over the ranks of comm. The future that is returned
    completes with the bucket's own tensor."""
    tensor = bucket.buffer()
    if tensor.device.type != "cpu":
        raise TypeError(f"the gradients are on {tensor.device}; GPU buffers are not built yet, only the CPU's")
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
