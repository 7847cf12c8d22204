# Two commands do all the set-up: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
JOBS ?= 2
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-fast check format lint types golden bench-parity bench-reach bench-reach-train bench-memory bench-compile bench-device bench-replay bench-plans bench-real bench-scale bench-oracle bench-search clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and pinned, so that the resolver never looks for another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.installed  ## plan, inspect and train a small model on 2 CPU processes
	@BIN=$(BIN) sh examples/demo.sh

test: $(VENV)/.installed-dev  ## the whole suite
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-fast: $(VENV)/.installed-dev  ## the suite without what is marked slow
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m 'not slow'

format: $(VENV)/.installed-dev  ## rewrite the sources in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/.installed-dev  ## format and lint, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev  ## type check
	$(BIN)/mypy

check: lint types test  ## the one command: format, lint, types, tests

golden: $(VENV)/.installed-dev  ## rewrite the golden files; read the diff
	$(BIN)/python -m pytest --update-golden -m 'golden'

bench-parity: $(VENV)/.installed-dev  ## train one model in five ways and compare
	$(BIN)/python benchmarks/parity.py

bench-reach: $(VENV)/.installed-dev  ## plan every architecture of transformers, print counts and failures
	$(BIN)/python -m benchmarks.reach $(REACH)

bench-reach-train: $(VENV)/.installed-dev  ## train sixty small architectures on two ranks beside one process
	$(BIN)/python -m benchmarks.reach.train $(REACH)

bench-memory: $(VENV)/.installed-dev  ## train models in many configurations, projected beside measured bytes
	$(BIN)/python -m benchmarks.memory

bench-replay: $(VENV)/.installed-dev  ## time a projection beside torch's FSDPMemTracker
	$(BIN)/python -m benchmarks.memory.replay

bench-plans: $(VENV)/.installed-dev  ## plan 11 models in five worlds beside the baselines, under the cost model
	$(BIN)/python benchmarks/plans.py

bench-real: $(VENV)/.installed-dev  ## calibrate this CPU, train plans and baselines on it, compare with what was predicted
	$(BIN)/python benchmarks/real.py

bench-compile: $(VENV)/.installed-dev  ## compare what compiled blocks keep with what is projected for them
	$(BIN)/python benchmarks/compile.py
bench-scale: $(VENV)/.installed-dev  ## plan the largest models, from the shell; CPU seconds, memory, growth with depth
	$(BIN)/python -m benchmarks.scale --full
	$(BIN)/python -m benchmarks.scale --peers

bench-device: $(VENV)/.installed-dev  ## compare attention kernels, optimizers and the allocator with one GPU
	$(BIN)/python benchmarks/device.py

bench-oracle: $(VENV)/.installed-dev  ## compare the search with brute force on hundreds of small worlds
	$(BIN)/python benchmarks/oracle.py

bench-search: $(VENV)/.installed-dev  ## time the planning of large models, capture apart
	$(BIN)/python -m benchmarks.search

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
