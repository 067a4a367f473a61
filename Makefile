# Everything runs in .venv, which is made by the first target that needs it and renewed when what it was made from changes.
# Variables: PYTHON (the Python that makes .venv), ARGS (passed on to demo, serve and bench), PYTEST_ARGS (passed on to pytest).

SHELL := /bin/bash
BIN := .venv/bin
READY := .venv/.ready
export PYTHON

.PHONY: help setup demo serve test check format bench openapi clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' Makefile

$(READY): pyproject.toml constraints-cpu.txt scripts/setup scripts/install-torch
	@scripts/setup
	@touch $@

setup: $(READY)  ## make .venv and install everything in it
	@echo "Ready in .venv"

demo: $(READY)  ## serve a small model, save hidden states once, show the file, stop
	@$(BIN)/strata demo $(ARGS)

serve: $(READY)  ## run the service until Ctrl-C, for example: make serve ARGS="--port 9000"
	@exec $(BIN)/strata serve $(ARGS)

test: $(READY)  ## every check: lint, types, imports, API description, tests with coverage
	@scripts/check $(PYTEST_ARGS)

check: $(READY)  ## the checks that take seconds: all but the tests
	@scripts/check --fast

format: $(READY)  ## rewrite the code as the formatter wants it
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

openapi: $(READY)  ## write openapi.yaml anew from the code
	@$(BIN)/strata openapi > openapi.yaml.new && mv openapi.yaml.new openapi.yaml

bench: $(READY)  ## measure Strata against others and against the machine, for example: make bench ARGS="all"
	@$(BIN)/python -m benchmarks $(ARGS)

clean:  ## remove .venv, the clients' environments, caches and what demo and bench have written here (not the other files in saves/)
	@rm -rf .venv .venv-clients saves/demo saves/bench build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage*
	@find engine service benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +
