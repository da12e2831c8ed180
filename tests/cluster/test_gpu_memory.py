#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""GPU memory in the daemon, message by message, on the driver without a GPU: registered, shared, freed, refused in words,
announced and never sent, left behind by a process that is killed. What the daemon opened for it comes back each time."""
# timeout: 120

import ctypes
import json
import os
import random
import signal
import struct
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helper_hreduced import (  # noqa: E402
    BUILD, DONE, ERROR, FREE, REGISTERED, SCALE, Client, Daemon, check, run_tests, wait_for,
)

IMPORT_GPU, GPU_PART = 20, 21
LEGACY, VMM = 1, 2
LIBRARY = os.path.join(os.path.abspath(BUILD), "tests", "libcuda_fake.so.1")
os.environ["HREDUCE_CUDA_LIBRARY"] = LIBRARY
MIB = 1 << 20


class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("place", ctypes.c_int), ("device", ctypes.c_int),
                ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class Gpu:
    """A job's side: one device of the fake driver in this process."""

    def __init__(self, device=0):
        self.lib = ctypes.CDLL(LIBRARY)
        self.device = device
        self.context = ctypes.c_void_p()
        self.do("cuInit", 0)
        self.do("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        raw = (ctypes.c_ubyte * 16)()
        self.do("cuDeviceGetUuid_v2", raw, device)
        self.uuid = bytes(raw)

    def do(self, name, *arguments):
        code = getattr(self.lib, name)(*arguments)
        check(code == 0, f"{name} answers {code}")

    def legacy(self, size):
        """The body of an IMPORT_GPU."""
        at, handle = ctypes.c_uint64(), (ctypes.c_ubyte * 64)()
        self.do("cuCtxSetCurrent", self.context)
        self.do("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        self.do("cuIpcGetMemHandle", handle, at)
        return announce(self.uuid, size, LEGACY, 0, bytes(handle))

    def part(self, size=2 * MIB):
        prop = Prop(type=1, handles=1, place=1, device=self.device)
        handle, fd = ctypes.c_uint64(), ctypes.c_int()
        self.do("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(prop), ctypes.c_uint64(0))
        self.do("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, ctypes.c_uint64(0))
        self.do("cuMemRelease", handle)
        return fd.value


def announce(uuid, size, kind, nparts, handle=bytes(64)):
    return uuid + struct.pack("=QII", size, kind, nparts) + handle


def send_part(client, fd, offset, size=2 * MIB, cookie=None):
    client.send(GPU_PART, struct.pack("=QQ", offset, size), [fd], client.cookie if cookie is None else cookie)
    os.close(fd)


def number(message):
    check(message is not None and message.type == REGISTERED, f"no REGISTERED: {message and message.text}")
    return struct.unpack_from("=I", message.body)[0]


def free(client, buffer):
    check(client.ask(FREE, struct.pack("=II", buffer, 0)).type == DONE, "no DONE")


def gpus(daemon):
    return json.loads(daemon.ctl("status", "--json").stdout)["gpus"]


def mapped(daemon):
    return sum(device["imports"] for device in gpus(daemon)["devices"])


def descriptors(daemon):
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def in_use(daemon):
    return sum(device["in_use"] for device in gpus(daemon)["devices"])


def idle(daemon):
    wait_for("the GPUs to be given back", lambda: in_use(daemon) == 0, 30)
    check(gpus(daemon)["pinned_bytes"] == 0, "memory is pinned for GPUs that nobody uses")


def daemon_with_gpus(more=""):
    return Daemon(config="gpu_idle = 200ms\ndma_memory = 4M\n" + more)


def test_registered_and_freed():
    gpu = Gpu()
    with daemon_with_gpus() as daemon:
        check(gpus(daemon) == {"on": True, "pinned_bytes": 0, "devices": []}, f"before any job: {gpus(daemon)}")
        client, other = Client(daemon), Client(daemon)
        body = gpu.legacy(3 * MIB)
        first = number(client.ask(IMPORT_GPU, body))
        check(gpus(daemon)["pinned_bytes"] == 8 * MIB and in_use(daemon) == 1, f"{gpus(daemon)}")
        # The same allocation is mapped once, whoever of this user asks.
        second, third = number(client.ask(IMPORT_GPU, body)), number(other.ask(IMPORT_GPU, body))
        check(first != second and mapped(daemon) == 1, f"{gpus(daemon)}")
        client.send(IMPORT_GPU, announce(gpu.uuid, 6 * MIB, VMM, 3))
        for i in range(3):
            send_part(client, gpu.part(), i * 2 * MIB)
        parts = number(client.receive())
        check(mapped(daemon) == 2, f"{gpus(daemon)}")
        for buffer in (first, parts, second):
            free(client, buffer)
        check(mapped(daemon) == 1, "the other client's is gone")
        check(client.ask(FREE, struct.pack("=II", first, 0)).type == ERROR, "freed twice")
        free(other, third)
        check(mapped(daemon) == 0, f"{gpus(daemon)}")
        idle(daemon)
        number(client.ask(IMPORT_GPU, body))  # and up again
        check(in_use(daemon) == 1, f"{gpus(daemon)}")


def holds(daemon):
    """Descriptors, mappings and KiB in memory."""
    with open(f"/proc/{daemon.process.pid}/maps", encoding="ascii") as maps:
        lines = sum(1 for _ in maps)
    with open(f"/proc/{daemon.process.pid}/status", encoding="ascii") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return descriptors(daemon), lines, resident


def ask_many(client, kind, bodies):
    """Answers in the order of the requests, a few of which are under way at a time."""
    answers = []
    for at in range(0, len(bodies), 25):
        first = client.cookie + 1
        for body in bodies[at:at + 25]:
            client.send(kind, body)
        got = {m.cookie: m for m in (client.receive() for _ in bodies[at:at + 25])}
        answers += [got[first + i] for i in range(len(got))]
    return answers


def again(client, body, times):
    """Registers and frees the same memory."""
    for at in range(0, times, 100):
        buffers = [number(m) for m in ask_many(client, IMPORT_GPU, [body] * min(100, times - at))]
        for m in ask_many(client, FREE, [struct.pack("=II", buffer, 0) for buffer in buffers]):
            check(m.type == DONE, "no DONE")


def test_the_same_again_and_again():
    gpu = Gpu()
    times = 2000 if SCALE > 1 else 100000
    with daemon_with_gpus() as daemon:
        client, other = Client(daemon), Client(daemon)
        body = gpu.legacy(MIB)
        kept = number(other.ask(IMPORT_GPU, body))
        again(client, body, 1000)
        before = holds(daemon)
        again(client, body, times)
        # 2000 at a time are one mapping.
        buffers = [number(m) for m in ask_many(client, IMPORT_GPU, [body] * 2000)]
        live = holds(daemon)
        check(mapped(daemon) == 1 and live[0] <= before[0] and live[1] <= before[1] + 8, f"{before} -> {live}")
        random.Random(5).shuffle(buffers)
        for m in ask_many(client, FREE, [struct.pack("=II", buffer, 0) for buffer in buffers]):
            check(m.type == DONE, "no DONE")
        # And each time the last user goes with it.
        free(other, kept)
        wait_for("the mapping to be closed", lambda: mapped(daemon) == 0)
        for _ in range(times // 50):
            free(client, number(client.ask(IMPORT_GPU, body)))
        client.send(IMPORT_GPU, announce(gpu.uuid, 2 * MIB, VMM, 1))
        send_part(client, gpu.part(), 0)
        free(client, number(client.receive()))
        after = holds(daemon)
        print(f"descriptors, mappings, KiB: {before} before, {live} with 2000 registrations, {after} after", flush=True)
        check(after[0] <= before[0] and after[1] <= before[1] + 8, f"{before} -> {after}")
        check(SCALE > 1 or after[2] <= before[2] + 4096, f"{before} -> {after}")
        check(mapped(daemon) == 0, f"{gpus(daemon)}")


def test_refused_in_words():
    gpu, far = Gpu(), Gpu(1)
    with daemon_with_gpus() as daemon:
        client = Client(daemon)
        for body, words in (
            (announce(bytes(16), MIB, LEGACY, 0, b"x" * 64), "GPU-00000000-0000-0000-0000-000000000000 is not visible to the daemon"),
            (announce(gpu.uuid, MIB, LEGACY, 0, b"x" * 64), "cuIpcOpenMemHandle"),
            (far.uuid + gpu.legacy(MIB)[16:], "as the client says"),
            (gpu.legacy(MIB)[:16] + struct.pack("=Q", 64 * MIB) + gpu.legacy(MIB)[24:], "as the client says"),
        ):
            message = client.ask(IMPORT_GPU, body)
            check(message.type == ERROR and words in message.text, f"{message.type}: {message.text}")
        client.send(IMPORT_GPU, announce(gpu.uuid, 2 * MIB, VMM, 1))
        send_part(client, os.open("/dev/null", os.O_RDWR), 0)
        message = client.receive()
        check(message.type == ERROR and "cuMemImportFromShareableHandle" in message.text, message.text)
        check(mapped(daemon) == 0, f"{gpus(daemon)}")
        idle(daemon)
    with daemon_with_gpus("gpu = off\n") as daemon:
        client = Client(daemon)
        message = client.ask(IMPORT_GPU, gpu.legacy(MIB))
        check(message.type == ERROR and "gpu = off" in message.text, message.text)
        client.send(IMPORT_GPU, announce(gpu.uuid, 2 * MIB, VMM, 1))
        send_part(client, gpu.part(), 0)
        message = client.receive()
        check(message.type == ERROR and "gpu = off" in message.text, message.text)


def test_driver_that_hides_ranges():
    """cuMemGetAddressRange refuses memory of another process: its size is found out all the same, and checked."""
    gpu = Gpu()
    with Daemon(config="dma_memory = 4M\n", env={"FAKE_CUDA_FAIL": "MemGetAddressRange=500"}) as daemon:
        client = Client(daemon)
        body = gpu.legacy(MIB)
        number(client.ask(IMPORT_GPU, body))
        message = client.ask(IMPORT_GPU, gpu.uuid + struct.pack("=Q", 64 * MIB) + gpu.legacy(MIB)[24:])
        check(message.type == ERROR and "as the client says" in message.text, message.text)


def test_parts_that_do_not_fit():
    gpu = Gpu()
    with daemon_with_gpus() as daemon:
        good = Client(daemon)
        kept = number(good.ask(IMPORT_GPU, gpu.legacy(MIB)))

        def begin(nparts=2, size=4 * MIB):
            client = Client(daemon)
            client.send(IMPORT_GPU, announce(gpu.uuid, size, VMM, nparts))
            return client

        before = descriptors(daemon)
        for case in range(7):
            client = begin()
            if case == 0:  # a hole
                send_part(client, gpu.part(), 2 * MIB)
            elif case == 1:  # more than announced
                send_part(client, gpu.part(), 0, 6 * MIB)
            elif case == 2:  # less
                send_part(client, gpu.part(), 0)
                send_part(client, gpu.part(), 2 * MIB, MIB)
            elif case == 3:  # of another
                send_part(client, gpu.part(), 0, cookie=client.cookie + 7)
            elif case == 4:  # twice the same
                send_part(client, gpu.part(), 0)
                send_part(client, gpu.part(), 0)
            elif case == 5:  # the next one, too early
                client.send(IMPORT_GPU, gpu.legacy(MIB))
            else:  # no more of it
                send_part(client, gpu.part(), 0)
                client.sock.close()
                continue
            check(client.dropped(), f"case {case}: the session goes on")
            client.sock.close()
        wait_for("the descriptors to come back", lambda: descriptors(daemon) <= before, 20)
        check(mapped(daemon) == 1, f"{gpus(daemon)}")
        free(good, kept)


def child(path):
    gpu, client = Gpu(2), Client(path)
    for _ in range(5):
        number(client.ask(IMPORT_GPU, gpu.legacy(MIB)))
    client.send(IMPORT_GPU, announce(gpu.uuid, 4 * MIB, VMM, 2))
    send_part(client, gpu.part(), 0)  # and in the middle of another
    print("ready", flush=True)
    signal.pause()


def test_process_is_killed():
    with daemon_with_gpus() as daemon:
        watcher = Client(daemon)
        held = []
        for _ in range(3):
            with subprocess.Popen([sys.executable, os.path.abspath(__file__), "child", daemon.socket],
                                  stdout=subprocess.PIPE) as process:
                check(process.stdout.readline() == b"ready\n", "the child failed")
                check(mapped(daemon) == 5, f"{gpus(daemon)}")
                process.kill()
            wait_for("its imports to be closed", lambda: mapped(daemon) == 0, 20)
            idle(daemon)
            held.append(descriptors(daemon))
        check(held[2] <= held[0], f"descriptors after each: {held}")
        check(watcher.status(), "the other session is gone")


def test_lost_gpu():
    """A sticky error: imports are refused in words, and the daemon ends when nobody needs it any more."""
    gpu = Gpu()
    failing = {"FAKE_CUDA_FAIL": "run:MemcpyPeerAsync=700@1"}
    with Daemon(config="dma_memory = 4M\n", env=failing) as daemon:
        client = Client(daemon)
        number(client.ask(IMPORT_GPU, gpu.legacy(MIB)))
        # The trial of the pair is what breaks it.
        message = client.ask(IMPORT_GPU, Gpu(1).legacy(MIB))
        if message.type == REGISTERED:
            message = client.ask(IMPORT_GPU, Gpu(3).legacy(MIB))
        check(message.type == ERROR and "700" in message.text, f"{message.type} {message.text}")
        check(daemon.alive(), "the daemon ended under its job")
        check(any("restart hreduced" in d.get("lost", "") for d in gpus(daemon)["devices"]), f"{gpus(daemon)}")
        client.sock.close()
        wait_for("the daemon to end", lambda: not daemon.alive(), 30)
        check(daemon.process.returncode == 1, f"it ended with {daemon.process.returncode}")


if __name__ == "__main__":
    if os.environ.get("HREDUCE_SANITIZE"):
        print("SKIP: this Python cannot load a sanitized library")
        sys.exit(77)
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2])
    run_tests(globals())
