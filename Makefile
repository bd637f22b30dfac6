# Everything here works on a bare machine with Python 3.11+ and can be run again.
PYTHON ?= python3
ENGINE ?= auto
TESTS ?=
BIN := .venv/bin
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup quickstart test test-runtimes lint docs clean
help:
	@echo "make quickstart  record -> fine-tune -> hot-swap on a support-triage team (about 10 minutes, installation included)"
	@echo "make test        set up and run the tests"
	@echo "make test-runtimes   run the recorder's tests on every agent runtime, each in its own environment"
	@echo "make lint        set up and run ruff and pyright"
	@echo "make docs        write the pages under docs/ that come from --help"

setup:
	@$(PYTHON) tools/setup_env.py --engine $(ENGINE)

quickstart: setup
	@$(BIN)/python -m examples.support_triage.quickstart

test: setup
	$(BIN)/python -m pytest $(TESTS)

test-runtimes: setup
	$(BIN)/python tools/runtimes.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python tools/runtimes.py --types

docs: setup
	$(BIN)/python tools/write_docs.py

clean:
	rm -rf .venv .venv-runtimes .cache quickstart-run
