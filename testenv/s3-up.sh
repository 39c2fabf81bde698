#!/usr/bin/env bash
# s3-up.sh - bring up a real S3: Ceph's gateway over a throw-away cluster on loopback (ceph-up.sh).
#
#   s3-up.sh DIR [--port N] [--timeout SEC]
#
#   --port N       first of the ports of the cluster; the gateway listens on N+100, and with TLS on
#                  N+101                                                              (default 24789)
#   --timeout SEC  time to wait for each of the two                                     (default 90)
#
# On its last line it prints `endpoint=http://… tls=https://… ca=DIR/tls/ca-cert.pem bucket=hdcs
# credentials=DIR/credentials`; the last file has the form of ~/.aws/credentials and is made anew with
# the cluster. Idempotent: what runs is left
# alone, what is missing is started. Stop with s3-down.sh DIR.
set -u
prog=${0##*/}
here=$(cd "$(dirname "$0")" && pwd)
die() { printf '%s: error: %s\n' "$prog" "$*" >&2; exit 1; }
dir= port=24789 timeout=90
while [ $# -gt 0 ]; do
	case $1 in
	--port|--timeout) [ $# -ge 2 ] || die "$1 needs a value"; declare "${1#--}=$2"; shift 2 ;;
	-h|--help) sed -n '2,/^set -u/p' "$0" | sed -e '/^set -u/d' -e 's/^# \{0,1\}//'; exit 0 ;;
	-*) die "unknown option $1 (try --help)" ;;
	*) [ -z "$dir" ] || die "more than one directory given"; dir=$1; shift ;;
	esac
done
[ -n "$dir" ] || die "no directory given (try --help)"
for tool in radosgw radosgw-admin curl setsid; do
	command -v $tool >/dev/null || die "$tool not found (Debian packages: radosgw curl util-linux)"
done
# Few placement groups: the gateway makes seven pools. In memory, so that nothing waits for a disk.
# The gateway does not start without a key.
"$here/ceph-up.sh" "$dir" --port "$port" --auth cephx --pgs 8 --store memstore --size 4G --timeout "$timeout" || exit 1
dir=$(cd "$dir" && pwd -P)
conf=$dir/ceph.conf
credentials=$dir/credentials
endpoint=http://127.0.0.1:$((port + 100))
tls=https://localhost:$((port + 101))
bucket=hdcs

running() {
	local pid
	pid=$(cat "$dir/run/rgw.launched" 2>/dev/null) && [ -r "/proc/$pid/cmdline" ] &&
		tr '\0' ' ' < "/proc/$pid/cmdline" | grep -qF -- "-c $conf "
}
# On a busy machine what was just started may not have come as far as its program yet.
died() {
	local try
	for try in 1 2 3 4 5 6; do
		running && return 1
		sleep 0.5
	done
}
deadline=$((SECONDS + timeout))
if ! running; then
	[ -s "$dir/tls/server-cert.pem" ] || "$here/tls.sh" "$dir/tls" || die "cannot make certificates"
	# Without tcp_nodelay the answer to a small get waits 40 ms for the client's delayed acknowledgement.
	setsid radosgw -c "$conf" -n client.admin --keyring "$dir/client.admin.keyring" -f --log-file "$dir/log/rgw.log" \
		--rgw-frontends "beast endpoint=127.0.0.1:$((port + 100)) tcp_nodelay=1 ssl_endpoint=127.0.0.1:$((port + 101)) ssl_certificate=$dir/tls/server-cert.pem ssl_private_key=$dir/tls/server-key.pem" \
		--rgw-run-sync-thread false --rgw-dynamic-resharding false --rgw-thread-pool-size 64 \
		--rgw-gc-obj-min-wait 5 --rgw-gc-processor-period 30 \
		--admin-socket "$dir/run/rgw.asok" --pid-file "$dir/run/rgw.pid" \
		</dev/null >"$dir/log/rgw.out" 2>&1 &
	echo $! > "$dir/run/rgw.launched"
	disown
	echo "$prog: rgw started (pid $!)"
fi
until curl --silent --output /dev/null --max-time 5 "$endpoint"; do
	died && { tail -n 15 "$dir/log/rgw.out" "$dir/log/rgw.log" >&2; die "the gateway died"; }
	[ $SECONDS -lt $deadline ] || { tail -n 15 "$dir/log/rgw.log" >&2; die "the gateway does not answer after ${timeout}s"; }
	sleep 0.2
done

if [ ! -s "$credentials" ]; then
	id=$(head -c 10 /dev/urandom | od -An -tx1 | tr -d ' \n')
	key=$(head -c 20 /dev/urandom | od -An -tx1 | tr -d ' \n')
	admin() { timeout 60 radosgw-admin -c "$conf" "$@" --uid hdcs --access-key "$id" --secret-key "$key"; }
	# The user may be there already if an earlier call was interrupted.
	{ admin user create --display-name hdcs || admin key create --key-type s3; } \
		>"$dir/log/rgw-user.out" 2>&1 ||
		{ cat "$dir/log/rgw-user.out" >&2; die "cannot create the user"; }
	(umask 077; printf 'user = "%s:%s"\n' "$id" "$key" > "$dir/curl.conf")
	# The hash of an empty body, which this curl does not send by itself.
	nothing=$(sha256sum </dev/null | cut -d ' ' -f 1)
	curl --silent --show-error --fail --max-time 30 --config "$dir/curl.conf" \
		--aws-sigv4 aws:amz:us-east-1:s3 --header "x-amz-content-sha256: $nothing" \
		--request PUT "$endpoint/$bucket" ||
		die "cannot create the bucket"
	# Last, so that an interrupted call does all of it again next time.
	(umask 077; printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' \
		"$id" "$key" > "$credentials.new") && mv "$credentials.new" "$credentials"
fi
echo "endpoint=$endpoint tls=$tls ca=$dir/tls/ca-cert.pem bucket=$bucket credentials=$credentials"
