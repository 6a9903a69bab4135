# Everything runs in .venv, which is created on first use and updated when pyproject.toml or
# constraints.txt change.

PYTHON ?= python3
VENV ?= .venv
TORCH_VENV ?= .venv-torch
PYTEST_ARGS ?=
# One more than CI has cores: much of the time of a test is waiting for disks, leases and processes.
PYTEST_WORKERS ?= 3
BENCH_ARGS ?=
TORTURE_ARGS ?=
NIGHTLY_ARGS ?=

BIN := $(VENV)/bin
# Errors are still shown; pip's progress and warnings are not.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.installed-docs
BENCH_INSTALLED := $(VENV)/.installed-bench
TORCH_INSTALLED := $(TORCH_VENV)/.installed
TORCH_BENCH_INSTALLED := $(TORCH_VENV)/.installed-bench
BROWSER_INSTALLED := $(VENV)/.installed-browser

.DEFAULT_GOAL := help
.PHONY: help install demo test test-torch nightly torture lint format bench bench-torch docs clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create .venv with every extra and the development tools

demo: $(INSTALLED) ## show what persisting does, in less than two minutes
	@$(BIN)/persisting demo

test: $(BROWSER_INSTALLED) ## run the tests (PYTEST_ARGS="-k name", PYTEST_WORKERS=0)
	@$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --no-loadscope-reorder $(PYTEST_ARGS)

test-torch: $(TORCH_INSTALLED) ## run the tests with torch, in an environment of its own
	@$(TORCH_VENV)/bin/python -m pytest -n $(PYTEST_WORKERS) tests/torch tests/data $(PYTEST_ARGS)

nightly: $(BROWSER_INSTALLED) ## run the long tests, for hours (NIGHTLY_ARGS="--torture-seconds 60")
	@$(BIN)/python tests/nightly.py --workers $(PYTEST_WORKERS) $(NIGHTLY_ARGS)

torture: $(INSTALLED) ## random work under random faults (TORTURE_ARGS="--seconds 600 --seed 7")
	@PYTHONPATH=tests $(BIN)/python -m torture $(TORTURE_ARGS)

lint: $(INSTALLED) ## ruff, mypy, the import contracts and the commit subjects
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy src
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/check_commit_subjects.py

format: $(INSTALLED) ## format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(BENCH_INSTALLED) ## run the benchmarks (BENCH_ARGS=...)
	@$(BIN)/python benchmarks/core.py $(BENCH_ARGS)
	@$(BIN)/python benchmarks/peers.py
	@$(BIN)/python benchmarks/scaling.py
	@$(BIN)/python benchmarks/queues.py
	@$(BIN)/python benchmarks/work.py
	@$(BIN)/python benchmarks/tables.py
	@$(BIN)/python benchmarks/console.py
	@$(BIN)/python benchmarks/object_store.py
	@$(BIN)/python benchmarks/spark.py

bench-torch: $(TORCH_BENCH_INSTALLED) ## compare reads for training with others (BENCH_ARGS=...)
	@$(TORCH_VENV)/bin/python benchmarks/training.py $(BENCH_ARGS)

docs: $(DOCS_INSTALLED) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove build output and caches
	@rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove the environments too
	@rm -rf $(VENV) $(TORCH_VENV)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "persisting needs Python 3.10 or newer, but $(PYTHON) is: $$($(PYTHON) -V 2>&1)" >&2; \
	  echo "Use another one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing persisting and its tools into $(VENV) (takes minutes the first time)"
	@$(PIP) install -c constraints.txt -e ".[all,dev]"
	@command -v cc >/dev/null || $(PIP) install -c constraints.txt ziglang  # some tests compile C
	@touch $@

# Without Chromium the tests of the console fail and say how to install it.
$(BROWSER_INSTALLED): $(INSTALLED)
	@if $(BIN)/python tools/install_chromium.py; then touch $@; fi

$(BENCH_INSTALLED): $(INSTALLED)
	@echo "installing the systems that the benchmarks compare with into $(VENV)"
	@$(PIP) install -c constraints.txt -e ".[bench]"
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	@echo "installing the documentation tools into $(VENV)"
	@$(PIP) install -c constraints.txt -e ".[docs]"
	@touch $@

$(TORCH_INSTALLED): pyproject.toml constraints.txt
	@echo "installing torch into $(TORCH_VENV): from PyPI it brings CUDA libraries of several GB"
	@echo "(for the CPU only: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make $@)"
	@test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv --clear $(TORCH_VENV)
	@$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check --quiet --quiet \
	  install -c constraints.txt -e ".[dev,torch]"
	@touch $@

$(TORCH_BENCH_INSTALLED): $(TORCH_INSTALLED)
	@echo "installing the systems that the benchmark compares with into $(TORCH_VENV)"
	@$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check --quiet --quiet \
	  install "lancedb>=0.40,<0.41" torchrl
	@touch $@
