#!/usr/bin/env bash
# mutants.sh [COUNT] - mutations of the core that its tests do not notice.
#
# Of all mutations that cargo-mutants makes of log, cache, volume, local store and objects, COUNT (200), spread evenly,
# are tried with the unit tests of the core. Those that survive run in the simulator. What survives both is printed, with
# the share of all that could be built. It takes a minute or two for each mutation and core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
count=${1:-200} version=27.1.0 out=$PWD/target/mutants
cargo mutants --version 2>/dev/null | grep -q "$version" || cargo install cargo-mutants --version "$version" --locked
total=$(cargo mutants --list --package hdcs-core | wc -l)
rm -rf "$out"
# Its exit status says that something has survived, which is what comes next.
cargo mutants --package hdcs-core --test-package hdcs-core --profile checked --timeout 300 --output "$out" \
    --shard "0/$(((total + count - 1) / count))" --sharding round-robin || true
results=$out/mutants.out
[ -s "$results/outcomes.json" ] || { echo "mutants.sh: nothing was tried" >&2; exit 1; }

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z | tar --null --files-from=- -c | tar -x -C "$copy"
export CARGO_TARGET_DIR=$out/target
survived=0
while IFS=$'\t' read -r name diff; do
    patch --quiet --batch -p0 -d "$copy" <"$results/$diff"
    if (cd "$copy" && cargo build --quiet --profile checked --package hdcs-sim) && (
        for world in "node 150" "stack 60" "home 2000" "objects 2000" "ranges 30"; do
            read -r kind seeds <<<"$world"
            timeout 300 "$out/target/checked/hdcs-sim" --world "$kind" --seeds "$seeds" --time 60 >/dev/null || exit 1
        done
    ); then
        survived=$((survived + 1))
        echo "survives: $name"
    else
        echo "found by the simulator: $name"
    fi
    patch --quiet --batch -R -p0 -d "$copy" <"$results/$diff"
done < <(python3 - "$results/outcomes.json" <<'END'
import json, sys
for outcome in json.load(open(sys.argv[1]))["outcomes"]:
    if outcome["summary"] == "MissedMutant":
        print(outcome["scenario"]["Mutant"]["name"], outcome["diff_path"], sep="\t")
END
)
lines() { grep -c . "$results/$1.txt" || true; }
tried=$(($(lines caught) + $(lines missed) + $(lines timeout)))
echo "$tried mutations: $(lines missed) survive the unit tests, $survived the simulator too"
