# On a fresh machine: `make train`. Needs Python >= 3.11, make, and a C++ compiler for the kernels (it trains without).

VENV := .venv
BIN := $(VENV)/bin
ARGS ?= quickstart
# Test processes: on two cores three, since those that wait for several ranks leave a core free (docs/LOG.md, 2026-11-22).
# A file's tests stay in one process, so that what they share is made once; files are handed out in the order of tests/,
# unit tests last.
WORKERS ?= 3
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Only the plugins that are used: pytest rewrites all of hypothesis otherwise, in each process. And byte code is kept,
# whatever the environment says, since dozens of tests start a process.
PYTEST := PYTHONDONTWRITEBYTECODE= PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest \
	-p xdist.plugin -p pytest_timeout -p _hypothesis_pytestplugin

PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.DELETE_ON_ERROR:
.PHONY: train test test-gpu test-faults test-timing test-racing test-mutations check format clean help

train: $(VENV)/.installed  ## set up and train the quickstart recipe (ARGS="quickstart --minutes 1" for another run)
	$(BIN)/gptlab train $(ARGS)

test: $(VENV)/.installed-dev  ## set up and run the tests (WORKERS=3 processes)
	$(PYTEST) $(PARALLEL)

test-gpu: $(VENV)/.installed-dev  ## only the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

test-faults: $(VENV)/.installed-dev  ## the long tests of kills and damage (docs/reliability.md), and their table
	rm -rf build/faults
	$(PYTEST) -n $(WORKERS) --dist worksteal -m faults
	$(BIN)/python tests/support/fault_figures.py

test-timing: $(VENV)/.installed-dev  ## the promises in seconds, on a machine that does nothing else
	GPTLAB_TEST_TIMING=1 $(PYTEST) tests/hostile tests/unit/cli/test_help.py

test-racing: $(VENV)/.installed-dev  ## the lab's error rates in simulated nights: the tables of docs/lab.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/racing_nights.py

test-mutations: $(VENV)/.installed-dev  ## whether the tests notice each defect of tests/mutations/
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutations --processes $(WORKERS)

check: $(VENV)/.installed-dev  ## ruff (lint, format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev  ## let ruff correct what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and everything built (runs/ stays)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find gptlab tests -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1\t/p' Makefile | expand -t 24

# The stamps are what makes a second call install nothing.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing gptlab and its pinned dependencies into $(VENV)"
	$(PIP_INSTALL) -e .
	@touch $@

# Of the 230 MB of sources that pip would compile, tests use a part: what all of their processes import is compiled once,
# everything else where it is first imported.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing gptlab, its pinned dependencies and the development tools into $(VENV)"
	$(PIP_INSTALL) --no-compile -e '.[dev]'
	PYTHONDONTWRITEBYTECODE= $(BIN)/python tests/support/byte_code.py
	@touch $(VENV)/.installed $@

# The first interpreter that runs and is new enough, or the one of PYTHON=/path/to/python.
$(BIN)/python:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14); do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "creating $(VENV) with $$($$python --version)"; \
			exec $$python -m venv $(VENV); \
		fi; \
	done; \
	echo "error: $(if $(PYTHON),$(PYTHON) is no Python >= 3.11 that runs,no Python >= 3.11 found); install one or name it: make PYTHON=/path/to/python3.11" >&2; exit 1
