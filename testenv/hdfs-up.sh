#!/usr/bin/env bash
# hdfs-up.sh - bring up a real HDFS on loopback: a NameNode and DataNodes of Hadoop's MiniDFSCluster.
#
#   hdfs-up.sh DIR [--port N] [--datanodes N] [--parent PID] [--timeout SEC]
#   hdfs-up.sh --fetch                       only fetch the jars (from Maven Central, once)
#
#   --port N       port of the NameNode; N+1 takes commands              (default 25789)
#   --datanodes N                                                            (default 3)
#   --parent PID   end when that process has ended             (default: until hdfs-down.sh)
#   --timeout SEC  time to wait until it serves                             (default 90)
#
# On its last line it prints `namenode=127.0.0.1:N path=/volumes`; users may make directories there.
# hdfs-do.sh DIR COMMAND stops and starts its parts. Nothing is kept: a new start is an empty HDFS.
set -u
prog=${0##*/}
here=$(cd "$(dirname "$0")" && pwd)
die() { printf '%s: error: %s\n' "$prog" "$*" >&2; exit 1; }
dir= port=25789 datanodes=3 parent=0 timeout=90 fetch=0
while [ $# -gt 0 ]; do
	case $1 in
	--port|--datanodes|--parent|--timeout)
		[ $# -ge 2 ] || die "$1 needs a value"; declare "${1#--}=$2"; shift 2 ;;
	--fetch) fetch=1; shift ;;
	-h|--help) sed -n '2,/^set -u/p' "$0" | sed -e '/^set -u/d' -e 's/^# \{0,1\}//'; exit 0 ;;
	-*) die "unknown option $1 (try --help)" ;;
	*) [ -z "$dir" ] || die "more than one directory given"; dir=$1; shift ;;
	esac
done
command -v java >/dev/null || die "java not found (Debian package: openjdk-17-jdk-headless)"
lib=$here/../target/testenv/hadoop
if [ "$here/hdfs/pom.xml" -nt "$lib/.complete" ]; then
	command -v mvn >/dev/null || die "mvn not found (Debian package: maven)"
	mkdir -p "$lib"
	timeout 600 mvn --quiet --batch-mode --file "$here/hdfs/pom.xml" dependency:copy-dependencies \
		-DoutputDirectory="$lib" -DprojectBuildDirectory="$lib" >&2 || die "cannot fetch the jars of Hadoop"
	touch "$lib/.complete"
fi
[ $fetch = 0 ] || exit 0
[ -n "$dir" ] || die "no directory given (try --help)"
mkdir -p "$dir" && dir=$(cd "$dir" && pwd -P) || die "cannot make $dir"
pid=$(cat "$dir/pid" 2>/dev/null)
if [ -n "$pid" ] && [ -r "/proc/$pid/cmdline" ] && tr '\0' ' ' < "/proc/$pid/cmdline" | grep -qF "MiniHdfs.java $dir/data "; then
	die "it runs already (pid $pid); hdfs-down.sh $dir stops it"
fi
for p in "$port" $((port + 1)); do
	(exec 3<>"/dev/tcp/127.0.0.1/$p") 2>/dev/null && die "127.0.0.1:$p is already in use (use --port)"
done
rm -rf "${dir:?}/data"
echo "$port" > "$dir/port"
setsid java -Xmx512m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dorg.slf4j.simpleLogger.defaultLogLevel=warn \
	-cp "$lib/*" "$here/hdfs/MiniHdfs.java" "$dir/data" "$port" $((port + 1)) "$datanodes" "$parent" \
	</dev/null >"$dir/out" 2>"$dir/log" &
pid=$!
echo $pid > "$dir/pid"
disown
deadline=$((SECONDS + timeout))
until grep -qx ready "$dir/out"; do
	[ -r "/proc/$pid/cmdline" ] || { tail -n 20 "$dir/log" >&2; die "it ended before it served"; }
	[ $SECONDS -lt $deadline ] || { kill -KILL $pid; tail -n 20 "$dir/log" >&2; die "it does not serve after ${timeout}s"; }
	sleep 0.2
done
echo "namenode=127.0.0.1:$port path=/volumes"
