# Every target works as the only command in a fresh clone. Nothing is left outside the clone but what
# package managers cache.

SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
PY := $(BIN)/python
export TMPDIR := $(CURDIR)/.strata/tmp
# Tests, the demo and chaos start interpreters by the hundred: compiling Strata again in each takes a third of its start.
unexport PYTHONDONTWRITEBYTECODE
# Tests that take long wait for other processes, so there may be more of these than cores.
TEST_PROCESSES := 3
PYTEST = $(PY) -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
# `make test`: the users' journeys among the tests that start real processes, and all other tests; nothing slow.
QUICK := not slow and not campaign and (journey or not (integration or e2e or schedules))
SOURCES := $(wildcard strata chaos examples benchmarks tests scripts web/*.py)

.PHONY: help test test-all test-versions test-alone test-frameworks new-adr soak check demo bench chaos proto web fmt clean distclean ready etcd \
  format lint types layers generated tree durations

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

ready: ## set up .venv (the other targets do this themselves)
	@scripts/bootstrap

etcd: ## put etcd into .tools (likewise)
	@scripts/fetch-etcd

test: ready etcd ## run the quick tests: for every change (ARGS="-n 0 -k name" for some of them, in one process)
	@$(PYTEST) -m "$(QUICK)" $(ARGS)

test-all: ready etcd ## run all tests but campaigns and those of test-alone, as CI does
	@$(PYTEST) -m "not campaign and not alone" $(ARGS)

test-versions: ready ## run the unit tests with the oldest and the newest Python and libraries (ARGS="--only oldest")
	@$(PY) scripts/test_versions.py $(ARGS)

test-frameworks: ready etcd ## test Lightning, Hugging Face and Flax, in environments of their own (ARGS="--only jax")
	@$(PY) scripts/test_frameworks.py $(ARGS)

test-alone: ready etcd ## run the tests that measure time, one after the other: attacks on a replica, a page of 1,000 ranks
	@$(PY) -m pytest -n 0 -m alone tests/integration/abuse tests/integration/web $(ARGS)

soak: ready etcd ## seeds, schedules, crashes, rank kills and chaos until the time is over (ARGS="--hours 2")
	@$(PY) -m tests.soak $(ARGS)

check: format lint types layers generated tree durations ## format, lint, types, layers, generated code, tree rules, slow tests

format: ready
	@$(BIN)/ruff format --check $(SOURCES)

lint: ready
	@$(BIN)/ruff check $(SOURCES)

types: ready
	@$(BIN)/mypy $(SOURCES)

layers: ready
	@$(BIN)/lint-imports --no-logo --no-cache

generated: ready
	@scripts/gen-proto --check
	@scripts/gen-api --check

tree: ready
	@$(PY) scripts/check_tree.py

durations: ready
	@$(PY) -m tests.durations

demo: ready etcd ## train on three coordinators and etcd members while processes are killed
	@$(PY) examples/demo/run.py $(ARGS)

bench: ready etcd ## run the benchmarks
	@$(PY) -m benchmarks $(ARGS)

chaos: ready etcd ## inject faults into a running cluster and judge the record (ARGS="--scenario mixed --seed 7")
	@$(PY) -m strata_chaos run $(ARGS)

proto: ready ## regenerate strata/v1 and strata/etcdapi from proto/
	@scripts/gen-proto

web: ready ## rebuild the dashboard: strata/dashboard/bundle from web/
	@scripts/build-web $(ARGS)

new-adr: ## begin a decision record (TITLE="leases outlive their leader")
	@scripts/new-adr "$(TITLE)"

fmt: ready ## format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix --exit-zero --quiet $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

clean: ## remove caches and temporary files
	@rm -rf .strata/tmp .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove .venv, .tools and the data below .strata
	@rm -rf .venv .tools .strata
