#!/usr/bin/env bash
# A node in the foreground with one volume to play with. Ctrl-C stops it; the data stays.
set -euo pipefail
cd "$(dirname "$0")/.."
hdcs=$PWD/target/release/hdcs
data=${HDCS_DATA:-$PWD/hdcs-data}
mkdir -p "$data"

coproc NODE { exec "$hdcs" serve --data "$data"; }
pid=$NODE_PID
# Ctrl-C reaches the node by itself, since it is in the foreground too; it must not get it twice.
trap : INT
trap 'kill "$pid" 2>/dev/null || true' TERM
IFS= read -r ready <&"${NODE[0]}" || { wait "$pid"; exit 1; }
if ! "$hdcs" --data "$data" volume show demo >/dev/null 2>&1; then
    "$hdcs" --data "$data" volume create demo --size 4G >/dev/null || { kill "$pid"; exit 1; }
fi
cat <<TEXT
$ready

The node runs in the foreground; its data is in $data. Ctrl-C stops it. In another terminal:
  look       $hdcs --data $data status
             $hdcs --data $data volume show demo
  load       fio --name=x --ioengine=nbd --uri='nbd+unix:///demo?socket=$data/nbd.sock' --rw=randwrite --bs=4k --iodepth=32 --time_based --runtime=10
  copy       nbdcopy image.raw 'nbd+unix:///demo?socket=$data/nbd.sock'
  as a file  mkdir -p mnt; nbdfuse mnt/disk 'nbd+unix:///demo?socket=$data/nbd.sock'
  QEMU       qemu-system-x86_64 -drive file='nbd+unix:///demo?socket=$data/nbd.sock',format=raw,if=virtio …
TEXT
# A signal interrupts `wait`; the node has ended when its process is gone.
status=0
while kill -0 "$pid" 2>/dev/null; do
    wait "$pid" && status=0 || status=$?
done
exit "$status"
