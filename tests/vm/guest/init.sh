#!/bin/busybox sh
# shellcheck shell=dash
# SPDX-License-Identifier: MIT
#
# The first process of a test's virtual machine: loads the modules, lays a tmpfs over the host's read-only file system,
# makes the network and hands over to that file system's systemd, where only the test's agent is enabled.
#
# Settings are words of the kernel's command line: vm.node, vm.nodes, vm.flat (all nodes in this machine), vm.rxe (0: no
# device), vm.dir (the tests' guest folder) and vm.modules (the kernel's), both as the host names them.

/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev

die()
{
    echo "vm: $*"
    echo o >/proc/sysrq-trigger
    sleep 60
}

setting()
{
    sed -n "s/.* vm\.$1=\([^ ]*\).*/\1/p" /proc/cmdline
}

node=$(setting node) nodes=$(setting nodes) dir=$(setting dir) modules=$(setting modules)
flat=$(setting flat) rxe=$(setting rxe)

while read -r file; do
    insmod "/modules/$file" || echo "vm: cannot load $file"
done </modules/order

mkdir -p /host /over /new
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,ro,cache=loose host /host || die "no file system of the host"
mount -t tmpfs -o size=80%,mode=755 over /over
mkdir /over/upper /over/work
mount -t overlay -o lowerdir=/host,upperdir=/over/upper,workdir=/over/work root /new || die "no overlay"
mount --move /dev /new/dev
mkdir -p /new/dev/shm /new/dev/pts /new/proc /new/sys /new/run /new/usr/lib/modules
mount -t devpts -o mode=620,gid=5,ptmxmode=666 devpts /new/dev/pts
mount -t tmpfs -o mode=1777 shm /new/dev/shm
mount -t tmpfs -o mode=755 run /new/run
ln -s "$modules" "/new/usr/lib/modules/$(uname -r)" 2>/dev/null

# ---- who this is
echo "node$node" >/new/etc/hostname
hostname "node$node"
{
    echo "127.0.0.1 localhost"
    k=1
    while [ "$k" -le "$nodes" ]; do
        echo "10.9.0.$k node$k"
        k=$((k + 1))
    done
} >/new/etc/hosts
: >/new/etc/resolv.conf
: >/new/etc/fstab
printf '%032x\n' $((node + 256)) >/new/etc/machine-id

# ---- systemd: of the host's units none starts by itself, and nothing tells it that this is a container
rm -rf /new/etc/systemd/system/*.wants /new/etc/systemd/system/*.requires /new/.dockerenv /new/run/.containerenv
rm -f /new/etc/systemd/system/default.target
# Its rule for /tmp would delete the view of the host's, file by file.
mkdir -p /new/etc/tmpfiles.d /new/run/systemd/system
: >/new/etc/tmpfiles.d/tmp.conf
cp "/new$dir/vm-agent.service" "/new$dir/vm.target" /new/run/systemd/system/
sed -i "s|@dir@|$dir|" /new/run/systemd/system/vm-agent.service

# ---- network
mount --move /proc /new/proc
mount --move /sys /new/sys
echo 0 >/new/proc/sys/net/ipv6/conf/default/accept_dad
in_root()
{
    chroot /new /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
}
ip link set lo up
if [ "$flat" = 1 ]; then
    in_root /bin/bash "$dir/flat.sh" "$nodes" || die "no network of the nodes"
else
    ip addr add "10.9.0.$node/24" dev eth0
    ip link set eth0 mtu 9000 up
    if [ "$rxe" = 1 ]; then
        in_root rdma link add rxe0 type rxe netdev eth0 || die "no rxe0"
    fi
fi
exec switch_root /new /lib/systemd/systemd
