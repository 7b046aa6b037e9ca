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
WORKERS ?= 2
PORT   ?= 8000
MODEL  ?=
ARGS   ?=
BENCH  ?= host_loop cpu_peers

comma := ,
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A machine that lends its own torch (a GPU image) may have no .venv at all.
ANY_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: help install serve test test-all check test-gpu bench docs clean FORCE
.DEFAULT_GOAL := help

help:
	@echo 'make serve      install, fetch the default model, serve it on 127.0.0.1:$(PORT)  (PORT= MODEL= ARGS=)'
	@echo 'make install    make $(VENV) with Paceline and its server  (TORCH= PYTHON=)'
	@echo 'make test       the fast tests, in two processes  (ARGS= goes to pytest, WORKERS=)'
	@echo 'make test-all   the fast tests and the full ladders'
	@echo 'make check      ruff, mypy, import floors, architecture tests'
	@echo 'make test-gpu   the tests that need an NVIDIA GPU; writes tests/gpu_last_run.json'
	@echo 'make bench      the repository benchmarks  (BENCH="$(BENCH)")'
	@echo 'make docs       write docs/reference again from the code'

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

$(eval $(call extras_stamp,server,server))
$(eval $(call extras_stamp,test,server$(comma)test))
$(eval $(call extras_stamp,dev,server$(comma)test$(comma)dev))
$(eval $(call extras_stamp,bench,server$(comma)bench))

# -- verbs ---------------------------------------------------------------------------------------

install: $(VENV)/.extras-server

serve: $(VENV)/.extras-server
	@$(BIN)/paceline serve $(MODEL) --port $(PORT) $(ARGS)

test: $(VENV)/.extras-test $(VENV)/.triton
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-all: $(VENV)/.extras-test $(VENV)/.triton
	$(BIN)/python -m pytest -m 'not gpu' $(ARGS)

check: $(VENV)/.extras-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/architecture
	@$(BIN)/python tests/run_gpu.py --stale

test-gpu:
	$(ANY_PYTHON) tests/run_gpu.py $(ARGS)

bench: $(VENV)/.extras-bench
	@for name in $(BENCH); do $(BIN)/python bench/$$name.py $(ARGS) || exit 1; done

docs: $(VENV)/.extras-server
	$(BIN)/python docs/write_reference.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
