#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs commands in a virtual machine for the test outside of it, which speaks to it through a virtio port.

A line of JSON each way. From outside: {"id": N, "argv": [...], "env": {...}, "limit": SECONDS}, or {"id": N, "kill": SIGNAL}
for the process group of command N. Back: {"id": N, "status": S, "out": TEXT} when it has ended (stdout and stderr
together; status is negative for a signal, as subprocess has it), and once, at first, {"up": SECONDS since boot}. A command
that runs longer than its limit is killed, with its group.
"""

import glob
import json
import os
import signal
import subprocess
import threading

PORT = "hreduce.vm"


def port():
    for name in glob.glob("/sys/class/virtio-ports/*/name"):
        with open(name, encoding="utf-8") as f:
            if f.read().strip() == PORT:
                return "/dev/" + name.split("/")[-2]
    raise SystemExit(f"there is no virtio port {PORT}")


class Agent:
    def __init__(self, channel):
        self.channel = channel
        self.lock = threading.Lock()
        self.running = {}

    def tell(self, **message):
        data = (json.dumps(message) + "\n").encode()
        with self.lock:
            while data:
                data = data[os.write(self.channel, data):]

    def execute(self, order):
        number = order["id"]
        try:
            process = subprocess.Popen(
                order["argv"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, **order.get("env", {})}, start_new_session=True)
        except OSError as e:
            self.tell(id=number, status=127, out=str(e))
            return
        self.running[number] = process
        late = threading.Timer(order["limit"], self.kill, (number, signal.SIGKILL))
        late.start()
        out = process.stdout.read().decode(errors="replace")
        status = process.wait()
        late.cancel()
        del self.running[number]
        self.tell(id=number, status=status, out=out)

    def kill(self, number, what):
        process = self.running.get(number)
        if process:
            try:
                os.killpg(process.pid, what)
            except ProcessLookupError:
                pass

    def obey(self, order):
        if "kill" in order:
            self.kill(order["id"], order["kill"])
        else:
            threading.Thread(target=self.execute, args=(order,), daemon=True).start()


def main():
    channel = os.open(port(), os.O_RDWR)
    agent = Agent(channel)
    with open("/proc/uptime", encoding="utf-8") as f:
        agent.tell(up=float(f.read().split()[0]))
    rest = b""
    while True:
        data = os.read(channel, 65536)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            agent.obey(json.loads(line))


main()
