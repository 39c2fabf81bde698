#!/usr/bin/env bash
# s3-down.sh - stop what s3-up.sh started below DIR.
#
#   s3-down.sh DIR [--gateway] [--purge]
#
#   --gateway  only the gateway, at once (SIGKILL): its clients see it vanish; s3-up.sh brings it back
#   --purge    remove what was made below DIR afterwards
set -u
prog=${0##*/}
here=$(cd "$(dirname "$0")" && pwd)
die() { printf '%s: error: %s\n' "$prog" "$*" >&2; exit 1; }
dir= gateway=0 purge=
while [ $# -gt 0 ]; do
	case $1 in
	--gateway) gateway=1 ;;
	--purge) purge=--purge ;;
	-h|--help) sed -n '2,/^set -u/p' "$0" | sed -e '/^set -u/d' -e 's/^# \{0,1\}//'; exit 0 ;;
	-*) die "unknown option $1 (try --help)" ;;
	*) [ -z "$dir" ] || die "more than one directory given"; dir=$1 ;;
	esac
	shift
done
[ -n "$dir" ] || die "no directory given (try --help)"
[ -d "$dir" ] || { echo "$prog: no $dir: nothing to stop"; exit 0; }
dir=$(cd "$dir" && pwd -P)
pid=$(cat "$dir/run/rgw.launched" 2>/dev/null)
ours() { [ -r "/proc/$pid/cmdline" ] && tr '\0' ' ' < "/proc/$pid/cmdline" 2>/dev/null | grep -qF -- "-c $dir/ceph.conf "; }
if [ -n "$pid" ] && ours; then
	# What it was asked and has not answered is in doubt anyway: it may as well go at once.
	kill -KILL "$pid" 2>/dev/null
	for ((i = 0; i < 100; i++)); do ours || break; sleep 0.1; done
	ours && die "the gateway (pid $pid) would not die"
	echo "$prog: rgw stopped (pid $pid)"
fi
rm -f "$dir/run/rgw.launched"
[ $gateway = 0 ] || exit 0
[ -z "$purge" ] || rm -rf "${dir:?}"/{credentials,curl.conf,tls}
exec "$here/ceph-down.sh" "$dir" --fast $purge
