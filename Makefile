# Everything starts here: each target sets up what it needs. `make help` lists them.
#   TORCH=cpu|cuda   which build of torch (default: CUDA where an NVIDIA driver is present)
#   PYTHON=python3   the Python, 3.11 or later, that .venv is made from
#   ARGS="..."       passed on to serve, test, torture, smoke, package, interop and bench
#   TRACE=FILE       a trace in Mooncake's format, for bench
SHELL := /bin/bash
PYTHON ?= python3
ARGS ?=
TRACE ?=
BIN := .venv/bin
# Tests and benchmarks start hundreds of processes: none is to compile the source for itself.
unexport PYTHONDONTWRITEBYTECODE
# One stamp for each wish, so that another TORCH= installs again.
STAMP := .venv/.installed-$(or $(TORCH),auto)

.DEFAULT_GOAL := help
.PHONY: help install serve demo test pure daemons metrics models survive torture check format bench smoke package interop browser clean

help: ## what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## make .venv, or mend it
	@TORCH='$(TORCH)' PYTHON='$(PYTHON)' scripts/install.sh
	@rm -f .venv/.installed-*
	@touch $(STAMP)

$(STAMP): pyproject.toml setup.py deploy/constraints.txt scripts/install.sh
	@$(MAKE) --no-print-directory install

serve: $(STAMP) ## run the daemon: make serve ARGS="--set pool.page_size=64"
	@exec $(BIN)/sglcache serve $(ARGS)

demo: $(STAMP) ## a daemon, a small model, and a conversation that outlives its runner
	@$(BIN)/sglcache demo

test: $(STAMP) ## the tests that need no GPU, no models or programs of others, and few daemons
	@$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

pure: $(STAMP) ## the core as it is written, not compiled: its laws, its instructions, bugs planted in it
	@SGLCACHE_PURE=1 $(BIN)/python -m pytest -m 'pure or core and not survive' tests -n auto --dist loadfile $(ARGS)

check: $(STAMP) ## format, lint, types, layers: what CI holds
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

format: $(STAMP) ## put the source in order
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## all of it, beside its peers: TRACE=FILE, ARGS="--quick"; or one benchmark: ARGS="rpc --help"
ifeq ($(filter-out -%,$(firstword $(ARGS))),)
	@[ -x $(BIN)/py-spy ] && $(BIN)/python -c 'import matplotlib' 2>/dev/null || $(BIN)/python -m pip install -qq --editable '.[dev,bench]'
	@$(if $(findstring --no-peers,$(ARGS)),,PYTHON='$(PYTHON)' scripts/peers.sh ||) true
	@exec $(BIN)/sglcache bench suite $(if $(TRACE),--trace '$(TRACE)') $(ARGS)
else
	@$(BIN)/sglcache bench $(ARGS)
endif

daemons: $(STAMP) ## starts, ports, many ranks, stores, doctors and benchmarks: what takes many daemons
	@$(BIN)/python -m pytest -m daemons tests -n auto --dist loadfile $(ARGS)

metrics: $(STAMP) ## dashboard and alerts against real daemons, with promtool and Prometheus, which it unpacks
	@PROMETHEUS="$$(scripts/promtool.sh)" $(BIN)/python -m pytest -m metrics tests/server/test_metrics_served.py $(ARGS)

models: $(STAMP) ## real models on a daemon's pages, of every kind of layer: the same words from every tier
	@$(BIN)/python -m pytest -m models tests/integrations tests/test_demo.py tests/test_integrate.py -n auto --dist loadfile $(ARGS)

survive: $(STAMP) ## deaths at every point, bad input, overload: nothing lost, leaked or stuck
	@$(BIN)/python -m pytest -m survive tests -n auto --dist loadfile $(ARGS)

torture: $(STAMP) ## break a daemon in every way for ninety seconds; ARGS="--seconds 600 --kind unified"
	@$(BIN)/sglcache torture $(ARGS)

smoke: $(STAMP) ## a daemon, a replay and a subscriber, once through
	@scripts/smoke.sh $(ARGS)

package: $(STAMP) ## the wheel, built and tried where it is all that there is; the Dockerfile, linted
	@PYTHON='$(PYTHON)' scripts/package.sh $(ARGS)

interop: $(STAMP) ## other people's consumers of the stream, and Mooncake's store, which it installs apart
	@PYTHON='$(PYTHON)' scripts/interop.sh $(ARGS)

browser: $(STAMP) ## the page, in headless Chromium, which it installs on Debian where it is missing
	@PYTHON='$(PYTHON)' scripts/browser.sh $(ARGS)

clean: ## remove what the other targets made
	rm -rf .venv .venv-browser .venv-interop .venv-package .venv-peers .bench build dist *.egg-info
	rm -f sglcache__mypyc.*.so sglcache/*.so sglcache/*/*.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find sglcache tests scripts -name __pycache__ -prune -exec rm -rf {} +
