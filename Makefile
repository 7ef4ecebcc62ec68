# `make demo` and `make test` need Rust and Python 3.11 or newer; everything else is set up in $(VENV).

PYTHON ?= python3
CARGO ?= cargo
VENV ?= .venv
DIST ?= dist
BIN := $(VENV)/bin
# What the demo streams; by default a file that comes with Python.
FILE ?=

SOURCES := Cargo.toml $(wildcard Cargo.lock) pyproject.toml README.md \
	$(shell find src softcuda python -type f -not -name '*.pyc' -not -name '*.so' -not -path '*/target/*')

# One interpreter for every build of the extension, so that they share what Cargo has built.
export PYO3_PYTHON := $(abspath $(BIN)/python)

.PHONY: help demo test test-rust test-python bench bench-core bench-instructions bench-baseline lint wheel clean

help:
	@echo "make demo [FILE=...]       stream a file through a device and back, with checksums in callbacks"
	@echo "make test                  the tests of the core, of the software driver and of the Python package"
	@echo "make bench                 rstream beside its peers, on the default device"
	@echo "make bench-core            times of the core on the software device"
	@echo "make bench-instructions    instructions of the core against the baseline (needs valgrind); bench-baseline renews it"
	@echo "make lint                  rustfmt, clippy, rustdoc, ruff, mypy, stubtest"
	@echo "make wheel                 the wheel, in $(DIST)/"
	@echo "make clean                 remove all that was built"

demo: $(VENV)/.installed
	$(BIN)/python -m rstream demo $(if $(FILE),"$(FILE)")

test: test-rust test-python

# The core and the software driver, without Python.
test-rust:
	$(CARGO) test --workspace --no-default-features

# The checkout has no importable `rstream` at its root, so the tests import the installed wheel. They run under each signal.
test-python: $(VENV)/.installed
	RSTREAM_SIGNAL=driver $(BIN)/pytest
	RSTREAM_SIGNAL=memory $(BIN)/pytest

bench: $(VENV)/.installed
	$(CARGO) build --release --no-default-features --example pipeline
	$(BIN)/python benches/compare.py --pipeline $${CARGO_TARGET_DIR:-target}/release/examples/pipeline

bench-core:
	$(CARGO) bench --no-default-features --bench core

# Fails when an enqueue, a dispatch or an idle call takes more instructions or allocations than benches/instructions.json has.
bench-instructions:
	CARGO="$(CARGO)" $(PYTHON) benches/instructions.py

bench-baseline:
	CARGO="$(CARGO)" $(PYTHON) benches/instructions.py --baseline

lint: $(VENV)/.installed
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --no-default-features -- -D warnings
	$(CARGO) clippy --workspace --all-targets --features python -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --no-default-features
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest rstream._core --allowlist tests/stubtest-allowlist.txt --ignore-unused-allowlist

wheel: $(VENV)/.wheel

$(VENV)/.dev: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("rstream needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@command -v $(CARGO) >/dev/null || { echo "rstream needs Rust to be built, and $(CARGO) was not found" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

$(VENV)/.wheel: $(VENV)/.dev $(SOURCES)
	rm -f $(DIST)/rstream-*.whl
	$(BIN)/maturin build --release --interpreter $(BIN)/python --out $(DIST)
	touch $@

$(VENV)/.installed: $(VENV)/.wheel
	$(BIN)/python -m pip install --quiet --force-reinstall --no-deps $(DIST)/rstream-*.whl
	touch $@

clean:
	$(CARGO) clean
	rm -rf $(VENV) $(DIST) .mypy_cache .pytest_cache .ruff_cache
	find python tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
