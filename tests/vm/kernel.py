# SPDX-License-Identifier: MIT
"""The kernel and the initramfs of the virtual machines, kept in a cache between runs.

The kernel is the distribution's own package (named in .ci/deps), downloaded by apt and unpacked, never installed: nothing
of this machine's boot is touched. HREDUCE_VM_KERNEL_DEB=FILE takes a package from a file instead, for machines without a
network.
"""

import fcntl
import glob
import gzip
import hashlib
import lzma
import os
import re
import shutil
import struct
import subprocess
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
INIT = os.path.join(HERE, "guest", "init.sh")
# What it takes to boot, to see this machine's files, and to have soft-RoCE. One that is built in, or that a kernel does
# not have, is left out; tests load others with modprobe. The plain crc32 beats the one by pclmulqdq where that
# instruction is emulated.
MODULES = ["virtio_pci", "virtio_net", "virtio_console", "9pnet_virtio", "9p", "overlay", "crc32_generic",
           "crc32c_generic", "ib_uverbs", "rdma_rxe", "rdma_ucm", "veth", "bridge"]
TOOLS = {"qemu-system-x86_64": "QEMU", "busybox": "a static busybox", "cpio": "cpio", "modprobe": "kmod",
         "depmod": "kmod", "ip": "iproute2", "rdma": "iproute2", "setpriv": "util-linux", "unshare": "util-linux",
         "systemctl": "systemd", "dbus-daemon": "dbus", "dpkg-deb": "dpkg"}


class Missing(Exception):
    """What this machine lacks to run virtual machines, in words: a reason to skip."""


def cache_dir():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("HREDUCE_VM_CACHE") or os.path.join(base, "hreduce-vm")


def check_machine():
    if os.geteuid() != 0:
        raise Missing("virtual machines here need root (tap devices, and this machine's files as they are)")
    if os.uname().machine != "x86_64":
        raise Missing(f"the virtual machines are x86_64 and this machine is {os.uname().machine}")
    lacking = sorted({what for tool, what in TOOLS.items() if not shutil.which(tool)})
    if lacking:
        raise Missing(f"there is no {', no '.join(lacking)} here: run .ci/deps vm as root")
    with open(shutil.which("busybox"), "rb") as f:
        if b"ld-linux" in f.read(4096):
            raise Missing("busybox is linked dynamically and cannot be alone in an initramfs: run .ci/deps vm as root")
    if not os.path.exists("/dev/net/tun"):
        raise Missing("there is no /dev/net/tun here, and the machines' network is made of tap devices")
    check_network()


def check_network():
    """A container may have the device, and neither the right to a namespace nor the bridge module."""
    try:
        done = output("unshare", "--net", "sh", "-c",
                      "ip link add br0 type bridge && ip tuntap add tap1 mode tap vnet_hdr && ip link set tap1 master br0 up",
                      timeout=30)
    except subprocess.TimeoutExpired:
        raise Missing("no network namespace with a bridge and a tap device was made within 30 s") from None
    if done.returncode:
        raise Missing("no network namespace with a bridge and a tap device can be made, which the machines hang on: "
                      f"{done.stderr.strip()}")


def output(*argv, **kwargs):
    return subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False, **kwargs)


def package_name():
    """The package behind the distribution's name for "the current kernel", or None when apt does not know it."""
    meta = output(os.path.join(ROOT, ".ci", "deps"), "--names", "vm-kernel").stdout.strip()
    found = re.search(r"Depends: (linux-image-\d\S*)", output("apt-cache", "depends", meta).stdout)
    return found.group(1) if found else None


def unpack_kernel(path):
    """The ELF kernel out of a bzImage: QEMU starts it by PVH, which saves seconds of emulated decompression. The offsets
    are those of Documentation/x86/boot.rst. A kernel that is packed otherwise is used as it is."""
    with open(path, "rb") as f:
        image = f.read()
    start, length = struct.unpack_from("<II", image, 0x248)
    start += (image[0x1f1] + 1) * 512
    packed = image[start:start + length]
    for unpack in (lzma.decompress, gzip.decompress):
        try:
            # The last four bytes are the unpacked size, which is no part of the stream.
            kernel = unpack(packed[:-4])
        except (lzma.LZMAError, OSError, EOFError):
            continue
        if kernel.startswith(b"\x7fELF"):
            return kernel
    return image


