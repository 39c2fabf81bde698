#!/usr/bin/env bash
# Install what is missing for building, for the demo, or for everything. Idempotent; with everything there it takes no
# time. Usage: testenv/setup.sh [demo] [build|test] [--check]   (default: test, which is everything; --check: say what is
# missing, change nothing)
set -euo pipefail
cd "$(dirname "$0")/.."

what= demo= check=
for argument in "$@"; do
    case $argument in
        demo) demo=yes ;;
        build | test) what=$argument ;;
        --check) check=yes ;;
        *) echo "setup: $argument: say demo, build or test, and --check" >&2; exit 2 ;;
    esac
done

[ -n "$what$demo" ] || what=test

packages=(build-essential pkg-config) # linking
programs=(cc pkg-config)
if [ -n "$demo" ]; then
    packages+=(fio gnuplot-nox nbdkit) # load, its pictures, the slow backend
    programs+=(fio gnuplot nbdkit)
fi
if [ -n "$what" ]; then
    packages+=(librbd-dev librados-dev libclang-dev) # the rbd backend's declarations, read from Ceph's own headers
fi
if [ "$what" = test ]; then
    packages+=(
        fio jq gnuplot-nox                  # load, its results, the plots
        nbdkit nbdkit-plugin-dev            # the peer, the slow backend, the disk with a volatile cache
        libnbd-bin python3-libnbd           # nbdinfo, nbdcopy, nbdfuse; the tests' client
        python3-pytest python3-pytest-xdist # the black-box suite
        qemu-utils                          # the peer qemu-nbd; qemu-img and qemu-io as clients
        e2fsprogs xfsprogs fuse3            # file systems on a volume
        openssl strace                      # certificates of the TLS tests; injected errors
        ceph-mon ceph-mgr ceph-osd ceph-common # a real cluster for the tests of the rbd backend
        radosgw curl python3-boto3          # a real S3 over that cluster, and a client that knows nothing of HDCS
        openjdk-17-jdk-headless maven       # a real HDFS
        python3-venv                        # schemathesis, which Debian does not have
    )
    programs+=(fio jq gnuplot nbdkit nbdinfo nbdfuse qemu-nbd openssl strace ceph-mon ceph-mgr ceph-osd rbd radosgw java mvn)
fi

say() { printf 'setup: %s\n' "$*" >&2; }

# What is built takes so much, less what is there already; what tests write takes TESTS_MB in TMPDIR at once.
built_mb=${BUILT_MB:-3000}
tests_mb=0
if [ "$what" = test ]; then
    built_mb=${BUILT_MB:-12000}
    tests_mb=${TESTS_MB:-6000}
fi
there_mb=$(du -sm target 2>/dev/null | cut -f1 || true)
built_mb=$((built_mb > ${there_mb:-0} + 500 ? built_mb - ${there_mb:-0} : 500))
tmp=${TMPDIR:-/tmp}
if [ "$(stat -c %d .)" = "$(stat -c %d "$tmp")" ]; then
    built_mb=$((built_mb + tests_mb))
    tests_mb=0
fi
require_room() { # DIRECTORY MB ADVICE
    local free_mb
    free_mb=$(df --output=avail --block-size=1M "$1" | tail -n 1)
    if [ "$free_mb" -lt "$2" ]; then
        say "$1: $((free_mb)) MB are free, and this needs about $2: $3"
        exit 1
    fi
}
require_room "$(pwd)" "$built_mb" "make room there"
[ "$tests_mb" = 0 ] || require_room "$tmp" "$tests_mb" "make room there, or name another directory with TMPDIR=…"

missing=()
if command -v dpkg-query >/dev/null; then
    installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${packages[@]}" 2>/dev/null || true)
    for package in "${packages[@]}"; do
        grep -qx "$package installed" <<<"$installed" || missing+=("$package")
    done
else
    for program in "${programs[@]}"; do
        command -v "$program" >/dev/null || missing+=("$program")
    done
    if [ ${#missing[@]} -gt 0 ]; then
        say "this is not a Debian system; install these programs by its own means: ${missing[*]}"
        say "(on Debian they come from: ${packages[*]})"
        exit 1
    fi
fi

if [ ${#missing[@]} -gt 0 ]; then
    if [ -n "$check" ]; then
        say "missing: ${missing[*]}"
        exit 1
    fi
    if [ "$(id -u)" = 0 ]; then
        as_root=()
    elif command -v sudo >/dev/null; then
        as_root=(sudo)
    else
        say "not root and no sudo; run as root: apt-get install ${missing[*]}"
        exit 1
    fi
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    "${as_root[@]}" apt-get update -q -q
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" >&2
fi

if ! PATH="$PATH:${CARGO_HOME:-$HOME/.cargo}/bin" command -v cargo >/dev/null; then
    say "cargo was not found; install rustup as https://rustup.rs says, then run this again:"
    say "rustup fetches the toolchain that rust-toolchain.toml names ($(sed -n 's/^channel = //p' rust-toolchain.toml))"
    exit 1
fi

[ "$what" = test ] || exit 0

# The disk with a volatile write cache, for the tests that cut the power.
plugin=target/testenv/nbdkit-power.so
if [ testenv/nbdkit-power.c -nt "$plugin" ]; then
    [ -n "$check" ] && { say "missing: $plugin"; exit 1; }
    mkdir -p target/testenv
    # The name changes only when the file is whole, so that two set-ups at once do no harm.
    cc -shared -fPIC -O2 -Wall -Wextra -Werror -o "$plugin.$$" testenv/nbdkit-power.c
    mv "$plugin.$$" "$plugin"
fi

# Hadoop's own HDFS, for the tests of the hdfs backend.
if [ testenv/hdfs/pom.xml -nt target/testenv/hadoop/.complete ]; then
    [ -n "$check" ] && { say "missing: target/testenv/hadoop"; exit 1; }
    testenv/hdfs-up.sh --fetch
fi

# What holds the control API to its description.
schemathesis=schemathesis==4.32.5
place=target/testenv/$schemathesis
if [ ! -e "$place/.complete" ]; then
    [ -n "$check" ] && { say "missing: $place"; exit 1; }
    say "installing $schemathesis"
    rm -rf "$place"
    /usr/bin/python3 -m venv "$place"
    "$place/bin/pip" install --quiet --disable-pip-version-check "$schemathesis"
    ln -sfn "$schemathesis" target/testenv/schemathesis
    touch "$place/.complete"
fi
