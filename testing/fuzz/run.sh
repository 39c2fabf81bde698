#!/bin/sh
# Fuzz for so many seconds in all, divided among the targets:
#   testing/fuzz/run.sh [SECONDS [TARGET...]]
# Needs a nightly compiler (any; RUSTUP_TOOLCHAIN overrides) for the sanitizers, nothing else: this
# is what `cargo fuzz run` does. Inputs are kept in testing/fuzz/corpus/TARGET; one that fails is written to
# testing/fuzz/artifacts/TARGET, its path printed, and the exit status is not 0. To replay it:
#   testing/fuzz/target/x86_64-unknown-linux-gnu/release/TARGET testing/fuzz/artifacts/TARGET/crash-...
set -eu
cd "$(dirname "$0")"
seconds=${1:-60}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- nbd formats clients objects heat messenger messages replay
host=$(rustc -vV | sed -n 's/^host: //p')

# Assertions hold as in tests; the build is apart from the others, whose flags are not these.
CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true \
RUSTUP_TOOLCHAIN=${FUZZ_TOOLCHAIN:-nightly} \
RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Zsanitizer=address \
-Ccodegen-units=1" \
    cargo build --release --features libfuzzer --target "$host" --target-dir target

each=$((seconds / $#))
for target in "$@"; do
    mkdir -p "corpus/$target" "artifacts/$target"
    # A run is bounded in time and memory; the largest input covers a few writes of a MiB.
    timeout $((each + 60)) "target/$host/release/$target" "corpus/$target" \
        -artifact_prefix="artifacts/$target/" -max_total_time=$each -timeout=20 \
        -rss_limit_mb=2048 -max_len=65536 -print_final_stats=1
done
