# Everything a person does with this tree. `make` alone prints the list.
# Needs python3 (3.11 or newer, with venv), g++ and make; the rest comes from PyPI into .venv.

PYTHON ?= python3
JOBS ?= $(shell nproc)
PYTEST_ARGS ?=
SHELL := /bin/bash
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq install
PYTEST_ENVIRONMENT := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONFAULTHANDLER=1
PYTEST := $(PYTEST_ENVIRONMENT) $(BIN)/python -m pytest

# What of the suite has a device in it.
CUDA_TESTS := tests/test_ops.py tests/test_sampling.py tests/test_vocabulary.py tests/test_tree_build.py tests/test_exact.py tests/test_nano_exact.py tests/test_odd_models.py \
    tests/test_soak.py tests/test_faults.py tests/test_engine_api.py tests/test_engine_requests.py tests/test_engine_parts.py \
    tests/test_abi.py tests/test_experts.py tests/test_self_check.py tests/test_cuda_build.py tests/test_real_sizes.py \
    tests/test_real_layer.py tests/test_runs.py tests/test_rank_step.py tests/test_transports.py tests/test_real_parallel.py tests/test_partings.py \
    tests/test_rounds.py tests/test_rank_failures.py
CUDA_TESTS_IMPORT := import cffi, click, hypothesis, jinja2, msgpack, numpy, psutil, pytest, pytest_timeout, tiktoken, xdist, zmq

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench long fuzz sanitize build cuda test-cuda clean tools

help: ## this list
	@echo "kd: a native inference engine daemon. Targets:"
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-9s %s\n", $$1, $$2}'

demo: .venv/.kd ## build the engine and decode with the embedded model (a few minutes the first time)
	@$(BIN)/kdctl demo

test: .venv/.kd .venv/.test ## build everything and run the test suite
	@JOBS=$(JOBS) build/make.sh cpu test
	$(PYTEST) -n $(JOBS) --dist loadfile $(PYTEST_ARGS)
	@build/cuda_status.sh

lint: .venv/.lint ## ruff, clang-format and mypy, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@find native examples tests bench \( -name '*.cpp' -o -name '*.h' -o -name '*.c' -o -name '*.cu' \) -print0 | \
	    xargs -0 -r $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy

format: .venv/.lint ## rewrite the sources the way `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@find native examples tests bench \( -name '*.cpp' -o -name '*.h' -o -name '*.c' -o -name '*.cu' \) -print0 | \
	    xargs -0 -r $(BIN)/clang-format -i

bench: .venv/.kd ## measure the daemon with the embedded model on this machine
	@$(BIN)/python -m pip --disable-pip-version-check --no-input -qq install psutil==7.2.2
	$(BIN)/python bench/service.py

long: .venv/.kd .venv/.test ## 50,000 random exactness combinations (hours)
	@JOBS=$(JOBS) build/make.sh cpu test
	KD_EXACT_COMBINATIONS=50000 $(PYTEST) tests/test_exact.py --timeout 0 $(PYTEST_ARGS)

fuzz: tools ## mutated model files against the loader, for FUZZ_SECONDS (600)
	tests/fuzz/run.sh $${FUZZ_SECONDS:-600}

sanitize: tools ## the CPU twin under ASan + UBSan and under TSan
	@JOBS=$(JOBS) tests/sanitize/run.sh

build: tools ## only the libraries, into build/out
	@JOBS=$(JOBS) build/make.sh cpu test

cuda: tools .venv/.cuda ## the CUDA twin, for the GPUs here or else for sm_90a and sm_120f; ARCHS="80 90a" or ARCHS=all for others
	@JOBS=$(JOBS) build/make.sh cuda cuda-test
	@build/cuda_status.sh

test-cuda: ## the test suite on the GPU, with the CUDA twin; a PYTHON that has all the tests import is taken as it is
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make test-cuda: there is no NVIDIA GPU here (nvidia-smi shows none), and these tests run on one; make test is for the CPU twin" >&2; exit 69; }
	@if command -v nvcc >/dev/null && $(PYTHON) -c '$(CUDA_TESTS_IMPORT)' 2>/dev/null; then python=$(PYTHON); \
	else $(MAKE) --no-print-directory .venv/.test .venv/.cuda && python=$(BIN)/python; fi && \
	JOBS=$(JOBS) build/make.sh cuda cuda-test && PYTHONPATH=runtime:. $(PYTEST_ENVIRONMENT) $$python -m pytest --device cuda \
	    -n $$(( $(JOBS) < 8 ? $(JOBS) : 8 )) --dist worksteal $(CUDA_TESTS) $(PYTEST_ARGS)

clean: ## remove .venv and everything built
	rm -rf .venv build/out .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# ---- what the targets stand on --------------------------------------------------------------------------------------

tools:
	@command -v g++ >/dev/null || { echo "g++ is missing: install it (Debian: apt-get install g++)" >&2; exit 69; }
	@echo '#if __cplusplus < 202002L' $$'\n' '#error' $$'\n' '#endif' | g++ -std=c++20 -x c++ -fsyntax-only - 2>/dev/null || \
	    { echo "g++ does not know C++20: install g++ 11 or newer" >&2; exit 69; }
	@command -v $(PYTHON) >/dev/null || \
	    { echo "$(PYTHON) is missing: install Python 3.11 or newer (Debian: apt-get install python3 python3-venv)" >&2; exit 69; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is too old: kd needs Python 3.11 or newer; name another one with make PYTHON=..." >&2; exit 69; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	    { echo "$(PYTHON) has no venv: install it (Debian: apt-get install python3-venv)" >&2; exit 69; }

# Stamps: a second run finds them and starts at once. A new pyproject.toml installs again.
.venv/.made: | tools
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.kd: .venv/.made pyproject.toml build/hatch_hook.py | tools
	@echo "building the CPU library (a minute or two the first time)"
	@JOBS=$(JOBS) build/make.sh cpu
	$(PIP) --editable .
	@touch $@

.venv/.test: .venv/.kd pyproject.toml
	$(PIP) --editable '.[test]'
	@touch $@

# A toolkit of the system is taken as it is; without one, nvcc comes from PyPI.
.venv/.cuda: .venv/.made pyproject.toml
	@command -v nvcc >/dev/null || { echo "installing nvcc 13.0 from PyPI"; $(PIP) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["cuda"])') && touch $@; }

.venv/.lint: .venv/.made pyproject.toml
	$(PIP) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["lint"])')
	@touch $@
