# HDCS: `make demo` shows it, `make test` proves it. Other targets: see README.md.
.PHONY: build test
build:
	cargo build --release
test:
	cargo test --workspace
