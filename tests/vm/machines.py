# SPDX-License-Identifier: MIT
"""Virtual machines of one test: started together, driven from here, gone when this process ends in whatever way.

    with Machines(kernel, 2) as vms:
        vms[1].run("ip -br addr").out            # "1" is node1, at 10.9.0.1; raises Failed unless it ends with 0
        job = vms[2].start("sleep 100", limit=200)
        vms[2].power_off()                       # at once, as a machine that loses power
        job.wait(10)                             # raises Failed: the machine is gone

Each sees this machine's file system read-only under a tmpfs of its own, at the same paths, and runs its systemd. They
hang on one bridge in a network namespace that this process enters and that goes with it.
"""

import ctypes
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

from kernel import HERE

CLONE_NEWNET = 0x40000000
ADDRESS = "10.9.0.{}"
KVM = os.environ.get("HREDUCE_VM_KVM") == "1"
# For a machine to come up. Two emulated ones take 12 s when nothing else runs.
BOOT_LIMIT = 600
# Of services that have no business in a machine that lives for minutes.
MASKED = ["systemd-udevd.service", "systemd-udev-trigger.service", "systemd-udevd-control.socket",
          "systemd-udevd-kernel.socket", "systemd-binfmt.service", "proc-sys-fs-binfmt_misc.automount",
          "systemd-pstore.service", "systemd-random-seed.service", "systemd-update-utmp.service",
          "systemd-timesyncd.service", "systemd-machine-id-commit.service", "systemd-firstboot.service",
          "systemd-modules-load.service", "systemd-journal-flush.service", "dev-hugepages.mount",
          "sys-kernel-config.mount", "sys-fs-fuse-connections.mount", "systemd-sysusers.service"]


class Failed(Exception):
    """A command, a machine or an expectation failed; the sentence says which."""


class Result:
    def __init__(self, command, status, out):
        self.command, self.status, self.out = command, status, out

    def __str__(self):
        return f"'{self.command}' ended with {self.status} and said:\n{self.out.rstrip()}"


class Job:
    """A command that runs in a machine."""

    # Whether each command is printed with its time: where a case spends its own.
    verbose = False

    def __init__(self, machine, number, command, limit):
        self.machine, self.number, self.command, self.limit = machine, number, command, limit
        self.began = time.monotonic()
        self.ended = threading.Event()
        self.result = None

    def end(self, result):
        if Job.verbose:
            command = " ".join(self.command.split())[:120]
            print(f"        {time.monotonic() - self.began:6.1f} s  {self.machine.name}: {command}", flush=True)
        self.result = result
        self.ended.set()

    def running(self):
        return not self.ended.is_set()

    def kill(self, what=signal.SIGKILL):
        """Its whole process group."""
        self.machine.tell(id=self.number, kill=int(what))

    def wait(self, limit=None):
        """Its result, whatever the status. The machine kills it after its limit."""
        limit = limit or self.limit + 30
        if not self.ended.wait(limit):
            raise Failed(f"{self.machine.name}: no end of '{self.command}' within {limit} s")
        if self.result is None:
            raise Failed(f"{self.machine.name} was gone before '{self.command}' had ended")
        return self.result


class Machine:
    def __init__(self, vms, number, flat_nodes=0):
        self.name = f"node{number}"
        self.number = number
        self.address = ADDRESS.format(number)
        self.rdma = f"rxe{number}" if flat_nodes else "rxe0"
        self.dir = vms.dir
        self.booted = None
        self.jobs = {}
        self.count = 0
        self.lock = threading.Lock()
        self.up = threading.Event()
        self.channel = None
        self.process = None

    def path(self, what):
        return os.path.join(self.dir, f"{what}.{self.number}")

    def boot(self, command):
        with open(self.path("qemu"), "w", encoding="utf-8") as log:
            # The parent's death takes it along, even a SIGKILL's.
            self.process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "--", *command], stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log, start_new_session=True)
        threading.Thread(target=self.read, daemon=True).start()

    def connect(self):
        end = time.monotonic() + 20
        while time.monotonic() < end and self.process.poll() is None:
            s = socket.socket(socket.AF_UNIX)
            try:
                s.connect(self.path("port"))
                return s
            except OSError:
                s.close()
                time.sleep(0.05)
        return None

    def read(self):
        self.channel = self.connect()
        with self.channel.makefile("r", encoding="utf-8") if self.channel else open(os.devnull, encoding="utf-8") as lines:
            try:
                for line in lines:
                    message = json.loads(line)
                    if "up" in message:
                        self.booted = message["up"]
                        self.up.set()
                    else:
                        job = self.jobs.pop(message["id"])
                        job.end(Result(job.command, message["status"], message["out"]))
            except (OSError, ValueError):
                pass
        # The machine is gone, or speaks no sense: nobody waits for it any longer.
        with self.lock:
            gone, self.jobs = self.jobs, None
        for job in gone.values():
            job.end(None)
        self.up.set()

    def tell(self, **message):
        try:
            self.channel.sendall((json.dumps(message) + "\n").encode())
        except OSError as e:
            raise Failed(f"{self.name} cannot be spoken to: {e}") from e

    def start(self, command, limit=60, env=None):
        """command: a list of words, or one line for bash. limit: seconds, after which it is killed."""
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        with self.lock:
            if self.jobs is None:
                raise Failed(f"{self.name} is gone")
            self.count += 1
            job = Job(self, self.count, command if isinstance(command, str) else " ".join(command), limit)
            self.jobs[self.count] = job
        self.tell(id=job.number, argv=argv, env=env or {}, limit=limit)
        return job

    def attempt(self, command, limit=60, env=None):
        """The result, whatever the status."""
        return self.start(command, limit, env).wait()

    def run(self, command, limit=60, env=None):
        result = self.attempt(command, limit, env)
        if result.status:
            raise Failed(f"{self.name}: {result}")
        return result

    def console(self, lines=60):
        try:
            with open(self.path("console"), encoding="utf-8", errors="replace") as f:
                return "".join(f.readlines()[-lines:])
        except OSError:
            return ""

    def cpu_seconds(self):
        """What its emulation took, which other load on this machine does not stretch as it does the time."""
        try:
            with open(f"/proc/{self.process.pid}/stat", encoding="utf-8") as f:
                fields = f.read().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def power_off(self):
        self.process.kill()
        self.process.wait(20)