def unpack(deb, place):
    done = output("dpkg-deb", "-x", deb, os.path.join(place, "root"), timeout=300)
    if done.returncode:
        raise Missing(f"the kernel package {deb} cannot be unpacked: {done.stderr.strip()}")
    version = os.listdir(os.path.join(place, "root", "lib", "modules"))[0]
    done = output("depmod", "-b", os.path.join(place, "root"), version, timeout=300)
    if done.returncode:
        raise Missing(f"depmod failed on {deb}: {done.stderr.strip()}")
    with open(os.path.join(place, "kernel"), "wb") as f:
        f.write(unpack_kernel(glob.glob(os.path.join(place, "root", "boot", "vmlinuz-*"))[0]))


def fetch(cache, package):
    """Downloads and unpacks the package; a run that is cut off leaves nothing that looks complete."""
    final = os.path.join(cache, package)
    if os.path.isdir(final):
        return final
    print(f"vm: getting {package} (about 70 MB, once)", flush=True)
    place = tempfile.mkdtemp(prefix="new.", dir=cache)
    try:
        os.chmod(place, 0o755)
        deb = os.environ.get("HREDUCE_VM_KERNEL_DEB")
        if not deb:
            try:
                done = output("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", package, cwd=place, timeout=600)
            except subprocess.TimeoutExpired:
                raise Missing(f"the kernel package {package} was not downloaded within 600 s") from None
            deb = (glob.glob(os.path.join(place, "*.deb")) + [None])[0]
            if done.returncode or not deb:
                raise Missing(f"the kernel package {package} cannot be downloaded: {done.stderr.strip()}")
        unpack(deb, place)
        for left in glob.glob(os.path.join(place, "*.deb")):
            os.unlink(left)
        os.rename(place, final)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return final


def module_files(root, version):
    """Paths in the order in which they must be loaded."""
    files = []
    for module in MODULES:
        shown = output("modprobe", "-d", root, "-S", version, "--show-depends", module)
        for line in shown.stdout.splitlines():
            if line.startswith("insmod ") and line.split()[1] not in files:
                files.append(line.split()[1])
    return files


def build_initramfs(place, version):
    """busybox, guest/init.sh and the modules."""
    with open(INIT, "rb") as f:
        key = hashlib.sha256(f.read() + " ".join(MODULES).encode()).hexdigest()[:16]
    final = os.path.join(place, f"initramfs.{key}")
    if os.path.exists(final):
        return final
    tree = tempfile.mkdtemp(prefix="new.", dir=place)
    try:
        for name in ("bin", "dev", "proc", "sys", "modules"):
            os.mkdir(os.path.join(tree, name))
        shutil.copy(shutil.which("busybox"), os.path.join(tree, "bin", "busybox"))
        shutil.copy(INIT, os.path.join(tree, "init"))
        os.chmod(os.path.join(tree, "init"), 0o755)
        files = module_files(os.path.join(place, "root"), version)
        for path in files:
            shutil.copy(path, os.path.join(tree, "modules"))
        with open(os.path.join(tree, "modules", "order"), "w", encoding="utf-8") as f:
            f.writelines(os.path.basename(path) + "\n" for path in files)
        with open(final + ".new", "wb") as f:
            subprocess.run("find . | cpio -o -H newc --quiet", shell=True, cwd=tree, stdout=f, check=True)
        os.rename(final + ".new", final)
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    return final


class Kernel:
    """path, initramfs, and the folder of its modules; Missing when there is none."""

    def __init__(self):
        check_machine()
        cache = cache_dir()
        os.makedirs(cache, exist_ok=True)
        with open(os.path.join(cache, "lock"), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            deb = os.environ.get("HREDUCE_VM_KERNEL_DEB")
            package = output("dpkg-deb", "-f", deb, "Package").stdout.strip() if deb else package_name()
            if not package:
                # Without package lists, what an earlier run fetched serves as well.
                kept = sorted(glob.glob(os.path.join(cache, "linux-image-*")))
                if not kept:
                    raise Missing("apt knows no kernel package (apt-get update), and none was kept from an earlier run")
                package = os.path.basename(kept[-1])
            place = fetch(cache, package)
            self.version = os.listdir(os.path.join(place, "root", "lib", "modules"))[0]
            self.path = os.path.join(place, "kernel")
            self.modules = os.path.join(place, "root", "lib", "modules", self.version)
            self.initramfs = build_initramfs(place, self.version)
