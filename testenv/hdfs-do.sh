#!/usr/bin/env bash
# hdfs-do.sh DIR COMMAND - stop or start a part of what hdfs-up.sh started below DIR.
#
#   kill-datanode N | start-datanode N | kill-namenode | start-namenode
set -u
prog=${0##*/}
die() { printf '%s: error: %s\n' "$prog" "$*" >&2; exit 1; }
case ${1:-} in ''|-h|--help) sed -n '2,/^set -u/p' "$0" | sed -e '/^set -u/d' -e 's/^# \{0,1\}//'; exit 0 ;; esac
dir=$1; shift
port=$(cat "$dir/port" 2>/dev/null) || die "$dir was not made by hdfs-up.sh"
exec 3<>"/dev/tcp/127.0.0.1/$((port + 1))" || die "nothing listens to commands"
echo "$*" >&3
read -r -t 60 answer <&3 || die "no answer to: $*"
[ "$answer" = ok ] || die "$*: $answer"
