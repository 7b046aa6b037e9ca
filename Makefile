# The verbs of the project. A newcomer needs two: `make serve` and `make test`.
#
#   make serve  PORT=8000 MODEL=<folder, GGUF file or hub id> ARGS="--max-num-seqs 8"
#   make install TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
#
# pip's own configuration (pip.conf, PIP_* variables) is honoured everywhere.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.6.0
# For two cores: almost half of the time of the tests is waits for other processes.
WORKERS ?= 3
PORT   ?= 8000
MODEL  ?=
ARGS   ?=
BENCH  ?= host_loop cpu_peers
# `make test-fast`: the folders whose tests need no model, less those that wait for processes.
FAST   := tests/architecture tests/engine tests/observe tests/scheduler tests/server tests/text \
  tests/test_cli_parsing.py tests/test_speculative_config.py tests/test_rank_options.py \
  --ignore=tests/engine/test_cluster.py --ignore=tests/engine/test_nodes.py \
  --ignore=tests/server/test_life.py --ignore=tests/server/test_ranks.py \
  --ignore-glob='*/test_*_process.py' --ignore-glob='*/test_restarts.py'
# A worker that has nothing left takes tests from another one.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

comma := ,
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A machine that lends its own torch (a GPU image) may have no .venv at all.
ANY_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: help install serve test-fast test test-more test-all test-faults soak test-agents check \
  check-types check-style test-gpu bench docs clean FORCE
.DEFAULT_GOAL := help

help:
	@echo 'make serve      install, fetch the default model, serve it on 127.0.0.1:$(PORT)  (PORT= MODEL= ARGS=)'
	@echo 'make install    make $(VENV) with Paceline and its server  (TORCH= PYTHON=)'
	@echo 'make test-fast  tests without a model, less than a minute  (ARGS= goes to pytest, WORKERS=)'
	@echo 'make test       every rule once, less than eight minutes on two cores  (ARGS=, WORKERS=)'
	@echo 'make test-more  the rules in further layouts and parameters; writes tests/more_last_run.json'
	@echo 'make test-all   everything and the full ladders; goes on where it was interrupted'
	@echo 'make test-faults  random faults under load; goes on where it was interrupted  (ARGS="--rounds 200 --seed 1")'
	@echo 'make soak       half an hour at twice saturation  (ARGS="--minutes 30")'
	@echo 'make test-agents  codex, Claude Code, opencode and qwen-code against a scripted model; needs npm'
	@echo 'make check      ruff, mypy, import floors, architecture tests'
	@echo 'make test-gpu   the tests that need an NVIDIA GPU; writes tests/gpu_last_run.json'
	@echo 'make bench      the repository benchmarks  (BENCH="$(BENCH)")'
	@echo 'make docs       write docs/reference again from the code, and build the site in site/'

# -- environment ---------------------------------------------------------------------------------
# Each stamp is one `pip install`; nothing runs again until pyproject.toml changes.

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || \
	  { echo 'There is no $(PYTHON). Install it:  apt install python3 python3-venv'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Paceline needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Give another: PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module. Install it:  apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Given on the command line, TORCH is remembered, and another value installs again.
ifneq ($(origin TORCH),file)
$(VENV)/.torch-asked: FORCE | $(VENV)/.made
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@
$(VENV)/.torch: $(VENV)/.torch-asked
endif

$(VENV)/.torch: | $(VENV)/.made
	@test -e /proc/driver/nvidia/version || echo 'No NVIDIA GPU here. If pip begins to fetch CUDA packages, stop it: README.md has the line for the small CPU build.'
	$(PIP) install $(TORCH)
	@touch $@

define extras_stamp
$(VENV)/.extras-$(1): pyproject.toml $(VENV)/.torch
	@echo 'Installing paceline[$(2)]'
	@$$(PIP) install --quiet --editable '.[$(2)]'
	@touch $$@
endef
# The kernel tests interpret Triton on the CPU. A CUDA build of torch brings its own; never touch it.
$(VENV)/.triton: $(VENV)/.torch
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --quiet '$(TRITON)'
	@touch $@

$(eval $(call extras_stamp,server,server$(comma)tools$(comma)terminal))
$(eval $(call extras_stamp,test,server$(comma)test))
$(eval $(call extras_stamp,more,server$(comma)test$(comma)ray-serve))
$(eval $(call extras_stamp,dev,server$(comma)test$(comma)dev))
$(eval $(call extras_stamp,bench,server$(comma)bench))
$(eval $(call extras_stamp,docs,server$(comma)docs))

# Clients of other projects. The Python ones have their own environment: their pins differ from ours.
CLIENTS := tests/clients
$(VENV)/clients/.made: $(CLIENTS)/python/requirements.txt | $(VENV)/.made
	@echo 'Installing the Python clients of the tests'
	@$(BIN)/python -m venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	@touch $@

# `npm ci` would refuse a lock file from a registry that lacks the packages of other systems.
# Without npm nothing is installed, and the tests that need it are skipped with a line.
$(CLIENTS)/%/node_modules/.made: $(CLIENTS)/%/package-lock.json
	@command -v npm >/dev/null || { echo 'There is no npm: the JavaScript clients are not tested.'; exit 0; }; \
	  cd $(CLIENTS)/$* && npm install --no-save --no-audit --no-fund --loglevel=error && touch node_modules/.made

# -- verbs ---------------------------------------------------------------------------------------

install: $(VENV)/.extras-server

serve: $(VENV)/.extras-server
	@$(BIN)/paceline serve $(MODEL) --port $(PORT) $(ARGS)

test-fast: $(VENV)/.extras-test
	$(PYTEST) $(FAST) $(ARGS)

test: $(VENV)/.extras-test $(VENV)/.triton
	$(PYTEST) $(ARGS)

test-more: $(VENV)/.extras-more $(VENV)/.triton $(VENV)/clients/.made $(CLIENTS)/js/node_modules/.made
	$(BIN)/python tests/run_tiers.py more -n$(WORKERS) --dist=worksteal $(ARGS)

test-all: $(VENV)/.extras-more $(VENV)/.triton
	$(BIN)/python tests/run_tiers.py all $(ARGS)

test-faults: $(VENV)/.extras-test
	$(BIN)/python tests/run_faults.py $(ARGS)

soak: $(VENV)/.extras-test
	$(BIN)/python tests/run_soak.py $(ARGS)

test-agents: $(VENV)/.extras-test $(CLIENTS)/agents/node_modules/.made
	$(BIN)/python -m pytest -n0 -m agents $(CLIENTS)/test_agents.py $(ARGS)

check: $(VENV)/.extras-dev
	@$(MAKE) --no-print-directory --output-sync --jobs=2 check-types check-style
	@$(BIN)/python tests/run_tiers.py more --stale
	@$(BIN)/python tests/run_gpu.py --stale

check-types:
	$(BIN)/mypy

check-style:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/architecture

test-gpu:
	$(ANY_PYTHON) tests/run_gpu.py $(ARGS)

bench: $(VENV)/.extras-bench
	@for name in $(BENCH); do $(BIN)/python bench/$$name.py $(ARGS) || exit 1; done

docs: $(VENV)/.extras-docs
	$(BIN)/python docs/write_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'The site is in site/; $(BIN)/mkdocs serve shows it.'

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
