# SPDX-License-Identifier: MIT
"""The Python binding on two nodes: every collective on buffers of the standard library, handles, shared memory,
what is refused, and what a failure looks like. timeout: 120"""

import array
import gc
import json
import os
import sys

ROOT = os.environ["HREDUCE_ROOT"]
sys.path.insert(0, os.path.join(ROOT, "tests", "lib"))
sys.path.insert(0, os.path.join(ROOT, "client", "python"))
from cluster import Cluster  # noqa: E402

NRANKS = 4


def raises(kind, words, call, *args, **named):
    try:
        call(*args, **named)
    except kind as error:
        assert words in str(error), f"'{words}' is not in: {error}"
        return error
    raise AssertionError(f"no {kind.__name__} from {call}")


def collectives(comm):
    rank, n = comm.rank, comm.nranks
    a = array.array("f", [rank + i for i in range(1000)])
    comm.all_reduce(a)
    assert all(a[i] == 6 + 4 * i for i in range(1000))
    out = array.array("f", bytes(4000))
    comm.all_reduce(a, out, op="avg")
    assert out == a
    comm.all_reduce(out, op="max")
    assert out == a

    b = array.array("i", [rank, -rank])
    comm.broadcast(b, root=2)
    assert list(b) == [2, -2]
    part = array.array("q", [0, 0])
    comm.reduce_scatter(array.array("q", range(2 * n)), part)
    assert list(part) == [4 * 2 * rank, 4 * (2 * rank + 1)]
    whole = bytearray(3 * n)
    comm.all_gather(bytes([rank, 10 + rank, 20 + rank]), whole)
    assert list(whole) == [v for r in range(n) for v in (r, 10 + r, 20 + r)]
    comm.barrier()

    handles = []
    big = [array.array("d", [rank * 1.0] * 300000) for _ in range(5)]
    for v in big:
        handles.append(comm.all_reduce(v, op="sum", wait=False))
    handles[3].wait()
    while not handles[0].done():
        pass
    comm.wait()
    handles[0].wait()
    assert all(v[0] == 6 and v[-1] == 6 for v in big)

    empty = array.array("f")
    comm.all_reduce(empty)


def shared_memory(comm, hclient):
    buffer = hclient.SharedBuffer(80000)
    floats = buffer.view.cast("f")
    assert len(floats) == 20000 and floats[0] == 0
    for i in range(0, 20000, 100):
        floats[i] = comm.rank
    comm.all_reduce(floats)
    assert floats[0] == 6 and floats[19900] == 6 and floats[1] == 0
    report = json.loads(comm.path())
    assert isinstance(report, dict)
    floats.release()
    buffer.free()
    buffer.free()


def refusals(comm, hclient):
    f = array.array("f", [1, 2, 3])
    raises(ValueError, "read-only", comm.all_reduce, bytes(4))
    raises(TypeError, "format", comm.all_reduce, array.array("h", [1]))
    raises(TypeError, "", comm.all_reduce, 5)
    raises(ValueError, "not contiguous", comm.all_reduce, memoryview(f)[::2])
    raises(ValueError, "2", comm.all_reduce, f, array.array("f", [0, 0]))
    raises(TypeError, "element types", comm.all_reduce, f, array.array("i", [0, 0, 0]))
    raises(ValueError, "ranks", comm.all_gather, f, array.array("f", [0, 0, 0]))
    raises(KeyError, "median", comm.all_reduce, f, op="median")
    error = raises(hclient.Error, "root 9", comm.broadcast, f, root=9)
    assert error.code == 2
    raises(ValueError, "128 bytes", hclient.Comm.from_id, b"short", 2, 0)
    raises(hclient.Error, "not an id", hclient.Comm.from_id, bytes(128), 2, 0)
    raises(hclient.Error, "config.algo", hclient.Comm.from_name, "x", algo=77)


def failures(comm, hclient):
    """Ranks that disagree: the same sentence on all, and the communicator goes on."""
    v = array.array("f", [1] * (10 + comm.rank % 2))
    error = raises(hclient.Error, "mismatch", comm.all_reduce, v)
    assert error.code == 4 and "10" in str(error) and "11" in str(error)
    assert set(v) == {1.0}
    comm.barrier()
    assert comm.error() is None

    with hclient.Comm.from_name("to-abort") as other:
        other.barrier()
        if other.rank == 1:
            other.abort()
        error = raises(hclient.Error, "abort", lambda: [other.barrier() for _ in range(1000)])
        assert error.code == 8, error
        assert other.error().code == 8
    raises(hclient.Error, "not a communicator", other.barrier)

    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            raises(hclient.Error, "forked", comm.barrier)
            comm.close = None
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    comm.barrier()


def rank_main():
    import hclient

    comm = hclient.Comm.from_name("first", setup_timeout=60, op_timeout=30)
    assert comm.nranks == NRANKS and comm.nnodes == 2 and comm.local_size == 2
    assert comm.rank == int(os.environ["RANK"]) and comm.local_rank == int(os.environ["LOCAL_RANK"])
    assert comm.node == comm.rank // 2 and len(comm.id) == 32
    collectives(comm)
    shared_memory(comm, hclient)
    refusals(comm, hclient)
    failures(comm, hclient)

    # An id that rank 0 makes travels by a collective of the first communicator.
    uid = bytearray(hclient.get_unique_id() if comm.rank == 0 else 128)
    comm.broadcast(uid)
    second = hclient.Comm.from_id(bytes(uid), NRANKS, NRANKS - 1 - comm.rank)
    v = array.array("i", [second.rank])
    second.broadcast(v, root=0)
    assert v[0] == 0
    left = second.all_reduce(v, wait=False)
    second.wait()
    comm.close()
    comm.close()
    kept = hclient.SharedBuffer(1)
    del second, left, comm
    gc.collect()
    print(f"ok {kept.view[0]}")


def main():
    with Cluster(2) as cluster:
        env = {"LD_PRELOAD": os.environ["HREDUCE_PRELOAD"]} if os.environ.get("HREDUCE_PRELOAD") else {}
        # The interpreter never frees all it has; what the library leaves is found by the tests in C.
        env["ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
        command = [os.environ.get("HREDUCE_PYTHON", sys.executable), os.path.abspath(__file__), "rank"]
        ranks = cluster.ranks(NRANKS, command, env=env)
        for output in cluster.wait(ranks, 60):
            assert output.endswith("ok 0\n"), output
    print("python binding: fine")


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank_main()
    else:
        main()
