# All targets share one environment, .venv. Each group of extras leaves a stamp there, so that pip
# runs only when pyproject.toml has changed. `make PYTHON=python3.12 ...` picks the interpreter.

PYTHON ?= python3
BIN := .venv/bin
# Most of what is installed is never imported: compiling it all takes longer than what is used, when it is.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
# Where Python is told to keep no compiled modules, every process that a test starts compiles torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint types imports unit spec mutants device clients bench chart docs clean
.SECONDARY:

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10

demo: .venv/train.stamp ## install, then train a classifier on the embedded digits and write its report
	$(BIN)/opteq fit --config digits

test: lint types imports unit spec ## install, then lint, types, import direction, tests and rows

lint: .venv/dev.stamp ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/dev.stamp ## pyright
	$(BIN)/pyright

imports: .venv/dev.stamp ## import-linter: the package's layers
	$(BIN)/lint-imports --no-logo

# The tensors in the tests are small: one thread in each of several processes is the fastest way
# through. A file stays in one process, so that what its tests share is built once.
unit: .venv/dev.stamp ## pytest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

spec: .venv/dev.stamp ## the number of tests behind each row of docs/theory.md
	OMP_NUM_THREADS=1 $(BIN)/python tools/spec.py

mutants: .venv/dev.stamp .venv/mutants.stamp ## faults that tests fail to notice: make mutants FOLDERS=solvers
	$(BIN)/python tools/mutants.py $(FOLDERS)

device: .venv/dev.stamp ## tests, certificates and a measurement on a GPU, in six minutes
	$(BIN)/python -m tools.device_check

clients: .venv/clients.stamp ## libraries of others on equilibrium layers, in two minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest clients

bench: .venv/bench.stamp ## the measurements of benchmarks/
	$(BIN)/python -m benchmarks

chart: .venv/dev.stamp ## the chart of the README, from benchmarks/results/table.json
	$(BIN)/python -m benchmarks.chart

docs: .venv/docs.stamp ## build the documentation into site/, which works without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/offline.py

clean: ## remove the environment and everything that tools leave behind
	rm -rf .venv build dist site .hypothesis .import_linter_cache .pytest_cache .ruff_cache

# torchvision decides which torch is installed, so it goes first.
.venv/dev.stamp .venv/bench.stamp .venv/clients.stamp .venv/docs.stamp .venv/mutants.stamp: .venv/train.stamp

.venv/%.stamp: pyproject.toml | $(BIN)/pip
	$(PIP) --editable '.[$*]'
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("opteq needs Python 3.11 or later, but $(PYTHON) is %d.%d: try make PYTHON=python3.12." % sys.version_info[:2])'
	@$(PYTHON) -m venv .venv || { echo 'Creating .venv failed; on Debian and Ubuntu install the package python3-venv first.' >&2; exit 1; }
