#!/usr/bin/env bash
# attach.sh [HDCS] - a volume as a block device of the kernel, with a file system on it: what is written is there after it
# was detached and attached again, and after the node was killed; a device that is in use is refused, and one whose node
# is gone fails its requests. Needs root, a kernel with NBD (a guest will do), nbd-client and e2fsprogs. Takes seconds.
set -euo pipefail
hdcs=${1:-$(dirname "$0")/../target/checked/hdcs}
[ "$(id -u)" = 0 ] || { echo "attach.sh: needs root" >&2; exit 2; }
[ -e /sys/module/nbd ] || modprobe nbd || { echo "attach.sh: this kernel has no NBD driver" >&2; exit 2; }

home=$(mktemp -d)
node= device= other=
end() {
    umount "$home/mnt" 2>/dev/null || umount -l "$home/mnt" 2>/dev/null || true
    for used in $device $other; do
        nbd-client -d "$used" >/dev/null 2>&1 || true
    done
    [ -z "$node" ] || kill -9 "$node" 2>/dev/null || true
    rm -rf "$home"
}
trap end EXIT
fail() { echo "attach.sh: $*" >&2; cat "$home/log" >&2; exit 1; }

mkdir "$home/mnt" "$home/d"
chmod 700 "$home/d"
export HDCS_DATA=$home/d
printf 'memory_max_mib = 256\ncache_total_size_mib = 16\nlog_size_mib = 16\n' >"$home/node.toml"
start() {
    "$hdcs" serve --config "$home/node.toml" >"$home/ready" 2>>"$home/log" &
    node=$!
    for _ in $(seq 300); do
        ! grep -q ready "$home/ready" || return 0
        sleep 0.1
    done
    fail "the node does not get ready"
}
# DEVICE is empty for the first one that is free.
attach() { # [DEVICE]
    "$hdcs" volume attach v ${1:+--device "$1"} --json | sed -n 's/.*"device": "\(.*\)".*/\1/p'
}
detach() { # DEVICE
    nbd-client -d "$1" >/dev/null
    for _ in $(seq 100); do
        [ "$(cat "/sys/block/${1#/dev/}/size")" != 0 ] || [ -e "/sys/block/${1#/dev/}/pid" ] || return 0
        sleep 0.1
    done
    fail "$1 stays attached"
}

start
"$hdcs" volume create v --size 64M --backend "file:$home/v.img" >/dev/null
device=$(attach)
[ "$(blockdev --getsize64 "$device")" = $((64 << 20)) ] || fail "$device has another size"
mkfs.ext4 -q "$device"
mount "$device" "$home/mnt"
dd if=/dev/urandom of="$home/mnt/x" bs=1M count=8 status=none
sync
sum=$(sha256sum <"$home/mnt/x")

! attach "$device" 2>"$home/refused" | grep . || fail "$device was attached twice"
grep -q 'in use' "$home/refused" || fail "refused for another reason: $(cat "$home/refused")"
other=$(attach 2>"$home/note")
grep -q 'clients already' "$home/note" || fail "nothing is said of the other client"
detach "$other"
other=

umount "$home/mnt"
detach "$device"
device=$(attach)
mount "$device" "$home/mnt"
[ "$(sha256sum <"$home/mnt/x")" = "$sum" ] || fail "other content after it was attached again"
echo "attach.sh: written, detached, attached again: the same"

kill -9 "$node"
wait "$node" 2>/dev/null || true
status=0
timeout 60 dd if="$device" of=/dev/null bs=1M skip=20 count=1 iflag=direct status=none 2>/dev/null || status=$?
[ "$status" = 1 ] || fail "a read without a node: status $status"
umount "$home/mnt" || umount -l "$home/mnt"
nbd-client -d "$device" >/dev/null 2>&1 || true
start
device=$(attach)
mount "$device" "$home/mnt"
[ "$(sha256sum <"$home/mnt/x")" = "$sum" ] || fail "other content after the node was killed"
umount "$home/mnt"
detach "$device"
device=
kill "$node"
wait "$node" || fail "the node's end: status $?"
node=
echo "attach.sh: without a node requests fail; with one again, attached again: the same"
