# HDCS: `make demo` shows it, `make test` proves it. `make help` lists the rest.
SHELL := /bin/bash
# Before a cargo of the distribution, which would be too old.
export PATH := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH)

# pytest and libnbd come with the distribution's Python, whatever else is installed.
PYTHON := /usr/bin/python3
# Six tests at a time, since they wait more than they work; those of a file, and of a store, one after the other.
PYTEST := $(PYTHON) -m pytest -q -p no:cacheprovider --tb=short --durations=15 -n 6 --dist loadgroup
HDCS := target/release/hdcs

.PHONY: help setup build install checked test test-crates demo run hostile bench bench-ceph bench-s3 bench-hdfs bench-guide bench-clones crash sim fuzz deny mutants clean model bench-page bench-hits bench-policies bench-encryption bench-replication bench-qos bench-scale bench-volumes bench-storage crash-fua stress-volumes

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

setup: ## install what is missing of everything (Debian packages; says so when cargo is)
	@testenv/setup.sh

# With the examples, as `make test` builds them: other features of shared crates would build half of the tree again.
build: ## target/release/hdcs and the benchmark
	@testenv/setup.sh build
	cargo build --release --workspace --bins --examples

PREFIX ?= /usr/local
install: build ## hdcs, its manual pages and shell completions below PREFIX=/usr/local (DESTDIR for packages)
	install -D -m 755 $(HDCS) $(DESTDIR)$(PREFIX)/bin/hdcs
	$(HDCS) man $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions $(DESTDIR)$(PREFIX)/share/zsh/site-functions $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	$(HDCS) completions bash >$(DESTDIR)$(PREFIX)/share/bash-completion/completions/hdcs
	$(HDCS) completions zsh >$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_hdcs
	$(HDCS) completions fish >$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/hdcs.fish

# All that `make test` builds is built once, optimised and with assertions on.
CHECKED := --profile checked --workspace
checked:
	timeout 2400 cargo build $(CHECKED) --all-targets

# Quick things first; each step is bounded in time. The demo is built without default features. This is all that CI runs. The simulator's seeds are the same
# on every machine; `make sim` goes on with others.
test: setup ## everything that must hold
	cargo fmt --all --check
	timeout 1500 cargo clippy $(CHECKED) --all-targets -- -D warnings
	timeout 600 cargo check --profile checked -p hdcs-cli -p hdcs-bench --no-default-features
	$(MAKE) checked
	nice timeout 3000 $(MAKE) test-crates >target/test-crates.log 2>&1 & crates=$$!; \
	timeout 3000 $(PYTEST) tests; black_box=$$?; wait $$crates; crates=$$?; \
	[ $$crates = 0 ] && grep '^test result\|[0-9] runs in' target/test-crates.log || cat target/test-crates.log; \
	[ $$black_box = 0 ] && [ $$crates = 0 ]

# Beside the black-box tests, which mostly wait.
test-crates:
	timeout 2400 cargo test $(CHECKED)
	timeout 300 target/checked/hdcs-sim --seeds 300 --time 60 & node=$$!; \
	timeout 300 target/checked/hdcs-sim --world objects --seeds 1000 --time 30 && \
	timeout 300 target/checked/hdcs-sim --world home --seeds 1000 --time 10 && \
	timeout 300 target/checked/hdcs-sim --world cluster --seeds 1000 --time 20 && \
	timeout 300 target/checked/hdcs-sim --world ranges --seeds 30 --time 20; others=$$?; \
	wait $$node && [ $$others = 0 ]

# Without the kinds of backends that it does not show, unless everything is built already.
demo: DEMO := $(if $(wildcard target/release/hdcs-bench),release,quick)
demo: ## HDCS beside its slow backend, then a crash and the proof that nothing is lost
	@testenv/setup.sh $(if $(filter release,$(DEMO)),build) demo
	cargo build $(if $(filter release,$(DEMO)),--release --workspace --bins --examples,--profile quick -p hdcs-cli -p hdcs-bench --no-default-features)
	timeout 300 target/$(DEMO)/hdcs-bench demo

run: build ## a node in the foreground, and how to attach to it
	@testenv/run.sh

bench-policies: setup build ## every cache policy, and the longest gap when one becomes another (QUICK=1)
	target/release/hdcs-bench policies $(if $(QUICK),--quick)

stress-volumes: setup build ## a thousand volumes of one node, killed and opened again, with figures (SHARDS=n)
	HDCS_BUILT=target/release HDCS_VOLUMES=1000 $(if $(SHARDS),HDCS_SHARDS=$(SHARDS)) timeout 900 $(PYTHON) -m pytest -q -s -p no:cacheprovider tests/node/test_many_volumes.py

bench: setup build ## side by side with the device and peers; docs/PERFORMANCE.md (QUICK=1 ONLY=profile PLACE=disk|memory REPEAT=n)
	target/release/hdcs-bench compare $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(PLACE),--place $(PLACE)) $(if $(REPEAT),--repeat $(REPEAT))

bench-page: build ## docs/PERFORMANCE.md of runs that each measured a part of it (RESULTS='bench/results/…/results.json …')
	target/release/hdcs-bench performance $(RESULTS)

bench-ceph: setup build ## before a real Ceph, beside librbd straight to it (QUICK=1 ONLY=profile REPEAT=n)
	target/release/hdcs-bench ceph $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(REPEAT),--repeat $(REPEAT))

bench-s3: setup build ## before a real S3, beside its client, with what it costs in requests (QUICK=1 ONLY=profile REPEAT=n)
	target/release/hdcs-bench s3 $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(REPEAT),--repeat $(REPEAT))