def enter_network(n):
    """Moves this process into a network namespace of its own with a bridge and a tap for each machine."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise Failed(f"no network namespace for the machines: {os.strerror(ctypes.get_errno())}")
    lines = ["link set lo up", "link add br0 type bridge stp_state 0 mcast_snooping 0"]
    for k in range(1, n + 1):
        lines += [f"tuntap add tap{k} mode tap vnet_hdr", f"link set tap{k} mtu 9000 master br0 up"]
    for line in lines + ["link set br0 mtu 9000 up"]:
        done = subprocess.run(["ip", *line.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=30, check=False)
        if done.returncode:
            raise Failed(f"no network for the machines: ip {line}: {done.stdout.strip()}")


def tsc_khz():
    """The rate of this machine's time stamp counter, which an emulated one shows as its own. A guest measures it at boot
    against an emulated timer, and is wrong by a factor of ten when the host is busy just then; so it is told."""
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("0f31 48c1e220 4809d0 c3"))  # rdtsc; shl rdx, 32; or rax, rdx; ret
    rdtsc = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    count, began = rdtsc(), time.monotonic_ns()
    time.sleep(0.2)
    return (rdtsc() - count) * 1_000_000 // (time.monotonic_ns() - began)


class Machines:
    """n machines, or (flat) n nodes in one machine with n devices on n addresses, which all have the same agent.
    no_rxe: numbers of machines without an RDMA device."""

    def __init__(self, kernel, n, flat=False, no_rxe=(), memory=1024):
        self.n, self.flat = n, flat
        self.dir = tempfile.mkdtemp(prefix="hreduce-vm.")
        os.chmod(self.dir, 0o755)
        count = 1 if flat else n
        self.machines = [Machine(self, k + 1, n if flat else 0) for k in range(count)]
        try:
            enter_network(count)
            for m in self.machines:
                m.boot(self.command(kernel, m, m.number not in no_rxe, memory))
            self.wait_up()
        except BaseException:
            self.close()
            raise

    def command(self, kernel, m, rxe, memory):
        words = ["console=ttyS0 quiet loglevel=4 panic=-1 oops=panic net.ifnames=0 mitigations=off nokaslr no5lvl",
                 "nowatchdog tsc=reliable random.trust_cpu=on systemd.unit=vm.target systemd.firstboot=no fstab=no",
                 "systemd.show_status=no systemd.default_timeout_start_sec=600",
                 *(f"systemd.mask={unit}" for unit in MASKED),
                 f"vm.node={m.number} vm.nodes={self.n} vm.flat={int(self.flat)} vm.rxe={int(rxe)}",
                 *([] if KVM else [f"tsc_early_khz={tsc_khz()}"]),
                 f"vm.dir={os.path.join(HERE, 'guest')} vm.modules={kernel.modules} "]
        accel = ["-accel", "kvm", "-cpu", "host"] if KVM else \
            ["-accel", "tcg,thread=multi", "-cpu", "max"]
        return ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-M", "q35",
                *accel, "-smp", "2" if self.flat or self.n == 1 else "1", "-m", str(memory),
                "-kernel", kernel.path, "-initrd", kernel.initramfs, "-append", " ".join(words),
                "-chardev", f"file,id=console,path={m.path('console')}", "-serial", "chardev:console",
                "-chardev", f"socket,id=agent,path={m.path('port')},server=on,wait=off",
                "-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent,name=hreduce.vm",
                "-fsdev", "local,id=host,path=/,security_model=passthrough,readonly=on,multidevs=remap",
                "-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
                "-netdev", f"tap,id=net,ifname=tap{m.number},script=no,downscript=no,vhost=off",
                "-device", f"virtio-net-pci,netdev=net,mac=52:54:00:09:00:{m.number:02x},host_mtu=9000"]

    def wait_up(self):
        end = time.monotonic() + BOOT_LIMIT
        for m in self.machines:
            m.up.wait(max(0, end - time.monotonic()))
            if m.booted is None:
                with open(m.path("qemu"), encoding="utf-8", errors="replace") as f:
                    said = f.read()
                raise Failed(f"{m.name} did not come up in {BOOT_LIMIT} s; QEMU said '{said.strip()}', its console:\n"
                             + m.console())

    def __getitem__(self, number):
        """By node: from 1. The nodes of a flat machine are all in the first."""
        return self.machines[0 if self.flat else number - 1]

    def __iter__(self):
        return iter(self.machines)

    def cpu_seconds(self):
        return sum(m.cpu_seconds() for m in self.machines)

    def complaints(self):
        """What the kernels said that no kernel should say."""
        bad = ("BUG:", "WARNING:", "Oops", "Call Trace")
        return [f"{m.name}: {line.strip()}" for m in self.machines for line in m.console(2000).splitlines()
                if any(word in line for word in bad)]

    def close(self):
        for m in self.machines:
            if m.process:
                m.process.kill()
        for m in self.machines:
            if m.process:
                m.process.wait(20)
        shutil.rmtree(self.dir, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
