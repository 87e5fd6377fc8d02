# The commands people type. None of them needs root. `make` alone lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
# PyTorch's own index of CPU builds; used only where no local wheel directory is configured.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)

# uv reads none of pip's settings: hand on the two that decide where packages come from.
comma := ,
space := $() $()
ifndef UV_FIND_LINKS
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS := $(subst $(space),$(comma),$(strip $(PIP_FIND_LINKS)))
endif
endif
ifndef UV_DEFAULT_INDEX
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX := $(PIP_INDEX_URL)
endif
endif

# Without compiled modules on disk each process compiles vLLM's 6,000 anew: 10 s of every engine's start.
unexport PYTHONDONTWRITEBYTECODE

# Nothing that runs here reports usage.
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DVC_NO_ANALYTICS := 1
# Nothing asks the Hugging Face hub, unless params.yaml takes the verifier from it.
ifndef HF_HUB_OFFLINE
export HF_HUB_OFFLINE := $(if $(shell grep -E '^ *source: *.?hf:' params.yaml),0,1)
endif

.PHONY: help setup demo serve up down test test-fast test-long bench schema clean

help:  ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.runtime  ## Make .venv with everything that a run needs

$(VENV)/bin/uv: requirements/bootstrap.txt
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) not found; install Python 3.11, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "setup: $(PYTHON) cannot make a virtual environment (Debian: package python3.11-venv)" >&2; exit 1; }
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/bootstrap.txt
	@touch $@

# torch first and alone when it comes from its own index: that index also holds old builds of other packages.
$(VENV)/.packages: requirements/cpu.txt $(VENV)/bin/uv
ifndef UV_FIND_LINKS
	uv pip install --no-deps --default-index $(TORCH_INDEX) "$$(grep '^torch==' requirements/cpu.txt)"
endif
	uv pip install --no-deps -r requirements/cpu.txt
	@touch $@

$(VENV)/.runtime: pyproject.toml $(VENV)/.packages
	uv pip install --no-deps --no-build-isolation --quiet -e .
	@ldconfig -p 2>/dev/null | grep libnuma.so.1 >/dev/null || echo "setup: libnuma.so.1 not found; vLLM's CPU build needs it (Debian: package libnuma1)" >&2
	@touch $@

$(VENV)/.dev: requirements/dev-cpu.txt $(VENV)/.runtime
	uv pip install --no-deps -r requirements/dev-cpu.txt
	@touch $@

demo: setup  ## From the verifier to a registered drafter, then the table of results
	dvc repro
	python -m stages.evaluate.summary

serve: setup  ## Start the registered drafter with its verifier, ask it something, keep serving
	@exec python -m stages.deploy.serve

up: setup  ## Start MLflow, Prefect and a worker on 127.0.0.1, and deploy the flows
	@python -m flows.local up

down: setup  ## End what `make up` has started
	@python -m flows.local down

test: $(VENV)/.dev  ## Every check of a change: style, types, tests, the real engine's included
	ruff check .
	mypy
	pytest -m "not benchmark and not long"

test-fast: $(VENV)/.dev  ## The tests that start no engine
	pytest -m "not benchmark and not long and not integration"

test-long: $(VENV)/.dev  ## What takes minutes each: long walks, the 135M verifier's whole way, the rest of the faults (hours)
	pytest -m long --timeout=0

bench: $(VENV)/.dev  ## The measurements behind the README's numbers (hours)
	pytest -m benchmark --timeout=0 tests/benchmarks

schema: setup  ## Write params.schema.json from stages/params.py
	python -m stages.params --schema > params.schema.json.tmp
	mv params.schema.json.tmp params.schema.json

clean:  ## Remove what runs made; the registry (mlflow.db, mlartifacts) and .venv stay
	rm -rf outputs .dvc/cache .dvc/tmp .pytest_cache .mypy_cache .ruff_cache .hypothesis build