bench-storage: setup build ## what storage mode writes when a full volume is overwritten (QUICK=1)
	target/release/hdcs-bench storage $(if $(QUICK),--quick)

bench-hdfs: setup build ## the same before a real HDFS (QUICK=1 ONLY=profile REPEAT=n)
	target/release/hdcs-bench hdfs $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(REPEAT),--repeat $(REPEAT))

bench-guide: setup build ## which mode and policy for which load, with a picture of each (QUICK=1)
	target/release/hdcs-bench guide $(if $(QUICK),--quick)

bench-clones: setup build ## a clone's first reads of what another one has read, beside a cached volume's (QUICK=1 REPEAT=n)
	target/release/hdcs-bench clones $(if $(QUICK),--quick) $(if $(REPEAT),--repeat $(REPEAT))

bench-hits: setup build ## hit rates of the cache beside LRU, ARC, S3-FIFO, W-TinyLFU (TRACE=file: a trace of yours; FORMAT=msr|oracle|plain)
	target/release/hdcs-bench hits $(if $(TRACE),--trace $(TRACE)) $(if $(FORMAT),--format $(FORMAT))

bench-encryption: setup build ## encrypted volumes beside plain ones (REPEAT=n)
	target/release/hdcs-bench encryption $(if $(REPEAT),--repeat $(REPEAT))

bench-replication: setup build ## volumes with copies on another node beside those without (REPEAT=n, PART=writes,…)
	target/release/hdcs-bench replication $(if $(REPEAT),--repeat $(REPEAT)) $(if $(PART),--part $(PART))

bench-qos: setup build ## quality of service: a reservation beside noisy neighbours, weights, limits (QUICK=1 REPEAT=n)
	target/release/hdcs-bench qos $(if $(QUICK),--quick) $(if $(REPEAT),--repeat $(REPEAT))

bench-volumes: setup build ## four volumes of a node beside one, and what saturates (QUICK=1 REPEAT=n)
	target/release/hdcs-bench volumes $(if $(QUICK),--quick) $(if $(REPEAT),--repeat $(REPEAT))

bench-scale: setup build ## 1, 2, 4 and 8 shards with an equal small share of a processor each, logs and cache in memory (QUICK=1 REPEAT=n)
	target/release/hdcs-bench scale $(if $(QUICK),--quick) $(if $(REPEAT),--repeat $(REPEAT))

hostile: setup build ## each attack of hostile clients for TIME=60 seconds, beside one that must not notice (ATTACK=name)
	HDCS_BUILT=$(CURDIR)/target/release HOSTILE_SECONDS=$(or $(TIME),60) HOSTILE_SLOWEST_MS=$(or $(SLOWEST),50) $(PYTHON) -m pytest -q -s -p no:cacheprovider --tb=short tests/nbd/test_hostile_clients.py $(if $(ATTACK),-k '$(ATTACK)')

crash: setup build ## kill the node N times, then a fifth as often with power cuts (N=500 SEED=n)
	target/release/hdcs-bench crash --kills $(or $(N),500) $(if $(SEED),--seed $(SEED))
	target/release/hdcs-bench crash --kills $$(( $(or $(N),500) / 5 )) --power $(if $(SEED),--seed $(SEED))

crash-fua: setup build ## lose the node and its log in mid-load: the backend honours FUA (KILLS=200)
	HDCS_BUILT=$(CURDIR)/target/release HDCS_FUA_KILLS=$(or $(KILLS),200) $(PYTHON) -m pytest -q -s -p no:cacheprovider tests/log/test_crash_fua.py

sim: ## the production core in virtual time, with faults (SEEDS=n or a..b, TIME=seconds, SEED=n replays one, WORLD=objects)
	cargo run --profile checked --package hdcs-sim -- $(if $(WORLD),--world $(WORLD)) $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),1000)) $(if $(TIME),--time $(TIME))

# Each takes minutes, and up to 8 GiB.
model: ## every interleaving of a replicated log's machines, more of it than in `make test` (SCOPE='--spans 2 --crashes 1 …')
	cargo build --profile checked --package hdcs-model
	set -e; for scope in $(if $(SCOPE),"$(SCOPE)","--ack all --spans 1 --slow 0" "--spans 1" "--crashes 0 --spans 2" "--crashes 0 --takings 2 --spans 1 --at-once" \
		"--members 2 --spans 2 --at-once" "--crashes 0 --spans 1 --at-once --losses 1 --suspicions 1" "--spans 1 --at-once --tails 1 --suspicions 1" "--crashes 0 --spans 2 --at-once --tails 1 --suspicions 1 --retries 1 --namings 1" \
		"--spans 3 --window 1 --at-once --requests 2"); do \
		echo "hdcs-model $$scope"; target/checked/hdcs-model $$scope; done

fuzz: ## parsers under coverage, with a nightly compiler (TIME=seconds); seeded runs are in `make test`
	testing/fuzz/run.sh $(or $(TIME),300)

mutants: ## mutations of the core that its tests do not notice (COUNT=200 SEED=n)
	testing/mutants.py --count $(or $(COUNT),200) --seed $(or $(SEED),1)

DENY := 0.20.2
deny: ## what dependencies may be (deny.toml): licences, sources, advisories; installs cargo-deny, which takes minutes
	cargo deny --version 2>/dev/null | grep -q '$(DENY)' || cargo install cargo-deny --version $(DENY) --locked
	cargo deny --all-features check licenses bans sources
	@if cargo deny fetch db; then cargo deny --all-features check advisories; \
	else echo 'the advisories cannot be had here; the rest is checked'; fi

clean: ## remove what was built
	cargo clean
