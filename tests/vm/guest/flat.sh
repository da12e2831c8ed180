#!/bin/bash
# SPDX-License-Identifier: MIT
#
# flat.sh NODES: the network of several nodes in one machine. Node K is the address 10.9.0.K on vK, one end of a veth
# pair whose other end hangs on a bridge, with the RDMA device rxeK on it.
#
# All of them stay in the first network namespace, for rxe of Linux 6.1 works in no other. There the kernel would take
# traffic between two of its own addresses over lo, which rxe does not serve: so the rules for local addresses move behind
# ours, which send what comes from 10.9.0.K out by vK.
set -e
cd /proc/sys/net/ipv4/conf
for i in all default; do
    echo 1 >$i/accept_local
    echo 0 >$i/rp_filter
    echo 1 >$i/arp_ignore   # each interface answers for its own address alone
    echo 2 >$i/arp_announce
done
ip rule add pref 100 lookup local
ip rule del pref 0
ip link add br0 type bridge stp_state 0 mcast_snooping 0
ip link set br0 mtu 9000 up
for ((k = 1; k <= $1; k++)); do
    ip link add "v$k" mtu 9000 type veth peer name "p$k" mtu 9000
    ip link set "p$k" master br0 up
    ip link set "v$k" up
    ip addr add "10.9.0.$k/24" dev "v$k"
    ip route add 10.9.0.0/24 dev "v$k" src "10.9.0.$k" table $((200 + k))
    ip route add local "10.9.0.$k" dev "v$k" table $((200 + k))
    ip rule add pref 5 iif lo from "10.9.0.$k" lookup $((200 + k))
    rdma link add "rxe$k" type rxe netdev "v$k"
done
