# make demo     one request, end to end, on a local cluster (no GPU needed)
# make test     the tests; those that need something absent skip themselves
#
# Both make their own environment in .venv first. On a CUDA machine `make venv TORCH=torch
# CUDA=cuda13` takes the newest torch that pyproject.toml allows in place of the pinned one, and the
# CuPy of its CUDA; without a GPU CuPy compiles the kernels, for the tests.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= $(shell grep '^torch==' constraints.txt)
CUDA   ?= cuda12

BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PINS   := $(VENV)/pins.txt
STUBS  := proto/generate.py

# Integration tests that start no process: models, files, and parts of a worker.
COMPUTING := $(wildcard $(addprefix tests/integration/test_,model_*.py deploy_convert*.py \
  bench_precision.py bench_prefetch.py bench_quality.py quality_smollm2.py worker_prefetcher.py \
  worker_quality_gate.py worker_scores.py worker_swap_identity.py worker_swapper.py))
ALONGSIDE := $(addprefix tests/,kernels property sim traces unit) $(COMPUTING)

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow lint format proto clean

help:
	@echo "make demo       start a local cluster, stream a few chats through it, check the answers"
	@echo "make test       run the tests"
	@echo "make test-slow  run the tests marked slow"
	@echo "make lint       ruff, mypy, and the committed gRPC stubs against proto/*.proto"
	@echo "make format     let ruff rewrite what it can"
	@echo "make proto      regenerate the gRPC stubs"
	@echo "make clean      remove the environment and the caches"

venv: $(STAMP)

# torch goes first and alone, so that no other package's needs choose the build; afterwards its pin
# is left out of the constraints, or TORCH could not differ from it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  "Python 3.11 or newer is needed and $(PYTHON) is " + sys.version.split()[0] + \
	  ": name another one with make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	grep -v '^torch==' constraints.txt > $(PINS)
	$(BIN)/python -m pip install --quiet -c $(PINS) setuptools
	$(BIN)/python -m pip install --quiet -c $(PINS) '$(TORCH)'
	$(BIN)/python -m pip install --quiet -c $(PINS) --no-build-isolation -e '.[dev,bench,$(CUDA)]'
	touch $@

demo: venv
	$(BIN)/deepinfer demo

# pytest is called as a script: `python -m pytest` would put the repository root on sys.path.
# What starts clusters runs alone: it has more processes than a small machine has cores. The others
# run two at a time, and take one core each.
test: venv
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not slow' -n 2 $(ALONGSIDE)
	$(BIN)/pytest -m 'not slow' tests/integration tests/chaos $(addprefix --ignore=,$(COMPUTING))

test-slow: venv
	$(BIN)/pytest -m slow

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python $(STUBS) --check

format: venv
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: venv
	$(BIN)/python $(STUBS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
