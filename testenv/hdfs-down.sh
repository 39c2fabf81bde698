#!/usr/bin/env bash
# hdfs-down.sh DIR - end what hdfs-up.sh started below DIR, and remove what it held.
set -u
prog=${0##*/}
case ${1:-} in ''|-h|--help) sed -n '2,/^set -u/p' "$0" | sed -e '/^set -u/d' -e 's/^# \{0,1\}//'; exit 0 ;; esac
[ -d "$1" ] || { echo "$prog: no $1: nothing to stop"; exit 0; }
dir=$(cd "$1" && pwd -P)
pid=$(cat "$dir/pid" 2>/dev/null)
ours() { [ -r "/proc/$pid/cmdline" ] && tr '\0' ' ' < "/proc/$pid/cmdline" 2>/dev/null | grep -qF "MiniHdfs.java $dir/data "; }
if [ -n "$pid" ] && ours; then
	kill -KILL "$pid"
	for ((i = 0; i < 50; i++)); do ours || break; sleep 0.1; done
	ours && { echo "$prog: error: pid $pid would not die" >&2; exit 1; }
fi
rm -rf "${dir:?}"/{data,pid,port,out,log}
rmdir "$dir" 2>/dev/null
exit 0
